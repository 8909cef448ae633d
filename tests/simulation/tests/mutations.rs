//! The proof that the simulation notices: with any one rule switched off, the checker finds a violation within a few
//! seeds. All but one are found by the storm, that is by random search. Repair is not about safety: that it is off can be
//! seen only in a lock that is lost, so a scenario of its own, rolling restarts, looks for that. The clock rule is not here:
//! what it prevents, one bad clock that makes a lock unusable for all others, breaks no promise that the checker knows.

use redlock_sim::checker::Demand;
use redlock_sim::plan::Plan;
use redlock_sim::rule::Rule;
use redlock_sim::search::search;

const MOST: u64 = 400;

#[track_caller]
fn is_missed(rule: Rule, scenario: &str, plan: fn(u64) -> Plan, wanted: &[Demand]) {
    let off = |seed| rule.off(plan(seed));
    let found = search(0..MOST, wanted, true, off, |_, _| {});
    let Some((seed, violation)) = found.violations.first() else {
        panic!("{MOST} seeds without {rule} and no violation");
    };
    println!("without {rule}: {} seeds needed; seed {seed}: {violation}", seed + 1);
    println!(
        "  cargo run --release -p redlock-sim -- --seed {seed} --without {rule} --scenario {scenario}"
    );
}

const SAFETY: [Demand; 3] = [Demand::Exclusion, Demand::Fencing, Demand::Register];

#[test]
fn without_keeping_a_lock_for_its_owner() {
    is_missed(Rule::LockIsKept, "storm", Plan::storm, &SAFETY);
}

#[test]
fn without_the_barrier_of_a_release() {
    is_missed(Rule::ReleaseLeavesATombstone, "storm", Plan::storm, &[Demand::Orphan]);
}

#[test]
fn without_the_scope_of_a_release() {
    is_missed(Rule::ReleaseKeepsNewer, "storm", Plan::storm, &SAFETY);
}

#[test]
fn without_an_exact_undo() {
    is_missed(Rule::UndoIsExact, "storm", Plan::storm, &[Demand::Exclusion, Demand::Promised]);
}

#[test]
fn without_the_fence() {
    is_missed(Rule::WatermarkIsChecked, "storm", Plan::storm, &[Demand::Fencing]);
}

#[test]
fn without_fences_that_outlive_their_locks() {
    is_missed(Rule::FenceOutlivesLock, "storm", Plan::storm, &[Demand::Orphan, Demand::Fencing]);
}

#[test]
fn without_the_marker() {
    is_missed(Rule::MarkerIsChecked, "storm", Plan::storm, &SAFETY);
}

#[test]
fn without_the_quarantine() {
    is_missed(Rule::QuarantineIsWaited, "storm", Plan::storm, &SAFETY);
}

#[test]
fn without_giving_back_what_was_forgotten() {
    is_missed(Rule::LostLocksAreRecovered, "storm", Plan::storm, &SAFETY);
}

#[test]
fn without_following_names() {
    let wanted = [&SAFETY[..], &[Demand::Orphan]].concat();
    is_missed(Rule::NameIsFollowed, "storm", Plan::storm, &wanted);
}

#[test]
fn without_the_wait_of_a_process_that_came_back() {
    is_missed(Rule::ReturnedWaits, "moved", Plan::moved, &SAFETY);
}

#[test]
fn without_noticing_two_processes_alive() {
    is_missed(Rule::TwoAliveAreNoticed, "moved", Plan::moved, &SAFETY);
}

#[test]
fn without_the_skew_in_the_marker() {
    is_missed(Rule::MarkerNamesSkew, "skews", Plan::skews, &SAFETY);
}

#[test]
fn without_healing() {
    // Catching up after an eligibility would carry the lock, too.
    let plan = |seed| Rule::AdmittedIsCaughtUp.off(Plan::rolling(seed, false));
    is_missed(Rule::MissingIsRepaired, "rolling", plan, &[Demand::Kept]);
}

#[test]
fn without_catching_up_after_an_admission() {
    is_missed(Rule::AdmittedIsCaughtUp, "young", Plan::young, &[Demand::Kept]);
}

/// Here the rule is the operator's alone: gateways always wait.
#[test]
fn without_the_wait_of_a_change_of_configuration() {
    is_missed(Rule::QuarantineIsWaited, "reconfigure", Plan::reconfigure, &[Demand::Exclusion]);
}
