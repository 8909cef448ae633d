//! The queues one step after another, at times of the test's choosing. Interleavings are in [`explored`](super::explored).

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::queue::{Bounds, Cause, Handoff, Next, Pause, Refusal, Step, Success, WaitQueues, WaitTicket};
use super::sync::Arc;
use crate::error::LockError;

const MS: Duration = Duration::from_millis(1);
const POLL: Duration = Duration::from_millis(700);
const TTL: Duration = Duration::from_secs(10);

type Queues = Arc<WaitQueues<&'static str, &'static str>>;
type Ticket = WaitTicket<&'static str, &'static str>;

fn queue() -> Queues {
    WaitQueues::new(Bounds { total: 10, of_one_lock: 5 })
}

fn lock() -> Bytes {
    Bytes::from_static(b"lock:a")
}

/// Into the queue, where the first poll is due after 25 ms.
fn enter(queue: &Queues, params: &'static str, now: Instant) -> Ticket {
    queue.enter(lock(), params, None, (now, now + 25 * MS)).expect("there is room")
}

fn refused(ticket: &Ticket, now: Instant) {
    let error = LockError::Held(Default::default());
    ticket.refused(now, Refusal { error, retry: now + POLL, quick: now + 2 * MS, poll_due: now + POLL, round: MS });
}

fn success(now: Instant) -> Success {
    Success { shared_owner: None, ends: now + TTL, round: MS }
}

/// The turn of those who wait here is over.
const OVER: Option<Pause> = Some(Pause { rounds: 3.0, least: Duration::ZERO, most: Duration::from_secs(1) });

/// What a ticket is told, in one word, and when.
fn step(ticket: &Ticket, now: Instant) -> (&'static str, Option<Duration>) {
    match ticket.step(now, true) {
        Step::Wait => ("wait", None),
        Step::WaitUntil(then) => ("until", Some(then.saturating_duration_since(now))),
        Step::Try(Cause::Poll) => ("poll", None),
        Step::Try(Cause::Hint) => ("hint", None),
        Step::Try(Cause::Release) => ("again", None),
        Step::Handed(what) => (what, None),
        Step::AskForOwn => ("own", None),
    }
}

fn is_signalled(ticket: &Ticket) -> bool {
    ticket.poll_signalled(&Context::from_waker(Waker::noop())) == Poll::Ready(())
}

/// The lock is released here: how that is answered. Handed over are the waiter's own params.
fn release(queue: &Queues, now: Instant, pause: Option<Pause>) -> &'static str {
    let plan = queue.release(&lock(), now, pause);
    match plan.next {
        Next::Nobody => "nobody",
        Next::Competing => "competing",
        Next::Yielded => "yielded",
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

/// The ticket of the only waiter, which has been refused.
fn refused_one(queue: &Queues, now: Instant) -> Ticket {
    let first = enter(queue, "a", now);
    assert_eq!(step(&first, now), ("poll", None));
    refused(&first, now);
    first
}

#[test]
fn the_first_of_an_empty_queue_tries_at_first_try_and_the_next_one_waits() {
    let (queue, now) = (queue(), Instant::now());
    let first = queue.enter(lock(), "a", None, (now + 3 * MS, now + 25 * MS)).expect("there is room");
    let second = enter(&queue, "b", now);
    assert_eq!(step(&first, now), ("until", Some(3 * MS)));
    assert_eq!(step(&first, now + 3 * MS), ("poll", None));
    assert_eq!(step(&second, now + 3 * MS), ("wait", None));
}

#[test]
fn a_waiter_that_may_not_try_is_told_when_it_could() {
    let (queue, now) = (queue(), Instant::now());
    let first = enter(&queue, "a", now);
    assert!(matches!(first.step(now, false), Step::WaitUntil(then) if then == now));
    assert_eq!(step(&first, now), ("poll", None));
}

#[test]
fn a_waiter_behind_one_that_got_the_lock_at_once_polls_at_first_poll() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (enter(&queue, "a", now), enter(&queue, "b", now));
    assert_eq!(step(&first, now), ("poll", None));
    assert!(!is_signalled(&second));
    first.granted(now + MS, success(now + MS));
    assert!(is_signalled(&second));
    assert_eq!(step(&second, now + MS), ("until", Some(24 * MS)));
    assert_eq!(step(&second, now + 25 * MS), ("poll", None));
}

#[test]
fn the_end_of_the_lock_comes_before_a_later_poll() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (enter(&queue, "a", now), enter(&queue, "b", now));
    assert_eq!(step(&first, now), ("poll", None));
    first.granted(now, Success { shared_owner: None, ends: now + 5 * MS, round: MS });
    assert_eq!(step(&second, now), ("until", Some(5 * MS)));
}

#[test]
fn a_hint_leads_to_quick_tries_and_then_to_polls() {
    let (queue, mut now) = (queue(), Instant::now());
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
fn a_hint_that_nodes_repeat_is_old_once_somebody_here_has_got_the_lock() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (refused_one(&queue, now), enter(&queue, "b", now));
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
    let (queue, now) = (queue(), Instant::now());
    let first = enter(&queue, "a", now);
    assert_eq!(step(&first, now), ("poll", None));
    queue.wake(&lock(), 7, now);
    assert_eq!(step(&first, now), ("wait", None), "one attempt at a time");
    refused(&first, now);
    assert_eq!(step(&first, now), ("hint", None));
}

#[test]
fn a_hint_during_an_attempt_that_has_success_is_old_for_the_next_one() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (enter(&queue, "a", now), enter(&queue, "b", now));
    assert_eq!(step(&first, now), ("poll", None));
    queue.wake(&lock(), 7, now);
    first.granted(now, success(now));
    assert_eq!(step(&second, now), ("until", Some(25 * MS)));
    assert_eq!(step(&second, now + 25 * MS), ("poll", None));
    refused(&second, now + 25 * MS);
    assert_eq!(step(&second, now + 25 * MS), ("until", Some(POLL)));
}

#[test]
fn a_release_here_is_for_the_first_and_repeats_an_attempt_under_way() {
    let (queue, now) = (queue(), Instant::now());
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
fn a_turn_that_is_over_is_followed_by_a_pause_and_by_another() {
    let (queue, now) = (queue(), Instant::now());
    let (first, later) = (refused_one(&queue, now), now + MS);
    assert_eq!(release(&queue, later, OVER), "yielded");
    assert!(is_signalled(&first), "when it tries has changed");
    assert_eq!(step(&first, later), ("until", Some(3 * MS)), "three rounds for the others");
    assert_eq!(release(&queue, later, None), "first", "the next turn");
}

#[test]
fn a_plan_dropped_unused_lets_the_first_try_alone() {
    let (queue, now) = (queue(), Instant::now());
    let first = refused_one(&queue, now);
    let plan = plan(&queue, now + MS);
    assert_eq!(step(&first, now), ("wait", None));
    drop(plan);
    assert!(is_signalled(&first));
    assert_eq!(step(&first, Instant::now()), ("poll", None));
}

#[test]
fn a_waiter_that_has_left_is_handed_nothing_and_the_next_one_tries() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (refused_one(&queue, now), enter(&queue, "b", now));
    let plan = plan(&queue, now);
    drop(first);
    assert!(is_signalled(&second));
    assert_eq!(step(&second, Instant::now()), ("poll", None));
    assert!(!plan.hand("a"));
    assert_eq!(step(&second, Instant::now()), ("wait", None), "the attempt under way is its own");
}

#[test]
fn a_plan_dropped_after_its_waiter_has_left_ends_no_other_attempt() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (refused_one(&queue, now), enter(&queue, "b", now));
    let plan = plan(&queue, now);
    drop(first);
    assert_eq!(step(&second, Instant::now()), ("poll", None));
    drop(plan);
    assert_eq!(step(&second, Instant::now()), ("wait", None));
    assert_eq!(release(&queue, now, None), "competing");
}

#[test]
fn the_last_refusal_is_kept_until_somebody_here_gets_the_lock() {
    let (queue, now) = (queue(), Instant::now());
    let first = enter(&queue, "a", now);
    let second = enter(&queue, "b", now);
    assert_eq!(second.last_refusal(now), None);
    assert_eq!(step(&first, now), ("poll", None));
    refused(&first, now);
    assert_eq!(second.last_refusal(now + 5 * MS), Some((LockError::Held(Default::default()), 5 * MS)));
    assert_eq!(step(&first, now + POLL), ("poll", None));
    first.granted(now + POLL, success(now + POLL));
    assert_eq!(second.last_refusal(now + POLL), None);
}

#[test]
fn a_waiter_that_leaves_before_its_turn_changes_nothing_for_the_others() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second, third) = (refused_one(&queue, now), enter(&queue, "b", now), enter(&queue, "c", now));
    drop(second);
    assert!(!is_signalled(&third));
    drop(first);
    assert!(is_signalled(&third));
    assert_eq!(step(&third, now), ("until", Some(POLL)), "as the first was told");
    drop(third);
    assert_eq!(queue.count(), (0, 0));
}

// What went wrong once.

#[test]
fn a_bound_of_none_leaves_no_queue_behind() {
    let (queue, now) = (WaitQueues::<(), ()>::new(Bounds { total: 10, of_one_lock: 0 }), Instant::now());
    assert!(queue.enter(lock(), (), None, (now, now)).is_err());
    assert_eq!(queue.count(), (0, 0));
}

#[test]
fn a_waiter_that_was_refused_between_the_plan_and_the_release_tries_again() {
    let (queue, now) = (queue(), Instant::now());
    let plans = [(); 2].map(|()| queue.release(&lock(), now, None));
    assert!(plans.iter().all(|plan| matches!(plan.next, Next::Nobody)));
    let [one, other] = plans;
    let first = refused_one(&queue, now);
    drop(one);
    assert!(is_signalled(&first));
    assert_eq!(step(&first, Instant::now()), ("again", None));
    drop(other);
    refused(&first, now + 3 * MS);
    assert_eq!(step(&first, now + 3 * MS), ("again", None), "the attempt was under way");
}

#[test]
fn a_release_that_was_sent_does_not_cut_the_pause_for_the_others() {
    let (queue, now) = (queue(), Instant::now());
    let first = refused_one(&queue, now);
    let later = now + 10 * MS;
    assert_eq!(release(&queue, later, OVER), "yielded");
    assert_eq!(step(&first, later + MS), ("until", Some(2 * MS)));
}

#[test]
fn a_node_that_released_later_than_the_others_still_counts_after_a_refusal() {
    let (queue, mut now) = (queue(), Instant::now());
    let first = refused_one(&queue, now);
    queue.wake(&lock(), 7, now);
    for _ in 0..4 {
        assert_eq!(step(&first, now), ("hint", None));
        refused(&first, now);
        now += 2 * MS;
    }
    assert!(matches!(first.step(now, true), Step::WaitUntil(_)), "it has given up");
    queue.wake(&lock(), 7, now);
    assert_eq!(step(&first, now), ("hint", None));
}
