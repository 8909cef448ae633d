//! A master in this process: the rules of a node on a hash map.
//!
//! A gateway for which no masters are configured embeds such nodes. Simulations and doc examples
//! use them too. `submit` delivers the vote before it returns. The node stores nothing durably: a
//! restart of the process loses all locks, and all "nodes" of one process share its fate.
//!
//! A differential test compares the node's answers with those of a real redis-server
//! (`tests/node/differential.rs`). Two differences are intended. Expiry follows the monotonic
//! clock, so a step of the wall clock expires no locks. And every value is a text: a key cannot
//! hold a list or another type.
//!
//! The memory of a node's keys can be limited. Beyond the limit the node refuses writes, as a
//! master with `noeviction` does.

use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, ready};
use tokio::sync::watch;
use tokio::time::Instant;

use super::eligibility::incarnation_of;
use super::link::{Put, RecoveryAnswer, RecoveryBatch, Scan, Scanned, Stored};
use super::rules::{self, Expiry, KeyError, KeySpace, NodeSettings};
use super::{
    Failure, Keys, Listener, LockReader, Node, NodeMemory, NodeState, NodeStatus, Op, Record,
    Reply, Vote,
};
use crate::model::clock::Clock;
use crate::model::types::{FencingToken, LockName};

/// An in-process master.
pub struct MemoryNode {
    name: String,
    store: Mutex<Store>,
    status: watch::Sender<NodeStatus>,
    listeners: Mutex<Vec<Weak<dyn Listener>>>,
}

impl MemoryNode {
    /// An empty, admitted node. `clock` measures the life of the node's keys, and is also the
    /// node's wall clock.
    pub fn new(name: impl Into<String>, clock: Arc<dyn Clock>, settings: NodeSettings) -> Self {
        let status = NodeStatus::new(NodeState::Admitted, clock.wall_micros());
        let store = Mutex::new(Store::new(clock, settings));
        Self {
            name: name.into(),
            store,
            status: watch::Sender::new(status),
            listeners: Mutex::default(),
        }
    }

    /// Limits the memory of the node's keys, in bytes.
    pub fn with_max_memory(self, max: u64) -> Self {
        let mut store = self.lock();
        store.max_bytes = max;
        let memory = store.memory();
        drop(store);
        self.status.send_modify(|status| status.memory = Some(memory));
        self
    }

    /// Runs one operation.
    pub fn run(&self, op: &Op) -> Vote {
        self.run_as(EMBEDDED, None, op)
    }

    /// Runs one operation for a gateway that has its own settings and sends this marker.
    pub fn run_with(&self, marker: &str, settings: &NodeSettings, op: &Op) -> Vote {
        self.run_as(marker, Some(settings), op)
    }

    /// Not inlined, so that instruction counts can exclude this function.
    #[inline(never)]
    fn run_as(&self, marker: &str, settings: Option<&NodeSettings>, op: &Op) -> Vote {
        let mut store = self.lock();
        let settings = settings.copied().unwrap_or(store.settings);
        let vote = store.run(op, marker, &settings);
        // The store is still locked here, so that an older report cannot follow a newer one.
        if store.max_bytes > 0 && store.bytes.abs_diff(store.reported) >= REPORT_EVERY {
            let memory = store.memory();
            self.status.send_if_modified(|status| {
                status.memory = Some(memory);
                false
            });
        }
        vote
    }

    /// The marker that stands.
    pub fn marker(&self) -> Option<String> {
        self.lock().marker.clone()
    }

    /// Replaces one marker by another, as `swap_marker.lua` does; false when another marker stands.
    pub fn swap_marker(&self, from: Option<&str>, to: &str) -> bool {
        let mut store = self.lock();
        let stands = store.marker.as_deref() == from;
        if stands {
            store.marker = Some(to.to_owned());
        }
        stands
    }

    /// Notes that the node has caught up, if this marker stands.
    pub fn mark_caught_up(&self, marker: &str) {
        let mut store = self.lock();
        if store.shows(marker) {
            store.caught_up = Some(incarnation_of(marker).to_owned());
        }
    }

    /// Whether the node has caught up under the marker that stands.
    pub fn is_caught_up(&self) -> bool {
        let store = self.lock();
        store.caught_up.as_deref().is_some_and(|incarnation| store.shows(incarnation))
    }

    /// Stores the number of a gateway's call.
    pub fn keep_number(&self, gateway: u64, number: u64) {
        self.lock().numbers.insert(gateway, number);
    }

    /// The number that is stored for a gateway; 0 for none.
    pub fn number(&self, gateway: u64) -> u64 {
        self.lock().numbers.get(&gateway).copied().unwrap_or_default()
    }

    /// All locks under a prefix that have an expiry, for a simulated link.
    pub fn stored(&self, prefix: &str) -> Vec<Stored> {
        let mut store = self.lock();
        let mut keys: Vec<_> = store.entries.keys().map(|(_, key)| key.clone()).collect();
        keys.sort_unstable();
        let lock = |key: Bytes| {
            let name = LockName::stored(std::str::from_utf8(&key).ok()?.strip_prefix(prefix)?)?;
            let record = Record::foreign(store.value(&key)?);
            Some(Stored {
                name,
                record,
                expires_in: Duration::from_millis(store.time_to_live(&key)?),
            })
        };
        keys.into_iter().filter_map(lock).collect()
    }

    /// Restores locks while a marker stands, as `recover.lua` does; `None` when no memory is left.
    pub fn recover(&self, prefix: &str, recovery: &RecoveryBatch) -> Option<RecoveryAnswer> {
        let mut store = self.lock();
        if !store.shows(&recovery.marker) {
            return Some(RecoveryAnswer::OtherMarker);
        }
        let mut foreign = |(name, put): &(LockName, Put)| {
            let current = store.value(&Keys::new(prefix, name).lock).map(Record::foreign);
            current.is_some_and(|current| current.parse().is_none() && current != put.record)
        };
        if recovery.puts.iter().any(&mut foreign) {
            return Some(RecoveryAnswer::OtherClient);
        }
        let grace = store.settings.fence_grace;
        let all = recovery.puts.iter().all(|(name, Put { record, expires_in, fence })| {
            let keys = Keys::new(prefix, name);
            let life = Expiry::In(millis(*expires_in));
            let Some((t, fence)) = record.fencing().zip(fence.clone()) else {
                return store.set(&keys.lock, record.as_bytes().clone(), life).is_ok();
            };
            // As in a repair, a lock is not set again if the watermark shows that it was released
            // here.
            let last = store.value(&keys.fence);
            let current = store.value(&keys.lock).map(Record::foreign);
            let passes = |last: Bytes| {
                rules::is_extended_watermark(&last, t)
                    || last[..FencingToken::TEXT_LEN] < t.text()[..]
            };
            if !last.is_none_or(passes)
                && !current.is_some_and(|current| current.is_grant_of(record))
            {
                return store
                    .set(&keys.lock, Record::placeholder(t).as_bytes().clone(), life)
                    .is_ok();
            }
            let set = store.set(&keys.lock, record.as_bytes().clone(), life);
            let watermark_life = Expiry::In(millis(*expires_in + grace));
            set.and_then(|()| store.set(&keys.fence, fence, watermark_life)).is_ok()
        });
        all.then_some(RecoveryAnswer::Done)
    }

    /// Sets a key as another client would, replacing any value; false when no memory is left.
    pub fn set_foreign(&self, key: &[u8], value: &[u8], ttl: Option<Duration>) -> bool {
        let expiry = ttl.map_or(Expiry::Never, |ttl| Expiry::In(millis(ttl)));
        self.lock().set(&Bytes::copy_from_slice(key), Bytes::copy_from_slice(value), expiry).is_ok()
    }

    /// Loses everything, the admission included, as FLUSHALL or a restart without data does.
    pub fn wipe(&self) {
        let mut store = self.lock();
        store.entries.clear();
        store.expiries.clear();
        store.bytes = 0;
        (store.marker, store.caught_up) = (None, None);
        store.numbers.clear();
        let since_micros = store.clock.wall_micros();
        self.status.send_modify(|status| {
            status.state = NodeState::Quarantined;
            status.since_micros = since_micros;
            status.detail = "all data was lost".into();
        });
    }

    /// Allows only `left` more sets, as a master that is running out of memory; `None` lifts the
    /// limit.
    pub fn limit_sets(&self, left: Option<u32>) {
        self.lock().sets_left = left;
    }

    /// Whether the limit of sets is used up.
    pub fn is_full(&self) -> bool {
        self.lock().sets_left == Some(0)
    }

    /// The whole stored state, the marker included.
    pub fn snapshot(&self) -> Snapshot {
        let store = self.lock();
        Snapshot {
            entries: store.entries.clone(),
            hasher: store.hasher.clone(),
            expiries: store.expiries.clone(),
            marker: store.marker.clone(),
            caught_up: store.caught_up.clone(),
            numbers: store.numbers.clone(),
        }
    }

    /// Restores a stored state, as a restart from an old file does.
    pub fn restore(&self, snapshot: Snapshot) {
        let mut store = self.lock();
        let Snapshot { entries, hasher, expiries, marker, caught_up, numbers } = snapshot;
        store.bytes = entries.iter().map(|((_, key), entry)| bytes_of(key, &entry.value)).sum();
        (store.entries, store.hasher, store.expiries) = (entries, hasher, expiries);
        (store.marker, store.caught_up, store.numbers) = (marker, caught_up, numbers);
    }

    /// Admits the node again.
    pub fn admit(&self) {
        let mut store = self.lock();
        store.marker = Some(EMBEDDED.to_owned());
        let since_micros = store.clock.wall_micros();
        self.status.send_modify(|status| {
            status.state = NodeState::Admitted;
            status.since_micros = since_micros;
            status.detail.clear();
        });
    }

    /// Number of keys, including expired keys that no operation has removed yet.
    pub fn key_count(&self) -> usize {
        self.lock().entries.len()
    }

    fn listeners(&self) -> parking_lot::MutexGuard<'_, Vec<Weak<dyn Listener>>> {
        self.listeners.lock()
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, Store> {
        let mut store = self.store.lock();
        store.now = millis(store.clock.monotonic());
        store
    }
}

impl Node for MemoryNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.status.subscribe()
    }

    fn submit(&self, op: Arc<Op>, _not_after: Instant, reply: Reply) {
        // The store must be unlocked before the vote is delivered: the voter may submit again.
        let vote = self.run(&op);
        if let Some(hint) = op.hint_for(&vote) {
            let listeners = self.listeners().clone();
            listeners.iter().filter_map(Weak::upgrade).for_each(|listener| listener.on_hint(hint));
        }
        reply.send(vote);
    }

    fn reader(&self) -> &dyn LockReader {
        self
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        let mut listeners = self.listeners();
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(listener);
    }
}

impl LockReader for MemoryNode {
    fn scan(&self, scan: Scan) -> BoxFuture<'_, Result<Scanned, Failure>> {
        ready(Ok(self.lock().scan(&scan))).boxed()
    }

    fn read(&self, locks: Vec<Keys>) -> BoxFuture<'_, Result<Vec<Vote>, Failure>> {
        ready(Ok(locks.into_iter().map(|keys| self.run(&Op::Inspect { keys })).collect())).boxed()
    }
}

/// The stored state of a node at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    entries: BTreeMap<(u64, Bytes), Entry>,
    /// Computes from a key the place of its entry.
    hasher: RandomState,
    expiries: BTreeSet<(u64, Bytes)>,
    marker: Option<String>,
    caught_up: Option<String>,
    numbers: BTreeMap<u64, u64>,
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Bytes of memory per key, beside those of key and value. Measured with the gateway's five
/// embedded nodes and names of 20 bytes: the process takes 2,800 bytes per lock. A lock has two
/// keys on each node, so a key takes 280 bytes, of which 75 are key and value.
const ENTRY: u64 = 205;
/// The status is updated when memory use has changed by this many bytes.
const REPORT_EVERY: u64 = 16 * 1024;

fn bytes_of(key: &Bytes, value: &Bytes) -> u64 {
    ENTRY + (key.len() + value.len()) as u64
}

/// The limit of keys in one scan. All operations wait until the scan has ended.
const MAX_SCAN: u32 = 512;

/// The marker of a node inside a gateway's process. The node ends with that process: no other
/// gateway can admit the node, and a quarantine would protect nothing.
const EMBEDDED: &str = "embedded";

#[derive(Debug, Clone)]
struct Entry {
    value: Bytes,
    expires_at: Option<u64>,
}

struct Store {
    clock: Arc<dyn Clock>,
    /// The time at which the present operation began, in milliseconds of the monotonic clock. As in
    /// Redis, all of the operation uses this time. So no key expires between two steps of it.
    now: u64,
    settings: NodeSettings,
    marker: Option<String>,
    /// The incarnation of the marker under which the node has caught up.
    caught_up: Option<String>,
    /// The number that is stored for each gateway.
    numbers: BTreeMap<u64, u64>,
    /// Ordered by a secret hash of the key. The cursor of a listing is such a hash, and must not
    /// reveal keys.
    entries: BTreeMap<(u64, Bytes), Entry>,
    hasher: RandomState,
    /// The expiry of every key that has one, ordered by time.
    expiries: BTreeSet<(u64, Bytes)>,
    /// Remaining sets; `None` for no limit.
    sets_left: Option<u32>,
    /// Bytes of all entries.
    bytes: u64,
    /// 0 for no limit.
    max_bytes: u64,
    /// The bytes in the latest status.
    reported: u64,
}

impl Store {
    fn new(clock: Arc<dyn Clock>, settings: NodeSettings) -> Self {
        let marker = Some(EMBEDDED.to_owned());
        Self {
            clock,
            now: 0,
            settings,
            marker,
            caught_up: None,
            numbers: BTreeMap::new(),
            entries: BTreeMap::new(),
            hasher: RandomState::new(),
            expiries: BTreeSet::new(),
            sets_left: None,
            bytes: 0,
            max_bytes: 0,
            reported: 0,
        }
    }

    /// The memory use for the status.
    fn memory(&mut self) -> NodeMemory {
        self.reported = self.bytes;
        NodeMemory { used: self.bytes, max: self.max_bytes, asked: self.clock.monotonic() }
    }

    fn run(&mut self, op: &Op, marker: &str, settings: &NodeSettings) -> Vote {
        self.expire_some();
        let admitted = self.shows(marker);
        rules::run(self, settings, admitted, op)
    }

    /// Whether a marker of this incarnation stands.
    fn shows(&self, marker: &str) -> bool {
        self.marker.as_deref().map(incarnation_of) == Some(incarnation_of(marker))
    }

    /// Scans up to `count` entries, from the cursor's place in the order of the entries.
    fn scan(&self, Scan { key_prefix, cursor, count }: &Scan) -> Scanned {
        let from = std::str::from_utf8(cursor)
            .ok()
            .and_then(|text| u64::from_str_radix(text, 16).ok())
            .unwrap_or(0);
        let count = (*count).min(MAX_SCAN);
        let now = self.now;
        let mut entries = self.entries.range((from, Bytes::new())..);
        let found = |((_, key), entry): &(&(u64, Bytes), &Entry)| {
            key.starts_with(key_prefix) && !is_past(entry.expires_at, now)
        };
        let keys = entries
            .by_ref()
            .take(count as usize)
            .filter(found)
            .map(|((_, key), _)| key.clone())
            .collect();
        Scanned {
            keys,
            count,
            next: entries.next().map(|((place, _), _)| format!("{place:x}").into()),
        }
    }

    fn value(&mut self, key: &Bytes) -> Option<Bytes> {
        let entry = self.entries.get(&self.place(key))?;
        if is_past(entry.expires_at, self.now) {
            self.delete(key);
            return None;
        }
        Some(entry.value.clone())
    }

    fn place(&self, key: &Bytes) -> (u64, Bytes) {
        (self.hasher.hash_one(key), key.clone())
    }

    /// Removes a few expired keys, so that names that are never used again do not pile up. Each
    /// operation adds at most two keys and first removes up to four.
    fn expire_some(&mut self) {
        let now = self.now;
        for _ in 0..4 {
            match self.expiries.first() {
                Some((at, _)) if now > *at => {}
                _ => return,
            }
            if let Some((_, key)) = self.expiries.pop_first()
                && let Some(entry) = self.entries.remove(&self.place(&key))
            {
                self.bytes -= bytes_of(&key, &entry.value);
            }
        }
    }
}

impl KeySpace for Store {
    fn now_micros(&self) -> u64 {
        self.clock.wall_micros()
    }

    fn get(&mut self, key: &Bytes) -> Result<Option<Bytes>, KeyError> {
        Ok(self.value(key))
    }

    fn time_to_live(&mut self, key: &Bytes) -> Option<u64> {
        self.entries.get(&self.place(key))?.expires_at?.checked_sub(self.now)
    }

    fn set(&mut self, key: &Bytes, value: Bytes, expiry: Expiry) -> Result<(), KeyError> {
        if self.sets_left == Some(0) || (self.max_bytes > 0 && self.bytes > self.max_bytes) {
            return Err(KeyError::OutOfMemory);
        }
        self.sets_left = self.sets_left.map(|left| left - 1);
        let place = self.place(key);
        let expires_at = match expiry {
            Expiry::In(ttl) => Some(self.now.saturating_add(ttl)),
            Expiry::Keep => self.entries.get(&place).and_then(|entry| entry.expires_at),
            Expiry::Never => None,
        };
        self.bytes += bytes_of(key, &value);
        let before = self.entries.insert(place, Entry { value, expires_at });
        let old_expiry = before.as_ref().and_then(|before| before.expires_at);
        if let Some(before) = before {
            self.bytes -= bytes_of(key, &before.value);
        }
        if old_expiry != expires_at {
            if let Some(at) = old_expiry {
                self.expiries.remove(&(at, key.clone()));
            }
            if let Some(at) = expires_at {
                self.expiries.insert((at, key.clone()));
            }
        }
        Ok(())
    }

    fn expire(&mut self, key: &Bytes, millis: u64) {
        let at = self.now.saturating_add(millis);
        let place = self.place(key);
        if let Some(entry) = self.entries.get_mut(&place) {
            if let Some(before) = entry.expires_at.replace(at) {
                self.expiries.remove(&(before, key.clone()));
            }
            self.expiries.insert((at, key.clone()));
        }
    }

    fn delete(&mut self, key: &Bytes) {
        let Some(((_, key), Entry { value, expires_at })) =
            self.entries.remove_entry(&self.place(key))
        else {
            return;
        };
        self.bytes -= bytes_of(&key, &value);
        if let Some(at) = expires_at {
            self.expiries.remove(&(at, key));
        }
    }
}

/// As in Redis, a key still stands in the millisecond of its expiry, and ends after it.
fn is_past(expires_at: Option<u64>, now: u64) -> bool {
    expires_at.is_some_and(|at| now > at)
}

mod tests;
