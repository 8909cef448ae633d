//! Metrics for configured groups of locks. Lock names are never labels; groups are.

use std::time::Duration;

use metrics::{Counter, Histogram};
use redlock_core::LockName;

use super::labels::{
    OPERATIONS, OUTCOMES, Operation, OutcomeLabel, WAIT_ENDS, WaitEnd, outcomes_of,
};
use crate::pattern::{Group, MAX_GROUPS, Pattern};

/// The groups of one lock name, as a bit set.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct GroupSet(u64);

#[derive(Default)]
pub(super) struct Groups(Vec<GroupMetrics>);

struct GroupMetrics {
    locks: Pattern,
    operations: [[Option<Counter>; OUTCOMES.len()]; OPERATIONS.len()],
    waits: [Histogram; WAIT_ENDS.len()],
}

impl Groups {
    pub(super) fn new(groups: &[Group]) -> Self {
        Self(groups.iter().take(MAX_GROUPS).map(GroupMetrics::new).collect())
    }

    pub(super) fn of(&self, name: &LockName) -> GroupSet {
        let matches = |set, (at, group): (usize, &GroupMetrics)| {
            set | u64::from(group.locks.matches(name)) << at
        };
        GroupSet(self.0.iter().enumerate().fold(0, matches))
    }

    pub(super) fn operation(&self, set: GroupSet, operation: Operation, outcome: OutcomeLabel) {
        let counters = self
            .in_set(set)
            .filter_map(|group| group.operations[operation as usize][outcome as usize].as_ref());
        counters.for_each(|counter| counter.increment(1));
    }

    pub(super) fn waited(&self, set: GroupSet, end: WaitEnd, waited: Duration) {
        self.in_set(set).for_each(|group| group.waits[end as usize].record(waited));
    }

    fn in_set(&self, GroupSet(set): GroupSet) -> impl Iterator<Item = &GroupMetrics> {
        self.0.iter().enumerate().filter(move |(at, _)| set & 1 << at != 0).map(|(_, group)| group)
    }
}

impl GroupMetrics {
    fn new(Group { name, locks }: &Group) -> Self {
        let operations = OPERATIONS.map(|(operation, word)| {
            OUTCOMES.map(|(outcome, ended)| {
                let labels = [
                    ("group", name.clone()),
                    ("operation", word.to_owned()),
                    ("outcome", ended.to_owned()),
                ];
                let is_possible = outcomes_of(operation).contains(&outcome);
                is_possible
                    .then(|| metrics::counter!("redlock_lock_group_operations_total", &labels))
            })
        });
        let waits = WAIT_ENDS.map(|(_, end)| {
            let labels = [("group", name.clone()), ("outcome", end.to_owned())];
            metrics::histogram!("redlock_lock_group_wait_duration_seconds", &labels)
        });
        Self { locks: locks.clone(), operations, waits }
    }
}
