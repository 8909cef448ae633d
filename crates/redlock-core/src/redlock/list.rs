//! Listing: no part of the algorithm, for people who want to see what is held.
//!
//! Nodes are read one after the other, and every lock that one of them shows is looked up on all of them. So many nodes
//! are read that no majority can be missed.

use bytes::Bytes;
use tokio::time::Instant;

use super::{LockState, Redlock, Shared, answer, lock_state};
use crate::error::{LockError, NodeReport};
use crate::node::{Keys, Op, Vote};
use crate::quorum::Quorum;
use crate::round::Round;
use crate::types::LockName;

/// Locks of a listing that are looked at at the same time; more would stand in the way of locking.
const LOOK_AT_ONCE: usize = 64;

/// Scans of a node for one page of a listing: bounds how long a page takes on nodes with many keys and few locks.
const MAX_SCANS: u32 = 64;

/// A page of held locks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockPage {
    /// Locks that are held, or may be as far as the nodes that answered tell; in no particular order.
    pub locks: Vec<(LockName, LockState)>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<ListCursor>,
}

/// Where a listing stands: the node being read, its own cursor, and the nodes read before.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListCursor {
    node: usize,
    walked: u32,
    at: Bytes,
}

impl ListCursor {
    /// Text that [`ListCursor::parse`] reads back.
    pub fn text(&self) -> String {
        let at: String = self.at.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{}-{:x}-{at}", self.node, self.walked)
    }

    /// `None` for what is no cursor.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let node = parts.next()?.parse().ok().filter(|node| *node < Quorum::MAX_NODES)?;
        let walked = u32::from_str_radix(parts.next()?, 16).ok()?;
        let hex = parts.next()?;
        if parts.next().is_some() || !hex.is_ascii() || hex.len() % 2 != 0 || hex.len() > 4096 {
            return None;
        }
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
        let at = hex.as_bytes().chunks(2).map(byte).collect::<Option<Vec<_>>>()?.into();
        Some(Self { node, walked, at })
    }
}

impl Redlock {
    /// A page of held locks whose names begin with `prefix`. Reads one node after the other until so many were read that
    /// no majority can be missed, and asks all nodes about every lock it meets. Locks that come or go during a listing
    /// may be missed or shown twice, and those of a node that stops answering during it shown twice.
    ///
    /// # Errors
    /// [`LockError::NoQuorum`] when too few nodes can be read.
    pub async fn list(&self, prefix: &str, limit: usize, cursor: ListCursor) -> Result<LockPage, LockError> {
        self.list_those(prefix, limit, cursor, |_| true).await
    }

    /// The same, of names that pass. What does not pass is neither looked at nor counted, so that nothing in the page tells
    /// of it.
    ///
    /// # Errors
    /// As [`Redlock::list`].
    pub async fn list_those(
        &self,
        prefix: &str,
        limit: usize,
        cursor: ListCursor,
        passes: impl Fn(&LockName) -> bool + Send + Sync,
    ) -> Result<LockPage, LockError> {
        let shared = &self.shared;
        let limit = limit.max(1);
        let mut cursor = cursor;
        let mut locks = Vec::new();
        let mut failures = Vec::new();
        let key_prefix = Bytes::from(format!("{}{prefix}", shared.settings.key_prefix));
        // Keys that are no locks are passed over by the nodes, so a page may take many scans, or end with few locks.
        for _ in 0..MAX_SCANS {
            let walked_enough = cursor.walked.count_ones() as usize >= shared.quorum.blocking();
            if walked_enough || cursor.node >= shared.nodes.len() || locks.len() >= limit {
                break;
            }
            let count = u32::try_from(limit - locks.len()).unwrap_or(u32::MAX).max(16);
            let op = Op::Scan { key_prefix: key_prefix.clone(), cursor: cursor.at.clone(), count };
            match shared.ask_one(cursor.node, op).await {
                Some(Vote::Page { keys, next }) => {
                    let mut names = self.names_of(&keys);
                    names.retain(&passes);
                    self.add_found(names, cursor.walked, &mut locks).await;
                    cursor.at = next.unwrap_or_default();
                    if cursor.at.is_empty() {
                        cursor.walked |= 1 << cursor.node;
                        cursor.node += 1;
                    }
                }
                vote => {
                    // Skipped: other nodes can make up for it. What was shown of it stays right.
                    let name = shared.nodes[cursor.node].name().to_owned();
                    failures.push(NodeReport { node: name, answer: answer(vote.as_ref()) });
                    cursor = ListCursor { node: cursor.node + 1, walked: cursor.walked, at: Bytes::new() };
                }
            }
        }
        let complete = cursor.walked.count_ones() as usize >= shared.quorum.blocking();
        if !complete && cursor.node >= shared.nodes.len() {
            return Err(LockError::NoQuorum(failures));
        }
        Ok(LockPage { locks, next: (!complete).then_some(cursor) })
    }

    fn names_of(&self, keys: &[Bytes]) -> Vec<LockName> {
        let name_of = |key: &Bytes| {
            let name = std::str::from_utf8(key).ok()?.strip_prefix(&self.shared.settings.key_prefix)?;
            LockName::parse(name).ok()
        };
        keys.iter().filter_map(name_of).collect()
    }

    /// Adds those of a node's locks that a majority holds and that no node read before has shown.
    async fn add_found(&self, names: Vec<LockName>, walked: u32, locks: &mut Vec<(LockName, LockState)>) {
        let shared = &self.shared;
        let limit = shared.settings.node_timeout;
        for names in names.chunks(LOOK_AT_ONCE) {
            let deadline = Instant::now() + limit;
            let rounds: Vec<_> = names
                .iter()
                .filter(|name| locks.iter().all(|(listed, _)| listed != *name))
                .map(|name| {
                    let op = Op::Inspect { keys: Keys::new(&shared.settings.key_prefix, name) };
                    (name.clone(), shared.round(op, deadline))
                })
                .collect();
            for (name, round) in rounds {
                let outcome = round.outcome(deadline, limit).await;
                let shown = round.found_on(walked, deadline).await;
                match lock_state(shared.quorum, &outcome) {
                    // To leave out what is unknown would be to say that it is free.
                    state @ (LockState::Held(_) | LockState::Unknown) if !shown => locks.push((name, state)),
                    LockState::Held(_) | LockState::Unknown | LockState::Free => {}
                }
            }
        }
    }
}

impl Shared {
    async fn ask_one(&self, node: usize, op: Op) -> Option<Vote> {
        // A scan is no lock operation: it may take longer than a vote.
        let limit = self.settings.node_timeout * 10;
        let deadline = Instant::now() + limit;
        let observer = &self.seams.observer;
        let one = Quorum::new(1).expect("one node is a cluster");
        let nodes = &self.nodes[node..=node];
        let round = Round::new(one, op, observer, None);
        round.ask(nodes, u32::MAX, deadline);
        round.outcome(deadline, limit).await.votes.into_iter().next().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_cursor_survives_its_own_text(
            node in 0..Quorum::MAX_NODES,
            walked: u32,
            at in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let cursor = ListCursor { node, walked, at: at.into() };
            prop_assert_eq!(ListCursor::parse(&cursor.text()), Some(cursor));
        }

        #[test]
        fn no_text_makes_the_parser_panic_and_no_cursor_is_beyond_the_nodes(
            text in prop_oneof![4 => "[0-9+é]{0,3}-[0-9a-g+]{0,9}-[0-9a-gé+]{0,12}-?", 1 => any::<String>()],
        ) {
            if let Some(cursor) = ListCursor::parse(&text) {
                prop_assert!(cursor.node < Quorum::MAX_NODES);
                prop_assert_eq!(ListCursor::parse(&cursor.text()), Some(cursor));
            }
        }
    }
}
