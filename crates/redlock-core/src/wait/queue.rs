//! The queues: the waiters of each lock in this process, in the order of arrival. Only the first of a queue competes.
//!
//! A queue is a state machine behind a lock of its own shard; nothing in here waits, asks a node or draws a random number.
//! What a waiter wants (`P`) and what it is handed when the lock was released here (`A`) are the caller's.
//!
//! Invariants, explored under many interleavings by [`shuttle`](https://docs.rs/shuttle) (`explored.rs` beside this file):
//! - a waiter that is first is told so; a waiter that leaves, however it leaves, makes room for the next one;
//! - at most one attempt of a queue is under way, or about to be handed over: `competing` is its ticket;
//! - what was prepared for a waiter that has left in the meantime is dropped, which undoes it, and then the next one is woken;
//! - an empty queue does not exist.
//!
//! Who stands in a queue and is first tries; a place, of which there are so many, is taken when it begins to wait. So a lock
//! that nobody waits for is tried also when all places are taken.
//!
//! The first that finds no quorum and gives its rounds less time than others keeps the lock from them: it goes to the end, with
//! all behind it that would fare no better, and the next one tries at once. Where nobody would fare better the order stays,
//! and the queue backs off as a whole; but a waiter that fails again and again goes to the end in any case.
//!
//! A waiter whose owner is that of the holder, by another request with the same idempotency key, does not wait for itself: it
//! asks beside the line, once for each time that its owner is seen to have the lock.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use hashlink::LinkedHashMap;
use tokio::time::Instant;

use super::polls::Polls;
use super::sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::error::{LockError, WaitLimit};
use crate::model::types::Owner;
use crate::node::Hint;

const SHARDS: usize = 16;

/// How many attempts are made quickly after something has happened to the lock: the first may have come too early on some
/// nodes, or met the last traces of another one.
const QUICK: u32 = 3;
/// After so many failures in a row without a quorum the first goes to the end, although nobody gives rounds more time.
const MAX_FAILURES: u32 = 3;

type Shard<P, A> = HashMap<Bytes, WaitQueue<P, A>>;

/// All queues of one process.
pub(crate) struct WaitQueues<P, A> {
    shards: Box<[Mutex<Shard<P, A>>]>,
    /// The same in every run, so that explorations can be replayed. Names chosen to collide make shards uneven, no more.
    hasher: BuildHasherDefault<DefaultHasher>,
    bounds: Bounds,
    next_ticket: AtomicU64,
    /// All that stand in a queue.
    entered: AtomicUsize,
    /// Those of them that have a place, and the locks that they wait for.
    waiters: AtomicUsize,
    locks: AtomicUsize,
}

/// How many may wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) total: usize,
    pub(crate) of_one_lock: usize,
}

/// The queue of one lock.
struct WaitQueue<P, A> {
    waiters: LinkedHashMap<u64, Waiter<P, A>>,
    /// How many of them have a place.
    placed: usize,
    /// The ticket whose attempt is under way or about to be handed over.
    competing: Option<u64>,
    /// The lock was released while an attempt was under way: what that one is told is old.
    released_meanwhile: Option<Cause>,
    /// When the first one tries next if nothing happens before, and why.
    next_try: Instant,
    cause: Cause,
    /// When a poll is due, whichever waiter is first then.
    poll_due: Instant,
    quick_left: u32,
    /// Attempts in a row that found no quorum, and tries in a row that nothing had called for and that found the lock held.
    failures: u32,
    in_vain: u32,
    /// What the nodes said last, and when; `None` once a waiter here has got the lock since.
    last_refusal: Option<(LockError, Instant)>,
    /// The token of the last release that others told of.
    last_hint: u64,
    /// Who has the lock, as far as is known.
    holder: Option<Owner>,
    /// Waiters whose owner may be that of another request.
    shared_owners: usize,
    /// How long a round takes.
    round: Duration,
}

struct Waiter<P, A> {
    params: P,
    /// Its number in the order of the queue.
    place: u64,
    /// Whether it waits: it counts for the bounds.
    is_placed: bool,
    /// How long its rounds may take.
    round_limit: Duration,
    /// Attempts of its own in a row that found no quorum.
    failures: u32,
    /// Where another request may have the same.
    shared_owner: Option<Owner>,
    /// Its owner seems to have the lock, and it has not asked since.
    is_holders: bool,
    handed: Option<A>,
    waker: Option<Waker>,
    signalled: bool,
}

/// Why the first of a queue tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// It has come to an empty queue, or it is time.
    Poll,
    /// Another gateway has told of a release.
    Hint,
    /// The lock was released here, too late for an attempt that was under way.
    Release,
}

/// What a waiter may do now.
#[derive(Debug)]
pub(crate) enum Step<A> {
    /// Wait to be signalled: others are before it, or something is about to be handed over.
    Wait,
    /// It is the first. Wait to be signalled, at most until then.
    WaitUntil(Instant),
    /// It is the first: try, and report how it went.
    Attempt(Cause),
    /// The same, and the first request has been sent already.
    Handed(A),
    /// Its owner seems to have the lock: try, and leave with it or wait on.
    AskForOwn,
}

/// What becomes of a lock that is released here.
pub(crate) enum Next<P> {
    /// Nobody waits here.
    Nobody,
    /// The first waiter here has an attempt under way, which will be repeated.
    Competing,
    /// The waiters here have had their turn: it is for those at other gateways, for a while.
    Yielded,
    /// This waiter here is to have it.
    First { ticket: u64, params: P },
}

/// For how long a queue leaves its lock to others: so many of its own rounds, within limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pause {
    pub(crate) rounds: f64,
    pub(crate) least: Duration,
    pub(crate) most: Duration,
}

/// A release that is about to be sent, as a plan: whom to hand the lock to, and what the nodes tell other gateways. It has to
/// live until the release has been sent. Dropped without having handed the lock over, it wakes the next waiter, which may
/// have been refused because of what is released: no exit can forget that.
#[must_use = "dropped before the release is sent, it wakes a waiter too early"]
pub(crate) struct Handoff<P, A> {
    queues: Arc<WaitQueues<P, A>>,
    lock: Bytes,
    /// When it was decided. A waiter that was refused after that may have asked before the release.
    since: Instant,
    pub(crate) next: Next<P>,
    pub(crate) tell: Option<Hint>,
    handed: bool,
}

/// A place in a queue. Dropped, it is left.
pub(crate) struct WaitTicket<P, A> {
    queues: Arc<WaitQueues<P, A>>,
    lock: Bytes,
    number: u64,
    left: bool,
}

/// How an attempt of the first ended without the lock.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) error: LockError,
    /// When to try again if nothing happens.
    pub(crate) retry: Instant,
    /// The same while attempts follow quickly on one another.
    pub(crate) quick: Instant,
    /// When a poll is due.
    pub(crate) poll_due: Instant,
    pub(crate) round: Duration,
    /// Too few nodes answered, or too late.
    pub(crate) without_quorum: bool,
}

/// What the pause before the next attempt of a queue depends on.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Standing {
    /// Locks that are waited for in this process.
    pub(crate) locks: usize,
    /// Attempts in a row that found no quorum.
    pub(crate) failures: u32,
    /// Tries in a row that nothing had called for and that found the lock held.
    pub(crate) in_vain: u32,
}

impl Standing {
    pub(crate) fn polls(self) -> Polls {
        Polls::of(self.locks)
    }
}

/// How the first of a queue got the lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Success {
    /// Of the new holder, where another request may have the same.
    pub(crate) shared_owner: Option<Owner>,
    /// When the lock ends if nobody releases it.
    pub(crate) ends: Instant,
    pub(crate) round: Duration,
}

impl<P: Clone, A> WaitQueues<P, A> {
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

    /// Those who wait and the locks they wait for.
    pub(crate) fn count(&self) -> (usize, usize) {
        (self.waiters.load(Ordering::Relaxed), self.locks.load(Ordering::Relaxed))
    }

    pub(crate) fn is_waited_for(&self, lock: &Bytes) -> bool {
        self.entered.load(Ordering::Relaxed) > 0 && self.shard(lock).contains_key(lock)
    }

    /// To the end of a queue, still without a place. In an empty one the first attempt is due at `first_try`, and the next poll
    /// at `first_poll`.
    pub(crate) fn enter(
        self: &Arc<Self>,
        lock: Bytes,
        params: P,
        shared_owner: Option<Owner>,
        round_limit: Duration,
        (first_try, first_poll): (Instant, Instant),
    ) -> WaitTicket<P, A> {
        self.entered.fetch_add(1, Ordering::AcqRel);
        let mut shard = self.shard(&lock);
        let queue =
            shard.entry(lock.clone()).or_insert_with(|| WaitQueue::new(first_try, first_poll));
        // Not before the shard is locked: a queue is in the order of its tickets.
        let number = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        let is_holders = shared_owner.is_some() && shared_owner == queue.holder;
        queue.shared_owners += usize::from(shared_owner.is_some());
        let waiter = Waiter {
            params,
            place: number,
            is_placed: false,
            round_limit,
            failures: 0,
            shared_owner,
            is_holders,
            handed: None,
            waker: None,
            signalled: false,
        };
        queue.waiters.insert(number, waiter);
        drop(shard);
        WaitTicket { queues: self.clone(), lock, number, left: false }
    }

    /// The lock is about to be released here. With a pause it is for others, and the queue here competes again after that.
    pub(crate) fn release(
        self: &Arc<Self>,
        lock: &Bytes,
        now: Instant,
        pause: Option<Pause>,
    ) -> Handoff<P, A> {
        let mut next = Next::Nobody;
        self.update(lock, |queue| {
            queue.free();
            if queue.competing.is_some() {
                queue.released_meanwhile = Some(Cause::Release);
                next = Next::Competing;
                return None;
            }
            if let Some(Pause { rounds, least, most }) = pause {
                next = Next::Yielded;
                return queue
                    .schedule(Cause::Poll, now + queue.round.mul_f64(rounds).clamp(least, most));
            }
            let (ticket, first) = queue.waiters.front()?;
            next = Next::First { ticket: *ticket, params: first.params.clone() };
            queue.competing = Some(*ticket);
            None
        });
        self.handoff(lock, now, next)
    }

    /// Another gateway tells that this lock was released with the token `t`.
    pub(crate) fn wake(&self, lock: &Bytes, t: u64, now: Instant) {
        self.update(lock, |queue| {
            // Every node repeats it, and after a refusal another node's word counts: the lock was released there later.
            if t < queue.last_hint || t == queue.last_hint && queue.last_refusal.is_none() {
                return None;
            }
            queue.last_hint = t;
            queue.free();
            queue.quick_left = QUICK;
            if queue.competing.is_some() {
                queue.released_meanwhile = Some(Cause::Hint);
                return None;
            }
            queue.schedule(Cause::Hint, now)
        });
    }
}

impl<P, A> WaitQueues<P, A> {
    fn shard(&self, lock: &Bytes) -> MutexGuard<'_, Shard<P, A>> {
        let at = self.hasher.hash_one(lock) as usize % SHARDS;
        self.shards[at].lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Changes the queue of a lock, if there is one. The waker that comes of it is called when the shard is not locked any more.
    fn update(&self, lock: &Bytes, change: impl FnOnce(&mut WaitQueue<P, A>) -> Option<Waker>) {
        if self.entered.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut shard = self.shard(lock);
        let wake = shard.get_mut(lock).and_then(change);
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
    }

    fn handoff(self: &Arc<Self>, lock: &Bytes, since: Instant, next: Next<P>) -> Handoff<P, A> {
        Handoff { queues: self.clone(), lock: lock.clone(), since, next, tell: None, handed: false }
    }

    /// A release has been sent that was decided at `since`, and it has handed the lock to nobody here. A waiter that was
    /// refused since then, or is being refused, may have asked before it.
    fn released(&self, lock: &Bytes, since: Instant, now: Instant) {
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

    /// Takes a waiter out of its queue. What was handed to it comes back, to be dropped where no shard is locked.
    fn remove(
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
        if waiter.is_placed {
            queue.placed -= 1;
            self.locks.fetch_sub(usize::from(queue.placed == 0), Ordering::Relaxed);
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
    fn new(first_try: Instant, first_poll: Instant) -> Self {
        Self {
            waiters: LinkedHashMap::new(),
            placed: 0,
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

    fn is_first(&self, ticket: u64) -> bool {
        self.waiters.front().is_some_and(|(first, _)| *first == ticket)
    }

    /// The first one tries then, and hears of it.
    fn schedule(&mut self, cause: Cause, at: Instant) -> Option<Waker> {
        self.in_vain = 0;
        (self.cause, self.next_try) = (cause, at);
        self.signal_first()
    }

    /// The lock is released: nobody is known to have it, and nobody asks for it as its own.
    fn free(&mut self) {
        if self.holder.take().is_some() && self.shared_owners > 0 {
            self.waiters.iter_mut().for_each(|(_, waiter)| waiter.is_holders = false);
        }
    }

    /// Somebody has got the lock, or is seen to have it: other requests of that owner ask for it. To be woken when the shard
    /// is not locked any more.
    fn held_by(&mut self, holder: Option<Owner>) -> Vec<Waker> {
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
            (waiter.is_holders, waiter.signalled) = (true, true);
            waiter.waker.take()
        })
        .collect()
    }

    /// The first has found no quorum. Whether another one may fare better, and is the first now.
    fn give_way(&mut self, next_place: impl Fn() -> u64) -> bool {
        let longest =
            self.waiters.iter().map(|(_, waiter)| waiter.round_limit).max().unwrap_or_default();
        let Some((_, first)) = self.waiters.iter_mut().next() else { return false };
        first.failures += 1;
        let own = first.round_limit;
        if own >= longest {
            if first.failures >= MAX_FAILURES {
                first.failures = 0;
                self.first_to_the_end(next_place());
            }
            return false;
        }
        // Twice as much at least: however many limits there are, few tries lead to the longest one.
        let enough = longest.min(own * 2);
        while self.waiters.front().is_some_and(|(_, waiter)| waiter.round_limit < enough) {
            self.first_to_the_end(next_place());
        }
        true
    }

    fn first_to_the_end(&mut self, place: u64) {
        let Some((number, mut waiter)) = self.waiters.pop_front() else { return };
        waiter.place = place;
        self.waiters.insert(number, waiter);
    }

    /// To be woken when the shard is not locked any more.
    fn signal_first(&mut self) -> Option<Waker> {
        let (_, first) = self.waiters.iter_mut().next()?;
        first.signalled = true;
        first.waker.take()
    }
}

impl<P, A> Handoff<P, A> {
    /// Hands over what was asked for the first waiter, in the call that released the lock. Whether that waiter was still there:
    /// otherwise `prepared` is dropped.
    pub(crate) fn hand(mut self, prepared: A) -> bool {
        let Next::First { ticket, .. } = self.next else { return false };
        let mut shard = self.queues.shard(&self.lock);
        let waiter = shard.get_mut(&self.lock).and_then(|queue| queue.waiters.get_mut(&ticket));
        let Some(waiter) = waiter else {
            drop(shard);
            // Undone only now, and before the next one is woken, which may have been refused because of it.
            drop(prepared);
            return false;
        };
        waiter.handed = Some(prepared);
        waiter.signalled = true;
        let wake = waiter.waker.take();
        drop(shard);
        self.handed = true;
        wake.into_iter().for_each(Waker::wake);
        true
    }
}

impl<P, A> Drop for Handoff<P, A> {
    fn drop(&mut self) {
        if self.handed {
            return;
        }
        if let Next::First { ticket, .. } = self.next {
            // It tries by itself, if it has not left: then the attempt under way is another's.
            self.queues.update(&self.lock, |queue| {
                queue.competing.take_if(|competing| *competing == ticket)?;
                queue.schedule(queue.cause, queue.next_try.min(Instant::now()))
            });
        }
        self.queues.released(&self.lock, self.since, Instant::now());
    }
}

impl<P, A> WaitTicket<P, A> {
    /// Its number in the order of the queue.
    pub(crate) fn number(&self) -> Option<u64> {
        let shard = self.queues.shard(&self.lock);
        Some(shard.get(&self.lock)?.waiters.get(&self.number)?.place)
    }

    /// Begins to wait, if there is a place.
    pub(crate) fn take_place(&self) -> Result<(), LockError> {
        let Bounds { total, of_one_lock } = self.queues.bounds;
        let mut shard = self.queues.shard(&self.lock);
        let Some(queue) = shard.get_mut(&self.lock) else { return Ok(()) };
        let placed = queue.placed;
        let Some(waiter) = queue.waiters.get_mut(&self.number).filter(|waiter| !waiter.is_placed)
        else {
            return Ok(());
        };
        let one_more = |count: usize| (count < total).then_some(count + 1);
        if self.queues.waiters.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more).is_err()
        {
            return Err(LockError::TooManyWaiters { max: total, limit: WaitLimit::All });
        }
        if placed >= of_one_lock {
            self.queues.waiters.fetch_sub(1, Ordering::AcqRel);
            return Err(LockError::TooManyWaiters { max: of_one_lock, limit: WaitLimit::OfLock });
        }
        waiter.is_placed = true;
        queue.placed += 1;
        self.queues.locks.fetch_add(usize::from(placed == 0), Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn standing(&self) -> Standing {
        let locks = self.queues.locks.load(Ordering::Relaxed);
        let shard = self.queues.shard(&self.lock);
        let queue = shard.get(&self.lock);
        let (failures, in_vain) = queue.map_or((0, 0), |queue| (queue.failures, queue.in_vain));
        Standing { locks, failures, in_vain }
    }

    /// What to do now; trying only where it `may_try`. A [`Step::Attempt`] or [`Step::Handed`] has to be answered, by
    /// [`refused`](Self::refused), [`granted`](Self::granted) or by leaving.
    pub(crate) fn step(&self, now: Instant, may_try: bool) -> Step<A> {
        let mut shard = self.queues.shard(&self.lock);
        let Some(queue) = shard.get_mut(&self.lock) else { return Step::Wait };
        let first = queue.is_first(self.number);
        let competing = queue.competing;
        let next_try = queue.next_try;
        let cause = queue.cause;
        let Some(waiter) = queue.waiters.get_mut(&self.number) else { return Step::Wait };
        waiter.signalled = false;
        if let Some(prepared) = waiter.handed.take() {
            return Step::Handed(prepared);
        }
        if may_try && std::mem::take(&mut waiter.is_holders) {
            return Step::AskForOwn;
        }
        match competing {
            _ if !first => Step::Wait,
            Some(_) => Step::Wait,
            None if next_try <= now && may_try => {
                queue.competing = Some(self.number);
                Step::Attempt(cause)
            }
            None => Step::WaitUntil(next_try),
        }
    }

    /// Ready when [`step`](Self::step) may say something else.
    pub(crate) fn poll_signalled(&self, context: &Context<'_>) -> Poll<()> {
        let mut shard = self.queues.shard(&self.lock);
        let waiter =
            shard.get_mut(&self.lock).and_then(|queue| queue.waiters.get_mut(&self.number));
        let Some(waiter) = waiter.filter(|waiter| !waiter.signalled) else {
            return Poll::Ready(());
        };
        if !waiter.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            let replaced = waiter.waker.replace(context.waker().clone());
            drop(shard);
            // It may be the last that holds a task, and with it another ticket.
            drop(replaced);
        }
        Poll::Pending
    }

    /// The attempt failed; the place is kept.
    pub(crate) fn refused(&self, now: Instant, refusal: Refusal) {
        let mut shard = self.queues.shard(&self.lock);
        let Some(queue) = shard.get_mut(&self.lock) else { return };
        queue.competing = None;
        queue.round = refusal.round;
        let holder = if let LockError::Held(by) = &refusal.error { by.owner } else { None };
        let own = queue.held_by(holder);
        queue.last_refusal = Some((refusal.error, now));
        queue.poll_due = refusal.poll_due;
        let gives_way = refusal.without_quorum
            && queue.give_way(|| self.queues.next_ticket.fetch_add(1, Ordering::Relaxed));
        queue.failures = match refusal.without_quorum {
            true => queue.failures + u32::from(!gives_way),
            false => 0,
        };
        if !refusal.without_quorum
            && let Some(waiter) = queue.waiters.get_mut(&self.number)
        {
            waiter.failures = 0;
        }
        queue.next_try = if let Some(cause) = queue.released_meanwhile.take() {
            queue.quick_left = QUICK;
            (queue.cause, queue.in_vain) = (cause, 0);
            now
        } else if gives_way {
            now
        } else if queue.quick_left > 0 {
            queue.quick_left -= 1;
            refusal.quick
        } else {
            queue.in_vain = queue.in_vain.saturating_add(u32::from(!refusal.without_quorum));
            queue.cause = Cause::Poll;
            refusal.retry
        };
        let next = if queue.is_first(self.number) { None } else { queue.signal_first() };
        drop(shard);
        own.into_iter().chain(next).for_each(Waker::wake);
    }

    /// The attempt had success: the place is left, and the next one waits until the lock is released.
    pub(crate) fn granted(mut self, now: Instant, success: Success) {
        self.left = true;
        let mut own = Vec::new();
        self.queues.remove(&self.lock, self.number, |queue| {
            queue.competing = None;
            // Of what was before.
            queue.released_meanwhile = None;
            (queue.quick_left, queue.failures, queue.in_vain) = (0, 0, 0);
            queue.cause = Cause::Poll;
            queue.round = success.round;
            queue.next_try = success.ends.min(queue.poll_due).max(now);
            queue.last_refusal = None;
            own = queue.held_by(success.shared_owner);
        });
        own.into_iter().for_each(Waker::wake);
    }

    /// What was last heard of the lock, and how long ago.
    pub(crate) fn last_refusal(&self, now: Instant) -> Option<(LockError, Duration)> {
        let shard = self.queues.shard(&self.lock);
        let (error, at) = shard.get(&self.lock)?.last_refusal.as_ref()?;
        Some((error.clone(), now.saturating_duration_since(*at)))
    }
}

impl<P, A> Drop for WaitTicket<P, A> {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        let number = self.number;
        let since = Instant::now();
        let unused = self.queues.remove(&self.lock, number, |queue| {
            if queue.competing == Some(number) {
                // What it has set is being undone; soon the lock may be free.
                queue.competing = None;
                queue.released_meanwhile = None;
                queue.quick_left = QUICK;
                queue.next_try = Instant::now();
            }
        });
        if unused.is_some() {
            let wakes_the_next = self.queues.handoff(&self.lock, since, Next::Nobody);
            // Undone only now, when the next one may have been refused because of it.
            drop(unused);
            drop(wakes_the_next);
        }
    }
}
