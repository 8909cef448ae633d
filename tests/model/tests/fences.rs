//! Operations that the core's own node accepts or refuses after a watermark has ended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redlock_core::clock::Clock;
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::rules::fence_grace;
use redlock_core::node::{Keys, NodeSettings, Op, Reason, Record, ReleaseScope, Vote};
use redlock_core::{Info, LockName, LockToken, Ttl};

const START: u64 = 1_763_725_165_000_000;
const D: Duration = Duration::from_secs(2);

/// A clock whose wall and monotonic sides advance together, by hand.
struct Hand(AtomicU64);

impl Clock for Hand {
    fn monotonic(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }
    fn wall_micros(&self) -> u64 {
        START + self.0.load(Ordering::Relaxed)
    }
}

struct Master {
    clock: Arc<Hand>,
    node: MemoryNode,
    keys: Keys,
}

impl Master {
    fn new() -> Self {
        let clock = Arc::new(Hand(AtomicU64::new(0)));
        let node =
            MemoryNode::new("n", clock.clone(), NodeSettings::default().with_max_clock_skew(D));
        Self { clock, node, keys: Keys::new("lock:", &"a".parse::<LockName>().expect("a name")) }
    }

    fn pass(&self, time: Duration) {
        self.clock.0.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    /// A record of an owner, minted now.
    fn grant(&self, owner: char) -> Record {
        let t = self.clock.wall_micros();
        let owner = owner.to_string().repeat(32);
        Record::new(
            &format!("1.{t}.{owner}00000000").parse::<LockToken>().expect("a token"),
            &Info::default(),
        )
    }

    fn acquire(&self, record: &Record, ttl: u32) -> Vote {
        let ttl = Ttl::from_millis(ttl.into()).expect("a TTL");
        self.node.run(&Op::Acquire {
            keys: self.keys.clone(),
            record: record.clone(),
            ttl,
            tell: None,
        })
    }

    fn extend(&self, record: &Record, ttl: u32) -> Vote {
        let ttl = Ttl::from_millis(ttl.into()).expect("a TTL");
        let (keys, record, began_micros) =
            (self.keys.clone(), record.clone(), self.clock.wall_micros());
        self.node.run(&Op::Extend { keys, record, ttl, began_micros })
    }

    fn repair(&self, record: &Record, began_micros: u64) -> Vote {
        let ttl = Ttl::from_millis(10_000).expect("a TTL");
        self.node.run(&Op::Repair {
            keys: self.keys.clone(),
            record: record.clone(),
            ttl,
            began_micros,
        })
    }

    fn release(&self, record: &Record, scope: ReleaseScope) -> Vote {
        self.node.run(&Op::Release {
            keys: self.keys.clone(),
            record: record.clone(),
            scope,
            tell: None,
        })
    }
}

/// B asks while A holds the lock, and its request times out. B's undo leaves a tombstone under A's
/// lock. A releases just before that tombstone ends, and an extension of A runs at the same time.
#[test]
fn release_prolongs_a_watermark_about_to_end() {
    let master = Master::new();
    let held = master.grant('a');
    assert_eq!(master.acquire(&held, 1_000), Vote::Granted);
    master.pass(Duration::from_millis(1));
    let failed = master.grant('b');
    assert!(matches!(master.release(&failed, ReleaseScope::Proposal), Vote::Held(_)));
    // The tombstone was set for the lock's life at that time. It ends a millisecond after A's
    // release.
    let last = Duration::from_secs(1) + fence_grace(D) - Duration::from_millis(1);
    while master.clock.monotonic() < last {
        assert!(matches!(master.extend(&held, 1_000), Vote::Extended { .. }));
        master.pass((last - master.clock.monotonic()).min(Duration::from_millis(500)));
    }
    let began = master.clock.wall_micros();
    assert_eq!(master.release(&held, ReleaseScope::Holder), Vote::Released);
    master.pass(Duration::from_millis(5));
    // A's extension reaches this node after the release and finds no lock. A majority of other
    // nodes extends, so a repair follows.
    let repaired = master.repair(&held, began);
    assert!(matches!(repaired, Vote::Stale { .. }), "a released lock is back: {repaired:?}");
}

/// The node's memory is full, so an extension cannot set its mark. But it prolongs the lock, which
/// then outlives its watermark.
#[test]
fn release_replaces_a_watermark_that_ended_before_its_lock() {
    let master = Master::new();
    let held = master.grant('a');
    assert_eq!(master.acquire(&held, 1_000), Vote::Granted);
    master.node.limit_sets(Some(0));
    assert!(matches!(master.extend(&held, 60_000), Vote::Failed(_)));
    master.node.limit_sets(None);
    master.pass(Duration::from_secs(2) + fence_grace(D));
    let began = master.clock.wall_micros();
    master.release(&held, ReleaseScope::Holder);
    let repaired = master.repair(&held, began);
    assert!(matches!(repaired, Vote::Stale { .. }), "a released lock is back: {repaired:?}");
}

/// A known limit, not a promise: a release has reached only this node, and the holder extends the
/// lock on the other nodes through another gateway.
#[test]
fn late_extension_sets_the_lock_again() {
    let master = Master::new();
    let held = master.grant('a');
    assert_eq!(master.release(&held, ReleaseScope::Holder), Vote::Missing);
    let began = master.clock.wall_micros();
    assert!(matches!(master.repair(&held, began), Vote::Stale { .. }));
    master.pass(fence_grace(D) + Duration::from_millis(1));
    let too_old = master.repair(&held, began);
    assert!(
        matches!(&too_old, Vote::Failed(failure) if failure.reason == Reason::Clock),
        "{too_old:?}"
    );
    assert_eq!(master.repair(&held, master.clock.wall_micros()), Vote::Granted);
}

/// Others ask for a lock that was released, and fail. Each undo restores the watermark of the
/// release, which keeps its end.
#[test]
fn failed_proposals_neither_shorten_nor_prolong_a_watermark() {
    let master = Master::new();
    let held = master.grant('a');
    assert_eq!(master.acquire(&held, 60_000), Vote::Granted);
    assert_eq!(master.release(&held, ReleaseScope::Holder), Vote::Released);
    let end = master.clock.monotonic() + fence_grace(D);
    let fail = || {
        master.pass(Duration::from_millis(1));
        let failed = master.grant('b');
        assert_eq!(master.acquire(&failed, 100_000), Vote::Granted);
        assert_eq!(master.release(&failed, ReleaseScope::Proposal), Vote::Released);
    };
    fail();
    master.pass(Duration::from_secs(5));
    fail();
    master.pass(end - master.clock.monotonic());
    let repaired = master.repair(&held, master.clock.wall_micros());
    assert!(matches!(repaired, Vote::Stale { .. }), "a released lock is back: {repaired:?}");
    // The undo of this proposal comes after the end, which is rounded up to seconds.
    let failed = master.grant('c');
    assert_eq!(master.acquire(&failed, 100_000), Vote::Granted);
    master.pass(Duration::from_secs(2));
    assert_eq!(master.release(&failed, ReleaseScope::Proposal), Vote::Released);
    assert_eq!(master.repair(&held, master.clock.wall_micros()), Vote::Granted);
}
