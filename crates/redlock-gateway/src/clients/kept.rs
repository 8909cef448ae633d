//! What a client keeps on the masters, as far as it went through this gateway, and how much of it is allowed.
//!
//! It bounds what one client can do to the masters' memory, and nothing rests on it: a lock that another gateway granted is
//! not known here until it is extended here, and a restarted gateway begins with nothing. With G gateways a client may keep
//! G times as much.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::config::Quota;

/// Names in use lately, which are not new when they come again. The place of a name follows from its hash, and a newer one
/// takes it.
const RECENT: usize = 256;
/// Of a name whose lock and fence stand on a master, roughly, in bytes: two keys with their values and what Redis needs for them.
const OVERHEAD: usize = 300;
/// New names of a client that may come at once, if so many are allowed in a minute.
const FEW: usize = 1000;
/// With fewer locks none is looked for that has ended.
const MANY: usize = 1024;

/// A quota that is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exceeded {
    pub what: Limited,
    /// How much is allowed.
    pub most: usize,
    pub retry_after: Duration,
}

/// What there is a quota of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limited {
    Locks,
    Bytes,
    NewNames,
}

impl Limited {
    pub const ALL: [Self; 3] = [Self::Locks, Self::Bytes, Self::NewNames];

    /// As a label of metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Locks => "locks",
            Self::Bytes => "bytes",
            Self::NewNames => "new_names",
        }
    }
}

/// What one client keeps.
#[derive(Debug, Default)]
pub(super) struct Kept(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    hasher: RandomState,
    /// By the hash of the name. Those that have ended go when there are many.
    locks: HashMap<u64, Lock, BuildHasherDefault<AsItIs>>,
    bytes: usize,
    /// So many, or at the quota, and those that have ended are looked for.
    sweep_at: usize,
    swept: Option<Instant>,
    recent: Vec<u64>,
    /// New names that have been counted and have not run out of the bucket again.
    new_names: f64,
    counted: Option<Instant>,
}

/// For keys that are hashes, with a secret, already.
#[derive(Debug, Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[derive(Debug)]
struct Lock {
    until: Instant,
    bytes: usize,
    /// Its fencing token; 0 while it is asked for.
    grant: u64,
}

/// Room that was made for a lock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Room {
    hash: u64,
    bytes: usize,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// This client has it, or asks for it, already.
    Known,
    /// It counts as a new name.
    New,
    /// Its name was used lately.
    Again,
}

/// What a release was counted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Release {
    /// Of a lock that this client has, or had lately.
    Known,
    /// Of a new name, until it turns out that it was this client's.
    Counted,
}

impl Kept {
    /// Makes room for a lock that is asked for, until then at the latest.
    pub(super) fn reserve(&self, name: &str, info: usize, until: Instant, quota: &Quota) -> Result<Room, Exceeded> {
        let mut table = self.table();
        let now = Instant::now();
        let (hash, bytes) = (table.hasher.hash_one(name), bytes(name, info));
        if table.locks.get(&hash).is_some_and(|lock| lock.until > now) {
            return Ok(Room { hash, bytes, kind: Kind::Known });
        }
        table.make_room(now, bytes, quota)?;
        let is_recent = table.is_recent(hash);
        if !is_recent {
            table.count_name(now, quota)?;
        }
        table.put(hash, Lock { until, bytes, grant: 0 });
        Ok(Room { hash, bytes, kind: if is_recent { Kind::Again } else { Kind::New } })
    }

    /// The lock was granted with this fencing token, until then.
    pub(super) fn granted(&self, room: Room, grant: u64, until: Instant) {
        let mut table = self.table();
        // It was known for another request's sake, which has been forgiven since.
        if room.kind == Kind::Known && !table.locks.contains_key(&room.hash) && !table.is_recent(room.hash) {
            table.new_names += 1.0;
        }
        table.hold(room.hash, Lock { until, bytes: room.bytes, grant });
    }

    /// This grant was extended until then.
    pub(super) fn extended(&self, name: &str, grant: u64, until: Instant) {
        let mut table = self.table();
        let hash = table.hasher.hash_one(name);
        table.hold(hash, Lock { until, bytes: bytes(name, 0), grant });
    }

    /// This grant was released. Another request of this client may have been granted the lock since.
    pub(super) fn released(&self, name: &str, grant: u64, release: Release) {
        let mut table = self.table();
        let hash = table.hasher.hash_one(name);
        if table.locks.get(&hash).is_some_and(|lock| lock.grant <= grant) {
            table.remove(hash);
        }
        if release == Release::Counted {
            table.forget_one();
        }
    }

    /// It was not granted. What was tried leaves fences on the masters, so its name is not new again.
    pub(super) fn give_up(&self, room: Room) {
        let mut table = self.table();
        table.give_back(room);
        table.remember(room.hash);
    }

    /// No key is left of this try.
    pub(super) fn forgive(&self, room: Room) {
        let mut table = self.table();
        // Unless another request of this client was granted the lock: then this one's count stands for both.
        if table.give_back(room) && room.kind == Kind::New {
            table.forget_one();
        }
    }

    /// A release of a name that is not known to be this client's may leave a fence, like a name that is asked for.
    pub(super) fn count_release(&self, name: &str, quota: &Quota) -> Result<Release, Exceeded> {
        let mut table = self.table();
        let hash = table.hasher.hash_one(name);
        if table.locks.contains_key(&hash) || table.is_recent(hash) {
            return Ok(Release::Known);
        }
        table.count_name(Instant::now(), quota)?;
        table.remember(hash);
        Ok(Release::Counted)
    }

    pub(super) fn is_empty(&self) -> bool {
        let mut table = self.table();
        table.sweep(Instant::now());
        table.locks.is_empty() && table.counted.is_none_or(|at| at.elapsed() > Duration::from_secs(60))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn bytes(name: &str, info: usize) -> usize {
    OVERHEAD + 2 * name.len() + info
}

impl Table {
    /// Masters never shorten a lock, and another request of this client may have outlived an older grant.
    fn hold(&mut self, hash: u64, lock: Lock) {
        match self.locks.get_mut(&hash) {
            Some(known) if known.grant == lock.grant => known.until = known.until.max(lock.until),
            Some(known) if known.grant > lock.grant => {}
            Some(_) | None => self.put(hash, lock),
        }
        self.remember(hash);
    }

    fn make_room(&mut self, now: Instant, bytes: usize, quota: &Quota) -> Result<(), Exceeded> {
        let fits = self.fits(bytes, quota);
        // Whoever is at the limit must not have all of it looked through each time.
        let is_due = self.swept.is_none_or(|at| now.saturating_duration_since(at) >= Duration::from_millis(100));
        if self.locks.len() < self.sweep_at.max(MANY) && (fits.is_ok() || !is_due) {
            return fits;
        }
        self.sweep(now);
        self.fits(bytes, quota)
    }

    fn fits(&self, bytes: usize, quota: &Quota) -> Result<(), Exceeded> {
        let exceeded = |what, most| Err(Exceeded { what, most, retry_after: Duration::from_secs(1) });
        if self.locks.len() >= quota.max_locks_per_client {
            exceeded(Limited::Locks, quota.max_locks_per_client)
        } else if self.bytes + bytes > quota.max_bytes_per_client {
            exceeded(Limited::Bytes, quota.max_bytes_per_client)
        } else {
            Ok(())
        }
    }

    fn sweep(&mut self, now: Instant) {
        self.locks.retain(|_, lock| lock.until > now);
        self.bytes = self.locks.values().map(|lock| lock.bytes).sum();
        (self.sweep_at, self.swept) = (self.locks.len() * 2, Some(now));
    }

    /// A leaky bucket. It holds what 10 seconds bring, for which fences last, or a few.
    fn count_name(&mut self, now: Instant, quota: &Quota) -> Result<(), Exceeded> {
        let most = quota.max_new_names_per_minute;
        let passed = self.counted.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let rate = most as f64 / 60.0;
        self.new_names = (self.new_names - passed.as_secs_f64() * rate).max(0.0);
        self.counted = Some(now);
        let over = self.new_names + 1.0 - most.min(FEW.max(most / 6)) as f64;
        if over > 0.0 {
            return Err(Exceeded { what: Limited::NewNames, most, retry_after: Duration::from_secs_f64(over / rate) });
        }
        self.new_names += 1.0;
        Ok(())
    }

    fn forget_one(&mut self) {
        self.new_names = (self.new_names - 1.0).max(0.0);
    }

    /// Whether it was still there, and nobody's but this request's.
    fn give_back(&mut self, Room { hash, kind, .. }: Room) -> bool {
        let is_asked_for = kind != Kind::Known && self.locks.get(&hash).is_some_and(|lock| lock.grant == 0);
        if is_asked_for {
            self.remove(hash);
        }
        is_asked_for
    }

    fn put(&mut self, hash: u64, lock: Lock) {
        self.bytes += lock.bytes;
        if let Some(before) = self.locks.insert(hash, lock) {
            self.bytes -= before.bytes;
        }
    }

    fn remove(&mut self, hash: u64) {
        if let Some(lock) = self.locks.remove(&hash) {
            self.bytes -= lock.bytes;
        }
    }

    fn is_recent(&self, hash: u64) -> bool {
        self.recent.get(hash as usize % RECENT) == Some(&hash)
    }

    fn remember(&mut self, hash: u64) {
        if self.recent.is_empty() {
            self.recent = vec![0; RECENT];
        }
        self.recent[hash as usize % RECENT] = hash;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn quota(locks: usize, bytes: usize, names: usize) -> Quota {
        Quota { max_locks_per_client: locks, max_bytes_per_client: bytes, max_new_names_per_minute: names }
    }

    fn takes(kept: &Kept, name: &str, info: usize, quota: &Quota) -> Result<Kind, Limited> {
        let until = Instant::now() + SECOND * 60;
        let room = kept.reserve(name, info, until, quota).map_err(|exceeded| exceeded.what)?;
        kept.granted(room, 1, until);
        Ok(room.kind)
    }

    #[test]
    fn locks_are_counted_until_they_are_released_or_have_ended() {
        let (kept, two) = (Kept::default(), quota(2, usize::MAX, 100));
        assert_eq!((takes(&kept, "a", 0, &two), takes(&kept, "b", 0, &two)), (Ok(Kind::New), Ok(Kind::New)));
        assert_eq!((takes(&kept, "a", 0, &two), takes(&kept, "c", 0, &two)), (Ok(Kind::Known), Err(Limited::Locks)));
        kept.released("a", 1, Release::Known);
        assert_eq!(takes(&kept, "c", 0, &two), Ok(Kind::New));
        kept.released("b", 1, Release::Known);
        kept.extended("b", 2, Instant::now() - SECOND);
        kept.table().swept = None;
        assert_eq!(takes(&kept, "d", 0, &two), Ok(Kind::New));
    }

    #[test]
    fn bytes_are_counted_with_the_name_and_what_is_stored_beside_it() {
        let (kept, small) = (Kept::default(), quota(100, 2 * OVERHEAD + 1_000, 100));
        assert_eq!(takes(&kept, "a", 500, &small), Ok(Kind::New));
        assert_eq!(takes(&kept, &"n".repeat(255), 0, &small), Err(Limited::Bytes));
        assert_eq!(takes(&kept, "b", 400, &small), Ok(Kind::New));
        kept.released("a", 1, Release::Known);
        kept.released("b", 1, Release::Known);
        assert_eq!(kept.table().bytes, 0);
    }

    #[test]
    fn a_name_that_was_used_lately_or_was_not_granted_is_no_new_one() {
        let (kept, few) = (Kept::default(), quota(100, usize::MAX, 2));
        assert_eq!(takes(&kept, "hot", 0, &few), Ok(Kind::New));
        for _ in 0..10 {
            kept.released("hot", 1, Release::Known);
            assert_eq!(takes(&kept, "hot", 0, &few), Ok(Kind::Again));
            let room = kept.reserve("held by another", 0, Instant::now() + SECOND, &few).unwrap();
            assert_eq!(room.kind, Kind::New);
            kept.forgive(room);
        }
        assert_eq!(takes(&kept, "b", 0, &few), Ok(Kind::New));
        let refused = kept.reserve("c", 0, Instant::now() + SECOND, &few).unwrap_err();
        assert_eq!((refused.what, refused.most), (Limited::NewNames, 2));
        // Two a minute are one in half a minute.
        assert!((SECOND * 25..=SECOND * 30).contains(&refused.retry_after), "{refused:?}");
        kept.table().counted = Instant::now().checked_sub(SECOND * 30);
        assert_eq!(takes(&kept, "c", 0, &few), Ok(Kind::New));
    }

    #[test]
    fn tries_that_fail_and_releases_of_what_is_not_known_count_as_new_names_but_not_again_and_again() {
        let (kept, few, until) = (Kept::default(), quota(100, usize::MAX, 3), Instant::now() + SECOND);
        for _ in 0..10 {
            kept.give_up(kept.reserve("a", 0, until, &few).unwrap());
        }
        assert_eq!(takes(&kept, "b", 0, &few), Ok(Kind::New));
        assert_eq!(kept.count_release("b", &few), Ok(Release::Known));
        assert_eq!(kept.count_release("c", &few), Ok(Release::Counted));
        assert_eq!(kept.count_release("c", &few), Ok(Release::Known));
        assert_eq!(kept.count_release("d", &few).unwrap_err().what, Limited::NewNames);
        assert_eq!(takes(&kept, "e", 0, &few), Err(Limited::NewNames));
        // It was the client's, by another gateway.
        kept.released("c", 1, Release::Counted);
        assert_eq!(takes(&kept, "e", 0, &few), Ok(Kind::New));
    }

    #[test]
    fn a_name_that_two_requests_ask_for_at_once_counts_whichever_of_them_is_granted_it() {
        let (kept, many, until) = (Kept::default(), quota(100, usize::MAX, 100), Instant::now() + SECOND * 60);
        let asks = |name| kept.reserve(name, 0, until, &many).unwrap();
        let (first, second) = (asks("a"), asks("a"));
        kept.granted(second, 1, until);
        kept.forgive(first);
        assert_eq!(kept.table().new_names.ceil(), 1.0);
        let (first, second) = (asks("b"), asks("b"));
        kept.forgive(first);
        kept.granted(second, 2, until);
        assert_eq!(kept.table().new_names.ceil(), 2.0);
        let (first, second) = (asks("c"), asks("c"));
        kept.granted(first, 3, until);
        kept.forgive(second);
        assert_eq!(kept.table().new_names.ceil(), 3.0);
    }

    #[test]
    fn no_more_names_come_at_once_than_fences_of_ten_seconds() {
        let (kept, many) = (Kept::default(), quota(100_000, usize::MAX, 60_000));
        let taken = (0..20_000).filter(|number| takes(&kept, &number.to_string(), 0, &many).is_ok()).count();
        assert!((10_000..12_000).contains(&taken), "{taken}");
    }

    #[test]
    fn a_short_extension_of_a_long_lock_frees_nothing() {
        let (kept, one) = (Kept::default(), quota(1, usize::MAX, 100));
        assert_eq!(takes(&kept, "a", 0, &one), Ok(Kind::New));
        kept.extended("a", 1, Instant::now() - SECOND);
        kept.table().swept = None;
        assert_eq!(takes(&kept, "b", 0, &one), Err(Limited::Locks));
    }

    #[test]
    fn what_another_request_of_the_client_was_granted_stays_counted() {
        let (kept, one, until) = (Kept::default(), quota(1, usize::MAX, 100), Instant::now() + SECOND * 60);
        let waits = kept.reserve("a", 0, until, &one).unwrap();
        kept.extended("a", 7, until);
        kept.forgive(waits);
        assert_eq!(takes(&kept, "b", 0, &one), Err(Limited::Locks), "the one that waited has given up");
        kept.extended("a", 8, until);
        kept.released("a", 7, Release::Known);
        assert_eq!(takes(&kept, "b", 0, &one), Err(Limited::Locks), "it was handed on");
    }
}
