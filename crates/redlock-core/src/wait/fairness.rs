//! Fairness between gateways: what this one knows of waiters elsewhere, from the hints it hears, and whose turn it is when a
//! lock is released here.
//!
//! The note that somebody waits is kept by the gateways, in memory, with a time to live, and not on the nodes. A key
//! beside the lock would cost every release a lookup, a mark in the lock's record would be one more thing that repair,
//! extending and releasing have to agree on. So a release costs the nodes nothing as long as nobody waits, and a hint
//! can never have a part in safety. The price is a gap: a release that is sent before the word of a waiter has come
//! round tells nobody, and the waiter finds out with its next poll.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::polls::{POLL, Polls};
use super::queue::Pause;
use crate::model::clock::Entropy;
use crate::model::types::FencingToken;
use crate::node::Hint;
use crate::node::hint::HintKind;

/// How long a word of waiting counts; polls repeat it more often than twice in this time. Where they are slower, it says so.
const LIFE: Duration = Duration::from_secs(2);
const _: () = assert!(2 * POLL.1.as_millis() < LIFE.as_millis());
/// The longest that is believed: everybody who may write to the nodes can publish.
const MAX_LIFE: Duration = Duration::from_secs(60);
/// Locks that are known to be waited for. Waiters for one more poll.
const MAX_NOTES: usize = 65_536;
/// Local handoffs in a row while others wait.
const MAX_RUN: u32 = 32;
/// How long they may take together. Holders that keep a lock for longer than this alternate between gateways.
const MAX_TURN: Duration = Duration::from_millis(10);
/// How long a turn lasts where it cannot be heard whether others wait.
const MAX_UNHEARD_TURN: Duration = Duration::from_secs(4);
/// For how long a gateway that has yielded a lock lets the others try first.
const YIELD: Duration = Duration::from_millis(3);
/// After how many of its own rounds a queue competes again that has yielded its lock: the others have to hear of it, and to
/// ask all nodes. Doubled each time that they did not take it, because they may be further away from the nodes.
const YIELD_ROUNDS: (f64, f64) = (3.0, 6.0);
const MAX_YIELD: Duration = Duration::from_millis(64);

/// The locks that others wait for, and how long this process has kept them waiting.
pub(crate) struct Fairness {
    /// How others know this process.
    origin: u64,
    known: AtomicUsize,
    notes: Mutex<Notes>,
}

/// Two generations, of which the older one is lost but for what counts for longer: so nothing else has to look for what
/// has lapsed.
#[derive(Default)]
struct Notes {
    young: HashMap<Bytes, Note>,
    old: HashMap<Bytes, Note>,
    turned: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Note {
    until: Instant,
    yielded_until: Option<Instant>,
    /// Local handoffs, and since when this process has had the lock. Not kept by the queue of waiters, which is gone
    /// whenever it is empty: a few clients that come again and again would never end their turn.
    run: u32,
    since: Option<Instant>,
    /// How often in a row the lock was left to others and nobody took it, as far as was heard.
    untaken: u32,
}

/// Whose turn it is to get a lock that is released here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The waiters here may have it.
    Take { others_wait: bool },
    /// Others wait, and have waited long enough. The lock was left to them so often, and they have not taken it.
    Yield { untaken: u32 },
}

impl Turn {
    pub(crate) fn others_wait(self) -> bool {
        self != Self::Take { others_wait: false }
    }

    /// For how long the waiters here leave the lock to others. Those poll, and are told nothing, if there are no `hints`.
    pub(crate) fn pause(self, hints: bool, entropy: &dyn Entropy) -> Option<Pause> {
        match self {
            Self::Take { .. } => None,
            Self::Yield { .. } if !hints => {
                Some(Pause { rounds: 0.0, least: POLL.1, most: POLL.1 })
            }
            Self::Yield { untaken } => {
                let (least, most) = YIELD_ROUNDS;
                let rounds =
                    (least + (most - least) * entropy.unit()) * f64::from(1 << untaken.min(6));
                Some(Pause { rounds, least: Duration::ZERO, most: MAX_YIELD })
            }
        }
    }
}

impl Fairness {
    pub(crate) fn new(entropy: &dyn Entropy) -> Self {
        let mut origin = [0; 8];
        entropy.fill(&mut origin);
        Self {
            origin: u64::from_le_bytes(origin),
            known: AtomicUsize::new(0),
            notes: Mutex::default(),
        }
    }

    /// What is said of a lock elsewhere, and of which; `None` for what is said here, and for what is no hint.
    pub(crate) fn heard(&self, hint: &Hint) -> Option<(HintKind, Bytes)> {
        let (origin, word, lock) = hint.parse()?;
        (origin != self.origin).then_some((word, lock))
    }

    /// What a refusal makes the nodes say.
    pub(crate) fn waiting(&self, lock: &Bytes, polls: Polls) -> Hint {
        let longest = polls.period().1 * 2;
        let seconds = (longest > LIFE).then_some(longest.as_secs() + 1);
        Hint::new(self.origin, HintKind::Waiting { seconds }, lock)
    }

    /// What a release makes the nodes say; `waiting` when somebody waits here as well.
    pub(crate) fn released(&self, lock: &Bytes, t: FencingToken, waiting: bool) -> Hint {
        Hint::new(self.origin, HintKind::Released { t, waiting }, lock)
    }

    /// What others are told of an attempt that is given up half-way, if any wait.
    pub(crate) fn given_up(&self, lock: &Bytes, t: FencingToken) -> Option<Hint> {
        self.turn(lock, Instant::now(), true).others_wait().then(|| self.released(lock, t, false))
    }

    /// Somebody waits elsewhere.
    pub(crate) fn wait(&self, lock: &Bytes, now: Instant) {
        self.wait_for(lock, now, None);
    }

    /// The same, which counts for so many seconds.
    pub(crate) fn wait_for(&self, lock: &Bytes, now: Instant, seconds: Option<u64>) {
        self.with(now, |notes| {
            let until = now
                + seconds
                    .map_or(LIFE, |seconds| Duration::from_secs(seconds).clamp(LIFE, MAX_LIFE));
            let fresh = || Note { until, yielded_until: None, run: 0, since: None, untaken: 0 };
            let known = notes.find(lock, now);
            if known.is_some() || notes.young.len() < MAX_NOTES {
                let known = known.unwrap_or_else(fresh);
                notes.young.insert(lock.clone(), Note { until: until.max(known.until), ..known });
            }
        });
    }

    /// Somebody else has had the lock.
    pub(crate) fn taken(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| note.untaken = 0);
    }

    /// Whose turn it is when this lock is released here. Without `hints` a gateway cannot know whether others wait, and must
    /// not starve them: they poll.
    pub(crate) fn turn(&self, lock: &Bytes, now: Instant, hints: bool) -> Turn {
        let note = match self.known.load(Ordering::Relaxed) {
            0 => None,
            _ => self.with(now, |notes| notes.find(lock, now)),
        };
        if !hints {
            self.wait(lock, now);
        }
        let note = match note {
            Some(note) => note,
            // Perhaps held for so long that nothing is known any more of the time before.
            None if !hints => return Turn::Yield { untaken: 0 },
            None => return Turn::Take { others_wait: false },
        };
        let (longest_time, longest_run) =
            if hints { (MAX_TURN, MAX_RUN) } else { (MAX_UNHEARD_TURN, u32::MAX) };
        let over =
            note.since.is_some_and(|since| now.saturating_duration_since(since) >= longest_time);
        if over || note.run >= longest_run {
            Turn::Yield { untaken: note.untaken }
        } else {
            Turn::Take { others_wait: true }
        }
    }

    /// A waiter here got the lock after others had it.
    pub(crate) fn turn_begins(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| (note.run, note.since) = (0, Some(now)));
    }

    /// It was handed over here once more.
    pub(crate) fn handed_over(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| {
            note.run += 1;
            note.since.get_or_insert(now);
        });
    }

    /// The lock was released for the others: the next waiter that comes here lets them try first.
    pub(crate) fn yielded(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| {
            (note.run, note.since, note.yielded_until) = (0, None, Some(now + YIELD));
            note.untaken = note.untaken.saturating_add(1);
        });
    }

    /// Until when it does so, if that is not over yet.
    pub(crate) fn yields_until(&self, lock: &Bytes, now: Instant) -> Option<Instant> {
        if self.known.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let note = self.with(now, |notes| notes.find(lock, now))?;
        note.yielded_until.filter(|end| *end > now)
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
        let old = std::mem::replace(&mut self.old, std::mem::take(&mut self.young));
        if age >= 2 * LIFE {
            self.old.retain(|_, note| note.until > now);
        }
        for (lock, note) in old.into_iter().filter(|(_, note)| note.until > now) {
            if self.old.len() < MAX_NOTES {
                self.old.entry(lock).or_insert(note);
            }
        }
        self.turned = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Turn = Turn::Take { others_wait: false };
    const TAKE: Turn = Turn::Take { others_wait: true };

    fn yields(untaken: u32) -> Turn {
        Turn::Yield { untaken }
    }

    fn fairness() -> Fairness {
        Fairness::new(&crate::model::clock::OsEntropy)
    }

    fn lock() -> Bytes {
        Bytes::from_static(b"lock:a b")
    }

    #[test]
    fn a_note_lapses_after_its_life_and_leaves_nothing_behind() {
        let fairness = fairness();
        let now = Instant::now();
        assert_eq!(fairness.turn(&lock(), now, true), ALONE);
        fairness.wait(&lock(), now);
        assert_eq!(fairness.turn(&lock(), now + LIFE / 2, true), TAKE);
        assert_eq!(fairness.turn(&lock(), now + LIFE, true), ALONE);
        assert_eq!(fairness.turn(&lock(), now + 3 * LIFE, true), ALONE);
        assert_eq!(fairness.known.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_note_that_is_renewed_outlives_the_turn_of_generations() {
        let fairness = fairness();
        let now = Instant::now();
        for step in 0..20 {
            fairness.wait(&lock(), now + LIFE / 2 * step);
            assert_eq!(fairness.turn(&lock(), now + LIFE / 2 * step + LIFE / 2, true), TAKE);
        }
        assert!(fairness.known.load(Ordering::Relaxed) <= 2);
    }

    #[test]
    fn a_word_that_counts_for_longer_outlives_generations_and_others_do_not_shorten_it() {
        let fairness = fairness();
        let now = Instant::now();
        fairness.wait_for(&lock(), now, Some(20));
        fairness.wait(&lock(), now);
        fairness.wait_for(&Bytes::from_static(b"a"), now, Some(u64::MAX));
        for second in 1..20 {
            let turn = fairness.turn(&lock(), now + Duration::from_secs(second), true);
            assert_eq!(turn, TAKE, "after {second} s");
        }
        assert_eq!(fairness.turn(&lock(), now + Duration::from_secs(20), true), ALONE);
        assert_eq!(fairness.turn(&Bytes::from_static(b"a"), now + MAX_LIFE, true), ALONE);
        assert_eq!(fairness.turn(&lock(), now + 2 * MAX_LIFE, true), ALONE);
        assert_eq!(fairness.known.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn names_beyond_the_bound_are_not_noted() {
        let fairness = fairness();
        let now = Instant::now();
        let name = |n: usize| Bytes::from(n.to_string());
        (0..MAX_NOTES + 10).for_each(|n| fairness.wait(&name(n), now));
        assert_eq!(
            [MAX_NOTES - 1, MAX_NOTES + 1].map(|n| fairness.turn(&name(n), now, true)),
            [TAKE, ALONE]
        );
    }

    #[test]
    fn a_turn_is_over_after_its_longest_run_or_time_and_yielding_begins_another() {
        let fairness = fairness();
        let now = Instant::now();
        fairness.wait(&lock(), now);
        for _ in 0..MAX_RUN {
            assert_eq!(fairness.turn(&lock(), now, true), TAKE);
            fairness.handed_over(&lock(), now);
        }
        assert_eq!(fairness.turn(&lock(), now, true), yields(0));
        fairness.yielded(&lock(), now);
        assert_eq!(fairness.turn(&lock(), now + MAX_TURN, true), TAKE);
        fairness.turn_begins(&lock(), now);
        fairness.wait(&lock(), now);
        assert_eq!(
            fairness.turn(&lock(), now + MAX_TURN, true),
            yields(1),
            "a word of waiting changes nothing"
        );
    }

    #[test]
    fn turns_that_nobody_takes_are_counted_until_somebody_does() {
        let fairness = fairness();
        let now = Instant::now();
        fairness.wait(&lock(), now);
        for untaken in 0..3 {
            fairness.turn_begins(&lock(), now);
            assert_eq!(fairness.turn(&lock(), now + MAX_TURN, true), yields(untaken));
            fairness.yielded(&lock(), now);
        }
        fairness.taken(&lock(), now);
        fairness.turn_begins(&lock(), now);
        assert_eq!(fairness.turn(&lock(), now + MAX_TURN, true), yields(0));
    }

    #[test]
    fn a_turn_without_hints_ends_all_the_same() {
        let fairness = fairness();
        let now = Instant::now();
        assert_eq!(fairness.turn(&lock(), now, false), yields(0));
        fairness.turn_begins(&lock(), now);
        for step in 0..4 {
            assert_eq!(fairness.turn(&lock(), now + MAX_UNHEARD_TURN / 4 * step, false), TAKE);
        }
        assert_eq!(fairness.turn(&lock(), now + MAX_UNHEARD_TURN, false), yields(0));
        assert_eq!(
            fairness.turn(&lock(), now + 3 * MAX_UNHEARD_TURN, false),
            yields(0),
            "long held"
        );
    }

    #[test]
    fn yielding_ends_by_itself() {
        let fairness = fairness();
        let now = Instant::now();
        fairness.yielded(&lock(), now);
        assert_eq!(fairness.yields_until(&lock(), now), None, "nobody else waits");
        fairness.wait(&lock(), now);
        fairness.yielded(&lock(), now);
        assert_eq!(fairness.yields_until(&lock(), now), Some(now + YIELD));
        assert_eq!(fairness.yields_until(&lock(), now + YIELD), None);
    }
}
