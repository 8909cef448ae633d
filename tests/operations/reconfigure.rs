//! `redlock-gateway reconfigure` moves masters from one configuration to another. At no time do
//! gateways of both configurations get votes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

use http::Method;
use rustix::process::Signal;
use serde_json::json;

use crate::operations::config::{assert_not_done, assert_refused, assert_refused_after_output};
use crate::support::client::{Answer, Call, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch, is_late};
use crate::support::harness::{PATIENCE, RedisOptions, RedisServer, eventually, masters};
use crate::support::nodes::stored_on;
use crate::support::resp::Resp;
use crate::support::waiters::HOUR_MS;

fn marker(server: &RedisServer) -> String {
    server.cmd(&["GET", "{lock:}:marker"]).text()
}

fn markers(servers: &[RedisServer]) -> Vec<String> {
    servers.iter().map(marker).collect()
}

/// Settings with short times. The node timeout is the longest one that every clock skew allows, so
/// that a busy master does not count as unreachable.
fn times(launch: Launch, max_ttl: &str) -> Launch {
    let launch = launch.flag("--max-ttl", max_ttl).flag("--default-ttl", "500ms");
    launch.flag("--clock-skew", "100ms").flag("--node-timeout", "5s")
}

async fn refused_everywhere(gateway: &Gateway) {
    eventually("every node refuses the gateway", async || {
        let health = gateway.readyz().await.json();
        let nodes = health["nodes"].as_array().unwrap().clone();
        let refused = |node: &serde_json::Value| {
            node["state"] == "refused"
                && node["advice"].as_str().is_some_and(|cure| cure.contains("reconfigure"))
        };
        nodes.iter().all(refused).then_some(())
    })
    .await;
}

#[tokio::test]
async fn reconfigure_moves_the_masters_to_another_configuration() {
    let durable = || RedisOptions { append_only: true, ..RedisOptions::default() };
    let mut servers: Vec<_> = (0..3).map(|_| RedisServer::start_with(durable())).collect();
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let times = |launch: Launch, max_ttl: &str| {
        let skew = if max_ttl == "2s" { "250ms" } else { "200ms" };
        let launch = launch.flag("--max-ttl", max_ttl).flag("--default-ttl", "1s");
        launch.flag("--clock-skew", skew).flag("--node-timeout", "5s")
    };
    let old = times(Launch::over(&servers), "1500ms").ready().await;
    old.acquire_soon("job", json!({ "ttl_ms": 1500 })).await;
    let before = markers(&servers);

    // A gateway with another configuration is refused until an operator has moved the masters.
    let early = times(Launch::over(&servers), "2s").start().await;
    refused_everywhere(&early).await;
    early.post("job", json!({})).await.problem(503, "quorum_unavailable");
    let reconfigure = |words: &[&str]| times(Launch::bare(words).nodes(&urls), "2s").finish();
    let asked = reconfigure(&["reconfigure"]).await;
    assert_eq!(asked.code, Some(0), "{asked:?}");
    for word in [
        "nothing was changed",
        "--yes",
        "5s 250ms",
        "stays; max_ttl 1s 500ms → 2s, clock_skew 200ms → 250ms",
        "nobody gets or extends a lock",
    ] {
        assert!(asked.stdout.contains(word), "no {word:?} in\n{}", asked.stdout);
    }
    assert_eq!(markers(&servers), before);

    servers[2].kill();
    let incomplete = reconfigure(&["reconfigure", "--yes"]).await;
    assert_refused_after_output(
        &incomplete,
        &[&format!("127.0.0.1:{}", servers[2].port()), "all nodes must answer"],
    );
    assert_eq!(markers(&servers[..2]), before[..2]);
    servers[2].restart();
    // Before its nodes are admitted, the old gateway may still change a marker.
    old.all_nodes_admitted().await;

    let since = Instant::now();
    let done = reconfigure(&["reconfigure", "--yes"]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(
        since.elapsed().as_millis() >= 2_200,
        "locks of the old configuration may still have lived"
    );
    assert!(done.stdout.contains("done: 3 nodes carry the new marker"), "{done:?}");
    for (old_marker, new_marker) in before.iter().zip(markers(&servers)) {
        assert_ne!(*old_marker, new_marker);
        assert!(new_marker.contains(":2000:"), "{new_marker}");
    }
    early.all_nodes_admitted().await;
    // No gateway refuses its longest TTL because rounds are slow.
    let another = old.post("another", json!({ "ttl_ms": 1_500 })).await;
    let problem = another.problem(503, "quorum_unavailable");
    let states: Vec<_> = problem["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["state"].as_str().unwrap())
        .collect();
    let refused = states.iter().any(|state| ["quarantined", "refused"].contains(state));
    assert!(refused && !states.contains(&"agreed"), "{problem:#}");
    refused_everywhere(&old).await;
    eventually("a lock is granted, stored and released before it ends", async || {
        let lease = early.acquire_soon("job", json!({ "ttl_ms": 2_000 })).await;
        let is_stored = !stored_on(&servers, "job", |_| true).is_empty();
        let released = early.delete("job", &lease.token).await;
        (is_stored && released.status == 204).then_some(())
    })
    .await;

    let embedded = Launch::bare(&["reconfigure", "--yes"]).finish().await;
    assert_not_done("embedded", &embedded, &["--node", "no markers"]);
}

/// With the larger clock skew, tokens are accepted and rounds are counted for longer than with the
/// smaller one.
#[tokio::test]
async fn gateways_with_another_clock_skew_get_no_votes() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let with = |launch: Launch, skew: &str| times(launch, "500ms").flag("--clock-skew", skew);
    let first = with(Launch::over(&servers), "1500ms").ready().await;
    let second = with(Launch::over(&servers), "500ms").start().await;
    refused_everywhere(&second).await;
    second.post("job", json!({})).await.problem(503, "quorum_unavailable");
    let why =
        second.readyz().await.json()["nodes"][0]["detail"].as_str().expect("a reason").to_owned();
    assert!(why.contains("clock_skew 1500 ms") && why.contains("clock_skew 500 ms"), "{why}");
    let checked = with(Launch::bare(&["check"]).nodes(&urls), "500ms").finish().await;
    assert!(
        checked.code == Some(1) && checked.stdout.contains("clock_skew 1500 ms"),
        "{checked:?}"
    );
    first.acquire_soon("job", json!({})).await;

    let reconfigure = |words: &[&str]| with(Launch::bare(words).nodes(&urls), "500ms").finish();
    let asked = reconfigure(&["reconfigure"]).await;
    // The wait is 6 s: two times the larger of both clock skews (1.5 s), plus 3 s for names that
    // move.
    for word in ["stays; clock_skew 1s 500ms → 500ms", "no votes for 6s,"] {
        assert!(asked.stdout.contains(word), "no {word:?} in\n{}", asked.stdout);
    }
    let since = Instant::now();
    let done = reconfigure(&["reconfigure", "--yes"]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(
        since.elapsed().as_millis() >= 6_000,
        "a token of the old configuration may still have counted"
    );
    second.all_nodes_admitted().await;
    second.acquire_soon("job", json!({})).await;
    refused_everywhere(&first).await;
}

/// The marker has the form of an earlier version, which did not name the clock skew.
#[tokio::test]
async fn an_older_versions_marker_needs_its_clock_skew_stated() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    drop(times(Launch::over(&servers), "500ms").ready().await);
    for server in &servers {
        let older = marker(server).replacen("v2:", "v1:", 1).replacen(":500:100:", ":500:", 1);
        server.cmd(&["SET", "{lock:}:marker", &older]);
    }
    let before = markers(&servers);
    let gateway = times(Launch::over(&servers), "500ms").start().await;
    refused_everywhere(&gateway).await;
    let reconfigure = |words: &[&str]| {
        let launch = Launch::bare(&["reconfigure"]).nodes(&urls);
        times(words.iter().fold(launch, |launch, word| launch.argument(word)), "500ms").finish()
    };
    let without_old_skew = reconfigure(&["--yes"]).await;
    assert_refused_after_output(&without_old_skew, &["--old-clock-skew", "older versions"]);
    let asked = reconfigure(&["--old-clock-skew", "2s"]).await;
    assert!(asked.code == Some(0) && asked.stdout.contains("no votes for 7s,"), "{asked:?}");
    assert_eq!(markers(&servers), before);
    let done = reconfigure(&["--yes", "--old-clock-skew", "100ms"]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    gateway.all_nodes_admitted().await;
    assert!(markers(&servers).iter().all(|marker| marker.contains(":500:100:")));
}

#[tokio::test]
async fn a_repeated_reconfigure_waits_as_long_as_the_first() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    drop(times(Launch::over(&servers), "3s").ready().await);
    // The process is killed as soon as the markers show that its waiting has begun.
    let first = times(Launch::bare(&["reconfigure", "--yes"]).nodes(&urls), "500ms").spawn_only();
    eventually("all votes are stopped", async || {
        markers(&servers).iter().all(|marker| marker.starts_with("v2:leaving-")).then_some(())
    })
    .await;
    drop(first);

    let refused = times(Launch::over(&servers), "500ms").start().await;
    refused_everywhere(&refused).await;
    let since = Instant::now();
    let second =
        times(Launch::bare(&["reconfigure", "--yes"]).nodes(&urls), "500ms").finish().await;
    assert_eq!(second.code, Some(0), "{second:?}");
    assert!(since.elapsed().as_millis() >= 3_100, "locks of 3 s may still have lived: {second:?}");
    refused.all_nodes_admitted().await;
}

#[tokio::test]
async fn reconfigure_to_other_nodes_stops_those_that_leave() {
    let mut servers = masters(5);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let times = |launch: Launch| times(launch, "500ms");
    let old = times(Launch::over(&servers[..3])).ready().await;
    let reconfigure = |old: &[String]| {
        let mut launch = Launch::bare(&["reconfigure", "--yes"]).nodes(&urls[2..]);
        for url in old {
            launch = launch.more("--old-node", url);
        }
        times(launch).finish()
    };
    for (what, given) in [("none", &urls[..0]), ("not all", &urls[..2]), ("others", &urls[2..])] {
        let refused = reconfigure(given).await;
        assert_refused_after_output(&refused, &["--old-node", "name every node"]);
        println!("{what}: nothing was changed");
        old.acquire_soon("job", json!({ "ttl_ms": 500 })).await;
        eventually("the lock expires", async || {
            (old.inspect("job").await["state"] == "free").then_some(())
        })
        .await;
    }
    // One of the old nodes is lost for ever. That is why the operator replaces it.
    servers[0].kill();
    let done = reconfigure(&urls[..3]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    let names: Vec<String> =
        servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    let lists = format!("nodes: {} → {}\n", names[..3].join(","), names[2..].join(","));
    for line in [
        lists,
        format!("{}: leaves\n", names[1]),
        format!("{}: stays\n", names[2]),
        format!("{}: joins;", names[3]),
    ] {
        assert!(done.stdout.contains(&line), "no {line:?} in\n{}", done.stdout);
    }
    let new = times(Launch::over(&servers[2..])).ready().await;
    new.acquire_soon("job", json!({ "ttl_ms": 500 })).await;
    old.post("job", json!({ "ttl_ms": 500 })).await.problem(503, "quorum_unavailable");
    eventually("the old gateway is not ready", async || {
        (old.readyz().await.status == 503).then_some(())
    })
    .await;
}

/// Two lists of nodes have the same name. So their markers would be equal, and gateways with either
/// list would grant side by side.
#[tokio::test]
async fn other_nodes_need_another_cluster_name() {
    let servers = masters(4);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let times = |launch: Launch| times(launch, "500ms");
    let old = times(Launch::over(&servers[..3]).flag("--cluster", "c")).ready().await;
    let reconfigure = |words: &[&str]| {
        let mut launch = Launch::bare(&["reconfigure", "--yes"]).nodes(&urls[1..]);
        for url in &urls[..3] {
            launch = launch.more("--old-node", url);
        }
        for pair in words.chunks_exact(2) {
            launch = launch.flag(pair[0], pair[1]);
        }
        times(launch).finish()
    };
    let same = reconfigure(&["--cluster", "c"]).await;
    assert_not_done("the same name", &same, &["--cluster", "\"c\"", "another name"]);
    let unnamed = reconfigure(&["--cluster", "d"]).await;
    assert_refused_after_output(&unnamed, &["--old-cluster"]);
    old.acquire_soon("job", json!({ "ttl_ms": 500 })).await;
    let done = reconfigure(&["--cluster", "d", "--old-cluster", "c"]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    let new = times(Launch::over(&servers[1..]).flag("--cluster", "d")).ready().await;
    new.acquire_soon("job", json!({ "ttl_ms": 500 })).await;
    old.post("job", json!({ "ttl_ms": 500 })).await.problem(503, "quorum_unavailable");
}

#[tokio::test]
async fn reconfigure_refuses_one_master_under_two_names() {
    let server = RedisServer::start();
    let names = ["127.0.0.1", "localhost"].map(|host| format!("redis://{host}:{}", server.port()));
    let launch = Launch::bare(&["reconfigure", "--yes"]).nodes(&names);
    let refused = launch.flag("--node-timeout", "6s").finish().await;
    assert_refused_after_output(&refused, &["same Redis process"]);
    assert_eq!(server.cmd(&["GET", "{lock:}:marker"]), Resp::Nil);
}

/// Two operators run the command at the same time, and the second one is refused. A run was stopped
/// while it waited, and another run has taken the change over. When the first run continues, it
/// must change nothing.
#[tokio::test]
async fn a_run_that_sleeps_while_another_finishes_writes_nothing() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let reconfigure =
        |max_ttl: &str| times(Launch::bare(&["reconfigure", "--yes"]).nodes(&urls), max_ttl);
    drop(times(Launch::over(&servers), "2s").ready().await);
    let slow = reconfigure("500ms").spawn_only();
    eventually("all votes are stopped", async || {
        markers(&servers).iter().all(|marker| marker.starts_with("v2:leaving-")).then_some(())
    })
    .await;
    slow.signal(Signal::STOP);
    // A run with another target is refused. A run with the same target takes the change over.
    let other = reconfigure("700ms").finish().await;
    assert_refused_after_output(&other, &["another configuration is under way"]);
    let second = reconfigure("500ms").finish().await;
    assert_eq!(second.code, Some(0), "{second:?}");
    let new = times(Launch::over(&servers), "500ms").ready().await;
    let before = markers(&servers);
    slow.signal(Signal::CONT);
    let woken = slow.finish().await;
    assert_eq!(woken.code, Some(1), "{woken:?}");
    assert!(woken.stderr.contains("changed meanwhile"), "{woken:?}");
    assert_eq!(markers(&servers), before);
    new.acquire_soon("job", json!({ "ttl_ms": 500 })).await;
}

/// The new masters are all new, so they have no marker of the old configuration. The old masters
/// would continue to grant locks.
#[tokio::test]
async fn entirely_new_masters_need_the_old_ones_named_and_stop_them() {
    let servers = masters(6);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let old = times(Launch::over(&servers[..3]), "1500ms").ready().await;
    let reconfigure = |words: &[&str]| {
        let mut launch = Launch::bare(&["reconfigure", "--yes"]).nodes(&urls[3..]);
        for pair in words.chunks_exact(2) {
            launch = launch.more(pair[0], pair[1]);
        }
        times(launch, "500ms").finish()
    };
    let unnamed = reconfigure(&[]).await;
    assert_refused_after_output(&unnamed, &["--old-node", "--no-old-nodes"]);
    old.acquire_soon("job", json!({ "ttl_ms": 1500 })).await;
    let twice =
        reconfigure(&["--old-node", &urls[0], "--old-node", &urls[0], "--old-node", &urls[1]])
            .await;
    assert_refused_after_output(&twice, &["the same Redis process"]);

    let since = Instant::now();
    let named: Vec<&str> = urls[..3].iter().flat_map(|url| ["--old-node", url]).collect();
    let done = reconfigure(&named).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(since.elapsed().as_millis() >= 1_600, "a lock of 1.5 s may still have lived: {done:?}");
    old.post("job", json!({ "ttl_ms": 1_500 })).await.problem(503, "quorum_unavailable");
    let new = times(Launch::over(&servers[3..]), "500ms").ready().await;
    new.acquire_soon("job", json!({ "ttl_ms": 500 })).await;
}

#[tokio::test]
async fn the_first_masters_move_with_no_old_nodes() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let done =
        times(Launch::bare(&["reconfigure", "--yes", "--no-old-nodes"]).nodes(&urls), "500ms")
            .finish()
            .await;
    assert_eq!(done.code, Some(0), "{done:?}");
}

/// The old masters have lost everything, including their markers. So no marker shows the longest
/// TTL of the old locks.
#[tokio::test]
async fn without_a_marker_the_old_max_ttl_must_be_stated() {
    let servers = masters(6);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    drop(times(Launch::over(&servers[..3]), "2s").ready().await);
    let reconfigure = |words: &[&str]| {
        let named = |launch: Launch, url: &String| launch.more("--old-node", url);
        let launch = urls[..3].iter().fold(Launch::bare(&["reconfigure"]).nodes(&urls[3..]), named);
        times(words.iter().fold(launch, |launch, word| launch.argument(word)), "500ms")
    };
    servers[..2].iter().for_each(|server| drop(server.cmd(&["FLUSHALL"])));
    let planned = reconfigure(&[]).finish().await;
    assert!(
        planned.code == Some(0) && planned.stdout.contains("no votes for 5s 100ms"),
        "one marker is enough: {planned:?}"
    );
    servers[2].cmd(&["FLUSHALL"]);
    for yes in [&["--yes"][..], &[]] {
        let refused = reconfigure(yes).finish().await;
        assert_refused_after_output(
            &refused,
            &["--old-max-ttl", "no marker is left", "used until now"],
        );
    }
    let refused = reconfigure(&["--yes", "--old-max-ttl", "2s"]).finish().await;
    assert_refused_after_output(&refused, &["--old-clock-skew", "used until now"]);
    for no_time in ["soon", "5", "-1s", "1s 2", "0s", "500000y"] {
        let refused = reconfigure(&["--yes", &format!("--old-max-ttl={no_time}")]).finish().await;
        assert_refused(no_time, &refused, &["--old-max-ttl", "10ms to 24h"]);
    }
    for (old, wait) in [("2s", "5s 100ms"), ("700ms", "3s 800ms"), ("100ms", "3s 600ms")] {
        let asked =
            reconfigure(&["--old-max-ttl", old, "--old-clock-skew", "100ms"]).finish().await;
        assert_eq!(asked.code, Some(0), "{asked:?}");
        assert!(asked.stdout.contains(&format!("give no votes for {wait},")), "{old}: {asked:?}");
    }
    let untouched = |server: &RedisServer| server.cmd(&["DBSIZE"]).integer() == 0;
    assert!(servers.iter().all(untouched), "the run had nothing to change");

    // Once the operator has named this time, the markers contain it. So a repeated run need not be
    // given it again.
    let first =
        reconfigure(&["--yes", "--old-max-ttl", "2s", "--old-clock-skew", "100ms"]).spawn_only();
    eventually("all votes are stopped", async || {
        let left =
            |server: &RedisServer| !untouched(server) && marker(server).starts_with("v2:leaving-");
        servers.iter().all(left).then_some(())
    })
    .await;
    drop(first);
    let since = Instant::now();
    let done = reconfigure(&["--yes"]).finish().await;
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(since.elapsed().as_millis() >= 2_100, "locks of 2 s may still have lived: {done:?}");
    let new = times(Launch::over(&servers[3..]), "500ms").ready().await;
    new.acquire_soon("job", json!({ "ttl_ms": 500 })).await;
}

#[tokio::test]
async fn a_stated_old_max_ttl_never_shortens_the_wait() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    drop(times(Launch::over(&servers), "1s").ready().await);
    let before = markers(&servers);
    let reconfigure = |words: &[&str]| {
        let launch = Launch::bare(&["reconfigure"]).nodes(&urls);
        times(words.iter().fold(launch, |launch, word| launch.argument(word)), "500ms").finish()
    };
    let old: Vec<&str> = urls.iter().flat_map(|url| ["--old-node", url]).collect();
    for (stated, wait) in [("1500ms", "4s 600ms"), ("600ms", "4s 100ms")] {
        let asked = reconfigure(&[&old[..], &["--old-max-ttl", stated]].concat()).await;
        assert_eq!(asked.code, Some(0), "{asked:?}");
        assert!(
            asked.stdout.contains(&format!("give no votes for {wait},")),
            "{stated}: {asked:?}"
        );
    }
    let both = reconfigure(&["--yes", "--no-old-nodes", "--old-max-ttl", "1s"]).await;
    assert_refused(
        "no old nodes, but a TTL of old locks",
        &both,
        &["--no-old-nodes", "--old-max-ttl"],
    );
    assert_eq!(markers(&servers), before);

    let since = Instant::now();
    let done = reconfigure(&[&old[..], &["--yes", "--old-max-ttl", "1500ms"]].concat()).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(since.elapsed().as_millis() >= 1_600, "the stated maximum was 1.5 s: {done:?}");
    times(Launch::over(&servers), "500ms").ready().await;
}

/// The same masters are given as the old ones. They have lost everything, so no marker shows how
/// long old locks may live.
#[tokio::test]
async fn staying_masters_without_markers_need_the_old_max_ttl() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let old = times(Launch::over(&servers), "10s").ready().await;
    drop(old);
    servers.iter().for_each(|server| drop(server.cmd(&["FLUSHALL"])));
    let mut launch = Launch::bare(&["reconfigure", "--yes"]).nodes(&urls);
    for url in &urls {
        launch = launch.more("--old-node", url);
    }
    let done = times(launch, "500ms").finish().await;
    assert_refused_after_output(&done, &["--old-max-ttl"]);
    let unled = times(
        Launch::bare(&["reconfigure", "--yes", "--old-max-ttl", "10s"]).nodes(&urls),
        "500ms",
    )
    .finish()
    .await;
    assert_refused("of which nodes", &unled, &["--old-node"]);
}

/// Sends a request until it is decided. On a busy machine, masters may not answer in time, and what
/// an undecided request has set stands in the way for a moment. Returns the answer, and whether it
/// is the first one.
async fn decided(call: Call) -> (Answer, bool) {
    let began = Instant::now();
    let mut is_first = true;
    loop {
        let answer = call.clone().send().await;
        let is_undecided = match answer.status {
            503 => is_late(503, &answer.json()),
            409 => !is_first,
            _ => false,
        };
        if !is_undecided {
            return (answer, is_first);
        }
        assert!(began.elapsed() < PATIENCE, "{answer:?}");
        is_first = false;
    }
}

/// An acquire or an extension of a lock, until it is decided.
async fn leased(gateway: &Gateway, name: &str, token: Option<&str>, ttl_ms: u64) -> Answer {
    let method = if token.is_some() { Method::PATCH } else { Method::POST };
    let call = gateway.call(method, lock_path(name)).json(&json!({ "ttl_ms": ttl_ms }));
    let call = token.into_iter().fold(call, |call, token| call.header("lock-token", token));
    decided(call).await.0
}

/// Acquires, extends and releases a lock. Fails with the first answer that is no success.
pub(super) async fn use_once(gateway: &Gateway, name: &str, ttl_ms: u64) -> Result<(), String> {
    let granted = leased(gateway, name, None, ttl_ms).await;
    if granted.status != 201 {
        return Err(format!("acquire: {granted:?}"));
    }
    let token = Lease::from(&granted).token;
    let extended = leased(gateway, name, Some(&token), ttl_ms).await;
    if extended.status != 200 {
        return Err(format!("extend: {extended:?}"));
    }
    let release = gateway.call(Method::DELETE, lock_path(name)).header("lock-token", &token);
    let (released, is_first) = decided(release).await;
    // The first request may have released the lock, although its answer came too late.
    let is_released = released.status == 204 || released.status == 404 && !is_first;
    if is_released { Ok(()) } else { Err(format!("release: {released:?}")) }
}

/// Clients that acquire, extend and release locks without a pause. Every answer other than a
/// success is a failure.
struct Load {
    gateways: Arc<RwLock<Vec<Arc<Gateway>>>>,
    failures: Arc<Mutex<Vec<String>>>,
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    clients: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(gateways: Vec<Gateway>) -> Self {
        let mut load = Self {
            gateways: Arc::new(RwLock::new(gateways.into_iter().map(Arc::new).collect())),
            failures: Arc::default(),
            rounds: Arc::default(),
            stop: Arc::default(),
            clients: Vec::new(),
        };
        for client in 0..6 {
            let (gateways, failures) = (load.gateways.clone(), load.failures.clone());
            let (rounds, stop) = (load.rounds.clone(), load.stop.clone());
            load.clients.push(tokio::spawn(async move {
                let name = format!("load-{client}");
                for turn in client.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let gateway = {
                        let gateways = gateways.read().unwrap();
                        gateways[turn % gateways.len()].clone()
                    };
                    let failed = use_once(&gateway, &name, HOUR_MS).await.err();
                    failures.lock().unwrap().extend(failed);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            }));
        }
        load
    }

    /// Replaces a gateway, as a rolling restart does: the new one serves before the old one
    /// ends.
    async fn replace(&self, at: usize, new: Gateway) {
        eventually("the new gateway serves", async || {
            (new.readyz().await.status == 200).then_some(())
        })
        .await;
        let old = std::mem::replace(&mut self.gateways.write().unwrap()[at], Arc::new(new));
        // A client that is between two requests would find the port closed.
        eventually("no client uses the old gateway", async || {
            (Arc::strong_count(&old) == 1).then_some(())
        })
        .await;
        let mut old = Arc::into_inner(old).expect("nobody else has it");
        old.signal(Signal::TERM);
        assert_eq!(old.ended().await, Some(0));
    }

    fn gateway(&self) -> Arc<Gateway> {
        self.gateways.read().unwrap()[0].clone()
    }

    /// Waits until clients have made some more rounds.
    async fn goes_on(&self) {
        let before = self.rounds.load(Ordering::Relaxed);
        eventually("clients go on", async || {
            (self.rounds.load(Ordering::Relaxed) > before + 30).then_some(())
        })
        .await;
        self.assert_none_failed();
    }

    async fn stop(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for client in std::mem::take(&mut self.clients) {
            client.await.expect("the client has ended");
        }
        self.assert_none_failed();
        println!("{} rounds of 3 requests, 0 failed", self.rounds.load(Ordering::Relaxed));
    }

    fn assert_none_failed(&self) {
        let failures = self.failures.lock().unwrap();
        assert!(failures.is_empty(), "{} failed, first {:?}", failures.len(), failures.first());
    }
}

/// The markers permit more, the gateways are restarted with more, and a master loses its data in
/// each phase. No request fails, and a long lock outlives the loss of a master that granted it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn raising_max_ttl_under_load_fails_no_request() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let with = |launch: Launch, max_ttl: &str| {
        // A master refuses a token that reaches it later than the clock skew, also on a busy
        // machine.
        let launch = launch.flag("--max-ttl", max_ttl).flag("--clock-skew", "2s");
        // A shutdown that waits for its grace would not end.
        launch.flag("--node-timeout", "6s").flag("--shutdown-grace", "1h")
    };
    let old = [
        with(Launch::over(&servers), "1h").ready().await,
        with(Launch::embedded().nodes(&urls), "1h").ready().await,
    ];
    // A gateway with the larger max_ttl gets no votes before the markers permit it.
    let early = with(Launch::embedded().nodes(&urls), "2h").start().await;
    refused_everywhere(&early).await;
    early.post("job", json!({})).await.problem(503, "quorum_unavailable");
    let reason = early.readyz().await.json()["nodes"][0]["detail"].to_string();
    assert!(reason.contains("max_ttl 3600000 ms"), "{reason}");
    let refused = old[0].post("job", json!({ "ttl_ms": 2 * HOUR_MS })).await;
    let detail = refused.problem(400, "invalid_ttl")["detail"].to_string();
    assert!(detail.contains("have the operator raise the limit"), "{detail}");

    let load = Load::start(old.into());
    load.goes_on().await;
    let reconfigure = |yes: &[&str]| {
        let launch = Launch::bare(&["reconfigure"]).nodes(&urls);
        with(yes.iter().fold(launch, |launch, yes| launch.argument(yes)), "2h").finish()
    };
    let before = markers(&servers);
    let asked = reconfigure(&[]).await;
    for word in ["stays; max_ttl 1h → 2h", "nothing was changed", "no request fails"] {
        assert!(asked.stdout.contains(word), "no {word:?} in\n{}", asked.stdout);
    }
    assert_eq!(markers(&servers), before);

    // The first loss comes just before the raise.
    servers[0].cmd(&["FLUSHALL"]);
    // A run that waits for the end of locks does not end during the test.
    let done = reconfigure(&["--yes"]).await;
    assert_eq!(done.code, Some(0), "{done:?}");
    for word in
        ["done: the markers of 3 nodes permit a max_ttl of 2h", "next: restart the gateways"]
    {
        assert!(done.stdout.contains(word), "no {word:?} in\n{}", done.stdout);
    }
    assert!(markers(&servers).iter().all(|marker| marker.contains(":7200000:")), "{done:?}");
    eventually("the early gateway gets votes", async || {
        (early.readyz().await.status == 200).then_some(())
    })
    .await;
    load.goes_on().await;
    load.gateway().all_nodes_caught_up().await;
    assert!(markers(&servers).iter().all(|marker| marker.contains(":7200000:")));

    // The second loss comes while the gateways are restarted. The lost vote was for a long lock.
    let long = Lease::from(&leased(&early, "long", None, 2 * HOUR_MS).await);
    servers[1].cmd(&["FLUSHALL"]);
    load.replace(0, with(Launch::embedded().nodes(&urls), "2h").start().await).await;
    load.goes_on().await;
    load.gateway().all_nodes_caught_up().await;
    assert_eq!(stored_on(&servers, "long", |_| true).len(), 3, "recovery gave the lock back");
    load.replace(1, with(Launch::embedded().nodes(&urls), "2h").start().await).await;
    load.goes_on().await;
    let extended = leased(&load.gateway(), "long", Some(&long.token), 2 * HOUR_MS).await;
    assert_eq!(extended.status, 200, "{extended:?}");
    load.stop().await;
}

/// A gateway keeps its shorter `max_ttl` and is restarted after the raise. A master loses its data
/// with a long lock. That gateway must not end the quarantine by its own `max_ttl`.
#[tokio::test]
async fn a_gateway_with_a_shorter_max_ttl_waits_by_the_marker() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    drop(times(Launch::over(&servers), "30s").ready().await);
    servers[0].cmd(&["FLUSHALL"]);
    let short = times(Launch::embedded().nodes(&urls), "500ms").start().await;
    // By its own `max_ttl` the gateway would wait 3.6 s. By the markers it waits 33.1 s.
    let seconds = |time: &serde_json::Value| -> Option<u64> {
        let clock = time.as_str()?.get(11..19)?;
        clock.split(':').try_fold(0, |sum, part| Some(sum * 60 + part.parse::<u64>().ok()?))
    };
    eventually("the quarantine lasts by the largest bound", async || {
        let node = short.readyz().await.json()["nodes"][0].clone();
        let day = 24 * 60 * 60;
        let wait = (seconds(&node["until"])? + day - seconds(&node["since"])?) % day;
        (node["state"] == "quarantined" && wait >= 32).then_some(())
    })
    .await;
    short.acquire_soon("job", json!({})).await;
}
