//! Masters that stand still for a moment, as with a disk that is slow to write. The node time-out is
//! the default one.

use std::time::{Duration, Instant};

use http::Method;
use serde_json::json;
use tokio::task::JoinHandle;

use crate::support::client::lock_path;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, masters};

const KEY: &str = "order-4711/attempt";

async fn over(servers: &[RedisServer]) -> Gateway {
    Launch::over(servers).flag("--node-timeout", "50ms").ready().await
}

/// Requests of many kinds are on their way while the masters stand still.
#[tokio::test]
async fn a_short_stall_of_all_masters_fails_no_request() {
    let servers = masters(3);
    let gateway = over(&servers).await;
    let held = gateway.acquire("held").await;
    let done = gateway.acquire("done").await;
    let kept = gateway.call(Method::POST, lock_path("kept")).header("idempotency-key", KEY);
    assert_eq!(kept.json(&json!({ "ttl_ms": 60_000 })).send().await.status, 201);
    servers.iter().for_each(RedisServer::stop);
    let token = ("lock-token", held.token.as_str());
    let body = json!({ "ttl_ms": 60_000 });
    let requests = [
        gateway.call(Method::POST, lock_path("new")).json(&body).send(),
        gateway.call(Method::POST, lock_path("pool")).json(&json!({ "slots": 3 })).send(),
        gateway.call(Method::POST, "/locks").json(&json!({ "names": ["a", "b"] })).send(),
        gateway.call(Method::PATCH, lock_path("held")).header(token.0, token.1).json(&body).send(),
        gateway.call(Method::DELETE, lock_path("done")).header(token.0, &done.token).send(),
        gateway.call(Method::DELETE, lock_path("kept")).header("idempotency-key", KEY).send(),
        gateway.call(Method::GET, lock_path("held")).send(),
    ];
    let requests = requests.map(tokio::spawn);
    // This is the stall.
    tokio::time::sleep(Duration::from_millis(150)).await;
    let given_up = requests.iter().position(JoinHandle::is_finished);
    assert_eq!(given_up, None, "this request gave up");
    servers.iter().for_each(RedisServer::cont);
    let mut statuses = Vec::new();
    for request in requests {
        statuses.push(request.await.unwrap().status);
    }
    assert_eq!(statuses, [201, 201, 201, 200, 204, 204, 200]);
}

/// The first request waits for a majority. Once the connections are closed, requests fail at once.
#[tokio::test]
async fn hung_majority_delays_only_the_first_requests() {
    let servers = masters(3);
    let gateway = over(&servers).await;
    servers[..2].iter().for_each(RedisServer::stop);
    let began = Instant::now();
    let problem = gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    assert!(began.elapsed() >= Duration::from_millis(790), "{problem:#}");
    eventually("the connections are closed", async || {
        let nodes = gateway.readyz().await.json()["nodes"].clone();
        let is_closed = |at: usize| nodes[at]["state"] == "connecting";
        (is_closed(0) && is_closed(1)).then_some(())
    })
    .await;
    let began = Instant::now();
    gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    assert!(began.elapsed() < Duration::from_millis(790), "{:?}", began.elapsed());
    servers[..2].iter().for_each(RedisServer::cont);
}
