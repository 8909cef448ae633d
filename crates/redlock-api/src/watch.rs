//! The data of events in streams about locks. The other events have a [`LockStatus`].

use serde::{Deserialize, Serialize};

use crate::LockStatus;

/// The first event of a stream about a prefix: the held locks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockSnapshot {
    /// The held locks. A slot other than slot 1 has an entry of its own.
    pub locks: Vec<LockStatus>,
    /// Whether these are all. Otherwise there are more than the gateway shows; a longer prefix has
    /// fewer.
    pub is_complete: bool,
}

/// Says that the watcher read too slowly. A snapshot follows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lagged {
    /// How many events were lost.
    pub missed: u64,
}

/// The last event of a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamEnd {
    /// Why the gateway ended the stream.
    pub reason: StreamEndReason,
}

/// Why the gateway ended a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamEndReason {
    /// The stream has lasted as long as streams may.
    Time,
    /// The gateway shuts down.
    Draining,
    /// The key may no longer watch this.
    Revoked,
    /// A reason that this version does not know.
    #[serde(other)]
    Other,
}
