//! Requests that are answered before they are granted (`Prefer: respond-async`, RFC 7240).
//!
//! Such a request waits in the queue like any other. When its turn comes, the gateway acquires the
//! lock for the owner of the request's idempotency key, with a short TTL: the accept window. It
//! rings the client, if the client gave a URL. The ring has no token. The client repeats its `POST`
//! with the same key, at any gateway. That is an ordinary repetition: it finds the grant, extends it
//! to a full TTL, and returns a lease whose round trip the client can measure.
//!
//! So the gateway never has to know whether the grant was claimed. It does not extend the grant and
//! does not release it: without a claim, the grant ends with its window, also when this gateway
//! dies. Only if the client gives the request up, or may no longer have the lock, is the grant
//! undone; an undo spares a grant that was claimed.
//!
//! The requests live in this process alone. After a restart they are unknown, and repeating the
//! `POST` is safe.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use redlock_core::{LockError, LockState, Owner, Ttl, WaitLimit};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant as TokioInstant, sleep_until};

use super::tokens::Target;
use super::{AcquireRequest, Gateway, GrantGuard, LeaseView, Refusal, tokens};
use crate::callbacks::{CallbackError, CallbackUrl, Message};
use crate::config::Limits;
use crate::overload::clients::{Client, Counter, Permit};
use crate::overload::in_flight::InFlight;

/// How long a grant waits for its claim: the accept window. With a shorter `--max-ttl`, that long.
const ACCEPT_WINDOW: Duration = Duration::from_secs(10);
/// The longest wait of such a request, which is also the default.
pub const MAX_DEFERRED_WAIT: Duration = Duration::from_secs(3_600);
/// Limit on requests that have not ended, of all clients together. One client may have as many as it
/// may have waiters.
const MAX_OPEN: usize = 20_000;
/// When the rings begin, as parts of the accept window. A ring that is received is the last one.
const RINGS: [f64; 3] = [0.0, 0.3, 0.6];
/// How long one ring may take, as a part of the accept window. Each ring ends before the next one
/// begins.
const RING_TIME: f64 = 0.25;
/// How long the end of a request is remembered.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Limit on remembered ends of one client, and of all clients together. The oldest are forgotten.
const MAX_ENDED_OF_CLIENT: usize = 1_000;
const MAX_ENDED: usize = 20_000;

/// The TTL of a deferred grant: the accept window.
pub fn accept_window(limits: &Limits) -> Ttl {
    Ttl::from_duration(ACCEPT_WINDOW).unwrap_or(Ttl::MIN).min(limits.max_ttl)
}

/// The id of a request. It is derived from principal, lock and idempotency key, so a repeated
/// request has the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId([u8; 16]);

impl RequestId {
    /// The owner is a part of the token, so the id must not show it.
    fn of(owner: &Owner) -> Self {
        Self(owner.public_id())
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl FromStr for RequestId {
    type Err = hex::FromHexError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut id = [0; 16];
        hex::decode_to_slice(text, &mut id)?;
        // One id has one text.
        if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(hex::FromHexError::InvalidStringLength);
        }
        Ok(Self(id))
    }
}

/// What happened to a request so far.
#[derive(Debug, Clone)]
pub enum Stage {
    /// The request is new: the first attempt is under way.
    Begun,
    Waiting,
    /// The lock is held for the request until this time.
    Ready(Instant),
    Ended(End),
}

/// How a request ended.
#[derive(Debug, Clone)]
pub enum End {
    /// The client repeated its request and has the lock.
    Claimed,
    /// The accept window ended without a claim.
    Expired,
    /// The client gave the request up.
    Cancelled,
    /// The client may no longer acquire the lock.
    Revoked,
    Refused(Arc<Refusal>),
}

/// Whether the client was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rung {
    Delivered,
    Failed,
}

/// What the routes do for a request while it lasts.
pub trait Follower: Send + Sync {
    /// Whether the client may still acquire the lock.
    fn is_allowed(&self) -> bool;

    /// Whether the client may still be rung.
    fn may_be_rung(&self) -> bool;

    /// Writes the body of a ring. `left`: how much of the accept window is left.
    fn message(&self, id: RequestId, granted: SystemTime, left: Duration) -> String;

    /// Records a ring.
    fn rang(&self, result: &Result<(), CallbackError>);
}

/// One request. The registry and its task share it.
pub struct DeferredRequest {
    pub id: RequestId,
    pub target: Target,
    /// The only principal that may see the request. With `None`, anybody with the id may.
    pub principal: Option<Arc<str>>,
    owner: Owner,
    client: Arc<Client>,
    stage: watch::Sender<Stage>,
    rung: Mutex<Option<Rung>>,
    /// Counts the request, for its client and for all, until it ends.
    permits: Mutex<Option<[Permit; 2]>>,
}

impl DeferredRequest {
    pub fn stage(&self) -> Stage {
        self.stage.borrow().clone()
    }

    pub fn rung(&self) -> Option<Rung> {
        *self.rung.lock()
    }

    fn is_open(&self) -> bool {
        !matches!(*self.stage.borrow(), Stage::Ended(_))
    }

    /// Ends the request, unless it has ended. Returns whether this call ended it.
    fn end(&self, end: End) -> bool {
        let has_ended = self.stage.send_if_modified(|stage| match stage {
            Stage::Ended(_) => false,
            Stage::Begun | Stage::Waiting | Stage::Ready(_) => {
                *stage = Stage::Ended(end);
                true
            }
        });
        if has_ended {
            self.permits.lock().take();
        }
        has_ended
    }

    fn advance(&self, next: Stage) -> bool {
        self.stage.send_if_modified(|stage| match stage {
            Stage::Ended(_) => false,
            Stage::Begun | Stage::Waiting | Stage::Ready(_) => {
                *stage = next;
                true
            }
        })
    }

    /// Waits until the first attempt of the request has ended.
    async fn decided(&self) -> Stage {
        let mut stages = self.stage.subscribe();
        let decided = stages.wait_for(|stage| !matches!(stage, Stage::Begun)).await;
        // The sender lives as long as `self`.
        decided.map_or(Stage::Begun, |stage| stage.clone())
    }

    /// Resolves when the request has ended.
    async fn has_ended(&self) {
        let mut stages = self.stage.subscribe();
        drop(stages.wait_for(|stage| matches!(stage, Stage::Ended(_))).await);
    }
}

/// All deferred requests of this process.
#[derive(Default)]
pub(super) struct DeferredRequests {
    /// Requests that have not ended.
    open: Counter,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    requests: HashMap<RequestId, Arc<DeferredRequest>>,
    /// Requests that have ended, oldest first.
    ended: VecDeque<(Instant, Arc<DeferredRequest>)>,
    ended_by_client: HashMap<usize, usize>,
}

fn client_key(client: &Arc<Client>) -> usize {
    Arc::as_ptr(client) as usize
}

impl Table {
    fn forget(&mut self, request: &Arc<DeferredRequest>) {
        // A repeated request with the same id may have begun since.
        if self.requests.get(&request.id).is_some_and(|known| Arc::ptr_eq(known, request)) {
            self.requests.remove(&request.id);
        }
        let key = client_key(&request.client);
        if let Some(count) = self.ended_by_client.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.ended_by_client.remove(&key);
            }
        }
    }

    fn forget_old(&mut self, now: Instant) {
        while let Some((at, _)) = self.ended.front()
            && (now.saturating_duration_since(*at) >= REMEMBERED || self.ended.len() > MAX_ENDED)
            && let Some((_, request)) = self.ended.pop_front()
        {
            self.forget(&request);
        }
    }
}

impl DeferredRequests {
    /// The number of requests that have not ended.
    pub(super) fn count(&self) -> usize {
        self.open.count()
    }

    fn find(&self, id: &RequestId) -> Option<Arc<DeferredRequest>> {
        self.table.lock().requests.get(id).cloned()
    }

    /// The request of this owner that has not ended. Cheap while there are no requests.
    fn open(&self, owner: &Owner) -> Option<Arc<DeferredRequest>> {
        if self.open.count() == 0 {
            return None;
        }
        self.find(&RequestId::of(owner)).filter(|request| request.is_open())
    }

    /// Adds a request, unless one with this id has not ended yet. Returns the one in the table, and
    /// whether it is the new one.
    fn add(&self, new: DeferredRequest) -> (Arc<DeferredRequest>, bool) {
        let mut table = self.table.lock();
        table.forget_old(Instant::now());
        if let Some(known) = table.requests.get(&new.id).filter(|known| known.is_open()) {
            return (known.clone(), false);
        }
        let new = Arc::new(new);
        table.requests.insert(new.id, new.clone());
        (new, true)
    }

    /// Keeps the end of a request for a while. `is_known`: whether its client knows the id.
    fn ended(&self, request: &Arc<DeferredRequest>, is_known: bool) {
        let mut table = self.table.lock();
        let key = client_key(&request.client);
        *table.ended_by_client.entry(key).or_default() += 1;
        if is_known {
            table.ended.push_back((Instant::now(), request.clone()));
        } else {
            table.forget(request);
        }
        if table.ended_by_client.get(&key).is_some_and(|count| *count > MAX_ENDED_OF_CLIENT) {
            let oldest = table.ended.iter().position(|(_, it)| client_key(&it.client) == key);
            let oldest = oldest.and_then(|at| table.ended.remove(at));
            oldest.into_iter().for_each(|(_, request)| table.forget(&request));
        }
        table.forget_old(Instant::now());
    }

    pub(super) fn upkeep(&self) {
        self.table.lock().forget_old(Instant::now());
    }
}

impl Gateway {
    /// Whether the request claims the lock of a deferred request that is ready.
    pub fn claims(&self, target: &Target, principal: Option<&str>, idempotency_key: &str) -> bool {
        let owner = tokens::owner_of_key(&self.cluster, target, principal, idempotency_key);
        let open = self.deferred.open(&owner);
        open.is_some_and(|request| matches!(request.stage(), Stage::Ready(_)))
    }

    /// Begins a request that is answered before it is granted, or finds the one with the same key.
    /// Returns when it waits or is ready.
    ///
    /// # Errors
    /// The first attempt failed, or too many such requests of this client have not ended.
    pub async fn defer(
        self: &Arc<Self>,
        request: AcquireRequest,
        in_flight: InFlight,
        callback: Option<CallbackUrl>,
        follower: impl Follower + 'static,
    ) -> Result<Arc<DeferredRequest>, Refusal> {
        let key = request.idempotency_key.as_deref().unwrap_or_default();
        let principal = request.principal.clone();
        let owner = tokens::owner_of_key(&self.cluster, &request.target, principal.as_deref(), key);
        let max = self.wait_share.waiters;
        let full = |max, limit| Refusal::from(LockError::TooManyWaiters { max, limit });
        let of_client = request.client.deferred.take(max);
        let of_client = of_client.ok_or_else(|| full(max, WaitLimit::OfCaller))?;
        let of_all = self.deferred.open.take(MAX_OPEN);
        let of_all = of_all.ok_or_else(|| full(MAX_OPEN, WaitLimit::All))?;
        let new = DeferredRequest {
            id: RequestId::of(&owner),
            target: request.target.clone(),
            principal,
            owner,
            client: request.client.clone(),
            stage: watch::Sender::new(Stage::Begun),
            rung: Mutex::default(),
            permits: Mutex::new(Some([of_client, of_all])),
        };
        let (deferred, is_new) = self.deferred.add(new);
        if is_new {
            let task = DeferredTask {
                gateway: self.clone(),
                deferred: deferred.clone(),
                callback,
                follower: Box::new(follower),
            };
            tokio::spawn(task.run(request, in_flight));
        }
        match deferred.decided().await {
            Stage::Ended(End::Refused(refusal)) => Err(Refusal::clone(&refusal)),
            Stage::Begun | Stage::Waiting | Stage::Ready(_) | Stage::Ended(_) => Ok(deferred),
        }
    }

    /// The request with this id, if this principal may see it.
    pub fn deferred(
        &self,
        id: &RequestId,
        principal: Option<&str>,
    ) -> Option<Arc<DeferredRequest>> {
        self.deferred.find(id).filter(|request| request.principal.as_deref() == principal)
    }

    /// The place of a deferred request in the queue: 1 is served next. `None` for a moment when the
    /// request changes from the queue of one lock of its set to that of another.
    pub fn deferred_position(&self, request: &DeferredRequest) -> Option<usize> {
        request.target.locks().iter().find_map(|name| self.locks.position(name, &request.owner))
    }

    /// Gives a deferred request up. Its lock is released, unless it was claimed.
    pub fn cancel(&self, request: &DeferredRequest) {
        request.end(End::Cancelled);
    }

    /// Notes that the client has the lock of its deferred request.
    pub(super) fn claimed(&self, target: &Target, principal: Option<&str>, key: &str) {
        if self.deferred.count() == 0 {
            return;
        }
        let owner = tokens::owner_of_key(&self.cluster, target, principal, key);
        if let Some(request) = self.deferred.open(&owner) {
            request.end(End::Claimed);
        }
    }
}

/// The task of one request.
struct DeferredTask {
    gateway: Arc<Gateway>,
    deferred: Arc<DeferredRequest>,
    callback: Option<CallbackUrl>,
    follower: Box<dyn Follower>,
}

impl DeferredTask {
    async fn run(self, request: AcquireRequest, in_flight: InFlight) {
        let waits = Arc::new(Notify::new());
        let mut has_waited = false;
        let request = AcquireRequest { on_wait: Some(waits.clone()), is_deferred: true, ..request };
        let acquired = self.acquire(request, in_flight);
        tokio::pin!(acquired);
        let result = loop {
            tokio::select! {
                result = &mut acquired => break result,
                () = waits.notified(), if !has_waited => {
                    has_waited = self.deferred.advance(Stage::Waiting);
                }
            }
        };
        match result {
            Err(refusal) => drop(self.deferred.end(End::Refused(Arc::new(refusal)))),
            Ok((view, guard)) => {
                has_waited = true;
                self.hold(view, guard).await;
            }
        }
        self.gateway.deferred.ended(&self.deferred, has_waited);
    }

    async fn acquire(
        &self,
        request: AcquireRequest,
        mut in_flight: InFlight,
    ) -> Result<(LeaseView, GrantGuard), Refusal> {
        let _active = self.gateway.begin();
        self.gateway.acquire(request, &mut in_flight, self.deferred.has_ended()).await
    }

    /// Holds the grant during the accept window, and rings.
    async fn hold(&self, view: LeaseView, guard: GrantGuard) {
        let granted = SystemTime::now();
        let begins = Instant::now();
        let ends = begins + view.validity;
        if !self.follower.is_allowed() {
            // The guard releases the grant.
            self.deferred.end(End::Revoked);
            return;
        }
        if !self.deferred.advance(Stage::Ready(ends)) {
            return self.give_back(guard);
        }
        let rings = self.ring(granted, begins, ends);
        tokio::select! {
            () = self.deferred.has_ended() => return self.give_back(guard),
            () = async { rings.await; sleep_until(TokioInstant::from_std(ends)).await } => {}
        }
        // The grant ends by itself. A claim at another gateway may have extended it.
        guard.delivered();
        let end = if self.is_claimed(&view).await { End::Claimed } else { End::Expired };
        self.deferred.end(end);
    }

    /// Undoes the grant of a request that its client gave up. A claimed grant stays.
    fn give_back(&self, guard: GrantGuard) {
        match self.deferred.stage() {
            Stage::Ended(End::Claimed) => guard.delivered(),
            Stage::Begun | Stage::Waiting | Stage::Ready(_) | Stage::Ended(_) => drop(guard),
        }
    }

    /// Rings until the client is reached, or all rings have failed.
    async fn ring(&self, granted: SystemTime, begins: Instant, ends: Instant) {
        let (Some(url), Some(callbacks)) = (&self.callback, &self.gateway.callbacks) else {
            return;
        };
        let window = ends.saturating_duration_since(begins);
        let id = format!("msg_{:032x}", fastrand::u128(..));
        for at in RINGS {
            sleep_until(TokioInstant::from_std(begins + window.mul_f64(at))).await;
            if !self.follower.is_allowed() {
                self.deferred.end(End::Revoked);
                return;
            }
            if !self.follower.may_be_rung() {
                return;
            }
            let left = ends.saturating_duration_since(Instant::now());
            let body = self.follower.message(self.deferred.id, granted, left);
            let message = Message { id: id.clone(), body };
            let limit = window.mul_f64(RING_TIME);
            let result = callbacks.send(&self.deferred.client, url, &message, limit).await;
            self.gateway.telemetry.callback(result.is_ok());
            let rung = if result.is_ok() { Rung::Delivered } else { Rung::Failed };
            *self.deferred.rung.lock() = Some(rung);
            self.follower.rang(&result);
            if result.is_ok() {
                return;
            }
        }
    }

    /// Whether the grant outlives its accept window: somebody claimed it at another gateway. Without
    /// a claim, the masters store the grant for the rest of its TTL beyond its validity.
    async fn is_claimed(&self, view: &LeaseView) -> bool {
        let rest = view.ttl.duration().saturating_sub(view.validity);
        let slot = view.token.slots().iter().next().unwrap_or(1);
        match self.gateway.locks.inspect_slot(self.deferred.target.name(), slot).await.state {
            LockState::Held(by) => {
                by.fencing == Some(view.token.fencing()) && by.expires_in > Some(rest)
            }
            LockState::Free | LockState::Unknown => false,
        }
    }
}
