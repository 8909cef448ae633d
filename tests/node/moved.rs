//! A master's name moves to a new process that has read the append-only file of the old one, while
//! the old process still runs. Gateways never get votes from both processes at the same time. No
//! lock that the old process has granted is granted again.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::eligibility::NAME_MOVES_WITHIN;
use redlock_core::node::redis::RedisSettings;
use redlock_core::node::worker::RemoteNode;
use redlock_core::node::{NoObserver, Node, NodeState, NodeStatus, Remedy, SafetyRules, Vote};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Instant;

use super::eligibility::{RETURNED, append_only};
use super::lost_writes::largest_number;
use crate::support::cluster::{ClusterSettings, first_vote};
use crate::support::harness::{RedisServer, eventually};
use crate::support::measure::measured;
use crate::support::nodes::{LONG_MS, Lock, ask, in_state, now, remote_node_with, strict_node};
use crate::support::resp::Resp;

const CONTESTED: &str = "calls that another process has answered";

/// One gateway's route to a master. New connections lead to one of the two processes. Open
/// connections stay where they are.
struct Route {
    url: String,
    port: watch::Sender<u16>,
    cuts: watch::Sender<()>,
}

impl Route {
    async fn to(server: &RedisServer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("redis://{}", listener.local_addr().expect("the listener is bound"));
        let (port, leads_to) = watch::channel(server.port());
        let (cuts, cut) = watch::channel(());
        tokio::spawn(async move {
            while let Ok((mut gateway, _)) = listener.accept().await {
                let port = *leads_to.borrow();
                let mut cut = cut.clone();
                tokio::spawn(async move {
                    let mut master =
                        TcpStream::connect(("127.0.0.1", port)).await.expect("the master listens");
                    cut.mark_unchanged();
                    tokio::select! {
                        _ = tokio::io::copy_bidirectional(&mut gateway, &mut master) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Self { url, port, cuts }
    }

    /// The node has the same name on every route.
    fn settings(cluster: &ClusterSettings) -> RedisSettings {
        let mut settings = cluster.settings();
        settings.node_name = Some("b".into());
        settings
    }

    /// Admits a server without data, without a quarantine.
    async fn mark(&self, cluster: &ClusterSettings) {
        let node = remote_node_with(&self.url, Self::settings(cluster), Arc::new(NoObserver));
        in_state(node.as_ref(), NodeState::Admitted).await;
    }

    fn node(&self, cluster: &ClusterSettings) -> Arc<RemoteNode> {
        strict_node(&self.url, Self::settings(cluster), Arc::new(NoObserver))
    }
}

/// What was seen of a durable master while its old process still ran.
#[derive(Debug)]
struct Moved {
    /// How often the old process voted for one gateway after the new process had voted for the
    /// other.
    beside: usize,
    /// The time from the move of the name to the first vote of the new process.
    waited: Duration,
    /// Whether the new process granted a lock that the old process had granted after the move.
    lost: bool,
    /// The last reason that was given why the new process did not vote.
    reason: String,
}

/// Process B' reads the append-only directory of process B, and B's name moves to B'. One gateway
/// keeps its connection to B. The other gateway's connection breaks, so it uses B' as soon as B'
/// may vote. After B' has read the directory, B grants a lock with a TTL of `held_ms`.
async fn moved_beside(rules: SafetyRules, held_ms: u64) -> Moved {
    let cluster = ClusterSettings { rules, ..ClusterSettings::SHORT_QUARANTINE };
    let old = RedisServer::start_with(append_only(&[]));
    let routes = [Route::to(&old).await, Route::to(&old).await];
    routes[0].mark(&cluster).await;
    let [stays, moves] = routes.each_ref().map(|route| route.node(&cluster));
    for node in [&stays, &moves] {
        in_state(node.as_ref(), NodeState::Admitted).await;
    }
    let new =
        RedisServer::start_with(append_only(&["--dir", old.dir().to_str().expect("a plain path")]));
    let held = Lock::new("held");
    let granted_until = eventually("the old process grants a lock", async || {
        let asked = Instant::now();
        let vote = ask(stays.as_ref(), held.acquire(1, now(), held_ms)).await;
        (vote == Vote::Granted).then_some(asked + Duration::from_millis(held_ms))
    })
    .await;
    for route in &routes {
        route.port.send_replace(new.port());
    }
    let moved = Instant::now();
    routes[1].cuts.send_replace(());
    let mut status = moves.status();
    let (reasons, reason) = watch::channel(String::new());
    let watching = tokio::spawn(async move {
        while status.changed().await.is_ok() {
            let NodeStatus { state, detail, .. } = status.borrow_and_update().clone();
            if state == NodeState::Quarantined {
                reasons.send_replace(detail);
            }
        }
    });
    let first = first_vote(moves.as_ref()).await;
    watching.abort();
    let again = ask(moves.as_ref(), Lock::new("held").acquire(2, now(), 10)).await;
    let lost = again == Vote::Granted && Instant::now() < granted_until;
    let mut beside = 0;
    for n in 0..20 {
        let vote =
            ask(stays.as_ref(), Lock::new(&format!("beside-{n}")).acquire(3, now(), LONG_MS)).await;
        beside += usize::from(
            vote == Vote::Granted && old.cmd(&["GET", &format!("lock:beside-{n}")]) != Resp::Nil,
        );
    }
    Moved { beside, waited: first - moved, lost, reason: reason.borrow().clone() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_rules_a_durable_master_votes_beside_its_old_process() {
    let off =
        SafetyRules { returned_waits: false, answered_calls_are_known: false, ..SafetyRules::ALL };
    // On a busy machine, the other gateway may leave the old process before it votes once more.
    eventually("votes of both processes, and a lost grant", async || {
        let seen = moved_beside(off, LONG_MS).await;
        println!("{} votes beside the old process, after {:?}", seen.beside, seen.waited);
        (seen.beside > 0 && seen.lost).then_some(())
    })
    .await;
}

/// A copy of the process lacks a call that the old process answered after the copy had loaded the
/// file. The old process ends before any gateway sees both of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_overlapped_its_predecessor_is_quarantined() {
    let cluster = ClusterSettings::ENDLESS_QUARANTINE;
    let mut old = RedisServer::start_with(append_only(&[]));
    let route = Route::to(&old).await;
    route.mark(&cluster).await;
    let node = route.node(&cluster);
    in_state(node.as_ref(), NodeState::Admitted).await;
    let new =
        RedisServer::start_with(append_only(&["--dir", old.dir().to_str().expect("a plain path")]));
    let loaded = largest_number(&new);
    eventually("the old process answers a call that the new one lacks", async || {
        (largest_number(&old) > loaded).then_some(())
    })
    .await;
    first_vote(node.as_ref()).await;
    route.port.send_replace(new.port());
    old.kill();
    let seen = in_state(node.as_ref(), NodeState::Quarantined).await;
    assert!(
        seen.detail.contains(CONTESTED) && seen.remedy == Some(Remedy::WaitWithOneProcess),
        "{seen:?}"
    );
}

/// The rule holds only if every gateway resolves the name again in time. So a machine that stands
/// still for seconds may break it.
mod measured {
    use super::*;

    /// The longest TTL of the cluster.
    const HELD_MS: u64 = 700;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_durable_master_never_votes_beside_its_old_process() {
        measured("the move of a name", async || {
            let seen = moved_beside(SafetyRules::ALL, HELD_MS).await;
            assert!(seen.waited >= NAME_MOVES_WITHIN, "{:?}", seen.waited);
            // The new process may lack grants of the old one.
            if (seen.beside, seen.lost) != (0, false) || !seen.reason.contains(CONTESTED) {
                return Err(format!("{seen:?}"));
            }
            let waits_only = SafetyRules { answered_calls_are_known: false, ..SafetyRules::ALL };
            let seen = moved_beside(waits_only, HELD_MS).await;
            assert!(seen.waited >= NAME_MOVES_WITHIN, "{:?}", seen.waited);
            if seen.beside != 0 || !seen.reason.contains(RETURNED) {
                return Err(format!("without the rule: {seen:?}"));
            }
            Ok(())
        })
        .await;
    }
}
