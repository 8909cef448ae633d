//! The facade: what a user of the library can do, over the modules that do it.
//!
//! Everything here is safe to cancel. A future that is dropped half-way leaves nothing behind: what it may have set is
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

/// A page that takes longer is of no use to anybody.
const LONGEST_LISTING: Duration = Duration::from_secs(3600);

/// Distributed locks over a fixed set of independent masters. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct Redlock {
    shared: Arc<Shared>,
    waiters: Arc<Waiters>,
}

impl Redlock {
    /// Puts nodes together, which must have been made of the same settings. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// The setting, its value and what is allowed.
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

    /// Tries to get the lock, without waiting for a holder. Only when contenders have split the votes so that nobody can
    /// have a majority, it tries again, after a random pause longer than a round.
    ///
    /// # Errors
    /// [`LockError::Held`], [`LockError::NoQuorum`] (nothing is held then), [`LockError::TtlTooLong`],
    /// [`LockError::TtlTooShort`]; for a shared owner also [`LockError::Unknown`] and [`LockError::HeldTooLong`].
    pub async fn acquire(
        &self,
        name: &LockName,
        ttl: Ttl,
        options: AcquireOptions,
    ) -> Result<Lease, LockError> {
        acquire::acquire(&self.shared, AcquireParams::new(&self.shared, name, ttl, options)?, None)
            .await
    }

    /// Tries until the lock is granted or the policy is exhausted; the last error is returned.
    ///
    /// # Errors
    /// As [`Redlock::acquire`].
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

    /// Gets the lock, waiting for as long as `patience` for its holder and for those who have waited longer in this
    /// process. Calls `on_wait` when it begins to wait, if it does, and gives up with its error. Safe to cancel: a future that
    /// is dropped leaves the queue, and what it may have been granted is released.
    ///
    /// An owner that already has the lock is told of its grant without waiting.
    ///
    /// # Errors
    /// At the end of its patience the last one of [`Redlock::acquire`]. [`LockError::TooManyWaiters`] at once where somebody
    /// waits for the lock here already, and when the lock was tried where nobody does.
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

    /// How many wait now.
    pub fn waiting(&self) -> Waiting {
        self.waiters.count()
    }

    /// How far the fencing tokens that are minted now lie ahead of this machine's clock: what was learned from gateways whose
    /// clocks are ahead of it.
    pub fn clock_lead(&self) -> Duration {
        self.shared.tokens.lead()
    }

    /// An owner that nobody else can guess.
    pub fn fresh_owner(&self) -> Owner {
        self.shared.env.entropy.owner()
    }

    /// Prolongs a lock: from now on it lives at least `ttl`; it is never shortened. Success proves that the owner has
    /// held it without a gap: a lock that the same owner lost and got again has a newer token. Nodes that have lost the
    /// lock get it again, in the background.
    ///
    /// # Errors
    /// [`LockError::Lost`] and [`LockError::NotHolder`]: stop work. [`LockError::Unknown`]: the old deadline stands.
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

    /// Gives a lock back. Returns when a majority has let go; nodes that did not answer are asked again in the
    /// background.
    ///
    /// # Errors
    /// [`LockError::Lost`]: it had been released or had expired. [`LockError::NotHolder`]. [`LockError::Unknown`].
    pub async fn release(&self, name: &LockName, token: &LockToken) -> Result<(), LockError> {
        // What keeps a lock free after a loss of data is in nobody's name, and anybody can write that down.
        if *token.owner() == Owner::NOBODY {
            return Err(LockError::Lost);
        }
        release::release(&self.shared, &self.waiters, name, token).await
    }

    /// Releases what an owner was granted, by whichever of its requests, for a client that never got the token. Gives the fencing
    /// token up to which that was done. A request of this owner that has begun by then, anywhere, cannot set the lock any more
    /// with a token up to that one; one that goes on and asks again with a larger token is a new request.
    ///
    /// # Errors
    /// [`LockError::Lost`]: nothing of this owner held the lock. [`LockError::NotHolder`]: somebody else holds it.
    /// [`LockError::Unknown`].
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

    /// Releases a lock whoever holds it: the holder learns of it when it extends or releases, and its fencing token is all
    /// that keeps its writes out from now on. A holder that comes in between keeps the lock. `on_found` hears who holds it
    /// before the nodes are told anything.
    ///
    /// # Errors
    /// [`LockError::Lost`]: nobody holds it. [`LockError::NotHolder`]: it went to somebody else in the meantime, or another
    /// Redlock client has it, whose locks are not ours to judge. [`LockError::Unknown`].
    pub async fn force_release(
        &self,
        name: &LockName,
        on_found: impl FnOnce(&HeldBy) + Send,
    ) -> Result<(), LockError> {
        release::force_release(&self.shared, &self.waiters, name, on_found).await
    }

    /// Undoes a grant that nobody will use, without waiting: the answer could not be delivered. Does nothing for one that an
    /// earlier request was granted, whose answer may have been delivered, and spares what another request has confirmed by
    /// extending it: so only for a lease that its own user has never extended.
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

    /// A page of held locks whose names begin with `prefix` and pass. Reads one node after the other until so many were
    /// read that no majority can be missed, and asks all nodes about every lock it meets. Locks that come or go during a
    /// listing may be missed or shown twice, and those of a node that stops answering during it shown twice. Names that do
    /// not pass are neither looked at nor counted, so that nothing in the page tells of them.
    ///
    /// All of it goes on connections of its own, with backoff, so that no vote waits for it. The page ends after `patience`
    /// with what it has.
    ///
    /// # Errors
    /// [`LockError::NoQuorum`] when too few nodes can be read, or nothing could be within that time.
    pub async fn list(
        &self,
        prefix: &str,
        limit: usize,
        cursor: ListCursor,
        patience: Duration,
        passes: impl Fn(&LockName) -> bool + Send + Sync,
    ) -> Result<LockPage, LockError> {
        let params = ListParams {
            prefix,
            limit,
            cursor,
            until: Instant::now() + patience.min(LONGEST_LISTING),
        };
        list::list(&self.shared, params, passes).await
    }

    /// Takes an operator's word that this cluster has never been used, and ends the quarantine of its nodes. The word is
    /// believed only when all N nodes answer, none of them had a marker, and no gateway without that word was the first to
    /// see one of them so (`bootstrap` in the settings of the nodes): waits until every node is known to be new, or one is
    /// known not to be. It counts once.
    ///
    /// So it is not believed, although it may still stand in some configuration, when a cluster has lost *all* its data
    /// under the eyes of a gateway, which is given a moment to say so. Without such a witness a total loss looks like a new
    /// cluster: before this is said of a cluster that was in use, the longest TTL has to pass.
    pub async fn bootstrap(&self) -> Bootstrap {
        bootstrap::bootstrap(&self.shared.nodes).await
    }

    /// What is left of a lease now: `None` when it must no longer be trusted.
    pub fn validity(&self, lease: &Lease) -> Option<Duration> {
        lease.validity(self.shared.env.clock.monotonic())
    }

    /// Time since the request for a lease began.
    pub fn elapsed(&self, lease: &Lease) -> Duration {
        lease.elapsed(self.shared.env.clock.monotonic())
    }

    /// Time since the lock was acquired, as its fencing token says.
    pub fn held_for(&self, token: &LockToken) -> Duration {
        self.shared.tokens.age(token.fencing())
    }

    /// Microseconds since 1970 by this machine's wall clock, for people.
    pub fn wall_micros(&self) -> u64 {
        self.shared.env.clock.wall_micros()
    }

    /// The monotonic clock of this process, which [`NodeMemory`](crate::node::NodeMemory) refers to.
    pub fn monotonic(&self) -> Duration {
        self.shared.env.clock.monotonic()
    }

    /// A status feed for every node, by name.
    pub fn nodes(&self) -> Vec<(String, watch::Receiver<NodeStatus>)> {
        self.shared.nodes.iter().map(|node| (node.name().to_owned(), node.status())).collect()
    }

    /// Waits until a majority may vote: for as long as masters cannot be reached, are refused, or are in quarantine
    /// because they are new or have lost data ([`Redlock::nodes`] says which and why).
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

    /// Size of the cluster and its majority.
    pub fn quorum(&self) -> Quorum {
        self.shared.quorum
    }

    /// Waits until no release is under way any more; for shutting down. Does not wait for nodes that are down.
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
    async fn nodes_that_were_made_for_another_max_ttl_are_refused_with_both() {
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

    // What went wrong once.

    #[tokio::test]
    async fn nobodys_token_extends_and_releases_nothing() {
        let (locks, name, ttl) = one_node();
        let token =
            format!("1.1763725165123456.{}", "0".repeat(40)).parse::<LockToken>().expect("a token");
        assert_eq!(locks.extend(&name, &token, ttl).await.err(), Some(LockError::Lost));
        assert_eq!(locks.release(&name, &token).await.err(), Some(LockError::Lost));
    }

    #[tokio::test]
    async fn a_waiter_of_little_patience_in_the_turn_of_others_still_asks_once() {
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
    async fn a_patience_without_end_is_no_panic() {
        let (locks, name, ttl) = one_node();
        let lease = locks
            .acquire_within(&name, ttl, AcquireOptions::default(), Duration::MAX, || Ok(()))
            .await;
        assert!(lease.is_ok(), "{lease:?}");
    }
}
