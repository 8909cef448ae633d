//! Listing: no part of the algorithm, for people who want to see what is held.
//!
//! Nodes are read one after the other, and every lock that one of them shows is looked up on all of them. So many nodes
//! are read that no majority can be missed.

use std::fmt;
use std::str::FromStr;

use bytes::Bytes;

use crate::error::{LockError, NodeReport};
use crate::node::{Op, Vote};
use crate::quorum::Quorum;
use crate::round::Round;
use crate::shared::{ALL_NODES, Shared};
use crate::types::LockName;
use crate::votes::{LockState, answer};

/// Locks of a listing that are inspected at the same time; more would stand in the way of locking.
const MAX_IN_FLIGHT: usize = 64;

/// Scans of a node for one page of a listing: bounds how long a page takes on nodes with many keys and few locks.
const MAX_SCANS: u32 = 64;

/// A page of held locks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
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

/// Text for a client to bring along, which it need not understand.
impl fmt::Display for ListCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{:x}-", self.node, self.walked)?;
        self.at.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A text that is no [`ListCursor`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a cursor of a listing")]
pub struct InvalidCursor;

impl FromStr for ListCursor {
    type Err = InvalidCursor;

    fn from_str(text: &str) -> Result<Self, InvalidCursor> {
        Self::parse(text).ok_or(InvalidCursor)
    }
}

impl ListCursor {
    fn parse(text: &str) -> Option<Self> {
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

/// Names that do not pass are neither looked at nor counted, so that nothing in the page tells of them.
pub(crate) async fn list(
    shared: &Shared,
    prefix: &str,
    limit: usize,
    mut cursor: ListCursor,
    passes: impl Fn(&LockName) -> bool + Send + Sync,
) -> Result<LockPage, LockError> {
    let limit = limit.max(1);
    let mut locks = Vec::new();
    let mut failures = Vec::new();
    let key_prefix = Bytes::from(format!("{}{prefix}", shared.settings.key_prefix));
    let is_complete = |cursor: &ListCursor| cursor.walked.count_ones() as usize >= shared.quorum.blocking();
    // Keys that are no locks are passed over by the nodes, so a page may take many scans, or end with few locks.
    for _ in 0..MAX_SCANS {
        if is_complete(&cursor) || cursor.node >= shared.nodes.len() || locks.len() >= limit {
            break;
        }
        let count = u32::try_from(limit - locks.len()).unwrap_or(u32::MAX).max(16);
        let op = Op::Scan { key_prefix: key_prefix.clone(), cursor: cursor.at.clone(), count };
        match ask_one(shared, cursor.node, op).await {
            Some(Vote::Page { keys, next }) => {
                let mut names = names_of(&keys, &shared.settings.key_prefix);
                names.retain(&passes);
                add_found(shared, names, cursor.walked, &mut locks).await;
                cursor.at = next.unwrap_or_default();
                if cursor.at.is_empty() {
                    cursor.walked |= 1 << cursor.node;
                    cursor.node += 1;
                }
            }
            vote => {
                // Skipped: other nodes can make up for it. What was shown of it stays right.
                let node = shared.nodes[cursor.node].name().to_owned();
                failures.push(NodeReport { node, answer: answer(vote.as_ref()) });
                cursor = ListCursor { node: cursor.node + 1, walked: cursor.walked, at: Bytes::new() };
            }
        }
    }
    let complete = is_complete(&cursor);
    if !complete && cursor.node >= shared.nodes.len() {
        return Err(LockError::NoQuorum(failures));
    }
    Ok(LockPage { locks, next: (!complete).then_some(cursor) })
}

fn names_of(keys: &[Bytes], key_prefix: &str) -> Vec<LockName> {
    let name_of = |key: &Bytes| std::str::from_utf8(key).ok()?.strip_prefix(key_prefix)?.parse().ok();
    keys.iter().filter_map(name_of).collect()
}

/// Adds those of a node's locks that a majority holds and that no node read before has shown.
async fn add_found(shared: &Shared, names: Vec<LockName>, walked: u32, locks: &mut Vec<(LockName, LockState)>) {
    let limit = shared.settings.node_timeout;
    for names in names.chunks(MAX_IN_FLIGHT) {
        let rounds: Vec<_> = names
            .iter()
            .filter(|name| locks.iter().all(|(listed, _)| listed != *name))
            .map(|name| (name.clone(), shared.inspect(shared.keys(name), limit)))
            .collect();
        for (name, round) in rounds {
            let outcome = round.outcome().await;
            let shown = round.found_on(walked).await;
            match LockState::of(shared.quorum, outcome.decision, &outcome.votes) {
                // To leave out what is unknown would be to say that it is free.
                state @ (LockState::Held(_) | LockState::Unknown) if !shown => locks.push((name, state)),
                LockState::Held(_) | LockState::Unknown | LockState::Free => {}
            }
        }
    }
}

async fn ask_one(shared: &Shared, node: usize, op: Op) -> Option<Vote> {
    // A scan is no lock operation: it may take longer than a vote.
    let limit = shared.settings.node_timeout * 10;
    let one = Quorum::new(1).expect("one node is a cluster");
    let round = Round::new(one, op, limit, &shared.seams.observer, None);
    round.ask(&shared.nodes[node..=node], ALL_NODES);
    round.outcome().await.votes.into_iter().next().flatten()
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
            prop_assert_eq!(cursor.to_string().parse(), Ok(cursor));
        }

        #[test]
        fn no_text_makes_the_parser_panic_and_no_cursor_is_beyond_the_nodes(
            text in prop_oneof![4 => "[0-9+é]{0,3}-[0-9a-g+]{0,9}-[0-9a-gé+]{0,12}-?", 1 => any::<String>()],
        ) {
            if let Ok(cursor) = text.parse::<ListCursor>() {
                prop_assert!(cursor.node < Quorum::MAX_NODES);
                prop_assert_eq!(cursor.to_string().parse(), Ok(cursor));
            }
        }
    }
}
