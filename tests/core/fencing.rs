//! Fencing tokens from end to end: each later grant of a lock has a larger token, whichever gateway
//! granted it and whatever that gateway's clock shows.
//!
//! Two gateways, each with its own workers, use the same five masters. The clock of one gateway is
//! ahead. Each contender notes its token while it holds the lock. So the notes are in the order of
//! the grants.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlock_core::clock::{Clock, SystemClock};
use redlock_core::node::{Reason, SafetyRules};
use redlock_core::{
    AcquireOptions, Env, LockError, NodeAnswer, Owner, OwnerChoice, Redlock, RetryPolicy, Settings,
};

use crate::support::nodes::{Cluster, LONG_MS, NODE_TIMEOUT, PREFIX, name, node_settings, ttl};

/// A wall clock that is ahead by this many microseconds, or behind if the number is negative.
struct OffsetClock(i64);

impl Clock for OffsetClock {
    fn monotonic(&self) -> Duration {
        SystemClock.monotonic()
    }
    fn wall_micros(&self) -> u64 {
        SystemClock.wall_micros().strict_add_signed(self.0)
    }
}

const HALF_A_SECOND: i64 = 500_000;
const HOUR: i64 = 3_600_000_000;

/// Another gateway over the servers of a cluster.
async fn gateway(cluster: &Cluster, ahead_micros: i64, rules: SafetyRules) -> Redlock {
    let node = node_settings().with_rules(rules);
    let nodes = Cluster::remote_nodes(&cluster.servers, node).await;
    let settings = Settings {
        key_prefix: PREFIX.into(),
        node_timeout: NODE_TIMEOUT,
        node: node_settings(),
        ..Settings::default()
    };
    let env = Env { clock: Arc::new(OffsetClock(ahead_micros)), ..Env::default() };
    Redlock::new(nodes, settings, env).expect("good settings")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_increase_for_64_contenders_on_skewed_gateways() {
    const CONTENDERS: usize = 64;
    const GRANTS: usize = 400;
    let cluster = Cluster::start(5).await;
    let gateways = [
        gateway(&cluster, 0, SafetyRules::ALL).await,
        gateway(&cluster, HALF_A_SECOND, SafetyRules::ALL).await,
    ];
    // All grants in the order in which they were made: the gateway's number and the fencing token.
    let grants = Arc::new(Mutex::new(Vec::new()));
    let count = Arc::new(AtomicUsize::new(0));
    let inside = Arc::new(AtomicBool::new(false));
    let policy = RetryPolicy {
        count: u32::MAX,
        delay: Duration::from_millis(2),
        jitter: Duration::from_millis(40),
        deadline: Duration::MAX,
    };
    let contenders: Vec<_> = (0..CONTENDERS)
        .map(|contender| {
            let which = contender % 2;
            let locks = gateways[which].clone();
            let policy = policy.clone();
            let grants = grants.clone();
            let count = count.clone();
            let inside = inside.clone();
            tokio::spawn(async move {
                let lock = name("hot");
                while count.load(Ordering::SeqCst) < GRANTS {
                    let options = AcquireOptions::default();
                    let lease = locks
                        .acquire_with_retry(&lock, ttl(LONG_MS), options, &policy)
                        .await
                        .unwrap();
                    assert!(!inside.swap(true, Ordering::SeqCst), "two holders at once");
                    grants.lock().unwrap().push((which, lease.token.fencing()));
                    // Gives other tasks a chance to run while this task holds the lock.
                    tokio::task::yield_now().await;
                    count.fetch_add(1, Ordering::SeqCst);
                    assert!(inside.swap(false, Ordering::SeqCst), "two holders at once");
                    locks.release(&lock, &lease.token).await.unwrap();
                }
            })
        })
        .collect();
    for contender in contenders {
        contender.await.expect("no contender panics");
    }
    let grants = grants.lock().unwrap();
    assert!(grants.len() >= GRANTS);
    for pair in grants.windows(2) {
        assert!(pair[0].1 < pair[1].1, "{pair:?}");
    }
    let changes = grants.windows(2).filter(|pair| pair[0].0 != pair[1].0).count();
    assert!(
        changes > 0,
        "both gateways must have had the lock, or their clocks were never compared"
    );
    println!("{} grants, {changes} changes of gateway", grants.len());
}

/// A client repeats its request at a gateway whose clock is slow. The owner is the same, so the
/// gateway returns the existing grant.
async fn a_repeated_request_gets_the_same_token(rules: SafetyRules) -> Result<(), String> {
    let cluster = Cluster::start(3).await;
    let ahead = gateway(&cluster, HALF_A_SECOND, rules).await;
    let behind = gateway(&cluster, 0, rules).await;
    let lock = name("job");
    let owner = OwnerChoice::Shared(Owner::from_bytes([7; 16]));
    let options = || AcquireOptions { owner, ..AcquireOptions::default() };
    let acquire = async |locks: &Redlock| {
        locks.acquire(&lock, ttl(LONG_MS), options()).await.unwrap().token.fencing()
    };
    let first = acquire(&ahead).await;
    let second = acquire(&behind).await;
    if second == first { Ok(()) } else { Err(format!("{second} after {first}")) }
}

#[tokio::test]
async fn a_retry_on_a_slower_clock_gets_the_same_token_by_rule_1() {
    assert_eq!(a_repeated_request_gets_the_same_token(SafetyRules::ALL).await, Ok(()));
    let off = SafetyRules { lock_is_kept: false, ..SafetyRules::ALL };
    assert!(a_repeated_request_gets_the_same_token(off).await.is_err());
}

/// A gateway whose clock is an hour ahead tries to take locks. Then a gateway with a right clock
/// asks for the same lock.
async fn a_bad_clock_harms_only_its_own_gateway(rules: SafetyRules) -> Result<(), String> {
    let cluster = Cluster::start(3).await;
    let bad = gateway(&cluster, HOUR, rules).await;
    let good = gateway(&cluster, 0, rules).await;
    let lock = name("job");
    let acquire =
        async |locks: &Redlock| locks.acquire(&lock, ttl(LONG_MS), AcquireOptions::default()).await;
    match acquire(&bad).await {
        Ok(lease) => bad.release(&lock, &lease.token).await.map_err(|error| error.to_string())?,
        Err(LockError::NoQuorum(reports)) => {
            let clock = |answer: &NodeAnswer| matches!(answer, NodeAnswer::Failed(failure) if failure.reason == Reason::Clock);
            assert!(
                reports.iter().filter(|report| clock(&report.answer)).count() >= 2,
                "{reports:?}"
            );
        }
        Err(error) => return Err(error.to_string()),
    }
    acquire(&good).await.map(drop).map_err(|error| error.to_string())
}

#[tokio::test]
async fn a_gateway_an_hour_ahead_harms_only_itself_by_rule_4() {
    assert_eq!(a_bad_clock_harms_only_its_own_gateway(SafetyRules::ALL).await, Ok(()));
    let off = SafetyRules { clock_is_checked: false, ..SafetyRules::ALL };
    assert!(a_bad_clock_harms_only_its_own_gateway(off).await.is_err());
}

/// The clocks are up to 1.5 s apart. That is more than the lead that a gateway learns to keep, and
/// far less than the distance that nodes refuse.
#[tokio::test]
async fn a_slower_gateway_gets_the_lock_with_larger_tokens() {
    let cluster = Cluster::start(3).await;
    let behind = gateway(&cluster, 0, SafetyRules::ALL).await;
    for (index, offset) in [HALF_A_SECOND, 3 * HALF_A_SECOND].into_iter().enumerate() {
        let ahead = gateway(&cluster, offset, SafetyRules::ALL).await;
        let lock = name(&format!("job-{index}"));
        let mut last = None;
        for round in 0..10 {
            let locks = if round % 2 == 0 { &ahead } else { &behind };
            let lease =
                locks.acquire(&lock, ttl(LONG_MS), AcquireOptions::default()).await.unwrap();
            assert!(Some(lease.token.fencing()) > last, "round {round}");
            last = Some(lease.token.fencing());
            locks.release(&lock, &lease.token).await.unwrap();
        }
    }
}
