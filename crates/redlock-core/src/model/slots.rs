//! Slots: how many may hold a lock at once, and which of its slots a grant has.
//!
//! A lock with K slots is K locks, each with one holder. Slot 1 is the lock with the name itself, so
//! a request without slots asks for slot 1. The other slots are locks whose names no request can
//! have: `name#2` to `name#K`.

use std::fmt;

/// How many may hold a lock at once, and how many of these places one request takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slots {
    count: u16,
    take: u16,
}

impl Slots {
    /// The largest number of slots of a lock.
    pub const MAX: u16 = 256;

    /// A lock with `count` slots, of which a request takes `take`.
    ///
    /// # Errors
    /// [`SlotsError`]: `count` is not in 1..=256, or `take` is not in 1..=`count`.
    pub fn new(count: u64, take: u64) -> Result<Self, SlotsError> {
        let within = |number: u64, max: u16| {
            u16::try_from(number).ok().filter(|number| (1..=max).contains(number))
        };
        let count = within(count, Self::MAX).ok_or(SlotsError::Count { given: count })?;
        let take = within(take, count).ok_or(SlotsError::Take { given: take, count })?;
        Ok(Self { count, take })
    }

    /// K: how many slots the lock has.
    pub fn count(self) -> u16 {
        self.count
    }

    /// How many of them the request takes.
    pub fn take(self) -> u16 {
        self.take
    }
}

/// Why numbers are no [`Slots`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SlotsError {
    /// The number of slots.
    #[error("slots is {given}; allowed are 1 to {}", Slots::MAX)]
    Count {
        /// The number.
        given: u64,
    },
    /// The number of slots that a request takes.
    #[error("take is {given}; allowed are 1 to {count}, the number of slots")]
    Take {
        /// The number.
        given: u64,
        /// The number of slots of the lock.
        count: u16,
    },
}

/// Which slots of a lock a grant has: numbers from 1 to 256, at least one.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlotSet([u64; 4]);

impl SlotSet {
    /// Slot 1: what a request without slots asks for.
    pub const FIRST: Self = Self([1, 0, 0, 0]);

    /// These slots. `None` if there is none, or a number is not in 1..=256.
    pub fn new(slots: impl IntoIterator<Item = u16>) -> Option<Self> {
        let mut bits = [0; 4];
        for slot in slots {
            let at = usize::from(slot.checked_sub(1).filter(|at| *at < Slots::MAX)?);
            bits[at / 64] |= 1 << (at % 64);
        }
        (bits != [0; 4]).then_some(Self(bits))
    }

    /// The numbers of the slots, in ascending order.
    pub fn iter(self) -> impl Iterator<Item = u16> {
        (0..).zip(self.0).flat_map(|(word, mut bits)| {
            std::iter::from_fn(move || {
                let at = (bits != 0).then_some(bits.trailing_zeros() as u16)?;
                bits &= bits - 1;
                Some(64 * word + at + 1)
            })
        })
    }

    /// Whether this slot is among them.
    pub fn has(self, slot: u16) -> bool {
        let at = usize::from(slot.wrapping_sub(1));
        self.0.get(at / 64).is_some_and(|bits| bits >> (at % 64) & 1 == 1)
    }

    /// The number of slots.
    pub fn count(self) -> u16 {
        // Fast path for a lock without slots.
        if self == Self::FIRST {
            return 1;
        }
        self.0.iter().map(|bits| bits.count_ones() as u16).sum()
    }

    /// The slots as one number in hexadecimal digits: slot 1 is the lowest bit.
    pub(crate) fn text(self) -> String {
        let all: String = self.0.iter().rev().map(|bits| format!("{bits:016x}")).collect();
        all.trim_start_matches('0').to_owned()
    }

    /// Parses what [`SlotSet::text`] returns, and nothing else.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if text.len() > 64 || text.starts_with('0') || !text.bytes().all(is_digit) {
            return None;
        }
        let mut bits = [0; 4];
        for (at, digits) in text.as_bytes().rchunks(16).enumerate() {
            bits[at] = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        }
        (bits != [0; 4]).then_some(Self(bits))
    }
}

impl fmt::Debug for SlotSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_set_of_slots_survives_its_own_text(slots in proptest::collection::btree_set(1..=256u16, 1..40)) {
            let set = SlotSet::new(slots.iter().copied()).unwrap();
            prop_assert_eq!(SlotSet::parse(&set.text()), Some(set));
            prop_assert_eq!(set.iter().collect::<Vec<_>>(), slots.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn only_one_text_is_a_set(text in "[0-9a-fA-F]{0,66}") {
            if let Some(set) = SlotSet::parse(&text) {
                prop_assert_eq!(set.text(), text);
            }
        }
    }

    #[test]
    fn slots_outside_their_limits_are_refused() {
        let said = |count, take| Slots::new(count, take).unwrap_err().to_string();
        assert_eq!(said(0, 1), "slots is 0; allowed are 1 to 256");
        assert_eq!(said(257, 1), "slots is 257; allowed are 1 to 256");
        for take in [0, 5, u64::MAX] {
            let wanted = "allowed are 1 to 4, the number of slots";
            assert!(said(4, take).ends_with(wanted), "{take}");
        }
        assert_eq!(Slots::new(256, 256).map(|slots| (slots.count(), slots.take())), Ok((256, 256)));
        for bad in [&[][..], &[0], &[257], &[1, 0]] {
            assert_eq!(SlotSet::new(bad.iter().copied()), None, "{bad:?}");
        }
        assert!(!SlotSet::FIRST.has(0) && !SlotSet::FIRST.has(257) && SlotSet::FIRST.has(1));
    }
}
