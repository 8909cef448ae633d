//! Queues step by step, at chosen times. `interleavings.rs` explores concurrent calls.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::handoff::{Handoff, Next};
use super::order::{Priority, QueueMode};
use super::places::{CHARGED, GAP, KEPT, PlacePermit};
use super::queue::{Bounds, Cause, Pause, WaitQueues};
use super::sync::Arc;
use super::ticket::{MayTry, PlaceTerms, Refusal, Step, Success, WaitTicket};
use crate::error::{HeldBy, LinePlace, LockError, WaitLimit};
use crate::model::types::Owner;

mod line_order;

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

fn terms(shared_owner: Option<Owner>, round_limit: Duration) -> PlaceTerms {
    let priority = Priority::default();
    PlaceTerms { shared_owner, round_limit, priority, mode: QueueMode::All, is_slotted: false }
}

/// Enters the queue, whose first poll is due after 25 ms.
fn enter(queue: &Queues, params: &'static str, now: Instant) -> Ticket {
    queue.enter(lock(), params, terms(None, MS), (now, now, now + 25 * MS))
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
        Step::Superseded => ("superseded", None),
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
    match &plan.next {
        Next::Nobody => "nobody",
        Next::Competing => "competing",
        Next::Yielded => "yielded",
        Next::Away => "away",
        Next::First { params, .. } => {
            let params = **params;
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
    let first = queue.enter(lock(), "a", terms(None, MS), (now, now + 3 * MS, now + 25 * MS));
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
    assert_eq!((is_signalled(&second), step(&second, now)), (false, before));
    // A smaller T is that of another release: the clocks of gateways differ.
    queue.wake(&lock(), 6, now);
    assert!(is_signalled(&second));
    assert_eq!(step(&second, now), ("hint", None));
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
    queue.enter(lock(), params, terms(None, round_limit), (now, now, now + 25 * MS))
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

// Kept places.

fn owner(n: u8) -> Owner {
    Owner::from_bytes([n; Owner::LEN])
}

/// Enters the queue for an owner that other requests share. The place may be kept.
fn enter_for(queue: &Queues, params: &'static str, owner: Owner, now: Instant) -> Ticket {
    let ticket = queue.enter(lock(), params, terms(Some(owner), MS), (now, now, now + 25 * MS));
    ticket.may_keep(PlacePermit::counted(()));
    ticket
}

/// The line: what each waiter asks for; in brackets, if it is away.
fn line(queue: &Queues, now: Instant) -> String {
    let (line, total) = queue.line(&lock(), 100, now, |params, _, _, is_away| {
        if is_away { format!("({params})") } else { (*params).to_owned() }
    });
    assert_eq!(line.len(), total);
    line.join(" ")
}

fn kept(position: u32) -> Option<LinePlace> {
    Some(LinePlace { position, kept_for: Some(KEPT) })
}

#[test]
fn a_returning_owner_takes_its_old_place_up() {
    let queue = queue();
    let now = Instant::now();
    let mut first = enter_for(&queue, "a", owner(1), now);
    let _second = enter(&queue, "b", now);
    let mut third = enter_for(&queue, "c", owner(3), now);
    assert_eq!(third.end(now), kept(3));
    assert_eq!(first.end(now), kept(1));
    assert_eq!((line(&queue, now).as_str(), queue.kept()), ("(a) b (c)", 2));
    let fourth = enter(&queue, "d", now);
    let third = enter_for(&queue, "c", owner(3), now);
    assert_eq!(line(&queue, now), "(a) b c d");
    let first = enter_for(&queue, "a", owner(1), now);
    assert_eq!((line(&queue, now).as_str(), queue.kept()), ("a b c d", 0));
    assert!(first.number() < third.number() && third.number() < fourth.number());
    drop((first, third));
    let other_numbers =
        || queue.shard(&lock()).queues.get(&lock()).map(|queue| queue.numbers.len());
    assert_eq!(other_numbers(), Some(0), "who leaves leaves nothing in the queue");
}

#[test]
fn whoever_is_away_never_competes() {
    let queue = queue();
    let mut now = Instant::now();
    let mut first = enter_for(&queue, "a", owner(1), now);
    assert_eq!(step(&first, now), ("poll", None));
    refused(&first, now);
    let second = enter(&queue, "b", now);
    assert_eq!(first.end(now), kept(1));
    assert!(is_signalled(&second));
    now += GAP;
    assert_eq!(release(&queue, now, None), "first");
    assert_eq!(step(&second, now), ("b", None));
    second.granted(now, success(now));
    assert!(!queue.is_waited_for(&lock()));
    assert_eq!(release(&queue, now, None), "nobody");
    assert_eq!(line(&queue, now), "(a)");
}

#[test]
fn a_place_ends_with_its_time() {
    let queue = queue();
    let now = Instant::now();
    enter_for(&queue, "a", owner(1), now).end(now);
    enter_for(&queue, "b", owner(2), now).end(now + MS);
    assert_eq!(line(&queue, now + KEPT - MS), "(a) (b)");
    assert_eq!(line(&queue, now + KEPT), "(b)");
    let again = enter_for(&queue, "a", owner(1), now + KEPT);
    assert_eq!(line(&queue, now + KEPT), "(b) a");
    drop(again);
    queue.end_places(now + 2 * KEPT + MS);
    assert_eq!(queue.kept(), 0, "without a request for the lock");
}

#[test]
fn only_owners_with_a_permit_keep_their_place() {
    let queue = queue();
    let now = Instant::now();
    let position = Some(LinePlace { position: 1, kept_for: None });
    assert_eq!(enter(&queue, "a", now).end(now), position);
    let mut without = queue.enter(lock(), "b", terms(Some(owner(2)), MS), (now, now, now));
    without.may_keep(PlacePermit::none());
    assert_eq!(without.end(now), position);
    assert_eq!((line(&queue, now).as_str(), queue.kept()), ("", 0));
}

#[test]
fn a_permit_is_kept_with_the_place_and_then_dropped() {
    let queue = queue();
    let now = Instant::now();
    let permit = std::sync::Arc::new(());
    let taken = || std::sync::Arc::strong_count(&permit) - 1;
    let ticket = queue.enter(lock(), "a", terms(Some(owner(1)), MS), (now, now, now));
    ticket.may_keep(PlacePermit::counted(permit.clone()));
    let mut ticket = ticket;
    ticket.end(now);
    assert_eq!(taken(), 1);
    let mut again = queue.enter(lock(), "a", terms(Some(owner(1)), MS), (now, now, now));
    assert_eq!((taken(), again.end(now)), (1, kept(1)), "the permit came back with the place");
    queue.end_places(now + KEPT);
    assert_eq!(taken(), 0);
}

#[test]
fn an_owner_that_is_served_or_gives_up_has_no_place() {
    let queue = queue();
    let now = Instant::now();
    let first = enter_for(&queue, "a", owner(1), now);
    assert_eq!(step(&first, now), ("poll", None));
    first.granted(now, Success { shared_owner: Some(owner(1)), ..success(now) });
    assert_eq!(line(&queue, now), "");

    enter_for(&queue, "a", owner(1), now).end(now);
    queue.give_up(&lock(), &owner(1), now);
    assert_eq!(line(&queue, now), "");

    let mut waits = enter_for(&queue, "a", owner(1), now);
    queue.give_up(&lock(), &owner(1), now);
    assert_eq!(waits.end(now), Some(LinePlace { position: 1, kept_for: None }));
}

#[test]
fn an_owner_seen_as_the_holder_loses_its_place() {
    let queue = queue();
    let now = Instant::now();
    enter_for(&queue, "a", owner(1), now).end(now);
    let other = enter(&queue, "b", now + GAP);
    assert_eq!(step(&other, now + GAP), ("poll", None));
    let by = HeldBy { owner: Some(owner(1)), ..HeldBy::default() };
    let retry = now + POLL;
    let quick = retry;
    let refusal = Refusal {
        error: LockError::Held(by),
        retry,
        quick,
        poll_due: retry,
        round: MS,
        without_quorum: false,
    };
    other.refused(now + GAP, refusal);
    assert_eq!(line(&queue, now + GAP), "b");
    let mut copy = enter_for(&queue, "a", owner(1), now + GAP);
    assert!(copy.owner_is_holder() && !other.owner_is_holder());
    let place = copy.end(now + GAP);
    assert_eq!(place, Some(LinePlace { position: 2, kept_for: None }), "it has the lock");
}

#[test]
fn the_place_passes_to_a_copy_that_still_waits() {
    let queue = queue();
    let now = Instant::now();
    let mut first = enter_for(&queue, "a", owner(1), now);
    let second = enter(&queue, "b", now);
    let mut copy = enter_for(&queue, "A", owner(1), now);
    assert_eq!(line(&queue, now), "a b A");
    let number = first.number();
    assert_eq!(first.end(now), Some(LinePlace { position: 1, kept_for: None }));
    assert_eq!((line(&queue, now).as_str(), copy.number()), ("A b", number));
    assert!(is_signalled(&copy) && !is_signalled(&second));
    assert_eq!(step(&copy, now), ("poll", None));
    assert_eq!(copy.end(now), kept(1));
    assert_eq!((line(&queue, now).as_str(), queue.kept()), ("(A) b", 1), "one for each owner");
}

#[test]
fn a_copy_that_leaves_first_changes_no_order() {
    let queue = queue();
    let now = Instant::now();
    let first = enter_for(&queue, "a", owner(1), now);
    let mut copy = enter_for(&queue, "A", owner(1), now);
    copy.end(now);
    assert_eq!((line(&queue, now).as_str(), queue.kept()), ("a", 0));
    assert_eq!(step(&first, now), ("poll", None));
}

#[test]
fn places_stay_within_the_bounds() {
    let queue = WaitQueues::new(Bounds { total: 10, per_lock: 2 });
    let now = Instant::now();
    let mut places = Vec::new();
    for n in 0..10 {
        places.push(enter_for(&queue, "a", owner(n), now).end(now).and_then(|at| at.kept_for));
    }
    assert_eq!(places.iter().flatten().count(), 8, "four times the waiters of one lock");
    for n in 0..10 {
        let name = Bytes::from(n.to_string());
        let mut ticket = queue.enter(name, "b", terms(Some(owner(n)), MS), (now, now, now));
        ticket.may_keep(PlacePermit::counted(()));
        ticket.end(now);
    }
    assert_eq!(queue.kept(), 10);
    let late = now + KEPT;
    assert_eq!(enter_for(&queue, "a", owner(99), late).end(late), kept(1), "those have ended");
}

#[test]
fn a_waiter_displaced_during_its_attempt_wakes_the_first() {
    let queue = queue();
    let mut now = Instant::now();
    enter_for(&queue, "a", owner(1), now).end(now);
    now += GAP;
    let second = enter(&queue, "b", now);
    assert_eq!(step(&second, now), ("poll", None));
    let first = enter_for(&queue, "a", owner(1), now);
    assert_eq!(step(&first, now), ("wait", None), "an attempt is in flight");
    assert!(!is_signalled(&first));
    second.granted(now, success(now));
    assert!(is_signalled(&first));
    assert_eq!(step(&first, now), ("until", Some(25 * MS)));
}

#[test]
fn a_free_lock_is_left_for_a_moment_to_the_first_between_turns() {
    let queue = queue();
    let now = Instant::now();
    let mut first = refused_for(&queue, owner(1), now);
    let second = enter(&queue, "b", now);
    first.end(now);
    let later = now + 50 * MS;
    assert_eq!(release(&queue, later, None), "away");
    assert!(is_signalled(&second));
    assert_eq!(step(&second, later), ("defer", Some(GAP - 50 * MS)));
    let first = enter_for(&queue, "a", owner(1), later + MS);
    assert_eq!(step(&first, later + MS), ("again", None), "at once");
    assert_eq!(step(&second, later + MS), ("wait", None));
    first.granted(later + MS, success(later + MS));
    // It came back in time, so the pause was free of charge.
    let mut third = enter_for(&queue, "c", owner(3), later);
    assert!(matches!(second.step(later + 30 * MS, MayTry::No), Step::WaitUntil(_)));
    third.end(later + 10 * MS);
    drop(second);
    let fourth = enter(&queue, "d", later + 20 * MS);
    assert_eq!(release(&queue, later + 20 * MS, None), "away");
    drop(fourth);
}

/// Enters as the first waiter, and is refused once.
fn refused_for(queue: &Queues, owner: Owner, now: Instant) -> Ticket {
    let first = enter_for(queue, "a", owner, now);
    assert_eq!(step(&first, now), ("poll", None));
    refused(&first, now);
    first
}

#[test]
fn a_new_waiter_leaves_a_free_lock_to_the_first_between_turns() {
    let queue = queue();
    let now = Instant::now();
    enter_for(&queue, "a", owner(1), now).end(now);
    let new = enter(&queue, "b", now + MS);
    assert_eq!(step(&new, now + MS), ("defer", Some(GAP - MS)));
    assert!(matches!(new.step(now + MS, MayTry::AtEnd), Step::Defer(_)), "not first in line");
    assert!(
        matches!(new.step(now + MS, MayTry::Now), Step::Attempt(Cause::Poll)),
        "but a new request makes one attempt, however short its patience"
    );
}

#[test]
fn a_waiter_asks_once_at_its_end_whatever_the_queue_remembers() {
    let queue = queue();
    let now = Instant::now();
    let first = enter(&queue, "a", now);
    let second = enter(&queue, "b", now);
    assert_eq!(step(&first, now), ("poll", None));
    refused(&first, now);
    assert!(matches!(second.step(now, MayTry::AtEnd), Step::Wait), "not out of turn");
    drop(first);
    let later = now + MS;
    assert!(matches!(second.step(later, MayTry::InOrder), Step::WaitUntil(next) if next > later));
    assert!(matches!(second.step(later, MayTry::AtEnd), Step::Attempt(Cause::Poll)));
}

#[test]
fn after_the_gap_the_waiters_here_get_the_lock() {
    let queue = queue();
    let now = Instant::now();
    let mut first = refused_for(&queue, owner(1), now);
    let second = enter(&queue, "b", now);
    first.end(now);
    assert_eq!(release(&queue, now, None), "away");
    assert_eq!(step(&second, now), ("defer", Some(GAP)));
    assert_eq!(step(&second, now + GAP), ("again", None));
}

#[test]
fn a_place_given_up_ends_the_pause() {
    let queue = queue();
    let now = Instant::now();
    let mut first = refused_for(&queue, owner(1), now);
    let second = enter(&queue, "b", now);
    first.end(now);
    assert_eq!(release(&queue, now, None), "away");
    assert_eq!(step(&second, now), ("defer", Some(GAP)));
    queue.give_up(&lock(), &owner(1), now);
    assert!(is_signalled(&second));
    assert_eq!(step(&second, now), ("again", None));
}

#[test]
fn a_pause_is_not_prolonged_by_others_that_leave() {
    let queue = queue();
    let now = Instant::now();
    let mut first = enter_for(&queue, "a", owner(1), now);
    assert_eq!(step(&first, now), ("poll", None));
    refused(&first, now);
    let mut second = enter_for(&queue, "a", owner(2), now);
    let third = enter(&queue, "b", now);
    second.end(now);
    first.end(now);
    assert_eq!(release(&queue, now, None), "away");
    let later = now + 150 * MS;
    let mut second = enter_for(&queue, "a", owner(2), later);
    assert_eq!(step(&second, later), ("defer", Some(50 * MS)), "the first is before it");
    second.end(later);
    assert_eq!(step(&third, later), ("defer", Some(50 * MS)), "both may come back");
    let first = enter_for(&queue, "a", owner(1), later);
    assert_eq!(step(&first, later), ("again", None));
    first.granted(later, success(later));
    assert_eq!(release(&queue, later, None), "away", "the pause for the first is not charged");
}

#[test]
fn who_leaves_again_does_not_prolong_its_pause() {
    let queue = queue();
    let now = Instant::now();
    let mut first = refused_for(&queue, owner(1), now);
    let second = enter(&queue, "b", now);
    first.end(now);
    assert_eq!(release(&queue, now, None), "away");
    let later = now + 150 * MS;
    enter_for(&queue, "a", owner(1), later).end(later);
    assert_eq!(step(&second, later), ("defer", Some(50 * MS)));
}

/// Waiters leave all the time, and none comes back. The lock is released every 10 ms. How long does
/// it stay free while somebody waits for it?
fn idle_time(minutes: u32, comes_back: bool) -> Duration {
    let queue = queue();
    let begin = Instant::now();
    let mut now = begin;
    let mut idle = Duration::ZERO;
    let mut waits = enter(&queue, "stays", now);
    let mut n = 0u8;
    while now < begin + minutes * Duration::from_secs(60) {
        n = n.wrapping_add(1);
        let mut leaves = enter_for(&queue, "leaves", owner(n % 8 + 1), now);
        leaves.end(now);
        // The next waiter is behind the place.
        let next = enter(&queue, "stays", now);
        drop(waits);
        waits = next;
        now += 10 * MS;
        if release(&queue, now, None) == "away" {
            while let Step::Defer(until) = waits.step(now, MayTry::InOrder) {
                assert!(idle < Duration::from_secs(60), "{idle:?} since the first minute");
                // The same owners come back, and leave again without an attempt.
                let pause = if comes_back { 50 * MS } else { until - now };
                let pause = pause.min(until - now);
                (now, idle) = (now + pause, idle + pause);
                if comes_back {
                    enter_for(&queue, "leaves", owner(n % 8 + 1), now).end(now);
                }
            }
        } else {
            assert!(matches!(waits.step(now, MayTry::InOrder), Step::Handed(_)));
        }
        waits.granted(now, success(now));
        waits = enter(&queue, "stays", now);
        queue.end_places(now);
    }
    idle
}

#[test]
fn clients_that_never_come_back_cost_at_most_one_percent() {
    for comes_back in [false, true] {
        let idle = idle_time(10, comes_back);
        let limit = Duration::from_secs(600).mul_f64(GAP.as_secs_f64() / CHARGED.as_secs_f64());
        assert!(idle > limit / 2 && idle <= limit + GAP, "{idle:?} of 10 min, {comes_back}");
    }
}

#[test]
fn a_line_shows_no_more_than_it_is_asked_for() {
    let queue = WaitQueues::new(Bounds { total: 1_000, per_lock: 1_000 });
    let now = Instant::now();
    let tickets: Vec<_> = (0..200).map(|_| enter(&queue, "a", now)).collect();
    let (line, total) = queue.line(&lock(), 100, now, |params, _, _, _| *params);
    assert_eq!((line.len(), total, tickets.len()), (100, 200, 200));
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
fn a_newcomer_with_a_longer_round_limit_does_not_wait_for_the_backoff() {
    let queue = queue();
    let now = Instant::now();
    let hasty = enter_with(&queue, "hasty", MS, now);
    let calm = enter_with(&queue, "not longer", MS, now);
    assert_eq!(step(&hasty, now), ("poll", None));
    failed(&hasty, now, 100 * MS);
    let little = enter_with(&queue, "little longer", MS + MS / 2, now);
    assert_eq!(step(&little, now), ("wait", None));
    let longer = enter_with(&queue, "longer", 2 * MS, now);
    assert_eq!(step(&longer, now), ("poll", None));
    assert_eq!(step(&hasty, now), ("wait", None));
    let longest = enter_with(&queue, "longest", 100 * MS, now);
    assert_eq!(step(&longest, now), ("wait", None), "an attempt is under way");
    drop((longest, calm, little));
    failed(&longer, now, 100 * MS);
    assert_eq!(step(&longer, now), ("until", Some(100 * MS)), "it backs off");
    let same = enter_with(&queue, "same", 2 * MS, now);
    assert_eq!(step(&same, now), ("wait", None));
    drop((longer, same));
    let again = enter_with(&queue, "that limit has failed", 3 * MS, now);
    assert_eq!(step(&again, now), ("wait", None));
    let terms = PlaceTerms { priority: Priority::MIN, ..terms(None, 4 * MS) };
    let unimportant = queue.enter(lock(), "lower priority", terms, (now, now, now + 25 * MS));
    assert_eq!(step(&unimportant, now), ("wait", None));
    let twice = enter_with(&queue, "twice that limit", 4 * MS, now);
    assert_eq!(step(&twice, now), ("poll", None));
}

#[test]
fn an_unawaited_lock_is_tried_when_all_slots_are_taken() {
    let queue = WaitQueues::new(Bounds { total: 1, per_lock: 1 });
    let now = Instant::now();
    let waits: Ticket =
        queue.enter(Bytes::from_static(b"other"), "a", terms(None, MS), (now, now, now));
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
    assert_eq!(queue.enter(lock(), (), terms(None, MS), (now, now, now)).take_slot(), Err(full));
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
