//! What the gateway is to reach, each a figure within one run, and whether a run says that it did. Pure: reads reports.
//!
//! A workload that was left out leaves its goals unmeasured; nothing is taken from another run.

use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use crate::contended::Contender as LockContender;
use crate::contenders::Contender;
use crate::document::{Report, Settings};
use crate::report::{Figures, Table, thousands};
use crate::waiters;
use crate::workload::Workload;

const KIB: f64 = 1024.0;
/// Requests/s may differ by 15 % however many names or held locks there are.
const FLAT: Bound = Bound::AtLeast(0.85);
/// A cycle is an acquire and a release, two requests, so ratios of cycles/s are ratios of requests/s.
const GOALS: [Goal; 22] = [
    goal("requests/s ÷ the hand-written floor's", Bound::AtLeast(0.8), Unit::Ratio, |run| {
        rate(run, Contender::Gateway) / rate(run, Contender::Floor)
    }),
    goal("by scripts: requests/s ÷ the floor", Bound::AtLeast(0.6), Unit::Ratio, |run| {
        rate(run, Contender::GatewayLua) / rate(run, Contender::Floor)
    }),
    goal("requests/s ÷ fred's with a command per node, fenced", Bound::AtLeast(3.0), Unit::Ratio, |run| {
        rate(run, Contender::Gateway) / rate(run, Contender::FredFenced)
    }),
    goal("by scripts: requests/s ÷ fred, fenced", Bound::AtLeast(2.0), Unit::Ratio, |run| {
        rate(run, Contender::GatewayLua) / rate(run, Contender::FredFenced)
    }),
    goal("cycles/s by HTTP ÷ rslock's in-process", Bound::AtLeast(1.0), Unit::Ratio, |run| {
        rate(run, Contender::Gateway) / rate(run, Contender::Rslock)
    }),
    goal("gateway CPU per request ÷ the HTTP no-op's", Bound::AtMost(1.7), Unit::Ratio, |run| {
        cpu(run, Contender::Gateway) / cpu(run, Contender::Noop)
    }),
    goal("acquire p99, one of five masters stopped ÷ healthy", Bound::AtMost(1.2), Unit::Ratio, |run| {
        beside_its_twin(run, Workload::Stopped, p99)
    }),
    goal("acquire p99, one master 50 ms late ÷ healthy", Bound::AtMost(1.2), Unit::Ratio, |run| {
        beside_its_twin(run, Workload::Late, p99)
    }),
    goal("cycles/s, one of five masters stopped ÷ healthy", Bound::AtLeast(0.95), Unit::Ratio, |run| {
        beside_its_twin(run, Workload::Stopped, per_second)
    }),
    goal("cycles/s, one master 50 ms late ÷ healthy", Bound::AtLeast(0.95), Unit::Ratio, |run| {
        beside_its_twin(run, Workload::Late, per_second)
    }),
    goal("acquire p50 ÷ the round trip, 1 ms network, 1 connection", Bound::AtMost(1.3), Unit::Ratio, |run| {
        of_gateway(run, Workload::Network1msIdle, p50) / round_trip(run, Workload::Network1msIdle)
    }),
    goal("acquire p50 ÷ the round trip, 1 ms network, 64 connections", Bound::AtMost(2.0), Unit::Ratio, |run| {
        of_gateway(run, Workload::Network1ms, p50) / round_trip(run, Workload::Network1ms)
    }),
    goal("hand-offs/s of one lock, 64 waiters, one gateway", Bound::AtLeast(5_000.0), Unit::Count, |run| {
        known(run.contended.as_ref().and_then(|contended| contended.handoffs_per_second(LockContender::Waiting1)))
    }),
    goal("hand-offs/s of one lock, 64 waiters, two gateways", Bound::AtLeast(2_000.0), Unit::Count, |run| {
        known(run.contended.as_ref().and_then(|contended| contended.handoffs_per_second(LockContender::Waiting2)))
    }),
    goal("the smaller one's share of the grants, two gateways", Bound::AtLeast(0.25), Unit::Ratio, |run| {
        known(run.contended.as_ref().and_then(|contended| contended.smallest_share(LockContender::Waiting2)))
    }),
    goal("memory per waiting request, bytes", Bound::AtMost(8.0 * KIB), Unit::Count, |run| {
        known(run.waiters.as_ref().map(waiters::Report::bytes_per_waiting_request))
    }),
    goal("memory per idle connection, bytes", Bound::AtMost(16.0 * KIB), Unit::Count, |run| {
        known(run.waiters.as_ref().map(waiters::Report::bytes_per_idle_connection))
    }),
    // What people take for at once.
    goal("p99 of another client while 10,000 wait for 1,000 locks, ms", Bound::AtMost(100.0), Unit::Millis, |run| {
        known(run.waiters.as_ref().and_then(waiters::Report::probe_p99_ms_beside_ten_thousand))
    }),
    goal("requests/s, 10,000 names ÷ 1,000", FLAT, Unit::Ratio, |run| {
        beside_its_twin(run, Workload::Names10k, per_second)
    }),
    goal("requests/s, 100,000 names ÷ 1,000", FLAT, Unit::Ratio, |run| {
        beside_its_twin(run, Workload::Names100k, per_second)
    }),
    goal("requests/s, 1,000,000 names ÷ 1,000", FLAT, Unit::Ratio, |run| {
        beside_its_twin(run, Workload::Names1m, per_second)
    }),
    goal("requests/s, 100,000 locks held ÷ 1,000 held", FLAT, Unit::Ratio, |run| {
        beside_its_twin(run, Workload::Held100k, per_second)
    }),
];

struct Goal {
    figure: &'static str,
    bound: Bound,
    unit: Unit,
    /// Not a number when the run has not measured it.
    value: fn(&Report) -> f64,
}

const fn goal(figure: &'static str, bound: Bound, unit: Unit, value: fn(&Report) -> f64) -> Goal {
    Goal { figure, bound, unit, value }
}

#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

#[derive(Clone, Copy)]
enum Unit {
    Ratio,
    Count,
    Millis,
}

/// What a run says of one goal.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Outcome {
    figure: &'static str,
    goal: String,
    /// `None` when it was not measured.
    value: Option<f64>,
    met: Option<bool>,
}

pub(crate) fn judged(report: &Report) -> Judged<'_> {
    Judged { report, goals: judge(report), disturbed: report.noise() }
}

/// In the order of the table.
fn judge(run: &Report) -> Vec<Outcome> {
    GOALS.iter().map(|goal| goal.judge(run)).collect()
}

/// All goals, with a column for each run.
pub(crate) fn table(runs: &[&Report]) -> Table {
    let names: Vec<_> = (1..=runs.len()).map(|number| format!("run {number}")).collect();
    let mut titles = vec!["figure", "goal"];
    match names.as_slice() {
        [_] => titles.push("this run"),
        names => titles.extend(names.iter().map(String::as_str)),
    }
    let mut table = Table::new(&titles);
    for goal in &GOALS {
        let results = runs.iter().map(|run| {
            let Outcome { value, met, .. } = goal.judge(run);
            let value = value.map(|value| goal.unit.show(value));
            value.zip(met).map_or("not measured".into(), |(value, met)| match met {
                true => format!("{value}, met"),
                false => format!("{value}, **not met**"),
            })
        });
        table.row([goal.figure.into(), goal.bound.show(goal.unit)].into_iter().chain(results).collect());
    }
    table
}

/// A report and what follows from it: as JSON, and as the suite prints it.
#[derive(Serialize)]
pub(crate) struct Judged<'a> {
    #[serde(flatten)]
    report: &'a Report,
    goals: Vec<Outcome>,
    disturbed: Vec<String>,
}

impl Display for Judged<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let report = self.report;
        write!(f, "{report}")?;
        for reason in report.left_out.iter().chain(&report.failures) {
            writeln!(f, "NOT MEASURED: {reason}\n")?;
        }
        writeln!(f, "### goals\n\n{}", table(&[report]))?;
        let Settings { seconds, rounds, .. } = report.settings;
        writeln!(
            f,
            "{}; masters, contenders and load on one machine. {}. Medians of {rounds} × {seconds} s.",
            report.machine, report.source
        )?;
        if rounds < 2 {
            writeln!(f, "\nOne round only: nothing shows whether the figures can be had again.")?;
        }
        Ok(())
    }
}

impl Goal {
    fn judge(&self, run: &Report) -> Outcome {
        let value = Some((self.value)(run)).filter(|value| value.is_finite());
        Outcome {
            figure: self.figure,
            goal: self.bound.show(self.unit),
            value,
            met: value.map(|value| self.bound.holds(value)),
        }
    }
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bound) => value >= bound,
            Self::AtMost(bound) => value <= bound,
        }
    }

    fn show(self, unit: Unit) -> String {
        match self {
            Self::AtLeast(bound) => format!("≥ {}", unit.show(bound)),
            Self::AtMost(bound) => format!("≤ {}", unit.show(bound)),
        }
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Ratio => format!("{value:.2}"),
            Self::Count => thousands(value),
            Self::Millis => format!("{value:.1}"),
        }
    }
}

fn known(value: Option<f64>) -> f64 {
    value.unwrap_or(f64::NAN)
}

fn per_second(round: &Figures) -> Option<f64> {
    Some(round.requests_per_second)
}

fn p50(round: &Figures) -> Option<f64> {
    round.acquire.map(|latency| latency.p50_us)
}

fn p99(round: &Figures) -> Option<f64> {
    round.acquire.map(|latency| latency.p99_us)
}

fn of_gateway(run: &Report, workload: Workload, figure: fn(&Figures) -> Option<f64>) -> f64 {
    known(run.median(workload, Contender::Gateway, figure))
}

fn rate(run: &Report, contender: Contender) -> f64 {
    known(run.median(Workload::Uncontended, contender, per_second))
}

fn cpu(run: &Report, contender: Contender) -> f64 {
    known(run.median(Workload::Uncontended, contender, |round| Some(round.server_cpu_us)))
}

fn round_trip(run: &Report, workload: Workload) -> f64 {
    known(run.stage(workload).and_then(|stage| stage.round_trip_us))
}

fn beside_its_twin(run: &Report, workload: Workload, figure: fn(&Figures) -> Option<f64>) -> f64 {
    let entry = run.stage(workload).and_then(|stage| stage.entry(Contender::Gateway));
    known(entry.and_then(|entry| entry.beside_its_twin(figure)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::sample;
    use crate::report::{Entry, StageReport};

    /// A run in which these served so many requests a second, with a CPU time of 10 µs each.
    fn run(workload: Workload, rates: &[(Contender, &[f64])]) -> Report {
        let entry = |&(contender, rates): &(Contender, &[f64])| Entry {
            rounds: rates.iter().map(|&rate| sample::figures(rate)).collect(),
            ..Entry::new(contender)
        };
        sample::report(vec![StageReport { contenders: rates.iter().map(entry).collect(), ..sample::stage(workload) }])
    }

    fn outcome(run: &Report, figure: &str) -> Outcome {
        let mut found = judge(run).into_iter().filter(|outcome| outcome.figure.contains(figure));
        let outcome = found.next().expect("there is such a goal");
        assert_eq!(found.next(), None, "{figure} is ambiguous");
        outcome
    }

    #[test]
    fn medians_are_compared_and_the_bound_itself_is_good_enough() {
        let rates: [(Contender, &[f64]); 2] =
            [(Contender::Floor, &[100.0, 80.0, 400.0]), (Contender::Gateway, &[80.0, 1.0, 99.0])];
        let outcome = outcome(&run(Workload::Uncontended, &rates), "floor's");
        assert_eq!((outcome.value, outcome.met, outcome.goal.as_str()), (Some(0.8), Some(true), "≥ 0.80"));
    }

    #[test]
    fn a_bound_from_above_is_missed_above_it() {
        let mut run = run(Workload::Uncontended, &[(Contender::Noop, &[1.0]), (Contender::Gateway, &[1.0])]);
        assert_eq!(outcome(&run, "no-op's").met, Some(true));
        run.workloads[0].contenders[1].rounds[0].server_cpu_us = 17.1;
        assert_eq!(outcome(&run, "no-op's").met, Some(false));
    }

    #[test]
    fn what_was_left_out_is_neither_met_nor_missed() {
        let run = run(Workload::Names1k, &[(Contender::Gateway, &[10.0])]);
        for outcome in judge(&run) {
            assert_eq!((outcome.value, outcome.met), (None, None), "{}", outcome.figure);
        }
        assert!(table(&[&run]).to_string().contains("| ≥ 0.80 | not measured |"));
    }

    #[test]
    fn the_network_is_measured_against_its_own_round_trip() {
        let mut run = run(Workload::Network1msIdle, &[(Contender::Gateway, &[10.0])]);
        assert_eq!(outcome(&run, "1 connection").met, None, "the round trip is not known");
        run.workloads[0].round_trip_us = Some(800.0);
        let outcome = outcome(&run, "1 connection");
        assert_eq!((outcome.value, outcome.met), (Some(1.25), Some(true)));
    }

    #[test]
    fn a_machine_that_slows_down_between_rounds_changes_no_ratio_of_twins() {
        let mut run = run(Workload::Stopped, &[(Contender::Gateway, &[96.0, 48.0, 9.6])]);
        let figure = "cycles/s, one of five masters stopped";
        assert_eq!(outcome(&run, figure).met, None, "there was no twin");
        run.workloads[0].contenders[0].twin = [100.0, 50.0, 10.0].map(sample::figures).into();
        let judged = outcome(&run, figure);
        assert_eq!((judged.value, judged.met), (Some(0.96), Some(true)));
    }

    #[test]
    fn runs_stand_side_by_side() {
        let slow = run(Workload::Uncontended, &[(Contender::Rslock, &[100.0]), (Contender::Gateway, &[99.0])]);
        let fast = run(Workload::Uncontended, &[(Contender::Rslock, &[100.0]), (Contender::Gateway, &[130.0])]);
        let text = table(&[&slow, &fast]).to_string();
        assert!(text.contains("rslock's in-process | ≥ 1.00 | 0.99, **not met** | 1.30, met |"), "{text}");
    }

    #[test]
    fn what_is_written_can_be_read_again() {
        let report = run(Workload::Network1msIdle, &[(Contender::Gateway, &[50_000.0, 42_000.0, 50_000.0])]);
        let text = serde_json::to_string(&judged(&report)).expect("it can be written");
        assert!(text.contains(r#""workload":"network-1ms-idle""#) && text.contains(r#""goals":[{"#), "{text}");
        let read: Report = serde_json::from_str(&text).expect("it can be read");
        assert_eq!(judged(&read).to_string(), judged(&report).to_string());
    }
}
