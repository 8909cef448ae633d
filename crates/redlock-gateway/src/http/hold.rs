//! A lock that is held as long as its client keeps a stream of events open.
//!
//! The gateway acquires the lock, or takes up a lock by its token, and extends it each third of its
//! TTL. The client may rely on a lease as on the answer to a `POST`: until the moment when it sent
//! the request + `elapsed_ms` + `validity_ms`. This holds however long an event is on its way,
//! because `elapsed_ms` counts from the arrival of the request.
//!
//! When the connection ends, the gateway stops extending the lock and does not release it: the
//! client may be alive behind a cut network, and within its validity.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use futures_util::stream;
use redlock_api::{AcquireBody, Lease, LockStatus, StreamEnd, StreamEndReason};
use redlock_core::{LockName, LockToken, Ttl};
use serde::Serialize;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::{Instant, MissedTickBehavior};

use super::access::{LockAccess, Standing};
use super::error::ApiError;
use super::extract::{AcquireHead, requested_ttl};
use super::locks::{Asked, resolve};
use super::watch::{HEARTBEAT, stream_response, write_event};
use super::wire;
use crate::auth::Verb;
use crate::gateway::{GrantGuard, LeaseView, StreamPermit};
use crate::overload::in_flight::RequestClass;

/// How many events wait for a connection that takes none. Then the holder waits too, and the lock
/// ends with its TTL.
const EVENTS: usize = 8;
/// A stream lasts for this many TTLs, and for an hour at most. Then the client begins a new one.
const MAX_TTLS: u32 = 100;
const MAX_STREAM: Duration = Duration::from_secs(3_600);
/// The clocks of client and gateway run at rates that differ by less than one in so many. For each
/// second of the stream, the validity is shortened by this part of it. After [`MAX_TTLS`] that is a
/// tenth of the TTL.
const RATES_DIFFER_BY_ONE_IN: u32 = 1_000;
/// The lock is extended after this part of its TTL.
const EXTENSIONS_PER_TTL: u32 = 3;
/// Pause after a failed extension, as a part of the TTL.
const RETRIES_PER_TTL: u32 = 10;
/// `lost` is told so much before the validity ends: this part of the TTL, within bounds.
const NOTICES_PER_TTL: u32 = 8;
const SHORTEST_NOTICE: Duration = Duration::from_millis(100);
const LONGEST_NOTICE: Duration = Duration::from_secs(2);
/// How often a waiter is told about its line, if the line has changed.
const LINE_INTERVAL: Duration = Duration::from_secs(1);

/// A piece of the answer. The guard releases a grant that never reaches the connection.
struct Piece(Bytes, Option<GrantGuard>);

/// Begins a stream. With a token, the client holds the lock already. The answer begins when the
/// request waits or holds the lock; before that, it may be an ordinary error.
pub(super) async fn begin(
    lock: LockAccess,
    head: AcquireHead,
    body: AcquireBody,
    token: Option<LockToken>,
) -> Result<Response, ApiError> {
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
        began: Instant::now(),
        _permit: permit,
    };
    tokio::spawn(async move {
        match token {
            Some(token) => stream.resume(lock, body, token).await,
            None => stream.acquire(lock, body).await,
        }
    });
    decision.await.map_err(ApiError::internal)??;
    let pieces = stream::poll_fn(move |context| {
        sent.poll_recv(context).map(|piece| {
            piece.map(|Piece(bytes, guard)| {
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
struct Held {
    token: LockToken,
    ttl: Ttl,
    /// Until when the client may rely on the lease, by this gateway's clock.
    until: Instant,
}

impl HeldStream {
    async fn acquire(mut self, lock: LockAccess, body: AcquireBody) {
        let result = {
            let (head, waits) = (self.head.clone(), Arc::new(Notify::new()));
            let acquired = Self::acquired(&lock, &head, body, self.began, waits.clone());
            let mut acquired = std::pin::pin!(acquired);
            let mut line = tokio::time::interval(LINE_INTERVAL);
            line.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let (mut is_waiting, mut shown, mut heard) = (false, None, self.began);
            loop {
                tokio::select! {
                    result = &mut acquired => break result,
                    () = waits.notified(), if !is_waiting => {
                        is_waiting = true;
                        self.decide(Ok(()));
                    }
                    _ = line.tick(), if is_waiting => self.tell_line(&mut shown, &mut heard).await,
                }
            }
        };
        match result {
            Err(error) => self.refuse(error).await,
            Ok((view, guard, asked)) => {
                let (view, until) = self.shown(view);
                let held = Held { token: view.token, ttl: view.ttl, until };
                let lease = asked.lease(&lock, &view);
                self.decide(Ok(()));
                let is_sent = self.send("granted", &lease, Some(guard)).await;
                // The request has ended: from now on, a drain does not wait for it.
                drop(lock);
                if is_sent {
                    self.keep(held).await;
                }
            }
        }
    }

    async fn acquired(
        lock: &LockAccess,
        head: &AcquireHead,
        body: AcquireBody,
        began: Instant,
        waits: Arc<Notify>,
    ) -> Result<(LeaseView, GrantGuard, Asked), ApiError> {
        let gateway = lock.access.gateway();
        let mut in_flight = lock.access.enter(RequestClass::Other).await?;
        let (mut request, asked) = Asked::read(lock, head, body, began.into_std()).await?;
        request.on_wait = Some(waits);
        let acquired = gateway.acquire(request, &mut in_flight, head.client_gone()).await;
        let (view, guard) = acquired.map_err(|refusal| lock.refused(refusal))?;
        lock.check_again()?;
        Ok((view, guard, asked))
    }

    /// Takes up a lock that the client holds already.
    async fn resume(mut self, lock: LockAccess, body: AcquireBody, token: LockToken) {
        let ttl = requested_ttl(body.ttl_ms.as_ref(), &lock.access.limits());
        // The request has ended: from now on, a drain does not wait for it.
        drop(lock);
        let extended = match ttl {
            Ok(ttl) => self.extended(token, ttl).await,
            Err(error) => Err(error),
        };
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
    async fn keep(self, mut held: Held) {
        let interval = held.ttl.duration() / EXTENSIONS_PER_TTL;
        let notice = held.ttl.duration() / NOTICES_PER_TTL;
        let notice = notice.clamp(SHORTEST_NOTICE, LONGEST_NOTICE).min(interval);
        let ends = self.began + MAX_STREAM.min(held.ttl.duration() * MAX_TTLS);
        let mut next = Instant::now() + interval;
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
                    self.offer(":\n\n".into());
                    continue;
                }
            }
            let last_moment = held.until - notice;
            let extended = self.extended(held.token, held.ttl);
            let extended = tokio::select! {
                extended = extended => extended,
                () = tokio::time::sleep_until(last_moment) => Err(ApiError::not_in_time()),
            };
            match extended {
                Ok((lease, extended)) => {
                    held = extended;
                    next = Instant::now() + interval;
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
    async fn extended(&self, token: LockToken, ttl: Ttl) -> Result<(Lease, Held), ApiError> {
        let lock = self.caller.lock(&self.name, Verb::Extend);
        let caller = lock.check_again()?;
        let access = &lock.access;
        let _in_flight = access.enter(RequestClass::Held).await?;
        access.take_turns(token.slots().count().into()).await;
        let before = self.began.elapsed();
        let resolved = resolve(access, &caller, &self.name, Verb::Extend, token).await?;
        let (gateway, limits) = (access.gateway(), access.limits());
        let view =
            gateway.extend(&self.name, &resolved, ttl, limits.max_hold, access.client()).await;
        let view = view.map_err(|refusal| lock.refused(refusal))?;
        // Measured from a moment before the extension began, so that no time is counted twice.
        let view = LeaseView { elapsed: before + view.elapsed, ..view };
        let (view, until) = self.shown(view);
        let lease = wire::lease(&self.name, &view, None);
        Ok((lease, Held { token, ttl, until }))
    }

    /// The lease as the client may rely on it, and until when.
    fn shown(&self, view: LeaseView) -> (LeaseView, Instant) {
        let validity = view.validity.saturating_sub(view.elapsed / RATES_DIFFER_BY_ONE_IN);
        let until = self.began + view.elapsed + validity;
        (LeaseView { validity, ..view }, until)
    }

    /// Tells a waiter about its line, if the line has changed.
    async fn tell_line(&self, shown: &mut Option<usize>, heard: &mut Instant) {
        let gateway = self.caller.gateway();
        let line = gateway.line_length(&self.name);
        if *shown == Some(line) {
            if heard.elapsed() >= HEARTBEAT {
                *heard = Instant::now();
                self.offer(":\n\n".into());
            }
            return;
        }
        (*shown, *heard) = (Some(line), Instant::now());
        let inspection = gateway.inspect(&self.name, 1).await;
        let waiters = gateway.waiters(&self.name);
        let status = wire::lock_status(&self.name, inspection, waiters, false);
        let status = match self.caller.caller().may(Verb::Inspect, &self.name) {
            true => LockStatus { nodes: None, ..status },
            false => wire::state_only(&self.name, status),
        };
        let mut text = String::new();
        write_event(&mut text, "waiting", None, &status);
        self.offer(text);
    }

    /// Decides whether the answer is a stream.
    fn decide(&mut self, decision: Result<(), ApiError>) {
        if let Some(decided) = self.decided.take() {
            // If the client is gone, the stream ends at its next event.
            drop(decided.send(decision));
        }
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

    /// Sends something that may be left out, if the connection takes it now.
    fn offer(&self, text: String) {
        drop(self.pieces.try_send(Piece(text.into(), None)));
    }
}
