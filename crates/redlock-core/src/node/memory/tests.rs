//! Regression tests of the node in memory.

#![cfg(test)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::model::clock::{Entropy, OsEntropy, SystemClock};
use crate::model::types::{Info, LockToken, Ttl};
use crate::node::{Effect, ReleaseScope};

/// On a busy machine a test may stand still for seconds between two operations, so clocks may differ by
/// an hour.
fn settings() -> NodeSettings {
    NodeSettings::default().with_max_clock_skew(Duration::from_secs(3600))
}

#[test]
fn a_snapshot_restores_on_another_node() {
    let [one, other] =
        ["one", "other"].map(|name| MemoryNode::new(name, Arc::new(SystemClock), settings()));
    let keys = Keys::new("lock:", &"job".parse::<LockName>().unwrap());
    let (owner, nonce) = OsEntropy.owner_and_nonce();
    let t = FencingToken::new(SystemClock.wall_micros()).unwrap();
    let record = Record::new(&LockToken::new(owner, nonce, t), &Info::default());
    let ttl = Ttl::from_millis(30_000).unwrap();
    assert_eq!(
        one.run(&Op::Acquire { keys: keys.clone(), record, ttl, tell: None }),
        Vote::Granted
    );
    other.restore(one.snapshot());
    assert!(matches!(other.run(&Op::Inspect { keys }), Vote::Found(_)));
}

/// Earlier, an extension marked the watermark first. Memory could run out before the extension
/// marked the lock. Then the release of the unmarked lock left the mark on the watermark, and a
/// late repair passed.
#[test]
fn no_repair_after_a_release_however_an_extension_failed() {
    let node = MemoryNode::new("n", Arc::new(SystemClock), settings());
    let keys = Keys::new("lock:", &"job".parse::<LockName>().unwrap());
    let ttl = Ttl::from_millis(30_000).unwrap();
    for sets in 0..4 {
        let (owner, nonce) = OsEntropy.owner_and_nonce();
        let t = FencingToken::new(SystemClock.wall_micros() + sets).unwrap();
        let record = Record::new(&LockToken::new(owner, nonce, t), &Info::default());
        let acquire = Op::Acquire { keys: keys.clone(), record: record.clone(), ttl, tell: None };
        assert_eq!(node.run(&acquire), Vote::Granted);
        node.limit_sets(Some(sets as u32));
        let extended = node.run(&Op::Extend {
            keys: keys.clone(),
            record: record.clone(),
            ttl,
            began_micros: SystemClock.wall_micros(),
        });
        node.limit_sets(None);
        assert_eq!(matches!(extended, Vote::Extended { .. }), sets >= 2, "{extended:?}");
        let release = Op::Release {
            keys: keys.clone(),
            record: record.clone(),
            scope: ReleaseScope::Holder,
            tell: None,
        };
        assert_eq!(node.run(&release), Vote::Released);
        let began_micros = SystemClock.wall_micros();
        let repaired = node.run(&Op::Repair { keys: keys.clone(), record, ttl, began_micros });
        assert!(
            matches!(repaired, Vote::Stale { .. }),
            "with memory for {sets} keys: {repaired:?}"
        );
    }
}

/// The release has deleted the lock, but the watermark still has the mark of the extension. With that
/// mark, a late repair would set the lock again. So the gateway must repeat the release.
#[test]
fn a_release_without_memory_for_its_tombstone_fails_until_there_is_memory() {
    let node = MemoryNode::new("n", Arc::new(SystemClock), settings());
    let keys = Keys::new("lock:", &"job".parse::<LockName>().unwrap());
    let ttl = Ttl::from_millis(30_000).unwrap();
    let (owner, nonce) = OsEntropy.owner_and_nonce();
    let began_micros = SystemClock.wall_micros();
    let t = FencingToken::new(began_micros).unwrap();
    let record = Record::new(&LockToken::new(owner, nonce, t), &Info::default());
    let acquire = Op::Acquire { keys: keys.clone(), record: record.clone(), ttl, tell: None };
    assert_eq!(node.run(&acquire), Vote::Granted);
    let extend = Op::Extend { keys: keys.clone(), record: record.clone(), ttl, began_micros };
    assert!(matches!(node.run(&extend), Vote::Extended { .. }));
    let (keys_of_release, scope) = (keys.clone(), ReleaseScope::Holder);
    let release = Op::Release { keys: keys_of_release, record: record.clone(), scope, tell: None };
    node.limit_sets(Some(0));
    let refused = node.run(&release);
    assert!(
        matches!(&refused, Vote::Failed(failure) if failure.effect == Effect::Possible),
        "{refused:?}"
    );
    node.limit_sets(None);
    assert_eq!(node.run(&release), Vote::Missing);
    let repaired = node.run(&Op::Repair { keys, record, ttl, began_micros });
    assert!(matches!(repaired, Vote::Stale { .. }), "{repaired:?}");
}

/// A clock that moves by 1 ms each time it is read.
#[derive(Default)]
struct Hasty(AtomicU64);

impl Clock for Hasty {
    fn monotonic(&self) -> Duration {
        Duration::from_millis(self.0.fetch_add(1, Ordering::Relaxed))
    }
    fn wall_micros(&self) -> u64 {
        SystemClock.wall_micros()
    }
}

/// Earlier, if a lock ended during an inspection, the answer said that it never ends.
#[test]
fn time_stands_still_during_an_operation() {
    let node = MemoryNode::new("n", Arc::new(Hasty::default()), settings());
    let keys = Keys::new("lock:", &"job".parse::<LockName>().unwrap());
    let (owner, nonce) = OsEntropy.owner_and_nonce();
    let t = FencingToken::new(SystemClock.wall_micros()).unwrap();
    let record = Record::new(&LockToken::new(owner, nonce, t), &Info::default());
    let ttl = Ttl::from_millis(20).unwrap();
    let acquire = Op::Acquire { keys: keys.clone(), record, ttl, tell: None };
    assert_eq!(node.run(&acquire), Vote::Granted);
    let inspect = Op::Inspect { keys };
    let lives = std::iter::from_fn(|| match node.run(&inspect) {
        Vote::Found(holding) => Some(holding.expires_in.expect("the lock ends")),
        Vote::Missing => None,
        other => panic!("{other:?}"),
    });
    let lives: Vec<_> = lives.collect();
    assert!(lives.is_sorted_by(|one, next| one > next), "{lives:?}");
    assert_eq!(
        lives.last(),
        Some(&Duration::ZERO),
        "a lock stands until its last millisecond ends"
    );
}

#[test]
fn reusing_one_name_takes_no_more_memory() {
    let node = MemoryNode::new("n", Arc::new(SystemClock), settings());
    let keys = Keys::new("lock:", &"job".parse::<LockName>().unwrap());
    let ttl = Ttl::from_millis(30_000).unwrap();
    let now = SystemClock.wall_micros();
    for cycle in 0..1_000 {
        let (owner, nonce) = OsEntropy.owner_and_nonce();
        let token = LockToken::new(owner, nonce, FencingToken::new(now + cycle).unwrap());
        let record = Record::new(&token, &Info::default());
        assert_eq!(
            node.run(&Op::Acquire { keys: keys.clone(), record: record.clone(), ttl, tell: None }),
            Vote::Granted
        );
        let extended = node.run(&Op::Extend {
            keys: keys.clone(),
            record: record.clone(),
            ttl,
            began_micros: SystemClock.wall_micros(),
        });
        assert!(matches!(extended, Vote::Extended { .. }), "{extended:?}");
        assert_eq!(
            node.run(&Op::Release {
                keys: keys.clone(),
                record,
                scope: ReleaseScope::Holder,
                tell: None
            }),
            Vote::Released
        );
    }
    let store = node.lock();
    assert_eq!((store.entries.len(), store.expiries.len()), (1, 1), "only the watermark is left");
}

#[test]
fn a_limited_node_reports_memory_and_refuses_writes_beyond() {
    let max = 200_000;
    let node = MemoryNode::new("n", Arc::new(SystemClock), settings()).with_max_memory(max);
    let memory = || node.status().borrow().memory.expect("memory is reported");
    assert_eq!((memory().used, memory().max), (0, max));
    let fits = |n: u32| node.set_foreign(n.to_string().as_bytes(), &[0; 1000], None);
    let stored = (0..1000).take_while(|n| fits(*n)).count() as u64;
    assert!((150..=180).contains(&stored), "{stored} keys of 1,000 bytes");
    let inspect = || {
        node.run(&Op::Inspect {
            keys: Keys::new("lock:", &"job".parse::<LockName>().expect("a name")),
        })
    };
    inspect();
    assert!(memory().used > max, "{:?}", memory());
    let before = node.snapshot();
    node.wipe();
    inspect();
    assert_eq!(memory().used, 0);
    node.restore(before);
    inspect();
    assert!(memory().used > max, "{:?}", memory());
}

#[test]
fn bytes_in_use_follow_every_change_of_keys() {
    let node = MemoryNode::new("n", Arc::new(SystemClock), settings());
    let used = || node.lock().bytes;
    node.set_foreign(b"a", &[0; 100], None);
    let once = used();
    node.set_foreign(b"a", &[0; 100], Some(Duration::ZERO));
    assert_eq!(used(), once);
    node.set_foreign(b"b", &[0; 100], None);
    node.lock().delete(&Bytes::from_static(b"b"));
    assert_eq!(used(), once);
    std::iter::repeat_with(|| node.lock().expire_some()).find(|()| used() == 0);
    assert_eq!(node.key_count(), 0);
}
