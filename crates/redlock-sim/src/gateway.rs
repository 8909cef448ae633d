//! A simulated gateway: a process with the real core in it, lanes to all masters, and requests under way.
//!
//! A gateway can die. Then its requests and lanes stop at once, nothing is cleaned up, and what was under way to masters
//! may still arrive. Its successor is a fresh core: an empty hybrid clock, admissions that have seen nothing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redlock_core::node::admission::{Admission, Generation, quarantine};
use redlock_core::node::{HandOver, Node, NodeSettings, NodeState, Observer, Rules, Vote};
use redlock_core::{Redlock, Seams, Settings, Ttl, Waiting};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;

use crate::chance::{Chance, SimEntropy, Stream};
use crate::history::{Reach, Recorder, Remaining};
use crate::lane::{LaneParts, SimLane};
use crate::master::{KEY_PREFIX, Master};
use crate::network::Network;
use crate::plan::Plan;
use crate::time::SimClock;

/// One gateway.
pub struct Gateway {
    /// Its number.
    pub index: u8,
    /// The clock of its machine.
    pub clock: Arc<SimClock>,
    plan: Arc<Plan>,
    masters: Arc<[Arc<Master>]>,
    network: Arc<Network>,
    recorder: Arc<Recorder>,
    slot: Mutex<Slot>,
}

#[derive(Default)]
struct Slot {
    process: Option<Process>,
    started: u16,
}

struct Process {
    redlock: Redlock,
    lanes: Vec<Arc<SimLane>>,
    requests: Vec<AbortHandle>,
    dead: Arc<AtomicBool>,
    since: Instant,
}

impl Gateway {
    /// A machine without a process yet.
    pub fn new(
        index: u8,
        clock: Arc<SimClock>,
        plan: Arc<Plan>,
        masters: Arc<[Arc<Master>]>,
        network: Arc<Network>,
        recorder: Arc<Recorder>,
    ) -> Self {
        Self { index, clock, plan, masters, network, recorder, slot: Mutex::default() }
    }

    /// Starts a process, unless one runs.
    pub fn start(&self) {
        let mut slot = self.slot();
        if slot.process.is_some() {
            return;
        }
        slot.started += 1;
        let stream = Stream::Gateway { index: self.index, process: slot.started };
        let entropy = Arc::new(SimEntropy::new(Chance::new(self.plan.seed, stream)));
        let dead = Arc::new(AtomicBool::new(false));
        // Every gateway's first process has the operator's word that the cluster is brand-new.
        let first = slot.started == 1;
        let names: Vec<String> = self.masters.iter().map(|master| format!("n{}", master.index)).collect();
        let cluster = Generation::cluster_of_nodes(names.iter().map(String::as_str));
        let generation = Generation::new(&cluster, self.plan.max_ttl);
        let lanes: Vec<_> = self
            .masters
            .iter()
            .map(|master| {
                let slot = generation.slot(&format!("n{}", master.index));
                let parts = LaneParts {
                    gateway: self.index,
                    master: master.clone(),
                    network: self.network.clone(),
                    admission: Admission::new(slot, self.plan.quarantine()).expecting_new(first),
                    clock: self.clock.clone(),
                    entropy: entropy.clone(),
                    window: self.plan.window,
                    recorder: self.recorder.clone(),
                };
                Arc::new(SimLane::start(parts, dead.clone()))
            })
            .collect();
        let nodes = lanes.iter().map(|lane| lane.clone() as Arc<dyn Node>).collect();
        let observer = Watch { gateway: self.index, dead: dead.clone(), recorder: self.recorder.clone() };
        let seams = Seams { clock: self.clock.clone(), entropy, observer: Arc::new(observer) };
        let redlock = Redlock::new(nodes, self.plan.settings(), seams).expect("the plan's settings are valid");
        slot.process = Some(Process { redlock, lanes, requests: Vec::new(), dead, since: Instant::now() });
    }

    /// Kills the process; false when there is none.
    pub fn kill(&self) -> bool {
        let Some(process) = self.slot().process.take() else { return false };
        // First of all: what the requests leave behind when they are dropped must not reach anybody.
        process.dead.store(true, Ordering::Relaxed);
        process.lanes.iter().for_each(|lane| lane.kill());
        process.requests.iter().for_each(AbortHandle::abort);
        true
    }

    /// Begins a request, unless the gateway is down.
    pub fn request<T, F>(&self, work: impl FnOnce(Redlock) -> F) -> Option<JoinHandle<T>>
    where
        T: Send + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        let mut slot = self.slot();
        let process = slot.process.as_mut()?;
        let task = tokio::spawn(work(process.redlock.clone()));
        process.requests.retain(|request| !request.is_finished());
        process.requests.push(task.abort_handle());
        Some(task)
    }

    /// The core of the running process.
    pub fn redlock(&self) -> Option<Redlock> {
        Some(self.slot().process.as_ref()?.redlock.clone())
    }

    /// Which process of the gateway runs, or ran last.
    pub fn process(&self) -> u16 {
        self.slot().started
    }

    /// Breaks the connection to a master, and if wanted the one for hints.
    pub fn cut(&self, master: usize, hints: bool) {
        if let Some(process) = &self.slot().process {
            process.lanes[master].cut("connection reset");
            if hints {
                process.lanes[master].deafen("connection reset");
            }
        }
    }

    /// Who waits at it; `None` when it is down.
    pub fn remaining(&self) -> Option<Remaining> {
        let Waiting { waiters, locks } = self.redlock()?.waiting();
        Some(Remaining { gateway: self.index, waiters, locks })
    }

    /// Whether the gateway lets a master vote; `None` when it is down.
    pub fn admits(&self, master: usize) -> Option<bool> {
        let slot = self.slot();
        let status = slot.process.as_ref()?.lanes[master].status();
        let admitted = status.borrow().state == NodeState::Admitted;
        Some(admitted)
    }

    /// The masters that it lets vote now.
    pub fn reaches(&self, start: Instant) -> Vec<Reach> {
        let slot = self.slot();
        let Some(process) = &slot.process else { return Vec::new() };
        let reach = |(lane, master): (&Arc<SimLane>, &Arc<Master>)| {
            let (started, admitted) = (process.since - start, lane.admitted_since()? - start);
            Some(Reach { gateway: self.index, master: master.index, started, admitted })
        };
        process.lanes.iter().zip(self.masters.iter()).filter_map(reach).collect()
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Plan {
    /// What masters are told.
    pub fn node_settings(&self) -> NodeSettings {
        NodeSettings { max_clock_offset: self.skew, rules: self.rules, ..NodeSettings::default() }
    }

    fn settings(&self) -> Settings {
        Settings {
            key_prefix: KEY_PREFIX.into(),
            max_ttl: Ttl::from_duration(self.max_ttl).expect("whole milliseconds"),
            node_timeout: self.node_timeout,
            max_clock_offset: self.skew,
            rules: self.rules,
            ..Settings::default()
        }
    }

    fn quarantine(&self) -> Duration {
        let Rules { quarantine_is_waited, .. } = self.rules;
        if quarantine_is_waited { quarantine(self.max_ttl, self.skew) } else { Duration::ZERO }
    }
}

/// What the core lets a gateway measure, as far as a history wants it.
struct Watch {
    gateway: u8,
    dead: Arc<AtomicBool>,
    recorder: Arc<Recorder>,
}

impl Watch {
    fn note(&self, text: String) {
        self.recorder.note(format!("g{}", self.gateway), text);
    }

    fn lives(&self) -> bool {
        !self.dead.load(Ordering::Relaxed)
    }
}

impl Observer for Watch {
    fn node_call(&self, _: &str, _: usize, _: Duration) {}
    fn clock_offset(&self, _: &str, _: i64) {}
    fn vote(&self, _: usize, _: &Vote) {}

    fn handed_over(&self, kind: HandOver) {
        if self.lives() {
            self.recorder.count(|counts| match kind {
                HandOver::Local => counts.handed_locally += 1,
                HandOver::Remote => counts.handed_remotely += 1,
            });
        }
    }

    fn release_abandoned(&self, node: usize) {
        if self.lives() {
            self.recorder.count(|counts| counts.abandoned += 1);
            self.note(format!("gives a release on n{node} up"));
        }
    }

    fn healed(&self, node: usize) {
        if self.lives() {
            self.recorder.count(|counts| counts.heals += 1);
            self.note(format!("has healed a lock on n{node}"));
        }
    }
}
