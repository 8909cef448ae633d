//! Quotas: what one client may keep on the masters.

use serde_json::json;

use crate::support::gateway::Launch;
use crate::support::harness::{RedisServer, eventually, masters};
use crate::support::metrics::Samples;

#[tokio::test]
async fn locks_beyond_the_quota_are_429_until_some_are_released_or_have_ended() {
    let gateway = Launch::embedded().flag("--max-locks-per-client", "2").start().await;
    let first = gateway.acquire("a").await;
    assert_eq!(gateway.post("b", json!({ "ttl_ms": 400 })).await.status, 201);
    let refused = gateway.post("c", json!({})).await;
    let problem = refused.problem(429, "quota_exceeded");
    assert!(problem["detail"].as_str().unwrap().contains("2 locks"), "{problem:#}");
    assert_eq!(gateway.patch("a", &first.token, 60_000).await.status, 200, "what is held is extended all the same");
    eventually("one has ended", async || (gateway.post("c", json!({})).await.status == 201).then_some(())).await;
    gateway.post("d", json!({})).await.problem(429, "quota_exceeded");
    assert_eq!(gateway.delete("a", &first.token).await.status, 204);
    assert_eq!(gateway.post("d", json!({})).await.status, 201);
    let metrics = Samples::of(&gateway).await;
    assert!(metrics.get("redlock_quota_exceeded_total", &[("quota", "locks")]) >= 2.0);
}

#[tokio::test]
async fn metadata_and_new_names_have_quotas_and_a_lock_that_another_holds_costs_nothing() {
    let gateway =
        Launch::embedded().flag("--max-bytes-per-client", "2500").flag("--max-new-names-per-minute", "4").start().await;
    let big = json!({ "metadata": { "k": "v".repeat(1_000) } });
    assert_eq!(gateway.post("a", big.clone()).await.status, 201);
    let refused = gateway.post("b", big).await;
    assert!(refused.problem(429, "quota_exceeded")["detail"].as_str().unwrap().contains("2500 bytes"));
    for _ in 0..6 {
        gateway.post("a", json!({})).await.problem(409, "lock_held");
    }
    for name in ["b", "c", "b", "d", "b"] {
        let lease = gateway.acquire(name).await;
        assert_eq!(gateway.delete(name, &lease.token).await.status, 204);
    }
    let refused = gateway.post("e", json!({})).await;
    let problem = refused.problem(429, "quota_exceeded");
    assert!(problem["detail"].as_str().unwrap().contains("4 new names"), "{problem:#}");
    // Four a minute are one in a quarter of it.
    assert!((10_000..=15_000).contains(&problem["retry_after_ms"].as_u64().unwrap()), "{problem:#}");
}

/// Each left a fence: a key that may only release filled the masters.
#[tokio::test]
async fn releases_of_names_that_are_not_known_here_count_as_new_names_and_those_of_ones_own_do_not() {
    let gateway = Launch::embedded().flag("--max-new-names-per-minute", "2").start().await;
    let own = gateway.acquire("own").await;
    let invented = format!("1.{}.{}", own.fencing, "a".repeat(40));
    gateway.delete("free", &invented).await.problem(404, "lock_not_found");
    gateway.delete("another", &invented).await.problem(429, "quota_exceeded");
    assert_eq!(gateway.delete("own", &own.token).await.status, 204);
    gateway.delete("own", &own.token).await.problem(404, "lock_not_found");
}

/// They outlived their locks by half an hour: tiny TTLs filled the masters.
#[tokio::test]
async fn what_a_tiny_ttl_or_the_release_of_a_free_lock_leaves_on_the_masters_is_gone_in_seconds() {
    let servers = masters(3);
    let gateway = Launch::over(&servers).flag("--clock-skew", "100ms").ready().await;
    let tiny = gateway.acquire_for("tiny", 2_000).await;
    let invented = format!("1.{}.{}", tiny.fencing, "a".repeat(40));
    gateway.delete("free", &invented).await.problem(404, "lock_not_found");
    let fences = |server: &RedisServer| -> Vec<i64> {
        ["{lock:tiny}:fence", "{lock:free}:fence"].map(|key| server.cmd(&["PTTL", key]).integer()).to_vec()
    };
    for server in &servers {
        let left = fences(server);
        assert!(left.iter().all(|left| *left < 10_000), "{left:?} ms");
    }
}
