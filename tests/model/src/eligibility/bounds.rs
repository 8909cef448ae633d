//! The bounds of a history, and the model within them.

use std::time::Duration;

use redlock_core::node::eligibility::{ClusterConfig, NodeIdentity};
use redlock_core::quorum::Quorum;

use crate::explore::First;
use crate::rules::Rules;

pub(super) const GATEWAYS: usize = 2;
/// The length of a quarantine in this model. It is longer than every set of leases read as a number
/// of milliseconds (see "Time" in [`crate::eligibility`]).
pub(super) const QUARANTINE: Duration = Duration::from_secs(302);
/// How much longer a quarantine lasts by the raised bound.
pub(super) const RAISED_BY: Duration = Duration::from_secs(3_300);
/// The time of the first probe. Before it, no gateway has probed any node.
pub(super) const BEGINNING: Duration = Duration::from_secs(1);
const MAX_TTL: Duration = Duration::from_secs(300);

/// The bounds of one history.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Number of masters. Any of them may fail.
    pub nodes: usize,
    /// Number of faults: losses of data, restarts, evictions, changes of durability.
    pub faults: u8,
    /// Whether nodes may restart, empty or with a file.
    pub processes: bool,
    /// Whether nodes may evict keys.
    pub evictions: bool,
    /// Whether nodes may begin or cease to sync every write to disk.
    pub durability: bool,
    /// Whether the cluster is new, with `--bootstrap` on its first gateway or on both.
    pub bootstrap: bool,
    /// Number of gateway restarts.
    pub restarts: u8,
    /// Whether an operator introduces a shorter `max_ttl`. The second gateway has it from the
    /// beginning.
    pub change: bool,
    /// Whether an operator raises `max_ttl`. The second gateway has the larger one from the
    /// beginning.
    pub raise: bool,
    /// Whether operators keep the assumptions listed in [`crate::eligibility`].
    pub is_operated_well: bool,
    /// Whether other events may happen between a probe and the marker that it writes.
    pub every_order: bool,
}

impl Bounds {
    /// One node with losses of data and restarts.
    pub const LOSSES: Self = Self {
        nodes: 1,
        faults: 3,
        processes: true,
        evictions: false,
        durability: false,
        bootstrap: false,
        restarts: 0,
        change: false,
        raise: false,
        is_operated_well: true,
        every_order: false,
    };
}

/// The model.
#[derive(Debug)]
pub struct Eligibility {
    pub(super) rules: Rules,
    pub(super) bounds: Bounds,
    pub(super) quorum: Quorum,
    /// A node's identity in the old configuration and in the new one. All nodes share one identity,
    /// so that they are interchangeable.
    identities: [NodeIdentity; 2],
    pub(super) firsts: [First; 6],
}

impl Eligibility {
    pub fn new(rules: Rules, bounds: Bounds) -> Self {
        let quorum = Quorum::new(bounds.nodes).expect("the number of nodes is allowed");
        let identity =
            |max_ttl| ClusterConfig::new("cluster", max_ttl, Duration::ZERO).identity("node");
        let new = if bounds.raise {
            MAX_TTL + RAISED_BY
        } else if rules.marker_names_configuration {
            MAX_TTL - Duration::from_secs(100)
        } else {
            MAX_TTL
        };
        let identities = [identity(MAX_TTL), identity(new)];
        Self { rules, bounds, quorum, identities, firsts: Default::default() }
    }

    /// Whether a gateway has the smaller of the two `max_ttl`s.
    pub(super) fn has_shorter_ttl(&self, is_new: bool) -> bool {
        self.bounds.change && is_new || self.bounds.raise && !is_new
    }

    pub(super) fn identity(&self, is_new: bool) -> &NodeIdentity {
        &self.identities[usize::from(is_new)]
    }
}
