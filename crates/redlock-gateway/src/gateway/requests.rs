//! Deferred requests: those that are answered before they are granted (`POST /requests`).
//!
//! Such a request waits in the queue like any other. When it is first in line, the gateway acquires
//! the lock for the owner of the request's idempotency key, with a short TTL: the accept window. If
//! the client gave a URL, the gateway sends a callback without a token. The client claims the lock by
//! an ordinary acquire with the same key, at any gateway. The acquire finds the grant, extends it to a
//! full TTL, and returns a lease whose round trip the client can measure.
//!
//! So the gateway never has to know whether the grant was claimed. It does not extend the grant and
//! does not release it: without a claim, the grant ends with its window, also when this gateway
//! dies. The gateway undoes the grant only if the client cancels the request, or may no longer have
//! the lock. Such an undo leaves a claimed grant in place.
//!
//! The requests live in this process alone. After a restart they are unknown. Repeating the `POST`
//! is safe.
//!
//! This module stores the requests. [`super::deferring`] carries them out.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use redlock_core::Owner;
use tokio::sync::watch;

use super::tokens::Target;
use crate::callbacks::CallbackError;
use crate::overload::clients::{Client, Counter, Permit};
use crate::overload::shares::{Full, Resource};

/// How long an ended request is remembered.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Limit on remembered requests of all clients together. The oldest are forgotten.
const MAX_ENDED: usize = 4_000;
/// One client may have a quarter of the limit on remembered requests.
const CLIENT_DIVISOR: usize = 4;
/// At least this part of the limit on open requests is left for ended ones, but never more than
/// [`MAX_ENDED`].
const LEAST_DIVISOR: usize = 4;

/// The id of a request. It is derived from principal, lock and idempotency key, so a repeated
/// request has the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId([u8; 16]);

impl RequestId {
    /// The owner is a part of the token, so the id must not show it.
    pub(super) fn of(owner: &Owner) -> Self {
        Self(owner.public_id())
    }

    /// Reads an id. `None` if the text is not exactly as an id is shown.
    pub fn parse(text: &str) -> Option<Self> {
        let mut id = [0; 16];
        hex::decode_to_slice(text, &mut id).ok()?;
        Some(Self(id)).filter(|id| id.to_string() == text)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

/// The state of a deferred request.
#[derive(Debug, Clone)]
pub enum DeferredStage<R> {
    /// The first attempt is under way.
    Begun,
    Waiting,
    /// The lock is held for the request until this time.
    Ready(Instant),
    Ended(DeferredEnd<R>),
}

/// How a deferred request ended.
#[derive(Debug, Clone)]
pub enum DeferredEnd<R> {
    /// The client has claimed the lock at this gateway. Or it had the lock already, by an earlier
    /// request with the same key.
    Claimed,
    /// The accept window ended, and nobody claimed the lock at this gateway. Or a claim found that
    /// the lock, or a part of it, was released by force.
    Expired,
    /// The client cancelled the request.
    Cancelled,
    /// The client may no longer acquire the lock.
    Revoked,
    /// The reason of the refusal.
    Refused(Arc<R>),
}

/// The outcome of the last callback.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallbackOutcome {
    Delivered,
    Failed,
}

/// What the caller of [`defer`](super::Gateway::defer) provides.
pub trait GrantNotifier<R>: Send + Sync {
    /// Whether the client may still acquire the lock.
    fn is_allowed(&self) -> bool;

    /// Whether callbacks may still be sent for the client.
    fn may_be_called(&self) -> bool;

    /// The body of a callback. `left`: how much of the accept window is left.
    fn message(&self, id: RequestId, granted: SystemTime, left: Duration) -> String;

    /// Records the end of an attempt to call the client.
    fn callback_ended(&self, result: &Result<(), CallbackError>);

    /// Records the end of the request.
    fn ended(&self, end: &DeferredEnd<R>);
}

/// One request. The registry and its task share it. `R` is the type of refusals.
pub struct DeferredRequest<R> {
    pub id: RequestId,
    pub target: Target,
    /// The only principal that may see the request. With `None`, anybody with the id may.
    pub principal: Option<Arc<str>>,
    pub(super) owner: Owner,
    pub(super) client: Arc<Client>,
    stage: watch::Sender<DeferredStage<R>>,
    callback: Mutex<Option<CallbackOutcome>>,
    ended_at: OnceLock<Instant>,
    /// Counts the request, for its client and for all, until it ends.
    permits: Mutex<Option<[Permit; 2]>>,
}

impl<R> DeferredRequest<R> {
    pub fn stage(&self) -> DeferredStage<R>
    where
        R: Clone,
    {
        self.stage.borrow().clone()
    }

    /// The outcome of the last callback. `None` before the first attempt has ended.
    pub fn callback(&self) -> Option<CallbackOutcome> {
        *self.callback.lock()
    }

    /// When the request ended.
    pub(super) fn ended_at(&self) -> Option<Instant> {
        self.ended_at.get().copied()
    }

    pub(super) fn called(&self, outcome: CallbackOutcome) {
        *self.callback.lock() = Some(outcome);
    }

    pub(super) fn is_open(&self) -> bool {
        !matches!(*self.stage.borrow(), DeferredStage::Ended(_))
    }

    /// Ends the request, unless it has ended.
    pub(super) fn end(&self, end: DeferredEnd<R>) {
        if self.advance(DeferredStage::Ended(end)) {
            self.ended_at.get_or_init(Instant::now);
            self.permits.lock().take();
        }
    }

    /// Changes the stage, unless the request has ended. Returns whether the stage changed.
    pub(super) fn advance(&self, next: DeferredStage<R>) -> bool {
        self.stage.send_if_modified(|stage| match stage {
            DeferredStage::Ended(_) => false,
            DeferredStage::Begun | DeferredStage::Waiting | DeferredStage::Ready(_) => {
                *stage = next;
                true
            }
        })
    }

    /// Waits until the first attempt of the request has ended.
    pub(super) async fn is_decided(&self) {
        let mut stages = self.stage.subscribe();
        // The sender lives as long as `self`.
        drop(stages.wait_for(|stage| !matches!(stage, DeferredStage::Begun)).await);
    }

    /// Resolves when the request has ended.
    pub(super) async fn has_ended(&self) {
        let mut stages = self.stage.subscribe();
        drop(stages.wait_for(|stage| matches!(stage, DeferredStage::Ended(_))).await);
    }
}

/// All deferred requests of this process.
pub(super) struct DeferredRequests<R> {
    /// Requests that have not ended.
    open: Counter,
    table: Mutex<Table<R>>,
}

struct Table<R> {
    requests: HashMap<RequestId, Arc<DeferredRequest<R>>>,
    /// Requests that have ended, oldest first.
    ended: VecDeque<(Instant, Arc<DeferredRequest<R>>)>,
    /// How many of them each client has.
    ended_by_client: HashMap<usize, usize>,
}

impl<R> Default for DeferredRequests<R> {
    fn default() -> Self {
        let table = Table {
            requests: HashMap::new(),
            ended: VecDeque::new(),
            ended_by_client: HashMap::new(),
        };
        Self { open: Counter::default(), table: Mutex::new(table) }
    }
}

/// Distinguishes clients. A client lives as long as one of its requests is remembered.
fn client_key(client: &Arc<Client>) -> usize {
    Arc::as_ptr(client) as usize
}

impl<R> Table<R> {
    /// `most`: limit on remembered requests of all clients.
    fn remember(&mut self, request: &Arc<DeferredRequest<R>>, now: Instant, most: usize) {
        let key = client_key(&request.client);
        self.ended.push_back((now, request.clone()));
        let of_client = self.ended_by_client.entry(key).or_default();
        *of_client += 1;
        if *of_client > most.div_ceil(CLIENT_DIVISOR) {
            let oldest = self.ended.iter().position(|(_, it)| client_key(&it.client) == key);
            let oldest = oldest.and_then(|at| self.ended.remove(at));
            oldest.into_iter().for_each(|(_, request)| self.forget(&request));
        }
        self.forget_old(now, most);
    }

    fn remove(&mut self, request: &Arc<DeferredRequest<R>>) {
        // A repeated request with the same id may have begun since.
        if self.requests.get(&request.id).is_some_and(|known| Arc::ptr_eq(known, request)) {
            self.requests.remove(&request.id);
        }
    }

    fn forget(&mut self, request: &Arc<DeferredRequest<R>>) {
        self.remove(request);
        let key = client_key(&request.client);
        if let Some(count) = self.ended_by_client.get_mut(&key) {
            *count -= 1;
            if *count == 0 {
                self.ended_by_client.remove(&key);
            }
        }
    }

    fn forget_old(&mut self, now: Instant, most: usize) {
        while let Some((at, _)) = self.ended.front()
            && (now.saturating_duration_since(*at) >= REMEMBERED || self.ended.len() > most)
            && let Some((_, request)) = self.ended.pop_front()
        {
            self.forget(&request);
        }
    }
}

impl<R> DeferredRequests<R> {
    /// The number of requests that have not ended.
    pub(super) fn open_count(&self) -> usize {
        self.open.count()
    }

    pub(super) fn find(&self, id: &RequestId) -> Option<Arc<DeferredRequest<R>>> {
        self.table.lock().requests.get(id).cloned()
    }

    /// The request of this owner that has not ended. Cheap while there are no requests.
    pub(super) fn find_open(&self, owner: &Owner) -> Option<Arc<DeferredRequest<R>>> {
        if self.open.count() == 0 {
            return None;
        }
        self.find(&RequestId::of(owner)).filter(|request| request.is_open())
    }

    /// Adds a request, unless one of this owner has not ended yet. Returns the one in the table, and
    /// whether it is the new one. `max_of_client`, `max`: limits on requests that have not ended.
    ///
    /// # Errors
    /// A limit is reached.
    pub(super) fn add(
        &self,
        owner: Owner,
        target: Target,
        (principal, client): (Option<Arc<str>>, &Arc<Client>),
        (max_of_client, max): (usize, usize),
    ) -> Result<(Arc<DeferredRequest<R>>, bool), Full> {
        let id = RequestId::of(&owner);
        let mut table = self.table.lock();
        if let Some(known) = table.requests.get(&id).filter(|known| known.is_open()) {
            return Ok((known.clone(), false));
        }
        let of_client = client.deferred.take(max_of_client);
        let of_client = of_client.ok_or(Full::for_one(Resource::Deferred, max_of_client))?;
        let of_all = self.open.take(max).ok_or(Full::for_all(Resource::Deferred, max))?;
        let new = Arc::new(DeferredRequest {
            id,
            target,
            principal,
            owner,
            client: client.clone(),
            stage: watch::Sender::new(DeferredStage::Begun),
            callback: Mutex::default(),
            ended_at: OnceLock::new(),
            permits: Mutex::new(Some([of_client, of_all])),
        });
        table.requests.insert(id, new.clone());
        table.forget_old(Instant::now(), self.max_ended(max));
        Ok((new, true))
    }

    /// How many ended requests may be remembered. `max`: how many may be open.
    fn max_ended(&self, max: usize) -> usize {
        max.saturating_sub(self.open.count()).max(max.div_ceil(LEAST_DIVISOR)).min(MAX_ENDED)
    }

    /// Remembers an ended request for a while, if its client `knows_id`. `max`: how many requests
    /// may be open.
    pub(super) fn ended(&self, request: &Arc<DeferredRequest<R>>, knows_id: bool, max: usize) {
        let mut table = self.table.lock();
        if knows_id {
            table.remember(request, Instant::now(), self.max_ended(max));
        } else {
            table.remove(request);
        }
    }

    /// Notes that the client with this owner has the lock.
    pub(super) fn claimed(&self, owner: &Owner) {
        self.find_open(owner).into_iter().for_each(|request| request.end(DeferredEnd::Claimed));
    }

    /// The request of this owner that is ready.
    pub(super) fn find_ready(&self, owner: &Owner) -> Option<Arc<DeferredRequest<R>>> {
        let is_ready = |open: &Arc<DeferredRequest<R>>| {
            matches!(*open.stage.borrow(), DeferredStage::Ready(_))
        };
        self.find_open(owner).filter(is_ready)
    }

    /// Cancels the request of this owner.
    pub(super) fn cancel(&self, owner: &Owner) {
        self.find_open(owner).into_iter().for_each(|request| request.end(DeferredEnd::Cancelled));
    }

    pub(super) fn upkeep(&self) {
        self.table.lock().forget_old(Instant::now(), MAX_ENDED);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(
        requests: &DeferredRequests<()>,
        number: u8,
        client: &Arc<Client>,
        limits: (usize, usize),
    ) -> Result<(Arc<DeferredRequest<()>>, bool), Full> {
        let target = Target::Lock("a".parse().unwrap());
        requests.add(Owner::from_bytes([number; 16]), target, (None, client), limits)
    }

    #[test]
    fn a_repetition_is_the_same_request_even_at_the_limit() {
        let (requests, client) = (DeferredRequests::default(), Arc::new(Client::default()));
        let (first, is_new) = add(&requests, 1, &client, (1, 9)).unwrap();
        assert!(is_new);
        let (again, is_new) = add(&requests, 1, &client, (1, 9)).unwrap();
        assert!(Arc::ptr_eq(&first, &again) && !is_new);
        let full = add(&requests, 2, &client, (1, 9)).map(drop).unwrap_err();
        assert_eq!(full, Full::for_one(Resource::Deferred, 1));
        let other = Arc::new(Client::default());
        assert!(add(&requests, 2, &other, (1, 1)).is_err(), "the limit of all clients");
        first.end(DeferredEnd::Cancelled);
        assert_eq!((requests.open_count(), client.deferred.count()), (0, 0));
        let (new, is_new) = add(&requests, 1, &client, (1, 9)).unwrap();
        assert!(is_new && !Arc::ptr_eq(&first, &new));
        // The end of the first request does not remove the second one.
        requests.ended(&first, false, 9);
        assert!(requests.find(&new.id).is_some());
    }

    #[test]
    fn a_client_pushes_out_only_its_own_ended_requests() {
        const MOST: usize = 41;
        const OF_CLIENT: usize = 11;
        let requests = DeferredRequests::<()>::default();
        let (one, other) = (Arc::new(Client::default()), Arc::new(Client::default()));
        let end = |bytes: [u8; 16], client: &Arc<Client>| {
            let target = Target::Lock("a".parse().unwrap());
            let limits = (9, MOST);
            let (request, _) =
                requests.add(Owner::from_bytes(bytes), target, (None, client), limits).unwrap();
            request.end(DeferredEnd::Expired);
            requests.ended(&request, true, MOST);
            request.id
        };
        let of_other = end([9; 16], &other);
        let ids: Vec<_> = (0..OF_CLIENT + 10)
            .map(|number| {
                let mut bytes = [1; 16];
                bytes[..8].copy_from_slice(&(number as u64).to_be_bytes());
                end(bytes, &one)
            })
            .collect();
        assert!(requests.find(&of_other).is_some());
        let known = ids.iter().filter(|id| requests.find(id).is_some()).count();
        assert_eq!(known, OF_CLIENT);
        assert!(requests.find(&ids[0]).is_none() && requests.find(&ids[20]).is_some());
        requests.table.lock().forget_old(Instant::now() + REMEMBERED, MOST);
        assert!(requests.find(&of_other).is_none());
        let table = requests.table.lock();
        assert!(table.requests.is_empty() && table.ended_by_client.is_empty());
    }

    #[test]
    fn open_requests_leave_a_quarter_for_ended_ones() {
        const MOST: usize = 40;
        let requests = DeferredRequests::<()>::default();
        let clients: Vec<_> = (0..4).map(|_| Arc::new(Client::default())).collect();
        let end = |number: u8, client: &Arc<Client>| {
            let (request, _) = add(&requests, number, client, (MOST, MOST)).unwrap();
            request.end(DeferredEnd::Expired);
            requests.ended(&request, true, MOST);
            request.id
        };
        let ended: Vec<_> = (0..MOST as u8).map(|n| end(n, &clients[n as usize % 4])).collect();
        assert!(ended.iter().all(|id| requests.find(id).is_some()));
        let open: Vec<_> = (0..MOST as u8)
            .map(|n| add(&requests, 100 + n, &clients[0], (MOST, MOST)).unwrap())
            .collect();
        let known = ended.iter().map(|id| requests.find(id).is_some());
        assert_eq!(known.collect::<Vec<_>>(), [[false; 30].as_slice(), &[true; 10]].concat());
        assert!(open.iter().all(|(request, _)| requests.find(&request.id).is_some()));
    }

    #[test]
    fn an_id_has_one_text() {
        let id = RequestId([0xab; 16]);
        assert_eq!(RequestId::parse(&id.to_string()), Some(id));
        for bad in ["", "ab", &id.to_string().to_uppercase(), &format!("{id}00")] {
            assert_eq!(RequestId::parse(bad), None, "{bad}");
        }
    }
}
