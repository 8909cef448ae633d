//! The core's link over the simulated network: it carries the messages between a core worker and
//! its master. The worker runs the real driver, which decides when to send and how to react.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use redlock_core::node::link::{
    Answer, Answering, Link, LinkError, LinkErrorKind, MarkerSwap, ProbeReply, RecoveryAnswer,
    RecoveryBatch, Scan, Scanned, Session, Stored, StoredPage, Subscription, Swapped,
};
use redlock_core::node::{Engine, Hint, Keys, NodeSettings, Task};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::history::Recorder;
use crate::master::{Arrival, KEY_PREFIX, Master, Question, Reply};
use crate::network::{Connection, Network};

/// A question or call without an answer after this time ends the connection.
pub const CALL_DEADLINE: Duration = Duration::from_secs(1);
/// Number of locks in one page when a master lists its stored locks.
const PAGE: usize = 2;

/// One gateway's way to one master.
#[derive(Clone)]
pub struct SimLink {
    gateway: u8,
    /// The identity under which the master stores this gateway's number. A restarted gateway has
    /// another one.
    id: u64,
    master: Arc<Master>,
    network: Arc<Network>,
    recorder: Arc<Recorder>,
    /// The gateway's settings.
    settings: NodeSettings,
    current: Arc<Mutex<Current>>,
}

/// The current connections, so that faults can break them and checks can look at them.
#[derive(Default)]
struct Current {
    calls: Option<Arc<Connection>>,
    hints: Option<Arc<Connection>>,
    admitted: Option<Instant>,
}

impl SimLink {
    /// A link without a connection.
    pub fn new(
        gateway: u8,
        master: Arc<Master>,
        network: Arc<Network>,
        recorder: Arc<Recorder>,
        settings: NodeSettings,
    ) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { gateway, id, master, network, recorder, settings, current: Arc::default() }
    }

    /// Breaks the current connection. With `hints` the connection for hints breaks too.
    pub fn cut(&self, why: &str, hints: bool) {
        let current = self.current();
        let hints = current.hints.as_ref().filter(|_| hints);
        current.calls.iter().chain(hints).for_each(|connection| connection.end(why));
    }

    /// When the gateway began to let the master vote. `None` if it does not.
    pub fn admitted_since(&self) -> Option<Instant> {
        self.current().admitted
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn open(self) -> Result<Arc<Connection>, LinkError> {
        let path = (self.gateway, self.master.index);
        let opened = self.network.connect(path, || self.master.listening()).await;
        opened.inspect(|connection| self.master.accept(connection)).map_err(LinkError::broken)
    }

    fn note(&self, text: String) {
        self.recorder.note(format!("g{} of n{}", self.gateway, self.master.index), text);
    }
}

impl Link for SimLink {
    fn connect(&self) -> Answering<Box<dyn Session>> {
        let link = self.clone();
        async move {
            let connection = link.clone().open().await?;
            let mut current = link.current();
            if current.calls.as_ref().is_none_or(|calls| calls.has_ended()) {
                current.calls = Some(connection.clone());
            }
            drop(current);
            Ok(Box::new(SimSession {
                calls: Arc::default(),
                link,
                connection,
                marker: Arc::default(),
            }) as Box<dyn Session>)
        }
        .boxed()
    }

    fn subscribe(&self, _nonce: u64) -> Answering<Box<dyn Subscription>> {
        let link = self.clone();
        let opened = async move {
            let connection = link.clone().open().await?;
            link.current().hints = Some(connection.clone());
            let (to, hints) = mpsc::unbounded_channel();
            let subscription = SimSubscription { master: link.master.clone(), connection, hints };
            match ask(&link.master, &subscription.connection, Question::Listen(to)).await? {
                Reply::Listening => Ok(Box::new(subscription) as Box<dyn Subscription>),
                _ => Err(confused()),
            }
        };
        async {
            timeout(CALL_DEADLINE, opened)
                .await
                .unwrap_or_else(|_| Err(LinkError::broken("no answer in time")))
        }
        .boxed()
    }
}

/// One connection to one process of a master. After the session is dropped, its messages may still
/// arrive.
struct SimSession {
    /// Each call under way holds one clone, so that overlapping calls can be counted.
    calls: Arc<()>,
    link: SimLink,
    connection: Arc<Connection>,
    marker: Arc<OnceLock<String>>,
}

/// Sends a question at once, before the result is awaited. The answer may never come.
fn ask(master: &Arc<Master>, connection: &Arc<Connection>, question: Question) -> Answering<Reply> {
    let (to, answer) = oneshot::channel();
    let master = master.clone();
    let connection = connection.clone();
    let arrival = Arrival { connection: connection.clone(), question, answer: to };
    connection.send(move || master.arrive(arrival));
    async move {
        tokio::select! {
            biased;
            Ok(reply) = answer => Ok(reply),
            why = connection.ended() => Err(LinkError::broken(why)),
        }
    }
    .boxed()
}

fn confused() -> LinkError {
    LinkError::new(LinkErrorKind::Error, "the answer belongs to another question")
}

impl Session for SimSession {
    fn probe(&self) -> Answering<ProbeReply> {
        if Arc::strong_count(&self.calls) > 1 {
            self.link.recorder.situation("probes beside calls");
        }
        let answer = ask(&self.link.master, &self.connection, Question::Probe(self.link.id));
        async {
            match answer.await? {
                Reply::Seen(facts, marker, is_caught_up, number) => {
                    Ok(ProbeReply { facts, marker, is_caught_up, number })
                }
                _ => Err(confused()),
            }
        }
        .boxed()
    }

    fn swap_marker(&self, swap: MarkerSwap) -> Answering<Swapped> {
        // The last part of a marker is the state of the process.
        let state = swap.to.rsplit(':').next().unwrap_or(&swap.to);
        self.link.note(format!("writes marker {state}"));
        let answer = ask(&self.link.master, &self.connection, Question::Swap(swap));
        async {
            match answer.await? {
                Reply::Swapped(swapped) => Ok(swapped),
                _ => Err(confused()),
            }
        }
        .boxed()
    }

    fn scan(&self, Scan { key_prefix, cursor, count }: Scan) -> Answering<Scanned> {
        let page = self.stored(Some(cursor), Duration::MAX);
        async move {
            let StoredPage { stored, next } = page.await?;
            let keys = stored.into_iter().map(|lock| Keys::new(KEY_PREFIX, &lock.name).lock);
            Ok(Scanned {
                keys: keys.filter(|key| key.starts_with(&key_prefix)).collect(),
                count,
                next,
            })
        }
        .boxed()
    }

    fn stored(&self, cursor: Option<Bytes>, longest_life: Duration) -> Answering<StoredPage> {
        let page = cursor.and_then(|cursor| String::from_utf8_lossy(&cursor).parse::<usize>().ok());
        let answer = ask(&self.link.master, &self.connection, Question::Stored);
        async move {
            match answer.await? {
                // A page may repeat locks of the page before, as SCAN does on a real server.
                Reply::Stored(stored) => {
                    let from = page.unwrap_or(0);
                    let all = stored.len();
                    let limited = |lock: Stored| {
                        let is_ours = lock.record.parse().is_some();
                        let longest = if is_ours { longest_life } else { Duration::MAX };
                        Stored { expires_in: lock.expires_in.min(longest), ..lock }
                    };
                    let page = stored.into_iter().skip(from.saturating_sub(1)).take(PAGE + 1);
                    let stored = page.map(limited).collect();
                    let next = (all > from + PAGE).then(|| Bytes::from((from + PAGE).to_string()));
                    Ok(StoredPage { stored, next })
                }
                _ => Err(confused()),
            }
        }
        .boxed()
    }

    fn recover(&self, recovery: RecoveryBatch) -> Answering<RecoveryAnswer> {
        self.link.note(format!("recovers {} locks", recovery.puts.len()));
        let answer = ask(&self.link.master, &self.connection, Question::Recover(recovery));
        async {
            match answer.await? {
                Reply::Recovered(Some(recovered)) => Ok(recovered),
                Reply::Recovered(None) => {
                    Err(LinkError::new(LinkErrorKind::Error, "OOM no memory left"))
                }
                _ => Err(confused()),
            }
        }
        .boxed()
    }

    fn mark_caught_up(&self, marker: &str) -> Answering<()> {
        let answer =
            ask(&self.link.master, &self.connection, Question::CaughtUp(marker.to_owned()));
        async { answer.await.map(drop) }.boxed()
    }

    /// The time in the answer to an empty call. Every answer to a call carries the master's time.
    fn time_micros(&self) -> Answering<i64> {
        let answer = self.call(&[], 0);
        async { answer.await?.time_micros.ok_or_else(confused) }.boxed()
    }

    /// A real session loads its script here. The simulation makes a probe instead, because it also
    /// takes one round trip.
    fn load(&self, _run_id: &str, marker: &str) -> Answering<Engine> {
        let look = self.probe();
        let link = self.link.clone();
        let loaded = self.marker.clone();
        let connection = self.connection.clone();
        let marker = marker.to_owned();
        async move {
            look.await?;
            drop(loaded.set(marker));
            let mut current = link.current();
            // Listing and catching up open connections of their own while the driver's connection
            // votes. Those connections do not count.
            let is_drivers =
                current.calls.as_ref().is_some_and(|calls| Arc::ptr_eq(calls, &connection));
            if is_drivers || current.admitted.is_none() {
                (current.calls, current.admitted) = (Some(connection), Some(Instant::now()));
            }
            drop(current);
            link.recorder.count(|counts| counts.admissions += 1);
            Ok(Engine::Lua)
        }
        .boxed()
    }

    fn call(&self, tasks: &[Task], number: u64) -> Answering<Answer> {
        let marker = self.marker.get().cloned().unwrap_or_default();
        if Arc::strong_count(&self.calls) > 1 {
            self.link.recorder.situation("overlapping calls");
        }
        let under_way = self.calls.clone();
        let ops = tasks.iter().map(|task| task.op.clone()).collect();
        let answer = ask(
            &self.link.master,
            &self.connection,
            Question::Call {
                marker,
                settings: self.link.settings,
                number: (self.link.id, number),
                ops,
            },
        );
        async move {
            let answer = answer.await;
            drop(under_way);
            match answer? {
                Reply::Answer(answer) => Ok(answer),
                Reply::NoScript => {
                    let detail = "the node was restarted or its scripts were flushed";
                    Err(LinkError::new(LinkErrorKind::NoScript, detail))
                }
                _ => Err(confused()),
            }
        }
        .boxed()
    }

    fn closed(&self) -> BoxFuture<'static, String> {
        let connection = self.connection.clone();
        async move { connection.ended().await }.boxed()
    }
}

impl Drop for SimSession {
    fn drop(&mut self) {
        self.connection.end("the gateway dropped the connection");
        let mut current = self.link.current();
        // Connections that only check which process the name leads to do not count.
        if current.calls.as_ref().is_some_and(|calls| Arc::ptr_eq(calls, &self.connection)) {
            (current.calls, current.admitted) = (None, None);
        }
    }
}

struct SimSubscription {
    master: Arc<Master>,
    connection: Arc<Connection>,
    hints: mpsc::UnboundedReceiver<Hint>,
}

impl Subscription for SimSubscription {
    fn next(&mut self) -> BoxFuture<'_, Result<Hint, LinkError>> {
        async {
            tokio::select! {
                biased;
                why = self.connection.ended() => Err(LinkError::broken(why)),
                // If the channel has ended, the master restarted and lost its listeners.
                hint = self.hints.recv() => hint.ok_or_else(|| LinkError::broken("the subscription has ended")),
            }
        }
        .boxed()
    }

    fn ping(&self) -> Answering<()> {
        ask(&self.master, &self.connection, Question::Probe(0))
            .map(|answer| answer.map(drop))
            .boxed()
    }
}

impl Drop for SimSubscription {
    fn drop(&mut self) {
        self.connection.end("the gateway dropped the connection");
    }
}
