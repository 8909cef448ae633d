//! A release for an owner whose client never received the token. Afterwards no grant of that owner
//! is stored, and none that arrives later stays. No other owner's lock changes.

use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use redlock_core::clock::{Entropy, OsEntropy};
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{Node, Op, Task, Vote};
use redlock_core::{AcquireOptions, FencingToken, LockError, Owner, Redlock};

use crate::support::harness::eventually;
use crate::support::nodes::{
    LONG_MS, Lock, NODE_TIMEOUT, intercepted, memory_nodes, name, pass_on, redlock, shared_by, ttl,
};

/// An operation in flight, and the node that it will reach later.
type OnItsWay = (Arc<dyn Node>, Task);
type Sockets = Arc<Mutex<Vec<OnItsWay>>>;

fn over(nodes: &[Arc<MemoryNode>]) -> Redlock {
    redlock(
        nodes.iter().map(|node| node.clone() as Arc<dyn Node>).collect(),
        Duration::from_secs(1),
    )
}

/// A gateway over these nodes. What it sends stays in its sockets, if `stays` says so of the
/// operation.
fn with_sockets(nodes: &[Arc<MemoryNode>], stays: fn(&Op) -> bool) -> (Redlock, Sockets) {
    let sockets = Sockets::default();
    let sends = |node: &Arc<MemoryNode>| {
        let sockets = sockets.clone();
        intercepted(node.clone(), move |node, task| {
            if stays(&task.op) {
                sockets.lock().unwrap().push((node.clone(), task));
            } else {
                pass_on(node, task);
            }
        })
    };
    (redlock(nodes.iter().map(sends).collect(), NODE_TIMEOUT), sockets)
}

/// The gateway of the first request has died. Its operations are still in the masters' sockets.
#[tokio::test]
async fn an_acquire_in_flight_sets_nothing_after_release_by_owner() {
    let lock = name("job");
    let nodes = memory_nodes();
    let owner = OsEntropy.owner();
    let (dead, in_sockets) = with_sockets(&nodes, |_| true);
    let mut request = pin!(dead.acquire(&lock, ttl(LONG_MS), shared_by(owner)));
    assert!(request.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert_eq!(in_sockets.lock().unwrap().len(), 3);

    let alive = over(&nodes);
    assert_eq!(
        alive.release_owner(&lock, &owner).await,
        Err(LockError::Lost),
        "no lock is stored yet"
    );
    let arrived = std::mem::take(&mut *in_sockets.lock().unwrap());
    arrived.into_iter().for_each(|(node, task)| pass_on(&node, task));
    let stored: Vec<_> = nodes.iter().map(|node| node.run(&Lock::new("job").inspect())).collect();
    assert_eq!(stored, [Vote::Missing, Vote::Missing, Vote::Missing]);
    alive.acquire(&lock, ttl(LONG_MS), AcquireOptions::default()).await.expect("the lock is free");
}

#[tokio::test]
async fn release_by_owner_takes_every_grant_of_that_owner() {
    let lock = name("job");
    let nodes = memory_nodes();
    let owner = OsEntropy.owner();
    let locks = over(&nodes);
    let lease =
        locks.acquire(&lock, ttl(LONG_MS), shared_by(owner)).await.expect("the lock is free");
    // Another gateway returns this grant to the same client, and extends it.
    let again = over(&nodes)
        .acquire(&lock, ttl(LONG_MS), shared_by(owner))
        .await
        .expect("the owner has the lock");
    assert!(again.replayed && again.token == lease.token);
    let up_to = locks.release_owner(&lock, &owner).await.expect("the lock was granted");
    assert!(up_to > lease.token.fencing());
    assert_eq!(locks.extend(&lock, &lease.token, ttl(LONG_MS)).await.err(), Some(LockError::Lost));
    let next =
        locks.acquire(&lock, ttl(LONG_MS), shared_by(owner)).await.expect("the lock is free");
    assert!(!next.replayed && next.token.fencing() > up_to);
}

/// Releases by owner. While a release is on its way to the nodes, a new request of the same owner is
/// granted the lock, so the release arrives at a newer grant. This happens `newer_grants` times.
async fn released_beside(newer_grants: usize) -> (Result<FencingToken, LockError>, Vec<Vote>) {
    let lock = name("job");
    let nodes = memory_nodes();
    let owner = OsEntropy.owner();
    let (locks, in_sockets) = with_sockets(&nodes, |op| matches!(op, Op::Release { .. }));
    let release = tokio::spawn(async move { locks.release_owner(&name("job"), &owner).await });
    let arrive = async || {
        let is_sent = || in_sockets.lock().unwrap().len() == 3;
        eventually("a release was sent to every node, or its result is known", async || {
            (is_sent() || release.is_finished()).then_some(())
        })
        .await;
        std::mem::take(&mut *in_sockets.lock().unwrap())
    };
    let mut last = None;
    for _ in 0..newer_grants {
        let arriving = arrive().await;
        if let Some(token) = last.take() {
            over(&nodes).release(&lock, &token).await.expect("the owner still has the lock");
        }
        let lease = over(&nodes).acquire(&lock, ttl(LONG_MS), shared_by(owner)).await;
        last = Some(lease.expect("the lock is free").token);
        arriving.into_iter().for_each(|(node, task)| pass_on(&node, task));
    }
    arrive().await.into_iter().for_each(|(node, task)| pass_on(&node, task));
    let result = release.await.expect("no panic");
    (result, nodes.iter().map(|node| node.run(&Lock::new("job").inspect())).collect())
}

#[tokio::test]
async fn release_by_owner_takes_grants_that_begin_meanwhile() {
    for newer_grants in 0..3 {
        let (result, stored) = released_beside(newer_grants).await;
        let expected = if newer_grants == 0 { Err(LockError::Lost) } else { Ok(()) };
        assert_eq!(result.map(drop), expected, "beside {newer_grants} newer grants");
        assert_eq!(stored, [Vote::Missing, Vote::Missing, Vote::Missing]);
    }
}

/// After the last try, the answer is "unknown", not "somebody else has the lock".
#[tokio::test]
async fn release_by_owner_is_unknown_if_newer_grants_keep_coming() {
    let (result, _) = released_beside(3).await;
    assert!(matches!(result, Err(LockError::Unknown(_))), "{result:?}");
}

/// A release that left a watermark above another holder's token would prevent the repair of that
/// holder's lock on a node that loses it.
#[tokio::test]
async fn release_by_owner_leaves_no_watermark_under_another_holder() {
    let lock = name("job");
    let nodes = memory_nodes();
    let locks = over(&nodes);
    let held = locks
        .acquire(&lock, ttl(LONG_MS), AcquireOptions::default())
        .await
        .expect("the lock is free");
    let fences =
        || nodes.iter().map(|node| node.run(&Lock::new("job").inspect_fence())).collect::<Vec<_>>();
    let records = |votes: Vec<Vote>| -> Vec<_> {
        let record = |vote| match vote {
            Vote::Found(holding) => holding.record,
            vote => panic!("{vote:?}"),
        };
        votes.into_iter().map(record).collect()
    };
    let before = records(fences());
    let refused = locks.release_owner(&lock, &OsEntropy.owner()).await;
    assert!(matches!(refused, Err(LockError::NotHolder(_))), "{refused:?}");
    // While one node is silent, the locks on the other two may belong to another owner's majority.
    // So the release must leave the watermarks of both as they are.
    let silent = intercepted(nodes[2].clone(), |_, task| drop(task));
    let two = vec![nodes[0].clone() as Arc<dyn Node>, nodes[1].clone(), silent];
    let refused =
        redlock(two, Duration::from_secs(1)).release_owner(&lock, &OsEntropy.owner()).await;
    assert!(matches!(refused, Err(LockError::NotHolder(_))), "{refused:?}");
    assert_eq!(records(fences()), before);
    locks.extend(&lock, &held.token, ttl(LONG_MS)).await.expect("the other holder keeps its lock");
}

#[tokio::test]
async fn release_by_owner_is_unknown_without_a_majority() {
    let lock = name("job");
    let nodes = memory_nodes();
    let owner = OsEntropy.owner();
    over(&nodes).acquire(&lock, ttl(LONG_MS), shared_by(owner)).await.expect("the lock is free");
    let silent = |n: usize| intercepted(nodes[n].clone(), |_, task| drop(task));
    let one = redlock(vec![silent(0), silent(1), silent(2)], Duration::from_secs(1));
    let unknown = one.release_owner(&lock, &owner).await;
    assert!(matches!(unknown, Err(LockError::Unknown(_))), "{unknown:?}");
    // The grants that were found are released. But the answer does not claim that no others exist.
    let one_answers = redlock(vec![nodes[0].clone(), silent(1), silent(2)], Duration::from_secs(1));
    let unknown = one_answers.release_owner(&lock, &owner).await;
    assert!(matches!(unknown, Err(LockError::Unknown(_))), "{unknown:?}");
    assert_eq!(nodes[0].run(&Lock::new("job").inspect()), Vote::Missing);
}

#[tokio::test]
async fn release_by_owner_never_takes_a_foreign_or_kept_free_record() {
    let locks = over(&memory_nodes());
    assert_eq!(locks.release_owner(&name("job"), &Owner::NOBODY).await, Err(LockError::Lost));
}
