//! An operation under way, and the return address of its vote.

use std::fmt;
use std::sync::Arc;

use tokio::time::Instant;

use super::op::{Effect, Failure, Op, Reason, Vote};

/// An operation with its deadline and return address, see [`Node::submit`](super::Node::submit).
#[derive(Debug)]
pub struct Task {
    /// The operation.
    pub op: Arc<Op>,
    /// After this moment the node may fail the operation without sending it.
    pub not_after: Instant,
    /// Where the vote goes.
    pub reply: Reply,
}

/// Receives the votes of one round.
pub trait Voter: Send + Sync {
    /// Delivers the vote of node number `node`. Called exactly once for each submitted [`Reply`].
    fn vote(&self, node: usize, vote: Vote);
}

/// The return address of one operation. If it is dropped without an answer, the vote is `Failed`
/// with a possible effect. So every operation gets a vote.
pub struct Reply {
    voter: Option<Arc<dyn Voter>>,
    node: usize,
}

impl Reply {
    /// A reply that reaches `voter` as node number `node`.
    pub fn new(voter: Arc<dyn Voter>, node: usize) -> Self {
        Self { voter: Some(voter), node }
    }

    /// A reply that goes nowhere, for an operation whose vote the caller reads from the answer to
    /// the call.
    pub(super) fn none() -> Self {
        Self { voter: None, node: 0 }
    }

    /// Delivers the vote.
    pub fn send(mut self, vote: Vote) {
        if let Some(voter) = self.voter.take() {
            voter.vote(self.node, vote);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(voter) = self.voter.take() {
            let failure = Failure::new(
                Reason::Down,
                Effect::Possible,
                "the node's task ended without an answer",
            );
            voter.vote(self.node, Vote::Failed(failure));
        }
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reply(node {})", self.node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_dropped_without_an_answer_still_votes() {
        struct Count(parking_lot::Mutex<Vec<(usize, Vote)>>);
        impl Voter for Count {
            fn vote(&self, node: usize, vote: Vote) {
                self.0.lock().push((node, vote));
            }
        }
        let voter = Arc::new(Count(Default::default()));
        drop(Reply::new(voter.clone(), 3));
        Reply::new(voter.clone(), 4).send(Vote::Granted);
        let votes = voter.0.lock();
        assert!(matches!(&votes[0], (3, Vote::Failed(Failure { effect: Effect::Possible, .. }))));
        assert_eq!(&votes[1..], &[(4, Vote::Granted)]);
    }
}
