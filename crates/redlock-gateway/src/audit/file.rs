//! The file of the audit log. A thread of its own writes it, so a hanging disk delays no request.
//!
//! Lines wait for the disk in order, without a time limit. The thread tries to write a failed line
//! again every second, and at once when the file is reopened. A line that finds the queue full goes
//! to the log. So do lines that are left in the queue when the gateway ends. A killed process loses
//! the lines in the queue.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use metrics::Counter;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::Notify;

/// The target of audit lines in the log.
pub const TARGET: &str = "redlock_audit";

/// Limit on the queue of lines, in bytes: about ten thousand lines.
const MAX_BYTES: usize = 4 << 20;
/// Time between two tries to write a line.
const RETRY: Duration = Duration::from_secs(1);
/// A write that takes longer than this counts as failing.
const HANGS_AFTER: Duration = Duration::from_secs(1);
/// Time limit for writing the queue when the process ends.
const PATIENCE: Duration = Duration::from_secs(5);

/// The audit file cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("--audit-log: {}: {source}", path.display())]
pub struct AuditError {
    path: PathBuf,
    source: io::Error,
}

impl AuditError {
    fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        |source| Self { path: path.to_owned(), source }
    }
}

/// A file that lines are appended to.
pub struct AuditFile(Arc<Shared>);

struct Shared {
    path: PathBuf,
    refuses: bool,
    queue: Mutex<Queue>,
    /// Notified when the queue or its flags change.
    changed: Condvar,
    /// Whether the last write failed, or a line has since found the queue full.
    is_failing: AtomicBool,
    /// When the present write began.
    write_began: Mutex<Option<Instant>>,
    failures: OnceLock<Counter>,
    ended: Notify,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<String>,
    bytes: usize,
    is_reopening: bool,
    is_ending: bool,
}

impl AuditFile {
    /// With `refuses`, no lock may change while the file cannot be written.
    pub(super) fn start(path: &Path, refuses: bool) -> Result<Self, AuditError> {
        let file = open(path)?;
        let shared = Arc::new(Shared {
            path: path.into(),
            refuses,
            queue: Mutex::default(),
            changed: Condvar::new(),
            is_failing: AtomicBool::new(false),
            write_began: Mutex::default(),
            failures: OnceLock::new(),
            ended: Notify::new(),
        });
        let mut writer = Writer { shared: shared.clone(), file, has_partial_line: false };
        let started = std::thread::Builder::new().name("audit".into()).spawn(move || writer.run());
        started.map_err(AuditError::at(path))?;
        Ok(Self(shared))
    }

    /// Checks that lines could be appended, as far as possible without creating the file.
    ///
    /// # Errors
    /// The error that a start would report.
    pub fn check(path: &Path) -> Result<(), AuditError> {
        let there = if path.exists() {
            OpenOptions::new().append(true).open(path).map(drop)
        } else {
            is_for_files(path)
        };
        there.map_err(AuditError::at(path))
    }

    /// Counts failed writes, and lines that found the queue full.
    pub fn count_failures(&self, counter: Counter) {
        let _ = self.0.failures.set(counter);
    }

    /// Continues in a new file of the same name, after the old file was moved away. If the new file
    /// cannot be opened, the old one stays in use.
    pub fn reopen(&self) {
        self.0.queue().is_reopening = true;
        self.0.changed.notify_one();
    }

    /// Whether changes of locks must be refused until lines can be written again.
    pub(super) fn is_refusing(&self) -> bool {
        self.0.refuses && (self.0.is_failing.load(Ordering::Acquire) || self.0.hangs())
    }

    pub(super) fn write(&self, line: String) {
        let mut queue = self.0.queue();
        if queue.is_ending || queue.bytes + line.len() > MAX_BYTES {
            drop(queue);
            self.0.failed();
            lost(&line, &"the queue of lines is full");
            return;
        }
        queue.bytes += line.len();
        queue.lines.push_back(line);
        drop(queue);
        self.0.changed.notify_one();
    }

    /// Resolves when all lines are in the file or in the log, or after 5 s. Later lines go
    /// to the log.
    pub async fn finish(&self) {
        self.end();
        if tokio::time::timeout(PATIENCE, self.0.ended.notified()).await.is_ok() {
            return;
        }
        // A write hangs. The line being written is lost with the process if the write never
        // returns.
        let left = std::mem::take(&mut self.0.queue().lines);
        for line in left {
            self.0.failed();
            lost(&line, &"an earlier write to the file hangs");
        }
    }

    fn end(&self) {
        self.0.queue().is_ending = true;
        self.0.changed.notify_one();
    }
}

impl Drop for AuditFile {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Whether a write has been under way for too long.
    fn hangs(&self) -> bool {
        self.write_began.lock().is_some_and(|began| began.elapsed() > HANGS_AFTER)
    }

    /// Counts a failure. Returns whether it is the first since the last success.
    fn failed(&self) -> bool {
        self.failures.get().into_iter().for_each(|counter| counter.increment(1));
        !self.is_failing.swap(true, Ordering::AcqRel)
    }
}

fn is_for_files(path: &Path) -> io::Result<()> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok(rustix::fs::access(folder, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)?)
}

/// State of the writer thread.
struct Writer {
    shared: Arc<Shared>,
    file: File,
    /// Whether the last write failed. It may have written a part of its line.
    has_partial_line: bool,
}

impl Writer {
    fn run(&mut self) {
        let shared = self.shared.clone();
        loop {
            let is_idle = |queue: &mut Queue| {
                queue.lines.is_empty() && !queue.is_reopening && !queue.is_ending
            };
            let mut queue = shared.queue();
            shared.changed.wait_while(&mut queue, is_idle);
            if std::mem::take(&mut queue.is_reopening) {
                drop(queue);
                self.reopen();
                continue;
            }
            let Some(line) = queue.lines.pop_front() else { break };
            queue.bytes -= line.len();
            drop(queue);
            self.write(line);
        }
        shared.ended.notify_one();
    }

    /// Returns when the line is written. At the end of the process the line may go to the log
    /// instead.
    fn write(&mut self, line: String) {
        let shared = self.shared.clone();
        while let Err(error) = self.append(&line) {
            if shared.failed() {
                tracing::error!(%error, "--audit-log: a line could not be written; the gateway tries again every second");
            }
            let is_patient = |queue: &mut Queue| !queue.is_reopening && !queue.is_ending;
            let mut queue = shared.queue();
            shared.changed.wait_while_for(&mut queue, is_patient, RETRY);
            let reopen = std::mem::take(&mut queue.is_reopening);
            let end = queue.is_ending;
            drop(queue);
            if reopen {
                self.reopen();
            } else if end {
                return lost(&line, &error);
            }
        }
        // The failure counts as over only when half of the queue is free. Otherwise the next lines
        // would fill the queue again.
        let is_failing = shared.is_failing.load(Ordering::Acquire);
        if is_failing && shared.queue().bytes <= MAX_BYTES / 2 {
            shared.is_failing.store(false, Ordering::Release);
            tracing::warn!("--audit-log: lines can be written again");
        }
    }

    /// Appends a line with one write, because other processes may append to the same file.
    fn append(&mut self, line: &str) -> io::Result<()> {
        let start = if self.has_partial_line { "\n" } else { "" };
        *self.shared.write_began.lock() = Some(Instant::now());
        let written = self.file.write_all(format!("{start}{line}\n").as_bytes());
        *self.shared.write_began.lock() = None;
        self.has_partial_line = written.is_err();
        written
    }

    fn reopen(&mut self) {
        match open(&self.shared.path) {
            Ok(file) => (self.file, self.has_partial_line) = (file, false),
            Err(error) => {
                tracing::error!(
                    error = error.to_string(),
                    "--audit-log: the old file stays in use"
                );
            }
        }
    }
}

/// Logs a line that cannot get into the file.
fn lost(line: &str, error: &dyn std::fmt::Display) {
    tracing::error!(target: TARGET, %error, line, "--audit-log: a line could not be written");
}

fn open(path: &Path) -> Result<File, AuditError> {
    // Only the gateway's own user may read the file, because it states who holds which locks.
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
    file.map_err(AuditError::at(path))
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn changes_are_refused_while_a_write_hangs() {
        let path = std::env::temp_dir().join(format!("redlock-hangs-{}", std::process::id()));
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let mut pipe = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let audit = AuditFile::start(&path, true).unwrap();
        let is_refusing = |expected: bool| {
            let end = Instant::now() + Duration::from_secs(20 * 60);
            while audit.is_refusing() != expected {
                assert!(Instant::now() < end, "is_refusing is not {expected}");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        // A pipe holds 64 KiB by default.
        let line = "x".repeat(100 << 10);
        audit.write(line.clone());
        is_refusing(true);
        let mut read = vec![0; line.len() + 1];
        pipe.read_exact(&mut read).unwrap();
        is_refusing(false);
        std::fs::remove_file(&path).unwrap();
    }
}
