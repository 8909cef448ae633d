//! What is counted and not judged.

use std::fmt;
use std::time::Duration;

use crate::history::{Answer, Counts, History};
use crate::time::EPOCH_MICROS;

/// The figures of one history, or of many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Histories.
    pub histories: u64,
    /// Successful acquires.
    pub grants: u64,
    /// Successful extensions.
    pub extensions: u64,
    /// Releases that the gateway confirmed.
    pub releases: u64,
    /// Operations executed on masters.
    pub executed: u64,
    /// Of these, on connections that their gateway had given up.
    pub late: u64,
    /// What else was counted.
    pub counts: Counts,
    /// The longest time without a successful acquire or extension.
    pub longest_gap: Duration,
    /// The smallest and largest T, in microseconds since the beginning.
    pub tokens: Option<(i64, i64)>,
}

impl Summary {
    /// The figures of a history.
    pub fn of(history: &History) -> Self {
        let mut summary = Self { histories: 1, counts: history.counts, ..Self::default() };
        let mut last_success = Duration::ZERO;
        let mut ended: Vec<_> = history.operations.iter().filter_map(|op| Some((op.end?, op.answer?))).collect();
        ended.sort_by_key(|(end, _)| *end);
        for (end, answer) in ended {
            match answer {
                Answer::Granted { grant, .. } => {
                    summary.grants += 1;
                    let micros = grant.fencing as i64 - EPOCH_MICROS as i64;
                    summary.tokens = Some(
                        summary.tokens.map_or((micros, micros), |(low, high)| (low.min(micros), high.max(micros))),
                    );
                }
                Answer::Extended { .. } => summary.extensions += 1,
                Answer::Released => {
                    summary.releases += 1;
                    continue;
                }
                _ => continue,
            }
            summary.longest_gap = summary.longest_gap.max(end.at.saturating_sub(last_success));
            last_success = end.at;
        }
        summary.executed = history.landings.len() as u64;
        summary.late = history.landings.iter().filter(|landing| landing.late).count() as u64;
        summary
    }

    /// Both together.
    pub fn add(&mut self, other: &Self) {
        let tokens = [self.tokens, other.tokens].into_iter().flatten();
        *self = Self {
            histories: self.histories + other.histories,
            grants: self.grants + other.grants,
            extensions: self.extensions + other.extensions,
            releases: self.releases + other.releases,
            executed: self.executed + other.executed,
            late: self.late + other.late,
            counts: Counts {
                quarantines: self.counts.quarantines + other.counts.quarantines,
                admissions: self.counts.admissions + other.counts.admissions,
                heals: self.counts.heals + other.counts.heals,
                faults: self.counts.faults + other.counts.faults,
                abandoned: self.counts.abandoned + other.counts.abandoned,
            },
            longest_gap: self.longest_gap.max(other.longest_gap),
            tokens: tokens.reduce(|(low, high), (l, h)| (low.min(l), high.max(h))),
        };
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { quarantines, admissions, heals, faults, abandoned } = self.counts;
        writeln!(f, "histories   {}", self.histories)?;
        writeln!(f, "grants      {}; extensions {}; releases {}", self.grants, self.extensions, self.releases)?;
        writeln!(f, "executed    {} operations on masters, {} of them late", self.executed, self.late)?;
        writeln!(f, "faults      {faults}; quarantines seen {quarantines}; admissions {admissions}")?;
        writeln!(f, "heals       {heals}; releases given up {abandoned}")?;
        writeln!(f, "longest gap {} ms without a success", self.longest_gap.as_millis())?;
        match self.tokens {
            Some((low, high)) => write!(f, "tokens      from {} to {} ms since the beginning", low / 1000, high / 1000),
            None => f.write_str("tokens      none"),
        }
    }
}
