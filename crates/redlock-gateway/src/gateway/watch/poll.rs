//! Finds what other gateways do to the locks that are watched here.
//!
//! Locks that are watched by name are inspected about once a second. For watched prefixes, the held
//! locks are listed. A listing reads all locks of the masters, so the pause before the next listing
//! is ten times as long as the listing took.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use redlock_core::{HeldBy, ListCursor, LockError, LockName, LockState, Slots};

use super::seen::Seen;
use super::{Event, State};
use crate::gateway::{Gateway, LISTING};

/// Time between two polls.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time during which changes of lines are collected. A line of thousands is told once for all of
/// them.
const COLLECTS: Duration = Duration::from_millis(50);
/// A listing takes at most this part of the time.
const LISTING_SHARE: u32 = 10;
/// Limit on the inspections under way.
const AT_ONCE: usize = 64;
/// Limit on the locks in a snapshot, and on those that are followed for watchers of prefixes.
const MAX_LISTED: usize = 10_000;
/// Locks on a page of a listing.
const PAGE: usize = 1_000;
/// Every this many polls, all slots of a lock are read, because another gateway may use more of them
/// than were seen.
const ALL_SLOTS_EVERY: u64 = 5;

/// Polls for ever.
pub(in crate::gateway) async fn poll(gateway: &Gateway) {
    let watches = &gateway.watches;
    let mut next_poll = tokio::time::Instant::now();
    let mut next_listing = next_poll;
    for round in 0.. {
        if !watches.state.lock().has_watchers() {
            watches.is_active.store(false, std::sync::atomic::Ordering::Release);
            // A watcher that came between the two lines above is not missed: it wakes the poller.
            if !watches.state.lock().has_watchers() {
                watches.wake.notified().await;
            }
            watches.is_active.store(true, std::sync::atomic::Ordering::Release);
        }
        loop {
            tokio::select! {
                () = tokio::time::sleep_until(next_poll) => break,
                () = watches.wake.notified() => {
                    tokio::time::sleep(COLLECTS).await;
                    let to_read = std::mem::take(&mut watches.state.lock().to_read);
                    inspect(gateway, to_read, Slots::MAX).await;
                    tell_lines(gateway);
                }
            }
        }
        next_poll = tokio::time::Instant::now() + INTERVAL;
        let reads_all = round % ALL_SLOTS_EVERY == 0;
        let names: Vec<LockName> = watches.state.lock().names.keys().cloned().collect();
        inspect(gateway, names, if reads_all { Slots::MAX } else { 1 }).await;
        if tokio::time::Instant::now() >= next_listing {
            let began = Instant::now();
            list(gateway).await;
            next_listing = tokio::time::Instant::now() + LISTING_SHARE * began.elapsed();
        }
        tell_lines(gateway);
        watches.state.lock().forget_unwatched();
    }
}

/// Inspects locks, with at least so many of their slots, and tells what is new.
async fn inspect(gateway: &Gateway, names: impl IntoIterator<Item = LockName>, slots: u16) {
    let watches = &gateway.watches;
    let inspections = stream::iter(names).map(|name| async move {
        let seen = watches.state.lock().names.get(&name).map_or(Slots::MAX, |topic| topic.slots);
        let count = seen.max(slots);
        let began = Instant::now();
        let inspection = gateway.locks.inspect_slots(&name, count).await;
        if inspection.state == LockState::Unknown && inspection.holders.is_empty() {
            return;
        }
        let mut state = watches.state.lock();
        for slot in 1..=count {
            let by = inspection.holders.iter().find(|holder| holder.slot == slot);
            let now = by.map_or_else(Seen::free, |holder| Seen::of(holder.by.clone()));
            state.see_polled(&name, slot, now, began);
        }
    });
    inspections.buffer_unordered(AT_ONCE).collect::<()>().await;
}

/// Lists the locks of all watched prefixes, and tells what is new.
async fn list(gateway: &Gateway) {
    let watches = &gateway.watches;
    let common = watches.state.lock().common_prefix();
    let Some(prefix) = common else { return };
    let began = Instant::now();
    let passes = |name: &LockName| watches.state.lock().is_of_prefix(name);
    let Ok((held, is_whole)) = pages(gateway, &prefix, passes).await else { return };
    let found: HashSet<LockName> = held.iter().map(|(stored, _)| stored.clone()).collect();
    {
        let mut state = watches.state.lock();
        for (stored, by) in held {
            let (name, slot) = stored.lock_and_slot();
            // Nothing was seen of a lock that was free until now.
            state.seen.entry(stored).or_insert_with(|| Seen { at: began, ..Seen::free() });
            state.see_polled(&name, slot, Seen::of(by), began);
        }
    }
    if !is_whole {
        return;
    }
    // A listing may miss a lock that is held all the time. So each lock that seems to be gone is
    // read again.
    let gone: HashSet<LockName> = {
        let state = watches.state.lock();
        let is_gone = |stored: &LockName, seen: &Seen| {
            seen.by.is_some() && seen.at < began && !found.contains(stored)
        };
        let seen = state.seen.iter().filter(|(stored, seen)| is_gone(stored, seen));
        let names = seen.map(|(stored, _)| stored.lock_and_slot().0);
        names.filter(|name| state.is_of_prefix(name)).take(MAX_LISTED).collect()
    };
    inspect(gateway, gone, Slots::MAX).await;
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
    // A listing of many locks has many pages. Locks that come and go may prolong it.
    for _ in 0..2 * MAX_LISTED / PAGE {
        let page = gateway.locks.list(prefix, PAGE, cursor, LISTING, &passes).await?;
        for (stored, state) in page.locks {
            if let LockState::Held(by) = state {
                held.push((stored, by));
            }
        }
        match page.next {
            None => return Ok((held, true)),
            Some(next) if held.len() < MAX_LISTED => cursor = next,
            Some(_) => break,
        }
    }
    Ok((held, false))
}

/// Tells who waits for the locks whose lines have changed.
fn tell_lines(gateway: &Gateway) {
    let watches = &gateway.watches;
    let changed = {
        let mut state = watches.state.lock();
        let mut changed = std::mem::take(&mut state.lines);
        // A place that is kept for a client ends without a request.
        let is_other = |name: &LockName, line: usize| gateway.line_length(name) != line;
        let others = state.names.iter().filter(|(name, topic)| is_other(name, topic.line));
        changed.extend(others.map(|(name, _)| name.clone()));
        changed
    };
    for name in changed {
        let (waiters, total) = gateway.waiters(&name);
        let mut state = watches.state.lock();
        if let Some(topic) = state.names.get_mut(&name) {
            topic.line = total;
        }
        state.tell(&name, 1, Event::Waiters(waiters, total));
    }
}

impl State {
    fn has_watchers(&self) -> bool {
        !self.names.is_empty() || !self.prefixes.is_empty() || self.all.receiver_count() > 0
    }

    /// Takes over what a poll has read, unless this gateway has changed the lock since the poll
    /// `began`.
    fn see_polled(&mut self, name: &LockName, slot: u16, now: Seen, began: Instant) {
        let stored = name.of_slot(slot);
        let before = self.seen.get(&stored);
        // A slot above 1 that was never held needs no entry.
        let is_needless = before.is_none() && now.by.is_none() && slot > 1;
        if !is_needless && before.is_none_or(|seen| seen.at <= began) {
            self.see(name, slot, now, None);
        }
    }

    /// Forgets the free locks that only watchers of prefixes follow. To them, a lock that was never
    /// seen is free.
    fn forget_free(&mut self) {
        let names = &self.names;
        self.seen.retain(|stored, seen| {
            seen.by.is_some() || names.contains_key(&stored.lock_and_slot().0)
        });
    }

    fn is_of_prefix(&self, name: &LockName) -> bool {
        self.prefixes.keys().any(|prefix| name.as_str().starts_with(&**prefix))
    }

    /// The longest prefix that all watched prefixes have. `None` when no prefix is watched.
    fn common_prefix(&self) -> Option<String> {
        let (first, _) = self.prefixes.first_key_value()?;
        let (last, _) = self.prefixes.last_key_value()?;
        // Sorted texts differ first where the first and the last differ.
        let common = first.bytes().zip(last.bytes()).take_while(|(one, other)| one == other);
        Some(first[..common.count()].to_owned())
    }
}
