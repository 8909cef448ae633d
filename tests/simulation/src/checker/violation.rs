//! What is demanded, what a violation says, and what several demands share.

use std::fmt;
use std::time::Duration;

use crate::history::{History, Moment};

/// What was violated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Demand {
    /// Two holders.
    Exclusion,
    /// A token that is not larger.
    Fencing,
    /// A stale write taken, or a rightful one refused.
    Register,
    /// A released lock that is back.
    Orphan,
    /// An extension across somebody else's grant.
    Extension,
    /// An extended lock that was lost.
    Kept,
    /// A waiter that was overtaken in its own line.
    Order,
    /// A waiter without an answer.
    Answered,
    /// An answer that was made void.
    Promised,
    /// A lock that stays free while somebody waits.
    Idle,
}

impl Demand {
    /// All of them.
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
    /// Of what.
    pub demand: Demand,
    /// When it can first be seen.
    pub at: Duration,
    /// What happened.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {} ms: {}", self.demand, self.at.as_millis(), self.text)
    }
}

/// How long a release may be owed to a master that can be reached: the call before it and its own may take a second each
/// without the gateway giving the connection up, and a failed one is tried again after 200 ms.
pub(super) const PATIENCE: Duration = Duration::from_millis(2_300);

/// Whether a master has lost nothing since.
pub(super) fn remembers(history: &History, master: u8, since: Moment) -> bool {
    !history.losses.iter().any(|(moment, of)| *of == master && *moment > since)
}
