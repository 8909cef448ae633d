//! The clients of this gateway, and each client's share of the common resources.
//!
//! With API keys, a client is a principal. Its [`Client`] belongs to the key and outlives a reload
//! of the key file. Without keys, a client is an IPv4 address or an IPv6 /64 network, because one
//! machine may own all addresses of such a network. Connections are always counted by address,
//! because a connection begins before its client shows a key.

mod contention;
mod fair_queue;
mod quota;

use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use redlock_core::{LockName, ReleaseAccount};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub use self::contention::ContentionTracker;
pub use self::fair_queue::{ClientQueue, FairQueue};
pub use self::quota::{Exceeded, Taken, Terms};
use self::quota::{QuotaLedger, QuotaSlot};

/// Limit on addresses with a [`Client`] of their own. All further addresses share one `Client`.
const MAX_ADDRESSES: usize = 65_536;

/// The accounting of one client. The documentation of [`crate::overload`] lists where each count is
/// entered and left.
#[derive(Debug, Default)]
pub struct Client {
    /// Open connections. Only clients by address have connections; a principal has none.
    pub connections: Counter,
    /// Requests in flight of [`RequestClass::Other`](crate::overload::RequestClass).
    pub in_flight_acquires: Counter,
    /// Requests in flight of [`RequestClass::Held`](crate::overload::RequestClass).
    pub in_flight_held: Counter,
    /// Requests of each class that are with the masters now.
    pub running_acquires: Concurrency,
    pub running_held: Concurrency,
    /// A request for many locks or slots that waits for its time beside other clients. One waits at
    /// a time.
    pub wide: Concurrency,
    /// Waiters.
    pub waiting: Counter,
    /// The locks that the client waits for.
    pub waited_locks: LockNames,
    /// Places in line: of waiters, and those kept between two requests.
    pub places: Counter,
    /// The same places by lock.
    pub places_by_lock: LockNames,
    /// Listings that run or wait for their turns.
    pub listing: Counter,
    /// Open event streams.
    pub watching: Counter,
    /// Bytes of large answers that the client has not read.
    pub large_answers: Counter,
    /// Bytes of its requests for many locks, and of their answers.
    pub large_requests: Counter,
    /// Requests that were answered before they were granted, until they end.
    pub deferred: Counter,
    /// Callbacks under way.
    pub callbacks: Concurrency,
    /// Locks with a release that failed on a master and is being retried.
    pub pending_releases: ReleaseAccount,
    /// The locks that are watched by name.
    pub watched_locks: LockNames,
    /// The prefixes that are watched.
    pub watched_prefixes: Names<String>,
    /// The leases in flight of requests that extend many locks each.
    pub extend_many_leases: Concurrency,
    /// Requests in the fair queue.
    pub queue: Arc<ClientQueue>,
    quota: QuotaLedger,
}

impl Client {
    /// Reserves quota for an acquire of `name` with `info` bytes of text. `until` is the latest
    /// moment at which the lock may end.
    ///
    /// # Errors
    /// The client has used up its limit.
    pub fn reserve(
        self: &Arc<Self>,
        name: &str,
        info: usize,
        until: Instant,
        terms: Terms,
    ) -> Result<Reservation, Exceeded> {
        let (slot, change) = self.quota.reserve(name, info, until, &terms)?;
        terms.taken.add(change);
        Ok(Reservation { client: self.clone(), slot: Some(slot), terms })
    }

    /// Counts that a lock has been extended until `until`.
    pub fn extended(&self, name: &str, until: Instant, terms: &Terms) {
        self.quota.record_extension(name, until, terms);
    }

    /// Begins a release. The lock need not be the client's own.
    ///
    /// # Errors
    /// Earlier failed releases of this client have left too many token watermarks on the masters.
    pub fn begin_release<'a>(
        &'a self,
        names: &'a [LockName],
        terms: Terms,
    ) -> Result<PendingRelease<'a>, Exceeded> {
        self.quota.check_release(names, &terms)?;
        Ok(PendingRelease { client: self, names, terms, settled: 0 })
    }

    /// Counts a release that succeeded.
    pub fn released(&self, name: &str, terms: &Terms) {
        terms.taken.add(self.quota.record_release(name, terms));
    }

    /// Whether the client may be removed: all counts are zero.
    fn is_idle(&self) -> bool {
        // The other counts need no check: a client with `waited_locks` has waiters, a running request is
        // in flight, and a request in the fair queue has a connection. The request that extends many
        // locks keeps its client alive.
        let counters = [
            &self.connections,
            &self.in_flight_acquires,
            &self.in_flight_held,
            &self.waiting,
            &self.places,
            &self.listing,
            &self.watching,
            &self.large_answers,
            &self.large_requests,
            &self.deferred,
        ];
        counters.iter().all(|counter| counter.count() == 0)
            && self.pending_releases.bytes() == 0
            && self.quota.is_empty()
    }
}

/// Quota that is reserved for one acquire. If the reservation is dropped unused, the acquire has
/// failed, and the client is charged for the token watermarks that it may have left.
#[must_use]
pub struct Reservation {
    client: Arc<Client>,
    /// `None` once the reservation is used.
    slot: Option<QuotaSlot>,
    terms: Terms,
}

impl Reservation {
    /// Keeps the quota for the lock, which was granted until `until`.
    pub fn granted(mut self, until: Instant) {
        if let Some(slot) = self.slot.take() {
            self.client.quota.record_grant(slot, until, &self.terms);
        }
    }

    /// Refunds the quota, because the acquire left nothing new on the masters.
    pub fn not_granted(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.terms.taken.add(self.client.quota.refund(slot));
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.terms.taken.add(self.client.quota.consume(slot, &self.terms));
        }
    }
}

/// A release under way. If it is dropped before [`PendingRelease::succeeded`], the client is
/// charged for a token watermark, because a release that failed, or whose result is unknown, may
/// leave one.
#[must_use]
pub struct PendingRelease<'a> {
    client: &'a Client,
    names: &'a [LockName],
    terms: Terms,
    /// How many of the locks need no more accounting, from the first.
    settled: usize,
}

impl PendingRelease<'_> {
    /// Counts that the first `count` locks were released. The release of the others found no lock of
    /// the client.
    pub fn succeeded(mut self, count: usize) {
        self.settled = count.min(self.names.len());
        for name in &self.names[..self.settled] {
            self.client.released(name.as_str(), &self.terms);
        }
    }

    /// The release succeeded, and the masters keep the locks for a while. Nothing is refunded.
    pub fn keeps_the_lock(mut self) {
        self.settled = self.names.len();
    }
}

impl Drop for PendingRelease<'_> {
    fn drop(&mut self) {
        for name in &self.names[self.settled..] {
            let change = self.client.quota.record_stray_release(name.as_str(), &self.terms);
            self.terms.taken.add(change);
        }
    }
}

/// Counts the permits that are held now.
#[derive(Debug, Clone, Default)]
pub struct Counter(Arc<AtomicUsize>);

impl Counter {
    /// Takes a permit; `None` when `limit` are held.
    pub fn take(&self, limit: usize) -> Option<Permit> {
        self.take_when(1, |held| (held < limit).then_some(held + 1))
    }

    /// Takes a permit that counts as `many`, if `more` returns what is held then.
    pub fn take_when(&self, many: usize, more: impl Fn(usize) -> Option<usize>) -> Option<Permit> {
        self.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, more).ok()?;
        Some(Permit(self.clone(), many))
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }
}

/// A permit of a [`Counter`]; returned when dropped.
#[derive(Debug)]
#[must_use]
pub struct Permit(Counter, usize);

impl Permit {
    /// How many it counts as.
    pub(crate) fn many(&self) -> usize {
        self.1
    }

    /// Counts `more`, if `held` returns what is held then. Returns whether it does.
    pub(crate) fn grow_when(&mut self, more: usize, held: impl Fn(usize) -> Option<usize>) -> bool {
        let has_grown = self.0.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, held).is_ok();
        self.1 += if has_grown { more } else { 0 };
        has_grown
    }

    /// Gives a part back.
    pub(crate) fn shrink(&mut self, less: usize) {
        self.0.0.fetch_sub(less, Ordering::AcqRel);
        self.1 -= less;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.0.fetch_sub(self.1, Ordering::AcqRel);
    }
}

/// Bounds how many requests of one class a client has with the masters at once. The client's other
/// requests wait.
#[derive(Debug)]
pub struct Concurrency(Arc<Semaphore>);

impl Default for Concurrency {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(Self::MAX)))
    }
}

impl Concurrency {
    /// Largest number of requests of one class that a client has with the masters at once. With
    /// nearby masters, more requests give no more throughput. With distant masters, more requests
    /// would take longer than the time limit of a round and find no quorum.
    pub const MAX: usize = 256;

    /// Waits until fewer than `concurrent_limit` requests of the class run. The request counts as
    /// running until the permit is dropped. `None` cannot occur: the semaphore is never closed.
    pub async fn begin(&self, concurrent_limit: usize) -> Option<OwnedSemaphorePermit> {
        let share = Self::MAX.div_ceil(concurrent_limit.clamp(1, Self::MAX));
        self.0.clone().acquire_many_owned(share as u32).await.ok()
    }
}

/// A set of names, with a count for each name. A name that is taken twice counts only once for the
/// limit.
#[derive(Debug)]
pub struct Names<N>(Arc<Mutex<HashMap<N, usize>>>);

/// A set of lock names.
pub type LockNames = Names<LockName>;

impl<N> Default for Names<N> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<N> Clone for Names<N> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<N: Clone + Eq + Hash> Names<N> {
    /// How many names are held.
    pub fn count(&self) -> usize {
        self.0.lock().len()
    }

    /// Takes a permit; `None` when `limit` other names are held.
    pub fn take(&self, name: &N, limit: usize) -> Option<NamePermit<N>> {
        let mut taken = self.0.lock();
        if taken.len() >= limit && !taken.contains_key(name) {
            return None;
        }
        *taken.entry(name.clone()).or_default() += 1;
        Some(NamePermit(self.clone(), name.clone()))
    }

    /// Takes a permit; `None` when this name is taken `limit` times.
    pub fn take_again(&self, name: &N, limit: usize) -> Option<NamePermit<N>> {
        let mut taken = self.0.lock();
        if taken.get(name).copied().unwrap_or_default() >= limit {
            return None;
        }
        *taken.entry(name.clone()).or_default() += 1;
        Some(NamePermit(self.clone(), name.clone()))
    }
}

/// A permit of [`Names`]; returned when dropped.
#[derive(Debug)]
#[must_use]
pub struct NamePermit<N: Eq + Hash = LockName>(Names<N>, N);

impl<N: Eq + Hash> Drop for NamePermit<N> {
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

/// All clients that are identified by address.
#[derive(Debug, Default)]
pub struct Clients {
    by_network: Mutex<HashMap<IpAddr, Arc<Client>>>,
    overflow: Arc<Client>,
}

impl Clients {
    /// Returns the client at an address.
    pub fn at(&self, address: IpAddr) -> Arc<Client> {
        let network = network(address);
        let mut known = self.by_network.lock();
        if let Some(client) = known.get(&network) {
            return client.clone();
        }
        if known.len() >= MAX_ADDRESSES {
            return self.overflow.clone();
        }
        known.entry(network).or_default().clone()
    }

    /// Returns the client that stands for unknown addresses.
    pub fn unknown(&self) -> Arc<Client> {
        self.overflow.clone()
    }

    /// Removes clients without counts and without requests. To be called from time to time.
    pub fn forget_idle(&self) {
        let mut known = self.by_network.lock();
        known.retain(|_, client| Arc::strong_count(client) > 1 || !client.is_idle());
    }
}

/// The network that counts as one client: an IPv4 address, or an IPv6 /64.
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
    fn clients_are_ipv6_networks_and_ipv4_addresses() {
        let clients = Clients::default();
        let at = |text: &str| clients.at(text.parse().unwrap());
        let same = |a: &str, b: &str| Arc::ptr_eq(&at(a), &at(b));
        assert!(
            same("2001:db8::1", "2001:db8:0:0:ffff::2") && same("::ffff:192.0.2.1", "192.0.2.1")
        );
        assert!(!same("2001:db8::1", "2001:db8:0:1::1") && !same("192.0.2.1", "192.0.2.2"));
    }

    #[test]
    fn a_dropped_release_counts_and_a_successful_one_is_free() {
        let client = Client::default();
        // Enough for one token watermark.
        let watermark_life = std::time::Duration::from_secs(10);
        let terms = Terms { limit: Some(200), watermark_life, ..Terms::default() };
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|name| [name.parse().expect("a name")]);
        for names in [&a, &b] {
            client.begin_release(names, terms.clone()).expect("within the limit").succeeded(1);
        }
        let both = [a, b].concat();
        assert!(client.begin_release(&both, terms.clone()).is_err(), "two at once are too many");
        drop(client.begin_release(&c, terms.clone()).expect("within the limit"));
        assert!(client.begin_release(&d, terms).is_err());
    }

    #[test]
    fn a_client_with_a_permit_is_not_removed() {
        let clients = Clients::default();
        let address = "192.0.2.1".parse().unwrap();
        let permit = clients.at(address).in_flight_acquires.take(1);
        assert!(permit.is_some());
        clients.forget_idle();
        assert!(clients.at(address).in_flight_acquires.take(1).is_none());
        drop(permit);
        clients.forget_idle();
        assert!(clients.by_network.lock().is_empty());
    }
}
