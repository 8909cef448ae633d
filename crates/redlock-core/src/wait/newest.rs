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
//! [`KEPT`]: super::places::KEPT

use std::task::Waker;

use bytes::Bytes;
use tokio::time::Instant;

use super::order::QueueMode;
use super::queue::{KeptPlaces, Shard, WaitQueue, WaitQueues};
use crate::model::types::Owner;

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
        let arrival = own.arrival;
        let owner = own.shared_owner;
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
        drop(shard);
        wake.into_iter().for_each(Waker::wake);
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
}
