//! Bounds the connections that stay busy for long: those of waiters and of event streams. The other
//! connections are left to short requests.

use redlock_core::{LockError, WaitLimit};

use super::clients::{Counter, Permit};

/// The connections of waiters and event streams together.
#[derive(Debug)]
pub(crate) struct LongLived {
    limit: usize,
    taken: Counter,
}

/// Unlimited.
impl Default for LongLived {
    fn default() -> Self {
        Self::new(usize::MAX)
    }
}

impl LongLived {
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, taken: Counter::default() }
    }

    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// How many more there may be.
    pub(crate) fn free(&self) -> usize {
        self.limit.saturating_sub(self.taken.count())
    }

    /// Counts the connection of an event stream.
    pub(crate) fn begin_stream(&self) -> Option<Permit> {
        self.taken.take(self.limit)
    }

    /// Counts the connection of a waiter.
    ///
    /// # Errors
    /// [`LockError::TooManyWaiters`].
    pub(crate) fn begin_wait(&self) -> Result<Permit, LockError> {
        let full = LockError::TooManyWaiters { max: self.limit, limit: WaitLimit::Connections };
        self.taken.take(self.limit).ok_or(full)
    }
}
