//! Random numbers, all from one seed.
//!
//! Each part of a history that draws numbers has its own stream. So a change in one part does not
//! shift the numbers of the others. The generator is a named one (ChaCha8), and this file contains
//! the whole way from its words to numbers. So a seed means the same history until this file or the
//! simulation changes, whatever happens to other libraries.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rand::rngs::ChaCha8Rng;
use rand::{Rng, SeedableRng};
use redlock_core::clock::Entropy;

/// The purposes that draw random numbers, each with a stream of its own.
#[derive(Debug, Clone, Copy)]
pub enum Stream {
    /// The kind of history.
    Plan,
    /// Delays, and the fate of messages on broken connections.
    Network,
    /// Delays and losses of hints.
    Hints,
    /// One kind of fault, by its number.
    Fault(u8),
    Client(u8),
    /// One client of another Redlock library, by its number.
    Foreign(u8),
    /// Faults while the cluster is being started.
    Bootstrap,
    /// One process of one gateway: its owners, nonces and jitter.
    Gateway {
        index: u8,
        /// The number of the gateway's process.
        process: u16,
    },
}

impl Stream {
    fn number(self) -> u64 {
        match self {
            Self::Plan => 0,
            Self::Network => 1 << 32,
            Self::Fault(kind) => 2 << 32 | u64::from(kind),
            Self::Hints => 5 << 32,
            Self::Foreign(id) => 6 << 32 | u64::from(id),
            Self::Bootstrap => 7 << 32,
            Self::Client(id) => 3 << 32 | u64::from(id),
            Self::Gateway { index, process } => {
                4 << 32 | u64::from(index) << 16 | u64::from(process)
            }
        }
    }
}

/// One stream of one seed.
pub struct Chance(ChaCha8Rng);

impl Chance {
    /// This stream of this seed.
    pub fn new(seed: u64, stream: Stream) -> Self {
        let mut key = *b"redlock-simulation..one seed....";
        key[24..].copy_from_slice(&seed.to_le_bytes());
        let mut generator = ChaCha8Rng::from_seed(key);
        generator.set_stream(stream.number());
        Self(generator)
    }

    /// A number in `0..bound`, or 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// A number in `-limit..=limit`.
    pub fn around(&mut self, limit: u64) -> i64 {
        self.below(2 * limit + 1) as i64 - limit as i64
    }

    /// True with a probability of `hits` percent.
    pub fn percent(&mut self, hits: u64) -> bool {
        self.below(100) < hits
    }

    /// Whole milliseconds in `low..=high`.
    pub fn millis(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_millis(self.between(low, high))
    }

    /// Whole milliseconds, at least one, exponentially distributed. Such gaps lie between
    /// independent events.
    pub fn gap(&mut self, mean: Duration) -> Duration {
        // A geometric number of small steps approximates the exponential distribution. It needs no
        // logarithm, whose last bits differ between platforms.
        let step = (mean.as_millis() as u64 / 16).max(1);
        let mut steps = 0;
        while steps < 128 && self.below(16) != 0 {
            steps += 1;
        }
        Duration::from_millis(1 + steps * step + self.below(step))
    }

    /// One of these values.
    pub fn pick<T: Copy>(&mut self, among: &[T]) -> T {
        among[self.below(among.len() as u64) as usize]
    }

    fn fill(&mut self, buffer: &mut [u8]) {
        self.0.fill_bytes(buffer);
    }
}

/// The randomness of one gateway process.
pub struct SimEntropy(Mutex<Chance>);

impl SimEntropy {
    /// An entropy source that draws from this stream.
    pub fn new(chance: Chance) -> Self {
        Self(Mutex::new(chance))
    }
}

impl Entropy for SimEntropy {
    fn fill(&self, buffer: &mut [u8]) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).fill(buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_always_gives_the_same_numbers() {
        let mut chance = Chance::new(17, Stream::Client(3));
        let drawn: Vec<u64> = (0..4).map(|_| chance.below(1000)).collect();
        assert_eq!(drawn, PINNED);
    }

    const PINNED: [u64; 4] = [127, 83, 343, 74];

    #[test]
    fn gaps_have_about_their_mean() {
        let mut chance = Chance::new(1, Stream::Plan);
        let sum: Duration = (0..10_000).map(|_| chance.gap(Duration::from_millis(800))).sum();
        let mean = sum / 10_000;
        assert!((700..900).contains(&mean.as_millis()), "{mean:?}");
    }
}
