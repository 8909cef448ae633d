//! The seam to input and output of one master. A driver decides what is said and when; a link says it. There are two: on a
//! real master ([`redis`](super::redis)), and over the network of a simulation.
//!
//! A connection leads to one process of a master, and is never repaired: what fails is dropped, and the next one is
//! opened. That is what keeps a command of before a restart from running after it.
//!
//! Deadlines are the driver's. A future of a session that is dropped unfinished may have been sent, and may still run.

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

/// What a link answers, once it does.
pub type Answering<T> = BoxFuture<'static, Result<T, LinkError>>;

/// The way to one master.
pub trait Link: Send + Sync + 'static {
    /// Opens a connection: logged in, on its database.
    fn connect(&self) -> Answering<Box<dyn Session>>;

    /// Opens another one, which hears the hints that are published on the master. A text that is published there has come
    /// back when this ends: `nonce` makes it this subscription's own.
    fn subscribe(&self, nonce: u64) -> Answering<Box<dyn Subscription>>;
}

/// One connection. Ends when dropped, together with what is under way on it.
pub trait Session: Send + 'static {
    /// What the master says about itself, and its marker; both of one process.
    fn look(&self) -> Answering<ProbeReply>;

    /// Puts one marker in the place of another, in one step, if the process is the one that was looked at.
    fn swap_marker(&self, swap: MarkerSwap) -> Answering<Swapped>;

    /// A page of lock keys.
    fn scan(&self, scan: Scan) -> Answering<Scanned>;

    /// A page of the locks that are stored, other clients' too; those without expiry are left out.
    fn stored(&self, cursor: Option<Bytes>) -> Answering<StoredPage>;

    /// Sets locks, if that marker stands. After an error some of them may be set.
    fn recover(&self, recovery: RecoveryBatch) -> Answering<RecoveryAnswer>;

    /// Notes on the master that it has caught up under this marker. Does nothing when another marker stands.
    fn mark_caught_up(&self, marker: &str) -> Answering<()>;

    /// The master's wall clock, in microseconds since 1970.
    fn time_micros(&self) -> Answering<i64>;

    /// Makes the session fit for calls under this marker, and says who runs them. The process is told apart from every other one
    /// of this master: one that was started since refuses the calls with [`LinkErrorKind::NoScript`].
    fn load(&self, run_id: &str, marker: &str) -> Answering<Engine>;

    /// Lock operations, in this order, as one call that nothing comes between. Calls are answered in the order in which they
    /// were made. Without operations it is the heartbeat.
    fn call(&self, tasks: &[Task]) -> Answering<Answer>;

    /// Resolves when the connection has ended by itself, with the reason. Called once.
    fn closed(&self) -> BoxFuture<'static, String>;
}

/// A connection on which hints come. Ends when dropped.
pub trait Subscription: Send + 'static {
    /// The next hint, or why there will be none. May be dropped and called again.
    fn next(&mut self) -> BoxFuture<'_, Result<Hint, LinkError>>;

    /// Whether anybody is there.
    fn ping(&self) -> Answering<()>;
}

/// What there is to see of a master.
#[derive(Debug, Clone)]
pub struct ProbeReply {
    /// What it says about itself.
    pub facts: Facts,
    /// Its marker, if it has one.
    pub marker: Option<String>,
    /// Whether the locks that were granted while it was away have been set on it since this marker was put.
    pub is_caught_up: bool,
}

/// A change of marker, see [`Session::swap_marker`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MarkerSwap {
    /// The process that was looked at.
    pub run_id: String,
    /// What must stand; nothing when `None`.
    pub from: Option<String>,
    /// What shall stand.
    pub to: String,
    /// The master's clock when it was looked at, in microseconds since 1970: what comes much later is put no more. 0 for any
    /// time.
    pub looked_micros: u64,
}

/// Which page of lock keys to read.
#[derive(Debug, Clone)]
pub struct Scan {
    /// Only keys that begin so.
    pub key_prefix: Bytes,
    /// Where the last page ended; empty to begin.
    pub cursor: Bytes,
    /// About how many keys to look at, at most.
    pub count: u32,
}

/// A page of lock keys.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Scanned {
    /// Those that begin as they should, prefix included. One may be there twice.
    pub keys: Vec<Bytes>,
    /// About how many were looked at.
    pub count: u32,
    /// Where the next page begins; `None` at the end.
    pub next: Option<Bytes>,
}

/// A lock as a master stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Its name.
    pub name: LockName,
    /// Whose it is.
    pub record: Record,
    /// For how long.
    pub expires_in: Duration,
}

/// A page of what a master stores.
#[derive(Debug, Default)]
pub struct StoredPage {
    /// The locks.
    pub stored: Vec<Stored>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<Bytes>,
}

/// What a master in quarantine is given back, see [`Session::recover`].
#[derive(Debug, Clone)]
pub struct RecoveryBatch {
    /// The marker that must stand.
    pub marker: String,
    /// By lock, what it is to have.
    pub puts: Vec<(LockName, Put)>,
}

/// What became of an recovery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryAnswer {
    /// They are set.
    Done,
    /// Another marker stands than the one that was seen; nothing was set.
    OtherMarker,
    /// A client of another library has one of the locks, and its vote must not be taken from it; nothing was set.
    OtherClient,
}

/// A lock that is given back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Put {
    /// Whose it is.
    pub record: Record,
    /// For how long.
    pub expires_in: Duration,
    /// The fence beside it, with its mark; `None` leaves what is there.
    pub fence: Option<Bytes>,
}

impl Put {
    /// What is left of it after so long; nothing when it has ended.
    pub(crate) fn aged(&self, age: Duration) -> Option<Self> {
        let expires_in = self.expires_in.checked_sub(age).filter(|left| !left.is_zero())?;
        Some(Self { expires_in, ..self.clone() })
    }
}

/// What became of a change of marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swapped {
    /// It stands.
    Done,
    /// Another marker stands than the one that was looked at.
    OtherMarker,
    /// The master was restarted since it was looked at.
    OtherProcess,
}

/// What a master answers to one call.
#[derive(Debug)]
pub struct Answer {
    /// One for each operation.
    pub votes: Vec<Vote>,
    /// The master's wall clock, in microseconds since 1970.
    pub time_micros: Option<i64>,
    /// Whether the marker still stands under which the call was made.
    pub is_admitted: bool,
    /// The error that a write ends with, in the answer to a call without operations.
    pub write_error: Option<String>,
}

/// Why a link did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct LinkError {
    /// What it says about the effect.
    pub kind: LinkErrorKind,
    /// One sentence for people.
    pub detail: String,
    /// What an operator can do; where there is anything, trying again at once is of no use.
    pub remedy: Option<Remedy>,
}

/// What a [`LinkError`] says about the effect of what was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkErrorKind {
    /// The connection broke: what was sent may have run, or may still run.
    Broken,
    /// The process does not know what was loaded: it is another one, or has lost. Nothing ran.
    NoScript,
    /// The master refused the command as a whole, before it ran.
    Refused,
    /// The master answered with an error; part of it may have run.
    Error,
}

impl LinkError {
    /// An error that no operator can do anything about.
    pub fn new(kind: LinkErrorKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into(), remedy: None }
    }

    /// An error of a connection that broke: the effect is unknown.
    pub fn broken(detail: impl Into<String>) -> Self {
        Self::new(LinkErrorKind::Broken, detail)
    }
}

impl From<LinkError> for Diagnosis {
    fn from(LinkError { detail: reason, remedy, .. }: LinkError) -> Self {
        Self { reason, remedy }
    }
}
