//! A grant on its way from the core to its client.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::{Lease, LockName, LockToken, Redlock, Ttl};

use crate::overload::MasterMemory;
use crate::overload::clients::Client;

/// A lease as the answer shows it, at one moment.
#[derive(Debug, Clone)]
pub struct LeaseView {
    pub token: LockToken,
    pub ttl: Ttl,
    pub validity: Duration,
    /// Time from the request to the start of the validity, waiting included.
    pub elapsed: Duration,
    /// Microseconds since 1970, for people.
    pub expires_at: u64,
    pub nodes_granted: usize,
    pub nodes_total: usize,
    /// Whether an earlier request with the same idempotency key got the grant.
    pub replayed: bool,
}

/// A grant on its way to the client. Dropped undelivered, it releases the lock: nobody has its
/// token.
pub struct GrantGuard {
    pub(super) locks: Redlock,
    pub(super) memory: Arc<MasterMemory>,
    pub(super) client: Arc<Client>,
    pub(super) lock: Option<(LockName, Lease)>,
}

impl GrantGuard {
    /// Disarms the guard: the connection has taken the answer.
    pub fn delivered(mut self) {
        self.lock = None;
    }
}

impl Drop for GrantGuard {
    fn drop(&mut self) {
        if let Some((name, lease)) = self.lock.take() {
            tracing::debug!(lock = %name, "a grant could not be delivered and is released");
            // A replayed grant stays: an earlier answer may have delivered it.
            if !lease.replayed {
                self.client.released(name.as_str(), &self.memory.terms(&self.locks));
            }
            self.locks.abandon(&name, &lease);
        }
    }
}
