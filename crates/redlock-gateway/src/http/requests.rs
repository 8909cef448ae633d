//! Requests to acquire that are answered 202 before their grant (`Prefer: respond-async`), and
//! `/requests/{id}`, where a client learns what became of such a request.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::extract::{FromRequestParts, Path};
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{HeaderValue, StatusCode, header};
use redlock_api::headers::PREFERENCE_APPLIED;
use redlock_api::{CallbackState, LockReady, LockReadyData, RequestState, RequestStatus};
use redlock_core::LockName;
use serde_json::Value;

use super::access::{Access, Standing};
use super::asked::{end_parts, note_parts, refused_set};
use super::error::{ApiError, INVALID_CALLBACK, INVALID_PARAMETER};
use super::extract::{AcquireHead, no_query};
use super::openapi::CommonErrors;
use super::render::{header_value, json_response};
use crate::audit::AuditContext;
use crate::auth::Verb;
use crate::callbacks::{CallbackError, CallbackUrl};
use crate::gateway::{
    AcquireRequest, CallbackOutcome, DeferredEnd, DeferredRequest, DeferredStage, GrantNotifier,
    Refusal, RequestId, Target, accept_window,
};
use crate::overload::in_flight::InFlight;

/// Checks the arguments that only a deferred request has. Returns the checked callback URL.
pub(super) fn checked_callback(
    access: &Access,
    head: &AcquireHead,
    callback_url: Option<&Value>,
    names: &[LockName],
) -> Result<Option<CallbackUrl>, ApiError> {
    if head.stream.is_some() {
        let detail =
            "an event stream cannot be deferred; leave out Prefer: respond-async and callback_url";
        return Err(INVALID_PARAMETER.because(detail));
    }
    let Some(url) = callback_url else { return Ok(None) };
    if !head.is_deferred {
        let detail = "callback_url needs the headers Prefer: respond-async and Idempotency-Key";
        return Err(INVALID_CALLBACK.because(detail));
    }
    let Some(url) = url.as_str() else {
        return Err(INVALID_CALLBACK.because("callback_url must be a string"));
    };
    names.iter().try_for_each(|name| access.check_again(Verb::Callback, name).map(drop))?;
    let url = access.gateway().check_callback(url);
    url.map(Some).map_err(|error| INVALID_CALLBACK.because(format!("callback_url: {error}")))
}

/// Answers a deferred request when it waits, or is ready.
pub(super) async fn begin(
    access: &Access,
    request: AcquireRequest,
    in_flight: InFlight,
    callback: Option<CallbackUrl>,
    refused: impl Fn(Refusal) -> ApiError,
) -> Result<Response, ApiError> {
    let (caller, target, audit) = (access.standing(), request.target.clone(), access.audit());
    let notifier = Notifier { caller, target, audit };
    let request = AcquireRequest { ttl: accept_window(&access.limits()), ..request };
    let deferred = access.gateway().defer(request, in_flight, callback, notifier).await;
    let deferred = deferred.map_err(refused)?;
    let mut response = json_response(StatusCode::ACCEPTED, &status(access, &deferred))?;
    let headers = response.headers_mut();
    headers.insert(header::LOCATION, header_value(format!("/requests/{}", deferred.id))?);
    headers.insert(PREFERENCE_APPLIED.clone(), HeaderValue::from_static("respond-async"));
    Ok(response)
}

/// Show a deferred request
///
/// Shows the state of a request that was answered 202. While it is `waiting`, `position` is its
/// place in this gateway's queue. When it is `ready`, claim the lock: repeat the `POST` with the same
/// `Idempotency-Key`, without `Prefer`, at any gateway. An ended request stays visible for up to a
/// minute. With API keys, only the key that sent the request sees it. A gateway knows only its own
/// requests, and forgets them when it restarts; repeating the `POST` is always safe.
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
    note_parts(&access, deferred.target.locks());
    let result = access.check_record(Verb::Release);
    end_parts(&access, &result, StatusCode::NO_CONTENT);
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

/// The error for a refusal of a lock or of a set.
fn refused(access: &Access, target: &Target, refusal: Refusal) -> ApiError {
    match target {
        Target::Lock(name) | Target::Slots(name, _) => access.refused_on(name, refusal),
        Target::Set(set) => refused_set(access, set, refusal),
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
