//! How long to wait between two attempts, whatever for.

use std::time::Duration;

use tokio::time::Instant;

use crate::clock::Entropy;
use crate::error::LockError;
use crate::wait::fairness::POLL;
use crate::wait::queue::Refusal;

/// How soon after an expiry somebody tries. Nodes expire a key within a millisecond, gateways should not meet.
const AFTER_EXPIRY: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(8));
/// Between two tries without a majority of nodes.
const NO_QUORUM: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(150));
/// A waiter that splits the votes more often in a row waits for the next poll.
const MAX_SPLITS: u32 = 8;

/// The pauses of one process: random, or contenders would meet again.
pub(super) struct Pauses<'a>(pub(super) &'a dyn Entropy);

impl Pauses<'_> {
    /// After the `splits`th attempt in a row that split the votes: from one to three rounds, more each time. The first
    /// contender that wakes finds the others gone.
    pub(super) fn after_split(&self, round: Duration, splits: u32) -> Duration {
        round.mul_f64(1.0 + 2.0 * self.0.unit()) * splits
    }

    /// When a lock that is held until then at the longest is tried next.
    pub(super) fn after_expiry(&self, expiry: Instant) -> Instant {
        expiry + self.between(AFTER_EXPIRY)
    }

    /// When the first of a queue tries again after an attempt, the last of so many in a row that split the votes.
    pub(super) fn after_refusal(&self, error: LockError, splits: u32, round: Duration, now: Instant) -> Refusal {
        let quick = now + self.after_split(round, splits.clamp(1, MAX_SPLITS));
        let poll_due = now + self.between(POLL);
        let (retry, quick) = match &error {
            LockError::Held(_) | LockError::NoQuorum(_) if (1..=MAX_SPLITS).contains(&splits) => (quick, quick),
            LockError::Held(by) => match by.expires_in {
                Some(left) => (poll_due.min(self.after_expiry(now + left)), quick),
                None => (poll_due, quick),
            },
            LockError::NoQuorum(_) | LockError::Unknown(_) => {
                let retry = now + self.between(NO_QUORUM);
                (retry, retry)
            }
            // An acquire has none of these outcomes.
            LockError::Lost | LockError::NotHolder(_) => (poll_due, poll_due),
            LockError::HeldTooLong { .. } | LockError::TtlTooLong { .. } | LockError::TooManyWaiters { .. } => {
                (poll_due, poll_due)
            }
        };
        Refusal { error, retry, quick, poll_due, round }
    }

    fn between(&self, (least, most): (Duration, Duration)) -> Duration {
        least + (most - least).mul_f64(self.0.unit())
    }
}
