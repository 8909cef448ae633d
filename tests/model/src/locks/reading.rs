//! The progress of a reading: a node that catches up reads the locks of the others, see
//! [`super::catch_up`].

use crate::node::Lock;

/// How far a reading has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Reading {
    Unbegun,
    /// At least one node has returned this grant. Its life is the longest of all copies. It has the
    /// mark of an extension if one copy has it.
    Of(Lock),
    Over,
}

/// A node's part in a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum CatchUp {
    None,
    /// The node that catches up: the reading is for it.
    Target,
    /// This node has returned the grant.
    Seen,
    /// The reading is complete, and a repair of this lock is on its way to the node.
    Sent(Lock),
    /// The repair was granted, and the lock still stands.
    Given(Lock),
}
