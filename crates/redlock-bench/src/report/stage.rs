//! One workload: its contenders, their rounds, and the table of their medians with ratios within the run.

use std::fmt::{self, Formatter, Write};

use serde::{Deserialize, Serialize};

use super::figures::{Figures, Latency};
use super::noise::noise;
use super::stats::{median, spread, thousands};
use super::table::{NOTHING, Table};
use crate::contenders::Contender;
use crate::workload::Workload;

const TITLES: [&str; 17] = [
    "contender",
    "requests/s",
    "÷ floor",
    "÷ fred fenced",
    "÷ its twin",
    "its CPU µs/request",
    "Redis CPU µs/request (sum of 5)",
    "load CPU µs/request",
    "operations/call",
    "acquire p50 / p99 / p99.9 ms",
    "acquire p99 ÷ its twin",
    "acquire p50 ÷ round trip",
    "extend p50 / p99 / p99.9 ms",
    "release p50 / p99 / p99.9 ms",
    "409",
    "RSS now / max MiB",
    "spread",
];

/// All measurements of one workload.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct StageReport {
    pub(crate) workload: Workload,
    pub(crate) connections: u32,
    pub(crate) load_threads: u32,
    /// To the last master and back, the median of what it was before each round; `None` where nothing is delayed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) round_trip_us: Option<f64>,
    pub(crate) contenders: Vec<Entry>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) contender: Contender,
    pub(crate) rounds: Vec<Figures>,
    /// Its turns as the workload's twin, one next to each of the rounds; empty when the workload has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) twin: Vec<Figures>,
    /// Turns that ended without figures.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) failures: Vec<String>,
}

impl Entry {
    pub(crate) fn new(contender: Contender) -> Self {
        Self { contender, rounds: Vec::new(), twin: Vec::new(), failures: Vec::new() }
    }

    /// `None` when no round has the figure.
    pub(crate) fn median(&self, figure: impl Fn(&Figures) -> Option<f64>) -> Option<f64> {
        let values: Vec<_> = self.rounds.iter().filter_map(figure).collect();
        (!values.is_empty()).then(|| median(values))
    }

    /// The median of the ratios of neighbouring turns, so that a machine that changes its speed between rounds changes
    /// nothing. `None` without a twin, or when a figure is missing.
    pub(crate) fn beside_its_twin(&self, figure: impl Fn(&Figures) -> Option<f64>) -> Option<f64> {
        let pairs = self.rounds.iter().zip(&self.twin);
        let ratios: Vec<_> = pairs.filter_map(|(round, twin)| Some(figure(round)? / figure(twin)?)).collect();
        (!ratios.is_empty()).then(|| median(ratios))
    }

    fn rate(&self) -> Option<f64> {
        self.median(|round| Some(round.requests_per_second))
    }

    fn latency(&self, which: fn(&Figures) -> Option<Latency>) -> String {
        let read = |part: fn(Latency) -> f64| self.median(|round| which(round).map(part)).map(|micros| micros / 1e3);
        match (read(|latency| latency.p50_us), read(|latency| latency.p99_us), read(|latency| latency.p999_us)) {
            (Some(p50), Some(p99), Some(p999)) => format!("{p50:.2} / {p99:.2} / {p999:.2}"),
            _ => NOTHING.into(),
        }
    }

    fn memory(&self) -> String {
        let mib = |bytes: Option<u64>| bytes.map(|bytes| bytes as f64 / 1_048_576.0);
        let last = mib(self.rounds.last().map(|round| round.memory_bytes));
        let most = mib(self.rounds.iter().map(|round| round.peak_memory_bytes).max());
        last.zip(most).map_or(NOTHING.into(), |(last, most)| format!("{last:.0} / {most:.0}"))
    }

    fn errors(&self) -> Option<String> {
        let turns = || self.rounds.iter().chain(&self.twin);
        let errors: u64 = turns().map(|turn| turn.errors).sum();
        let example = turns().find_map(|turn| turn.first_error.as_deref())?;
        Some(format!("{}: {errors} ERRORS, first: {example}", self.contender.label()))
    }
}

impl StageReport {
    pub(crate) fn entry(&self, contender: Contender) -> Option<&Entry> {
        self.contenders.iter().find(|entry| entry.contender == contender)
    }

    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new(&TITLES);
        let rate_of = |contender| self.entry(contender).and_then(Entry::rate);
        let (floor, fenced) = (rate_of(Contender::Floor), rate_of(Contender::FredFenced));
        // When one master is late, the others decide.
        let round_trip = self.round_trip_us.filter(|_| !self.workload.breaks_masters());
        for entry in &self.contenders {
            let rate = entry.rate();
            let cost = |figure: fn(&Figures) -> Option<f64>| fixed(entry.median(figure), 1);
            let refused = entry.median(|round| Some(round.refused_share)).filter(|&share| share > 0.0);
            table.row(vec![
                entry.contender.label().into(),
                rate.map_or(NOTHING.into(), thousands),
                ratio(rate, floor),
                ratio(rate, fenced),
                fixed(entry.beside_its_twin(|round| Some(round.requests_per_second)), 2),
                cost(|round| Some(round.server_cpu_us)),
                cost(|round| Some(round.redis_cpu_us)),
                cost(|round| Some(round.load_cpu_us)),
                cost(|round| round.operations_per_call),
                entry.latency(|round| round.acquire),
                fixed(entry.beside_its_twin(|round| round.acquire.map(|latency| latency.p99_us)), 2),
                ratio(entry.median(|round| round.acquire.map(|latency| latency.p50_us)), round_trip),
                entry.latency(|round| round.extend),
                entry.latency(|round| round.release),
                refused.map_or(NOTHING.into(), |share| format!("{:.1} %", share * 100.0)),
                entry.memory(),
                rate.map_or(NOTHING.into(), |_| format!("{:.0} %", self.spread(entry) * 100.0)),
            ]);
        }
        table
    }

    fn spread(&self, entry: &Entry) -> f64 {
        spread(entry.rounds.iter().map(|round| round.requests_per_second).collect())
    }

    /// What has to be said about the table.
    pub(crate) fn remarks(&self, f: &mut Formatter<'_>, cores: usize) -> fmt::Result {
        let mut line = format!("Connections: {}, load threads: {}", self.connections, self.load_threads);
        if let Some(micros) = self.round_trip_us {
            write!(line, ", round trip to the last master {:.2} ms", micros / 1e3)?;
        }
        if let Some((twin, _)) = self.workload.twin() {
            write!(line, ". Its twin is {twin}; ratios to it are medians of neighbouring turns")?;
        }
        writeln!(f, "{line}.\n")?;
        self.noise(cores).iter().try_for_each(|warning| writeln!(f, "{warning}\n"))?;
        for entry in &self.contenders {
            let failures =
                entry.failures.iter().map(|failure| format!("{}: FAILED: {failure}", entry.contender.label()));
            entry.errors().into_iter().chain(failures).try_for_each(|remark| writeln!(f, "{remark}\n"))?;
        }
        Ok(())
    }

    pub(crate) fn noise(&self, cores: usize) -> Vec<String> {
        let mut found = Vec::new();
        for entry in self.contenders.iter().filter(|entry| !entry.rounds.is_empty()) {
            let label = format!("{}, {}", self.workload, entry.contender.label());
            let others = entry.median(|round| Some(round.other_cores)).unwrap_or_default() / cores as f64;
            let busy = entry.median(|round| Some(round.load_busy)).unwrap_or_default();
            found.extend(noise(&label, self.spread(entry), others, busy));
        }
        found
    }

    /// Wrong answers. While a master fails, those of the naive contenders are figures of theirs and no fault of the run.
    pub(crate) fn problems(&self) -> Vec<String> {
        let counts = |entry: &&Entry| entry.contender.is_gateway() || !self.workload.breaks_masters();
        let of = |entry: &Entry| {
            let failures = entry.failures.iter().map(|failure| format!("{}: {failure}", entry.contender.label()));
            entry.errors().into_iter().chain(failures).collect::<Vec<_>>()
        };
        let problems = self.contenders.iter().filter(counts).flat_map(of);
        problems.map(|problem| format!("{}, {problem}", self.workload)).collect()
    }
}

fn fixed(value: Option<f64>, digits: usize) -> String {
    value.map_or(NOTHING.into(), |value| format!("{value:.digits$}"))
}

fn ratio(value: Option<f64>, other: Option<f64>) -> String {
    fixed(value.zip(other).map(|(value, other)| value / other), 2)
}
