//! Waiting for a lock: one queue per lock name, by priority and then in the order of arrival. Only
//! the first waiter competes.
//!
//! If every waiting client polled the nodes by itself, it would often sleep while the lock is free.
//! Clients that try at the same time would split the votes. Here all waiters of one process for a
//! lock act as one competitor: only the first waiter tries. It learns from three sources when to
//! try:
//!
//! - *Local handoff.* A release through this process asks for the lock again on behalf of the first
//!   waiter, in the same call to every node. The lock moves from holder to holder in one round
//!   trip.
//! - *Hints.* A refused waiter asks the nodes to publish that somebody waits here. A process that
//!   has received such a hint from another process asks the nodes to publish its releases. While
//!   nobody waits, nothing is published, and the scripts of an uncontended lock contain nothing
//!   extra. See [`fairness`].
//! - *Polls.* A hint may be lost, and no hint announces that a lock expires. So the first waiter
//!   also tries when the lock is expected to expire, and about twice per second. While very many
//!   locks are waited for, it tries less often. See [`polls`].
//!
//! While waiters at other gateways are known, local handoffs have a quota: 32 handoffs or 10 ms.
//! When the quota is used up, the next release hands the lock to nobody here, so that the other
//! gateways can get it. The queue here competes again after a pause. If no node passes on hints,
//! the other gateways can only poll. Then the quota is 4 s, and the pause is 800 ms, the longest
//! time between two polls.
//!
//! A round may take at most a tenth of its waiter's TTL. After an attempt without a quorum, the
//! first waiter lets waiters pass whose rounds may take longer. So a waiter whose TTL is too short
//! for the distance to the nodes blocks nobody else. If no waiter's rounds may take longer, the
//! queue keeps its order and backs off as a whole.
//!
//! A waiter with a shared owner that leaves without a grant keeps its place for a while, see
//! [`places`]. The next request of its owner takes the place up.
//!
//! A waiter may ask that only the newest of its kind waits, see [`newest`].
//!
//! The order is promised only among the waiters of one process. An
//! [`acquire`](crate::Redlock::acquire) does not wait: it is in no queue, and may find the lock
//! free between two waiters. Safety does not depend on this module: a waiter gets the lock by the
//! votes of a majority, with a fencing token. For this module, an attempt is an opaque type (`A`).
//! [`release`](crate::operations::release) carries out a handoff.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | `queue` | the waiters of each lock, and when the first of them tries | who waits, and how |
//! | [`order`] | who is before whom | queues |
//! | [`newest`] | a newer waiter replaces the older ones of its kind | attempts |
//! | [`places`] | the places in line that are kept for waiters between two turns | queues |
//! | `ticket` | a waiter's place in a queue: enter, step, report, leave | other gateways |
//! | `handoff` | the plan of a release: which waiter gets the lock | when a plan is made |
//! | [`fairness`] | which locks are waited for elsewhere, and whose they are next | queues |
//! | [`polls`] | how often waiters poll | queues |

pub(crate) mod fairness;
mod handoff;
mod newest;
pub(crate) mod order;
pub(crate) mod places;
pub(crate) mod polls;
pub(crate) mod queue;
mod sync;
pub(crate) mod ticket;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use self::fairness::Fairness;
use self::handoff::{Handoff, Next};
use self::order::{Priority, QueueMode};
use self::queue::{Bounds, WaitQueues};
use self::ticket::{PlaceTerms, WaitTicket};
use crate::model::clock::{Clock, Entropy};
use crate::model::types::{FencingToken, Info, LockName, Owner};
use crate::node::hint::HintKind;
use crate::node::{Hint, Listener};
use crate::settings::{Env, Settings};

/// The time from the creation of a queue to its first poll, if the first waiter got the lock
/// immediately. The waiters behind that waiter have not been refused yet, so no hint has announced
/// them to other gateways.
const FIRST_POLL: Duration = Duration::from_millis(25);

/// How much of what is released the first waiter takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fits {
    /// Nothing: the waiter needs something else, and tries by itself.
    No,
    /// A part. Waiters at other gateways may take the rest.
    Part,
    All,
}

/// The number of waiters in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waiting {
    /// Requests that wait.
    pub waiters: usize,
    /// Locks that they wait for.
    pub locks: usize,
}

/// A request in line for a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiter {
    /// The text for people that the request has sent.
    pub info: Info,
    /// The priority that the request has asked for.
    pub priority: Priority,
    /// Time since the first request of this owner began to wait.
    pub waits_for: Duration,
    /// Whether the owner is between two requests, so that only its place is kept.
    pub is_away: bool,
}

/// The waiters of this process, and the known waiters elsewhere.
pub(crate) struct WaitRegistry<P, A> {
    queues: Arc<WaitQueues<P, A>>,
    fairness: Arc<Fairness>,
    /// Hints for keys without this prefix are ignored, because everybody who may write to the nodes
    /// can publish hints.
    key_prefix: Bytes,
    max_clock_skew: Duration,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
}

impl<P: Clone, A> WaitRegistry<P, A> {
    pub(crate) fn new(settings: &Settings, env: &Env, fairness: Arc<Fairness>) -> Self {
        let bounds =
            Bounds { total: settings.max_waiters, per_lock: settings.max_waiters_per_lock };
        Self {
            queues: WaitQueues::new(bounds),
            fairness,
            key_prefix: Bytes::copy_from_slice(settings.key_prefix.as_bytes()),
            max_clock_skew: settings.node.max_clock_skew,
            clock: env.clock.clone(),
            entropy: env.entropy.clone(),
        }
    }

    /// Enters the queue of a lock. Also returns the earliest time of the first attempt.
    pub(crate) fn enter(
        &self,
        lock: &Bytes,
        params: P,
        terms: PlaceTerms,
    ) -> (WaitTicket<P, A>, Instant) {
        let now = Instant::now();
        let first_try = self.fairness.yields_until(lock, now).unwrap_or(now);
        let times = (now, first_try, now + FIRST_POLL);
        if terms.mode == QueueMode::Newest {
            self.queues.arrivals_follow(self.clock.wall_micros());
        }
        (self.queues.enter(lock.clone(), params, terms, times), first_try)
    }

    pub(crate) fn is_waited_for(&self, lock: &Bytes) -> bool {
        self.queues.is_waited_for(lock)
    }

    /// The number of kept places.
    pub(crate) fn kept_places(&self) -> usize {
        self.queues.kept()
    }

    /// Removes the places that have ended.
    pub(crate) fn end_places(&self) {
        self.queues.end_places(Instant::now());
    }

    /// The owner no longer wants the lock: its place is given up.
    pub(crate) fn give_up(&self, lock: &Bytes, owner: &Owner) {
        self.queues.give_up(lock, owner, Instant::now());
    }

    /// The first `limit` in line for a lock, as `describe` shows their parameters, and the length
    /// of the line.
    pub(crate) fn line(
        &self,
        lock: &Bytes,
        limit: usize,
        describe: impl Fn(&P) -> Info,
    ) -> (Vec<Waiter>, usize) {
        let now = Instant::now();
        self.queues.line(lock, limit, now, |params, priority, since, is_away| Waiter {
            info: describe(params),
            priority,
            waits_for: now.saturating_duration_since(since),
            is_away,
        })
    }

    /// Whether nobody is in any line.
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    /// The length of the line for a lock.
    pub(crate) fn line_length(&self, lock: &Bytes) -> usize {
        self.queues.line_length(lock, Instant::now)
    }

    /// The place in line of the first waiter whose parameters match: 1 is served next.
    pub(crate) fn position(&self, lock: &Bytes, matches: impl Fn(&P) -> bool) -> Option<usize> {
        self.queues.position(lock, Instant::now(), matches)
    }

    pub(crate) fn count(&self) -> Waiting {
        let (waiters, locks) = self.queues.count();
        Waiting { waiters, locks }
    }

    /// Plans a release. `fits` tells what the first waiter takes. A hint about the release gets
    /// the token `t`. `hints_arrive` returns whether any node passes on hints.
    pub(crate) fn plan_handoff(
        &self,
        lock: &Bytes,
        fits: impl Fn(&P) -> Fits,
        t: impl FnOnce() -> FencingToken,
        hints_arrive: impl FnOnce() -> bool,
    ) -> Handoff<P, A> {
        let now = Instant::now();
        // If nobody waits here, the release keeps the lock from nobody elsewhere, whether hints
        // arrive or not.
        let hints = !self.is_waited_for(lock) || hints_arrive();
        let quota = self.fairness.quota(lock, now, hints);
        let mut plan = self.queues.release(lock, now, quota.pause(hints, self.entropy.as_ref()));
        match &plan.next {
            Next::First { params, .. } => match fits(params) {
                Fits::All => {
                    self.fairness.handed_over(lock, now);
                    return plan;
                }
                // Waiters elsewhere may try for the rest.
                Fits::Part => self.fairness.handed_over(lock, now),
                // The first waiter tries by itself, and waiters elsewhere may try too.
                Fits::No => {}
            },
            Next::Nobody | Next::Yielded if quota.others_wait() => self.fairness.yielded(lock, now),
            Next::Nobody | Next::Yielded | Next::Competing | Next::Away => {}
        }
        let waiting = !matches!(plan.next, Next::Nobody);
        plan.hint = quota.others_wait().then(|| self.fairness.released(lock, t(), waiting));
        plan
    }

    /// Releases several locks without handing any of them over. `send` must send the release, and
    /// publishes at most one hint with it. Then this function wakes the first waiter of each lock.
    pub(crate) fn release_without_handoff(
        &self,
        locks: impl Iterator<Item = Bytes>,
        t: impl Fn() -> FencingToken,
        hints_arrive: impl Fn() -> bool,
        send: impl FnOnce(Option<Hint>),
    ) {
        let plan = |lock| self.plan_handoff(&lock, |_| Fits::No, &t, &hints_arrive);
        let mut plans: Vec<_> = locks.map(plan).collect();
        send(plans.iter_mut().find_map(|plan| plan.hint.take()));
        drop(plans);
    }
}

impl<P: Clone + Send, A: Send> Listener for WaitRegistry<P, A> {
    fn on_hint(&self, hint: &Hint) {
        let Some((kind, lock)) = self.fairness.parse_foreign(hint) else { return };
        let name = lock.strip_prefix(&self.key_prefix[..]).unwrap_or_default();
        if !(1..=LockName::MAX_LEN).contains(&name.len()) {
            return;
        }
        let now = Instant::now();
        let max_ahead = 2 * self.max_clock_skew.as_micros() as u64;
        let is_credible =
            |micros: u64| micros.saturating_sub(self.clock.wall_micros()) <= max_ahead;
        match kind {
            HintKind::Waiting { seconds, newest } => {
                self.fairness.wait_for(&lock, now, seconds);
                // An arrival in the future would supersede all waiters that arrive before that time.
                if let Some(newest) = newest.filter(|newest| is_credible(newest.arrival)) {
                    self.queues.supersede_older_than(&lock, newest, now);
                }
            }
            // No node grants a T so far ahead, so the hint is false and ignored. Its T would make
            // later, true hints look old.
            HintKind::Released { t, .. } if !is_credible(t.get()) => {}
            HintKind::Released { t, waiting } => {
                self.fairness.taken(&lock, now);
                if waiting {
                    self.fairness.wait(&lock, now);
                }
                self.queues.wake(&lock, t.get(), now);
            }
        }
    }
}

#[cfg(test)]
mod interleavings;
#[cfg(test)]
mod tests;
