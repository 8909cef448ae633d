//! Waiting through the core's own API, over real masters. The tests cover the order of the queue,
//! the cost of a handoff for the nodes, hints and their loss, and waiters that are dropped at any
//! moment.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlock_core::clock::{Entropy, OsEntropy, SystemClock};
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{HandoffRoute, Node, NodeState, NodeStatus, Op, Vote};
use redlock_core::{
    AcquireOptions, Env, Lease, LockError, LockName, OwnerChoice, Redlock, Settings, WaitLimit,
    Waiting,
};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::support::chance::{Chance, seed};
use crate::support::harness::{PATIENCE, eventually, masters};
use crate::support::measure::measured;
use crate::support::nodes::{
    Cluster, LONG_MS, Lock, NODE_TIMEOUT, Recorder, in_state, intercepted, name, node_settings,
    now, pass_on, redis_settings, redlock, redlock_with, remote_node_with, ttl,
};

pub(super) async fn acquire(locks: &Redlock, lock: &LockName) -> Lease {
    locks.acquire(lock, ttl(LONG_MS), AcquireOptions::default()).await.expect("the lock is free")
}

async fn wait_for(
    locks: &Redlock,
    lock: &LockName,
    patience: Duration,
) -> Result<Lease, LockError> {
    locks.acquire_within(lock, ttl(LONG_MS), AcquireOptions::default(), patience, || Ok(())).await
}

/// Starts to wait for a lock. Returns when the waiter is in the queue.
pub(super) async fn start_waiting(
    locks: &Redlock,
    lock: &LockName,
) -> JoinHandle<(Lease, Instant)> {
    let before = locks.waiting().waiters;
    let waiter = tokio::spawn({
        let locks = locks.clone();
        let lock = lock.clone();
        async move {
            let lease = wait_for(&locks, &lock, PATIENCE).await.expect("released in time");
            (lease, Instant::now())
        }
    });
    eventually("one more waits", async || (locks.waiting().waiters == before + 1).then_some(()))
        .await;
    waiter
}

/// The core of another gateway process over the same masters.
pub(super) async fn another(cluster: &Cluster) -> Redlock {
    redlock(Cluster::remote_nodes(&cluster.servers, node_settings()).await, NODE_TIMEOUT)
}

pub(super) async fn nothing_is_left(cluster: &Cluster, locks: &Redlock, lock: &LockName) {
    locks.drained().await;
    assert_eq!(locks.waiting(), Waiting { waiters: 0, locks: 0 });
    eventually("no node keeps the lock", async || {
        cluster.stored_on(lock, |_| true).is_empty().then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_follow_the_queue_order_when_some_waiters_leave() {
    const TASKS: u64 = 128;
    let cluster = Cluster::start(5).await;
    let locks = cluster.redlock();
    let lock = name("job");
    let mut chance = Chance::of(seed("WAITING_SEED"), 0);
    let held = acquire(&locks, &lock).await;
    let grants = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..TASKS)
        .map(|task| {
            let locks = locks.clone();
            let lock = lock.clone();
            let grants = grants.clone();
            // Every second waiter may be dropped at any moment.
            let life = if task % 2 == 0 {
                PATIENCE
            } else {
                Duration::from_micros(chance.below(200_000) as u64)
            };
            tokio::spawn(async move {
                match timeout(life, wait_for(&locks, &lock, PATIENCE)).await {
                    Ok(granted) => {
                        let lease = granted.expect("the waiter is served");
                        let ticket = lease.ticket.expect("the request waited");
                        grants.lock().unwrap().push((lease.token.fencing().get(), ticket));
                        locks.release(&lock, &lease.token).await.expect("the lock is held");
                        true
                    }
                    Err(_) => false,
                }
            })
        })
        .collect();
    eventually("the waiters wait", async || {
        (locks.waiting().waiters >= TASKS as usize / 2).then_some(())
    })
    .await;
    locks.release(&lock, &held.token).await.expect("the lock is held");
    let mut served = 0;
    for (task, outcome) in tasks.into_iter().enumerate() {
        let granted = outcome.await.expect("no panic");
        assert!(granted || task % 2 == 1, "task {task} had enough time");
        served += usize::from(granted);
    }
    let mut grants = grants.lock().unwrap().clone();
    assert_eq!(grants.len(), served);
    println!("{served} of {TASKS} were granted");
    grants.sort_unstable();
    assert!(
        grants.is_sorted_by(|earlier, later| earlier.0 < later.0 && earlier.1 < later.1),
        "{grants:?}"
    );
    nothing_is_left(&cluster, &locks, &lock).await;
}

/// Waits until every node has carried out this many operations since the last check. Returns the
/// sizes of each node's calls.
async fn carried(recorder: &Recorder, operations: usize) -> Vec<Vec<usize>> {
    eventually("every node is asked", async || {
        let mut calls = recorder.calls.lock().unwrap();
        let done = calls.len() == 5
            && calls.values().all(|calls| calls.iter().sum::<usize>() >= operations);
        done.then(|| std::mem::take(&mut *calls).into_values().collect())
    })
    .await
}

#[tokio::test]
async fn a_handoff_within_the_process_is_one_call_to_every_node() {
    const ROUNDS: usize = 20;
    let servers = masters(5);
    let lock = name("job");
    let recorder = Arc::new(Recorder::default());
    let mut nodes: Vec<Arc<dyn Node>> = Vec::new();
    for server in &servers {
        let settings = redis_settings(node_settings());
        let remote = remote_node_with(&server.url(), settings, recorder.clone());
        in_state(remote.as_ref(), NodeState::Admitted).await;
        nodes.push(remote);
    }
    let env = Env { observer: recorder.clone(), ..Env::default() };
    let locks = redlock_with(nodes.clone(), NODE_TIMEOUT, env);
    // Catching up may repair the lock, with calls of its own. So this waits until all nodes have
    // caught up.
    for node in &nodes {
        let is_caught_up = |status: &NodeStatus| status.state == NodeState::Admitted;
        node.status().wait_for(is_caught_up).await.expect("the worker lives");
    }
    let mut undisturbed = 0;
    eventually("enough handoffs happen before a poll", async || {
        let held = acquire(&locks, &lock).await;
        carried(&recorder, 1).await;
        let waiter = start_waiting(&locks, &lock).await;
        // The waiter's own attempt was refused by all nodes before the release.
        carried(&recorder, 1).await;
        locks.release(&lock, &held.token).await.expect("the lock is held");
        let (lease, _) = waiter.await.expect("no panic");
        assert!(lease.token.fencing() > held.token.fencing());
        locks.release(&lock, &lease.token).await.expect("the lock is held");
        // The nodes answer in order. So they have answered all operations before the release, too.
        locks.drained().await;
        let calls = std::mem::take(&mut *recorder.calls.lock().unwrap());
        let routes = std::mem::take(&mut *recorder.hand_overs.lock().unwrap());
        // Besides the handoff and the release, there are operations only if the waiter polled.
        let operations: usize = calls.values().flatten().sum();
        if operations == 5 * 3 {
            undisturbed += 1;
            assert_eq!(
                calls.into_values().collect::<Vec<_>>(),
                vec![vec![2, 1]; 5],
                "a handoff is one call with a release and an acquire"
            );
            assert_eq!(routes, [HandoffRoute::Local]);
        }
        (undisturbed == ROUNDS).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_dropped_at_any_moment_leave_no_lock_and_no_slot() {
    const BATCHES: u64 = 25;
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let other = another(&cluster).await;
    let lock = name("job");
    let mut chance = Chance::of(seed("WAITING_SEED"), 0);
    for _ in 0..BATCHES {
        // When the waiters arrive, the lock may be held by this gateway, by the other one, or by
        // nobody. It is released at a random moment.
        let holder = [Some(&locks), Some(&other), None][chance.below(3)];
        let held = match holder {
            Some(holder) => Some((holder, acquire(holder, &lock).await)),
            None => None,
        };
        let dropped: Vec<_> = (0..16)
            .map(|task| {
                let locks = if task % 4 == 0 { &other } else { &locks }.clone();
                let lock = lock.clone();
                let life = Duration::from_micros(chance.below(8_000) as u64);
                tokio::spawn(async move {
                    if let Ok(Ok(lease)) = timeout(life, wait_for(&locks, &lock, PATIENCE)).await {
                        locks.release(&lock, &lease.token).await.expect("the lock is held");
                    }
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_micros(chance.below(4_000) as u64)).await;
        if let Some((holder, held)) = held {
            holder.release(&lock, &held.token).await.expect("the lock is held");
        }
        for task in dropped {
            task.await.expect("no panic");
        }
        nothing_is_left(&cluster, &locks, &lock).await;
        nothing_is_left(&cluster, &other, &lock).await;
    }
    let lease = acquire(&locks, &lock).await;
    locks.release(&lock, &lease.token).await.expect("the lock is held");
}

#[tokio::test]
async fn a_first_waiter_with_a_tiny_wait_makes_one_whole_attempt() {
    let cluster = Cluster::start(5).await;
    let locks = cluster.redlock();
    let lock = name("job");
    for patience in [Duration::ZERO, Duration::from_millis(1)] {
        let lease = wait_for(&locks, &lock, patience).await.expect("the lock is free");
        let refused = wait_for(&locks, &lock, patience).await;
        let Err(LockError::Held(by)) = &refused else { panic!("{refused:?}") };
        assert_eq!(by.fencing, Some(lease.token.fencing()), "the waiter has asked");
        let waiter = start_waiting(&locks, &lock).await;
        let refused = wait_for(&locks, &lock, patience).await;
        assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
        locks.release(&lock, &lease.token).await.expect("the lock is held");
        let (next, _) = waiter.await.expect("no panic");
        locks.release(&lock, &next.token).await.expect("the lock is held");
    }
    nothing_is_left(&cluster, &locks, &lock).await;
}

#[tokio::test]
async fn waiters_beyond_a_limit_are_refused_with_that_limit() {
    let node = |n| MemoryNode::new(format!("node-{n}"), Arc::new(SystemClock), node_settings());
    let nodes = (0..3).map(|n| Arc::new(node(n)) as Arc<dyn Node>).collect();
    let settings = Settings {
        max_waiters: 3,
        max_waiters_per_lock: 2,
        node: node_settings(),
        ..Settings::default()
    };
    let locks = Redlock::new(nodes, settings, Env::default()).expect("good settings");
    let full = name("full");
    let other = name("other");
    let held = [acquire(&locks, &full).await, acquire(&locks, &other).await];
    let mut waiters = vec![start_waiting(&locks, &full).await, start_waiting(&locks, &full).await];
    let refused = |lock: LockName| {
        let locks = locks.clone();
        async move { wait_for(&locks, &lock, PATIENCE).await.expect_err("too many") }
    };
    assert_eq!(
        refused(full.clone()).await,
        LockError::TooManyWaiters { max: 2, limit: WaitLimit::OfLock }
    );
    assert_eq!(locks.waiting(), Waiting { waiters: 2, locks: 1 });
    waiters.push(start_waiting(&locks, &other).await);
    for lock in [&full, &other] {
        assert_eq!(
            refused(lock.clone()).await,
            LockError::TooManyWaiters { max: 3, limit: WaitLimit::All }
        );
    }
    assert_eq!(locks.waiting(), Waiting { waiters: 3, locks: 2 });
    waiters.drain(..).for_each(|waiter| waiter.abort());
    eventually("the waiters are gone", async || {
        (locks.waiting() == Waiting::default()).then_some(())
    })
    .await;
    for (lock, held) in [(&full, &held[0]), (&other, &held[1])] {
        locks.release(lock, &held.token).await.expect("the lock is held");
        assert!(wait_for(&locks, lock, Duration::ZERO).await.is_ok(), "there are free slots again");
    }
}

/// Nodes in memory, only some of which can be reached, and the number of acquires that they
/// receive.
fn in_memory(
    count: usize,
    reached: impl Fn(usize) -> bool,
) -> (Vec<Arc<MemoryNode>>, Arc<AtomicU32>, Redlock) {
    let clock = Arc::new(SystemClock);
    let asked = Arc::new(AtomicU32::new(0));
    let node = |n| Arc::new(MemoryNode::new(format!("node-{n}"), clock.clone(), node_settings()));
    let nodes: Vec<_> = (0..count).map(node).collect();
    let counted = |(n, node): (usize, &Arc<MemoryNode>)| {
        let asked = asked.clone();
        let is_reached = reached(n);
        intercepted(node.clone(), move |node, task| {
            asked.fetch_add(u32::from(matches!(*task.op, Op::Acquire { .. })), Ordering::Relaxed);
            if is_reached {
                pass_on(node, task);
            }
        })
    };
    let counted = nodes.iter().enumerate().map(counted).collect();
    (nodes, asked, redlock(counted, Duration::from_secs(1)))
}

/// The waiter only inspects whether its owner has the lock. If it sent an acquire instead, and the
/// lock had just become free, it would overtake waiters that came before it.
#[tokio::test(start_paused = true)]
async fn a_waiter_with_another_owner_asks_only_when_it_is_first() {
    let (_, asked, locks) = in_memory(3, |_| true);
    let lock = name("job");
    let held = acquire(&locks, &lock).await;
    let first = start_waiting(&locks, &lock).await;
    let before = asked.load(Ordering::Relaxed);
    let options = AcquireOptions {
        owner: OwnerChoice::Shared(OsEntropy.owner()),
        ..AcquireOptions::default()
    };
    let keyed =
        locks.acquire_within(&lock, ttl(LONG_MS), options, Duration::from_millis(100), || Ok(()));
    assert!(matches!(keyed.await, Err(LockError::Held(_))));
    assert_eq!(asked.load(Ordering::Relaxed), before);
    locks.release(&lock, &held.token).await.expect("the lock is held");
    first.await.expect("served");
}

#[tokio::test]
async fn split_votes_with_a_node_down_are_asked_for_again() {
    let (nodes, asked, locks) = in_memory(5, |n| n < 4);
    let lock = Lock::new("job");
    for node in &nodes[..2] {
        assert_eq!(node.run(&lock.acquire(1, now(), LONG_MS)), Vote::Granted);
    }
    let refused = locks.acquire(&name("job"), ttl(LONG_MS), AcquireOptions::default()).await;
    // No quorum is missing. The contender may have the vote of the node that is down, or not.
    let Err(LockError::Held(by)) = refused else { panic!("{refused:?}") };
    assert!(by.is_known() && by.fencing.is_none() && by.expires_in.is_some(), "{by:?}");
    assert_eq!(asked.load(Ordering::Relaxed), 4 * 5, "one attempt and three repetitions");
    locks.drained().await;
    assert_eq!(nodes[2].run(&lock.inspect()), Vote::Missing, "the late grant is released");
}

/// Two of five nodes are down, and a contender has one vote. So before the last node has voted, it is
/// plain that neither has a majority. The last vote shows that the votes were split.
#[tokio::test(start_paused = true)]
async fn votes_are_split_although_the_last_one_cannot_decide() {
    let (memory, _, _) = in_memory(5, |_| true);
    let (lock, t) = (Lock::new("job"), now());
    assert_eq!(memory[0].run(&lock.acquire(1, t, LONG_MS)), Vote::Granted);
    let contended = memory[0].clone();
    let late = intercepted(memory[2].clone(), move |node, task| {
        let (node, contended, undo) = (node.clone(), contended.clone(), lock.undo(1, t));
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            pass_on(&node, task);
            // The contender gives up.
            contended.run(&undo);
        });
    });
    let down = |n: usize| intercepted(memory[n].clone(), |_, task| drop(task));
    let nodes = vec![memory[0].clone(), memory[1].clone(), late, down(3), down(4)];
    let locks = redlock(nodes, Duration::from_secs(1));
    let granted = locks.acquire(&name("job"), ttl(LONG_MS), AcquireOptions::default()).await;
    assert!(granted.is_ok(), "{granted:?}");
}

mod measured {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn contenders_in_three_processes_need_few_rounds_a_grant() {
        measured("the rounds of a grant", compete).await;
    }

    async fn compete() -> Result<(), String> {
        const TASKS: usize = 2;
        let cluster = Cluster::start(5).await;
        let lock = name("job");
        let processes = [cluster.redlock(), another(&cluster).await, another(&cluster).await];
        let until = Instant::now() + Duration::from_secs(2);
        let compete = |locks: &Redlock| {
            let locks = locks.clone();
            let lock = lock.clone();
            tokio::spawn(async move {
                let mut rounds = Vec::new();
                while Instant::now() < until {
                    let lease =
                        wait_for(&locks, &lock, PATIENCE).await.expect("the waiter is served");
                    rounds.push(lease.rounds);
                    locks.release(&lock, &lease.token).await.expect("the lock is held");
                }
                rounds
            })
        };
        let tasks: Vec<_> = (0..TASKS).flat_map(|_| processes.iter().map(compete)).collect();
        let mut distribution = BTreeMap::<u32, usize>::new();
        for task in tasks {
            for rounds in task.await.expect("no panic") {
                *distribution.entry(rounds).or_default() += 1;
            }
        }
        for locks in &processes {
            nothing_is_left(&cluster, locks, &lock).await;
        }
        let grants: usize = distribution.values().sum();
        let rounds: usize =
            distribution.iter().map(|(rounds, count)| *rounds as usize * count).sum();
        let mean = rounds as f64 / grants as f64;
        println!("{grants} grants, {mean:.2} rounds each: {distribution:?}");
        // A waiter may lose against two waiters of other processes. It competes again after each of
        // their handoff quotas, so it rarely loses for long. On two busy cores a grant took 1.5
        // rounds on average. One in a hundred took more than 10, and the worst of 2,300 took about
        // 40.
        let above =
            |limit: u32| distribution.range(limit + 1..).map(|(_, count)| count).sum::<usize>();
        let is_fair = above(25) <= grants.div_ceil(20) && above(100) == 0;
        if mean < 3.0 && is_fair { Ok(()) } else { Err(format!("{mean:.2}: {distribution:?}")) }
    }
}
