//! The cases. Each case is a model at certain bounds, which holds with all rules on. The mutations
//! name, for each rule, a case that no longer holds without the rule.

use crate::confirmations::{Confirmations, PROMISE_KEPT};
use crate::confirmed_sets::{ConfirmedSets, WHOLE_OR_NOTHING};
use crate::eligibility::{
    Bounds as EligibilityBounds, Eligibility, NO_VOTE_AFTER_LOSS, ONE_HOLDER,
};
use crate::explore::{ExplorationResult, Until, explore};
use crate::locks::{Bounds, FENCING, GRANT_STANDS, Locks, MUTUAL_EXCLUSION, NO_LOCKOUT, NO_ORPHAN};
use crate::repair::{Held, NEVER_LOST, Repair};
use crate::rules::Rules;
use crate::sets::{
    AT_MOST_ALL_SLOTS, Demand, NO_DEADLOCK, NOTHING_STAYS, ONE_HOLDER_PER_NAME, Sets,
};

/// How much to explore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// At most some seconds for each case.
    Small,
    /// Takes some minutes.
    Medium,
    /// More events in one history: takes many minutes and gigabytes.
    Large,
}

/// One model at certain bounds.
#[derive(Debug)]
pub struct Case {
    /// Names the model and describes its bounds.
    pub title: &'static str,
    /// The smallest size that includes the case.
    pub size: Size,
    model: fn(Rules) -> AnyModel,
}

#[derive(Debug)]
enum AnyModel {
    Locks(Locks),
    Eligibility(Eligibility),
    Repair(Repair),
    Sets(Sets),
    ConfirmedSets(ConfirmedSets),
    Confirmations(Confirmations),
}

/// A rule, and the case that violates a property without it.
#[derive(Debug)]
pub struct Mutation {
    /// The field of [`Rules`].
    pub rule: &'static str,
    /// The property that is violated without the rule.
    pub property: &'static str,
    /// The case that violates the property. With all rules on, the case holds.
    pub case: &'static Case,
    switch: fn(&mut Rules) -> &mut bool,
}

impl Case {
    /// Explores the case with all rules on until the first violation or the end.
    pub fn run(&self, threads: usize, progress: bool) -> ExplorationResult {
        self.run_with(Rules::ALL, Until::Explored, threads, progress)
    }

    fn run_with(
        &self,
        rules: Rules,
        until: Until,
        threads: usize,
        progress: bool,
    ) -> ExplorationResult {
        match (self.model)(rules) {
            AnyModel::Locks(model) => explore(model, until, threads, progress),
            AnyModel::Eligibility(model) => explore(model, until, threads, progress),
            AnyModel::Repair(model) => explore(model, until, threads, progress),
            AnyModel::Sets(model) => explore(model, until, threads, progress),
            AnyModel::ConfirmedSets(model) => explore(model, until, threads, progress),
            AnyModel::Confirmations(model) => explore(model, until, threads, progress),
        }
    }
}

impl Mutation {
    /// Looks for the shortest counter-example.
    pub fn run(&self, progress: bool) -> ExplorationResult {
        let mut rules = Rules::ALL;
        *(self.switch)(&mut rules) = false;
        self.case.run_with(rules, Until::Violated(self.property), 1, progress)
    }
}

static OVERLAPPING_SETS: Case = Case {
    title: "sets: two clients want both names, in different orders",
    size: Size::Small,
    model: |rules| AnyModel::Sets(Sets::new(rules, Demand::Sets([&[1, 2], &[2, 1], &[]]))),
};
static PART_OF_A_SET: Case = Case {
    title: "sets: one client wants both names, one wants the second",
    size: Size::Small,
    model: |rules| AnyModel::Sets(Sets::new(rules, Demand::Sets([&[1, 2], &[2], &[]]))),
};
static CONFIRMED_SET: Case = Case {
    title: "sets: a repetition confirms a set that its first request gives up",
    size: Size::Small,
    model: |rules| AnyModel::ConfirmedSets(ConfirmedSets::new(rules)),
};
static CONFIRMATIONS: Case = Case {
    title: "confirmations: two repetitions confirm a grant that its first request may give up",
    size: Size::Small,
    model: |rules| AnyModel::Confirmations(Confirmations::new(rules)),
};
static SLOTS: Case = Case {
    title: "slots: three clients, a lock with two slots",
    size: Size::Small,
    model: |rules| AnyModel::Sets(Sets::new(rules, Demand::Slots)),
};
static PROPOSALS: Case = Case {
    title: "locks: three proposals",
    size: Size::Medium,
    model: |rules| AnyModel::Locks(Locks::new(rules, Bounds::PROPOSALS)),
};
static CONFIRMATION: Case = Case {
    title: "locks: three proposals, one confirmation",
    size: Size::Large,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { bad_clock: false, renewals: 1, only_confirms: true, ..Bounds::PROPOSALS },
        ))
    },
};
static LOSS_OF_TWO: Case = Case {
    title: "locks: two proposals, one loss of data",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(rules, Bounds { retry: false, losses: 1, ..Bounds::PROPOSALS }))
    },
};
static LOSS: Case = Case {
    title: "locks: three proposals, one loss of data",
    size: Size::Large,
    model: |rules| AnyModel::Locks(Locks::new(rules, Bounds { losses: 1, ..Bounds::PROPOSALS })),
};
static LOSS_AND_EXTENSION: Case = Case {
    title: "locks: two proposals, one loss of data, one extension",
    size: Size::Medium,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, losses: 1, renewals: 1, ..Bounds::PROPOSALS },
        ))
    },
};
static EXTENSIONS_OF_TWO: Case = Case {
    title: "locks: two proposals, two extensions",
    size: Size::Medium,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, renewals: 2, ..Bounds::PROPOSALS },
        ))
    },
};
static HOLDING_RELEASES: Case = Case {
    title: "locks: two proposals, two extensions, releases that keep the lock free",
    size: Size::Medium,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, renewals: 2, holds: true, ..Bounds::PROPOSALS },
        ))
    },
};
static EVERY_ORDER_OF_TWO: Case = Case {
    title: "locks: two proposals, every order",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, every_order: true, ..Bounds::PROPOSALS },
        ))
    },
};
static EVERY_LOSS_OF_TWO: Case = Case {
    title: "locks: two proposals, one loss of data, every order",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, losses: 1, every_order: true, ..Bounds::PROPOSALS },
        ))
    },
};
static EXTENSION: Case = Case {
    title: "locks: three proposals, one extension",
    size: Size::Large,
    model: |rules| AnyModel::Locks(Locks::new(rules, Bounds { renewals: 1, ..Bounds::PROPOSALS })),
};
static TWO_EXTENSIONS: Case = Case {
    title: "locks: two proposals, one loss of data, two extensions",
    size: Size::Large,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, bad_clock: false, losses: 1, renewals: 2, ..Bounds::PROPOSALS },
        ))
    },
};
static LOSS_WITHOUT_RELEASES: Case = Case {
    title: "locks: two proposals without releases, one loss of data, two extensions",
    size: Size::Medium,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds {
                retry: false,
                bad_clock: false,
                releases: false,
                losses: 1,
                renewals: 2,
                ..Bounds::PROPOSALS
            },
        ))
    },
};
static EVERY_EXTENSION: Case = Case {
    title: "locks: two proposals, one extension, every order",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds {
                retry: false,
                bad_clock: false,
                renewals: 1,
                every_order: true,
                ..Bounds::PROPOSALS
            },
        ))
    },
};
static WATERMARKS: Case = Case {
    title: "locks: two proposals, one extension, watermarks that end, every order",
    size: Size::Large,
    model: |rules| {
        let bounds = Bounds {
            retry: false,
            bad_clock: false,
            renewals: 1,
            every_order: true,
            ..Bounds::PROPOSALS
        };
        AnyModel::Locks(Locks::new(rules, Bounds { watermarks_end: true, ..bounds }))
    },
};
static WATERMARKS_AND_LOSS: Case = Case {
    title: "locks: two proposals, one loss of data, one extension, watermarks that end",
    size: Size::Large,
    model: |rules| {
        let bounds =
            Bounds { retry: false, bad_clock: false, losses: 1, renewals: 1, ..Bounds::PROPOSALS };
        AnyModel::Locks(Locks::new(rules, Bounds { watermarks_end: true, ..bounds }))
    },
};
static TWO_LOSSES: Case = Case {
    title: "locks: two proposals, two losses of data, one extension",
    size: Size::Large,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, bad_clock: false, losses: 2, renewals: 1, ..Bounds::PROPOSALS },
        ))
    },
};
static EVERY_ORDER: Case = Case {
    title: "locks: three proposals, every order",
    size: Size::Large,
    model: |rules| {
        AnyModel::Locks(Locks::new(rules, Bounds { every_order: true, ..Bounds::PROPOSALS }))
    },
};
static ELIGIBILITY: Case = Case {
    title: "eligibility: three losses of data or restarts",
    size: Size::Small,
    model: |rules| eligibility(rules, EligibilityBounds::LOSSES),
};
static EVICTIONS: Case = Case {
    title: "eligibility: evictions",
    size: Size::Small,
    model: |rules| {
        eligibility(
            rules,
            EligibilityBounds { evictions: true, faults: 2, ..EligibilityBounds::LOSSES },
        )
    },
};
static DURABILITY: Case = Case {
    title: "eligibility: writes that are synced or not",
    size: Size::Small,
    model: |rules| {
        eligibility(
            rules,
            EligibilityBounds { durability: true, faults: 2, ..EligibilityBounds::LOSSES },
        )
    },
};
static BOOTSTRAP: Case = Case {
    title: "eligibility: a new cluster of two nodes",
    size: Size::Medium,
    model: |rules| {
        let bounds = EligibilityBounds {
            nodes: 2,
            faults: 2,
            processes: false,
            bootstrap: true,
            restarts: 1,
            ..EligibilityBounds::LOSSES
        };
        eligibility(rules, bounds)
    },
};
static SHORTER_MAX_TTL: Case = Case {
    title: "eligibility: a shorter max_ttl",
    size: Size::Small,
    model: |rules| {
        eligibility(
            rules,
            EligibilityBounds { change: true, faults: 2, ..EligibilityBounds::LOSSES },
        )
    },
};
static RAISED_MAX_TTL_ON_TWO: Case = Case {
    title: "eligibility: max_ttl is raised on two nodes",
    size: Size::Small,
    model: |rules| raised_max_ttl(rules, 2),
};
static RAISED_MAX_TTL: Case = Case {
    title: "eligibility: max_ttl is raised on three nodes",
    size: Size::Large,
    model: |rules| raised_max_ttl(rules, 3),
};
static EVERY_PROBE_ORDER: Case = Case {
    title: "eligibility: two losses of data or restarts, every order",
    size: Size::Medium,
    model: |rules| {
        eligibility(
            rules,
            EligibilityBounds { faults: 2, every_order: true, ..EligibilityBounds::LOSSES },
        )
    },
};
static ALL_FAULTS: Case = Case {
    title: "eligibility: three faults of every kind",
    size: Size::Large,
    model: |rules| {
        eligibility(
            rules,
            EligibilityBounds { evictions: true, durability: true, ..EligibilityBounds::LOSSES },
        )
    },
};
static REPAIR: Case = Case {
    title: "repair: nine losses of data or outages, one after the other",
    size: Size::Small,
    model: |rules| AnyModel::Repair(Repair::new(rules, 9, Held::Extended)),
};
static YOUNG: Case = Case {
    title: "repair: a young lock, nine restarts one after the other, each with a catch-up",
    size: Size::Small,
    model: |rules| AnyModel::Repair(Repair::new(rules, 9, Held::Young)),
};
static MISSED: Case = Case {
    title: "repair: a lock that a slow node missed, nine restarts one after the other, each \
            with a catch-up",
    size: Size::Small,
    model: |rules| AnyModel::Repair(Repair::new(rules, 9, Held::Missed)),
};

static EARLY: Case = Case {
    title: "repair: a lock that was extended while a node with its data was away, nine restarts \
            one after the other, each with a catch-up",
    size: Size::Small,
    model: |rules| AnyModel::Repair(Repair::new(rules, 9, Held::Early)),
};

static RECOVERY_OF_TWO: Case = Case {
    title: "recovery: two proposals, one loss of data",
    size: Size::Small,
    model: |rules| recovery(rules, Bounds { retry: false, ..Bounds::PROPOSALS }),
};
static EVERY_RECOVERY: Case = Case {
    title: "recovery: two proposals, one loss of data, every order",
    size: Size::Small,
    model: |rules| recovery(rules, Bounds { retry: false, every_order: true, ..Bounds::PROPOSALS }),
};
static RECOVERY_WITHOUT_RELEASES: Case = Case {
    title: "recovery: three proposals without releases, one loss of data",
    size: Size::Medium,
    model: |rules| recovery(rules, NO_RELEASES),
};
static EXTENDED_RECOVERY_WITHOUT_RELEASES: Case = Case {
    title: "recovery: two proposals without releases, one loss of data, one extension",
    size: Size::Small,
    model: |rules| recovery(rules, Bounds { retry: false, renewals: 1, ..NO_RELEASES }),
};
static TWO_EXTENDED_RECOVERIES: Case = Case {
    title: "recovery: two proposals without releases, two losses of data, one extension",
    size: Size::Medium,
    model: |rules| recovery(rules, Bounds { retry: false, losses: 2, renewals: 1, ..NO_RELEASES }),
};
static TWO_RECOVERIES: Case = Case {
    title: "recovery: three proposals in one order of tokens without releases, two losses of data",
    size: Size::Small,
    model: |rules| recovery(rules, Bounds { losses: 2, tokens: Some([1, 3, 2]), ..NO_RELEASES }),
};
static RECOVERY_AND_TWO_LOSSES: Case = Case {
    title: "recovery: two proposals, two losses of data",
    size: Size::Large,
    model: |rules| {
        recovery(rules, Bounds { retry: false, bad_clock: false, losses: 2, ..Bounds::PROPOSALS })
    },
};
static RECOVERY_AND_EXTENSION: Case = Case {
    title: "recovery: two proposals, one loss of data, one extension",
    size: Size::Large,
    model: |rules| {
        recovery(rules, Bounds { retry: false, bad_clock: false, renewals: 1, ..Bounds::PROPOSALS })
    },
};
static RECOVERY_AND_CONFIRMATION: Case = Case {
    title: "recovery: three proposals without releases, one loss of data, one confirmation",
    size: Size::Large,
    model: |rules| recovery(rules, Bounds { renewals: 1, only_confirms: true, ..NO_RELEASES }),
};
static TWO_RECOVERIES_AND_CONFIRMATION: Case = Case {
    title: "recovery: three proposals in one order of tokens without releases, two losses of \
            data, one confirmation",
    size: Size::Large,
    model: |rules| {
        let bounds = Bounds { renewals: 1, only_confirms: true, ..NO_RELEASES };
        recovery(rules, Bounds { losses: 2, tokens: Some([1, 3, 2]), ..bounds })
    },
};
static LONGER_LEASE: Case = Case {
    title: "recovery: two proposals in one order of tokens without releases, one loss of data, \
            two extensions",
    size: Size::Medium,
    model: |rules| {
        recovery(
            rules,
            Bounds { retry: false, renewals: 2, tokens: Some([2, 2, 1]), ..NO_RELEASES },
        )
    },
};
static CATCH_UP: Case = Case {
    title: "catch-up: two proposals, one loss of data",
    size: Size::Small,
    model: |rules| catch_up(rules, Bounds { retry: false, losses: 1, ..Bounds::PROPOSALS }),
};
static CATCH_UP_WITHOUT_RELEASES: Case = Case {
    title: "catch-up: two proposals without releases, one loss of data, one extension",
    size: Size::Small,
    model: |rules| catch_up(rules, Bounds { retry: false, losses: 1, renewals: 1, ..NO_RELEASES }),
};
static CATCH_UP_AND_WATERMARKS: Case = Case {
    title: "catch-up: two proposals, watermarks that end, every order",
    size: Size::Medium,
    model: |rules| {
        let bounds = Bounds {
            retry: false,
            bad_clock: false,
            watermarks_end: true,
            every_order: true,
            ..Bounds::PROPOSALS
        };
        catch_up(rules, bounds)
    },
};
static CATCH_UP_AND_RECOVERY: Case = Case {
    title: "catch-up and recovery: two proposals without releases, one loss of data, one extension",
    size: Size::Medium,
    model: |rules| {
        recovery(rules, Bounds { retry: false, renewals: 1, catch_ups: 1, ..NO_RELEASES })
    },
};
static CATCH_UP_RECOVERY_AND_RELEASES: Case = Case {
    title: "catch-up and recovery: two proposals, one loss of data",
    size: Size::Large,
    model: |rules| {
        recovery(
            rules,
            Bounds { retry: false, bad_clock: false, catch_ups: 1, ..Bounds::PROPOSALS },
        )
    },
};
static CATCH_UP_AND_TWO_RECOVERIES: Case = Case {
    title: "catch-up and recovery: two proposals without releases, two losses of data, one \
            extension",
    size: Size::Large,
    model: |rules| {
        recovery(
            rules,
            Bounds { retry: false, losses: 2, renewals: 1, catch_ups: 1, ..NO_RELEASES },
        )
    },
};
static CATCH_UP_AND_RETRY: Case = Case {
    title: "catch-up and recovery: three proposals in one order of tokens without releases, one \
            loss of data, one extension",
    size: Size::Large,
    model: |rules| {
        recovery(
            rules,
            Bounds { renewals: 1, catch_ups: 1, tokens: Some([1, 3, 2]), ..NO_RELEASES },
        )
    },
};
const NO_RELEASES: Bounds = Bounds { bad_clock: false, releases: false, ..Bounds::PROPOSALS };

fn eligibility(rules: Rules, bounds: EligibilityBounds) -> AnyModel {
    AnyModel::Eligibility(Eligibility::new(rules, bounds))
}

/// One node loses its data, at any time.
fn raised_max_ttl(rules: Rules, nodes: usize) -> AnyModel {
    let bounds = EligibilityBounds {
        nodes,
        faults: 1,
        processes: false,
        raise: true,
        ..EligibilityBounds::LOSSES
    };
    eligibility(rules, bounds)
}

/// Turns recovery on and allows at least one loss of data.
fn recovery(rules: Rules, bounds: Bounds) -> AnyModel {
    AnyModel::Locks(Locks::new(
        rules,
        Bounds { recovery: true, losses: bounds.losses.max(1), ..bounds },
    ))
}

/// Allows at least one reading for a node that catches up.
fn catch_up(rules: Rules, bounds: Bounds) -> AnyModel {
    AnyModel::Locks(Locks::new(rules, Bounds { catch_ups: bounds.catch_ups.max(1), ..bounds }))
}

/// All cases.
pub static CASES: [&Case; 53] = [
    &HOLDING_RELEASES,
    &OVERLAPPING_SETS,
    &PART_OF_A_SET,
    &CONFIRMED_SET,
    &CONFIRMATIONS,
    &SLOTS,
    &PROPOSALS,
    &CONFIRMATION,
    &LOSS_OF_TWO,
    &EVERY_LOSS_OF_TWO,
    &EVERY_EXTENSION,
    &WATERMARKS,
    &LOSS,
    &LOSS_AND_EXTENSION,
    &EXTENSIONS_OF_TWO,
    &LOSS_WITHOUT_RELEASES,
    &EVERY_ORDER_OF_TWO,
    &ELIGIBILITY,
    &EVICTIONS,
    &DURABILITY,
    &BOOTSTRAP,
    &SHORTER_MAX_TTL,
    &RAISED_MAX_TTL_ON_TWO,
    &EVERY_PROBE_ORDER,
    &REPAIR,
    &YOUNG,
    &MISSED,
    &EARLY,
    &RECOVERY_OF_TWO,
    &EVERY_RECOVERY,
    &RECOVERY_WITHOUT_RELEASES,
    &EXTENDED_RECOVERY_WITHOUT_RELEASES,
    &TWO_EXTENDED_RECOVERIES,
    &TWO_RECOVERIES,
    &LONGER_LEASE,
    &CATCH_UP,
    &CATCH_UP_WITHOUT_RELEASES,
    &CATCH_UP_AND_WATERMARKS,
    &CATCH_UP_AND_RECOVERY,
    &EXTENSION,
    &TWO_EXTENSIONS,
    &WATERMARKS_AND_LOSS,
    &TWO_LOSSES,
    &EVERY_ORDER,
    &ALL_FAULTS,
    &RAISED_MAX_TTL,
    &RECOVERY_AND_TWO_LOSSES,
    &RECOVERY_AND_EXTENSION,
    &RECOVERY_AND_CONFIRMATION,
    &TWO_RECOVERIES_AND_CONFIRMATION,
    &CATCH_UP_RECOVERY_AND_RELEASES,
    &CATCH_UP_AND_TWO_RECOVERIES,
    &CATCH_UP_AND_RETRY,
];

/// Makes the list of mutations, and one test for each: without the rule, the explorer must find a
/// counter-example in its case. The tests of the slow ones take 10 s or more each.
macro_rules! mutations {
    (quick { $($quick:ident: $quick_case:ident, $quick_property:ident;)* }
     slow { $($slow:ident: $slow_case:ident, $slow_property:ident;)* }) => {
        /// Every rule, the case that needs it, and the property that is violated without it.
        pub static MUTATIONS: &[Mutation] = &[
            $(mutation_of!($quick, $quick_case, $quick_property),)*
            $(mutation_of!($slow, $slow_case, $slow_property),)*
        ];

        #[cfg(test)]
        mod without {
            $(#[test] fn $quick() { super::tests::assert_needed(stringify!($quick)); })*

            mod slow {
                use super::super::tests::assert_needed;

                $(#[test] fn $slow() { assert_needed(stringify!($slow)); })*
            }
        }
    };
}

macro_rules! mutation_of {
    ($rule:ident, $case:ident, $property:ident) => {
        Mutation {
            rule: stringify!($rule),
            property: $property,
            case: &$case,
            switch: |rules| &mut rules.$rule,
        }
    };
}

mutations! {
    quick {
        lock_is_kept: PROPOSALS, GRANT_STANDS;
        grants_have_nonces: CONFIRMATION, GRANT_STANDS;
        undo_is_exact: PROPOSALS, GRANT_STANDS;
        undo_spares_extended: CONFIRMATION, GRANT_STANDS;
        returned_again_is_extended: CONFIRMATION, MUTUAL_EXCLUSION;
        release_leaves_a_tombstone: PROPOSALS, NO_ORPHAN;
        clock_is_checked: PROPOSALS, NO_LOCKOUT;
        watermark_is_checked: PROPOSALS, FENCING;
        marker_is_checked: LOSS_OF_TWO, MUTUAL_EXCLUSION;
        quarantine_is_waited: LOSS_OF_TWO, MUTUAL_EXCLUSION;
        quarantine_has_nonce: ELIGIBILITY, ONE_HOLDER;
        admission_names_process: ELIGIBILITY, ONE_HOLDER;
        evictions_are_counted: EVICTIONS, NO_VOTE_AFTER_LOSS;
        rewrite_is_noticed: DURABILITY, NO_VOTE_AFTER_LOSS;
        newest_marker_is_known: DURABILITY, NO_VOTE_AFTER_LOSS;
        bootstrap_names_quarantine: BOOTSTRAP, NO_VOTE_AFTER_LOSS;
        marker_names_configuration: SHORTER_MAX_TTL, NO_VOTE_AFTER_LOSS;
        reconfiguration_waits: SHORTER_MAX_TTL, NO_VOTE_AFTER_LOSS;
        limit_is_checked: RAISED_MAX_TTL, NO_VOTE_AFTER_LOSS;
        bounds_rise_first: RAISED_MAX_TTL, NO_VOTE_AFTER_LOSS;
        marker_names_admission: LOSS_WITHOUT_RELEASES, FENCING;
        missing_is_repaired: REPAIR, NEVER_LOST;
        repair_may_be_old: REPAIR, NEVER_LOST;
        extension_marks: REPAIR, NEVER_LOST;
        release_unmarks: EXTENSIONS_OF_TWO, NO_ORPHAN;
        repair_is_timely: LOSS_WITHOUT_RELEASES, FENCING;
        undo_restores_watermark: REPAIR, NEVER_LOST;
        returned_watermark_stays: PROPOSALS, FENCING;
        earlier_watermark_is_restored: PROPOSALS, NO_ORPHAN;
        only_own_watermark_goes: PROPOSALS, NO_ORPHAN;
        release_settles_watermark: PROPOSALS, NO_ORPHAN;
        watermark_outlives_lock: WATERMARKS, NO_ORPHAN;
        late_repair_is_refused: WATERMARKS, NO_ORPHAN;
        release_prolongs_watermark: WATERMARKS, NO_ORPHAN;
        recovery_waits_for_clocks: RECOVERY_OF_TWO, FENCING;
        recovery_waits_for_rounds: EXTENDED_RECOVERY_WITHOUT_RELEASES, MUTUAL_EXCLUSION;
        recovery_needs_enough: RECOVERY_OF_TWO, MUTUAL_EXCLUSION;
        lost_locks_are_recovered: RECOVERY_OF_TWO, MUTUAL_EXCLUSION;
        recovery_needs_majority: EXTENDED_RECOVERY_WITHOUT_RELEASES, FENCING;
        recovery_blocks_longest: RECOVERY_WITHOUT_RELEASES, MUTUAL_EXCLUSION;
        recovery_remembers_kept_free_records: TWO_RECOVERIES, MUTUAL_EXCLUSION;
        recovery_minds_releases: RECOVERY_OF_TWO, NO_ORPHAN;
        admitted_is_caught_up: YOUNG, NEVER_LOST;
        catch_up_needs_majority: CATCH_UP_WITHOUT_RELEASES, FENCING;
        catch_up_follows_admission: CATCH_UP_WITHOUT_RELEASES, FENCING;
        catch_up_outwaits_watermarks: EARLY, NEVER_LOST;
        sets_are_whole: OVERLAPPING_SETS, NO_DEADLOCK;
        refused_set_is_undone: PART_OF_A_SET, NOTHING_STAYS;
        set_is_extended_in_one_step: CONFIRMED_SET, WHOLE_OR_NOTHING;
        refusal_is_repeated: CONFIRMATIONS, PROMISE_KEPT;
        refusal_needs_undo: CONFIRMATIONS, PROMISE_KEPT;
        whole_sets_count: PART_OF_A_SET, ONE_HOLDER_PER_NAME;
        gateway_picks_slots: SLOTS, AT_MOST_ALL_SLOTS;
    }
    slow {
        release_keeps_newer: PROPOSALS, MUTUAL_EXCLUSION;
        bootstrap_needs_all_nodes: BOOTSTRAP, NO_VOTE_AFTER_LOSS;
        bootstrap_needs_witnesses: BOOTSTRAP, ONE_HOLDER;
        bootstrap_ends_with_admission: BOOTSTRAP, NO_VOTE_AFTER_LOSS;
        larger_bound_is_waited: RAISED_MAX_TTL, NO_VOTE_AFTER_LOSS;
        majority_is_probed: RAISED_MAX_TTL, NO_VOTE_AFTER_LOSS;
        repair_keeps_life: LONGER_LEASE, MUTUAL_EXCLUSION;
        votes_are_per_slot: SLOTS, AT_MOST_ALL_SLOTS;
    }
}

/// The mutation of a rule.
pub fn mutation(rule: &str) -> Option<&'static Mutation> {
    MUTATIONS.iter().find(|mutation| mutation.rule == rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn assert_needed(rule: &str) {
        let mutation = mutation(rule).expect("a rule");
        let outcome = mutation.run(false);
        println!("without {rule}, in \"{}\": {outcome}", mutation.case.title);
        let story = outcome.violated.get(mutation.property);
        assert!(
            story.is_some_and(|story| story.len() > 1),
            "no violation without {rule}: {outcome}"
        );
    }

    fn fields(debug: &str) -> Vec<&str> {
        debug.split([' ', '{', '}', ',']).filter_map(|word| word.strip_suffix(':')).collect()
    }

    #[test]
    fn every_rule_has_one_mutation() {
        let rules = format!("{:?}", Rules::ALL);
        let mut fields = fields(&rules);
        let mut tested: Vec<_> = MUTATIONS.iter().map(|mutation| mutation.rule).collect();
        fields.sort_unstable();
        tested.sort_unstable();
        assert_eq!(tested, fields);
    }

    /// The model has no switch for these rules of the core. It assumes that a name leads to one
    /// process, that a file keeps what was synced, and that clocks run at the promised rates. The
    /// model relies on no life that ends early: there, each late operation sets its whole life.
    const ASSUMED: [&str; 5] = [
        "name_is_followed",
        "returned_waits",
        "answered_calls_are_known",
        "rate_is_checked",
        "lives_begin_when_asked",
    ];

    #[test]
    fn model_has_every_rule_of_the_core() {
        let code = format!("{:?}", redlock_core::node::SafetyRules::ALL);
        for rule in fields(&code).into_iter().filter(|rule| !ASSUMED.contains(rule)) {
            assert!(mutation(rule).is_some(), "the model lacks the core's rule {rule}");
        }
    }
}
