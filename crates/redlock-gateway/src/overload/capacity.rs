//! Derives the limits of the process from its memory budget and the system's file descriptors.
//!
//! The costs are resident memory of the process, measured at their worst with the release's
//! allocator (`tests/operations/memory.rs`). The kernel's socket buffers come on top. The kernel
//! limits their memory itself (`tcp_mem`).

use std::path::Path;

use bytesize::ByteSize;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Longest head of a request, in bytes.
pub const HEAD: usize = 16 * KIB as usize;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const GIB: u64 = 1024 * MIB;

/// Bytes of the process without a client: program, nodes, metrics.
const BASE_BYTES: u64 = 48 * MIB;
/// Bytes of a connection whose request head is almost complete.
const CONNECTION_BYTES: u64 = 34 * KIB;
/// Bytes of a TLS connection on which the gateway offers only HTTP/1.1. In the worst case it has an
/// almost complete request head, and behind it an almost complete TLS record of 16 KiB. The
/// allocator loses some memory between the two.
const TLS_CONNECTION_BYTES: u64 = 68 * KIB;
/// Bytes of a TLS connection on which the client may choose HTTP/2. In the worst case it has a
/// request with 100 fields whose body has not come, the library's buffer for a frame of 16 KiB, and
/// an almost complete TLS record. Header table entries take less.
const HTTP2_CONNECTION_BYTES: u64 = 104 * KIB;
/// Bytes of a request in flight, beyond its connection.
const REQUEST_BYTES: u64 = 16 * KIB;
/// Bytes of a waiter, beyond its connection.
const WAITER_BYTES: u64 = 8 * KIB;

/// The smallest memory budget that the gateway accepts.
pub const SMALLEST: ByteSize = ByteSize::b(64 * MIB);
/// The default limits below are those for this budget. With another budget they are larger or
/// smaller in proportion.
const REFERENCE: u64 = GIB;
const CONNECTIONS: u64 = 16_000;
const TLS_CONNECTIONS: u64 = 11_000;
const HTTP2_CONNECTIONS: u64 = 7_200;
const IN_FLIGHT: u64 = 4096;
/// Waiters as a fraction of all connections. Each waiter keeps a connection, and other requests
/// need connections too.
const WAITERS_PER_CONNECTIONS: (u64, u64) = (5, 8);
/// Waiters and event streams together, as a fraction of all connections. The other connections are
/// left to short requests.
const LONG_LIVED_PER_CONNECTIONS: (u64, u64) = (7, 8);
/// The part of the memory budget for events that slow streams have not taken yet: 1 in this many.
const EVENTS_PART: u64 = 64;
/// The same for what was last seen of watched locks.
const WATCHED_PART: u64 = 64;
/// The same for pending releases.
const RELEASES_PART: u64 = 32;
/// The same for large answers that clients have not read yet.
const LARGE_ANSWERS_PART: u64 = 16;
/// The least memory for requests for many locks: the largest takes a third.
const LEAST_LARGE_REQUESTS: u64 = 3 * MIB;
/// The same for entries of HTTP/2 header tables, beyond those of each connection.
const HEADER_TABLES_PART: u64 = 64;

/// File descriptors of the process itself: log, watched files, the listener, the runtime.
const OWN_DESCRIPTORS: usize = 48;
/// File descriptors for each master: for votes and for hints, and for both a second time during a
/// reconnect.
const NODE_DESCRIPTORS: usize = 8;

/// What a client may speak on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Plain,
    /// HTTP/1.1 over TLS.
    Tls,
    /// HTTP/1.1 or HTTP/2 over TLS.
    Http2,
}

impl Transport {
    /// Bytes of one connection.
    fn connection_bytes(self) -> u64 {
        match self {
            Self::Plain => CONNECTION_BYTES,
            Self::Tls => TLS_CONNECTION_BYTES,
            Self::Http2 => HTTP2_CONNECTION_BYTES,
        }
    }

    /// The default limit on connections for [`REFERENCE`].
    fn connections(self) -> u64 {
        match self {
            Self::Plain => CONNECTIONS,
            Self::Tls => TLS_CONNECTIONS,
            Self::Http2 => HTTP2_CONNECTIONS,
        }
    }
}

/// The operator's settings.
#[derive(Debug, Clone, Copy)]
pub struct Given {
    pub budget: ByteSize,
    pub connections: Option<usize>,
    pub connections_per_client: Option<usize>,
    pub waiters: Option<usize>,
    pub in_flight: Option<usize>,
    pub transport: Transport,
    /// Whether the nodes are embedded, so that this process stores the locks too.
    pub embedded: bool,
}

/// No file descriptors are left for connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{descriptors} files may be open, and {reserved} are kept for the nodes and the gateway itself: \
     raise ulimit -n"
)]
pub struct NoDescriptors {
    descriptors: u64,
    reserved: usize,
}

/// The limits of the process.
#[derive(Debug, Clone, Copy)]
pub struct Capacity {
    pub connections: usize,
    pub waiters: usize,
    pub in_flight: usize,
    /// Bytes for the locks of all embedded nodes together; 0 without embedded nodes.
    pub locks: u64,
    /// Connections of waiters and event streams together.
    pub long_lived: usize,
    /// Bytes for events that slow streams have not taken yet.
    pub events: u64,
    /// Bytes for what was last seen of watched locks.
    pub watched: u64,
    /// Bytes for releases that a master has not confirmed yet.
    pub releases: u64,
    /// Bytes for large answers that clients have not read.
    pub large_answers: u64,
    /// Bytes for requests for many locks, and for their answers. They are in flight, so they have a part
    /// of the memory of those requests.
    pub large_requests: u64,
    /// Bytes for entries of HTTP/2 header tables, beyond those of each connection; 0 without HTTP/2.
    pub header_tables: u64,
    given: Given,
}

impl Capacity {
    pub fn new(given: Given) -> Self {
        let spendable = given.budget.as_u64().saturating_sub(BASE_BYTES);
        let locks = if given.embedded { spendable / 2 } else { 0 };
        let spendable = spendable - locks;
        let scaled = |of_reference: u64| {
            let share = u128::from(of_reference) * u128::from(spendable)
                / u128::from(REFERENCE - BASE_BYTES);
            usize::try_from(share).unwrap_or(usize::MAX).max(1)
        };
        let connections =
            given.connections.unwrap_or_else(|| scaled(given.transport.connections()));
        let part = |(of, all)| ((connections as u64 * of / all) as usize).max(1);
        let waiters = given.waiters.unwrap_or(part(WAITERS_PER_CONNECTIONS));
        let in_flight = given.in_flight.unwrap_or_else(|| scaled(IN_FLIGHT));
        Self {
            connections,
            waiters,
            long_lived: part(LONG_LIVED_PER_CONNECTIONS),
            in_flight,
            locks,
            events: spendable / EVENTS_PART,
            watched: spendable / WATCHED_PART,
            releases: spendable / RELEASES_PART,
            large_answers: spendable / LARGE_ANSWERS_PART,
            large_requests: (in_flight as u64 * REQUEST_BYTES / 2).max(LEAST_LARGE_REQUESTS),
            header_tables: match given.transport {
                Transport::Http2 => spendable / HEADER_TABLES_PART,
                Transport::Plain | Transport::Tls => 0,
            },
            given,
        }
    }

    /// Connections that one address may have: half of all by default.
    pub fn connections_per_client(&self) -> usize {
        self.given.connections_per_client.unwrap_or(self.connections.div_ceil(2))
    }

    /// Whether the limit of [`Self::connections_per_client`] applies to loopback addresses too. By
    /// default it does not, because a proxy on the same machine has one address for all its
    /// clients.
    pub fn bounds_loopback(&self) -> bool {
        self.given.connections_per_client.is_some()
    }

    /// Lowers the connections to the descriptors that are left after those of `nodes` masters and
    /// `others`.
    ///
    /// # Errors
    /// Fails when none are left.
    pub fn within(
        self,
        descriptors: u64,
        nodes: usize,
        others: usize,
    ) -> Result<Self, NoDescriptors> {
        let reserved = OWN_DESCRIPTORS + nodes * NODE_DESCRIPTORS + others;
        let left = usize::try_from(descriptors).unwrap_or(usize::MAX).saturating_sub(reserved);
        if left == 0 {
            return Err(NoDescriptors { descriptors, reserved });
        }
        let given = Given { connections: Some(self.connections.min(left)), ..self.given };
        Ok(if left < self.connections { Self::new(given) } else { self })
    }

    /// How many bytes each limit may cost at most, by flag, and the sum of these with the fixed
    /// costs.
    pub fn costs(&self) -> ([(&'static str, usize, ByteSize); 3], ByteSize) {
        let connection = self.given.transport.connection_bytes();
        let cost = |count: usize, each| ByteSize::b((count as u64).saturating_mul(each));
        let costs = [
            ("--max-connections", self.connections, cost(self.connections, connection)),
            ("--max-in-flight", self.in_flight, cost(self.in_flight, REQUEST_BYTES)),
            ("--max-waiters", self.waiters, cost(self.waiters, WAITER_BYTES)),
        ];
        let pools = self.pools().map(|(_, bytes)| bytes.as_u64());
        let fixed = BASE_BYTES + pools.iter().sum::<u64>();
        let sum = costs.iter().fold(fixed, |sum, (_, _, cost)| sum.saturating_add(cost.as_u64()));
        (costs, ByteSize::b(sum))
    }

    /// The limits that are a number of bytes themselves. One is 0 if the process has no use for it.
    pub fn pools(&self) -> [(&'static str, ByteSize); 6] {
        [
            ("unread events", self.events),
            ("watched locks", self.watched),
            ("pending releases", self.releases),
            ("unread answers", self.large_answers),
            ("header tables", self.header_tables),
            ("locks", self.locks),
        ]
        .map(|(what, bytes)| (what, ByteSize::b(bytes)))
    }

    /// A description of the limits if they may cost more than the budget, or `None`.
    pub fn excess(&self) -> Option<String> {
        let (costs, sum) = self.costs();
        let budget = self.given.budget;
        let (dearest, _, _) = costs.iter().max_by_key(|(_, _, cost)| *cost)?;
        (sum > budget).then(|| {
            format!(
                "the limits may take {sum} of memory, and --memory-budget is {budget}: \
                 lower {dearest} or raise --memory-budget"
            )
        })
    }

    pub fn budget(&self) -> ByteSize {
        self.given.budget
    }
}

/// The budget that applies if none is given: 1 GiB, and at most three quarters of what the control
/// groups of this process may take. The rest is for the kernel's socket buffers, which count there too.
pub fn default_budget() -> ByteSize {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    budget_within(memory_limit(Path::new("/sys/fs/cgroup"), &groups))
}

fn budget_within(limit: Option<u64>) -> ByteSize {
    let most = limit.map_or(REFERENCE, |limit| (limit / 4 * 3).min(REFERENCE));
    ByteSize::b(most).max(SMALLEST)
}

/// The smallest limit of the groups that `groups` names, as `/proc/self/cgroup` does, and of the
/// groups around them (cgroups(7)). Version 1 has a hierarchy for memory alone.
fn memory_limit(root: &Path, groups: &str) -> Option<u64> {
    let limits = groups.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next()?, fields.next()?);
        let (hierarchy, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|it| it == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let around = Path::new(group.trim_start_matches('/')).ancestors();
        let limit = |group: &Path| {
            std::fs::read_to_string(hierarchy.join(group).join(file)).ok()?.trim().parse().ok()
        };
        around.filter_map(limit).min()
    });
    limits.min()
}

/// Raises the soft limit of open files to the hard limit, and returns the result. `None` means
/// unlimited.
pub fn descriptors() -> Option<u64> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If this fails, the old limit stays. The next line reads the limit that holds now.
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
            transport: Transport::Plain,
            embedded: false,
        }
    }

    #[test]
    fn the_default_budget_is_a_part_of_what_the_control_group_may_take() {
        let root = std::env::temp_dir().join(format!("redlock-cgroup-{}", std::process::id()));
        let write = |file: &str, text: &str| {
            let file = root.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        };
        let limit = |groups: &str| memory_limit(&root, groups);
        assert_eq!(limit("0::/system.slice/gateway.service\n"), None);
        write("system.slice/gateway.service/memory.max", "max\n");
        write("system.slice/memory.max", "536870912\n");
        write("memory/memory.limit_in_bytes", "9223372036854771712\n");
        write("memory/pod/memory.limit_in_bytes", "268435456\n");
        assert_eq!(limit("0::/system.slice/gateway.service\n"), Some(512 * MIB));
        assert_eq!(limit("8:pids:/\n4:memory:/pod/of-the-host\n0::/\n"), Some(256 * MIB));
        std::fs::remove_dir_all(&root).unwrap();
        for (limit, budget) in [
            (None, GIB),
            (Some(u64::MAX), GIB),
            (Some(GIB), 768 * MIB),
            (Some(16 * MIB), SMALLEST.as_u64()),
        ] {
            assert_eq!(budget_within(limit), ByteSize::b(budget));
        }
    }

    #[test]
    fn default_limits_fit_within_every_budget() {
        for budget in [SMALLEST.as_u64(), 100 * MIB, 512 * MIB, GIB, 10 * GIB, 1 << 50] {
            for transport in [Transport::Plain, Transport::Tls, Transport::Http2] {
                for embedded in [false, true] {
                    let capacity = Capacity::new(Given { transport, embedded, ..given(budget) });
                    assert_eq!(capacity.excess(), None, "{capacity:?}");
                    assert_eq!(capacity.locks > 0, embedded);
                }
            }
        }
        for (transport, expected) in [
            (Transport::Plain, (16_000, 10_000, 4096)),
            (Transport::Tls, (11_000, 6_875, 4096)),
            (Transport::Http2, (7_200, 4_500, 4096)),
        ] {
            let Capacity { connections, waiters, in_flight, .. } =
                Capacity::new(Given { transport, ..given(GIB) });
            assert_eq!((connections, waiters, in_flight), expected);
        }
    }

    #[test]
    fn excess_over_the_budget_names_the_dearest_limit() {
        let capacity = Capacity::new(Given { connections: Some(100_000), ..given(GIB) });
        let excess = capacity.excess().unwrap();
        assert!(excess.contains("--max-connections") && excess.contains("1.0 GiB"), "{excess}");
    }

    #[test]
    fn few_descriptors_lower_the_connections_only() {
        let capacity = Capacity::new(given(GIB));
        let few = capacity.within(256, 5, 80).unwrap();
        assert_eq!((few.connections, few.waiters, few.in_flight), (88, 55, 4096));
        assert_eq!(capacity.within(20_000, 5, 80).unwrap().connections, 16_000);
        assert!(capacity.within(128, 5, 80).unwrap_err().to_string().contains("168 are kept"));
        let asked =
            Capacity::new(Given { waiters: Some(200), ..given(GIB) }).within(256, 5, 80).unwrap();
        assert_eq!(asked.waiters, 200, "an explicit setting stays");
    }
}
