//! The slots of a lock: reads them all in one call for each node, and chooses those that an attempt
//! asks for.
//!
//! Each slot is a lock of its own, and the votes of the nodes are counted for each slot by itself.
//! So a lock with K slots never has more than K holders. The gateway chooses the slots. Nodes that
//! choose "any free slot" could let each of several holders have a majority made of different slots
//! (N = 5, K = 2 admits three).

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{FullLock, HeldBy, LockError, NodeReport, SlotHolder};
use crate::model::quorum::{Decision, Quorum};
use crate::model::slots::{SlotSet, Slots};
use crate::model::types::{LockName, LockToken, Owner};
use crate::node::{Holding, Keys, Op, Vote};
use crate::round::votes::{LockState, count, found, held_by, holds, unheard};
use crate::round::{Round, RoundLimits, RoundOutcome, tally};
use crate::shared::Shared;

/// A lock with several slots, and how many of them a request takes.
pub(crate) struct SlottedLock {
    /// The keys of every slot, slot 1 first.
    keys: Box<[Keys]>,
    take: u16,
}

/// The slots that an attempt asks for.
#[derive(Debug)]
pub(crate) enum Choice {
    /// These slots were free.
    Free(SlotSet),
    /// An earlier grant of the same owner has these slots.
    Own(SlotSet),
    /// An earlier grant of the same owner has fewer slots than the request takes: the others were
    /// released, or are being released.
    PartOfOwn(HeldBy),
    /// An earlier grant of the owner may stand, with fewer slots than the request takes. Too few nodes
    /// answered to tell.
    PerhapsOwn(Vec<NodeReport>),
    /// Several grants of the owner may have a majority. The requests that made them will give up all
    /// but one.
    SeveralOwn,
    /// Too few slots are free.
    Full(HeldBy),
    /// The votes do not show that enough slots are free, or that they are not: contenders have
    /// divided the votes, or too few nodes answered about a slot.
    Undecided(Vec<NodeReport>),
}

impl SlottedLock {
    /// `None` for a lock with one slot: it is a lock like any other.
    pub(crate) fn new(shared: &Shared, name: &LockName, slots: Slots) -> Option<Self> {
        if slots.count() == 1 {
            return None;
        }
        let keys = (1..=slots.count()).map(|slot| shared.keys(&name.of_slot(slot))).collect();
        Some(Self { keys, take: slots.take() })
    }

    /// The keys of these slots, with `first` in front if it is one of them.
    pub(crate) fn keys_of(&self, slots: SlotSet, first: u16) -> Keys {
        let mut numbers: Vec<u16> = slots.iter().collect();
        if let Some(at) = numbers.iter().position(|slot| *slot == first) {
            numbers.swap(0, at);
        }
        let mut keys = numbers.iter().filter_map(|slot| self.keys.get(usize::from(*slot) - 1));
        let lead = keys.next().unwrap_or(&self.keys[0]).clone();
        lead.with(keys.cloned())
    }

    /// As many slots as a request takes, held ones first, and the first of them.
    pub(crate) fn with_a_held_one(&self, by: &HeldBy) -> (u16, SlotSet) {
        let held: Vec<u16> = by.holders().iter().map(|holder| holder.slot).collect();
        let others = (1..).take(self.keys.len()).filter(|slot| !held.contains(slot));
        let all = held.iter().copied().chain(others).take(self.take.into());
        (held.first().copied().unwrap_or(1), SlotSet::new(all).unwrap_or(SlotSet::FIRST))
    }

    /// Whether one released slot is all that a request needs.
    pub(crate) fn needs_only(&self, slot: u16) -> bool {
        self.take == 1 && usize::from(slot) <= self.keys.len()
    }

    /// Whether a request could have other slots than an earlier one with the same owner.
    pub(crate) fn has_choice(&self) -> bool {
        usize::from(self.take) < self.keys.len()
    }

    /// Chooses slots for an owner. Slots that no node stores come first. The order depends on the
    /// owner, so that requests at several gateways seldom choose the same slots.
    ///
    /// # Errors
    /// Too few nodes answered.
    pub(crate) async fn choose(
        &self,
        shared: &Shared,
        owner: &Owner,
        is_shared: bool,
        limits: RoundLimits,
    ) -> Result<Choice, LockError> {
        let (quorum, take) = (shared.quorum, usize::from(self.take));
        let is_full = |slots: &[Vec<Option<Vote>>]| {
            let taken = slots.iter().filter(|votes| holds(quorum, votes)).count();
            slots.len() - taken < take
        };
        let read = self.read(shared, limits, |slots| {
            let own = if is_shared { own_slots(quorum, slots, owner, None) } else { None };
            let free = slots.iter().filter(|votes| is_free(quorum, votes)).count();
            own.is_none_or(|(_, stands, _)| stands) && (free >= take || is_full(slots))
        });
        let (slots, outcome) = read.await?;
        if is_shared && let Some((own, stands, more)) = own_slots(quorum, &slots, owner, None) {
            let is_part = own.count() != self.take;
            let first = own.iter().next().and_then(|slot| slots.get(usize::from(slot) - 1));
            return Ok(match first {
                _ if more => Choice::SeveralOwn,
                _ if is_part && !stands => Choice::PerhapsOwn(shared.reports(&outcome)),
                Some(votes) if is_part => Choice::PartOfOwn(held_by(quorum, votes)),
                _ => Choice::Own(own),
            });
        }
        let count = slots.len();
        let turn = owner.spread() % count;
        let mut free: Vec<_> = slots
            .iter()
            .enumerate()
            .filter(|(_, votes)| is_free(quorum, votes))
            .map(|(at, votes)| (found(votes).count(), (at + count - turn) % count, at))
            .collect();
        if free.len() < take {
            return Ok(match is_full(&slots) {
                true => Choice::Full(self.full(quorum, &slots)),
                false => Choice::Undecided(shared.reports(&outcome)),
            });
        }
        free.sort_unstable();
        free.truncate(take);
        let chosen = SlotSet::new(free.into_iter().map(|(_, _, at)| at as u16 + 1));
        Ok(Choice::Free(chosen.unwrap_or(SlotSet::FIRST)))
    }

    /// Whether another grant of this owner may stand on a majority of nodes: two requests of one
    /// owner may have chosen different slots at the same time. Each reads after its grant, so at
    /// least one of them sees the other's.
    ///
    /// # Errors
    /// Too few nodes answered.
    pub(crate) async fn has_another_grant(
        &self,
        shared: &Shared,
        token: &LockToken,
        limits: RoundLimits,
    ) -> Result<bool, LockError> {
        let other = |slots: &[Vec<Option<Vote>>]| {
            own_slots(shared.quorum, slots, token.owner(), Some(token)).is_some()
        };
        let (slots, _) = self.read(shared, limits, |slots| !other(slots)).await?;
        Ok(other(&slots))
    }

    /// The votes about each slot, once they are `clear`, and at least those of a majority.
    ///
    /// # Errors
    /// Too few nodes answered.
    async fn read(
        &self,
        shared: &Shared,
        limits: RoundLimits,
        clear: impl Fn(&[Vec<Option<Vote>>]) -> bool,
    ) -> Result<(Vec<Vec<Option<Vote>>>, RoundOutcome), LockError> {
        let round = self.ask(shared, limits);
        let outcome = round.outcome().await;
        let is_heard = |vote: &Vote| matches!(vote, Vote::FoundOfSet(_));
        if count(&outcome.votes, is_heard) < shared.quorum.size() {
            return Err(LockError::NoQuorum(shared.reports(&outcome)));
        }
        let votes = round.votes_until(|votes| clear(&self.votes_of_each(votes))).await;
        Ok((self.votes_of_each(&votes), RoundOutcome { votes, ..outcome }))
    }

    fn ask(&self, shared: &Shared, limits: RoundLimits) -> Arc<Round> {
        shared.inspect(self.keys[0].clone().with(self.keys[1..].iter().cloned()), limits)
    }

    /// The votes of a reading as votes about each slot.
    fn votes_of_each(&self, votes: &[Option<Vote>]) -> Vec<Vec<Option<Vote>>> {
        let of_node = |vote: &Option<Vote>| match vote {
            Some(Vote::FoundOfSet(_)) => Some(Vote::Missing),
            vote => vote.clone(),
        };
        let none: Vec<_> = votes.iter().map(of_node).collect();
        let mut slots = vec![none; self.keys.len()];
        for (node, vote) in votes.iter().enumerate() {
            let Some(Vote::FoundOfSet(stand)) = vote else { continue };
            for holding in stand {
                if let Some(votes) = slots.get_mut(usize::from(holding.at)) {
                    votes[node] = Some(Vote::Found(Holding { at: 0, ..holding.clone() }));
                }
            }
        }
        slots
    }

    /// The refusal when too few slots are free: every holder, and when enough slots can be free.
    fn full(&self, quorum: Quorum, slots: &[Vec<Option<Vote>>]) -> HeldBy {
        let holders: Vec<_> = (1..)
            .zip(slots)
            .filter(|(_, votes)| holds(quorum, votes))
            .map(|(slot, votes)| SlotHolder { slot, by: held_by(quorum, votes) })
            .collect();
        let mut ends: Vec<_> = holders.iter().map(|holder| &holder.by).collect();
        ends.sort_by_key(|by| by.expires_in.unwrap_or(Duration::MAX));
        let free = slots.len() - holders.len();
        let last = usize::from(self.take).saturating_sub(free + 1);
        let by = ends.get(last).map(|by| (*by).clone()).unwrap_or_default();
        let full = FullLock { holders, wanted: self.take, free: free as u16 };
        HeldBy { owner: None, full: Some(Arc::new(full)), ..by }
    }
}

/// Reads the first `count` slots of a lock. Returns the votes about slot 1, the holders of all these
/// slots, and the slots of which too few nodes answered.
pub(crate) async fn holders(
    shared: &Shared,
    name: &LockName,
    count: u16,
) -> (Vec<Option<Vote>>, Vec<SlotHolder>, Vec<u16>) {
    let keys: Box<[Keys]> = (1..=count).map(|slot| shared.keys(&name.of_slot(slot))).collect();
    let slotted = SlottedLock { keys, take: 1 };
    let round = slotted.ask(shared, shared.untimed_limits());
    let quorum = shared.quorum;
    let question = Op::Inspect { keys: slotted.keys[0].clone() };
    let decision = |votes: &[Option<Vote>]| quorum.decide(tally(&question, votes));
    let is_clear = |votes: &[Option<Vote>]| {
        slotted.votes_of_each(votes).iter().all(|votes| decision(votes) != Decision::Open)
    };
    round.outcome().await;
    let votes = round.votes_until(is_clear).await;
    let mut slots = slotted.votes_of_each(&votes);
    let (mut holders, mut unknown) = (Vec::new(), Vec::new());
    for (slot, votes) in (1..).zip(&slots) {
        match LockState::of(quorum, decision(votes), votes) {
            LockState::Held(by) => holders.push(SlotHolder { slot, by }),
            LockState::Unknown => unknown.push(slot),
            LockState::Free => {}
        }
    }
    (slots.swap_remove(0), holders, unknown)
}

/// Whether a majority stores nothing for a slot.
fn is_free(quorum: Quorum, votes: &[Option<Vote>]) -> bool {
    count(votes, |vote| matches!(vote, Vote::Missing)) >= quorum.size()
}

/// The slots of an owner's grant that may stand on a majority of nodes, other than the grant
/// `except`; whether the votes show that it does; and whether there are more such grants. Of several,
/// the one with the most copies.
fn own_slots(
    quorum: Quorum,
    slots: &[Vec<Option<Vote>>],
    owner: &Owner,
    except: Option<&LockToken>,
) -> Option<(SlotSet, bool, bool)> {
    let is_other = |token: &LockToken| {
        token.owner() == owner && !except.is_some_and(|except| except.is_grant_of(token))
    };
    let tokens = |votes: &[Option<Vote>]| -> Vec<LockToken> {
        let parsed = found(votes).filter_map(|holding| holding.record.parse());
        parsed.map(|(token, _)| token).filter(is_other).collect()
    };
    let all: Vec<_> = slots.iter().map(|votes| tokens(votes)).collect();
    // An owner has few grants, so this list is short. But one grant may stand in every slot.
    let mut grants: Vec<LockToken> = Vec::new();
    for token in all.iter().flatten() {
        if !grants.contains(token) {
            grants.push(*token);
        }
    }
    let copies = |token: &LockToken| {
        let of_slot = |tokens: &Vec<_>| tokens.iter().filter(|other| *other == token).count();
        all.iter().map(of_slot).max().unwrap_or_default()
    };
    // All slots were read by the same nodes.
    let unheard = slots.first().map_or(0, |votes| unheard(votes));
    grants.retain(|token| copies(token) + unheard >= quorum.size());
    // Of two grants with as many copies, the one with the smaller T is that of the earlier request.
    let most = grants.iter().max_by_key(|token| (copies(token), Reverse(token.fencing())))?;
    let with_it = (1..).zip(&all).filter(|(_, tokens)| tokens.contains(most));
    let own = SlotSet::new(with_it.map(|(slot, _)| slot))?;
    Some((own, copies(most) >= quorum.size(), grants.len() > 1))
}
