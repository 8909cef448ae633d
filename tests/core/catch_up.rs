//! Masters restart one after the other, or as many at a time as may be missing. No lock is lost:
//! neither one that was granted while a master was away, nor one that nobody extends.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlock_core::node::{Keys, Node, NodeState, NodeStatus, Reason, SafetyRules, Vote};
use redlock_core::{
    AcquireOptions, Lease, LockError, LockName, NodeAnswer, NodeReport, Redlock, Ttl,
};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::core::repair::granted_by_all;
use crate::support::cluster::{ClusterSettings, OUTLASTING_MS, decided};
use crate::support::harness::{PATIENCE, RedisOptions, RedisServer, eventually};
use crate::support::nodes::{PREFIX, in_state, name, ttl};

/// Locks and quarantines that outlast every test.
const CLUSTER: ClusterSettings = ClusterSettings::ENDLESS_QUARANTINE;
/// The pause between two grants.
const GAP: Duration = Duration::from_millis(120);
/// How many locks are taken while a master is down, and from its restart until the next one.
const WHILE_DOWN: usize = 5;
const PER_GROUP: usize = 85;

struct Rolling {
    servers: Vec<RedisServer>,
    /// One worker for each master, for each of two gateways.
    remotes: [Vec<Arc<dyn Node>>; 2],
    locks: [Redlock; 2],
}

/// Takes one lock after another, through the two gateways in turn. It extends every second lock
/// once. Keeps only locks that every admitted master stores: catching up does not cover a lock that
/// a slow master has missed.
struct Loader {
    held: Arc<Mutex<Vec<(LockName, Lease)>>>,
    stop: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Loader {
    fn start(rolling: &Rolling) -> Self {
        let (locks, remotes) = (rolling.locks.clone(), rolling.remotes.clone());
        let held = Arc::<Mutex<Vec<_>>>::default();
        let stop = Arc::<AtomicBool>::default();
        let taken = held.clone();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            for number in 0.. {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let lock = name(&format!("lock-{number}"));
                let gateway = &locks[number % 2];
                if let Ok(lease) =
                    gateway.acquire(&lock, ttl(OUTLASTING_MS), AcquireOptions::default()).await
                {
                    if number % 4 < 2 {
                        // An extension with an unknown outcome leaves the lock as it was.
                        drop(gateway.extend(&lock, &lease.token, ttl(OUTLASTING_MS)).await);
                    }
                    let stored = stored_by_admitted(&remotes[number % 2], &lock);
                    if timeout(Duration::from_secs(1), stored).await.is_ok() {
                        taken.lock().unwrap().push((lock, lease));
                    } else {
                        let _ = gateway.release(&lock, &lease.token).await;
                    }
                }
                tokio::time::sleep(GAP).await;
            }
        });
        Self { held, stop, task }
    }

    /// Waits until this many further locks were taken.
    async fn takes(&self, more: usize) {
        let taken = || self.held.lock().unwrap().len();
        let enough = taken() + more;
        eventually("locks are taken", async || (taken() >= enough).then_some(())).await;
    }

    async fn stop(self) -> Vec<(LockName, Lease)> {
        self.stop.store(true, Ordering::Relaxed);
        self.task.await.expect("no panic");
        std::mem::take(&mut *self.held.lock().unwrap())
    }
}

/// Waits until every admitted master stores a lock.
async fn stored_by_admitted(remotes: &[Arc<dyn Node>], lock: &LockName) {
    let keys = Keys::new(PREFIX, lock);
    for remote in remotes {
        while remote.status().borrow().state == NodeState::Admitted {
            match remote.reader().read(vec![keys.clone()]).await.as_deref() {
                Ok([Vote::Missing]) => tokio::time::sleep(Duration::from_millis(1)).await,
                // A master that cannot be read is away, or about to be.
                _ => break,
            }
        }
    }
}

impl Rolling {
    async fn start(
        cluster: &ClusterSettings,
        count: usize,
        options: impl Fn(usize) -> RedisOptions,
    ) -> Self {
        let servers: Vec<_> = (0..count).map(|at| RedisServer::start_with(options(at))).collect();
        cluster.mark(&servers).await;
        let remotes = [(); 2].map(|()| cluster.remote_nodes(&servers));
        for remote in remotes.iter().flatten() {
            in_state(remote.as_ref(), NodeState::Admitted).await;
        }
        let locks = remotes.clone().map(|remotes| cluster.redlock(remotes));
        Self { servers, remotes, locks }
    }

    /// Restarts the masters as the runbook says. The next masters restart when both gateways show
    /// that the last ones are admitted, which includes catching up.
    async fn roll(
        &mut self,
        groups: &[&[usize]],
        restart: impl AsyncFn(&mut RedisServer),
        before_the_next: impl AsyncFn(),
    ) {
        for group in groups {
            let seen_by_each =
                self.remotes.iter().flat_map(|remotes| group.iter().map(|at| &remotes[*at]));
            let before: Vec<_> = seen_by_each
                .map(|remote| (remote.clone(), remote.status().borrow().marker.clone()))
                .collect();
            for at in *group {
                restart(&mut self.servers[*at]).await;
            }
            let restarted = Instant::now();
            for (remote, marker) in before {
                let mut status = remote.status();
                let again = |status: &NodeStatus| {
                    status.state == NodeState::Admitted && status.marker != marker
                };
                let caught_up = timeout(PATIENCE, status.wait_for(again)).await;
                assert!(
                    caught_up.is_ok(),
                    "{} is still {:?}",
                    remote.name(),
                    remote.status().borrow()
                );
            }
            println!(
                "masters {group:?} have caught up {:?} after their restart",
                restarted.elapsed()
            );
            before_the_next().await;
        }
    }

    /// The number of locks that their holders have lost.
    async fn lost(&self, held: &[(LockName, Lease)]) -> usize {
        let mut lost = 0;
        for (lock, lease) in held {
            let extend =
                async || self.locks[0].extend(lock, &lease.token, ttl(OUTLASTING_MS)).await;
            lost += usize::from(decided(extend).await.is_err());
        }
        lost
    }
}

/// Returns how many locks were taken, and how many of them were lost.
async fn rolling_restart(
    rules: SafetyRules,
    count: usize,
    groups: &[&[usize]],
    options: impl Fn(usize) -> RedisOptions,
    restart: impl AsyncFn(&mut RedisServer, &Loader),
) -> (usize, usize) {
    let cluster = ClusterSettings { rules, ..CLUSTER };
    let mut rolling = Rolling::start(&cluster, count, options).await;
    let loader = Loader::start(&rolling);
    let restart = async |server: &mut RedisServer| restart(server, &loader).await;
    rolling.roll(groups, restart, async || loader.takes(PER_GROUP).await).await;
    let held = loader.stop().await;
    let lost = rolling.lost(&held).await;
    println!("{lost} of {} locks lost", held.len());
    (held.len(), lost)
}

fn native(native: bool) -> RedisOptions {
    RedisOptions { native: Some(native), ..RedisOptions::default() }
}

async fn empty_restart(server: &mut RedisServer, loader: &Loader) {
    server.kill();
    loader.takes(WHILE_DOWN).await;
    server.restart();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn restarting_three_volatile_masters_loses_no_lock() {
    let groups: [&[usize]; 3] = [&[0], &[1], &[2]];
    let (held, lost) =
        rolling_restart(SafetyRules::ALL, 3, &groups, |_| native(true), empty_restart).await;
    assert!(held >= 250 && lost == 0, "{lost} of {held}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn restarting_two_of_five_masters_at_a_time_loses_no_lock() {
    let groups: [&[usize]; 3] = [&[0, 1], &[2, 3], &[4]];
    let (held, lost) =
        rolling_restart(SafetyRules::ALL, 5, &groups, |at| native(at % 2 == 0), empty_restart)
            .await;
    assert!(held >= 250 && lost == 0, "{lost} of {held}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn restarting_masters_that_sync_every_second_loses_no_lock() {
    let groups: [&[usize]; 3] = [&[0], &[1], &[2]];
    let file = ["--appendonly", "yes", "--appendfsync", "everysec"].map(str::to_owned);
    let options = |_| RedisOptions { args: file.to_vec(), ..native(false) };
    let clean = async |server: &mut RedisServer, _: &Loader| server.shut_down_and_restart();
    let (held, lost) = rolling_restart(SafetyRules::ALL, 3, &groups, options, clean).await;
    assert!(held >= 250 && lost == 0, "{lost} of {held}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn without_catching_up_a_rolling_restart_loses_locks() {
    let off = SafetyRules { admitted_is_caught_up: false, ..SafetyRules::ALL };
    let (held, lost) =
        rolling_restart(off, 3, &[&[0], &[1]], |_| native(false), empty_restart).await;
    assert!(lost > 0, "nothing goes wrong without catching up: {lost} of {held} lost");
}

/// A short lock, and the client that extends it.
struct Extended {
    lock: LockName,
    lease: Lease,
    ttl: Ttl,
    /// When the last request was sent.
    asked: Instant,
    /// Whether a request or an answer was late, so that the lock may have ended on its masters.
    is_late: bool,
}

impl Extended {
    /// Extends the lock. Returns whether it still stands.
    async fn extend(&mut self, gateway: &Redlock) -> bool {
        let before = std::mem::replace(&mut self.asked, Instant::now());
        let answer = gateway.extend(&self.lock, &self.lease.token, self.ttl).await;
        let timed_out = |report: &NodeReport| match &report.answer {
            NodeAnswer::Failed(failure) => failure.reason == Reason::Timeout,
            _ => false,
        };
        self.is_late |= before.elapsed() > self.ttl.duration() / 2
            || matches!(&answer, Err(LockError::Unknown(reports)) if reports.iter().any(timed_out));
        matches!(answer, Ok(_) | Err(LockError::Unknown(_)))
    }
}

/// Short locks are extended for the first time while one master is away. So on that master each
/// lock ends, but its watermark stays, without the mark of an extension. Returns how many of the
/// locks a rolling restart has lost. A lock that was extended late, on a busy machine, does not
/// count.
async fn first_extended_while_away(sync: &str, millis: u64) -> usize {
    const LOCKS: usize = 8;
    let file = ["--appendonly", "yes", "--appendfsync", sync].map(str::to_owned);
    let options = |_| RedisOptions { args: file.to_vec(), ..native(false) };
    let mut rolling = Rolling::start(&CLUSTER, 3, options).await;
    let gateway = rolling.locks[0].clone();
    let ttl = ttl(millis);
    let mut held = Vec::new();
    for number in 0..LOCKS {
        let asked = Instant::now();
        let lock = name(&format!("short-{number}"));
        let options = AcquireOptions::default;
        let lease = granted_by_all(&gateway, &rolling.servers, &lock, ttl, options).await;
        held.push(Extended { lock, lease, ttl, asked, is_late: false });
    }
    let is_away = Arc::<Notify>::default();
    let is_over = Arc::<AtomicBool>::default();
    let (begin, end) = (is_away.clone(), is_over.clone());
    let holder = tokio::spawn(async move {
        begin.notified().await;
        let mut lost = 0;
        while !end.load(Ordering::Relaxed) {
            let mut standing = Vec::new();
            for mut one in held {
                if one.extend(&gateway).await {
                    standing.push(one);
                } else {
                    println!("{:?} is lost; late: {}", one.lock, one.is_late);
                    lost += usize::from(!one.is_late);
                }
            }
            held = standing;
            tokio::time::sleep(Duration::from_millis(millis / 6)).await;
        }
        lost
    });
    let restart = async |server: &mut RedisServer| {
        server.shut_down_and_restart();
        is_away.notify_one();
    };
    rolling.roll(&[&[0], &[1], &[2]], restart, async || ()).await;
    is_over.store(true, Ordering::Relaxed);
    holder.await.expect("no panic")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn locks_first_extended_during_a_quarantine_are_not_lost() {
    assert_eq!(first_extended_while_away("everysec", 6_000).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn locks_first_extended_while_a_durable_master_is_away_are_not_lost() {
    assert_eq!(first_extended_while_away("always", 4_500).await, 0);
}
