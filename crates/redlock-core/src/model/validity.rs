//! Validity: how long a holder may trust its lock. Pure.

use std::time::Duration;

use crate::model::types::{LockToken, Ttl};

/// What clocks that run at slightly different rates may eat of a lease: `ttl × factor + 2 ms`, as in the Redis
/// "Distributed Locks" page. The 2 ms stand for Redis' expiry precision of 1 ms and 1 ms of minimum drift.
pub fn drift(life: Duration, factor: f64) -> Duration {
    life.mul_f64(factor) + Duration::from_millis(2)
}

/// `life − elapsed − drift`, or `None` when nothing of it is left. The life is the TTL, or what an extension has found to be
/// left where that is longer.
pub fn validity(life: Duration, elapsed: Duration, drift: Duration) -> Option<Duration> {
    life.checked_sub(elapsed)?.checked_sub(drift).filter(|left| !left.is_zero())
}

/// A round that has taken longer is not believed: a master that has lost its vote may have been told by others what it
/// forgot, before they gave theirs. All gateways of a cluster have to agree on it, so it cannot follow the node time-out.
pub fn longest_round(max_clock_skew: Duration) -> Duration {
    (max_clock_skew * 3).max(Duration::from_secs(5))
}

/// A lock that is held, or was when a majority said so.
#[derive(Debug, Clone)]
pub struct Lease {
    /// What the holder shows to extend and release. A secret.
    pub token: LockToken,
    /// For how long it was granted.
    pub ttl: Ttl,
    /// Nodes that had granted when the decision fell.
    pub nodes_granted: usize,
    /// N: all configured nodes, up or not.
    pub nodes_total: usize,
    /// How many times the nodes were asked for it.
    pub rounds: u32,
    /// Its number among all that waited in this process, in the order of arrival; a later one where it gave up its turn for
    /// others. `None` when it did not wait in a queue.
    pub ticket: Option<u64>,
    /// Whether an earlier request of the same owner was granted it, and it has been confirmed by extending it: token and
    /// fencing token are those of that request.
    pub replayed: bool,
    /// When the request began and how much of the TTL goes to drift, on the clock that counts suspend.
    pub(crate) started: Duration,
    pub(crate) drift: Duration,
    /// What a majority stores it for, from then on at least: the TTL, or longer.
    pub(crate) life: Duration,
}

impl Lease {
    /// Time since the request for it began.
    pub(crate) fn elapsed(&self, now: Duration) -> Duration {
        now.saturating_sub(self.started)
    }

    pub(crate) fn validity(&self, now: Duration) -> Option<Duration> {
        validity(self.life, self.elapsed(now), self.drift)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn thirty_seconds_lose_302_ms_to_drift() {
        let ttl = Duration::from_millis(30_000);
        assert_eq!(drift(ttl, 0.01), Duration::from_millis(302));
        assert_eq!(
            validity(ttl, Duration::from_millis(5), drift(ttl, 0.01)),
            Some(Duration::from_millis(29_693))
        );
    }

    proptest! {
        #[test]
        fn validity_is_positive_and_below_what_the_ttl_leaves(ttl in 10u64..86_400_000, elapsed in 0u64..90_000_000, factor in 0.0..0.5) {
            let ttl = Duration::from_millis(ttl);
            let elapsed = Duration::from_millis(elapsed);
            match validity(ttl, elapsed, drift(ttl, factor)) {
                Some(left) => prop_assert!(!left.is_zero() && left + elapsed + Duration::from_millis(2) <= ttl),
                None => prop_assert!(elapsed + drift(ttl, factor) >= ttl),
            }
        }
    }
}
