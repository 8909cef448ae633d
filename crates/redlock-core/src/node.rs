//! The interface between the algorithm and one master: an [`Op`] goes in, a [`Vote`] comes out.
//!
//! A node knows nothing about other nodes, quorums, TTL policy and retries: these are its callers'
//! work. A node promises:
//!
//! 1. *Order*: operations on one lock that are submitted one after the other take effect in that
//!    order, or not at all. So the release of a grant never runs before the acquire that asked for
//!    the grant. Operations on other locks may pass an operation on a large set.
//! 2. *One vote each*: every submitted operation gets exactly one vote. If the node gave no usable
//!    answer, the vote is [`Vote::Failed`]. `submit` returns without waiting for the master.
//! 3. *Honesty about effects*: [`Effect::None`] means that the node cannot have run the operation
//!    and never will.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | `op`, `record` | operations and votes; stored values | how they travel |
//! | [`codec`] | a call and its answer as bytes | who carries them |
//! | `hint` | messages between gateways | who receives them |
//! | `observer` | measurements, and the environment (clock, randomness) | what follows from them |
//! | `task` | an operation under way, and where its vote goes | who votes |
//! | `status` | what a node is doing, why, and what an operator can do | flags |
//! | [`rules`] | the rules of one node, over a small key space | where the keys are |
//! | [`memory`] | a node whose key space is in this process | networks |
//! | [`eligibility`] | whether a master may vote: facts and marker in, one step out | connections, time |
//! | `clock_drift` | whether a master's clock runs ahead of ours | whose fault it is |
//! | `node_registry` | shared by one gateway's workers: each master's process and clock | what follows from it |
//! | `calls` | operations waiting to be sent, and calls under way | probes and markers |
//! | `driver` | a worker's next step: events in, actions out, one deadline | tasks, sockets, Redis |
//! | `report` | status, log and measurements of a master | why they change |
//! | [`link`] | the interface to one connection | what is sent, and when |
//! | [`worker`] | runs a driver on a link | what to do |
//! | `reader` | the connection for listings | what is listed |
//! | `hints` | the second connection, which receives hints | what they mean |
//! | [`redis`] | the link to a real master | when it is used |
//! | [`probe`] | one master, for an operator's command | workers, other masters |

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::watch;
use tokio::time::Instant;

mod calls;
mod clock_drift;
pub mod codec;
mod driver;
pub mod eligibility;
pub(crate) mod hint;
mod hints;
pub mod link;
pub mod memory;
mod node_registry;
mod observer;
mod op;
pub mod probe;
mod reader;
mod record;
#[cfg(feature = "redis")]
pub mod redis;
mod report;
pub mod rules;
mod status;
mod task;
pub mod worker;

pub use self::hint::Hint;
use self::link::{Link, Scan, Scanned};
pub use self::node_registry::NodeRegistry;
pub use self::observer::{Env, HandoffRoute, NoObserver, Observer, RoundTrace};
pub use self::op::{Effect, Failure, Holding, Keys, Op, Reason, ReleaseScope, Vote};
pub use self::record::Record;
pub use self::rules::{NodeSettings, SafetyRules};
pub use self::status::{Diagnosis, Engine, NodeMemory, NodeState, NodeStatus, Remedy};
pub use self::task::{Reply, Task, Voter};

/// One master, as a round sees it.
pub trait Node: Send + Sync + 'static {
    /// `host:port` or another name fit for logs and metrics; never a password.
    fn name(&self) -> &str;

    /// Whether the node may vote; if it may not, the status has the reason.
    fn status(&self) -> watch::Receiver<NodeStatus>;

    /// The longest TTL that the node's quarantine covers; `None` for a node that is never
    /// quarantined. The locks' own maximum TTL must be the same.
    fn max_ttl(&self) -> Option<Duration> {
        None
    }

    /// Takes an operation; the vote goes to `reply`, at once or later. The node may answer `Failed`
    /// to operations that it has not begun by `not_after`.
    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply);

    /// Takes several operations, and runs those on one lock in this order. A node that sends calls
    /// puts as many into one call as fit. Operations of other callers may run between two calls. By default,
    /// each operation is submitted on its own.
    fn submit_all(&self, tasks: Vec<Task>) {
        for Task { op, not_after, reply } in tasks {
            self.submit(op, not_after, reply);
        }
    }

    /// Adds a listener for the hints that other processes publish through this node. The default
    /// ignores the listener: it is for nodes inside this process, where no other process can
    /// publish.
    fn listen(&self, listener: Weak<dyn Listener>) {
        let _ = listener;
    }

    /// Whether hints reach the listeners now.
    fn is_subscribed(&self) -> bool {
        true
    }

    /// Reports that all nodes were probed and that the cluster is brand-new. A node quarantined as
    /// new is admitted at once; any other node ignores the call.
    fn confirm_bootstrap(&self) {}

    /// The reader of the locks that the node stores.
    fn reader(&self) -> &dyn LockReader;

    /// The link to the master, for requests that are no lock operations; `None` for a node in this
    /// process.
    fn link(&self) -> Option<Arc<dyn Link>> {
        None
    }

    /// Reports that recovery has set the lost locks on the master again, while this quarantine
    /// marker stood there. The node may end that quarantine now.
    fn recovered(&self, marker: &str) {
        let _ = marker;
    }
}

/// Reads what a node stores, for listings. Reads run beside lock operations, so no vote queues
/// behind them. Only an admitted node is read.
pub trait LockReader: Send + Sync {
    /// A page of lock keys. The page holds fewer keys than requested if reading more would occupy
    /// the node too long.
    fn scan(&self, scan: Scan) -> BoxFuture<'_, Result<Scanned, Failure>>;

    /// The stored values of these locks, as votes on an [`Op::Inspect`] of each.
    fn read(&self, locks: Vec<Keys>) -> BoxFuture<'_, Result<Vec<Vote>, Failure>>;
}

/// Receives hints from other processes through a node. A hint may be lost, repeated or late:
/// correctness must not depend on hints.
pub trait Listener: Send + Sync {
    /// Called for every hint, including those of this process. Must not block.
    fn on_hint(&self, hint: &Hint);
}
