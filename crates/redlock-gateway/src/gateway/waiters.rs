//! Shows the queue for a lock at this gateway.

use redlock_core::{LockName, Redlock, Waiter};

/// The longest part of a queue that is shown.
const MAX_SHOWN: usize = 100;

/// The first waiters for a lock with the time when each began to wait, and the length of the queue.
/// The times are in microseconds since 1970.
pub(super) fn waiters(locks: &Redlock, name: &LockName) -> (Vec<(Waiter, u64)>, usize) {
    let (waiters, total) = locks.waiters(name, MAX_SHOWN);
    let now = locks.wall_micros();
    let since = |waiter: Waiter| {
        let micros = now.saturating_sub(waiter.waits_for.as_micros() as u64);
        (waiter, micros)
    };
    (waiters.into_iter().map(since).collect(), total)
}
