//! Several attempts for one owner at once, as an idempotency key makes them that is sent again while the first request is
//! still on its way: what one of them was promised, none of the others takes away.

use std::pin::pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redlock_core::clock::{Entropy, OsEntropy, SystemClock};
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{Keys, Node, NodeSettings, NodeStatus, Op, Reply};
use redlock_core::{AcquireOptions, Lease, LockError, LockName, Owner, Redlock};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use crate::nodes::{LONG_MS, PREFIX, name, now, redlock, ttl};

type Meanwhile = Box<dyn Fn() + Send + Sync>;

/// A node whose second acquire finds that something else has happened before it.
struct Interrupted {
    node: Arc<dyn Node>,
    acquires: AtomicU32,
    meanwhile: Meanwhile,
}

impl Node for Interrupted {
    fn name(&self) -> &str {
        self.node.name()
    }
    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.node.status()
    }
    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply) {
        if matches!(*op, Op::Acquire { .. }) && self.acquires.fetch_add(1, Ordering::Relaxed) == 1 {
            (self.meanwhile)();
        }
        self.node.submit(op, not_after, reply);
    }
}

/// A node that never answers a second acquire.
struct Silent(Arc<dyn Node>, AtomicU32, Mutex<Vec<Reply>>);

impl Node for Silent {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.0.status()
    }
    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply) {
        if matches!(*op, Op::Acquire { .. }) && self.1.fetch_add(1, Ordering::Relaxed) >= 1 {
            return self.2.lock().unwrap().push(reply);
        }
        self.0.submit(op, not_after, reply);
    }
}

/// A node that has no connection to a gateway.
struct Away(Arc<dyn Node>);

impl Node for Away {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.0.status()
    }
    fn submit(&self, _: Arc<Op>, _: Instant, reply: Reply) {
        drop(reply);
    }
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
    let away = |n: usize| Arc::new(Away(node(n))) as Arc<dyn Node>;
    // What makes the first attempt try again, with a token beyond that of the second.
    let keys = Keys::new(PREFIX, &lock);
    for (n, ahead) in [(1, 250_000), (2, 400_000)] {
        memory[n].set_foreign(&keys.fence, (now() + ahead).to_string().as_bytes(), Some(Duration::from_secs(60)));
    }

    let owner = OsEntropy.owner();
    let granted: Arc<Mutex<Option<Lease>>> = Arc::default();
    let other = redlock(vec![node(0), node(1), away(2)], Duration::from_secs(1));
    let meanwhile: Meanwhile = Box::new({
        let (granted, lock) = (granted.clone(), lock.clone());
        move || *granted.lock().unwrap() = acquire_at_once(&other, &lock, owner).ok()
    });
    let silent = |n: usize| Arc::new(Silent(node(n), AtomicU32::new(0), Mutex::default())) as Arc<dyn Node>;
    let interrupted = Interrupted { node: node(0), acquires: AtomicU32::new(0), meanwhile };
    let first = redlock(vec![Arc::new(interrupted), silent(1), silent(2)], Duration::from_secs(1));
    let options = AcquireOptions { owner: Some(owner), ..AcquireOptions::default() };
    let cancelled = timeout(Duration::ZERO, first.acquire(&lock, ttl(LONG_MS), options)).await;
    assert!(cancelled.is_err(), "its second try has no majority yet: {cancelled:?}");

    let lease = granted.lock().unwrap().take().expect("granted between the two tries");
    let third = redlock(vec![node(0), away(1), node(2)], Duration::from_secs(1));
    let second_holder = third.acquire(&lock, ttl(LONG_MS), AcquireOptions::default()).await;
    assert!(second_holder.is_err(), "{lease:?} was promised, and now {second_holder:?}");
}
