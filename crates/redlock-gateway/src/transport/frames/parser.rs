//! Finds the frames and the header blocks in the bytes of an HTTP/2 client.

use super::fields::{FieldError, FieldScanner};
use super::kept::{KeptBytes, TablePool};
use crate::overload::capacity;

/// The bytes before the first frame of a client (RFC 9113, section 3.4).
const PREFACE: u64 = 24;
pub(super) const HEAD: usize = 9;
const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
pub(super) const CONTINUATION: u8 = 9;
/// Flags: `ACK` of a SETTINGS frame, the others of frames that carry fields.
const ACK: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;
const PRIORITY: u8 = 0x20;
/// Bytes of a HEADERS frame with the flag PRIORITY before the fields.
const PRIORITY_BYTES: u32 = 5;
/// Longest header block: the bytes of all its frames, with their heads. The library limits a
/// request head to [`capacity::HEAD`]. For each field it counts the name, the value, and 32 bytes
/// more (RFC 9113, section 6.5.2). So the encoded fields are shorter than the limit. The 1,024
/// bytes beyond the limit are for padding (256 bytes) and for the heads of the frames.
pub(super) const MAX_BLOCK: usize = capacity::HEAD + 1024;

/// The same for a trusted proxy. Its connection carries requests of many clients, who must not
/// suffer if one of them sends a long head. The library answers such a head with 431. From about
/// 32 KiB on, it ends the connection.
pub(super) const MAX_BLOCK_OF_PROXY: usize = 64 * 1024;

/// Longest payload of a frame.
const MAX_FRAME: usize = 16 * 1024;
/// The size update that sets the header table to 0 bytes (RFC 7541, section 6.3).
const EMPTY_TABLE: u8 = 0x20;
/// The buffer that the library begins for each CONTINUATION frame.
const CONTINUATION_BUFFER: usize = 8 * 1024;

/// Why a header block cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum BlockError {
    #[error("the client sent too long a header block")]
    TooLong,
    #[error("the client sent another frame within a header block")]
    Interrupted,
    #[error("the client sent a PUSH_PROMISE")]
    Promise,
    #[error("the client has not acknowledged the settings in time")]
    NoAcknowledgement,
    #[error(transparent)]
    Fields(#[from] FieldError),
    #[error("the client sent a frame that is too short for its padding or its flags")]
    Padding,
}

/// What some bytes contain.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parsed {
    /// Frames that count for the budget.
    pub(super) count: u64,
    /// How many bytes at the end wait for more bytes. They begin a header block, or the head of a
    /// frame, whose end has not arrived.
    pub(super) unfinished: usize,
    /// The first frame of the first block after the acknowledgement, if that block ends in these
    /// bytes.
    pub(super) first_block: Option<FirstBlock>,
}

/// The first frame of the first block after the client has acknowledged our settings. It must be
/// replaced, see [`emptying_table`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FirstBlock {
    /// Where the frame begins. `None` if it began in earlier bytes.
    pub(super) at: Option<usize>,
    pub(super) bytes: usize,
}

/// The state of the table that holds the client's header fields. The library keeps up to 4,096
/// bytes of entries until the client acknowledges a size of 0. Even then the library keeps the
/// entries until a size update arrives, and some clients never send a size update. So the gateway
/// inserts one into the next block. A client that has acknowledged a size of 0 refers to no entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeaderTable {
    Open,
    /// The client has acknowledged a size of 0.
    Acknowledged,
    /// The block that has begun gets a size update.
    Emptying(FirstBlock),
    /// The size is 0, and no entry is kept.
    Empty,
}

pub(super) struct Parser {
    /// Bytes to skip before the next head.
    skip: u64,
    head: [u8; HEAD],
    filled: usize,
    block: Option<Block>,
    max_block: usize,
    /// The fields of the frame that is being skipped, and of its block.
    fields: Fields,
    scanner: FieldScanner,
    table: HeaderTable,
    kept: KeptBytes,
}

/// Where the fields are in the rest of a frame.
#[derive(Clone, Copy, Default)]
struct Fields {
    /// Whether the next byte is the length of the padding.
    is_padded: bool,
    /// Bytes before the fields.
    before: u32,
    /// Bytes of fields, and the padding if its length is not known yet.
    bytes: u32,
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
    pub(super) fn new(is_of_proxy: bool, pool: TablePool) -> Self {
        let max_block = if is_of_proxy { MAX_BLOCK_OF_PROXY } else { MAX_BLOCK };
        Self {
            skip: PREFACE,
            head: [0; HEAD],
            filled: 0,
            block: None,
            max_block,
            fields: Fields::default(),
            scanner: FieldScanner::default(),
            table: HeaderTable::Open,
            kept: KeptBytes::new(pool),
        }
    }

    pub(super) fn read(&mut self, bytes: &[u8]) -> Result<Parsed, BlockError> {
        let mut count = 0;
        let mut at = 0;
        // Where the unfinished block begins in `bytes`; 0 if it began in earlier bytes.
        let mut block_at = 0;
        let mut first_block = None;
        if let HeaderTable::Emptying(block) = &mut self.table {
            block.at = None;
        }
        loop {
            let skipped = self.skip.min((bytes.len() - at) as u64);
            self.skip -= skipped;
            self.scan(&bytes[at..at + skipped as usize])?;
            at += skipped as usize;
            if self.skip == 0 && self.block.is_some_and(|block| block.is_last) {
                self.block = None;
                if let HeaderTable::Emptying(block) = self.table {
                    first_block = Some(block);
                    self.table = HeaderTable::Empty;
                }
            }
            if at == bytes.len() {
                let unfinished = if self.block.is_some() { bytes.len() - block_at } else { 0 };
                return Ok(Parsed { count, unfinished, first_block });
            }
            let head_at = at;
            let is_cut = self.filled > 0;
            let taken = (bytes.len() - at).min(HEAD - self.filled);
            self.head[self.filled..self.filled + taken].copy_from_slice(&bytes[at..at + taken]);
            self.filled += taken;
            at += taken;
            if self.filled < HEAD {
                let begin = if self.block.is_some() { block_at } else { head_at };
                return Ok(Parsed { count, unfinished: bytes.len() - begin, first_block });
            }
            self.filled = 0;
            let [high, middle, low, kind, flags, ..] = self.head;
            let length = u32::from_be_bytes([0, high, middle, low]);
            self.skip = u64::from(length);
            count += u64::from(!matches!(kind, DATA | CONTINUATION));
            if self.table == HeaderTable::Open && self.kept.is_overdue() {
                return Err(BlockError::NoAcknowledgement);
            }
            // Counted at once, so that the count does not depend on how the bytes are cut.
            self.kept.pass(HEAD + length as usize);
            if kind == CONTINUATION {
                self.kept.pass(CONTINUATION_BUFFER);
            }
            if self.block.is_none() {
                block_at = head_at;
            }
            if self.block.is_none() {
                self.scanner.begin();
                // The library refuses a longer frame. Two shorter ones would hide it.
                let is_legal = length as usize <= MAX_FRAME;
                if kind == HEADERS && is_legal && self.table == HeaderTable::Acknowledged {
                    let at = (!is_cut).then_some(head_at);
                    let block = FirstBlock { at, bytes: HEAD + length as usize };
                    self.table = HeaderTable::Emptying(block);
                }
            }
            self.block = self.block(kind, flags, HEAD + length as usize)?;
            self.fields = Fields::of(kind, flags, length)?;
            if kind == SETTINGS && flags & ACK != 0 && self.table == HeaderTable::Open {
                self.table = HeaderTable::Acknowledged;
            }
        }
    }

    /// Looks for entries of the header table in a part of a frame.
    fn scan(&mut self, mut part: &[u8]) -> Result<(), BlockError> {
        let fields = &mut self.fields;
        if fields.is_padded
            && let Some((padding, rest)) = part.split_first()
        {
            let bytes = fields.bytes.checked_sub(u32::from(*padding)).ok_or(BlockError::Padding)?;
            *fields = Fields { is_padded: false, bytes, ..*fields };
            part = rest;
        }
        let before = part.len().min(fields.before as usize);
        fields.before -= before as u32;
        part = &part[before..];
        let read = part.len().min(fields.bytes as usize);
        fields.bytes -= read as u32;
        let kept = &mut self.kept;
        match self.table {
            HeaderTable::Open => Ok(self.scanner.read(&part[..read], || kept.charge())?),
            HeaderTable::Acknowledged | HeaderTable::Emptying(_) | HeaderTable::Empty => Ok(()),
        }
    }

    /// The library has read the size update, and so has dropped all entries.
    pub(super) fn table_is_emptied(&mut self) {
        self.kept.clear();
    }

    /// Bytes of all frames of the unfinished header block whose heads have arrived.
    pub(super) fn announced(&self) -> usize {
        self.block.map_or(0, |block| block.bytes)
    }

    /// The header block that is unfinished after the head of a frame. The frame has `bytes` bytes.
    fn block(&self, kind: u8, flags: u8, bytes: usize) -> Result<Option<Block>, BlockError> {
        let bytes = match (kind, self.block) {
            // Only a server may send it (RFC 9113, section 8.4). The library would read its fields,
            // and might ignore the frame.
            (PUSH_PROMISE, _) => return Err(BlockError::Promise),
            (HEADERS, None) => bytes,
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

/// Returns this HEADERS frame without padding and priority, and with [`EMPTY_TABLE`] before its first
/// field. If the payload then exceeds [`MAX_FRAME`], returns a HEADERS and a CONTINUATION frame.
///
/// The library uses no priority. But it ignores a frame whose stream depends on itself, and so would
/// not see the size update.
pub(super) fn emptying_table(frame: &[u8]) -> Vec<u8> {
    let (head, mut payload) = frame.split_at(HEAD);
    let (flags, stream) = (head[4], &head[5..]);
    if flags & PADDED != 0 {
        payload = &payload[1..payload.len() - usize::from(payload[0])];
    }
    if flags & PRIORITY != 0 {
        payload = &payload[PRIORITY_BYTES as usize..];
    }
    let payload = [&[EMPTY_TABLE], payload].concat();
    let flags = flags & !(PADDED | PRIORITY);
    let frame = |kind, flags, payload: &[u8]| {
        let length = (payload.len() as u32).to_be_bytes();
        [&length[1..], &[kind, flags], stream, payload].concat()
    };
    match payload.split_at_checked(MAX_FRAME) {
        Some((first, rest)) if !rest.is_empty() => {
            let first = frame(HEADERS, flags & !END_HEADERS, first);
            [first, frame(CONTINUATION, flags & END_HEADERS, rest)].concat()
        }
        _ => frame(HEADERS, flags, &payload),
    }
}

impl Fields {
    /// The fields of a frame with this head.
    fn of(kind: u8, flags: u8, length: u32) -> Result<Self, BlockError> {
        let (may_be_padded, before) = match kind {
            HEADERS if flags & PRIORITY != 0 => (true, PRIORITY_BYTES),
            HEADERS => (true, 0),
            CONTINUATION => (false, 0),
            _ => return Ok(Self::default()),
        };
        let is_padded = may_be_padded && flags & PADDED != 0;
        let other = before + u32::from(is_padded);
        // A frame that is too short for its flags ends the connection, as in the library.
        let bytes = length.checked_sub(other).ok_or(BlockError::Padding)?;
        Ok(Self { is_padded, before, bytes })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const PING: u8 = 6;

    fn parser(is_of_proxy: bool) -> Parser {
        Parser::new(is_of_proxy, TablePool::new(0))
    }

    pub(in super::super) fn frame(kind: u8, flags: u8, length: usize) -> Vec<u8> {
        let head = [&(length as u32).to_be_bytes()[1..], &[kind, flags, 0, 0, 0, 1]].concat();
        [head, vec![0x82; length]].concat()
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
            let mut parser = parser(false);
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
            let parsed = parser(false).read(&connection(&frames)).expect("no error");
            assert_eq!(parsed.unfinished, unfinished, "{name}");
        }
    }

    /// A frame with this payload.
    fn with_payload(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let mut bytes = frame(kind, flags, payload.len());
        bytes.truncate(HEAD);
        [bytes.as_slice(), payload].concat()
    }

    #[test]
    fn entries_are_found_in_every_frame_of_a_block_and_nowhere_else() {
        const ENTRY: u8 = 0x41;
        let priority = [ENTRY; 5];
        let padding = [ENTRY; 3];
        for (name, frames, is_found) in [
            ("a field", vec![with_payload(HEADERS, END_HEADERS, &[ENTRY, 1, b'x'])], true),
            (
                "a field in the second frame",
                vec![
                    frame(HEADERS, 0, 9),
                    with_payload(CONTINUATION, END_HEADERS, &[ENTRY, 1, b'x']),
                ],
                true,
            ),
            ("a field of another frame", vec![with_payload(DATA, 0, &[ENTRY; 9])], false),
            (
                "padding and priority",
                vec![with_payload(
                    HEADERS,
                    END_HEADERS | PADDED | PRIORITY,
                    &[&[3], &priority[..], &[0x82], &padding].concat(),
                )],
                false,
            ),
            (
                "a field between padding and priority",
                vec![with_payload(
                    HEADERS,
                    END_HEADERS | PADDED | PRIORITY,
                    &[&[3], &priority[..], &[ENTRY, 0], &padding].concat(),
                )],
                true,
            ),
            (
                "the text of a field in two frames",
                vec![
                    with_payload(HEADERS, 0, &[0x01, 3]),
                    with_payload(CONTINUATION, END_HEADERS, &[ENTRY; 3]),
                ],
                false,
            ),
        ] {
            let found = if is_found { Some(BlockError::Fields(FieldError::Entry)) } else { None };
            // The client has added an entry before, and again sends a long frame.
            let entry = with_payload(HEADERS, END_HEADERS, &[ENTRY, 1, b'x']);
            let long = frame(DATA, 0, 10_000);
            let bytes = connection(&[vec![long.clone(), entry, long], frames.clone()].concat());
            for length in [1, 2, 11, bytes.len()] {
                let mut parser = parser(false);
                let read = bytes.chunks(length).try_for_each(|chunk| parser.read(chunk).map(drop));
                assert_eq!(read.err(), found, "{name}, in chunks of {length}");
            }
            let large = Parser::new(false, TablePool::new(1_000_000)).read(&bytes);
            assert_eq!(large.err(), None, "{name}, with bytes in the pool");
            let first = parser(false).read(&connection(&frames));
            assert_eq!(first.err(), None, "{name}, in the first bytes");
            let known = connection(&[vec![frame(SETTINGS, ACK, 0), bytes[24..].to_vec()]].concat());
            assert_eq!(parser(false).read(&known).err(), None, "{name}, to an empty table");
        }
    }

    #[test]
    fn a_frame_that_empties_the_table_has_all_fields() {
        let fields = [0x82, 0x84];
        let priority = [1, 2, 3, 4, 5];
        let emptied = [EMPTY_TABLE, 0x82, 0x84];
        let padded = [&[2], &priority[..], &fields, &[0, 0]].concat();
        for (flags, payload, wanted) in [
            (END_HEADERS, fields.to_vec(), emptied.to_vec()),
            (0, vec![], vec![EMPTY_TABLE]),
            (END_HEADERS | PADDED, vec![2, 0x82, 0x84, 0, 0], emptied.to_vec()),
            (END_HEADERS | PADDED | PRIORITY, padded, emptied.to_vec()),
        ] {
            let wanted = with_payload(HEADERS, flags & END_HEADERS, &wanted);
            assert_eq!(emptying_table(&with_payload(HEADERS, flags, &payload)), wanted);
        }
        for flags in [0, END_HEADERS] {
            let full = with_payload(HEADERS, flags, &[0x82; MAX_FRAME]);
            let first = [&[EMPTY_TABLE], [0x82; MAX_FRAME - 1].as_slice()].concat();
            let wanted =
                [with_payload(HEADERS, 0, &first), with_payload(CONTINUATION, flags, &[0x82])];
            assert!(emptying_table(&full) == wanted.concat(), "with the flags {flags}");
        }
    }

    #[test]
    fn padding_that_is_longer_than_its_frame_is_refused() {
        for payload in [&[][..], &[3, 0, 0], &[0, 1, 2, 3, 4]] {
            let bytes = connection(&[with_payload(HEADERS, PADDED | PRIORITY, payload)]);
            assert_eq!(parser(false).read(&bytes).err(), Some(BlockError::Padding));
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
            ("a promise", vec![frame(PUSH_PROMISE, END_HEADERS, 9)], Some(BlockError::Promise)),
        ] {
            let refusal = parser(false).read(&connection(&frames)).err();
            assert_eq!(refusal, refused, "{name}");
            let of_proxy = parser(true).read(&connection(&frames)).err();
            assert_eq!(of_proxy, refused.filter(|why| *why != BlockError::TooLong), "{name}");
        }
    }
}
