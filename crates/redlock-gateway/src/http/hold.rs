//! Holds a lock for as long as the client keeps an event stream open.
//!
//! The gateway acquires the lock, or continues an existing hold by its token. It extends the lock
//! every third of the TTL. As after any `POST`, the lease is valid until the moment when the client
//! sent the request + `elapsed_ms` + `validity_ms`. Delivery delay does not matter, because
//! `elapsed_ms` counts from the arrival of the request.
//!
//! When the connection ends, the gateway stops extending the lock and does not release it. The client
//! may still run, cut off from the network, within its validity.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use redlock_api::{Lease, LockStatus, StreamEnd, StreamEndReason, WaitingStatus};
use redlock_core::{LockName, LockToken, Owner, Slots, Ttl};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use super::access::{LockAccess, Standing};
use super::acquire::Asked;
use super::error::{ApiError, INVALID_TTL};
use super::extract::AcquireHead;
use super::token::note_slots;
use super::watch::{HEARTBEAT, HEARTBEAT_LINE, stream_response, write_event};
use super::wire;
use crate::audit::RequestEnd;
use crate::auth::Verb;
use crate::gateway::{GrantGuard, LeaseView, StreamPermit};

/// Events buffered for a connection that accepts none. When the buffer is full, extensions stop and
/// the lock expires.
const EVENTS: usize = 8;
/// A stream lasts for this many TTLs, and for an hour at most. Then the client begins a new one.
const MAX_TTLS: u32 = 100;
const MAX_STREAM: Duration = Duration::from_secs(3_600);
/// Assumed bound on the difference of clock rates: 1 in 1,000. The validity is reduced by this
/// fraction of the elapsed time: at most a tenth of the TTL after [`MAX_TTLS`].
const CLOCK_RATE_MARGIN_DIVISOR: u32 = 1_000;
/// Extensions per TTL.
const EXTENSIONS_PER_TTL: u32 = 3;
/// Retries per TTL after a failed extension.
const RETRIES_PER_TTL: u32 = 10;
/// `lost` is sent this long before the validity ends: TTL / 8, at least 100 ms and at most 2 s, never
/// above TTL / 3.
const NOTICES_PER_TTL: u32 = 8;
const SHORTEST_NOTICE: Duration = Duration::from_millis(100);
const LONGEST_NOTICE: Duration = Duration::from_secs(2);
/// Time between two looks of a waiting stream at its queue. With more waiters than [`LONG_LINE`],
/// this time grows with their number, up to the longest time.
const LINE_INTERVAL: Duration = Duration::from_secs(1);
const LONG_LINE: f64 = 100.0;
const LONGEST_LINE_INTERVAL: Duration = Duration::from_secs(60);
/// The shortest TTL of a stream, in milliseconds. With a shorter one, one stream could extend its
/// lock hundreds of times a second.
const SHORTEST_TTL: u32 = 1_000;

/// The end of a request that was granted the lock, for the audit log.
const GRANTED: RequestEnd<'static> = RequestEnd { status: 201, problem: None, is_denied: false };

/// A piece of the answer. The guard releases a grant that never reaches the connection.
struct Piece(Bytes, Option<GrantGuard>);

/// Begins a stream. With a token, continues an existing hold. Until the request waits or is granted,
/// an error is an ordinary answer.
pub(super) async fn begin(
    lock: LockAccess,
    head: AcquireHead,
    asked: Asked,
    token: Option<LockToken>,
) -> Result<Response, ApiError> {
    lock.access.check_again(Verb::Extend, asked.request.target.locks())?;
    let (ttl, began) = (asked.request.ttl, Instant::from_std(asked.request.started));
    if ttl.millis() < SHORTEST_TTL {
        return Err(INVALID_TTL.because(format!(
            "ttl_ms is {}; a stream needs at least {SHORTEST_TTL}",
            ttl.millis()
        )));
    }
    let permit = lock.access.gateway().begin_stream(lock.access.client());
    let permit = permit.map_err(|refusal| lock.refused(refusal))?;
    let (pieces, mut sent) = mpsc::channel(EVENTS);
    let (decided, decision) = oneshot::channel();
    let stream = HeldStream {
        caller: lock.access.standing(),
        name: lock.name.clone(),
        head: Arc::new(head),
        pieces,
        decided: Some(decided),
        began,
        _permit: permit,
    };
    tokio::spawn(async move {
        match token {
            Some(token) => stream.resume(lock, ttl, token).await,
            None => stream.acquire(lock, asked).await,
        }
    });
    decision.await.map_err(ApiError::internal)??;
    let pieces = stream::poll_fn(move |context| {
        sent.poll_recv(context).map(|piece| {
            piece.map(|Piece(bytes, guard)| {
                // From here on, the client may get the grant. So it must not be released, also if the
                // connection ends before.
                guard.into_iter().for_each(GrantGuard::delivered);
                Ok::<_, Infallible>(bytes)
            })
        })
    });
    Ok(stream_response(Body::from_stream(pieces)))
}

/// One stream.
struct HeldStream {
    caller: Standing,
    name: LockName,
    head: Arc<AcquireHead>,
    pieces: mpsc::Sender<Piece>,
    /// Tells whether the answer is a stream. `None` once it is decided.
    decided: Option<oneshot::Sender<Result<(), ApiError>>>,
    /// When the gateway had the request.
    began: Instant,
    _permit: StreamPermit,
}

/// The lease that the stream keeps up.
struct HeldLease {
    token: LockToken,
    ttl: Ttl,
    /// Until when the client may rely on the lease, by this gateway's clock.
    until: Instant,
}

impl HeldStream {
    async fn acquire(mut self, lock: LockAccess, mut asked: Asked) {
        let head = self.head.clone();
        let (on_wait, mut waits) = tokio::sync::watch::channel(None);
        asked.request.on_wait = Some(on_wait);
        let slots = asked.request.target.slots().map_or(1, Slots::count);
        let acquired = asked.acquire(&lock.access, head.client_gone());
        let (mut decided, pieces) = (self.decided.take(), self.pieces.clone());
        let mut record = None;
        // Runs beside the request, which must not stand still when its turn comes.
        let waiting = async {
            let owner = waits.wait_for(Option::is_some).await.map(|owner| *owner);
            // The sender is gone, so the request ends.
            let Ok(Some(owner)) = owner else { return std::future::pending().await };
            record = Some(lock.access.take_record());
            decide(&mut decided, Ok(()));
            let queue = QueueView { lock: &lock, owner, slots, pieces: &pieces };
            queue.show().await
        };
        let result = tokio::select! {
            result = acquired => result,
            error = waiting => Err(error),
            () = pieces.closed() => return,
        };
        let result = result.map(|mut granted| {
            let (view, until) = self.shown(granted.view);
            let held = HeldLease { token: view.token, ttl: view.ttl, until };
            granted.view = view;
            (granted.lease(&lock.access), granted.guard, held)
        });
        self.decided = decided;
        if let Some(record) = record {
            let end = result.as_ref().map_or_else(ApiError::end, |_| GRANTED);
            tokio::select! {
                () = record.end(end) => {}
                // The head of the answer was never sent.
                () = pieces.closed() => {}
            }
        }
        // From here on, a drain does not wait for this request.
        drop(lock);
        match result {
            Err(error) => self.refuse(error).await,
            Ok((lease, guard, held)) => {
                self.decide(Ok(()));
                if self.send("granted", &lease, Some(guard)).await {
                    self.keep(held).await;
                }
            }
        }
    }

    /// Continues an existing hold.
    async fn resume(mut self, lock: LockAccess, ttl: Ttl, token: LockToken) {
        lock.access.note(|entry| entry.what = Some(Verb::Extend.word()));
        note_slots(&lock.access, &token);
        let extended = self.extended(&lock, token, ttl).await;
        // From here on, a drain does not wait for this request.
        drop(lock);
        match extended {
            Err(error) => self.decide(Err(error)),
            Ok((lease, held)) => {
                self.decide(Ok(()));
                if self.send("extended", &lease, None).await {
                    self.keep(held).await;
                }
            }
        }
    }

    /// Extends the lock until the stream or the lease ends.
    async fn keep(self, mut held: HeldLease) {
        let interval = held.ttl.duration() / EXTENSIONS_PER_TTL;
        let notice = held.ttl.duration() / NOTICES_PER_TTL;
        let notice = notice.clamp(SHORTEST_NOTICE, LONGEST_NOTICE).min(interval);
        let ends = Instant::now() + MAX_STREAM.min(held.ttl.duration() * MAX_TTLS);
        // With a large drift factor, the validity is much shorter than the TTL.
        let pause = |held: &HeldLease| {
            let now = Instant::now();
            now + interval.min(held.until.saturating_duration_since(now) / 2)
        };
        let mut next = pause(&held);
        let mut heartbeat = tokio::time::interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let caller = self.caller.clone();
        let mut drained = std::pin::pin!(caller.gateway().drained());
        loop {
            tokio::select! {
                biased;
                () = self.pieces.closed() => return,
                () = self.head.client_gone() => return,
                () = &mut drained => return self.end(StreamEndReason::Draining).await,
                () = tokio::time::sleep_until(ends) => return self.end(StreamEndReason::Time).await,
                () = tokio::time::sleep_until(next) => {}
                _ = heartbeat.tick() => {
                    self.offer(HEARTBEAT_LINE.into());
                    continue;
                }
            }
            let last_moment = held.until - notice;
            let lock = self.caller.lock(&self.name, Verb::Extend);
            let extended = tokio::select! {
                extended = self.extended(&lock, held.token, held.ttl) => extended,
                () = tokio::time::sleep_until(last_moment) => Err(ApiError::not_in_time()),
            };
            // A drain does not wait for a client that reads slowly.
            drop(lock);
            match extended {
                Ok((lease, extended)) => {
                    held = extended;
                    next = pause(&held);
                    if !self.send("extended", &lease, None).await {
                        return;
                    }
                }
                Err(error) if error.is_loss() || Instant::now() >= last_moment => {
                    self.send("lost", &error.problem(), None).await;
                    return;
                }
                Err(error) if error.is_denial() => {
                    return self.end(StreamEndReason::Revoked).await;
                }
                Err(error) => {
                    next = last_moment.min(Instant::now() + held.ttl.duration() / RETRIES_PER_TTL);
                    if !self.send("unknown", &error.problem(), None).await {
                        return;
                    }
                }
            }
        }
    }

    /// Extends the lock once.
    async fn extended(
        &self,
        lock: &LockAccess,
        token: LockToken,
        ttl: Ttl,
    ) -> Result<(Lease, HeldLease), ApiError> {
        let access = &lock.access;
        // No route has taken a turn for this extension.
        access.take_turn().await;
        let names = std::slice::from_ref(&self.name);
        let pass = access.pass(Verb::Extend, names, token.slots().count().into()).await?;
        let before = self.began.elapsed();
        let resolved = lock.resolve(&pass.caller, token).await?;
        let (gateway, limits) = (access.gateway(), access.limits());
        let view =
            gateway.extend(&self.name, &resolved, ttl, limits.max_hold, access.client()).await;
        let view = view.map_err(|refusal| lock.refused(refusal))?;
        // `before` is taken ahead of the extension, so `elapsed` is never too large.
        let view = LeaseView { elapsed: before + view.elapsed, ..view };
        let (view, until) = self.shown(view);
        let waiters = Some(gateway.line_length(&self.name) as u64);
        let lease = Lease { waiters, ..wire::lease(&self.name, &view, None) };
        Ok((lease, HeldLease { token, ttl, until }))
    }

    /// The lease with its validity reduced for clock rates, and the end of that validity.
    fn shown(&self, view: LeaseView) -> (LeaseView, Instant) {
        let validity = view.validity.saturating_sub(view.elapsed / CLOCK_RATE_MARGIN_DIVISOR);
        let until = self.began + view.elapsed + validity;
        (LeaseView { validity, ..view }, until)
    }

    /// Decides whether the answer is a stream.
    fn decide(&mut self, decision: Result<(), ApiError>) {
        decide(&mut self.decided, decision);
    }

    /// Answers with an error, or ends the stream with it.
    async fn refuse(mut self, error: ApiError) {
        if self.decided.is_some() {
            return self.decide(Err(error));
        }
        self.send("refused", &error.problem(), None).await;
    }

    async fn end(self, reason: StreamEndReason) {
        self.send("end", &StreamEnd { reason }, None).await;
    }

    /// Sends an event, as soon as the connection takes it. Returns whether somebody still reads.
    async fn send(&self, event: &str, data: &impl Serialize, guard: Option<GrantGuard>) -> bool {
        let mut text = String::new();
        write_event(&mut text, event, None, data);
        self.pieces.send(Piece(text.into(), guard)).await.is_ok()
    }

    /// Sends an optional event, unless the buffer is full.
    fn offer(&self, text: String) {
        drop(self.pieces.try_send(Piece(text.into(), None)));
    }
}

/// Tells the handler whether the answer is a stream.
fn decide(
    decided: &mut Option<oneshot::Sender<Result<(), ApiError>>>,
    decision: Result<(), ApiError>,
) {
    if let Some(decided) = decided.take() {
        // Without a receiver, the next event ends the stream.
        drop(decided.send(decision));
    }
}

/// The queue of a lock, as a waiter sees it.
struct QueueView<'a> {
    lock: &'a LockAccess,
    /// The owner of the request that waits.
    owner: Owner,
    /// How many slots are shown.
    slots: u16,
    pieces: &'a mpsc::Sender<Piece>,
}

impl QueueView<'_> {
    /// Sends the state of the lock at first, and again whenever the length of the queue or the place
    /// of the request has changed. Ends when the caller may no longer acquire the lock.
    async fn show(&self) -> ApiError {
        let mut tick = tokio::time::interval(LINE_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let gateway = self.lock.access.gateway();
        let name = &self.lock.name;
        let mut shown = None;
        let mut heard = Instant::now();
        let mut next_look = Instant::now();
        loop {
            tick.tick().await;
            if let Err(error) = self.lock.check_again() {
                return error;
            }
            let now = Instant::now();
            let seen = (now >= next_look).then(|| {
                let length = gateway.line_length(name);
                // All waiters of a queue together look at most about 100 times a second.
                let pause = LINE_INTERVAL.mul_f64(length as f64 / LONG_LINE);
                next_look = now + pause.min(LONGEST_LINE_INTERVAL);
                (length, gateway.position(name, &self.owner))
            });
            let news = seen.filter(|seen| shown != Some(*seen));
            let text = if news.is_some() {
                self.state().await
            } else if heard.elapsed() >= HEARTBEAT {
                HEARTBEAT_LINE.into()
            } else {
                continue;
            };
            heard = Instant::now();
            // The event is optional. It must not wait for a client that does not read.
            if self.pieces.try_send(Piece(text.into(), None)).is_ok() {
                shown = news.or(shown);
            }
        }
    }

    async fn state(&self) -> String {
        let LockAccess { access, name, .. } = self.lock;
        let inspection = access.gateway().inspect(name, self.slots).await;
        let waiters = access.gateway().waiters(name);
        let status = wire::lock_status(name, inspection, waiters, false);
        let status = match access.caller().may(Verb::Inspect, name) {
            true => LockStatus { nodes: None, ..status },
            false => wire::state_only(name, status),
        };
        let mut text = String::new();
        let position = access.gateway().position(name, &self.owner).map(|place| place as u64);
        write_event(&mut text, "waiting", None, &WaitingStatus { status, position });
        text
    }
}
