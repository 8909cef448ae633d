//! What several routes share: reading a request to acquire, finding the grant of a token, and requests
//! about several locks.

use std::time::Instant;

use http::StatusCode;
use redlock_api::{AcquireBody, HeldLock, Lease};
use redlock_core::{HeldBy, LockError, LockName, LockSet, LockToken, SlotSet, Slots};

use super::access::{Access, LockAccess};
use super::error::ApiError;
use super::extract::{
    AcquireHead, metadata, requested_hold, requested_priority, requested_queue, requested_slots,
    requested_ttl, stored,
};
use super::wire::lease;
use crate::audit::AuditPart;
use crate::auth::{Caller, Verb};
use crate::gateway::{AcquireRequest, LeaseView, PresentedToken, Refusal, ResolvedToken, Target};
use crate::info::{LockMetadata, label_of};
use crate::overload::InFlight;

/// Parts of a request to acquire a lock that its answer repeats.
pub(super) struct Asked {
    owner: Option<String>,
    slots: Option<Slots>,
    /// The seconds of `Prefer: wait`, if they decide how long the request waits.
    pub(super) applied: Option<u64>,
}

impl Asked {
    /// Checks the arguments. The caller then charges the key, see [`Asked::charge`].
    pub(super) fn read(
        lock: &LockAccess,
        head: &AcquireHead,
        body: Box<AcquireBody>,
        started: Instant,
    ) -> Result<(AcquireRequest, Self), ApiError> {
        let LockAccess { access, name, .. } = lock;
        // The body may have taken long to arrive, and the key may have been removed meanwhile.
        lock.check_again()?;
        let limits = access.limits();
        let ttl = requested_ttl(body.ttl_ms.as_ref(), &limits)?;
        let (wait, applied) = head.wait(body.wait_ms.as_ref(), &limits)?;
        let hold_at_least = requested_hold(body.hold_at_least_ms.as_ref(), &limits)?;
        let priority = requested_priority(body.priority.as_ref())?;
        let queue = requested_queue(body.queue.as_ref())?;
        let slots = requested_slots(body.slots.as_ref(), body.take.as_ref())?;
        let metadata = metadata(body.owner, body.metadata, access.caller().principal())?;
        let count = slots.map(Slots::count).filter(|count| *count > 1);
        let metadata = LockMetadata { slots: count, ..metadata };
        access.note(|entry| entry.owner.clone_from(&metadata.owner));
        let request = AcquireRequest {
            target: match slots {
                None => Target::Lock(name.clone()),
                Some(slots) => Target::Slots(name.clone(), slots),
            },
            hold_at_least,
            ttl,
            info: stored(&metadata)?,
            principal: access.caller().principal().map(Into::into),
            idempotency_key: head.idempotency_key.clone(),
            max_hold: limits.max_hold,
            wait,
            on_wait: None,
            is_deferred: false,
            priority,
            queue,
            client: access.client().clone(),
            started,
        };
        Ok((request, Self { owner: metadata.owner, slots, applied }))
    }

    /// Charges the client for each slot after the first.
    pub(super) async fn charge(
        &self,
        access: &Access,
        in_flight: &mut InFlight,
    ) -> Result<(), ApiError> {
        let take = self.slots.map_or(1, |slots| slots.take().into());
        if take == 1 {
            return Ok(());
        }
        // Boxed, because an unboxed future would make the future of every request larger.
        Box::pin(async {
            access.charge_locks(take).await?;
            access.widen(in_flight, take).await;
            Ok(())
        })
        .await
    }

    /// The lease of a grant. Notes its slots in the audit entry.
    pub(super) fn lease(self, lock: &LockAccess, view: &LeaseView) -> Lease {
        let held = view.token.slots();
        if self.slots.is_some() {
            lock.access.note(|entry| entry.slots = Some(held));
        }
        Lease {
            slots: self.slots.map(|slots| slots.count().into()),
            slots_held: self.slots.map(|_| held.iter().map(u32::from).collect()),
            ..lease(&lock.name, view, self.owner)
        }
    }
}

/// Notes the slots that a token names in the audit entry.
pub(super) fn note_slots(access: &Access, token: &LockToken) {
    let slots = Some(token.slots()).filter(|slots| *slots != SlotSet::FIRST);
    access.note(|entry| entry.slots = slots);
}

impl LockAccess {
    /// Finds the grant that the token stands for. If the grant belongs to another principal, notes
    /// in the audit entry that the request is forced.
    pub(super) async fn resolve(
        &self,
        caller: &Caller,
        token: LockToken,
    ) -> Result<ResolvedToken, ApiError> {
        let resolved = resolve(&self.access, caller, &self.name, self.verb, token).await?;
        if resolved.is_forced {
            self.access.note(|entry| entry.forces = true);
        }
        Ok(resolved)
    }
}

/// Finds the grant that the token stands for, with what `caller` may do.
pub(super) async fn resolve(
    access: &Access,
    caller: &Caller,
    name: &LockName,
    verb: Verb,
    token: LockToken,
) -> Result<ResolvedToken, ApiError> {
    // The time to hold is in the token, so a client can change it. It is bounded as in a POST.
    let token = if token.hold().is_zero() {
        token
    } else {
        token.holding(token.hold().min(access.limits().max_ttl.duration()))
    };
    let Some(principal) = caller.principal() else { return Ok(ResolvedToken::of(token)) };
    let may_force = caller.may(Verb::Force, name);
    let releases = verb == Verb::Release;
    let presented =
        PresentedToken { token, principal: Some(principal.into()), may_force, releases };
    // Boxed, because an unboxed future would make the future of every request larger.
    let resolved = Box::pin(access.gateway().resolve(name, presented)).await;
    resolved.map_err(|refusal| access.refused_on(name, refusal))
}

/// Notes the locks in the audit entry, as parts of the request.
pub(super) fn note_parts(access: &Access, names: &[LockName]) {
    access.note(|entry| {
        entry.changes = true;
        let part =
            |name: &LockName| AuditPart { lock: Some(name.to_string()), ..AuditPart::default() };
        entry.parts = names.iter().map(part).collect();
    });
}

/// Notes the outcome of the whole request in the audit entry of each lock that has none yet.
pub(super) fn end_parts<T>(access: &Access, result: &Result<T, ApiError>, success: StatusCode) {
    let end = match result {
        Ok(_) => (success.as_u16(), None),
        Err(error) => (error.status().as_u16(), Some(error.code().as_str())),
    };
    access.note(|entry| {
        let open = entry.parts.iter_mut().filter(|part| part.end.is_none());
        open.for_each(|part| part.end = Some(end));
    });
}

/// The error for a refusal of a set, with the lock that refused it.
pub(super) fn refused_set(access: &Access, set: &LockSet, refusal: Refusal) -> ApiError {
    let by = match &refusal {
        Refusal::Lock(LockError::Held(by)) => by.clone(),
        _ => return access.refused_on(&set.names()[0], refusal),
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
