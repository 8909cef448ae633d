//! Whole locks while nodes fail: every set of failing nodes, with every kind of failure. Afterwards
//! nothing may be left behind.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::{Effect, NoObserver, Node, NodeSettings, NodeState, Reason};
use redlock_core::{Env, Lease, LockError, LockName, NodeAnswer, Redlock, Settings};
use tokio::time::timeout;

use crate::core::locks::{LONG, acquire, key, sizes};
use crate::support::harness::{DeadPort, PATIENCE, RedisServer, eventually, masters};
use crate::support::nodes::{
    Cluster, NODE_TIMEOUT, in_state, name, redlock, remote_node, remote_node_with, ttl,
};
use crate::support::resp::Resp;

/// For every set of nodes: nobody listens at their addresses.
async fn every_subset_down_on(size: usize) {
    let cluster = Cluster::start(size).await;
    let ports: Vec<_> = (0..size).map(|_| DeadPort::new()).collect();
    let dead: Vec<_> = ports.iter().map(|port| remote_node(&port.url()) as Arc<dyn Node>).collect();
    for set in 0..1u32 << size {
        let down = |node: usize| set & (1 << node) != 0;
        let nodes = (0..size)
            .map(|node| if down(node) { &dead } else { &cluster.nodes }[node].clone())
            .collect();
        let locks = redlock(nodes, NODE_TIMEOUT);
        let lock = name(&format!("down-{set:b}"));
        check_subset(&cluster, &locks, &lock, set, down, Reason::Down).await;
    }
}

/// For every set of nodes: they answer with an error.
async fn every_subset_erring_on(size: usize) {
    let cluster = Cluster::start(size).await;
    for set in 0..1u32 << size {
        let errs = |node: usize| set & (1 << node) != 0;
        let locks = cluster.redlock();
        let lock = name(&format!("errs-{set:b}"));
        let erring = || {
            cluster
                .servers
                .iter()
                .enumerate()
                .filter(|(node, _)| errs(*node))
                .map(|(_, server)| server)
        };
        erring().for_each(|server| drop(server.cmd(&["RPUSH", &key(&lock), "no lock"])));
        check_subset(&cluster, &locks, &lock, set, errs, Reason::Error).await;
        for server in erring() {
            assert_eq!(
                server.cmd(&["DEL", &key(&lock)]),
                Resp::Integer(1),
                "a key that is not a lock is left alone"
            );
        }
    }
}

/// For every set of nodes: they stop while the lock is requested, and continue afterwards.
async fn every_subset_hung_on(size: usize) {
    let cluster = Cluster::start(size).await;
    let patient = cluster.redlock();
    // Without a majority the request waits for its limit.
    let hasty = redlock(cluster.nodes.clone(), Duration::from_millis(400));
    for set in 0..1u32 << size {
        let hung = |node: usize| set & (1 << node) != 0;
        let good = size - set.count_ones() as usize;
        let locks = if good >= patient.quorum().size() { &patient } else { &hasty };
        for node in &cluster.nodes {
            in_state(node.as_ref(), NodeState::Admitted).await;
        }
        let lock = name(&format!("hung-{set:b}"));
        let hanging = || {
            cluster
                .servers
                .iter()
                .enumerate()
                .filter(|(node, _)| hung(*node))
                .map(|(_, server)| server)
        };
        hanging().for_each(|server| server.stop());
        let outcome = acquire(locks, &lock, LONG).await;
        assert_outcome(locks, &outcome, set, hung, Reason::Timeout);
        hanging().for_each(|server| server.cont());
        if let Ok(lease) = &outcome {
            let released = locks.release(&lock, &lease.token).await;
            assert_eq!(released, Ok(()), "{set:b}");
        }
        locks.drained().await;
        eventually("no node keeps the lock", async || {
            cluster.stored_on(&lock, |_| true).is_empty().then_some(())
        })
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
            assert!(
                (quorum.size()..=good).contains(&lease.nodes_granted),
                "{} with {set:b}",
                lease.nodes_granted
            );
        }
        Err(LockError::NoQuorum(reports)) => {
            assert!(good < quorum.size(), "refused with {set:b} faulty: {reports:?}");
            for (node, report) in reports.iter().enumerate() {
                match &report.answer {
                    NodeAnswer::Failed(failure) => {
                        // A good node on a busy machine may miss a short limit, too.
                        let is_expected = faulty(node) || reason == Reason::Timeout;
                        assert!(is_expected && failure.reason == reason, "{report:?}")
                    }
                    NodeAnswer::Agreed => assert!(!faulty(node), "{report:?}"),
                    NodeAnswer::Pending => {}
                    NodeAnswer::Refused(_) => panic!("{report:?}"),
                }
            }
            let failed = reports
                .iter()
                .filter(|report| matches!(report.answer, NodeAnswer::Failed(_)))
                .count();
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
        eventually("all good nodes store the lock", everywhere).await;
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
    let locks = cluster.redlock();
    let lock = name("job");
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

/// The node timeout, and a tenth of the TTL, are longer than the test waits.
#[tokio::test]
async fn a_hung_node_delays_nobody_and_keeps_no_orphan() {
    let day = ttl(24 * 3_600_000);
    let settings = Settings {
        node_timeout: PATIENCE * 2,
        max_ttl: day,
        node: NodeSettings::default().with_max_clock_skew(PATIENCE),
        ..Settings::default()
    };
    let servers = masters(5);
    let start = |server: &RedisServer| {
        let settings = settings.of_masters("tests", 1);
        remote_node_with(&server.url(), settings, Arc::new(NoObserver)) as Arc<dyn Node>
    };
    let nodes: Vec<_> = servers.iter().map(start).collect();
    for node in &nodes {
        in_state(node.as_ref(), NodeState::Admitted).await;
    }
    let cluster = Cluster { servers, nodes };
    let locks =
        Redlock::new(cluster.nodes.clone(), settings, Env::default()).expect("good settings");
    let lock = name("job");
    cluster.servers[4].stop();
    let lease = timeout(PATIENCE, acquire(&locks, &lock, day.millis().into())).await;
    let lease = lease.expect("the answer waits for the node timeout").unwrap();
    let released = timeout(PATIENCE, locks.release(&lock, &lease.token)).await;
    released.expect("the answer waits for the node timeout").unwrap();
    cluster.servers[4].cont();
    cluster.clean_for_good(&lock, lease.token.fencing().get()).await;
}

#[tokio::test]
async fn a_late_acquire_in_a_dead_connection_leaves_no_orphan() {
    let mut cluster = Cluster::start(5).await;
    cluster.make_hasty(4).await;
    let locks = cluster.redlock();
    let lock = name("job");
    cluster.servers[4].stop();
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    // The acquire is in a socket whose connection the worker gives up here. The release has no
    // connection to go to, so it becomes pending.
    in_state(cluster.nodes[4].as_ref(), NodeState::Connecting).await;
    locks.release(&lock, &lease.token).await.unwrap();
    locks.drained().await;
    cluster.servers[4].cont();
    cluster.clean_for_good(&lock, lease.token.fencing().get()).await;
}

#[tokio::test]
async fn a_release_that_keeps_failing_delays_no_later_release() {
    let mut cluster = Cluster::start(3).await;
    cluster.make_hasty(2).await;
    let locks = cluster.redlock();
    let bad = name("bad");
    let good = name("good");
    // Node 2 can never carry out the release of this lock, because the key has another type. So
    // that release stays pending for as long as a lock may live.
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
async fn a_release_is_unknown_while_a_majority_may_hold_the_grant() {
    let mut cluster = Cluster::start(5).await;
    let patient = cluster.redlock();
    let lock = name("job");
    let lease = acquire(&patient, &lock, LONG).await.unwrap();
    let all = || cluster.stored_on(&lock, |_| true).len() == 5;
    eventually("all nodes store the lock", async || all().then_some(())).await;
    // Two nodes carry out the release. The three stopped nodes do not answer.
    cluster.servers[2..].iter().for_each(|server| server.stop());
    let hasty = redlock(cluster.nodes.clone(), Duration::from_millis(400));
    let released = hasty.release(&lock, &lease.token).await;
    assert!(matches!(released, Err(LockError::Unknown(_))), "{released:?}");
    cluster.servers[2..].iter().for_each(|server| server.cont());
    cluster.clean_for_good(&lock, lease.token.fencing().get()).await;
    for node in &cluster.nodes {
        in_state(node.as_ref(), NodeState::Admitted).await;
    }

    // Two nodes carry out the release, and two store nothing. The fifth node is dead, and one node
    // cannot form a majority.
    let lease = acquire(&patient, &lock, LONG).await.unwrap();
    let all = || cluster.stored_on(&lock, |_| true).len() == 5;
    eventually("all nodes store the lock", async || all().then_some(())).await;
    for server in &cluster.servers[..2] {
        server.cmd(&["DEL", &key(&lock)]);
    }
    cluster.servers[4].kill();
    assert_eq!(patient.release(&lock, &lease.token).await, Ok(()));
}
