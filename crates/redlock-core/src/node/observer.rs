//! What the core takes from its surroundings, and what it lets them measure.

use std::sync::Arc;
use std::time::Duration;

use super::op::{Op, Vote};
use super::status::NodeStatus;
use crate::model::clock::{Clock, Entropy, OsEntropy, SystemClock};

/// What the algorithm takes from its surroundings, to be replaced in tests and simulations.
#[derive(Clone)]
pub struct Env {
    /// Measures leases and mints fencing tokens.
    pub clock: Arc<dyn Clock>,
    /// Draws owners, and the random part of backoff.
    pub entropy: Arc<dyn Entropy>,
    /// Hears of every vote, for metrics.
    pub observer: Arc<dyn Observer>,
}

impl Default for Env {
    /// The machine's clocks and generator; nothing is measured.
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            entropy: Arc::new(OsEntropy),
            observer: Arc::new(NoObserver),
        }
    }
}

/// What the core lets its host measure. All methods are called on hot paths: they must not block.
pub trait Observer: Send + Sync + 'static {
    /// A node answered one call that carried `operations` operations.
    fn node_call(&self, node: &str, operations: usize, elapsed: Duration);
    /// A node's clock was compared with ours; positive when the node is ahead.
    fn clock_offset(&self, node: &str, offset_micros: i64);
    /// A node has another status, or another reason for it.
    fn node_status(&self, _node: &str, _status: &NodeStatus) {}
    /// A node voted in a round.
    fn vote(&self, node: usize, vote: &Vote);
    /// A release could not be delivered and was given up: the lock's TTL now bounds what is left on that node.
    fn release_abandoned(&self, node: usize);
    /// A lock that a node had lost was set there again.
    fn repaired(&self, node: usize);
    /// A node stores a fence so far ahead of our wall clock that no token of ours can pass it yet: whoever asks for that lock
    /// here has to wait until the clock has come near.
    fn fence_out_of_reach(&self, _ahead: Duration) {}
    /// Somebody who waited has got the lock from one who released it.
    fn handed_over(&self, kind: HandoffRoute);
    /// A round begins, on behalf of whatever runs now; what is given back hears how it goes on.
    fn round(&self, _op: &Op) -> Option<Box<dyn RoundTrace>> {
        None
    }
}

/// Hears of one round, for traces. Like [`Observer`], on hot paths.
pub trait RoundTrace: Send + Sync + 'static {
    /// The question goes to a node, known by its place.
    fn asked(&self, node: usize);
    /// The node has answered, maybe after the decision. One that never answers is not told of.
    fn voted(&self, node: usize, vote: &Vote);
    /// What came of it: `yes`, `no`, `neither` (no majority of either can come together any more) or `timeout`.
    fn decided(&self, decision: &'static str);
}

/// How a lock came from one who released it to one who waited for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoffRoute {
    /// Within this process: in one round trip, or one more when the waiter was just asking by itself.
    Local,
    /// By a hint from another process.
    Remote,
}

/// Measures nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn node_call(&self, _: &str, _: usize, _: Duration) {}
    fn clock_offset(&self, _: &str, _: i64) {}
    fn vote(&self, _: usize, _: &Vote) {}
    fn release_abandoned(&self, _: usize) {}
    fn repaired(&self, _: usize) {}
    fn handed_over(&self, _: HandoffRoute) {}
}
