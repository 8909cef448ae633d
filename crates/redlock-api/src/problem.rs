//! The body of every error: one flat `application/problem+json` object (RFC 9457), so that generated
//! clients need one type.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::locks::{HeldLock, NodeAnswer, SlotHolder};

/// The content type of every error body.
pub const PROBLEM_MEDIA_TYPE: &str = "application/problem+json";

/// An error, as in RFC 9457. Programs use `code`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(examples(json!({
    "type": "urn:redlock:problem:lock_held", "title": "The lock is held", "status": 409, "code": "lock_held",
    "detail": "\"nightly-report on host-7\" has held it since 2025-11-21T11:39:25.123Z; it may expire in 21400 ms; this request is 3rd in line, and its place is kept for 10s",
    "request_id": "5f2b7c0e9a3d4418", "retry_after_ms": 5000, "holder": "nightly-report on host-7", "expires_in_ms": 21400,
    "acquired_at": "2025-11-21T11:39:25.123Z", "queue_position": 3, "queue_place_expires_ms": 10000
}), json!({
    "type": "urn:redlock:problem:lock_held", "title": "The lock is held", "status": 409, "code": "lock_held",
    "detail": "1 slot is wanted, none is free; enough may be free in 21400 ms",
    "request_id": "5f2b7c0e9a3d4418", "retry_after_ms": 5000, "holder": "build 4711", "expires_in_ms": 21400,
    "acquired_at": "2025-11-21T11:39:25.123Z", "holders": [
        { "slot": 1, "holder": "build 4711", "expires_in_ms": 21400, "acquired_at": "2025-11-21T11:39:25.123Z" },
        { "slot": 2, "holder": "build 4713", "expires_in_ms": 28700, "acquired_at": "2025-11-21T11:39:32.423Z" },
        { "slot": 3, "holder": "build 4711", "expires_in_ms": 21400, "acquired_at": "2025-11-21T11:39:25.123Z" },
        { "slot": 4, "holder": "build 4712", "expires_in_ms": 25100, "acquired_at": "2025-11-21T11:39:28.823Z" }
    ]
}))))]
pub struct Problem {
    /// The URI of the kind of error.
    #[serde(rename = "type", default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub kind: String,
    /// The kind of error, for people.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// The kind of error, for programs.
    pub code: String,
    /// What happened this time, with the value and what is allowed.
    pub detail: String,
    /// The `x-request-id` of this answer, as in the gateway's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub request_id: Option<String>,
    /// Time after which a retry makes sense, in milliseconds. `Retry-After` has it in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub retry_after_ms: Option<u64>,
    /// The holder's label.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub holder: Option<String>,
    /// Milliseconds until the holder's lock expires unless it is extended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub expires_in_ms: Option<u64>,
    /// When the holder acquired the lock, by the wall clock of its gateway, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime, required = false))]
    pub acquired_at: Option<String>,
    /// The place of a request with `wait_ms` in this gateway's line for the lock: 1 is served next.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub queue_position: Option<u64>,
    /// How long this gateway keeps the place, in milliseconds from now. A repeated request with the
    /// same `Idempotency-Key` and `wait_ms` takes the place up again. Absent when no place is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = u64, format = "int64", required = false))]
    pub queue_place_expires_ms: Option<u64>,
    /// The lock of a set that is held. Others may be held too.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<HeldLock>, required = false))]
    pub held: Option<Vec<HeldLock>>,
    /// The holders of the slots that are taken, in the order of the slots.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<SlotHolder>, required = false))]
    pub holders: Option<Vec<SlotHolder>>,
    /// The answer of each node.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<NodeAnswer>, required = false))]
    pub nodes: Option<Vec<NodeAnswer>>,
    /// Advice for operators: the address of a section of the gateway's documentation, absolute or
    /// relative to the gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false, example = "/docs/symptoms#quorum-lost"))]
    pub runbook: Option<Cow<'static, str>>,
}

impl Problem {
    /// The code, if this version knows it. A newer gateway may have more codes.
    pub fn known_code(&self) -> Option<ProblemCode> {
        ProblemCode::ALL.iter().copied().find(|code| code.as_str() == self.code)
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.code, self.status, self.detail)
    }
}

macro_rules! codes {
    ($($name:ident = $text:literal),+ $(,)?) => {
        /// The codes of errors. The gateway's table of errors has the status and the title of each.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum ProblemCode {
            $($name),+
        }

        impl ProblemCode {
            pub const ALL: &[Self] = &[$(Self::$name),+];

            /// The code as it is on the wire.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$name => $text),+
                }
            }
        }
    };
}

codes! {
    InvalidName = "invalid_name",
    InvalidTtl = "invalid_ttl",
    InvalidWait = "invalid_wait",
    InvalidBody = "invalid_body",
    InvalidParameter = "invalid_parameter",
    InvalidCallback = "invalid_callback",
    MissingToken = "missing_token",
    InvalidToken = "invalid_token",
    Unauthenticated = "unauthenticated",
    Forbidden = "forbidden",
    NotFound = "not_found",
    LockNotFound = "lock_not_found",
    RequestNotFound = "request_not_found",
    MethodNotAllowed = "method_not_allowed",
    RequestTimeout = "request_timeout",
    LockHeld = "lock_held",
    Superseded = "superseded",
    NotHolder = "not_holder",
    MaxHoldReached = "max_hold_reached",
    BodyTooLarge = "body_too_large",
    UnsupportedMediaType = "unsupported_media_type",
    MisdirectedRequest = "misdirected_request",
    TooManyWaiters = "too_many_waiters",
    RateLimited = "rate_limited",
    QuotaExceeded = "quota_exceeded",
    InternalError = "internal_error",
    QuorumUnavailable = "quorum_unavailable",
    OutcomeUnknown = "outcome_unknown",
    Draining = "draining",
    AuditUnavailable = "audit_unavailable",
    Overloaded = "overloaded",
}

impl fmt::Display for ProblemCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
