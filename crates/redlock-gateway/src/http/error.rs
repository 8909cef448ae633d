//! The one table from refusals to statuses and codes. No arm is a wildcard: a new refusal breaks the build here.
//!
//! Every error body is one flat `application/problem+json` object (RFC 9457), so that generated clients need one type.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use redlock_core::{HeldBy, LockError, NodeReport};

use super::wire::{NodeAnswerBody, Problem, label_of};
use crate::auth::Stranger;
use crate::config::show;
use crate::gateway::Refusal;

/// What went wrong, as a caller is told.
#[derive(Debug)]
pub enum ApiError {
    InvalidName(String),
    InvalidTtl(String),
    InvalidWait(String),
    InvalidBody(String),
    InvalidParameter(String),
    MissingToken,
    InvalidToken,
    NotFound(String),
    MethodNotAllowed,
    RequestTimeout(Duration),
    BodyTooLarge {
        limit: usize,
    },
    UnsupportedMediaType(String),
    Unauthenticated(Stranger),
    Forbidden(Denial),
    /// For so long.
    RateLimited(Duration),
    Internal,
    /// A refusal in answer to a POST, or to a PATCH or DELETE: the same core error means other things there.
    Acquire(Refusal),
    Holder(Refusal),
}

/// What a caller who is known may not do.
#[derive(Debug)]
pub struct Denial {
    /// The name of its key; `None` where there are no keys.
    pub who: Option<String>,
    pub verb: &'static str,
}

/// Suggested pause when nobody knows better.
const SOON: Duration = Duration::from_secs(1);
/// A holder may release long before its lock expires, so nobody is sent away for longer.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// By how much such pauses differ.
const SPREAD: f64 = 0.1;
const BASIC_CHALLENGE: &str = "Basic realm=\"redlock-gateway\", charset=\"UTF-8\"";

impl ApiError {
    /// What a client without the right key is told to bring: RFC 6750, section 3.
    fn challenge(&self) -> Option<&'static str> {
        if let Self::Unauthenticated(why) = self {
            return Some(match why {
                Stranger::Nobody => "Bearer realm=\"redlock-gateway\"",
                Stranger::Unknown | Stranger::Expired | Stranger::OtherSite => {
                    "Bearer realm=\"redlock-gateway\", error=\"invalid_token\""
                }
            });
        }
        let has_a_key = matches!(self, Self::Forbidden(Denial { who: Some(_), .. }));
        has_a_key.then_some("Bearer realm=\"redlock-gateway\", error=\"insufficient_scope\"")
    }

    pub fn problem(self) -> Problem {
        use StatusCode as S;
        let new = Problem::new;
        match self {
            Self::InvalidName(detail) => new(S::BAD_REQUEST, "invalid_name", "Invalid lock name", detail),
            Self::InvalidTtl(detail) => new(S::BAD_REQUEST, "invalid_ttl", "Invalid TTL", detail),
            Self::InvalidWait(detail) => new(S::BAD_REQUEST, "invalid_wait", "Invalid waiting time", detail),
            Self::InvalidBody(detail) => new(S::BAD_REQUEST, "invalid_body", "Invalid request body", detail),
            Self::InvalidParameter(detail) => {
                new(S::BAD_REQUEST, "invalid_parameter", "Invalid header or query parameter", detail)
            }
            Self::MissingToken => {
                let detail = "the Lock-Token header is missing; send the token that acquiring the lock returned";
                new(S::BAD_REQUEST, "missing_token", "Missing lock token", detail.into())
            }
            Self::InvalidToken => {
                let detail = "the Lock-Token header holds no token of this service; send it exactly as it was returned, \
                              bare or as <token>";
                new(S::BAD_REQUEST, "invalid_token", "Invalid lock token", detail.into())
            }
            Self::NotFound(detail) => new(S::NOT_FOUND, "not_found", "No such path", detail),
            Self::MethodNotAllowed => {
                let detail = "this path does not take this method; the Allow header lists those it takes";
                new(S::METHOD_NOT_ALLOWED, "method_not_allowed", "Method not allowed", detail.into())
            }
            Self::RequestTimeout(limit) => {
                let detail = format!("the request body did not arrive within {}", show(limit));
                new(S::REQUEST_TIMEOUT, "request_timeout", "Request timed out", detail)
            }
            Self::BodyTooLarge { limit } => {
                let detail = format!("the request body is larger than {limit} bytes");
                new(S::PAYLOAD_TOO_LARGE, "body_too_large", "Request body too large", detail)
            }
            Self::UnsupportedMediaType(found) => {
                let detail = format!("the content type is {found}; send application/json (curl: --json '{{…}}')");
                new(S::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", "Unsupported media type", detail)
            }
            Self::Unauthenticated(why) => {
                let detail = match why {
                    Stranger::Nobody => {
                        "no API key was sent; send Authorization: Bearer KEY, or Basic with the key's name and the key"
                    }
                    Stranger::Unknown => "what was sent is no API key of this service",
                    Stranger::Expired => "the API key has expired",
                    Stranger::OtherSite => {
                        "a page of another site sent this, with a key that the browser has kept; Bearer is taken from there"
                    }
                };
                new(S::UNAUTHORIZED, "unauthenticated", "Not authenticated", detail.into())
            }
            Self::Forbidden(Denial { who: Some(who), verb }) => {
                let detail = format!("the key {who:?} does not have the permission {verb:?} here");
                new(S::FORBIDDEN, "forbidden", "Not allowed", detail)
            }
            Self::Forbidden(Denial { who: None, verb }) => {
                let detail =
                    format!("this takes an API key with the permission {verb:?}, and this service has no keys");
                new(S::FORBIDDEN, "forbidden", "Not allowed", detail)
            }
            Self::RateLimited(pause) => {
                let detail = "the API key has used up its rate of requests";
                new(S::TOO_MANY_REQUESTS, "rate_limited", "Too many requests", detail.into()).retry_after(pause)
            }
            Self::Internal => {
                let detail = "this is a defect of the gateway; its log has more under this request id";
                new(S::INTERNAL_SERVER_ERROR, "internal_error", "Internal error", detail.into())
            }
            Self::Acquire(Refusal::Lock(error)) => acquire_problem(error),
            Self::Holder(Refusal::Lock(error)) => holder_problem(error),
            Self::Acquire(Refusal::MaxHoldReached { held, max })
            | Self::Holder(Refusal::MaxHoldReached { held, max }) => {
                let (held, max) = (show(Duration::from_secs(held.as_secs())), show(max));
                let detail =
                    format!("the lock has been held for {held} and may be for {max}; release and compete again");
                new(S::CONFLICT, "max_hold_reached", "The lock has been held for too long", detail)
            }
            Self::Acquire(Refusal::Draining) | Self::Holder(Refusal::Draining) => {
                let detail = "this replica is shutting down; another one may serve";
                new(S::SERVICE_UNAVAILABLE, "draining", "Shutting down", detail.into()).retry_after(SOON)
            }
            Self::Acquire(Refusal::ClientGone) | Self::Holder(Refusal::ClientGone) => {
                let detail = "the client closed the connection while it waited";
                new(S::REQUEST_TIMEOUT, "request_timeout", "Request abandoned", detail.into())
            }
            Self::Acquire(Refusal::Overloaded { max_in_flight })
            | Self::Holder(Refusal::Overloaded { max_in_flight }) => {
                let detail = format!("{max_in_flight} requests are in flight, as many as are allowed");
                new(S::SERVICE_UNAVAILABLE, "overloaded", "Too many requests in flight", detail).retry_after(SOON)
            }
        }
    }
}

fn acquire_problem(error: LockError) -> Problem {
    match error {
        LockError::Held(by) => {
            held(Problem::new(StatusCode::CONFLICT, "lock_held", "The lock is held", describe(&by)), &by)
        }
        LockError::NoQuorum(nodes) => no_quorum(nodes),
        LockError::TtlTooLong { asked, max } => ttl_too_long(asked, max),
        LockError::TooManyWaiters { max, of_this_lock } => too_many_waiters(max, of_this_lock),
        // An acquire has none of these outcomes; if it had, nothing would be held.
        LockError::Lost | LockError::NotHolder(_) | LockError::Unknown(_) => no_quorum(Vec::new()),
    }
}

fn holder_problem(error: LockError) -> Problem {
    match error {
        LockError::Lost => {
            let detail = "no such lock is held: it was released or has expired";
            Problem::new(StatusCode::NOT_FOUND, "lock_not_found", "Lock not found", detail.into())
        }
        LockError::NotHolder(by) | LockError::Held(by) => {
            let detail = format!("this token does not hold the lock; {}", describe(&by));
            held(Problem::new(StatusCode::CONFLICT, "not_holder", "Not the holder", detail), &by)
        }
        LockError::Unknown(nodes) => {
            let detail = "too few nodes answered to tell whether this was done; the old deadline still stands, and trying \
                          again is safe";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "outcome_unknown", "The outcome is unknown", detail.into())
                .retry_after(SOON)
                .nodes(nodes)
        }
        LockError::NoQuorum(nodes) => no_quorum(nodes),
        LockError::TtlTooLong { asked, max } => ttl_too_long(asked, max),
        LockError::TooManyWaiters { max, of_this_lock } => too_many_waiters(max, of_this_lock),
    }
}

fn too_many_waiters(max: usize, of_this_lock: bool) -> Problem {
    let what = if of_this_lock { "this lock" } else { "locks" };
    let detail =
        format!("{max} requests are waiting for {what} here, as many as are allowed; try again, or without wait_ms");
    Problem::new(StatusCode::TOO_MANY_REQUESTS, "too_many_waiters", "Too many waiters", detail).retry_after(SOON)
}

fn no_quorum(nodes: Vec<NodeReport>) -> Problem {
    let detail = "too few nodes answered in time to decide; this request holds nothing, and whatever it set is being \
                  released";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "quorum_unavailable", "No quorum", detail.into())
        .retry_after(SOON)
        .nodes(nodes)
}

fn ttl_too_long(asked: redlock_core::Ttl, max: redlock_core::Ttl) -> Problem {
    let detail =
        format!("ttl_ms is {}; allowed are {} to {}", asked.millis(), redlock_core::Ttl::MIN.millis(), max.millis());
    Problem::new(StatusCode::BAD_REQUEST, "invalid_ttl", "Invalid TTL", detail)
}

fn describe(by: &HeldBy) -> String {
    let who = label_of(&by.info).map_or_else(|| "somebody else".to_owned(), |label| format!("{label:?}"));
    match by.expires_in {
        Some(left) => format!("{who} holds it; it may expire in {} ms", left.as_millis()),
        None => format!("{who} holds it, without an expiry"),
    }
}

fn held(problem: Problem, by: &HeldBy) -> Problem {
    // When it expires, or much sooner if that is long; spread out, so that those who were refused together do not come back
    // together.
    let expiry = by.expires_in.unwrap_or(SOON).max(Duration::from_millis(50)).mul_f64(1.0 + SPREAD * fastrand::f64());
    let mut problem = problem.retry_after(expiry.min(LONGEST_PAUSE.mul_f64(1.0 - SPREAD * fastrand::f64())));
    problem.holder = label_of(&by.info);
    problem.expires_in_ms = by.expires_in.map(|left| left.as_millis() as u64);
    problem
}

impl Problem {
    fn new(status: StatusCode, code: &'static str, title: &'static str, detail: String) -> Self {
        Self {
            kind: format!("urn:redlock:problem:{code}"),
            title: title.into(),
            status: status.as_u16(),
            code: code.into(),
            detail,
            request_id: None,
            retry_after_ms: None,
            holder: None,
            expires_in_ms: None,
            nodes: None,
        }
    }

    fn retry_after(mut self, pause: Duration) -> Self {
        self.retry_after_ms = Some(pause.as_micros().div_ceil(1000) as u64);
        self
    }

    fn nodes(mut self, nodes: Vec<NodeReport>) -> Self {
        self.nodes = Some(nodes.into_iter().map(NodeAnswerBody::from).collect());
        self
    }
}

impl IntoResponse for ApiError {
    /// The request id is added on the way out, where it is known.
    fn into_response(self) -> Response {
        let challenge = self.challenge();
        let problem = self.problem();
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = status.into_response();
        if let Some(pause) = problem.retry_after_ms {
            let seconds = pause.div_ceil(1000).max(1);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        // One header line for each scheme.
        if let Some(bearer) = challenge {
            let headers = response.headers_mut();
            headers.append(header::WWW_AUTHENTICATE, HeaderValue::from_static(bearer));
            headers.append(header::WWW_AUTHENTICATE, HeaderValue::from_static(BASIC_CHALLENGE));
        }
        response.extensions_mut().insert(std::sync::Arc::new(problem));
        response
    }
}
