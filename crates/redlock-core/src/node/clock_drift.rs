//! Whether a master's clock runs faster than was promised. Locks end by it, so one that runs ahead ends them early; with a bare
//! majority one such master is enough for a second holder.
//!
//! Each look tells the master's time, read somewhere between our question and its answer. So between two looks no more time
//! has passed than from the first question to the second answer; when the master's clock has moved forward by more than the
//! drift factor makes of that, it ran ahead, for certain. Older looks are kept thinner and thinner, so that there is
//! a window of every length from a second to the longest TTL, at most twice as long as wanted.

use std::time::Duration;

/// Shorter windows tell of jitter.
const SHORTEST: Duration = Duration::from_secs(1);
/// What Redis' expiry precision and rounding hide, as in [`validity::drift`](crate::model::validity::drift).
const ROUNDING: Duration = Duration::from_millis(2);
/// No clock is better than this: what is set lower is a wish.
const LEAST_DRIFT: f64 = 0.001;

/// A look at a master's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reading {
    /// When we asked, on our monotonic clock.
    pub(super) asked: Duration,
    /// When the answer came.
    pub(super) answered: Duration,
    /// The master's time, in microseconds since 1970.
    pub(super) node_micros: u64,
}

/// A clock that ran ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RanAhead {
    /// In which time, on our monotonic clock.
    pub(super) from: Duration,
    pub(super) to: Duration,
    /// By how much, beyond what has passed.
    pub(super) by: Duration,
}

/// The clock of one master, against ours.
pub(super) struct Rate {
    drift_factor: f64,
    longest: Duration,
    /// By age, the oldest first.
    readings: Vec<Reading>,
}

impl Rate {
    pub(super) fn new(drift_factor: f64, max_ttl: Duration) -> Self {
        Self {
            drift_factor: drift_factor.max(LEAST_DRIFT),
            longest: max_ttl.max(SHORTEST),
            readings: Vec::new(),
        }
    }

    /// What was read before is compared with nothing that comes.
    pub(super) fn forget(&mut self) {
        self.readings.clear();
    }

    /// The window in which it ran ahead the most, if it did.
    pub(super) fn read(&mut self, newest: Reading) -> Option<RanAhead> {
        let ran_ahead = |from: &Reading| {
            let passed = newest.answered.saturating_sub(from.asked);
            let moved = Duration::from_micros(newest.node_micros.saturating_sub(from.node_micros));
            let allowed = passed.mul_f64(1.0 + self.drift_factor) + ROUNDING;
            let by = moved.saturating_sub(passed);
            (passed >= SHORTEST && moved > allowed).then_some(RanAhead {
                from: from.asked,
                to: newest.answered,
                by,
            })
        };
        let worst = self.readings.iter().filter_map(ran_ahead).max_by_key(|ran| ran.by);
        self.keep(newest);
        worst
    }

    /// Drops what is not needed for a window of every length.
    fn keep(&mut self, newest: Reading) {
        self.readings.push(newest);
        let age = |reading: &Reading| newest.answered.saturating_sub(reading.asked);
        let mut at = 1;
        while at + 1 < self.readings.len() {
            let older = age(&self.readings[at - 1]);
            let newer = age(&self.readings[at + 1]);
            if older <= newer.max(SHORTEST) * 2 {
                self.readings.remove(at);
            } else {
                at += 1;
            }
        }
        // One that is older than the longest window stands for it until another is.
        while self.readings.len() > 1 && age(&self.readings[1]) >= self.longest {
            self.readings.remove(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_TTL: Duration = Duration::from_secs(300);

    fn reading(at: f64, node: f64) -> Reading {
        let asked = Duration::from_secs_f64(100.0 + at);
        let answered = asked + Duration::from_millis(1);
        Reading { asked, answered, node_micros: 1_700_000_000_000_000 + (node * 1e6) as u64 }
    }

    /// The second at which a clock is found out that shows this at that time.
    fn found(drift_factor: f64, shows: impl Fn(f64) -> f64) -> Option<u32> {
        let mut rate = Rate::new(drift_factor, MAX_TTL);
        let found = (0..2_000)
            .find(|at| rate.read(reading(f64::from(*at), shows(f64::from(*at)))).is_some());
        assert!(rate.readings.len() < 30, "{}", rate.readings.len());
        found
    }

    #[test]
    fn a_clock_within_its_promise_is_left_alone_for_ever() {
        assert_eq!(found(0.01, |at| at * 1.009), None);
        assert_eq!(found(0.01, |at| at * 0.5), None, "one that is slow ends no lock early");
        assert_eq!(
            found(0.01, |at| at - if at > 50.0 { 100.0 } else { 0.0 }),
            None,
            "nor one that is put back"
        );
        assert_eq!(found(0.0, |at| at * 1.0005), None, "no clock is without drift");
    }

    #[test]
    fn a_clock_that_jumps_or_runs_ahead_is_found_out_within_seconds() {
        assert_eq!(found(0.01, |at| if at >= 50.0 { at + 0.05 } else { at }), Some(50));
        assert_eq!(found(0.01, |at| at * 1.083), Some(1), "as fast as chrony may");
        assert!(found(0.01, |at| at * 1.012).is_some_and(|at| at < 10));
        assert!(found(0.001, |at| at * 1.0012).is_some_and(|at| at < 300), "in the longest window");
    }

    #[test]
    fn an_answer_that_took_long_hides_what_may_be_its_own_time() {
        let mut rate = Rate::new(0.01, MAX_TTL);
        rate.read(reading(0.0, 0.0));
        let slow = Reading { answered: Duration::from_secs(105), ..reading(1.0, 4.9) };
        assert_eq!(rate.read(slow), None, "the machine may have stood still");
        assert!(rate.read(reading(6.0, 11.0)).is_some());
    }
}
