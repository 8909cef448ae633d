//! Places in line that belong to an Idempotency-Key. A client waits in turns: each POST waits for a
//! while, and the next one repeats it with the same key. The client keeps its place at its gateway.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use super::keys::{HOLDER, file, key, with_keys};
use crate::support::client::{Answer, Call, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{eventually, masters};
use crate::support::metrics::Samples;
use crate::support::waiters::{
    LONG_MS, answer, median, nothing_is_left, released, start_waiting, waiting_is,
};

/// The length of one turn.
const TURN_MS: u64 = 400;
/// How long a free lock is left to a waiter between two turns.
const GAP: Duration = Duration::from_millis(200);

/// The key of a client.
fn key_of(who: &str) -> String {
    format!("the-key-of-{who:0>12}")
}

/// A request that waits for a lock. It has no Idempotency-Key.
fn unkeyed(gateway: &Gateway, who: &str, wait_ms: u64) -> Call {
    let body = json!({ "ttl_ms": 60_000, "wait_ms": wait_ms, "owner": who });
    gateway.call(Method::POST, lock_path("job")).json(&body)
}

fn turn(gateway: &Gateway, who: &str, wait_ms: u64) -> Call {
    unkeyed(gateway, who, wait_ms).header("idempotency-key", key_of(who))
}

/// The line of a gateway: the label of each waiter, and whether it is away.
async fn line(gateway: &Gateway) -> Vec<(String, bool)> {
    let status = gateway.inspect("job").await;
    let waiters = status["waiters"].as_array().cloned().unwrap_or_default();
    assert_eq!(status["waiters_total"].as_u64().unwrap_or_default(), waiters.len() as u64);
    let waiter = |waiter: &Value| {
        let owner = waiter["owner"].as_str().expect("a label").to_owned();
        (owner, waiter["is_away"].as_bool().expect("a boolean"))
    };
    waiters.iter().map(waiter).collect()
}

async fn line_is(gateway: &Gateway, expected: &[(&str, bool)]) {
    let expected: Vec<_> = expected.iter().map(|(who, away)| ((*who).to_owned(), *away)).collect();
    let what = format!("the line is {expected:?}");
    eventually(&what, async || (line(gateway).await == expected).then_some(())).await;
}

/// Waits until a client is in line, away or not.
async fn is_in_line(gateway: &Gateway, who: &str) {
    let what = format!("{who} is in line");
    eventually(&what, async || {
        line(gateway).await.iter().any(|(waiter, _)| waiter == who).then_some(())
    })
    .await;
}

/// The first client waits for one turn. Meanwhile the second one begins to wait. Returns the first
/// one's refusal.
async fn one_turn_before(
    gateway: &Gateway,
    first: &str,
    second: (&str, Call),
) -> (Answer, JoinHandle<Answer>) {
    let first_turn = tokio::spawn(turn(gateway, first, 300).send());
    is_in_line(gateway, first).await;
    let second_waits = tokio::spawn(second.1.send());
    is_in_line(gateway, second.0).await;
    let refused = answer(first_turn).await;
    (refused, second_waits)
}

/// The position and the time that the place is kept, as the refusal tells.
#[track_caller]
fn told(refused: &Answer) -> (u64, Option<u64>) {
    let problem = refused.problem(409, "lock_held");
    let kept_ms = problem["queue_place_expires_ms"].as_u64();
    (problem["queue_position"].as_u64().expect("a position"), kept_ms)
}

/// What the clients of a test have seen.
#[derive(Default)]
struct Seen {
    /// The fencing token and the client of each grant.
    grants: Mutex<Vec<(u64, String)>>,
    /// The positions that each refusal told, with the client.
    positions: Mutex<Vec<(String, u64)>>,
    /// Turns that have ended without a grant.
    turns: AtomicUsize,
}

impl Seen {
    /// The clients in the order of their grants.
    fn order(&self) -> Vec<String> {
        let mut grants = self.grants.lock().unwrap().clone();
        grants.sort();
        grants.into_iter().map(|(_, who)| who).collect()
    }
}

/// A client that waits in turns. If its gateway no longer answers, it goes on at the next one. It
/// holds the lock for a moment, and releases it.
fn client(who: String, gateways: &[&Gateway], seen: &Arc<Seen>) -> JoinHandle<()> {
    let turns: Vec<_> = gateways
        .iter()
        .map(|gateway| {
            (turn(gateway, &who, TURN_MS), gateway.call(Method::DELETE, lock_path("job")))
        })
        .collect();
    let seen = seen.clone();
    tokio::spawn(async move {
        for (turn, release) in turns {
            while let Ok(answer) = turn.clone().try_send().await {
                if answer.status == 409 {
                    let (position, kept_ms) = told(&answer);
                    assert_eq!(kept_ms, Some(10_000), "{answer:?}");
                    seen.positions.lock().unwrap().push((who.clone(), position));
                    seen.turns.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                let lease = Lease::from(&answer);
                seen.grants.lock().unwrap().push((lease.fencing, who.clone()));
                tokio::time::sleep(Duration::from_millis(20)).await;
                let released = release.header("lock-token", &lease.token).send().await;
                assert_eq!(released.status, 204, "{released:?}");
                return;
            }
        }
        panic!("no gateway answers {who}");
    })
}

/// Starts clients, one after the other, at the first of these gateways.
async fn line_up(names: &[String], gateways: &[&Gateway], seen: &Arc<Seen>) -> Vec<JoinHandle<()>> {
    let mut clients = Vec::new();
    for who in names {
        let before = line(gateways[0]).await.len();
        clients.push(client(who.clone(), gateways, seen));
        let what = format!("{who} is in line");
        eventually(&what, async || (line(gateways[0]).await.len() == before + 1).then_some(()))
            .await;
    }
    clients
}

async fn turns_ended(seen: &Seen, turns: usize) {
    let what = format!("{turns} turns have ended");
    eventually(&what, async || (seen.turns.load(Ordering::Relaxed) >= turns).then_some(())).await;
}

fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{prefix}{number}")).collect()
}

#[tokio::test]
async fn waiters_with_keys_keep_their_order_over_five_turns() {
    let servers = masters(5);
    let gateway = Launch::over(&servers).ready().await;
    let held = gateway.acquire("job").await;
    let seen = Arc::<Seen>::default();
    let names = names("w", 20);
    let clients = line_up(&names, &[&gateway], &seen).await;
    turns_ended(&seen, 20 * 5).await;
    for (who, position) in std::mem::take(&mut *seen.positions.lock().unwrap()) {
        assert_eq!(format!("w{}", position - 1), who, "in the middle of its turns");
    }
    released(&gateway, "job", &held).await;
    for client in clients {
        client.await.expect("granted and released");
    }
    assert_eq!(seen.order(), names);
    nothing_is_left(&gateway).await;
    assert_eq!(line(&gateway).await, []);
}

#[tokio::test]
async fn each_of_two_gateways_keeps_the_order_of_its_line() {
    let servers = masters(5);
    let first = Launch::over(&servers).ready().await;
    let second = Launch::over(&servers).ready().await;
    let held = first.acquire("job").await;
    let seen = Arc::<Seen>::default();
    let at_first = names("a", 10);
    let at_second = names("b", 10);
    let mut clients = line_up(&at_first, &[&first], &seen).await;
    clients.extend(line_up(&at_second, &[&second], &seen).await);
    turns_ended(&seen, 20 * 5).await;
    released(&first, "job", &held).await;
    for client in clients {
        client.await.expect("granted and released");
    }
    let served = |prefix| -> Vec<_> {
        seen.order().into_iter().filter(|who| who.starts_with(prefix)).collect()
    };
    assert_eq!((served('a'), served('b')), (at_first, at_second), "{:?}", seen.order());
    nothing_is_left(&first).await;
}

#[tokio::test]
async fn waiters_of_a_killed_gateway_go_to_the_end_of_the_next_line() {
    let servers = masters(5);
    let first = Launch::over(&servers).ready().await;
    let second = Launch::over(&servers).ready().await;
    let held = second.acquire("job").await;
    let seen = Arc::<Seen>::default();
    let at_second = names("b", 10);
    let mut clients = line_up(&names("a", 10), &[&first, &second], &seen).await;
    clients.extend(line_up(&at_second, &[&second], &seen).await);
    turns_ended(&seen, 20 * 2).await;
    first.signal(Signal::KILL);
    eventually("all are in line", async || (line(&second).await.len() == 20).then_some(())).await;
    let names: Vec<_> = line(&second).await.into_iter().map(|(who, _)| who).collect();
    assert_eq!(names[..10], at_second, "those that stayed have their places");
    let turns = seen.turns.load(Ordering::Relaxed);
    turns_ended(&seen, turns + 20 * 3).await;
    released(&second, "job", &held).await;
    for client in clients {
        client.await.expect("granted and released");
    }
    assert_eq!(seen.order(), names);
    nothing_is_left(&second).await;
}

#[tokio::test]
async fn who_came_first_gets_the_lock_first_in_a_later_turn() {
    let gateway = Launch::embedded().start().await;
    let held = gateway.acquire("job").await;
    let seen = Arc::<Seen>::default();
    let first = client("a".into(), &[&gateway], &seen);
    turns_ended(&seen, 2).await;
    let second = tokio::spawn(turn(&gateway, "b", LONG_MS).send());
    is_in_line(&gateway, "b").await;
    turns_ended(&seen, 4).await;
    waiting_is(&gateway, 2, 1).await;
    released(&gateway, "job", &held).await;
    first.await.expect("granted and released");
    let second = Lease::from(&answer(second).await);
    let (first, _) = seen.grants.lock().unwrap()[0];
    assert!(first < second.fencing, "{first} {second:?}");
}

/// The lock becomes free exactly between two turns of the first waiter.
#[tokio::test]
async fn a_lock_released_between_two_turns_is_left_to_the_first() {
    let gateway = Launch::embedded().start().await;
    let mut fast = 0;
    for _ in 0..30 {
        let held = gateway.acquire("job").await;
        let second = ("b", turn(&gateway, "b", LONG_MS));
        let (refused, other) = one_turn_before(&gateway, "a", second).await;
        released(&gateway, "job", &held).await;
        let first = Lease::from(&turn(&gateway, "a", LONG_MS).send().await);
        let is_fast = refused.at.elapsed() < GAP / 2;
        fast += usize::from(is_fast);
        assert!(!is_fast || !other.is_finished(), "another waiter was served before");
        released(&gateway, "job", &first).await;
        let second = Lease::from(&answer(other).await);
        released(&gateway, "job", &second).await;
        if fast == 5 {
            return;
        }
    }
    panic!("the machine is too slow for this test: {fast} of 30 rounds were fast enough");
}

#[tokio::test]
async fn clients_that_never_come_back_delay_a_lock_only_once() {
    let gateway = Launch::embedded().start().await;
    let mut times = Vec::new();
    for round in 0..8 {
        let held = gateway.acquire("job").await;
        let stays = ("stays", unkeyed(&gateway, "stays", LONG_MS));
        let (refused, stays) = one_turn_before(&gateway, &format!("gone{round}"), stays).await;
        assert_eq!(told(&refused).1, Some(10_000));
        let since = Instant::now();
        released(&gateway, "job", &held).await;
        let granted = answer(stays).await;
        times.push(granted.at - since);
        released(&gateway, "job", &Lease::from(&granted)).await;
    }
    println!("{times:?}");
    assert!(median(times.clone()) < GAP / 2, "{times:?}");
}

#[tokio::test]
async fn a_place_is_gone_when_its_time_is_over() {
    let gateway = Launch::embedded().start().await;
    gateway.acquire("job").await;
    let refused = turn(&gateway, "a", 50).send().await;
    assert_eq!(told(&refused), (1, Some(10_000)));
    let _b = start_waiting(&gateway, unkeyed(&gateway, "b", 25_000)).await;
    line_is(&gateway, &[("a", true), ("b", false)]).await;
    let kept = eventually("the place is gone", async || {
        (line(&gateway).await == [("b".to_owned(), false)]).then(|| refused.at.elapsed())
    })
    .await;
    assert!(kept > Duration::from_millis(9_900), "{kept:?}");
    let again = turn(&gateway, "a", 50).send().await;
    assert_eq!(told(&again), (2, Some(10_000)), "at the end of the line");
    eventually("upkeep removes the place without a request for the lock", async || {
        let kept = Samples::of(&gateway).await.get("redlock_kept_places", &[]);
        (kept == 0.0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn waiters_without_a_key_go_to_the_end_after_each_turn() {
    let gateway = Launch::embedded().start().await;
    let held = gateway.acquire("job").await;
    let refused = unkeyed(&gateway, "a", 50).send().await;
    assert_eq!(told(&refused), (1, None));
    let detail = refused.json()["detail"].as_str().expect("a text").to_owned();
    assert!(detail.contains("1st in line, the place is not kept"), "{detail}");
    let second = start_waiting(&gateway, unkeyed(&gateway, "b", LONG_MS)).await;
    let first = start_waiting(&gateway, unkeyed(&gateway, "a", LONG_MS)).await;
    line_is(&gateway, &[("b", false), ("a", false)]).await;
    released(&gateway, "job", &held).await;
    released(&gateway, "job", &Lease::from(&answer(second).await)).await;
    Lease::from(&answer(first).await);
}

#[tokio::test]
async fn refusals_tell_holder_position_and_place() {
    let gateway = Launch::embedded().start().await;
    let body = json!({ "ttl_ms": 60_000, "owner": "alice" });
    assert_eq!(gateway.post("job", body).await.status, 201);
    let _first = start_waiting(&gateway, unkeyed(&gateway, "b", LONG_MS)).await;
    let refused = turn(&gateway, "a", 50).send().await;
    let problem = refused.problem(409, "lock_held");
    let acquired = gateway.inspect("job").await["acquired_at"].clone();
    assert_eq!((&problem["holder"], &problem["acquired_at"]), (&json!("alice"), &acquired));
    let detail = problem["detail"].as_str().expect("a text");
    let since = format!("\"alice\" has held it since {}; it may", acquired.as_str().unwrap());
    assert!(detail.starts_with(&since), "{detail}");
    assert!(detail.ends_with("; 2nd in line, the place is kept for 10s"), "{detail}");
    let once = gateway.post("job", json!({})).await;
    let problem = once.problem(409, "lock_held");
    assert_eq!(problem["acquired_at"], acquired);
    assert!(problem.get("queue_position").is_none(), "it has not waited: {problem}");
}

#[tokio::test]
async fn waiters_are_shown_in_order_with_those_away() {
    let gateway = Launch::embedded().start().await;
    gateway.acquire("job").await;
    assert!(gateway.inspect("job").await.get("waiters").is_none(), "nobody waits");
    turn(&gateway, "a", 50).send().await;
    let _b = start_waiting(&gateway, unkeyed(&gateway, "b", LONG_MS)).await;
    turn(&gateway, "c", 50).send().await;
    line_is(&gateway, &[("a", true), ("b", false), ("c", true)]).await;
    let _a = start_waiting(&gateway, turn(&gateway, "a", LONG_MS)).await;
    line_is(&gateway, &[("a", false), ("b", false), ("c", true)]).await;
    let status = gateway.inspect("job").await;
    assert_eq!((&status["waiters_total"], &status["state"]), (&json!(3), &json!("held")));
    // `a` has waited longer than `b`, although `a` came back later.
    let since = |at: usize| status["waiters"][at]["waiting_since"].as_str().expect("a time");
    assert!(since(0) < since(1), "{status}");
    let listed = gateway.get("/locks").await.json();
    assert!(listed["locks"][0].get("waiters").is_none(), "{listed}");
    assert_eq!(listed["locks"][0]["waiters_total"], 3, "{listed}");
}

#[tokio::test]
async fn a_cut_connection_keeps_its_place_and_delete_gives_it_up() {
    let gateway = Launch::embedded().start().await;
    let held = gateway.acquire("job").await;
    let body = json!({ "ttl_ms": 60_000, "wait_ms": LONG_MS, "owner": "a" }).to_string();
    let mut raw = gateway.raw().await;
    let header = format!("idempotency-key: {}\r\n", key_of("a"));
    raw.announce("POST", "job", &header, body.len()).await;
    raw.write(body).await;
    line_is(&gateway, &[("a", false)]).await;
    let other = start_waiting(&gateway, turn(&gateway, "b", LONG_MS)).await;
    drop(raw);
    line_is(&gateway, &[("a", true), ("b", false)]).await;
    let refused = turn(&gateway, "a", 50).send().await;
    assert_eq!(told(&refused), (1, Some(10_000)));
    line_is(&gateway, &[("a", true), ("b", false)]).await;
    let given_up = gateway.call(Method::DELETE, lock_path("job"));
    let given_up = given_up.header("idempotency-key", key_of("a")).send().await;
    assert_eq!(given_up.status, 409, "b waits, and the holder is another: {given_up:?}");
    assert_eq!(line(&gateway).await, [("b".to_owned(), false)]);
    released(&gateway, "job", &held).await;
    Lease::from(&answer(other).await);
}

/// The client repeats its request before the gateway has noticed that the connection is cut.
#[tokio::test]
async fn a_repeated_request_inherits_the_place_of_the_first() {
    let gateway = Launch::embedded().start().await;
    let held = gateway.acquire("job").await;
    let early = start_waiting(&gateway, turn(&gateway, "a", 5_000)).await;
    let _b = start_waiting(&gateway, turn(&gateway, "b", LONG_MS)).await;
    let again = start_waiting(&gateway, turn(&gateway, "a", LONG_MS)).await;
    line_is(&gateway, &[("a", false), ("b", false), ("a", false)]).await;
    assert_eq!(told(&answer(early).await), (1, None), "the place is the other request's");
    assert_eq!(line(&gateway).await, [("a".to_owned(), false), ("b".to_owned(), false)]);
    released(&gateway, "job", &held).await;
    Lease::from(&answer(again).await);
}

#[tokio::test]
async fn one_client_cannot_take_all_kept_places() {
    let greedy = key("greedy", HOLDER, "*").await;
    let victim = key("victim", HOLDER, "*").await;
    let file = file(&[&greedy, &victim]);
    let gateway =
        with_keys(&file).flag("--public", "metrics").flag("--max-waiters", "8").start().await;
    victim.acquire(&gateway, "job").await;
    let ask = |key: &super::keys::Key, who: &str| {
        let body = json!({ "ttl_ms": 60_000, "wait_ms": 1, "owner": who });
        let call = key.call(&gateway, Method::POST, &lock_path("job")).json(&body);
        call.header("idempotency-key", key_of(who)).send()
    };
    let mut kept = 0;
    for number in 0..40 {
        let (_, kept_ms) = told(&ask(&greedy, &format!("greedy{number}")).await);
        kept += usize::from(kept_ms.is_some());
    }
    assert_eq!(kept, 2, "a quarter of the 8 places");
    let (position, kept_ms) = told(&ask(&victim, "victim").await);
    assert_eq!((position, kept_ms), (3, Some(10_000)));
    let kept = Samples::of(&gateway).await.get("redlock_kept_places", &[]);
    assert_eq!(kept, 3.0);
}
