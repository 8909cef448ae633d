//! A repair arrives late. Meanwhile the lock was released, or granted to another owner. The repair
//! must not change that.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlock_core::clock::{Clock, SystemClock};
use redlock_core::node::{Node, Op, Reply, SafetyRules, Task, Vote, Voter};
use redlock_core::{Env, Lease};
use tokio::time::Instant;

use crate::core::repair::{CLUSTER, EXTENSION_MS, FiveNodes};
use crate::support::cluster::{ClusterSettings, OUTLASTING_MS};
use crate::support::harness::{PATIENCE, eventually};
use crate::support::nodes::{intercepted, pass_on};

/// While asked to, holds inspections back and passes all other operations on. A repair begins with
/// an inspection, so this holds repairs back.
#[derive(Default)]
struct HeldBack {
    inspections: AtomicBool,
    tasks: Mutex<Vec<(Arc<dyn Node>, Task)>>,
    /// The nodes' votes on repairs.
    repairs: Arc<Mutex<Vec<Vote>>>,
}

/// Records a vote on a repair, and passes it on. Other operations may be answered at the same time.
struct Recorded {
    votes: Arc<Mutex<Vec<Vote>>>,
    reply: Mutex<Option<Reply>>,
}

impl Voter for Recorded {
    fn vote(&self, _: usize, vote: Vote) {
        self.votes.lock().unwrap().push(vote.clone());
        if let Some(reply) = self.reply.lock().unwrap().take() {
            reply.send(vote);
        }
    }
}

impl HeldBack {
    fn submit(&self, node: &Arc<dyn Node>, mut task: Task) {
        match *task.op {
            Op::Inspect { .. } if self.inspections.load(Ordering::SeqCst) => {
                self.tasks.lock().unwrap().push((node.clone(), task));
            }
            Op::Repair { .. } => {
                let votes = self.repairs.clone();
                let reply = Mutex::new(Some(task.reply));
                task.reply = Reply::new(Arc::new(Recorded { votes, reply }), 0);
                pass_on(node, task);
            }
            _ => pass_on(node, task),
        }
    }

    /// Passes on the inspections that were held back. Returns their number.
    fn let_go(&self) -> usize {
        self.inspections.store(false, Ordering::SeqCst);
        let tasks = std::mem::take(&mut *self.tasks.lock().unwrap());
        let count = tasks.len();
        for (node, task) in tasks {
            pass_on(&node, Task { not_after: Instant::now() + PATIENCE, ..task });
        }
        count
    }
}

/// The clock of a machine that can be suspended. During that time all other clocks of the machine
/// stand still.
#[derive(Default)]
struct SuspendedClock(AtomicU32);

impl Clock for SuspendedClock {
    fn monotonic(&self) -> Duration {
        SystemClock.monotonic() + Duration::from_secs(self.0.load(Ordering::SeqCst).into())
    }
    fn wall_micros(&self) -> u64 {
        SystemClock.wall_micros()
    }
}

/// Node 4 has lost the lock. An extension has noticed the loss, and its repair is held back.
async fn with_a_repair_in_flight(rules: SafetyRules) -> (FiveNodes, Lease, Arc<HeldBack>) {
    with_a_repair_in_flight_by(rules, Arc::new(SystemClock)).await
}

async fn with_a_repair_in_flight_by(
    rules: SafetyRules,
    clock: Arc<dyn Clock>,
) -> (FiveNodes, Lease, Arc<HeldBack>) {
    let held = Arc::new(HeldBack::default());
    let env = Env { clock, ..Env::default() };
    let slow = |node| {
        let held = held.clone();
        intercepted(node, move |node, task| held.submit(node, task))
    };
    let rules = SafetyRules { admitted_is_caught_up: false, ..rules };
    let five = FiveNodes::start_with(&ClusterSettings { rules, ..CLUSTER }, env, slow).await;
    let lease = five.held(&CLUSTER).await;
    five.lose_lock(4);
    held.inspections.store(true, Ordering::SeqCst);
    five.extend(&lease, EXTENSION_MS).await.unwrap();
    eventually("the repair is in flight", async || {
        (held.tasks.lock().unwrap().len() == 1).then_some(())
    })
    .await;
    (five, lease, held)
}

/// Lets the repair continue. Returns node 4's vote on it.
async fn answer_to_the_repair(held: &HeldBack) -> Vote {
    assert_eq!(held.let_go(), 1);
    eventually("the repair is answered", async || held.repairs.lock().unwrap().pop()).await
}

/// The lock is released everywhere before its repair arrives. Returns the nodes that store the lock
/// after the repair.
async fn stored_after_a_late_repair(rules: SafetyRules) -> Vec<usize> {
    let (five, lease, held) = with_a_repair_in_flight(rules).await;
    five.locks.release(&five.lock, &lease.token).await.unwrap();
    five.locks.drained().await;
    answer_to_the_repair(&held).await;
    (0..5).filter(|at| five.raw(*at).is_some()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_repair_after_the_release_restores_nothing() {
    assert_eq!(stored_after_a_late_repair(SafetyRules::ALL).await, Vec::<usize>::new());
    let off = SafetyRules { release_leaves_a_tombstone: false, ..SafetyRules::ALL };
    assert_eq!(
        stored_after_a_late_repair(off).await,
        [4],
        "nothing goes wrong without the tombstone"
    );
    let off = SafetyRules { watermark_is_checked: false, ..SafetyRules::ALL };
    assert_eq!(
        stored_after_a_late_repair(off).await,
        [4],
        "nothing goes wrong without the watermark"
    );
}

/// When the repair arrives, the node may have lost its data once more, finished its quarantine, and
/// granted the lock to another owner.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn nothing_is_repaired_after_the_extended_lease_has_ended() {
    let clock = Arc::new(SuspendedClock::default());
    let (five, lease, held) = with_a_repair_in_flight_by(SafetyRules::ALL, clock.clone()).await;
    clock.0.store(OUTLASTING_MS as u32 / 1_000 + 1, Ordering::SeqCst);
    assert_eq!(held.let_go(), 1);
    // The nodes answer this inspection after the operations that were held back, because they
    // answer in order.
    five.locks.inspect(&five.lock).await;
    five.locks.drained().await;
    assert!(held.repairs.lock().unwrap().is_empty(), "no repair was sent");
    assert_eq!(five.stored_on(&lease), [0, 1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_repair_after_a_grant_to_another_changes_nothing() {
    let (five, lease, held) = with_a_repair_in_flight(SafetyRules::ALL).await;
    five.locks.release(&five.lock, &lease.token).await.unwrap();
    let next = five.held(&CLUSTER).await;
    let vote = answer_to_the_repair(&held).await;
    assert!(matches!(vote, Vote::Held(_)), "{vote:?}");
    assert_eq!(five.stored_on(&next), [0, 1, 2, 3, 4]);

    // Here the next holder has released the lock, too.
    let (five, lease, held) = with_a_repair_in_flight(SafetyRules::ALL).await;
    five.locks.release(&five.lock, &lease.token).await.unwrap();
    let next = five.held(&CLUSTER).await;
    five.locks.release(&five.lock, &next.token).await.unwrap();
    five.locks.drained().await;
    let vote = answer_to_the_repair(&held).await;
    assert!(matches!(vote, Vote::Stale { .. }), "{vote:?}");
    assert!((0..5).all(|at| five.raw(at).is_none()));
}
