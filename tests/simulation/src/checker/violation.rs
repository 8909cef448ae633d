//! The demands, their violations, and shared helpers.

use std::fmt;
use std::time::Duration;

use crate::history::{History, Moment};

/// The violated promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Demand {
    /// Two holders.
    Exclusion,
    /// A token that is not larger than an earlier one.
    Fencing,
    /// A stale write taken, or a rightful one refused.
    Register,
    /// A released lock that is set again.
    Orphan,
    /// An extension across another owner's grant.
    Extension,
    /// An extended lock that was lost.
    Kept,
    /// A waiter that was overtaken in its own queue.
    Order,
    /// A waiter without an answer.
    Answered,
    /// An answer that another request undid.
    Promised,
    /// A lock that stays free while a client waits.
    Idle,
}

impl Demand {
    /// All demands.
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
    /// When the violation first shows.
    pub at: Duration,
    /// What happened.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {} ms: {}", self.demand, self.at.as_millis(), self.text)
    }
}

/// How long the release of a reachable master may stay undelivered. The call before it may take a
/// second without ending the connection, and so may its own. A failed one is tried again after 200
/// ms.
pub(super) const PATIENCE: Duration = Duration::from_millis(2_300);

/// Whether a master has lost nothing since.
pub(super) fn remembers(history: &History, master: u8, since: Moment) -> bool {
    !history.losses.iter().any(|(moment, of)| *of == master && *moment > since)
}
