//! Behaviour that only a real redis-server can show: lost connections, restarts, credentials, and
//! nodes that are not eligible to vote.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::Settings;
use redlock_core::clock::{OsEntropy, SystemClock};
use redlock_core::node::redis::{RedisNode, RedisUrl};
use redlock_core::node::{
    Effect, Keys, NoObserver, Node, NodeSettings, NodeState, Op, Reason, Remedy, Vote,
};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::node::contract::{assert_held, fencing};
use crate::support::cluster::voted;
use crate::support::harness::{DeadPort, RedisOptions, RedisServer, eventually};
use crate::support::measure::measured;
use crate::support::nodes::{
    LONG_MS, Lock, Recorder, ask, assert_extended, assert_failed, failure, hasty_node, in_state,
    name, node_settings, now, record, redis_settings, remote_node, remote_node_with, strict_node,
    submit, ttl, votes,
};
use crate::support::resp::Resp;

pub(super) async fn redis_node() -> (RedisServer, Arc<dyn Node>, Arc<Recorder>) {
    let server = RedisServer::start();
    let calls = Arc::new(Recorder::default());
    let node = remote_node_with(&server.url(), redis_settings(node_settings()), calls.clone());
    in_state(node.as_ref(), NodeState::Admitted).await;
    (server, node, calls)
}

async fn recovers(node: &dyn Node) {
    let probe = Lock::new("probe");
    eventually("the remote serves again", async || {
        matches!(ask(node, probe.inspect()).await, Vote::Missing | Vote::Found(_)).then_some(())
    })
    .await;
}

#[tokio::test]
async fn without_memory_only_acquires_fail() {
    out_of_memory(false).await;
}

#[tokio::test]
async fn without_memory_only_acquires_fail_with_the_module() {
    out_of_memory(true).await;
}

async fn out_of_memory(native: bool) {
    let server =
        RedisServer::start_with(RedisOptions { native: Some(native), ..RedisOptions::default() });
    let node = remote_node(&server.url());
    in_state(node.as_ref(), NodeState::Admitted).await;
    let held = Lock::new("a");
    let refused_lock = Lock::new("b");
    let retaken = Lock::new("c");
    let kept = Lock::new("d");
    let t = now();
    assert_eq!(ask(node.as_ref(), held.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(ask(node.as_ref(), retaken.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(ask(node.as_ref(), kept.acquire(1, t, LONG_MS)).await, Vote::Granted);
    server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);

    let ops = [refused_lock.acquire(1, t, LONG_MS), held.extend(1, t, 2 * LONG_MS), held.inspect()];
    let answers = votes(ops.into_iter().map(|op| submit(node.as_ref(), op)).collect()).await;
    let refused = failure(answers[0].clone());
    assert_eq!(refused.reason, Reason::Error);
    assert!(refused.detail.contains("OOM"), "{}", refused.detail);
    assert_extended(&answers[1]);
    assert!(matches!(answers[2], Vote::Found(_)));
    // There is no lock to delete, so the release frees no memory for its tombstone. The release
    // must fail. If it succeeded, the gateway would not repeat it.
    let refused = failure(ask(node.as_ref(), refused_lock.release(1, t)).await);
    assert!(refused.reason == Reason::Error && refused.detail.contains("OOM"), "{refused}");
    assert_eq!(ask(node.as_ref(), held.release(1, t)).await, Vote::Released);
    // This release has another token, so its tombstone is a new value. Deleting the lock frees the
    // memory for it.
    assert_eq!(ask(node.as_ref(), retaken.release(1, t + 1)).await, Vote::Released);
    for lock in [&held, &refused_lock, &retaken] {
        assert_eq!(server.cmd(&[b"EXISTS", &lock.keys.lock[..]]), Resp::Integer(0));
    }
    assert_eq!(ask(node.as_ref(), kept.release_keeping(1, t, LONG_MS)).await, Vote::Released);
    assert_eq!(server.cmd(&[b"EXISTS", &kept.keys.lock[..]]), Resp::Integer(1));

    server.cmd(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(ask(node.as_ref(), refused_lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert!(node.status().borrow().state.is_admitted());
}

#[tokio::test]
async fn after_a_script_flush_the_worker_loads_its_script_again() {
    let server =
        RedisServer::start_with(RedisOptions { native: Some(false), ..RedisOptions::default() });
    let node = remote_node(&server.url());
    in_state(node.as_ref(), NodeState::Admitted).await;
    let lock = Lock::new("a");
    let t = now();
    // On a busy machine a heartbeat may be due, and show the loss before the acquire does.
    eventually("the acquire itself shows the loss", async || {
        recovers(node.as_ref()).await;
        server.cmd(&["SCRIPT", "FLUSH"]);
        let refused = failure(ask(node.as_ref(), lock.acquire(1, t, LONG_MS)).await);
        assert_eq!(refused.reason, Reason::Down, "{refused}");
        (refused.effect == Effect::None).then_some(())
    })
    .await;
    recovers(node.as_ref()).await;
    assert_eq!(ask(node.as_ref(), lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(node.status().borrow().restarts, 0, "a flush is no restart");
}

#[tokio::test]
async fn after_flushall_the_worker_is_admitted_again() {
    let (server, node, _) = redis_node().await;
    let lock = Lock::new("a");
    let t = now();
    // A worker that was just used sends no heartbeat. So the acquire must notice the loss itself. On
    // a busy machine a probe may be due all the same.
    eventually("the acquire itself shows the loss", async || {
        recovers(node.as_ref()).await;
        server.cmd(&["FLUSHALL"]);
        let refused = failure(ask(node.as_ref(), lock.acquire(1, t, LONG_MS)).await);
        if refused.reason == Reason::Down {
            return None;
        }
        assert_eq!((refused.reason, refused.effect), (Reason::Quarantined, Effect::None));
        Some(())
    })
    .await;
    recovers(node.as_ref()).await;
    assert_eq!(ask(node.as_ref(), lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
}

#[tokio::test]
async fn a_lost_marker_is_noticed_by_an_idle_worker() {
    let (server, node, _) = redis_node().await;
    server.cmd(&["FLUSHALL"]);
    // The test submits no operation, so only the heartbeat can restore the marker. It must restore the
    // second key too, which notes the database of the marker.
    eventually("a marker stands again", async || {
        (server.cmd(&["DBSIZE"]).integer() == 2).then_some(())
    })
    .await;
    in_state(node.as_ref(), NodeState::Admitted).await;
}

#[tokio::test]
async fn a_worker_resumes_after_a_crash_and_counts_one_restart() {
    let (mut server, node, _) = redis_node().await;
    let lock = Lock::new("a");
    let t = now();
    assert_eq!(ask(node.as_ref(), lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
    server.kill();
    let down = in_state(node.as_ref(), NodeState::Connecting).await;
    assert!(!down.detail.is_empty());
    assert_failed(ask(node.as_ref(), lock.inspect()).await, Reason::Down, Effect::None);
    server.restart();
    assert_eq!(in_state(node.as_ref(), NodeState::Admitted).await.restarts, 1);
    assert_eq!(
        ask(node.as_ref(), lock.acquire(2, now(), LONG_MS)).await,
        Vote::Granted,
        "the server kept nothing"
    );
}

#[tokio::test]
async fn locks_and_watermarks_survive_a_crash_with_an_aof() {
    let options = RedisOptions { append_only: true, ..RedisOptions::default() };
    let mut server = RedisServer::start_with(options);
    let node = remote_node(&server.url());
    in_state(node.as_ref(), NodeState::Admitted).await;
    let held = Lock::new("a");
    let released = Lock::new("b");
    let t = now();
    assert_eq!(ask(node.as_ref(), held.acquire(1, t, LONG_MS)).await, Vote::Granted);
    assert_eq!(ask(node.as_ref(), released.release(1, t)).await, Vote::Missing);
    server.restart();
    eventually("the restart is noticed", async || {
        let _ = ask(node.as_ref(), held.inspect()).await;
        let status = node.status().borrow().clone();
        (status.restarts == 1 && status.state.is_admitted()).then_some(())
    })
    .await;
    assert_held(&ask(node.as_ref(), held.acquire(2, t + 1, LONG_MS)).await, &record(1, t), LONG_MS);
    assert_eq!(
        ask(node.as_ref(), released.acquire(2, t, LONG_MS)).await,
        Vote::Stale { fence: fencing(t) }
    );
}

#[tokio::test]
async fn twenty_lost_connections_leave_none_open() {
    let server = RedisServer::start();
    // Four workers share the lost connections. So each worker's backoff, which doubles, stays
    // short.
    let nodes: Vec<_> = (0..4).map(|_| remote_node(&server.url())).collect();
    for _ in 0..5 {
        for node in &nodes {
            in_state(node.as_ref(), NodeState::Admitted).await;
        }
        server.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
        for node in &nodes {
            eventually("the remote notices", async || {
                (!node.status().borrow().state.is_admitted()).then_some(())
            })
            .await;
        }
    }
    for node in &nodes {
        recovers(node.as_ref()).await;
    }
    let clients = || server.cmd(&["CLIENT", "LIST", "TYPE", "normal"]).text().lines().count();
    let last = std::cell::Cell::new(0);
    eventually("one connection for each remote and one for this test", async || {
        last.set(clients());
        (last.get() == nodes.len() + 1).then_some(())
    })
    .await;
    drop(nodes);
    eventually("a remote that is dropped closes its connection", async || {
        (clients() == 1).then_some(())
    })
    .await;
}

#[tokio::test]
async fn wrong_credentials_are_reported_without_the_password() {
    let password = Some("p@ss/word".into());
    let server = RedisServer::start_with(RedisOptions {
        password,
        native: Some(false),
        ..RedisOptions::default()
    });
    server.cmd(&["ACL", "SETUSER", "gateway", "on", ">its:secret", "~*", "+@all"]);
    server.cmd(&["ACL", "SETUSER", "narrow", "on", ">its:secret", "~*", "+@all", "-evalsha"]);
    let at = format!("127.0.0.1:{}", server.port());
    for login in [":p%40ss%2Fword", "default:p%40ss%2Fword", "gateway:its%3Asecret"] {
        let node = remote_node(&format!("redis://{login}@{at}"));
        in_state(node.as_ref(), NodeState::Admitted).await;
        assert_eq!(ask(node.as_ref(), Lock::new("free").inspect()).await, Vote::Missing);
    }
    for (login, word) in [
        (":hunter2@", "WRONGPASS"),
        ("gateway:hunter2@", "WRONGPASS"),
        ("nobody:hunter2@", "WRONGPASS"),
        ("", "NOAUTH"),
    ] {
        let node = remote_node(&format!("redis://{login}{at}"));
        let status = eventually("the refusal is shown", async || {
            let status = node.status().borrow().clone();
            status.detail.contains(word).then_some(status)
        })
        .await;
        assert_eq!(status.state, NodeState::Refused);
        assert!(status.remedy == Some(Remedy::GiveCredentials), "{status:?}");
        let vote = failure(ask(node.as_ref(), Lock::new("free").inspect()).await);
        assert_eq!((vote.reason, vote.effect), (Reason::Refused, Effect::None));
        for text in [status.detail, vote.detail, node.name().into()] {
            assert!(!text.contains("hunter2"), "{text}");
        }
    }
    let node = remote_node(&format!("redis://narrow:its%3Asecret@{at}"));
    eventually("a missing permission is named", async || {
        let _ = ask(node.as_ref(), Lock::new("free").inspect()).await;
        node.status().borrow().detail.contains("evalsha").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_replica_is_refused_and_votes_once_it_is_a_master() {
    let master = RedisServer::start();
    let replicaof = ["--replicaof", "127.0.0.1", &master.port().to_string()].map(String::from);
    let server =
        RedisServer::start_with(RedisOptions { args: replicaof.into(), ..RedisOptions::default() });
    let node = remote_node(&server.url());
    let status = in_state(node.as_ref(), NodeState::Refused).await;
    assert!(
        status.detail.contains("slave") && status.remedy == Some(Remedy::MakeMaster),
        "{status:?}"
    );
    assert_failed(
        ask(node.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await,
        Reason::Refused,
        Effect::None,
    );
    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    in_state(node.as_ref(), NodeState::Admitted).await;
    assert_eq!(ask(node.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await, Vote::Granted);
}

/// Other masters serve the other keys, so half of the locks would fail for ever.
#[tokio::test]
async fn in_cluster_mode_a_node_votes_once_it_serves_all_slots() {
    let args = ["--cluster-enabled", "yes"].map(String::from).into();
    let server = RedisServer::start_with(RedisOptions { args, ..RedisOptions::default() });
    let node = remote_node(&server.url());
    let refused = in_state(node.as_ref(), NodeState::Refused).await;
    assert!(refused.detail.contains("serves no slot"), "{refused:?}");
    server.cmd(&["CLUSTER", "ADDSLOTSRANGE", "0", "8191"]);
    let refused = eventually("the node names its slots", async || {
        let status = node.status().borrow().clone();
        status.detail.contains("only the slots 0-8191").then_some(status)
    })
    .await;
    assert_eq!((refused.state, refused.remedy), (NodeState::Refused, Some(Remedy::ServeAllSlots)));
    server.cmd(&["CLUSTER", "ADDSLOTSRANGE", "8192", "16383"]);
    in_state(node.as_ref(), NodeState::Admitted).await;
    assert_eq!(ask(node.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await, Vote::Granted);
}

#[tokio::test]
async fn an_admitted_node_that_becomes_a_replica_is_refused() {
    let server = RedisServer::start();
    // A quarantine lasts five seconds here.
    let node = NodeSettings::default().with_max_clock_skew(Duration::from_millis(500));
    let settings = Settings { max_ttl: ttl(1_500), node, ..Settings::default() };
    let node = strict_node(&server.url(), settings.of_masters("tests", 1), Arc::new(NoObserver));
    in_state(node.as_ref(), NodeState::Admitted).await;
    // The server becomes a replica of a master that does not exist. So it receives no data, and its
    // marker stays.
    let dead_port = DeadPort::new();
    server.cmd(&["REPLICAOF", "127.0.0.1", &dead_port.port().to_string()]);
    let vote = failure(ask(node.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await);
    // On a busy machine a probe may show the change before the acquire does.
    let is_noticed = matches!(vote.reason, Reason::Down | Reason::Refused);
    assert!(vote.detail.contains("READONLY") || is_noticed, "{vote}");
    let status = in_state(node.as_ref(), NodeState::Refused).await;
    assert!(status.remedy == Some(Remedy::MakeMaster), "{status:?}");
    server.cmd(&["REPLICAOF", "NO", "ONE"]);
    // Nothing shows that the data is the master's own: it may come from the other master.
    let status = in_state(node.as_ref(), NodeState::Quarantined).await;
    assert!(status.detail.contains("it was a replica"), "{status:?}");
    let refused = ask(node.as_ref(), Lock::new("a").acquire(1, now(), 1_000)).await;
    assert_failed(refused, Reason::Quarantined, Effect::None);
    in_state(node.as_ref(), NodeState::Admitted).await;
    let lock = Lock::new("a");
    assert_eq!(voted(node.as_ref(), |t| lock.acquire(1, t, LONG_MS)).await, Vote::Granted);
}

#[tokio::test]
async fn an_evicting_node_is_refused_and_votes_once_it_is_fixed() {
    let server = RedisServer::start();
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let node = remote_node(&server.url());
    let status = in_state(node.as_ref(), NodeState::Refused).await;
    let cure = Some(Remedy::ForbidEvictions);
    assert!(status.detail.contains("allkeys-lru") && status.remedy == cure, "{status:?}");
    assert_eq!(server.cmd(&["DBSIZE"]), Resp::Integer(0), "an ineligible node gets no marker");
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    in_state(node.as_ref(), NodeState::Admitted).await;
}

#[tokio::test]
async fn a_changed_eviction_policy_of_an_admitted_node_is_noticed() {
    let (server, node, _) = redis_node().await;
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let status = in_state(node.as_ref(), NodeState::Refused).await;
    assert!(status.detail.contains("allkeys-lru"), "{}", status.detail);
    server.cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    in_state(node.as_ref(), NodeState::Admitted).await;
}

#[tokio::test]
async fn a_marker_of_another_configuration_is_never_overwritten() {
    let (server, node, _) = redis_node().await;
    let before = server.cmd(&["GET", "{lock:}:marker"]);
    let other = Settings { max_ttl: ttl(377_000), node: node_settings(), ..Settings::default() };
    let other = other.of_masters("tests", 1);
    let newcomer = remote_node_with(&server.url(), other.clone(), Arc::new(NoObserver));
    let status = in_state(newcomer.as_ref(), NodeState::Refused).await;
    assert!(
        status.detail.contains("300000 ms") && status.detail.contains("377000 ms"),
        "{}",
        status.detail
    );
    assert_eq!(server.cmd(&["GET", "{lock:}:marker"]), before);
    assert_eq!(ask(node.as_ref(), Lock::new("a").acquire(1, now(), LONG_MS)).await, Vote::Granted);

    // `reconfigure` raises the limit. Then both get votes, and the session of the first goes on.
    server.cmd(&["SET", "{lock:}:marker", &before.text().replace(":300000:", ":377000:")]);
    assert_eq!(ask(node.as_ref(), Lock::new("b").acquire(1, now(), LONG_MS)).await, Vote::Granted);
    in_state(newcomer.as_ref(), NodeState::Admitted).await;
    eventually("the first has seen the larger limit", async || {
        node.status().borrow().marker.contains(":377000:").then_some(())
    })
    .await;
    assert!(node.status().borrow().state.is_admitted());
    let raised = server.cmd(&["GET", "{lock:}:marker"]);
    assert!(raised.text().contains(":377000:"), "no heartbeat wrote an older marker");
    assert_ne!(redis_settings(node_settings()).cluster_config(), other.cluster_config());
}

#[tokio::test]
async fn an_idle_worker_notices_a_hung_node_by_its_heartbeat() {
    let server = RedisServer::start();
    let node = hasty_node(&server.url());
    in_state(node.as_ref(), NodeState::Admitted).await;
    server.stop();
    in_state(node.as_ref(), NodeState::Connecting).await;
    server.cont();
    in_state(node.as_ref(), NodeState::Admitted).await;
    assert_eq!(node.status().borrow().restarts, 0);
}

#[tokio::test]
async fn two_prefixes_on_one_server_do_not_disturb_each_other() {
    let (server, node, _) = redis_node().await;
    let other = Settings {
        key_prefix: String::new(),
        max_ttl: ttl(5_000),
        node: node_settings(),
        ..Settings::default()
    };
    let plain =
        remote_node_with(&server.url(), other.of_masters("others", 1), Arc::new(NoObserver));
    in_state(plain.as_ref(), NodeState::Admitted).await;
    let keys = Keys::new("", &name("a"));
    let op = Op::Acquire { keys, record: record(1, now()), ttl: ttl(LONG_MS), tell: None };
    assert_eq!(ask(plain.as_ref(), op).await, Vote::Granted);
    assert_ne!(
        server.cmd(&["GET", "a"]),
        Resp::Nil,
        "the bare name is the key that other clients use"
    );
    assert_eq!(ask(node.as_ref(), Lock::new("a").acquire(2, now(), LONG_MS)).await, Vote::Granted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn an_early_connection_result_is_received() {
    const THREADS: usize = 32;
    const TRIES: usize = 200;
    let dead_port = DeadPort::new();
    let url = RedisUrl::parse(&dead_port.url()).expect("a valid url");
    let mut asking = JoinSet::new();
    for _ in 0..THREADS {
        let url = url.clone();
        let runtime = Handle::current();
        let told = move || {
            let master = RedisNode::master(url.clone(), redis_settings(node_settings()));
            runtime
                .block_on(master.probe(&SystemClock, &OsEntropy))
                .expect_err("nobody is there")
                .detail
        };
        // This thread is no worker thread of the runtime. So a worker can connect while this thread
        // continues.
        asking.spawn_blocking(move || {
            (0..TRIES).map(|_| told()).find(|told| told != "connection refused")
        });
    }
    let others: Vec<_> = asking.join_all().await.into_iter().flatten().collect();
    assert_eq!(others, [""; 0]);
}

mod measured {
    use super::*;

    #[tokio::test]
    async fn a_hung_node_loses_its_session_and_then_refuses_at_once() {
        measured("the time until a hung node refuses", async || {
            let server = RedisServer::start();
            let node = hasty_node(&server.url());
            in_state(node.as_ref(), NodeState::Admitted).await;
            let lock = Lock::new("a");
            let t = now();
            // The first call of a session gets its answer. So it is a later call that times out.
            assert_eq!(ask(node.as_ref(), lock.inspect()).await, Vote::Missing);
            server.stop();
            let since = Instant::now();
            assert_failed(
                ask(node.as_ref(), lock.acquire(1, t, LONG_MS)).await,
                Reason::Timeout,
                Effect::Possible,
            );
            let given_up = since.elapsed();
            assert!(given_up > Duration::from_millis(900), "after {given_up:?}");
            in_state(node.as_ref(), NodeState::Connecting).await;
            let since = Instant::now();
            for _ in 0..100 {
                let refused = ask(node.as_ref(), lock.release(1, t)).await;
                assert_failed(refused, Reason::Down, Effect::None);
            }
            let refusals = since.elapsed();
            server.cont();
            in_state(node.as_ref(), NodeState::Admitted).await;
            let acquire = Lock::new("b").acquire(1, now(), LONG_MS);
            assert_eq!(ask(node.as_ref(), acquire).await, Vote::Granted);
            if given_up < Duration::from_secs(5) && refusals < Duration::from_millis(900) {
                Ok(())
            } else {
                Err(format!("given up after {given_up:?}; 100 refusals took {refusals:?}"))
            }
        })
        .await;
    }
}
