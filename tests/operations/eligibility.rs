//! Suspect masters as operators and clients see them: in readyz, the metrics, the log and `check`,
//! and in answers during that time. The masters vote again without anybody's help. Also locks whose
//! master's or gateway's clock jumps.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use http::Method;
use redlock_core::node::eligibility::NAME_MOVES_WITHIN;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::Lease;
use crate::support::cluster::{NodeClock, SOON};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisOptions, RedisServer, eventually, masters};
use crate::support::metrics::Samples;
use crate::support::nodes::stored_on;

const MAX_TTL: Duration = Duration::from_secs(3);
const SKEW: Duration = Duration::from_secs(1);
/// The length of the quarantine: max_ttl + clock_skew, and the time until every gateway follows a
/// name that has moved.
const QUARANTINE: Duration = Duration::from_secs(7);

fn urls(servers: &[RedisServer]) -> Vec<String> {
    servers.iter().map(RedisServer::url).collect()
}

/// Adds settings with which a quarantine lasts seven seconds.
fn short(launch: Launch) -> Launch {
    launch.flag("--max-ttl", "3s").flag("--default-ttl", "2s").flag("--clock-skew", "1s")
}

/// A gateway whose quarantines outlast the test.
fn endless(servers: &[RedisServer]) -> Launch {
    Launch::embedded().nodes(&urls(servers)).flag("--node-timeout", "2s")
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

#[tokio::test]
async fn a_total_loss_is_reported_until_the_quarantine_ends() {
    assert_eq!(MAX_TTL + SKEW + NAME_MOVES_WITHIN, QUARANTINE);
    let mut servers = masters(3);
    let gateway = short(Launch::over(&servers)).ready().await;
    gateway.acquire_for("job", 3_000).await;
    servers.iter_mut().for_each(RedisServer::kill);
    let lost = Instant::now();
    servers.iter_mut().for_each(RedisServer::restart);
    for server in &servers {
        let node = until_state(&gateway, server, "quarantined").await;
        assert!(text(&node, "detail").contains("all its data was lost"), "{node:#}");
        assert!(text(&node, "advice").contains("wait"), "{node:#}");
        let day = 86_400.0;
        let lasts = (seconds(&node, "until") - seconds(&node, "since") + day) % day;
        assert!((lasts - QUARANTINE.as_secs_f64()).abs() < 0.5, "{lasts} s in {node:#}");
        assert_eq!(node["restarts"], 1, "{node:#}");
    }
    let ready = gateway.readyz().await;
    assert_eq!((ready.status, &ready.json()["status"]), (503, &json!("no_quorum")));
    assert_eq!(
        gateway.get("/livez").await.status,
        200,
        "a quarantine is no reason to restart the gateway"
    );

    let problem =
        gateway.post("job", json!({ "ttl_ms": 1_000 })).await.problem(503, "quorum_unavailable");
    refused_for_quarantine(&problem);
    let detail = text(&problem, "detail");
    let pause = problem["retry_after_ms"].as_u64().expect("when to try again");
    assert!(
        detail.contains("in quarantine") && detail.contains("all its data was lost"),
        "{detail}"
    );
    let longest = QUARANTINE.as_millis() as u64;
    assert!((1_000..=longest).contains(&pause), "{pause} ms of {longest}");
    let samples = Samples::of(&gateway).await;
    for server in &servers {
        let node = of(server);
        let state = |state| samples.get("redlock_node_state", &[("node", &node), ("state", state)]);
        assert_eq!((state("quarantined"), state("admitted")), (1.0, 0.0));
        let left = samples.get("redlock_node_quarantine_remaining_seconds", &[("node", &node)]);
        assert!(left > 0.0 && left <= QUARANTINE.as_secs_f64(), "{left}");
        assert_eq!(samples.get("redlock_node_restarts_total", &[("node", &node)]), 1.0);
        let warned = logged(&gateway, "node in quarantine", server).expect("the log has the line");
        assert!(
            warned["level"] == "WARN" && text(&warned, "why").contains("all its data was lost"),
            "{warned}"
        );
        assert!(logged(&gateway, "node was restarted", server).is_some());
    }
    let refused = samples
        .get("redlock_node_votes_total", &[("node", &of(&servers[0])), ("vote", "quarantined")]);
    assert!(refused >= 1.0, "{refused}");

    eventually("locks are granted again", async || {
        let answer = gateway.post("job", json!({ "ttl_ms": 1_000 })).await;
        if answer.status == 201 {
            return Some(());
        }
        answer.problem(503, "quorum_unavailable");
        None
    })
    .await;
    let back = lost.elapsed();
    assert!(back >= QUARANTINE, "a lock was granted {back:?} after the loss of all data");
    assert!(back <= QUARANTINE + SOON, "no lock until {back:?} after the loss of all data");
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
        assert!(logged(&gateway, "node admitted", server).is_some());
    }
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
    let blank = Instant::now();
    let launch = || short(Launch::embedded().nodes(&urls(&servers)));
    let first = launch().start().await;
    for server in &servers {
        until_state(&first, server, "quarantined").await;
    }
    tokio::time::sleep(QUARANTINE / 4).await;
    drop(first);
    let since = Instant::now();
    launch().ready().await;
    assert!(
        blank.elapsed() >= QUARANTINE,
        "all admitted {:?} after they were seen blank",
        blank.elapsed()
    );
    assert!(since.elapsed() < QUARANTINE, "all admitted {:?} after its start", since.elapsed());
}

/// Whether an extension was confirmed. A busy machine may miss the 300 ms of a round.
async fn is_extended(gateway: &Gateway, lease: &Lease) -> Option<()> {
    let extended = gateway.patch("job", &lease.token, 3_000).await;
    assert!(matches!(extended.status, 200 | 503), "{extended:?}");
    (extended.status == 200).then_some(())
}

#[tokio::test]
async fn an_extension_by_http_repairs_and_is_counted() {
    let mut servers = masters(3);
    let gateway = short(Launch::over(&servers)).ready().await;
    let lease = gateway.acquire_for("job", 3_000).await;
    for at in 0..3 {
        eventually("every master stores the lock", async || {
            is_extended(&gateway, &lease).await?;
            (stored_on(&servers, "job", |_| true) == [0, 1, 2]).then_some(())
        })
        .await;
        servers[at].restart();
        eventually("the master is back in service", async || {
            is_extended(&gateway, &lease).await?;
            let status =
                states(&gateway).await.remove(&of(&servers[at])).expect("the node is listed");
            (status["state"] == "admitted" && status["restarts"] == 1).then_some(())
        })
        .await;
    }
    eventually("each node was repaired once, and counted", async || {
        is_extended(&gateway, &lease).await?;
        let samples = Samples::of(&gateway).await;
        let repairs = |server: &RedisServer| {
            samples.get("redlock_node_repairs_total", &[("node", &of(server))])
        };
        servers.iter().all(|server| repairs(server) == 1.0).then_some(())
    })
    .await;
    assert_eq!(gateway.inspect("job").await["fencing_token"], lease.fencing);
}

#[tokio::test]
async fn a_master_with_a_wrong_clock_is_reported_until_fixed() {
    let clock = NodeClock::new();
    let mut servers = vec![RedisServer::start(), RedisServer::start(), clock.server()];
    let gateway = Launch::over(&servers).ready().await;
    let node = of(&servers[2]);
    let offset = async || {
        let samples = Samples::of(&gateway).await;
        samples.get("redlock_node_clock_offset_seconds", &[("node", &node)])
    };
    assert!(offset().await.abs() < 1.0);
    // The clock is wrong by more than half of max_clock_skew, and by less than max_clock_skew. So
    // the master still votes, and the operator is warned.
    clock.set_ahead(-1_500);
    eventually("the offset shows", async || (offset().await < -1.0).then_some(())).await;
    let far = "the node's clock and this machine's are far apart: mend one";
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
    for attempt in 1.. {
        assert!(
            attempt < 20,
            "this machine is too slow: the gateway always answered before it was stopped"
        );
        let lock = format!("job-{attempt}");
        servers[1..].iter().for_each(RedisServer::stop);
        let call =
            gateway.call(Method::POST, format!("/locks/{lock}")).json(&json!({ "ttl_ms": 4_000 }));
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
                if asked.is_finished() || stopped.elapsed() > Duration::from_secs(5) {
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
        answer.problem(503, "quorum_unavailable");
        eventually("nothing is held", async || {
            (gateway.inspect(&lock).await["state"] == "free"
                && stored_on(&servers, &lock, |_| true).is_empty())
            .then_some(())
        })
        .await;
        gateway.all_nodes_admitted().await;
        if voted {
            return;
        }
    }
}

/// The masters answer every call and grant nothing. A load balancer must not send requests to such
/// a gateway.
#[tokio::test]
async fn a_read_only_majority_is_not_ready_and_says_why() {
    let servers = masters(3);
    let gateway = Launch::over(&servers).ready().await;
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
    assert_eq!(gateway.post("job", json!({})).await.status, 201);
}
