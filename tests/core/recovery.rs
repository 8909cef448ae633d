//! Masters that restart without their data vote again within seconds, because they recover their
//! lost locks from the other masters. No lock is granted twice, and none is lost.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use redlock_core::clock::{Clock, SystemClock};
use redlock_core::node::link::{
    Answer, Answering, Link, MarkerSwap, ProbeReply, RecoveryAnswer, RecoveryBatch, Scan, Scanned,
    Session, StoredPage, Subscription, Swapped,
};
use redlock_core::node::{
    Engine, Failure, Keys, LockReader, Node, NodeState, NodeStatus, Op, Reply, SafetyRules, Task,
    Vote,
};
use redlock_core::{AcquireOptions, Env, Lease, LockError, LockName, Redlock};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::repair::{Extender, granted_by_all, poll_for};
use crate::support::cluster::{ClusterSettings, OUTLASTING_MS, decided, marker, repeated};
use crate::support::harness::{
    RedisServer, daily_or_long, eventually, masters, masters_in_cluster_mode,
};
use crate::support::measure::measured;
use crate::support::nodes::{in_state, kept_free_record, name, now, record, ttl};
use crate::support::resp::Resp;

/// A quarantine that outlasts every test. So a master that votes again has recovered its locks.
const CLUSTER: ClusterSettings = ClusterSettings::ENDLESS_QUARANTINE;

/// The limit for the time from a restart to the first vote.
const SOON: Duration = Duration::from_secs(15);

struct Five {
    servers: Vec<RedisServer>,
    /// One worker for each master, for each of two gateways.
    remotes: [Vec<Arc<dyn Node>>; 2],
    locks: [Redlock; 2],
}

impl Five {
    async fn start(cluster: &ClusterSettings) -> Self {
        Self::over(masters(5), cluster).await
    }

    async fn over(servers: Vec<RedisServer>, cluster: &ClusterSettings) -> Self {
        cluster.mark(&servers).await;
        let remotes = [(); 2].map(|()| cluster.remote_nodes(&servers));
        for remote in remotes.iter().flatten() {
            in_state(remote.as_ref(), NodeState::Admitted).await;
        }
        let locks = remotes.clone().map(|remotes| cluster.redlock(remotes));
        Self { servers, remotes, locks }
    }

    async fn granted(&self, lock: &LockName, millis: u64) -> Lease {
        let options = AcquireOptions::default;
        granted_by_all(&self.locks[0], &self.servers, lock, ttl(millis), options).await
    }

    /// Restarts masters without their data. Returns the time until both gateways let all of these
    /// masters vote.
    async fn restart_empty(&mut self, victims: &[usize]) -> Duration {
        victims.iter().for_each(|at| self.servers[*at].kill());
        victims.iter().for_each(|at| self.servers[*at].restart());
        let lost = Instant::now();
        for state in [NodeState::Quarantined, NodeState::Admitted] {
            for remotes in &self.remotes {
                for at in victims {
                    in_state(remotes[*at].as_ref(), state).await;
                }
            }
        }
        lost.elapsed()
    }
}

struct Outcome {
    slowest: Duration,
    second_holders: u32,
    lost: Option<LockError>,
}

/// One client holds a lock for its whole TTL, and another lock is extended. A further client polls
/// for both locks, while one group of masters after the other restarts without data.
async fn restarts(cluster: &ClusterSettings, groups: &[&[usize]]) -> Outcome {
    /// An extension is due long before the TTL ends, also on a machine that stands still for
    /// seconds.
    const EXTENDED_MS: u64 = 60_000;
    let mut five = Five::start(cluster).await;
    let held = name("held");
    let extended = name("extended");
    let longest = five.granted(&held, OUTLASTING_MS).await;
    let lease = five.granted(&extended, EXTENDED_MS).await;
    let every = Duration::from_millis(250);
    let extender = Extender::start(&five.locks[0], &extended, &lease, ttl(EXTENDED_MS), every);
    let pollers = [&held, &extended]
        .map(|lock| poll_for(&five.locks[1], lock, ttl(EXTENDED_MS), Duration::from_millis(20)));
    let mut slowest = Duration::ZERO;
    for group in groups {
        slowest = slowest.max(five.restart_empty(group).await);
    }
    pollers.iter().for_each(|(_, task)| task.abort());
    let options = AcquireOptions::default;
    let second = async || five.locks[1].acquire(&held, ttl(EXTENDED_MS), options()).await;
    let second = decided(second).await;
    let polled: u32 = pollers.iter().map(|(granted, _)| granted.load(Ordering::Relaxed)).sum();
    let second_holders = polled + u32::from(second.is_ok());
    let still = async || five.locks[1].extend(&held, &longest.token, ttl(OUTLASTING_MS)).await;
    let still = decided(still).await;
    Outcome { slowest, second_holders, lost: extender.lost().or(still.err()) }
}

/// Returns the longest time from a restart to a vote.
fn assert_good(outcomes: &[Outcome]) -> Duration {
    for outcome in outcomes {
        let Outcome { slowest, second_holders, lost } = outcome;
        assert_eq!(*second_holders, 0, "lost: {lost:?}, slowest vote: {slowest:?}");
        assert!(outcome.lost.is_none(), "{:?}", outcome.lost);
    }
    let slowest = outcomes.iter().map(|outcome| outcome.slowest).max().expect("a run");
    println!(
        "{} runs: 0 second holders, 0 locks lost, the slowest master voted again after {slowest:?}",
        outcomes.len()
    );
    slowest
}

mod measured {
    use super::*;

    async fn within_seconds(victims: &[usize]) {
        measured("the time from a restart to a vote", async || {
            let outcomes =
                repeated(daily_or_long(2, 20), 2, async || restarts(&CLUSTER, &[victims]).await);
            let slowest = assert_good(&outcomes);
            if slowest < SOON { Ok(()) } else { Err(format!("{slowest:?}")) }
        })
        .await;
    }

    #[tokio::test]
    async fn one_of_five_masters_votes_seconds_after_data_loss() {
        within_seconds(&[0]).await;
    }

    #[tokio::test]
    async fn two_of_five_masters_vote_seconds_after_data_loss() {
        within_seconds(&[0, 1]).await;
    }
}

/// In the end every master that granted the lock at first has lost its data.
#[test]
fn a_lock_survives_the_loss_of_every_master_group_by_group() {
    assert_good(&repeated(daily_or_long(2, 20), 2, async || {
        restarts(&CLUSTER, &[&[0, 1], &[2, 3], &[4, 0]]).await
    }));
}

#[test]
fn without_recovery_a_lock_is_granted_twice() {
    let rules = SafetyRules {
        lost_locks_are_recovered: false,
        admitted_is_caught_up: false,
        ..SafetyRules::ALL
    };
    let off = ClusterSettings { rules, ..CLUSTER };
    let outcomes = repeated(2, 2, async || restarts(&off, &[&[0, 1], &[2, 3]]).await);
    assert!(
        outcomes.iter().all(|outcome| outcome.second_holders > 0),
        "nothing goes wrong without the rule"
    );
}

/// Three of five masters lose their data. The two others cannot show every majority, so nothing is
/// recovered.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn with_too_few_sources_the_full_quarantine_is_waited() {
    let mut five = Five::start(&CLUSTER).await;
    five.servers[..3].iter_mut().for_each(RedisServer::kill);
    five.servers[..3].iter_mut().for_each(RedisServer::restart);
    let quarantined = |at: usize| in_state(five.remotes[0][at].as_ref(), NodeState::Quarantined);
    let (first, ..) = tokio::join!(quarantined(0), quarantined(1), quarantined(2));
    assert!(first.until_micros.expect("an end") - first.since_micros > 60_000_000, "{first:?}");
    // If enough masters could be read, recovery would have finished within this time.
    tokio::time::sleep(Duration::from_secs(14)).await;
    assert!((0..3).all(|at| five.remotes[0][at].status().borrow().state == NodeState::Quarantined));
}

/// The keys of a lock and of its watermark belong to any slots.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn masters_in_cluster_mode_recover_their_locks() {
    let mut five = Five::over(masters_in_cluster_mode(5), &CLUSTER).await;
    let names: Vec<_> = (0..20).map(|n| name(&format!("job-{n}"))).collect();
    let mut granted = Vec::new();
    for lock in &names {
        granted.push(five.granted(lock, OUTLASTING_MS).await.token.fencing().to_string());
    }
    five.restart_empty(&[0, 1]).await;
    for (lock, fencing) in names.iter().zip(&granted) {
        let recovered = five.servers[0].cmd(&["GET", &format!("lock:{lock}")]);
        assert!(recovered.text().starts_with(fencing), "{lock}: {recovered:?}");
    }
}

/// Clients of other libraries do not know the quarantine. For them the master votes at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn recovery_overwrites_no_lock_of_another_client() {
    let mut five = Five::start(&CLUSTER).await;
    let lock = name("job");
    let lease = five.granted(&lock, OUTLASTING_MS).await;
    five.servers[2].kill();
    five.servers[2].restart();
    in_state(five.remotes[0][2].as_ref(), NodeState::Quarantined).await;
    five.servers[2].cmd(&["SET", "lock:job", "their-uuid", "PX", "11000"]);
    let recovered =
        eventually("the master is admitted when the other client's lock has ended", async || {
            five.remotes[0][2]
                .status()
                .borrow()
                .votes()
                .then(|| five.servers[2].cmd(&["GET", "lock:job"]))
        })
        .await;
    assert_ne!(recovered, Resp::Nil);
    assert!(recovered.text().starts_with(&lease.token.fencing().to_string()), "{recovered:?}");
    assert!(marker(&five.servers[2]).is_some());
}

const T: u64 = 1_763_725_165_000_000;

/// Stores a kept-free record for an hour, as recovery would.
fn keep_free(server: &RedisServer, lock: &str) {
    server.cmd(&[
        b"SET".as_slice(),
        format!("lock:{lock}").as_bytes(),
        kept_free_record(T).as_bytes(),
        b"PX",
        b"3600000",
    ]);
}

async fn is_held(five: &Five, lock: &LockName) {
    let options = AcquireOptions::default;
    let acquire = async || five.locks[0].acquire(lock, ttl(OUTLASTING_MS), options()).await;
    let refused = decided(acquire).await;
    assert!(matches!(refused, Err(LockError::Held(_))), "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn force_ends_a_lock_that_is_kept_free() {
    let five = Five::start(&CLUSTER).await;
    let lock = name("job");
    (0..3).for_each(|at| keep_free(&five.servers[at], "job"));
    is_held(&five, &lock).await;
    let mut found = 0;
    five.locks[0].force_release(&lock, |_| found += 1).await.expect("all masters have answered");
    assert_eq!(found, 1, "the audit record has the forced release");
    five.granted(&lock, OUTLASTING_MS).await;
}

/// The record on a minority may belong to a grant for which the kept-free records stand.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn force_releases_a_minority_record_before_kept_free_ones() {
    let five = Five::start(&CLUSTER).await;
    let lock = name("job");
    (0..2).for_each(|at| keep_free(&five.servers[at], "job"));
    five.servers[2].cmd(&[
        b"SET".as_slice(),
        b"lock:job",
        record(1, T).as_bytes(),
        b"PX",
        b"3600000",
    ]);
    five.locks[0].force_release(&lock, |_| ()).await.expect("all masters have answered");
    let stored =
        || (0..5).filter(|at| five.servers[*at].cmd(&["GET", "lock:job"]) != Resp::Nil).count();
    eventually("the lock is gone everywhere", async || (stored() == 0).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn force_leaves_a_lock_kept_free_while_a_master_is_silent() {
    let mut five = Five::start(&CLUSTER).await;
    let lock = name("job");
    (0..3).for_each(|at| keep_free(&five.servers[at], "job"));
    five.servers[4].kill();
    let unknown = five.locks[0].force_release(&lock, |_| ()).await;
    assert!(matches!(unknown, Err(LockError::Unknown(_))), "{unknown:?}");
    is_held(&five, &lock).await;
}

/// Two masters are not read at the same moment. So a lock that was read on the first may be gone
/// when the second is read.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_lock_released_between_readings_is_not_kept_free() {
    let mut servers = masters(3);
    CLUSTER.mark(&servers).await;
    let gate = Arc::new(Gate::default());
    let mut remotes = CLUSTER.remote_nodes(&servers);
    for remote in &remotes {
        in_state(remote.as_ref(), NodeState::Admitted).await;
    }
    remotes[1] = Arc::new(Slow { node: remotes[1].clone(), delay: Delay::Read(gate.clone()) });
    let locks = CLUSTER.redlock(remotes.clone());
    let lock = name("job");
    let options = AcquireOptions::default;
    let lease = eventually("the lock is granted", async || {
        locks.acquire(&lock, ttl(OUTLASTING_MS), options()).await.ok()
    })
    .await;
    for remote in &remotes {
        let caught_up = |status: &NodeStatus| status.state == NodeState::Admitted;
        remote.status().wait_for(caught_up).await.expect("the worker lives");
    }
    let read_before = servers[0].calls_of("eval");
    servers[2].kill();
    servers[2].restart();
    in_state(remotes[2].as_ref(), NodeState::Quarantined).await;
    gate.wanted.notified().await;
    let read_first = async || (servers[0].calls_of("eval") > read_before).then_some(());
    eventually("the first master is read", read_first).await;
    locks.release(&lock, &lease.token).await.expect("a majority has released");
    let gone = |at: usize| servers[at].cmd(&["GET", "lock:job"]) == Resp::Nil;
    eventually("both nodes have released", async || (gone(0) && gone(1)).then_some(())).await;
    gate.open.notify_one();
    in_state(remotes[2].as_ref(), NodeState::Admitted).await;
    assert!(gone(2), "{:?}", servers[2].cmd(&["GET", "lock:job"]));
}

/// The gateway stands still for a minute at each answer to a probe. It must not take a lock that was
/// granted just before the loss for one that was granted after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_gateway_that_stands_still_gives_the_newest_lock_back() {
    let mut servers = masters(3);
    CLUSTER.mark(&servers).await;
    let mut remotes = CLUSTER.remote_nodes(&servers);
    for remote in &remotes {
        in_state(remote.as_ref(), NodeState::Admitted).await;
    }
    let clock = Arc::new(LeapingClock::default());
    for remote in &mut remotes[..2] {
        *remote = Arc::new(Slow { node: remote.clone(), delay: Delay::Probe(clock.clone()) });
    }
    let env = Env { clock, ..Env::default() };
    let locks = CLUSTER.redlock_with(remotes.clone(), env);
    let lock = name("job");
    granted_by_all(&locks, &servers, &lock, ttl(OUTLASTING_MS), AcquireOptions::default).await;
    servers[2].kill();
    servers[2].restart();
    in_state(remotes[2].as_ref(), NodeState::Quarantined).await;
    in_state(remotes[2].as_ref(), NodeState::Admitted).await;
    assert_ne!(servers[2].cmd(&["GET", "lock:job"]), Resp::Nil);
}

/// A kept-free record stands for a grant on another master. It must not expire before that grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_slow_second_reading_shortens_no_remaining_life() {
    let mut servers = masters(3);
    CLUSTER.mark(&servers).await;
    let mut remotes = CLUSTER.remote_nodes(&servers);
    for remote in &remotes {
        in_state(remote.as_ref(), NodeState::Admitted).await;
    }
    remotes[1] = Arc::new(ReadsSlowly(remotes[1].clone()));
    let _locks = CLUSTER.redlock(remotes.clone());
    let record = record(1, now());
    servers[1].cmd(&[b"SET".as_slice(), b"lock:job", record.as_bytes(), b"PX", b"3600000"]);
    servers[2].kill();
    servers[2].restart();
    in_state(remotes[2].as_ref(), NodeState::Quarantined).await;
    in_state(remotes[2].as_ref(), NodeState::Admitted).await;
    let life = |at: usize| match servers[at].cmd(&["PTTL", "lock:job"]) {
        Resp::Integer(millis) => millis,
        other => panic!("{other:?}"),
    };
    let copied = life(2);
    let source = life(1);
    // Both remaining lives are rounded to milliseconds. The validity of a lock has 2 ms to allow
    // for that.
    assert!(copied + 2 >= source, "the copy ends {} ms before its source", source - copied);
}

/// A node whose reads take some time, as on a slow link.
struct ReadsSlowly(Arc<dyn Node>);

impl Node for ReadsSlowly {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.0.status()
    }
    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply) {
        self.0.submit(op, not_after, reply);
    }
    fn reader(&self) -> &dyn LockReader {
        self
    }
    fn link(&self) -> Option<Arc<dyn Link>> {
        self.0.link()
    }
}

impl LockReader for ReadsSlowly {
    fn scan(&self, scan: Scan) -> BoxFuture<'_, Result<Scanned, Failure>> {
        self.0.reader().scan(scan)
    }
    fn read(&self, locks: Vec<Keys>) -> BoxFuture<'_, Result<Vec<Vote>, Failure>> {
        let read = self.0.reader().read(locks);
        Box::pin(async move {
            tokio::time::sleep(Duration::from_secs(1)).await;
            read.await
        })
    }
}

/// The grant of a majority ends, but the lock does not become free: one node is down, and another
/// stores a kept-free record.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn force_releases_a_majority_beside_a_kept_free_record() {
    let mut five = Five::start(&CLUSTER).await;
    let lock = name("job");
    keep_free(&five.servers[0], "job");
    let grant = record(1, now());
    for at in 1..4 {
        five.servers[at].cmd(&[
            b"SET".as_slice(),
            b"lock:job",
            grant.as_bytes(),
            b"PX",
            b"3600000",
        ]);
    }
    five.servers[4].kill();
    five.locks[0].force_release(&lock, |_| ()).await.expect("a majority has released");
}

/// Reports that a read was requested, and lets the read continue when the test wants it.
#[derive(Default)]
struct Gate {
    wanted: Notify,
    open: Notify,
}

/// The clock of a process that stands still for a minute after each answer to a probe.
#[derive(Default)]
struct LeapingClock(AtomicU64);

impl LeapingClock {
    const LEAP: Duration = Duration::from_secs(60);
}

impl Clock for LeapingClock {
    fn monotonic(&self) -> Duration {
        SystemClock.monotonic() + Self::LEAP * self.0.load(Ordering::SeqCst) as u32
    }
    fn wall_micros(&self) -> u64 {
        SystemClock.wall_micros()
    }
}

/// Which step of a session is delayed.
#[derive(Clone)]
enum Delay {
    /// Reading the stored locks waits until the test opens the gate.
    Read(Arc<Gate>),
    /// A probe takes no longer, but this clock jumps ahead by a minute when the answer arrives.
    Probe(Arc<LeapingClock>),
}

/// A node with this delay in all its sessions.
struct Slow {
    node: Arc<dyn Node>,
    delay: Delay,
}

impl Node for Slow {
    fn name(&self) -> &str {
        self.node.name()
    }
    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.node.status()
    }
    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply) {
        self.node.submit(op, not_after, reply);
    }
    fn reader(&self) -> &dyn LockReader {
        self.node.reader()
    }
    fn link(&self) -> Option<Arc<dyn Link>> {
        Some(Arc::new(SlowLink { link: self.node.link()?, delay: self.delay.clone() }))
    }
}

struct SlowLink {
    link: Arc<dyn Link>,
    delay: Delay,
}

impl Link for SlowLink {
    fn connect(&self) -> Answering<Box<dyn Session>> {
        let session = self.link.connect();
        let delay = self.delay.clone();
        Box::pin(async move {
            Ok(Box::new(SlowSession { session: session.await?, delay }) as Box<dyn Session>)
        })
    }
    fn subscribe(&self, nonce: u64) -> Answering<Box<dyn Subscription>> {
        self.link.subscribe(nonce)
    }
}

struct SlowSession {
    session: Box<dyn Session>,
    delay: Delay,
}

impl Session for SlowSession {
    fn stored(&self, cursor: Option<Bytes>, longest_life: Duration) -> Answering<StoredPage> {
        let page = self.session.stored(cursor, longest_life);
        let Delay::Read(gate) = self.delay.clone() else { return page };
        Box::pin(async move {
            gate.wanted.notify_one();
            gate.open.notified().await;
            page.await
        })
    }
    fn probe(&self) -> Answering<ProbeReply> {
        let reply = self.session.probe();
        let Delay::Probe(clock) = self.delay.clone() else { return reply };
        Box::pin(async move {
            let reply = reply.await;
            clock.0.fetch_add(1, Ordering::SeqCst);
            reply
        })
    }
    fn swap_marker(&self, swap: MarkerSwap) -> Answering<Swapped> {
        self.session.swap_marker(swap)
    }
    fn scan(&self, scan: Scan) -> Answering<Scanned> {
        self.session.scan(scan)
    }
    fn recover(&self, recovery: RecoveryBatch) -> Answering<RecoveryAnswer> {
        self.session.recover(recovery)
    }
    fn mark_caught_up(&self, marker: &str) -> Answering<()> {
        self.session.mark_caught_up(marker)
    }
    fn time_micros(&self) -> Answering<i64> {
        self.session.time_micros()
    }
    fn load(&self, run_id: &str, marker: &str) -> Answering<Engine> {
        self.session.load(run_id, marker)
    }
    fn call(&self, tasks: &[Task], number: u64) -> Answering<Answer> {
        self.session.call(tasks, number)
    }
    fn closed(&self) -> Pin<Box<dyn Future<Output = String> + Send>> {
        self.session.closed()
    }
}
