//! The lock handlers: typed arguments in, one gateway call, render.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequestParts, Path, Query, Request, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use http_body::{Frame, SizeHint};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use redlock_core::{HeldBy, ListCursor, LockName, LockToken};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use utoipa::IntoParams;

use super::access::Access;
use super::error::ApiError;
use super::wire::{AcquireBody, ExtendBody, Lease, LockList, LockStatus, Problem, invalid_wait, label_of};
use crate::auth::Verb;
use crate::config::Limits;
use crate::gateway::{AcquireRequest, Bearer, Gateway, Holder, Undelivered};
use crate::peer::Peer;

/// No legal body comes near it: a label and 4 KiB of metadata, at worst all escaped.
const MAX_BODY: usize = 64 * 1024;
/// For a body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

static LOCK_TOKEN: HeaderName = HeaderName::from_static("lock-token");
static IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
static PREFER: HeaderName = HeaderName::from_static("prefer");
static PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// The lock's name from the path, percent-decoded and checked.
pub struct Name(LockName);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Ok(Path(text)) = Path::<String>::from_request_parts(parts, state).await else {
            return Err(ApiError::InvalidName("the name is not UTF-8 after percent-decoding".into()));
        };
        text.parse::<LockName>().map(Self).map_err(|error| ApiError::InvalidName(error.to_string()))
    }
}

/// Acquire a lock
///
/// 201 when a majority of the nodes granted the lock; 409 when somebody holds it. With `wait_ms` the answer waits for the
/// lock, in a queue: those who wait at one gateway get it in the order in which they came, and 409 then says that the
/// wait has ended in vain. Without, only when contenders split the votes it tries again, a few times within milliseconds.
/// When the client disconnects before the answer, it leaves the queue, and the lock is released.
#[utoipa::path(
    post, path = "/locks/{name}", operation_id = "acquireLock", tag = "locks",
    params(
        ("name" = String, Path, description = "1 to 255 bytes of [A-Za-z0-9._:@/+~-]; slashes percent-encoded", example = "reports/nightly", min_length = 1, max_length = 255, pattern = r"^[A-Za-z0-9._:@/+~-]+$"),
        ("Idempotency-Key" = Option<String>, Header, nullable = false, description = "16 to 255 visible characters. A repeated request with the same key gets the same lock again, with a larger fencing token and a full TTL.", min_length = 16, max_length = 255, pattern = "^[!-~]+$"),
        ("Prefer" = Option<String>, Header, nullable = false, description = "`wait=SECONDS`, an alias of wait_ms; the body wins. Answered with Preference-Applied."),
    ),
    request_body(content = AcquireBody, description = "May be left out."),
    responses(
        (status = 201, description = "Granted", body = Lease, headers(
            ("Location" = String, description = "Path of the lock"),
            ("Lock-Token" = String, description = "The token, as in the body"),
            ("Cache-Control" = String, description = "no-store"),
            ("Preference-Applied" = String, description = "wait=SECONDS, when Prefer asked for it and the body did not"),
        )),
        (status = 400, description = "invalid_name, invalid_ttl, invalid_wait, invalid_body, invalid_parameter", body = Problem, content_type = "application/problem+json"),
        (status = 401, description = "unauthenticated", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 403, description = "forbidden", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 408, description = "request_timeout", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "lock_held: Retry-After, retry_after_ms, holder, expires_in_ms", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
        (status = 413, description = "body_too_large", body = Problem, content_type = "application/problem+json"),
        (status = 415, description = "unsupported_media_type", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "too_many_waiters, rate_limited", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
        (status = 500, description = "internal_error", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "quorum_unavailable (nothing is held), draining, overloaded", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
    )
)]
pub async fn acquire(
    access: Access,
    State(gateway): State<Arc<Gateway>>,
    Name(name): Name,
    request: Request,
) -> Result<Response, ApiError> {
    access.may(Verb::Acquire, &name)?;
    let mut in_flight = gateway.enter().map_err(ApiError::Acquire)?;
    no_query(request.uri())?;
    let limits = access.caller.limits(gateway.limits());
    let idempotency_key = idempotency_key(request.headers())?;
    let peer = request.extensions().get::<Peer>().cloned();
    let preferred = preferred_wait(request.headers(), &limits)?;
    let body: AcquireBody = json(request).await?.unwrap_or_default();
    let ttl = body.ttl(&limits)?.unwrap_or(limits.default_ttl);
    // The body wins: a preference beside it is not applied.
    let (wait, applied) = match (body.wait(&limits)?, preferred) {
        (None, Some(seconds)) => (Some(preferred_time(seconds, &limits)?), Some(seconds)),
        (wait, _) => (wait, None),
    };
    let wait = wait.filter(|wait| !wait.is_zero());
    let info = body.info(access.caller.principal())?;
    let label = label_of(info.as_bytes());
    access.note(|note| note.owner.clone_from(&label));
    let principal = access.caller.principal().map(Into::into);
    let asked = AcquireRequest { name: name.clone(), ttl, info, principal, idempotency_key, wait };
    let (view, undelivered) = gateway.acquire(asked, &mut in_flight, gone(peer)).await.map_err(ApiError::Acquire)?;
    // Otherwise the grant is dropped undelivered.
    access.still_may(Verb::Acquire, &name)?;

    let lease = Lease::new(&name, &view, label);
    let mut response = lease_response(StatusCode::CREATED, &lease, Some(undelivered))?;
    let headers = response.headers_mut();
    headers.insert(header::LOCATION, header_value(["/locks/", &percent_encode(name.as_str())].concat())?);
    headers.insert(LOCK_TOKEN.clone(), header_value(lease.token)?);
    if let Some(seconds) = applied {
        headers.insert(PREFERENCE_APPLIED.clone(), header_value(format!("wait={seconds}"))?);
    }
    Ok(response)
}

/// The client's hanging up, as far as it is known who the client is.
async fn gone(peer: Option<Peer>) {
    match peer {
        Some(peer) => peer.gone().await,
        None => std::future::pending().await,
    }
}

/// Extend a lock
///
/// From now on the lock lives at least `ttl_ms`; it is never shortened. 200 proves that the token has held it without a
/// gap. A request that was repeated with an Idempotency-Key has a newer token; the older one is `not_holder`. After 404 and 409 the work must stop; after 503 `outcome_unknown` the old deadline stands.
#[utoipa::path(
    patch, path = "/locks/{name}", operation_id = "extendLock", tag = "locks",
    params(
        ("name" = String, Path, description = "The lock's name; slashes percent-encoded", example = "reports/nightly", min_length = 1, max_length = 255, pattern = r"^[A-Za-z0-9._:@/+~-]+$"),
        ("Lock-Token" = String, Header, description = "The token that acquiring the lock returned, bare or as <token>", pattern = r"^1\.[1-8][0-9]{15}\.[0-9a-f]{40}$"),
    ),
    request_body = ExtendBody,
    responses(
        (status = 200, description = "Extended", body = Lease),
        (status = 400, description = "invalid_name, invalid_ttl, invalid_body, invalid_parameter, missing_token, invalid_token", body = Problem, content_type = "application/problem+json"),
        (status = 401, description = "unauthenticated", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 403, description = "forbidden", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 404, description = "lock_not_found: free or expired; stop work", body = Problem, content_type = "application/problem+json"),
        (status = 408, description = "request_timeout", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "not_holder: somebody else holds it; max_hold_reached", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
        (status = 413, description = "body_too_large", body = Problem, content_type = "application/problem+json"),
        (status = 415, description = "unsupported_media_type", body = Problem, content_type = "application/problem+json"),
        (status = 429, description = "rate_limited", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
        (status = 500, description = "internal_error", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "outcome_unknown: the old deadline stands; overloaded", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
    )
)]
pub async fn extend(
    access: Access,
    State(gateway): State<Arc<Gateway>>,
    Name(name): Name,
    request: Request,
) -> Result<Response, ApiError> {
    access.may(Verb::Extend, &name)?;
    let _in_flight = gateway.enter().map_err(ApiError::Holder)?;
    no_query(request.uri())?;
    let token = lock_token(request.headers())?;
    let body: ExtendBody = json(request).await?.unwrap_or_default();
    let limits = access.caller.limits(gateway.limits());
    let ttl = body.ttl(&limits)?;
    let holder = holder(&access, &gateway, &name, token, Verb::Extend).await?;
    let view = gateway.extend(&name, &holder, ttl, limits.max_hold).await.map_err(ApiError::Holder)?;
    lease_response(StatusCode::OK, &Lease::new(&name, &view, None), None)
}

/// Release a lock
///
/// 204 when a majority has let go. Releasing twice gives 404 the second time, which a retry may treat as done. With
/// `force=true` instead of a token it takes the lock from whoever holds it; its holder learns of it when it extends or
/// releases, and until then only the fencing token keeps its writes out.
#[utoipa::path(
    delete, path = "/locks/{name}", operation_id = "releaseLock", tag = "locks",
    params(
        ("name" = String, Path, description = "The lock's name; slashes percent-encoded", example = "reports/nightly", min_length = 1, max_length = 255, pattern = r"^[A-Za-z0-9._:@/+~-]+$"),
        ("Lock-Token" = Option<String>, Header, nullable = false, description = "The token that acquiring the lock returned, bare or as <token>; required without force", pattern = r"^1\.[1-8][0-9]{15}\.[0-9a-f]{40}$"),
        ("force" = Option<bool>, Query, nullable = false, description = "Release whoever holds it, without a token. For a key with the force permission."),
    ),
    responses(
        (status = 204, description = "Released"),
        (status = 400, description = "invalid_name, invalid_parameter, missing_token, invalid_token", body = Problem, content_type = "application/problem+json"),
        (status = 401, description = "unauthenticated", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 403, description = "forbidden", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 404, description = "lock_not_found: it was released or has expired", body = Problem, content_type = "application/problem+json"),
        (status = 409, description = "not_holder: somebody else holds it", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
        (status = 429, description = "rate_limited", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
        (status = 500, description = "internal_error", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "outcome_unknown: try again; overloaded", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
    )
)]
pub async fn release(
    access: Access,
    State(gateway): State<Arc<Gateway>>,
    Name(name): Name,
    request: Request,
) -> Result<Response, ApiError> {
    let force = is_forced(request.uri());
    access.may(if force == Ok(true) { Verb::Force } else { Verb::Release }, &name)?;
    let _in_flight = gateway.enter().map_err(ApiError::Holder)?;
    if force.map_err(|detail| ApiError::InvalidParameter(detail.into()))? {
        if request.headers().contains_key(&LOCK_TOKEN) {
            return Err(ApiError::InvalidParameter("force=true and a Lock-Token exclude each other".into()));
        }
        drop(request);
        let found = |by: &HeldBy| {
            access.note(|note| {
                note.owner = label_of(&by.info);
                note.is_sent = true;
            });
        };
        Box::pin(gateway.force_release(&name, found)).await.map_err(ApiError::Holder)?;
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    let token = lock_token(request.headers())?;
    drop(request);
    let holder = holder(&access, &gateway, &name, token, Verb::Release).await?;
    gateway.release(&name, &holder).await.map_err(ApiError::Holder)?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Look at a lock
///
/// The majority's view; never the token. For people and dashboards: it may be outdated on arrival.
#[utoipa::path(
    get, path = "/locks/{name}", operation_id = "getLock", tag = "locks",
    params(("name" = String, Path, description = "The lock's name; slashes percent-encoded", example = "reports/nightly", min_length = 1, max_length = 255, pattern = r"^[A-Za-z0-9._:@/+~-]+$")),
    responses(
        (status = 200, description = "The lock: held, free or unknown", body = LockStatus),
        (status = 400, description = "invalid_name", body = Problem, content_type = "application/problem+json"),
        (status = 401, description = "unauthenticated", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 403, description = "forbidden", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 429, description = "rate_limited", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
        (status = 500, description = "internal_error", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "overloaded", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
    )
)]
pub async fn inspect(
    access: Access,
    State(gateway): State<Arc<Gateway>>,
    Name(name): Name,
) -> Result<Response, ApiError> {
    access.may(Verb::Inspect, &name)?;
    let _in_flight = gateway.enter().map_err(ApiError::Holder)?;
    let inspection = gateway.inspect(&name).await;
    json_response(StatusCode::OK, &LockStatus::new(&name, inspection))
}

/// Which locks to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// Only names that begin so.
    #[serde(default)]
    #[param(required = false, max_length = 255, pattern = r"^[A-Za-z0-9._:@/+~-]*$")]
    prefix: String,
    /// About how many locks on a page, 1 to 1000.
    #[serde(default = "default_limit")]
    #[param(required = false, minimum = 1, maximum = 1000, default = 100)]
    limit: u32,
    /// Where the last page ended.
    #[serde(default)]
    #[param(required = false)]
    cursor: String,
}

fn default_limit() -> u32 {
    100
}

/// List held locks
///
/// One page, merged over the nodes, in no particular order. A page may hold a few more locks than asked, or fewer; a key
/// sees the locks that it may list.
#[utoipa::path(
    get, path = "/locks", operation_id = "listLocks", tag = "locks",
    params(ListQuery),
    responses(
        (status = 200, description = "A page", body = LockList),
        (status = 400, description = "invalid_parameter", body = Problem, content_type = "application/problem+json"),
        (status = 401, description = "unauthenticated", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 403, description = "forbidden", body = Problem, content_type = "application/problem+json", headers(("WWW-Authenticate" = String, description = "Bearer and Basic, in two lines"))),
        (status = 429, description = "rate_limited", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
        (status = 500, description = "internal_error", body = Problem, content_type = "application/problem+json"),
        (status = 503, description = "quorum_unavailable, overloaded", body = Problem, content_type = "application/problem+json", headers(("Retry-After" = u32, description = "Seconds until trying again makes sense"))),
    )
)]
pub async fn list(
    access: Access,
    State(gateway): State<Arc<Gateway>>,
    query: Result<Query<ListQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<Response, ApiError> {
    access.may_somewhere(Verb::List)?;
    let _in_flight = gateway.enter().map_err(ApiError::Acquire)?;
    let bad = |detail: &str| ApiError::InvalidParameter(detail.to_owned());
    let Query(query) = query.map_err(|error| ApiError::InvalidParameter(error.body_text()))?;
    if !(1..=1000).contains(&query.limit) {
        return Err(ApiError::InvalidParameter(format!("limit is {}; allowed are 1 to 1000", query.limit)));
    }
    if !query.prefix.is_empty() {
        query.prefix.parse::<LockName>().map_err(|error| ApiError::InvalidParameter(format!("prefix: {error}")))?;
    }
    let cursor = match query.cursor.as_str() {
        "" => ListCursor::default(),
        text => {
            text.parse().map_err(|_| bad("cursor is none; give back next_cursor of the last page, or leave it out"))?
        }
    };
    let listed = |name: &LockName| access.caller.may(Verb::List, name);
    let page = gateway.list(&query.prefix, query.limit as usize, cursor, listed).await.map_err(ApiError::Acquire)?;
    json_response(StatusCode::OK, &LockList::from(page))
}

/// Whether the query is `force=true`. A misspelt one must not be taken for a release by token.
fn is_forced(uri: &Uri) -> Result<bool, &'static str> {
    match uri.query() {
        None | Some("" | "force=false") => Ok(false),
        Some("force=true") => Ok(true),
        Some(_) => Err("the only query parameter here is force=true, for a key with the force permission"),
    }
}

/// Whose grant the token is taken for; on the record when it is not the caller's own.
async fn holder(
    access: &Access,
    gateway: &Gateway,
    name: &LockName,
    token: LockToken,
    to: Verb,
) -> Result<Holder, ApiError> {
    let Some(principal) = access.caller.principal() else { return Ok(Holder::of(token)) };
    let (may_force, releases) = (access.caller.may(Verb::Force, name), to == Verb::Release);
    let bearer = Bearer { token, principal: Some(principal.into()), may_force, releases };
    // Apart, or every request would carry the room for it.
    let holder = Box::pin(gateway.holder(name, bearer)).await.map_err(ApiError::Holder)?;
    if holder.is_forced {
        access.note(|note| note.forces = true);
    }
    Ok(holder)
}

/// `/locks/` without a name.
pub async fn no_name() -> ApiError {
    ApiError::InvalidName(redlock_core::types::NameError::Empty.to_string())
}

/// A misplaced `?ttl_ms=` must not silently give the default.
fn no_query(uri: &Uri) -> Result<(), ApiError> {
    match uri.query() {
        None | Some("") => Ok(()),
        Some(_) => Err(ApiError::InvalidParameter(
            "query parameters have no meaning here: the fields of a request go into its JSON body".into(),
        )),
    }
}

/// The body as JSON; `None` when there is none.
async fn json<T: DeserializeOwned>(request: Request) -> Result<Option<T>, ApiError> {
    let (parts, body) = request.into_parts();
    if http_body::Body::is_end_stream(&body) {
        return Ok(None);
    }
    let bytes = match tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, MAX_BODY).collect()).await {
        Err(_) => return Err(ApiError::RequestTimeout(BODY_TIMEOUT)),
        Ok(Err(error)) if error.is::<LengthLimitError>() => return Err(ApiError::BodyTooLarge { limit: MAX_BODY }),
        Ok(Err(_)) => return Err(ApiError::InvalidBody("the body broke off".into())),
        Ok(Ok(collected)) => collected.to_bytes(),
    };
    if bytes.is_empty() {
        return Ok(None);
    }
    let content_type = parts.headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    if !content_type.is_some_and(is_json) {
        let found = content_type.map_or("missing".into(), |text| format!("{:?}", String::from_utf8_lossy(text)));
        return Err(ApiError::UnsupportedMediaType(found));
    }
    // A derived Deserialize takes an array for a struct too, field by field.
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Err(ApiError::InvalidBody("the body is no JSON object, such as {\"ttl_ms\": 30000}".into()));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(|error| ApiError::InvalidBody(error.to_string()))
}

fn is_json(content_type: &[u8]) -> bool {
    let essence = content_type.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    essence.eq_ignore_ascii_case(b"application/json")
}

/// The token of the `Lock-Token` header.
pub fn lock_token(headers: &HeaderMap) -> Result<LockToken, ApiError> {
    let mut values = headers.get_all(&LOCK_TOKEN).iter();
    let value = values.next().ok_or(ApiError::MissingToken)?;
    if values.next().is_some() {
        return Err(ApiError::InvalidToken);
    }
    let text = value.to_str().map_err(|_| ApiError::InvalidToken)?.trim();
    let text = text.strip_prefix('<').and_then(|text| text.strip_suffix('>')).unwrap_or(text);
    text.parse().map_err(|_| ApiError::InvalidToken)
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let mut values = headers.get_all(&IDEMPOTENCY_KEY).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(ApiError::InvalidParameter("Idempotency-Key is there more than once".into()));
    }
    match value.to_str() {
        Ok(key) if (16..=255).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic()) => Ok(Some(key.into())),
        // The key is as good as the token it leads to, so it is not repeated here.
        _ => Err(ApiError::InvalidParameter("Idempotency-Key must have 16 to 255 visible ASCII characters".into())),
    }
}

/// The seconds of `Prefer: wait=…`; other preferences are ignored, as RFC 7240 wants.
fn preferred_wait(headers: &HeaderMap, limits: &Limits) -> Result<Option<u64>, ApiError> {
    for value in headers.get_all(&PREFER) {
        for preference in value.to_str().unwrap_or_default().split(',') {
            let preference = preference.split(';').next().unwrap_or_default();
            if let Some((name, seconds)) = preference.split_once('=')
                && name.trim().eq_ignore_ascii_case("wait")
            {
                let seconds = seconds.trim().trim_matches('"');
                return match seconds.parse() {
                    Ok(seconds) => Ok(Some(seconds)),
                    Err(_) => Err(invalid_wait("Prefer: wait is no number of seconds", limits)),
                };
            }
        }
    }
    Ok(None)
}

fn preferred_time(seconds: u64, limits: &Limits) -> Result<Duration, ApiError> {
    let wait = Some(Duration::from_secs(seconds)).filter(|wait| *wait <= limits.max_wait);
    wait.ok_or_else(|| invalid_wait(&format!("Prefer asks to wait for {seconds} seconds"), limits))
}

/// Percent-encodes the slash, the one character of a name that would end a path segment.
fn percent_encode(name: &str) -> String {
    name.replace('/', "%2F")
}

fn header_value(text: String) -> Result<HeaderValue, ApiError> {
    HeaderValue::try_from(text).map_err(|_| ApiError::Internal)
}

/// JSON and a newline, for those who read it in a terminal.
pub fn json_line(body: &impl serde::Serialize) -> Result<Vec<u8>, ApiError> {
    // Enough for an answer about one lock.
    let mut line = Vec::with_capacity(512);
    serde_json::to_writer(&mut line, body).map_err(|_| ApiError::Internal)?;
    line.push(b'\n');
    Ok(line)
}

pub fn json_response(status: StatusCode, body: &impl serde::Serialize) -> Result<Response, ApiError> {
    let mut response = Response::new(Body::from(json_line(body)?));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

fn lease_response(status: StatusCode, lease: &Lease, undelivered: Option<Undelivered>) -> Result<Response, ApiError> {
    let bytes = Bytes::from(json_line(lease)?);
    let mut response = Response::new(Body::new(GrantBody { bytes: Some(bytes), undelivered }));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

/// The answer to an acquire. Dropped before the connection has taken it, as happens when the client is gone, it lets the
/// grant's guard release the lock. What the connection took and the network lost is beyond reach: the TTL bounds it.
struct GrantBody {
    bytes: Option<Bytes>,
    undelivered: Option<Undelivered>,
}

impl http_body::Body for GrantBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, std::convert::Infallible>>> {
        if let Some(undelivered) = self.undelivered.take() {
            undelivered.delivered();
        }
        Poll::Ready(self.bytes.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, Bytes::len) as u64)
    }
}

#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_taken_bare_and_in_angle_brackets() {
        let token = "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b";
        for text in [token.to_owned(), format!("<{token}>")] {
            let headers = HeaderMap::from_iter([(LOCK_TOKEN.clone(), HeaderValue::try_from(text).unwrap())]);
            assert!(lock_token(&headers).is_ok());
        }
        assert!(matches!(lock_token(&HeaderMap::new()), Err(ApiError::MissingToken)));
    }

    #[test]
    fn content_types_with_parameters_are_json_and_others_are_not() {
        assert!(is_json(b"application/json") && is_json(b"Application/JSON ; charset=utf-8"));
        assert!(!is_json(b"application/x-www-form-urlencoded") && !is_json(b""));
    }
}
