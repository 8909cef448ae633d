//! Inspect: shows a lock to people. No other operation depends on it.

use crate::error::{LockError, SlotHolder};
use crate::model::quorum::Decision;
use crate::model::types::LockName;
use crate::node::{Effect, Failure, Op, Reason, Vote};
use crate::operations::slots;
use crate::round::tally;
use crate::round::votes::LockState;
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
                | Vote::FoundOfSet(_)
                | Vote::Each(_),
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

/// Asks the nodes for their clocks. Returns an error unless a majority agrees with this machine's wall
/// clock.
pub(crate) async fn clock_contradiction(shared: &Shared, name: &LockName) -> Option<LockError> {
    let round = shared.inspect(shared.keys(name), shared.untimed_limits());
    // A node's status shows its clock before the round gets its vote.
    let agree = |votes: &[Option<Vote>]| {
        let answered =
            shared.nodes.iter().zip(votes).filter(|(_, vote)| {
                vote.as_ref().is_some_and(|vote| !matches!(vote, Vote::Failed(_)))
            });
        answered.filter(|(node, _)| !node.status().borrow().clock_is_off).count()
    };
    let outstanding = |votes: &[Option<Vote>]| votes.iter().filter(|vote| vote.is_none()).count();
    let quorum = shared.quorum.size();
    let is_clear = |votes: &[Option<Vote>]| {
        agree(votes) >= quorum || agree(votes) + outstanding(votes) < quorum
    };
    let outcome = round.outcome().await;
    let votes = round.votes_until(is_clear).await;
    if agree(&votes) >= quorum {
        return None;
    }
    let is_off = shared.nodes.iter().any(|node| node.status().borrow().clock_is_off);
    Some(LockError::Unknown(match is_off {
        true => shared.reports_of(Reason::Clock, "this machine's wall clock is wrong"),
        false => shared.reports(&outcome),
    }))
}
