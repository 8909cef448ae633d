//! What can go wrong, in words that say whether something happened. A refusal, a missing majority and an unknown outcome
//! are three different things to a caller, so none of them is folded into another.

use std::fmt;
use std::time::Duration;

use crate::model::types::{FencingToken, LockToken, Owner, Ttl};
use crate::node::{Effect, Failure, Holding};

/// The outcome of an operation that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LockError {
    /// Somebody else holds the lock. Whatever this try set elsewhere is being released.
    #[error("the lock is held by somebody else")]
    Held(HeldBy),
    /// Extend or release: there is no such lock (any more).
    #[error("the lock is free or expired")]
    Lost,
    /// Extend or release: somebody else holds the lock.
    #[error("the lock is held by somebody else now")]
    NotHolder(HeldBy),
    /// Too few nodes gave a usable answer. Nothing is held: whatever was set is being released.
    #[error("no majority of nodes could be reached: {}", Reports(.0))]
    NoQuorum(Vec<NodeReport>),
    /// Too few nodes answered to tell: whether a lock was extended or released, or whether an earlier request of the same
    /// owner holds what was asked for. The old deadline stands; trying again is safe.
    #[error("the outcome is unknown: {}", Reports(.0))]
    Unknown(Vec<NodeReport>),
    /// An earlier request of the same owner holds the lock, and has done so for longer than is allowed.
    #[error("held for {held:?} by an earlier request, and {max:?} is the limit")]
    HeldTooLong {
        /// Since it was acquired.
        held: Duration,
        /// What the asking request allows.
        max: Duration,
    },
    /// The TTL is longer than this cluster allows.
    #[error("a ttl of {} ms is longer than the {} ms this cluster allows", .asked.millis(), .max.millis())]
    TtlTooLong {
        /// The TTL that was asked for.
        asked: Ttl,
        /// The longest TTL of this cluster.
        max: Ttl,
    },
    /// Rounds take so long here now that one of this TTL, which is given a tenth of it, has next to no chance.
    #[error(
        "a ttl of {} ms is too short where rounds take {round:?}, as a tenth of it must cover one: {} ms would do",
        .asked.millis(), .least.millis()
    )]
    TtlTooShort {
        /// The TTL that was asked for.
        asked: Ttl,
        /// What nine of ten rounds exceed.
        round: Duration,
        /// A TTL that would do.
        least: Ttl,
    },
    /// As many wait as are allowed to. The lock is held, or somebody waits for it already: one that nobody waits for here was
    /// tried.
    #[error("there are {max} {limit}, as many as are allowed")]
    TooManyWaiters {
        /// How many are allowed.
        max: usize,
        /// What is counted.
        limit: WaitLimit,
    },
}

/// What is counted of those who wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitLimit {
    /// All of them in this process.
    All,
    /// Those who wait for this lock.
    OfLock,
    /// Those of one caller. The core knows no callers: the `on_wait` of
    /// [`acquire_within`](crate::Redlock::acquire_within) says so.
    OfCaller,
    /// The locks that those of one caller wait for, in the same way.
    LocksOfCaller,
}

impl fmt::Display for WaitLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "requests waiting",
            Self::OfLock => "requests waiting for this lock",
            Self::OfCaller => "requests of this caller waiting",
            Self::LocksOfCaller => "locks that requests of this caller wait for",
        })
    }
}

impl LockError {
    /// Whether the operation may have changed anything that outlasts it.
    pub fn effect(&self) -> Effect {
        match self {
            Self::Held(_) | Self::Lost | Self::NotHolder(_) | Self::NoQuorum(_) => Effect::None,
            Self::HeldTooLong { .. } | Self::TtlTooLong { .. } => Effect::None,
            Self::TtlTooShort { .. } | Self::TooManyWaiters { .. } => Effect::None,
            Self::Unknown(_) => Effect::Possible,
        }
    }
}

/// What is known of whoever holds a lock that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HeldBy {
    /// The text stored for people; empty when there is none or another Redlock client holds the lock.
    pub info: Vec<u8>,
    /// When the lock was acquired, as its fencing token says; `None` when another client holds it.
    pub fencing: Option<FencingToken>,
    /// The earliest time at which a majority can be free without a release; `None` when it never expires.
    pub expires_in: Option<Duration>,
    /// Half of the holder's token: a secret.
    pub(crate) owner: Option<Owner>,
}

impl HeldBy {
    /// Whether it is an owner's, by whichever of its grants.
    pub fn is_of(&self, token: &LockToken) -> bool {
        self.owner.as_ref() == Some(token.owner())
    }

    pub(crate) fn from_holding(holding: &Holding, expires_in: Option<Duration>) -> Self {
        match holding.record.parse() {
            Some((token, info)) => Self {
                info: info.to_vec(),
                fencing: Some(token.fencing()),
                expires_in,
                owner: Some(*token.owner()),
            },
            None => Self { info: Vec::new(), fencing: None, expires_in, owner: None },
        }
    }
}

/// What one node said in a round that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeReport {
    /// The node's name.
    pub node: String,
    /// What it answered, if anything.
    pub answer: NodeAnswer,
}

/// The kinds of answers, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeAnswer {
    /// It did what was asked.
    Agreed,
    /// It refused: somebody else's lock, or none, or a newer fencing token stood there.
    Refused(&'static str),
    /// It did not answer, or with an error.
    Failed(Failure),
    /// The round was decided before it answered.
    Pending,
}

impl fmt::Display for NodeAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agreed => f.write_str("agreed"),
            Self::Refused(what) => f.write_str(what),
            Self::Failed(failure) => failure.fmt(f),
            Self::Pending => f.write_str("not needed"),
        }
    }
}

struct Reports<'a>(&'a [NodeReport]);

impl fmt::Display for Reports<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, report) in self.0.iter().enumerate() {
            write!(f, "{}{} {}", if i == 0 { "" } else { "; " }, report.node, report.answer)?;
        }
        Ok(())
    }
}
