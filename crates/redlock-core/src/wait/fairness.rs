//! Fairness between gateways: the waiters elsewhere, known from hints, and the decision who may
//! have a lock that is released here.
//!
//! Each gateway notes in its memory, for a limited time, that somebody waits for a lock elsewhere.
//! The nodes store no such note. A key beside the lock would cost every release a lookup. A flag in
//! the record would be one more thing for repair, extend and release to agree on. So a release
//! costs the nodes nothing while nobody waits, and safety does not depend on hints. The price is a
//! gap: a gateway may send a release just before it receives the *waiting* hint of another gateway.
//! No hint announces that release, and the waiter finds out with its next poll.

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
use crate::node::hint::{HintKind, NewestWaiter};

/// How long a *waiting* hint counts. The polls of a waiter repeat the hint at least twice in this
/// time. A gateway that polls more slowly sends a longer time in its hints.
const LIFE: Duration = Duration::from_secs(2);
const _: () = assert!(2 * POLL.1.as_millis() < LIFE.as_millis());
/// The longest time that is accepted from a hint, because everybody who may write to the nodes can
/// publish hints.
const MAX_LIFE: Duration = Duration::from_secs(60);
/// Limit on the locks that are noted. Waiters for further locks rely on polls.
const MAX_NOTES: usize = 65_536;
/// Handoff quota, in number: local handoffs in a row while waiters elsewhere are known.
const MAX_QUOTA_HANDOFFS: u32 = 32;
/// Handoff quota, in time: how long a gateway may hand a lock to its own waiters while waiters
/// elsewhere are known. If each holder keeps the lock for longer than this, the lock alternates
/// between gateways.
const MAX_QUOTA_TIME: Duration = Duration::from_millis(10);
/// Handoff quota, in time, if no node passes on hints.
const MAX_QUOTA_TIME_WITHOUT_HINTS: Duration = Duration::from_secs(4);
/// After a gateway has yielded a lock, its newly arrived waiters let other gateways try first for
/// this time.
const YIELD: Duration = Duration::from_millis(3);
/// A queue that yielded competes again after this many times the length of its own rounds. The
/// number is drawn from the range. Other gateways need that time to receive the hint and to ask all
/// nodes. The pause doubles with each yield in a row that nobody used, because the other gateways
/// may be further away from the nodes.
const YIELD_ROUNDS: (f64, f64) = (3.0, 6.0);
const MAX_YIELD: Duration = Duration::from_millis(64);

/// The locks that others wait for, and how long this process has kept them waiting.
pub(crate) struct Fairness {
    /// Identifies this process to others.
    origin: u64,
    known: AtomicUsize,
    notes: Mutex<Notes>,
}

/// Two generations of notes. When a new generation begins, the notes of the older one are dropped,
/// except those that have not lapsed. So no other step has to look for lapsed notes.
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
    /// The number of local handoffs in a row; `since` is when they began. The queue of the lock
    /// cannot keep these two, because an empty queue is removed. A few clients that return again
    /// and again would then never use up their quota.
    run: u32,
    since: Option<Instant>,
    /// How often in a row the lock was yielded and, as far as hints show, nobody took it.
    untaken: u32,
}

/// Who may have a lock that is released here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandoffQuota {
    /// The waiters here.
    Take { others_wait: bool },
    /// Waiters elsewhere, who have waited long enough. `untaken` counts the yields in a row, before
    /// this one, that nobody used.
    Yield { untaken: u32 },
}

impl HandoffQuota {
    pub(crate) fn others_wait(self) -> bool {
        self != Self::Take { others_wait: false }
    }

    /// How long the waiters here leave the lock to others. Without `hints` the others only poll, so
    /// the pause is as long as the longest time between two polls.
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

    /// The kind and the lock of a hint from another process. `None` for a hint of our own, and for
    /// an invalid one.
    ///
    /// If arrivals at two gateways are equal, the gateway with the larger origin has the newer
    /// waiter. Otherwise each gateway could supersede the waiter of the other. To apply this rule,
    /// the function adds one microsecond to an arrival from a gateway with a larger origin.
    pub(crate) fn parse_foreign(&self, hint: &Hint) -> Option<(HintKind, Bytes)> {
        let (origin, mut kind, lock) = hint.parse()?;
        if let HintKind::Waiting { newest: Some(newest), .. } = &mut kind {
            newest.arrival = newest.arrival.saturating_add(u64::from(origin > self.origin));
        }
        (origin != self.origin).then_some((kind, lock))
    }

    /// The hint that a refusal makes the nodes publish.
    pub(crate) fn waiting(&self, lock: &Bytes, polls: Polls, newest: Option<NewestWaiter>) -> Hint {
        let longest = polls.period().1 * 2;
        let seconds = (longest > LIFE).then_some(longest.as_secs() + 1);
        Hint::new(self.origin, HintKind::Waiting { seconds, newest }, lock)
    }

    /// The hint that a release makes the nodes publish; `waiting` if there are waiters here, too.
    pub(crate) fn released(&self, lock: &Bytes, t: FencingToken, waiting: bool) -> Hint {
        Hint::new(self.origin, HintKind::Released { t, waiting }, lock)
    }

    /// The hint for the undo of an attempt that was cancelled, if waiters elsewhere are known.
    pub(crate) fn given_up(&self, lock: &Bytes, t: FencingToken) -> Option<Hint> {
        self.others_wait(lock, Instant::now()).then(|| self.released(lock, t, false))
    }

    /// Whether hints have told of waiters elsewhere.
    pub(crate) fn others_wait(&self, lock: &Bytes, now: Instant) -> bool {
        self.quota(lock, now, true).others_wait()
    }

    /// Notes that somebody waits elsewhere.
    pub(crate) fn wait(&self, lock: &Bytes, now: Instant) {
        self.wait_for(lock, now, None);
    }

    /// Notes that somebody waits elsewhere, for this number of seconds.
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

    /// Somebody elsewhere has had the lock.
    pub(crate) fn taken(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| note.untaken = 0);
    }

    /// Decides who may have a lock that is released here. Without `hints`, this gateway cannot know
    /// whether others wait. It must not starve them, so it behaves as if somebody waited elsewhere:
    /// its quota ends, and others can get the lock by polling.
    pub(crate) fn quota(&self, lock: &Bytes, now: Instant, hints: bool) -> HandoffQuota {
        let note = match self.known.load(Ordering::Relaxed) {
            0 => None,
            _ => self.with(now, |notes| notes.find(lock, now)),
        };
        if !hints {
            self.wait(lock, now);
        }
        let note = match note {
            Some(note) => note,
            // There is no note, but others may wait: the lock may have been held for so long that
            // the notes have lapsed.
            None if !hints => return HandoffQuota::Yield { untaken: 0 },
            None => return HandoffQuota::Take { others_wait: false },
        };
        let (longest_time, longest_run) = if hints {
            (MAX_QUOTA_TIME, MAX_QUOTA_HANDOFFS)
        } else {
            (MAX_QUOTA_TIME_WITHOUT_HINTS, u32::MAX)
        };
        let over =
            note.since.is_some_and(|since| now.saturating_duration_since(since) >= longest_time);
        if over || note.run >= longest_run {
            HandoffQuota::Yield { untaken: note.untaken }
        } else {
            HandoffQuota::Take { others_wait: true }
        }
    }

    /// A waiter here got the lock by a hint or a poll, and not by a handoff: a new quota begins.
    pub(crate) fn quota_begins(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| (note.run, note.since) = (0, Some(now)));
    }

    /// The lock was handed over here once more.
    pub(crate) fn handed_over(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| {
            note.run += 1;
            note.since.get_or_insert(now);
        });
    }

    /// The lock was released for waiters elsewhere. The next waiter that enters here lets those try
    /// first.
    pub(crate) fn yielded(&self, lock: &Bytes, now: Instant) {
        self.change(lock, now, |note| {
            (note.run, note.since, note.yielded_until) = (0, None, Some(now + YIELD));
            note.untaken = note.untaken.saturating_add(1);
        });
    }

    /// The end of a yield that is not over yet.
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
        notes.change_generation(now);
        let result = work(&mut notes);
        self.known.store(notes.young.len() + notes.old.len(), Ordering::Relaxed);
        result
    }
}

impl Notes {
    fn find(&self, lock: &Bytes, now: Instant) -> Option<Note> {
        self.young.get(lock).or_else(|| self.old.get(lock)).copied().filter(|note| note.until > now)
    }

    fn change_generation(&mut self, now: Instant) {
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

    const ALONE: HandoffQuota = HandoffQuota::Take { others_wait: false };
    const TAKE: HandoffQuota = HandoffQuota::Take { others_wait: true };

    fn yields(untaken: u32) -> HandoffQuota {
        HandoffQuota::Yield { untaken }
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
        assert_eq!(fairness.quota(&lock(), now, true), ALONE);
        fairness.wait(&lock(), now);
        assert_eq!(fairness.quota(&lock(), now + LIFE / 2, true), TAKE);
        assert_eq!(fairness.quota(&lock(), now + LIFE, true), ALONE);
        assert_eq!(fairness.quota(&lock(), now + 3 * LIFE, true), ALONE);
        assert_eq!(fairness.known.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_renewed_note_outlives_its_generation() {
        let fairness = fairness();
        let now = Instant::now();
        for step in 0..20 {
            fairness.wait(&lock(), now + LIFE / 2 * step);
            assert_eq!(fairness.quota(&lock(), now + LIFE / 2 * step + LIFE / 2, true), TAKE);
        }
        assert!(fairness.known.load(Ordering::Relaxed) <= 2);
    }

    #[test]
    fn a_long_note_outlives_generations_and_is_not_shortened() {
        let fairness = fairness();
        let now = Instant::now();
        fairness.wait_for(&lock(), now, Some(20));
        fairness.wait(&lock(), now);
        fairness.wait_for(&Bytes::from_static(b"a"), now, Some(u64::MAX));
        for second in 1..20 {
            let quota = fairness.quota(&lock(), now + Duration::from_secs(second), true);
            assert_eq!(quota, TAKE, "after {second} s");
        }
        assert_eq!(fairness.quota(&lock(), now + Duration::from_secs(20), true), ALONE);
        assert_eq!(fairness.quota(&Bytes::from_static(b"a"), now + MAX_LIFE, true), ALONE);
        assert_eq!(fairness.quota(&lock(), now + 2 * MAX_LIFE, true), ALONE);
        assert_eq!(fairness.known.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn names_beyond_the_limit_are_not_noted() {
        let fairness = fairness();
        let now = Instant::now();
        let name = |n: usize| Bytes::from(n.to_string());
        (0..MAX_NOTES + 10).for_each(|n| fairness.wait(&name(n), now));
        assert_eq!(
            [MAX_NOTES - 1, MAX_NOTES + 1].map(|n| fairness.quota(&name(n), now, true)),
            [TAKE, ALONE]
        );
    }

    #[test]
    fn a_quota_ends_by_handoffs_or_time_and_yielding_renews_it() {
        let fairness = fairness();
        let now = Instant::now();
        fairness.wait(&lock(), now);
        for _ in 0..MAX_QUOTA_HANDOFFS {
            assert_eq!(fairness.quota(&lock(), now, true), TAKE);
            fairness.handed_over(&lock(), now);
        }
        assert_eq!(fairness.quota(&lock(), now, true), yields(0));
        fairness.yielded(&lock(), now);
        assert_eq!(fairness.quota(&lock(), now + MAX_QUOTA_TIME, true), TAKE);
        fairness.quota_begins(&lock(), now);
        fairness.wait(&lock(), now);
        assert_eq!(
            fairness.quota(&lock(), now + MAX_QUOTA_TIME, true),
            yields(1),
            "a *waiting* hint changes nothing"
        );
    }

    #[test]
    fn unused_yields_are_counted_until_one_is_used() {
        let fairness = fairness();
        let now = Instant::now();
        fairness.wait(&lock(), now);
        for untaken in 0..3 {
            fairness.quota_begins(&lock(), now);
            assert_eq!(fairness.quota(&lock(), now + MAX_QUOTA_TIME, true), yields(untaken));
            fairness.yielded(&lock(), now);
        }
        fairness.taken(&lock(), now);
        fairness.quota_begins(&lock(), now);
        assert_eq!(fairness.quota(&lock(), now + MAX_QUOTA_TIME, true), yields(0));
    }

    #[test]
    fn without_hints_a_quota_still_ends() {
        let fairness = fairness();
        let now = Instant::now();
        assert_eq!(fairness.quota(&lock(), now, false), yields(0));
        fairness.quota_begins(&lock(), now);
        for step in 0..4 {
            assert_eq!(
                fairness.quota(&lock(), now + MAX_QUOTA_TIME_WITHOUT_HINTS / 4 * step, false),
                TAKE
            );
        }
        assert_eq!(fairness.quota(&lock(), now + MAX_QUOTA_TIME_WITHOUT_HINTS, false), yields(0));
        assert_eq!(
            fairness.quota(&lock(), now + 3 * MAX_QUOTA_TIME_WITHOUT_HINTS, false),
            yields(0),
            "after a long hold the note has lapsed"
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
