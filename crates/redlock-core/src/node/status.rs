//! What a node is doing, why, and what can be done about it.

use std::fmt;
use std::time::Duration;

/// What a node is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NodeState {
    /// It votes, unless its clock is off, and stores every lock that a majority of the others stores.
    Admitted,
    /// It votes, unless its clock is off. Locks that were granted while it was away are still being set on it, so the next
    /// master must not be restarted yet.
    CatchingUp,
    /// It lost its memory of locks and waits until none of them can still live.
    Quarantined,
    /// No usable connection; being retried.
    Connecting,
    /// Reached, but its configuration makes it ineligible; looked at again from time to time.
    Refused,
}

impl NodeState {
    /// Every state, for metrics that have a series for each.
    pub const ALL: [Self; 5] =
        [Self::Admitted, Self::CatchingUp, Self::Quarantined, Self::Connecting, Self::Refused];

    /// Whether the node takes lock operations.
    pub fn is_admitted(self) -> bool {
        matches!(self, Self::Admitted | Self::CatchingUp)
    }

    /// A word for metrics and answers.
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

/// Who runs the rules of locks on a master. The rules are the same, and so are their answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// A script.
    Lua,
    /// The module that is loaded there; faster.
    Native,
}

impl Engine {
    /// A word for answers.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lua => "lua",
            Self::Native => "native",
        }
    }
}

/// What a node is doing and why, for operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeStatus {
    /// What it is doing.
    pub state: NodeState,
    /// Since when, in microseconds since 1970 by the gateway's wall clock.
    pub since_micros: u64,
    /// Until when at the latest, if that is known: the end of a quarantine.
    pub until_micros: Option<u64>,
    /// Why, in a sentence; empty when there is nothing to explain.
    pub detail: String,
    /// What an operator can do, where there is anything.
    pub remedy: Option<Remedy>,
    /// The marker that stands on it, as it was seen last: of its quarantine, or the one by which it votes.
    pub marker: String,
    /// Whether it is quarantined as a node of a cluster that an operator calls brand-new.
    pub is_bootstrapping: bool,
    /// Who runs the rules of locks on it, as it was when it last came to voting.
    pub engine: Option<Engine>,
    /// Whether its clock and this machine's differ by more than D: then it refuses our fencing tokens.
    pub clock_is_off: bool,
    /// Whether it takes no writes: then it grants no locks.
    pub refuses_writes: bool,
    /// How many times it was looked at in quarantine.
    pub looks: u64,
    /// How many times a restart was seen.
    pub restarts: u64,
    /// Keys it has evicted, as it reported last; anything but zero means that locks may be lost.
    pub evicted_keys: u64,
    /// Its memory, as it reported last; `None` when it has not reported any.
    pub memory: Option<NodeMemory>,
}

/// How much memory a node uses, and how much it may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeMemory {
    /// Bytes in use.
    pub used: u64,
    /// Bytes that may be in use; 0 when the node sets no bound.
    pub max: u64,
    /// When the node was asked, by the monotonic clock of this process.
    pub asked: Duration,
}

impl NodeStatus {
    /// A node in a state of which nothing else is known.
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
            looks: 0,
            restarts: 0,
            evicted_keys: 0,
            memory: None,
        }
    }

    /// Enters a state for a reason. What belonged to the state before is lost.
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

    /// Whether it refuses writes for want of memory.
    pub fn is_out_of_memory(&self) -> bool {
        self.refuses_writes && self.remedy == Some(Remedy::RaiseMaxMemory)
    }

    /// Whether it can be expected to grant locks.
    pub fn votes(&self) -> bool {
        self.state.is_admitted() && !self.clock_is_off && !self.refuses_writes
    }
}

/// Why a node does not vote, and what an operator can do about it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Diagnosis {
    /// One sentence; empty when there is nothing to explain.
    pub reason: String,
    /// What can be done, where there is anything.
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

/// What an operator can do about a node that does not vote. Its text speaks of settings in general; a host that has flags
/// for them words it better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Remedy {
    /// The node votes. The next master must not be restarted before this one has caught up.
    WaitBeforeTheNext,
    /// The quarantine ends by itself.
    Wait,
    /// The same, and an operator may say that the cluster is brand-new.
    WaitOrBootstrap,
    /// The same, and with durable settings the next restart takes seconds.
    WaitThenMakeDurable,
    /// The same, and evictions have to end.
    WaitWithoutEvictions,
    /// The same, and its clock has to be steady.
    WaitWithSteadyClock,
    /// The same, and a master's earlier process has to be stopped before another one reads its file.
    WaitWithOneProcess,
    /// A brand-new cluster is admitted when all nodes are seen to be new.
    ReachAllNodes,
    /// INFO is forbidden.
    AllowInfo,
    /// Some command that locks need is forbidden.
    AllowCommands,
    /// The node wants other credentials.
    GiveCredentials,
    /// The server is older than what the scripts need.
    UpgradeRedis,
    /// A replica can be made a master.
    MakeMaster,
    /// The node may evict keys.
    ForbidEvictions,
    /// The node has no memory left.
    RaiseMaxMemory,
    /// The server cannot write to its disk.
    MendDisk,
    /// The server takes no writes without replicas.
    WantNoReplicas,
    /// Another program uses the key of the marker.
    ChangeKeyPrefix,
    /// Two names lead to one process, or nodes have changed places.
    NameEachNodeOnce,
    /// Another gateway of the cluster uses another database of this node.
    UseOneDatabase,
    /// The marker is of another configuration.
    Reconfigure,
    /// Processes disagree about the node.
    ReadOtherLogs,
    /// The node's clock and this machine's differ.
    MendClock,
    /// Hints cannot be heard or said.
    AllowHints,
    /// One side speaks TLS and the other does not.
    MatchTls,
    /// The node's certificate is not trusted, not valid now or for another host.
    TrustNodeCertificate,
    /// The node wants to see a certificate.
    GiveClientCertificate,
    /// The node does not know the authority of the certificate that it was shown.
    TrustClientAuthority,
    /// The node does not accept the certificate that it was shown.
    ReplaceClientCertificate,
    /// The certificate that the node was shown has expired.
    RenewClientCertificate,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Wait => "wait",
            Self::WaitBeforeTheNext => "restart no other master before it has caught up",
            Self::WaitOrBootstrap => {
                "wait (a brand-new cluster need not, if its first process is \
                 told so)"
            }
            Self::WaitThenMakeDurable => {
                "wait; with appendonly yes, appendfsync always and no-appendfsync-on-rewrite no the next restart takes 3 s"
            }
            Self::WaitWithoutEvictions => "wait; keep maxmemory-policy at noeviction",
            Self::WaitWithSteadyClock => {
                "wait; keep its clock from jumping and running fast (chrony: maxslewrate at most 5000, makestep at start only)"
            }
            Self::WaitWithOneProcess => {
                "wait; stop a node's earlier process before another one loads its append-only file"
            }
            Self::ReachAllNodes => "all nodes are admitted at once when every one of them answers and is new",
            Self::AllowInfo => "allow INFO for the user of this connection",
            Self::AllowCommands => {
                "allow the user of this connection EVAL, EVALSHA, SCRIPT LOAD, GET, SET, DEL, PTTL, PEXPIRE, TIME, SCAN, INFO \
                 and, on another database than 0, SELECT"
            }
            Self::GiveCredentials => "give user and password in the node's URL",
            Self::UpgradeRedis => "install Redis 7.0 or newer",
            Self::MakeMaster => "REPLICAOF NO ONE makes it a master",
            Self::ForbidEvictions => "CONFIG SET maxmemory-policy noeviction",
            Self::RaiseMaxMemory => "raise maxmemory",
            Self::MendDisk => "look into the server's log: it cannot write to its disk",
            Self::WantNoReplicas => "CONFIG SET min-replicas-to-write 0",
            Self::ChangeKeyPrefix => "another program uses the key of the marker: choose another key prefix",
            Self::NameEachNodeOnce => {
                "give every master once; with a cluster name, list the nodes in the same order everywhere; after an intended \
                 change reconfigure the nodes"
            }
            Self::UseOneDatabase => {
                "give every gateway the same database; to move the cluster to another one, stop all gateways, wait for the \
                 longest TTL and delete that key from database 0 of every node"
            }
            Self::Reconfigure => "after an intended change reconfigure the nodes",
            Self::ReadOtherLogs => "look at the other gateways' logs",
            Self::MendClock => "mend the clock that is wrong",
            Self::AllowHints => "allow the user of this connection SUBSCRIBE and PUBLISH on the channel of hints",
            Self::MatchTls => "use rediss:// where the node speaks TLS, and redis:// where it does not",
            Self::TrustNodeCertificate => {
                "the node's certificate must come from a trusted authority, be valid now and name the node's host"
            }
            Self::GiveClientCertificate => "the node wants a certificate: give it one, with its key",
            Self::TrustClientAuthority => "the node does not know the authority that our certificate comes from",
            Self::ReplaceClientCertificate => "the node does not accept our certificate",
            Self::RenewClientCertificate => "renew the certificate that the node is shown",
        })
    }
}
