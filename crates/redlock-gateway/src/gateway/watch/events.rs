//! What watchers follow, and what they get.

use std::sync::OnceLock;

use redlock_core::{HeldBy, LockName, Waiter};

/// What a watcher follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Watched {
    Lock(LockName),
    /// All locks whose names begin with this text.
    Prefix(String),
}

impl Watched {
    pub(super) fn covers(&self, name: &LockName) -> bool {
        match self {
            Self::Lock(lock) => lock == name,
            Self::Prefix(prefix) => name.as_str().starts_with(&**prefix),
        }
    }
}

/// What happened to a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Held(HeldBy),
    Extended(HeldBy),
    /// The holder has released the lock. The value describes the hold that ended.
    Released(HeldBy),
    /// The TTL of this hold has ended.
    Expired(HeldBy),
    /// An operator has ended this hold.
    Forced(HeldBy),
    /// This gateway's queue: its first waiters with the time when each began to wait, and its
    /// length.
    Waiters(Vec<(Waiter, u64)>, usize),
}

/// A change of a lock.
#[derive(Debug)]
pub struct Change {
    /// Grows by one from change to change of this process.
    pub id: u64,
    /// The lock, without the slot.
    pub name: LockName,
    pub slot: u16,
    pub event: Event,
    /// The text that the routes send to callers who may see all of the change. The first route that
    /// sends it writes it.
    pub written: OnceLock<String>,
}
