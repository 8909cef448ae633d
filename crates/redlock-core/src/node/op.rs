//! What a node is asked, and what it answers.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use super::hint::Hint;
use super::record::Record;
use crate::model::types::{FencingToken, LockName, Ttl};

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
        Self::of_parts(prefix.as_bytes(), name.as_str().as_bytes())
    }

    /// The keys of the lock that has this one.
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
        Self { lock: fence.slice(1..end), fence }
    }
}

/// What a node is asked to do.
#[derive(Debug, Clone)]
pub enum Op {
    /// Set the lock if it is free and T is larger than the fence; store T in both keys. A lock is never overwritten, not even
    /// for its owner, who is told which of its grants stands.
    Acquire {
        /// The lock's keys.
        keys: Keys,
        /// The grant and the text for people.
        record: Record,
        /// The time to live that it is set with.
        ttl: Ttl,
        /// What to tell everybody when somebody else holds the lock.
        tell: Option<Hint>,
    },
    /// Prolong the lock if it is this very grant; never shorten it.
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
    Repair {
        /// The lock's keys.
        keys: Keys,
        /// Owner, T and the text for people.
        record: Record,
        /// The time to live that it is set with.
        ttl: Ttl,
        /// When the extension began that vouches for it, by the gateway's wall clock, in microseconds since 1970.
        began_micros: u64,
    },
    /// Delete the lock if this owner has it with no newer T, and leave the fence at T or above, where no repair passes it.
    Release {
        /// The lock's keys.
        keys: Keys,
        /// The grant to undo.
        record: Record,
        /// What goes.
        scope: ReleaseScope,
        /// What to tell everybody when the lock was released.
        tell: Option<Hint>,
    },
    /// Read what is stored for the lock.
    Inspect {
        /// The lock's keys.
        keys: Keys,
    },
}

impl Op {
    /// As logs and traces call it.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Acquire { .. } => "acquire",
            Self::Extend { .. } => "extend",
            Self::Repair { .. } => "repair",
            Self::Release { .. } => "release",
            Self::Inspect { .. } => "inspect",
        }
    }

    /// What the node tells everybody when this is its answer.
    pub fn told(&self, vote: &Vote) -> Option<&Hint> {
        match (self, vote) {
            (Self::Acquire { tell, .. }, Vote::Held(_))
            | (Self::Release { tell, .. }, Vote::Released) => tell.as_ref(),
            _ => None,
        }
    }
}

/// What a release takes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReleaseScope {
    /// For a holder: whatever its owner has with this T or an older one.
    Holder,
    /// Exactly this grant: for one that was confirmed, and turned out to have no majority. Another grant of the same owner
    /// may have been promised.
    Grant,
    /// For a try that failed: exactly this grant, and not once it was extended, for another request of the same owner has
    /// confirmed it. As nobody has been told of this T, the fence that the grant has left is taken back as well.
    Proposal,
}

/// A node's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Vote {
    /// The lock was free and is set with exactly the T that was asked for.
    Granted,
    /// Another grant of the same owner stands, and nothing was changed.
    Yours(Holding),
    /// Somebody else's lock stands.
    Held(Holding),
    /// Free, but the node has seen this T or a larger one.
    Stale {
        /// The last T stored for this lock.
        fence: FencingToken,
    },
    /// The lock is still this grant, and lives so long from now: at least the asked TTL.
    Extended {
        /// Longer where it would have lived longer anyway.
        expires_in: Duration,
    },
    /// The lock was this owner's and is gone now; the fence is at T or above, and no repair passes it.
    Released,
    /// There is no such lock.
    Missing,
    /// The lock as it stands.
    Found(Holding),
    /// No usable answer; the failure says whether the operation may have run.
    Failed(Failure),
}

impl Vote {
    /// As metrics and traces call it; a failure by its reason.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Granted => "granted",
            Self::Yours(_) => "yours",
            Self::Held(_) => "held",
            Self::Stale { .. } => "stale",
            Self::Extended { .. } => "extended",
            Self::Released => "released",
            Self::Missing => "missing",
            Self::Found(_) => "found",
            Self::Failed(failure) => failure.reason.as_str(),
        }
    }
}

/// A lock as one node stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    /// The value under the lock key.
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
    /// There is no connection, or it broke before the answer.
    Down,
    /// Connected, but not admitted to vote yet.
    Quarantined,
    /// Connected, and ineligible to vote until somebody mends it.
    Refused,
    /// The T is too far from the node's own time.
    Clock,
    /// The node's queue is full.
    Overloaded,
    /// The node answered with an error.
    Error,
}

impl Reason {
    /// Every reason, for metrics that have a series for each.
    pub const ALL: [Self; 7] = [
        Self::Timeout,
        Self::Down,
        Self::Quarantined,
        Self::Refused,
        Self::Clock,
        Self::Overloaded,
        Self::Error,
    ];

    /// A word for metrics and answers.
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
