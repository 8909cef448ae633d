//! Writing to standard output and standard error. Their reader may hold the pipe open without reading, and a write to a
//! full pipe blocks. So each write has a time limit.

use std::io::Write;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// The longest time that a stuck output holds up its caller.
const PATIENCE: Duration = Duration::from_millis(1500);

/// Prints to standard output, unless nobody reads it.
pub fn print(text: String) {
    // An error means that the reader is gone.
    for_at_most_patience(move || drop(std::io::stdout().write_all(text.as_bytes())));
}

/// Prints to standard error, unless nobody reads it.
pub fn print_error(text: String) {
    for_at_most_patience(move || drop(std::io::stderr().write_all(text.as_bytes())));
}

/// Leaves work that is stuck to a thread, which ends with the process.
pub(crate) fn for_at_most_patience(work: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let thread = thread::Builder::new().name("output".into()).spawn(move || {
        work();
        drop(done);
    });
    if thread.is_ok() {
        // The sender goes when the work is done. Nothing is ever sent.
        let _ = ended.recv_timeout(PATIENCE);
    }
}
