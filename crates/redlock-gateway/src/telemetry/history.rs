//! The last five minutes of a gateway in samples of a few seconds, for the charts of the console. The
//! memory is fixed, and a request adds nothing to it: a sample compares counters.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time between two samples.
pub const PERIOD: Duration = Duration::from_secs(3);
/// The samples of five minutes.
const KEPT: usize = 300 / PERIOD.as_secs() as usize;

/// What happened since the start of the gateway, or within one sample.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub grants: u64,
    pub refusals: u64,
    pub handoffs: u64,
}

/// One sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    pub ended: Instant,
    pub length: Duration,
    pub counts: Counts,
    /// The waiting requests at the end of the sample.
    pub waiting: usize,
}

#[derive(Debug)]
pub(super) struct History(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Oldest first.
    samples: VecDeque<Sample>,
    /// The end of the last sample, and the counts since the start of the gateway until then.
    last: (Instant, Counts),
}

impl History {
    pub(super) fn since(start: Instant) -> Self {
        let samples = VecDeque::with_capacity(KEPT);
        Self(Mutex::new(State { samples, last: (start, Counts::default()) }))
    }

    /// Ends the running sample. `totals` are the counts since the gateway started; the sample gets
    /// what they have grown by since the sample before.
    pub(super) fn sample(&self, ended: Instant, totals: Counts, waiting: usize) {
        let mut state = self.0.lock();
        let (began, before) = std::mem::replace(&mut state.last, (ended, totals));
        let counts = Counts {
            grants: totals.grants - before.grants,
            refusals: totals.refusals - before.refusals,
            handoffs: totals.handoffs - before.handoffs,
        };
        if state.samples.len() == KEPT {
            state.samples.pop_front();
        }
        state.samples.push_back(Sample { ended, length: ended - began, counts, waiting });
    }

    /// The samples, oldest first.
    pub(super) fn samples(&self) -> Vec<Sample> {
        self.0.lock().samples.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_follow_each_other_and_the_oldest_are_dropped() {
        let start = Instant::now();
        let history = History::since(start);
        assert_eq!(history.samples(), []);
        for at in 1..=KEPT as u64 + 5 {
            let totals = Counts { grants: at * at, refusals: 2 * at, handoffs: at };
            history.sample(start + PERIOD * at as u32, totals, at as usize);
        }
        let samples = history.samples();
        assert_eq!(samples.len(), KEPT);
        assert!(samples.iter().all(|sample| sample.length == PERIOD));
        let counts = Counts { grants: 36 - 25, refusals: 2, handoffs: 1 };
        let first = Sample { ended: start + PERIOD * 6, length: PERIOD, counts, waiting: 6 };
        assert_eq!(samples[0], first);
    }
}
