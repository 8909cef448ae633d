//! Limits how many waiters and places in line each client may have, so that other clients can wait
//! too.

use redlock_core::{LockError, LockName, WaitLimit};

use crate::overload::clients::{Client, NamePermit, Permit};

/// The limits of one client.
#[derive(Debug, Clone, Copy)]
pub struct WaitShare {
    /// Limit on waiters.
    pub waiters: usize,
    /// Limit on the locks that these waiters wait for. There is a limit because the gateway polls
    /// each such lock.
    pub locks: usize,
    /// Limit on the places in line for one lock. Of all locks together, a client may have as many
    /// places as waiters.
    pub places_per_lock: usize,
    /// Limit on the requests of all clients that are answered before they are granted. They need no
    /// connection, so without a limit of their own they could take the places of all other waiters.
    pub deferred: usize,
}

/// A client's permits for one place in line; returned when dropped.
#[derive(Debug)]
pub(crate) struct LinePermit {
    _place: Permit,
    _of_lock: NamePermit,
}

/// A client's permits for one waiter; returned when dropped.
#[derive(Debug)]
pub(crate) struct WaitPermit {
    _waiter: Permit,
    _lock: NamePermit,
}

impl WaitShare {
    /// No limits for one client. The limits for all clients together still apply.
    pub const ALL: Self = Self {
        waiters: usize::MAX,
        locks: usize::MAX,
        places_per_lock: usize::MAX,
        deferred: usize::MAX,
    };

    pub(crate) fn take(self, client: &Client, lock: &LockName) -> Result<WaitPermit, LockError> {
        let full = |max, limit| LockError::TooManyWaiters { max, limit };
        let waiter =
            client.waiting.take(self.waiters).ok_or(full(self.waiters, WaitLimit::OfCaller))?;
        let lock = client
            .waited_locks
            .take(lock, self.locks)
            .ok_or(full(self.locks, WaitLimit::LocksOfCaller))?;
        Ok(WaitPermit { _waiter: waiter, _lock: lock })
    }

    /// Takes a place in line, which may be kept after the wait. `None`: the client has as many as
    /// it may have.
    pub(crate) fn take_place(self, client: &Client, lock: &LockName) -> Option<LinePermit> {
        let place = client.places.take(self.waiters)?;
        let of_lock = client.places_by_lock.take_again(lock, self.places_per_lock)?;
        Some(LinePermit { _place: place, _of_lock: of_lock })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_at_its_limit_is_told_which_and_others_are_not() {
        let one = Client::default();
        let other = Client::default();
        let share = WaitShare { waiters: 3, locks: 2, ..WaitShare::ALL };
        let name = |text: &str| text.parse::<LockName>().unwrap();
        let take = |client, text| share.take(client, &name(text));
        let refused = |text| match take(&one, text).map(drop) {
            Err(LockError::TooManyWaiters { max, limit }) => (max, limit),
            other => panic!("{other:?}"),
        };
        let first = take(&one, "a").unwrap();
        let second = take(&one, "b").unwrap();
        assert_eq!(refused("c"), (2, WaitLimit::LocksOfCaller));
        let third = take(&one, "a").unwrap();
        assert_eq!(refused("a"), (3, WaitLimit::OfCaller));
        assert!(take(&other, "c").is_ok());
        drop(first);
        assert_eq!(refused("c"), (2, WaitLimit::LocksOfCaller), "another waiter still waits for a");
        drop(third);
        assert!(take(&one, "c").is_ok());
        drop(second);
        assert_eq!(one.waiting.count(), 0);
        assert!(
            [take(&one, "d"), take(&one, "e")].iter().all(Result::is_ok),
            "no name is still counted"
        );
    }

    #[test]
    fn places_are_limited_in_all_and_for_each_lock() {
        let client = Client::default();
        let share = WaitShare { waiters: 3, places_per_lock: 2, ..WaitShare::ALL };
        let name = |text: &str| text.parse::<LockName>().unwrap();
        let take = |text| share.take_place(&client, &name(text));
        let first = take("a").unwrap();
        let second = take("a").unwrap();
        assert!(take("a").is_none());
        let third = take("b").unwrap();
        assert!(take("c").is_none());
        assert!(share.take_place(&Client::default(), &name("a")).is_some());
        drop(first);
        assert!(take("a").is_some());
        drop((second, third));
        assert_eq!(client.places.count(), 0);
    }
}
