//! The facade: everything that a user of the library can do.
//!
//! Every call is safe to cancel. If a future is dropped, whatever its operation may have set is
//! released, on a deadline of its own.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::cluster::bootstrap::{self, Bootstrap};
use crate::error::{HeldBy, LockError};
use crate::model::quorum::Quorum;
use crate::model::retry::RetryPolicy;
use crate::model::types::{FencingToken, LockName, LockToken, Owner, Ttl};
use crate::model::validity::Lease;
use crate::node::{Listener, Node, NodeStatus, ReleaseScope};
use crate::operations::acquire::{self, AcquireOptions, AcquireParams, Waiters};
use crate::operations::extend;
use crate::operations::inspect::{self, Inspection};
use crate::operations::list::{self, ListCursor, ListParams, LockPage};
use crate::operations::release;
use crate::settings::{Env, Settings, SettingsError};
use crate::shared::Shared;
use crate::wait::{WaitRegistry, Waiting};

/// The longest patience of a listing.
const MAX_LISTING: Duration = Duration::from_secs(3600);

/// Distributed locks over a fixed set of independent masters. Clones are cheap and share
/// everything.
#[derive(Clone)]
pub struct Redlock {
    shared: Arc<Shared>,
    waiters: Arc<Waiters>,
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
        Ok(Self { shared, waiters })
    }

    /// Tries to get the lock, without waiting for a holder. If contenders split the votes so that
    /// nobody can have a majority, it tries again after a random pause longer than a round.
    ///
    /// # Errors
    /// [`LockError::Held`], [`LockError::NoQuorum`] (nothing is held then),
    /// [`LockError::TtlTooLong`], [`LockError::TtlTooShort`]. A shared owner may also get
    /// [`LockError::Unknown`] and [`LockError::HeldTooLong`].
    pub async fn acquire(
        &self,
        name: &LockName,
        ttl: Ttl,
        options: AcquireOptions,
    ) -> Result<Lease, LockError> {
        acquire::acquire(&self.shared, AcquireParams::new(&self.shared, name, ttl, options)?, None)
            .await
    }

    /// Tries until the lock is granted or the policy is exhausted, and then returns the last error.
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
            AcquireParams::new(&self.shared, name, ttl, options)?,
            Some(policy),
        )
        .await
    }

    /// Gets the lock, and waits up to `patience` for its holder and for earlier waiters in this
    /// process. Calls `on_wait` when the request begins to wait, and returns the error of `on_wait`
    /// if there is one. A future that is dropped leaves the queue and releases whatever it may have
    /// been granted.
    ///
    /// An owner that already has the lock gets its existing grant without waiting.
    ///
    /// # Errors
    /// At the end of `patience` the last error of [`Redlock::acquire`].
    /// [`LockError::TooManyWaiters`] immediately if others already wait for the lock here, and
    /// otherwise after one attempt.
    pub async fn acquire_within(
        &self,
        name: &LockName,
        ttl: Ttl,
        options: AcquireOptions,
        patience: Duration,
        on_wait: impl FnOnce() -> Result<(), LockError> + Send,
    ) -> Result<Lease, LockError> {
        let params = AcquireParams::new(&self.shared, name, ttl, options)?;
        acquire::acquire_within(&self.shared, &self.waiters, params, patience, on_wait).await
    }

    /// The number of waiters, and of the locks they wait for, now.
    pub fn waiting(&self) -> Waiting {
        self.waiters.count()
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
    /// lock. Success proves that the owner held the lock without a gap: a lock that the same owner
    /// lost and got again has a newer token. Nodes that lost the lock get it again in the
    /// background.
    ///
    /// # Errors
    /// [`LockError::Lost`] and [`LockError::NotHolder`]: stop work. [`LockError::Unknown`]: the old
    /// deadline stands.
    pub async fn extend(
        &self,
        name: &LockName,
        token: &LockToken,
        ttl: Ttl,
    ) -> Result<Lease, LockError> {
        if *token.owner() == Owner::NOBODY {
            return Err(LockError::Lost);
        }
        extend::extend(&self.shared, self.shared.keys(name), token, ttl).await
    }

    /// Releases a lock. Returns when a majority has released it; nodes that did not answer are
    /// asked again in the background.
    ///
    /// # Errors
    /// [`LockError::Lost`]: the lock had been released or had expired. [`LockError::NotHolder`].
    /// [`LockError::Unknown`].
    pub async fn release(&self, name: &LockName, token: &LockToken) -> Result<(), LockError> {
        // Records that keep a lock free after a loss of data have this owner, and anybody can forge
        // it.
        if *token.owner() == Owner::NOBODY {
            return Err(LockError::Lost);
        }
        release::release(&self.shared, &self.waiters, name, token).await
    }

    /// Releases every grant of an owner, for a client that never received the token. Returns the
    /// fencing token up to which grants were released. A request of this owner that began before
    /// then, anywhere, can no longer set the lock with a token up to that one. A request that
    /// retries with a larger token is a new request.
    ///
    /// # Errors
    /// [`LockError::Lost`]: this owner did not hold the lock. [`LockError::NotHolder`]: somebody
    /// else holds the lock. [`LockError::Unknown`].
    pub async fn release_owner(
        &self,
        name: &LockName,
        owner: &Owner,
    ) -> Result<FencingToken, LockError> {
        if *owner == Owner::NOBODY {
            return Err(LockError::Lost);
        }
        release::release_owner(&self.shared, &self.waiters, name, owner).await
    }

    /// Releases a lock whoever holds it. The holder finds out when it extends or releases; until
    /// then only its fencing token keeps its writes out. A holder that gets the lock meanwhile
    /// keeps it. `on_found` is called with the holder before anything is sent to the nodes.
    ///
    /// # Errors
    /// [`LockError::Lost`]: nobody holds the lock. [`LockError::NotHolder`]: the lock went to
    /// somebody else meanwhile, or belongs to another Redlock client, whose locks are not released
    /// here. [`LockError::Unknown`].
    pub async fn force_release(
        &self,
        name: &LockName,
        on_found: impl FnOnce(&HeldBy) + Send,
    ) -> Result<(), LockError> {
        release::force_release(&self.shared, &self.waiters, name, on_found).await
    }

    /// Undoes, without waiting, a grant that nobody will use because the answer could not be
    /// delivered. Use this only for a lease that its own user has never extended. A replayed lease
    /// is left alone, since its first answer may have been delivered. So is a grant that another
    /// request has confirmed by extending it.
    pub fn abandon(&self, name: &LockName, lease: &Lease) {
        if !lease.replayed {
            release::release_and_hand_off(
                &self.shared,
                &self.waiters,
                self.shared.keys(name),
                &lease.token,
                ReleaseScope::Proposal,
            );
        }
    }

    pub(crate) fn release_in_background(&self, name: &LockName, lease: &Lease) {
        release::release_and_hand_off(
            &self.shared,
            &self.waiters,
            self.shared.keys(name),
            &lease.token,
            ReleaseScope::Holder,
        );
    }

    /// Reads a lock without changing it.
    pub async fn inspect(&self, name: &LockName) -> Inspection {
        inspect::inspect(&self.shared, name).await
    }

    /// A page of held locks whose names begin with `prefix` and satisfy `passes`. Reads nodes one
    /// after the other until no majority can have been missed, and asks all nodes about every lock
    /// it finds. Locks that come or go during a listing may be missed or shown twice. Locks of a
    /// node that stops answering may be shown twice. Names that do not satisfy `passes` are neither
    /// asked about nor counted, so the page reveals nothing about them.
    ///
    /// Listings use connections of their own, with backoff, so no vote waits for them. After
    /// `patience` the page ends with what it has.
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
    /// been used (`bootstrap` in the settings of the nodes). The declaration counts once. It is
    /// accepted only if all N nodes answer, none of them had a marker, and no gateway without the
    /// declaration saw such a node first. Waits until every node is known to be new, or one is
    /// known not to be.
    ///
    /// So a declaration that was left in some configuration is refused after a loss of *all* data,
    /// if a gateway without it was running and reacts in time. Without such a witness, a total loss
    /// looks like a new cluster. Before declaring a used cluster new, wait for the longest TTL.
    pub async fn bootstrap(&self) -> Bootstrap {
        bootstrap::bootstrap(&self.shared.nodes).await
    }

    /// The validity left of a lease now; `None` when the lease must no longer be trusted.
    pub fn validity(&self, lease: &Lease) -> Option<Duration> {
        lease.validity(self.shared.env.clock.monotonic())
    }

    /// Time since the request for a lease began.
    pub fn elapsed(&self, lease: &Lease) -> Duration {
        lease.elapsed(self.shared.env.clock.monotonic())
    }

    /// Time since the lock was acquired, by its fencing token.
    pub fn held_for(&self, token: &LockToken) -> Duration {
        self.shared.tokens.age(token.fencing())
    }

    /// Microseconds since 1970 by this machine's wall clock, for display.
    pub fn wall_micros(&self) -> u64 {
        self.shared.env.clock.wall_micros()
    }

    /// The monotonic clock of this process, which [`NodeMemory`](crate::node::NodeMemory) refers
    /// to.
    pub fn monotonic(&self) -> Duration {
        self.shared.env.clock.monotonic()
    }

    /// The name and the status feed of every node.
    pub fn nodes(&self) -> Vec<(String, watch::Receiver<NodeStatus>)> {
        self.shared.nodes.iter().map(|node| (node.name().to_owned(), node.status())).collect()
    }

    /// Waits until a majority may vote. Masters do not vote while they cannot be reached, are
    /// refused, or are in quarantine because they are new or lost data. [`Redlock::nodes`] shows
    /// which, and why.
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

    /// Waits until no release is in flight, for shutting down. Does not wait for nodes that are
    /// down.
    pub async fn drained(&self) {
        self.shared.pending.drained().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_node() -> (Redlock, LockName, Ttl) {
        let locks = Redlock::builder().embedded(1).connect().expect("settings");
        (locks, "a".parse::<LockName>().expect("a name"), Ttl::from_millis(1_000).expect("a TTL"))
    }

    #[cfg(feature = "redis")]
    #[tokio::test]
    async fn nodes_with_another_max_ttl_are_refused_naming_both() {
        use crate::node::redis::{RedisNode, RedisUrl};

        let of_nodes =
            Settings { max_ttl: Ttl::from_millis(10_000).expect("a ttl"), ..Settings::default() };
        let url = RedisUrl::parse("redis://127.0.0.1:1").expect("an address");
        let node = RedisNode::start(url, of_nodes.of_masters("c"), Env::default());
        let refused = Redlock::new(
            vec![Arc::new(node) as Arc<dyn Node>],
            Settings::default(),
            Env::default(),
        );
        let said = refused.err().expect("refused").to_string();
        assert!(said.contains("10s") && said.contains("300s"), "{said}");
    }

    // Regression tests.

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
