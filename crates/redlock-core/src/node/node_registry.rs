//! State shared by the workers of one gateway's masters. It notes to which process each master's
//! name leads, which masters' clocks ran ahead of ours, and which TTLs the masters' markers state.
//! The drivers decide what follows.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::clock_drift::RanAhead;
use super::eligibility::Peer;
use crate::model::quorum::Quorum;

/// Each clock is read about once a second. So if our clock runs slow, the readings of any two
/// masters' clocks show that within this time of each other.
const ALIKE: Duration = Duration::from_secs(3);
/// A node whose clock was not read for longer counts as away.
const RECENT: Duration = Duration::from_secs(10);

/// The registry of one gateway.
#[derive(Debug, Default)]
pub struct NodeRegistry {
    entries: Mutex<BTreeMap<Arc<str>, NodeEntry>>,
    /// How many other nodes make a majority together with one node.
    others_needed: usize,
}

#[derive(Debug, Default)]
struct NodeEntry {
    run_id: String,
    /// When the node's clock was first read, on our monotonic clock. `read` is when it was last
    /// read.
    first_read: Option<Duration>,
    read: Duration,
    ran_ahead: Option<RanAhead>,
    /// The latest probe that found a marker of this configuration, or none.
    peer: Option<Peer>,
}

impl NodeRegistry {
    /// The registry of a gateway with this many masters.
    pub fn new(masters: usize) -> Self {
        let others_needed = Quorum::new(masters).map_or(0, |quorum| quorum.size() - 1);
        Self { others_needed, ..Self::default() }
    }

    /// Notes the result of a probe. `peer` gets the bound that was seen on the node before.
    pub(super) fn note_probe(&self, name: &Arc<str>, peer: impl FnOnce(Duration) -> Option<Peer>) {
        let mut node_registry = self.lock();
        let entry = node_registry.entry(name.clone()).or_default();
        let earlier = entry.peer.map(|peer| peer.bound).unwrap_or_default();
        entry.peer = peer(earlier).or(entry.peer);
    }

    /// The latest probes of the other nodes, and how many of them a majority needs.
    pub(super) fn peers(&self, name: &Arc<str>) -> (Vec<Peer>, usize) {
        let node_registry = self.lock();
        let others = node_registry.iter().filter(|(other, _)| *other != name);
        (others.filter_map(|(_, entry)| entry.peer).collect(), self.others_needed)
    }

    /// Notes that a name leads to a process. If one process had two names (two addresses, two
    /// database numbers), it would have two votes, and both would be lost together.
    ///
    /// # Errors
    /// The error is the other name that leads to this process. The name that came first keeps the
    /// process until that name leads to another process.
    pub(super) fn claim(&self, name: &Arc<str>, run_id: &str) -> Result<(), Arc<str>> {
        let mut node_registry = self.lock();
        let other =
            node_registry.iter().find(|(other, entry)| *other != name && entry.run_id == run_id);
        if let Some(other) = other.map(|(other, _)| other.clone()) {
            // This name no longer leads to its earlier process.
            node_registry.entry(name.clone()).or_default().run_id.clear();
            return Err(other);
        }
        run_id.clone_into(&mut node_registry.entry(name.clone()).or_default().run_id);
        Ok(())
    }

    /// Notes a clock reading.
    pub(super) fn note_clock(&self, name: &Arc<str>, at: Duration, ran_ahead: Option<RanAhead>) {
        let mut node_registry = self.lock();
        let entry = node_registry.entry(name.clone()).or_default();
        entry.first_read.get_or_insert(at);
        entry.read = at;
        entry.ran_ahead = ran_ahead.or(entry.ran_ahead);
    }

    /// Whether the clocks of all other nodes ran ahead as this node's did. In that case our own
    /// clock ran slow. Two kinds of nodes do not count: those whose clock was first read after
    /// `ran.from`, and those that are away ([`RECENT`]). If a clock was not read since `ran.to`,
    /// the result is `false`, because that clock might disagree.
    pub(super) fn ran_alike(&self, name: &Arc<str>, ran: RanAhead) -> bool {
        let node_registry = self.lock();
        let counts = |(other, entry): &(&Arc<str>, &NodeEntry)| {
            let was_read_before = entry.first_read.is_some_and(|first| first <= ran.from);
            *other != name && was_read_before && entry.read + RECENT >= ran.to
        };
        let alike = |other: &RanAhead| other.to.abs_diff(ran.to) <= ALIKE && other.by * 2 >= ran.by;
        let agrees = |entry: &NodeEntry| {
            entry.read >= ran.to && entry.ran_ahead.is_some_and(|ran| alike(&ran))
        };
        let mut others =
            node_registry.iter().filter(counts).map(|(_, entry)| agrees(entry)).peekable();
        others.peek().is_some() && others.all(|agrees| agrees)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, NodeEntry>> {
        self.entries.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_belongs_to_its_first_name_until_that_moves() {
        let node_registry = NodeRegistry::default();
        let a = Arc::from("a");
        let b = Arc::from("b");
        assert_eq!(node_registry.claim(&a, "1"), Ok(()));
        assert_eq!(node_registry.claim(&a, "1"), Ok(()));
        assert_eq!(node_registry.claim(&b, "1"), Err(a.clone()));
        assert_eq!(node_registry.claim(&a, "2"), Ok(()));
        assert_eq!(node_registry.claim(&b, "1"), Ok(()));
        assert_eq!(node_registry.claim(&a, "1"), Err(b));
    }

    #[test]
    fn our_clock_is_blamed_only_if_all_others_ran_ahead() {
        let (node_registry, a, b, c): (_, Arc<str>, Arc<str>, Arc<str>) =
            (NodeRegistry::default(), Arc::from("a"), Arc::from("b"), Arc::from("c"));
        let seconds = Duration::from_secs;
        let ran =
            |to| RanAhead { from: seconds(to - 1), to: seconds(to), by: Duration::from_millis(50) };
        assert!(!node_registry.ran_alike(&a, ran(10)), "there is no other node");
        node_registry.note_clock(&b, seconds(10), Some(ran(10)));
        assert!(!node_registry.ran_alike(&a, ran(10)), "the other clock was not read before");
        let node_registry = NodeRegistry::default();
        node_registry.note_clock(&b, seconds(8), None);
        node_registry.note_clock(&b, seconds(9), Some(ran(9)));
        assert!(!node_registry.ran_alike(&a, ran(10)), "the other clock was not read since");
        node_registry.note_clock(&b, seconds(11), None);
        assert!(node_registry.ran_alike(&a, ran(10)), "it ran ahead a second earlier");
        assert!(
            !node_registry.ran_alike(&a, RanAhead { by: seconds(1), ..ran(10) }),
            "it ran ahead by much less"
        );
        node_registry.note_clock(&c, seconds(0), None);
        assert!(
            node_registry.ran_alike(&a, RanAhead { to: seconds(11), ..ran(10) }),
            "the third node is away"
        );
        node_registry.note_clock(&c, seconds(5), None);
        assert!(
            !node_registry.ran_alike(&a, ran(10)),
            "the third was not read since, and is not away"
        );
        node_registry.note_clock(&c, seconds(12), None);
        assert!(!node_registry.ran_alike(&a, ran(10)), "the third did not run ahead");
        node_registry.note_clock(&c, seconds(40), Some(ran(40)));
        assert!(!node_registry.ran_alike(&a, ran(10)), "the third ran ahead long after");
    }
}
