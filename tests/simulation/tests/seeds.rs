//! With all rules on, no seed violates a promise. The variable `REDLOCK_SIM_SEEDS` sets the number
//! of seeds. The default is 40, for the daily level. `tests/run --part simulation` sets it to 300.

use std::collections::{BTreeMap, BTreeSet};

use redlock_sim::checker::Demand;
use redlock_sim::client::deferred::WINDOW_MS;
use redlock_sim::history::{Answer, Moment, Operation, Request};
use redlock_sim::plan::Plan;
use redlock_sim::rule::Rule;
use redlock_sim::run::run;
use redlock_sim::search::{Found, search};

fn seeds() -> u64 {
    match std::env::var("REDLOCK_SIM_SEEDS") {
        Ok(text) => text.parse().expect("REDLOCK_SIM_SEEDS is a number"),
        Err(_) => 40,
    }
}

#[track_caller]
fn assert_clean(found: &Found, scenario: &str) {
    println!("{}", found.summary);
    for (seed, violation) in &found.violations {
        eprintln!("seed {seed}: {violation}");
        eprintln!("  cargo run --release -p redlock-sim -- --seed {seed} --scenario {scenario}");
    }
    assert!(
        found.violations.is_empty(),
        "{} seeds with violations, see above",
        found.violations.len()
    );
}

#[test]
fn storms_violate_nothing() {
    let found = search(0..seeds(), &Demand::ALL, false, Plan::storm, |_, _| {});
    let summary = &found.summary;
    assert_clean(&found, "storm");
    // A simulation in which nothing happens would show no violations either.
    assert!(
        summary.grants > 50 * summary.histories && summary.late > 5 * summary.histories,
        "{summary}"
    );
    assert!(
        summary.counts.repairs > summary.histories
            && summary.counts.quarantines > 10 * summary.histories
    );
}

#[test]
fn deferred_requests_violate_nothing() {
    let found = search(0..seeds(), &Demand::ALL, false, Plan::deferred, |_, _| {});
    let summary = &found.summary;
    assert_clean(&found, "deferred");
    assert!(summary.grants > 50 * summary.histories, "{summary}");
    // Many grants must be claimed, given up, and left to end.
    let mut claimed = 0;
    let mut unclaimed = 0;
    for history in (0..30).map(|seed| run(&Plan::deferred(seed)).history) {
        let owner = |operation: &Operation| match operation.request {
            Request::Acquire { owner, .. } => owner,
            Request::Extend { .. } | Request::Release { .. } => None,
        };
        let granted: BTreeSet<_> = history
            .operations
            .iter()
            .filter(|operation| matches!(operation.answer, Some(Answer::Granted { .. })))
            .filter_map(owner)
            .collect();
        let deferred = history.operations.iter().filter(|operation| {
            matches!(operation.request, Request::Acquire { ttl_ms: WINDOW_MS, .. })
                && operation.answer == Some(Answer::Cancelled)
        });
        for owner in deferred.filter_map(owner) {
            *if granted.contains(&owner) { &mut claimed } else { &mut unclaimed } += 1;
        }
    }
    assert!(claimed > 300 && unclaimed > 300, "{claimed}, {unclaimed}");
}

#[test]
fn copies_of_requests_violate_nothing() {
    let found = search(0..seeds(), &Demand::ALL, false, Plan::copies, |_, _| {});
    let summary = &found.summary;
    assert_clean(&found, "copies");
    assert!(summary.grants > 50 * summary.histories, "{summary}");
    // Many owners must have three requests or more under way at once.
    let mut crowds = 0;
    let mut replayed = 0;
    for history in (0..30).map(|seed| run(&Plan::copies(seed)).history) {
        let mut by_owner = BTreeMap::<_, Vec<_>>::new();
        for operation in &history.operations {
            if let Request::Acquire { owner: Some(owner), .. } = operation.request {
                by_owner.entry((owner, operation.name)).or_default().push(operation);
            }
            let is_replayed =
                matches!(operation.answer, Some(Answer::Granted { replayed: true, .. }));
            replayed += u32::from(is_replayed);
        }
        let under_way = |requests: &[&Operation], at: Moment| {
            let is_under_way =
                |it: &&&Operation| it.start <= at && it.end.is_none_or(|end| at < end);
            requests.iter().filter(is_under_way).count()
        };
        let crowded = by_owner
            .values()
            .filter(|requests| requests.iter().any(|it| under_way(requests, it.start) >= 3));
        crowds += crowded.count();
    }
    println!("{crowds} times three copies at once, {replayed} grants returned again");
    assert!(crowds > 500 && replayed > 500, "{crowds}, {replayed}");
}

#[test]
fn an_extended_lock_outlives_the_restart_of_every_master() {
    let found =
        search(0..seeds() / 10, &Demand::ALL, false, |seed| Plan::rolling(seed, false), |_, _| {});
    assert_clean(&found, "rolling");
    assert!(found.summary.counts.repairs > 3 * found.summary.histories, "{}", found.summary);
    // Catching up is off here, so extensions alone must repair the lock.
    let plan = |seed| {
        "admitted-is-caught-up".parse::<Rule>().expect("a rule").off(Plan::rolling(seed, false))
    };
    assert_clean(
        &search(0..seeds() / 10, &Demand::ALL, false, plan, |_, _| {}),
        "rolling --without admitted-is-caught-up",
    );
}

#[test]
fn young_locks_outlive_rolling_restarts() {
    let found = search(0..seeds() / 10, &Demand::ALL, false, Plan::young, |_, _| {});
    assert_clean(&found, "young");
    let summary = &found.summary;
    assert!(
        summary.grants > 100 * summary.histories && summary.counts.repairs > 20 * summary.histories,
        "{summary}"
    );
}

#[test]
fn queues_keep_their_order_and_answer_every_waiter() {
    let found = search(0..seeds() / 5, &Demand::ALL, false, Plan::queue, |_, _| {});
    let summary = &found.summary;
    assert_clean(&found, "queue");
    let per_history = |figure| figure / summary.histories;
    assert!(
        per_history(summary.waits.granted) > 200 && per_history(summary.waits.cancelled) > 10,
        "{summary}"
    );
    let counts = summary.counts;
    assert!(
        per_history(counts.handed_locally) > 50 && per_history(counts.handed_remotely) > 50,
        "{summary}"
    );
    assert!(
        summary.idle.per_mille(500).is_some_and(|median| median < 12),
        "a handoff takes about one round trip: {summary}"
    );
}

#[test]
fn change_of_configuration_grants_no_lock_twice() {
    assert_clean(
        &search(0..seeds(), &Demand::ALL, false, Plan::reconfigure, |_, _| {}),
        "reconfigure",
    );
    // The test shows something only if both configurations grant locks and the operator is
    // interrupted.
    let mut by_old = 0;
    let mut by_new = 0;
    let mut interrupted = 0;
    for history in (0..60).map(|seed| run(&Plan::reconfigure(seed)).history) {
        let granted = |new: bool| {
            let by = |operation: &&Operation| {
                matches!(operation.answer, Some(Answer::Granted { .. }))
                    && (operation.gateway >= 2) == new
            };
            history.operations.iter().filter(by).count()
        };
        by_old += u32::from(granted(false) > 5);
        by_new += u32::from(granted(true) > 5);
        interrupted += history.notes.iter().filter(|note| note.text == "is interrupted").count();
    }
    assert!(by_old > 20 && by_new > 20 && interrupted > 20, "{by_old}, {by_new}, {interrupted}");
}

#[test]
fn raising_max_ttl_under_losses_violates_nothing() {
    let found = search(0..seeds() / 3, &Demand::ALL, false, Plan::raise, |_, _| {});
    assert_clean(&found, "raise");
    let situation = |name: &str| {
        let situations = &found.summary.situations;
        situations.get(name).copied().unwrap_or_default()
    };
    let histories = found.summary.histories;
    assert_eq!(situation("raises done"), histories);
    assert!(
        situation("raises interrupted") > histories / 2
            && situation("losses around a raise") > 2 * histories
            && situation("gateways that forgot") > histories / 2,
        "{}",
        found.summary
    );
}

/// A master without data grants the lock to the next client that tries. That proposal fails on the
/// other masters and is undone. The undo must set the watermark back. If a larger one stayed, it
/// would refuse the repair, and every seed would lose the lock.
#[test]
fn contended_lock_outlives_restarts() {
    let plan = |seed| Plan::rolling(seed, true);
    let found = search(0..seeds() / 5, &Demand::ALL, false, plan, |_, _| {});
    assert_clean(&found, "contended");
    assert!(found.summary.counts.repairs > found.summary.histories, "{}", found.summary);
}
