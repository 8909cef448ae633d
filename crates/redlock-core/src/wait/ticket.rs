//! A waiter's place in the queue of a lock: enter, ask what to do, report the outcome, leave.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::handoff::{Handoff, Next};
use super::order::{Priority, QueueMode, taken_up};
use super::places::PlacePermit;
use super::polls::Polls;
use super::queue::{Bounds, Cause, Leave, Left, QUICK, Shard, WaitQueue, WaitQueues, Waiter};
use super::sync::{Arc, Ordering};
use crate::error::{LinePlace, LockError, WaitLimit};
use crate::model::types::Owner;
use crate::node::hint::NewestWaiter;

/// What a waiter may do now.
#[derive(Debug)]
pub(crate) enum Step<A> {
    /// Wait to be signalled: another waiter is first, or an attempt of this queue is in flight.
    Wait,
    /// The waiter is first: wait to be signalled, until this time at most.
    WaitUntil(Instant),
    /// The waiter is first, and the lock may be free. Leave it to a waiter between two turns until
    /// this time.
    Defer(Instant),
    /// The waiter is first: make an attempt, and report its outcome.
    Attempt(Cause),
    /// The waiter is first, and this attempt has been sent for it.
    Handed(A),
    /// The waiter's owner appears to hold the lock: ask for that grant. If it is confirmed, leave
    /// with it; otherwise wait on.
    AskForOwn,
    /// A newer waiter of the same kind began to wait: leave.
    Superseded,
}

/// Whether a waiter may make an attempt. [`Step::AskForOwn`] does not depend on this.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MayTry {
    No,
    /// When an attempt of the queue is due, if no waiter between two turns is before it.
    InOrder,
    /// At once, if the queue makes no pause for other gateways, and no waiter between two turns is
    /// before it. The attempt need not be due.
    AtEnd,
    /// At once, if the queue makes no pause for other gateways.
    Now,
}

/// What a waiter demands of its place in the queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlaceTerms {
    /// The owner, if other requests may ask for the same owner.
    pub(crate) shared_owner: Option<Owner>,
    /// How long the waiter's rounds may take.
    pub(crate) round_limit: Duration,
    pub(crate) priority: Priority,
    pub(crate) mode: QueueMode,
    /// Whether the lock has several slots. An earlier request of the owner may hold one although
    /// others hold the rest, so such a waiter asks for that grant before it waits.
    pub(crate) is_slotted: bool,
}

/// A place in a queue. Dropping the ticket leaves the queue.
pub(crate) struct WaitTicket<P, A> {
    queues: Arc<WaitQueues<P, A>>,
    lock: Bytes,
    ticket: u64,
    mode: QueueMode,
    has_left: bool,
}

/// The result of an attempt that did not get the lock.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) error: LockError,
    /// When to try again if nothing happens.
    pub(crate) retry: Instant,
    /// When to try again if quick attempts are left, see [`QUICK`].
    pub(crate) quick: Instant,
    /// When a poll is due.
    pub(crate) poll_due: Instant,
    pub(crate) round: Duration,
    /// Whether too few nodes answered, or answered too late.
    pub(crate) without_quorum: bool,
}

/// The facts that decide the pause before the next attempt of a queue.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Standing {
    /// Locks with waiters in this process.
    pub(crate) locks: usize,
    /// Attempts in a row without a quorum.
    pub(crate) failures: u32,
    /// Attempts in a row that followed no release or hint and found the lock held.
    pub(crate) in_vain: u32,
}

impl Standing {
    pub(crate) fn polls(self) -> Polls {
        Polls::of(self.locks)
    }
}

/// The result of an attempt that got the lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Success {
    /// The new holder's owner, if other requests may share it.
    pub(crate) shared_owner: Option<Owner>,
    /// When the lock ends unless it is released.
    pub(crate) ends: Instant,
    pub(crate) round: Duration,
}

impl<P, A> WaitQueues<P, A> {
    /// Enters the queue of a lock, without a slot: at the end of its priority, or at the place that
    /// is kept for the owner. In an empty queue the first attempt is due at `first_try` and the next poll at
    /// `first_poll`.
    pub(crate) fn enter(
        self: &Arc<Self>,
        lock: Bytes,
        params: P,
        terms: PlaceTerms,
        (now, first_try, first_poll): (Instant, Instant, Instant),
    ) -> WaitTicket<P, A> {
        self.entered.fetch_add(1, Ordering::AcqRel);
        let PlaceTerms { shared_owner, round_limit, priority, mode, is_slotted } = terms;
        let mut shard = self.shard(&lock);
        let Shard { queues, places } = &mut *shard;
        let queue =
            queues.entry(lock.clone()).or_insert_with(|| WaitQueue::new(first_try, first_poll));
        // The ticket is drawn while the shard is locked, because new waiters of a queue must be in
        // the order of their tickets.
        let arrival = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let ticket = priority.number(arrival);
        let kept = shared_owner.and_then(|owner| {
            self.with_places(places, &lock, now, |places| {
                let (number, place) = places.take(&owner)?;
                Some((taken_up(number, place.priority, priority), place))
            })
        });
        let (number, since, mut arrival, permit) = match kept {
            // Only arrivals of the kind `Newest` can be compared between gateways.
            Some((number, place)) if mode == QueueMode::Newest && place.mode != mode => {
                (number, place.since, arrival, place.permit)
            }
            Some((number, place)) => (number, place.since, place.arrival, place.permit),
            None => (ticket, now, arrival, None),
        };
        let is_holder = shared_owner.is_some() && shared_owner == queue.holder;
        let may_hold = shared_owner.is_some() && is_slotted && !queue.waiters.is_empty();
        let mut is_superseded = false;
        if mode == QueueMode::Newest
            && let Some(owner) = shared_owner
        {
            is_superseded = !is_holder && self.was_superseded(places, &lock, &owner, now);
            arrival = arrival.min(queue.arrival_of_copy(owner).unwrap_or(arrival));
        }
        if mode == QueueMode::Newest && !is_superseded {
            queue.newest.push(ticket);
        }
        queue.shared_owners += usize::from(shared_owner.is_some());
        let waiter = Waiter {
            params,
            ticket,
            priority,
            mode,
            is_slotted,
            since,
            arrival,
            is_superseded,
            permit,
            has_slot: false,
            round_limit,
            failures: 0,
            shared_owner,
            owner_holds: is_holder || may_hold,
            handed: None,
            waker: None,
            signalled: false,
        };
        queue.insert(number, Box::new(waiter));
        if is_slotted && queue.is_first(ticket) {
            // The slots that are too few for the waiters behind it may do for this one.
            queue.next_try = queue.next_try.min(first_try);
        }
        let next_arrival = || self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let mut next = None;
        if !is_superseded && queue.let_newcomer_pass(now, next_arrival) {
            queue.next_try = queue.next_try.min(first_try);
            next = queue.signal_first();
        }
        drop(shard);
        next.into_iter().for_each(Waker::wake);
        WaitTicket { queues: self.clone(), lock, ticket, mode, has_left: false }
    }
}

impl<P, A> WaitTicket<P, A> {
    /// The waiter's number in the order of the queue.
    pub(crate) fn number(&self) -> Option<u64> {
        let shard = self.queues.shard(&self.lock);
        let queue = shard.queues.get(&self.lock)?;
        let number = queue.number_of(self.ticket);
        queue.waiters.contains_key(&number).then_some(number)
    }

    /// Begins to wait, if there is a free slot.
    pub(crate) fn take_slot(&self) -> Result<(), LockError> {
        let Bounds { total, per_lock } = self.queues.bounds;
        let mut shard = self.queues.shard(&self.lock);
        let Some(queue) = shard.queues.get_mut(&self.lock) else { return Ok(()) };
        let slots_taken = queue.slots_taken;
        let Some(waiter) = queue.waiter_mut(self.ticket).filter(|waiter| !waiter.has_slot) else {
            return Ok(());
        };
        let one_more = |count: usize| (count < total).then_some(count + 1);
        if self.queues.waiters.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more).is_err()
        {
            return Err(LockError::TooManyWaiters { max: total, limit: WaitLimit::All });
        }
        if slots_taken >= per_lock {
            self.queues.waiters.fetch_sub(1, Ordering::AcqRel);
            return Err(LockError::TooManyWaiters { max: per_lock, limit: WaitLimit::OfLock });
        }
        waiter.has_slot = true;
        queue.slots_taken += 1;
        self.queues.locks.fetch_add(usize::from(slots_taken == 0), Ordering::Relaxed);
        Ok(())
    }

    /// The request has begun to wait: older waiters are superseded, if this one is of the kind
    /// [`QueueMode::Newest`].
    pub(crate) fn supersede_older(&self, now: Instant) {
        if self.mode == QueueMode::Newest {
            self.queues.supersede_older(&self.lock, self.ticket, now);
        }
    }

    /// Makes the first waiter ask at once if this waiter has [`QueueMode::Newest`]. The refusal
    /// publishes a hint that names the newest waiter. `is_useful`: whether anybody may need the hint.
    pub(crate) fn announce(&self, now: Instant, is_useful: impl FnOnce() -> bool) {
        if self.mode == QueueMode::Newest && is_useful() {
            self.queues.update(&self.lock, |queue, _| {
                // An attempt may be in flight. Or the queue may pause, because votes are missing or
                // the lock is left to other gateways. Then a later attempt sends the hint.
                let is_held = matches!(queue.last_refusal, Some((LockError::Held(_), _)));
                let is_paused = queue.pause_ends.is_some_and(|end| end > now);
                if queue.competing.is_some() || !is_held || is_paused || queue.next_try <= now {
                    return None;
                }
                queue.next_try = now;
                queue.signal_first()
            });
        }
    }

    /// Returns the newest waiter with [`QueueMode::Newest`] that has begun to wait.
    pub(crate) fn newest(&self) -> Option<NewestWaiter> {
        self.queues.shard(&self.lock).queues.get(&self.lock)?.newest()
    }

    pub(crate) fn standing(&self) -> Standing {
        let locks = self.queues.locks.load(Ordering::Relaxed);
        let shard = self.queues.shard(&self.lock);
        let queue = shard.queues.get(&self.lock);
        let (failures, in_vain) = queue.map_or((0, 0), |queue| (queue.failures, queue.in_vain));
        Standing { locks, failures, in_vain }
    }

    /// Whether the waiter's owner appears to hold the lock.
    pub(crate) fn owner_is_holder(&self) -> bool {
        let shard = self.queues.shard(&self.lock);
        let Some(queue) = shard.queues.get(&self.lock) else { return false };
        let own = queue.waiters.get(&queue.number_of(self.ticket)).and_then(|own| own.shared_owner);
        own.is_some() && own == queue.holder
    }

    /// The place may be kept when the wait ends without a grant.
    pub(crate) fn may_keep(&self, permit: PlacePermit) {
        let Some(permit) = permit.into_inner() else { return };
        let mut shard = self.queues.shard(&self.lock);
        let waiter =
            shard.queues.get_mut(&self.lock).and_then(|queue| queue.waiter_mut(self.ticket));
        if let Some(waiter) = waiter {
            waiter.permit = Some(permit);
        }
    }

    /// Returns what the waiter may do now. After a [`Step::Attempt`] or [`Step::Handed`], the
    /// caller must report with [`refused`](Self::refused) or [`granted`](Self::granted), or leave.
    pub(crate) fn step(&self, now: Instant, may_try: MayTry) -> Step<A> {
        let mut shard = self.queues.shard(&self.lock);
        let Shard { queues, places } = &mut *shard;
        let Some(queue) = queues.get_mut(&self.lock) else { return Step::Wait };
        let first = queue.is_first(self.ticket);
        let number = queue.number_of(self.ticket);
        let competing = queue.competing;
        let next_try = queue.next_try;
        let cause = queue.cause;
        let Some(waiter) = queue.waiters.get_mut(&number) else { return Step::Wait };
        waiter.signalled = false;
        if !waiter.is_superseded
            && let Some(prepared) = waiter.handed.take()
        {
            return Step::Handed(*prepared);
        }
        if std::mem::take(&mut waiter.owner_holds) {
            return Step::AskForOwn;
        }
        if waiter.is_superseded {
            return Step::Superseded;
        }
        if !first || competing.is_some() {
            return Step::Wait;
        }
        let may_ask = match may_try {
            MayTry::No => false,
            MayTry::InOrder => next_try <= now,
            MayTry::AtEnd | MayTry::Now => {
                next_try <= now || queue.pause_ends.is_none_or(|end| end <= now)
            }
        };
        if !may_ask {
            return Step::WaitUntil(next_try);
        }
        let patient_until = match may_try {
            MayTry::InOrder | MayTry::AtEnd => {
                self.queues.patient_until(places, &self.lock, number, now)
            }
            MayTry::No | MayTry::Now => None,
        };
        if let Some(until) = patient_until {
            return Step::Defer(until);
        }
        queue.competing = Some(self.ticket);
        Step::Attempt(cause)
    }

    /// Ready when [`step`](Self::step) may return another step.
    pub(crate) fn poll_signalled(&self, context: &Context<'_>) -> Poll<()> {
        let mut shard = self.queues.shard(&self.lock);
        let waiter =
            shard.queues.get_mut(&self.lock).and_then(|queue| queue.waiter_mut(self.ticket));
        let Some(waiter) = waiter.filter(|waiter| !waiter.signalled) else {
            return Poll::Ready(());
        };
        if !waiter.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            let replaced = waiter.waker.replace(context.waker().clone());
            drop(shard);
            // The old waker may be the last handle of a task, and the task may own another ticket.
            drop(replaced);
        }
        Poll::Pending
    }

    /// The attempt failed. The waiter keeps its place.
    pub(crate) fn refused(&self, now: Instant, refusal: Refusal) {
        let mut shard = self.queues.shard(&self.lock);
        let Shard { queues, places } = &mut *shard;
        let Some(queue) = queues.get_mut(&self.lock) else { return };
        queue.competing = None;
        queue.round = refusal.round;
        let (mut holder, mut slot_owners) = (None, Vec::new());
        if let LockError::Held(by) = &refusal.error {
            holder = by.owner;
            slot_owners = by.holders().iter().filter_map(|holder| holder.by.owner).collect();
        }
        let number = queue.number_of(self.ticket);
        self.queues.with_places(places, &self.lock, now, |places| {
            if !refusal.without_quorum {
                places.asked(number);
            }
            // Another request of that owner was granted the lock.
            for owner in holder.iter().chain(&slot_owners) {
                places.forget(owner);
            }
        });
        let mut own = queue.held_by(holder);
        own.extend(slot_owners.into_iter().flat_map(|owner| queue.ask_for_own(owner)));
        queue.last_refusal = Some((refusal.error, now));
        queue.poll_due = refusal.poll_due;
        let lets_others_pass = refusal.without_quorum
            && queue.let_others_pass(|| self.queues.next_ticket.fetch_add(1, Ordering::Relaxed));
        let asker = queue.waiter_mut(self.ticket);
        if refusal.without_quorum {
            let limit = asker.map_or(Duration::ZERO, |waiter| waiter.round_limit);
            queue.failed_limit = queue.failed_limit.max(limit);
            queue.failures += u32::from(!lets_others_pass);
        } else {
            asker.into_iter().for_each(|waiter| waiter.failures = 0);
            (queue.failures, queue.failed_limit) = (0, Duration::ZERO);
        }
        queue.next_try = if let Some(cause) = queue.released_meanwhile.take() {
            queue.quick_left = QUICK;
            (queue.cause, queue.in_vain) = (cause, 0);
            now
        } else if lets_others_pass {
            now
        } else if queue.quick_left > 0 {
            queue.quick_left -= 1;
            refusal.quick
        } else {
            queue.in_vain = queue.in_vain.saturating_add(u32::from(!refusal.without_quorum));
            queue.cause = Cause::Poll;
            refusal.retry
        };
        let next = if queue.is_first(self.ticket) { None } else { queue.signal_first() };
        drop(shard);
        own.into_iter().chain(next).for_each(Waker::wake);
    }

    /// The attempt got the lock. The waiter leaves, and the next waiter waits for a release or a
    /// poll.
    pub(crate) fn granted(mut self, now: Instant, success: Success) {
        // A waiter with a higher priority may be granted the lock before it has to wait.
        self.supersede_older(now);
        self.has_left = true;
        let mut own = Vec::new();
        self.queues.remove(&self.lock, self.ticket, Leave::Granted { now }, |queue| {
            queue.competing = None;
            // A release noted during the attempt is older than the grant.
            queue.released_meanwhile = None;
            (queue.quick_left, queue.failures, queue.in_vain) = (0, 0, 0);
            queue.failed_limit = Duration::ZERO;
            queue.cause = Cause::Poll;
            queue.round = success.round;
            queue.next_try = success.ends.min(queue.poll_due).max(now);
            queue.last_refusal = None;
            own = queue.held_by(success.shared_owner);
        });
        own.into_iter().for_each(Waker::wake);
    }

    /// The last refusal, and its age.
    pub(crate) fn last_refusal(&self, now: Instant) -> Option<(LockError, Duration)> {
        let shard = self.queues.shard(&self.lock);
        let (error, at) = shard.queues.get(&self.lock)?.last_refusal.as_ref()?;
        Some((error.clone(), now.saturating_duration_since(*at)))
    }
}

impl<P, A> WaitTicket<P, A> {
    /// The wait ended without a grant: leaves the queue. Returns the place that the waiter had.
    pub(crate) fn end(&mut self, now: Instant) -> Option<LinePlace> {
        self.leave(now, Leave::Ended { now })
    }

    /// The waiter got its owner's grant beside the queue: leaves the queue.
    pub(crate) fn served(mut self, now: Instant) {
        self.leave(now, Leave::Granted { now });
    }

    fn leave(&mut self, now: Instant, leave: Leave) -> Option<LinePlace> {
        if std::mem::replace(&mut self.has_left, true) {
            return None;
        }
        let ticket = self.ticket;
        let left = self.queues.remove(&self.lock, ticket, leave, |queue| {
            if queue.competing == Some(ticket) {
                // The attempt is being undone, so the lock may be free soon.
                queue.competing = None;
                queue.released_meanwhile = None;
                queue.quick_left = QUICK;
                queue.next_try = now;
            }
        });
        let Left { handed, line } = left;
        if handed.is_some() {
            let wakes_the_next = Handoff::new(&self.queues, &self.lock, now, Next::Nobody);
            // The unused attempt is undone first, because it may be the reason why the next waiter
            // was refused.
            drop(handed);
            drop(wakes_the_next);
        }
        line
    }
}

impl<P, A> Drop for WaitTicket<P, A> {
    fn drop(&mut self) {
        self.end(Instant::now());
    }
}
