//! Sums up refusals in few log lines, so that a stranger with thousands of requests a second cannot
//! fill the disk. In each window of 10 s, the first refusal of each kind to an address is logged in
//! full. If the principal is known, the first ten of each kind to this principal are. All others
//! are counted, and lines at the end of the window sum them up.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use crate::overload::clients::network;

/// The length of a window.
pub(crate) const WINDOW: Duration = Duration::from_secs(10);
/// Limit on the separate counts in a window. Each is for one address, one principal and one kind.
/// When the limit is reached, further refusals are counted by kind alone.
const MAX_KINDS: usize = 1024;
/// How many refusals of a kind to one principal are logged in full in a window. People may search
/// the log for the principal's name.
const FULL_PER_PRINCIPAL: u64 = 10;

/// The sender of a request.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Who {
    /// The principal, or the key name that the request claimed without proof.
    pub name: String,
    /// Whether the request has proved to be of that principal.
    pub is_proven: bool,
}

/// The key of a count: an address, the principal if known, and the kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Refusal {
    /// `None` in a count by kind alone.
    address: Option<IpAddr>,
    who: Option<Who>,
    what: String,
}

/// The refusals of the current window.
#[derive(Debug, Default)]
pub struct Refusals {
    of_strangers: Mutex<HashMap<Refusal, Count>>,
    /// Of principals that have proved who they are, from any address. Refusals from many addresses
    /// would otherwise hide what a stolen key is refused.
    of_principals: Mutex<HashMap<Refusal, Count>>,
}

#[derive(Debug, Default)]
struct Count {
    logged: u64,
    summed: u64,
}

/// A count of refusals that were not logged in full.
#[derive(Debug)]
pub struct Summary {
    pub address: Option<IpAddr>,
    pub who: Option<String>,
    pub what: String,
    pub refused: u64,
}

impl Refusals {
    /// Counts a refusal. Returns whether the caller is to log it in full. `what` is one of few
    /// kinds.
    pub fn is_first(&self, address: IpAddr, who: Option<Who>, what: &str) -> bool {
        let in_full = if who.is_some() { FULL_PER_PRINCIPAL } else { 1 };
        let is_proven = who.as_ref().is_some_and(|who| who.is_proven);
        let address = (!is_proven).then(|| network(address));
        let refusal = Refusal { address, who, what: what.to_owned() };
        let counts = if is_proven { &self.of_principals } else { &self.of_strangers };
        let mut counts = counts.lock();
        let is_known = counts.contains_key(&refusal) || counts.len() < MAX_KINDS;
        let refusal =
            if is_known { refusal } else { Refusal { address: None, who: None, ..refusal } };
        let count = counts.entry(refusal).or_default();
        let is_logged = is_known && count.logged < in_full;
        *if is_logged { &mut count.logged } else { &mut count.summed } += 1;
        is_logged
    }

    /// Begins a new window, and returns the summaries of the one before.
    pub fn take(&self) -> Vec<Summary> {
        let of_strangers = std::mem::take(&mut *self.of_strangers.lock());
        let of_principals = std::mem::take(&mut *self.of_principals.lock());
        let summary = |(Refusal { address, who, what }, Count { summed: refused, .. })| {
            let who = who.map(|who| who.name);
            (refused > 0).then_some(Summary { address, who, what, refused })
        };
        let mut summaries: Vec<_> =
            of_strangers.into_iter().chain(of_principals).filter_map(summary).collect();
        summaries
            .sort_by(|a, b| (b.refused, a.address, &a.what).cmp(&(a.refused, b.address, &b.what)));
        summaries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(name: &str, is_proven: bool) -> Option<Who> {
        Some(Who { name: name.to_owned(), is_proven })
    }

    #[test]
    fn addresses_beyond_the_limit_are_counted_together() {
        let refusals = Refusals::default();
        let first = (0..5000u32)
            .filter(|n| refusals.is_first(IpAddr::V4((*n).into()), None, "unauthenticated"))
            .count();
        assert_eq!(first, MAX_KINDS);
        assert!(!refusals.is_first(IpAddr::V4(0.into()), None, "unauthenticated"));
        let summaries: Vec<_> =
            refusals.take().into_iter().map(|all| (all.address, all.refused)).collect();
        assert_eq!(summaries, [(None, 5000 - MAX_KINDS as u64), (Some(IpAddr::V4(0.into())), 1)]);
        assert!(
            refusals.take().is_empty()
                && refusals.is_first(IpAddr::V4(0.into()), None, "unauthenticated")
        );
    }

    #[test]
    fn strangers_leave_room_for_the_refusals_of_a_key() {
        let refusals = Refusals::default();
        let from = |n: u32| IpAddr::V4(n.into());
        let full = (0..5_000).filter(|n| refusals.is_first(from(*n), None, "unauthenticated"));
        assert_eq!(full.count(), MAX_KINDS);
        assert!(!refusals.is_first(from(1), who("ci", false), "unauthenticated"), "not proven");
        assert!(refusals.is_first(from(1), who("ci", true), "forbidden"));
    }

    #[test]
    fn a_strangers_refusals_do_not_hide_those_of_a_key() {
        let refusals = Refusals::default();
        let address = IpAddr::V4([192, 0, 2, 1].into());
        assert!(refusals.is_first(address, None, "unauthenticated"));
        assert!(refusals.is_first(address, who("ci", true), "forbidden"));
        assert!(refusals.is_first(address, who("batch", true), "forbidden"));
        assert_eq!(
            (0..100).filter(|_| refusals.is_first(address, who("ci", true), "forbidden")).count(),
            9
        );
    }
}
