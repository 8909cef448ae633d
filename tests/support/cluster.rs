//! Clusters with their own clock settings. A quarantine is either so short that a test can wait for
//! its end, or so long that it outlasts every test. This file also has redis-servers with a shifted
//! clock, and runs scenarios repeatedly.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use redlock_core::node::eligibility::quarantine;
use redlock_core::node::redis::RedisSettings;
use redlock_core::node::worker::RemoteNode;
use redlock_core::node::{
    NoObserver, Node, NodeSettings, NodeState, NodeStatus, Op, SafetyRules, Vote,
};
use redlock_core::{AcquireOptions, Env, Lease, LockError, LockName, Redlock, Settings, Ttl};
use tokio::time::Instant;

use crate::support::gateway::{Scratch, source_root};
use crate::support::harness::{PATIENCE, RedisOptions, RedisServer, eventually};
use crate::support::nodes::{Lock, PREFIX, ask, in_state, now, remote_node_with, strict_node, ttl};
use crate::support::resp::Resp;

/// The longest time between the end of a quarantine and a vote: a second until the gateway's next
/// probe, and 5 s for a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(1 + 5);

/// The TTL of locks that outlast every test: two hours.
pub(crate) const OUTLASTING_MS: u64 = 7_200_000;

/// The settings that all gateways of a cluster share.
#[derive(Debug, Clone)]
pub(crate) struct ClusterSettings {
    /// The name of the cluster.
    pub(crate) name: &'static str,
    pub(crate) max_ttl: Duration,
    /// The clock skew (`max_clock_skew`).
    pub(crate) skew: Duration,
    pub(crate) rules: SafetyRules,
}

impl ClusterSettings {
    /// A quarantine of four seconds.
    pub(crate) const SHORT_QUARANTINE: Self = Self {
        name: "tests",
        max_ttl: Duration::from_millis(700),
        skew: Duration::from_millis(300),
        rules: SafetyRules::ALL,
    };

    /// A quarantine that outlasts every test. So if a master is admitted, it is not because its
    /// quarantine has ended.
    pub(crate) const ENDLESS_QUARANTINE: Self = Self {
        name: "tests",
        max_ttl: Duration::from_millis(OUTLASTING_MS),
        skew: Duration::from_secs(2),
        rules: SafetyRules::ALL,
    };

    pub(crate) fn quarantine(&self) -> Duration {
        quarantine(self.max_ttl, self.skew)
    }

    pub(crate) fn settings(&self) -> RedisSettings {
        self.of_locks().of_masters(self.name, 1)
    }

    /// The node timeout is the longest that the clock skew permits, so that a node on a busy machine
    /// does not look dead.
    fn of_locks(&self) -> Settings {
        Settings {
            key_prefix: PREFIX.into(),
            max_ttl: Ttl::from_duration(self.max_ttl).expect("whole milliseconds"),
            node_timeout: (self.skew * 3).max(Duration::from_secs(5)),
            node: NodeSettings::default().with_max_clock_skew(self.skew).with_rules(self.rules),
            ..Settings::default()
        }
    }

    /// A worker with this cluster's settings, as a gateway has it.
    pub(crate) fn remote_node(&self, url: &str) -> Arc<RemoteNode> {
        strict_node(url, self.settings(), Arc::new(NoObserver))
    }

    /// A worker whose quarantines last as another clock skew requires. Its markers name this
    /// cluster's clock skew all the same.
    pub(crate) fn node_with_clock_skew(&self, url: &str, clock_skew: Duration) -> Arc<RemoteNode> {
        strict_node(url, self.settings().waiting_for_skew(clock_skew), Arc::new(NoObserver))
    }

    /// One worker for each server, as a gateway has them.
    pub(crate) fn remote_nodes(&self, servers: &[RedisServer]) -> Vec<Arc<dyn Node>> {
        servers.iter().map(|server| self.remote_node(&server.url()) as Arc<dyn Node>).collect()
    }

    /// One worker for each server, of a gateway that was started with `--bootstrap`.
    pub(crate) fn bootstrapping_nodes(&self, servers: &[RedisServer]) -> Vec<Arc<dyn Node>> {
        let mut settings = self.settings();
        settings.bootstrap = true;
        let remote = |server: &RedisServer| {
            strict_node(&server.url(), settings.clone(), Arc::new(NoObserver))
        };
        servers.iter().map(|server| remote(server) as Arc<dyn Node>).collect()
    }

    /// Admits servers without data, without a quarantine. Every worker that connects later is then
    /// admitted at once.
    pub(crate) async fn mark(&self, servers: &[RedisServer]) {
        for server in servers {
            self.mark_by(&server.url()).await;
        }
    }

    pub(crate) async fn mark_by(&self, url: &str) {
        let remote = remote_node_with(url, self.settings(), Arc::new(NoObserver));
        in_state(remote.as_ref(), NodeState::Admitted).await;
    }

    /// A worker that is admitted. The server must have its marker already.
    pub(crate) async fn admitted(&self, url: &str) -> Arc<RemoteNode> {
        self.mark_by(url).await;
        let remote = self.remote_node(url);
        in_state(remote.as_ref(), NodeState::Admitted).await;
        remote
    }

    /// The lock over these nodes. A round waits for at most a tenth of the TTL, as in every
    /// configuration.
    pub(crate) fn redlock(&self, nodes: Vec<Arc<dyn Node>>) -> Redlock {
        self.redlock_with(nodes, Env::default())
    }

    pub(crate) fn redlock_with(&self, nodes: Vec<Arc<dyn Node>>, env: Env) -> Redlock {
        Redlock::new(nodes, self.of_locks(), env).expect("good settings")
    }

    /// Checks that a node that lost its memory at `lost` votes only after the end of its
    /// quarantine. During the quarantine the node's status must contain `why`, and must show an end
    /// that is neither too early nor too late. Returns that status.
    pub(crate) async fn waits_out(&self, node: &dyn Node, lost: Instant, why: &str) -> NodeStatus {
        // Reading the clocks in this order can make the loss look too early, but not too late.
        let read = now();
        let lost_micros = read - lost.elapsed().as_micros() as u64;
        let (seen, voted) = tokio::join!(in_state(node, NodeState::Quarantined), first_vote(node));
        let waited = voted - lost;
        let wait = self.quarantine();
        assert!(
            waited >= wait,
            "{}: voted {waited:?} after a loss, before the {wait:?} of a quarantine",
            node.name()
        );
        assert!(seen.detail.contains(why) && seen.remedy.is_some(), "{why:?} is not in {seen:?}");
        let until = seen.until_micros.expect("the end of a quarantine is known");
        // The marker states when the quarantine began. That is the probe which noticed the loss, a
        // moment before the marker was written.
        assert!(until - seen.since_micros <= wait.as_micros() as u64, "{seen:?}");
        // The wall clock may have been corrected by some milliseconds.
        assert!(
            until + 100_000 >= lost_micros + wait.as_micros() as u64,
            "lost at {lost_micros}: {seen:?}"
        );
        let after = node.status().borrow().clone();
        // No gateway compares this master with others here. So the master stays in the state of
        // catching up.
        assert!(after.state.is_admitted() && after.until_micros.is_none(), "{after:?}");
        seen
    }
}

/// Acquires a lock, and repeats that while no majority answers in time.
pub(crate) async fn granted(
    locks: &Redlock,
    lock: &LockName,
    millis: u64,
    options: impl Fn() -> AcquireOptions,
) -> Lease {
    eventually("the lock is granted", async || {
        match locks.acquire(lock, ttl(millis), options()).await {
            Ok(lease) => Some(lease),
            Err(error) => {
                assert!(matches!(error, LockError::NoQuorum(_)), "{error}");
                // The next attempt would be refused by what this one has left.
                locks.drained().await;
                None
            }
        }
    })
    .await
}

/// Repeats a request until the masters decide it. On a busy machine a round may be too late, or its
/// token may be too old for the masters when it arrives.
pub(crate) async fn decided(
    request: impl AsyncFn() -> Result<Lease, LockError>,
) -> Result<Lease, LockError> {
    eventually("the masters decide the request", async || match request().await {
        Err(LockError::NoQuorum(_) | LockError::Unknown(_)) => None,
        decided => Some(decided),
    })
    .await
}

/// Asks one node with one new token after another, until it votes. On a busy machine a token may be
/// too old for the node when it arrives.
pub(crate) async fn voted(node: &dyn Node, op: impl Fn(u64) -> Op) -> Vote {
    eventually("the node votes", async || match ask(node, op(now())).await {
        Vote::Failed(_) => None,
        vote => Some(vote),
    })
    .await
}

/// Asks a node for one new lock after another. Returns the time of the first grant.
pub(crate) async fn first_vote(node: &dyn Node) -> Instant {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    eventually("the node votes", async || {
        let lock = Lock::new(&format!("probe-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
        match ask(node, lock.acquire(1, now(), 10)).await {
            Vote::Granted => Some(Instant::now()),
            Vote::Failed(_) => None,
            vote => panic!("a fresh lock is held: {vote:?}"),
        }
    })
    .await
}

/// The marker on a server.
pub(crate) fn marker(server: &RedisServer) -> Option<String> {
    match server.cmd(&["GET", &format!("{{{PREFIX}}}:marker")]) {
        Resp::Nil => None,
        marker => Some(marker.text()),
    }
}

/// Runs a scenario many times, several at once, and returns all results. Each scenario has its own
/// thread, because servers start and stop with blocking calls. The scenario's workers run on
/// another thread.
pub(crate) fn repeated<T: Send>(
    times: usize,
    at_once: usize,
    scenario: impl AsyncFn() -> T + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|threads| {
        for _ in 0..at_once.min(times) {
            threads.spawn(|| {
                while next.fetch_add(1, Ordering::Relaxed) < times {
                    let runtime = tokio::runtime::Builder::new_multi_thread()
                        .worker_threads(1)
                        .enable_all()
                        .build();
                    let result = runtime.expect("a runtime").block_on(scenario());
                    results.lock().unwrap().push(result);
                }
            });
        }
    });
    results.into_inner().unwrap()
}

/// Repeats a scenario, several times at once, until it returns a value. A busy machine may be too
/// slow to show the value in a single run.
pub(crate) fn until_some<T: Send>(
    what: &str,
    at_once: usize,
    scenario: impl AsyncFn() -> Option<T> + Sync,
) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let outcomes = repeated(at_once, at_once, &scenario);
        if let Some(value) = outcomes.into_iter().flatten().next() {
            return value;
        }
        assert!(Instant::now() < deadline, "never seen: {what}");
    }
}

/// Compiles a library from this C file. The library shifts the wall clock of the process that
/// preloads it.
pub(crate) fn clock_shim(source: &str) -> Scratch {
    let library = Scratch::new("clock_shim.so", "");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .arg(library.path())
        .arg(source_root().join("tests/support").join(source))
        .output()
        .expect("a C compiler is installed");
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library
}

/// The wall clock of one redis-server, under the test's control.
pub(crate) struct NodeClock {
    shim: Scratch,
    file: Scratch,
}

impl NodeClock {
    pub(crate) fn new() -> Self {
        Self {
            shim: clock_shim("node_clock_shim.c"),
            file: Scratch::new("node_clock", "\0\0\0\0\0\0\0\0"),
        }
    }

    /// Starts a server that has this clock.
    pub(crate) fn server(&self) -> RedisServer {
        let shim = self.shim.path();
        let file = self.file.path();
        let env = vec![format!("LD_PRELOAD={shim}"), format!("NODE_CLOCK_FILE={file}")];
        RedisServer::start_with(RedisOptions { env, ..RedisOptions::default() })
    }

    /// Sets how far the clock is ahead of this machine's from now on.
    pub(crate) fn set_ahead(&self, millis: i64) {
        let file =
            File::options().write(true).open(self.file.path()).expect("the test created the file");
        file.write_all_at(&millis.to_ne_bytes(), 0).expect("the file can be written");
    }
}
