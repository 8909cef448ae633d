//! How long rounds take here now, to tell a request whose TTL is too short for them what would do, instead of failing it time
//! and again.
//!
//! What is estimated is the time that nine of ten granted rounds exceed, not the usual one: refusing a TTL that has a chance
//! is worse than a try in vain. The estimate lapses soon, and falls within a few rounds when rounds become faster.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::model::types::Ttl;

/// Fewer granted rounds say nothing.
const FEWEST: u64 = 32;
/// For how long what was measured counts.
const LIFE: Duration = Duration::from_secs(5);
/// What timers add to the limit of a round.
const TIMERS: Duration = Duration::from_millis(1);
/// How far one round moves the estimate, up and down: a tenth of all are below where the two are in balance.
const UP: u64 = 90;
const DOWN: u64 = 10;
/// What is advised leaves room for slower rounds.
const ROOM: f64 = 1.3;

/// Written without synchronization: of two rounds that end at once one may be lost.
#[derive(Debug, Default)]
pub(crate) struct RoundTimes {
    nanos: AtomicU64,
    count: AtomicU64,
    last_nanos: AtomicU64,
}

impl RoundTimes {
    /// A round was granted after that time; `now` is monotonic.
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

    /// Where rounds with such a limit have next to no chance now: what nine of ten take, and a TTL that would do.
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
        // In steps of 10 ms.
        let millis = (round.as_secs_f64() * ROOM * 1000.0).ceil() as u64 * 10;
        (age <= LIFE).then(|| Ttl::from_millis(millis).ok()).flatten().map(|least| (round, least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// So many rounds of so many microseconds, one a millisecond; with the time at the end of them.
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
    fn a_ttl_whose_tenth_no_round_keeps_is_too_short_and_what_would_do_is_not() {
        let (times, now) = after(&[(40, 3_000)]);
        assert_eq!(least(&times, MS, now), Some(40));
        assert_eq!(least(&times, 4 * MS, now), None);
        assert_eq!(least(&times, 2 * MS, now), None, "timers are coarse");
    }

    #[test]
    fn nothing_is_refused_by_few_rounds_or_old_ones() {
        let (times, now) = after(&[(FEWEST - 1, 30_000)]);
        assert_eq!(least(&times, MS, now), None);
        let (times, now) = after(&[(FEWEST, 30_000)]);
        assert!(least(&times, MS, now).is_some());
        assert_eq!(least(&times, MS, now + LIFE + MS), None);
        times.granted(30 * MS, now + LIFE + 2 * MS);
        assert_eq!(least(&times, MS, now + LIFE + 2 * MS), None, "it begins anew");
    }

    #[test]
    fn a_ttl_that_one_round_in_five_keeps_is_not_refused() {
        let pattern: Vec<_> = (0..200).flat_map(|_| [(4, 30_000), (1, 900)]).collect();
        let (times, now) = after(&pattern);
        assert_eq!(least(&times, MS, now), None);
    }

    #[test]
    fn a_few_slow_rounds_refuse_nothing_and_a_few_fast_ones_end_it() {
        let (times, now) = after(&[(100, 500), (60, 50_000)]);
        assert_eq!(least(&times, MS, now), None);
        let (times, now) = after(&[(100, 10_000), (25, 500)]);
        assert_eq!(least(&times, MS, now), None);
    }
}
