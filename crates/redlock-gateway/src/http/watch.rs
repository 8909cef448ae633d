//! Streams of events about locks, in the form of server-sent events
//! (<https://html.spec.whatwg.org/multipage/server-sent-events.html>).
//!
//! A stream begins with a snapshot. A client that reconnects with the id of a buffered event gets
//! the missed events instead. The caller's permissions are checked before each event and each
//! heartbeat.

use std::fmt::Write;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderName, HeaderValue, header};
use redlock_api::{Lagged, StreamEnd, StreamEndReason};
use redlock_core::{LockName, LockState};
use serde::Serialize;
use tokio::time::{Instant, Interval, MissedTickBehavior};

use super::access::{Access, LockAccess, Standing};
use super::error::ApiError;
use super::wire;
use crate::auth::Verb;
use crate::gateway::{Change, Next, Refusal, Watched, Watcher};
use crate::overload::large_messages::{COVERED, LargePermit, bounded};

/// Interval between heartbeats. Proxies often close a connection that is silent for 60 s.
pub(super) const HEARTBEAT: Duration = Duration::from_secs(15);
/// A comment. No empty line follows: many libraries would take it for the end of an empty event.
pub(super) const HEARTBEAT_LINE: &str = ":\n";
/// How long a stream lasts at most. The client then reconnects, perhaps to another gateway. Each
/// stream ends up to a tenth earlier, so that clients do not reconnect all at once.
const MAX_STREAM: Duration = Duration::from_secs(3_600);
/// Pause before a snapshot is tried again, while too few nodes answer.
const SNAPSHOT_PAUSE: Duration = Duration::from_secs(5);
/// How long a snapshot may take. Meanwhile the stream has no heartbeats.
const SNAPSHOT_LIMIT: Duration = Duration::from_secs(20);
/// Pause before a snapshot is tried again: after a wait for a listing's turn in vain, or without memory
/// for a large answer.
const LISTING_PAUSE: Duration = Duration::from_millis(500);
/// A piece of the body is sent once it has this many bytes.
const PIECE_BYTES: usize = 16 * 1024;

/// Watches one lock.
pub(super) fn of_lock(
    lock: &LockAccess,
    slots: u16,
    last: Option<String>,
) -> Result<Response, ApiError> {
    let watched = Watched::Lock(lock.name.clone());
    let watcher = lock.access.gateway().watch(lock.access.client(), watched, last.as_deref());
    let watcher = watcher.map_err(|refusal| lock.refused(refusal))?;
    Ok(EventStream::begin(lock.access.standing(), watcher, slots).into_response())
}

/// Watches all locks whose names begin with a prefix.
pub(super) fn of_prefix(
    access: &Access,
    prefix: String,
    last: Option<String>,
) -> Result<Response, ApiError> {
    let watched = Watched::Prefix(prefix);
    let watcher = access.gateway().watch(access.client(), watched, last.as_deref());
    let watcher = watcher.map_err(|refusal| access.refused(refusal))?;
    Ok(EventStream::begin(access.standing(), watcher, 1).into_response())
}

/// One stream.
struct EventStream {
    caller: Standing,
    watcher: Watcher,
    /// How many slots of the lock a snapshot shows.
    slots: u16,
    /// When the next snapshot is due, if one is.
    snapshot_due: Option<Instant>,
    heartbeat: Interval,
    ends: Instant,
    is_over: bool,
    /// What is to be sent next.
    piece: String,
    /// For a large snapshot.
    permit: Option<LargePermit>,
    /// The size of the last snapshot in bytes, if there was no memory for it.
    postponed: Option<usize>,
}

impl EventStream {
    fn begin(caller: Standing, mut watcher: Watcher, slots: u16) -> Self {
        let now = Instant::now();
        let mut heartbeat = tokio::time::interval_at(now + HEARTBEAT, HEARTBEAT);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let missed = watcher.take_missed();
        let mut stream = Self {
            caller,
            watcher,
            slots,
            snapshot_due: missed.is_none().then_some(now),
            heartbeat,
            ends: now + MAX_STREAM.mul_f64(1.0 - fastrand::f64() / 10.0),
            is_over: false,
            // The client's pause before it reconnects. The line is part of the first event: many
            // libraries take a block without data for an empty event.
            piece: "retry: 1000\n".into(),
            permit: None,
            postponed: None,
        };
        missed.into_iter().flatten().for_each(|change| stream.write_change(&change));
        stream
    }

    /// The next piece of the answer. `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        while self.piece.is_empty() && !self.is_over {
            self.wait().await;
        }
        let piece = std::mem::take(&mut self.piece);
        (!piece.is_empty()).then(|| match self.permit.take() {
            Some(permit) => bounded(piece.into_bytes().into_boxed_slice(), permit),
            None => piece.into(),
        })
    }

    /// Waits until something is to be sent.
    async fn wait(&mut self) {
        let now = Instant::now();
        if self.snapshot_due.is_some_and(|due| due <= now) {
            if !self.may_have_memory() {
                return self.postpone_snapshot();
            }
            self.snapshot_due = Some(now + SNAPSHOT_PAUSE);
            let caller = self.caller.clone();
            return tokio::select! {
                biased;
                () = caller.gateway().drained() => self.end(StreamEndReason::Draining),
                () = tokio::time::sleep(SNAPSHOT_LIMIT) => {}
                () = self.write_snapshot() => self.take_memory(),
            };
        }
        let snapshot_due = self.snapshot_due.unwrap_or(self.ends);
        tokio::select! {
            biased;
            () = self.caller.gateway().drained() => self.end(StreamEndReason::Draining),
            () = tokio::time::sleep_until(self.ends) => self.end(StreamEndReason::Time),
            () = tokio::time::sleep_until(snapshot_due) => {}
            // A snapshot comes first, and shows what is buffered until then.
            next = self.watcher.next(), if self.snapshot_due.is_none() => {
                self.write_next(next);
                while self.piece.len() < PIECE_BYTES && !self.is_over && self.snapshot_due.is_none() {
                    let Some(next) = self.watcher.try_next() else { break };
                    self.write_next(next);
                }
            }
            _ = self.heartbeat.tick() => {
                if self.is_allowed() {
                    self.piece.push_str(HEARTBEAT_LINE);
                }
            }
        }
    }

    fn write_next(&mut self, next: Next) {
        if !self.is_allowed() {
            return;
        }
        match next {
            Next::Change(change) => self.write_change(&change),
            Next::Lagged(missed) => {
                self.write("lagged", None, &Lagged { missed });
                self.snapshot_due = Some(Instant::now());
            }
        }
    }

    /// Whether the caller may still watch. If not, the stream ends.
    fn is_allowed(&mut self) -> bool {
        let is_known = self.caller.is_still_known();
        let caller = self.caller.caller();
        let is_allowed = is_known
            && match self.watcher.watched() {
                Watched::Lock(name) => caller.may(Verb::Inspect, name),
                Watched::Prefix(_) => caller.may_somewhere(Verb::List),
            };
        if !is_allowed {
            self.piece.clear();
            self.end(StreamEndReason::Revoked);
        }
        is_allowed
    }

    fn write_change(&mut self, change: &Change) {
        let caller = self.caller.caller();
        let is_of_prefix = matches!(self.watcher.watched(), Watched::Prefix(_));
        if is_of_prefix && !caller.may(Verb::List, &change.name) {
            return;
        }
        let render = |shows| {
            let mut text = String::new();
            if let Some((word, status)) = wire::change(change, shows) {
                write_event(&mut text, word, Some(&self.watcher.id_text(change.id)), &status);
            }
            text
        };
        if caller.may(Verb::Inspect, &change.name) {
            self.piece.push_str(change.written.get_or_init(|| render(true)));
        } else {
            self.piece.push_str(&render(false));
        }
    }

    async fn write_snapshot(&mut self) {
        if !self.is_allowed() {
            return;
        }
        let gateway = self.caller.gateway();
        // The id is taken before the reading. So a client that reconnects with it may get a change
        // twice, but misses none.
        let id = Some(self.watcher.last_id());
        match self.watcher.watched().clone() {
            Watched::Lock(name) => {
                let watcher = &mut self.watcher;
                let inspection = gateway.snapshot_of_lock(watcher, &name, self.slots).await;
                let is_unknown = inspection.state == LockState::Unknown;
                let waiters = gateway.waiters(&name);
                let status = wire::lock_status(&name, inspection, waiters, false);
                let status = redlock_api::LockStatus { nodes: None, ..status };
                if !is_unknown {
                    self.snapshot_due = None;
                }
                // Without an id, a client that reconnects gets a snapshot again.
                self.write("snapshot", id.filter(|_| !is_unknown), &status);
            }
            Watched::Prefix(prefix) => {
                let (watcher, client) = (&mut self.watcher, self.caller.client());
                let caller = self.caller.caller();
                let passes = |stored: &LockName| caller.may(Verb::List, &stored.lock_and_slot().0);
                match gateway.snapshot_of_prefix(watcher, client, &prefix, passes).await {
                    Ok((locks, is_complete)) => {
                        self.snapshot_due = None;
                        let line = |name: &_| gateway.line_length(name);
                        let shows = |name: &_| caller.may(Verb::Inspect, name);
                        let snapshot = wire::lock_snapshot(locks, is_complete, line, shows);
                        self.write("snapshot", id, &snapshot);
                    }
                    Err(Refusal::Full(_)) => {
                        self.snapshot_due = Some(Instant::now() + LISTING_PAUSE);
                    }
                    // Without a majority there is nothing to show. The next try is due.
                    Err(_) => {}
                }
            }
        }
    }

    /// Whether there may be memory for the snapshot. If not, making it would only load the masters.
    fn may_have_memory(&self) -> bool {
        let large = self.caller.gateway().large_answers();
        self.postponed
            .is_none_or(|bytes| large.has_room(&self.caller.client().large_answers, bytes))
    }

    /// Makes the snapshot later. Drops the changes until now, because the snapshot will show them.
    fn postpone_snapshot(&mut self) {
        self.watcher.skip_to_now();
        self.snapshot_due = Some(Instant::now() + LISTING_PAUSE);
    }

    /// Takes the memory for a large snapshot. Without it, the snapshot is tried again later.
    fn take_memory(&mut self) {
        let bytes = self.piece.len();
        self.postponed = None;
        if bytes <= COVERED {
            return;
        }
        let of_client = &self.caller.client().large_answers;
        self.permit = self.caller.gateway().large_answers().take(of_client, bytes);
        if self.permit.is_none() {
            self.postponed = Some(bytes);
            self.piece = String::new();
            self.postpone_snapshot();
        }
    }

    fn end(&mut self, reason: StreamEndReason) {
        self.write("end", None, &StreamEnd { reason });
        self.is_over = true;
    }

    fn write(&mut self, event: &str, id: Option<String>, data: &impl Serialize) {
        write_event(&mut self.piece, event, id.as_deref(), data);
    }
}

pub(super) fn write_event(text: &mut String, event: &str, id: Option<&str>, data: &impl Serialize) {
    // Neither writing to a string nor serialising these types fails.
    let data = serde_json::to_string(data).unwrap_or_default();
    if let Some(id) = id {
        let _ = writeln!(text, "id: {id}");
    }
    let _ = writeln!(text, "event: {event}\ndata: {data}\n");
}

impl IntoResponse for EventStream {
    fn into_response(self) -> Response {
        let pieces = stream::unfold(self, |mut stream| async move {
            let piece = stream.next().await?;
            Some((Ok::<_, std::convert::Infallible>(piece), stream))
        });
        stream_response(Body::from_stream(pieces))
    }
}

/// An answer that is a stream of events.
pub(super) fn stream_response(body: Body) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
        // nginx would collect the events otherwise.
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, body).into_response()
}
