//! Finds the frames and the header blocks in the bytes of an HTTP/2 client.

use crate::overload::capacity;

/// The bytes before the first frame of a client (RFC 9113, section 3.4).
const PREFACE: u64 = 24;
const HEAD: usize = 9;
const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
const PUSH_PROMISE: u8 = 5;
pub(super) const CONTINUATION: u8 = 9;
pub(super) const END_HEADERS: u8 = 4;
/// Longest header block: the bytes of all its frames, with their heads. The library limits a
/// request head to [`capacity::HEAD`]. For each field it counts the name, the value, and 32 bytes
/// more (RFC 9113, section 6.5.2). So the encoded fields are shorter than the limit. The 1,024
/// bytes beyond the limit are for padding (256 bytes) and for the heads of the frames.
pub(super) const MAX_BLOCK: usize = capacity::HEAD + 1024;

/// The same for a trusted proxy. Its connection carries requests of many clients, who must not
/// suffer if one of them sends a long head. The library answers such a head with 431. From about
/// 32 KiB on, it ends the connection.
pub(super) const MAX_BLOCK_OF_PROXY: usize = 64 * 1024;

/// Why a header block cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum BlockError {
    #[error("the client sent too long a header block")]
    TooLong,
    #[error("the client sent another frame within a header block")]
    Interrupted,
}

/// What some bytes contain.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parsed {
    /// Frames that count for the budget.
    pub(super) count: u64,
    /// How many bytes at the end wait for more bytes. They begin a header block, or the head of a
    /// frame, whose end has not arrived.
    pub(super) unfinished: usize,
}

pub(super) struct Parser {
    /// Bytes to skip before the next head.
    skip: u64,
    head: [u8; HEAD],
    filled: usize,
    block: Option<Block>,
    max_block: usize,
}

/// A header block that has begun.
#[derive(Clone, Copy)]
struct Block {
    /// Bytes of its frames so far. The last frame may not have arrived as a whole.
    bytes: usize,
    /// Whether its last frame has begun.
    is_last: bool,
}

impl Parser {
    pub(super) fn new(is_of_proxy: bool) -> Self {
        let max_block = if is_of_proxy { MAX_BLOCK_OF_PROXY } else { MAX_BLOCK };
        Self { skip: PREFACE, head: [0; HEAD], filled: 0, block: None, max_block }
    }

    pub(super) fn read(&mut self, bytes: &[u8]) -> Result<Parsed, BlockError> {
        let mut count = 0;
        let mut at = 0;
        // Where the unfinished block begins in `bytes`; 0 if it began in earlier bytes.
        let mut block_at = 0;
        loop {
            let skipped = self.skip.min((bytes.len() - at) as u64);
            self.skip -= skipped;
            at += skipped as usize;
            if self.skip == 0 && self.block.is_some_and(|block| block.is_last) {
                self.block = None;
            }
            if at == bytes.len() {
                let unfinished = if self.block.is_some() { bytes.len() - block_at } else { 0 };
                return Ok(Parsed { count, unfinished });
            }
            let head_at = at;
            let taken = (bytes.len() - at).min(HEAD - self.filled);
            self.head[self.filled..self.filled + taken].copy_from_slice(&bytes[at..at + taken]);
            self.filled += taken;
            at += taken;
            if self.filled < HEAD {
                let begin = if self.block.is_some() { block_at } else { head_at };
                return Ok(Parsed { count, unfinished: bytes.len() - begin });
            }
            self.filled = 0;
            let [high, middle, low, kind, flags, ..] = self.head;
            let length = u32::from_be_bytes([0, high, middle, low]);
            self.skip = u64::from(length);
            count += u64::from(!matches!(kind, DATA | CONTINUATION));
            if self.block.is_none() {
                block_at = head_at;
            }
            self.block = self.block(kind, flags, HEAD + length as usize)?;
        }
    }

    /// Bytes of all frames of the unfinished header block whose heads have arrived.
    pub(super) fn announced(&self) -> usize {
        self.block.map_or(0, |block| block.bytes)
    }

    /// The header block that is unfinished after the head of a frame. The frame has `bytes` bytes.
    fn block(&self, kind: u8, flags: u8, bytes: usize) -> Result<Option<Block>, BlockError> {
        let bytes = match (kind, self.block) {
            (HEADERS | PUSH_PROMISE, None) => bytes,
            (CONTINUATION, Some(block)) => block.bytes + bytes,
            (_, None) => return Ok(None),
            (_, Some(_)) => return Err(BlockError::Interrupted),
        };
        if bytes > self.max_block {
            return Err(BlockError::TooLong);
        }
        Ok(Some(Block { bytes, is_last: flags & END_HEADERS != 0 }))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const SETTINGS: u8 = 4;
    const PING: u8 = 6;

    pub(in super::super) fn frame(kind: u8, flags: u8, length: usize) -> Vec<u8> {
        let head = [&(length as u32).to_be_bytes()[1..], &[kind, flags, 0, 0, 0, 1]].concat();
        [head, vec![0xff; length]].concat()
    }

    /// The preface and these frames.
    pub(in super::super) fn connection(frames: &[Vec<u8>]) -> Vec<u8> {
        [[b'P'; PREFACE as usize].as_slice(), &frames.concat()].concat()
    }

    #[test]
    fn frames_are_counted_however_they_are_cut() {
        let block = [frame(HEADERS, 0, 20), frame(CONTINUATION, END_HEADERS, 0)].concat();
        let frames = [frame(SETTINGS, 0, 0), frame(DATA, 0, 300), frame(PING, 0, 8), block];
        let bytes = connection(&[frames.concat(), frame(8, 0, 4)]);
        for length in [1, 2, 7, 9, 10, 64, bytes.len()] {
            let mut parser = Parser::new(false);
            let parsed = bytes.chunks(length).map(|chunk| parser.read(chunk).expect("no error"));
            let count: u64 = parsed.map(|parsed| parsed.count).sum();
            assert_eq!(count, 4, "in chunks of {length}");
        }
    }

    #[test]
    fn unfinished_blocks_and_heads_of_frames_are_found() {
        for (name, frames, unfinished) in [
            ("a whole block", vec![frame(HEADERS, END_HEADERS, 20)], 0),
            ("a block without an end", vec![frame(HEADERS, 0, 20)], 29),
            ("a part of the next head", vec![frame(PING, 0, 8), vec![0; 5]], 5),
            ("a part of a frame without fields", vec![frame(DATA, 0, 100)[..50].to_vec()], 0),
            (
                "a second block",
                vec![
                    frame(HEADERS, 0, 9),
                    frame(CONTINUATION, END_HEADERS, 1),
                    frame(HEADERS, END_HEADERS, 3)[..11].to_vec(),
                ],
                11,
            ),
        ] {
            let parsed = Parser::new(false).read(&connection(&frames)).expect("no error");
            assert_eq!(parsed.unfinished, unfinished, "{name}");
        }
    }

    #[test]
    fn blocks_that_are_too_long_or_interrupted_are_refused() {
        let more = |length| vec![frame(HEADERS, 0, 16_384), frame(CONTINUATION, 0, length)];
        let largest = MAX_BLOCK - 16_384 - 2 * HEAD;
        for (name, frames, refused) in [
            ("the largest block", more(largest), None),
            ("a byte more", more(largest + 1), Some(BlockError::TooLong)),
            (
                "empty frames without end",
                vec![[frame(HEADERS, 0, 0), frame(CONTINUATION, 0, 0).repeat(2_000)].concat()],
                Some(BlockError::TooLong),
            ),
            (
                "a second head",
                vec![frame(HEADERS, 0, 9), frame(HEADERS, END_HEADERS, 9)],
                Some(BlockError::Interrupted),
            ),
            (
                "another frame",
                vec![frame(HEADERS, 0, 9), frame(PING, 0, 8)],
                Some(BlockError::Interrupted),
            ),
        ] {
            let refusal = Parser::new(false).read(&connection(&frames)).err();
            assert_eq!(refusal, refused, "{name}");
            let of_proxy = Parser::new(true).read(&connection(&frames)).err();
            assert_eq!(of_proxy, refused.filter(|why| *why != BlockError::TooLong), "{name}");
        }
    }
}
