//! How the memory went, as figures, and the table of them.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use serde::Serialize;

use super::keys::Master;
use crate::report::{Machine, Source, thousands};

/// As long as a gateway keeps the fence of a name that is not used any more.
const RETENTION: Duration = Duration::from_secs(30 * 60);
/// So many samples at most are kept, evenly spread over the cycles.
const SAMPLES: u64 = 1000;
/// After which part of the cycles, in percent, the gateway is warm.
const WARM_PERCENT: u64 = 5;
const MIB: f64 = 1_048_576.0;
/// An allocator takes memory from the system in pieces. Growth over the second half of a run below this says nothing, and
/// short runs have no more.
const GRAIN: f64 = MIB;

/// The gateway's resident memory after so many cycles.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Sample {
    pub(super) cycles: u64,
    pub(super) gateway_bytes: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    machine: Machine,
    source: Source,
    connections: u32,
    wanted_cycles: u64,
    pub(super) cycles: u64,
    #[serde(serialize_with = "as_seconds", rename = "elapsed_s")]
    pub(super) elapsed: Duration,
    max_growth_bytes_per_million: f64,
    /// Per master, before the first cycle.
    before: Vec<Master>,
    pub(super) after: Vec<Master>,
    pub(super) locks_left: u64,
    /// Answers that were not 201 to an acquire and 204 to a release.
    pub(super) errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first_error: Option<String>,
    samples: Vec<Sample>,
}

fn as_seconds<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

impl Report {
    pub(super) fn new(
        machine: Machine,
        connections: u32,
        wanted_cycles: u64,
        max_growth_bytes_per_million: f64,
        before: Vec<Master>,
    ) -> Self {
        Self {
            machine,
            source: Source::look(),
            connections,
            wanted_cycles,
            cycles: 0,
            elapsed: Duration::ZERO,
            max_growth_bytes_per_million,
            after: before.clone(),
            before,
            locks_left: 0,
            errors: 0,
            first_error: None,
            samples: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, sample: Sample) {
        self.samples.push(sample);
    }

    /// After how many cycles the next sample is due.
    pub(super) fn next_sample(&self) -> u64 {
        self.samples.last().map_or(0, |last| last.cycles) + self.wanted_cycles / SAMPLES
    }

    pub(super) fn progress(&self, now: &Sample, rate: f64, masters: &[Master]) -> String {
        let keys = || masters.iter().map(|master| master.keys);
        format!(
            "{:>11} cycles ({:>3} %), {:>7} cycles/s, gateway {:.1} MiB, Redis {} MiB (sum of {}), {} to {} keys per master",
            thousands(now.cycles as f64),
            now.cycles * 100 / self.wanted_cycles,
            thousands(rate),
            now.gateway_bytes as f64 / MIB,
            thousands(masters.iter().map(|master| master.memory_bytes).sum::<u64>() as f64 / MIB),
            masters.len(),
            thousands(keys().min().unwrap_or(0) as f64),
            thousands(keys().max().unwrap_or(0) as f64),
        )
    }

    fn warm(&self) -> Option<&Sample> {
        self.samples.iter().find(|sample| sample.cycles * 100 >= self.wanted_cycles * WARM_PERCENT)
    }

    fn second_half(&self) -> &[Sample] {
        let from = self.samples.partition_point(|sample| sample.cycles * 2 < self.wanted_cycles);
        &self.samples[from..]
    }

    fn growth_bytes_per_million(&self) -> f64 {
        slope(self.second_half()) * 1e6
    }

    /// What came on all masters together, without keys that were there before.
    fn more(&self, figure: impl Fn(&Master) -> u64) -> f64 {
        let sum = |masters: &[Master]| masters.iter().map(&figure).sum::<u64>() as f64;
        sum(&self.after) - sum(&self.before)
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let growth = self.growth_bytes_per_million();
        let half = self.second_half();
        let cycles = half.first().zip(half.last()).map_or(0, |(first, last)| last.cycles - first.cycles) as f64;
        if growth > self.max_growth_bytes_per_million && growth * cycles / 1e6 > GRAIN {
            faults.push(format!(
                "the gateway grows by {} bytes per 1,000,000 cycles, more than the {} that are allowed",
                thousands(growth),
                thousands(self.max_growth_bytes_per_million)
            ));
        }
        if self.locks_left > 0 {
            faults.push(format!("{} lock keys are left on the masters", self.locks_left));
        }
        let expired = self.more(|master| master.expired);
        if expired > 0.0 && self.elapsed < RETENTION {
            faults.push(format!("{expired} keys expired before any fence could: locks were left behind"));
        }
        faults
    }

    pub(super) fn verdict(&self) -> Result<(), String> {
        let faults = self.faults();
        if faults.is_empty() { Ok(()) } else { Err(faults.join("; ")) }
    }
}

/// Of the straight line that is nearest to all samples, in bytes per cycle; least squares.
fn slope(samples: &[Sample]) -> f64 {
    let count = samples.len() as f64;
    let mean = |value: fn(&Sample) -> u64| samples.iter().map(|sample| value(sample) as f64).sum::<f64>() / count;
    let (x_mean, y_mean) = (mean(|sample| sample.cycles), mean(|sample| sample.gateway_bytes));
    let (mut xy, mut xx) = (0.0, 0.0);
    for sample in samples {
        let x = sample.cycles as f64 - x_mean;
        xy += x * (sample.gateway_bytes as f64 - y_mean);
        xx += x * x;
    }
    if xx == 0.0 { 0.0 } else { xy / xx }
}

/// The table and what has to be said about it, as Markdown.
impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mib =
            |sample: Option<&Sample>| sample.map_or("–".into(), |s| format!("{:.1}", s.gateway_bytes as f64 / MIB));
        let cycles = self.cycles as f64;
        let keys = self.more(|master| master.keys);
        writeln!(f, "| figure | value |\n| --- | ---: |")?;
        let mut row = |figure: &str, value: String| writeln!(f, "| {figure} | {value} |");
        row("cycles of acquire and release, each on a name of its own", thousands(cycles))?;
        row("cycles/s", thousands(cycles / self.elapsed.as_secs_f64()))?;
        row("gateway RSS after 5 % of the cycles / at the end, MiB", {
            format!("{} / {}", mib(self.warm()), mib(self.samples.last()))
        })?;
        row("gateway growth, bytes per 1,000,000 cycles", thousands(self.growth_bytes_per_million()))?;
        row("lock keys left on the masters", self.locks_left.to_string())?;
        row("keys that expired", thousands(self.more(|master| master.expired)))?;
        row("fence keys left per name and master", {
            format!("{:.2}", (keys - self.locks_left as f64) / cycles / self.after.len() as f64)
        })?;
        row("Redis memory per fence key, bytes", {
            if keys > 0.0 { thousands(self.more(|master| master.memory_bytes) / keys) } else { "–".into() }
        })?;
        writeln!(
            f,
            "\n{}; {} masters, one gateway and load on one machine, {} connections, {:.0} s. \
             Growth is the slope over the second half.",
            self.machine,
            self.after.len(),
            self.connections,
            self.elapsed.as_secs_f64()
        )?;
        writeln!(
            f,
            "\nFences are meant to stay: a fence refuses an acquire that arrives after its lock was released, and is kept \
             for {} minutes after the last use of its name.",
            RETENTION.as_secs() / 60
        )?;
        if let Some(example) = &self.first_error {
            writeln!(f, "\n{} answers were not 201 or 204, first: {example}", self.errors)?;
        }
        for fault in self.faults() {
            writeln!(f, "\nFAULT: {fault}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A gateway that takes `leak` bytes per cycle on top of 20 MiB, and as much again for a moment near the end.
    fn report(cycles: u64, leak: f64) -> Report {
        let machine = Machine::look().unwrap();
        let master = Master { keys: 1, memory_bytes: 1 << 20, expired: 0 };
        let mut report = Report::new(machine, 64, cycles, 256.0 * 1024.0, vec![master; 5]);
        while report.samples.last().is_none_or(|last| last.cycles < cycles) {
            let at = report.next_sample();
            let spike = if at == cycles / 10 * 9 { 20 << 20 } else { 0 };
            report.add(Sample { cycles: at, gateway_bytes: (20 << 20) + spike + (leak * at as f64) as u64 });
        }
        report.cycles = cycles;
        report.elapsed = Duration::from_secs(60);
        report.after = vec![Master { keys: 1 + cycles, memory_bytes: (1 << 20) + 100 * cycles, expired: 0 }; 5];
        report
    }

    #[test]
    fn a_gateway_that_keeps_its_size_is_without_fault() {
        let report = report(10_000_000, 0.0);
        assert!(report.growth_bytes_per_million().abs() < 50_000.0, "{}", report.growth_bytes_per_million());
        assert_eq!(report.verdict(), Ok(()));
        let text = report.to_string();
        assert!(text.contains("| fence keys left per name and master | 1.00 |"), "{text}");
        assert!(text.contains("| Redis memory per fence key, bytes | 100 |"), "{text}");
    }

    #[test]
    fn a_leak_is_found_in_long_runs_and_in_short_ones() {
        for (cycles, leak) in [(10_000_000, 0.3), (100_000, 50.0)] {
            let report = report(cycles, leak);
            assert!(report.verdict().unwrap_err().contains("grows by"), "{report}");
        }
        assert_eq!(report(100_000, 10.0).verdict(), Ok(()), "that may be one piece of memory");
    }

    #[test]
    fn locks_are_faults_whether_they_are_left_or_have_expired() {
        let left = Report { locks_left: 2, ..report(1000, 0.0) };
        assert!(left.verdict().unwrap_err().contains("2 lock keys"));
        let mut expired = report(1000, 0.0);
        expired.after[3].expired = 1;
        assert!(expired.verdict().unwrap_err().contains("1 keys expired"));
        expired.elapsed = RETENTION;
        assert_eq!(expired.verdict(), Ok(()), "these may be fences");
    }
}
