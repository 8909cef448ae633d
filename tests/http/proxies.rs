//! Clients behind a trusted proxy. Each of them has its own limits, lines for refusals, and audit
//! records.

use http::Method;
use serde_json::{Value, json};

use super::keys::{HOLDER, file, key, with_keys};
use crate::support::client::Call;
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::eventually;
use crate::support::waiters::{HOUR_MS, long_waiting_acquire, patient, start_waiting};

const ONE: &str = "203.0.113.1";
const OTHER: &str = "203.0.113.2";

async fn with_one_waiter_per_client(trusted: &str) -> Gateway {
    let launch = patient(Launch::embedded()).flag("--trusted-proxy", trusted);
    let gateway = launch.flag("--max-waiters-per-client", "1").start().await;
    gateway.acquire_for("job", HOUR_MS).await;
    gateway
}

fn waits_for(gateway: &Gateway, header: &str, value: &str) -> Call {
    long_waiting_acquire(gateway, "job").header(header, value)
}

#[tokio::test]
async fn clients_behind_a_trusted_proxy_have_separate_limits() {
    let gateway = with_one_waiter_per_client("127.0.0.0/8").await;
    let _one = start_waiting(&gateway, waits_for(&gateway, "x-forwarded-for", ONE)).await;
    for (header, value) in [
        ("x-forwarded-for", "203.0.113.1"),
        ("x-forwarded-for", "203.0.113.2, ::ffff:203.0.113.1, 127.0.0.9"),
        ("forwarded", "for=203.0.113.2, for=\"203.0.113.1:4711\""),
    ] {
        waits_for(&gateway, header, value).send().await.problem(429, "too_many_waiters");
    }
    let _other = start_waiting(&gateway, waits_for(&gateway, "forwarded", "for=203.0.113.2")).await;
    waits_for(&gateway, "x-forwarded-for", OTHER).send().await.problem(429, "too_many_waiters");
    // If the header has no usable address, the proxy itself counts as the client.
    let _proxy = start_waiting(&gateway, waits_for(&gateway, "x-forwarded-for", "unknown")).await;
    long_waiting_acquire(&gateway, "job").send().await.problem(429, "too_many_waiters");
}

#[tokio::test]
async fn a_client_that_is_not_a_trusted_proxy_forges_no_address() {
    let gateway = with_one_waiter_per_client("10.0.0.0/8").await;
    let _one = start_waiting(&gateway, waits_for(&gateway, "x-forwarded-for", ONE)).await;
    for (header, value) in [
        ("x-forwarded-for", OTHER),
        ("forwarded", "for=203.0.113.2"),
        ("x-forwarded-for", "10.0.0.1"),
    ] {
        waits_for(&gateway, header, value).send().await.problem(429, "too_many_waiters");
    }
}

#[tokio::test]
async fn log_and_audit_show_the_address_of_the_client() {
    let log = Scratch::new("audit.jsonl", "");
    let known = key("known", HOLDER, "*").await;
    let keys = file(&[&known]);
    let launch =
        with_keys(&keys).flag("--audit-log", log.path()).flag("--trusted-proxy", "127.0.0.1");
    let gateway = launch.env("RUST_LOG", "info").start().await;
    let from = |client: &str| {
        known.call(&gateway, Method::POST, "/locks/job").header("x-forwarded-for", client)
    };
    assert_eq!(from("203.0.113.1:4711").json(&json!({})).send().await.status, 201);
    // The first refusal of each client gets its own line in the log.
    for client in [ONE, OTHER] {
        let stranger = gateway.call(Method::POST, "/locks/job").header("x-forwarded-for", client);
        stranger.send().await.problem(401, "unauthenticated");
    }
    let audited = |text: &str, outcome: &str, address: &str| {
        text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).any(|line| {
            let proxy = line["proxy"].as_str().unwrap_or_default();
            line["outcome"] == outcome
                && line["address"] == address
                && proxy.starts_with("127.0.0.1:")
        })
    };
    let lines =
        [("done", "203.0.113.1:4711"), ("unauthenticated", ONE), ("unauthenticated", OTHER)];
    eventually("all changes are recorded", async || {
        let text = std::fs::read_to_string(log.path()).expect("the address is listed");
        lines.iter().all(|(outcome, address)| audited(&text, outcome, address)).then_some(())
    })
    .await;
    eventually("each refusal is logged", async || {
        let log = gateway.stdout();
        let refused = |client: &&str| {
            log.lines().any(|line| {
                line.contains("request refused")
                    && line.contains(&format!("\"address\":\"{client}\""))
            })
        };
        [ONE, OTHER].iter().all(refused).then_some(())
    })
    .await;
}
