//! Writes to standard output and standard error with a time limit. A reader may hold a pipe open
//! without reading, and a write to a full pipe blocks.

use std::io::Write;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// The longest time that a stuck output may delay its caller.
const PATIENCE: Duration = Duration::from_millis(1500);

/// Prints to standard output. Gives up when nobody reads it.
pub fn print(text: String) {
    // An error means that the reader is gone.
    for_at_most_patience(move || drop(std::io::stdout().write_all(text.as_bytes())));
}

/// Prints to standard error. Gives up when nobody reads it.
pub fn print_error(text: String) {
    for_at_most_patience(move || drop(std::io::stderr().write_all(text.as_bytes())));
}

/// Runs `work` on a thread and waits for it, for [`PATIENCE`] at most. A stuck thread ends with the
/// process.
pub(crate) fn for_at_most_patience(work: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let thread = thread::Builder::new().name("output".into()).spawn(move || {
        work();
        drop(done);
    });
    if thread.is_ok() {
        // The sender is dropped when the work is done. Nothing is ever sent.
        let _ = ended.recv_timeout(PATIENCE);
    }
}
