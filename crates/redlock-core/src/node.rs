//! The seam between the algorithm and one master: an [`Op`] goes in, a [`Vote`] comes out.
//!
//! A node knows nothing of the other nodes, of quorum, of TTL policy or of retries. It promises three things:
//!
//! 1. *Order*: operations submitted one after the other take effect in that order, or not at all. So a release never
//!    overtakes its own acquire.
//! 2. *One vote each*: every submitted operation is answered exactly once, if only with [`Vote::Failed`]; `submit` itself
//!    never waits.
//! 3. *Honesty about effects*: [`Effect::None`] is said only when the node cannot have run the operation, now or later.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | `op`, `record` | what is asked and answered; what is stored | how it travels |
//! | [`codec`] | a call and its answer as bytes | who carries them |
//! | `hint` | what gateways tell each other | who hears it |
//! | `observer` | what is measured, and what is taken from outside | what comes of it |
//! | `task` | an operation on its way, and the way back of its vote | who votes |
//! | `status` | what a node is doing, why, and what can be done about it | flags |
//! | [`rules`] | the rules of one node, over a small key space | where the keys are |
//! | [`memory`] | that key space in this process | |
//! | [`eligibility`] | whether a master may vote: facts and marker in, one step out | connections, time |
//! | `clock_drift` | whether a master's clock runs ahead of ours | whose fault it is |
//! | `node_registry` | what the workers of one gateway know of each other: processes, clocks | what follows from it |
//! | `calls` | what waits to be sent, and what is under way | what is said beside it |
//! | `driver` | what the worker of a master does next: events in, actions out, one deadline | tasks, sockets, Redis |
//! | `report` | what operators are told of a master | what it is told |
//! | [`link`] | the seam to one connection | what is said on it, and when |
//! | [`worker`] | runs a driver on a link | what to do |
//! | `reader` | the connection of listings | what is listed |
//! | `hints` | the second connection, which hears other processes | what they say |
//! | [`redis`] | the link to a real master | when it is used |
//! | [`probe`] | one master as an operator's command talks to it | workers, other masters |

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
    /// `host:port` or another name that is fit for logs and metrics; never a password.
    fn name(&self) -> &str;

    /// Whether it may vote, and why not.
    fn status(&self) -> watch::Receiver<NodeStatus>;

    /// The longest TTL that its quarantine covers, if it has one: that of the locks has to be the same.
    fn max_ttl(&self) -> Option<Duration> {
        None
    }

    /// Takes an operation; the vote goes to `reply`, at once or later. Operations that the node has not begun by
    /// `not_after` may be answered `Failed` without being run.
    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply);

    /// Takes two operations that are to run one right after the other, in one call where there are calls.
    fn submit_both(&self, first: Task, second: Task) {
        self.submit(first.op, first.not_after, first.reply);
        self.submit(second.op, second.not_after, second.reply);
    }

    /// From now on `listener` hears what others have this node say, beside those that listen already. By default nobody
    /// else can say anything.
    fn listen(&self, listener: Weak<dyn Listener>) {
        let _ = listener;
    }

    /// Whether listeners would hear it now.
    fn is_subscribed(&self) -> bool {
        true
    }

    /// All nodes were looked at, and the cluster is brand-new: a node that is quarantined as new is admitted at once.
    /// Does nothing to any other node.
    fn confirm_bootstrap(&self) {}

    /// What is stored on it.
    fn reader(&self) -> &dyn LockReader;

    /// The way to it, for what is no lock operation; `None` for a node of this process.
    fn link(&self) -> Option<Arc<dyn Link>> {
        None
    }

    /// It was given back all that counts of what it had lost, while this marker of its quarantine stood: it need not
    /// wait any longer.
    fn recovered(&self, marker: &str) {
        let _ = marker;
    }
}

/// Reads what a node stores, for listings. Not a lock operation: it goes beside them, and no vote waits for it in a queue.
/// Only a node that is admitted is read.
pub trait LockReader: Send + Sync {
    /// A page of the keys of locks; of fewer keys than asked for where those would take the node too long.
    fn scan(&self, scan: Scan) -> BoxFuture<'_, Result<Scanned, Failure>>;

    /// What is stored of these locks, as votes on an [`Op::Inspect`] of each.
    fn read(&self, locks: Vec<Keys>) -> BoxFuture<'_, Result<Vec<Vote>, Failure>>;
}

/// Hears what other processes say through a node. A hint may be lost, repeated or late: nothing may rest on it.
pub trait Listener: Send + Sync {
    /// Called for every hint, one's own included. Must not block.
    fn hear(&self, hint: &Hint);
}
