//! Splits a history by lock.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::history::{Answer, Grant, History, Moment, Request, Write};

/// The events of one lock.
#[derive(Default)]
pub(super) struct Locks {
    /// Grants, in the order of their answers.
    pub(super) granted: Vec<Granted>,
    /// Holds, in the order of their beginnings.
    pub(super) holds: Vec<Hold>,
    /// Successful extensions, in the order of their answers. An extension is left out if a release
    /// of its grant was sent before the answer came.
    pub(super) extended: Vec<(Grant, Moment)>,
    pub(super) writes: Vec<Write>,
}

pub(super) struct Granted {
    pub(super) grant: Grant,
    pub(super) asked: Moment,
    pub(super) answered: Moment,
    /// The answer contained the grant of an earlier request. An extension on a majority had
    /// confirmed it.
    pub(super) replayed: bool,
}

/// A time in which a client believes, rightly by the rules, that it holds the lock.
pub(super) struct Hold {
    pub(super) grant: Grant,
    pub(super) from: Moment,
    /// The end of the hold.
    pub(super) until: Duration,
    /// Whether a release ends the hold before its deadline.
    pub(super) released: bool,
}

impl Hold {
    pub(super) fn contains(&self, moment: Moment) -> bool {
        self.from <= moment && moment.at < self.until
    }
}

pub(super) fn split(history: &History) -> BTreeMap<u8, Locks> {
    let mut all: BTreeMap<u8, Locks> = BTreeMap::new();
    let mut releases: BTreeMap<(u8, u64), Vec<(Moment, u64)>> = BTreeMap::new();
    for operation in &history.operations {
        if let Request::Release { grant } = operation.request {
            let sent = (operation.start, grant.fencing);
            releases.entry((operation.name, grant.owner)).or_default().push(sent);
        }
    }
    for operation in &history.operations {
        let locks = all.entry(operation.name).or_default();
        let (Some(from), Some(answer)) = (operation.end, operation.answer) else { continue };
        let (grant, held_for) = match (operation.request, answer) {
            (Request::Acquire { .. }, Answer::Granted { grant, held_for, replayed }) => {
                locks.granted.push(Granted {
                    grant,
                    asked: operation.start,
                    answered: from,
                    replayed,
                });
                (grant, held_for)
            }
            (Request::Extend { grant, .. }, Answer::Extended { held_for }) => (grant, held_for),
            _ => continue,
        };
        // A release ends every grant of its owner with a T up to the released one. A newer grant of
        // that owner stays.
        let sent = releases.get(&(operation.name, grant.owner)).into_iter().flatten();
        let given_back =
            sent.filter(|(_, fencing)| *fencing >= grant.fencing).map(|(moment, _)| *moment).min();
        let extends = matches!(operation.request, Request::Extend { .. })
            || matches!(answer, Answer::Granted { replayed: true, .. });
        if extends && given_back.is_none_or(|back| from < back) {
            locks.extended.push((grant, from));
        }
        let until = from.at + held_for;
        let until =
            given_back.map_or(until, |back| if back < from { from.at } else { until.min(back.at) });
        if until > from.at {
            let released = given_back.is_some_and(|back| back.at == until);
            locks.holds.push(Hold { grant, from, until, released });
        }
    }
    for write in &history.writes {
        all.entry(write.name).or_default().writes.push(*write);
    }
    for locks in all.values_mut() {
        locks.granted.sort_by_key(|granted| granted.answered);
        locks.holds.sort_by_key(|hold| hold.from);
        locks.extended.sort_by_key(|(_, answered)| *answered);
    }
    all
}
