//! One attempt to get a lock: a round, and another one with a larger token where nodes have seen a later T than ours.

use std::sync::Arc;
use std::time::Duration;

use crate::error::LockError;
use crate::node::{Hint, Keys, Op, Reason, Record, Vote};
use crate::quorum::Decision;
use crate::round::{Round, Scope};
use crate::shared::{ALL_NODES, Shared};
use crate::types::{FencingToken, Info, LockToken, Owner, Ttl};
use crate::validity::Lease;
use crate::votes::{can_hold, held_by, is_split};

/// Tries with a new fencing token within one attempt, when nodes have seen a larger one. Each try learns from the last,
/// so more than a few mean that other gateways outrun us; then the attempt fails like any other.
const MAX_FENCING_TRIES: usize = 8;

/// What is acquired, and for whom.
#[derive(Clone)]
pub(crate) struct AcquireParams {
    pub(crate) keys: Keys,
    pub(crate) owner: Owner,
    /// Other attempts may act for the same owner, at the same time or before.
    pub(crate) owner_is_shared: bool,
    pub(crate) info: Info,
    pub(crate) ttl: Ttl,
}

/// Dropped before it has ended, an attempt releases what it has set or may still set.
pub(crate) struct Attempt {
    shared: Arc<Shared>,
    params: AcquireParams,
    tell: Option<Hint>,
    started: Duration,
    /// All so far, until they are of no concern any more.
    tries: Vec<Try>,
    /// It has an outcome: it is not cancelled.
    ended: bool,
}

struct Try {
    record: Record,
    token: LockToken,
    round: Arc<Round>,
}

/// How an attempt failed.
#[derive(Debug)]
pub(crate) struct AttemptError {
    pub(crate) error: LockError,
    /// Whether a majority of nodes answered and contenders have split their votes, so that perhaps nobody has a majority.
    pub(crate) split: bool,
    /// How many rounds it took.
    pub(crate) rounds: u32,
}

impl Attempt {
    /// The lease counts from now.
    pub(crate) fn new(shared: &Arc<Shared>, params: AcquireParams) -> Self {
        let started = shared.seams.clock.monotonic();
        Self { shared: shared.clone(), params, tell: None, started, tries: Vec::new(), ended: false }
    }

    /// With something that nodes tell everybody when they refuse.
    pub(crate) fn announcing(mut self, tell: Hint) -> Self {
        self.tell = Some(tell);
        self
    }

    /// A round for the next try. It has to be asked, on all nodes.
    pub(crate) fn prepare(&mut self) -> Result<Arc<Round>, LockError> {
        let shared = &self.shared;
        let Some(fencing) = shared.tokens.mint() else {
            let reports = shared.reports_of(Reason::Clock, "this machine's wall clock is wrong");
            return Err(LockError::NoQuorum(reports));
        };
        let AcquireParams { keys, owner, info, ttl, .. } = &self.params;
        let token = LockToken::new(*owner, fencing);
        let record = Record::new(&token, info);
        let op = Op::Acquire { keys: keys.clone(), record: record.clone(), ttl: *ttl, tell: self.tell.clone() };
        let round = Round::new(shared.quorum, op, shared.round_limit(*ttl), &shared.seams.observer, None);
        self.tries.push(Try { record, token, round: round.clone() });
        Ok(round)
    }

    /// Goes on to the end, from the beginning or from a try that has been asked already.
    pub(crate) async fn run(mut self) -> Result<Lease, AttemptError> {
        if self.tries.is_empty() {
            self.ask()?;
        }
        loop {
            let last = self.tries.len() >= MAX_FENCING_TRIES;
            let shared = &self.shared;
            let Some(Try { token, round, .. }) = self.tries.last() else { unreachable!("asked at least once") };
            let outcome = round.outcome().await;

            let mut fences = stale_fences(&outcome.votes).peekable();
            let saw_fence = fences.peek().is_some();
            let mut believable = true;
            for fence in fences {
                believable &= shared.tokens.observe(fence);
            }
            match outcome.decision {
                Decision::Yes => {
                    let mut lease = shared.lease(*token, self.params.ttl, self.started, &outcome);
                    if lease.validity(shared.seams.clock.monotonic()).is_none() {
                        let error = LockError::NoQuorum(shared.reports(&outcome));
                        return Err(self.failed(error, false));
                    }
                    lease.renewed = self.renews();
                    lease.rounds = self.tries.len() as u32;
                    self.tries.clear();
                    return Ok(lease);
                }
                Decision::No => {
                    let votes = shared.clear_votes(round).await;
                    let (held, split) = (held_by(shared.quorum, &votes), !can_hold(shared.quorum, &votes));
                    return Err(self.failed(LockError::Held(held), split));
                }
                Decision::Neither | Decision::Open if saw_fence && believable && !last => self.ask()?,
                Decision::Neither | Decision::Open => {
                    let error = LockError::NoQuorum(shared.reports(&outcome));
                    let split = is_split(shared.quorum, &outcome.votes);
                    return Err(self.failed(error, split));
                }
            }
        }
    }

    fn failed(&mut self, error: LockError, split: bool) -> AttemptError {
        self.ended = true;
        AttemptError { error, split, rounds: self.tries.len() as u32 }
    }

    fn ask(&mut self) -> Result<(), AttemptError> {
        match self.prepare() {
            Ok(round) => round.ask(&self.shared.nodes, ALL_NODES),
            Err(error) => return Err(self.failed(error, false)),
        }
        Ok(())
    }

    /// Whether the owner may have had the lock before, on a node at least. Where an earlier try of our own was granted,
    /// another attempt for the same owner may have been so too before the next.
    fn renews(&self) -> bool {
        self.params.owner_is_shared && self.tries.iter().any(|tried| tried.round.voted(&Vote::GrantedAgain) != 0)
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let Some(Try { record, token, .. }) = self.tries.last() else { return };
        // With several tries, or several attempts of one owner, an earlier acquire may still be in flight on a connection
        // that broke: the fence has to stay.
        let failed_try = self.tries.len() == 1 && !self.params.owner_is_shared;
        // Cancelled in the middle, it may have been granted the lock, while others wait elsewhere.
        let tell =
            if self.ended { None } else { self.shared.fairness.given_up(&self.params.keys.lock, token.fencing()) };
        let release = |record: Record| {
            let tell = tell.clone();
            Arc::new(Op::Release { keys: self.params.keys.clone(), record, failed_try, tell })
        };
        let pending = &self.shared.pending;
        if !self.params.owner_is_shared {
            // The release of the last T covers the earlier ones: they are smaller and of the same owner.
            let undo = release(record.clone());
            let abandon = |tried: &Try| tried.round.abandon(undo.clone(), pending.clone(), Scope::All);
            let due = self.tries.iter().fold(0, |mask, tried| mask | abandon(tried));
            if due != 0 {
                self.shared.release_on(undo, due);
            }
            return;
        }
        // Each try with its own T: between two of them another attempt of this owner may have been granted the lock where
        // the first of them had set it, and the second took it over.
        let mut due = 0;
        for tried in &self.tries {
            let undo = release(tried.record.clone());
            due = tried.round.abandon(undo.clone(), pending.clone(), Scope::Fresh);
            if due != 0 {
                self.shared.release_on(undo, due);
            }
        }
        // Nodes that may have had the lock already: what they store must stay, but an acquire that is still in flight
        // must not take effect any more. A release for nobody deletes nothing and leaves the fence at T.
        let touched = self.tries.iter().fold(0, |mask, tried| mask | tried.round.touched());
        let unknown = touched & !due;
        if unknown != 0 {
            let nobody = LockToken::new(self.shared.seams.entropy.owner(), token.fencing());
            self.shared.release_on(release(Record::new(&nobody, &Info::default())), unknown);
        }
    }
}

fn stale_fences(votes: &[Option<Vote>]) -> impl Iterator<Item = FencingToken> {
    votes.iter().flatten().filter_map(|vote| match vote {
        Vote::Stale { fence } => Some(*fence),
        _ => None,
    })
}
