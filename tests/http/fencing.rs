//! Fencing tokens as a protected resource sees them: each later grant of a lock carries a larger
//! token, whichever gateway granted it and whatever that gateway's clock shows. A preloaded library
//! puts the clock of one of two gateways half a second ahead. The clock of the machine itself is
//! not changed.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};

use crate::support::client::{Lease, lock_path};
use crate::support::cluster::clock_shim;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, masters};

const AHEAD: Duration = Duration::from_millis(500);
const CLIENTS: usize = 64;
/// The clients go on until there are this many grants, and this many by each gateway.
const GRANTS: usize = 240;
const OF_EACH: usize = GRANTS / 10;
/// The clients end after this many grants in any case.
const MOST: usize = 20 * GRANTS;

/// Two gateways over the same masters. The second gateway's clock is ahead.
async fn two_gateways(servers: &[RedisServer]) -> (Gateway, Gateway) {
    let shim = clock_shim("clock_shim.c");
    let launch = || Launch::over(servers).flag("--clock-skew", "10s").flag("--node-timeout", "10s");
    let shifted = launch()
        .env("LD_PRELOAD", shim.path())
        .env("CLOCK_SHIM_OFFSET_MS", &AHEAD.as_millis().to_string());
    let ahead = shifted.ready().await;
    let exact = launch().ready().await;
    // The gateway with the shifted clock is asked first. Without the shift, its token would be the
    // smaller one.
    let since = Instant::now();
    let early = ahead.acquire("which-clock-ahead").await.fencing;
    let late = exact.acquire("which-clock-exact").await.fencing;
    let apart = Duration::from_micros(early.saturating_sub(late));
    assert!(apart + since.elapsed() >= AHEAD && apart <= AHEAD, "the clocks are {apart:?} apart");
    (exact, ahead)
}

#[tokio::test]
async fn a_gateway_with_a_slow_clock_grants_larger_tokens() {
    let servers = masters(3);
    let (exact, ahead) = two_gateways(&servers).await;
    let mut last = 0;
    for gateway in [&exact, &ahead, &exact, &ahead, &exact] {
        let lease = gateway.acquire("job").await;
        assert!(lease.fencing > last, "{} after {last}", lease.fencing);
        last = lease.fencing;
        assert_eq!(gateway.delete("job", &lease.token).await.status, 204);
    }
}

/// The longest time that a lock may be held is 24 h by default.
#[tokio::test]
async fn a_gateway_whose_clock_is_wrong_ends_nobodys_work() {
    let servers = masters(3);
    let exact = Launch::over(&servers).ready().await;
    let shim = clock_shim("clock_shim.c");
    let wrong = Launch::over(&servers)
        .env("LD_PRELOAD", shim.path())
        .env("CLOCK_SHIM_OFFSET_MS", &Duration::from_secs(25 * 3_600).as_millis().to_string())
        .start()
        .await;
    // All masters have answered by then, and their clocks contradict the gateway's.
    eventually("the gateway sees the masters' clocks", async || {
        let nodes = wrong.readyz().await.json()["nodes"].clone();
        let is_off = |node: &Value| node["advice"] == "repair the clock that is wrong";
        nodes.as_array().expect("nodes").iter().all(is_off).then_some(())
    })
    .await;
    let lease = exact.acquire("job").await;
    let refused = wrong.patch("job", &lease.token, 60_000).await.problem(503, "outcome_unknown");
    assert_eq!(refused["nodes"].as_array().map(Vec::len), Some(3), "{refused:#}");
    let leases = json!([{ "name": "job", "token": lease.token }]);
    let many =
        wrong.call(Method::PATCH, "/locks").json(&json!({ "leases": leases, "ttl_ms": 60_000 }));
    let many = many.send().await;
    assert_eq!(many.json()["results"][0]["code"], "outcome_unknown", "{many:?}");
    assert_eq!(exact.patch("job", &lease.token, 60_000).await.status, 200);
}

/// How many of these grants are by this gateway.
fn granted_by(at: usize, grants: &[(u64, usize)]) -> usize {
    grants.iter().filter(|grant| grant.1 == at).count()
}

fn are_enough(grants: &[(u64, usize)]) -> bool {
    let by_each = [0, 1].iter().all(|at| granted_by(*at, grants) >= OF_EACH);
    grants.len() >= MOST || grants.len() >= GRANTS && by_each
}

#[tokio::test]
async fn tokens_grow_for_64_clients_of_two_skewed_gateways() {
    let servers = masters(5);
    let (exact, ahead) = two_gateways(&servers).await;
    // A client writes to the list only while it holds the lock. So the list has the order of the
    // grants.
    let grants = Arc::new(Mutex::new(Vec::<(u64, usize)>::new()));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let at = client % 2;
            let gateway = [&exact, &ahead][at];
            let path = lock_path("hot");
            let acquire = gateway.call(Method::POST, &*path).json(&json!({ "ttl_ms": 60_000 }));
            let release = gateway.call(Method::DELETE, path);
            let grants = grants.clone();
            tokio::spawn(async move {
                let mut pause = Duration::from_millis(2 + client as u64);
                while !are_enough(&grants.lock().unwrap()) {
                    let answer = acquire.clone().send().await;
                    match answer.status {
                        201 => {
                            let lease = Lease::from(&answer);
                            grants.lock().unwrap().push((lease.fencing, at));
                            let released =
                                release.clone().header("lock-token", &lease.token).send().await;
                            assert_eq!(released.status, 204, "{released:?}");
                            pause = Duration::from_millis(2 + client as u64);
                        }
                        // All masters are up. So if the votes are split, the answer is mostly
                        // "held" (409).
                        409 => pause = (pause * 2).min(Duration::from_millis(100)),
                        503 => {
                            answer.problem(503, "quorum_unavailable");
                        }
                        _ => panic!("{answer:?}"),
                    }
                    tokio::time::sleep(pause).await;
                }
            })
        })
        .collect();
    for client in clients {
        client.await.expect("no client panics");
    }
    let grants = std::mem::take(&mut *grants.lock().unwrap());
    for at in [0, 1] {
        let of_one = granted_by(at, &grants);
        assert!(of_one >= OF_EACH, "gateway {at} granted {of_one} of {}", grants.len());
    }
    assert!(grants.windows(2).any(|pair| pair[0].1 != pair[1].1), "the gateways never took turns");
    for pair in grants.windows(2) {
        assert!(pair[0].0 < pair[1].0, "tokens out of order: {pair:?}");
    }
}
