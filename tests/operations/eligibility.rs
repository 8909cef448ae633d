//! Suspect masters as operators and clients see them: in readyz, the metrics, the log and `check`,
//! and in answers during that time. The masters vote again without anybody's help. Also locks whose
//! master's or gateway's clock jumps.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use http::Method;
use redlock_core::node::eligibility::NAME_MOVES_WITHIN;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::{Lease, lock_path};
use crate::support::cluster::NodeClock;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisOptions, RedisServer, eventually, masters};
use crate::support::metrics::Samples;
use crate::support::nodes::stored_on;

const MAX_TTL: Duration = Duration::from_secs(3);
const SKEW: Duration = Duration::from_secs(1);
/// The length of the quarantine: max_ttl + clock_skew, and the time until every gateway follows a
/// name that has moved.
const QUARANTINE: Duration = Duration::from_secs(7);
/// The quarantine of [`endless`]: a TTL of an hour, the default clock skew, and the time for names.
const ENDLESS: Duration = Duration::from_secs(3_600 + 2 + 3);

fn urls(servers: &[RedisServer]) -> Vec<String> {
    servers.iter().map(RedisServer::url).collect()
}

/// Adds settings with which a quarantine lasts seven seconds. The node timeout is the longest one
/// that the clock skew allows.
fn short(launch: Launch) -> Launch {
    let launch = launch.flag("--max-ttl", "3s").flag("--default-ttl", "2s");
    launch.flag("--clock-skew", "1s").flag("--node-timeout", "5s")
}

/// A gateway whose quarantines outlast the test.
fn endless(servers: &[RedisServer]) -> Launch {
    let launch = Launch::embedded().nodes(&urls(servers)).flag("--max-ttl", "1h");
    launch.flag("--node-timeout", "6s")
}

fn of(server: &RedisServer) -> String {
    format!("127.0.0.1:{}", server.port())
}

/// The entry of each node in readyz.
async fn states(gateway: &Gateway) -> BTreeMap<String, Value> {
    let health = gateway.readyz().await.json();
    let nodes = health["nodes"].as_array().expect("readyz lists nodes").clone();
    nodes
        .into_iter()
        .map(|node| (node["node"].as_str().expect("a name").to_owned(), node))
        .collect()
}

async fn until_state(gateway: &Gateway, server: &RedisServer, state: &str) -> Value {
    eventually(&format!("{server:?} is {state}"), async || {
        states(gateway).await.remove(&of(server)).filter(|node| node["state"] == state)
    })
    .await
}

fn text<'a>(node: &'a Value, field: &str) -> &'a str {
    node[field].as_str().unwrap_or_default()
}

/// The time of day of an RFC 3339 time, in seconds with milliseconds.
fn seconds(node: &Value, field: &str) -> f64 {
    let text = text(node, field);
    let clock = text
        .split_once('T')
        .and_then(|(_, clock)| clock.strip_suffix('Z'))
        .expect("RFC 3339 in UTC");
    clock.split(':').fold(0.0, |sum, part| sum * 60.0 + part.parse::<f64>().expect("a number"))
}

/// The line of the log that has this message about this node.
fn logged(gateway: &Gateway, message: &str, server: &RedisServer) -> Option<Value> {
    let lines = gateway.stdout();
    let mut lines = lines.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.find(|line| line["message"] == message && line["node"] == of(server))
}

fn options(args: &[&str]) -> RedisOptions {
    RedisOptions {
        args: args.iter().map(|arg| (*arg).to_owned()).collect(),
        ..RedisOptions::default()
    }
}

/// The answer of each node, as a refusal lists it.
fn answers(problem: &Value) -> BTreeMap<String, String> {
    let nodes = problem["nodes"].as_array().expect("a list");
    nodes
        .iter()
        .map(|node| (text(node, "node").to_owned(), text(node, "state").to_owned()))
        .collect()
}

/// Two of the three nodes decide, so the answer of the third may be missing.
#[track_caller]
fn refused_for_quarantine(problem: &Value) {
    let answers = answers(problem);
    let given: Vec<&String> = answers.values().filter(|answer| *answer != "pending").collect();
    assert!(given.len() >= 2 && given.iter().all(|answer| *answer == "quarantined"), "{problem:#}");
    assert!(problem["nodes"].to_string().contains("all its data was lost"), "{problem:#}");
}

/// Checks the length of a quarantine that began after `before`, and its end in readyz.
#[track_caller]
fn assert_length(node: &Value, before: SystemTime, quarantine: Duration) {
    const DAY: f64 = 86_400.0;
    let until = seconds(node, "until");
    let lasts = (until - seconds(node, "since") + DAY) % DAY;
    // The marker states when the quarantine began. That is the probe which noticed the loss, a
    // moment before the marker was written.
    assert!(lasts < quarantine.as_secs_f64() + 0.002, "{lasts} s in {node:#}");
    let before = before.duration_since(SystemTime::UNIX_EPOCH).expect("a time after 1970");
    let left = (until - before.as_secs_f64() % DAY + DAY) % DAY;
    // The wall clock may have been corrected by some milliseconds.
    assert!(left > quarantine.as_secs_f64() - 0.1, "{left} s after the loss: {node:#}");
}

#[tokio::test]
async fn a_total_loss_is_reported_with_the_end_of_its_quarantine() {
    let mut servers = masters(3);
    let gateway = endless(&servers).brand_new().ready().await;
    gateway.acquire("job").await;
    let before = SystemTime::now();
    servers.iter_mut().for_each(RedisServer::kill);
    servers.iter_mut().for_each(RedisServer::restart);
    for server in &servers {
        let node = until_state(&gateway, server, "quarantined").await;
        assert!(text(&node, "detail").contains("all its data was lost"), "{node:#}");
        assert!(text(&node, "advice").contains("wait"), "{node:#}");
        assert_length(&node, before, ENDLESS);
        assert_eq!(node["restarts"], 1, "{node:#}");
    }
    let ready = gateway.readyz().await;
    assert_eq!((ready.status, &ready.json()["status"]), (503, &json!("no_quorum")));
    assert_eq!(
        gateway.get("/livez").await.status,
        200,
        "a quarantine is no reason to restart the gateway"
    );

    let problem = gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    refused_for_quarantine(&problem);
    let detail = text(&problem, "detail");
    let pause = problem["retry_after_ms"].as_u64().expect("when to try again");
    assert!(
        detail.contains("in quarantine") && detail.contains("all its data was lost"),
        "{detail}"
    );
    let longest = ENDLESS.as_millis() as u64;
    assert!((1_000..=longest).contains(&pause), "{pause} ms of {longest}");
    let samples = Samples::of(&gateway).await;
    for server in &servers {
        let node = of(server);
        let state = |state| samples.get("redlock_node_state", &[("node", &node), ("state", state)]);
        assert_eq!((state("quarantined"), state("admitted")), (1.0, 0.0));
        let left = samples.get("redlock_node_quarantine_remaining_seconds", &[("node", &node)]);
        assert!(left > 0.0 && left <= ENDLESS.as_secs_f64(), "{left}");
        assert_eq!(samples.get("redlock_node_restarts_total", &[("node", &node)]), 1.0);
        let [warned, _] = ["node in quarantine", "node was restarted"]
            .map(|message| logged(&gateway, message, server).expect("the log has the line"));
        assert!(
            warned["level"] == "WARN" && text(&warned, "why").contains("all its data was lost"),
            "{warned}"
        );
    }
    let refused = samples
        .get("redlock_node_votes_total", &[("node", &of(&servers[0])), ("vote", "quarantined")]);
    assert!(refused >= 1.0, "{refused}");
}

/// Lets all masters lose their data. Returns how long it took until a lock was granted.
async fn lost_and_regained() -> Duration {
    let mut servers = masters(3);
    let gateway = short(Launch::over(&servers)).ready().await;
    gateway.acquire_soon("job", json!({ "ttl_ms": 3_000 })).await;
    servers.iter_mut().for_each(RedisServer::kill);
    let lost = Instant::now();
    servers.iter_mut().for_each(RedisServer::restart);
    eventually("locks are granted again", async || {
        // No gateway refuses its longest TTL because rounds are slow.
        let answer = gateway.post("job", json!({ "ttl_ms": 3_000 })).await;
        if answer.status == 201 {
            return Some(());
        }
        answer.problem(503, "quorum_unavailable");
        None
    })
    .await;
    let back = lost.elapsed();
    assert!(back >= QUARANTINE, "a lock was granted {back:?} after the loss of all data");
    gateway.all_nodes_admitted().await;
    let samples = Samples::of(&gateway).await;
    for server in &servers {
        let node = of(server);
        assert!(samples.is("redlock_node_quarantine_remaining_seconds", &[("node", &node)], 0.0));
        assert!(samples.is(
            "redlock_node_state",
            &[("node", &node), ("state", "quarantined")],
            0.0
        ));
        for message in ["node in quarantine", "node admitted"] {
            assert!(logged(&gateway, message, server).is_some(), "{message}");
        }
    }
    back
}

#[tokio::test]
async fn a_total_loss_is_reported_until_the_quarantine_ends() {
    assert_eq!(MAX_TTL + SKEW + NAME_MOVES_WITHIN, QUARANTINE);
    lost_and_regained().await;
}

#[tokio::test]
async fn every_state_is_shown_with_reason_and_cure() {
    let mut servers = masters(5);
    let gateway = endless(&servers).brand_new().ready().await;
    servers[0].kill();
    servers[1].cmd(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    servers[2].cmd(&["FLUSHALL"]);
    servers[3].kill();
    servers[3].restart();
    let connecting = until_state(&gateway, &servers[0], "connecting").await;
    let refused = until_state(&gateway, &servers[1], "refused").await;
    let flushed = until_state(&gateway, &servers[2], "quarantined").await;
    let restarted = until_state(&gateway, &servers[3], "quarantined").await;
    // The node votes. It stays in catching up, because it has no other node to compare its locks
    // with.
    let admitted = until_state(&gateway, &servers[4], "catching_up").await;

    assert!(!text(&connecting, "detail").is_empty(), "{connecting:#}");
    assert!(text(&refused, "detail").contains("allkeys-lru"), "{refused:#}");
    assert!(
        text(&refused, "advice").contains("CONFIG SET maxmemory-policy noeviction"),
        "{refused:#}"
    );
    for quarantined in [&flushed, &restarted] {
        assert!(text(quarantined, "detail").contains("all its data was lost"), "{quarantined:#}");
        assert!(text(quarantined, "advice").starts_with("wait at most "), "{quarantined:#}");
        assert!(text(quarantined, "until") > text(quarantined, "since"), "{quarantined:#}");
    }
    for (node, restarts) in [(&flushed, 0), (&restarted, 1)] {
        assert_eq!(node["restarts"], restarts, "{node:#}");
    }
    for node in [&connecting, &refused, &admitted] {
        assert!(node.get("until").is_none(), "{node:#}");
    }
    assert!(text(&admitted, "advice").contains("restart no other master"), "{admitted:#}");
    for node in [&connecting, &refused, &flushed, &restarted, &admitted] {
        let since = text(node, "since");
        assert!(since.starts_with("20") && since.ends_with('Z'), "{node:#}");
    }
    let warned = logged(&gateway, "node cannot vote", &servers[1]).expect("the log has the line");
    assert!(
        text(&warned, "why").contains("allkeys-lru")
            && text(&warned, "advice").contains("noeviction"),
        "{warned}"
    );

    // The operator fixes the configuration. The gateway notices that without a restart.
    servers[1].cmd(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    until_state(&gateway, &servers[1], "catching_up").await;
}

#[tokio::test]
async fn check_shows_which_masters_would_wait_and_why() {
    let mut servers: Vec<_> = (0..3)
        .map(|_| {
            let args = ["--user", "gate", "on", ">pw", "~*", "&*", "+@all", "-config"];
            RedisServer::start_with(options(&args))
        })
        .collect();
    let limited = servers[2].url_as("gate:pw@", "127.0.0.1");
    let urls = [servers[0].url(), servers[1].url(), limited];
    let check = || short(Launch::bare(&["check"])).nodes(&urls).finish();

    let new = check().await;
    assert_eq!(new.code, Some(1), "{new:?}");
    assert_eq!(new.stdout.matches("WOULD WAIT 7s").count(), 3, "{}", new.stdout);
    for word in [
        "all its data was lost",
        "--bootstrap",
        "0 of 3 nodes would be admitted now, 3 after a quarantine",
    ] {
        assert!(new.stdout.contains(word), "no {word:?} in\n{}", new.stdout);
    }
    assert!(new.stdout.contains("durability unknown"), "{}", new.stdout);
    assert!(
        servers.iter().all(|server| server.cmd(&["DBSIZE"]).integer() == 0),
        "a check changes nothing"
    );

    let gateway = short(Launch::embedded().nodes(&urls).brand_new()).ready().await;
    // Two of three nodes are enough for the gateway to be ready.
    let admitted =
        eventually("the log has the line", async || logged(&gateway, "node admitted", &servers[2]))
            .await;
    assert!(text(&admitted, "durability").contains("durability unknown"), "{admitted}");
    drop(gateway);
    servers[1].cmd(&["SAVE"]);
    servers[1].restart();
    let one = check().await;
    assert_eq!(one.code, Some(0), "{one:?}");
    assert_eq!(one.stdout.matches("would be admitted at once").count(), 2, "{}", one.stdout);
    assert_eq!(one.stdout.matches("WOULD WAIT 7s").count(), 1, "{}", one.stdout);
    for word in
        ["it was restarted and may have lost locks", "appendonly no", "1 after a quarantine"]
    {
        assert!(one.stdout.contains(word), "no {word:?} in\n{}", one.stdout);
    }
}

#[tokio::test]
async fn bootstrap_counts_at_the_first_start_and_not_after_a_loss() {
    let servers = masters(3);
    let gateway = endless(&servers).brand_new().ready().await;
    let is_logged = async || {
        gateway.stdout().contains("all nodes are new and are admitted at once").then_some(())
    };
    eventually("the log says that the flag counted", is_logged).await;
    servers.iter().for_each(|server| drop(server.cmd(&["FLUSHALL"])));
    for server in &servers {
        until_state(&gateway, server, "quarantined").await;
    }
    let problem = gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    refused_for_quarantine(&problem);
}

#[tokio::test]
async fn bootstrap_is_refused_if_one_master_was_in_use() {
    let servers = masters(3);
    drop(endless(&servers).brand_new().ready().await);
    servers[..2].iter().for_each(|server| drop(server.cmd(&["FLUSHALL"])));
    let gateway = endless(&servers).brand_new().start().await;
    eventually("--bootstrap is refuted", async || {
        gateway.stdout().contains("not applied").then_some(())
    })
    .await;
    until_state(&gateway, &servers[2], "catching_up").await;
    for server in &servers[..2] {
        until_state(&gateway, server, "quarantined").await;
    }
    gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
}

/// The flag `--bootstrap` was left in a configuration. A gateway starts with it within the second
/// in which the running gateway has not noticed the loss yet.
#[tokio::test]
async fn a_running_gateway_refutes_bootstrap_after_a_total_loss() {
    let servers = masters(3);
    let running = endless(&servers).brand_new().ready().await;
    servers.iter().for_each(|server| drop(server.cmd(&["FLUSHALL"])));
    let started = endless(&servers).brand_new().start().await;
    // The flag is refuted because the loss was seen. On a slow machine it may be accepted for the
    // nodes as they were before the loss, and then it has no effect.
    eventually("--bootstrap is refuted or accepted", async || {
        started.stdout().contains("--bootstrap: ").then_some(())
    })
    .await;
    for gateway in [&running, &started] {
        for server in &servers {
            until_state(gateway, server, "quarantined").await;
        }
        gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    }
}

#[tokio::test]
async fn a_gateway_restarted_during_a_quarantine_resumes_the_count() {
    let servers = masters(3);
    let before = SystemTime::now();
    let launch = || endless(&servers);
    let first = launch().start().await;
    let ends = async |gateway: &Gateway| {
        let mut ends = Vec::new();
        for server in &servers {
            let node = until_state(gateway, server, "quarantined").await;
            assert_length(&node, before, ENDLESS);
            ends.push(seconds(&node, "until"));
        }
        ends
    };
    let ends_before = ends(&first).await;
    let pause = Duration::from_millis(1_500);
    tokio::time::sleep(pause).await;
    drop(first);
    for (before, after) in ends_before.into_iter().zip(ends(&launch().start().await).await) {
        let later = after - before;
        assert!(later < pause.as_secs_f64() / 2.0, "the quarantine ends {later} s later");
    }
}

#[tokio::test]
async fn a_gateway_restarted_during_a_quarantine_waits_for_its_end() {
    let servers = masters(3);
    let blank = Instant::now();
    let launch = || short(Launch::embedded().nodes(&urls(&servers)));
    let first = launch().start().await;
    for server in &servers {
        let is_noticed = async || logged(&first, "node in quarantine", server);
        eventually("the loss is noticed", is_noticed).await;
    }
    drop(first);
    launch().ready().await;
    assert!(
        blank.elapsed() >= QUARANTINE,
        "all admitted {:?} after they were seen blank",
        blank.elapsed()
    );
}

/// The TTL of the lock in [`repaired`], which the quarantine of a master outlasts.
const REPAIRED_TTL_MS: u64 = 4_000;

/// Whether an extension was confirmed. `None` if the lock has ended. A busy machine may miss the
/// 400 ms of a round.
async fn is_extended(gateway: &Gateway, lease: &Lease) -> Option<bool> {
    let extended = gateway.patch("job", &lease.token, REPAIRED_TTL_MS).await;
    assert!(matches!(extended.status, 200 | 404 | 503), "{extended:?}");
    (extended.status != 404).then_some(extended.status == 200)
}

/// Extends a lock until this holds. Returns `None` if the lock has ended.
async fn extended_until(
    gateway: &Gateway,
    lease: &Lease,
    what: &str,
    mut holds: impl AsyncFnMut() -> bool,
) -> Option<()> {
    eventually(what, async || match is_extended(gateway, lease).await {
        None => Some(None),
        Some(is_extended) => (is_extended && holds().await).then_some(Some(())),
    })
    .await
}

/// Restarts one master after the other under a lock, and waits until extensions have repaired each.
/// Returns `None` if the lock has ended meanwhile.
async fn repaired() -> Option<()> {
    let mut servers = masters(3);
    // This quarantine ends a second before recovery would give the lock back.
    let launch = Launch::over(&servers).flag("--max-ttl", "4s").flag("--default-ttl", "2s");
    let launch = launch.flag("--clock-skew", "500ms").flag("--node-timeout", "5s");
    let gateway = launch.ready().await;
    let lease = gateway.acquire_soon("job", json!({ "ttl_ms": REPAIRED_TTL_MS })).await;
    for at in 0..3 {
        extended_until(&gateway, &lease, "every master stores the lock", async || {
            stored_on(&servers, "job", |_| true) == [0, 1, 2]
        })
        .await?;
        servers[at].restart();
        extended_until(&gateway, &lease, "the master is back in service", async || {
            let status =
                states(&gateway).await.remove(&of(&servers[at])).expect("the node is listed");
            status["state"] == "admitted" && status["restarts"] == 1
        })
        .await?;
    }
    extended_until(&gateway, &lease, "each node was repaired once, and counted", async || {
        let samples = Samples::of(&gateway).await;
        let repairs = |server: &RedisServer| {
            samples.get("redlock_node_repairs_total", &[("node", &of(server))])
        };
        servers.iter().all(|server| repairs(server) == 1.0)
    })
    .await?;
    let status = gateway.inspect("job").await;
    (status["state"] == "held").then(|| assert_eq!(status["fencing_token"], lease.fencing))
}

#[tokio::test]
async fn an_extension_by_http_repairs_and_is_counted() {
    eventually("the lock outlives the repairs", repaired).await;
}

#[tokio::test]
async fn a_master_with_a_wrong_clock_is_reported_until_fixed() {
    let clock = NodeClock::new();
    let mut servers = vec![RedisServer::start(), RedisServer::start(), clock.server()];
    let gateway = endless(&servers).brand_new().ready().await;
    let node = of(&servers[2]);
    let offset = async || {
        let samples = Samples::of(&gateway).await;
        samples.get("redlock_node_clock_offset_seconds", &[("node", &node)])
    };
    // On a busy machine an answer may come late, and then its offset is inexact.
    eventually("no offset shows", async || (offset().await.abs() < 1.0).then_some(())).await;
    // The clock is wrong by more than half of max_clock_skew, and by less than max_clock_skew. So
    // the master still votes, and the operator is warned.
    clock.set_ahead(-1_500);
    eventually("the offset shows", async || (offset().await < -1.0).then_some(())).await;
    let far = "the node's clock and this machine's are far apart: correct one of them";
    let warned = eventually("the log warns", async || logged(&gateway, far, &servers[2])).await;
    assert_eq!(warned["level"], "WARN", "{warned}");
    eventually("the master still votes", async || {
        let lease = gateway.acquire("near").await;
        let all = stored_on(&servers, "near", |_| true) == [0, 1, 2];
        assert_eq!(gateway.delete("near", &lease.token).await.status, 204);
        all.then_some(())
    })
    .await;

    clock.set_ahead(-60_000);
    eventually("the offset shows", async || (offset().await < -50.0).then_some(())).await;
    let refusals = async || {
        let samples = Samples::of(&gateway).await;
        samples.get("redlock_node_votes_total", &[("node", &node), ("vote", "clock")])
    };
    let before = refusals().await;
    let lease = gateway.acquire("job").await;
    eventually("the master refuses", async || (refusals().await > before).then_some(())).await;
    assert_eq!(stored_on(&servers, "job", |_| true), [0, 1], "the other masters still grant");
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);
    servers[0].kill();
    let problem = gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    assert_eq!(answers(&problem).get(&node).map(String::as_str), Some("clock"), "{problem:#}");

    // The clock jumps forward again. This jump has ended the master's locks a minute early.
    clock.set_ahead(0);
    let waits = until_state(&gateway, &servers[2], "quarantined").await;
    assert!(text(&waits, "detail").contains("its clock ran ahead"), "{waits:#}");
    assert!(text(&waits, "advice").contains("maxslewrate"), "{waits:#}");
}

/// All masters are stopped while an acquire is in flight, and then the gateway is stopped too. The
/// masters continue and set the lock. The lock expires before the gateway continues.
#[tokio::test]
async fn a_gateway_that_sleeps_beyond_the_ttl_answers_503() {
    let servers = masters(3);
    let gateway = Launch::over(&servers).flag("--node-timeout", "6s").ready().await;
    let mut attempts = 1..;
    eventually("the gateway is stopped between an acquire and its answer", async || {
        let attempt = attempts.next()?;
        let lock = format!("job-{attempt}");
        // A round lasts for a tenth of the TTL. A busy machine needs longer rounds.
        let ttl_ms = 4_000 * u64::min(attempt, 5);
        servers[1..].iter().for_each(RedisServer::stop);
        let call =
            gateway.call(Method::POST, format!("/locks/{lock}")).json(&json!({ "ttl_ms": ttl_ms }));
        let asked = tokio::spawn(call.send());
        eventually("the acquire is in flight", async || {
            (stored_on(&servers, &lock, |at| at == 0) == [0] || asked.is_finished()).then_some(())
        })
        .await;
        gateway.signal(Signal::STOP);
        servers[1..].iter().for_each(RedisServer::cont);
        let stopped = Instant::now();
        let voted =
            eventually("a majority has set the lock, or received its release", async || {
                // The gateway may have been stopped before it sent the acquire to all masters. Then
                // it goes on only after the TTL, because before that it may grant the lock.
                let is_over = stopped.elapsed() > Duration::from_millis(ttl_ms + 1_000);
                if asked.is_finished() || is_over {
                    return Some(false);
                }
                (stored_on(&servers, &lock, |_| true) == [0, 1, 2]).then_some(true)
            })
            .await;
        if voted {
            eventually("the lock has run out", async || {
                stored_on(&servers, &lock, |_| true).is_empty().then_some(())
            })
            .await;
        }
        gateway.signal(Signal::CONT);
        let answer = asked.await.expect("no panic");
        // While rounds are slow, the gateway refuses a TTL that is too short for them.
        match answer.status {
            400 => answer.problem(400, "invalid_ttl"),
            _ => answer.problem(503, "quorum_unavailable"),
        };
        eventually("nothing is held", async || {
            // After a long stop, the gateway connects to the masters again.
            let found = gateway.get(&lock_path(&lock)).await;
            let is_free = found.status == 200 && found.json()["state"] == "free";
            (is_free && stored_on(&servers, &lock, |_| true).is_empty()).then_some(())
        })
        .await;
        gateway.all_nodes_admitted().await;
        voted.then_some(())
    })
    .await;
}

/// The masters answer every call and grant nothing. A load balancer must not send requests to such
/// a gateway.
#[tokio::test]
async fn a_read_only_majority_is_not_ready_and_says_why() {
    let servers = masters(3);
    let gateway = endless(&servers).brand_new().ready().await;
    let refuse =
        [["CONFIG", "SET", "maxmemory", "1"], ["CONFIG", "SET", "min-replicas-to-write", "1"]];
    let allow =
        [["CONFIG", "SET", "maxmemory", "0"], ["CONFIG", "SET", "min-replicas-to-write", "0"]];
    servers.iter().zip(refuse).for_each(|(server, command)| drop(server.cmd(&command)));
    let health = eventually("the gateway is not ready", async || {
        let answer = gateway.readyz().await;
        (answer.status == 503).then(|| answer.json())
    })
    .await;
    assert_eq!(health["status"], "no_quorum");
    for (at, word, advice) in [(0, "OOM", "maxmemory"), (1, "NOREPLICAS", "min-replicas-to-write")]
    {
        let node = &health["nodes"][at];
        assert!(node["detail"].as_str().is_some_and(|why| why.contains(word)), "{node:#}");
        assert!(node["advice"].as_str().is_some_and(|what| what.contains(advice)), "{node:#}");
    }
    gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    servers.iter().zip(allow).for_each(|(server, command)| drop(server.cmd(&command)));
    eventually("it is ready again", async || (gateway.readyz().await.status == 200).then_some(()))
        .await;
    gateway.acquire_soon("job", json!({})).await;
}

mod measured {
    use super::*;
    use crate::support::cluster::SOON;
    use crate::support::measure::measured;

    #[tokio::test]
    async fn locks_are_granted_soon_after_the_quarantine() {
        measured("the first lock after the loss of all data", async || {
            let back = lost_and_regained().await;
            let is_soon = back <= QUARANTINE + SOON;
            if is_soon { Ok(()) } else { Err(format!("no lock until {back:?} after the loss")) }
        })
        .await;
    }
}
