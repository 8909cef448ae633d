//! Reports on a node for operators: its status, the log and measurements.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::eligibility::{ClusterConfig, Facts, Suspicion};
use super::observer::Env;
use super::status::{Diagnosis, Engine, NodeMemory, NodeState, NodeStatus, Remedy};

/// How often the log repeats a quarantine.
const LOG_EVERY: Duration = Duration::from_secs(60);
const CATCHING_UP: &str =
    "it votes, and locks that were granted while it was away are being set on it";

pub(super) struct Reporter {
    pub(super) name: Arc<str>,
    pub(super) env: Env,
    status: watch::Sender<NodeStatus>,
    /// A clock further than this from ours makes the node refuse our fencing tokens.
    max_clock_skew: Duration,
    run_id: Option<String>,
    /// When the log last reported the quarantine; `None` at first on each connection.
    logged_at: Option<Duration>,
    clock_is_far: bool,
    refuses_writes: bool,
    is_slow: bool,
}

impl Reporter {
    pub(super) fn new(name: Arc<str>, max_clock_skew: Duration, env: Env) -> Self {
        let first = NodeStatus::new(NodeState::Connecting, env.clock.wall_micros());
        let status = watch::Sender::new(NodeStatus {
            detail: "connecting for the first time".into(),
            ..first
        });
        let run_id = None;
        let logged_at = None;
        let clock_is_far = false;
        let refuses_writes = false;
        Self {
            name,
            env,
            status,
            max_clock_skew,
            run_id,
            logged_at,
            clock_is_far,
            refuses_writes,
            is_slow: false,
        }
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<NodeStatus> {
        self.status.subscribe()
    }

    pub(super) fn status(&self) -> watch::Ref<'_, NodeStatus> {
        self.status.borrow()
    }

    pub(super) fn connected(&mut self) {
        self.logged_at = None;
        self.is_slow = false;
    }

    pub(super) fn process(&mut self, facts: &Facts) {
        if facts.run_id.is_empty() {
            return;
        }
        if self.run_id.as_ref().is_some_and(|known| *known != facts.run_id) {
            tracing::warn!(node = %self.name, "node was restarted");
            self.status.send_modify(|status| status.restarts += 1);
        }
        self.run_id = Some(facts.run_id.clone());
    }

    pub(super) fn evictions(&self, evicted_keys: u64) {
        self.status.send_if_modified(|status| {
            std::mem::replace(&mut status.evicted_keys, evicted_keys) != evicted_keys
        });
    }

    /// Sets the memory use. `asked` is when the node was asked for it, on the monotonic clock. Does
    /// not wake watchers of the status.
    pub(super) fn memory(&self, facts: &Facts, asked: Duration) {
        let &Facts { used_memory: used, max_memory: max, .. } = facts;
        let memory = (used > 0).then_some(NodeMemory { used, max, asked });
        self.status.send_if_modified(|status| {
            status.memory = memory;
            false
        });
    }

    pub(super) fn admitted(&mut self, facts: &Facts, marker: &str, is_caught_up: bool) {
        self.refuses_writes = false;
        if is_caught_up {
            self.enter(NodeState::Admitted, &Diagnosis::default());
        } else {
            self.enter(
                NodeState::CatchingUp,
                &Diagnosis::new(CATCHING_UP, Remedy::WaitBeforeTheNext),
            );
        }
        self.status.send_modify(|status| {
            status.evicted_keys = facts.evicted_keys;
            marker.clone_into(&mut status.marker);
        });
        tracing::info!(
            node = %self.name, server = %facts.server, durability = %facts.durability,
            "node admitted"
        );
    }

    /// The same admission now has larger bounds in its marker.
    pub(super) fn raised(&self, marker: &str) {
        self.status.send_modify(|status| marker.clone_into(&mut status.marker));
        let max_ttl_ms = ClusterConfig::max_ttl_of(marker).unwrap_or_default().as_millis();
        tracing::info!(node = %self.name, max_ttl_ms, "the node's marker permits another max_ttl");
    }

    /// The node now has the locks that were granted while it was away.
    pub(super) fn caught_up(&self) {
        if self.status().state != NodeState::CatchingUp {
            return;
        }
        let now = self.env.clock.wall_micros();
        self.status.send_modify(|status| {
            (status.state, status.since_micros) = (NodeState::Admitted, now);
            if status.detail == CATCHING_UP {
                status.detail.clear();
                status.remedy = None;
            }
        });
        self.observe();
        tracing::info!(
            node = %self.name,
            "the node has caught up: the next master may be restarted"
        );
    }

    pub(super) fn engine(&self, engine: Engine) {
        self.status.send_if_modified(|status| status.engine.replace(engine) != Some(engine));
    }

    pub(super) fn cannot_vote(&self, state: NodeState, diagnosis: &Diagnosis) {
        if self.enter(state, diagnosis) {
            let why = &diagnosis.reason;
            let advice = diagnosis.remedy.map(tracing::field::display);
            tracing::warn!(
                node = %self.name, state = state.as_str(), why, advice,
                "node cannot vote"
            );
        }
    }

    /// `is_other` is whether this quarantine differs from the one reported last.
    pub(super) fn quarantined(
        &mut self,
        diagnosis: &Diagnosis,
        suspicion: Suspicion,
        left: Duration,
        marker: &str,
        is_other: bool,
    ) {
        let has_changed = is_other || self.status().state != NodeState::Quarantined;
        let now = self.env.clock.wall_micros();
        let until = now.saturating_add(left.as_micros() as u64);
        // All fields change in one step. A watcher such as the bootstrap must never see the number
        // of this probe together with the result of an earlier one.
        self.status.send_modify(|status| {
            status.probes += 1;
            if has_changed {
                status.enter(NodeState::Quarantined, diagnosis);
                marker.clone_into(&mut status.marker);
                status.since_micros = now;
                status.is_bootstrapping = suspicion == Suspicion::New;
            }
            // Another node's marker may have shown a larger bound meanwhile.
            if status.until_micros.is_none_or(|shown| shown.abs_diff(until) >= 1_000_000) {
                status.until_micros = Some(until);
            }
        });
        if has_changed {
            self.observe();
        }
        let now = self.env.clock.monotonic();
        if suspicion != Suspicion::New
            && self.logged_at.is_none_or(|at| now.saturating_sub(at) >= LOG_EVERY)
        {
            self.logged_at = Some(now);
            let seconds_left = left.as_secs();
            let why = &diagnosis.reason;
            let advice = diagnosis.remedy.map(tracing::field::display);
            tracing::warn!(node = %self.name, why, advice, seconds_left, "node in quarantine");
        }
    }

    pub(super) fn clock_ran_ahead(&self, by: Duration) {
        let node = &self.name;
        let ms = by.as_millis() as u64;
        tracing::warn!(
            %node, ms,
            "the node's clock ran ahead and ended locks early: the node is quarantined"
        );
    }

    /// Logged once for each connection.
    pub(super) fn followed_slowly(&mut self, took: Duration) {
        if !std::mem::replace(&mut self.is_slow, true) {
            let node = &self.name;
            let ms = took.as_millis() as u64;
            tracing::warn!(
                %node, ms,
                "a connection to the node takes long: a move of its name may be noticed too late"
            );
        }
    }

    pub(super) fn our_clock_ran_slow(&self, by: Duration) {
        let node = &self.name;
        let ms = by.as_millis() as u64;
        tracing::error!(
            %node, ms,
            "the clocks of all nodes ran ahead of this machine's by about as much: this machine's \
             clock ran slow; repair it"
        );
    }

    /// Whether the node refused the latest write.
    pub(super) fn refuses_writes(&self) -> bool {
        self.refuses_writes
    }

    /// Reports whether the node accepts writes. `error` is the error with which every write fails;
    /// `None` if writes work.
    pub(super) fn writes(&mut self, error: Option<&str>) {
        let refuses = error.is_some();
        if std::mem::replace(&mut self.refuses_writes, refuses) == refuses {
            return;
        }
        self.status.send_modify(|status| {
            status.refuses_writes = refuses;
            match error {
                Some(error) => {
                    status.detail = format!("it refuses writes: {error}");
                    status.remedy = remedy_of_write_error(error);
                }
                None if status.state == NodeState::CatchingUp => {
                    status.detail = CATCHING_UP.into();
                    status.remedy = Some(Remedy::WaitBeforeTheNext);
                }
                None => {
                    status.detail = String::new();
                    status.remedy = None;
                }
            }
        });
        self.observe();
        let node = &self.name;
        match error {
            Some(error) => {
                tracing::warn!(%node, error, "the node refuses writes and grants no locks")
            }
            None => tracing::info!(%node, "the node accepts writes again"),
        }
    }

    /// `lead_micros` is how far our fencing tokens are ahead of our wall clock. The node compares
    /// the tokens with its clock.
    pub(super) fn clock_offset(&mut self, offset_micros: i64, lead_micros: u64) {
        self.env.observer.clock_offset(&self.name, offset_micros);
        let max = self.max_clock_skew;
        let apart = Duration::from_micros(offset_micros.unsigned_abs());
        let from_tokens =
            Duration::from_micros((offset_micros - lead_micros as i64).unsigned_abs());
        let is_far = apart > max / 2;
        let is_off = apart.max(from_tokens) > max;
        let offset_ms = offset_micros / 1000;
        let lead_ms = lead_micros / 1000;
        if is_off != self.status().clock_is_off {
            self.status.send_modify(|status| {
                status.clock_is_off = is_off;
                let why = format!(
                    "its clock is {offset_ms} ms from this machine's, and fencing tokens are \
                     {lead_ms} ms ahead: it \
                     refuses all of them"
                );
                status.detail = if is_off { why } else { String::new() };
                status.remedy = is_off.then_some(Remedy::MendClock);
            });
            self.observe();
        }
        if std::mem::replace(&mut self.clock_is_far, is_far) != is_far {
            let node = &self.name;
            let max_ms = max.as_millis() as u64;
            if is_far {
                tracing::warn!(
                    %node, offset_ms, max_ms,
                    "the node's clock and this machine's are far apart: correct one of them"
                );
            } else {
                tracing::info!(%node, offset_ms, "the node's clock and this machine's agree again");
            }
        }
    }

    /// Enters a state. Returns whether state or reason changed.
    fn enter(&self, state: NodeState, diagnosis: &Diagnosis) -> bool {
        let now = self.env.clock.wall_micros();
        let has_changed = self.status.send_if_modified(|status| {
            let changed = status.state != state || status.detail != diagnosis.reason;
            if status.state != state {
                status.since_micros = now;
            }
            status.enter(state, diagnosis);
            changed
        });
        if has_changed {
            self.observe();
        }
        has_changed
    }

    fn observe(&self) {
        self.env.observer.node_status(&self.name, &self.status());
    }
}

/// The remedy for an error with which every write fails; `None` for any other error.
pub(super) fn remedy_of_write_error(error: &str) -> Option<Remedy> {
    match error.split_whitespace().next()? {
        "OOM" => Some(Remedy::RaiseMaxMemory),
        "MISCONF" => Some(Remedy::MendDisk),
        "NOREPLICAS" => Some(Remedy::WantNoReplicas),
        _ => None,
    }
}

/// When a worker ends, even by a panic, its node must not look admitted any longer.
impl Drop for Reporter {
    fn drop(&mut self) {
        self.enter(NodeState::Connecting, &Diagnosis::without_remedy("the node's task has ended"));
    }
}
