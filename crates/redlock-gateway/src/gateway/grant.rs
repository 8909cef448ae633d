//! A grant on its way from the core to its client.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::{Lease, LockToken, Redlock, Ttl};

use super::tokens::Target;
use super::watch::Watches;

use crate::overload::MasterMemory;
use crate::overload::clients::Client;

/// A lease as an answer shows it. The values are those of the moment when the view was made.
#[derive(Debug, Clone)]
pub struct LeaseView {
    pub token: LockToken,
    pub ttl: Ttl,
    pub validity: Duration,
    /// Time from the complete request to the start of `validity`, including the wait for the lock.
    pub elapsed: Duration,
    /// When the validity ends, in microseconds since 1970. For people only: programs use
    /// `validity`, because clocks differ.
    pub expires_at: u64,
    pub nodes_granted: usize,
    pub nodes_total: usize,
    /// Whether an earlier request with the same idempotency key got the grant.
    pub replayed: bool,
}

/// A grant on its way to the client. If the guard is dropped before the delivery, it releases the
/// lock, because nobody has the token.
pub struct GrantGuard {
    pub(super) locks: Redlock,
    pub(super) memory: Arc<MasterMemory>,
    pub(super) watches: Arc<Watches>,
    pub(super) client: Arc<Client>,
    pub(super) grant: Option<(Target, Lease)>,
}

impl GrantGuard {
    /// Disarms the guard: the connection has taken the answer.
    pub fn delivered(mut self) {
        self.grant = None;
    }
}

impl Drop for GrantGuard {
    fn drop(&mut self) {
        if let Some((target, lease)) = self.grant.take() {
            let lock = target.name();
            tracing::debug!(%lock, "a grant could not be delivered and is released");
            // A replayed grant stays, on the masters and in the quota: an earlier answer may have
            // delivered it.
            if !lease.replayed {
                let terms = self.memory.terms(&self.locks);
                for name in &*target.counted() {
                    self.client.released(name.as_str(), &terms);
                }
            }
            target.locks().iter().for_each(|name| self.watches.read_soon(name));
            self.locks.abandon(target.locks(), &lease);
        }
    }
}
