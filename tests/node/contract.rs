//! The contract of every node. It is one table of tests, which runs on a master in memory, on a
//! real redis-server with the script, and on one with the module.
//!
//! A test submits operations and checks the votes. It reads stored locks through `Inspect`, so all
//! kinds of nodes are compared in the same way.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use redlock_core::node::link::{Scan, Scanned};
use redlock_core::node::{Effect, Holding, Op, Reason, Record, Vote};
use redlock_core::{FencingToken, Info};
use tokio::time::Instant;

use crate::node::subject::{Kind, Subject};
use crate::support::harness::eventually;
use crate::support::nodes::{
    AGAIN, LONG_MS, Lock, assert_extended, assert_failed, extended, failure, hold_record,
    kept_free_record, node_settings, now, record, submit, token, ttl, votes,
};

/// How much a life may be shorter than requested, on a slow machine. All lives that the tests
/// compare differ by more.
const SLACK: Duration = Duration::from_millis(LONG_MS / 2);

/// The clock skew that a node accepts: see [`node_settings`].
const SKEW_MICROS: u64 = 60_000_000;

/// Checks a remaining life. It is at most the requested one, and shorter only by the time that a
/// slow machine takes.
#[track_caller]
fn assert_lives(left: Option<Duration>, asked_ms: u64) {
    let asked = Duration::from_millis(asked_ms);
    let left = left.expect("a key with an expiry");
    assert!(left <= asked && left + SLACK > asked, "{left:?} left of {asked:?}");
}

#[track_caller]
pub(super) fn assert_held(vote: &Vote, by: &Record, asked_ms: u64) {
    let Vote::Held(Holding { record, expires_in, .. }) = vote else {
        panic!("expected Held, got {vote:?}")
    };
    assert_eq!(record, by);
    assert_lives(*expires_in, asked_ms);
}

/// The votes on each lock of a set.
#[track_caller]
fn each(vote: Vote) -> Vec<Vote> {
    match vote {
        Vote::Each(votes) => votes,
        other => panic!("expected a vote on each lock, got {other:?}"),
    }
}

pub(super) fn fencing(t: u64) -> FencingToken {
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
        mod on_the_module {
            $(#[tokio::test] async fn $case() { super::$case(super::Kind::Native).await })*
        }
    };
}

contract! {
    a_free_lock_is_granted_with_its_record_and_ttl
    a_lock_of_another_owner_is_held_with_its_remaining_life
    a_token_not_above_the_watermark_is_stale
    the_same_owner_gets_its_other_grant_unchanged
    an_extension_prolongs_and_never_shortens
    a_repair_restores_an_extended_lock_that_is_lost_or_ended
    a_repair_of_an_unextended_lock_sets_no_extended_flag
    a_repair_replaces_a_kept_free_record_for_as_long
    a_repair_prolongs_its_own_grant_and_never_shortens_it
    a_repair_restores_no_released_or_regranted_lock
    an_extension_of_an_absent_or_foreign_lock_sets_nothing
    a_release_deletes_exactly_its_own_grant
    a_release_with_an_older_token_keeps_the_newer_grant
    a_release_with_a_newer_token_deletes_the_older_grant
    a_release_of_an_absent_lock_blocks_its_late_acquire
    a_release_never_lowers_a_watermark
    a_token_far_from_the_nodes_time_is_refused_without_trace
    an_undo_removes_its_own_watermark_and_keeps_tombstones
    undone_polls_restore_the_earlier_watermark_and_prolong_it_once
    a_release_gives_a_restored_watermark_a_whole_life
    a_release_from_the_far_future_leaves_no_watermark
    a_watermark_outlives_its_lock_by_its_retention_only
    a_watermark_set_beside_a_lock_outlives_the_lock
    a_repair_is_refused_when_its_extension_began_too_early
    a_watermark_that_is_not_a_number_is_an_error
    a_lock_expires_by_itself
    a_value_of_another_client_holds_the_lock_with_and_without_expiry
    a_scan_gives_every_key_of_its_prefix_in_pages
    a_scan_takes_its_prefix_literally
    a_set_is_granted_whole_or_leaves_no_trace
    a_release_that_keeps_the_lock_free_admits_nobody_and_no_repair
    a_set_is_released_lock_by_lock
    a_set_is_kept_free_lock_by_lock
    a_set_is_extended_in_one_step_and_spared_by_its_undo
    the_locks_of_a_set_that_stand_are_read_together
    without_its_marker_a_node_only_releases
    records_keep_their_text_labels
}

async fn a_free_lock_is_granted_with_its_record_and_ttl(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.inspect()).await, Vote::Missing);
    assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    let (stored, left) = subject.stored(&lock).await.unwrap();
    assert_eq!(stored, record(1, t));
    assert_lives(left, LONG_MS);
    assert_eq!(subject.fence(&lock).await, Some(t));
}

async fn a_release_that_keeps_the_lock_free_admits_nobody_and_no_repair(kind: Kind) {
    let subject = kind.subject().await;
    for is_extended in [false, true] {
        let lock = Lock::new(if is_extended { "extended" } else { "granted" });
        let t = now();
        assert_eq!(subject.ask(lock.acquire(1, t, 2 * LONG_MS)).await, Vote::Granted);
        if is_extended {
            assert_extended(&subject.ask(lock.extend(1, t, 2 * LONG_MS)).await);
        }
        let repair = lock.repair(1, t, LONG_MS);
        assert_eq!(subject.ask(lock.release_keeping(1, t, LONG_MS)).await, Vote::Released);
        // Neither another owner nor the former one gets the lock, and a late repair is refused.
        let kept = hold_record(1, t);
        for owner in [1, 2] {
            assert_held(&subject.ask(lock.acquire(owner, t + 1, LONG_MS)).await, &kept, LONG_MS);
        }
        assert_held(&subject.ask(lock.extend(1, t, LONG_MS)).await, &kept, LONG_MS);
        assert!(matches!(subject.ask(repair).await, Vote::Stale { .. }));
        assert_eq!(subject.fence(&lock).await, Some(t));
        // A second release with the token ends nothing, and neither does an undo.
        for op in [lock.release_keeping(1, t, LONG_MS), lock.release(1, t), lock.undo(1, t)] {
            assert_held(&subject.ask(op).await, &kept, LONG_MS);
        }
    }
    // It never lowers a watermark.
    let lock = Lock::new("higher");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_held(&subject.ask(lock.release(2, t + 5)).await, &record(1, t), LONG_MS);
    assert_eq!(subject.ask(lock.release_keeping(1, t, LONG_MS)).await, Vote::Released);
    assert_eq!(subject.fence(&lock).await, Some(t + 5));
    // Without the grant, it is an ordinary release.
    let lock = Lock::new("absent");
    assert_eq!(subject.ask(lock.release_keeping(1, now(), LONG_MS)).await, Vote::Missing);
    assert_eq!(subject.ask(lock.inspect()).await, Vote::Missing);
}

async fn a_set_is_granted_whole_or_leaves_no_trace(kind: Kind) {
    let subject = kind.subject().await;
    let locks = ["a", "b", "c"].map(Lock::new);
    let set = locks[0].with(&locks[1..]);
    let t = now();
    assert_eq!(subject.ask(locks[2].acquire(1, t, LONG_MS)).await, Vote::Granted);
    // The watermark of an extended lock that has expired must be restored too.
    let before = extended_and_gone(&subject, &locks[1], 3).await;

    let refused = subject.ask(set.acquire(2, before + 1, LONG_MS)).await;
    let Vote::Held(holding) = &refused else { panic!("{refused:?}") };
    assert_eq!((&holding.record, holding.at), (&record(1, t), 2));
    for lock in &locks[..2] {
        assert_eq!(subject.ask(lock.inspect()).await, Vote::Missing);
    }
    assert_eq!(subject.fence(&locks[0]).await, None);
    assert_eq!(subject.fence(&locks[1]).await, Some(before));

    let t_of_set = before + 2;
    assert_eq!(subject.ask(locks[2].release(1, t)).await, Vote::Released);
    assert_eq!(subject.ask(set.acquire(2, t_of_set, LONG_MS)).await, Vote::Granted);
    for lock in &locks {
        let (stored, left) = subject.stored(lock).await.unwrap();
        assert_eq!((stored, subject.fence(lock).await), (record(2, t_of_set), Some(t_of_set)));
        assert_lives(left, LONG_MS);
    }
}

async fn a_set_is_released_lock_by_lock(kind: Kind) {
    let subject = kind.subject().await;
    let locks = ["a", "b", "c"].map(Lock::new);
    let set = locks[0].with(&locks[1..]);
    let t = now();
    assert_eq!(subject.ask(set.acquire(1, t, LONG_MS)).await, Vote::Granted);
    // The second lock is gone, and the third is somebody else's.
    for lock in &locks[1..] {
        assert_eq!(subject.ask(lock.release(1, t)).await, Vote::Released);
    }
    assert_eq!(subject.ask(locks[2].acquire(2, t + 1, LONG_MS)).await, Vote::Granted);
    let votes = each(subject.ask(set.release(1, t)).await);
    assert_eq!(votes[..2], [Vote::Released, Vote::Missing]);
    assert_held(&votes[2], &record(2, t + 1), LONG_MS);
    assert_eq!(votes.len(), 3);
    for lock in &locks[..2] {
        assert_eq!(subject.ask(lock.inspect()).await, Vote::Missing);
    }
}

async fn a_set_is_kept_free_lock_by_lock(kind: Kind) {
    let subject = kind.subject().await;
    let locks = ["a", "b"].map(Lock::new);
    let set = locks[0].with(&locks[1..]);
    let t = now();
    assert_eq!(subject.ask(set.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(subject.ask(locks[1].release(1, t)).await, Vote::Released);
    let kept = subject.ask(set.release_keeping(1, t, LONG_MS)).await;
    assert_eq!(kept, Vote::Each(vec![Vote::Released, Vote::Missing]));
    assert_eq!(subject.stored(&locks[0]).await.unwrap().0, hold_record(1, t));
    assert_eq!(subject.ask(locks[1].inspect()).await, Vote::Missing);
}

/// A repetition confirms a set by extending it. The undo of the first request arrives before or after
/// that, and never in between.
async fn a_set_is_extended_in_one_step_and_spared_by_its_undo(kind: Kind) {
    let subject = kind.subject().await;
    let locks = ["a", "b", "c"].map(Lock::new);
    let set = locks[0].with(&locks[1..]);
    let t = now();
    assert_eq!(subject.ask(set.acquire(1, t, LONG_MS)).await, Vote::Granted);
    let votes = each(subject.ask(set.extend(1, t, 2 * LONG_MS)).await);
    assert_eq!(votes.len(), 3);
    for vote in votes {
        assert_extended(&vote);
    }
    assert_eq!(subject.ask(set.undo(1, t)).await.name(), "held");
    for lock in &locks {
        let (stored, left) = subject.stored(lock).await.unwrap();
        assert_eq!(stored, extended(1, t));
        assert_lives(left, 2 * LONG_MS);
    }
    // One lock is gone, and another is somebody else's.
    for lock in &locks[1..] {
        assert_eq!(subject.ask(lock.release(1, t)).await, Vote::Released);
    }
    assert_eq!(subject.ask(locks[2].acquire(2, t + 1, LONG_MS)).await, Vote::Granted);
    let votes = each(subject.ask(set.extend(1, t, LONG_MS)).await);
    assert_extended(&votes[0]);
    assert_eq!(votes[1], Vote::Missing);
    assert_held(&votes[2], &record(2, t + 1), LONG_MS);
}

async fn the_locks_of_a_set_that_stand_are_read_together(kind: Kind) {
    let subject = kind.subject().await;
    let locks: Vec<_> = (0..256).map(|at| Lock::new(&format!("set-{at}"))).collect();
    let set = locks[0].with(&locks[1..]);
    assert_eq!(subject.ask(set.inspect()).await, Vote::FoundOfSet(Vec::new()));
    let t = now();
    for at in [0, 7, 255] {
        assert_eq!(subject.ask(locks[at].acquire(1, t, LONG_MS)).await, Vote::Granted);
    }
    let Vote::FoundOfSet(stand) = subject.ask(set.inspect()).await else { panic!("not read") };
    assert_eq!(stand.iter().map(|holding| holding.at).collect::<Vec<_>>(), [0, 7, 255]);
    for holding in stand {
        assert_eq!(holding.record, record(1, t));
        assert_lives(holding.expires_in, LONG_MS);
    }
    assert_eq!(subject.ask(set.acquire(2, t + 1, LONG_MS)).await.name(), "held");
    let votes = each(subject.ask(set.release(1, t)).await);
    assert_eq!(votes.iter().filter(|vote| **vote == Vote::Released).count(), 3);
    assert_eq!((votes.len(), &votes[7]), (256, &Vote::Released));
    assert_eq!(subject.ask(set.inspect()).await, Vote::FoundOfSet(Vec::new()));
    assert_eq!(subject.ask(set.acquire(2, t + 1, LONG_MS)).await, Vote::Granted);
    let Vote::FoundOfSet(stand) = subject.ask(set.inspect()).await else { panic!("not read") };
    assert_eq!(stand.len(), 256);
}

async fn a_lock_of_another_owner_is_held_with_its_remaining_life(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    // The answer is Held, whether the refused token is larger or smaller than the holder's.
    for other in [t + 1, t, t - 1] {
        assert_held(&subject.ask(lock.acquire(2, other, LONG_MS)).await, &record(1, t), LONG_MS);
    }
    assert_held(&subject.ask(lock.release(2, t + 2)).await, &record(1, t), LONG_MS);
    assert_eq!(subject.stored(&lock).await.unwrap().0, record(1, t));
}

async fn a_token_not_above_the_watermark_is_stale(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(subject.ask(lock.release(1, t)).await, Vote::Released);
    for old in [t, t - 1] {
        assert_eq!(
            subject.ask(lock.acquire(2, old, LONG_MS)).await,
            Vote::Stale { fence: fencing(t) }
        );
    }
    assert_eq!(subject.ask(lock.inspect()).await, Vote::Missing);
    assert_eq!(subject.ask(lock.acquire(2, t + 1, LONG_MS)).await, Vote::Granted);
}

async fn the_same_owner_gets_its_other_grant_unchanged(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    for other in [t + 5, t, t - 5] {
        let vote = subject.ask(lock.acquire(1 | AGAIN, other, 3 * LONG_MS)).await;
        let Vote::Yours(Holding { record: stored, expires_in, .. }) = vote else {
            panic!("{vote:?}")
        };
        assert_eq!(stored, record(1, t));
        assert_lives(expires_in, LONG_MS);
    }
    assert_eq!(
        (subject.stored(&lock).await.unwrap().0, subject.fence(&lock).await),
        (record(1, t), Some(t))
    );
}

async fn an_extension_prolongs_and_never_shortens(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    let extended = subject.ask(lock.extend(1, t, 100)).await;
    let Vote::Extended { expires_in } = extended else { panic!("{extended:?}") };
    assert_lives(Some(expires_in), LONG_MS);
    assert_lives(subject.stored(&lock).await.unwrap().1, LONG_MS);
    assert_extended(&subject.ask(lock.extend(1, t, 3 * LONG_MS)).await);
    let (stored, left) = subject.stored(&lock).await.unwrap();
    let same = Some((token(1, t), &b""[..]));
    assert_eq!(
        (stored.parse(), subject.fence(&lock).await),
        (same, Some(t)),
        "an extension does not change the token"
    );
    assert_lives(left, 3 * LONG_MS);
}

async fn gone(subject: &Subject, lock: &Lock) {
    eventually("the lock expires", async || {
        (subject.ask(lock.inspect()).await == Vote::Missing).then_some(())
    })
    .await;
}

/// Acquires and extends a lock, which then ends. Returns the lock's token. On a busy machine the lock
/// may end before it is extended; then this repeats.
async fn extended_and_gone(subject: &Subject, lock: &Lock, owner: u8) -> u64 {
    let t = eventually("the lock is extended", async || {
        let t = now();
        assert_eq!(subject.ask(lock.acquire(owner, t, 500)).await, Vote::Granted);
        let extended = subject.ask(lock.extend(owner, t, 500)).await;
        matches!(extended, Vote::Extended { .. }).then_some(t)
    })
    .await;
    gone(subject, lock).await;
    t
}

async fn a_repair_restores_an_extended_lock_that_is_lost_or_ended(kind: Kind) {
    let subject = kind.subject().await;
    let lost = Lock::new("lost");
    let ended = Lock::new("ended");
    // Extensions have kept this lock for an hour. No acquire with its token would be accepted any
    // more.
    let old = now() - 3_600_000_000;
    assert_eq!(subject.ask(lost.repair(1, old, LONG_MS)).await, Vote::Granted);
    let (stored, left) = subject.stored(&lost).await.unwrap();
    assert_eq!(
        (stored.parse(), subject.fence(&lost).await),
        (Some((token(1, old), &b""[..])), Some(old))
    );
    assert_lives(left, LONG_MS);
    // The extension sends the same record as before.
    assert_extended(&subject.ask(lost.extend(1, old, LONG_MS)).await);
    assert_extended(&subject.ask(lost.repair(1, old, LONG_MS)).await);

    let t = extended_and_gone(&subject, &ended, 1).await;
    assert_eq!(subject.ask(ended.repair(1, t, LONG_MS)).await, Vote::Granted);
}

async fn a_repair_of_an_unextended_lock_sets_no_extended_flag(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let ended = Lock::new("ended");
    let t = now();
    assert_eq!(subject.ask(lock.catch_up(1, t, LONG_MS)).await, Vote::Granted);
    let (stored, _) = subject.stored(&lock).await.unwrap();
    assert_eq!((&stored, subject.fence(&lock).await), (&record(1, t), Some(t)));
    assert_eq!(subject.ask(ended.catch_up(1, t, 200)).await, Vote::Granted);
    gone(&subject, &ended).await;
    // If the watermark still had the mark of an extension, it would accept the repair.
    assert_eq!(subject.ask(ended.repair(1, t, LONG_MS)).await, Vote::Stale { fence: fencing(t) });
}

/// A majority of the other nodes stores the grant. So the kept-free record stands for no other
/// grant that could be valid.
async fn a_repair_replaces_a_kept_free_record_for_as_long(kind: Kind) {
    let subject = kind.subject().await;
    let t = now();
    for (name, kept, life) in
        [("older", t - 1, 1_000), ("the-same", t, LONG_MS / 2), ("newer", t + 1, LONG_MS * 2)]
    {
        let lock = Lock::new(name);
        subject.set_foreign(
            &lock.keys.lock,
            kept_free_record(kept).as_bytes(),
            Some(Duration::from_millis(life)),
        );
        assert_eq!(subject.ask(lock.repair(1, t, LONG_MS)).await, Vote::Granted, "{name}");
        let (stored, left) = subject.stored(&lock).await.unwrap();
        assert_eq!(stored, extended(1, t), "{name}");
        assert_lives(left, LONG_MS.max(life));
    }
}

/// The lock was extended on the other nodes while this node did not vote. A repair prolongs the
/// copy here, and never shortens its life.
async fn a_repair_prolongs_its_own_grant_and_never_shortens_it(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    for asked in [LONG_MS * 2, LONG_MS] {
        assert_extended(&subject.ask(lock.repair(1, t, asked)).await);
        let (stored, left) = subject.stored(&lock).await.unwrap();
        assert_eq!(stored, extended(1, t), "an undo must not delete what was extended elsewhere");
        assert_lives(left, LONG_MS * 2);
    }
    let young = Lock::new("young");
    assert_eq!(subject.ask(young.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_extended(&subject.ask(young.catch_up(1, t, LONG_MS * 2)).await);
    let (stored, left) = subject.stored(&young).await.unwrap();
    assert_eq!(stored, record(1, t), "only an extension marks a lock");
    assert_lives(left, LONG_MS * 2);
}

async fn a_repair_restores_no_released_or_regranted_lock(kind: Kind) {
    let subject = kind.subject().await;
    let t = now();
    for (name, extended) in [("released", false), ("extended and released", true)] {
        let lock = Lock::new(&name.replace(' ', "-"));
        assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
        if extended {
            assert_extended(&subject.ask(lock.extend(1, t, LONG_MS)).await);
        }
        assert_eq!(subject.ask(lock.release(1, t)).await, Vote::Released);
        assert_eq!(
            subject.ask(lock.repair(1, t, LONG_MS)).await,
            Vote::Stale { fence: fencing(t) },
            "{name}"
        );
        assert_eq!(subject.ask(lock.inspect()).await, Vote::Missing, "{name}");
    }
    // The release arrived before the repair. On one node the lock was lost, on another it had
    // expired.
    let lost = Lock::new("lost");
    let ended = Lock::new("ended");
    let anew = Lock::new("anew");
    assert_eq!(subject.ask(lost.release(1, t)).await, Vote::Missing);
    assert_eq!(subject.ask(lost.repair(1, t, LONG_MS)).await, Vote::Stale { fence: fencing(t) });
    let last = extended_and_gone(&subject, &ended, 1).await;
    assert_eq!(subject.ask(ended.release(1, last)).await, Vote::Missing);
    let repaired = subject.ask(ended.repair(1, last, LONG_MS)).await;
    assert_eq!(repaired, Vote::Stale { fence: fencing(last) });

    assert_eq!(subject.ask(anew.acquire(2, t + 1, LONG_MS)).await, Vote::Granted);
    assert_held(&subject.ask(anew.repair(1, t, LONG_MS)).await, &record(2, t + 1), LONG_MS);
    assert_eq!(subject.ask(anew.release(2, t + 1)).await, Vote::Released);
    assert_eq!(
        subject.ask(anew.repair(1, t, LONG_MS)).await,
        Vote::Stale { fence: fencing(t + 1) }
    );
}

async fn an_extension_of_an_absent_or_foreign_lock_sets_nothing(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.extend(1, t, LONG_MS)).await, Vote::Missing);
    assert_eq!(
        (subject.ask(lock.inspect()).await, subject.fence(&lock).await),
        (Vote::Missing, None)
    );
    assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_held(&subject.ask(lock.extend(2, t, 5 * LONG_MS)).await, &record(1, t), LONG_MS);
    assert_lives(subject.stored(&lock).await.unwrap().1, LONG_MS);
}

async fn a_release_deletes_exactly_its_own_grant(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let other = Lock::new("b");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(subject.ask(other.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(subject.ask(lock.release(1, t)).await, Vote::Released);
    assert_eq!(subject.ask(lock.inspect()).await, Vote::Missing);
    assert_eq!(subject.stored(&other).await.unwrap().0, record(1, t));
    assert_eq!(subject.ask(lock.release(1, t)).await, Vote::Missing);
}

async fn a_release_with_an_older_token_keeps_the_newer_grant(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(1, t + 1, LONG_MS)).await, Vote::Granted);
    assert_held(&subject.ask(lock.release(1, t)).await, &record(1, t + 1), LONG_MS);
    assert_eq!(
        (subject.stored(&lock).await.unwrap().0, subject.fence(&lock).await),
        (record(1, t + 1), Some(t + 1))
    );
}

async fn a_release_with_a_newer_token_deletes_the_older_grant(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(subject.ask(lock.release(1, t + 9)).await, Vote::Released);
    assert_eq!(
        (subject.ask(lock.inspect()).await, subject.fence(&lock).await),
        (Vote::Missing, Some(t + 9))
    );
}

async fn a_release_of_an_absent_lock_blocks_its_late_acquire(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.release(1, t)).await, Vote::Missing);
    for late in [t, t - 1] {
        assert_eq!(
            subject.ask(lock.acquire(1, late, LONG_MS)).await,
            Vote::Stale { fence: fencing(t) }
        );
    }
    assert_eq!(subject.ask(lock.inspect()).await, Vote::Missing);
}

async fn a_release_never_lowers_a_watermark(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.release(1, t)).await, Vote::Missing);
    assert_eq!(subject.ask(lock.release(1, t - 1_000_000)).await, Vote::Missing);
    assert_eq!(subject.fence(&lock).await, Some(t));
}

async fn a_token_far_from_the_nodes_time_is_refused_without_trace(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    for far in [now() + 10 * SKEW_MICROS, now() - 10 * SKEW_MICROS] {
        assert_failed(
            subject.ask(lock.acquire(1, far, LONG_MS)).await,
            Reason::Clock,
            Effect::None,
        );
        assert_eq!(
            (subject.ask(lock.inspect()).await, subject.fence(&lock).await),
            (Vote::Missing, None)
        );
    }
    // Tokens well within `max_clock_skew` are accepted on both sides.
    for near in [now() - SKEW_MICROS / 4, now() + SKEW_MICROS / 4 * 3] {
        assert_eq!(subject.ask(lock.acquire(1, near, LONG_MS)).await, Vote::Granted);
        assert_eq!(subject.ask(lock.release(1, near)).await, Vote::Released);
    }
}

async fn a_release_from_the_far_future_leaves_no_watermark(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let other = Lock::new("b");
    let t = now();
    let far = t + 10 * SKEW_MICROS;
    assert_failed(subject.ask(lock.release(1, far)).await, Reason::Clock, Effect::None);
    assert_eq!(subject.fence(&lock).await, None);
    // The release deletes an earlier grant of its own owner, but it fails all the same.
    assert_eq!(subject.ask(other.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_failed(subject.ask(other.release(1, far)).await, Reason::Clock, Effect::None);
    assert_eq!(
        (subject.ask(other.inspect()).await, subject.fence(&other).await),
        (Vote::Missing, Some(t))
    );
    assert_eq!(subject.ask(other.acquire(2, t + 1, LONG_MS)).await, Vote::Granted);
}

/// After this proposal was granted, another owner's release set a tombstone. The tombstone must
/// survive when the proposal's undo sets its own watermark back.
async fn an_undo_removes_its_own_watermark_and_keeps_tombstones(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let other = Lock::new("b");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(2, t + 5, LONG_MS)).await, Vote::Granted);
    assert_eq!(subject.ask(lock.undo(2, t + 5)).await, Vote::Released);
    assert_eq!(subject.fence(&lock).await, None);

    assert_eq!(subject.ask(other.acquire(2, t + 5, LONG_MS)).await, Vote::Granted);
    assert!(
        matches!(subject.ask(other.release(1, t)).await, Vote::Held(_)),
        "the acquire is still in flight"
    );
    assert_eq!(subject.ask(other.undo(2, t + 5)).await, Vote::Released);
    assert!(
        matches!(subject.ask(other.acquire(1, t, LONG_MS)).await, Vote::Stale { .. }),
        "the late acquire is refused"
    );
}

/// A watermark outlives its lock by this time in tests in which it must not end.
const GRACE: Duration = Duration::from_secs(3_600);

/// A client polls for a lock that this node lacks and others store. Polls must not keep its repair
/// out for ever.
async fn undone_polls_restore_the_earlier_watermark_and_prolong_it_once(kind: Kind) {
    let subject = kind.subject_with(node_settings().with_fence_grace(GRACE)).await;
    let extended = Lock::new("extended");
    let unextended = Lock::new("unextended");
    let t = extended_and_gone(&subject, &extended, 1).await;
    assert_eq!(subject.ask(unextended.acquire(1, t, 10)).await, Vote::Granted);
    gone(&subject, &unextended).await;
    for lock in [&extended, &unextended] {
        let poll = async |t: u64| {
            // The poll's own watermark would live for longer than any other here.
            assert_eq!(subject.ask(lock.acquire(2, t, LONG_MS)).await, Vote::Granted);
            assert_eq!(subject.ask(lock.undo(2, t)).await, Vote::Released);
            let (text, left) = subject.watermark(lock).await.expect("a watermark");
            (text, left.expect("an expiry"))
        };
        let (first, left) = poll(t + 1).await;
        let second_more = Duration::from_secs(2);
        assert!(left <= GRACE + second_more && left + SLACK > GRACE, "{left:?}");
        tokio::time::sleep(Duration::from_millis(1_100)).await;
        let (second, later) = poll(t + 2).await;
        assert_eq!(second, first, "the end stands in the text");
        assert!(later + Duration::from_secs(1) <= left, "{later:?} after {left:?}");
        let mark = if first.as_bytes()[16] == b'+' { "+" } else { "" };
        assert!(first.starts_with(&format!("{t}{mark}@")), "{first}");
    }
    assert_eq!(subject.ask(extended.repair(1, t, LONG_MS)).await, Vote::Granted);
    let refused = subject.ask(unextended.repair(1, t, LONG_MS)).await;
    assert_eq!(refused, Vote::Stale { fence: fencing(t) });
}

/// The end in the text of a restored watermark is too early for a release that arrives later.
async fn a_release_gives_a_restored_watermark_a_whole_life(kind: Kind) {
    let subject = kind.subject_with(node_settings().with_fence_grace(GRACE)).await;
    let lock = Lock::new("a");
    let other = Lock::new("b");
    let t = extended_and_gone(&subject, &lock, 1).await;
    let of_other = extended_and_gone(&subject, &other, 1).await;
    for (lock, t) in [(&lock, t), (&other, of_other)] {
        assert_eq!(subject.ask(lock.acquire(2, t + 1, LONG_MS)).await, Vote::Granted);
        assert_eq!(subject.ask(lock.undo(2, t + 1)).await, Vote::Released);
    }
    assert_eq!(subject.ask(lock.release(1, t)).await, Vote::Missing);
    assert_eq!(subject.watermark(&lock).await.expect("a watermark").0, t.to_string());
    // The release of an earlier grant leaves the mark of the later one.
    assert_eq!(subject.ask(other.release(3, of_other - 1)).await, Vote::Missing);
    let (text, left) = subject.watermark(&other).await.expect("a watermark");
    assert_eq!(text, format!("{of_other}+"));
    let left = left.expect("an expiry");
    assert!(left + SLACK > GRACE, "{left:?}");
}

/// Checks by how much a watermark outlives its lock.
#[track_caller]
fn assert_outlives(watermark: Option<Duration>, lock: Duration) {
    let left = watermark.expect("a watermark with an expiry");
    assert!(left <= lock + GRACE && left + SLACK > lock + GRACE, "{left:?} for {lock:?}");
}

async fn a_watermark_outlives_its_lock_by_its_retention_only(kind: Kind) {
    let subject = kind.subject_with(node_settings().with_fence_grace(GRACE)).await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(subject.ask(lock.acquire(1, t, 10)).await, Vote::Granted);
    gone(&subject, &lock).await;
    assert_eq!(subject.fence(&lock).await, Some(t));
    assert_outlives(subject.fence_life(&lock).await, Duration::from_millis(10));

    let short = node_settings().with_fence_grace(Duration::from_millis(300));
    let subject = kind.subject_with(short).await;
    assert_eq!(subject.ask(lock.acquire(1, t, 10)).await, Vote::Granted);
    eventually("the watermark expires", async || {
        subject.fence(&lock).await.is_none().then_some(())
    })
    .await;
    assert_eq!(subject.ask(lock.acquire(2, t - 1, LONG_MS)).await, Vote::Granted);
}

/// The watermark was set by an extension, or by the release of another owner.
async fn a_watermark_set_beside_a_lock_outlives_the_lock(kind: Kind) {
    let subject = kind.subject_with(node_settings().with_fence_grace(GRACE)).await;
    let extended = Lock::new("a");
    let tombstoned = Lock::new("b");
    let t = now();
    assert_eq!(subject.ask(extended.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_extended(&subject.ask(extended.extend(1, t, 3 * LONG_MS)).await);
    assert_eq!(subject.fence(&extended).await, Some(t));
    assert_outlives(subject.fence_life(&extended).await, Duration::from_millis(3 * LONG_MS));
    assert_eq!(subject.ask(tombstoned.acquire(1, t, 3 * LONG_MS)).await, Vote::Granted);
    assert_held(&subject.ask(tombstoned.release(2, t + 1)).await, &record(1, t), 3 * LONG_MS);
    assert_eq!(subject.fence(&tombstoned).await, Some(t + 1));
    assert_outlives(subject.fence_life(&tombstoned).await, Duration::from_millis(3 * LONG_MS));

    // The watermarks end, too.
    let short = node_settings().with_fence_grace(Duration::from_millis(300));
    let subject = kind.subject_with(short).await;
    extended_and_gone(&subject, &extended, 1).await;
    assert_eq!(subject.ask(tombstoned.acquire(1, t, 500)).await, Vote::Granted);
    let _ = subject.ask(tombstoned.release(2, t + 1)).await;
    for lock in [&extended, &tombstoned] {
        eventually("the watermark expires", async || {
            subject.fence(lock).await.is_none().then_some(())
        })
        .await;
        gone(&subject, lock).await;
    }
}

async fn a_repair_is_refused_when_its_extension_began_too_early(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    let old = t - 5 * SKEW_MICROS;
    for began in [t - SKEW_MICROS / 10 * 11, t + 2 * SKEW_MICROS] {
        let refused = failure(subject.ask(lock.repair_of(1, old, LONG_MS, began)).await);
        assert_eq!((refused.reason, refused.effect), (Reason::Clock, Effect::None));
        assert_eq!(
            (subject.ask(lock.inspect()).await, subject.fence(&lock).await),
            (Vote::Missing, None)
        );
    }
    assert_eq!(
        subject.ask(lock.repair_of(1, old, LONG_MS, t - SKEW_MICROS / 4)).await,
        Vote::Granted
    );
}

async fn a_watermark_that_is_not_a_number_is_an_error(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    subject.set_foreign(&lock.keys.fence, b"not a number", None);
    assert_eq!(failure(subject.ask(lock.acquire(1, t, LONG_MS)).await).reason, Reason::Error);
    assert_eq!(subject.ask(lock.inspect()).await, Vote::Missing);
    // A release replaces the invalid value. Its tombstone must be set whatever was there before.
    assert_eq!(subject.ask(lock.release(1, t)).await, Vote::Missing);
    assert_eq!(subject.fence(&lock).await, Some(t));
}

async fn a_lock_expires_by_itself(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    let since = Instant::now();
    assert_eq!(subject.ask(lock.acquire(1, t, 30)).await, Vote::Granted);
    let granted = eventually("the lock expires", async || {
        match subject.ask(lock.acquire(2, t + 1, LONG_MS)).await {
            Vote::Granted => Some(since.elapsed()),
            vote => {
                assert!(matches!(vote, Vote::Held(_)), "{vote:?}");
                None
            }
        }
    })
    .await;
    assert!(granted >= Duration::from_millis(25), "granted again after {granted:?} of 30 ms");
    assert_held(&subject.ask(lock.extend(1, t, LONG_MS)).await, &record(2, t + 1), LONG_MS);
}

async fn a_value_of_another_client_holds_the_lock_with_and_without_expiry(kind: Kind) {
    let subject = kind.subject().await;
    let t = now();
    for (index, value) in
        [&b"8f5c2d1e-another-client"[..], b"", b"1", &[b'9'; 90]].into_iter().enumerate()
    {
        for life in [None, Some(Duration::from_millis(LONG_MS))] {
            let lock = Lock::new(&format!("{index}-{}", life.is_some()));
            subject.set_foreign(&lock.keys.lock, value, life);
            let foreign = Record::foreign(Bytes::from_static(value));
            for op in [lock.acquire(1, t, LONG_MS), lock.extend(1, t, LONG_MS), lock.release(1, t)]
            {
                match (subject.ask(op).await, life) {
                    (vote, Some(_)) => assert_held(&vote, &foreign, LONG_MS),
                    (vote, None) => {
                        assert_eq!(
                            vote,
                            Vote::Held(Holding {
                                record: foreign.clone(),
                                expires_in: None,
                                at: 0
                            })
                        );
                    }
                }
            }
            assert_eq!(subject.stored(&lock).await.unwrap().0, foreign);
        }
    }
}

async fn scan_all(subject: &Subject, prefix: &str, count: u32) -> (Vec<Bytes>, usize) {
    let mut found = Vec::new();
    let mut pages = 0;
    let mut cursor = Bytes::new();
    loop {
        let scan = Scan { key_prefix: Bytes::copy_from_slice(prefix.as_bytes()), cursor, count };
        let Scanned { keys, next, .. } = subject.node.reader().scan(scan).await.expect("a page");
        found.extend(keys);
        pages += 1;
        match next {
            Some(next) => cursor = next,
            None => return (found, pages),
        }
    }
}

async fn a_scan_gives_every_key_of_its_prefix_in_pages(kind: Kind) {
    let subject = kind.subject().await;
    let t = now();
    let locks: Vec<_> =
        (0..300).map(|n| Lock::new(&format!("p/{n}"))).chain([Lock::new("q/1")]).collect();
    votes(
        locks
            .iter()
            .map(|lock| submit(subject.node.as_ref(), lock.acquire(1, t, LONG_MS)))
            .collect(),
    )
    .await;
    let (found, pages) = scan_all(&subject, "lock:p/", 50).await;
    let wanted: BTreeSet<_> = locks[..300].iter().map(|lock| lock.keys.lock.clone()).collect();
    assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), wanted);
    assert!(pages >= 3, "{pages} pages");
}

async fn a_scan_takes_its_prefix_literally(kind: Kind) {
    let subject = kind.subject().await;
    for key in ["[a-z]?*\\^:lock", "x:lock", "ab:lock"] {
        subject.set_foreign(key.as_bytes(), b"v", None);
    }
    let (found, _) = scan_all(&subject, "[a-z]?*\\^:", 50).await;
    assert_eq!(found, [&b"[a-z]?*\\^:lock"[..]]);
}

async fn without_its_marker_a_node_only_releases(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let other = Lock::new("b");
    let t = now();
    let answers = eventually("the operations themselves show the loss", async || {
        // The worker of a real node may still be connecting again, after an earlier loss.
        if subject.ask(lock.inspect()).await != Vote::Missing {
            return None;
        }
        subject.wipe();
        subject.set_foreign(
            &other.keys.lock,
            record(1, t).as_bytes(),
            Some(Duration::from_millis(LONG_MS)),
        );
        // The operations are submitted together: the worker of a real node ends its connection as soon as
        // it notices the loss. On a busy machine a probe of the worker may notice it first. Then the
        // operations fail because the node is down, and the test begins again.
        let ops = [
            lock.acquire(1, t, LONG_MS),
            other.extend(1, t, LONG_MS),
            lock.repair(1, t, LONG_MS),
            other.release(1, t),
        ];
        let answers =
            votes(ops.into_iter().map(|op| submit(subject.node.as_ref(), op)).collect()).await;
        let is_down =
            |vote: &Vote| matches!(vote, Vote::Failed(failure) if failure.reason == Reason::Down);
        (!answers.iter().any(is_down)).then_some(answers)
    })
    .await;
    let [acquire, extend, repair, release] = answers.try_into().unwrap();
    for refused in [acquire, extend, repair] {
        assert_failed(refused, Reason::Quarantined, Effect::None);
    }
    assert_eq!(release, Vote::Released);
}

async fn records_keep_their_text_labels(kind: Kind) {
    let subject = kind.subject().await;
    let lock = Lock::new("a");
    let t = now();
    let info = Info::new(&b"{\"a\":\"\\u0000:\xff\r\n\"}"[..]).unwrap();
    let record = Record::new(&token(1, t), &info);
    let op = Op::Acquire {
        keys: lock.keys.clone(),
        record: record.clone(),
        ttl: ttl(LONG_MS),
        tell: None,
    };
    assert_eq!(subject.ask(op).await, Vote::Granted);
    let (stored, _) = subject.stored(&lock).await.unwrap();
    assert_eq!(stored.parse(), Some((token(1, t), info.as_bytes())));
}
