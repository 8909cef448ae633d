//! The order of a line: by priority, then by arrival.
//!
//! One number is a waiter's place in the order, so a queue needs no second index. The upper four
//! bits rank the priority, and the other bits count the arrivals of the process. A smaller number
//! is served first.
//!
//! A stream of requests with a higher priority may pass a waiter for as long as it waits. Nothing
//! but the waiter's own patience bounds that.

use std::fmt;

/// The bits of an arrival's number. 2^60 µs are 36,500 years.
const ARRIVAL_BITS: u32 = 60;
pub(super) const ARRIVAL: u64 = (1 << ARRIVAL_BITS) - 1;

/// How early a waiter is served. Waiters of one priority are served in the order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(u8);

impl Priority {
    /// Served last.
    pub const MIN: Self = Self(0);
    /// Served first.
    pub const MAX: Self = Self(9);

    /// `None` unless the value is from 0 to 9.
    pub const fn new(value: u8) -> Option<Self> {
        if value <= Self::MAX.0 { Some(Self(value)) } else { None }
    }

    /// The value, from 0 to 9.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// The number of a waiter with this priority.
    pub(super) fn number(self, arrival: u64) -> u64 {
        u64::from(Self::MAX.0 - self.0) << ARRIVAL_BITS | arrival
    }
}

impl Default for Priority {
    fn default() -> Self {
        Self(5)
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Which waiters of a lock wait at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum QueueMode {
    /// The waiter leaves all others alone.
    #[default]
    All,
    /// Only the newest waiter of this kind waits. An older one fails with
    /// [`LockError::Superseded`](crate::LockError::Superseded) when a newer one begins to wait.
    Newest,
}

/// The number for a request that takes up the `number` of another request of its owner. With the
/// same priority the number stays. With another priority only the arrival stays.
pub(super) fn taken_up(number: u64, of: Priority, by: Priority) -> u64 {
    if of == by { number } else { by.number(number & ARRIVAL) }
}

/// The number behind all waiters that are ranked as the waiter with the number `passing`.
pub(super) fn behind(passing: u64, arrival: u64) -> u64 {
    passing & !ARRIVAL | arrival
}
