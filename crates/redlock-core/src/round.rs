//! One question to all nodes: submitted to every lane before anything can return, answered at the deciding vote or at
//! the time limit. The round outlives whoever asked: late votes still arrive here.
//!
//! One object serves all nodes of a round, with one wake-up at the deciding vote.

use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::time::Instant;

use crate::cleanup::Cleanup;
use crate::heal::Healing;
use crate::node::{Effect, Failure, Holding, Node, Observer, Op, Reason, Reply, Task, Vote, Voter};
use crate::quorum::{Decision, Quorum, Tally};

pub(crate) struct Round {
    quorum: Quorum,
    op: Arc<Op>,
    observer: Arc<dyn Observer>,
    /// Where a release that a node failed to answer is kept for another try.
    cleanup: Option<Arc<Cleanup>>,
    /// Whether a release is also owed where its T is too far ahead for now.
    owe_clock: bool,
    /// What sets the lock again on nodes that lost it, once an extension has its majority.
    healing: Option<Arc<Healing>>,
    ballot: Mutex<Ballot>,
    decided: AtomicWaker,
}

struct Ballot {
    votes: Vec<Option<Vote>>,
    decision: Decision,
    /// What undoes what still comes in, once nobody wants it.
    undo: Option<Abandoned>,
}

struct Abandoned {
    undo: Arc<Op>,
    cleanup: Arc<Cleanup>,
    scope: Scope,
}

/// Which votes of an abandoned acquire have to be undone.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Grants, and failures that may have been grants.
    All,
    /// Grants on nodes where the owner had no lock before.
    Fresh,
}

impl Scope {
    fn covers(self, vote: &Vote) -> bool {
        match vote {
            Vote::Granted => true,
            Vote::GrantedAgain => self == Self::All,
            Vote::Failed(failure) => self == Self::All && failure.effect == Effect::Possible,
            Vote::Held(_) | Vote::Stale { .. } | Vote::Extended => false,
            Vote::Released | Vote::Missing | Vote::Found(_) | Vote::Page { .. } => false,
        }
    }
}

/// How a round ended.
pub(crate) struct Outcome {
    pub(crate) decision: Decision,
    /// By node; `None` where the answer was not needed any more.
    pub(crate) votes: Vec<Option<Vote>>,
}

impl Round {
    /// A question that is not asked yet. Everything that is made here has to be asked.
    pub(crate) fn new(
        quorum: Quorum,
        op: Op,
        observer: &Arc<dyn Observer>,
        healing: Option<Arc<Healing>>,
    ) -> Arc<Self> {
        Arc::new(Self { healing, ..Self::open(quorum, Arc::new(op), observer) })
    }

    /// A release. What a node fails to answer is owed; with `owe_clock` also what it refuses for its T.
    pub(crate) fn release(
        quorum: Quorum,
        op: Arc<Op>,
        observer: &Arc<dyn Observer>,
        cleanup: &Arc<Cleanup>,
        owe_clock: bool,
    ) -> Arc<Self> {
        Arc::new(Self { cleanup: Some(cleanup.clone()), owe_clock, ..Self::open(quorum, op, observer) })
    }

    fn open(quorum: Quorum, op: Arc<Op>, observer: &Arc<dyn Observer>) -> Self {
        let ballot = Ballot { votes: vec![None; quorum.nodes()], decision: Decision::Open, undo: None };
        Self {
            quorum,
            op,
            observer: observer.clone(),
            cleanup: None,
            owe_clock: false,
            healing: None,
            ballot: Mutex::new(ballot),
            decided: AtomicWaker::new(),
        }
    }

    /// Asks the nodes whose bit is set; the others count as open for ever.
    pub(crate) fn ask(self: &Arc<Self>, nodes: &[Arc<dyn Node>], mask: u32, not_after: Instant) {
        for (index, node) in nodes.iter().enumerate().filter(|(index, _)| mask & (1 << index) != 0) {
            let Task { op, not_after, reply } = self.task(index, not_after);
            node.submit(op, not_after, reply);
        }
    }

    /// Asks all nodes this, and right after it another question.
    pub(crate) fn ask_both(
        self: &Arc<Self>,
        nodes: &[Arc<dyn Node>],
        not_after: Instant,
        (then, then_not_after): (&Arc<Self>, Instant),
    ) {
        for (index, node) in nodes.iter().enumerate() {
            node.submit_both(self.task(index, not_after), then.task(index, then_not_after));
        }
    }

    fn task(self: &Arc<Self>, node: usize, not_after: Instant) -> Task {
        if let Some(cleanup) = &self.cleanup {
            cleanup.began();
        }
        Task { op: self.op.clone(), not_after, reply: Reply::new(self.clone(), node) }
    }

    /// Waits for the deciding vote, at most until `deadline`. Nodes that have not answered by then are counted as timed
    /// out, which is "unknown" and not a refusal.
    pub(crate) async fn outcome(&self, deadline: Instant, limit: Duration) -> Outcome {
        let decision = std::future::poll_fn(|cx| {
            // Registered before looking, or a vote between the two would wake nobody.
            self.decided.register(cx.waker());
            match self.lock().decision {
                Decision::Open => Poll::Pending,
                decision => Poll::Ready(decision),
            }
        });
        let in_time = tokio::time::timeout_at(deadline, decision).await.ok();
        let ballot = self.lock();
        let mut votes = ballot.votes.clone();
        let decision = match in_time {
            Some(decision) => decision,
            None => {
                for vote in votes.iter_mut().filter(|vote| vote.is_none()) {
                    let detail = format!("no answer within {limit:?}");
                    *vote = Some(Vote::Failed(Failure::new(Reason::Timeout, Effect::Possible, detail)));
                }
                match self.quorum.decide(tally(&self.op, &votes)) {
                    Decision::Open => Decision::Neither,
                    decision => decision,
                }
            }
        };
        Outcome { decision, votes }
    }

    /// Whether one of the nodes whose bit is set found something. Their votes may come after the deciding one: waits for
    /// them, at most until `deadline`. To be called when the round is decided.
    pub(crate) async fn found_on(&self, mask: u32, deadline: Instant) -> bool {
        let among = |votes: &[Option<Vote>], is: fn(&Option<Vote>) -> bool| {
            votes.iter().enumerate().any(|(index, vote)| mask & (1 << index) != 0 && is(vote))
        };
        let found = |votes: &[Option<Vote>]| among(votes, |vote| matches!(vote, Some(Vote::Found(_))));
        let unheard = |votes: &[Option<Vote>]| among(votes, Option::is_none);
        found(&self.votes_until(deadline, |votes| found(votes) || !unheard(votes)).await)
    }

    /// The votes when they are as wanted, or all in, or at `deadline`; also those after the deciding one.
    pub(crate) async fn votes_until(
        &self,
        deadline: Instant,
        wanted: impl Fn(&[Option<Vote>]) -> bool,
    ) -> Vec<Option<Vote>> {
        let reached = std::future::poll_fn(|cx| {
            self.decided.register(cx.waker());
            let ballot = self.lock();
            let enough = wanted(&ballot.votes) || ballot.votes.iter().all(Option::is_some);
            if enough { Poll::Ready(()) } else { Poll::Pending }
        });
        let _ = tokio::time::timeout_at(deadline, reached).await;
        self.lock().votes.clone()
    }

    /// The nodes that have done, or may still do, what was asked.
    pub(crate) fn touched(&self) -> u32 {
        let ballot = self.lock();
        let mut mask = 0;
        for (index, vote) in ballot.votes.iter().enumerate() {
            let touched = match vote {
                None => true,
                Some(Vote::Failed(failure)) => failure.effect == Effect::Possible,
                Some(Vote::Granted | Vote::GrantedAgain | Vote::Extended | Vote::Released) => true,
                Some(Vote::Held(_) | Vote::Stale { .. } | Vote::Missing | Vote::Found(_) | Vote::Page { .. }) => false,
            };
            mask |= u32::from(touched) << index;
        }
        mask
    }

    /// The nodes that have given this vote so far.
    pub(crate) fn voted(&self, vote: &Vote) -> u32 {
        let ballot = self.lock();
        let given = |(index, found): (usize, &Option<Vote>)| u32::from(found.as_ref() == Some(vote)) << index;
        ballot.votes.iter().enumerate().map(given).sum()
    }

    /// From now on, undoes what comes in and is in scope. Answers the nodes where it has come in already. A node that has
    /// not voted is waited for: a release that is sent ahead would leave its barrier where nothing was set.
    pub(crate) fn abandon(&self, undo: Arc<Op>, cleanup: Arc<Cleanup>, scope: Scope) -> u32 {
        let mut ballot = self.lock();
        let mut due = 0;
        for (index, vote) in ballot.votes.iter().enumerate() {
            match vote {
                // Counted as under way until it has voted.
                None => cleanup.began(),
                Some(vote) => due |= u32::from(scope.covers(vote)) << index,
            }
        }
        ballot.undo = Some(Abandoned { undo, cleanup, scope });
        due
    }

    fn lock(&self) -> MutexGuard<'_, Ballot> {
        self.ballot.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Voter for Round {
    fn vote(&self, node: usize, vote: Vote) {
        self.observer.vote(node, &vote);
        if let Some(cleanup) = &self.cleanup {
            let owed = |reason| reason != Reason::Clock || self.owe_clock;
            let undone = !matches!(&vote, Vote::Failed(failure) if owed(failure.reason));
            cleanup.ended((!undone).then_some((node, &self.op)));
        }
        let mut ballot = self.lock();
        let undo = ballot.undo.as_ref().map(|abandoned| {
            (abandoned.cleanup.clone(), abandoned.scope.covers(&vote).then(|| abandoned.undo.clone()))
        });
        let missing = vote == Vote::Missing;
        ballot.votes[node] = Some(vote);
        let was_open = ballot.decision == Decision::Open;
        if was_open {
            ballot.decision = self.quorum.decide(tally(&self.op, &ballot.votes));
        }
        let decided = ballot.decision != Decision::Open;
        let heal = match &self.healing {
            Some(healing) if ballot.decision == Decision::Yes && (was_open || missing) => {
                let is = |at: usize, vote: &Vote| ballot.votes[at].as_ref() == Some(vote);
                let all = 0..ballot.votes.len();
                // At the decision for all that have no such lock; after it for each that comes in.
                let lost: Vec<usize> =
                    all.clone().filter(|at| is(*at, &Vote::Missing) && (was_open || *at == node)).collect();
                let witness = all.into_iter().find(|at| is(*at, &Vote::Extended));
                witness.filter(|_| !lost.is_empty()).map(|witness| (healing, lost, witness))
            }
            _ => None,
        };
        drop(ballot);
        if let Some((cleanup, undo)) = undo {
            if let Some(undo) = undo {
                cleanup.release(node, undo);
            }
            cleanup.ended(None);
        }
        if decided {
            // Also after the decision: somebody may still want to hear this node, see `votes_until`.
            self.decided.wake();
        }
        if let Some((healing, lost, witness)) = heal {
            healing.heal(lost, witness);
        }
    }
}

/// Sorts votes into yes, no and neither.
pub(crate) fn tally(op: &Op, votes: &[Option<Vote>]) -> Tally {
    let mut tally = Tally::default();
    for vote in votes.iter().flatten() {
        match (op, vote) {
            (Op::Acquire { .. }, Vote::Granted | Vote::GrantedAgain)
            | (Op::Extend { .. }, Vote::Extended)
            | (Op::Release { .. }, Vote::Released) => tally.yes += 1,
            (Op::Acquire { .. }, Vote::Held(_))
            | (Op::Extend { .. } | Op::Release { .. }, Vote::Held(_) | Vote::Missing)
            | (Op::Inspect { .. }, Vote::Missing) => tally.no += 1,
            // The yes of an inspection is agreement among nodes: counted below.
            (Op::Inspect { .. }, Vote::Found(_)) => {}
            // A stale T is a refusal of this T, not of the lock: the caller tries again with a larger one.
            (_, Vote::Failed(_) | Vote::Stale { .. } | Vote::Page { .. }) => tally.failed += 1,
            // An answer to another question.
            (_, Vote::Granted | Vote::GrantedAgain | Vote::Held(_) | Vote::Extended) => tally.failed += 1,
            (_, Vote::Released | Vote::Missing | Vote::Found(_)) => tally.failed += 1,
        }
    }
    if let Op::Inspect { .. } = op {
        let found = votes.iter().flatten().filter(|vote| matches!(vote, Vote::Found(_))).count();
        tally.yes = agreeing(votes).map_or(0, |(_, count)| count);
        tally.failed += found - tally.yes;
    }
    tally
}

/// The holding that most nodes agree on, with their number. Nodes agree when they store the same owner, or the same
/// value of another client.
pub(crate) fn agreeing(votes: &[Option<Vote>]) -> Option<(&Holding, usize)> {
    // Every 409 comes by here: each record is read once, not once for every other.
    let mut holdings = Vec::with_capacity(votes.len());
    holdings.extend(votes.iter().flatten().filter_map(|vote| match vote {
        Vote::Found(holding) | Vote::Held(holding) => Some((holding, holder(holding))),
        _ => None,
    }));
    let agree = |(holding, by): &(_, Holder)| (*holding, holdings.iter().filter(|(_, other)| other == by).count());
    holdings.iter().map(agree).max_by_key(|(_, count)| *count)
}

/// Who holds a lock, as far as one node tells.
#[derive(PartialEq, Eq)]
enum Holder<'a> {
    /// One of ours, whatever the T.
    Owner(&'a [u8]),
    /// Another client, known by the value it has stored.
    Foreign(&'a [u8]),
}

fn holder(holding: &Holding) -> Holder<'_> {
    match holding.record.parse() {
        Some(_) => Holder::Owner(holding.record.owner_text()),
        None => Holder::Foreign(holding.record.as_bytes()),
    }
}

pub(crate) fn same_owner(a: &Holding, b: &Holding) -> bool {
    holder(a) == holder(b)
}
