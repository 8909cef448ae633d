//! The procedures of docs/runbook.md, step by step on real masters and gateways. The tests check
//! the output, the waiting times, and the locks that are held meanwhile. If another test runs a
//! procedure from end to end, the runbook names that test.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::gateway::{Gateway, Launch, Scratch, module};
use crate::support::harness::{RedisOptions, RedisServer, TempDir, eventually, masters};
use crate::support::nodes::stored_on;
use crate::support::waiters::{HOUR_MS, patient_over};

/// The message in the log about a master that is in quarantine.
const QUARANTINED: &str = "node in quarantine";

fn urls(servers: &[RedisServer]) -> Vec<String> {
    servers.iter().map(RedisServer::url).collect()
}

fn name(server: &RedisServer) -> String {
    format!("127.0.0.1:{}", server.port())
}

fn durable(count: usize) -> Vec<RedisServer> {
    let options =
        || RedisOptions { append_only: true, native: Some(false), ..RedisOptions::default() };
    (0..count).map(|_| RedisServer::start_with(options())).collect()
}

/// Settings with short times. The quarantine is max(max_ttl, clock_skew) + clock_skew + 3 s: with a
/// max_ttl of 2 s that is 5.1 s. The node timeout is the longest one that every clock skew allows.
fn times(launch: Launch, max_ttl: &str) -> Launch {
    let launch = launch.flag("--max-ttl", max_ttl).flag("--default-ttl", "1s");
    launch.flag("--clock-skew", "100ms").flag("--node-timeout", "5s")
}

/// A gateway whose locks and quarantines outlast the test. Recovery begins after 8.5 s; with a
/// longer clock skew it would begin later.
fn recovering(servers: &[RedisServer]) -> Launch {
    let launch = Launch::over(servers).flag("--max-ttl", "1h");
    launch.flag("--clock-skew", "1600ms").flag("--node-timeout", "5s")
}

/// A command or a gateway that is not hasty with busy masters.
fn patient_with(urls: &[String], words: &[&str]) -> Launch {
    Launch::bare(words).nodes(urls).flag("--node-timeout", "6s")
}

/// The words that make a gateway serve.
const SERVE: [&str; 2] = ["--listen", "127.0.0.1:0"];

async fn node_of(gateway: &Gateway, server: &RedisServer) -> Value {
    let health = gateway.readyz().await.json();
    let nodes = health["nodes"].as_array().expect("readyz lists nodes");
    nodes
        .iter()
        .find(|node| node["node"] == name(server).as_str())
        .expect("the node is listed")
        .clone()
}

async fn until_state(gateway: &Gateway, server: &RedisServer, state: &str, restarts: u64) -> Value {
    eventually(&format!("{server:?} is {state} after {restarts} restarts"), async || {
        Some(node_of(gateway, server).await)
            .filter(|node| node["state"] == state && node["restarts"] == restarts)
    })
    .await
}

/// Waits until the log says that a master was in quarantine.
async fn was_quarantined(gateway: &Gateway, server: &RedisServer) {
    let of_server = format!("\"node\":\"{}\"", name(server));
    eventually("the log has the quarantine", async || {
        let log = gateway.stdout();
        let mut lines = log.lines().filter(|line| line.contains(QUARANTINED));
        lines.any(|line| line.contains(&of_server)).then_some(())
    })
    .await;
}

async fn is_everywhere(servers: &[RedisServer], lock: &str) {
    let all = (0..servers.len()).collect::<Vec<_>>();
    eventually("every master stores the lock", async || {
        (stored_on(servers, lock, |_| true) == all).then_some(())
    })
    .await;
}

async fn drained(mut gateway: Gateway) {
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
}

#[track_caller]
fn prints(text: &str, lines: &[&str]) {
    for line in lines {
        assert!(text.contains(line), "no {line:?} in\n{text}");
    }
}

#[tokio::test]
async fn a_bootstrapped_cluster_keeps_its_locks_without_the_flag() {
    let servers = masters(3);
    let urls = urls(&servers);
    let checked = patient_with(&urls, &["check", "--bootstrap"]).finish().await;
    assert_eq!(checked.code, Some(0), "{checked:?}");
    prints(
        &checked.stdout,
        &["all nodes are new: they are admitted at once", "ok: 3 of 3 nodes would be admitted now"],
    );
    let first = Launch::over(&servers).flag("--node-timeout", "6s").ready().await;
    let lease = first.acquire_for("job", 300_000).await;
    let again = patient_with(&urls, &["check"]).finish().await;
    prints(&again.stdout, &["ok: 3 of 3 nodes would be admitted now, 2 needed"]);
    drained(first).await;
    let second = patient_with(&urls, &SERVE).ready().await;
    assert!(!second.stdout().contains(QUARANTINED), "admitted masters cause no wait");
    second.post("job", json!({})).await.problem(409, "lock_held");
    assert_eq!(second.patch("job", &lease.token, 300_000).await.status, 200);
}

#[tokio::test]
async fn a_first_start_without_the_flag_is_begun_anew() {
    let servers = masters(3);
    let urls = urls(&servers);
    let mistaken = patient_with(&urls, &SERVE).start().await;
    for server in &servers {
        until_state(&mistaken, server, "quarantined", 0).await;
    }
    drained(mistaken).await;
    for server in &servers {
        assert_eq!(server.cmd(&["DEL", "{lock:}:marker"]).integer(), 1);
    }
    let checked = patient_with(&urls, &["check"]).finish().await;
    prints(&checked.stdout, &["no node has a marker", "start its first gateway with --bootstrap"]);
    // With this gateway, a quarantine would outlast the test.
    patient_over(&servers).ready().await.acquire("job").await;
}

#[tokio::test]
async fn a_cluster_without_bootstrap_says_when_it_will_vote() {
    // This quarantine outlasts the test.
    let servers = masters(3);
    let gateway = times(patient_with(&urls(&servers), &SERVE), "1h").start().await;
    for server in &servers {
        let node = until_state(&gateway, server, "quarantined", 0).await;
        assert!(node["until"].is_string(), "{node:#}");
    }
    let ready = gateway.readyz().await;
    let status = &ready.json()["status"];
    let runbook = &ready.json()["runbook"];
    assert_eq!(
        (ready.status, status, runbook),
        (503, &json!("no_quorum"), &json!("/docs/symptoms#quorum-lost"))
    );
    gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    drop(gateway);

    let servers = masters(3);
    let launch = |words: &[&str]| times(patient_with(&urls(&servers), words), "2s");
    let since = Instant::now();
    let checked = launch(&["check"]).finish().await;
    assert_eq!(checked.code, Some(1), "{checked:?}");
    prints(
        &checked.stdout,
        &[
            "WOULD WAIT 5s 100ms",
            "NOT ENOUGH: 0 of 3 nodes would be admitted now, 3 after a quarantine, 2 needed",
        ],
    );
    let gateway = launch(&SERVE).start().await;
    for server in &servers {
        was_quarantined(&gateway, server).await;
    }
    gateway.all_nodes_admitted().await;
    assert!(since.elapsed() >= Duration::from_millis(5_100), "{:?}", since.elapsed());
    assert_eq!(gateway.readyz().await.json().get("runbook"), None);
    gateway.acquire_soon("job", json!({ "ttl_ms": 2_000 })).await;
}

#[tokio::test]
async fn a_master_that_returns_empty_recovers_the_held_locks() {
    let mut servers = masters(3);
    let gateway = recovering(&servers).ready().await;
    let lease = gateway.acquire_for("job", HOUR_MS).await;
    is_everywhere(&servers, "job").await;
    servers[2].kill_and_wipe();
    until_state(&gateway, &servers[2], "connecting", 0).await;
    assert_eq!(gateway.patch("job", &lease.token, HOUR_MS).await.status, 200);
    servers[2].restart();
    was_quarantined(&gateway, &servers[2]).await;
    gateway.post("job", json!({})).await.problem(409, "lock_held");
    // The master votes long before the hour of a quarantine is over.
    until_state(&gateway, &servers[2], "admitted", 1).await;
    assert_eq!(
        stored_on(&servers, "job", |_| true),
        [0, 1, 2],
        "the master has recovered the lock"
    );
    servers[0].kill();
    gateway.post("job", json!({})).await.problem(409, "lock_held");
    let extended = gateway.patch("job", &lease.token, HOUR_MS).await;
    assert_eq!(
        (extended.status, &extended.json()["nodes_granted"]),
        (200, &json!(2)),
        "{extended:?}"
    );
}

/// Stops the old gateways and runs `reconfigure` from three masters to others. Returns how long it
/// took.
async fn reconfigured(
    old: &[&RedisServer],
    new: &[&RedisServer],
    max_ttl: &str,
    printed: &[String],
) -> Duration {
    let urls: Vec<String> = new.iter().map(|server| server.url()).collect();
    let run = |words: &[&str]| {
        let launch = times(Launch::bare(words).nodes(&urls), max_ttl);
        old.iter().fold(launch, |launch, server| launch.more("--old-node", &server.url())).finish()
    };
    let list = |servers: &[&RedisServer]| {
        servers.iter().map(|server| name(server)).collect::<Vec<_>>().join(",")
    };
    let lists = format!("nodes: {} → {}\n", list(old), list(new));
    let printed: Vec<&str> = printed.iter().map(String::as_str).chain([lists.as_str()]).collect();
    let asked = run(&["reconfigure"]).await;
    assert_eq!(asked.code, Some(0), "{asked:?}");
    prints(
        &asked.stdout,
        &[&printed[..], &["nothing was changed; with --yes: these nodes give no votes for"]]
            .concat(),
    );
    let since = Instant::now();
    let done = run(&["reconfigure", "--yes"]).await;
    let took = since.elapsed();
    assert_eq!(done.code, Some(0), "{done:?}");
    prints(
        &done.stdout,
        &[&printed[..], &["these nodes give no votes now", "done: 3 nodes carry the new marker"]]
            .concat(),
    );
    took
}

#[tokio::test]
async fn replacing_a_dead_master_grants_no_lock_early() {
    let mut servers = masters(4);
    let old = times(Launch::over(&servers[..3]), "2s").ready().await;
    let lease = old.acquire_soon("job", json!({ "ttl_ms": 2_000 })).await;
    let granted = Instant::now();
    servers[2].kill();
    drained(old).await;
    let [a, b, c, d] = [0, 1, 2, 3].map(|at| &servers[at]);
    let lines = [
        format!("{}: stays\n", name(a)),
        "leaves without having answered\n".to_owned(),
        format!("{}: joins; it has no marker yet\n", name(d)),
    ];
    let took = reconfigured(&[a, b, c], &[a, b, d], "2s", &lines).await;
    assert!(took >= Duration::from_millis(5_100), "{took:?}");
    let urls = [a.url(), b.url(), d.url()];
    let new = times(Launch::embedded().nodes(&urls), "2s").ready().await;
    assert!(!new.stdout().contains(QUARANTINED), "the new markers count at once");
    assert!(granted.elapsed() > Duration::from_secs(2), "the lease has ended");
    // A busy machine may miss the 200 ms of a round.
    let refused = eventually("the masters answer", async || {
        let answer = new.patch("job", &lease.token, 2_000).await;
        Some(answer).filter(|answer| !matches!(answer.status, 400 | 503))
    })
    .await;
    refused.problem(404, "lock_not_found");
    let next = new.acquire_soon("job", json!({ "ttl_ms": 2_000 })).await;
    assert!(next.fencing > lease.fencing);
}

#[tokio::test]
async fn one_run_changes_nodes_and_max_ttl_and_stops_old_gateways() {
    let servers = masters(4);
    let old = times(Launch::over(&servers[..3]), "1s").ready().await;
    let lease = old.acquire_soon("job", json!({ "ttl_ms": 1_000 })).await;
    let [a, b, c, d] = [0, 1, 2, 3].map(|at| &servers[at]);
    let lines = [
        format!("{}: stays; max_ttl 1s → 2s\n", name(a)),
        format!("{}: leaves\n", name(c)),
        format!("{}: joins; it has no marker yet\n", name(d)),
    ];
    let took = reconfigured(&[a, b, c], &[a, b, d], "2s", &lines).await;
    assert!(took >= Duration::from_millis(5_100), "the longer of the two max_ttl counts: {took:?}");
    // One of the old masters was lost for ever.
    old.post("other", json!({})).await.problem(503, "quorum_unavailable");
    let urls = [a.url(), b.url(), d.url()];
    let new = times(Launch::embedded().nodes(&urls), "2s").ready().await;
    assert!(!new.stdout().contains(QUARANTINED), "the new markers count at once");
    assert!(new.acquire_soon("job", json!({ "ttl_ms": 2_000 })).await.fencing > lease.fencing);
    old.patch("job", &lease.token, 1_000).await.problem(503, "outcome_unknown");
}

#[tokio::test]
async fn by_default_a_change_of_nodes_stops_locks_for_305_s() {
    let servers = masters(4);
    drop(Launch::over(&servers[..3]).flag("--node-timeout", "6s").ready().await);
    let urls = urls(&servers);
    let asked = |nodes: &[String], max_ttl: &str| {
        let launch = patient_with(nodes, &["reconfigure", "--max-ttl", max_ttl]);
        urls[..3].iter().fold(launch, |launch, url| launch.more("--old-node", url)).finish()
    };
    let joins = [urls[0].clone(), urls[1].clone(), urls[3].clone()];
    prints(
        &asked(&joins, "5m").await.stdout,
        &["give no votes for 5m 5s, so nobody gets or extends a lock"],
    );
    let shorter = asked(&urls[..3], "1m").await;
    prints(&shorter.stdout, &["max_ttl 5m → 1m", "give no votes for 5m 5s, so nobody"]);
    let longer = asked(&urls[..3], "10m").await;
    prints(&longer.stdout, &["max_ttl 5m → 10m", "all nodes keep voting, and no request fails"]);
}

/// Checks that no master was in quarantine, except for the seconds in which a name may move.
#[track_caller]
fn assert_no_quarantine(gateway: &Gateway) {
    let log = gateway.stdout();
    let other = log
        .lines()
        .find(|line| line.contains(QUARANTINED) && !line.contains("restarted with its data"));
    assert_eq!(other, None);
}

/// The new version of the masters is the one with the module.
#[tokio::test]
async fn masters_are_upgraded_one_by_one_under_a_held_lock() {
    // The module is built before a lock is held, because the build may take longer than the lock's
    // TTL.
    let _ = module();
    let mut servers = durable(3);
    let gateway = patient_over(&servers).ready().await;
    let lease = gateway.acquire_for("job", HOUR_MS).await;
    for at in 0..3 {
        is_everywhere(&servers, "job").await;
        servers[at].restart_as(true);
        let node = eventually("the master is admitted", async || {
            assert_eq!(gateway.patch("job", &lease.token, HOUR_MS).await.status, 200);
            gateway.post("job", json!({})).await.problem(409, "lock_held");
            Some(node_of(&gateway, &servers[at]).await)
                .filter(|node| node["state"] == "admitted" && node["restarts"] == 1)
        })
        .await;
        assert_eq!(node["engine"], "native", "{node:#}");
        assert!(
            stored_on(&servers, "job", |_| true).contains(&at),
            "the lock was on the master's disk"
        );
    }
    assert_no_quarantine(&gateway);
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);
}

/// Replaces the append-only files of one master by those of another.
fn copied(from: &Path, to: &Path) {
    let from = from.join("appendonlydir");
    let to = to.join("appendonlydir");
    let _ = std::fs::remove_dir_all(&to);
    let copied = Command::new("cp").arg("-a").args([&from, &to]).status().expect("cp starts");
    assert!(copied.success(), "{} to {}", from.display(), to.display());
}

/// Three masters that sync every write, a copy of the first master's file, and a lock that is newer
/// than the copy. Only two masters store that lock, and one of them is the first.
async fn backed_up() -> (Vec<RedisServer>, Gateway, TempDir) {
    let mut servers = durable(3);
    let backup = TempDir::new();
    let gateway = recovering(&servers).ready().await;
    let released = gateway.acquire_for("since-released", HOUR_MS).await;
    is_everywhere(&servers, "since-released").await;
    copied(servers[0].dir(), backup.path());
    assert_eq!(gateway.delete("since-released", &released.token).await.status, 204);
    gateway.acquire_for("on-all", HOUR_MS).await;
    is_everywhere(&servers, "on-all").await;
    servers[2].kill();
    gateway.acquire_for("job", HOUR_MS).await;
    servers[2].restart();
    until_state(&gateway, &servers[2], "admitted", 1).await;
    assert_eq!(stored_on(&servers, "job", |_| true), [0, 1, 2], "the master has caught up");
    // The third master does not store the lock, as if it had been too slow.
    servers[2].cmd(&["DEL", "lock:job", "{lock:job}:fence"]);
    servers[0].kill();
    (servers, gateway, backup)
}

/// The gateway that got the later answers still runs. It notices that the backup lacks them.
#[tokio::test]
async fn a_living_gateway_notices_a_restored_backup() {
    let (mut servers, gateway, backup) = backed_up().await;
    copied(backup.path(), servers[0].dir());
    servers[0].restart();
    was_quarantined(&gateway, &servers[0]).await;
}

/// A backup must never be restored unchanged: a gateway that did not receive the later answers cannot
/// see that the backup is old.
#[tokio::test]
async fn a_restored_backup_with_its_marker_grants_a_lock_twice() {
    let (mut servers, gateway, backup) = backed_up().await;
    copied(backup.path(), servers[0].dir());
    drop(gateway);
    servers[0].restart();
    let gateway = recovering(&servers).ready().await;
    until_state(&gateway, &servers[0], "admitted", 0).await;
    assert_no_quarantine(&gateway);
    let twice = gateway.post("job", json!({ "ttl_ms": HOUR_MS })).await;
    assert_eq!(
        twice.status, 201,
        "a refusal here means that the runbook is stricter than necessary: {twice:?}"
    );
}

#[tokio::test]
async fn a_restored_backup_without_its_marker_grants_nothing_twice() {
    let (mut servers, gateway, backup) = backed_up().await;
    // A server that no gateway can reach.
    let mut aside = durable(1).remove(0);
    aside.kill();
    copied(backup.path(), aside.dir());
    aside.restart();
    assert_eq!(aside.cmd(&["DEL", "{lock:}:marker"]).integer(), 1);
    aside.kill();
    copied(aside.dir(), servers[0].dir());
    servers[0].restart();
    was_quarantined(&gateway, &servers[0]).await;
    // Two masters vote. One of them stores the lock, and the other does not. On a busy machine, the
    // quarantine may be over by now.
    let early = gateway.post("job", json!({})).await;
    match early.status {
        503 => early.problem(503, "quorum_unavailable"),
        _ => early.problem(409, "lock_held"),
    };
    until_state(&gateway, &servers[0], "admitted", 1).await;
    assert!(
        stored_on(&servers, "on-all", |_| true).contains(&0),
        "the master has recovered the lock"
    );
    gateway.post("job", json!({})).await.problem(409, "lock_held");
    // On this master the released lock is back until its TTL ends. The other masters outvote it.
    assert_eq!(stored_on(&servers, "since-released", |_| true), [0]);
    let granted = gateway.post("since-released", json!({})).await;
    assert_eq!((granted.status, &granted.json()["nodes_granted"]), (201, &json!(2)), "{granted:?}");
}

#[tokio::test]
async fn a_key_is_rotated_with_two_hashes_and_no_refusal() {
    let old = key("ci", HOLDER, "*").await;
    let new = key("ci", HOLDER, "*").await;
    let hash = |entry: &str| {
        entry.split("hashes = [").nth(1).and_then(|rest| rest.split(']').next()).unwrap().to_owned()
    };
    let both = old
        .entry
        .replace(&hash(&old.entry), &format!("{}, {}", hash(&old.entry), hash(&new.entry)));
    let keys = file(&[&old]);
    let replaced = |text: &str| {
        let next = format!("{}.next", keys.path());
        std::fs::write(&next, text).expect("the folder can be written");
        std::fs::rename(next, keys.path()).expect("the same folder");
    };
    let gateway = with_keys(&keys).start().await;
    let lease = old.acquire(&gateway, "job").await;
    replaced(&both);
    eventually("the new key is known", async || {
        assert_eq!(old.patch(&gateway, "job", &lease.token).await.status, 200);
        (new.get(&gateway, "/locks/job").await.status == 200).then_some(())
    })
    .await;
    assert_eq!(
        new.patch(&gateway, "job", &lease.token).await.status,
        200,
        "both keys have the same principal"
    );
    replaced(&new.entry);
    eventually("the old key has ended", async || {
        assert_eq!(new.patch(&gateway, "job", &lease.token).await.status, 200);
        (old.get(&gateway, "/locks/job").await.status == 401).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_masters_password_is_rotated_while_both_are_valid() {
    let options = || RedisOptions { password: Some("old-one".into()), ..RedisOptions::default() };
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start_with(options())).collect();
    let urls: Vec<String> =
        servers.iter().map(|server| format!("redis://{}", name(server))).collect();
    let [old, new] = ["old-one\n", "new-one\n"].map(|text| Scratch::new("password", text));
    let launch = |words: &[&str], file: &Scratch| {
        Launch::bare(words)
            .nodes(&urls)
            .flag("--node-timeout", "6s")
            .flag("--node-password-file", file.path())
    };
    let first = launch(&SERVE, &old).argument("--bootstrap").ready().await;
    let lease = first.acquire_for("job", 300_000).await;

    let on_all = |words: &[&str]| servers.iter().for_each(|server| drop(server.cmd(words)));
    on_all(&["ACL", "SETUSER", "default", ">new-one"]);
    let second = launch(&SERVE, &new).ready().await;
    for gateway in [&first, &second] {
        assert_eq!(gateway.patch("job", &lease.token, 300_000).await.status, 200);
    }
    drained(first).await;
    on_all(&["ACL", "SETUSER", "default", "<old-one"]);
    // Connections that are open stay logged in. Only a new connection shows the change. A gateway
    // that has not noticed yet answers 503, so this repeats.
    on_all(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    eventually("the lock is extended over new connections", async || {
        (second.patch("job", &lease.token, 300_000).await.status == 200).then_some(())
    })
    .await;
    second.all_nodes_admitted().await;
    let [with_new, with_old] =
        [launch(&["check"], &new).finish().await, launch(&["check"], &old).finish().await];
    prints(&with_new.stdout, &["ok: 3 of 3 nodes would be admitted now"]);
    assert_eq!((with_new.code, with_old.code), (Some(0), Some(1)), "{with_old:?}");
    prints(&with_old.stdout, &["WRONGPASS", "give user and password"]);
}
