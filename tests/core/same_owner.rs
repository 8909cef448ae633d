//! Several attempts for one owner at once, as an idempotency key makes them that is sent again while the first request is
//! still on its way: what one of them was promised, none of the others takes away.

use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redlock_core::clock::{Entropy, OsEntropy, SystemClock};
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{Keys, Node, NodeSettings, Op, Task};
use redlock_core::{AcquireOptions, Lease, LockError, LockName, Owner, Redlock};
use tokio::time::timeout;

use crate::support::nodes::{LONG_MS, PREFIX, intercepted, name, now, pass_on, redlock, ttl};

/// Calls `second` instead of the node for every acquire after the first.
fn with_second_acquire(
    node: Arc<dyn Node>,
    second: impl Fn(&Arc<dyn Node>, Task) + Send + Sync + 'static,
) -> Arc<dyn Node> {
    let acquires = AtomicU32::new(0);
    intercepted(node, move |node, task| {
        if matches!(*task.op, Op::Acquire { .. }) && acquires.fetch_add(1, Ordering::Relaxed) >= 1 {
            second(node, task);
        } else {
            pass_on(node, task);
        }
    })
}

/// Of nodes in memory, which answer at once.
fn acquire_at_once(locks: &Redlock, lock: &LockName, owner: Owner) -> Result<Lease, LockError> {
    let options = AcquireOptions { owner: Some(owner), ..AcquireOptions::default() };
    let attempt = pin!(locks.acquire(lock, ttl(LONG_MS), options));
    match attempt.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("all nodes answer at once"),
    }
}

/// The first try of one attempt is granted on node 0 alone. Before its second try arrives there, another attempt of the same
/// owner is granted the lock by nodes 0 and 1. Then the first attempt is dropped. Node 0's vote was the other's by then.
#[tokio::test]
async fn a_cancelled_attempt_takes_away_nothing_that_another_of_its_owner_was_granted_between_two_tries() {
    let lock = name("job");
    let memory: Vec<_> = (0..3)
        .map(|n| Arc::new(MemoryNode::new(format!("node-{n}"), Arc::new(SystemClock), NodeSettings::default())))
        .collect();
    let node = |n: usize| memory[n].clone() as Arc<dyn Node>;
    // No connection to a gateway.
    let away = |n: usize| intercepted(node(n), |_, task| drop(task));
    // What makes the first attempt try again, with a token beyond that of the second.
    let keys = Keys::new(PREFIX, &lock);
    for (n, ahead) in [(1, 250_000), (2, 400_000)] {
        memory[n].set_foreign(&keys.fence, (now() + ahead).to_string().as_bytes(), Some(Duration::from_secs(60)));
    }

    let owner = OsEntropy.owner();
    let granted: Arc<Mutex<Option<Lease>>> = Arc::default();
    let other = redlock(vec![node(0), node(1), away(2)], Duration::from_secs(1));
    let interrupted = with_second_acquire(node(0), {
        let (granted, lock) = (granted.clone(), lock.clone());
        move |node, task| {
            granted.lock().unwrap().get_or_insert_with(|| acquire_at_once(&other, &lock, owner).expect("it is free"));
            pass_on(node, task);
        }
    });
    // Never answers: a reply that is dropped would be an answer.
    let silent = |n: usize| {
        let unanswered = Mutex::new(Vec::new());
        with_second_acquire(node(n), move |_, task| unanswered.lock().unwrap().push(task))
    };
    let first = redlock(vec![interrupted, silent(1), silent(2)], Duration::from_secs(1));
    let options = AcquireOptions { owner: Some(owner), ..AcquireOptions::default() };
    let cancelled = timeout(Duration::ZERO, first.acquire(&lock, ttl(LONG_MS), options)).await;
    assert!(cancelled.is_err(), "its second try has no majority yet: {cancelled:?}");

    let lease = granted.lock().unwrap().take().expect("granted between the two tries");
    let third = redlock(vec![node(0), away(1), node(2)], Duration::from_secs(1));
    let second_holder = third.acquire(&lock, ttl(LONG_MS), AcquireOptions::default()).await;
    assert!(second_holder.is_err(), "{lease:?} was promised, and now {second_holder:?}");
}
