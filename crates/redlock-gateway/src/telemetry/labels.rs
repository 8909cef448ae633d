//! Values of metric labels.

use redlock_core::node::{Failure, Reason, Vote};

/// The counted operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Acquire,
    Extend,
    Release,
    Inspect,
}

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutcomeLabel {
    Granted,
    Held,
    NoQuorum,
    Cancelled,
    Extended,
    Released,
    Lost,
    NotHolder,
    Unknown,
    Refused,
    Found,
    Free,
}

/// In the order of the enum.
pub(super) const OPERATIONS: [(Operation, &str); 4] = [
    (Operation::Acquire, "acquire"),
    (Operation::Extend, "extend"),
    (Operation::Release, "release"),
    (Operation::Inspect, "inspect"),
];

/// In the order of the enum.
pub(super) const OUTCOMES: [(OutcomeLabel, &str); 12] = [
    (OutcomeLabel::Granted, "granted"),
    (OutcomeLabel::Held, "held"),
    (OutcomeLabel::NoQuorum, "no_quorum"),
    (OutcomeLabel::Cancelled, "cancelled"),
    (OutcomeLabel::Extended, "extended"),
    (OutcomeLabel::Released, "released"),
    (OutcomeLabel::Lost, "lost"),
    (OutcomeLabel::NotHolder, "not_holder"),
    (OutcomeLabel::Unknown, "unknown"),
    (OutcomeLabel::Refused, "refused"),
    (OutcomeLabel::Found, "found"),
    (OutcomeLabel::Free, "free"),
];

/// The possible outcomes of an operation. Others are never exported for it.
pub(super) fn outcomes_of(operation: Operation) -> &'static [OutcomeLabel] {
    match operation {
        Operation::Acquire => &[
            OutcomeLabel::Granted,
            OutcomeLabel::Held,
            OutcomeLabel::NoQuorum,
            OutcomeLabel::Unknown,
            OutcomeLabel::Cancelled,
            OutcomeLabel::Refused,
        ],
        Operation::Extend => &[
            OutcomeLabel::Extended,
            OutcomeLabel::Lost,
            OutcomeLabel::NotHolder,
            OutcomeLabel::Unknown,
            OutcomeLabel::Refused,
        ],
        Operation::Release => &[
            OutcomeLabel::Released,
            OutcomeLabel::Lost,
            OutcomeLabel::NotHolder,
            OutcomeLabel::Unknown,
        ],
        Operation::Inspect => &[OutcomeLabel::Found, OutcomeLabel::Free, OutcomeLabel::Unknown],
    }
}

/// The words for all votes, in the order of [`vote_index`].
pub(super) fn vote_words() -> impl Iterator<Item = &'static str> {
    let answers = ["granted", "yours", "held", "stale", "extended", "released", "missing", "found"];
    answers.into_iter().chain(Reason::ALL.map(Reason::as_str))
}

pub(super) fn vote_index(vote: &Vote) -> usize {
    match vote {
        Vote::Granted => 0,
        Vote::Yours(_) => 1,
        Vote::Held(_) => 2,
        Vote::Stale { .. } => 3,
        Vote::Extended { .. } => 4,
        Vote::Released => 5,
        Vote::Missing => 6,
        Vote::FoundOfSet(stand) if stand.is_empty() => 6,
        Vote::Found(_) | Vote::FoundOfSet(_) => 7,
        // A round counts its votes one by one.
        Vote::Each(_) => 8 + Reason::Error as usize,
        Vote::Failed(Failure { reason, .. }) => 8 + *reason as usize,
    }
}

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WaitEnd {
    Granted,
    TimedOut,
    NoQuorum,
    Cancelled,
}

pub(super) const WAIT_ENDS: [(WaitEnd, &str); 4] = [
    (WaitEnd::Granted, "granted"),
    (WaitEnd::TimedOut, "timed_out"),
    (WaitEnd::NoQuorum, "no_quorum"),
    (WaitEnd::Cancelled, "cancelled"),
];

// Arrays are indexed by enum values, so they must be in the order of the enums.
const _: () = {
    let mut at = 0;
    while at < OUTCOMES.len() {
        assert!(OUTCOMES[at].0 as usize == at);
        assert!(at >= OPERATIONS.len() || OPERATIONS[at].0 as usize == at);
        assert!(at >= WAIT_ENDS.len() || WAIT_ENDS[at].0 as usize == at);
        assert!(at >= Reason::ALL.len() || Reason::ALL[at] as usize == at);
        at += 1;
    }
    assert!(
        OutcomeLabel::Free as usize + 1 == OUTCOMES.len()
            && Operation::Inspect as usize + 1 == OPERATIONS.len()
    );
};
