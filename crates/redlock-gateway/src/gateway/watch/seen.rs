//! The last known state of a lock, and the events between two states.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use redlock_core::{HeldBy, LockName};

use super::events::Event;

/// Tolerance when two readings of one hold are compared. Network and rounding delays shift the
/// computed end. Chosen: a reading takes a few milliseconds, and a second at most.
const END_TOLERANCE: Duration = Duration::from_millis(250);

/// How a hold ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Released,
    Forced,
}

/// The state of a lock, or of one of its slots, at one moment.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    /// The holder. `None`: the lock was free.
    pub(crate) by: Option<HeldBy>,
    /// That moment.
    pub(super) at: Instant,
    /// The end of the hold that was last published. `None` without an expiry.
    pub(super) ends: Option<Instant>,
    /// The hold may end later than `ends` by this much, because the exact time of the reading is not
    /// known.
    pub(super) slack: Duration,
    /// How the hold is about to end, if that is known.
    pub(super) announced: Option<End>,
}

impl Seen {
    pub(crate) fn free() -> Self {
        Self { by: None, at: Instant::now(), ends: None, slack: Duration::ZERO, announced: None }
    }

    pub(crate) fn of(by: HeldBy) -> Self {
        Self::within(by, Instant::now())
    }

    /// A state that was read at some time since `began`.
    pub(super) fn within(by: HeldBy, began: Instant) -> Self {
        let at = Instant::now();
        // Recovery and least times keep a lock free without a holder.
        let by = Some(by).filter(|by| !by.is_kept_free());
        let ends = by.as_ref().and_then(|by| began.checked_add(by.expires_in?));
        Self { by, at, ends, slack: at - began, announced: None }
    }

    fn text_bytes(&self) -> usize {
        self.by.as_ref().map_or(0, |by| by.info.len())
    }

    pub(super) fn forget_text(&mut self) {
        if let Some(by) = &mut self.by {
            by.info = Box::default();
        }
    }

    /// Whether both are the same hold.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.by.as_ref().zip(other.by.as_ref()).is_some_and(|(one, other)| is_same_hold(one, other))
    }
}

/// What was last seen of each lock, or slot, by the name under which it is stored. Clients choose how
/// many locks are held, so the memory for the records is bounded.
#[derive(Debug)]
pub(super) struct SeenLocks {
    records: HashMap<LockName, Seen>,
    /// The memory of all records.
    bytes: usize,
    /// The part of `bytes` for texts for people.
    text_bytes: usize,
    limit: usize,
}

impl SeenLocks {
    pub(super) fn new(limit: usize) -> Self {
        Self { records: HashMap::new(), bytes: 0, text_bytes: 0, limit }
    }

    pub(super) fn get(&self, stored: &LockName) -> Option<&Seen> {
        self.records.get(stored)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&LockName, &Seen)> {
        self.records.iter()
    }

    pub(super) fn announce(&mut self, stored: &LockName, end: End) {
        if let Some(seen) = self.records.get_mut(stored) {
            seen.announced = Some(end);
        }
    }

    /// Replaces the record of a lock. Texts for people are kept in the first half of the memory only.
    /// When the memory is full, all of them are forgotten. Returns false if there is still no memory:
    /// then the lock has no record any more. Locks that are watched by name may use all of the memory,
    /// and others three quarters.
    pub(super) fn record(
        &mut self,
        stored: LockName,
        mut seen: Seen,
        is_watched_by_name: bool,
    ) -> bool {
        let limit = if is_watched_by_name { self.limit } else { self.limit / 4 * 3 };
        self.forget(&stored);
        let cost = cost(&stored);
        if self.bytes + cost + seen.text_bytes() > limit / 2 {
            seen.forget_text();
        }
        if self.bytes + cost > limit && self.text_bytes > 0 {
            self.records.values_mut().for_each(Seen::forget_text);
            self.bytes -= std::mem::take(&mut self.text_bytes);
        }
        let has_room = self.bytes + cost <= limit;
        if has_room {
            self.bytes += cost + seen.text_bytes();
            self.text_bytes += seen.text_bytes();
            self.records.insert(stored, seen);
        }
        has_room
    }

    fn forget(&mut self, stored: &LockName) {
        if let Some(seen) = self.records.remove(stored) {
            self.bytes -= cost(stored) + seen.text_bytes();
            self.text_bytes -= seen.text_bytes();
        }
    }

    pub(super) fn retain(&mut self, mut keeps: impl FnMut(&LockName, &Seen) -> bool) {
        let Self { records, bytes, text_bytes, .. } = self;
        records.retain(|stored, seen| {
            let is_kept = keeps(stored, seen);
            if !is_kept {
                *bytes -= cost(stored) + seen.text_bytes();
                *text_bytes -= seen.text_bytes();
            }
            is_kept
        });
        if records.len() < records.capacity() / 4 {
            records.shrink_to_fit();
        }
    }

    /// Whether half of the memory is free.
    pub(super) fn has_room(&self) -> bool {
        self.bytes <= self.limit / 2
    }

    /// The memory of all records in bytes, and their number.
    #[cfg(test)]
    pub(super) fn use_now(&self) -> (usize, usize) {
        (self.bytes, self.records.len())
    }

    /// Limit on the memory of all records, in bytes.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }
}

/// The memory of a record without its text. A hash table has up to twice the room that its entries
/// need.
fn cost(stored: &LockName) -> usize {
    2 * size_of::<(LockName, Seen)>() + stored.as_str().len()
}

/// The events between `before` and `now`. Without `before` there are none: a watcher gets a snapshot
/// first. Without `end`, a hold that ended before its time counts as released.
pub(super) fn difference(before: Option<&Seen>, now: &Seen, end: Option<End>) -> Vec<Event> {
    let Some(before) = before else { return Vec::new() };
    let ended = |by: &HeldBy| {
        let mut by = by.clone();
        by.expires_in = None;
        let is_over = before.ends.is_some_and(|ends| ends <= now.at + END_TOLERANCE);
        match end.or(before.announced) {
            Some(End::Forced) => Event::Forced(by),
            Some(End::Released) => Event::Released(by),
            None if is_over => Event::Expired(by),
            None => Event::Released(by),
        }
    };
    match (&before.by, &now.by) {
        (None, None) => Vec::new(),
        (None, Some(by)) => vec![Event::Held(by.clone())],
        (Some(old), None) => vec![ended(old)],
        (Some(old), Some(new)) if is_same_hold(old, new) => {
            let is_longer = match (before.ends, now.ends) {
                (Some(ends), Some(now)) => now > ends + before.slack + END_TOLERANCE,
                (Some(_), None) => true,
                (None, _) => false,
            };
            if is_longer { vec![Event::Extended(new.clone())] } else { Vec::new() }
        }
        (Some(old), Some(new)) => vec![ended(old), Event::Held(new.clone())],
    }
}

/// Two grants never have the same fencing token. Locks of other Redlock clients have none.
fn is_same_hold(one: &HeldBy, other: &HeldBy) -> bool {
    one.fencing == other.fencing && (one.fencing.is_some() || one.has_owner_of(other))
}

#[cfg(test)]
mod tests {
    use redlock_core::FencingToken;

    use super::*;

    fn held(fencing: u64, left_ms: u64) -> Seen {
        let mut by = HeldBy::default();
        by.fencing = FencingToken::new(fencing).ok();
        by.expires_in = Some(Duration::from_millis(left_ms));
        Seen::of(by)
    }

    fn later(seen: &Seen, millis: u64) -> Seen {
        let shift = Duration::from_millis(millis);
        let ends = seen.ends.map(|ends| ends + shift);
        Seen { at: seen.at + shift, ends, ..seen.clone() }
    }

    fn kinds(events: &[Event]) -> Vec<&'static str> {
        let kind = |event: &Event| match event {
            Event::Held(_) => "held",
            Event::Extended(_) => "extended",
            Event::Released(_) => "released",
            Event::Expired(_) => "expired",
            Event::Forced(_) => "forced",
            Event::Waiters(..) => "waiters",
        };
        events.iter().map(kind).collect()
    }

    const A: u64 = 1_763_725_165_123_456;
    const B: u64 = A + 1;

    #[test]
    fn each_difference_has_its_events() {
        let (a, b, free) = (held(A, 5_000), held(B, 5_000), Seen::free());
        let told = |before: &Seen, now: &Seen, end| kinds(&difference(Some(before), now, end));
        assert_eq!(told(&free, &free, None), [""; 0]);
        assert_eq!(told(&free, &a, None), ["held"]);
        assert_eq!(told(&a, &later(&free, 1_000), None), ["released"]);
        assert_eq!(told(&a, &later(&free, 4_900), None), ["expired"]);
        assert_eq!(told(&a, &later(&free, 4_900), Some(End::Released)), ["released"]);
        assert_eq!(told(&a, &free, Some(End::Forced)), ["forced"]);
        assert_eq!(told(&a, &later(&b, 10), None), ["released", "held"]);
        assert_eq!(told(&a, &later(&b, 6_000), None), ["expired", "held"]);
        assert_eq!(kinds(&difference(None, &a, None)), [""; 0]);
    }

    #[test]
    fn repeated_reading_is_no_extension() {
        let a = held(A, 5_000);
        let told = |now: &Seen| kinds(&difference(Some(&a), now, None));
        assert_eq!(told(&later(&held(A, 4_000), 1_000)), [""; 0]);
        assert_eq!(told(&later(&held(A, 5_000), 100)), [""; 0]);
        assert_eq!(told(&later(&held(A, 5_000), 1_000)), ["extended"]);
        assert_eq!(told(&later(&held(A, 3_000), 1_000)), [""; 0]);
    }
}
