//! What was seen, as figures, and the table of them.

use std::fmt::{self, Display, Formatter};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::options::Options;
use super::waiter_load::Outcome;
use crate::grants::{Grant, Violations};
use crate::histogram::Histogram;
use crate::report::{Machine, millis, thousands};

/// Everything that the run is to show. Memory is resident memory of the gateway, in bytes.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    machine: Machine,
    waiters: u32,
    names: u32,
    wait_ms: u64,
    short_wait_ms: u64,
    ramp_ms: u64,
    /// Warm, with no connection but a few.
    pub(super) memory_before: u64,
    /// With all connections open and nobody waiting.
    pub(super) memory_idle: u64,
    pub(super) memory_waiting: u64,
    pub(super) memory_at_the_end: u64,
    pub(super) probe_idle: Latency,
    pub(super) probe_waiting: Latency,
    pub(super) service: Service,
    pub(super) disconnected: u64,
    pub(super) disconnects_noticed_ms: f64,
    pub(super) service_after_disconnects: Service,
    pub(super) lateness: Lateness,
    /// What must not be.
    pub(super) faults: Vec<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Latency {
    p50_ms: f64,
    p99_ms: f64,
    count: u64,
    failed: u64,
}

impl From<(Histogram, u64)> for Latency {
    fn from((latencies, failed): (Histogram, u64)) -> Self {
        let read = |share| latencies.percentile(share).map_or(0.0, millis);
        Self { p50_ms: read(0.5), p99_ms: read(0.99), count: latencies.total(), failed }
    }
}

impl Display for Latency {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} / {:.2}", self.p50_ms, self.p99_ms)?;
        if self.failed > 0 { write!(f, ", {} of {} failed", self.failed, self.count) } else { Ok(()) }
    }
}

/// How a crowd was served, from when the holders began to let go.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Service {
    granted: usize,
    pub(super) last_grant_ms: f64,
    /// Pairs of grants of one lock that overlap or whose fencing tokens do not rise.
    violations: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_violation: Option<String>,
    /// Grants that came before the grant of an earlier request for the same lock.
    overtakings: usize,
}

impl Service {
    pub(super) fn of(outcomes: &[Outcome], began: Instant) -> Self {
        let mut grants: Vec<(u64, Grant)> =
            outcomes.iter().filter_map(|outcome| Some((outcome.lock, *outcome.grant()?))).collect();
        grants.sort_unstable_by_key(|(lock, grant)| (*lock, grant.fencing_token));
        let last = grants.iter().map(|(_, grant)| grant.received).max();
        let mut service = Self {
            granted: grants.len(),
            last_grant_ms: last.map_or(0.0, |last| millis(last.saturating_duration_since(began))),
            ..Self::default()
        };
        for queue in grants.chunk_by(|one, next| one.0 == next.0) {
            let queue: Vec<_> = queue.iter().map(|(_, grant)| *grant).collect();
            let found = Violations::among(&queue);
            service.violations += found.count;
            service.first_violation = service.first_violation.or(found.first);
            service.overtakings += queue.windows(2).filter(|pair| pair[1].wanted < pair[0].wanted).count();
        }
        service
    }

    pub(super) fn fault(&self) -> Option<String> {
        let example = self.first_violation.as_ref()?;
        Some(format!("{} grants overlap or have fencing tokens that do not rise, first: {example}", self.violations))
    }
}

/// How long after the end of their time those were answered who got nothing.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Lateness {
    answered: usize,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    early: usize,
    earliest_ms: f64,
}

impl Lateness {
    pub(super) fn of(outcomes: &[Outcome], wait: Duration) -> Self {
        let (mut late, mut longest) = (Histogram::new(), Duration::ZERO);
        let (mut early, mut earliest) = (0, Duration::ZERO);
        for outcome in outcomes.iter().filter(|outcome| outcome.is_held()) {
            let took = outcome.received - outcome.sent;
            late.record(took.saturating_sub(wait));
            longest = longest.max(took.saturating_sub(wait));
            early += usize::from(took < wait);
            earliest = earliest.max(wait.saturating_sub(took));
        }
        // What a histogram reads back may exceed the longest.
        let read = |share| late.percentile(share).map_or(0.0, |latency| millis(latency.min(longest)));
        Self {
            answered: late.total() as usize,
            p50_ms: read(0.5),
            p99_ms: read(0.99),
            max_ms: millis(longest),
            early,
            earliest_ms: millis(earliest),
        }
    }
}

impl Report {
    pub(super) fn new(machine: Machine, options: &Options) -> Self {
        let &Options { waiters, names, wait_ms, short_wait_ms, ramp_ms, .. } = options;
        Self {
            machine,
            waiters,
            names,
            wait_ms,
            short_wait_ms,
            ramp_ms,
            memory_before: 0,
            memory_idle: 0,
            memory_waiting: 0,
            memory_at_the_end: 0,
            probe_idle: Latency::default(),
            probe_waiting: Latency::default(),
            service: Service::default(),
            disconnected: 0,
            disconnects_noticed_ms: 0.0,
            service_after_disconnects: Service::default(),
            lateness: Lateness::default(),
            faults: Vec::new(),
        }
    }

    pub(crate) fn verdict(&self) -> Result<(), String> {
        if self.faults.is_empty() { Ok(()) } else { Err(self.faults.join("; ")) }
    }

    pub(crate) fn bytes_per_idle_connection(&self) -> f64 {
        self.each(self.memory_idle, self.memory_before)
    }

    pub(crate) fn bytes_per_waiting_request(&self) -> f64 {
        self.each(self.memory_waiting, self.memory_idle)
    }

    /// `None` when fewer were waiting, or for another number of locks.
    pub(crate) fn probe_p99_ms_beside_ten_thousand(&self) -> Option<f64> {
        ((self.waiters, self.names) == (10_000, 1_000)).then_some(self.probe_waiting.p99_ms)
    }

    fn each(&self, more: u64, less: u64) -> f64 {
        (more as f64 - less as f64) / f64::from(self.waiters)
    }
}

/// The table and what has to be said about it, as Markdown.
impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mib = |bytes: u64| format!("{:.1}", bytes as f64 / 1_048_576.0);
        let (first, second, late) = (&self.service, &self.service_after_disconnects, &self.lateness);
        writeln!(f, "| figure | value |\n| --- | ---: |")?;
        let mut row = |figure: &str, value: String| writeln!(f, "| {figure} | {value} |");
        row("memory per idle connection, bytes", thousands(self.bytes_per_idle_connection()))?;
        row("memory per waiting request, bytes", thousands(self.bytes_per_waiting_request()))?;
        row(
            "RSS before / idle / waiting / at the end, MiB",
            [self.memory_before, self.memory_idle, self.memory_waiting, self.memory_at_the_end].map(mib).join(" / "),
        )?;
        row("probe while idle, p50 / p99 ms", self.probe_idle.to_string())?;
        row("probe while all wait, p50 / p99 ms", self.probe_waiting.to_string())?;
        row("served when holders let go", format!("{} within {:.2} s", first.granted, first.last_grant_ms / 1e3))?;
        row("disconnected, noticed", format!("{} within {:.0} ms", self.disconnected, self.disconnects_noticed_ms))?;
        row("the others served", format!("{} within {:.2} s", second.granted, second.last_grant_ms / 1e3))?;
        row("grants out of the order of requests", (first.overtakings + second.overtakings).to_string())?;
        row("grants that overlap", (first.violations + second.violations).to_string())?;
        row(
            "409 after the end of the wait, p50 / p99 / max ms",
            format!("{} at {:.1} / {:.1} / {:.1}", late.answered, late.p50_ms, late.p99_ms, late.max_ms),
        )?;
        row("409 before it", format!("{}, by up to {:.1} ms", late.early, late.earliest_ms))?;
        writeln!(
            f,
            "\n{}; masters, gateway and waiters on one machine. {} waiters at {} names, \
             wait_ms {} and {}, sent over {} ms.",
            self.machine, self.waiters, self.names, self.wait_ms, self.short_wait_ms, self.ramp_ms
        )?;
        for fault in &self.faults {
            writeln!(f, "\nFAULT: {fault}")?;
        }
        Ok(())
    }
}
