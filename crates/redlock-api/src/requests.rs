//! Bodies about deferred requests: those that are answered before they are granted.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Problem;
use crate::locks::present;

/// What to wait for without a connection. Every field but `names` may be omitted; unknown fields are
/// refused. The request that claims the lock has `ttl_ms` and `hold_at_least_ms`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "names": ["reports/nightly"], "wait_ms": 600000, "callback_url": "https://hooks.example.com/locks" })))]
pub struct DeferBody {
    /// From 1 to 32 names, each of them once. One name stands for the lock of `POST /locks/{name}`.
    /// Several names stand for the set of `POST /locks`, in any order.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>, required = true, min_items = 1, max_items = 32))]
    pub names: Value,
    /// How long to wait while the lock is held, in milliseconds, up to one hour (3600000). Without
    /// it the request waits one hour.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 0, maximum = 3600000, example = 600000))]
    pub wait_ms: Option<Value>,
    /// How early the request is served while it waits: from 0 to 9, and 9 is served first. Without
    /// it the priority is 5.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 0, maximum = 9, example = 5))]
    pub priority: Option<Value>,
    /// As in `POST /locks/{name}`. Only with one name.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false, example = "all"))]
    pub queue: Option<Value>,
    /// As in `POST /locks/{name}`. Only with one name.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 1, maximum = 256, example = 4))]
    pub slots: Option<Value>,
    /// As in `POST /locks/{name}`. Only with one name.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 1, maximum = 256, example = 1))]
    pub take: Option<Value>,
    /// As for a single lock.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false, max_length = 255, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$", example = "nightly-report on host-7"))]
    pub owner: Option<Value>,
    /// As for a single lock. Stored beside each of the locks.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = std::collections::BTreeMap<String, String>, required = false))]
    pub metadata: Option<Value>,
    /// The URL that the gateway calls when the lock is ready. Needs a key with the `callback`
    /// permission, and an origin that the operator allows. At most 2048 bytes.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false, max_length = 2048, example = "https://hooks.example.com/locks"))]
    pub callback_url: Option<Value>,
}

/// The state of a deferred request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({
    "id": "3f0c9a51b7e24d68a1c5e0b9d2f47a86", "state": "waiting", "names": ["reports/nightly"], "position": 3
})))]
pub struct RequestStatus {
    /// The id of the request, as in the path `/requests/{id}`.
    pub id: String,
    /// `waiting`; `ready`: claim the lock now; `claimed`; `expired`: the lock was not claimed in
    /// time; `cancelled`; `refused`: see `problem`. Other states may be added.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub state: RequestState,
    /// The names of the requested locks: several only for a set.
    pub names: Vec<String>,
    /// While `waiting`: the place in this gateway's queue; 1 is served next. May be absent while the
    /// request starts, or moves to the next lock of its set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub position: Option<u64>,
    /// While `ready`: how long the lock may still be claimed, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub claim_within_ms: Option<u64>,
    /// `delivered`, or `failed` if no attempt has succeeded so far. Absent without `callback_url`,
    /// and until the first attempt ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub callback: Option<CallbackState>,
    /// Why the request was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Problem, required = false))]
    pub problem: Option<Problem>,
}

/// The state of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestState {
    /// The request waits for the lock.
    Waiting,
    /// The lock is held for the request. Its sender has to claim it.
    Ready,
    /// The sender has claimed the lock at this gateway.
    Claimed,
    /// The lock was not claimed in time.
    Expired,
    /// The sender gave the request up.
    Cancelled,
    /// The gateway refused the request.
    Refused,
    /// A state that this version does not know.
    #[serde(other)]
    Other,
}

/// Whether a callback was received.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CallbackState {
    /// The receiver answered with a status from 200 to 299.
    Delivered,
    /// No attempt so far has succeeded.
    Failed,
    /// A state that this version does not know.
    #[serde(other)]
    Other,
}

/// The body of a callback, in the form of Standard Webhooks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({
    "type": "lock.ready", "timestamp": "2025-11-21T11:39:25.123Z",
    "data": { "id": "3f0c9a51b7e24d68a1c5e0b9d2f47a86", "names": ["reports/nightly"], "claim_within_ms": 9890 }
})))]
pub struct LockReady {
    /// `lock.ready`.
    #[serde(rename = "type")]
    pub kind: String,
    /// When the lock was granted, by the gateway's wall clock, RFC 3339.
    pub timestamp: String,
    /// What is ready.
    pub data: LockReadyData,
}

/// See [`LockReady`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "id": "3f0c9a51b7e24d68a1c5e0b9d2f47a86", "names": ["reports/nightly"], "claim_within_ms": 9890 })))]
pub struct LockReadyData {
    /// The id of the request.
    pub id: String,
    /// The names of the requested locks: several only for a set.
    pub names: Vec<String>,
    /// How long the lock may be claimed, in milliseconds from the moment when this was sent.
    #[cfg_attr(feature = "openapi", schema(format = "int64"))]
    pub claim_within_ms: u64,
}
