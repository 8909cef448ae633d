//! How much of the masters' memory is free, and how much of it a client may take.
//!
//! While a third or more is free, a client takes what it wants. When less is free, a client that takes more than twice
//! what is free gets no new locks. This is the dynamic threshold of shared-memory switches (Choudhury and Hahne, IEEE/ACM
//! Transactions on Networking 6(2), 1998) with the factor 2. It needs no list of clients and no agreement of gateways:
//!
//! - One greedy client stops at two thirds of the memory. G gateways with one each leave 1/(1 + 2G) free.
//! - A client that takes little is refused only when others, or other programs, have left next to nothing.
//! - It needs no hysteresis. A client at its share gets new locks as fast as its old ones end.
//!
//! # How old the figures are
//!
//! A master tells its memory once a second. Meanwhile this gateway counts what its own clients take, so its own load
//! cannot run past the threshold. What other gateways take within that second is not seen. One gateway grants at most 20,000
//! new names a second (measured on two cores, debug build, three masters on the same machine) of 400 bytes each
//! (`clients/quota.rs`): 8 MB a second. Three gateways with one greedy client on each stop when a seventh is free. The load of
//! the two others, 16 MB in one second, needs that seventh: masters of 112 MB or more have it. A smaller master may run
//! full first. It then answers OOM, which counts as nothing free at once.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::Duration;

use redlock_core::Redlock;
use redlock_core::node::rules::fence_grace;
use redlock_core::node::{NodeMemory, NodeStatus};

use crate::overload::clients::{Taken, Terms};

/// Memory is short when less than one part in so many is free.
const SHORT: u64 = 3;
/// A client may take so many times what is free.
const SHARE: u64 = 2;
/// A client that takes less is never refused, in bytes: about 150 locks. With full masters it hears what they say.
const MODEST: u64 = 64 * 1024;
/// How old the figures may get before the statuses are read again.
const FRESH: Duration = Duration::from_millis(100);
/// What was taken this long before a master was asked is in its answer.
const SETTLED: Duration = Duration::from_millis(100);
/// Samples of what was taken: for six seconds. A status that is older is of a master that does not answer.
const SAMPLES: usize = 64;

/// The memory of all masters, as far as a quorum needs it.
pub struct MasterMemory {
    /// Bytes that a master has which sets no bound.
    assumed: u64,
    fence_life: Duration,
    taken: Taken,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    read: Option<Duration>,
    free: Option<Free>,
    /// What had been taken, at times in the past.
    samples: VecDeque<(Duration, i64)>,
}

/// What is free on the master with the least memory that a quorum needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Free {
    bytes: u64,
    of: u64,
    /// What had been taken when the master was asked.
    taken: i64,
}

impl MasterMemory {
    /// `assumed` is what a master has that sets no bound itself.
    pub fn new(assumed: u64, clock_skew: Duration) -> Self {
        Self {
            assumed,
            fence_life: fence_grace(clock_skew),
            taken: Taken::default(),
            state: Mutex::default(),
        }
    }

    pub fn assumed(&self) -> u64 {
        self.assumed
    }

    /// What a client may take now.
    pub fn terms(&self, locks: &Redlock) -> Terms {
        let limit = self.limit(locks.monotonic(), locks.quorum().size(), || {
            locks.nodes().into_iter().map(|(_, status)| status.borrow().clone()).collect()
        });
        Terms { limit, fence_life: self.fence_life, taken: self.taken.clone() }
    }

    fn limit(
        &self,
        now: Duration,
        quorum: usize,
        statuses: impl FnOnce() -> Vec<NodeStatus>,
    ) -> Option<u64> {
        let mut state = self.state.lock();
        let taken = self.taken.bytes();
        if state.read.is_none_or(|read| now.saturating_sub(read) >= FRESH) {
            state.read = Some(now);
            if state.samples.len() == SAMPLES {
                state.samples.pop_front();
            }
            state.samples.push_back((now, taken));
            let scarcest = scarcest(statuses(), quorum, self.assumed);
            state.free = scarcest.map(|(bytes, of, asked)| Free {
                bytes,
                of,
                taken: state.taken_before(asked),
            });
        }
        let Free { bytes, of, taken: taken_then } = state.free?;
        drop(state);
        // What was given back since is not counted as free before the master says so.
        let free = bytes.saturating_sub(u64::try_from(taken - taken_then).unwrap_or(0));
        (free.saturating_mul(SHORT) < of).then(|| (free * SHARE).max(MODEST))
    }
}

impl State {
    fn taken_before(&self, asked: Duration) -> i64 {
        let is_settled = |(at, _): &&(Duration, i64)| *at + SETTLED <= asked;
        let sample = self.samples.iter().rev().find(is_settled).or(self.samples.front());
        sample.map_or(0, |(_, taken)| *taken)
    }
}

/// Free bytes, all bytes and the time of the question, of that master of the quorum with the most room which has the least.
/// `None` when there is no quorum, or the masters do not say: their own answers count then.
fn scarcest(
    statuses: Vec<NodeStatus>,
    quorum: usize,
    assumed: u64,
) -> Option<(u64, u64, Duration)> {
    let room = |status: NodeStatus| {
        let NodeMemory { used, max, asked } = status.memory?;
        let of = if max > 0 { max } else { assumed };
        if status.is_out_of_memory() {
            return Some((0, of, asked));
        }
        status.votes().then_some((of.saturating_sub(used), of, asked))
    };
    let mut rooms: Vec<_> = statuses.into_iter().filter_map(room).collect();
    // By the part that is free: masters may differ in size.
    let part = |&(free, of, _): &(u64, u64, Duration)| free as f64 / of.max(1) as f64;
    rooms.sort_by(|a, b| part(b).total_cmp(&part(a)));
    rooms.get(quorum.checked_sub(1)?).copied()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

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
    fn clients_are_bounded_only_when_less_than_a_third_is_free() {
        assert_eq!(limit(three([66, 66, 66])), None);
        assert_eq!(limit(three([67, 67, 67])), Some(2 * 33 * MIB));
        assert_eq!(limit(three([99, 99, 99])), Some(2 * MIB));
        assert_eq!(limit(three([100, 100, 100])), Some(MODEST));
    }

    #[test]
    fn a_full_master_that_no_quorum_needs_bounds_nobody() {
        assert_eq!(limit(three([99, 10, 10])), None);
        assert_eq!(limit(three([10, 99, 90])), Some(20 * MIB));
        let mut one_down = three([10, 99, 10]);
        one_down[0].state = NodeState::Connecting;
        assert_eq!(limit(one_down), Some(2 * MIB), "now it is needed");
    }

    #[test]
    fn a_master_that_answers_oom_has_nothing_free() {
        let mut statuses = three([10, 10, 10]);
        for status in &mut statuses[..2] {
            (status.refuses_writes, status.remedy) = (true, Some(Remedy::RaiseMaxMemory));
        }
        assert_eq!(limit(statuses.clone()), Some(MODEST));
        statuses[0].refuses_writes = false;
        assert_eq!(limit(statuses), None, "two others have room");
    }

    #[test]
    fn the_setting_counts_where_a_master_has_no_bound() {
        let statuses = |used: u64| vec![using(used * MIB, 0, SECOND); 3];
        assert_eq!(limit(statuses(600)), None);
        assert_eq!(limit(statuses(900)), Some(200 * MIB));
    }

    #[test]
    fn masters_that_say_nothing_or_have_no_quorum_bound_nobody() {
        assert_eq!(limit(vec![NodeStatus::new(NodeState::Admitted, 0); 3]), None);
        assert_eq!(limit(three([99, 99, 99]).split_off(2)), None);
    }

    #[test]
    fn what_is_taken_since_a_master_was_asked_is_not_free() {
        let memory = MasterMemory::new(0, SECOND);
        let most_at = |now: Duration, asked: Duration, used: u64| {
            memory.limit(now, 1, || vec![using(used, 100_000_000, asked)])
        };
        let client = Arc::new(Client::default());
        let takes = |locks: usize| {
            let terms = Terms { taken: memory.taken.clone(), ..Terms::default() };
            let until = Instant::now() + SECOND * 60;
            (0..locks).for_each(|n| {
                client
                    .reserve(&format!("{n:07}"), 0, until, terms.clone())
                    .expect("room")
                    .granted(until)
            });
        };
        assert_eq!(most_at(SECOND, SECOND / 2, 1_000_000), None);
        takes(200_000);
        let bytes = 200_000 * (360 + 14);
        assert_eq!(
            most_at(SECOND + FRESH / 2, SECOND / 2, 1_000_000),
            Some(2 * (99_000_000 - bytes)),
            "at once"
        );
        assert_eq!(
            most_at(SECOND * 2, SECOND / 2, 1_000_000),
            Some(2 * (99_000_000 - bytes)),
            "still the old figures"
        );
        assert_eq!(
            most_at(SECOND * 3, SECOND * 2 + SETTLED, bytes),
            Some(2 * (100_000_000 - bytes)),
            "counted once"
        );
    }
}
