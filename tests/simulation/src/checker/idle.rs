//! Measures how long a lock is free while a client waits for it. Only the clients' view counts: a
//! lock is free from its holder's release or deadline until the next answer that grants the lock.

use std::time::Duration;

use super::by_name::{self, Hold};
use crate::history::{Answer, History, Request};

/// A time in which a lock was free while at least one client waited for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gap {
    pub(super) name: u8,
    pub(super) from: Duration,
    pub(super) until: Duration,
    /// The gap began with a release, and a grant ended it.
    pub(super) between_holders: bool,
}

/// A time in which the lock may be held, so it does not count as free.
struct Busy {
    from: Duration,
    until: Duration,
    released: bool,
    granted: bool,
}

/// How long a fault may affect masters and paths: an outage, a quarantine, or a lock that nobody
/// releases.
const AFTERMATH: Duration = Duration::from_secs(15);

/// Whether no fault happened between `from` and `until`, or within [`AFTERMATH`] before it.
pub(super) fn is_calm(history: &History, from: Duration, until: Duration) -> bool {
    !history.faults.iter().any(|fault| fault.at < until && from < fault.at + AFTERMATH)
}

/// The gaps of all locks. For each lock they begin after its first grant.
pub(super) fn gaps(history: &History) -> Vec<Gap> {
    let mut gaps = Vec::new();
    for (name, locks) in by_name::split(history) {
        let waits = waits(history, name);
        let mut busy: Vec<Busy> = locks.holds.iter().map(Busy::from).collect();
        busy.extend(suspect(history, name));
        busy.sort_by_key(|busy| (busy.from, busy.until));
        let mut busy = busy.into_iter();
        let Some(mut last) = busy.next() else { continue };
        for next in busy {
            if next.from > last.until {
                note(&mut gaps, name, (&last, next.from, next.granted), &waits);
                last = next;
            } else if next.until >= last.until {
                last = next;
            }
        }
        if history.end > last.until {
            note(&mut gaps, name, (&last, history.end, false), &waits);
        }
    }
    gaps
}

fn note(
    gaps: &mut Vec<Gap>,
    name: u8,
    free: (&Busy, Duration, bool),
    waits: &[(Duration, Duration)],
) {
    let (before, next, granted) = free;
    for (from, until) in waits {
        let first = (*from).max(before.until);
        let last = (*until).min(next);
        if first < last {
            let whole = first == before.until && last == next;
            let between_holders = whole && before.released && granted;
            gaps.push(Gap { name, from: first, until: last, between_holders });
        }
    }
}

impl From<&Hold> for Busy {
    fn from(hold: &Hold) -> Self {
        Self { from: hold.from.at, until: hold.until, released: hold.released, granted: true }
    }
}

/// Times in which a failed request may still have made its owner the holder. Only requests that
/// name an owner matter: if the owner had the lock already, the request may have extended it by
/// another TTL.
fn suspect(history: &History, name: u8) -> impl Iterator<Item = Busy> {
    history.operations.iter().filter(move |asked| asked.name == name).filter_map(|asked| {
        let Request::Acquire { owner: Some(_), ttl_ms, .. } = asked.request else { return None };
        let end = asked.end.map_or(history.end, |end| end.at);
        let vain = !matches!(asked.answer, Some(Answer::Granted { .. }));
        let until = end + Duration::from_millis(ttl_ms);
        vain.then_some(Busy { from: asked.start.at, until, released: false, granted: false })
    })
}

/// The longest TTL that counts as hasty, in milliseconds. A waiter with such a TTL leaves its
/// rounds only a few milliseconds and may never get a lock. So its waiting does not count; it only
/// must not keep others from the lock.
const HASTY_TTL_MS: u64 = 100;

/// The times in which at least one waiter waits whose TTL is long enough for a grant.
fn waits(history: &History, name: u8) -> Vec<(Duration, Duration)> {
    let waiters = history.operations.iter().filter(|asked| asked.name == name);
    let mut all: Vec<_> = waiters
        .filter(|asked| {
            matches!(asked.request, Request::Acquire { patience_ms: Some(_), ttl_ms, .. } if ttl_ms > HASTY_TTL_MS)
        })
        .map(|asked| (asked.start.at, asked.end.map_or(history.end, |end| end.at)))
        .collect();
    all.sort_unstable();
    let mut merged: Vec<(Duration, Duration)> = Vec::new();
    for (from, until) in all {
        match merged.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(until),
            _ => merged.push((from, until)),
        }
    }
    merged
}
