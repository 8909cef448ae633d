//! The metrics of a gateway, and the set-up of its log and traces. The handle of each metric is
//! made once. So a request only looks the handle up and adds to its value.
//!
//! No lock name, owner, token or raw path is ever a label. Each gateway has metrics of its own, so
//! one process can run several gateways, as tests do. Only the log is shared by the process.

mod connections;
mod describe;
mod groups;
mod history;
mod labels;
mod logging;
mod mentions;
mod traces;

use parking_lot::RwLock;
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use http::HeaderMap;
use metrics::{Counter, Gauge, Histogram, Label};
use metrics_exporter_prometheus::{
    Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder,
};
use redlock_core::node::{
    HandoffRoute, NodeMemory, NodeState, NodeStatus, Observer, Op, Reason, RoundTrace, Vote,
};
use redlock_core::{LockName, Waiting};

pub use self::connections::{ConnectionMetrics, ConnectionRefused, Flood};
use self::groups::{GroupSet, Groups};
use self::history::{Counts, History};
pub use self::history::{PERIOD as HISTORY_PERIOD, Sample};
use self::labels::{OPERATIONS, OUTCOMES, WAIT_ENDS, outcomes_of, vote_index, vote_words};
pub use self::labels::{Operation, OutcomeLabel, WaitEnd};
pub use self::logging::{FilterError, Log, check_filter, start_logging};
pub use self::mentions::Mentions;
pub use self::traces::{RequestSpan, TraceIds, Traces, TracesError};
use crate::overload::capacity::Capacity;
use crate::pattern::Group;

/// Buckets of durations, in seconds: 250 µs to 30 s.
const SECONDS: [f64; 16] = [
    0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
    30.0,
];
/// Buckets of waits, in seconds. Clients wait for up to 25 s.
const WAITS: [f64; 15] =
    [0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 25.0, 27.5, 30.0];
const BATCH: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];

/// Groups of files that the gateway reads again while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reloaded {
    AuthKeys,
    Tls,
    CallbackSecrets,
}

/// The state at the moment of a scrape.
pub struct Now {
    pub waiting: Waiting,
    pub kept_places: usize,
    pub listings: usize,
    pub event_streams: usize,
    /// How many event streams there may be, beside the requests that wait now.
    pub event_streams_limit: usize,
    pub deferred: usize,
    pub in_flight: usize,
    pub is_ready: bool,
    pub wall_micros: u64,
    pub clock_lead: Duration,
    /// Memory of a node that sets no maxmemory, in bytes.
    pub assumed_memory: u64,
    /// The largest part of its quota that a client uses.
    pub largest_quota_use: f64,
}

/// All metrics of one gateway.
pub struct Telemetry {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    process: metrics_process::Collector,
    http: RwLock<HashMap<RequestLabels, Histogram>>,
    nodes: Vec<NodeMetrics>,
    handles: Handles,
    groups: Groups,
    traces: Option<Traces>,
    history: History,
    pub connections: ConnectionMetrics,
    /// Failures of the audit log.
    pub audit_failures: Counter,
    /// Warnings of token watermarks that are out of reach.
    out_of_reach: Mentions,
}

/// Time between two warnings of the same kind, because any client may cause them.
const MENTION_INTERVAL: Duration = Duration::from_secs(10);

/// Labels of a request: method, route and status.
type RequestLabels = (&'static str, Cow<'static, str>, u16);

struct NodeMetrics {
    name: String,
    duration: Histogram,
    votes: Vec<Counter>,
    offset: Gauge,
    restarts: Counter,
    evicted: Gauge,
    used_memory: Gauge,
    max_memory: Gauge,
    quarantine: Gauge,
    repairs: Counter,
    states: Vec<(NodeState, Gauge)>,
    voting: Gauge,
    /// Warnings of releases that could not be delivered.
    abandoned: Mentions,
}

impl Telemetry {
    pub fn new(nodes: &[String]) -> Self {
        let recorder = PrometheusBuilder::new()
            .set_buckets(&SECONDS)
            .and_then(|builder| {
                builder.set_buckets_for_metric(
                    Matcher::Full("redlock_batch_operations".into()),
                    &BATCH,
                )
            })
            .and_then(|builder| {
                builder.set_buckets_for_metric(
                    Matcher::Suffix("_wait_duration_seconds".into()),
                    &WAITS,
                )
            })
            .expect("bucket lists are not empty")
            .build_recorder();
        let handle = recorder.handle();
        let (process, nodes, handles, connections, audit_failures) =
            metrics::with_local_recorder(&recorder, || {
                describe::describe();
                let process = metrics_process::Collector::default();
                process.describe();
                metrics::gauge!("redlock_build_info", "version" => env!("CARGO_PKG_VERSION"))
                    .set(1.0);
                let nodes = nodes.iter().map(|node| NodeMetrics::new(node)).collect();
                let audit_failures = metrics::counter!("redlock_audit_failures_total");
                (process, nodes, Handles::new(), ConnectionMetrics::new(), audit_failures)
            });
        Self {
            recorder,
            handle,
            process,
            http: RwLock::default(),
            nodes,
            handles,
            groups: Groups::default(),
            traces: None,
            history: History::since(Instant::now()),
            connections,
            audit_failures,
            out_of_reach: Mentions::every(MENTION_INTERVAL),
        }
    }

    /// Adds metrics for these groups of locks.
    pub fn with_groups(mut self, groups: &[Group]) -> Self {
        self.groups = metrics::with_local_recorder(&self.recorder, || Groups::new(groups));
        self
    }

    pub fn with_traces(self, traces: Option<Traces>) -> Self {
        Self { traces, ..self }
    }

    pub fn traces(&self) -> Option<&Traces> {
        self.traces.as_ref()
    }

    /// Starts the span of a request, if there are traces.
    pub fn request_span(
        &self,
        method: &'static str,
        route: &str,
        headers: &HeaderMap,
    ) -> Option<RequestSpan> {
        self.traces.as_ref().map(|traces| traces.request(method, route, headers))
    }

    /// The counters for operations on this lock.
    pub fn of(&self, name: &LockName) -> LockCounters<'_> {
        LockCounters { telemetry: self, groups: self.groups.of(name) }
    }

    /// Counts one attempt to send a callback.
    pub fn callback(&self, is_delivered: bool) {
        self.handles.callbacks[usize::from(is_delivered)].increment(1);
    }

    pub fn quota_exceeded(&self) {
        self.handles.quota_exceeded.increment(1);
    }

    pub fn quorum_failure(&self, operation: Operation, reason: Reason) {
        self.handles.quorum_failures[operation as usize][reason as usize].increment(1);
    }

    /// `route` is a pattern such as `/locks/{name}`, never a raw path.
    pub fn http(&self, method: &'static str, route: &str, status: u16, elapsed: Duration) {
        let known = self.http.read();
        if let Some(histogram) = known.get(&(method, Cow::Borrowed(route), status)) {
            histogram.record(elapsed);
            return;
        }
        drop(known);
        let labels = vec![
            Label::from_static_parts("http_request_method", method),
            Label::new("http_route", route.to_owned()),
            Label::new("http_response_status_code", status.to_string()),
        ];
        let histogram = metrics::with_local_recorder(&self.recorder, || {
            metrics::histogram!("http_server_request_duration_seconds", labels)
        });
        histogram.record(elapsed);
        let key = (method, Cow::Owned(route.to_owned()), status);
        self.http.write().insert(key, histogram);
    }

    /// Exports the limits as gauges, so that dashboards can compare them with the numbers in use.
    pub fn limits(&self, capacity: &Capacity, quorum: usize) {
        self.handles.in_flight_limit.set(capacity.in_flight as f64);
        self.handles.waiters_limit.set(capacity.waiters as f64);
        self.handles.quorum.set(quorum as f64);
    }

    /// The counter of failed reloads of these files.
    pub fn reload_failures(&self, what: Reloaded) -> Counter {
        self.handles.reload_failures[what as usize].clone()
    }

    /// The gauge with the expiry of the certificate in this file.
    pub fn certificate_expiry(&self, file: &Path) -> Gauge {
        let file = file.display().to_string();
        metrics::with_local_recorder(
            &self.recorder,
            || metrics::gauge!("redlock_certificate_expiry_timestamp_seconds", "file" => file),
        )
    }

    /// The gauge with the next expiry of an API key.
    pub fn key_expiry(&self) -> Gauge {
        self.handles.key_expiry.clone()
    }

    /// Exports the URL of this gateway, so that alerts can link to its documentation.
    pub fn public_url(&self, url: &str) {
        let url = url.to_owned();
        metrics::with_local_recorder(&self.recorder, || {
            metrics::gauge!("redlock_public_url_info", "url" => url).set(1.0)
        });
    }

    /// All metrics as Prometheus text, with the current state of gateway and nodes.
    pub fn render<'a>(
        &self,
        statuses: impl Iterator<Item = (&'a str, NodeStatus)>,
        now: &Now,
    ) -> String {
        self.handles.waiters.set(now.waiting.waiters as f64);
        self.handles.kept_places.set(now.kept_places as f64);
        self.handles.waiting_locks.set(now.waiting.locks as f64);
        self.handles.listings.set(now.listings as f64);
        self.handles.event_streams.set(now.event_streams as f64);
        self.handles.event_streams_limit.set(now.event_streams_limit as f64);
        self.handles.deferred.set(now.deferred as f64);
        self.handles.in_flight.set(now.in_flight as f64);
        self.handles.quota_use.set(now.largest_quota_use);
        self.handles.clock_lead.set(now.clock_lead.as_secs_f64());
        self.handles.ready.set(f64::from(u8::from(now.is_ready)));
        self.handles.log_lines_dropped.absolute(logging::dropped_lines());
        self.handles.operations.iter().flatten().flatten().for_each(ReadableCounter::export);
        self.handles.handed_over.iter().for_each(ReadableCounter::export);
        for (name, status) in statuses {
            let Some(node) = self.node(name) else { continue };
            for (state, gauge) in &node.states {
                gauge.set(f64::from(u8::from(*state == status.state)));
            }
            node.voting.set(f64::from(u8::from(status.votes())));
            node.restarts.absolute(status.restarts);
            node.evicted.set(status.evicted_keys as f64);
            if let Some(NodeMemory { used, max, .. }) = status.memory {
                node.used_memory.set(used as f64);
                node.max_memory.set(if max > 0 { max } else { now.assumed_memory } as f64);
            }
            let left = status.until_micros.map_or(0, |until| until.saturating_sub(now.wall_micros));
            node.quarantine.set(left as f64 / 1e6);
        }
        metrics::with_local_recorder(&self.recorder, || self.process.collect());
        self.handle.render()
    }

    /// Folds recorded values into buckets. Without this call, the histograms of a gateway that
    /// nobody scrapes would grow without end.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    /// Ends a sample of the history.
    pub fn sample(&self, waiting: usize) {
        self.history.sample(Instant::now(), self.handles.counts(), waiting);
    }

    /// The samples of the last five minutes, oldest first.
    pub fn history(&self) -> Vec<Sample> {
        self.history.samples()
    }

    fn node(&self, name: &str) -> Option<&NodeMetrics> {
        self.nodes.iter().find(|node| node.name == name)
    }
}

/// The counters for operations on one lock: those of all locks, and those of its groups.
#[derive(Clone, Copy)]
pub struct LockCounters<'a> {
    telemetry: &'a Telemetry,
    groups: GroupSet,
}

impl LockCounters<'_> {
    pub fn operation(self, operation: Operation, outcome: OutcomeLabel) {
        if let Some(counter) =
            &self.telemetry.handles.operations[operation as usize][outcome as usize]
        {
            counter.increment();
        }
        self.telemetry.groups.operation(self.groups, operation, outcome);
    }

    pub fn acquire(self, outcome: OutcomeLabel, elapsed: Duration) {
        self.operation(Operation::Acquire, outcome);
        if let Some(histogram) = &self.telemetry.handles.acquire[outcome as usize] {
            histogram.record(elapsed);
        }
    }

    /// Counts the end of a request that had `wait_ms`. `waited` is the whole duration of the
    /// request.
    pub fn waited(self, end: WaitEnd, waited: Duration) {
        self.telemetry.handles.waits[end as usize].record(waited);
        self.telemetry.groups.waited(self.groups, end, waited);
    }

    pub fn quorum_failure(self, operation: Operation, reason: Reason) {
        self.telemetry.quorum_failure(operation, reason);
    }
}

impl Observer for Telemetry {
    fn round(&self, op: &Op) -> Option<Box<dyn RoundTrace>> {
        self.traces.as_ref()?.round(op)
    }

    fn node_call(&self, node: &str, operations: usize, elapsed: Duration) {
        self.handles.batch.record(operations as f64);
        if let Some(node) = self.node(node) {
            node.duration.record(elapsed);
        }
    }

    fn clock_offset(&self, node: &str, offset_micros: i64) {
        if let Some(node) = self.node(node) {
            node.offset.set(offset_micros as f64 / 1e6);
        }
    }

    fn vote(&self, node: usize, vote: &Vote) {
        if let Some(counter) =
            self.nodes.get(node).and_then(|node| node.votes.get(vote_index(vote)))
        {
            counter.increment(1);
        }
    }

    fn release_abandoned(&self, node: usize) {
        self.handles.abandoned.increment(1);
        let Some(node) = self.nodes.get(node) else { return };
        if let Some(releases) = node.abandoned.count() {
            tracing::warn!(
                node = node.name,
                releases,
                "releases could not be delivered; the locks' TTLs bound what is left on that node"
            );
        }
    }

    fn fence_out_of_reach(&self, ahead: Duration) {
        self.handles.out_of_reach.increment(1);
        if let Some(refusals) = self.out_of_reach.count() {
            let ahead_ms = ahead.as_millis() as u64;
            tracing::warn!(
                ahead_ms,
                refusals,
                "a lock's token watermark is out of reach of this machine's clock: this clock is behind, or another was ahead"
            );
        }
    }

    fn repaired(&self, node: usize) {
        if let Some(node) = self.nodes.get(node) {
            node.repairs.increment(1);
        }
    }

    fn handed_over(&self, kind: HandoffRoute) {
        let at = match kind {
            HandoffRoute::Local => 0,
            HandoffRoute::Remote => 1,
        };
        self.handles.handed_over[at].increment();
    }
}

impl NodeMetrics {
    fn new(name: &str) -> Self {
        let node = || vec![Label::new("node", name.to_owned())];
        let with = |key: &'static str, value: &'static str| {
            vec![Label::new("node", name.to_owned()), Label::from_static_parts(key, value)]
        };
        Self {
            name: name.to_owned(),
            duration: metrics::histogram!("redlock_node_request_duration_seconds", node()),
            votes: vote_words()
                .map(|word| metrics::counter!("redlock_node_votes_total", with("vote", word)))
                .collect(),
            offset: metrics::gauge!("redlock_node_clock_offset_seconds", node()),
            restarts: metrics::counter!("redlock_node_restarts_total", node()),
            evicted: metrics::gauge!("redlock_node_evicted_keys", node()),
            used_memory: metrics::gauge!("redlock_node_used_memory_bytes", node()),
            max_memory: metrics::gauge!("redlock_node_max_memory_bytes", node()),
            quarantine: metrics::gauge!("redlock_node_quarantine_remaining_seconds", node()),
            repairs: metrics::counter!("redlock_node_repairs_total", node()),
            voting: metrics::gauge!("redlock_node_voting", node()),
            abandoned: Mentions::every(MENTION_INTERVAL),
            states: NodeState::ALL
                .map(|state| {
                    (state, metrics::gauge!("redlock_node_state", with("state", state.as_str())))
                })
                .into(),
        }
    }
}

/// A counter that the gateway itself reads, too. A [`Counter`] can only be added to, so it gets its
/// value at each scrape.
struct ReadableCounter {
    value: AtomicU64,
    exported: Counter,
}

impl From<Counter> for ReadableCounter {
    fn from(exported: Counter) -> Self {
        Self { value: AtomicU64::new(0), exported }
    }
}

impl ReadableCounter {
    fn increment(&self) {
        self.value.fetch_add(1, Ordering::Relaxed);
    }

    fn value(&self) -> u64 {
        self.value.load(Ordering::Relaxed)
    }

    fn export(&self) {
        self.exported.absolute(self.value());
    }
}

struct Handles {
    acquire: [Option<Histogram>; OUTCOMES.len()],
    operations: [[Option<ReadableCounter>; OUTCOMES.len()]; OPERATIONS.len()],
    quorum_failures: [[Counter; Reason::ALL.len()]; OPERATIONS.len()],
    batch: Histogram,
    abandoned: Counter,
    out_of_reach: Counter,
    quota_exceeded: Counter,
    quota_use: Gauge,
    key_expiry: Gauge,
    waits: [Histogram; WAIT_ENDS.len()],
    waiters: Gauge,
    kept_places: Gauge,
    waiting_locks: Gauge,
    listings: Gauge,
    event_streams: Gauge,
    event_streams_limit: Gauge,
    deferred: Gauge,
    callbacks: [Counter; 2],
    handed_over: [ReadableCounter; 2],
    in_flight: Gauge,
    in_flight_limit: Gauge,
    waiters_limit: Gauge,
    quorum: Gauge,
    ready: Gauge,
    clock_lead: Gauge,
    log_lines_dropped: Counter,
    reload_failures: [Counter; 3],
}

impl Handles {
    fn new() -> Self {
        let timed = [
            OutcomeLabel::Granted,
            OutcomeLabel::Held,
            OutcomeLabel::NoQuorum,
            OutcomeLabel::Cancelled,
        ];
        Self {
            acquire: OUTCOMES.map(|(outcome, word)| {
                let is_timed = timed.contains(&outcome);
                is_timed.then(|| metrics::histogram!("redlock_acquire_duration_seconds", "outcome" => word))
            }),
            operations: OPERATIONS.map(|(operation, name)| {
                let possible = outcomes_of(operation);
                OUTCOMES.map(|(outcome, word)| {
                    let counter =
                        || metrics::counter!("redlock_operations_total", "operation" => name, "outcome" => word);
                    possible.contains(&outcome).then(|| ReadableCounter::from(counter()))
                })
            }),
            quorum_failures: OPERATIONS.map(|(_, name)| {
                Reason::ALL.map(Reason::as_str).map(|reason| {
                    metrics::counter!("redlock_quorum_failures_total", "operation" => name, "reason" => reason)
                })
            }),
            batch: metrics::histogram!("redlock_batch_operations"),
            abandoned: metrics::counter!("redlock_releases_abandoned_total"),
            out_of_reach: metrics::counter!("redlock_fences_out_of_reach_total"),
            quota_exceeded: metrics::counter!("redlock_quota_exceeded_total"),
            quota_use: metrics::gauge!("redlock_quota_use_ratio"),
            key_expiry: metrics::gauge!("redlock_auth_key_expiry_timestamp_seconds"),
            waits: WAIT_ENDS.map(|(_, end)| metrics::histogram!("redlock_wait_duration_seconds", "outcome" => end)),
            waiters: metrics::gauge!("redlock_waiters"),
            kept_places: metrics::gauge!("redlock_kept_places"),
            waiting_locks: metrics::gauge!("redlock_waiting_locks"),
            listings: metrics::gauge!("redlock_listings"),
            event_streams: metrics::gauge!("redlock_event_streams"),
            event_streams_limit: metrics::gauge!("redlock_event_streams_limit"),
            deferred: metrics::gauge!("redlock_deferred_requests"),
            callbacks: ["failed", "delivered"]
                .map(|outcome| metrics::counter!("redlock_callbacks_total", "outcome" => outcome)),
            handed_over: ["local", "remote"]
                .map(|kind| metrics::counter!("redlock_handoffs_total", "kind" => kind).into()),
            in_flight: metrics::gauge!("redlock_requests_in_flight"),
            in_flight_limit: metrics::gauge!("redlock_requests_in_flight_limit"),
            waiters_limit: metrics::gauge!("redlock_waiters_limit"),
            quorum: metrics::gauge!("redlock_quorum"),
            ready: metrics::gauge!("redlock_ready"),
            clock_lead: metrics::gauge!("redlock_clock_lead_seconds"),
            log_lines_dropped: metrics::counter!("redlock_log_lines_dropped_total"),
            // In the order of `Reloaded`.
            reload_failures: ["auth_keys", "tls", "callback_secrets"]
                .map(|what| metrics::counter!("redlock_reload_failures_total", "what" => what)),
        }
    }

    /// What the history counts, since the start of the gateway.
    fn counts(&self) -> Counts {
        let acquires = &self.operations[Operation::Acquire as usize];
        let ended = |outcome: OutcomeLabel| {
            acquires[outcome as usize].as_ref().map_or(0, ReadableCounter::value)
        };
        // A cancelled acquire is not a refusal: its client went away.
        let refusals = [
            OutcomeLabel::Held,
            OutcomeLabel::NoQuorum,
            OutcomeLabel::Unknown,
            OutcomeLabel::Refused,
        ];
        Counts {
            grants: ended(OutcomeLabel::Granted),
            refusals: refusals.map(ended).iter().sum(),
            handoffs: self.handed_over.iter().map(ReadableCounter::value).sum(),
        }
    }
}
