//! The order of a line by HTTP: priorities, requests of which only the newest waits, and what a
//! holder sees of the line when it extends.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::Method;
use serde_json::json;

use crate::support::client::{Call, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{daily_or_long, eventually, masters};
use crate::support::waiters::{
    HOUR_MS, answer, long_waiting_acquire, nothing_is_left, patient, patient_over, released,
    start_waiting, waiting_is,
};

/// How long the place of a refused waiter is kept.
const PLACE_KEPT: Duration = Duration::from_secs(10);

fn with_priority(gateway: &Gateway, name: &str, priority: u8) -> Call {
    let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS, "priority": priority });
    gateway.call(Method::POST, lock_path(name)).json(&body)
}

fn newest(gateway: &Gateway, name: &str, key: &str) -> Call {
    let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS, "queue": "newest" });
    let call = gateway.call(Method::POST, lock_path(name)).json(&body);
    if key.is_empty() { call } else { call.header("idempotency-key", key) }
}

#[tokio::test]
async fn ten_waiters_are_served_by_priority_and_then_by_arrival() {
    const PRIORITIES: [u8; 10] = [5, 0, 9, 5, 1, 9, 5, 0, 7, 5];
    let servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    let held = gateway.acquire_for("job", HOUR_MS).await;
    let grants = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for (place, priority) in PRIORITIES.into_iter().enumerate() {
        let asked = with_priority(&gateway, "job", priority);
        let release = gateway.call(Method::DELETE, "/locks/job");
        let grants = grants.clone();
        waiters.push(tokio::spawn(async move {
            let lease = Lease::from(&asked.send().await);
            grants.lock().unwrap().push((priority, place));
            assert_eq!(release.header("lock-token", &lease.token).send().await.status, 204);
        }));
        waiting_is(&gateway, place as u64 + 1, 1).await;
    }
    let line = gateway.inspect("job").await;
    let shown = line["waiters"].as_array().expect("a list").iter();
    let shown: Vec<_> = shown.map(|waiter| waiter["priority"].as_u64()).collect();
    let nine_first = [Some(9), Some(9), Some(7), None, None, None, None, Some(1), Some(0), Some(0)];
    assert_eq!(shown, nine_first, "5 is not shown: {line:#}");
    released(&gateway, "job", &held).await;
    for waiter in waiters {
        waiter.await.expect("granted and released");
    }
    let mut expected: Vec<_> = PRIORITIES.into_iter().zip(0..).collect();
    expected.sort_by_key(|(priority, place)| (9 - priority, *place));
    assert_eq!(*grants.lock().unwrap(), expected);
    nothing_is_left(&gateway).await;
}

#[tokio::test]
async fn a_refused_waiter_sees_its_place_by_priority() {
    let gateway = patient(Launch::embedded()).start().await;
    let held = gateway.acquire_for("job", HOUR_MS).await;
    let _normal = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    let place = async |priority: u8, key: &str| {
        let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": 10, "priority": priority });
        let call = gateway.call(Method::POST, "/locks/job").json(&body);
        let refused = call.header("idempotency-key", key).send().await;
        refused.problem(409, "lock_held")["queue_position"].as_u64()
    };
    let began = Instant::now();
    let places = [
        place(9, "urgent-urgent-urgent").await,
        place(0, "patient-patient-patient").await,
        place(5, "normal-normal-normal").await,
    ];
    assert_eq!(places[0], Some(1));
    // The second one follows the other two. The third one passes it, if the places are still kept.
    if began.elapsed() < PLACE_KEPT {
        assert_eq!(places[1..], [Some(3), Some(3)]);
    }
    released(&gateway, "job", &held).await;
}

#[tokio::test]
async fn of_many_builds_only_the_newest_waits() {
    let builds = daily_or_long(200, 1_000);
    let servers = masters(3);
    let gateway = patient_over(&servers).ready().await;
    let running = gateway.acquire_for("deploy", HOUR_MS).await;
    let ordinary = start_waiting(&gateway, long_waiting_acquire(&gateway, "deploy")).await;
    let mut waits = start_waiting(&gateway, newest(&gateway, "deploy", "")).await;
    // The answer to the older build shows that the newer one waits.
    for build in 1..builds {
        let newer = tokio::spawn(newest(&gateway, "deploy", "").send());
        let superseded = answer(std::mem::replace(&mut waits, newer)).await;
        let problem = superseded.problem(409, "superseded");
        let detail = problem["detail"].as_str().expect("a text");
        assert!(detail.contains("do not try again"), "build {build}: {detail}");
    }
    waiting_is(&gateway, 2, 1).await;
    assert_eq!(gateway.inspect("deploy").await["waiters_total"], 2);
    released(&gateway, "deploy", &running).await;
    let lease = Lease::from(&answer(ordinary).await);
    released(&gateway, "deploy", &lease).await;
    let lease = Lease::from(&answer(waits).await);
    released(&gateway, "deploy", &lease).await;
    nothing_is_left(&gateway).await;
}

#[tokio::test]
async fn of_builds_at_the_same_time_one_waits() {
    const BUILDS: usize = 50;
    let gateway = patient(Launch::embedded()).start().await;
    let running = gateway.acquire_for("deploy", HOUR_MS).await;
    let mut builds = tokio::task::JoinSet::new();
    for _ in 0..BUILDS {
        builds.spawn(newest(&gateway, "deploy", "").send());
    }
    for _ in 1..BUILDS {
        let superseded = builds.join_next().await.expect("all but one end").expect("no panic");
        superseded.problem(409, "superseded");
    }
    waiting_is(&gateway, 1, 1).await;
    released(&gateway, "deploy", &running).await;
    let lease = Lease::from(&builds.join_next().await.expect("one waits").expect("no panic"));
    released(&gateway, "deploy", &lease).await;
    nothing_is_left(&gateway).await;
}

#[tokio::test]
async fn of_builds_at_three_gateways_one_waits() {
    const BUILDS: usize = 60;
    let servers = masters(3);
    let mut gateways = Vec::new();
    for _ in 0..3 {
        gateways.push(patient_over(&servers).ready().await);
    }
    let running = gateways[0].acquire_for("deploy", HOUR_MS).await;
    let mut builds = tokio::task::JoinSet::new();
    for build in 0..BUILDS {
        builds.spawn(newest(&gateways[build % 3], "deploy", "").send());
    }
    for _ in 1..BUILDS {
        let superseded = builds.join_next().await.expect("all but one end").expect("no panic");
        superseded.problem(409, "superseded");
    }
    // A build that arrives later at another gateway replaces the one that waits.
    let mut waits = builds;
    for build in 0..6 {
        let gateway = &gateways[build % 3];
        let mut newer = tokio::task::JoinSet::new();
        newer.spawn(newest(gateway, "deploy", "").send());
        let older = std::mem::replace(&mut waits, newer).join_next().await.expect("it waited");
        older.expect("no panic").problem(409, "superseded");
    }
    released(&gateways[1], "deploy", &running).await;
    let lease = Lease::from(&waits.join_next().await.expect("one waits").expect("no panic"));
    released(&gateways[2], "deploy", &lease).await;
    for gateway in &gateways {
        nothing_is_left(gateway).await;
    }
}

#[tokio::test]
async fn a_repeated_request_supersedes_nothing_newer() {
    const OLD: &str = "old-build-old-build";
    const NEW: &str = "new-build-new-build";
    let gateway = patient(Launch::embedded()).start().await;
    let running = gateway.acquire_for("deploy", HOUR_MS).await;
    let old = start_waiting(&gateway, newest(&gateway, "deploy", OLD)).await;
    let copy = start_waiting(&gateway, newest(&gateway, "deploy", OLD)).await;
    waiting_is(&gateway, 2, 1).await;
    let new = tokio::spawn(newest(&gateway, "deploy", NEW).send());
    for superseded in [old, copy] {
        answer(superseded).await.problem(409, "superseded");
    }
    newest(&gateway, "deploy", OLD).send().await.problem(409, "superseded");
    waiting_is(&gateway, 1, 1).await;
    // The newest gets the lock, and a repetition of its request gets the same grant.
    released(&gateway, "deploy", &running).await;
    let lease = Lease::from(&answer(new).await);
    let repeated = newest(&gateway, "deploy", NEW).send().await;
    assert_eq!(Lease::from(&repeated), lease);
    released(&gateway, "deploy", &lease).await;
    nothing_is_left(&gateway).await;
}

#[tokio::test]
async fn an_extension_shows_how_many_wait() {
    let gateway = patient(Launch::embedded()).start().await;
    let answered = gateway.post("job", json!({ "ttl_ms": 60_000 })).await;
    let held = Lease::from(&answered);
    assert_eq!(answered.json().get("waiters"), None, "only an extension shows them");
    let shown = async || {
        let extended = gateway.patch("job", &held.token, 60_000).await;
        assert_eq!(extended.status, 200, "{extended:?}");
        extended.json()["waiters"].as_u64()
    };
    assert_eq!(shown().await, Some(0));
    let first = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    let second = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    assert_eq!(shown().await, Some(2));
    second.abort();
    eventually("the second one left", async || (shown().await == Some(1)).then_some(())).await;
    released(&gateway, "job", &held).await;
    Lease::from(&answer(first).await);
}

#[tokio::test]
async fn invalid_priorities_and_queues_are_refused() {
    let gateway = patient(Launch::embedded()).start().await;
    for (body, detail) in [
        (json!({ "priority": 10 }), "priority is 10; allowed are 0 to 9, and 9 is served first"),
        (json!({ "queue": "last" }), "queue is \"last\"; allowed are \"all\" and \"newest\""),
    ] {
        let problem = gateway.post("job", body).await.problem(400, "invalid_body");
        assert_eq!(problem["detail"], detail);
    }
    let body = json!({ "ttl_ms": 60_000, "priority": 0, "queue": "all" });
    Lease::from(&gateway.post("job", body).await);
}
