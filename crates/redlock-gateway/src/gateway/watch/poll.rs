//! Polls watched locks for changes by other gateways.
//!
//! Locks that are watched by name are inspected about once a second. For watched prefixes, the held
//! locks are listed. A listing reads all locks of the masters. So the pause after a listing is ten
//! times its duration.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use redlock_core::{HeldBy, ListCursor, LockError, LockName, LockState, Slots};

use super::seen::Seen;
use super::{Event, State};
use crate::gateway::{Gateway, LISTING};

/// Time between two polls.
const INTERVAL: Duration = Duration::from_secs(1);
/// Window in which queue changes are combined into one event.
const BATCH_WINDOW: Duration = Duration::from_millis(50);
/// The pause after a listing, in durations of that listing.
const PAUSE_PER_LISTING: u32 = 10;
/// Limit on the inspections under way.
const MAX_CONCURRENT_READS: usize = 64;
/// Limit on the locks in a snapshot, and on those that a poll lists.
pub(super) const MAX_LISTED: usize = 10_000;
/// Locks on a page of a listing.
const PAGE_LOCKS: usize = 1_000;
/// All slots of a lock are read in one of this many polls. Another gateway may use slots that were
/// not seen.
const ALL_SLOTS_EVERY: usize = 5;
/// How many locks are compared at a time. In between, requests get on.
const COMPARED_AT_ONCE: usize = 256;

/// Polls for ever.
pub(in crate::gateway) async fn poll(gateway: &Gateway) {
    tokio::join!(poll_names(gateway), poll_prefixes(gateway));
}

async fn poll_names(gateway: &Gateway) {
    let watches = &gateway.watches;
    let mut next_poll = tokio::time::Instant::now();
    let mut round = 0;
    loop {
        let is_idle = {
            let state = watches.state.lock();
            let is_idle = !state.has_watchers();
            watches.is_active.store(!is_idle, Ordering::Release);
            is_idle
        };
        if is_idle {
            watches.wake.notified().await;
            continue;
        }
        tokio::select! {
            () = tokio::time::sleep_until(next_poll) => {
                next_poll = tokio::time::Instant::now() + INTERVAL;
                round += 1;
                let due = watches.state.lock().due(round);
                inspect(gateway, due).await;
                watches.state.lock().forget_unwatched();
            }
            () = watches.wake.notified() => {
                tokio::time::sleep(BATCH_WINDOW).await;
                let to_read = std::mem::take(&mut watches.state.lock().to_read);
                inspect(gateway, to_read.into_iter().map(|name| (name, Slots::MAX))).await;
            }
        }
        publish_queues(gateway);
    }
}

/// Inspects locks, with so many of their slots, and publishes what is new.
async fn inspect(gateway: &Gateway, locks: impl IntoIterator<Item = (LockName, u16)>) {
    let watches = &gateway.watches;
    let inspections = stream::iter(locks).map(|(name, count)| async move {
        let began = Instant::now();
        let inspection = gateway.locks.inspect_slots(&name, count).await;
        let mut state = watches.state.lock();
        let mut holders = inspection.holders.into_iter().peekable();
        for slot in (1..=count).filter(|slot| !inspection.unknown_slots.contains(slot)) {
            let holder = holders.next_if(|holder| holder.slot == slot);
            let now = holder.map_or_else(Seen::free, |holder| Seen::of(holder.by));
            state.see_polled(&name, slot, now, began);
        }
    });
    inspections.buffer_unordered(MAX_CONCURRENT_READS).collect::<()>().await;
}

async fn poll_prefixes(gateway: &Gateway) {
    loop {
        let began = Instant::now();
        list(gateway).await;
        let pause = PAUSE_PER_LISTING * began.elapsed();
        tokio::time::sleep(pause.max(INTERVAL)).await;
    }
}

/// Lists the locks of all watched prefixes, and publishes what is new.
async fn list(gateway: &Gateway) {
    let watches = &gateway.watches;
    let prefixes = watches.state.lock().listed_prefixes();
    let Some(common) = common_prefix(&prefixes) else { return };
    let is_listed =
        |name: &LockName| prefixes.iter().any(|prefix| name.as_str().starts_with(prefix.as_str()));
    let began = Instant::now();
    let Ok((held, is_complete)) = pages(gateway, common, is_listed).await else { return };
    let found: HashSet<LockName> = held.iter().map(|(stored, _)| stored.clone()).collect();
    for part in held.chunks(COMPARED_AT_ONCE) {
        {
            let mut state = watches.state.lock();
            for (stored, by) in part {
                let (name, slot) = stored.lock_and_slot();
                // A lock without a record was free.
                let free = || Seen { at: began, ..Seen::free() };
                state.seen.entry(stored.clone()).or_insert_with(free);
                state.see_polled(&name, slot, Seen::of(by.clone()), began);
            }
        }
        tokio::task::yield_now().await;
    }
    if is_complete {
        // A listing may miss a held lock. So each missing lock is read again.
        let gone =
            watches.state.lock().gone(began, |stored| is_listed(stored) && !found.contains(stored));
        inspect(gateway, gone).await;
    } else {
        watches.state.lock().end_expired();
    }
    watches.state.lock().forget_free();
}

/// All held locks that pass, under the names by which they are stored, and whether these are all.
///
/// # Errors
/// As [`redlock_core::Redlock::list`].
pub(in crate::gateway) async fn pages(
    gateway: &Gateway,
    prefix: &str,
    passes: impl Fn(&LockName) -> bool + Send + Sync,
) -> Result<(Vec<(LockName, HeldBy)>, bool), LockError> {
    let mut held = Vec::new();
    let mut cursor = ListCursor::default();
    // The limit ends a listing that is prolonged by locks that come and go.
    for _ in 0..2 * MAX_LISTED / PAGE_LOCKS {
        let page = gateway.locks.list(prefix, PAGE_LOCKS, cursor, LISTING, &passes).await?;
        for (stored, state) in page.locks {
            if let LockState::Held(by) = state {
                held.push((stored, by));
            }
        }
        if held.len() > MAX_LISTED {
            held.truncate(MAX_LISTED);
            return Ok((held, false));
        }
        match page.next {
            None => return Ok((held, true)),
            Some(next) => cursor = next,
        }
    }
    Ok((held, false))
}

/// Publishes the queues that have changed.
fn publish_queues(gateway: &Gateway) {
    let watches = &gateway.watches;
    let (mut changed, followed) = {
        let mut state = watches.state.lock();
        let lines = state.names.iter().map(|(name, topic)| (name.clone(), topic.line));
        let followed: Vec<_> = lines.collect();
        (std::mem::take(&mut state.lines), followed)
    };
    // A kept place ends without a request.
    let is_other = |(name, line): &(LockName, usize)| gateway.line_length(name) != *line;
    changed.extend(followed.into_iter().filter(is_other).map(|(name, _)| name));
    for name in changed {
        let (waiters, total) = gateway.waiters(&name);
        let mut state = watches.state.lock();
        if let Some(topic) = state.names.get_mut(&name) {
            topic.line = total;
        }
        state.tell(&name, 1, Event::Waiters(waiters, total));
    }
}

/// The longest prefix that all these sorted prefixes have. `None` without prefixes.
fn common_prefix(prefixes: &[String]) -> Option<&str> {
    // Sorted texts differ first where the first and the last differ. All are ASCII.
    let (first, last) = (prefixes.first()?, prefixes.last()?);
    let common = first.bytes().zip(last.bytes()).take_while(|(one, other)| one == other);
    first.get(..common.count())
}

impl State {
    fn has_watchers(&self) -> bool {
        !self.names.is_empty() || !self.prefixes.is_empty()
    }

    /// The locks to read in this round, and how many slots of each.
    fn due(&self, round: usize) -> Vec<(LockName, u16)> {
        let slots = |(index, (name, topic)): (usize, (&LockName, &super::Topic))| {
            let reads_all = (index + round).is_multiple_of(ALL_SLOTS_EVERY);
            (name.clone(), if reads_all { Slots::MAX } else { topic.slots })
        };
        self.names.iter().enumerate().map(slots).collect()
    }

    /// The watched prefixes whose watchers have a snapshot, in order.
    fn listed_prefixes(&self) -> Vec<String> {
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

    /// The locks that were held before the listing `began` and are now missing, with the largest
    /// missing slot of each.
    fn gone(
        &self,
        began: Instant,
        is_missing: impl Fn(&LockName) -> bool,
    ) -> HashMap<LockName, u16> {
        let mut gone = HashMap::new();
        for (stored, seen) in &self.seen {
            if seen.by.is_some() && seen.at < began && is_missing(stored) {
                let (name, slot) = stored.lock_and_slot();
                let largest = gone.entry(name).or_insert(slot);
                *largest = slot.max(*largest);
            }
        }
        gone
    }

    /// Ends the holds whose time is over, when no listing could show that they ended.
    fn end_expired(&mut self) {
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
    fn forget_free(&mut self) {
        let names = &self.names;
        self.seen.retain(|stored, seen| {
            seen.by.is_some() || names.contains_key(&stored.lock_and_slot().0)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_prefix_is_the_longest_of_all() {
        let common = |prefixes: &[&str]| {
            let prefixes: Vec<_> = prefixes.iter().map(|text| (*text).to_owned()).collect();
            common_prefix(&prefixes).map(str::to_owned)
        };
        assert_eq!(common(&[]), None);
        assert_eq!(common(&["jobs/"]).as_deref(), Some("jobs/"));
        assert_eq!(common(&["jobs/a", "jobs/b/", "jobs/c"]).as_deref(), Some("jobs/"));
        assert_eq!(common(&["", "jobs/"]).as_deref(), Some(""));
    }
}
