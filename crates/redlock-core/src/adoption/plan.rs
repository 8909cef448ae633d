//! What a master that has forgotten its locks is given back. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use crate::node::Record;
use crate::node::link::{Put, Stored};
use crate::quorum::Quorum;
use crate::types::{FencingToken, Info, LockName, LockToken, Nonce, Owner};

/// What was read of one lock, on the masters that remember.
struct Candidate {
    record: Record,
    seen: usize,
    longest: Duration,
}

/// Each list is what one master stores. A majority that counted a vote which is forgotten has `quorum - 1` votes more, on any
/// of the other masters: a grant that was read on fewer than are left of those when all that were not read have it is none.
///
/// `newest` is the largest T that may have been forgotten: what has a larger one was granted without this master.
pub(super) fn plan(quorum: Quorum, newest: FencingToken, read: Vec<Vec<Stored>>) -> BTreeMap<LockName, Put> {
    let not_read = (quorum.nodes() - 1).saturating_sub(read.len());
    let least = (quorum.size() - 1).saturating_sub(not_read).max(1);
    let mut locks: BTreeMap<LockName, Vec<Candidate>> = BTreeMap::new();
    for Stored { name, record, expires_in } in read.into_iter().flatten() {
        if record.fencing_of_ours().is_some_and(|t| t > newest) {
            continue;
        }
        let candidates = locks.entry(name).or_default();
        match candidates.iter_mut().find(|candidate| candidate.record.is_grant_of(&record)) {
            Some(known) => {
                known.seen += 1;
                known.longest = known.longest.max(expires_in);
                if record.is_extended() {
                    known.record = record;
                }
            }
            None => candidates.push(Candidate { record, seen: 1, longest: expires_in }),
        }
    }
    locks.into_iter().filter_map(|(name, candidates)| Some((name, put(least, candidates)?))).collect()
}

fn put(least: usize, mut candidates: Vec<Candidate>) -> Option<Put> {
    candidates.retain(|candidate| candidate.seen >= least || candidate.record.is_nobodys());
    let longest = candidates.iter().map(|candidate| candidate.longest).max()?;
    let [Candidate { record, .. }] = candidates.as_slice() else {
        // Whose the forgotten vote was cannot be told, and given to the wrong one it may make a majority that never was: a
        // request that is repeated is told of what a majority stores. So nobody gets it until all of them have ended.
        let t = candidates.iter().filter_map(|candidate| candidate.record.fencing_of_ours()).max();
        let token = LockToken::new(Owner::NOBODY, Nonce::from_bytes([0; Nonce::LEN]), t.unwrap_or(FencingToken::MIN));
        return Some(Put { record: Record::new(&token, &Info::default()), expires_in: longest, fence: None });
    };
    let mark = if record.is_extended() { "+" } else { "" };
    let fence = record.fencing_of_ours().filter(|_| !record.is_nobodys()).map(|t| Bytes::from(format!("{t}{mark}")));
    Some(Put { record: record.clone(), expires_in: longest, fence })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(owner: u8, t: u64) -> Record {
        let token = LockToken::new(
            Owner::from_bytes([owner; Owner::LEN]),
            Nonce::from_bytes([owner; Nonce::LEN]),
            FencingToken::new(FencingToken::MIN.get() + t).unwrap(),
        );
        Record::new(&token, &Info::default())
    }

    fn stored(record: Record, millis: u64) -> Stored {
        let name = "job".parse::<LockName>().unwrap();
        Stored { name, record, expires_in: Duration::from_millis(millis) }
    }

    /// What a master of so many gets back of one lock.
    fn back(nodes: usize, read: Vec<Vec<Stored>>) -> Option<Put> {
        let newest = FencingToken::new(FencingToken::MIN.get() + 1_000).unwrap();
        plan(Quorum::new(nodes).unwrap(), newest, read).into_values().next()
    }

    #[test]
    fn a_grant_that_may_have_counted_the_forgotten_vote_comes_back_for_its_longest_life_and_as_extended_as_anywhere() {
        let put = back(3, vec![vec![stored(of(1, 5), 100)], vec![stored(of(1, 5).extended(), 70)]]).expect("it is back");
        assert_eq!((put.record, put.expires_in), (of(1, 5).extended(), Duration::from_millis(100)));
        assert_eq!(put.fence.as_deref(), Some(format!("{}+", of(1, 5).fencing().unwrap()).as_bytes()));
        let put = back(3, vec![vec![stored(of(1, 5), 100)], vec![]]).expect("one is enough of three");
        assert_eq!(put.fence.as_deref(), Some(of(1, 5).fencing().unwrap().to_string().as_bytes()));
    }

    #[test]
    fn a_grant_on_too_few_of_the_others_had_no_majority_with_the_forgotten_vote() {
        let one = || vec![stored(of(1, 5), 100)];
        assert_eq!(back(5, vec![one(), vec![], vec![], vec![]]), None, "two of five");
        assert!(back(5, vec![one(), vec![], vec![]]).is_some(), "a fourth, which was not read, may have it too");
    }

    #[test]
    fn a_grant_that_is_newer_than_the_loss_counted_no_forgotten_vote() {
        assert_eq!(back(3, vec![vec![stored(of(1, 1_001), 100)], vec![]]), None);
        let put = back(3, vec![vec![stored(of(1, 1_001), 900)], vec![stored(of(2, 5), 100)]]).expect("the older one");
        assert_eq!(put.record, of(2, 5));
    }

    #[test]
    fn where_two_grants_may_have_counted_the_forgotten_vote_nobody_gets_it_before_both_have_ended() {
        let put = back(3, vec![vec![stored(of(1, 5), 100)], vec![stored(of(2, 6), 70)]]).expect("kept free");
        assert!(put.record.is_nobodys());
        assert_eq!((put.expires_in, put.fence), (Duration::from_millis(100), None));
        let put = back(3, vec![vec![stored(put.record, 80)], vec![stored(of(2, 6), 90)]]).expect("kept free again");
        assert!(put.record.is_nobodys() && put.expires_in == Duration::from_millis(90));
    }

    #[test]
    fn what_another_client_has_set_comes_back_as_it_is() {
        let foreign = Record::foreign(Bytes::from_static(b"0123456789012345678"));
        let put = back(3, vec![vec![stored(foreign.clone(), 100)], vec![]]).expect("it is back");
        assert_eq!((put.record, put.fence), (foreign, None));
    }
}
