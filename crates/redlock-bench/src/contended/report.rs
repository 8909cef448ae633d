//! From the workers' logs to figures, and from the figures of all rounds to the table.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::options::{Contender, Options};
use super::worker::Log;
use crate::grants::{Grant, Violations, handoffs, longest_without};
use crate::histogram::Histogram;
use crate::report::{Machine, median, millis, noise, spread, thousands};
use crate::servers::Cpu;

/// More answers than this share that nobody asked for make another load of it.
const MAX_OTHERS: f64 = 0.01;

/// When a turn began and what of it is counted.
pub(super) struct Turn {
    pub(super) start: Instant,
    pub(super) from: Instant,
    pub(super) until: Instant,
    pub(super) workers: u32,
    /// Worker n is at gateway n modulo this.
    pub(super) gateways: usize,
}

/// One turn of one contender.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measurement {
    grants_per_second: f64,
    /// Grants that went to another worker than the one before.
    handoffs_per_second: f64,
    /// Of the grants in the measurement, from the first request of the want.
    wait_p50_ms: f64,
    wait_p99_ms: f64,
    wait_max_ms: f64,
    /// The longest time that one worker was without a grant, open waits included.
    starved_ms: f64,
    /// Those of them that one gateway took over from another by its own account; absent when it keeps none.
    #[serde(skip_serializing_if = "Option::is_none")]
    remote_handoffs_per_second: Option<f64>,
    /// Of the grants, in the order of the gateways.
    gateway_shares: Vec<f64>,
    gateway_cpu_us_per_grant: f64,
    redis_cpu_us_per_grant: f64,
    /// Pairs of grants that overlap or whose fencing tokens do not rise; of the whole turn, as what follows.
    violations: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_violation: Option<String>,
    /// Answers 409 to polls.
    polls: u64,
    /// Answers that are neither that nor what was asked for, by method and status.
    other_answers: BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    first_other_answer: Option<String>,
    /// Share of those among them and the grants and releases.
    other_share: f64,
    /// Share of the time that a thread of the load generator was busy, 0 to 1.
    load_busy: f64,
    /// Cores that were busy with anything but this benchmark, on average.
    other_cores: f64,
}

impl Measurement {
    /// Fails when there is nothing to divide by.
    pub(super) fn new(
        logs: Vec<Log>,
        turn: &Turn,
        cpu: Cpu,
        load_threads: u32,
        remote: Option<f64>,
    ) -> Result<Self, String> {
        let (mut grants, mut polls, mut others, mut first_other_answer) = (Vec::new(), 0, BTreeMap::new(), None);
        for log in logs {
            grants.extend(log.grants);
            polls += log.polls;
            first_other_answer = first_other_answer.or(log.first_other);
            for (answer, count) in log.others {
                *others.entry(answer).or_default() += count;
            }
        }
        grants.sort_unstable_by_key(|grant| grant.fencing_token);
        let violations = Violations::among(&grants);
        let strange: u64 = others.values().sum();

        let counted: Vec<&Grant> =
            grants.iter().filter(|grant| (turn.from..turn.until).contains(&grant.received)).collect();
        let mut waits = Histogram::new();
        let mut per_gateway = vec![0u32; turn.gateways];
        for grant in &counted {
            waits.record(grant.wait());
            per_gateway[grant.worker as usize % turn.gateways] += 1;
        }
        let longest = counted.iter().map(|grant| grant.wait()).max();
        let (Some(p50), Some(p99), Some(longest)) = (waits.percentile(0.5), waits.percentile(0.99), longest) else {
            let example = first_other_answer.as_deref().unwrap_or("there were none");
            return Err(format!("the lock was not granted once; {strange} other answers, first: {example}"));
        };
        let (count, elapsed) = (counted.len() as f64, (turn.until - turn.from).as_secs_f64());
        Ok(Self {
            grants_per_second: count / elapsed,
            handoffs_per_second: handoffs(&grants, turn.from, turn.until) as f64 / elapsed,
            remote_handoffs_per_second: remote.map(|count| count / elapsed),
            // What a histogram reads back may exceed the longest.
            wait_p50_ms: millis(p50.min(longest)),
            wait_p99_ms: millis(p99.min(longest)),
            wait_max_ms: millis(longest),
            starved_ms: millis(longest_without(&grants, turn.workers, turn.start, turn.from, turn.until)),
            gateway_shares: per_gateway.into_iter().map(|grants| f64::from(grants) / count).collect(),
            gateway_cpu_us_per_grant: cpu.server.as_secs_f64() * 1e6 / count,
            redis_cpu_us_per_grant: cpu.redis.as_secs_f64() * 1e6 / count,
            violations: violations.count,
            first_violation: violations.first,
            polls,
            other_answers: others,
            first_other_answer,
            other_share: strange as f64 / (strange as f64 + 2.0 * grants.len() as f64),
            load_busy: cpu.load.as_secs_f64() / f64::from(load_threads) / elapsed,
            other_cores: cpu.others.as_secs_f64() / elapsed,
        })
    }
}

/// The line of progress.
impl Display for Measurement {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>7} grants/s, {:>7} hand-offs/s, wait p99 {:.1} ms, starved {:.2} s",
            thousands(self.grants_per_second),
            thousands(self.handoffs_per_second),
            self.wait_p99_ms,
            self.starved_ms / 1e3
        )?;
        if let Some(example) = &self.first_violation {
            write!(f, ", {} VIOLATIONS, first: {example}", self.violations)?;
        }
        for (answer, count) in &self.other_answers {
            write!(f, ", {count} × {answer}")?;
        }
        Ok(())
    }
}

/// All measurements of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    machine: Machine,
    seconds: u64,
    workers: u32,
    hold_ms: u64,
    wait_ms: u64,
    load_threads: u32,
    contenders: Vec<Entry>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Entry {
    contender: Contender,
    rounds: Vec<Measurement>,
}

impl Report {
    pub(super) fn new(machine: Machine, options: &Options, load_threads: u32, lineup: &[Contender]) -> Self {
        let &Options { seconds, workers, hold_ms, wait_ms, .. } = options;
        let contenders = lineup.iter().map(|&contender| Entry { contender, rounds: Vec::new() }).collect();
        Self { machine, seconds, workers, hold_ms, wait_ms, load_threads, contenders }
    }

    pub(super) fn add(&mut self, contender: Contender, measurement: Measurement) {
        if let Some(entry) = self.contenders.iter_mut().find(|entry| entry.contender == contender) {
            entry.rounds.push(measurement);
        }
    }

    /// `None` when the contender did not take part.
    pub(crate) fn handoffs_per_second(&self, contender: Contender) -> Option<f64> {
        Some(self.entry(contender)?.median(|round| round.handoffs_per_second))
    }

    /// Of the grants, that of the gateway with the fewest.
    pub(crate) fn smallest_share(&self, contender: Contender) -> Option<f64> {
        let smallest = |round: &Measurement| round.gateway_shares.iter().copied().fold(1.0, f64::min);
        Some(self.entry(contender)?.median(smallest))
    }

    fn entry(&self, contender: Contender) -> Option<&Entry> {
        self.contenders.iter().find(|entry| entry.contender == contender)
    }

    /// What makes the program fail.
    pub(crate) fn verdict(&self) -> Result<(), String> {
        for entry in &self.contenders {
            let label = entry.contender.label();
            let violations: u64 = entry.rounds.iter().map(|round| round.violations).sum();
            if violations > 0 {
                return Err(format!("{label}: {violations} grants overlap or have fencing tokens that do not rise"));
            }
            let share = entry.rounds.iter().map(|round| round.other_share).fold(0.0, f64::max);
            if share > MAX_OTHERS {
                return Err(format!("{label}: in one round {:.1} % of the answers were unexpected", share * 100.0));
            }
        }
        Ok(())
    }
}

impl Entry {
    fn median(&self, figure: impl Fn(&Measurement) -> f64) -> f64 {
        median(self.rounds.iter().map(figure).collect())
    }

    /// Of what counts, not of the grants that only went back and forth.
    fn spread(&self) -> f64 {
        spread(self.rounds.iter().map(|round| round.handoffs_per_second).collect())
    }

    fn remote(&self) -> String {
        let known: Vec<_> = self.rounds.iter().filter_map(|round| round.remote_handoffs_per_second).collect();
        if known.is_empty() { "–".into() } else { thousands(median(known)) }
    }

    fn others(&self) -> String {
        let mut sum = BTreeMap::<&str, u64>::new();
        for (answer, count) in self.rounds.iter().flat_map(|round| &round.other_answers) {
            *sum.entry(answer).or_default() += count;
        }
        let words: Vec<_> = sum.iter().map(|(answer, count)| format!("{count} × {answer}")).collect();
        if words.is_empty() { "–".into() } else { words.join(", ") }
    }
}

/// The table and what has to be said about it, as Markdown.
impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "| contender | grants/s | hand-offs/s | remote ones | wait p50 / p99 / max ms | p99 ÷ p50 | max ÷ p50 | starved s \
             | share of each gateway | gateway CPU µs/grant | Redis CPU µs/grant (sum of 5) | other answers | spread |"
        )?;
        writeln!(f, "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")?;
        for entry in &self.contenders {
            let median = |figure: fn(&Measurement) -> f64| entry.median(figure);
            let shares: Vec<_> = (0..entry.contender.gateways())
                .map(|gateway| format!("{:.0} %", entry.median(|round| round.gateway_shares[gateway] * 100.0)))
                .collect();
            writeln!(
                f,
                "| {} | {} | {} | {} | {:.2} / {:.2} / {:.2} | {:.1} | {:.1} | {:.2} | {} | {:.1} | {:.1} | {} | {:.0} % |",
                entry.contender.label(),
                thousands(median(|round| round.grants_per_second)),
                thousands(median(|round| round.handoffs_per_second)),
                entry.remote(),
                median(|round| round.wait_p50_ms),
                median(|round| round.wait_p99_ms),
                median(|round| round.wait_max_ms),
                median(|round| round.wait_p99_ms / round.wait_p50_ms),
                median(|round| round.wait_max_ms / round.wait_p50_ms),
                median(|round| round.starved_ms / 1e3),
                shares.join(" / "),
                median(|round| round.gateway_cpu_us_per_grant),
                median(|round| round.redis_cpu_us_per_grant),
                entry.others(),
                entry.spread() * 100.0,
            )?;
        }
        writeln!(
            f,
            "\n{}; masters, gateways and load on one machine. Medians of {} × {} s, {} \
             workers, held for {} ms, wait_ms {}, load threads: {}. The spread is that of hand-offs/s.",
            self.machine,
            self.contenders.first().map_or(0, |entry| entry.rounds.len()),
            self.seconds,
            self.workers,
            self.hold_ms,
            self.wait_ms,
            self.load_threads,
        )?;
        self.remarks(f)
    }
}

impl Report {
    pub(crate) fn noise(&self) -> Vec<String> {
        let of = |entry: &Entry| {
            let others = entry.median(|round| round.other_cores) / self.machine.cores as f64;
            let label = format!("contended, {}", entry.contender.label());
            noise(&label, entry.spread(), others, entry.median(|round| round.load_busy))
        };
        self.contenders.iter().flat_map(of).collect()
    }

    fn remarks(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.noise().iter().try_for_each(|warning| writeln!(f, "\n{warning}"))?;
        for entry in &self.contenders {
            let label = entry.contender.label();
            if let Some(example) = entry.rounds.iter().find_map(|round| round.first_violation.as_deref()) {
                let violations: u64 = entry.rounds.iter().map(|round| round.violations).sum();
                writeln!(f, "\n{label}: {violations} VIOLATIONS, first: {example}")?;
            }
            if let Some(example) = entry.rounds.iter().find_map(|round| round.first_other_answer.as_deref()) {
                writeln!(f, "\n{label}: other answers, first: {example}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::grants::Grant;

    /// A worker that wanted the lock at the first time of each pair and got it at the second, in ms after the start.
    fn log(start: Instant, worker: u32, waits: &[(u64, u64)]) -> Log {
        let at = |ms| start + Duration::from_millis(ms);
        let grant = |&(wanted, received): &(u64, u64)| Grant {
            fencing_token: 1_000_000 + received,
            worker,
            wanted: at(wanted),
            received: at(received),
            released: at(received),
        };
        Log { grants: waits.iter().map(grant).collect(), ..Log::default() }
    }

    fn measured(logs: Vec<Log>, start: Instant) -> Result<Measurement, String> {
        let at = |ms| start + Duration::from_millis(ms);
        let turn = Turn { start, from: at(1000), until: at(3000), workers: 2, gateways: 2 };
        let cpu = Cpu {
            server: Duration::from_millis(1),
            redis: Duration::ZERO,
            load: at(2000) - start,
            others: Duration::ZERO,
        };
        Measurement::new(logs, &turn, cpu, 1, None)
    }

    #[test]
    fn only_what_was_granted_during_the_measurement_is_counted() {
        let start = Instant::now();
        let logs = vec![
            log(start, 0, &[(0, 500), (500, 1100), (1100, 2000), (2000, 3100)]),
            log(start, 1, &[(0, 1500), (1500, 1600)]),
        ];
        let measured = measured(logs, start).expect("there are grants");
        assert_eq!(measured.grants_per_second, 2.0, "1100, 1500, 1600, 2000");
        assert_eq!(measured.handoffs_per_second, 1.0, "to worker 1 at 1500 and back at 2000");
        assert_eq!(measured.wait_max_ms, 1500.0);
        assert_eq!(measured.starved_ms, 1500.0, "worker 1 until its first grant");
        assert_eq!(measured.gateway_shares, [0.5, 0.5]);
        assert_eq!((measured.gateway_cpu_us_per_grant, measured.load_busy), (250.0, 1.0));
        assert_eq!((measured.violations, measured.other_share), (0, 0.0));
    }

    #[test]
    fn a_lock_that_is_never_granted_is_an_error_with_an_example() {
        let start = Instant::now();
        let refused = Log { first_other: Some("POST was answered with 400".into()), ..Log::default() };
        let error = measured(vec![refused], start).expect_err("nothing to divide by");
        assert!(error.contains("answered with 400"), "{error}");
    }

    #[test]
    fn violations_and_many_other_answers_fail_the_run_and_few_do_not() {
        let start = Instant::now();
        let verdict = |change: fn(&mut Measurement)| {
            let mut measurement = measured(vec![log(start, 0, &[(1000, 1100)])], start).expect("there is a grant");
            change(&mut measurement);
            let machine = Machine { cores: 2, cpu: "some CPU".into(), kernel: "6.1.0".into(), redis: "7.0.0".into() };
            let (contender, rounds) = (Contender::Polling1, vec![measurement]);
            let contenders = vec![Entry { contender, rounds }];
            Report { machine, seconds: 2, workers: 2, hold_ms: 0, wait_ms: 1, load_threads: 1, contenders }.verdict()
        };
        assert_eq!(verdict(|round| round.other_share = 0.009), Ok(()));
        assert!(verdict(|round| round.other_share = 0.02).is_err());
        assert!(verdict(|round| round.violations = 1).is_err());
    }
}
