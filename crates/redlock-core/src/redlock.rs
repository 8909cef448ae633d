//! The facade: everything that a user of the library can do.
//!
//! Every call is safe to cancel. If the future of an acquire is dropped, every grant that it may
//! have got is released in the background, on a deadline of its own. An extension or a release that
//! has been sent goes on in the background.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::cluster::bootstrap::{self, Bootstrap};
use crate::error::{HeldBy, LockError};
use crate::model::quorum::Quorum;
use crate::model::retry::RetryPolicy;
use crate::model::slots::{SlotSet, Slots};
use crate::model::types::{FencingToken, LockName, LockSet, LockToken, Owner, Ttl};
use crate::model::validity::{Lease, Remaining};
use crate::node::{Listener, Node, NodeStatus, ReleaseScope};
use crate::operations::acquire::{self, AcquireOptions, AcquireParams, Waiters};
use crate::operations::extend::Extension;
use crate::operations::inspect::{self, Inspection};
use crate::operations::list::{self, ListCursor, ListParams, LockPage};
use crate::operations::release;
use crate::round::pending_releases::ReleaseAccount;
use crate::settings::{Env, Settings, SettingsError};
use crate::shared::Shared;
use crate::wait::places::PlacePermit;
use crate::wait::{WaitRegistry, Waiter, Waiting};

/// The longest time that a listing may take, whatever its `patience`.
const MAX_LISTING: Duration = Duration::from_secs(3600);

/// Distributed locks over a fixed set of independent masters. Clones are cheap and share
/// everything.
#[derive(Clone)]
pub struct Redlock {
    shared: Arc<Shared>,
    waiters: Arc<Waiters>,
    client: ReleaseAccount,
}

impl Redlock {
    /// Combines nodes that were made with the same settings. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// [`SettingsError`] names the setting, its value and the allowed values.
    pub fn new(
        nodes: Vec<Arc<dyn Node>>,
        settings: Settings,
        env: Env,
    ) -> Result<Self, SettingsError> {
        let shared = Shared::new(nodes, settings, env)?;
        let waiters =
            Arc::new(WaitRegistry::new(&shared.settings, &shared.env, shared.fairness.clone()));
        let listener: Arc<dyn Listener> = waiters.clone();
        shared.nodes.iter().for_each(|node| node.listen(Arc::downgrade(&listener)));
        Ok(Self { shared, waiters, client: ReleaseAccount::default() })
    }

    /// The same locks, for the requests of one client. If a release fails on a node, it stays pending
    /// for that node, and counts in `client`. A client with too many locks pending cannot keep others
    /// from the room for retries: its next release is not retried, and the lock stays on that node
    /// until its TTL ends.
    #[must_use]
    pub fn of_client(&self, client: &ReleaseAccount) -> Self {
        Self { client: client.clone(), ..self.clone() }
    }

    fn caller(&self) -> release::Caller<'_> {
        release::Caller { waiters: &self.waiters, client: &self.client }
    }

    /// Tries to get the lock, and does not wait if somebody holds it. Contenders may split the
    /// votes so that nobody can have a majority. Then this tries again, up to three times, each
    /// time after a random pause longer than a round.
    ///
    /// # Errors
    /// [`LockError::Held`], [`LockError::NoQuorum`] (nothing is held then),
    /// [`LockError::TtlTooLong`], [`LockError::TtlTooShort`]. With
    /// [`OwnerChoice::Shared`](crate::OwnerChoice::Shared) also [`LockError::Unknown`] and
    /// [`LockError::HeldTooLong`].
    pub async fn acquire(
        &self,
        name: &LockName,
        ttl: Ttl,
        options: AcquireOptions,
    ) -> Result<Lease, LockError> {
        let params = AcquireParams::of_lock(&self.shared, name, ttl, options, self.client.clone())?;
        let place = self.place_of(&params);
        let result = acquire::acquire(&self.shared, params, None).await;
        if let (Ok(_), Some((lock, owner))) = (&result, place) {
            self.waiters.give_up(&lock, &owner);
        }
        result
    }

    /// The lock and the owner of a request that may have a kept place.
    fn place_of(&self, params: &AcquireParams) -> Option<(Bytes, Owner)> {
        (params.owner_is_shared && self.kept_places() > 0)
            .then(|| (params.keys.lock.clone(), params.owner))
    }

    /// Tries until the lock is granted, or until the policy allows no further try. In the second
    /// case this returns the error of the last try.
    ///
    /// # Errors
    /// As for [`Redlock::acquire`].
    pub async fn acquire_with_retry(
        &self,
        name: &LockName,
        ttl: Ttl,
        options: AcquireOptions,
        policy: &RetryPolicy,
    ) -> Result<Lease, LockError> {
        acquire::acquire(
            &self.shared,
            AcquireParams::of_lock(&self.shared, name, ttl, options, self.client.clone())?,
            Some(policy),
        )
        .await
    }

    /// Gets the lock, and waits up to `patience` for its holder and for earlier waiters in this
    /// process. `on_wait` is called when the request begins to wait. If `on_wait` returns an error,
    /// the request does not wait. This then returns that error or, if an attempt before it found no
    /// quorum, the error of that attempt. If the future is dropped, the request leaves the queue,
    /// and every grant that it may have got is released.
    ///
    /// With a shared owner, an earlier request of that owner may already hold the lock. Then this
    /// returns the existing grant without waiting for a release. If `on_wait` returns a
    /// [`PlacePermit`], the place in line of a shared owner is kept for 10 s when the request ends
    /// or is dropped without a grant. The next request of that owner takes the place up again. With
    /// `Ok(())` no place is kept.
    ///
    /// # Errors
    /// At the end of `patience`, the error of the last attempt: one of those of
    /// [`Redlock::acquire`]. If the limit of waiters is reached, [`LockError::TooManyWaiters`]:
    /// immediately if other requests already wait for the lock in this process, and otherwise after
    /// one failed attempt. With [`QueueMode::Newest`](crate::QueueMode::Newest),
    /// [`LockError::Superseded`] when a newer request of this kind begins to wait.
    pub async fn acquire_within<T: Into<PlacePermit>>(
        &self,
        name: &LockName,
        ttl: Ttl,
        options: AcquireOptions,
        patience: Duration,
        on_wait: impl FnOnce() -> Result<T, LockError> + Send,
    ) -> Result<Lease, LockError> {
        let line = (options.priority, options.queue);
        let params = AcquireParams::of_lock(&self.shared, name, ttl, options, self.client.clone())?;
        acquire::acquire_within(&self.shared, &self.waiters, params, line, patience, on_wait).await
    }

    /// Acquires all locks of a set, or none, with one token. Without a `patience`, tries as
    /// [`Redlock::acquire`] does. With one, waits as [`Redlock::acquire_within`] does, in the queue
    /// of the lock that refused the set last. It holds none of the locks while it waits, so sets
    /// that overlap cannot block each other for ever. No place is kept in a queue, and
    /// [`AcquireOptions::queue`] has no effect. `on_wait` is called each time that the request begins
    /// to wait in a queue, with the place of that lock in `names`.
    ///
    /// The lease is of every lock of the set: each may be extended and released by its name and the
    /// token.
    ///
    /// # Errors
    /// As for [`Redlock::acquire_within`]. [`HeldBy::lock_of_set`] names the lock that is held.
    /// [`LockError::TooManyWaiters`] may also come later, when the request moves to another queue.
    pub async fn acquire_set(
        &self,
        names: &LockSet,
        ttl: Ttl,
        options: AcquireOptions,
        patience: Option<Duration>,
        on_wait: impl FnMut(usize) -> Result<(), LockError> + Send,
    ) -> Result<Lease, LockError> {
        let priority = options.priority;
        let params = AcquireParams::new(
            &self.shared,
            self.shared.keys_of_grant(names.names(), SlotSet::FIRST),
            None,
            ttl,
            options,
            self.client.clone(),
        )?;
        let Some(patience) = patience else {
            return acquire::acquire(&self.shared, params, None).await;
        };
        let waiters = &self.waiters;
        acquire::acquire_set_within(&self.shared, waiters, params, priority, patience, on_wait)
            .await
    }

    /// The number of waiters, and of the locks they wait for, now.
    pub fn waiting(&self) -> Waiting {
        self.waiters.count()
    }

    /// Returns the first `limit` requests in line for a lock in this process, in the order of
    /// service, and the length of the line. Kept places of shared owners count, too.
    pub fn waiters(&self, name: &LockName, limit: usize) -> (Vec<Waiter>, usize) {
        self.waiters.line(&self.shared.keys(name).lock, limit, |params| params.info.clone())
    }

    /// The length of the line that [`waiters`](Self::waiters) returns.
    pub fn line_length(&self, name: &LockName) -> usize {
        // Fast path: without waiters, no key is built.
        if self.waiters.is_empty() {
            0
        } else {
            self.waiters.line_length(&self.shared.keys(name).lock)
        }
    }

    /// The place in line, in this process, of the request for this owner: 1 is served next. Takes
    /// time in proportion to the length of the line.
    pub fn position(&self, name: &LockName, owner: &Owner) -> Option<usize> {
        self.waiters.position(&self.shared.keys(name).lock, |params| params.owner == *owner)
    }

    /// The number of places in line that are kept for owners between two requests.
    pub fn kept_places(&self) -> usize {
        self.waiters.kept_places()
    }

    /// Removes kept places that have ended. Call this function every few seconds. Otherwise ended
    /// places stay until other places are used or kept.
    pub fn upkeep(&self) {
        self.waiters.end_places();
    }

    /// How far newly minted fencing tokens lie ahead of this machine's clock. The lead is learned
    /// from tokens of gateways whose clocks are ahead.
    pub fn clock_lead(&self) -> Duration {
        self.shared.tokens.lead()
    }

    /// An owner that nobody else can guess.
    pub fn fresh_owner(&self) -> Owner {
        self.shared.env.entropy.owner()
    }

    /// Extends a lock, so that it lives at least `ttl` from now on. An extension never shortens a
    /// lock. Success proves that the owner has held the lock without a gap since the token was
    /// granted. If the owner had lost the lock and got it again, the second grant would have a
    /// newer token. Nodes that lost the lock get it again in the background.
    ///
    /// # Errors
    /// [`LockError::Lost`] and [`LockError::NotHolder`]: the caller no longer holds the lock, and
    /// must stop work. [`LockError::Unknown`]: the deadline from before this call still holds.
    pub async fn extend(
        &self,
        name: &LockName,
        token: &LockToken,
        ttl: Ttl,
    ) -> Result<Lease, LockError> {
        let begun = Extension::begin(&self.shared, name, token, ttl);
        begun.outcome(&self.shared, |slots| self.release_unused(name, slots, token)).await
    }

    /// Extends many locks, each as [`extend`](Self::extend) does. All nodes are asked about all
    /// locks before the first answer is awaited, without a pause. So ask for about a hundred locks
    /// and slots at a time, or other tasks of the thread wait. A lease that is decided early waits
    /// for those before it. Returns the results in the order of `leases`.
    pub async fn extend_many(
        &self,
        leases: &[(&LockName, &LockToken)],
        ttl: Ttl,
    ) -> Vec<Result<Lease, LockError>> {
        let begun = Extension::begin_many(&self.shared, leases, ttl);
        let mut results = Vec::with_capacity(leases.len());
        for ((name, token), begun) in leases.iter().zip(begun) {
            let on_unused = |slots| self.release_unused(name, slots, token);
            results.push(begun.outcome(&self.shared, on_unused).await);
        }
        results
    }

    /// Releases slots of a lease that has lost another slot.
    fn release_unused(&self, name: &LockName, slots: SlotSet, token: &LockToken) {
        release::begin_release(&self.shared, self.caller(), (name, slots), token);
    }

    /// Releases a lock, or all slots that the token names. Returns when a majority has released it.
    /// Nodes that did not answer are asked again in the background.
    ///
    /// # Errors
    /// [`LockError::Lost`]: the lock had already been released or had expired.
    /// [`LockError::NotHolder`]: somebody else holds the lock now. [`LockError::Unknown`]: too few
    /// nodes answered, and the release goes on in the background.
    pub async fn release(&self, name: &LockName, token: &LockToken) -> Result<(), LockError> {
        // Recovery stores records that keep a lock free after a loss of data. They have this owner,
        // and anybody can make a token with it.
        if *token.owner() == Owner::NOBODY {
            return Err(LockError::Lost);
        }
        release::release(&self.shared, self.caller(), name, token).await
    }

    /// Releases every grant of an owner, for a client that never received the token. Returns a
    /// fencing token T: all grants of this owner with a token up to T were released. An acquire of
    /// this owner that is still in flight, through any gateway, can no longer set the lock with a
    /// token up to T. An acquire that tries again with a larger token counts as a new request. The
    /// owner's place in line in this process is given up.
    ///
    /// # Errors
    /// [`LockError::Lost`]: this owner did not hold the lock. [`LockError::NotHolder`]: somebody
    /// else holds the lock. [`LockError::Unknown`]: too few nodes answered.
    pub async fn release_owner(
        &self,
        name: &LockName,
        owner: &Owner,
    ) -> Result<FencingToken, LockError> {
        if *owner == Owner::NOBODY {
            return Err(LockError::Lost);
        }
        self.waiters.give_up(&self.shared.keys(name).lock, owner);
        release::release_owner(&self.shared, self.caller(), (name, 1), owner).await
    }

    /// The same for a lock with `slots` slots: releases every grant of the owner on any of them.
    ///
    /// # Errors
    /// [`LockError::Lost`]: this owner held no slot. [`LockError::Unknown`]: too few nodes answered
    /// about a slot.
    pub async fn release_owner_of_slots(
        &self,
        name: &LockName,
        slots: Slots,
        owner: &Owner,
    ) -> Result<FencingToken, LockError> {
        if *owner == Owner::NOBODY {
            return Err(LockError::Lost);
        }
        self.waiters.give_up(&self.shared.keys(name).lock, owner);
        let lock = (name, slots.count());
        release::release_owner_of_slots(&self.shared, self.caller(), lock, owner).await
    }

    /// Releases a lock whoever holds it. The former holder learns of the release only when it
    /// extends or releases. Until then it may go on writing, and only a resource that checks
    /// fencing tokens refuses those writes. If somebody else gets the lock during this call, that
    /// new holder keeps it. `on_found` is called with the holder that was found, before any release
    /// is sent to the nodes.
    ///
    /// # Errors
    /// [`LockError::Lost`]: nobody holds the lock. [`LockError::NotHolder`]: the lock went to
    /// somebody else meanwhile, or belongs to another Redlock client, whose locks are not released
    /// here. [`LockError::Unknown`]: too few nodes answered.
    pub async fn force_release(
        &self,
        name: &LockName,
        on_found: impl FnOnce(&HeldBy) + Send,
    ) -> Result<(), LockError> {
        self.force_release_slot(name, 1, on_found).await
    }

    /// The same for one slot of a lock, from 1. The other slots stay as they are, also those of the
    /// same grant.
    ///
    /// # Errors
    /// As for [`Redlock::force_release`].
    pub async fn force_release_slot(
        &self,
        name: &LockName,
        slot: u16,
        on_found: impl FnOnce(&HeldBy) + Send,
    ) -> Result<(), LockError> {
        release::force_release(&self.shared, self.caller(), (name, slot), on_found).await
    }

    /// Undoes a grant that nobody will use, because the answer could not be delivered to the
    /// client. Returns without waiting for the nodes. Call this only for a lease that nobody has
    /// extended with its token. A replayed lease is left alone, because an earlier answer with the
    /// same token may have been delivered. A grant that another request of the same owner has
    /// confirmed, by extending it, is left alone too. `names` is the lock, or all locks of the set.
    pub fn abandon(&self, names: &[LockName], lease: &Lease) {
        if !lease.replayed {
            release::undo_grant(&self.shared, self.caller(), names, &lease.token);
        }
    }

    pub(crate) fn release_in_background(&self, name: &LockName, lease: &Lease) {
        let token = &lease.token;
        let scope = ReleaseScope::Holder;
        let slots = (name, token.slots());
        release::release_and_hand_off(&self.shared, self.caller(), slots, token, scope);
    }

    /// Reads a lock without changing it.
    pub async fn inspect(&self, name: &LockName) -> Inspection {
        inspect::inspect(&self.shared, name).await
    }

    /// Reads the first `count` slots of a lock, from 1 to 256, in one call for each node. The state
    /// is that of slot 1, and [`Inspection::holders`] are the holders of all of them.
    pub async fn inspect_slots(&self, name: &LockName, count: u16) -> Inspection {
        inspect::inspect_slots(&self.shared, name, count.clamp(1, Slots::MAX)).await
    }

    /// Reads one slot of a lock, from 1.
    pub async fn inspect_slot(&self, name: &LockName, slot: u16) -> Inspection {
        inspect::inspect(&self.shared, &name.of_slot(slot)).await
    }

    /// Returns a page of held locks whose names begin with `prefix` and satisfy `passes`. Reads
    /// nodes one after the other, until no lock that a majority stores can have been missed. Asks
    /// all nodes about every lock that it finds. Locks that come or go during a listing may be
    /// missed or shown twice. Locks of a node that stops answering may be shown twice. Names that
    /// do not satisfy `passes` are neither asked about nor counted, so the page reveals nothing
    /// about them.
    ///
    /// Listings use connections of their own, with backoff, so no vote waits for them. After
    /// `patience` the page ends with the locks found so far.
    ///
    /// # Errors
    /// [`LockError::NoQuorum`] if too few nodes could be read, or none within `patience`.
    pub async fn list(
        &self,
        prefix: &str,
        limit: usize,
        cursor: ListCursor,
        patience: Duration,
        passes: impl Fn(&LockName) -> bool + Send + Sync,
    ) -> Result<LockPage, LockError> {
        let params =
            ListParams { prefix, limit, cursor, until: Instant::now() + patience.min(MAX_LISTING) };
        list::list(&self.shared, params, passes).await
    }

    /// Ends the quarantine of all nodes on an operator's declaration that this cluster has never
    /// been used (`bootstrap` in the settings of the nodes). For each node, the declaration counts
    /// until this process has seen the node admitted for the first time: a node that is empty after
    /// that has lost its data. The declaration is accepted only under three conditions: all N nodes
    /// answer; none of them had a marker, the key by which gateways recognise a node that was used
    /// before; and no gateway without the declaration reached such an unmarked node first. This
    /// waits until every node is known to be new, or one node is known to have been used.
    ///
    /// Suppose that the declaration was left in some configuration, and that *all* masters lose
    /// their data. The declaration is refused if a gateway without it is running and notices the
    /// loss in time. Without such a gateway, the loss of all data looks like a new cluster. Before
    /// declaring a used cluster new, wait until the longest TTL has passed, so that all locks have
    /// ended.
    pub async fn bootstrap(&self) -> Bootstrap {
        bootstrap::bootstrap(&self.shared.nodes).await
    }

    /// The validity that a lease has left now; `None` when the lease must no longer be trusted.
    pub fn validity(&self, lease: &Lease) -> Option<Duration> {
        lease.validity(self.shared.env.clock.monotonic())
    }

    /// The validity that a lease has left now, and the time since its request began. `None` when the
    /// lease must no longer be trusted.
    pub fn remaining(&self, lease: &Lease) -> Option<Remaining> {
        lease.remaining(self.shared.env.clock.monotonic())
    }

    /// The time since the request that got the lease began. For measurements only: a client needs it
    /// together with the validity, see [`Self::remaining`].
    pub fn elapsed(&self, lease: &Lease) -> Duration {
        lease.elapsed(self.shared.env.clock.monotonic())
    }

    /// How long a release with this token keeps the lock from everybody, from now; `None` if the
    /// release frees the lock, see [`LockToken::holding`].
    pub fn kept_for(&self, token: &LockToken) -> Option<Duration> {
        release::keeping(&self.shared, token).map(Ttl::duration)
    }

    /// The time since the lock was acquired, computed from its fencing token.
    pub fn held_for(&self, token: &LockToken) -> Duration {
        self.shared.tokens.age(token.fencing())
    }

    /// Asks the nodes for their clocks. Returns [`LockError::Unknown`] unless a majority agrees with
    /// this machine's wall clock. Ask before an answer that rests on [`Self::held_for`] ends somebody's
    /// work.
    pub async fn clock_contradiction(&self, name: &LockName) -> Option<LockError> {
        inspect::clock_contradiction(&self.shared, name).await
    }

    /// Microseconds since 1970 by this machine's wall clock, for display.
    pub fn wall_micros(&self) -> u64 {
        self.shared.env.clock.wall_micros()
    }

    /// The monotonic clock of this process. The times in [`NodeMemory`](crate::node::NodeMemory)
    /// are read from it.
    pub fn monotonic(&self) -> Duration {
        self.shared.env.clock.monotonic()
    }

    /// The name and the status feed of every node.
    pub fn nodes(&self) -> Vec<(String, watch::Receiver<NodeStatus>)> {
        self.shared.nodes.iter().map(|node| (node.name().to_owned(), node.status())).collect()
    }

    /// Waits until a majority may vote. A master does not vote while it cannot be reached, while
    /// its configuration makes it ineligible, or while it is in quarantine because it is new or
    /// lost data. [`Redlock::nodes`] shows which masters do not vote, and why.
    pub async fn ready(&self) {
        let mut statuses: Vec<_> = self.shared.nodes.iter().map(|node| node.status()).collect();
        let votes = |status: &mut watch::Receiver<NodeStatus>| status.borrow_and_update().votes();
        while statuses.iter_mut().map(votes).filter(|votes| *votes).count()
            < self.shared.quorum.size()
        {
            bootstrap::any_changed(&mut statuses).await;
        }
    }

    /// Whether a majority may vote now.
    pub fn has_quorum(&self) -> bool {
        let admitted = |node: &&Arc<dyn Node>| node.status().borrow().votes();
        self.shared.nodes.iter().filter(admitted).count() >= self.shared.quorum.size()
    }

    /// The number of nodes and the size of a majority.
    pub fn quorum(&self) -> Quorum {
        self.shared.quorum
    }

    /// Waits until no release and no confirmation is in flight. Await this before the process ends. Releases that wait
    /// for a node that is down are not waited for.
    pub async fn drained(&self) {
        self.shared.pending.drained().await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::*;
    use crate::model::clock::{Clock, SystemClock};

    fn one_node() -> (Redlock, LockName, Ttl) {
        let locks = Redlock::builder().embedded(1).connect().expect("settings");
        (locks, "a".parse::<LockName>().expect("a name"), Ttl::from_millis(60_000).expect("a TTL"))
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn nodes_with_another_max_ttl_are_refused_naming_both() {
        use crate::node::redis::{RedisNode, RedisUrl};

        let of_nodes =
            Settings { max_ttl: Ttl::from_millis(10_000).expect("a ttl"), ..Settings::default() };
        let url = RedisUrl::parse("redis://127.0.0.1:1").expect("an address");
        let node = RedisNode::start(url, of_nodes.of_masters("c", 1), Env::default());
        let refused = Redlock::new(
            vec![Arc::new(node) as Arc<dyn Node>],
            Settings::default(),
            Env::default(),
        );
        let said = refused.err().expect("refused").to_string();
        assert!(said.contains("10s") && said.contains("300s"), "{said}");
    }

    // Regression tests.

    /// A process that is stopped for a second before each reading of the clock.
    #[derive(Default)]
    struct StoppedClock {
        is_stopped: AtomicBool,
        seconds: AtomicU64,
    }

    impl Clock for StoppedClock {
        fn monotonic(&self) -> Duration {
            let stopped = u64::from(self.is_stopped.load(Ordering::Relaxed));
            let before = self.seconds.fetch_add(stopped, Ordering::Relaxed);
            SystemClock.monotonic() + Duration::from_secs(before + stopped)
        }

        fn wall_micros(&self) -> u64 {
            SystemClock.wall_micros()
        }
    }

    #[tokio::test]
    async fn a_stopped_process_does_not_lengthen_what_a_client_trusts() {
        let clock = Arc::new(StoppedClock::default());
        let env = Env { clock: clock.clone(), ..Env::default() };
        let locks = Redlock::builder().embedded(1).env(env).connect().expect("settings");
        let (_, name, ttl) = one_node();
        let lease = locks.acquire(&name, ttl, AcquireOptions::default()).await.expect("granted");
        clock.is_stopped.store(true, Ordering::Relaxed);
        let Remaining { elapsed, validity } = locks.remaining(&lease).expect("valid");
        assert_eq!(elapsed + validity + lease.drift, ttl.duration());
    }

    #[tokio::test]
    async fn nobodys_token_extends_and_releases_nothing() {
        let (locks, name, ttl) = one_node();
        let token =
            format!("1.1763725165123456.{}", "0".repeat(40)).parse::<LockToken>().expect("a token");
        assert_eq!(locks.extend(&name, &token, ttl).await.err(), Some(LockError::Lost));
        assert_eq!(locks.release(&name, &token).await.err(), Some(LockError::Lost));
    }

    #[tokio::test]
    async fn an_impatient_waiter_asks_once_despite_a_yield() {
        let (locks, name, ttl) = one_node();
        let fairness = &locks.shared.fairness;
        let lock = locks.shared.keys(&name).lock;
        let now = Instant::now();
        fairness.wait(&lock, now);
        fairness.yielded(&lock, now);
        let patience = Duration::from_micros(100);
        let lease =
            locks.acquire_within(&name, ttl, AcquireOptions::default(), patience, || Ok(())).await;
        assert!(lease.is_ok(), "{lease:?}");
    }

    #[tokio::test]
    async fn an_endless_patience_does_not_panic() {
        let (locks, name, ttl) = one_node();
        let lease = locks
            .acquire_within(&name, ttl, AcquireOptions::default(), Duration::MAX, || Ok(()))
            .await;
        assert!(lease.is_ok(), "{lease:?}");
    }
}
