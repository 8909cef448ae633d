//! The held locks, by the events so far.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use redlock_client::{LockState, LockStatus, WatchEvent};

/// The held locks with a prefix.
#[derive(Debug, Default)]
pub(super) struct Locks {
    /// By name and slot.
    holds: BTreeMap<(String, u32), Hold>,
    /// How many wait for a lock at the gateway, if anybody waits.
    waiters: HashMap<String, u64>,
    /// Whether the gateway holds back some of the locks.
    pub(super) are_more_held: bool,
}

/// A hold of a lock, or of one of its slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hold {
    pub(super) name: String,
    pub(super) slot: u32,
    /// The number of slots, if the lock has several.
    pub(super) slots: Option<u32>,
    /// `None` if another client of Redis holds the lock, or if the key may not see the holder.
    pub(super) holder: Option<String>,
    pub(super) acquired_at: Option<String>,
    pub(super) fencing_token: Option<u64>,
    /// When the hold ends unless it is extended.
    expires: Option<Instant>,
}

/// The order of the rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Sort {
    #[default]
    Name,
    TimeLeft,
}

impl Hold {
    fn of(status: &LockStatus, now: Instant) -> Self {
        let left = status.expires_in_ms.map(Duration::from_millis);
        Self {
            name: status.name.clone(),
            slot: status.slot.unwrap_or(1),
            slots: status.slots,
            holder: status.owner.clone(),
            acquired_at: status.acquired_at.clone(),
            fencing_token: status.fencing_token,
            expires: left.and_then(|left| now.checked_add(left)),
        }
    }

    /// The time until the hold ends. `None` without an end.
    pub(super) fn left(&self, now: Instant) -> Option<Duration> {
        self.expires.map(|expires| expires.saturating_duration_since(now))
    }

    fn contains(&self, text: &str) -> bool {
        let contains = |field: &str| field.to_lowercase().contains(text);
        contains(&self.name) || self.holder.as_deref().is_some_and(contains)
    }
}

impl Locks {
    pub(super) fn note(&mut self, event: &WatchEvent, now: Instant) {
        match event {
            WatchEvent::Snapshot(snapshot) => {
                *self = Self { are_more_held: !snapshot.is_complete(), ..Self::default() };
                for status in snapshot.locks().iter().filter(|it| it.state == LockState::Held) {
                    self.set(status, now);
                    self.set_waiters(&status.name, status.waiters_total.unwrap_or(0));
                }
            }
            WatchEvent::Held(status) | WatchEvent::Extended(status) => self.set(status, now),
            WatchEvent::Released(status)
            | WatchEvent::Expired(status)
            | WatchEvent::Forced(status) => {
                self.holds.remove(&(status.name.clone(), status.slot.unwrap_or(1)));
            }
            WatchEvent::Waiters(status) => {
                self.set_waiters(&status.name, status.waiters_total.unwrap_or(0));
            }
            _ => {}
        }
    }

    fn set(&mut self, status: &LockStatus, now: Instant) {
        let hold = Hold::of(status, now);
        self.holds.insert((hold.name.clone(), hold.slot), hold);
    }

    fn set_waiters(&mut self, name: &str, total: u64) {
        match total {
            0 => drop(self.waiters.remove(name)),
            total => drop(self.waiters.insert(name.to_owned(), total)),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.holds.len()
    }

    pub(super) fn waiters(&self, name: &str) -> u64 {
        self.waiters.get(name).copied().unwrap_or(0)
    }

    /// The holds whose name or holder contains a text, in order. Capitals do not matter.
    pub(super) fn rows(&self, filter: &str, sort: Sort) -> Vec<&Hold> {
        let filter = filter.to_lowercase();
        let mut rows: Vec<_> = self.holds.values().filter(|hold| hold.contains(&filter)).collect();
        if sort == Sort::TimeLeft {
            // Holds without an end come last.
            rows.sort_by_key(|hold| (hold.expires.is_none(), hold.expires));
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn held(json: Value) -> WatchEvent {
        WatchEvent::Held(from_value(json).unwrap())
    }

    fn names(rows: &[&Hold]) -> String {
        let row = |hold: &&Hold| format!("{}/{}", hold.name, hold.slot);
        rows.iter().map(row).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn rows_follow_the_events() {
        let now = Instant::now();
        let mut locks = Locks::default();
        let lock = |name, left| json!({ "name": name, "state": "held", "expires_in_ms": left });
        locks.note(&held(lock("b", 9_000)), now);
        locks.note(&held(json!({ "name": "a", "state": "held", "owner": "Alice" })), now);
        let slot = json!({ "name": "c", "state": "held", "slot": 2, "expires_in_ms": 5_000 });
        locks.note(&held(slot), now);
        assert_eq!(names(&locks.rows("", Sort::Name)), "a/1 b/1 c/2");
        assert_eq!(names(&locks.rows("", Sort::TimeLeft)), "c/2 b/1 a/1");
        assert_eq!(names(&locks.rows("aLI", Sort::Name)), "a/1");
        let left = |locks: &Locks| locks.rows("b", Sort::Name)[0].left(now);
        assert_eq!(left(&locks), Some(Duration::from_secs(9)));
        locks.note(&WatchEvent::Extended(from_value(lock("b", 20_000)).unwrap()), now);
        assert_eq!(left(&locks), Some(Duration::from_secs(20)));
        let slot = json!({ "name": "c", "state": "free", "slot": 2 });
        locks.note(&WatchEvent::Released(from_value(slot).unwrap()), now);
        let waiting = json!({ "name": "b", "state": "unknown", "waiters_total": 3 });
        locks.note(&WatchEvent::Waiters(from_value(waiting).unwrap()), now);
        assert_eq!((locks.len(), locks.waiters("b"), locks.waiters("a")), (2, 3, 0));

        let line = json!({ "name": "d", "state": "held", "waiters_total": 2 });
        let snapshot = json!({ "locks": [line], "is_complete": false });
        let snapshot = redlock_client::Snapshot::Prefix(from_value(snapshot).unwrap());
        locks.note(&WatchEvent::Snapshot(snapshot), now);
        assert_eq!(names(&locks.rows("", Sort::Name)), "d/1");
        assert_eq!((locks.waiters("b"), locks.waiters("d"), locks.are_more_held), (0, 2, true));
    }
}
