//! What the gateway is to reach, each a figure within one run, and whether a run says that it did. Pure: reads reports.
//!
//! A workload that was left out leaves its goals unmeasured, and a row that was disturbed says nothing of them; nothing
//! is taken from another run.

use crate::report::{Run, Unit, markdown};

const KIB: f64 = 1024.0;
/// Requests/s may differ by 15 % however many names or held locks there are.
const FLAT: Bound = Bound::AtLeast(0.85);
const GATEWAY: &str = "redlock-gateway";
const LUA: &str = "redlock-gateway, Lua";
const RATE: &str = "requests/s ÷ twin";
const P99: &str = "acquire p99 ms ÷ twin";
const P50: &str = "p50 ÷ round trip";
const HANDOFFS: &str = "handoffs/s";

/// A cycle is an acquire and a release, two requests, so ratios of cycles/s are ratios of requests/s.
#[rustfmt::skip]
const GOALS: [Goal; 22] = [
    goal("requests/s ÷ the hand-written floor's", Bound::AtLeast(0.8), Unit::Ratio, ["uncontended", GATEWAY, "÷ floor"]),
    goal("by scripts: requests/s ÷ the floor", Bound::AtLeast(0.6), Unit::Ratio, ["uncontended", LUA, "÷ floor"]),
    goal("requests/s ÷ fred's with a command per node, fenced", Bound::AtLeast(3.0), Unit::Ratio, ["uncontended", GATEWAY, "÷ fred fenced"]),
    goal("by scripts: requests/s ÷ fred, fenced", Bound::AtLeast(2.0), Unit::Ratio, ["uncontended", LUA, "÷ fred fenced"]),
    goal("cycles/s by HTTP ÷ rslock's in-process", Bound::AtLeast(1.0), Unit::Ratio, ["uncontended", GATEWAY, "÷ rslock"]),
    goal("gateway CPU per request ÷ the HTTP no-op's", Bound::AtMost(1.7), Unit::Ratio, ["uncontended", GATEWAY, "CPU ÷ no-op"]),
    goal("acquire p99, one of five masters stopped ÷ healthy", Bound::AtMost(1.2), Unit::Ratio, ["stopped", GATEWAY, P99]),
    goal("acquire p99, one master 50 ms late ÷ healthy", Bound::AtMost(1.2), Unit::Ratio, ["late", GATEWAY, P99]),
    goal("cycles/s, one of five masters stopped ÷ healthy", Bound::AtLeast(0.95), Unit::Ratio, ["stopped", GATEWAY, RATE]),
    goal("cycles/s, one master 50 ms late ÷ healthy", Bound::AtLeast(0.95), Unit::Ratio, ["late", GATEWAY, RATE]),
    goal("acquire p50 ÷ the round trip, 1 ms network, 1 connection", Bound::AtMost(1.3), Unit::Ratio, ["network-1ms-idle", GATEWAY, P50]),
    goal("acquire p50 ÷ the round trip, 1 ms network, 64 connections", Bound::AtMost(2.0), Unit::Ratio, ["network-1ms", GATEWAY, P50]),
    goal("handoffs/s of one lock, 64 waiters, one gateway", Bound::AtLeast(5_000.0), Unit::Count, ["contended", "waiting, 1 gateway", HANDOFFS]),
    goal("handoffs/s of one lock, 64 waiters, two gateways", Bound::AtLeast(2_000.0), Unit::Count, ["contended", "waiting, 2 gateways", HANDOFFS]),
    goal("the smaller one's share of the grants, two gateways", Bound::AtLeast(0.25), Unit::Ratio, ["contended", "waiting, 2 gateways", "smallest share"]),
    goal("memory per waiting request, bytes", Bound::AtMost(8.0 * KIB), Unit::Count, ["waiters", GATEWAY, "memory per waiting request, bytes"]),
    goal("memory per idle connection, bytes", Bound::AtMost(16.0 * KIB), Unit::Count, ["waiters", GATEWAY, "memory per idle connection, bytes"]),
    // What people take for at once.
    goal("p99 of another client while 10,000 wait for 1,000 locks, ms", Bound::AtMost(100.0), Unit::Micros, ["waiters", GATEWAY, "probe while 10,000 wait p99 ms"]),
    goal("requests/s, 10,000 names ÷ 1,000", FLAT, Unit::Ratio, ["names-10k", GATEWAY, RATE]),
    goal("requests/s, 100,000 names ÷ 1,000", FLAT, Unit::Ratio, ["names-100k", GATEWAY, RATE]),
    goal("requests/s, 1,000,000 names ÷ 1,000", FLAT, Unit::Ratio, ["names-1m", GATEWAY, RATE]),
    goal("requests/s, 100,000 locks held ÷ 1,000 held", FLAT, Unit::Ratio, ["held-100k", GATEWAY, RATE]),
];

struct Goal {
    text: &'static str,
    bound: Bound,
    unit: Unit,
    /// Table, row and figure.
    place: [&'static str; 3],
}

const fn goal(text: &'static str, bound: Bound, unit: Unit, place: [&'static str; 3]) -> Goal {
    Goal { text, bound, unit, place }
}

#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

/// All goals, with a column for each run.
pub(crate) fn table(runs: &[Run]) -> String {
    let names: Vec<_> = (1..=runs.len()).map(|number| format!("run {number}")).collect();
    let titles: Vec<_> =
        ["figure", "goal"].into_iter().chain(names.iter().map(String::as_str)).collect();
    let row = |goal: &Goal| {
        let bound = match goal.bound {
            Bound::AtLeast(bound) => format!("≥ {}", goal.unit.show(bound)),
            Bound::AtMost(bound) => format!("≤ {}", goal.unit.show(bound)),
        };
        [goal.text.to_owned(), bound]
            .into_iter()
            .chain(runs.iter().map(|run| goal.judge(run)))
            .collect()
    };
    markdown(&titles, GOALS.iter().map(row))
}

impl Goal {
    fn judge(&self, run: &Run) -> String {
        let [table, row, figure] = self.place;
        let found = run.table(table).and_then(|table| {
            let row = table.row(row)?;
            Some((table, row, row.figure(figure)?))
        });
        let Some((table, row, figure)) = found else { return "not measured".into() };
        if !table.is_fair(row, figure) {
            return "disturbed".into();
        }
        let value = figure.median();
        let met = match self.bound {
            Bound::AtLeast(bound) => value >= bound,
            Bound::AtMost(bound) => value <= bound,
        };
        format!("{}, {}", self.unit.show(value), if met { "met" } else { "**not met**" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{OTHERS, Row, Table};

    fn run(others: f64, samples: &[f64]) -> Run {
        let mut row = Row::new(GATEWAY);
        samples.iter().for_each(|&sample| row.add(RATE, Unit::Ratio, sample));
        row.add(OTHERS, Unit::Percent, others);
        let table = Table { name: "stopped".into(), rows: vec![row], ..Table::default() };
        Run { tables: vec![table], ..Run::default() }
    }

    #[test]
    fn medians_are_judged_the_bound_is_good_enough_and_what_was_disturbed_or_left_out_is_not_judged()
     {
        let text = table(&[run(0.0, &[0.95, 0.1, 3.0]), run(0.0, &[0.94]), run(50.0, &[2.0])]);
        let line = "| cycles/s, one of five masters stopped ÷ healthy | ≥ 0.95 | 0.95, met | 0.94, **not met** | disturbed |";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("| ≥ 0.80 | not measured | not measured | not measured |"), "{text}");
    }

    #[test]
    fn the_committed_page_has_these_goals() {
        let page = include_str!("../PERFORMANCE.md");
        let goals = |text: &str| -> Vec<String> {
            let lines = text.lines().skip_while(|line| !line.starts_with("| figure | goal |"));
            let cells = |line: &str| line.split(" | ").take(2).collect::<Vec<_>>().join(" | ");
            lines.skip(2).take_while(|line| line.starts_with('|')).map(cells).collect()
        };
        let ours: Vec<_> = goals(&table(&[Run::default()]));
        assert_eq!((ours.len(), goals(page)), (GOALS.len(), ours), "run `redlock-bench page`");
    }
}
