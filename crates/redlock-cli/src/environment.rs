//! The environments of other processes, read so that one which hangs holds up nobody.
//!
//! The kernel locks the memory of a process while that is read. Whoever hangs in a driver, or is just being traced or replaced,
//! may keep that lock for as long as it likes, and a read waits for it.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// Less than there is between the runner's KILL, the guardian's, and the deadline. A read that is not held up takes microseconds.
const LONGEST_READ: Duration = Duration::from_millis(100);

/// One thread that reads, also when it hangs: then nothing is read until it goes on.
#[derive(Debug)]
pub(crate) struct Reader {
    asked: Sender<PathBuf>,
    answers: Receiver<Option<Vec<u8>>>,
    /// There was no answer in time, and the one that comes late was not taken away yet.
    hangs: Cell<bool>,
}

impl Default for Reader {
    fn default() -> Self {
        let (asked, questions) = channel::<PathBuf>();
        let (answer, answers) = channel();
        // Where there is no room for a thread, nobody answers.
        let _ = std::thread::Builder::new().name("environments".into()).spawn(move || {
            questions.iter().map(|path| std::fs::read(path).ok()).try_for_each(|read| answer.send(read))
        });
        Self { asked, answers, hangs: Cell::new(false) }
    }
}

impl Reader {
    /// Something was not read since [`Self::begin`] was called.
    pub(crate) fn hangs(&self) -> bool {
        self.hangs.get()
    }

    /// Begins a pass over processes. If what hung goes on only in the middle of one, nothing is read up to its end all the same:
    /// the pass has missed somebody, and says so.
    pub(crate) fn begin(&self) {
        self.hangs.set(self.hangs.get() && self.answers.try_recv().is_err());
    }

    /// Nothing of what may not be read, cannot be read in time, or comes after such a one in the same pass.
    pub(crate) fn read(&self, path: &Path) -> Option<Vec<u8>> {
        if self.hangs.get() {
            return None;
        }
        self.asked.send(path.to_owned()).ok()?;
        let answer = self.answers.recv_timeout(LONGEST_READ);
        self.hangs.set(answer.is_err());
        answer.ok()?
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_read_that_hung_held_up_all_others() {
        let (reader, own) = (Reader::default(), Path::new("/proc/self/environ"));
        assert!(reader.read(own).is_some());
        // Nobody writes to it, and so opening it hangs.
        let fifo = std::env::temp_dir().join(format!("redlock-environment-{}", std::process::id()));
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let begin = Instant::now();
        assert_eq!(reader.read(&fifo), None);
        assert_eq!((0..100).find_map(|_| reader.read(own)), None, "it still hangs");
        assert!(begin.elapsed() < LONGEST_READ * 10, "{:?}", begin.elapsed());
        std::fs::write(&fifo, "not an answer to what comes next").unwrap();
        std::fs::remove_file(&fifo).unwrap();
        let again = std::iter::repeat_with(|| reader.begin()).take_while(|()| begin.elapsed() < LONGEST_READ * 100);
        assert_eq!(again.filter_map(|()| reader.read(own)).next(), std::fs::read(own).ok());
    }

    #[test]
    fn whoever_was_passed_over_was_forgotten_when_the_read_went_on_in_the_same_pass() {
        let (reader, own) = (Reader::default(), Path::new("/proc/self/environ"));
        let fifo = std::env::temp_dir().join(format!("redlock-passed-over-{}", std::process::id()));
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        assert_eq!(reader.read(&fifo), None);
        std::fs::write(&fifo, "").unwrap();
        std::fs::remove_file(&fifo).unwrap();
        // Long enough for the late answer to be there.
        std::thread::sleep(LONGEST_READ);
        assert_eq!(reader.read(own), None);
        assert!(reader.hangs());
    }
}
