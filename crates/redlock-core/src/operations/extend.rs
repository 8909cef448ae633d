//! Extends a lock, or all locks of a set. After a majority has extended a lock, [repair] sets it
//! again on nodes that lost it.

mod repair;

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::time::Instant;

use self::repair::Repair;
use crate::error::LockError;
use crate::model::quorum::Decision;
use crate::model::types::{Info, LockName, LockToken, Ttl};
use crate::model::validity::{self, Lease};
use crate::node::{Keys, Op, Record};
use crate::round::votes::not_held;
use crate::round::{Round, WhenMissing};
use crate::shared::{ALL_NODES, Shared};

/// Extends every slot that the token has. The lease ends with the first of them.
///
/// # Errors
/// If a slot is lost, the lease is lost with it. `on_unused` is then called for each slot that this
/// call has extended, because nobody will use it. It is called for no other slot: of those, the
/// token may be invented.
pub(crate) async fn extend_slots(
    shared: &Shared,
    name: &LockName,
    token: &LockToken,
    ttl: Ttl,
    on_unused: impl Fn(u16) + Send,
) -> Result<Lease, LockError> {
    let mut first: Option<Lease> = None;
    let (mut lost, mut unknown, mut extended) = (None, None, Vec::new());
    let keys = shared.keys_of_slots(name, token.slots());
    let results = extend_each(shared, &keys, token, ttl).await;
    for (slot, (_, result)) in token.slots().iter().zip(results) {
        match result {
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
    let locks = keys.each().map(|keys| Keys { others: None, ..keys.clone() });
    let extended = locks.map(|keys| async move {
        let result = extend(shared, keys.clone(), token, ttl).await;
        (keys, result)
    });
    join_all(extended).await
}

pub(crate) async fn extend(
    shared: &Shared,
    keys: Keys,
    token: &LockToken,
    ttl: Ttl,
) -> Result<Lease, LockError> {
    shared.check_ttl(ttl)?;
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
                + ttl
                    .duration()
                    .saturating_sub(validity::drift(ttl.duration(), shared.settings.drift_factor)),
            clock: shared.env.clock.clone(),
            progress: Default::default(),
        }) as Arc<dyn WhenMissing>
    });
    let op = Op::Extend { keys, record: Record::new(token, &Info::default()), ttl };
    let limits = shared.round_limits(ttl);
    let round = Round::prepare(shared.quorum, op, limits, &shared.env.observer, repair)
        .ask(&shared.nodes, ALL_NODES);
    let outcome = round.outcome().await;
    match outcome.decision {
        Decision::Yes => {
            let lease = shared.lease(*token, ttl, started, &outcome);
            // A majority has extended the lock. But if the answers took too long, nothing can be
            // promised.
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
