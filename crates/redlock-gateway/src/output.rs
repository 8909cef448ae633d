//! Writes to standard output and standard error with a time limit. A program at the other end of a
//! pipe may stop reading, and a write to a full pipe blocks. After the limit, the caller goes on.

use std::io::Write;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// The longest time that a stuck output may delay its caller.
const PATIENCE: Duration = Duration::from_millis(1500);

/// Prints to standard output. Returns after 1.5 s at the latest, even if nobody reads the text.
pub fn print(text: String) {
    // An error is ignored: it means that the reader is gone.
    for_at_most_patience(move || drop(std::io::stdout().write_all(text.as_bytes())));
}

/// Prints to standard error. Returns after 1.5 s at the latest, even if nobody reads the text.
pub fn print_error(text: String) {
    for_at_most_patience(move || drop(std::io::stderr().write_all(text.as_bytes())));
}

/// Runs `work` on a thread of its own. Waits until `work` is done, but for [`PATIENCE`] at most. A
/// thread that is still stuck then ends with the process.
pub(crate) fn for_at_most_patience(work: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let thread = thread::Builder::new().name("output".into()).spawn(move || {
        work();
        drop(done);
    });
    if thread.is_ok() {
        // The thread sends nothing. It drops the sender when the work is done, and that ends the
        // wait.
        let _ = ended.recv_timeout(PATIENCE);
    }
}
