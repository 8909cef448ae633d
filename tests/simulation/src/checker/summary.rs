//! Counts the figures of a history that the checker does not judge.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::idle;
use crate::history::{Answer, Counts, History, Operation, Request};
use crate::time::EPOCH_MICROS;

/// The figures of one history, or of many.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    pub histories: u64,
    pub grants: u64,
    /// Granted answers that contained the grant of an earlier request.
    pub replays: u64,
    pub extensions: u64,
    /// Releases that the gateway confirmed.
    pub releases: u64,
    /// Operations executed on masters.
    pub executed: u64,
    /// Executed operations that came on a connection that their gateway had already given up.
    pub late: u64,
    /// Other counters.
    pub counts: Counts,
    /// How often each noteworthy situation occurred.
    pub situations: BTreeMap<&'static str, u64>,
    /// The longest time in which no acquire and no extension succeeded.
    pub longest_gap: Duration,
    /// The smallest and the largest T, in microseconds since the history began.
    pub tokens: Option<(i64, i64)>,
    /// Requests that waited, by outcome.
    pub waits: Waits,
    /// How many rounds each grant to a waiter took.
    pub rounds: Spread,
    /// Milliseconds from a release to the next grant while a client waited, in times without faults
    /// and in histories without lost hints.
    pub idle: Spread,
    /// The same milliseconds in histories that lose hints.
    pub idle_without_hints: Spread,
}

/// Requests that waited in a queue, by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Waits {
    pub granted: u64,
    /// The waiter's patience ended while another owner held the lock.
    pub held: u64,
    pub no_quorum: u64,
    /// The client disconnected.
    pub cancelled: u64,
    pub gateway_died: u64,
}

/// How often each value occurs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Spread(BTreeMap<u64, u64>);

impl Spread {
    fn add(&mut self, value: u64, times: u64) {
        *self.0.entry(value).or_default() += times;
    }

    /// The number of values.
    pub fn count(&self) -> u64 {
        self.0.values().sum()
    }

    /// The smallest value that at least `part` of a thousand values do not exceed.
    pub fn per_mille(&self, part: u64) -> Option<u64> {
        let wanted = (self.count() * part).div_ceil(1_000).max(1);
        let mut seen = 0;
        self.0.iter().find_map(|(value, times)| {
            seen += times;
            (seen >= wanted).then_some(*value)
        })
    }

    fn with(mut self, other: &Self) -> Self {
        other.0.iter().for_each(|(value, times)| self.add(*value, *times));
        self
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match [500, 990, 999, 1_000].map(|part| self.per_mille(part)) {
            [Some(half), Some(most), Some(nearly_all), Some(all)] => {
                write!(f, "median {half}, 99 % {most}, 99.9 % {nearly_all}, longest {all}")
            }
            _ => f.write_str("none"),
        }
    }
}

impl Summary {
    /// The figures of a history.
    pub fn of(history: &History) -> Self {
        let mut summary = Self {
            histories: 1,
            counts: history.counts,
            situations: history.situations.clone(),
            ..Self::default()
        };
        let mut last_success = Duration::ZERO;
        let mut ended: Vec<_> =
            history.operations.iter().filter_map(|op| Some((op.end?, op.answer?))).collect();
        ended.sort_by_key(|(end, _)| *end);
        for (end, answer) in ended {
            match answer {
                Answer::Granted { grant, replayed, .. } => {
                    summary.grants += 1;
                    summary.replays += u64::from(replayed);
                    let micros = grant.fencing as i64 - EPOCH_MICROS as i64;
                    summary.tokens =
                        Some(summary.tokens.map_or((micros, micros), |(low, high)| {
                            (low.min(micros), high.max(micros))
                        }));
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
        history.operations.iter().for_each(|operation| summary.wait(operation));
        for gap in idle::gaps(history)
            .iter()
            .filter(|gap| gap.between_holders && history.faults.is_empty())
        {
            let is_without_loss = history.counts.hints_lost == 0;
            let idle =
                if is_without_loss { &mut summary.idle } else { &mut summary.idle_without_hints };
            idle.add((gap.until - gap.from).as_millis() as u64, 1);
        }
        summary.executed = history.executions.len() as u64;
        summary.late = history.executions.iter().filter(|execution| execution.late).count() as u64;
        summary
    }

    fn wait(&mut self, operation: &Operation) {
        let Request::Acquire { patience_ms: Some(_), .. } = operation.request else { return };
        match operation.answer {
            Some(Answer::Granted { .. }) => self.waits.granted += 1,
            Some(Answer::Held) => self.waits.held += 1,
            Some(Answer::Cancelled) => self.waits.cancelled += 1,
            Some(Answer::GatewayDied) => self.waits.gateway_died += 1,
            Some(_) => self.waits.no_quorum += 1,
            None => {}
        }
        if let Some(waited) = operation.waited {
            self.rounds.add(u64::from(waited.rounds), 1);
        }
    }

    /// Adds the other summary's counts, and keeps the extremes of both summaries.
    pub fn add(&mut self, other: &Self) {
        let tokens = [self.tokens, other.tokens].into_iter().flatten();
        for (what, times) in &other.situations {
            *self.situations.entry(what).or_default() += times;
        }
        *self = Self {
            histories: self.histories + other.histories,
            grants: self.grants + other.grants,
            replays: self.replays + other.replays,
            extensions: self.extensions + other.extensions,
            releases: self.releases + other.releases,
            executed: self.executed + other.executed,
            late: self.late + other.late,
            counts: Counts {
                quarantines: self.counts.quarantines + other.counts.quarantines,
                admissions: self.counts.admissions + other.counts.admissions,
                repairs: self.counts.repairs + other.counts.repairs,
                faults: self.counts.faults + other.counts.faults,
                abandoned: self.counts.abandoned + other.counts.abandoned,
                handed_locally: self.counts.handed_locally + other.counts.handed_locally,
                handed_remotely: self.counts.handed_remotely + other.counts.handed_remotely,
                hints_sent: self.counts.hints_sent + other.counts.hints_sent,
                hints_lost: self.counts.hints_lost + other.counts.hints_lost,
            },
            waits: Waits {
                granted: self.waits.granted + other.waits.granted,
                held: self.waits.held + other.waits.held,
                no_quorum: self.waits.no_quorum + other.waits.no_quorum,
                cancelled: self.waits.cancelled + other.waits.cancelled,
                gateway_died: self.waits.gateway_died + other.waits.gateway_died,
            },
            situations: std::mem::take(&mut self.situations),
            rounds: std::mem::take(&mut self.rounds).with(&other.rounds),
            idle: std::mem::take(&mut self.idle).with(&other.idle),
            idle_without_hints: std::mem::take(&mut self.idle_without_hints)
                .with(&other.idle_without_hints),
            longest_gap: self.longest_gap.max(other.longest_gap),
            tokens: tokens.reduce(|(low, high), (l, h)| (low.min(l), high.max(h))),
        };
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { quarantines, admissions, repairs, faults, abandoned, .. } = self.counts;
        let Counts { handed_locally, handed_remotely, hints_sent, hints_lost, .. } = self.counts;
        let Waits { granted, held, no_quorum, cancelled, gateway_died } = self.waits;
        writeln!(f, "histories   {}", self.histories)?;
        let Self { grants, replays, extensions, releases, .. } = self;
        writeln!(
            f,
            "grants      {grants}, {replays} of them replayed; extensions {extensions}; \
             releases {releases}"
        )?;
        writeln!(
            f,
            "executed    {} operations on masters, {} of them late",
            self.executed, self.late
        )?;
        writeln!(
            f,
            "faults      {faults}; quarantines seen {quarantines}; admissions {admissions}"
        )?;
        writeln!(f, "repairs     {repairs}; releases given up {abandoned}")?;
        writeln!(
            f,
            "waits       granted {granted}, held {held}, no quorum {no_quorum}, disconnected \
             {cancelled}, gateway died {gateway_died}"
        )?;
        writeln!(
            f,
            "handoffs    local {handed_locally}, by a hint {handed_remotely}; hints \
             {hints_sent}, lost {hints_lost}"
        )?;
        writeln!(f, "rounds      of a waiter's grant: {}", self.rounds)?;
        writeln!(
            f,
            "idle        ms from release to grant: {}; with hints lost: {}",
            self.idle, self.idle_without_hints
        )?;
        writeln!(f, "longest gap {} ms without a success", self.longest_gap.as_millis())?;
        for (what, times) in &self.situations {
            writeln!(f, "situation   {what}: {times}")?;
        }
        match self.tokens {
            Some((low, high)) => write!(
                f,
                "tokens      from {} to {} ms since the beginning",
                low / 1000,
                high / 1000
            ),
            None => f.write_str("tokens      none"),
        }
    }
}
