//! Masters that stand still for a moment, as with a disk that is slow to write. The node time-out
//! is the default one. Some tests stop the masters' processes. In the others the masters sync each
//! write before they answer it, and the fsync itself stalls.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::Method;
use serde_json::json;
use tokio::task::JoinHandle;

use crate::support::client::{Answer, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, SlowDisk, daily_or_long, eventually, masters};
use crate::support::measure::measured;
use crate::support::nodes::no_master_stores;
use crate::support::waiters::{HOUR_MS, patient, released};

const KEY: &str = "order-4711/attempt";
/// How long a round waits for the answers of a quorum, if a tenth of the TTL is longer.
const QUORUM_PATIENCE: Duration = Duration::from_millis(800);
/// A delay that lasts until the test ends it.
const ENDLESS: Duration = Duration::from_secs(3_600);

async fn over(servers: &[RedisServer]) -> Gateway {
    patient(Launch::over(servers)).flag("--node-timeout", "50ms").ready().await
}

/// The nodes in an answer that a majority has not answered. Panics if a round gave up on a node
/// before `patience`. Nodes whose connection was closed fail at once.
fn late_nodes(answer: &Answer, patience: Duration) -> Vec<usize> {
    let problem = answer.json();
    let nodes = problem["nodes"].as_array().expect("a list").iter().enumerate();
    let late = nodes.filter(|(_, node)| {
        let is_late = node["state"] == "timeout";
        let detail = format!("no answer within {patience:?}");
        assert!(!is_late || node["detail"] == detail, "{problem:#}");
        is_late
    });
    late.map(|(at, _)| at).collect()
}

/// The first request waits for a majority. Once the connections are closed, requests fail at once.
#[tokio::test]
async fn hung_majority_delays_only_the_first_requests() {
    let servers = masters(3);
    let gateway = over(&servers).await;
    let mut tries = 0..20;
    eventually("a request waits for both", async || {
        tries.next().expect("the connections are always closed before");
        gateway.all_nodes_admitted().await;
        servers[..2].iter().for_each(RedisServer::stop);
        let began = Instant::now();
        let refused = gateway.post("job", json!({})).await;
        let took = began.elapsed();
        let problem = refused.problem(503, "quorum_unavailable");
        if late_nodes(&refused, QUORUM_PATIENCE) == [0, 1] {
            assert!(took >= Duration::from_millis(790), "{problem:#}");
            return Some(());
        }
        // On a busy machine, a connection may be closed before the request.
        servers[..2].iter().for_each(RedisServer::cont);
        None
    })
    .await;
    eventually("the connections are closed", async || {
        let nodes = gateway.readyz().await.json()["nodes"].clone();
        let is_closed = |at: usize| nodes[at]["state"] == "connecting";
        (is_closed(0) && is_closed(1)).then_some(())
    })
    .await;
    let refused = gateway.post("job", json!({})).await;
    refused.problem(503, "quorum_unavailable");
    assert_eq!(late_nodes(&refused, QUORUM_PATIENCE), Vec::<usize>::new(), "{refused:?}");
    servers[..2].iter().for_each(RedisServer::cont);
}

/// The masters stop, a `PATCH` is answered 503, and the masters run the extension 8 s later.
#[tokio::test]
async fn an_extension_that_runs_late_prolongs_no_lock_beyond_its_ttl() {
    const STOPPED: Duration = Duration::from_secs(8);
    const ASKED_MS: u64 = 60_000;
    /// The default of `--clock-skew`.
    const SKEW: Duration = Duration::from_secs(2);
    let servers = masters(3);
    let gateway = over(&servers).await;
    // Longer than the masters are stopped, so that the lock is there to extend.
    let first_ms = 4 * STOPPED.as_millis() as u64;
    let lease = gateway.acquire_for("job", first_ms).await;
    servers.iter().for_each(RedisServer::stop);
    let refused = gateway.patch("job", &lease.token, ASKED_MS).await;
    assert_eq!(refused.status, 503, "{refused:?}");
    let answered = Instant::now();
    tokio::time::sleep(STOPPED).await;
    let late = answered.elapsed() - SKEW;
    servers.iter().for_each(RedisServer::cont);
    for server in &servers {
        let life = eventually("the master has run the extension", async || {
            let left = server.cmd(&["PTTL", "lock:job"]).integer();
            (left > first_ms as i64).then_some(left as u128)
        })
        .await;
        let most = u128::from(ASKED_MS) - late.as_millis();
        assert!(life <= most, "{life} ms are left; at most {most} may be");
    }
}

/// A disk, three masters that sync each write to it, and a gateway over them.
async fn on_slow_disk() -> (SlowDisk, Vec<RedisServer>, Gateway) {
    let disk = SlowDisk::new();
    let servers = disk.masters(3);
    let gateway = over(&servers).await;
    // A gateway that catches up writes to the masters too.
    gateway.all_nodes_caught_up().await;
    (disk, servers, gateway)
}

/// A round may wait for the call before its own, so it takes up to two delays. It takes longer than
/// the patience only on a busy machine.
fn is_short(delay: Duration) -> bool {
    delay * 2 < QUORUM_PATIENCE
}

/// One client acquires and releases one lock after the other while each fsync is delayed. If the
/// delay is short, it goes on until a lock was granted and released. Returns the status of each
/// answer, and how long the client waited for the answer.
async fn acquires_and_releases(
    gateway: &Gateway,
    client: String,
    locks: usize,
    delay: Duration,
) -> Vec<(u16, Duration)> {
    let mut answers = Vec::new();
    let mut add = |answer: &Answer, began: Instant| {
        let (status, took) = (answer.status, answer.at - began);
        match status {
            201 | 204 => assert!(took >= delay, "{status} after {took:?}: no fsync was delayed"),
            503 => drop(late_nodes(answer, QUORUM_PATIENCE)),
            _ => panic!("{answer:?} after {took:?}"),
        }
        answers.push((status, took));
    };
    let mut is_released = false;
    for number in 0.. {
        if number >= locks && (is_released || !is_short(delay)) {
            break;
        }
        assert!(number < locks + 100, "nothing was granted and released");
        let name = format!("{client}/{number}");
        let began = Instant::now();
        let granted = gateway.post(&name, json!({ "ttl_ms": 60_000 })).await;
        add(&granted, began);
        if granted.status == 201 {
            let lease = Lease::from(&granted);
            let began = Instant::now();
            let released = gateway.delete(&name, &lease.token).await;
            add(&released, began);
            is_released |= released.status == 204;
        }
    }
    answers
}

/// Prints how many requests were answered 503. The long form has delays of four lengths.
#[tokio::test]
async fn requests_outlast_the_delay_of_every_fsync() {
    let delays_ms: &[u64] = daily_or_long(&[150], &[70, 150, 400, 900]);
    let locks = daily_or_long(3, 20);
    let (disk, _servers, gateway) = on_slow_disk().await;
    println!("| fsync ms | clients | requests | 503 | median ms | longest ms |");
    for delay_ms in delays_ms {
        let delay = Duration::from_millis(*delay_ms);
        for clients in [1, 8] {
            disk.delay_fsyncs(delay);
            let work = (0..clients).map(|client| {
                let client = format!("{delay_ms}/{clients}/{client}");
                acquires_and_releases(&gateway, client, locks, delay)
            });
            let answers = join_all(work).await.concat();
            disk.delay_fsyncs(Duration::ZERO);
            let mut times: Vec<_> = answers.iter().map(|(_, took)| took.as_millis()).collect();
            times.sort_unstable();
            let requests = times.len();
            let refused = answers.iter().filter(|(status, _)| *status == 503).count();
            let median = times[requests / 2];
            let longest = times[requests - 1];
            println!("| {delay_ms} | {clients} | {requests} | {refused} | {median} | {longest} |");
            gateway.all_nodes_admitted().await;
        }
    }
}

#[tokio::test]
async fn a_round_waits_for_a_stalled_fsync_for_a_tenth_of_the_ttl() {
    let (disk, servers, gateway) = on_slow_disk().await;
    let mut tries = 0..20;
    eventually("a request waits for all masters", async || {
        tries.next().expect("the connections are always closed before");
        gateway.all_nodes_admitted().await;
        disk.delay_fsyncs(ENDLESS);
        let refused = gateway.post("job", json!({ "ttl_ms": 3_000 })).await;
        disk.delay_fsyncs(Duration::ZERO);
        refused.problem(503, "quorum_unavailable");
        // On a busy machine, a connection may be closed before the request.
        (late_nodes(&refused, Duration::from_millis(300)) == [0, 1, 2]).then_some(())
    })
    .await;
    no_master_stores(&servers, "job").await;
}

/// The masters run the acquire, but answer only after the gateway has given up. After the stall,
/// the gateway undoes the acquire and repeats the release. No lock expires meanwhile.
#[tokio::test]
async fn a_long_fsync_stall_is_503_and_leaves_one_holder() {
    let (disk, servers, gateway) = on_slow_disk().await;
    let body = json!({ "ttl_ms": HOUR_MS });
    let held = gateway.acquire_soon("held", body.clone()).await;
    let done = gateway.acquire_soon("done", body.clone()).await;
    disk.delay_fsyncs(ENDLESS);
    gateway.post("new", body.clone()).await.problem(503, "quorum_unavailable");
    gateway.delete("done", &done.token).await.problem(503, "outcome_unknown");
    eventually("all connections are closed", async || {
        let nodes = gateway.readyz().await.json()["nodes"].clone();
        (0..3).all(|at: usize| nodes[at]["state"] == "connecting").then_some(())
    })
    .await;
    disk.delay_fsyncs(Duration::ZERO);
    gateway.all_nodes_admitted().await;
    let refused = async |name: &str| {
        let call = gateway.call(Method::POST, lock_path(name)).json(&body);
        call.decided().await.problem(409, "lock_held");
    };
    refused("held").await;
    no_master_stores(&servers, "done").await;
    let new = gateway.acquire_soon("new", body.clone()).await;
    refused("new").await;
    for (name, lease) in [("held", held), ("new", new)] {
        released(&gateway, name, &lease).await;
    }
}

mod measured {
    use super::*;

    /// Requests of many kinds are on their way while the masters stand still.
    #[tokio::test]
    async fn a_short_stall_of_all_masters_fails_no_request() {
        let servers = masters(3);
        let gateway = over(&servers).await;
        let mut run = 0;
        measured("requests during a stall of 150 ms", async || {
            run += 1;
            gateway.all_nodes_admitted().await;
            let name = |what: &str| format!("{what}-{run}");
            let body = json!({ "ttl_ms": 60_000 });
            let held = gateway.acquire_soon(&name("held"), body.clone()).await;
            let done = gateway.acquire_soon(&name("done"), body.clone()).await;
            let path = |what: &str| lock_path(&name(what));
            let call = |method, what: &str| gateway.call(method, path(what));
            let kept = call(Method::POST, "kept").header("idempotency-key", KEY);
            assert_eq!(kept.json(&body).decided().await.status, 201);
            servers.iter().for_each(RedisServer::stop);
            let set = json!({ "names": [name("a"), name("b")] });
            let requests = [
                call(Method::POST, "new").json(&body).send(),
                call(Method::POST, "pool").json(&json!({ "slots": 3 })).send(),
                gateway.call(Method::POST, "/locks").json(&set).send(),
                call(Method::PATCH, "held").header("lock-token", &held.token).json(&body).send(),
                call(Method::DELETE, "done").header("lock-token", &done.token).send(),
                call(Method::DELETE, "kept").header("idempotency-key", KEY).send(),
                call(Method::GET, "held").send(),
            ];
            let requests = requests.map(tokio::spawn);
            // This is the stall.
            tokio::time::sleep(Duration::from_millis(150)).await;
            let given_up = requests.iter().position(JoinHandle::is_finished);
            servers.iter().for_each(RedisServer::cont);
            let mut statuses = Vec::new();
            for request in requests {
                statuses.push(request.await.unwrap().status);
            }
            let is_served = statuses == [201, 201, 201, 200, 204, 204, 200];
            if is_served && given_up.is_none() {
                Ok(())
            } else {
                Err(format!("{statuses:?}, answered during the stall: {given_up:?}"))
            }
        })
        .await;
    }
}
