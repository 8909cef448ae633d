//! The lines: who waits for which lock in this process, in the order of arrival. Only the first of a line competes.
//!
//! A line is a state machine behind a lock of its own shard; nothing in here waits, asks a node or draws a random number.
//! What a waiter wants (`W`) and what it is handed when the lock was released here (`A`) are the caller's.
//!
//! Invariants, explored under many interleavings by [`shuttle`](https://docs.rs/shuttle) (`explored.rs` beside this file):
//! - a waiter that is first is told so; a waiter that leaves, however it leaves, makes room for the next one;
//! - at most one attempt of a line is under way, or about to be handed over: `competing` is its ticket;
//! - what was prepared for a waiter that has left in the meantime is given back, for the caller to undo;
//! - an empty line does not exist.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use hashlink::LinkedHashMap;
use tokio::time::Instant;

use super::sync::{Arc, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering};
use crate::error::LockError;

const SHARDS: usize = 16;

/// How many attempts are made quickly after something has happened to the lock: the first may have come too early on some
/// nodes, or met the last traces of another one.
const QUICK: u32 = 3;

type Shard<W, A> = HashMap<Bytes, Line<W, A>>;

/// All lines of one process.
pub(crate) struct Lines<W, A> {
    shards: Box<[Mutex<Shard<W, A>>]>,
    /// The same in every run, so that explorations can be replayed. Who knows it can make shards uneven, no more.
    hasher: BuildHasherDefault<DefaultHasher>,
    bounds: Bounds,
    next_ticket: AtomicU64,
    waiters: AtomicUsize,
    locks: AtomicUsize,
}

/// How many may wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) total: usize,
    pub(crate) of_one_lock: usize,
}

struct Line<W, A> {
    waiters: LinkedHashMap<u64, Waiter<W, A>>,
    /// Whose attempt is under way or about to be handed over.
    competing: Option<u64>,
    /// The lock was released while an attempt was under way: what that one is told is old.
    stirred: Option<Cause>,
    /// When the first one tries next if nothing happens before.
    next: Instant,
    why: Cause,
    /// When a poll is due, whoever is first then.
    poll_due: Instant,
    quick_left: u32,
    /// What was last heard of the lock, and when.
    news: Option<(LockError, Instant)>,
    /// The token of the last release that others told of.
    heard_of: u64,
    /// How long a round takes.
    round: Duration,
}

struct Waiter<W, A> {
    wish: W,
    handed: Option<A>,
    waker: Option<Waker>,
    signalled: bool,
}

/// Why the first of a line tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// It has come to an empty line, or it is time.
    Poll,
    /// Another gateway has told of a release.
    Hint,
    /// The lock was released here, too late for an attempt that was under way.
    Release,
}

/// What a waiter may do now.
#[derive(Debug)]
pub(crate) enum Turn<A> {
    /// Wait to be signalled: others are before it, or something is about to be handed over.
    Wait,
    /// It is the first. Wait to be signalled, at most until then.
    Until(Instant),
    /// It is the first: try, and report how it went.
    Try(Cause),
    /// The same, and the first request has been sent already.
    Handed(A),
}

/// What becomes of a lock that is released here.
pub(crate) enum Next<W, A> {
    /// Nobody waits here.
    Nobody,
    /// Somebody waits here and has an attempt under way, which will be repeated.
    Busy,
    /// The waiters here have had their turn: it is for those at other gateways, for a while.
    Others,
    /// The first one here is to have it.
    First(Offer<W, A>),
}

/// For how long a line leaves its lock to others: so many of its own rounds, within limits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pause {
    pub(crate) rounds: f64,
    pub(crate) least: Duration,
    pub(crate) most: Duration,
}

/// The right to hand something to the first of a line. Dropped unused, it lets that one try by itself.
pub(crate) struct Offer<W, A> {
    lines: Arc<Lines<W, A>>,
    lock: Bytes,
    ticket: u64,
    wish: W,
    open: bool,
}

/// A place in a line. Dropped, it is left.
pub(crate) struct Place<W, A> {
    lines: Arc<Lines<W, A>>,
    lock: Bytes,
    ticket: u64,
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
}

/// How the first of a line got the lock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Success {
    /// When the lock ends if nobody releases it.
    pub(crate) ends: Instant,
    pub(crate) round: Duration,
}

impl<W: Clone, A> Lines<W, A> {
    pub(crate) fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self {
            shards: (0..SHARDS).map(|_| Mutex::new(HashMap::new())).collect(),
            hasher: BuildHasherDefault::new(),
            bounds,
            next_ticket: AtomicU64::new(0),
            waiters: AtomicUsize::new(0),
            locks: AtomicUsize::new(0),
        })
    }

    /// Waiters and the locks they wait for.
    pub(crate) fn count(&self) -> (usize, usize) {
        (self.waiters.load(Ordering::Relaxed), self.locks.load(Ordering::Relaxed))
    }

    pub(crate) fn is_waited_for(&self, lock: &Bytes) -> bool {
        self.waiters.load(Ordering::Relaxed) > 0 && self.shard(lock).contains_key(lock)
    }

    /// To the end of a line. In an empty one the first attempt is due at `first_try`, and the next poll at `first_poll`.
    pub(crate) fn enter(
        self: &Arc<Self>,
        lock: Bytes,
        wish: W,
        (first_try, first_poll): (Instant, Instant),
    ) -> Result<Place<W, A>, LockError> {
        let Bounds { total, of_one_lock } = self.bounds;
        let one_more = |count: usize| (count < total).then_some(count + 1);
        if self.waiters.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more).is_err() {
            return Err(LockError::TooManyWaiters { max: total, of_this_lock: false });
        }
        let mut shard = self.shard(&lock);
        if shard.get(&lock).map_or(0, |line| line.waiters.len()) >= of_one_lock {
            drop(shard);
            self.waiters.fetch_sub(1, Ordering::AcqRel);
            return Err(LockError::TooManyWaiters { max: of_one_lock, of_this_lock: true });
        }
        let line = shard.entry(lock.clone()).or_insert_with(|| {
            self.locks.fetch_add(1, Ordering::Relaxed);
            Line::new(first_try, first_poll)
        });
        // Not before the shard is locked: a line is in the order of its tickets.
        let ticket = self.next_ticket.fetch_add(1, Ordering::Relaxed);
        line.waiters.insert(ticket, Waiter { wish, handed: None, waker: None, signalled: false });
        drop(shard);
        Ok(Place { lines: self.clone(), lock, ticket, left: false })
    }

    /// The lock is about to be released here: whose is it?
    /// With a pause it is for others, and this line competes again after that.
    pub(crate) fn next(self: &Arc<Self>, lock: &Bytes, now: Instant, pause: Option<Pause>) -> Next<W, A> {
        if self.waiters.load(Ordering::Acquire) == 0 {
            return Next::Nobody;
        }
        let mut shard = self.shard(lock);
        let Some(line) = shard.get_mut(lock) else { return Next::Nobody };
        if line.competing.is_some() {
            line.stirred = Some(Cause::Release);
            return Next::Busy;
        }
        if let Some(Pause { rounds, least, most }) = pause {
            line.why = Cause::Poll;
            line.next = now + line.round.mul_f64(rounds).clamp(least, most);
            let wake = line.signal_first();
            drop(shard);
            wake.into_iter().for_each(Waker::wake);
            return Next::Others;
        }
        let Some((ticket, first)) = line.waiters.front() else { return Next::Nobody };
        let (ticket, wish) = (*ticket, first.wish.clone());
        line.competing = Some(ticket);
        drop(shard);
        Next::First(Offer { lines: self.clone(), lock: lock.clone(), ticket, wish, open: true })
    }

    /// Another gateway tells that this lock was released with the token `t`.
    pub(crate) fn stir(&self, lock: &Bytes, t: u64, now: Instant) {
        if self.waiters.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut shard = self.shard(lock);
        let Some(line) = shard.get_mut(lock) else { return };
        // Every node repeats it, and after a refusal another node's word counts: the lock was released there later.
        if t < line.heard_of || t == line.heard_of && line.news.is_none() {
            return;
        }
        line.heard_of = t;
        line.quick_left = QUICK;
        if line.competing.is_some() {
            line.stirred = Some(Cause::Hint);
            return;
        }
        line.why = Cause::Hint;
        line.next = now;
        let wake = line.signal_first();
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
    }
}

impl<W, A> Lines<W, A> {
    fn shard(&self, lock: &Bytes) -> MutexGuard<'_, Shard<W, A>> {
        let at = self.hasher.hash_one(lock) as usize % SHARDS;
        self.shards[at].lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The release has been sent that [`next`](Self::next) was asked about at `since`, and it has handed the lock to nobody
    /// here. Who has been refused since then, or is being refused, may have asked before it.
    pub(crate) fn released(&self, lock: &Bytes, since: Instant, now: Instant) {
        if self.waiters.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut shard = self.shard(lock);
        let Some(line) = shard.get_mut(lock) else { return };
        if line.competing.is_some() {
            line.stirred = Some(Cause::Release);
            return;
        }
        if line.news.as_ref().is_none_or(|(_, refused)| *refused < since) {
            return;
        }
        line.quick_left = QUICK;
        line.why = Cause::Release;
        line.next = line.next.min(now);
        let wake = line.signal_first();
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
    }

    /// Takes a waiter out of its line. What was handed to it comes back, to be dropped where no shard is locked.
    fn remove(&self, lock: &Bytes, ticket: u64, change: impl FnOnce(&mut Line<W, A>)) -> Option<A> {
        let mut shard = self.shard(lock);
        let line = shard.get_mut(lock)?;
        let was_first = line.is_first(ticket);
        let waiter = line.waiters.remove(&ticket)?;
        change(line);
        let wake = if line.waiters.is_empty() {
            shard.remove(lock);
            self.locks.fetch_sub(1, Ordering::Relaxed);
            None
        } else if was_first {
            line.signal_first()
        } else {
            None
        };
        drop(shard);
        self.waiters.fetch_sub(1, Ordering::AcqRel);
        wake.into_iter().for_each(Waker::wake);
        waiter.handed
    }
}

impl<W, A> Line<W, A> {
    fn new(first_try: Instant, first_poll: Instant) -> Self {
        Self {
            waiters: LinkedHashMap::new(),
            competing: None,
            stirred: None,
            next: first_try,
            why: Cause::Poll,
            poll_due: first_poll,
            quick_left: 0,
            news: None,
            heard_of: 0,
            round: Duration::from_millis(1),
        }
    }

    fn is_first(&self, ticket: u64) -> bool {
        self.waiters.front().is_some_and(|(first, _)| *first == ticket)
    }

    /// To be woken when the shard is not locked any more.
    fn signal_first(&mut self) -> Option<Waker> {
        let (_, first) = self.waiters.iter_mut().next()?;
        first.signalled = true;
        first.waker.take()
    }
}

impl<W, A> Offer<W, A> {
    pub(crate) fn wish(&self) -> &W {
        &self.wish
    }

    /// Hands it over; gives it back when the waiter has left.
    pub(crate) fn hand(mut self, prepared: A) -> Option<A> {
        self.open = false;
        let mut shard = self.lines.shard(&self.lock);
        let waiter = shard.get_mut(&self.lock).and_then(|line| line.waiters.get_mut(&self.ticket));
        let Some(waiter) = waiter else { return Some(prepared) };
        waiter.handed = Some(prepared);
        waiter.signalled = true;
        let wake = waiter.waker.take();
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
        None
    }
}

impl<W, A> Drop for Offer<W, A> {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        let mut shard = self.lines.shard(&self.lock);
        let Some(line) = shard.get_mut(&self.lock).filter(|line| line.competing == Some(self.ticket)) else { return };
        line.competing = None;
        line.next = line.next.min(Instant::now());
        let wake = line.signal_first();
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
    }
}

impl<W, A> Place<W, A> {
    pub(crate) fn ticket(&self) -> u64 {
        self.ticket
    }

    /// What to do now; trying only where it `may_try`. A [`Turn::Try`] or [`Turn::Handed`] has to be answered, by [`refused`](Self::refused),
    /// [`granted`](Self::granted) or by leaving.
    pub(crate) fn turn(&self, now: Instant, may_try: bool) -> Turn<A> {
        let mut shard = self.lines.shard(&self.lock);
        let Some(line) = shard.get_mut(&self.lock) else { return Turn::Wait };
        let first = line.is_first(self.ticket);
        let (competing, next, why) = (line.competing, line.next, line.why);
        let Some(waiter) = line.waiters.get_mut(&self.ticket) else { return Turn::Wait };
        waiter.signalled = false;
        if let Some(prepared) = waiter.handed.take() {
            return Turn::Handed(prepared);
        }
        match competing {
            _ if !first => Turn::Wait,
            Some(_) => Turn::Wait,
            None if next <= now && may_try => {
                line.competing = Some(self.ticket);
                Turn::Try(why)
            }
            None => Turn::Until(next),
        }
    }

    /// Ready when [`turn`](Self::turn) may say something else.
    pub(crate) fn poll_signalled(&self, context: &Context<'_>) -> Poll<()> {
        let mut shard = self.lines.shard(&self.lock);
        let waiter = shard.get_mut(&self.lock).and_then(|line| line.waiters.get_mut(&self.ticket));
        let Some(waiter) = waiter.filter(|waiter| !waiter.signalled) else { return Poll::Ready(()) };
        if !waiter.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker())) {
            let replaced = waiter.waker.replace(context.waker().clone());
            drop(shard);
            // It may be the last that holds a task, and with it another place.
            drop(replaced);
        }
        Poll::Pending
    }

    /// The attempt failed; the place is kept.
    pub(crate) fn refused(&self, now: Instant, refusal: Refusal) {
        let mut shard = self.lines.shard(&self.lock);
        let Some(line) = shard.get_mut(&self.lock) else { return };
        line.competing = None;
        line.round = refusal.round;
        line.news = Some((refusal.error, now));
        line.poll_due = refusal.poll_due;
        line.next = if let Some(cause) = line.stirred.take() {
            line.quick_left = QUICK;
            line.why = cause;
            now
        } else if line.quick_left > 0 {
            line.quick_left -= 1;
            refusal.quick
        } else {
            line.why = Cause::Poll;
            refusal.retry
        };
    }

    /// The attempt had success: the place is left, and the next one waits until the lock is released.
    pub(crate) fn granted(mut self, now: Instant, success: Success) {
        self.left = true;
        self.lines.remove(&self.lock, self.ticket, |line| {
            line.competing = None;
            // Of what was before.
            line.stirred = None;
            line.quick_left = 0;
            line.why = Cause::Poll;
            line.round = success.round;
            line.next = success.ends.min(line.poll_due).max(now);
            line.news = None;
        });
    }

    /// What was last heard of the lock, and how long ago.
    pub(crate) fn news(&self, now: Instant) -> Option<(LockError, Duration)> {
        let shard = self.lines.shard(&self.lock);
        let (error, at) = shard.get(&self.lock)?.news.as_ref()?;
        Some((error.clone(), now.saturating_duration_since(*at)))
    }
}

impl<W, A> Drop for Place<W, A> {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        let (ticket, since) = (self.ticket, Instant::now());
        let unused = self.lines.remove(&self.lock, ticket, |line| {
            if line.competing == Some(ticket) {
                // What it has set is being undone; soon the lock may be free.
                line.competing = None;
                line.stirred = None;
                line.quick_left = QUICK;
                line.next = Instant::now();
            }
        });
        if unused.is_some() {
            // Undone only now, when the next one may have been refused because of it.
            drop(unused);
            self.lines.released(&self.lock, since, Instant::now());
        }
    }
}
