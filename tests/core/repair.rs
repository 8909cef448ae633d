//! An extended lock outlives the loss of every node, one after the other, because each extension
//! repairs the lock where it was lost. A lock that was released, or granted to another owner, stays
//! released or granted, however late a repair arrives.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlock_core::node::{Keys, Node, NodeState, NodeStatus, SafetyRules};
use redlock_core::{AcquireOptions, Env, Info, Lease, LockError, LockName, Redlock, Ttl};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::support::cluster::{ClusterSettings, OUTLASTING_MS, decided, repeated};
use crate::support::harness::{PATIENCE, RedisServer, daily_or_long, eventually, masters};
use crate::support::nodes::{PREFIX, in_state, name, now, ttl};
use crate::support::resp::Resp;

const LABEL: &str = "nightly report";

/// Five servers, and a gateway that has admitted all of them.
pub(super) struct FiveNodes {
    servers: Vec<RedisServer>,
    remotes: Vec<Arc<dyn Node>>,
    pub(super) locks: Redlock,
    pub(super) lock: LockName,
}

impl FiveNodes {
    async fn start(cluster: &ClusterSettings) -> Self {
        Self::start_with(cluster, Env::default(), |remote| remote).await
    }

    pub(super) async fn start_with(
        cluster: &ClusterSettings,
        env: Env,
        wrapped: impl Fn(Arc<dyn Node>) -> Arc<dyn Node>,
    ) -> Self {
        let servers = masters(5);
        cluster.mark(&servers).await;
        let remotes: Vec<_> = cluster.remote_nodes(&servers).into_iter().map(wrapped).collect();
        for remote in &remotes {
            in_state(remote.as_ref(), NodeState::Admitted).await;
        }
        let locks = cluster.redlock_with(remotes.clone(), env);
        Self { servers, remotes, locks, lock: name("job") }
    }

    /// Acquires, and waits until all nodes store the lock.
    pub(super) async fn held(&self, cluster: &ClusterSettings) -> Lease {
        let options =
            || AcquireOptions { info: Info::new(LABEL).unwrap(), ..AcquireOptions::default() };
        let ttl = Ttl::from_duration(cluster.max_ttl).unwrap();
        granted_by_all(&self.locks, &self.servers, &self.lock, ttl, options).await
    }

    fn key(&self) -> String {
        format!("{PREFIX}{}", self.lock)
    }

    pub(super) fn raw(&self, at: usize) -> Option<String> {
        match self.servers[at].cmd(&["GET", &self.key()]) {
            Resp::Nil => None,
            value => Some(value.text()),
        }
    }

    /// The nodes that store exactly this grant, with its label.
    pub(super) fn stored_on(&self, lease: &Lease) -> Vec<usize> {
        let t = lease.token.fencing().to_string();
        let ours = |value: &String| value.starts_with(&t) && value.ends_with(LABEL);
        (0..self.servers.len()).filter(|at| self.raw(*at).as_ref().is_some_and(ours)).collect()
    }

    /// Deletes the lock on one node, as if the node had lost only the lock. The marker stays, so
    /// the node still votes.
    pub(super) fn lose_lock(&self, at: usize) {
        let fence = Keys::new(PREFIX, &self.lock).fence;
        self.servers[at].cmd(&[b"DEL".as_slice(), self.key().as_bytes(), &fence]);
    }

    pub(super) async fn extend(&self, lease: &Lease, millis: u64) -> Result<Lease, LockError> {
        self.locks.extend(&self.lock, &lease.token, ttl(millis)).await
    }

    /// Waits until the watermark of every node has the mark of an extension.
    async fn all_extended(&self) {
        let fence = Keys::new(PREFIX, &self.lock).fence;
        let is_marked = |server: &RedisServer| match server.cmd(&[&b"GET"[..], &fence]) {
            Resp::Nil => false,
            value => value.text().ends_with('+'),
        };
        eventually("all nodes have extended the lock", async || {
            self.servers.iter().all(is_marked).then_some(())
        })
        .await;
    }

    fn left_ms(&self, at: usize) -> i64 {
        self.servers[at].cmd(&["PTTL", &self.key()]).integer()
    }
}

/// Acquires, and waits until all masters store the lock. A lock on a bare majority could be lost with
/// the first master that loses its data.
pub(super) async fn granted_by_all(
    locks: &Redlock,
    servers: &[RedisServer],
    lock: &LockName,
    ttl: Ttl,
    options: impl Fn() -> AcquireOptions,
) -> Lease {
    let key = format!("{PREFIX}{lock}");
    eventually("the lock is granted and stored by all", async || {
        let lease = locks.acquire(lock, ttl, options()).await.ok()?;
        let t = lease.token.fencing().to_string();
        let is_stored = |server: &RedisServer| match server.cmd(&["GET", &key]) {
            Resp::Nil => false,
            value => value.text().starts_with(&t),
        };
        let everywhere = async || {
            while !servers.iter().all(is_stored) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        // A master that received the acquire too late never stores this lock, so the attempt is
        // repeated.
        if timeout(Duration::from_secs(1), everywhere()).await.is_ok() {
            return Some(lease);
        }
        let _ = locks.release(lock, &lease.token).await;
        None
    })
    .await
}

/// Locks and quarantines outlast every test. Catching up is off: it runs in the first half second of
/// a gateway, and could restore a lock that a test has just deleted.
pub(super) const CLUSTER: ClusterSettings = ClusterSettings {
    rules: SafetyRules { admitted_is_caught_up: false, ..SafetyRules::ALL },
    ..ClusterSettings::ENDLESS_QUARANTINE
};

/// An extension that outlasts every test, and is shorter than the longest TTL.
pub(super) const EXTENSION_MS: u64 = OUTLASTING_MS / 2;

/// Extends a lock until it is dropped, and keeps the error that ended the lock.
pub(super) struct Extender {
    lost: Arc<Mutex<Option<LockError>>>,
    stop: Arc<AtomicBool>,
}

impl Extender {
    pub(super) fn start(
        locks: &Redlock,
        lock: &LockName,
        lease: &Lease,
        ttl: Ttl,
        every: Duration,
    ) -> Self {
        let lost = Arc::new(Mutex::new(None));
        let stop = Arc::new(AtomicBool::new(false));
        let ends = lost.clone();
        let stopped = stop.clone();
        let locks = locks.clone();
        let lock = lock.clone();
        let mut lease = lease.clone();
        tokio::spawn(async move {
            while !stopped.load(Ordering::Relaxed) {
                match locks.extend(&lock, &lease.token, ttl).await {
                    Ok(extended) => lease = extended,
                    // The outcome is unknown, but the deadline from before the extension has not
                    // passed. So the extender goes on.
                    Err(LockError::Unknown(_)) if locks.validity(&lease).is_some() => {}
                    Err(error) => {
                        *ends.lock().unwrap() = Some(error);
                        return;
                    }
                }
                tokio::time::sleep(every).await;
            }
        });
        Self { lost, stop }
    }

    pub(super) fn lost(&self) -> Option<LockError> {
        self.lost.lock().unwrap().clone()
    }
}

impl Drop for Extender {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// A client that polls for the lock. It counts its grants.
pub(super) fn poll_for(
    locks: &Redlock,
    lock: &LockName,
    ttl: Ttl,
    every: Duration,
) -> (Arc<AtomicU32>, JoinHandle<()>) {
    let granted = Arc::new(AtomicU32::new(0));
    let counted = granted.clone();
    let locks = locks.clone();
    let lock = lock.clone();
    let task = tokio::spawn(async move {
        loop {
            if locks.acquire(&lock, ttl, AcquireOptions::default()).await.is_ok() {
                counted.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(every).await;
        }
    });
    (granted, task)
}

/// Restarts every node without its data, one after the other, for this many rounds. Each restart
/// waits until the node restarted before is back in service. Meanwhile another client polls for the
/// lock. If the lock is lost, returns the error by which its holder learned that.
///
/// The other client does not poll while a node ends. The outcome of such a poll is unknown, so the
/// poll is undone on the new process, and the undo leaves a watermark there, which refuses the repair
/// until it ends. Here quarantines end at once; in service the
/// undo comes during the quarantine.
async fn rolling_restart(cluster: &ClusterSettings, rounds: usize) -> Option<LockError> {
    let mut five = FiveNodes::start(cluster).await;
    let lease = five.held(cluster).await;
    let ttl = Ttl::from_duration(cluster.max_ttl).unwrap();
    let extender =
        Extender::start(&five.locks, &five.lock, &lease, ttl, Duration::from_millis(150));
    let is_repaired = cluster.rules.missing_is_repaired;
    for at in (0..rounds).flat_map(|_| 0..5) {
        let mut status = five.remotes[at].status();
        let before = status.borrow().marker.clone();
        five.servers[at].kill();
        let is_down = |status: &NodeStatus| !status.state.is_admitted();
        let down = timeout(PATIENCE, status.wait_for(is_down)).await.map(drop);
        assert!(down.is_ok(), "the gateway does not notice that node {at} is down");
        let (granted, poller) = poll_for(&five.locks, &five.lock, ttl, Duration::from_millis(50));
        five.servers[at].restart();
        let is_back = |status: &NodeStatus| {
            status.state.is_admitted() && !status.marker.is_empty() && status.marker != before
        };
        let back = timeout(PATIENCE, status.wait_for(is_back)).await.map(drop);
        assert!(back.is_ok(), "node {at} is not admitted again");
        // An operator would do the same: the next node restarts only when this node is back in
        // service and stores its locks again.
        eventually("the node stores the lock again, or the lock is lost", async || {
            let there = five.stored_on(&lease).contains(&at);
            (there || !is_repaired || extender.lost().is_some()).then_some(())
        })
        .await;
        poller.abort();
        let _ = poller.await;
        five.locks.drained().await;
        if let Some(error) = extender.lost() {
            return Some(error);
        }
        assert!(!is_repaired || granted.load(Ordering::Relaxed) == 0, "a second holder");
    }
    if !is_repaired {
        return Some(eventually("the lock is lost", async || extender.lost()).await);
    }
    eventually("all nodes have the lock, with the same T and the same label", async || {
        (five.stored_on(&lease) == [0, 1, 2, 3, 4]).then_some(())
    })
    .await;
    None
}

/// Quarantines end at once, and the lock outlasts the test. So only the repair decides whether the
/// lock is lost, and not how fast the machine is.
const ROLLING: ClusterSettings = ClusterSettings {
    rules: SafetyRules { quarantine_is_waited: false, returned_waits: false, ..SafetyRules::ALL },
    ..ClusterSettings::ENDLESS_QUARANTINE
};

#[test]
fn an_extended_lock_outlives_three_empty_restarts_of_every_node() {
    let since = Instant::now();
    let outcomes = repeated(daily_or_long(3, 20), 6, async || rolling_restart(&ROLLING, 3).await);
    let lost: Vec<_> = outcomes.iter().flatten().collect();
    assert!(lost.is_empty(), "lost in {} of {} runs: {:?}", lost.len(), outcomes.len(), lost[0]);
    println!("{} runs, none lost the lock; {:?}", outcomes.len(), since.elapsed());
}

#[test]
fn without_repair_empty_restarts_end_an_extended_lock() {
    // Catching up would restore the lock too, so it is off as well.
    let rules =
        SafetyRules { missing_is_repaired: false, admitted_is_caught_up: false, ..ROLLING.rules };
    let off = ClusterSettings { rules, ..ROLLING };
    let outcomes = repeated(4, 4, async || rolling_restart(&off, 1).await);
    let lost = outcomes.iter().flatten().count();
    assert!(lost > 0, "nothing goes wrong without repair: {outcomes:?}");
    println!("without repair {lost} of {} runs lost the lock", outcomes.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_repaired_node_stores_token_label_and_ttl_of_the_extension() {
    let five = FiveNodes::start(&CLUSTER).await;
    let lease = five.held(&CLUSTER).await;
    [1, 3].iter().for_each(|at| five.lose_lock(*at));
    assert_eq!(five.stored_on(&lease), [0, 2, 4]);
    let extended = five.extend(&lease, EXTENSION_MS).await.unwrap();
    assert_eq!(extended.token, lease.token);
    eventually("all nodes have the lock again", async || {
        (five.stored_on(&lease) == [0, 1, 2, 3, 4]).then_some(())
    })
    .await;
    let owner = |at: usize| five.raw(at).map(|value| value[17..57].to_owned());
    assert!((1..5).all(|at| owner(at) == owner(0)));
    for at in [1, 3] {
        let left = five.left_ms(at) as u64;
        assert!((EXTENSION_MS / 2..=EXTENSION_MS).contains(&left), "{left} ms on node {at}");
    }
    // The repaired node counts like any other node. So two nodes that have always stored the lock
    // may now lose it.
    [0, 2].iter().for_each(|at| five.lose_lock(*at));
    five.extend(&lease, EXTENSION_MS).await.unwrap();
    five.locks.release(&five.lock, &lease.token).await.unwrap();
    eventually("the lock is released on all nodes", async || {
        (0..5).all(|at| five.raw(at).is_none()).then_some(())
    })
    .await;
}

/// The holder's token may have a time to hold the lock after its release, or several slots. The
/// record on the nodes has neither.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_label_of_a_lock_with_a_time_to_hold_is_repaired_too() {
    let five = FiveNodes::start(&CLUSTER).await;
    let lease = five.held(&CLUSTER).await;
    five.lose_lock(1);
    let token = lease.token.holding(Duration::from_secs(5));
    five.locks.extend(&five.lock, &token, ttl(EXTENSION_MS)).await.unwrap();
    let repaired = eventually("the node has the lock again", async || five.raw(1)).await;
    assert!(repaired.ends_with(LABEL), "{repaired}");
}

/// A poller gets the vote of the node that lost the lock, and undoes it each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn failed_acquires_of_others_do_not_prevent_a_repair() {
    let five = FiveNodes::start(&CLUSTER).await;
    let lease = five.held(&CLUSTER).await;
    five.lose_lock(4);
    // Node 4 stands for a node that was down for longer than the TTL. The lock has expired there.
    // Its watermark has the mark of an earlier extension.
    five.extend(&lease, EXTENSION_MS).await.unwrap();
    eventually("the lock is repaired", async || {
        (five.stored_on(&lease) == [0, 1, 2, 3, 4]).then_some(())
    })
    .await;
    five.all_extended().await;
    five.servers[2].cmd(&["DEL", &five.key()]);
    five.lose_lock(4);
    for _ in 0..20 {
        let options = AcquireOptions::default;
        let other = async || five.locks.acquire(&five.lock, ttl(EXTENSION_MS), options()).await;
        let other = decided(other).await;
        assert!(matches!(other, Err(LockError::Held(_))), "{other:?}");
        five.locks.drained().await;
    }
    assert_eq!(five.stored_on(&lease), [0, 1, 3]);
    five.extend(&lease, EXTENSION_MS).await.unwrap();
    eventually("the lock is repaired", async || {
        (five.stored_on(&lease) == [0, 1, 2, 3, 4]).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_lock_older_than_max_clock_skew_is_repaired() {
    let cluster = ClusterSettings { skew: Duration::from_millis(300), ..CLUSTER };
    let five = FiveNodes::start(&cluster).await;
    let lease = five.held(&cluster).await;
    let fencing = lease.token.fencing().get();
    eventually("the token is too old for an acquire", async || {
        (now() > fencing + 900_000).then_some(())
    })
    .await;
    five.lose_lock(2);
    five.extend(&lease, EXTENSION_MS).await.unwrap();
    eventually("the lock is repaired", async || {
        (five.stored_on(&lease) == [0, 1, 2, 3, 4]).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_node_that_answers_after_the_decision_is_repaired_too() {
    let five = FiveNodes::start(&CLUSTER).await;
    let lease = five.held(&CLUSTER).await;
    five.lose_lock(4);
    five.servers[4].stop();
    five.extend(&lease, EXTENSION_MS).await.unwrap();
    five.servers[4].cont();
    eventually("the late node has the lock", async || {
        (five.stored_on(&lease) == [0, 1, 2, 3, 4]).then_some(())
    })
    .await;
}

/// Another client's failed proposal is stored on the one node that lost the lock. The repair must
/// not replace it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_repair_overwrites_no_lock_of_another_client() {
    let five = FiveNodes::start(&CLUSTER).await;
    let lease = five.held(&CLUSTER).await;
    five.lose_lock(4);
    five.servers[4].cmd(&["SET", &five.key(), "their-uuid", "PX", "3600000"]);
    five.extend(&lease, EXTENSION_MS).await.unwrap();
    five.locks.drained().await;
    // The nodes answer in order. They have answered this inspection, so they have answered the
    // repair before it too.
    five.locks.inspect(&five.lock).await;
    assert_eq!(five.raw(4).as_deref(), Some("their-uuid"));
    assert_eq!(five.stored_on(&lease), [0, 1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_extension_that_repairs_shortens_nothing() {
    let five = FiveNodes::start(&CLUSTER).await;
    let lease = five.held(&CLUSTER).await;
    five.extend(&lease, OUTLASTING_MS).await.unwrap();
    // Without this wait, the node that loses the lock next might receive the long extension only
    // after its loss.
    five.all_extended().await;
    five.lose_lock(2);
    let short = EXTENSION_MS / 2;
    five.extend(&lease, short).await.unwrap();
    eventually("the lock is repaired", async || {
        (five.stored_on(&lease) == [0, 1, 2, 3, 4]).then_some(())
    })
    .await;
    five.extend(&lease, short).await.unwrap();
    let left = |at: usize| five.left_ms(at) as u64;
    for at in [0, 1, 3, 4] {
        assert!(left(at) > EXTENSION_MS, "{} ms on node {at}", left(at));
    }
    assert!((1..=short).contains(&left(2)), "{} ms", left(2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lost_and_unknown_extensions_differ_and_repair_nothing() {
    let mut five = FiveNodes::start(&CLUSTER).await;
    let lease = five.held(&CLUSTER).await;
    // Two of five nodes store the lock, and one does not answer. So the lock may still have a
    // majority.
    five.lose_lock(0);
    five.lose_lock(1);
    five.servers[2].kill();
    let unknown = five.extend(&lease, EXTENSION_MS).await;
    assert!(matches!(unknown, Err(LockError::Unknown(_))), "{unknown:?}");
    // Now three nodes do not store the lock. So it has no majority.
    five.lose_lock(3);
    let lost = five.extend(&lease, EXTENSION_MS).await;
    assert!(matches!(lost, Err(LockError::Lost)), "{lost:?}");
    assert_eq!(
        [0, 1, 3].map(|at| five.raw(at)),
        [None, None, None],
        "no node stores the lock again"
    );

    let mut five = FiveNodes::start(&CLUSTER).await;
    let lease = five.held(&CLUSTER).await;
    five.servers[..3].iter_mut().for_each(RedisServer::kill);
    let unknown = five.extend(&lease, EXTENSION_MS).await;
    assert!(matches!(unknown, Err(LockError::Unknown(_))), "{unknown:?}");
    assert!(five.locks.validity(&lease).is_some(), "the old deadline stands");
}

/// A quarantined node votes neither yes nor no.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn quarantined_nodes_make_an_extension_unknown_and_not_lost() {
    let mut five = FiveNodes::start(&ClusterSettings::ENDLESS_QUARANTINE).await;
    let lease = five.held(&CLUSTER).await;
    // A master recovers its locks from three other masters that have kept theirs. Here only two of five
    // have kept theirs, so no master recovers.
    five.servers[..3].iter_mut().for_each(RedisServer::kill);
    for at in 0..3 {
        five.servers[at].restart();
        in_state(five.remotes[at].as_ref(), NodeState::Quarantined).await;
    }
    let unknown = five.extend(&lease, EXTENSION_MS).await;
    assert!(matches!(unknown, Err(LockError::Unknown(_))), "{unknown:?}");
    assert_eq!(five.stored_on(&lease), [3, 4]);
}
