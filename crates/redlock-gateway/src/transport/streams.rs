//! The streams of one HTTP/2 connection, and what bounds them (RFC 9113).
//!
//! Each stream carries one request. The gateway's limits count requests, so they apply to both
//! protocols. The table lists the attacks that only HTTP/2 allows:
//!
//! | attack | bound |
//! | --- | --- |
//! | many streams | [`MAX_STREAMS`] of one connection; each after the first takes a connection slot |
//! | many streams without a slot | few refusals at a time, then REFUSED_STREAM (`connections`) |
//! | large or endless request heads | the limit of HTTP/1.1; `frames` passes on whole heads only |
//! | many short fields | the limit of HTTP/1.1 (`connection`) |
//! | a header table whose entries keep whole request heads | a table of size 0 (`frames`) |
//! | unread or tiny bodies | the windows; `h2` also counts tiny DATA frames |
//! | resets by the client, or provoked by it | [`RESETS`], refilled slowly |
//! | a client that never opens the window of an answer | [`STALLED`], then that stream is reset |
//! | PING, SETTINGS and other frames without requests | counted by `frames` |
//! | silence | a PING after [`PING_INTERVAL`]; the idle timeout while there is no stream |
//!
//! This module does not know requests.

use std::error::Error;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use http_body::Body;
use hyper::body::Incoming;
use hyper::rt::bounds::Http2ServerConnExec;
use hyper::rt::{Executor, Read, Write};
use hyper::server::conn::http2;
use hyper::service::HttpService;
use hyper_util::rt::TokioTimer;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::overload::capacity;
use crate::telemetry::Flood;
use crate::transport::connections::ConnectionSlot;

/// Requests that one connection may have under way. A client that needs more opens another
/// connection. RFC 9113, section 6.5.2, recommends at least 100.
const MAX_STREAMS: u32 = 100;
/// Bytes of a request body that may arrive before the gateway reads them: of one stream, and of all
/// streams of a connection. HTTP/2 starts every connection with the second figure, and it cannot be
/// lowered.
const STREAM_WINDOW: u32 = 32 * 1024;
const CONNECTION_WINDOW: u32 = 65_535;
/// When the library keeps this many bytes of an answer for the network, it takes no further piece.
/// Most answers are smaller.
const SEND_BUFFER: usize = 1024;
/// Largest piece of an answer that is handed to the library at once, in bytes.
pub(crate) const PIECE: usize = 4 * 1024;
/// How long the client's window may hold up one piece of an answer. Then the stream is reset. The
/// same time bounds unacknowledged bytes (`disconnect`).
const STALLED: Duration = Duration::from_secs(30);
/// A client may reset this many requests in a burst, and [`RESETS_PER_SECOND`] after that. Beyond
/// this limit the connection takes no new requests. Beyond twice the limit it is cut.
const RESETS: u64 = 200;
const RESETS_PER_SECOND: u64 = 20;
/// Streams that may be reset before the gateway has seen them.
const PENDING_RESETS: usize = MAX_STREAMS as usize;
/// Streams of one connection that the library may reset for errors of the client. A body that
/// arrives after an early answer also counts. Requests that have begun are bounded by [`RESETS`].
const ERROR_RESETS: usize = 1_024;
/// A silent client is sent a PING after this time, and must answer within [`PING_TIMEOUT`].
const PING_INTERVAL: Duration = Duration::from_secs(20);
const PING_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a connection may take to end after it was asked to, once it has no stream.
const GOAWAY_TIMEOUT: Duration = Duration::from_secs(5);

const _: () = assert!(STREAM_WINDOW < CONNECTION_WINDOW, "one stream leaves window to the others");
const _: () = assert!(PENDING_RESETS as u64 <= RESETS, "a page that closes is no attack");

/// Sets the limits of a connection.
pub(crate) fn bound<E: Clone>(http2: &mut http2::Builder<E>) {
    http2
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(capacity::HEAD as u32)
        // Entries would keep whole request heads. `frames` enforces this size.
        .header_table_size(0)
        .max_send_buf_size(SEND_BUFFER)
        .max_pending_accept_reset_streams(PENDING_RESETS)
        .max_local_error_reset_streams(ERROR_RESETS)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
}

/// State that the requests of one connection share with the task that serves it.
pub(crate) struct Streams {
    slot: Arc<ConnectionSlot>,
    began: Instant,
    /// When the last request ended, in milliseconds since `began`.
    last_end: AtomicU64,
    resets: Mutex<Resets>,
    /// The progress of the request that the service has just begun. The library starts its task
    /// next, on the same thread.
    begun: Mutex<Option<Arc<Progress>>>,
    /// Wakes the task.
    wakeup: Notify,
    state: AtomicU64,
    /// Requests that have begun, for the count of frames.
    begun_requests: Arc<AtomicU64>,
}

/// The connection takes no new requests.
const ENDING: u64 = 1;
/// The connection is cut.
const CUT: u64 = 2;

/// How many requests have ended before their answers, less those that were forgiven over time.
struct Resets {
    count: u64,
    forgiven: Instant,
}

impl Resets {
    /// Counts one more. Returns the count.
    fn add(&mut self, now: Instant) -> u64 {
        let millis = now.duration_since(self.forgiven).as_millis() as u64;
        let due = millis * RESETS_PER_SECOND / 1_000;
        if due > 0 {
            self.count = self.count.saturating_sub(due);
            self.forgiven = now;
        }
        self.count += 1;
        self.count
    }
}

impl Streams {
    pub(crate) fn new(slot: Arc<ConnectionSlot>) -> Self {
        let now = Instant::now();
        Self {
            slot,
            began: now,
            last_end: AtomicU64::new(0),
            resets: Mutex::new(Resets { count: 0, forgiven: now }),
            begun: Mutex::default(),
            wakeup: Notify::new(),
            state: AtomicU64::new(0),
            begun_requests: Arc::default(),
        }
    }

    /// The number of requests that have begun. The reader of frames resets it.
    pub(crate) fn begun_requests(&self) -> Arc<AtomicU64> {
        self.begun_requests.clone()
    }

    /// Begins a request.
    pub(crate) fn begin(self: &Arc<Self>) -> Stream {
        let progress = Arc::new(Progress { handed_over: Mutex::default(), changed: Notify::new() });
        *self.begun.lock() = Some(progress.clone());
        self.begun_requests.fetch_add(1, Ordering::Relaxed);
        Stream { streams: self.clone(), progress, is_complete: false }
    }

    /// Lets the connection take no new requests. Those under way go on.
    pub(crate) fn end(&self) {
        self.state.fetch_or(ENDING, Ordering::AcqRel);
        self.wakeup.notify_one();
    }

    fn has_state(&self, state: u64) -> bool {
        self.state.load(Ordering::Acquire) & state != 0
    }

    fn note_end(&self, is_complete: bool) {
        self.last_end.store(self.began.elapsed().as_millis() as u64, Ordering::Release);
        if !is_complete {
            let count = self.resets.lock().add(Instant::now());
            if count > RESETS && !self.has_state(ENDING) {
                self.slot.flooded(Flood::Resets);
                self.end();
            }
            // A connection of a trusted proxy has requests of many clients, who must not suffer.
            if count > 2 * RESETS && !self.slot.is_of_proxy() {
                self.state.fetch_or(CUT, Ordering::AcqRel);
            }
        }
        self.wakeup.notify_one();
    }

    /// Reports that the gateway ends the connection, because its client floods it.
    pub(crate) fn flooded(&self, how: Flood) {
        self.slot.flooded(how);
    }

    /// When the connection last had a request.
    fn idle_since(&self) -> Instant {
        self.began + Duration::from_millis(self.last_end.load(Ordering::Acquire))
    }
}

/// A request under way on an HTTP/2 connection.
pub(crate) struct Stream {
    streams: Arc<Streams>,
    pub(crate) progress: Arc<Progress>,
    /// Whether the whole answer was handed to the library.
    pub(crate) is_complete: bool,
}

impl Stream {
    /// Lets the connection take no new requests.
    pub(crate) fn end_connection(&self) {
        self.streams.end();
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.streams.note_end(self.is_complete);
    }
}

/// Whether the client takes the pieces of an answer.
pub(crate) struct Progress {
    /// When the last piece was handed to the library. `None` once the library asks for the next one.
    handed_over: Mutex<Option<Instant>>,
    changed: Notify,
}

impl Progress {
    /// The library asks for the next piece. It may still buffer most of the one before.
    pub(crate) fn asked(&self) {
        *self.handed_over.lock() = None;
    }

    /// A piece was handed to the library.
    pub(crate) fn handed_over(&self) {
        *self.handed_over.lock() = Some(Instant::now());
        self.changed.notify_one();
    }

    /// Returns when one piece has waited for too long.
    async fn stalled(&self) {
        loop {
            let waits_since = *self.handed_over.lock();
            match waits_since {
                None => self.changed.notified().await,
                Some(at) if at.elapsed() >= STALLED => return,
                Some(at) => tokio::time::sleep_until(at + STALLED).await,
            }
        }
    }
}

/// Runs the task of each stream. Dropping the task resets its stream.
#[derive(Clone)]
pub(crate) struct StreamTasks(pub(crate) Arc<Streams>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamTasks {
    fn execute(&self, stream: F) {
        let progress = self.0.begun.lock().take();
        tokio::spawn(async move {
            let Some(progress) = progress else { return stream.await };
            tokio::select! {
                biased;
                () = stream => {}
                () = progress.stalled() => {}
            }
        });
    }
}

/// Serves a connection until it ends, is cut, or is idle for too long. When the sender of `end` is
/// dropped, or [`Streams::end`] is called, the connection sends GOAWAY and takes no new requests.
pub(crate) async fn drive<I, S, B>(
    connection: http2::Connection<I, S, StreamTasks>,
    streams: &Streams,
    idle_timeout: Duration,
    mut end: watch::Receiver<()>,
) where
    I: Read + Write + Unpin,
    S: HttpService<Incoming, ResBody = B, Error: Error + Send + Sync + 'static>,
    B: Body<Error: Error + Send + Sync + 'static> + 'static,
    StreamTasks: Http2ServerConnExec<S::Future, B>,
{
    let mut connection = pin!(connection);
    let mut idle = pin!(tokio::time::sleep(idle_timeout));
    let mut is_ending = false;
    loop {
        tokio::select! {
            biased;
            _ = connection.as_mut() => return,
            // The next turn polls the connection, which then flushes the end of the answer.
            () = streams.wakeup.notified() => {}
            _ = end.changed(), if !is_ending => streams.end(),
            () = idle.as_mut() => {
                let due = streams.idle_since() + idle_timeout;
                if streams.slot.is_busy() {
                    let pause = if is_ending { GOAWAY_TIMEOUT } else { idle_timeout };
                    idle.as_mut().reset(Instant::now() + pause);
                } else if is_ending {
                    return;
                } else if Instant::now() < due {
                    idle.as_mut().reset(due);
                } else {
                    streams.end();
                }
            }
        }
        if streams.has_state(CUT) {
            return;
        }
        if streams.has_state(ENDING) && !is_ending {
            is_ending = true;
            connection.as_mut().graceful_shutdown();
            // The client may ignore that.
            idle.as_mut().reset(Instant::now() + GOAWAY_TIMEOUT.min(idle_timeout));
        }
    }
}
