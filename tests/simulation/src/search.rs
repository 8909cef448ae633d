//! Runs many seeds on all cores. Histories share nothing, so each thread takes the next seed when
//! it is free. The result does not depend on which thread ran which seed.

use std::num::NonZero;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::checker::{Demand, Summary, Violation};
use crate::plan::Plan;
use crate::run::run;

/// The result of a range of seeds.
#[derive(Debug, Default)]
pub struct Found {
    /// The summed figures of all histories.
    pub summary: Summary,
    /// The seeds whose histories violate a demand, in order, each with its first violation.
    pub violations: Vec<(u64, Violation)>,
}

/// Runs a history for every seed and looks for violations of `demands`. `progress` runs after each
/// history.
///
/// With `stop`, no further seed begins once a violation is found, and only the smallest seed with a
/// violation is reported. Seeds begin in order, so every smaller seed has been run by then. So the
/// result does not depend on the order in which threads finish.
pub fn search(
    seeds: Range<u64>,
    demands: &[Demand],
    stop: bool,
    plan: impl Fn(u64) -> Plan + Sync,
    progress: impl Fn(&Summary, usize) + Sync,
) -> Found {
    let next = AtomicU64::new(seeds.start);
    let stopped = AtomicBool::new(false);
    let found = Mutex::new(Found::default());
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    if stopped.load(Ordering::Relaxed) {
                        return;
                    }
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let outcome = run(&plan(seed));
                    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
                    found.summary.add(&Summary::of(&outcome.history));
                    if let Some(first) = outcome
                        .violations
                        .into_iter()
                        .find(|violation| demands.contains(&violation.demand))
                    {
                        found.violations.push((seed, first));
                        stopped.fetch_or(stop, Ordering::Relaxed);
                    }
                    progress(&found.summary, found.violations.len());
                }
            });
        }
    });
    let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    found.violations.sort_by_key(|(seed, _)| *seed);
    if stop {
        found.violations.truncate(1);
    }
    found
}
