//! Measures how long rounds take now. A request whose TTL is too short for such rounds is refused
//! at once. The error names a TTL that would do. Without this, the request would fail again and
//! again.
//!
//! The estimate is the time that nine of ten granted rounds exceed, and not the typical time,
//! because refusing a TTL that has a chance is worse than a failed attempt. The estimate lapses 5 s
//! after the last granted round. When rounds become faster, the estimate falls within a few rounds.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::model::types::Ttl;

/// An estimate needs at least this many granted rounds.
const FEWEST: u64 = 32;
/// How long the estimate counts after the last granted round.
const LIFE: Duration = Duration::from_secs(5);
/// A round may take this much longer than its limit, because timers are coarse.
const TIMERS: Duration = Duration::from_millis(1);
/// A slower round raises the estimate by at most 1/90, and a faster round lowers it by at most
/// 1/10. Both movements balance where one round in ten is below the estimate.
const UP: u64 = 90;
const DOWN: u64 = 10;
/// The recommended TTL leaves this much room for slower rounds.
const ROOM: f64 = 1.3;

/// The fields are written one by one, without a lock. Of two rounds that end at the same time, one
/// may not be counted.
#[derive(Debug, Default)]
pub(crate) struct RoundTimes {
    nanos: AtomicU64,
    count: AtomicU64,
    last_nanos: AtomicU64,
}

impl RoundTimes {
    /// Records a granted round that took `took`; `now` is monotonic.
    pub(crate) fn granted(&self, took: Duration, now: Duration) {
        let took = took.as_nanos() as u64;
        let now = now.as_nanos() as u64;
        let last = self.last_nanos.swap(now, Ordering::Relaxed);
        let known = self.nanos.load(Ordering::Relaxed);
        let count = self.count.load(Ordering::Relaxed);
        let is_first = count == 0 || now.saturating_sub(last) > LIFE.as_nanos() as u64;
        let (nanos, count) = if is_first {
            (took, 1)
        } else if took < known {
            ((known - known / DOWN).max(took), count + 1)
        } else {
            ((known + known / UP + 1).min(took), count + 1)
        };
        self.nanos.store(nanos, Ordering::Relaxed);
        self.count.store(count, Ordering::Relaxed);
    }

    /// If rounds with this limit have next to no chance now, returns the time that nine of ten
    /// rounds exceed, and a TTL that would do.
    pub(crate) fn too_long_for(
        &self,
        limit: Duration,
        now: impl FnOnce() -> Duration,
    ) -> Option<(Duration, Ttl)> {
        let round = Duration::from_nanos(self.nanos.load(Ordering::Relaxed));
        if round <= limit + TIMERS || self.count.load(Ordering::Relaxed) < FEWEST {
            return None;
        }
        let age =
            now().saturating_sub(Duration::from_nanos(self.last_nanos.load(Ordering::Relaxed)));
        // A round may take a tenth of its TTL, so the TTL is ten times the round in whole
        // milliseconds.
        let millis = (round.as_secs_f64() * ROOM * 1000.0).ceil() as u64 * 10;
        (age <= LIFE).then(|| Ttl::from_millis(millis).ok()).flatten().map(|least| (round, least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Runs `count` rounds of `micros` each, one per millisecond. Returns the time at their end.
    fn after(rounds: &[(u64, u64)]) -> (RoundTimes, Duration) {
        let times = RoundTimes::default();
        let mut now = Duration::from_secs(100);
        for (count, micros) in rounds {
            for _ in 0..*count {
                now += MS;
                times.granted(Duration::from_micros(*micros), now);
            }
        }
        (times, now)
    }

    fn least(times: &RoundTimes, limit: Duration, now: Duration) -> Option<u64> {
        times.too_long_for(limit, || now).map(|(_, ttl)| u64::from(ttl.millis()))
    }

    #[test]
    fn a_ttl_below_ten_rounds_is_too_short_and_the_advice_is_not() {
        let (times, now) = after(&[(40, 3_000)]);
        assert_eq!(least(&times, MS, now), Some(40));
        assert_eq!(least(&times, 4 * MS, now), None);
        assert_eq!(least(&times, 2 * MS, now), None, "timers are coarse");
    }

    #[test]
    fn few_or_old_rounds_refuse_no_ttl() {
        let (times, now) = after(&[(FEWEST - 1, 30_000)]);
        assert_eq!(least(&times, MS, now), None);
        let (times, now) = after(&[(FEWEST, 30_000)]);
        assert!(least(&times, MS, now).is_some());
        assert_eq!(least(&times, MS, now + LIFE + MS), None);
        times.granted(30 * MS, now + LIFE + 2 * MS);
        assert_eq!(least(&times, MS, now + LIFE + 2 * MS), None, "the estimate begins anew");
    }

    #[test]
    fn a_ttl_that_one_round_in_five_keeps_is_allowed() {
        let pattern: Vec<_> = (0..200).flat_map(|_| [(4, 30_000), (1, 900)]).collect();
        let (times, now) = after(&pattern);
        assert_eq!(least(&times, MS, now), None);
    }

    #[test]
    fn a_few_slow_rounds_refuse_no_ttl_and_a_few_fast_ones_end_it() {
        let (times, now) = after(&[(100, 500), (60, 50_000)]);
        assert_eq!(least(&times, MS, now), None);
        let (times, now) = after(&[(100, 10_000), (25, 500)]);
        assert_eq!(least(&times, MS, now), None);
    }
}
