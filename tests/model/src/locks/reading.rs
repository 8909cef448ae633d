//! What a reading of the other nodes has come to, see [`super::catch_up`].

use crate::node::Lock;

/// How far a reading has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Reading {
    Unbegun,
    /// Of this grant: its longest life, and marked if one copy is.
    Of(Lock),
    Over,
}

/// The part of a node in a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum CatchUp {
    None,
    /// It is read for this node.
    Target,
    /// This node has shown the grant.
    Seen,
    /// A repair is on its way to this node.
    Sent(Lock),
    /// The repair of this grant was granted, and the lock stands.
    Given(Lock),
}
