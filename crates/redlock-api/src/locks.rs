//! Bodies about locks.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// What to acquire. Every field may be omitted; unknown fields are refused.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "ttl_ms": 30000, "owner": "nightly-report on host-7" })))]
pub struct AcquireBody {
    /// How long the lock lives without an extension, in milliseconds: from 10 to the configured
    /// maximum (300000 by default). Without it the configured default applies (30000).
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 10, maximum = 86400000, example = 30000))]
    pub ttl_ms: Option<Value>,
    /// How long to wait while the lock is held, in milliseconds, up to the configured
    /// maximum (25000 by default). One gateway serves the waiters of a lock by `priority`, then in
    /// order of arrival. A repeated request with the same `Idempotency-Key` keeps its place in that
    /// order.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 0, maximum = 86400000, example = 10000))]
    pub wait_ms: Option<Value>,
    /// How early a request with `wait_ms` is served: from 0 to 9, and 9 is served first. Without
    /// it the priority is 5. Requests with a higher priority may pass a lower one until its wait
    /// ends.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 0, maximum = 9, example = 5))]
    pub priority: Option<Value>,
    /// `all`, the default: every request with `wait_ms` waits. `newest`: of the requests with
    /// `newest`, only the newest waits. When it begins to wait, the older ones that wait for the
    /// same lock are answered 409 `superseded`: at once at the same gateway, and usually within a
    /// second at other gateways.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false, example = "all"))]
    pub queue: Option<Value>,
    /// How many may hold the lock at once: from 1 to 256. Every request for a lock should give the
    /// same number: the largest one in use is the bound. Without it, the lock has one holder.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 1, maximum = 256, example = 4))]
    pub slots: Option<Value>,
    /// How many of the slots the request takes, all or none: from 1 to `slots`. Without it, 1.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 1, maximum = 256, example = 1))]
    pub take: Option<Value>,
    /// How long the lock is kept from its grant on, in milliseconds, although it is released
    /// earlier: up to the configured maximum of `ttl_ms`. A release before then ends your rights,
    /// and nobody gets the lock until then. So a job runs once although the clocks of its hosts
    /// differ. Without a release, the lock ends with its TTL as ever.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 0, maximum = 86400000, example = 60000))]
    pub hold_at_least_ms: Option<Value>,
    /// A label for people, shown to anybody who asks who holds the lock. At most 255 characters,
    /// without control characters, line separators, bidirectional controls and invisible characters.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false, max_length = 255, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$", example = "nightly-report on host-7"))]
    pub owner: Option<Value>,
    /// Stored beside the lock for people. Strings only; keys and values together have at most 1024
    /// bytes, without the control characters U+007F to U+009F, line separators (U+2028, U+2029),
    /// bidirectional controls and invisible characters.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = BTreeMap<String, String>, required = false))]
    pub metadata: Option<Value>,
}

/// Which locks to acquire together. Every field but `names` may be omitted; unknown fields are
/// refused.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "names": ["env/staging", "env/production"], "ttl_ms": 30000, "owner": "deploy 4711" })))]
pub struct AcquireSetBody {
    /// From 1 to 32 names, each of them once. The order decides nothing.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>, required = true, min_items = 1, max_items = 32))]
    pub names: Value,
    /// How long the locks live without an extension, in milliseconds: from 10 to the configured
    /// maximum (300000 by default). Without it the configured default applies (30000).
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 10, maximum = 86400000, example = 30000))]
    pub ttl_ms: Option<Value>,
    /// How long to wait while one of the locks is held, in milliseconds, up to the configured
    /// maximum (25000 by default).
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 0, maximum = 86400000, example = 10000))]
    pub wait_ms: Option<Value>,
    /// How early the request is served while it waits: from 0 to 9, and 9 is served first. Without
    /// it the priority is 5.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 0, maximum = 9, example = 5))]
    pub priority: Option<Value>,
    /// As for a single lock, for each of the locks.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 0, maximum = 86400000, example = 60000))]
    pub hold_at_least_ms: Option<Value>,
    /// As for a single lock.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false, max_length = 255, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$", example = "deploy 4711"))]
    pub owner: Option<Value>,
    /// As for a single lock. Stored beside each of the locks.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = BTreeMap<String, String>, required = false))]
    pub metadata: Option<Value>,
}

/// A granted set of locks: one token and one fencing token for all of them.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({
    "names": ["env/staging", "env/production"], "token": "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "fencing_token": 1763725165123456u64, "ttl_ms": 30000, "validity_ms": 29696, "elapsed_ms": 1,
    "expires_at": "2025-11-21T11:39:54.822Z", "owner": "deploy 4711", "nodes_granted": 3, "nodes_total": 5
})))]
pub struct SetLease {
    /// The names, in the order of the request.
    pub names: Vec<String>,
    /// The secret to send as `Lock-Token` to extend or release each of the locks.
    pub token: String,
    /// Larger than the fencing token of every earlier grant of each of the locks. Below 2^53.
    #[cfg_attr(feature = "openapi", schema(format = "int64"))]
    pub fencing_token: u64,
    /// The TTL that was granted, in milliseconds.
    pub ttl_ms: u32,
    /// A time in milliseconds. The client may trust all locks until *sent* + `elapsed_ms` +
    /// `validity_ms`. *sent* is when it sent the request, by a monotonic clock.
    pub validity_ms: u32,
    /// Time in the gateway from the request until `validity_ms` was computed, in milliseconds,
    /// waiting included.
    #[cfg_attr(feature = "openapi", schema(format = "int64"))]
    pub elapsed_ms: u64,
    /// When the validity ends by the gateway's wall clock, RFC 3339. For people; programs count
    /// `validity_ms`.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub expires_at: String,
    /// The label from the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub owner: Option<String>,
    /// Number of nodes that had agreed when the set was decided.
    pub nodes_granted: u32,
    /// Number of configured nodes.
    pub nodes_total: u32,
}

/// Leaves out the token, which is a secret.
impl fmt::Debug for SetLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SetLease")
            .field("names", &self.names)
            .field("fencing_token", &self.fencing_token)
            .field("validity_ms", &self.validity_ms)
            .finish_non_exhaustive()
    }
}

/// The part of a [`Lease`] or a [`SetLease`] that a client needs for its work.
#[derive(Clone, Deserialize)]
pub struct Granted {
    /// The secret to send as `Lock-Token`.
    pub token: String,
    /// As in the lease.
    pub fencing_token: u64,
    /// As in the lease.
    pub validity_ms: u32,
    /// As in the lease.
    pub elapsed_ms: u64,
    /// Which slots of the lock are held. `None` for a lock without slots, and for a set.
    pub slots_held: Option<Vec<u32>>,
}

/// The holder of one slot of a lock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "slot": 3, "holder": "build 4711", "expires_in_ms": 21400, "acquired_at": "2025-11-21T11:39:25.123Z" })))]
pub struct SlotHolder {
    /// The slot's number, from 1.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 256))]
    pub slot: u32,
    /// The holder's label.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub holder: Option<String>,
    /// The holder's fencing token. Absent in the answer to a refused `POST`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub fencing_token: Option<u64>,
    /// Milliseconds until the slot is free unless it is extended or released.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub expires_in_ms: Option<u64>,
    /// When the slot was acquired, by the wall clock of the acquiring gateway, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime, required = false))]
    pub acquired_at: Option<String>,
}

/// A held lock that kept a set from being granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "name": "env/production", "holder": "deploy 4710", "expires_in_ms": 21400 })))]
pub struct HeldLock {
    /// The lock's name.
    pub name: String,
    /// The holder's label.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub holder: Option<String>,
    /// Milliseconds until the holder's lock expires unless it is extended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub expires_in_ms: Option<u64>,
}

/// The results of a release of a set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "results": [
    { "name": "env/staging", "status": 204 },
    { "name": "env/production", "status": 404, "code": "lock_not_found", "detail": "this grant is not held: it was released, has expired, or was never made" }
] })))]
pub struct ReleaseSetResults {
    /// One result for each name, in the order of the request.
    pub results: Vec<ReleaseResult>,
}

/// The result for one name. It has the status and the code that `DELETE /locks/{name}` would have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "name": "env/staging", "status": 204 })))]
pub struct ReleaseResult {
    /// The lock's name.
    pub name: String,
    /// 204: released.
    pub status: u16,
    /// The kind of error, for programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub code: Option<String>,
    /// What happened, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub detail: Option<String>,
    /// Time after which a retry makes sense, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub retry_after_ms: Option<u64>,
}

/// How long to extend. Unknown fields are refused.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "ttl_ms": 30000 })))]
pub struct ExtendBody {
    /// The lock lives at least this many milliseconds from now; it is never shortened. From 10 to
    /// the configured maximum. Without it the configured default applies (30000).
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 10, maximum = 86400000, example = 30000))]
    pub ttl_ms: Option<Value>,
}

/// Leases to extend, all with the same TTL. Unknown fields are refused.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({
    "leases": [{ "name": "reports/nightly", "token": "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b" }], "ttl_ms": 30000
})))]
pub struct ExtendManyBody {
    /// From 1 to 1000 leases. One failed lease does not stop the others.
    #[serde(default, deserialize_with = "leases")]
    #[cfg_attr(feature = "openapi", schema(required = true, min_items = 1, max_items = 1000))]
    pub leases: Vec<LeaseRef>,
    /// Each lock lives at least this many milliseconds from now; it is never shortened. From 10 to
    /// the configured maximum. Without it the configured default applies (30000).
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 10, maximum = 86400000, example = 30000))]
    pub ttl_ms: Option<Value>,
}

/// Leaves out the tokens, which are secrets.
impl fmt::Debug for ExtendManyBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExtendManyBody")
            .field("leases", &self.leases.len())
            .field("ttl_ms", &self.ttl_ms)
            .finish()
    }
}

/// Reads the leases. The errors quote no text, because a text may be a token.
fn leases<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<LeaseRef>, D::Error> {
    const FORM: &str = r#"such as {"leases": [{"name": "a", "token": "1.…"}]}"#;

    struct Leases;

    impl<'de> Visitor<'de> for Leases {
        type Value = Vec<LeaseRef>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "leases to be a list, {FORM},")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
            let mut leases = Vec::new();
            loop {
                let malformed = |_| {
                    let index = leases.len();
                    let rule = "must have the texts name and token and nothing else, as valid JSON";
                    A::Error::custom(format_args!("leases[{index}] {rule}, {FORM},"))
                };
                match list.next_element::<Entry>().map_err(malformed)? {
                    Some(Entry(lease)) => leases.push(lease),
                    None => return Ok(leases),
                }
            }
        }

        fn visit_str<E: Error>(self, _: &str) -> Result<Self::Value, E> {
            Err(E::custom(format_args!("leases must be a list, {FORM},")))
        }
    }

    /// A lease. A derived `Deserialize` would also accept a list with the two texts.
    struct Entry(LeaseRef);

    impl<'de> Deserialize<'de> for Entry {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct Fields;

            impl<'de> Visitor<'de> for Fields {
                type Value = LeaseRef;

                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("a lease")
                }

                fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LeaseRef, A::Error> {
                    LeaseRef::deserialize(MapAccessDeserializer::new(map))
                }
            }

            deserializer.deserialize_map(Fields).map(Self)
        }
    }

    deserializer.deserialize_any(Leases)
}

/// A lock and the token that acquiring it returned.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({
    "name": "reports/nightly", "token": "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"
})))]
pub struct LeaseRef {
    /// The lock's name.
    pub name: String,
    /// The token that acquiring the lock returned.
    pub token: String,
}

/// Leaves out the token, which is a secret.
impl fmt::Debug for LeaseRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRef").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The results of a request that extends many locks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "results": [
    { "name": "reports/nightly", "status": 200, "validity_ms": 29696, "elapsed_ms": 2 },
    { "name": "reports/weekly", "status": 404, "code": "lock_not_found", "detail": "this grant is not held: it was released, has expired, or was never made", "elapsed_ms": 2 }
] })))]
pub struct ExtendManyResults {
    /// One result for each lease, in the order of the request.
    pub results: Vec<ExtendResult>,
}

/// The result for one lease. It has the status and the code that `PATCH /locks/{name}` would have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "name": "reports/nightly", "status": 200, "validity_ms": 29696, "elapsed_ms": 2 })))]
pub struct ExtendResult {
    /// The name from the request. Empty if the name contained a secret.
    pub name: String,
    /// 200: extended. 404 `lock_not_found`, 409 `not_holder`: stop the work. Otherwise the earlier
    /// deadline stands: try again.
    pub status: u16,
    /// The kind of error, for programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub code: Option<String>,
    /// What happened, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub detail: Option<String>,
    /// The holder's label, with `not_holder`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub holder: Option<String>,
    /// Time after which a retry makes sense, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub retry_after_ms: Option<u64>,
    /// Only with status 200. A time in milliseconds. The client may trust the lock until *sent* +
    /// `elapsed_ms` + `validity_ms`. *sent* is when it sent the request, by a monotonic clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false))]
    pub validity_ms: Option<u32>,
    /// Only with status 200: how many requests wait for the lock at this gateway, as in the answer
    /// to a `PATCH` of the lock alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub waiters: Option<u64>,
    /// Time in the gateway from the request until this lease was decided, in milliseconds.
    #[cfg_attr(feature = "openapi", schema(format = "int64"))]
    pub elapsed_ms: u64,
}

/// Keeps an explicit null as a value, to be refused: `"ttl_ms": null` must not silently give the
/// default.
pub(crate) fn present<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// A granted or extended lock.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({
    "name": "reports/nightly", "token": "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "fencing_token": 1763725165123456u64, "ttl_ms": 30000, "validity_ms": 29696, "elapsed_ms": 1,
    "expires_at": "2025-11-21T11:39:54.822Z", "owner": "nightly-report on host-7", "nodes_granted": 3, "nodes_total": 5
})))]
pub struct Lease {
    /// The lock's name.
    pub name: String,
    /// The secret to send as `Lock-Token` to extend or release.
    pub token: String,
    /// Larger than the fencing token of every earlier grant of this lock. Send it to the resource
    /// with every write. The resource must refuse a token that is smaller than one it has seen.
    /// Below 2^53.
    #[cfg_attr(feature = "openapi", schema(format = "int64"))]
    pub fencing_token: u64,
    /// The TTL that was granted, in milliseconds.
    pub ttl_ms: u32,
    /// A time in milliseconds. The client may trust the lock until *sent* + `elapsed_ms` +
    /// `validity_ms`. *sent* is when it sent the request, by a monotonic clock. An extension for less
    /// than the time left keeps that time: `validity_ms` is then more than `ttl_ms`.
    pub validity_ms: u32,
    /// Time in the gateway from the request until `validity_ms` was computed, in milliseconds,
    /// waiting included.
    #[cfg_attr(feature = "openapi", schema(format = "int64"))]
    pub elapsed_ms: u64,
    /// When the validity ends by the gateway's wall clock, RFC 3339. For people; programs count
    /// `validity_ms`.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub expires_at: String,
    /// The label from the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub owner: Option<String>,
    /// Number of nodes that had agreed when the lock was decided.
    pub nodes_granted: u32,
    /// Number of configured nodes.
    pub nodes_total: u32,
    /// Only in the answer to `PATCH`: how many wait for this lock at this gateway, so that a holder
    /// may release it early.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub waiters: Option<u64>,
    /// Only in the answer to a `POST` with `slots`: that number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 1, maximum = 256))]
    pub slots: Option<u32>,
    /// Which slots of the lock are held. Absent for a lock without slots, and in the answer to a
    /// `PATCH` for slot 1 alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<u32>, required = false))]
    pub slots_held: Option<Vec<u32>>,
}

/// Leaves out the token, which is a secret.
impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", &self.name)
            .field("fencing_token", &self.fencing_token)
            .field("validity_ms", &self.validity_ms)
            .finish_non_exhaustive()
    }
}

/// A lock as a majority of the nodes sees it. Never the token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({
    "name": "reports/nightly", "state": "held", "owner": "nightly-report on host-7", "metadata": { "run": "4711" },
    "fencing_token": 1763725165123456u64, "expires_in_ms": 21400, "acquired_at": "2025-11-21T11:39:25.123Z",
    "nodes": [{ "node": "10.0.0.1:6379", "state": "held" }],
    "waiters": [{ "owner": "hourly-report on host-3", "waiting_since": "2025-11-21T11:39:31.456Z", "is_away": false }],
    "waiters_total": 1
})))]
pub struct LockStatus {
    /// The lock's name.
    pub name: String,
    /// Held by a majority; free: nobody can have a majority; unknown: too few nodes answered.
    pub state: LockState,
    /// The holder's label.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub owner: Option<String>,
    /// The holder's metadata.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub metadata: BTreeMap<String, String>,
    /// The name of the API key that acquired the lock. Absent where there are no keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub key: Option<String>,
    /// The holder's fencing token. Absent when another Redlock client holds the lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub fencing_token: Option<u64>,
    /// Time until the majority's lock ends unless it is extended. Absent when it has no expiry.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub expires_in_ms: Option<u64>,
    /// When the lock was acquired, by the wall clock of the acquiring gateway, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime, required = false))]
    pub acquired_at: Option<String>,
    /// In listings: which slot of the lock this is, if it is another one than slot 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 2, maximum = 256))]
    pub slot: Option<u32>,
    /// How many may hold the lock at once: the largest number that a holder has asked for. Absent
    /// when no holder asked for slots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 2, maximum = 256))]
    pub slots: Option<u32>,
    /// The holder of each slot that is held, in the order of the slots. Absent when no holder asked
    /// for slots. The fields of the holder beside this list are those of the first one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub holders: Vec<SlotHolder>,
    /// The slots that may be held: too few nodes answered, or their answers differ. Absent when there
    /// are none, and in listings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub unknown_slots: Vec<u32>,
    /// The answer of each node, about slot 1. Absent in listings.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<NodeAnswer>, required = false))]
    pub nodes: Option<Vec<NodeAnswer>>,
    /// Whether the caller may release the lock by force. False if another client of the masters has
    /// stored it, past this service. Absent in listings and in events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = bool, required = false))]
    pub may_force: Option<bool>,
    /// The first 100 in this gateway's line for the lock, in order. Absent when nobody waits here,
    /// and in listings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = false))]
    pub waiters: Vec<Waiter>,
    /// The length of that line. Absent when nobody waits here. A listing shows it only to a caller
    /// who may inspect the lock, and shows the whole line for each held slot.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub waiters_total: Option<u64>,
}

/// A request that waits for a lock at this gateway.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "owner": "hourly-report on host-3", "waiting_since": "2025-11-21T11:39:31.456Z", "is_away": false })))]
pub struct Waiter {
    /// The label from the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub owner: Option<String>,
    /// When the first request with this `Idempotency-Key` began to wait, by the gateway's wall
    /// clock, RFC 3339.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub waiting_since: String,
    /// Whether the last request has ended and the gateway keeps its place for the next one.
    pub is_away: bool,
    /// The priority from the request. Absent when it is 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u32, required = false, minimum = 0, maximum = 9))]
    pub priority: Option<u8>,
}

/// The majority's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = "held"))]
pub enum LockState {
    Held,
    Free,
    // Also any state of a newer gateway.
    #[serde(other)]
    Unknown,
}

impl LockState {
    /// The state as it is on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Free => "free",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for LockState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One node's part in an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "node": "10.0.0.1:6379", "state": "timeout", "detail": "no answer within 50ms" })))]
pub struct NodeAnswer {
    /// `host:port`. Only a number, `node-1`, for a key without the metrics permission.
    pub node: String,
    /// `agreed`, `refused`, `held`, `free`, `pending` (the answer was not needed), or why there is
    /// no answer: `timeout`, `down`, `quarantined`, `clock` (the clocks are too far apart),
    /// `overloaded`, `error`.
    pub state: String,
    /// A sentence for people. Only for keys with the metrics permission, or where there are no
    /// keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub detail: Option<String>,
}

/// A page of held locks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "locks": [{ "name": "reports/nightly", "state": "held", "expires_in_ms": 21400 }] })))]
pub struct LockList {
    /// Held locks, in no particular order; `unknown` where too few nodes answered. Locks that come
    /// or go during a listing may be missed or repeated.
    pub locks: Vec<LockStatus>,
    /// Send it as `cursor` to get the next page. Absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub next_cursor: Option<String>,
}
