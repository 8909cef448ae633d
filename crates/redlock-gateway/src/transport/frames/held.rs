//! Bytes of a client that its reader must not see yet.

use std::ops::Range;

use tokio::io::ReadBuf;

#[derive(Default)]
pub(super) struct Held {
    bytes: Vec<u8>,
    /// The reader may see the bytes before this index.
    ready: usize,
    /// The reader has seen the bytes before this index.
    seen: usize,
}

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Adds bytes. The reader must not see the last `unfinished` of all held bytes yet. They begin
    /// a header block, whose known frames have `announced` bytes in all.
    pub(super) fn add(&mut self, bytes: &[u8], unfinished: usize, announced: usize) {
        let length = self.bytes.len() + bytes.len();
        // Reserves the whole space at once. A growing buffer leaves holes, which waste memory.
        let missing = announced.saturating_sub(unfinished);
        self.bytes.reserve_exact(bytes.len() + missing);
        self.bytes.extend_from_slice(bytes);
        self.ready = length - unfinished;
    }

    /// Replaces a range of bytes that the reader may see and has not seen.
    pub(super) fn replace(&mut self, range: Range<usize>, by: impl FnOnce(&[u8]) -> Vec<u8>) {
        let bytes = by(&self.bytes[range.clone()]);
        self.ready = self.ready - range.len() + bytes.len();
        self.bytes.splice(range, bytes);
    }

    /// Whether there are bytes that the reader may see and has not seen.
    pub(super) fn has_ready(&self) -> bool {
        self.seen < self.ready
    }

    /// How many bytes there are in all, and how many the reader may see.
    pub(super) fn lengths(&self) -> (usize, usize) {
        (self.bytes.len(), self.ready)
    }

    /// How many bytes the reader must not see yet.
    pub(super) fn unfinished(&self) -> usize {
        self.bytes.len() - self.ready
    }

    /// Shows bytes to the reader. Returns whether there were any.
    pub(super) fn show(&mut self, buffer: &mut ReadBuf<'_>) -> bool {
        let shown = (self.ready - self.seen).min(buffer.remaining());
        buffer.put_slice(&self.bytes[self.seen..self.seen + shown]);
        self.seen += shown;
        if self.ready > 0 && self.seen == self.ready {
            // The memory is returned too. Most header blocks come as a whole and are never held.
            *self = Self { bytes: self.bytes[self.ready..].to_vec(), ready: 0, seen: 0 };
        }
        shown > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reader_sees_finished_bytes_only() {
        let mut held = Held::default();
        let mut space = [0; 4];
        let mut shown = |held: &mut Held| {
            let mut buffer = ReadBuf::new(&mut space);
            held.show(&mut buffer);
            buffer.filled().to_vec()
        };
        held.add(b"abc", 3, 5);
        assert!(shown(&mut held).is_empty());
        held.add(b"defg", 2, 3);
        assert_eq!(shown(&mut held), b"abcd");
        assert_eq!(shown(&mut held), b"e");
        assert_eq!((held.unfinished(), held.is_empty()), (2, false));
        held.add(b"h", 0, 0);
        assert_eq!(shown(&mut held), b"fgh");
        assert!(held.is_empty() && held.bytes.capacity() == 0, "the memory is returned");
    }
}
