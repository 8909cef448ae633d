//! Calls to nodes through the `Node` trait: each call submits one operation and gets one vote.
//! Short helpers make owners and fencing tokens. [`Cluster`] has real servers for tests of whole
//! locks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use redlock_core::clock::{Clock, SystemClock};
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::redis::{RedisNode, RedisSettings, RedisUrl};
use redlock_core::node::worker::RemoteNode;
use redlock_core::node::{
    Effect, Failure, HandoffRoute, Hint, Keys, LockReader, NoObserver, Node, NodeSettings,
    NodeState, NodeStatus, Observer, Op, Reason, Record, ReleaseScope, Reply, Task, Vote, Voter,
};
use redlock_core::{
    AcquireOptions, Env, Info, LockName, LockToken, Owner, OwnerChoice, Redlock, Settings, Ttl,
};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, timeout};

use crate::support::harness::{PATIENCE, RedisServer, eventually, masters};
use crate::support::resp::Resp;

pub(crate) const PREFIX: &str = "lock:";
/// A TTL far longer than any pause in which a busy machine runs no process. A round gets a tenth of
/// it.
pub(crate) const LONG_MS: u64 = 120_000;
/// How long rounds wait for a node. So a node on a busy machine does not look dead.
pub(crate) const NODE_TIMEOUT: Duration = Duration::from_secs(30);

/// The settings of nodes in tests that are not about clocks. A busy machine may stand still for
/// seconds between the making of a token and its arrival. The skew is so long that the node accepts
/// the token all the same.
pub(crate) fn node_settings() -> NodeSettings {
    NodeSettings::default().with_max_clock_skew(Duration::from_secs(60))
}

/// This machine's wall clock in microseconds, from which tests make fencing tokens.
pub(crate) fn now() -> u64 {
    SystemClock.wall_micros()
}

pub(crate) fn ttl(millis: u64) -> Ttl {
    Ttl::from_millis(millis).expect("a valid ttl")
}

pub(crate) fn name(text: &str) -> LockName {
    text.parse::<LockName>().expect("a valid name")
}

/// Added to an owner's number, it stands for another proposal of that owner: the nonce differs.
pub(crate) const AGAIN: u8 = 0x80;

/// The token of owner number `owner` with fencing token `t`.
pub(crate) fn token(owner: u8, t: u64) -> LockToken {
    // Owner 0 means nobody, as in kept-free records. So the owner that a test numbers 0 gets
    // another number.
    let number = if owner & !AGAIN == 0 { 0x7f } else { owner & !AGAIN };
    let (owner, nonce) = (format!("{number:02x}"), format!("{owner:02x}"));
    format!("1.{t}.{}{}", owner.repeat(16), nonce.repeat(4))
        .parse::<LockToken>()
        .expect("a valid token")
}

pub(crate) fn record(owner: u8, t: u64) -> Record {
    Record::new(&token(owner, t), &Info::default())
}

/// The record of an extended lock.
pub(crate) fn extended(owner: u8, t: u64) -> Record {
    let mut text = record(owner, t).as_bytes().to_vec();
    text[57] = b';';
    Record::foreign(text.into())
}

/// The record with which recovery keeps a lock from everybody.
pub(crate) fn kept_free_record(t: u64) -> Record {
    Record::foreign(format!("{t}:{}:", "0".repeat(40)).into())
}

/// The record that a release with a time to hold leaves.
pub(crate) fn hold_record(owner: u8, t: u64) -> Record {
    let (placeholder, released) = (kept_free_record(t), record(owner, t));
    Record::foreign([placeholder.as_bytes(), &released.as_bytes()[17..57]].concat().into())
}

/// One lock. Its functions make the operations on it.
#[derive(Clone)]
pub(crate) struct Lock {
    pub(crate) keys: Keys,
}

impl Lock {
    pub(crate) fn new(text: &str) -> Self {
        Self { keys: Keys::new(PREFIX, &name(text)) }
    }

    /// The set of this lock and the others.
    pub(crate) fn with(&self, others: &[Self]) -> Self {
        Self { keys: self.keys.clone().with(others.iter().map(|lock| lock.keys.clone())) }
    }

    pub(crate) fn acquire(&self, owner: u8, t: u64, millis: u64) -> Op {
        Op::Acquire {
            keys: self.keys.clone(),
            record: record(owner, t),
            ttl: ttl(millis),
            tell: None,
        }
    }

    pub(crate) fn extend(&self, owner: u8, t: u64, millis: u64) -> Op {
        self.extend_late(owner, t, millis, now())
    }

    pub(crate) fn extend_late(&self, owner: u8, t: u64, millis: u64, began_micros: u64) -> Op {
        let (keys, record, ttl) = (self.keys.clone(), record(owner, t), ttl(millis));
        Op::Extend { keys, record, ttl, began_micros }
    }

    /// The repair that follows an extension which has begun now.
    pub(crate) fn repair(&self, owner: u8, t: u64, millis: u64) -> Op {
        self.repair_of(owner, t, millis, now())
    }

    pub(crate) fn repair_of(&self, owner: u8, t: u64, millis: u64, began_micros: u64) -> Op {
        Op::Repair {
            keys: self.keys.clone(),
            record: extended(owner, t),
            ttl: ttl(millis),
            began_micros,
        }
    }

    /// The repair that a master gets when it catches up, for a lock that was never extended.
    pub(crate) fn catch_up(&self, owner: u8, t: u64, millis: u64) -> Op {
        Op::Repair {
            keys: self.keys.clone(),
            record: record(owner, t),
            ttl: ttl(millis),
            began_micros: now(),
        }
    }

    pub(crate) fn release(&self, owner: u8, t: u64) -> Op {
        Op::Release {
            keys: self.keys.clone(),
            record: record(owner, t),
            scope: ReleaseScope::Holder,
            tell: None,
        }
    }

    /// The release that keeps the lock free for a while.
    pub(crate) fn release_keeping(&self, owner: u8, t: u64, millis: u64) -> Op {
        self.release_keeping_late(owner, t, millis, now())
    }

    pub(crate) fn release_keeping_late(
        &self,
        owner: u8,
        t: u64,
        millis: u64,
        began_micros: u64,
    ) -> Op {
        Op::Release {
            keys: self.keys.clone(),
            record: record(owner, t),
            scope: ReleaseScope::HolderKeeping { life: ttl(millis), began_micros },
            tell: None,
        }
    }

    pub(crate) fn undo(&self, owner: u8, t: u64) -> Op {
        Op::Release {
            keys: self.keys.clone(),
            record: record(owner, t),
            scope: ReleaseScope::Proposal,
            tell: None,
        }
    }

    pub(crate) fn release_exactly(&self, owner: u8, t: u64) -> Op {
        Op::Release {
            keys: self.keys.clone(),
            record: record(owner, t),
            scope: ReleaseScope::Grant,
            tell: None,
        }
    }

    pub(crate) fn inspect(&self) -> Op {
        Op::Inspect { keys: self.keys.clone() }
    }

    /// Reads the watermark. There is no operation for that. But an inspection returns the value of
    /// any key that it names as the lock's, so this one names the watermark's key.
    pub(crate) fn inspect_fence(&self) -> Op {
        let fence = self.keys.fence.clone();
        Op::Inspect { keys: Keys { lock: fence.clone(), fence, others: None } }
    }
}

/// The same operation, which also publishes a hint with this text.
pub(crate) fn telling(mut op: Op, text: &'static str) -> Op {
    match &mut op {
        Op::Acquire { tell, .. } | Op::Release { tell, .. } => {
            *tell = Some(Hint::received(Bytes::from_static(text.as_bytes())));
        }
        other => panic!("{other:?} has no hint"),
    }
    op
}

struct NodeIdentity(Mutex<Option<oneshot::Sender<Vote>>>);

impl Voter for NodeIdentity {
    fn vote(&self, _: usize, vote: Vote) {
        let sender = self.0.lock().unwrap().take().expect("one vote for one operation");
        let _ = sender.send(vote);
    }
}

/// A vote that may not have arrived yet.
pub(crate) struct Pending(oneshot::Receiver<Vote>);

impl Pending {
    pub(crate) async fn vote(self) -> Vote {
        timeout(PATIENCE, self.0)
            .await
            .expect("every operation is answered")
            .expect("every operation is answered")
    }

    /// The vote if it has already arrived, otherwise the pending vote again.
    pub(crate) fn at_once(mut self) -> Result<Vote, Self> {
        self.0.try_recv().map_err(|_| self)
    }
}

pub(crate) fn submit(node: &dyn Node, op: Op) -> Pending {
    submit_until(node, op, Instant::now() + PATIENCE)
}

pub(crate) fn submit_until(node: &dyn Node, op: Op, not_after: Instant) -> Pending {
    let (Task { op, reply, .. }, pending) = task(op);
    node.submit(op, not_after, reply);
    pending
}

/// An operation for [`Node::submit_all`], and its vote.
pub(crate) fn task(op: Op) -> (Task, Pending) {
    let (sender, receiver) = oneshot::channel();
    let reply = Reply::new(Arc::new(NodeIdentity(Mutex::new(Some(sender)))), 0);
    let not_after = Instant::now() + PATIENCE;
    (Task { op: Arc::new(op), not_after, reply }, Pending(receiver))
}

pub(crate) async fn ask(node: &dyn Node, op: Op) -> Vote {
    submit(node, op).vote().await
}

pub(crate) async fn votes(pending: Vec<Pending>) -> Vec<Vote> {
    let mut votes = Vec::with_capacity(pending.len());
    for one in pending {
        votes.push(one.vote().await);
    }
    votes
}

/// The failure in a vote. Panics if the vote is no failure.
#[track_caller]
pub(crate) fn failure(vote: Vote) -> Failure {
    match vote {
        Vote::Failed(failure) => failure,
        other => panic!("expected a failure, got {other:?}"),
    }
}

#[track_caller]
pub(crate) fn assert_failed(vote: Vote, reason: Reason, effect: Effect) {
    let failure = failure(vote);
    assert_eq!((failure.reason, failure.effect), (reason, effect), "{}", failure.detail);
}

#[track_caller]
pub(crate) fn assert_extended(vote: &Vote) {
    assert!(matches!(vote, Vote::Extended { .. }), "{vote:?}");
}

/// Waits until a node has this state, and returns its status.
pub(crate) async fn in_state(node: &dyn Node, state: NodeState) -> NodeStatus {
    let mut status = node.status();
    // A worker alone has no gateway that compares masters, so it never finishes catching up.
    let is_wanted = |seen: NodeState| {
        seen == state || state == NodeState::Admitted && seen == NodeState::CatchingUp
    };
    let seen = timeout(PATIENCE, status.wait_for(|status| is_wanted(status.state))).await;
    match seen {
        Ok(seen) => seen.expect("the remote lives").clone(),
        Err(_) => panic!("{} is not {state:?} but {:?}", node.name(), node.status().borrow()),
    }
}

pub(crate) fn redis_settings(node: NodeSettings) -> RedisSettings {
    Settings { node, node_timeout: NODE_TIMEOUT, ..Settings::default() }.of_masters("tests", 1)
}

pub(crate) fn remote_node(url: &str) -> Arc<RemoteNode> {
    remote_node_with(url, redis_settings(node_settings()), Arc::new(NoObserver))
}

/// A worker for tests in which its master hangs. It ends the session after a second without an
/// answer, as in the default configuration. Other workers wait for a minute.
pub(crate) fn hasty_node(url: &str) -> Arc<RemoteNode> {
    hasty_node_with(url, Arc::new(NoObserver))
}

pub(crate) fn hasty_node_with(url: &str, observer: Arc<dyn Observer>) -> Arc<RemoteNode> {
    let settings = Settings { node: node_settings(), ..Settings::default() };
    remote_node_with(url, settings.of_masters("tests", 1), observer)
}

/// A worker for tests that are not about quarantine. Its quarantines end at once.
pub(crate) fn remote_node_with(
    url: &str,
    settings: RedisSettings,
    observer: Arc<dyn Observer>,
) -> Arc<RemoteNode> {
    strict_node(url, settings.without_quarantine(), observer)
}

/// A worker with real quarantines, as a gateway has it.
pub(crate) fn strict_node(
    url: &str,
    settings: RedisSettings,
    observer: Arc<dyn Observer>,
) -> Arc<RemoteNode> {
    let url = RedisUrl::parse(url).expect("a valid url");
    Arc::new(RedisNode::start(url, settings, Env { observer, ..Env::default() }))
}

/// Records the core's reports about its work.
#[derive(Default)]
pub(crate) struct Recorder {
    /// The number of operations in each call to a node, by the node's name.
    pub(crate) calls: Mutex<BTreeMap<String, Vec<usize>>>,
    pub(crate) votes: Mutex<Vec<Vote>>,
    pub(crate) hand_overs: Mutex<Vec<HandoffRoute>>,
}

impl Recorder {
    /// For a test with one node: the calls to it since this function was last used.
    pub(crate) fn take_calls(&self) -> Vec<usize> {
        std::mem::take(&mut *self.calls.lock().unwrap()).into_values().flatten().collect()
    }
}

impl Observer for Recorder {
    fn node_call(&self, node: &str, operations: usize, _: Duration) {
        self.calls.lock().unwrap().entry(node.into()).or_default().push(operations);
    }
    fn clock_offset(&self, _: &str, _: i64) {}
    fn vote(&self, _: usize, vote: &Vote) {
        self.votes.lock().unwrap().push(vote.clone());
    }
    fn release_abandoned(&self, _: usize) {}
    fn repaired(&self, _: usize) {}
    fn handed_over(&self, kind: HandoffRoute) {
        self.hand_overs.lock().unwrap().push(kind);
    }
}

/// A node that hands every operation to the function `submit`. That function may pass it on at
/// once, later, or never. The node delivers no hints.
struct Intercepted<F> {
    node: Arc<dyn Node>,
    submit: F,
}

pub(crate) fn intercepted(
    node: Arc<dyn Node>,
    submit: impl Fn(&Arc<dyn Node>, Task) + Send + Sync + 'static,
) -> Arc<dyn Node> {
    Arc::new(Intercepted { node, submit })
}

/// Three nodes in memory, which answer at once.
pub(crate) fn memory_nodes() -> Vec<Arc<MemoryNode>> {
    let node = |n| MemoryNode::new(format!("node-{n}"), Arc::new(SystemClock), node_settings());
    (0..3).map(node).map(Arc::new).collect()
}

/// The options of a request whose repetitions ask for the same owner.
pub(crate) fn shared_by(owner: Owner) -> AcquireOptions {
    AcquireOptions { owner: OwnerChoice::Shared(owner), ..AcquireOptions::default() }
}

/// Submits an operation to a node.
pub(crate) fn pass_on(node: &Arc<dyn Node>, Task { op, not_after, reply }: Task) {
    node.submit(op, not_after, reply);
}

impl<F: Fn(&Arc<dyn Node>, Task) + Send + Sync + 'static> Node for Intercepted<F> {
    fn name(&self) -> &str {
        self.node.name()
    }
    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.node.status()
    }
    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply) {
        (self.submit)(&self.node, Task { op, not_after, reply });
    }
    fn reader(&self) -> &dyn LockReader {
        self.node.reader()
    }
}

/// Real servers, and one worker for each of them.
pub(crate) struct Cluster {
    pub(crate) servers: Vec<RedisServer>,
    pub(crate) nodes: Vec<Arc<dyn Node>>,
}

impl Cluster {
    /// Starts the servers. Returns when all nodes are admitted.
    pub(crate) async fn start(size: usize) -> Self {
        let servers = masters(size);
        let nodes = Self::remote_nodes(&servers, node_settings()).await;
        Self { servers, nodes }
    }

    /// A second set of workers for the same servers, as another gateway has it.
    pub(crate) async fn remote_nodes(
        servers: &[RedisServer],
        settings: NodeSettings,
    ) -> Vec<Arc<dyn Node>> {
        let start = |server: &RedisServer| {
            remote_node_with(&server.url(), redis_settings(settings), Arc::new(NoObserver))
                as Arc<dyn Node>
        };
        let nodes: Vec<_> = servers.iter().map(start).collect();
        for node in &nodes {
            in_state(node.as_ref(), NodeState::Admitted).await;
        }
        nodes
    }

    /// Puts a [`hasty_node`] in the place of a node whose master is going to hang. The other nodes
    /// stay patient.
    pub(crate) async fn make_hasty(&mut self, at: usize) {
        let node = hasty_node(&self.servers[at].url());
        in_state(node.as_ref(), NodeState::Admitted).await;
        self.nodes[at] = node;
    }

    /// The lock over all nodes.
    pub(crate) fn redlock(&self) -> Redlock {
        redlock(self.nodes.clone(), NODE_TIMEOUT)
    }

    /// Calls [`stored_on`] for these servers.
    pub(crate) fn stored_on(
        &self,
        lock: &LockName,
        reachable: impl Fn(usize) -> bool,
    ) -> Vec<usize> {
        stored_on(&self.servers, lock.as_str(), reachable)
    }

    /// Calls [`clean_for_good`] for these servers.
    pub(crate) async fn clean_for_good(&self, lock: &LockName, least: u64) {
        clean_for_good(&self.servers, lock.as_str(), least).await;
    }
}

/// The servers that store a value under the lock's key. A server for which `reachable` returns
/// false is skipped.
pub(crate) fn stored_on(
    servers: &[RedisServer],
    name: &str,
    reachable: impl Fn(usize) -> bool,
) -> Vec<usize> {
    let key = format!("{PREFIX}{name}");
    let stored = |at: &usize| reachable(*at) && servers[*at].cmd(&["GET", &key]) != Resp::Nil;
    (0..servers.len()).filter(stored).collect()
}

/// Waits until no server stores a value under the lock's key.
pub(crate) async fn no_master_stores(servers: &[RedisServer], name: &str) {
    eventually("no master stores the lock", async || {
        stored_on(servers, name, |_| true).is_empty().then_some(())
    })
    .await;
}

/// Waits until no server stores the lock, and every server has a watermark that refuses repairs and
/// is at least `least`, or was restored by an undo. A server has such a watermark only after the
/// acquire and its release have run. So a request that is still in a socket cannot set the lock any
/// more. Do not call this after a failed proposal on a lock that was never used before: the undo
/// removes the watermark.
pub(crate) async fn clean_for_good(servers: &[RedisServer], name: &str, least: u64) {
    let fence = format!("{{{PREFIX}{name}}}:fence");
    let fenced = |server: &RedisServer| match server.cmd(&["GET", &fence]) {
        Resp::Nil => false,
        fence => {
            let text = fence.text();
            let (t, marks) = text.split_at(16);
            // The undo of an acquire restores the watermark that stood before, with an end.
            let is_restored = marks.starts_with('@');
            let t: u64 = t.parse().expect("a number");
            !marks.starts_with('+') && (is_restored || t >= least)
        }
    };
    eventually("no node stores the lock, and all refuse its fencing token", async || {
        (servers.iter().all(fenced) && stored_on(servers, name, |_| true).is_empty()).then_some(())
    })
    .await;
}

pub(crate) fn redlock(nodes: Vec<Arc<dyn Node>>, node_timeout: Duration) -> Redlock {
    redlock_with(nodes, node_timeout, Env::default())
}

pub(crate) fn redlock_with(nodes: Vec<Arc<dyn Node>>, node_timeout: Duration, env: Env) -> Redlock {
    let settings = Settings {
        node_timeout,
        node: node_settings(),
        key_prefix: PREFIX.into(),
        ..Settings::default()
    };
    Redlock::new(nodes, settings, env).expect("good settings")
}
