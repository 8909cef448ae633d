//! Waiting for a lock: a queue per lock name, in the order of arrival, of which only the first waiter competes.
//!
//! Polling libraries spend their time asleep, or splitting the votes among contenders. Here W waiters of one process cost
//! one competitor, and that one is told when to try:
//!
//! - *Local handoff.* A release that comes through this process asks for the lock again on behalf of the first waiter, in
//!   the same call to every node: one round trip from holder to holder.
//! - *Hints.* A waiter that is refused has the nodes tell the other processes that somebody waits here. A process that
//!   knows of waiters elsewhere has its releases tell them. Nobody is told anything while nobody waits, and the scripts
//!   of an uncontended lock are what they would be without all this. See [`fairness`].
//! - *Polls.* Hints may be lost, and a lock that expires sends none. So the first waiter asks anyway: when the lock may
//!   expire at the earliest, and about twice in a second; less often while very many locks are waited for, see [`polls`].
//!
//! A turn of local handoffs ends when others wait and it has lasted 32 handoffs or 10 ms: then the release is for the
//! others, and the queue here competes again after a pause. Where no node passes any hints on, a turn ends all the same,
//! after seconds, and for as long as the others may take to poll.
//!
//! A waiter whose attempt finds no quorum gives up its turn where others give their rounds more time: a TTL that is too short
//! for the way to the nodes keeps the lock from nobody else. Where they would fare no better the line keeps its order, and
//! backs off as a whole.
//!
//! Promised is the order within one process, for those who wait. An [`acquire`](crate::Redlock::acquire) does not wait, so it
//! is in nobody's queue, and may find the lock free between two of them. Nothing here has a part in safety: a waiter gets
//! the lock by the votes of a majority, and a fencing token. What asks for votes, and with what (`A`), is not known here: a
//! handoff is a plan, which [`release`](crate::operations::release) carries out.

pub(crate) mod fairness;
pub(crate) mod polls;
pub(crate) mod queue;
mod sync;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use self::fairness::Fairness;
use self::queue::{Bounds, Handoff, Next, WaitQueues, WaitTicket};
use crate::model::clock::{Clock, Entropy};
use crate::model::types::{FencingToken, LockName, Owner};
use crate::node::hint::HintKind;
use crate::node::{Hint, Listener};
use crate::settings::{Env, Settings};

/// The first poll of a queue whose first waiter got the lock at once: those behind it have not been announced yet.
const FIRST_POLL: Duration = Duration::from_millis(25);

/// How many wait in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Waiting {
    /// Requests that wait.
    pub waiters: usize,
    /// Locks that they wait for.
    pub locks: usize,
}

/// The waiters of one process, and what is known of those elsewhere.
pub(crate) struct WaitRegistry<P, A> {
    queues: Arc<WaitQueues<P, A>>,
    fairness: Arc<Fairness>,
    /// What a hint may name: everybody who may write to the nodes can publish.
    key_prefix: Bytes,
    max_clock_skew: Duration,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
}

impl<P: Clone, A> WaitRegistry<P, A> {
    pub(crate) fn new(settings: &Settings, env: &Env, fairness: Arc<Fairness>) -> Self {
        let bounds =
            Bounds { total: settings.max_waiters, of_one_lock: settings.max_waiters_per_lock };
        Self {
            queues: WaitQueues::new(bounds),
            fairness,
            key_prefix: Bytes::copy_from_slice(settings.key_prefix.as_bytes()),
            max_clock_skew: settings.node.max_clock_skew,
            clock: env.clock.clone(),
            entropy: env.entropy.clone(),
        }
    }

    /// To the end of the queue of a lock; with its owner, where other requests may ask for the same, and how long its rounds
    /// may take. Also says when its first attempt may be made at the earliest.
    pub(crate) fn enter(
        &self,
        lock: &Bytes,
        params: P,
        shared_owner: Option<Owner>,
        round_limit: Duration,
    ) -> (WaitTicket<P, A>, Instant) {
        let now = Instant::now();
        let first_try = self.fairness.yields_until(lock, now).unwrap_or(now);
        let times = (first_try, now + FIRST_POLL);
        (self.queues.enter(lock.clone(), params, shared_owner, round_limit, times), first_try)
    }

    pub(crate) fn is_waited_for(&self, lock: &Bytes) -> bool {
        self.queues.is_waited_for(lock)
    }

    pub(crate) fn count(&self) -> Waiting {
        let (waiters, locks) = self.queues.count();
        Waiting { waiters, locks }
    }

    /// Plans the release of the grant `t`. `hints_arrive` says whether any node passes on what others say.
    pub(crate) fn plan_handoff(
        &self,
        lock: &Bytes,
        t: FencingToken,
        hints_arrive: impl FnOnce() -> bool,
    ) -> Handoff<P, A> {
        let now = Instant::now();
        // A lock that nobody waits for here is kept from nobody.
        let hints = !self.is_waited_for(lock) || hints_arrive();
        let turn = self.fairness.turn(lock, now, hints);
        let mut plan = self.queues.release(lock, now, turn.pause(hints, self.entropy.as_ref()));
        match plan.next {
            Next::First { .. } => {
                self.fairness.handed_over(lock, now);
                return plan;
            }
            Next::Nobody | Next::Yielded if turn.others_wait() => self.fairness.yielded(lock, now),
            Next::Nobody | Next::Yielded | Next::Competing => {}
        }
        let waiting = !matches!(plan.next, Next::Nobody);
        plan.tell = turn.others_wait().then(|| self.fairness.released(lock, t, waiting));
        plan
    }
}

impl<P: Clone + Send, A: Send> Listener for WaitRegistry<P, A> {
    fn on_hint(&self, hint: &Hint) {
        let Some((word, lock)) = self.fairness.heard(hint) else { return };
        let name = lock.strip_prefix(&self.key_prefix[..]).unwrap_or_default();
        if !(1..=LockName::MAX_LEN).contains(&name.len()) {
            return;
        }
        let now = Instant::now();
        match word {
            HintKind::Waiting { seconds } => self.fairness.wait_for(&lock, now, seconds),
            // No node grants a T that is further ahead; believed, it would make true hints look old.
            HintKind::Released { t, .. }
                if t.get().saturating_sub(self.clock.wall_micros())
                    > 2 * self.max_clock_skew.as_micros() as u64 => {}
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
