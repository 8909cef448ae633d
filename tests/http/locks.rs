//! The life of a lock by HTTP: on embedded nodes, and on one, three and five real masters. Also
//! through two gateways over the same masters, beside another Redlock client, and while masters are
//! dead or hang.
//!
//! No test sleeps until a lock should have expired. Instead it sends GET until the lock is free.

use std::time::Instant;

use http::Method;
use serde_json::{Value, json};

use crate::support::client::{Answer, Lease, assert_left, lock_path};
use crate::support::gateway::{Gateway, Launch, WELL_BELOW_A_TIMEOUT};
use crate::support::harness::{RedisOptions, RedisServer, eventually, masters};
use crate::support::measure::measured;
use crate::support::nodes::{clean_for_good, no_master_stores, stored_on};
use crate::support::resp::Resp;
use crate::support::waiters::{HOUR_MS, patient, patient_over, released};

/// Masters that lose nothing in a crash, and therefore vote at once after a restart.
fn durable_masters(count: usize) -> Vec<RedisServer> {
    let options = || RedisOptions { append_only: true, ..RedisOptions::default() };
    (0..count).map(|_| RedisServer::start_with(options())).collect()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Whether the text has exactly the form `2025-11-21T11:39:54.822Z`.
fn is_rfc3339(value: &Value) -> bool {
    let shape: String =
        value.as_str().unwrap().chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    shape == "0000-00-00T00:00:00.000Z"
}

/// Checks every field of the answer that grants a lock.
#[track_caller]
fn assert_granted(
    answer: &Answer,
    name: &str,
    ttl_ms: u64,
    owner: Option<&str>,
    nodes: u64,
) -> Lease {
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.header("content-type"), "application/json");
    assert_eq!(answer.header("cache-control"), "no-store");
    assert_eq!(answer.header("location"), lock_path(name));
    assert!(!answer.header("x-request-id").is_empty());
    let lease = Lease::from(answer);
    assert_eq!(answer.header("lock-token"), lease.token);
    assert_lease(&answer.json(), name, ttl_ms, owner, nodes);
    lease
}

#[track_caller]
fn assert_lease(body: &Value, name: &str, ttl_ms: u64, owner: Option<&str>, nodes: u64) {
    assert_eq!((&body["name"], &body["ttl_ms"]), (&json!(name), &json!(ttl_ms)));
    assert_eq!(body.get("owner").map(|owner| owner.as_str().unwrap()), owner);
    let fencing = number(&body["fencing_token"]);
    let token = body["token"].as_str().unwrap();
    let secret = token
        .strip_prefix(&format!("1.{fencing}."))
        .unwrap_or_else(|| panic!("{token} does not carry {fencing}"));
    assert!(secret.len() == 40 && secret.bytes().all(|byte| byte.is_ascii_hexdigit()), "{token}");
    assert!(
        (1_700_000_000_000_000..1 << 53).contains(&fencing),
        "{fencing} is not a time in microseconds below 2^53"
    );
    // Drift takes 1 % and 2 ms of the validity. `elapsed_ms` begins when the request arrives, and
    // the validity is counted from the later start of the round. Rounding down takes up to 1 ms of
    // each.
    let validity = number(&body["validity_ms"]);
    let elapsed = number(&body["elapsed_ms"]);
    let most = ttl_ms - ttl_ms / 100 - 2;
    assert!(
        validity <= most && validity + elapsed + 2 >= most,
        "validity {validity} and elapsed {elapsed} of {ttl_ms} ms"
    );
    assert!(is_rfc3339(&body["expires_at"]), "{body:#}");
    assert_eq!(body["nodes_total"], nodes);
    assert!((nodes / 2 + 1..=nodes).contains(&number(&body["nodes_granted"])), "{body:#}");
}

/// Checks that the gateway counts no more time than the client.
#[track_caller]
fn assert_elapsed(answer: &Answer, sent: Instant) {
    let took = (answer.at - sent).as_millis() as u64;
    let elapsed = number(&answer.json()["elapsed_ms"]);
    assert!(elapsed <= took, "{elapsed} of {took} ms");
}

/// Checks the answer to a request about a lock that somebody else has held since a time after
/// `before`.
#[track_caller]
fn assert_held_by(answer: &Answer, code: &str, holder: Option<&str>, ttl_ms: u64, before: Instant) {
    let problem = answer.problem(409, code);
    assert_eq!(problem.get("holder").map(|holder| holder.as_str().unwrap()), holder);
    let left = number(&problem["expires_in_ms"]);
    assert_left(left, ttl_ms, before);
    // A holder may release early. So the gateway never tells a client to wait for longer than 5 s.
    if let Some(pause) = problem["retry_after_ms"].as_u64() {
        assert!((left.min(4_500)..=left.min(5_000) * 11 / 10).contains(&pause), "{problem:#}");
        assert_eq!(answer.header("retry-after"), pause.div_ceil(1000).to_string());
    }
    // Only a lock that a gateway stored says since when it is held.
    let is_foreign = problem.get("acquired_at").is_none();
    let unnamed = if is_foreign { "another client of the masters" } else { "somebody else" };
    assert!(problem["detail"].as_str().unwrap().contains(holder.unwrap_or(unnamed)), "{problem:#}");
}

/// The life of one lock, from its first acquire until it is free again.
async fn lifecycle(gateway: &Gateway, nodes: u64) {
    let name = "reports/nightly@eu-1";
    let free = gateway.inspect(name).await;
    assert_eq!((&free["name"], &free["state"]), (&json!(name), &json!("free")));
    for absent in ["owner", "fencing_token", "expires_in_ms", "acquired_at"] {
        assert!(free.get(absent).is_none(), "{free:#}");
    }

    let ask = json!({ "ttl_ms": 60_000, "owner": "host-7 \"blue\"", "metadata": { "job": "17", "größe": "♥" } });
    let sent = Instant::now();
    let granted = gateway.post(name, ask).await;
    let lease = assert_granted(&granted, name, 60_000, Some("host-7 \"blue\""), nodes);
    assert_elapsed(&granted, sent);

    let refused = gateway.post(name, json!({ "ttl_ms": 60_000, "owner": "another" })).await;
    let problem = refused.problem(409, "lock_held");
    assert_eq!(problem["holder"], "host-7 \"blue\"");
    assert_left(number(&problem["expires_in_ms"]), 60_000, sent);
    let pause = problem["retry_after_ms"].as_u64().unwrap();
    assert!(
        (4_500..=5_000).contains(&pause) && refused.header("retry-after") == "5",
        "{refused:?}"
    );

    let held = gateway.inspect(name).await;
    assert_eq!((&held["state"], &held["owner"]), (&json!("held"), &json!("host-7 \"blue\"")));
    assert_eq!(held["fencing_token"], lease.fencing);
    assert_left(number(&held["expires_in_ms"]), 60_000, sent);
    assert!(is_rfc3339(&held["acquired_at"]), "{held:#}");
    assert_eq!(held["nodes"].as_array().unwrap().len() as u64, nodes);
    let holding =
        held["nodes"].as_array().unwrap().iter().filter(|node| node["state"] == "held").count()
            as u64;
    assert!(holding > nodes / 2, "{held:#}");
    assert!(!held.to_string().contains(lease.owner()), "GET shows the secret: {held:#}");

    let sent = Instant::now();
    let extended = gateway.patch(name, &lease.token, 120_000).await;
    assert_elapsed(&extended, sent);
    assert_eq!(
        (extended.status, extended.header("cache-control")),
        (200, "no-store"),
        "{extended:?}"
    );
    let body = extended.json();
    assert_lease(&body, name, 120_000, None, nodes);
    assert_eq!(
        (&body["token"], &body["fencing_token"]),
        (&json!(lease.token), &json!(lease.fencing))
    );
    assert_left(number(&gateway.inspect(name).await["expires_in_ms"]), 120_000, sent);

    let released = gateway.delete(name, &format!("<{}>", lease.token)).await;
    assert_eq!((released.status, released.body.len()), (204, 0), "{released:?}");
    assert!(!released.header("x-request-id").is_empty());
    assert_eq!(gateway.inspect(name).await["state"], "free");
    gateway.delete(name, &lease.token).await.problem(404, "lock_not_found");
    gateway.patch(name, &lease.token, 60_000).await.problem(404, "lock_not_found");

    let next = gateway.acquire(name).await;
    assert!(next.fencing > lease.fencing, "{next:?} after {lease:?}");
}

#[tokio::test]
async fn a_lock_lives_and_ends_on_embedded_nodes() {
    lifecycle(&Launch::embedded().start().await, 5).await;
}

#[tokio::test]
async fn a_lock_lives_and_ends_on_one_master() {
    lifecycle(&patient_over(&masters(1)).ready().await, 1).await;
}

#[tokio::test]
async fn a_lock_lives_and_ends_on_three_masters() {
    lifecycle(&patient_over(&masters(3)).ready().await, 3).await;
}

#[tokio::test]
async fn a_lock_lives_and_ends_on_five_masters() {
    let servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    lifecycle(&gateway, 5).await;
    eventually("the next lock is stored on all masters", async || {
        (stored_on(&servers, "reports/nightly@eu-1", |_| true).len() == 5).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_request_without_a_body_gets_the_default_ttl_and_no_label() {
    let gateway = Launch::embedded().flag("--default-ttl", "45s").start().await;
    let sent = Instant::now();
    let answer = gateway.call(Method::POST, "/locks/plain").send().await;
    assert_granted(&answer, "plain", 45_000, None, 5);
    assert_held_by(&gateway.post("plain", json!({})).await, "lock_held", None, 45_000, sent);
    let empty = gateway
        .call(Method::POST, "/locks/empty")
        .header("content-type", "text/plain")
        .send()
        .await;
    assert_granted(&empty, "empty", 45_000, None, 5);
    let preferred = gateway
        .call(Method::POST, "/locks/preferred")
        .header("prefer", "respond-async, wait=0")
        .send()
        .await;
    assert_granted(&preferred, "preferred", 45_000, None, 5);
    assert_eq!(preferred.header("preference-applied"), "wait=0");
    assert_eq!(answer.header("preference-applied"), "");
}

#[tokio::test]
async fn every_character_of_a_name_reaches_the_masters_and_returns() {
    let servers = masters(1);
    let gateway = patient_over(&servers).ready().await;
    let name = "AZaz09._:@/+~-";
    let granted = gateway.post(name, json!({ "ttl_ms": 60_000 })).await;
    let lease = assert_granted(&granted, name, 60_000, None, 1);
    assert_eq!(stored_on(&servers, name, |_| true), [0]);
    // The Location header has a path that leads to the lock. Some of its characters may be
    // percent-encoded.
    assert_eq!(gateway.get(granted.header("location")).await.json()["name"], name);
    let encoded: String = name.bytes().map(|byte| format!("%{byte:02x}")).collect();
    assert_eq!(
        gateway.get(&format!("/locks/{encoded}")).await.json()["fencing_token"],
        lease.fencing
    );
    let longest = "n".repeat(255);
    assert_granted(
        &gateway.post(&longest, json!({ "ttl_ms": 60_000 })).await,
        &longest,
        60_000,
        None,
        1,
    );
}

#[tokio::test]
async fn a_lock_that_nobody_extends_expires() {
    let servers = masters(3);
    for gateway in [Launch::embedded().start().await, patient_over(&servers).ready().await] {
        let lease = gateway.acquire_soon("short", json!({ "ttl_ms": 2_000 })).await;
        eventually("the lock is free", async || {
            (gateway.inspect("short").await["state"] == "free").then_some(())
        })
        .await;
        gateway.patch("short", &lease.token, 60_000).await.problem(404, "lock_not_found");
        gateway.delete("short", &lease.token).await.problem(404, "lock_not_found");
        assert!(gateway.acquire("short").await.fencing > lease.fencing);
        gateway.patch("short", &lease.token, 60_000).await.problem(409, "not_holder");
    }
}

#[tokio::test]
async fn a_token_of_another_acquisition_neither_extends_nor_releases() {
    let servers = masters(3);
    let gateway = patient_over(&servers).ready().await;
    let owner = json!({ "ttl_ms": 60_000, "owner": "first" });
    let sent = Instant::now();
    let first = Lease::from(&gateway.post("first", owner).await);
    let second = gateway.acquire("second").await;
    assert_held_by(
        &gateway.patch("first", &second.token, 60_000).await,
        "not_holder",
        Some("first"),
        60_000,
        sent,
    );
    assert_held_by(
        &gateway.delete("first", &second.token).await,
        "not_holder",
        Some("first"),
        60_000,
        sent,
    );
    gateway.delete("never-held", &second.token).await.problem(404, "lock_not_found");
    assert_eq!(gateway.inspect("first").await["fencing_token"], first.fencing);
    assert_eq!(gateway.delete("first", &first.token).await.status, 204);
}

/// The limit also holds if a minority of masters stores the lock for longer.
#[tokio::test]
async fn an_extension_shortens_nothing_and_reports_the_majoritys_life() {
    let servers = masters(3);
    let gateway = Launch::over(&servers).flag("--node-timeout", "6s").ready().await;
    // A gateway that catches up would prolong the lock on other masters too.
    gateway.all_nodes_caught_up().await;
    const LIFE_MS: u64 = 200_000;
    let sent = Instant::now();
    let lease = gateway.acquire_for("job", LIFE_MS).await;
    eventually("the first master prolongs the lock", async || {
        let prolonged = servers[0].cmd(&["PEXPIRE", "lock:job", "290000"]);
        (prolonged.integer() == 1).then_some(())
    })
    .await;
    let asked = Instant::now();
    let extended = gateway.patch("job", &lease.token, 60_000).await;
    let took = asked.elapsed().as_millis() as u64;
    assert_eq!((extended.status, &extended.json()["ttl_ms"]), (200, &json!(60_000)));
    let drift = |life: u64| life / 100 + 2;
    let validity = |answer: &Answer| number(&answer.json()["validity_ms"]);
    assert!(validity(&extended) <= LIFE_MS, "{extended:?}");
    // A master says how long the lock lives from when it carries out the extension. The gateway
    // cannot know when that was, so it counts from when it asked.
    let left = validity(&extended) + drift(LIFE_MS) + took;
    assert_left(left.min(LIFE_MS), LIFE_MS, sent);
    assert_left(number(&gateway.inspect("job").await["expires_in_ms"]), LIFE_MS, sent);
    // The keys on the masters were prolonged by hand. A master that loses its data votes again
    // after --max-ttl. So no answer may promise more than that.
    for server in &servers {
        server.cmd(&["PEXPIRE", "lock:job", "300000000000000"]);
    }
    let sent = Instant::now();
    let prolonged = gateway.patch("job", &lease.token, 60_000).await;
    assert_eq!(prolonged.status, 200, "{prolonged:?}");
    assert_left(validity(&prolonged) + drift(300_000), 300_000, sent);
}

#[tokio::test]
async fn a_lock_is_not_extended_beyond_max_hold() {
    let gateway = Launch::embedded()
        .flag("--max-ttl", "1s")
        .flag("--default-ttl", "1s")
        .flag("--max-hold", "1s");
    let gateway = gateway.start().await;
    // On a busy machine, the lock may expire between two extensions. Then the test takes it again.
    eventually("a lock is held for too long, and then released", async || {
        let lease = gateway.acquire_soon("job", json!({})).await;
        let refused = loop {
            let answer = gateway.patch("job", &lease.token, 1_000).await;
            match answer.status {
                200 => {}
                404 => return None,
                _ => break answer,
            }
        };
        let problem = refused.problem(409, "max_hold_reached");
        assert!(
            problem["detail"].as_str().unwrap().contains("a lock may be held for 1s"),
            "{problem:#}"
        );
        // The lock can still be released, unless it has expired.
        let released = gateway.delete("job", &lease.token).await;
        assert!([204, 404].contains(&released.status), "{released:?}");
        // The token is too old, also while nobody holds the lock.
        let late = gateway.patch("job", &lease.token, 1_000).await;
        late.problem(409, "max_hold_reached");
        (released.status == 204).then_some(())
    })
    .await;
}

#[tokio::test]
async fn two_gateways_over_the_same_masters_exclude_each_other() {
    let servers = masters(5);
    let one = patient_over(&servers).ready().await;
    let two = patient_over(&servers).ready().await;
    let ask = |owner: &str| json!({ "ttl_ms": 60_000, "owner": owner });
    let sent = Instant::now();
    let first = Lease::from(&one.post("job", ask("by one")).await);
    for (gateway, owner) in [(&two, "by two"), (&one, "by one again")] {
        let refused = gateway.post("job", ask(owner)).await;
        assert_held_by(&refused, "lock_held", Some("by one"), 60_000, sent);
    }

    // No gateway keeps a table of its locks, so a token is valid at any gateway.
    let extended = two.patch("job", &first.token, HOUR_MS).await;
    assert_eq!(extended.status, 200, "{extended:?}");
    assert_eq!(two.inspect("job").await["fencing_token"], first.fencing);
    assert_eq!(two.delete("job", &first.token).await.status, 204);
    let second = two.acquire_for("job", HOUR_MS).await;
    assert!(second.fencing > first.fencing);
    one.delete("job", &first.token).await.problem(409, "not_holder");
    assert_eq!(one.delete("job", &second.token).await.status, 204);
    clean_for_good(&servers, "job", 0).await;
}

#[tokio::test]
async fn the_order_of_masters_does_not_split_a_cluster() {
    let mut servers = masters(3);
    let one = patient_over(&servers).ready().await;
    servers.reverse();
    let two = patient_over(&servers).ready().await;
    let lease = one.acquire("job").await;
    two.post("job", json!({})).await.problem(409, "lock_held");
    assert_eq!(two.delete("job", &lease.token).await.status, 204);
}

fn set_nx_px(server: &RedisServer, name: &str) -> Resp {
    server.cmd(&["SET", &format!("lock:{name}"), "the-uuid-of-another-client", "NX", "PX", "60000"])
}

#[tokio::test]
async fn another_redlock_client_excludes_us_and_is_excluded_by_us() {
    let servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    let before = Instant::now();
    for server in &servers[2..] {
        assert_eq!(set_nx_px(server, "theirs"), Resp::Text("OK".into()));
    }
    assert_held_by(&gateway.post("theirs", json!({})).await, "lock_held", None, 60_000, before);
    let seen = gateway.inspect("theirs").await;
    assert_eq!(
        (&seen["state"], seen.get("owner"), seen.get("fencing_token")),
        (&json!("held"), None, None),
        "{seen:#}"
    );

    let lease = gateway.acquire("ours").await;
    let refused = servers.iter().filter(|server| set_nx_px(server, "ours") == Resp::Nil).count();
    assert!(refused >= 3, "only {refused} masters keep the other client out");
    assert_eq!(gateway.delete("ours", &lease.token).await.status, 204);
}

#[tokio::test]
async fn two_dead_masters_of_five_change_nothing_for_a_client() {
    let mut servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    let sent = Instant::now();
    let held = gateway.post("before", json!({ "ttl_ms": 60_000, "owner": "me" })).await;
    servers[0].kill();
    servers[3].kill();
    let lease = gateway.acquire("job").await;
    assert_held_by(&gateway.post("before", json!({})).await, "lock_held", Some("me"), 60_000, sent);
    assert_eq!(gateway.patch("job", &lease.token, 60_000).await.status, 200);
    assert_eq!(gateway.inspect("job").await["state"], "held");
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);
    assert_eq!(gateway.delete("before", &Lease::from(&held).token).await.status, 204);
    assert_eq!(gateway.readyz().await.status, 200);
}

#[tokio::test]
async fn three_dead_masters_of_five_are_503_until_one_is_back() {
    let mut servers = durable_masters(5);
    let gateway = patient_over(&servers).ready().await;
    let lease = gateway.acquire_for("held-before", HOUR_MS).await;
    let dead = [1, 2, 4];
    dead.iter().for_each(|at| servers[*at].kill());
    let alive = |at: usize| !dead.contains(&at);

    let refused = gateway.post("job", json!({ "ttl_ms": HOUR_MS })).await;
    let problem = refused.problem(503, "quorum_unavailable");
    assert_eq!((refused.header("retry-after"), &problem["retry_after_ms"]), ("1", &json!(1_000)));
    let nodes = problem["nodes"].as_array().unwrap();
    assert_eq!(nodes.len(), 5);
    for (at, node) in nodes.iter().enumerate() {
        assert_eq!(node["node"], format!("127.0.0.1:{}", servers[at].port()));
        let state = node["state"].as_str().unwrap();
        match alive(at) {
            true => assert!(matches!(state, "agreed" | "pending"), "{problem:#}"),
            false => assert!(
                state == "down" && !node["detail"].as_str().unwrap().is_empty(),
                "{problem:#}"
            ),
        }
    }
    eventually("the orphaned lock has been released", async || {
        stored_on(&servers, "job", alive).is_empty().then_some(())
    })
    .await;
    gateway.patch("held-before", &lease.token, 60_000).await.problem(503, "outcome_unknown");
    assert_eq!(gateway.inspect("held-before").await["state"], "unknown");
    gateway.get("/locks").await.problem(503, "quorum_unavailable");

    let unready = gateway.readyz().await;
    assert_eq!((unready.status, &unready.json()["status"]), (503, &json!("no_quorum")));
    assert_eq!(gateway.get("/healthz").await.status, 503);
    assert_eq!(gateway.get("/livez").await.status, 200, "/livez does not depend on Redis");
    let connecting = unready.json()["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|n| n["state"] == "connecting")
        .count();
    assert_eq!(connecting, 3);

    servers[1].restart();
    eventually("ready again", async || (gateway.readyz().await.status == 200).then_some(())).await;
    gateway.acquire("job").await;
}

#[tokio::test]
async fn a_gateway_started_before_its_masters_becomes_ready() {
    let mut servers = durable_masters(3);
    drop(patient_over(&servers).ready().await);
    servers.iter_mut().for_each(RedisServer::kill);
    let gateway = patient_over(&servers).start().await;
    assert_eq!(gateway.readyz().await.status, 503);
    gateway.post("job", json!({})).await.problem(503, "quorum_unavailable");
    servers[0].restart();
    servers[2].restart();
    eventually("ready", async || (gateway.readyz().await.status == 200).then_some(())).await;
    gateway.acquire("job").await;
}

/// Acquires, extends and releases a lock while one of five masters hangs.
async fn lifecycle_beside_a_hung_master(gateway: &Gateway, name: &str) {
    let lease = gateway.acquire_for(name, HOUR_MS).await;
    assert_eq!(gateway.patch(name, &lease.token, HOUR_MS).await.status, 200);
    assert_eq!(gateway.delete(name, &lease.token).await.status, 204);
}

#[tokio::test]
async fn a_hung_master_keeps_no_orphaned_lock() {
    let servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    servers[2].stop();
    lifecycle_beside_a_hung_master(&gateway, "job").await;
    servers[2].cont();
    clean_for_good(&servers, "job", 0).await;
}

#[tokio::test]
async fn a_release_reaches_a_hung_master_after_its_connection_ended() {
    let servers = masters(5);
    // The gateway closes the connection after twice this time.
    let gateway = patient_over(&servers).flag("--node-timeout", "1s").ready().await;
    servers[4].stop();
    let lease = gateway.acquire_soon("job", json!({ "ttl_ms": HOUR_MS })).await;
    // The acquire is in the socket of the connection that is closed here. The master may still run
    // it.
    eventually("the connection is closed", async || {
        let health = gateway.readyz().await.json();
        (health["nodes"][4]["state"] == "connecting").then_some(())
    })
    .await;
    released(&gateway, "job", &lease).await;
    servers[4].cont();
    clean_for_good(&servers, "job", 0).await;
}

/// Whether a server has run an acquire of a lock with a token of at least `least`. All requests
/// that were in the server's sockets before this call have run.
fn has_run_an_acquire(server: &RedisServer, name: &str, least: u64) -> bool {
    // The server may answer this one before it reads its other sockets.
    server.cmd(&["PING"]);
    let fence = server.cmd(&["GET", &format!("{{lock:{name}}}:fence")]);
    // The undo of the acquire restores the watermark that stood before, with an end in its text.
    fence != Resp::Nil
        && (fence.text().contains('@')
            || fence.text()[..16].parse::<u64>().expect("a number") >= least)
}

#[tokio::test]
async fn three_hung_masters_are_503_and_keep_no_orphaned_lock() {
    let servers = masters(5);
    let launch = patient(Launch::over(&servers)).flag("--node-timeout", "300ms");
    let gateway = launch.ready().await;
    let body = json!({ "ttl_ms": HOUR_MS });
    for attempt in 1.. {
        assert!(attempt < 20, "the masters were always stopped between a heartbeat and its answer");
        let job = format!("job-{attempt}");
        gateway.all_nodes_admitted().await;
        let lease = gateway.acquire_soon(&job, body.clone()).await;
        released(&gateway, &job, &lease).await;
        no_master_stores(&servers, &job).await;
        servers[..3].iter().for_each(RedisServer::stop);
        let refused = gateway.post(&job, body.clone()).await;
        let problem = refused.problem(503, "quorum_unavailable");
        servers[..3].iter().for_each(RedisServer::cont);
        let is_asked = problem["nodes"].as_array().unwrap()[..3].iter().all(|node| {
            let is_late = node["state"] == "timeout";
            assert!(!is_late || node["detail"] == "no answer within 800ms", "{problem:#}");
            is_late
        });
        // If a master had to answer a heartbeat first, it never received the acquire of the
        // abandoned request. If it was too busy for that, its connection was closed.
        let least = lease.fencing + 1;
        if is_asked && servers.iter().all(|server| has_run_an_acquire(server, &job, least)) {
            return clean_for_good(&servers, &job, least).await;
        }
        no_master_stores(&servers, &job).await;
    }
}

mod measured {
    use super::*;

    #[tokio::test]
    async fn a_hung_master_delays_nobody() {
        let servers = masters(5);
        let gateway = patient_over(&servers).ready().await;
        let mut run = 0;
        measured("three requests beside a hung master", async || {
            // The connection of the master must be open, so that requests can wait for it.
            servers[2].cont();
            gateway.all_nodes_admitted().await;
            servers[2].stop();
            run += 1;
            let name = format!("job-{run}");
            let since = Instant::now();
            lifecycle_beside_a_hung_master(&gateway, &name).await;
            let took = since.elapsed();
            let is_quick = took < WELL_BELOW_A_TIMEOUT;
            if is_quick { Ok(()) } else { Err(format!("{took:?}: it waited for the node timeout")) }
        })
        .await;
    }
}
