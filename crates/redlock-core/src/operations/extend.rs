//! Extends a lock, or all locks of a set. After a majority has extended a lock, [repair] sets it
//! again on nodes that lost it.

mod repair;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;
use tokio::time::Instant;

use self::repair::Repair;
use crate::error::LockError;
use crate::model::quorum::Decision;
use crate::model::types::{Info, LockToken, Ttl};
use crate::model::validity::{self, Lease};
use crate::node::{Keys, Op, Record};
use crate::round::votes::not_held;
use crate::round::{Round, WhenMissing};
use crate::shared::{ALL_NODES, Shared};

/// Extends all locks of a set in one round. If that fails, or a node lacks one of the locks, each
/// lock is extended by itself, which repairs it.
pub(crate) async fn extend_set(
    shared: &Arc<Shared>,
    keys: Keys,
    token: &LockToken,
    ttl: Ttl,
) -> Result<Lease, LockError> {
    if keys.others.is_none() {
        return extend(shared, keys, token, ttl).await;
    }
    shared.check_ttl(ttl)?;
    let started = shared.env.clock.monotonic();
    let each = Arc::new(ExtendEach {
        shared: shared.clone(),
        keys: keys.clone(),
        token: *token,
        ttl,
        has_begun: AtomicBool::new(false),
    });
    match ask(shared, keys, token, ttl, started, Some(each.clone() as _)).await {
        // The round says nothing about the other locks after the first that was not extended.
        Err(LockError::Lost | LockError::NotHolder(_) | LockError::Unknown(_)) => {
            each.extend().await
        }
        result => result,
    }
}

/// Extends each lock of a set by itself.
struct ExtendEach {
    shared: Arc<Shared>,
    keys: Keys,
    token: LockToken,
    ttl: Ttl,
    has_begun: AtomicBool,
}

/// How many locks of a set are extended by themselves at the same time.
const EACH_AT_ONCE: usize = 32;

impl ExtendEach {
    /// The lease that ends first, or the first error.
    async fn extend(&self) -> Result<Lease, LockError> {
        let Self { shared, token, ttl, .. } = self;
        let locks = self.keys.each().map(|keys| Keys { others: None, ..keys.clone() });
        let each: Vec<_> = locks.map(|keys| extend(shared, keys, token, *ttl)).collect();
        let mut extended = stream::iter(each).buffer_unordered(EACH_AT_ONCE);
        let mut first: Option<Lease> = None;
        let mut error = None;
        while let Some(result) = extended.next().await {
            match result {
                Ok(lease) => {
                    first = match first {
                        Some(first) if first.ends_before(&lease) => Some(first),
                        Some(_) | None => Some(lease),
                    };
                }
                Err(failed) => drop(error.get_or_insert(failed)),
            }
        }
        match error {
            Some(error) => Err(error),
            None => first.ok_or(LockError::Lost),
        }
    }
}

impl WhenMissing for ExtendEach {
    fn missing(self: Arc<Self>, _: Vec<usize>, _: usize) {
        if !self.has_begun.swap(true, Ordering::Relaxed) {
            tokio::spawn(async move { self.extend().await });
        }
    }
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
    ask(shared, keys, token, ttl, started, repair).await
}

async fn ask(
    shared: &Shared,
    keys: Keys,
    token: &LockToken,
    ttl: Ttl,
    started: Duration,
    when_missing: Option<Arc<dyn WhenMissing>>,
) -> Result<Lease, LockError> {
    let op = Op::Extend { keys, record: Record::new(token, &Info::default()), ttl };
    let limit = shared.round_limit(ttl);
    let round = Round::prepare(shared.quorum, op, limit, &shared.env.observer, when_missing)
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
