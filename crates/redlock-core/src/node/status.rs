//! The status of a node: what it is doing, why, and what an operator can do.

use std::fmt;
use std::time::Duration;

/// The state of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NodeState {
    /// The node votes, unless its clock is off, and stores every lock that a majority of the others
    /// stores.
    Admitted,
    /// The node votes, unless its clock is off. Locks that were granted while it was away are still
    /// being set on it, so no other master may be restarted yet.
    CatchingUp,
    /// The node may have lost locks, and waits until none of them can still live.
    Quarantined,
    /// No usable connection; the worker retries.
    Connecting,
    /// Connected, but the node's configuration makes it ineligible. It is probed again every
    /// second.
    Refused,
}

impl NodeState {
    /// Every state, for metrics with a series for each.
    pub const ALL: [Self; 5] =
        [Self::Admitted, Self::CatchingUp, Self::Quarantined, Self::Connecting, Self::Refused];

    /// Whether the node takes lock operations.
    pub fn is_admitted(self) -> bool {
        matches!(self, Self::Admitted | Self::CatchingUp)
    }

    /// The name in metrics and answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Admitted => "admitted",
            Self::CatchingUp => "catching_up",
            Self::Quarantined => "quarantined",
            Self::Connecting => "connecting",
            Self::Refused => "refused",
        }
    }
}

/// Which program runs the lock rules on a master. Both programs give the same answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// The Lua script.
    Lua,
    /// The loaded module, which is faster.
    Native,
}

impl Engine {
    /// The name in answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lua => "lua",
            Self::Native => "native",
        }
    }
}

/// The status of a node, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStatus {
    /// The node's state.
    pub state: NodeState,
    /// The start of the state, in microseconds since 1970 by the gateway's wall clock.
    pub since_micros: u64,
    /// When the quarantine ends at the latest, in microseconds since 1970; `None` when unknown.
    pub until_micros: Option<u64>,
    /// The reason, in a sentence; empty when there is nothing to explain.
    pub detail: String,
    /// What an operator can do, if anything.
    pub remedy: Option<Remedy>,
    /// The marker of the node's admission or quarantine, as last seen; empty in other states.
    pub marker: String,
    /// Whether the node is quarantined as part of a cluster that an operator declared brand-new.
    pub is_bootstrapping: bool,
    /// Which program runs the lock rules there, as of the latest admission.
    pub engine: Option<Engine>,
    /// Whether the node's clock is too far from this machine's, or from our fencing tokens: then
    /// the node refuses our tokens.
    pub clock_is_off: bool,
    /// Whether the node refuses writes: then it grants no locks.
    pub refuses_writes: bool,
    /// How many times the node was probed in quarantine.
    pub probes: u64,
    /// How many restarts of the node this gateway has seen.
    pub restarts: u64,
    /// The number of keys that the node has evicted, as last reported. If it is above zero, locks
    /// may be lost.
    pub evicted_keys: u64,
    /// The node's memory, as last reported; `None` if the node reports none.
    pub memory: Option<NodeMemory>,
}

/// A node's memory use and limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeMemory {
    /// Bytes in use.
    pub used: u64,
    /// The limit of bytes; 0 when the node sets none.
    pub max: u64,
    /// When the node was asked for these numbers, on this process's monotonic clock.
    pub asked: Duration,
}

impl NodeStatus {
    /// A status with only a state.
    pub fn new(state: NodeState, since_micros: u64) -> Self {
        Self {
            state,
            since_micros,
            until_micros: None,
            detail: String::new(),
            remedy: None,
            marker: String::new(),
            is_bootstrapping: false,
            engine: None,
            clock_is_off: false,
            refuses_writes: false,
            probes: 0,
            restarts: 0,
            evicted_keys: 0,
            memory: None,
        }
    }

    /// Enters a state for a reason, and clears the fields of the earlier state.
    pub(crate) fn enter(&mut self, state: NodeState, diagnosis: &Diagnosis) {
        self.state = state;
        self.until_micros = None;
        self.marker.clear();
        self.is_bootstrapping = false;
        self.clock_is_off = false;
        self.refuses_writes = false;
        self.detail.clone_from(&diagnosis.reason);
        self.remedy = diagnosis.remedy;
    }

    /// Whether the node refuses writes for lack of memory.
    pub fn is_out_of_memory(&self) -> bool {
        self.refuses_writes && self.remedy == Some(Remedy::RaiseMaxMemory)
    }

    /// Whether the node should grant locks.
    pub fn votes(&self) -> bool {
        self.state.is_admitted() && !self.clock_is_off && !self.refuses_writes
    }
}

/// Why a node does not vote, and what an operator can do.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Diagnosis {
    /// One sentence; empty when there is nothing to explain.
    pub reason: String,
    /// What an operator can do, if anything.
    pub remedy: Option<Remedy>,
}

impl Diagnosis {
    pub(crate) fn new(reason: impl Into<String>, remedy: Remedy) -> Self {
        Self { reason: reason.into(), remedy: Some(remedy) }
    }

    pub(crate) fn without_remedy(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), remedy: None }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)?;
        self.remedy.map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
    }
}

/// What an operator can do about a node that does not vote. The text names settings of Redis and of
/// this crate. A host with flags should name its flags instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Remedy {
    /// The node votes, but no other master may be restarted before it has caught up.
    WaitBeforeTheNext,
    /// The quarantine ends by itself.
    Wait,
    /// The quarantine ends by itself. After its next restart a master with durable settings votes
    /// again within seconds.
    WaitThenMakeDurable,
    /// The quarantine ends by itself. Evictions must stop.
    WaitWithoutEvictions,
    /// The quarantine ends by itself. The node's clock must be steady.
    WaitWithSteadyClock,
    /// The quarantine ends by itself. A master's earlier process must stop before another one reads
    /// its file.
    WaitWithOneProcess,
    /// A brand-new cluster is admitted when all nodes have been probed and are new.
    ReachAllNodes,
    /// INFO is forbidden.
    AllowInfo,
    /// A command that locks need is forbidden.
    AllowCommands,
    /// The node requires other credentials.
    GiveCredentials,
    /// The server is older than the scripts need.
    UpgradeRedis,
    /// The node is a replica.
    MakeMaster,
    /// The node is in Cluster mode, and other nodes serve some of its keys.
    ServeAllSlots,
    /// The node may evict keys.
    ForbidEvictions,
    /// The node is out of memory.
    RaiseMaxMemory,
    /// The server cannot write to its disk.
    MendDisk,
    /// The server refuses writes while it has too few replicas.
    WantNoReplicas,
    /// Another program uses the key of the marker.
    ChangeKeyPrefix,
    /// Two names lead to one process, or nodes have changed places.
    NameEachNodeOnce,
    /// Another gateway of the cluster uses another database of this node.
    UseOneDatabase,
    /// The marker is of another node set.
    NameNodesAlike,
    /// The marker is of another configuration of this node set.
    Reconfigure,
    /// A change of the configuration has begun and has not ended.
    FinishChange,
    /// Several gateways or other programs disagree about the node's marker.
    ReadOtherLogs,
    /// The node's clock and this machine's differ.
    MendClock,
    /// Hints cannot be received or published.
    AllowHints,
    /// One side speaks TLS and the other does not.
    MatchTls,
    /// The node's certificate is not trusted, not valid now, or for another host.
    TrustNodeCertificate,
    /// The node requires a client certificate.
    GiveClientCertificate,
    /// The node does not trust the authority of our certificate.
    TrustClientAuthority,
    /// The node does not accept our certificate.
    ReplaceClientCertificate,
    /// Our certificate has expired.
    RenewClientCertificate,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wait => "wait",
            Self::WaitBeforeTheNext => "restart no other master before this one has caught up",
            Self::WaitThenMakeDurable => {
                "wait; with appendonly yes, appendfsync always and no-appendfsync-on-rewrite no \
                 the next restart takes 3 s"
            }
            Self::WaitWithoutEvictions => "wait; keep maxmemory-policy at noeviction",
            Self::WaitWithSteadyClock => {
                "wait; keep its clock from jumping and running fast (chrony: maxslewrate at most \
                 5000, makestep at start only)"
            }
            Self::WaitWithOneProcess => {
                "wait; stop a node's earlier process before another one loads its append-only file, and \
                 use a disk that keeps what it confirms"
            }
            Self::ReachAllNodes => {
                "all nodes are admitted at once when every one of them answers and is new"
            }
            Self::AllowInfo => "allow INFO for the user of this connection",
            Self::AllowCommands => {
                "allow the user of this connection EVAL, EVALSHA, SCRIPT LOAD, GET, SET, DEL, \
                 PTTL, PEXPIRE, TIME, SCAN, INFO \
                 and, on another database than 0, SELECT"
            }
            Self::GiveCredentials => "give user and password in the node's URL",
            Self::UpgradeRedis => "install Redis 7.0 or newer",
            Self::MakeMaster => "REPLICAOF NO ONE makes it a master",
            Self::ServeAllSlots => {
                "give every node a Redis of its own, without cluster-enabled yes"
            }
            Self::ForbidEvictions => "CONFIG SET maxmemory-policy noeviction",
            Self::RaiseMaxMemory => "raise maxmemory",
            Self::MendDisk => "look into the server's log: it cannot write to its disk",
            Self::WantNoReplicas => "CONFIG SET min-replicas-to-write 0",
            Self::ChangeKeyPrefix => {
                "another program uses the key of the marker: choose another key prefix"
            }
            Self::NameEachNodeOnce => {
                "give every master once; with a cluster name, list the nodes in the same order \
                 everywhere; after an intended \
                 change reconfigure the nodes"
            }
            Self::UseOneDatabase => {
                "give every gateway the same database; to move the cluster to another one, stop \
                 all gateways, wait for the \
                 longest TTL and delete that key from database 0 of every node"
            }
            Self::NameNodesAlike => {
                "give every gateway the same nodes, spelled alike, or the same cluster name; only \
                 after an intended change reconfigure the nodes"
            }
            Self::Reconfigure => {
                "give every gateway the same max_ttl and clock_skew; only after an intended change \
                 reconfigure the nodes"
            }
            Self::FinishChange => {
                "wait for the change to end; if it was interrupted, carry out the same change again"
            }
            Self::ReadOtherLogs => "look at the other gateways' logs",
            Self::MendClock => "repair the clock that is wrong",
            Self::AllowHints => {
                "allow the user of this connection SUBSCRIBE and PUBLISH on the channel of hints"
            }
            Self::MatchTls => {
                "use rediss:// where the node speaks TLS, and redis:// where it does not"
            }
            Self::TrustNodeCertificate => {
                "the node's certificate must come from a trusted authority, be valid now and name \
                 the node's host"
            }
            Self::GiveClientCertificate => {
                "the node requires a client certificate: configure one, with its key"
            }
            Self::TrustClientAuthority => {
                "the node does not trust the authority of our certificate"
            }
            Self::ReplaceClientCertificate => "the node does not accept our certificate",
            Self::RenewClientCertificate => "renew our client certificate",
        })
    }
}
