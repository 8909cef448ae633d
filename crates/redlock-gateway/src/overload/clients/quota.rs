//! Estimates how much of the masters' memory a client uses through this gateway.
//!
//! The estimate alone limits nothing: the caller passes the limit, if there is one. The estimate
//! does not include locks that other gateways granted, and it starts at zero after a restart.
//!
//! Locks are counted in groups that end at about the same time. So a client costs a few kilobytes
//! here, however many locks it has. At a release or an extension, the ledger does not know when
//! that lock would have ended. It removes one lock from the group that ends first. So the number of
//! locks stays right, but a lock that nobody released may count for up to one TTL too long.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use redlock_core::LockName;

/// How many recently counted names are remembered, so that the watermark of a name is not counted
/// twice. The hash of a name gives its place, and a newer name with the same place replaces it.
const RECENT: usize = 256;
/// When a refused client may try again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Bytes of a lock and its token watermark on a master: two keys, their values, and Redis'
/// overhead.
///
/// The figures are the growth of `used_memory` on redis-server 7.0.15, with the prefix `lock:`. A
/// lock with a name of 6 bytes takes 336 to 399 bytes, depending on when Redis enlarges its tables.
/// With a name of 20 bytes it takes 377 bytes, and with 235 bytes 803. With a name of 6 bytes and
/// 900 bytes of metadata it takes 1,298.
fn lock_bytes(name: &str, info: usize) -> u64 {
    (360 + 2 * name.len() + info) as u64
}

/// Bytes of the token watermark alone. The same measurement gave 161 bytes with names of 20 bytes,
/// and 420 bytes with names of 236 bytes.
fn watermark_bytes(name: &str) -> u64 {
    (185 + name.len()) as u64
}

/// The limit on a client's use of the masters' memory now.
#[derive(Debug, Clone, Default)]
pub struct Terms {
    /// In bytes; `None` while there is enough for all clients.
    pub limit: Option<u64>,
    /// How long a token watermark outlives its lock or failed acquire.
    pub watermark_life: Duration,
    /// The use of all clients together.
    pub taken: Taken,
}

/// The error of a client that has reached its limit while the masters' memory is short.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exceeded {
    /// Estimated bytes that the client uses.
    pub taken: u64,
    /// Bytes that the client may use.
    pub limit: u64,
    pub retry_after: Duration,
    /// Whether the use is that of releases which found no lock.
    pub is_of_releases: bool,
}

/// The use of the masters' memory by all clients of this gateway.
#[derive(Debug, Clone, Default)]
pub struct Taken(Arc<Use>);

#[derive(Debug, Default)]
struct Use {
    /// Bytes taken since the gateway started, less those released. Expired locks stay counted, so
    /// only differences over a short time mean anything.
    bytes: AtomicI64,
    /// The largest part of its limit that any client has used, in thousandths: in this period, and
    /// in the one before.
    peak: AtomicU64,
    last_peak: AtomicU64,
}

impl Taken {
    pub fn bytes(&self) -> i64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, change: Change) {
        self.0.bytes.fetch_add(change, Ordering::Relaxed);
    }

    /// Records that a client uses `taken` of `limit` bytes.
    fn record_use(&self, taken: u64, limit: u64) {
        let thousandths = taken.saturating_mul(1000) / limit.max(1);
        self.0.peak.fetch_max(thousandths, Ordering::Relaxed);
    }

    /// The largest part of its limit that any client has used lately. 0 while there is no limit.
    pub fn largest_use(&self) -> f64 {
        let Use { peak, last_peak, .. } = &*self.0;
        let thousandths = peak.load(Ordering::Relaxed).max(last_peak.load(Ordering::Relaxed));
        thousandths as f64 / 1000.0
    }

    /// Begins a new period.
    pub fn begin_period(&self) {
        self.0.last_peak.store(self.0.peak.swap(0, Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// The estimate for one client.
#[derive(Debug, Default)]
pub(super) struct QuotaLedger(Mutex<Table>);

#[derive(Debug)]
struct Table {
    began: Instant,
    hasher: RandomState,
    /// Locks that the client holds or asks for, each with its token watermark.
    locks: ExpiringBytes,
    /// Token watermarks of its own locks and failed acquires.
    watermarks: ExpiringBytes,
    /// Token watermarks of releases that found no lock of this client.
    stray_watermarks: ExpiringBytes,
    recent: Vec<u64>,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            hasher: RandomState::new(),
            locks: ExpiringBytes::default(),
            watermarks: ExpiringBytes::default(),
            stray_watermarks: ExpiringBytes::default(),
            recent: Vec::new(),
        }
    }
}

/// Bytes that expire, grouped by expiry.
#[derive(Debug, Default)]
struct ExpiringBytes {
    /// Keyed by expiry, in milliseconds since the table began.
    groups: BTreeMap<u64, Group>,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Group {
    count: u64,
    bytes: u64,
}

/// The bytes reserved for one lock.
#[derive(Debug, Clone, Copy)]
pub(super) struct QuotaSlot {
    group_end: u64,
    bytes: u64,
    watermark: u64,
    name_hash: u64,
}

/// The change in memory use by an operation, in bytes.
pub(super) type Change = i64;

impl QuotaLedger {
    /// Reserves bytes for an acquire whose lock may last until `until` at the latest.
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
        if let Some(limit) = terms.limit {
            terms.taken.record_use(taken + bytes, limit);
        }
        if let Some(limit) = terms.limit.filter(|limit| taken + bytes > *limit) {
            return Err(Exceeded { taken, limit, retry_after: RETRY_AFTER, is_of_releases: false });
        }
        let end = table.add(|table| &mut table.locks, bytes, until + terms.watermark_life);
        let slot = QuotaSlot {
            group_end: end,
            bytes,
            watermark: watermark_bytes(name),
            name_hash: table.hasher.hash_one(name),
        };
        Ok((slot, bytes as Change))
    }

    /// Moves the reserved bytes from the latest possible end of the lock to its real end, `until`.
    pub(super) fn record_grant(&self, slot: QuotaSlot, until: Instant, terms: &Terms) {
        let mut table = self.table();
        table.locks.remove(slot.group_end, slot.bytes);
        table.add(|table| &mut table.locks, slot.bytes, until + terms.watermark_life);
    }

    /// Moves the bytes of one lock to its new end, `until`.
    pub(super) fn record_extension(&self, name: &str, until: Instant, terms: &Terms) {
        let mut table = self.table();
        let bytes = table.locks.take_earliest().unwrap_or_else(|| lock_bytes(name, 0));
        table.add(|table| &mut table.locks, bytes, until + terms.watermark_life);
    }

    /// Replaces the bytes of a lock by those of its token watermark, which stays on the masters for
    /// a while.
    pub(super) fn record_release(&self, name: &str, terms: &Terms) -> Change {
        let mut table = self.table();
        let freed = table.locks.take_earliest().unwrap_or_default() as Change;
        let name_hash = table.hasher.hash_one(name);
        table.add_watermark(|table| &mut table.watermarks, name_hash, watermark_bytes(name), terms)
            - freed
    }

    /// Consumes the reservation of a failed acquire, which may leave token watermarks on the
    /// masters.
    pub(super) fn consume(&self, slot: QuotaSlot, terms: &Terms) -> Change {
        let mut table = self.table();
        table.locks.remove(slot.group_end, slot.bytes);
        table.add_watermark(|table| &mut table.watermarks, slot.name_hash, slot.watermark, terms)
            - slot.bytes as Change
    }

    /// Refunds the reservation of an acquire that left no key on the masters.
    pub(super) fn refund(&self, slot: QuotaSlot) -> Change {
        self.table().locks.remove(slot.group_end, slot.bytes);
        -(slot.bytes as Change)
    }

    /// Checks whether releases may be tried. A release that finds no lock leaves a token watermark,
    /// and any client may send one.
    pub(super) fn check_release(&self, names: &[LockName], terms: &Terms) -> Result<(), Exceeded> {
        let Some(limit) = terms.limit else { return Ok(()) };
        let taken = self.table().stray_watermarks.bytes;
        let more: u64 = names.iter().map(|name| watermark_bytes(name.as_str())).sum();
        let fits = taken + more <= limit;
        let exceeded = Exceeded { taken, limit, retry_after: RETRY_AFTER, is_of_releases: true };
        fits.then_some(()).ok_or(exceeded)
    }

    /// Counts the token watermark of a release that found no lock of this client, or failed.
    pub(super) fn record_stray_release(&self, name: &str, terms: &Terms) -> Change {
        let mut table = self.table();
        let name_hash = table.hasher.hash_one(name);
        table.add_watermark(
            |table| &mut table.stray_watermarks,
            name_hash,
            watermark_bytes(name),
            terms,
        )
    }

    pub(super) fn is_empty(&self) -> bool {
        self.table().bytes() == 0
    }

    /// Locks the table and removes expired groups.
    fn table(&self) -> MutexGuard<'_, Table> {
        let mut table = self.0.lock();
        let now = table.millis(Instant::now());
        let Table { locks, watermarks, stray_watermarks, .. } = &mut *table;
        [locks, watermarks, stray_watermarks].into_iter().for_each(|expiring| expiring.expire(now));
        table
    }
}

impl Table {
    fn bytes(&self) -> u64 {
        self.locks.bytes + self.watermarks.bytes + self.stray_watermarks.bytes
    }

    fn millis(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.began).as_millis() as u64
    }

    fn add(
        &mut self,
        to: impl FnOnce(&mut Self) -> &mut ExpiringBytes,
        bytes: u64,
        end: Instant,
    ) -> u64 {
        let now = self.millis(Instant::now());
        let end = self.millis(end);
        to(self).add(bytes, now, end)
    }

    fn add_watermark(
        &mut self,
        to: impl FnOnce(&mut Self) -> &mut ExpiringBytes,
        name: u64,
        bytes: u64,
        terms: &Terms,
    ) -> Change {
        if self.remember(name) {
            return 0;
        }
        self.add(to, bytes, Instant::now() + terms.watermark_life);
        bytes as Change
    }

    /// Remembers the hash of a name. Returns whether it was remembered already.
    fn remember(&mut self, name: u64) -> bool {
        if self.recent.is_empty() {
            self.recent = vec![0; RECENT];
        }
        std::mem::replace(&mut self.recent[name as usize % RECENT], name) == name
    }
}

impl ExpiringBytes {
    /// Adds bytes, and returns the expiry of their group. The group expires at `end` or later: by
    /// an eighth of the remaining time at most, or by about a second if that is more.
    ///
    /// Expiries are multiples of a power of two. So a lifetime of a day has at most 120 groups, one
    /// of five minutes 60.
    fn add(&mut self, bytes: u64, now: u64, end: u64) -> u64 {
        let step = (end.saturating_sub(now) / 16).next_power_of_two().max(1024);
        let end = end.next_multiple_of(step);
        let group = self.groups.entry(end).or_default();
        group.count += 1;
        group.bytes += bytes;
        self.bytes += bytes;
        end
    }

    /// Removes one entry from its group. Does nothing if the group has expired, or if releases have
    /// already removed all of its entries.
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

    /// Removes an entry of average size from the group that ends first.
    fn take_earliest(&mut self) -> Option<u64> {
        let (&end, group) = self.groups.first_key_value()?;
        let bytes = group.bytes / group.count;
        self.remove(end, bytes);
        Some(bytes)
    }

    fn expire(&mut self, now: u64) {
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
    const WATERMARK: u64 = 186;

    fn terms(limit: Option<u64>) -> Terms {
        Terms { limit, watermark_life: SECOND * 10, ..Terms::default() }
    }

    fn take(quota: &QuotaLedger, name: &str, ttl: Duration, terms: &Terms) -> Result<(), Exceeded> {
        let until = Instant::now() + ttl;
        let (slot, _) = quota.reserve(name, 0, until, terms)?;
        quota.record_grant(slot, until, terms);
        Ok(())
    }

    fn bytes(quota: &QuotaLedger) -> u64 {
        quota.table().bytes()
    }

    /// Moves the clock forward.
    fn pass(quota: &QuotaLedger, time: Duration) {
        let mut table = quota.table();
        table.began = table.began.checked_sub(time).expect("the machine has run for longer");
    }

    #[test]
    fn nothing_is_refused_without_a_limit() {
        let quota = QuotaLedger::default();
        let free = terms(None);
        (0..100_000).for_each(|n: u32| {
            take(&quota, &n.to_string(), SECOND * 60, &free).expect("within the limit")
        });
        assert!(bytes(&quota) > 36_000_000);
        quota.check_release(&named("unknown"), &free).expect("within the limit");
    }

    fn named(name: &str) -> [LockName; 1] {
        [name.parse().expect("a name")]
    }

    #[test]
    fn a_refusal_names_both_use_and_limit() {
        let quota = QuotaLedger::default();
        let two = terms(Some(2 * LOCK + WATERMARK));
        take(&quota, "a", SECOND * 60, &two).expect("within the limit");
        take(&quota, "b", SECOND * 60, &two).expect("within the limit");
        let refused = take(&quota, "c", SECOND * 60, &two).expect_err("over the limit");
        assert_eq!((refused.taken, refused.limit), (2 * LOCK, 2 * LOCK + WATERMARK));
        assert_eq!(quota.record_release("a", &two), WATERMARK as i64 - LOCK as i64);
        take(&quota, "a", SECOND * 60, &two).expect("within the limit");
        assert_eq!(
            quota.record_release("a", &two),
            -(LOCK as i64),
            "a name's watermark counts once"
        );
    }

    #[test]
    fn metadata_counts_until_an_extended_lock_ends() {
        let quota = QuotaLedger::default();
        let free = terms(None);
        let until = Instant::now() + SECOND * 60;
        let (slot, change) = quota.reserve("a", 1000, until, &free).expect("within the limit");
        quota.record_grant(slot, until, &free);
        assert_eq!(change, LOCK as i64 + 1000);
        (0..10).for_each(|_| quota.record_extension("a", until + SECOND * 60, &free));
        assert_eq!(bytes(&quota), LOCK + 1000);
        pass(&quota, SECOND * 150);
        assert!(quota.is_empty());
    }

    #[test]
    fn another_gateways_lock_counts_once_extended_here() {
        let quota = QuotaLedger::default();
        let free = terms(None);
        quota.record_extension("a", Instant::now() + SECOND, &free);
        assert_eq!(bytes(&quota), LOCK);
    }

    #[test]
    fn a_failed_acquire_costs_a_watermark_or_nothing() {
        let quota = QuotaLedger::default();
        let free = terms(None);
        let until = Instant::now() + SECOND;
        let reserve = || quota.reserve("a", 0, until, &free).expect("within the limit").0;
        let first = reserve();
        let second = reserve();
        assert_eq!(quota.refund(first), -(LOCK as i64));
        assert_eq!(quota.consume(second, &free), WATERMARK as i64 - LOCK as i64);
        assert_eq!(bytes(&quota), WATERMARK);
        assert_eq!(
            quota.consume(reserve(), &free),
            -(LOCK as i64),
            "a name's watermark counts once"
        );
        pass(&quota, SECOND * 13);
        assert!(quota.is_empty());
    }

    #[test]
    fn stray_releases_are_limited_and_a_holders_are_not() {
        let quota = QuotaLedger::default();
        let few = terms(Some(10 * LOCK));
        (0..10).for_each(|n| {
            take(&quota, &format!("{n}"), SECOND * 60, &few).expect("within the limit")
        });
        take(&quota, "more", SECOND * 60, &few).expect_err("over the limit");
        quota.check_release(&named("0"), &few).expect("a holder may release its locks");
        let stray_watermarks = (0..1000).take_while(|n| {
            let name = format!("{n:03}");
            let refused = quota.check_release(&named(&name), &few).err();
            assert!(refused.is_none_or(|exceeded| exceeded.is_of_releases));
            let may = refused.is_none();
            may.then(|| quota.record_stray_release(&name, &few)).is_some()
        });
        assert_eq!(stray_watermarks.count() as u64, 10 * LOCK / (WATERMARK + 2));
        pass(&quota, SECOND * 13);
        quota.check_release(&named("0"), &few).expect("watermarks expire");
    }

    #[test]
    fn an_expired_group_is_not_removed_twice() {
        let quota = QuotaLedger::default();
        let free = terms(None);
        let (slot, _) = quota.reserve("a", 0, Instant::now(), &free).expect("within the limit");
        pass(&quota, SECOND * 20);
        quota.refund(slot);
        quota.record_release("b", &free);
        assert_eq!(bytes(&quota), WATERMARK);
    }

    #[test]
    fn groups_stay_few_and_end_little_later() {
        let mut expiring = ExpiringBytes::default();
        let day = 86_400_000;
        for now in (0..2 * day).step_by(3_217) {
            expiring.expire(now);
            let left = now * 7_919 % day;
            let end = expiring.add(1, now, now + left);
            assert!(
                end >= now + left && end - (now + left) <= (left / 8).max(1024),
                "{end} for {left} ms at {now}"
            );
            assert!(expiring.groups.len() <= 120, "{}", expiring.groups.len());
        }
    }
}
