//! Waiting at several gateways over the same masters. A release at one gateway reaches a waiter at
//! another one: soon if a hint arrives, and otherwise at the next poll. When many clients compete,
//! each of them gets its turn, and no two of them hold the lock at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::client::Lease;
use crate::support::gateway::Gateway;
use crate::support::harness::{RedisServer, eventually, masters};
use crate::support::measure::measured;
use crate::support::metrics::Samples;
use crate::support::waiters::{
    HOUR_MS, answer, long_waiting_acquire, median, nothing_is_left, patient_over, released,
    start_waiting, waiting, waiting_acquire, waiting_is,
};

/// The time that a waiter's hint may need to arrive. Receivers do not acknowledge hints.
const WORD_GETS_ROUND: Duration = Duration::from_millis(50);

async fn two_over(servers: &[RedisServer]) -> [Gateway; 2] {
    let first = patient_over(servers).ready().await;
    let second = patient_over(servers).ready().await;
    [first, second]
}

/// Two gateways that may not use the channel of hints.
async fn two_without_hints(servers: &[RedisServer]) -> [Gateway; 2] {
    for server in servers {
        server.cmd(&["ACL", "SETUSER", "default", "resetchannels"]);
    }
    two_over(servers).await
}

/// Acquires through `holding`, waits at `asking`, and releases through `through`. Returns the time
/// from the sending of the release to the waiter's grant.
async fn handed_over(holding: &Gateway, asking: &Gateway, through: &Gateway) -> Duration {
    let held = holding.acquire_for("job", HOUR_MS).await;
    let waiter = start_waiting(asking, long_waiting_acquire(asking, "job")).await;
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

/// How many votes this gateway has received from all masters.
async fn votes(gateway: &Gateway) -> u64 {
    Samples::of(gateway).await.non_zero("redlock_node_votes_total", &["vote"]).values().sum()
}

/// Hands a lock over until the counters of the second gateway show that a release woke the waiter.
/// A waiter may also find the free lock by a poll.
async fn eventually_handed_over(
    gateways: [&Gateway; 2],
    through: &Gateway,
    is_enough: impl Fn((f64, f64)) -> bool,
) {
    let [first, second] = gateways;
    let mut rounds = 0..100;
    eventually("a release wakes the waiter", async || {
        rounds.next().expect("every waiter polls");
        handed_over(first, second, through).await;
        is_enough(hand_offs(second).await).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_release_at_another_gateway_wakes_the_waiter() {
    let servers = masters(5);
    let [first, second] = two_over(&servers).await;
    eventually_handed_over([&first, &second], &first, |(local, remote)| {
        assert_eq!(local, 0.0);
        remote > 0.0
    })
    .await;
    assert_eq!(hand_offs(&first).await, (0.0, 0.0));
    nothing_is_left(&second).await;
}

#[tokio::test]
async fn a_release_hands_over_a_lock_acquired_at_another_gateway() {
    let servers = masters(5);
    let [first, second] = two_over(&servers).await;
    eventually_handed_over([&first, &second], &second, |(local, _)| local > 0.0).await;
    nothing_is_left(&first).await;
}

#[tokio::test]
async fn forbidden_hints_lead_to_polls_and_a_log_line() {
    let servers = masters(5);
    let [first, second] = two_without_hints(&servers).await;
    handed_over(&first, &second, &first).await;
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

/// The lock is free when the wait of a request ends, but no hint has said so. The request has become
/// the first in line, and has not asked yet.
#[tokio::test]
async fn an_impatient_waiter_asks_once_before_it_is_refused() {
    const WAIT: Duration = Duration::from_millis(300);
    let servers = masters(3);
    let [first, second] = two_without_hints(&servers).await;
    let (mut granted, mut in_vain) = (0, 0);
    for round in 0.. {
        let name = format!("job-{round}");
        let held = first.acquire_for(&name, HOUR_MS).await;
        let patient = start_waiting(&second, long_waiting_acquire(&second, &name)).await;
        let sent = Instant::now();
        let impatient = waiting_acquire(&second, &name, WAIT.as_millis() as u64);
        let impatient = tokio::spawn(impatient.send());
        eventually("both wait", async || {
            (impatient.is_finished() || waiting(&second).await.0 == 2).then_some(())
        })
        .await;
        let before = votes(&second).await;
        patient.abort();
        eventually("one is gone", async || (waiting(&second).await.0 < 2).then_some(())).await;
        released(&first, &name, &held).await;
        let was_free = sent.elapsed() < WAIT;
        let answer = answer(impatient).await;
        let has_asked = votes(&second).await > before;
        if answer.status == 201 {
            released(&second, &name, &Lease::from(&answer)).await;
            granted += u32::from(was_free);
        }
        waiting_is(&second, 0, 0).await;
        // On a busy machine, the wait may end before the release. Or the waiter polls before the
        // release, and does not ask again.
        let is_settled = !was_free || has_asked || answer.status == 201;
        assert!(is_settled, "it did not ask: {answer:?}");
        in_vain += u32::from(was_free && answer.status != 201);
        assert!(in_vain < 100, "{in_vain} times it asked in vain, {granted} times it got the lock");
        if granted == 10 {
            break;
        }
    }
}

/// A gateway that receives no hints does not know of the waiters at other gateways. It must not
/// keep the lock for ever by handing it from one of its own clients to the next.
#[tokio::test]
async fn a_gateway_without_hints_does_not_starve_the_other() {
    let servers = masters(5);
    let gateways = Arc::new(two_without_hints(&servers).await);
    let is_over = Arc::new(AtomicBool::new(false));
    let busy: Vec<_> = (0..4)
        .map(|_| {
            let (gateways, is_over) = (gateways.clone(), is_over.clone());
            let goes_on = move |_| !is_over.load(Ordering::Relaxed);
            tokio::spawn(async move { compete(&gateways[0], 0, goes_on).await })
        })
        .collect();
    waiting_is(&gateways[0], 3, 1).await;
    // The others leave only after this one was served.
    let answer = long_waiting_acquire(&gateways[1], "job").send().await;
    is_over.store(true, Ordering::Relaxed);
    released(&gateways[1], "job", &Lease::from(&answer)).await;
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

/// Acquires and releases the lock again and again. `goes_on` gets the number of holds so far.
async fn compete(gateway: &Gateway, index: usize, goes_on: impl Fn(usize) -> bool) -> Vec<Hold> {
    let mut holds = Vec::new();
    while goes_on(holds.len()) {
        let asked = Instant::now();
        let answer = long_waiting_acquire(gateway, "job").send().await;
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

/// Eight clients at each of two gateways compete for a lock. Returns all holds, in the order of
/// their beginnings.
async fn sixteen_compete(
    gateways: &Arc<[Gateway; 2]>,
    goes_on: impl Fn(usize) -> bool + Clone + Send + 'static,
) -> Vec<Hold> {
    let clients: Vec<_> = (0..16)
        .map(|client| {
            let (gateways, goes_on) = (gateways.clone(), goes_on.clone());
            tokio::spawn(async move { compete(&gateways[client % 2], client % 2, goes_on).await })
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
    for gateway in gateways.iter() {
        nothing_is_left(gateway).await;
    }
    holds
}

#[tokio::test]
async fn sixteen_clients_at_two_gateways_are_all_served() {
    let servers = masters(5);
    let gateways = Arc::new(two_over(&servers).await);
    let holds = sixteen_compete(&gateways, |holds| holds < 4).await;
    assert_eq!(holds.len(), 64);
}

mod measured {
    use super::*;

    #[tokio::test]
    async fn a_release_at_another_gateway_wakes_the_waiter_in_ms() {
        const ROUNDS: usize = 20;
        let servers = masters(5);
        let [first, second] = two_over(&servers).await;
        measured("hand-overs by hints", async || {
            let (_, before) = hand_offs(&second).await;
            let mut times = Vec::new();
            let mut plain = Vec::new();
            for _ in 0..ROUNDS {
                times.push(handed_over(&first, &second, &first).await);
                plain.push(plainly(&second).await);
            }
            let plain = median(plain);
            println!("by a hint: {times:?}, plain {plain:?}");
            let (_, after) = hand_offs(&second).await;
            // In some rounds the waiter's poll may come before the hint.
            let by_hints = after - before;
            let is_soon = median(times.clone()) <= Duration::from_millis(30) + 2 * plain;
            if is_soon && by_hints > ROUNDS as f64 / 2.0 {
                Ok(())
            } else {
                Err(format!("{times:?}, plain {plain:?}, {by_hints} by hints"))
            }
        })
        .await;
    }

    #[tokio::test]
    async fn a_release_hands_over_a_lock_acquired_at_another_gateway_in_ms() {
        const ROUNDS: usize = 10;
        let servers = masters(5);
        let [first, second] = two_over(&servers).await;
        measured("hand-overs in the same process", async || {
            let (before, _) = hand_offs(&second).await;
            let mut times = Vec::new();
            let mut plain = Vec::new();
            for _ in 0..ROUNDS {
                times.push(handed_over(&first, &second, &second).await);
                plain.push(plainly(&second).await);
            }
            let plain = median(plain);
            println!("in the same process: {times:?}, plain {plain:?}");
            let (after, _) = hand_offs(&second).await;
            let local = after - before;
            let is_soon = median(times.clone()) <= Duration::from_millis(30) + 2 * plain;
            if is_soon && local > ROUNDS as f64 / 2.0 {
                Ok(())
            } else {
                Err(format!("{times:?}, plain {plain:?}, {local} in the same process"))
            }
        })
        .await;
    }

    #[tokio::test]
    async fn polls_without_hints_find_a_free_lock_within_2_s() {
        let servers = masters(5);
        let [first, second] = two_without_hints(&servers).await;
        measured("hand-overs by polls", async || {
            let mut times = Vec::new();
            for _ in 0..6 {
                times.push(handed_over(&first, &second, &first).await);
            }
            println!("by polls: {times:?}");
            let is_soon = times.iter().all(|time| *time <= Duration::from_secs(2));
            if is_soon { Ok(()) } else { Err(format!("{times:?}")) }
        })
        .await;
    }

    #[tokio::test]
    async fn sixteen_clients_at_two_gateways_are_served_fairly() {
        let servers = masters(5);
        let gateways = Arc::new(two_over(&servers).await);
        measured("the shares of sixteen clients", async || {
            let until = Instant::now() + Duration::from_secs(3);
            let holds = sixteen_compete(&gateways, move |_| Instant::now() < until).await;
            let longest = holds.iter().map(|hold| hold.waited).max().expect("somebody was served");
            let at_first = holds.iter().filter(|hold| hold.gateway == 0).count();
            let share = at_first as f64 / holds.len() as f64;
            let found = format!(
                "{} holds in 3 s, {share:.2} of them at the first gateway, longest wait {longest:?}",
                holds.len()
            );
            println!("{found}");
            let is_fair = (0.15..=0.85).contains(&share) && longest < Duration::from_secs(3);
            if is_fair && holds.len() >= 50 { Ok(()) } else { Err(found) }
        })
        .await;
    }
}
