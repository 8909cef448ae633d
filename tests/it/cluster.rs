//! Whole locks over real masters: the life of a lock on 1 to 5 nodes, every set of failing nodes in every kind of
//! failure, other Redlock clients beside us, hung nodes, and what is left behind afterwards, which must be nothing.
//!
//! Time-outs for nodes are generous except where a test is about them, so that a busy machine does not look like a fault.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redlock_core::clock::{Clock, SystemClock};
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{Effect, Keys, Node, NodeSettings, NodeState, NodeStatus, Op, Reason, Reply};
use redlock_core::{
    AcquireOptions, FencingToken, HeldBy, Info, Lease, ListCursor, LockError, LockName, LockState, LockToken,
    NodeAnswer, NodeView, Owner, Redlock, RetryPolicy, Seams, Settings,
};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::harness::{DeadPort, Resp, eventually};
use crate::nodes::{Cluster, LONG_MS, PREFIX, in_state, lane, name, now, redlock, ttl};

const LONG: u64 = LONG_MS;

async fn acquire(locks: &Redlock, lock: &LockName, millis: u64) -> Result<Lease, LockError> {
    locks.acquire(lock, ttl(millis), AcquireOptions::default()).await
}

/// A tenth of a short TTL is all that a node gets to answer in, which a busy machine may miss.
async fn acquire_short(locks: &Redlock, lock: &LockName, millis: u64) -> Lease {
    eventually("a short lock is granted", async || match acquire(locks, lock, millis).await {
        Ok(lease) => Some(lease),
        Err(error) => {
            assert!(matches!(error, LockError::NoQuorum(_)), "{error}");
            None
        }
    })
    .await
}

fn labelled(text: &'static str) -> AcquireOptions {
    AcquireOptions { info: Info::new(text).unwrap(), ..AcquireOptions::default() }
}

fn key(lock: &LockName) -> String {
    format!("{PREFIX}{lock}")
}

/// The token as it would be with another owner.
fn forged(token: &LockToken) -> LockToken {
    format!("1.{}.{}", token.fencing(), "ab".repeat(20)).parse::<LockToken>().unwrap()
}

async fn whole_life_on(size: usize) {
    let cluster = Cluster::start(size).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    let all: Vec<_> = (0..size).collect();

    let lease = locks.acquire(&lock, ttl(LONG), labelled("first")).await.unwrap();
    assert!(lease.nodes_granted >= locks.quorum().size() && lease.nodes_total == size);
    let validity = locks.validity(&lease).unwrap();
    assert!(validity < Duration::from_millis(LONG) && validity > Duration::from_millis(LONG - 10_000), "{validity:?}");
    eventually("all nodes store it", async || (cluster.stored_on(&lock, |_| true) == all).then_some(())).await;

    let Err(LockError::Held(by)) = acquire(&locks, &lock, LONG).await else { panic!("granted twice") };
    assert_eq!((by.info.as_slice(), by.fencing), (&b"first"[..], Some(lease.token.fencing())));
    let left = by.expires_in.unwrap();
    assert!(left <= Duration::from_millis(LONG) && left > Duration::from_millis(LONG - 10_000), "{left:?}");

    let extended = locks.extend(&lock, &lease.token, ttl(2 * LONG)).await.unwrap();
    assert_eq!(extended.token, lease.token);
    assert!(locks.validity(&extended).unwrap() > Duration::from_millis(LONG));
    let pttl = |server: usize| cluster.servers[server].cmd(&["PTTL", &key(&lock)]).integer() as u64;
    eventually("all nodes prolong it", async || all.iter().all(|server| pttl(*server) > LONG).then_some(())).await;

    for wrong in [locks.extend(&lock, &forged(&lease.token), ttl(LONG)).await.map(drop), {
        locks.release(&lock, &forged(&lease.token)).await
    }] {
        assert!(matches!(wrong, Err(LockError::NotHolder(_))), "{wrong:?}");
    }
    assert_eq!(cluster.stored_on(&lock, |_| true), all, "a wrong token changes nothing");

    locks.release(&lock, &lease.token).await.unwrap();
    cluster.clean_for_good(&lock, lease.token.fencing().get()).await;
    assert_eq!(locks.release(&lock, &lease.token).await, Err(LockError::Lost));
    assert!(matches!(locks.extend(&lock, &lease.token, ttl(LONG)).await, Err(LockError::Lost)));

    let since = Instant::now();
    let short = acquire_short(&locks, &lock, 300).await;
    assert!(short.token.fencing() > lease.token.fencing());
    let next = eventually("the lock expires", async || match acquire(&locks, &lock, LONG).await {
        Ok(next) => Some(next),
        Err(error) => {
            assert!(matches!(error, LockError::Held(_)), "{error}");
            None
        }
    })
    .await;
    assert!(since.elapsed() > Duration::from_millis(295), "granted to another after {:?}", since.elapsed());
    assert_eq!(locks.validity(&short), None, "whoever is granted next finds the first holder past its deadline");
    assert!(next.token.fencing() > short.token.fencing());
    assert!(matches!(locks.release(&lock, &short.token).await, Err(LockError::NotHolder(_))));
    locks.release(&lock, &next.token).await.unwrap();
}

macro_rules! sizes {
    ($check:ident: $($test:ident $size:expr;)*) => { $(#[tokio::test] async fn $test() { $check($size).await })* };
}

sizes! { whole_life_on:
    a_lock_lives_and_ends_on_one_node 1;
    a_lock_lives_and_ends_on_two_nodes 2;
    a_lock_lives_and_ends_on_three_nodes 3;
    a_lock_lives_and_ends_on_four_nodes 4;
    a_lock_lives_and_ends_on_five_nodes 5;
}

/// Every set of nodes that nobody listens on.
async fn every_subset_down_on(size: usize) {
    let cluster = Cluster::start(size).await;
    let ports: Vec<_> = (0..size).map(|_| DeadPort::new()).collect();
    let dead: Vec<_> = ports.iter().map(|port| lane(&port.url()) as Arc<dyn Node>).collect();
    for set in 0..1u32 << size {
        let down = |node: usize| set & (1 << node) != 0;
        let nodes = (0..size).map(|node| if down(node) { &dead } else { &cluster.nodes }[node].clone()).collect();
        let (locks, lock) = (redlock(nodes, Duration::from_secs(2)), name(&format!("down-{set:b}")));
        check_subset(&cluster, &locks, &lock, set, down, Reason::Down).await;
    }
}

/// Every set of nodes that answer with an error.
async fn every_subset_erring_on(size: usize) {
    let cluster = Cluster::start(size).await;
    for set in 0..1u32 << size {
        let errs = |node: usize| set & (1 << node) != 0;
        let (locks, lock) = (cluster.redlock(), name(&format!("errs-{set:b}")));
        let erring = || cluster.servers.iter().enumerate().filter(|(node, _)| errs(*node)).map(|(_, server)| server);
        erring().for_each(|server| drop(server.cmd(&["RPUSH", &key(&lock), "no lock"])));
        check_subset(&cluster, &locks, &lock, set, errs, Reason::Error).await;
        for server in erring() {
            assert_eq!(server.cmd(&["DEL", &key(&lock)]), Resp::Integer(1), "what is no lock is left alone");
        }
    }
}

/// Every set of nodes that are stopped while the lock is asked for, and go on afterwards.
async fn every_subset_hung_on(size: usize) {
    let cluster = Cluster::start(size).await;
    let locks = redlock(cluster.nodes.clone(), Duration::from_millis(400));
    for set in 0..1u32 << size {
        let hung = |node: usize| set & (1 << node) != 0;
        for node in &cluster.nodes {
            in_state(node.as_ref(), NodeState::Admitted).await;
        }
        let lock = name(&format!("hung-{set:b}"));
        let hanging = || cluster.servers.iter().enumerate().filter(|(node, _)| hung(*node)).map(|(_, server)| server);
        hanging().for_each(|server| server.stop());
        let outcome = acquire(&locks, &lock, LONG).await;
        assert_outcome(&locks, &outcome, set, hung, Reason::Timeout);
        hanging().for_each(|server| server.cont());
        if let Ok(lease) = &outcome {
            let released = locks.release(&lock, &lease.token).await;
            assert_eq!(released, Ok(()), "{set:b}");
        }
        locks.drained().await;
        eventually("no node keeps the lock", async || cluster.stored_on(&lock, |_| true).is_empty().then_some(()))
            .await;
    }
}

fn assert_outcome(
    locks: &Redlock,
    outcome: &Result<Lease, LockError>,
    set: u32,
    faulty: impl Fn(usize) -> bool,
    reason: Reason,
) {
    let quorum = locks.quorum();
    let good = quorum.nodes() - set.count_ones() as usize;
    match outcome {
        Ok(lease) => {
            assert!(good >= quorum.size(), "granted with {set:b} faulty");
            assert!((quorum.size()..=good).contains(&lease.nodes_granted), "{} with {set:b}", lease.nodes_granted);
        }
        Err(LockError::NoQuorum(reports)) => {
            assert!(good < quorum.size(), "refused with {set:b} faulty: {reports:?}");
            for (node, report) in reports.iter().enumerate() {
                match &report.answer {
                    NodeAnswer::Failed(failure) => assert!(faulty(node) && failure.reason == reason, "{report:?}"),
                    NodeAnswer::Agreed => assert!(!faulty(node), "{report:?}"),
                    NodeAnswer::Pending => {}
                    NodeAnswer::Refused(_) => panic!("{report:?}"),
                }
            }
            let failed = reports.iter().filter(|report| matches!(report.answer, NodeAnswer::Failed(_))).count();
            assert!(failed >= quorum.blocking(), "{reports:?}");
        }
        Err(error) => panic!("with {set:b} faulty: {error}"),
    }
}

async fn check_subset(
    cluster: &Cluster,
    locks: &Redlock,
    lock: &LockName,
    set: u32,
    faulty: impl Fn(usize) -> bool + Copy,
    reason: Reason,
) {
    let outcome = acquire(locks, lock, LONG).await;
    assert_outcome(locks, &outcome, set, faulty, reason);
    let good = |node: usize| !faulty(node);
    if let Ok(lease) = outcome {
        let all_good: Vec<_> = (0..cluster.servers.len()).filter(|node| good(*node)).collect();
        let everywhere = async || (cluster.stored_on(lock, good) == all_good).then_some(());
        eventually("all good nodes store it", everywhere).await;
        assert!(matches!(acquire(locks, lock, LONG).await, Err(LockError::Held(_))), "{set:b}");
        assert!(locks.extend(lock, &lease.token, ttl(LONG)).await.is_ok(), "{set:b}");
        assert_eq!(locks.release(lock, &lease.token).await, Ok(()), "{set:b}");
    }
    locks.drained().await;
    assert_eq!(cluster.stored_on(lock, good), Vec::<usize>::new(), "with {set:b} faulty");
}

sizes! { every_subset_down_on:
    with_any_nodes_of_1_down_a_majority_decides_and_no_key_is_left 1;
    with_any_nodes_of_2_down_a_majority_decides_and_no_key_is_left 2;
    with_any_nodes_of_3_down_a_majority_decides_and_no_key_is_left 3;
    with_any_nodes_of_4_down_a_majority_decides_and_no_key_is_left 4;
    with_any_nodes_of_5_down_a_majority_decides_and_no_key_is_left 5;
}

sizes! { every_subset_erring_on:
    with_any_nodes_of_1_erring_a_majority_decides_and_no_key_is_left 1;
    with_any_nodes_of_2_erring_a_majority_decides_and_no_key_is_left 2;
    with_any_nodes_of_3_erring_a_majority_decides_and_no_key_is_left 3;
    with_any_nodes_of_4_erring_a_majority_decides_and_no_key_is_left 4;
    with_any_nodes_of_5_erring_a_majority_decides_and_no_key_is_left 5;
}

sizes! { every_subset_hung_on:
    with_any_nodes_of_3_hung_a_majority_decides_and_no_key_is_left 3;
    with_any_nodes_of_5_hung_a_majority_decides_and_no_key_is_left 5;
}

#[tokio::test]
async fn killed_nodes_leave_a_majority_working_and_come_back() {
    let mut cluster = Cluster::start(5).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    for dead in [0, 1] {
        cluster.servers[dead].kill();
        let lease = acquire(&locks, &lock, LONG).await.unwrap();
        locks.release(&lock, &lease.token).await.unwrap();
    }
    assert!(locks.has_quorum());
    cluster.servers[2].kill();
    let error = acquire(&locks, &lock, LONG).await.unwrap_err();
    assert!(matches!(error, LockError::NoQuorum(_)) && error.effect() == Effect::None, "{error}");
    locks.drained().await;
    assert_eq!(cluster.stored_on(&lock, |node| node > 2), Vec::<usize>::new());
    for node in &cluster.nodes[..3] {
        in_state(node.as_ref(), NodeState::Connecting).await;
    }
    assert!(!locks.has_quorum());
    for server in &mut cluster.servers[..3] {
        server.restart();
    }
    for node in &cluster.nodes {
        in_state(node.as_ref(), NodeState::Admitted).await;
    }
    assert!(locks.has_quorum());
    assert!(acquire(&locks, &lock, LONG).await.is_ok());
}

#[tokio::test]
async fn another_redlock_client_on_a_majority_holds_the_lock() {
    let cluster = Cluster::start(5).await;
    let (locks, lock) = (cluster.redlock(), name("shared"));
    for server in &cluster.servers[..3] {
        assert_eq!(server.cmd(&["SET", &key(&lock), "their-uuid", "NX", "PX", "60000"]), Resp::Text("OK".into()));
    }
    let Err(LockError::Held(HeldBy { info, fencing, expires_in })) = acquire(&locks, &lock, LONG).await else {
        panic!("granted beside another client")
    };
    assert_eq!((info, fencing), (Vec::new(), None));
    assert!(expires_in.unwrap() > Duration::from_secs(45));
    locks.drained().await;
    assert_eq!(cluster.stored_on(&lock, |_| true), [0, 1, 2], "what we set beside theirs is gone");
    for server in &cluster.servers[..3] {
        server.cmd(&["DEL", &key(&lock)]);
    }
    assert!(acquire(&locks, &lock, LONG).await.is_ok());
}

#[tokio::test]
async fn a_lock_of_ours_keeps_another_redlock_client_from_a_majority() {
    let cluster = Cluster::start(5).await;
    let (locks, lock) = (cluster.redlock(), name("shared"));
    // Theirs on a minority does not keep us out, and ours on the rest keeps them out.
    for server in &cluster.servers[..2] {
        server.cmd(&["SET", &key(&lock), "their-uuid", "NX", "PX", "60000"]);
    }
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    let set = |server: usize| cluster.servers[server].cmd(&["SET", &key(&lock), "their-uuid", "NX", "PX", "60000"]);
    assert_eq!((0..5).filter(|server| set(*server) == Resp::Nil).count(), 5);
    locks.release(&lock, &lease.token).await.unwrap();
    locks.drained().await;
    assert_eq!(cluster.stored_on(&lock, |_| true), [0, 1], "a release deletes only what is ours");
}

#[tokio::test]
async fn a_hung_node_delays_nobody_and_keeps_no_orphan() {
    let cluster = Cluster::start(5).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    cluster.servers[4].stop();
    let since = Instant::now();
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    assert!(since.elapsed() < Duration::from_secs(1), "the node time-out of 2 s was waited for: {:?}", since.elapsed());
    locks.release(&lock, &lease.token).await.unwrap();
    cluster.servers[4].cont();
    cluster.clean_for_good(&lock, lease.token.fencing().get()).await;
}

#[tokio::test]
async fn a_late_acquire_in_a_dead_connection_leaves_no_orphan() {
    let cluster = Cluster::start(5).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    cluster.servers[4].stop();
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    // The acquire lies in the socket that the lane gives up here; the release finds no connection and is owed.
    in_state(cluster.nodes[4].as_ref(), NodeState::Connecting).await;
    locks.release(&lock, &lease.token).await.unwrap();
    locks.drained().await;
    cluster.servers[4].cont();
    cluster.clean_for_good(&lock, lease.token.fencing().get()).await;
}

/// So that a fence stays, whatever comes: answers its T.
async fn used_before(locks: &Redlock, lock: &LockName) -> u64 {
    let lease = acquire(locks, lock, LONG).await.expect("it is free");
    locks.release(lock, &lease.token).await.expect("it is held");
    locks.drained().await;
    lease.token.fencing().get()
}

#[tokio::test]
async fn a_cancelled_acquire_leaves_no_lock() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    for (index, patience) in [Duration::ZERO, Duration::from_millis(100)].into_iter().enumerate() {
        let lock = name(&format!("cancelled-{index}"));
        let before = used_before(&locks, &lock).await;
        cluster.servers.iter().for_each(|server| server.stop());
        let cancelled = tokio::time::timeout(patience, acquire(&locks, &lock, LONG)).await;
        assert!(cancelled.is_err(), "the nodes are stopped: {cancelled:?}");
        cluster.servers.iter().for_each(|server| server.cont());
        locks.drained().await;
        // Its T is unknown here, but a newer fence shows that the release was there.
        cluster.clean_for_good(&lock, before + 1).await;
        assert!(acquire(&locks, &lock, LONG).await.is_ok());
    }
}

#[tokio::test]
async fn a_cancelled_acquire_that_outlived_its_connections_leaves_no_lock() {
    let cluster = Cluster::start(3).await;
    let (locks, lock) = (cluster.redlock(), name("cancelled"));
    let before = used_before(&locks, &lock).await;
    cluster.servers.iter().for_each(|server| server.stop());
    let cancelled = tokio::time::timeout(Duration::from_millis(100), acquire(&locks, &lock, LONG)).await;
    assert!(cancelled.is_err(), "the nodes are stopped: {cancelled:?}");
    for node in &cluster.nodes {
        in_state(node.as_ref(), NodeState::Connecting).await;
    }
    cluster.servers.iter().for_each(|server| server.cont());
    cluster.clean_for_good(&lock, before + 1).await;
}

#[tokio::test]
async fn a_release_that_keeps_failing_does_not_hold_up_the_releases_after_it() {
    let cluster = Cluster::start(3).await;
    let (locks, bad, good) = (cluster.redlock(), name("bad"), name("good"));
    // Node 2 can never release this one: its release is owed for as long as a lock may live.
    cluster.servers[2].cmd(&["RPUSH", &key(&bad), "no lock"]);
    let lease = acquire(&locks, &bad, LONG).await.unwrap();
    locks.release(&bad, &lease.token).await.unwrap();
    locks.drained().await;

    cluster.servers[2].stop();
    let lease = acquire(&locks, &good, LONG).await.unwrap();
    in_state(cluster.nodes[2].as_ref(), NodeState::Connecting).await;
    locks.release(&good, &lease.token).await.unwrap();
    cluster.servers[2].cont();
    cluster.clean_for_good(&good, lease.token.fencing().get()).await;
}

#[tokio::test]
async fn the_same_owner_gets_its_lock_again_with_a_larger_token() {
    let cluster = Cluster::start(5).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    let options =
        || AcquireOptions { owner: Some(Owner::derive("c", "p", &lock, "idempotency-key-1")), ..labelled("mine") };
    let first = locks.acquire(&lock, ttl(LONG), options()).await.unwrap();
    // Another gateway gets the repeated request.
    let other = redlock(Cluster::lanes(&cluster.servers, NodeSettings::default()).await, Duration::from_secs(2));
    let second = other.acquire(&lock, ttl(LONG), options()).await.unwrap();
    assert!(second.token.fencing() > first.token.fencing());
    assert!(matches!(acquire(&locks, &lock, LONG).await, Err(LockError::Held(_))));
    // The token of the first answer was replaced: between the two somebody else may have held the lock.
    assert!(matches!(locks.extend(&lock, &first.token, ttl(LONG)).await, Err(LockError::NotHolder(_))));
    assert!(matches!(locks.release(&lock, &first.token).await, Err(LockError::NotHolder(_))));
    other.release(&lock, &second.token).await.unwrap();
    cluster.clean_for_good(&lock, second.token.fencing().get()).await;
}

fn keyed(lock: &LockName) -> AcquireOptions {
    AcquireOptions { owner: Some(Owner::derive("c", "p", lock, "idempotency-key-1")), ..AcquireOptions::default() }
}

#[tokio::test]
async fn a_repetition_that_is_cancelled_or_undelivered_leaves_the_lock_that_the_first_answer_promised() {
    let cluster = Cluster::start(3).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    let first = locks.acquire(&lock, ttl(LONG), keyed(&lock)).await.unwrap();

    cluster.servers.iter().for_each(|server| server.stop());
    let repeated = locks.acquire(&lock, ttl(LONG), keyed(&lock));
    let cancelled = tokio::time::timeout(Duration::from_millis(100), repeated).await;
    assert!(cancelled.is_err(), "the nodes are stopped: {cancelled:?}");
    cluster.servers.iter().for_each(|server| server.cont());
    // The answer to this one comes after whatever the cancelled one may have sent.
    let undelivered = locks.acquire(&lock, ttl(LONG), keyed(&lock)).await.unwrap();
    locks.abandon(&lock, &undelivered);
    locks.drained().await;

    assert!(matches!(acquire(&locks, &lock, LONG).await, Err(LockError::Held(_))), "a second holder");
    assert!(locks.validity(&first).is_some(), "the first answer still promises the lock");
}

#[tokio::test]
async fn split_votes_are_resolved_and_not_reported_as_a_holder() {
    let cluster = Cluster::start(5).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    // Three contenders with two, two and one vote, that give up after a moment, as they would in a race.
    for (index, server) in cluster.servers.iter().enumerate() {
        server.cmd(&["SET", &key(&lock), &format!("contender-{}", index / 2), "PX", "10"]);
    }
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    locks.release(&lock, &lease.token).await.unwrap();

    // Against one holder no try is wasted: the first answer counts.
    cluster.servers.iter().for_each(|server| drop(server.cmd(&["SET", &key(&lock), "holder", "PX", "60000"])));
    assert!(matches!(acquire(&locks, &lock, LONG).await, Err(LockError::Held(_))));
}

#[tokio::test]
async fn a_lost_try_of_somebody_on_a_minority_is_no_holder() {
    let cluster = Cluster::start(5).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    locks.release(&lock, &lease.token).await.unwrap();
    cluster.servers[..2].iter().for_each(|server| drop(server.cmd(&["SET", &key(&lock), "loser", "PX", "60000"])));
    // Three nodes have no lock; whichever answer first, nobody else can be said to hold it.
    for _ in 0..20 {
        assert_eq!(locks.release(&lock, &lease.token).await, Err(LockError::Lost));
    }
}

#[tokio::test]
async fn a_first_request_with_a_key_that_is_cancelled_or_undelivered_leaves_no_lock() {
    let cluster = Cluster::start(3).await;
    let (locks, cancelled, undelivered) = (cluster.redlock(), name("cancelled"), name("undelivered"));
    cluster.servers.iter().for_each(|server| server.stop());
    let request = locks.acquire(&cancelled, ttl(LONG), keyed(&cancelled));
    assert!(tokio::time::timeout(Duration::from_millis(100), request).await.is_err(), "the nodes are stopped");
    cluster.servers.iter().for_each(|server| server.cont());
    cluster.clean_for_good(&cancelled, 1).await;

    let lease = locks.acquire(&undelivered, ttl(LONG), keyed(&undelivered)).await.unwrap();
    locks.abandon(&undelivered, &lease);
    cluster.clean_for_good(&undelivered, lease.token.fencing().get()).await;
}

#[tokio::test]
async fn retrying_gets_the_lock_when_it_is_free_and_gives_up_when_it_is_not() {
    let cluster = Cluster::start(3).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    let held = acquire_short(&locks, &lock, 300).await;
    let policy = RetryPolicy {
        count: 1_000,
        delay: Duration::from_millis(5),
        jitter: Duration::from_millis(10),
        deadline: Duration::from_secs(15),
    };
    let next = locks.acquire_with_retry(&lock, ttl(LONG), AcquireOptions::default(), &policy).await.unwrap();
    assert!(next.token.fencing() > held.token.fencing());
    let policy = RetryPolicy { count: 3, ..policy };
    let refused = locks.acquire_with_retry(&lock, ttl(LONG), AcquireOptions::default(), &policy).await;
    assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
}

#[tokio::test]
async fn a_release_is_done_when_no_majority_is_left_and_unknown_when_one_may_be() {
    let mut cluster = Cluster::start(5).await;
    let (locks, lock) = (redlock(cluster.nodes.clone(), Duration::from_millis(400)), name("job"));
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    let all = || cluster.stored_on(&lock, |_| true).len() == 5;
    eventually("all nodes store it", async || all().then_some(())).await;
    // Two let go, and of the three that are hung nothing is known.
    cluster.servers[2..].iter().for_each(|server| server.stop());
    let released = locks.release(&lock, &lease.token).await;
    assert!(matches!(released, Err(LockError::Unknown(_))), "{released:?}");
    cluster.servers[2..].iter().for_each(|server| server.cont());
    cluster.clean_for_good(&lock, lease.token.fencing().get()).await;
    for node in &cluster.nodes {
        in_state(node.as_ref(), NodeState::Admitted).await;
    }

    // Two let go, two have nothing, and the one that is dead cannot make a majority.
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    let all = || cluster.stored_on(&lock, |_| true).len() == 5;
    eventually("all nodes store it", async || all().then_some(())).await;
    for server in &cluster.servers[..2] {
        server.cmd(&["DEL", &key(&lock)]);
    }
    cluster.servers[4].kill();
    assert_eq!(locks.release(&lock, &lease.token).await, Ok(()));
}

/// A clock on which 31 s pass between any two looks.
struct Leaping(AtomicU64);

impl Clock for Leaping {
    fn monotonic(&self) -> Duration {
        Duration::from_secs(31 * self.0.fetch_add(1, Ordering::Relaxed))
    }
    fn wall_micros(&self) -> u64 {
        now()
    }
}

#[tokio::test]
async fn a_grant_that_came_too_late_to_be_of_use_is_no_grant_and_is_released() {
    let cluster = Cluster::start(3).await;
    let seams = Seams { clock: Arc::new(Leaping(AtomicU64::new(0))), ..Seams::default() };
    let settings = Settings { node_timeout: Duration::from_secs(2), ..Settings::default() };
    let (locks, lock) = (Redlock::new(cluster.nodes.clone(), settings, seams).unwrap(), name("job"));
    let refused = acquire(&locks, &lock, 30_000).await;
    assert!(matches!(refused, Err(LockError::NoQuorum(_))), "{refused:?}");
    locks.drained().await;
    assert_eq!(cluster.stored_on(&lock, |_| true), Vec::<usize>::new());
    let lease = acquire(&locks, &lock, 60_000).await.unwrap();
    let late = locks.extend(&lock, &lease.token, ttl(30_000)).await;
    assert!(matches!(late, Err(LockError::Unknown(_))), "{late:?}");
}

#[tokio::test]
async fn a_ttl_beyond_the_maximum_is_refused_before_any_node_is_asked() {
    let cluster = Cluster::start(1).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    assert!(matches!(acquire(&locks, &lock, 300_001).await, Err(LockError::TtlTooLong { .. })));
    let lease = acquire(&locks, &lock, 300_000).await.unwrap();
    let refused = locks.extend(&lock, &lease.token, ttl(300_001)).await;
    assert!(matches!(refused, Err(LockError::TtlTooLong { .. })), "{refused:?}");
}

#[tokio::test]
async fn an_inspection_says_held_free_or_unknown_as_the_majority_does() {
    let mut cluster = Cluster::start(3).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    assert_eq!(locks.inspect(&lock).await.state, LockState::Free);
    // A foreign key on a minority holds nothing.
    cluster.servers[0].cmd(&["SET", &key(&lock), "their-uuid"]);
    let minority = locks.inspect(&lock).await;
    assert_eq!(minority.state, LockState::Free, "{minority:?}");
    cluster.servers[0].cmd(&["DEL", &key(&lock)]);

    let lease = locks.acquire(&lock, ttl(LONG), labelled("me")).await.unwrap();
    let seen = locks.inspect(&lock).await;
    let LockState::Held(by) = seen.state else { panic!("{seen:?}") };
    assert_eq!((by.info.as_slice(), by.fencing), (&b"me"[..], Some(lease.token.fencing())));
    assert!(by.expires_in.unwrap() <= Duration::from_millis(LONG));
    assert_eq!(seen.nodes.len(), 3);
    assert!(seen.nodes.iter().filter(|(_, view)| *view == NodeView::Held).count() >= 2, "{:?}", seen.nodes);

    cluster.servers[0].kill();
    in_state(cluster.nodes[0].as_ref(), NodeState::Connecting).await;
    assert!(matches!(locks.inspect(&lock).await.state, LockState::Held(_)));
    cluster.servers[1].kill();
    in_state(cluster.nodes[1].as_ref(), NodeState::Connecting).await;
    let unknown = locks.inspect(&lock).await;
    assert_eq!(unknown.state, LockState::Unknown);
    assert!(matches!(unknown.nodes[0].1, NodeView::Failed(_)), "{unknown:?}");
    let extended = locks.extend(&lock, &lease.token, ttl(LONG)).await;
    assert!(
        matches!(&extended, Err(error @ LockError::Unknown(_)) if error.effect() == Effect::Possible),
        "{extended:?}"
    );
    let released = locks.release(&lock, &lease.token).await;
    assert!(matches!(released, Err(LockError::Unknown(_))), "{released:?}");
}

#[tokio::test]
async fn three_values_without_a_majority_are_no_holder() {
    let cluster = Cluster::start(3).await;
    let (locks, lock) = (cluster.redlock(), name("job"));
    for (index, server) in cluster.servers.iter().enumerate() {
        server.cmd(&["SET", &key(&lock), &format!("client-{index}"), "PX", "60000"]);
    }
    assert_eq!(locks.inspect(&lock).await.state, LockState::Free);
    assert!(matches!(acquire(&locks, &lock, LONG).await, Err(LockError::Held(_))), "but it is not to be had either");
}

async fn list_all(locks: &Redlock, prefix: &str, limit: usize) -> (Vec<String>, usize) {
    let (mut found, mut pages, mut cursor) = (Vec::new(), 0, ListCursor::default());
    loop {
        let page = locks.list(prefix, limit, cursor, |_| true).await.unwrap();
        let held = |(_, state): &(LockName, LockState)| matches!(state, LockState::Held(_));
        found.extend(page.locks.into_iter().filter(held).map(|(lock, _)| lock.to_string()));
        pages += 1;
        match page.next {
            // By its text, as it travels with a client.
            Some(next) => cursor = next.to_string().parse().unwrap(),
            None => return (found, pages),
        }
    }
}

fn assert_once_each(found: Vec<String>, wanted: &[LockName]) {
    let set: BTreeSet<_> = found.iter().cloned().collect();
    assert_eq!(set, wanted.iter().map(ToString::to_string).collect());
    assert_eq!(set.len(), found.len(), "names were listed more than once");
}

async fn acquire_all(locks: &Redlock, names: impl Iterator<Item = String>) -> Vec<LockName> {
    let names: Vec<_> = names.map(|text| name(&text)).collect();
    for lock in &names {
        acquire(locks, lock, LONG).await.unwrap();
    }
    names
}

#[tokio::test]
async fn a_listing_gives_every_held_lock_of_its_prefix_once() {
    let mut cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let wanted = acquire_all(&locks, (0..130).map(|n| format!("a/{n}"))).await;
    acquire_all(&locks, (0..10).map(|n| format!("b/{n}"))).await;
    // Held by a minority: not held.
    cluster.servers[0].cmd(&["SET", "lock:a/minority", "their-uuid"]);
    for limit in [20, 1_000] {
        let (found, pages) = list_all(&locks, "a/", limit).await;
        assert_once_each(found, &wanted);
        assert!(limit > 130 || pages > 3, "{pages} pages of {limit}");
    }
    assert_eq!(list_all(&locks, "c/", 20).await.0, Vec::<String>::new());
    assert_eq!(list_all(&locks, "", 1_000).await.0.len(), 140);

    for dead in [1, 2] {
        cluster.servers[dead].kill();
        in_state(cluster.nodes[dead].as_ref(), NodeState::Connecting).await;
        match dead {
            1 => assert_once_each(list_all(&locks, "a/", 20).await.0, &wanted),
            _ => {
                let refused = locks.list("a/", 1_000, ListCursor::default(), |_| true).await;
                assert!(matches!(refused, Err(LockError::NoQuorum(_))), "{refused:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_listing_finds_what_a_majority_without_its_first_node_holds() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let wanted = acquire_all(&locks, (0..40).map(|n| format!("a/{n}"))).await;
    for lock in &wanted[..20] {
        cluster.servers[0].cmd(&["DEL", &key(lock)]);
    }
    assert_once_each(list_all(&locks, "a/", 10).await.0, &wanted);
}

/// A node that answers inspections later than its peers.
struct Slow(Arc<dyn Node>, Duration);

impl Node for Slow {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.0.status()
    }
    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply) {
        let delay = if matches!(*op, Op::Inspect { .. }) { self.1 } else { Duration::ZERO };
        let node = self.0.clone();
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            node.submit(op, not_after, reply);
        });
    }
}

#[tokio::test]
async fn a_listing_gives_each_lock_once_even_when_the_node_it_read_first_is_slow() {
    let cluster = Cluster::start(5).await;
    let wanted = acquire_all(&cluster.redlock(), (0..30).map(|n| format!("a/{n}"))).await;
    let mut nodes = cluster.nodes.clone();
    nodes[0] = Arc::new(Slow(nodes[0].clone(), Duration::from_millis(30)));
    let locks = redlock(nodes, Duration::from_secs(2));
    for limit in [10, 1_000] {
        assert_once_each(list_all(&locks, "a/", limit).await.0, &wanted);
    }
}

/// Counts what is asked of a node.
struct Counted(Arc<dyn Node>, Arc<AtomicU64>);

impl Node for Counted {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.0.status()
    }
    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply) {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.submit(op, not_after, reply);
    }
}

/// Anybody can invent tokens: what nodes refuse for their T was never granted, and asking again would be work for nothing
/// that keeps real releases waiting.
#[tokio::test(start_paused = true)]
async fn the_release_of_an_invented_token_is_not_owed() {
    let asked = Arc::new(AtomicU64::new(0));
    let nodes = (0..3).map(|n| {
        let node = MemoryNode::new(format!("node-{n}"), Arc::new(SystemClock), NodeSettings::default());
        Arc::new(Counted(Arc::new(node), asked.clone())) as Arc<dyn Node>
    });
    let locks = redlock(nodes.collect(), Duration::from_secs(1));
    let invented = format!("1.{}.{}", FencingToken::MAX, "ab".repeat(20)).parse::<LockToken>().unwrap();
    assert!(matches!(locks.release(&name("job"), &invented).await, Err(LockError::Unknown(_))));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(asked.load(Ordering::Relaxed), 3, "each node was asked once");
}

#[tokio::test]
async fn nonsense_is_refused_before_anything_starts() {
    let cluster = Cluster::start(1).await;
    let one = cluster.nodes[0].clone();
    let good = Settings::default();
    let refused = |nodes: Vec<Arc<dyn Node>>, settings: Settings| {
        Redlock::new(nodes, settings, Seams::default()).err().expect("refused").to_string()
    };
    assert!(refused(vec![], good.clone()).contains("0 nodes"));
    assert!(refused(vec![one.clone(), one.clone()], good.clone()).contains("given twice"));
    let only = || vec![one.clone()];
    assert!(refused(only(), Settings { drift_factor: f64::NAN, ..good.clone() }).contains("drift"));
    assert!(refused(only(), Settings { node_timeout: Duration::ZERO, ..good.clone() }).contains("time-out"));
    assert!(refused(only(), Settings { key_prefix: "{a}".into(), ..good }).contains("brace"));
    assert_eq!(Keys::new("", &name("a")).lock, "a");
}
