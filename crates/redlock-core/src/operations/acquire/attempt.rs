//! One attempt to get a lock. It is one round, and further rounds with larger tokens if nodes have
//! seen a T above ours.
//!
//! Requests with the same idempotency key ask for the same owner, perhaps at the same time. Nodes
//! never overwrite a lock, so each request asks for a grant of its own. Suppose a request finds
//! another grant of its owner on a majority. Then it undoes its own grant and *confirms* the other
//! one by extending it. An extension that succeeds on a majority proves that the grant stands, as
//! it does for a holder. So no grant that a client was promised is ever replaced, and all these
//! requests return the same token.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{HeldBy, LockError};
use crate::model::quorum::Decision;
use crate::model::slots::SlotSet;
use crate::model::types::{FencingToken, Info, LockToken, Nonce, Owner, Ttl};
use crate::model::validity::Lease;
use crate::node::{Hint, Holding, Keys, Op, Reason, Record, ReleaseScope, Vote};
use crate::operations::extend::{self, OfEachLock};
use crate::operations::slots::{Choice, SlottedLock};
use crate::round::pending_releases::ReleaseAccount;
use crate::round::votes::{
    OwnGrant, can_hold, copies_of, count, held_by, held_or_asked_for_by, is_split, may_be_split,
    may_stand, own_grant, unheard,
};
use crate::round::{PreparedRound, Round, RoundOutcome};
use crate::shared::{ALL_NODES, Shared};

/// The limit on proposals within one attempt. Each proposal uses a T above the watermarks that
/// refused the proposal before it. If this many proposals are refused, other gateways raise the
/// watermarks faster than we do. The attempt then fails without a quorum.
const MAX_PROPOSALS: u32 = 8;

/// The shortest and the longest wait before a confirmation. In between, the wait is twice the time
/// that the attempt has taken so far. It never takes more than a quarter of the grant's life.
const SETTLES_WITHIN: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));
/// The age at which a grant is not waited for: its request has decided long ago.
const SETTLED_AT: Duration = Duration::from_secs(1);

/// The lock, or the set of locks, to acquire, and for whom.
#[derive(Clone)]
pub(crate) struct AcquireParams {
    /// A waiting request for a set is in the queue of the first lock.
    pub(crate) keys: Keys,
    /// All slots, if the request asks for slots of a lock. `keys` is the lock itself then.
    pub(crate) slotted: Option<Arc<SlottedLock>>,
    pub(crate) owner: Owner,
    /// The nonce of the first proposal, if owner and nonce were drawn together.
    pub(crate) nonce: Option<Nonce>,
    /// Whether other requests may ask for the same owner, earlier or at the same time.
    pub(crate) owner_is_shared: bool,
    /// How long the lock is kept at least, see [`LockToken::holding`].
    pub(crate) hold_at_least: Duration,
    /// How long an earlier request of the same owner may have held the lock; no limit if `None`.
    pub(crate) max_hold: Option<Duration>,
    pub(crate) info: Info,
    pub(crate) ttl: Ttl,
    /// Counts the undos that are pending.
    pub(crate) client: ReleaseAccount,
}

impl AcquireParams {
    /// Whether one released slot of the lock is all that the request needs. Slot 1 is the lock
    /// itself.
    pub(crate) fn fits_slot(&self, slot: u16) -> bool {
        self.slotted.as_ref().map_or(slot == 1, |slotted| slotted.needs_only(slot))
    }

    /// Parameters for one attempt. Only the first attempt uses the nonce that was drawn with the
    /// owner.
    pub(crate) fn for_attempt(&mut self) -> Self {
        let params = self.clone();
        self.nonce = None;
        params
    }
}

/// An attempt that is dropped before its end undoes every grant that it has or may still get.
pub(crate) struct Attempt {
    shared: Arc<Shared>,
    params: AcquireParams,
    /// The chosen slots that the proposals ask for. `None` if they ask for `params.keys`. Boxed,
    /// because most attempts have none.
    chosen: Option<Box<ChosenSlots>>,
    /// Whether the slots are yet to be chosen.
    chooses_slots: bool,
    /// Whether the attempt asks only for an earlier grant of its owner.
    is_for_own: bool,
    /// The holders of all slots, if too few were free.
    full: Option<Box<HeldBy>>,
    /// The hint that nodes publish when they refuse.
    hint: Option<Hint>,
    started: Duration,
    /// The last proposal, which is undone when the attempt is dropped. `None` before the first
    /// proposal, after a grant, and once undone. The undo of earlier proposals has already been
    /// sent.
    current: Option<Proposal>,
    proposals: u32,
    /// Whether the attempt has an outcome. An attempt that is dropped without one was cancelled.
    has_ended: bool,
}

/// Slots of a lock.
struct ChosenSlots {
    keys: Keys,
    numbers: SlotSet,
}

struct Proposal {
    record: Record,
    token: LockToken,
    round: Arc<Round>,
}

/// The failure of an attempt.
#[derive(Debug)]
pub(crate) struct AttemptError {
    pub(crate) error: LockError,
    /// Whether a majority answered and the contenders split their votes, so that perhaps nobody has
    /// a majority.
    pub(crate) split: bool,
    /// The number of rounds that the attempt took.
    pub(crate) rounds: u32,
}

impl Attempt {
    /// The lease's time counts from this call.
    pub(crate) fn new(shared: &Arc<Shared>, params: AcquireParams) -> Self {
        let started = shared.env.clock.monotonic();
        Self {
            shared: shared.clone(),
            chosen: None,
            chooses_slots: params.slotted.is_some(),
            is_for_own: false,
            full: None,
            params,
            hint: None,
            started,
            current: None,
            proposals: 0,
            has_ended: false,
        }
    }

    /// Sets a hint that nodes publish when they refuse.
    pub(crate) fn announcing(mut self, hint: Hint) -> Self {
        self.hint = Some(hint);
        self
    }

    /// Makes the attempt look for an earlier grant of its owner only. It keeps no new grant.
    pub(crate) fn for_own(mut self) -> Self {
        self.is_for_own = true;
        self
    }

    /// An attempt to get the slot that a release is about to free. `None` if the request needs
    /// another slot, or more than one.
    pub(crate) fn for_released(
        shared: &Arc<Shared>,
        params: AcquireParams,
        slot: u16,
    ) -> Option<Self> {
        if !params.fits_slot(slot) {
            return None;
        }
        let slots = SlotSet::new([slot])?;
        let mut attempt = Self::new(shared, params);
        attempt.take_slots(slots, slot);
        Some(attempt)
    }

    /// The lock, the set or the slots that the proposals ask for.
    fn asked(&self) -> &Keys {
        self.chosen.as_ref().map_or(&self.params.keys, |chosen| &chosen.keys)
    }

    /// The numbers of the slots that the proposals ask for.
    fn slots(&self) -> SlotSet {
        self.chosen.as_ref().map_or(SlotSet::FIRST, |chosen| chosen.numbers)
    }

    fn take_slots(&mut self, slots: SlotSet, first: u16) {
        if let Some(slotted) = &self.params.slotted {
            let keys = slotted.keys_of(slots, first);
            self.chosen = Some(Box::new(ChosenSlots { keys, numbers: slots }));
        }
        self.chooses_slots = false;
    }

    /// Chooses the slots to ask for.
    async fn choose_slots(&mut self) -> Result<(), AttemptError> {
        let Some(slotted) = self.params.slotted.clone().filter(|_| self.chooses_slots) else {
            return Ok(());
        };
        let AcquireParams { owner, owner_is_shared, ttl, .. } = self.params;
        let limits = self.shared.round_limits(ttl);
        let choice = slotted.choose(&self.shared, &owner, owner_is_shared, limits).await;
        match choice.map_err(|error| self.failed(error, false))? {
            Choice::PerhapsOwn(reports) => {
                return Err(self.failed(LockError::Unknown(reports), true));
            }
            Choice::PartOfOwn(by) => return Err(self.part_of_slots(by)),
            Choice::Own(slots) => self.take_slots(slots, 1),
            Choice::SeveralOwn => return Err(self.failed(LockError::Unknown(Vec::new()), true)),
            Choice::Free(_) if self.is_for_own => {
                return Err(self.failed(LockError::Held(HeldBy::default()), false));
            }
            Choice::Free(slots) => self.take_slots(slots, 1),
            // The nodes publish that somebody waits when they refuse. So a waiter asks for slots
            // of which the first is held.
            Choice::Full(by) if self.hint.is_some() && !self.is_for_own => {
                let (first, slots) = slotted.with_a_held_one(&by);
                self.take_slots(slots, first);
                self.full = Some(Box::new(by));
            }
            Choice::Full(by) => return Err(self.failed(LockError::Held(by), false)),
            Choice::Undecided(reports) => {
                return Err(self.failed(LockError::NoQuorum(reports), true));
            }
        }
        Ok(())
    }

    /// Reads the lock, and succeeds if a majority stores a grant of the owner. It reads instead of
    /// proposing, because a proposal could take a free lock before earlier waiters.
    async fn find_own(&mut self) -> Result<(), AttemptError> {
        let shared = self.shared.clone();
        let quorum = shared.quorum.size();
        let AcquireParams { owner, ttl, ref keys, .. } = self.params;
        let own = |votes: &[Option<Vote>]| copies_of(&owner, votes);
        let cannot_stand = |votes: &[Option<Vote>]| !may_stand(shared.quorum, own(votes), votes);
        let round = shared.inspect(keys.clone(), shared.round_limits(ttl));
        let outcome = round.outcome().await;
        let votes = round.votes_until(|votes| own(votes) >= quorum || cannot_stand(votes)).await;
        if own(&votes) >= quorum {
            Ok(())
        } else if cannot_stand(&votes) {
            let by = held_by(shared.quorum, &votes);
            let by = if by.owner == Some(owner) { HeldBy::default() } else { by };
            Err(self.failed(LockError::Held(by), false))
        } else {
            Err(self.failed(LockError::Unknown(shared.reports(&outcome)), false))
        }
    }

    /// Prepares the round of the first proposal. The caller must ask it on all nodes.
    pub(crate) fn prepare(&mut self) -> Result<PreparedRound, LockError> {
        let (next, round) = self.next_proposal()?;
        self.current = Some(next);
        Ok(round)
    }

    fn next_proposal(&mut self) -> Result<(Proposal, PreparedRound), LockError> {
        let shared = &self.shared;
        let Some(fencing) = shared.tokens.mint() else {
            let reports = shared.reports_of(Reason::Clock, "this machine's wall clock is wrong");
            return Err(LockError::NoQuorum(reports));
        };
        let nonce = self.params.nonce.take().unwrap_or_else(|| shared.env.entropy.nonce());
        let AcquireParams { owner, info, ttl, hold_at_least, .. } = &self.params;
        let token = LockToken::new(*owner, nonce, fencing).holding(*hold_at_least);
        let token = token.on_slots(self.slots());
        let record = Record::new(&token, info);
        let op = Op::Acquire {
            keys: self.asked().clone(),
            record: record.clone(),
            ttl: *ttl,
            tell: self.hint.clone(),
        };
        let limits = shared.round_limits(*ttl);
        let prepared = Round::prepare(shared.quorum, op, limits, &shared.env.observer, None);
        let round = prepared.round().clone();
        self.proposals += 1;
        Ok((Proposal { record, token, round }, prepared))
    }

    /// Runs the attempt to its end, from the beginning or from a proposal that was asked already.
    pub(crate) async fn run(&mut self) -> Result<Lease, AttemptError> {
        // The futures of rare branches are boxed, because unboxed ones would make the future of
        // every attempt larger.
        if self.current.is_none() {
            if self.chooses_slots {
                Box::pin(self.choose_slots()).await?;
            } else if self.is_for_own {
                Box::pin(self.find_own()).await?;
            }
            self.ask()?;
        }
        loop {
            let last = self.proposals >= MAX_PROPOSALS;
            let shared = &self.shared;
            let Some(Proposal { token, round, .. }) = &self.current else {
                unreachable!("asked at least once")
            };
            let decision = round.decided().await;

            let watermarks: Vec<_> = round.read(|votes| stale_watermarks(votes).collect());
            let saw_stale = !watermarks.is_empty();
            let mut is_credible = true;
            for watermark in watermarks {
                if !shared.tokens.observe(watermark) {
                    is_credible = false;
                    shared.env.observer.fence_out_of_reach(shared.tokens.ahead(watermark));
                }
            }
            match decision {
                // The attempt was for an earlier grant, which has ended since it was read. The
                // proposal got a new grant instead. Waiters that came earlier have a better claim to
                // the lock, so the proposal is undone.
                Decision::Yes if self.is_for_own => {
                    let error = LockError::Held(HeldBy::default());
                    return Err(AttemptError { error, split: false, rounds: self.proposals });
                }
                Decision::Yes => {
                    let lease_of =
                        |votes: &_| shared.lease(*token, self.params.ttl, self.started, votes);
                    let mut lease = round.read(lease_of);
                    if self.params.slotted.is_some()
                        && let Err(error) = Box::pin(self.is_only_grant(&lease.token)).await
                    {
                        return Err(self.failed(error, true));
                    }
                    let shared = &self.shared;
                    let now = shared.env.clock.monotonic();
                    if !shared.counts(self.started, now) || lease.validity(now).is_none() {
                        let reports = shared.reports(&round.outcome_of(decision));
                        let error = LockError::NoQuorum(reports);
                        return Err(self.failed(error, false));
                    }
                    // The time of a choice of slots is no time of a round.
                    if self.proposals == 1 && self.params.slotted.is_none() {
                        shared.round_times.granted(now.saturating_sub(self.started), now);
                    }
                    lease.rounds = self.proposals;
                    self.current = None;
                    return Ok(lease);
                }
                Decision::No => {
                    let votes = shared.clear_votes(round).await;
                    // The refusals may come from nodes that have lost the owner's own grant.
                    let is_known = self.params.owner_is_shared;
                    if is_known && own_grant(shared.quorum, &votes) == OwnGrant::Possible {
                        let reports = shared.reports(&RoundOutcome { decision, votes });
                        return Err(self.failed(LockError::Unknown(reports), false));
                    }
                    let split = !can_hold(shared.quorum, &votes);
                    let held = held_or_asked_for_by(shared.quorum, &votes);
                    return Err(self.refused(held, split));
                }
                // No outstanding vote can give this proposal a majority. But the votes may show that
                // a majority answered, and that contenders split it.
                Decision::Neither if !(saw_stale && is_credible && !last) => {
                    let clear = |votes: &[Option<Vote>]| {
                        is_split(shared.quorum, votes) || !may_be_split(shared.quorum, votes)
                    };
                    round.votes_until(clear).await;
                }
                Decision::Neither | Decision::Open => {}
            }
            let mut outcome = round.outcome_of(decision);
            // `Yours` shows another grant of this owner. If no other request shares the owner, that
            // grant is an earlier proposal of this very request, whose undo is in flight.
            let is_known = self.params.owner_is_shared;
            if is_known && outcome.votes.iter().flatten().any(|vote| matches!(vote, Vote::Yours(_)))
            {
                // Outstanding votes may show that the other grant is on a majority.
                let clear =
                    |votes: &[Option<Vote>]| own_grant(shared.quorum, votes) != OwnGrant::Possible;
                outcome = RoundOutcome { votes: round.votes_until(clear).await, ..outcome };
                match own_grant(shared.quorum, &outcome.votes) {
                    OwnGrant::Stands(grant) => {
                        let by = held_by(shared.quorum, &outcome.votes);
                        let extends = |holding: &Holding| {
                            let stored = holding.record.parse().map(|(token, _)| token);
                            holding.record.is_extended()
                                && stored.is_some_and(|stored| stored.is_grant_of(&grant))
                        };
                        let mut votes = outcome.votes.iter().flatten();
                        let is_extended = votes
                            .any(|vote| matches!(vote, Vote::Yours(holding) if extends(holding)));
                        return Box::pin(self.confirm(grant, by, is_extended)).await;
                    }
                    OwnGrant::Possible => {
                        let error = LockError::Unknown(shared.reports(&outcome));
                        return Err(self.failed(error, false));
                    }
                    OwnGrant::None => {}
                }
            }
            if saw_stale && is_credible && !last {
                self.ask()?;
                continue;
            }
            return Err(self.undecided(&outcome));
        }
    }

    /// The error of a proposal that a majority has refused.
    fn refused(&mut self, by: HeldBy, split: bool) -> AttemptError {
        if let Some(by) = self.full.take() {
            return self.failed(LockError::Held(*by), false);
        }
        if self.params.slotted.is_some() {
            // Somebody else took the slot after it was chosen. Another one may be free.
            let by = HeldBy { lock_of_set: 0, ..by };
            return self.failed(LockError::Held(by), true);
        }
        self.failed(LockError::Held(by), split)
    }

    /// The error of a proposal that the tally left undecided. The tally counts `Held` as a refusal,
    /// but not `Yours`.
    #[cold]
    fn undecided(&mut self, outcome: &RoundOutcome) -> AttemptError {
        let shared = &self.shared;
        let votes = &outcome.votes;
        let is_known = self.params.owner_is_shared;
        let refuses = |vote: &Vote| {
            matches!(vote, Vote::Held(_)) || is_known && matches!(vote, Vote::Yours(_))
        };
        let split = is_split(shared.quorum, votes);
        if count(votes, refuses) < shared.quorum.size() {
            return if split {
                let by = held_or_asked_for_by(shared.quorum, votes);
                let is_own = by.owner == Some(self.params.owner);
                let lock_of_set = by.lock_of_set;
                let nobody = HeldBy { lock_of_set, ..HeldBy::default() };
                self.refused(if is_own { nobody } else { by }, true)
            } else {
                self.failed(LockError::NoQuorum(shared.reports(outcome)), false)
            };
        }
        // With the `Yours` votes, a majority has refused this proposal. None of those grants can
        // have a majority, so the owner is not named as holder.
        let by = Some(held_by(shared.quorum, votes))
            .filter(|by| can_hold(shared.quorum, votes) && by.owner != Some(self.params.owner));
        self.refused(by.unwrap_or_default(), split)
    }

    /// Two requests of one owner may have chosen different slots at the same time. Then at least
    /// one of them sees the other's grant here, gives its own up, and starts over.
    ///
    /// # Errors
    /// Another grant may stand, or too few nodes answered to tell.
    async fn is_only_grant(&self, token: &LockToken) -> Result<(), LockError> {
        let Some(slotted) = self.params.slotted.as_ref().filter(|slotted| slotted.has_choice())
        else {
            return Ok(());
        };
        if !self.params.owner_is_shared {
            return Ok(());
        }
        let limits = self.shared.round_limits(self.params.ttl);
        match slotted.has_another_grant(&self.shared, token, limits).await {
            Ok(false) => Ok(()),
            Ok(true) => Err(LockError::Unknown(Vec::new())),
            Err(LockError::NoQuorum(reports)) => Err(LockError::Unknown(reports)),
            Err(error) => Err(error),
        }
    }

    /// Extends the grant of an earlier request of the same owner. Success proves that the grant
    /// stands. After any other outcome, the earlier request may have returned the grant to its
    /// client all the same.
    ///
    /// `by` is the grant as a refusal shows it. `is_extended` says whether a node has stored an
    /// extension of the grant. A part of a set may stand without the rest.
    async fn confirm(
        &mut self,
        grant: LockToken,
        by: HeldBy,
        is_extended: bool,
    ) -> Result<Lease, AttemptError> {
        self.has_ended = true;
        self.undo();
        let shared = self.shared.clone();
        let AcquireParams { ttl, max_hold, client, .. } = self.params.clone();
        let keys = self.asked().clone();
        let is_set = keys.others.is_some();
        let is_slotted = self.params.slotted.is_some();
        let expires_in = by.expires_in;
        let part = HeldBy { is_part_of_own_set: true, ..by };
        if !is_extended && shared.tokens.age(grant.fencing()) < SETTLED_AT {
            Box::pin(self.settled(&grant, expires_in)).await?;
        }
        // A part of a set is not extended. Repetitions of the request would keep it for ever.
        let standing = if is_set { self.may_stand(&keys, &grant).await } else { 1 };
        if standing == 0 {
            // The whole grant was given up meanwhile.
            return Err(self.failed(LockError::Held(HeldBy::default()), true));
        }
        if standing < keys.count() {
            return Err(match is_slotted {
                true => self.part_of_slots(part),
                false => self.failed(LockError::Held(part), false),
            });
        }
        let held = shared.tokens.age(grant.fencing());
        if let Some(max) = max_hold.filter(|max| held > *max) {
            // `held` rests on this machine's wall clock. That clock is right: a master shows the grant
            // only if the T of this proposal is near its own time, and a majority has shown it.
            return Err(self.failed(LockError::HeldTooLong { held, max }, false));
        }
        let mut error = None;
        let mut lost = 0;
        let mut first: Option<Lease> = None;
        let results = {
            let keys = keys.clone();
            let pending = shared.pending.clone();
            // A task of its own: if this future is dropped halfway, some nodes have marked the
            // grant as extended, and nobody else would release it.
            let work = async move { extend_or_release(&shared, &keys, &grant, ttl, &client).await };
            pending.complete(work).await
        };
        let Ok(results) = results else {
            return Err(self.failed(LockError::Unknown(Vec::new()), false));
        };
        for extended in results {
            match extended {
                Ok(lease) => {
                    let ends_first = first.as_ref().is_none_or(|first| lease.ends_before(first));
                    first = if ends_first { Some(lease) } else { first };
                }
                Err(LockError::Lost | LockError::NotHolder(_)) => {
                    lost += 1;
                    let by = if is_set { part.clone() } else { HeldBy::default() };
                    error.get_or_insert(LockError::Held(by));
                }
                // Nothing is certain about the whole set then.
                Err(unknown) => error = Some(unknown),
            }
        }
        match (error, first) {
            (None, Some(lease)) => {
                let token = lease.token.holding(self.params.hold_at_least).on_slots(self.slots());
                if let Err(error) = self.is_only_grant(&token).await {
                    return Err(self.failed(error, true));
                }
                Ok(Lease { token, replayed: true, rounds: self.proposals + 1, ..lease })
            }
            (Some(LockError::Held(_)), _) if lost == keys.count() => {
                Err(self.failed(LockError::Held(HeldBy::default()), true))
            }
            (Some(LockError::Held(by)), _) if is_slotted => Err(self.part_of_slots(by)),
            (Some(LockError::Held(by)), _) => Err(self.failed(LockError::Held(by), false)),
            (Some(error), _) => Err(self.failed(error, false)),
            (None, None) => unreachable!("a set has a lock"),
        }
    }

    /// Waits until the request that created this grant has most likely decided whether to keep it.
    /// That request may be about to undo the grant: its client is gone, or it has seen another
    /// grant of the owner. An extension now would make the nodes ignore that undo. The grant would
    /// then stand until its TTL ends, and perhaps no client would know its token.
    ///
    /// # Errors
    /// Another grant may stand, or too few nodes answered to tell.
    async fn settled(
        &mut self,
        grant: &LockToken,
        expires_in: Option<Duration>,
    ) -> Result<(), AttemptError> {
        let (least, most) = SETTLES_WITHIN;
        let took = self.shared.env.clock.monotonic().saturating_sub(self.started);
        let pause = (took * 2).clamp(least, most);
        tokio::time::sleep(expires_in.map_or(pause, |left| pause.min(left / 4))).await;
        self.is_only_grant(grant).await.map_err(|error| self.failed(error, true))
    }

    /// Counts the locks of a set of which a majority may store this grant. One call to each node
    /// reads all of them. Otherwise an undo between two readings could make a whole grant look like
    /// a part.
    async fn may_stand(&self, keys: &Keys, grant: &LockToken) -> usize {
        let shared = &self.shared;
        let round = shared.inspect(keys.clone(), shared.round_limits(self.params.ttl));
        let votes = round.outcome().await.votes;
        let unheard = unheard(&votes);
        let is_it = |at: usize, holding: &Holding| {
            usize::from(holding.at) == at
                && holding.record.parse().is_some_and(|(token, _)| token.is_grant_of(grant))
        };
        let copies = |at: usize| {
            count(&votes, |vote| match vote {
                Vote::FoundOfSet(stand) => stand.iter().any(|holding| is_it(at, holding)),
                _ => false,
            })
        };
        (0..keys.count()).filter(|at| copies(*at) + unheard >= shared.quorum.size()).count()
    }

    /// The error when only a part of the owner's grant stands. It is not extended, because
    /// repetitions of the request would keep it for ever. It is not released either: its holder may
    /// not know yet that it lost the rest. Another request may be giving the grant up just now, so
    /// the attempt is repeated a few times.
    fn part_of_slots(&mut self, by: HeldBy) -> AttemptError {
        let part = HeldBy { is_part_of_own_set: true, lock_of_set: 0, ..by };
        self.failed(LockError::Held(part), true)
    }

    fn failed(&mut self, error: LockError, split: bool) -> AttemptError {
        self.has_ended = true;
        AttemptError { error, split, rounds: self.proposals }
    }

    /// Asks all nodes with a new T. A node never overwrites a lock. So on each node that granted
    /// the last proposal, or may have, the same call first undoes that proposal.
    fn ask(&mut self) -> Result<(), AttemptError> {
        let (next, round) = match self.next_proposal() {
            Ok(next) => next,
            Err(error) => return Err(self.failed(error, false)),
        };
        let nodes = &self.shared.nodes;
        match self.current.replace(next) {
            None => {
                round.ask(nodes, ALL_NODES);
            }
            Some(before) => {
                let undo = self.undo_of(before.record, None);
                let undo = self.shared.release_round(undo, &self.params.client);
                undo.ask_before(nodes, before.round.touched(), round);
            }
        }
        Ok(())
    }

    fn undo_of(&self, record: Record, hint: Option<Hint>) -> Arc<Op> {
        Arc::new(Op::Release {
            keys: self.asked().clone(),
            record,
            scope: ReleaseScope::Proposal,
            tell: hint,
        })
    }

    fn undo(&mut self) {
        let Some(Proposal { record, token, round }) = self.current.take() else { return };
        // A cancelled attempt may have got the lock, and waiters at other gateways may have been
        // refused because of it. The hint announces to them that the lock is free.
        let fairness = &self.shared.fairness;
        let hint = if self.has_ended {
            None
        } else {
            fairness.given_up(&self.params.keys.lock, token.fencing())
        };
        let undo = self.undo_of(record, hint);
        let client = &self.params.client;
        let due = round.abandon(undo.clone(), self.shared.pending.clone(), client.clone());
        if due != 0 {
            self.shared.release_on(undo, due, client);
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.undo();
    }
}

/// Extends the grant on each lock. Releases each lock on which the grant can no longer have a
/// majority, because this extension may have marked it as extended on some nodes. The undo by the
/// grant's own request spares a grant with that mark.
///
/// A refused extension alone does not show that. The acquire of the grant may reach a node after
/// the extension that the node refused. Another confirmation then finds the grant there, and a
/// client is promised the lock. So the extension is sent once more, with an undo before it:
/// afterwards a node without the grant refuses that acquire, and a node that another confirmation
/// has extended is spared. No request was promised the grant by its acquires alone: a majority
/// stored it, and a node of that majority has lost it since.
///
/// The release covers exactly this grant, because another grant of this owner, perhaps with a
/// smaller T, may have been promised to a client. The other locks of a set stay: a client may still
/// hold them, and have released only this one.
async fn extend_or_release(
    shared: &Shared,
    keys: &Keys,
    grant: &LockToken,
    ttl: Ttl,
    client: &ReleaseAccount,
) -> OfEachLock<Result<Lease, LockError>> {
    let is_lost = |result: &_| matches!(result, Err(LockError::Lost | LockError::NotHolder(_)));
    let mut extended = extend::extend_each(shared, keys, grant, ttl).await;
    if !extended.iter().any(is_lost) {
        return extended;
    }
    // The undo must not touch the other locks. A client that was granted the set may hold them, with
    // copies that no extension has marked, and may have released only the lost ones.
    let lost = keys.each().zip(&extended).filter(|(_, extended)| is_lost(extended));
    let mut lost = lost.map(|(keys, _)| Keys { others: None, ..keys.clone() });
    let first = lost.next().expect("one is lost");
    let lost = first.with(lost);
    let again = extend::extend_after_undo(shared, &lost, grant, ttl, client).await;
    let mut again = again.into_iter();
    for result in extended.iter_mut().filter(|result| is_lost(result)) {
        *result = again.next().expect("a result for each lost lock");
    }
    for (keys, _) in keys.each().zip(&extended).filter(|(_, extended)| is_lost(extended)) {
        let keys = Keys { others: None, ..keys.clone() };
        let record = Record::new(grant, &Info::default());
        let scope = ReleaseScope::Grant;
        let op = Op::Release { keys, record, scope, tell: None };
        shared.release_on(Arc::new(op), ALL_NODES, client);
    }
    extended
}

fn stale_watermarks(votes: &[Option<Vote>]) -> impl Iterator<Item = FencingToken> {
    votes.iter().flatten().filter_map(|vote| match vote {
        Vote::Stale { fence: watermark } => Some(*watermark),
        _ => None,
    })
}
