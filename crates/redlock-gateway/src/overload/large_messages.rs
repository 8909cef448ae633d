//! Bounds the bytes of large requests that clients have not completed, and of large answers that they
//! have not read. Requests for many locks have memory of their own, so that no slow reader of another
//! answer holds up an extension.

use bytes::Bytes;

use super::clients::{Counter, Permit};

/// A message of at most this many bytes needs no permit: the cost of its connection covers it.
pub(crate) const COVERED: usize = 16 * 1024;

/// The bytes of all large messages of one kind.
#[derive(Debug)]
pub struct LargeMessages {
    limit: usize,
    taken: Counter,
}

/// Unlimited.
impl Default for LargeMessages {
    fn default() -> Self {
        Self { limit: usize::MAX, taken: Counter::default() }
    }
}

/// The bytes of one large message; returned when dropped.
#[derive(Debug)]
#[must_use]
pub struct LargePermit {
    of_all: Permit,
    of_client: Permit,
}

impl LargePermit {
    /// Counts more bytes, beyond every limit. For an answer that cannot be refused any more.
    pub(crate) fn count_more(&mut self, bytes: usize) {
        for permit in [&mut self.of_all, &mut self.of_client] {
            permit.grow_when(bytes, |held| Some(held.saturating_add(bytes)));
        }
    }
}

impl LargeMessages {
    pub fn new(limit: u64) -> Self {
        Self { limit: usize::try_from(limit).unwrap_or(usize::MAX), ..Self::default() }
    }

    /// Takes the bytes of a message. `of_client` counts what its client has taken here. One client may take as many as are still free. While no other
    /// message is there, one of any size is admitted: with a small budget, a message may be larger than
    /// the limit.
    pub fn take(&self, of_client: &Counter, bytes: usize) -> Option<LargePermit> {
        let mut permit = LargePermit {
            of_all: self.taken.take_when(0, Some)?,
            of_client: of_client.take_when(0, Some)?,
        };
        self.grow(&mut permit, bytes).then_some(permit)
    }

    /// Takes more bytes for a message. Without success, the permit stays as it is.
    pub fn grow(&self, permit: &mut LargePermit, bytes: usize) -> bool {
        let own = permit.of_all.many();
        let within =
            |limit: usize, held: usize| held.checked_add(bytes).filter(|all| *all <= limit);
        let is_alone = |held: usize| held == own;
        let of_all = |held| within(if is_alone(held) { usize::MAX } else { self.limit }, held);
        if !permit.of_all.grow_when(bytes, of_all) {
            return false;
        }
        let taken = self.taken.count();
        let is_alone = taken == own + bytes;
        let free = if is_alone { usize::MAX } else { self.limit.saturating_sub(taken) };
        let has_grown = permit.of_client.grow_when(bytes, |held| within(free, held));
        if !has_grown {
            permit.of_all.shrink(bytes);
        }
        has_grown
    }

    /// Whether [`LargeMessages::take`] would succeed now.
    pub fn has_room(&self, of_client: &Counter, bytes: usize) -> bool {
        let taken = self.taken.count();
        let free = self.limit.saturating_sub(taken).saturating_sub(bytes);
        taken == 0 || of_client.count().saturating_add(bytes) <= free
    }
}

/// The size of a body, if the body is so large that it needs a permit.
pub(crate) fn large(body: &impl http_body::Body) -> Option<usize> {
    let size = body.size_hint().exact()?;
    usize::try_from(size).ok().filter(|size| *size > COVERED)
}

/// Bytes that keep `permits` until the connection has sent them.
pub(crate) fn bounded(
    bytes: impl AsRef<[u8]> + Send + 'static,
    permits: impl Send + 'static,
) -> Bytes {
    struct Bounded<B, P>(B, #[allow(dead_code)] P);
    impl<B: AsRef<[u8]>, P> AsRef<[u8]> for Bounded<B, P> {
        fn as_ref(&self) -> &[u8] {
            self.0.as_ref()
        }
    }
    Bytes::from_owner(Bounded(bytes, permits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_takes_as_many_bytes_as_are_still_free() {
        let large = LargeMessages::new(100);
        let clients: [Counter; 3] = Default::default();
        let mut permits = Vec::new();
        let mut take = |client: usize| {
            let taken = std::iter::from_fn(|| large.take(&clients[client], 10)).take(20);
            let before = permits.len();
            permits.extend(taken);
            permits.len() - before
        };
        assert_eq!([take(0), take(1), take(0), take(2)], [5, 2, 0, 1]);
        drop(permits);
        let single = large.take(&clients[0], 1_000);
        assert!(single.is_some(), "an answer larger than the limit, while there is no other");
        assert!(large.take(&clients[1], 1).is_none());
        drop(single);
        assert!(large.take(&clients[1], 1).is_some());
    }
}
