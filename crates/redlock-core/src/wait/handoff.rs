//! The plan of a release: which waiter here gets the lock, and which hint the nodes publish.

use std::task::Waker;

use bytes::Bytes;
use tokio::time::Instant;

use super::queue::{Cause, Pause, WaitQueues};
use super::sync::Arc;
use crate::node::Hint;

/// Who gets a lock that is released here.
pub(super) enum Next<P> {
    /// Nobody waits here.
    Nobody,
    /// The first waiter here has an attempt in flight, and will make another one if that attempt is
    /// refused.
    Competing,
    /// The waiters here have used up their quota: waiters at other gateways may try first.
    Yielded,
    /// The lock is left to a waiter that is away for a moment and is before all waiters here.
    Away,
    /// This waiter here.
    First {
        ticket: u64,
        /// Boxed, because most releases are for nobody here.
        params: Box<P>,
    },
}

/// The plan of a release that is about to be sent. [`carry_out`](Self::carry_out) is the only way
/// to use it, so the plan lives until the release has been sent.
///
/// A plan that ends without a handoff, for whatever reason, wakes the first waiter. That waiter may
/// have been refused because of the very grant that is released.
#[must_use = "a plan that is not carried out wakes a waiter before the release is sent"]
pub(crate) struct Handoff<P, A> {
    queues: Arc<WaitQueues<P, A>>,
    lock: Bytes,
    /// When the plan was made. A waiter refused since then may have asked before the release.
    since: Instant,
    pub(super) next: Next<P>,
    /// The hint that the nodes publish with the release.
    pub(super) hint: Option<Hint>,
    is_handed_over: bool,
}

impl<P: Clone, A> WaitQueues<P, A> {
    /// Plans a release. With a `pause`, the lock is left to other gateways, and the queue here
    /// competes again after the pause.
    pub(crate) fn release(
        self: &Arc<Self>,
        lock: &Bytes,
        now: Instant,
        pause: Option<Pause>,
    ) -> Handoff<P, A> {
        let mut next = Next::Nobody;
        self.update(lock, |queue, places| {
            queue.clear_holder();
            if queue.competing.is_some() {
                queue.released_meanwhile = Some(Cause::Release);
                next = Next::Competing;
                return None;
            }
            if let Some(Pause { rounds, least, most }) = pause {
                next = Next::Yielded;
                let pause_ends = now + queue.round.mul_f64(rounds).clamp(least, most);
                queue.pause_ends = Some(pause_ends);
                return queue.schedule(Cause::Poll, pause_ends);
            }
            let (number, first) = queue.waiters.first_key_value()?;
            if self.patient_until(places, lock, *number, now).is_some() {
                next = Next::Away;
                return queue.schedule(Cause::Release, now);
            }
            next = Next::First { ticket: first.ticket, params: Box::new(first.params.clone()) };
            queue.competing = Some(first.ticket);
            None
        });
        Handoff::new(self, lock, now, next)
    }
}

impl<P, A> Handoff<P, A> {
    pub(super) fn new(
        queues: &Arc<WaitQueues<P, A>>,
        lock: &Bytes,
        since: Instant,
        next: Next<P>,
    ) -> Self {
        Self {
            queues: queues.clone(),
            lock: lock.clone(),
            since,
            next,
            hint: None,
            is_handed_over: false,
        }
    }

    /// Carries the plan out. `send` gets the first waiter's parameters, if the lock is for a waiter
    /// here, and the hint to publish. `send` must send the release. In the same call to the nodes,
    /// `send` may also send an attempt for that waiter. `send` returns its own result, and that
    /// attempt if there is one.
    pub(crate) fn carry_out<R>(
        mut self,
        send: impl FnOnce(Option<&P>, Option<Hint>) -> (R, Option<A>),
    ) -> R {
        let hint = self.hint.take();
        let first = match &self.next {
            Next::First { params, .. } => Some(&**params),
            Next::Nobody | Next::Competing | Next::Yielded | Next::Away => None,
        };
        let (sent, prepared) = send(first, hint);
        if let Some(prepared) = prepared {
            self.hand(prepared);
        }
        sent
    }

    /// Hands the first waiter the attempt that was sent for it in the call that released the lock.
    /// Returns whether that waiter was still there. If not, `prepared` is dropped.
    pub(super) fn hand(mut self, prepared: A) -> bool {
        let Next::First { ticket, .. } = self.next else { return false };
        let mut shard = self.queues.shard(&self.lock);
        let waiter = shard.queues.get_mut(&self.lock).and_then(|queue| queue.waiter_mut(ticket));
        let Some(waiter) = waiter else {
            drop(shard);
            // Dropping the attempt undoes it. That comes before the next waiter is woken, because
            // this attempt may be the reason why the next waiter was refused.
            drop(prepared);
            return false;
        };
        waiter.handed = Some(Box::new(prepared));
        waiter.signalled = true;
        let wake = waiter.waker.take();
        drop(shard);
        self.is_handed_over = true;
        wake.into_iter().for_each(Waker::wake);
        true
    }
}

impl<P, A> Drop for Handoff<P, A> {
    fn drop(&mut self) {
        if self.is_handed_over {
            return;
        }
        if let Next::First { ticket, .. } = self.next {
            // The first waiter tries by itself. If it has left, `competing` names another waiter,
            // and stays.
            self.queues.update(&self.lock, |queue, _| {
                queue.competing.take_if(|competing| *competing == ticket)?;
                queue.schedule(queue.cause, queue.next_try.min(Instant::now()))
            });
        }
        self.queues.released(&self.lock, self.since, Instant::now());
    }
}
