//! Whether a client is alone. Who is alone need not be held back for anybody's sake.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use super::Client;

/// Sees who comes.
#[derive(Debug)]
pub struct Company {
    began: Instant,
    /// Who came last, as an address in memory.
    last: AtomicUsize,
    /// Until when it is remembered that it was somebody else than before, in milliseconds.
    until: AtomicU64,
}

impl Default for Company {
    fn default() -> Self {
        Self { began: Instant::now(), last: AtomicUsize::new(0), until: AtomicU64::new(0) }
    }
}

impl Company {
    const REMEMBERED: u64 = 100;

    /// Whether nobody but this client, who comes now, has come for a tenth of a second.
    pub fn is_alone(&self, client: &Client) -> bool {
        let (now, client) = (self.began.elapsed().as_millis() as u64, std::ptr::from_ref(client).addr());
        if self.last.load(Ordering::Relaxed) != client && self.last.swap(client, Ordering::Relaxed) != 0 {
            self.until.store(now + Self::REMEMBERED, Ordering::Relaxed);
        }
        now >= self.until.load(Ordering::Relaxed)
    }
}
