//! Bytes that the library may keep because of entries of the header table.
//!
//! Before the client acknowledges the table's size, it may add entries. The library stores the
//! pseudo-header fields of an entry as slices of its read buffer, or of the buffer into which it
//! decodes Huffman codes. So an entry may keep a buffer of 8 to 32 KiB alive. Such a buffer costs
//! the client at least a third as many bytes since the entry before. So each entry is charged with
//! three times these bytes.
//!
//! Each connection may keep [`OWN_BYTES`]. The first requests of most clients need less. Further
//! bytes come from a pool of all connections, because a client may send 64 KiB of bodies before it
//! can acknowledge anything. Only if the pool is used up is a client with more entries disconnected.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const OWN_BYTES: u64 = 48 * 1024;
/// The share of the pool that one connection may have.
const MAX_SHARED: u64 = 512 * 1024;
/// Bytes that one entry can be charged with, before the factor: a frame, and its head.
const MAX_SPAN: u64 = 16 * 1024 + 9;
const FACTOR: u64 = 3;

/// Bytes that all connections share.
#[derive(Debug, Clone)]
pub(crate) struct TablePool(Arc<AtomicU64>);

impl TablePool {
    pub(crate) fn new(bytes: u64) -> Self {
        Self(Arc::new(AtomicU64::new(bytes)))
    }

    fn take(&self, bytes: u64) -> bool {
        let less = |left: u64| left.checked_sub(bytes);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

/// The bytes of one connection.
pub(super) struct KeptBytes {
    pool: TablePool,
    kept: u64,
    shared: u64,
    /// Bytes of the client since its last entry.
    since: u64,
}

impl KeptBytes {
    pub(super) fn new(pool: TablePool) -> Self {
        Self { pool, kept: 0, shared: 0, since: 0 }
    }

    /// The client has sent a frame, or the library has used a new buffer of this size.
    pub(super) fn pass(&mut self, bytes: usize) {
        self.since = self.since.saturating_add(bytes as u64);
    }

    /// The client adds an entry. Returns whether it may.
    pub(super) fn charge(&mut self) -> bool {
        let kept = self.kept + self.since.min(MAX_SPAN) * FACTOR;
        let missing = kept.saturating_sub(OWN_BYTES + self.shared);
        if missing > 0 && (self.shared + missing > MAX_SHARED || !self.pool.take(missing)) {
            return false;
        }
        (self.kept, self.since) = (kept, 0);
        self.shared += missing;
        true
    }

    /// The library has dropped all entries.
    pub(super) fn clear(&mut self) {
        self.pool.0.fetch_add(std::mem::take(&mut self.shared), Ordering::Relaxed);
        self.kept = 0;
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
        let all = |pool: &TablePool| pool.0.load(Ordering::Relaxed);
        let pool = TablePool::new(600 * 1024);
        let mut first = KeptBytes::new(pool.clone());
        assert_eq!(entries(&mut first, 1_024), (48 + 512) / 3);
        let mut second = KeptBytes::new(pool.clone());
        assert_eq!(entries(&mut second, 1_024), (48 + 600 - 510) / 3, "the rest of the pool");
        let mut third = KeptBytes::new(pool.clone());
        assert_eq!(entries(&mut third, 1_024), 48 / 3, "its own bytes");
        first.clear();
        drop((second, third));
        assert_eq!(all(&pool), 600 * 1024);
    }

    #[test]
    fn a_long_span_counts_as_one_buffer() {
        let mut kept = KeptBytes::new(TablePool::new(0));
        kept.pass(10_000_000);
        assert!(!kept.charge(), "three times a buffer are more than 48 KiB");
        let mut kept = KeptBytes::new(TablePool::new(100));
        kept.pass(10_000_000);
        assert!(kept.charge());
        assert!(kept.charge(), "a second entry in the same frame costs nothing");
    }
}
