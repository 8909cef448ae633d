//! Operations on a node, and the votes that answer them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::hint::Hint;
use super::record::Record;
use crate::model::types::{FencingToken, LockName, Ttl};

/// The keys of a lock, equal on every node. Of a set of locks, the keys of all of them.
///
/// One buffer holds the watermark's key, `{<prefix><name>}:fence`. The lock key is the part between
/// the braces. Redis Cluster hashes only that part, so both keys are in the same slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    /// The lock: `<prefix><name>`.
    pub lock: Bytes,
    /// The token watermark: `{<prefix><name>}:fence`.
    pub fence: Bytes,
    /// The other locks or slots of a set; `None` for a single one. A repair is always on one lock. An
    /// acquire sets all locks of a set or none. The other operations run for each of them.
    pub others: Option<Arc<[Keys]>>,
}

impl Keys {
    /// The keys of one lock under a prefix.
    pub fn new(prefix: &str, name: &LockName) -> Self {
        Self::of_parts(prefix.as_bytes(), name.as_str().as_bytes())
    }

    /// The keys of the lock with this lock key.
    pub(crate) fn of_lock_key(lock: &[u8]) -> Self {
        Self::of_parts(lock, b"")
    }

    fn of_parts(prefix: &[u8], name: &[u8]) -> Self {
        let mut text = Vec::with_capacity(prefix.len() + name.len() + 8);
        text.push(b'{');
        text.extend_from_slice(prefix);
        text.extend_from_slice(name);
        let end = text.len();
        text.extend_from_slice(b"}:fence");
        let fence = Bytes::from(text);
        Self { lock: fence.slice(1..end), fence, others: None }
    }

    /// The largest number of locks in one set.
    pub const MAX_SET: usize = 256;

    /// The keys of a set of locks: these and `others`, each of them once.
    ///
    /// # Panics
    /// There are more than [`Keys::MAX_SET`]. A call has no room for more, and a part of a set must
    /// never be acquired.
    #[must_use]
    pub fn with(self, others: impl IntoIterator<Item = Self>) -> Self {
        let others: Arc<[Self]> = others.into_iter().collect();
        assert!(others.len() < Self::MAX_SET, "{} locks are too many for a set", others.len() + 1);
        Self { others: (!others.is_empty()).then_some(others), ..self }
    }

    /// The same set, with the lock at this place moved to the front.
    pub(crate) fn led_by(&self, at: usize) -> Self {
        let (mut others, mut first) = (Vec::with_capacity(self.count() - 1), None);
        for (index, keys) in self.each().enumerate() {
            let keys = Self { others: None, ..keys.clone() };
            if index == at {
                first = Some(keys);
            } else {
                others.push(keys);
            }
        }
        first.map_or_else(|| self.clone(), |first| first.with(others))
    }

    /// The keys of each lock of the set, in order.
    pub fn each(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self).chain(self.others.iter().flat_map(|others| others.iter()))
    }

    /// The number of locks.
    pub fn count(&self) -> usize {
        1 + self.others.as_ref().map_or(0, |others| others.len())
    }
}

/// An operation on one lock, or on all locks of a set.
#[derive(Debug, Clone)]
pub enum Op {
    /// Sets the lock if it is free and T is above the watermark; stores T in both keys. A lock is
    /// never overwritten, not even for its owner. If the owner already has the lock, the vote shows
    /// which of the owner's grants stands.
    Acquire {
        /// The lock's keys.
        keys: Keys,
        /// The grant and the text for people.
        record: Record,
        /// The lock's time to live.
        ttl: Ttl,
        /// The hint to publish when another owner holds the lock.
        tell: Option<Hint>,
    },
    /// Prolongs the lock if exactly this grant stands; never shortens it.
    Extend {
        /// The lock's keys.
        keys: Keys,
        /// The grant to prolong.
        record: Record,
        /// The time to live, counted from `began_micros`.
        ttl: Ttl,
        /// When the extension began, by the gateway's wall clock, in microseconds since 1970.
        began_micros: u64,
    },
    /// Sets a lock again on a node that lacks it. The node's watermark refuses the repair after a
    /// later grant, and after a release of this grant. The caller must have seen just now that a
    /// majority has this grant, by extending it or by reading it. T itself may be as old as the
    /// lock.
    Repair {
        /// The lock's keys.
        keys: Keys,
        /// Owner, T and the text for people.
        record: Record,
        /// The time to live of the lock.
        ttl: Ttl,
        /// When the extension or reading that justifies the repair began, by the gateway's wall
        /// clock, in microseconds since 1970.
        began_micros: u64,
    },
    /// Deletes the lock if this owner has it with this T or an older one. Leaves the watermark at T
    /// or above, so that a late repair of this grant is refused. `scope` narrows both rules.
    Release {
        /// The lock's keys.
        keys: Keys,
        /// The grant to undo.
        record: Record,
        /// Which of the owner's grants the release deletes.
        scope: ReleaseScope,
        /// The hint to publish when the lock was released.
        tell: Option<Hint>,
    },
    /// Reads the stored lock, or all stored locks of a set.
    Inspect {
        /// The lock's keys.
        keys: Keys,
    },
}

impl Op {
    /// The keys of the lock, or of all locks of a set.
    pub fn keys(&self) -> &Keys {
        match self {
            Self::Acquire { keys, .. }
            | Self::Extend { keys, .. }
            | Self::Repair { keys, .. }
            | Self::Release { keys, .. }
            | Self::Inspect { keys } => keys,
        }
    }

    pub(crate) fn keys_mut(&mut self) -> &mut Keys {
        match self {
            Self::Acquire { keys, .. }
            | Self::Extend { keys, .. }
            | Self::Repair { keys, .. }
            | Self::Release { keys, .. }
            | Self::Inspect { keys } => keys,
        }
    }

    /// What the operation counts in a queue of the node: its locks. Sixteen readings count as one, as
    /// they do in the limits of the gateway.
    pub(crate) fn cost(&self) -> usize {
        let locks = self.keys().count();
        if matches!(self, Self::Inspect { .. }) { locks.div_ceil(16) } else { locks }
    }

    /// Bytes of memory that a kept operation takes, with what the allocator adds.
    pub(crate) fn memory(&self) -> usize {
        /// Bytes of an allocation beyond its content, and those that count the references of [`Bytes`].
        const ALLOCATION: usize = 48;
        let of_keys = |keys: &Keys| size_of::<Keys>() + keys.fence.len() + ALLOCATION;
        let record = match self {
            Self::Acquire { record, .. }
            | Self::Extend { record, .. }
            | Self::Repair { record, .. }
            | Self::Release { record, .. } => record.as_bytes().len() + ALLOCATION,
            Self::Inspect { .. } => 0,
        };
        size_of::<Self>() + ALLOCATION + record + self.keys().each().map(of_keys).sum::<usize>()
    }

    /// Whether a node votes on each lock of a set ([`Vote::Each`]).
    pub(crate) fn is_on_each(&self) -> bool {
        self.keys().others.is_some()
            && match self {
                Self::Extend { .. } => true,
                Self::Release { scope, .. } => *scope != ReleaseScope::Proposal,
                Self::Acquire { .. } | Self::Repair { .. } | Self::Inspect { .. } => false,
            }
    }

    /// The same operation on parts of the set that have at most `most` locks, and nearly as many each.
    /// Only the last part has the hint, because all locks have been released then.
    pub(crate) fn in_parts(&self, most: usize) -> impl Iterator<Item = Self> {
        let count = self.keys().count();
        let parts = count.div_ceil(most);
        let mut each = self.keys().each().map(|keys| Keys { others: None, ..keys.clone() });
        (0..parts).map(move |at| {
            let size = (at + 1) * count / parts - at * count / parts;
            let mut part = self.clone();
            let first = each.next().expect("every part has a lock");
            *part.keys_mut() = first.with(each.by_ref().take(size - 1));
            match &mut part {
                Self::Release { tell, .. } if at + 1 < parts => *tell = None,
                _ => {}
            }
            part
        })
    }

    /// The name in logs and traces.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Acquire { .. } => "acquire",
            Self::Extend { .. } => "extend",
            Self::Repair { .. } => "repair",
            Self::Release { .. } => "release",
            Self::Inspect { .. } => "inspect",
        }
    }

    /// The hint that the node publishes with this vote, if any.
    pub fn hint_for(&self, vote: &Vote) -> Option<&Hint> {
        match (self, vote) {
            // A hint about a set names its first lock.
            (Self::Acquire { tell, .. }, Vote::Held(Holding { at: 0, .. })) => tell.as_ref(),
            (Self::Release { tell, .. }, vote) if vote.each().contains(&Vote::Released) => {
                tell.as_ref()
            }
            _ => None,
        }
    }
}

/// Which grants a release deletes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseScope {
    /// For a holder: every grant of its owner with this T or an older one.
    Holder,
    /// Exactly this grant. Used when a repeated request found a grant of its owner, tried to extend
    /// it, and learned that it can no longer have a majority. Another grant of the same owner
    /// stays, because an earlier request may have returned it to a client.
    Grant,
    /// For a holder that keeps the lock for longer than its work: a record that keeps the lock free
    /// from everybody replaces exactly this grant, for this time. If another grant stands, or none,
    /// or if the time is over, this is the release of a holder.
    HolderKeeping {
        /// How long the lock is kept free, counted from `began_micros`.
        life: Ttl,
        /// When the release began, by the gateway's wall clock, in microseconds since 1970.
        began_micros: u64,
    },
    /// Exactly this grant, for the undo of a failed proposal. An extended grant stays, because
    /// another request of the same owner has confirmed it by the extension. No client has seen the
    /// T of a failed proposal, so the watermark gets back its earlier value.
    Proposal,
}

impl ReleaseScope {
    /// Whether a holder releases the lock. Otherwise a grant is undone that no holder relies on.
    pub(crate) fn is_of_holder(self) -> bool {
        matches!(self, Self::Holder | Self::HolderKeeping { .. })
    }
}

/// A node's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Vote {
    /// The lock was free and is set with exactly the T that was asked for.
    Granted,
    /// Another grant of the same owner stands, and nothing was changed.
    Yours(Holding),
    /// A lock of another owner stands.
    Held(Holding),
    /// The lock is free, but its watermark is at the requested T or above.
    Stale {
        /// The last T stored for this lock.
        fence: FencingToken,
    },
    /// This grant still stands, and its life is no shorter than before.
    Extended {
        /// The remaining life. It exceeds the requested TTL if the lock already lived longer. It is
        /// shorter if the extension arrived late.
        expires_in: Duration,
    },
    /// The owner's lock is deleted. The watermark is at T or above, so a late repair of this grant
    /// is refused. Only the undo of a proposal ([`ReleaseScope::Proposal`]) lowers the watermark
    /// again.
    Released,
    /// The lock does not exist.
    Missing,
    /// The lock as it stands.
    Found(Holding),
    /// The locks of a set that stand, in the order of [`Keys::each`]. See [`Holding::at`].
    FoundOfSet(Vec<Holding>),
    /// One vote for each lock of a set, in the order of [`Keys::each`]: the answer to an extension, or
    /// to a release that is no undo.
    Each(Vec<Vote>),
    /// No usable answer; the failure states whether the operation may have run.
    Failed(Failure),
}

impl Vote {
    /// The votes on each lock, or the one vote on all of them.
    pub fn each(&self) -> &[Self] {
        match self {
            Self::Each(votes) => votes,
            vote => std::slice::from_ref(vote),
        }
    }

    /// Whether the node granted, extended or released a lock.
    pub fn is_yes(&self) -> bool {
        let is_yes =
            |vote: &Self| matches!(vote, Self::Granted | Self::Extended { .. } | Self::Released);
        self.each().iter().any(is_yes)
    }

    /// Whether the operation failed, on any lock.
    pub(crate) fn has_failed(&self) -> bool {
        self.each().iter().any(|vote| matches!(vote, Self::Failed(_)))
    }

    /// The name in metrics and traces; a failure has the name of its reason.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Yours(_) => "yours",
            Self::Held(_) => "held",
            Self::Stale { .. } => "stale",
            Self::Extended { .. } => "extended",
            Self::Released => "released",
            Self::Missing => "missing",
            Self::FoundOfSet(stand) if stand.is_empty() => "missing",
            Self::Found(_) | Self::FoundOfSet(_) => "found",
            Self::Each(_) => "each",
            Self::Failed(failure) => failure.reason.as_str(),
        }
    }

    /// The vote as one about this lock of a set.
    pub(crate) fn of_lock(mut self, at: usize) -> Self {
        if let Self::Yours(holding) | Self::Held(holding) | Self::Found(holding) = &mut self {
            holding.at = u8::try_from(at).unwrap_or(u8::MAX);
        }
        self
    }

    /// Which lock of a set the vote is about, from 0.
    pub(crate) fn lock_of_set(&self) -> u8 {
        match self {
            Self::Yours(holding) | Self::Held(holding) | Self::Found(holding) => holding.at,
            Self::Granted | Self::Stale { .. } | Self::Extended { .. } => 0,
            Self::Released | Self::Missing | Self::FoundOfSet(_) => 0,
            Self::Each(_) | Self::Failed(_) => 0,
        }
    }
}

/// A lock as one node stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The value under the lock key.
    pub record: Record,
    /// The remaining life; `None` for a key without expiry. Lock operations always set one, so
    /// somebody else set the key or removed its expiry.
    pub expires_in: Option<Duration>,
    /// Which lock of a set this is, from 0, in the order of [`Keys::each`].
    pub at: u8,
}

/// Whether a failed operation may have run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The operation has not run and never will.
    None,
    /// The operation may have run, or may still run.
    Possible,
}

/// Why a node gave no usable answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The kind of failure, for metrics and callers.
    pub reason: Reason,
    /// Whether the operation may have run.
    pub effect: Effect,
    /// One sentence for people.
    pub detail: String,
}

impl Failure {
    /// A release has run on a node without its marker, and has not found the grant there.
    pub(crate) fn found_nothing(why: &'static str) -> Self {
        Self::new(Reason::Quarantined, Effect::Possible, why)
    }

    /// Whether this is [`Failure::found_nothing`]. Any other operation in a quarantine is not sent.
    pub(crate) fn is_of_nothing_found(&self) -> bool {
        (self.reason, self.effect) == (Reason::Quarantined, Effect::Possible)
    }

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
    /// The connection is missing, or broke before the answer.
    Down,
    /// Connected, but not admitted to vote yet.
    Quarantined,
    /// Connected, and ineligible to vote until an operator repairs the cause.
    Refused,
    /// The T, or the begin of the operation, is too far from the node's own time.
    Clock,
    /// The node's queue is full.
    Overloaded,
    /// The node answered with an error.
    Error,
}

impl Reason {
    /// Every reason, for metrics with a series for each.
    pub const ALL: [Self; 7] = [
        Self::Timeout,
        Self::Down,
        Self::Quarantined,
        Self::Refused,
        Self::Clock,
        Self::Overloaded,
        Self::Error,
    ];

    /// The name in metrics and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Down => "down",
            Self::Quarantined => "quarantined",
            Self::Refused => "refused",
            Self::Clock => "clock",
            Self::Overloaded => "overloaded",
            Self::Error => "error",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fence_key_shares_the_slot_of_the_lock_key() {
        let keys = Keys::new("lock:", &"a/b".parse::<LockName>().unwrap());
        assert_eq!((&keys.lock[..], &keys.fence[..]), (&b"lock:a/b"[..], &b"{lock:a/b}:fence"[..]));
    }
}
