//! Event data of streams about locks. All other events carry a [`LockStatus`], a lease or a problem.

use serde::{Deserialize, Serialize};

use crate::LockStatus;

/// The first event of a stream about a prefix: the held locks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({
    "locks": [{ "name": "reports/nightly", "state": "held", "expires_in_ms": 21400 }], "is_complete": true
})))]
pub struct LockSnapshot {
    /// The held locks, one entry for each held slot.
    pub locks: Vec<LockStatus>,
    /// Whether `locks` has all held locks, and the stream follows all of them. If not, watch a longer
    /// prefix.
    pub is_complete: bool,
}

/// The state of a lock that a request waits for, and the place of that request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingStatus {
    /// The lock.
    #[serde(flatten)]
    pub status: LockStatus,
    /// The place of the request in its gateway's queue: 1 is served next. Absent for a moment when
    /// the request has just left the queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position: Option<u64>,
}

/// Reports that the watcher read too slowly. A snapshot follows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "missed": 12 })))]
pub struct Lagged {
    /// How many events were lost.
    pub missed: u64,
}

/// The last event of a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "reason": "time" })))]
pub struct StreamEnd {
    /// Why the gateway ended the stream.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub reason: StreamEndReason,
}

/// Why the gateway ended a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamEndReason {
    /// The maximum duration of a stream was reached.
    Time,
    /// The gateway shuts down.
    Draining,
    /// The key lost its permission.
    Revoked,
    /// A reason that this version does not know.
    #[serde(other)]
    Other,
}
