//! The clients of this gateway, and what each has taken of what all share.
//!
//! Where there are keys, a client is a principal: a [`Client`] is part of its key and outlives a change of the file. Where
//! there are none, it is an address; of IPv6 the /64 network, which one machine may have to itself. Connections are counted by
//! address in either case: a key is shown later.

mod contention;
mod fair_queue;
mod quota;

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use redlock_core::LockName;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub use self::contention::ContentionTracker;
pub use self::fair_queue::{ClientQueue, FairQueue};
pub use self::quota::{Exceeded, Taken, Terms};
use self::quota::{QuotaLedger, QuotaSlot};

/// Addresses that are told apart. Those that come when there are more are one client together.
const MAX_ADDRESSES: usize = 65_536;

/// What one client has taken.
#[derive(Debug, Default)]
pub struct Client {
    /// Connections that are open; of an address, not of a principal.
    pub connections: Counter,
    /// Requests that are being worked on, but for those that are about a lock it may hold.
    pub in_flight_acquires: Counter,
    /// Those.
    pub in_flight_held: Counter,
    /// Those of either kind that are with the masters.
    pub running_acquires: Concurrency,
    pub running_held: Concurrency,
    /// Requests that wait for a lock.
    pub waiting: Counter,
    /// The locks that they wait for.
    pub waited: Names,
    /// Listings.
    pub listing: Counter,
    /// Requests that wait for their turn.
    pub queue: Arc<ClientQueue>,
    quota: QuotaLedger,
}

impl Client {
    /// Makes room for a lock that it asks for, with so many bytes of information beside it, until then at the latest.
    ///
    /// # Errors
    /// It takes too much already.
    pub fn reserve(
        self: &Arc<Self>,
        name: &str,
        info: usize,
        until: Instant,
        terms: Terms,
    ) -> Result<Reservation, Exceeded> {
        let (room, change) = self.quota.reserve(name, info, until, &terms)?;
        terms.taken.add(change);
        Ok(Reservation { client: self.clone(), room: Some(room), terms })
    }

    /// It has extended a lock until then.
    pub fn extended(&self, name: &str, until: Instant, terms: &Terms) {
        self.quota.extended(name, until, terms);
    }

    /// It wants to release a lock, its own or another.
    ///
    /// # Errors
    /// Its releases of other locks have left too much already.
    pub fn releases(&self, name: &str, terms: &Terms) -> Result<(), Exceeded> {
        self.quota.may_release(name, terms)
    }

    /// It has released a lock.
    pub fn released(&self, name: &str, terms: &Terms) {
        terms.taken.add(self.quota.released(name, terms));
    }

    /// It has released nothing, as far as is known.
    pub fn not_released(&self, name: &str, terms: &Terms) {
        terms.taken.add(self.quota.not_released(name, terms));
    }

    /// Whether nothing would be lost if it was lost.
    fn is_idle(&self) -> bool {
        // Whoever waits for a lock waits, and whoever is in line has a connection.
        let Self {
            connections, in_flight_acquires, in_flight_held, waiting, listing, quota, ..
        } = self;
        [connections, in_flight_acquires, in_flight_held, waiting, listing]
            .iter()
            .all(|counter| counter.count() == 0)
            && quota.is_empty()
    }
}

/// Room for a lock that is asked for; given back when dropped.
#[must_use]
pub struct Reservation {
    client: Arc<Client>,
    /// Until it is used.
    room: Option<QuotaSlot>,
    terms: Terms,
}

impl Reservation {
    /// It was granted until then.
    pub fn granted(mut self, until: Instant) {
        if let Some(room) = self.room.take() {
            self.client.quota.granted(room, until, &self.terms);
        }
    }

    /// Nothing new is on the masters.
    pub fn not_granted(&mut self) {
        if let Some(room) = self.room.take() {
            self.terms.taken.add(self.client.quota.refund(room));
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(room) = self.room.take() {
            self.terms.taken.add(self.client.quota.consume(room, &self.terms));
        }
    }
}

/// Counts what is taken and not given back yet.
#[derive(Debug, Clone, Default)]
pub struct Counter(Arc<AtomicUsize>);

impl Counter {
    /// `None` when `most` are taken.
    pub fn take(&self, limit: usize) -> Option<Place> {
        let one_more = |taken: usize| (taken < limit).then_some(taken + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, one_more).ok()?;
        Some(Place(self.clone()))
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

/// What was taken of a [`Counter`]; given back when dropped.
#[derive(Debug)]
#[must_use]
pub struct Place(Counter);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// How many requests of one kind run at the same time: the others of that client wait.
#[derive(Debug)]
pub struct Concurrency(Arc<Semaphore>);

impl Default for Concurrency {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(Self::MAX)))
    }
}

impl Concurrency {
    /// More brings no more throughput with masters that are near, and what is with the masters for longer than a round may take has no quorum.
    pub const MAX: usize = 256;

    /// Resolves when this one may run, of so many at most; it runs until what it resolves to is dropped. `None` would be the end of
    /// all.
    pub async fn begin(&self, concurrent_limit: usize) -> Option<OwnedSemaphorePermit> {
        let share = Self::MAX.div_ceil(concurrent_limit.clamp(1, Self::MAX));
        self.0.clone().acquire_many_owned(share as u32).await.ok()
    }
}

/// Counts names that are taken and not given back yet: one that is taken more than once counts once.
#[derive(Debug, Clone, Default)]
pub struct Names(Arc<Mutex<HashMap<LockName, usize>>>);

impl Names {
    /// `None` when `most` others are taken.
    pub fn take(&self, name: &LockName, limit: usize) -> Option<NamePlace> {
        let mut taken = self.0.lock();
        if taken.len() >= limit && !taken.contains_key(name) {
            return None;
        }
        *taken.entry(name.clone()).or_default() += 1;
        Some(NamePlace(self.clone(), name.clone()))
    }
}

/// A name that was taken of [`Names`]; given back when dropped.
#[derive(Debug)]
#[must_use]
pub struct NamePlace(Names, LockName);

impl Drop for NamePlace {
    fn drop(&mut self) {
        let mut taken = self.0.0.lock();
        if let Some(count) = taken.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.1);
            }
        }
    }
}

/// All clients that are known by their address.
#[derive(Debug, Default)]
pub struct Clients {
    by_network: Mutex<HashMap<IpAddr, Arc<Client>>>,
    others: Arc<Client>,
}

impl Clients {
    /// The client at an address.
    pub fn at(&self, address: IpAddr) -> Arc<Client> {
        let network = network(address);
        let mut known = self.by_network.lock();
        if let Some(client) = known.get(&network) {
            return client.clone();
        }
        if known.len() >= MAX_ADDRESSES {
            return self.others.clone();
        }
        known.entry(network).or_default().clone()
    }

    /// Somebody whose address is not known.
    pub fn unknown(&self) -> Arc<Client> {
        self.others.clone()
    }

    /// Forgets those that have nothing; called from time to time.
    pub fn forget_idle(&self) {
        let mut known = self.by_network.lock();
        known.retain(|_, client| Arc::strong_count(client) > 1 || !client.is_idle());
    }
}

/// What is one client as far as addresses tell.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_of_ipv6_is_one_client_and_an_address_of_ipv4_is_one_however_it_is_written() {
        let clients = Clients::default();
        let at = |text: &str| clients.at(text.parse().unwrap());
        let same = |a: &str, b: &str| Arc::ptr_eq(&at(a), &at(b));
        assert!(
            same("2001:db8::1", "2001:db8:0:0:ffff::2") && same("::ffff:192.0.2.1", "192.0.2.1")
        );
        assert!(!same("2001:db8::1", "2001:db8:0:1::1") && !same("192.0.2.1", "192.0.2.2"));
    }

    #[test]
    fn who_has_taken_something_is_not_forgotten() {
        let clients = Clients::default();
        let address = "192.0.2.1".parse().unwrap();
        let place = clients.at(address).in_flight_acquires.take(1);
        assert!(place.is_some());
        clients.forget_idle();
        assert!(clients.at(address).in_flight_acquires.take(1).is_none());
        drop(place);
        clients.forget_idle();
        assert!(clients.by_network.lock().is_empty());
    }
}
