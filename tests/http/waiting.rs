//! Waiting by HTTP. A POST with a wait joins the queue of its lock. It gets the lock when it is
//! first in the queue, and not earlier. If it gets no lock, it leaves nothing behind.
//!
//! A request waits once the gateway counts it among the waiters. All times are measured by the
//! clients.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::Method;
use rustix::process::Signal;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use crate::support::client::{Lease, Raw, assert_left};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisOptions, RedisServer, eventually, masters};
use crate::support::measure::measured;
use crate::support::metrics::Samples;
use crate::support::nodes::no_master_stores;
use crate::support::waiters::{
    HOUR_MS, answer, long_waiting_acquire, median, nothing_is_left, patient, patient_over,
    released, start_waiting, waiting, waiting_acquire, waiting_is,
};

async fn embedded() -> Gateway {
    patient(Launch::embedded()).start().await
}

/// Acquires a lock for so long that it must be released.
async fn acquired(gateway: &Gateway, name: &str) -> Lease {
    gateway.acquire_for(name, HOUR_MS).await
}

/// Sends a waiting request on a connection that the test can break.
async fn start_waiting_raw(gateway: &Gateway, name: &str, ttl_ms: u64) -> Raw {
    let (before, _) = waiting(gateway).await;
    let body = json!({ "ttl_ms": ttl_ms, "wait_ms": HOUR_MS }).to_string();
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
    let gateway = patient_over(&servers).ready().await;
    let held = acquired(&gateway, "job").await;
    let waiter = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    released(&gateway, "job", &held).await;
    let granted = answer(waiter).await;
    let lease = Lease::from(&granted);
    assert!(lease.fencing > held.fencing, "{} after {}", lease.fencing, held.fencing);
    assert_eq!(granted.header("preference-applied"), "");
    assert_eq!(gateway.inspect("job").await["fencing_token"], lease.fencing);
    waiting_is(&gateway, 0, 0).await;
    gateway.delete("job", &held.token).await.problem(409, "not_holder");

    let prefers = |wait: &str| gateway.call(Method::POST, "/locks/job").header("prefer", wait);
    let waiter = start_waiting(&gateway, prefers("handling=lenient, wait=3600")).await;
    released(&gateway, "job", &lease).await;
    let granted = answer(waiter).await;
    let lease = Lease::from(&granted);
    assert_eq!(granted.header("preference-applied"), "wait=3600");
    released(&gateway, "job", &lease).await;

    let both =
        |wait_ms: u64| prefers("wait=3600").json(&json!({ "ttl_ms": HOUR_MS, "wait_ms": wait_ms }));
    let granted = both(1_000).send().await;
    assert_eq!(
        (granted.status, granted.header("preference-applied")),
        (201, ""),
        "the body wins: {granted:?}"
    );
    for wait_ms in [0, 100] {
        let since = Instant::now();
        both(wait_ms).send().await.problem(409, "lock_held");
        assert!(since.elapsed() >= Duration::from_millis(wait_ms), "{wait_ms}");
    }
}

#[tokio::test]
async fn waiters_at_one_gateway_get_the_lock_in_order_of_arrival() {
    const WAITERS: usize = 20;
    let servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    let held = acquired(&gateway, "job").await;
    let grants = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for place in 0..WAITERS {
        let asked = long_waiting_acquire(&gateway, "job");
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

/// Waits that ended without a grant.
struct InVain {
    /// How many answers do not name the holder. On a busy machine, a wait may end before the gateway
    /// knows the holder.
    unnamed: usize,
    /// By how much the answers were late.
    late: Vec<Duration>,
    /// The usual time of a request that does not wait.
    plain: Duration,
}

/// Waits `rounds` times in vain.
async fn in_vain(gateway: &Gateway, rounds: u64) -> InVain {
    let before = Instant::now();
    let body = json!({ "ttl_ms": HOUR_MS, "owner": "alice" });
    let held = Lease::from(&gateway.post("job", body).await);
    let mut unnamed = 0;
    let mut late = Vec::new();
    let mut plain = Vec::new();
    for round in 0..rounds {
        let sent = Instant::now();
        plain.push(gateway.post("job", json!({ "ttl_ms": 60_000 })).await.at - sent);
        // One waiter is the first of the queue. The other one never becomes first.
        let waits = [100 + round, 130 + round];
        let asked = waits.map(|wait_ms| {
            let call = waiting_acquire(gateway, "job", wait_ms);
            tokio::spawn(async move { (Instant::now(), call.send().await) })
        });
        for (wait_ms, asked) in waits.into_iter().zip(asked) {
            let (sent, refused) = asked.await.expect("no panic");
            let problem = refused.problem(409, "lock_held");
            if problem.get("holder").is_some() {
                assert_eq!(problem["holder"], "alice");
                assert_eq!(refused.header("retry-after"), "5");
                assert_left(problem["expires_in_ms"].as_u64().expect("a number"), HOUR_MS, before);
            } else {
                unnamed += 1;
            }
            let took = refused.at - sent;
            let wait = Duration::from_millis(wait_ms);
            assert!(took >= wait, "answered after {took:?} instead of {wait:?}");
            late.push(took - wait);
        }
    }
    waiting_is(gateway, 0, 0).await;
    released(gateway, "job", &held).await;
    println!("late by {late:?}, {unnamed} do not name the holder");
    InVain { unnamed, late, plain: median(plain) }
}

#[tokio::test]
async fn an_unsuccessful_wait_names_the_holder_and_is_not_cut_short() {
    let servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    let mut tries = 0..50;
    eventually("all waiters learn who holds the lock", async || {
        tries.next().expect("no waiter learns who holds the lock");
        (in_vain(&gateway, 1).await.unnamed == 0).then_some(())
    })
    .await;
}

/// Lets the leases of holders end, one after the other, while a waiter waits for each lock. Returns
/// by how much the next grants were late, and the usual time of a request that does not wait.
async fn dead_holders(gateway: &Gateway, ttls_ms: &[u64]) -> (Vec<Duration>, Duration) {
    let (mut plain, mut late) = (Vec::new(), Vec::new());
    for ttl_ms in ttls_ms {
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
        let next = long_waiting_acquire(gateway, &name).send().await;
        let lease = Lease::from(&next);
        assert!(
            next.at >= deadline,
            "{:?} before the deadline of the first holder",
            deadline - next.at
        );
        // The masters count the TTL from the arrival of the request, which is before its answer.
        late.push(next.at.saturating_duration_since(held.at + Duration::from_millis(*ttl_ms)));
        released(gateway, &name, &lease).await;
    }
    nothing_is_left(gateway).await;
    println!("late by {late:?}");
    (late, median(plain))
}

#[tokio::test]
async fn a_dead_holders_lock_goes_to_the_next_after_its_deadline() {
    let servers = masters(5);
    dead_holders(&patient_over(&servers).ready().await, &[300, 450, 600]).await;
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_place_at_once() {
    let servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    let held = acquired(&gateway, "job").await;
    let gone = start_waiting_raw(&gateway, "job", HOUR_MS).await;
    let waiter = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    drop(gone);
    waiting_is(&gateway, 1, 1).await;
    released(&gateway, "job", &held).await;
    let lease = Lease::from(&answer(waiter).await);
    released(&gateway, "job", &lease).await;
    nothing_is_left(&gateway).await;
}

#[tokio::test]
async fn when_half_of_the_waiters_leave_the_others_are_served() {
    const EACH: u64 = 20;
    let servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    // In the first pass all clients leave before any release. In the second pass they leave while
    // the lock goes from one waiter to the next. If the lock is granted to a client that has just
    // left, the grant may stay until its TTL ends.
    for (goes, ttl_ms) in [("waiting", HOUR_MS), ("served", 300)] {
        let held = acquired(&gateway, "job").await;
        let mut stay = Vec::new();
        let mut go = Vec::new();
        for _ in 0..EACH {
            go.push(start_waiting_raw(&gateway, "job", ttl_ms).await);
            let asked = long_waiting_acquire(&gateway, "job");
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
    let gateway = patient(Launch::embedded())
        .flag("--max-waiters", "3")
        .flag("--max-waiters-per-lock", "2")
        .flag("--max-waiters-per-client", "3")
        .flag("--max-in-flight", "2")
        .start()
        .await;
    let held_a = acquired(&gateway, "a").await;
    let held_b = acquired(&gateway, "b").await;
    let first = start_waiting(&gateway, long_waiting_acquire(&gateway, "a")).await;
    let second = start_waiting(&gateway, long_waiting_acquire(&gateway, "a")).await;
    let refused = |name: &'static str, word: &'static str| {
        let asked = long_waiting_acquire(&gateway, name);
        async move {
            let refused = asked.send().await;
            let problem = refused.problem(429, "too_many_waiters");
            assert!(!refused.header("retry-after").is_empty(), "{refused:?}");
            assert!(problem["detail"].as_str().unwrap().contains(word), "{problem:#}");
        }
    };
    refused("a", "2 requests are waiting for this lock").await;
    let third = start_waiting(&gateway, long_waiting_acquire(&gateway, "b")).await;
    for name in ["a", "b"] {
        refused(name, "3 requests are waiting for locks").await;
    }
    // More requests wait than may be in flight at a time. Requests that do not wait are served all
    // the same.
    gateway.post("a", json!({})).await.problem(409, "lock_held");
    released(&gateway, "c", &acquired(&gateway, "c").await).await;

    released(&gateway, "a", &held_a).await;
    let lease = Lease::from(&answer(first).await);
    waiting_is(&gateway, 2, 2).await;
    let fourth = start_waiting(&gateway, long_waiting_acquire(&gateway, "a")).await;
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
    // If the gateway waited for this grace or for the waiters, the test would time out.
    let mut gateway = patient_over(&servers).flag("--shutdown-grace", "1h").ready().await;
    let held = acquired(&gateway, "job").await;
    let mut waiters = Vec::new();
    for _ in 0..8 {
        waiters.push(start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await);
    }
    gateway.signal(Signal::TERM);
    for waiter in waiters {
        answer(waiter).await.problem(503, "draining");
    }
    assert_eq!(gateway.ended().await, Some(0));

    let next = patient_over(&servers).ready().await;
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
    let gateway = patient(Launch::embedded()).flag("--idle-timeout", "1s").start().await;
    let held = acquired(&gateway, "job").await;
    let waiter = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    let in_vain = waiting_acquire(&gateway, "job", 2_500).send().await;
    in_vain.problem(409, "lock_held");
    released(&gateway, "job", &held).await;
    Lease::from(&answer(waiter).await);
}

#[tokio::test]
async fn a_holder_that_repeats_its_request_skips_the_queue() {
    let servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    let keyed = |key: &str| long_waiting_acquire(&gateway, "job").header("idempotency-key", key);
    let held = Lease::from(&keyed("the-holder-of-the-lock").send().await);
    let first = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    let second = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    // If the holder queued, it would wait for itself.
    let again = Lease::from(&keyed("the-holder-of-the-lock").send().await);
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
    let gateway = patient_over(&servers).flag("--node-timeout", "300ms").ready().await;
    let keyed = |wait_ms| {
        let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": wait_ms });
        let call = gateway.call(Method::POST, "/locks/job").json(&body);
        call.header("idempotency-key", "the-holder-of-it")
    };
    let held = Lease::from(&keyed(HOUR_MS).decided().await);
    let first = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    servers[..2].iter().for_each(RedisServer::stop);
    for wait_ms in [1, 50, 1_000] {
        let answer = keyed(wait_ms).send().await;
        assert_eq!(answer.status, 503, "after {wait_ms} ms: {answer:?}");
    }
    servers[..2].iter().for_each(RedisServer::cont);
    let again = eventually("the masters answer", async || {
        Some(keyed(HOUR_MS).send().await).filter(|answer| answer.status == 201)
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
    let gateway = patient_over(&servers).ready().await;
    let keyed =
        || long_waiting_acquire(&gateway, "job").header("idempotency-key", "a-request-sent-twice");
    let held = acquired(&gateway, "job").await;
    let first = start_waiting(&gateway, keyed()).await;
    let between = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
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
    let gateway = patient_over(&servers).ready().await;
    let held = acquired(&gateway, "job").await;
    let waiter = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    // The masters end within this wait, also on a busy machine.
    let wait = Duration::from_secs(4);
    let since = Instant::now();
    let in_vain = waiting_acquire(&gateway, "job", wait.as_millis() as u64);
    let in_vain = tokio::spawn(in_vain.send());
    eventually("it waits, or has ended", async || {
        (waiting(&gateway).await == (2, 1) || in_vain.is_finished()).then_some(())
    })
    .await;
    servers[..3].iter_mut().for_each(RedisServer::kill);
    let refused = answer(in_vain).await;
    let took = refused.at - since;
    assert_eq!(
        refused.problem(503, "quorum_unavailable")["nodes"].as_array().expect("a list").len(),
        5
    );
    assert!(took >= wait, "{took:?}");
    let since = Instant::now();
    let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": 500 });
    let refused = gateway.post("free", body).await;
    let took = refused.at - since;
    refused.problem(503, "quorum_unavailable");
    assert!(took >= Duration::from_millis(500), "{took:?}");

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
    let gateway = embedded().await;
    let held = acquired(&gateway, "job").await;
    waiting_acquire(&gateway, "job", 50).send().await.problem(409, "lock_held");
    drop(start_waiting_raw(&gateway, "job", HOUR_MS).await);
    waiting_is(&gateway, 0, 0).await;
    let waiter = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    released(&gateway, "job", &held).await;
    Lease::from(&answer(waiter).await);
    assert_eq!(long_waiting_acquire(&gateway, "free").send().await.status, 201);

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
    let gateway = patient_over(&servers).ready().await;
    const TTL_MS: u64 = 60_000;
    let held = acquired(&gateway, "job").await;
    let sent = Instant::now();
    let body = json!({ "ttl_ms": TTL_MS, "wait_ms": HOUR_MS });
    let waiter = gateway.call(Method::POST, "/locks/job").json(&body);
    let waiter = start_waiting(&gateway, waiter).await;
    let waits = Instant::now();
    tokio::time::sleep(Duration::from_secs(1)).await;
    let ends = Instant::now();
    released(&gateway, "job", &held).await;
    let granted = answer(waiter).await;
    let body = granted.json();
    let millis = |field: &str| Duration::from_millis(body[field].as_u64().unwrap());
    let elapsed = millis("elapsed_ms");
    assert!(
        elapsed + Duration::from_millis(1) >= ends - waits && elapsed <= granted.at - sent,
        "{elapsed:?} of {:?}, and at least {:?}",
        granted.at - sent,
        ends - waits
    );
    // The new lease began after the end of the wait. Drift takes 1 % and 2 ms.
    let drift_ms = TTL_MS / 100 + 2;
    assert_left(body["validity_ms"].as_u64().unwrap() + drift_ms, TTL_MS, ends);
    let trusted = (millis("validity_ms") + elapsed).checked_sub(granted.at - sent);
    assert!(trusted.is_some_and(|left| !left.is_zero()), "{trusted:?} is left: {body:#}");
}

/// The gateway reads no more of a request than it can use. So while a request waits, the gateway
/// might miss the end of its connection.
#[tokio::test]
async fn a_gone_waiter_is_noticed_after_a_stray_byte() {
    let servers = masters(3);
    let gateway = patient_over(&servers).ready().await;
    for stray in ["\n", "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"] {
        let held = acquired(&gateway, "job").await;
        let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS }).to_string();
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

mod measured {
    use super::*;

    #[tokio::test]
    async fn an_unsuccessful_wait_ends_on_time() {
        let servers = masters(5);
        let gateway = patient_over(&servers).ready().await;
        measured("the end of waits", async || {
            let InVain { unnamed, late, plain } = in_vain(&gateway, 10).await;
            // A wait ends with one last attempt. It may take longer, as a plain attempt does.
            let most = Duration::from_secs(1) + 4 * plain;
            let usual = Duration::from_millis(20) + plain;
            let is_on_time = late.iter().all(|late| *late <= most) && median(late.clone()) <= usual;
            if is_on_time && unnamed == 0 {
                Ok(())
            } else {
                Err(format!("late by {late:?}, plain {plain:?}, {unnamed} unnamed"))
            }
        })
        .await;
    }

    #[tokio::test]
    async fn a_wait_without_a_quorum_ends_on_time() {
        let mut servers = masters(5);
        let gateway = patient_over(&servers).ready().await;
        servers[..3].iter_mut().for_each(RedisServer::kill);
        measured("the end of waits without a quorum", async || {
            for (wait_ms, most_ms) in [(500, 3_000), (2_000, 5_000)] {
                let since = Instant::now();
                let refused = waiting_acquire(&gateway, "free", wait_ms).send().await;
                refused.problem(503, "quorum_unavailable");
                let took = refused.at - since;
                assert!(took >= Duration::from_millis(wait_ms), "{took:?}");
                if took >= Duration::from_millis(most_ms) {
                    return Err(format!("{took:?} instead of {wait_ms} ms"));
                }
            }
            Ok(())
        })
        .await;
    }

    #[tokio::test]
    async fn a_dead_holders_lock_goes_to_the_next_soon_after_expiry() {
        let servers = masters(5);
        let gateway = patient_over(&servers).ready().await;
        measured("the time from an expiry to the next grant", async || {
            let ttls_ms = [300, 350, 400, 450, 500, 320, 380, 420, 480];
            let (late, plain) = dead_holders(&gateway, &ttls_ms).await;
            let allowed = Duration::from_millis(50) + 4 * plain;
            let is_soon = median(late.clone()) <= allowed;
            if is_soon { Ok(()) } else { Err(format!("{late:?}, allowed {allowed:?}")) }
        })
        .await;
    }
}
