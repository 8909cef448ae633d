//! `POST /locks` and `DELETE /locks`: several locks that are acquired all together or not at all.

use std::time::Instant;

use axum::extract::FromRequestParts;
use axum::response::Response;
use futures_util::future::join_all;
use http::request::Parts;
use http::{StatusCode, Uri};
use percent_encoding::percent_decode_str;
use redlock_api::{AcquireBody, AcquireSetBody, ReleaseResult, ReleaseSetResults, SetLease};
use redlock_core::{LockName, LockSet, SetError};
use serde_json::Value;

use super::access::{Access, lock_name, no_secret};
use super::acquire::{Asked, Terms};
use super::error::{ApiError, INVALID_BODY, INVALID_NAME, INVALID_PARAMETER};
use super::extract::{AcquireHead, Json, TokenOrKey, token_or_key};
use super::gate::Pass;
use super::openapi::{BodyErrors, CommonErrors};
use super::render::json_response;
use super::token::resolve;
use crate::auth::{Caller, Verb};
use crate::gateway::Target;

/// Acquire a set of locks
///
/// Acquires 1 to 32 locks, all together or not at all, with one token and one fencing token. 201
/// when a majority of the nodes granted all of them; 409 when one is held. Every lock of the set is
/// an ordinary lock: extend it with `PATCH /locks` or `PATCH /locks/{name}`, inspect it, and release
/// it by its name. The set is lost when any of its locks is lost.
///
/// With `wait_ms` the request waits for the lock that refused it last. It holds none of the locks
/// while it waits, so overlapping sets cannot deadlock, in any order of names. A set has no fixed
/// place in a queue: it goes behind the waiters of its priority in the queue of the lock that
/// refused it. The request counts once for each name in the rate of the key and in the
/// client's share of the masters' memory. To wait for a set without an open connection, use `POST /requests`.
#[utoipa::path(
    post, path = "/locks", operation_id = "acquireLocks", tag = "locks",
    params(
        ("Idempotency-Key" = Option<String>, Header, nullable = false, description = "16 to 255 visible characters. While the grant stands, a repeated request with the same key and the same names, in any order, gets it again.", min_length = 16, max_length = 255, pattern = "^[!-~]+$"),
        ("Prefer" = Option<String>, Header, nullable = false, description = "`wait=SECONDS`, an alias of wait_ms; the body takes precedence. The answer has Preference-Applied."),
    ),
    request_body = AcquireSetBody,
    responses(
        (status = 201, description = "Granted", body = SetLease, headers(
            ("Lock-Token" = String, description = "The token, as in the body"),
            ("Cache-Control" = String, description = "no-store"),
            ("Idempotency-Replayed" = String, description = "true, when an earlier request with the same Idempotency-Key was granted the set"),
            ("Preference-Applied" = String, description = "wait=SECONDS, if Prefer set the wait"),
        )),
        (status = 400, description = "invalid_name, invalid_ttl, invalid_wait, invalid_body, invalid_parameter"),
        CommonErrors,
        BodyErrors,
        (status = 409, description = "lock_held: `held` has the name of one held lock, and there may be more; Retry-After, retry_after_ms, holder, acquired_at, expires_in_ms; max_hold_reached"),
        (status = 429, description = "too_many_waiters, rate_limited, quota_exceeded"),
        (status = 503, description = "quorum_unavailable: nothing is held; outcome_unknown: an earlier request with the same Idempotency-Key may hold the set, try again; draining, overloaded, audit_unavailable"),
    )
)]
pub(super) async fn acquire_set(
    access: Access,
    head: AcquireHead,
    Json(body): Json<AcquireSetBody>,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    let set = named(&body.names)?;
    access.note_parts(set.names());
    let result = acquire(&access, &head, set, body, started).await;
    let success = result.as_ref().map_or(StatusCode::CREATED, Response::status);
    access.end_parts(&result, success);
    result
}

async fn acquire(
    access: &Access,
    head: &AcquireHead,
    set: LockSet,
    body: AcquireSetBody,
    started: Instant,
) -> Result<Response, ApiError> {
    access.check_again(Verb::Acquire, set.names())?;
    if head.stream.is_some() {
        let detail = "an event stream holds one lock or its slots, not a set; leave out Accept: text/event-stream";
        return Err(INVALID_PARAMETER.because(detail));
    }
    let AcquireSetBody { names: _, ttl_ms, wait_ms, priority, hold_at_least_ms, owner, metadata } =
        body;
    let body = AcquireBody {
        ttl_ms,
        wait_ms,
        priority,
        hold_at_least_ms,
        owner,
        metadata,
        ..AcquireBody::default()
    };
    let terms = Terms::of(head, &body, &access.limits())?;
    let asked = Asked::read(access, Target::Set(set), terms, body, started)?;
    asked.acquire(access, head.client_gone()).await?.answer(access)
}

/// The names of a body.
///
/// # Errors
/// The form is wrong. The error quotes no name that may be a secret.
pub(super) fn named(value: &Value) -> Result<LockSet, ApiError> {
    const FORM: &str = "such as {\"names\": [\"a\", \"b\"]}";
    let Value::Array(names) = value else {
        return Err(INVALID_BODY.because(format!("names must be a list of lock names, {FORM}")));
    };
    let name = |(index, name): (usize, &Value)| match name {
        Value::String(name) => {
            checked(name).map_err(|error| error.about(&format!("names[{index}]")))
        }
        _ => {
            Err(INVALID_BODY.because(format!("names[{index}] is not a string; send a list {FORM}")))
        }
    };
    let bad = |error| INVALID_BODY.because(format!("names: {error}, {FORM}"));
    if names.len() > LockSet::MAX_LEN {
        return Err(bad(SetError::TooMany { given: names.len() }));
    }
    let names = names.iter().enumerate().map(name).collect::<Result<_, _>>()?;
    LockSet::new(names).map_err(bad)
}

fn checked(name: &str) -> Result<LockName, ApiError> {
    no_secret(name).map_err(|_| {
        INVALID_NAME.because("a name contains an API key or a lock token; send the lock's name")
    })?;
    lock_name(name)
}

/// Release a set of locks
///
/// Releases each of 1 to 32 locks. The answer is 200 with one result for each name, in the order of
/// the request: 204 if the lock was released. If all releases failed alike, the answer is that error. Instead of the token, a client that never got it sends the `Idempotency-Key` of its
/// `POST /locks`, with the same names.
#[utoipa::path(
    delete, path = "/locks", operation_id = "releaseLocks", tag = "locks",
    params(
        ("name" = Vec<String>, Query, explode = true, description = "Name of a lock. Send 1 to 32 names. Slashes need no percent-encoding here.", min_items = 1, max_items = 32),
        ("Lock-Token" = Option<String>, Header, nullable = false, description = "The token that acquiring the set returned, bare or as <token>. Required without Idempotency-Key.", pattern = r"^(1|2-[1-9][0-9]{0,7}|2-(0|[1-9][0-9]{0,7})-([2-9a-f]|[1-9a-f][0-9a-f]{1,63}))\.[1-8][0-9]{15}\.[0-9a-f]{40}$"),
        ("Idempotency-Key" = Option<String>, Header, nullable = false, description = "The key of the POST, for a client that never got the token. Ignored beside a Lock-Token.", min_length = 16, max_length = 255, pattern = "^[!-~]+$"),
    ),
    responses(
        (status = 200, description = "One result for each name", body = ReleaseSetResults),
        (status = 400, description = "invalid_name, invalid_parameter, missing_token, invalid_token"),
        CommonErrors,
        (status = 404, description = "lock_not_found: all were released or have expired"),
        (status = 409, description = "not_holder: somebody else holds all of them"),
        (status = 429, description = "rate_limited; quota_exceeded"),
        (status = 503, description = "outcome_unknown: try again; overloaded, audit_unavailable"),
    )
)]
pub(super) async fn release_set(
    access: Access,
    ReleaseSet { set, by }: ReleaseSet,
) -> Result<Response, ApiError> {
    access.note_parts(set.names());
    let result = release_each(&access, &set, &by).await;
    access.end_parts(&result, StatusCode::OK);
    result
}

async fn release_each(
    access: &Access,
    set: &LockSet,
    by: &TokenOrKey,
) -> Result<Response, ApiError> {
    // No set has slots, but a token may name some.
    let slots = match by {
        TokenOrKey::Token(token) => token.slots().count(),
        TokenOrKey::IdempotencyKey(_) => 1,
    };
    let cost = set.names().len() * usize::from(slots);
    let Pass { caller, .. } = &access.pass(Verb::Release, set.names(), cost).await?;
    let releases: Vec<_> = (0..set.names().len())
        .map(|index| {
            Box::pin(async move {
                let released = release((access, caller), set, index, by).await;
                let end = match &released {
                    Ok(()) => (StatusCode::NO_CONTENT.as_u16(), None),
                    Err(error) => (error.status().as_u16(), Some(error.code().as_str())),
                };
                access.note(|entry| entry.parts[index].end = Some(end));
                released
            })
        })
        .collect();
    let results = join_all(releases).await;
    // If all failed alike, the answer is that error.
    let code_of = |result: &Result<(), ApiError>| result.as_ref().err().map(ApiError::code);
    let first = code_of(&results[0]);
    if first.is_some() && results.iter().all(|result| code_of(result) == first) {
        let error = results.into_iter().find_map(Result::err);
        return Err(error.expect("all failed").about(set.names()[0].as_str()));
    }
    let result = |(name, released): (&LockName, Result<(), ApiError>)| {
        let problem = released.err().map(ApiError::problem);
        ReleaseResult {
            name: name.to_string(),
            status: problem.as_ref().map_or(204, |problem| problem.status),
            retry_after_ms: problem.as_ref().and_then(|problem| problem.retry_after_ms),
            code: problem.as_ref().map(|problem| problem.code.clone()),
            detail: problem.map(|problem| problem.detail),
        }
    };
    let results = set.names().iter().zip(results).map(result).collect();
    json_response(StatusCode::OK, &ReleaseSetResults { results })
}

async fn release(
    (access, caller): (&Access, &Caller),
    set: &LockSet,
    index: usize,
    by: &TokenOrKey,
) -> Result<(), ApiError> {
    let gateway = access.gateway();
    let name = &set.names()[index];
    let released = match by {
        TokenOrKey::Token(token) => {
            let token = resolve(access, caller, name, Verb::Release, *token).await?;
            if token.is_forced {
                access.note(|entry| entry.parts[index].forces = true);
            }
            gateway.release(name, &token, access.client()).await
        }
        TokenOrKey::IdempotencyKey(key) => {
            let whose = (caller.principal(), key.as_str());
            let target = Target::Set(set.clone());
            gateway.release_by_key(name, &target, whose, access.client()).await
        }
    };
    released.map_err(|refusal| access.refused_on(name, refusal))
}

/// The arguments of a DELETE of a set.
pub(super) struct ReleaseSet {
    set: LockSet,
    by: TokenOrKey,
}

impl<S: Send + Sync> FromRequestParts<S> for ReleaseSet {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let set = queried(&parts.uri)?;
        Ok(Self { set, by: token_or_key(&parts.headers)? })
    }
}

/// The names in a query, such as `name=a&name=b`. A `+` is itself there: a name may have it, and
/// no name has a space.
fn queried(uri: &Uri) -> Result<LockSet, ApiError> {
    const FORM: &str = "such as ?name=a&name=b";
    let query = uri.query().unwrap_or_default();
    no_secret(query).map_err(|detail| INVALID_PARAMETER.because(detail))?;
    let bad = |error| INVALID_PARAMETER.because(format!("name: {error}, {FORM}"));
    let pairs = || query.split('&').filter(|pair| !pair.is_empty());
    if pairs().count() > LockSet::MAX_LEN {
        return Err(bad(SetError::TooMany { given: pairs().count() }));
    }
    let name = |pair: &str| match pair.split_once('=') {
        Some(("name", name)) => {
            let name = percent_decode_str(name).decode_utf8().map_err(|_| {
                INVALID_PARAMETER.because("a name is not UTF-8 after percent-decoding")
            })?;
            checked(&name)
        }
        _ => Err(INVALID_PARAMETER
            .because(format!("the only query parameter here is name, once for each lock, {FORM}"))),
    };
    LockSet::new(pairs().map(name).collect::<Result<_, _>>()?).map_err(bad)
}
