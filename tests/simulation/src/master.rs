//! A simulated master: a process with an identity and a data set. The process is up or down,
//! running or stopped.
//!
//! The data set is the core's own [`MemoryNode`]. A differential test compares it with the scripts
//! on a real server. This module adds everything else about a master: the run_id, the data that
//! survives a restart, the reported durability, and the messages that wait while the process is
//! stopped.
//!
//! Locks expire by the master's monotonic clock. A real server expires them by its wall clock, so a
//! forward jump of that clock ends locks early. Neither the promises nor the simulation cover such
//! a jump.

mod elsewhere;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use bytes::Bytes;
use redlock_core::clock::Clock;
use redlock_core::node::eligibility::{Durability, Facts, incarnation_of};
use redlock_core::node::link::{
    Answer, MarkerSwap, RecoveryAnswer, RecoveryBatch, Stored, Swapped,
};
use redlock_core::node::memory::{MemoryNode, Snapshot};
use redlock_core::node::{
    Effect, Failure, Hint, Keys, NodeSettings, Op, Reason, ReleaseScope, SafetyRules, Vote,
};
use redlock_core::types::LockName;
use tokio::sync::{mpsc, oneshot};

use crate::chance::Chance;
use crate::history::{Execution, Grant, Moment, OpKind, Recorder};
use crate::network::Connection;
use crate::seen::{grant_of, vote_kind};
use crate::time::SimClock;

/// Prefix of every lock name.
pub const KEY_PREFIX: &str = "lock:";

/// The number of slot 1 of the lock with slots. The numbers of its other slots follow. Other locks
/// have smaller numbers.
pub const FIRST_SLOT: u8 = 240;

/// The name of a lock, or of a slot, by its number.
pub fn lock_name(number: u8) -> LockName {
    let lock = number.min(FIRST_SLOT);
    let name = format!("lock-{lock}").parse::<LockName>().expect("letters and digits");
    name.of_slot(u16::from(number - lock) + 1)
}

pub fn lock_names(numbers: &[u8]) -> Vec<LockName> {
    numbers.iter().map(|number| lock_name(*number)).collect()
}

/// A gateway's request to a master.
#[derive(Debug, Clone)]
pub enum Question {
    /// Asks for the master's facts, its marker, and the number of this gateway's last call.
    Probe(u64),
    /// Replaces one marker with another.
    Swap(MarkerSwap),
    /// Asks for the stored locks.
    Stored,
    /// Sets recovered locks again.
    Recover(RecoveryBatch),
    /// Records that the master has caught up under this marker.
    CaughtUp(String),
    /// Lock operations, with the marker that admits the gateway and with the gateway's settings.
    /// All of them are one script call, so no other call runs between them. The master keeps the
    /// call's number for the gateway, unless it is 0.
    Call { marker: String, settings: NodeSettings, number: (u64, u64), ops: Vec<Arc<Op>> },
    /// Subscribes to hints.
    Listen(mpsc::UnboundedSender<Hint>),
}

/// A master's answer.
#[derive(Debug)]
pub enum Reply {
    /// Answers `Probe`. The flag says whether the master has caught up; the number is that of the
    /// gateway's last call.
    Seen(Facts, Option<String>, bool, u64),
    /// Answers `Swap`.
    Swapped(Swapped),
    /// Answers `Stored`.
    Stored(Vec<Stored>),
    /// Answers `Recover`.
    Recovered(Option<RecoveryAnswer>),
    /// Answers `CaughtUp`.
    Noted,
    /// Answers `Call`.
    Answer(Answer),
    /// Answers `Call` if another process of this master got it, which has not loaded the script.
    NoScript,
    /// Answers `Listen`: the subscription has begun.
    Listening,
}

/// A question that has arrived at the master.
pub struct Arrival {
    /// The connection on which the question came.
    pub connection: Arc<Connection>,
    pub question: Question,
    /// Where the answer goes.
    pub answer: oneshot::Sender<Reply>,
}

/// The data that a restarted process finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    All,
    /// The data of an old snapshot, or none if there is no snapshot.
    Snapshot,
    Nothing,
}

/// A simulated master: a process that ends and starts again, around data that may survive it.
pub struct Master {
    pub index: u8,
    pub clock: Arc<SimClock>,
    memory: MemoryNode,
    settings: NodeSettings,
    marker_is_checked: bool,
    recorder: Arc<Recorder>,
    process: Mutex<Process>,
}

struct Process {
    run: u64,
    up: bool,
    stopped: bool,
    durable: bool,
    backlog: Vec<Arrival>,
    snapshot: Option<Snapshot>,
    /// The master is a replica, which refuses writes.
    is_replica: bool,
    was_replica: bool,
    promotions: u64,
    /// The process that had the name before. Connections to it are still open.
    former: Option<Former>,
    connections: Vec<Weak<Connection>>,
    listeners: Vec<(Weak<Connection>, mpsc::UnboundedSender<Hint>)>,
}

#[derive(Clone)]
struct Former {
    run: u64,
    durable: bool,
    memory: Arc<MemoryNode>,
}

impl Master {
    /// A new master.
    pub fn new(
        index: u8,
        clock: Arc<SimClock>,
        (settings, rules): (NodeSettings, SafetyRules),
        durable: bool,
        recorder: Arc<Recorder>,
    ) -> Self {
        let marker_is_checked = rules.marker_is_checked;
        let settings = settings.with_rules(rules);
        let memory = MemoryNode::new(format!("n{index}"), clock.clone(), settings);
        memory.wipe();
        let process = Process {
            run: 1,
            up: true,
            stopped: false,
            durable,
            backlog: Vec::new(),
            snapshot: None,
            is_replica: false,
            was_replica: false,
            promotions: 0,
            former: None,
            connections: Vec::new(),
            listeners: Vec::new(),
        };
        Self {
            index,
            clock,
            memory,
            settings,
            marker_is_checked,
            recorder,
            process: Mutex::new(process),
        }
    }

    /// The process that would accept a connection now. `None` if the master is down.
    pub fn listening(&self) -> Option<u64> {
        let process = self.process();
        process.up.then_some(process.run)
    }

    /// Whether the master syncs every write to disk.
    pub fn is_durable(&self) -> bool {
        self.process().durable
    }

    /// Registers a connection. The end of the process breaks it.
    pub fn accept(&self, connection: &Arc<Connection>) {
        let mut process = self.process();
        process.connections.retain(|known| known.strong_count() > 0);
        process.connections.push(Arc::downgrade(connection));
    }

    /// A question arrives. The master answers it now, later when a stopped process continues, or
    /// never.
    pub fn arrive(&self, arrival: Arrival) {
        let mut process = self.process();
        if !process.up {
            return;
        }
        if let Some(former) =
            process.former.clone().filter(|former| former.run == arrival.connection.run)
        {
            drop(process);
            return self.serve(arrival, former.run, &former.memory);
        }
        if process.run != arrival.connection.run {
            // The connection led to a process that has ended. A party in between, such as a proxy
            // or the client's own reconnect, has led the message to the new process.
            drop(process);
            if matches!(arrival.question, Question::Call { .. }) {
                arrival.connection.answer(Reply::NoScript, arrival.answer);
            }
            return;
        }
        if process.stopped {
            process.backlog.push(arrival);
            return;
        }
        let run = process.run;
        drop(process);
        self.serve(arrival, run, &self.memory);
    }

    /// SIGSTOP: the process stops, and messages wait.
    pub fn stop(&self) {
        self.process().stopped = true;
    }

    /// SIGCONT: the process serves all messages that have arrived. Messages of one connection keep
    /// their order; the order between connections is random.
    pub fn go_on(&self, chance: &mut Chance) {
        let mut process = self.process();
        process.stopped = false;
        let run = process.run;
        let mut queues: BTreeMap<u64, Vec<Arrival>> = BTreeMap::new();
        for arrival in process.backlog.drain(..) {
            queues.entry(arrival.connection.id).or_default().push(arrival);
        }
        drop(process);
        let mut queues: Vec<_> = queues.into_values().map(Vec::into_iter).collect();
        while !queues.is_empty() {
            let turn = chance.below(queues.len() as u64) as usize;
            match queues[turn].next() {
                Some(arrival) => self.serve(arrival, run, &self.memory),
                None => drop(queues.swap_remove(turn)),
            }
        }
    }

    /// kill -9: the process ends. Each gateway notices after its own delay.
    pub fn crash(&self, chance: &mut Chance) {
        let mut process = self.process();
        (process.up, process.stopped, process.former) = (false, false, None);
        process.backlog.clear();
        process.listeners.clear();
        let connections = std::mem::take(&mut process.connections);
        drop(process);
        for connection in connections.iter().filter_map(Weak::upgrade) {
            let notice = chance.millis(1, 60);
            tokio::spawn(async move {
                tokio::time::sleep(notice).await;
                connection.end("the connection was closed by the node");
            });
        }
    }

    /// Starts a process, unless one runs already. If the last process synced every write, no data
    /// is lost, whatever `left` asks for.
    pub fn start(&self, left: Left, durable: bool) -> Option<(Left, bool)> {
        let mut process = self.process();
        if process.up {
            return None;
        }
        let left = if process.durable { Left::All } else { left };
        // A process syncs every write only if its data is that of the last such process. An
        // operator could switch the append-only file off and on again and so restore an old file.
        // That is like restoring a backup, which no gateway can detect, so it is left out.
        let durable = durable && left != Left::Snapshot;
        match (left, process.snapshot.clone()) {
            (Left::All, _) => {}
            (Left::Snapshot, Some(snapshot)) => self.memory.restore(snapshot),
            (Left::Snapshot | Left::Nothing, _) => self.memory.wipe(),
        }
        if left != Left::All {
            self.recorder.loss(self.index);
        }
        process.run += 1;
        (process.is_replica, process.was_replica) = (false, false);
        (process.up, process.durable) = (true, durable);
        Some((left, durable))
    }

    /// The marker that stands.
    pub fn marker(&self) -> Option<String> {
        self.memory.marker()
    }

    /// All data that the master stores now.
    pub fn data(&self) -> Snapshot {
        self.memory.snapshot()
    }

    /// FLUSHALL: the master loses its data in place.
    pub fn flush(&self) {
        self.recorder.loss(self.index);
        self.memory.wipe();
    }

    /// Takes a snapshot, which a later restart may find.
    pub fn save(&self) {
        self.process().snapshot = Some(self.memory.snapshot());
    }

    /// The lock stored under a name.
    pub fn stored(&self, name: u8) -> Option<(Grant, Duration)> {
        match self.memory.run(&Op::Inspect { keys: Keys::new(KEY_PREFIX, &lock_name(name)) }) {
            Vote::Found(holding) => {
                Some((grant_of(&holding.record)?, holding.expires_in.unwrap_or_default()))
            }
            _ => None,
        }
    }

    fn serve(&self, arrival: Arrival, run: u64, memory: &MemoryNode) {
        let reply = match &arrival.question {
            Question::Probe(gateway) => Reply::Seen(
                self.facts(run),
                memory.marker(),
                memory.is_caught_up(),
                memory.number(*gateway),
            ),
            Question::Swap(MarkerSwap { run_id, from, to, probed_micros }) => {
                let late =
                    *probed_micros != 0 && self.clock.wall_micros() > probed_micros + 10_000_000;
                Reply::Swapped(if *run_id != run_id_of(self.index, run) {
                    Swapped::OtherProcess
                } else if !late && memory.swap_marker(from.as_deref(), to) {
                    Swapped::Done
                } else {
                    Swapped::OtherMarker
                })
            }
            Question::Stored => Reply::Stored(memory.stored(KEY_PREFIX)),
            Question::Recover(recovery) => {
                let recovered = memory.recover(KEY_PREFIX, recovery);
                if recovered == Some(RecoveryAnswer::Done) {
                    self.recorder.situation("recoveries");
                }
                Reply::Recovered(recovered)
            }
            Question::CaughtUp(marker) => {
                memory.mark_caught_up(marker);
                Reply::Noted
            }
            Question::Call { marker, settings, number: (gateway, number), ops } => {
                let stands = memory.marker();
                let is_admitted = !self.marker_is_checked
                    || stands.as_deref().map(incarnation_of) == Some(incarnation_of(marker));
                let time_micros = Some(self.clock.wall_micros() as i64);
                let settings = settings.with_rules(self.settings.rules());
                let run = |op: &Arc<Op>| {
                    self.execute(memory, (marker, &settings), op, &arrival.connection)
                };
                let votes: Vec<_> = ops.iter().map(run).collect();
                let is_yes = ops.is_empty() || votes.iter().any(Vote::is_yes);
                let is_number_kept = is_admitted
                    && *number > 0
                    && is_yes
                    && !memory.is_full()
                    && !self.process().is_replica;
                if is_number_kept {
                    memory.keep_number(*gateway, *number);
                }
                let write_error =
                    (ops.is_empty() && memory.is_full()).then(|| "OOM no memory left".to_owned());
                Reply::Answer(Answer {
                    votes,
                    time_micros,
                    is_admitted,
                    is_number_kept,
                    write_error,
                })
            }
            Question::Listen(listener) => {
                self.process()
                    .listeners
                    .push((Arc::downgrade(&arrival.connection), listener.clone()));
                Reply::Listening
            }
        };
        arrival.connection.answer(reply, arrival.answer);
    }

    fn execute(
        &self,
        memory: &MemoryNode,
        (marker, settings): (&str, &NodeSettings),
        op: &Op,
        connection: &Connection,
    ) -> Vote {
        let writes = !matches!(op, Op::Inspect { .. });
        let vote = if writes && self.process().is_replica {
            self.recorder.situation("READONLY");
            let detail = "READONLY You can't write against a read only replica.".into();
            Vote::Failed(Failure { reason: Reason::Error, effect: Effect::Possible, detail })
        } else {
            memory.run_with(marker, settings, op)
        };
        let is_full =
            |vote: &Vote| matches!(vote, Vote::Failed(it) if it.detail.starts_with("OOM"));
        if vote.each().iter().any(is_full) {
            self.recorder.situation("out of memory");
        }
        if let Some(hint) = op.hint_for(&vote) {
            self.publish(hint);
        }
        let (kind, keys, record) = match op {
            Op::Acquire { keys, record, .. } => (OpKind::Acquire, keys, Some(record)),
            Op::Repair { keys, record, .. } => (OpKind::Repair, keys, Some(record)),
            Op::Extend { keys, record, .. } => (OpKind::Extend, keys, Some(record)),
            Op::Release { keys, record, scope, .. } => (
                match scope {
                    ReleaseScope::Holder | ReleaseScope::HolderKeeping { .. } => OpKind::Release,
                    ReleaseScope::Grant | ReleaseScope::Proposal => OpKind::Undo,
                },
                keys,
                Some(record),
            ),
            Op::Inspect { keys } => (OpKind::Inspect, keys, None),
        };
        let grant = record.and_then(grant_of);
        let now = self.clock.wall_micros() as i64;
        for (at, keys) in keys.each().enumerate() {
            let of_lock = vote.each().get(at).unwrap_or(&vote);
            self.recorder.execution(Execution {
                moment: Moment::default(),
                master: self.index,
                gateway: connection.gateway,
                late: connection.has_ended(),
                name: name_of(&keys.lock),
                kind,
                grant,
                ahead_micros: grant.map_or(0, |grant| grant.fencing as i64 - now),
                vote_kind: vote_kind(of_lock),
            });
        }
        vote
    }

    fn publish(&self, hint: &Hint) {
        let mut process = self.process();
        process
            .listeners
            .retain(|(connection, _)| connection.upgrade().is_some_and(|open| !open.has_ended()));
        for (connection, listener) in &process.listeners {
            if let Some(connection) = connection.upgrade() {
                let sent = connection.publish(hint.clone(), listener.clone());
                self.recorder.count(|counts| {
                    counts.hints_sent += 1;
                    counts.hints_lost += u64::from(!sent);
                });
            }
        }
    }

    fn facts(&self, run: u64) -> Facts {
        let process = self.process();
        let former = process.former.as_ref().filter(|former| former.run == run);
        let durable = former.map_or(process.durable, |former| former.durable);
        let durability =
            if durable { Durability::Durable } else { Durability::Volatile("appendonly no") };
        Facts {
            run_id: run_id_of(self.index, run),
            version: "7.4.0".into(),
            server: "Redis 7.4.0".into(),
            role: if process.is_replica { "slave" } else { "master" }.into(),
            policy: "noeviction".into(),
            evicted_keys: 0,
            durability,
            rewritten: false,
            was_replica: process.was_replica,
            time_micros: self.clock.wall_micros(),
            used_memory: 0,
            max_memory: 0,
            cluster_slots: None,
            // The first part of the ID is the one that gateways compare.
            replication_id: format!("{:08x}", run << 8 | process.promotions),
        }
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn run_id_of(index: u8, run: u64) -> String {
    format!("{index:020x}{run:020x}")
}

fn name_of(key: &Bytes) -> u8 {
    let text = key.strip_prefix(b"lock:lock-").and_then(|text| std::str::from_utf8(text).ok());
    let number = text.and_then(|text| {
        let (digits, slot) = text.split_once('#').unwrap_or((text, "1"));
        Some(digits.parse::<u8>().ok()? + slot.parse::<u8>().ok()? - 1)
    });
    number.unwrap_or(u8::MAX)
}
