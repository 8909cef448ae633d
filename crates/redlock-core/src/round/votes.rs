//! Reads from a round's votes who holds a lock, and who may hold it. Pure functions.

use std::time::Duration;

use crate::error::{HeldBy, LockError, NodeAnswer};
use crate::model::quorum::{Decision, Quorum};
use crate::model::types::{LockToken, Owner, Ttl};
use crate::node::{Holding, Vote};

/// The majority's view of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LockState {
    /// A majority stores the same holder. `expires_in` is the time until fewer than a majority
    /// store that holder, if nothing is extended or released.
    Held(HeldBy),
    /// No holder can have a majority.
    Free,
    /// Too few nodes answered to tell.
    Unknown,
}

impl LockState {
    /// The state that an inspection's votes show.
    pub(crate) fn of(quorum: Quorum, decision: Decision, votes: &[Option<Vote>]) -> Self {
        match (decision, agreeing(votes)) {
            (Decision::Yes, Some((majority, _))) => {
                let its_own = || found(votes).filter(|holding| same_owner(holding, majority));
                let mut lives: Vec<_> = its_own().map(|holding| holding.expires_in).collect();
                // The holder loses the majority when the quorum-th longest life ends.
                lives.sort_by_key(|life| std::cmp::Reverse(life.unwrap_or(Duration::MAX)));
                let expires_in = lives.get(quorum.size() - 1).copied().flatten();
                // Some nodes may store another grant of this owner: an earlier one, or a proposal that
                // failed. The grant with the most copies is shown.
                let copies = |holding: &&Holding| {
                    its_own().filter(|other| other.record.is_grant_of(&holding.record)).count()
                };
                let grant = its_own().max_by_key(copies).unwrap_or(majority);
                Self::Held(HeldBy::from_holding(grant, expires_in))
            }
            (Decision::No, _) => Self::Free,
            // All nodes answered and no owner has a majority: the lock is free.
            (Decision::Neither, _)
                if votes
                    .iter()
                    .all(|vote| matches!(vote, Some(Vote::Found(_) | Vote::Missing))) =>
            {
                Self::Free
            }
            (Decision::Yes | Decision::Neither | Decision::Open, _) => Self::Unknown,
        }
    }
}

/// The holder of a lock, from the votes of the nodes that refused it. `expires_in` is the earliest
/// time at which a majority of nodes can be free: then the records on all but `blocking − 1` of the
/// refusing nodes have expired.
///
/// Of a set, this is about the lock that most refusals name.
pub(crate) fn held_by(quorum: Quorum, votes: &[Option<Vote>]) -> HeldBy {
    agreeing(votes).map_or_else(HeldBy::default, |(holder, _)| refusal_by(quorum, votes, holder))
}

fn refusal_by(quorum: Quorum, votes: &[Option<Vote>], holder: &Holding) -> HeldBy {
    let mut refusals: Vec<&Holding> =
        stored(votes).filter(|holding| holding.at == holder.at).collect();
    // A key without expiry sorts last.
    refusals.sort_by_key(|holding| holding.expires_in.unwrap_or(Duration::MAX));
    let deciding =
        refusals.get(refusals.len().saturating_sub(quorum.blocking())).or(refusals.last());
    let expires_in = deciding.and_then(|holding| holding.expires_in);
    HeldBy::from_holding(holder, expires_in)
}

/// As [`held_by`], for a refusal that contenders may have caused. A holder that has a majority, or
/// that every node with an answer shows, is shown. One that may have a majority is not named. Otherwise
/// nobody is shown.
pub(crate) fn held_or_asked_for_by(quorum: Quorum, votes: &[Option<Vote>]) -> HeldBy {
    let Some((holder, shows)) = agreeing(votes) else { return HeldBy::default() };
    let by = refusal_by(quorum, votes, holder);
    let may_hold = shows + unheard(votes) >= quorum.size();
    if shows >= quorum.size() || shows == shown(votes) && may_hold {
        by
    } else if may_hold {
        HeldBy { info: Default::default(), fencing: None, ..by }
    } else {
        HeldBy { lock_of_set: by.lock_of_set, ..HeldBy::default() }
    }
}

/// The error of a refused extend or release: the lock is lost, or somebody else holds it. A record
/// on a minority of nodes may come from a failed proposal. So only a grant that can still be on a
/// majority counts as held.
pub(crate) fn not_held(quorum: Quorum, votes: &[Option<Vote>]) -> LockError {
    let holder = can_hold(quorum, votes).then(|| held_by(quorum, votes));
    // A record that keeps the lock free is nobody's.
    match holder.filter(|by| !by.is_kept_free()) {
        Some(by) => LockError::NotHolder(by),
        None => LockError::Lost,
    }
}

/// The released grant that a majority keeps free until the end of its hold. On some of these nodes the
/// grant itself may stand, because its release has not arrived. Each of them stored the grant, and has
/// refused all others since. So nobody else can have a majority. A placeholder of recovery does not
/// count: its node may have granted the lock to somebody else before it lost its data.
pub(crate) fn released_grant(quorum: Quorum, votes: &[Option<Vote>]) -> Option<LockToken> {
    let released = |holding: &Holding| holding.record.released_grant();
    let newest = found(votes).filter_map(released).max_by_key(LockToken::fencing)?;
    let is_of = |holding: &&Holding| {
        released(holding).or_else(|| Some(holding.record.parse()?.0)) == Some(newest)
    };
    (found(votes).filter(is_of).count() >= quorum.size()).then_some(newest)
}

/// Whether a majority shows one holder.
pub(crate) fn holds(quorum: Quorum, votes: &[Option<Vote>]) -> bool {
    agreeing(votes).is_some_and(|(_, count)| count >= quorum.size())
}

/// Whether a holder that some votes show may have a majority, if the nodes without an answer store
/// it too.
pub(crate) fn can_hold(quorum: Quorum, votes: &[Option<Vote>]) -> bool {
    agreeing(votes).is_some_and(|(_, count)| count + unheard(votes) >= quorum.size())
}

/// Whether anybody may have the lock on a majority: a holder that some votes show, or one that only
/// nodes without an answer store.
pub(crate) fn may_be_held(quorum: Quorum, votes: &[Option<Vote>]) -> bool {
    can_hold(quorum, votes) || unheard(votes) >= quorum.size()
}

/// The votes of an inspection as they would be if this owner had no grants.
pub(crate) fn without(owner: &Owner, votes: &[Option<Vote>]) -> Vec<Option<Vote>> {
    let is_theirs =
        |holding: &Holding| holding.record.parse().is_some_and(|(token, _)| token.owner() == owner);
    let others = votes.iter().map(|vote| match vote {
        Some(Vote::Found(holding)) if is_theirs(holding) => Some(Vote::Missing),
        vote => vote.clone(),
    });
    others.collect()
}

/// Whether a majority answered, and its votes are split among contenders. If one contender had all
/// of that majority, the round would have been decided. A node that failed may have the deciding
/// vote, so a contender may have the lock in spite of the split.
pub(crate) fn is_split(quorum: Quorum, votes: &[Option<Vote>]) -> bool {
    stored(votes).count() > 0 && shown(votes) >= quorum.size()
}

/// Whether the outstanding votes can still show a split.
pub(crate) fn may_be_split(quorum: Quorum, votes: &[Option<Vote>]) -> bool {
    let outstanding = votes.iter().filter(|vote| vote.is_none()).count();
    shown(votes) + outstanding >= quorum.size()
}

/// The number of nodes that granted an acquire, or show which lock refuses it.
fn shown(votes: &[Option<Vote>]) -> usize {
    count(votes, |vote| matches!(vote, Vote::Granted)) + stored(votes).count()
}

/// Another grant of the asking owner, as the votes show it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OwnGrant {
    /// A majority stores this grant.
    Stands(LockToken),
    /// A grant is on a majority if other nodes store it too, or have lost it: nodes without an answer,
    /// and nodes on which recovery keeps the lock free.
    Possible,
    /// No grant can be on a majority.
    None,
}

/// Which grant of the asking owner already stands, if any.
pub(crate) fn own_grant(quorum: Quorum, votes: &[Option<Vote>]) -> OwnGrant {
    let own = || {
        votes.iter().flatten().filter_map(|vote| match vote {
            Vote::Yours(holding) => holding.record.parse().map(|(token, _)| token),
            _ => None,
        })
    };
    let counted = own().map(|token| (token, own().filter(|other| *other == token).count()));
    match counted.max_by_key(|(_, count)| *count) {
        Some((token, count)) if count >= quorum.size() => OwnGrant::Stands(token),
        most if may_stand(quorum, most.map_or(0, |(_, count)| count), votes) => OwnGrant::Possible,
        _ => OwnGrant::None,
    }
}

/// Whether a grant with this many copies may have a majority. A node may have lost a copy, and recovery
/// keeps the lock free there instead. Such records alone show nothing, because they may stand for any
/// grant. But a node without an answer may have the copy for which they stand.
pub(crate) fn may_stand(quorum: Quorum, copies: usize, votes: &[Option<Vote>]) -> bool {
    let kept_free = count(votes, |vote| match vote {
        Vote::Held(Holding { record, .. }) | Vote::Found(Holding { record, .. }) => {
            record.is_placeholder() && record.released_grant().is_none()
        }
        _ => false,
    });
    let seen_or_unheard = copies + unheard(votes);
    seen_or_unheard > 0 && seen_or_unheard + kept_free >= quorum.size()
}

/// How many nodes showed a grant of this owner in an inspection.
pub(crate) fn copies_of(owner: &Owner, votes: &[Option<Vote>]) -> usize {
    let is_own =
        |holding: &Holding| holding.record.parse().is_some_and(|(token, _)| token.owner() == owner);
    count(votes, |vote| match vote {
        Vote::Found(holding) => is_own(holding),
        Vote::FoundOfSet(holdings) => holdings.iter().any(is_own),
        _ => false,
    })
}

/// How long a majority stores the lock: the TTL of a grant, or the quorum-th longest life of an
/// extension. That life is longer than the TTL if the nodes kept the lock for longer anyway, and
/// shorter if the extension reached them late.
pub(crate) fn life(quorum: Quorum, ttl: Ttl, votes: &[Option<Vote>]) -> Duration {
    let lives = || {
        votes.iter().flatten().filter_map(|vote| match vote {
            Vote::Extended { expires_in } => Some(*expires_in),
            _ => None,
        })
    };
    let ttl = ttl.duration();
    // The usual case: a majority keeps the lock for exactly the TTL.
    if lives().filter(|life| *life == ttl).count() >= quorum.size()
        && lives().all(|life| life <= ttl)
        || lives().count() < quorum.size()
    {
        return ttl;
    }
    let mut lives: Vec<_> = lives().collect();
    lives.sort_unstable_by(|a, b| b.cmp(a));
    lives[quorum.size() - 1]
}

/// The number of nodes without an answer, or without an answer that shows what they store.
pub(crate) fn unheard(votes: &[Option<Vote>]) -> usize {
    votes.iter().filter(|vote| matches!(vote, None | Some(Vote::Failed(_)))).count()
}

pub(crate) fn count(votes: &[Option<Vote>], is: impl Fn(&Vote) -> bool) -> usize {
    votes.iter().flatten().filter(|vote| is(vote)).count()
}

/// The holdings that an inspection found.
pub(crate) fn found(votes: &[Option<Vote>]) -> impl Iterator<Item = &Holding> {
    votes.iter().flatten().filter_map(|vote| match vote {
        Vote::Found(holding) => Some(holding),
        _ => None,
    })
}

/// The holdings that an inspection found or a refusal shows.
fn stored(votes: &[Option<Vote>]) -> impl Iterator<Item = &Holding> {
    votes.iter().flatten().filter_map(|vote| match vote {
        Vote::Found(holding) | Vote::Held(holding) | Vote::Yours(holding) => Some(holding),
        _ => None,
    })
}

/// The holding that most nodes agree on, and the number of those nodes. Nodes agree when they store
/// the same owner, or the same value of another client.
pub(crate) fn agreeing(votes: &[Option<Vote>]) -> Option<(&Holding, usize)> {
    // Every refused acquire passes here. Most nodes store the same record, so only a record that
    // differs from the one before is parsed.
    let mut holdings: Vec<(&Holding, Holder)> = Vec::with_capacity(votes.len());
    for holding in stored(votes) {
        let by = match holdings.last() {
            Some((last, by)) if last.record == holding.record => *by,
            _ => holder(holding),
        };
        holdings.push((holding, by));
    }
    let agree = |(holding, by): &(_, Holder)| {
        (*holding, holdings.iter().filter(|(_, other)| other == by).count())
    };
    holdings.iter().map(agree).max_by_key(|(_, count)| *count)
}

/// The holder of a lock, as one node shows it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder<'a> {
    /// One of our owners, with any T.
    Owner(&'a [u8]),
    /// Another client, identified by its stored value.
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

/// A vote as a failed round reports it.
pub(crate) fn answer(vote: Option<&Vote>) -> NodeAnswer {
    match vote {
        None => NodeAnswer::Pending,
        Some(Vote::Granted | Vote::Extended { .. } | Vote::Released) => NodeAnswer::Agreed,
        Some(Vote::Found(_) | Vote::FoundOfSet(_) | Vote::Each(_)) => NodeAnswer::Agreed,
        Some(Vote::Held(_)) => NodeAnswer::Refused("held by somebody else"),
        Some(Vote::Yours(_)) => NodeAnswer::Refused("held by another grant of this owner"),
        Some(Vote::Missing) => NodeAnswer::Refused("has no such lock"),
        Some(Vote::Stale { .. }) => NodeAnswer::Refused("has seen a newer fencing token"),
        Some(Vote::Failed(failure)) => NodeAnswer::Failed(failure.clone()),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::node::{Effect, Failure, Reason, Record};

    #[test]
    fn a_hold_and_its_grant_together_show_a_release_and_a_placeholder_does_not() {
        let quorum = Quorum::new(3).unwrap();
        let record = |text: String| Record::foreign(Bytes::from(text));
        let of = |record: &Record| {
            Some(Vote::Found(Holding { record: record.clone(), expires_in: None, at: 0 }))
        };
        let t = 1_763_725_165_000_000_u64;
        let grant = record(format!("{t}:{}:", "1".repeat(40)));
        let other = record(format!("{}:{}:", t + 1, "1".repeat(40)));
        let hold = Record::hold(&grant, grant.fencing().unwrap());
        let placeholder = Record::placeholder(grant.fencing().unwrap());
        let shows = |votes: &[Option<Vote>]| released_grant(quorum, votes).is_some();
        assert!(shows(&[of(&hold), of(&hold), None]));
        assert!(shows(&[of(&hold), of(&grant), None]));
        for second in [&placeholder, &other] {
            assert!(!shows(&[of(&hold), of(second), None]), "{second:?}");
        }
        assert!(!shows(&[of(&grant), of(&grant), of(&grant)]), "nobody has released it");
        assert!(!shows(&[of(&hold), Some(Vote::Missing), None]));
    }

    #[test]
    fn a_node_on_which_recovery_keeps_the_lock_free_may_have_lost_a_copy() {
        let quorum = Quorum::new(3).unwrap();
        let t = 1_763_725_165_000_000_u64;
        let record = |text: String| Record::foreign(Bytes::from(text));
        let grant = record(format!("{t}:{}:", "1".repeat(40)));
        let hold = Record::hold(&grant, grant.fencing().unwrap());
        let placeholder = Record::placeholder(grant.fencing().unwrap());
        let other = record(format!("{t}:{}:", "2".repeat(40)));
        let of = |record: &Record| Holding { record: record.clone(), expires_in: None, at: 0 };
        let held = |record| Some(Vote::Held(of(record)));
        let yours = Some(Vote::Yours(of(&grant)));
        for (second, third, wanted) in [
            (yours.clone(), Some(Vote::Granted), OwnGrant::Stands(grant.parse().unwrap().0)),
            (held(&placeholder), Some(Vote::Granted), OwnGrant::Possible),
            (held(&placeholder), held(&placeholder), OwnGrant::Possible),
            (held(&hold), held(&other), OwnGrant::None),
            (held(&other), Some(Vote::Granted), OwnGrant::None),
        ] {
            let votes = [yours.clone(), second, third];
            assert_eq!(own_grant(quorum, &votes), wanted, "{votes:?}");
        }
        // The node that does not answer may have the copy, and the record stands for another.
        for open in [None, Some(Vote::Failed(Failure::new(Reason::Down, Effect::None, "")))] {
            let votes = [held(&placeholder), held(&other), open];
            assert_eq!(own_grant(quorum, &votes), OwnGrant::Possible, "{votes:?}");
        }
        let votes = [held(&other), held(&hold), None];
        assert_eq!(own_grant(quorum, &votes), OwnGrant::None);
        // Without a copy, the record may stand for any grant.
        let votes = [held(&placeholder), held(&placeholder), held(&placeholder)];
        assert_eq!(own_grant(quorum, &votes), OwnGrant::None);
        assert!(!may_stand(quorum, 0, &votes));
    }

    #[test]
    fn the_grant_with_the_most_copies_is_shown() {
        let quorum = Quorum::new(5).unwrap();
        let of = |t: u64| {
            let record = Record::foreign(Bytes::from(format!("{t}:{}:", "1".repeat(40))));
            Some(Vote::Found(Holding { record, expires_in: None, at: 0 }))
        };
        let (old, granted, proposed) =
            (1_763_725_165_000_000, 1_763_725_166_000_000, 1_763_725_167_000_000);
        for stale in [old, proposed] {
            for at in 0..5 {
                let mut votes = vec![of(granted); 4];
                votes.insert(at, of(stale));
                let LockState::Held(by) = LockState::of(quorum, Decision::Yes, &votes) else {
                    panic!("a majority has one owner");
                };
                assert_eq!(by.fencing.map(|t| t.get()), Some(granted), "{stale} on node {at}");
            }
        }
    }

    #[test]
    fn a_life_is_the_quorum_th_longest_of_the_votes() {
        let quorum = Quorum::new(5).unwrap();
        let ttl = Ttl::from_millis(1_000).unwrap();
        let votes = |lives: &[u64]| -> Vec<Option<Vote>> {
            let extended =
                |millis: &u64| Vote::Extended { expires_in: Duration::from_millis(*millis) };
            lives
                .iter()
                .map(|millis| Some(extended(millis)))
                .chain([Some(Vote::Missing), None])
                .collect()
        };
        for (lives, wanted) in [
            (&[90_000, 20_000, 1_000][..], 1_000),
            (&[90_000, 20_000, 30_000, 10_000], 20_000),
            (&[20_000, 20_000, 20_000], 20_000),
            // The extension reached two nodes late.
            (&[1_000, 400, 300], 300),
            // Two votes, or none, are no majority.
            (&[90_000, 20_000], 1_000),
            (&[], 1_000),
        ] {
            assert_eq!(
                life(quorum, ttl, &votes(lives)),
                Duration::from_millis(wanted),
                "{lives:?}"
            );
        }
    }
}
