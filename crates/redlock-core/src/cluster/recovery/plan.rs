//! Decides what a master that lost its locks gets back, from what the other masters store. No input
//! or output happens here.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use crate::model::quorum::Quorum;
use crate::model::types::{FencingToken, LockName};
use crate::node::Record;
use crate::node::link::{Put, Stored};

/// One grant of a lock, as the masters that were read store it.
struct Candidate {
    record: Record,
    /// The number of masters that store it.
    seen: usize,
    /// The latest of these masters in the list, to notice a key that was read twice.
    last: usize,
    longest: Duration,
}

/// Plans which locks come back.
///
/// A majority that counted a lost vote has `quorum - 1` other votes. At most one of them is on each
/// of the `unread` masters, those that were not read. So a grant seen on fewer than `quorum - 1 -
/// unread` masters never had a majority, and does not come back.
///
/// A grant that a quorum of the others stores comes back as it is. In place of any other grant a
/// placeholder comes back, which keeps the lock free from everybody until the grant would have
/// ended. Suppose that grant came back itself. It might then have a majority for the first time. An
/// extension or a repeated request would confirm the grant to a client. But a larger T may have
/// been granted before, and lost.
///
/// A master may store 300,000 locks. So the caller adds one lock at a time, and can let other tasks
/// run between two locks.
pub(super) struct Planner {
    /// The largest T that may have been lost. A grant with a larger T was granted without this
    /// master, so it does not come back.
    newest: FencingToken,
    locks: BTreeMap<LockName, Vec<Candidate>>,
}

impl Planner {
    pub(super) fn new(newest: FencingToken) -> Self {
        Self { newest, locks: BTreeMap::new() }
    }

    /// Adds a lock that this master stores.
    pub(super) fn add(&mut self, master: usize, stored: Stored) {
        let Stored { name, record, expires_in } = stored;
        // A placeholder has the largest T of the grants that it was made from, and stands for all
        // of them. So its T alone does not rule it out.
        if !record.is_placeholder() && record.fencing_of_ours().is_some_and(|t| t > self.newest) {
            return;
        }
        let candidates = self.locks.entry(name).or_default();
        match candidates.iter_mut().find(|candidate| candidate.record.is_grant_of(&record)) {
            Some(known) => {
                // SCAN may return a key twice.
                known.seen += usize::from(known.last != master);
                known.last = master;
                known.longest = known.longest.max(expires_in);
                if record.is_extended() {
                    known.record = record;
                }
            }
            None => {
                candidates.push(Candidate { record, seen: 1, last: master, longest: expires_in })
            }
        }
    }

    /// Returns the locks that come back, after the locks of this many other masters were added.
    pub(super) fn finish(
        self,
        quorum: Quorum,
        read: usize,
    ) -> impl Iterator<Item = (LockName, Put)> + Send {
        let not_read = (quorum.nodes() - 1).saturating_sub(read);
        let least = (quorum.size() - 1).saturating_sub(not_read).max(1);
        let put = move |(name, candidates)| Some((name, put(least, quorum.size(), candidates)?));
        self.locks.into_iter().filter_map(put)
    }
}

fn put(least: usize, majority: usize, mut candidates: Vec<Candidate>) -> Option<Put> {
    candidates.retain(|candidate| candidate.seen >= least || candidate.record.is_placeholder());
    let longest = candidates.iter().map(|candidate| candidate.longest).max()?;
    let stands = match candidates.as_slice() {
        [only] if only.seen >= majority => {
            only.record.fencing_of_ours().filter(|_| !only.record.is_placeholder())
        }
        // A key of another client has no T, and none of our requests extends or confirms it. It
        // comes back as it is.
        [Candidate { record, .. }] if record.parse().is_none() => {
            return Some(Put { record: record.clone(), expires_in: longest, fence: None });
        }
        _ => None,
    };
    let Some(t) = stands else {
        let t = candidates.iter().filter_map(|candidate| candidate.record.fencing_of_ours()).max();
        let record = Record::placeholder(t.unwrap_or(FencingToken::MIN));
        return Some(Put { record, expires_in: longest, fence: None });
    };
    let record = candidates.swap_remove(0).record;
    let flag = if record.is_extended() { "+" } else { "" };
    Some(Put { record, expires_in: longest, fence: Some(Bytes::from(format!("{t}{flag}"))) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::types::{Info, LockToken, Nonce, Owner};

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

    /// What a master gets back for one lock, in a cluster of `nodes` masters.
    fn back(nodes: usize, read: Vec<Vec<Stored>>) -> Option<Put> {
        let newest = FencingToken::new(FencingToken::MIN.get() + 1_000).unwrap();
        let masters = read.len();
        let mut planner = Planner::new(newest);
        for (master, list) in read.into_iter().enumerate() {
            list.into_iter().for_each(|stored| planner.add(master, stored));
        }
        planner.finish(Quorum::new(nodes).unwrap(), masters).map(|(_, put)| put).next()
    }

    #[test]
    fn a_grant_comes_back_with_its_longest_life_and_extension_flag() {
        let put = back(3, vec![vec![stored(of(1, 5), 100)], vec![stored(of(1, 5).extended(), 70)]])
            .expect("it is back");
        assert_eq!((put.record, put.expires_in), (of(1, 5).extended(), Duration::from_millis(100)));
        assert_eq!(
            put.fence.as_deref(),
            Some(format!("{}+", of(1, 5).fencing().unwrap()).as_bytes())
        );
        let put = back(3, vec![vec![stored(of(1, 5), 100)], vec![stored(of(1, 5), 90)]])
            .expect("it is back");
        assert_eq!(put.fence.as_deref(), Some(of(1, 5).fencing().unwrap().to_string().as_bytes()));
    }

    /// A grant with a larger T may have counted the lost vote since then, and have ended.
    #[test]
    fn a_grant_gets_no_majority_by_the_lost_vote_alone() {
        let put = back(3, vec![vec![stored(of(1, 5), 100)], vec![]]).expect("kept free");
        assert!(
            put.record.is_placeholder()
                && put.fence.is_none()
                && put.expires_in == Duration::from_millis(100)
        );
        let two = || vec![vec![stored(of(1, 5), 100)], vec![stored(of(1, 5), 90)], vec![], vec![]];
        assert!(back(5, two()).is_some_and(|put| put.record.is_placeholder()));
        let three = [two()[..2].to_vec(), vec![vec![stored(of(1, 5), 100)]]].concat();
        assert_eq!(back(5, three).map(|put| put.record), Some(of(1, 5)));
    }

    #[test]
    fn a_grant_on_too_few_masters_does_not_come_back() {
        let one = || vec![stored(of(1, 5), 100)];
        assert_eq!(back(5, vec![one(), vec![], vec![], vec![]]), None, "two of five");
        assert!(
            back(5, vec![one(), vec![], vec![]]).is_some(),
            "a fourth, which was not read, may have it too"
        );
    }

    #[test]
    fn a_grant_newer_than_the_loss_does_not_come_back() {
        assert_eq!(back(3, vec![vec![stored(of(1, 1_001), 100)], vec![]]), None);
        let put = back(3, vec![vec![stored(of(1, 1_001), 900)], vec![stored(of(2, 5), 100)]])
            .expect("the older one");
        assert_eq!(put.expires_in, Duration::from_millis(100));
    }

    #[test]
    fn two_possible_grants_keep_the_lock_free_until_both_end() {
        let put = back(3, vec![vec![stored(of(1, 5), 100)], vec![stored(of(2, 6), 70)]])
            .expect("kept free");
        assert!(put.record.is_placeholder());
        assert_eq!((put.expires_in, put.fence), (Duration::from_millis(100), None));
        let put = back(3, vec![vec![stored(put.record, 80)], vec![stored(of(2, 6), 90)]])
            .expect("kept free again");
        assert!(put.record.is_placeholder() && put.expires_in == Duration::from_millis(90));
    }

    /// A placeholder's T is the largest of the grants that it stands for. It may be newer than the
    /// loss of another master.
    #[test]
    fn a_keep_free_record_counts_for_an_earlier_loss() {
        let t = of(1, 1_001).fencing().unwrap();
        let put = back(
            5,
            vec![
                vec![stored(Record::placeholder(t), 100)],
                vec![stored(of(1, 5), 300)],
                vec![],
                vec![],
            ],
        )
        .expect("kept free");
        assert!(put.record.is_placeholder() && put.expires_in == Duration::from_millis(100));
    }

    /// The record that comes back may stand for another grant too. So it does not show a release.
    #[test]
    fn a_hold_comes_back_without_the_released_grant() {
        let grant = of(1, 5);
        let hold = Record::hold(&grant, grant.fencing().unwrap());
        assert!(hold.released_grant().is_some());
        let put = back(3, vec![vec![stored(hold.clone(), 100)], vec![stored(hold, 100)]])
            .expect("kept free");
        assert!(put.record.is_placeholder() && put.record.released_grant().is_none());
    }

    #[test]
    fn a_lock_read_twice_on_one_master_counts_once() {
        let twice = || vec![stored(of(1, 5), 100), stored(of(1, 5), 90)];
        assert!(
            back(3, vec![twice(), vec![]]).is_some_and(|put| put.record.is_placeholder()),
            "no majority"
        );
    }

    #[test]
    fn a_key_of_another_client_comes_back_as_it_is() {
        let foreign = Record::foreign(Bytes::from_static(b"0123456789012345678"));
        let put = back(3, vec![vec![stored(foreign.clone(), 100)], vec![]]).expect("it is back");
        assert_eq!((put.record, put.fence), (foreign, None));
    }
}
