//! What the victim got beside each attack and without it, as figures, a table, and goals.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use serde::Serialize;

use super::attacks::{Attack, Manner};
use super::service::Mode;
use super::victim::{Seen, Served};
use crate::report::{Machine, Source, Table, median, millis, thousands};

/// What the victim is to get of what it asks for.
const SHARE: f64 = 0.99;
/// What an attack may make of its p99.
const RATIO: f64 = 2.0;
const NOTHING: &str = "–";

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) source: Source,
    pub(super) seconds: u64,
    pub(super) rounds: u32,
    /// Of the attacker's process.
    pub(super) nice: i32,
    pub(super) rate: u32,
    pub(super) one_address: bool,
    pub(super) rows: Vec<Row>,
    pub(super) failures: Vec<String>,
}

/// One attack: turns with it and without it, one after the other.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) mode: Mode,
    pub(super) attack: Attack,
    pub(super) calm: Vec<Turn>,
    pub(super) attacked: Vec<Turn>,
}

#[derive(Debug, Serialize)]
pub(super) struct Turn {
    pub(super) acquires: Figures,
    pub(super) extensions: Figures,
    pub(super) lost: u64,
    pub(super) otherwise: BTreeMap<String, u64>,
    /// CPU time of gateway, masters and attacker, in cores.
    pub(super) cores: [f64; 3],
    pub(super) gateway_peak_mib: f64,
    pub(super) attacker: Option<Got>,
}

/// `None` where nothing succeeded.
#[derive(Debug, Serialize)]
pub(super) struct Figures {
    due: u64,
    share: f64,
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
}

/// What the attacker got.
#[derive(Debug, Default, Serialize)]
pub(super) struct Got {
    pub(super) is_ready: bool,
    pub(super) holding: u32,
    pub(super) per_second: BTreeMap<String, f64>,
}

impl From<&Served> for Figures {
    fn from(served: &Served) -> Self {
        let read = |share| served.latency.percentile(share).map(millis);
        Self { due: served.due, share: served.share(), p50_ms: read(0.5), p99_ms: read(0.99) }
    }
}

impl Turn {
    pub(super) fn new(seen: &Seen, cores: [f64; 3], gateway_peak_mib: f64, attacker: Option<Got>) -> Self {
        let (acquires, extensions) = ((&seen.acquires).into(), (&seen.extensions).into());
        let (lost, otherwise) = (seen.lost, seen.otherwise.clone());
        Self { acquires, extensions, lost, otherwise, cores, gateway_peak_mib, attacker }
    }
}

impl Display for Turn {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let show = |value: Option<f64>| value.map_or(NOTHING.into(), |value| format!("{value:.1}"));
        f.write_str(if self.attacker.is_some() { "attacked" } else { "calm    " })?;
        for (kind, Figures { share, p99_ms, .. }) in [("acquires", &self.acquires), ("extensions", &self.extensions)] {
            write!(f, ", {kind} {:.1} % p99 {} ms", share * 100.0, show(*p99_ms))?;
        }
        write!(f, ", {} lost", self.lost)
    }
}

type Kind = fn(&Turn) -> &Figures;
const KINDS: [Kind; 2] = [|turn| &turn.acquires, |turn| &turn.extensions];

/// Of all turns together: one that failed must not hide behind two that did not.
fn share(turns: &[Turn], kind: Kind) -> f64 {
    let due: u64 = turns.iter().map(|turn| kind(turn).due).sum();
    turns.iter().map(|turn| kind(turn).share * kind(turn).due as f64).sum::<f64>() / due.max(1) as f64
}

/// The median over the turns in which anything succeeded.
fn middle(turns: &[Turn], figure: impl Fn(&Turn) -> Option<f64>) -> Option<f64> {
    let values: Vec<_> = turns.iter().filter_map(figure).collect();
    (!values.is_empty()).then(|| median(values))
}

impl Row {
    fn ratio(&self, kind: Kind) -> Option<f64> {
        let p99 = |turns| middle(turns, |turn| kind(turn).p99_ms);
        Some(p99(&self.attacked)? / p99(&self.calm)?)
    }

    /// What is missed.
    fn missed(&self) -> Vec<&'static str> {
        let served = KINDS.iter().all(|&kind| share(&self.attacked, kind) >= SHARE);
        let soon = KINDS.iter().all(|&kind| self.ratio(kind).is_some_and(|ratio| ratio <= RATIO));
        [(served, "success"), (soon, "p99")].into_iter().filter(|(met, _)| !met).map(|(_, what)| what).collect()
    }

    fn cells(&self) -> Vec<String> {
        let (calm, attacked) = (&self.calm, &self.attacked);
        let percent = |kind| format!("{:.1}", (share(attacked, kind) * 1000.0).floor() / 10.0);
        let latency = |turns: &[Turn], kind: Kind| {
            let show = |value: Option<f64>| value.map_or(NOTHING.into(), |value| format!("{value:.1}"));
            let [p50, p99] = [middle(turns, |turn| kind(turn).p50_ms), middle(turns, |turn| kind(turn).p99_ms)];
            format!("{} / {}", show(p50), show(p99))
        };
        let both = |text: &dyn Fn(Kind) -> String| KINDS.map(text).join("; ");
        let ratio = |kind| self.ratio(kind).map_or(NOTHING.into(), |ratio| format!("{ratio:.1}"));
        let noise = calm.iter().map(|turn| turn.acquires.p99_ms.map_or(NOTHING.into(), |p99| format!("{p99:.1}")));
        let cores = [0, 1, 2].map(|at| format!("{:.1}", middle(attacked, |turn| Some(turn.cores[at])).unwrap_or(0.0)));
        let peak = attacked.iter().map(|turn| turn.gateway_peak_mib).fold(0.0, f64::max);
        let missed = self.missed();
        let control = if self.attack.needs().issue == 0 { "control, " } else { "" };
        vec![
            self.attack.name(),
            self.attacker(),
            percent(KINDS[0]),
            percent(KINDS[1]),
            attacked.iter().map(|turn| turn.lost).sum::<u64>().to_string(),
            both(&|kind| latency(attacked, kind)),
            both(&|kind| latency(calm, kind)),
            both(&ratio),
            noise.collect::<Vec<_>>().join(" "),
            cores.join(" / "),
            format!("{peak:.0}"),
            if missed.is_empty() {
                format!("{control}met")
            } else {
                format!("{control}**{} missed**", missed.join(", "))
            },
        ]
    }

    fn attacker(&self) -> String {
        let got: Vec<_> = self.attacked.iter().filter_map(|turn| turn.attacker.as_ref()).collect();
        let mut answers: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (what, rate) in got.iter().flat_map(|got| &got.per_second) {
            answers.entry(what).or_default().push(*rate);
        }
        let mut words = Vec::new();
        let needs = self.attack.needs();
        if matches!(needs.manner, Manner::Stay | Manner::Wait) {
            let holding = median(got.iter().map(|got| f64::from(got.holding)).collect());
            words.push(format!("{} of {} open", thousands(holding), thousands(f64::from(needs.connections))));
        }
        let rate = |rates: Vec<f64>| rates.iter().sum::<f64>() / self.attacked.len() as f64;
        words.extend(answers.into_iter().map(|(what, rates)| format!("{what} {}/s", thousands(rate(rates)))));
        if got.iter().any(|got| !got.is_ready) {
            words.push("not all connections had their turn".into());
        }
        if words.is_empty() { NOTHING.into() } else { words.join(", ") }
    }

    fn otherwise(turns: &[Turn]) -> String {
        let mut all: BTreeMap<&str, u64> = BTreeMap::new();
        for (what, count) in turns.iter().flat_map(|turn| &turn.otherwise) {
            *all.entry(what).or_default() += count;
        }
        all.iter().map(|(what, count)| format!("{what} ×{count}")).collect::<Vec<_>>().join(", ")
    }
}

impl Report {
    /// A goal that is missed is a figure. A victim that gets nothing without any attacker makes the run worthless.
    pub(super) fn verdict(&self) -> Result<(), String> {
        let calm = |row: &&Row| KINDS.iter().any(|&kind| share(&row.calm, kind) < SHARE);
        let failures = self.rows.iter().filter(calm).map(|row| {
            format!("{}: without an attacker the victim saw {}", row.attack.name(), Row::otherwise(&row.calm))
        });
        let failures: Vec<_> = self.failures.iter().cloned().chain(failures).collect();
        if failures.is_empty() { Ok(()) } else { Err(failures.join("; ")) }
    }

    fn calm_noise(&self) -> String {
        let mut all: Vec<_> =
            self.rows.iter().flat_map(|row| &row.calm).filter_map(|turn| turn.acquires.p99_ms).collect();
        all.sort_unstable_by(f64::total_cmp);
        match (all.first(), all.last()) {
            (Some(least), Some(most)) => {
                format!("{least:.1} to {most:.1} ms, median {:.1}, of {} turns", median(all.clone()), all.len())
            }
            _ => "not measured".into(),
        }
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let titles = [
            "attack",
            "attacker got",
            "acquires, %",
            "extensions, %",
            "locks lost",
            "p50 / p99 ms: acquire; extend",
            "calm",
            "p99 ÷ calm",
            "calm p99 of each round",
            "cores: gateway / masters / attacker",
            "gateway MiB",
            "goal",
        ];
        for mode in [Mode::Keys, Mode::Anonymous] {
            let rows: Vec<_> = self.rows.iter().filter(|row| row.mode == mode).collect();
            if rows.is_empty() {
                continue;
            }
            let mut table = Table::new(&titles);
            rows.iter().for_each(|row| table.row(row.cells()));
            let title = if mode == Mode::Keys { "with keys" } else { "without keys, clients told apart by address" };
            writeln!(f, "### {title}\n\n{table}")?;
            for row in rows {
                let otherwise = Row::otherwise(&row.attacked);
                if !otherwise.is_empty() {
                    writeln!(f, "- {}: the victim saw {otherwise}", row.attack.name())?;
                }
            }
            writeln!(f)?;
        }
        let rate = if self.rate == 0 { "as fast as it can".into() } else { format!("at most {} tries/s", self.rate) };
        let from = if self.one_address { "the victim's address" } else { "another address" };
        writeln!(
            f,
            "Goal: acquires and extensions ≥ {:.0} %, p99 of each ≤ {RATIO} × that of the calm turns. Attacker: nice {}, \
             {rate}, from {from}. Medians of {} × {} s, calm and attacked turns side by side on two services of one kind. \
             p99 of acquires in calm turns: {}. Masters, gateway, victim and attacker on one machine: {}; {}.",
            SHARE * 100.0,
            self.nice,
            self.rounds,
            self.seconds,
            self.calm_noise(),
            self.machine,
            self.source
        )?;
        self.failures.iter().try_for_each(|failure| writeln!(f, "\nFAULT: {failure}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(share: f64, p99: Option<f64>) -> Turn {
        let figures = || Figures { due: 100, share, p50_ms: p99, p99_ms: p99 };
        let (acquires, extensions) = (figures(), figures());
        let (cores, gateway_peak_mib) = ([0.0; 3], 0.0);
        Turn { acquires, extensions, lost: 0, otherwise: [].into(), cores, gateway_peak_mib, attacker: None }
    }

    fn row(attacked: Vec<Turn>) -> Row {
        Row { mode: Mode::Keys, attack: Attack::Get, calm: vec![turn(1.0, Some(2.0))], attacked }
    }

    #[test]
    fn both_goals_are_judged_and_a_round_without_any_success_is_not_left_out() {
        assert_eq!(row(vec![turn(1.0, Some(4.0))]).missed(), [""; 0]);
        assert_eq!(row(vec![turn(0.98, Some(4.1))]).missed(), ["success", "p99"]);
        assert_eq!(row(vec![turn(1.0, Some(2.0)), turn(1.0, Some(2.0)), turn(0.0, None)]).missed(), ["success"]);
        assert_eq!(row(vec![turn(0.0, None)]).missed(), ["success", "p99"]);
    }

    #[test]
    fn a_victim_that_fails_without_an_attacker_fails_the_run() {
        let mut rows = vec![row(vec![turn(0.0, None)])];
        let report = |rows| Report {
            machine: Machine::look().unwrap(),
            source: Source::look(),
            seconds: 1,
            rounds: 1,
            nice: 10,
            rate: 0,
            one_address: false,
            rows,
            failures: Vec::new(),
        };
        assert_eq!(report(rows).verdict(), Ok(()));
        rows = vec![row(vec![])];
        rows[0].calm[0].acquires.share = 0.5;
        assert!(report(rows).verdict().is_err());
    }
}
