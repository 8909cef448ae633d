//! The demands on a history, their violations, and functions that several checks share.

use std::fmt;
use std::time::Duration;

use crate::history::{History, Moment};

/// A promise that a history can violate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Demand {
    /// Two owners held one lock at the same time.
    Exclusion,
    /// A grant's token was not larger than that of an earlier grant.
    Fencing,
    /// A register took a stale write, or refused a write of the rightful holder.
    Register,
    /// A lock was set again after its release.
    Orphan,
    /// An extension succeeded although another owner was granted the lock in between.
    Extension,
    /// An extended lock was lost.
    Kept,
    /// A waiter was overtaken by a later one in its own queue.
    Order,
    /// A waiter got no answer in time.
    Answered,
    /// Another request undid an answer that was given.
    Promised,
    /// A lock stayed free while a client waited for it.
    Idle,
}

impl Demand {
    /// All demands, in the order of [`crate::checker`].
    pub const ALL: [Self; 10] = [
        Self::Exclusion,
        Self::Fencing,
        Self::Register,
        Self::Orphan,
        Self::Extension,
        Self::Kept,
        Self::Order,
        Self::Answered,
        Self::Promised,
        Self::Idle,
    ];
}

/// One violation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The violated demand.
    pub demand: Demand,
    /// When the violation first becomes visible.
    pub at: Duration,
    /// What happened.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {} ms: {}", self.demand, self.at.as_millis(), self.text)
    }
}

/// How long a release to a reachable master may stay undelivered. The call before the release may
/// take a second without ending the connection. The release's own call may take another second. If
/// it fails, the gateway tries again after 200 ms.
pub(super) const PATIENCE: Duration = Duration::from_millis(2_300);

/// Whether the master has lost no data since that moment.
pub(super) fn remembers(history: &History, master: u8, since: Moment) -> bool {
    !history.losses.iter().any(|(moment, of)| *of == master && *moment > since)
}
