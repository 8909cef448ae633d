//! What benchmarks measure and users must not reach. Behind the feature `bench-internals`.

pub use crate::node::redis::internals::{Call, Codec, Replies};
use crate::node::{Op, Vote};
use crate::quorum::Tally;

/// The votes of one round, counted.
pub fn tally(op: &Op, votes: &[Option<Vote>]) -> Tally {
    crate::round::tally(op, votes)
}
