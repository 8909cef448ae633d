//! What every node promises, as one table that runs on a master in memory and on a real redis-server, and below it what
//! only a real server can show: batches, lost connections, restarts, credentials and nodes that are unfit to vote.
//!
//! A test submits operations and looks at votes. What is stored is read through `Inspect`, so that both kinds of node
//! are seen with the same eyes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redlock_core::clock::SystemClock;
use redlock_core::node::admission::Generation;
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::redis::{NewMarker, RedisSettings, overwrite_marker};
use redlock_core::node::{Effect, Holding, Keys, Node, NodeSettings, NodeState, Op, Reason, Record, Remedy, Vote};
use redlock_core::{FencingToken, Info};
use tokio::time::Instant;

use crate::harness::{DeadPort, RedisOptions, RedisServer, Resp, eventually};
use crate::nodes::{
    Calls, LONG_MS, Lock, Pending, ask, assert_failed, failure, generation, in_state, lane, lane_with, name, now,
    record, redis_settings, strict_lane, submit, submit_until, token, ttl, votes,
};

#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Memory,
    Redis,
}

/// A node under test, and the hands of somebody else who can reach its data.
pub(crate) struct Subject {
    pub(crate) node: Arc<dyn Node>,
    backing: Backing,
}

enum Backing {
    Memory(Arc<MemoryNode>),
    Redis(RedisServer),
}

impl Kind {
    pub(crate) async fn subject(self, settings: NodeSettings) -> Subject {
        match self {
            Self::Memory => {
                let node = Arc::new(MemoryNode::new("memory", Arc::new(SystemClock), settings));
                Subject { node: node.clone(), backing: Backing::Memory(node) }
            }
            Self::Redis => {
                let server = RedisServer::start();
                let node = lane_with(&server.url(), redis_settings(settings), Arc::new(Calls::default()));
                in_state(node.as_ref(), NodeState::Admitted).await;
                Subject { node, backing: Backing::Redis(server) }
            }
        }
    }
}

impl Subject {
    pub(crate) async fn ask(&self, op: Op) -> Vote {
        ask(self.node.as_ref(), op).await
    }

    /// SET by another client.
    pub(crate) fn set_foreign(&self, key: &[u8], value: &[u8], life: Option<Duration>) {
        match &self.backing {
            Backing::Memory(node) => node.set_foreign(key, value, life),
            Backing::Redis(server) => {
                let _ = match life {
                    None => server.cmd(&[b"SET", key, value]),
                    Some(life) => server.cmd(&[b"SET", key, value, b"PX", life.as_millis().to_string().as_bytes()]),
                };
            }
        }
    }

    /// The loss of everything, the marker included.
    pub(crate) fn wipe(&self) {
        match &self.backing {
            Backing::Memory(node) => node.wipe(),
            Backing::Redis(server) => drop(server.cmd(&["FLUSHALL"])),
        }
    }

    /// T and owner that are stored, and the remaining life.
    pub(crate) async fn stored(&self, lock: &Lock) -> Option<(Record, Option<Duration>)> {
        match self.ask(lock.inspect()).await {
            Vote::Found(Holding { record, expires_in }) => Some((record, expires_in)),
            Vote::Missing => None,
            other => panic!("not an inspection's answer: {other:?}"),
        }
    }

    /// The fence's T, whatever its mark.
    pub(crate) async fn fence(&self, lock: &Lock) -> Option<u64> {
        match self.ask(lock.inspect_fence()).await {
            Vote::Found(holding) => {
                let text = std::str::from_utf8(holding.record.as_bytes()).expect("digits");
                Some(text[..16].parse().expect("digits"))
            }
            Vote::Missing => None,
            other => panic!("not an inspection's answer: {other:?}"),
        }
    }
}

async fn subject(kind: Kind) -> Subject {
    kind.subject(NodeSettings::default()).await
}

/// The remaining life is what was asked for, less what a slow machine may have used up.
#[track_caller]
fn assert_lives(left: Option<Duration>, asked_ms: u64) {
    let asked = Duration::from_millis(asked_ms);
    let left = left.expect("a key with an expiry");
    assert!(left <= asked && left + Duration::from_secs(10) > asked, "{left:?} left of {asked:?}");
}

#[track_caller]
fn assert_held(vote: &Vote, by: &Record, asked_ms: u64) {
    let Vote::Held(Holding { record, expires_in }) = vote else { panic!("expected Held, got {vote:?}") };
    assert_eq!(record, by);
    assert_lives(*expires_in, asked_ms);
}

fn fencing(t: u64) -> FencingToken {
    FencingToken::new(t).expect("16 digits")
}

macro_rules! contract {
    ($($case:ident)*) => {
        mod in_memory {
            $(#[tokio::test] async fn $case() { super::$case(super::Kind::Memory).await })*
        }
        mod on_redis {
            $(#[tokio::test] async fn $case() { super::$case(super::Kind::Redis).await })*
        }
    };
}

contract! {
    a_free_lock_is_granted_with_exactly_its_record_and_ttl
    a_lock_of_another_owner_is_held_with_what_is_left_of_it
    a_t_not_above_the_fence_is_stale_on_a_free_lock
    the_same_owner_gets_its_lock_again_in_both_keys_and_never_a_shorter_one
    the_same_owner_with_an_old_t_is_stale
    an_extension_prolongs_and_never_shortens
    an_extension_of_a_grant_that_its_owner_has_replaced_is_refused
    a_heal_sets_a_lock_that_was_lost_or_has_ended_after_an_extension
    a_heal_brings_no_lock_back_that_was_released_or_granted_anew
    an_extension_of_an_absent_or_foreign_lock_creates_nothing
    a_release_deletes_exactly_its_own_grant
    a_release_with_an_older_t_keeps_the_newer_grant
    a_release_with_a_newer_t_takes_the_older_grant_along
    a_release_of_an_absent_lock_bars_the_acquire_it_overtook
    a_release_never_lowers_a_fence
    a_t_far_from_the_nodes_time_is_refused_and_leaves_nothing
    a_failed_try_takes_back_its_own_fence_and_no_barrier
    a_release_from_the_far_future_leaves_no_fence
    a_fence_outlives_its_lock_and_not_its_retention
    a_fence_that_is_no_number_is_an_error_and_grants_nothing
    a_lock_expires_by_itself
    a_value_of_another_client_holds_the_lock_with_and_without_expiry
    a_scan_gives_every_key_of_its_prefix_in_pages
    a_scan_takes_its_prefix_literally
    without_its_marker_a_node_refuses_to_acquire_extend_and_heal_and_still_releases
    records_keep_their_text_for_people
}

async fn a_free_lock_is_granted_with_exactly_its_record_and_ttl(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.inspect()).await, Vote::Missing);
    assert_eq!(s.ask(a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    let (stored, left) = s.stored(&a).await.unwrap();
    assert_eq!(stored, record(1, t));
    assert_lives(left, LONG_MS);
    assert_eq!(s.fence(&a).await, Some(t));
}

async fn a_lock_of_another_owner_is_held_with_what_is_left_of_it(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    // Held is the answer whether the T of the loser is larger or smaller.
    for other in [t + 1, t, t - 1] {
        assert_held(&s.ask(a.acquire(2, other, LONG_MS)).await, &record(1, t), LONG_MS);
    }
    assert_held(&s.ask(a.release(2, t + 2)).await, &record(1, t), LONG_MS);
    assert_eq!(s.stored(&a).await.unwrap().0, record(1, t));
}

async fn a_t_not_above_the_fence_is_stale_on_a_free_lock(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(s.ask(a.release(1, t)).await, Vote::Released);
    for old in [t, t - 1] {
        assert_eq!(s.ask(a.acquire(2, old, LONG_MS)).await, Vote::Stale { fence: fencing(t) });
    }
    assert_eq!(s.ask(a.inspect()).await, Vote::Missing);
    assert_eq!(s.ask(a.acquire(2, t + 1, LONG_MS)).await, Vote::Granted);
}

async fn the_same_owner_gets_its_lock_again_in_both_keys_and_never_a_shorter_one(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(s.ask(a.acquire(1, t + 5, 100)).await, Vote::GrantedAgain);
    let (stored, left) = s.stored(&a).await.unwrap();
    assert_eq!((stored, s.fence(&a).await), (record(1, t + 5), Some(t + 5)));
    assert_lives(left, LONG_MS);
    assert_eq!(s.ask(a.acquire(1, t + 6, 2 * LONG_MS)).await, Vote::GrantedAgain);
    assert_lives(s.stored(&a).await.unwrap().1, 2 * LONG_MS);
}

async fn the_same_owner_with_an_old_t_is_stale(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    for old in [t, t - 1] {
        assert_eq!(s.ask(a.acquire(1, old, LONG_MS)).await, Vote::Stale { fence: fencing(t) });
    }
    assert_eq!(s.stored(&a).await.unwrap().0, record(1, t));
}

async fn an_extension_of_a_grant_that_its_owner_has_replaced_is_refused(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(s.ask(a.acquire(1, t + 1, LONG_MS)).await, Vote::GrantedAgain);
    assert!(matches!(s.ask(a.extend(1, t, 3 * LONG_MS)).await, Vote::Held(_)));
    assert_lives(s.stored(&a).await.unwrap().1, LONG_MS);
    assert_eq!(s.ask(a.extend(1, t + 1, LONG_MS)).await, Vote::Extended);
}

async fn an_extension_prolongs_and_never_shortens(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(s.ask(a.extend(1, t, 100)).await, Vote::Extended);
    assert_lives(s.stored(&a).await.unwrap().1, LONG_MS);
    assert_eq!(s.ask(a.extend(1, t, 3 * LONG_MS)).await, Vote::Extended);
    let (stored, left) = s.stored(&a).await.unwrap();
    let same = Some((token(1, t), &b""[..]));
    assert_eq!((stored.parse(), s.fence(&a).await), (same, Some(t)), "an extension changes no T");
    assert_lives(left, 3 * LONG_MS);
}

async fn gone(s: &Subject, lock: &Lock) {
    eventually("the lock expires", async || (s.ask(lock.inspect()).await == Vote::Missing).then_some(())).await;
}

async fn a_heal_sets_a_lock_that_was_lost_or_has_ended_after_an_extension(kind: Kind) {
    let (s, lost, ended, t) = (subject(kind).await, Lock::new("lost"), Lock::new("ended"), now());
    // Held for an hour by extensions: no acquire with this T would be let in.
    let old = t - 3_600_000_000;
    assert_eq!(s.ask(lost.heal(1, old, LONG_MS)).await, Vote::Granted);
    let (stored, left) = s.stored(&lost).await.unwrap();
    assert_eq!((stored.parse(), s.fence(&lost).await), (Some((token(1, old), &b""[..])), Some(old)));
    assert_lives(left, LONG_MS);
    assert_eq!(s.ask(lost.extend(1, old, LONG_MS)).await, Vote::Extended, "to extend it sends what it always sent");
    assert_eq!(s.ask(lost.heal(1, old, LONG_MS)).await, Vote::Extended, "it is there already");

    assert_eq!(s.ask(ended.acquire(1, t, 150)).await, Vote::Granted);
    assert_eq!(s.ask(ended.extend(1, t, 150)).await, Vote::Extended);
    gone(&s, &ended).await;
    assert_eq!(s.ask(ended.heal(1, t, LONG_MS)).await, Vote::Granted);
}

async fn a_heal_brings_no_lock_back_that_was_released_or_granted_anew(kind: Kind) {
    let (s, t) = (subject(kind).await, now());
    for (name, extended) in [("released", false), ("extended and released", true)] {
        let lock = Lock::new(&name.replace(' ', "-"));
        assert_eq!(s.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
        if extended {
            assert_eq!(s.ask(lock.extend(1, t, LONG_MS)).await, Vote::Extended);
        }
        assert_eq!(s.ask(lock.release(1, t)).await, Vote::Released);
        assert_eq!(s.ask(lock.heal(1, t, LONG_MS)).await, Vote::Stale { fence: fencing(t) }, "{name}");
        assert_eq!(s.ask(lock.inspect()).await, Vote::Missing, "{name}");
    }
    // The release overtook the heal on a node that has lost the lock, and on one where it has ended.
    let (lost, ended, anew) = (Lock::new("lost"), Lock::new("ended"), Lock::new("anew"));
    assert_eq!(s.ask(lost.release(1, t)).await, Vote::Missing);
    assert_eq!(s.ask(lost.heal(1, t, LONG_MS)).await, Vote::Stale { fence: fencing(t) });
    assert_eq!(s.ask(ended.acquire(1, t, 150)).await, Vote::Granted);
    assert_eq!(s.ask(ended.extend(1, t, 150)).await, Vote::Extended);
    gone(&s, &ended).await;
    assert_eq!(s.ask(ended.release(1, t)).await, Vote::Missing);
    assert_eq!(s.ask(ended.heal(1, t, LONG_MS)).await, Vote::Stale { fence: fencing(t) });

    assert_eq!(s.ask(anew.acquire(2, t + 1, LONG_MS)).await, Vote::Granted);
    assert_held(&s.ask(anew.heal(1, t, LONG_MS)).await, &record(2, t + 1), LONG_MS);
    assert_eq!(s.ask(anew.release(2, t + 1)).await, Vote::Released);
    assert_eq!(s.ask(anew.heal(1, t, LONG_MS)).await, Vote::Stale { fence: fencing(t + 1) });
}

async fn an_extension_of_an_absent_or_foreign_lock_creates_nothing(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.extend(1, t, LONG_MS)).await, Vote::Missing);
    assert_eq!((s.ask(a.inspect()).await, s.fence(&a).await), (Vote::Missing, None));
    assert_eq!(s.ask(a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_held(&s.ask(a.extend(2, t, 5 * LONG_MS)).await, &record(1, t), LONG_MS);
    assert_lives(s.stored(&a).await.unwrap().1, LONG_MS);
}

async fn a_release_deletes_exactly_its_own_grant(kind: Kind) {
    let (s, a, b, t) = (subject(kind).await, Lock::new("a"), Lock::new("b"), now());
    assert_eq!(s.ask(a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(s.ask(b.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(s.ask(a.release(1, t)).await, Vote::Released);
    assert_eq!(s.ask(a.inspect()).await, Vote::Missing);
    assert_eq!(s.stored(&b).await.unwrap().0, record(1, t));
    assert_eq!(s.ask(a.release(1, t)).await, Vote::Missing);
}

async fn a_release_with_an_older_t_keeps_the_newer_grant(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.acquire(1, t + 1, LONG_MS)).await, Vote::Granted);
    assert_held(&s.ask(a.release(1, t)).await, &record(1, t + 1), LONG_MS);
    assert_eq!((s.stored(&a).await.unwrap().0, s.fence(&a).await), (record(1, t + 1), Some(t + 1)));
}

async fn a_release_with_a_newer_t_takes_the_older_grant_along(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(s.ask(a.release(1, t + 9)).await, Vote::Released);
    assert_eq!((s.ask(a.inspect()).await, s.fence(&a).await), (Vote::Missing, Some(t + 9)));
}

async fn a_release_of_an_absent_lock_bars_the_acquire_it_overtook(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.release(1, t)).await, Vote::Missing);
    for late in [t, t - 1] {
        assert_eq!(s.ask(a.acquire(1, late, LONG_MS)).await, Vote::Stale { fence: fencing(t) });
    }
    assert_eq!(s.ask(a.inspect()).await, Vote::Missing);
}

async fn a_release_never_lowers_a_fence(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.release(1, t)).await, Vote::Missing);
    assert_eq!(s.ask(a.release(1, t - 1_000_000)).await, Vote::Missing);
    assert_eq!(s.fence(&a).await, Some(t));
}

async fn a_t_far_from_the_nodes_time_is_refused_and_leaves_nothing(kind: Kind) {
    let (s, a) = (subject(kind).await, Lock::new("a"));
    for far in [now() + 20_000_000, now() - 20_000_000] {
        assert_failed(s.ask(a.acquire(1, far, LONG_MS)).await, Reason::Clock, Effect::None);
        assert_eq!((s.ask(a.inspect()).await, s.fence(&a).await), (Vote::Missing, None));
    }
    // D is 2 s: what lies well within is accepted on both sides.
    assert_eq!(s.ask(a.acquire(1, now() - 500_000, LONG_MS)).await, Vote::Granted);
    assert_eq!(s.ask(a.acquire(1, now() + 1_500_000, LONG_MS)).await, Vote::GrantedAgain);
}

async fn a_release_from_the_far_future_leaves_no_fence(kind: Kind) {
    let (s, a, b, t) = (subject(kind).await, Lock::new("a"), Lock::new("b"), now());
    let far = t + 20_000_000;
    assert_failed(s.ask(a.release(1, far)).await, Reason::Clock, Effect::None);
    assert_eq!(s.fence(&a).await, None);
    // It still takes away what its own owner took before, but is not done.
    assert_eq!(s.ask(b.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_failed(s.ask(b.release(1, far)).await, Reason::Clock, Effect::None);
    assert_eq!((s.ask(b.inspect()).await, s.fence(&b).await), (Vote::Missing, Some(t)));
    assert_eq!(s.ask(b.acquire(2, t + 1, LONG_MS)).await, Vote::Granted);
}

/// Somebody else's barrier, set while a try was granted here, must not go when that try takes its own fence back.
async fn a_failed_try_takes_back_its_own_fence_and_no_barrier(kind: Kind) {
    let (s, a, b, t) = (subject(kind).await, Lock::new("a"), Lock::new("b"), now());
    assert_eq!(s.ask(a.acquire(2, t + 5, LONG_MS)).await, Vote::Granted);
    assert_eq!(s.ask(a.undo(2, t + 5)).await, Vote::Released);
    assert_eq!(s.fence(&a).await, None);

    assert_eq!(s.ask(b.acquire(2, t + 5, LONG_MS)).await, Vote::Granted);
    assert!(matches!(s.ask(b.release(1, t)).await, Vote::Held(_)), "its acquire is still on the way");
    assert_eq!(s.ask(b.undo(2, t + 5)).await, Vote::Released);
    assert!(matches!(s.ask(b.acquire(1, t, LONG_MS)).await, Vote::Stale { .. }), "and comes too late");
}

async fn a_fence_outlives_its_lock_and_not_its_retention(kind: Kind) {
    let settings = NodeSettings::default().with_fence_retention(Duration::from_millis(1_000));
    let (s, a, t) = (kind.subject(settings).await, Lock::new("a"), now());
    assert_eq!(s.ask(a.acquire(1, t, 10)).await, Vote::Granted);
    eventually("the lock expires", async || (s.ask(a.inspect()).await == Vote::Missing).then_some(())).await;
    assert_eq!(s.fence(&a).await, Some(t));
    eventually("the fence expires", async || s.fence(&a).await.is_none().then_some(())).await;
    assert_eq!(s.ask(a.acquire(2, t - 1, LONG_MS)).await, Vote::Granted);
}

async fn a_fence_that_is_no_number_is_an_error_and_grants_nothing(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    s.set_foreign(&a.keys.fence, b"not a number", None);
    assert_eq!(failure(s.ask(a.acquire(1, t, LONG_MS)).await).reason, Reason::Error);
    assert_eq!(s.ask(a.inspect()).await, Vote::Missing);
    // A release mends it: the barrier must stand whatever was there.
    assert_eq!(s.ask(a.release(1, t)).await, Vote::Missing);
    assert_eq!(s.fence(&a).await, Some(t));
}

async fn a_lock_expires_by_itself(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    let since = Instant::now();
    assert_eq!(s.ask(a.acquire(1, t, 30)).await, Vote::Granted);
    let granted = eventually("the lock expires", async || match s.ask(a.acquire(2, t + 1, LONG_MS)).await {
        Vote::Granted => Some(since.elapsed()),
        vote => {
            assert!(matches!(vote, Vote::Held(_)), "{vote:?}");
            None
        }
    })
    .await;
    assert!(granted >= Duration::from_millis(25), "granted to another after {granted:?} of 30 ms");
    assert_held(&s.ask(a.extend(1, t, LONG_MS)).await, &record(2, t + 1), LONG_MS);
}

async fn a_value_of_another_client_holds_the_lock_with_and_without_expiry(kind: Kind) {
    let (s, t) = (subject(kind).await, now());
    for (index, value) in [&b"8f5c2d1e-another-client"[..], b"", b"1", &[b'9'; 90]].into_iter().enumerate() {
        for life in [None, Some(Duration::from_millis(LONG_MS))] {
            let lock = Lock::new(&format!("{index}-{}", life.is_some()));
            s.set_foreign(&lock.keys.lock, value, life);
            let foreign = Record::foreign(Bytes::from_static(value));
            for op in [lock.acquire(1, t, LONG_MS), lock.extend(1, t, LONG_MS), lock.release(1, t)] {
                match (s.ask(op).await, life) {
                    (vote, Some(_)) => assert_held(&vote, &foreign, LONG_MS),
                    (vote, None) => {
                        assert_eq!(vote, Vote::Held(Holding { record: foreign.clone(), expires_in: None }));
                    }
                }
            }
            assert_eq!(s.stored(&lock).await.unwrap().0, foreign);
        }
    }
}

async fn scan_all(s: &Subject, prefix: &str, count: u32) -> (Vec<Bytes>, usize) {
    let (mut found, mut pages, mut cursor) = (Vec::new(), 0, Bytes::new());
    loop {
        let op = Op::Scan { key_prefix: Bytes::copy_from_slice(prefix.as_bytes()), cursor, count };
        let Vote::Page { keys, next } = s.ask(op).await else { panic!("a scan answers with a page") };
        found.extend(keys);
        pages += 1;
        match next {
            Some(next) => cursor = next,
            None => return (found, pages),
        }
    }
}

async fn a_scan_gives_every_key_of_its_prefix_in_pages(kind: Kind) {
    let (s, t) = (subject(kind).await, now());
    let locks: Vec<_> = (0..300).map(|n| Lock::new(&format!("p/{n}"))).chain([Lock::new("q/1")]).collect();
    votes(locks.iter().map(|lock| submit(s.node.as_ref(), lock.acquire(1, t, LONG_MS))).collect()).await;
    let (found, pages) = scan_all(&s, "lock:p/", 50).await;
    let wanted: BTreeSet<_> = locks[..300].iter().map(|lock| lock.keys.lock.clone()).collect();
    assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), wanted);
    assert!(pages >= 3, "{pages} pages");
}

async fn a_scan_takes_its_prefix_literally(kind: Kind) {
    let s = subject(kind).await;
    for key in ["[a-z]?*\\^:lock", "x:lock", "ab:lock"] {
        s.set_foreign(key.as_bytes(), b"v", None);
    }
    let (found, _) = scan_all(&s, "[a-z]?*\\^:", 50).await;
    assert_eq!(found, [&b"[a-z]?*\\^:lock"[..]]);
}

async fn without_its_marker_a_node_refuses_to_acquire_extend_and_heal_and_still_releases(kind: Kind) {
    let (s, a, b, t) = (subject(kind).await, Lock::new("a"), Lock::new("b"), now());
    s.wipe();
    s.set_foreign(&b.keys.lock, record(1, t).as_bytes(), Some(Duration::from_millis(LONG_MS)));
    // Submitted together: a real node's lane starts over as soon as it learns of the loss.
    let ops = [a.acquire(1, t, LONG_MS), b.extend(1, t, LONG_MS), a.heal(1, t, LONG_MS), b.release(1, t)];
    let answers = votes(ops.into_iter().map(|op| submit(s.node.as_ref(), op)).collect()).await;
    let [acquire, extend, heal, release] = answers.try_into().unwrap();
    for refused in [acquire, extend, heal] {
        assert_failed(refused, Reason::Quarantined, Effect::None);
    }
    assert_eq!(release, Vote::Released);
}

async fn records_keep_their_text_for_people(kind: Kind) {
    let (s, a, t) = (subject(kind).await, Lock::new("a"), now());
    let info = Info::new(&b"{\"a\":\"\\u0000:\xff\r\n\"}"[..]).unwrap();
    let record = Record::new(&token(1, t), &info);
    let op = Op::Acquire { keys: a.keys.clone(), record: record.clone(), ttl: ttl(LONG_MS), tell: None };
    assert_eq!(s.ask(op).await, Vote::Granted);
    let (stored, _) = s.stored(&a).await.unwrap();
    assert_eq!(stored.parse(), Some((token(1, t), info.as_bytes())));
}

async fn redis_node() -> (RedisServer, Arc<dyn Node>, Arc<Calls>) {
    let (server, calls) = (RedisServer::start(), Arc::new(Calls::default()));
    let node = lane_with(&server.url(), redis_settings(NodeSettings::default()), calls.clone());
    in_state(node.as_ref(), NodeState::Admitted).await;
    (server, node, calls)
}

/// Submits everything while the server is stopped, so that all but the first call collects what came in meanwhile.
async fn submit_while_stopped(server: &RedisServer, node: &dyn Node, ops: Vec<Op>) -> Vec<Vote> {
    server.stop();
    let mut pending: Vec<Pending> = Vec::new();
    for op in ops {
        pending.push(submit(node, op));
        tokio::task::yield_now().await;
    }
    server.cont();
    votes(pending).await
}

async fn recovers(node: &dyn Node) {
    let probe = Lock::new("probe");
    eventually("the lane serves again", async || {
        matches!(ask(node, probe.inspect()).await, Vote::Missing | Vote::Found(_)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn operations_that_come_in_while_a_call_is_out_share_the_next_call() {
    let (server, node, calls) = redis_node().await;
    let (t, count) = (now(), 100);
    let ops = (0..count).map(|n| Lock::new(&format!("n{n}")).acquire(1, t, LONG_MS)).collect();
    let answers = submit_while_stopped(&server, node.as_ref(), ops).await;
    assert!(answers.iter().all(|vote| *vote == Vote::Granted), "{answers:?}");
    let calls = calls.take();
    assert_eq!(calls.iter().sum::<usize>(), count);
    assert!(calls.len() <= 3, "{count} operations in {} calls: {calls:?}", calls.len());
}

#[tokio::test]
async fn a_key_of_another_type_fails_its_own_operation_and_no_other_of_the_batch() {
    let (server, node, calls) = redis_node().await;
    let (t, bad) = (now(), Lock::new("n5"));
    server.cmd(&[b"RPUSH", &bad.keys.lock[..], b"x"]);
    let locks: Vec<_> = (0..20).map(|n| Lock::new(&format!("n{n}"))).collect();
    let ops = |make: &dyn Fn(&Lock) -> Op| locks.iter().map(make).collect::<Vec<_>>();
    for (what, op, good) in [
        ("acquire", ops(&|lock| lock.acquire(1, t, LONG_MS)), Vote::Granted),
        ("extend", ops(&|lock| lock.extend(1, t, LONG_MS)), Vote::Extended),
        ("release", ops(&|lock| lock.release(1, t)), Vote::Released),
        ("inspect", ops(&|lock| lock.inspect()), Vote::Missing),
    ] {
        calls.take();
        let answers = submit_while_stopped(&server, node.as_ref(), op).await;
        // To a node that seems far, on a busy machine, up to four calls are under way; a fifth has the rest of the 20.
        assert!(calls.take().iter().any(|operations| *operations >= 4), "{what} was not batched");
        for (index, vote) in answers.into_iter().enumerate() {
            if index == 5 {
                let failure = failure(vote);
                assert_eq!(failure.reason, Reason::Error);
                assert!(failure.detail.contains("WRONGTYPE"), "{what}: {}", failure.detail);
            } else {
                assert_eq!(vote, good, "{what} of lock {index}");
            }
        }
    }
    assert_eq!(node.status().borrow().state, NodeState::Admitted);
    assert_eq!(server.cmd(&[b"LLEN", &bad.keys.lock[..]]), Resp::Integer(1), "what is not a lock is left alone");
}

#[tokio::test]
async fn out_of_memory_acquires_fail_alone_and_releases_still_delete() {
    let (server, node, _) = redis_node().await;
    let (a, b, c, t) = (Lock::new("a"), Lock::new("b"), Lock::new("c"), now());
    assert_eq!(ask(node.as_ref(), a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(ask(node.as_ref(), c.acquire(1, t, LONG_MS)).await, Vote::Granted);
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);

    let ops = [b.acquire(1, t, LONG_MS), a.extend(1, t, 2 * LONG_MS), a.inspect()];
    let answers = votes(ops.into_iter().map(|op| submit(node.as_ref(), op)).collect()).await;
    let refused = failure(answers[0].clone());
    assert_eq!(refused.reason, Reason::Error);
    assert!(refused.detail.contains("OOM"), "{}", refused.detail);
    assert_eq!(answers[1], Vote::Extended);
    assert!(matches!(answers[2], Vote::Found(_)));
    // Nothing to delete, so no room for the barrier: to be owned up to, or nobody would try again.
    let refused = failure(ask(node.as_ref(), b.release(1, t)).await);
    assert!(refused.reason == Reason::Error && refused.detail.contains("OOM"), "{refused}");
    assert_eq!(ask(node.as_ref(), a.release(1, t)).await, Vote::Released);
    // Its T differs, so the barrier needs a write that the deletion has to make room for.
    assert_eq!(ask(node.as_ref(), c.release(1, t + 1)).await, Vote::Released);
    for lock in [&a, &b, &c] {
        assert_eq!(server.cmd(&[b"EXISTS", &lock.keys.lock[..]]), Resp::Integer(0));
    }

    server.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(ask(node.as_ref(), b.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(node.status().borrow().state, NodeState::Admitted);
}

#[tokio::test]
async fn a_call_has_at_most_128_operations_and_all_are_answered() {
    let (server, node, calls) = redis_node().await;
    let (t, count) = (now(), 1_000);
    let ops = (0..count).map(|n| Lock::new(&format!("n{n}")).acquire(1, t, LONG_MS)).collect();
    let answers = submit_while_stopped(&server, node.as_ref(), ops).await;
    assert!(answers.iter().all(|vote| *vote == Vote::Granted));
    let calls = calls.take();
    assert_eq!((calls.iter().sum::<usize>(), calls.iter().max()), (count, Some(&128)), "{calls:?}");
}

#[tokio::test]
async fn a_call_of_large_records_is_split_by_size_and_every_record_arrives_whole() {
    let (server, node, calls) = redis_node().await;
    let t = now();
    let info = Info::new(vec![b'i'; Info::MAX_LEN]).unwrap();
    let record = Record::new(&token(1, t), &info);
    let locks: Vec<_> = (0..100).map(|n| Lock::new(&format!("n{n}"))).collect();
    let acquire =
        |lock: &Lock| Op::Acquire { keys: lock.keys.clone(), record: record.clone(), ttl: ttl(LONG_MS), tell: None };
    let answers = submit_while_stopped(&server, node.as_ref(), locks.iter().map(acquire).collect()).await;
    assert!(answers.iter().all(|vote| *vote == Vote::Granted));
    let calls = calls.take();
    assert!(calls.iter().all(|operations| *operations <= 32), "256 KiB hold 32 records of 8 KiB: {calls:?}");
    for lock in &locks {
        let stored = server.cmd(&[b"STRLEN", &lock.keys.lock[..]]).integer();
        assert_eq!(stored as usize, record.as_bytes().len());
    }
}

#[tokio::test]
async fn an_operation_that_waited_past_its_time_is_not_run_unless_it_is_a_release() {
    let (server, node, _) = redis_node().await;
    let (a, b, t) = (Lock::new("a"), Lock::new("b"), now());
    assert_eq!(ask(node.as_ref(), b.acquire(1, t, LONG_MS)).await, Vote::Granted);
    // The vote goes nowhere: only what is stored counts here.
    struct Deaf;
    impl redlock_core::node::Voter for Deaf {
        fn vote(&self, _: usize, _: Vote) {}
    }
    let past = Instant::now() - Duration::from_secs(1);
    for op in [a.acquire(1, t, LONG_MS), b.release(1, t)] {
        node.submit(Arc::new(op), past, redlock_core::node::Reply::new(Arc::new(Deaf), 0));
    }
    assert_eq!(ask(node.as_ref(), b.inspect()).await, Vote::Missing);
    assert_eq!(server.cmd(&[b"EXISTS", &a.keys.lock[..], &a.keys.fence[..]]), Resp::Integer(0));
}

#[tokio::test]
async fn after_a_script_flush_the_lane_loads_its_script_again() {
    let (server, node, _) = redis_node().await;
    let (a, t) = (Lock::new("a"), now());
    server.cmd(&["SCRIPT", "FLUSH"]);
    assert_failed(ask(node.as_ref(), a.acquire(1, t, LONG_MS)).await, Reason::Down, Effect::None);
    recovers(node.as_ref()).await;
    assert_eq!(ask(node.as_ref(), a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(node.status().borrow().restarts, 0, "a flush is no restart");
}

#[tokio::test]
async fn after_flushall_the_lane_is_admitted_again() {
    let (server, node, _) = redis_node().await;
    let (a, t) = (Lock::new("a"), now());
    // A lane that was just used sends no heartbeat, which could notice before the acquire does.
    assert_eq!(ask(node.as_ref(), a.inspect()).await, Vote::Missing);
    server.cmd(&["FLUSHALL"]);
    assert_failed(ask(node.as_ref(), a.acquire(1, t, LONG_MS)).await, Reason::Quarantined, Effect::None);
    recovers(node.as_ref()).await;
    assert_eq!(ask(node.as_ref(), a.acquire(1, t, LONG_MS)).await, Vote::Granted);
}

#[tokio::test]
async fn a_lost_marker_is_noticed_by_an_idle_lane() {
    let (server, node, _) = redis_node().await;
    server.cmd(&["FLUSHALL"]);
    // Nothing is asked of the node: the heartbeat alone brings its marker back.
    eventually("a marker stands again", async || (server.cmd(&["DBSIZE"]).integer() == 1).then_some(())).await;
    in_state(node.as_ref(), NodeState::Admitted).await;
}

#[tokio::test]
async fn after_a_crash_and_restart_the_lane_recovers_and_counts_one_restart() {
    let (mut server, node, _) = redis_node().await;
    let (a, t) = (Lock::new("a"), now());
    assert_eq!(ask(node.as_ref(), a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    server.kill();
    let down = in_state(node.as_ref(), NodeState::Connecting).await;
    assert!(!down.detail.is_empty());
    assert_failed(ask(node.as_ref(), a.inspect()).await, Reason::Down, Effect::None);
    server.restart();
    assert_eq!(in_state(node.as_ref(), NodeState::Admitted).await.restarts, 1);
    assert_eq!(ask(node.as_ref(), a.acquire(2, now(), LONG_MS)).await, Vote::Granted, "it kept nothing");
}

#[tokio::test]
async fn locks_and_fences_survive_a_crash_with_an_append_only_file() {
    let options = RedisOptions { append_only: true, ..RedisOptions::default() };
    let mut server = RedisServer::start_with(options);
    let node = lane(&server.url());
    in_state(node.as_ref(), NodeState::Admitted).await;
    let (a, b, t) = (Lock::new("a"), Lock::new("b"), now());
    assert_eq!(ask(node.as_ref(), a.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(ask(node.as_ref(), b.release(1, t)).await, Vote::Missing);
    server.restart();
    eventually("the restart is noticed", async || {
        let _ = ask(node.as_ref(), a.inspect()).await;
        let status = node.status().borrow().clone();
        (status.restarts == 1 && status.state == NodeState::Admitted).then_some(())
    })
    .await;
    assert_held(&ask(node.as_ref(), a.acquire(2, t + 1, LONG_MS)).await, &record(1, t), LONG_MS);
    assert_eq!(ask(node.as_ref(), b.acquire(2, t, LONG_MS)).await, Vote::Stale { fence: fencing(t) });
}

#[tokio::test]
async fn twenty_lost_connections_leave_no_connection_behind() {
    let server = RedisServer::start();
    // Four lanes, so that their back-off, which doubles, stays short.
    let nodes: Vec<_> = (0..4).map(|_| lane(&server.url())).collect();
    for _ in 0..5 {
        for node in &nodes {
            in_state(node.as_ref(), NodeState::Admitted).await;
        }
        server.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        for node in &nodes {
            eventually("the lane notices", async || {
                (node.status().borrow().state != NodeState::Admitted).then_some(())
            })
            .await;
        }
    }
    for node in &nodes {
        recovers(node.as_ref()).await;
    }
    let clients = || server.cmd(&["CLIENT", "LIST", "TYPE", "normal"]).text().lines().count();
    let last = std::cell::Cell::new(0);
    eventually("one connection for each lane and one for this test", async || {
        last.set(clients());
        (last.get() == nodes.len() + 1).then_some(())
    })
    .await;
    drop(nodes);
    eventually("a lane that is dropped closes its connection", async || (clients() == 1).then_some(())).await;
}

#[tokio::test]
async fn credentials_are_used_and_wrong_ones_are_named_without_the_password() {
    let options = RedisOptions { password: Some("p@ss/word".into()), ..RedisOptions::default() };
    let server = RedisServer::start_with(options);
    server.cmd(&["ACL", "SETUSER", "gateway", "on", ">its:secret", "~*", "+@all"]);
    server.cmd(&["ACL", "SETUSER", "narrow", "on", ">its:secret", "~*", "+@all", "-evalsha"]);
    let at = format!("127.0.0.1:{}", server.port());
    for login in [":p%40ss%2Fword", "default:p%40ss%2Fword", "gateway:its%3Asecret"] {
        let node = lane(&format!("redis://{login}@{at}"));
        in_state(node.as_ref(), NodeState::Admitted).await;
        assert_eq!(ask(node.as_ref(), Lock::new("free").inspect()).await, Vote::Missing);
    }
    for (login, word) in [
        (":hunter2@", "WRONGPASS"),
        ("gateway:hunter2@", "WRONGPASS"),
        ("nobody:hunter2@", "WRONGPASS"),
        ("", "NOAUTH"),
    ] {
        let node = lane(&format!("redis://{login}{at}"));
        let status = eventually("the refusal is shown", async || {
            let status = node.status().borrow().clone();
            status.detail.contains(word).then_some(status)
        })
        .await;
        assert_eq!(status.state, NodeState::Refused);
        assert!(status.remedy == Some(Remedy::GiveCredentials), "{status:?}");
        let vote = failure(ask(node.as_ref(), Lock::new("free").inspect()).await);
        assert_eq!((vote.reason, vote.effect), (Reason::Quarantined, Effect::None));
        for text in [status.detail, vote.detail, node.name().into()] {
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
    let node = lane(&format!("redis://narrow:its%3Asecret@{at}"));
    eventually("a missing permission is named", async || {
        let _ = ask(node.as_ref(), Lock::new("free").inspect()).await;
        node.status().borrow().detail.contains("evalsha").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_replica_is_refused_with_the_cure_and_votes_once_it_is_a_master() {
    let master = RedisServer::start();
    let replicaof = ["--replicaof", "127.0.0.1", &master.port().to_string()].map(String::from);
    let server = RedisServer::start_with(RedisOptions { args: replicaof.into(), ..RedisOptions::default() });
    let node = lane(&server.url());
    let status = in_state(node.as_ref(), NodeState::Refused).await;
    assert!(status.detail.contains("slave") && status.remedy == Some(Remedy::MakeMaster), "{status:?}");
    assert_failed(
        ask(node.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await,
        Reason::Quarantined,
        Effect::None,
    );
    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    in_state(node.as_ref(), NodeState::Admitted).await;
    assert_eq!(ask(node.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await, Vote::Granted);
}

#[tokio::test]
async fn an_admitted_node_that_becomes_a_replica_is_refused_and_waits_when_it_is_a_master_again() {
    let server = RedisServer::start();
    // Two seconds in quarantine.
    let settings = RedisSettings {
        generation: Generation::new("tests", Duration::from_millis(1_500)),
        ..redis_settings(NodeSettings::default().with_max_clock_offset(Duration::from_millis(500)))
    };
    let node = strict_lane(&server.url(), settings, Arc::new(Calls::default()));
    in_state(node.as_ref(), NodeState::Admitted).await;
    // Of a master that is not there: nothing is copied over, so the marker stays.
    let nobody = DeadPort::new();
    server.cmd(&["REPLICAOF", "127.0.0.1", &nobody.port().to_string()]);
    let vote = failure(ask(node.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await);
    assert!(vote.detail.contains("READONLY"), "{}", vote.detail);
    let status = in_state(node.as_ref(), NodeState::Refused).await;
    assert!(status.remedy == Some(Remedy::MakeMaster), "{status:?}");
    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    // Nobody can tell that this time its data is its own.
    let status = in_state(node.as_ref(), NodeState::Quarantined).await;
    assert!(status.detail.contains("it was a replica"), "{status:?}");
    let refused = ask(node.as_ref(), Lock::new("a").acquire(1, now(), 1_000)).await;
    assert_failed(refused, Reason::Quarantined, Effect::None);
    in_state(node.as_ref(), NodeState::Admitted).await;
    assert_eq!(ask(node.as_ref(), Lock::new("a").acquire(1, now(), 1_000)).await, Vote::Granted);
}

#[tokio::test]
async fn a_node_that_may_evict_is_refused_with_the_cure_and_votes_once_it_may_not() {
    let server = RedisServer::start();
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let node = lane(&server.url());
    let status = in_state(node.as_ref(), NodeState::Refused).await;
    let cure = Some(Remedy::ForbidEvictions);
    assert!(status.detail.contains("allkeys-lru") && status.remedy == cure, "{status:?}");
    assert_eq!(server.cmd(&["DBSIZE"]), Resp::Integer(0), "an unfit node gets no marker");
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    in_state(node.as_ref(), NodeState::Admitted).await;
}

#[tokio::test]
async fn an_eviction_policy_that_is_changed_under_an_admitted_node_is_noticed() {
    let (server, node, _) = redis_node().await;
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let status = in_state(node.as_ref(), NodeState::Refused).await;
    assert!(status.detail.contains("allkeys-lru"), "{}", status.detail);
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    in_state(node.as_ref(), NodeState::Admitted).await;
}

#[tokio::test]
async fn a_marker_of_another_configuration_is_refused_naming_both_and_never_overwritten() {
    let (server, node, _) = redis_node().await;
    let before = server.cmd(&["GET", "{lock:}:marker"]);
    let other = RedisSettings {
        generation: Generation::new("tests", Duration::from_secs(77)),
        ..redis_settings(NodeSettings::default())
    };
    let newcomer = lane_with(&server.url(), other.clone(), Arc::new(Calls::default()));
    let status = in_state(newcomer.as_ref(), NodeState::Refused).await;
    assert!(status.detail.contains("300000 ms") && status.detail.contains("77000 ms"), "{}", status.detail);
    assert_eq!(server.cmd(&["GET", "{lock:}:marker"]), before);
    assert_eq!(ask(node.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await, Vote::Granted);

    // The operator's step turns the tables: the new generation votes and the old one does not.
    let url = redlock_core::node::redis::RedisUrl::parse(&server.url()).unwrap();
    overwrite_marker(&url, &other, NewMarker::Final).await.unwrap();
    assert_failed(
        ask(node.as_ref(), Lock::new("b").acquire(1, now(), LONG_MS)).await,
        Reason::Quarantined,
        Effect::None,
    );
    in_state(newcomer.as_ref(), NodeState::Admitted).await;
    in_state(node.as_ref(), NodeState::Refused).await;
    assert_ne!(generation(), other.generation);
}

#[tokio::test]
async fn a_hung_node_loses_its_session_within_seconds_and_then_refuses_at_once() {
    let (server, node, _) = redis_node().await;
    let (a, t) = (Lock::new("a"), now());
    // So that the call which a session begins with is answered, and not the first to be given up.
    assert_eq!(ask(node.as_ref(), a.inspect()).await, Vote::Missing);
    server.stop();
    let since = Instant::now();
    assert_failed(ask(node.as_ref(), a.acquire(1, t, LONG_MS)).await, Reason::Timeout, Effect::Possible);
    let given_up = since.elapsed();
    assert!(given_up > Duration::from_millis(900) && given_up < Duration::from_secs(5), "after {given_up:?}");
    in_state(node.as_ref(), NodeState::Connecting).await;
    let since = Instant::now();
    for _ in 0..100 {
        assert_failed(ask(node.as_ref(), a.release(1, t)).await, Reason::Down, Effect::None);
    }
    assert!(since.elapsed() < Duration::from_millis(900), "100 refusals took {:?}", since.elapsed());
    server.cont();
    in_state(node.as_ref(), NodeState::Admitted).await;
    assert_eq!(ask(node.as_ref(), Lock::new("b").acquire(1, now(), LONG_MS)).await, Vote::Granted);
}

#[tokio::test]
async fn an_idle_lane_notices_a_hung_node_by_its_heartbeat() {
    let (server, node, _) = redis_node().await;
    server.stop();
    in_state(node.as_ref(), NodeState::Connecting).await;
    server.cont();
    in_state(node.as_ref(), NodeState::Admitted).await;
    assert_eq!(node.status().borrow().restarts, 0);
}

#[tokio::test]
async fn beyond_8192_waiting_operations_more_are_refused_at_once() {
    let (server, node, _) = redis_node().await;
    server.stop();
    let a = Lock::new("a");
    // Nothing is awaited in between, so the lane takes nothing out of its queue.
    let pending: Vec<_> = (0..9_000).map(|_| submit(node.as_ref(), a.inspect())).collect();
    let mut queued = Vec::new();
    for (index, one) in pending.into_iter().enumerate() {
        match one.at_once() {
            Ok(vote) => {
                assert!(index >= 8_192, "refused as number {index}");
                assert_failed(vote, Reason::Overloaded, Effect::None);
            }
            Err(one) => queued.push(one),
        }
    }
    assert_eq!(queued.len(), 8_192);
    server.cont();
    for vote in votes(queued).await {
        assert_eq!(vote, Vote::Missing);
    }
}

#[tokio::test]
async fn operations_take_effect_in_the_order_they_were_submitted() {
    let (server, node, _) = redis_node().await;
    let (a, t) = (Lock::new("a"), now());
    let ops = (0..300).flat_map(|n| [a.acquire(1, t + n, LONG_MS), a.release(1, t + n)]).collect();
    for (index, vote) in submit_while_stopped(&server, node.as_ref(), ops).await.into_iter().enumerate() {
        assert_eq!(vote, if index % 2 == 0 { Vote::Granted } else { Vote::Released }, "operation {index}");
    }
}

#[tokio::test]
async fn a_scan_between_batches_keeps_the_order() {
    let (server, node, _) = redis_node().await;
    let (a, t) = (Lock::new("a"), now());
    let scan = || Op::Scan { key_prefix: a.keys.lock.clone(), cursor: Bytes::new(), count: 100 };
    let ops = vec![scan(), a.acquire(1, t, LONG_MS), scan(), a.release(1, t), scan()];
    let page = |found: bool| Vote::Page { keys: found.then(|| a.keys.lock.clone()).into_iter().collect(), next: None };
    let answers = submit_while_stopped(&server, node.as_ref(), ops).await;
    assert_eq!(answers, [page(false), Vote::Granted, page(true), Vote::Released, page(false)]);
}

#[tokio::test]
async fn what_came_too_late_does_not_hold_up_what_is_behind_it() {
    let (_server, node, _) = redis_node().await;
    let (a, t, began) = (Lock::new("a"), now(), Instant::now());
    for _ in 0..8 {
        let late = submit_until(node.as_ref(), a.acquire(1, t, LONG_MS), began);
        let scan = submit(node.as_ref(), Op::Scan { key_prefix: Bytes::new(), cursor: Bytes::new(), count: 10 });
        let behind = submit(node.as_ref(), a.inspect());
        assert_failed(late.vote().await, Reason::Timeout, Effect::None);
        assert!(matches!(scan.vote().await, Vote::Page { .. }));
        assert_eq!(behind.vote().await, Vote::Missing);
    }
    // It would have waited for the heartbeat of every second.
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_prefix_with_its_own_marker_does_not_disturb_another_on_the_same_server() {
    let (server, node, _) = redis_node().await;
    let other = RedisSettings {
        key_prefix: String::new(),
        generation: Generation::new("others", Duration::from_secs(5)),
        ..redis_settings(NodeSettings::default())
    };
    let plain = lane_with(&server.url(), other, Arc::new(Calls::default()));
    in_state(plain.as_ref(), NodeState::Admitted).await;
    let keys = Keys::new("", &name("a"));
    let op = Op::Acquire { keys, record: record(1, now()), ttl: ttl(LONG_MS), tell: None };
    assert_eq!(ask(plain.as_ref(), op).await, Vote::Granted);
    assert_ne!(server.cmd(&["GET", "a"]), Resp::Nil, "the bare name is the key that other clients use");
    assert_eq!(ask(node.as_ref(), Lock::new("a").acquire(2, now(), LONG_MS)).await, Vote::Granted);
}
