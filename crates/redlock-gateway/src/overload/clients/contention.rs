//! Detects whether only one client sends requests. While there is only one, nothing must be kept
//! free for others.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Notes which client sent the last request. When the next request comes from another client, the
/// clients count as several for two seconds. A client is identified by the memory address of a
/// value that belongs to this client alone.
#[derive(Debug)]
pub struct ContentionTracker {
    began: Instant,
    /// The client of the last request, as an address in memory; 0 before the first.
    last_client: AtomicUsize,
    /// Until when the clients count as several, in milliseconds since `began`.
    contended_until: AtomicU64,
}

impl Default for ContentionTracker {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            last_client: AtomicUsize::new(0),
            contended_until: AtomicU64::new(0),
        }
    }
}

impl ContentionTracker {
    /// How long the clients count as several after the last change of clients, in milliseconds. So
    /// for a client with one request a second, resources stay free between its requests.
    const MEMORY_MILLIS: u64 = 2_000;

    /// Notes a request of this client. Returns whether no other client has come for two seconds.
    pub fn is_sole_client<T>(&self, client: &T) -> bool {
        let address = std::ptr::from_ref(client).addr();
        if self.last_client.load(Ordering::Relaxed) != address
            && self.last_client.swap(address, Ordering::Relaxed) != 0
        {
            self.contended_until.store(self.now() + Self::MEMORY_MILLIS, Ordering::Relaxed);
        }
        self.is_alone(client)
    }

    /// Returns the same as [`Self::is_sole_client`], but does not note a request. A probe is
    /// checked in this way, because it must not count as a second client.
    pub fn is_alone<T>(&self, client: &T) -> bool {
        let last = self.last_client.load(Ordering::Relaxed);
        (last == 0 || last == std::ptr::from_ref(client).addr())
            && self.now() >= self.contended_until.load(Ordering::Relaxed)
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_client_counts_for_two_seconds_and_a_probe_never() {
        let contention = ContentionTracker::default();
        let [one, other, probe] = [1_u8; 3];
        assert!(contention.is_alone(&probe) && contention.is_sole_client(&one));
        assert!(!contention.is_alone(&probe), "a client has come");
        assert!(contention.is_sole_client(&one), "a probe is not noted");
        assert!(
            !contention.is_sole_client(&other)
                && !contention.is_sole_client(&one)
                && !contention.is_sole_client(&one)
        );
        contention.contended_until.store(0, Ordering::Relaxed);
        assert!(contention.is_sole_client(&one), "after two seconds");
    }
}
