//! One of three masters in quarantine is no outage: readyz reports the quarantine and that the
//! gateway is ready. The other two masters grant, extend and release locks without the third vote.

use std::time::Instant;

use http::Method;
use serde_json::{Value, json};

use crate::support::client::Lease;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, masters};
use crate::support::nodes::stored_on;
use crate::support::waiters::{HOUR_MS, patient_over};

/// A gateway that recovers no master during the test: it begins that after three times the clock
/// skew.
fn without_recovery(servers: &[RedisServer]) -> Launch {
    patient_over(servers).flag("--clock-skew", "10m")
}

async fn node_of(gateway: &Gateway, server: &RedisServer) -> Value {
    let health = gateway.readyz().await.json();
    let nodes = health["nodes"].as_array().expect("readyz lists nodes");
    let name = format!("127.0.0.1:{}", server.port());
    nodes.iter().find(|node| node["node"] == name.as_str()).expect("the node is listed").clone()
}

#[tokio::test]
async fn one_of_three_masters_in_quarantine_is_not_needed() {
    let mut servers = masters(3);
    let gateway = without_recovery(&servers).ready().await;
    let held = gateway.acquire_for("held-before", HOUR_MS).await;
    eventually("every master stores the lock", async || {
        (stored_on(&servers, "held-before", |_| true).len() == 3).then_some(())
    })
    .await;
    servers[2].restart();
    let waits = eventually("the master is in quarantine", async || {
        Some(node_of(&gateway, &servers[2]).await).filter(|node| node["state"] == "quarantined")
    })
    .await;
    assert!(waits["until"].as_str() > waits["since"].as_str(), "{waits:#}");
    assert!(
        waits["detail"].as_str().is_some_and(|why| why.contains("all its data was lost")),
        "{waits:#}"
    );
    let ready = gateway.readyz().await;
    assert_eq!((ready.status, &ready.json()["status"]), (200, &json!("ready")));

    let asked = Instant::now();
    let granted = gateway.post("job", json!({ "ttl_ms": HOUR_MS })).await;
    let body = granted.json();
    assert_eq!(
        (granted.status, &body["nodes_granted"], &body["nodes_total"]),
        (201, &json!(2), &json!(3))
    );
    let problem = gateway.post("job", json!({})).await.problem(409, "lock_held");
    let left = problem["expires_in_ms"].as_u64().expect("a time");
    // Rounding, and the clock that a master reads once for each command, take up to 5 ms.
    let passed = asked.elapsed().as_millis() as u64 + 5;
    assert!(left <= HOUR_MS && left + passed >= HOUR_MS, "{left} after {passed} ms: {problem:#}");
    for (name, token) in
        [("job", body["token"].as_str().expect("a text")), ("held-before", held.token.as_str())]
    {
        let extended = gateway.patch(name, token, HOUR_MS).await;
        assert_eq!(
            (extended.status, &extended.json()["nodes_granted"]),
            (200, &json!(2)),
            "{extended:?}"
        );
        assert_eq!(
            stored_on(&servers, name, |_| true),
            [0, 1],
            "a quarantined master stores nothing"
        );
        assert_eq!(gateway.delete(name, token).await.status, 204);
    }

    // Only two masters vote. Without one of them, nothing can be granted.
    servers[1].kill();
    let problem = gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    let states: Vec<_> =
        problem["nodes"].as_array().expect("a list").iter().map(|node| &node["state"]).collect();
    assert!(states.contains(&&json!("quarantined")), "{problem:#}");
    eventually("the gateway is not ready", async || {
        (gateway.readyz().await.status == 503).then_some(())
    })
    .await;
}

/// One of three masters is in quarantine for minutes, and another hangs for a moment. Clients must
/// not be told to wait for minutes.
#[tokio::test]
async fn retry_after_is_short_for_a_master_that_is_just_away() {
    let mut servers = masters(3);
    // This timeout is short, because a master hangs.
    let gateway = without_recovery(&servers).flag("--node-timeout", "500ms").ready().await;
    servers[2].restart();
    eventually("the master is in quarantine", async || {
        (node_of(&gateway, &servers[2]).await["state"] == "quarantined").then_some(())
    })
    .await;
    servers[1].stop();
    eventually("the other master is missing", async || {
        (node_of(&gateway, &servers[1]).await["state"] == "connecting").then_some(())
    })
    .await;
    let problem = gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    servers[1].cont();
    eventually("locks are granted", async || {
        (gateway.post("job", json!({})).await.status == 201).then_some(())
    })
    .await;
    assert!(problem["retry_after_ms"].as_u64() <= Some(5_000), "{problem:#}");
}

/// Masters lose their data, and a `DELETE` comes before the gateway has noticed. Another master still
/// has the lock, and releases it.
#[tokio::test]
async fn a_master_that_lost_its_data_does_not_say_that_a_lock_is_lost() {
    let slots = json!({ "slots": 2, "take": 2 });
    // The masters that refuse the lock, and those that lose it.
    for (body, without, losing) in
        [(json!({}), 0..1, 1..2), (slots, 0..1, 1..2), (json!({}), 0..0, 1..3)]
    {
        let servers = masters(3);
        let gateway = without_recovery(&servers).ready().await;
        let (without, losing) = (&servers[without], &servers[losing]);
        without.iter().for_each(|server| drop(server.cmd(&["SET", "lock:bare", "x"])));
        let call = gateway.call(Method::POST, "/locks/bare").json(&body);
        let lease = Lease::from(&call.send().await);
        without.iter().for_each(|server| drop(server.cmd(&["DEL", "lock:bare"])));
        losing.iter().for_each(|server| drop(server.cmd(&["FLUSHALL"])));
        let released = gateway.delete("bare", &lease.token).await;
        assert_eq!(released.status, 204, "{released:?}");
    }
}
