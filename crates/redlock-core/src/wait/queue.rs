//! The waiters of each lock in this process, in the order of arrival, and when the first of them
//! tries.
//!
//! A queue is a state machine behind the mutex of its shard. Nothing here waits, asks a node or
//! draws a random number. The caller chooses the types of a waiter's parameters (`P`) and of an
//! attempt that is handed over (`A`).
//!
//! Invariants, explored under many interleavings by [`shuttle`](https://docs.rs/shuttle)
//! (`interleavings.rs` beside this file):
//! - A waiter is signalled when it becomes the first. A waiter that leaves, for whatever reason,
//!   lets the next one become the first.
//! - At most one attempt of a queue is in flight or about to be handed over. `competing` is the
//!   ticket of the waiter that it is for.
//! - An attempt that was prepared for a waiter that has left is dropped, which undoes it. Only then
//!   is the next waiter woken.
//! - An empty queue does not exist.
//!
//! The first waiter tries at once. It takes one of the limited slots only when it has to wait. So a
//! lock that nobody waits for is tried even when all slots are taken.
//!
//! The first waiter may find no quorum because its rounds have little time. If a waiter behind it
//! has more time for a round, the first waiter goes to the end. So do the waiters directly behind it that would fare
//! little better, because their rounds have less than twice the time of the first waiter's. The
//! waiter that is first then tries at once. If no waiter's rounds have more time, the order stays
//! and the queue backs off as a whole. But a waiter that finds no quorum three times in a row goes
//! to the end in any case.
//!
//! If an earlier request with the same idempotency key appears to hold the lock, the waiter skips
//! the queue and asks for that grant. It does so once each time that another attempt of
//! this queue shows the waiter's owner as the holder.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use hashlink::LinkedHashMap;
use tokio::time::Instant;

use super::sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::error::LockError;
use crate::model::types::Owner;

const SHARDS: usize = 16;

/// If the first attempt after a release or a hint is refused, up to this many further attempts
/// follow quickly. The first one may reach some nodes before the release does, or meet the remains
/// of another attempt.
pub(super) const QUICK: u32 = 3;
/// After this many attempts in a row without a quorum, the first waiter goes to the end, even if no
/// waiter's rounds have more time.
const MAX_FAILURES: u32 = 3;

pub(super) type Shard<P, A> = HashMap<Bytes, WaitQueue<P, A>>;

/// All queues of one process.
pub(crate) struct WaitQueues<P, A> {
    shards: Box<[Mutex<Shard<P, A>>]>,
    /// Without a random seed, so that `interleavings.rs` can replay an exploration. Names that
    /// somebody chooses to collide only make shards uneven.
    hasher: BuildHasherDefault<DefaultHasher>,
    pub(super) bounds: Bounds,
    pub(super) next_ticket: AtomicU64,
    /// All waiters in all queues.
    pub(super) entered: AtomicUsize,
    /// The waiters with a slot, and the locks that they wait for.
    pub(super) waiters: AtomicUsize,
    pub(super) locks: AtomicUsize,
}

/// How many requests may wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) total: usize,
    pub(crate) per_lock: usize,
}

/// The queue of one lock.
pub(super) struct WaitQueue<P, A> {
    pub(super) waiters: LinkedHashMap<u64, Waiter<P, A>>,
    /// How many waiters have a slot.
    pub(super) slots_taken: usize,
    /// The ticket whose attempt is in flight or about to be handed over.
    pub(super) competing: Option<u64>,
    /// Set if the lock was released during the attempt in flight, whose votes are then outdated.
    pub(super) released_meanwhile: Option<Cause>,
    /// When the first waiter tries next if nothing happens before, and why.
    pub(super) next_try: Instant,
    pub(super) cause: Cause,
    /// When a poll is due, whichever waiter is first then.
    pub(super) poll_due: Instant,
    pub(super) quick_left: u32,
    /// Attempts in a row without a quorum.
    pub(super) failures: u32,
    /// Attempts in a row that followed no release or hint and found the lock held.
    pub(super) in_vain: u32,
    /// The nodes' last refusal and its time; `None` once a waiter here has got the lock since.
    pub(super) last_refusal: Option<(LockError, Instant)>,
    /// The token of the last release that a hint announced.
    pub(super) last_hint: u64,
    /// The owner that holds the lock, as far as is known.
    pub(super) holder: Option<Owner>,
    /// The number of waiters with an owner that comes from an idempotency key. Other requests may
    /// have the same owner.
    pub(super) shared_owners: usize,
    /// How long the last attempt of this queue took.
    pub(super) round: Duration,
}

pub(super) struct Waiter<P, A> {
    pub(super) params: P,
    /// The waiter's number in the order of the queue.
    pub(super) number: u64,
    /// Whether the waiter has a slot, and so counts for the bounds.
    pub(super) has_slot: bool,
    /// How long the waiter's rounds may take.
    pub(super) round_limit: Duration,
    /// This waiter's attempts in a row without a quorum.
    pub(super) failures: u32,
    /// The owner, if other requests may ask for it.
    pub(super) shared_owner: Option<Owner>,
    /// The waiter's owner appears to hold the lock, and the waiter has not asked for that grant
    /// since.
    pub(super) owner_holds: bool,
    pub(super) handed: Option<A>,
    pub(super) waker: Option<Waker>,
    pub(super) signalled: bool,
}

/// Why the first waiter makes its next attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The waiter entered an empty queue, or a poll is due.
    Poll,
    /// Another gateway announced a release.
    Hint,
    /// The lock was released here, too late for the attempt in flight.
    Release,
}

/// How long a queue leaves its lock to other gateways: this many times the length of its own
/// rounds, but at least `least` and at most `most`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pause {
    pub(crate) rounds: f64,
    pub(crate) least: Duration,
    pub(crate) most: Duration,
}

impl<P, A> WaitQueues<P, A> {
    pub(crate) fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self {
            shards: (0..SHARDS).map(|_| Mutex::new(HashMap::new())).collect(),
            hasher: BuildHasherDefault::new(),
            bounds,
            next_ticket: AtomicU64::new(0),
            entered: AtomicUsize::new(0),
            waiters: AtomicUsize::new(0),
            locks: AtomicUsize::new(0),
        })
    }

    /// The number of waiters and of the locks they wait for.
    pub(crate) fn count(&self) -> (usize, usize) {
        (self.waiters.load(Ordering::Relaxed), self.locks.load(Ordering::Relaxed))
    }

    pub(crate) fn is_waited_for(&self, lock: &Bytes) -> bool {
        self.entered.load(Ordering::Relaxed) > 0 && self.shard(lock).contains_key(lock)
    }

    /// Another gateway announced a release of this lock with the token `t`.
    pub(crate) fn wake(&self, lock: &Bytes, t: u64, now: Instant) {
        self.update(lock, |queue| {
            // Every node publishes the same hint. The first one counts. A repeated one counts only
            // after a refusal: the node that refused may have released the lock since.
            if t < queue.last_hint || t == queue.last_hint && queue.last_refusal.is_none() {
                return None;
            }
            queue.last_hint = t;
            queue.clear_holder();
            queue.quick_left = QUICK;
            if queue.competing.is_some() {
                queue.released_meanwhile = Some(Cause::Hint);
                return None;
            }
            queue.schedule(Cause::Hint, now)
        });
    }

    pub(super) fn shard(&self, lock: &Bytes) -> MutexGuard<'_, Shard<P, A>> {
        let at = self.hasher.hash_one(lock) as usize % SHARDS;
        self.shards[at].lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Changes the queue of a lock, if there is one. The returned waker is called after the shard
    /// is unlocked.
    pub(super) fn update(
        &self,
        lock: &Bytes,
        change: impl FnOnce(&mut WaitQueue<P, A>) -> Option<Waker>,
    ) {
        if self.entered.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut shard = self.shard(lock);
        let wake = shard.get_mut(lock).and_then(change);
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
    }

    /// A release that was planned at `since` has been sent, and handed the lock to nobody here. If
    /// the first waiter was refused since then, or has an attempt in flight, it may have asked the
    /// nodes before the release, and tries again.
    pub(super) fn released(&self, lock: &Bytes, since: Instant, now: Instant) {
        self.update(lock, |queue| {
            if queue.competing.is_some() {
                queue.released_meanwhile = Some(Cause::Release);
                return None;
            }
            if queue.last_refusal.as_ref().is_none_or(|(_, refused)| *refused < since) {
                return None;
            }
            queue.quick_left = QUICK;
            queue.schedule(Cause::Release, queue.next_try.min(now))
        });
    }

    /// Removes a waiter from its queue. Returns the attempt that was handed to it, which the caller
    /// must drop while no shard is locked.
    pub(super) fn remove(
        &self,
        lock: &Bytes,
        ticket: u64,
        change: impl FnOnce(&mut WaitQueue<P, A>),
    ) -> Option<A> {
        let mut shard = self.shard(lock);
        let queue = shard.get_mut(lock)?;
        let was_first = queue.is_first(ticket);
        let waiter = queue.waiters.remove(&ticket)?;
        queue.shared_owners -= usize::from(waiter.shared_owner.is_some());
        if waiter.has_slot {
            queue.slots_taken -= 1;
            self.locks.fetch_sub(usize::from(queue.slots_taken == 0), Ordering::Relaxed);
            self.waiters.fetch_sub(1, Ordering::AcqRel);
        }
        change(queue);
        let wake = if queue.waiters.is_empty() {
            shard.remove(lock);
            None
        } else if was_first {
            queue.signal_first()
        } else {
            None
        };
        drop(shard);
        self.entered.fetch_sub(1, Ordering::AcqRel);
        wake.into_iter().for_each(Waker::wake);
        waiter.handed
    }
}

impl<P, A> WaitQueue<P, A> {
    pub(super) fn new(first_try: Instant, first_poll: Instant) -> Self {
        Self {
            waiters: LinkedHashMap::new(),
            slots_taken: 0,
            competing: None,
            released_meanwhile: None,
            next_try: first_try,
            cause: Cause::Poll,
            poll_due: first_poll,
            quick_left: 0,
            failures: 0,
            in_vain: 0,
            last_refusal: None,
            last_hint: 0,
            holder: None,
            shared_owners: 0,
            round: Duration::from_millis(1),
        }
    }

    pub(super) fn is_first(&self, ticket: u64) -> bool {
        self.waiters.front().is_some_and(|(first, _)| *first == ticket)
    }

    /// The first waiter tries at this time. Returns its waker.
    pub(super) fn schedule(&mut self, cause: Cause, at: Instant) -> Option<Waker> {
        self.in_vain = 0;
        (self.cause, self.next_try) = (cause, at);
        self.signal_first()
    }

    /// The lock is released: no owner is known to hold it, so no waiter asks for its own grant.
    pub(super) fn clear_holder(&mut self) {
        if self.holder.take().is_some() && self.shared_owners > 0 {
            self.waiters.iter_mut().for_each(|(_, waiter)| waiter.owner_holds = false);
        }
    }

    /// Notes the holder of the lock. Waiters with the same owner will ask for its grant. Returns
    /// their wakers, to be called after the shard is unlocked.
    pub(super) fn held_by(&mut self, holder: Option<Owner>) -> Vec<Waker> {
        self.holder = holder;
        if holder.is_none() || self.shared_owners == 0 {
            return Vec::new();
        }
        let own = self
            .waiters
            .iter_mut()
            .map(|(_, waiter)| waiter)
            .filter(|waiter| waiter.shared_owner == holder);
        own.filter_map(|waiter| {
            (waiter.owner_holds, waiter.signalled) = (true, true);
            waiter.waker.take()
        })
        .collect()
    }

    /// The first waiter has found no quorum. Returns whether the next waiter, now the first, may
    /// fare better.
    pub(super) fn let_others_pass(&mut self, next_number: impl Fn() -> u64) -> bool {
        let longest =
            self.waiters.iter().map(|(_, waiter)| waiter.round_limit).max().unwrap_or_default();
        let Some((_, first)) = self.waiters.iter_mut().next() else { return false };
        first.failures += 1;
        let own = first.round_limit;
        if own >= longest {
            if first.failures >= MAX_FAILURES {
                first.failures = 0;
                self.move_first_to_end(next_number());
            }
            return false;
        }
        // The next first waiter's limit is at least twice this one, or the longest. So the longest
        // limit is reached after few attempts, however many different limits there are.
        let enough = longest.min(own * 2);
        while self.waiters.front().is_some_and(|(_, waiter)| waiter.round_limit < enough) {
            self.move_first_to_end(next_number());
        }
        true
    }

    fn move_first_to_end(&mut self, number: u64) {
        let Some((ticket, mut waiter)) = self.waiters.pop_front() else { return };
        waiter.number = number;
        self.waiters.insert(ticket, waiter);
    }

    /// Returns a waker, to be called after the shard is unlocked.
    pub(super) fn signal_first(&mut self) -> Option<Waker> {
        let (_, first) = self.waiters.iter_mut().next()?;
        first.signalled = true;
        first.waker.take()
    }
}
