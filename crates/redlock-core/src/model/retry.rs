//! Computes when to try again: after a limited delay with a random part. The caller draws the
//! random number, so the functions here are pure.

use std::time::Duration;

/// How often and how long to try for a lock that is held or lacks a quorum.
#[derive(Debug, Clone, PartialEq)]
pub struct RetryPolicy {
    /// The limit on tries after the first.
    pub count: u32,
    /// The shortest pause between two tries. It should exceed a round trip, so that contenders do
    /// not collide again.
    pub delay: Duration,
    /// The longest random addition to `delay`. It separates contenders that split the vote.
    pub jitter: Duration,
    /// No try starts later than this after the start of the first try.
    pub deadline: Duration,
}

impl RetryPolicy {
    /// One try only.
    pub const NONE: Self =
        Self { count: 0, delay: Duration::ZERO, jitter: Duration::ZERO, deadline: Duration::ZERO };

    /// The pause before the next try, or `None` when no try is left. `tries` counts the tries made,
    /// `spent` is the time since the first try began, `unit` is a random number in `0.0..1.0`.
    pub fn pause(&self, tries: u32, spent: Duration, unit: f64) -> Option<Duration> {
        if tries > self.count {
            return None;
        }
        let pause = self.delay + self.jitter.mul_f64(unit.clamp(0.0, 1.0));
        (spent + pause <= self.deadline).then_some(pause)
    }
}

impl Default for RetryPolicy {
    /// Three more tries, 50 to 150 ms apart, within two seconds.
    fn default() -> Self {
        Self {
            count: 3,
            delay: Duration::from_millis(50),
            jitter: Duration::from_millis(100),
            deadline: Duration::from_secs(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn one_try_means_one_try() {
        assert_eq!(RetryPolicy::NONE.pause(1, Duration::ZERO, 0.0), None);
    }

    proptest! {
        #[test]
        fn pauses_stay_within_delay_jitter_count_and_deadline(
            count in 0u32..20,
            tries in 1u32..30,
            spent in 0u64..5_000,
            unit in 0.0..1.0,
        ) {
            let policy = RetryPolicy { count, ..RetryPolicy::default() };
            let spent = Duration::from_millis(spent);
            match policy.pause(tries, spent, unit) {
                Some(pause) => {
                    prop_assert!(tries <= count);
                    prop_assert!(pause >= policy.delay && pause <= policy.delay + policy.jitter);
                    prop_assert!(spent + pause <= policy.deadline);
                }
                None => {
                    let pause = policy.delay + policy.jitter.mul_f64(unit);
                    prop_assert!(tries > count || spent + pause > policy.deadline);
                }
            }
        }
    }
}
