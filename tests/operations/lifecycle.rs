//! A gateway as a process: its banner, its shutdown with and without requests in flight, and its
//! behaviour above its limits.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::{Lease, Raw};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, free_port, masters};
use crate::support::metrics::Samples;
use crate::support::nodes::stored_on;

/// Sends a request without the second half of its body. Returns as soon as the gateway works on the
/// request.
async fn half_sent(gateway: &Gateway, method: &str, name: &str, headers: &str, body: &str) -> Raw {
    let mut raw = gateway.raw().await;
    // The server sends "100 Continue" only when it reads the body. From then on the request is in
    // progress.
    raw.announce(method, name, &format!("expect: 100-continue\r\n{headers}"), body.len()).await;
    raw.wait_for_continue().await;
    raw.write(&body[..body.len() / 2]).await;
    raw
}

async fn draining(gateway: &Gateway) {
    let drained = eventually("readyz says that it is draining", async || {
        Some(gateway.readyz().await).filter(|answer| answer.status == 503)
    })
    .await;
    assert_eq!(drained.json()["status"], "draining");
}

/// Programs that read a container's output get both of its streams.
#[tokio::test]
async fn the_output_is_only_json_with_log_format_json() {
    let launch = Launch::embedded().flag("--log-format", "json").env("RUST_LOG", "info");
    let gateway = launch.start().await;
    let output = eventually("the banner is complete", async || {
        Some(gateway.stdout()).filter(|text| text.contains("/docs") && text.ends_with('\n'))
    })
    .await;
    let lines: Vec<Value> =
        output.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let caution = lines.iter().find(|line| line["level"] == "WARN").expect("a caution");
    assert!(caution.to_string().contains("nothing is stored"), "{caution}");
    assert_eq!(gateway.stderr(), "");

    // Found before the log starts, and after it.
    let address = gateway.address().to_string();
    for (flags, code, word) in [
        (["--listen", "0.0.0.0:0"], 2, "--allow-anonymous"),
        (["--listen", address.as_str()], 1, address.as_str()),
    ] {
        let json = ["--embedded", "--log-format", "json"];
        let failed = Launch::bare(&[flags.as_slice(), &json].concat()).finish().await;
        assert_eq!(failed.code, Some(code), "{failed:?}");
        let error: Value = serde_json::from_str(&failed.stderr).unwrap();
        assert_eq!(error["level"], "ERROR", "{failed:?}");
        assert!(error["message"].as_str().unwrap().contains(word), "{failed:?}");
    }
}

#[tokio::test]
async fn the_banner_has_a_working_command_and_safety_warnings() {
    let (gateway, banner) = Launch::embedded().start_with_banner().await;
    for word in
        ["5 in-memory nodes", "CAUTION: nothing is stored", "no --auth-keys was given", "30s", "5m"]
    {
        assert!(banner.contains(word), "no {word:?} in\n{banner}");
    }
    let command =
        banner.lines().find_map(|line| line.trim().strip_prefix("try:")).expect("a command to try");
    let command = command.split("   ").next().unwrap().trim();
    assert!(
        command.starts_with("curl ") && command.contains(&gateway.address().to_string()),
        "{command}"
    );
    let tried = tokio::process::Command::new("bash")
        .args(["-c", command])
        .output()
        .await
        .expect("bash starts");
    let shown = String::from_utf8_lossy(&tried.stdout);
    assert!(shown.starts_with("HTTP/1.1 201 Created"), "{command} gives\n{shown}");

    let servers = [RedisServer::start(), RedisServer::start()];
    let urls = servers.each_ref().map(RedisServer::url);
    for (launch, brand_new) in
        [(Launch::embedded().nodes(&urls), false), (Launch::over(&servers), true)]
    {
        let launch = launch.flag("--max-ttl", "3m").flag("--clock-skew", "4s");
        let (_gateway, banner) = launch.start_with_banner().await;
        for word in ["votes after 3m 7s", "appendfsync always"] {
            assert!(banner.contains(word), "no {word:?} in\n{banner}");
        }
        assert!(
            servers.iter().all(|server| banner.contains(&format!("127.0.0.1:{}", server.port()))),
            "{banner}"
        );
        assert_eq!(
            banner.contains("--bootstrap"),
            brand_new,
            "the banner has advice that does not apply:\n{banner}"
        );
    }
}

async fn ends_in_order(signal: Signal) {
    // A shutdown that waits for this grace does not end during the test.
    let mut gateway = Launch::embedded().flag("--shutdown-grace", "1h").start().await;
    let held = gateway.acquire_for("held", 300_000).await;
    let other = gateway.acquire_for("other", 300_000).await;
    let token = format!("lock-token: {}\r\n", held.token);
    let body = json!({ "ttl_ms": 300_000 }).to_string();
    // A request whose body does not come keeps the gateway from ending, for 10 s at most.
    let patched = async || half_sent(&gateway, "PATCH", "held", &token, &body).await;
    let extended = async |mut patch: Raw| {
        patch.write(&body[body.len() / 2..]).await;
        let extended = patch.answer().await;
        assert_eq!(
            (extended.status, &extended.json()["token"]),
            (200, &json!(held.token)),
            "{extended:?}"
        );
    };
    let patch = patched().await;
    let mut post = half_sent(&gateway, "POST", "new", "", &body).await;

    gateway.signal(signal);
    draining(&gateway).await;
    let next = patched().await;
    extended(patch).await;
    // The request was sent before the signal, but its acquire has not begun. After the signal the
    // gateway begins no acquire.
    post.write(&body[body.len() / 2..]).await;
    post.answer().await.problem(503, "draining");
    draining(&gateway).await;

    let last = patched().await;
    extended(next).await;
    assert_eq!(gateway.get("/livez").await.status, 200);
    assert_eq!(
        gateway.post("another", json!({})).await.problem(503, "draining")["retry_after_ms"],
        1_000
    );
    // Clients that hold locks must still be able to extend and release them.
    assert_eq!(gateway.patch("other", &other.token, 300_000).await.status, 200);
    assert_eq!(gateway.delete("other", &other.token).await.status, 204);
    assert_eq!(gateway.inspect("held").await["state"], "held");
    extended(last).await;
    assert_eq!(gateway.ended().await, Some(0));
    let log = gateway.stdout();
    assert!(log.contains("shutting down") && log.contains("stopped"), "{log}");
}

#[tokio::test]
async fn readyz_fails_before_requests_are_refused_at_shutdown() {
    let gateway = Launch::embedded().flag("--drain-delay", "1h").start().await;
    let before = gateway.get("/livez").await;
    assert_eq!(before.header("connection"), "");
    gateway.signal(Signal::TERM);
    draining(&gateway).await;
    let lease = gateway.post("job", json!({})).await;
    assert_eq!((lease.status, lease.header("connection")), (201, "close"), "{lease:?}");
    assert_eq!(
        gateway.delete("job", &Lease::from(&lease).token).await.header("connection"),
        "close"
    );
    drop(gateway);

    let launch = Launch::embedded().flag("--drain-delay", "2s").flag("--shutdown-grace", "1h");
    let mut gateway = launch.start().await;
    let since = Instant::now();
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
    assert!(since.elapsed() >= Duration::from_secs(2), "{:?}", since.elapsed());
}

#[tokio::test]
async fn sigterm_finishes_requests_in_flight_and_begins_none() {
    ends_in_order(Signal::TERM).await;
}

#[tokio::test]
async fn sigint_acts_like_sigterm() {
    ends_in_order(Signal::INT).await;
}

#[tokio::test]
async fn an_acquire_in_flight_at_sigterm_is_answered() {
    let servers = masters(3);
    // The masters go on within this time. A shutdown that waits for its grace would not end.
    let launch = || {
        let launch = Launch::over(&servers).flag("--shutdown-grace", "1h");
        launch.flag("--clock-skew", "10s").flag("--node-timeout", "10s")
    };
    let mut gateway = launch().ready().await;
    servers[1..].iter().for_each(RedisServer::stop);
    let asked = gateway.call(Method::POST, "/locks/job").json(&json!({ "ttl_ms": 300_000 }));
    let asked = tokio::spawn(asked.send());
    eventually("the acquire is in flight", async || {
        (stored_on(&servers, "job", |at| at == 0) == [0]).then_some(())
    })
    .await;
    gateway.signal(Signal::TERM);
    draining(&gateway).await;
    servers[1..].iter().for_each(RedisServer::cont);
    let lease = Lease::from(&asked.await.expect("no panic"));
    assert_eq!(gateway.ended().await, Some(0));

    let next = launch().ready().await;
    assert_eq!(
        next.inspect("job").await["fencing_token"],
        lease.fencing,
        "the lock outlives the gateway"
    );
    assert_eq!(next.delete("job", &lease.token).await.status, 204);
}

#[tokio::test]
async fn idle_connections_do_not_delay_shutdown() {
    // A shutdown that waits for these connections does not end during the test.
    let launch = Launch::embedded().flag("--idle-timeout", "1h").flag("--shutdown-grace", "1h");
    let mut gateway = launch.start().await;
    let mut fresh = gateway.raw().await;
    let mut used = gateway.raw().await;
    used.write("GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert_eq!(used.answer().await.status, 200);
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
    assert_eq!((fresh.closed().await, used.closed().await), (String::new(), String::new()));
}

#[tokio::test]
async fn an_endless_request_does_not_outlive_the_grace() {
    let mut gateway = Launch::embedded().flag("--shutdown-grace", "300ms").start().await;
    let _endless = half_sent(&gateway, "POST", "job", "", "{\"ttl_ms\":60000}").await;
    let since = Instant::now();
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
    let took = since.elapsed();
    assert!(took >= Duration::from_millis(300), "{took:?}");
    // Otherwise the gateway would wait for the end of the request, and log no such line.
    assert!(
        gateway.stdout().contains("still in flight at the end of the grace period"),
        "{}",
        gateway.stdout()
    );
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let gateway = Launch::embedded().start().await;
    let address = gateway.address().to_string();
    let second = Launch::embedded().flag("--listen", &address).finish().await;
    assert_eq!(second.code, Some(1));
    assert!(
        second.stderr.contains("--listen") && second.stderr.contains(&address),
        "{}",
        second.stderr
    );
}

#[tokio::test]
async fn slow_heads_are_cut_off_and_slow_bodies_are_408() {
    let gateway = Launch::embedded().flag("--idle-timeout", "12s").start().await;
    let since = Instant::now();
    let mut body = half_sent(&gateway, "POST", "slow", "", "{\"ttl_ms\":60000}").await;
    let mut head = gateway.raw().await;
    head.write("POST /locks/slow HTTP/1.1\r\nhost: ").await;
    let answer = body.answer().await;
    let problem = answer.problem(408, "request_timeout");
    assert!(problem["detail"].as_str().unwrap().contains("10s"), "{problem:#}");
    assert!(since.elapsed() >= Duration::from_secs(10), "{:?}", since.elapsed());
    let cut_off = head.closed().await;
    assert!(!cut_off.contains(" 20"), "{cut_off}");
    assert!(since.elapsed() >= Duration::from_secs(12), "{:?}", since.elapsed());
    assert_eq!(gateway.inspect("slow").await["state"], "free");
}

/// Standard output and standard error are on a full disk. So nothing can be logged. Everything else
/// must go on.
#[tokio::test]
async fn a_log_that_cannot_be_written_stops_nothing() {
    let mut servers = masters(3);
    let port = free_port();
    let launch = Launch::over(&servers).flag("--listen", &format!("127.0.0.1:{port}"));
    let launch = launch.flag("--node-timeout", "6s");
    let full = std::fs::File::options().write(true).open("/dev/full").expect("Linux has /dev/full");
    let gateway = launch.serve_into(SocketAddr::from(([127, 0, 0, 1], port)), full).await;
    for n in 0..3 {
        // Each outage makes the workers log lines. Each server error makes its request log a line.
        servers.iter().for_each(|server| {
            drop(server.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]))
        });
        let name = format!("job-{n}");
        // `/readyz` may not show the outage yet.
        let lease = gateway.acquire_soon(&name, json!({})).await;
        assert_eq!(gateway.delete(&name, &lease.token).await.status, 204);
    }
    servers.iter_mut().for_each(RedisServer::kill);
    gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    eventually("the lines that were not written are counted", async || {
        let dropped = Samples::of(&gateway).await.get("redlock_log_lines_dropped_total", &[]);
        (dropped > 0.0).then_some(())
    })
    .await;
}
