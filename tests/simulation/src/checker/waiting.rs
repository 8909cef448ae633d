//! Checks the promises to waiters: their order, and an answer in time. It also checks that no lock
//! stays free while a client waits for it, and that no grant remains for a client that has left.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::idle;
use super::violation::{Demand, PATIENCE, Violation, remembers};
use crate::history::{Answer, Grant, History, OpKind, Request, VoteKind};

/// How late an answer may come: 10 ms that the core allows a running attempt after the waiter's
/// patience, and 5 ms for the simulation's timers.
const GRACE: Duration = Duration::from_millis(10 + 5);
/// The longest round.
const ROUND: Duration = Duration::from_millis(800);
/// How many rounds an attempt takes at most: eight, if the masters store larger tokens, and two more
/// for slots.
const ROUNDS: u32 = 8 + 2;
/// How long a lock may stay free while a client waits. The longest pause between two polls is 800
/// ms. The rest allows for three things: the rounds themselves, votes split between gateways, and
/// the time that a lock lives on masters after its holder's deadline.
const LONGEST_IDLE: Duration = Duration::from_millis(1_150);

/// The grants to the waiters of one queue: for each ticket, the grant and its time.
type Served = BTreeMap<u64, (Grant, Duration)>;

pub(super) fn check(history: &History, found: &mut Vec<Violation>) {
    order(history, found);
    answered(history, found);
    idle_locks(history, found);
    unreported_grants(history, found);
}

/// A gateway process grants a lock to its waiters in the order in which they arrived. A request
/// whose owner already has the lock may skip the queue, so it does not count.
fn order(history: &History, found: &mut Vec<Violation>) {
    // By gateway, number of its process, and lock.
    let mut queues: BTreeMap<(u8, u16, u8), Served> = BTreeMap::new();
    for operation in &history.operations {
        let (Request::Acquire { owner: None, .. }, Some(Answer::Granted { grant, .. }), Some(end)) =
            (operation.request, operation.answer, operation.end)
        else {
            continue;
        };
        if let Some(ticket) = operation.waited.and_then(|waited| waited.ticket) {
            let queue = (operation.gateway, operation.process, operation.name);
            queues.entry(queue).or_default().insert(ticket, (grant, end.at));
        }
    }
    for ((gateway, _, name), queue) in queues {
        for ((ticket, (grant, _)), (later, (other, at))) in queue.iter().zip(queue.iter().skip(1)) {
            if other.fencing <= grant.fencing {
                let text = format!(
                    "g{gateway} gave lock-{name} to ticket {later} as {other}, to {ticket} as \
                     {grant}"
                );
                found.push(Violation { demand: Demand::Order, at: *at, text });
            }
        }
    }
}

/// Every waiter gets its answer in time. At the end no gateway counts a waiter any more.
fn answered(history: &History, found: &mut Vec<Violation>) {
    for operation in &history.operations {
        let Request::Acquire { owner, patience_ms: Some(patience), ttl_ms } = operation.request
        else {
            continue;
        };
        // Every request gets one whole attempt, however short its patience is. A round takes a
        // tenth of the TTL at most.
        let round = ROUND.min(Duration::from_millis(ttl_ms / 10));
        let attempt = ROUNDS * round + GRACE;
        // A request that names its owner may make one attempt before it enters the queue: it asks
        // whether the owner has the lock already.
        let attempts = if owner.is_some() { 2 } else { 1 };
        // An attempt for the owner's own grant may begin just before the wait ends, and gets its full
        // time. A request without an owner that has made no attempt makes one at the end of its wait.
        // That attempt takes one round.
        let last = if owner.is_some() { attempt } else { round + GRACE };
        let mut due =
            operation.start.at + (Duration::from_millis(patience) + last).max(attempts * attempt);
        // During a freeze no answer comes. Afterwards an attempt that was running may need its
        // whole time again.
        for (from, until) in &history.freezes {
            if *from <= due && *until >= operation.start.at {
                due += (*until - *from) + attempt;
            }
        }
        let end = operation.end.map_or(history.end, |end| end.at);
        if end > due {
            let what =
                if operation.end.is_some() { "got its answer late" } else { "got no answer" };
            let client = operation.client;
            let asked = operation.start.at.as_millis();
            let text = format!(
                "c{client}, which asked at {asked} ms and waits {patience} ms for lock-{}, {what}",
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

/// Without faults, a lock does not stay free while a client waits for it.
fn idle_locks(history: &History, found: &mut Vec<Violation>) {
    for gap in idle::gaps(history) {
        if gap.until - gap.from > LONGEST_IDLE && idle::is_calm(history, gap.from, gap.until) {
            let from = gap.from.as_millis();
            let length = (gap.until - gap.from).as_millis();
            let text = format!(
                "lock-{} is free from {from} ms on for {length} ms while a client waits",
                gap.name
            );
            found.push(Violation { demand: Demand::Idle, at: gap.until, text });
        }
    }
}

/// A gateway releases a grant whose client has left or got no answer. Owners that clients chose are
/// left out, because another request for such an owner may have been answered with the grant.
fn unreported_grants(history: &History, found: &mut Vec<Violation>) {
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
        let set = history.executions.iter().find(|execution| {
            let this = (execution.master, execution.name, execution.grant)
                == (left.master, left.name, Some(left.grant));
            this && execution.kind == OpKind::Acquire
                && execution.vote_kind == VoteKind::Granted
                && !execution.late
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
                "n{} still stores lock-{} {}, which no client was granted",
                left.master, left.name, left.grant
            );
            found.push(Violation { demand: Demand::Orphan, at: history.end, text });
        }
    }
}
