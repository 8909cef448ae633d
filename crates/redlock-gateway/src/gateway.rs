//! Policy between HTTP and the core. It limits what a request may ask for, releases grants that
//! cannot be delivered, and refuses new work while draining.
//!
//! This module does not know axum, status codes, or how the core reaches the nodes.

mod deferring;
mod grant;
mod listings;
mod outcomes;
mod requests;
mod tokens;
mod waiters;
mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use redlock_core::node::{NodeState, NodeStatus, Remedy};
use redlock_core::{
    AcquireOptions, HeldBy, Info, Inspection, Lease, LockError, LockName, LockState, NodeReport,
    Owner, OwnerChoice, PlacePermit, Priority, QueueMode, Redlock, Remaining, SlotSet, Ttl, Waiter,
};
use smallvec::SmallVec;
use tokio::sync::Notify;

pub use self::deferring::accept_window;
pub use self::grant::{GrantGuard, LeaseView};
pub use self::listings::{CursorKey, ListRequest, ListView};
use self::listings::{LISTING, Listings};
use self::outcomes::{Cancelled, count_acquire, count_failures, leaves_nothing, outcome_of};
use self::requests::DeferredRequests;
pub use self::requests::{
    CallbackOutcome, DeferredEnd, DeferredRequest, DeferredStage, GrantNotifier, RequestId,
};
pub use self::tokens::{PresentedToken, ResolvedToken, Target};
use self::watch::seen::Seen;
pub use self::watch::{Change, Event, Next, StreamPermit, Watched, Watcher};
use self::watch::{LineChange, WatchLimits, Watches};
use crate::callbacks::{CallbackUrl, CallbackUrlError, Callbacks};
use crate::config::Limits;
use crate::overload::capacity::Capacity;
use crate::overload::clients::{Client, Exceeded, Reservation};
use crate::overload::in_flight::{Active, InFlight, RequestClass, Requests};
use crate::overload::large_messages::LargeMessages;
use crate::overload::long_lived::LongLived;
use crate::overload::memory_budget::MasterMemory;
use crate::overload::shares::Full;
use crate::overload::wait_share::WaitShare;
use crate::telemetry::{Now, Operation, OutcomeLabel, Sample, Telemetry};

/// The longest wait of a request that is answered before it is granted. It is also the default.
pub const MAX_DEFERRED_WAIT: Duration = Duration::from_secs(3_600);

/// The lock service, as the routes call it. One per process.
pub struct Gateway {
    locks: Redlock,
    limits: Limits,
    cluster: String,
    cursors: CursorKey,
    listings: Listings,
    telemetry: Arc<Telemetry>,
    in_flight: Requests,
    memory: Arc<MasterMemory>,
    wait_share: WaitShare,
    long_lived: Arc<LongLived>,
    leaving: AtomicBool,
    draining: AtomicBool,
    drained: Notify,
    watches: Arc<Watches>,
    large_answers: Arc<LargeMessages>,
    large_requests: LargeMessages,
    deferred: DeferredRequests<Refusal>,
    /// `None` if the operator allows no callbacks.
    callbacks: Option<Callbacks>,
    /// Whether the operator's declaration that the cluster is new was refuted.
    bootstrap_refuted: Arc<AtomicBool>,
}

/// Reports the owner of a request that has begun to wait, see [`AcquireRequest::on_wait`].
pub type WaitSender = tokio::sync::watch::Sender<Option<Owner>>;

/// An acquire with checked arguments.
#[derive(Debug)]
pub struct AcquireRequest {
    pub target: Target,
    pub ttl: Ttl,
    pub info: Info,
    /// The only principal that may use the token. With `None`, anybody with the token may.
    pub principal: Option<Arc<str>>,
    pub idempotency_key: Option<String>,
    /// How long the lock may have been held since its grant. The limit matters when an earlier
    /// request with this idempotency key already got the grant.
    pub max_hold: Duration,
    /// How long the lock is kept at least, although it is released earlier.
    pub hold_at_least: Duration,
    /// How long to wait while the lock is held. `None` tries once.
    pub wait: Option<Duration>,
    /// Receives the request's owner, as the nodes store it, each time the request begins to wait.
    pub on_wait: Option<WaitSender>,
    /// Whether the client was answered before the grant. Such a request keeps no place in line, and
    /// a later request claims its grant.
    pub is_deferred: bool,
    /// How early the request is served while it waits.
    pub priority: Priority,
    /// Which requests for the lock wait at the same time.
    pub queue: QueueMode,
    /// The client whose quota is charged for the lock.
    pub client: Arc<Client>,
    /// When the gateway had the complete request. Durations in answers and metrics count from this
    /// moment, so they include the wait.
    pub started: Instant,
}

/// Why a request was not served.
#[derive(Debug, Clone)]
pub enum Refusal {
    Lock(LockError),
    /// Too few nodes may vote. When enough quarantines have ended, a majority may vote again;
    /// nothing else is missing.
    InQuarantine {
        nodes: Vec<NodeReport>,
        /// Time until so many quarantines have ended that a majority may vote. A recovery may end
        /// them earlier.
        left: Duration,
        /// Why the node whose vote will complete the majority is in quarantine.
        why: String,
    },
    MaxHoldReached {
        held: Duration,
        max: Duration,
    },
    Draining,
    /// The client closed the connection, so nobody receives this refusal.
    ClientGone,
    Overloaded,
    Quota(Exceeded),
    Full(Full),
    /// The cursor was not given to this principal in a listing of this prefix.
    InvalidCursor,
}

impl From<LockError> for Refusal {
    fn from(error: LockError) -> Self {
        match error {
            LockError::HeldTooLong { held, max } => Self::MaxHoldReached { held, max },
            error => Self::Lock(error),
        }
    }
}

impl Gateway {
    pub fn new(
        locks: Redlock,
        limits: Limits,
        cluster: String,
        cursors: CursorKey,
        max_in_flight: usize,
        memory: MasterMemory,
        telemetry: Arc<Telemetry>,
    ) -> Self {
        let memory = Arc::new(memory);
        let in_flight = Requests::new(max_in_flight);
        let draining = AtomicBool::new(false);
        let drained = Notify::new();
        let listings = Listings::default();
        let wait_share = WaitShare::ALL;
        let leaving = AtomicBool::new(false);
        Self {
            locks,
            limits,
            cluster,
            cursors,
            listings,
            telemetry,
            in_flight,
            memory,
            wait_share,
            long_lived: Arc::default(),
            leaving,
            draining,
            drained,
            watches: Arc::default(),
            large_answers: Arc::default(),
            large_requests: LargeMessages::default(),
            deferred: DeferredRequests::default(),
            callbacks: None,
            bootstrap_refuted: Arc::default(),
        }
    }

    /// Shares the flag that the declaration of a new cluster was refuted. From then on, nodes that
    /// wait for its confirmation are shown as nodes that wait for the end of their quarantine.
    pub fn with_bootstrap_refuted(self, bootstrap_refuted: Arc<AtomicBool>) -> Self {
        Self { bootstrap_refuted, ..self }
    }

    /// Limits how many waiters, and how many locks waited for, one client may have.
    pub fn with_wait_share(self, wait_share: WaitShare) -> Self {
        Self { wait_share, ..self }
    }

    /// Limits the connections of streams and waiters, and the memory for events, for watched locks, and
    /// for large requests and answers.
    pub fn with_capacity(self, capacity: &Capacity) -> Self {
        let bytes = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        let long_lived = Arc::new(LongLived::new(capacity.long_lived, capacity.waiters));
        let watches = Watches::new(WatchLimits {
            long_lived: long_lived.clone(),
            event_bytes: bytes(capacity.events),
            seen_bytes: bytes(capacity.watched),
        });
        let large_answers = Arc::new(LargeMessages::new(capacity.large_answers));
        let large_requests = LargeMessages::new(capacity.large_requests);
        let watches = Arc::new(watches);
        Self { watches, long_lived, large_answers, large_requests, ..self }
    }

    /// The bytes of large answers that clients have not read yet.
    pub fn large_answers(&self) -> &Arc<LargeMessages> {
        &self.large_answers
    }

    /// The bytes of requests for many locks, and of their answers.
    pub fn large_requests(&self) -> &LargeMessages {
        &self.large_requests
    }

    /// Lets clients be called back.
    pub fn with_callbacks(self, callbacks: Option<Callbacks>) -> Self {
        Self { callbacks, ..self }
    }

    /// Checks a URL for callbacks.
    ///
    /// # Errors
    /// No callback may be sent there.
    pub fn check_callback(&self, url: &str) -> Result<CallbackUrl, CallbackUrlError> {
        self.callbacks.as_ref().ok_or(CallbackUrlError::Off)?.check(url)
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Registers a request. [`Gateway::idle`] waits until the result is dropped.
    pub fn begin(&self) -> Active {
        self.in_flight.begin()
    }

    /// Takes a slot for a complete request. Then waits until the client has few enough other
    /// requests with the masters.
    ///
    /// # Errors
    /// [`Refusal::Overloaded`] when all slots are taken, or as many as this client may have.
    pub async fn enter(&self, work: RequestClass, client: &Client) -> Result<InFlight, Refusal> {
        self.in_flight.enter(work, client).await.ok_or(Refusal::Overloaded)
    }

    /// Takes a slot for one lease of a request that extends many locks.
    ///
    /// # Errors
    /// [`Refusal::Overloaded`].
    pub async fn enter_lease(&self, client: &Client) -> Result<InFlight, Refusal> {
        self.in_flight.enter_lease(client).await.ok_or(Refusal::Overloaded)
    }

    /// Acquires a lock. Waits for as long as the request asks, but ends when `gone` resolves or the
    /// gateway drains. If the caller drops the future, or the guard before its delivery, the lock
    /// is released.
    pub async fn acquire(
        &self,
        request: AcquireRequest,
        in_flight: &mut InFlight,
        gone: impl Future<Output = ()>,
    ) -> Result<(LeaseView, GrantGuard), Refusal> {
        // The request subscribes to the drain before it reads the flag. In the other order it would
        // miss a drain that begins between the two steps.
        let drained = self.drained.notified();
        if self.is_draining() {
            return Err(Refusal::Draining);
        }
        let AcquireRequest {
            started,
            target,
            ttl,
            info,
            principal,
            idempotency_key,
            max_hold,
            hold_at_least,
            wait,
            on_wait,
            is_deferred,
            priority,
            queue,
            client,
        } = request;
        let until = started + wait.unwrap_or_default() + ttl.duration();
        let terms = self.memory.terms(&self.locks);
        let name = target.name();
        let mut reservations = SmallVec::<[Reservation; 1]>::new();
        for name in &*target.counted() {
            let terms = terms.clone();
            match client.reserve(name.as_str(), info.as_bytes().len(), until, terms) {
                Ok(reservation) => reservations.push(reservation),
                Err(exceeded) => {
                    // Nothing was asked of the masters.
                    reservations.iter_mut().for_each(Reservation::not_granted);
                    return self.within_share(Err(exceeded));
                }
            }
        }
        let waits = wait.is_some();
        let cancelled = Cancelled::unless_ended(self.telemetry.of(name), started, waits);
        let (owner, shown) = tokens::owner(
            &self.locks,
            &self.cluster,
            &target,
            principal.as_deref(),
            idempotency_key.as_deref(),
        );
        let owner = match owner {
            // The owner identifies the request in the queue.
            OwnerChoice::Fresh if on_wait.is_some() => OwnerChoice::Drawn(self.locks.fresh_owner()),
            owner => owner,
        };
        let begins_to_wait = |name| {
            if let (Some(on_wait), OwnerChoice::Drawn(owner) | OwnerChoice::Shared(owner)) =
                (&on_wait, owner)
            {
                on_wait.send_replace(Some(owner));
            }
            // Publishes that the queue for the lock grows, and again when it is dropped.
            LineChange::begin(&self.watches, name)
        };
        let claimed = match owner {
            OwnerChoice::Shared(owner) if !is_deferred => Some(owner),
            OwnerChoice::Shared(_) | OwnerChoice::Drawn(_) | OwnerChoice::Fresh => None,
        };
        // The request is read before the first attempt. Later it may be ready by a newer grant.
        let ready = claimed.and_then(|owner| self.deferred.find_ready(&owner));
        // A watcher may come while the request waits.
        let held_info = (waits || self.watches.is_active()).then(|| info.clone());
        let options = AcquireOptions {
            info,
            owner,
            hold_at_least,
            max_hold: Some(max_hold),
            priority,
            queue,
            slots: match &target {
                Target::Slots(_, slots) => Some(*slots),
                Target::Lock(_) | Target::Set(_) => None,
            },
        };
        let locks = self.locks.of_client(&client.pending_releases);
        let result = match wait {
            None => match &target {
                Target::Lock(_) | Target::Slots(..) => locks.acquire(name, ttl, options).await,
                // Boxed, because an unboxed future would make the future of every request larger.
                Target::Set(set) => {
                    Box::pin(locks.acquire_set(set, ttl, options, None, |_| Ok(()))).await
                }
            },
            Some(patience) => {
                // A deferred request needs no connection, and a stream has counted its own. Both ask for
                // reports.
                let keeps_connection = on_wait.is_none();
                let mut connection = None;
                // Boxed, because an unboxed future would make the future of every request larger.
                let acquired = Box::pin(async {
                    let mut place = None;
                    let Target::Set(set) = &target else {
                        let waits = || {
                            let share = self.wait_share.take(&client, name)?;
                            if keeps_connection {
                                connection = Some(self.long_lived.begin_wait()?);
                            }
                            place = Some((share, begins_to_wait(name)));
                            in_flight.wait();
                            let keeps_place = idempotency_key.is_some() && !is_deferred;
                            let kept =
                                keeps_place.then(|| self.wait_share.take_place(&client, name));
                            let kept = kept.flatten();
                            Ok(kept.map_or_else(PlacePermit::none, PlacePermit::counted))
                        };
                        return locks.acquire_within(name, ttl, options, patience, waits).await;
                    };
                    let waits = |at: usize| {
                        // The permit for the queue before is given back first.
                        drop(place.take());
                        let name = &set.names()[at];
                        let share = self.wait_share.take(&client, name)?;
                        if keeps_connection && connection.is_none() {
                            connection = Some(self.long_lived.begin_wait()?);
                        }
                        place = Some((share, begins_to_wait(name)));
                        in_flight.wait();
                        Ok(())
                    };
                    Box::pin(locks.acquire_set(set, ttl, options, Some(patience), waits)).await
                });
                tokio::select! {
                    // Biased: the drain and the hang-up are checked first. During a drain all
                    // waiters leave the queue, and a waiter that thereby becomes the first must not
                    // try once more.
                    biased;
                    () = drained => return Err(Refusal::Draining),
                    () = gone => return Err(Refusal::ClientGone),
                    result = acquired => result,
                }
            }
        };
        let counts = cancelled.ended();
        if result.as_ref().map_or_else(leaves_nothing, |lease| lease.replayed) {
            reservations.iter_mut().for_each(Reservation::not_granted);
        }
        if let (Ok(lease), Some(info)) = (&result, held_info) {
            for name in target.locks().iter().filter(|name| self.watches.follows(name)) {
                let mut by = HeldBy::default();
                by.info = info.as_bytes().into();
                by.fencing = Some(lease.token.fencing());
                by.expires_in = Some(ttl.duration());
                self.watches.held(name, lease.token.slots(), &by);
            }
        }
        let result = result.and_then(|lease| {
            let until = Instant::now() + ttl.duration();
            reservations.into_iter().for_each(|reservation| reservation.granted(until));
            if lease.replayed {
                // The request that got the grant has counted the lock's memory. A replay renews the
                // TTL, so only the end of the lock is counted anew.
                let terms = self.memory.terms(&self.locks);
                for name in &*target.counted() {
                    client.extended(name.as_str(), until, &terms);
                }
            }
            let guard = GrantGuard {
                locks,
                memory: self.memory.clone(),
                watches: self.watches.clone(),
                client,
                grant: Some((target, lease.clone())),
            };
            // `so_far` is read before the validity. If this process stands still between the two
            // readings, the client trusts its lock for less time, never for more.
            //
            // The validity is computed again. If the lease has run out since the votes, the client does
            // not get it: the guard is dropped and releases the lock.
            let so_far = started.elapsed();
            let mut view = self.view(&lease).ok_or_else(|| LockError::NoQuorum(Vec::new()))?;
            if let Some(shown) = shown {
                view.token = view.token.shown_by(shown);
            }
            let decided_in = view.elapsed;
            self.in_flight.record_round(decided_in);
            // A client subtracts from the validity its own round trip minus `elapsed`. So `elapsed`
            // includes the wait for the lock, which took nothing off the lease.
            Ok((LeaseView { elapsed: so_far.max(decided_in), ..view }, guard, decided_in))
        });
        if let (Ok(_), Some(owner)) = (&result, claimed) {
            self.deferred.claimed(&owner);
        }
        // The lock, or a part of it, was released by force. A repetition of the deferred request waits
        // again.
        if let (Err(LockError::Held(_)), Some(ready)) = (&result, ready) {
            ready.end(DeferredEnd::Expired);
        }
        let decided_in = result.as_ref().map(|(_, _, decided_in)| *decided_in);
        count_acquire(counts, decided_in, waits, started.elapsed());
        result.map(|(view, guard, _)| (view, guard)).map_err(|error| match error {
            LockError::NoQuorum(nodes) => self.without_quorum(nodes),
            error => error.into(),
        })
    }

    /// The refusal for a missing quorum. If a majority is missing only because of quarantines, the
    /// refusal states when a majority may vote.
    fn without_quorum(&self, nodes: Vec<NodeReport>) -> Refusal {
        let quorum = self.locks.quorum();
        let now = self.locks.wall_micros();
        let statuses: Vec<_> =
            self.locks.nodes().into_iter().map(|(_, status)| status.borrow().clone()).collect();
        // A node without a connection may be connected again at any moment, so it counts as voting.
        let may_vote =
            |status: &&NodeStatus| status.votes() || status.state == NodeState::Connecting;
        let voting = statuses.iter().filter(may_vote).count();
        let mut waiting: Vec<_> =
            statuses.iter().filter_map(|status| Some((status.until_micros?, status))).collect();
        waiting.sort_by_key(|(until, _)| *until);
        // The quarantines end in this order. The one at this index is the one whose end completes a
        // majority.
        let last = quorum.size().checked_sub(voting + 1).and_then(|missing| waiting.get(missing));
        match last {
            Some((until, status)) => Refusal::InQuarantine {
                nodes,
                left: Duration::from_micros(until.saturating_sub(now)),
                why: status.detail.clone(),
            },
            None => LockError::NoQuorum(nodes).into(),
        }
    }

    /// Extends a lock, unless it has been held for longer than `max_hold`.
    pub async fn extend(
        &self,
        name: &LockName,
        token: &ResolvedToken,
        ttl: Ttl,
        max_hold: Duration,
        client: &Client,
    ) -> Result<LeaseView, Refusal> {
        if let Some(too_long) = self.too_long(token, max_hold) {
            let contradiction = Box::pin(self.locks.clock_contradiction(name)).await;
            let error = contradiction.unwrap_or(too_long);
            return self.extended(name, token, Err(error), client);
        }
        let locks = self.locks.of_client(&client.pending_releases);
        let result = locks.extend(name, &token.known, ttl).await;
        if let Ok(lease) = &result {
            self.in_flight.record_round(self.locks.elapsed(lease));
        }
        self.extended(name, token, result, client)
    }

    /// Extends locks, each as [`extend`](Self::extend) does. The results are in the order of
    /// `leases`.
    pub async fn extend_many(
        &self,
        leases: &[(LockName, ResolvedToken)],
        ttl: Ttl,
        max_hold: Duration,
        client: &Client,
    ) -> Vec<Result<LeaseView, Refusal>> {
        let too_long: Vec<_> =
            leases.iter().map(|(_, token)| self.too_long(token, max_hold)).collect();
        let allowed = leases.iter().zip(&too_long).filter(|(_, too_long)| too_long.is_none());
        let asked: Vec<_> = allowed.map(|((name, token), _)| (name, &token.known)).collect();
        let first = leases.iter().zip(&too_long).find(|(_, too_long)| too_long.is_some());
        let locks = self.locks.of_client(&client.pending_releases);
        let (results, contradiction) = match first {
            None => (locks.extend_many(&asked, ttl).await, None),
            // The others do not wait for that question.
            Some(((name, _), _)) => tokio::join!(
                locks.extend_many(&asked, ttl),
                Box::pin(self.locks.clock_contradiction(name)),
            ),
        };
        let mut results = results.into_iter();
        let mut extended = |((name, token), too_long): (&(LockName, ResolvedToken), _)| {
            let result = match too_long {
                Some(too_long) => Err(contradiction.clone().unwrap_or(too_long)),
                None => results.next().expect("a result for each lease"),
            };
            self.extended(name, token, result, client)
        };
        leases.iter().zip(too_long).map(&mut extended).collect()
    }

    /// The error if a lock has been held for longer than `max_hold`, by this machine's wall clock. It
    /// ends the holder's work, so it counts only if the masters' clocks confirm it.
    fn too_long(&self, token: &ResolvedToken, max: Duration) -> Option<LockError> {
        let held = self.locks.held_for(&token.shown);
        (held > max).then_some(LockError::HeldTooLong { held, max })
    }

    /// Accounts for the result of an extension.
    fn extended(
        &self,
        name: &LockName,
        token: &ResolvedToken,
        result: Result<Lease, LockError>,
        client: &Client,
    ) -> Result<LeaseView, Refusal> {
        let life = result.as_ref().map_or(Duration::ZERO, Lease::life);
        let result = result
            .and_then(|lease| self.view(&lease).ok_or_else(|| LockError::Unknown(Vec::new())));
        let result = result.map(|view| LeaseView { token: token.shown, ..view });
        if let Ok(view) = &result {
            let until = Instant::now() + life;
            self.watches.extended(name, view.token.slots(), view.token.fencing(), life);
            let terms = self.memory.terms(&self.locks);
            for _ in 0..view.token.slots().count() {
                client.extended(name.as_str(), until, &terms);
            }
        }
        self.counted(name, Operation::Extend, OutcomeLabel::Extended, result)
    }

    /// Releases the lock that the token was resolved to.
    pub async fn release(
        &self,
        name: &LockName,
        token: &ResolvedToken,
        client: &Client,
    ) -> Result<(), Refusal> {
        let names = tokens::counted_slots(name, token.known.slots().count());
        let terms = self.memory.terms(&self.locks);
        let release = self.within_share(client.begin_release(&names, terms))?;
        let kept_for = self.locks.kept_for(&token.known);
        let locks = self.locks.of_client(&client.pending_releases);
        let result = locks.release(name, &token.known).await;
        if result.is_ok() {
            let (slots, fencing) = (token.known.slots(), Some(token.known.fencing()));
            self.watches.ended(name, slots, fencing, token.is_forced);
        }
        match (&result, kept_for) {
            (Ok(()), None) => release.succeeded(names.len()),
            // The masters store the lock until then.
            (Ok(()), Some(kept_for)) => {
                release.keeps_the_lock();
                let until = Instant::now() + kept_for;
                let terms = self.memory.terms(&self.locks);
                names.iter().for_each(|name| client.extended(name.as_str(), until, &terms));
            }
            (Err(_), _) => drop(release),
        }
        self.counted(name, Operation::Release, OutcomeLabel::Released, result)
    }

    /// Releases every grant of one idempotency key of this principal, for a client without the
    /// token. `target`: what the request with the key asked for. `name`: this lock of it.
    pub async fn release_by_key(
        &self,
        name: &LockName,
        target: &Target,
        (principal, idempotency_key): (Option<&str>, &str),
        client: &Client,
    ) -> Result<(), Refusal> {
        // A release by the key may leave a token watermark on every slot.
        let (asked, taken) = match target {
            Target::Slots(_, slots) => (slots.count(), slots.take()),
            Target::Lock(_) | Target::Set(_) => (1, 1),
        };
        let names = tokens::counted_slots(name, asked);
        let terms = self.memory.terms(&self.locks);
        let release = self.within_share(client.begin_release(&names, terms))?;
        let owner = tokens::owner_of_key(&self.cluster, target, principal, idempotency_key);
        self.deferred.cancel(&owner);
        let locks = self.locks.of_client(&client.pending_releases);
        let released = match target {
            Target::Slots(_, slots) => {
                // Boxed, because an unboxed future would make the future of every request larger.
                Box::pin(locks.release_owner_of_slots(name, *slots, &owner)).await
            }
            Target::Lock(_) | Target::Set(_) => locks.release_owner(name, &owner).await,
        };
        let result = released.map(|_| ());
        self.watches.read_soon(name);
        if result.is_ok() {
            release.succeeded(taken.into());
        }
        self.counted(name, Operation::Release, OutcomeLabel::Released, result)
    }

    fn within_share<T>(&self, result: Result<T, Exceeded>) -> Result<T, Refusal> {
        result.inspect_err(|_| self.telemetry.quota_exceeded()).map_err(Refusal::Quota)
    }

    /// Releases a slot of a lock, whoever holds it. Calls `found` with the holder before the release
    /// is sent to the nodes.
    pub async fn force_release(
        &self,
        (name, slot): (&LockName, u16),
        client: &Client,
        found: impl FnOnce(&HeldBy) + Send,
    ) -> Result<(), Refusal> {
        let slots = SlotSet::new([slot]).unwrap_or(SlotSet::FIRST);
        let mut fencing = None;
        let found = |by: &HeldBy| {
            fencing = by.fencing;
            self.watches.will_be_forced(name, slots, fencing);
            found(by);
        };
        let locks = self.locks.of_client(&client.pending_releases);
        let result = locks.force_release_slot(name, slot, found).await;
        if result.is_ok() {
            self.watches.ended(name, slots, fencing, true);
        }
        self.counted(name, Operation::Release, OutcomeLabel::Released, result)
    }

    /// Begins to watch. `last`: the id of the last event that the client has got.
    ///
    /// # Errors
    /// [`Refusal::Full`], and [`Refusal::Draining`].
    pub fn watch(
        &self,
        client: &Client,
        watched: Watched,
        last: Option<&str>,
    ) -> Result<Watcher, Refusal> {
        if self.is_draining() {
            return Err(Refusal::Draining);
        }
        self.watches.watch(client, watched, last).map_err(Refusal::Full)
    }

    /// Begins an event stream of a holder.
    ///
    /// # Errors
    /// [`Refusal::Full`], and [`Refusal::Draining`].
    pub fn begin_stream(&self, client: &Client) -> Result<StreamPermit, Refusal> {
        if self.is_draining() {
            return Err(Refusal::Draining);
        }
        self.watches.begin_stream(client).map_err(Refusal::Full)
    }

    /// Reads the watched lock for a snapshot. Later changes are published relative to the snapshot.
    pub async fn snapshot_of_lock(
        &self,
        watcher: &mut Watcher,
        name: &LockName,
        slots: u16,
    ) -> Inspection {
        watcher.skip_to_now();
        let began = Instant::now();
        let inspection = self.locks.inspect_slots(name, slots).await;
        let mut holders = inspection.holders.iter().peekable();
        let seen = (1..=slots).filter(|slot| !inspection.unknown_slots.contains(slot));
        let seen = seen.map(|slot| {
            let holder = holders.next_if(|holder| holder.slot == slot);
            (
                name.clone(),
                slot,
                holder.map_or_else(Seen::free, |holder| Seen::of(holder.by.clone())),
            )
        });
        watcher.snapshot_made(began, seen);
        inspection
    }

    /// Lists the locks of the watched prefix that pass, for a snapshot, and whether these are all.
    /// Later changes are published relative to the snapshot.
    ///
    /// # Errors
    /// [`Refusal::Full`], and no quorum.
    pub async fn snapshot_of_prefix(
        &self,
        watcher: &mut Watcher,
        client: &Client,
        prefix: &str,
        passes: impl Fn(&LockName) -> bool + Send + Sync,
    ) -> Result<(Vec<(LockName, HeldBy)>, bool), Refusal> {
        let _places = self.listings.begin(client).await.map_err(Refusal::Full)?;
        watcher.skip_to_now();
        let began = Instant::now();
        let most = (watcher.most_bytes(), watch::poll::Excess::LeaveOutLocks);
        let (held, is_complete) = watch::poll::pages(&self.locks, prefix, most, passes).await?;
        let slots = held.iter().map(|(stored, seen)| {
            let (name, slot) = stored.lock_and_slot();
            (name, slot, seen.clone())
        });
        let follows_all = watcher.snapshot_made(began, slots);
        let held = held.into_iter().filter_map(|(stored, seen)| Some((stored, seen.by?)));
        Ok((held.collect(), is_complete && follows_all))
    }

    /// Polls watched locks for changes by other gateways. Never returns.
    pub async fn follow_watched(&self) {
        watch::poll::poll(&self.watches, &self.locks).await;
    }

    /// Resolves when the gateway begins to drain.
    pub async fn drained(&self) {
        let drained = self.drained.notified();
        if !self.is_draining() {
            drained.await;
        }
    }

    /// Finds the grant that a token stands for. It is a grant of the principal that presents the
    /// token. If that principal may use the tokens of others, it may be the grant of the lock's
    /// holder.
    pub async fn resolve(
        &self,
        name: &LockName,
        presented: PresentedToken,
    ) -> Result<ResolvedToken, Refusal> {
        let operation = if presented.releases { Operation::Release } else { Operation::Extend };
        let resolved = tokens::resolve(&self.locks, name, presented).await;
        Ok(resolved.inspect_err(|error| {
            self.telemetry
                .of(name)
                .operation(operation, outcome_of(Err::<(), _>(error), OutcomeLabel::Found))
        })?)
    }

    /// The first requests in line for a lock at this gateway, when the first request of each began
    /// to wait, and the length of the line.
    pub fn waiters(&self, name: &LockName) -> (Vec<(Waiter, u64)>, usize) {
        waiters::waiters(&self.locks, name)
    }

    /// The length of the line for a lock at this gateway.
    pub fn line_length(&self, name: &LockName) -> usize {
        self.locks.line_length(name)
    }

    /// The place in this gateway's line of the request for this owner: 1 is served next.
    pub fn position(&self, name: &LockName, owner: &Owner) -> Option<usize> {
        self.locks.position(name, owner)
    }

    /// Reads the lock's state from the nodes, and that of its first `slots` slots. The metrics count
    /// this as an operation.
    pub async fn inspect(&self, name: &LockName, slots: u16) -> Inspection {
        let inspection = self.locks.inspect_slots(name, slots).await;
        let outcome = match &inspection.state {
            LockState::Held(_) => OutcomeLabel::Found,
            LockState::Free => OutcomeLabel::Free,
            LockState::Unknown => OutcomeLabel::Unknown,
        };
        self.telemetry.of(name).operation(Operation::Inspect, outcome);
        inspection
    }

    /// Reads a page of the held locks whose names pass the filter `passes`.
    pub async fn list(
        &self,
        request: ListRequest<'_>,
        passes: impl Fn(&LockName) -> bool + Send + Sync,
    ) -> Result<ListView, Refusal> {
        let ListRequest { client, principal, prefix, limit, cursor } = request;
        let open = |text| self.cursors.open(text, prefix, principal).ok_or(Refusal::InvalidCursor);
        let cursor = cursor.map(open).transpose()?.unwrap_or_default();
        let _places = self.listings.begin(client).await.map_err(Refusal::Full)?;
        let page = self.locks.list(prefix, limit, cursor, LISTING, passes).await?;
        let next = page.next.map(|next| self.cursors.seal(&next, prefix, principal));
        Ok(ListView { locks: page.locks, next })
    }

    /// Whether a majority of the nodes may vote.
    pub fn has_quorum(&self) -> bool {
        self.locks.has_quorum()
    }

    /// Whether load balancers should send requests here.
    pub fn readiness(&self) -> Readiness {
        if self.leaving.load(Ordering::Acquire) || self.is_draining() {
            Readiness::Draining
        } else if self.locks.has_quorum() {
            Readiness::Ready
        } else {
            Readiness::NoQuorum
        }
    }

    /// The state of every node. Much more expensive than [`Self::readiness`].
    pub fn nodes(&self) -> Vec<(String, NodeStatus)> {
        let is_refuted = self.bootstrap_refuted.load(Ordering::Acquire);
        let status = |status: &NodeStatus| match status.is_bootstrapping && is_refuted {
            true => NodeStatus { remedy: Some(Remedy::Wait), ..status.clone() },
            false => status.clone(),
        };
        let nodes = self.locks.nodes().into_iter();
        nodes.map(|(name, of_node)| (name, status(&of_node.borrow()))).collect()
    }

    /// A text with three numbers: how many nodes are admitted, configured, and needed for a
    /// majority.
    pub fn nodes_summary(&self) -> String {
        let quorum = self.locks.quorum();
        let admitted = |(_, status): &(String, NodeStatus)| status.votes();
        let admitted = self.nodes().iter().filter(|node| admitted(node)).count();
        format!("{admitted} of {} admitted, {} are needed", quorum.nodes(), quorum.size())
    }

    pub fn metrics(&self) -> String {
        let nodes = self.nodes();
        let statuses = nodes.iter().map(|(name, status)| (name.as_str(), status.clone()));
        let now = Now {
            waiting: self.locks.waiting(),
            kept_places: self.locks.kept_places(),
            listings: self.listings.count(),
            event_streams: self.watches.count(),
            event_streams_limit: self.watches.count() + self.long_lived.free(),
            deferred: self.deferred.open_count(),
            in_flight: self.in_flight.count(),
            is_ready: self.readiness() == Readiness::Ready,
            wall_micros: self.locks.wall_micros(),
            clock_lead: self.locks.clock_lead(),
            assumed_memory: self.memory.assumed(),
            largest_quota_use: self.memory.largest_use(),
        };
        self.telemetry.render(statuses, &now)
    }

    /// Ends a sample of the history, to be called every few seconds.
    pub fn sample(&self) {
        self.telemetry.sample(self.locks.waiting().waiters);
    }

    /// The samples of the last five minutes, oldest first.
    pub fn history(&self) -> Vec<Sample> {
        self.telemetry.history()
    }

    /// Maintenance, to be called every few seconds.
    pub fn upkeep(&self) {
        self.telemetry.upkeep();
        self.locks.upkeep();
        self.in_flight.upkeep();
        self.memory.upkeep();
        self.deferred.upkeep();
    }

    /// Starts to refuse acquires, also those that already wait. Extensions and releases are still
    /// served.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
        self.drained.notify_waiters();
    }

    /// Makes the gateway not ready, so that load balancers send requests elsewhere. The gateway
    /// still serves every request that comes.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Waits until no request is under way and no release is pending.
    pub async fn idle(&self) {
        self.in_flight.none_left().await;
        self.locks.drained().await;
    }

    fn view(&self, lease: &Lease) -> Option<LeaseView> {
        // The wall clock is read first, so `expires_at` is never too late.
        let now = self.locks.wall_micros();
        let Remaining { elapsed, validity } = self.locks.remaining(lease)?;
        let expires_at = now.saturating_add(validity.as_micros() as u64);
        Some(LeaseView {
            token: lease.token,
            ttl: lease.ttl,
            validity,
            elapsed,
            expires_at,
            nodes_granted: lease.nodes_granted,
            nodes_total: lease.nodes_total,
            replayed: lease.replayed,
        })
    }

    fn counted<T>(
        &self,
        name: &LockName,
        operation: Operation,
        success: OutcomeLabel,
        result: Result<T, LockError>,
    ) -> Result<T, Refusal> {
        let counts = self.telemetry.of(name);
        counts.operation(operation, outcome_of(result.as_ref(), success));
        Ok(result.inspect_err(|error| count_failures(counts, operation, error))?)
    }
}

/// Whether load balancers should send requests to a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    NoQuorum,
    Draining,
}
