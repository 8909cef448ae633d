//! What is watched, and what was last seen of it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use redlock_core::{LockName, Slots};
use tokio::sync::broadcast;

use super::events::{Change, Event, KeptBytes, Sent};
use super::seen::{self, End, Seen, SeenLocks};

/// Limit on the locks in a snapshot, and on those that a poll lists.
pub(super) const MAX_LISTED: usize = 10_000;
/// How many changes of one lock are buffered for a slow watcher. One release may end the holds of all
/// slots, and one grant may begin as many.
pub(super) const BUFFERED_OF_NAME: usize = 2 * Slots::MAX as usize;
/// How many changes, over all locks, are buffered for a slow watcher of a prefix. A listing may find
/// as many changes at once as it has locks.
pub(super) const BUFFERED_OF_ALL: usize = 16_384;
/// How many unread changes the streams of a lock may have, once the memory for changes is used up.
const UNREAD_WHEN_FULL: usize = 1;
/// How many changes are kept for watchers that reconnect.
pub(super) const RECENT: usize = 1_024;
/// How long a lock is followed after its last watcher left. A watcher that reconnects within this
/// time misses nothing.
pub(super) const TOPIC_LINGER: Duration = Duration::from_secs(30);
const _: () = assert!(BUFFERED_OF_ALL > MAX_LISTED);
/// All slots of a lock are read in one of this many polls. Another gateway may use slots that were
/// not seen.
const ALL_SLOTS_EVERY: usize = 5;
/// Time between two polls.
pub(super) const INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct State {
    pub(super) last_id: u64,
    pub(super) names: HashMap<LockName, Topic>,
    pub(super) prefixes: BTreeMap<String, WatchedPrefix>,
    /// Changes of all locks, for the watchers of prefixes.
    pub(super) all: broadcast::Sender<Sent>,
    pub(super) recent: VecDeque<Arc<Change>>,
    pub(super) kept: KeptBytes,
    pub(super) seen: SeenLocks,
    /// Whether watchers of prefixes were told that not all locks are followed.
    pub(super) is_incomplete: bool,
    /// Locks whose line has changed.
    pub(super) lines: HashSet<LockName>,
    /// Locks to read before the next poll is due.
    pub(super) to_read: HashSet<LockName>,
}

/// The watchers of a prefix.
#[derive(Debug, Default)]
pub(super) struct WatchedPrefix {
    pub(super) watchers: usize,
    /// How many of them have their snapshot. Before that, the locks of the prefix are not listed:
    /// everything would look new.
    pub(super) with_snapshot: usize,
}

/// A lock that is watched by name.
#[derive(Debug)]
pub(super) struct Topic {
    pub(super) changes: broadcast::Sender<Sent>,
    pub(super) watchers: usize,
    /// The id of the last change before this topic began.
    pub(super) since: u64,
    /// When the last watcher left.
    pub(super) left: Option<Instant>,
    /// How many slots the lock has, as far as was seen.
    pub(super) slots: u16,
    /// The length of the line that was last told.
    pub(super) line: usize,
    /// Whether its watchers were told that not all slots are followed.
    pub(super) is_incomplete: bool,
}

impl State {
    pub(super) fn is_watched(&self, name: &LockName) -> bool {
        is_watched(&self.names, &self.prefixes, name)
    }

    pub(super) fn tell(&mut self, name: &LockName, slot: u16, event: Event) {
        self.last_id += 1;
        while self.kept.is_full() && self.recent.pop_front().is_some() {}
        let change = Change::new(self.last_id, name.clone(), slot, event, &self.kept);
        let change = Arc::new(change);
        let send = |changes: &broadcast::Sender<Sent>| {
            // Unread changes show a slow stream. Watchers of other locks by name lose nothing.
            let is_dropped = self.kept.is_full() && changes.len() > UNREAD_WHEN_FULL;
            // Sending fails only when nobody receives.
            let _ = changes.send(match is_dropped {
                true => Sent::Dropped,
                false => Sent::Change(change.clone()),
            });
        };
        if let Some(topic) = self.names.get(name) {
            send(&topic.changes);
        }
        if self.prefixes.keys().any(|prefix| name.as_str().starts_with(&**prefix)) {
            send(&self.all);
        }
        // A queue is published anew to a watcher that reconnects.
        if matches!(change.event, Event::Waiters(..)) {
            return;
        }
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(change);
    }

    /// Records the state of a slot, and publishes the difference from the last record. `end`: how the
    /// last hold ended, if that is known.
    pub(super) fn see(&mut self, name: &LockName, slot: u16, mut now: Seen, end: Option<End>) {
        let stored = name.of_slot(slot);
        let before = self.seen.get(&stored);
        let events = seen::difference(before, &now, end);
        if let Some(before) = before.filter(|before| events.is_empty() && before.is_same(&now)) {
            // Many small extensions add up, and then they are published.
            now.ends = before.ends;
            now.slack = before.slack;
            now.announced = before.announced;
        }
        if let Some(by) = &now.by
            && let Some(topic) = self.names.get_mut(name)
        {
            let of_holder = crate::info::LockMetadata::read(&by.info).slots.unwrap_or(1);
            topic.slots = topic.slots.max(of_holder).max(slot);
        }
        self.record(stored, now);
        events.into_iter().for_each(|event| self.tell(name, slot, event));
    }

    /// Records the state of a slot. Without memory for the record, this gateway no longer notices
    /// changes of the slot. Its watchers then get a new snapshot, once until there is memory again. The
    /// snapshot of a prefix says that it is incomplete.
    fn record(&mut self, stored: LockName, now: Seen) {
        let name = stored.lock_and_slot().0;
        if self.seen.record(stored, now, self.names.contains_key(&name)) {
            return;
        }
        if !self.is_incomplete {
            tracing::warn!(
                bytes = self.seen.limit(),
                "watchers no longer learn of changes of all locks, because the memory for watched locks \
                 is used up: raise --memory-budget, or watch fewer locks"
            );
            self.is_incomplete = true;
            // Sending fails only when nobody receives.
            let _ = self.all.send(Sent::Dropped);
        }
        if let Some(topic) = self.names.get_mut(&name)
            && !std::mem::replace(&mut topic.is_incomplete, true)
        {
            let _ = topic.changes.send(Sent::Dropped);
        }
    }

    /// Forgets what nobody watches any more.
    pub(super) fn forget_unwatched(&mut self) {
        self.names.retain(|_, topic| topic.left.is_none_or(|left| left.elapsed() < TOPIC_LINGER));
        let Self { names, prefixes, seen, .. } = self;
        seen.retain(|stored, _| is_watched(names, prefixes, &stored.lock_and_slot().0));
    }

    pub(super) fn has_watchers(&self) -> bool {
        !self.names.is_empty() || !self.prefixes.is_empty()
    }

    /// The locks to read in this round, and how many slots of each.
    pub(super) fn due(&self, round: usize) -> Vec<(LockName, u16)> {
        let slots = |(index, (name, topic)): (usize, (&LockName, &Topic))| {
            let reads_all = (index + round).is_multiple_of(ALL_SLOTS_EVERY);
            (name.clone(), if reads_all { Slots::MAX } else { topic.slots })
        };
        self.names.iter().enumerate().map(slots).collect()
    }

    /// The watched prefixes whose watchers have a snapshot, in order.
    pub(super) fn listed_prefixes(&self) -> Vec<String> {
        let listed = self.prefixes.iter().filter(|(_, watched)| watched.with_snapshot > 0);
        listed.map(|(prefix, _)| prefix.clone()).collect()
    }

    /// Applies the result of a poll that `began` at a time, unless the record is newer.
    pub(super) fn see_polled(&mut self, name: &LockName, slot: u16, now: Seen, began: Instant) {
        let before = self.seen.get(&name.of_slot(slot));
        // A slot above 1 that was never held needs no record.
        let is_needless = before.is_none() && now.by.is_none() && slot > 1;
        if !is_needless && before.is_none_or(|seen| seen.at <= began) {
            self.see(name, slot, now, None);
        }
    }

    /// Records that a slot without a record was free when a reading `began`.
    pub(super) fn assume_free(&mut self, stored: LockName, began: Instant) {
        if self.seen.get(&stored).is_none() {
            self.record(stored, Seen { at: began, ..Seen::free() });
        }
    }

    /// Forgets everything, when nobody watches.
    pub(super) fn forget_all(&mut self) {
        self.seen.retain(|_, _| false);
        self.is_incomplete = false;
        self.recent.clear();
        self.lines.clear();
        self.to_read.clear();
    }

    /// The locks that were held before the listing `began` and are now missing, with the largest
    /// missing slot of each.
    pub(super) fn gone(
        &self,
        began: Instant,
        is_missing: impl Fn(&LockName) -> bool,
    ) -> HashMap<LockName, u16> {
        let mut gone = HashMap::new();
        for (stored, seen) in self.seen.iter() {
            if seen.by.is_some() && seen.at < began && is_missing(stored) {
                let (name, slot) = stored.lock_and_slot();
                let largest = gone.entry(name).or_insert(slot);
                *largest = slot.max(*largest);
            }
        }
        gone
    }

    /// Ends the holds whose time is over, when no listing could show that they ended.
    pub(super) fn end_expired(&mut self) {
        let latest = Instant::now() - INTERVAL;
        let is_over = |seen: &Seen| seen.ends.is_some_and(|ends| ends < latest);
        let over = self.seen.iter().filter(|(_, seen)| seen.by.is_some() && is_over(seen));
        let over: Vec<_> = over.map(|(stored, _)| stored.lock_and_slot()).collect();
        for (name, slot) in over {
            self.see(&name, slot, Seen::free(), None);
        }
    }

    /// Forgets free locks that no topic follows. To watchers of prefixes, a lock without a record is
    /// free.
    pub(super) fn forget_free(&mut self) {
        let names = &self.names;
        self.seen.retain(|stored, seen| {
            seen.by.is_some() || names.contains_key(&stored.lock_and_slot().0)
        });
        if self.is_incomplete && self.seen.has_room() {
            self.is_incomplete = false;
            // The next snapshots are complete.
            let _ = self.all.send(Sent::Dropped);
            for topic in self.names.values_mut().filter(|topic| topic.is_incomplete) {
                topic.is_incomplete = false;
                let _ = topic.changes.send(Sent::Dropped);
            }
        }
    }
}

fn is_watched(
    names: &HashMap<LockName, Topic>,
    prefixes: &BTreeMap<String, WatchedPrefix>,
    name: &LockName,
) -> bool {
    names.contains_key(name) || prefixes.keys().any(|prefix| name.as_str().starts_with(&**prefix))
}
