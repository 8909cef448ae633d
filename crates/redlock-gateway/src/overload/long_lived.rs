//! Bounds the connections that stay busy for long: those of waiters and of event streams. The other
//! connections are left to short requests.

use redlock_core::{LockError, WaitLimit};

use super::clients::{Counter, Permit};

/// The connections of waiters and event streams together.
#[derive(Debug)]
pub(crate) struct LongLived {
    /// Limit on both together, for a new stream.
    of_streams: usize,
    /// The same for a new waiter. It is larger if the operator allows more waiters.
    of_waiters: usize,
    taken: Counter,
}

/// Unlimited.
impl Default for LongLived {
    fn default() -> Self {
        Self::new(usize::MAX, usize::MAX)
    }
}

impl LongLived {
    pub(crate) fn new(of_streams: usize, of_waiters: usize) -> Self {
        Self { of_streams, of_waiters: of_waiters.max(of_streams), taken: Counter::default() }
    }

    pub(crate) fn of_streams(&self) -> usize {
        self.of_streams
    }

    /// How many more streams there may be.
    pub(crate) fn free(&self) -> usize {
        self.of_streams.saturating_sub(self.taken.count())
    }

    /// Counts the connection of an event stream.
    pub(crate) fn begin_stream(&self) -> Option<Permit> {
        self.taken.take(self.of_streams)
    }

    /// Counts the connection of a waiter.
    ///
    /// # Errors
    /// [`LockError::TooManyWaiters`].
    pub(crate) fn begin_wait(&self) -> Result<Permit, LockError> {
        let full =
            LockError::TooManyWaiters { max: self.of_waiters, limit: WaitLimit::Connections };
        self.taken.take(self.of_waiters).ok_or(full)
    }
}
