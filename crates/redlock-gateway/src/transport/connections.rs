//! The open connections: how many there may be, and which one goes when another needs its place.
//!
//! A connection without a request under way can go: a client's pool expects that, and a stranger's sockets, which may never
//! send one, must not keep others out. So when all places are taken, one of those is closed for the newcomer: first one
//! that has not sent the whole head of a request, then one that has shown no key; among equals one of whoever has most
//! connections, and of those the one that has been idle for longest. A connection with a request under way is never closed
//! here, from the moment its head is read until its answer is written. When all have one, a newcomer gets one of a few
//! spare places, where probes are answered and everybody else is told to come back; when those are taken, it is closed.
//!
//! One address gets only a part of the places. That is for requests that are under way. A trusted proxy stands for many
//! clients, and may have all places.

use parking_lot::{Mutex, MutexGuard};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::Shutdown;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::overload::clients::{Client, Clients, Place};
use crate::overload::refusals::Refusals;
use crate::proxies::TrustedProxies;
use crate::telemetry::{ConnectionMetrics, ConnectionRefused};

/// Places beyond the limit, for probes and for telling others to come back.
pub(crate) const SPARE: usize = 16;
/// Connections that were closed for others and have not noticed yet. When there are more, others wait to be let in: each
/// still has its file descriptor.
pub(crate) const LEAVING: usize = 64;
/// How many connections are looked at to find one that can go. Of more, so many by chance.
const LOOKED_AT: usize = 32;
/// How long others wait for that.
const LEAVES_WITHIN: Duration = Duration::from_secs(1);
/// How often all of them are looked at, when there was none among those.
const LOOK_AT_ALL: Duration = Duration::from_millis(10);

/// How many connections there may be.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionLimits {
    pub(crate) connections: usize,
    /// Of one address.
    pub(crate) per_client: usize,
    /// Whether that is so of loopback too.
    pub(crate) loopback: bool,
    /// Addresses that stand for many clients.
    pub(crate) proxies: TrustedProxies,
}

impl ConnectionLimits {
    /// Any one address may have them all.
    pub(crate) const fn of_all(connections: usize) -> Self {
        Self { connections, per_client: usize::MAX, loopback: false, proxies: TrustedProxies::NONE }
    }
}

/// All connections that are open.
pub(crate) struct Connections {
    limit: ConnectionLimits,
    clients: Arc<Clients>,
    refusals: Arc<Refusals>,
    metrics: ConnectionMetrics,
    table: Mutex<Table>,
    /// Told when one that was closed for another has noticed.
    left: Notify,
    /// Connections that were let in; also the clock by which they are idle.
    accepted: AtomicU64,
    /// The process is about to end: nobody should come back on a connection of now.
    ending: AtomicBool,
}

#[derive(Default)]
struct Table {
    open: Vec<Arc<Open>>,
    leaving: usize,
    /// For one address, and for all.
    looked_at_all: [Option<Instant>; 2],
}

/// What is known of one connection.
struct Open {
    /// Its state, what it has shown, and since when it has been idle.
    word: AtomicU64,
    client: Arc<Client>,
    stream: Mutex<Option<Arc<TcpStream>>>,
    /// Its place in the table, which is locked.
    at: AtomicU64,
}

// The states, in the lowest bits of the word.
const IDLE: u64 = 0;
const BUSY: u64 = 1;
/// The answer is on its way out.
const ANSWERED: u64 = 2;
/// Closed for another.
const EVICTED: u64 = 3;
const STATE: u64 = 3;
// What it has shown.
const HEAD: u64 = 4;
const KEY: u64 = 8;
const SHOWN: u64 = HEAD | KEY;
const SINCE: u32 = 4;

impl Open {
    fn is_idle(&self) -> bool {
        self.word.load(Ordering::Acquire) & STATE == IDLE
    }

    fn since(&self) -> u64 {
        self.word.load(Ordering::Acquire) >> SINCE
    }

    /// The smallest goes first.
    fn rank(&self) -> (u64, std::cmp::Reverse<usize>, u64) {
        let word = self.word.load(Ordering::Acquire);
        (word & SHOWN, std::cmp::Reverse(self.client.connections.count()), word >> SINCE)
    }

    fn change(&self, change: impl Fn(u64) -> Option<u64>) -> bool {
        self.word.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }

    /// Closes it, unless a request has begun meanwhile.
    fn evict(&self) -> bool {
        let evicted = self.change(|word| (word & STATE == IDLE).then_some(word | EVICTED));
        // Whoever waits for it to become readable finds its end.
        if let (true, Some(stream)) = (evicted, &*locked(&self.stream)) {
            let _ = rustix::net::shutdown(&**stream, Shutdown::Both);
        }
        evicted
    }
}

/// The place of one connection, given back when dropped.
pub(crate) struct ConnectionPlace {
    open: Arc<Open>,
    all: Arc<Connections>,
    is_spare: bool,
    _of_client: Option<Place>,
}

/// A request under way: until this is dropped and what was written is flushed, its connection stays.
pub(crate) struct Busy(Arc<ConnectionPlace>);

impl Connections {
    pub(crate) fn new(
        limit: ConnectionLimits,
        clients: Arc<Clients>,
        refusals: Arc<Refusals>,
        metrics: ConnectionMetrics,
    ) -> Arc<Self> {
        metrics.limit(limit.connections);
        let table = Mutex::default();
        let left = Notify::new();
        let accepted = AtomicU64::new(0);
        let ending = AtomicBool::new(false);
        Arc::new(Self { limit, clients, refusals, metrics, table, left, accepted, ending })
    }

    /// From now on every answer says that its connection ends with it, so that clients do not meet a closed one later.
    pub(crate) fn end_each(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// A place for a connection from this address, if there is one. To be called for one after the other.
    pub(crate) async fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Arc<ConnectionPlace>> {
        let may_enter = async {
            while locked(&self.table).leaving >= LEAVING {
                self.left.notified().await;
            }
        };
        let _ = tokio::time::timeout(LEAVES_WITHIN, may_enter).await;
        self.enter_now(address)
    }

    fn enter_now(self: &Arc<Self>, address: IpAddr) -> Option<Arc<ConnectionPlace>> {
        let client = self.clients.at(address);
        let is_one_client = !self.limit.proxies.contains(address);
        let is_bound =
            is_one_client && (self.limit.loopback || !address.to_canonical().is_loopback());
        let limit = if is_bound { self.limit.per_client } else { usize::MAX };
        let mut table = locked(&self.table);
        let mut of_client = client.connections.take(limit);
        if of_client.is_none() && self.evict_one(&mut table, u64::MAX, Some(&client)) {
            // The one that goes gives its place back a moment later.
            of_client = client.connections.take(limit + LEAVING);
        }
        let Some(of_client) = of_client else {
            drop(table);
            return self.refuse(address, ConnectionRefused::Client);
        };
        let since = self.accepted.fetch_add(1, Ordering::Relaxed);
        // Whoever came a moment ago has hardly had the time to send a request, and stays while there is a spare place.
        let is_left = table.open.len() < self.limit.connections + SPARE;
        let recent = SPARE.min(self.limit.connections / 4) as u64;
        let before = if is_left { since.saturating_sub(recent) } else { u64::MAX };
        let has_place =
            table.open.len() < self.limit.connections || self.evict_one(&mut table, before, None);
        if !has_place && !is_left {
            drop(table);
            return self.refuse(address, ConnectionRefused::Full);
        }
        let open = Arc::new(Open {
            word: AtomicU64::new(since << SINCE),
            client,
            stream: Mutex::default(),
            at: AtomicU64::new(table.open.len() as u64),
        });
        table.open.push(open.clone());
        self.metrics.open(table.open.len());
        Some(Arc::new(ConnectionPlace {
            open,
            all: self.clone(),
            is_spare: !has_place,
            _of_client: Some(of_client),
        }))
    }

    fn refuse<T>(&self, address: IpAddr, why: ConnectionRefused) -> Option<T> {
        self.metrics.refused(why);
        if self.refusals.is_first(address, None, why.as_str()) {
            let ConnectionLimits { connections, per_client, .. } = self.limit;
            tracing::warn!(
                %address,
                reason = why.as_str(),
                connections,
                per_client,
                "a connection was closed: as many as allowed are open"
            );
        }
        None
    }

    /// A handshake was not brought to its end.
    pub(crate) fn handshake_failed(&self, address: IpAddr, error: &std::io::Error) {
        self.metrics.refused(ConnectionRefused::Handshake);
        if self.refusals.is_first(address, None, ConnectionRefused::Handshake.as_str()) {
            tracing::info!(%address, %error, "a TLS handshake failed");
        } else {
            tracing::debug!(%address, %error, "a TLS handshake failed");
        }
    }

    /// Closes the idle connection that comes first, of this client if one is given; none when that one is not idle since
    /// before this.
    fn evict_one(&self, table: &mut Table, before: u64, of: Option<&Arc<Client>>) -> bool {
        if table.leaving >= LEAVING {
            return false;
        }
        let is_fit = |open: &&Arc<Open>| {
            open.is_idle() && of.is_none_or(|client| Arc::ptr_eq(&open.client, client))
        };
        let count = table.open.len();
        let first = if count <= LOOKED_AT {
            table.open.iter().filter(is_fit).min_by_key(|open| open.rank())
        } else {
            let by_chance = (0..LOOKED_AT).map(|_| &table.open[fastrand::usize(..count)]);
            by_chance.filter(is_fit).min_by_key(|open| open.rank())
        };
        let mut chosen = first.cloned();
        if chosen.is_none() && count > LOOKED_AT {
            let last = &mut table.looked_at_all[usize::from(of.is_none())];
            if last.is_some_and(|at| at.elapsed() < LOOK_AT_ALL) {
                return false;
            }
            *last = Some(Instant::now());
            chosen = table.open.iter().filter(is_fit).min_by_key(|open| open.rank()).cloned();
        }
        let chosen = chosen.filter(|open| open.since() < before && open.evict());
        let Some(open) = chosen else { return false };
        table.forget(&open);
        table.leaving += 1;
        self.metrics.evicted();
        true
    }
}

impl Table {
    fn forget(&mut self, open: &Open) {
        let at = open.at.load(Ordering::Relaxed) as usize;
        self.open.swap_remove(at);
        if let Some(moved) = self.open.get(at) {
            moved.at.store(at as u64, Ordering::Relaxed);
        }
    }
}

impl ConnectionPlace {
    /// Whose it is.
    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.open.client
    }

    /// Those whose word counts for the address of a client.
    pub(crate) fn proxies(&self) -> &TrustedProxies {
        &self.all.limit.proxies
    }

    /// The client at another address.
    pub(crate) fn client_at(&self, address: IpAddr) -> Arc<Client> {
        self.all.clients.at(address)
    }

    /// Beyond the limit, also now.
    pub(crate) fn is_spare(&self) -> bool {
        self.is_spare && locked(&self.all.table).open.len() > self.all.limit.connections
    }

    /// Whether its next answer is its last one.
    pub(crate) fn ends(&self) -> bool {
        self.all.ending.load(Ordering::Acquire) || self.is_spare()
    }

    /// Whether a request of it can be served. Who has sent a whole one goes before who is idle, however short.
    pub(crate) fn may_serve(&self) -> bool {
        !self.is_spare() || self.all.evict_one(&mut locked(&self.all.table), u64::MAX, None)
    }

    /// What is to be closed when another needs the place; false when that has come to pass already.
    pub(crate) fn holds(&self, stream: &Arc<TcpStream>) -> bool {
        *locked(&self.open.stream) = Some(stream.clone());
        !self.is_evicted()
    }

    /// Whether another has got the place. Nothing more may be read then.
    pub(crate) fn is_evicted(&self) -> bool {
        self.open.word.load(Ordering::Acquire) & STATE == EVICTED
    }

    /// The head of a request was read. `None` when another has got the place before: nobody would hear the answer.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<Busy> {
        let begin = |word| (word & STATE != EVICTED).then_some((word & !STATE) | BUSY | HEAD);
        self.open.change(begin).then(|| Busy(self.clone()))
    }

    /// Its client has shown a key.
    pub(crate) fn known(&self) {
        self.open.word.fetch_or(KEY, Ordering::AcqRel);
    }

    /// All that was written has been handed to the system.
    pub(crate) fn flushed(&self) {
        if self.open.word.load(Ordering::Acquire) & STATE == ANSWERED {
            let since = self.all.accepted.load(Ordering::Relaxed);
            self.open.change(|word| {
                (word & STATE == ANSWERED).then_some((word & SHOWN) | (since << SINCE))
            });
        }
    }

    pub(crate) fn handshake_failed(&self, address: IpAddr, error: &std::io::Error) {
        self.all.handshake_failed(address, error);
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.open.change(|word| (word & STATE == BUSY).then_some((word & !STATE) | ANSWERED));
    }
}

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        let mut table = locked(&self.all.table);
        // Looked at under the lock: only there is it changed.
        if self.is_evicted() {
            table.leaving -= 1;
            self.all.left.notify_one();
        } else {
            table.forget(&self.open);
        }
        self.all.metrics.open(table.open.len());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
