//! What watchers follow, and what they get.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

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

impl Event {
    /// The bytes of the texts for people.
    fn text_bytes(&self) -> usize {
        match self {
            Self::Held(by)
            | Self::Extended(by)
            | Self::Released(by)
            | Self::Expired(by)
            | Self::Forced(by) => by.info.len(),
            Self::Waiters(first, _) => {
                first.iter().map(|(waiter, _)| waiter.info.as_bytes().len()).sum()
            }
        }
    }
}

/// The memory of all changes that are kept, because some stream has not taken them yet or may still
/// ask for them.
#[derive(Debug)]
pub(super) struct KeptBytes {
    count: Arc<AtomicUsize>,
    limit: usize,
}

impl KeptBytes {
    pub(super) fn new(limit: usize) -> Self {
        Self { count: Arc::default(), limit }
    }

    pub(super) fn is_full(&self) -> bool {
        self.count.load(Ordering::Relaxed) >= self.limit
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn keep(&self, bytes: usize) -> Keep {
        self.count.fetch_add(bytes, Ordering::Relaxed);
        Keep { bytes, count: self.count.clone() }
    }
}

/// Counts in [`KeptBytes`] until it is dropped.
#[derive(Debug)]
struct Keep {
    bytes: usize,
    count: Arc<AtomicUsize>,
}

impl Drop for Keep {
    fn drop(&mut self) {
        self.count.fetch_sub(self.bytes, Ordering::Relaxed);
    }
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
    _kept: Keep,
}

impl Change {
    pub(super) fn new(id: u64, name: LockName, slot: u16, event: Event, kept: &KeptBytes) -> Self {
        // The texts are kept twice: here, and in what is written.
        let bytes = size_of::<Self>() + 2 * (name.as_str().len() + event.text_bytes());
        Self { id, name, slot, event, written: OnceLock::new(), _kept: kept.keep(bytes) }
    }
}

/// What the streams receive.
#[derive(Debug, Clone)]
pub(super) enum Sent {
    Change(Arc<Change>),
    /// A change that was not kept, because slow streams already keep too many.
    Dropped,
}
