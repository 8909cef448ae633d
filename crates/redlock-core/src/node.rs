//! The seam between the algorithm and one master: an [`Op`] goes in, a [`Vote`] comes out.
//!
//! A node knows nothing of the other nodes, of quorum, of TTL policy or of retries. It promises three things:
//!
//! 1. *Order*: operations submitted one after the other take effect in that order, or not at all. So a release never
//!    overtakes its own acquire.
//! 2. *One vote each*: every submitted operation is answered exactly once, if only with [`Vote::Failed`]; `submit` itself
//!    never waits.
//! 3. *Honesty about effects*: [`Effect::None`] is said only when the node cannot have run the operation, now or later.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::types::{FencingToken, Info, LockName, LockToken, Owner, Ttl};

pub mod admission;
pub(crate) mod hint;
pub mod memory;
pub mod redis;

pub use self::hint::Hint;

/// One master, as a round sees it.
pub trait Node: Send + Sync + 'static {
    /// `host:port` or another name that is fit for logs and metrics; never a password.
    fn name(&self) -> &str;

    /// Whether it may vote, and why not.
    fn status(&self) -> watch::Receiver<NodeStatus>;

    /// Takes an operation; the vote goes to `reply`, at once or later. Operations that the node has not begun by
    /// `not_after` may be answered `Failed` without being run.
    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply);

    /// Takes two operations that are to run one right after the other, in one call where there are calls.
    fn submit_both(&self, first: Task, second: Task) {
        self.submit(first.op, first.not_after, first.reply);
        self.submit(second.op, second.not_after, second.reply);
    }

    /// From now on `listener` hears what others have this node say, beside those that listen already. By default nobody
    /// else can say anything.
    fn listen(&self, listener: Weak<dyn Listener>) {
        let _ = listener;
    }

    /// Whether listeners would hear it now.
    fn hears(&self) -> bool {
        true
    }

    /// Somebody who has looked at all nodes says that the cluster is brand-new: a node that is quarantined as new
    /// is admitted at once. Does nothing to any other node.
    fn admit_brand_new(&self) {}
}

/// An operation with its deadline and its return address, see [`Node::submit`].
#[derive(Debug)]
pub struct Task {
    /// What to do.
    pub op: Arc<Op>,
    /// When it need not be begun any more.
    pub not_after: Instant,
    /// Where the vote goes.
    pub reply: Reply,
}

/// Hears what other processes say through a node. A hint may be lost, repeated or late: nothing may rest on it.
pub trait Listener: Send + Sync {
    /// Called for every hint, one's own included. Must not block.
    fn hear(&self, hint: &Hint);
}

/// Where a lock lives on every node.
///
/// One buffer holds `{<prefix><name>}:fence`; the lock key is the part between the braces, so both are in the same
/// cluster slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    /// The lock: `<prefix><name>`.
    pub lock: Bytes,
    /// The fence: `{<prefix><name>}:fence`.
    pub fence: Bytes,
}

impl Keys {
    /// The keys of one lock under a prefix.
    pub fn new(prefix: &str, name: &LockName) -> Self {
        let mut text = Vec::with_capacity(prefix.len() + name.as_str().len() + 8);
        text.push(b'{');
        text.extend_from_slice(prefix.as_bytes());
        text.extend_from_slice(name.as_str().as_bytes());
        let end = text.len();
        text.extend_from_slice(b"}:fence");
        let fence = Bytes::from(text);
        Self { lock: fence.slice(1..end), fence }
    }
}

/// What a node stores for a held lock: `T:owner:info`, T and owner of fixed width. The first extension puts a `;` after the
/// owner, see `node/locks.lua`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record(Bytes);

impl Record {
    const OWNER_AT: usize = FencingToken::TEXT_LEN + 1;
    /// Length of `T:owner`, which names one grant and is what a release compares.
    pub(crate) const GRANT_LEN: usize = Self::OWNER_AT + Owner::TEXT_LEN;

    /// The record of a grant.
    pub fn new(token: &LockToken, info: &Info) -> Self {
        let mut text = Vec::with_capacity(Self::GRANT_LEN + 1 + info.0.len());
        text.extend_from_slice(&token.fencing().text());
        text.push(b':');
        text.extend_from_slice(token.owner().as_bytes());
        text.push(b':');
        text.extend_from_slice(&info.0);
        Self(Bytes::from(text))
    }

    /// Whatever a node had under the lock key; other Redlock clients put their own values there.
    pub fn foreign(value: Bytes) -> Self {
        Self(value)
    }

    /// The stored bytes.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    /// `T:owner`, for a record of our own.
    pub fn grant(&self) -> Bytes {
        self.0.slice(..Self::GRANT_LEN)
    }

    /// The parts, or `None` when another client's value is stored.
    pub fn parse(&self) -> Option<(LockToken, &[u8])> {
        let fencing = FencingToken::parse(self.0.get(..FencingToken::TEXT_LEN)?)?;
        let owner = Owner::parse(self.0.get(Self::OWNER_AT..Self::GRANT_LEN)?)?;
        let separators = (self.0.get(FencingToken::TEXT_LEN)?, self.0.get(Self::GRANT_LEN)?);
        let info = self.0.get(Self::GRANT_LEN + 1..)?;
        matches!(separators, (b':', b':' | b';')).then(|| (LockToken::new(owner, fencing), info))
    }

    /// Whether it has been extended on the node that stores it.
    pub(crate) fn is_extended(&self) -> bool {
        self.0.get(Self::GRANT_LEN) == Some(&b';')
    }

    pub(crate) fn extended(&self) -> Self {
        let mut text = self.0.to_vec();
        if let Some(separator) = text.get_mut(Self::GRANT_LEN) {
            *separator = b';';
        }
        Self(Bytes::from(text))
    }

    pub(crate) fn owner_text(&self) -> &[u8] {
        self.0.get(Self::OWNER_AT..Self::GRANT_LEN).unwrap_or_default()
    }

    pub(crate) fn fencing(&self) -> Option<FencingToken> {
        FencingToken::parse(self.0.get(..FencingToken::TEXT_LEN)?)
    }
}

/// What a node is asked to do.
#[derive(Debug, Clone)]
pub enum Op {
    /// Set the lock if it is free (or this owner's) and T is larger than the fence; store T in both keys.
    Acquire {
        /// The lock's keys.
        keys: Keys,
        /// What to store.
        record: Record,
        /// How long.
        ttl: Ttl,
        /// What to tell everybody when somebody else holds the lock.
        tell: Option<Hint>,
    },
    /// Prolong the lock if it is this very grant, owner and T; never shorten it.
    Extend {
        /// The lock's keys.
        keys: Keys,
        /// The grant to prolong.
        record: Record,
        /// How long from now.
        ttl: Ttl,
    },
    /// Set an extended lock again where it is gone, unless the fence tells of a later grant or of its release. Only for a
    /// T that a majority has just extended: it may be as old as the lock.
    Heal {
        /// The lock's keys.
        keys: Keys,
        /// What to store.
        record: Record,
        /// How long.
        ttl: Ttl,
    },
    /// Delete the lock if this owner has it with no newer T, and leave the fence at T or above, where no heal passes it.
    Release {
        /// The lock's keys.
        keys: Keys,
        /// The grant to undo.
        record: Record,
        /// Whether nobody has been told of this T: then the fence that the grant has left is taken back as well.
        failed_try: bool,
        /// What to tell everybody when the lock was released.
        tell: Option<Hint>,
    },
    /// Read the lock.
    Inspect {
        /// The lock's keys.
        keys: Keys,
    },
    /// Read a page of lock keys.
    Scan {
        /// Only keys that begin so.
        key_prefix: Bytes,
        /// Where the last page ended; empty to begin.
        cursor: Bytes,
        /// About how many.
        count: u32,
    },
}

impl Op {
    /// What the node tells everybody when this is its answer.
    pub fn told(&self, vote: &Vote) -> Option<&Hint> {
        match (self, vote) {
            (Self::Acquire { tell, .. }, Vote::Held(_)) | (Self::Release { tell, .. }, Vote::Released) => tell.as_ref(),
            _ => None,
        }
    }
}

/// A node's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Vote {
    /// The lock was free and is set with exactly the T that was asked for.
    Granted,
    /// The same, on a node where this owner had the lock already. Undoing such a grant would take away what an earlier
    /// request of the same owner was promised.
    GrantedAgain,
    /// Somebody else's lock stands.
    Held(Holding),
    /// Free, but the node has seen this T or a larger one.
    Stale {
        /// The last T stored for this lock.
        fence: FencingToken,
    },
    /// The lock is still this grant and lives at least the asked TTL from now.
    Extended,
    /// The lock was this owner's and is gone now; the fence is at T or above, and no heal passes it.
    Released,
    /// There is no such lock.
    Missing,
    /// The lock as it stands.
    Found(Holding),
    /// A page of lock keys.
    Page {
        /// The keys found.
        keys: Vec<Bytes>,
        /// Where the next page begins; `None` at the end.
        next: Option<Bytes>,
    },
    /// No usable answer.
    Failed(Failure),
}

/// A lock as one node stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// What is stored.
    pub record: Record,
    /// How long it still lives; `None` for a key without expiry, which only another client can have set.
    pub expires_in: Option<Duration>,
}

/// Whether an operation that failed may have run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It has not run and never will.
    None,
    /// It may have run, or may still run.
    Possible,
}

/// Why a node gave no usable answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The kind, for metrics and callers.
    pub reason: Reason,
    /// Whether the operation may have run.
    pub effect: Effect,
    /// One sentence for people.
    pub detail: String,
}

impl Failure {
    pub(crate) fn new(reason: Reason, effect: Effect, detail: impl Into<String>) -> Self {
        Self { reason, effect, detail: detail.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason.as_str(), self.detail)
    }
}

/// The kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No answer within the node time-out.
    Timeout,
    /// No connection.
    Down,
    /// Connected, but not admitted to vote.
    Quarantined,
    /// The T is too far from the node's own time.
    Clock,
    /// The node's queue is full.
    Overloaded,
    /// The node answered with an error.
    Error,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 6] =
        [Self::Timeout, Self::Down, Self::Quarantined, Self::Clock, Self::Overloaded, Self::Error];

    /// A word for metrics and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Down => "down",
            Self::Quarantined => "quarantined",
            Self::Clock => "clock",
            Self::Overloaded => "overloaded",
            Self::Error => "error",
        }
    }
}

/// Receives the votes of one round.
pub trait Voter: Send + Sync {
    /// Node number `node` has voted. Called exactly once for each submitted [`Reply`].
    fn vote(&self, node: usize, vote: Vote);
}

/// The return address of one operation. Dropping it unanswered votes `Failed` with a possible effect, so no node can
/// lose a vote.
pub struct Reply {
    voter: Option<Arc<dyn Voter>>,
    node: usize,
}

impl Reply {
    /// A reply that reaches `voter` as node number `node`.
    pub fn new(voter: Arc<dyn Voter>, node: usize) -> Self {
        Self { voter: Some(voter), node }
    }

    /// Delivers the vote.
    pub fn send(mut self, vote: Vote) {
        if let Some(voter) = self.voter.take() {
            voter.vote(self.node, vote);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(voter) = self.voter.take() {
            let failure = Failure::new(Reason::Down, Effect::Possible, "the node's task ended without an answer");
            voter.vote(self.node, Vote::Failed(failure));
        }
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reply(node {})", self.node)
    }
}

/// What a node is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NodeState {
    /// It votes.
    Admitted,
    /// It lost its memory of locks and waits until none of them can still live.
    Quarantined,
    /// No usable connection; being retried.
    Connecting,
    /// Reached, but its configuration makes it unfit; looked at again from time to time.
    Refused,
}

impl NodeState {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Admitted, Self::Quarantined, Self::Connecting, Self::Refused];

    /// A word for metrics and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::Quarantined => "quarantined",
            Self::Connecting => "connecting",
            Self::Refused => "refused",
        }
    }
}

/// What a node is doing and why, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStatus {
    /// Its state.
    pub state: NodeState,
    /// Since when, in microseconds since 1970 by the gateway's wall clock.
    pub since_micros: u64,
    /// Until when at the latest, if that is known: the end of a quarantine.
    pub until_micros: Option<u64>,
    /// Why, in a sentence; empty when there is nothing to explain.
    pub detail: String,
    /// What an operator can do; empty when there is nothing.
    pub advice: String,
    /// Whether it is quarantined as a node of a cluster that an operator calls brand-new.
    pub brand_new: bool,
    /// Whether its clock and this machine's differ by more than D: then it refuses our fencing tokens.
    pub clock_is_off: bool,
    /// How many times a restart was seen.
    pub restarts: u64,
    /// Keys it has evicted, as it reported last; anything but zero means that locks may be lost.
    pub evicted_keys: u64,
}

impl NodeStatus {
    /// A node in a state of which nothing else is known.
    pub fn new(state: NodeState, since_micros: u64) -> Self {
        Self {
            state,
            since_micros,
            until_micros: None,
            detail: String::new(),
            advice: String::new(),
            brand_new: false,
            clock_is_off: false,
            restarts: 0,
            evicted_keys: 0,
        }
    }

    /// Whether it can be expected to grant locks.
    pub fn votes(&self) -> bool {
        self.state == NodeState::Admitted && !self.clock_is_off
    }
}

/// What the core lets its host measure. All methods are called on hot paths: they must not block.
pub trait Observer: Send + Sync + 'static {
    /// A node answered one call that carried `operations` operations.
    fn node_call(&self, node: &str, operations: usize, elapsed: Duration);
    /// A node's clock was compared with ours; positive when the node is ahead.
    fn clock_offset(&self, node: &str, offset_micros: i64);
    /// A node voted in a round.
    fn vote(&self, node: usize, vote: &Vote);
    /// A release could not be delivered and was given up: the lock's TTL now bounds what is left on that node.
    fn release_abandoned(&self, node: usize);
    /// A lock that a node had lost was set there again.
    fn healed(&self, node: usize);
    /// Somebody who waited has got the lock from one who released it.
    fn handed_over(&self, kind: HandOver);
}

/// How a lock came from one who released it to one who waited for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandOver {
    /// Within this process: in one round trip, or one more when the waiter was just asking by itself.
    Local,
    /// By a hint from another process.
    Remote,
}

/// Measures nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn node_call(&self, _: &str, _: usize, _: Duration) {}
    fn clock_offset(&self, _: &str, _: i64) {}
    fn vote(&self, _: usize, _: &Vote) {}
    fn release_abandoned(&self, _: usize) {}
    fn healed(&self, _: usize) {}
    fn handed_over(&self, _: HandOver) {}
}

/// The rules that the safety of locks and fencing tokens rests on. Always all on; a build with the feature
/// `mutation-testing` can switch single ones off, to prove that the tests notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// A retry by the same owner takes a new T and rewrites both keys.
    pub retry_rewrites: bool,
    /// A release leaves the fence at T or above, where no heal passes it.
    pub release_is_a_barrier: bool,
    /// A release deletes only a lock whose T is not newer than its own.
    pub release_keeps_newer: bool,
    /// A node refuses a T too far from its own time.
    pub clock_is_checked: bool,
    /// A node grants only a T larger than the last it has stored for the lock.
    pub fence_is_checked: bool,
    /// A node refuses lock operations unless the marker of its admission stands.
    pub marker_is_checked: bool,
    /// A node whose memory of locks is doubtful is quarantined before it votes.
    pub quarantine_is_waited: bool,
    /// A successful extension sets the lock again on nodes that lost it.
    pub missing_is_healed: bool,
}

impl Rules {
    /// All of them.
    pub const ALL: Self = Self {
        retry_rewrites: true,
        release_is_a_barrier: true,
        release_keeps_newer: true,
        clock_is_checked: true,
        fence_is_checked: true,
        marker_is_checked: true,
        quarantine_is_waited: true,
        missing_is_healed: true,
    };
}

impl Default for Rules {
    fn default() -> Self {
        Self::ALL
    }
}

/// What a node needs to know of the cluster's configuration.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    /// D: a T further than this from the node's own time is refused.
    pub max_clock_offset: Duration,
    /// How long a fence outlives the last grant; must exceed what gateway clocks may differ by.
    pub fence_retention: Duration,
    /// Which rules are on.
    #[cfg(feature = "mutation-testing")]
    pub rules: Rules,
}

impl NodeSettings {
    #[cfg(feature = "mutation-testing")]
    pub(crate) fn rules(&self) -> Rules {
        self.rules
    }

    #[cfg(not(feature = "mutation-testing"))]
    pub(crate) fn rules(&self) -> Rules {
        Rules::ALL
    }
}

impl Default for NodeSettings {
    /// D = 2 s, fences kept for 30 minutes.
    fn default() -> Self {
        Self {
            max_clock_offset: Duration::from_secs(2),
            fence_retention: Duration::from_secs(30 * 60),
            #[cfg(feature = "mutation-testing")]
            rules: Rules::ALL,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_gives_back_what_went_in_and_foreign_values_do_not_parse() {
        let token = LockToken::new(Owner::from_bytes([7; 20]), FencingToken::MIN);
        let record = Record::new(&token, &Info::new("x:y").unwrap());
        assert_eq!(record.parse(), Some((token, &b"x:y"[..])));
        assert_eq!(record.grant().len(), Record::GRANT_LEN);
        for foreign in ["", "1", "some-uuid-of-another-client", &"1".repeat(80)] {
            assert_eq!(Record::foreign(Bytes::copy_from_slice(foreign.as_bytes())).parse(), None);
        }
    }

    #[test]
    fn the_fence_key_shares_the_slot_of_the_lock_key() {
        let keys = Keys::new("lock:", &"a/b".parse::<LockName>().unwrap());
        assert_eq!((&keys.lock[..], &keys.fence[..]), (&b"lock:a/b"[..], &b"{lock:a/b}:fence"[..]));
    }

    #[test]
    fn a_reply_dropped_without_an_answer_still_votes() {
        struct Count(std::sync::Mutex<Vec<(usize, Vote)>>);
        impl Voter for Count {
            fn vote(&self, node: usize, vote: Vote) {
                self.0.lock().unwrap().push((node, vote));
            }
        }
        let voter = Arc::new(Count(Default::default()));
        drop(Reply::new(voter.clone(), 3));
        Reply::new(voter.clone(), 4).send(Vote::Granted);
        let votes = voter.0.lock().unwrap();
        assert!(matches!(&votes[0], (3, Vote::Failed(Failure { effect: Effect::Possible, .. }))));
        assert_eq!(&votes[1..], &[(4, Vote::Granted)]);
    }
}
