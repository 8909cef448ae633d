//! Standard error, written to so that nobody waits for whoever reads it.
//!
//! A pipe that nobody reads is full after 64 KiB, and a write to it lasts for ever. A thread of its own writes, and what finds
//! no room in its queue is dropped: nobody reads it.

use std::io::Write;
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;

/// Lines that may wait.
const ROOM: usize = 64;
/// For what is still to be written when the program ends.
const LONGEST_FLUSH: Duration = Duration::from_secs(1);
const TRY_AGAIN: Duration = Duration::from_millis(5);

enum Message {
    Line(String),
    /// Answered when all that came before is written.
    Flush(SyncSender<()>),
}

static QUEUE: LazyLock<Option<SyncSender<Message>>> = LazyLock::new(|| {
    let (queue, messages) = sync_channel(ROOM);
    // Where there is no room for a thread nothing is told.
    let writer =
        std::thread::Builder::new().name("stderr".into()).spawn(move || write_all(&messages));
    writer.is_ok().then_some(queue)
});

fn write_all(messages: &Receiver<Message>) {
    // A terminal may stop those who write to it from the background (`stty tostop`).
    let _ = SigSet::all().thread_block();
    for message in messages {
        match message {
            // A full disk, a closed pipe: what is to be done is done nevertheless.
            Message::Line(line) => drop(std::io::stderr().write_all(line.as_bytes())),
            Message::Flush(written) => drop(written.send(())),
        }
    }
}

/// Never waits.
pub(crate) fn write(line: String) {
    let _ = QUEUE.as_ref().map(|queue| queue.try_send(Message::Line(line)));
}

/// Waits until everything is written, for a second at most.
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
