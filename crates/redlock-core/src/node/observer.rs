//! The core's environment (clock, randomness), and the measurements that the core reports.

use std::sync::Arc;
use std::time::Duration;

use super::op::{Op, Vote};
use super::status::NodeStatus;
use crate::model::clock::{Clock, Entropy, OsEntropy, SystemClock};

/// The environment of the algorithm; tests and simulations replace it.
#[derive(Clone)]
pub struct Env {
    /// Measures leases and mints fencing tokens.
    pub clock: Arc<dyn Clock>,
    /// Draws owners, nonces and the random part of a backoff.
    pub entropy: Arc<dyn Entropy>,
    /// Receives every vote, for metrics.
    pub observer: Arc<dyn Observer>,
}

impl Default for Env {
    /// The machine's clocks and random generator; no measurements.
    fn default() -> Self {
        Self {
            clock: Arc::new(SystemClock),
            entropy: Arc::new(OsEntropy),
            observer: Arc::new(NoObserver),
        }
    }
}

/// Measurements for the host. The core calls these methods on hot paths: they must not block.
pub trait Observer: Send + Sync + 'static {
    /// A node answered one call that carried `operations` operations.
    fn node_call(&self, node: &str, operations: usize, elapsed: Duration);
    /// The offset of a node's clock from ours, in microseconds; positive when the node is ahead.
    fn clock_offset(&self, node: &str, offset_micros: i64);
    /// A node's status changed, or the reason for it.
    fn node_status(&self, _node: &str, _status: &NodeStatus) {}
    /// A node voted in a round.
    fn vote(&self, node: usize, vote: &Vote);
    /// A release could not be delivered and was given up. The lock stays on that node until its TTL
    /// ends.
    fn release_abandoned(&self, node: usize);
    /// A lock that a node had lost was set there again.
    fn repaired(&self, node: usize);
    /// A node's watermark is so far ahead of our wall clock that no token of ours can pass it yet.
    /// Acquires of that lock through this gateway fail, or go on waiting, until our clock has come
    /// near the watermark.
    fn fence_out_of_reach(&self, _ahead: Duration) {}
    /// A waiter has got the lock from a holder that released it.
    fn handed_over(&self, kind: HandoffRoute);
    /// A round begins, in the context of the current task. The returned trace receives the round's
    /// progress.
    fn round(&self, _op: &Op) -> Option<Box<dyn RoundTrace>> {
        None
    }
}

/// Receives the progress of one round, for traces. Runs on hot paths, as [`Observer`] does.
pub trait RoundTrace: Send + Sync + 'static {
    /// The operation goes to a node, given by its index.
    fn asked(&self, node: usize);
    /// The node has answered, perhaps after the decision. A node that never answers has no call.
    fn voted(&self, node: usize, vote: &Vote);
    /// The decision: `yes`, `no`, `neither` (yes and no can no longer reach a majority) or
    /// `timeout`.
    fn decided(&self, decision: &'static str);
}

/// How a lock went from a holder that released it to a waiter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoffRoute {
    /// Within this process: in one round trip, or one more if the waiter had an attempt under way.
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
