//! Hints between gateway processes. These tests show which hints are published and received. They
//! also show that waiters get their locks without hints, and despite forged ones.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::{HandoffRoute, NoObserver, NodeState};
use redlock_core::{AcquireOptions, Env, Lease, LockError, LockName, QueueMode, Redlock};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::core::waiting::{acquire, another, nothing_is_left, start_waiting};
use crate::support::harness::{PATIENCE, RedisServer, eventually};
use crate::support::measure::measured;
use crate::support::nodes::{
    AGAIN, Cluster, LONG_MS, Lock, NODE_TIMEOUT, PREFIX, Recorder, ask, in_state, intercepted,
    name, node_settings, now, pass_on, redis_settings, redlock, redlock_with, remote_node_with,
    telling, ttl,
};
use crate::support::waiters::median;

/// The limit for a grant by a hint. Without a hint, a waiter polls 400 to 800 ms after its last
/// attempt, about 50 ms of which have passed.
pub(super) const BY_A_HINT: Duration = Duration::from_millis(250);

fn check_median(times: Vec<Duration>, limit: Duration) -> Result<(), String> {
    println!("{times:?}");
    if median(times.clone()) <= limit { Ok(()) } else { Err(format!("{times:?}")) }
}

/// How many waiters of a gateway got a lock by a hint.
pub(super) fn by_hints(recorder: &Recorder) -> usize {
    let routes = recorder.hand_overs.lock().unwrap();
    routes.iter().filter(|route| **route == HandoffRoute::Remote).count()
}

#[tokio::test]
async fn a_node_publishes_hints_only_on_refusal_and_release() {
    let server = RedisServer::start();
    let node =
        remote_node_with(&server.url(), redis_settings(node_settings()), Arc::new(NoObserver));
    in_state(node.as_ref(), NodeState::Admitted).await;
    let mut subscription = server.subscribe(&format!("{{{PREFIX}}}:hints"));
    let lock = Lock::new("job");
    let t = now();
    const SILENCE: &str = "";
    for (op, is, published) in [
        (telling(lock.acquire(1, t, LONG_MS), "granted"), "Granted", SILENCE),
        (
            telling(lock.acquire(1 | AGAIN, t + 1, LONG_MS), "the owner has the lock"),
            "Yours",
            SILENCE,
        ),
        (telling(lock.acquire(2, t + 2, LONG_MS), "held"), "Held", "held"),
        (lock.acquire(2, t + 2, LONG_MS), "Held", SILENCE),
        // An acquire with a token that is too small is also answered with Held.
        (telling(lock.acquire(2, t, LONG_MS), "held as well"), "Held", "held as well"),
        (telling(lock.release(2, t + 2), "not the holder"), "Held", SILENCE),
        (telling(lock.undo(2, t + 2), "undone in vain"), "Held", SILENCE),
        (telling(lock.release(1, t), "released"), "Released", "released"),
        (telling(lock.release(1, t + 1), "missing"), "Missing", SILENCE),
        (telling(lock.acquire(2, t, LONG_MS), "stale"), "Stale", SILENCE),
        (lock.acquire(2, t + 3, LONG_MS), "Granted", SILENCE),
        (lock.release(2, t + 3), "Released", SILENCE),
        (lock.acquire(2, t + 4, LONG_MS), "Granted", SILENCE),
        (telling(lock.undo(2, t + 4), "undone"), "Released", "undone"),
    ] {
        let vote = format!("{:?}", ask(node.as_ref(), op.clone()).await);
        assert!(
            vote == is
                || vote.starts_with(&format!("{is}("))
                || vote.starts_with(&format!("{is} ")),
            "{op:?}: {vote}"
        );
        assert_eq!(server.messages(&mut subscription).join(", "), published, "{op:?}");
    }
}

/// Starts a request with `QueueMode::Newest`, and returns when it waits.
async fn newest(
    locks: &Redlock,
    lock: &LockName,
) -> JoinHandle<(Result<Lease, LockError>, Instant)> {
    let before = locks.waiting().waiters;
    let waiter = tokio::spawn({
        let (locks, lock) = (locks.clone(), lock.clone());
        async move {
            let options = AcquireOptions { queue: QueueMode::Newest, ..AcquireOptions::default() };
            let result =
                locks.acquire_within(&lock, ttl(LONG_MS), options, PATIENCE, || Ok(())).await;
            (result, Instant::now())
        }
    });
    eventually("it waits", async || (locks.waiting().waiters > before).then_some(())).await;
    waiter
}

/// An arrival in an hour would supersede all waiters that arrive before that time.
#[tokio::test]
async fn forged_arrivals_in_the_future_supersede_nobody() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let lock = name("deploy");
    let held = acquire(&locks, &lock).await;
    let waits = newest(&locks, &lock).await;
    let channel = format!("{{{PREFIX}}}:hints");
    let publish = |arrival: u64| {
        let (zero, nobody) = ("0".repeat(16), "0".repeat(32));
        let hint = format!("1 n {:016x} {zero} {arrival:016x} {nobody} {PREFIX}{lock}", 0xff);
        cluster.servers.iter().for_each(|server| drop(server.cmd(&["PUBLISH", &channel, &hint])));
    };
    publish(now() + 3_600_000_000);
    publish(now() - 3_600_000_000);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!waits.is_finished());
    // The same hint with a credible arrival has an effect.
    publish(now());
    let (superseded, _) = waits.await.expect("no panic");
    assert!(matches!(superseded, Err(LockError::Superseded)), "{superseded:?}");
    locks.release(&lock, &held.token).await.expect("the lock is held");
    nothing_is_left(&cluster, &locks, &lock).await;
}

/// Everybody who may write to the nodes can publish hints. A forged hint must not make true hints
/// look old, and many forged hints must not fill the memory.
#[tokio::test]
async fn forged_hints_do_not_hide_true_ones() {
    let cluster = Cluster::start(3).await;
    let lock = name("job");
    let recorder = Arc::new(Recorder::default());
    let env = Env { observer: recorder.clone(), ..Env::default() };
    let locks = redlock_with(cluster.nodes.clone(), NODE_TIMEOUT, env);
    let other = another(&cluster).await;
    // On a busy machine a waiter may poll before its hint arrives.
    eventually("true hints wake the waiters", async || {
        let held = acquire(&other, &lock).await;
        let waiter = start_waiting(&locks, &lock).await;
        let channel = format!("{{{PREFIX}}}:hints");
        let hour_ahead = format!("1 r 00000000000000ff {} {PREFIX}{lock}", now() + 3_600_000_000);
        let long = format!("1 w 00000000000000ff {PREFIX}{}", "x".repeat(300));
        for message in [hour_ahead.as_str(), &long, "1 w 00000000000000ff other:job", "1 r ", ""] {
            cluster
                .servers
                .iter()
                .for_each(|server| drop(server.cmd(&["PUBLISH", &channel, message])));
        }
        // Time for the waiters' hints to arrive. Receivers do not acknowledge hints.
        tokio::time::sleep(Duration::from_millis(50)).await;
        other.release(&lock, &held.token).await.expect("the lock is held");
        let (lease, _) = waiter.await.expect("no panic");
        locks.release(&lock, &lease.token).await.expect("the lock is held");
        (by_hints(&recorder) >= 5).then_some(())
    })
    .await;
}

mod measured {
    use super::*;

    #[tokio::test]
    async fn hints_wake_waiters_at_once_and_polls_do_without_hints() {
        measured("the time from a release to a grant", async || {
            let cluster = Cluster::start(5).await;
            let lock = name("job");
            let holder = another(&cluster).await;
            let without_hints =
                Cluster::remote_nodes(&cluster.servers, node_settings()).await.into_iter();
            let without_hints = without_hints.map(|node| intercepted(node, pass_on)).collect();
            let without_hints = redlock(without_hints, NODE_TIMEOUT);
            for (locks, rounds, usually) in
                [(cluster.redlock(), 15, BY_A_HINT), (without_hints, 5, Duration::from_secs(3))]
            {
                let mut times = Vec::new();
                for _ in 0..rounds {
                    let held = acquire(&holder, &lock).await;
                    let waiter = start_waiting(&locks, &lock).await;
                    // Time for the waiter's hint to arrive. Receivers do not acknowledge hints.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    let since = Instant::now();
                    holder.release(&lock, &held.token).await.expect("the lock is held");
                    let (lease, granted) = waiter.await.expect("no panic");
                    times.push(granted - since);
                    locks.release(&lock, &lease.token).await.expect("the lock is held");
                }
                nothing_is_left(&cluster, &locks, &lock).await;
                check_median(times, usually)?;
            }
            Ok(())
        })
        .await;
    }

    #[tokio::test]
    async fn a_waiter_that_leaves_during_a_handoff_publishes_a_hint() {
        measured("the time from a release to the grant of the next waiter", async || {
            let cluster = Cluster::start(3).await;
            let locks = cluster.redlock();
            let other = another(&cluster).await;
            let lock = name("job");
            let mut times = Vec::new();
            for _ in 0..10 {
                let held = acquire(&locks, &lock).await;
                let leaves = start_waiting(&locks, &lock).await;
                let stays = start_waiting(&other, &lock).await;
                // Time for the waiter's hint to arrive. Receivers do not acknowledge hints.
                tokio::time::sleep(Duration::from_millis(50)).await;
                let since = Instant::now();
                let (_, released) =
                    tokio::join!(async { leaves.abort() }, locks.release(&lock, &held.token));
                released.expect("the lock was held");
                let (lease, granted) = stays.await.expect("no panic");
                times.push(granted - since);
                other.release(&lock, &lease.token).await.expect("the lock is held");
            }
            nothing_is_left(&cluster, &locks, &lock).await;
            check_median(times, BY_A_HINT)
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_newer_waiter_at_another_gateway_supersedes_at_once() {
        measured("the time from a newer request to the end of an older one", async || {
            let cluster = Cluster::start(5).await;
            let gateways = [cluster.redlock(), another(&cluster).await, another(&cluster).await];
            let lock = name("deploy");
            let held = acquire(&gateways[0], &lock).await;
            let mut waits = newest(&gateways[0], &lock).await;
            let mut times = Vec::new();
            for build in 1..=15 {
                // Time for the waiter's hint to arrive. Receivers do not acknowledge hints.
                tokio::time::sleep(Duration::from_millis(50)).await;
                let since = Instant::now();
                let newer = newest(&gateways[build % 3], &lock).await;
                let (superseded, at) =
                    std::mem::replace(&mut waits, newer).await.expect("no panic");
                assert!(matches!(superseded, Err(LockError::Superseded)), "{superseded:?}");
                times.push(at - since);
            }
            gateways[0].release(&lock, &held.token).await.expect("the lock is held");
            let (lease, _) = waits.await.expect("no panic");
            let lease = lease.expect("the newest is granted");
            gateways[0].release(&lock, &lease.token).await.expect("the lock is held");
            for locks in &gateways {
                nothing_is_left(&cluster, locks, &lock).await;
            }
            check_median(times, BY_A_HINT)
        })
        .await;
    }
}
