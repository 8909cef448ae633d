//! Priorities, and waiters of which only the newest waits.

use super::*;
use crate::node::hint::NewestWaiter;

fn enter_as(
    queue: &Queues,
    params: &'static str,
    priority: u8,
    owner: Option<Owner>,
    now: Instant,
) -> Ticket {
    let priority = Priority::new(priority).expect("0 to 9 are priorities");
    let terms = PlaceTerms { priority, ..terms(owner, MS) };
    let ticket = queue.enter(lock(), params, terms, (now, now, now + 25 * MS));
    if owner.is_some() {
        ticket.may_keep(PlacePermit::counted(()));
    }
    ticket
}

/// Enters as the newest, and begins to wait.
fn enter_newest(
    queue: &Queues,
    params: &'static str,
    owner: Option<Owner>,
    now: Instant,
) -> Ticket {
    let terms = PlaceTerms { mode: QueueMode::Newest, ..terms(owner, MS) };
    let ticket = queue.enter(lock(), params, terms, (now, now, now + 25 * MS));
    if owner.is_some() {
        ticket.may_keep(PlacePermit::counted(()));
    }
    ticket.supersede_older(now);
    ticket
}

#[test]
fn only_ten_priorities_exist() {
    let values = (0..=u8::MAX).filter_map(Priority::new).map(Priority::get);
    assert!(values.eq(0..=9));
    assert_eq!(Priority::default().get(), 5);
}

#[test]
fn a_line_is_by_priority_and_then_by_arrival() {
    let queue = queue();
    let now = Instant::now();
    let waits = |params, priority| enter_as(&queue, params, priority, None, now);
    let tickets = [
        waits("5a", 5),
        waits("0a", 0),
        waits("9a", 9),
        waits("5b", 5),
        waits("9b", 9),
        waits("0b", 0),
    ];
    assert_eq!(line(&queue, now), "9a 9b 5a 5b 0a 0b");
    let positions = tickets.map(|mut ticket| ticket.end(now).map(|place| place.position));
    assert_eq!(positions, [3, 4, 1, 2, 1, 1].map(Some));
}

#[test]
fn a_position_counts_kept_places_and_higher_priorities() {
    let queue = queue();
    let now = Instant::now();
    enter_as(&queue, "away", 5, Some(owner(1)), now).end(now);
    let waits = |params, priority| enter_as(&queue, params, priority, None, now);
    let _tickets = [waits("a", 5), waits("urgent", 9), waits("b", 5)];
    assert_eq!(line(&queue, now), "urgent (away) a b");
    let position = |of| queue.position(&lock(), now, |params| *params == of);
    assert_eq!(["urgent", "a", "b", "c"].map(position), [Some(1), Some(3), Some(4), None]);
}

#[test]
fn a_release_goes_to_the_highest_priority() {
    let queue = queue();
    let now = Instant::now();
    let first = refused_one(&queue, now);
    let urgent = enter_as(&queue, "urgent", 9, None, now);
    assert_eq!(step(&first, now + POLL), ("wait", None), "it is no longer first");
    assert_eq!(step(&urgent, now), ("until", Some(POLL)));
    assert_eq!(release(&queue, now, None), "first");
    assert_eq!(step(&urgent, now), ("urgent", None));
    urgent.granted(now, success(now));
    assert!(is_signalled(&first));
}

#[test]
fn a_higher_priority_waits_for_the_attempt_in_flight() {
    let queue = queue();
    let now = Instant::now();
    let first = enter(&queue, "a", now);
    assert_eq!(step(&first, now), ("poll", None));
    let urgent = enter_as(&queue, "urgent", 9, None, now);
    assert_eq!(step(&urgent, now), ("wait", None));
    assert!(!is_signalled(&urgent));
    refused(&first, now);
    assert!(is_signalled(&urgent), "it is first, and nobody competes");
    assert_eq!(step(&urgent, now + POLL), ("poll", None));
}

#[test]
fn a_kept_place_keeps_its_priority() {
    let queue = queue();
    let now = Instant::now();
    enter_as(&queue, "a", 2, Some(owner(1)), now).end(now);
    let normal = enter(&queue, "b", now);
    let low = enter_as(&queue, "c", 2, None, now);
    assert_eq!(line(&queue, now), "b (a) c");
    let again = enter_as(&queue, "a", 2, Some(owner(1)), now);
    assert_eq!(line(&queue, now), "b a c");
    drop((normal, low, again));
}

#[test]
fn a_repeat_with_another_priority_keeps_only_its_arrival() {
    let queue = queue();
    let now = Instant::now();
    enter_as(&queue, "a", 2, Some(owner(1)), now).end(now);
    let normal = enter(&queue, "b", now);
    let again = enter_as(&queue, "a", 5, Some(owner(1)), now);
    assert_eq!(line(&queue, now), "a b");
    drop((normal, again));
}

#[test]
fn a_place_passes_to_a_copy_with_the_priority_of_the_copy() {
    let queue = queue();
    let now = Instant::now();
    let mut urgent = enter_as(&queue, "a", 9, Some(owner(1)), now);
    let normal = enter(&queue, "b", now);
    let copy = enter_as(&queue, "A", 5, Some(owner(1)), now);
    assert_eq!(line(&queue, now), "a b A");
    urgent.end(now);
    assert_eq!(line(&queue, now), "A b", "it arrived first, and both have one priority");
    drop((normal, copy));
}

#[test]
fn a_free_lock_is_not_left_to_a_lower_priority() {
    let queue = queue();
    let now = Instant::now();
    enter_as(&queue, "a", 2, Some(owner(1)), now).end(now);
    let normal = enter(&queue, "b", now);
    assert_eq!(step(&normal, now), ("poll", None));
}

#[test]
fn a_priority_with_short_rounds_does_not_block_lower_ones() {
    let queue = queue();
    let now = Instant::now();
    let waits = |params, priority, round_limit| {
        let priority = Priority::new(priority).expect("0 to 9 are priorities");
        let terms = PlaceTerms { priority, ..terms(None, round_limit) };
        queue.enter(lock(), params, terms, (now, now, now + 25 * MS))
    };
    let hasty = waits("9", 9, MS);
    let normal = waits("5a", 5, 50 * MS);
    let other = waits("5b", 5, 50 * MS);
    let low = waits("2", 2, 50 * MS);
    assert_eq!(step(&hasty, now), ("poll", None));
    failed(&hasty, now, 100 * MS);
    assert_eq!(line(&queue, now), "5a 5b 9 2", "it goes behind the priority that passes");
    assert_eq!(step(&normal, now), ("poll", None));
    drop((other, low));
}

#[test]
fn after_three_failures_the_next_priority_passes() {
    let queue = queue();
    let mut now = Instant::now();
    let urgent = enter_as(&queue, "9", 9, None, now);
    let normal = enter(&queue, "5", now);
    let low = enter_as(&queue, "2", 2, None, now);
    for _ in 0..3 {
        assert_eq!(step(&urgent, now), ("poll", None));
        failed(&urgent, now, 100 * MS);
        now += 100 * MS;
    }
    assert_eq!(line(&queue, now), "5 9 2");
    drop((normal, low));
}

#[test]
fn a_newer_waiter_supersedes_only_older_ones_of_its_kind() {
    let queue = queue();
    let now = Instant::now();
    let ordinary = refused_one(&queue, now);
    let old = enter_newest(&queue, "old", None, now);
    assert_eq!(step(&old, now), ("wait", None));
    assert!(!is_signalled(&old));
    let new = enter_newest(&queue, "new", None, now);
    assert!(is_signalled(&old) && !is_signalled(&ordinary));
    assert_eq!(step(&old, now), ("superseded", None));
    drop(old);
    assert_eq!(line(&queue, now), "a new");
    assert_eq!(step(&new, now), ("wait", None));
    assert_eq!(step(&ordinary, now), ("until", Some(POLL)));
}

#[test]
fn a_superseded_first_waiter_lets_the_next_one_become_first() {
    let queue = queue();
    let now = Instant::now();
    let old = enter_newest(&queue, "old", None, now);
    assert_eq!(step(&old, now), ("poll", None));
    refused(&old, now);
    let new = enter_newest(&queue, "new", None, now);
    assert_eq!(step(&new, now), ("wait", None));
    let plan = plan(&queue, now);
    assert_eq!(step(&old, now), ("superseded", None));
    drop(old);
    assert!(is_signalled(&new));
    assert!(!plan.hand("old"), "the attempt is undone");
    assert_eq!(step(&new, Instant::now()), ("again", None), "the lock was free for a moment");
}

#[test]
fn a_superseded_waiter_does_not_take_an_attempt_handed_to_it() {
    let queue = queue();
    let now = Instant::now();
    let old = enter_newest(&queue, "old", None, now);
    assert_eq!(step(&old, now), ("poll", None));
    refused(&old, now);
    assert!(plan(&queue, now).hand("old"));
    let new = enter_newest(&queue, "new", None, now);
    assert_eq!(step(&old, now), ("superseded", None));
    drop(old);
    assert!(is_signalled(&new));
    assert_eq!(step(&new, Instant::now()), ("poll", None));
}

#[test]
fn an_attempt_in_flight_outlives_a_newer_waiter() {
    let queue = queue();
    let now = Instant::now();
    let old = enter_newest(&queue, "old", Some(owner(1)), now);
    assert_eq!(step(&old, now), ("poll", None));
    let new = enter_newest(&queue, "new", Some(owner(2)), now);
    old.granted(now, Success { shared_owner: Some(owner(1)), ..success(now) });
    assert_eq!(line(&queue, now), "new");
    let repeat = enter_newest(&queue, "old", Some(owner(1)), now);
    assert_eq!(step(&repeat, now), ("own", None), "a repeat gets the grant again");
    drop(new);
}

#[test]
fn a_higher_priority_granted_at_once_supersedes_older_waiters() {
    let queue = queue();
    let now = Instant::now();
    let old = enter_newest(&queue, "old", None, now);
    let priority = Priority::MAX;
    let terms = PlaceTerms { mode: QueueMode::Newest, priority, ..terms(None, MS) };
    let new = queue.enter(lock(), "new", terms, (now, now, now + 25 * MS));
    assert_eq!(step(&new, now), ("poll", None));
    assert!(!is_signalled(&old), "the newer request does not wait");
    new.granted(now, success(now));
    assert_eq!(step(&old, now), ("superseded", None));
}

#[test]
fn a_copy_does_not_supersede_its_original() {
    let queue = queue();
    let now = Instant::now();
    let original = enter_newest(&queue, "a", Some(owner(1)), now);
    let copy = enter_newest(&queue, "A", Some(owner(1)), now);
    assert!(!is_signalled(&original));
    assert_eq!(line(&queue, now), "a A");
    let newer = enter_newest(&queue, "b", Some(owner(2)), now);
    assert_eq!((step(&original, now).0, step(&copy, now).0), ("superseded", "superseded"));
    drop((original, copy));
    assert_eq!(line(&queue, now), "b");
    drop(newer);
}

#[test]
fn a_copy_is_as_old_as_its_original() {
    let queue = queue();
    let now = Instant::now();
    let original = enter_newest(&queue, "a", Some(owner(1)), now);
    let terms = PlaceTerms { mode: QueueMode::Newest, ..terms(Some(owner(2)), MS) };
    let newer = queue.enter(lock(), "b", terms, (now, now, now + 25 * MS));
    let copy = enter_newest(&queue, "A", Some(owner(1)), now);
    assert!(matches!(newer.step(now, MayTry::No), Step::Wait), "a copy supersedes no newer one");
    newer.supersede_older(now);
    assert_eq!((step(&original, now).0, step(&copy, now).0), ("superseded", "superseded"));
}

#[test]
fn a_repeat_of_a_superseded_request_is_superseded_too() {
    let queue = queue();
    let now = Instant::now();
    let mut old = enter_newest(&queue, "old", Some(owner(1)), now);
    let new = enter_newest(&queue, "new", Some(owner(2)), now);
    assert_eq!(old.end(now).and_then(|place| place.kept_for), None, "the place is given up");
    assert_eq!(line(&queue, now), "new");
    let repeat = enter_newest(&queue, "old", Some(owner(1)), now + KEPT / 2);
    assert_eq!(step(&repeat, now + KEPT / 2), ("superseded", None));
    assert_eq!(step(&new, now + KEPT / 2), ("poll", None), "the newer one is not touched");
    drop(repeat);
    let late = enter_newest(&queue, "old", Some(owner(1)), now + KEPT);
    assert_eq!(step(&late, now + KEPT), ("wait", None), "it counts as a new request");
}

#[test]
fn a_kept_place_is_superseded_and_left_to_nobody() {
    let queue = queue();
    let now = Instant::now();
    enter_newest(&queue, "old", Some(owner(1)), now).end(now);
    assert_eq!(line(&queue, now), "(old)");
    let terms = PlaceTerms { mode: QueueMode::Newest, ..terms(Some(owner(2)), MS) };
    let new = queue.enter(lock(), "new", terms, (now, now, now + 25 * MS));
    assert_eq!(step(&new, now), ("defer", Some(GAP)));
    new.supersede_older(now);
    assert!(is_signalled(&new));
    assert_eq!((line(&queue, now).as_str(), step(&new, now).0), ("new", "poll"));
    let repeat = enter_newest(&queue, "old", Some(owner(1)), now);
    assert_eq!(step(&repeat, now), ("superseded", None));
    drop((repeat, new));
    assert_eq!(queue.kept(), 1, "the old owner is noted");
    queue.end_places(now + KEPT + CHARGED);
    assert_eq!(queue.kept(), 0);
}

#[test]
fn a_place_that_is_taken_up_supersedes_nothing_newer() {
    let queue = queue();
    let now = Instant::now();
    enter_newest(&queue, "old", Some(owner(1)), now).end(now);
    let terms = PlaceTerms { mode: QueueMode::Newest, ..terms(Some(owner(2)), MS) };
    let new = queue.enter(lock(), "new", terms, (now, now, now + 25 * MS));
    let old = enter_newest(&queue, "old", Some(owner(1)), now);
    assert!(matches!(new.step(now, MayTry::No), Step::Wait));
    new.supersede_older(now);
    assert_eq!(step(&old, now), ("superseded", None));
}

#[test]
fn a_superseded_owner_that_gives_up_may_begin_anew() {
    let queue = queue();
    let now = Instant::now();
    let mut old = enter_newest(&queue, "old", Some(owner(1)), now);
    let new = enter_newest(&queue, "new", None, now);
    old.end(now);
    queue.give_up(&lock(), &owner(1), now);
    assert_eq!(queue.kept(), 0);
    let again = enter_newest(&queue, "old", Some(owner(1)), now);
    assert_eq!((step(&new, now).0, step(&again, now).0), ("superseded", "wait"));
}

#[test]
fn a_line_has_its_length_and_ended_places_do_not_count() {
    let queue = queue();
    let now = Instant::now();
    let length = |now| queue.line_length(&lock(), || now);
    assert_eq!(queue.line_length(&lock(), || unreachable!("nobody waits")), 0);
    enter_for(&queue, "a", owner(1), now).end(now);
    let waits = enter(&queue, "b", now);
    assert_eq!((length(now), length(now + KEPT)), (2, 1));
    drop(waits);
    assert_eq!(queue.line_length(&lock(), || unreachable!("nobody waits")), 0);
}

fn arrives(arrival: u64, shared_owner: Option<Owner>) -> NewestWaiter {
    NewestWaiter { arrival, shared_owner }
}

#[test]
fn a_newer_waiter_elsewhere_supersedes_older_waiters_and_places() {
    let queue = queue();
    let now = Instant::now();
    let ordinary = refused_one(&queue, now);
    queue.arrivals_follow(1_000);
    let mut left = enter_newest(&queue, "left", Some(owner(1)), now);
    left.end(now);
    assert_eq!(line(&queue, now), "a (left)");
    queue.supersede_older_than(&lock(), arrives(999, None), now);
    assert_eq!(line(&queue, now), "a (left)", "the foreign waiter is older");
    queue.arrivals_follow(2_000);
    let waits = enter_newest(&queue, "waits", None, now);
    assert_eq!(line(&queue, now), "a waits");
    queue.supersede_older_than(&lock(), arrives(2_000, None), now);
    assert_eq!(step(&waits, now), ("wait", None), "it is as old, and from a smaller origin");
    queue.supersede_older_than(&lock(), arrives(2_001, None), now);
    assert_eq!(step(&waits, now), ("superseded", None));
    drop(waits);
    assert_eq!(step(&ordinary, now), ("until", Some(POLL)));
    queue.supersede_older_than(&Bytes::from_static(b"other"), arrives(5_000, None), now);
}

#[test]
fn a_copy_elsewhere_supersedes_nothing_newer_than_its_original() {
    let queue = queue();
    let now = Instant::now();
    let original = enter_newest(&queue, "a", Some(owner(1)), now);
    let ticket = queue.enter(
        lock(),
        "b",
        PlaceTerms { mode: QueueMode::Newest, ..terms(None, MS) },
        (now, now, now + 25 * MS),
    );
    queue.supersede_older_than(&lock(), arrives(u64::MAX, Some(owner(1))), now);
    assert_eq!(step(&original, now), ("poll", None));
    assert_eq!(step(&ticket, now), ("wait", None));
}

#[test]
fn hints_name_only_a_waiter_that_has_begun_to_wait() {
    let queue = queue();
    let now = Instant::now();
    let ordinary = refused_one(&queue, now);
    assert_eq!(ordinary.newest(), None);
    queue.arrivals_follow(7);
    let ticket = enter_newest(&queue, "a", Some(owner(1)), now);
    assert_eq!(ordinary.newest(), None);
    ticket.take_slot().expect("there is room");
    assert_eq!(ordinary.newest(), Some(arrives(7, Some(owner(1)))));
    ticket.announce(now, || true);
    assert!(is_signalled(&ordinary));
    assert_eq!(step(&ordinary, now), ("poll", None), "the first waiter asks at once");
}

#[test]
fn a_superseded_owner_elsewhere_supersedes_nobody() {
    let queue = queue();
    let now = Instant::now();
    let _ordinary = refused_one(&queue, now);
    let mut old = enter_newest(&queue, "old", Some(owner(1)), now);
    old.end(now);
    let new = enter_newest(&queue, "new", Some(owner(2)), now);
    queue.supersede_older_than(&lock(), arrives(u64::MAX, Some(owner(1))), now);
    assert_eq!(step(&new, now), ("wait", None), "the older one was superseded by this one");
}

#[test]
fn a_waiter_elsewhere_whose_place_is_kept_counts_from_that_place() {
    let queue = queue();
    let now = Instant::now();
    let _ordinary = refused_one(&queue, now);
    let mut away = enter_newest(&queue, "away", Some(owner(1)), now);
    away.end(now);
    let terms = PlaceTerms { mode: QueueMode::Newest, ..terms(None, MS) };
    // It has not begun to wait, so it has superseded nobody.
    let newer = queue.enter(lock(), "newer", terms, (now, now, now + 25 * MS));
    queue.supersede_older_than(&lock(), arrives(u64::MAX, Some(owner(1))), now);
    assert_eq!(step(&newer, now), ("wait", None));
}

#[test]
fn nobody_is_told_of_after_an_attempt_without_a_quorum() {
    let queue = queue();
    let now = Instant::now();
    let first = enter_newest(&queue, "a", None, now);
    first.take_slot().expect("there is room");
    assert_eq!(step(&first, now), ("poll", None));
    failed(&first, now, 100 * MS);
    assert_eq!(first.newest(), None);
    first.announce(now, || true);
    assert_ne!(step(&first, now).0, "poll", "the pause without a quorum goes on");
}

#[test]
fn a_lock_that_is_left_to_others_is_not_asked_for_to_tell_of_a_waiter() {
    let queue = queue();
    let now = Instant::now();
    let first = refused_one(&queue, now);
    let pause = Pause { rounds: 0.0, least: POLL, most: POLL };
    queue
        .release(&lock(), now + MS, Some(pause))
        .carry_out(|first, _| ((), first.map(|_| panic!("it is left to others"))));
    let newest = enter_newest(&queue, "newest", None, now);
    newest.take_slot().expect("there is room");
    newest.announce(now + MS, || true);
    assert_eq!(step(&first, now + MS), ("until", Some(POLL)));
}
