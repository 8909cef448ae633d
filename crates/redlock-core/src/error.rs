//! Errors that say whether something happened. A refusal, a missing majority and an unknown outcome
//! differ for a caller, so each has its own variant.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::model::types::{FencingToken, LockToken, Owner, Ttl};
use crate::node::{Effect, Failure, Holding};

/// The outcome of an operation that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LockError {
    /// Somebody else holds the lock. A minority of nodes may have set the lock for this attempt; it
    /// is being released there.
    #[error("the lock is held by somebody else")]
    Held(HeldBy),
    /// Extend or release: the lock does not exist (any more).
    #[error("the lock is free or expired")]
    Lost,
    /// Extend or release: somebody else holds the lock.
    #[error("the lock is held by somebody else now")]
    NotHolder(HeldBy),
    /// Too few nodes gave a usable answer. Nothing is held. The lock is being released on the nodes
    /// where this attempt set it.
    #[error("no majority of nodes could be reached: {}", Reports(.0))]
    NoQuorum(Vec<NodeReport>),
    /// Too few nodes answered to tell whether the lock was extended or released, or whether an
    /// earlier request of the same owner holds it. The deadline from before the operation still
    /// holds. Retrying is safe.
    #[error("the outcome is unknown: {}", Reports(.0))]
    Unknown(Vec<NodeReport>),
    /// An earlier request of the same owner has held the lock for longer than this request allows.
    #[error("held for {held:?} by an earlier request, and {max:?} is the limit")]
    HeldTooLong {
        /// Time since the lock was acquired.
        held: Duration,
        /// The limit of the asking request.
        max: Duration,
    },
    /// The TTL is longer than this cluster allows.
    #[error(
        "a ttl of {} ms is longer than the {} ms this cluster allows",
        .asked.millis(), .max.millis()
    )]
    TtlTooLong {
        /// The TTL that was asked for.
        asked: Ttl,
        /// The longest TTL of this cluster.
        max: Ttl,
    },
    /// A round may take a tenth of its TTL. At present, nearly all rounds take longer than a tenth
    /// of this TTL.
    #[error(
        "a ttl of {} ms is too short: a tenth of it must cover a round, rounds take {round:?} \
         now, and {} ms would do",
        .asked.millis(), .least.millis()
    )]
    TtlTooShort {
        /// The TTL that was asked for.
        asked: Ttl,
        /// The time that nine of ten rounds exceed.
        round: Duration,
        /// A TTL that would do.
        least: Ttl,
    },
    /// A limit of waiters is reached. If nobody waited for the lock in this process, one attempt
    /// was made before this error. So the lock is held, or others already wait for it.
    #[error("there are {max} {limit}, as many as are allowed")]
    TooManyWaiters {
        /// The limit.
        max: usize,
        /// What the limit counts.
        limit: WaitLimit,
    },
    /// The request waited as [`QueueMode::Newest`](crate::QueueMode::Newest), and a newer request
    /// of this kind began to wait for the same lock. Nothing is held.
    #[error("a newer request waits for the lock in place of this one")]
    Superseded,
}

/// What a limit of waiters counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitLimit {
    /// All requests that wait in this process.
    All,
    /// The requests that wait for this lock.
    OfLock,
    /// The connections that are kept for long. The core knows no connections: the `on_wait` of
    /// [`acquire_within`](crate::Redlock::acquire_within) returns this limit.
    Connections,
    /// The waiting requests of one caller. The core knows no callers: the `on_wait` of
    /// [`acquire_within`](crate::Redlock::acquire_within) returns this limit.
    OfCaller,
    /// The locks that the requests of one caller wait for. `on_wait` returns this limit too.
    LocksOfCaller,
}

impl fmt::Display for WaitLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::All => "requests waiting",
            Self::OfLock => "requests waiting for this lock",
            Self::Connections => "connections kept for long",
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
            Self::Superseded => Effect::None,
            Self::Unknown(_) => Effect::Possible,
        }
    }
}

/// The known facts about the holder of a lock.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct HeldBy {
    /// The text stored for people; empty if there is none, or if another Redlock client holds the
    /// lock.
    pub info: Box<[u8]>,
    /// The holder's fencing token, which shows when the lock was acquired; `None` when another
    /// client holds the lock.
    pub fencing: Option<FencingToken>,
    /// The shortest time until a majority of nodes can be free without a release; `None` when the
    /// lock never expires, or no holder is known.
    pub expires_in: Option<Duration>,
    /// Which lock of a set is held, from 0, in the order of the request. Others may be held too.
    pub lock_of_set: u8,
    /// Whether the holder is an earlier request with the same owner, for the same set or the same
    /// number of slots. The rest of its grant is no longer held.
    pub is_part_of_own_set: bool,
    /// Whether a client of another Redlock library holds the lock, or something else that no gateway
    /// has stored.
    pub is_foreign: bool,
    /// The place in line of the request that was refused; `None` unless the request waited.
    pub line: Option<Box<LinePlace>>,
    /// See [`HeldBy::holders`]. A thin pointer, because every refusal of the core passes it on.
    pub(crate) full: Option<Arc<FullLock>>,
    /// The holder's owner: a secret, and the part of the holder's token that proves who holds the
    /// lock.
    pub(crate) owner: Option<Owner>,
}

/// A lock with too few free slots for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FullLock {
    pub(crate) holders: Vec<SlotHolder>,
    /// How many slots the request takes.
    pub(crate) wanted: u16,
    pub(crate) free: u16,
}

/// The place in line of a waiter that left without a grant, in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinePlace {
    /// 1 for the next one to be served.
    pub position: u32,
    /// For how long the place is kept for the next request of the same owner; `None` if it is not
    /// kept.
    pub kept_for: Option<Duration>,
}

/// The holder of one slot of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotHolder {
    /// The slot's number, from 1.
    pub slot: u16,
    /// The holder.
    pub by: HeldBy,
}

impl HeldBy {
    /// Whether nobody holds the lock, and the masters keep it free from everybody: because of a
    /// release with a time to hold, or because recovery found too few copies of a grant.
    pub fn is_kept_free(&self) -> bool {
        self.owner == Some(Owner::NOBODY)
    }

    /// If the lock has several slots: the holders of those that are taken, in the order of the
    /// slots. The fields are about the holder whose end frees as many slots as the request takes.
    pub fn holders(&self) -> &[SlotHolder] {
        self.full.as_ref().map_or(&[], |full| &full.holders)
    }

    /// If the lock has several slots: how many the request takes, and how many are free.
    pub fn wanted_and_free(&self) -> Option<(u16, u16)> {
        self.full.as_ref().map(|full| (full.wanted, full.free))
    }

    /// Whether the owner of this token holds the lock, by this grant or another one.
    pub fn is_of(&self, token: &LockToken) -> bool {
        self.owner.as_ref() == Some(token.owner())
    }

    /// Whether somebody holds the lock, or may hold it. If not, several requests asked at the same
    /// time and none got a majority, or an earlier answer told nothing about the holder.
    pub fn is_known(&self) -> bool {
        self.owner.is_some() || self.is_foreign || self.full.is_some()
    }

    /// Whether both have the same owner.
    pub fn has_owner_of(&self, other: &Self) -> bool {
        self.owner.is_some() && self.owner == other.owner
    }

    pub(crate) fn from_holding(holding: &Holding, expires_in: Option<Duration>) -> Self {
        let lock_of_set = holding.at;
        match holding.record.parse() {
            Some((token, info)) => Self {
                // A placeholder has no label. Behind it may be a released grant.
                info: if holding.record.is_placeholder() { Box::default() } else { info.into() },
                fencing: Some(token.fencing()),
                expires_in,
                lock_of_set,
                is_part_of_own_set: false,
                is_foreign: false,
                full: None,
                line: None,
                owner: Some(*token.owner()),
            },
            None => Self { expires_in, lock_of_set, is_foreign: true, ..Self::default() },
        }
    }
}

/// One node's answer in a round that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeReport {
    /// The node's name.
    pub node: String,
    /// The node's answer, if any.
    pub answer: NodeAnswer,
}

/// The kinds of answers, for display.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeAnswer {
    /// The node did what was asked.
    Agreed,
    /// The node refused: it stores somebody else's lock, or none, or a newer fencing token.
    Refused(&'static str),
    /// The node did not answer, or answered with an error.
    Failed(Failure),
    /// The round was decided before the node answered.
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
