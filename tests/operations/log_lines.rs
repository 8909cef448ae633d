//! What the log says about requests that fail: how often, and about whom. Also what it says while
//! no majority may vote.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};
use tokio::net::TcpSocket;

use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::client::lock_path;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{eventually, masters};
use crate::support::waiters::{HOUR_MS, patient, start_waiting, waiting_acquire};

/// The lines of the log that are warnings or errors and are about a request.
fn warnings(gateway: &Gateway) -> Vec<Value> {
    let log = gateway.stdout();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let is_loud = |line: &Value| line["level"] == "WARN" || line["level"] == "ERROR";
    lines.filter(|line| is_loud(line) && !line["request_id"].is_null()).collect()
}

/// A gateway whose masters have died.
async fn without_quorum(flags: &[&str]) -> Gateway {
    let mut servers = masters(3);
    let launch = Launch::over(&servers).flag("--node-timeout", "6s").env("RUST_LOG", "info");
    let launch = flags.iter().fold(launch, |launch, flag| launch.argument(flag));
    let gateway = launch.ready().await;
    servers.iter_mut().for_each(|server| server.kill());
    eventually("the loss is noticed", async || {
        gateway.stdout().contains("QUORUM LOST").then_some(())
    })
    .await;
    gateway
}

#[tokio::test]
async fn a_lost_quorum_gives_one_warning_a_minute() {
    let gateway = without_quorum(&[]).await;
    // Longer than a second, and much shorter than a minute.
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(3) {
        let answer = gateway.post("secret-project", json!({})).await;
        answer.problem(503, "quorum_unavailable");
        assert_eq!(gateway.readyz().await.status, 503);
    }
    // The line about a denied request comes after those about all requests before it.
    gateway.post("not%20a%20name", json!({})).await.problem(400, "invalid_name");
    eventually("all requests are logged", async || {
        gateway.stdout().contains("invalid_name").then_some(())
    })
    .await;
    let warnings = warnings(&gateway);
    let minutes = 1 + began.elapsed().as_secs() as usize / 60;
    assert!((1..=minutes).contains(&warnings.len()), "in {minutes} minutes: {warnings:#?}");
    assert!(warnings.iter().all(|it| it["code"] == "quorum_unavailable"), "{warnings:#?}");
    let log = gateway.stdout();
    assert_eq!(log.matches("QUORUM LOST").count(), 1, "{log}");
    assert!(log.contains("\"runbook\":\"/docs/symptoms#quorum-lost\""), "{log}");
    assert!(!log.contains("secret-project"), "the lock's name is in the log");
}

/// Nobody listens at the masters' addresses. So it is in a new cluster until its masters have
/// started.
#[tokio::test]
async fn a_slow_first_start_names_the_masters_and_is_no_error() {
    // A socket that is bound and does not listen keeps its port from others.
    let sockets = [(); 3].map(|()| TcpSocket::new_v4().expect("a socket"));
    let addresses = sockets.each_ref().map(|socket| {
        socket.bind((Ipv4Addr::LOCALHOST, 0).into()).expect("a free port");
        socket.local_addr().expect("an address").to_string()
    });
    let urls = addresses.each_ref().map(|address| format!("redis://{address}"));
    let gateway = Launch::embedded().nodes(&urls).env("RUST_LOG", "info").start().await;
    let is_waiting = |line: &Value| {
        line["message"].as_str().is_some_and(|text| text.starts_with("waiting for the masters"))
    };
    let lines = eventually("the log says that the gateway waits", async || {
        let log = gateway.stdout();
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut lines: Vec<Value> = lines.collect();
        let at = lines.iter().position(is_waiting)?;
        lines.truncate(at + 1);
        Some(lines)
    })
    .await;
    let (waiting, before) = lines.split_last().expect("the line was found");
    assert_eq!(waiting["level"], "INFO");
    let expected = addresses.each_ref().map(|address| format!("{address} (connecting)")).join(", ");
    assert_eq!(waiting["waiting_for"], expected);
    // A wrong address or password shows in these lines, which do not wait.
    for address in &addresses {
        let is_told =
            |line: &Value| line["message"] == "node cannot vote" && line["node"] == *address;
        assert!(before.iter().any(is_told), "{address}: {before:#?}");
    }
    assert!(before.iter().all(|line| line["level"] != "ERROR"), "{before:#?}");
}

#[tokio::test]
async fn warnings_name_the_lock_if_the_operator_allows_it() {
    let gateway = without_quorum(&["--log-lock-names"]).await;
    gateway.post("reports/eu", json!({})).await.problem(503, "quorum_unavailable");
    let warning = eventually("the failure is logged", async || warnings(&gateway).pop()).await;
    assert_eq!(warning["lock"], "reports/eu");
}

#[tokio::test]
async fn a_refusal_names_the_client_and_the_flag() {
    let known = key("ci", HOLDER, "*").await;
    let keys = file(&[&known]);
    let launch = with_keys(&keys).flag("--max-waiters-per-client", "1").env("RUST_LOG", "info");
    let gateway = patient(launch).flag("--public", "metrics").start().await;
    let acquire = known.call(&gateway, Method::POST, &lock_path("job"));
    assert_eq!(acquire.json(&json!({ "ttl_ms": HOUR_MS })).send().await.status, 201);
    let waits = || {
        let call = waiting_acquire(&gateway, "job", HOUR_MS);
        call.header("authorization", known.bearer())
    };
    let _waiter = start_waiting(&gateway, waits()).await;
    let by_key = waits().send().await.problem(429, "too_many_waiters");

    let open = Launch::embedded().flag("--max-waiters-per-client", "1").env("RUST_LOG", "info");
    let open = patient(open).start().await;
    open.acquire_for("job", HOUR_MS).await;
    let _other = start_waiting(&open, waiting_acquire(&open, "job", HOUR_MS)).await;
    let by_address = waiting_acquire(&open, "job", HOUR_MS).send().await;
    let by_address = by_address.problem(429, "too_many_waiters");

    for (gateway, problem, client) in
        [(&gateway, by_key, "the key \"ci\""), (&open, by_address, "the address 127.0.0.1")]
    {
        let detail = problem["detail"].as_str().expect("text");
        assert!(detail.contains("--max-waiters-per-client"), "{detail}");
        assert!(detail.ends_with(&format!("this client counts as {client}")), "{detail}");
        eventually("the log has the refusal with its client", async || {
            let log = gateway.stdout();
            let lines = log.lines().filter(|line| line.contains("request refused"));
            let mut lines = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
            lines.any(|line| line["detail"] == problem["detail"]).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_used_up_rate_names_the_key_and_its_setting() {
    let known = key("ci", HOLDER, "*").await;
    let keys = crate::support::gateway::Scratch::new(
        "keys.toml",
        &format!("{}rate = 1\nburst = 1\n", known.entry),
    );
    let gateway = with_keys(&keys).start().await;
    let refused = eventually("the rate is used up", async || {
        let answer = known.call(&gateway, Method::GET, "/locks/job").send().await;
        (answer.status == 429).then_some(answer)
    })
    .await;
    let problem = refused.problem(429, "rate_limited");
    let detail = problem["detail"].as_str().expect("text");
    assert!(detail.contains("`rate`") && detail.ends_with("the key \"ci\""), "{detail}");
}
