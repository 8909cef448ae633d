//! Bytes that the library may keep because of entries of the header table.
//!
//! Before the client acknowledges the table's size, it may add entries. The library stores the
//! pseudo-header fields of an entry as slices of its read buffer, or of the buffer into which it
//! decodes Huffman codes. So an entry keeps these buffers alive. Both together are at most four
//! times as large as the bytes that the client has sent since the entry before. So each entry is
//! charged with four times these bytes, of which at most [`MAX_SPAN`] count.
//!
//! Each connection may keep [`OWN_BYTES`]. The first requests of most clients need less. Further
//! bytes come from a pool of all connections, because a client may send 64 KiB of bodies before it
//! can acknowledge anything. If the pool is used up, a client with more entries is disconnected. A
//! client that has bytes of the pool and does not acknowledge the size within
//! [`ACKNOWLEDGED_WITHIN`] is disconnected too.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

const OWN_BYTES: u64 = 48 * 1024;
/// Limits on the bytes of the pool that one connection may have: this number, and this part of the
/// pool.
const MAX_SHARED: (u64, u64) = (512 * 1024, 8);
/// The most bytes since the entry before that count: the library's largest usual buffer.
const MAX_SPAN: u64 = 32 * 1024;
const FACTOR: u64 = 4;
/// How long a client may have bytes of the pool before it acknowledges the settings.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_secs(10);

/// Bytes that all connections share.
#[derive(Debug, Clone)]
pub(crate) struct TablePool {
    left: Arc<AtomicU64>,
    /// The most that one connection may have.
    most: u64,
}

impl TablePool {
    pub(crate) fn new(bytes: u64) -> Self {
        let most = MAX_SHARED.0.min(bytes / MAX_SHARED.1);
        Self { left: Arc::new(AtomicU64::new(bytes)), most }
    }

    fn take(&self, bytes: u64) -> bool {
        let less = |left: u64| left.checked_sub(bytes);
        self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

/// The bytes of one connection.
pub(super) struct KeptBytes {
    pool: TablePool,
    kept: u64,
    shared: u64,
    /// When the connection first took bytes of the pool.
    shared_since: Option<Instant>,
    /// Bytes of the client since its last entry.
    since: u64,
}

impl KeptBytes {
    pub(super) fn new(pool: TablePool) -> Self {
        Self { pool, kept: 0, shared: 0, shared_since: None, since: 0 }
    }

    /// The client has sent a frame, or the library has used a new buffer of this size.
    pub(super) fn pass(&mut self, bytes: usize) {
        self.since = self.since.saturating_add(bytes as u64);
    }

    /// The client adds an entry. Returns whether it may.
    pub(super) fn charge(&mut self) -> bool {
        let kept = self.kept + self.since.min(MAX_SPAN) * FACTOR;
        let missing = kept.saturating_sub(OWN_BYTES + self.shared);
        if missing > 0 && (self.shared + missing > self.pool.most || !self.pool.take(missing)) {
            return false;
        }
        (self.kept, self.since) = (kept, 0);
        if missing > 0 {
            self.shared += missing;
            self.shared_since.get_or_insert_with(Instant::now);
        }
        true
    }

    /// Whether the client has had bytes of the pool for too long.
    pub(super) fn is_overdue(&self) -> bool {
        self.shared_since.is_some_and(|since| since.elapsed() > ACKNOWLEDGED_WITHIN)
    }

    /// The library has dropped all entries.
    pub(super) fn clear(&mut self) {
        self.pool.left.fetch_add(std::mem::take(&mut self.shared), Ordering::Relaxed);
        (self.kept, self.shared_since) = (0, None);
    }
}

impl Drop for KeptBytes {
    fn drop(&mut self) {
        self.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(kept: &mut KeptBytes, bytes: usize) -> usize {
        let mut count = 0;
        loop {
            kept.pass(bytes);
            if !kept.charge() {
                return count;
            }
            count += 1;
            assert!(count < 10_000);
        }
    }

    #[test]
    fn a_connection_keeps_its_own_bytes_and_a_part_of_the_pool() {
        let left = |pool: &TablePool| pool.left.load(Ordering::Relaxed);
        let pool = TablePool::new(800 * 1024);
        let mut connections: Vec<_> = (0..9).map(|_| KeptBytes::new(pool.clone())).collect();
        for connection in &mut connections[..8] {
            assert_eq!(entries(connection, 1_024), (48 + 100) / 4);
        }
        assert_eq!(left(&pool), 0);
        assert_eq!(entries(&mut connections[8], 1_024), 48 / 4, "its own bytes");
        connections[0].clear();
        drop(connections);
        assert_eq!(left(&pool), 800 * 1024);
        assert_eq!(TablePool::new(u64::MAX).most, 512 * 1024);
    }

    #[test]
    fn a_long_span_counts_as_one_buffer() {
        let mut kept = KeptBytes::new(TablePool::new(0));
        kept.pass(10_000_000);
        assert!(!kept.charge(), "four times a buffer are more than 48 KiB");
        let mut kept = KeptBytes::new(TablePool::new(8 * 80 * 1024));
        kept.pass(10_000_000);
        assert!(kept.charge());
        assert!(kept.charge(), "a second entry in the same frame costs nothing");
        assert_eq!(kept.shared, 80 * 1024);
    }

    #[tokio::test(start_paused = true)]
    async fn bytes_of_the_pool_must_be_returned_in_time() {
        let mut own = KeptBytes::new(TablePool::new(u64::MAX));
        let mut shared = KeptBytes::new(TablePool::new(u64::MAX));
        own.pass(1_000);
        shared.pass(20_000);
        assert!(own.charge() && shared.charge());
        tokio::time::advance(ACKNOWLEDGED_WITHIN).await;
        assert!(!shared.is_overdue());
        tokio::time::advance(Duration::from_millis(1)).await;
        assert!(shared.is_overdue() && !own.is_overdue());
        shared.clear();
        assert!(!shared.is_overdue());
    }
}
