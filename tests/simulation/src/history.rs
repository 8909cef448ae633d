//! The record of a history. The checker judges it and the timeline shows it. This module knows
//! nothing of the simulation, so a test can also write a history by hand.
//!
//! Every record has a [`Moment`]: the true time, and a number that orders the events within one
//! millisecond.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::time::EPOCH_MICROS;

/// When an event happened. Moments are ordered by `seq`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Moment {
    /// The event's place in the order of all events.
    pub seq: u64,
    /// True time since the history began.
    pub at: Duration,
}

/// One grant of a lock: its owner and its fencing token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Grant {
    /// The first half of the owner's 16 bytes.
    pub owner: u64,
    /// T, in microseconds since 1970.
    pub fencing: u64,
    /// Tells two grants apart that have the same owner and T.
    pub nonce: u32,
}

/// A client's request to a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Asks for the lock, for a fresh owner or for one that the client names.
    Acquire {
        /// The owner, if the client named it.
        owner: Option<u64>,
        /// The TTL.
        ttl_ms: u64,
        /// How long the client waits in the queue; `None` if it does not wait.
        patience_ms: Option<u64>,
    },
    /// Asks for another TTL of a lock that the client holds.
    Extend {
        /// The grant that the client sends.
        grant: Grant,
        /// The TTL.
        ttl_ms: u64,
    },
    /// Releases the lock.
    Release {
        /// The grant that the client sends.
        grant: Grant,
    },
}

/// The answer to a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// The client has the lock. `held_for` is the validity in true time: the client measures the
    /// validity with its own clock, which runs at its own rate.
    Granted {
        grant: Grant,
        /// Counted from the answer.
        held_for: Duration,
        /// Whether this is the grant of an earlier request for the same owner.
        replayed: bool,
    },
    /// The client keeps the lock for this long, in true time.
    Extended {
        /// Counted from the answer.
        held_for: Duration,
    },
    /// The client has released the lock.
    Released,
    /// Another owner has the lock.
    Held,
    /// The lock is gone, and no other owner is known to have it.
    Lost,
    /// Another owner has the lock now.
    NotHolder,
    /// No majority could be reached, and the client holds nothing.
    NoQuorum,
    /// No majority could be reached. The deadline from before the request still holds.
    Unknown,
    /// The client left before the answer.
    Cancelled,
    GatewayDied,
}

/// One request of a client.
#[derive(Debug, Clone)]
pub struct Operation {
    /// When the client sent the request.
    pub start: Moment,
    /// When the client got its answer.
    pub end: Option<Moment>,
    pub client: u8,
    pub gateway: u8,
    /// The number of the gateway's process that got the request.
    pub process: u16,
    pub name: u8,
    pub request: Request,
    /// Whether the extension was in time and every fault so far could be survived, so that it must
    /// keep its lock.
    pub keeps: bool,
    /// The answer; `None` while there is none.
    pub answer: Option<Answer>,
    /// The ticket and the rounds of a waiter that was granted the lock.
    pub waited: Option<Waited>,
}

/// The queue data of a granted lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waited {
    /// The waiter's number in its process. `None` if the request did not wait in the queue.
    pub ticket: Option<u64>,
    /// Number of rounds.
    pub rounds: u32,
}

/// Waiters that a gateway still counts at the end, when everything has settled.
#[derive(Debug, Clone, Copy)]
pub struct Remaining {
    pub gateway: u8,
    pub waiters: usize,
    /// The number of locks that those clients wait for.
    pub locks: usize,
}

/// A holder's write to a register. A register refuses tokens smaller than the largest it has seen.
#[derive(Debug, Clone, Copy)]
pub struct Write {
    pub moment: Moment,
    /// The lock and its register.
    pub name: u8,
    pub grant: Grant,
    /// Whether the register took the write.
    pub accepted: bool,
}

/// Kinds of operations on a master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    Acquire,
    /// Sets a lost lock again.
    Repair,
    Extend,
    Release,
    /// Releases exactly the grant of a failed proposal.
    Undo,
    Inspect,
}

/// The kind of a master's vote, without details.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VoteKind {
    Granted,
    /// Another grant of the same owner stands.
    Yours,
    /// Another owner has the lock.
    Held,
    /// T is not above the watermark.
    Stale,
    Extended,
    Released,
    Missing,
    Found,
    /// The master's marker differs from the one that the gateway sent.
    Quarantined,
    /// T is too far from the master's time.
    Clock,
    Error,
}

/// An operation executed on a master.
#[derive(Debug, Clone, Copy)]
pub struct Execution {
    pub moment: Moment,
    pub master: u8,
    pub gateway: u8,
    /// Whether the gateway had given up the connection before the operation arrived.
    pub late: bool,
    pub name: u8,
    pub kind: OpKind,
    /// The owner and token that the operation asked for.
    pub grant: Option<Grant>,
    /// How far the token was ahead of the master's wall clock, in microseconds. Negative if it was
    /// behind.
    pub ahead_micros: i64,
    /// The master's vote.
    pub vote_kind: VoteKind,
}

/// A lock that a master still stores at the end, when everything has settled.
#[derive(Debug, Clone, Copy)]
pub struct Leftover {
    pub master: u8,
    pub name: u8,
    pub grant: Grant,
    /// How much longer the lock would live.
    pub expires_in: Duration,
}

/// A gateway that lets a master vote at the end, when everything has settled.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    pub gateway: u8,
    pub master: u8,
    /// When this process of the gateway started, in true time since the history began.
    pub started: Duration,
    /// When the gateway began to let the master vote, without a break since then.
    pub admitted: Duration,
}

/// Another event that the timeline shows, for example a fault or an admission.
#[derive(Debug, Clone)]
pub struct Note {
    pub moment: Moment,
    pub who: String,
    pub text: String,
}

/// Counters that the checker ignores.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Quarantines, each counted when a gateway first saw it.
    pub quarantines: u64,
    /// Admissions of a master by a gateway.
    pub admissions: u64,
    /// Repairs of lost locks.
    pub repairs: u64,
    pub faults: u64,
    pub abandoned: u64,
    /// Locks handed from a release to a waiter of the same gateway.
    pub handed_locally: u64,
    /// Locks that a waiter got because of a hint from another gateway.
    pub handed_remotely: u64,
    /// Hints that were published. A hint counts once for each gateway that listens.
    pub hints_sent: u64,
    /// Hints that were published and lost.
    pub hints_lost: u64,
}

/// All events, by kind.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Requests, by start.
    pub operations: Vec<Operation>,
    /// Writes, in order.
    pub writes: Vec<Write>,
    /// Executions, in order.
    pub executions: Vec<Execution>,
    /// The moment and the master of each loss of data, whole or partial, in order.
    pub losses: Vec<(Moment, u8)>,
    /// The moments of all faults, in order. A fault's effects may last longer.
    pub faults: Vec<Moment>,
    /// The beginning and end of each freeze of everything.
    pub freezes: Vec<(Duration, Duration)>,
    /// Waiters that gateways still count at the end.
    pub remaining: Vec<Remaining>,
    /// Locks that masters still store at the end.
    pub leftovers: Vec<Leftover>,
    /// The masters that each gateway lets vote at the end.
    pub reaches: Vec<Reach>,
    /// When the history ended.
    pub end: Duration,
    /// Other events, in order.
    pub notes: Vec<Note>,
    pub counts: Counts,
    /// How often each noteworthy situation occurred.
    pub situations: BTreeMap<&'static str, u64>,
    /// Holds of clients of another Redlock library on the same masters, in the order of their ends.
    pub foreign: Vec<ForeignHold>,
}

/// A hold of a client of another Redlock library. The client had a majority, and released before
/// its own deadline.
#[derive(Debug, Clone, Copy)]
pub struct ForeignHold {
    /// The lock.
    pub name: u8,
    /// When the client learned of its majority.
    pub from: Moment,
    /// When the client released it.
    pub until: Moment,
}

/// Writes a history while it happens.
pub struct Recorder {
    start: Instant,
    inner: Mutex<Inner>,
}

struct Inner {
    history: History,
    seq: u64,
    /// Set when the history is taken. The teardown may cause further events, and they are not
    /// recorded.
    closed: bool,
}

impl Recorder {
    /// A recorder with an empty history that begins now.
    pub fn new(start: Instant) -> Self {
        Self {
            start,
            inner: Mutex::new(Inner { history: History::default(), seq: 0, closed: false }),
        }
    }

    /// Records a request, and returns the number under which its answer is recorded.
    pub fn begin(
        &self,
        client: u8,
        (gateway, process): (u8, u16),
        name: u8,
        request: Request,
    ) -> usize {
        let (mut inner, start) = self.next();
        let asked = Operation {
            start,
            end: None,
            client,
            gateway,
            process,
            name,
            request,
            keeps: false,
            answer: None,
            waited: None,
        };
        inner.history.operations.push(asked);
        inner.history.operations.len() - 1
    }

    /// Records the queue data of a waiter that was granted the lock.
    pub fn waited(&self, number: usize, waited: Waited) {
        if let Some(operation) = self.lock().history.operations.get_mut(number) {
            operation.waited = Some(waited);
        }
    }

    /// Marks the extension with this number as one that must keep its lock.
    pub fn must_keep(&self, number: usize) {
        if let Some(operation) = self.lock().history.operations.get_mut(number) {
            operation.keeps = true;
        }
    }

    /// Records the answer to the request with this number.
    pub fn end(&self, number: usize, answer: Answer) {
        let (mut inner, end) = self.next();
        if let Some(operation) = inner.history.operations.get_mut(number) {
            (operation.end, operation.answer) = (Some(end), Some(answer));
        }
    }

    /// Records a write to a register.
    pub fn write(&self, name: u8, grant: Grant, accepted: bool) {
        let (mut inner, moment) = self.next();
        inner.history.writes.push(Write { moment, name, grant, accepted });
    }

    /// Records an operation that a master has executed. The moment is filled in here.
    pub fn execution(&self, execution: Execution) {
        let (mut inner, moment) = self.next();
        inner.history.executions.push(Execution { moment, ..execution });
    }

    /// Records that a master loses data.
    pub fn loss(&self, master: u8) {
        let (mut inner, moment) = self.next();
        inner.history.losses.push((moment, master));
    }

    /// Counts a fault and records its moment.
    pub fn fault(&self) {
        let (mut inner, moment) = self.next();
        inner.history.counts.faults += 1;
        inner.history.faults.push(moment);
    }

    /// Records an event that is neither a request nor an execution.
    pub fn note(&self, who: impl Into<String>, text: impl Into<String>) {
        let (mut inner, moment) = self.next();
        inner.history.notes.push(Note { moment, who: who.into(), text: text.into() });
    }

    pub fn count(&self, add: impl FnOnce(&mut Counts)) {
        let (mut inner, _) = self.next();
        add(&mut inner.history.counts);
    }

    /// Records that everything stood still for `length`, until now.
    pub fn froze(&self, length: Duration) {
        let (mut inner, moment) = self.next();
        inner.history.freezes.push((moment.at.saturating_sub(length), moment.at));
    }

    /// Counts a noteworthy situation.
    pub fn situation(&self, what: &'static str) {
        *self.lock().history.situations.entry(what).or_default() += 1;
    }

    /// The present moment, as the beginning of another library's hold.
    pub fn moment(&self) -> Moment {
        self.next().1
    }

    /// Records a hold of another library's client, which ends now.
    pub fn foreign(&self, name: u8, from: Moment) {
        let (mut inner, until) = self.next();
        inner.history.foreign.push(ForeignHold { name, from, until });
    }

    /// Ends the history and returns it.
    pub fn take(&self) -> History {
        let mut inner = self.lock();
        inner.closed = true;
        std::mem::take(&mut inner.history)
    }

    fn next(&self) -> (MutexGuard<'_, Inner>, Moment) {
        let mut inner = self.lock();
        if inner.closed {
            inner.history = History::default();
        }
        inner.seq += 1;
        let moment = Moment { seq: inner.seq, at: self.start.elapsed() };
        (inner, moment)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Grant {
    /// The grant's T in milliseconds since the history began, and the first four digits of its
    /// owner.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.fencing as i64 - EPOCH_MICROS as i64;
        write!(f, "T{:.3}/{:04x}", micros as f64 / 1000.0, self.owner >> 48)
    }
}
