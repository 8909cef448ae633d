//! From single measurements to the table: medians over the rounds, ratios within the run, and a word of doubt where it
//! is due. Knows nothing of how the figures came about.

use std::fmt::{self, Display, Formatter};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Serialize;

use crate::contenders::Contender;
use crate::load::Tally;
use crate::servers::Cpu;

/// Rounds of one contender that differ by more than this share of their median were not run under equal conditions.
const MAX_SPREAD: f64 = 0.15;
/// More cores than this share of all, busy with something else, leave too little for a fair measurement.
const MAX_OTHERS: f64 = 0.10;
/// A load generator that is busy for more of the time than this may be what was measured.
const MAX_LOAD_BUSY: f64 = 0.95;

/// One turn of one contender. CPU times are per request, an acquire and a release being one each.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Measurement {
    requests_per_second: f64,
    server_cpu_us: f64,
    redis_cpu_us: f64,
    acquire_p50_us: f64,
    acquire_p99_us: f64,
    release_p50_us: f64,
    release_p99_us: f64,
    /// Since the process was started.
    peak_memory_bytes: u64,
    /// Share of the time that a thread of the load generator was busy, 0 to 1.
    load_busy: f64,
    /// Cores that were busy with anything but this benchmark, on average.
    other_cores: f64,
    errors: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_error: Option<String>,
}

impl Measurement {
    /// Fails when there is nothing to divide by.
    pub(crate) fn new(
        tally: &Tally,
        elapsed: Duration,
        cpu: Cpu,
        load_threads: u32,
        peak_memory_bytes: u64,
    ) -> Result<Self, String> {
        let requests = (tally.acquire.total() + tally.release.total()) as f64;
        let micros = |latency: Option<Duration>| latency.map(|latency| latency.as_secs_f64() * 1e6);
        let percentiles = || {
            Some((
                micros(tally.acquire.percentile(0.5))?,
                micros(tally.acquire.percentile(0.99))?,
                micros(tally.release.percentile(0.5))?,
                micros(tally.release.percentile(0.99))?,
            ))
        };
        let Some((acquire_p50_us, acquire_p99_us, release_p50_us, release_p99_us)) = percentiles() else {
            let example = tally.first_error.as_deref().unwrap_or("no answer came at all");
            return Err(format!("not one lock was acquired and released; {} errors, first: {example}", tally.errors));
        };
        Ok(Self {
            requests_per_second: requests / elapsed.as_secs_f64(),
            server_cpu_us: cpu.server.as_secs_f64() * 1e6 / requests,
            redis_cpu_us: cpu.redis.as_secs_f64() * 1e6 / requests,
            acquire_p50_us,
            acquire_p99_us,
            release_p50_us,
            release_p99_us,
            peak_memory_bytes,
            load_busy: cpu.load.as_secs_f64() / f64::from(load_threads) / elapsed.as_secs_f64(),
            other_cores: cpu.others.as_secs_f64() / elapsed.as_secs_f64(),
            errors: tally.errors,
            first_error: tally.first_error.clone(),
        })
    }
}

/// The line of progress.
impl Display for Measurement {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let rate = thousands(self.requests_per_second);
        write!(f, "{rate:>8} requests/s, acquire p99 {:.2} ms", self.acquire_p99_us / 1e3)?;
        match &self.first_error {
            Some(example) => write!(f, ", {} ERRORS, first: {example}", self.errors),
            None => Ok(()),
        }
    }
}

/// What it was measured on.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    pub(crate) cores: usize,
    pub(crate) cpu: String,
    pub(crate) redis: String,
}

impl Machine {
    pub(crate) fn look() -> Result<Self, String> {
        let output = Command::new("redis-server")
            .arg("--version")
            .output()
            .map_err(|error| format!("cannot run redis-server, which must be on the PATH: {error}"))?;
        let version = String::from_utf8_lossy(&output.stdout).into_owned();
        let redis = version.split_whitespace().find_map(|word| word.strip_prefix("v=")).unwrap_or(version.trim());
        let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':')).map(|(_, name)| name);
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Ok(Self { cores, cpu: cpu.unwrap_or("unknown CPU").trim().into(), redis: redis.into() })
    }
}

/// All measurements of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    machine: Machine,
    seconds: u64,
    connections: u32,
    load_threads: u32,
    contenders: Vec<Entry>,
}

#[derive(Debug, Serialize)]
struct Entry {
    contender: Contender,
    rounds: Vec<Measurement>,
}

impl Report {
    pub(crate) fn new(
        machine: Machine,
        seconds: u64,
        connections: u32,
        load_threads: u32,
        lineup: &[Contender],
    ) -> Self {
        let contenders = lineup.iter().map(|&contender| Entry { contender, rounds: Vec::new() }).collect();
        Self { machine, seconds, connections, load_threads, contenders }
    }

    pub(crate) fn add(&mut self, contender: Contender, measurement: Measurement) {
        if let Some(entry) = self.contenders.iter_mut().find(|entry| entry.contender == contender) {
            entry.rounds.push(measurement);
        }
    }

    pub(crate) fn errors(&self) -> u64 {
        self.contenders.iter().flat_map(|entry| &entry.rounds).map(|measurement| measurement.errors).sum()
    }

    fn median_of(&self, contender: Contender, figure: impl Fn(&Measurement) -> f64) -> Option<f64> {
        self.contenders.iter().find(|entry| entry.contender == contender).map(|entry| entry.median(figure))
    }
}

impl Entry {
    fn median(&self, figure: impl Fn(&Measurement) -> f64) -> f64 {
        median(self.rounds.iter().map(figure).collect())
    }

    fn spread(&self) -> f64 {
        spread(self.rounds.iter().map(|round| round.requests_per_second).collect())
    }
}

/// The table and what has to be said about it, as Markdown.
impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let fenced = self.median_of(Contender::FredFenced, |round| round.requests_per_second);
        writeln!(
            f,
            "| contender | requests/s | ÷ fred fenced | its CPU µs/request | Redis CPU µs/request (sum of 5) \
             | acquire p50 / p99 ms | release p50 / p99 ms | max RSS MiB | spread |"
        )?;
        writeln!(f, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")?;
        for entry in &self.contenders {
            let median = |figure: fn(&Measurement) -> f64| entry.median(figure);
            let rate = median(|round| round.requests_per_second);
            writeln!(
                f,
                "| {} | {} | {} | {:.1} | {:.1} | {:.2} / {:.2} | {:.2} / {:.2} | {:.0} | {:.0} % |",
                entry.contender.label(),
                thousands(rate),
                fenced.map_or("–".into(), |fenced| format!("{:.2}", rate / fenced)),
                median(|round| round.server_cpu_us),
                median(|round| round.redis_cpu_us),
                median(|round| round.acquire_p50_us / 1e3),
                median(|round| round.acquire_p99_us / 1e3),
                median(|round| round.release_p50_us / 1e3),
                median(|round| round.release_p99_us / 1e3),
                entry.rounds.iter().map(|round| round.peak_memory_bytes).max().unwrap_or(0) as f64 / 1_048_576.0,
                entry.spread() * 100.0,
            )?;
        }

        let cpu = |contender| self.median_of(contender, |round| round.server_cpu_us);
        if let (Some(gateway), Some(noop)) = (cpu(Contender::Gateway), cpu(Contender::Noop)) {
            writeln!(f, "\nGateway CPU per request ÷ the HTTP no-op's: {:.2}.", gateway / noop)?;
        }
        let Machine { cores, cpu, redis } = &self.machine;
        writeln!(
            f,
            "\n{cores} cores, {cpu}, Redis {redis}; masters, contenders and load on one machine. Medians of {} × {} s, \
             {} connections, load threads: {}.",
            self.contenders.first().map_or(0, |entry| entry.rounds.len()),
            self.seconds,
            self.connections,
            self.load_threads,
        )?;
        self.doubts(f)
    }
}

impl Report {
    fn doubts(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if self.contenders.iter().any(|entry| entry.rounds.len() < 2) {
            writeln!(f, "\nOne round only: nothing shows whether the figures can be had again.")?;
        }
        for entry in &self.contenders {
            let label = entry.contender.label();
            let others = entry.median(|round| round.other_cores) / self.machine.cores as f64;
            doubt(f, label, entry.spread(), others, entry.median(|round| round.load_busy))?;
            let errors: u64 = entry.rounds.iter().map(|round| round.errors).sum();
            if let Some(example) = entry.rounds.iter().find_map(|round| round.first_error.as_deref()) {
                writeln!(f, "\n{label}: {errors} ERRORS, first: {example}")?;
            }
        }
        Ok(())
    }
}

/// A word on what makes a contender's figures worthless: rounds that differ by `spread`, and programs that have nothing to
/// do with it and took the share `others` of all cores, or a load generator `busy` for so much of the time.
pub(crate) fn doubt(f: &mut Formatter<'_>, label: &str, spread: f64, others: f64, busy: f64) -> fmt::Result {
    if spread > MAX_SPREAD || others > MAX_OTHERS {
        writeln!(
            f,
            "\n{label}: THE MACHINE WAS DISTURBED: the rounds differ by {:.0} % (fair: {:.0} %), other programs took \
             {:.0} % of all cores (fair: {:.0} %); run it again.",
            spread * 100.0,
            MAX_SPREAD * 100.0,
            others * 100.0,
            MAX_OTHERS * 100.0
        )?;
    }
    if busy > MAX_LOAD_BUSY {
        writeln!(
            f,
            "\n{label}: the load generator was busy for {:.0} % of the time and may be what was measured; try more \
             --load-threads.",
            busy * 100.0
        )?;
    }
    Ok(())
}

/// The file for machines, created before anything is measured: a run must not end with a path that cannot be written.
pub(crate) struct JsonFile {
    path: PathBuf,
    file: File,
}

impl JsonFile {
    pub(crate) fn create(path: &Path) -> Result<Self, String> {
        let file = File::create(path).map_err(|error| format!("--json {}: {error}", path.display()))?;
        Ok(Self { path: path.to_owned(), file })
    }

    pub(crate) fn write(self, report: &impl Serialize) -> Result<(), String> {
        let mut writer = BufWriter::new(self.file);
        serde_json::to_writer_pretty(&mut writer, report)
            .map_err(std::io::Error::from)
            .and_then(|()| writer.write_all(b"\n"))
            .and_then(|()| writer.flush())
            .map_err(|error| format!("--json {}: {error}", self.path.display()))
    }
}

/// Zero for nothing; the mean of the middle two for an even number.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

/// Highest minus lowest, as a share of the median.
pub(crate) fn spread(values: Vec<f64>) -> f64 {
    let highest = values.iter().copied().fold(f64::MIN, f64::max);
    let lowest = values.iter().copied().fold(f64::MAX, f64::min);
    (highest - lowest) / median(values)
}

pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A whole number with commas between its thousands.
pub(crate) fn thousands(value: f64) -> String {
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(rate: f64) -> Measurement {
        Measurement {
            requests_per_second: rate,
            server_cpu_us: 10.0,
            redis_cpu_us: 20.0,
            acquire_p50_us: 1_000.0,
            acquire_p99_us: 2_000.0,
            release_p50_us: 1_000.0,
            release_p99_us: 2_000.0,
            peak_memory_bytes: 1 << 20,
            load_busy: 0.5,
            other_cores: 0.0,
            errors: 0,
            first_error: None,
        }
    }

    fn printed(gateway: [f64; 3]) -> String {
        let machine = Machine { cores: 2, cpu: "some CPU".into(), redis: "7.0.0".into() };
        let mut report = Report::new(machine, 3, 64, 1, &[Contender::FredFenced, Contender::Gateway]);
        for (round, rate) in gateway.into_iter().enumerate() {
            report.add(Contender::FredFenced, measured(20_000.0 + round as f64));
            report.add(Contender::Gateway, measured(rate));
        }
        report.to_string()
    }

    #[test]
    fn the_table_shows_medians_and_their_ratio() {
        let text = printed([50_002.5, 48_000.0, 51_000.0]);
        assert!(text.contains("| redlock-gateway | 50,002 | 2.50 | 10.0 | 20.0 | 1.00 / 2.00 "), "{text}");
        assert!(!text.contains("DISTURBED"), "{text}");
    }

    #[test]
    fn rounds_that_disagree_are_named() {
        let text = printed([50_000.0, 42_000.0, 50_000.0]);
        assert!(text.contains("redlock-gateway: THE MACHINE WAS DISTURBED: the rounds differ by 16 %"), "{text}");
        assert!(!text.contains("fenced: THE MACHINE"), "{text}");
    }

    #[test]
    fn rounds_that_agree_on_a_busy_machine_are_named_too() {
        let machine = Machine { cores: 2, cpu: "some CPU".into(), redis: "7.0.0".into() };
        let mut report = Report::new(machine, 3, 64, 1, &[Contender::Noop]);
        for _ in 0..3 {
            report.add(Contender::Noop, Measurement { other_cores: 0.3, ..measured(50_000.0) });
        }
        let text = report.to_string();
        assert!(text.contains("other programs took 15 % of all cores"), "{text}");
    }

    #[test]
    fn an_even_number_has_two_in_the_middle() {
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(thousands(1_234_567.4), "1,234,567");
        assert_eq!(thousands(999.6), "1,000");
    }
}
