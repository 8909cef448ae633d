//! A lock that is kept for a least time, although it is released earlier (`hold_at_least_ms`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Method;
use serde_json::json;

use crate::support::client::{Call, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{daily_or_long, eventually, masters};

async fn held_for(gateway: &Gateway, name: &str, hold_ms: u64) -> Lease {
    Lease::from(&gateway.post(name, json!({ "ttl_ms": 60_000, "hold_at_least_ms": hold_ms })).await)
}

/// The time that the lock of [`lifecycle`] is kept, less 20 ms for different clocks.
const KEPT: Duration = Duration::from_millis(1_480);

/// A release before the time is over ends the rights of the holder, and frees nothing.
async fn lifecycle(gateway: &Gateway) {
    let begun = Instant::now();
    let lease = held_for(gateway, "job", 1_500).await;
    assert!(lease.token.starts_with("2-1500."), "{}", &lease.token[..8]);
    assert_eq!(gateway.patch("job", &lease.token, 60_000).await.status, 200);
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);

    let refused = gateway.post("job", json!({})).await;
    if refused.status == 201 {
        assert!(begun.elapsed() >= KEPT, "{:?}", begun.elapsed());
        assert_eq!(gateway.delete("job", &Lease::from(&refused).token).await.status, 204);
    } else {
        let problem = refused.problem(409, "lock_held");
        let left = problem["retry_after_ms"].as_u64().expect("a time");
        assert!((1..=1_500).contains(&left) && left == problem["expires_in_ms"], "{problem:#}");
        assert!(problem.get("holder").is_none() && problem.get("acquired_at").is_none());
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.starts_with("nobody holds it, but nobody can get it for "), "{detail}");
    }
    gateway.patch("job", &lease.token, 60_000).await.problem(404, "lock_not_found");
    gateway.delete("job", &lease.token).await.problem(404, "lock_not_found");

    // A waiter gets the lock as soon as the time is over.
    let waited = gateway.post("job", json!({ "wait_ms": 20_000 })).await;
    let next = Lease::from(&waited);
    assert!(begun.elapsed() >= KEPT, "{:?}", begun.elapsed());
    assert!(next.fencing > lease.fencing);
    assert_eq!(gateway.delete("job", &next.token).await.status, 204);

    // After the time, a release frees the lock.
    let begun = Instant::now();
    let lease = held_for(gateway, "short", 50).await;
    eventually("the time is over", async || {
        (begun.elapsed() > Duration::from_millis(200)).then_some(())
    })
    .await;
    assert_eq!(gateway.delete("short", &lease.token).await.status, 204);
    gateway.acquire("short").await;
}

#[tokio::test]
async fn a_lock_is_kept_for_its_least_time_on_embedded_nodes() {
    lifecycle(&Launch::embedded().start().await).await;
}

#[tokio::test]
async fn a_lock_is_kept_for_its_least_time_on_masters() {
    let servers = masters(3);
    let launch = Launch::over(&servers).flag("--clock-skew", "10s").flag("--node-timeout", "10s");
    lifecycle(&launch.ready().await).await;
}

#[tokio::test]
async fn force_and_the_key_of_the_request_free_a_kept_lock_at_once() {
    let gateway = Launch::embedded().start().await;
    let lease = held_for(&gateway, "job", 60_000).await;
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);
    let forced =
        gateway.call(Method::DELETE, format!("{}?force=true", lock_path("job"))).send().await;
    assert_eq!(forced.status, 204, "{forced:?}");
    gateway.acquire("job").await;

    let ask = async || {
        let call = gateway
            .call(Method::POST, lock_path("other"))
            .json(&json!({ "hold_at_least_ms": 60_000 }));
        call.header("idempotency-key", "a-job-of-one-monday").send().await
    };
    let lease = Lease::from(&ask().await);
    assert_eq!(Lease::from(&ask().await), lease, "the repetition gets the same token");
    let by_key = gateway.call(Method::DELETE, lock_path("other"));
    assert_eq!(by_key.header("idempotency-key", "a-job-of-one-monday").send().await.status, 204);
    gateway.acquire("other").await;
}

/// A majority of the masters shows that the holder has released the lock. So nobody else can hold it,
/// whatever the silent master stores.
#[tokio::test]
async fn a_kept_lock_is_freed_by_key_or_force_while_a_master_is_down() {
    let mut servers = masters(3);
    let launch = Launch::over(&servers).flag("--clock-skew", "10s").flag("--node-timeout", "10s");
    let gateway = launch.ready().await;
    let key = |call: Call| call.header("idempotency-key", "a-job-of-one-monday");
    let ask = async |name: &str| {
        let hold = json!({ "ttl_ms": 60_000, "hold_at_least_ms": 60_000 });
        let lease = key(gateway.call(Method::POST, lock_path(name)).json(&hold)).send().await;
        let lease = Lease::from(&lease);
        assert_eq!(gateway.patch(name, &lease.token, 60_000).await.status, 200);
        assert_eq!(gateway.delete(name, &lease.token).await.status, 204);
        lease
    };
    let (by_key, _) = (ask("by-key").await, ask("by-force").await);
    let owner = ask("by-another").await;
    servers[2].kill();

    let another = gateway.call(Method::DELETE, lock_path("by-another"));
    let another = another.header("idempotency-key", "a-job-of-another-monday").send().await;
    another.problem(404, "lock_not_found");
    gateway.post("by-another", json!({})).await.problem(409, "lock_held");
    gateway.delete("by-another", &owner.token).await.problem(404, "lock_not_found");
    // The key's own repeated request is refused like any other, because it has released the lock.
    let again = key(gateway.call(Method::POST, lock_path("by-another"))).send().await;
    again.problem(409, "lock_held");

    let freed = key(gateway.call(Method::DELETE, lock_path("by-key"))).send().await;
    assert_eq!(freed.status, 204, "{freed:?}");
    assert!(gateway.acquire("by-key").await.fencing > by_key.fencing);
    key(gateway.call(Method::DELETE, lock_path("by-key"))).send().await.problem(409, "not_holder");

    let path = format!("{}?force=true", lock_path("by-force"));
    let forced = gateway.call(Method::DELETE, path).send().await;
    assert_eq!(forced.status, 204, "{forced:?}");
    gateway.acquire("by-force").await;
}

#[tokio::test]
async fn a_bad_least_time_is_refused() {
    let gateway = Launch::embedded().start().await;
    for bad in [json!(300_001), json!(-1), json!(1.5), json!("1m"), json!(null)] {
        let refused = gateway.post("job", json!({ "hold_at_least_ms": bad })).await;
        let detail = refused.problem(400, "invalid_body")["detail"].as_str().unwrap().to_owned();
        let words =
            format!("hold_at_least_ms is {bad}; allowed are whole milliseconds from 0 to 300000");
        assert!(detail.starts_with(&words), "{detail}");
    }
    for token in ["2-0", "2-01500", "2-+5", "2-100000000", "2-", "2", "3-5"] {
        let token = format!("{token}.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b");
        gateway.delete("job", &token).await.problem(400, "invalid_token");
    }
}

/// The time to hold is in the token. A client that changes it keeps the lock for no longer than a
/// POST may ask for.
#[tokio::test]
async fn a_changed_time_in_the_token_is_bounded() {
    let gateway =
        Launch::embedded().flag("--max-ttl", "1m").flag("--default-ttl", "1m").start().await;
    let lease = Lease::from(&gateway.post("job", json!({})).await);
    let longer = lease.token.replacen("1.", "2-86400000.", 1);
    assert_eq!(gateway.delete("job", &longer).await.status, 204);
    let refused = gateway.post("job", json!({})).await;
    if refused.status != 201 {
        let left = refused.problem(409, "lock_held")["expires_in_ms"].as_u64().expect("a time");
        assert!(left <= 60_000, "{left}");
    }
}

/// Many hosts fire a job at slightly different times, through three gateways. Each job is over at
/// once, and still only one of them runs in each period.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_jobs_that_fire_one_runs_in_each_period() {
    let (periods, hosts, spread_ms) = daily_or_long((4, 20, 400), (100, 50, 2_000));
    let servers = masters(3);
    let launch = || {
        let launch = Launch::over(&servers).flag("--cluster", "cron");
        launch.flag("--clock-skew", "10s").flag("--node-timeout", "10s").flag("--default-ttl", "5m")
    };
    let gateways =
        Arc::new([launch().ready().await, launch().ready().await, launch().ready().await]);
    for period in 0..periods {
        let name = format!("cron/{period}");
        let jobs: Vec<_> = (0..hosts)
            .map(|host| {
                let (gateways, name) = (gateways.clone(), name.clone());
                tokio::spawn(async move {
                    // The clocks of the hosts differ by up to `spread_ms`.
                    tokio::time::sleep(Duration::from_millis(host * spread_ms / hosts)).await;
                    let gateway = &gateways[host as usize % 3];
                    let body = json!({ "hold_at_least_ms": 60_000 });
                    let answer = gateway.post(&name, body).await;
                    if answer.status != 201 {
                        assert_eq!(answer.status, 409, "{answer:?}");
                        return 0;
                    }
                    let lease = Lease::from(&answer);
                    assert_eq!(gateway.delete(&name, &lease.token).await.status, 204);
                    1
                })
            })
            .collect();
        let mut runs = 0;
        for job in jobs {
            runs += job.await.expect("a job");
        }
        assert_eq!(runs, 1, "period {period}");
    }
}
