//! The figures of one turn: from what the connections counted and the processes consumed. Knows nothing of how they came
//! about.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::stats::{micros, thousands};
use crate::histogram::Histogram;
use crate::load::Tally;
use crate::servers::Cpu;

/// One turn of one contender. CPU times are per request; an acquire, a release and an extension are one each, and so is
/// an acquire that is refused because somebody else holds the lock.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Figures {
    pub(crate) requests_per_second: f64,
    pub(crate) server_cpu_us: f64,
    /// All masters together.
    pub(crate) redis_cpu_us: f64,
    pub(crate) load_cpu_us: f64,
    /// Of those that were granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) acquire: Option<Latency>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) extend: Option<Latency>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) release: Option<Latency>,
    /// Lock operations in one call to a master, on average; `None` when the contender does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) operations_per_call: Option<f64>,
    /// Acquires that were answered 409, of all that were answered as they may be.
    pub(crate) refused_share: f64,
    /// Resident at the end of the turn.
    pub(crate) memory_bytes: u64,
    /// The most that was resident since the process was started.
    pub(crate) peak_memory_bytes: u64,
    /// Share of the time that a thread of the load generator was busy, 0 to 1.
    pub(crate) load_busy: f64,
    /// Cores that were busy with anything but this benchmark, on average.
    pub(crate) other_cores: f64,
    pub(crate) errors: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) first_error: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Latency {
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
}

impl Latency {
    /// `None` when nothing was recorded.
    fn of(histogram: &Histogram) -> Option<Self> {
        let read = |share| histogram.percentile(share).map(micros);
        Some(Self { p50_us: read(0.5)?, p99_us: read(0.99)?, p999_us: read(0.999)? })
    }
}

/// What is known of a turn besides what the connections counted.
pub(crate) struct Circumstances {
    pub(crate) elapsed: Duration,
    pub(crate) cpu: Cpu,
    pub(crate) load_threads: u32,
    pub(crate) operations_per_call: Option<f64>,
    pub(crate) memory_bytes: u64,
    pub(crate) peak_memory_bytes: u64,
}

impl Figures {
    /// Fails when there is nothing to divide by.
    pub(crate) fn new(tally: &Tally, turn: &Circumstances) -> Result<Self, String> {
        let attempts = tally.acquire.total() + tally.refused;
        let requests = (attempts + tally.extend.total() + tally.release.total()) as f64;
        if requests == 0.0 {
            let example = tally.first_error.as_deref().unwrap_or("no answer came at all");
            return Err(format!(
                "not one request was answered as it must be; {} errors, first: {example}",
                tally.errors
            ));
        }
        let (cpu, seconds) = (turn.cpu, turn.elapsed.as_secs_f64());
        let each = |time: Duration| micros(time) / requests;
        Ok(Self {
            requests_per_second: requests / seconds,
            server_cpu_us: each(cpu.server),
            redis_cpu_us: each(cpu.redis),
            load_cpu_us: each(cpu.load),
            acquire: Latency::of(&tally.acquire),
            extend: Latency::of(&tally.extend),
            release: Latency::of(&tally.release),
            operations_per_call: turn.operations_per_call,
            refused_share: tally.refused as f64 / attempts.max(1) as f64,
            memory_bytes: turn.memory_bytes,
            peak_memory_bytes: turn.peak_memory_bytes,
            load_busy: cpu.load.as_secs_f64() / f64::from(turn.load_threads) / seconds,
            other_cores: cpu.others.as_secs_f64() / seconds,
            errors: tally.errors,
            first_error: tally.first_error.clone(),
        })
    }
}

/// The line of progress.
impl Display for Figures {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:>8} requests/s", thousands(self.requests_per_second))?;
        for (what, latency) in [("acquire", self.acquire), ("extend", self.extend)] {
            if let Some(latency) = latency {
                write!(f, ", {what} p99 {:.2} ms", latency.p99_us / 1e3)?;
            }
        }
        match &self.first_error {
            Some(example) => write!(f, ", {} ERRORS, first: {example}", self.errors),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn() -> Circumstances {
        let [server, redis, load, others] = [2, 4, 6, 8].map(Duration::from_secs);
        Circumstances {
            elapsed: Duration::from_secs(8),
            cpu: Cpu { server, redis, load, others },
            load_threads: 3,
            operations_per_call: None,
            memory_bytes: 1,
            peak_memory_bytes: 2,
        }
    }

    #[test]
    fn a_refusal_is_a_request_but_no_latency_of_an_acquire() {
        let mut tally = Tally::new();
        tally.acquire.record(Duration::from_millis(1));
        tally.release.record(Duration::from_millis(2));
        tally.refused = 2;
        let figures = Figures::new(&tally, &turn()).expect("four requests");
        assert_eq!(figures.requests_per_second, 0.5);
        assert_eq!((figures.server_cpu_us, figures.redis_cpu_us, figures.load_cpu_us), (5e5, 1e6, 1.5e6));
        assert_eq!((figures.load_busy, figures.other_cores), (0.25, 1.0));
        assert_eq!(figures.refused_share, 2.0 / 3.0);
        let latency = figures.acquire.expect("one was granted");
        assert!((latency.p999_us / 1000.0 - 1.0).abs() < 0.02, "{latency:?}");
        assert_eq!(figures.extend, None);
    }

    #[test]
    fn a_turn_without_a_good_answer_is_an_error_with_an_example() {
        let tally = Tally { errors: 3, first_error: Some("POST was answered with 503".into()), ..Tally::new() };
        let error = Figures::new(&tally, &turn()).expect_err("nothing to divide by");
        assert!(error.contains("3 errors, first: POST was answered with 503"), "{error}");
    }
}
