//! Requests that are answered before their grant (`POST /requests`), and callbacks.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};

use crate::http::audit::audit_lines;
use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::client::{Answer, Call, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{RedisServer, daily_or_long, eventually, free_port, masters};
use crate::support::measure::measured;
use crate::support::metrics::Samples;
use crate::support::receiver::{Receiver, secret_file, with_callbacks};
use crate::support::waiters::{HOUR_MS, patient, patient_over, waiting_is};

/// How long a grant waits for its claim.
const WINDOW: Duration = Duration::from_secs(10);
/// The start of each callback, and its time limit, as parts of that time.
const CALLBACKS: [f64; 3] = [0.0, 0.3, 0.6];
const CALLBACK: f64 = 0.25;
/// Shorter windows, from `--max-ttl`. The second one leaves time for three callbacks on a busy
/// machine.
const SHORT_WINDOW: Duration = Duration::from_secs(3);
const RINGING_WINDOW: Duration = Duration::from_secs(6);

fn key_of(number: usize) -> String {
    format!("request-number-{number:06}")
}

fn post(gateway: &Gateway, name: &str, key: &str, body: Value) -> Call {
    gateway.call(Method::POST, lock_path(name)).header("idempotency-key", key).json(&body)
}

fn request(gateway: &Gateway, key: &str, body: &Value) -> Call {
    gateway.call(Method::POST, "/requests").header("idempotency-key", key).json(body)
}

/// The body of a deferred request for one lock, with more fields.
fn for_lock(name: &str, mut more: Value) -> Value {
    more["names"] = json!([name]);
    more
}

/// Sends a deferred request for one lock.
async fn deferred(gateway: &Gateway, name: &str, key: &str, body: Value) -> Answer {
    request(gateway, key, &for_lock(name, body)).send().await
}

/// The path of a deferred request. Panics unless it was accepted.
fn path_of(answer: &Answer) -> String {
    assert_eq!(answer.status, 202, "{answer:?}");
    let path = answer.header("location");
    assert_eq!(path, format!("/requests/{}", answer.json()["id"].as_str().expect("an id")));
    path.to_owned()
}

async fn state(gateway: &Gateway, path: &str) -> Value {
    let answer = gateway.get(path).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

async fn is_state(gateway: &Gateway, path: &str, expected: &str) -> Value {
    eventually(&format!("{path} is {expected}"), async || {
        let status = state(gateway, path).await;
        (status["state"] == expected).then_some(status)
    })
    .await
}

fn with_window(window: Duration) -> Launch {
    let window = format!("{}ms", window.as_millis());
    Launch::embedded().flag("--max-ttl", &window).flag("--default-ttl", &window)
}

/// A gateway over these masters, which may be late on a busy machine.
fn over(servers: &[RedisServer]) -> Launch {
    patient_over(servers).flag("--clock-skew", "10s").flag("--node-timeout", "10s")
}

async fn freed(gateway: &Gateway, name: &str, lease: &Lease) {
    assert_eq!(gateway.delete(name, &lease.token).await.status, 204);
}

#[tokio::test]
async fn a_deferred_request_is_announced_and_claimed() {
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let gateway = with_callbacks(Launch::embedded(), &secret, &[&receiver]).start().await;
    let lease = gateway.acquire("a/b").await;
    let (one, other) = (key_of(1), key_of(2));
    let body = json!({ "callback_url": receiver.url(), "owner": "one" });
    let accepted = deferred(&gateway, "a/b", &one, body.clone()).await;
    let path = path_of(&accepted);
    let status = accepted.json();
    assert_eq!((&status["state"], &status["position"]), (&json!("waiting"), &json!(1)));
    assert_eq!(status["names"], json!(["a/b"]));
    let second = deferred(&gateway, "a/b", &other, json!({})).await;
    assert_eq!(second.json()["position"], 2, "{second:?}");
    // A repeated request is the same request.
    let again = deferred(&gateway, "a/b", &one, body).await;
    assert_eq!(path_of(&again), path);
    waiting_is(&gateway, 2, 1).await;
    assert!(receiver.arrived().is_none(), "nothing is announced before the grant");

    let before = Instant::now();
    freed(&gateway, "a/b", &lease).await;
    let ring = receiver.next().await;
    let ready = ring.verified();
    assert_eq!((ring.path.as_str(), &ready["type"]), ("/locks", &json!("lock.ready")));
    assert_eq!(ready["data"]["names"], json!(["a/b"]));
    assert_eq!(path, format!("/requests/{}", ready["data"]["id"].as_str().expect("an id")));
    let within = ready["data"]["claim_within_ms"].as_u64().expect("a number");
    assert!(within <= WINDOW.as_millis() as u64, "{ready}");
    // The window begins with the grant. It is shorter than the TTL, because clocks run at different
    // rates.
    let ends = ring.at + Duration::from_millis(within);
    assert!(ends - before > WINDOW.mul_f64(0.98), "{ready}");
    let status = is_state(&gateway, &path, "ready").await;
    assert!(status["claim_within_ms"].as_u64().is_some_and(|left| left > 0), "{status}");

    let claim = post(&gateway, "a/b", &one, json!({ "ttl_ms": 60_000 })).send().await;
    let claimed = Lease::from(&claim);
    assert_eq!(claim.header("idempotency-replayed"), "true");
    assert!(claim.json()["validity_ms"].as_u64() > Some(10_000), "a full TTL: {claim:?}");
    assert!(!String::from_utf8_lossy(&ring.body).contains(claimed.owner()), "no token is sent");
    let status = eventually("the gateway has read the receiver's answer", async || {
        Some(state(&gateway, &path).await).filter(|status| status["callback"] == "delivered")
    })
    .await;
    assert_eq!(status["state"], "claimed");
    // The second request gets the lock only when the first one has released it.
    assert_eq!(state(&gateway, &path_of(&second)).await["state"], "waiting");
    freed(&gateway, "a/b", &claimed).await;
    is_state(&gateway, &path_of(&second), "ready").await;
    // A repetition finds the request, and does not claim the lock.
    let again = deferred(&gateway, "a/b", &other, json!({})).await;
    assert_eq!((path_of(&again), &again.json()["state"]), (path_of(&second), &json!("ready")));
    is_state(&gateway, &path_of(&second), "ready").await;
    // A claim for a shorter time keeps the time that is left.
    let claim = post(&gateway, "a/b", &other, json!({ "ttl_ms": 10 })).send().await;
    assert_eq!(claim.json()["ttl_ms"], 10);
    assert!(claim.json()["validity_ms"].as_u64() > Some(10), "{claim:?}");
    freed(&gateway, "a/b", &Lease::from(&claim)).await;
    assert!(receiver.arrived().is_none(), "one grant with a URL, one callback");
    let samples = Samples::of(&gateway).await;
    assert_eq!(samples.get("redlock_callbacks_total", &[("outcome", "delivered")]), 1.0);
    assert_eq!(samples.get("redlock_deferred_requests", &[]), 0.0);
}

#[tokio::test]
async fn unclaimed_grants_are_passed_on_after_the_window() {
    let gateway = with_window(SHORT_WINDOW).start().await;
    let mut paths = Vec::new();
    for number in 0..3 {
        paths.push(path_of(&deferred(&gateway, "a", &key_of(number), json!({})).await));
    }
    // A busy test may miss the moment in which a request is ready.
    let was_ready = |status: &Value| status["state"] == "ready" || status["state"] == "expired";
    for (number, path) in paths.iter().enumerate() {
        eventually("the request is granted", async || {
            was_ready(&state(&gateway, path).await).then_some(())
        })
        .await;
        for earlier in &paths[..number] {
            assert_eq!(state(&gateway, earlier).await["state"], "expired", "before {path}");
        }
    }
    for path in &paths {
        is_state(&gateway, path, "expired").await;
    }
    eventually("nothing holds the lock", async || {
        (gateway.inspect("a").await["state"] == "free").then_some(())
    })
    .await;
    // A late claim is an ordinary request.
    let late = post(&gateway, "a", &key_of(0), json!({})).send().await;
    assert_eq!((late.status, late.header("idempotency-replayed")), (201, ""), "{late:?}");
}

#[tokio::test]
async fn a_receiver_that_is_down_is_rung_three_times() {
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let launch = with_window(RINGING_WINDOW);
    let gateway = with_callbacks(launch, &secret, &[&receiver]).start().await;
    receiver.answer(503);
    let body = json!({ "callback_url": receiver.url() });
    let path = path_of(&deferred(&gateway, "a", &key_of(1), body.clone()).await);
    let rings = [receiver.next().await, receiver.next().await, receiver.next().await];
    let ids: BTreeSet<_> = rings.iter().map(|ring| ring.header("webhook-id")).collect();
    assert_eq!(ids.len(), 1, "repetitions have one id");
    for (ring, part) in rings.iter().zip(CALLBACKS) {
        let ready = ring.verified();
        let left = ready["data"]["claim_within_ms"].as_u64().expect("a number");
        let most = RINGING_WINDOW.mul_f64(1.0 - part).as_millis() as u64;
        assert!(left <= most, "after {part} of the window: {ready}");
    }
    let status = is_state(&gateway, &path, "expired").await;
    assert_eq!(status["callback"], "failed");
    assert!(receiver.arrived().is_none());

    // A receiver that comes back in time gets the announcement.
    let path = path_of(&deferred(&gateway, "a", &key_of(2), body).await);
    let first = receiver.next().await;
    receiver.answer(200);
    let second = receiver.next().await;
    assert_eq!(first.header("webhook-id"), second.header("webhook-id"));
    assert!(!ids.contains(first.header("webhook-id")), "another grant has another id");
    eventually("it was delivered", async || {
        (state(&gateway, &path).await["callback"] == "delivered").then_some(())
    })
    .await;
}

/// A loopback address that only this process uses. So nobody else takes a port that is closed for a
/// time.
fn own_address() -> SocketAddr {
    let [.., third, fourth] = std::process::id().to_be_bytes();
    SocketAddr::from((Ipv4Addr::new(127, 100, third, fourth), free_port()))
}

#[tokio::test]
async fn a_receiver_that_was_closed_gets_the_callback_later() {
    let address = own_address();
    let secret = secret_file();
    let receiver = Receiver::at(&address.to_string()).await;
    let gateway = with_callbacks(Launch::embedded(), &secret, &[&receiver]).start().await;
    let body = json!({ "callback_url": receiver.url() });
    drop(receiver);
    eventually("the port is closed", async || {
        TcpStream::connect(address).await.is_err().then_some(())
    })
    .await;
    let path = path_of(&deferred(&gateway, "a", &key_of(1), body).await);
    eventually("the first callback has failed", async || {
        (state(&gateway, &path).await["callback"] == "failed").then_some(())
    })
    .await;
    // The next callbacks begin 3 s and 6 s after the grant.
    let mut receiver = Receiver::at(&address.to_string()).await;
    let ready = receiver.next().await.verified();
    assert_eq!((&ready["type"], &ready["data"]["names"]), (&json!("lock.ready"), &json!(["a"])));
    let claim = post(&gateway, "a", &key_of(1), json!({ "ttl_ms": 60_000 })).send().await;
    assert_eq!(claim.header("idempotency-replayed"), "true", "{claim:?}");
    eventually("the callback is delivered", async || {
        (state(&gateway, &path).await["callback"] == "delivered").then_some(())
    })
    .await;
    eventually("the log has the reason", async || {
        gateway.stdout().contains("Connection refused").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_request_that_is_given_up_leaves_queue_and_lock() {
    let gateway = Launch::embedded().start().await;
    let lease = gateway.acquire("a").await;
    let first = path_of(&deferred(&gateway, "a", &key_of(1), json!({})).await);
    let second = path_of(&deferred(&gateway, "a", &key_of(2), json!({})).await);
    let third = path_of(&deferred(&gateway, "a", &key_of(3), json!({})).await);
    let give_up = async |path: &str| gateway.call(Method::DELETE, path).send().await.status;
    assert_eq!(give_up(&first).await, 204);
    assert_eq!(state(&gateway, &first).await["state"], "cancelled");
    waiting_is(&gateway, 2, 1).await;
    assert_eq!(state(&gateway, &second).await["position"], 1, "no place is kept for it");
    freed(&gateway, "a", &lease).await;
    is_state(&gateway, &second, "ready").await;
    assert_eq!(give_up(&second).await, 204);
    is_state(&gateway, &third, "ready").await;
    let claimed = Lease::from(&post(&gateway, "a", &key_of(3), json!({})).send().await);
    // A claimed lock stays.
    assert_eq!(give_up(&third).await, 204);
    assert_eq!(gateway.patch("a", &claimed.token, 60_000).await.status, 200);
    assert_eq!(give_up("/requests/00000000000000000000000000000000").await, 404);
    gateway.get("/requests/unknown").await.problem(404, "request_not_found");
}

#[tokio::test]
async fn a_claim_at_another_gateway_is_sound() {
    let servers = masters(3);
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let one = with_callbacks(over(&servers), &secret, &[&receiver]).ready().await;
    let other = over(&servers).ready().await;
    let body = json!({ "callback_url": receiver.url() });
    let path = path_of(&deferred(&one, "a", &key_of(1), body).await);
    receiver.next().await.verified();
    let claim = post(&other, "a", &key_of(1), json!({ "ttl_ms": 60_000 })).send().await;
    let claimed = Lease::from(&claim);
    assert_eq!(claim.header("idempotency-replayed"), "true");
    // The first gateway neither releases nor loses the lock when its window ends.
    let status = is_state(&one, &path, "expired").await;
    assert!(status.get("problem").is_none(), "{status}");
    let held = one.inspect("a").await;
    assert_eq!(held["fencing_token"], claimed.fencing);
    assert_eq!(other.patch("a", &claimed.token, 60_000).await.status, 200);
    // Giving up afterwards does not release it either.
    assert_eq!(one.call(Method::DELETE, path.as_str()).send().await.status, 204);
    assert_eq!(other.patch("a", &claimed.token, 60_000).await.status, 200);
}

#[tokio::test]
async fn giving_up_a_lock_that_was_claimed_elsewhere_keeps_it() {
    let servers = masters(3);
    let (one, other) = (over(&servers).ready().await, over(&servers).ready().await);
    for round in 0..5 {
        let name = format!("a{round}");
        let path = path_of(&deferred(&one, &name, &key_of(1), json!({})).await);
        is_state(&one, &path, "ready").await;
        let claim = post(&other, &name, &key_of(1), json!({ "ttl_ms": 60_000 })).send();
        let give_up = one.call(Method::DELETE, path.as_str()).send();
        let (claim, given_up) = tokio::join!(claim, give_up);
        assert_eq!(given_up.status, 204);
        // The claim or the cancellation may come first. If the claim was answered 201, its lease holds.
        if claim.status == 201 {
            let claimed = Lease::from(&claim);
            assert_eq!(other.patch(&name, &claimed.token, 60_000).await.status, 200, "{claim:?}");
        } else {
            assert!([409, 503].contains(&claim.status), "{claim:?}");
        }
    }
}

#[tokio::test]
async fn a_dead_gateway_leaves_nothing_and_a_repeated_request_is_served() {
    let servers = masters(3);
    let (mut one, other) = (over(&servers).ready().await, over(&servers).ready().await);
    let lease = other.acquire("waited").await;
    path_of(&deferred(&one, "waited", &key_of(1), json!({})).await);
    let ready = path_of(&deferred(&one, "ready", &key_of(2), json!({})).await);
    is_state(&one, &ready, "ready").await;
    one.signal(Signal::KILL);
    one.ended().await;
    // The request that was ready is found by its key, and the one that waited begins anew.
    let claim = post(&other, "ready", &key_of(2), json!({ "ttl_ms": 60_000 })).send().await;
    assert_eq!(claim.header("idempotency-replayed"), "true", "{claim:?}");
    freed(&other, "ready", &Lease::from(&claim)).await;
    let again = path_of(&deferred(&other, "waited", &key_of(1), json!({})).await);
    freed(&other, "waited", &lease).await;
    is_state(&other, &again, "ready").await;
    assert_eq!(other.call(Method::DELETE, again.as_str()).send().await.status, 204);
    eventually("nothing is held", async || {
        let listed = other.get("/locks").await.json();
        listed["locks"].as_array().expect("a list").is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn slots_and_sets_are_deferred_too() {
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let gateway = with_callbacks(Launch::embedded(), &secret, &[&receiver]).start().await;
    let slots = json!({ "slots": 2, "ttl_ms": 60_000 });
    let mut held = Vec::new();
    for _ in 0..2 {
        held.push(Lease::from(&gateway.post("pool", slots.clone()).await));
    }
    let asks = json!({ "slots": 2, "take": 2, "callback_url": receiver.url() });
    let pool = path_of(&deferred(&gateway, "pool", &key_of(1), asks).await);
    let lease = gateway.acquire("b").await;
    let names = json!({ "names": ["a", "b"], "callback_url": receiver.url() });
    let both = path_of(&request(&gateway, &key_of(2), &names).send().await);
    assert_eq!(state(&gateway, &both).await["position"], 1);
    for lease in &held {
        freed(&gateway, "pool", lease).await;
    }
    assert_eq!(receiver.next().await.verified()["data"]["names"], json!(["pool"]));
    let claim = json!({ "slots": 2, "take": 2, "ttl_ms": 60_000 });
    let claim = post(&gateway, "pool", &key_of(1), claim).send().await;
    assert_eq!(claim.json()["slots_held"], json!([1, 2]), "{claim:?}");
    assert_eq!(state(&gateway, &pool).await["state"], "claimed");
    freed(&gateway, "b", &lease).await;
    assert_eq!(receiver.next().await.verified()["data"]["names"], json!(["a", "b"]));
    is_state(&gateway, &both, "ready").await;
    let claim = gateway.call(Method::POST, "/locks").header("idempotency-key", key_of(2));
    let claim = claim.json(&json!({ "names": ["b", "a"], "ttl_ms": 60_000 })).send().await;
    assert_eq!((claim.status, claim.header("idempotency-replayed")), (201, "true"), "{claim:?}");
    assert_eq!(state(&gateway, &both).await["state"], "claimed");
}

#[tokio::test]
async fn deferred_requests_are_checked_before_they_wait() {
    let (receiver, secret) = (Receiver::start().await, secret_file());
    let gateway = with_callbacks(Launch::embedded(), &secret, &[&receiver]).start().await;
    let off = Launch::embedded().start().await;
    let url = |url: &str| json!({ "callback_url": url });
    let no_key = gateway.call(Method::POST, "/requests").json(&for_lock("a", json!({})));
    let problem = no_key.send().await.problem(400, "invalid_parameter");
    assert!(problem["detail"].as_str().is_some_and(|text| text.contains("Idempotency-Key")));
    let answer = deferred(&off, "a", &key_of(1), url(&receiver.url())).await;
    answer.problem(400, "invalid_callback");
    let origin = receiver.origin();
    let with_user = receiver.url().replacen("http://", "http://user:secret-word@", 1);
    let long = format!("{origin}/{}", "a".repeat(2_048));
    for (bad, word) in [
        ("", "expected a URL"),
        ("hooks.example.com", "expected a URL"),
        ("ftp://hooks.example.com", "expected a URL"),
        ("https://hooks.example.com/locks", "its origin is not allowed; allowed are http"),
        (&*with_user, "a user name or password"),
        (&*long, "allowed are 2048"),
    ] {
        let answer = deferred(&gateway, "a", &key_of(1), url(bad)).await;
        let problem = answer.problem(400, "invalid_callback");
        let detail = problem["detail"].as_str().expect("a text");
        assert!(detail.contains(word) && !detail.contains("secret-word"), "{bad}: {detail}");
    }
    let answer = deferred(&gateway, "a", &key_of(1), json!({ "callback_url": 5 })).await;
    answer.problem(400, "invalid_callback");
    let long_wait = request(&gateway, &key_of(1), &for_lock("a", json!({})));
    let long_wait = long_wait.header("prefer", "wait=3601").send().await;
    let problem = long_wait.problem(400, "invalid_wait");
    assert!(problem["detail"].as_str().is_some_and(|text| text.contains("3600")), "{problem}");
    for (bad, code) in [
        (json!({ "wait_ms": 3_600_001 }), "invalid_wait"),
        (json!({ "priority": 10 }), "invalid_body"),
        (json!({ "queue": "oldest" }), "invalid_body"),
        (json!({ "take": 2 }), "invalid_body"),
        (json!({ "owner": 5 }), "invalid_body"),
        (json!({ "metadata": 5 }), "invalid_body"),
    ] {
        deferred(&gateway, "a", &key_of(1), bad).await.problem(400, code);
    }
    for (body, code, words) in [
        (json!({ "wait_ms": 0 }), "invalid_body", "names must be a list"),
        (json!({ "names": [] }), "invalid_body", "names"),
        (json!({ "names": ["a b"] }), "invalid_name", "names[0]"),
        (json!({ "names": ["a"], "ttl_ms": 60_000 }), "invalid_body", "the POST that claims"),
        (json!({ "names": ["a"], "hold_at_least_ms": 9 }), "invalid_body", "the POST that claims"),
        (json!({ "names": ["a", "b"], "queue": "all" }), "invalid_body", "names has 2 locks"),
        (json!({ "names": ["a", "b"], "slots": 2 }), "invalid_body", "names has 2 locks"),
        (json!({ "names": ["a", "b"], "take": 2 }), "invalid_body", "names has 2 locks"),
    ] {
        let problem = request(&gateway, &key_of(1), &body).send().await.problem(400, code);
        assert!(problem["detail"].as_str().is_some_and(|text| text.contains(words)), "{problem}");
    }
    // Nobody has taken the lock meanwhile.
    assert_eq!(gateway.inspect("a").await["state"], "free");
    let held = gateway.acquire("a").await;
    let at_once = deferred(&gateway, "a", &key_of(1), json!({ "wait_ms": 0 })).await;
    at_once.problem(409, "lock_held");
    let path = path_of(&deferred(&gateway, "a", &key_of(1), json!({ "wait_ms": 300 })).await);
    let status = is_state(&gateway, &path, "refused").await;
    assert_eq!(status["problem"]["code"], "lock_held", "{status}");
    freed(&gateway, "a", &held).await;
}

#[tokio::test]
async fn permissions_bound_who_may_ask_see_and_claim() {
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let caller = key("caller", &format!("{HOLDER},callback"), "*").await;
    let holder = key("holder", HOLDER, "*").await;
    let half = key("half", "acquire", "x,y").await;
    let keys = file(&[&caller, &holder, &half]);
    let log = Scratch::new("audit.log", "");
    let launch = with_keys(&keys).flag("--audit-log", log.path()).flag("--public", "metrics");
    let gateway = with_callbacks(launch, &secret, &[&receiver]).start().await;
    let ask = |by: &crate::http::keys::Key, name: &str, body: Value| {
        by.call(&gateway, Method::POST, "/requests")
            .header("idempotency-key", key_of(1))
            .json(&for_lock(name, body))
            .send()
    };
    let url = json!({ "callback_url": receiver.url() });
    let refused = ask(&holder, "a", url.clone()).await.problem(403, "forbidden");
    assert!(refused["detail"].as_str().is_some_and(|text| text.contains("callback")), "{refused}");
    // Without a URL, the request needs no permission but that to acquire.
    assert_eq!(ask(&holder, "b", json!({})).await.status, 202);
    let lease = holder.acquire(&gateway, "a").await;
    let path = path_of(&ask(&caller, "a", url.clone()).await);
    let is_others = async || {
        caller.get(&gateway, &path).await.json();
        holder.get(&gateway, &path).await.problem(404, "request_not_found");
        let cancel = holder.call(&gateway, Method::DELETE, &path).send().await;
        cancel.problem(404, "request_not_found");
        gateway.get(&path).await.problem(401, "unauthenticated");
    };
    is_others().await;
    assert_eq!(holder.delete(&gateway, "a", &lease.token).await.status, 204);
    receiver.next().await.verified();
    is_others().await;
    let claim = caller.call(&gateway, Method::POST, "/locks/a");
    let claim = claim.header("idempotency-key", key_of(1)).send().await;
    assert_eq!(claim.header("idempotency-replayed"), "true", "{claim:?}");
    let outcomes = |what: &str| {
        let lines = audit_lines(&log).into_iter();
        let of = lines.filter(|line| line["what"] == what && line["lock"] == "a");
        of.map(|line| (line["who"].clone(), line["outcome"].clone())).collect::<Vec<_>>()
    };
    eventually("the audit log has them", async || {
        let callbacks = outcomes("callback") == [(json!("caller"), json!("delivered"))];
        let acquires = outcomes("acquire");
        let has = |who: &str, outcome: &str| acquires.contains(&(json!(who), json!(outcome)));
        let ends = has("caller", "accepted") && has("caller", "done") && has("caller", "claimed");
        (callbacks && ends && has("holder", "forbidden")).then_some(())
    })
    .await;

    let set = |by: &crate::http::keys::Key| {
        by.call(&gateway, Method::POST, "/requests")
            .header("idempotency-key", key_of(3))
            .json(&json!({ "names": ["x", "y"], "wait_ms": 300 }))
            .send()
    };
    // Who may inspect one lock of a set learns nothing of the holder of another one.
    let held = holder.acquire(&gateway, "y").await;
    let path = path_of(&set(&half).await);
    let problem = eventually("the wait ends", async || {
        half.get(&gateway, &path).await.json().get("problem").cloned()
    })
    .await;
    assert_eq!(problem["code"], "lock_held", "{problem}");
    assert_eq!(problem["held"][0]["name"], "y", "{problem}");
    assert_eq!(holder.delete(&gateway, "y", &held.token).await.status, 204);

    // A key that loses a permission is refused, and sees why.
    let lease = holder.acquire(&gateway, "d").await;
    let path = path_of(&ask(&caller, "d", json!({})).await);
    let less = caller.entry.replace("\"acquire\", ", "");
    assert_ne!(less, caller.entry);
    std::fs::write(keys.path(), format!("{less}\n{}\n{}", holder.entry, half.entry)).unwrap();
    eventually("the permission is gone", async || {
        (ask(&caller, "e", json!({})).await.status == 403).then_some(())
    })
    .await;
    assert_eq!(holder.delete(&gateway, "d", &lease.token).await.status, 204);
    let problem = eventually("the request is refused", async || {
        caller.get(&gateway, &path).await.json().get("problem").cloned()
    })
    .await;
    assert_eq!(problem["code"], "forbidden", "{problem}");
    std::fs::write(keys.path(), format!("{}\n{}", caller.entry, holder.entry)).unwrap();
    eventually("the permission is back", async || {
        (ask(&caller, "f", json!({})).await.status == 202).then_some(())
    })
    .await;

    // A key that is removed while its request waits gets nothing.
    let lease = holder.acquire(&gateway, "c").await;
    path_of(&ask(&caller, "c", url).await);
    std::fs::write(keys.path(), &holder.entry).unwrap();
    eventually("the key is gone", async || {
        (caller.get(&gateway, "/locks/c").await.status == 401).then_some(())
    })
    .await;
    assert_eq!(holder.delete(&gateway, "c", &lease.token).await.status, 204);
    eventually("the lock is released again", async || {
        let free = holder.get(&gateway, "/locks/c").await.json()["state"] == "free";
        let none = Samples::of(&gateway).await.is("redlock_waiters", &[], 0.0);
        (free && none).then_some(())
    })
    .await;
    assert!(receiver.arrived().is_none(), "nothing is announced to a removed key");
}

/// A request for N names or slots counts as N requests.
#[tokio::test]
async fn each_name_of_a_request_is_charged_checked_and_recorded() {
    let mut small = key("small", HOLDER, "a*,pool").await;
    small.entry.push_str("rate = 1\nburst = 12\n");
    let half = key("half", &format!("{HOLDER},callback"), "a,b").await;
    let half_called = key("called", HOLDER, "a").await;
    let log = Scratch::new("audit.log", "");
    let keys = file(&[&small, &half, &half_called]);
    let (receiver, secret) = (Receiver::start().await, secret_file());
    let launch = with_keys(&keys).flag("--audit-log", log.path());
    let gateway = with_callbacks(launch, &secret, &[&receiver]).start().await;
    let ask = |who: &crate::http::keys::Key, body: Value| {
        let call = who.call(&gateway, Method::POST, "/requests");
        call.header("idempotency-key", key_of(1)).json(&body).send()
    };
    let names: Vec<_> = (0..20).map(|number| format!("a{number}")).collect();
    for many in [json!({ "names": names }), json!({ "names": ["pool"], "slots": 20, "take": 20 })] {
        let problem = ask(&small, many).await.problem(429, "rate_limited");
        let detail = problem["detail"].as_str().expect("a text");
        assert!(detail.contains("counts as 20 requests"), "{detail}");
    }
    ask(&half, json!({ "names": ["a", "c"] })).await.problem(403, "forbidden");
    let called = json!({ "names": ["a"], "callback_url": receiver.url() });
    ask(&half_called, called).await.problem(403, "forbidden");
    path_of(&ask(&half, json!({ "names": ["a", "b"], "owner": "me" })).await);
    eventually("the audit log has a line for each lock", async || {
        let lines = audit_lines(&log).into_iter();
        let accepted = lines.filter(|line| line["outcome"] == "accepted" && line["owner"] == "me");
        let locks: Vec<_> = accepted.map(|line| line["lock"].clone()).collect();
        (locks == [json!("a"), json!("b")]).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_claim_does_not_cut_the_callback_that_is_under_way() {
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let gateway = with_callbacks(Launch::embedded(), &secret, &[&receiver]).start().await;
    let go = receiver.hold();
    let began = Instant::now();
    let body = json!({ "callback_url": receiver.url() });
    let path = path_of(&deferred(&gateway, "a", &key_of(1), body).await);
    receiver.next().await.verified();
    let claim = post(&gateway, "a", &key_of(1), json!({})).send().await;
    assert_eq!(claim.header("idempotency-replayed"), "true", "{claim:?}");
    assert_eq!(is_state(&gateway, &path, "claimed").await.get("callback"), None);
    drop(go);
    let callback = eventually("the callback ends", async || {
        state(&gateway, &path).await.get("callback").cloned()
    })
    .await;
    // On a busy machine, the receiver's answer may come after the time limit of a callback.
    let is_late = callback == "failed" && began.elapsed() > WINDOW.mul_f64(CALLBACK);
    assert!(callback == "delivered" || is_late, "{callback}");
}

#[tokio::test]
async fn a_lock_at_work_is_not_announced_as_ready() {
    let gateway = Launch::embedded().start().await;
    let claim = post(&gateway, "a", &key_of(1), json!({ "ttl_ms": 60_000 })).send().await;
    let answer = deferred(&gateway, "a", &key_of(1), json!({})).await;
    assert_eq!(answer.json()["state"], "claimed", "{answer:?}");
    let token = claim.json()["token"].as_str().expect("a token").to_owned();
    let kept = gateway.call(Method::PATCH, "/locks/a").header("lock-token", token).send().await;
    assert_eq!(kept.status, 200, "the lock stays");
}

#[tokio::test]
async fn a_repetition_does_not_confirm_a_wait_that_it_does_not_change() {
    let gateway = Launch::embedded().start().await;
    let lease = gateway.acquire("a").await;
    let ask = |seconds: u32| {
        let call = request(&gateway, &key_of(1), &for_lock("a", json!({})));
        call.header("prefer", format!("wait={seconds}")).send()
    };
    assert_eq!(ask(60).await.header("preference-applied"), "wait=60");
    let again = ask(600).await;
    assert!(again.status == 202 && again.headers.get("preference-applied").is_none(), "{again:?}");
    freed(&gateway, "a", &lease).await;
}

#[tokio::test]
async fn deferred_requests_of_one_client_are_limited() {
    let gateway = Launch::embedded().flag("--max-waiters-per-client", "2").start().await;
    let lease = gateway.acquire("a").await;
    let first = path_of(&deferred(&gateway, "a", &key_of(1), json!({})).await);
    path_of(&deferred(&gateway, "a", &key_of(2), json!({})).await);
    let third = deferred(&gateway, "a", &key_of(3), json!({})).await;
    let problem = third.problem(429, "too_many_waiters");
    let detail = problem["detail"].as_str().expect("a text");
    assert!(detail.contains("2 deferred requests that have not ended"), "{detail}");
    // A repetition is the same request, also at the limit.
    assert_eq!(path_of(&deferred(&gateway, "a", &key_of(1), json!({})).await), first);
    assert_eq!(gateway.call(Method::DELETE, first.as_str()).send().await.status, 204);
    waiting_is(&gateway, 1, 1).await;
    path_of(&deferred(&gateway, "a", &key_of(3), json!({})).await);
    freed(&gateway, "a", &lease).await;
}

#[tokio::test]
async fn deferred_requests_leave_waiting_slots_to_others() {
    let launch =
        Launch::embedded().flag("--max-waiters", "4").flag("--max-waiters-per-client", "4");
    let gateway = launch.start().await;
    let lease = gateway.acquire("a").await;
    for number in 0..2 {
        path_of(&deferred(&gateway, "a", &key_of(number), json!({})).await);
    }
    let more = deferred(&gateway, "a", &key_of(3), json!({})).await;
    more.problem(429, "too_many_waiters");
    let waits = crate::support::waiters::waiting_acquire(&gateway, "a", 25_000);
    let waits = crate::support::waiters::start_waiting(&gateway, waits).await;
    waits.abort();
    freed(&gateway, "a", &lease).await;
}

#[tokio::test]
async fn a_repetition_does_not_supersede_a_newer_request() {
    let gateway = Launch::embedded().start().await;
    let lease = gateway.acquire("a").await;
    let newest = json!({ "queue": "newest" });
    let first = path_of(&deferred(&gateway, "a", &key_of(1), newest.clone()).await);
    let second = path_of(&deferred(&gateway, "a", &key_of(2), newest.clone()).await);
    let status = is_state(&gateway, &first, "refused").await;
    assert_eq!(status["problem"]["code"], "superseded", "{status}");
    let again = deferred(&gateway, "a", &key_of(1), newest).await;
    again.problem(409, "superseded");
    assert_eq!(state(&gateway, &second).await["state"], "waiting");
    freed(&gateway, "a", &lease).await;
    is_state(&gateway, &second, "ready").await;
}

#[tokio::test]
async fn a_release_by_the_key_cancels_the_request() {
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let gateway = with_callbacks(Launch::embedded(), &secret, &[&receiver]).start().await;
    receiver.answer(503);
    let by_key = async |name: &str, key: &str| {
        gateway.call(Method::DELETE, lock_path(name)).header("idempotency-key", key).send().await
    };
    let body = json!({ "callback_url": receiver.url() });
    let ready = path_of(&deferred(&gateway, "a", &key_of(1), body).await);
    receiver.next().await.verified();
    assert_eq!(by_key("a", &key_of(1)).await.status, 204);
    assert_eq!(state(&gateway, &ready).await["state"], "cancelled");
    let lease = gateway.acquire("a").await;
    let waiting = path_of(&deferred(&gateway, "a", &key_of(2), json!({})).await);
    by_key("a", &key_of(2)).await;
    assert_eq!(state(&gateway, &waiting).await["state"], "cancelled");
    waiting_is(&gateway, 0, 0).await;
    freed(&gateway, "a", &lease).await;
}

#[tokio::test]
async fn after_a_forced_release_a_repetition_waits_again() {
    let gateway = Launch::embedded().start().await;
    let ready = path_of(&deferred(&gateway, "a", &key_of(1), json!({})).await);
    is_state(&gateway, &ready, "ready").await;
    let forced = gateway.call(Method::DELETE, "/locks/a?force=true").send().await;
    assert_eq!(forced.status, 204, "{forced:?}");
    let lease = gateway.acquire("a").await;
    post(&gateway, "a", &key_of(1), json!({})).send().await.problem(409, "lock_held");
    assert_eq!(state(&gateway, &ready).await["state"], "expired");
    let again = deferred(&gateway, "a", &key_of(1), json!({})).await;
    assert_eq!((again.status, &again.json()["state"]), (202, &json!("waiting")), "{again:?}");
    freed(&gateway, "a", &lease).await;
    is_state(&gateway, &path_of(&again), "ready").await;
}

#[tokio::test]
async fn acquires_are_never_answered_202() {
    let gateway = Launch::embedded().start().await;
    let locks = |key: &str, body: Value| {
        let call = gateway.call(Method::POST, "/locks").header("idempotency-key", key);
        call.json(&body).header("prefer", "respond-async").send()
    };
    let lock = |key: &str, body: Value| {
        post(&gateway, "a", key, body).header("prefer", "respond-async").send()
    };
    let granted = lock(&key_of(1), json!({})).await;
    assert_eq!((granted.status, granted.header("preference-applied")), (201, ""), "{granted:?}");
    lock(&key_of(2), json!({})).await.problem(409, "lock_held");
    let granted = locks(&key_of(3), json!({ "names": ["b", "c"] })).await;
    assert_eq!((granted.status, granted.header("preference-applied")), (201, ""), "{granted:?}");
    locks(&key_of(4), json!({ "names": ["b", "c"] })).await.problem(409, "lock_held");
    waiting_is(&gateway, 0, 0).await;
    let url = "https://hooks.example.com/locks";
    for refused in [
        lock(&key_of(5), json!({ "callback_url": url })).await,
        locks(&key_of(6), json!({ "names": ["d", "e"], "callback_url": url })).await,
    ] {
        let problem = refused.problem(400, "invalid_body");
        let detail = problem["detail"].as_str().expect("a text");
        assert!(detail.contains("callback_url belongs to POST /requests"), "{detail}");
    }
}

#[tokio::test]
async fn a_deferred_request_says_how_long_it_waits() {
    let gateway = Launch::embedded().start().await;
    let lease = gateway.acquire("a").await;
    let prefers = |number: usize, body: Value| {
        request(&gateway, &key_of(number), &for_lock("a", body)).header("prefer", "wait=1").send()
    };
    let short = prefers(1, json!({})).await;
    assert_eq!(short.header("preference-applied"), "wait=1");
    let long = prefers(2, json!({ "wait_ms": 3_600_000 })).await;
    assert_eq!(long.header("preference-applied"), "", "the body wins");
    let status = is_state(&gateway, &path_of(&short), "refused").await;
    assert_eq!(status["problem"]["code"], "lock_held", "{status}");
    assert_eq!(state(&gateway, &path_of(&long)).await["state"], "waiting");
    freed(&gateway, "a", &lease).await;
}

#[tokio::test]
async fn one_name_stands_for_the_lock_and_not_for_a_set() {
    let gateway = Launch::embedded().start().await;
    let lease = gateway.acquire("a").await;
    let path = path_of(&deferred(&gateway, "a", &key_of(1), json!({})).await);
    // A claim before its time is an ordinary request, and leaves the deferred one waiting.
    post(&gateway, "a", &key_of(1), json!({})).send().await.problem(409, "lock_held");
    assert_eq!(state(&gateway, &path).await["state"], "waiting");
    freed(&gateway, "a", &lease).await;
    is_state(&gateway, &path, "ready").await;
    let as_set = gateway.call(Method::POST, "/locks").header("idempotency-key", key_of(1));
    as_set.json(&json!({ "names": ["a"] })).send().await.problem(409, "lock_held");
    is_state(&gateway, &path, "ready").await;
    let claim = || post(&gateway, "a", &key_of(1), json!({ "ttl_ms": 60_000 })).send();
    let (one, other) = tokio::join!(claim(), claim());
    assert_eq!((one.status, other.status), (201, 201), "{one:?} {other:?}");
    assert_eq!(Lease::from(&one).token, Lease::from(&other).token);
    is_state(&gateway, &path, "claimed").await;

    let pool = json!({ "slots": 256, "owner": "one" });
    let path = path_of(&deferred(&gateway, "pool", &key_of(2), pool).await);
    is_state(&gateway, &path, "ready").await;
    let shown = gateway.inspect("pool").await;
    assert_eq!((&shown["slots"], &shown["owner"]), (&json!(256), &json!("one")), "{shown}");
}

#[tokio::test]
async fn two_gateways_announce_one_grant_with_one_id() {
    let servers = masters(3);
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let launch = || with_callbacks(over(&servers), &secret, &[&receiver]);
    let (one, other) = (launch().ready().await, launch().ready().await);
    let lease = one.acquire("a").await;
    let body = json!({ "callback_url": receiver.url() });
    for gateway in [&one, &other] {
        path_of(&deferred(gateway, "a", &key_of(1), body.clone()).await);
    }
    freed(&one, "a", &lease).await;
    let (first, second) = (receiver.next().await, receiver.next().await);
    assert_eq!(first.header("webhook-id"), second.header("webhook-id"));
}

#[tokio::test]
async fn a_drain_ends_deferred_requests() {
    drained_with_deferred_requests().await;
}

/// Ends a gateway with two deferred requests: one waits, and one is ready. Returns how long the end
/// took. If the gateway waited for the first request, it would not end within an hour.
async fn drained_with_deferred_requests() -> Duration {
    let launch = patient(Launch::embedded()).flag("--drain-delay", "0s");
    let mut gateway = launch.flag("--shutdown-grace", "1h").start().await;
    let _held = gateway.acquire_for("a", HOUR_MS).await;
    path_of(&deferred(&gateway, "a", &key_of(1), json!({})).await);
    path_of(&deferred(&gateway, "b", &key_of(2), json!({})).await);
    let began = Instant::now();
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
    began.elapsed()
}

#[tokio::test]
async fn callbacks_use_no_proxy_and_follow_no_redirect() {
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", proxy.local_addr().unwrap());
    let launch = with_window(RINGING_WINDOW);
    let launch = launch.env("HTTP_PROXY", &url).env("http_proxy", &url).env("ALL_PROXY", &url);
    let gateway = with_callbacks(launch, &secret, &[&receiver]).start().await;
    receiver.answer(307);
    let body = json!({ "callback_url": receiver.url() });
    let path = path_of(&deferred(&gateway, "a", &key_of(1), body).await);
    for _ in 0..3 {
        assert_eq!(receiver.next().await.path, "/locks", "the redirect goes to /elsewhere");
    }
    assert_eq!(is_state(&gateway, &path, "expired").await["callback"], "failed");
    assert!(receiver.arrived().is_none());
    let connected = tokio::time::timeout(Duration::ZERO, proxy.accept()).await;
    assert!(connected.is_err(), "the proxy was used: {connected:?}");
}

#[tokio::test]
async fn a_new_secret_signs_without_a_restart() {
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let gateway = with_callbacks(Launch::embedded(), &secret, &[&receiver]).start().await;
    let old = std::fs::read_to_string(secret.path()).unwrap();
    let new = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    std::fs::write(secret.path(), format!("{new}\n{old}")).unwrap();
    let mut tries = 0;
    eventually("both secrets sign", async || {
        tries += 1;
        let (lock, key) = (format!("a{tries}"), key_of(tries));
        path_of(&deferred(&gateway, &lock, &key, json!({ "callback_url": receiver.url() })).await);
        let ring = receiver.next().await;
        ring.verified();
        let signatures = ring.header("webhook-signature").split(' ').count();
        (signatures == 2).then_some(())
    })
    .await;
    std::fs::write(secret.path(), "whsec_short\n").unwrap();
    eventually("the log names the line", async || {
        let log = gateway.stdout();
        (log.contains("line 1 is not a secret") && log.contains("the old secrets stay"))
            .then_some(())
    })
    .await;
    assert!(!gateway.stdout().contains("whsec_short"));
}

/// If each request is served within this time, the machine is not busy.
const QUICK: Duration = Duration::from_secs(1);

#[tokio::test]
async fn deferred_requests_are_served_in_order() {
    // More than the 16 callbacks that one client may have under way.
    let requests = daily_or_long(100, 500);
    let (mut receiver, secret) = (Receiver::start().await, secret_file());
    let servers = masters(3);
    let gateway = with_callbacks(over(&servers), &secret, &[&receiver]).ready().await;
    let lease = gateway.acquire_for("a", HOUR_MS).await;
    let mut ids = Vec::new();
    for number in 0..requests {
        let body = json!({ "callback_url": receiver.url() });
        let accepted = deferred(&gateway, "a", &key_of(number), body).await;
        assert_eq!(accepted.json()["position"], number + 1, "{accepted:?}");
        ids.push(accepted.json()["id"].clone());
    }
    let mut began = Instant::now();
    let mut longest = Duration::ZERO;
    freed(&gateway, "a", &lease).await;
    let mut last = lease.fencing;
    let mut rung = BTreeSet::new();
    for (number, id) in ids.iter().enumerate() {
        // A callback is repeated if its answer came late.
        let ready = loop {
            let ring = receiver.next().await;
            if rung.insert(ring.header("webhook-id").to_owned()) {
                break ring.verified();
            }
        };
        assert_eq!(ready["data"]["id"], *id, "request {number} is next");
        let claim = post(&gateway, "a", &key_of(number), json!({ "ttl_ms": 60_000 })).send().await;
        let claimed = Lease::from(&claim);
        assert!(claimed.fencing > last, "fencing tokens increase");
        last = claimed.fencing;
        freed(&gateway, "a", &claimed).await;
        longest = longest.max(began.elapsed());
        began = Instant::now();
    }
    while let Some(ring) = receiver.arrived() {
        assert!(!rung.insert(ring.header("webhook-id").to_owned()), "an unknown callback");
    }
    let failed = eventually("the gateway has read the receiver's answers", async || {
        let samples = Samples::of(&gateway).await;
        let ended = |outcome| samples.get("redlock_callbacks_total", &[("outcome", outcome)]);
        let (delivered, failed) = (ended("delivered"), ended("failed"));
        (delivered + failed >= requests as f64).then_some(failed)
    })
    .await;
    assert!(failed == 0.0 || longest > QUICK, "{failed} failed, in at most {longest:?} each");
}

mod measured {
    use super::*;

    #[tokio::test]
    async fn an_unclaimed_grant_is_passed_on_soon_after_its_window() {
        const WINDOW: Duration = Duration::from_secs(2);
        let gateway = with_window(WINDOW).start().await;
        let mut names = (0..).map(|number| format!("a{number}"));
        measured("the next request is ready", async || {
            let name = names.next().expect("there is always one more");
            let first = deferred(&gateway, &name, &key_of(1), json!({})).await;
            let began = Instant::now();
            let next = deferred(&gateway, &name, &key_of(2), json!({})).await;
            assert_eq!((first.status, next.status), (202, 202), "{first:?} {next:?}");
            let status = eventually("the next request is granted", async || {
                let status = state(&gateway, &path_of(&next)).await;
                (status["state"] != "waiting").then_some(status)
            })
            .await;
            let waited = began.elapsed();
            let is_soon = waited < 3 * WINDOW && status["state"] == "ready";
            if is_soon { Ok(()) } else { Err(format!("after {waited:?}: {status}")) }
        })
        .await;
    }

    #[tokio::test]
    async fn a_lock_that_is_given_up_is_released_not_left_to_its_end() {
        let gateway = Launch::embedded().start().await;
        let mut names = (0..).map(|number| format!("a{number}"));
        measured("the next request is ready", async || {
            let name = names.next().expect("there is always one more");
            let ready = path_of(&deferred(&gateway, &name, &key_of(1), json!({})).await);
            let next = path_of(&deferred(&gateway, &name, &key_of(2), json!({})).await);
            is_state(&gateway, &ready, "ready").await;
            let began = Instant::now();
            assert_eq!(gateway.call(Method::DELETE, ready.as_str()).send().await.status, 204);
            is_state(&gateway, &next, "ready").await;
            let took = began.elapsed();
            if took < WINDOW / 4 { Ok(()) } else { Err(format!("after {took:?}")) }
        })
        .await;
    }

    #[tokio::test]
    async fn a_window_does_not_delay_a_drain() {
        measured("a drain", async || {
            let took = drained_with_deferred_requests().await;
            if took < WINDOW / 2 { Ok(()) } else { Err(format!("it took {took:?}")) }
        })
        .await;
    }
}
