//! With all rules on every case holds. With one rule off its counter-example is found, in a case
//! that holds with the rule.

use redlock_model::catalogue::{CASES, MUTATIONS, Size, mutation};
use redlock_model::eligibility::{Bounds, Eligibility, NO_VOTE_AFTER_LOSS};
use redlock_model::explore::{Until, explore};
use redlock_model::repair::{Held, NEVER_LOST, Repair};
use redlock_model::rules::Rules;

/// Runs one case after the other: each uses all cores.
#[test]
fn all_small_cases_hold_with_all_rules() {
    for case in CASES.iter().filter(|case| case.size == Size::Small) {
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

fn assert_needed(rule: &str) {
    let mutation = mutation(rule).expect("a rule");
    let outcome = mutation.run(false);
    println!("without {rule}, in \"{}\": {outcome}", mutation.case.title);
    let story = outcome.violated.get(mutation.property);
    assert!(story.is_some_and(|story| story.len() > 1), "no violation without {rule}: {outcome}");
}

macro_rules! each_is_needed {
    ($($rule:ident)*) => {
        mod without {
            $(#[test] fn $rule() { super::assert_needed(stringify!($rule)); })*
        }

        #[test]
        fn every_rule_is_tested_once() {
            let tested = [$(stringify!($rule)),*];
            let all: Vec<_> = MUTATIONS.iter().map(|mutation| mutation.rule).collect();
            assert_eq!(all, tested);
            let mut all = all;
            let rules = format!("{:?}", Rules::ALL);
            let mut fields = fields(&rules);
            all.sort_unstable();
            fields.sort_unstable();
            assert_eq!(all, fields);
        }
    };
}

each_is_needed! {
    lock_is_kept
    grants_have_nonces
    undo_is_exact
    undo_spares_extended
    told_again_is_extended
    release_leaves_a_tombstone
    release_keeps_newer
    clock_is_checked
    watermark_is_checked
    marker_is_checked
    quarantine_is_waited
    quarantine_has_nonce
    admission_names_process
    evictions_are_counted
    rewrite_is_noticed
    newest_marker_is_known
    word_needs_all_nodes
    word_needs_witnesses
    word_names_quarantine
    word_ends_with_admission
    marker_names_configuration
    reconfiguration_waits
    marker_names_admission
    missing_is_repaired
    repair_may_be_old
    extension_marks
    release_unmarks
    repair_is_timely
    failed_try_takes_fence_back
    told_fence_stays
    plain_fence_stays
    only_own_fence_goes
    fence_before_is_restored
    release_settles_fence
    fence_outlives_lock
    late_repair_is_refused
    release_prolongs_fence
    adoption_waits_for_clocks
    adoption_waits_for_rounds
    adoption_needs_enough
    lost_locks_are_recovered
    adoption_needs_majority
    adoption_blocks_longest
    adoption_remembers_blockers
    adoption_minds_releases
    admitted_is_caught_up
    catch_up_needs_majority
    catch_up_follows_admission
    repair_keeps_life
}

fn fields(debug: &str) -> Vec<&str> {
    debug.split([' ', '{', '}', ',']).filter_map(|word| word.strip_suffix(':')).collect()
}

/// Rules about the model's assumptions: a name leads to one process, and clocks keep their promise.
const ASSUMED: [&str; 4] =
    ["name_is_followed", "returned_waits", "two_alive_are_noticed", "rate_is_checked"];

#[test]
fn model_has_every_rule_of_the_core() {
    let code = format!("{:?}", redlock_core::node::SafetyRules::ALL);
    for rule in fields(&code).into_iter().filter(|rule| !ASSUMED.contains(rule)) {
        assert!(mutation(rule).is_some(), "the model lacks the core's rule {rule}");
    }
}

/// A known limit, not a promise.
#[test]
fn careless_operation_breaks_eligibility() {
    let careless = Bounds { is_operated_well: false, faults: 2, ..Bounds::LOSSES };
    for bounds in [
        Bounds { durability: true, ..careless },
        Bounds { change: true, ..careless },
        Bounds { nodes: 2, processes: false, bootstrap: true, restarts: 1, ..careless },
    ] {
        let outcome = explore(
            Eligibility::new(Rules::ALL, bounds),
            Until::Violated(NO_VOTE_AFTER_LOSS),
            1,
            false,
        );
        println!("{bounds:?}: {outcome}");
        assert!(outcome.violated.contains_key(NO_VOTE_AFTER_LOSS), "{bounds:?}");
    }
}

/// A known limit, not a promise. It would be good news if this test failed.
#[test]
fn repair_fails_on_a_node_absent_before_first_extension() {
    let outcome =
        explore(Repair::new(Rules::ALL, 2, Held::Granted), Until::Violated(NEVER_LOST), 1, false);
    println!("{outcome}");
    assert!(outcome.violated.contains_key(NEVER_LOST));
}

/// A catch-up follows an admission, and a slow node is not admitted again. Only an extension finds
/// the gap.
#[test]
fn catch_up_alone_loses_a_lock_missed_by_a_slow_node() {
    let rules = Rules { missing_is_repaired: false, ..Rules::ALL };
    let outcome =
        explore(Repair::new(rules, 2, Held::Missed), Until::Violated(NEVER_LOST), 1, false);
    println!("{outcome}");
    assert!(outcome.violated.contains_key(NEVER_LOST));
}
