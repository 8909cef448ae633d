//! Writes log lines in a thread of its own. An unread log blocks its writer, and a blocked task
//! could hold up its runtime, and with it the extension of all locks and the report of a loss.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::{Dispatch, Span, dispatcher};

/// The number of waiting lines. Further lines are dropped.
const MAX_LINES: usize = 1_000;
/// How long a result waits for its log line, because the process may end after the result.
const LAST_LINE: Duration = Duration::from_millis(500);

type Line = Box<dyn FnOnce() + Send>;

/// Lets the writer's thread emit a line, to the caller's subscriber and in the caller's span.
/// Resolves when the line is written or dropped.
pub(crate) fn write(line: impl FnOnce() + Send + 'static) -> oneshot::Receiver<()> {
    static LINES: OnceLock<Option<SyncSender<Line>>> = OnceLock::new();
    let (is_written, written) = oneshot::channel();
    let (subscriber, span) = (dispatcher::get_default(Dispatch::clone), Span::current());
    let line = Box::new(move || {
        dispatcher::with_default(&subscriber, || span.in_scope(line));
        let _ = is_written.send(());
    });
    if let Some(lines) = LINES.get_or_init(start) {
        let _ = lines.try_send(line);
    }
    written
}

/// Waits for a line, for a limited time.
pub(crate) async fn written(line: oneshot::Receiver<()>) {
    let _ = tokio::time::timeout(LAST_LINE, line).await;
}

/// Starts the writer's thread. `None` if no thread can be started: then all lines are dropped.
fn start() -> Option<SyncSender<Line>> {
    let (lines, waiting) = sync_channel::<Line>(MAX_LINES);
    let write = move || {
        for line in waiting {
            // After a panic the subscriber may still write the next line.
            let _ = catch_unwind(AssertUnwindSafe(line));
        }
    };
    thread::Builder::new().name("redlock-log".into()).spawn(write).ok().map(|_| lines)
}

#[cfg(test)]
mod tests {
    use std::io::{PipeWriter, Read, Write, pipe};
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Sender, channel};
    use std::time::Instant;

    use serde_json::json;
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber, subscriber};

    use crate::{Client, Lock, LossReason};

    use super::*;

    /// Ends a test that hangs, and never a test on a slow machine.
    const PATIENCE: Duration = Duration::from_secs(10 * 60);

    /// All tests share the writer. While one test blocks it, no line of another test is written.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    /// The number of lines that were written to pipes that somebody reads.
    static WRITTEN: AtomicUsize = AtomicUsize::new(0);

    /// A log that writes each line to a pipe.
    struct Log(PipeWriter);

    impl Subscriber for Log {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            if event.metadata().target().starts_with("redlock_client") {
                let line = format!("{event:?}\n");
                // More than fits into a pipe that nobody reads.
                let line = line.repeat(1 + (1 << 20) / line.len());
                if (&self.0).write_all(line.as_bytes()).is_ok() {
                    WRITTEN.fetch_add(1, Ordering::SeqCst);
                }
            }
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    /// Makes a lock at a gateway that grants it, answers 404 to each extension, and refuses each
    /// release. With a long wait, the client repeats a request that a slow machine answers late.
    fn lock(ttl: Duration) -> Lock {
        let client = Client::new(format!("http://{}", gateway(ttl))).unwrap();
        client.lock("a").ttl(ttl).wait(PATIENCE)
    }

    fn gateway(ttl: Duration) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || {
            for client in listener.incoming() {
                thread::spawn(move || serve(client.unwrap(), ttl));
            }
        });
        address
    }

    fn serve(mut client: TcpStream, ttl: Duration) {
        let mut request = [0; 4_096];
        while let Ok(read @ 1..) = client.read(&mut request) {
            let problem = |status, code| {
                (status, format!(r#"{{"status":{status},"code":"{code}","detail":"d"}}"#))
            };
            let (status, body) = match &request[..read] {
                [b'P', b'O', ..] => {
                    let lease = json!({
                        "name": "a", "token": "1.1", "fencing_token": 1,
                        "ttl_ms": ttl.as_millis(), "validity_ms": ttl.as_millis(),
                        "elapsed_ms": 0, "expires_at": "",
                        "nodes_granted": 2, "nodes_total": 3,
                    });
                    (201, lease.to_string())
                }
                [b'P', b'A', ..] => problem(404, "lock_not_found"),
                [b'D', ..] => problem(403, "forbidden"),
                // The body of a request.
                _ => continue,
            };
            let head = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n", body.len());
            // The client may have given up this try.
            let _ = client.write_all(format!("{head}{body}").as_bytes());
        }
    }

    /// Runs `work` in a runtime of one thread with a log that nobody reads, and waits for what it
    /// reports.
    fn with_unread_log<T: Send + 'static>(
        ttl: Duration,
        work: impl AsyncFnOnce(Lock, Sender<T>) + Send + 'static,
    ) -> T {
        let _alone = ONE_AT_A_TIME.lock();
        let (report, reported) = channel();
        let (_unread, log) = pipe().unwrap();
        let lock = lock(ttl);
        thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            subscriber::with_default(Log(log), || runtime.unwrap().block_on(work(lock, report)));
        });
        reported.recv_timeout(PATIENCE).expect("the log holds up nothing")
    }

    #[test]
    fn unread_log_holds_up_no_report_of_a_loss() {
        let loss = with_unread_log(Duration::from_secs(3), async |lock, report| {
            let guard = lock.acquire().await.unwrap();
            report.send(guard.lost().await).unwrap();
        });
        // A busy machine may miss the deadline before the gateway answers.
        let is_expected =
            matches!(loss.reason, LossReason::Gone { .. } | LossReason::Unconfirmed { .. });
        assert!(is_expected, "{loss}");
    }

    #[test]
    fn hold_returns_after_its_line_is_written() {
        let _alone = ONE_AT_A_TIME.lock();
        let (mut reads, log) = pipe().unwrap();
        let reader = thread::spawn(move || reads.read_to_end(&mut Vec::new()));
        let lock = lock(PATIENCE);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        subscriber::with_default(Log(log), || {
            let mut ended = None;
            let work = async |_: &_| ended = Some(Instant::now());
            runtime.unwrap().block_on(lock.hold(work)).unwrap();
            // After LAST_LINE `hold` returns even if its line is not written yet. On a busy machine
            // writing may take that long.
            let may_miss_its_line = ended.unwrap().elapsed() >= LAST_LINE;
            assert!(WRITTEN.load(Ordering::SeqCst) > 0 || may_miss_its_line);
        });
        reader.join().unwrap().unwrap();
    }

    #[test]
    fn unread_log_holds_up_no_end_of_hold() {
        let held = with_unread_log(PATIENCE, async |lock, report| {
            report.send(lock.hold(async |_| 7).await).unwrap();
        });
        assert_eq!(held.unwrap(), 7);
    }
}
