//! Repeated requests, and clients that leave. If an answer is lost, the client needs only a
//! repetition. If a waiting client leaves, no lock stays behind for it.

use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::support::client::{Answer, Lease, assert_left, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, masters};
use crate::support::metrics::Samples;
use crate::support::nodes::{clean_for_good, stored_on};
use crate::support::waiters::{HOUR_MS, patient, patient_over};

const KEY: &str = "order-4711/attempt";
/// Repetitions of a test that explores moments.
const MOMENTS: u64 = 200;

async fn keyed(gateway: &Gateway, name: &str, key: &str, ttl_ms: u64) -> Answer {
    let call = gateway.call(Method::POST, lock_path(name)).header("idempotency-key", key);
    call.json(&json!({ "ttl_ms": ttl_ms, "owner": "host-7" })).send().await
}

fn left(status: &Value) -> u64 {
    status["expires_in_ms"].as_u64().unwrap()
}

/// Sends the same request to each gateway in turn. Each answer has the same grant, with a full TTL.
async fn repeated(gateways: &[&Gateway]) {
    let mut leases: Vec<Lease> = Vec::new();
    for (n, gateway) in gateways.iter().enumerate() {
        let ttl_ms = 600_000 * (n as u64 + 1);
        let sent = Instant::now();
        let answer = keyed(gateway, "job", KEY, ttl_ms).await;
        let lease = Lease::from(&answer);
        if let Some(before) = leases.last() {
            assert_eq!((&lease.token, lease.fencing), (&before.token, before.fencing));
        }
        assert_eq!(answer.headers.contains_key("idempotency-replayed"), n > 0);
        // The repetition gets its full TTL.
        assert_left(left(&gateway.inspect("job").await), ttl_ms, sent);
        leases.push(lease);
    }
    let first = &leases[0];
    let last = leases.last().unwrap();
    let one = gateways[0];
    let other = gateways[gateways.len() - 1];

    let refused =
        keyed(one, "job", "order-4711/another-attempt", 60_000).await.problem(409, "lock_held");
    assert_eq!(refused["holder"], "host-7");
    one.post("job", json!({})).await.problem(409, "lock_held");
    let elsewhere = Lease::from(&keyed(one, "another-job", KEY, 60_000).await);
    assert_ne!(
        elsewhere.owner(),
        first.owner(),
        "one key for two locks must not give them one secret"
    );

    // No repetition has made the first answer's token invalid.
    assert_eq!(one.patch("job", &first.token, 60_000).await.status, 200);
    assert_eq!(other.inspect("job").await["fencing_token"], last.fencing);
    assert_eq!(one.delete("job", &last.token).await.status, 204);
    assert_eq!(other.inspect("job").await["state"], "free");
    let again = Lease::from(&keyed(other, "job", KEY, 60_000).await);
    assert!(again.fencing > last.fencing);
}

#[tokio::test]
async fn a_repeated_request_gets_its_lock_again_on_embedded_nodes() {
    let gateway = patient(Launch::embedded()).start().await;
    repeated(&[&gateway, &gateway, &gateway]).await;
}

#[tokio::test]
async fn a_repeated_request_gets_its_lock_again_from_any_gateway() {
    let servers = masters(5);
    let one = patient_over(&servers).ready().await;
    let two = patient_over(&servers).ready().await;
    repeated(&[&one, &two, &one]).await;
}

#[tokio::test]
async fn clusters_derive_different_secrets_from_one_key() {
    let one = Launch::embedded().flag("--cluster", "one");
    let two = Launch::embedded().flag("--cluster", "two");
    let one = one.start().await;
    let two = two.start().await;
    let leases = [keyed(&one, "job", KEY, 60_000).await, keyed(&two, "job", KEY, 60_000).await];
    assert_ne!(Lease::from(&leases[0]).owner(), Lease::from(&leases[1]).owner());
}

#[tokio::test]
async fn a_client_that_leaves_during_an_acquire_leaves_no_lock() {
    let servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    let before = gateway.used_before("job").await;
    servers[2..].iter().for_each(RedisServer::stop);
    let mut client = gateway.raw().await;
    let body = json!({ "ttl_ms": HOUR_MS }).to_string();
    client.announce("POST", "job", "", body.len()).await;
    client.write(body).await;
    let reachable = |at| at < 2;
    eventually("the acquire is in flight", async || {
        (stored_on(&servers, "job", reachable).len() == 2).then_some(())
    })
    .await;
    drop(client);
    eventually("the gateway has seen that the client is gone", async || {
        let samples = Samples::of(&gateway).await;
        samples
            .is(
                "redlock_operations_total",
                &[("operation", "acquire"), ("outcome", "cancelled")],
                1.0,
            )
            .then_some(())
    })
    .await;
    servers[2..].iter().for_each(RedisServer::cont);
    clean_for_good(&servers, "job", before + 1).await;
    eventually("the lock is free", async || {
        (gateway.inspect("job").await["state"] == "free").then_some(())
    })
    .await;
    gateway.acquire("job").await;
}

#[tokio::test]
async fn clients_leaving_at_any_moment_hold_nothing_beyond_the_ttl() {
    let servers = masters(3);
    let gateway = Launch::over(&servers).ready().await;
    let acquires = async || -> f64 {
        let samples = Samples::of(&gateway).await;
        let of = |outcome| {
            samples
                .get("redlock_operations_total", &[("operation", "acquire"), ("outcome", outcome)])
        };
        ["granted", "cancelled"].map(of).into_iter().sum()
    };
    // On a busy machine, most clients may have left before the gateway reads their requests. Then
    // others follow, which leave later.
    for n in 0.. {
        if n >= MOMENTS && acquires().await > 100.0 {
            break;
        }
        assert!(n < 4 * MOMENTS, "only {} requests reached an attempt", acquires().await);
        let mut client = TcpStream::connect(gateway.address()).await.unwrap();
        let head = format!(
            "POST /locks/gone-{n} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        );
        let body = r#"{"ttl_ms":1500}"#;
        client
            .write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes())
            .await
            .unwrap();
        // At the end of the delay the gateway may be anywhere between reading the request and
        // writing the answer.
        tokio::time::sleep(Duration::from_micros(n * 20 * (n / MOMENTS * 10).max(1))).await;
    }
    eventually("no lock is held", async || {
        let page = gateway.get("/locks?prefix=gone-&limit=1000").await.json();
        page["locks"].as_array()?.is_empty().then_some(())
    })
    .await;
}
