//! Detects a master's clock that runs faster than the drift factor allows. Locks end by the
//! master's clock, so a fast clock ends them early. If a lock is stored on no more than a majority,
//! one such master is enough for a second holder.
//!
//! Each probe reads the master's time somewhere between our request and its answer. So the time
//! between two readings is at most that from the first request to the second answer. If the
//! master's clock moved by more than this time and the drift factor allow, it certainly ran ahead.
//!
//! Two readings are the ends of a window. A clock that is only slightly fast can be detected only
//! in a long window. So older readings are kept, but thinned out. For every length from a second to
//! the longest TTL, some window is at least that long and at most twice as long.

use std::time::Duration;

/// Windows shorter than this measure jitter rather than drift.
const SHORTEST: Duration = Duration::from_secs(1);
/// The time hidden by Redis' expiry precision and rounding, as in
/// [`validity::drift`](crate::model::validity::drift).
const ROUNDING: Duration = Duration::from_millis(2);
/// The least drift factor that is assumed: no clock is more accurate.
const LEAST_DRIFT: f64 = 0.001;

/// One reading of a master's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Reading {
    /// When the request was sent, on our monotonic clock.
    pub(super) asked: Duration,
    /// When the answer came.
    pub(super) answered: Duration,
    /// The master's time, in microseconds since 1970.
    pub(super) node_micros: u64,
}

/// A clock that ran ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RanAhead {
    /// The window in which the clock ran ahead, on our monotonic clock.
    pub(super) from: Duration,
    pub(super) to: Duration,
    /// How far it ran ahead, beyond the time that passed.
    pub(super) by: Duration,
}

/// The clock of one master, compared with ours.
pub(super) struct ClockDrift {
    drift_factor: f64,
    longest: Duration,
    /// The oldest first.
    readings: Vec<Reading>,
}

impl ClockDrift {
    pub(super) fn new(drift_factor: f64, max_ttl: Duration) -> Self {
        Self {
            drift_factor: drift_factor.max(LEAST_DRIFT),
            longest: max_ttl.max(SHORTEST),
            readings: Vec::new(),
        }
    }

    /// Drops all readings, so later ones are compared only with each other.
    pub(super) fn reset(&mut self) {
        self.readings.clear();
    }

    /// Adds a reading. Returns the window in which the clock ran ahead the most, if any.
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

    /// Adds a reading and drops those not needed for a window of every length.
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
        // The oldest reading serves the longest window until the next one is old enough.
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

    /// The second at which a clock that shows `shows(time)` is detected.
    fn detected_at(drift_factor: f64, shows: impl Fn(f64) -> f64) -> Option<u32> {
        let mut drift = ClockDrift::new(drift_factor, MAX_TTL);
        let second = (0..2_000)
            .find(|at| drift.read(reading(f64::from(*at), shows(f64::from(*at)))).is_some());
        assert!(drift.readings.len() < 30, "{}", drift.readings.len());
        second
    }

    #[test]
    fn a_clock_within_the_drift_factor_is_accepted() {
        assert_eq!(detected_at(0.01, |at| at * 1.009), None);
        assert_eq!(detected_at(0.01, |at| at * 0.5), None, "a slow clock ends no lock early");
        assert_eq!(
            detected_at(0.01, |at| at - if at > 50.0 { 100.0 } else { 0.0 }),
            None,
            "a clock that is set back ends no lock early"
        );
        assert_eq!(detected_at(0.0, |at| at * 1.0005), None, "no clock is without drift");
    }

    #[test]
    fn a_clock_that_runs_ahead_is_detected_within_seconds() {
        assert_eq!(detected_at(0.01, |at| if at >= 50.0 { at + 0.05 } else { at }), Some(50));
        assert_eq!(detected_at(0.01, |at| at * 1.083), Some(1), "the fastest slew of chrony");
        assert!(detected_at(0.01, |at| at * 1.012).is_some_and(|at| at < 10));
        assert!(
            detected_at(0.001, |at| at * 1.0012).is_some_and(|at| at < 300),
            "in the longest window"
        );
    }

    #[test]
    fn a_slow_answer_hides_drift_within_its_delay() {
        let mut drift = ClockDrift::new(0.01, MAX_TTL);
        drift.read(reading(0.0, 0.0));
        let slow = Reading { answered: Duration::from_secs(105), ..reading(1.0, 4.9) };
        assert_eq!(drift.read(slow), None, "the machine may have stood still");
        assert!(drift.read(reading(6.0, 11.0)).is_some());
    }
}
