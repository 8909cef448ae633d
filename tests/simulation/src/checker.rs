//! The judge: pure over a recorded history, and ignorant of how it came about.
//!
//! It demands what `crates/redlock-core` promises:
//!
//! 1. *Exclusion*: no two owners hold one lock at the same time. A hold lasts from the answer to the client's own
//!    deadline, or until it sends a release; a successful extension prolongs it.
//! 2. *Fencing*: a grant's T is larger than that of every grant of the lock that was answered before its request was sent.
//! 3. *Register*: a register that refuses smaller tokens takes no write of a holder that has been succeeded by another
//!    that wrote, and refuses no write of the rightful holder.
//! 4. *Orphans*: where a release of an owner's T has been executed, no lock of this owner with that T or an older one is
//!    set any more, or stored unless the master has lost the release; and where the gateway that was told of a release can reach a master, it does so.
//!    A lock in the name of one who has left, and was told nothing, does not stay either.
//! 5. *Extension*: from a grant to each of its successful extensions, nobody else was granted the lock.
//! 6. *Kept*, where the history says that it is possible: a lock that was extended in time all along is not lost.
//! 7. *Order*: of those who wait for a lock in one process, whoever came first has the smaller T.
//! 8. *Answered*: whoever waits is answered when its patience ends, and in the end no process counts anybody who waits.
//! 9. *Promised*: what an answer has promised is not undone by what else is asked for the same owner.
//! 10. *Idle*: where nothing is broken, a lock that somebody waits for is not free for longer than a poll takes.
//!
//! What it does not judge is counted in [`Summary`].

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
use crate::history::{Answer, Cast, Grant, History, Kind, Landing, Moment, Request};

/// Everything in a history that must not have happened, by time.
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
    unpaid(history, &mut found);
    kept(history, &mut found);
    promised(history, &mut found);
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

/// A client of another Redlock library excludes ours and is excluded by them.
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
    // The latest of all grants whose writes were taken.
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
    let mut released: BTreeMap<(u8, u8, u64), Landing> = BTreeMap::new();
    let mut undone: BTreeMap<(u8, u8, Grant), Landing> = BTreeMap::new();
    for landing in &history.landings {
        let Some(grant) = landing.grant else { continue };
        let key = (landing.master, landing.name, grant.owner);
        let before = released.get(&key).filter(|release| covers(release, grant));
        match (landing.kind, landing.cast) {
            (Kind::Release, Cast::Released | Cast::Missing | Cast::Held) if before.is_none() => {
                released.insert(key, *landing);
            }
            (Kind::Undo, Cast::Released | Cast::Missing | Cast::Held) => {
                undone.insert((landing.master, landing.name, grant), *landing);
            }
            (Kind::Acquire | Kind::Repair, Cast::Granted) => {
                // Another request may have confirmed it, and repairs it: not its own acquire, late.
                let undo = undone.get(&(landing.master, landing.name, grant));
                if let (Kind::Acquire, Some(undo)) = (landing.kind, undo) {
                    let text = format!(
                        "n{} sets lock-{} {grant} again after its undo at {} ms, which it answered with {:?}",
                        landing.master,
                        landing.name,
                        undo.moment.at.as_millis(),
                        undo.cast
                    );
                    found.push(Violation { demand: Demand::Orphan, at: landing.moment.at, text });
                }
                if let Some(release) = before {
                    let text = format!(
                        "n{} sets lock-{} {grant} again after a release at {} ms, which it answered with {:?} when that T \
                         was {} ms ahead of its time",
                        landing.master,
                        landing.name,
                        release.moment.at.as_millis(),
                        release.cast,
                        release.ahead_micros / 1000
                    );
                    found.push(Violation { demand: Demand::Orphan, at: landing.moment.at, text });
                }
            }
            _ => {}
        }
    }
    let end = history.landings.last().map_or(Duration::ZERO, |landing| landing.moment.at);
    for left in &history.leftovers {
        let release = released.get(&(left.master, left.name, left.grant.owner));
        let stands = |release: &&Landing| remembers(history, left.master, release.moment);
        if release.filter(stands).is_some_and(|release| covers(release, left.grant)) {
            let text = format!(
                "n{} still stores lock-{} {} after a release",
                left.master, left.name, left.grant
            );
            found.push(Violation { demand: Demand::Orphan, at: end, text });
        }
    }
}

/// A release that was sent is paid as soon as the master can be reached.
fn unpaid(history: &History, found: &mut Vec<Violation>) {
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
                "n{} still stores lock-{} {}, of which g{} could have told it; the release was sent at {} ms",
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

fn covers(release: &Landing, grant: Grant) -> bool {
    release.grant.is_some_and(|released| released.fencing >= grant.fencing)
}

/// The clients of such a history extend in time, so no extension must come to hear that the lock is gone. One that was
/// sent after the deadline had passed hears of a loss that came before it.
fn kept(history: &History, found: &mut Vec<Violation>) {
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

/// What was answered stands, whatever is asked for the same owner meanwhile: as long as nothing was lost, a holder in time
/// is not told that its lock is gone.
fn promised(history: &History, found: &mut Vec<Violation>) {
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
                    "lock-{name} {grant} was promised for longer, and its holder is told that it is gone"
                );
                found.push(Violation { demand: Demand::Promised, at: answered.at, text });
            }
        }
    }
}

#[cfg(test)]
mod tests;
