//! Whole locks over real masters: the life of a lock on 1 to 5 nodes, and other Redlock clients
//! beside this one. Requests that are cancelled or repeated leave nothing behind.
//!
//! Node timeouts are long, so that a busy machine does not look like a fault.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redlock_core::clock::{Clock, SystemClock};
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{Keys, NoObserver, Node, NodeSettings, NodeState};
use redlock_core::{
    AcquireOptions, Env, FencingToken, HeldBy, Info, Lease, LockError, LockName, LockToken, Owner,
    OwnerChoice, Redlock, RetryPolicy, Settings,
};
use tokio::time::Instant;

use crate::support::cluster::granted;
use crate::support::harness::{RedisServer, eventually};
use crate::support::nodes::{
    Cluster, LONG_MS, NODE_TIMEOUT, PREFIX, in_state, intercepted, name, node_settings, now,
    pass_on, redlock, remote_node_with, ttl,
};
use crate::support::resp::Resp;

pub(super) const LONG: u64 = LONG_MS;

pub(super) async fn acquire(
    locks: &Redlock,
    lock: &LockName,
    millis: u64,
) -> Result<Lease, LockError> {
    locks.acquire(lock, ttl(millis), AcquireOptions::default()).await
}

/// Acquires a lock with a short TTL. A round gets only a tenth of the TTL.
async fn acquire_short(locks: &Redlock, lock: &LockName, millis: u64) -> Lease {
    granted(locks, lock, millis, AcquireOptions::default).await
}

pub(super) fn labelled(text: &'static str) -> AcquireOptions {
    AcquireOptions { info: Info::new(text).unwrap(), ..AcquireOptions::default() }
}

pub(super) fn key(lock: &LockName) -> String {
    format!("{PREFIX}{lock}")
}

/// The same token, but with another owner.
fn forged(token: &LockToken) -> LockToken {
    format!("1.{}.{}", token.fencing(), "ab".repeat(20)).parse::<LockToken>().unwrap()
}

async fn whole_life_on(size: usize) {
    let cluster = Cluster::start(size).await;
    let locks = cluster.redlock();
    let lock = name("job");
    let all: Vec<_> = (0..size).collect();

    let lease = locks.acquire(&lock, ttl(LONG), labelled("first")).await.unwrap();
    assert!(lease.nodes_granted >= locks.quorum().size() && lease.nodes_total == size);
    let validity = locks.validity(&lease).unwrap();
    assert!(
        validity < Duration::from_millis(LONG) && validity > Duration::from_millis(LONG / 2),
        "{validity:?}"
    );
    eventually("all nodes store the lock", async || {
        (cluster.stored_on(&lock, |_| true) == all).then_some(())
    })
    .await;

    let Err(LockError::Held(by)) = acquire(&locks, &lock, LONG).await else {
        panic!("granted twice")
    };
    assert_eq!((&*by.info, by.fencing), (&b"first"[..], Some(lease.token.fencing())));
    let left = by.expires_in.unwrap();
    assert!(
        left <= Duration::from_millis(LONG) && left > Duration::from_millis(LONG / 2),
        "{left:?}"
    );

    let extended = locks.extend(&lock, &lease.token, ttl(2 * LONG)).await.unwrap();
    assert_eq!(extended.token, lease.token);
    assert!(locks.validity(&extended).unwrap() > Duration::from_millis(LONG));
    let pttl = |server: usize| cluster.servers[server].cmd(&["PTTL", &key(&lock)]).integer() as u64;
    eventually("all nodes prolong it", async || {
        all.iter().all(|server| pttl(*server) > LONG).then_some(())
    })
    .await;

    for wrong in [locks.extend(&lock, &forged(&lease.token), ttl(LONG)).await.map(drop), {
        locks.release(&lock, &forged(&lease.token)).await
    }] {
        assert!(matches!(wrong, Err(LockError::NotHolder(_))), "{wrong:?}");
    }
    assert_eq!(cluster.stored_on(&lock, |_| true), all, "a wrong token changes nothing");

    locks.release(&lock, &lease.token).await.unwrap();
    cluster.clean_for_good(&lock, lease.token.fencing().get()).await;
    assert_eq!(locks.release(&lock, &lease.token).await, Err(LockError::Lost));
    assert!(matches!(locks.extend(&lock, &lease.token, ttl(LONG)).await, Err(LockError::Lost)));

    let since = Instant::now();
    let short = acquire_short(&locks, &lock, 300).await;
    assert!(short.token.fencing() > lease.token.fencing());
    let next = eventually("the lock expires", async || match acquire(&locks, &lock, LONG).await {
        Ok(next) => Some(next),
        Err(error) => {
            assert!(matches!(error, LockError::Held(_)), "{error}");
            None
        }
    })
    .await;
    assert!(
        since.elapsed() > Duration::from_millis(295),
        "granted to another owner after {:?}",
        since.elapsed()
    );
    assert_eq!(
        locks.validity(&short),
        None,
        "the next holder finds the first one past its deadline"
    );
    assert!(next.token.fencing() > short.token.fencing());
    assert!(matches!(locks.release(&lock, &short.token).await, Err(LockError::NotHolder(_))));
    locks.release(&lock, &next.token).await.unwrap();
}

macro_rules! sizes {
    ($check:ident: $($test:ident $size:expr;)*) => { $(#[tokio::test] async fn $test() { $check($size).await })* };
}
pub(super) use sizes;

sizes! { whole_life_on:
    a_lock_lives_and_ends_on_one_node 1;
    a_lock_lives_and_ends_on_two_nodes 2;
    a_lock_lives_and_ends_on_three_nodes 3;
    a_lock_lives_and_ends_on_four_nodes 4;
    a_lock_lives_and_ends_on_five_nodes 5;
}

#[tokio::test]
async fn another_redlock_client_on_a_majority_holds_the_lock() {
    let cluster = Cluster::start(5).await;
    let locks = cluster.redlock();
    let lock = name("shared");
    for server in &cluster.servers[..3] {
        assert_eq!(
            server.cmd(&["SET", &key(&lock), "their-uuid", "NX", "PX", "3600000"]),
            Resp::Text("OK".into())
        );
    }
    let Err(LockError::Held(HeldBy { info, fencing, expires_in, .. })) =
        acquire(&locks, &lock, LONG).await
    else {
        panic!("granted beside another client's lock")
    };
    assert_eq!((info, fencing), (Box::default(), None));
    assert!(expires_in.unwrap() > Duration::from_secs(1_800));
    locks.drained().await;
    assert_eq!(
        cluster.stored_on(&lock, |_| true),
        [0, 1, 2],
        "our record beside the foreign lock is gone"
    );
    for server in &cluster.servers[..3] {
        server.cmd(&["DEL", &key(&lock)]);
    }
    assert!(acquire(&locks, &lock, LONG).await.is_ok());
}

#[tokio::test]
async fn our_lock_keeps_another_redlock_client_from_a_majority() {
    let cluster = Cluster::start(5).await;
    let locks = cluster.redlock();
    let lock = name("shared");
    // A foreign lock on a minority does not keep this client from its lock. This client's lock on
    // the other nodes keeps the foreign client out.
    for server in &cluster.servers[..2] {
        server.cmd(&["SET", &key(&lock), "their-uuid", "NX", "PX", "3600000"]);
    }
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    let set = |server: usize| {
        cluster.servers[server].cmd(&["SET", &key(&lock), "their-uuid", "NX", "PX", "3600000"])
    };
    assert_eq!((0..5).filter(|server| set(*server) == Resp::Nil).count(), 5);
    locks.release(&lock, &lease.token).await.unwrap();
    locks.drained().await;
    assert_eq!(cluster.stored_on(&lock, |_| true), [0, 1], "a release deletes only our own lock");
}

/// Uses the lock once, so that it has a watermark. Returns the watermark's token.
async fn used_before(locks: &Redlock, lock: &LockName) -> u64 {
    let lease = acquire(locks, lock, LONG).await.expect("the lock is free");
    locks.release(lock, &lease.token).await.expect("the lock is held");
    locks.drained().await;
    lease.token.fencing().get()
}

#[tokio::test]
async fn a_cancelled_acquire_leaves_no_lock() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    for (index, patience) in [Duration::ZERO, Duration::from_millis(100)].into_iter().enumerate() {
        let lock = name(&format!("cancelled-{index}"));
        let before = used_before(&locks, &lock).await;
        cluster.servers.iter().for_each(|server| server.stop());
        let cancelled = tokio::time::timeout(patience, acquire(&locks, &lock, LONG)).await;
        assert!(cancelled.is_err(), "the nodes are stopped: {cancelled:?}");
        cluster.servers.iter().for_each(|server| server.cont());
        locks.drained().await;
        // The token of the cancelled acquire is not known here. But a newer or restored watermark
        // shows that the release of that acquire has run.
        cluster.clean_for_good(&lock, before + 1).await;
        assert!(acquire(&locks, &lock, LONG).await.is_ok());
    }
}

#[tokio::test]
async fn a_cancelled_acquire_leaves_no_lock_after_lost_connections() {
    let cluster = Cluster::start(3).await;
    let lock = name("cancelled");
    let before = used_before(&cluster.redlock(), &lock).await;
    // These workers give a session up after 4 s. They must not do so before the acquire is sent.
    let settings = Settings {
        node_timeout: Duration::from_secs(2),
        node: node_settings(),
        ..Settings::default()
    };
    let start = |server: &RedisServer| {
        let settings = settings.of_masters("tests", 1);
        remote_node_with(&server.url(), settings, Arc::new(NoObserver)) as Arc<dyn Node>
    };
    let nodes: Vec<_> = cluster.servers.iter().map(start).collect();
    for node in &nodes {
        in_state(node.as_ref(), NodeState::Admitted).await;
    }
    let locks = redlock(nodes.clone(), NODE_TIMEOUT);
    cluster.servers.iter().for_each(|server| server.stop());
    let cancelled =
        tokio::time::timeout(Duration::from_millis(100), acquire(&locks, &lock, LONG)).await;
    assert!(cancelled.is_err(), "the nodes are stopped: {cancelled:?}");
    for node in &nodes {
        in_state(node.as_ref(), NodeState::Connecting).await;
    }
    cluster.servers.iter().for_each(|server| server.cont());
    cluster.clean_for_good(&lock, before + 1).await;
}

#[tokio::test]
async fn a_repeated_request_gets_the_same_grant_and_voids_no_answer() {
    let cluster = Cluster::start(5).await;
    let locks = cluster.redlock();
    let lock = name("job");
    let first = locks.acquire(&lock, ttl(LONG), keyed(&lock)).await.unwrap();
    // The client sends its repeated request to another gateway.
    let nodes = Cluster::remote_nodes(&cluster.servers, node_settings()).await;
    let other = redlock(nodes, NODE_TIMEOUT);
    let second = other.acquire(&lock, ttl(LONG), keyed(&lock)).await.unwrap();
    assert_eq!((second.token, second.replayed, first.replayed), (first.token, true, false));
    assert!(matches!(acquire(&locks, &lock, LONG).await, Err(LockError::Held(_))));
    locks.extend(&lock, &first.token, ttl(LONG)).await.unwrap();
    other.release(&lock, &second.token).await.unwrap();
    assert!(
        matches!(locks.release(&lock, &first.token).await, Err(LockError::Lost)),
        "both answers have the same grant"
    );
    cluster.clean_for_good(&lock, second.token.fencing().get()).await;
}

#[tokio::test]
async fn repeating_a_request_does_not_extend_beyond_max_hold() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let lock = name("job");
    locks.acquire(&lock, ttl(LONG), keyed(&lock)).await.unwrap();
    let options = AcquireOptions { max_hold: Some(Duration::ZERO), ..keyed(&lock) };
    let refused = locks.acquire(&lock, ttl(LONG), options).await;
    assert!(matches!(refused, Err(LockError::HeldTooLong { .. })), "{refused:?}");
}

fn keyed(lock: &LockName) -> AcquireOptions {
    let owner = OwnerChoice::Shared(Owner::derive("c", "p", lock, "idempotency-key-1"));
    AcquireOptions { owner, ..AcquireOptions::default() }
}

#[tokio::test]
async fn an_undelivered_repetition_keeps_the_first_grant() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let lock = name("job");
    let first = locks.acquire(&lock, ttl(LONG), keyed(&lock)).await.unwrap();

    cluster.servers.iter().for_each(|server| server.stop());
    let repeated = locks.acquire(&lock, ttl(LONG), keyed(&lock));
    let cancelled = tokio::time::timeout(Duration::from_millis(100), repeated).await;
    assert!(cancelled.is_err(), "the nodes are stopped: {cancelled:?}");
    cluster.servers.iter().for_each(|server| server.cont());
    // The nodes answer in order. So when they answer this acquire, they have handled every
    // operation of the cancelled one.
    let undelivered = locks.acquire(&lock, ttl(LONG), keyed(&lock)).await.unwrap();
    locks.abandon(std::slice::from_ref(&lock), &undelivered);
    locks.drained().await;

    assert!(
        matches!(acquire(&locks, &lock, LONG).await, Err(LockError::Held(_))),
        "a second holder"
    );
    assert!(locks.validity(&first).is_some(), "the first answer still promises the lock");
}

#[tokio::test]
async fn split_votes_are_resolved_and_name_no_holder() {
    let cluster = Cluster::start(5).await;
    let locks = cluster.redlock();
    let lock = name("job");
    // Three contenders have two votes, two votes and one vote. They give up after a moment, as
    // contenders in a race do.
    for (index, server) in cluster.servers.iter().enumerate() {
        server.cmd(&["SET", &key(&lock), &format!("contender-{}", index / 2), "PX", "10"]);
    }
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    locks.release(&lock, &lease.token).await.unwrap();

    // Against a single holder there is no second attempt: the first refusal is the answer.
    cluster
        .servers
        .iter()
        .for_each(|server| drop(server.cmd(&["SET", &key(&lock), "holder", "PX", "3600000"])));
    assert!(matches!(acquire(&locks, &lock, LONG).await, Err(LockError::Held(_))));
}

#[tokio::test]
async fn a_failed_proposal_on_a_minority_names_no_holder() {
    let cluster = Cluster::start(5).await;
    let locks = cluster.redlock();
    let lock = name("job");
    let lease = acquire(&locks, &lock, LONG).await.unwrap();
    locks.release(&lock, &lease.token).await.unwrap();
    cluster.servers[..2]
        .iter()
        .for_each(|server| drop(server.cmd(&["SET", &key(&lock), "loser", "PX", "3600000"])));
    // On three nodes the lock is free. So whichever nodes answer first, the result must not name
    // another holder.
    for _ in 0..20 {
        assert_eq!(locks.release(&lock, &lease.token).await, Err(LockError::Lost));
    }
}

#[tokio::test]
async fn an_undelivered_first_request_with_a_key_leaves_no_lock() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let cancelled = name("cancelled");
    let undelivered = name("undelivered");
    cluster.servers.iter().for_each(|server| server.stop());
    let request = locks.acquire(&cancelled, ttl(LONG), keyed(&cancelled));
    assert!(
        tokio::time::timeout(Duration::from_millis(100), request).await.is_err(),
        "the nodes are stopped"
    );
    cluster.servers.iter().for_each(|server| server.cont());
    let nothing_is_left = async |lock: &LockName| {
        locks.drained().await;
        assert_eq!(cluster.stored_on(lock, |_| true), [0; 0]);
    };
    nothing_is_left(&cancelled).await;

    let lease = locks.acquire(&undelivered, ttl(LONG), keyed(&undelivered)).await.unwrap();
    locks.abandon(std::slice::from_ref(&undelivered), &lease);
    nothing_is_left(&undelivered).await;
}

#[tokio::test]
async fn retrying_gets_a_freed_lock_and_gives_up_on_a_held_one() {
    let cluster = Cluster::start(3).await;
    let locks = cluster.redlock();
    let lock = name("job");
    let held = acquire_short(&locks, &lock, 300).await;
    let policy = RetryPolicy {
        count: u32::MAX,
        delay: Duration::from_millis(5),
        jitter: Duration::from_millis(10),
        deadline: Duration::MAX,
    };
    let next = locks
        .acquire_with_retry(&lock, ttl(LONG), AcquireOptions::default(), &policy)
        .await
        .unwrap();
    assert!(next.token.fencing() > held.token.fencing());
    let policy = RetryPolicy { count: 3, ..policy };
    let refused =
        locks.acquire_with_retry(&lock, ttl(LONG), AcquireOptions::default(), &policy).await;
    assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
}

/// A clock that advances by 31 s between any two readings.
struct LeapingClock(AtomicU64);

impl Clock for LeapingClock {
    fn monotonic(&self) -> Duration {
        Duration::from_secs(31 * self.0.fetch_add(1, Ordering::Relaxed))
    }
    fn wall_micros(&self) -> u64 {
        now()
    }
}

#[tokio::test]
async fn a_grant_that_arrives_too_late_is_refused_and_released() {
    let cluster = Cluster::start(3).await;
    let env = Env { clock: Arc::new(LeapingClock(AtomicU64::new(0))), ..Env::default() };
    // The longest node timeout with the default clock skew, on which the age of a grant that still
    // counts depends.
    let settings = Settings { node_timeout: Duration::from_secs(6), ..Settings::default() };
    let locks = Redlock::new(cluster.nodes.clone(), settings, env).unwrap();
    let lock = name("job");
    let refused = acquire(&locks, &lock, 30_000).await;
    assert!(matches!(refused, Err(LockError::NoQuorum(_))), "{refused:?}");
    locks.drained().await;
    assert_eq!(cluster.stored_on(&lock, |_| true), Vec::<usize>::new());
    let lease = acquire(&cluster.redlock(), &lock, 60_000).await.unwrap();
    let late = locks.extend(&lock, &lease.token, ttl(30_000)).await;
    assert!(matches!(late, Err(LockError::Unknown(_))), "{late:?}");
}

#[tokio::test]
async fn a_ttl_beyond_the_maximum_asks_no_node() {
    let cluster = Cluster::start(1).await;
    let locks = cluster.redlock();
    let lock = name("job");
    assert!(matches!(acquire(&locks, &lock, 300_001).await, Err(LockError::TtlTooLong { .. })));
    let lease = acquire(&locks, &lock, 300_000).await.unwrap();
    let refused = locks.extend(&lock, &lease.token, ttl(300_001)).await;
    assert!(matches!(refused, Err(LockError::TtlTooLong { .. })), "{refused:?}");
}

/// Anybody can invent a token. If nodes refuse the release of a token as too far from their time,
/// no node can have granted it. To repeat such a release would only delay real ones.
#[tokio::test(start_paused = true)]
async fn the_release_of_an_invented_token_is_not_repeated() {
    let asked = Arc::new(AtomicU64::new(0));
    let nodes = (0..3).map(|n| {
        let node =
            MemoryNode::new(format!("node-{n}"), Arc::new(SystemClock), NodeSettings::default());
        let asked = asked.clone();
        intercepted(Arc::new(node), move |node, task| {
            asked.fetch_add(1, Ordering::Relaxed);
            pass_on(node, task);
        })
    });
    let locks = redlock(nodes.collect(), Duration::from_secs(1));
    let invented =
        format!("1.{}.{}", FencingToken::MAX, "ab".repeat(20)).parse::<LockToken>().unwrap();
    assert!(matches!(locks.release(&name("job"), &invented).await, Err(LockError::Unknown(_))));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(asked.load(Ordering::Relaxed), 3, "each node was asked once");
}

#[tokio::test]
async fn invalid_settings_are_refused_before_anything_starts() {
    let cluster = Cluster::start(1).await;
    let one = cluster.nodes[0].clone();
    let good = Settings::default();
    let refused = |nodes: Vec<Arc<dyn Node>>, settings: Settings| {
        Redlock::new(nodes, settings, Env::default()).err().expect("refused").to_string()
    };
    assert!(refused(vec![], good.clone()).contains("0 nodes"));
    assert!(refused(vec![one.clone(), one.clone()], good.clone()).contains("given twice"));
    let only = || vec![one.clone()];
    assert!(refused(only(), Settings { drift_factor: f64::NAN, ..good.clone() }).contains("drift"));
    assert!(
        refused(only(), Settings { node_timeout: Duration::ZERO, ..good.clone() })
            .contains("time-out")
    );
    assert!(refused(only(), Settings { key_prefix: "{a}".into(), ..good }).contains("brace"));
    assert_eq!(Keys::new("", &name("a")).lock, "a");
}
