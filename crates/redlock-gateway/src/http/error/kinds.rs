//! The table of errors: status, code, title, and an example of a detail.

use http::StatusCode as S;
use redlock_api::ProblemCode;

use crate::remedy::section;

/// A kind of error.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProblemKind {
    pub(super) status: S,
    pub(super) code: ProblemCode,
    pub(super) title: &'static str,
    /// The usual detail, or an example if the detail has values of the request.
    pub(super) detail: &'static str,
}

/// Builds the table.
macro_rules! kinds {
    ($($name:ident: $status:ident, $code:ident, $title:literal, $detail:literal;)+) => {
        $(pub(crate) const $name: ProblemKind = ProblemKind {
            status: S::$status, code: ProblemCode::$code, title: $title, detail: $detail,
        };)+

        pub(super) const ALL: &[ProblemKind] = &[$($name),+];
    };
}

kinds! {
    INVALID_NAME: BAD_REQUEST, InvalidName, "Invalid lock name", "the name has ' ' at byte 3; allowed are 1 to 255 bytes of [A-Za-z0-9._:@/+~-]";
    INVALID_TTL: BAD_REQUEST, InvalidTtl, "Invalid TTL", "ttl_ms is 5; allowed are whole milliseconds from 10 to 300000";
    INVALID_WAIT: BAD_REQUEST, InvalidWait, "Invalid waiting time", "wait_ms is 60000; allowed are whole milliseconds from 0 to 25000";
    INVALID_BODY: BAD_REQUEST, InvalidBody, "Invalid request body", "unknown field `ttl`; allowed are `ttl_ms`, `wait_ms`, `priority`, `queue`, `slots`, `take`, `hold_at_least_ms`, `owner`, `metadata` at line 1 column 6";
    INVALID_PARAMETER: BAD_REQUEST, InvalidParameter, "Invalid header or query parameter", "Idempotency-Key has 5 bytes; allowed are 16 to 255 visible ASCII characters";
    INVALID_CALLBACK: BAD_REQUEST, InvalidCallback, "Invalid callback", "callback_url: its origin is not allowed; allowed are https://hooks.example.com";
    MISSING_TOKEN: BAD_REQUEST, MissingToken, "Missing lock token", "the Lock-Token header is missing; send the token from the answer to the POST";
    INVALID_TOKEN: BAD_REQUEST, InvalidToken, "Invalid lock token", "the Lock-Token header is not a token of this service; send the token from the answer to the POST, alone or between < and >";
    UNAUTHENTICATED: UNAUTHORIZED, Unauthenticated, "Not authenticated", "no API key was sent; send Authorization: Bearer KEY, or Basic with the key's name and the key";
    FORBIDDEN: FORBIDDEN, Forbidden, "Not allowed", "the API key \"ci\" may not do this: its entry in the keys file needs \"acquire\" in `verbs`, and a pattern in `names` that matches the name of the lock";
    NOT_FOUND: NOT_FOUND, NotFound, "No such path", "there is no such path; /docs and /openapi.json list the paths";
    LOCK_NOT_FOUND: NOT_FOUND, LockNotFound, "Lock not found", "this grant is not held: it was released, has expired, or was never made";
    REQUEST_NOT_FOUND: NOT_FOUND, RequestNotFound, "Request not found", "this client has no such request at this gateway: the request may have ended, may be at another gateway, or was lost in a restart; repeat POST /requests with the same Idempotency-Key";
    METHOD_NOT_ALLOWED: METHOD_NOT_ALLOWED, MethodNotAllowed, "Method not allowed", "this path does not have this method; the header Allow lists its methods";
    REQUEST_TIMEOUT: REQUEST_TIMEOUT, RequestTimeout, "Request timed out", "the request body did not arrive within 10s";
    LOCK_HELD: CONFLICT, LockHeld, "The lock is held", "\"nightly-report on host-7\" has held it since 2025-11-21T11:39:25.123Z; it may expire in 21400 ms; this request is 3rd in line, and its place is kept for 10s";
    SUPERSEDED: CONFLICT, Superseded, "A newer request waits instead", "a newer request with \"queue\": \"newest\" waits for this lock, and only the newest waits; leave the work to that request, and do not try again";
    NOT_HOLDER: CONFLICT, NotHolder, "Not the holder", "this token or Idempotency-Key does not hold the lock; \"nightly-report on host-7\" has held it since 2025-11-21T11:39:25.123Z; it may expire in 21400 ms";
    MAX_HOLD_REACHED: CONFLICT, MaxHoldReached, "The lock has been held for too long", "the lock was granted 24h 3s ago, and a lock may be held for 24h (--max-hold, or max_hold of the API key); release it, then acquire it again";
    BODY_TOO_LARGE: PAYLOAD_TOO_LARGE, BodyTooLarge, "Request body too large", "the request body is larger than 16384 bytes";
    UNSUPPORTED_MEDIA_TYPE: UNSUPPORTED_MEDIA_TYPE, UnsupportedMediaType, "Unsupported media type", "the content type is missing; send application/json (curl: -H 'content-type: application/json' -d '{…}', or --json since 7.82)";
    MISDIRECTED_REQUEST: MISDIRECTED_REQUEST, MisdirectedRequest, "Not a host of this service", "the host of this request is not a name of this gateway; use one of its names, or have the operator add the name with --allowed-host";
    TOO_MANY_WAITERS: TOO_MANY_REQUESTS, TooManyWaiters, "Too many waiters", "10000 requests are waiting for locks here, as many as are allowed (--max-waiters); try again later, or without wait_ms; this client counts as the key \"ci\"";
    RATE_LIMITED: TOO_MANY_REQUESTS, RateLimited, "Too many requests", "the API key has used up its rate of requests (`rate` and `burst` in the keys file); wait for retry_after_ms; this client counts as the key \"ci\"";
    QUOTA_EXCEEDED: TOO_MANY_REQUESTS, QuotaExceeded, "Quota exceeded", "the masters' memory is short: this client's locks take about 43.1 MiB; allowed is 19.8 MiB; release locks, or try again when some have ended; the operator can raise the limit with more maxmemory on the masters, or with --master-memory where maxmemory is not set; this client counts as the key \"ci\"";
    INTERNAL: INTERNAL_SERVER_ERROR, InternalError, "Internal error", "the gateway failed by a defect of its own; look for this request_id in its log, and report what stands there";
    NO_QUORUM: SERVICE_UNAVAILABLE, QuorumUnavailable, "No quorum", "no majority of the masters voted in time; nothing was granted, and any partial lock on the masters is being removed; try again";
    OUTCOME_UNKNOWN: SERVICE_UNAVAILABLE, OutcomeUnknown, "The outcome is unknown", "too few masters answered to tell whether this was done; the deadline of an earlier answer still stands; try again";
    DRAINING: SERVICE_UNAVAILABLE, Draining, "Shutting down", "this gateway is shutting down and grants no further locks; send the request to another gateway";
    AUDIT_UNAVAILABLE: SERVICE_UNAVAILABLE, AuditUnavailable, "The audit log cannot be written", "nothing was done: the audit log cannot be written, and this gateway changes no lock without a record; try again, or at another gateway";
    OVERLOADED: SERVICE_UNAVAILABLE, Overloaded, "Too many requests in flight", "too many requests are in flight: all clients together have reached --max-in-flight, or this client has reached its own limit; wait for retry_after_ms; this client counts as the key \"ci\"";
}

impl ProblemKind {
    /// The section of the operators' documentation about this error, if an operator can mend the
    /// cause.
    pub(super) fn runbook(self) -> Option<&'static str> {
        use ProblemCode as C;
        match self.code {
            C::QuorumUnavailable | C::OutcomeUnknown => Some(section::QUORUM_LOST),
            C::QuotaExceeded => Some(section::MASTER_MEMORY),
            C::Overloaded => Some(section::LIMIT_IS_NEAR),
            C::AuditUnavailable => Some(section::AUDIT_LOG),
            C::Draining => Some(section::DRAINING),
            _ => None,
        }
    }
}

/// The error for a client that has gone away. Nobody receives it, but log and metrics show it.
pub(crate) const ABANDONED: ProblemKind = ProblemKind {
    title: "Request abandoned",
    detail: "the client closed the connection while it waited",
    ..REQUEST_TIMEOUT
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_operators_can_mend_name_a_section() {
        for kind in ALL {
            let is_operators =
                kind.status == S::SERVICE_UNAVAILABLE || kind.code == ProblemCode::QuotaExceeded;
            assert_eq!(kind.runbook().is_some(), is_operators, "{kind:?}");
        }
    }

    #[test]
    fn every_code_has_one_row_in_the_table() {
        let codes: Vec<_> = ALL.iter().map(|kind| kind.code).collect();
        assert_eq!(codes, ProblemCode::ALL);
    }
}
