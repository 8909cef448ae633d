//! Each client's share of the masters' memory. It is not enforced while memory is free, only when
//! it becomes short.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::http::auth::is_ready;
use crate::http::keys::{HOLDER, Key, file, key};
use crate::support::client::{Answer, Lease, Raw, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisOptions, RedisServer, daily_or_long, eventually, masters};
use crate::support::metrics::Samples;
use crate::support::waiters::patient_over;

const CONNECTIONS: u32 = 8;

/// Masters that refuse writes once they use this much memory.
fn small_masters(max_memory: &str) -> Vec<RedisServer> {
    let args = ["--maxmemory", max_memory, "--maxmemory-policy", "noeviction"].map(String::from);
    (0..3)
        .map(|_| {
            RedisServer::start_with(RedisOptions {
                args: args.clone().into(),
                ..Default::default()
            })
        })
        .collect()
}

/// Acquires new names over several connections. Each connection sends its next request as soon as
/// it has an answer.
struct Taker {
    connections: JoinSet<()>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    granted: AtomicU32,
    refused: AtomicU32,
    failed: AtomicU32,
    is_over: AtomicBool,
}

impl Taker {
    async fn start(gateway: &Gateway, key: Option<&Key>, most: u32) -> Self {
        let mut connections = JoinSet::new();
        let counts = Arc::new(Counts::default());
        let authorization =
            key.map_or(String::new(), |key| format!("authorization: {}\r\n", key.bearer()));
        for first in 0..CONNECTIONS {
            let mut connection = gateway.raw().await;
            let counts = counts.clone();
            let authorization = authorization.clone();
            connections.spawn(async move {
                for number in (first..most).step_by(CONNECTIONS as usize) {
                    if counts.is_over.load(Ordering::Relaxed) {
                        return;
                    }
                    let status =
                        take(&mut connection, &format!("new-{number}"), &authorization).await;
                    let count = match status {
                        201 => &counts.granted,
                        429 => &counts.refused,
                        _ => &counts.failed,
                    };
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        Self { connections, counts }
    }

    /// Waits until one more request was not granted.
    async fn until_refused(&self) {
        eventually("a request is not granted", async || {
            let not_granted = [&self.counts.refused, &self.counts.failed];
            (not_granted.iter().any(|count| count.load(Ordering::Relaxed) > 0)).then_some(())
        })
        .await;
    }

    /// How many requests were granted, how many were refused because of the client's share, and how
    /// many failed.
    async fn end(self) -> (u32, u32, u32) {
        let Self { connections, counts } = self;
        counts.is_over.store(true, Ordering::Relaxed);
        connections.join_all().await;
        counts.all()
    }

    async fn finish(self) -> (u32, u32, u32) {
        self.connections.join_all().await;
        self.counts.all()
    }
}

impl Counts {
    fn all(&self) -> (u32, u32, u32) {
        let [granted, refused, failed] =
            [&self.granted, &self.refused, &self.failed].map(|count| count.load(Ordering::Relaxed));
        (granted, refused, failed)
    }
}

async fn take(connection: &mut Raw, name: &str, authorization: &str) -> u16 {
    let path = lock_path(name);
    let body = r#"{"ttl_ms":300000}"#;
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{authorization}\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    connection.write(request).await;
    connection.answer().await.status
}

async fn post(gateway: &Gateway, key: &Key, name: &str, body: Value) -> Answer {
    key.call(gateway, Method::POST, &lock_path(name)).json(&body).send().await
}

/// Acquires and releases names one after another. Returns how many acquires and how many releases
/// succeeded.
async fn is_served(gateway: &Gateway, key: &Key, names: u32) -> u32 {
    let mut served = 0;
    for number in 0..names {
        let name = format!("modest-{number}");
        let answer = post(gateway, key, &name, json!({ "ttl_ms": 60_000 })).await;
        if answer.status == 201 {
            served += 1;
            let token = answer.json()["token"].as_str().expect("a token").to_owned();
            assert_eq!(key.delete(gateway, &name, &token).await.status, 204);
        }
    }
    served
}

/// As long as the masters are nearly empty, an address is refused no name: 4,000 names, or 20,000 in
/// the long form.
#[tokio::test]
async fn one_address_takes_names_at_full_speed_while_memory_is_free() {
    let servers = masters(3);
    let gateway = patient_over(&servers).ready().await;
    let names = daily_or_long(4_000, 20_000);
    assert_eq!(Taker::start(&gateway, None, names).await.finish().await, (names, 0, 0));
    assert_eq!(Samples::of(&gateway).await.get("redlock_quota_use_ratio", &[]), 0.0);
}

/// A greedy client must not fill the masters so far that no other client gets a lock.
#[tokio::test]
async fn a_modest_client_is_served_beside_a_greedy_one() {
    let servers = small_masters("5mb");
    let greedy = key("greedy", HOLDER, "*").await;
    let modest = key("modest", HOLDER, "*").await;
    let file = file(&[&greedy, &modest]);
    let gateway = patient_over(&servers)
        .flag("--auth-keys", file.path())
        .flag("--public", "metrics")
        .start()
        .await;
    is_ready(&gateway).await;
    let taker = Taker::start(&gateway, Some(&greedy), u32::MAX).await;
    taker.until_refused().await;

    let names = 300;
    let served = is_served(&gateway, &modest, names).await;
    let refused = post(&gateway, &greedy, "one-more", json!({})).await;
    let (granted, by_share, failed) = taker.end().await;
    assert!(
        served * 100 >= names * 99,
        "{served} of {names} beside {granted} granted, {by_share} refused, {failed} failed"
    );
    assert!(
        granted > 2000 && by_share > 0 && failed == 0,
        "{granted} granted, {by_share} refused, {failed} failed"
    );

    let problem = refused.problem(429, "quota_exceeded");
    let detail = problem["detail"].as_str().expect("a text");
    assert!(detail.contains("the masters' memory is short") && detail.contains("MiB"), "{detail}");
    assert_eq!((refused.header("retry-after"), &problem["retry_after_ms"]), ("1", &json!(1000)));
    let metrics = Samples::of(&gateway).await;
    assert!(metrics.get("redlock_quota_exceeded_total", &[]) > f64::from(by_share));
    let largest_use = metrics.get("redlock_quota_use_ratio", &[]);
    assert!((0.95..2.0).contains(&largest_use), "the greedy client uses {largest_use}");
    for server in &servers {
        let errors = server.cmd(&["INFO", "errorstats"]).text();
        assert!(!errors.contains("OOM"), "{errors}");
    }
}

#[tokio::test]
async fn full_masters_limit_holders_and_refusals_say_why() {
    let servers = masters(3);
    let holder = key("holder", HOLDER, "*").await;
    let newcomer = key("newcomer", HOLDER, "*").await;
    let file = file(&[&holder, &newcomer]);
    let gateway = patient_over(&servers)
        .flag("--auth-keys", file.path())
        .flag("--public", "metrics")
        .start()
        .await;
    is_ready(&gateway).await;
    let (granted, ..) = Taker::start(&gateway, Some(&holder), 400).await.finish().await;
    assert_eq!(granted, 400);
    let all = |max_memory: &str| {
        for server in &servers {
            server.cmd(&["CONFIG", "SET", "maxmemory", max_memory]);
        }
    };
    all("1");
    eventually("a client with many locks is refused", async || {
        (post(&gateway, &holder, "more", json!({})).await.status == 429).then_some(())
    })
    .await;
    post(&gateway, &newcomer, "first", json!({})).await.problem(503, "quorum_unavailable");
    all("0");
    for key in [&holder, &newcomer] {
        eventually("there is room again", async || {
            let name = format!("after/{}", std::ptr::eq(key, &newcomer));
            (post(&gateway, key, &name, json!({})).await.status == 201).then_some(())
        })
        .await;
    }
}

/// While the masters are full, a client with more than about 150 locks gets the gateway's refusal.
/// A client with fewer locks gets the refusal of the masters.
#[tokio::test]
async fn each_slot_and_each_lock_of_a_set_counts_in_the_share() {
    let servers = masters(3);
    let with_slots = key("slots", HOLDER, "*").await;
    let with_sets = key("sets", HOLDER, "*").await;
    let with_half = key("half", HOLDER, "*").await;
    let without = key("without", HOLDER, "*").await;
    let file = file(&[&with_slots, &with_sets, &with_half, &without]);
    let gateway = patient_over(&servers).flag("--auth-keys", file.path()).start().await;
    is_ready(&gateway).await;
    let take_slots = async |key: &Key, name: &str, count: u32| {
        let body = json!({ "slots": count, "take": count, "ttl_ms": 300_000 });
        Lease::from(&post(&gateway, key, name, body).await)
    };
    let take_sets = async |key: &Key, name: &str, count: u32| {
        for set in 0..count {
            let names: Vec<_> = (0..32).map(|number| format!("{name}-{set}-{number}")).collect();
            let body = json!({ "names": names, "ttl_ms": 300_000 });
            Lease::from(&key.call(&gateway, Method::POST, "/locks").json(&body).send().await);
        }
    };
    take_slots(&with_slots, "pool", 256).await;
    take_sets(&with_sets, "set", 8).await;
    take_slots(&with_half, "half", 64).await;
    take_sets(&with_half, "half", 2).await;
    // A released slot leaves its watermark, which counts about half as much as a held slot.
    let released = take_slots(&without, "released", 256).await;
    assert_eq!(without.delete(&gateway, "released", &released.token).await.status, 204);

    for server in &servers {
        server.cmd(&["CONFIG", "SET", "maxmemory", "1"]);
    }
    for key in [&with_slots, &with_sets] {
        let refused = eventually("a client with many locks is refused", async || {
            let answer = post(&gateway, key, "more", json!({})).await;
            (answer.status == 429).then_some(answer)
        })
        .await;
        refused.problem(429, "quota_exceeded");
    }
    for key in [&with_half, &without] {
        post(&gateway, key, "more", json!({})).await.problem(503, "quorum_unavailable");
    }
}

#[tokio::test]
async fn embedded_nodes_share_half_of_the_memory_budget() {
    let greedy = key("greedy", HOLDER, "*").await;
    let modest = key("modest", HOLDER, "*").await;
    let file = file(&[&greedy, &modest]);
    let launch = Launch::embedded()
        .flag("--auth-keys", file.path())
        .flag("--public", "metrics")
        .flag("--memory-budget", "64MiB");
    let gateway = launch.start().await;
    let taker = Taker::start(&gateway, Some(&greedy), u32::MAX).await;
    taker.until_refused().await;
    let served = is_served(&gateway, &modest, 100).await;
    let (granted, by_share, failed) = taker.end().await;
    assert!(
        served >= 99 && granted > 1000 && failed == 0,
        "{served}: {granted}, {by_share}, {failed}"
    );
    let metrics = Samples::of(&gateway).await;
    let node = [("node", "embedded-1")];
    let max = metrics.get("redlock_node_max_memory_bytes", &node);
    // The nodes are inside the gateway. They get half of the memory that the process itself leaves
    // of the budget: 8 MiB, divided by five.
    assert_eq!(max, f64::from((8 << 20) / 5_u32));
    let used = metrics.get("redlock_node_used_memory_bytes", &node);
    assert!(used > max / 2.0 && used < max, "{used} of {max}");
}

#[tokio::test]
async fn metrics_show_the_memory_of_each_master() {
    let mut servers = small_masters("64mb");
    servers.truncate(1);
    servers.extend(masters(2));
    let gateway = patient_over(&servers).flag("--master-memory", "3GiB").ready().await;
    for (server, max) in servers.iter().zip([64_u64 << 20, 3 << 30, 3 << 30]) {
        let node = server.url().trim_start_matches("redis://").to_owned();
        let metrics = Samples::of(&gateway).await;
        assert_eq!(metrics.get("redlock_node_max_memory_bytes", &[("node", &node)]), max as f64);
        assert!(metrics.get("redlock_node_used_memory_bytes", &[("node", &node)]) > 500_000.0);
    }
}

/// A tiny lock leaves a watermark that lives much longer than the lock. Many of them would fill the
/// masters.
#[tokio::test]
async fn watermarks_of_short_locks_are_gone_in_seconds() {
    let servers = masters(3);
    let launch = Launch::over(&servers).flag("--clock-skew", "100ms");
    let gateway = launch.flag("--node-timeout", "5s").ready().await;
    let tiny = gateway.acquire_soon("tiny", json!({ "ttl_ms": 4_000 })).await;
    let invented = format!("1.{}.{}", tiny.fencing, "a".repeat(40));
    let call = gateway.call(Method::DELETE, lock_path("free")).header("lock-token", invented);
    call.decided().await.problem(404, "lock_not_found");
    let fences = |server: &RedisServer| -> Vec<i64> {
        ["{lock:tiny}:fence", "{lock:free}:fence"]
            .map(|key| server.cmd(&["PTTL", key]).integer())
            .to_vec()
    };
    for server in &servers {
        let left = fences(server);
        assert!(left.iter().all(|left| *left < 10_000), "{left:?} ms");
    }
}
