//! The pauses between two attempts.

use std::time::Duration;

use tokio::time::Instant;

use crate::error::LockError;
use crate::model::clock::Entropy;
use crate::wait::ticket::{Refusal, Standing};

/// The shortest and the longest delay between an expected expiry and the next attempt. Nodes expire
/// a key within 1 ms. The random part keeps gateways from trying at the same time.
const AFTER_EXPIRY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(8));
/// The longest delay is at least this time for each lock with waiters in this process, because many
/// locks may expire together.
const EXPIRY_SPREAD: Duration = Duration::from_micros(200);
/// The shortest and the longest pause after the first attempt without a quorum. Each further such
/// attempt in a row doubles both.
const NO_QUORUM: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(150));
/// A pause without a quorum ends after a time drawn from this range at the latest. If the time
/// between two polls is longer, it ends after that time at the latest.
const LONG_OUTAGE: (Duration, Duration) =
    (Duration::from_millis(1_000), Duration::from_millis(2_000));
/// A waiter whose attempts split the votes more often than this in a row no longer tries again
/// quickly.
const MAX_SPLITS: u32 = 8;

/// A pause after split votes is computed as if a round took at most this long. Slow nodes may take
/// most of a second, and the pauses of a request would add up to many seconds.
const LONGEST_ROUND: Duration = Duration::from_millis(100);

/// Draws pauses of random length, so that contenders do not collide again.
pub(super) struct Backoff<'a>(pub(super) &'a dyn Entropy);

impl Backoff<'_> {
    /// The pause after the `splits`th attempt in a row that split the votes: `splits` times the
    /// length of one to three rounds. When the first contender wakes, the others have undone their
    /// grants and are still asleep.
    pub(super) fn after_split(&self, round: Duration, splits: u32) -> Duration {
        round.min(LONGEST_ROUND).mul_f64(1.0 + 2.0 * self.0.unit()) * splits
    }

    /// When to try a lock that expires at `expiry` unless it is extended or released.
    pub(super) fn after_expiry(&self, expiry: Instant) -> Instant {
        expiry + self.between(AFTER_EXPIRY)
    }

    /// When the first waiter tries again. `splits` counts its attempts in a row that split the
    /// votes.
    pub(super) fn after_refusal(
        &self,
        error: LockError,
        standing: Standing,
        splits: u32,
        round: Duration,
        now: Instant,
    ) -> Refusal {
        let polls = standing.polls();
        let quick = now + self.after_split(round, splits.clamp(1, MAX_SPLITS));
        let poll = self.between(polls.period());
        let poll_due = now + poll;
        let mut without_quorum = false;
        let (retry, quick) = match &error {
            LockError::Held(_) | LockError::NoQuorum(_) if (1..=MAX_SPLITS).contains(&splits) => {
                (quick, quick)
            }
            LockError::Held(by) => match by.expires_in {
                Some(left) => {
                    let spread = EXPIRY_SPREAD * u32::try_from(standing.locks).unwrap_or(u32::MAX);
                    let expiry =
                        now + left + self.between((AFTER_EXPIRY.0, AFTER_EXPIRY.1.max(spread)));
                    (
                        poll_due.min(expiry.max(now + polls.least_before_expiry(standing.in_vain))),
                        quick,
                    )
                }
                None => (poll_due, quick),
            },
            LockError::NoQuorum(_) | LockError::Unknown(_) => {
                without_quorum = true;
                let doubled = f64::from(standing.failures.min(16)).exp2() * polls.stretch();
                let retry = now
                    + self
                        .between(NO_QUORUM)
                        .mul_f64(doubled)
                        .min(self.between(LONG_OUTAGE).max(poll));
                (retry, retry)
            }
            // No attempt after which a waiter pauses has one of these outcomes.
            LockError::Lost | LockError::NotHolder(_) => (poll_due, poll_due),
            LockError::HeldTooLong { .. } | LockError::TtlTooLong { .. } => (poll_due, poll_due),
            LockError::TtlTooShort { .. } | LockError::TooManyWaiters { .. } => {
                (poll_due, poll_due)
            }
            LockError::Superseded => (poll_due, poll_due),
        };
        Refusal { error, retry, quick, poll_due, round, without_quorum }
    }

    fn between(&self, (least, most): (Duration, Duration)) -> Duration {
        least + (most - least).mul_f64(self.0.unit())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::HeldBy;
    use crate::model::clock::OsEntropy;

    const MS: Duration = Duration::from_millis(1);

    /// The shortest and the longest of 2,000 pauses after this error.
    fn backoff(error: &LockError, standing: Standing) -> (Duration, Duration) {
        let now = Instant::now();
        let all = (0..2_000).map(|_| {
            let refusal = Backoff(&OsEntropy).after_refusal(error.clone(), standing, 0, MS, now);
            assert!(refusal.without_quorum || refusal.retry <= refusal.poll_due);
            refusal.retry - now
        });
        all.fold((Duration::MAX, Duration::ZERO), |(least, most), pause| {
            (least.min(pause), most.max(pause))
        })
    }

    fn expires_at_once() -> LockError {
        LockError::Held(HeldBy { expires_in: Some(Duration::ZERO), ..HeldBy::default() })
    }

    #[test]
    fn with_few_locks_an_expiry_is_tried_at_once() {
        let (_, most) =
            backoff(&expires_at_once(), Standing { locks: 40, failures: 0, in_vain: 99 });
        assert!(most <= AFTER_EXPIRY.1, "{most:?}");
    }

    #[test]
    fn many_locks_that_expire_together_are_not_tried_together() {
        let (least, most) =
            backoff(&expires_at_once(), Standing { locks: 8_000, failures: 0, in_vain: 0 });
        assert!(
            least < 500 * MS && most > 1_000 * MS && most < 2_000 * MS,
            "{least:?} to {most:?}"
        );
    }

    #[test]
    fn many_extended_locks_cost_no_more_than_polls() {
        let standing = Standing { locks: 8_000, failures: 0, in_vain: 5 };
        let (least, _) = backoff(&expires_at_once(), standing);
        assert_eq!(least, standing.polls().period().0);
    }

    #[test]
    fn pauses_without_a_quorum_double_up_to_the_limit() {
        let backoff = |locks, failures| {
            backoff(&LockError::NoQuorum(Vec::new()), Standing { locks, failures, in_vain: 0 })
        };
        let (least, most) = backoff(1, 0);
        assert!(least >= NO_QUORUM.0 && most <= NO_QUORUM.1);
        let (least, most) = backoff(1, 3);
        assert!(least >= NO_QUORUM.0 * 8 && most <= NO_QUORUM.1 * 8);
        let (least, most) = backoff(1, u32::MAX);
        assert!(least >= LONG_OUTAGE.0 && most <= LONG_OUTAGE.1);
        let (least, _) = backoff(8_000, u32::MAX);
        assert!(least >= Standing { locks: 8_000, failures: 0, in_vain: 0 }.polls().period().0);
    }
}
