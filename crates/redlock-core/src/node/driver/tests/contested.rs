//! A new process with its predecessor's file under the same name is contested if it lacks, or may
//! lack, calls that the predecessor has answered.

use super::*;
use crate::node::eligibility::Durability;

fn durable_master() -> Facts {
    Facts { durability: Durability::Durable, ..Facts::volatile_master() }
}

/// A driver of a durable node that has answered this many calls, including the one at its
/// admission. One more call is under way.
fn answered(calls: u64) -> Bench {
    let mut bench = Bench::admitted_as(durable_master(), false);
    for _ in 1..calls {
        bench.submit(1);
        bench.call();
        assert_eq!(bench.on(Event::Answered(Ok(answer(vec![Vote::Granted])))), []);
    }
    bench.submit(1);
    bench.call();
    bench
}

/// Connects to a durable process that has loaded its predecessor's file, after the session with the
/// predecessor has ended.
fn restarted_with_the_file(bench: &mut Bench, number: u64) -> Vec<Action> {
    assert_eq!(bench.on(Event::Closed("gone".into())), [Action::Disconnect]);
    let facts = Facts { run_id: "b".repeat(40), ..durable_master() };
    bench.connect();
    let marker = Some(bench.marker.clone());
    bench.on(Event::Probed(Ok(ProbeReply { facts, marker, is_caught_up: true, number })))
}

fn is_contested(actions: &[Action]) -> bool {
    let contested = |to: &str| to.contains(":contested.");
    matches!(actions, [Action::SwapMarker(MarkerSwap { to, .. })] if contested(to))
}

#[test]
fn a_process_without_an_answered_call_is_contested() {
    for (number, lacks_calls) in [(0, true), (2, true), (3, false), (4, false)] {
        let mut bench = answered(3);
        let actions = restarted_with_the_file(&mut bench, number);
        assert_eq!(is_contested(&actions), lacks_calls, "{number}: {actions:?}");
        if !lacks_calls {
            assert_eq!((actions.as_slice(), bench.state()), (&[][..], NodeState::Quarantined));
            assert!(bench.driver.status().borrow().detail.contains("restarted with its data"));
        }
    }
}

/// The master stores no number for a call whose operations changed nothing, or whose writes failed.
#[test]
fn a_call_without_a_kept_number_need_not_be_known() {
    let mut bench = answered(3);
    let not_kept = Answer { is_number_kept: false, ..answer(vec![Vote::Missing]) };
    assert_eq!(bench.on(Event::Answered(Ok(not_kept))), []);
    assert!(!is_contested(&restarted_with_the_file(&mut bench, 3)));
}

/// The process answers in one session. The next session with it ends before any answer.
#[test]
fn an_answer_counts_in_later_sessions_with_the_process() {
    let mut bench = answered(3);
    assert_eq!(bench.on(Event::Closed("gone".into())), [Action::Disconnect]);
    bench.connect();
    let reply = ProbeReply {
        facts: durable_master(),
        marker: Some(bench.marker.clone()),
        is_caught_up: true,
        number: 3,
    };
    bench.on(Event::Probed(Ok(reply)));
    assert_eq!(bench.on(Event::Loaded(Ok(Engine::Lua))), [Action::Call]);
    assert!(is_contested(&restarted_with_the_file(&mut bench, 2)));
}

/// Locks of calls that were answered more than a quarantine ago have ended.
#[test]
fn answers_older_than_a_quarantine_need_not_be_known() {
    for (passed, lacks_calls) in [(MAX_TTL - Duration::from_secs(1), true), (MAX_TTL, false)] {
        let mut bench = answered(3);
        bench.clock.advance(passed);
        assert_eq!(
            is_contested(&restarted_with_the_file(&mut bench, 0)),
            lacks_calls,
            "{passed:?}"
        );
    }
}

/// The first new process knows all calls. It ends before it votes, and the second one lacks calls.
#[test]
fn each_new_process_is_compared() {
    let mut bench = answered(3);
    assert!(!is_contested(&restarted_with_the_file(&mut bench, 3)));
    assert_eq!(bench.on(Event::Closed("gone".into())), [Action::Disconnect]);
    bench.connect();
    let facts = Facts { run_id: "d".repeat(40), ..durable_master() };
    let marker = Some(bench.marker.clone());
    let reply = ProbeReply { facts, marker, is_caught_up: true, number: 2 };
    assert!(is_contested(&bench.on(Event::Probed(Ok(reply)))));
}

/// The session with the predecessor still answers when the name leads to another process.
#[test]
fn a_process_with_a_live_predecessor_is_contested() {
    let mut bench = answered(3);
    let other = Facts { run_id: "b".repeat(40), ..durable_master() };
    let reply = ProbeReply { facts: other, marker: None, is_caught_up: false, number: 3 };
    assert_eq!(bench.on(Event::Followed(Ok(reply))), [Action::Disconnect]);
    let facts = Facts { run_id: "b".repeat(40), ..durable_master() };
    bench.connect();
    let marker = Some(bench.marker.clone());
    let reply = ProbeReply { facts, marker, is_caught_up: true, number: 3 };
    assert!(is_contested(&bench.on(Event::Probed(Ok(reply)))));
}

/// A volatile master's name leads to another process for a while, and then back to the first one,
/// which has run all the time. It lacks what the other one has granted.
#[test]
fn a_process_that_votes_again_after_another_one_is_contested() {
    let mut bench = Bench::admitted(false);
    let first = bench.marker.clone();
    let other = Facts { run_id: "b".repeat(40), ..Facts::volatile_master() };
    let identity = ClusterConfig::new("a:1", MAX_TTL, SKEW).identity("a:1");
    let probed = |bench: &mut Bench, facts: Facts, marker: &str| {
        assert_eq!(bench.on(Event::Closed("gone".into())), [Action::Disconnect]);
        bench.connect();
        let marker = Some(marker.to_owned());
        bench.on(Event::Probed(Ok(ProbeReply { facts, marker, is_caught_up: true, number: 0 })))
    };
    let second = identity.admitting(&other, 8);
    let loads = probed(&mut bench, other, &second);
    assert!(matches!(loads.as_slice(), [Action::Load { .. }]), "{loads:?}");
    assert_eq!(bench.on(Event::Loaded(Ok(Engine::Lua))), [Action::Call]);
    assert!(is_contested(&probed(&mut bench, Facts::volatile_master(), &first)));
}
