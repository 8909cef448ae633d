//! The places in line that are kept for waiters between two turns.
//!
//! A client that waits for long asks in turns: each request waits for a while, and the next one
//! repeats it. The owner is the same, because all requests of one idempotency key share it. A
//! waiter that leaves without a grant is *away*: its number in the order of the queue is kept for
//! [`KEPT`]. The next request of its owner takes that number up again. Whoever is away never
//! competes.
//!
//! To keep the order across the short gap between two turns, a queue is *patient*: it leaves a free
//! lock for up to [`GAP`] to a waiter before its first waiter. One such pause is charged for
//! [`CHARGED`]. The pause is free of charge if that waiter came back and asked the nodes. So
//! clients that never come back cost at most 1 % of a lock's time.
//!
//! The owners of waiters that were [superseded](super::newest) are noted here for the same time.
//! They have no place in line.
//!
//! Invariants:
//! - A place and a waiter of one queue never have the same number.
//! - An owner with a waiter in the queue has no place here.
//! - Every place ends, and so does every charge.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use super::order::{Priority, QueueMode};
use crate::model::types::Owner;

/// How long a place is kept.
pub(super) const KEPT: Duration = Duration::from_secs(10);
/// How long after a waiter has left a free lock is reserved for it.
pub(super) const GAP: Duration = Duration::from_millis(200);
/// How long a queue is not patient again after a pause in which nobody came back.
pub(super) const CHARGED: Duration = Duration::from_secs(20);

/// Whether the place of a waiter is kept when the waiter leaves without a grant. Only places of
/// [shared](crate::OwnerChoice::Shared) owners are kept.
pub struct PlacePermit(Option<Box<dyn Any + Send>>);

impl PlacePermit {
    /// The place is kept. `counted` is dropped when the place is given up, or the waiter is served.
    /// Its destructor must not call this library.
    pub fn counted(counted: impl Any + Send) -> Self {
        Self(Some(Box::new(counted)))
    }

    /// No place is kept.
    pub fn none() -> Self {
        Self(None)
    }

    pub(super) fn into_inner(self) -> Option<Permit> {
        self.0
    }
}

impl From<()> for PlacePermit {
    fn from((): ()) -> Self {
        Self::none()
    }
}

impl fmt::Debug for PlacePermit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PlacePermit").field(&self.0.is_some()).finish()
    }
}

pub(super) type Permit = Box<dyn Any + Send>;

/// A place that is kept.
pub(super) struct Place<P> {
    pub(super) owner: Owner,
    pub(super) params: P,
    pub(super) priority: Priority,
    pub(super) mode: QueueMode,
    /// When the owner's first request entered the queue.
    pub(super) since: Instant,
    /// The count of arrivals at that time.
    pub(super) arrival: u64,
    /// When the waiter left.
    pub(super) left: Instant,
    /// `None` while the charge for a pause has the permit.
    pub(super) permit: Option<Permit>,
}

/// The kept places of one lock.
pub(super) struct Places<P> {
    /// By number in the order of the queue.
    line: BTreeMap<u64, Place<P>>,
    by_owner: HashMap<Owner, u64>,
    /// When each waiter left, and its number.
    by_time: BTreeSet<(Instant, u64)>,
    /// The numbers of the places of the kind [`QueueMode::Newest`].
    newest: BTreeSet<u64>,
    /// The owners that were superseded. Their permits count them for their clients.
    superseded: HashMap<Owner, (Instant, Option<Permit>)>,
    superseded_by_time: VecDeque<(Instant, Owner)>,
    pause: Option<Pause>,
}

/// The last pause, in which a free lock was left to waiters that were away.
struct Pause {
    /// The smallest number of the waiters that the pause is for.
    number: u64,
    ends: Instant,
    charged_until: Instant,
    /// Counts the charge for the client that causes it, even if that client gives its place up.
    _permit: Option<Permit>,
}

impl<P> Default for Places<P> {
    fn default() -> Self {
        Self {
            line: BTreeMap::new(),
            by_owner: HashMap::new(),
            by_time: BTreeSet::new(),
            newest: BTreeSet::new(),
            superseded: HashMap::new(),
            superseded_by_time: VecDeque::new(),
            pause: None,
        }
    }
}

impl<P> Places<P> {
    /// The number of places and superseded owners, and of charges for a pause.
    pub(super) fn counts(&self) -> [usize; 2] {
        [self.line.len() + self.superseded.len(), usize::from(self.pause.is_some())]
    }

    /// Removes the places, the superseded owners and the charge that have ended.
    pub(super) fn end(&mut self, now: Instant) {
        while let Some((left, number)) = self.by_time.first().copied()
            && now.saturating_duration_since(left) >= KEPT
        {
            self.remove(number);
        }
        while let Some((at, owner)) = self.superseded_by_time.front().copied()
            && now.saturating_duration_since(at) >= KEPT
        {
            self.superseded_by_time.pop_front();
            if self.superseded.get(&owner).is_some_and(|(noted, _)| *noted == at) {
                self.superseded.remove(&owner);
            }
        }
        self.pause.take_if(|pause| pause.charged_until <= now);
    }

    pub(super) fn keep(&mut self, number: u64, place: Place<P>) {
        self.by_owner.insert(place.owner, number);
        self.by_time.insert((place.left, number));
        if place.mode == QueueMode::Newest {
            self.newest.insert(number);
        }
        self.line.insert(number, place);
    }

    /// Notes that this owner was superseded.
    pub(super) fn note_superseded(&mut self, owner: Owner, permit: Option<Permit>, now: Instant) {
        self.superseded.insert(owner, (now, permit));
        self.superseded_by_time.push_back((now, owner));
    }

    pub(super) fn was_superseded(&self, owner: &Owner) -> bool {
        self.superseded.contains_key(owner)
    }

    /// The arrival of the owner whose place of the kind [`QueueMode::Newest`] is kept.
    pub(super) fn arrival_of(&self, owner: &Owner) -> Option<u64> {
        let place = self.line.get(self.by_owner.get(owner)?)?;
        (place.mode == QueueMode::Newest).then_some(place.arrival)
    }

    /// Supersedes the places of the kind [`QueueMode::Newest`] that are older than the waiter with
    /// this arrival and owner. Returns whether there were any.
    pub(super) fn supersede_older(
        &mut self,
        arrival: u64,
        owner: Option<Owner>,
        now: Instant,
    ) -> bool {
        let is_older = |number: &u64| {
            let place = self.line.get(number);
            place.is_some_and(|place| place.arrival < arrival && owner != Some(place.owner))
        };
        let older: Vec<_> = self.newest.iter().copied().filter(is_older).collect();
        for number in &older {
            if let Some(place) = self.remove(*number) {
                self.note_superseded(place.owner, place.permit, now);
            }
        }
        !older.is_empty()
    }

    /// The owner has the lock, or no longer wants it.
    pub(super) fn forget(&mut self, owner: &Owner) {
        self.take(owner);
        self.superseded.remove(owner);
    }

    /// Removes and returns the place of this owner.
    pub(super) fn take(&mut self, owner: &Owner) -> Option<(u64, Place<P>)> {
        let number = *self.by_owner.get(owner)?;
        Some((number, self.remove(number)?))
    }

    fn remove(&mut self, number: u64) -> Option<Place<P>> {
        let place = self.line.remove(&number)?;
        self.by_owner.remove(&place.owner);
        self.by_time.remove(&(place.left, number));
        self.newest.remove(&number);
        Some(place)
    }

    /// Until when the first waiter, with the number `first`, leaves a free lock to a waiter that is
    /// away. `may_charge`: whether another charge is within the limit.
    pub(super) fn patient_until(
        &mut self,
        first: u64,
        may_charge: bool,
        now: Instant,
    ) -> Option<Instant> {
        if self.pause.as_ref().map_or(!may_charge, |pause| pause.ends <= now) {
            return None;
        }
        let lately = self.by_time.iter().rev();
        let lately = lately.take_while(|(left, _)| now.saturating_duration_since(*left) < GAP);
        let (number, left) = lately
            .map(|(left, number)| (*number, *left))
            .filter(|(number, _)| *number < first)
            .min()?;
        let gap_ends = left + GAP;
        if let Some(pause) = &mut self.pause {
            pause.number = pause.number.min(number);
            return Some(gap_ends.min(pause.ends));
        }
        let _permit = self.line.get_mut(&number).and_then(|place| place.permit.take());
        let charged_until = now + CHARGED;
        self.pause = Some(Pause { number, ends: gap_ends, charged_until, _permit });
        Some(gap_ends)
    }

    /// The waiter with this number asked the nodes. If the pause was for it, the pause is free of
    /// charge.
    pub(super) fn asked(&mut self, number: u64) {
        self.pause.take_if(|pause| pause.number == number);
    }

    /// The places in order.
    pub(super) fn line(&self) -> &BTreeMap<u64, Place<P>> {
        &self.line
    }
}
