//! A new process with its predecessor's file under the same name is contested if it lacks calls that
//! the predecessor has answered.

use super::*;
use crate::node::eligibility::Durability;

fn durable_master() -> Facts {
    Facts { durability: Durability::Durable, ..Facts::volatile_master() }
}

/// A driver whose durable node has answered this many calls, the first of them at its admission.
/// One more is under way.
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

/// A call whose writes all failed may have left no number.
#[test]
fn a_call_that_failed_need_not_be_known() {
    let mut bench = answered(3);
    let failed = Vote::Failed(Failure::new(Reason::Error, Effect::None, "OOM"));
    assert_eq!(bench.on(Event::Answered(Ok(answer(vec![failed])))), []);
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

/// Masters keep a number for longer than any lock.
#[test]
fn a_number_may_be_gone_after_a_day() {
    let mut bench = answered(3);
    assert_eq!(bench.on(Event::Closed("gone".into())), [Action::Disconnect]);
    bench.clock.advance(Duration::from_millis(NUMBER_KEPT_MS));
    bench.connect();
    let facts = Facts { run_id: "b".repeat(40), ..durable_master() };
    let marker = Some(bench.marker.clone());
    let reply = ProbeReply { facts, marker, is_caught_up: true, number: 0 };
    assert!(!is_contested(&bench.on(Event::Probed(Ok(reply)))));
}
