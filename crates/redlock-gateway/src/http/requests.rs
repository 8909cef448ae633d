//! Requests to acquire that are answered 202 before their grant (`Prefer: respond-async`), and
//! `/requests/{id}`, where a client learns what became of such a request.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::extract::{FromRequestParts, Path};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{HeaderValue, StatusCode, header};
use redlock_api::headers::PREFERENCE_APPLIED;
use redlock_api::{CallbackState, LockReady, LockReadyData, RequestState, RequestStatus};
use redlock_core::LockName;
use serde_json::Value;

use super::access::{Access, Standing};
use super::error::{ApiError, INVALID_CALLBACK, INVALID_PARAMETER, REQUEST_NOT_FOUND};
use super::extract::{AcquireHead, no_query};
use super::openapi::CommonErrors;
use super::render::{header_value, json_response};
use crate::audit::AuditContext;
use crate::auth::Verb;
use crate::callbacks::{CallbackError, CallbackUrl};
use crate::gateway::{
    AcquireRequest, DeferredRequest, End, Follower, Refusal, RequestId, Rung, Stage, Target,
    accept_window,
};
use crate::overload::in_flight::InFlight;

/// Checks the arguments that only a deferred request has. Returns where it is to be announced.
pub(super) fn arguments(
    access: &Access,
    head: &AcquireHead,
    callback_url: Option<&Value>,
    names: &[LockName],
) -> Result<Option<CallbackUrl>, ApiError> {
    if head.is_deferred && head.idempotency_key.is_none() {
        let detail = "Prefer: respond-async needs an Idempotency-Key: you get the lock by repeating the request with \
                      the same key";
        return Err(INVALID_PARAMETER.because(detail));
    }
    let Some(url) = callback_url else { return Ok(None) };
    if !head.is_deferred {
        let detail = "callback_url needs the header Prefer: respond-async; a request without it is answered when it ends";
        return Err(INVALID_CALLBACK.because(detail));
    }
    let Some(url) = url.as_str() else {
        return Err(INVALID_CALLBACK.because("callback_url is no text"));
    };
    names.iter().try_for_each(|name| access.check_again(Verb::Callback, name).map(drop))?;
    let url = access.gateway().check_callback(url);
    url.map(Some).map_err(|error| INVALID_CALLBACK.because(format!("callback_url: {error}")))
}

/// Whether the request claims the lock that an earlier one with the same key was granted. Such a
/// request does not wait.
pub(super) fn takes_claim(access: &Access, request: &mut AcquireRequest) -> bool {
    let AcquireRequest { target, principal, idempotency_key, .. } = &request;
    let key = idempotency_key.as_deref().unwrap_or_default();
    let claims = access.gateway().claims(target, principal.as_deref(), key);
    if claims {
        request.wait = None;
    }
    claims
}

/// Answers a deferred request when it waits, or is ready.
pub(super) async fn begin(
    access: &Access,
    request: AcquireRequest,
    in_flight: InFlight,
    callback: Option<CallbackUrl>,
    refused: impl Fn(Refusal) -> ApiError,
) -> Result<Response, ApiError> {
    let follower = Announcer {
        caller: access.standing(),
        target: request.target.clone(),
        audit: access.audit(),
    };
    let request = AcquireRequest { ttl: accept_window(&access.limits()), ..request };
    let gateway = access.shared_gateway();
    let deferred = gateway.defer(request, in_flight, callback, follower).await.map_err(refused)?;
    let mut response = json_response(StatusCode::ACCEPTED, &status(access, &deferred))?;
    let headers = response.headers_mut();
    headers.insert(header::LOCATION, header_value(format!("/requests/{}", deferred.id))?);
    headers.insert(PREFERENCE_APPLIED.clone(), HeaderValue::from_static("respond-async"));
    Ok(response)
}

/// Follow a deferred request
///
/// What became of a request that was answered 202. While it is `waiting`, `position` is its place in
/// this gateway's queue. When it is `ready`, claim the lock: repeat the `POST` with the same
/// `Idempotency-Key`, without `Prefer`, at any gateway. The end of a request is shown for about a
/// minute. Only the key that sent the request sees it. A gateway knows only its own requests, and
/// forgets them when it restarts; repeating the `POST` is always safe.
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
pub(super) async fn inspect(access: Access, Known(id): Known) -> Result<Response, ApiError> {
    let deferred = found(&access, id)?;
    json_response(StatusCode::OK, &status(&access, &deferred))
}

/// Give up a deferred request
///
/// The request leaves the queue. If its lock is `ready` and was not claimed, the lock is released. A
/// claimed lock stays: release it with its token.
#[utoipa::path(
    delete, path = "/requests/{id}", operation_id = "cancelRequest", tag = "locks",
    params(("id" = String, Path, description = "The id of the request, from the answer 202")),
    responses(
        (status = 204, description = "Given up, or ended already"),
        (status = 400, description = "invalid_parameter"),
        CommonErrors,
        (status = 404, description = "request_not_found: unknown here, sent by another key, or ended some time ago"),
        (status = 503, description = "audit_unavailable"),
    )
)]
pub(super) async fn cancel(access: Access, Known(id): Known) -> Result<Response, ApiError> {
    let deferred = found(&access, id)?;
    access.note(|entry| {
        entry.what = Some("cancel");
        entry.lock = Some(names(&deferred.target).join(" "));
        entry.changes = true;
    });
    access.check_record(Verb::Release)?;
    access.gateway().cancel(&deferred);
    Ok(StatusCode::NO_CONTENT.into_response())
}

fn found(access: &Access, id: Option<RequestId>) -> Result<Arc<DeferredRequest>, ApiError> {
    let principal = access.caller().principal();
    let deferred = id.and_then(|id| access.gateway().deferred(&id, principal));
    deferred.ok_or_else(|| {
        REQUEST_NOT_FOUND.because(
            "this gateway knows no such request of this key: it ended some time ago, another gateway has it, or this one \
             was restarted; repeat the POST with the same Idempotency-Key",
        )
    })
}

/// The id in the path. `None` if it is not of the form of an id.
pub(super) struct Known(Option<RequestId>);

impl<S: Send + Sync> FromRequestParts<S> for Known {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        no_query(&parts.uri)?;
        let text = Path::<String>::from_request_parts(parts, state).await;
        Ok(Self(text.ok().and_then(|Path(text)| text.parse().ok())))
    }
}

fn status(access: &Access, deferred: &DeferredRequest) -> RequestStatus {
    let stage = deferred.stage();
    let (state, claim_within) = match &stage {
        Stage::Begun | Stage::Waiting => (RequestState::Waiting, None),
        Stage::Ready(until) => {
            let left = until.saturating_duration_since(std::time::Instant::now());
            (RequestState::Ready, Some(left))
        }
        Stage::Ended(End::Claimed) => (RequestState::Claimed, None),
        Stage::Ended(End::Expired) => (RequestState::Expired, None),
        Stage::Ended(End::Cancelled) => (RequestState::Cancelled, None),
        Stage::Ended(End::Revoked | End::Refused(_)) => (RequestState::Refused, None),
    };
    let is_waiting = state == RequestState::Waiting;
    let position = is_waiting.then(|| access.gateway().deferred_position(deferred)).flatten();
    let name = deferred.target.name();
    let problem = match stage {
        Stage::Ended(End::Refused(refusal)) => {
            Some(access.refused_on(name, Refusal::clone(&refusal)))
        }
        Stage::Ended(End::Revoked) => access.check_again(Verb::Acquire, name).err(),
        Stage::Begun | Stage::Waiting | Stage::Ready(_) | Stage::Ended(_) => None,
    };
    RequestStatus {
        id: deferred.id.to_string(),
        state,
        names: names(&deferred.target),
        position: position.map(|position| position as u64),
        claim_within_ms: claim_within.map(|left| left.as_millis() as u64),
        callback: deferred.rung().map(|rung| match rung {
            Rung::Delivered => CallbackState::Delivered,
            Rung::Failed => CallbackState::Failed,
        }),
        problem: problem.map(ApiError::problem),
    }
}

fn names(target: &Target) -> Vec<String> {
    target.locks().iter().map(ToString::to_string).collect()
}

/// Announces a grant to its client.
struct Announcer {
    caller: Standing,
    target: Target,
    audit: Option<AuditContext>,
}

impl Follower for Announcer {
    fn is_allowed(&self) -> bool {
        self.caller.may_still(Verb::Acquire, self.target.locks())
    }

    fn may_be_rung(&self) -> bool {
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

    fn rang(&self, result: &Result<(), CallbackError>) {
        if let Err(error) = result {
            tracing::debug!(lock = %self.target.name(), %error, "a callback failed");
        }
        let (outcome, status) = match result {
            Ok(()) => ("delivered", None),
            Err(CallbackError::Status(status)) => ("refused", Some(*status)),
            Err(CallbackError::Unreachable(_)) => ("unreachable", None),
        };
        for name in self.target.locks() {
            self.audit.iter().for_each(|audit| audit.rang(name.as_str(), outcome, status));
        }
    }
}
