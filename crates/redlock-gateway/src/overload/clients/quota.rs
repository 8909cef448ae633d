//! How much of the masters' memory a client takes by way of this gateway.
//!
//! The figures are estimates. They bound nothing by themselves: the caller says how much a client may take, if that is
//! bounded at all. Another gateway's locks are not known here, and a restarted gateway begins with nothing.
//!
//! A client's locks are counted in groups that end at about the same time, so a client costs a few kilobytes here
//! however many locks it has. A release or an extension says nothing of the lock's former end. It takes one lock off the
//! group that ends first. The number of locks stays right; a lock that nobody released may count for one TTL longer.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

/// Names that left a fence lately. A name that leaves it again is not counted again. Its slot follows from its hash, and a
/// newer name takes it.
const RECENT: usize = 256;
/// A client that was refused has its figures looked at again then.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Bytes that a lock and its fence take on a master: two keys, their values and what Redis needs for them.
///
/// The figures are the growth of `used_memory` on redis-server 7.0.15, with the prefix `lock:`. A name of 6 bytes takes 336
/// to 399 bytes, depending on when the tables grow. A name of 20 takes 377 bytes, one of 235 takes 803. A name of 6 with
/// 900 bytes of metadata takes 1,298.
fn lock_bytes(name: &str, info: usize) -> u64 {
    (360 + 2 * name.len() + info) as u64
}

/// Bytes of the fence alone. Measured likewise: 161 with names of 20 bytes, 420 with 236.
fn fence_bytes(name: &str) -> u64 {
    (185 + name.len()) as u64
}

/// What a client may take of the masters' memory now.
#[derive(Debug, Clone, Default)]
pub struct Terms {
    /// In bytes; `None` while there is enough for all.
    pub limit: Option<u64>,
    /// How long a fence outlives what it is for.
    pub fence_life: Duration,
    /// What all clients have taken.
    pub taken: Taken,
}

/// A client takes as much of the masters' memory as it may while that is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exceeded {
    /// Bytes that it takes, about.
    pub taken: u64,
    /// Bytes that it may take.
    pub limit: u64,
    pub retry_after: Duration,
}

/// Bytes of the masters' memory that the clients of this gateway have taken since it began, less those they gave back. What
/// ends by itself stays counted: only differences over a short time mean anything.
#[derive(Debug, Clone, Default)]
pub struct Taken(Arc<AtomicI64>);

impl Taken {
    pub fn bytes(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, change: Change) {
        self.0.fetch_add(change, Ordering::Relaxed);
    }
}

/// What one client takes.
#[derive(Debug, Default)]
pub(super) struct QuotaLedger(Mutex<Table>);

#[derive(Debug)]
struct Table {
    began: Instant,
    hasher: RandomState,
    /// Locks that it holds or asks for, each with its fence.
    locks: Lapsing,
    /// Fences that its own locks and tries have left.
    fences: Lapsing,
    /// Fences that its releases of other locks have left.
    strays: Lapsing,
    recent: Vec<u64>,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            hasher: RandomState::new(),
            locks: Lapsing::default(),
            fences: Lapsing::default(),
            strays: Lapsing::default(),
            recent: Vec::new(),
        }
    }
}

/// Bytes that end by themselves, in groups by their end.
#[derive(Debug, Default)]
struct Lapsing {
    /// By milliseconds since the table began.
    groups: BTreeMap<u64, Group>,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Group {
    count: u64,
    bytes: u64,
}

/// Room that was made for a lock.
#[derive(Debug, Clone, Copy)]
pub(super) struct QuotaSlot {
    end: u64,
    bytes: u64,
    fence: u64,
    name: u64,
}

/// By how much an operation changes the memory in use, in bytes.
pub(super) type Change = i64;

impl QuotaLedger {
    /// Makes room for a lock that is asked for, until then at the latest.
    pub(super) fn reserve(
        &self,
        name: &str,
        info: usize,
        until: Instant,
        terms: &Terms,
    ) -> Result<(QuotaSlot, Change), Exceeded> {
        let mut table = self.table();
        let bytes = lock_bytes(name, info);
        let taken = table.bytes();
        if let Some(limit) = terms.limit.filter(|limit| taken + bytes > *limit) {
            return Err(Exceeded { taken, limit, retry_after: RETRY_AFTER });
        }
        let end = table.add(|table| &mut table.locks, bytes, until + terms.fence_life);
        let room =
            QuotaSlot { end, bytes, fence: fence_bytes(name), name: table.hasher.hash_one(name) };
        Ok((room, bytes as Change))
    }

    /// The lock was granted until then.
    pub(super) fn granted(&self, room: QuotaSlot, until: Instant, terms: &Terms) {
        let mut table = self.table();
        table.locks.remove(room.end, room.bytes);
        table.add(|table| &mut table.locks, room.bytes, until + terms.fence_life);
    }

    /// A lock was extended until then.
    pub(super) fn extended(&self, name: &str, until: Instant, terms: &Terms) {
        let mut table = self.table();
        let bytes = table.locks.take_earliest().unwrap_or_else(|| lock_bytes(name, 0));
        table.add(|table| &mut table.locks, bytes, until + terms.fence_life);
    }

    /// A lock was released. Its fence stays for a while.
    pub(super) fn released(&self, name: &str, terms: &Terms) -> Change {
        let mut table = self.table();
        let freed = table.locks.take_earliest().unwrap_or_default() as Change;
        let name_hash = table.hasher.hash_one(name);
        table.leave_fence(|table| &mut table.fences, name_hash, fence_bytes(name), terms) - freed
    }

    /// It was not granted. What was tried may leave fences on the masters.
    pub(super) fn consume(&self, room: QuotaSlot, terms: &Terms) -> Change {
        let mut table = self.table();
        table.locks.remove(room.end, room.bytes);
        table.leave_fence(|table| &mut table.fences, room.name, room.fence, terms)
            - room.bytes as Change
    }

    /// No key is left of this try.
    pub(super) fn refund(&self, room: QuotaSlot) -> Change {
        self.table().locks.remove(room.end, room.bytes);
        -(room.bytes as Change)
    }

    /// Whether a release may be tried. One that finds no lock leaves a fence, and may come from somebody who has no lock.
    pub(super) fn may_release(&self, name: &str, terms: &Terms) -> Result<(), Exceeded> {
        let Some(limit) = terms.limit else { return Ok(()) };
        let taken = self.table().strays.bytes;
        let fits = taken + fence_bytes(name) <= limit;
        fits.then_some(()).ok_or(Exceeded { taken, limit, retry_after: RETRY_AFTER })
    }

    /// A release found no lock of this client, or did not get through.
    pub(super) fn not_released(&self, name: &str, terms: &Terms) -> Change {
        let mut table = self.table();
        let name_hash = table.hasher.hash_one(name);
        table.leave_fence(|table| &mut table.strays, name_hash, fence_bytes(name), terms)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.table().bytes() == 0
    }

    /// As it is now: what has ended is gone.
    fn table(&self) -> MutexGuard<'_, Table> {
        let mut table = self.0.lock();
        let now = table.millis(Instant::now());
        let Table { locks, fences, strays, .. } = &mut *table;
        [locks, fences, strays].into_iter().for_each(|lapsing| lapsing.end(now));
        table
    }
}

impl Table {
    fn bytes(&self) -> u64 {
        self.locks.bytes + self.fences.bytes + self.strays.bytes
    }

    fn millis(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.began).as_millis() as u64
    }

    fn add(&mut self, to: impl FnOnce(&mut Self) -> &mut Lapsing, bytes: u64, end: Instant) -> u64 {
        let now = self.millis(Instant::now());
        let end = self.millis(end);
        to(self).add(bytes, now, end)
    }

    fn leave_fence(
        &mut self,
        to: impl FnOnce(&mut Self) -> &mut Lapsing,
        name: u64,
        bytes: u64,
        terms: &Terms,
    ) -> Change {
        if self.remember(name) {
            return 0;
        }
        self.add(to, bytes, Instant::now() + terms.fence_life);
        bytes as Change
    }

    /// Whether it was known already.
    fn remember(&mut self, name: u64) -> bool {
        if self.recent.is_empty() {
            self.recent = vec![0; RECENT];
        }
        std::mem::replace(&mut self.recent[name as usize % RECENT], name) == name
    }
}

impl Lapsing {
    /// Answers the end of the group: the given one, or up to an eighth of the time until then, or a second, later.
    ///
    /// Ends are multiples of a power of two. So a lifetime of a day has at most 120 groups, one of five minutes 60.
    fn add(&mut self, bytes: u64, now: u64, end: u64) -> u64 {
        let step = (end.saturating_sub(now) / 16).next_power_of_two().max(1024);
        let end = end.next_multiple_of(step);
        let group = self.groups.entry(end).or_default();
        group.count += 1;
        group.bytes += bytes;
        self.bytes += bytes;
        end
    }

    /// Takes one off a group, if that has not ended or been used up by releases.
    fn remove(&mut self, end: u64, bytes: u64) {
        let Some(group) = self.groups.get_mut(&end) else { return };
        let bytes = if group.count == 1 { group.bytes } else { bytes.min(group.bytes) };
        group.count -= 1;
        group.bytes -= bytes;
        self.bytes -= bytes;
        if group.count == 0 {
            self.groups.remove(&end);
        }
    }

    /// Takes one of average size off the group that ends first.
    fn take_earliest(&mut self) -> Option<u64> {
        let (&end, group) = self.groups.first_key_value()?;
        let bytes = group.bytes / group.count;
        self.remove(end, bytes);
        Some(bytes)
    }

    fn end(&mut self, now: u64) {
        while let Some(first) = self.groups.first_entry().filter(|first| *first.key() <= now) {
            self.bytes -= first.remove().bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const LOCK: u64 = 362;
    const FENCE: u64 = 186;

    fn terms(limit: Option<u64>) -> Terms {
        Terms { limit, fence_life: SECOND * 10, ..Terms::default() }
    }

    fn take(quota: &QuotaLedger, name: &str, ttl: Duration, terms: &Terms) -> Result<(), Exceeded> {
        let until = Instant::now() + ttl;
        let (room, _) = quota.reserve(name, 0, until, terms)?;
        quota.granted(room, until, terms);
        Ok(())
    }

    fn bytes(quota: &QuotaLedger) -> u64 {
        quota.table().bytes()
    }

    /// As if so much time had passed.
    fn pass(quota: &QuotaLedger, time: Duration) {
        let mut table = quota.table();
        table.began = table.began.checked_sub(time).expect("the machine has run for longer");
    }

    #[test]
    fn nothing_is_refused_without_a_bound() {
        let quota = QuotaLedger::default();
        let free = terms(None);
        (0..100_000)
            .for_each(|n: u32| take(&quota, &n.to_string(), SECOND * 60, &free).expect("room"));
        assert!(bytes(&quota) > 36_000_000);
        quota.may_release("unknown", &free).expect("room");
    }

    #[test]
    fn a_bound_counts_what_is_held_and_names_both() {
        let quota = QuotaLedger::default();
        let two = terms(Some(2 * LOCK + FENCE));
        take(&quota, "a", SECOND * 60, &two).expect("room");
        take(&quota, "b", SECOND * 60, &two).expect("room");
        let refused = take(&quota, "c", SECOND * 60, &two).expect_err("too much");
        assert_eq!((refused.taken, refused.limit), (2 * LOCK, 2 * LOCK + FENCE));
        assert_eq!(quota.released("a", &two), FENCE as i64 - LOCK as i64);
        take(&quota, "a", SECOND * 60, &two).expect("room");
        assert_eq!(quota.released("a", &two), -(LOCK as i64), "the fence of a name counts once");
    }

    #[test]
    fn metadata_counts_until_the_lock_ends_however_often_extended() {
        let quota = QuotaLedger::default();
        let free = terms(None);
        let until = Instant::now() + SECOND * 60;
        let (room, change) = quota.reserve("a", 1000, until, &free).expect("room");
        quota.granted(room, until, &free);
        assert_eq!(change, LOCK as i64 + 1000);
        (0..10).for_each(|_| quota.extended("a", until + SECOND * 60, &free));
        assert_eq!(bytes(&quota), LOCK + 1000);
        pass(&quota, SECOND * 150);
        assert!(quota.is_empty());
    }

    #[test]
    fn locks_of_another_gateway_count_once_extended_here() {
        let quota = QuotaLedger::default();
        let free = terms(None);
        quota.extended("a", Instant::now() + SECOND, &free);
        assert_eq!(bytes(&quota), LOCK);
    }

    #[test]
    fn tries_that_leave_nothing_cost_nothing_and_others_a_fence() {
        let quota = QuotaLedger::default();
        let free = terms(None);
        let until = Instant::now() + SECOND;
        let asks = || quota.reserve("a", 0, until, &free).expect("room").0;
        let first = asks();
        let second = asks();
        assert_eq!(quota.refund(first), -(LOCK as i64));
        assert_eq!(quota.consume(second, &free), FENCE as i64 - LOCK as i64);
        assert_eq!(bytes(&quota), FENCE);
        assert_eq!(quota.consume(asks(), &free), -(LOCK as i64), "the fence of a name counts once");
        pass(&quota, SECOND * 13);
        assert!(quota.is_empty());
    }

    #[test]
    fn a_client_that_only_releases_is_bounded_and_a_holder_is_not() {
        let quota = QuotaLedger::default();
        let few = terms(Some(10 * LOCK));
        (0..10).for_each(|n| take(&quota, &format!("{n}"), SECOND * 60, &few).expect("room"));
        take(&quota, "more", SECOND * 60, &few).expect_err("too much");
        quota.may_release("0", &few).expect("who holds locks may release them");
        let strays = (0..1000).take_while(|n| {
            let name = format!("{n:03}");
            let may = quota.may_release(&name, &few).is_ok();
            may.then(|| quota.not_released(&name, &few)).is_some()
        });
        assert_eq!(strays.count() as u64, 10 * LOCK / (FENCE + 2));
        pass(&quota, SECOND * 13);
        quota.may_release("0", &few).expect("fences end");
    }

    #[test]
    fn a_group_that_has_ended_is_not_taken_off_twice() {
        let quota = QuotaLedger::default();
        let free = terms(None);
        let (room, _) = quota.reserve("a", 0, Instant::now(), &free).expect("room");
        pass(&quota, SECOND * 20);
        quota.refund(room);
        quota.released("b", &free);
        assert_eq!(bytes(&quota), FENCE);
    }

    #[test]
    fn groups_of_a_client_stay_few_and_end_little_later() {
        let mut lapsing = Lapsing::default();
        let day = 86_400_000;
        for now in (0..2 * day).step_by(3_217) {
            lapsing.end(now);
            let left = now * 7_919 % day;
            let end = lapsing.add(1, now, now + left);
            assert!(
                end >= now + left && end - (now + left) <= (left / 8).max(1024),
                "{end} for {left} ms at {now}"
            );
            assert!(lapsing.groups.len() <= 120, "{}", lapsing.groups.len());
        }
    }
}
