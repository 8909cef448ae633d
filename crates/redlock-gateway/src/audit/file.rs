//! The file of the audit log. A thread of its own writes it: a disk that hangs holds up no request.
//!
//! Lines wait for the disk in order, as long as it takes; one that could not be written is tried again every second, and at
//! once when the file is opened anew. What finds no room among those that wait is in the log instead, as is what is left at
//! the end. A process that is killed takes the lines along that wait.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics::Counter;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::Notify;

/// The target of audit lines in the log, where no file has them.
pub const TARGET: &str = "redlock_audit";

/// Of the lines that wait: about ten thousand.
const MOST_BYTES: usize = 4 << 20;
/// How often a line is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// What the end waits for at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// A file that lines are appended to.
pub struct AuditFile(Arc<Shared>);

struct Shared {
    path: PathBuf,
    refuses: bool,
    queue: Mutex<Queue>,
    /// Something of the queue has changed.
    changed: Condvar,
    /// The last write failed, or the last line found no room.
    is_failing: AtomicBool,
    failures: OnceLock<Counter>,
    ended: Notify,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<String>,
    bytes: usize,
    reopen: bool,
    end: bool,
}

impl AuditFile {
    /// `refuses`: whether nothing that changes a lock may go on unrecorded.
    pub(super) fn start(path: &Path, refuses: bool) -> Result<Self, String> {
        let file = open(path)?;
        let shared = Arc::new(Shared {
            path: path.into(),
            refuses,
            queue: Mutex::default(),
            changed: Condvar::new(),
            is_failing: AtomicBool::new(false),
            failures: OnceLock::new(),
            ended: Notify::new(),
        });
        let mut writer = Writer { shared: shared.clone(), file, broken_off: false };
        let started = std::thread::Builder::new().name("audit".into()).spawn(move || writer.run());
        started.map_err(|error| format!("--audit-log: {}: {error}", path.display()))?;
        Ok(Self(shared))
    }

    /// Whether lines could be appended, as far as can be told without making a file.
    ///
    /// # Errors
    /// As the start would have them.
    pub fn check(path: &Path) -> Result<(), String> {
        let there = if path.exists() {
            OpenOptions::new().append(true).open(path).map(drop)
        } else {
            is_for_files(path)
        };
        there.map_err(|error| format!("--audit-log: {}: {error}", path.display()))
    }

    /// Counts writes that fail and lines that find no room.
    pub fn count_failures(&self, counter: Counter) {
        let _ = self.0.failures.set(counter);
    }

    /// Goes on in a new file of the same name, after the old one was moved away. What cannot be opened changes nothing.
    pub fn reopen(&self) {
        self.0.queue().reopen = true;
        self.0.changed.notify_one();
    }

    /// Whether requests have to wait until lines can be written again.
    pub(super) fn is_refusing(&self) -> bool {
        self.0.refuses && self.0.is_failing.load(Ordering::Acquire)
    }

    pub(super) fn write(&self, line: String) {
        let mut queue = self.0.queue();
        if queue.end || queue.bytes + line.len() > MOST_BYTES {
            drop(queue);
            self.0.failed();
            lost(&line, &"there is no room among the lines that wait");
            return;
        }
        queue.bytes += line.len();
        queue.lines.push_back(line);
        drop(queue);
        self.0.changed.notify_one();
    }

    /// Resolves when all lines are written, or are in the log, or have taken too long. Nothing is taken after that.
    pub async fn finish(&self) {
        self.end();
        let _ = tokio::time::timeout(PATIENCE, self.0.ended.notified()).await;
    }

    fn end(&self) {
        self.0.queue().end = true;
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

    /// Answers whether nothing had failed before.
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

/// What the thread works with.
struct Writer {
    shared: Arc<Shared>,
    file: File,
    /// The last write failed, perhaps in the middle of its line.
    broken_off: bool,
}

impl Writer {
    fn run(&mut self) {
        let shared = self.shared.clone();
        loop {
            let is_idle = |queue: &mut Queue| queue.lines.is_empty() && !queue.reopen && !queue.end;
            let mut queue = shared.queue();
            shared.changed.wait_while(&mut queue, is_idle);
            if std::mem::take(&mut queue.reopen) {
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

    /// Returns when the line is written, or at the end.
    fn write(&mut self, line: String) {
        let shared = self.shared.clone();
        while let Err(error) = self.append(&line) {
            if shared.failed() {
                tracing::error!(%error, "--audit-log: a line could not be written; it is tried again every second");
            }
            let is_patient = |queue: &mut Queue| !queue.reopen && !queue.end;
            let mut queue = shared.queue();
            shared.changed.wait_while_for(&mut queue, is_patient, RETRY);
            let reopen = std::mem::take(&mut queue.reopen);
            let end = queue.end;
            drop(queue);
            if reopen {
                self.reopen();
            } else if end {
                return lost(&line, &error);
            }
        }
        // Not with the first room that there is: it would be gone with the next line.
        let is_failing = shared.is_failing.load(Ordering::Acquire);
        if is_failing && shared.queue().bytes <= MOST_BYTES / 2 {
            shared.is_failing.store(false, Ordering::Release);
            tracing::warn!("--audit-log: lines can be written again");
        }
    }

    /// One write for a line: other processes may append to the same file.
    fn append(&mut self, line: &str) -> io::Result<()> {
        let start = if self.broken_off { "\n" } else { "" };
        let written = self.file.write_all(format!("{start}{line}\n").as_bytes());
        self.broken_off = written.is_err();
        written
    }

    fn reopen(&mut self) {
        match open(&self.shared.path) {
            Ok(file) => (self.file, self.broken_off) = (file, false),
            Err(error) => tracing::error!(error, "--audit-log: it goes on in the old file"),
        }
    }
}

/// Not without a trace: the log has it instead.
fn lost(line: &str, error: &dyn std::fmt::Display) {
    tracing::error!(target: TARGET, %error, line, "--audit-log: a line could not be written");
}

fn open(path: &Path) -> Result<File, String> {
    // Which locks are held by whom is not for every user of the machine.
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
    file.map_err(|error| format!("--audit-log: {}: {error}", path.display()))
}
