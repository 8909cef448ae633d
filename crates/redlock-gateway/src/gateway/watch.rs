//! Tells watchers what happens to locks.
//!
//! What this gateway does is told at once. What other gateways do is found by polling ([`poll`]), so
//! it is told about a second later. While nobody watches, a request reads one flag here.
//!
//! A watcher follows one lock, or all locks whose names begin with a prefix. Each change is stored
//! once, however many watchers there are: their receivers share a ring buffer. A watcher that reads
//! too slowly loses the oldest changes, is told how many, and reads the state anew.
//!
//! This module does not know who may see what, nor how a change is written on the wire.

mod poll;
mod seen;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use redlock_core::{FencingToken, HeldBy, LockName, SlotSet, Waiter};
use tokio::sync::{Notify, broadcast};

pub(super) use self::poll::{pages, poll};
use self::seen::{End, Seen};
use crate::overload::clients::{Client, Counter, Permit};

/// Limit on streams of events, of watchers and of holders. Each has a connection, or a part of one.
const MAX_STREAMS: usize = 20_000;
/// Limit on the locks that are watched by name. Each is read about once a second.
const MAX_NAMES: usize = 1_000;
/// Limit on the different prefixes that are watched.
const MAX_PREFIXES: usize = 100;
/// How many changes of one lock wait for a watcher that reads slowly.
const BUFFERED_OF_NAME: usize = 64;
/// How many changes of all locks wait for a slow watcher of a prefix.
const BUFFERED_OF_ALL: usize = 1_024;
/// How many changes are kept for watchers that come back.
const RECENT: usize = 1_024;
/// How long a lock is still followed after its last watcher has left, for the case that the watcher
/// comes back.
const LINGERS: Duration = Duration::from_secs(30);

/// What a watcher follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Watched {
    Lock(LockName),
    /// All locks whose names begin with this text.
    Prefix(String),
}

impl Watched {
    fn covers(&self, name: &LockName) -> bool {
        match self {
            Self::Lock(lock) => lock == name,
            Self::Prefix(prefix) => name.as_str().starts_with(&**prefix),
        }
    }
}

/// What happened to a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Held(HeldBy),
    Extended(HeldBy),
    /// The hold of this holder has ended.
    Released(HeldBy),
    Expired(HeldBy),
    Forced(HeldBy),
    /// The first waiters of this gateway's line with the time when each began to wait, and the
    /// length of the line.
    Waiters(Vec<(Waiter, u64)>, usize),
}

/// A change of a lock.
#[derive(Debug)]
pub struct Change {
    /// Grows by one from change to change of this process.
    pub id: u64,
    /// The lock, without the slot.
    pub name: LockName,
    pub slot: u16,
    pub event: Event,
    /// The text on the wire, written by the first watcher that sends it to a caller who may see all
    /// of it.
    pub written: std::sync::OnceLock<Bytes>,
}

/// Refusal of a watcher: there are as many as allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyWatchers {
    pub max: usize,
    /// What is counted.
    pub what: &'static str,
}

/// The place of one stream of events; returned when dropped.
#[derive(Debug)]
pub struct StreamPermit(#[allow(dead_code)] Permit, #[allow(dead_code)] Permit);

/// Everything that is watched at this gateway.
#[derive(Debug)]
pub(super) struct Watches {
    /// Whether anything is watched.
    is_active: AtomicBool,
    /// Open streams of events.
    streams: Counter,
    state: Mutex<State>,
    /// Wakes the poller.
    wake: Notify,
    /// Tells the ids of this process from those of others.
    process: u32,
}

#[derive(Debug)]
struct State {
    last_id: u64,
    names: HashMap<LockName, Topic>,
    /// The prefixes that are watched, with the number of watchers whose snapshot is made.
    prefixes: BTreeMap<String, usize>,
    /// Changes of all locks, for the watchers of prefixes.
    all: broadcast::Sender<Arc<Change>>,
    recent: VecDeque<Arc<Change>>,
    /// What was last seen of each lock, or slot, by the name under which it is stored.
    seen: HashMap<LockName, Seen>,
    /// Locks whose line has changed.
    lines: HashSet<LockName>,
    /// Locks to read before the next poll is due.
    to_read: HashSet<LockName>,
}

/// A lock that is watched by name.
#[derive(Debug)]
struct Topic {
    changes: broadcast::Sender<Arc<Change>>,
    watchers: usize,
    /// The last change before this lock was watched.
    since: u64,
    /// When the last watcher left.
    left: Option<Instant>,
    /// How many slots the lock has, as far as was seen.
    slots: u16,
    /// The length of the line that was last told.
    line: usize,
}

impl State {
    fn is_watched(&self, name: &LockName) -> bool {
        self.names.contains_key(name)
            || self.prefixes.keys().any(|prefix| name.as_str().starts_with(&**prefix))
    }

    fn tell(&mut self, name: &LockName, slot: u16, event: Event) {
        self.last_id += 1;
        let written = std::sync::OnceLock::new();
        let change =
            Arc::new(Change { id: self.last_id, name: name.clone(), slot, event, written });
        // Sending fails only when nobody receives.
        if let Some(topic) = self.names.get(name) {
            let _ = topic.changes.send(change.clone());
        }
        if !self.prefixes.is_empty() {
            let _ = self.all.send(change.clone());
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(change);
    }

    /// Compares the state of a slot with what was seen before, and tells the difference. `end`: how
    /// the hold ended that was seen before, if that is known.
    fn see(&mut self, name: &LockName, slot: u16, now: Seen, end: Option<End>) {
        let stored = name.of_slot(slot);
        let events = seen::difference(self.seen.get(&stored), &now, end);
        if let Seen { by: Some(by), .. } = &now
            && let Some(topic) = self.names.get_mut(name)
        {
            let of_holder = crate::info::LockMetadata::read(&by.info).slots.unwrap_or(1);
            topic.slots = topic.slots.max(of_holder).max(slot);
        }
        self.seen.insert(stored, now);
        events.into_iter().for_each(|event| self.tell(name, slot, event));
    }

    /// Forgets what nobody watches any more.
    fn forget_unwatched(&mut self) {
        self.names.retain(|_, topic| topic.left.is_none_or(|left| left.elapsed() < LINGERS));
        let seen = std::mem::take(&mut self.seen);
        self.seen = seen
            .into_iter()
            .filter(|(stored, _)| self.is_watched(&stored.lock_and_slot().0))
            .collect();
    }
}

impl Default for Watches {
    fn default() -> Self {
        Self {
            is_active: AtomicBool::new(false),
            streams: Counter::default(),
            state: Mutex::new(State {
                last_id: 0,
                names: HashMap::new(),
                prefixes: BTreeMap::new(),
                all: broadcast::Sender::new(BUFFERED_OF_ALL),
                recent: VecDeque::new(),
                seen: HashMap::new(),
                lines: HashSet::new(),
                to_read: HashSet::new(),
            }),
            wake: Notify::new(),
            process: fastrand::u32(1..),
        }
    }
}

impl Watches {
    /// Whether somebody watches this lock. Cheap while nobody watches anything.
    pub(super) fn follows(&self, name: &LockName) -> bool {
        self.is_active.load(Ordering::Acquire) && self.state.lock().is_watched(name)
    }

    pub(super) fn count(&self) -> usize {
        self.streams.count()
    }

    /// Tells that these slots were acquired. A repeated request finds its own grant, and only its
    /// longer life is told.
    pub(super) fn held(&self, name: &LockName, slots: SlotSet, by: &HeldBy) {
        let mut state = self.state.lock();
        for slot in slots.iter() {
            // To the watchers of a prefix, a lock that was never seen was free.
            state.seen.entry(name.of_slot(slot)).or_insert_with(Seen::free);
            state.see(name, slot, Seen::of(by.clone()), None);
        }
    }

    /// Tells that these slots were extended for this long.
    pub(super) fn extended(
        &self,
        name: &LockName,
        slots: SlotSet,
        fencing: FencingToken,
        life: Duration,
    ) {
        if !self.is_active.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.state.lock();
        if !state.is_watched(name) {
            return;
        }
        for slot in slots.iter() {
            // The token does not have the holder's text. Without it, the next poll tells.
            let known = state.seen.get(&name.of_slot(slot)).and_then(|seen| seen.by.clone());
            if let Some(mut by) = known.filter(|by| by.fencing == Some(fencing)) {
                by.expires_in = Some(life);
                state.see(name, slot, Seen::of(by), None);
            }
        }
    }

    /// Tells that the holds of these slots ended. `forced`: by an operator.
    pub(super) fn ended(&self, name: &LockName, slots: SlotSet, forced: bool) {
        if !self.is_active.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.state.lock();
        if !state.is_watched(name) {
            return;
        }
        let end = if forced { End::Forced } else { End::Released };
        for slot in slots.iter() {
            state.see(name, slot, Seen::free(), Some(end));
        }
    }

    /// Has this lock read soon, because this gateway changed it and does not know what the masters
    /// store now.
    pub(super) fn read_soon(&self, name: &LockName) {
        if self.is_active.load(Ordering::Acquire) {
            let mut state = self.state.lock();
            if state.is_watched(name) && state.to_read.insert(name.clone()) {
                self.wake.notify_one();
            }
        }
    }

    /// Tells soon who waits for this lock.
    pub(super) fn line_changed(&self, name: &LockName) {
        if self.is_active.load(Ordering::Acquire) {
            let mut state = self.state.lock();
            if state.is_watched(name) && state.lines.insert(name.clone()) {
                self.wake.notify_one();
            }
        }
    }

    /// Begins to watch. `last`: the id of the last event that the watcher has got from an earlier
    /// stream.
    ///
    /// # Errors
    /// [`TooManyWatchers`].
    pub(super) fn watch(
        self: &Arc<Self>,
        client: &Client,
        watched: Watched,
        last: Option<&str>,
    ) -> Result<Watcher, TooManyWatchers> {
        let full = |max, what| TooManyWatchers { max, what };
        let permit = self.begin_stream(client)?;
        let mut state = self.state.lock();
        let last = last.and_then(|id| self.own_id(id)).filter(|id| *id <= state.last_id);
        let has_all_since = last.filter(|last| {
            let oldest = state.recent.front().map_or(state.last_id, |change| change.id - 1);
            *last >= oldest
        });
        let (changes, missed) = match &watched {
            Watched::Lock(name) => {
                if state.names.len() >= MAX_NAMES {
                    // Locks without watchers make room.
                    state.names.retain(|known, topic| topic.left.is_none() || known == name);
                }
                if !state.names.contains_key(name) && state.names.len() >= MAX_NAMES {
                    return Err(full(MAX_NAMES, "watched locks in all"));
                }
                let since = state.last_id;
                let topic = state.names.entry(name.clone()).or_insert_with(|| Topic {
                    changes: broadcast::Sender::new(BUFFERED_OF_NAME),
                    watchers: 0,
                    since,
                    left: None,
                    slots: 1,
                    line: 0,
                });
                topic.watchers += 1;
                topic.left = None;
                let since = topic.since;
                let changes = topic.changes.subscribe();
                (changes, has_all_since.filter(|last| *last >= since))
            }
            Watched::Prefix(prefix) => {
                if !state.prefixes.contains_key(prefix) && state.prefixes.len() >= MAX_PREFIXES {
                    return Err(full(MAX_PREFIXES, "watched prefixes in all"));
                }
                (state.all.subscribe(), None)
            }
        };
        let missed = missed.map(|last| {
            let since = state.recent.iter().filter(|change| change.id > last);
            since.filter(|change| watched.covers(&change.name)).cloned().collect()
        });
        drop(state);
        self.is_active.store(true, Ordering::Release);
        self.wake.notify_one();
        Ok(Watcher {
            changes,
            missed,
            watches: self.clone(),
            watched,
            is_polled: false,
            _permit: permit,
        })
    }

    /// Counts a stream of events. One client may have as many as are still free.
    pub(super) fn begin_stream(&self, client: &Client) -> Result<StreamPermit, TooManyWatchers> {
        let full = |max, what| TooManyWatchers { max, what };
        let free = MAX_STREAMS.saturating_sub(self.streams.count());
        let of_client = client.watching.take(free).ok_or(full(free, "of one client"))?;
        let permit = self.streams.take(MAX_STREAMS).ok_or(full(MAX_STREAMS, "in all"))?;
        Ok(StreamPermit(of_client, permit))
    }

    /// The id of a change as a watcher sends it back.
    fn id_text(&self, id: u64) -> String {
        format!("{:x}-{id}", self.process)
    }

    fn own_id(&self, text: &str) -> Option<u64> {
        let (process, id) = text.split_once('-')?;
        (u32::from_str_radix(process, 16) == Ok(self.process)).then(|| id.parse().ok())?
    }
}

/// The place of one watcher. Dropping it ends the watching.
#[derive(Debug)]
pub struct Watcher {
    changes: broadcast::Receiver<Arc<Change>>,
    /// The changes since the last event of an earlier stream. `None`: they are not known, and the
    /// watcher needs a snapshot.
    missed: Option<Vec<Arc<Change>>>,
    watches: Arc<Watches>,
    watched: Watched,
    /// Whether a watcher of a prefix counts for the poller.
    is_polled: bool,
    _permit: StreamPermit,
}

/// What a watcher gets next.
#[derive(Debug)]
pub enum Next {
    Change(Arc<Change>),
    /// So many changes were lost, because the watcher read too slowly.
    Lagged(u64),
}

impl Watcher {
    /// The changes since the last event that the client has got. `None` when they are not known.
    pub fn take_missed(&mut self) -> Option<Vec<Arc<Change>>> {
        self.missed.take()
    }

    /// Tells what a snapshot has shown. From now on, changes are told relative to it.
    pub(super) fn snapshot_made(
        &mut self,
        locks: impl IntoIterator<Item = (LockName, u16, Option<HeldBy>)>,
    ) {
        let mut state = self.watches.state.lock();
        for (name, slot, by) in locks {
            state.see(&name, slot, by.map_or_else(Seen::free, Seen::of), None);
        }
        if let Watched::Prefix(prefix) = &self.watched
            && !self.is_polled
        {
            self.is_polled = true;
            *state.prefixes.entry(prefix.clone()).or_default() += 1;
        }
    }

    /// Waits for the next change of what is watched.
    pub async fn next(&mut self) -> Next {
        loop {
            let next = match self.changes.recv().await {
                Err(broadcast::error::RecvError::Lagged(missed)) => Next::Lagged(missed),
                Ok(change) => Next::Change(change),
                // The sender lives as long as this watcher.
                Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
            };
            if self.concerns(&next) {
                return next;
            }
        }
    }

    /// The next change, if it is there already.
    pub fn try_next(&mut self) -> Option<Next> {
        loop {
            let next = match self.changes.try_recv() {
                Err(broadcast::error::TryRecvError::Lagged(missed)) => Next::Lagged(missed),
                Ok(change) => Next::Change(change),
                Err(_) => return None,
            };
            if self.concerns(&next) {
                return Some(next);
            }
        }
    }

    fn concerns(&self, next: &Next) -> bool {
        match next {
            Next::Change(change) => self.watched.covers(&change.name),
            Next::Lagged(_) => true,
        }
    }

    /// What is watched.
    pub fn watched(&self) -> &Watched {
        &self.watched
    }

    /// Drops the changes that wait for this watcher, because a snapshot will show their results.
    pub(super) fn skip_to_now(&mut self) {
        self.changes = self.changes.resubscribe();
    }

    /// The id of a change as a client sends it back.
    pub fn id_text(&self, id: u64) -> String {
        self.watches.id_text(id)
    }

    /// The id of the last change of this process.
    pub fn last_id(&self) -> String {
        let id = self.watches.state.lock().last_id;
        self.id_text(id)
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut state = self.watches.state.lock();
        match &self.watched {
            Watched::Lock(name) => {
                if let Some(topic) = state.names.get_mut(name) {
                    topic.watchers -= 1;
                    topic.left = (topic.watchers == 0).then(Instant::now);
                }
            }
            Watched::Prefix(prefix) if self.is_polled => {
                if let Some(count) = state.prefixes.get_mut(prefix) {
                    *count -= 1;
                    if *count == 0 {
                        state.prefixes.remove(prefix);
                    }
                }
            }
            Watched::Prefix(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> LockName {
        text.parse().expect("a name")
    }

    fn watching(watches: &Arc<Watches>, watched: Watched) -> Watcher {
        let mut watcher = watches.watch(&Client::default(), watched, None).expect("a place");
        watcher.snapshot_made([]);
        watcher
    }

    fn held(watches: &Watches, lock: &LockName, fencing: u64) {
        let mut by = HeldBy::default();
        by.fencing = FencingToken::new(1_763_725_165_123_456 + fencing).ok();
        watches.held(lock, SlotSet::FIRST, &by);
    }

    fn told(watcher: &mut Watcher) -> Vec<String> {
        let text = |next| match next {
            Next::Change(change) => {
                let kind = match &change.event {
                    Event::Held(_) => "held",
                    Event::Released(_) => "released",
                    other => panic!("{other:?}"),
                };
                format!("{kind} {} {}", change.name, change.slot)
            }
            Next::Lagged(missed) => format!("lagged {missed}"),
        };
        std::iter::from_fn(|| watcher.try_next()).map(text).collect()
    }

    #[test]
    fn a_slow_watcher_loses_the_oldest_changes_and_is_told_how_many() {
        let watches = Arc::new(Watches::default());
        let lock = name("a");
        let mut slow = watching(&watches, Watched::Lock(lock.clone()));
        let mut quick = watching(&watches, Watched::Lock(lock.clone()));
        let rounds = BUFFERED_OF_NAME as u64;
        for round in 0..rounds {
            held(&watches, &lock, round);
            watches.ended(&lock, SlotSet::FIRST, false);
            assert_eq!(told(&mut quick), ["held a 1", "released a 1"]);
        }
        let late = told(&mut slow);
        assert_eq!(late[0], format!("lagged {rounds}"));
        assert_eq!(late.len() as u64, 1 + rounds);
    }

    #[test]
    fn a_watcher_is_told_only_what_it_follows() {
        let watches = Arc::new(Watches::default());
        let [one, two, other] = ["jobs/1", "jobs/2", "x"].map(name);
        let mut of_one = watching(&watches, Watched::Lock(one.clone()));
        let mut of_jobs = watching(&watches, Watched::Prefix("jobs/".into()));
        for lock in [&one, &two] {
            assert!(watches.follows(lock));
            held(&watches, lock, 1);
        }
        assert!(!watches.follows(&other));
        watches.ended(&two, SlotSet::FIRST, false);
        assert_eq!(told(&mut of_one), ["held jobs/1 1"]);
        let of_jobs = told(&mut of_jobs);
        assert_eq!(of_jobs, ["held jobs/1 1", "held jobs/2 1", "released jobs/2 1"]);
    }

    #[test]
    fn slots_are_told_one_by_one() {
        let watches = Arc::new(Watches::default());
        let lock = name("pool");
        let mut watcher = watching(&watches, Watched::Lock(lock.clone()));
        let slots = SlotSet::new([1, 3]).expect("slots");
        let mut by = HeldBy::default();
        by.fencing = FencingToken::new(1_763_725_165_123_456).ok();
        watches.held(&lock, slots, &by);
        watches.ended(&lock, SlotSet::new([3]).expect("a slot"), false);
        assert_eq!(told(&mut watcher), ["held pool 1", "held pool 3", "released pool 3"]);
    }

    #[test]
    fn watched_locks_prefixes_and_streams_are_bounded() {
        let watches = Arc::new(Watches::default());
        let client = Client::default();
        let watch = |watched| watches.watch(&client, watched, None);
        let locks: Vec<_> = (0..MAX_NAMES)
            .map(|number| watch(Watched::Lock(name(&format!("a{number}")))).expect("a place"))
            .collect();
        let refused = watch(Watched::Lock(name("b"))).map(drop);
        assert_eq!(refused, Err(TooManyWatchers { max: MAX_NAMES, what: "watched locks in all" }));
        // Another watcher of the same lock costs no reading.
        assert!(watch(Watched::Lock(name("a0"))).is_ok());
        drop(locks);
        let mut prefixes = Vec::new();
        for number in 0..MAX_PREFIXES {
            let mut watcher = watch(Watched::Prefix(format!("p{number}"))).expect("a place");
            watcher.snapshot_made([]);
            prefixes.push(watcher);
        }
        let refused = watch(Watched::Prefix("q".into())).map(drop);
        let what = "watched prefixes in all";
        assert_eq!(refused, Err(TooManyWatchers { max: MAX_PREFIXES, what }));
        drop(prefixes);
        assert_eq!((watches.count(), client.watching.count()), (0, 0));
        // One client may have as many streams as are still free.
        let streams = std::iter::from_fn(|| watches.begin_stream(&client).ok());
        let streams: Vec<_> = streams.collect();
        assert_eq!(streams.len(), MAX_STREAMS / 2);
        assert!(watches.begin_stream(&Client::default()).is_ok());
    }

    #[test]
    fn a_lock_lingers_after_its_last_watcher_and_then_is_forgotten() {
        let watches = Arc::new(Watches::default());
        let lock = name("a");
        let watcher = watching(&watches, Watched::Lock(lock.clone()));
        held(&watches, &lock, 1);
        drop(watcher);
        watches.state.lock().forget_unwatched();
        assert!(watches.follows(&lock));
        let mut state = watches.state.lock();
        let left = state.names.get_mut(&lock).and_then(|topic| topic.left.as_mut());
        *left.expect("no watcher is left") -= LINGERS;
        state.forget_unwatched();
        assert!(state.names.is_empty() && state.seen.is_empty());
    }
}
