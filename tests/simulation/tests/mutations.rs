//! Proves that the simulation detects faults: with one rule off, the checker finds a violation
//! within a few seeds.
//!
//! Most rules are tested in the storm, which is a random search. Some rules need a scenario of
//! their own. Repair does not affect safety: if it is off, the only sign is a lost lock, so the
//! test uses rolling restarts. The rule about a node's clock is not tested here. It only keeps one
//! bad clock from making a lock unusable for everybody else, and the checker knows no promise about
//! that.
//!
//! The daily level leaves out the module `slow`. The part `simulation` of tests/parts runs all.

use redlock_sim::checker::Demand;
use redlock_sim::plan::Plan;
use redlock_sim::rule::Rule;
use redlock_sim::search::search;

/// Without its rule, at least one history in a hundred should show a violation. A rule for which fewer
/// do needs another scenario. So if this many histories show none, that is no coincidence.
const MAX_SEEDS: u64 = 2_000;

/// `rules` are the rules to switch off, with commas between them.
#[track_caller]
fn assert_violated(rules: &str, scenario: &str, plan: fn(u64) -> Plan, wanted: &[Demand]) {
    let off: Vec<Rule> = rules.split(',').map(|rule| rule.parse().expect("a rule")).collect();
    let without = |seed| off.iter().fold(plan(seed), |plan, rule| rule.off(plan));
    let found = search(0..MAX_SEEDS, wanted, true, without, |_, _| {});
    let Some((seed, violation)) = found.violations.first() else {
        panic!("no violation without {rules} in {MAX_SEEDS} seeds");
    };
    println!("without {rules}: {} seeds needed; seed {seed}: {violation}", seed + 1);
    println!(
        "  cargo run --release -p redlock-sim -- --seed {seed} --without {rules} --scenario \
         {scenario}"
    );
}

const SAFETY: [Demand; 3] = [Demand::Exclusion, Demand::Fencing, Demand::Register];

/// A deferred grant may have been claimed at another gateway, so only an undo may end it early.
#[test]
fn with_a_release_of_unclaimed_grants_by_their_token() {
    let plan = |seed| Plan { releases_unclaimed: true, ..Plan::deferred(seed) };
    let found = search(0..MAX_SEEDS, &SAFETY, true, plan, |_, _| {});
    let (seed, violation) = found.violations.first().expect("a violation");
    println!("{} seeds needed; seed {seed}: {violation}", seed + 1);
}

#[test]
fn without_keeping_a_lock_for_its_owner() {
    assert_violated("lock-is-kept", "storm", Plan::storm, &SAFETY);
}

#[test]
fn without_the_tombstone_of_a_release() {
    assert_violated("release-leaves-a-tombstone", "storm", Plan::storm, &[Demand::Orphan]);
}

#[test]
fn without_the_watermark() {
    assert_violated("watermark-is-checked", "storm", Plan::storm, &[Demand::Fencing]);
}

#[test]
fn without_watermarks_that_outlive_their_locks() {
    assert_violated(
        "watermark-outlives-lock",
        "storm",
        Plan::storm,
        &[Demand::Orphan, Demand::Fencing],
    );
}

#[test]
fn without_the_marker() {
    assert_violated("marker-is-checked", "storm", Plan::storm, &SAFETY);
}

#[test]
fn without_the_quarantine() {
    assert_violated("quarantine-is-waited", "storm", Plan::storm, &SAFETY);
}

#[test]
fn without_the_wait_of_a_process_that_came_back() {
    assert_violated("returned-waits", "moved", Plan::moved, &SAFETY);
}

#[test]
fn without_the_numbers_of_calls() {
    assert_violated("answered-calls-are-known", "moved", Plan::moved, &SAFETY);
}

#[test]
fn without_the_skew_in_the_marker() {
    assert_violated("marker-names-skew", "skews", Plan::skews, &SAFETY);
}

#[test]
fn without_the_wait_for_the_largest_bound() {
    assert_violated("larger-bound-is-waited", "raise", Plan::raise, &SAFETY);
}

#[test]
fn without_probing_a_majority_before_a_quarantine_ends() {
    assert_violated("majority-is-probed", "raise", Plan::raise, &SAFETY);
}

#[test]
fn without_raising_every_bound_first() {
    assert_violated("bounds-rise-first", "raise", Plan::raise, &SAFETY);
}

/// Catching up after an admission would also keep the lock, so it is off too.
#[test]
fn without_repair() {
    let rules = "missing-is-repaired,admitted-is-caught-up";
    assert_violated(rules, "rolling", |seed| Plan::rolling(seed, false), &[Demand::Kept]);
}

/// Repair and catching up would mostly give the lock back before the next loss, so they are off too.
#[test]
fn without_recovery_of_lost_locks() {
    let rules = "lost-locks-are-recovered,missing-is-repaired,admitted-is-caught-up";
    assert_violated(rules, "contended", |seed| Plan::rolling(seed, true), &SAFETY);
}

#[test]
fn without_catching_up_after_an_admission() {
    assert_violated("admitted-is-caught-up", "young", Plan::young, &[Demand::Kept]);
}

/// In this scenario the rule switches only the operator's waiting. Gateways always wait.
#[test]
fn without_the_wait_of_a_change_of_configuration() {
    assert_violated("quarantine-is-waited", "reconfigure", Plan::reconfigure, &[Demand::Exclusion]);
}

#[test]
fn without_following_names() {
    assert_violated("name-is-followed", "moved", Plan::moved, &SAFETY);
}

/// These need many seeds: 10 to 30 s of processor time each.
mod slow {
    use super::*;

    #[test]
    fn without_the_scope_of_a_release() {
        assert_violated("release-keeps-newer", "storm", Plan::storm, &SAFETY);
    }

    #[test]
    fn without_an_exact_undo() {
        let wanted = [Demand::Exclusion, Demand::Promised];
        assert_violated("undo-is-exact", "deferred", Plan::deferred, &wanted);
    }

    #[test]
    fn without_the_limit_in_the_marker() {
        assert_violated("limit-is-checked", "raise", Plan::raise, &SAFETY);
    }
}
