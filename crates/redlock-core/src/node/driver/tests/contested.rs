//! A new process with its predecessor's file under the same name is contested if both were alive.

use super::*;
use crate::node::eligibility::Durability;

fn durable_master() -> Facts {
    Facts { durability: Durability::Durable, ..Facts::volatile_master() }
}

/// Connects to a durable process that has loaded its predecessor's file, after the session with the
/// predecessor has ended.
fn restarted_with_the_file(bench: &mut Bench, uptime_seconds: u64) -> Vec<Action> {
    let facts = Facts { run_id: "b".repeat(40), uptime_seconds, ..durable_master() };
    bench.connect();
    let marker = Some(bench.marker.clone());
    bench.on(Event::Probed(Ok(ProbeReply { facts, marker, is_caught_up: true, number: 0 })))
}

#[track_caller]
fn assert_contested(actions: &[Action]) {
    let contested = |to: &str| to.contains(":contested.");
    assert!(
        matches!(actions, [Action::SwapMarker(MarkerSwap { to, .. })] if contested(to)),
        "{actions:?}"
    );
}

#[test]
fn a_process_with_a_live_predecessor_is_contested() {
    let mut bench = Bench::admitted_as(durable_master(), false);
    let other = Facts { run_id: "b".repeat(40), ..durable_master() };
    let moved = Event::Followed(Ok(ProbeReply {
        facts: other,
        marker: None,
        is_caught_up: false,
        number: 0,
    }));
    assert_eq!(bench.on(moved), [Action::Disconnect]);
    assert_contested(&restarted_with_the_file(&mut bench, 0));
}

#[test]
fn a_process_older_than_its_predecessors_end_is_contested() {
    // The predecessor fell silent 10 s ago. A process that reports 11 s has run for more than 10 s.
    for (uptime_seconds, is_contested) in
        [(0, false), (1, false), (10, false), (11, true), (3_600, true)]
    {
        let mut bench = Bench::admitted_as(durable_master(), false);
        bench.now += Duration::from_secs(10);
        bench.clock.advance(Duration::from_secs(10));
        assert_eq!(bench.on(Event::Closed("gone".into())), [Action::Disconnect]);
        let actions = restarted_with_the_file(&mut bench, uptime_seconds);
        if is_contested {
            assert_contested(&actions);
        } else {
            assert_eq!(
                (actions.as_slice(), bench.state()),
                (&[][..], NodeState::Quarantined),
                "{uptime_seconds} s"
            );
            assert!(bench.driver.status().borrow().detail.contains("restarted with its data"));
        }
    }
}

/// This gateway stands still for a minute between the answer to its probe and the reading of its
/// own clock.
#[test]
fn a_gateway_that_stands_still_notices_a_live_predecessor() {
    let mut bench = Bench::admitted_as(durable_master(), false);
    bench.now += Duration::from_secs(10);
    bench.clock.advance(Duration::from_secs(10));
    assert_eq!(bench.on(Event::Closed("gone".into())), [Action::Disconnect]);
    bench.connect();
    let facts = Facts { run_id: "b".repeat(40), uptime_seconds: 11, ..durable_master() };
    let marker = Some(bench.marker.clone());
    let probed = Event::Probed(Ok(ProbeReply { facts, marker, is_caught_up: true, number: 0 }));
    bench.clock.advance(Duration::from_secs(60));
    assert_contested(&bench.on(probed));
}
