//! What this process knows of waiters elsewhere, from the hints it hears.
//!
//! The note that somebody waits is kept by the gateways, in memory, with a time to live, and not on the nodes. A key
//! beside the lock would cost every release a lookup, a mark in the lock's record would be one more thing that healing,
//! extending and releasing have to agree on. So a release costs the nodes nothing as long as nobody waits, and a hint
//! can never have a part in safety. The price is a gap: a release that is sent before the word of a waiter has come
//! round tells nobody, and the waiter finds out with its next poll.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

/// How long a word of waiting counts; polls repeat it more often than twice in this time.
const LIFE: Duration = Duration::from_secs(2);
/// Locks that are known to be waited for. Whoever waits for one more polls.
const MOST: usize = 65_536;
/// Local hand-offs in a row while others wait.
const LONGEST_RUN: u32 = 32;
/// How long they may take together. Holders that keep a lock for longer than this alternate between gateways.
const LONGEST_TURN: Duration = Duration::from_millis(10);
/// How long a turn lasts where it cannot be heard whether others wait.
const LONGEST_DEAF_TURN: Duration = Duration::from_secs(4);
/// For how long a gateway that has released a lock for others keeps out of their way.
const THEIR_TURN: Duration = Duration::from_millis(3);

/// The locks that others wait for, and how long this process has kept them waiting.
#[derive(Default)]
pub(crate) struct Others {
    known: AtomicUsize,
    notes: Mutex<Notes>,
}

/// Two generations, of which the older one is forgotten as a whole: so nothing has to look for what has lapsed.
#[derive(Default)]
struct Notes {
    young: HashMap<Bytes, Note>,
    old: HashMap<Bytes, Note>,
    turned: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Note {
    until: Instant,
    their_turn_ends: Option<Instant>,
    /// Local hand-offs, and since when this process has had the lock. Not kept by the line of waiters, which is gone
    /// whenever it is empty: a few clients that come again and again would never end their turn.
    run: u32,
    since: Option<Instant>,
    /// How often in a row the lock was left to others and nobody took it, as far as was heard.
    untaken: u32,
}

/// What to do with a lock that others wait for too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    /// Nobody else waits for it.
    Ours,
    /// Others wait, and it may still be handed over here.
    StillOurs,
    /// Others wait, and have waited long enough. The lock was left to them so often, and they have not taken it.
    Theirs(u32),
}

impl Others {
    /// Somebody waits elsewhere.
    pub(crate) fn wait(&self, lock: &Bytes, now: Instant) {
        self.with(now, |notes| {
            let until = now + LIFE;
            let fresh = || Note { until, their_turn_ends: None, run: 0, since: None, untaken: 0 };
            let known = notes.find(lock, now);
            if known.is_some() || notes.young.len() < MOST {
                notes.young.insert(lock.clone(), Note { until, ..known.unwrap_or_else(fresh) });
            }
        });
    }

    /// Somebody else has had the lock.
    pub(crate) fn taken(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| note.untaken = 0);
    }

    /// Whose a lock is that is about to be released here. Who is `deaf` cannot know whether others wait, and must not starve
    /// them: they poll.
    pub(crate) fn whose(&self, lock: &Bytes, now: Instant, deaf: bool) -> Whose {
        let note = match self.known.load(Ordering::Relaxed) {
            0 => None,
            _ => self.with(now, |notes| notes.find(lock, now)),
        };
        if deaf {
            self.wait(lock, now);
        }
        let note = match note {
            Some(note) => note,
            // Perhaps held for so long that nothing is known any more of the time before.
            None if deaf => return Whose::Theirs(0),
            None => return Whose::Ours,
        };
        let (longest_time, longest_run) =
            if deaf { (LONGEST_DEAF_TURN, u32::MAX) } else { (LONGEST_TURN, LONGEST_RUN) };
        let over = note.since.is_some_and(|since| now.saturating_duration_since(since) >= longest_time);
        if over || note.run >= longest_run { Whose::Theirs(note.untaken) } else { Whose::StillOurs }
    }

    /// A waiter here got the lock after others had it.
    pub(crate) fn our_turn(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| (note.run, note.since) = (0, Some(now)));
    }

    /// It was handed over here once more.
    pub(crate) fn handed_over(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| {
            note.run += 1;
            note.since.get_or_insert(now);
        });
    }

    /// The lock was released for the others: who comes here next lets them try first.
    pub(crate) fn their_turn(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| {
            (note.run, note.since, note.their_turn_ends) = (0, None, Some(now + THEIR_TURN));
            note.untaken = note.untaken.saturating_add(1);
        });
    }

    /// When that is over, if it is not yet.
    pub(crate) fn turn_ends(&self, lock: &Bytes, now: Instant) -> Option<Instant> {
        if self.known.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let note = self.with(now, |notes| notes.find(lock, now))?;
        note.their_turn_ends.filter(|end| *end > now)
    }

    fn change(&self, lock: &Bytes, now: Instant, change: impl FnOnce(&mut Note)) {
        if self.known.load(Ordering::Relaxed) == 0 {
            return;
        }
        self.with(now, |notes| {
            if let Some(mut note) = notes.find(lock, now) {
                change(&mut note);
                notes.young.insert(lock.clone(), note);
            }
        });
    }

    fn with<T>(&self, now: Instant, work: impl FnOnce(&mut Notes) -> T) -> T {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        notes.turn_over(now);
        let result = work(&mut notes);
        self.known.store(notes.young.len() + notes.old.len(), Ordering::Relaxed);
        result
    }
}

impl Notes {
    fn find(&self, lock: &Bytes, now: Instant) -> Option<Note> {
        self.young.get(lock).or_else(|| self.old.get(lock)).copied().filter(|note| note.until > now)
    }

    fn turn_over(&mut self, now: Instant) {
        let turned = *self.turned.get_or_insert(now);
        let age = now.saturating_duration_since(turned);
        if age < LIFE {
            return;
        }
        self.old = std::mem::take(&mut self.young);
        if age >= 2 * LIFE {
            self.old = HashMap::new();
        }
        self.turned = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock() -> Bytes {
        Bytes::from_static(b"lock:a b")
    }

    #[test]
    fn a_note_lapses_after_its_life_and_leaves_nothing_behind() {
        let (others, now) = (Others::default(), Instant::now());
        assert_eq!(others.whose(&lock(), now, false), Whose::Ours);
        others.wait(&lock(), now);
        assert_eq!(others.whose(&lock(), now + LIFE / 2, false), Whose::StillOurs);
        assert_eq!(others.whose(&lock(), now + LIFE, false), Whose::Ours);
        assert_eq!(others.whose(&lock(), now + 3 * LIFE, false), Whose::Ours);
        assert_eq!(others.known.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_note_that_is_renewed_outlives_the_turn_of_generations() {
        let (others, now) = (Others::default(), Instant::now());
        for step in 0..20 {
            others.wait(&lock(), now + LIFE / 2 * step);
            assert_eq!(others.whose(&lock(), now + LIFE / 2 * step + LIFE / 2, false), Whose::StillOurs);
        }
        assert!(others.known.load(Ordering::Relaxed) <= 2);
    }

    #[test]
    fn names_beyond_the_bound_are_not_noted() {
        let (others, now) = (Others::default(), Instant::now());
        let name = |n: usize| Bytes::from(n.to_string());
        (0..MOST + 10).for_each(|n| others.wait(&name(n), now));
        assert_eq!([MOST - 1, MOST + 1].map(|n| others.whose(&name(n), now, false)), [Whose::StillOurs, Whose::Ours]);
    }

    #[test]
    fn a_turn_is_over_after_its_longest_run_or_time_and_theirs_begins_another() {
        let (others, now) = (Others::default(), Instant::now());
        others.wait(&lock(), now);
        for _ in 0..LONGEST_RUN {
            assert_eq!(others.whose(&lock(), now, false), Whose::StillOurs);
            others.handed_over(&lock(), now);
        }
        assert_eq!(others.whose(&lock(), now, false), Whose::Theirs(0));
        others.their_turn(&lock(), now);
        assert_eq!(others.whose(&lock(), now + LONGEST_TURN, false), Whose::StillOurs);
        others.our_turn(&lock(), now);
        others.wait(&lock(), now);
        assert_eq!(
            others.whose(&lock(), now + LONGEST_TURN, false),
            Whose::Theirs(1),
            "a word of waiting changes nothing"
        );
    }

    #[test]
    fn turns_that_nobody_takes_are_counted_until_somebody_does() {
        let (others, now) = (Others::default(), Instant::now());
        others.wait(&lock(), now);
        for untaken in 0..3 {
            others.our_turn(&lock(), now);
            assert_eq!(others.whose(&lock(), now + LONGEST_TURN, false), Whose::Theirs(untaken));
            others.their_turn(&lock(), now);
        }
        others.taken(&lock(), now);
        others.our_turn(&lock(), now);
        assert_eq!(others.whose(&lock(), now + LONGEST_TURN, false), Whose::Theirs(0));
    }

    #[test]
    fn who_is_deaf_ends_its_turn_all_the_same() {
        let (others, now) = (Others::default(), Instant::now());
        assert_eq!(others.whose(&lock(), now, true), Whose::Theirs(0));
        others.our_turn(&lock(), now);
        for step in 0..4 {
            assert_eq!(others.whose(&lock(), now + LONGEST_DEAF_TURN / 4 * step, true), Whose::StillOurs);
        }
        assert_eq!(others.whose(&lock(), now + LONGEST_DEAF_TURN, true), Whose::Theirs(0));
        assert_eq!(others.whose(&lock(), now + 3 * LONGEST_DEAF_TURN, true), Whose::Theirs(0), "long held");
    }

    #[test]
    fn their_turn_ends_by_itself() {
        let (others, now) = (Others::default(), Instant::now());
        others.their_turn(&lock(), now);
        assert_eq!(others.turn_ends(&lock(), now), None, "nobody else waits");
        others.wait(&lock(), now);
        others.their_turn(&lock(), now);
        assert_eq!(others.turn_ends(&lock(), now), Some(now + THEIR_TURN));
        assert_eq!(others.turn_ends(&lock(), now + THEIR_TURN), None);
    }
}
