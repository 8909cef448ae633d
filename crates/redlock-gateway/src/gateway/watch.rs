//! Publishes changes of locks to watchers.
//!
//! Changes by this gateway are published at once. Changes by other gateways are found by polling
//! ([`poll`]), about a second later. While nobody watches, a request reads only one flag here.
//!
//! A watcher follows one lock, or all locks whose names begin with a prefix. The gateway stores each
//! change once: all receivers share a ring buffer. A watcher that reads too slowly loses the oldest
//! changes. It learns how many, and gets a new snapshot. When the memory for unread changes is full,
//! one slow watcher of a lock makes all watchers of that lock lose changes. Watchers of prefixes share
//! one buffer, so one slow watcher makes all of them lose changes.
//!
//! This module does not know who may see what. It stores the text of a change for the routes, and
//! does not know how they write it.

mod events;
pub(super) mod poll;
pub(super) mod seen;
mod state;
mod turns;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use redlock_core::{FencingToken, HeldBy, LockName, SlotSet};
use tokio::sync::{Notify, broadcast};

pub use self::events::{Change, Event, Watched};
use self::events::{KeptBytes, Sent};
use self::seen::{End, Seen, SeenLocks};
use self::state::{BUFFERED_OF_ALL, BUFFERED_OF_NAME, State, Topic};
use self::turns::Turns;
use crate::overload::clients::{Client, Counter, NamePermit, Permit};
use crate::overload::long_lived::LongLived;
use crate::overload::shares::{Full, Resource, WATCHED_LOCKS, WATCHED_PREFIXES};

/// What all watchers together may take.
#[derive(Debug)]
pub(super) struct WatchLimits {
    /// The connections of streams, and of waiters.
    pub(super) long_lived: Arc<LongLived>,
    /// The memory for changes that slow streams have not taken yet.
    pub(super) event_bytes: usize,
    /// The memory for what was last seen of watched locks.
    pub(super) seen_bytes: usize,
}

/// Unlimited.
impl Default for WatchLimits {
    fn default() -> Self {
        const NONE: usize = usize::MAX;
        let long_lived = Arc::default();
        Self { long_lived, event_bytes: NONE, seen_bytes: NONE }
    }
}

/// The permits of one event stream; returned when dropped.
#[derive(Debug)]
pub struct StreamPermit {
    _long_lived: Permit,
    _of_client: Permit,
    _of_all: Permit,
}

/// Everything that is watched at this gateway.
#[derive(Debug)]
pub(super) struct Watches {
    /// Whether anything is watched.
    is_active: AtomicBool,
    /// Open streams of events.
    streams: Counter,
    long_lived: Arc<LongLived>,
    state: Mutex<State>,
    /// Tells the poller of the first watcher.
    begun: Notify,
    /// Tells the poller that a queue has changed, or that a lock is to be read soon.
    wake: Notify,
    /// Lets requests run between deliveries.
    turns: Turns,
    /// A random number of this process. It distinguishes event ids of this process from those of
    /// others.
    process: u32,
}

/// Publishes a queue for a lock when a waiter comes, and when the waiter goes.
#[derive(Debug)]
pub(super) struct LineChange<'a> {
    watches: &'a Watches,
    /// `None` if the lock is not watched when the waiter comes. The poller then finds out.
    name: Option<LockName>,
}

impl<'a> LineChange<'a> {
    pub(super) fn begin(watches: &'a Watches, name: &LockName) -> Self {
        let name = watches.follows(name).then(|| name.clone());
        name.iter().for_each(|name| watches.line_changed(name));
        Self { watches, name }
    }
}

impl Drop for LineChange<'_> {
    fn drop(&mut self) {
        self.name.iter().for_each(|name| self.watches.line_changed(name));
    }
}

impl Default for Watches {
    fn default() -> Self {
        Self::new(WatchLimits::default())
    }
}

impl Watches {
    pub(super) fn new(limits: WatchLimits) -> Self {
        let WatchLimits { long_lived, event_bytes, seen_bytes } = limits;
        Self {
            is_active: AtomicBool::new(false),
            streams: Counter::default(),
            long_lived,
            state: Mutex::new(State {
                last_id: 0,
                names: HashMap::new(),
                prefixes: BTreeMap::new(),
                all: broadcast::Sender::new(BUFFERED_OF_ALL),
                recent: VecDeque::new(),
                kept: KeptBytes::new(event_bytes),
                seen: SeenLocks::new(seen_bytes),
                is_incomplete: false,
                lines: HashSet::new(),
                to_read: HashSet::new(),
            }),
            begun: Notify::new(),
            wake: Notify::new(),
            turns: Turns::default(),
            process: fastrand::u32(1..),
        }
    }

    /// Whether anything is watched.
    pub(super) fn is_active(&self) -> bool {
        self.is_active.load(Ordering::Acquire)
    }

    /// Whether somebody watches this lock. Cheap while nobody watches anything.
    pub(super) fn follows(&self, name: &LockName) -> bool {
        self.is_active() && self.state.lock().is_watched(name)
    }

    pub(super) fn count(&self) -> usize {
        self.streams.count()
    }

    /// Publishes that these slots were acquired. If a repeated request got its own grant again, only
    /// the extension is published.
    pub(super) fn held(&self, name: &LockName, slots: SlotSet, by: &HeldBy) {
        let mut state = self.state.lock();
        if !state.is_watched(name) {
            return;
        }
        for slot in slots.iter() {
            let stored = name.of_slot(slot);
            // To the watchers of a prefix, a lock without a record was free.
            state.assume_free(stored.clone(), Instant::now());
            // The next holder may have been recorded first.
            let before = state.seen.get(&stored).and_then(|before| before.by.as_ref());
            let is_late = before.is_some_and(|before| before.fencing > by.fencing);
            if !is_late {
                state.see(name, slot, Seen::of(by.clone()), None);
            }
        }
    }

    /// Publishes an extension of these slots. `life` is their time to live from now.
    pub(super) fn extended(
        &self,
        name: &LockName,
        slots: SlotSet,
        fencing: FencingToken,
        life: Duration,
    ) {
        self.of_hold(name, slots, Some(fencing), |state, slot, mut by| {
            by.expires_in = Some(life);
            state.see(name, slot, Seen::of(by), None);
        });
    }

    /// Publishes that the holds of these slots with this fencing token ended. The next holder may
    /// have been recorded first; its hold stays.
    pub(super) fn ended(
        &self,
        name: &LockName,
        slots: SlotSet,
        fencing: Option<FencingToken>,
        is_forced: bool,
    ) {
        let end = if is_forced { End::Forced } else { End::Released };
        self.of_hold(name, slots, fencing, |state, slot, _| {
            state.see(name, slot, Seen::free(), Some(end));
        });
    }

    /// Records that an operator is about to end this hold. The next holder may be recorded before
    /// the end is.
    pub(super) fn will_be_forced(
        &self,
        name: &LockName,
        slots: SlotSet,
        fencing: Option<FencingToken>,
    ) {
        self.of_hold(name, slots, fencing, |state, slot, _| {
            state.seen.announce(&name.of_slot(slot), End::Forced);
        });
    }

    /// Calls `change` for each of these slots that was last seen under this hold.
    fn of_hold(
        &self,
        name: &LockName,
        slots: SlotSet,
        fencing: Option<FencingToken>,
        change: impl Fn(&mut State, u16, HeldBy),
    ) {
        if !self.is_active() {
            return;
        }
        let mut state = self.state.lock();
        if !state.is_watched(name) {
            return;
        }
        for slot in slots.iter() {
            let seen = state.seen.get(&name.of_slot(slot)).and_then(|seen| seen.by.clone());
            if let Some(by) = seen.filter(|by| by.fencing == fencing) {
                change(&mut state, slot, by);
            }
        }
    }

    /// Requests an early read of this lock. Used when this gateway changed the lock without knowing
    /// the result.
    pub(super) fn read_soon(&self, name: &LockName) {
        if self.is_active() {
            let mut state = self.state.lock();
            if state.is_watched(name) && state.to_read.insert(name.clone()) {
                self.wake.notify_one();
            }
        }
    }

    /// Publishes the queue for this lock soon.
    pub(super) fn line_changed(&self, name: &LockName) {
        if self.is_active() {
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
    /// [`Full`].
    pub(super) fn watch(
        self: &Arc<Self>,
        client: &Client,
        watched: Watched,
        last: Option<&str>,
    ) -> Result<Watcher, Full> {
        let permit = self.begin_stream(client)?;
        let mut state = self.state.lock();
        let (mut share, mut prefix_share) = (None, None);
        let last = last.and_then(|id| self.own_id(id)).filter(|id| *id <= state.last_id);
        let has_all_since = last.filter(|last| {
            let oldest = state.recent.front().map_or(state.last_id, |change| change.id - 1);
            *last >= oldest
        });
        let (changes, missed) = match &watched {
            Watched::Lock(name) => {
                if state.names.len() >= WATCHED_LOCKS {
                    // Locks without watchers make room.
                    state.names.retain(|known, topic| topic.left.is_none() || known == name);
                }
                let is_new = !state.names.contains_key(name);
                if is_new {
                    // An id from before this topic must not look as if nothing had happened since.
                    state.last_id += 1;
                }
                let free = WATCHED_LOCKS.saturating_sub(state.names.len());
                if is_new && free == 0 {
                    return Err(Full::for_all(Resource::WatchedLocks, WATCHED_LOCKS));
                }
                // One client may watch as many locks as are still free. Another watcher of a
                // watched lock costs no reading.
                let limit = if is_new { free } else { usize::MAX };
                let of_client = client.watched_locks.take(name, limit);
                share = Some(of_client.ok_or(Full::for_one(Resource::WatchedLocks, free))?);
                let since = state.last_id;
                let topic = state.names.entry(name.clone()).or_insert_with(|| Topic {
                    changes: broadcast::Sender::new(BUFFERED_OF_NAME),
                    watchers: 0,
                    since,
                    left: None,
                    slots: 1,
                    line: 0,
                    is_incomplete: false,
                });
                topic.watchers += 1;
                topic.left = None;
                let since = topic.since;
                let changes = topic.changes.subscribe();
                let has_all_since = has_all_since.filter(|last| *last >= since);
                if has_all_since.is_some() {
                    state.lines.insert(name.clone());
                }
                (changes, has_all_since)
            }
            Watched::Prefix(prefix) => {
                let is_new = !state.prefixes.contains_key(prefix);
                let free = WATCHED_PREFIXES.saturating_sub(state.prefixes.len());
                if is_new && free == 0 {
                    return Err(Full::for_all(Resource::WatchedPrefixes, WATCHED_PREFIXES));
                }
                let limit = if is_new { free } else { usize::MAX };
                let of_client = client.watched_prefixes.take(prefix, limit);
                let refused = Full::for_one(Resource::WatchedPrefixes, free);
                prefix_share = Some(of_client.ok_or(refused)?);
                state.prefixes.entry(prefix.clone()).or_default().watchers += 1;
                (state.all.subscribe(), None)
            }
        };
        let missed = missed.map(|last| {
            let since = state.recent.iter().filter(|change| change.id > last);
            since.filter(|change| watched.covers(&change.name)).cloned().collect()
        });
        // The poller changes the flag under the same lock.
        self.is_active.store(true, Ordering::Release);
        drop(state);
        self.begun.notify_one();
        self.wake.notify_one();
        Ok(Watcher {
            changes,
            received: None,
            missed,
            watches: self.clone(),
            watched,
            has_snapshot: false,
            _permit: permit,
            _share: share,
            _prefix_share: prefix_share,
        })
    }

    /// Counts an event stream. One client may open as many as are still free.
    pub(super) fn begin_stream(&self, client: &Client) -> Result<StreamPermit, Full> {
        let all = Full::for_all(Resource::Streams, self.long_lived.of_streams());
        let _long_lived = self.long_lived.begin_stream().ok_or(all)?;
        let free = self.long_lived.free() + 1;
        let _of_client =
            client.watching.take(free).ok_or(Full::for_one(Resource::Streams, free))?;
        let _of_all = self.streams.take(usize::MAX).ok_or(all)?;
        Ok(StreamPermit { _long_lived, _of_client, _of_all })
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
    changes: broadcast::Receiver<Sent>,
    /// A received change that waits for its turn.
    received: Option<Next>,
    /// The changes since the last event of an earlier stream. `None`: they are not known, and the
    /// watcher needs a snapshot.
    missed: Option<Vec<Arc<Change>>>,
    watches: Arc<Watches>,
    watched: Watched,
    /// Whether this watcher counts in [`WatchedPrefix::with_snapshot`].
    has_snapshot: bool,
    _permit: StreamPermit,
    /// The client's share of the locks that are watched by name.
    _share: Option<NamePermit>,
    _prefix_share: Option<NamePermit<String>>,
}

/// What a watcher gets next.
#[derive(Debug)]
pub enum Next {
    Change(Arc<Change>),
    /// How many changes were lost, because this watcher or another one of the same buffer read
    /// too slowly.
    Lagged(u64),
}

impl Watcher {
    /// The changes since the last event that the client has got. `None` when they are not known.
    pub fn take_missed(&mut self) -> Option<Vec<Arc<Change>>> {
        self.missed.take()
    }

    /// How much memory the locks of a snapshot may take.
    pub(super) fn most_bytes(&self) -> usize {
        self.watches.state.lock().seen.limit()
    }

    /// Records the content of a snapshot whose reading `began` at a time. Later changes are relative
    /// to the snapshot. Returns false if this gateway cannot follow all locks.
    pub(super) fn snapshot_made(
        &mut self,
        began: Instant,
        locks: impl IntoIterator<Item = (LockName, u16, Seen)>,
    ) -> bool {
        let mut state = self.watches.state.lock();
        for (name, slot, seen) in locks {
            state.see_polled(&name, slot, seen, began);
        }
        if let Watched::Prefix(prefix) = &self.watched
            && !std::mem::replace(&mut self.has_snapshot, true)
        {
            state.prefixes.entry(prefix.clone()).or_default().with_snapshot += 1;
        }
        !state.is_incomplete
    }

    /// Waits for the next change of what is watched, and for a turn to deliver it. Nothing is lost
    /// if the call is cancelled.
    pub async fn next(&mut self) -> Next {
        loop {
            while self.received.is_none() {
                let next = match self.changes.recv().await {
                    Ok(sent) => self.next_of(sent),
                    Err(broadcast::error::RecvError::Lagged(missed)) => Next::Lagged(missed),
                    // The sender lives as long as this watcher.
                    Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
                };
                self.received = self.concerns(&next).then_some(next);
            }
            self.watches.turns.next().await;
            if let Some(next) = self.received.take() {
                return next;
            }
        }
    }

    /// The next change, if it is there already.
    pub fn try_next(&mut self) -> Option<Next> {
        if let Some(next) = self.received.take() {
            return Some(next);
        }
        loop {
            let next = match self.changes.try_recv() {
                Ok(sent) => self.next_of(sent),
                Err(broadcast::error::TryRecvError::Lagged(missed)) => Next::Lagged(missed),
                Err(_) => return None,
            };
            if self.concerns(&next) {
                return Some(next);
            }
        }
    }

    fn next_of(&mut self, sent: Sent) -> Next {
        match sent {
            Sent::Change(change) => Next::Change(change),
            Sent::Dropped => {
                // Nothing that follows helps before the next snapshot.
                let missed = 1 + self.changes.len() as u64;
                self.changes = self.changes.resubscribe();
                Next::Lagged(missed)
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

    /// Discards buffered changes. The next snapshot includes them.
    pub fn skip_to_now(&mut self) {
        self.received = None;
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
            Watched::Prefix(prefix) => {
                if let Some(watched) = state.prefixes.get_mut(prefix) {
                    watched.watchers -= 1;
                    watched.with_snapshot -= usize::from(self.has_snapshot);
                    if watched.watchers == 0 {
                        state.prefixes.remove(prefix);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::state::TOPIC_LINGER;
    use super::*;

    fn name(text: &str) -> LockName {
        text.parse().expect("a name")
    }

    fn watching(watches: &Arc<Watches>, watched: Watched) -> Watcher {
        let mut watcher = watches.watch(&Client::default(), watched, None).expect("a place");
        watcher.snapshot_made(Instant::now(), []);
        watcher
    }

    fn fencing(number: u64) -> Option<FencingToken> {
        FencingToken::new(1_763_725_165_123_456 + number).ok()
    }

    fn held(watches: &Watches, lock: &LockName, number: u64) {
        let mut by = HeldBy::default();
        by.fencing = fencing(number);
        watches.held(lock, SlotSet::FIRST, &by);
    }

    fn told(watcher: &mut Watcher) -> Vec<String> {
        let text = |next| match next {
            Next::Change(change) => {
                let kind = match &change.event {
                    Event::Held(_) => "held",
                    Event::Released(_) => "released",
                    Event::Forced(_) => "forced",
                    other => panic!("{other:?}"),
                };
                format!("{kind} {} {}", change.name, change.slot)
            }
            Next::Lagged(missed) => format!("lagged {missed}"),
        };
        std::iter::from_fn(|| watcher.try_next()).map(text).collect()
    }

    #[test]
    fn slow_watcher_learns_how_many_changes_it_lost() {
        let watches = Arc::new(Watches::default());
        let lock = name("a");
        let mut slow = watching(&watches, Watched::Lock(lock.clone()));
        let mut quick = watching(&watches, Watched::Lock(lock.clone()));
        let rounds = BUFFERED_OF_NAME as u64;
        for round in 0..rounds {
            held(&watches, &lock, round);
            watches.ended(&lock, SlotSet::FIRST, fencing(round), false);
            assert_eq!(told(&mut quick), ["held a 1", "released a 1"]);
        }
        let late = told(&mut slow);
        assert_eq!(late[0], format!("lagged {rounds}"));
        assert_eq!(late.len() as u64, 1 + rounds);
    }

    #[test]
    fn unread_changes_take_bounded_memory_and_disturb_no_other_lock() {
        const LIMIT: usize = 100_000;
        let limits = WatchLimits { event_bytes: LIMIT, ..WatchLimits::default() };
        let watches = Arc::new(Watches::new(limits));
        let (a, b) = (name("a"), name("b"));
        let slow = watching(&watches, Watched::Lock(a.clone()));
        let mut of_a = watching(&watches, Watched::Lock(a.clone()));
        let mut of_b = watching(&watches, Watched::Lock(b.clone()));
        let (mut lagged, mut most) = (0, 0);
        for round in 0..200 {
            for lock in [&a, &b] {
                let mut by = HeldBy::default();
                (by.fencing, by.info) = (fencing(round), vec![b'x'; 4_096].into());
                watches.held(lock, SlotSet::FIRST, &by);
                watches.ended(lock, SlotSet::FIRST, fencing(round), false);
                most = most.max(watches.state.lock().kept.count());
            }
            assert_eq!(told(&mut of_b), ["held b 1", "released b 1"], "round {round}");
            lagged += usize::from(told(&mut of_a).iter().any(|text| text.starts_with("lagged")));
        }
        assert!(most < 2 * LIMIT, "{most} bytes");
        assert!(lagged > 0, "the lock with a slow stream loses changes");
        drop((slow, of_a, of_b));
        watches.state.lock().recent.clear();
        assert_eq!(watches.state.lock().kept.count(), 0, "all of it is freed");
    }

    #[test]
    fn watcher_gets_only_what_it_follows() {
        let watches = Arc::new(Watches::default());
        let [one, two, other] = ["jobs/1", "jobs/2", "x"].map(name);
        let mut of_one = watching(&watches, Watched::Lock(one.clone()));
        let mut of_jobs = watching(&watches, Watched::Prefix("jobs/".into()));
        for lock in [&one, &two] {
            assert!(watches.follows(lock));
            held(&watches, lock, 1);
        }
        assert!(!watches.follows(&other));
        watches.ended(&two, SlotSet::FIRST, fencing(1), false);
        assert_eq!(told(&mut of_one), ["held jobs/1 1"]);
        let of_jobs = told(&mut of_jobs);
        assert_eq!(of_jobs, ["held jobs/1 1", "held jobs/2 1", "released jobs/2 1"]);
    }

    #[test]
    fn each_slot_has_its_own_event() {
        let watches = Arc::new(Watches::default());
        let lock = name("pool");
        let mut watcher = watching(&watches, Watched::Lock(lock.clone()));
        let slots = SlotSet::new([1, 3]).expect("slots");
        let mut by = HeldBy::default();
        by.fencing = fencing(0);
        watches.held(&lock, slots, &by);
        watches.ended(&lock, SlotSet::new([3]).expect("a slot"), fencing(0), false);
        assert_eq!(told(&mut watcher), ["held pool 1", "held pool 3", "released pool 3"]);
    }

    #[test]
    fn late_end_of_a_hold_does_not_end_the_next_one() {
        let watches = Arc::new(Watches::default());
        let lock = name("a");
        let mut watcher = watching(&watches, Watched::Lock(lock.clone()));
        held(&watches, &lock, 1);
        // A release hands the lock over: the next holder may be recorded first.
        held(&watches, &lock, 2);
        watches.ended(&lock, SlotSet::FIRST, fencing(1), false);
        held(&watches, &lock, 1);
        assert_eq!(told(&mut watcher), ["held a 1", "released a 1", "held a 1"]);
        watches.will_be_forced(&lock, SlotSet::FIRST, fencing(2));
        held(&watches, &lock, 3);
        watches.ended(&lock, SlotSet::FIRST, fencing(2), true);
        assert_eq!(told(&mut watcher), ["forced a 1", "held a 1"]);
    }

    #[test]
    fn change_during_a_snapshot_is_newer_than_the_snapshot() {
        let watches = Arc::new(Watches::default());
        let lock = name("a");
        let mut watcher = watching(&watches, Watched::Lock(lock.clone()));
        let began = Instant::now();
        held(&watches, &lock, 1);
        watcher.snapshot_made(began, [(lock.clone(), 1, Seen::free())]);
        assert_eq!(told(&mut watcher), ["held a 1"]);
    }

    #[test]
    fn watched_locks_prefixes_and_streams_are_bounded() {
        let watches = Arc::new(Watches::default());
        let clients: Vec<_> = (0..20).map(|_| Client::default()).collect();
        let client = &clients[0];
        let watch = |client: &Client, watched| watches.watch(client, watched, None);
        let mut locks = Vec::new();
        for number in 0.. {
            let lock = Watched::Lock(name(&format!("a{number}")));
            let Some(watcher) = clients.iter().find_map(|client| watch(client, lock.clone()).ok())
            else {
                break;
            };
            locks.push(watcher);
        }
        assert_eq!(locks.len(), WATCHED_LOCKS);
        assert_eq!(client.watched_locks.count(), WATCHED_LOCKS / 2);
        let refused = watch(client, Watched::Lock(name("b"))).map(drop);
        assert_eq!(refused, Err(Full::for_all(Resource::WatchedLocks, WATCHED_LOCKS)));
        // A lock that is watched already is not one more.
        assert!(watch(&Client::default(), Watched::Lock(name("a0"))).is_ok());
        drop(locks);
        let mut prefixes = Vec::new();
        for number in 0..WATCHED_PREFIXES {
            let prefix = Watched::Prefix(format!("p{number}"));
            let watched = clients.iter().find_map(|client| watch(client, prefix.clone()).ok());
            let mut watcher = watched.expect("a place");
            watcher.snapshot_made(Instant::now(), []);
            prefixes.push(watcher);
        }
        assert_eq!(client.watched_prefixes.count(), WATCHED_PREFIXES / 2);
        let refused = watch(client, Watched::Prefix("q".into())).map(drop);
        assert_eq!(refused, Err(Full::for_all(Resource::WatchedPrefixes, WATCHED_PREFIXES)));
        drop(prefixes);
        assert_eq!((watches.count(), client.watching.count()), (0, 0));
    }

    #[test]
    fn streams_leave_places_to_other_clients_and_connections_to_short_requests() {
        let long_lived = Arc::new(LongLived::new(14, 14));
        let limits = WatchLimits { long_lived: long_lived.clone(), ..Default::default() };
        let watches = Arc::new(Watches::new(limits));
        let [one, two, three] = Default::default();
        let streams = |client: &Client| -> Vec<_> {
            std::iter::from_fn(|| watches.begin_stream(client).ok()).collect()
        };
        // One client may have as many streams as are still free.
        let of_one = streams(&one);
        let of_two = streams(&two);
        assert_eq!((of_one.len(), of_two.len(), streams(&three).len()), (7, 4, 2));
        // Waiters take connections from the same part.
        let mut waiters: Vec<_> = std::iter::from_fn(|| long_lived.begin_wait().ok()).collect();
        assert_eq!(waiters.len(), 14 - 7 - 4);
        assert!(watches.begin_stream(&three).is_err());
        waiters.pop();
        assert!(watches.begin_stream(&three).is_ok());
        drop((of_one, of_two, waiters));
        assert_eq!((watches.count(), long_lived.free(), one.watching.count()), (0, 14, 0));
    }

    #[test]
    fn locks_of_a_prefix_take_bounded_memory_and_watchers_learn_it() {
        const LIMIT: usize = 100_000;
        let limits = WatchLimits { seen_bytes: LIMIT, ..WatchLimits::default() };
        let watches = Arc::new(Watches::new(limits));
        let mut of_jobs = watching(&watches, Watched::Prefix("jobs/".into()));
        let mut of_one = watching(&watches, Watched::Lock(name("jobs/0")));
        let mut by = HeldBy::default();
        (by.fencing, by.info) = (fencing(1), vec![b'x'; 2_000].into());
        let mut lagged = 0;
        let locks: Vec<_> = (0..1_000).map(|number| name(&format!("jobs/{number}"))).collect();
        for lock in &locks {
            watches.held(lock, SlotSet::FIRST, &by);
            lagged += told(&mut of_jobs).iter().filter(|text| text.starts_with("lagged")).count();
        }
        let follows_all = of_jobs.snapshot_made(Instant::now(), []);
        assert_eq!((lagged, follows_all), (1, false), "told once, and shown in the next snapshot");
        let (bytes, count) = watches.state.lock().seen.use_now();
        assert!((LIMIT / 2..=LIMIT).contains(&bytes), "{bytes} bytes");
        assert!(count > 2 * LIMIT / 2_000, "{count} locks, without their texts");
        // What is watched by name is followed still.
        watches.ended(&locks[0], SlotSet::FIRST, fencing(1), false);
        watches.held(&locks[0], SlotSet::FIRST, &by);
        assert_eq!(told(&mut of_one), ["held jobs/0 1", "released jobs/0 1", "held jobs/0 1"]);
        for lock in &locks {
            watches.ended(lock, SlotSet::FIRST, fencing(1), false);
        }
        told(&mut of_jobs);
        watches.state.lock().forget_free();
        assert_eq!(told(&mut of_jobs), ["lagged 1"], "a complete snapshot follows");
        assert!(of_jobs.snapshot_made(Instant::now(), []), "there is room again");
        drop((of_jobs, of_one));
        watches.state.lock().forget_all();
        assert_eq!(watches.state.lock().seen.use_now(), (0, 0));
    }

    #[test]
    fn topic_expires_after_its_linger_time() {
        let watches = Arc::new(Watches::default());
        let lock = name("a");
        let watcher = watching(&watches, Watched::Lock(lock.clone()));
        held(&watches, &lock, 1);
        drop(watcher);
        watches.state.lock().forget_unwatched();
        assert!(watches.follows(&lock));
        let mut state = watches.state.lock();
        let left = state.names.get_mut(&lock).and_then(|topic| topic.left.as_mut());
        *left.expect("no watcher is left") -= TOPIC_LINGER;
        state.forget_unwatched();
        assert_eq!((state.names.len(), state.seen.use_now()), (0, (0, 0)));
    }
}
