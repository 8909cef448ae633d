//! What the clients saw of many locks at the same time, and the violations in it. There is no input
//! or output here. All times count from the start of the run, by one clock.

use std::collections::BTreeMap;
use std::time::Duration;

/// How long a gateway may go on with a request after its client has left, if it has processors
/// enough.
const LATE: Duration = Duration::from_secs(5);

/// The life of one idempotency key on one lock. Before and after it, the key cannot hold the lock.
#[derive(Debug, Clone)]
pub(super) struct Life {
    /// The name of the order. Other clients see it as the holder's label.
    pub(super) order: String,
    pub(super) lock: String,
    /// When the first request was sent.
    pub(super) from: Duration,
    /// When the release was answered.
    pub(super) until: Duration,
    /// Whether the client has ever left without its answer.
    pub(super) closed: bool,
}

/// One hold: from the first answer with the grant until the release was sent.
#[derive(Debug, Clone)]
pub(super) struct Hold {
    pub(super) order: String,
    pub(super) lock: String,
    pub(super) fencing: u64,
    pub(super) from: Duration,
    pub(super) until: Duration,
}

/// A request that was refused because another client holds the lock.
#[derive(Debug, Clone)]
pub(super) struct Denial {
    pub(super) order: String,
    pub(super) lock: String,
    pub(super) holder: Option<String>,
    pub(super) sent: Duration,
    pub(super) answered: Duration,
}

#[derive(Debug, Default)]
pub(super) struct History {
    pub(super) lives: Vec<Life>,
    pub(super) holds: Vec<Hold>,
    pub(super) denials: Vec<Denial>,
    /// Violations that a client noticed by itself.
    pub(super) wrong: Vec<String>,
    /// How often each kind of event happened.
    pub(super) counts: BTreeMap<String, usize>,
}

impl History {
    pub(super) fn count(&mut self, what: impl Into<String>) {
        *self.counts.entry(what.into()).or_default() += 1;
    }

    pub(super) fn how_often(&self, what: &str) -> usize {
        self.counts.get(what).copied().unwrap_or_default()
    }

    pub(super) fn add(&mut self, other: Self) {
        let Self { lives, holds, denials, wrong, counts } = other;
        self.lives.extend(lives);
        self.holds.extend(holds);
        self.denials.extend(denials);
        self.wrong.extend(wrong);
        counts.into_iter().for_each(|(what, count)| *self.counts.entry(what).or_default() += count);
    }

    /// All violations in the run, however long a gateway went on with a request whose client has
    /// left.
    pub(super) fn judged(&self) -> Vec<String> {
        let mut wrong = self.wrong.clone();
        wrong.extend(self.two_holders());
        wrong.extend(self.unfounded(Duration::MAX));
        wrong
    }

    /// The denials because of a request whose client had left [`LATE`] before or earlier.
    pub(super) fn late(&self) -> Vec<String> {
        self.unfounded(LATE)
    }

    /// Takes the holds of each lock in the order of their tokens. Each hold must have ended before
    /// the next one began. Then no two holds overlap, and later holds have larger tokens.
    fn two_holders(&self) -> Vec<String> {
        let mut holds: Vec<&Hold> = self.holds.iter().collect();
        holds.sort_by_key(|hold| (&hold.lock, hold.fencing));
        let pairs = holds.windows(2).filter(|pair| pair[0].lock == pair[1].lock);
        let wrong =
            pairs.filter(|pair| pair[0].fencing == pair[1].fencing || pair[0].until > pair[1].from);
        wrong.map(|pair| format!("{:?} and then {:?}", pair[0], pair[1])).collect()
    }

    /// A denial is wrong in two cases: no other client could have held the lock at that time, or
    /// the denial names a holder that could not. A gateway may go on for `late` with a request
    /// whose client has left.
    fn unfounded(&self, late: Duration) -> Vec<String> {
        let is_founded = |denial: &&Denial| {
            let Denial { order, lock, holder, sent, answered } = denial;
            let overlaps = |life: &Life| {
                let after = if life.closed { late } else { Duration::ZERO };
                life.from <= *answered && *sent <= life.until.saturating_add(after)
            };
            let others =
                self.lives.iter().filter(|life| life.lock == *lock && life.order != *order);
            others
                .filter(|life| overlaps(life))
                .any(|life| holder.as_ref().is_none_or(|who| *who == life.order))
        };
        let wrong = self.denials.iter().filter(|denial| !is_founded(denial));
        wrong.map(|denial| format!("no other client had the lock: {denial:?}")).collect()
    }

    /// The number of denials during which another client certainly held the lock, from the request
    /// to the answer.
    pub(super) fn plain_denials(&self) -> usize {
        let held = |denial: &&Denial| {
            let mut others = self
                .holds
                .iter()
                .filter(|hold| hold.lock == denial.lock && hold.order != denial.order);
            others.any(|hold| hold.from <= denial.answered && denial.sent <= hold.until)
        };
        self.denials.iter().filter(held).count()
    }
}

fn millis(from: u64, until: u64) -> (Duration, Duration) {
    (Duration::from_millis(from), Duration::from_millis(until))
}

fn life(order: &str, from: u64, until: u64) -> Life {
    let (from, until) = millis(from, until);
    Life { order: order.into(), lock: "lock".into(), from, until, closed: false }
}

fn hold(order: &str, fencing: u64, from: u64, until: u64) -> Hold {
    let (from, until) = millis(from, until);
    Hold { order: order.into(), lock: "lock".into(), fencing, from, until }
}

fn denial(order: &str, holder: Option<&str>, sent: u64, answered: u64) -> Denial {
    let (sent, answered) = millis(sent, answered);
    Denial {
        order: order.into(),
        lock: "lock".into(),
        holder: holder.map(Into::into),
        sent,
        answered,
    }
}

#[test]
fn the_checker_finds_two_holders_and_decreasing_tokens() {
    let judged = |holds: Vec<Hold>| History { holds, ..History::default() }.judged().len();
    assert_eq!(judged(vec![hold("a", 1, 0, 10), hold("b", 2, 10, 20), hold("a", 3, 20, 30)]), 0);
    assert_eq!(judged(vec![hold("a", 1, 0, 10), hold("b", 2, 9, 20)]), 1, "both at once");
    assert_eq!(
        judged(vec![hold("a", 1, 0, 30), hold("b", 2, 10, 20)]),
        1,
        "one hold within another"
    );
    assert_eq!(judged(vec![hold("a", 2, 0, 10), hold("b", 1, 10, 20)]), 1, "a smaller token later");
    assert_eq!(judged(vec![hold("a", 1, 0, 10), hold("b", 1, 10, 20)]), 1, "one token twice");
    let elsewhere = Hold { lock: "another".into(), ..hold("b", 1, 5, 15) };
    assert_eq!(judged(vec![hold("a", 1, 0, 10), elsewhere]), 0);
}

#[test]
fn the_checker_finds_a_denial_without_another_holder() {
    let history = |denial| {
        let closed = Life { closed: true, ..life("closed", 0, 10) };
        let lives = vec![life("a", 20_000, 20_010), life("b", 20_000, 20_030), closed];
        let denials = vec![denial];
        History { lives, denials, ..History::default() }
    };
    let judged = |denial| history(denial).judged().len();
    let late = |denial| history(denial).late().len();
    assert_eq!(judged(denial("b", Some("a"), 20_009, 20_020)), 0);
    assert_eq!(judged(denial("b", None, 20_009, 20_020)), 0);
    assert_eq!(judged(denial("b", Some("a"), 20_011, 20_020)), 1, "the lock was released before");
    assert_eq!(late(denial("b", None, 20_011, 20_020)), 1, "no other client was there");
    assert_eq!(judged(denial("b", Some("b"), 20_000, 20_005)), 1, "by itself");
    assert_eq!(
        judged(denial("b", Some("c"), 20_000, 20_005)),
        1,
        "by a holder outside of this run"
    );
    assert_eq!(judged(denial("b", Some("closed"), 0, 0)), 0);
    assert_eq!(judged(denial("b", Some("closed"), 6_000, 6_005)), 0, "a machine may be slow");
    assert_eq!(late(denial("b", Some("closed"), 4_000, 4_005)), 0, "an undo may be a little late");
    assert_eq!(late(denial("b", Some("closed"), 6_000, 6_005)), 1, "an undo may not be so late");
}
