//! Bounds the open connections, and chooses the one that is closed for a newcomer.
//!
//! A connection is idle while it has no request under way. A request is under way from the arrival
//! of its head until its answer is written. An idle connection may be closed at any time: client
//! pools expect that. A connection with a request under way is never closed here.
//!
//! A connection of HTTP/2 may have many requests under way. Each after the first takes one more
//! slot, as if it had a connection of its own. So the limits bound requests of both protocols
//! alike.
//!
//! When all slots are taken, an idle connection is closed for the newcomer. So strangers' sockets
//! that never send a request do not keep others out. Connections that have not sent a whole request
//! head are closed first, then those that have shown no key, then all others. Among equals, the
//! client with the most connections loses the one that has been idle for longest. When no
//! connection is idle, the newcomer gets one of a few spare slots. There the gateway answers
//! probes, and answers every other request with 503. When the spare slots are taken too, the
//! newcomer is closed.
//!
//! One address gets only a part of the slots. At that limit, an idle connection of the same address
//! is closed for the newcomer. A trusted proxy stands for many clients, and may have all slots. Of
//! the proxy's connections, each client behind it may use as many at once as one address may have.

use parking_lot::{Mutex, MutexGuard};
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::net::Shutdown;
use tokio::net::TcpStream;
use tokio::sync::Notify;

use crate::overload::clients::{Client, Clients, Counter, Permit};
use crate::overload::refusals::Refusals;
use crate::proxies::TrustedProxies;
use crate::telemetry::{ConnectionMetrics, ConnectionRefused, Flood};
use crate::transport::frames::TablePool;

/// Slots beyond the limit. Connections in them get answers to probes, and 503 for all other
/// requests.
pub(crate) const SPARE: usize = 16;
/// Limit on connections that were closed for others and still have their file descriptor. When it
/// is reached, newcomers wait.
pub(crate) const MAX_CLOSING: usize = 64;
/// How many connections are examined to find an idle one. If more are open, a random sample of this
/// size is examined.
const SAMPLE_SIZE: usize = 32;
/// How long newcomers wait for closing connections.
const CLOSES_WITHIN: Duration = Duration::from_secs(1);
/// Bounds of the limit on refusals under way over HTTP/2. The limit is a quarter of all slots. A
/// client may stall a refusal, and the gateway keeps the head of the request meanwhile. Beyond the
/// limit, the gateway resets requests without a slot.
const REFUSED: RangeInclusive<usize> = 64..=1_024;
/// The least time between two examinations of all connections. All are examined only when the
/// sample has no idle connection.
const FULL_SCAN_PAUSE: Duration = Duration::from_millis(10);

/// The limits on connections.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionLimits {
    pub(crate) connections: usize,
    /// Limit for one address.
    pub(crate) per_client: usize,
    /// Whether the limit per address applies to loopback too.
    pub(crate) loopback: bool,
    /// Addresses that stand for many clients.
    pub(crate) proxies: TrustedProxies,
    /// Bytes for entries of HTTP/2 header tables, beyond those of each connection.
    pub(crate) header_tables: u64,
}

impl ConnectionLimits {
    /// Limits the connections in all; one address may have all of them.
    pub(crate) const fn of_all(connections: usize) -> Self {
        Self {
            connections,
            per_client: usize::MAX,
            loopback: false,
            proxies: TrustedProxies::NONE,
            header_tables: 0,
        }
    }
}

/// All open connections.
pub(crate) struct Connections {
    limit: ConnectionLimits,
    clients: Arc<Clients>,
    refusals: Arc<Refusals>,
    metrics: ConnectionMetrics,
    table: Mutex<Table>,
    /// Notified when a connection that was closed for another is dropped.
    closed: Notify,
    /// Connections accepted so far. The number also serves as a clock: the state of a connection
    /// has the number at which the connection became idle.
    accepted: AtomicU64,
    /// Whether the process is about to end, so that no client should reuse its connection.
    ending: AtomicBool,
    /// Requests of HTTP/2 beyond the first of each connection.
    extra_streams: Counter,
    table_pool: TablePool,
    /// Refusals under way, of HTTP/2 requests without a slot.
    refused_streams: Counter,
}

#[derive(Default)]
struct Table {
    open: Vec<Arc<OpenConnection>>,
    closing: usize,
    /// When all connections were last examined. Index 0: to close one of a certain address. Index
    /// 1: to close any.
    last_full_scan: [Option<Instant>; 2],
}

/// One open connection.
struct OpenConnection {
    /// State, flags, and the value of [`Connections::accepted`] when the connection became idle,
    /// packed into one word.
    packed: AtomicU64,
    client: Arc<Client>,
    /// Whether the other end is a trusted proxy, so that the connection belongs to no one client.
    is_of_proxy: bool,
    stream: Mutex<Option<Arc<TcpStream>>>,
    /// Index in the table; changed under the table's lock.
    index: AtomicU64,
}

// States, in the lowest two bits.
const IDLE: u64 = 0;
const BUSY: u64 = 1;
/// The answer is being written.
const ANSWERED: u64 = 2;
/// Closed for another connection.
const EVICTED: u64 = 3;
const STATE: u64 = 3;
// Flags: a whole request head has come, and a key was shown.
const HEAD: u64 = 4;
const KEY: u64 = 8;
const SHOWN: u64 = HEAD | KEY;
// How many requests are under way. HTTP/1.1 has one at most.
const REQUESTS: u32 = 4;
const ONE_REQUEST: u64 = 1 << REQUESTS;
const SINCE: u32 = 20;
const MAX_REQUESTS: u64 = (1 << (SINCE - REQUESTS)) - 1;

fn requests(word: u64) -> u64 {
    (word >> REQUESTS) & MAX_REQUESTS
}

impl OpenConnection {
    fn is_idle(&self) -> bool {
        self.packed.load(Ordering::Acquire) & STATE == IDLE
    }

    fn since(&self) -> u64 {
        self.packed.load(Ordering::Acquire) >> SINCE
    }

    /// The order of closing, smallest first.
    fn rank(&self) -> (u64, std::cmp::Reverse<usize>, u64) {
        let packed = self.packed.load(Ordering::Acquire);
        // A proxy has many connections because it has many clients. Those clients must not suffer
        // for that.
        let of_client = if self.is_of_proxy { 1 } else { self.client.connections.count() };
        (packed & SHOWN, std::cmp::Reverse(of_client), packed >> SINCE)
    }

    fn change(&self, change: impl Fn(u64) -> Option<u64>) -> bool {
        self.packed.fetch_update(Ordering::AcqRel, Ordering::Acquire, change).is_ok()
    }

    /// Closes the connection, unless a request has begun meanwhile. Returns whether it was closed.
    fn evict(&self) -> bool {
        let evicted = self.change(|word| (word & STATE == IDLE).then_some(word | EVICTED));
        // The shutdown wakes the task that waits for bytes on the stream, and the task finds the
        // end of the stream.
        if let (true, Some(stream)) = (evicted, &*locked(&self.stream)) {
            let _ = rustix::net::shutdown(&**stream, Shutdown::Both);
        }
        evicted
    }
}

/// The slot of one connection; returned when dropped.
pub(crate) struct ConnectionSlot {
    open: Arc<OpenConnection>,
    all: Arc<Connections>,
    is_spare: bool,
    address: IpAddr,
    /// Limit on the slots of this client: for its connections, and for further concurrent requests on
    /// HTTP/2 connections.
    client_limit: usize,
    _of_client: Option<Permit>,
}

/// A request under way. Its connection is not closed for another one until this value is dropped
/// and the answer is flushed.
pub(crate) struct Busy {
    slot: Arc<ConnectionSlot>,
    _stream: Option<StreamSlot>,
    /// Counts in `refused_streams`, if the request is refused for lack of a slot.
    _refused: Option<Permit>,
}

/// The slot of a request beyond the first of its connection.
struct StreamSlot {
    _of_all: Permit,
    _of_client: Permit,
}

/// How a request of HTTP/2 begins.
pub(crate) enum StreamStart {
    /// With a reason, the request must be refused.
    Begun(Busy, Option<NoSlot>),
    /// The gateway is refusing too many requests already, so it must not read this one.
    TooMany,
    /// The connection was closed for another one, so the answer could not arrive.
    Closed,
}

/// Why a request gets no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// All slots are taken, and no connection is idle.
    Full,
    /// The client has as many slots as one client may have.
    Client,
}

impl Connections {
    pub(crate) fn new(
        limit: ConnectionLimits,
        clients: Arc<Clients>,
        refusals: Arc<Refusals>,
        metrics: ConnectionMetrics,
    ) -> Arc<Self> {
        metrics.limit(limit.connections);
        let table_pool = TablePool::new(limit.header_tables);
        let table = Mutex::default();
        let closed = Notify::new();
        let accepted = AtomicU64::new(0);
        let ending = AtomicBool::new(false);
        let (extra_streams, refused_streams) = <(Counter, Counter)>::default();
        Arc::new(Self {
            limit,
            clients,
            refusals,
            metrics,
            table,
            closed,
            accepted,
            ending,
            extra_streams,
            table_pool,
            refused_streams,
        })
    }

    /// From now on every answer announces the end of its connection, so that no client reuses a
    /// closed one.
    pub(crate) fn end_each(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Takes a slot for a connection from `address`, if there is one. Not to be called
    /// concurrently.
    pub(crate) async fn enter(self: &Arc<Self>, address: IpAddr) -> Option<Arc<ConnectionSlot>> {
        let may_enter = async {
            while locked(&self.table).closing >= MAX_CLOSING {
                self.closed.notified().await;
            }
        };
        let _ = tokio::time::timeout(CLOSES_WITHIN, may_enter).await;
        self.enter_now(address)
    }

    fn enter_now(self: &Arc<Self>, address: IpAddr) -> Option<Arc<ConnectionSlot>> {
        let client = self.clients.at(address);
        let is_of_proxy = self.limit.proxies.contains(address);
        let is_bound =
            !is_of_proxy && (self.limit.loopback || !address.to_canonical().is_loopback());
        let limit = if is_bound { self.limit.per_client } else { usize::MAX };
        let mut table = locked(&self.table);
        let mut of_client = client.connections.take(limit);
        if of_client.is_none() && self.evict_one(&mut table, u64::MAX, Some(&client)) {
            // The connection that was closed returns its permit a moment later. Until then the
            // client may exceed its limit.
            of_client = client.connections.take(limit + MAX_CLOSING);
        }
        let Some(of_client) = of_client else {
            drop(table);
            return self.refuse(address, ConnectionRefused::Client);
        };
        let since = self.accepted.fetch_add(1, Ordering::Relaxed);
        // While a spare slot is free, the most recent connections are not closed for the newcomer:
        // they have hardly had time to send a request.
        let taken = self.taken(&table);
        let has_slot_left = taken < self.limit.connections + SPARE;
        let before = if has_slot_left { since.saturating_sub(self.recent()) } else { u64::MAX };
        let is_within_limit =
            taken < self.limit.connections || self.evict_one(&mut table, before, None);
        if !is_within_limit && !has_slot_left {
            drop(table);
            return self.refuse(address, ConnectionRefused::Full);
        }
        let open = Arc::new(OpenConnection {
            packed: AtomicU64::new(since << SINCE),
            client,
            is_of_proxy,
            stream: Mutex::default(),
            index: AtomicU64::new(table.open.len() as u64),
        });
        table.open.push(open.clone());
        self.metrics.open(table.open.len());
        Some(Arc::new(ConnectionSlot {
            open,
            all: self.clone(),
            is_spare: !is_within_limit,
            address,
            client_limit: limit,
            _of_client: Some(of_client),
        }))
    }

    /// How many of the last connections count as recent.
    fn recent(&self) -> u64 {
        SPARE.min(self.limit.connections / 4) as u64
    }

    /// The slots that are taken.
    fn taken(&self, table: &Table) -> usize {
        table.open.len() + self.extra_streams.count()
    }

    /// Takes a slot for a request beyond the first of its connection. Recent connections are not
    /// closed for such a request. Otherwise a client with many requests could keep newcomers out.
    fn take_stream_slot(&self, slot: &ConnectionSlot) -> Result<StreamSlot, NoSlot> {
        let client = slot.client();
        let before = self.accepted.load(Ordering::Relaxed).saturating_sub(self.recent());
        let mut table = locked(&self.table);
        let mut of_client = client.connections.take(slot.client_limit);
        if of_client.is_none() && self.evict_one(&mut table, before, Some(client)) {
            of_client = client.connections.take(slot.client_limit + MAX_CLOSING);
        }
        let of_client = of_client.ok_or(NoSlot::Client)?;
        if self.taken(&table) >= self.limit.connections && !self.evict_one(&mut table, before, None)
        {
            return Err(NoSlot::Full);
        }
        let of_all = self.extra_streams.take(usize::MAX).ok_or(NoSlot::Full)?;
        Ok(StreamSlot { _of_all: of_all, _of_client: of_client })
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
                "a new connection was closed, because the limit on open connections is reached"
            );
        }
        None
    }

    /// Reports a failed handshake.
    pub(crate) fn handshake_failed(&self, address: IpAddr, error: &std::io::Error) {
        self.metrics.refused(ConnectionRefused::Handshake);
        if self.refusals.is_first(address, None, ConnectionRefused::Handshake.as_str()) {
            tracing::info!(%address, %error, "a TLS handshake failed");
        } else {
            tracing::debug!(%address, %error, "a TLS handshake failed");
        }
    }

    /// Closes the first idle connection in the order of [`OpenConnection::rank`], of a random
    /// sample if there are many. With `of`, only connections of that client are considered. Returns false and closes nothing if no connection
    /// is idle, if the first one became idle at `before` or later, or if too many are closing
    /// already.
    fn evict_one(&self, table: &mut Table, before: u64, of: Option<&Arc<Client>>) -> bool {
        if table.closing >= MAX_CLOSING {
            return false;
        }
        let may_close = |open: &&Arc<OpenConnection>| {
            open.is_idle() && of.is_none_or(|client| Arc::ptr_eq(&open.client, client))
        };
        let count = table.open.len();
        let first = if count <= SAMPLE_SIZE {
            table.open.iter().filter(may_close).min_by_key(|open| open.rank())
        } else {
            let sample = (0..SAMPLE_SIZE).map(|_| &table.open[fastrand::usize(..count)]);
            sample.filter(may_close).min_by_key(|open| open.rank())
        };
        let mut chosen = first.cloned();
        if chosen.is_none() && count > SAMPLE_SIZE {
            let last = &mut table.last_full_scan[usize::from(of.is_none())];
            if last.is_some_and(|at| at.elapsed() < FULL_SCAN_PAUSE) {
                return false;
            }
            *last = Some(Instant::now());
            chosen = table.open.iter().filter(may_close).min_by_key(|open| open.rank()).cloned();
        }
        let chosen = chosen.filter(|open| open.since() < before && open.evict());
        let Some(open) = chosen else { return false };
        table.remove(&open);
        table.closing += 1;
        self.metrics.evicted();
        true
    }
}

impl Table {
    fn remove(&mut self, open: &OpenConnection) {
        let index = open.index.load(Ordering::Relaxed) as usize;
        self.open.swap_remove(index);
        if let Some(moved) = self.open.get(index) {
            moved.index.store(index as u64, Ordering::Relaxed);
        }
    }
}

impl ConnectionSlot {
    /// The client whose connection this is.
    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.open.client
    }

    /// Bytes for entries of header tables, which all connections share.
    pub(crate) fn table_pool(&self) -> TablePool {
        self.all.table_pool.clone()
    }

    /// Whether the other end is a trusted proxy, so that the connection has requests of many clients.
    pub(crate) fn is_of_proxy(&self) -> bool {
        self.open.is_of_proxy
    }

    /// The proxies that are trusted to name a client's address.
    pub(crate) fn proxies(&self) -> &TrustedProxies {
        &self.all.limit.proxies
    }

    /// The client at another address.
    pub(crate) fn client_at(&self, address: IpAddr) -> Arc<Client> {
        self.all.clients.at(address)
    }

    /// Counts this connection for the client behind the proxy, during one request. `None` if the
    /// client uses as many connections as one client may have.
    pub(crate) fn lend_to(&self, client: &Client) -> Option<Permit> {
        let permit = client.connections.take(self.all.limit.per_client);
        if permit.is_none() {
            self.all.metrics.refused(ConnectionRefused::Client);
        }
        permit
    }

    /// Whether the slot is a spare one and the limit is still exceeded.
    pub(crate) fn is_spare(&self) -> bool {
        self.is_spare && self.all.taken(&locked(&self.all.table)) > self.all.limit.connections
    }

    /// Whether the next answer ends the connection.
    pub(crate) fn is_last_answer(&self) -> bool {
        self.all.ending.load(Ordering::Acquire) || self.is_spare()
    }

    /// Whether a request can be served. If the slot is a spare one, the request is served only if
    /// an idle connection, even a very recent one, can be closed for it.
    pub(crate) fn may_serve(&self) -> bool {
        !self.is_spare() || self.all.evict_one(&mut locked(&self.all.table), u64::MAX, None)
    }

    /// Attaches the stream, which is needed to close this connection for another one. Returns false
    /// if this connection was chosen for that already.
    pub(crate) fn attach(&self, stream: &Arc<TcpStream>) -> bool {
        *locked(&self.open.stream) = Some(stream.clone());
        !self.is_evicted()
    }

    /// Whether the connection was closed for another one. If so, nothing more may be read from it.
    pub(crate) fn is_evicted(&self) -> bool {
        self.open.packed.load(Ordering::Acquire) & STATE == EVICTED
    }

    /// Marks that the head of a request was read. `None` if the connection was closed for another
    /// one, so that the answer could not arrive.
    pub(crate) fn begin(self: &Arc<Self>) -> Option<Busy> {
        self.count_request().map(|_| self.busy())
    }

    /// Like [`Self::begin`], for a request of HTTP/2. If other requests of the connection are under
    /// way, this one needs a slot of its own.
    pub(crate) fn begin_stream(self: &Arc<Self>) -> StreamStart {
        let Some(others) = self.count_request() else { return StreamStart::Closed };
        // Made first: its drop ends the request that was just counted.
        let mut busy = self.busy();
        let of_stream = (others > 0).then(|| self.all.take_stream_slot(self)).transpose();
        let why = match of_stream {
            Ok(of_stream) => {
                busy._stream = of_stream;
                return StreamStart::Begun(busy, None);
            }
            Err(why) => why,
        };
        if why == NoSlot::Client {
            self.all.metrics.refused(ConnectionRefused::Client);
        }
        let limit = (self.all.limit.connections / 4).clamp(*REFUSED.start(), *REFUSED.end());
        busy._refused = self.all.refused_streams.take(limit);
        match busy._refused {
            Some(_) => StreamStart::Begun(busy, Some(why)),
            None => StreamStart::TooMany,
        }
    }

    fn busy(self: &Arc<Self>) -> Busy {
        Busy { slot: self.clone(), _stream: None, _refused: None }
    }

    /// Counts one more request under way. Returns how many others there are.
    fn count_request(&self) -> Option<u64> {
        let begin = |word| {
            let is_open = word & STATE != EVICTED && requests(word) < MAX_REQUESTS;
            is_open.then_some(((word & !STATE) | BUSY | HEAD) + ONE_REQUEST)
        };
        let before = self.open.packed.fetch_update(Ordering::AcqRel, Ordering::Acquire, begin);
        before.ok().map(requests)
    }

    /// Whether a request is under way, or its answer is being written.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self.open.packed.load(Ordering::Acquire) & STATE, BUSY | ANSWERED)
    }

    /// Marks that the client has shown a key.
    pub(crate) fn show_key(&self) {
        self.open.packed.fetch_or(KEY, Ordering::AcqRel);
    }

    /// Marks that the system has taken the whole answer.
    pub(crate) fn flushed(&self) {
        if self.open.packed.load(Ordering::Acquire) & STATE == ANSWERED {
            let since = self.all.accepted.load(Ordering::Relaxed);
            self.open.change(|word| {
                (word & STATE == ANSWERED).then_some((word & SHOWN) | (since << SINCE))
            });
        }
    }

    pub(crate) fn handshake_failed(&self, address: IpAddr, error: &std::io::Error) {
        self.all.handshake_failed(address, error);
    }

    /// Reports that the gateway ends an HTTP/2 connection, because its client floods it.
    pub(crate) fn flooded(&self, how: Flood) {
        self.all.metrics.flooded(how);
        if self.all.refusals.is_first(self.address, None, how.as_str()) {
            let (address, reason) = (self.address, how.as_str());
            tracing::warn!(
                %address,
                reason,
                "closed an HTTP/2 connection: too many resets or frames, or a request head that \
                 was too long or interrupted"
            );
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.slot.open.change(|word| {
            let left = word.checked_sub(ONE_REQUEST).filter(|_| word & STATE == BUSY)?;
            Some(if requests(left) == 0 { (left & !STATE) | ANSWERED } else { left })
        });
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut table = locked(&self.all.table);
        // The state is read under the table's lock, because a connection is evicted only under this
        // lock.
        if self.is_evicted() {
            table.closing -= 1;
            self.all.closed.notify_one();
        } else {
            table.remove(&self.open);
        }
        self.all.metrics.open(table.open.len());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
