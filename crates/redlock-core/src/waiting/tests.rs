//! The lines one step after another, at times of the test's choosing. Interleavings are in [`explored`](super::explored).

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::Redlock;
use super::queue::{Bounds, Cause, Lines, Next, Pause, Place, Refusal, Success, Turn};
use super::sync::Arc;
use crate::clock::SystemClock;
use crate::error::LockError;
use crate::node::memory::MemoryNode;
use crate::redlock::AcquireOptions;
use crate::types::{LockName, Ttl};

const MS: Duration = Duration::from_millis(1);
const POLL: Duration = Duration::from_millis(700);
const TTL: Duration = Duration::from_secs(10);

type Queue = Arc<Lines<&'static str, &'static str>>;
type Here = Place<&'static str, &'static str>;

fn queue() -> Queue {
    Lines::new(Bounds { total: 10, of_one_lock: 5 })
}

fn lock() -> Bytes {
    Bytes::from_static(b"lock:a")
}

/// Into the line, where the first poll is due after 25 ms.
fn enter(queue: &Queue, wish: &'static str, now: Instant) -> Here {
    queue.enter(lock(), wish, (now, now + 25 * MS)).expect("there is room")
}

fn refused(place: &Here, now: Instant) {
    let error = LockError::Held(Default::default());
    place.refused(now, Refusal { error, retry: now + POLL, quick: now + 2 * MS, poll_due: now + POLL, round: MS });
}

fn success(now: Instant) -> Success {
    Success { ends: now + TTL, round: MS }
}

/// The turn of those who wait here is over.
const OVER: Option<Pause> = Some(Pause { rounds: 3.0, least: Duration::ZERO, most: Duration::from_secs(1) });

/// What a place is told, in one word, and when.
fn turn(place: &Here, now: Instant) -> (&'static str, Option<Duration>) {
    match place.turn(now, true) {
        Turn::Wait => ("wait", None),
        Turn::Until(then) => ("until", Some(then.saturating_duration_since(now))),
        Turn::Try(Cause::Poll) => ("poll", None),
        Turn::Try(Cause::Hint) => ("hint", None),
        Turn::Try(Cause::Release) => ("again", None),
        Turn::Handed(what) => (what, None),
    }
}

fn is_signalled(place: &Here) -> bool {
    place.poll_signalled(&Context::from_waker(Waker::noop())) == Poll::Ready(())
}

/// The lock is released here: how that is answered. An offer is handed over as its wish.
fn release(queue: &Queue, now: Instant, pause: Option<Pause>) -> &'static str {
    match queue.next(&lock(), now, pause) {
        Next::Nobody => "nobody",
        Next::Busy => "busy",
        Next::Others => "others",
        Next::First(offer) => {
            let wish = *offer.wish();
            assert_eq!(offer.hand(wish), None);
            "first"
        }
    }
}

/// A line whose first has been refused and waits.
fn refused_line(queue: &Queue, now: Instant) -> Here {
    let first = enter(queue, "a", now);
    assert_eq!(turn(&first, now), ("poll", None));
    refused(&first, now);
    first
}

#[test]
fn the_first_of_an_empty_line_tries_at_first_try_and_who_comes_later_waits() {
    let (queue, now) = (queue(), Instant::now());
    let first = queue.enter(lock(), "a", (now + 3 * MS, now + 25 * MS)).expect("there is room");
    let second = enter(&queue, "b", now);
    assert_eq!(turn(&first, now), ("until", Some(3 * MS)));
    assert_eq!(turn(&first, now + 3 * MS), ("poll", None));
    assert_eq!(turn(&second, now + 3 * MS), ("wait", None));
}

#[test]
fn who_may_not_try_is_told_when_it_could() {
    let (queue, now) = (queue(), Instant::now());
    let first = enter(&queue, "a", now);
    assert!(matches!(first.turn(now, false), Turn::Until(then) if then == now));
    assert_eq!(turn(&first, now), ("poll", None));
}

#[test]
fn who_follows_one_that_got_the_lock_at_once_polls_at_first_poll() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (enter(&queue, "a", now), enter(&queue, "b", now));
    assert_eq!(turn(&first, now), ("poll", None));
    assert!(!is_signalled(&second));
    first.granted(now + MS, success(now + MS));
    assert!(is_signalled(&second));
    assert_eq!(turn(&second, now + MS), ("until", Some(24 * MS)));
    assert_eq!(turn(&second, now + 25 * MS), ("poll", None));
}

#[test]
fn the_end_of_the_lock_comes_before_a_later_poll() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (enter(&queue, "a", now), enter(&queue, "b", now));
    assert_eq!(turn(&first, now), ("poll", None));
    first.granted(now, Success { ends: now + 5 * MS, round: MS });
    assert_eq!(turn(&second, now), ("until", Some(5 * MS)));
}

#[test]
fn a_hint_leads_to_quick_tries_and_then_to_polls() {
    let (queue, mut now) = (queue(), Instant::now());
    let first = refused_line(&queue, now);
    assert_eq!(turn(&first, now), ("until", Some(POLL)));
    queue.stir(&lock(), 7, now);
    assert!(is_signalled(&first));
    for _ in 0..3 {
        assert_eq!(turn(&first, now), ("hint", None));
        refused(&first, now);
        assert_eq!(turn(&first, now), ("until", Some(2 * MS)));
        now += 2 * MS;
    }
    assert_eq!(turn(&first, now), ("hint", None));
    refused(&first, now);
    assert_eq!(turn(&first, now), ("until", Some(POLL)));
    assert_eq!(turn(&first, now + POLL), ("poll", None));
}

#[test]
fn a_hint_that_nodes_repeat_is_old_once_somebody_here_has_got_the_lock() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (refused_line(&queue, now), enter(&queue, "b", now));
    queue.stir(&lock(), 7, now);
    assert_eq!(turn(&first, now), ("hint", None));
    first.granted(now, success(now));
    assert!(is_signalled(&second));
    let before = turn(&second, now);
    queue.stir(&lock(), 7, now);
    queue.stir(&lock(), 6, now);
    assert_eq!((is_signalled(&second), turn(&second, now)), (false, before));
}

#[test]
fn a_hint_during_an_attempt_leads_to_the_next_one_at_once() {
    let (queue, now) = (queue(), Instant::now());
    let first = enter(&queue, "a", now);
    assert_eq!(turn(&first, now), ("poll", None));
    queue.stir(&lock(), 7, now);
    assert_eq!(turn(&first, now), ("wait", None), "one attempt at a time");
    refused(&first, now);
    assert_eq!(turn(&first, now), ("hint", None));
}

#[test]
fn a_hint_during_an_attempt_that_has_success_is_old_for_the_next_one() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (enter(&queue, "a", now), enter(&queue, "b", now));
    assert_eq!(turn(&first, now), ("poll", None));
    queue.stir(&lock(), 7, now);
    first.granted(now, success(now));
    assert_eq!(turn(&second, now), ("until", Some(25 * MS)));
    assert_eq!(turn(&second, now + 25 * MS), ("poll", None));
    refused(&second, now + 25 * MS);
    assert_eq!(turn(&second, now + 25 * MS), ("until", Some(POLL)));
}

#[test]
fn a_release_here_is_for_the_first_and_repeats_an_attempt_under_way() {
    let (queue, now) = (queue(), Instant::now());
    assert_eq!(release(&queue, now, None), "nobody");
    let first = refused_line(&queue, now);
    let second = enter(&queue, "b", now);
    assert_eq!(release(&queue, now, None), "first");
    assert!(is_signalled(&first) && !is_signalled(&second));
    assert_eq!(turn(&first, now), ("a", None));
    assert_eq!(release(&queue, now, None), "busy");
    refused(&first, now);
    assert_eq!(turn(&first, now), ("again", None));
}

#[test]
fn a_turn_that_is_over_is_followed_by_a_pause_and_by_another() {
    let (queue, now) = (queue(), Instant::now());
    let first = refused_line(&queue, now);
    assert_eq!(release(&queue, now, OVER), "others");
    assert!(is_signalled(&first), "when it tries has changed");
    assert_eq!(turn(&first, now), ("until", Some(3 * MS)), "three rounds for the others");
    assert_eq!(release(&queue, now, None), "first", "the next turn");
}

#[test]
fn an_offer_dropped_unused_lets_the_first_try_alone() {
    let (queue, now) = (queue(), Instant::now());
    let first = refused_line(&queue, now);
    let Next::First(offer) = queue.next(&lock(), now, None) else { panic!("somebody waits") };
    assert_eq!(turn(&first, now), ("wait", None));
    drop(offer);
    assert!(is_signalled(&first));
    assert_eq!(turn(&first, Instant::now()), ("poll", None));
}

#[test]
fn who_has_left_is_handed_nothing_and_the_next_one_tries() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (refused_line(&queue, now), enter(&queue, "b", now));
    let Next::First(offer) = queue.next(&lock(), now, None) else { panic!("somebody waits") };
    drop(first);
    assert!(is_signalled(&second));
    assert_eq!(turn(&second, Instant::now()), ("poll", None));
    assert_eq!(offer.hand("a"), Some("a"));
    assert_eq!(turn(&second, Instant::now()), ("wait", None), "the attempt under way is its own");
}

#[test]
fn an_offer_dropped_after_its_waiter_has_left_ends_no_other_attempt() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second) = (refused_line(&queue, now), enter(&queue, "b", now));
    let Next::First(offer) = queue.next(&lock(), now, None) else { panic!("somebody waits") };
    drop(first);
    assert_eq!(turn(&second, Instant::now()), ("poll", None));
    drop(offer);
    assert_eq!(turn(&second, Instant::now()), ("wait", None));
    assert_eq!(release(&queue, now, None), "busy");
}

#[test]
fn news_are_of_the_last_refusal_until_somebody_here_gets_the_lock() {
    let (queue, now) = (queue(), Instant::now());
    let first = enter(&queue, "a", now);
    let second = enter(&queue, "b", now);
    assert_eq!(second.news(now), None);
    assert_eq!(turn(&first, now), ("poll", None));
    refused(&first, now);
    assert_eq!(second.news(now + 5 * MS), Some((LockError::Held(Default::default()), 5 * MS)));
    assert_eq!(turn(&first, now + POLL), ("poll", None));
    first.granted(now + POLL, success(now + POLL));
    assert_eq!(second.news(now + POLL), None);
}

#[test]
fn who_leaves_without_its_turn_changes_nothing_for_the_others() {
    let (queue, now) = (queue(), Instant::now());
    let (first, second, third) = (refused_line(&queue, now), enter(&queue, "b", now), enter(&queue, "c", now));
    drop(second);
    assert!(!is_signalled(&third));
    drop(first);
    assert!(is_signalled(&third));
    assert_eq!(turn(&third, now), ("until", Some(POLL)), "as the first was told");
    drop(third);
    assert_eq!(queue.count(), (0, 0));
}

// What went wrong once.

#[test]
fn a_bound_of_none_leaves_no_line_behind() {
    let (queue, now) = (Lines::<(), ()>::new(Bounds { total: 10, of_one_lock: 0 }), Instant::now());
    assert!(queue.enter(lock(), (), (now, now)).is_err());
    assert_eq!(queue.count(), (0, 0));
}

#[test]
fn who_came_between_the_decision_and_the_release_and_was_refused_tries_again() {
    let (queue, now) = (queue(), Instant::now());
    assert_eq!(release(&queue, now, None), "nobody");
    let first = refused_line(&queue, now + MS);
    queue.released(&lock(), now, now + 2 * MS);
    assert!(is_signalled(&first));
    assert_eq!(turn(&first, now + 2 * MS), ("again", None));
    queue.released(&lock(), now, now + 2 * MS);
    refused(&first, now + 3 * MS);
    assert_eq!(turn(&first, now + 3 * MS), ("again", None), "the attempt was under way");
}

#[test]
fn a_release_that_was_sent_does_not_cut_the_pause_for_the_others() {
    let (queue, now) = (queue(), Instant::now());
    let first = refused_line(&queue, now);
    let later = now + 10 * MS;
    assert_eq!(release(&queue, later, OVER), "others");
    queue.released(&lock(), later, later + MS);
    assert_eq!(turn(&first, later + MS), ("until", Some(2 * MS)));
}

#[test]
fn a_node_that_released_later_than_the_others_still_counts_after_a_refusal() {
    let (queue, mut now) = (queue(), Instant::now());
    let first = refused_line(&queue, now);
    queue.stir(&lock(), 7, now);
    for _ in 0..4 {
        assert_eq!(turn(&first, now), ("hint", None));
        refused(&first, now);
        now += 2 * MS;
    }
    assert!(matches!(first.turn(now, true), Turn::Until(_)), "it has given up");
    queue.stir(&lock(), 7, now);
    assert_eq!(turn(&first, now), ("hint", None));
}

#[tokio::test]
async fn who_has_little_patience_in_the_turn_of_others_still_asks_once() {
    let node = Arc::new(MemoryNode::new("n", Arc::new(SystemClock), Default::default()));
    let locks = Redlock::new(vec![node], Default::default(), Default::default()).expect("settings");
    let (name, ttl) = (LockName::parse("a").expect("a name"), Ttl::from_millis(1_000).expect("a TTL"));
    let (others, now) = (&locks.shared().room.others, Instant::now());
    others.wait(&lock(), now);
    others.their_turn(&lock(), now);
    let lease = locks.acquire_within(&name, ttl, AcquireOptions::default(), MS / 10).await;
    assert!(lease.is_ok(), "{lease:?}");
}

#[tokio::test]
async fn a_patience_without_end_is_no_panic() {
    let node = Arc::new(MemoryNode::new("n", Arc::new(SystemClock), Default::default()));
    let locks = Redlock::new(vec![node], Default::default(), Default::default()).expect("settings");
    let (name, ttl) = (LockName::parse("a").expect("a name"), Ttl::from_millis(1_000).expect("a TTL"));
    let lease = locks.acquire_within(&name, ttl, AcquireOptions::default(), Duration::MAX).await;
    assert!(lease.is_ok(), "{lease:?}");
}
