//! Limits each client's use of the masters' memory while that memory is short.
//!
//! While a third or more of the memory is free, no client is limited. When less is free, a client
//! gets no new locks if it uses more than twice as much memory as is free. Network switches divide
//! their packet memory by the same rule, the dynamic threshold (Choudhury and Hahne, IEEE/ACM
//! Transactions on Networking 6(2), 1998), here with the factor 2. The rule needs no list of
//! clients, and gateways need not agree on anything:
//!
//! - A single greedy client stops at two thirds of the memory. With G gateways and one greedy
//!   client at each, 1/(1 + 2G) of the memory stays free.
//! - A client that uses little is refused only when almost no memory is left.
//! - The rule needs no hysteresis: a client at its limit gets new locks as fast as its old ones
//!   end.
//!
//! # How old the figures are
//!
//! A master reports its memory once a second. Meanwhile this gateway counts its own clients' use,
//! so its own load cannot run past the threshold. The gateway does not see what other gateways use
//! within that second. One gateway grants at most 20,000 new names a second (measured on two cores,
//! debug build, three masters on the same machine) of 400 bytes each (`clients/quota.rs`): 8 MB a
//! second. Three gateways with one greedy client on each stop when a seventh of the memory is free.
//! Until a gateway sees the next report, the two others may take 16 MB more in one second. A
//! seventh of the memory has room for 16 MB if the master has 112 MB or more. A smaller master may
//! fill up first. It then answers OOM, and the gateways at once count its free memory as zero.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use redlock_core::Redlock;
use redlock_core::node::rules::fence_grace;
use redlock_core::node::{NodeMemory, NodeStatus};

use crate::overload::clients::{Taken, Terms};

/// Memory is short when less than a third is free.
const SHORT_DIVISOR: u64 = 3;
/// A client may use twice the free memory.
const FREE_FACTOR: u64 = 2;
/// The smallest limit, in bytes: about 150 locks. When the masters are full, a client below this
/// limit gets the masters' own refusals.
const MIN_LIMIT: u64 = 64 * 1024;
/// The age at which the gateway reads the masters' statuses again.
const MAX_AGE: Duration = Duration::from_millis(100);
/// A master's answer includes the memory that was taken at least this long before the master was
/// asked.
const SETTLE_TIME: Duration = Duration::from_millis(100);
/// Limit on the samples of the memory taken. With one sample every 100 ms, that is about six
/// seconds. A status older than six seconds belongs to a master that does not answer.
const SAMPLES: usize = 64;

/// The shortest time for which a client's largest use of its limit is remembered. Prometheus
/// scrapes more often than that.
const USE_PERIOD: Duration = Duration::from_secs(60);

/// The memory of the masters that a quorum needs.
pub struct MasterMemory {
    /// The assumed memory in bytes of a master without a maximum.
    assumed: u64,
    watermark_life: Duration,
    taken: Taken,
    state: Mutex<State>,
    period_began: Mutex<Instant>,
}

#[derive(Default)]
struct State {
    last_read: Option<Duration>,
    free: Option<Free>,
    /// Samples of the memory that this gateway's clients have taken, with their times.
    samples: VecDeque<(Duration, i64)>,
}

/// The free memory of one master: among the masters that a quorum needs, the one with the least
/// free memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Free {
    bytes: u64,
    total: u64,
    /// The memory that this gateway's clients had taken when the master was asked.
    taken: i64,
}

impl MasterMemory {
    /// `assumed`: the memory in bytes of a master without a maximum.
    pub fn new(assumed: u64, clock_skew: Duration) -> Self {
        Self {
            assumed,
            watermark_life: fence_grace(clock_skew),
            taken: Taken::default(),
            state: Mutex::default(),
            period_began: Mutex::new(Instant::now()),
        }
    }

    /// The largest part of its limit that any client has used in the last one or two
    /// [`USE_PERIOD`]s. 0 while memory is not short.
    pub fn largest_use(&self) -> f64 {
        self.taken.largest_use()
    }

    /// Call this function every few seconds.
    pub fn upkeep(&self) {
        let mut began = self.period_began.lock();
        if began.elapsed() >= USE_PERIOD {
            *began = Instant::now();
            self.taken.begin_period();
        }
    }

    pub fn assumed(&self) -> u64 {
        self.assumed
    }

    /// The present terms for any client.
    pub fn terms(&self, locks: &Redlock) -> Terms {
        let limit = self.limit(locks.monotonic(), locks.quorum().size(), || {
            locks.nodes().into_iter().map(|(_, status)| status.borrow().clone()).collect()
        });
        Terms { limit, watermark_life: self.watermark_life, taken: self.taken.clone() }
    }

    fn limit(
        &self,
        now: Duration,
        quorum: usize,
        statuses: impl FnOnce() -> Vec<NodeStatus>,
    ) -> Option<u64> {
        let mut state = self.state.lock();
        let taken = self.taken.bytes();
        if state.last_read.is_none_or(|read| now.saturating_sub(read) >= MAX_AGE) {
            state.last_read = Some(now);
            if state.samples.len() == SAMPLES {
                state.samples.pop_front();
            }
            state.samples.push_back((now, taken));
            let scarcest = scarcest(statuses(), quorum, self.assumed);
            state.free = scarcest.map(|(bytes, total, asked)| Free {
                bytes,
                total,
                taken: state.taken_before(asked),
            });
        }
        let Free { bytes, total, taken: taken_then } = state.free?;
        drop(state);
        // Memory that was released since then counts as free only when the master reports it.
        let free = bytes.saturating_sub(u64::try_from(taken - taken_then).unwrap_or(0));
        (free.saturating_mul(SHORT_DIVISOR) < total).then(|| (free * FREE_FACTOR).max(MIN_LIMIT))
    }
}

impl State {
    fn taken_before(&self, asked: Duration) -> i64 {
        let is_settled = |(at, _): &&(Duration, i64)| *at + SETTLE_TIME <= asked;
        let sample = self.samples.iter().rev().find(is_settled).or(self.samples.front());
        sample.map_or(0, |(_, taken)| *taken)
    }
}

/// Picks the quorum of masters with the most free memory. For the master among them with the least,
/// returns its free bytes, its total bytes, and when it was asked. Returns `None` if fewer masters
/// than a quorum vote and report their memory. Then no client is limited, and the masters' own
/// refusals count.
fn scarcest(
    statuses: Vec<NodeStatus>,
    quorum: usize,
    assumed: u64,
) -> Option<(u64, u64, Duration)> {
    let memory = |status: NodeStatus| {
        let NodeMemory { used, max, asked } = status.memory?;
        let total = if max > 0 { max } else { assumed };
        if status.is_out_of_memory() {
            return Some((0, total, asked));
        }
        status.votes().then_some((total.saturating_sub(used), total, asked))
    };
    let mut masters: Vec<_> = statuses.into_iter().filter_map(memory).collect();
    // Masters are compared by the fraction that is free, because they may differ in size.
    let fraction = |&(free, total, _): &(u64, u64, Duration)| free as f64 / total.max(1) as f64;
    masters.sort_by(|a, b| fraction(b).total_cmp(&fraction(a)));
    masters.get(quorum.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use redlock_core::node::{NodeState, Remedy};

    use super::*;
    use crate::overload::clients::Client;

    const SECOND: Duration = Duration::from_secs(1);
    const MIB: u64 = 1 << 20;

    fn using(used: u64, max: u64, asked: Duration) -> NodeStatus {
        let memory = Some(NodeMemory { used, max, asked });
        NodeStatus { memory, ..NodeStatus::new(NodeState::Admitted, 0) }
    }

    fn three(used: [u64; 3]) -> Vec<NodeStatus> {
        used.map(|used| using(used * MIB, 100 * MIB, SECOND)).into()
    }

    fn limit(statuses: Vec<NodeStatus>) -> Option<u64> {
        MasterMemory::new(1000 * MIB, SECOND).limit(SECOND * 2, 2, || statuses)
    }

    #[test]
    fn clients_are_limited_only_below_a_third_free() {
        assert_eq!(limit(three([66, 66, 66])), None);
        assert_eq!(limit(three([67, 67, 67])), Some(2 * 33 * MIB));
        assert_eq!(limit(three([99, 99, 99])), Some(2 * MIB));
        assert_eq!(limit(three([100, 100, 100])), Some(MIN_LIMIT));
    }

    #[test]
    fn a_full_master_that_no_quorum_needs_limits_nobody() {
        assert_eq!(limit(three([99, 10, 10])), None);
        assert_eq!(limit(three([10, 99, 90])), Some(20 * MIB));
        let mut one_down = three([10, 99, 10]);
        one_down[0].state = NodeState::Connecting;
        assert_eq!(limit(one_down), Some(2 * MIB), "now the quorum needs it");
    }

    #[test]
    fn a_master_that_answers_oom_has_nothing_free() {
        let mut statuses = three([10, 10, 10]);
        for status in &mut statuses[..2] {
            (status.refuses_writes, status.remedy) = (true, Some(Remedy::RaiseMaxMemory));
        }
        assert_eq!(limit(statuses.clone()), Some(MIN_LIMIT));
        statuses[0].refuses_writes = false;
        assert_eq!(limit(statuses), None, "two others have memory");
    }

    #[test]
    fn the_setting_counts_for_a_master_without_a_maximum() {
        let statuses = |used: u64| vec![using(used * MIB, 0, SECOND); 3];
        assert_eq!(limit(statuses(600)), None);
        assert_eq!(limit(statuses(900)), Some(200 * MIB));
    }

    #[test]
    fn without_reports_or_a_quorum_nobody_is_limited() {
        assert_eq!(limit(vec![NodeStatus::new(NodeState::Admitted, 0); 3]), None);
        assert_eq!(limit(three([99, 99, 99]).split_off(2)), None);
    }

    #[test]
    fn memory_taken_since_the_last_report_is_not_free() {
        let memory = MasterMemory::new(0, SECOND);
        let limit_at = |now: Duration, asked: Duration, used: u64| {
            memory.limit(now, 1, || vec![using(used, 100_000_000, asked)])
        };
        let client = Arc::new(Client::default());
        let take = |locks: usize| {
            let terms = Terms { taken: memory.taken.clone(), ..Terms::default() };
            let until = Instant::now() + SECOND * 60;
            (0..locks).for_each(|n| {
                client
                    .reserve(&format!("{n:07}"), 0, until, terms.clone())
                    .expect("within the limit")
                    .granted(until)
            });
        };
        assert_eq!(limit_at(SECOND, SECOND / 2, 1_000_000), None);
        take(200_000);
        let bytes = 200_000 * (360 + 14);
        assert_eq!(
            limit_at(SECOND + MAX_AGE / 2, SECOND / 2, 1_000_000),
            Some(2 * (99_000_000 - bytes)),
            "at once"
        );
        assert_eq!(
            limit_at(SECOND * 2, SECOND / 2, 1_000_000),
            Some(2 * (99_000_000 - bytes)),
            "still the old figures"
        );
        assert_eq!(
            limit_at(SECOND * 3, SECOND * 2 + SETTLE_TIME, bytes),
            Some(2 * (100_000_000 - bytes)),
            "counted once"
        );
    }
}
