//! A round: one question to all nodes, and their votes. The round submits the question to every
//! node before its asker waits for the first time, so cancelling the asker cannot leave a node out.
//! The outcome is known at the deciding vote or at the time limit.
//!
//! One object collects the votes of all nodes, and wakes the asker at the deciding vote. The object
//! outlives the asker, because late votes still arrive, and may have to be undone.

pub(crate) mod pending_releases;
pub(crate) mod repair;
pub(crate) mod times;
pub(crate) mod votes;

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use smallvec::SmallVec;
use tokio::time::Instant;

use self::pending_releases::{PendingReleases, ReleaseAccount};
use self::repair::{Began, Repair, Repairs};
use crate::model::quorum::{Decision, Quorum, Tally};
use crate::node::{
    Effect, Failure, Keys, Node, Observer, Op, Reason, Reply, RoundTrace, Task, Vote, Voter,
};

/// The limit of locks in one part of a large set. With the script, the release of a part takes a master
/// about 0.6 ms. Smaller parts cost the gateway more calls.
const MAX_PART: usize = 64;

/// How long the asker of a round waits for votes.
///
/// A few hung nodes must not delay a round, so the wait for them is short. While fewer nodes than a
/// quorum have answered, an early end could only be a failure. For example, all disks may be slow at
/// the same time. So the wait for a quorum is longer. Hung nodes do not hold up one request after
/// the other in this way: a node that leaves a call unanswered for about a second loses its
/// connection, and then fails at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RoundLimits {
    /// The wait for the other nodes, once a quorum has answered. It begins with the round, or with
    /// the last answer of the quorum if that comes later than this.
    pub(crate) rest: Duration,
    /// The wait for the answers of a quorum; at least `rest`.
    pub(crate) quorum: Duration,
}

pub(crate) struct Round {
    quorum: Quorum,
    op: Arc<Op>,
    limits: RoundLimits,
    began: Instant,
    /// A node must not begin the operation after this time.
    not_after: Instant,
    observer: Arc<dyn Observer>,
    trace: Option<Box<dyn RoundTrace>>,
    /// The queues of releases that failed on a node, and the account that counts those of this client.
    pending: Option<(Arc<PendingReleases>, ReleaseAccount)>,
    /// Whether a release is also retried on a node that refuses its T as too far ahead of the
    /// node's clock.
    owe_clock: bool,
    /// What repairs nodes that lost the lock, and when the extension began. `None` for other
    /// operations.
    repairs: Option<(Arc<Repairs>, Began)>,
    /// The rounds of the other locks, if nodes vote on each lock of a set. This round asks the nodes
    /// about the whole set, and counts the votes on the first lock. The other rounds ask nobody: each
    /// counts the votes on its own lock.
    others: Vec<Arc<Round>>,
    /// The questions about a large set, each about a part of it, see [`PreparedRound::in_parts`].
    /// Empty if one question is about the whole set.
    parts: Vec<Arc<Op>>,
    ballot: Mutex<Ballot>,
    decided: AtomicWaker,
}

struct Ballot {
    votes: Vec<Option<Vote>>,
    decision: Decision,
    /// When the asker stops waiting.
    deadline: Instant,
    /// Whether the asker waits for the answers of a quorum, beyond [`RoundLimits::rest`].
    is_late: bool,
    /// Undoes grants that arrive after the attempt was abandoned.
    undo: Option<Abandoned>,
    /// The repair of nodes that lost the lock. `None` until a vote shows such a node, which most
    /// rounds never see.
    repair: Option<Arc<Repair>>,
}

impl Ballot {
    /// How many nodes have answered. A failure is no answer.
    fn answers(&self) -> usize {
        let is_answer = |vote: &&Vote| !matches!(vote, Vote::Failed(_));
        self.votes.iter().flatten().filter(is_answer).count()
    }
}

struct Abandoned {
    undo: Arc<Op>,
    pending: Arc<PendingReleases>,
    client: ReleaseAccount,
}

/// Whether an acquire with this vote may have set the lock.
fn may_have_granted(vote: &Vote) -> bool {
    match vote {
        Vote::Granted => true,
        Vote::Failed(failure) => failure.effect == Effect::Possible,
        Vote::Held(_) | Vote::Yours(_) | Vote::Stale { .. } | Vote::Extended { .. } => false,
        Vote::Released | Vote::Missing | Vote::Found(_) | Vote::FoundOfSet(_) => false,
        Vote::Each(_) => false,
    }
}

/// A round whose nodes have not been asked yet. Asking consumes it, so no round is asked twice. A
/// round that is never asked gets no votes, and an undo that waits for those votes would wait for
/// ever.
#[must_use = "a round that is not asked gets no votes"]
pub(crate) struct PreparedRound(Arc<Round>);

impl PreparedRound {
    /// The round as it will be asked, for an attempt that has to undo its grants.
    pub(crate) fn round(&self) -> &Arc<Round> {
        &self.0
    }

    /// The rounds about each lock of a set, in order.
    pub(crate) fn rounds(&self) -> impl Iterator<Item = &Arc<Round>> {
        std::iter::once(&self.0).chain(self.0.others())
    }

    /// Asks about a large set in parts of at most [`MAX_PART`] locks. Operations on other locks may
    /// run between two parts, so they do not wait for the whole set. Only for an operation that needs
    /// no lock of the set beside another: neither an undo nor the confirmation of a grant.
    pub(crate) fn in_parts(mut self) -> Self {
        let op = &self.0.op;
        if op.is_on_each() && op.keys().count() > MAX_PART {
            let parts = op.in_parts(MAX_PART).map(Arc::new).collect();
            Arc::get_mut(&mut self.0).expect("nobody has the round yet").parts = parts;
        }
        self
    }

    /// Asks the nodes whose bit is set in `mask`. The votes of the other nodes stay open for ever.
    pub(crate) fn ask(self, nodes: &[Arc<dyn Node>], mask: u32) -> Arc<Round> {
        self.0.submit(nodes, mask);
        self.0
    }

    /// Asks all nodes the questions of several rounds. Each node gets all questions in one
    /// submission, so that they share calls.
    pub(crate) fn ask_all(rounds: PreparedRounds, nodes: &[Arc<dyn Node>]) {
        match &rounds[..] {
            [] => {}
            [round] => round.0.submit(nodes, u32::MAX),
            rounds => {
                for (index, node) in nodes.iter().enumerate() {
                    node.submit_all(rounds.iter().flat_map(|round| round.0.tasks(index)).collect());
                }
            }
        }
    }

    /// Asks all nodes the question of `then`. A node whose bit is set in `mask` is first asked the
    /// question of this round, in the same call. Returns this round.
    pub(crate) fn ask_before(
        self,
        nodes: &[Arc<dyn Node>],
        mask: u32,
        then: PreparedRound,
    ) -> Arc<Round> {
        for (index, node) in masked(nodes, mask) {
            node.submit_all(self.0.tasks(index).chain(then.0.tasks(index)).collect());
        }
        then.0.submit(nodes, !mask);
        self.0
    }
}

/// Rounds that are asked together.
pub(crate) type PreparedRounds = SmallVec<[PreparedRound; 1]>;

/// The nodes whose bit is set in `mask`, with their index.
fn masked(nodes: &[Arc<dyn Node>], mask: u32) -> impl Iterator<Item = (usize, &Arc<dyn Node>)> {
    nodes.iter().enumerate().filter(move |(index, _)| mask & (1 << index) != 0)
}

/// The result of a round.
pub(crate) struct RoundOutcome {
    pub(crate) decision: Decision,
    /// The votes by node; `None` for a node that had not answered when the round was decided.
    pub(crate) votes: Vec<Option<Vote>>,
}

impl Round {
    /// An operation that needs an outcome within these limits from now.
    pub(crate) fn prepare(
        quorum: Quorum,
        op: Op,
        limits: RoundLimits,
        observer: &Arc<dyn Observer>,
        repairs: Option<(Arc<Repairs>, Began)>,
    ) -> PreparedRound {
        let open = |op| Self {
            repairs: repairs.clone(),
            ..Self::open(quorum, op, (limits, limits.quorum), observer)
        };
        PreparedRound(Arc::new(Self::of_each(Arc::new(op), open)))
    }

    /// A release. Its asker waits for the outcome within `limits`, and a node may begin the release
    /// within `life` from now. The release is retried on a node that fails to answer. With
    /// `owe_clock` it is also retried on a node that refuses its T as too far ahead.
    pub(crate) fn prepare_release(
        quorum: Quorum,
        op: Arc<Op>,
        (limits, life): (RoundLimits, Duration),
        observer: &Arc<dyn Observer>,
        (pending, client): (&Arc<PendingReleases>, &ReleaseAccount),
        owe_clock: bool,
    ) -> PreparedRound {
        let round = Self::of_each(op, |op| Self::open(quorum, op, (limits, life), observer));
        PreparedRound(Arc::new(Self {
            pending: Some((pending.clone(), client.clone())),
            owe_clock,
            ..round
        }))
    }

    /// The round of an operation, with those of the other locks. Only the first has a trace.
    fn of_each(op: Arc<Op>, open: impl Fn(Arc<Op>) -> Self) -> Self {
        let mut others = Vec::new();
        if op.is_on_each() {
            for keys in op.keys().each().skip(1) {
                let mut op = Op::clone(&op);
                *op.keys_mut() = keys.clone();
                others.push(Arc::new(open(Arc::new(op))));
            }
        }
        let round = open(op);
        Self { trace: round.observer.round(&round.op), others, ..round }
    }

    fn open(
        quorum: Quorum,
        op: Arc<Op>,
        (limits, life): (RoundLimits, Duration),
        observer: &Arc<dyn Observer>,
    ) -> Self {
        let now = Instant::now();
        let votes = vec![None; quorum.nodes()];
        let deadline = now + limits.rest;
        let ballot = Ballot {
            votes,
            decision: Decision::Open,
            deadline,
            is_late: false,
            undo: None,
            repair: None,
        };
        Self {
            quorum,
            trace: None,
            op,
            limits,
            began: now,
            not_after: now + life,
            observer: observer.clone(),
            pending: None,
            owe_clock: false,
            repairs: None,
            others: Vec::new(),
            parts: Vec::new(),
            ballot: Mutex::new(ballot),
            decided: AtomicWaker::new(),
        }
    }

    /// The rounds about the locks of a set after the first.
    pub(crate) fn others(&self) -> &[Arc<Self>] {
        &self.others
    }

    fn submit(self: &Arc<Self>, nodes: &[Arc<dyn Node>], mask: u32) {
        for (index, node) in masked(nodes, mask) {
            if self.parts.is_empty() {
                let Task { op, not_after, reply } = self.task(index, &self.op, self.clone());
                node.submit(op, not_after, reply);
            } else {
                node.submit_all(self.tasks(index).collect());
            }
        }
    }

    /// The questions for a node: one, or one for each part.
    fn tasks(self: &Arc<Self>, node: usize) -> impl Iterator<Item = Task> {
        let mut first = 0;
        let part = move |op: &Arc<Op>| {
            let part = Part { round: self.clone(), op: op.clone(), first };
            first += op.keys().count();
            self.task(node, op, Arc::new(part))
        };
        let whole = self.parts.is_empty().then(|| self.task(node, &self.op, self.clone()));
        whole.into_iter().chain(self.parts.iter().map(part))
    }

    fn task(&self, node: usize, op: &Arc<Op>, voter: Arc<dyn Voter>) -> Task {
        // A trace shows one question, and the vote on the first lock.
        if let Some(trace) = self.trace.as_ref().filter(|_| op.keys().lock == self.op.keys().lock) {
            trace.asked(node);
        }
        if let Some((pending, _)) = &self.pending {
            pending.began();
        }
        Task { op: op.clone(), not_after: self.not_after, reply: Reply::new(voter, node) }
    }

    /// Waits for the deciding vote, within the limits. A node without an answer by then counts as
    /// timed out, which is "unknown" and not a refusal.
    pub(crate) async fn outcome(&self) -> RoundOutcome {
        let decision = self.decided().await;
        self.outcome_of(decision)
    }

    /// Waits for the deciding vote, within the limits. Returns [`Decision::Open`] if the limits end
    /// first.
    pub(crate) async fn decided(&self) -> Decision {
        loop {
            let deadline = self.lock().deadline;
            match tokio::time::timeout_at(deadline, self.decision(deadline)).await {
                Ok(Some(decision)) => return decision,
                Ok(None) => {}
                Err(_) if self.waits_on() => {}
                Err(_) => return self.lock().decision,
            }
        }
    }

    /// Calls `read` with the votes, without copying them.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&[Option<Vote>]) -> T) -> T {
        read(&self.lock().votes)
    }

    /// The outcome with a copy of the votes. `decision` comes from [`decided`](Self::decided).
    pub(crate) fn outcome_of(&self, decision: Decision) -> RoundOutcome {
        let ballot = self.lock();
        let mut votes = ballot.votes.clone();
        if decision != Decision::Open {
            return RoundOutcome { decision, votes };
        }
        let waited = Duration::from_millis((ballot.deadline - self.began).as_millis() as u64);
        for vote in votes.iter_mut().filter(|vote| vote.is_none()) {
            let detail = format!("no answer within {waited:?}");
            *vote = Some(Vote::Failed(Failure::new(Reason::Timeout, Effect::Possible, detail)));
        }
        if let Some(trace) = &self.trace {
            trace.decided("timeout");
        }
        let decision = match self.quorum.decide(tally(&self.op, &votes)) {
            Decision::Open => Decision::Neither,
            decision => decision,
        };
        RoundOutcome { decision, votes }
    }

    /// Waits for the decision. `None` if the deadline is another one now.
    async fn decision(&self, deadline: Instant) -> Option<Decision> {
        std::future::poll_fn(|cx| {
            // Registered before the check: a vote in between would otherwise wake nobody.
            self.decided.register(cx.waker());
            let ballot = self.lock();
            match ballot.decision {
                Decision::Open if ballot.deadline == deadline => Poll::Pending,
                Decision::Open => Poll::Ready(None),
                decision => Poll::Ready(Some(decision)),
            }
        })
        .await
    }

    /// At the deadline: whether the asker waits on, because fewer nodes than a quorum have answered.
    fn waits_on(&self) -> bool {
        let mut ballot = self.lock();
        let last = self.began + self.limits.quorum;
        ballot.is_late = ballot.deadline < last && ballot.answers() < self.quorum.size();
        if ballot.is_late {
            ballot.deadline = last;
        }
        ballot.is_late
    }

    /// The votes as soon as they are `wanted`, or complete, or at the deadline. Votes after the
    /// deciding one are included. Ask for the outcome first: it waits for the answers of a quorum.
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
        let deadline = self.lock().deadline;
        let _ = tokio::time::timeout_at(deadline, reached).await;
        self.lock().votes.clone()
    }

    /// The nodes, as bits, that have granted an acquire, may have granted it, or may still grant
    /// it.
    pub(crate) fn touched(&self) -> u32 {
        let touched = |vote: &Option<Vote>| vote.as_ref().is_none_or(may_have_granted);
        self.lock()
            .votes
            .iter()
            .enumerate()
            .fold(0, |mask, (index, vote)| mask | u32::from(touched(vote)) << index)
    }

    /// From now on, undoes the acquire on every node that grants it. Returns the nodes, as bits,
    /// that have granted it already or may have: the caller sends the undo to these. A node without
    /// a vote gets the undo when its vote arrives. An undo sent earlier would leave a tombstone
    /// even on a node that refuses the acquire.
    pub(crate) fn abandon(
        &self,
        undo: Arc<Op>,
        pending: Arc<PendingReleases>,
        client: ReleaseAccount,
    ) -> u32 {
        let mut ballot = self.lock();
        let mut due = 0;
        for (index, vote) in ballot.votes.iter().enumerate() {
            match vote {
                // The undo counts as in flight until the node has voted.
                None => pending.began(),
                Some(vote) => due |= u32::from(may_have_granted(vote)) << index,
            }
        }
        ballot.undo = Some(Abandoned { undo, pending, client });
        due
    }

    fn lock(&self) -> MutexGuard<'_, Ballot> {
        self.ballot.lock()
    }
}

/// A part of a large set, and the place of its first lock in the set.
struct Part {
    round: Arc<Round>,
    op: Arc<Op>,
    first: usize,
}

impl Voter for Part {
    fn vote(&self, node: usize, vote: Vote) {
        self.round.count_each(node, &self.op, self.first, vote);
    }
}

impl Voter for Round {
    fn vote(&self, node: usize, vote: Vote) {
        if self.others.is_empty() {
            self.end_try(node, &self.op, std::slice::from_ref(&vote));
            return self.count(node, vote);
        }
        self.count_each(node, &self.op, 0, vote);
    }
}

impl Round {
    /// Counts the votes of `op`, which is about the locks of the set from `first` on.
    fn count_each(&self, node: usize, op: &Arc<Op>, first: usize, vote: Vote) {
        let locks = op.keys().count();
        let votes = match vote {
            Vote::Each(votes) if votes.len() == locks => votes,
            Vote::Each(votes) => {
                let detail = format!("{} votes on {locks} locks", votes.len());
                vec![Vote::Failed(Failure::new(Reason::Error, Effect::Possible, detail)); locks]
            }
            vote => vec![vote; locks],
        };
        self.end_try(node, op, &votes);
        let others = self.others.iter().map(|round| &**round);
        let rounds = std::iter::once(self).chain(others).skip(first);
        rounds.zip(votes).for_each(|(round, vote)| round.count(node, vote));
    }

    /// Ends the first try of a release on a node. The release stays pending if it failed on any lock.
    fn end_try(&self, node: usize, op: &Arc<Op>, votes: &[Vote]) {
        let Some((pending, client)) = &self.pending else { return };
        let owed = |vote: &Vote| match vote {
            Vote::Failed(failure) => failure.reason != Reason::Clock || self.owe_clock,
            _ => false,
        };
        pending.ended(votes.iter().any(owed).then_some((node, op, client)));
    }

    fn count(&self, node: usize, vote: Vote) {
        self.observer.vote(node, &vote);
        if let Some(trace) = &self.trace {
            trace.voted(node, &vote);
        }
        let mut ballot = self.lock();
        let undo = ballot.undo.as_ref().map(|abandoned| {
            let undo = may_have_granted(&vote).then(|| abandoned.undo.clone());
            (abandoned.pending.clone(), undo, abandoned.client.clone())
        });
        let missing = is_repairable(&vote);
        ballot.votes[node] = Some(vote);
        let was_open = ballot.decision == Decision::Open;
        if was_open {
            ballot.decision = self.quorum.decide(tally(&self.op, &ballot.votes));
        }
        let decision = ballot.decision;
        let mut wakes = decision != Decision::Open;
        if ballot.is_late && ballot.answers() >= self.quorum.size() {
            ballot.is_late = false;
            ballot.deadline = ballot.deadline.min(Instant::now() + self.limits.rest);
            wakes = true;
        }
        let lost = match &self.repairs {
            Some((repairs, began)) if ballot.decision == Decision::Yes && (was_open || missing) => {
                let all = 0..ballot.votes.len();
                // The deciding vote reports every node without the lock so far. Each later vote
                // reports only its own node.
                let is_lost = |at: &usize| ballot.votes[*at].as_ref().is_some_and(is_repairable);
                let lost: Vec<usize> =
                    all.clone().filter(|at| is_lost(at) && (was_open || *at == node)).collect();
                let witness = all
                    .into_iter()
                    .find(|at| matches!(ballot.votes[*at], Some(Vote::Extended { .. })));
                witness.filter(|_| !lost.is_empty()).and_then(|witness| {
                    if ballot.repair.is_none() {
                        ballot.repair = repairs.after(&self.op, *began);
                    }
                    Some((ballot.repair.clone()?, lost, witness))
                })
            }
            _ => None,
        };
        drop(ballot);
        if let Some((pending, undo, client)) = undo {
            if let Some(undo) = undo {
                pending.release(node, undo, client);
            }
            pending.ended(None);
        }
        if let (Some(word), Some(trace), true) = (decision.word(), &self.trace, was_open) {
            trace.decided(word);
        }
        if wakes {
            // Also after the decision: a waiter in `votes_until` may need this vote.
            self.decided.wake();
        }
        if let Some((repair, lost, witness)) = lost {
            repair.missing(lost, witness);
        }
    }
}

/// Whether a node with this vote on an extension can be repaired: it stores no lock, or only a
/// record by which recovery keeps the lock free.
fn is_repairable(vote: &Vote) -> bool {
    match vote {
        Vote::Missing => true,
        Vote::Held(holding) => holding.record.is_placeholder(),
        _ => false,
    }
}

/// Counts the votes that say yes, that say no, and that say neither.
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
            // In an inspection, the nodes that agree on a holder count as yes. They are counted
            // below.
            (Op::Inspect { .. }, Vote::Found(_)) => {}
            // The locks of a set are read together, so each answer counts.
            (Op::Inspect { keys }, Vote::FoundOfSet(_)) if keys.others.is_some() => tally.yes += 1,
            // These answers do not refuse the owner for good. After `Stale`, a larger T may be
            // granted; `Yours` shows another grant of the same owner. See `acquire/attempt.rs`.
            (_, Vote::Failed(_) | Vote::Stale { .. } | Vote::Yours(_)) => tally.failed += 1,
            // A vote that answers another question counts as a failure.
            (_, Vote::Granted | Vote::Held(_) | Vote::Extended { .. }) => tally.failed += 1,
            (_, Vote::Released | Vote::Missing | Vote::Found(_)) => tally.failed += 1,
            (_, Vote::FoundOfSet(_) | Vote::Each(_)) => tally.failed += 1,
        }
    }
    if let Op::Inspect { keys: Keys { others: None, .. } } = op {
        let found = votes::found(votes).count();
        tally.yes = votes::agreeing(votes).map_or(0, |(_, count)| count);
        tally.failed += found - tally.yes;
    }
    tally
}

#[cfg(test)]
mod tests;
