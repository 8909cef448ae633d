//! Reproducible random numbers.

use redlock_core::clock::{Entropy, OsEntropy};

/// A generator with the same numbers on every machine (SplitMix64).
pub(crate) struct Chance(u64);

/// Reads the seed from this environment variable, to replay a run. Without the variable the seed is
/// new. Prints the seed.
pub(crate) fn seed(variable: &str) -> u64 {
    let seed = match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text:?} is not a number")),
        Err(_) => {
            let mut seed = [0; 8];
            OsEntropy.fill(&mut seed);
            u64::from_le_bytes(seed)
        }
    };
    println!("replay with {variable}={seed}");
    seed
}

impl Chance {
    /// The generator for one part of a run. How many numbers one part draws does not change those
    /// of the others.
    pub(crate) fn of(seed: u64, part: usize) -> Self {
        Self(mix(seed ^ mix(part as u64)))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn one_in(&mut self, many: usize) -> bool {
        self.below(many) == 0
    }

    pub(crate) fn pick<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }
}

fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
