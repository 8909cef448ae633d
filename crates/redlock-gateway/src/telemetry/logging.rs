//! The log, on standard output, with the level of RUST_LOG.
//!
//! A thread of its own writes the lines. If the reader of standard output is slower than the log,
//! lines are lost, but no request is delayed. Audit lines have a queue and a thread for themselves,
//! so that no other lines push them out.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, Stdout, Write};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::Metadata;
use tracing_appender::non_blocking::{ErrorCounter, NonBlocking, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::{LevelFilter, ParseError, Targets};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::audit;
use crate::config::LogFormat;
use crate::output;

/// Limit on each queue of lines. Most lines are shorter than 500 bytes: 4 MiB.
const MAX_QUEUED_LINES: usize = 8192;

/// Count lines that found their queue full. A process has only one log.
static OVERFLOWED: OnceLock<[ErrorCounter; 2]> = OnceLock::new();
/// Counts lines that the system could not write, as on a full disk.
static UNWRITABLE: AtomicUsize = AtomicUsize::new(0);

/// The number of log lines that were lost so far.
pub(super) fn dropped_lines() -> u64 {
    let overflowed: usize =
        OVERFLOWED.get().into_iter().flatten().map(ErrorCounter::dropped_lines).sum();
    (overflowed + UNWRITABLE.load(Ordering::Relaxed)) as u64
}

/// The words of RUST_LOG. `None` if it has none: then the default applies.
fn asked() -> Option<Vec<String>> {
    let text = std::env::var_os("RUST_LOG")?.to_string_lossy().into_owned();
    let words = text.split(',').map(str::trim).filter(|word| !word.is_empty());
    Some(words.map(str::to_owned).collect()).filter(|words: &Vec<_>| !words.is_empty())
}

const EXPECTED: &str =
    "expected a level (error, warn, info, debug, trace, off) or target=level, separated by commas";

/// RUST_LOG is no filter.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    #[error("RUST_LOG: {text:?} is not allowed: {word:?} is not a level; {EXPECTED}")]
    NoLevel { text: String, word: String },
    #[error("RUST_LOG: {text:?} is not allowed: {source}; {EXPECTED}")]
    NoFilter { text: String, source: ParseError },
}

/// Checks RUST_LOG.
///
/// # Errors
/// RUST_LOG is set to something that is no filter.
pub fn check_filter() -> Result<(), FilterError> {
    let Some(words) = asked() else { return Ok(()) };
    let text = words.join(",");
    // The library takes any other word for a target. With `RUST_LOG=inof`, for example, it would
    // log only the target `inof`, so nothing.
    let is_known = |word: &&String| {
        let is_target = word.contains('=') || word.contains("::");
        !word.contains('[') && (is_target || word.parse::<LevelFilter>().is_ok())
    };
    match (words.iter().find(|word| !is_known(word)), text.parse::<Targets>()) {
        (None, Ok(_)) => Ok(()),
        (Some(word), _) => Err(FilterError::NoLevel { word: word.clone(), text }),
        (None, Err(source)) => Err(FilterError::NoFilter { text, source }),
    }
}

/// Keeps the log running. When this is dropped, the queued lines are written, within a time limit.
#[must_use]
pub struct Log([Option<WorkerGuard>; 2]);

impl Drop for Log {
    fn drop(&mut self) {
        // When the library's guard is dropped, it waits for 1 s at most. But it may then print an
        // error to the same full pipe, and block.
        let guards = std::mem::take(&mut self.0);
        output::for_at_most_patience(move || drop(guards));
    }
}

/// The queues of the log.
struct Queues {
    lines: NonBlocking,
    audit: NonBlocking,
}

impl<'a> MakeWriter<'a> for Queues {
    type Writer = NonBlocking;

    fn make_writer(&'a self) -> NonBlocking {
        self.lines.clone()
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> NonBlocking {
        let is_audit = event.target() == audit::TARGET;
        if is_audit { self.audit.clone() } else { self.make_writer() }
    }
}

/// Standard output that counts the lines it cannot write.
struct Counting(Stdout);

impl Write for Counting {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    /// Called once per line.
    fn write_all(&mut self, line: &[u8]) -> io::Result<()> {
        let written = self.0.write_all(line);
        UNWRITABLE.fetch_add(usize::from(written.is_err()), Ordering::Relaxed);
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// What is logged: what RUST_LOG asks for, `info` by default.
fn filter() -> Targets {
    let text = asked().map(|words| words.join(",")).filter(|text| text.parse::<Targets>().is_ok());
    let text = text.as_deref().unwrap_or("info,fred=off,rustls=off");
    let asked = text.parse::<Targets>().unwrap_or_default();
    // Any client can cause a warning of the HTTP/2 library with each frame that it sends. So they are
    // off, unless RUST_LOG names the library.
    let silent =
        if text.contains("h2") { asked } else { asked.with_target("h2", LevelFilter::OFF) };
    // Audit lines, which report denied requests, are always logged.
    silent.with_target(audit::TARGET, LevelFilter::INFO)
}

/// Starts the log on standard output. RUST_LOG sets the level, `info` by default. Panics are
/// logged.
pub fn start_logging(format: LogFormat) -> Log {
    let queue = |thread| {
        let queue =
            NonBlockingBuilder::default().lossy(true).buffered_lines_limit(MAX_QUEUED_LINES);
        queue.thread_name(thread).finish(Counting(io::stdout()))
    };
    let (lines, guard_of_lines) = queue("log");
    let (audit, guard_of_audit) = queue("log-audit");
    let overflowed = [lines.error_counter(), audit.error_counter()];
    let queues = Queues { lines, audit };
    // By default the library reports its own errors on standard error, which may be stuck or closed
    // too. So that is turned off.
    let lines = tracing_subscriber::fmt::layer().with_writer(queues).log_internal_errors(false);
    let log = tracing_subscriber::registry().with(filter());
    let started = match format {
        LogFormat::Text => log.with(lines).try_init(),
        LogFormat::Json => log.with(lines.json().flatten_event(true)).try_init(),
    };
    // If the process has a log already, that log stays.
    if started.is_ok() {
        let _ = OVERFLOWED.set(overflowed);
        std::panic::set_hook(Box::new(log_panic));
    }
    // The lines of the audit log are written first.
    Log([Some(guard_of_audit), Some(guard_of_lines)])
}

/// Logs a panic. The default hook writes to standard error, which may block the thread.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let backtrace = Backtrace::capture();
    let is_captured = backtrace.status() == BacktraceStatus::Captured;
    tracing::error!(
        place = panic.location().map(tracing::field::display),
        backtrace = is_captured.then(|| tracing::field::display(&backtrace)),
        "panicked: {}",
        panic.payload_as_str().unwrap_or("no text")
    );
}
