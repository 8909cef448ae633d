//! Waiting for a lock: a line per lock name, in the order of arrival, of which only the first competes.
//!
//! Polling libraries spend their time asleep, or splitting the votes among contenders. Here W waiters of one process cost
//! one competitor, and that one is told when to try:
//!
//! - *Local hand-off.* A release that comes through this process asks for the lock again on behalf of the first waiter, in
//!   the same call to every node: one round trip from holder to holder.
//! - *Hints.* A waiter that is refused has the nodes tell the other processes that somebody waits here. A process that
//!   knows of waiters elsewhere has its releases tell them. Nobody is told anything while nobody waits, and the scripts
//!   of an uncontended lock are what they would be without all this. See [`others`].
//! - *Polls.* Hints may be lost, and a lock that expires sends none. So the first waiter asks anyway: when the lock may
//!   expire at the earliest, and about twice in a second.
//!
//! A turn of local hand-offs ends when others wait and it has lasted 32 hand-offs or 10 ms: then the release is for the
//! others, and the line here competes again after a pause.
//!
//! Who cannot hear hints at all, because no node passes any on, ends its turns all the same, after seconds, and for as long
//! as the others may take to poll.
//!
//! Promised is the order within one process, for those who wait. An [`acquire`](Redlock::acquire) does not wait, so it is
//! in nobody's line, and may find the lock free between two of them. Nothing here has a part in safety: whoever gets
//! the lock gets it by the votes of a majority, and a fencing token.

pub(crate) mod others;
pub(crate) mod queue;

/// What the lines are synchronized with. Explorations of their interleavings put something else in its place.
mod sync {
    pub(super) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    pub(super) use std::sync::{Arc, Mutex, MutexGuard};
}

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};

use self::others::{Others, Whose};
use self::queue::{Bounds, Cause, Lines, Next, Offer, Pause, Place, Refusal, Success, Turn};
use crate::clock::Clock;
use crate::error::LockError;
use crate::node::hint::{Hint, Word};
use crate::node::{HandOver, Keys, Listener, Op, Vote};
use crate::redlock::{AcquireOptions, Attempt, Claim, Lease, Redlock, Seams, Settings, Shared};
use crate::types::{FencingToken, Info, LockName, Ttl};

/// Between two polls; a lost hint costs at most the longer one.
const POLL: (Duration, Duration) = (Duration::from_millis(400), Duration::from_millis(800));
/// The first poll of a line whose first waiter got the lock at once: those behind it have not been announced yet.
const FIRST_POLL: Duration = Duration::from_millis(25);
/// How soon after an expiry somebody tries. Nodes expire a key within a millisecond, gateways should not meet.
const AFTER_EXPIRY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(8));
/// Between two tries without a majority of nodes.
const NO_QUORUM: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(150));
/// The shortest round that pauses are measured in.
const SHORTEST_ROUND: Duration = Duration::from_micros(500);
/// How long an attempt that is under way may go on after the end of the wait.
const GRACE: Duration = Duration::from_millis(10);
/// Who waits for longer waits for this long. An `Instant` has an end, too.
const LONGEST_PATIENCE: Duration = Duration::from_secs(365 * 86_400);

/// After how many of its own rounds a line competes again that has left the lock to others: they have to hear of it, and to
/// ask all nodes. Doubled each time that they did not take it, because they may be further away from the nodes.
const THEIR_TURN: (f64, f64) = (3.0, 6.0);
const LONGEST_PAUSE: Duration = Duration::from_millis(64);
/// Who splits the votes more often in a row waits for the next poll.
const MAX_SPLITS: u32 = 8;

const _: () = assert!(POLL.1.as_millis() < 1000);

/// Those who wait in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waiting {
    /// Requests that wait.
    pub waiters: usize,
    /// Locks that they wait for.
    pub locks: usize,
}

/// What a waiter wants.
#[derive(Clone)]
pub(crate) struct Wish {
    keys: Keys,
    claim: Claim,
    info: Info,
    ttl: Ttl,
}

/// Where the waiters of one process are kept.
pub(crate) struct Room {
    /// How others know this process.
    origin: u64,
    lines: Arc<Lines<Wish, Attempt>>,
    others: Others,
    /// What a hint may name. Anybody can publish who may write to the nodes.
    key_prefix: Bytes,
    max_clock_offset: Duration,
    clock: Arc<dyn Clock>,
}

impl Room {
    pub(crate) fn new(settings: &Settings, seams: &Seams) -> Arc<Self> {
        let mut origin = [0; 8];
        seams.entropy.fill(&mut origin);
        let bounds = Bounds { total: settings.max_waiters, of_one_lock: settings.max_waiters_per_lock };
        Arc::new(Self {
            origin: u64::from_le_bytes(origin),
            lines: Lines::new(bounds),
            others: Others::default(),
            key_prefix: Bytes::copy_from_slice(settings.key_prefix.as_bytes()),
            max_clock_offset: settings.max_clock_offset,
            clock: seams.clock.clone(),
        })
    }

    /// What a refusal makes the nodes say.
    fn somebody_waits(&self, lock: &Bytes) -> Hint {
        Hint::new(self.origin, Word::Waiting, lock)
    }
}

impl Listener for Room {
    fn hear(&self, hint: &Hint) {
        let Some((origin, word, lock)) = hint.parse() else { return };
        let name = lock.strip_prefix(&self.key_prefix[..]).unwrap_or_default();
        if origin == self.origin || !(1..=LockName::MAX_LEN).contains(&name.len()) {
            return;
        }
        let now = Instant::now();
        match word {
            Word::Waiting => self.others.wait(&lock, now),
            // No node grants a T that is further ahead; believed, it would make true hints look old.
            Word::Released { t, .. }
                if t.get().saturating_sub(self.clock.wall_micros()) > 2 * self.max_clock_offset.as_micros() as u64 => {}
            Word::Released { t, waiting } => {
                self.others.taken(&lock, now);
                if waiting {
                    self.others.wait(&lock, now);
                }
                self.lines.stir(&lock, t.get(), now);
            }
        }
    }
}

impl Redlock {
    /// Gets the lock, waiting for as long as `patience` for its holder and for those who have waited longer in this
    /// process. Safe to cancel: a future that is dropped leaves the line, and what it may have been granted is released.
    ///
    /// Who names an owner that already has the lock gets it again without waiting.
    ///
    /// # Errors
    /// At the end of its patience the last one of [`Redlock::acquire`]; [`LockError::TooManyWaiters`] at once.
    pub async fn acquire_within(
        &self,
        name: &LockName,
        ttl: Ttl,
        options: AcquireOptions,
        patience: Duration,
    ) -> Result<Lease, LockError> {
        self.acquire_within_noting(name, ttl, options, patience, || ()).await
    }

    /// The same; calls `waits` when it begins to wait, if it does.
    ///
    /// # Errors
    /// As [`Redlock::acquire_within`].
    pub async fn acquire_within_noting(
        &self,
        name: &LockName,
        ttl: Ttl,
        options: AcquireOptions,
        patience: Duration,
        waits: impl FnOnce() + Send,
    ) -> Result<Lease, LockError> {
        self.check_ttl(ttl)?;
        let now = Instant::now();
        let deadline = now + patience.min(LONGEST_PATIENCE);
        let shared = self.shared();
        let (room, claim) = (&shared.room, self.claim(&options));
        let wish = Wish { keys: shared.keys(name), claim, info: options.info, ttl };
        let lock = wish.keys.lock.clone();
        let behind_others = room.lines.is_waited_for(&lock);
        let first_try = room.others.turn_ends(&lock, now).unwrap_or(now);
        let place = room.lines.enter(lock, wish.clone(), (first_try, now + FIRST_POLL))?;
        // The lock may be its own: then those in the line wait for it, and it must not wait behind them.
        if claim.shared
            && behind_others
            && shared.is_stored_for(&wish).await
            && let Ok(lease) = Attempt::new(shared, wish.keys.clone(), claim, wish.info.clone(), ttl).run().await
        {
            return Ok(lease);
        }
        wait(shared, &place, &wish, (first_try, deadline), waits).await.map(|(lease, success)| {
            place.granted(Instant::now(), success);
            lease
        })
    }

    /// How many wait now.
    pub fn waiting(&self) -> Waiting {
        let (waiters, locks) = self.shared().room.lines.count();
        Waiting { waiters, locks }
    }
}

async fn wait(
    shared: &Arc<Shared>,
    place: &Place<Wish, Attempt>,
    wish: &Wish,
    (first_try, deadline): (Instant, Instant),
    waits: impl FnOnce() + Send,
) -> Result<(Lease, Success), LockError> {
    let mut waits = Some(waits);
    let mut rounds = 0;
    let mut splits = 0;
    let mut fresh = true;
    loop {
        let now = Instant::now();
        // Who comes just now is worth one whole attempt, however short its patience.
        let in_time = now < deadline || fresh;
        let (attempt, cause) = match place.turn(now, in_time) {
            Turn::Handed(attempt) => (attempt, None),
            Turn::Try(cause) => {
                let attempt = Attempt::new(shared, wish.keys.clone(), wish.claim, wish.info.clone(), wish.ttl);
                (attempt.announcing(shared.room.somebody_waits(&wish.keys.lock)), Some(cause))
            }
            // A moment for others comes before the first try, however short the patience.
            Turn::Until(next) if fresh && next == first_try => {
                signalled(place, next).await;
                continue;
            }
            Turn::Wait | Turn::Until(_) if now >= deadline => return Err(last_error(place, now)),
            later @ (Turn::Wait | Turn::Until(_)) => {
                waits.take().into_iter().for_each(|waits| waits());
                let until = if let Turn::Until(next) = later { next.min(deadline) } else { deadline };
                signalled(place, until).await;
                fresh = false;
                continue;
            }
        };
        let cut = if fresh { now + wish.ttl.duration() } else { deadline.max(now) + GRACE };
        let Ok(result) = timeout_at(cut, attempt.run()).await else { return Err(last_error(place, Instant::now())) };
        let ended = Instant::now();
        let round = ended.saturating_duration_since(now).max(SHORTEST_ROUND);
        let error = match result {
            Ok(mut lease) => {
                rounds += lease.rounds;
                (lease.rounds, lease.ticket) = (rounds, Some(place.ticket()));
                let (lock, observer) = (&wish.keys.lock, &shared.seams.observer);
                match cause {
                    None | Some(Cause::Release) => observer.handed_over(HandOver::Local),
                    Some(Cause::Hint) => observer.handed_over(HandOver::Remote),
                    Some(Cause::Poll) => {}
                }
                if matches!(cause, Some(Cause::Hint | Cause::Poll)) {
                    shared.room.others.our_turn(lock, ended);
                }
                let ends = ended + wish.ttl.duration() + shared.between(AFTER_EXPIRY);
                return Ok((lease, Success { ends, round }));
            }
            Err(denial) => {
                splits = if denial.split { splits + 1 } else { 0 };
                rounds += denial.rounds;
                denial.error
            }
        };
        fresh = false;
        place.refused(ended, shared.refusal(error, splits, round, ended));
    }
}

/// Until something has changed for this place, or until then.
async fn signalled(place: &Place<Wish, Attempt>, until: Instant) {
    let _ = timeout_at(until, poll_fn(|context| place.poll_signalled(context))).await;
}

/// What to tell somebody who has waited in vain.
fn last_error(place: &Place<Wish, Attempt>, now: Instant) -> LockError {
    match place.news(now) {
        Some((LockError::Held(mut by), ago)) => {
            by.expires_in = by.expires_in.map(|left| left.saturating_sub(ago));
            LockError::Held(by)
        }
        Some((error, _)) => error,
        // Somebody who came before has it, or asks for it.
        None => LockError::Held(Default::default()),
    }
}

/// What a release is followed by.
pub(crate) enum Handing {
    /// Those who wait elsewhere are told, if there are any. Then the lines have to hear that the release was sent.
    Tell(Option<Hint>),
    /// The lock is asked for again, for the first one who waits here.
    To(Box<(Offer<Wish, Attempt>, Attempt)>),
}

impl Shared {
    /// Decides who a lock is for that is about to be released here.
    pub(crate) fn handing(self: &Arc<Self>, lock: &Bytes, t: FencingToken, now: Instant) -> Handing {
        let room = &self.room;
        // Not for a lock that nobody waits for here: it is kept from nobody.
        let deaf = room.lines.is_waited_for(lock) && !self.nodes.iter().any(|node| node.is_subscribed());
        let whose = room.others.whose(lock, now, deaf);
        let others_wait = whose != Whose::Ours;
        let pause = match whose {
            Whose::Ours | Whose::StillOurs => None,
            // Others poll, and are not told.
            Whose::Theirs(_) if deaf => Some(Pause { rounds: 0.0, least: POLL.1, most: POLL.1 }),
            Whose::Theirs(untaken) => {
                let (least, most) = THEIR_TURN;
                let rounds = (least + (most - least) * self.seams.entropy.unit()) * f64::from(1 << untaken.min(6));
                Some(Pause { rounds, least: Duration::ZERO, most: LONGEST_PAUSE })
            }
        };
        let told =
            |waiting| Handing::Tell(others_wait.then(|| Hint::new(room.origin, Word::Released { t, waiting }, lock)));
        match room.lines.next(lock, now, pause) {
            Next::Nobody => {
                if others_wait {
                    room.others.their_turn(lock, now);
                }
                told(false)
            }
            Next::Busy => told(true),
            Next::Others => {
                room.others.their_turn(lock, now);
                told(true)
            }
            Next::First(offer) => {
                room.others.handed_over(lock, now);
                let Wish { keys, claim, info, ttl } = offer.wish().clone();
                Handing::To(Box::new((offer, Attempt::new(self, keys, claim, info, ttl))))
            }
        }
    }

    /// Whether a node has the lock for whoever wishes it.
    async fn is_stored_for(&self, wish: &Wish) -> bool {
        let limit = self.round_limit(wish.ttl);
        let deadline = Instant::now() + limit;
        let outcome = self.round(Op::Inspect { keys: wish.keys.clone() }, deadline).outcome(deadline, limit).await;
        let is_ours = |vote: &Vote| match vote {
            Vote::Found(holding) => holding.record.parse().is_some_and(|(token, _)| *token.owner() == wish.claim.owner),
            _ => false,
        };
        outcome.votes.iter().flatten().any(is_ours)
    }

    /// What to tell others of an attempt that is given up half-way.
    pub(crate) fn given_up(&self, lock: &Bytes, t: FencingToken) -> Option<Hint> {
        let waited_for = self.room.others.whose(lock, Instant::now(), false) != Whose::Ours;
        waited_for.then(|| Hint::new(self.room.origin, Word::Released { t, waiting: false }, lock))
    }

    /// When to try again after an attempt, the last of so many in a row that split the votes.
    fn refusal(&self, error: LockError, splits: u32, round: Duration, now: Instant) -> Refusal {
        // From one to three rounds, more the next time: who wakes first finds the others gone.
        let quick = now + round.mul_f64(1.0 + 2.0 * self.seams.entropy.unit()) * splits.clamp(1, 8);
        let poll_due = now + self.between(POLL);
        let (retry, quick) = match &error {
            LockError::Held(_) | LockError::NoQuorum(_) if (1..=MAX_SPLITS).contains(&splits) => (quick, quick),
            LockError::Held(by) => match by.expires_in {
                Some(left) => (poll_due.min(now + left + self.between(AFTER_EXPIRY)), quick),
                None => (poll_due, quick),
            },
            LockError::NoQuorum(_) => {
                let retry = now + self.between(NO_QUORUM);
                (retry, retry)
            }
            // An acquire has none of these outcomes.
            LockError::Lost | LockError::NotHolder(_) | LockError::Unknown(_) => (poll_due, poll_due),
            LockError::TtlTooLong { .. } | LockError::TooManyWaiters { .. } => (poll_due, poll_due),
        };
        Refusal { error, retry, quick, poll_due, round }
    }

    /// The release has been sent that was asked about at `since`, and whatever was prepared in vain is undone.
    pub(crate) fn released(&self, lock: &Bytes, since: Instant) {
        self.room.lines.released(lock, since, Instant::now());
    }

    fn between(&self, (least, most): (Duration, Duration)) -> Duration {
        least + (most - least).mul_f64(self.seams.entropy.unit())
    }
}

#[cfg(test)]
mod explored;
#[cfg(test)]
mod tests;
