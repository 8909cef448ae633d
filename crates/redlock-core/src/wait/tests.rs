//! Queues step by step, at chosen times. `interleavings.rs` explores concurrent calls.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::handoff::{Handoff, Next};
use super::queue::{Bounds, Cause, Pause, WaitQueues};
use super::sync::Arc;
use super::ticket::{MayTry, Refusal, Step, Success, WaitTicket};
use crate::error::{LockError, WaitLimit};

const MS: Duration = Duration::from_millis(1);
const POLL: Duration = Duration::from_millis(700);
const TTL: Duration = Duration::from_secs(10);

type Queues = Arc<WaitQueues<&'static str, &'static str>>;
type Ticket = WaitTicket<&'static str, &'static str>;

fn queue() -> Queues {
    WaitQueues::new(Bounds { total: 10, per_lock: 5 })
}

fn lock() -> Bytes {
    Bytes::from_static(b"lock:a")
}

/// Enters the queue, whose first poll is due after 25 ms.
fn enter(queue: &Queues, params: &'static str, now: Instant) -> Ticket {
    queue.enter(lock(), params, None, MS, (now, now, now + 25 * MS))
}

fn refused(ticket: &Ticket, now: Instant) {
    let error = LockError::Held(Default::default());
    let retry = now + POLL;
    let quick = now + 2 * MS;
    ticket.refused(
        now,
        Refusal { error, retry, quick, poll_due: retry, round: MS, without_quorum: false },
    );
}

fn success(now: Instant) -> Success {
    Success { shared_owner: None, ends: now + TTL, round: MS }
}

/// The pause after the handoff quota is used up.
const OVER: Option<Pause> =
    Some(Pause { rounds: 3.0, least: Duration::ZERO, most: Duration::from_secs(1) });

/// A ticket's next step in one word, and how long it is until then.
fn step(ticket: &Ticket, now: Instant) -> (&'static str, Option<Duration>) {
    match ticket.step(now, MayTry::InOrder) {
        Step::Wait => ("wait", None),
        Step::WaitUntil(then) => ("until", Some(then.saturating_duration_since(now))),
        Step::Attempt(Cause::Poll) => ("poll", None),
        Step::Attempt(Cause::Hint) => ("hint", None),
        Step::Attempt(Cause::Release) => ("again", None),
        Step::Handed(what) => (what, None),
        Step::AskForOwn => ("own", None),
        Step::Defer(then) => ("defer", Some(then.saturating_duration_since(now))),
    }
}

fn is_signalled(ticket: &Ticket) -> bool {
    ticket.poll_signalled(&Context::from_waker(Waker::noop())) == Poll::Ready(())
}

/// Plans and carries out a release. Returns the kind of the plan. In place of an attempt, the
/// waiter is handed its own parameters.
fn release(queue: &Queues, now: Instant, pause: Option<Pause>) -> &'static str {
    let plan = queue.release(&lock(), now, pause);
    match plan.next {
        Next::Nobody => "nobody",
        Next::Competing => "competing",
        Next::Yielded => "yielded",
        Next::Away => "away",
        Next::First { params, .. } => {
            assert!(plan.hand(params));
            "first"
        }
    }
}

/// A plan to hand the lock over.
fn plan(queue: &Queues, now: Instant) -> Handoff<&'static str, &'static str> {
    let plan = queue.release(&lock(), now, None);
    assert!(matches!(plan.next, Next::First { .. }), "somebody waits");
    plan
}

/// The ticket of the only waiter, after one refusal.
fn refused_one(queue: &Queues, now: Instant) -> Ticket {
    let first = enter(queue, "a", now);
    assert_eq!(step(&first, now), ("poll", None));
    refused(&first, now);
    first
}

#[test]
fn only_the_first_waiter_of_an_empty_queue_tries_at_first_try() {
    let queue = queue();
    let now = Instant::now();
    let first = queue.enter(lock(), "a", None, MS, (now, now + 3 * MS, now + 25 * MS));
    let second = enter(&queue, "b", now);
    assert_eq!(step(&first, now), ("until", Some(3 * MS)));
    assert_eq!(step(&first, now + 3 * MS), ("poll", None));
    assert_eq!(step(&second, now + 3 * MS), ("wait", None));
}

#[test]
fn a_waiter_that_may_not_try_gets_the_time_of_the_next_try() {
    let queue = queue();
    let now = Instant::now();
    let first = enter(&queue, "a", now);
    assert!(matches!(first.step(now, MayTry::No), Step::WaitUntil(then) if then == now));
    assert_eq!(step(&first, now), ("poll", None));
}

#[test]
fn the_next_waiter_after_an_immediate_grant_polls_at_first_poll() {
    let queue = queue();
    let now = Instant::now();
    let first = enter(&queue, "a", now);
    let second = enter(&queue, "b", now);
    assert_eq!(step(&first, now), ("poll", None));
    assert!(!is_signalled(&second));
    first.granted(now + MS, success(now + MS));
    assert!(is_signalled(&second));
    assert_eq!(step(&second, now + MS), ("until", Some(24 * MS)));
    assert_eq!(step(&second, now + 25 * MS), ("poll", None));
}

#[test]
fn the_expected_expiry_precedes_a_later_poll() {
    let queue = queue();
    let now = Instant::now();
    let first = enter(&queue, "a", now);
    let second = enter(&queue, "b", now);
    assert_eq!(step(&first, now), ("poll", None));
    first.granted(now, Success { shared_owner: None, ends: now + 5 * MS, round: MS });
    assert_eq!(step(&second, now), ("until", Some(5 * MS)));
}

#[test]
fn a_hint_leads_to_quick_tries_and_then_to_polls() {
    let queue = queue();
    let mut now = Instant::now();
    let first = refused_one(&queue, now);
    assert_eq!(step(&first, now), ("until", Some(POLL)));
    queue.wake(&lock(), 7, now);
    assert!(is_signalled(&first));
    for _ in 0..3 {
        assert_eq!(step(&first, now), ("hint", None));
        refused(&first, now);
        assert_eq!(step(&first, now), ("until", Some(2 * MS)));
        now += 2 * MS;
    }
    assert_eq!(step(&first, now), ("hint", None));
    refused(&first, now);
    assert_eq!(step(&first, now), ("until", Some(POLL)));
    assert_eq!(step(&first, now + POLL), ("poll", None));
}

#[test]
fn repeated_hints_are_ignored_after_a_grant_here() {
    let queue = queue();
    let now = Instant::now();
    let first = refused_one(&queue, now);
    let second = enter(&queue, "b", now);
    queue.wake(&lock(), 7, now);
    assert_eq!(step(&first, now), ("hint", None));
    first.granted(now, success(now));
    assert!(is_signalled(&second));
    let before = step(&second, now);
    queue.wake(&lock(), 7, now);
    queue.wake(&lock(), 6, now);
    assert_eq!((is_signalled(&second), step(&second, now)), (false, before));
}

#[test]
fn a_hint_during_an_attempt_leads_to_the_next_one_at_once() {
    let queue = queue();
    let now = Instant::now();
    let first = enter(&queue, "a", now);
    assert_eq!(step(&first, now), ("poll", None));
    queue.wake(&lock(), 7, now);
    assert_eq!(step(&first, now), ("wait", None), "one attempt at a time");
    refused(&first, now);
    assert_eq!(step(&first, now), ("hint", None));
}

#[test]
fn a_hint_during_a_granted_attempt_does_not_wake_the_next_waiter() {
    let queue = queue();
    let now = Instant::now();
    let first = enter(&queue, "a", now);
    let second = enter(&queue, "b", now);
    assert_eq!(step(&first, now), ("poll", None));
    queue.wake(&lock(), 7, now);
    first.granted(now, success(now));
    assert_eq!(step(&second, now), ("until", Some(25 * MS)));
    assert_eq!(step(&second, now + 25 * MS), ("poll", None));
    refused(&second, now + 25 * MS);
    assert_eq!(step(&second, now + 25 * MS), ("until", Some(POLL)));
}

#[test]
fn a_release_goes_to_the_first_or_repeats_its_attempt() {
    let queue = queue();
    let now = Instant::now();
    assert_eq!(release(&queue, now, None), "nobody");
    let first = refused_one(&queue, now);
    let second = enter(&queue, "b", now);
    assert_eq!(release(&queue, now, None), "first");
    assert!(is_signalled(&first) && !is_signalled(&second));
    assert_eq!(step(&first, now), ("a", None));
    assert_eq!(release(&queue, now, None), "competing");
    refused(&first, now);
    assert_eq!(step(&first, now), ("again", None));
}

#[test]
fn a_used_up_quota_pauses_the_queue_and_then_renews() {
    let queue = queue();
    let now = Instant::now();
    let first = refused_one(&queue, now);
    let later = now + MS;
    assert_eq!(release(&queue, later, OVER), "yielded");
    assert!(is_signalled(&first), "the time of its try has changed");
    assert_eq!(step(&first, later), ("until", Some(3 * MS)), "three rounds for the others");
    assert_eq!(release(&queue, later, None), "first", "the quota is renewed");
}

#[test]
fn a_dropped_plan_lets_the_first_waiter_try_by_itself() {
    let queue = queue();
    let now = Instant::now();
    let first = refused_one(&queue, now);
    let plan = plan(&queue, now + MS);
    assert_eq!(step(&first, now), ("wait", None));
    drop(plan);
    assert!(is_signalled(&first));
    assert_eq!(step(&first, Instant::now()), ("poll", None));
}

#[test]
fn after_a_waiter_left_nothing_is_handed_over_and_the_next_tries() {
    let queue = queue();
    let now = Instant::now();
    let first = refused_one(&queue, now);
    let second = enter(&queue, "b", now);
    let plan = plan(&queue, now);
    drop(first);
    assert!(is_signalled(&second));
    assert_eq!(step(&second, Instant::now()), ("poll", None));
    assert!(!plan.hand("a"));
    assert_eq!(step(&second, Instant::now()), ("wait", None), "its own attempt is in flight");
}

#[test]
fn a_dropped_plan_of_a_departed_waiter_ends_no_other_attempt() {
    let queue = queue();
    let now = Instant::now();
    let first = refused_one(&queue, now);
    let second = enter(&queue, "b", now);
    let plan = plan(&queue, now);
    drop(first);
    assert_eq!(step(&second, Instant::now()), ("poll", None));
    drop(plan);
    assert_eq!(step(&second, Instant::now()), ("wait", None));
    assert_eq!(release(&queue, now, None), "competing");
}

#[test]
fn the_last_refusal_is_kept_until_a_grant_here() {
    let queue = queue();
    let now = Instant::now();
    let first = enter(&queue, "a", now);
    let second = enter(&queue, "b", now);
    assert_eq!(second.last_refusal(now), None);
    assert_eq!(step(&first, now), ("poll", None));
    refused(&first, now);
    assert_eq!(
        second.last_refusal(now + 5 * MS),
        Some((LockError::Held(Default::default()), 5 * MS))
    );
    assert_eq!(step(&first, now + POLL), ("poll", None));
    first.granted(now + POLL, success(now + POLL));
    assert_eq!(second.last_refusal(now + POLL), None);
}

#[test]
fn a_waiter_that_leaves_the_middle_wakes_nobody() {
    let queue = queue();
    let now = Instant::now();
    let first = refused_one(&queue, now);
    let second = enter(&queue, "b", now);
    let third = enter(&queue, "c", now);
    drop(second);
    assert!(!is_signalled(&third));
    drop(first);
    assert!(is_signalled(&third));
    assert_eq!(step(&third, now), ("until", Some(POLL)), "the time set by the first waiter");
    drop(third);
    assert_eq!(queue.count(), (0, 0));
}

/// The first waiter finds no quorum; the queue would try again after `pause`.
fn failed(ticket: &Ticket, now: Instant, pause: Duration) {
    let error = LockError::Unknown(Vec::new());
    let retry = now + pause;
    ticket.refused(
        now,
        Refusal {
            error,
            retry,
            quick: retry,
            poll_due: now + POLL,
            round: MS,
            without_quorum: true,
        },
    );
}

fn enter_with(queue: &Queues, params: &'static str, round_limit: Duration, now: Instant) -> Ticket {
    queue.enter(lock(), params, None, round_limit, (now, now, now + 25 * MS))
}

#[test]
fn without_longer_round_limits_a_queue_keeps_order_and_backs_off() {
    let queue = queue();
    let mut now = Instant::now();
    let first = enter(&queue, "a", now);
    let second = enter(&queue, "b", now);
    for failures in 0..2 {
        assert_eq!(first.standing().failures, failures);
        assert_eq!(step(&first, now), ("poll", None));
        failed(&first, now, 100 * MS);
        assert_eq!(
            (step(&first, now), step(&second, now)),
            (("until", Some(100 * MS)), ("wait", None))
        );
        now += 100 * MS;
    }
    assert_eq!(step(&first, now), ("poll", None));
    refused(&first, now);
    assert_eq!(first.standing().failures, 0, "there is a quorum");
}

#[test]
fn after_three_failures_a_waiter_goes_to_the_end() {
    let queue = queue();
    let mut now = Instant::now();
    let first = enter(&queue, "a", now);
    let second = enter(&queue, "b", now);
    for _ in 0..3 {
        assert_eq!(step(&first, now), ("poll", None));
        failed(&first, now, 100 * MS);
        now += 100 * MS;
    }
    assert!(is_signalled(&second) && first.number() > second.number());
    assert_eq!((step(&first, now), step(&second, now)), (("wait", None), ("poll", None)));
    assert_eq!(second.standing().failures, 3);
}

#[test]
fn attempts_in_vain_are_counted_until_an_event() {
    let queue = queue();
    let now = Instant::now();
    let first = refused_one(&queue, now);
    assert_eq!(step(&first, now + POLL), ("poll", None));
    refused(&first, now + POLL);
    assert_eq!(first.standing().in_vain, 2);
    queue.wake(&lock(), 7, now + POLL);
    assert_eq!(first.standing().in_vain, 0);
}

// Regression tests.

#[test]
fn a_first_waiter_with_short_rounds_lets_others_pass_at_once() {
    let queue = queue();
    let now = Instant::now();
    let hasty = [enter_with(&queue, "a", MS, now), enter_with(&queue, "b", MS, now)];
    let other = enter_with(&queue, "c", 50 * MS, now);
    let last = enter_with(&queue, "d", 50 * MS, now);
    assert_eq!(step(&hasty[0], now), ("poll", None));
    failed(&hasty[0], now, 100 * MS);
    assert!(is_signalled(&other));
    assert_eq!(
        step(&other, now),
        ("poll", None),
        "waiters that would fare no better went to the end, too"
    );
    assert_eq!(other.standing().failures, 0, "only the waiter that let others pass failed");
    other.granted(now, success(now));
    assert_eq!(release(&queue, now, None), "first");
    assert_eq!(step(&last, now), ("d", None));
    last.granted(now, success(now));
    assert!(hasty[0].number() < hasty[1].number());
}

/// If each round limit cost an attempt before the queue backs off, waiters with many different TTLs
/// would hammer nodes that are down.
#[test]
fn few_attempts_pass_however_many_round_limits() {
    let queue = WaitQueues::new(Bounds { total: 1_000, per_lock: 1_000 });
    let now = Instant::now();
    let tickets: Vec<_> = (1..=50).map(|limit| enter_with(&queue, "a", limit * MS, now)).collect();
    let mut tries = 0;
    while let Some(first) =
        tickets.iter().find(|ticket| matches!(ticket.step(now, MayTry::InOrder), Step::Attempt(_)))
    {
        failed(first, now, 100 * MS);
        tries += 1;
    }
    assert!((6..=8).contains(&tries), "{tries} attempts before the queue backs off");
}

#[test]
fn an_unawaited_lock_is_tried_when_all_slots_are_taken() {
    let queue = WaitQueues::new(Bounds { total: 1, per_lock: 1 });
    let now = Instant::now();
    let waits: Ticket = queue.enter(Bytes::from_static(b"other"), "a", None, MS, (now, now, now));
    waits.take_slot().expect("a slot is free");
    let first = enter(&queue, "b", now);
    assert_eq!(queue.count(), (1, 1), "the second waiter has no slot yet");
    assert_eq!(step(&first, now), ("poll", None));
    refused(&first, now);
    let full = LockError::TooManyWaiters { max: 1, limit: WaitLimit::All };
    assert_eq!(first.take_slot(), Err(full));
    drop(waits);
    assert_eq!((first.take_slot(), first.take_slot(), queue.count()), (Ok(()), Ok(()), (1, 1)));
}

#[test]
fn a_limit_of_zero_leaves_no_queue_behind() {
    let queue = WaitQueues::<(), ()>::new(Bounds { total: 10, per_lock: 0 });
    let now = Instant::now();
    let full = LockError::TooManyWaiters { max: 0, limit: WaitLimit::OfLock };
    assert_eq!(queue.enter(lock(), (), None, MS, (now, now, now)).take_slot(), Err(full));
    assert!(queue.count() == (0, 0) && !queue.is_waited_for(&lock()));
}

#[test]
fn a_waiter_refused_between_plan_and_release_tries_again() {
    let queue = queue();
    let now = Instant::now();
    let plans = [(); 2].map(|()| queue.release(&lock(), now, None));
    assert!(plans.iter().all(|plan| matches!(plan.next, Next::Nobody)));
    let [one, other] = plans;
    let first = refused_one(&queue, now);
    drop(one);
    assert!(is_signalled(&first));
    assert_eq!(step(&first, Instant::now()), ("again", None));
    drop(other);
    refused(&first, now + 3 * MS);
    assert_eq!(step(&first, now + 3 * MS), ("again", None), "the attempt was in flight");
}

#[test]
fn a_sent_release_does_not_cut_the_pause_for_others() {
    let queue = queue();
    let now = Instant::now();
    let first = refused_one(&queue, now);
    let later = now + 10 * MS;
    assert_eq!(release(&queue, later, OVER), "yielded");
    assert_eq!(step(&first, later + MS), ("until", Some(2 * MS)));
}

#[test]
fn a_repeated_hint_counts_after_a_refusal() {
    let queue = queue();
    let mut now = Instant::now();
    let first = refused_one(&queue, now);
    queue.wake(&lock(), 7, now);
    for _ in 0..4 {
        assert_eq!(step(&first, now), ("hint", None));
        refused(&first, now);
        now += 2 * MS;
    }
    assert!(
        matches!(first.step(now, MayTry::InOrder), Step::WaitUntil(_)),
        "the quick attempts are used up"
    );
    queue.wake(&lock(), 7, now);
    assert_eq!(step(&first, now), ("hint", None));
}
