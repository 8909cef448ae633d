//! Waiting at several gateways over the same masters. A release at one gateway reaches a waiter at
//! another one: soon if a hint arrives, and otherwise at the next poll. When many clients compete,
//! each of them gets its turn, and no two of them hold the lock at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::support::client::Lease;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, masters};
use crate::support::metrics::Samples;
use crate::support::waiters::{
    LONG_MS, answer, median, nothing_is_left, released, start_waiting, waiting_acquire, waiting_is,
};

/// The time that a waiter's hint may need to arrive. Receivers do not acknowledge hints.
const WORD_GETS_ROUND: Duration = Duration::from_millis(50);

async fn two_over(servers: &[RedisServer]) -> [Gateway; 2] {
    let first = Launch::over(servers).ready().await;
    let second = Launch::over(servers).ready().await;
    [first, second]
}

/// Acquires through `holding`, waits at `asking`, and releases through `through`. Returns the time
/// from the sending of the release to the waiter's grant.
async fn handed_over(holding: &Gateway, asking: &Gateway, through: &Gateway) -> Duration {
    let held = holding.acquire("job").await;
    let waiter = start_waiting(asking, waiting_acquire(asking, "job", LONG_MS)).await;
    tokio::time::sleep(WORD_GETS_ROUND).await;
    let since = Instant::now();
    released(through, "job", &held).await;
    let granted = answer(waiter).await;
    let lease = Lease::from(&granted);
    assert!(lease.fencing > held.fencing);
    released(asking, "job", &lease).await;
    granted.at - since
}

/// The time that an acquire and a release without waiting take on this machine now.
async fn plainly(gateway: &Gateway) -> Duration {
    let sent = Instant::now();
    let lease = gateway.acquire("another").await;
    released(gateway, "another", &lease).await;
    sent.elapsed()
}

async fn hand_offs(gateway: &Gateway) -> (f64, f64) {
    let samples = Samples::of(gateway).await;
    let kind = |kind| samples.get("redlock_handoffs_total", &[("kind", kind)]);
    (kind("local"), kind("remote"))
}

#[tokio::test]
async fn a_release_at_another_gateway_wakes_the_waiter_in_ms() {
    const ROUNDS: usize = 20;
    let servers = masters(5);
    let [first, second] = two_over(&servers).await;
    let mut times = Vec::new();
    let mut plain = Vec::new();
    for _ in 0..ROUNDS {
        times.push(handed_over(&first, &second, &first).await);
        plain.push(plainly(&second).await);
    }
    let plain = median(plain);
    println!("by a hint: {times:?}, plain {plain:?}");
    assert!(
        median(times.clone()) <= Duration::from_millis(30) + 2 * plain,
        "{times:?}, plain {plain:?}"
    );
    let (local, remote) = hand_offs(&second).await;
    // In some rounds the waiter's poll may come before the hint.
    assert!(local == 0.0 && remote > ROUNDS as f64 / 2.0, "{local} local, {remote} remote");
    assert_eq!(hand_offs(&first).await, (0.0, 0.0));
    nothing_is_left(&second).await;
}

#[tokio::test]
async fn a_release_hands_over_a_lock_acquired_at_another_gateway() {
    const ROUNDS: usize = 10;
    let servers = masters(5);
    let [first, second] = two_over(&servers).await;
    let mut times = Vec::new();
    let mut plain = Vec::new();
    for _ in 0..ROUNDS {
        times.push(handed_over(&first, &second, &second).await);
        plain.push(plainly(&second).await);
    }
    let plain = median(plain);
    println!("in the same process: {times:?}, plain {plain:?}");
    assert!(
        median(times.clone()) <= Duration::from_millis(30) + 2 * plain,
        "{times:?}, plain {plain:?}"
    );
    let (local, _) = hand_offs(&second).await;
    assert!(local > ROUNDS as f64 / 2.0, "{local}");
    nothing_is_left(&first).await;
}

#[tokio::test]
async fn forbidden_hints_lead_to_polls_and_a_log_line() {
    let servers = masters(5);
    for server in &servers {
        server.cmd(&["ACL", "SETUSER", "default", "resetchannels"]);
    }
    let [first, second] = two_over(&servers).await;
    let mut times = Vec::new();
    for _ in 0..6 {
        times.push(handed_over(&first, &second, &first).await);
    }
    println!("by polls: {times:?}");
    assert!(times.iter().all(|time| *time <= Duration::from_secs(2)), "{times:?}");
    assert_eq!(hand_offs(&second).await, (0.0, 0.0));
    for gateway in [&first, &second] {
        let log = gateway.stdout();
        let message = log
            .lines()
            .find(|line| line.contains("no hints arrive"))
            .unwrap_or_else(|| panic!("{log}"));
        for word in ["waiters poll", "SUBSCRIBE", "PUBLISH", "{lock:}:hints"] {
            assert!(message.contains(word), "no {word:?} in {message}");
        }
    }
    nothing_is_left(&first).await;
}

/// A gateway that receives no hints does not know of the waiters at other gateways. It must not
/// keep the lock for ever by handing it from one of its own clients to the next.
#[tokio::test]
async fn a_gateway_without_hints_does_not_starve_the_other() {
    let servers = masters(5);
    for server in &servers {
        server.cmd(&["ACL", "SETUSER", "default", "resetchannels"]);
    }
    let gateways = Arc::new(two_over(&servers).await);
    let until = Instant::now() + Duration::from_secs(12);
    let busy: Vec<_> = (0..4)
        .map(|_| {
            let gateways = gateways.clone();
            tokio::spawn(async move { compete(&gateways[0], 0, until).await })
        })
        .collect();
    waiting_is(&gateways[0], 3, 1).await;
    let answer = waiting_acquire(&gateways[1], "job", LONG_MS).send().await;
    let lease = Lease::from(&answer);
    released(&gateways[1], "job", &lease).await;
    assert!(answer.at < until, "the clients of this gateway waited until the others had left");
    for client in busy {
        client.await.expect("no panic");
    }
}

/// One hold of the lock, as its client saw it.
struct Hold {
    gateway: usize,
    fencing: u64,
    waited: Duration,
    granted: Instant,
    released: Instant,
}

async fn compete(gateway: &Gateway, index: usize, until: Instant) -> Vec<Hold> {
    let mut holds = Vec::new();
    while Instant::now() < until {
        let asked = Instant::now();
        let answer = waiting_acquire(gateway, "job", LONG_MS).send().await;
        let lease = Lease::from(&answer);
        let hold = Hold {
            gateway: index,
            fencing: lease.fencing,
            waited: answer.at - asked,
            granted: answer.at,
            released: Instant::now(),
        };
        holds.push(hold);
        released(gateway, "job", &lease).await;
    }
    holds
}

#[tokio::test]
async fn sixteen_clients_at_two_gateways_are_all_served() {
    const CLIENTS: usize = 8;
    let servers = masters(5);
    let gateways = Arc::new(two_over(&servers).await);
    let until = Instant::now() + Duration::from_secs(3);
    let clients: Vec<_> = (0..2 * CLIENTS)
        .map(|client| {
            let gateways = gateways.clone();
            tokio::spawn(async move { compete(&gateways[client % 2], client % 2, until).await })
        })
        .collect();
    let mut holds = Vec::new();
    for client in clients {
        holds.extend(client.await.expect("no panic"));
    }
    holds.sort_by_key(|hold| hold.granted);
    for pair in holds.windows(2) {
        assert!(pair[1].fencing > pair[0].fencing, "{} after {}", pair[1].fencing, pair[0].fencing);
        assert!(
            pair[1].granted >= pair[0].released,
            "{} and {} overlap",
            pair[0].fencing,
            pair[1].fencing
        );
    }
    let longest = holds.iter().map(|hold| hold.waited).max().expect("somebody was served");
    let share = holds.iter().filter(|hold| hold.gateway == 0).count() as f64 / holds.len() as f64;
    println!(
        "{} holds, {share:.2} of them at the first gateway, longest wait {longest:?}",
        holds.len()
    );
    assert!(holds.len() >= 50, "{} holds in 3 s", holds.len());
    assert!((0.15..=0.85).contains(&share), "{share} of the grants were at the first gateway");
    assert!(longest < Duration::from_secs(3), "{longest:?}");
    for gateway in gateways.iter() {
        nothing_is_left(gateway).await;
    }
}
