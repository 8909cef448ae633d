//! Runs a model to its end or to a counter-example, and reports the result.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Debug};
use std::hash::Hash;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use stateright::report::{ReportData, ReportDiscovery, Reporter};
use stateright::{Checker, Expectation, HasDiscoveries, Model};

/// A model whose paths can be narrated.
pub trait Narrated: Model {
    /// One sentence for each step.
    fn narrate(&self, path: Vec<(Self::State, Option<Self::Action>)>) -> Vec<String>;
}

/// Reports each property once. If a property were reported again and again, the checker would keep
/// the last discovery, which has the longest path.
#[derive(Debug, Default)]
pub struct First(AtomicBool);

impl First {
    /// For a condition that must always hold: returns false only for the first violation.
    pub fn always(&self, holds: bool) -> bool {
        holds || self.0.swap(true, Ordering::Relaxed)
    }

    /// For a situation that must occur: returns true only for the first occurrence.
    pub fn sometimes(&self, holds: bool) -> bool {
        holds && !self.0.swap(true, Ordering::Relaxed)
    }
}

/// How far to explore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// Until all states are explored or any property is violated.
    Explored,
    /// Until this property is violated or all states are explored.
    Violated(&'static str),
}

/// The result of an exploration.
#[derive(Debug)]
pub struct ExplorationResult {
    /// Distinct states reached.
    pub states: usize,
    /// Transitions between states.
    pub steps: usize,
    /// Length of the longest path followed, in steps.
    pub depth: usize,
    pub took: Duration,
    /// Whether every state within the bounds was seen.
    pub complete: bool,
    /// Violated properties, each with the steps that lead there.
    pub violated: BTreeMap<&'static str, Vec<String>>,
    /// Situations that must occur, and whether each did.
    pub seen: BTreeMap<&'static str, bool>,
    /// Properties without a violation in the explored states.
    pub held: Vec<&'static str>,
}

/// Runs a model. With one thread the counter-example is a shortest one. More threads are faster,
/// but may find a longer one. With `progress` the checker's progress goes to stderr.
pub fn explore<M>(model: M, until: Until, threads: usize, progress: bool) -> ExplorationResult
where
    M: Narrated + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
    let properties = model.properties();
    let stop = match until {
        Until::Explored => HasDiscoveries::AnyFailures,
        Until::Violated(property) => HasDiscoveries::AllOf(BTreeSet::from([property])),
    };
    let begun = Instant::now();
    let mut progress_report =
        Progress { print: progress, violated: BTreeMap::new(), found: BTreeSet::new() };
    let checker = model
        .checker()
        .threads(threads)
        .finish_when(stop)
        .spawn_bfs()
        .join_and_report(&mut progress_report);
    let found = |name: &&str| progress_report.found.contains(name);
    let of = |wanted: Expectation| {
        properties.iter().filter(move |p| p.expectation == wanted).map(|p| p.name)
    };
    let stopped = match until {
        Until::Explored => !progress_report.violated.is_empty(),
        Until::Violated(property) => progress_report.violated.contains_key(property),
    };
    ExplorationResult {
        states: checker.unique_state_count(),
        steps: checker.state_count(),
        depth: checker.max_depth().saturating_sub(1),
        took: begun.elapsed(),
        complete: !stopped,
        seen: of(Expectation::Sometimes).map(|name| (name, found(&name))).collect(),
        held: of(Expectation::Always).filter(|name| !found(name)).collect(),
        violated: progress_report.violated,
    }
}

impl ExplorationResult {
    /// Whether all states were explored, no property is violated and all required situations
    /// occurred.
    pub fn is_good(&self) -> bool {
        self.complete && self.violated.is_empty() && self.seen.values().all(|seen| *seen)
    }
}

struct Progress {
    print: bool,
    violated: BTreeMap<&'static str, Vec<String>>,
    found: BTreeSet<&'static str>,
}

impl<M: Narrated> Reporter<M> for Progress {
    fn report_checking(&mut self, data: ReportData) {
        if self.print {
            let rate = data.unique_states as f64 / data.duration.as_secs_f64().max(0.001);
            eprintln!(
                "{:>12} states, {rate:>9.0} states/s, {:>3} steps deep",
                data.unique_states, data.max_depth
            );
        }
    }

    fn report_discoveries(
        &mut self,
        model: &M,
        discoveries: BTreeMap<&'static str, ReportDiscovery<M>>,
    ) where
        M::Action: Debug + PartialEq,
        M::State: Debug + Hash + PartialEq,
    {
        for (name, discovery) in discoveries {
            self.found.insert(name);
            if model.property(name).expectation == Expectation::Always {
                self.violated.insert(name, model.narrate(discovery.path.into_vec()));
            }
        }
    }

    fn delay(&self) -> Duration {
        Duration::from_millis(if self.print { 2_000 } else { 20 })
    }
}

impl fmt::Display for ExplorationResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.complete { "explored wholly" } else { "stopped at a violation" };
        let Self { states, steps, depth, took, .. } = self;
        writeln!(f, "{states} states, {steps} steps, {depth} steps deep, {took:.1?}: {how}")?;
        for name in &self.held {
            writeln!(f, "  {} {name}", if self.complete { "holds:   " } else { "so far:  " })?;
        }
        for (name, seen) in &self.seen {
            writeln!(f, "  {} {name}", if *seen { "seen:    " } else { "NOT SEEN:" })?;
        }
        for (name, story) in &self.violated {
            writeln!(f, "  VIOLATED: {name}")?;
            for (at, step) in story.iter().enumerate() {
                writeln!(f, "    {:>2}. {step}", at + 1)?;
            }
        }
        Ok(())
    }
}
