//! Waiting by HTTP. A POST with a wait joins the queue of its lock. It gets the lock when it is
//! first in the queue, and not earlier. If it gets no lock, it leaves nothing behind.
//!
//! A request waits once the gateway counts it among the waiters. All times are measured by the
//! clients. The limit for a single time allows for a busy machine. Medians are compared with the
//! usual times.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::Method;
use rustix::process::Signal;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use crate::support::client::{Lease, Raw};
use crate::support::gateway::{Gateway, Launch, WELL_BELOW_A_TIMEOUT};
use crate::support::harness::{RedisOptions, RedisServer, eventually, masters};
use crate::support::metrics::Samples;
use crate::support::nodes::no_master_stores;
use crate::support::waiters::{
    LONG_MS, answer, median, nothing_is_left, released, start_waiting, waiting, waiting_acquire,
    waiting_is,
};

/// Sends a waiting request on a connection that the test can break.
async fn start_waiting_raw(gateway: &Gateway, name: &str, ttl_ms: u64) -> Raw {
    let (before, _) = waiting(gateway).await;
    let body = json!({ "ttl_ms": ttl_ms, "wait_ms": LONG_MS }).to_string();
    let mut raw = gateway.raw().await;
    raw.announce("POST", name, "", body.len()).await;
    raw.write(body).await;
    eventually("one more waits", async || (waiting(gateway).await.0 == before + 1).then_some(()))
        .await;
    raw
}

#[tokio::test]
async fn a_waiter_gets_a_released_lock_with_a_larger_token() {
    let servers = masters(5);
    let gateway = Launch::over(&servers).ready().await;
    let held = gateway.acquire("job").await;
    let waiter = start_waiting(&gateway, waiting_acquire(&gateway, "job", LONG_MS)).await;
    released(&gateway, "job", &held).await;
    let granted = answer(waiter).await;
    let lease = Lease::from(&granted);
    assert!(lease.fencing > held.fencing, "{} after {}", lease.fencing, held.fencing);
    assert_eq!(granted.header("preference-applied"), "");
    assert_eq!(gateway.inspect("job").await["fencing_token"], lease.fencing);
    waiting_is(&gateway, 0, 0).await;
    gateway.delete("job", &held.token).await.problem(409, "not_holder");

    let prefers = |wait: &str| gateway.call(Method::POST, "/locks/job").header("prefer", wait);
    let waiter = start_waiting(&gateway, prefers("respond-async, wait=14")).await;
    released(&gateway, "job", &lease).await;
    let granted = answer(waiter).await;
    let lease = Lease::from(&granted);
    assert_eq!(granted.header("preference-applied"), "wait=14");
    released(&gateway, "job", &lease).await;

    let both =
        |wait_ms: u64| prefers("wait=14").json(&json!({ "ttl_ms": 60_000, "wait_ms": wait_ms }));
    let granted = both(1_000).send().await;
    assert_eq!(
        (granted.status, granted.header("preference-applied")),
        (201, ""),
        "the body wins: {granted:?}"
    );
    for wait_ms in [0, 100] {
        let since = Instant::now();
        both(wait_ms).send().await.problem(409, "lock_held");
        let took = since.elapsed();
        assert!(
            took >= Duration::from_millis(wait_ms) && took < Duration::from_secs(7),
            "{wait_ms}: {took:?}"
        );
    }
}

#[tokio::test]
async fn waiters_at_one_gateway_get_the_lock_in_order_of_arrival() {
    const WAITERS: usize = 20;
    let servers = masters(5);
    let gateway = Launch::over(&servers).ready().await;
    let held = gateway.acquire("job").await;
    let grants = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for place in 0..WAITERS {
        let asked = waiting_acquire(&gateway, "job", LONG_MS);
        let release = gateway.call(Method::DELETE, "/locks/job");
        let grants = grants.clone();
        waiters.push(tokio::spawn(async move {
            let lease = Lease::from(&asked.send().await);
            grants.lock().unwrap().push((place, lease.fencing));
            assert_eq!(release.header("lock-token", &lease.token).send().await.status, 204);
        }));
        waiting_is(&gateway, place as u64 + 1, 1).await;
    }
    released(&gateway, "job", &held).await;
    for waiter in waiters {
        waiter.await.expect("granted and released");
    }
    let (places, tokens): (Vec<_>, Vec<_>) = grants.lock().unwrap().iter().copied().unzip();
    assert_eq!(places, (0..WAITERS).collect::<Vec<_>>());
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    nothing_is_left(&gateway).await;
}

#[tokio::test]
async fn an_unsuccessful_wait_ends_on_time_and_names_the_holder() {
    let servers = masters(5);
    let gateway = Launch::over(&servers).ready().await;
    let held = gateway.post("job", json!({ "ttl_ms": 60_000, "owner": "alice" })).await;
    assert_eq!(held.status, 201);
    let mut late = Vec::new();
    let mut plain = Vec::new();
    for round in 0..10 {
        let sent = Instant::now();
        plain.push(gateway.post("job", json!({ "ttl_ms": 60_000 })).await.at - sent);
        // One waiter is the first of the queue. The other one never becomes first.
        let waits = [100 + round, 130 + round];
        let asked = waits.map(|wait_ms| {
            let call = waiting_acquire(&gateway, "job", wait_ms);
            tokio::spawn(async move { (Instant::now(), call.send().await) })
        });
        for (wait_ms, asked) in waits.into_iter().zip(asked) {
            let (sent, refused) = asked.await.expect("no panic");
            let problem = refused.problem(409, "lock_held");
            assert_eq!((&problem["holder"], refused.header("retry-after")), (&json!("alice"), "5"));
            let left = problem["expires_in_ms"].as_u64().expect("a number");
            assert!((30_000..60_000).contains(&left), "{left}");
            let took = refused.at - sent;
            let wait = Duration::from_millis(wait_ms);
            assert!(took >= wait, "answered after {took:?} instead of {wait:?}");
            late.push(took - wait);
        }
    }
    println!("late by {late:?}");
    // A wait ends with one last attempt. On a busy machine that attempt takes longer, as a plain
    // attempt does.
    let plain = median(plain);
    assert!(
        late.iter().all(|late| *late <= Duration::from_secs(1) + 4 * plain),
        "{late:?}, plain {plain:?}"
    );
    assert!(median(late.clone()) <= Duration::from_millis(20) + plain, "{late:?}, plain {plain:?}");
    waiting_is(&gateway, 0, 0).await;
}

#[tokio::test]
async fn a_dead_holders_lock_goes_to_the_next_soon_after_expiry() {
    let servers = masters(5);
    let gateway = Launch::over(&servers).ready().await;
    let (mut plain, mut late) = (Vec::new(), Vec::new());
    for ttl_ms in [300, 350, 400, 450, 500, 320, 380, 420, 480] {
        let name = format!("job-{ttl_ms}");
        // Such a short TTL leaves a round only 30 ms. A busy machine may need more.
        let (sent, held) = eventually("the lock is granted", async || {
            let sent = Instant::now();
            let held = gateway.post(&name, json!({ "ttl_ms": ttl_ms })).await;
            (held.status == 201).then_some((sent, held))
        })
        .await;
        plain.push(held.at - sent);
        let body = held.json();
        let millis = |field: &str| Duration::from_millis(body[field].as_u64().expect("a number"));
        // The deadline by which the first holder must stop, as it counts it.
        let deadline = sent + millis("elapsed_ms") + millis("validity_ms");
        let next = waiting_acquire(&gateway, &name, LONG_MS).send().await;
        let lease = Lease::from(&next);
        assert!(
            next.at >= deadline,
            "{:?} before the deadline of the first holder",
            deadline - next.at
        );
        // The masters count the TTL from the arrival of the request, which is before its answer.
        late.push(next.at.saturating_duration_since(held.at + Duration::from_millis(ttl_ms)));
        released(&gateway, &name, &lease).await;
    }
    println!("late by {late:?}");
    let allowed = Duration::from_millis(50) + 4 * median(plain);
    assert!(median(late.clone()) <= allowed, "{late:?}, allowed {allowed:?}");
    nothing_is_left(&gateway).await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_place_at_once() {
    let servers = masters(5);
    let gateway = Launch::over(&servers).ready().await;
    let held = gateway.acquire("job").await;
    let gone = start_waiting_raw(&gateway, "job", 60_000).await;
    let waiter = start_waiting(&gateway, waiting_acquire(&gateway, "job", LONG_MS)).await;
    let since = Instant::now();
    drop(gone);
    waiting_is(&gateway, 1, 1).await;
    assert!(since.elapsed() < WELL_BELOW_A_TIMEOUT, "{:?}", since.elapsed());
    released(&gateway, "job", &held).await;
    let lease = Lease::from(&answer(waiter).await);
    released(&gateway, "job", &lease).await;
    nothing_is_left(&gateway).await;
}

#[tokio::test]
async fn when_half_of_the_waiters_leave_the_others_are_served() {
    const EACH: u64 = 20;
    let servers = masters(5);
    let gateway = Launch::over(&servers).ready().await;
    // In the first pass all clients leave before any release. In the second pass they leave while
    // the lock goes from one waiter to the next. If the lock is granted to a client that has just
    // left, the grant may stay until its TTL ends.
    for (goes, ttl_ms) in [("waiting", 60_000), ("served", 300)] {
        let held = gateway.acquire("job").await;
        let mut stay = Vec::new();
        let mut go = Vec::new();
        for _ in 0..EACH {
            go.push(start_waiting_raw(&gateway, "job", ttl_ms).await);
            let asked = waiting_acquire(&gateway, "job", LONG_MS);
            let release = gateway.call(Method::DELETE, "/locks/job");
            stay.push(tokio::spawn(async move {
                let lease = Lease::from(&asked.send().await);
                assert_eq!(release.header("lock-token", &lease.token).send().await.status, 204);
            }));
            waiting_is(&gateway, 2 * go.len() as u64, 1).await;
        }
        if goes == "waiting" {
            go.clear();
            waiting_is(&gateway, EACH, 1).await;
        }
        released(&gateway, "job", &held).await;
        for (served, gone) in
            stay.into_iter().zip(go.into_iter().map(Some).chain(std::iter::repeat_with(|| None)))
        {
            drop(gone);
            served.await.expect("granted and released");
        }
        nothing_is_left(&gateway).await;
        no_master_stores(&servers, "job").await;
    }
}

#[tokio::test]
async fn waiters_beyond_the_limit_are_429_and_take_no_work_slots() {
    let gateway = Launch::embedded()
        .flag("--max-waiters", "3")
        .flag("--max-waiters-per-lock", "2")
        .flag("--max-waiters-per-client", "3")
        .flag("--max-in-flight", "2")
        .start()
        .await;
    let held_a = gateway.acquire("a").await;
    let held_b = gateway.acquire("b").await;
    let first = start_waiting(&gateway, waiting_acquire(&gateway, "a", LONG_MS)).await;
    let second = start_waiting(&gateway, waiting_acquire(&gateway, "a", LONG_MS)).await;
    let refused = |name: &'static str, word: &'static str| {
        let asked = waiting_acquire(&gateway, name, LONG_MS);
        async move {
            let refused = asked.send().await;
            let problem = refused.problem(429, "too_many_waiters");
            assert!(!refused.header("retry-after").is_empty(), "{refused:?}");
            assert!(problem["detail"].as_str().unwrap().contains(word), "{problem:#}");
        }
    };
    refused("a", "2 requests are waiting for this lock").await;
    let third = start_waiting(&gateway, waiting_acquire(&gateway, "b", LONG_MS)).await;
    for name in ["a", "b"] {
        refused(name, "3 requests are waiting for locks").await;
    }
    // More requests wait than may be in flight at a time. Requests that do not wait are served all
    // the same.
    gateway.post("a", json!({})).await.problem(409, "lock_held");
    released(&gateway, "c", &gateway.acquire("c").await).await;

    released(&gateway, "a", &held_a).await;
    let lease = Lease::from(&answer(first).await);
    waiting_is(&gateway, 2, 2).await;
    let fourth = start_waiting(&gateway, waiting_acquire(&gateway, "a", LONG_MS)).await;
    released(&gateway, "a", &lease).await;
    released(&gateway, "b", &held_b).await;
    let lease = Lease::from(&answer(second).await);
    released(&gateway, "a", &lease).await;
    for waiter in [third, fourth] {
        Lease::from(&answer(waiter).await);
    }
    waiting_is(&gateway, 0, 0).await;
}

#[tokio::test]
async fn sigterm_sends_waiters_away_and_leaves_no_lock() {
    let servers = masters(5);
    let mut gateway = Launch::over(&servers).ready().await;
    let held = gateway.acquire("job").await;
    let mut waiters = Vec::new();
    for _ in 0..8 {
        waiters.push(start_waiting(&gateway, waiting_acquire(&gateway, "job", LONG_MS)).await);
    }
    let since = Instant::now();
    gateway.signal(Signal::TERM);
    for waiter in waiters {
        let sent_away = answer(waiter).await;
        sent_away.problem(503, "draining");
        assert!(sent_away.at - since < WELL_BELOW_A_TIMEOUT, "after {:?}", sent_away.at - since);
    }
    assert_eq!(gateway.ended().await, Some(0));
    assert!(
        since.elapsed() < Duration::from_secs(5),
        "the shutdown waited for the grace of 20 s: {:?}",
        since.elapsed()
    );

    let next = Launch::over(&servers).ready().await;
    assert_eq!(
        next.inspect("job").await["fencing_token"],
        held.fencing,
        "the holder keeps the lock"
    );
    released(&next, "job", &held).await;
    nothing_is_left(&next).await;
    no_master_stores(&servers, "job").await;
}

#[tokio::test]
async fn a_wait_longer_than_the_idle_timeout_is_not_cut_short() {
    let gateway = Launch::embedded().flag("--idle-timeout", "1s").start().await;
    let held = gateway.acquire("job").await;
    let in_vain = start_waiting(&gateway, waiting_acquire(&gateway, "job", 2_500)).await;
    let waiter = start_waiting(&gateway, waiting_acquire(&gateway, "job", LONG_MS)).await;
    answer(in_vain).await.problem(409, "lock_held");
    released(&gateway, "job", &held).await;
    Lease::from(&answer(waiter).await);
}

#[tokio::test]
async fn a_holder_that_repeats_its_request_skips_the_queue() {
    let servers = masters(5);
    let gateway = Launch::over(&servers).ready().await;
    let keyed =
        |key: &str| waiting_acquire(&gateway, "job", LONG_MS).header("idempotency-key", key);
    let held = Lease::from(&keyed("the-holder-of-the-lock").send().await);
    let first = start_waiting(&gateway, waiting_acquire(&gateway, "job", LONG_MS)).await;
    let second = start_waiting(&gateway, waiting_acquire(&gateway, "job", LONG_MS)).await;
    let since = Instant::now();
    let again = Lease::from(&keyed("the-holder-of-the-lock").send().await);
    assert!(since.elapsed() < WELL_BELOW_A_TIMEOUT, "{:?}", since.elapsed());
    assert_eq!(again.token, held.token);
    assert_eq!(waiting(&gateway).await, (2, 1), "nobody else was served");
    released(&gateway, "job", &again).await;
    for waiter in [first, second] {
        let lease = Lease::from(&answer(waiter).await);
        assert!(lease.fencing > again.fencing);
        released(&gateway, "job", &lease).await;
    }
    nothing_is_left(&gateway).await;
}

/// The queue knows that the key holds the lock, but too few masters answer to confirm the grant.
#[tokio::test]
async fn a_holder_without_a_quorum_is_not_refused_by_its_own_lock() {
    let servers = masters(3);
    let gateway = Launch::over(&servers).flag("--node-timeout", "300ms").ready().await;
    let keyed = |wait_ms| {
        waiting_acquire(&gateway, "job", wait_ms).header("idempotency-key", "the-holder-of-it")
    };
    let held = Lease::from(&keyed(LONG_MS).send().await);
    let first = start_waiting(&gateway, waiting_acquire(&gateway, "job", LONG_MS)).await;
    servers[..2].iter().for_each(RedisServer::stop);
    for wait_ms in [1, 50, 1_000] {
        let answer = keyed(wait_ms).send().await;
        assert_eq!(answer.status, 503, "after {wait_ms} ms: {answer:?}");
    }
    servers[..2].iter().for_each(RedisServer::cont);
    let again = eventually("the masters answer", async || {
        Some(keyed(LONG_MS).send().await).filter(|answer| answer.status == 201)
    })
    .await;
    assert_eq!(Lease::from(&again).token, held.token);
    released(&gateway, "job", &held).await;
    released(&gateway, "job", &Lease::from(&answer(first).await)).await;
    nothing_is_left(&gateway).await;
}

#[tokio::test]
async fn two_waiters_with_one_key_get_the_same_lock() {
    let servers = masters(5);
    let gateway = Launch::over(&servers).ready().await;
    let keyed = || {
        waiting_acquire(&gateway, "job", LONG_MS).header("idempotency-key", "a-request-sent-twice")
    };
    let held = gateway.acquire("job").await;
    let first = start_waiting(&gateway, keyed()).await;
    let between = start_waiting(&gateway, waiting_acquire(&gateway, "job", LONG_MS)).await;
    let second = start_waiting(&gateway, keyed()).await;
    released(&gateway, "job", &held).await;
    let leases = [Lease::from(&answer(first).await), Lease::from(&answer(second).await)];
    assert_eq!(leases[0].token, leases[1].token);
    assert!(leases[0].fencing > held.fencing, "{leases:?}");
    released(&gateway, "job", &leases[1]).await;
    released(&gateway, "job", &Lease::from(&answer(between).await)).await;
    nothing_is_left(&gateway).await;
}

#[tokio::test]
async fn a_wait_reports_a_missing_quorum_and_survives_a_short_gap() {
    // A master that loses nothing in a crash is admitted again at once after a restart.
    let durable = || RedisOptions { append_only: true, ..RedisOptions::default() };
    let mut servers: Vec<_> = (0..5).map(|_| RedisServer::start_with(durable())).collect();
    let gateway = Launch::over(&servers).ready().await;
    let held = gateway.acquire("job").await;
    let since = Instant::now();
    let in_vain = start_waiting(&gateway, waiting_acquire(&gateway, "job", 2_000)).await;
    let waiter = start_waiting(&gateway, waiting_acquire(&gateway, "job", LONG_MS)).await;
    servers[..3].iter_mut().for_each(RedisServer::kill);
    let refused = answer(in_vain).await;
    let took = refused.at - since;
    assert_eq!(
        refused.problem(503, "quorum_unavailable")["nodes"].as_array().expect("a list").len(),
        5
    );
    assert!(took >= Duration::from_millis(2_000) && took < Duration::from_secs(5), "{took:?}");
    let since = Instant::now();
    let refused = waiting_acquire(&gateway, "free", 500).send().await;
    let took = refused.at - since;
    refused.problem(503, "quorum_unavailable");
    assert!(took >= Duration::from_millis(500) && took < Duration::from_secs(3), "{took:?}");

    servers[..3].iter_mut().for_each(RedisServer::restart);
    gateway.all_nodes_admitted().await;
    waiting_is(&gateway, 1, 1).await;
    released(&gateway, "job", &held).await;
    let lease = Lease::from(&answer(waiter).await);
    released(&gateway, "job", &lease).await;
    no_master_stores(&servers, "free").await;
}

#[tokio::test]
async fn waits_are_counted_by_result_and_handoffs_by_kind() {
    let gateway = Launch::embedded().start().await;
    let held = gateway.acquire("job").await;
    waiting_acquire(&gateway, "job", 50).send().await.problem(409, "lock_held");
    drop(start_waiting_raw(&gateway, "job", 60_000).await);
    waiting_is(&gateway, 0, 0).await;
    let waiter = start_waiting(&gateway, waiting_acquire(&gateway, "job", LONG_MS)).await;
    released(&gateway, "job", &held).await;
    Lease::from(&answer(waiter).await);
    assert_eq!(waiting_acquire(&gateway, "free", LONG_MS).send().await.status, 201);

    let samples = Samples::of(&gateway).await;
    let waits =
        |outcome| samples.get("redlock_wait_duration_seconds_count", &[("outcome", outcome)]);
    assert_eq!((waits("granted"), waits("timed_out"), waits("cancelled")), (2.0, 1.0, 1.0));
    let handed = |kind| samples.get("redlock_handoffs_total", &[("kind", kind)]);
    assert_eq!((handed("local"), handed("remote")), (1.0, 0.0));
    let acquires = |outcome| {
        samples.get("redlock_operations_total", &[("operation", "acquire"), ("outcome", outcome)])
    };
    assert_eq!((acquires("granted"), acquires("held"), acquires("cancelled")), (3.0, 1.0, 1.0));
}

/// The client's deadline by the formula of the API: receipt + validity − (own round trip −
/// elapsed).
#[tokio::test]
async fn validity_after_a_wait_covers_the_whole_new_lease() {
    let servers = masters(3);
    let gateway = Launch::over(&servers).ready().await;
    let held = gateway.post("job", json!({ "ttl_ms": 2_000 })).await;
    assert_eq!(held.status, 201);
    let sent = Instant::now();
    let granted = gateway.post("job", json!({ "ttl_ms": 400, "wait_ms": 10_000 })).await;
    let body = granted.json();
    let millis = |field: &str| Duration::from_millis(body[field].as_u64().unwrap());
    let round_trip = granted.at - sent;
    let elapsed = millis("elapsed_ms");
    assert!(
        round_trip >= Duration::from_millis(400) && elapsed <= round_trip,
        "{elapsed:?} of {round_trip:?}"
    );
    let trusted = (millis("validity_ms") + elapsed).checked_sub(round_trip);
    assert!(
        trusted.is_some_and(|left| left > Duration::from_millis(100)),
        "{trusted:?} is left: {body:#}"
    );
}

/// The gateway reads no more of a request than it can use. So while a request waits, the gateway
/// might miss the end of its connection.
#[tokio::test]
async fn a_gone_waiter_is_noticed_after_a_stray_byte() {
    let servers = masters(3);
    let gateway = Launch::over(&servers).ready().await;
    for stray in ["\n", "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"] {
        let held = gateway.acquire("job").await;
        let body = json!({ "ttl_ms": 60_000, "wait_ms": 20_000 }).to_string();
        let length = body.len();
        let head = "POST /locks/job HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
        let mut socket = tokio::net::TcpStream::connect(gateway.address()).await.unwrap();
        let request = format!("{head}\r\ncontent-length: {length}\r\n\r\n{body}{stray}");
        socket.write_all(request.as_bytes()).await.unwrap();
        waiting_is(&gateway, 1, 1).await;
        drop(socket);
        waiting_is(&gateway, 0, 0).await;
        released(&gateway, "job", &held).await;
    }
    nothing_is_left(&gateway).await;
}
