//! Extends locks. After a majority has extended a lock, [repair] sets it again on nodes that lost
//! it.
//!
//! An extension begins by asking all nodes, and ends with its outcome. Many extensions may begin
//! before the first outcome is awaited. They then share calls to the nodes. One task awaits them
//! all, so most of them need no timer and no wake-up of their own.

mod repair;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use self::repair::Repair;
use crate::error::LockError;
use crate::model::quorum::Decision;
use crate::model::slots::SlotSet;
use crate::model::types::{Info, LockName, LockToken, Owner, Ttl};
use crate::model::validity::{self, Lease};
use crate::node::{Keys, Op, Record};
use crate::round::votes::not_held;
use crate::round::{Round, WhenMissing};
use crate::shared::{ALL_NODES, Shared};

/// The extension of a lock, or of every slot that its token has. All nodes have been asked.
pub(crate) enum Extension {
    Refused(LockError),
    One(OneExtension),
    Slots(SlotSet, Vec<OneExtension>),
}

impl Extension {
    pub(crate) fn begin(shared: &Shared, name: &LockName, token: &LockToken, ttl: Ttl) -> Self {
        // Recovery stores records that keep a lock free after a loss of data. They have this owner,
        // and anybody can make a token with it.
        if *token.owner() == Owner::NOBODY {
            return Self::Refused(LockError::Lost);
        }
        if let Err(error) = shared.check_ttl(ttl) {
            return Self::Refused(error);
        }
        let keys = shared.keys_of_slots(name, token.slots());
        match token.slots().count() {
            0 | 1 => Self::One(OneExtension::begin(shared, keys, token, ttl)),
            _ => Self::Slots(token.slots(), begin_each(shared, &keys, token, ttl).collect()),
        }
    }

    /// The lease. That of slots ends with the first of them.
    ///
    /// # Errors
    /// If a slot is lost, the lease is lost with it. `on_unused` is then called for each slot that
    /// this call has extended, because nobody will use it. It is called for no other slot: of
    /// those, the token may be invented.
    pub(crate) async fn outcome(
        self,
        shared: &Shared,
        on_unused: impl Fn(u16) + Send,
    ) -> Result<Lease, LockError> {
        match self {
            Self::Refused(error) => Err(error),
            Self::One(one) => one.outcome(shared).await,
            // Boxed, because an unboxed future would make every extension larger.
            Self::Slots(slots, begun) => {
                Box::pin(outcome_of_slots(shared, slots, begun, on_unused)).await
            }
        }
    }
}

async fn outcome_of_slots(
    shared: &Shared,
    slots: SlotSet,
    begun: Vec<OneExtension>,
    on_unused: impl Fn(u16) + Send,
) -> Result<Lease, LockError> {
    let mut first: Option<Lease> = None;
    let (mut lost, mut unknown, mut extended) = (None, None, Vec::new());
    for (slot, one) in slots.iter().zip(begun) {
        match one.outcome(shared).await {
            Ok(lease) => {
                extended.push(slot);
                let ends_first = first.as_ref().is_none_or(|first| lease.ends_before(first));
                first = if ends_first { Some(lease) } else { first };
            }
            Err(error @ (LockError::Lost | LockError::NotHolder(_))) => lost = Some(error),
            Err(error) => unknown = Some(error),
        }
    }
    // A lost slot is certain. An unknown outcome is not.
    if let Some(lost) = lost {
        extended.into_iter().for_each(on_unused);
        return Err(lost);
    }
    match (unknown, first) {
        (None, Some(lease)) => Ok(lease),
        (unknown, _) => Err(unknown.unwrap_or(LockError::Lost)),
    }
}

/// Extends each lock of a set by itself.
pub(crate) async fn extend_each(
    shared: &Shared,
    keys: &Keys,
    token: &LockToken,
    ttl: Ttl,
) -> Vec<(Keys, Result<Lease, LockError>)> {
    let begun: Vec<_> = begin_each(shared, keys, token, ttl).collect();
    let mut results = Vec::with_capacity(begun.len());
    for (keys, one) in keys_of_each(keys).zip(begun) {
        results.push((keys, one.outcome(shared).await));
    }
    results
}

fn begin_each(
    shared: &Shared,
    keys: &Keys,
    token: &LockToken,
    ttl: Ttl,
) -> impl Iterator<Item = OneExtension> {
    keys_of_each(keys).map(move |keys| OneExtension::begin(shared, keys, token, ttl))
}

fn keys_of_each(keys: &Keys) -> impl Iterator<Item = Keys> {
    keys.each().map(|keys| Keys { others: None, ..keys.clone() })
}

/// The extension of one lock or slot.
pub(crate) struct OneExtension {
    token: LockToken,
    ttl: Ttl,
    /// On the clock of leases.
    started: Duration,
    round: Arc<Round>,
}

impl OneExtension {
    fn begin(shared: &Shared, keys: Keys, token: &LockToken, ttl: Ttl) -> Self {
        let started = shared.env.clock.monotonic();
        let repair = shared.settings.node.rules().missing_is_repaired.then(|| {
            Arc::new(Repair {
                nodes: shared.nodes.clone(),
                observer: shared.env.observer.clone(),
                keys: keys.clone(),
                token: *token,
                ttl,
                began_micros: shared.env.clock.wall_micros(),
                not_after: Instant::now() + ttl.duration(),
                until: started
                    + ttl.duration().saturating_sub(validity::drift(
                        ttl.duration(),
                        shared.settings.drift_factor,
                    )),
                clock: shared.env.clock.clone(),
                progress: Default::default(),
            }) as Arc<dyn WhenMissing>
        });
        let op = Op::Extend { keys, record: Record::new(token, &Info::default()), ttl };
        let limits = shared.round_limits(ttl);
        let round = Round::prepare(shared.quorum, op, limits, &shared.env.observer, repair)
            .ask(&shared.nodes, ALL_NODES);
        Self { token: *token, ttl, started, round }
    }

    async fn outcome(self, shared: &Shared) -> Result<Lease, LockError> {
        let Self { token, ttl, started, round } = self;
        let outcome = round.outcome().await;
        match outcome.decision {
            Decision::Yes => {
                let lease = shared.lease(token, ttl, started, &outcome);
                // A majority has extended the lock. But if the answers took too long, nothing can
                // be promised.
                let now = shared.env.clock.monotonic();
                let left = lease.validity(now);
                left.filter(|_| shared.counts(started, now))
                    .map(|_| lease)
                    .ok_or_else(|| LockError::Unknown(shared.reports(&outcome)))
            }
            Decision::No => Err(not_held(shared.quorum, &shared.clear_votes(&round).await)),
            Decision::Neither | Decision::Open => Err(LockError::Unknown(shared.reports(&outcome))),
        }
    }
}
