//! The safety rules of a single node, on which locks and fencing tokens depend. Each rule has a
//! scenario: a history that goes wrong without the rule.
//!
//! A scenario runs on one node. That node is a cluster of one, so its vote is a grant. The scenario
//! returns an error if something went wrong. With all rules on, nothing may go wrong. With its rule
//! off, the scenario must return an error; otherwise it would prove nothing about the rule. On
//! Redis the script itself switches its rules.

use std::time::Duration;

use redlock_core::node::{Effect, NodeSettings, Reason, SafetyRules, Vote};

use crate::node::subject::{Kind, Subject};
use crate::support::harness::eventually;
use crate::support::nodes::{AGAIN, LONG_MS, Lock, now, record};

/// Far more than `max_clock_skew`: a clock with this error is certainly wrong.
const HOUR: u64 = 3_600_000_000;
/// The `max_clock_skew` of these nodes. It is so long that a token stays valid even if a busy
/// machine stands still for seconds.
const D: Duration = Duration::from_secs(60);

async fn subject(rules: SafetyRules, kind: Kind) -> Subject {
    kind.subject_with(NodeSettings::default().with_max_clock_skew(D).with_rules(rules)).await
}

fn demand(vote: Vote, wanted: Vote, what: &str) -> Result<(), String> {
    if vote == wanted { Ok(()) } else { Err(format!("{what}: {vote:?}")) }
}

fn demand_extended(vote: Vote, what: &str) -> Result<(), String> {
    if matches!(vote, Vote::Extended { .. }) { Ok(()) } else { Err(format!("{what}: {vote:?}")) }
}

/// A client gets the lock with T, but its answer is delayed. So it asks again, with T + 1. Then the
/// first answer arrives. The token in it must still be valid.
async fn a_repeated_request_voids_no_answer(rules: SafetyRules, kind: Kind) -> Result<(), String> {
    let subject = subject(rules, kind).await;
    let lock = Lock::new("a");
    let t = now();
    demand(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted, "the first request")?;
    let again = subject.ask(lock.acquire(1 | AGAIN, t + 1, LONG_MS)).await;
    let what = format!("the repetition was answered {again:?}, and the first grant's extension");
    demand_extended(subject.ask(lock.extend(1, t, LONG_MS)).await, &what)
}

/// A request has failed on other nodes and undoes its proposal. Another request of the same owner
/// has confirmed that grant in the meantime.
async fn the_undo_of_a_proposal_spares_a_confirmed_grant(
    rules: SafetyRules,
    kind: Kind,
) -> Result<(), String> {
    let subject = subject(rules, kind).await;
    let lock = Lock::new("a");
    let t = now();
    demand(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted, "the first request")?;
    demand_extended(
        subject.ask(lock.extend(1, t, LONG_MS)).await,
        "the other request, which confirms the grant",
    )?;
    let _ = subject.ask(lock.undo(1, t)).await;
    demand_extended(subject.ask(lock.extend(1, t, LONG_MS)).await, "an extension after the undo")
}

/// Two requests of one owner run at two gateways, and both gateways have minted the same T.
async fn the_undo_of_a_proposal_deletes_no_other_grant(
    rules: SafetyRules,
    kind: Kind,
) -> Result<(), String> {
    let subject = subject(rules, kind).await;
    let lock = Lock::new("a");
    let t = now();
    demand(subject.ask(lock.acquire(1, t, LONG_MS)).await, Vote::Granted, "the first request")?;
    let _ = subject.ask(lock.undo(1 | AGAIN, t)).await;
    demand_extended(
        subject.ask(lock.extend(1, t, LONG_MS)).await,
        "an extension after the other request's undo",
    )
}

/// An acquire is delayed in a socket until its own release has run. If it still set its lock,
/// nobody would ever release that lock.
async fn an_acquire_overtaken_by_its_release_leaves_no_orphan(
    rules: SafetyRules,
    kind: Kind,
) -> Result<(), String> {
    let subject = subject(rules, kind).await;
    let lock = Lock::new("a");
    let t = now();
    demand(subject.ask(lock.release(1, t)).await, Vote::Missing, "the release")?;
    let late = subject.ask(lock.acquire(1, t, LONG_MS)).await;
    demand(
        subject.ask(lock.inspect()).await,
        Vote::Missing,
        &format!("the late acquire was answered {late:?}, and stored"),
    )
}

/// A proposal with T is given up, and its release is in flight. The client asks again and gets T +
/// 1. Then the release of the first proposal arrives. It must not delete the lock.
async fn the_release_of_an_abandoned_proposal_spares_the_retry(
    rules: SafetyRules,
    kind: Kind,
) -> Result<(), String> {
    let subject = subject(rules, kind).await;
    let lock = Lock::new("a");
    let t = now();
    demand(subject.ask(lock.acquire(1, t + 1, LONG_MS)).await, Vote::Granted, "the retry")?;
    let _ = subject.ask(lock.release(1, t)).await;
    match subject.stored(&lock).await {
        Some((stored, _)) if stored == record(1, t + 1) => {}
        other => return Err(format!("the retry's lock was replaced by {other:?}")),
    }
    match subject.ask(lock.acquire(2, t + 2, LONG_MS)).await {
        Vote::Held(_) => Ok(()),
        vote => Err(format!("a second holder beside the first: {vote:?}")),
    }
}

/// A gateway whose clock is an hour ahead takes the lock and releases it. Every other client must
/// still be able to get the lock.
async fn one_bad_clock_does_not_lock_everybody_out(
    rules: SafetyRules,
    kind: Kind,
) -> Result<(), String> {
    let subject = subject(rules, kind).await;
    let lock = Lock::new("a");
    let t = now();
    if subject.ask(lock.acquire(1, t + HOUR, LONG_MS)).await == Vote::Granted {
        demand(subject.ask(lock.release(1, t + HOUR)).await, Vote::Released, "the release")?;
    }
    demand(
        subject.ask(lock.acquire(2, t, LONG_MS)).await,
        Vote::Granted,
        "an acquire with a right clock after the wrong one",
    )
}

/// A gateway's clock is an hour behind. A node must not grant its tokens, even if the node has no
/// watermark: the protected resource may have seen larger ones.
async fn a_slow_clock_gets_no_token(rules: SafetyRules, kind: Kind) -> Result<(), String> {
    let subject = subject(rules, kind).await;
    let lock = Lock::new("a");
    let t = now();
    match subject.ask(lock.acquire(1, t - HOUR, LONG_MS)).await {
        Vote::Failed(_) => Ok(()),
        vote => Err(format!("an acquire with a T from an hour ago: {vote:?}")),
    }
}

/// A gateway whose clock is slow asks for a lock. The lock was granted before with a larger T, and
/// has expired. The node must not grant the smaller T. Otherwise the resource, which has seen the
/// larger T, would refuse the new and rightful holder.
async fn a_token_below_the_last_granted_one_is_refused(
    rules: SafetyRules,
    kind: Kind,
) -> Result<(), String> {
    let subject = subject(rules, kind).await;
    let lock = Lock::new("a");
    let t = now();
    demand(subject.ask(lock.acquire(1, t + 1, 30)).await, Vote::Granted, "the first holder")?;
    eventually("the lock expires", async || {
        (subject.ask(lock.inspect()).await == Vote::Missing).then_some(())
    })
    .await;
    match subject.ask(lock.acquire(2, t, LONG_MS)).await {
        Vote::Stale { .. } => Ok(()),
        vote => Err(format!("after a grant with T + 1, another owner asks with T: {vote:?}")),
    }
}

/// A node loses all its data while a lock is held. It must not help to grant that lock again.
async fn a_node_that_lost_its_data_grants_nothing(
    rules: SafetyRules,
    kind: Kind,
) -> Result<(), String> {
    let subject = subject(rules, kind).await;
    eventually("the acquire itself shows the loss", async || {
        let lock = Lock::new("a");
        let t = now();
        // The worker of a real node may still be connecting again, after an earlier loss.
        match subject.ask(lock.acquire(1, t, LONG_MS)).await {
            Vote::Granted => {}
            Vote::Failed(failure) if failure.reason == Reason::Down => return None,
            vote => return Some(Err(format!("the holder: {vote:?}"))),
        }
        subject.wipe();
        // Nothing is awaited in between, so the worker of a real node has not noticed the loss yet.
        // But on a busy machine its probe may be due now, and end the connection first.
        match subject.ask(lock.acquire(2, t + 1, LONG_MS)).await {
            Vote::Failed(failure) if failure.reason == Reason::Down => None,
            Vote::Failed(failure)
                if failure.reason == Reason::Quarantined && failure.effect == Effect::None =>
            {
                Some(Ok(()))
            }
            vote => Some(Err(format!("after the loss another owner asks: {vote:?}"))),
        }
    })
    .await
}

/// A set is refused because of its second lock. Nobody will release its first lock.
async fn a_refused_set_leaves_no_lock_behind(rules: SafetyRules, kind: Kind) -> Result<(), String> {
    let subject = subject(rules, kind).await;
    let locks = ["a", "b"].map(Lock::new);
    let t = now();
    demand(subject.ask(locks[1].acquire(1, t, LONG_MS)).await, Vote::Granted, "the other lock")?;
    let refused = subject.ask(locks[0].with(&locks[1..]).acquire(2, t + 1, LONG_MS)).await;
    let what = format!("the set was answered {refused:?}, and its first lock");
    demand(subject.ask(locks[0].inspect()).await, Vote::Missing, &what)
}

/// The node stood still, and runs an extension and two releases with a time to hold long after they
/// were asked for.
async fn a_late_operation_keeps_no_lock_for_longer_than_was_asked(
    rules: SafetyRules,
    kind: Kind,
) -> Result<(), String> {
    const LIFE_MS: u64 = 30_000;
    const GONE_MS: u64 = 20_000;
    let subject = subject(rules, kind).await;
    let (lock, t) = (Lock::new("a"), now());
    let asked = |gone_ms: u64| now() - (D.as_micros() as u64 + gone_ms * 1_000);
    demand(subject.ask(lock.acquire(1, t, 5_000)).await, Vote::Granted, "a request")?;
    let late = subject.ask(lock.extend_late(1, t, LIFE_MS, asked(GONE_MS))).await;
    let life = |vote: &Vote| match vote {
        Vote::Extended { expires_in } => Some(expires_in.as_millis() as u64),
        Vote::Found(holding) => Some(holding.expires_in?.as_millis() as u64),
        _ => None,
    };
    if !life(&late).is_some_and(|life| (5_000..=LIFE_MS - GONE_MS).contains(&life)) {
        return Err(format!("the late extension: {late:?}"));
    }
    let over = subject.ask(lock.extend_late(1, t, LIFE_MS, asked(LIFE_MS))).await;
    if !matches!(&over, Vote::Failed(failure) if failure.reason == Reason::Clock) {
        return Err(format!("an extension whose time is over: {over:?}"));
    }
    let hold = lock.release_keeping_late(1, t, LIFE_MS, asked(GONE_MS));
    demand(subject.ask(hold).await, Vote::Released, "the late release")?;
    let kept = subject.ask(lock.inspect()).await;
    if !life(&kept).is_some_and(|life| (1..=LIFE_MS - GONE_MS).contains(&life)) {
        return Err(format!("after the late release: {kept:?}"));
    }
    let (other, t) = (Lock::new("b"), now());
    demand(subject.ask(other.acquire(1, t, LONG_MS)).await, Vote::Granted, "another lock")?;
    let over = other.release_keeping_late(1, t, LIFE_MS, asked(LIFE_MS));
    demand(subject.ask(over).await, Vote::Released, "a release whose time is over")?;
    demand(subject.ask(other.inspect()).await, Vote::Missing, "the lock after that")
}

macro_rules! rules {
    ($($scenario:ident without $rule:ident;)*) => {
        mod in_memory { $(rules!(@ $scenario $rule Memory);)* }
        mod on_redis { $(rules!(@ $scenario $rule Redis);)* }
    };
    (@ $scenario:ident $rule:ident $kind:ident) => {
        #[tokio::test]
        async fn $scenario() {
            use super::{Kind, SafetyRules};
            assert_eq!(super::$scenario(SafetyRules::ALL, Kind::$kind).await, Ok(()));
            let off = SafetyRules { $rule: false, ..SafetyRules::ALL };
            let noticed = super::$scenario(off, Kind::$kind).await;
            println!(concat!("without ", stringify!($rule), ": {:?}"), noticed);
            assert!(noticed.is_err(), concat!("nothing goes wrong without ", stringify!($rule)));
        }
    };
}

rules! {
    a_repeated_request_voids_no_answer without lock_is_kept;
    the_undo_of_a_proposal_spares_a_confirmed_grant without undo_is_exact;
    the_undo_of_a_proposal_deletes_no_other_grant without undo_is_exact;
    an_acquire_overtaken_by_its_release_leaves_no_orphan without release_leaves_a_tombstone;
    the_release_of_an_abandoned_proposal_spares_the_retry without release_keeps_newer;
    one_bad_clock_does_not_lock_everybody_out without clock_is_checked;
    a_slow_clock_gets_no_token without clock_is_checked;
    a_token_below_the_last_granted_one_is_refused without watermark_is_checked;
    a_node_that_lost_its_data_grants_nothing without marker_is_checked;
    a_refused_set_leaves_no_lock_behind without refused_set_is_undone;
    a_late_operation_keeps_no_lock_for_longer_than_was_asked without lives_begin_when_asked;
}
