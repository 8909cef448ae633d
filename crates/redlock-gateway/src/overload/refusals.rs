//! What was refused, told in few lines: the first refusal of a kind to an address in full, or the first few to a principal,
//! the others counted and summed up when the time is over. A stranger's requests, of which there may be thousands a second,
//! must not fill the disk.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use crate::overload::clients::network;

/// How long refusals are counted together.
pub(crate) const WINDOW: Duration = Duration::from_secs(10);
/// Addresses and names, each with a kind, that are told apart in that time; those that come when there are more are counted
/// by kind alone.
const MAX: usize = 1024;
/// Of a kind that are told in full where a principal is known, whose name people may look for.
const OF_A_PRINCIPAL: u64 = 10;

/// To whom: an address, with the principal where one is known; and what.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Refusal {
    /// `None` stands for all the others.
    address: Option<IpAddr>,
    who: Option<String>,
    what: String,
}

/// The refusals of the present window.
#[derive(Debug, Default)]
pub struct Refusals {
    counts: Mutex<HashMap<Refusal, Count>>,
}

#[derive(Debug, Default)]
struct Count {
    told: u64,
    untold: u64,
}

/// So many refusals that were not told one by one.
#[derive(Debug)]
pub struct Summary {
    pub address: Option<IpAddr>,
    pub who: Option<String>,
    pub what: String,
    pub refused: u64,
}

impl Refusals {
    /// Counts a refusal; true when it is to be told in full. `what` is a word of few.
    pub fn is_first(&self, address: IpAddr, who: Option<&str>, what: &str) -> bool {
        let in_full = if who.is_some() { OF_A_PRINCIPAL } else { 1 };
        let who = who.map(str::to_owned);
        let refusal = Refusal { address: Some(network(address)), who, what: what.to_owned() };
        let mut counts = self.counts.lock();
        let is_known = counts.contains_key(&refusal) || counts.len() < MAX;
        let refusal =
            if is_known { refusal } else { Refusal { address: None, who: None, ..refusal } };
        let count = counts.entry(refusal).or_default();
        let is_told = is_known && count.told < in_full;
        *if is_told { &mut count.told } else { &mut count.untold } += 1;
        is_told
    }

    /// Begins a new window; answers what was not told of the one before.
    pub fn take(&self) -> Vec<Summary> {
        let counts = std::mem::take(&mut *self.counts.lock());
        let summary = |(Refusal { address, who, what }, Count { untold: refused, .. })| {
            (refused > 0).then_some(Summary { address, who, what, refused })
        };
        let mut untold: Vec<_> = counts.into_iter().filter_map(summary).collect();
        untold
            .sort_by(|a, b| (b.refused, a.address, &a.what).cmp(&(a.refused, b.address, &b.what)));
        untold
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_addresses_than_are_told_apart_are_counted_together() {
        let refusals = Refusals::default();
        let first = (0..5000u32)
            .filter(|n| refusals.is_first(IpAddr::V4((*n).into()), None, "unauthenticated"))
            .count();
        assert_eq!(first, MAX);
        assert!(!refusals.is_first(IpAddr::V4(0.into()), None, "unauthenticated"));
        let told: Vec<_> =
            refusals.take().into_iter().map(|all| (all.address, all.refused)).collect();
        assert_eq!(told, [(None, 5000 - MAX as u64), (Some(IpAddr::V4(0.into())), 1)]);
        assert!(
            refusals.take().is_empty()
                && refusals.is_first(IpAddr::V4(0.into()), None, "unauthenticated")
        );
    }

    #[test]
    fn what_a_stranger_is_refused_does_not_hide_what_a_key_at_the_same_address_is() {
        let refusals = Refusals::default();
        let address = IpAddr::V4([192, 0, 2, 1].into());
        assert!(refusals.is_first(address, None, "unauthenticated"));
        assert!(refusals.is_first(address, Some("ci"), "forbidden"));
        assert!(refusals.is_first(address, Some("batch"), "forbidden"));
        assert_eq!(
            (0..100).filter(|_| refusals.is_first(address, Some("ci"), "forbidden")).count(),
            9
        );
    }
}
