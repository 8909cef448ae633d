//! Writes standard error without ever blocking the program.
//!
//! A pipe that nobody reads is full after 64 KiB, and a further write to it blocks for ever. So a
//! separate thread writes the lines from a queue. If the queue is full, nobody reads, and further
//! lines are dropped.

use std::io::Write;
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;

/// The limit on lines that wait to be written.
const QUEUE_LINES: usize = 64;
/// How long the program waits for pending lines at its end.
const LONGEST_FLUSH: Duration = Duration::from_secs(1);
const TRY_AGAIN: Duration = Duration::from_millis(5);

enum Message {
    Line(String),
    /// Answered when all earlier lines are written.
    Flush(SyncSender<()>),
}

static QUEUE: LazyLock<Option<SyncSender<Message>>> = LazyLock::new(|| {
    let (queue, messages) = sync_channel(QUEUE_LINES);
    // If no thread can be started, nothing is written.
    let writer =
        std::thread::Builder::new().name("stderr".into()).spawn(move || write_all(&messages));
    writer.is_ok().then_some(queue)
});

fn write_all(messages: &Receiver<Message>) {
    // All signals are blocked, because a terminal may stop a background process that writes to it
    // (`stty tostop`).
    let _ = SigSet::all().thread_block();
    for message in messages {
        match message {
            // A full disk or a closed pipe must not stop the program.
            Message::Line(line) => drop(std::io::stderr().write_all(line.as_bytes())),
            Message::Flush(written) => drop(written.send(())),
        }
    }
}

/// Queues a line. Never blocks.
pub(crate) fn write(line: String) {
    let _ = QUEUE.as_ref().map(|queue| queue.try_send(Message::Line(line)));
}

/// Waits until all queued lines are written, but at most 1 s.
pub(crate) fn flush() {
    let Some(queue) = LazyLock::get(&QUEUE).and_then(Option::as_ref) else { return };
    let end = Instant::now() + LONGEST_FLUSH;
    let (written, is_written) = sync_channel(1);
    let mut flush = Message::Flush(written);
    while let Err(TrySendError::Full(again)) = queue.try_send(flush) {
        if Instant::now() > end {
            return;
        }
        flush = again;
        std::thread::sleep(TRY_AGAIN);
    }
    let _ = is_written.recv_timeout(end.saturating_duration_since(Instant::now()));
}
