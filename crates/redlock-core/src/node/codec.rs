//! A call and its answer as bytes: one binary argument, one binary reply. Both implementations on a
//! master read this format: `node/locks.lua` and the native module.
//!
//! Integers are little-endian. `text` is a u16 length and that many bytes; `value` is a u32 length
//! and that many bytes.
//!
//! ```text
//! call        version u8 = 6 | marker key text | incarnation text | hint channel text
//!             | number key text | max_clock_skew in µs u64 | watermark grace in ms u64
//!             | number u64, 0 for none | count u16 | operations
//!             The node keeps the number of a heartbeat, and of a call with a vote 1, 4 or 5.
//! operation   code u8 | lock key text | record text | ttl in ms u32
//!             | W N V: hint text; E H K: began in µs since 1970 u64
//!   A acquire    W acquire, and publish the hint when the lock is held
//!   E extend; began is when it was asked for
//!   H repair; began is when the extension or reading that justifies it began
//!   R release    N release, and publish the hint when the lock was released
//!   U undo of a proposal    V undo, and publish the hint when the lock was released
//!   X release of exactly this grant
//!   K release that keeps the lock free for the ttl; began is when it was asked for
//!   I inspect
//!   The record is whole for A W H, `T:grant` for E R N U V X, empty for I; `T:grant` for K too.
//!   The ttl is 0 for operations without one.
//!   a w e r n u v x k i: the same on a set of locks. At the end: count u8 | the other lock keys,
//!   each as text. All locks get the same record.
//!
//! answer      version u8 = 6 | node's time in µs u64
//!             | flags u8: 1 the marker stands, 2 the number was kept
//!             | a vote for each operation; without operations: text of the write error, or empty
//! vote        code u8, then
//!   1 granted   5 released   6 missing   8 quarantined   9 clock     nothing
//!   2 held   11 held by another grant of the same owner   7 found
//!                                 ms left i64, negative without expiry | record value
//!   3 stale    watermark text     4 extended   ms left i64     10 error   text
//!   12 of a set: which of its locks the vote is about u8, from 1 (0 is left out) | that vote
//!   13 found of a set: count u16 | for each lock that stands: which one u8, from 0
//!                                 | ms left i64 | record value, at most 4,160 bytes
//!   14 e r n x k: count u16 | the vote about each lock of the set
//! ```
//!
//! A call that is cut off or malformed is refused before any of its operations runs.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes};

use super::hint::Hint;
use super::link::{Answer, quoted};
use super::op::{Effect, Failure, Holding, Keys, Op, Reason, ReleaseScope, Vote};
use super::record::Record;
use super::rules::NodeSettings;
use crate::model::types::{FencingToken, Ttl};

/// The version of the format. A master with another version refuses the call.
pub const VERSION: u8 = 6;

/// How long a master stores the number of a call, in milliseconds: an hour longer than the longest
/// TTL.
pub const NUMBER_KEPT_MS: u64 = 25 * 3_600_000;

/// The offset of the flags in an answer, and the flags.
const FLAGS_AT: usize = 9;
const MARKER_STANDS: u8 = 1;
const NUMBER_KEPT: u8 = 2;

/// The code in front of a vote about another lock of a set than its first.
const OF_SET: u8 = 12;
/// The code of a vote with the locks of a set that stand.
const FOUND_OF_SET: u8 = 13;
/// The code of a vote with a vote about each lock of a set.
const EACH: u8 = 14;

/// The longest stored value of a lock, in bytes. It has room for a label and for 8 KiB of metadata,
/// which earlier versions accepted. Another client's value can be longer; a vote then contains only
/// its first bytes.
pub(crate) const LONGEST_VALUE: usize = 8 * 1024 + 256;

/// The longest value of a lock in a vote about the locks of a set that stand, in bytes: with room
/// for the longest [`Info`](crate::Info). A longer value of another client is cut.
const LONGEST_OF_SET: usize = 4 * 1024 + 64;

/// The encoded part that is equal in every call of a session.
#[derive(Debug, Clone)]
pub struct Header(Vec<u8>);

impl Header {
    /// A header for a node with this marker under this key, which stores numbers of calls under
    /// `number_key`. Each text is cut at 65,535 bytes; ours are shorter.
    pub fn new(
        marker_key: &str,
        marker: &str,
        channel: &str,
        number_key: &str,
        settings: &NodeSettings,
    ) -> Self {
        let mut bytes = vec![VERSION];
        for part in [marker_key, marker, channel, number_key] {
            put_text(&mut bytes, part.as_bytes());
        }
        bytes.extend_from_slice(&(settings.max_clock_skew.as_micros() as u64).to_le_bytes());
        bytes.extend_from_slice(&(settings.fence_grace.as_millis() as u64).to_le_bytes());
        Self(bytes)
    }
}

/// Encodes one call with at most 65,535 operations. `number` is 0 for a call without a number, and
/// below 2^53.
pub fn pack_call<'a>(
    header: &Header,
    number: u64,
    ops: impl ExactSizeIterator<Item = &'a Arc<Op>> + Clone,
) -> Vec<u8> {
    let size = ops.clone().map(|op| super::calls::weight(op)).sum::<usize>();
    let mut call = Vec::with_capacity(header.0.len() + 10 + size);
    call.extend_from_slice(&header.0);
    call.extend_from_slice(&number.to_le_bytes());
    call.extend_from_slice(&(ops.len() as u16).to_le_bytes());
    for op in ops {
        pack_op(&mut call, op);
    }
    call
}

fn pack_op(call: &mut Vec<u8>, op: &Op) {
    const NO_RECORD: &[u8] = &[];
    let (code, keys, record, ttl) = match op {
        Op::Acquire { keys, record, ttl, tell: None } => {
            (b'A', keys, &record.as_bytes()[..], ttl.millis())
        }
        Op::Acquire { keys, record, ttl, tell: Some(_) } => {
            (b'W', keys, &record.as_bytes()[..], ttl.millis())
        }
        Op::Repair { keys, record, ttl, .. } => (b'H', keys, &record.as_bytes()[..], ttl.millis()),
        Op::Extend { keys, record, ttl, .. } => (b'E', keys, record.grant(), ttl.millis()),
        Op::Release { keys, record, scope, tell } => {
            let code = match (scope, tell.is_some()) {
                // Nobody can have the lock yet, so there is nothing to publish.
                (ReleaseScope::HolderKeeping { .. }, _) => b'K',
                (ReleaseScope::Proposal, true) => b'V',
                (ReleaseScope::Proposal, false) => b'U',
                // This release publishes no hint: its grant has no majority, so nobody waits for
                // its end.
                (ReleaseScope::Grant, _) => b'X',
                (ReleaseScope::Holder, true) => b'N',
                (ReleaseScope::Holder, false) => b'R',
            };
            let life = match scope {
                ReleaseScope::HolderKeeping { life, .. } => life.millis(),
                ReleaseScope::Holder | ReleaseScope::Grant | ReleaseScope::Proposal => 0,
            };
            (code, keys, record.grant(), life)
        }
        Op::Inspect { keys } => (b'I', keys, NO_RECORD, 0),
    };
    let others = keys.others.as_deref();
    call.push(if others.is_some() { code.to_ascii_lowercase() } else { code });
    put_text(call, &keys.lock);
    put_text(call, record);
    call.extend_from_slice(&ttl.to_le_bytes());
    match op {
        Op::Acquire { tell: Some(hint), .. } => put_text(call, hint.as_bytes()),
        Op::Release {
            tell: Some(hint),
            scope: ReleaseScope::Holder | ReleaseScope::Proposal,
            ..
        } => {
            put_text(call, hint.as_bytes());
        }
        Op::Extend { began_micros, .. }
        | Op::Repair { began_micros, .. }
        | Op::Release { scope: ReleaseScope::HolderKeeping { began_micros, .. }, .. } => {
            call.extend_from_slice(&began_micros.to_le_bytes());
        }
        Op::Acquire { .. } | Op::Release { .. } | Op::Inspect { .. } => {}
    }
    if let Some(others) = others {
        call.push(others.len() as u8);
        others.iter().for_each(|keys| put_text(call, &keys.lock));
    }
}

fn put_text(bytes: &mut Vec<u8>, text: &[u8]) {
    let text = &text[..text.len().min(usize::from(u16::MAX))];
    bytes.extend_from_slice(&(text.len() as u16).to_le_bytes());
    bytes.extend_from_slice(text);
}

/// A decoded call.
#[derive(Debug)]
pub struct Call {
    /// The key of the marker.
    pub marker_key: Bytes,
    /// The marker that must stand there.
    pub marker: Bytes,
    /// The channel for hints.
    pub channel: Bytes,
    /// The key of the call's number.
    pub number_key: Bytes,
    /// `max_clock_skew` and the grace of watermarks.
    pub settings: NodeSettings,
    /// The number of the call; 0 for a call without a number.
    pub number: u64,
    /// The operations, in the order in which they run.
    pub ops: Vec<Op>,
}

/// Why bytes are no call of this version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Another version of the format.
    #[error("the call has version {0} and not {VERSION}")]
    Version(u8),
    /// The bytes are cut off or have another form.
    #[error("the call is malformed")]
    Call,
}

/// Decodes a call. The result shares the buffer of `bytes`.
///
/// # Errors
/// The bytes are not exactly one call.
pub fn unpack_call(mut bytes: Bytes) -> Result<Call, Malformed> {
    match bytes.try_get_u8() {
        Ok(VERSION) => {}
        Ok(other) => return Err(Malformed::Version(other)),
        Err(_) => return Err(Malformed::Call),
    }
    whole_call(&mut bytes).filter(|_| bytes.is_empty()).ok_or(Malformed::Call)
}

fn whole_call(bytes: &mut Bytes) -> Option<Call> {
    let marker_key = take_text(bytes)?;
    let marker = take_text(bytes)?;
    let channel = take_text(bytes)?;
    let number_key = take_text(bytes)?;
    let max_clock_skew = Duration::from_micros(bytes.try_get_u64_le().ok()?);
    let fence_grace = Duration::from_millis(bytes.try_get_u64_le().ok()?);
    let settings =
        NodeSettings::default().with_max_clock_skew(max_clock_skew).with_fence_grace(fence_grace);
    let number = bytes.try_get_u64_le().ok()?;
    let count = bytes.try_get_u16_le().ok()?;
    // The count may be wrong, so it alone does not decide how much memory is reserved. An operation
    // takes at least 9 bytes.
    let mut ops = Vec::with_capacity(usize::from(count).min(bytes.len() / 9));
    for _ in 0..count {
        ops.push(unpack_op(bytes)?);
    }
    Some(Call { marker_key, marker, channel, number_key, settings, number, ops })
}

fn unpack_op(bytes: &mut Bytes) -> Option<Op> {
    let sent = bytes.try_get_u8().ok()?;
    let code = sent.to_ascii_uppercase();
    let keys = Keys::of_lock_key(&take_text(bytes)?);
    let record = Record::foreign(take_text(bytes)?);
    let millis = bytes.try_get_u32_le().ok()?;
    let ttl = || Ttl::from_millis(u64::from(millis)).ok();
    let length = record.as_bytes().len();
    let fits = match code {
        b'A' | b'W' | b'H' => length > Record::GRANT_LEN && record.fencing().is_some(),
        b'R' | b'N' | b'U' | b'V' | b'X' | b'K' => {
            length == Record::GRANT_LEN && record.fencing().is_some()
        }
        b'E' => length == Record::GRANT_LEN,
        b'I' => length == 0,
        _ => false,
    };
    let is_set = sent != code;
    if !fits || is_set && code == b'H' {
        return None;
    }
    let release =
        |record, scope, tell| Some(Op::Release { keys: keys.clone(), record, scope, tell });
    let mut op = match code {
        b'A' => Some(Op::Acquire { keys, record, ttl: ttl()?, tell: None }),
        b'W' => Some(Op::Acquire {
            keys,
            record,
            ttl: ttl()?,
            tell: Some(Hint::received(take_text(bytes)?)),
        }),
        b'H' => Some(Op::Repair {
            keys,
            record,
            ttl: ttl()?,
            began_micros: bytes.try_get_u64_le().ok()?,
        }),
        b'E' => Some(Op::Extend {
            keys,
            record,
            ttl: ttl()?,
            began_micros: bytes.try_get_u64_le().ok()?,
        }),
        b'R' => release(record, ReleaseScope::Holder, None),
        b'N' => release(record, ReleaseScope::Holder, Some(Hint::received(take_text(bytes)?))),
        b'U' => release(record, ReleaseScope::Proposal, None),
        b'V' => release(record, ReleaseScope::Proposal, Some(Hint::received(take_text(bytes)?))),
        b'X' => release(record, ReleaseScope::Grant, None),
        b'K' => {
            let (life, began_micros) = (ttl()?, bytes.try_get_u64_le().ok()?);
            release(record, ReleaseScope::HolderKeeping { life, began_micros }, None)
        }
        _ => Some(Op::Inspect { keys }),
    }?;
    if is_set {
        let count = bytes.try_get_u8().ok()?;
        let mut others = Vec::with_capacity(usize::from(count).min(bytes.len() / 2));
        for _ in 0..count {
            others.push(Keys::of_lock_key(&take_text(bytes)?));
        }
        op.keys_mut().others = Some(others.into());
    }
    Some(op)
}

fn take_text(bytes: &mut Bytes) -> Option<Bytes> {
    let length = usize::from(bytes.try_get_u16_le().ok()?);
    (length <= bytes.len()).then(|| bytes.split_to(length))
}

/// Builds the answer to a call.
pub struct AnswerPacker(Vec<u8>);

impl AnswerPacker {
    /// Starts an answer. The caller then adds the votes. If the call had no operations, the caller
    /// adds [`AnswerPacker::write_error`] in their place.
    pub fn new(time_micros: u64, is_admitted: bool) -> Self {
        let mut bytes = Vec::with_capacity(64);
        bytes.push(VERSION);
        bytes.extend_from_slice(&time_micros.to_le_bytes());
        bytes.push(if is_admitted { MARKER_STANDS } else { 0 });
        Self(bytes)
    }

    /// Says that the call's number was kept.
    pub fn number_kept(&mut self) {
        self.0[FLAGS_AT] |= NUMBER_KEPT;
    }

    /// Adds the error with which writes fail; empty when writes succeed.
    pub fn write_error(&mut self, error: &str) {
        put_text(&mut self.0, error.as_bytes());
    }

    /// Adds the next vote.
    pub fn vote(&mut self, vote: &Vote) {
        let answer = &mut self.0;
        match vote.lock_of_set() {
            0 => {}
            at => answer.extend([OF_SET, at]),
        }
        let mut holding = |code, holding: &Holding| {
            answer.push(code);
            put_holding(answer, holding, LONGEST_VALUE);
        };
        match vote {
            Vote::Held(held) => holding(2, held),
            Vote::Yours(held) => holding(11, held),
            Vote::Found(held) => holding(7, held),
            Vote::FoundOfSet(stand) => {
                answer.push(FOUND_OF_SET);
                answer.extend_from_slice(&(stand.len() as u16).to_le_bytes());
                for holding in stand {
                    answer.push(holding.at);
                    put_holding(answer, holding, LONGEST_OF_SET);
                }
            }
            Vote::Each(votes) => {
                answer.push(EACH);
                answer.extend_from_slice(&(votes.len() as u16).to_le_bytes());
                votes.iter().for_each(|vote| self.vote(vote));
            }
            Vote::Granted => answer.push(1),
            Vote::Released => answer.push(5),
            Vote::Missing => answer.push(6),
            Vote::Stale { fence } => {
                answer.push(3);
                put_text(answer, &fence.text());
            }
            Vote::Extended { expires_in } => {
                answer.push(4);
                answer.extend_from_slice(&millis(*expires_in).to_le_bytes());
            }
            Vote::Failed(Failure { reason: Reason::Quarantined, .. }) => answer.push(8),
            Vote::Failed(Failure { reason: Reason::Clock, .. }) => answer.push(9),
            Vote::Failed(Failure { detail, .. }) => {
                answer.push(10);
                put_text(answer, detail.as_bytes());
            }
        }
    }

    /// The finished bytes.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

fn put_holding(answer: &mut Vec<u8>, holding: &Holding, longest: usize) {
    let record = holding.record.as_bytes();
    let record = &record[..record.len().min(longest)];
    answer.extend_from_slice(&holding.expires_in.map_or(-1, millis).to_le_bytes());
    answer.extend_from_slice(&(record.len() as u32).to_le_bytes());
    answer.extend_from_slice(record);
}

fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

/// Decodes the answer to a call with this many operations. `None` means that the answer is
/// malformed: then it is unknown which operations ran.
pub fn unpack_answer(operations: usize, mut bytes: Bytes) -> Option<Answer> {
    if bytes.try_get_u8().ok()? != VERSION {
        return None;
    }
    let time_micros = i64::try_from(bytes.try_get_u64_le().ok()?).ok();
    let flags = bytes.try_get_u8().ok()?;
    let (is_admitted, is_number_kept) = (flags & MARKER_STANDS != 0, flags & NUMBER_KEPT != 0);
    let mut write_error = None;
    if operations == 0 {
        let error = take_text(&mut bytes)?;
        write_error = (!error.is_empty()).then(|| quoted(&String::from_utf8_lossy(&error)));
    }
    // `collect` into an `Option` cannot reserve memory up front.
    let mut votes = Vec::with_capacity(operations);
    for _ in 0..operations {
        votes.push(unpack_vote(&mut bytes)?);
    }
    bytes.is_empty().then_some(Answer {
        votes,
        time_micros,
        is_admitted,
        is_number_kept,
        write_error,
    })
}

fn unpack_vote(bytes: &mut Bytes) -> Option<Vote> {
    if bytes.first() == Some(&OF_SET) {
        bytes.advance(1);
        let at = bytes.try_get_u8().ok()?;
        return unpack_one_vote(bytes).map(|vote| vote.of_lock(at.into()));
    }
    if bytes.first() == Some(&EACH) {
        bytes.advance(1);
        let count = usize::from(bytes.try_get_u16_le().ok()?);
        // The count may be wrong, so it alone does not decide how much memory is reserved.
        let mut votes = Vec::with_capacity(count.min(bytes.len()));
        for _ in 0..count {
            votes.push(unpack_one_vote(bytes)?);
        }
        return Some(Vote::Each(votes));
    }
    unpack_one_vote(bytes)
}

fn unpack_one_vote(bytes: &mut Bytes) -> Option<Vote> {
    let failed = |reason, effect, detail: &str| Vote::Failed(Failure::new(reason, effect, detail));
    Some(match bytes.try_get_u8().ok()? {
        1 => Vote::Granted,
        2 => Vote::Held(take_holding(bytes)?),
        11 => Vote::Yours(take_holding(bytes)?),
        7 => Vote::Found(take_holding(bytes)?),
        FOUND_OF_SET => {
            let count = usize::from(bytes.try_get_u16_le().ok()?);
            // The count may be wrong, so it alone does not decide how much memory is reserved.
            let mut stand = Vec::with_capacity(count.min(bytes.len() / 13));
            for _ in 0..count {
                let at = bytes.try_get_u8().ok()?;
                stand.push(Holding { at, ..take_holding(bytes)? });
            }
            Vote::FoundOfSet(stand)
        }
        // A mark (`+` or `!`) and more may follow the token.
        3 => match take_text(bytes)?.get(..FencingToken::TEXT_LEN).and_then(FencingToken::parse) {
            Some(fence) => Vote::Stale { fence },
            None => failed(Reason::Error, Effect::None, "the watermark holds no fencing token"),
        },
        4 => Vote::Extended {
            expires_in: Duration::from_millis(u64::try_from(bytes.try_get_i64_le().ok()?).ok()?),
        },
        5 => Vote::Released,
        6 => Vote::Missing,
        8 => failed(Reason::Quarantined, Effect::None, "the node's marker is missing or differs"),
        9 => failed(
            Reason::Clock,
            Effect::None,
            "the operation's time is too far from the node's own time",
        ),
        // An operation stops at its first error. Some of its earlier writes may stand, so the
        // effect is `Possible`.
        10 => {
            let detail = quoted(&String::from_utf8_lossy(&take_text(bytes)?));
            failed(Reason::Error, Effect::Possible, &detail)
        }
        _ => return None,
    })
}

fn take_holding(bytes: &mut Bytes) -> Option<Holding> {
    // A negative number means a key without expiry. It never means a missing key: the master reads
    // the value and the expiry in one step, and no key vanishes in between.
    let left = bytes.try_get_i64_le().ok()?;
    let length = usize::try_from(bytes.try_get_u32_le().ok()?).ok()?;
    let record = (length <= bytes.len()).then(|| bytes.split_to(length))?;
    Some(Holding {
        record: Record::foreign(record),
        expires_in: u64::try_from(left).ok().map(Duration::from_millis),
        at: 0,
    })
}

#[cfg(test)]
mod tests;
