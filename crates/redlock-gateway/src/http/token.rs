//! Finds the grant that the token of a request stands for.

use redlock_core::{LockName, LockToken, SlotSet};

use super::access::{Access, LockAccess};
use super::error::ApiError;
use crate::auth::{Caller, Verb};
use crate::gateway::{PresentedToken, ResolvedToken};

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
