//! The lock handlers: typed arguments in, one gateway call, render.

use std::time::Instant;

use axum::response::{IntoResponse, Response};
use http::StatusCode;
use redlock_api::{AcquireBody, ExtendBody, Lease, LockList, LockStatus};
use redlock_core::types::NameError;
use redlock_core::{HeldBy, LockError, LockName, LockState, SlotSet};

use super::access::{Access, LockAccess};
use super::acquire::{Asked, Terms, lock_or_slots};
use super::error::{ApiError, INVALID_NAME};
use super::extract::{
    AcquireHead, ExtendHead, InspectQuery, Json, ListQuery, ReleaseBy, StreamHead, requested_ttl,
};
use super::hold;
use super::openapi::{BodyErrors, CommonErrors, LockPath};
use super::render::{grant_response, json_response};
use super::token::note_slots;
use super::watch;
use super::wire::{lease, lock_list, lock_status};
use crate::auth::Verb;
use crate::gateway::{LeaseView, ListRequest, Refusal, Target};
use crate::info::label_of;

/// A reading of this many slots counts as one request with the masters. With 256, one client with 48
/// connections left another client 4 % of its acquires; with 48, 21 %; with 16, 39 % (debug build,
/// three masters, two cores). A master took 358 µs to read 256 slots and 78 µs to grant a lock.
const READ_AS_ONE: u16 = 16;

/// Acquire a lock
///
/// 201 when a majority of the nodes granted the lock; 409 when the lock is held. With `wait_ms` the
/// request waits for the lock in a queue. Each gateway has a queue of its own for the lock, and
/// serves it by `priority`, then in order of arrival. With `wait_ms`, 409 `lock_held` means that
/// the wait ended without a grant. If the request had an `Idempotency-Key`, this gateway then keeps its place in the queue for
/// `queue_place_expires_ms`: the next request with the same key and a `wait_ms` takes the place up
/// again. The place is also kept when the client disconnects.
/// When too many requests wait already, the gateway still tries once if no other request waits at
/// this gateway for the same lock; if the lock is held, the answer is 429. Without `wait_ms` the
/// gateway tries again only when several contenders divided the nodes' votes so that none got a
/// majority: a few times, within milliseconds. When the client disconnects before the answer, the
/// request leaves the queue, and a lock that was granted to it is released.
///
/// With `Accept: text/event-stream` the answer is a stream of events, and the gateway extends the
/// lock while the stream is open. With a `Lock-Token`, the stream continues an existing hold.
///
/// `POST /requests` waits without a connection. Then this operation, with the `Idempotency-Key` of
/// that request, claims the lock.
///
/// With `slots`, a lock has that number of slots, and each slot has one holder. The request takes
/// `take` of the slots, all or none. Give the same `slots` in every request for a lock: the largest
/// number in use is the bound. A request without `slots` asks for slot 1. At one gateway, a waiter
/// for few slots does not pass a waiter for many. The token names the slots, so `PATCH` and `DELETE`
/// need no other field. A request that takes N slots counts as N requests in the rate of the key, and
/// as N locks in the client's share of the masters' memory.
#[utoipa::path(
    post, path = "/locks/{name}", operation_id = "acquireLock", tag = "locks",
    params(
        LockPath,
        ("Idempotency-Key" = Option<String>, Header, nullable = false, description = "16 to 255 visible characters. While the grant stands, a repeated request with the same key gets it again: the same token and fencing token, with a full TTL from now, and the header Idempotency-Replayed.", min_length = 16, max_length = 255, pattern = "^[!-~]+$"),
        ("Prefer" = Option<String>, Header, nullable = false, description = "`wait=SECONDS`, an alias of wait_ms; the body takes precedence. The answer has Preference-Applied."),
    ),
    request_body(content = AcquireBody, description = "May be omitted."),
    responses(
        (status = 201, description = "Granted", body = Lease, headers(
            ("Location" = String, description = "Path of the lock"),
            ("Lock-Token" = String, description = "The token, as in the body"),
            ("Cache-Control" = String, description = "no-store"),
            ("Idempotency-Replayed" = String, description = "true, when an earlier request with the same Idempotency-Key was granted the lock"),
            ("Preference-Applied" = String, description = "wait=SECONDS, if Prefer set the wait"),
        ), examples(
            ("single" = (summary = "A lock with one holder", value = json!({
                "name": "reports/nightly", "token": "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
                "fencing_token": 1763725165123456u64, "ttl_ms": 30000, "validity_ms": 29696, "elapsed_ms": 1,
                "expires_at": "2025-11-21T11:39:54.822Z", "owner": "nightly-report on host-7",
                "nodes_granted": 3, "nodes_total": 5
            }))),
            ("slots" = (summary = "Two of a lock's four slots", value = json!({
                "name": "ci/runners", "token": "2-0-5.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
                "fencing_token": 1763725165123456u64, "ttl_ms": 30000, "validity_ms": 29696, "elapsed_ms": 1,
                "expires_at": "2025-11-21T11:39:54.822Z", "owner": "build 4711",
                "nodes_granted": 3, "nodes_total": 5, "slots": 4, "slots_held": [1, 3]
            })))
        )),
        (status = 400, description = "invalid_name, invalid_ttl (also if asking the masters now takes longer than a tenth of the TTL), invalid_wait, invalid_body, invalid_parameter"),
        CommonErrors,
        BodyErrors,
        (status = 409, description = "lock_held: Retry-After, retry_after_ms, holder, acquired_at, expires_in_ms, with slots holders, and with wait_ms queue_position and queue_place_expires_ms; superseded: the request has queue newest, and a newer one waits instead; max_hold_reached: an earlier request with the same Idempotency-Key has held it for too long"),
        (status = 429, description = "too_many_waiters (in all, for this lock, or of this client), rate_limited, quota_exceeded"),
        (status = 503, description = "quorum_unavailable: nothing is held; outcome_unknown: an earlier request with the same Idempotency-Key may hold it, try again; draining, overloaded, audit_unavailable"),
    )
)]
pub(super) async fn acquire(
    lock: LockAccess,
    mut head: AcquireHead,
    Json(body): Json<Box<AcquireBody>>,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    let LockAccess { access, name, verb } = lock;
    let resumes = head.stream.as_ref().is_some_and(|stream| !matches!(stream.token, Ok(None)));
    // A stream that continues a hold takes nothing else from the body.
    let body = match resumes {
        true => Box::new(AcquireBody { ttl_ms: body.ttl_ms, ..AcquireBody::default() }),
        false => body,
    };
    let terms = Terms::of(&head, &body, &access.limits())?;
    let target = lock_or_slots(name, &body)?;
    let asked = Asked::read(&access, target, terms, *body, started)?;
    if let Some(stream) = head.stream.take() {
        let name = asked.request.target.name().clone();
        let lock = LockAccess { access, name, verb };
        // Boxed, because an unboxed future would make the future of every request larger.
        return Box::pin(hold::begin(lock, head, asked, stream.token?)).await;
    }
    asked.acquire(&access, head.client_gone()).await?.answer(&access)
}

/// Extend a lock
///
/// The lock lives at least `ttl_ms` from now; its life is never shortened. 200 proves that the
/// token has held the lock without a gap. After 404 or 409 stop the work. After 503
/// `outcome_unknown`, the deadline of the last successful answer still stands.
#[utoipa::path(
    patch, path = "/locks/{name}", operation_id = "extendLock", tag = "locks",
    params(
        LockPath,
        ("Lock-Token" = String, Header, description = "The token that acquiring the lock returned, bare or as <token>", pattern = r"^(1|2-[1-9][0-9]{0,7}|2-(0|[1-9][0-9]{0,7})-([2-9a-f]|[1-9a-f][0-9a-f]{1,63}))\.[1-8][0-9]{15}\.[0-9a-f]{40}$"),
    ),
    request_body = ExtendBody,
    responses(
        (status = 200, description = "Extended", body = Lease),
        (status = 400, description = "invalid_name, invalid_ttl, invalid_body, invalid_parameter, missing_token, invalid_token"),
        CommonErrors,
        BodyErrors,
        (status = 404, description = "lock_not_found: free or expired, or, for a key that may neither acquire nor inspect, held by somebody else; stop the work"),
        (status = 409, description = "not_holder: somebody else holds it; max_hold_reached"),
        (status = 503, description = "outcome_unknown: the old deadline stands; overloaded, audit_unavailable"),
    )
)]
pub(super) async fn extend(
    lock: LockAccess,
    ExtendHead(token): ExtendHead,
    Json(body): Json<ExtendBody>,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    let LockAccess { access, name, .. } = &lock;
    note_slots(access, &token);
    let limits = access.limits();
    let ttl = requested_ttl(body.ttl_ms.as_ref(), &limits)?;
    let pass = lock.pass(token.slots().count().into()).await?;
    let token = lock.resolve(&pass.caller, token).await?;
    let before = started.elapsed();
    let extended =
        access.gateway().extend(name, &token, ttl, limits.max_hold, access.client()).await;
    let view = extended.map_err(|refusal| lock.refused(refusal))?;
    let view = LeaseView { elapsed: before + view.elapsed, ..view };
    let waiters = Some(access.gateway().line_length(name) as u64);
    grant_response(StatusCode::OK, &Lease { waiters, ..lease(name, &view, None) }, None)
}

/// Release a lock
///
/// 204 means that no majority of the masters stores the grant any more, and that this request has
/// deleted it on at least one master. 204 does not show that the lock was yours until now: while
/// masters fail, one copy may outlive the lock. A second release usually gets 404, which a retry may
/// count as success. With `force=true` instead of a token, the request takes the lock from whoever holds it. The
/// former holder learns this only when it next extends or releases the lock. Until then, only a
/// resource that checks fencing tokens refuses its writes.
///
/// A client that gave up before the answer to its `POST` has no token. It sends the
/// `Idempotency-Key` of that `POST` instead, and the gateway releases every grant of that key,
/// whichever gateway made it. After that, a command of the `POST` that is still on its way to a
/// node can no longer set the lock. Before the release, end the `POST`: a gateway that still works
/// on the `POST` may grant the lock afterwards. The answer is 404 when no grant of the key holds
/// the lock or keeps it free (`hold_at_least_ms`). The request also gives up the place in the queue
/// that this gateway keeps for the key. If the `POST` had `slots` and `take`, send the same numbers
/// in the query. With a `Lock-Token` or `force=true`, the gateway ignores the key.
#[utoipa::path(
    delete, path = "/locks/{name}", operation_id = "releaseLock", tag = "locks",
    params(
        LockPath,
        ("Lock-Token" = Option<String>, Header, nullable = false, description = "The token that acquiring the lock returned, bare or as <token>. Required without force and Idempotency-Key.", pattern = r"^(1|2-[1-9][0-9]{0,7}|2-(0|[1-9][0-9]{0,7})-([2-9a-f]|[1-9a-f][0-9a-f]{1,63}))\.[1-8][0-9]{15}\.[0-9a-f]{40}$"),
        ("force" = Option<bool>, Query, nullable = false, description = "Release the lock whoever holds it, without a token. Needs a key with the force permission."),
        ("slot" = Option<u32>, Query, nullable = false, description = "With force=true: which slot of the lock to release. Without it, slot 1, which is the lock itself.", minimum = 1, maximum = 256),
        ("slots" = Option<u32>, Query, nullable = false, description = "With an Idempotency-Key: `slots` of the POST, if it had any.", minimum = 1, maximum = 256),
        ("take" = Option<u32>, Query, nullable = false, description = "With an Idempotency-Key: `take` of the POST, if it had any.", minimum = 1, maximum = 256),
        ("Idempotency-Key" = Option<String>, Header, nullable = false, description = "The key of the POST, for a client that never got the token. Ignored beside a Lock-Token or force=true.", min_length = 16, max_length = 255, pattern = "^[!-~]+$"),
    ),
    responses(
        (status = 204, description = "Released"),
        (status = 400, description = "invalid_name, invalid_parameter, missing_token, invalid_token"),
        CommonErrors,
        (status = 404, description = "lock_not_found: released or expired, or, for a key that may neither acquire nor inspect, held by somebody else"),
        (status = 409, description = "not_holder: somebody else holds it"),
        (status = 429, description = "rate_limited; quota_exceeded: the masters' memory is short, and releases of this client that found no lock fill it"),
        (status = 503, description = "outcome_unknown: try again; overloaded, audit_unavailable"),
    )
)]
pub(super) async fn release(lock: LockAccess, by: ReleaseBy) -> Result<Response, ApiError> {
    let LockAccess { access, name, .. } = &lock;
    let pass = lock.pass(by.cost()).await?;
    match by {
        ReleaseBy::Token(token) => {
            note_slots(access, &token);
            let token = lock.resolve(&pass.caller, token).await?;
            let released = access.gateway().release(name, &token, access.client()).await;
            released.map_err(|refusal| lock.refused(refusal))?;
        }
        ReleaseBy::IdempotencyKey(key, slots) => {
            let whose = (access.caller().principal(), key.as_str());
            let target = match slots {
                None => Target::Lock(name.clone()),
                Some(slots) => Target::Slots(name.clone(), slots),
            };
            // Boxed, because an unboxed future would make the future of every request larger.
            let released =
                Box::pin(access.gateway().release_by_key(name, &target, whose, access.client()))
                    .await;
            released.map_err(|refusal| lock.refused(refusal))?;
        }
        ReleaseBy::Force(slot) => {
            if slot != 1 {
                access.note(|entry| entry.slots = SlotSet::new([slot]));
            }
            let found = |by: &HeldBy| {
                access.note(|entry| {
                    entry.owner = label_of(&by.info);
                    entry.is_sent = true;
                });
            };
            let client = access.client();
            let released =
                Box::pin(access.gateway().force_release((name, slot), client, found)).await;
            released.map_err(|refusal| match refusal {
                Refusal::Lock(LockError::NotHolder(by)) => {
                    ApiError::not_forced(&by, access.caller().may(Verb::Inspect, name))
                }
                refusal => lock.refused(refusal),
            })?;
        }
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Inspect a lock
///
/// Shows what a majority of the nodes stores, but never the token, and who waits for the lock at
/// this gateway, in order. The waiters of other gateways are not shown. If the lock has slots, all
/// its holders are shown. For people and dashboards only: the state may have changed before the
/// answer arrives.
///
/// With `Accept: text/event-stream` the answer is a stream of events. The first is a `snapshot`,
/// which has the usual answer without `nodes` and `may_force`. Then come `held`, `extended`,
/// `released`, `expired`, `forced` and `waiters`. Changes by this gateway appear at once, changes by
/// others within about a second.
#[utoipa::path(
    get, path = "/locks/{name}", operation_id = "getLock", tag = "locks",
    params(
        LockPath,
        ("slots" = Option<u32>, Query, nullable = false, description = "How many slots to read. Without it, all 256 that a lock can have; with it the masters read fewer.", minimum = 1, maximum = 256),
    ),
    responses(
        (status = 200, description = "The lock: held, free or unknown", body = LockStatus, examples(
            ("single" = (summary = "A lock with one holder, and a waiter", value = json!({
                "name": "reports/nightly", "state": "held", "owner": "nightly-report on host-7", "metadata": { "run": "4711" },
                "fencing_token": 1763725165123456u64, "expires_in_ms": 21400, "acquired_at": "2025-11-21T11:39:25.123Z",
                "nodes": [{ "node": "10.0.0.1:6379", "state": "held" }],
                "waiters": [{ "owner": "hourly-report on host-3", "waiting_since": "2025-11-21T11:39:31.456Z", "is_away": false }],
                "waiters_total": 1
            }))),
            ("slots" = (summary = "A lock with four slots: one request holds slots 1 and 3, another holds slot 4", value = json!({
                "name": "ci/runners", "state": "held", "owner": "build 4711",
                "fencing_token": 1763725165123456u64, "expires_in_ms": 21400, "acquired_at": "2025-11-21T11:39:25.123Z",
                "slots": 4,
                "holders": [
                    { "slot": 1, "holder": "build 4711", "fencing_token": 1763725165123456u64, "expires_in_ms": 21400, "acquired_at": "2025-11-21T11:39:25.123Z" },
                    { "slot": 3, "holder": "build 4711", "fencing_token": 1763725165123456u64, "expires_in_ms": 21400, "acquired_at": "2025-11-21T11:39:25.123Z" },
                    { "slot": 4, "holder": "build 4712", "fencing_token": 1763725168823456u64, "expires_in_ms": 25100, "acquired_at": "2025-11-21T11:39:28.823Z" }
                ],
                "nodes": [{ "node": "10.0.0.1:6379", "state": "held" }]
            })))
        )),
        (status = 400, description = "invalid_name, invalid_parameter"),
        CommonErrors,
        (status = 503, description = "overloaded"),
    )
)]
pub(super) async fn inspect(
    lock: LockAccess,
    InspectQuery(slots): InspectQuery,
    StreamHead(stream): StreamHead,
) -> Result<Response, ApiError> {
    if let Some(stream) = stream {
        return watch::of_lock(&lock, slots, stream.last);
    }
    let LockAccess { access, name, .. } = &lock;
    let _pass = lock.pass(slots.div_ceil(READ_AS_ONE).into()).await?;
    // Boxed, because an unboxed future would make the future of every request larger.
    let inspection = Box::pin(access.gateway().inspect(name, slots)).await;
    let waiters = access.gateway().waiters(name);
    let is_foreign = inspection.holders.len() < 2
        && matches!(&inspection.state, LockState::Held(by) if by.is_foreign);
    let status = lock_status(name, inspection, waiters, access.sees_nodes());
    let may_force = Some(!is_foreign && access.caller().may(Verb::Force, name));
    json_response(StatusCode::OK, &LockStatus { may_force, ..status })
}

/// List held locks
///
/// A page of the held locks, merged from all nodes, in no particular order. The gateway reads for a
/// few seconds at most, so a page may have fewer locks than asked for, or none, although others
/// follow. The next page continues where this one ended. Locks that are acquired, released or
/// repaired during the listing may be missed or repeated. If more new locks appear between two
/// pages than one page holds, the listing may not come to an end: use a larger `limit`.
///
/// A key sees the locks that it may list. For those that it may inspect, it also sees the holder
/// and the length of this gateway's queue. Two listings of all clients run at a time. Others
/// wait for their turns, for 5 s at most. A second listing of one client is answered 429.
///
/// With `Accept: text/event-stream` the answer is a stream of events about the locks with this
/// prefix. The first is a `snapshot` with the held locks. Their changes follow. `limit` and `cursor`
/// are ignored.
#[utoipa::path(
    get, path = "/locks", operation_id = "listLocks", tag = "locks",
    params(ListQuery),
    responses(
        (status = 200, description = "A page", body = LockList),
        (status = 400, description = "invalid_parameter"),
        CommonErrors,
        (status = 503, description = "quorum_unavailable, overloaded"),
    )
)]
pub(super) async fn list(
    access: Access,
    query: ListQuery,
    StreamHead(stream): StreamHead,
) -> Result<Response, ApiError> {
    if let Some(stream) = stream {
        return watch::of_prefix(&access, query.prefix, stream.last);
    }
    let _pass = access.pass(Verb::List, &[], 1).await?;
    // A slot is listed for a key that may list its lock.
    let is_listed = |name: &LockName| access.caller().may(Verb::List, &name.lock_and_slot().0);
    let request = ListRequest {
        client: access.client(),
        principal: access.caller().principal(),
        prefix: &query.prefix,
        limit: usize::from(query.limit),
        cursor: query.cursor(),
    };
    let page = access
        .gateway()
        .list(request, is_listed)
        .await
        .map_err(|refusal| access.refused(refusal).of_listing())?;
    let shows = |name: &_| access.caller().may(Verb::Inspect, name);
    let line_length = |name: &_| access.gateway().line_length(name);
    json_response(StatusCode::OK, &lock_list(page, line_length, shows))
}

/// The answer to `/locks/` without a name.
pub(super) async fn no_name() -> ApiError {
    INVALID_NAME.because(NameError::Empty.to_string())
}
