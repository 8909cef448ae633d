//! What was last seen of a lock, and which events lead from there to what is seen now.

use std::time::{Duration, Instant};

use redlock_core::HeldBy;

use super::Event;

/// Two sights of one hold differ by less than this although nobody extended it: the masters and the
/// gateway round, and the requests between them take time.
const SAME_END: Duration = Duration::from_millis(250);

/// How a hold ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Released,
    Forced,
}

/// A lock, or a slot, as it was at a certain time.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    /// The holder. `None`: the lock was free.
    pub(super) by: Option<HeldBy>,
    pub(super) at: Instant,
}

impl Seen {
    pub(super) fn free() -> Self {
        Self { by: None, at: Instant::now() }
    }

    pub(super) fn of(by: HeldBy) -> Self {
        // A lock that is kept free has no holder.
        let by = Some(by).filter(|by| !by.is_kept_free());
        Self { by, at: Instant::now() }
    }

    fn ends(&self) -> Option<Instant> {
        self.at.checked_add(self.by.as_ref()?.expires_in?)
    }
}

/// The events that lead from `before` to `now`. A lock that was never seen gives none: a watcher gets
/// a snapshot first. `end`: how the hold of `before` ended, if that is known. Otherwise a hold that
/// ended before its time was released.
pub(super) fn difference(before: Option<&Seen>, now: &Seen, end: Option<End>) -> Vec<Event> {
    let Some(before) = before else { return Vec::new() };
    let ended = |by: &HeldBy| {
        let mut by = by.clone();
        by.expires_in = None;
        let is_over = before.ends().is_some_and(|ends| ends <= now.at + SAME_END);
        match end {
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
            let is_longer = match (before.ends(), now.ends()) {
                (Some(before), Some(now)) => now > before + SAME_END,
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
        Seen { at: seen.at + Duration::from_millis(millis), ..seen.clone() }
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
    fn an_extension_is_told_once_and_a_second_sight_is_not() {
        let a = held(A, 5_000);
        let told = |now: &Seen| kinds(&difference(Some(&a), now, None));
        assert_eq!(told(&later(&held(A, 4_000), 1_000)), [""; 0]);
        assert_eq!(told(&later(&held(A, 5_000), 100)), [""; 0]);
        assert_eq!(told(&later(&held(A, 5_000), 1_000)), ["extended"]);
        assert_eq!(told(&later(&held(A, 3_000), 1_000)), [""; 0]);
    }
}
