//! Decides what the worker of a node does next. Events go in, actions come out, and one deadline
//! tells the worker when to call the driver without an event. The driver spawns nothing, awaits
//! nothing and knows no Redis client. So the same driver runs on a real master and in a simulation.
//!
//! ```text
//!         connect         probe, swap marker, probe, …         loaded
//! Paused ───────► Asking ─────────────────────────────► Loading ──────► Serving
//!    ▲              │ ▲                                    │               │
//!    │              ▼ │ every second, or on a report       │               │
//!    │           Quarantined                               │               │
//!    └──────────────┴───── any error, or ineligible ───────┴───────────────┘
//! ```
//!
//! A session that votes begins on a connection that was just opened, so the node's name led to this
//! process a moment ago. The session ends when the name leads to another process: two processes
//! under one name must not vote side by side.
//!
//! While a node does not serve, operations fail at once, as not sent. At the first error the driver
//! drops the connection, answers the calls under way with "unknown" and starts again. The driver's
//! knowledge of the node (which quarantine stands, and since when this gateway has seen it)
//! outlives connections.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::Task;
use super::calls::{Call, Calls, fail_all};
use super::clock_drift::{ClockDrift, RanAhead, Reading};
use super::eligibility::{
    EarlyEnd, Eligibility, Facts, Moment, NAME_IS_FOLLOWED_EVERY, NAME_IS_FOLLOWED_WITHIN,
    NextStep, Peers, Suspicion, admits_durable, incarnation_of,
};
use super::link::{Answer, LinkError, LinkErrorKind, MarkerSwap, ProbeReply, Swapped};
use super::node_registry::NodeRegistry;
use super::observer::Env;
use super::op::{Effect, Failure, Op, Reason, ReleaseScope, Vote};
use super::report::{Reporter, remedy_of_write_error};
use super::rules::SafetyRules;
use super::status::{Diagnosis, Engine, NodeState, NodeStatus, Remedy};
use crate::model::clock::lead_left;
use crate::model::types::FencingToken;

/// How often a serving node is probed, and an idle connection tested with a call. The Redis
/// client's own test of a connection does not fire while the socket's send buffer is full.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Backoff between two attempts to connect, doubled from the first value to the last.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// How soon an ineligible node is probed again.
const INELIGIBLE_PAUSE: Duration = Duration::from_secs(1);
/// How long a node whose clock ran ahead does not vote at first. In that time all other nodes'
/// clocks are read.
const COMPARE: Duration = Duration::from_millis(2_500);
/// A session that lasted this long was good: the next backoff starts small.
const GOOD_SESSION: Duration = Duration::from_secs(5);
/// How often a node in quarantine is probed. Another gateway may have admitted the node, or the
/// node may have lost its data again.
const POLL: Duration = Duration::from_secs(1);
/// How often a quarantined node that was declared new is probed. Another gateway that saw the node
/// lose its data replaces the marker; these probes notice that before the node is admitted.
const POLL_NEW: Duration = Duration::from_millis(250);
/// The limit of markers put in a row. If more were needed, other gateways or programs keep changing
/// the marker.
const MAX_PUTS: u32 = 8;

/// Limit on the remembered processes that voted before the latest voter. A name may lead back to
/// such a process.
const MAX_LEFT: usize = 8;

const _: () = assert!(
    BACKOFF.0.as_millis() < BACKOFF.1.as_millis() && POLL_NEW.as_millis() < POLL.as_millis()
);

/// The settings of a driver besides those of the eligibility.
#[derive(Debug, Clone)]
pub struct DriverSettings {
    /// A call that takes longer ends the session. This must be longer than rounds wait for a node.
    pub call_deadline: Duration,
    /// If connecting takes longer, or a request other than a call, the attempt or the session ends.
    /// One such request may need several round trips.
    pub question_deadline: Duration,
    /// A clock further than this from ours makes the node refuse our fencing tokens.
    pub max_clock_skew: Duration,
    /// A node whose quickest answer takes at least this long counts as far, and gets several calls
    /// at once.
    pub overlap_above: Duration,
    /// The fraction of elapsed time by which a node's clock may run ahead of ours.
    pub drift_factor: f64,
    /// Shared by the drivers of all masters.
    pub node_registry: Arc<NodeRegistry>,
    /// All rules are on, except in tests that switch one off.
    pub rules: SafetyRules,
}

/// An event on the connection, or a report from outside.
#[derive(Debug)]
pub(super) enum Event {
    /// The result of [`Action::Connect`].
    Connected(Result<(), LinkError>),
    /// The result of [`Action::Probe`].
    Probed(Result<ProbeReply, LinkError>),
    /// The result of [`Action::SwapMarker`].
    Swapped(Result<Swapped, LinkError>),
    /// The result of [`Action::Load`].
    Loaded(Result<Engine, LinkError>),
    /// The result of the oldest [`Action::Call`] under way.
    Answered(Result<Answer, LinkError>),
    /// The result of [`Action::Follow`].
    Followed(Result<ProbeReply, LinkError>),
    /// The connection has ended by itself, for this reason.
    Closed(String),
    /// Probes of all nodes confirmed that the cluster is brand-new, as an operator declared.
    BootstrapConfirmed,
    /// Recovery restored the node's lost locks while this marker stood.
    Recovered(String),
}

/// An action of the worker on the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    Connect,
    Probe,
    SwapMarker(MarkerSwap),
    Load {
        run_id: String,
        /// The part of the marker that every call names.
        incarnation: String,
    },
    /// Send the operations of [`Driver::newest_call`].
    Call,
    /// Resolve the name again: probe over a separate connection, which then ends. An earlier check
    /// that is still under way is overdue, and is dropped.
    Follow,
    /// Drop the connection, with everything under way on it.
    Disconnect,
}

enum Phase {
    /// No connection; the next attempt to connect is due at `until`.
    Paused {
        until: Instant,
    },
    /// One request is under way, and its result decides the next step. The result is overdue at
    /// `until`.
    Asking {
        until: Instant,
    },
    /// The script is being loaded; then the node votes.
    Loading {
        until: Instant,
        facts: Box<Facts>,
        marker: String,
        is_caught_up: bool,
    },
    /// Connected; the node is probed again at `until`.
    Quarantined {
        until: Instant,
    },
    Serving(Serving),
}

struct Serving {
    since: Instant,
    run_id: String,
    marker: String,
    /// When the name is resolved again. `following` is when the check under way began, if one is.
    follow: Instant,
    following: Option<Instant>,
    heartbeat: Instant,
    /// When a probe under way beside the calls is overdue.
    probe_until: Option<Instant>,
    /// The latest call whose number the process has stored. `None` before the first.
    kept: Option<Kept>,
    /// Whether calls are numbered: the process syncs every write.
    is_numbered: bool,
}

/// A call whose number the process has stored: the number, and when the answer came, on the
/// monotonic clock.
#[derive(Clone, Copy)]
struct Kept {
    number: u64,
    at: Duration,
}

/// The process that voted in the last session.
struct Earlier {
    run_id: String,
    /// The latest call whose number this process has stored.
    kept: Option<Kept>,
    /// The run_id of the newest process that was compared with this one. Each process is compared
    /// once.
    compared: String,
}

/// Why a session ended or could not begin.
enum Outage {
    Unreachable(String),
    /// The node's clock ran ahead of ours.
    RanAhead(RanAhead),
    Ineligible(Diagnosis),
}

impl From<LinkError> for Outage {
    fn from(error: LinkError) -> Self {
        match error.remedy {
            Some(_) => Self::Ineligible(error.into()),
            None => Self::Unreachable(error.detail),
        }
    }
}

pub(super) struct Driver {
    settings: DriverSettings,
    report: Reporter,
    eligibility: Eligibility,
    phase: Phase,
    actions: VecDeque<Action>,
    /// When the connection was opened. `is_fresh` is whether it was opened for the admission under
    /// way.
    connected: Instant,
    is_fresh: bool,
    /// The next backoff.
    backoff: Duration,
    /// The quarantine marker that was last reported.
    reported: Option<String>,
    /// The quarantine marker under which the node was recovered.
    recovered: Option<String>,
    /// The quarantine marker of a node that was confirmed as new. The confirmation survives a lost
    /// connection.
    bootstrap_confirmed: Option<String>,
    /// The number of markers put since the last quarantine or connection.
    puts: u32,
    calls: Calls,
    clock_drift: ClockDrift,
    /// When the probe under way was sent, on the monotonic clock.
    probe_sent: Duration,
    earlier: Option<Earlier>,
    /// The processes that voted before `earlier`, from the oldest to the latest.
    left: VecDeque<String>,
    /// The number of the last numbered call.
    number: u64,
    /// `Some` while the other nodes' clocks are read, after this node's clock ran ahead. The second
    /// value is the marker that stood then, if any.
    ran_ahead: Option<(RanAhead, Option<String>)>,
    /// How far our latest fencing token was ahead of our wall clock, in microseconds, and when its
    /// answer came.
    lead: (u64, Instant),
}

impl Driver {
    pub(super) fn new(
        name: Arc<str>,
        eligibility: Eligibility,
        settings: DriverSettings,
        env: Env,
        now: Instant,
    ) -> Self {
        let report = Reporter::new(name, settings.max_clock_skew, env);
        let calls = Calls::new(settings.overlap_above);
        let clock_drift = ClockDrift::new(settings.drift_factor, eligibility.max_ttl());
        Self {
            settings,
            report,
            eligibility,
            phase: Phase::Paused { until: now },
            actions: VecDeque::new(),
            connected: now,
            is_fresh: false,
            backoff: BACKOFF.0,
            reported: None,
            recovered: None,
            bootstrap_confirmed: None,
            puts: 0,
            calls,
            clock_drift,
            probe_sent: Duration::ZERO,
            earlier: None,
            left: VecDeque::new(),
            number: 0,
            ran_ahead: None,
            lead: (0, now),
        }
    }

    pub(super) fn status(&self) -> watch::Receiver<NodeStatus> {
        self.report.subscribe()
    }

    pub(super) fn next_action(&mut self) -> Option<Action> {
        let action = self.actions.pop_front();
        if action == Some(Action::Probe) {
            self.probe_sent = self.report.env.clock.monotonic();
        }
        action
    }

    /// When [`Driver::tick`] is due, if no event comes earlier.
    pub(super) fn deadline(&self) -> Instant {
        match &self.phase {
            Phase::Paused { until }
            | Phase::Asking { until }
            | Phase::Loading { until, .. }
            | Phase::Quarantined { until } => *until,
            Phase::Serving(Serving { heartbeat, follow, probe_until, .. }) => {
                let call = self.calls.oldest_sent().map(|at| at + self.settings.call_deadline);
                [*probe_until, call]
                    .into_iter()
                    .flatten()
                    .fold(*heartbeat.min(follow), Instant::min)
            }
        }
    }

    /// Whether an answer that the driver waits for is late.
    pub(super) fn is_overdue(&self, now: Instant) -> bool {
        match &self.phase {
            Phase::Paused { .. } | Phase::Quarantined { .. } => false,
            Phase::Asking { until } | Phase::Loading { until, .. } => *until <= now,
            Phase::Serving(serving) => {
                serving.probe_until.is_some_and(|until| until <= now) || self.call_is_late(now)
            }
        }
    }

    /// Does everything that is due.
    pub(super) fn tick(&mut self, now: Instant) {
        if now < self.deadline() {
            return;
        }
        if self.is_overdue(now) {
            return self.timed_out(now);
        }
        match &mut self.phase {
            Phase::Paused { .. } => self.ask(Action::Connect, now),
            Phase::Quarantined { .. } => self.ask(Action::Probe, now),
            Phase::Asking { .. } | Phase::Loading { .. } => {}
            Phase::Serving(serving) => {
                // The next check is counted from now: a machine that stood still does not make up
                // for missed checks.
                if serving.follow <= now {
                    serving.follow = now + NAME_IS_FOLLOWED_EVERY;
                    // A slow check goes on until its deadline; only then does another one replace
                    // it.
                    let is_late = serving
                        .following
                        .is_some_and(|since| since + self.settings.question_deadline <= now);
                    if self.settings.rules.name_is_followed
                        && (serving.following.is_none() || is_late)
                    {
                        serving.following = Some(now);
                        self.actions.push_back(Action::Follow);
                    }
                }
                if serving.heartbeat > now {
                    return;
                }
                serving.heartbeat = now + HEARTBEAT;
                if serving.probe_until.is_none() {
                    serving.probe_until = Some(now + self.settings.question_deadline);
                    self.actions.push_back(Action::Probe);
                }
                // The heartbeat detects a dead connection, a restart, a lost marker and refused
                // writes. Calls under way detect all these too. But only the heartbeat shows that
                // writes work again.
                if self.calls.is_idle() || self.report.refuses_writes() {
                    self.send(Vec::new(), now);
                }
            }
        }
    }

    pub(super) fn handle(&mut self, event: Event, now: Instant) {
        let outcome = match event {
            Event::Connected(Ok(())) => {
                self.puts = 0;
                self.connected = now;
                self.report.connected();
                self.ask(Action::Probe, now);
                Ok(())
            }
            Event::Probed(Ok(reply)) => self.probed(reply, now),
            Event::Swapped(Ok(Swapped::Done | Swapped::OtherMarker)) => {
                self.ask(Action::Probe, now);
                Ok(())
            }
            Event::Swapped(Ok(Swapped::OtherProcess)) => {
                Err(Outage::Unreachable("it was restarted just now".into()))
            }
            Event::Loaded(Ok(engine)) => {
                self.report.engine(engine);
                self.loaded(now);
                Ok(())
            }
            Event::Answered(answer) => self.answered(answer, now),
            Event::Followed(reply) => self.followed(reply, now),
            Event::Closed(why) => Err(Outage::Unreachable(why)),
            Event::BootstrapConfirmed => {
                // The confirmation counts also if it comes while the driver reconnects. The
                // confirmation applies only to the quarantine that was reported last.
                self.bootstrap_confirmed.clone_from(&self.reported);
                if let Phase::Quarantined { .. } = self.phase {
                    self.ask(Action::Probe, now);
                }
                Ok(())
            }
            Event::Recovered(marker) => {
                self.recovered = Some(marker);
                if let Phase::Quarantined { .. } = self.phase {
                    self.ask(Action::Probe, now);
                }
                Ok(())
            }
            Event::Connected(Err(error))
            | Event::Probed(Err(error))
            | Event::Swapped(Err(error))
            | Event::Loaded(Err(error)) => Err(error.into()),
        };
        if let Err(outage) = outcome {
            self.end_session(outage, now);
        }
    }

    fn ask(&mut self, action: Action, now: Instant) {
        self.actions.push_back(action);
        self.phase = Phase::Asking { until: now + self.settings.question_deadline };
    }

    fn probed(
        &mut self,
        ProbeReply { facts, marker, is_caught_up, number }: ProbeReply,
        now: Instant,
    ) -> Result<(), Outage> {
        self.report.memory(&facts, self.probe_sent);
        self.check_clock(&facts, marker.as_deref())?;
        self.settings.node_registry.note_probe(&self.report.name, |earlier| {
            self.eligibility.as_peer(&facts, marker.as_deref(), self.probe_sent, earlier)
        });
        if self.is_serving() {
            return self.probed_while_serving(&facts, marker.as_deref(), is_caught_up);
        }
        self.report.process(&facts);
        if !facts.run_id.is_empty()
            && let Err(other) = self.settings.node_registry.claim(&self.report.name, &facts.run_id)
        {
            let why = format!(
                "the process that answers here answers as {other} too; a quorum needs independent \
                 masters"
            );
            return Err(Outage::Ineligible(Diagnosis::new(why, Remedy::NameEachNodeOnce)));
        }
        let seen = Moment::of(self.report.env.clock.as_ref());
        self.compare_with_earlier(&facts, number);
        let incarnation = marker.as_deref().map(incarnation_of);
        let is_for = |stood: &Option<String>| {
            incarnation.is_some() && stood.as_deref().map(incarnation_of) == incarnation
        };
        let early = if is_for(&self.recovered) {
            Some(EarlyEnd::Recovered)
        } else {
            is_for(&self.bootstrap_confirmed).then_some(EarlyEnd::BrandNew)
        };
        let (peers, needed) = self.settings.node_registry.peers(&self.report.name);
        match self.eligibility.next_step(
            &facts,
            marker.as_deref(),
            seen,
            Peers { seen: &peers, needed },
            early,
            self.report.env.entropy.as_ref(),
        ) {
            NextStep::Refuse(diagnosis) => return Err(Outage::Ineligible(diagnosis)),
            NextStep::Put { from, to } => {
                self.puts += 1;
                if self.puts > MAX_PUTS {
                    let reason =
                        "its marker keeps changing: several gateways or programs disagree about it";
                    return Err(Outage::Ineligible(Diagnosis::new(reason, Remedy::ReadOtherLogs)));
                }
                self.ask(
                    Action::SwapMarker(MarkerSwap {
                        run_id: facts.run_id,
                        from,
                        to,
                        probed_micros: facts.time_micros,
                    }),
                    now,
                );
            }
            NextStep::Wait { until, diagnosis, suspicion } => {
                self.puts = 0;
                // The wait may be long. When it ends, the name may lead to another process.
                self.is_fresh = false;
                let left = until.saturating_sub(seen.monotonic);
                let is_other = self.reported.as_deref().map(incarnation_of) != incarnation;
                self.report.quarantined(
                    &diagnosis,
                    suspicion,
                    left,
                    marker.as_deref().unwrap_or_default(),
                    is_other,
                );
                self.reported = marker;
                let poll = if suspicion == Suspicion::New { POLL_NEW } else { POLL };
                self.phase = Phase::Quarantined {
                    until: now + left.min(poll).max(Duration::from_millis(1)),
                };
            }
            // The name may have moved during the wait. So the node is probed once more, on a new
            // connection.
            NextStep::Admit { .. }
                if !self.is_fresh && self.connected + NAME_IS_FOLLOWED_EVERY <= now =>
            {
                self.is_fresh = true;
                self.actions.push_back(Action::Disconnect);
                self.ask(Action::Connect, now);
            }
            NextStep::Admit { marker } => {
                self.actions.push_back(Action::Load {
                    run_id: facts.run_id.clone(),
                    incarnation: incarnation_of(&marker).to_owned(),
                });
                let until = now + self.settings.question_deadline;
                self.phase = Phase::Loading { until, facts: Box::new(facts), marker, is_caught_up };
            }
        }
        Ok(())
    }

    /// At the first probe of a process, compares it with the process that voted before.
    ///
    /// A process that syncs every write stores a number for each gateway, see
    /// [`Session::call`](super::link::Session::call). A new process that has only an earlier number
    /// lacks calls that were answered, and perhaps their grants. Either it loaded the append-only
    /// file too early, while the earlier process still ran. Or the file was cut, an older file was
    /// put in its place, or the disk did not keep what it had confirmed. If the calls were answered
    /// longer ago than a quarantine takes, their locks have ended.
    ///
    /// A process that voted before the earlier one lacks the grants of the earlier one.
    fn compare_with_earlier(&mut self, facts: &Facts, known: u64) {
        let Some(earlier) = &mut self.earlier else { return };
        if earlier.run_id == facts.run_id || earlier.compared == facts.run_id {
            return;
        }
        earlier.compared.clone_from(&facts.run_id);
        let (peers, _) = self.settings.node_registry.peers(&self.report.name);
        let full = self.eligibility.full_quarantine(Peers { seen: &peers, needed: 0 });
        let is_lost =
            |kept: &Kept| known < kept.number && self.probe_sent.saturating_sub(kept.at) < full;
        let lost = earlier.kept.filter(is_lost);
        let has_voted = self.left.contains(&facts.run_id);
        if (lost.is_some() || has_voted) && self.settings.rules.answered_calls_are_known {
            tracing::warn!(
                node = %self.report.name,
                answered = lost.map(|kept| kept.number),
                known,
                "the node's process lacks calls that another process has answered since"
            );
            self.eligibility.contest();
        }
    }

    /// Checks what may change during a session: eviction policy, evictions, role, durability.
    fn probed_while_serving(
        &mut self,
        facts: &Facts,
        marker: Option<&str>,
        is_caught_up: bool,
    ) -> Result<(), Outage> {
        let Phase::Serving(serving) = &mut self.phase else { return Ok(()) };
        serving.probe_until = None;
        self.report.evictions(facts.evicted_keys);
        let seen = Moment::of(self.report.env.clock.as_ref());
        let (peers, needed) = self.settings.node_registry.peers(&self.report.name);
        match self.eligibility.next_step(
            facts,
            marker,
            seen,
            Peers { seen: &peers, needed },
            None,
            self.report.env.entropy.as_ref(),
        ) {
            // An operator may have raised the bounds in the marker. The session goes on.
            NextStep::Admit { marker }
                if incarnation_of(&marker) == incarnation_of(&serving.marker) =>
            {
                if marker != serving.marker {
                    self.report.raised(&marker);
                    serving.marker = marker;
                }
                if is_caught_up {
                    self.report.caught_up();
                }
                Ok(())
            }
            NextStep::Refuse(diagnosis) => Err(Outage::Ineligible(diagnosis)),
            NextStep::Admit { .. } | NextStep::Put { .. } | NextStep::Wait { .. } => {
                Err(Outage::Unreachable("its state has changed: it is being probed again".into()))
            }
        }
    }

    /// Compares the node's clock with ours. Locks end by the node's clock: when it runs ahead,
    /// locks end early and may be lost. The node stops voting until the other clocks have been
    /// read, which shows whether our own clock ran slow.
    fn check_clock(&mut self, facts: &Facts, marker: Option<&str>) -> Result<(), Outage> {
        if facts.time_micros == 0 || !self.settings.rules.rate_is_checked {
            return Ok(());
        }
        let name = &self.report.name;
        let asked = self.probe_sent;
        let answered = self.report.env.clock.monotonic();
        let ran_ahead =
            self.clock_drift.read(Reading { asked, answered, node_micros: facts.time_micros });
        self.settings.node_registry.note_clock(name, answered, ran_ahead);
        if let Some((ran, stood)) = self.ran_ahead.take() {
            if self.settings.node_registry.ran_alike(name, ran) {
                self.report.our_clock_ran_slow(ran.by);
            } else {
                self.report.clock_ran_ahead(ran.by);
                self.eligibility.distrust(stood);
            }
        }
        match ran_ahead {
            Some(ran) => {
                self.clock_drift.reset();
                self.ran_ahead = Some((ran, marker.map(str::to_owned)));
                Err(Outage::RanAhead(ran))
            }
            None => Ok(()),
        }
    }

    /// Takes the answer to a check of where the node's name leads. A failed check does not end the
    /// session: a node that takes no more connections may still vote over the one that it has.
    fn followed(
        &mut self,
        reply: Result<ProbeReply, LinkError>,
        now: Instant,
    ) -> Result<(), Outage> {
        let Phase::Serving(serving) = &mut self.phase else { return Ok(()) };
        let took = serving.following.take().map(|since| now.saturating_duration_since(since));
        let Ok(ProbeReply { facts, .. }) = reply else { return Ok(()) };
        if let Some(took) = took.filter(|took| *took > NAME_IS_FOLLOWED_WITHIN) {
            self.report.followed_slowly(took);
        }
        if facts.run_id.is_empty() || facts.run_id == serving.run_id {
            return Ok(());
        }
        // The session's process still answers. Through another gateway it may still grant locks
        // that the new process lacks.
        if self.settings.rules.answered_calls_are_known {
            self.eligibility.contest();
        }
        Err(Outage::Unreachable("its name leads to another process now".into()))
    }

    fn loaded(&mut self, now: Instant) {
        let phase = std::mem::replace(&mut self.phase, Phase::Paused { until: now });
        let Phase::Loading { facts, marker, is_caught_up, .. } = phase else {
            unreachable!("only a requested script is loaded")
        };
        self.is_fresh = false;
        self.report.admitted(&facts, &marker, is_caught_up);
        self.left.retain(|run_id| *run_id != facts.run_id);
        let before = self.earlier.take_if(|earlier| earlier.run_id == facts.run_id);
        if let Some(earlier) = self.earlier.take() {
            self.left.push_back(earlier.run_id);
            if self.left.len() > MAX_LEFT {
                self.left.pop_front();
            }
        }
        self.phase = Phase::Serving(Serving {
            since: now,
            kept: before.and_then(|before| before.kept),
            is_numbered: admits_durable(&marker),
            run_id: facts.run_id,
            marker,
            follow: self.connected + NAME_IS_FOLLOWED_EVERY,
            following: None,
            heartbeat: now + HEARTBEAT,
            probe_until: None,
        });
        // This heartbeat measures the round trip before load could make the node look farther away.
        self.send(Vec::new(), now);
    }

    fn timed_out(&mut self, now: Instant) {
        let why = "no answer in time";
        if self.call_is_late(now)
            && let Some(call) = self.calls.take_answered()
        {
            if !call.tasks.is_empty() {
                let elapsed = now.saturating_duration_since(call.at);
                self.report.env.observer.node_call(&self.report.name, call.tasks.len(), elapsed);
            }
            fail_all(call.tasks, Reason::Timeout, Effect::Possible, why);
        }
        self.end_session(Outage::Unreachable(why.into()), now);
    }

    fn call_is_late(&self, now: Instant) -> bool {
        self.calls.oldest_sent().is_some_and(|at| at + self.settings.call_deadline <= now)
    }

    fn end_session(&mut self, outage: Outage, now: Instant) {
        self.is_fresh = false;
        self.calls.fail_all_lost();
        self.actions.clear();
        self.actions.push_back(Action::Disconnect);
        if let Phase::Serving(Serving { since, run_id, kept, .. }) = &self.phase {
            if now.saturating_duration_since(*since) >= GOOD_SESSION {
                self.backoff = BACKOFF.0;
            }
            self.earlier =
                Some(Earlier { run_id: run_id.clone(), kept: *kept, compared: String::new() });
        }
        let pause = match &outage {
            Outage::Unreachable(_) => {
                self.backoff.mul_f64(0.5 + 0.5 * self.report.env.entropy.unit())
            }
            Outage::RanAhead(_) => COMPARE,
            Outage::Ineligible(_) => INELIGIBLE_PAUSE,
        };
        self.backoff = (self.backoff * 2).min(BACKOFF.1);
        self.phase = Phase::Paused { until: now + pause };
        let (state, diagnosis) = match outage {
            Outage::Unreachable(why) => (NodeState::Connecting, Diagnosis::without_remedy(why)),
            Outage::RanAhead(ran) => {
                let ms = ran.by.as_millis();
                let seconds = (ran.to - ran.from).as_secs_f64();
                let why = format!(
                    "its clock ran {ms} ms ahead of ours in {seconds:.1} s: the other nodes' \
                     clocks are being read"
                );
                (NodeState::Connecting, Diagnosis::without_remedy(why))
            }
            Outage::Ineligible(diagnosis) => (NodeState::Refused, diagnosis),
        };
        self.report.cannot_vote(state, &diagnosis);
    }
}

/// Operations, from submission to vote.
impl Driver {
    pub(super) fn is_serving(&self) -> bool {
        matches!(self.phase, Phase::Serving(_))
    }

    /// Whether [`Driver::submit`] has room for more operations.
    pub(super) fn accepts(&self) -> bool {
        // Without a session operations fail at once, so there is always room.
        !self.is_serving() || self.calls.accepts()
    }

    /// How many operations wait to be sent.
    pub(super) fn waiting(&self) -> usize {
        self.calls.waiting()
    }

    /// Whether every submitted operation has its vote.
    pub(super) fn is_drained(&self) -> bool {
        self.calls.is_idle() && self.calls.waiting() == 0
    }

    /// Whether calls are under way.
    pub(super) fn has_calls(&self) -> bool {
        !self.calls.is_idle()
    }

    /// Takes operations. Without a session they fail at once, as not sent.
    pub(super) fn submit(&mut self, tasks: impl Iterator<Item = Task>) {
        if self.is_serving() {
            return self.calls.submit(tasks);
        }
        let status = self.report.status();
        let reason = match status.state {
            NodeState::Quarantined => Reason::Quarantined,
            NodeState::Refused => Reason::Refused,
            NodeState::Admitted | NodeState::CatchingUp | NodeState::Connecting => Reason::Down,
        };
        fail_all(tasks, reason, Effect::None, &status.detail);
    }

    /// Whether [`Driver::call`] has operations to send.
    pub(super) fn wants_call(&self) -> bool {
        self.calls.wants_call()
    }

    /// Sends the waiting operations that fit into one call.
    pub(super) fn call(&mut self, now: Instant) {
        let tasks = self.calls.take_next(now);
        if self.is_serving() && !tasks.is_empty() {
            self.send(tasks, now);
        }
    }

    /// The operations and the number of the latest [`Action::Call`].
    pub(super) fn newest_call(&self) -> (&[Task], u64) {
        self.calls.newest()
    }

    fn send(&mut self, tasks: Vec<Task>, now: Instant) {
        let is_numbered = matches!(&self.phase, Phase::Serving(Serving { is_numbered: true, .. }));
        self.number += u64::from(is_numbered);
        self.calls.sent(tasks, if is_numbered { self.number } else { 0 }, now);
        self.actions.push_back(Action::Call);
    }

    fn answered(&mut self, answer: Result<Answer, LinkError>, now: Instant) -> Result<(), Outage> {
        let Some(Call { tasks, number, at }) = self.calls.take_answered() else { return Ok(()) };
        let elapsed = now.saturating_duration_since(at);
        if !tasks.is_empty() {
            self.report.env.observer.node_call(&self.report.name, tasks.len(), elapsed);
        }
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return fail_call(tasks, error),
        };
        if answer.votes.len() != tasks.len() {
            let text =
                format!("{} votes in answer to {} operations", answer.votes.len(), tasks.len());
            fail_all(tasks, Reason::Error, Effect::Possible, &text);
            return Err(Outage::Unreachable(text));
        }
        self.calls.note_round_trip(elapsed);
        if let Phase::Serving(serving) = &mut self.phase
            && answer.is_number_kept
        {
            serving.kept = Some(Kept { number, at: self.report.env.clock.monotonic() });
        }
        if let Some(node_time) = answer.time_micros {
            // The node read its clock between our sending and now; the middle is the best guess.
            let ours = self.report.env.clock.wall_micros() as i64 - elapsed.as_micros() as i64 / 2;
            if let Some(t) = tasks.iter().rev().find_map(token_of_acquire) {
                // The limit keeps a step of our own clock from counting as a lead.
                let limit = self.settings.max_clock_skew.as_micros() as u64;
                self.lead = (t.get().saturating_sub(ours.unsigned_abs()).min(limit), now);
            }
            let (lead, since) = self.lead;
            self.report.clock_offset(
                node_time - ours,
                lead_left(lead, now.saturating_duration_since(since)),
            );
        }
        if tasks.is_empty() {
            self.report.writes(answer.write_error.as_deref());
        }
        let mut ineligible = (!answer.is_admitted)
            .then_some("its marker was lost or changed: it must be admitted again");
        for (task, vote) in tasks.into_iter().zip(answer.votes) {
            let vote = match ineligible.filter(|_| !answer.is_admitted) {
                Some(why) => without_marker(&task.op, vote, why),
                None => vote,
            };
            ineligible = ineligible.or(vote.each().iter().find_map(ineligible_by));
            // A later grant in the call does not prove that writes work. After a write that needs
            // no memory, Redis lets the script write on. Only the heartbeat proves that writes
            // work.
            for vote in vote.each() {
                if let Vote::Failed(Failure { reason: Reason::Error, detail, .. }) = vote
                    && remedy_of_write_error(detail).is_some()
                {
                    self.report.writes(Some(detail));
                }
            }
            task.reply.send(vote);
        }
        ineligible.map_or(Ok(()), |why| Err(Outage::Unreachable(why.into())))
    }
}

/// Answers the operations of a failed call with [`Vote::Failed`], and returns why the session ends.
fn fail_call(tasks: Vec<Task>, error: LinkError) -> Result<(), Outage> {
    let (reason, effect) = match error.kind {
        LinkErrorKind::Broken => (Reason::Down, Effect::Possible),
        LinkErrorKind::NoScript | LinkErrorKind::Refused => (Reason::Down, Effect::None),
        LinkErrorKind::Error => (Reason::Error, Effect::Possible),
    };
    fail_all(tasks, reason, effect, &error.detail);
    Err(error.into())
}

/// What the vote of a node without its marker is worth. Nobody knows which locks the node has lost, so
/// it cannot say that a lock was not there. But a lock that a release has deleted was there.
fn without_marker(op: &Op, vote: Vote, why: &'static str) -> Vote {
    match (op, vote) {
        // Nobody counts the votes on an undo.
        (Op::Release { scope: ReleaseScope::Proposal, .. }, vote) => vote,
        (Op::Release { .. }, Vote::Each(votes)) => {
            Vote::Each(votes.into_iter().map(|vote| without_marker(op, vote, why)).collect())
        }
        (Op::Release { .. }, Vote::Missing | Vote::Held(_)) => {
            Vote::Failed(Failure::found_nothing(why))
        }
        (Op::Inspect { .. }, _) => {
            Vote::Failed(Failure::new(Reason::Quarantined, Effect::None, why))
        }
        (_, vote) => vote,
    }
}

/// The fencing token of an acquire. The tokens of later acquires in a call are larger.
fn token_of_acquire(task: &Task) -> Option<FencingToken> {
    if let Op::Acquire { record, .. } = task.op.as_ref() { record.fencing() } else { None }
}

/// Why a node that votes like this must be probed again before it may go on voting.
fn ineligible_by(vote: &Vote) -> Option<&'static str> {
    match vote {
        Vote::Failed(Failure { reason: Reason::Error, detail, .. })
            if detail.starts_with("READONLY") =>
        {
            Some("it refuses writes: it has become a replica")
        }
        _ => None,
    }
}

mod tests;
