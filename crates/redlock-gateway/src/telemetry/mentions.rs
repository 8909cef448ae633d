//! One line for many events of a kind, so that a client that causes them does not fill the log.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Events of one kind, of which the log mentions some.
#[derive(Debug)]
pub struct Mentions {
    /// The shortest time between two mentions.
    interval: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    mentioned: Option<Instant>,
    /// The number of events since then.
    since: u64,
}

impl Mentions {
    pub fn every(interval: Duration) -> Self {
        Self { interval, state: Mutex::default() }
    }

    /// Counts an event. If a mention is due, returns the number of events since the last one.
    pub fn count(&self) -> Option<u64> {
        let mut state = self.state.lock();
        state.since += 1;
        if state.mentioned.is_some_and(|at| at.elapsed() < self.interval) {
            return None;
        }
        state.mentioned = Some(Instant::now());
        Some(std::mem::take(&mut state.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_event_is_mentioned_and_the_next_mention_has_the_number_since() {
        let mentions = Mentions::every(Duration::from_secs(3_600));
        assert_eq!(mentions.count(), Some(1));
        assert!((0..999).all(|_| mentions.count().is_none()));
        mentions.state.lock().mentioned = None;
        assert_eq!(mentions.count(), Some(1_000));
    }
}
