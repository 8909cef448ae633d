//! Polls watched locks for changes by other gateways.
//!
//! Locks that are watched by name are inspected about once a second, one after another over that
//! second: at once, they would delay the requests of clients. For watched prefixes, the held
//! locks are listed. A listing reads all locks of the masters. So the pause after a listing is ten
//! times its duration.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use redlock_core::{ListCursor, LockError, LockName, LockState, Redlock, Slots};

use super::Watches;
use super::events::Event;
use super::seen::Seen;
use super::state::{INTERVAL, MAX_LISTED};
use crate::gateway::listings::LISTING;
use crate::gateway::waiters::waiters;

/// Window in which queue changes are combined into one event.
const BATCH_WINDOW: Duration = Duration::from_millis(50);
/// The pause after a listing, in durations of that listing.
const PAUSE_PER_LISTING: u32 = 10;
/// Limit on the inspections under way. Each may read 256 slots.
const MAX_CONCURRENT_READS: usize = 8;
/// Locks on a page of a listing.
const PAGE_LOCKS: usize = 1_000;
/// How many locks are compared at a time. In between, requests get on.
const COMPARED_AT_ONCE: usize = 256;

/// Polls, and gives turns to streams, for ever.
pub(crate) async fn poll(watches: &Watches, locks: &Redlock) {
    let turns = watches.turns.give();
    tokio::join!(
        poll_names(watches, locks),
        read_soon(watches, locks),
        poll_prefixes(watches, locks),
        turns
    );
}

/// Inspects each lock that is watched by name once in each [`INTERVAL`].
async fn poll_names(watches: &Watches, locks: &Redlock) {
    let mut round = 0;
    loop {
        let is_idle = {
            let mut state = watches.state.lock();
            let is_idle = !state.has_watchers();
            watches.is_active.store(!is_idle, Ordering::Release);
            if is_idle {
                state.forget_all();
            }
            is_idle
        };
        if is_idle {
            watches.begun.notified().await;
            continue;
        }
        round += 1;
        let start = tokio::time::Instant::now();
        let due = watches.state.lock().due(round);
        inspect(watches, locks, due, INTERVAL).await;
        watches.state.lock().forget_unwatched();
        publish_queues(watches, locks);
        tokio::time::sleep_until(start + INTERVAL).await;
    }
}

/// Inspects locks whose state this gateway does not know, and publishes queues that have changed.
async fn read_soon(watches: &Watches, locks: &Redlock) {
    loop {
        watches.wake.notified().await;
        tokio::time::sleep(BATCH_WINDOW).await;
        let to_read = std::mem::take(&mut watches.state.lock().to_read);
        let to_read = to_read.into_iter().map(|name| (name, Slots::MAX)).collect();
        inspect(watches, locks, to_read, Duration::ZERO).await;
        publish_queues(watches, locks);
    }
}

/// Inspects locks, with so many of their slots, and publishes what is new. The inspections begin at
/// equal distances within the time `over`. If that is zero, they begin at once.
async fn inspect(watches: &Watches, locks: &Redlock, due: Vec<(LockName, u16)>, over: Duration) {
    let start = tokio::time::Instant::now();
    let pause = over / u32::try_from(due.len()).unwrap_or(u32::MAX).max(1);
    let inspections = stream::iter((0..).zip(due)).map(|(index, (name, count))| async move {
        if !pause.is_zero() {
            tokio::time::sleep_until(start + pause * index).await;
        }
        let began = Instant::now();
        let inspection = locks.inspect_slots(&name, count).await;
        let mut state = watches.state.lock();
        if !state.is_watched(&name) {
            return;
        }
        // Beside a known slot 1, a slot without a record was free.
        let is_known = state.seen.get(&name).is_some();
        let mut holders = inspection.holders.into_iter().peekable();
        for slot in (1..=count).filter(|slot| !inspection.unknown_slots.contains(slot)) {
            let holder = holders.next_if(|holder| holder.slot == slot);
            if is_known && holder.is_some() {
                state.assume_free(name.of_slot(slot), began);
            }
            let now = holder.map_or_else(Seen::free, |holder| Seen::of(holder.by));
            state.see_polled(&name, slot, now, began);
        }
    });
    inspections.buffer_unordered(MAX_CONCURRENT_READS).collect::<()>().await;
}

async fn poll_prefixes(watches: &Watches, locks: &Redlock) {
    loop {
        let took = list(watches, locks).await;
        let pause = PAUSE_PER_LISTING * took;
        tokio::time::sleep(pause.max(INTERVAL)).await;
    }
}

/// Lists the locks of all watched prefixes, and publishes what is new. Returns how long the listing
/// took.
async fn list(watches: &Watches, locks: &Redlock) -> Duration {
    let prefixes = watches.state.lock().listed_prefixes();
    let Some(common) = common_prefix(&prefixes) else { return Duration::ZERO };
    let is_listed =
        |name: &LockName| prefixes.iter().any(|prefix| name.as_str().starts_with(prefix.as_str()));
    let began = Instant::now();
    let bytes = watches.state.lock().seen.limit();
    let listed = pages(locks, common, (bytes, Excess::LeaveOutTexts), is_listed).await;
    let took = began.elapsed();
    let Ok((held, is_complete)) = listed else { return took };
    let found: HashSet<LockName> = held.iter().map(|(stored, _)| stored.clone()).collect();
    for part in held.chunks(COMPARED_AT_ONCE) {
        {
            let mut state = watches.state.lock();
            for (stored, seen) in part {
                let (name, slot) = stored.lock_and_slot();
                // A lock without a record was free.
                state.assume_free(stored.clone(), began);
                state.see_polled(&name, slot, seen.clone(), began);
            }
        }
        tokio::task::yield_now().await;
    }
    if is_complete {
        // A listing may miss a held lock. So each missing lock is read again.
        let gone =
            watches.state.lock().gone(began, |stored| is_listed(stored) && !found.contains(stored));
        inspect(watches, locks, gone.into_iter().collect(), Duration::ZERO).await;
    } else {
        watches.state.lock().end_expired();
    }
    watches.state.lock().forget_free();
    took
}

/// What a listing leaves out to take bounded memory.
#[derive(Clone, Copy)]
pub(crate) enum Excess {
    /// A snapshot shows the texts of locks, so it ends earlier.
    LeaveOutLocks,
    /// A poll compares locks without their texts.
    LeaveOutTexts,
}

/// The held locks that pass, under the names by which they are stored, and whether these are all. The
/// last page may exceed `most_bytes`.
///
/// # Errors
/// As [`redlock_core::Redlock::list`].
pub(crate) async fn pages(
    locks: &Redlock,
    prefix: &str,
    (most_bytes, beyond): (usize, Excess),
    passes: impl Fn(&LockName) -> bool + Send + Sync,
) -> Result<(Vec<(LockName, Seen)>, bool), LockError> {
    let (mut held, mut bytes) = (Vec::new(), 0);
    let mut cursor = ListCursor::default();
    // The limit ends a listing that is prolonged by locks that come and go.
    for _ in 0..2 * MAX_LISTED / PAGE_LOCKS {
        let began = Instant::now();
        let page = locks.list(prefix, PAGE_LOCKS, cursor, LISTING, &passes).await?;
        for (stored, state) in page.locks {
            if let LockState::Held(by) = state {
                bytes += size_of::<(LockName, Seen)>() + stored.as_str().len() + by.info.len();
                held.push((stored, Seen::within(by, began)));
            }
        }
        match beyond {
            Excess::LeaveOutTexts if bytes > most_bytes => {
                held.iter_mut().for_each(|(_, seen): &mut (_, Seen)| seen.forget_text());
                bytes = 0;
            }
            Excess::LeaveOutLocks if bytes > most_bytes => return Ok((held, false)),
            Excess::LeaveOutTexts | Excess::LeaveOutLocks => {}
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
fn publish_queues(watches: &Watches, locks: &Redlock) {
    let (mut changed, followed) = {
        let mut state = watches.state.lock();
        let lines = state.names.iter().map(|(name, topic)| (name.clone(), topic.line));
        let followed: Vec<_> = lines.collect();
        (std::mem::take(&mut state.lines), followed)
    };
    // A kept place ends without a request.
    let is_other = |(name, line): &(LockName, usize)| locks.line_length(name) != *line;
    changed.extend(followed.into_iter().filter(is_other).map(|(name, _)| name));
    for name in changed {
        let (first, total) = waiters(locks, &name);
        let mut state = watches.state.lock();
        if let Some(topic) = state.names.get_mut(&name) {
            topic.line = total;
        }
        state.tell(&name, 1, Event::Waiters(first, total));
    }
}

/// The longest prefix that all these sorted prefixes have. `None` without prefixes.
fn common_prefix(prefixes: &[String]) -> Option<&str> {
    // Sorted texts differ first where the first and the last differ. All are ASCII.
    let (first, last) = (prefixes.first()?, prefixes.last()?);
    let common = first.bytes().zip(last.bytes()).take_while(|(one, other)| one == other);
    first.get(..common.count())
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
