//! How often waiters poll. Every lock with waiters costs polls, so the period grows with the number
//! of such locks. All polls of a process together stay within a limit.

use std::time::Duration;

/// The shortest and the longest time between two polls of the first waiter, while few locks are
/// waited for. If a hint is lost, the waiter loses at most the longest time.
pub(crate) const POLL: (Duration, Duration) =
    (Duration::from_millis(400), Duration::from_millis(800));
/// The limit on the polls of all queues of a process together.
const MAX_POLLS_PER_SECOND: f64 = 500.0;

/// The factor by which polls are slowed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Polls {
    stretch: f64,
}

impl Polls {
    /// The factor for this number of locks with waiters.
    pub(crate) fn of(locks: usize) -> Self {
        let mean = (POLL.0 + POLL.1).as_secs_f64() / 2.0;
        Self { stretch: (locks as f64 / (MAX_POLLS_PER_SECOND * mean)).max(1.0) }
    }

    pub(crate) fn stretch(self) -> f64 {
        self.stretch
    }

    /// The shortest and the longest time between two polls.
    pub(crate) fn period(self) -> (Duration, Duration) {
        (POLL.0.mul_f64(self.stretch), POLL.1.mul_f64(self.stretch))
    }

    /// A waiter tries a held lock again when it is expected to expire, but not before this time has
    /// passed. The time grows with `in_vain`, the number of such attempts in a row that found the
    /// lock held, because then the holder keeps extending the lock. Zero while polls are not
    /// slowed.
    pub(crate) fn least_before_expiry(self, in_vain: u32) -> Duration {
        if self.stretch <= 1.0 {
            return Duration::ZERO;
        }
        self.period().0 / (1 << 5_u32.saturating_sub(in_vain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polls_of_all_locks_together_are_bounded() {
        for locks in [1, 300, 301, 1_000, 8_000, 1_000_000] {
            let polls = Polls::of(locks);
            let (least, most) = polls.period();
            let per_second = locks as f64 / ((least + most).as_secs_f64() / 2.0);
            assert!(per_second < MAX_POLLS_PER_SECOND * 1.001, "{locks}: {per_second}");
            assert!(
                polls.least_before_expiry(5) <= least
                    && polls.least_before_expiry(9) == polls.least_before_expiry(5)
            );
        }
        assert_eq!(
            (Polls::of(300).period(), Polls::of(300).least_before_expiry(9)),
            (POLL, Duration::ZERO)
        );
    }
}
