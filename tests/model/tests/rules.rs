//! With all rules on everything holds; with any rule off its own counter-example is found, in a case that holds with it.

use redlock_model::catalogue::{CASES, MUTATIONS, Size, mutation};
use redlock_model::eligibility::{Bounds, Eligibility, NOTHING_FORGOTTEN};
use redlock_model::explore::{Until, explore};
use redlock_model::repair::{Held, NEVER_LOST, Repair};
use redlock_model::rules::Rules;

/// One after the other: each uses all cores.
#[test]
fn with_all_rules_on_everything_holds_and_is_explored_wholly() {
    for case in CASES.iter().filter(|case| case.size == Size::Small) {
        let outcome = case.run(2, false);
        println!("{}: {outcome}", case.title);
        assert!(outcome.complete, "{}: not explored wholly", case.title);
        assert!(outcome.violated.is_empty(), "{}: {outcome}", case.title);
        assert!(
            !outcome.held.is_empty() && outcome.seen.values().all(|seen| *seen),
            "{}: {outcome}",
            case.title
        );
    }
}

fn is_missed(rule: &str) {
    let mutation = mutation(rule).expect("a rule");
    let outcome = mutation.run(false);
    println!("without {rule}, in \"{}\": {outcome}", mutation.case.title);
    let story = outcome.violated.get(mutation.property);
    assert!(
        story.is_some_and(|story| story.len() > 1),
        "nothing goes wrong without {rule}: {outcome}"
    );
}

macro_rules! each_is_missed {
    ($($rule:ident)*) => {
        mod without {
            $(#[test] fn $rule() { super::is_missed(stringify!($rule)); })*
        }

        #[test]
        fn every_rule_is_switched_off_once() {
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

each_is_missed! {
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

/// They watch over what the model assumes: that a name leads to one process, and clocks keep their promise.
const ASSUMED: [&str; 4] =
    ["name_is_followed", "returned_waits", "two_alive_are_noticed", "rate_is_checked"];

#[test]
fn the_rules_of_the_code_are_rules_of_the_model() {
    let code = format!("{:?}", redlock_core::node::SafetyRules::ALL);
    for rule in fields(&code).into_iter().filter(|rule| !ASSUMED.contains(rule)) {
        assert!(mutation(rule).is_some(), "the code has a rule {rule} that the model has not");
    }
}

/// Known limits, as the next one.
#[test]
fn admission_is_safe_only_as_far_as_clusters_are_operated_well() {
    let careless = Bounds { is_operated_well: false, faults: 2, ..Bounds::LOSSES };
    for bounds in [
        Bounds { durability: true, ..careless },
        Bounds { change: true, ..careless },
        Bounds { nodes: 2, processes: false, bootstrap: true, restarts: 1, ..careless },
    ] {
        let outcome = explore(
            Eligibility::new(Rules::ALL, bounds),
            Until::Violated(NOTHING_FORGOTTEN),
            1,
            false,
        );
        println!("{bounds:?}: {outcome}");
        assert!(outcome.violated.contains_key(NOTHING_FORGOTTEN), "{bounds:?}");
    }
}

/// A known limit, not a promise: it would be good news if this failed.
#[test]
fn healing_does_not_help_on_a_node_that_was_away_from_before_the_first_extension() {
    let outcome =
        explore(Repair::new(Rules::ALL, 2, Held::Granted), Until::Violated(NEVER_LOST), 1, false);
    println!("{outcome}");
    assert!(outcome.violated.contains_key(NEVER_LOST));
}

/// A catch-up follows an eligibility, and a node that was slow is not admitted again. Only an extension finds the gap.
#[test]
fn catch_up_alone_loses_a_lock_that_a_slow_node_missed() {
    let rules = Rules { missing_is_repaired: false, ..Rules::ALL };
    let outcome =
        explore(Repair::new(rules, 2, Held::Missed), Until::Violated(NEVER_LOST), 1, false);
    println!("{outcome}");
    assert!(outcome.violated.contains_key(NEVER_LOST));
}
