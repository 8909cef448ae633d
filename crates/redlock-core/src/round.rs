//! One question to all nodes: submitted to every node before anything can return, answered at the deciding vote or at
//! the time limit. The round outlives whoever asked: late votes still arrive here.
//!
//! One object serves all nodes of a round, with one wake-up at the deciding vote.

pub(crate) mod pending_releases;
pub(crate) mod times;
pub(crate) mod votes;

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::time::Instant;

use self::pending_releases::PendingReleases;
use crate::model::quorum::{Decision, Quorum, Tally};
use crate::node::{
    Effect, Failure, Node, Observer, Op, Reason, Reply, RoundTrace, Task, Vote, Voter,
};

pub(crate) struct Round {
    quorum: Quorum,
    op: Arc<Op>,
    /// How long the answer is waited for, and until when that is.
    limit: Duration,
    deadline: Instant,
    /// When a node need not begin any more.
    not_after: Instant,
    observer: Arc<dyn Observer>,
    trace: Option<Box<dyn RoundTrace>>,
    /// Where a release that a node failed to answer is kept for another try.
    pending: Option<Arc<PendingReleases>>,
    /// Whether a release is also owed where its T is too far ahead for now.
    owe_clock: bool,
    when_missing: Option<Arc<dyn WhenMissing>>,
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
    pending: Arc<PendingReleases>,
}

/// What is done for nodes that have no such lock, once a majority has said yes.
pub(crate) trait WhenMissing: Send + Sync {
    /// `nodes` have nothing, `witness` is part of the majority. May be called again for votes that come later.
    fn missing(self: Arc<Self>, nodes: Vec<usize>, witness: usize);
}

/// Whether a vote says that an acquire may have set something.
fn may_have_granted(vote: &Vote) -> bool {
    match vote {
        Vote::Granted => true,
        Vote::Failed(failure) => failure.effect == Effect::Possible,
        Vote::Held(_) | Vote::Yours(_) | Vote::Stale { .. } | Vote::Extended { .. } => false,
        Vote::Released | Vote::Missing | Vote::Found(_) => false,
    }
}

/// How a round ended.
pub(crate) struct RoundOutcome {
    pub(crate) decision: Decision,
    /// By node; `None` where the answer was not needed any more.
    pub(crate) votes: Vec<Option<Vote>>,
}

impl Round {
    /// A question that is not asked yet, to be answered within `limit` from now. Everything that is made here has to be asked.
    pub(crate) fn new(
        quorum: Quorum,
        op: Op,
        limit: Duration,
        observer: &Arc<dyn Observer>,
        when_missing: Option<Arc<dyn WhenMissing>>,
    ) -> Arc<Self> {
        Arc::new(Self {
            when_missing,
            ..Self::open(quorum, Arc::new(op), (limit, limit), observer)
        })
    }

    /// A release, to be answered within the first of two times and worth running within the second. What a node fails to
    /// answer is owed; with `owe_clock` also what it refuses for its T.
    pub(crate) fn release(
        quorum: Quorum,
        op: Arc<Op>,
        limits: (Duration, Duration),
        observer: &Arc<dyn Observer>,
        pending: &Arc<PendingReleases>,
        owe_clock: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            pending: Some(pending.clone()),
            owe_clock,
            ..Self::open(quorum, op, limits, observer)
        })
    }

    fn open(
        quorum: Quorum,
        op: Arc<Op>,
        (limit, life): (Duration, Duration),
        observer: &Arc<dyn Observer>,
    ) -> Self {
        let now = Instant::now();
        let ballot =
            Ballot { votes: vec![None; quorum.nodes()], decision: Decision::Open, undo: None };
        Self {
            quorum,
            trace: observer.round(&op),
            op,
            limit,
            deadline: now + limit,
            not_after: now + life,
            observer: observer.clone(),
            pending: None,
            owe_clock: false,
            when_missing: None,
            ballot: Mutex::new(ballot),
            decided: AtomicWaker::new(),
        }
    }

    /// Asks the nodes whose bit is set; the others count as open for ever.
    pub(crate) fn ask(self: &Arc<Self>, nodes: &[Arc<dyn Node>], mask: u32) {
        for (index, node) in nodes.iter().enumerate().filter(|(index, _)| mask & (1 << index) != 0)
        {
            let Task { op, not_after, reply } = self.task(index);
            node.submit(op, not_after, reply);
        }
    }

    /// Asks all nodes another question; those whose bit is set are asked this right before.
    pub(crate) fn ask_before(
        self: &Arc<Self>,
        nodes: &[Arc<dyn Node>],
        mask: u32,
        then: &Arc<Self>,
    ) {
        for (index, node) in nodes.iter().enumerate().filter(|(index, _)| mask & (1 << index) != 0)
        {
            node.submit_both(self.task(index), then.task(index));
        }
        then.ask(nodes, !mask);
    }

    fn task(self: &Arc<Self>, node: usize) -> Task {
        if let Some(trace) = &self.trace {
            trace.asked(node);
        }
        if let Some(pending) = &self.pending {
            pending.began();
        }
        Task {
            op: self.op.clone(),
            not_after: self.not_after,
            reply: Reply::new(self.clone(), node),
        }
    }

    /// Waits for the deciding vote, at most until the deadline. Nodes that have not answered by then are counted as timed
    /// out, which is "unknown" and not a refusal.
    pub(crate) async fn outcome(&self) -> RoundOutcome {
        let decision = std::future::poll_fn(|cx| {
            // Registered before looking, or a vote between the two would wake nobody.
            self.decided.register(cx.waker());
            match self.lock().decision {
                Decision::Open => Poll::Pending,
                decision => Poll::Ready(decision),
            }
        });
        let in_time = tokio::time::timeout_at(self.deadline, decision).await.ok();
        let ballot = self.lock();
        let mut votes = ballot.votes.clone();
        let decision = match in_time {
            Some(decision) => decision,
            None => {
                for vote in votes.iter_mut().filter(|vote| vote.is_none()) {
                    let detail = format!("no answer within {:?}", self.limit);
                    *vote =
                        Some(Vote::Failed(Failure::new(Reason::Timeout, Effect::Possible, detail)));
                }
                if let Some(trace) = &self.trace {
                    trace.decided("timeout");
                }
                match self.quorum.decide(tally(&self.op, &votes)) {
                    Decision::Open => Decision::Neither,
                    decision => decision,
                }
            }
        };
        RoundOutcome { decision, votes }
    }

    /// The votes when they are as wanted, or all in, or at the deadline; also those after the deciding one.
    pub(crate) async fn votes_until(
        &self,
        wanted: impl Fn(&[Option<Vote>]) -> bool,
    ) -> Vec<Option<Vote>> {
        let reached = std::future::poll_fn(|cx| {
            self.decided.register(cx.waker());
            let ballot = self.lock();
            let enough = wanted(&ballot.votes) || ballot.votes.iter().all(Option::is_some);
            if enough { Poll::Ready(()) } else { Poll::Pending }
        });
        let _ = tokio::time::timeout_at(self.deadline, reached).await;
        self.lock().votes.clone()
    }

    /// The nodes where an acquire was granted, or may have been, or may still be.
    pub(crate) fn touched(&self) -> u32 {
        let touched = |vote: &Option<Vote>| vote.as_ref().is_none_or(may_have_granted);
        self.lock()
            .votes
            .iter()
            .enumerate()
            .fold(0, |mask, (index, vote)| mask | u32::from(touched(vote)) << index)
    }

    /// From now on, undoes an acquire where it turns out to have been granted. Gives the nodes where it has already, or may
    /// have. A node that has not voted is waited for: a release that is sent ahead would leave its tombstone where nothing was
    /// set.
    pub(crate) fn abandon(&self, undo: Arc<Op>, pending: Arc<PendingReleases>) -> u32 {
        let mut ballot = self.lock();
        let mut due = 0;
        for (index, vote) in ballot.votes.iter().enumerate() {
            match vote {
                // Counted as under way until it has voted.
                None => pending.began(),
                Some(vote) => due |= u32::from(may_have_granted(vote)) << index,
            }
        }
        ballot.undo = Some(Abandoned { undo, pending });
        due
    }

    fn lock(&self) -> MutexGuard<'_, Ballot> {
        self.ballot.lock()
    }
}

impl Voter for Round {
    fn vote(&self, node: usize, vote: Vote) {
        self.observer.vote(node, &vote);
        if let Some(trace) = &self.trace {
            trace.voted(node, &vote);
        }
        if let Some(pending) = &self.pending {
            let owed = |reason| reason != Reason::Clock || self.owe_clock;
            let undone = !matches!(&vote, Vote::Failed(failure) if owed(failure.reason));
            pending.ended((!undone).then_some((node, &self.op)));
        }
        let mut ballot = self.lock();
        let undo = ballot.undo.as_ref().map(|abandoned| {
            (abandoned.pending.clone(), may_have_granted(&vote).then(|| abandoned.undo.clone()))
        });
        let missing = is_repairable(&vote);
        ballot.votes[node] = Some(vote);
        let was_open = ballot.decision == Decision::Open;
        if was_open {
            ballot.decision = self.quorum.decide(tally(&self.op, &ballot.votes));
        }
        let decision = ballot.decision;
        let decided = decision != Decision::Open;
        let lost = match &self.when_missing {
            Some(when_missing) if ballot.decision == Decision::Yes && (was_open || missing) => {
                let all = 0..ballot.votes.len();
                // At the decision for all that have no such lock; after it for each that comes in.
                let is_lost = |at: &usize| ballot.votes[*at].as_ref().is_some_and(is_repairable);
                let lost: Vec<usize> =
                    all.clone().filter(|at| is_lost(at) && (was_open || *at == node)).collect();
                let witness = all
                    .into_iter()
                    .find(|at| matches!(ballot.votes[*at], Some(Vote::Extended { .. })));
                witness
                    .filter(|_| !lost.is_empty())
                    .map(|witness| (when_missing.clone(), lost, witness))
            }
            _ => None,
        };
        drop(ballot);
        if let Some((pending, undo)) = undo {
            if let Some(undo) = undo {
                pending.release(node, undo);
            }
            pending.ended(None);
        }
        if let (Some(word), Some(trace), true) = (decision.word(), &self.trace, was_open) {
            trace.decided(word);
        }
        if decided {
            // Also after the decision: somebody may still want to hear this node, see `votes_until`.
            self.decided.wake();
        }
        if let Some((when_missing, lost, witness)) = lost {
            when_missing.missing(lost, witness);
        }
    }
}

/// Whether a node that gave this vote on an extension can be given the lock: it stores none, or keeps it free.
fn is_repairable(vote: &Vote) -> bool {
    match vote {
        Vote::Missing => true,
        Vote::Held(holding) => holding.record.is_placeholder(),
        _ => false,
    }
}

/// Sorts votes into yes, no and neither.
pub(crate) fn tally(op: &Op, votes: &[Option<Vote>]) -> Tally {
    let mut tally = Tally::default();
    for vote in votes.iter().flatten() {
        match (op, vote) {
            (Op::Acquire { .. }, Vote::Granted)
            | (Op::Extend { .. }, Vote::Extended { .. })
            | (Op::Release { .. }, Vote::Released) => tally.yes += 1,
            (Op::Acquire { .. }, Vote::Held(_))
            | (Op::Extend { .. } | Op::Release { .. }, Vote::Held(_) | Vote::Missing)
            | (Op::Inspect { .. }, Vote::Missing) => tally.no += 1,
            // The yes of an inspection is agreement among nodes: counted below.
            (Op::Inspect { .. }, Vote::Found(_)) => {}
            // Neither a stale T nor a lock of its own refuses an owner for good: see `acquire/attempt.rs`.
            (_, Vote::Failed(_) | Vote::Stale { .. } | Vote::Yours(_)) => tally.failed += 1,
            // An answer to another question.
            (_, Vote::Granted | Vote::Held(_) | Vote::Extended { .. }) => tally.failed += 1,
            (_, Vote::Released | Vote::Missing | Vote::Found(_)) => tally.failed += 1,
        }
    }
    if let Op::Inspect { .. } = op {
        let found = votes::found(votes).count();
        tally.yes = votes::agreeing(votes).map_or(0, |(_, count)| count);
        tally.failed += found - tally.yes;
    }
    tally
}
