//! Slots for requests in flight: no client can take the slots of others, and an incomplete request
//! takes none.

use http::Method;
use serde_json::json;

use crate::support::gateway::Launch;
use crate::support::harness::{RedisServer, eventually};

#[tokio::test]
async fn missing_bodies_take_no_slots() {
    let gateway = Launch::embedded().flag("--max-in-flight", "4").start().await;
    let held = gateway.acquire("held").await;
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

/// The only master answers nothing. So every request stays in flight for as long as the gateway
/// waits for that master.
#[tokio::test]
async fn beyond_its_share_a_client_gets_503_for_acquires_only() {
    let server = RedisServer::start();
    let gateway =
        Launch::over(std::slice::from_ref(&server)).flag("--max-in-flight", "8").ready().await;
    let held = gateway.acquire("held").await;
    server.stop();
    let post = |name| gateway.post(name, json!({}));
    let (a, b, c, d, extended, ()) = tokio::join!(
        post("a"),
        post("b"),
        post("c"),
        post("d"),
        gateway.patch("held", &held.token, 60_000),
        async {
            for path in ["/livez", "/readyz", "/metrics", "/openapi.json"] {
                assert_eq!(gateway.call(Method::GET, path).send().await.status, 200, "{path}");
            }
        }
    );
    let mut posted = [a, b, c, d];
    // Two of the eight slots are for extensions and releases. A client may hold as many of the other
    // six as stay free, so three.
    posted.sort_by_key(|answer| answer.json()["code"].to_string());
    posted[0].problem(503, "overloaded");
    assert_eq!(posted[0].header("retry-after"), "1");
    posted[1..].iter().for_each(|answer| drop(answer.problem(503, "quorum_unavailable")));
    extended.problem(503, "outcome_unknown");
    server.cont();
    eventually("there is a free slot again", async || {
        (gateway.post("third", json!({})).await.status == 201).then_some(())
    })
    .await;
}
