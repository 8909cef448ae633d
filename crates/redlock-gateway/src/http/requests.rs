//! `POST /requests` and `/requests/{id}`: deferred requests, which are answered before their grant.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::extract::{FromRequestParts, Path};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{StatusCode, header};
use redlock_api::headers::PREFERENCE_APPLIED;
use redlock_api::{
    AcquireBody, CallbackState, DeferBody, LockReady, LockReadyData, RequestState, RequestStatus,
};
use redlock_core::{LockName, LockSet};
use serde_json::Value;

use super::access::{Access, Standing};
use super::acquire::{Asked, Terms, lock_or_slots, refused};
use super::error::{ApiError, INVALID_BODY, INVALID_CALLBACK};
use super::extract::{DeferHead, Json, no_query};
use super::gate::Pass;
use super::openapi::{BodyErrors, CommonErrors};
use super::render::{header_value, json_response};
use super::sets::named;
use crate::audit::AuditContext;
use crate::auth::Verb;
use crate::callbacks::{CallbackError, CallbackUrl};
use crate::gateway::{
    CallbackOutcome, DeferredEnd, DeferredRequest, DeferredStage, GrantNotifier, Refusal,
    RequestId, Target, accept_window,
};

/// Create a deferred request
///
/// Waits for a lock, or for a set of locks. The client keeps no connection open: the gateway answers
/// 202 at once, and `GET /requests/{id}` shows the state of the request.
///
/// When the gateway gets the lock, the state is `ready`. The gateway sends a signed `LockReady` to
/// `callback_url`, and keeps the lock for 10 s, or for the longest TTL if that is shorter. In this
/// time the client must claim the lock, or it expires. To claim one lock, send
/// `POST /locks/{name}` to any gateway. To claim a set, send `POST /locks` with the same names. The
/// `Idempotency-Key`, `slots` and `take` must be those of the request.
///
/// A repeated request, with the same key and the same names, is also answered 202. While the first
/// one is open, the repeated one has no effect, and its other fields are ignored. After that it is a
/// new request. If the key holds the lock already, the state is `claimed`. A request counts once for
/// each name or slot in the rate of the key and in the client's share of the masters' memory.
#[utoipa::path(
    post, path = "/requests", operation_id = "createRequest", tag = "locks",
    params(
        ("Idempotency-Key" = String, Header, description = "16 to 255 visible characters. Claim the lock with the same key.", min_length = 16, max_length = 255, pattern = "^[!-~]+$"),
        ("Prefer" = Option<String>, Header, nullable = false, description = "`wait=SECONDS`, an alias of wait_ms; the body takes precedence. The answer has Preference-Applied."),
    ),
    request_body = DeferBody,
    responses(
        (status = 202, description = "The request waits, or is ready to be claimed", body = RequestStatus, headers(
            ("Location" = String, description = "Path of the request"),
            ("Preference-Applied" = String, description = "wait=SECONDS, if the request is new and Prefer set its wait"),
        )),
        (status = 400, description = "invalid_name, invalid_callback, invalid_ttl (asking the masters takes too long now), invalid_wait, invalid_body, invalid_parameter"),
        CommonErrors,
        BodyErrors,
        (status = 409, description = "lock_held: wait_ms is 0; superseded: the request has queue newest, and a newer one waits instead; max_hold_reached: an earlier request with the same Idempotency-Key has held it for too long"),
        (status = 429, description = "too_many_waiters (in all, for this lock, or of this client), rate_limited, quota_exceeded"),
        (status = 503, description = "quorum_unavailable: nothing is held; outcome_unknown: an earlier request with the same Idempotency-Key may hold it, try again; draining, overloaded, audit_unavailable"),
    )
)]
pub(super) async fn create(
    access: Access,
    head: DeferHead,
    Json(body): Json<Box<DeferBody>>,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    let set = named(&body.names)?;
    access.note_parts(set.names());
    let result = Box::pin(begin(&access, head, set, *body, started)).await;
    access.end_parts(&result, StatusCode::ACCEPTED);
    result
}

async fn begin(
    access: &Access,
    head: DeferHead,
    set: LockSet,
    body: DeferBody,
    started: Instant,
) -> Result<Response, ApiError> {
    access.check_again(Verb::Acquire, set.names())?;
    let callback = checked_callback(access, body.callback_url.as_ref(), set.names())?;
    let limits = access.limits();
    let (wait, applied) = head.wait(body.wait_ms.as_ref(), &limits)?;
    let ttl = accept_window(&limits);
    let DeferBody { priority, queue, slots, take, owner, metadata, .. } = body;
    let body =
        AcquireBody { priority, queue, slots, take, owner, metadata, ..AcquireBody::default() };
    let target = target(set, &body)?;
    let idempotency_key = Some(head.idempotency_key);
    let terms = Terms { ttl, wait, applied, idempotency_key };
    let Asked { request, .. } = Asked::read(access, target.clone(), terms, body, started)?;
    let Pass { in_flight, .. } = access.pass(Verb::Acquire, target.locks(), target.count()).await?;
    let (caller, audit) = (access.standing(), access.audit());
    let notifier = Notifier { caller, target: target.clone(), audit };
    let deferred = access.gateway().defer(request, in_flight, callback, notifier).await;
    let (deferred, is_new) = deferred.map_err(|refusal| refused(access, &target, refusal))?;
    let mut response = json_response(StatusCode::ACCEPTED, &status(access, &deferred))?;
    let headers = response.headers_mut();
    headers.insert(header::LOCATION, header_value(format!("/requests/{}", deferred.id))?);
    if let Some(seconds) = applied.filter(|_| is_new) {
        headers.insert(PREFERENCE_APPLIED.clone(), header_value(format!("wait={seconds}"))?);
    }
    Ok(response)
}

/// What the request waits for. One name stands for the lock itself, as in `POST /locks/{name}`: a set
/// of one lock has other owners.
fn target(set: LockSet, body: &AcquireBody) -> Result<Target, ApiError> {
    let [name] = set.names() else {
        if body.queue.is_some() || body.slots.is_some() || body.take.is_some() {
            let count = set.names().len();
            return Err(INVALID_BODY.because(format!(
                "names has {count} locks; queue, slots and take need one lock, so leave them out or send one name"
            )));
        }
        return Ok(Target::Set(set));
    };
    lock_or_slots(name.clone(), body)
}

fn checked_callback(
    access: &Access,
    url: Option<&Value>,
    names: &[LockName],
) -> Result<Option<CallbackUrl>, ApiError> {
    let Some(url) = url else { return Ok(None) };
    let Some(url) = url.as_str() else {
        return Err(INVALID_CALLBACK.because("callback_url must be a string"));
    };
    access.check_again(Verb::Callback, names)?;
    let url = access.gateway().check_callback(url);
    url.map(Some).map_err(|error| INVALID_CALLBACK.because(format!("callback_url: {error}")))
}

/// Show a deferred request
///
/// Shows the state of a deferred request. While it is `waiting`, `position` is its place in this
/// gateway's queue. When it is `ready`, claim the lock with the `Idempotency-Key` of the request, at
/// any gateway, as `POST /requests` describes. An ended request stays visible for up to a minute.
/// With API keys, only the key that sent the request sees it. A gateway knows only its own requests,
/// and forgets them when it restarts; repeating `POST /requests` is always safe.
#[utoipa::path(
    get, path = "/requests/{id}", operation_id = "getRequest", tag = "locks",
    params(("id" = String, Path, description = "The id of the request, from the answer 202")),
    responses(
        (status = 200, description = "The request", body = RequestStatus),
        (status = 400, description = "invalid_parameter"),
        CommonErrors,
        (status = 404, description = "request_not_found: unknown here, sent by another key, or ended some time ago"),
    )
)]
pub(super) async fn inspect(
    access: Access,
    RequestPath(id): RequestPath,
) -> Result<Response, ApiError> {
    let deferred = found(&access, id)?;
    json_response(StatusCode::OK, &status(&access, &deferred))
}

/// Cancel a deferred request
///
/// The request leaves the queue. If its lock is `ready` and was not claimed, the lock is released. A
/// claimed lock stays: release it with its token.
#[utoipa::path(
    delete, path = "/requests/{id}", operation_id = "cancelRequest", tag = "locks",
    params(("id" = String, Path, description = "The id of the request, from the answer 202")),
    responses(
        (status = 204, description = "Cancelled, or already ended"),
        (status = 400, description = "invalid_parameter"),
        CommonErrors,
        (status = 404, description = "request_not_found: unknown here, sent by another key, or ended some time ago"),
        (status = 503, description = "audit_unavailable"),
    )
)]
pub(super) async fn cancel(
    access: Access,
    RequestPath(id): RequestPath,
) -> Result<Response, ApiError> {
    let deferred = found(&access, id)?;
    access.note(|entry| {
        entry.what = Some("cancel");
        entry.changes = true;
    });
    access.note_parts(deferred.target.locks());
    let result = access.check_record(Verb::Release);
    access.end_parts(&result, StatusCode::NO_CONTENT);
    result?;
    access.gateway().cancel(&deferred);
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn found(
    access: &Access,
    id: Option<RequestId>,
) -> Result<Arc<DeferredRequest<Refusal>>, ApiError> {
    let principal = access.caller().principal();
    let deferred = id.and_then(|id| access.gateway().deferred(&id, principal));
    deferred.ok_or_else(ApiError::no_such_request)
}

/// The id in the path. `None` if it is not of the form of an id.
pub(super) struct RequestPath(Option<RequestId>);

impl<S: Send + Sync> FromRequestParts<S> for RequestPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        no_query(&parts.uri)?;
        let text = Path::<String>::from_request_parts(parts, state).await;
        Ok(Self(text.ok().and_then(|Path(text)| RequestId::parse(&text))))
    }
}

fn status(access: &Access, deferred: &DeferredRequest<Refusal>) -> RequestStatus {
    let stage = deferred.stage();
    let (state, claim_within) = match &stage {
        DeferredStage::Begun | DeferredStage::Waiting => (RequestState::Waiting, None),
        DeferredStage::Ready(until) => {
            let left = until.saturating_duration_since(Instant::now());
            (RequestState::Ready, Some(left))
        }
        DeferredStage::Ended(end) => (ended_state(end), None),
    };
    let is_waiting = state == RequestState::Waiting;
    let position = is_waiting.then(|| access.gateway().deferred_position(deferred)).flatten();
    let problem = match &stage {
        DeferredStage::Ended(DeferredEnd::Refused(refusal)) => {
            Some(refused(access, &deferred.target, Refusal::clone(refusal)))
        }
        DeferredStage::Ended(DeferredEnd::Revoked) => {
            Some(ApiError::forbidden(access.caller().principal(), Verb::Acquire))
        }
        DeferredStage::Begun
        | DeferredStage::Waiting
        | DeferredStage::Ready(_)
        | DeferredStage::Ended(_) => None,
    };
    RequestStatus {
        id: deferred.id.to_string(),
        state,
        names: names(&deferred.target),
        position: position.map(|position| position as u64),
        claim_within_ms: claim_within.map(|left| left.as_millis() as u64),
        callback: deferred.callback().map(|outcome| match outcome {
            CallbackOutcome::Delivered => CallbackState::Delivered,
            CallbackOutcome::Failed => CallbackState::Failed,
        }),
        problem: problem.map(ApiError::problem),
    }
}

fn ended_state(end: &DeferredEnd<Refusal>) -> RequestState {
    match end {
        DeferredEnd::Claimed => RequestState::Claimed,
        DeferredEnd::Expired => RequestState::Expired,
        DeferredEnd::Cancelled => RequestState::Cancelled,
        DeferredEnd::Revoked | DeferredEnd::Refused(_) => RequestState::Refused,
    }
}

fn names(target: &Target) -> Vec<String> {
    target.locks().iter().map(ToString::to_string).collect()
}

/// Follows a request for its client.
struct Notifier {
    caller: Standing,
    target: Target,
    audit: Option<AuditContext>,
}

impl Notifier {
    /// Writes an audit line for each lock.
    fn record(&self, what: &str, outcome: &str, status: Option<u16>) {
        let Some(audit) = &self.audit else { return };
        for name in self.target.locks() {
            audit.record_later(what, name.as_str(), outcome, status);
        }
    }
}

impl GrantNotifier<Refusal> for Notifier {
    fn is_allowed(&self) -> bool {
        self.caller.may_still(Verb::Acquire, self.target.locks())
    }

    fn may_be_called(&self) -> bool {
        self.caller.may_still(Verb::Callback, self.target.locks())
    }

    fn message(&self, id: RequestId, granted: SystemTime, left: Duration) -> String {
        let ready = LockReady {
            kind: "lock.ready".into(),
            timestamp: humantime::format_rfc3339_millis(granted).to_string(),
            data: LockReadyData {
                id: id.to_string(),
                names: names(&self.target),
                claim_within_ms: left.as_millis() as u64,
            },
        };
        serde_json::to_string(&ready).unwrap_or_default()
    }

    fn callback_ended(&self, result: &Result<(), CallbackError>) {
        if let Err(error) = result {
            tracing::debug!(lock = %self.target.name(), %error, "a callback failed");
        }
        let (outcome, status) = match result {
            Ok(()) => ("delivered", None),
            Err(CallbackError::Status(status)) => ("refused", Some(*status)),
            Err(CallbackError::Unreachable(_) | CallbackError::TimedOut) => ("unreachable", None),
            Err(CallbackError::Busy | CallbackError::NotNeeded) => ("not_sent", None),
        };
        self.record("callback", outcome, status);
    }

    fn ended(&self, end: &DeferredEnd<Refusal>) {
        let outcome = match end {
            DeferredEnd::Claimed => "claimed",
            DeferredEnd::Expired => "expired",
            DeferredEnd::Cancelled => "cancelled",
            DeferredEnd::Revoked => "forbidden",
            DeferredEnd::Refused(refusal) => {
                ApiError::from(Refusal::clone(refusal)).code().as_str()
            }
        };
        self.record("acquire", outcome, None);
    }
}
