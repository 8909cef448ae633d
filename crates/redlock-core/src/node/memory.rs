//! A master in this process: the state machine of the scripts, operation for operation, on a hash map.
//!
//! It is the embedded default of the gateway and the node of simulations and doc examples. It answers `submit` before
//! returning. What it cannot do is remember: a restart of the process is a loss of all locks, and all "nodes" of one
//! process share its fate.
//!
//! A differential test holds it to the answers of a real redis-server (`tests/it/differential.rs`). Two differences are
//! wanted: expiry follows the monotonic clock, so that a step of the wall clock does not expire locks; and there are no
//! keys of other types.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{
    Effect, Failure, Holding, Keys, Listener, Node, NodeSettings, NodeState, NodeStatus, Op, Reason, Record, Reply,
    Vote,
};
use crate::clock::Clock;
use crate::types::{FencingToken, Ttl};

/// An in-process master.
pub struct MemoryNode {
    name: String,
    store: Mutex<Store>,
    status: watch::Sender<NodeStatus>,
    listeners: Mutex<Vec<Weak<dyn Listener>>>,
}

impl MemoryNode {
    /// An empty, admitted node. `clock` is the node's own: its expiry and its TIME.
    pub fn new(name: impl Into<String>, clock: Arc<dyn Clock>, settings: NodeSettings) -> Self {
        let status = NodeStatus::new(NodeState::Admitted, clock.wall_micros());
        let store = Mutex::new(Store::new(clock, settings));
        Self { name: name.into(), store, status: watch::Sender::new(status), listeners: Mutex::default() }
    }

    /// Runs one operation and answers it.
    pub fn run(&self, op: &Op) -> Vote {
        self.lock().run(op, EMBEDDED)
    }

    /// The same for a gateway that shows the marker by which it believes the node admitted.
    pub fn run_with(&self, marker: &str, op: &Op) -> Vote {
        self.lock().run(op, marker)
    }

    /// The marker that stands.
    pub fn marker(&self) -> Option<String> {
        self.lock().marker.clone()
    }

    /// Puts one marker in the place of another, as the admission script does; false when another one stands.
    pub fn swap_marker(&self, from: Option<&str>, to: &str) -> bool {
        let mut store = self.lock();
        let stands = store.marker.as_deref() == from;
        if stands {
            store.marker = Some(to.to_owned());
        }
        stands
    }

    /// Sets a key as another client would, overwriting what is there.
    pub fn set_foreign(&self, key: &[u8], value: &[u8], ttl: Option<Duration>) {
        self.lock().set(Bytes::copy_from_slice(key), Bytes::copy_from_slice(value), ttl.map(millis));
    }

    /// Forgets everything, as FLUSHALL or an empty restart does, the right to vote included.
    pub fn wipe(&self) {
        let mut store = self.lock();
        store.entries.clear();
        store.expiries.clear();
        store.marker = None;
        let since_micros = store.clock.wall_micros();
        self.status.send_modify(|status| {
            status.state = NodeState::Quarantined;
            status.since_micros = since_micros;
            status.detail = "all data was lost".into();
        });
    }

    /// Everything that is stored now, the marker included.
    pub fn snapshot(&self) -> Snapshot {
        let store = self.lock();
        Snapshot { entries: store.entries.clone(), expiries: store.expiries.clone(), marker: store.marker.clone() }
    }

    /// Puts back what was stored then, as a restart from an old file does.
    pub fn restore(&self, snapshot: Snapshot) {
        let mut store = self.lock();
        (store.entries, store.expiries, store.marker) = (snapshot.entries, snapshot.expiries, snapshot.marker);
    }

    /// Gives the right to vote back.
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

    /// Number of keys, expired ones that nobody has touched yet included.
    pub fn key_count(&self) -> usize {
        self.lock().entries.len()
    }

    fn listeners(&self) -> std::sync::MutexGuard<'_, Vec<Weak<dyn Listener>>> {
        self.listeners.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
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
        if let Some(hint) = op.told(&vote) {
            let listeners = self.listeners().clone();
            listeners.iter().filter_map(Weak::upgrade).for_each(|listener| listener.hear(hint));
        }
        reply.send(vote);
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        let mut listeners = self.listeners();
        listeners.retain(|listener| listener.strong_count() > 0);
        listeners.push(listener);
    }
}

/// What a node had stored at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    entries: HashMap<Bytes, Entry>,
    expiries: BTreeSet<(u64, Bytes)>,
    marker: Option<String>,
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// The marker of a node that lives and dies with its gateway: nobody else can admit it, and no wait is of use.
const EMBEDDED: &str = "embedded";

#[derive(Debug, Clone)]
struct Entry {
    value: Bytes,
    expires_at: Option<u64>,
}

struct Store {
    clock: Arc<dyn Clock>,
    settings: NodeSettings,
    marker: Option<String>,
    entries: HashMap<Bytes, Entry>,
    /// Every key that has an expiry, once, by its time.
    expiries: BTreeSet<(u64, Bytes)>,
}

impl Store {
    fn new(clock: Arc<dyn Clock>, settings: NodeSettings) -> Self {
        let marker = Some(EMBEDDED.to_owned());
        Self { clock, settings, marker, entries: HashMap::new(), expiries: BTreeSet::new() }
    }

    fn run(&mut self, op: &Op, marker: &str) -> Vote {
        self.expire_some();
        let admitted = !self.settings.rules().marker_is_checked || self.marker.as_deref() == Some(marker);
        match op {
            Op::Acquire { .. } | Op::Extend { .. } | Op::Heal { .. } if !admitted => not_admitted(),
            Op::Acquire { keys, record, ttl, .. } => self.acquire(keys, record, *ttl),
            Op::Extend { keys, record, ttl } => self.extend(keys, record, *ttl),
            Op::Heal { keys, record, ttl } => self.heal(keys, record, *ttl),
            Op::Release { keys, record, failed_try, .. } => self.release(keys, record, *failed_try),
            Op::Inspect { keys } => match self.get(&keys.lock) {
                Some(value) => Vote::Found(self.holding(keys, value)),
                None => Vote::Missing,
            },
            Op::Scan { key_prefix, cursor, count } => self.scan(key_prefix, cursor, *count),
        }
    }

    fn acquire(&mut self, keys: &Keys, record: &Record, ttl: Ttl) -> Vote {
        let Some(t) = record.fencing() else { return error("the record has no T") };
        let now = self.clock.wall_micros();
        let rules = self.settings.rules();
        if rules.clock_is_checked && t.get().abs_diff(now) > self.max_offset() {
            return clock_refusal();
        }
        let last = self.get(&keys.fence);
        let fence = match last.as_ref().map(|text| fence_of(text)) {
            None => None,
            Some(Some(fence)) => Some(fence),
            Some(None) => return error("ERR the fence holds no number"),
        };
        let current = self.get(&keys.lock);
        if let Some(value) = &current {
            if Record::foreign(value.clone()).owner_text() != record.owner_text() {
                return Vote::Held(self.holding(keys, value.clone()));
            }
            if !rules.retry_rewrites {
                return Vote::Granted;
            }
        }
        if let Some(fence) = fence.filter(|fence| rules.fence_is_checked && *fence >= t) {
            return Vote::Stale { fence };
        }
        let asked = u64::from(ttl.millis());
        let ttl = match &current {
            Some(_) => self.left(&keys.lock).map_or(asked, |left| left.max(asked)),
            None => asked,
        };
        self.set(keys.lock.clone(), record.as_bytes().clone(), Some(ttl));
        let fence = match last {
            None => format!("{t}!").into(),
            Some(last) if &last[FencingToken::TEXT_LEN..] == b"+" => {
                [format!("{t}!").as_bytes(), &last].concat().into()
            }
            Some(_) => fence_text(t),
        };
        self.set_fence(keys, fence);
        if current.is_some() { Vote::GrantedAgain } else { Vote::Granted }
    }

    fn extend(&mut self, keys: &Keys, record: &Record, ttl: Ttl) -> Vote {
        let Some(value) = self.get(&keys.lock) else { return Vote::Missing };
        if !value.starts_with(&record.grant()) {
            return Vote::Held(self.holding(keys, value));
        }
        let asked = u64::from(ttl.millis());
        let stored = Record::foreign(value.clone());
        if let (false, Some(t)) = (stored.is_extended(), stored.fencing()) {
            if self.get(&keys.fence).is_none_or(|fence| fence_of(&fence) == Some(t)) {
                self.set_fence(keys, marked(t));
            }
            let ttl = self.left(&keys.lock).map_or(asked, |left| left.max(asked));
            self.set(keys.lock.clone(), stored.extended().as_bytes().clone(), Some(ttl));
        } else if self.left(&keys.lock).is_some_and(|left| left < asked) {
            self.set(keys.lock.clone(), value, Some(asked));
        }
        Vote::Extended
    }

    fn heal(&mut self, keys: &Keys, record: &Record, ttl: Ttl) -> Vote {
        let Some(t) = record.fencing() else { return error("the record has no T") };
        let rules = self.settings.rules();
        if rules.clock_is_checked && t.get().saturating_sub(self.clock.wall_micros()) > self.max_offset() {
            return clock_refusal();
        }
        if let Some(value) = self.get(&keys.lock) {
            let same = value.starts_with(&record.grant());
            return if same { Vote::Extended } else { Vote::Held(self.holding(keys, value)) };
        }
        if let Some(text) = self.get(&keys.fence) {
            let Some(fence) = fence_of(&text) else { return error("ERR the fence holds no number") };
            if rules.fence_is_checked && fence >= t && text != marked(t) {
                return Vote::Stale { fence };
            }
        }
        self.set_fence(keys, marked(t));
        self.set(keys.lock.clone(), record.extended().as_bytes().clone(), Some(u64::from(ttl.millis())));
        Vote::Granted
    }

    fn release(&mut self, keys: &Keys, record: &Record, failed_try: bool) -> Vote {
        let Some(t) = record.fencing() else { return error("the record has no T") };
        let rules = self.settings.rules();
        let current = self.get(&keys.lock).map(Record::foreign);
        let (mut same, mut deleted) = (false, false);
        if let Some(current) = &current {
            let mine = current.owner_text() == record.owner_text();
            same = mine && current.fencing() == Some(t);
            if mine && (!rules.release_keeps_newer || current.fencing().is_none_or(|stored| stored <= t)) {
                self.remove(&keys.lock);
                deleted = true;
            }
            if same && !current.is_extended() {
                if failed_try {
                    self.undo_fence(keys, t);
                }
                return Vote::Released;
            }
        }
        if rules.release_is_a_barrier {
            if same || t.get().saturating_sub(self.clock.wall_micros()) <= self.max_offset() / 2 {
                let stands = self.get(&keys.fence);
                let fence = stands.as_ref().and_then(|text| fence_of(text));
                match fence {
                    Some(fence) if fence >= t && stands != Some(marked(t)) => {
                        if stands.is_some_and(|text| text.get(FencingToken::TEXT_LEN) == Some(&b'!')) {
                            self.set_fence(keys, fence_text(fence));
                        }
                    }
                    Some(_) | None => self.set_fence(keys, fence_text(t)),
                }
            } else {
                return clock_refusal();
            }
        }
        match current {
            _ if deleted => Vote::Released,
            Some(current) => Vote::Held(self.holding(keys, current.as_bytes().clone())),
            None => Vote::Missing,
        }
    }

    fn scan(&self, key_prefix: &Bytes, cursor: &Bytes, count: u32) -> Vote {
        // A place among all keys and not a key: cursors go to people who may not see every key.
        let from = std::str::from_utf8(cursor).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
        let mut keys: Vec<_> = self.entries.keys().collect();
        keys.sort_unstable();
        let (count, now) = (count as usize, self.now());
        let next = (keys.len() > count.saturating_add(from)).then(|| (from + count).to_string().into());
        let wanted = |key: &&&Bytes| {
            key.starts_with(key_prefix) && self.entries.get(**key).is_some_and(|entry| !is_past(entry.expires_at, now))
        };
        let keys = keys.iter().skip(from).take(count).filter(wanted).map(|key| (*key).clone()).collect();
        Vote::Page { keys, next }
    }

    fn undo_fence(&mut self, keys: &Keys, t: FencingToken) {
        let provisional = format!("{t}!");
        let Some(last) = self.get(&keys.fence) else { return };
        match last.strip_prefix(provisional.as_bytes()) {
            Some([]) => self.remove(&keys.fence),
            Some(before) => self.set_fence(keys, Bytes::copy_from_slice(before)),
            None => {}
        }
    }

    fn set_fence(&mut self, keys: &Keys, text: Bytes) {
        self.set(keys.fence.clone(), text, Some(millis(self.settings.fence_retention)));
    }

    fn max_offset(&self) -> u64 {
        self.settings.max_clock_offset.as_micros() as u64
    }

    fn now(&self) -> u64 {
        millis(self.clock.monotonic())
    }

    fn get(&mut self, key: &Bytes) -> Option<Bytes> {
        let entry = self.entries.get(key)?;
        if is_past(entry.expires_at, self.now()) {
            self.remove(key);
            return None;
        }
        Some(entry.value.clone())
    }

    fn left(&self, key: &Bytes) -> Option<u64> {
        Some(self.entries.get(key)?.expires_at?.saturating_sub(self.now()))
    }

    fn set(&mut self, key: Bytes, value: Bytes, ttl: Option<u64>) {
        self.remove(&key);
        let expires_at = ttl.map(|ttl| self.now().saturating_add(ttl));
        if let Some(at) = expires_at {
            self.expiries.insert((at, key.clone()));
        }
        self.entries.insert(key, Entry { value, expires_at });
    }

    fn remove(&mut self, key: &Bytes) {
        if let Some((key, Entry { expires_at: Some(at), .. })) = self.entries.remove_entry(key) {
            self.expiries.remove(&(at, key));
        }
    }

    fn holding(&self, keys: &Keys, value: Bytes) -> Holding {
        let expires_in = self.left(&keys.lock).map(Duration::from_millis);
        Holding { record: Record::foreign(value), expires_in }
    }

    /// Forgets a few keys that are past their time, so that names that are never asked for again do not pile up: each
    /// operation adds at most two and clears up to four.
    fn expire_some(&mut self) {
        let now = self.now();
        for _ in 0..4 {
            match self.expiries.first() {
                Some((at, _)) if now > *at => {}
                _ => return,
            }
            if let Some((_, key)) = self.expiries.pop_first() {
                self.entries.remove(&key);
            }
        }
    }
}

fn fence_text(t: FencingToken) -> Bytes {
    Bytes::from(t.to_string())
}

/// A fence at the T of a lock that was extended here and that no release has reached since.
fn marked(t: FencingToken) -> Bytes {
    Bytes::from(format!("{t}+"))
}

/// Without a mark.
fn fence_of(text: &[u8]) -> Option<FencingToken> {
    FencingToken::parse(text.get(..FencingToken::TEXT_LEN)?)
}

/// Redis keeps a key through the millisecond that its expiry names.
fn is_past(expires_at: Option<u64>, now: u64) -> bool {
    expires_at.is_some_and(|at| now > at)
}

fn not_admitted() -> Vote {
    Vote::Failed(Failure::new(Reason::Quarantined, Effect::None, "the node's marker is missing or differs"))
}

fn clock_refusal() -> Vote {
    Vote::Failed(Failure::new(Reason::Clock, Effect::None, "the fencing token is too far from the node's own time"))
}

fn error(detail: &str) -> Vote {
    Vote::Failed(Failure::new(Reason::Error, Effect::None, detail))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::{Entropy, OsEntropy, SystemClock};
    use crate::types::{Info, LockName, LockToken};

    #[test]
    fn using_one_name_again_and_again_takes_no_more_memory() {
        let node = MemoryNode::new("n", Arc::new(SystemClock), NodeSettings::default());
        let keys = Keys::new("lock:", &"job".parse::<LockName>().unwrap());
        let ttl = Ttl::from_millis(30_000).unwrap();
        let now = SystemClock.wall_micros();
        for cycle in 0..1_000 {
            let token = LockToken::new(OsEntropy.owner(), FencingToken::new(now + cycle).unwrap());
            let record = Record::new(&token, &Info::default());
            assert_eq!(
                node.run(&Op::Acquire { keys: keys.clone(), record: record.clone(), ttl, tell: None }),
                Vote::Granted
            );
            assert_eq!(node.run(&Op::Extend { keys: keys.clone(), record: record.clone(), ttl }), Vote::Extended);
            assert_eq!(
                node.run(&Op::Release { keys: keys.clone(), record, failed_try: false, tell: None }),
                Vote::Released
            );
        }
        let store = node.lock();
        assert_eq!((store.entries.len(), store.expiries.len()), (1, 1), "the fence alone is left");
    }
}
