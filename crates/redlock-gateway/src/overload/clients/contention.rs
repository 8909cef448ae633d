//! Whether a client is alone. Who is alone need not be held back for anybody's sake.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Sees who comes, by whatever it is that each has of its own.
#[derive(Debug)]
pub struct ContentionTracker {
    began: Instant,
    /// Who came last, as an address in memory.
    last: AtomicUsize,
    /// Until when it is remembered that it was somebody else than before, in milliseconds.
    until: AtomicU64,
}

impl Default for ContentionTracker {
    fn default() -> Self {
        Self { began: Instant::now(), last: AtomicUsize::new(0), until: AtomicU64::new(0) }
    }
}

impl ContentionTracker {
    /// So that who asks for something every second finds the room that is kept for it.
    const REMEMBERED: u64 = 2_000;

    /// This client comes. Whether nobody else has come for two seconds.
    pub fn is_sole_client<T>(&self, client: &T) -> bool {
        let came = std::ptr::from_ref(client).addr();
        if self.last.load(Ordering::Relaxed) != came && self.last.swap(came, Ordering::Relaxed) != 0
        {
            self.until.store(self.now() + Self::REMEMBERED, Ordering::Relaxed);
        }
        self.is_alone(client)
    }

    /// The same of one that is no company to others.
    pub fn is_alone<T>(&self, client: &T) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        (last == 0 || last == std::ptr::from_ref(client).addr())
            && self.now() >= self.until.load(Ordering::Relaxed)
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_beside_another_is_not_alone_for_a_while_and_a_probe_is_no_company() {
        let contention = ContentionTracker::default();
        let [one, other, probe] = [1_u8; 3];
        assert!(contention.is_alone(&probe) && contention.is_sole_client(&one));
        assert!(!contention.is_alone(&probe), "the one has come");
        assert!(contention.is_sole_client(&one), "the probe has not");
        assert!(
            !contention.is_sole_client(&other)
                && !contention.is_sole_client(&one)
                && !contention.is_sole_client(&one)
        );
        contention.until.store(0, Ordering::Relaxed);
        assert!(contention.is_sole_client(&one), "after a while");
    }
}
