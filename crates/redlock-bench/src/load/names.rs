//! Which lock a connection wants next.

use std::ops::Range;

use rand_distr::{Distribution, Zipf};

use crate::workload::Names;

/// One connection's names.
pub(super) enum Source {
    Random,
    Walk { share: Range<u64>, next: u64 },
    Zipf(Zipf<f64>),
}

impl Source {
    /// For one of several connections.
    pub(super) fn new(names: Names, worker: u32, connections: u32) -> Self {
        match names {
            Names::Random => Self::Random,
            Names::Walk(count) => {
                let share = share(count, worker, connections);
                Self::Walk { next: share.start, share }
            }
            Names::Zipf(count) => Self::Zipf(Zipf::new(count as f64, 1.0).expect("there are names, and 1 is positive")),
        }
    }

    pub(super) fn next(&mut self) -> u64 {
        match self {
            Self::Random => rand::random(),
            Self::Walk { share, next } => {
                let name = *next;
                *next = if name + 1 < share.end { name + 1 } else { share.start };
                name
            }
            Self::Zipf(law) => law.sample(&mut rand::rng()) as u64,
        }
    }

    /// Whether somebody else may hold what this connection wants.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Self::Zipf(_))
    }
}

/// All shares together are all names, and none is in two of them.
pub(super) fn share(names: u64, worker: u32, connections: u32) -> Range<u64> {
    let from = |worker: u32| names * u64::from(worker) / u64::from(connections);
    from(worker)..from(worker + 1)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn connections_share_all_names_and_go_round() {
        let mut seen = BTreeMap::<u64, u32>::new();
        for worker in 0..7 {
            let length = share(100, worker, 7).count();
            let mut source = Source::new(Names::Walk(100), worker, 7);
            for _ in 0..2 * length {
                *seen.entry(source.next()).or_default() += 1;
            }
        }
        assert_eq!(seen.keys().copied().collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
        assert!(seen.values().all(|&count| count == 2), "{seen:?}");
    }

    #[test]
    fn the_first_of_zipfs_names_is_drawn_as_often_as_the_law_says() {
        let mut source = Source::new(Names::Zipf(10_000), 0, 64);
        let draws = 20_000;
        let firsts = (0..draws).filter(|_| source.next() == 1).count() as f64;
        // 1 ÷ the 10,000th harmonic number, 9.79; five standard deviations are 0.011.
        let share = firsts / f64::from(draws);
        assert!((0.091..0.114).contains(&share), "{share}");
        assert!((0..draws).map(|_| source.next()).all(|name| (1..=10_000).contains(&name)));
    }
}
