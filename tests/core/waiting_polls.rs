//! How often waiters ask the nodes. The tests have many waiters, waiters that can never be granted
//! a lock, and nodes without a quorum.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlock_core::clock::SystemClock;
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{Node, Op, Task};
use redlock_core::{AcquireOptions, Env, Lease, LockError, LockName, Redlock, Settings};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::waiting::acquire;
use crate::support::harness::{PATIENCE, eventually};
use crate::support::nodes::{
    LONG_MS, NODE_TIMEOUT, intercepted, name, node_settings, pass_on, ttl,
};

const NODES: usize = 3;

fn locks(node: impl Fn(Arc<MemoryNode>) -> Arc<dyn Node>, node_timeout: Duration) -> Redlock {
    let memory =
        |n| Arc::new(MemoryNode::new(format!("node-{n}"), Arc::new(SystemClock), node_settings()));
    let nodes = (0..NODES).map(|n| node(memory(n))).collect();
    let settings = Settings { node_timeout, node: node_settings(), ..Settings::default() };
    Redlock::new(nodes, settings, Env::default()).expect("good settings")
}

/// Nodes that can be silenced, and the number of acquires that each receives.
fn counted() -> (Redlock, Arc<AtomicU32>, Arc<AtomicBool>) {
    let asked = Arc::new(AtomicU32::new(0));
    let silent = Arc::new(AtomicBool::new(false));
    let locks = locks(
        |node| {
            let asked = asked.clone();
            let silent = silent.clone();
            intercepted(node, move |node, task| {
                asked.fetch_add(
                    u32::from(matches!(*task.op, Op::Acquire { .. })),
                    Ordering::Relaxed,
                );
                if !silent.load(Ordering::Relaxed) {
                    pass_on(node, task);
                }
            })
        },
        Duration::from_millis(50),
    );
    (locks, asked, silent)
}

/// How many rounds of acquires happen within a period.
async fn rounds_in(asked: &AtomicU32, length: Duration) -> u32 {
    let before = asked.load(Ordering::Relaxed);
    sleep(length).await;
    (asked.load(Ordering::Relaxed) - before) / NODES as u32
}

/// Waits in the queue with this TTL, until the lock is granted or an error ends the wait.
async fn start_waiting(
    locks: &Redlock,
    lock: &LockName,
    millis: u64,
) -> JoinHandle<Result<Lease, LockError>> {
    let before = locks.waiting().waiters;
    let of_task = locks.clone();
    let lock = lock.clone();
    let waiter = tokio::spawn(async move {
        let options = AcquireOptions::default();
        of_task
            .acquire_within(&lock, ttl(millis), options, Duration::from_secs(3_600), || Ok(()))
            .await
    });
    while locks.waiting().waiters <= before {
        tokio::task::yield_now().await;
    }
    waiter
}

/// One waiter for each of many held locks.
async fn start_waiting_for_each(
    locks: &Redlock,
    names: usize,
) -> Vec<JoinHandle<Result<Lease, LockError>>> {
    let mut waiters = Vec::new();
    for lock in (0..names).map(|n| name(&format!("job-{n}"))) {
        acquire(locks, &lock).await;
        waiters.push(start_waiting(locks, &lock, LONG_MS).await);
    }
    waiters
}

// Each of the following tests covers a bug of the past. The time is paused: the clock advances only
// while all tasks are idle.

#[tokio::test(start_paused = true)]
async fn thousands_of_awaited_names_are_polled_at_a_bounded_rate() {
    const NAMES: usize = 8_000;
    let (locks, asked, _) = counted();
    let waiters = start_waiting_for_each(&locks, NAMES).await;
    assert_eq!(locks.waiting().locks, NAMES);
    // During these seconds each first waiter still counts as the sole client of its lock.
    sleep(Duration::from_secs(2)).await;
    let rounds = rounds_in(&asked, Duration::from_secs(20)).await;
    assert!((5_000..=12_000).contains(&rounds), "{rounds} rounds in 20 s");
    waiters.iter().for_each(JoinHandle::abort);
}

#[tokio::test(start_paused = true)]
async fn a_queue_without_quorum_backs_off_and_resumes_soon() {
    let (locks, asked, silent) = counted();
    let lock = name("job");
    let held = acquire(&locks, &lock).await;
    let mut waiters = Vec::new();
    for _ in 0..5 {
        waiters.push(start_waiting(&locks, &lock, LONG_MS).await);
    }
    // Waits long enough for the gateway to notice that there is no quorum.
    silent.store(true, Ordering::Relaxed);
    sleep(Duration::from_secs(3)).await;
    let rounds = rounds_in(&asked, Duration::from_secs(20)).await;
    assert!((8..=22).contains(&rounds), "{rounds} rounds in 20 s");
    silent.store(false, Ordering::Relaxed);
    let since = Instant::now();
    locks.release(&lock, &held.token).await.expect("the lock is held");
    let served = waiters.into_iter().map(|waiter| {
        let locks = locks.clone();
        let lock = lock.clone();
        tokio::spawn(async move {
            let lease = waiter.await.expect("no panic").expect("there is a quorum");
            locks.release(&lock, &lease.token).await.expect("the lock is held");
        })
    });
    for one in served.collect::<Vec<_>>() {
        one.await.expect("granted and released");
    }
    assert!(since.elapsed() < Duration::from_millis(2_500), "after {:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn thousands_of_queues_without_quorum_spare_the_nodes() {
    const NAMES: usize = 3_000;
    let (locks, asked, silent) = counted();
    let waiters = start_waiting_for_each(&locks, NAMES).await;
    silent.store(true, Ordering::Relaxed);
    sleep(Duration::from_secs(20)).await;
    let rounds = rounds_in(&asked, Duration::from_secs(20)).await;
    assert!(rounds <= 12_000, "{rounds} rounds in 20 s");
    waiters.iter().for_each(JoinHandle::abort);
}

/// A node that carries out one operation after another, each of them slowly.
fn slow(node: Arc<MemoryNode>, micros: &Arc<AtomicU64>) -> Arc<dyn Node> {
    let queue = Arc::new(Mutex::new(VecDeque::<Task>::new()));
    let micros = micros.clone();
    intercepted(node, move |node, task| {
        let micros = micros.load(Ordering::Relaxed);
        let mut waiting = queue.lock().unwrap();
        if micros == 0 && waiting.is_empty() {
            drop(waiting);
            return pass_on(node, task);
        }
        let due = Instant::now() + Duration::from_micros(micros);
        waiting.push_back(task);
        drop(waiting);
        let queue = queue.clone();
        let node = node.clone();
        tokio::spawn(async move {
            sleep_until(due).await;
            // The oldest operation comes next, whichever task wakes first.
            let next = queue.lock().unwrap().pop_front();
            next.into_iter().for_each(|task| pass_on(&node, task));
        });
    })
}

#[tokio::test]
async fn a_tiny_ttl_at_the_head_of_a_queue_blocks_nobody_behind() {
    let micros = Arc::new(AtomicU64::new(8_000));
    let locks = locks(|node| slow(node, &micros), NODE_TIMEOUT);
    let lock = name("job");
    let held = acquire(&locks, &lock).await;
    // A round gets a tenth of the TTL: 1 ms and 2 ms here.
    let short_ttls =
        [start_waiting(&locks, &lock, 10).await, start_waiting(&locks, &lock, 20).await];
    let first = start_waiting(&locks, &lock, LONG_MS).await;
    let second = start_waiting(&locks, &lock, LONG_MS).await;
    locks.release(&lock, &held.token).await.expect("the lock is held");
    let granted = |waiter: JoinHandle<Result<Lease, LockError>>| async {
        let lease = timeout(PATIENCE, waiter).await.expect("nobody holds the lock");
        lease.expect("no panic").expect("granted")
    };
    let lease = granted(first).await;
    locks.release(&lock, &lease.token).await.expect("the lock is held");
    let next = granted(second).await;
    assert!(next.ticket > lease.ticket, "{next:?} after {lease:?}");
    locks.release(&lock, &next.token).await.expect("the lock is held");
    assert!(
        short_ttls.iter().all(|waiter| !waiter.is_finished()),
        "the waiters with short TTLs wait without a grant"
    );
    short_ttls.iter().for_each(JoinHandle::abort);
}

#[tokio::test]
async fn a_ttl_too_short_for_slow_rounds_is_refused_with_a_minimum() {
    let micros = Arc::new(AtomicU64::new(6_000));
    let locks = locks(|node| slow(node, &micros), NODE_TIMEOUT);
    let tiny = ttl(10);
    let ask = |lock: &'static str, ttl| {
        let locks = locks.clone();
        async move { locks.acquire(&name(lock), ttl, AcquireOptions::default()).await }
    };
    assert!(
        matches!(ask("job", tiny).await, Err(LockError::NoQuorum(_))),
        "no round times are known yet"
    );
    for n in 0..40 {
        acquire(&locks, &name(&format!("other-{n}"))).await;
    }
    // If the machine stands still, the round times become too old to count.
    let mut number = 0;
    let (asked, round, least) = eventually("the TTL is refused", async || {
        number += 1;
        acquire(&locks, &name(&format!("another-{number}"))).await;
        match ask("job", tiny).await {
            Err(LockError::TtlTooShort { asked, round, least }) => Some((asked, round, least)),
            Err(LockError::NoQuorum(_)) => None,
            other => panic!("{other:?}"),
        }
    })
    .await;
    assert!(
        asked == tiny && round >= Duration::from_millis(6) && least.millis() >= 80,
        "{asked:?} {round:?} {least:?}"
    );
    // On a busy machine the minimum in the error may be slightly too short, and rounds may need
    // time to become faster again. So this repeats.
    let least = Mutex::new(least);
    let lease = eventually("the stated minimum is accepted", async || {
        let ttl = *least.lock().unwrap();
        match ask("job", ttl).await {
            Err(LockError::TtlTooShort { least: longer, .. }) => *least.lock().unwrap() = longer,
            other => return other.ok(),
        }
        None
    })
    .await;
    // The lock may have expired before this release.
    let _ = locks.release(&name("job"), &lease.token).await;

    micros.store(0, Ordering::Relaxed);
    let mut number = 0;
    timeout(PATIENCE, async {
        while matches!(ask("job", tiny).await, Err(LockError::TtlTooShort { .. })) {
            number += 1;
            acquire(&locks, &name(&format!("fast-{number}"))).await;
        }
    })
    .await
    .expect("rounds are fast again");
    eventually("the lock is free again", async || {
        ask("job", ttl(LONG_MS)).await.is_ok().then_some(())
    })
    .await;
}
