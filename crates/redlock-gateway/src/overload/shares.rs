//! The table of limits. A row is a resource of this process that clients use up. It says how much of the
//! resource all clients together may have, and how much one client may have. `check` prints the table. A
//! resource that clients can use up and that has no row is a defect.

use bytesize::ByteSize;

use super::capacity::Capacity;
use super::clients::Concurrency;
use super::wait_share::WaitShare;

/// Listings that run, of all clients together.
pub(crate) const LISTINGS: usize = 2;
/// Listings of one client, running or waiting for their turns.
pub(crate) const LISTINGS_OF_ONE: usize = 1;
/// Locks that are watched by name. Each is read about once a second.
pub(crate) const WATCHED_LOCKS: usize = 1_000;
/// Different prefixes that are watched.
pub(crate) const WATCHED_PREFIXES: usize = 100;
/// Callbacks under way, of all clients together.
pub(crate) const CALLBACKS: usize = 256;
/// Callbacks under way of one client. So a slow receiver delays only its own client, unless many clients
/// have slow receivers.
pub(crate) const CALLBACKS_OF_ONE: usize = 16;
/// The part of the requests in flight that the leases of one client's `PATCH /locks` may take: a quarter
/// of what a sole client may have.
pub(crate) const LEASES_PART: usize = 8;

/// A resource whose limit refuses requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    Listings,
    /// Event streams; for all clients together also waiting requests.
    Streams,
    WatchedLocks,
    WatchedPrefixes,
    /// Deferred requests that have not ended.
    Deferred,
}

/// Refusal of a request, because as much of a resource as is allowed is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full {
    pub resource: Resource,
    pub max: usize,
    /// Whether `max` is the limit for one client. Otherwise it is the limit for all clients together.
    pub of_this_client: bool,
}

impl Full {
    pub(crate) fn for_all(resource: Resource, max: usize) -> Self {
        Self { resource, max, of_this_client: false }
    }

    pub(crate) fn for_one(resource: Resource, max: usize) -> Self {
        Self { resource, max, of_this_client: true }
    }
}

/// The rows, with three columns: the resource, the limit of all clients together, and the limit of one
/// client. "What is left" means as much as others do not use now. "-" means that there is no such limit.
pub fn table(capacity: &Capacity, waits: WaitShare) -> Vec<[String; 3]> {
    let row = |what: &str, all: String, one: String| [what.to_owned(), all, one];
    let count = |what: &str, all: usize, one: usize| row(what, all.to_string(), one.to_string());
    let free = || "what is left".to_owned();
    let none = || "-".to_owned();
    let connections_of_one = match (capacity.connections_per_client(), capacity.bounds_loopback()) {
        (one, true) => one.to_string(),
        (one, false) => format!("{one}; from loopback all"),
    };
    let leases = (capacity.in_flight / LEASES_PART).clamp(1, Concurrency::MAX);
    let mut rows = vec![
        row("", "all clients".to_owned(), "one client".to_owned()),
        row("connections", capacity.connections.to_string(), connections_of_one),
        row("requests in flight", capacity.in_flight.to_string(), free()),
        // Each class of requests has its own count, in which a slot is a lock.
        row("locks to acquire at once", none(), Concurrency::MAX.to_string()),
        row("locks to extend or release at once", none(), Concurrency::MAX.to_string()),
        row("leases of PATCH /locks in flight", none(), leases.to_string()),
        count("waiting requests", capacity.waiters, waits.waiters),
        count("waiting requests of one lock", waits.places_per_lock, waits.places_per_lock),
        row("locks waited for", none(), waits.locks.to_string()),
        row("event streams and waiting requests", capacity.long_lived.to_string(), free()),
        row("locks watched by name", WATCHED_LOCKS.to_string(), free()),
        row("watched prefixes", WATCHED_PREFIXES.to_string(), free()),
        count("deferred requests", waits.deferred, waits.waiters),
        count("callbacks under way", CALLBACKS, CALLBACKS_OF_ONE),
        count("listings", LISTINGS, LISTINGS_OF_ONE),
    ];
    let requests = ("large requests", ByteSize::b(capacity.large_requests));
    let pools = [requests].into_iter().chain(capacity.pools());
    rows.extend(pools.filter(|(_, bytes)| bytes.as_u64() > 0).map(|(what, bytes)| {
        // Watchers share what they have not read. A connection has the share in header tables.
        let has_share = !matches!(what, "unread events" | "watched locks" | "header tables");
        row(what, bytes.to_string(), if has_share { free() } else { none() })
    }));
    rows
}
