//! Acquires a lock, slots of a lock, or a set: from the arguments to the grant. Routes differ in how they
//! name the locks, and in how they deliver the grant.

use std::time::{Duration, Instant};

use axum::response::Response;
use http::{HeaderValue, StatusCode, header};
use redlock_api::headers::{IDEMPOTENCY_REPLAYED, LOCK_TOKEN, PREFERENCE_APPLIED};
use redlock_api::{AcquireBody, HeldLock, Lease, SetLease};
use redlock_core::{HeldBy, LockError, LockName, LockSet, Slots, Ttl};

use super::access::Access;
use super::error::ApiError;
use super::extract::{
    AcquireHead, metadata, requested_hold, requested_priority, requested_queue, requested_slots,
    requested_ttl, stored,
};
use super::render::{grant_response, header_value};
use super::wire;
use crate::auth::Verb;
use crate::config::Limits;
use crate::gateway::{AcquireRequest, GrantGuard, LeaseView, Refusal, Target};
use crate::info::{LockMetadata, label_of};

/// What an acquire asks for, except for the fields of its body.
pub(super) struct Terms {
    pub(super) ttl: Ttl,
    pub(super) wait: Option<Duration>,
    /// The seconds of `Prefer: wait`, if they decide how long the request waits.
    pub(super) applied: Option<u64>,
    pub(super) idempotency_key: Option<String>,
}

impl Terms {
    /// The terms of a request whose answer is the grant.
    pub(super) fn of(
        head: &AcquireHead,
        body: &AcquireBody,
        limits: &Limits,
    ) -> Result<Self, ApiError> {
        let ttl = requested_ttl(body.ttl_ms.as_ref(), limits)?;
        let (wait, applied) = head.wait(body.wait_ms.as_ref(), limits)?;
        Ok(Self { ttl, wait, applied, idempotency_key: head.idempotency_key.clone() })
    }
}

/// The lock of this name, or slots of it, as a body asks.
pub(super) fn lock_or_slots(name: LockName, body: &AcquireBody) -> Result<Target, ApiError> {
    Ok(match requested_slots(body.slots.as_ref(), body.take.as_ref())? {
        None => Target::Lock(name),
        Some(slots) => Target::Slots(name, slots),
    })
}

/// An acquire with checked arguments.
pub(super) struct Asked {
    pub(super) request: AcquireRequest,
    /// The label, which the answer repeats.
    owner: Option<String>,
    applied: Option<u64>,
}

impl Asked {
    /// Checks the rest of the arguments. `started`: when the gateway had the complete request.
    pub(super) fn read(
        access: &Access,
        target: Target,
        terms: Terms,
        body: AcquireBody,
        started: Instant,
    ) -> Result<Self, ApiError> {
        let limits = access.limits();
        let principal = access.caller().principal();
        let hold_at_least = requested_hold(body.hold_at_least_ms.as_ref(), &limits)?;
        let priority = requested_priority(body.priority.as_ref())?;
        let queue = requested_queue(body.queue.as_ref())?;
        let metadata = metadata(body.owner, body.metadata, principal)?;
        let slots = target.slots().map(Slots::count).filter(|count| *count > 1);
        let metadata = LockMetadata { slots, ..metadata };
        access.note(|entry| entry.owner.clone_from(&metadata.owner));
        let Terms { ttl, wait, applied, idempotency_key } = terms;
        let request = AcquireRequest {
            target,
            ttl,
            info: stored(&metadata)?,
            principal: principal.map(Into::into),
            idempotency_key,
            max_hold: limits.max_hold,
            hold_at_least,
            wait,
            on_wait: None,
            is_deferred: false,
            priority,
            queue,
            client: access.client().clone(),
            started,
        };
        Ok(Self { request, owner: metadata.owner, applied })
    }

    /// Passes the gate, and waits for the grant. Ends when `gone` resolves.
    pub(super) async fn acquire(
        self,
        access: &Access,
        gone: impl Future<Output = ()>,
    ) -> Result<Granted, ApiError> {
        let Self { request, owner, applied } = self;
        let target = request.target.clone();
        let mut pass = access.pass(Verb::Acquire, target.locks(), target.count()).await?;
        let acquired = access.gateway().acquire(request, &mut pass.in_flight, gone).await;
        let (view, guard) = acquired.map_err(|refusal| refused(access, &target, refusal))?;
        // If the caller may no longer acquire these locks, the guard is dropped and releases them.
        access.check_again(Verb::Acquire, target.locks())?;
        Ok(Granted { target, view, guard, owner, applied })
    }
}

/// A grant, and what its answer repeats of the request.
pub(super) struct Granted {
    target: Target,
    pub(super) view: LeaseView,
    pub(super) guard: GrantGuard,
    owner: Option<String>,
    applied: Option<u64>,
}

impl Granted {
    /// The lease of one lock. Notes its slots in the audit entry.
    pub(super) fn lease(&mut self, access: &Access) -> Lease {
        let asked = self.target.slots();
        let held = self.view.token.slots();
        if asked.is_some() {
            access.note(|entry| entry.slots = Some(held));
        }
        Lease {
            slots: asked.map(|slots| slots.count().into()),
            slots_held: asked.map(|_| held.iter().map(u32::from).collect()),
            ..wire::lease(self.target.name(), &self.view, self.owner.take())
        }
    }

    /// The answer with the grant.
    pub(super) fn answer(mut self, access: &Access) -> Result<Response, ApiError> {
        let (mut response, token) = match &self.target {
            Target::Set(set) => {
                let lease = set_lease(set, &self.view, self.owner.take());
                (grant_response(StatusCode::CREATED, &lease, Some(self.guard))?, lease.token)
            }
            Target::Lock(_) | Target::Slots(..) => {
                let lease = self.lease(access);
                let mut response = grant_response(StatusCode::CREATED, &lease, Some(self.guard))?;
                // Only slashes are encoded: no other character that a name may have ends a segment of a
                // path.
                let path = format!("/locks/{}", self.target.name().as_str().replace('/', "%2F"));
                response.headers_mut().insert(header::LOCATION, header_value(path)?);
                (response, lease.token)
            }
        };
        let headers = response.headers_mut();
        headers.insert(LOCK_TOKEN.clone(), header_value(token)?);
        if self.view.replayed {
            headers.insert(IDEMPOTENCY_REPLAYED.clone(), HeaderValue::from_static("true"));
        }
        if let Some(seconds) = self.applied {
            headers.insert(PREFERENCE_APPLIED.clone(), header_value(format!("wait={seconds}"))?);
        }
        Ok(response)
    }
}

fn set_lease(set: &LockSet, view: &LeaseView, owner: Option<String>) -> SetLease {
    let lease = wire::lease(&set.names()[0], view, owner);
    SetLease {
        names: set.names().iter().map(ToString::to_string).collect(),
        token: lease.token,
        fencing_token: lease.fencing_token,
        ttl_ms: lease.ttl_ms,
        validity_ms: lease.validity_ms,
        elapsed_ms: lease.elapsed_ms,
        expires_at: lease.expires_at,
        owner: lease.owner,
        nodes_granted: lease.nodes_granted,
        nodes_total: lease.nodes_total,
    }
}

/// The error for a refused acquire. For a set, it names the lock that refused it.
pub(super) fn refused(access: &Access, target: &Target, refusal: Refusal) -> ApiError {
    let (set, by) = match (target, &refusal) {
        (Target::Set(set), Refusal::Lock(LockError::Held(by))) => (set, by.clone()),
        _ => return access.refused_on(target.name(), refusal),
    };
    let name = &set.names()[usize::from(by.lock_of_set).min(set.names().len() - 1)];
    access.refused_on(name, refusal).held(vec![held_lock(name, &by)]).about(name.as_str())
}

fn held_lock(name: &LockName, by: &HeldBy) -> HeldLock {
    HeldLock {
        name: name.to_string(),
        holder: label_of(&by.info),
        expires_in_ms: by.expires_in.map(|left| left.as_millis() as u64),
    }
}
