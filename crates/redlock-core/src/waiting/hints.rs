//! What gateways tell each other through the nodes, and what one of them knows of the others.
//!
//! Two words are enough. *Waiting*: somebody waits for this lock at the sender, published by the script that refuses the
//! waiter's try, and again with every poll. *Released*: published by the script that releases the lock, if the releasing
//! gateway has heard that somebody waits elsewhere.
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

use crate::types::FencingToken;

/// How long a word of waiting counts; polls repeat it more often.
const LIFE: Duration = Duration::from_secs(3);
/// Locks that are known to be waited for. Whoever waits for one more polls.
const MOST: usize = 65_536;
/// Local hand-offs in a row while others wait.
const LONGEST_RUN: u32 = 32;
/// How long they may take together. Holders that keep a lock for longer than this alternate between gateways.
const LONGEST_TURN: Duration = Duration::from_millis(10);
/// For how long a gateway that has released a lock for others keeps out of their way.
const THEIR_TURN: Duration = Duration::from_millis(3);

/// A message between gateways: `1 <word> <origin> [<T>] <lock key>`, the numbers of fixed width.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hint(Bytes);

/// What a hint says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Word {
    /// Somebody waits here.
    Waiting,
    /// The grant with this token was released here; `waiting` when somebody waits here as well.
    Released { t: FencingToken, waiting: bool },
}

impl Hint {
    pub(crate) fn new(origin: u64, word: Word, lock: &Bytes) -> Self {
        use std::io::Write;
        let mut text = Vec::with_capacity(2 + 2 + 17 + 17 + lock.len());
        match word {
            Word::Waiting => write!(text, "1 w {origin:016x} "),
            Word::Released { t, waiting: false } => write!(text, "1 r {origin:016x} {t} "),
            Word::Released { t, waiting: true } => write!(text, "1 y {origin:016x} {t} "),
        }
        .expect("a Vec takes every write");
        text.extend_from_slice(lock);
        Self(Bytes::from(text))
    }

    /// A message as it came.
    pub fn received(text: Bytes) -> Self {
        Self(text)
    }

    /// The message as it is published.
    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    /// `None` for what is no hint, or one of a later version.
    pub(crate) fn parse(&self) -> Option<(u64, Word, Bytes)> {
        const NUMBER: usize = 16;
        let field = |from: usize| std::str::from_utf8(self.0.get(from..from + NUMBER)?).ok();
        let origin = u64::from_str_radix(field(4)?, 16).ok()?;
        let (word, lock_at) = match self.0.get(..4)? {
            b"1 w " => (Word::Waiting, 4 + NUMBER + 1),
            kind @ (b"1 r " | b"1 y ") => {
                let t = FencingToken::parse(field(4 + NUMBER + 1)?.as_bytes())?;
                (Word::Released { t, waiting: kind == b"1 y " }, 4 + 2 * (NUMBER + 1))
            }
            _ => return None,
        };
        let lock = self.0.get(lock_at..).filter(|lock| !lock.is_empty())?;
        (self.0.get(lock_at - 1)? == &b' ').then(|| (origin, word, Bytes::copy_from_slice(lock)))
    }
}

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
}

/// What to do with a lock that others wait for too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Whose {
    /// Nobody else waits for it.
    Ours,
    /// Others wait, and it may still be handed over here.
    StillOurs,
    /// Others wait, and have waited long enough.
    Theirs,
}

impl Others {
    /// Somebody waits elsewhere.
    pub(crate) fn wait(&self, lock: &Bytes, now: Instant) {
        self.with(now, |notes| {
            let until = now + LIFE;
            let fresh = || Note { until, their_turn_ends: None, run: 0, since: None };
            let known = notes.find(lock, now);
            if known.is_some() || notes.young.len() < MOST {
                notes.young.insert(lock.clone(), Note { until, ..known.unwrap_or_else(fresh) });
            }
        });
    }

    /// Whose a lock is that is about to be released here.
    pub(crate) fn whose(&self, lock: &Bytes, now: Instant) -> Whose {
        if self.known.load(Ordering::Relaxed) == 0 {
            return Whose::Ours;
        }
        let Some(Note { run, since, .. }) = self.with(now, |notes| notes.find(lock, now)) else { return Whose::Ours };
        let over = since.is_some_and(|since| now.saturating_duration_since(since) >= LONGEST_TURN);
        if over || run >= LONGEST_RUN { Whose::Theirs } else { Whose::StillOurs }
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
    use proptest::prelude::*;

    fn lock() -> Bytes {
        Bytes::from_static(b"lock:a b")
    }

    #[test]
    fn a_hint_gives_back_what_went_in() {
        let t = FencingToken::MIN;
        for word in [Word::Waiting, Word::Released { t, waiting: false }, Word::Released { t, waiting: true }] {
            assert_eq!(Hint::new(7, word, &lock()).parse(), Some((7, word, lock())));
        }
    }

    proptest! {
        #[test]
        fn no_message_makes_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Hint::received(Bytes::from(bytes)).parse();
        }

        #[test]
        fn no_beginning_of_a_message_makes_the_parser_panic(kind in "1 [wry] ", rest in "[0-9a-f ]{0,60}") {
            let _ = Hint::received(Bytes::from(kind + &rest)).parse();
        }
    }

    #[test]
    fn a_note_lapses_after_its_life_and_leaves_nothing_behind() {
        let (others, now) = (Others::default(), Instant::now());
        assert_eq!(others.whose(&lock(), now), Whose::Ours);
        others.wait(&lock(), now);
        assert_eq!(others.whose(&lock(), now + LIFE / 2), Whose::StillOurs);
        assert_eq!(others.whose(&lock(), now + LIFE), Whose::Ours);
        assert_eq!(others.whose(&lock(), now + 3 * LIFE), Whose::Ours);
        assert_eq!(others.known.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_note_that_is_renewed_outlives_the_turn_of_generations() {
        let (others, now) = (Others::default(), Instant::now());
        for step in 0..20 {
            others.wait(&lock(), now + LIFE / 2 * step);
            assert_eq!(others.whose(&lock(), now + LIFE / 2 * step + LIFE / 2), Whose::StillOurs);
        }
        assert!(others.known.load(Ordering::Relaxed) <= 2);
    }

    #[test]
    fn names_beyond_the_bound_are_not_noted() {
        let (others, now) = (Others::default(), Instant::now());
        let name = |n: usize| Bytes::from(n.to_string());
        (0..MOST + 10).for_each(|n| others.wait(&name(n), now));
        assert_eq!([MOST - 1, MOST + 1].map(|n| others.whose(&name(n), now)), [Whose::StillOurs, Whose::Ours]);
    }

    #[test]
    fn a_turn_is_over_after_its_longest_run_or_time_and_theirs_begins_another() {
        let (others, now) = (Others::default(), Instant::now());
        others.wait(&lock(), now);
        for _ in 0..LONGEST_RUN {
            assert_eq!(others.whose(&lock(), now), Whose::StillOurs);
            others.handed_over(&lock(), now);
        }
        assert_eq!(others.whose(&lock(), now), Whose::Theirs);
        others.their_turn(&lock(), now);
        assert_eq!(others.whose(&lock(), now + LONGEST_TURN), Whose::StillOurs);
        others.our_turn(&lock(), now);
        others.wait(&lock(), now);
        assert_eq!(others.whose(&lock(), now + LONGEST_TURN), Whose::Theirs, "a word of waiting changes nothing");
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
