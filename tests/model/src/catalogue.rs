//! The cases: the models at their bounds with all rules on, and for each rule the case that needs
//! it.

use crate::eligibility::{Bounds as AdmissionBounds, Eligibility, NOTHING_FORGOTTEN, ONE_HOLDER};
use crate::explore::{ExplorationResult, Until, explore};
use crate::locks::{Bounds, FENCING, Locks, MUTUAL_EXCLUSION, NO_LOCKOUT, NO_ORPHAN, PROMISED};
use crate::repair::{Held, NEVER_LOST, Repair};
use crate::rules::Rules;

/// How much to explore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// Takes about a minute on two cores.
    Small,
    /// More events in one history: takes many minutes and gigabytes.
    Large,
}

/// One model at certain bounds.
#[derive(Debug)]
pub struct Case {
    /// Describes its bounds.
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

static TRIES: Case = Case {
    title: "locks: three tries",
    size: Size::Small,
    model: |rules| AnyModel::Locks(Locks::new(rules, Bounds::TRIES)),
};
static REPEATS: Case = Case {
    title: "locks: three tries, one confirmation",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { bad_clock: false, renewals: 1, only_confirms: true, ..Bounds::TRIES },
        ))
    },
};
static LOSS_OF_TWO: Case = Case {
    title: "locks: two tries, one loss of data",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(rules, Bounds { retry: false, losses: 1, ..Bounds::TRIES }))
    },
};
static LOSS: Case = Case {
    title: "locks: three tries, one loss of data",
    size: Size::Small,
    model: |rules| AnyModel::Locks(Locks::new(rules, Bounds { losses: 1, ..Bounds::TRIES })),
};
static LOSS_AND_HEAL: Case = Case {
    title: "locks: two tries, one loss of data, one extension",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, losses: 1, renewals: 1, ..Bounds::TRIES },
        ))
    },
};
static HEALS: Case = Case {
    title: "locks: two tries, two extensions",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(rules, Bounds { retry: false, renewals: 2, ..Bounds::TRIES }))
    },
};
static EVERY_ORDER_OF_TWO: Case = Case {
    title: "locks: two tries, every order",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, every_order: true, ..Bounds::TRIES },
        ))
    },
};
static EVERY_LOSS_OF_TWO: Case = Case {
    title: "locks: two tries, one loss of data, every order",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, losses: 1, every_order: true, ..Bounds::TRIES },
        ))
    },
};
static EXTENSION: Case = Case {
    title: "locks: three tries, one extension",
    size: Size::Large,
    model: |rules| AnyModel::Locks(Locks::new(rules, Bounds { renewals: 1, ..Bounds::TRIES })),
};
static TWO_EXTENSIONS: Case = Case {
    title: "locks: two tries, one loss of data, two extensions",
    size: Size::Large,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, bad_clock: false, losses: 1, renewals: 2, ..Bounds::TRIES },
        ))
    },
};
static PATIENCE: Case = Case {
    title: "locks: two tries without releases, one loss of data, two extensions",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds {
                retry: false,
                bad_clock: false,
                releases: false,
                losses: 1,
                renewals: 2,
                ..Bounds::TRIES
            },
        ))
    },
};
static EVERY_EXTENSION: Case = Case {
    title: "locks: two tries, one extension, every order",
    size: Size::Small,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds {
                retry: false,
                bad_clock: false,
                renewals: 1,
                every_order: true,
                ..Bounds::TRIES
            },
        ))
    },
};
static FENCES: Case = Case {
    title: "locks: two tries, one extension, fences that end, every order",
    size: Size::Small,
    model: |rules| {
        let bounds = Bounds {
            retry: false,
            bad_clock: false,
            renewals: 1,
            every_order: true,
            ..Bounds::TRIES
        };
        AnyModel::Locks(Locks::new(rules, Bounds { fences_end: true, ..bounds }))
    },
};
static FENCES_AND_LOSS: Case = Case {
    title: "locks: two tries, one loss of data, one extension, fences that end",
    size: Size::Large,
    model: |rules| {
        let bounds =
            Bounds { retry: false, bad_clock: false, losses: 1, renewals: 1, ..Bounds::TRIES };
        AnyModel::Locks(Locks::new(rules, Bounds { fences_end: true, ..bounds }))
    },
};
static TWO_LOSSES: Case = Case {
    title: "locks: two tries, two losses of data, one extension",
    size: Size::Large,
    model: |rules| {
        AnyModel::Locks(Locks::new(
            rules,
            Bounds { retry: false, bad_clock: false, losses: 2, renewals: 1, ..Bounds::TRIES },
        ))
    },
};
static EVERY_ORDER: Case = Case {
    title: "locks: three tries, every order",
    size: Size::Large,
    model: |rules| {
        AnyModel::Locks(Locks::new(rules, Bounds { every_order: true, ..Bounds::TRIES }))
    },
};
static ADMISSION: Case = Case {
    title: "eligibility: three losses of data or restarts",
    size: Size::Small,
    model: |rules| eligibility(rules, AdmissionBounds::LOSSES),
};
static EVICTIONS: Case = Case {
    title: "eligibility: evictions",
    size: Size::Small,
    model: |rules| {
        eligibility(
            rules,
            AdmissionBounds { evictions: true, faults: 2, ..AdmissionBounds::LOSSES },
        )
    },
};
static DURABILITY: Case = Case {
    title: "eligibility: writes that are synced or not",
    size: Size::Small,
    model: |rules| {
        eligibility(
            rules,
            AdmissionBounds { durability: true, faults: 2, ..AdmissionBounds::LOSSES },
        )
    },
};
static BOOTSTRAP: Case = Case {
    title: "eligibility: a new cluster of two nodes",
    size: Size::Small,
    model: |rules| {
        let bounds = AdmissionBounds {
            nodes: 2,
            faults: 2,
            processes: false,
            bootstrap: true,
            restarts: 1,
            ..AdmissionBounds::LOSSES
        };
        eligibility(rules, bounds)
    },
};
static CHANGE: Case = Case {
    title: "eligibility: a shorter max_ttl",
    size: Size::Small,
    model: |rules| {
        eligibility(rules, AdmissionBounds { change: true, faults: 2, ..AdmissionBounds::LOSSES })
    },
};
static EVERY_LOOK: Case = Case {
    title: "eligibility: two losses of data or restarts, every order",
    size: Size::Small,
    model: |rules| {
        eligibility(
            rules,
            AdmissionBounds { faults: 2, every_order: true, ..AdmissionBounds::LOSSES },
        )
    },
};
static MORE_ADMISSION: Case = Case {
    title: "eligibility: three faults of every kind",
    size: Size::Large,
    model: |rules| {
        eligibility(
            rules,
            AdmissionBounds { evictions: true, durability: true, ..AdmissionBounds::LOSSES },
        )
    },
};
static HEALING: Case = Case {
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
    title: "repair: a lock that a slow node missed, nine restarts one after the other, each with a catch-up",
    size: Size::Small,
    model: |rules| AnyModel::Repair(Repair::new(rules, 9, Held::Missed)),
};

static ADOPTION_OF_TWO: Case = Case {
    title: "recovery: two tries, one loss of data",
    size: Size::Small,
    model: |rules| recovery(rules, Bounds { retry: false, ..Bounds::TRIES }),
};
static EVERY_ADOPTION: Case = Case {
    title: "recovery: two tries, one loss of data, every order",
    size: Size::Small,
    model: |rules| recovery(rules, Bounds { retry: false, every_order: true, ..Bounds::TRIES }),
};
static PATIENT_ADOPTION: Case = Case {
    title: "recovery: three tries without releases, one loss of data",
    size: Size::Small,
    model: |rules| recovery(rules, PATIENT),
};
static ADOPTION_AND_PATIENCE: Case = Case {
    title: "recovery: two tries without releases, one loss of data, one extension",
    size: Size::Small,
    model: |rules| recovery(rules, Bounds { retry: false, renewals: 1, ..PATIENT }),
};
static TWO_ADOPTIONS_AND_PATIENCE: Case = Case {
    title: "recovery: two tries without releases, two losses of data, one extension",
    size: Size::Small,
    model: |rules| recovery(rules, Bounds { retry: false, losses: 2, renewals: 1, ..PATIENT }),
};
static TWO_ADOPTIONS: Case = Case {
    title: "recovery: three tries in one order of tokens without releases, two losses of data",
    size: Size::Small,
    model: |rules| recovery(rules, Bounds { losses: 2, tokens: Some([1, 3, 2]), ..PATIENT }),
};
static ADOPTION_AND_TWO_LOSSES: Case = Case {
    title: "recovery: two tries, two losses of data",
    size: Size::Large,
    model: |rules| {
        recovery(rules, Bounds { retry: false, bad_clock: false, losses: 2, ..Bounds::TRIES })
    },
};
static ADOPTION_AND_EXTENSION: Case = Case {
    title: "recovery: two tries, one loss of data, one extension",
    size: Size::Large,
    model: |rules| {
        recovery(rules, Bounds { retry: false, bad_clock: false, renewals: 1, ..Bounds::TRIES })
    },
};
static ADOPTION_AND_REPEATS: Case = Case {
    title: "recovery: three tries without releases, one loss of data, one confirmation",
    size: Size::Large,
    model: |rules| recovery(rules, Bounds { renewals: 1, only_confirms: true, ..PATIENT }),
};
static TWO_ADOPTIONS_AND_REPEATS: Case = Case {
    title: "recovery: three tries in one order of tokens without releases, two losses of data, one confirmation",
    size: Size::Large,
    model: |rules| {
        let bounds = Bounds { renewals: 1, only_confirms: true, ..PATIENT };
        recovery(rules, Bounds { losses: 2, tokens: Some([1, 3, 2]), ..bounds })
    },
};
static LONGER_LEASE: Case = Case {
    title: "recovery: two tries in one order of tokens without releases, one loss of data, two extensions",
    size: Size::Small,
    model: |rules| {
        recovery(rules, Bounds { retry: false, renewals: 2, tokens: Some([2, 2, 1]), ..PATIENT })
    },
};
static CATCH_UP: Case = Case {
    title: "catch-up: two tries, one loss of data",
    size: Size::Small,
    model: |rules| catch_up(rules, Bounds { retry: false, losses: 1, ..Bounds::TRIES }),
};
static CATCH_UP_AND_PATIENCE: Case = Case {
    title: "catch-up: two tries without releases, one loss of data, one extension",
    size: Size::Small,
    model: |rules| catch_up(rules, Bounds { retry: false, losses: 1, renewals: 1, ..PATIENT }),
};
static CATCH_UP_AND_FENCES: Case = Case {
    title: "catch-up: two tries, fences that end, every order",
    size: Size::Small,
    model: |rules| {
        let bounds = Bounds {
            retry: false,
            bad_clock: false,
            fences_end: true,
            every_order: true,
            ..Bounds::TRIES
        };
        catch_up(rules, bounds)
    },
};
static CATCH_UP_AND_ADOPTION: Case = Case {
    title: "catch-up and recovery: two tries without releases, one loss of data, one extension",
    size: Size::Small,
    model: |rules| recovery(rules, Bounds { retry: false, renewals: 1, catch_ups: 1, ..PATIENT }),
};
static CATCH_UP_ADOPTION_AND_RELEASES: Case = Case {
    title: "catch-up and recovery: two tries, one loss of data",
    size: Size::Large,
    model: |rules| {
        recovery(rules, Bounds { retry: false, bad_clock: false, catch_ups: 1, ..Bounds::TRIES })
    },
};
static CATCH_UP_AND_TWO_ADOPTIONS: Case = Case {
    title: "catch-up and recovery: two tries without releases, two losses of data, one extension",
    size: Size::Large,
    model: |rules| {
        recovery(rules, Bounds { retry: false, losses: 2, renewals: 1, catch_ups: 1, ..PATIENT })
    },
};
static CATCH_UP_AND_REPEATS: Case = Case {
    title: "catch-up and recovery: three tries in one order of tokens without releases, one loss of data, one extension",
    size: Size::Large,
    model: |rules| {
        recovery(rules, Bounds { renewals: 1, catch_ups: 1, tokens: Some([1, 3, 2]), ..PATIENT })
    },
};
const PATIENT: Bounds = Bounds { bad_clock: false, releases: false, ..Bounds::TRIES };

fn eligibility(rules: Rules, bounds: AdmissionBounds) -> AnyModel {
    AnyModel::Eligibility(Eligibility::new(rules, bounds))
}

/// At least one loss of data, with recovery.
fn recovery(rules: Rules, bounds: Bounds) -> AnyModel {
    AnyModel::Locks(Locks::new(
        rules,
        Bounds { recovery: true, losses: bounds.losses.max(1), ..bounds },
    ))
}

/// At least one reading for catching up.
fn catch_up(rules: Rules, bounds: Bounds) -> AnyModel {
    AnyModel::Locks(Locks::new(rules, Bounds { catch_ups: bounds.catch_ups.max(1), ..bounds }))
}

/// All cases.
pub static CASES: [&Case; 44] = [
    &TRIES,
    &REPEATS,
    &LOSS_OF_TWO,
    &EVERY_LOSS_OF_TWO,
    &EVERY_EXTENSION,
    &FENCES,
    &LOSS,
    &LOSS_AND_HEAL,
    &HEALS,
    &PATIENCE,
    &EVERY_ORDER_OF_TWO,
    &ADMISSION,
    &EVICTIONS,
    &DURABILITY,
    &BOOTSTRAP,
    &CHANGE,
    &EVERY_LOOK,
    &HEALING,
    &YOUNG,
    &MISSED,
    &ADOPTION_OF_TWO,
    &EVERY_ADOPTION,
    &PATIENT_ADOPTION,
    &ADOPTION_AND_PATIENCE,
    &TWO_ADOPTIONS_AND_PATIENCE,
    &TWO_ADOPTIONS,
    &LONGER_LEASE,
    &CATCH_UP,
    &CATCH_UP_AND_PATIENCE,
    &CATCH_UP_AND_FENCES,
    &CATCH_UP_AND_ADOPTION,
    &EXTENSION,
    &TWO_EXTENSIONS,
    &FENCES_AND_LOSS,
    &TWO_LOSSES,
    &EVERY_ORDER,
    &MORE_ADMISSION,
    &ADOPTION_AND_TWO_LOSSES,
    &ADOPTION_AND_EXTENSION,
    &ADOPTION_AND_REPEATS,
    &TWO_ADOPTIONS_AND_REPEATS,
    &CATCH_UP_ADOPTION_AND_RELEASES,
    &CATCH_UP_AND_TWO_ADOPTIONS,
    &CATCH_UP_AND_REPEATS,
];

macro_rules! mutations {
    ($($rule:ident: $case:ident, $property:ident;)*) => {
        /// Every rule, with the case that needs it.
        pub static MUTATIONS: &[Mutation] = &[$(Mutation {
            rule: stringify!($rule),
            property: $property,
            case: &$case,
            switch: |rules| &mut rules.$rule,
        }),*];
    };
}

mutations! {
    lock_is_kept: TRIES, PROMISED;
    grants_have_nonces: REPEATS, PROMISED;
    undo_is_exact: TRIES, PROMISED;
    undo_spares_extended: REPEATS, PROMISED;
    told_again_is_extended: REPEATS, MUTUAL_EXCLUSION;
    release_leaves_a_tombstone: TRIES, NO_ORPHAN;
    release_keeps_newer: TRIES, MUTUAL_EXCLUSION;
    clock_is_checked: TRIES, NO_LOCKOUT;
    watermark_is_checked: TRIES, FENCING;
    marker_is_checked: LOSS_OF_TWO, MUTUAL_EXCLUSION;
    quarantine_is_waited: LOSS_OF_TWO, MUTUAL_EXCLUSION;
    quarantine_has_nonce: ADMISSION, ONE_HOLDER;
    admission_names_process: ADMISSION, ONE_HOLDER;
    evictions_are_counted: EVICTIONS, NOTHING_FORGOTTEN;
    rewrite_is_noticed: DURABILITY, NOTHING_FORGOTTEN;
    newest_marker_is_known: DURABILITY, NOTHING_FORGOTTEN;
    word_needs_all_nodes: BOOTSTRAP, NOTHING_FORGOTTEN;
    word_needs_witnesses: BOOTSTRAP, ONE_HOLDER;
    word_names_quarantine: BOOTSTRAP, NOTHING_FORGOTTEN;
    word_ends_with_admission: BOOTSTRAP, NOTHING_FORGOTTEN;
    marker_names_configuration: CHANGE, NOTHING_FORGOTTEN;
    reconfiguration_waits: CHANGE, NOTHING_FORGOTTEN;
    marker_names_admission: PATIENCE, FENCING;
    missing_is_repaired: HEALING, NEVER_LOST;
    repair_may_be_old: HEALING, NEVER_LOST;
    extension_marks: HEALING, NEVER_LOST;
    release_unmarks: HEALS, NO_ORPHAN;
    repair_is_timely: PATIENCE, FENCING;
    failed_try_takes_fence_back: HEALING, NEVER_LOST;
    told_fence_stays: TRIES, FENCING;
    plain_fence_stays: TRIES, NO_ORPHAN;
    only_own_fence_goes: TRIES, NO_ORPHAN;
    fence_before_is_restored: EXTENSION, FENCING;
    release_settles_fence: TRIES, NO_ORPHAN;
    fence_outlives_lock: FENCES, NO_ORPHAN;
    late_repair_is_refused: FENCES, NO_ORPHAN;
    release_prolongs_fence: FENCES, NO_ORPHAN;
    adoption_waits_for_clocks: ADOPTION_OF_TWO, FENCING;
    adoption_waits_for_rounds: ADOPTION_AND_PATIENCE, MUTUAL_EXCLUSION;
    adoption_needs_enough: ADOPTION_OF_TWO, MUTUAL_EXCLUSION;
    lost_locks_are_recovered: ADOPTION_OF_TWO, MUTUAL_EXCLUSION;
    adoption_needs_majority: ADOPTION_AND_PATIENCE, FENCING;
    adoption_blocks_longest: PATIENT_ADOPTION, MUTUAL_EXCLUSION;
    adoption_remembers_blockers: TWO_ADOPTIONS, MUTUAL_EXCLUSION;
    adoption_minds_releases: ADOPTION_OF_TWO, NO_ORPHAN;
    admitted_is_caught_up: YOUNG, NEVER_LOST;
    catch_up_needs_majority: CATCH_UP_AND_PATIENCE, FENCING;
    catch_up_follows_admission: CATCH_UP_AND_PATIENCE, FENCING;
    repair_keeps_life: LONGER_LEASE, MUTUAL_EXCLUSION;
}

/// The mutation of a rule.
pub fn mutation(rule: &str) -> Option<&'static Mutation> {
    MUTATIONS.iter().find(|mutation| mutation.rule == rule)
}
