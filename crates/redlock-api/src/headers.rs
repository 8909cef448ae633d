//! Names of headers that only this service uses, or that its clients send by hand.

use http::HeaderName;

/// The token of a held lock: in the answer to an acquire, and in requests to extend and release.
pub static LOCK_TOKEN: HeaderName = HeaderName::from_static("lock-token");
/// Makes an acquire repeatable, and releases the lock of an acquire without an answer.
pub static IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// `true` when an earlier request with the same `Idempotency-Key` was granted the lock.
pub static IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// `wait=SECONDS`, an alias of `wait_ms` (RFC 7240).
pub static PREFER: HeaderName = HeaderName::from_static("prefer");
/// The preference of `Prefer` that was followed.
pub static PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");
/// The id of a request, as in the gateway's log.
pub static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The id of a callback, the same for each attempt (Standard Webhooks).
pub static WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
/// When the callback was sent, in seconds since 1970.
pub static WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
/// The signatures of the callback, one for each secret in use.
pub static WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");
