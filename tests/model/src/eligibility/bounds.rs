//! How much may happen, and the model within these bounds.

use std::time::Duration;

use redlock_core::node::eligibility::{ClusterConfig, NodeIdentity};
use redlock_core::quorum::Quorum;

use crate::explore::First;
use crate::rules::Rules;

pub(super) const GATEWAYS: usize = 2;
/// Any time that is longer than all sets of leases.
pub(super) const QUARANTINE: Duration = Duration::from_secs(302);

/// How much may happen in one history.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Masters, all of which may fail.
    pub nodes: usize,
    /// What may happen to them: losses of data, restarts, evictions, changes of durability.
    pub faults: u8,
    /// Whether nodes may be restarted, empty or with a file.
    pub processes: bool,
    /// Whether nodes may evict keys.
    pub evictions: bool,
    /// Whether nodes may sync every write to disk, and begin or cease to.
    pub durability: bool,
    /// Whether the cluster is brand-new, and its first gateway, or both, are started with that word.
    pub bootstrap: bool,
    /// Restarts of gateways.
    pub restarts: u8,
    /// Whether a shorter `max_ttl` is introduced, which the second gateway has from the beginning.
    pub change: bool,
    /// Whether what is taken for granted of operators is so, see [`crate::eligibility`].
    pub is_operated_well: bool,
    /// Whether anything may happen between a look and the marker that it puts.
    pub every_order: bool,
}

impl Bounds {
    /// One node, losses of data and restarts.
    pub const LOSSES: Self = Self {
        nodes: 1,
        faults: 3,
        processes: true,
        evictions: false,
        durability: false,
        bootstrap: false,
        restarts: 0,
        change: false,
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
    /// A node's place in the old configuration and in the new one. All have the same, or they could not change places.
    identities: [NodeIdentity; 2],
    pub(super) firsts: [First; 6],
}

impl Eligibility {
    /// With these bounds.
    pub fn new(rules: Rules, bounds: Bounds) -> Self {
        let quorum = Quorum::new(bounds.nodes).expect("so many nodes are allowed");
        let identity = |max_ttl| {
            ClusterConfig::new("cluster", Duration::from_secs(max_ttl), Duration::ZERO)
                .identity("node")
        };
        let identities =
            [identity(300), identity(if rules.marker_names_configuration { 200 } else { 300 })];
        Self { rules, bounds, quorum, identities, firsts: Default::default() }
    }

    pub(super) fn identity(&self, is_new: bool) -> &NodeIdentity {
        &self.identities[usize::from(is_new)]
    }
}
