//! The leases of a client that wait for their next renewal, and which of them are renewed together.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlock_api::LeaseRef;
use tokio::sync::oneshot;

use crate::clock::Moment;
use crate::error::LossReason;

/// Limit of a gateway on the leases of one request. With the longest names that is about 350 kB.
const MAX_LEASES: usize = 1_000;
/// The part of the interval between two renewals by which a lease may be renewed early.
const EARLY: u32 = 4;

/// The leases of a client that wait for their next renewal.
#[derive(Default)]
pub(crate) struct Together {
    waiting: Mutex<Waiting>,
    /// Whether a gateway has answered that it does not know `PATCH /locks`.
    is_unknown: AtomicBool,
}

#[derive(Default)]
struct Waiting {
    leases: HashMap<u64, Due>,
    last_id: u64,
}

/// A lease, and when to extend it.
pub(crate) struct Renewal {
    pub(crate) lease: LeaseRef,
    pub(crate) ttl: Duration,
    pub(crate) interval: Duration,
    pub(crate) due: Moment,
    pub(crate) given_up: Moment,
}

/// A waiting lease. Its guard is gone if `reply` is closed.
pub(crate) struct Due {
    pub(crate) renewal: Renewal,
    pub(crate) reply: oneshot::Sender<Renewed>,
}

/// The result of a renewal for one guard.
pub(crate) enum Renewed {
    /// When the request was sent, the deadline that follows, and how many wait for the lock.
    Extended(Moment, Moment, Option<u64>),
    Lost(LossReason),
    /// The lease is due, and its guard has to extend it by a request of its own.
    Alone,
}

impl Together {
    fn leases(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn enter(&self, due: Due) -> u64 {
        let mut waiting = self.leases();
        waiting.last_id += 1;
        let id = waiting.last_id;
        waiting.leases.insert(id, due);
        id
    }

    pub(crate) fn remove(&self, id: u64) {
        self.leases().leases.remove(&id);
    }

    /// Notes that a gateway does not know `PATCH /locks`.
    pub(crate) fn stop(&self) {
        self.is_unknown.store(true, Ordering::Relaxed);
    }

    /// Takes a lease out, with the others to renew together with it. Empty if another request has
    /// taken the lease.
    pub(crate) fn take(&self, id: u64) -> Vec<Due> {
        let mut waiting = self.leases();
        let Some(first) = waiting.leases.remove(&id) else { return Vec::new() };
        let ttl = first.renewal.ttl;
        let mut taken = vec![first];
        if self.is_unknown.load(Ordering::Relaxed) {
            return taken;
        }
        let now = Moment::now();
        let is_soon = |due: &Renewal| due.ttl == ttl && due.due <= now + due.interval / EARLY;
        let soon = waiting.leases.iter().filter(|(_, due)| is_soon(&due.renewal));
        let mut soon: Vec<_> = soon.map(|(id, due)| (due.renewal.due, *id)).collect();
        soon.sort_unstable();
        for (_, id) in soon.into_iter().take(MAX_LEASES - 1) {
            taken.extend(waiting.leases.remove(&id));
        }
        taken
    }
}
