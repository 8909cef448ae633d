//! What those who wait are promised: their order, an answer in time, a lock that does not stay free in front of them, and
//! no lock in the name of one who has left.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::idle;
use super::violation::{Demand, PATIENCE, Violation, remembers};
use crate::history::{Answer, Cast, Grant, History, Kind, Request};

/// What the core allows an attempt that is under way when a waiter's patience ends, and the ticks of the simulation's
/// timers.
const GRACE: Duration = Duration::from_millis(10 + 5);
/// Everybody is worth one whole attempt, however short its patience: eight rounds if the masters know of larger tokens.
const ATTEMPT: Duration = Duration::from_millis(8 * 50 + 15);
/// How long a lock may stay free: the longest pause between two polls is 800 ms. The rest is rounds, votes that are split
/// between gateways, and what masters let a lock live after its holder has stopped believing in it.
const LONGEST_IDLE: Duration = Duration::from_millis(1_150);

/// Grants to the waiters of one queue, with their moments, by ticket.
type Served = BTreeMap<u64, (Grant, Duration)>;

pub(super) fn check(history: &History, found: &mut Vec<Violation>) {
    order(history, found);
    answered(history, found);
    free(history, found);
    nobodys(history, found);
}

/// One process serves the waiters for a lock in the order in which they came. A request that names an owner which has the
/// lock already need not stand in the queue.
fn order(history: &History, found: &mut Vec<Violation>) {
    // By gateway, process and lock.
    let mut lines: BTreeMap<(u8, u16, u8), Served> = BTreeMap::new();
    for operation in &history.operations {
        let (Request::Acquire { owner: None, .. }, Some(Answer::Granted { grant, .. }), Some(end)) =
            (operation.request, operation.answer, operation.end)
        else {
            continue;
        };
        if let Some(ticket) = operation.waited.and_then(|waited| waited.ticket) {
            let line = (operation.gateway, operation.process, operation.name);
            lines.entry(line).or_default().insert(ticket, (grant, end.at));
        }
    }
    for ((gateway, _, name), line) in lines {
        for ((ticket, (grant, _)), (later, (other, at))) in line.iter().zip(line.iter().skip(1)) {
            if other.fencing <= grant.fencing {
                let text = format!(
                    "g{gateway} gave lock-{name} to ticket {later} as {other}, to {ticket} as {grant}"
                );
                found.push(Violation { demand: Demand::Order, at: *at, text });
            }
        }
    }
}

/// Everybody is answered in time, and nobody is left at the end.
fn answered(history: &History, found: &mut Vec<Violation>) {
    for operation in &history.operations {
        let Request::Acquire { owner, patience_ms: Some(patience), .. } = operation.request else {
            continue;
        };
        // A request that names an owner may ask for it before it enters the queue.
        let attempts = if owner.is_some() { 2 } else { 1 };
        let mut due =
            operation.start.at + (Duration::from_millis(patience) + GRACE).max(attempts * ATTEMPT);
        // Nothing is answered while everything stands still, and an attempt that was under way may go on after it.
        for (from, until) in &history.freezes {
            if *from <= due && *until >= operation.start.at {
                due += (*until - *from) + ATTEMPT;
            }
        }
        let end = operation.end.map_or(history.end, |end| end.at);
        if end > due {
            let what =
                if operation.end.is_some() { "was answered late" } else { "was never answered" };
            let client = operation.client;
            let asked = operation.start.at.as_millis();
            let text = format!(
                "c{client}, who asked at {asked} ms and waits {patience} ms for lock-{}, {what}",
                operation.name
            );
            found.push(Violation { demand: Demand::Answered, at: due, text });
        }
    }
    for left in history.remaining.iter().filter(|left| left.waiters > 0 || left.locks > 0) {
        let text = format!(
            "g{} still counts {} waiters for {} locks",
            left.gateway, left.waiters, left.locks
        );
        found.push(Violation { demand: Demand::Answered, at: history.end, text });
    }
}

/// While nothing is broken, a lock that somebody waits for does not stay free.
fn free(history: &History, found: &mut Vec<Violation>) {
    for gap in idle::gaps(history) {
        if gap.until - gap.from > LONGEST_IDLE && idle::is_calm(history, gap.from, gap.until) {
            let from = gap.from.as_millis();
            let length = (gap.until - gap.from).as_millis();
            let text = format!(
                "lock-{} is free from {from} ms on for {length} ms while somebody waits",
                gap.name
            );
            found.push(Violation { demand: Demand::Idle, at: gap.until, text });
        }
    }
}

/// A gateway takes back what it was granted for somebody who has left, or was never told. An owner that a client chose may
/// have been told before.
fn nobodys(history: &History, found: &mut Vec<Violation>) {
    let mut known: BTreeSet<(u8, u64)> = BTreeSet::new();
    for operation in &history.operations {
        if let Request::Acquire { owner: Some(owner), .. } = operation.request {
            known.insert((operation.name, owner));
        }
        if let Some(Answer::Granted { grant, .. }) = operation.answer {
            known.insert((operation.name, grant.owner));
        }
    }
    let long_ago = history.end.saturating_sub(PATIENCE);
    for left in
        history.leftovers.iter().filter(|left| !known.contains(&(left.name, left.grant.owner)))
    {
        let set = history.landings.iter().find(|landing| {
            let this = (landing.master, landing.name, landing.grant)
                == (left.master, left.name, Some(left.grant));
            this && landing.kind == Kind::Acquire && landing.cast == Cast::Granted && !landing.late
        });
        let Some(set) = set.filter(|set| remembers(history, left.master, set.moment)) else {
            continue;
        };
        let at = (set.gateway, left.master);
        let reach = history.reaches.iter().find(|reach| (reach.gateway, reach.master) == at);
        let able = |since: Duration| since <= long_ago;
        if reach.is_some_and(|reach| able(reach.admitted) && reach.started < set.moment.at)
            && able(set.moment.at)
        {
            let text = format!(
                "n{} still stores lock-{} {}, of which nobody was told",
                left.master, left.name, left.grant
            );
            found.push(Violation { demand: Demand::Orphan, at: history.end, text });
        }
    }
}
