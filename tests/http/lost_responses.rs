//! Clients whose answers are lost, while masters and gateways hang and connections break. Once an
//! answer has made a promise, every repetition of the request must keep it, at any gateway, whether
//! or not the client has received that answer.
//!
//! Every run draws new clients and faults, and prints its seed. `SWALLOWED_SEED=<seed>` repeats the
//! run.

mod history;
mod order;

use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Method;
use rustix::process::Signal;
use serde_json::json;
use tokio::time::sleep;

use self::history::History;
use self::order::{Order, Run};
use crate::support::chance::{Chance, seed};
use crate::support::client::{Answer, Call, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, masters};

const ORDERS: usize = 1_000;
const CLIENTS: usize = 24;
const LOCKS: usize = 36;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_after_a_lost_answer_gets_the_same_grant() {
    let seed = seed("SWALLOWED_SEED");
    let servers = masters(5);
    let mut gateways = Vec::new();
    for _ in 0..3 {
        // Searching a log of trace level for a thousand keys would take too long.
        let launch = Launch::over(&servers).flag("--node-timeout", "500ms").env("RUST_LOG", "info");
        gateways.push(launch.ready().await);
    }
    let run = Arc::new(Run { gateways, locks: LOCKS, seed, began: Instant::now() });
    let clients: Vec<_> =
        (0..CLIENTS).map(|first| tokio::spawn(share(run.clone(), first))).collect();
    let faults = faults(&servers, &run, || clients.iter().all(|client| client.is_finished())).await;
    let mut history = History::default();
    for client in clients {
        history.add(client.await.unwrap_or_else(|_| panic!("replay with SWALLOWED_SEED={seed}")));
    }
    let took = run.began.elapsed();
    let plain = history.plain_denials();
    println!("{ORDERS} orders in {took:.1?} with {faults} faults: {:#?}", history.counts);
    println!(
        "{plain} of {} denials while another client knowingly held the lock",
        history.denials.len()
    );
    let wrong = history.judged();
    assert!(
        wrong.is_empty(),
        "{} violations: {}",
        wrong.len(),
        wrong[..wrong.len().min(9)].join("\n\n")
    );
    assert_something_was_met(&history, faults);
    for gateway in &run.gateways {
        eventually("no lock is left behind", async || {
            let page = gateway.get("/locks?prefix=stock%2F&limit=1000").await.json();
            page["locks"].as_array().expect("a list").is_empty().then_some(())
        })
        .await;
    }
}

/// Carries out every n-th order of the run, beginning with `first`, one after another, until a
/// client notices a violation.
async fn share(run: Arc<Run>, first: usize) -> History {
    let mut history = History::default();
    for number in (first..ORDERS).step_by(CLIENTS) {
        history.add(Order::new(&run, number).carried_out().await);
        if !history.wrong.is_empty() {
            break;
        }
    }
    history
}

/// If no answer was lost, refused or broken, the run would show nothing.
fn assert_something_was_met(history: &History, faults: usize) {
    let of = |what: &str| history.how_often(what);
    assert_eq!(history.holds.len(), ORDERS);
    assert_eq!(of("read and lost") + of("closed without reading"), ORDERS);
    assert_eq!(of("PATCH: 200"), ORDERS);
    for (what, least) in [
        ("read and lost", ORDERS / 3),
        ("closed without reading", ORDERS / 3),
        ("repeated: the same grant", ORDERS / 3),
        ("first answer: the grant of a lost request", 10),
        ("first answer: a new grant after a lost request", 10),
        ("POST: 409 lock_held", 10),
        ("POST: 503 quorum_unavailable", 1),
    ] {
        assert!(of(what) >= least, "{what}: {}, of at least {least}", of(what));
    }
    assert!(faults >= 5, "{faults}");
}

/// Causes one period of faults after another, until `over`. In each period two of the five masters
/// hang and lose connections. Sometimes a gateway hangs at the same time. Then the connections to
/// all masters break at once, and all parties get time to come back. No master loses data.
async fn faults(servers: &[RedisServer], run: &Run, over: impl Fn() -> bool) -> usize {
    let mut chance = Chance::of(run.seed, ORDERS);
    let mut count = 0;
    while !over() {
        let first = chance.below(servers.len());
        let apart = 1 + chance.below(servers.len() - 1);
        let pair = [&servers[first], &servers[(first + apart) % servers.len()]];
        for _ in 0..4 {
            hang(&pair, run, &mut chance).await;
            count += 1;
        }
        servers.iter().for_each(cut);
        count += 1;
        sleep(COMES_BACK).await;
    }
    count
}

/// The time without faults at the end of a period. A gateway waits up to a second before it
/// connects again. After that, a refused client waits up to another second before it asks again.
/// The rest is for their work.
const COMES_BACK: Duration = Duration::from_millis(2_500);

async fn hang(pair: &[&RedisServer], run: &Run, chance: &mut Chance) {
    let stopped = &pair[..chance.below(pair.len() + 1)];
    let gateway = chance.one_in(2).then(|| &run.gateways[chance.below(run.gateways.len())]);
    pair[stopped.len()..].iter().copied().for_each(cut);
    stopped.iter().for_each(|server| server.stop());
    gateway.inspect(|gateway| gateway.signal(Signal::STOP));
    sleep(Duration::from_millis(10 + chance.below(200) as u64)).await;
    stopped.iter().for_each(|server| server.cont());
    gateway.inspect(|gateway| gateway.signal(Signal::CONT));
    sleep(Duration::from_millis(50 + chance.below(300) as u64)).await;
}

/// Breaks all connections to a server, except those that receive hints.
fn cut(server: &RedisServer) {
    server.cmd(&["CLIENT", "KILL", "TYPE", "normal"]);
}

const KEY: &str = "reservation-4711";
const TTL_MS: u64 = 2_000;
const HOLD: Duration = Duration::from_secs(3);

async fn keyed(gateway: &Gateway, name: &str) -> Answer {
    let call = gateway.call(Method::POST, lock_path(name)).header("idempotency-key", KEY);
    decided(&call.json(&json!({ "ttl_ms": TTL_MS }))).await
}

/// Repeats a call as long as its answer is that there is no quorum. A machine that stands still for
/// a tenth of the TTL looks like masters that do not answer.
async fn decided(call: &Call) -> Answer {
    eventually("masters answer", async || {
        Some(call.clone().send().await).filter(|answer| answer.status != 503)
    })
    .await
}

/// Repeats the request at both gateways in turn, until one refuses it because the lock has been
/// held for `max_hold`. Every answer before that must have the same grant.
async fn kept_by_repeating(gateways: [&Gateway; 2], name: &str) -> (Lease, Answer) {
    let first = keyed(gateways[0], name).await;
    let lease = Lease::from(&first);
    let mut turn = 0;
    let refused = eventually("a repetition is refused", async || {
        turn += 1;
        let sent = Instant::now();
        let answer = keyed(gateways[turn % 2], name).await;
        if answer.status != 201 {
            return Some(answer);
        }
        assert_eq!(
            (Lease::from(&answer), answer.header("idempotency-replayed")),
            (lease.clone(), "true")
        );
        assert!(sent < first.at + HOLD, "repeated {:?} after the grant", sent - first.at);
        None
    })
    .await;
    assert!(turn > 2, "only {turn} repetitions");
    (lease, refused)
}

/// The lock then ends: by a release if `released`, otherwise by its expiry.
async fn held_for_too_long(gateways: [&Gateway; 2], name: &str, released: bool) {
    let (lease, refused) = kept_by_repeating(gateways, name).await;
    let problem = refused.problem(409, "max_hold_reached");
    assert_eq!(problem["title"], "The lock has been held for too long");
    let detail = problem["detail"].as_str().expect("a text");
    assert!(detail.contains("the limit is 3s; release it, then acquire it again"), "{detail}");
    assert_eq!(refused.header("idempotency-replayed"), "");

    // A refusal neither ends the lock nor prolongs it.
    decided(&gateways[0].call(Method::POST, lock_path(name))).await.problem(409, "lock_held");
    if released {
        let release =
            gateways[1].call(Method::DELETE, lock_path(name)).header("lock-token", &lease.token);
        let answer = decided(&release).await;
        assert!([204, 404].contains(&answer.status), "{answer:?}");
    }
    let next = eventually("the key competes again", async || {
        let answer = keyed(gateways[0], name).await;
        if answer.status == 201 {
            return Some(answer);
        }
        answer.problem(409, "max_hold_reached");
        assert!(!released, "the lock was released");
        None
    })
    .await;
    assert_eq!(next.header("idempotency-replayed"), "");
    assert!(Lease::from(&next).fencing > lease.fencing);
}

#[tokio::test]
async fn repeating_a_request_does_not_keep_a_lock_beyond_max_hold() {
    let servers = masters(3);
    let launch = || {
        let times = [("--max-ttl", "2s"), ("--default-ttl", "2s"), ("--max-hold", "3s")];
        times
            .into_iter()
            .fold(Launch::over(&servers), |launch, (flag, time)| launch.flag(flag, time))
    };
    let gateways = [&launch().ready().await, &launch().ready().await];
    tokio::join!(
        held_for_too_long(gateways, "released", true),
        held_for_too_long(gateways, "left-alone", false)
    );
}
