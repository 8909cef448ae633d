//! The record of a history, which the checker judges and the timeline shows. It knows nothing of
//! the simulation; a test can write one by hand.
//!
//! Everything carries a [`Moment`]: the true time, and a number that orders events within one
//! millisecond.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::time::EPOCH_MICROS;

/// When something happened. Ordered by `seq`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Moment {
    /// Its place in the order of all events.
    pub seq: u64,
    /// True time since the history began.
    pub at: Duration,
}

/// One grant of a lock: its owner and its fencing token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Grant {
    /// The first half of the owner.
    pub owner: u64,
    /// T, in microseconds since 1970.
    pub fencing: u64,
    /// Tells two grants of the owner with the same T apart.
    pub nonce: u32,
}

/// A client's request to a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Asks for the lock, for a fresh owner or a given one.
    Acquire {
        /// The owner, if the client chose it.
        owner: Option<u64>,
        /// The TTL.
        ttl_ms: u64,
        /// How long it waits in the queue, if it does.
        patience_ms: Option<u64>,
    },
    /// Asks to keep the lock for another TTL.
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
    /// The client has the lock. `held_for` is true time: the validity as the client's own clock
    /// measures it.
    Granted {
        grant: Grant,
        /// Counted from the answer.
        held_for: Duration,
        /// The grant of an earlier request for the same owner.
        replayed: bool,
    },
    /// The client keeps the lock for this true time.
    Extended {
        /// Counted from the answer.
        held_for: Duration,
    },
    /// The client has released the lock.
    Released,
    /// Another owner has the lock.
    Held,
    /// The lock is gone.
    Lost,
    /// Another owner has the lock by now.
    NotHolder,
    /// No majority could be reached; the client holds nothing.
    NoQuorum,
    /// No majority could be reached; the old deadline stands.
    Unknown,
    /// The client did not wait for the answer.
    Cancelled,
    GatewayDied,
}

/// One request of a client.
#[derive(Debug, Clone)]
pub struct Operation {
    /// When it was sent.
    pub start: Moment,
    /// When it was answered.
    pub end: Option<Moment>,
    pub client: u8,
    pub gateway: u8,
    /// The number of the gateway's process.
    pub process: u16,
    pub name: u8,
    pub request: Request,
    /// Whether it is one of the timely extensions that keep a lock through survivable faults.
    pub keeps: bool,
    /// The answer, once there is one.
    pub answer: Option<Answer>,
    /// The waiter's ticket and rounds, if it waited.
    pub waited: Option<Waited>,
}

/// The queue data of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waited {
    /// Its number among the waiters of the process; `None` when it did not wait in the queue.
    pub ticket: Option<u64>,
    /// Number of rounds.
    pub rounds: u32,
}

/// Waiters that a gateway still has when everything has settled.
#[derive(Debug, Clone, Copy)]
pub struct Remaining {
    pub gateway: u8,
    pub waiters: usize,
    /// Number of locks they wait for.
    pub locks: usize,
}

/// A holder's write to a register, which refuses tokens below the largest it has seen.
#[derive(Debug, Clone, Copy)]
pub struct Write {
    pub moment: Moment,
    /// The lock and its register.
    pub name: u8,
    pub grant: Grant,
    /// Whether the register took it.
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

/// A master's vote, without details.
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
    /// The marker differs from the sent one.
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
    /// Whether the gateway had already given up the connection.
    pub late: bool,
    pub name: u8,
    pub kind: OpKind,
    /// Its owner and token.
    pub grant: Option<Grant>,
    /// How far the token was ahead of the master's wall clock, in microseconds.
    pub ahead_micros: i64,
    /// Its vote.
    pub vote_kind: VoteKind,
}

/// A lock that a master still stores when everything has settled.
#[derive(Debug, Clone, Copy)]
pub struct Leftover {
    pub master: u8,
    pub name: u8,
    pub grant: Grant,
    /// Its remaining life.
    pub expires_in: Duration,
}

/// A gateway that lets a master vote when everything has settled.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    pub gateway: u8,
    pub master: u8,
    /// When this process of the gateway started, since the history began.
    pub started: Duration,
    /// Since when, without a break, it has let the master vote.
    pub admitted: Duration,
}

/// Another event worth knowing: a fault, an admission.
#[derive(Debug, Clone)]
pub struct Note {
    pub moment: Moment,
    pub who: String,
    pub text: String,
}

/// Counters that the checker does not judge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Quarantines that a gateway saw for the first time.
    pub quarantines: u64,
    /// Admissions of a master by a gateway.
    pub admissions: u64,
    /// Repairs of lost locks.
    pub repairs: u64,
    pub faults: u64,
    pub abandoned: u64,
    /// Locks handed from a release to a waiter of the same gateway.
    pub handed_locally: u64,
    /// Locks that a waiter got after a hint from another gateway.
    pub handed_remotely: u64,
    /// Hints that were published, counted once for each listening gateway.
    pub hints_sent: u64,
    /// Of these, the lost ones.
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
    /// When each master lost all or part of its data, in order.
    pub losses: Vec<(Moment, u8)>,
    /// When faults happened, in order. Their effects may last for a while.
    pub faults: Vec<Moment>,
    /// Freezes of everything, from and until.
    pub freezes: Vec<(Duration, Duration)>,
    /// Waiters at the end.
    pub remaining: Vec<Remaining>,
    /// Locks on masters at the end.
    pub leftovers: Vec<Leftover>,
    /// The masters that each gateway lets vote at the end.
    pub reaches: Vec<Reach>,
    /// The end.
    pub end: Duration,
    /// Other events, in order.
    pub notes: Vec<Note>,
    pub counts: Counts,
    /// How often each noteworthy situation occurred.
    pub situations: BTreeMap<&'static str, u64>,
    /// Locks of other Redlock clients on the same masters, by the end of each.
    pub foreign: Vec<ForeignHold>,
}

/// A hold of another Redlock client: it had a majority, and has stopped by its own deadline.
#[derive(Debug, Clone, Copy)]
pub struct ForeignHold {
    /// The lock.
    pub name: u8,
    /// When the client learned of it.
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
    /// Set when the history is taken. Later events belong to the teardown, not to the history.
    closed: bool,
}

impl Recorder {
    /// An empty history that begins now.
    pub fn new(start: Instant) -> Self {
        Self {
            start,
            inner: Mutex::new(Inner { history: History::default(), seq: 0, closed: false }),
        }
    }

    /// Records a request. Its answer goes to the returned number.
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

    /// Records the queue data of a granted waiter.
    pub fn waited(&self, number: usize, waited: Waited) {
        if let Some(operation) = self.lock().history.operations.get_mut(number) {
            operation.waited = Some(waited);
        }
    }

    /// Marks an extension that must keep its lock.
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

    /// Records an execution; this function fills in its moment.
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

    /// Records that everything stood still for `length` until now.
    pub fn froze(&self, length: Duration) {
        let (mut inner, moment) = self.next();
        inner.history.freezes.push((moment.at.saturating_sub(length), moment.at));
    }

    /// Counts a situation.
    pub fn situation(&self, what: &'static str) {
        *self.lock().history.situations.entry(what).or_default() += 1;
    }

    /// The present moment, for a foreign client's hold.
    pub fn moment(&self) -> Moment {
        self.next().1
    }

    /// Records the end of a foreign client's hold.
    pub fn foreign(&self, name: u8, from: Moment) {
        let (mut inner, until) = self.next();
        inner.history.foreign.push(ForeignHold { name, from, until });
    }

    /// Ends the history.
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
    /// `T` in milliseconds since the history began, and four digits of the owner.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let micros = self.fencing as i64 - EPOCH_MICROS as i64;
        write!(f, "T{:.3}/{:04x}", micros as f64 / 1000.0, self.owner >> 48)
    }
}
