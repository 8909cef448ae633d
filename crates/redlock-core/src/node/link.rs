//! The interface to the network of one master. A driver decides what to send and when; a link sends
//! it. There are two links: to a real master ([`redis`](super::redis)), and over the network of a
//! simulation.
//!
//! A connection leads to one process of a master, and is never repaired: after an error it is
//! dropped, and another one is opened. So no command that was sent before a restart of the master
//! can run after the restart.
//!
//! The driver keeps the deadlines, and drops the session at a missed one. A request whose future
//! has not resolved by then may have been sent, and may still run.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;

use super::eligibility::Facts;
use super::hint::Hint;
use super::op::Vote;
use super::record::Record;
use super::status::{Diagnosis, Engine, Remedy};
use super::task::Task;
use crate::model::types::LockName;

/// The future answer of a link.
pub type Answering<T> = BoxFuture<'static, Result<T, LinkError>>;

/// The way to one master.
pub trait Link: Send + Sync + 'static {
    /// Opens a connection that is logged in and has its database selected.
    fn connect(&self) -> Answering<Box<dyn Session>>;

    /// Opens a separate connection that receives the master's hints. Resolves only after a message
    /// with `nonce`, published on the master, has come back on this connection.
    fn subscribe(&self, nonce: u64) -> Answering<Box<dyn Subscription>>;
}

/// One connection. Dropping it ends it, with everything under way on it.
pub trait Session: Send + 'static {
    /// The master's facts and its marker, both read from the same process.
    fn probe(&self) -> Answering<ProbeReply>;

    /// Replaces one marker by another in one step, if the process is the probed one.
    fn swap_marker(&self, swap: MarkerSwap) -> Answering<Swapped>;

    /// A page of lock keys.
    fn scan(&self, scan: Scan) -> Answering<Scanned>;

    /// A page of the stored locks, including those of other clients; a value of another client
    /// without expiry is left out. None of our locks lives longer than `longest_life`: if somebody
    /// changed an expiry by hand, the lock counts with that life.
    fn stored(&self, cursor: Option<Bytes>, longest_life: Duration) -> Answering<StoredPage>;

    /// Sets locks, if the batch's marker stands. After an error some of the locks may be set.
    fn recover(&self, recovery: RecoveryBatch) -> Answering<RecoveryAnswer>;

    /// Records on the master that it has caught up under this marker. Does nothing when another
    /// marker stands.
    fn mark_caught_up(&self, marker: &str) -> Answering<()>;

    /// The master's wall clock, in microseconds since 1970.
    fn time_micros(&self) -> Answering<i64>;

    /// Prepares the session for calls that name this incarnation of the marker. Returns the program
    /// that runs them.
    /// Calls are bound to this process: a process started later refuses them with
    /// [`LinkErrorKind::NoScript`].
    fn load(&self, run_id: &str, incarnation: &str) -> Answering<Engine>;

    /// Runs lock operations in this order, as one uninterrupted call. Calls are answered in the
    /// order in which they were made. A call without operations is the heartbeat. For each process of
    /// a gateway, the master stores the number of the latest call that was a heartbeat, or that
    /// granted, extended or released a lock. The number 0 stands for none.
    fn call(&self, tasks: &[Task], number: u64) -> Answering<Answer>;

    /// Resolves when the connection has ended by itself, with the reason. Called once.
    fn closed(&self) -> BoxFuture<'static, String>;
}

/// A connection that receives hints. Dropping it ends it.
pub trait Subscription: Send + 'static {
    /// The next hint, or the reason why no more will come. The future may be dropped, and `next`
    /// called again.
    fn next(&mut self) -> BoxFuture<'_, Result<Hint, LinkError>>;

    /// Tests the connection.
    fn ping(&self) -> Answering<()>;
}

/// The result of a probe.
#[derive(Debug, Clone)]
pub struct ProbeReply {
    /// The master's report about itself.
    pub facts: Facts,
    /// The marker that stands, if any.
    pub marker: Option<String>,
    /// Whether the locks that were granted while the master was away have been set on it since this
    /// marker was put.
    pub is_caught_up: bool,
    /// The number that the master stores for this gateway, see [`Session::call`]; 0 for none.
    pub number: u64,
}

/// A change of marker, see [`Session::swap_marker`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MarkerSwap {
    /// The process that was probed.
    pub run_id: String,
    /// The marker that must stand; `None` for no marker.
    pub from: Option<String>,
    /// The new marker.
    pub to: String,
    /// The master's clock at the probe, in microseconds since 1970. The master refuses the swap if
    /// the probe was more than 10 s ago. 0 skips this check.
    pub probed_micros: u64,
}

/// Which page of lock keys to read.
#[derive(Debug, Clone)]
pub struct Scan {
    /// The prefix of the keys.
    pub key_prefix: Bytes,
    /// The cursor that the page before returned; empty for the first page.
    pub cursor: Bytes,
    /// The approximate limit of keys to read.
    pub count: u32,
}

/// A page of lock keys.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Scanned {
    /// The keys with the prefix. A key may occur twice.
    pub keys: Vec<Bytes>,
    /// The approximate number of keys read.
    pub count: u32,
    /// The cursor of the next page; `None` at the end.
    pub next: Option<Bytes>,
}

/// A lock as a master stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Its name.
    pub name: LockName,
    /// The value of the lock.
    pub record: Record,
    /// The remaining life.
    pub expires_in: Duration,
}

/// A page of stored locks.
#[derive(Debug, Default)]
pub struct StoredPage {
    /// The locks.
    pub stored: Vec<Stored>,
    /// The cursor of the next page; `None` at the end.
    pub next: Option<Bytes>,
}

/// A batch of lost locks for a master in quarantine, see [`Session::recover`].
#[derive(Debug, Clone)]
pub struct RecoveryBatch {
    /// The marker that must stand.
    pub marker: String,
    /// The locks to set.
    pub puts: Vec<(LockName, Put)>,
}

/// The result of a recovery batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAnswer {
    /// All locks are set.
    Done,
    /// Another marker stands; nothing was set.
    OtherMarker,
    /// A Redlock client that is no gateway has one of the locks. That client counts this master's
    /// vote, so recovery must not overwrite its lock. Nothing was set.
    OtherClient,
}

/// A lock that recovery sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Put {
    /// The value of the lock.
    pub record: Record,
    /// The remaining life.
    pub expires_in: Duration,
    /// The watermark beside the lock, with its mark; `None` leaves the watermark as it is.
    pub fence: Option<Bytes>,
}

impl Put {
    /// The same lock when `age` has passed; `None` if it has ended by then.
    pub(crate) fn aged(&self, age: Duration) -> Option<Self> {
        let expires_in = self.expires_in.checked_sub(age).filter(|left| !left.is_zero())?;
        Some(Self { expires_in, ..self.clone() })
    }
}

/// The result of a marker swap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swapped {
    /// The new marker stands.
    Done,
    /// Another marker stands, or the probe was too long ago.
    OtherMarker,
    /// The master was restarted since the probe.
    OtherProcess,
}

/// The answer to one call.
#[derive(Debug)]
pub struct Answer {
    /// One vote for each operation.
    pub votes: Vec<Vote>,
    /// The master's wall clock, in microseconds since 1970.
    pub time_micros: Option<i64>,
    /// Whether the marker of the call stands.
    pub is_admitted: bool,
    /// Whether the master has stored the number of the call.
    pub is_number_kept: bool,
    /// The error with which the master refuses every write, if it does. Contained in the answer to
    /// a call without operations, and to a call that the master refused as a whole.
    pub write_error: Option<String>,
}

/// Why a request to a link failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct LinkError {
    /// The effect of the failed request.
    pub kind: LinkErrorKind,
    /// One sentence for people.
    pub detail: String,
    /// What an operator can do, if anything. If there is a remedy, an immediate retry would fail
    /// again.
    pub remedy: Option<Remedy>,
}

/// A text of a master, cut: logs, answers and the status of the node quote it.
pub(crate) fn quoted(text: &str) -> String {
    const MOST: usize = 200;
    text.chars().take(MOST).collect()
}

/// The effect of a failed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkErrorKind {
    /// The connection broke: a sent request may have run, or may still run.
    Broken,
    /// The process does not have the loaded script: it is another process, or lost its scripts.
    /// Nothing ran.
    NoScript,
    /// The master refused the command as a whole, before it ran.
    Refused,
    /// The master answered with an error; part of the request may have run.
    Error,
}

impl LinkError {
    /// An error without a remedy.
    pub fn new(kind: LinkErrorKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into(), remedy: None }
    }

    /// A broken connection: the effect is unknown.
    pub fn broken(detail: impl Into<String>) -> Self {
        Self::new(LinkErrorKind::Broken, detail)
    }
}

impl From<LinkError> for Diagnosis {
    fn from(LinkError { detail: reason, remedy, .. }: LinkError) -> Self {
        Self { reason, remedy }
    }
}
