//! Acquiring: one [attempt](attempt), and again as long as its [`Pacing`](attempts::Pacing) says.
//!
//! Safe to cancel. A future that is dropped half-way leaves nothing behind: what it may have set is released, on a deadline
//! of its own.

mod attempt;
mod attempts;
mod pauses;
mod queued;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub(crate) use self::attempt::{AcquireParams, Attempt};
use self::attempts::{Retries, until_granted};
use self::queued::Queued;
use crate::error::LockError;
use crate::retry::RetryPolicy;
use crate::shared::Shared;
use crate::types::{Info, LockName, LockToken, Owner, Ttl};
use crate::validity::Lease;
use crate::votes::found;
use crate::wait::WaitRegistry;

/// An `Instant` has an end: a waiter with more patience waits for this long.
const MAX_PATIENCE: Duration = Duration::from_secs(365 * 86_400);

/// The waiters of this process, and the attempts that are handed to them.
pub(crate) type Waiters = WaitRegistry<AcquireParams, Attempt>;

/// What an acquire may say beside name and TTL.
#[derive(Debug, Clone, Default)]
pub struct AcquireOptions {
    /// Text for people, stored beside the lock.
    pub info: Info,
    /// The owner; a fresh random one when `None`. The same owner gets its own lock again, with a larger fencing
    /// token and a full TTL. An attempt with a given owner that fails or is cancelled undoes only what it set on nodes
    /// where that owner had nothing: an earlier attempt may have been promised the rest.
    pub owner: Option<Owner>,
    /// Whether the given owner was drawn for this call alone. Then nobody was promised anything, and an attempt that fails
    /// undoes all it has set, as that of an owner drawn here does. Never for an owner that a repeated request comes to.
    pub owner_is_fresh: bool,
}

impl AcquireParams {
    pub(crate) fn new(shared: &Shared, name: &LockName, ttl: Ttl, options: AcquireOptions) -> Result<Self, LockError> {
        shared.check_ttl(ttl)?;
        let AcquireOptions { info, owner, owner_is_fresh } = options;
        let owner_is_shared = owner.is_some() && !owner_is_fresh;
        let owner = owner.unwrap_or_else(|| shared.seams.entropy.owner());
        Ok(Self { keys: shared.keys(name), owner, owner_is_shared, info, ttl })
    }
}

/// Without waiting for a holder.
pub(crate) fn acquire<'a>(
    shared: &'a Arc<Shared>,
    params: AcquireParams,
    policy: Option<&'a RetryPolicy>,
) -> impl Future<Output = Result<Lease, LockError>> + Send {
    until_granted(Retries::new(shared, params, policy))
}

/// In the queue of the lock.
pub(crate) async fn acquire_within(
    shared: &Arc<Shared>,
    waiters: &Waiters,
    params: AcquireParams,
    patience: Duration,
    on_wait: impl FnOnce() + Send,
) -> Result<Lease, LockError> {
    let lock = &params.keys.lock;
    let deadline = Instant::now() + patience.min(MAX_PATIENCE);
    let behind_others = waiters.is_waited_for(lock);
    let (ticket, first_try) = waiters.enter(lock, params.clone())?;
    // The lock may be its own: then those in the queue wait for it, and it must not wait behind them.
    if params.owner_is_shared
        && behind_others
        && is_stored_for(shared, &params).await
        && let Ok(lease) = Attempt::new(shared, params.clone()).run().await
    {
        return Ok(lease);
    }
    let on_wait = Some(on_wait);
    let queued = Queued { shared, params, ticket, first_try, deadline, on_wait, fresh: true, splits: 0, cause: None };
    until_granted(queued).await
}

/// Whether a node has the lock for its owner.
async fn is_stored_for(shared: &Shared, params: &AcquireParams) -> bool {
    let outcome = shared.inspect(params.keys.clone(), shared.round_limit(params.ttl)).outcome().await;
    let is_ours = |(token, _): (LockToken, _)| *token.owner() == params.owner;
    found(&outcome.votes).any(|holding| holding.record.parse().is_some_and(is_ours))
}
