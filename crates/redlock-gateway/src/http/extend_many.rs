//! `PATCH /locks`: one request extends many locks, each as if it came in a request of its own.

use std::iter::Enumerate;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use std::vec;

use axum::extract::Request;
use axum::response::Response;
use futures_util::future::poll_fn;
use futures_util::stream::{self, FuturesUnordered, Stream, StreamExt};
use http::StatusCode;
use redlock_api::{ExtendManyBody, ExtendManyResults, ExtendResult, LeaseRef};
use redlock_core::{LockName, LockToken, Ttl};
use tokio_util::sync::ReusableBoxFuture;

use super::access::{Access, lock_name};
use super::error::{ApiError, ErrorReport, INVALID_BODY, INVALID_NAME, INVALID_TOKEN};
use super::extract::{Json, no_query, requested_ttl, token_in};
use super::gate::Pass;
use super::openapi::{BodyErrors, CommonErrors};
use super::render::large_response;
use super::token::resolve;
use super::wire::json_line;
use crate::audit::AuditPart;
use crate::auth::{Verb, holds_secret};
use crate::gateway::ResolvedToken;
use crate::overload::in_flight::InFlight;
use crate::overload::large_messages::{COVERED, LargePermit};

/// Limit on the leases of one request.
const MAX_LEASES: usize = 1_000;
/// Limit on the body, in bytes. A lease with the longest name takes about 340.
const MAX_BODY: usize = 512 * MAX_LEASES;
/// Limit on the leases of one request that wait for admission, and on those that are being
/// extended. The client's share may allow fewer.
const LEASES_AT_ONCE: usize = 256;
/// Bytes that a lease takes in the answer, beside its name.
const LEASE_BYTES: usize = 512;
/// Leases are extended together as long as they have no more slots than this in all.
const SLOTS_AT_ONCE: usize = 64;

/// Extend many locks
///
/// Extends up to 1000 locks, each independently of the others. The answer is 200 even if some or
/// all extensions fail: read the `status` of each result. The results are in the order of the
/// request. Each lease counts as one request for the key's rate, the permissions and the audit
/// record. A lease beyond the rate has the status 429. When the client disconnects before the
/// answer, some leases may have been extended.
#[utoipa::path(
    patch, path = "/locks", operation_id = "extendLocks", tag = "locks",
    request_body = ExtendManyBody,
    responses(
        (status = 200, description = "One result for each lease", body = ExtendManyResults),
        (status = 400, description = "invalid_ttl, invalid_body, invalid_parameter"),
        CommonErrors,
        BodyErrors,
        (status = 503, description = "audit_unavailable"),
    )
)]
pub(super) async fn extend_many(access: Access, request: Request) -> Result<Response, ApiError> {
    let started = Instant::now();
    access.note(|entry| entry.changes = true);
    access.check_record(Verb::Extend)?;
    no_query(request.uri())?;
    // Clients decide how slowly they send a request and read its answer. So both count by their bytes.
    let mut memory = Memory { access: &access, permit: None, bytes: COVERED };
    let grows = |size| memory.reserve(size);
    let Json(body) = Json::<ExtendManyBody, MAX_BODY>::read(request, grows).await?;
    let limits = access.limits();
    let ttl = requested_ttl(body.ttl_ms.as_ref(), &limits)?;
    let leases = requested(body.leases)?;
    let of_names = leases.iter().map(|lease| lease.name.len()).sum::<usize>();
    memory.reserve(of_names + leases.len() * LEASE_BYTES)?;
    let Memory { mut permit, bytes, .. } = memory;
    if access.is_recorded() {
        let lock = |lease: &RequestedLease| Some(lease.checked.as_ref().ok()?.0.to_string());
        let part = |lease| AuditPart { lock: lock(lease), ..AuditPart::default() };
        access.note(|entry| entry.parts = leases.iter().map(part).collect());
    }
    let (access, max_hold) = (&access, limits.max_hold);
    let mut results: Vec<_> = admission(access, leases)
        .flat_map(|leases| stream::iter(parts(leases, Admitted::slots)))
        .map(|leases| extend(access, leases, ttl, max_hold, started))
        .buffer_unordered(LEASES_AT_ONCE / SLOTS_AT_ONCE)
        .concat()
        .await;
    results.sort_unstable_by_key(|(index, _)| *index);
    let results = results.into_iter().map(|(_, result)| result).collect();
    let line = json_line(&ExtendManyResults { results }).map_err(ApiError::internal)?;
    // The locks are extended, so the answer cannot be refused. Results may repeat long labels of holders.
    if let Some(permit) = &mut permit {
        permit.count_more(line.len().saturating_sub(bytes));
    }
    Ok(large_response(StatusCode::OK, line, permit))
}

/// The memory of one request, with its answer.
struct Memory<'a> {
    access: &'a Access,
    /// `None` while the cost of the connection covers it.
    permit: Option<LargePermit>,
    bytes: usize,
}

impl Memory<'_> {
    /// Takes as much more memory as the request needs for `bytes` in all.
    fn reserve(&mut self, bytes: usize) -> Result<(), ApiError> {
        if bytes <= self.bytes {
            return Ok(());
        }
        let more = (bytes - self.bytes).next_multiple_of(COVERED);
        let (pool, client) = (self.access.gateway().large_requests(), self.access.client());
        let has_grown = match &mut self.permit {
            Some(permit) => pool.grow(permit, more),
            permit => {
                *permit = pool.take(&client.large_requests, more);
                permit.is_some()
            }
        };
        if !has_grown {
            return Err(ApiError::no_memory_for_request(bytes));
        }
        self.bytes += more;
        Ok(())
    }
}

/// A lease of the request.
struct RequestedLease {
    /// The name as the answer repeats it: empty if it contains a secret.
    name: String,
    checked: Result<(LockName, LockToken), ApiError>,
}

/// Checks the number of leases, and each lease by itself.
///
/// # Errors
/// The list is empty, or has more than [`MAX_LEASES`] leases. An invalid lease fails alone, in its
/// result.
fn requested(leases: Vec<LeaseRef>) -> Result<Vec<RequestedLease>, ApiError> {
    if !(1..=MAX_LEASES).contains(&leases.len()) {
        let count = leases.len();
        return Err(INVALID_BODY
            .because(format!("leases has {count} entries; allowed are 1 to {MAX_LEASES}")));
    }
    let check = |LeaseRef { name, token }| {
        let checked = checked(&name, &token);
        let is_shown = checked.is_ok() || !holds_secret(&name);
        RequestedLease { name: if is_shown { name } else { String::new() }, checked }
    };
    Ok(leases.into_iter().map(check).collect())
}

fn checked(name: &str, token: &str) -> Result<(LockName, LockToken), ApiError> {
    if holds_secret(name) {
        let detail = "`name` contains an API key or a lock token; send the lock's name";
        return Err(INVALID_NAME.because(detail));
    }
    let token = token_in(token).ok_or_else(|| {
        INVALID_TOKEN.because(
            "`token` is not a token of this service; send the token from the answer to the POST",
        )
    })?;
    Ok((lock_name(name)?, token))
}

/// Streams the admitted leases in parts. The leases of a part are admitted at the same time.
fn admission(access: &Access, leases: Vec<RequestedLease>) -> impl Stream<Item = Vec<Admitted>> {
    let leases = leases.into_iter().enumerate();
    let admission = Admission { access, leases, waiting: FuturesUnordered::new(), unused: None };
    stream::unfold(admission, |mut admission| async {
        // A part is small, and the task waits for each part. So tokio's budget is switched off.
        let part = poll_fn(|cx| admission.poll_part(cx));
        let part = tokio::task::unconstrained(part).await;
        (!part.is_empty()).then_some((part, admission))
    })
}

/// The admission of a request's leases. Most leases are admitted without waiting. They share one
/// allocation for their futures.
struct Admission<'a> {
    access: &'a Access,
    leases: Enumerate<vec::IntoIter<RequestedLease>>,
    /// The leases that wait.
    waiting: FuturesUnordered<ReusableBoxFuture<'a, Admitted>>,
    /// The allocation of the last lease that did not wait.
    unused: Option<ReusableBoxFuture<'a, Admitted>>,
}

impl<'a> Admission<'a> {
    /// The next part: the leases that are admitted now. The part after the last lease is empty.
    ///
    /// The order is free. An admitted lease keeps its client's places until it is extended. If it
    /// first waited for an earlier lease, and the earlier lease waited for a place, neither would
    /// end.
    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Vec<Admitted>> {
        let mut part = Vec::new();
        while part.len() < SLOTS_AT_ONCE
            && let Poll::Ready(Some(admitted)) = self.waiting.poll_next_unpin(cx)
        {
            part.push(admitted);
        }
        while part.len() < SLOTS_AT_ONCE
            && self.waiting.len() < LEASES_AT_ONCE
            && let Some((index, lease)) = self.leases.next()
        {
            let access = self.access;
            let admission = async move {
                let RequestedLease { name, checked } = lease;
                Admitted { index, name, lease: admit(access, index, checked).await }
            };
            let mut admission = match self.unused.take() {
                Some(mut unused) => {
                    unused.set(admission);
                    unused
                }
                None => ReusableBoxFuture::new(admission),
            };
            match admission.poll(cx) {
                Poll::Ready(admitted) => {
                    part.push(admitted);
                    self.unused = Some(admission);
                }
                Poll::Pending => self.waiting.push(admission),
            }
        }
        if part.is_empty() && !self.waiting.is_empty() { Poll::Pending } else { Poll::Ready(part) }
    }
}

/// A lease of the request, after its admission.
struct Admitted {
    index: usize,
    /// The name as the answer repeats it.
    name: String,
    lease: Result<(InFlight, LockName, ResolvedToken), ApiError>,
}

impl Admitted {
    fn slots(&self) -> usize {
        self.lease.as_ref().map_or(0, |(_, _, token)| token.slots().count().into())
    }
}

/// Splits leases, so that no part has more than [`SLOTS_AT_ONCE`] slots, except a single lease. The
/// results and places of a part do not wait for the next part.
fn parts<T>(leases: Vec<T>, slots_of: impl Fn(&T) -> usize) -> Vec<Vec<T>> {
    let mut parts = vec![Vec::new()];
    let mut slots = 0;
    for lease in leases {
        slots += slots_of(&lease);
        if slots > SLOTS_AT_ONCE && parts.last().is_some_and(|part| !part.is_empty()) {
            parts.push(Vec::new());
            slots = slots_of(&lease);
        }
        parts.last_mut().expect("a part").push(lease);
    }
    parts
}

/// Waits until the lease may be extended.
async fn admit(
    access: &Access,
    index: usize,
    checked: Result<(LockName, LockToken), ApiError>,
) -> Result<(InFlight, LockName, ResolvedToken), ApiError> {
    // The route counted the first lease.
    if index > 0 {
        access.count_another().await?;
    }
    let (name, token) = checked?;
    let Pass { in_flight, caller } = access.pass_lease(&name, token.slots().count().into()).await?;
    let token = resolve(access, &caller, &name, Verb::Extend, token).await?;
    if token.is_forced {
        access.note(|entry| entry.parts[index].forces = true);
    }
    Ok((in_flight, name, token))
}

/// An extended lease.
struct Extended {
    validity: Duration,
    /// Time from the start of the request until the validity was computed.
    elapsed: Duration,
    waiters: usize,
}

/// Extends the leases that were admitted. Returns each result with the lease's index.
async fn extend(
    access: &Access,
    admitted: Vec<Admitted>,
    ttl: Ttl,
    max_hold: Duration,
    started: Instant,
) -> Vec<(usize, ExtendResult)> {
    let mut permits = Vec::with_capacity(admitted.len());
    let mut leases = Vec::with_capacity(admitted.len());
    let rest: Vec<_> = admitted
        .into_iter()
        .map(|Admitted { index, name, lease }| {
            let refused = lease.map(|(in_flight, lock, token)| {
                permits.push(in_flight);
                leases.push((lock, token));
            });
            (index, name, refused.err())
        })
        .collect();
    // Taken ahead of the extension, so `elapsed` is never too large.
    let before = started.elapsed();
    let extended = access.gateway().extend_many(&leases, ttl, max_hold, access.client()).await;
    let mut extended = leases.iter().zip(extended);
    let result_of = |(index, name, refused): (usize, String, Option<ApiError>)| {
        let extended = match refused {
            Some(error) => Err(error),
            None => {
                let ((lock, _), extended) = extended.next().expect("a result for each lease");
                let waiters = access.gateway().line_length(lock);
                extended.map_err(|refusal| access.refused_on(lock, refusal)).map(|view| Extended {
                    validity: view.validity,
                    elapsed: before + view.elapsed,
                    waiters,
                })
            }
        };
        let extended = extended.map_err(|error| (error.report(), started.elapsed()));
        let end = extended.as_ref().map_or_else(
            |(error, _)| (error.problem.status, Some(error.code.as_str())),
            |_| (StatusCode::OK.as_u16(), None),
        );
        access.note(|entry| entry.parts[index].end = Some(end));
        (index, result(name, extended))
    };
    rest.into_iter().map(result_of).collect()
}

/// The result for one lease. A failure has the time from the start of the request until then.
fn result(name: String, extended: Result<Extended, (ErrorReport, Duration)>) -> ExtendResult {
    let failed = match extended {
        Ok(Extended { validity, elapsed, waiters }) => {
            return ExtendResult {
                name,
                status: StatusCode::OK.as_u16(),
                code: None,
                detail: None,
                holder: None,
                retry_after_ms: None,
                // Both times are rounded down, which can only shorten the time that a client
                // trusts.
                validity_ms: Some(validity.as_millis() as u32),
                waiters: Some(waiters as u64),
                elapsed_ms: elapsed.as_millis() as u64,
            };
        }
        Err(failed) => failed,
    };
    let (ErrorReport { problem, cause, .. }, elapsed) = failed;
    if let Some(cause) = cause {
        tracing::error!(code = problem.code, cause, "the extension of one of many locks failed");
    }
    ExtendResult {
        name,
        status: problem.status,
        code: Some(problem.code),
        detail: Some(problem.detail),
        holder: problem.holder,
        retry_after_ms: problem.retry_after_ms,
        validity_ms: None,
        waiters: None,
        elapsed_ms: elapsed.as_millis() as u64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_with_many_slots_are_extended_apart() {
        let split = |slots: &[usize]| parts(slots.to_vec(), |slots| *slots);
        assert_eq!(
            split(&[256, 1, 1, 62, 1, 64, 0]),
            [vec![256], vec![1, 1, 62], vec![1], vec![64, 0]]
        );
        assert_eq!(split(&[1; 65]).iter().map(Vec::len).collect::<Vec<_>>(), [64, 1]);
    }
}
