//! Waiters of the kind [`QueueMode::Newest`]: when one begins to wait, it supersedes the older ones.
//!
//! Whether a request is newer counts from the first request of its owner. A request that takes up a
//! kept place counts from the request that left the place. A copy counts from the original. So a
//! repeated request supersedes only what its first request would have superseded.
//!
//! A superseded waiter takes no further step, and its place is not kept. An attempt that is already
//! in flight may still get the lock. The queue notes a superseded owner for [`KEPT`], so that a
//! repeated request of that owner is superseded too, and does not count as a newer one. A waiter
//! whose owner appears to hold the lock is not superseded: it is about to get its own grant.
//!
//! Gateways tell each other of their newest waiters by hints, and a hint may be lost. All gateways
//! order arrivals in the same way, so the newest waiter of all is never superseded. Clocks differ:
//! if two waiters arrive at two gateways within that difference, either may count as the newer. A
//! repeated request at another gateway counts as new there, unless that gateway knows an earlier
//! request of the same owner. After a clock was set back, the arrivals at its gateway stay ahead
//! until the clock has caught up.
//!
//! [`KEPT`]: super::places::KEPT

use std::task::Waker;

use bytes::Bytes;
use tokio::time::Instant;

use super::order::QueueMode;
use super::queue::{KeptPlaces, Shard, WaitQueue, WaitQueues, Waiter};
use crate::error::LockError;
use crate::model::types::Owner;
use crate::node::hint::NewestWaiter;

impl<P, A> WaitQueues<P, A> {
    /// Supersedes the waiters and the kept places that are older than this ticket.
    pub(super) fn supersede_older(&self, lock: &Bytes, ticket: u64, now: Instant) {
        let mut shard = self.shard(lock);
        let Shard { queues, places } = &mut *shard;
        let Some(queue) = queues.get_mut(lock) else { return };
        let Some(own) = queue.waiter_mut(ticket) else { return };
        if own.mode == QueueMode::All || own.is_superseded {
            return;
        }
        let own = NewestWaiter { arrival: own.arrival, shared_owner: own.shared_owner };
        let wake = self.supersede(Some(queue), places, lock, own, now);
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
    }

    /// Supersedes the waiters and the kept places that are older than this waiter of another
    /// gateway.
    pub(crate) fn supersede_older_than(&self, lock: &Bytes, foreign: NewestWaiter, now: Instant) {
        let mut shard = self.shard(lock);
        let Shard { queues, places } = &mut *shard;
        let queue = queues.get_mut(lock);
        let mut arrival = foreign.arrival;
        if let Some(owner) = foreign.shared_owner {
            // A copy counts from the original. If the original was superseded, so is the copy.
            let is_superseded = self.was_superseded(places, lock, &owner, now);
            let waits = queue.as_ref().and_then(|queue| queue.arrival_of_copy(owner));
            let is_away = self.with_places(places, lock, now, |places| places.arrival_of(&owner));
            if is_superseded {
                return;
            }
            arrival = [waits, is_away].into_iter().flatten().fold(arrival, u64::min);
        }
        let wake = self.supersede(queue, places, lock, NewestWaiter { arrival, ..foreign }, now);
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
    }

    /// Returns wakers, to be called after the shard is unlocked.
    fn supersede(
        &self,
        queue: Option<&mut WaitQueue<P, A>>,
        places: &mut KeptPlaces<P>,
        lock: &Bytes,
        NewestWaiter { arrival, shared_owner: owner }: NewestWaiter,
        now: Instant,
    ) -> Vec<Waker> {
        let Some(queue) = queue else {
            self.with_places(places, lock, now, |places| {
                places.supersede_older(arrival, owner, now)
            });
            return Vec::new();
        };
        let mut wake = Vec::new();
        let holder = queue.holder;
        let mut tickets = std::mem::take(&mut queue.newest);
        tickets.retain(|ticket| {
            let Some(older) = queue.waiter_mut(*ticket) else { return false };
            let is_copy = owner.is_some() && older.shared_owner == owner;
            let holds = older.shared_owner.is_some() && older.shared_owner == holder;
            if older.arrival >= arrival || is_copy || holds {
                return true;
            }
            older.is_superseded = true;
            older.signalled = true;
            wake.extend(older.waker.take());
            let noted = older.shared_owner.zip(older.permit.take());
            if let Some((owner, permit)) = noted {
                self.keep(places, lock, now, |places| {
                    places.note_superseded(owner, Some(permit), now)
                });
            }
            false
        });
        queue.newest = tickets;
        let gave_up = self
            .with_places(places, lock, now, |places| places.supersede_older(arrival, owner, now));
        if gave_up {
            // The lock may have been left to the owner of a place.
            wake.extend(queue.signal_first());
        }
        wake
    }

    /// Whether a request of this kind and owner was superseded before it entered.
    pub(super) fn was_superseded(
        &self,
        all: &mut KeptPlaces<P>,
        lock: &Bytes,
        owner: &Owner,
        now: Instant,
    ) -> bool {
        self.with_places(all, lock, now, |places| places.was_superseded(owner))
    }
}

impl<P, A> WaitQueue<P, A> {
    /// The arrival of the oldest waiting request of this owner and kind.
    pub(super) fn arrival_of_copy(&self, owner: Owner) -> Option<u64> {
        let copies = self.newest.iter().filter_map(|ticket| {
            self.waiters.get(&self.number_of(*ticket)).filter(|it| it.shared_owner == Some(owner))
        });
        copies.map(|copy| copy.arrival).min()
    }

    /// The newest waiter that has begun to wait. `None` unless a majority has refused the last
    /// attempt: a gateway that reaches too few nodes must not supersede the waiters of others.
    pub(super) fn newest(&self) -> Option<NewestWaiter> {
        if !matches!(self.last_refusal, Some((LockError::Held(_), _))) {
            return None;
        }
        let waiters = self.newest.iter().filter_map(|ticket| {
            self.waiters.get(&self.number_of(*ticket)).filter(|waiter| waiter.has_slot)
        });
        let newest = waiters.max_by_key(|waiter| waiter.arrival)?;
        let Waiter { arrival, shared_owner, .. } = **newest;
        Some(NewestWaiter { arrival, shared_owner })
    }
}
