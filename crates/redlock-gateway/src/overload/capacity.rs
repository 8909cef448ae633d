//! How much of everything there may be: what an amount of memory comes to, and what of it the system's file descriptors
//! allow.
//!
//! The costs are measured, at their worst and on the allocator of the release (`tests/operations/memory.rs`): resident
//! memory of the process. What the kernel keeps for sockets comes on top, and is bounded by its own settings (tcp_mem).

use bytesize::ByteSize;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Longest head of a request.
pub const HEAD: usize = 16 * KIB as usize;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;

/// The process without a client: program, nodes, metrics.
const BASE: u64 = 48 * MIB;
/// A connection with a head that is all but whole.
const CONNECTION: u64 = 34 * KIB;
/// The same over TLS, with a record of 16 KB behind it that is all but whole, and what the allocator cannot use between them.
const TLS_CONNECTION: u64 = 68 * KIB;
/// A request that is being worked on, beyond its connection.
const REQUEST: u64 = 16 * KIB;
/// A request that waits for a lock, beyond its connection.
const WAITER: u64 = 8 * KIB;

/// The smallest budget that anything can be served with.
pub const SMALLEST: ByteSize = ByteSize::b(64 * MIB);
/// What the defaults below were chosen for; they grow and shrink with the budget.
const REFERENCE: u64 = GIB;
const CONNECTIONS: u64 = 16_000;
const TLS_CONNECTIONS: u64 = 12_000;
const IN_FLIGHT: u64 = 4096;
/// Of all connections: each waiter keeps one, and others need some too.
const WAITERS: (u64, u64) = (5, 8);

/// Descriptors of the process itself: log, files that are read again, the listener, the runtime.
const OWN_DESCRIPTORS: usize = 48;
/// Of each master: votes, hints, and both once more while they are built up anew.
const NODE_DESCRIPTORS: usize = 8;

/// What an operator has said.
#[derive(Debug, Clone, Copy)]
pub struct Given {
    pub budget: ByteSize,
    pub connections: Option<usize>,
    pub connections_per_client: Option<usize>,
    pub waiters: Option<usize>,
    pub in_flight: Option<usize>,
    pub tls: bool,
    /// Whether the locks are in this process, too.
    pub embedded: bool,
}

/// How much of everything there may be.
#[derive(Debug, Clone, Copy)]
pub struct Capacity {
    pub connections: usize,
    pub waiters: usize,
    pub in_flight: usize,
    /// Bytes for the locks of embedded nodes, of all nodes together.
    pub locks: u64,
    given: Given,
}

impl Capacity {
    pub fn new(given: Given) -> Self {
        let spendable = given.budget.as_u64().saturating_sub(BASE);
        let locks = if given.embedded { spendable / 2 } else { 0 };
        let scaled = |of_reference: u64| {
            let spendable = spendable - locks;
            let share =
                u128::from(of_reference) * u128::from(spendable) / u128::from(REFERENCE - BASE);
            usize::try_from(share).unwrap_or(usize::MAX).max(1)
        };
        let limit = if given.tls { TLS_CONNECTIONS } else { CONNECTIONS };
        let connections = given.connections.unwrap_or_else(|| scaled(limit));
        let waiters = connections as u64 * WAITERS.0 / WAITERS.1;
        Self {
            connections,
            waiters: given.waiters.unwrap_or((waiters as usize).max(1)),
            in_flight: given.in_flight.unwrap_or_else(|| scaled(IN_FLIGHT)),
            locks,
            given,
        }
    }

    /// Connections of one address: half of all, where nothing else is said.
    pub fn connections_per_client(&self) -> usize {
        self.given.connections_per_client.unwrap_or(self.connections.div_ceil(2))
    }

    /// Whether that bounds loopback too. A proxy on the same machine has all clients behind it.
    pub fn bounds_loopback(&self) -> bool {
        self.given.connections_per_client.is_some()
    }

    /// With so many connections as the descriptors allow that are left when `nodes` masters and `others` have theirs.
    ///
    /// # Errors
    /// None are left.
    pub fn within(self, descriptors: u64, nodes: usize, others: usize) -> Result<Self, String> {
        let reserved = OWN_DESCRIPTORS + nodes * NODE_DESCRIPTORS + others;
        let left = usize::try_from(descriptors).unwrap_or(usize::MAX).saturating_sub(reserved);
        if left == 0 {
            return Err(format!(
                "{descriptors} files may be open, and {reserved} are kept for the nodes and the gateway itself: raise \
                 ulimit -n"
            ));
        }
        let given = Given { connections: Some(self.connections.min(left)), ..self.given };
        Ok(if left < self.connections { Self::new(given) } else { self })
    }

    /// What each limit costs at most, and all of them together.
    pub fn costs(&self) -> ([(&'static str, usize, ByteSize); 3], ByteSize) {
        let connection = if self.given.tls { TLS_CONNECTION } else { CONNECTION };
        let cost = |count: usize, each| ByteSize::b((count as u64).saturating_mul(each));
        let costs = [
            ("--max-connections", self.connections, cost(self.connections, connection)),
            ("--max-in-flight", self.in_flight, cost(self.in_flight, REQUEST)),
            ("--max-waiters", self.waiters, cost(self.waiters, WAITER)),
        ];
        let sum = costs
            .iter()
            .fold(BASE + self.locks, |sum, (_, _, cost)| sum.saturating_add(cost.as_u64()));
        (costs, ByteSize::b(sum))
    }

    /// That the limits cost more than there is.
    pub fn excess(&self) -> Option<String> {
        let (costs, sum) = self.costs();
        let budget = self.given.budget;
        let (dearest, _, _) = costs.iter().max_by_key(|(_, _, cost)| *cost)?;
        (sum > budget).then(|| {
            format!("the limits may take {sum} of memory, and --memory-budget is {budget}: lower {dearest} or raise it")
        })
    }

    pub fn budget(&self) -> ByteSize {
        self.given.budget
    }
}

/// How many files may be open, after the limit that the process began with was raised as far as it may be; `None` when there
/// is no limit.
pub fn descriptors() -> Option<u64> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // What is read below is what counts.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(budget: u64) -> Given {
        let budget = ByteSize::b(budget);
        Given {
            budget,
            connections: None,
            connections_per_client: None,
            waiters: None,
            in_flight: None,
            tls: false,
            embedded: false,
        }
    }

    #[test]
    fn what_the_defaults_may_take_is_within_every_budget() {
        for budget in [SMALLEST.as_u64(), 100 * MIB, 512 * MIB, GIB, 10 * GIB, 1 << 50] {
            for tls in [false, true] {
                for embedded in [false, true] {
                    let capacity = Capacity::new(Given { tls, embedded, ..given(budget) });
                    assert_eq!(capacity.excess(), None, "{capacity:?}");
                    assert_eq!(capacity.locks > 0, embedded);
                }
            }
        }
        for (tls, expected) in [(false, (16_000, 10_000, 4096)), (true, (12_000, 7_500, 4096))] {
            let Capacity { connections, waiters, in_flight, .. } =
                Capacity::new(Given { tls, ..given(GIB) });
            assert_eq!((connections, waiters, in_flight), expected);
        }
    }

    #[test]
    fn limits_that_cost_more_than_the_budget_are_said_with_the_dearest() {
        let capacity = Capacity::new(Given { connections: Some(100_000), ..given(GIB) });
        let excess = capacity.excess().unwrap();
        assert!(excess.contains("--max-connections") && excess.contains("1.0 GiB"), "{excess}");
    }

    #[test]
    fn few_descriptors_leave_the_nodes_theirs() {
        let capacity = Capacity::new(given(GIB));
        let few = capacity.within(256, 5, 80).unwrap();
        assert_eq!((few.connections, few.waiters, few.in_flight), (88, 55, 4096));
        assert_eq!(capacity.within(20_000, 5, 80).unwrap().connections, 16_000);
        assert!(capacity.within(128, 5, 80).unwrap_err().contains("168 are kept"));
        let asked =
            Capacity::new(Given { waiters: Some(200), ..given(GIB) }).within(256, 5, 80).unwrap();
        assert_eq!(asked.waiters, 200, "what was asked for stays");
    }
}
