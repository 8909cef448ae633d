//! Bounds the bytes of large answers that clients have not read yet.

use super::clients::{Client, Counter, Permit};

/// An answer of at most this many bytes needs no permit: the cost of its connection covers it.
pub(crate) const COVERED: usize = 16 * 1024;

/// The bytes of all large answers together.
#[derive(Debug)]
pub struct UnreadBytes {
    limit: usize,
    taken: Counter,
}

/// Unlimited.
impl Default for UnreadBytes {
    fn default() -> Self {
        Self { limit: usize::MAX, taken: Counter::default() }
    }
}

/// The bytes of one large answer; returned when dropped.
#[derive(Debug)]
#[must_use]
pub struct UnreadPermit {
    _of_all: Permit,
    _of_client: Permit,
}

impl UnreadBytes {
    pub fn new(limit: u64) -> Self {
        Self { limit: usize::try_from(limit).unwrap_or(usize::MAX), ..Self::default() }
    }

    /// Takes the bytes of an answer. One client may take as many as are still free. A single answer
    /// that is larger than that is admitted while there is no other.
    pub fn take(&self, client: &Client, bytes: usize) -> Option<UnreadPermit> {
        let limit = if self.taken.count() == 0 { usize::MAX } else { self.limit };
        let of_all = self.taken.take_many(bytes, limit)?;
        let free = limit.saturating_sub(self.taken.count());
        let of_client = client.unread.take_many(bytes, free)?;
        Some(UnreadPermit { _of_all: of_all, _of_client: of_client })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_takes_as_many_bytes_as_are_still_free() {
        let unread = UnreadBytes::new(100);
        let clients: [Client; 3] = Default::default();
        let mut permits = Vec::new();
        let mut take = |client: usize| {
            let taken = std::iter::from_fn(|| unread.take(&clients[client], 10)).take(20);
            let before = permits.len();
            permits.extend(taken);
            permits.len() - before
        };
        assert_eq!([take(0), take(1), take(0), take(2)], [5, 2, 0, 1]);
        drop(permits);
        let single = unread.take(&clients[0], 1_000);
        assert!(single.is_some(), "an answer larger than the limit, while there is no other");
        assert!(unread.take(&clients[1], 1).is_none());
        drop(single);
        assert!(unread.take(&clients[1], 1).is_some());
    }
}
