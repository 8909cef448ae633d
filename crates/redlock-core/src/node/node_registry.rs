//! What the workers of one gateway's masters know of each other: which process each name leads to, and whose clock ran
//! ahead of ours.

use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::clock_drift::RanAhead;

/// Two clocks that are read once a second show one event within this.
const ALIKE: Duration = Duration::from_secs(3);
/// Whoever was not read for longer is away.
const RECENT: Duration = Duration::from_secs(10);

/// Shared by the workers of one gateway's masters.
#[derive(Debug, Default)]
pub struct NodeRegistry(Mutex<BTreeMap<Arc<str>, Peer>>);

#[derive(Debug, Default)]
struct Peer {
    run_id: String,
    /// When its clock was read, on our monotonic one: first, and last.
    first_read: Option<Duration>,
    read: Duration,
    ran_ahead: Option<RanAhead>,
}

impl NodeRegistry {
    /// Notes that a name leads to a process. One process under two names (two addresses, two database numbers) would be two
    /// votes that are lost together.
    ///
    /// # Errors
    /// The other name that leads there: it was first, and keeps the process until it is seen to lead to another one.
    pub(super) fn claim(&self, name: &Arc<str>, run_id: &str) -> Result<(), Arc<str>> {
        let mut node_registry = self.lock();
        let other =
            node_registry.iter().find(|(other, peer)| *other != name && peer.run_id == run_id);
        if let Some(other) = other.map(|(other, _)| other.clone()) {
            // It leads no longer to where it led before.
            node_registry.entry(name.clone()).or_default().run_id.clear();
            return Err(other);
        }
        run_id.clone_into(&mut node_registry.entry(name.clone()).or_default().run_id);
        Ok(())
    }

    /// Notes what was read of a clock.
    pub(super) fn read(&self, name: &Arc<str>, at: Duration, ran_ahead: Option<RanAhead>) {
        let mut node_registry = self.lock();
        let peer = node_registry.entry(name.clone()).or_default();
        peer.first_read.get_or_insert(at);
        peer.read = at;
        peer.ran_ahead = ran_ahead.or(peer.ran_ahead);
    }

    /// Whether all clocks that are read have done the same: then it was ours that ran slow. One that was not read before has
    /// no say, nor one that has not been read for long; one that was not read since might have said no.
    pub(super) fn ran_alike(&self, name: &Arc<str>, ran: RanAhead) -> bool {
        let node_registry = self.lock();
        let has_say = |(other, peer): &(&Arc<str>, &Peer)| {
            let knows = peer.first_read.is_some_and(|first| first <= ran.from);
            *other != name && knows && peer.read + RECENT >= ran.to
        };
        let alike = |other: &RanAhead| other.to.abs_diff(ran.to) <= ALIKE && other.by * 2 >= ran.by;
        let agrees =
            |peer: &Peer| peer.read >= ran.to && peer.ran_ahead.is_some_and(|ran| alike(&ran));
        let mut others =
            node_registry.iter().filter(has_say).map(|(_, peer)| agrees(peer)).peekable();
        others.peek().is_some() && others.all(|agrees| agrees)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Peer>> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_the_name_under_which_it_was_seen_first_until_that_leads_to_another() {
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
    fn a_clock_that_ran_ahead_alone_is_to_blame_and_when_all_did_it_was_ours() {
        let (node_registry, a, b, c): (_, Arc<str>, Arc<str>, Arc<str>) =
            (NodeRegistry::default(), Arc::from("a"), Arc::from("b"), Arc::from("c"));
        let seconds = Duration::from_secs;
        let ran =
            |to| RanAhead { from: seconds(to - 1), to: seconds(to), by: Duration::from_millis(50) };
        assert!(!node_registry.ran_alike(&a, ran(10)), "nobody else is there");
        node_registry.read(&b, seconds(10), Some(ran(10)));
        assert!(!node_registry.ran_alike(&a, ran(10)), "it was not read before");
        let node_registry = NodeRegistry::default();
        node_registry.read(&b, seconds(8), None);
        node_registry.read(&b, seconds(9), Some(ran(9)));
        assert!(!node_registry.ran_alike(&a, ran(10)), "it was not read since");
        node_registry.read(&b, seconds(11), None);
        assert!(node_registry.ran_alike(&a, ran(10)), "a second before");
        assert!(
            !node_registry.ran_alike(&a, RanAhead { by: seconds(1), ..ran(10) }),
            "by much less"
        );
        node_registry.read(&c, seconds(0), None);
        assert!(
            node_registry.ran_alike(&a, RanAhead { to: seconds(11), ..ran(10) }),
            "the third has been away for long"
        );
        node_registry.read(&c, seconds(5), None);
        assert!(!node_registry.ran_alike(&a, ran(10)), "it was not read since, and is not away");
        node_registry.read(&c, seconds(12), None);
        assert!(!node_registry.ran_alike(&a, ran(10)), "the third did not");
        node_registry.read(&c, seconds(40), Some(ran(40)));
        assert!(!node_registry.ran_alike(&a, ran(10)), "long after");
    }
}
