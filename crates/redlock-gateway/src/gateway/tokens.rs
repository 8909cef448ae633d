//! Binds owners and tokens to principals, where API keys are in use. The nodes store a token that
//! is derived from the client's token and the client's principal. So a token that was stolen, or
//! read from a node, is useless without an API key of that principal.

use std::borrow::Cow;
use std::sync::Arc;

use redlock_core::{
    LockError, LockName, LockSet, LockState, LockToken, Owner, OwnerChoice, Redlock, SlotSet, Slots,
};

use crate::info::LockMetadata;

/// A token, and the principal that presents it.
#[derive(Debug)]
pub struct PresentedToken {
    pub token: LockToken,
    pub principal: Option<Arc<str>>,
    /// Whether the principal may use tokens of other principals.
    pub may_force: bool,
    /// Whether the token is for a release. Otherwise it is for an extension.
    pub releases: bool,
}

/// A token, and the grant that it stands for.
#[derive(Debug)]
pub struct ResolvedToken {
    /// The token that the client presents.
    pub(super) shown: LockToken,
    /// The token that the nodes store.
    pub(super) known: LockToken,
    /// Whether the grant belongs to another principal.
    pub is_forced: bool,
}

impl ResolvedToken {
    /// A token of a gateway without API keys. The nodes store the token that the client presents.
    pub fn of(token: LockToken) -> Self {
        Self { shown: token, known: token, is_forced: false }
    }

    /// The slots of the grant.
    pub fn slots(&self) -> SlotSet {
        self.known.slots()
    }
}

/// What an acquire asks for.
#[derive(Debug, Clone)]
pub enum Target {
    Lock(LockName),
    /// Slots of a lock with several.
    Slots(LockName, Slots),
    /// All locks of a set. No place in a queue is kept for such a request.
    Set(LockSet),
}

impl Target {
    /// The lock, or the first one of a set.
    pub fn name(&self) -> &LockName {
        match self {
            Self::Lock(name) | Self::Slots(name, _) => name,
            Self::Set(set) => &set.names()[0],
        }
    }

    /// The lock, or all locks of a set.
    pub fn locks(&self) -> &[LockName] {
        match self {
            Self::Lock(name) | Self::Slots(name, _) => std::slice::from_ref(name),
            Self::Set(set) => set.names(),
        }
    }

    /// The slots of the lock, if it has several.
    pub fn slots(&self) -> Option<Slots> {
        match self {
            Self::Slots(_, slots) => Some(*slots),
            Self::Lock(_) | Self::Set(_) => None,
        }
    }

    /// How many locks the masters store for a grant.
    pub fn count(&self) -> usize {
        match self {
            Self::Lock(_) => 1,
            Self::Slots(_, slots) => slots.take().into(),
            Self::Set(set) => set.names().len(),
        }
    }

    /// The name of each of these locks, as the client's use of the masters' memory counts it.
    pub(super) fn counted(&self) -> Cow<'_, [LockName]> {
        match self {
            Self::Lock(name) => counted_slots(name, 1),
            Self::Slots(name, slots) => counted_slots(name, slots.take()),
            Self::Set(set) => Cow::Borrowed(set.names()),
        }
    }
}

/// Names for so many slots of a lock, for the client's use of the masters' memory. Which slots they
/// are does not matter there.
pub(super) fn counted_slots(name: &LockName, count: u16) -> Cow<'_, [LockName]> {
    match count {
        1 => Cow::Borrowed(std::slice::from_ref(name)),
        _ => (1..=count).map(|slot| name.of_slot(slot)).collect(),
    }
}

/// Returns the owner to send to the nodes. If the client will see another owner in its token,
/// returns that one too.
pub(super) fn owner(
    locks: &Redlock,
    cluster: &str,
    lock: &Target,
    principal: Option<&str>,
    idempotency_key: Option<&str>,
) -> (OwnerChoice, Option<Owner>) {
    let derived = idempotency_key.map(|key| derived_owner(cluster, lock, principal, key));
    // The nodes get an owner that is derived from the owner in the client's token and the
    // principal. From the same token, another principal would derive another owner.
    let shown = principal.map(|_| derived.unwrap_or_else(|| locks.fresh_owner()));
    let known = shown.zip(principal).map(|(shown, principal)| shown.bound_to(principal));
    let owner = match (known, derived) {
        (None, None) => OwnerChoice::Fresh,
        (Some(drawn), None) => OwnerChoice::Drawn(drawn),
        (known, Some(derived)) => OwnerChoice::Shared(known.unwrap_or(derived)),
    };
    (owner, shown)
}

/// The owner on the nodes for all requests of this principal with one idempotency key.
pub(super) fn owner_of_key(
    cluster: &str,
    lock: &Target,
    principal: Option<&str>,
    idempotency_key: &str,
) -> Owner {
    let derived = derived_owner(cluster, lock, principal, idempotency_key);
    principal.map_or(derived, |principal| derived.bound_to(principal))
}

/// The owner that the client sees. Every gateway of a cluster derives the same owner from an
/// idempotency key, so a client may send its retry to any gateway.
fn derived_owner(
    cluster: &str,
    lock: &Target,
    principal: Option<&str>,
    idempotency_key: &str,
) -> Owner {
    let principal = principal.unwrap_or("anonymous");
    match lock {
        Target::Lock(name) => Owner::derive(cluster, principal, name, idempotency_key),
        Target::Slots(name, slots) => {
            Owner::derive_of_slots(cluster, principal, (name, *slots), idempotency_key)
        }
        Target::Set(set) => Owner::derive_of_set(cluster, principal, set, idempotency_key),
    }
}

/// Finds the grant that a token stands for. It is a grant of the principal that presents the token.
/// If that principal may use the tokens of others, it may be the grant of the lock's holder.
///
/// With principals, the gateway first reads the lock, except before an extension by a principal
/// that may not use the tokens of others. A token that cannot belong to the principal is not sent
/// to the nodes, because even a refused release changes the lock's token watermark. Otherwise
/// anybody with the release permission could send invented tokens, and so disturb the lock's repair
/// and its fencing tokens.
pub(super) async fn resolve(
    locks: &Redlock,
    name: &LockName,
    presented: PresentedToken,
) -> Result<ResolvedToken, LockError> {
    let PresentedToken { token: shown, principal, may_force, releases } = presented;
    let Some(principal) = principal else { return Ok(ResolvedToken::of(shown)) };
    let own = ResolvedToken { shown, known: shown.bound_to(&principal), is_forced: false };
    // An extension that the nodes refuse changes nothing on them, so it needs no check before.
    if !releases && !may_force {
        return Ok(own);
    }
    let is_of_the_future = shown.fencing().get() > locks.wall_micros();
    let slots = shown.slots();
    let first = slots.iter().next().unwrap_or(1);
    let state = if slots.count() == 1 {
        locks.inspect_slot(name, first).await.state
    } else {
        let last = slots.iter().last().unwrap_or(first);
        let mut holders = locks.inspect_slots(name, last).await.holders;
        holders.retain(|holder| slots.has(holder.slot));
        // All slots that are held must belong to one owner. Otherwise the token has a slot of
        // somebody else in it, and nothing is sent for it.
        let is_mixed = holders.windows(2).any(|two| !two[0].by.has_owner_of(&two[1].by));
        if let Some(foreign) = holders.iter().find(|holder| !holder.by.is_of(&own.known))
            && (is_mixed || !may_force)
        {
            return Err(LockError::NotHolder(foreign.by.clone()));
        }
        holders.into_iter().next().map_or(LockState::Free, |holder| LockState::Held(holder.by))
    };
    match state {
        LockState::Held(by) => {
            // The comparison uses the owner. The text beside the lock also names the principal, but
            // a repair may have lost the text.
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
