//! The judge: it reads a recorded history and knows nothing of its origin.
//!
//! These are the promises of `crates/redlock-core` that it demands:
//!
//! 1. *Exclusion*: no two owners hold one lock at the same time. A hold lasts from the answer to
//!    the client's own deadline, or until it sends a release. A successful extension prolongs it.
//! 2. *Fencing*: the T of a grant is larger than the T of every grant of that lock that was
//!    answered before this request was sent.
//! 3. *Register*: a register refuses smaller tokens. So once the successor of a holder has written,
//!    no write of that holder is taken. No write of the rightful holder is refused.
//! 4. *Orphans*: once a master has executed a release of an owner's T, it sets no lock of that
//!    owner with this or an older T. It stores no such lock either, unless it has lost the release
//!    with its data. A gateway delivers a release to every master that it can reach. If a client
//!    left without an answer, its lock ends.
//! 5. *Extension*: between a grant and each of its successful extensions, no other owner got the
//!    lock.
//! 6. *Kept* (only in histories whose faults can be survived): a lock that was always extended in
//!    time is not lost.
//! 7. *Order*: of two waiters for a lock in one process, the one that came first gets the smaller
//!    T.
//! 8. *Answered*: a waiter gets its answer when its patience ends, or sooner. At the end no process
//!    counts waiters.
//! 9. *Promised*: an answer is not undone by another request for the same owner. A request is not
//!    answered `Held` if its own owner holds the lock for the whole request.
//! 10. *Idle*: without faults, a lock for which clients wait is not free for longer than a poll
//!     takes.
//!
//! [`Summary`] counts everything else.

mod by_name;
mod idle;
mod summary;
mod violation;
mod waiting;

use std::collections::BTreeMap;
use std::time::Duration;

use self::by_name::Locks;
pub use self::summary::Summary;
pub use self::violation::{Demand, Violation};
use self::violation::{PATIENCE, remembers};
use crate::history::{Answer, Execution, Grant, History, Moment, OpKind, Request, VoteKind};

/// All violations in a history, in order of time.
pub fn check(history: &History) -> Vec<Violation> {
    let mut found = Vec::new();
    for (name, locks) in by_name::split(history) {
        exclusion(name, &locks, &mut found);
        foreign(history, name, &locks, &mut found);
        fencing(name, &locks, &mut found);
        register(name, &locks, &mut found);
        extension(name, &locks, &mut found);
    }
    orphans(history, &mut found);
    undelivered_releases(history, &mut found);
    extended_locks_are_kept(history, &mut found);
    answers_stand(history, &mut found);
    holders_are_not_refused(history, &mut found);
    waiting::check(history, &mut found);
    found.sort_by_key(|violation| (violation.at, violation.demand));
    found
}

fn exclusion(name: u8, locks: &Locks, found: &mut Vec<Violation>) {
    let mut open: Vec<&by_name::Hold> = Vec::new();
    for hold in &locks.holds {
        open.retain(|earlier| earlier.until > hold.from.at);
        for earlier in open.iter().filter(|earlier| earlier.grant.owner != hold.grant.owner) {
            let text = format!(
                "lock-{name} is held by {} until {:.1} ms and by {}",
                earlier.grant,
                earlier.until.as_secs_f64() * 1000.0,
                hold.grant
            );
            found.push(Violation { demand: Demand::Exclusion, at: hold.from.at, text });
        }
        open.push(hold);
    }
}

/// A client of another Redlock library never holds a lock together with one of ours.
fn foreign(history: &History, name: u8, locks: &Locks, found: &mut Vec<Violation>) {
    for theirs in history.foreign.iter().filter(|theirs| theirs.name == name) {
        let at_once =
            |hold: &&by_name::Hold| hold.from.at < theirs.until.at && theirs.from.at < hold.until;
        for hold in locks.holds.iter().filter(at_once) {
            let from = theirs.from.at.as_millis();
            let until = theirs.until.at.as_millis();
            let text = format!(
                "lock-{name} is held by a foreign client from {from} to {until} ms and by {}",
                hold.grant
            );
            found.push(Violation {
                demand: Demand::Exclusion,
                at: hold.from.at.max(theirs.from.at),
                text,
            });
        }
    }
}

fn fencing(name: u8, locks: &Locks, found: &mut Vec<Violation>) {
    let mut by_start: Vec<_> = locks.granted.iter().collect();
    by_start.sort_by_key(|granted| granted.asked);
    let mut answered = locks.granted.iter().peekable();
    let mut largest: Option<Grant> = None;
    for later in by_start {
        while let Some(earlier) = answered.next_if(|earlier| earlier.answered < later.asked) {
            largest = Some(
                largest
                    .filter(|grant| grant.fencing >= earlier.grant.fencing)
                    .unwrap_or(earlier.grant),
            );
        }
        let again = |earlier: &Grant| later.replayed && *earlier == later.grant;
        if let Some(earlier) =
            largest.filter(|earlier| earlier.fencing >= later.grant.fencing && !again(earlier))
        {
            let text = format!(
                "lock-{name}: {} was answered before the request for {} was sent",
                earlier, later.grant
            );
            found.push(Violation { demand: Demand::Fencing, at: later.answered.at, text });
        }
    }
}

fn register(name: u8, locks: &Locks, found: &mut Vec<Violation>) {
    let answered = |grant: Grant| {
        locks.granted.iter().find(|granted| granted.grant == grant).map(|g| g.answered)
    };
    // The latest grant whose write was taken.
    let mut latest: Option<(Moment, Grant)> = None;
    for write in &locks.writes {
        let Some(by) = answered(write.grant) else { continue };
        if write.accepted {
            match latest {
                Some((since, holder)) if since > by && holder.owner != write.grant.owner => {
                    let text = format!(
                        "register-{name} takes a write of {} after one of {holder}",
                        write.grant
                    );
                    found.push(Violation { demand: Demand::Register, at: write.moment.at, text });
                }
                Some((since, _)) if since >= by => {}
                _ => latest = Some((by, write.grant)),
            }
        } else if locks
            .holds
            .iter()
            .any(|hold| hold.grant == write.grant && hold.contains(write.moment))
        {
            let text =
                format!("register-{name} refuses a write of {}, which holds the lock", write.grant);
            found.push(Violation { demand: Demand::Register, at: write.moment.at, text });
        }
    }
}

fn extension(name: u8, locks: &Locks, found: &mut Vec<Violation>) {
    for (grant, at) in &locks.extended {
        let Some(own) = locks.granted.iter().find(|granted| granted.grant == *grant) else {
            continue;
        };
        let between =
            |other: &&by_name::Granted| own.answered < other.answered && other.answered < *at;
        let mut others = locks.granted.iter().filter(|other| other.grant.owner != grant.owner);
        if let Some(other) = others.rfind(between) {
            let text = format!(
                "lock-{name}: {grant} was extended although {} was granted in between",
                other.grant
            );
            found.push(Violation { demand: Demand::Extension, at: at.at, text });
        }
    }
}

fn orphans(history: &History, found: &mut Vec<Violation>) {
    let mut released: BTreeMap<(u8, u8, u64), Execution> = BTreeMap::new();
    let mut undone: BTreeMap<(u8, u8, Grant), Execution> = BTreeMap::new();
    for execution in &history.executions {
        let Some(grant) = execution.grant else { continue };
        let key = (execution.master, execution.name, grant.owner);
        let before = released.get(&key).filter(|release| covers(release, grant));
        match (execution.kind, execution.vote_kind) {
            (OpKind::Release, VoteKind::Released | VoteKind::Missing | VoteKind::Held)
                if before.is_none() =>
            {
                released.insert(key, *execution);
            }
            (OpKind::Undo, VoteKind::Released | VoteKind::Missing | VoteKind::Held) => {
                undone.insert((execution.master, execution.name, grant), *execution);
            }
            (OpKind::Acquire | OpKind::Repair, VoteKind::Granted) => {
                // Another request may have confirmed the grant, and its repair sets the lock again
                // rightly. Only an acquire that arrives after its own undo is wrong.
                let undo = undone.get(&(execution.master, execution.name, grant));
                if let (OpKind::Acquire, Some(undo)) = (execution.kind, undo) {
                    let text = format!(
                        "n{} sets lock-{} {grant} again after its undo at {} ms, which it \
                         answered with {:?}",
                        execution.master,
                        execution.name,
                        undo.moment.at.as_millis(),
                        undo.vote_kind
                    );
                    found.push(Violation { demand: Demand::Orphan, at: execution.moment.at, text });
                }
                if let Some(release) = before {
                    let text = format!(
                        "n{} sets lock-{} {grant} again after a release at {} ms, which it answered with {:?} when that T \
                         was {} ms ahead of its time",
                        execution.master,
                        execution.name,
                        release.moment.at.as_millis(),
                        release.vote_kind,
                        release.ahead_micros / 1000
                    );
                    found.push(Violation { demand: Demand::Orphan, at: execution.moment.at, text });
                }
            }
            _ => {}
        }
    }
    let end = history.executions.last().map_or(Duration::ZERO, |execution| execution.moment.at);
    for left in &history.leftovers {
        let release = released.get(&(left.master, left.name, left.grant.owner));
        let stands = |release: &&Execution| remembers(history, left.master, release.moment);
        if release.filter(stands).is_some_and(|release| covers(release, left.grant)) {
            let text = format!(
                "n{} still stores lock-{} {} after a release",
                left.master, left.name, left.grant
            );
            found.push(Violation { demand: Demand::Orphan, at: end, text });
        }
    }
}

/// A gateway delivers a release as soon as the master is reachable.
fn undelivered_releases(history: &History, found: &mut Vec<Violation>) {
    let long_ago = history.end.saturating_sub(PATIENCE);
    let due = |since: Duration| since <= long_ago;
    for left in &history.leftovers {
        let by = |gateway| {
            history
                .reaches
                .iter()
                .find(|reach| (reach.gateway, reach.master) == (gateway, left.master))
        };
        let sent = history
            .operations
            .iter()
            .filter(|sent| sent.name == left.name && due(sent.start.at))
            .find(|sent| {
                let Request::Release { grant } = sent.request else { return false };
                let covers = grant.owner == left.grant.owner && grant.fencing >= left.grant.fencing;
                covers
                    && remembers(history, left.master, sent.start)
                    && by(sent.gateway)
                        .is_some_and(|reach| due(reach.admitted) && reach.started < sent.start.at)
            });
        if let Some(sent) = sent {
            let text = format!(
                "n{} still stores lock-{} {}, though g{} could have delivered its release, sent \
                 at {} ms",
                left.master,
                left.name,
                left.grant,
                sent.gateway,
                sent.start.at.as_millis()
            );
            found.push(Violation { demand: Demand::Orphan, at: history.end, text });
        }
    }
}

fn covers(release: &Execution, grant: Grant) -> bool {
    release.grant.is_some_and(|released| released.fencing >= grant.fencing)
}

/// In these histories clients extend their locks in time, so no extension may find its lock gone.
/// An extension that was sent after the deadline does not count, because the lock may have been
/// lost before.
fn extended_locks_are_kept(history: &History, found: &mut Vec<Violation>) {
    for operation in &history.operations {
        let (Some(end), Some(answer)) = (operation.end, operation.answer) else { continue };
        if let (Request::Extend { grant, .. }, Answer::Lost | Answer::NotHolder) =
            (operation.request, answer)
            && operation.keeps
        {
            let text = format!("lock-{} {grant} was extended in time and is lost", operation.name);
            found.push(Violation { demand: Demand::Kept, at: end.at, text });
        }
    }
}

/// No other request for the same owner undoes an answer. If no data is lost, a holder that asks
/// before its deadline is never answered that its lock is gone.
fn answers_stand(history: &History, found: &mut Vec<Violation>) {
    let is_quiet = |by: Moment| {
        history.faults.is_empty() && !history.losses.iter().any(|(lost, _)| *lost < by)
    };
    for (name, locks) in by_name::split(history) {
        for asked in history.operations.iter().filter(|asked| asked.name == name) {
            let (Request::Extend { grant, .. }, Some(answered)) = (asked.request, asked.end) else {
                continue;
            };
            let gone = matches!(asked.answer, Some(Answer::Lost | Answer::NotHolder));
            let holds = |hold: &by_name::Hold| {
                hold.grant == grant && hold.from < asked.start && answered.at < hold.until
            };
            if gone && is_quiet(answered) && locks.holds.iter().any(holds) {
                let text = format!(
                    "lock-{name} {grant} was granted for longer, but its holder is answered \
                     that it is gone"
                );
                found.push(Violation { demand: Demand::Promised, at: answered.at, text });
            }
        }
    }
}

/// A request is not answered `Held` if its own owner holds the lock for the whole request.
fn holders_are_not_refused(history: &History, found: &mut Vec<Violation>) {
    let all = by_name::split(history);
    for asked in &history.operations {
        let (Request::Acquire { owner: Some(owner), .. }, Some(Answer::Held), Some(answered)) =
            (asked.request, asked.answer, asked.end)
        else {
            continue;
        };
        let holds = |hold: &&by_name::Hold| {
            hold.grant.owner == owner && hold.from < asked.start && answered.at < hold.until
        };
        if let Some(hold) = all[&asked.name].holds.iter().find(holds) {
            let text = format!(
                "lock-{} is held by {}, but a request of its owner is refused",
                asked.name, hold.grant
            );
            found.push(Violation { demand: Demand::Promised, at: answered.at, text });
        }
    }
}

#[cfg(test)]
mod tests;
