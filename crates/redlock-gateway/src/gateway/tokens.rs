//! Whose grant a token is, and in whose name a lock is asked for. Where there are principals, what a client shows and what the
//! nodes know are two: a token that was stolen, or read from a node, is worth nothing to anybody else.

use std::sync::Arc;

use redlock_core::{LockError, LockName, LockState, LockToken, Owner, OwnerChoice, Redlock};

use crate::info::LockMetadata;

/// A token, and the principal that shows it.
#[derive(Debug)]
pub struct PresentedToken {
    pub token: LockToken,
    pub principal: Option<Arc<str>>,
    /// Whether a token that is bound to somebody else is good enough.
    pub may_force: bool,
    /// Whether it is to release, and not to extend.
    pub releases: bool,
}

/// Whose grant a token is taken for.
#[derive(Debug)]
pub struct ResolvedToken {
    pub(super) shown: LockToken,
    /// As the nodes know it.
    pub(super) known: LockToken,
    /// Whether it is somebody else's than the one who shows it.
    pub is_forced: bool,
}

impl ResolvedToken {
    /// Where there are no principals.
    pub fn of(token: LockToken) -> Self {
        Self { shown: token, known: token, is_forced: false }
    }
}

/// In whose name a lock is asked for, and the owner that the client will show if that is another one.
pub(super) fn owner(
    locks: &Redlock,
    cluster: &str,
    name: &LockName,
    principal: Option<&str>,
    idempotency_key: Option<&str>,
) -> (OwnerChoice, Option<Owner>) {
    let derived = idempotency_key.map(|key| derived_owner(cluster, name, principal, key));
    // The nodes get to know another owner, which only this principal can come to.
    let shown = principal.map(|_| derived.unwrap_or_else(|| locks.fresh_owner()));
    let known = shown.zip(principal).map(|(shown, principal)| shown.bound_to(principal));
    let owner = match (known, derived) {
        (None, None) => OwnerChoice::Fresh,
        (Some(drawn), None) => OwnerChoice::Drawn(drawn),
        (known, Some(derived)) => OwnerChoice::Shared(known.unwrap_or(derived)),
    };
    (owner, shown)
}

/// The owner that the nodes know of all requests of this principal with one idempotency key.
pub(super) fn owner_of_key(
    cluster: &str,
    name: &LockName,
    principal: Option<&str>,
    idempotency_key: &str,
) -> Owner {
    let derived = derived_owner(cluster, name, principal, idempotency_key);
    principal.map_or(derived, |principal| derived.bound_to(principal))
}

/// As the client shows it. All gateways of a cluster derive the same, whichever of them a retry reaches.
fn derived_owner(
    cluster: &str,
    name: &LockName,
    principal: Option<&str>,
    idempotency_key: &str,
) -> Owner {
    Owner::derive(cluster, principal.unwrap_or("anonymous"), name, idempotency_key)
}

/// Whose grant a token is taken for: that of the principal that shows it, or, where it may use the tokens of others,
/// that of the lock's holder.
///
/// Where there are principals the lock is looked at first, and a token that cannot be the principal's is not sent to the
/// nodes: a release leaves its mark on a lock's fence also where it is refused, and neither repair nor fencing tokens
/// are to be at the mercy of everybody who may release some lock.
pub(super) async fn resolve(
    locks: &Redlock,
    name: &LockName,
    presented: PresentedToken,
) -> Result<ResolvedToken, LockError> {
    let PresentedToken { token: shown, principal, may_force, releases } = presented;
    let Some(principal) = principal else { return Ok(ResolvedToken::of(shown)) };
    let own = ResolvedToken { shown, known: shown.bound_to(&principal), is_forced: false };
    // An extension that is refused leaves nothing behind.
    if !releases && !may_force {
        return Ok(own);
    }
    let is_of_the_future = shown.fencing().get() > locks.wall_micros();
    match locks.inspect(name).await.state {
        LockState::Held(by) => {
            // By its owner, not by the text beside it: that may have been lost where the lock was repaired.
            let is_own = by.is_of(&own.known);
            let key = LockMetadata::read(&by.info).key;
            if !is_own && !may_force || is_of_the_future && by.fencing != Some(shown.fencing()) {
                return Err(LockError::NotHolder(by));
            }
            if is_own {
                return Ok(own);
            }
            let is_forced = key.as_deref() != Some(&*principal);
            let known = key.map_or(shown, |key| shown.bound_to(&key));
            Ok(ResolvedToken { known, is_forced, ..own })
        }
        LockState::Free if is_of_the_future => Err(LockError::Lost),
        LockState::Free | LockState::Unknown => Ok(own),
    }
}
