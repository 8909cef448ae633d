//! Inspect: shows a lock to people. No other operation depends on it.

use crate::error::{LockError, SlotHolder};
use crate::model::quorum::Decision;
use crate::model::types::LockName;
use crate::node::{Effect, Failure, Op, Reason, Vote};
use crate::operations::slots;
use crate::round::votes::{LockState, unheard};
use crate::round::{RoundOutcome, tally};
use crate::shared::Shared;

/// A lock as a majority sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inspection {
    /// The majority's view.
    pub state: LockState,
    /// The view of each node, by name.
    pub nodes: Vec<(String, NodeView)>,
    /// The holders of the slots, in their order; empty unless slots were asked for.
    pub holders: Vec<SlotHolder>,
    /// The slots of which too few nodes answered; empty unless slots were asked for.
    pub unknown_slots: Vec<u16>,
}

/// One node's view of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeView {
    /// The node stores somebody's lock.
    Held,
    /// The node stores no lock of this name.
    Free,
    /// The node did not answer, or answered with an error.
    Failed(Failure),
    /// The round was decided before the node answered.
    Pending,
}

impl NodeView {
    fn of(vote: Option<&Vote>) -> Self {
        match vote {
            None => Self::Pending,
            Some(Vote::Found(_) | Vote::Held(_) | Vote::Yours(_)) => Self::Held,
            Some(Vote::Missing) => Self::Free,
            Some(Vote::Failed(failure)) => Self::Failed(failure.clone()),
            Some(
                Vote::Granted
                | Vote::Stale { .. }
                | Vote::Extended { .. }
                | Vote::Released
                | Vote::FoundOfSet(_),
            ) => Self::Failed(Failure::new(
                Reason::Error,
                Effect::None,
                "an answer to another question",
            )),
        }
    }
}

pub(crate) async fn inspect(shared: &Shared, name: &LockName) -> Inspection {
    let outcome = shared.inspect(shared.keys(name), shared.untimed_limits()).outcome().await;
    seen(shared, outcome.decision, &outcome.votes, (Vec::new(), Vec::new()))
}

/// Reads the first `count` slots of a lock. The state is that of slot 1.
pub(crate) async fn inspect_slots(shared: &Shared, name: &LockName, count: u16) -> Inspection {
    let (votes, holders, unknown) = slots::holders(shared, name, count).await;
    let question = Op::Inspect { keys: shared.keys(name) };
    let decision = shared.quorum.decide(tally(&question, &votes));
    seen(shared, decision, &votes, (holders, unknown))
}

fn seen(
    shared: &Shared,
    decision: Decision,
    votes: &[Option<Vote>],
    (holders, unknown_slots): (Vec<SlotHolder>, Vec<u16>),
) -> Inspection {
    let views = votes.iter().map(|vote| NodeView::of(vote.as_ref()));
    let nodes = shared.names().zip(views).collect();
    let state = LockState::of(shared.quorum, decision, votes);
    Inspection { state, nodes, holders, unknown_slots }
}

/// The error if no majority of the nodes agrees with this machine's wall clock. Each answer shows the
/// node's clock.
pub(crate) async fn clock_contradiction(shared: &Shared, name: &LockName) -> Option<LockError> {
    let round = shared.inspect(shared.keys(name), shared.untimed_limits());
    let outcome = round.outcome().await;
    let votes = round.votes_until(|_| false).await;
    if votes.len() - unheard(&votes) < shared.quorum.size() {
        return Some(LockError::Unknown(shared.reports(&RoundOutcome { votes, ..outcome })));
    }
    shared.clock_contradiction()
}
