//! Releases a lock: for its holder, by force, or because nobody will use the grant. If requests
//! wait for the lock in this process, the release hands it to the next of them.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::future::join_all;

use crate::error::{HeldBy, LockError};
use crate::model::quorum::Decision;
use crate::model::slots::SlotSet;
use crate::model::types::{FencingToken, Info, LockName, LockToken, Nonce, Owner, Ttl};
use crate::node::{Holding, Op, Record, ReleaseScope, Vote};
use crate::operations::acquire::{AcquireParams, Attempt, Waiters};
use crate::round::pending_releases::ReleaseAccount;
use crate::round::votes::{
    LockState, agreeing, count, found, held_by, may_be_held, not_held, released_grant, same_owner,
    unheard, without,
};
use crate::round::{Round, RoundOutcome};
use crate::shared::{ALL_NODES, Shared};
use crate::wait::Fits;

/// What a release needs of its gateway: the waiters, one of whom may get the lock, and the account for
/// retries.
#[derive(Clone, Copy)]
pub(crate) struct Caller<'a> {
    pub(crate) waiters: &'a Waiters,
    pub(crate) client: &'a ReleaseAccount,
}

/// Releases every slot that the token has.
pub(crate) async fn release(
    shared: &Arc<Shared>,
    caller: Caller<'_>,
    name: &LockName,
    token: &LockToken,
) -> Result<(), LockError> {
    let round = begin_release(shared, caller, (name, token.slots()), token);
    let mut result = released(shared, &round).await;
    for other in round.others() {
        // Boxed, because an unboxed future would make every release larger.
        result = worse(result, Box::pin(released(shared, other)).await);
    }
    result
}

/// Of the results for two locks of one grant, the one that its holder must know.
fn worse(one: Result<(), LockError>, other: Result<(), LockError>) -> Result<(), LockError> {
    let rank = |result: &Result<(), LockError>| match result {
        Ok(()) => 0,
        Err(LockError::Lost) => 1,
        Err(LockError::NotHolder(_)) => 2,
        Err(_) => 3,
    };
    if rank(&other) > rank(&one) { other } else { one }
}

/// Sends the release of some slots on behalf of their holder. Does not wait for the answers.
pub(crate) fn begin_release(
    shared: &Arc<Shared>,
    caller: Caller<'_>,
    (name, slots): (&LockName, SlotSet),
    token: &LockToken,
) -> Arc<Round> {
    match keeping(shared, token) {
        None => release_and_hand_off(shared, caller, (name, slots), token, ReleaseScope::Holder),
        // Nobody can have the lock yet, so it is handed to nobody.
        Some(life) => {
            let keys = shared.keys_of_grant(std::slice::from_ref(name), slots);
            let record = Record::new(token, &Info::default());
            let began_micros = shared.env.clock.wall_micros();
            let scope = ReleaseScope::HolderKeeping { life, began_micros };
            let op = Op::Release { keys, record, scope, tell: None };
            shared.release_on(Arc::new(op), ALL_NODES, caller.client)
        }
    }
}

/// The result of a release that has been sent.
async fn released(shared: &Arc<Shared>, round: &Round) -> Result<(), LockError> {
    let decision = round.decided().await;
    match decision {
        Decision::Yes => Ok(()),
        Decision::No => Err(not_held(shared.quorum, &shared.clear_votes(round).await)),
        Decision::Neither | Decision::Open => {
            let outcome = round.outcome_of(decision);
            let released = count(&outcome.votes, |vote| matches!(vote, Vote::Released));
            let refused = count(&outcome.votes, |vote| match vote {
                Vote::Held(_) | Vote::Missing => true,
                Vote::Failed(failure) => failure.is_of_nothing_found(),
                _ => false,
            });
            // At least one node stored our grant and has released it, so the grant may have been on
            // a majority. A majority has answered now, and none of these nodes stores the grant any
            // more. So no majority can store it.
            if released > 0 && released + refused >= shared.quorum.size() {
                return Ok(());
            }
            Err(LockError::Unknown(shared.reports(&outcome)))
        }
    }
}

/// How long a release keeps the lock from everybody; `None` if it does not.
pub(crate) fn keeping(shared: &Shared, token: &LockToken) -> Option<Ttl> {
    if token.hold().is_zero() {
        return None;
    }
    let left = token.hold().saturating_sub(shared.tokens.age(token.fencing()));
    Ttl::from_millis(left.as_millis().try_into().ok()?)
        .ok()
        .map(|left| left.min(shared.settings.max_ttl))
}

/// `on_found` is called with the holder that was found, before any release is sent to the nodes.
pub(crate) async fn force_release(
    shared: &Arc<Shared>,
    caller: Caller<'_>,
    slot: (&LockName, u16),
    on_found: impl FnOnce(&HeldBy) + Send,
) -> Result<(), LockError> {
    let keys = shared.keys_of_slot(slot);
    let round = shared.inspect(keys, shared.untimed_limits());
    round.votes_until(|_| false).await;
    let outcome = round.outcome().await;
    if let Some(grant) = released_grant(shared.quorum, &outcome.votes) {
        on_found(&held_by(shared.quorum, &outcome.votes));
        let (_, round) = end_hold(shared, caller, slot, &grant);
        return hold_ended(released(shared, &round).await);
    }
    let keeps_free = |holding: &&Holding| holding.record.is_placeholder();
    let kept_free = found(&outcome.votes)
        .filter(keeps_free)
        .filter_map(|holding| holding.record.fencing())
        .max();
    let state = LockState::of(shared.quorum, outcome.decision, &outcome.votes);
    let is_held = matches!(&state, LockState::Held(by) if by.owner != Some(Owner::NOBODY));
    if let (Some(t), false) = (kept_free, is_held) {
        return release_kept_free(shared, caller, slot, &outcome, t, on_found).await;
    }
    let by = match state {
        LockState::Held(by) => by,
        LockState::Free => return Err(LockError::Lost),
        LockState::Unknown => return Err(LockError::Unknown(shared.reports(&outcome))),
    };
    // A node that missed the owner's last grant may still store an older one. A release with the
    // older T would spare the newer grant, so the release uses the largest T.
    let owner = agreeing(&outcome.votes).map(|(majority, _)| majority);
    let its_own = found(&outcome.votes)
        .filter(|holding| owner.is_some_and(|owner| same_owner(holding, owner)));
    let tokens = its_own.filter_map(|holding| holding.record.parse()).map(|(token, _)| token);
    match tokens.max_by_key(LockToken::fencing) {
        Some(token) => {
            on_found(&by);
            released(shared, &begin_release(shared, caller, only(slot), &token)).await
        }
        None => Err(LockError::NotHolder(by)),
    }
}

/// Sends the release of a grant, for the nodes that its release has not reached, and the release of the
/// placeholders on the others. Returns the token that the placeholders have. Does not wait for the
/// answers.
fn end_hold(
    shared: &Arc<Shared>,
    caller: Caller<'_>,
    slot: (&LockName, u16),
    grant: &LockToken,
) -> (LockToken, Arc<Round>) {
    let keys = shared.keys_of_slot(slot);
    let record = Record::new(grant, &Info::default());
    let op = Op::Release { keys, record, scope: ReleaseScope::Holder, tell: None };
    shared.release_on(Arc::new(op), ALL_NODES, caller.client);
    let token = LockToken::new(Owner::NOBODY, Nonce::ZERO, grant.fencing());
    (token, release_and_hand_off(shared, caller, only(slot), &token, ReleaseScope::Holder))
}

/// The result of [`end_hold`]. The placeholders may be gone, or were on a minority beside the grant.
fn hold_ended(result: Result<(), LockError>) -> Result<(), LockError> {
    match result {
        Err(LockError::Lost) => Ok(()),
        other => other,
    }
}

/// Releases a lock that recovery keeps free on some nodes: first every stored grant, then the
/// records that keep the lock free, whose T is at most `t`. Those records stand for a grant that
/// some nodes have lost. They are released only if every node answered, because a node without an
/// answer may still store that grant.
async fn release_kept_free(
    shared: &Arc<Shared>,
    caller: Caller<'_>,
    slot: (&LockName, u16),
    outcome: &RoundOutcome,
    t: FencingToken,
    on_found: impl FnOnce(&HeldBy) + Send,
) -> Result<(), LockError> {
    let by = held_by(shared.quorum, &outcome.votes);
    let mut tokens = Vec::new();
    for holding in found(&outcome.votes).filter(|holding| !holding.record.is_placeholder()) {
        let Some((token, _)) = holding.record.parse() else { return Err(LockError::NotHolder(by)) };
        tokens.push(token);
    }
    // Keeps only the newest grant of each owner.
    tokens.sort_unstable_by_key(|token| std::cmp::Reverse(token.fencing()));
    let mut owners = HashSet::new();
    tokens.retain(|token| owners.insert(*token.owner()));
    on_found(&by);
    for token in &tokens {
        match released(shared, &begin_release(shared, caller, only(slot), token)).await {
            Ok(()) | Err(LockError::Lost) => {}
            Err(LockError::NotHolder(by)) if by.owner == Some(Owner::NOBODY) => {}
            Err(error) => return Err(error),
        }
    }
    let is_heard = |vote: &Option<Vote>| matches!(vote, Some(Vote::Found(_) | Vote::Missing));
    if !outcome.votes.iter().all(is_heard) {
        return Err(LockError::Unknown(shared.reports(outcome)));
    }
    let token = LockToken::new(Owner::NOBODY, Nonce::ZERO, t);
    let round = release_and_hand_off(shared, caller, only(slot), &token, ReleaseScope::Holder);
    round.outcome().await;
    let votes = round.votes_until(|_| false).await;
    let is_gone =
        |vote: &Option<Vote>| matches!(vote, Some(Vote::Released | Vote::Missing | Vote::Held(_)));
    if votes.iter().all(is_gone) {
        Ok(())
    } else {
        Err(LockError::Unknown(shared.reports(&round.outcome().await)))
    }
}

/// How many releases one call of [`release_owner`] sends at most.
const MOST_RELEASES: u32 = 3;

/// Releases every grant of an owner, for a client that never received the token. Returns the T up
/// to which grants were released.
///
/// The T is minted before any node is read. So it is larger than the T of every acquire that has
/// begun by then, as far as the gateways' clocks agree. An acquire still in flight is refused,
/// because it meets a watermark above its T.
///
/// An acquire of the same owner that begins later has a larger T. If it is granted before the
/// release arrives, the nodes refuse the release. Then this function reads the nodes and releases
/// again, with a new T.
///
/// If the owner has released the lock with a time to hold, this ends the hold. The T of that release is
/// old, so a release with a new T follows.
pub(crate) async fn release_owner(
    shared: &Arc<Shared>,
    caller: Caller<'_>,
    slot: (&LockName, u16),
    owner: &Owner,
) -> Result<FencingToken, LockError> {
    let mut sent = 0;
    let mut ended = None;
    loop {
        sent += 1;
        let begun = begin_release_of_owner(shared, caller, slot, owner).await;
        let result = match begun {
            Ok((token, round)) => match released(shared, &round).await {
                Err(LockError::NotHolder(by)) if by.owner == Some(*owner) => {
                    if sent < MOST_RELEASES {
                        continue;
                    }
                    Err(LockError::Unknown(shared.reports(&round.outcome().await)))
                }
                other if token.owner() == &Owner::NOBODY => hold_ended(other).map(|()| token),
                other => other.map(|()| token),
            },
            Err(error) => Err(error),
        };
        match result {
            Ok(token) if token.owner() == &Owner::NOBODY && sent < MOST_RELEASES => {
                ended = Some(token.fencing());
            }
            Ok(token) => return Ok(token.fencing()),
            Err(error @ (LockError::Lost | LockError::NotHolder(_))) => {
                return ended.ok_or(error);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Reads the owner's grants from the nodes, and sends one release for all of them. Does not wait for
/// the nodes' answers to the release: returns the token that was released, and the round that collects
/// those answers.
///
/// # Errors
/// [`LockError::NotHolder`] or [`LockError::Lost`]: the owner has no grant to release.
/// [`LockError::Unknown`]: too few nodes answered to say whether it has one.
async fn begin_release_of_owner(
    shared: &Arc<Shared>,
    caller: Caller<'_>,
    slot: (&LockName, u16),
    owner: &Owner,
) -> Result<(LockToken, Arc<Round>), LockError> {
    let minted = shared.tokens.mint();
    let keys = shared.keys_of_slot(slot);
    let round = shared.inspect(keys, shared.untimed_limits());
    round.outcome().await;
    let votes = round.votes_until(|_| false).await;
    if let Some(grant) = released_grant(shared.quorum, &votes).filter(|it| it.owner() == owner) {
        return Ok(end_hold(shared, caller, slot, &grant));
    }
    let is_theirs = |grant: LockToken| grant.owner() == owner;
    let has_hold =
        found(&votes).any(|holding| holding.record.released_grant().is_some_and(is_theirs));
    let tokens = found(&votes).filter_map(|holding| holding.record.parse()).map(|(token, _)| token);
    let granted = tokens.filter(|token| token.owner() == owner).max_by_key(LockToken::fencing);
    // The release leaves its T as a watermark on the nodes. A watermark above another holder's T
    // would prevent a repair of that holder's lock on a node that lost it. So the release uses the
    // newly minted T only if nobody else can hold the lock. Otherwise it uses the T of the owner's
    // own grant.
    let others = without(owner, &votes);
    let newer = minted.filter(|_| !may_be_held(shared.quorum, &others));
    let token = match (granted, newer) {
        (Some(granted), None) => granted,
        (Some(granted), Some(newer)) if granted.fencing() >= newer => granted,
        (_, Some(newer)) => LockToken::new(*owner, shared.env.entropy.nonce(), newer),
        // With a hold on a minority, the other nodes may have lost it and recovered. Their records do
        // not tell whose hold they stand for, so the outcome is unknown.
        (None, None) if minted.is_none() || unheard(&votes) >= shared.quorum.size() || has_hold => {
            return Err(LockError::Unknown(
                shared.reports(&RoundOutcome { decision: Decision::Neither, votes }),
            ));
        }
        (None, None) => return Err(not_held(shared.quorum, &others)),
    };
    let round = begin_release(shared, caller, only(slot), &token);
    Ok((token, round))
}

/// Releases every grant of an owner on any slot of a lock. Returns the largest T up to which grants
/// were released.
pub(crate) async fn release_owner_of_slots(
    shared: &Arc<Shared>,
    caller: Caller<'_>,
    (name, count): (&LockName, u16),
    owner: &Owner,
) -> Result<FencingToken, LockError> {
    let slots = (1..=count).map(|slot| release_owner(shared, caller, (name, slot), owner));
    let results = join_all(slots).await;
    if let Some(unknown) =
        results.iter().find(|result| matches!(result, Err(LockError::Unknown(_))))
    {
        return unknown.clone();
    }
    let released = results.into_iter().filter_map(Result::ok).max();
    // Other owners may hold slots. That is no answer to the question whether this one does.
    released.ok_or(LockError::Lost)
}

/// Undoes a grant that was never returned to a client, on each of these locks and on each of its
/// slots. Does not wait for the answers.
///
/// A node undoes the whole grant in one operation. It spares the locks that a repetition of the request
/// has extended. A repetition extends all locks in one operation too, so no part of them stays.
pub(crate) fn undo_grant(
    shared: &Arc<Shared>,
    caller: Caller<'_>,
    names: &[LockName],
    token: &LockToken,
) {
    let scope = ReleaseScope::Proposal;
    if let ([name], 1) = (names, token.slots().count()) {
        release_and_hand_off(shared, caller, (name, token.slots()), token, scope);
        return;
    }
    let keys = shared.keys_of_grant(names, token.slots());
    let locks = names.iter().map(|name| shared.keys(name).lock);
    let t = || hint_token(shared, token);
    caller.waiters.release_without_handoff(
        locks,
        t,
        || hints_arrive(shared),
        |tell| {
            let record = Record::new(token, &Info::default());
            let op = Op::Release { keys, record, scope, tell };
            shared.release_on(Arc::new(op), ALL_NODES, caller.client);
        },
    );
}

/// Whether any node passes on hints.
fn hints_arrive(shared: &Shared) -> bool {
    shared.nodes.iter().any(|node| node.is_subscribed())
}

/// The T of a hint about a release of this grant. The T tells the hints about different releases
/// apart. The slots of one grant have the same T, so a hint gets a T of its own.
fn hint_token(shared: &Shared, token: &LockToken) -> FencingToken {
    shared.tokens.mint().map_or(token.fencing(), |now| now.max(token.fencing()))
}

/// One slot as a set of slots.
fn only((name, slot): (&LockName, u16)) -> (&LockName, SlotSet) {
    (name, SlotSet::new([slot]).expect("a slot from 1 to 256"))
}

/// Releases a grant of some slots of a lock on all nodes. If the plan names a first waiter, the same
/// call asks for one of the slots on behalf of that waiter. When the waiter has it, the next waiter
/// tries for the other slots. For a grant that was never returned to a client, `scope` is
/// [`ReleaseScope::Proposal`].
pub(crate) fn release_and_hand_off(
    shared: &Arc<Shared>,
    caller: Caller<'_>,
    (name, slots): (&LockName, SlotSet),
    token: &LockToken,
    scope: ReleaseScope,
) -> Arc<Round> {
    let keys = shared.keys_of_grant(std::slice::from_ref(name), slots);
    let queue = if slots.has(1) { keys.lock.clone() } else { shared.keys(name).lock };
    let t = || hint_token(shared, token);
    // A waiter that needs more than one slot tries by itself.
    let fitting = |first: &AcquireParams| slots.iter().find(|slot| first.fits_slot(*slot));
    let fits = |first: &AcquireParams| match fitting(first) {
        None => Fits::No,
        Some(_) if slots.count() == 1 => Fits::All,
        Some(_) => Fits::Part,
    };
    let plan = caller.waiters.plan_handoff(&queue, fits, t, || hints_arrive(shared));
    plan.carry_out(|first, hint| {
        let record = Record::new(token, &Info::default());
        let op = Arc::new(Op::Release { keys, record, scope, tell: hint });
        let attempt =
            first.and_then(|first| Attempt::for_released(shared, first.clone(), fitting(first)?));
        if let Some(mut attempt) = attempt {
            // If the attempt cannot be prepared, the waiter tries by itself, and can report the
            // error.
            if let Ok(next) = attempt.prepare() {
                let round = shared.release_round(op, caller.client);
                let round = round.ask_before(&shared.nodes, ALL_NODES, next);
                return (round, Some(attempt));
            }
        }
        (shared.release_on(op, ALL_NODES, caller.client), None)
    })
}
