//! A simulated gateway: a process with the real core, one core node for each master, and the
//! requests that are running.
//!
//! A gateway can die. Then its requests and workers stop at once without cleaning up. Messages that
//! are on their way to masters may still arrive. The next process is a fresh core. Its hybrid clock
//! is empty, and it knows nothing of the masters.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use redlock_core::node::eligibility::{ClusterConfig, Eligibility};
use redlock_core::node::link::Link;
use redlock_core::node::worker::{DriverSettings, RemoteNode};
use redlock_core::node::{
    HandoffRoute, Listener, LockReader, Node, NodeRegistry, NodeSettings, NodeState, NodeStatus,
    Observer, Op, Reason, Reply, Task, Vote,
};
use redlock_core::{Env, Redlock, Settings, Ttl, Waiting};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;

use crate::chance::{Chance, SimEntropy, Stream};
use crate::history::{Reach, Recorder, Remaining};
use crate::link::{CALL_DEADLINE, SimLink};
use crate::master::{KEY_PREFIX, Master};
use crate::network::Network;
use crate::plan::Plan;
use crate::time::SimClock;

pub struct Gateway {
    pub index: u8,
    /// The clock of the gateway's machine.
    pub clock: Arc<SimClock>,
    plan: Arc<Plan>,
    masters: Arc<[Arc<Master>]>,
    network: Arc<Network>,
    recorder: Arc<Recorder>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    process: Option<Process>,
    started: u16,
    barred: bool,
}

struct Process {
    redlock: Redlock,
    nodes: Vec<Arc<SimNode>>,
    requests: Vec<AbortHandle>,
    dead: Arc<AtomicBool>,
    since: Instant,
}

impl Gateway {
    /// A machine on which no process runs yet.
    pub fn new(
        index: u8,
        clock: Arc<SimClock>,
        plan: Arc<Plan>,
        masters: Arc<[Arc<Master>]>,
        network: Arc<Network>,
        recorder: Arc<Recorder>,
    ) -> Self {
        Self { index, clock, plan, masters, network, recorder, state: Mutex::default() }
    }

    /// Starts a process, unless one runs already or the gateway is barred.
    pub fn start(&self) {
        let mut state = self.state();
        if state.process.is_some() || state.barred {
            return;
        }
        state.started += 1;
        let stream = Stream::Gateway { index: self.index, process: state.started };
        let entropy = Arc::new(SimEntropy::new(Chance::new(self.plan.seed, stream)));
        let dead = Arc::new(AtomicBool::new(false));
        // The first process of every gateway runs with `--bootstrap`.
        let first = state.started == 1;
        let cluster_config = self.plan.cluster_config(&cluster_of(&self.masters));
        let observer = RecordingObserver {
            gateway: self.index,
            dead: dead.clone(),
            recorder: self.recorder.clone(),
        };
        let env = Env { clock: self.clock.clone(), entropy, observer: Arc::new(observer) };
        let quarantine = self.plan.node_settings().quarantine(self.plan.max_ttl);
        let node_registry = Arc::new(NodeRegistry::new(self.masters.len()));
        let node = |master: &Arc<Master>| {
            let name = node_name(master);
            let eligibility =
                Eligibility::new(cluster_config.identity(&name), quarantine, self.plan.skew)
                    .returning_after(self.plan.node_settings().returns_after())
                    .with_rules(self.plan.node_settings().bound_rules())
                    .expecting_bootstrap(first);
            let network = self.network.clone();
            let recorder = self.recorder.clone();
            let link = SimLink::new(
                self.index,
                master.clone(),
                network,
                recorder,
                self.plan.node_settings(),
            );
            let remote = self.plan.worker(
                &name,
                link.clone(),
                eligibility,
                (node_registry.clone(), env.clone()),
            );
            Arc::new(SimNode { remote, link, dead: dead.clone() })
        };
        let nodes: Vec<_> = self.masters.iter().map(node).collect();
        let all = nodes.iter().map(|node| node.clone() as Arc<dyn Node>).collect();
        let redlock =
            Redlock::new(all, self.plan.settings(), env).expect("the plan's settings are valid");
        state.process =
            Some(Process { redlock, nodes, requests: Vec::new(), dead, since: Instant::now() });
    }

    /// Kills the process. Returns false if no process runs.
    pub fn kill(&self) -> bool {
        let Some(process) = self.state().process.take() else { return false };
        // The process is marked dead first: the clean-up of dropped requests must not reach any
        // master.
        process.dead.store(true, Ordering::Relaxed);
        process.nodes.iter().for_each(|node| node.remote.abort());
        process.requests.iter().for_each(AbortHandle::abort);
        true
    }

    /// Kills the process and forbids another start until `unbar`. The next process then runs
    /// without `--bootstrap`, because only the first one has it.
    pub fn bar(&self) {
        self.kill();
        let mut state = self.state();
        (state.barred, state.started) = (true, state.started.max(1));
    }

    /// Allows the gateway to start again.
    pub fn unbar(&self) {
        self.state().barred = false;
    }

    /// Begins a request. Returns `None` if the gateway is down.
    pub fn request<T, F>(&self, work: impl FnOnce(Redlock) -> F) -> Option<JoinHandle<T>>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let mut state = self.state();
        let process = state.process.as_mut()?;
        let task = tokio::spawn(work(process.redlock.clone()));
        process.requests.retain(|request| !request.is_finished());
        process.requests.push(task.abort_handle());
        Some(task)
    }

    /// The core of the running process.
    pub fn redlock(&self) -> Option<Redlock> {
        Some(self.state().process.as_ref()?.redlock.clone())
    }

    /// The number of the running process, or of the last one if none runs.
    pub fn process(&self) -> u16 {
        self.state().started
    }

    /// Breaks the connection to a master. With `hints` the connection for hints breaks too.
    pub fn cut(&self, master: usize, hints: bool) {
        let place = self.masters.iter().position(|known| usize::from(known.index) == master);
        if let (Some(process), Some(place)) = (&self.state().process, place) {
            process.nodes[place].link.cut("connection reset", hints);
        }
    }

    /// How far the gateway's clock may be from true time, in microseconds.
    pub fn clock_limit(&self) -> u64 {
        self.plan.clock_limit()
    }

    /// The waiters that the gateway counts. `None` if the gateway is down.
    pub fn remaining(&self) -> Option<Remaining> {
        let Waiting { waiters, locks } = self.redlock()?.waiting();
        Some(Remaining { gateway: self.index, waiters, locks })
    }

    /// Whether the gateway lets the master vote and sees that the master has caught up. `None` if
    /// the gateway is down.
    pub fn has_caught_up(&self, master: usize) -> Option<bool> {
        let state = self.state();
        let status = state.process.as_ref()?.nodes[master].status();
        let admitted = status.borrow().state == NodeState::Admitted;
        Some(admitted)
    }

    /// The masters that the gateway lets vote now.
    pub fn reaches(&self, start: Instant) -> Vec<Reach> {
        let state = self.state();
        let Some(process) = &state.process else { return Vec::new() };
        let reach = |(node, master): (&Arc<SimNode>, &Arc<Master>)| {
            let started = process.since - start;
            let admitted = node.link.admitted_since()? - start;
            Some(Reach { gateway: self.index, master: master.index, started, admitted })
        };
        process.nodes.iter().zip(self.masters.iter()).filter_map(reach).collect()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name by which gateways know a master.
pub fn node_name(master: &Master) -> String {
    format!("n{}", master.index)
}

/// The name that a configuration gives to its set of nodes.
pub fn cluster_of(masters: &[Arc<Master>]) -> String {
    let names: Vec<String> = masters.iter().map(|master| node_name(master)).collect();
    ClusterConfig::cluster_of_nodes(names.iter().map(String::as_str))
}

/// A node of the core. It may outlive the gateway process that it belonged to.
struct SimNode {
    remote: RemoteNode,
    link: SimLink,
    dead: Arc<AtomicBool>,
}

impl SimNode {
    /// If the gateway's process is dead, answers the call here and returns `None`. The tasks of a
    /// dead process cannot be stopped, but they must reach no master. So each call gets an answer
    /// that leads to no further call.
    fn unless_dead(&self, reply: Reply) -> Option<Reply> {
        if self.dead.load(Ordering::Relaxed) {
            reply.send(Vote::Missing);
            return None;
        }
        Some(reply)
    }
}

impl Node for SimNode {
    fn name(&self) -> &str {
        self.remote.name()
    }

    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.remote.status()
    }

    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply) {
        if let Some(reply) = self.unless_dead(reply) {
            self.remote.submit(op, not_after, reply);
        }
    }

    fn submit_all(&self, tasks: Vec<Task>) {
        if self.dead.load(Ordering::Relaxed) {
            for Task { op, not_after, reply } in tasks {
                self.submit(op, not_after, reply);
            }
        } else {
            self.remote.submit_all(tasks);
        }
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.remote.listen(listener);
    }

    fn is_subscribed(&self) -> bool {
        self.remote.is_subscribed()
    }

    fn confirm_bootstrap(&self) {
        self.remote.confirm_bootstrap();
    }

    fn reader(&self) -> &dyn LockReader {
        self.remote.reader()
    }

    fn link(&self) -> Option<Arc<dyn Link>> {
        self.remote.link()
    }

    fn recovered(&self, marker: &str) {
        self.remote.recovered(marker);
    }
}

impl Plan {
    /// The configuration that markers name.
    pub fn cluster_config(&self, cluster: &str) -> ClusterConfig {
        let skew = if self.marker_names_skew { self.skew } else { Duration::ZERO };
        ClusterConfig::new(cluster, self.max_ttl, skew)
    }

    /// The settings that the gateway sends to masters.
    pub fn node_settings(&self) -> NodeSettings {
        let settings =
            NodeSettings::default().with_max_clock_skew(self.skew).with_rules(self.rules);
        self.fence_grace.map_or(settings, |grace| settings.with_fence_grace(grace))
    }

    fn worker(
        &self,
        name: &str,
        link: SimLink,
        eligibility: Eligibility,
        shared: (Arc<NodeRegistry>, Env),
    ) -> RemoteNode {
        let (node_registry, env) = shared;
        let settings = DriverSettings {
            call_deadline: CALL_DEADLINE,
            question_deadline: CALL_DEADLINE,
            max_clock_skew: self.skew,
            overlap_above: self.overlap_above,
            drift_factor: Settings::default().drift_factor,
            rules: self.rules,
            node_registry,
        };
        RemoteNode::start(name, Arc::new(link), eligibility, self.queue, settings, env)
    }

    fn settings(&self) -> Settings {
        Settings {
            key_prefix: KEY_PREFIX.into(),
            max_ttl: Ttl::from_duration(self.max_ttl).expect("whole milliseconds"),
            node_timeout: self.node_timeout,
            node: self.node_settings().with_rules(self.rules),
            ..Settings::default()
        }
    }
}

/// Passes the core's observations to the recorder.
struct RecordingObserver {
    gateway: u8,
    dead: Arc<AtomicBool>,
    recorder: Arc<Recorder>,
}

impl RecordingObserver {
    fn note(&self, text: String) {
        self.recorder.note(format!("g{}", self.gateway), text);
    }

    fn is_alive(&self) -> bool {
        !self.dead.load(Ordering::Relaxed)
    }
}

impl Observer for RecordingObserver {
    fn node_call(&self, _: &str, _: usize, _: Duration) {}
    fn clock_offset(&self, _: &str, _: i64) {}
    fn vote(&self, _: usize, vote: &Vote) {
        let Vote::Failed(failure) = vote else { return };
        match failure.reason {
            Reason::Overloaded => self.recorder.situation("overloaded"),
            Reason::Timeout => self.recorder.situation("timeouts"),
            Reason::Clock => self.recorder.situation("clock refusals"),
            Reason::Down | Reason::Quarantined | Reason::Refused | Reason::Error => {}
        }
    }

    fn node_status(&self, node: &str, status: &NodeStatus) {
        if !self.is_alive() {
            return;
        }
        let NodeStatus { state, detail, .. } = status;
        if status.clock_is_off {
            self.recorder.situation("clocks found off");
        }
        self.recorder
            .count(|counts| counts.quarantines += u64::from(*state == NodeState::Quarantined));
        self.recorder
            .note(format!("g{} of {node}", self.gateway), format!("{}: {detail}", state.as_str()));
    }

    fn handed_over(&self, kind: HandoffRoute) {
        if self.is_alive() {
            self.recorder.count(|counts| match kind {
                HandoffRoute::Local => counts.handed_locally += 1,
                HandoffRoute::Remote => counts.handed_remotely += 1,
            });
        }
    }

    fn release_abandoned(&self, node: usize) {
        if self.is_alive() {
            self.recorder.count(|counts| counts.abandoned += 1);
            self.note(format!("gives up a release on n{node}"));
        }
    }

    fn repaired(&self, node: usize) {
        if self.is_alive() {
            self.recorder.count(|counts| counts.repairs += 1);
            self.note(format!("has repaired a lock on n{node}"));
        }
    }
}
