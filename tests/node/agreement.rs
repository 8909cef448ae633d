//! Several gateways over one master. They count the same quarantine and agree on one configuration.
//! `--bootstrap` has no effect if one of the gateways has seen a loss.

use std::time::Duration;

use redlock_core::node::{Node, NodeState, NodeStatus, Remedy, Vote};
use redlock_core::{AcquireOptions, Bootstrap, LockError};
use tokio::time::{Instant, timeout};

use crate::support::cluster::{
    ClusterSettings, first_vote, granted, marker, repeated, until_some, voted,
};
use crate::support::harness::{PATIENCE, RedisServer, eventually, masters};
use crate::support::nodes::{LONG_MS, Lock, in_state, name, now, ttl};

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_gateway_of_another_configuration_is_refused_with_both() {
    let cluster = ClusterSettings::ENDLESS_QUARANTINE;
    let server = RedisServer::start();
    let remote = cluster.admitted(&server.url()).await;
    let stood = marker(&server);
    let longer = ClusterSettings { max_ttl: cluster.max_ttl * 2, ..cluster };
    let other_set = ClusterSettings { name: "other nodes", ..cluster };
    let set_of =
        |cluster: &ClusterSettings| cluster.settings().cluster_config().node_set().to_owned();
    for (other, remedy) in [(&longer, Remedy::Reconfigure), (&other_set, Remedy::NameNodesAlike)] {
        let strange = other.remote_node(&server.url());
        let refused = in_state(strange.as_ref(), NodeState::Refused).await;
        for cluster in [&cluster, other] {
            let expected =
                format!("node set {}, max_ttl {} ms", set_of(cluster), cluster.max_ttl.as_millis());
            assert!(refused.detail.contains(&expected), "no {expected:?} in {refused:?}");
        }
        assert!(refused.remedy == Some(remedy), "{refused:?}");
    }
    assert_ne!(set_of(&cluster), set_of(&other_set));
    assert_eq!(marker(&server), stood, "a foreign marker is left alone");
    first_vote(remote.as_ref()).await;
}

#[test]
fn two_gateways_admitting_one_master_at_once_agree() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    repeated(12, 6, async || {
        let server = RedisServer::start();
        let since = Instant::now();
        let first = cluster.remote_node(&server.url());
        let second = cluster.remote_node(&server.url());
        let votes = tokio::join!(first_vote(first.as_ref()), first_vote(second.as_ref()));
        for voted in [votes.0, votes.1] {
            assert!(voted - since >= cluster.quarantine(), "{:?}", voted - since);
        }
        let stood = marker(&server);
        assert!(stood.as_ref().is_some_and(|marker| marker.contains(":volatile.")), "{stood:?}");
        let lock = Lock::new("job");
        let vote = voted(first.as_ref(), |t| lock.acquire(1, t, LONG_MS)).await;
        assert_eq!(vote, Vote::Granted);
        let vote = voted(second.as_ref(), |t| lock.acquire(2, t, LONG_MS)).await;
        assert!(matches!(vote, Vote::Held(_)), "{vote:?}");
        assert_eq!(marker(&server), stood, "no gateway undoes the other's marker");
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_restarted_gateway_resumes_the_quarantine_of_the_marker() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let server = RedisServer::start();
    let since = Instant::now();
    let first = cluster.remote_node(&server.url());
    in_state(first.as_ref(), NodeState::Quarantined).await;
    let stood = marker(&server);
    let passed = cluster.quarantine() / 2;
    tokio::time::sleep(passed).await;
    drop(first);
    let second = cluster.remote_node(&server.url());
    let mut status = second.status();
    let has_resumed =
        |status: &NodeStatus| status.state == NodeState::Quarantined || status.state.is_admitted();
    let resumed = timeout(PATIENCE, status.wait_for(has_resumed)).await.expect("probed");
    let resumed = resumed.expect("the worker lives").clone();
    assert_eq!(marker(&server), stood, "the gateway counts from the same loss");
    // On a busy machine the quarantine may be over.
    if let Some(until) = resumed.until_micros {
        let left = until - resumed.since_micros;
        // The master's clock and the test's may differ by some milliseconds.
        let most = cluster.quarantine() - passed + Duration::from_millis(100);
        assert!(left <= most.as_micros() as u64, "{left} µs left: {resumed:?}");
    }
    let voted = first_vote(second.as_ref()).await;
    assert!(voted - since >= cluster.quarantine(), "{:?}", voted - since);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_gateway_that_would_wait_longer_follows_one_that_has_waited() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let server = RedisServer::start();
    let since = Instant::now();
    let early = cluster.remote_node(&server.url());
    // This gateway's quarantines would last for hours.
    let late = cluster.node_with_clock_skew(&server.url(), Duration::from_secs(3_600));
    let waits = in_state(late.as_ref(), NodeState::Quarantined).await;
    assert!(waits.until_micros.unwrap() - waits.since_micros >= 7_200_000_000, "{waits:?}");
    let votes = tokio::join!(first_vote(early.as_ref()), first_vote(late.as_ref()));
    assert!(votes.0 - since >= cluster.quarantine() && votes.1 - since >= cluster.quarantine());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_second_loss_during_quarantine_restarts_the_count() {
    let cluster =
        ClusterSettings { max_ttl: Duration::from_secs(2), ..ClusterSettings::SHORT_QUARANTINE };
    // On a busy machine the first quarantine may be over before the second loss.
    eventually("the second loss is during the quarantine", async || {
        let server = RedisServer::start();
        let remote = cluster.remote_node(&server.url());
        let first = in_state(remote.as_ref(), NodeState::Quarantined).await;
        tokio::time::sleep(cluster.quarantine() / 2).await;
        let lost = Instant::now();
        server.cmd(&["FLUSHALL"]);
        let in_time = now() < first.until_micros.unwrap();
        let voted = first_vote(remote.as_ref()).await;
        assert!(
            voted - lost >= cluster.quarantine(),
            "the master voted {:?} after the second loss",
            voted - lost
        );
        in_time.then_some(())
    })
    .await;
}

/// The first of two gateways admits a master, and a lock is granted. Then the master loses
/// everything. The second gateway counts a longer quarantine, which has not ended, and it has not
/// probed since. It must begin its count again, because the marker from which it counts is gone.
#[test]
fn a_count_from_before_a_loss_admits_nobody_after_it() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    until_some("a loss before the second count has ended", 8, async || {
        let server = RedisServer::start();
        let first = cluster.remote_node(&server.url());
        in_state(first.as_ref(), NodeState::Quarantined).await;
        let second = cluster.node_with_clock_skew(&server.url(), Duration::from_secs(2));
        let counts = in_state(second.as_ref(), NodeState::Quarantined).await;
        in_state(first.as_ref(), NodeState::Admitted).await;
        let lock = Lock::new("job");
        assert_eq!(voted(first.as_ref(), |t| lock.acquire(1, t, 700)).await, Vote::Granted);
        let lost = Instant::now();
        server.cmd(&["FLUSHALL"]);
        // If the machine stood still, the second gateway may have probed again. Such a try does not
        // count.
        let in_time = now() < counts.until_micros.unwrap()
            && second.status().borrow().state == NodeState::Quarantined;
        let votes = tokio::join!(first_vote(first.as_ref()), first_vote(second.as_ref()));
        for voted in [votes.0, votes.1] {
            assert!(
                voted - lost >= cluster.quarantine(),
                "the master voted {:?} after the loss",
                voted - lost
            );
        }
        in_time.then_some(())
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn one_process_under_two_names_votes_once() {
    let cluster = ClusterSettings::SHORT_QUARANTINE;
    let server = RedisServer::start();
    let first = cluster.admitted(&server.url()).await;
    let second = cluster.remote_node(&server.url_as("", "localhost"));
    let refused = in_state(second.as_ref(), NodeState::Refused).await;
    assert!(refused.detail.contains("admitted as another node"), "{refused:?}");
    assert!(refused.remedy == Some(Remedy::NameEachNodeOnce), "{refused:?}");
    first_vote(first.as_ref()).await;
    assert_eq!(second.status().borrow().state, NodeState::Refused);
}

/// How long a test waits to be sure that a forbidden event does not happen. If the event can
/// happen, it takes a few milliseconds.
const FOR_A_WHILE: Duration = Duration::from_millis(700);

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn bootstrap_admits_a_complete_new_cluster_once() {
    let cluster = ClusterSettings::ENDLESS_QUARANTINE;
    let mut servers = masters(3);
    servers[2].kill();
    let remotes = cluster.bootstrapping_nodes(&servers);
    let locks = cluster.redlock(remotes.clone());
    for remote in &remotes[..2] {
        in_state(remote.as_ref(), NodeState::Quarantined).await;
    }
    assert!(timeout(FOR_A_WHILE, locks.bootstrap()).await.is_err(), "one node has not answered");
    for remote in &remotes[..2] {
        assert_eq!(remote.status().borrow().state, NodeState::Quarantined);
    }
    let (answer, ()) =
        tokio::join!(timeout(PATIENCE, locks.bootstrap()), async { servers[2].restart() });
    assert_eq!(answer, Ok(Bootstrap::Confirmed));
    for remote in &remotes {
        in_state(remote.as_ref(), NodeState::Admitted).await;
    }
    granted(&locks, &name("job"), LONG_MS, AcquireOptions::default).await;

    servers.iter().for_each(|server| drop(server.cmd(&["FLUSHALL"])));
    for remote in &remotes {
        in_state(remote.as_ref(), NodeState::Quarantined).await;
    }
    assert!(!locks.has_quorum());
    let refused = locks.acquire(&name("job"), ttl(LONG_MS), AcquireOptions::default()).await;
    assert!(matches!(refused, Err(LockError::NoQuorum(_))), "{refused:?}");
    tokio::time::sleep(FOR_A_WHILE).await;
    assert!(remotes.iter().all(|remote| remote.status().borrow().state == NodeState::Quarantined));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn bootstrap_is_refused_if_one_node_has_a_marker() {
    let cluster = ClusterSettings::ENDLESS_QUARANTINE;
    let servers = masters(3);
    cluster.mark_by(&servers[1].url()).await;
    let before: Vec<_> = servers.iter().map(marker).collect();
    let remotes = cluster.bootstrapping_nodes(&servers);
    let locks = cluster.redlock(remotes.clone());
    let answer = timeout(PATIENCE, locks.bootstrap()).await;
    assert_eq!(answer, Ok(Bootstrap::Refuted(remotes[1].name().to_owned())));
    in_state(remotes[1].as_ref(), NodeState::Admitted).await;
    assert_eq!(marker(&servers[1]), before[1]);
    for at in [0, 2] {
        in_state(remotes[at].as_ref(), NodeState::Quarantined).await;
    }
    tokio::time::sleep(FOR_A_WHILE).await;
    for at in [0, 2] {
        assert_eq!(remotes[at].status().borrow().state, NodeState::Quarantined);
    }
}

/// All masters lose everything. Then a gateway restarts, with `--bootstrap` still in its
/// configuration.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn bootstrap_is_refused_if_a_gateway_saw_the_loss() {
    let cluster = ClusterSettings::ENDLESS_QUARANTINE;
    let servers = masters(3);
    cluster.mark(&servers).await;
    let witness = cluster.remote_node(&servers[0].url());
    in_state(witness.as_ref(), NodeState::Admitted).await;
    servers.iter().for_each(|server| drop(server.cmd(&["FLUSHALL"])));
    in_state(witness.as_ref(), NodeState::Quarantined).await;
    let remotes = cluster.bootstrapping_nodes(&servers);
    let answer = timeout(PATIENCE, cluster.redlock(remotes.clone()).bootstrap()).await;
    assert_eq!(answer, Ok(Bootstrap::Refuted(remotes[0].name().to_owned())));
    for remote in &remotes {
        in_state(remote.as_ref(), NodeState::Quarantined).await;
    }
}
