//! Slots for requests in flight: no client can take the slots of others, and an incomplete request
//! takes none.

use http::Method;
use serde_json::json;

use crate::support::client::Answer;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually};
use crate::support::waiters::{HOUR_MS, patient, patient_over};

#[tokio::test]
async fn missing_bodies_take_no_slots() {
    let gateway = patient(Launch::embedded()).flag("--max-in-flight", "4").start().await;
    let held = gateway.acquire_for("held", HOUR_MS).await;
    let mut endless = Vec::new();
    for n in 0..40 {
        let mut raw = gateway.raw().await;
        let token = format!("expect: 100-continue\r\nlock-token: {}\r\n", held.token);
        let (method, headers) =
            if n % 2 == 0 { ("POST", "expect: 100-continue\r\n") } else { ("PATCH", &token[..]) };
        raw.announce(method, "held", headers, 10).await;
        // Now the gateway has read the head and waits for the body.
        raw.wait_for_continue().await;
        endless.push(raw);
    }
    assert_eq!(gateway.post("free", json!({})).await.status, 201);
    assert_eq!(gateway.patch("held", &held.token, 60_000).await.status, 200);
    assert_eq!(gateway.delete("held", &held.token).await.status, 204);
}

/// Sends four acquires at a time while the only master hangs, and an extension and other requests
/// beside them. Sorts the answers to the acquires by their codes.
async fn four_acquires(gateway: &Gateway, token: &str) -> [Answer; 4] {
    let post = |name| gateway.post(name, json!({}));
    let (a, b, c, d, extended, ()) = tokio::join!(
        post("a"),
        post("b"),
        post("c"),
        post("d"),
        gateway.patch("held", token, 60_000),
        async {
            for path in ["/livez", "/readyz", "/metrics", "/openapi.json"] {
                assert_eq!(gateway.call(Method::GET, path).send().await.status, 200, "{path}");
            }
        }
    );
    extended.problem(503, "outcome_unknown");
    let mut posted = [a, b, c, d];
    posted.sort_by_key(|answer| answer.json()["code"].to_string());
    posted
}

/// The only master answers nothing. So every request stays in flight for as long as the gateway
/// waits for that master. On a busy machine, that may be too short for four of them to meet. Then
/// the test sends them again.
#[tokio::test]
async fn beyond_its_share_a_client_gets_503_for_acquires_only() {
    let server = RedisServer::start();
    let launch = patient_over(std::slice::from_ref(&server)).flag("--max-in-flight", "8");
    let gateway = launch.flag("--node-timeout", "2s").ready().await;
    let held = gateway.acquire_soon("held", json!({ "ttl_ms": HOUR_MS })).await;
    let mut tries = 0..10;
    let posted = eventually("the four requests meet", async || {
        tries.next().expect("all four are let in again and again");
        gateway.all_nodes_admitted().await;
        server.stop();
        let posted = four_acquires(&gateway, &held.token).await;
        server.cont();
        (posted[0].json()["code"] == "overloaded").then_some(posted)
    })
    .await;
    // Two of the eight slots are for extensions and releases. A client may hold as many of the
    // other six as stay free, so three.
    posted[0].problem(503, "overloaded");
    assert_eq!(posted[0].header("retry-after"), "1");
    posted[1..].iter().for_each(|answer| drop(answer.problem(503, "quorum_unavailable")));
    eventually("there is a free slot again", async || {
        (gateway.post("third", json!({})).await.status == 201).then_some(())
    })
    .await;
}
