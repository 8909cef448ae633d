//! The waiters of each lock in this process, [in order](super::order), and when the first of them
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
//! - A waiter that left without a grant may have a kept place, see [`super::places`]. It takes no
//!   part in the queue until another request of its owner takes the place up.
//!
//! The first waiter tries at once. It takes one of the limited slots only when it has to wait. So a
//! lock that nobody waits for is tried even when all slots are taken.
//!
//! The first waiter may find no quorum because its rounds have little time. If a waiter behind it
//! has more time for a round, the first waiter lets it pass. So do the waiters directly behind the
//! first that would fare little better, because their rounds have less than twice the time of the
//! first waiter's. The waiter that is first then tries at once. If no waiter's rounds have more
//! time, the order stays and the queue backs off as a whole. But a waiter that finds no quorum
//! three times in a row lets the next one pass in any case.
//!
//! A waiter that lets another one pass goes behind all waiters with the priority of that one. If it
//! went only to the end of its own priority, it would stay first, and would block the line.
//!
//! If an earlier request with the same idempotency key appears to hold the lock, the waiter skips
//! the queue and asks for that grant. It does so once each time that another attempt of
//! this queue shows the waiter's owner as the holder.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::order::{ARRIVAL, Priority, QueueMode, behind, taken_up};
use super::places::{KEPT, Permit, Place, Places};
use super::sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::error::{LinePlace, LockError};
use crate::model::types::Owner;

const SHARDS: usize = 16;

/// If the first attempt after a release or a hint is refused, up to this many further attempts
/// follow quickly. The first one may reach some nodes before the release does, or meet the remains
/// of another attempt.
pub(super) const QUICK: u32 = 3;
/// After this many attempts in a row without a quorum, the first waiter goes to the end, even if no
/// waiter's rounds have more time.
const MAX_FAILURES: u32 = 3;
/// How many places of one lock are kept for each request that may wait for the lock. So a caller
/// that keeps as many places as it may have waiters leaves places to others.
const PLACES_PER_LOCK: usize = 4;

pub(super) struct Shard<P, A> {
    pub(super) queues: HashMap<Bytes, WaitQueue<P, A>>,
    /// Places are kept even while nobody is in the queue.
    pub(super) places: KeptPlaces<P>,
}

pub(super) type KeptPlaces<P> = HashMap<Bytes, Places<P>>;

/// All queues of one process.
pub(crate) struct WaitQueues<P, A> {
    shards: Box<[Mutex<Shard<P, A>>]>,
    /// Without a random seed, so that `interleavings.rs` can replay an exploration. Names that
    /// somebody chooses to collide only make shards uneven.
    hasher: BuildHasherDefault<DefaultHasher>,
    pub(super) bounds: Bounds,
    /// The number of the next arrival. Before a waiter with [`QueueMode::Newest`] arrives, the
    /// number is raised to the microseconds since 1970. So gateways can compare such arrivals.
    pub(super) next_ticket: AtomicU64,
    /// All waiters in all queues.
    pub(super) entered: AtomicUsize,
    /// The waiters with a slot, and the locks that they wait for.
    pub(super) waiters: AtomicUsize,
    pub(super) locks: AtomicUsize,
    /// The kept places, and the charges for pauses: see [`Places::counts`].
    kept: [AtomicUsize; 2],
}

/// How many requests may wait. As many places are kept in all, and [`PLACES_PER_LOCK`] times as
/// many for one lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) total: usize,
    pub(crate) per_lock: usize,
}

/// The queue of one lock.
pub(super) struct WaitQueue<P, A> {
    /// The waiters by number. Boxed, because most queues have one waiter, and a node of the map has
    /// room for many.
    pub(super) waiters: BTreeMap<u64, Box<Waiter<P, A>>>,
    /// The numbers of the tickets whose number is not the ticket itself: of waiters that went to
    /// the end, and of waiters with a place of an earlier request.
    pub(super) numbers: HashMap<u64, u64>,
    /// How many waiters have a slot.
    pub(super) slots_taken: usize,
    /// The ticket whose attempt is in flight or about to be handed over.
    pub(super) competing: Option<u64>,
    /// Set if the lock was released during the attempt in flight, whose votes are then outdated.
    pub(super) released_meanwhile: Option<Cause>,
    /// When the first waiter tries next if nothing happens before, and why.
    pub(super) next_try: Instant,
    pub(super) cause: Cause,
    /// Until when the queue leaves a released lock to other gateways.
    pub(super) pause_ends: Option<Instant>,
    /// When a poll is due, whichever waiter is first then.
    pub(super) poll_due: Instant,
    pub(super) quick_left: u32,
    /// Attempts in a row without a quorum.
    pub(super) failures: u32,
    /// The longest round limit of those attempts. Zero after an attempt with a quorum.
    pub(super) failed_limit: Duration,
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
    /// The tickets of the waiters of the kind [`QueueMode::Newest`] that are not superseded.
    pub(super) newest: Vec<u64>,
    /// How long the last attempt of this queue took.
    pub(super) round: Duration,
}

pub(super) struct Waiter<P, A> {
    pub(super) params: P,
    pub(super) ticket: u64,
    pub(super) priority: Priority,
    pub(super) mode: QueueMode,
    /// Whether the waiter asks for slots of the lock.
    pub(super) is_slotted: bool,
    /// When the first request of the owner entered the queue.
    pub(super) since: Instant,
    /// The number of that arrival, see [`WaitQueues::next_ticket`].
    pub(super) arrival: u64,
    /// Whether a newer waiter of the same kind began to wait.
    pub(super) is_superseded: bool,
    /// Allows the queue to keep the place when the waiter leaves without a grant.
    pub(super) permit: Option<Permit>,
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
    /// Boxed, because it is large and most waiters never have one.
    pub(super) handed: Option<Box<A>>,
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

/// Why a waiter leaves its queue.
#[derive(Debug, Clone, Copy)]
pub(super) enum Leave {
    Granted {
        now: Instant,
    },
    /// The wait ended without a grant, or the request was dropped.
    Ended {
        now: Instant,
    },
}

/// What a waiter leaves behind.
pub(super) struct Left<A> {
    /// The attempt that was handed to the waiter. The caller must drop it while no shard is locked.
    pub(super) handed: Option<A>,
    /// The place of a waiter that was not granted the lock.
    pub(super) line: Option<LinePlace>,
}

impl<P, A> WaitQueues<P, A> {
    pub(crate) fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self {
            shards: (0..SHARDS)
                .map(|_| Mutex::new(Shard { queues: HashMap::new(), places: HashMap::new() }))
                .collect(),
            hasher: BuildHasherDefault::new(),
            bounds,
            next_ticket: AtomicU64::new(0),
            entered: AtomicUsize::new(0),
            waiters: AtomicUsize::new(0),
            locks: AtomicUsize::new(0),
            kept: [AtomicUsize::new(0), AtomicUsize::new(0)],
        })
    }

    /// Raises the number of the next arrival to this time, unless that number is larger already.
    pub(crate) fn arrivals_follow(&self, wall_micros: u64) {
        self.next_ticket.fetch_max(wall_micros & ARRIVAL, Ordering::Relaxed);
    }

    /// The number of waiters and of the locks they wait for.
    pub(crate) fn count(&self) -> (usize, usize) {
        (self.waiters.load(Ordering::Relaxed), self.locks.load(Ordering::Relaxed))
    }

    pub(crate) fn is_waited_for(&self, lock: &Bytes) -> bool {
        self.entered.load(Ordering::Relaxed) > 0 && self.shard(lock).queues.contains_key(lock)
    }

    /// Another gateway announced a release of this lock with the token `t`.
    pub(crate) fn wake(&self, lock: &Bytes, t: u64, now: Instant) {
        self.update(lock, |queue, _| {
            // Every node publishes the same hint. The first one counts. A repeated one counts only
            // after a refusal: the node that refused may have released the lock since.
            if t == queue.last_hint && queue.last_refusal.is_none() {
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
        change: impl FnOnce(&mut WaitQueue<P, A>, &mut KeptPlaces<P>) -> Option<Waker>,
    ) {
        if self.entered.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut shard = self.shard(lock);
        let Shard { queues, places } = &mut *shard;
        let wake = queues.get_mut(lock).and_then(|queue| change(queue, places));
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
    }

    /// A release that was planned at `since` has been sent, and handed the lock to nobody here. If
    /// the first waiter was refused since then, or has an attempt in flight, it may have asked the
    /// nodes before the release, and tries again.
    pub(super) fn released(&self, lock: &Bytes, since: Instant, now: Instant) {
        self.update(lock, |queue, _| {
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

    /// Removes a waiter from its queue.
    pub(super) fn remove(
        &self,
        lock: &Bytes,
        ticket: u64,
        leave: Leave,
        change: impl FnOnce(&mut WaitQueue<P, A>),
    ) -> Left<A> {
        let now = match leave {
            Leave::Granted { now } | Leave::Ended { now } => now,
        };
        let mut shard = self.shard(lock);
        let Shard { queues, places } = &mut *shard;
        let Some(queue) = queues.get_mut(lock) else { return Left { handed: None, line: None } };
        let number = queue.number_of(ticket);
        let is_next = queue.is_first(ticket) || queue.competing == Some(ticket);
        let Some(waiter) = queue.waiters.remove(&number) else {
            return Left { handed: None, line: None };
        };
        queue.numbers.remove(&ticket);
        queue.shared_owners -= usize::from(waiter.shared_owner.is_some());
        if waiter.mode == QueueMode::Newest {
            queue.newest.retain(|newest| *newest != ticket);
        }
        if waiter.has_slot {
            queue.slots_taken -= 1;
            self.locks.fetch_sub(usize::from(queue.slots_taken == 0), Ordering::Relaxed);
            self.waiters.fetch_sub(1, Ordering::AcqRel);
        }
        change(queue);
        // The slots that were too few for this waiter may do for the next one. And after a grant
        // other slots may be free, or may have been released meanwhile.
        let next_is_slotted = queue.waiters.values().next().is_some_and(|next| next.is_slotted);
        if is_next && (waiter.is_slotted || next_is_slotted) {
            queue.next_try = now;
        }
        let Waiter { handed, shared_owner, params, permit, is_superseded, .. } = *waiter;
        let Waiter { priority, mode, since, arrival, .. } = *waiter;
        let mut left = Left { handed: handed.map(|attempt| *attempt), line: None };
        let mut is_passed_on = false;
        match leave {
            Leave::Granted { now } => self.with_places(places, lock, now, |places| {
                places.asked(number);
                if let Some(owner) = shared_owner {
                    places.forget(&owner);
                }
            }),
            Leave::Ended { now } => {
                let away = self
                    .with_places(places, lock, now, |places| places.line().range(..number).count());
                let before = away + queue.waiters.range(..number).count();
                let position = u32::try_from(before + 1).unwrap_or(u32::MAX);
                let copy =
                    shared_owner.and_then(|owner| queue.pass_on(number, priority, owner, since));
                is_passed_on = copy.is_some();
                let mut keeps = None;
                if copy.is_none() && shared_owner != queue.holder && !is_superseded {
                    keeps = shared_owner.zip(permit);
                }
                let is_kept = keeps.is_some_and(|(owner, permit)| {
                    let permit = Some(permit);
                    let left = now;
                    let place =
                        Place { owner, params, priority, mode, since, arrival, left, permit };
                    self.keep(places, lock, now, |places| places.keep(number, place))
                });
                left.line = Some(LinePlace { position, kept_for: is_kept.then_some(KEPT) });
            }
        }
        let wake = if queue.waiters.is_empty() {
            queues.remove(lock);
            None
        } else if is_next || is_passed_on {
            queue.signal_first()
        } else {
            None
        };
        drop(shard);
        self.entered.fetch_sub(1, Ordering::AcqRel);
        wake.into_iter().for_each(Waker::wake);
        left
    }

    /// Keeps a place, or the note of a superseded owner, if the limits allow. Returns whether they
    /// do.
    pub(super) fn keep(
        &self,
        all: &mut KeptPlaces<P>,
        lock: &Bytes,
        now: Instant,
        put: impl FnOnce(&mut Places<P>),
    ) -> bool {
        if self.kept() >= self.bounds.total {
            self.end_places_of(all, now);
            if self.kept() >= self.bounds.total {
                return false;
            }
        }
        let limit = self.bounds.per_lock.saturating_mul(PLACES_PER_LOCK);
        all.entry(lock.clone()).or_default();
        self.with_places(all, lock, now, |places| {
            let has_room = places.counts()[0] < limit;
            if has_room {
                put(places);
            }
            has_room
        })
    }

    /// Changes the kept places of a lock, if there are any. Those that have ended are removed
    /// before.
    pub(super) fn with_places<R: Default>(
        &self,
        all: &mut KeptPlaces<P>,
        lock: &Bytes,
        now: Instant,
        change: impl FnOnce(&mut Places<P>) -> R,
    ) -> R {
        let Some(places) = all.get_mut(lock) else { return R::default() };
        let before = places.counts();
        places.end(now);
        let result = change(places);
        let after = places.counts();
        self.count_kept(before, after);
        if after == [0, 0] {
            all.remove(lock);
        }
        result
    }

    /// Until when the first waiter, with the number `first`, leaves a free lock to a waiter that is
    /// away.
    pub(super) fn patient_until(
        &self,
        all: &mut KeptPlaces<P>,
        lock: &Bytes,
        first: u64,
        now: Instant,
    ) -> Option<Instant> {
        let may_charge = self.kept[1].load(Ordering::Relaxed) < self.bounds.total;
        self.with_places(all, lock, now, |places| places.patient_until(first, may_charge, now))
    }

    fn count_kept(&self, before: [usize; 2], after: [usize; 2]) {
        for ((kept, before), after) in self.kept.iter().zip(before).zip(after) {
            if after > before {
                kept.fetch_add(after - before, Ordering::Relaxed);
            } else if after < before {
                kept.fetch_sub(before - after, Ordering::Relaxed);
            }
        }
    }

    /// The number of kept places.
    pub(crate) fn kept(&self) -> usize {
        self.kept[0].load(Ordering::Relaxed)
    }

    /// Removes the places that have ended, of all locks.
    pub(crate) fn end_places(&self, now: Instant) {
        if self.kept.iter().all(|kept| kept.load(Ordering::Relaxed) == 0) {
            return;
        }
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            self.end_places_of(&mut shard.places, now);
        }
    }

    fn end_places_of(&self, all: &mut KeptPlaces<P>, now: Instant) {
        all.retain(|_, places| {
            let before = places.counts();
            places.end(now);
            let after = places.counts();
            self.count_kept(before, after);
            after != [0, 0]
        });
    }

    /// The owner no longer wants the lock: its place is given up, and a request of it that still
    /// waits will keep none.
    pub(crate) fn give_up(&self, lock: &Bytes, owner: &Owner, now: Instant) {
        let mut shard = self.shard(lock);
        let Shard { queues, places } = &mut *shard;
        self.with_places(places, lock, now, |places| places.forget(owner));
        let Some(queue) = queues.get_mut(lock) else { return };
        let own = queue.waiters.values_mut().filter(|waiter| waiter.shared_owner == Some(*owner));
        own.for_each(|waiter| waiter.permit = None);
        // The lock may have been left to this owner.
        let wake = queue.signal_first();
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
    }

    /// Whether nobody is in any line. Locks no shard.
    pub(crate) fn is_empty(&self) -> bool {
        self.entered.load(Ordering::Relaxed) == 0 && self.kept() == 0
    }

    /// The length of the line for a lock. No shard is locked while nobody waits for any lock.
    pub(crate) fn line_length(&self, lock: &Bytes, now: impl FnOnce() -> Instant) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut shard = self.shard(lock);
        let Shard { queues, places } = &mut *shard;
        let here = queues.get(lock).map_or(0, |queue| queue.waiters.len());
        here + self.with_places(places, lock, now(), |places| places.line().len())
    }

    /// The place in line of the first waiter whose parameters match: 1 is served next.
    pub(crate) fn position(
        &self,
        lock: &Bytes,
        now: Instant,
        matches: impl Fn(&P) -> bool,
    ) -> Option<usize> {
        if self.is_empty() {
            return None;
        }
        let mut shard = self.shard(lock);
        let Shard { queues, places } = &mut *shard;
        let here = &queues.get(lock)?.waiters;
        let mut numbers = here.iter();
        let (&number, _) = numbers.find(|(_, waiter)| matches(&waiter.params))?;
        let away =
            self.with_places(places, lock, now, |places| places.line().range(..number).count());
        Some(away + here.range(..number).count() + 1)
    }

    /// The first `limit` in line for a lock, with their parameters as `describe` returns them, and
    /// the length of the line.
    pub(crate) fn line<T>(
        &self,
        lock: &Bytes,
        limit: usize,
        now: Instant,
        describe: impl Fn(&P, Priority, Instant, bool) -> T,
    ) -> (Vec<T>, usize) {
        let mut shard = self.shard(lock);
        let Shard { queues, places } = &mut *shard;
        self.with_places(places, lock, now, |_| ());
        let here = queues.get(lock).map(|queue| &queue.waiters);
        let away = places.get(lock).map(Places::line);
        let total = here.map_or(0, BTreeMap::len) + away.map_or(0, BTreeMap::len);
        let mut here = here.into_iter().flatten().peekable();
        let mut away = away.into_iter().flatten().peekable();
        let mut line = Vec::with_capacity(limit.min(total));
        while line.len() < limit {
            let next = match (here.peek(), away.peek()) {
                (Some((here, _)), Some((away, _))) => Some(away < here),
                (None, Some(_)) => Some(true),
                (Some(_), None) => Some(false),
                (None, None) => None,
            };
            line.extend(match next {
                Some(true) => {
                    away.next().map(|(_, it)| describe(&it.params, it.priority, it.since, true))
                }
                Some(false) => {
                    here.next().map(|(_, it)| describe(&it.params, it.priority, it.since, false))
                }
                None => break,
            });
        }
        (line, total)
    }
}

impl<P, A> WaitQueue<P, A> {
    pub(super) fn new(first_try: Instant, first_poll: Instant) -> Self {
        Self {
            waiters: BTreeMap::new(),
            numbers: HashMap::new(),
            slots_taken: 0,
            competing: None,
            released_meanwhile: None,
            next_try: first_try,
            cause: Cause::Poll,
            poll_due: first_poll,
            quick_left: 0,
            failures: 0,
            failed_limit: Duration::ZERO,
            in_vain: 0,
            last_refusal: None,
            last_hint: 0,
            holder: None,
            shared_owners: 0,
            pause_ends: None,
            newest: Vec::new(),
            round: Duration::from_millis(1),
        }
    }

    pub(super) fn is_first(&self, ticket: u64) -> bool {
        self.waiters.first_key_value().is_some_and(|(_, first)| first.ticket == ticket)
    }

    /// The number of this ticket in the order of the queue.
    pub(super) fn number_of(&self, ticket: u64) -> u64 {
        self.numbers.get(&ticket).copied().unwrap_or(ticket)
    }

    pub(super) fn waiter_mut(&mut self, ticket: u64) -> Option<&mut Waiter<P, A>> {
        let number = self.number_of(ticket);
        self.waiters.get_mut(&number).map(|waiter| &mut **waiter)
    }

    /// Passes the number of a waiter that has left on to a waiting copy of its request, if there is
    /// one. A copy with another priority gets only the arrival. The copy keeps its own number if
    /// that is smaller. Returns whether the order changed.
    fn pass_on(
        &mut self,
        number: u64,
        priority: Priority,
        owner: Owner,
        since: Instant,
    ) -> Option<bool> {
        if self.shared_owners == 0 {
            return None;
        }
        let mut copies = self.waiters.iter();
        let (from, copy) = copies.find(|(_, waiter)| waiter.shared_owner == Some(owner))?;
        let from = *from;
        let number = taken_up(number, priority, copy.priority);
        if from < number {
            return Some(false);
        }
        let mut copy = self.waiters.remove(&from)?;
        copy.since = copy.since.min(since);
        self.insert(number, copy);
        Some(true)
    }

    /// Puts a waiter at this place in the order.
    pub(super) fn insert(&mut self, number: u64, waiter: Box<Waiter<P, A>>) {
        if waiter.ticket != number {
            self.numbers.insert(waiter.ticket, number);
        }
        self.waiters.insert(number, waiter);
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
            self.waiters.values_mut().for_each(|waiter| waiter.owner_holds = false);
        }
    }

    /// Notes the holder of the lock. Waiters with the same owner will ask for its grant. Returns
    /// their wakers, to be called after the shard is unlocked.
    pub(super) fn held_by(&mut self, holder: Option<Owner>) -> Vec<Waker> {
        self.holder = holder;
        holder.map_or_else(Vec::new, |owner| self.ask_for_own(owner))
    }

    /// Waiters with this owner will ask for its grant. Returns their wakers, to be called after the
    /// shard is unlocked.
    pub(super) fn ask_for_own(&mut self, owner: Owner) -> Vec<Waker> {
        if self.shared_owners == 0 {
            return Vec::new();
        }
        let own = self.waiters.values_mut().filter(|waiter| waiter.shared_owner == Some(owner));
        own.filter_map(|waiter| {
            (waiter.owner_holds, waiter.signalled) = (true, true);
            waiter.waker.take()
        })
        .collect()
    }

    /// The first waiter has found no quorum. Returns whether the next waiter, now the first, may
    /// fare better.
    pub(super) fn let_others_pass(&mut self, next_arrival: impl Fn() -> u64) -> bool {
        let longest =
            self.waiters.values().map(|waiter| waiter.round_limit).max().unwrap_or_default();
        let Some(first) = self.waiters.values_mut().next() else { return false };
        first.failures += 1;
        let own = first.round_limit;
        if own >= longest {
            if first.failures >= MAX_FAILURES {
                first.failures = 0;
                let mut numbers = self.waiters.keys();
                let alone = numbers.next();
                if let Some(next) = numbers.next().or(alone).copied() {
                    self.move_first_behind(next, next_arrival());
                }
            }
            return false;
        }
        // The next first waiter's limit is at least twice this one, or the longest. So the longest
        // limit is reached after few attempts, however many different limits there are.
        let Some(passing) = self.first_with(longest.min(own * 2)) else { return false };
        self.let_pass(passing, next_arrival);
        true
    }

    /// The number of the first waiter whose rounds may take this long.
    fn first_with(&self, round_limit: Duration) -> Option<u64> {
        self.waiters.iter().find(|(_, it)| it.round_limit >= round_limit).map(|(number, _)| *number)
    }

    /// Called when a waiter comes while the queue backs off. The failed attempts may have had too
    /// little time for a round. So a waiter that has at least twice the time of each of them becomes
    /// the first. Returns whether there is such a waiter. Each one needs twice the time of the one
    /// before it, so few become first in this way before a quorum answers.
    pub(super) fn let_newcomer_pass(
        &mut self,
        now: Instant,
        next_arrival: impl Fn() -> u64,
    ) -> bool {
        let may_pass = !self.failed_limit.is_zero()
            && self.competing.is_none()
            && self.pause_ends.is_none_or(|end| end <= now);
        let passing = self.first_with(self.failed_limit * 2).filter(|_| may_pass);
        let Some(passing) = passing else { return false };
        // No arrival costs a waiter its priority.
        let priority = |number: &u64| self.waiters.get(number).map(|waiter| waiter.priority);
        if self.waiters.keys().next().and_then(priority) > priority(&passing) {
            return false;
        }
        self.let_pass(passing, next_arrival);
        true
    }

    /// Moves all waiters before this one behind it.
    fn let_pass(&mut self, passing: u64, next_arrival: impl Fn() -> u64) {
        while self.waiters.first_key_value().is_some_and(|(first, _)| *first < passing) {
            self.move_first_behind(passing, next_arrival());
        }
    }

    /// Moves the first waiter behind all waiters that are ranked as the one with the number
    /// `passing`.
    fn move_first_behind(&mut self, passing: u64, arrival: u64) {
        let Some((_, waiter)) = self.waiters.pop_first() else { return };
        self.insert(behind(passing, arrival), waiter);
    }

    /// Returns a waker, to be called after the shard is unlocked.
    pub(super) fn signal_first(&mut self) -> Option<Waker> {
        let first = self.waiters.values_mut().next()?;
        first.signalled = true;
        first.waker.take()
    }
}
