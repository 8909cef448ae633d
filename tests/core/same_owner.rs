//! Several attempts of one owner run at the same time. That happens when a client repeats an
//! idempotency key while its first request is still in flight. No attempt may take away a grant
//! that another attempt has promised to the client.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redlock_core::clock::{Entropy, OsEntropy, SystemClock};
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{
    Effect, Failure, Keys, Node, Op, Reason, Record, ReleaseScope, Reply, Task, Vote,
};
use redlock_core::{
    AcquireOptions, HeldBy, Info, Lease, LockError, LockName, LockSet, Owner, OwnerChoice,
    QueueMode, Redlock, Slots,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::support::harness::{PATIENCE, eventually};
use crate::support::nodes::{
    AGAIN, LONG_MS, Lock, PREFIX, assert_extended, intercepted, memory_nodes, name, node_settings,
    now, pass_on, redlock, shared_by, ttl,
};

/// The node gets only the first acquire. For each later one, `second` is called instead.
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

/// Acquires a lock on nodes in memory, which answer at once.
fn acquire_at_once(locks: &Redlock, lock: &LockName, owner: Owner) -> Result<Lease, LockError> {
    let attempt = pin!(locks.acquire(lock, ttl(LONG_MS), shared_by(owner)));
    match attempt.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("all nodes answer at once"),
    }
}

/// Attempt A proposes, and only node 0 grants. Before A's second proposal arrives there, nodes 0
/// and 1 grant the lock to attempt B of the same owner. Then A is dropped. By then node 0's vote
/// belongs to B, so the undo of A must not delete it.
#[tokio::test]
async fn a_cancelled_attempt_spares_its_owners_other_grants() {
    let lock = name("job");
    let memory = memory_nodes();
    let node = |n: usize| memory[n].clone() as Arc<dyn Node>;
    // A gateway that has no connection to this node.
    let away = |n: usize| intercepted(node(n), |_, task| drop(task));
    // Because of this watermark the first attempt proposes again, with a token larger than that of
    // the second attempt.
    let keys = Keys::new(PREFIX, &lock);
    for (n, ahead) in [(1, 20_000_000), (2, 30_000_000)] {
        memory[n].set_foreign(
            &keys.fence,
            (now() + ahead).to_string().as_bytes(),
            Some(Duration::from_secs(3_600)),
        );
    }

    let owner = OsEntropy.owner();
    let granted: Arc<Mutex<Option<Lease>>> = Arc::default();
    let other = redlock(vec![node(0), node(1), away(2)], Duration::from_secs(1));
    let interrupted = with_second_acquire(node(0), {
        let granted = granted.clone();
        let lock = lock.clone();
        move |node, task| {
            granted.lock().unwrap().get_or_insert_with(|| {
                acquire_at_once(&other, &lock, owner).expect("the lock is free")
            });
            pass_on(node, task);
        }
    });
    // This node never answers. If it dropped the reply, that would count as an answer.
    let silent = |n: usize| {
        let unanswered = Mutex::new(Vec::new());
        with_second_acquire(node(n), move |_, task| unanswered.lock().unwrap().push(task))
    };
    let first = redlock(vec![interrupted, silent(1), silent(2)], Duration::from_secs(1));
    let cancelled = first.acquire(&lock, ttl(LONG_MS), shared_by(owner));
    let cancelled = timeout(Duration::ZERO, cancelled).await;
    assert!(cancelled.is_err(), "the second proposal has no majority yet: {cancelled:?}");

    let lease = granted.lock().unwrap().take().expect("granted between the two proposals");
    let third = redlock(vec![node(0), away(1), node(2)], Duration::from_secs(1));
    let second_holder = third.acquire(&lock, ttl(LONG_MS), AcquireOptions::default()).await;
    assert!(second_holder.is_err(), "{lease:?} was promised, and now {second_holder:?}");
}

/// Two requests of one owner each get a vote from another master. If neither were undone, nobody
/// could get the lock for a whole TTL.
#[tokio::test]
async fn a_denied_proposal_that_met_two_watermarks_leaves_no_vote() {
    let lock = name("job");
    let keys = Keys::new(PREFIX, &lock);
    let memory = memory_nodes();
    let taken = |n: usize| {
        let node = memory[n].clone();
        let keys = keys.clone();
        let fence = (now() + 30_000_000).to_string();
        node.set_foreign(&keys.fence, fence.as_bytes(), Some(Duration::from_secs(3_600)));
        // The lock is free for the first proposal. Another owner holds it at the second.
        with_second_acquire(memory[n].clone(), move |inner, task| {
            node.set_foreign(&keys.lock, b"somebody", Some(Duration::from_secs(3_600)));
            pass_on(inner, task);
        })
    };
    let locks = redlock(
        vec![memory[0].clone() as Arc<dyn Node>, taken(1), taken(2)],
        Duration::from_secs(1),
    );
    let denied = acquire_at_once(&locks, &lock, OsEntropy.owner());
    assert!(matches!(denied, Err(LockError::Held(_))), "{denied:?}");
    locks.drained().await;
    assert_eq!(memory[0].run(&Op::Inspect { keys }), Vote::Missing);
}

/// A hedged copy of a request must not wait behind the lock that the first copy has got. If it did,
/// it would finally be refused with `lock_held`, because of its own lock.
#[tokio::test]
async fn a_waiting_copy_gets_the_grant_of_the_first_request() {
    let locks = Redlock::builder().embedded(3).connect().expect("settings");
    let lock = name("job");
    let held = locks
        .acquire(&lock, ttl(LONG_MS), AcquireOptions::default())
        .await
        .expect("the lock is free");
    let owner = OwnerChoice::Shared(OsEntropy.owner());
    let wait = |owner| {
        let locks = locks.clone();
        let lock = lock.clone();
        let (sender, waits) = tokio::sync::oneshot::channel();
        let options = AcquireOptions { owner, ..AcquireOptions::default() };
        let task = tokio::spawn(async move {
            locks
                .acquire_within(&lock, ttl(LONG_MS), options, PATIENCE * 2, || {
                    let _ = sender.send(());
                    Ok(())
                })
                .await
        });
        (task, waits)
    };
    let (first, waits) = wait(owner);
    waits.await.expect("the request waits");
    let (other, waits) = wait(OwnerChoice::Fresh);
    waits.await.expect("the request waits");
    let (copy, waits) = wait(owner);
    waits.await.expect("the request waits");
    locks.release(&lock, &held.token).await.expect("the lock is held");
    let first = first.await.expect("no panic").expect("the waiter becomes first");
    let copy = timeout(PATIENCE, copy)
        .await
        .expect("at once")
        .expect("no panic")
        .expect("the owner has the lock");
    assert_eq!((copy.token, copy.replayed), (first.token, true));
    locks.release(&lock, &copy.token).await.expect("the lock is held");
    other.await.expect("no panic").expect("the waiter is served");
}

/// A wait that is much shorter than the time between two polls of a queue.
const SHORT_WAIT: Duration = Duration::from_millis(20);

/// The task of a request that waits.
type Waiter = JoinHandle<Result<Lease, LockError>>;

/// Another client waits for a lock, and its queue remembers who held the lock when it last asked. The
/// lock must be held.
async fn with_a_waiter(locks: &Redlock, lock: &LockName) -> Waiter {
    waiting(locks, lock, AcquireOptions::default()).await
}

/// Returns when the request waits.
async fn waiting(locks: &Redlock, lock: &LockName, options: AcquireOptions) -> Waiter {
    let (locks, lock) = (locks.clone(), lock.clone());
    let (sender, waits) = oneshot::channel();
    let waiter = tokio::spawn(async move {
        let on_wait = || {
            let _ = sender.send(());
            Ok(())
        };
        locks.acquire_within(&lock, ttl(LONG_MS), options, PATIENCE, on_wait).await
    });
    waits.await.expect("the request waits");
    waiter
}

const COPY: &str = "the copy";

async fn acquire_shortly(
    locks: &Redlock,
    lock: &LockName,
    owner: Owner,
) -> Result<Lease, LockError> {
    let options = AcquireOptions { info: Info::new(COPY).unwrap(), ..shared_by(owner) };
    locks.acquire_within(lock, ttl(LONG_MS), options, SHORT_WAIT, || Ok(())).await
}

/// The undo of the first request then finds all locks extended on a node, or none.
#[tokio::test]
async fn a_repetition_extends_a_set_by_one_operation_on_each_node() {
    let extensions = Arc::new(Mutex::new(Vec::new()));
    let nodes: Vec<_> = memory_nodes()
        .into_iter()
        .enumerate()
        .map(|(at, node)| {
            let extensions = extensions.clone();
            intercepted(node, move |node, task| {
                if let Op::Extend { keys, .. } = &*task.op {
                    extensions.lock().unwrap().push((at, keys.count()));
                }
                pass_on(node, task);
            })
        })
        .collect();
    let locks = redlock(nodes, Duration::from_secs(1));
    let set = LockSet::new(vec![name("a"), name("b"), name("c")]).unwrap();
    let owner = OsEntropy.owner();
    let lease = acquire_set(&locks, &set, owner).await.expect("the locks are free");
    let again = acquire_set(&locks, &set, owner).await.expect("the owner has the set");
    assert_eq!((again.token, again.replayed), (lease.token, true));
    let slots = Some(Slots::new(4, 2).unwrap());
    let of_slots = || AcquireOptions { slots, ..shared_by(owner) };
    let pool = name("pool");
    let lease = locks.acquire(&pool, ttl(LONG_MS), of_slots()).await.expect("slots are free");
    let again = locks.acquire(&pool, ttl(LONG_MS), of_slots()).await.expect("the owner has them");
    assert_eq!((again.token, again.replayed), (lease.token, true));
    let mut seen = extensions.lock().unwrap().clone();
    seen.sort_unstable();
    assert_eq!(seen, [(0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 3)]);
}

/// A client was granted a set and releases one of its locks, while a repetition of its request confirms
/// the set. No extension of the repetition reaches one node of the majority.
#[tokio::test]
async fn a_confirmation_that_lost_one_lock_spares_the_others() {
    let memory = memory_nodes();
    let set = LockSet::new(vec![name("a"), name("b")]).unwrap();
    let granted = Arc::new(Mutex::new(None::<Record>));
    let nodes: Vec<Arc<dyn Node>> = (0..3)
        .map(|at| {
            let (all, granted) = (memory.clone(), granted.clone());
            let extensions = AtomicU32::new(0);
            intercepted(memory[at].clone(), move |node, task| match &*task.op {
                // This node misses the set.
                Op::Acquire { .. } if at == 2 => drop(task),
                Op::Extend { .. } if extensions.fetch_add(1, Ordering::Relaxed) == 0 => {
                    let record = granted.lock().unwrap().clone().expect("it was granted");
                    for node in &all {
                        let keys = Keys::new(PREFIX, &name("a"));
                        let scope = ReleaseScope::Holder;
                        node.run(&Op::Release { keys, record: record.clone(), scope, tell: None });
                    }
                    if at == 1 { drop(task) } else { pass_on(node, task) }
                }
                _ => pass_on(node, task),
            })
        })
        .collect();
    let locks = redlock(nodes, Duration::from_secs(1));
    let owner = OsEntropy.owner();
    acquire_set(&locks, &set, owner).await.expect("the locks are free");
    let copy = |at: usize| memory[at].run(&Op::Inspect { keys: Keys::new(PREFIX, &name("b")) });
    let Vote::Found(holding) = copy(0) else { panic!("not granted") };
    *granted.lock().unwrap() = Some(holding.record);
    let refused = acquire_set(&locks, &set, owner).await;
    assert!(refused.is_err(), "{refused:?}");
    locks.drained().await;
    for at in [0, 1] {
        assert!(matches!(copy(at), Vote::Found(_)), "node {at} lost a lock that its client holds");
    }
}

async fn acquire_set(locks: &Redlock, set: &LockSet, owner: Owner) -> Result<Lease, LockError> {
    locks.acquire_set(set, ttl(LONG_MS), shared_by(owner), None, |_| Ok(())).await
}

/// A node fails the release of slots several times. It votes on each of them.
#[tokio::test]
async fn a_failed_release_of_slots_is_retried_until_it_succeeds() {
    let memory = memory_nodes();
    let tries = Arc::new(AtomicU32::new(0));
    let seen = tries.clone();
    let mut nodes: Vec<Arc<dyn Node>> =
        memory.iter().map(|node| node.clone() as Arc<dyn Node>).collect();
    nodes[0] = intercepted(memory[0].clone(), move |node, task| {
        let is_release = matches!(*task.op, Op::Release { .. });
        if is_release && tries.fetch_add(1, Ordering::Relaxed) < 3 {
            let detail = "MISCONF".to_owned();
            let failure = Failure { reason: Reason::Error, effect: Effect::Possible, detail };
            let votes = vec![Vote::Failed(failure); task.op.keys().count()];
            task.reply.send(Vote::Each(votes));
        } else {
            pass_on(node, task);
        }
    });
    let locks = redlock(nodes, Duration::from_secs(1));
    let pool = name("pool");
    let slots = Some(Slots::new(2, 2).unwrap());
    let options = AcquireOptions { slots, ..AcquireOptions::default() };
    let lease = locks.acquire(&pool, ttl(LONG_MS), options).await.expect("the slots are free");
    locks.release(&pool, &lease.token).await.expect("a majority releases");
    eventually("the node releases the slots", async || {
        let keys = [pool.clone(), pool.of_slot(2)].map(|lock| Keys::new(PREFIX, &lock));
        let is_free = |keys: Keys| memory[0].run(&Op::Inspect { keys }) == Vote::Missing;
        (keys.into_iter().all(is_free) && seen.load(Ordering::Relaxed) == 4).then_some(())
    })
    .await;
}

/// A gateway at which a request waits, and a grant that another gateway has given since. So the memory
/// of the queue is older than the grant.
async fn granted_elsewhere(lock: &LockName, owner: Owner) -> (Redlock, Waiter, Lease) {
    // An intercepted node passes on no hints, so the waiter does not ask again.
    let nodes: Vec<_> = memory_nodes().into_iter().map(|node| intercepted(node, pass_on)).collect();
    let here = redlock(nodes.clone(), Duration::from_secs(1));
    let there = redlock(nodes, Duration::from_secs(1));
    let held = acquire_at_once(&here, lock, OsEntropy.owner()).expect("the lock is free");
    let waiter = with_a_waiter(&there, lock).await;
    here.release(lock, &held.token).await.expect("the lock is held");
    let lease = acquire_at_once(&here, lock, owner).expect("the lock is free");
    (there, waiter, lease)
}

#[tokio::test]
async fn a_repetition_behind_a_waiter_gets_a_grant_from_elsewhere() {
    let (lock, owner) = (name("job"), OsEntropy.owner());
    let (there, waiter, lease) = granted_elsewhere(&lock, owner).await;
    for _ in 0..3 {
        let again = acquire_shortly(&there, &lock, owner).await.expect("the owner has the lock");
        assert_eq!((again.token, again.replayed), (lease.token, true));
    }
    waiter.abort();
}

/// A newer request with the queue mode `newest` supersedes the repetition.
#[tokio::test]
async fn a_superseded_repetition_gets_a_grant_from_elsewhere() {
    let (lock, owner) = (name("job"), OsEntropy.owner());
    let (there, waiter, lease) = granted_elsewhere(&lock, owner).await;
    let newest = |owner| {
        let options = AcquireOptions { queue: QueueMode::Newest, ..shared_by(owner) };
        waiting(&there, &lock, options)
    };
    let again = newest(owner).await;
    let superseding = newest(OsEntropy.owner()).await;
    let again = again.await.expect("no panic").expect("the owner has the lock");
    assert_eq!((again.token, again.replayed), (lease.token, true));
    let third = newest(OsEntropy.owner()).await;
    assert_eq!(superseding.await.expect("no panic").err(), Some(LockError::Superseded));
    waiter.abort();
    third.abort();
}

/// A repetition that asks for its own grant must not overtake the waiters before it.
#[tokio::test]
async fn a_repetition_behind_a_waiter_takes_no_free_lock() {
    let lock = name("job");
    let nodes: Vec<Arc<dyn Node>> = memory_nodes()
        .into_iter()
        .map(|node| {
            intercepted(node, |node, task| {
                if let Op::Acquire { record, .. } = &*task.op {
                    let (_, info) = record.parse().expect("a record");
                    assert_ne!(info, COPY.as_bytes(), "it asks for the lock");
                }
                pass_on(node, task);
            })
        })
        .collect();
    let here = redlock(nodes.clone(), Duration::from_secs(1));
    let there = redlock(nodes, Duration::from_secs(1));
    let held = acquire_at_once(&here, &lock, OsEntropy.owner()).expect("the lock is free");
    let waiter = with_a_waiter(&there, &lock).await;
    here.release(&lock, &held.token).await.expect("the lock is held");
    let refused = acquire_shortly(&there, &lock, OsEntropy.owner()).await;
    let Err(LockError::Held(by)) = refused else { panic!("{refused:?}") };
    assert_ne!(by.fencing, Some(held.token.fencing()), "the former holder");
    waiter.abort();
}

/// Without a quorum, an earlier request of the owner may have got the lock.
#[tokio::test]
async fn a_repetition_behind_a_waiter_is_unknown_without_a_quorum() {
    let lock = name("job");
    let is_away = Arc::new(AtomicBool::new(false));
    let nodes: Vec<Arc<dyn Node>> = memory_nodes()
        .into_iter()
        .enumerate()
        .map(|(at, node)| {
            let is_away = is_away.clone();
            intercepted(node, move |node, task| {
                // An operation that is dropped counts as failed.
                if at == 0 || !is_away.load(Ordering::Relaxed) {
                    pass_on(node, task);
                }
            })
        })
        .collect();
    let locks = redlock(nodes, Duration::from_secs(1));
    acquire_at_once(&locks, &lock, OsEntropy.owner()).expect("the lock is free");
    let waiter = with_a_waiter(&locks, &lock).await;
    is_away.store(true, Ordering::Relaxed);
    let refused = acquire_shortly(&locks, &lock, OsEntropy.owner()).await;
    assert!(matches!(refused, Err(LockError::Unknown(_))), "{refused:?}");
    waiter.abort();
}

/// A release hands its slot to the first waiter. That waiter's owner may have another slot already.
#[tokio::test(start_paused = true)]
async fn a_refused_handoff_of_one_slot_shows_nothing_about_the_other_slots() {
    let (lock, owner) = (name("pool"), OsEntropy.owner());
    let of = |owner| AcquireOptions { slots: Slots::new(2, 1).ok(), ..shared_by(owner) };
    let nodes = memory_nodes();
    let here =
        redlock(nodes.iter().map(|node| node.clone() as _).collect(), Duration::from_secs(1));
    // This gateway can read no slot.
    let handed = Arc::new(AtomicU32::new(0));
    let blind = |node| {
        let handed = handed.clone();
        intercepted(node, move |node, task| {
            if !matches!(*task.op, Op::Inspect { .. }) {
                let is_acquire = matches!(*task.op, Op::Acquire { .. });
                handed.fetch_add(u32::from(is_acquire), Ordering::Relaxed);
                pass_on(node, task);
            }
        })
    };
    let there =
        redlock(nodes.into_iter().map(|node| blind(node)).collect(), Duration::from_secs(1));
    let take =
        async |owner| here.acquire(&lock, ttl(LONG_MS), of(owner)).await.expect("a slot is free");
    take(owner).await;
    let former = take(OsEntropy.owner()).await;
    here.release(&lock, &former.token).await.expect("the slot is held");
    take(OsEntropy.owner()).await;

    let newest =
        |owner| waiting(&there, &lock, AcquireOptions { queue: QueueMode::Newest, ..of(owner) });
    let again = newest(owner).await;
    let lost = there.release(&lock, &former.token).await;
    assert!(matches!(lost, Err(LockError::NotHolder(_))), "{lost:?}");
    assert_eq!(handed.load(Ordering::Relaxed), 3, "the slot was asked for on every node");
    let newer = newest(OsEntropy.owner()).await;
    let again = again.await.expect("no panic");
    assert!(matches!(again, Err(LockError::Unknown(_))), "{again:?}");
    newer.abort();
}

/// Votes that have not reached their request yet.
type Votes = Arc<Mutex<Vec<(Reply, Vote)>>>;

/// A node that carries out every operation at once. Its votes on operations for which `is_delayed`
/// is true stay in `votes`.
fn delaying_votes(
    node: &Arc<MemoryNode>,
    votes: &Votes,
    is_delayed: impl Fn(&Op) -> bool + Send + Sync + 'static,
) -> Arc<dyn Node> {
    let memory = node.clone();
    let votes = votes.clone();
    intercepted(node.clone(), move |node, task| {
        if is_delayed(&task.op) {
            let vote = memory.run(&task.op);
            votes.lock().unwrap().push((task.reply, vote));
        } else {
            pass_on(node, task);
        }
    })
}

/// Operations that have not reached their node yet.
type Tasks = Arc<Mutex<Vec<Task>>>;

/// A node. Operations for which `is_delayed` is true stay in `tasks`.
fn delaying_tasks(
    node: &Arc<MemoryNode>,
    tasks: &Tasks,
    is_delayed: impl Fn(&Op) -> bool + Send + Sync + 'static,
) -> Arc<dyn Node> {
    let tasks = tasks.clone();
    intercepted(node.clone(), move |node, task| match is_delayed(&task.op) {
        true => tasks.lock().unwrap().push(task),
        false => pass_on(node, task),
    })
}

/// Polls a request once. Returns whether it has no result yet.
fn is_pending(request: Pin<&mut impl Future>) -> bool {
    request.poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

fn deliver(votes: &Votes) {
    let votes = std::mem::take(&mut *votes.lock().unwrap());
    votes.into_iter().for_each(|(reply, vote)| reply.send(vote));
}

/// The first request's client goes away while its votes are on their way. By then a repetition of
/// the request has found the grant.
#[tokio::test(start_paused = true)]
async fn a_repetition_does_not_extend_an_abandoned_grant() {
    let lock = name("job");
    let memory = memory_nodes();
    let votes = Votes::default();
    let holds = |node| delaying_votes(node, &votes, |op| matches!(op, Op::Acquire { .. }));
    let first = redlock(memory.iter().map(holds).collect(), Duration::from_secs(1));
    let owner = OsEntropy.owner();
    let mut request = Box::pin(first.acquire(&lock, ttl(LONG_MS), shared_by(owner)));
    assert!(is_pending(request.as_mut()));
    assert_eq!(votes.lock().unwrap().len(), 3);

    let nodes = memory.iter().map(|node| node.clone() as Arc<dyn Node>).collect();
    let second = redlock(nodes, Duration::from_secs(1));
    let mut repetition = Box::pin(second.acquire(&lock, ttl(LONG_MS), shared_by(owner)));
    let waits = is_pending(repetition.as_mut());
    assert!(waits, "the first request may still give the grant up");
    // Without the wait, the extension would run here.
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    drop(request);
    deliver(&votes);
    first.drained().await;
    let outcome = repetition.await;
    assert!(!matches!(&outcome, Ok(lease) if lease.replayed), "{outcome:?}");
    if let Ok(lease) = outcome {
        second.release(&lock, &lease.token).await.expect("held");
    }
    second.drained().await;
    let keys = Keys::new(PREFIX, &lock);
    let stored = memory.iter().map(|node| node.run(&Op::Inspect { keys: keys.clone() }));
    assert!(stored.eq([Vote::Missing, Vote::Missing, Vote::Missing]));
}

/// Two repetitions have found the grant of the first request, which then gives up. Its acquire
/// reaches node 1 after the extension of one repetition, and before that of the other one. So a
/// majority refuses the first extension, and the other repetition is promised the lock.
#[tokio::test(start_paused = true)]
async fn a_refused_confirmation_spares_a_grant_that_another_one_confirmed() {
    let lock = name("job");
    let memory = memory_nodes();
    let is_acquire = |op: &Op| matches!(op, Op::Acquire { .. });
    let [of_node_0, of_node_2, of_refused] = [(); 3].map(|()| Votes::default());
    let late = Tasks::default();
    let first = redlock(
        vec![
            delaying_votes(&memory[0], &of_node_0, is_acquire),
            delaying_tasks(&memory[1], &late, is_acquire),
            delaying_votes(&memory[2], &of_node_2, is_acquire),
        ],
        Duration::from_secs(1),
    );
    let owner = OsEntropy.owner();
    let mut request = Box::pin(first.acquire(&lock, ttl(LONG_MS), shared_by(owner)));
    assert!(is_pending(request.as_mut()));

    // Both repetitions find the grant on nodes 0 and 2.
    let is_extend = |op: &Op| matches!(op, Op::Extend { .. });
    let delayed = memory.iter().map(|node| delaying_votes(node, &of_refused, is_extend));
    let refused = redlock(delayed.collect(), Duration::from_secs(1));
    let refused = tokio::spawn({
        let lock = lock.clone();
        async move { refused.acquire(&lock, ttl(LONG_MS), shared_by(owner)).await }
    });
    let nodes = || memory.iter().map(|node| node.clone() as Arc<dyn Node>).collect();
    let other = redlock(nodes(), Duration::from_secs(1));
    let mut confirmed = Box::pin(other.acquire(&lock, ttl(LONG_MS), shared_by(owner)));
    assert!(is_pending(confirmed.as_mut()));
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    drop(request);
    deliver(&of_node_2);
    while of_refused.lock().unwrap().len() < 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The acquire arrives at node 1. Its vote is under way until the end.
    let Task { op, reply, .. } = late.lock().unwrap().pop().expect("the acquire");
    let vote = memory[1].run(&op);
    assert_eq!(vote, Vote::Granted);
    let confirmed = confirmed.await.expect("nodes 0 and 1 store the grant");
    assert!(confirmed.replayed);
    reply.send(vote);
    deliver(&of_node_0);

    while !refused.is_finished() {
        deliver(&of_refused);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let refused = refused.await.expect("no panic").expect("it finds what was confirmed");
    assert_eq!(refused.token, confirmed.token);
    let another = redlock(nodes(), Duration::from_secs(1));
    let another = another.acquire(&lock, ttl(LONG_MS), AcquireOptions::default()).await;
    assert!(matches!(another, Err(LockError::Held(_))), "promised to one client: {another:?}");
}

/// Node 1 has not received the acquire, and cannot carry out the undo. So its refusals are not final.
#[tokio::test(start_paused = true)]
async fn a_refusal_without_the_undo_releases_nothing() {
    let lock = name("job");
    let keys = Keys::new(PREFIX, &lock);
    let memory = memory_nodes();
    let is_acquire = |op: &Op| matches!(op, Op::Acquire { .. });
    let [of_node_0, of_node_2] = [(); 2].map(|()| Votes::default());
    let late = Tasks::default();
    let first = redlock(
        vec![
            delaying_votes(&memory[0], &of_node_0, is_acquire),
            delaying_tasks(&memory[1], &late, is_acquire),
            delaying_votes(&memory[2], &of_node_2, is_acquire),
        ],
        Duration::from_secs(1),
    );
    let owner = OsEntropy.owner();
    let mut request = Box::pin(first.acquire(&lock, ttl(LONG_MS), shared_by(owner)));
    assert!(is_pending(request.as_mut()));

    let has_extended = AtomicBool::new(false);
    let cannot_undo = intercepted(memory[1].clone(), move |node, task| match *task.op {
        // A dropped task is a failed vote.
        Op::Release { .. } if has_extended.load(Ordering::Relaxed) => drop(task),
        _ => {
            has_extended.fetch_or(matches!(*task.op, Op::Extend { .. }), Ordering::Relaxed);
            pass_on(node, task);
        }
    });
    let nodes: Vec<Arc<dyn Node>> = vec![memory[0].clone(), cannot_undo, memory[2].clone()];
    let second = redlock(nodes, Duration::from_secs(1));
    let mut repetition = Box::pin(second.acquire(&lock, ttl(LONG_MS), shared_by(owner)));
    assert!(is_pending(repetition.as_mut()));
    drop(request);
    deliver(&of_node_2);
    let outcome = repetition.await;
    assert!(matches!(outcome, Err(LockError::Unknown(_))), "{outcome:?}");
    assert_ne!(memory[0].run(&Op::Inspect { keys }), Vote::Missing, "it may be promised");
}

/// One node stores another grant of the owner, and one stores somebody else's lock. All nodes have
/// answered, so the quorum is not what is missing.
#[tokio::test]
async fn a_split_with_an_own_grant_is_reported_as_held() {
    let lock = name("job");
    let memory = memory_nodes();
    let node = |n: usize| memory[n].clone() as Arc<dyn Node>;
    let owner = OsEntropy.owner();
    acquire_at_once(&redlock(vec![node(0)], Duration::from_secs(1)), &lock, owner).expect("free");
    let keys = Keys::new(PREFIX, &lock);
    memory[1].set_foreign(&keys.lock, b"somebody", Some(Duration::from_secs(3_600)));
    let locks = redlock(vec![node(0), node(1), node(2)], Duration::from_secs(1));
    let refused = locks.acquire(&lock, ttl(LONG_MS), shared_by(owner)).await;
    assert_eq!(refused.err(), Some(LockError::Held(HeldBy::default())));
    locks.drained().await;
    assert_eq!(memory[2].run(&Op::Inspect { keys }), Vote::Missing);
}

/// The repetition's client goes away while the repetition extends the grant. Then the extension
/// turns out to have no majority.
#[tokio::test(start_paused = true)]
async fn a_failed_confirmation_releases_even_without_its_client() {
    let lock = name("job");
    let keys = Keys::new(PREFIX, &lock);
    let memory = memory_nodes();
    memory[2].set_foreign(&keys.lock, b"somebody", Some(Duration::from_secs(3_600)));
    let of_first = Votes::default();
    let holds = |node| delaying_votes(node, &of_first, |op| matches!(op, Op::Acquire { .. }));
    let first = redlock(memory.iter().map(holds).collect(), Duration::from_secs(1));
    let owner = OsEntropy.owner();
    let mut request = Box::pin(first.acquire(&lock, ttl(LONG_MS), shared_by(owner)));
    assert!(is_pending(request.as_mut()));

    // Node 0 extends the grant at once, and node 1 after the undo.
    let of_second = Votes::default();
    let late = Tasks::default();
    let is_extend = |op: &Op| matches!(op, Op::Extend { .. });
    let second = redlock(
        vec![
            delaying_votes(&memory[0], &of_second, is_extend),
            delaying_tasks(&memory[1], &late, is_extend),
            memory[2].clone(),
        ],
        Duration::from_secs(1),
    );
    let repetition = tokio::spawn({
        let (second, lock) = (second.clone(), lock.clone());
        async move { second.acquire(&lock, ttl(LONG_MS), shared_by(owner)).await }
    });
    while late.lock().unwrap().is_empty() || of_second.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    repetition.abort();
    assert!(repetition.await.is_err_and(|error| error.is_cancelled()));
    drop(request);
    deliver(&of_first);
    first.drained().await;
    let node: Arc<dyn Node> = memory[1].clone();
    let stores =
        |node: &Arc<MemoryNode>| node.run(&Op::Inspect { keys: keys.clone() }) != Vote::Missing;
    let freed = async {
        while memory[..2].iter().any(stores) {
            deliver(&of_second);
            let late = std::mem::take(&mut *late.lock().unwrap());
            late.into_iter().for_each(|task| pass_on(&node, task));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(Duration::from_secs(1), freed).await.expect("nobody holds the grant");
}

/// A duplicate request finds grant B on a majority, and then B is undone. Meanwhile a third request
/// of the same owner is promised grant A. A's token is smaller than B's, because the undo has set
/// the watermark back. The duplicate then gives up, and must release only B.
#[tokio::test]
async fn a_failed_confirmation_spares_an_older_promised_grant() {
    let node = MemoryNode::new("node", Arc::new(SystemClock), node_settings());
    let lock = Lock::new("job");
    let t = now();
    assert_eq!(node.run(&lock.acquire(1, t + 1, LONG_MS)), Vote::Granted);
    assert_eq!(node.run(&lock.undo(1, t + 1)), Vote::Released);
    assert_eq!(node.run(&lock.acquire(1 | AGAIN, t, LONG_MS)), Vote::Granted);
    assert!(matches!(node.run(&lock.extend(1, t + 1, LONG_MS)), Vote::Held(_)));
    assert!(matches!(node.run(&lock.release_exactly(1, t + 1)), Vote::Held(_)));
    assert_extended(&node.run(&lock.extend(1 | AGAIN, t, LONG_MS)));
    // The duplicate has marked grant B as extended. An undo would spare an extended grant, but an
    // exact release deletes it.
    assert_eq!(node.run(&lock.release_exactly(1 | AGAIN, t)), Vote::Released);
}

/// Two gateways over three masters mint the same token for one owner, and each gets one vote. The
/// undo of one gateway must not delete the other gateway's vote.
#[tokio::test]
async fn an_undo_with_an_equal_token_deletes_no_other_grant() {
    let node = MemoryNode::new("node", Arc::new(SystemClock), node_settings());
    let lock = Lock::new("job");
    let t = now();
    assert_eq!(node.run(&lock.acquire(1, t, LONG_MS)), Vote::Granted);
    assert!(matches!(node.run(&lock.undo(1 | AGAIN, t)), Vote::Held(_)));
    assert_extended(&node.run(&lock.extend(1, t, LONG_MS)));
    assert!(
        matches!(node.run(&lock.undo(1, t)), Vote::Held(_)),
        "the grant was confirmed, and counted"
    );
    assert_extended(&node.run(&lock.extend(1, t, LONG_MS)));
}
