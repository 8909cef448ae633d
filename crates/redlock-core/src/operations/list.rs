//! List: shows the held locks to people. No other operation depends on it.
//!
//! Nodes are read one after the other. Every lock found on one node is looked up on all nodes. A
//! listing reads N − quorum + 1 nodes to their ends, so it misses no lock that a majority stores.
//! Listings do not delay votes, see [`LockReader`](crate::node::LockReader).

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;

use bytes::Bytes;
use futures_util::future::join_all;
use sha2::{Digest, Sha256};
use tokio::time::{Instant, error::Elapsed, timeout_at};

use crate::error::{LockError, NodeAnswer, NodeReport};
use crate::model::quorum::{Decision, Quorum};
use crate::model::types::LockName;
use crate::node::link::{Scan, Scanned};
use crate::node::{Effect, Failure, Keys, Op, Reason, Vote};
use crate::round::tally;
use crate::round::votes::LockState;
use crate::shared::Shared;

/// Locks looked up in one call.
const LOOKED_UP: usize = 64;
/// The fewest keys that a scan asks for. A scan of fewer keys would cost as much.
const MIN_COUNT: usize = 16;
/// A scan that returns more names than this is repeated with this number of keys. All names of a
/// scan are looked up before a page may end within it. If the look-up took longer than a page may
/// take, every further page would run out of time at the same place.
const MAX_COUNT: usize = 2 * LOOKED_UP;
/// The most digests that a cursor holds: the names of two scans. The oldest are dropped first. Without
/// a limit, every lock that is released after it was shown would lengthen the cursor.
const MAX_SHOWN: usize = 2 * MAX_COUNT;

/// A page of held locks.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockPage {
    /// Locks that are held, or may be held as far as the nodes that answered show, in no particular
    /// order.
    pub locks: Vec<(LockName, LockState)>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<ListCursor>,
}

/// The position of a listing: the node being read, that node's own cursor, and the nodes already
/// read.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ListCursor {
    node: usize,
    walked: u32,
    at: Bytes,
    /// Names that were already shown and that may be returned again, because a page was full before
    /// the end of its scan. An offset into the scan would not do: keys come and go, so a repeated
    /// scan returns other keys in other places.
    shown: Vec<Digest8>,
    /// How many keys that scan looked at, so that it can be repeated. 0 if `at` is not within a
    /// scan.
    count: u32,
}

/// The digest of a name, equal on every gateway. Whoever finds two names of his own with equal digests
/// can hide one of them from a listing. That takes about 2^32 attempts.
type Digest8 = [u8; 8];

fn digest(name: &LockName) -> Digest8 {
    let digest = Sha256::digest(name.as_str());
    std::array::from_fn(|i| digest[i])
}

/// Opaque text for a client to send back.
impl fmt::Display for ListCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = |f: &mut fmt::Formatter<'_>, bytes: &[u8]| {
            bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
        };
        write!(f, "{}-{:x}-", self.node, self.walked)?;
        hex(f, &self.at)?;
        if self.shown.is_empty() && self.count == 0 {
            return Ok(());
        }
        write!(f, "-{:x}-", self.count)?;
        hex(f, self.shown.as_flattened())
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
        let at = Bytes::from(unhex(parts.next()?)?);
        let (count, shown) = match parts.next() {
            Some(count) => (u32::from_str_radix(count, 16).ok()?, unhex(parts.next()?)?),
            None => (0, Vec::new()),
        };
        let (shown, rest) = shown.as_chunks();
        (rest.is_empty() && parts.next().is_none()).then(|| Self {
            node,
            walked,
            at,
            shown: shown.to_vec(),
            count,
        })
    }
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    if !text.is_ascii()
        || !text.len().is_multiple_of(2)
        || text.len() > 2 * size_of::<Digest8>() * MAX_SHOWN
    {
        return None;
    }
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    text.as_bytes().chunks(2).map(byte).collect()
}

/// The content of a listing, and its time limit.
pub(crate) struct ListParams<'a> {
    pub(crate) prefix: &'a str,
    pub(crate) limit: usize,
    pub(crate) cursor: ListCursor,
    pub(crate) until: Instant,
}

/// Names that do not satisfy `passes` are neither looked up nor counted, so the page reveals
/// nothing about them.
pub(crate) async fn list(
    shared: &Shared,
    ListParams { prefix, limit, mut cursor, until }: ListParams<'_>,
    passes: impl Fn(&LockName) -> bool + Send + Sync,
) -> Result<LockPage, LockError> {
    let limit = limit.max(1);
    let key_prefix = Bytes::from(format!("{}{prefix}", shared.settings.key_prefix));
    let is_complete =
        |cursor: &ListCursor| cursor.walked.count_ones() as usize >= shared.quorum.blocking();
    let mut listing =
        Listing { shared, until, seen: HashSet::new(), locks: Vec::new(), failures: Vec::new() };
    listing.failures.resize(shared.nodes.len(), None);
    let first_count = if cursor.count == 0 { limit.min(MAX_COUNT) } else { cursor.count as usize };
    let mut count = first_count.max(MIN_COUNT);
    let mut is_empty = true;
    while !is_complete(&cursor) && cursor.node < shared.nodes.len() && listing.locks.len() < limit {
        // Embedded nodes answer without waiting, so this loop has to let other tasks run.
        tokio::task::yield_now().await;
        let asked = u32::try_from(count).unwrap_or(u32::MAX);
        let scan = Scan { key_prefix: key_prefix.clone(), cursor: cursor.at.clone(), count: asked };
        let Ok(scanned) = listing.scan(cursor.node, scan).await else { break };
        let Some(Scanned { keys, count: looked_at, next }) = scanned else {
            // This node cannot be read, so the listing skips it and reads another node in its
            // place. The locks already shown from this node remain valid.
            cursor = ListCursor {
                node: cursor.node + 1,
                walked: cursor.walked,
                ..ListCursor::default()
            };
            continue;
        };
        let mut names = names_of(&keys, &shared.settings.key_prefix);
        names.retain(&passes);
        if names.len() > MAX_COUNT && looked_at as usize > MAX_COUNT {
            // If the page ended within this scan, its cursor could not hold so many names. So the
            // scan is repeated with fewer keys.
            count = MAX_COUNT;
            continue;
        }
        // A repeated scan can end earlier than it did, because keys were added or because the node's
        // table changed its size. So a name that it does not return may come with a later scan.
        let again: Vec<Digest8> = if cursor.shown.is_empty() {
            Vec::new()
        } else {
            let again = names.extract_if(.., |name| cursor.shown.contains(&digest(name)));
            let digest = |name: LockName| {
                let digest = digest(&name);
                // A node whose table shrinks may return the name once more for this page.
                listing.seen.insert(name);
                digest
            };
            again.map(digest).collect()
        };
        // The next scan asks for as many keys as should yield the missing locks, if names are as
        // frequent as in the last scan.
        let missing =
            limit.saturating_sub(listing.locks.len() + names.len()).clamp(MIN_COUNT, MAX_COUNT);
        count = ((looked_at as usize).saturating_mul(missing) / names.len().max(1)).max(MIN_COUNT);
        let before = listing.locks.len();
        if listing.add(names, cursor.walked).await.is_err() {
            break;
        }
        is_empty = false;
        cursor.shown.retain(|digest| !again.contains(digest));
        if listing.locks.len() > limit {
            listing.locks.truncate(limit);
            cursor.shown.extend(again);
            cursor.shown.extend(listing.locks[before..].iter().map(|(name, _)| digest(name)));
            cursor.shown.drain(..cursor.shown.len().saturating_sub(MAX_SHOWN));
            cursor.count = looked_at;
            break;
        }
        (cursor.at, cursor.count) = (next.unwrap_or_default(), 0);
        if cursor.at.is_empty() {
            cursor.walked |= 1 << cursor.node;
            cursor.node += 1;
            cursor.shown.clear();
        }
    }
    let complete = is_complete(&cursor);
    if !complete && (is_empty || cursor.node >= shared.nodes.len()) {
        return Err(LockError::NoQuorum(listing.reports()));
    }
    Ok(LockPage { locks: listing.locks, next: (!complete).then_some(cursor) })
}

fn names_of(keys: &[Bytes], key_prefix: &str) -> Vec<LockName> {
    let name_of = |key: &Bytes| {
        let stored = LockName::stored(std::str::from_utf8(key).ok()?.strip_prefix(key_prefix)?)?;
        // Names of earlier versions that no request can have now are not shown.
        let (lock, _) = stored.lock_and_slot();
        lock.as_str().parse::<LockName>().is_ok().then_some(stored)
    };
    keys.iter().filter_map(name_of).collect()
}

/// A page being built.
struct Listing<'a> {
    shared: &'a Shared,
    until: Instant,
    /// Names already looked up.
    seen: HashSet<LockName>,
    locks: Vec<(LockName, LockState)>,
    /// The failure of each node, if any. A node that has failed is not asked again for this page.
    failures: Vec<Option<Failure>>,
}

impl Listing<'_> {
    /// `None` if the node cannot be read.
    async fn scan(&mut self, node: usize, scan: Scan) -> Result<Option<Scanned>, Elapsed> {
        if self.failures[node].is_some() {
            return Ok(None);
        }
        match timeout_at(self.until, self.shared.nodes[node].reader().scan(scan)).await {
            Ok(Ok(scanned)) => Ok(Some(scanned)),
            Ok(Err(failure)) => {
                self.failures[node] = Some(failure);
                Ok(None)
            }
            Err(late) => {
                let detail = "no answer before the listing had to end";
                self.failures[node] = Some(Failure::new(Reason::Timeout, Effect::None, detail));
                Err(late)
            }
        }
    }

    /// Adds those locks of a node that are held, or may be held, and that no earlier node has
    /// shown. If time runs out, adds none of them.
    async fn add(&mut self, mut names: Vec<LockName>, walked: u32) -> Result<(), Elapsed> {
        let quorum = self.shared.quorum;
        names.retain(|name| self.seen.insert(name.clone()));
        let mut found = Vec::new();
        for names in names.chunks(LOOKED_UP) {
            let mut by_node: Vec<_> =
                self.look_up(names).await?.into_iter().map(Vec::into_iter).collect();
            for name in names {
                let votes: Vec<_> = by_node.iter_mut().map(Iterator::next).collect();
                let is_shown = |(node, vote): (usize, &Option<Vote>)| {
                    walked & (1 << node) != 0 && matches!(vote, Some(Vote::Found(_)))
                };
                let shown = votes.iter().enumerate().any(is_shown);
                let decision = match quorum
                    .decide(tally(&Op::Inspect { keys: self.shared.keys(name) }, &votes))
                {
                    Decision::Open => Decision::Neither,
                    decision => decision,
                };
                match LockState::of(quorum, decision, &votes) {
                    // Leaving out an unknown lock would show it as free.
                    state @ (LockState::Held(_) | LockState::Unknown) if !shown => {
                        found.push((name.clone(), state))
                    }
                    LockState::Held(_) | LockState::Unknown | LockState::Free => {}
                }
            }
        }
        self.locks.append(&mut found);
        Ok(())
    }

    /// Each node's votes for these locks.
    async fn look_up(&mut self, names: &[LockName]) -> Result<Vec<Vec<Vote>>, Elapsed> {
        let keys: Vec<Keys> = names.iter().map(|name| self.shared.keys(name)).collect();
        let ask = |(node, failure): (usize, &Option<Failure>)| {
            let reader = self.shared.nodes[node].reader();
            let keys = keys.clone();
            let failure = failure.clone();
            async move {
                match failure {
                    Some(failure) => Err(failure),
                    None => reader.read(keys).await,
                }
            }
        };
        let answers =
            timeout_at(self.until, join_all(self.failures.iter().enumerate().map(ask))).await?;
        let votes = |(node, answer): (usize, Result<Vec<Vote>, Failure>)| {
            answer.unwrap_or_else(|failure| {
                self.failures[node] = Some(failure.clone());
                vec![Vote::Failed(failure); names.len()]
            })
        };
        Ok(answers.into_iter().enumerate().map(votes).collect())
    }

    fn reports(self) -> Vec<NodeReport> {
        let report = |(name, failure): (String, Option<Failure>)| {
            Some(NodeReport { node: name, answer: NodeAnswer::Failed(failure?) })
        };
        self.shared.names().zip(self.failures).filter_map(report).collect()
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
            shown in proptest::collection::vec(any::<[u8; 8]>(), 0..=MAX_SHOWN),
            count: u32,
        ) {
            let cursor = ListCursor { node, walked, at: at.into(), shown, count };
            prop_assert_eq!(cursor.to_string().parse(), Ok(cursor));
        }

        #[test]
        fn a_cursor_with_too_many_names_is_refused(count: u32) {
            let cursor = ListCursor { shown: vec![[7; 8]; MAX_SHOWN + 1], count, ..ListCursor::default() };
            prop_assert_eq!(cursor.to_string().parse::<ListCursor>(), Err(InvalidCursor));
        }

        #[test]
        fn no_cursor_text_panics_or_exceeds_the_nodes(
            text in prop_oneof![
                4 => concat!(
                    "[0-9+é]{0,3}-[0-9a-g+]{0,9}-[0-9a-gé+]{0,12}",
                    "(-[0-9a-f+]{0,9})?(-[0-9a-gé+]{0,32})?-?",
                ),
                1 => any::<String>(),
            ],
        ) {
            if let Ok(cursor) = text.parse::<ListCursor>() {
                prop_assert!(cursor.node < Quorum::MAX_NODES);
                prop_assert_eq!(cursor.to_string().parse(), Ok(cursor));
            }
        }
    }
}
