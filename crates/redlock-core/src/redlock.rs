//! Acquire, extend, release, inspect, list: the only control flow of the algorithm.
//!
//! Everything here is safe to cancel. A future that is dropped half-way leaves nothing behind: what it may have set is
//! released, on the clean-up's own deadline.

mod attempt;
mod brand_new;
mod list;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

pub(crate) use self::attempt::{Attempt, Claim, Denial};
pub use self::brand_new::BrandNew;
pub use self::list::{ListCursor, LockPage};
use crate::cleanup::Cleanup;
use crate::clock::{Clock, Entropy, HybridClock, OsEntropy, SystemClock};
use crate::error::{HeldBy, LockError, NodeAnswer, NodeReport};
use crate::heal::Healing;
use crate::node::{
    Effect, Failure, Holding, Keys, Listener, NoObserver, Node, NodeStatus, Observer, Op, Reason, Record, Vote,
};
use crate::quorum::{Decision, NodeCountError, Quorum};
use crate::retry::RetryPolicy;
use crate::round::{self, Outcome, Round};
use crate::types::{Info, LockName, LockToken, Owner, Ttl};
use crate::validity;
use crate::waiting::{Handing, Room};

/// Tries after the first when contenders have split the votes.
const MAX_SPLIT_TRIES: u32 = 3;

/// The shortest pause before such a try, where a round takes even less.
const SPLIT_PAUSE: Duration = Duration::from_millis(2);

/// What all gateways of a cluster must agree on, and how patient this one is.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Put before every lock name to make its key. Must not contain braces.
    pub key_prefix: String,
    /// The longest TTL anybody may ask for.
    pub max_ttl: Ttl,
    /// How long a round waits for a node; a tenth of the TTL if that is less.
    pub node_timeout: Duration,
    /// Part of a TTL that clocks running at different rates may eat.
    pub drift_factor: f64,
    /// D: how far a fencing token may be from a node's own time.
    pub max_clock_offset: Duration,
    /// How many may wait for locks, see [`Redlock::acquire_within`].
    pub max_waiters: usize,
    /// How many of them may wait for the same one.
    pub max_waiters_per_lock: usize,
    /// Which rules are on.
    #[cfg(feature = "mutation-testing")]
    pub rules: crate::node::Rules,
}

impl Settings {
    #[cfg(feature = "mutation-testing")]
    fn missing_is_healed(&self) -> bool {
        self.rules.missing_is_healed
    }

    #[cfg(not(feature = "mutation-testing"))]
    fn missing_is_healed(&self) -> bool {
        true
    }
}

impl Default for Settings {
    /// `lock:`, 5 minutes, 50 ms, 1 %, 2 s, 10,000 waiters, 1,024 for one lock.
    fn default() -> Self {
        Self {
            key_prefix: "lock:".into(),
            max_ttl: Ttl::from_millis(300_000).expect("within the limits of a Ttl"),
            node_timeout: Duration::from_millis(50),
            drift_factor: 0.01,
            max_clock_offset: Duration::from_secs(2),
            max_waiters: 10_000,
            max_waiters_per_lock: 1_024,
            #[cfg(feature = "mutation-testing")]
            rules: crate::node::Rules::ALL,
        }
    }
}

/// The seams: where time, chance and measurement come from.
#[derive(Clone)]
pub struct Seams {
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Chance.
    pub entropy: Arc<dyn Entropy>,
    /// Measurement.
    pub observer: Arc<dyn Observer>,
}

impl Default for Seams {
    /// The machine's clocks and generator; nothing is measured.
    fn default() -> Self {
        Self { clock: Arc::new(SystemClock), entropy: Arc::new(OsEntropy), observer: Arc::new(NoObserver) }
    }
}

/// Distributed locks over a fixed set of independent masters. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct Redlock {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) nodes: Arc<[Arc<dyn Node>]>,
    quorum: Quorum,
    settings: Settings,
    pub(crate) seams: Seams,
    tokens: HybridClock,
    cleanup: Arc<Cleanup>,
    pub(crate) room: Arc<Room>,
}

/// How to acquire.
#[derive(Debug, Clone, Default)]
pub struct AcquireOptions {
    /// Text for people, stored beside the lock.
    pub info: Info,
    /// Who will own it; a fresh random owner when `None`. The same owner gets its own lock again, with a larger fencing
    /// token and a full TTL. An attempt with a given owner that fails or is cancelled undoes only what it set on nodes
    /// where that owner had nothing: an earlier attempt may have been promised the rest.
    pub owner: Option<Owner>,
    /// Whether the given owner was drawn for this call alone. Then nobody was promised anything, and an attempt that fails
    /// undoes all it has set, as that of an owner drawn here does. Never for an owner that a repeated request comes to.
    pub owner_is_fresh: bool,
}

/// A lock that is held, or was when a majority said so.
#[derive(Debug, Clone)]
pub struct Lease {
    /// What the holder shows to extend and release. A secret.
    pub token: LockToken,
    /// For how long it was granted.
    pub ttl: Ttl,
    /// Nodes that had granted when the decision fell.
    pub nodes_granted: usize,
    /// All configured nodes.
    pub nodes_total: usize,
    /// How many times the nodes were asked for it.
    pub rounds: u32,
    /// Its number among all who waited in this process, in the order of arrival; `None` when it did not wait in line.
    pub ticket: Option<u64>,
    /// Whether the owner may have held it before: then an earlier request counts on it.
    renewed: bool,
    started: Duration,
    drift: Duration,
}

/// A lock as a majority sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inspection {
    /// The majority's view.
    pub state: LockState,
    /// What each node has, by name.
    pub nodes: Vec<(String, NodeView)>,
}

/// The majority's view of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LockState {
    /// A majority stores the same holder; `expires_in` is when it will no longer be a majority.
    Held(HeldBy),
    /// No holder can have a majority.
    Free,
    /// Too few nodes answered to tell.
    Unknown,
}

/// One node's view of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeView {
    /// Somebody's lock is stored.
    Held,
    /// Nothing is stored.
    Free,
    /// No usable answer.
    Failed(Failure),
    /// The answer was not needed.
    Pending,
}

/// Why a [`Redlock`] cannot be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SettingsError {
    /// No node, or too many.
    #[error(transparent)]
    Nodes(#[from] NodeCountError),
    /// Two nodes with one name are not independent.
    #[error("node {0} is given twice; a quorum needs independent nodes")]
    DuplicateNode(String),
    /// Outside `0.0..=0.5`.
    #[error("a drift factor of {0} is outside 0.0 to 0.5")]
    DriftFactor(f64),
    /// Nothing could ever answer in time.
    #[error("a node time-out of {0:?} is below 1 ms")]
    NodeTimeout(Duration),
    /// Braces would mix up lock keys with the keys kept beside them.
    #[error("the key prefix {0:?} contains a brace or a control character, or is longer than 255 bytes")]
    KeyPrefix(String),
}

impl Redlock {
    /// Puts nodes together. Must be called on a tokio runtime.
    pub fn new(nodes: Vec<Arc<dyn Node>>, settings: Settings, seams: Seams) -> Result<Self, SettingsError> {
        let quorum = Quorum::new(nodes.len())?;
        for (index, node) in nodes.iter().enumerate() {
            if nodes[..index].iter().any(|other| other.name() == node.name()) {
                return Err(SettingsError::DuplicateNode(node.name().into()));
            }
        }
        if !(0.0..=0.5).contains(&settings.drift_factor) {
            return Err(SettingsError::DriftFactor(settings.drift_factor));
        }
        if settings.node_timeout < Duration::from_millis(1) {
            return Err(SettingsError::NodeTimeout(settings.node_timeout));
        }
        let prefix = &settings.key_prefix;
        if prefix.contains(['{', '}']) || prefix.chars().any(char::is_control) || prefix.len() > 255 {
            return Err(SettingsError::KeyPrefix(prefix.clone()));
        }
        let life = settings.max_ttl.duration() + settings.max_clock_offset;
        let cleanup = Cleanup::start(&nodes, seams.observer.clone(), life);
        let tokens = HybridClock::new(seams.clock.clone(), settings.max_clock_offset);
        let room = Room::new(&settings, &seams);
        let listener: Arc<dyn Listener> = room.clone();
        nodes.iter().for_each(|node| node.listen(Arc::downgrade(&listener)));
        Ok(Self { shared: Arc::new(Shared { nodes: nodes.into(), quorum, settings, seams, tokens, cleanup, room }) })
    }

    /// Tries to get the lock, without waiting for a holder. Only when contenders have split the votes so that nobody can
    /// have a majority, it tries again, after a random pause longer than a round.
    ///
    /// # Errors
    /// [`LockError::Held`], [`LockError::NoQuorum`] (nothing is held then), [`LockError::TtlTooLong`].
    pub async fn acquire(&self, name: &LockName, ttl: Ttl, options: AcquireOptions) -> Result<Lease, LockError> {
        self.check_ttl(ttl)?;
        let claim = self.claim(&options);
        let (mut tries, mut rounds_before) = (0, 0);
        loop {
            let started = Instant::now();
            let error = match self.attempt(name, ttl, claim, &options.info).run().await {
                Ok(lease) => return Ok(Lease { rounds: lease.rounds + rounds_before, ..lease }),
                Err(Denial { error, split, rounds }) => {
                    if !split || tries == MAX_SPLIT_TRIES {
                        return Err(error);
                    }
                    rounds_before += rounds;
                    error
                }
            };
            tries += 1;
            tracing::debug!(lock = %name, tries, %error, "the votes were split");
            // From one to three rounds, more the next time: who wakes first finds the others gone.
            let round = started.elapsed().max(SPLIT_PAUSE);
            tokio::time::sleep(round.mul_f64(1.0 + 2.0 * self.shared.seams.entropy.unit()) * tries).await;
        }
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
        self.check_ttl(ttl)?;
        let claim = self.claim(&options);
        let started = Instant::now();
        let (mut tries, mut rounds_before) = (0, 0);
        loop {
            let error = match self.attempt(name, ttl, claim, &options.info).run().await {
                Ok(lease) => return Ok(Lease { rounds: lease.rounds + rounds_before, ..lease }),
                Err(Denial { error: error @ (LockError::Held(_) | LockError::NoQuorum(_)), rounds, .. }) => {
                    rounds_before += rounds;
                    error
                }
                Err(Denial { error, .. }) => return Err(error),
            };
            tries += 1;
            match policy.pause(tries, started.elapsed(), self.shared.seams.entropy.unit()) {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return Err(error),
            }
        }
    }

    fn attempt(&self, name: &LockName, ttl: Ttl, claim: Claim, info: &Info) -> Attempt {
        Attempt::new(&self.shared, self.shared.keys(name), claim, info.clone(), ttl)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn claim(&self, options: &AcquireOptions) -> Claim {
        match options.owner {
            Some(owner) => Claim { owner, shared: !options.owner_is_fresh },
            None => Claim { owner: self.fresh_owner(), shared: false },
        }
    }

    /// An owner that nobody else can guess.
    pub fn fresh_owner(&self) -> Owner {
        self.shared.seams.entropy.owner()
    }

    /// Prolongs a lock: from now on it lives at least `ttl`; it is never shortened. Success proves that the owner has
    /// held it without a gap: a lock that the same owner lost and got again has a newer token. Nodes that have lost the
    /// lock get it again, in the background.
    ///
    /// # Errors
    /// [`LockError::Lost`] and [`LockError::NotHolder`]: stop work. [`LockError::Unknown`]: the old deadline stands.
    pub async fn extend(&self, name: &LockName, token: &LockToken, ttl: Ttl) -> Result<Lease, LockError> {
        let shared = &self.shared;
        self.check_ttl(ttl)?;
        let started = shared.seams.clock.monotonic();
        let limit = shared.round_limit(ttl);
        let deadline = Instant::now() + limit;
        let record = Record::new(token, &Info::default());
        let keys = shared.keys(name);
        let healing = shared.settings.missing_is_healed().then(|| shared.healing(&keys, token, ttl, started));
        let op = Op::Extend { keys, record, ttl };
        let round = Round::new(shared.quorum, op, &shared.seams.observer, healing);
        round.ask(&shared.nodes, u32::MAX, deadline);
        let outcome = round.outcome(deadline, limit).await;
        match outcome.decision {
            Decision::Yes => {
                let lease = shared.lease(*token, ttl, started, &outcome);
                // The nodes have the lock, but the answer took so long that nothing can be promised of it.
                self.validity(&lease).map(|_| lease).ok_or_else(|| LockError::Unknown(shared.reports(&outcome)))
            }
            Decision::No => Err(not_held(shared.quorum, &shared.clear_votes(&round, deadline).await)),
            Decision::Neither | Decision::Open => Err(LockError::Unknown(shared.reports(&outcome))),
        }
    }

    /// Gives a lock back. Returns when a majority has let go; nodes that did not answer are asked again in the
    /// background.
    ///
    /// # Errors
    /// [`LockError::Lost`]: it had been released or had expired. [`LockError::NotHolder`]. [`LockError::Unknown`].
    pub async fn release(&self, name: &LockName, token: &LockToken) -> Result<(), LockError> {
        let shared = &self.shared;
        let limit = shared.settings.node_timeout;
        let deadline = Instant::now() + limit;
        let round = shared.let_go(shared.keys(name), token);
        let outcome = round.outcome(deadline, limit).await;
        let count = |kind: fn(&Vote) -> bool| outcome.votes.iter().flatten().filter(|vote| kind(vote)).count();
        let released = count(|vote| matches!(vote, Vote::Released));
        let refused = count(|vote| matches!(vote, Vote::Held(_) | Vote::Missing));
        match outcome.decision {
            Decision::Yes => Ok(()),
            Decision::No => Err(not_held(shared.quorum, &shared.clear_votes(&round, deadline).await)),
            // It was ours somewhere, and with a majority of answers none is left that could hold it still.
            Decision::Neither | Decision::Open if released > 0 && released + refused >= shared.quorum.size() => Ok(()),
            Decision::Neither | Decision::Open => Err(LockError::Unknown(shared.reports(&outcome))),
        }
    }

    /// Releases a lock for whoever holds it, who learns of it when it extends or releases; its fencing token is all that
    /// keeps its writes out from now on. A holder that comes in between keeps the lock. `found` hears who holds it before the
    /// nodes are told anything.
    ///
    /// # Errors
    /// [`LockError::Lost`]: nobody holds it. [`LockError::NotHolder`]: it went to somebody else in the meantime, or another
    /// Redlock client has it, whose locks are not ours to judge. [`LockError::Unknown`].
    pub async fn force_release(&self, name: &LockName, found: impl FnOnce(&HeldBy) + Send) -> Result<(), LockError> {
        let shared = &self.shared;
        let limit = shared.settings.node_timeout;
        let deadline = Instant::now() + limit;
        let outcome = shared.round(Op::Inspect { keys: shared.keys(name) }, deadline).outcome(deadline, limit).await;
        let by = match lock_state(shared.quorum, &outcome) {
            LockState::Held(by) => by,
            LockState::Free => return Err(LockError::Lost),
            LockState::Unknown => return Err(LockError::Unknown(shared.reports(&outcome))),
        };
        // A node may have missed the last of an owner's grants: the release of an older one would leave the newer alone.
        let owner = round::agreeing(&outcome.votes).map(|(majority, _)| majority);
        let its_own = outcome.votes.iter().flatten().filter_map(|vote| match vote {
            Vote::Found(holding) if owner.is_some_and(|owner| round::same_owner(holding, owner)) => {
                holding.record.parse()
            }
            _ => None,
        });
        match its_own.map(|(token, _)| token).max_by_key(LockToken::fencing) {
            Some(token) => {
                found(&by);
                self.release(name, &token).await
            }
            None => Err(LockError::NotHolder(by)),
        }
    }

    /// Reads a lock without changing it.
    pub async fn inspect(&self, name: &LockName) -> Inspection {
        let shared = &self.shared;
        let limit = shared.settings.node_timeout;
        let deadline = Instant::now() + limit;
        let keys = shared.keys(name);
        let outcome = shared.round(Op::Inspect { keys }, deadline).outcome(deadline, limit).await;
        let nodes = shared.names().zip(&outcome.votes).map(|(name, vote)| (name, node_view(vote.as_ref()))).collect();
        Inspection { state: lock_state(shared.quorum, &outcome), nodes }
    }

    /// Undoes a grant that nobody will use, without waiting: the answer could not be delivered. Does nothing when the
    /// owner may have held the lock before, because an earlier answer may have been delivered.
    pub fn abandon(&self, name: &LockName, lease: &Lease) {
        if lease.renewed {
            return;
        }
        self.shared.let_go(self.shared.keys(name), &lease.token);
    }

    /// What is left of a lease now: `None` when it must no longer be trusted.
    pub fn validity(&self, lease: &Lease) -> Option<Duration> {
        validity::validity(lease.ttl, self.elapsed(lease), lease.drift)
    }

    /// Time since the request for a lease began.
    pub fn elapsed(&self, lease: &Lease) -> Duration {
        self.shared.seams.clock.monotonic().saturating_sub(lease.started)
    }

    /// Time since the lock was acquired, as its fencing token says.
    pub fn held_for(&self, token: &LockToken) -> Duration {
        self.shared.tokens.age(token.fencing())
    }

    /// Microseconds since 1970 by this machine's wall clock, for people.
    pub fn wall_micros(&self) -> u64 {
        self.shared.seams.clock.wall_micros()
    }

    /// A status feed for every node, by name.
    pub fn nodes(&self) -> Vec<(String, watch::Receiver<NodeStatus>)> {
        self.shared.nodes.iter().map(|node| (node.name().to_owned(), node.status())).collect()
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
    pub async fn settled(&self) {
        self.shared.cleanup.settled().await;
    }

    pub(crate) fn check_ttl(&self, asked: Ttl) -> Result<(), LockError> {
        let max = self.shared.settings.max_ttl;
        if asked > max { Err(LockError::TtlTooLong { asked, max }) } else { Ok(()) }
    }
}

impl Shared {
    pub(crate) fn keys(&self, name: &LockName) -> Keys {
        Keys::new(&self.settings.key_prefix, name)
    }

    pub(crate) fn round(&self, op: Op, deadline: Instant) -> Arc<Round> {
        let round = Round::new(self.quorum, op, &self.seams.observer, None);
        round.ask(&self.nodes, u32::MAX, deadline);
        round
    }

    fn healing(&self, keys: &Keys, token: &LockToken, ttl: Ttl, started: Duration) -> Arc<Healing> {
        Arc::new(Healing {
            nodes: self.nodes.clone(),
            observer: self.seams.observer.clone(),
            keys: keys.clone(),
            token: *token,
            ttl,
            not_after: Instant::now() + ttl.duration(),
            until: started + ttl.duration().saturating_sub(validity::drift(ttl, self.settings.drift_factor)),
            clock: self.seams.clock.clone(),
            progress: Default::default(),
        })
    }

    /// The votes of a round that was refused, once they tell whether one holder has a majority. Refusals for different
    /// contenders say little: the votes that are still out decide.
    async fn clear_votes(&self, round: &Round, deadline: Instant) -> Vec<Option<Vote>> {
        let clear = |votes: &[Option<Vote>]| holds(self.quorum, votes) || !can_hold(self.quorum, votes);
        round.votes_until(deadline, clear).await
    }

    /// Releases a grant on all nodes, and hands the lock to who waits for it.
    fn let_go(self: &Arc<Self>, keys: Keys, token: &LockToken) -> Arc<Round> {
        let lock = keys.lock.clone();
        let record = Record::new(token, &Info::default());
        let release = |tell| Arc::new(Op::Release { keys, record, failed_try: false, tell });
        let now = Instant::now();
        match self.handing(&lock, token.fencing(), now) {
            Handing::Tell(hint) => {
                let round = self.release_on(release(hint), u32::MAX);
                self.released(&lock, now);
                round
            }
            Handing::To(next) => {
                let (offer, mut attempt) = *next;
                let round = self.release_round(release(None));
                match attempt.prepare() {
                    Ok((next, deadline)) => round.ask_both(&self.nodes, self.release_life(), (&next, deadline)),
                    // The waiter will find out for itself, and has somebody to tell.
                    Err(_) => {
                        round.ask(&self.nodes, u32::MAX, self.release_life());
                        // It may have left, and the next one asked too early.
                        drop(offer);
                        self.released(&lock, now);
                        return round;
                    }
                }
                if let Some(unused) = offer.hand(attempt) {
                    // The waiter has left in the meantime. Dropped, it is undone, and the next one may have asked too early.
                    drop(unused);
                    self.released(&lock, now);
                }
                round
            }
        }
    }

    fn release_on(&self, op: Arc<Op>, mask: u32) -> Arc<Round> {
        let round = self.release_round(op);
        round.ask(&self.nodes, mask, self.release_life());
        round
    }

    /// A release is worth running however late it is.
    fn release_life(&self) -> Instant {
        Instant::now() + self.settings.max_ttl.duration()
    }

    fn release_round(&self, op: Arc<Op>) -> Arc<Round> {
        // A node sets no barrier for a T more than half of D ahead of it, but it may have granted one up to D ahead. What is
        // further ahead was invented, and nothing is owed for it.
        let t = match op.as_ref() {
            Op::Release { record, .. } => record.fencing(),
            _ => None,
        };
        let owe_clock = t.is_some_and(|t| self.tokens.is_credible(t));
        Round::release(self.quorum, op, &self.seams.observer, &self.cleanup, owe_clock)
    }

    /// Never above a tenth of the TTL, so that a round with hung nodes leaves most of the lease.
    pub(crate) fn round_limit(&self, ttl: Ttl) -> Duration {
        self.settings.node_timeout.min(ttl.duration() / 10)
    }

    fn lease(&self, token: LockToken, ttl: Ttl, started: Duration, outcome: &Outcome) -> Lease {
        let agreed = |vote: &&Vote| matches!(vote, Vote::Granted | Vote::GrantedAgain | Vote::Extended);
        Lease {
            token,
            ttl,
            nodes_granted: outcome.votes.iter().flatten().filter(agreed).count(),
            nodes_total: self.nodes.len(),
            rounds: 1,
            ticket: None,
            renewed: false,
            started,
            drift: validity::drift(ttl, self.settings.drift_factor),
        }
    }

    fn names(&self) -> impl Iterator<Item = String> {
        self.nodes.iter().map(|node| node.name().to_owned())
    }

    fn reports(&self, outcome: &Outcome) -> Vec<NodeReport> {
        let votes = outcome.votes.iter().map(Option::as_ref);
        self.names().zip(votes).map(|(node, vote)| NodeReport { node, answer: answer(vote) }).collect()
    }

    fn reports_of(&self, reason: Reason, detail: &str) -> Vec<NodeReport> {
        let failure = || NodeAnswer::Failed(Failure::new(reason, Effect::None, detail));
        self.names().map(|node| NodeReport { node, answer: failure() }).collect()
    }
}

/// Who holds a lock that enough nodes refused, and the earliest time at which a majority can be free: when all but
/// `blocking − 1` of the refusers have expired.
fn held_by(quorum: Quorum, votes: &[Option<Vote>]) -> HeldBy {
    let mut refusals: Vec<&Holding> = votes
        .iter()
        .flatten()
        .filter_map(|vote| match vote {
            Vote::Held(holding) | Vote::Found(holding) => Some(holding),
            _ => None,
        })
        .collect();
    // A key without expiry sorts last.
    refusals.sort_by_key(|holding| holding.expires_in.unwrap_or(Duration::MAX));
    let deciding = refusals.get(refusals.len().saturating_sub(quorum.blocking())).or(refusals.last());
    let expires_in = deciding.and_then(|holding| holding.expires_in);
    round::agreeing(votes).map_or_else(HeldBy::default, |(holding, _)| HeldBy::from_holding(holding, expires_in))
}

/// Extend and release: gone, or somebody else's? A minority may show a try that lost; only what can still be a majority is
/// a holder.
fn not_held(quorum: Quorum, votes: &[Option<Vote>]) -> LockError {
    if can_hold(quorum, votes) { LockError::NotHolder(held_by(quorum, votes)) } else { LockError::Lost }
}

/// Whether a majority shows one holder.
fn holds(quorum: Quorum, votes: &[Option<Vote>]) -> bool {
    round::agreeing(votes).is_some_and(|(_, count)| count >= quorum.size())
}

/// Whether one of those who have the lock on some nodes may have it on a majority, as far as the votes tell.
fn can_hold(quorum: Quorum, votes: &[Option<Vote>]) -> bool {
    let unheard = votes.iter().filter(|vote| matches!(vote, None | Some(Vote::Failed(_)))).count();
    round::agreeing(votes).is_some_and(|(_, count)| count + unheard >= quorum.size())
}

fn lock_state(quorum: Quorum, outcome: &Outcome) -> LockState {
    match (outcome.decision, round::agreeing(&outcome.votes)) {
        (Decision::Yes, Some((majority, _))) => {
            let mut lives: Vec<_> = outcome
                .votes
                .iter()
                .flatten()
                .filter_map(|vote| match vote {
                    Vote::Found(holding) if round::same_owner(holding, majority) => Some(holding.expires_in),
                    _ => None,
                })
                .collect();
            // It stops being a majority when the quorum-th longest of them expires.
            lives.sort_by_key(|life| std::cmp::Reverse(life.unwrap_or(Duration::MAX)));
            let expires_in = lives.get(quorum.size() - 1).copied().flatten();
            LockState::Held(HeldBy::from_holding(majority, expires_in))
        }
        (Decision::No, _) => LockState::Free,
        // All answered and no owner has a majority: nobody holds it.
        (Decision::Neither, _)
            if outcome.votes.iter().all(|vote| matches!(vote, Some(Vote::Found(_) | Vote::Missing))) =>
        {
            LockState::Free
        }
        (Decision::Yes | Decision::Neither | Decision::Open, _) => LockState::Unknown,
    }
}

fn node_view(vote: Option<&Vote>) -> NodeView {
    match vote {
        None => NodeView::Pending,
        Some(Vote::Found(_) | Vote::Held(_)) => NodeView::Held,
        Some(Vote::Missing) => NodeView::Free,
        Some(Vote::Failed(failure)) => NodeView::Failed(failure.clone()),
        Some(
            Vote::Granted
            | Vote::GrantedAgain
            | Vote::Stale { .. }
            | Vote::Extended
            | Vote::Released
            | Vote::Page { .. },
        ) => NodeView::Failed(Failure::new(Reason::Error, Effect::None, "an answer to another question")),
    }
}

fn answer(vote: Option<&Vote>) -> NodeAnswer {
    match vote {
        None => NodeAnswer::Pending,
        Some(Vote::Granted | Vote::GrantedAgain | Vote::Extended | Vote::Released) => NodeAnswer::Agreed,
        Some(Vote::Found(_) | Vote::Page { .. }) => NodeAnswer::Agreed,
        Some(Vote::Held(_)) => NodeAnswer::Refused("held by somebody else"),
        Some(Vote::Missing) => NodeAnswer::Refused("has no such lock"),
        Some(Vote::Stale { .. }) => NodeAnswer::Refused("has seen a newer fencing token"),
        Some(Vote::Failed(failure)) => NodeAnswer::Failed(failure.clone()),
    }
}
