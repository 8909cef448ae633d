//! The progress of a reading of the other nodes, see [`super::catch_up`].

use crate::node::Lock;

/// How far a reading has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Reading {
    Unbegun,
    /// This grant was read. It has the longest life of its copies, and the mark if one copy has it.
    Of(Lock),
    Over,
}

/// The part of a node in a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum CatchUp {
    None,
    /// The reading is for this node.
    Target,
    /// This node has returned the grant.
    Seen,
    /// A repair is on its way to this node.
    Sent(Lock),
    /// The repair of this grant was granted, and the lock stands.
    Given(Lock),
}
