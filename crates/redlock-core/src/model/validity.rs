//! How long a holder may trust its lock: pure arithmetic.

use std::time::Duration;

use crate::model::types::{LockToken, Ttl};

/// The part of a lease reserved for clocks that run at slightly different rates:
/// `life × factor + 2 ms`, as in the Redis "Distributed Locks" page. The 2 ms are Redis' expiry
/// precision of 1 ms and a minimum drift of 1 ms.
pub fn drift(life: Duration, factor: f64) -> Duration {
    life.mul_f64(factor) + Duration::from_millis(2)
}

/// `life − elapsed − drift`, or `None` when nothing is left. `life` is the TTL of a grant, or the
/// life that an extension found or set on a majority.
pub fn validity(life: Duration, elapsed: Duration, drift: Duration) -> Option<Duration> {
    life.checked_sub(elapsed)?.checked_sub(drift).filter(|left| !left.is_zero())
}

/// The longest round that counts: 3 × `max_clock_skew`, and at least 5 s. During a longer round, a
/// master may vote yes and then lose its data. Recovery may then read the other masters before they
/// have set the lock, and miss the lock. Recovery waits for this limit before it reads, so all
/// gateways of a cluster must agree on it. That is why it does not depend on `node_timeout`, which
/// each gateway chooses for itself.
pub fn longest_round(max_clock_skew: Duration) -> Duration {
    (max_clock_skew * 3).max(Duration::from_secs(5))
}

/// A lock that is held, or was held when a majority granted it.
#[derive(Debug, Clone)]
pub struct Lease {
    /// A secret that the holder shows to extend and release.
    pub token: LockToken,
    /// The TTL of the grant.
    pub ttl: Ttl,
    /// The number of nodes that had granted the lock when the deciding vote arrived.
    pub nodes_granted: usize,
    /// N: all configured nodes, up or not.
    pub nodes_total: usize,
    /// The number of rounds that the grant took.
    pub rounds: u32,
    /// The waiter's number in this process. Waiters are numbered by priority and then in the order
    /// of arrival. A waiter that let others pass got a new, larger number. `None` if the request did
    /// not queue.
    pub ticket: Option<u64>,
    /// Whether an earlier request of the same owner got this grant, and this request confirmed it
    /// by extending it. The token is then that of the earlier request.
    pub replayed: bool,
    /// When the request began, on the clock that includes suspend.
    pub(crate) started: Duration,
    pub(crate) drift: Duration,
    /// How long a majority stores the lock at least, counted from `started`: the TTL of a grant, or the
    /// life that an extension found or set. That life is shorter than the TTL if the extension reached
    /// the nodes late.
    pub(crate) life: Duration,
}

/// What a lease has left at one moment. A client trusts its lock until `elapsed + validity` after it
/// sent the request. So both come from one reading of the clock. If the process stood still between
/// two readings, the sum would grow, and the client would trust a lock that has already ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remaining {
    /// Time since the request began.
    pub elapsed: Duration,
    /// How long the lock may be trusted after that moment.
    pub validity: Duration,
}

impl Lease {
    /// How long a majority stores the lock at least, counted from the start of the request.
    pub fn life(&self) -> Duration {
        self.life
    }

    /// Time since the request began.
    pub(crate) fn elapsed(&self, now: Duration) -> Duration {
        now.saturating_sub(self.started)
    }

    /// Whether this lease must be given up before the other one.
    pub(crate) fn ends_before(&self, other: &Self) -> bool {
        let end = |lease: &Self| (lease.started + lease.life).saturating_sub(lease.drift);
        end(self) < end(other)
    }

    pub(crate) fn validity(&self, now: Duration) -> Option<Duration> {
        self.remaining(now).map(|remaining| remaining.validity)
    }

    pub(crate) fn remaining(&self, now: Duration) -> Option<Remaining> {
        let elapsed = self.elapsed(now);
        let validity = validity(self.life, elapsed, self.drift)?;
        Some(Remaining { elapsed, validity })
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
        fn validity_is_positive_and_below_what_the_ttl_leaves(
            ttl in 10u64..86_400_000,
            elapsed in 0u64..90_000_000,
            factor in 0.0..0.5,
        ) {
            let ttl = Duration::from_millis(ttl);
            let elapsed = Duration::from_millis(elapsed);
            match validity(ttl, elapsed, drift(ttl, factor)) {
                Some(left) => {
                    prop_assert!(!left.is_zero());
                    prop_assert!(left + elapsed + Duration::from_millis(2) <= ttl);
                }
                None => prop_assert!(elapsed + drift(ttl, factor) >= ttl),
            }
        }
    }
}
