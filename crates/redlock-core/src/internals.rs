//! Internals that benchmarks measure and users must not reach. Behind the feature
//! `bench-internals`.

use bytes::Bytes;

use crate::model::quorum::Tally;
use crate::node::codec::{self, AnswerPacker};
use crate::node::{Op, Vote};

/// Counts the votes of one round.
pub fn tally(op: &Op, votes: &[Option<Vote>]) -> Tally {
    crate::round::tally(op, votes)
}

/// The answer of a node that gives these votes.
pub fn packed_answer(votes: &[Vote]) -> Bytes {
    let mut answer = AnswerPacker::new(1_763_725_165_123_456, true);
    votes.iter().for_each(|vote| answer.vote(vote));
    answer.finish().into()
}

/// The votes of an answer to this number of operations.
pub fn unpacked_answer(operations: usize, answer: Bytes) -> Option<Vec<Vote>> {
    codec::unpack_answer(operations, answer).map(|answer| answer.votes)
}
