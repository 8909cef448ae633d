//! What happened: the record that the checker judges and the timeline shows. It knows nothing of the simulation; a test
//! can write one by hand.
//!
//! Everything carries a [`Moment`]: the true time, and a number that orders what happened within one millisecond.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::time::EPOCH_MICROS;

/// When something happened. Ordered by `seq`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Moment {
    /// Its place in the order of all that happened.
    pub seq: u64,
    /// True time since the history began.
    pub at: Duration,
}

/// One grant of a lock: whose, and with which fencing token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Grant {
    /// The first half of the owner.
    pub owner: u64,
    /// T, in microseconds since 1970.
    pub fencing: u64,
    /// What tells it from another grant of the owner with the same T.
    pub nonce: u32,
}

/// What a client asked a gateway for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// The lock, for so many milliseconds, for a fresh owner or a given one.
    Acquire {
        /// The owner, if the client chose it.
        owner: Option<u64>,
        /// The TTL.
        ttl_ms: u64,
        /// How long it waits in the queue, if it does.
        patience_ms: Option<u64>,
    },
    /// To keep it for so many milliseconds more.
    Extend {
        /// What the client shows.
        grant: Grant,
        /// The TTL.
        ttl_ms: u64,
    },
    /// To give it back.
    Release {
        /// What the client shows.
        grant: Grant,
    },
}

/// What the client heard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// It has the lock, for so long of true time as its own clock measures the validity it was told.
    Granted {
        grant: Grant,
        /// From the answer on.
        held_for: Duration,
        /// It is the grant of an earlier request for the same owner.
        replayed: bool,
    },
    /// It keeps the lock for so long of true time.
    Extended {
        /// From the answer on.
        held_for: Duration,
    },
    /// It has given the lock back.
    Released,
    /// Somebody else has the lock.
    Held,
    /// There is no such lock any more.
    Lost,
    /// Somebody else has the lock by now.
    NotHolder,
    /// No majority could be reached; nothing is held.
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
    /// Which of its processes.
    pub process: u16,
    pub name: u8,
    pub request: Request,
    /// It is one of the extensions, all in time, that keep a lock through faults that it can survive.
    pub keeps: bool,
    /// The answer, once there is one.
    pub answer: Option<Answer>,
    /// How a waiter came to be granted the lock.
    pub waited: Option<Waited>,
}

/// What a lease tells of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Waited {
    /// Its number among the waiters of the process; `None` when it did not wait in the queue.
    pub ticket: Option<u64>,
    /// How many times the masters were asked.
    pub rounds: u32,
}

/// Waiters that a gateway still has when everything has settled.
#[derive(Debug, Clone, Copy)]
pub struct Remaining {
    pub gateway: u8,
    pub waiters: usize,
    /// For how many locks.
    pub locks: usize,
}

/// A holder writes to what the lock protects, a register that refuses tokens smaller than the largest it has seen.
#[derive(Debug, Clone, Copy)]
pub struct Write {
    pub moment: Moment,
    /// Which lock and register.
    pub name: u8,
    pub grant: Grant,
    /// Whether the register took it.
    pub accepted: bool,
}

/// Kinds of operations that reach a master.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Acquire,
    /// Set it again where it was lost.
    Repair,
    Extend,
    Release,
    /// Of a try that failed: of exactly its grant.
    Undo,
    Inspect,
}

/// How a master votes, without the particulars.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cast {
    Granted,
    /// Another grant of the same owner stands.
    Yours,
    /// Somebody else has it.
    Held,
    /// T is not larger than the fence.
    Stale,
    Extended,
    Released,
    Missing,
    Found,
    /// The marker is not the one shown.
    Quarantined,
    /// T is too far from the master's time.
    Clock,
    Error,
}

/// An operation is executed on a master.
#[derive(Debug, Clone, Copy)]
pub struct Landing {
    pub moment: Moment,
    pub master: u8,
    pub gateway: u8,
    /// Whether the gateway had given the connection up by then.
    pub late: bool,
    pub name: u8,
    pub kind: Kind,
    /// With which owner and token.
    pub grant: Option<Grant>,
    /// How far the token was ahead of the master's wall clock, in microseconds.
    pub ahead_micros: i64,
    /// What came of it.
    pub cast: Cast,
}

/// A lock that a master still stores when everything has settled.
#[derive(Debug, Clone, Copy)]
pub struct Leftover {
    pub master: u8,
    pub name: u8,
    pub grant: Grant,
    /// How long it would live.
    pub expires_in: Duration,
}

/// A gateway that lets a master vote when everything has settled.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    pub gateway: u8,
    pub master: u8,
    /// Since when this process of the gateway runs.
    pub started: Duration,
    /// Since when, without a break, it has let the master vote.
    pub admitted: Duration,
}

/// Anything else worth knowing: faults, admissions.
#[derive(Debug, Clone)]
pub struct Note {
    pub moment: Moment,
    pub who: String,
    pub text: String,
}

/// What is counted and not judged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Quarantines that a gateway saw for the first time.
    pub quarantines: u64,
    /// Admissions of a master by a gateway.
    pub admissions: u64,
    /// Locks that were set again where they had been lost.
    pub repairs: u64,
    pub faults: u64,
    pub abandoned: u64,
    /// Locks handed from a release to a waiter of the same gateway.
    pub handed_locally: u64,
    /// Locks that a waiter got after a hint from another gateway.
    pub handed_remotely: u64,
    /// Hints that were published, once for each gateway that listened.
    pub hints_sent: u64,
    /// Of these, how many were lost.
    pub hints_lost: u64,
}

/// All that happened, by kind.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Requests, by start.
    pub operations: Vec<Operation>,
    /// Writes, in order.
    pub writes: Vec<Write>,
    /// Executions, in order.
    pub landings: Vec<Landing>,
    /// When which master forgot all or some of what it had stored, in order.
    pub losses: Vec<(Moment, u8)>,
    /// When something was broken, in order. Everything may be disturbed for a while after it.
    pub faults: Vec<Moment>,
    /// When everything stood still, from and until.
    pub freezes: Vec<(Duration, Duration)>,
    /// Who still waits at the end.
    pub remaining: Vec<Remaining>,
    /// What is left at the end.
    pub leftovers: Vec<Leftover>,
    /// Which gateways let which masters vote at the end.
    pub reaches: Vec<Reach>,
    /// When the end is.
    pub end: Duration,
    /// The rest, in order.
    pub notes: Vec<Note>,
    pub counts: Counts,
    /// How often something came about that a simulation should have seen.
    pub situations: BTreeMap<&'static str, u64>,
    /// Locks of other Redlock clients on the same masters, by the end of each.
    pub foreign: Vec<ForeignHold>,
}

/// Another Redlock client held a lock: it had a majority, and has stopped by its own deadline.
#[derive(Debug, Clone, Copy)]
pub struct ForeignHold {
    /// Which lock.
    pub name: u8,
    /// When it knew.
    pub from: Moment,
    /// When it let go.
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
    /// Taken: what still happens while the simulation is torn down is not part of the history.
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

    /// A request is sent; the answer goes to the number.
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

    /// It was granted to a waiter.
    pub fn waited(&self, number: usize, waited: Waited) {
        if let Some(operation) = self.lock().history.operations.get_mut(number) {
            operation.waited = Some(waited);
        }
    }

    /// It is an extension that must not come too late.
    pub fn must_keep(&self, number: usize) {
        if let Some(operation) = self.lock().history.operations.get_mut(number) {
            operation.keeps = true;
        }
    }

    /// The request with this number is answered.
    pub fn end(&self, number: usize, answer: Answer) {
        let (mut inner, end) = self.next();
        if let Some(operation) = inner.history.operations.get_mut(number) {
            (operation.end, operation.answer) = (Some(end), Some(answer));
        }
    }

    /// A write to a register.
    pub fn write(&self, name: u8, grant: Grant, accepted: bool) {
        let (mut inner, moment) = self.next();
        inner.history.writes.push(Write { moment, name, grant, accepted });
    }

    /// An execution; its moment is filled in here.
    pub fn landing(&self, landing: Landing) {
        let (mut inner, moment) = self.next();
        inner.history.landings.push(Landing { moment, ..landing });
    }

    /// A master forgets something.
    pub fn loss(&self, master: u8) {
        let (mut inner, moment) = self.next();
        inner.history.losses.push((moment, master));
    }

    /// Something is broken on purpose: counted, and remembered with its moment.
    pub fn fault(&self) {
        let (mut inner, moment) = self.next();
        inner.history.counts.faults += 1;
        inner.history.faults.push(moment);
    }

    /// Takes down what is worth knowing and neither request nor execution.
    pub fn note(&self, who: impl Into<String>, text: impl Into<String>) {
        let (mut inner, moment) = self.next();
        inner.history.notes.push(Note { moment, who: who.into(), text: text.into() });
    }

    pub fn count(&self, add: impl FnOnce(&mut Counts)) {
        let (mut inner, _) = self.next();
        add(&mut inner.history.counts);
    }

    /// Everything has stood still for so long until now.
    pub fn froze(&self, length: Duration) {
        let (mut inner, moment) = self.next();
        inner.history.freezes.push((moment.at.saturating_sub(length), moment.at));
    }

    /// Counts a situation.
    pub fn situation(&self, what: &'static str) {
        *self.lock().history.situations.entry(what).or_default() += 1;
    }

    /// What a foreign client knows from now on.
    pub fn moment(&self) -> Moment {
        self.next().1
    }

    /// A foreign client lets go.
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
