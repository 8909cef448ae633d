//! Acquire: one [attempt], and further attempts for as long as a
//! [`RetrySchedule`](attempts::RetrySchedule) asks for them.
//!
//! Safe to cancel: if a future is dropped, every grant that it may have got is released. That
//! release has a deadline of its own.

mod attempt;
mod attempts;
mod backoff;
mod queued;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

pub(crate) use self::attempt::{AcquireParams, Attempt};
use self::attempts::{Retries, until_granted};
use self::queued::{Queued, WakeReason};
use crate::error::LockError;
use crate::model::retry::RetryPolicy;
use crate::model::slots::Slots;
use crate::model::types::{Info, LockName, Owner, Ttl};
use crate::model::validity::Lease;
use crate::node::Keys;
use crate::operations::slots::SlottedLock;
use crate::round::pending_releases::ReleaseAccount;
use crate::shared::Shared;
use crate::wait::WaitRegistry;
use crate::wait::order::{Priority, QueueMode};
use crate::wait::places::PlacePermit;
use crate::wait::ticket::PlaceTerms;

/// The longest wait. Adding an endless patience to an `Instant` would panic.
const MAX_PATIENCE: Duration = Duration::from_secs(365 * 86_400);

/// The waiters of this process. A handoff gives the first waiter an attempt that has already been
/// sent.
pub(crate) type Waiters = WaitRegistry<AcquireParams, Attempt>;

/// The options of an acquire, beside name and TTL.
#[derive(Debug, Clone, Default)]
pub struct AcquireOptions {
    /// Text for people, stored beside the lock.
    pub info: Info,
    /// The owner of the grant.
    pub owner: OwnerChoice,
    /// How long the lock is kept at least, counted from its grant. A release before that time ends
    /// the holder's rights, and nobody gets the lock until then.
    pub hold_at_least: Duration,
    /// Only for a shared owner, whose grant may come from an earlier request: how long that request
    /// may have held the lock. If it has held the lock for longer, this request fails with
    /// [`LockError::HeldTooLong`]. `None` means no limit.
    pub max_hold: Option<Duration>,
    /// How early a waiter is served.
    pub priority: Priority,
    /// Which waiters of the lock wait at the same time.
    pub queue: QueueMode,
    /// How many may hold the lock at once, and how many of these slots the request takes; `None`
    /// for a lock with one holder. All requests for a lock should give the same number of slots:
    /// the largest one that is in use is the bound. Ignored for a set of locks.
    pub slots: Option<Slots>,
}

/// Who owns a grant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OwnerChoice {
    /// The library draws an owner for this request.
    #[default]
    Fresh,
    /// An owner that the caller has drawn for this request alone.
    Drawn(Owner),
    /// The owner of all requests with one idempotency key. If the grant of an earlier request
    /// stands, this request extends it to a full TTL and returns it (see [`Lease::replayed`]).
    Shared(Owner),
}

impl AcquireParams {
    pub(crate) fn new(
        shared: &Shared,
        keys: Keys,
        slotted: Option<Arc<SlottedLock>>,
        ttl: Ttl,
        options: AcquireOptions,
        client: ReleaseAccount,
    ) -> Result<Self, LockError> {
        shared.check_ttl(ttl)?;
        let AcquireOptions { info, owner: choice, hold_at_least, max_hold, .. } = options;
        // A repeated request must be able to return its standing grant, however slow rounds have
        // become.
        if !matches!(choice, OwnerChoice::Shared(_)) {
            shared.check_rounds(ttl)?;
        }
        let entropy = &shared.env.entropy;
        let (owner, nonce) = match choice {
            OwnerChoice::Fresh => entropy.owner_and_nonce(),
            OwnerChoice::Drawn(owner) | OwnerChoice::Shared(owner) => (owner, entropy.nonce()),
        };
        let owner_is_shared = matches!(choice, OwnerChoice::Shared(_));
        let nonce = Some(nonce);
        Ok(Self {
            keys,
            slotted,
            owner,
            nonce,
            owner_is_shared,
            hold_at_least,
            max_hold,
            info,
            ttl,
            client,
        })
    }

    /// Parameters for one lock, or for slots of it.
    pub(crate) fn of_lock(
        shared: &Shared,
        name: &LockName,
        ttl: Ttl,
        options: AcquireOptions,
        client: ReleaseAccount,
    ) -> Result<Self, LockError> {
        let slotted = options.slots.and_then(|slots| SlottedLock::new(shared, name, slots));
        Self::new(shared, shared.keys(name), slotted.map(Arc::new), ttl, options, client)
    }
}

/// Acquires without waiting for a holder.
pub(crate) fn acquire<'a>(
    shared: &'a Arc<Shared>,
    params: AcquireParams,
    policy: Option<&'a RetryPolicy>,
) -> impl Future<Output = Result<Lease, LockError>> + Send {
    until_granted(Retries::new(shared, params, policy))
}

/// A set that was refused by another lock than before, this many times in a row, pauses before it
/// asks again. Votes of nodes that store remains of other attempts may name one lock after another.
const QUICK_MOVES: u32 = 4;
/// The longest such pause.
const MOVE_PAUSE: Duration = Duration::from_millis(100);

/// Acquires all locks of a set, and waits for up to `patience`. Holds none of them while it waits.
/// It waits in the queue of one lock at a time: the one that refused it last. Each time it begins to
/// wait in a queue, it calls `on_wait` with the place of that lock in the set.
pub(crate) async fn acquire_set_within(
    shared: &Arc<Shared>,
    waiters: &Waiters,
    mut params: AcquireParams,
    priority: Priority,
    patience: Duration,
    mut on_wait: impl FnMut(usize) -> Result<(), LockError> + Send,
) -> Result<Lease, LockError> {
    let deadline = Instant::now() + patience.min(MAX_PATIENCE);
    let names: Vec<_> = params.keys.each().map(|keys| keys.lock.clone()).collect();
    let mut moves = 0;
    loop {
        moves += 1;
        let waits_for = names.iter().position(|name| *name == params.keys.lock).unwrap_or_default();
        let mut has_waited = false;
        let begins_to_wait = || {
            has_waited = true;
            on_wait(waits_for)
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let line = (priority, QueueMode::default());
        let attempt = acquire_within(shared, waiters, params.clone(), line, left, begins_to_wait);
        let mut by = match Box::pin(attempt).await {
            Err(LockError::Held(by)) => by,
            result => return result,
        };
        let refused_by = usize::from(by.lock_of_set);
        params.nonce = None;
        params.keys = params.keys.led_by(refused_by);
        if refused_by == 0 || by.is_part_of_own_set || Instant::now() >= deadline {
            let place = names.iter().position(|name| *name == params.keys.lock);
            by.lock_of_set = place.and_then(|at| u8::try_from(at).ok()).unwrap_or_default();
            return Err(LockError::Held(by));
        }
        if !has_waited && moves >= QUICK_MOVES {
            let pause = MOVE_PAUSE.mul_f64(shared.env.entropy.unit());
            sleep_until((Instant::now() + pause).min(deadline)).await;
        }
    }
}

/// Acquires, and waits in the queue of the lock for up to `patience`.
pub(crate) fn acquire_within<T: Into<PlacePermit>>(
    shared: &Arc<Shared>,
    waiters: &Waiters,
    params: AcquireParams,
    (priority, mode): (Priority, QueueMode),
    patience: Duration,
    on_wait: impl FnOnce() -> Result<T, LockError> + Send,
) -> impl Future<Output = Result<Lease, LockError>> + Send {
    let deadline = Instant::now() + patience.min(MAX_PATIENCE);
    let shared_owner = params.owner_is_shared.then_some(params.owner);
    let of_queue = AcquireParams { nonce: None, ..params.clone() };
    let round_limit = shared.round_limits(params.ttl).quorum;
    let is_slotted = params.slotted.is_some();
    let terms = PlaceTerms { shared_owner, round_limit, priority, mode, is_slotted };
    let (ticket, first_try) = waiters.enter(&params.keys.lock, of_queue, terms);
    let on_wait = Some(on_wait);
    let reason = WakeReason::Handed;
    let queued = Queued {
        shared,
        params,
        ticket,
        first_try,
        deadline,
        on_wait,
        is_new: true,
        has_tried: false,
        splits: 0,
        parts: 0,
        reason,
        own_error: None,
        asked_at_end: false,
        is_superseded: false,
        is_no_holder: false,
    };
    until_granted(queued)
}
