//! With all rules on, every small and medium case holds. The tests in the catalogue switch off one
//! rule each. The other tests in this file show known limits.

use redlock_model::catalogue::{CASES, Size};
use redlock_model::eligibility::{Bounds, Eligibility, NO_VOTE_AFTER_LOSS};
use redlock_model::explore::{Until, explore};
use redlock_model::repair::{Held, NEVER_LOST, Repair};
use redlock_model::rules::Rules;

/// Runs the cases one after the other, because each uses all cores.
fn all_hold(size: Size) {
    for case in CASES.iter().filter(|case| case.size == size) {
        let outcome = case.run(2, false);
        println!("{}: {outcome}", case.title);
        assert!(outcome.complete, "{}: exploration is incomplete", case.title);
        assert!(outcome.violated.is_empty(), "{}: {outcome}", case.title);
        assert!(
            !outcome.held.is_empty() && outcome.seen.values().all(|seen| *seen),
            "{}: {outcome}",
            case.title
        );
    }
}

#[test]
fn all_small_cases_hold_with_all_rules() {
    all_hold(Size::Small);
}

mod slow {
    use super::*;

    #[test]
    fn all_medium_cases_hold_with_all_rules() {
        all_hold(Size::Medium);
    }

    #[test]
    fn careless_bootstrap_breaks_eligibility() {
        let bounds =
            Bounds { nodes: 2, processes: false, bootstrap: true, restarts: 1, ..CARELESS };
        breaks_eligibility(bounds);
    }
}

const CARELESS: Bounds = Bounds { is_operated_well: false, faults: 2, ..Bounds::LOSSES };

fn breaks_eligibility(bounds: Bounds) {
    let model = Eligibility::new(Rules::ALL, bounds);
    let outcome = explore(model, Until::Violated(NO_VOTE_AFTER_LOSS), 1, false);
    println!("{bounds:?}: {outcome}");
    assert!(outcome.violated.contains_key(NO_VOTE_AFTER_LOSS), "{bounds:?}");
}

/// A known limit, not a promise: if operators break the assumptions of `eligibility`, a node votes
/// although it may have lost a lock.
#[test]
fn careless_operation_breaks_eligibility() {
    breaks_eligibility(Bounds { durability: true, ..CARELESS });
    breaks_eligibility(Bounds { change: true, ..CARELESS });
}

/// A known limit, not a promise: only catching up helps such a node. If this test fails, the limit
/// is gone.
#[test]
fn repair_fails_on_a_node_absent_before_first_extension() {
    let outcome =
        explore(Repair::new(Rules::ALL, 2, Held::Granted), Until::Violated(NEVER_LOST), 1, false);
    println!("{outcome}");
    assert!(outcome.violated.contains_key(NEVER_LOST));
}

/// A node catches up only after an admission. A node that was merely slow keeps its admission, so
/// it never catches up. Only an extension repairs its missing lock.
#[test]
fn catch_up_alone_loses_a_lock_missed_by_a_slow_node() {
    let rules = Rules { missing_is_repaired: false, ..Rules::ALL };
    let outcome =
        explore(Repair::new(rules, 2, Held::Missed), Until::Violated(NEVER_LOST), 1, false);
    println!("{outcome}");
    assert!(outcome.violated.contains_key(NEVER_LOST));
}
