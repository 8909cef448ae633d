//! The rules of one node: how an operation changes the keys of a lock, and which vote answers it.
//! Masters without the module run the same rules in `node/locks.lua`; a differential test compares
//! the two.
//!
//! The rules use a few commands of a key space ([`KeySpace`]). Two types implement the trait. One
//! is the store of a node in memory. It also serves as a simulated master, which can run out of
//! memory between two writes. The other is a real master with the module. The caller provides
//! atomicity: it runs one operation at a time.

use std::time::Duration;

use bytes::Bytes;

use super::eligibility::{BoundRules, NAME_MOVES_WITHIN, quarantine};
use super::op::{Effect, Failure, Holding, Keys, Op, Reason, ReleaseScope, Vote};
use super::record::Record;
use crate::model::types::{FencingToken, Ttl};
use crate::model::validity::longest_round;

/// The keys of one node. Values are texts; times to live are in milliseconds.
pub trait KeySpace {
    /// The node's own wall clock, in microseconds since 1970.
    fn now_micros(&self) -> u64;

    /// The value of a key that has not expired.
    ///
    /// # Errors
    /// The key holds no text.
    fn get(&mut self, key: &Bytes) -> Result<Option<Bytes>, KeyError>;

    /// The remaining life of a key; `None` when it has no expiry.
    fn time_to_live(&mut self, key: &Bytes) -> Option<u64>;

    /// Sets a key, replacing any earlier value.
    ///
    /// # Errors
    /// No memory is left; nothing was set.
    fn set(&mut self, key: &Bytes, value: Bytes, expiry: Expiry) -> Result<(), KeyError>;

    /// Changes a key's time to live. Needs no memory.
    fn expire(&mut self, key: &Bytes, millis: u64);

    /// Deletes a key. Needs no memory.
    fn delete(&mut self, key: &Bytes);
}

/// The time to live of a key that is being set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// This many milliseconds from now.
    In(u64),
    /// The key's earlier time to live.
    Keep,
    /// Until it is deleted.
    Never,
}

/// Why a key could not be read or set, with Redis' error text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// No memory is left.
    #[error("OOM command not allowed when used memory > 'maxmemory'.")]
    OutOfMemory,
    /// The key holds no text, so it belongs to another program.
    #[error("WRONGTYPE Operation against a key holding the wrong kind of value")]
    WrongType,
    /// The caller may not use the key.
    #[error("NOPERM No permissions to access a key")]
    Forbidden,
}

impl From<KeyError> for Vote {
    /// The effect is `Possible`: earlier writes of the operation may stand.
    fn from(error: KeyError) -> Self {
        Self::Failed(Failure::new(Reason::Error, Effect::Possible, error.to_string()))
    }
}

/// Runs one lock operation. `admitted` is whether the marker in the gateway's call stands on the
/// node.
pub fn run(space: &mut impl KeySpace, settings: &NodeSettings, admitted: bool, op: &Op) -> Vote {
    let admitted = admitted || !settings.rules.marker_is_checked;
    let mut node = LockStateMachine { space, settings };
    let vote = match op {
        Op::Acquire { .. } | Op::Extend { .. } | Op::Repair { .. } if !admitted => {
            let detail = "the node's marker is missing or differs";
            Ok(Vote::Failed(Failure::new(Reason::Quarantined, Effect::None, detail)))
        }
        Op::Acquire { keys, record, ttl, .. } if keys.others.is_some() => {
            node.acquire_set(keys, record, *ttl)
        }
        Op::Acquire { keys, record, ttl, .. } => node.acquire(keys, record, *ttl),
        Op::Extend { keys, record, ttl, began_micros } => {
            node.each(keys, |node, lock| node.extend(lock, record, *ttl, *began_micros))
        }
        Op::Repair { keys, record, ttl, began_micros } => {
            node.repair(keys, record, *ttl, *began_micros)
        }
        // A release runs even if the marker does not stand: deleting a lock, or keeping it free, can
        // never produce a second holder.
        Op::Release {
            keys,
            record,
            scope: ReleaseScope::HolderKeeping { life, began_micros },
            ..
        } => node.each(keys, |node, lock| node.keep_free(lock, record, *life, *began_micros)),
        Op::Release { keys, record, scope: ReleaseScope::Proposal, .. }
            if keys.others.is_some() =>
        {
            node.undo_set(keys, record)
        }
        Op::Release { keys, record, scope, .. } => {
            node.each(keys, |node, lock| node.release(lock, record, *scope))
        }
        Op::Inspect { keys } if keys.others.is_some() => node.inspect_set(keys),
        Op::Inspect { keys } => node.inspect(keys),
    };
    vote.unwrap_or_else(Vote::from)
}

struct LockStateMachine<'a, S> {
    space: &'a mut S,
    settings: &'a NodeSettings,
}

impl<S: KeySpace> LockStateMachine<'_, S> {
    #[inline]
    fn acquire(&mut self, keys: &Keys, record: &Record, ttl: Ttl) -> Result<Vote, KeyError> {
        let rules = self.settings.rules;
        let Some(t) = record.fencing() else { return Ok(error("the record has no T")) };
        if rules.clock_is_checked
            && t.get().abs_diff(self.space.now_micros()) > self.max_skew_micros()
        {
            return Ok(clock_refusal());
        }
        let last = self.space.get(&keys.fence)?;
        let watermark = last.as_ref().map(|text| watermark_token(text));
        if watermark == Some(None) {
            return Ok(error("ERR the watermark holds no number"));
        }
        if let Some(value) = self.space.get(&keys.lock)? {
            let is_own = Record::foreign(value.clone()).owner_text() == record.owner_text();
            if !is_own || rules.lock_is_kept {
                let holding = self.holding(keys, value);
                return Ok(if is_own { Vote::Yours(holding) } else { Vote::Held(holding) });
            }
        }
        if let Some(watermark) =
            watermark.flatten().filter(|watermark| rules.watermark_is_checked && *watermark >= t)
        {
            return Ok(Vote::Stale { fence: watermark });
        }
        self.space.set(
            &keys.lock,
            record.as_bytes().clone(),
            Expiry::In(u64::from(ttl.millis())),
        )?;
        let earlier = last.as_deref().map(|last| (last, self.earlier_end()));
        let watermark = provisional_watermark(t, earlier);
        if let Err(error) = self.set_watermark(keys, watermark, u64::from(ttl.millis())) {
            self.space.delete(&keys.lock);
            return Err(error);
        }
        Ok(Vote::Granted)
    }

    // Sets are rare. Marking them cold lets the compiler inline the rules of a single lock.

    /// Acquires all locks of a set, or none: if one refuses or fails, the grants before it are
    /// undone exactly. The vote is that of the lock that refused.
    #[cold]
    fn acquire_set(&mut self, keys: &Keys, record: &Record, ttl: Ttl) -> Result<Vote, KeyError> {
        for (at, lock) in keys.each().enumerate() {
            let vote = self.acquire(lock, record, ttl).unwrap_or_else(Vote::from);
            if vote != Vote::Granted {
                if self.settings.rules.refused_set_is_undone {
                    for granted in keys.each().take(at) {
                        drop(self.release(granted, record, ReleaseScope::Proposal));
                    }
                }
                return Ok(vote.of_lock(at));
            }
        }
        Ok(Vote::Granted)
    }

    /// Runs an operation on each lock of a set. A failure on one does not stop the others.
    #[inline]
    fn each(
        &mut self,
        keys: &Keys,
        run: impl Fn(&mut Self, &Keys) -> Result<Vote, KeyError>,
    ) -> Result<Vote, KeyError> {
        if keys.others.is_none() {
            return run(self, keys);
        }
        let votes = keys.each().map(|lock| run(self, lock).unwrap_or_else(Vote::from));
        Ok(Vote::Each(votes.collect()))
    }

    /// Undoes a grant on every lock of a set. If the undo fails on a lock, that failure is the vote,
    /// and the gateway retries the undo. Otherwise the vote is `Released` if any lock was released.
    #[cold]
    fn undo_set(&mut self, keys: &Keys, record: &Record) -> Result<Vote, KeyError> {
        let rank = |vote: &Vote| match vote {
            Vote::Failed(_) => 2,
            Vote::Released => 1,
            _ => 0,
        };
        let mut first: Option<Vote> = None;
        for (at, lock) in keys.each().enumerate() {
            let vote = self.release(lock, record, ReleaseScope::Proposal);
            let vote = vote.unwrap_or_else(Vote::from).of_lock(at);
            if first.as_ref().is_none_or(|first| rank(first) < rank(&vote)) {
                first = Some(vote);
            }
        }
        Ok(first.unwrap_or(Vote::Missing))
    }

    /// The part of a life that is left, in milliseconds. The life counts from when the gateway began
    /// to ask, not from when this node runs the operation: a node that stood still meanwhile would
    /// keep the lock for longer than anybody asked for. Clocks may differ by `max_clock_skew`, so the
    /// life is never shortened by that part of the delay.
    fn left_of(&self, life: Ttl, began_micros: u64) -> u64 {
        let life = u64::from(life.millis());
        if !self.settings.rules.lives_begin_when_asked {
            return life;
        }
        let delay = self.space.now_micros().saturating_sub(began_micros);
        life.saturating_sub(delay.saturating_sub(self.max_skew_micros()) / 1_000)
    }

    fn extend(
        &mut self,
        keys: &Keys,
        record: &Record,
        ttl: Ttl,
        began_micros: u64,
    ) -> Result<Vote, KeyError> {
        let asked = self.left_of(ttl, began_micros);
        if asked == 0 {
            return Ok(clock_refusal());
        }
        let Some(value) = self.space.get(&keys.lock)? else { return Ok(Vote::Missing) };
        if !value.starts_with(record.grant()) {
            return Ok(Vote::Held(self.holding(keys, value)));
        }
        let stored = Record::foreign(value);
        let is_first = !stored.is_extended();
        let left = self.space.time_to_live(&keys.lock);
        let life = left.map_or(asked, |left| left.max(asked));
        if is_first || left.is_none_or(|left| left < asked) {
            // The expiry is set before the marks, because it needs no memory and the marks may
            // fail.
            self.space.expire(&keys.lock, life);
        }
        if let (true, Some(t)) = (is_first, stored.fencing())
            && let Err(error) = self.mark_extended(keys, &stored, t, life)
        {
            // The marks failed, but the lock already lives longer. Its release relies on the
            // watermark, so the watermark must live longer too.
            self.prolong_watermark(keys, life);
            return Err(error);
        }
        Ok(Vote::Extended { expires_in: Duration::from_millis(life) })
    }

    fn inspect(&mut self, keys: &Keys) -> Result<Vote, KeyError> {
        Ok(match self.space.get(&keys.lock)? {
            Some(value) => Vote::Found(self.holding(keys, value)),
            None => Vote::Missing,
        })
    }

    /// Reads every lock of a set. If one cannot be read, its error is the vote.
    #[cold]
    fn inspect_set(&mut self, keys: &Keys) -> Result<Vote, KeyError> {
        let mut stand = Vec::new();
        for (at, lock) in keys.each().enumerate() {
            if let Vote::Found(holding) = self.inspect(lock)?.of_lock(at) {
                stand.push(holding);
            }
        }
        Ok(Vote::FoundOfSet(stand))
    }

    /// Marks the lock first and then the watermark, because the second write may fail for lack of
    /// memory. A marked lock with an unmarked watermark is safe. An unmarked lock with a marked
    /// watermark is not: the release of an unmarked lock does not touch the watermark, so the `+`
    /// would stay and let a late repair pass.
    fn mark_extended(
        &mut self,
        keys: &Keys,
        stored: &Record,
        t: FencingToken,
        life: u64,
    ) -> Result<(), KeyError> {
        self.space.set(&keys.lock, stored.extended().as_bytes().clone(), Expiry::Keep)?;
        if self
            .space
            .get(&keys.fence)?
            .is_none_or(|watermark| watermark_token(&watermark) == Some(t))
        {
            self.set_watermark(keys, extended_watermark(t), life)?;
        }
        Ok(())
    }

    /// T may be old, but the extension or reading that justifies the repair must be recent: `began`
    /// is its start. Otherwise the watermark of a later grant or release may have expired here.
    fn repair(
        &mut self,
        keys: &Keys,
        record: &Record,
        ttl: Ttl,
        began: u64,
    ) -> Result<Vote, KeyError> {
        let rules = self.settings.rules;
        let Some(t) = record.fencing() else { return Ok(error("the record has no T")) };
        let mut life = u64::from(ttl.millis());
        let now = self.space.now_micros();
        let max = self.max_skew_micros();
        if rules.clock_is_checked
            && (t.get().saturating_sub(now) > max || began.abs_diff(now) > max)
        {
            return Ok(clock_refusal());
        }
        if let Some(value) = self.space.get(&keys.lock)? {
            let is_same = value.starts_with(record.grant());
            let holding = self.holding(keys, value);
            // The record is marked as extended: the majority extended its copies while this node
            // did not vote. So this copy is extended too.
            if is_same && record.is_extended() {
                return self.extend(keys, record, ttl, began);
            }
            if is_same {
                let asked = ttl.duration();
                let is_shorter = holding.expires_in.is_some_and(|left| left < asked);
                if is_shorter {
                    self.space.expire(&keys.lock, life);
                    self.prolong_watermark(keys, life);
                }
                let expires_in = holding.expires_in.map_or(asked, |left| left.max(asked));
                return Ok(Vote::Extended { expires_in });
            }
            // Another record stands. Only a placeholder, which keeps the lock free from everybody,
            // gives way to this grant. A majority of the masters has this grant, so no other grant
            // can have a majority, and the placeholder protects none.
            if !holding.record.is_placeholder() {
                return Ok(Vote::Held(holding));
            }
            // The placeholder may stand for an earlier, longer lease of this same grant. So the
            // longer of the two lives counts.
            let left = holding
                .expires_in
                .map_or(0, |left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
            life = life.max(left);
        }
        if let Some(text) = self.space.get(&keys.fence)? {
            let Some(watermark) = watermark_token(&text) else {
                return Ok(error("ERR the watermark holds no number"));
            };
            if rules.watermark_is_checked && watermark >= t && !is_extended_watermark(&text, t) {
                return Ok(Vote::Stale { fence: watermark });
            }
        }
        let watermark =
            if record.is_extended() { extended_watermark(t) } else { watermark_text(t) };
        self.set_watermark(keys, watermark, life)?;
        self.space.set(&keys.lock, record.as_bytes().clone(), Expiry::In(life))?;
        Ok(Vote::Granted)
    }

    /// Deletes before it sets anything, because deleting needs no memory.
    #[inline]
    fn release(
        &mut self,
        keys: &Keys,
        record: &Record,
        scope: ReleaseScope,
    ) -> Result<Vote, KeyError> {
        let rules = self.settings.rules;
        let Some(t) = record.fencing() else { return Ok(error("the record has no T")) };
        let current = self.space.get(&keys.lock)?.map(Record::foreign);
        let mut is_same = false;
        let mut deleted = false;
        let is_exact = scope != ReleaseScope::Holder && rules.undo_is_exact;
        let is_exact_undo = scope == ReleaseScope::Proposal && rules.undo_is_exact;
        if let Some(current) = &current {
            is_same = current.as_bytes().starts_with(record.grant());
            // An undo spares an extended grant: another request of the same owner has confirmed the
            // grant by the extension, and relies on it.
            if is_exact_undo && is_same && current.is_extended() {
                return Ok(Vote::Held(self.holding(keys, current.as_bytes().clone())));
            }
            let is_own = is_same || !is_exact && current.owner_text() == record.owner_text();
            if is_own
                && (!rules.release_keeps_newer
                    || current.fencing().is_none_or(|stored| stored <= t))
            {
                self.space.delete(&keys.lock);
                deleted = true;
            }
            if is_same && !current.is_extended() {
                if scope == ReleaseScope::Proposal {
                    self.restore_watermark(keys, t);
                }
                return Ok(Vote::Released);
            }
        }
        if rules.release_leaves_a_tombstone {
            if !is_same
                && t.get().saturating_sub(self.space.now_micros()) > self.max_skew_micros() / 2
            {
                return Ok(clock_refusal());
            }
            // The lock may be deleted already. If the tombstone cannot be set, the release still
            // fails, so that the gateway repeats it. Otherwise the watermark would keep the mark of
            // an extension, and a late repair would set the lock again.
            self.set_tombstone(keys, t, is_same, is_exact_undo)?;
        }
        Ok(match current {
            _ if deleted => Vote::Released,
            Some(current) => Vote::Held(self.holding(keys, current.as_bytes().clone())),
            None => Vote::Missing,
        })
    }

    /// Replaces a grant by a placeholder, with the grant behind it. The watermark loses the mark of an
    /// extension, because a repair of the grant may be in flight and must be refused. The watermark
    /// is written before the lock: a marked lock with an unmarked watermark is safe.
    fn keep_free(
        &mut self,
        keys: &Keys,
        record: &Record,
        life: Ttl,
        began_micros: u64,
    ) -> Result<Vote, KeyError> {
        let life = self.left_of(life, began_micros);
        let stands =
            self.space.get(&keys.lock)?.is_some_and(|value| value.starts_with(record.grant()));
        let Some(t) = record.fencing().filter(|_| stands && life > 0) else {
            return self.release(keys, record, ReleaseScope::Holder);
        };
        // A release of another owner may have left a larger T, or one that must live longer.
        let stands = self.space.get(&keys.fence)?;
        let left = stands.as_ref().and_then(|_| self.space.time_to_live(&keys.fence));
        let last = stands.and_then(|text| watermark_token(&text));
        let watermark = last.map_or(t, |last| last.max(t));
        let watermark_life = left.unwrap_or_default().saturating_sub(self.grace_millis()).max(life);
        // An expiry needs no memory. A master lets the other writes of the operation pass after it.
        self.space.expire(&keys.lock, life);
        self.prolong_watermark(keys, watermark_life);
        self.set_watermark(keys, watermark_text(watermark), watermark_life)?;
        let hold = Record::hold(record, t);
        self.space.set(&keys.lock, hold.as_bytes().clone(), Expiry::In(life))?;
        Ok(Vote::Released)
    }

    /// Leaves the watermark at T or above. A release turns `T+` into `T`, because a repair of this
    /// grant may be in flight and must be refused. An undo (`keeps_mark`) leaves `T+` as it is:
    /// another request has extended and so confirmed this grant, and its repair may pass. A
    /// provisional watermark loses its `!` and what follows. Otherwise the undo of that proposal
    /// would remove this tombstone. A restored watermark loses its end, which may be too early.
    fn set_tombstone(
        &mut self,
        keys: &Keys,
        t: FencingToken,
        is_own: bool,
        keeps_mark: bool,
    ) -> Result<(), KeyError> {
        let stands = self.space.get(&keys.fence)?;
        let watermark = match &stands {
            Some(text)
                if watermark_token(text).is_some_and(|watermark| watermark >= t)
                    && (keeps_mark || !is_extended_watermark(text, t)) =>
            {
                let lasting = lasting_part(text);
                if lasting.len() == text.len() {
                    // The existing watermark already refuses what a tombstone would refuse. It must
                    // outlive operations in flight, as a tombstone would.
                    self.prolong_watermark(keys, 0);
                    return Ok(());
                }
                text.slice_ref(lasting)
            }
            Some(_) | None => watermark_text(t),
        };
        // The watermark may guard another owner's lock, and must outlive that lock.
        let left = stands
            .filter(|_| !is_own)
            .and_then(|_| self.space.time_to_live(&keys.fence))
            .unwrap_or_default();
        let life = left.saturating_sub(self.grace_millis());
        self.set_watermark(keys, watermark, life)
    }

    /// Restores the watermark that stood before a failed proposal, until its end. No client has seen
    /// that proposal's T. No other rule lowers a watermark.
    fn restore_watermark(&mut self, keys: &Keys, t: FencingToken) {
        let Ok(Some(last)) = self.space.get(&keys.fence) else { return };
        let Some(earlier) = last.strip_prefix(format!("{t}!").as_bytes()) else { return };
        let now = self.space.now_micros() / 1_000;
        let expiry = match watermark_end(earlier) {
            Some(end) => Expiry::In(end.saturating_mul(1_000).saturating_sub(now)),
            // Somebody else has written it.
            None => Expiry::Keep,
        };
        if earlier.is_empty() || expiry == Expiry::In(0) {
            return self.space.delete(&keys.fence);
        }
        // Without memory the set fails, and the higher watermark stays. It refuses more than it
        // must, which is safe.
        let _ = self.space.set(&keys.fence, last.slice_ref(earlier), expiry);
    }

    /// The end of a watermark over which a proposal is granted now, in seconds since 1970. The lock
    /// was free, so its watermark is needed no longer than the tombstone of a release that arrives
    /// now.
    fn earlier_end(&self) -> u64 {
        self.space.now_micros() / 1_000_000 + self.grace_millis().div_ceil(1_000) + 1
    }

    /// Sets the watermark for `life` milliseconds (the life of the lock) plus the grace.
    fn set_watermark(&mut self, keys: &Keys, text: Bytes, life: u64) -> Result<(), KeyError> {
        self.space.set(&keys.fence, text, Expiry::In(life.saturating_add(self.grace_millis())))
    }

    /// Needs no memory.
    fn prolong_watermark(&mut self, keys: &Keys, life: u64) {
        let life = life.saturating_add(self.grace_millis());
        if self.space.time_to_live(&keys.fence).is_some_and(|left| left < life) {
            self.space.expire(&keys.fence, life);
        }
    }

    fn grace_millis(&self) -> u64 {
        u64::try_from(self.settings.fence_grace.as_millis()).unwrap_or(u64::MAX)
    }

    fn max_skew_micros(&self) -> u64 {
        self.settings.max_clock_skew.as_micros() as u64
    }

    fn holding(&mut self, keys: &Keys, value: Bytes) -> Holding {
        let expires_in = self.space.time_to_live(&keys.lock).map(Duration::from_millis);
        Holding { record: Record::foreign(value), expires_in, at: 0 }
    }
}

fn watermark_text(t: FencingToken) -> Bytes {
    Bytes::from(t.to_string())
}

/// The watermark of a lock that was extended here and that no release has reached since.
fn extended_watermark(t: FencingToken) -> Bytes {
    Bytes::from(format!("{t}+"))
}

/// Whether this is such a watermark. It may have an end behind the mark.
pub(super) fn is_extended_watermark(text: &[u8], t: FencingToken) -> bool {
    text.strip_prefix(&t.text()[..]).is_some_and(|marks| marks.starts_with(b"+"))
}

/// The watermark of a proposal: `T!`, and the earlier watermark with its end, `T!S@end` or
/// `T!S+@end`. The end of a restored watermark stays as it is. Otherwise each further proposal would
/// prolong a watermark that keeps a repair out.
fn provisional_watermark(t: FencingToken, earlier: Option<(&[u8], u64)>) -> Bytes {
    let mut text = Vec::with_capacity(2 * FencingToken::TEXT_LEN + 13);
    text.extend_from_slice(&t.text());
    text.push(b'!');
    if let Some((earlier, end)) = earlier {
        let lasting = lasting_part(earlier);
        let is_restored = earlier.get(lasting.len()) == Some(&b'@');
        text.extend_from_slice(if is_restored { earlier } else { lasting });
        if !is_restored {
            text.push(b'@');
            text.extend_from_slice(end.to_string().as_bytes());
        }
    }
    text.into()
}

/// A watermark without what an undo would restore, and without its end.
fn lasting_part(text: &[u8]) -> &[u8] {
    let length = FencingToken::TEXT_LEN;
    let is_extended = text.get(length) == Some(&b'+');
    &text[..text.len().min(length + usize::from(is_extended))]
}

/// The end of a restored watermark, in seconds since 1970.
fn watermark_end(text: &[u8]) -> Option<u64> {
    let at = text.iter().rposition(|byte| *byte == b'@')?;
    let digits = text[at + 1..].iter().all(u8::is_ascii_digit).then_some(&text[at + 1..])?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The T of a watermark, without its marks; `None` when the text begins with no token.
fn watermark_token(text: &[u8]) -> Option<FencingToken> {
    FencingToken::parse(text.get(..FencingToken::TEXT_LEN)?)
}

fn clock_refusal() -> Vote {
    let detail = "the operation's time is too far from the node's own time";
    Vote::Failed(Failure::new(Reason::Clock, Effect::None, detail))
}

fn error(detail: &str) -> Vote {
    Vote::Failed(Failure::new(Reason::Error, Effect::None, detail))
}

macro_rules! safety_rules {
    ($($(#[$doc:meta])+ $rule:ident)+) => {
        /// The rules on which the safety of locks and fencing tokens rests. All are on. A build
        /// with the feature `mutation-testing` can switch single rules off, to prove that the tests
        /// notice.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct SafetyRules {
            $($(#[$doc])+ pub $rule: bool,)+
        }

        impl SafetyRules {
            /// Every rule on, as shipped.
            pub const ALL: Self = Self { $($rule: true,)+ };

            /// The names of all rules.
            pub const NAMES: &[&str] = &[$(stringify!($rule)),+];

            /// The same rules without the named one. `None` if no rule has this name.
            #[must_use]
            pub fn without(mut self, name: &str) -> Option<Self> {
                match name {
                    $(stringify!($rule) => self.$rule = false,)+
                    _ => return None,
                }
                Some(self)
            }
        }
    };
}

safety_rules! {
    /// A node never overwrites a lock, not even for its owner.
    lock_is_kept
    /// A release leaves the watermark at T or above, so that no late repair of the released grant
    /// passes it.
    release_leaves_a_tombstone
    /// A release deletes only a lock whose T is not newer than its own.
    release_keeps_newer
    /// The undo of a proposal deletes only exactly its grant, and only if that grant was not
    /// extended.
    undo_is_exact
    /// A node refuses a T too far from its own time.
    clock_is_checked
    /// A node grants only a T above the lock's watermark.
    watermark_is_checked
    /// A node that refuses a lock of a set keeps none of the set's locks.
    refused_set_is_undone
    /// The life that an extension or a time to hold sets counts from when it was asked for.
    lives_begin_when_asked
    /// A node refuses acquires, extensions and repairs unless the marker that admitted it stands.
    marker_is_checked
    /// A node whose memory of locks is suspect is quarantined before it votes.
    quarantine_is_waited
    /// A quarantine lasts by the largest TTL bound that the gateway has seen in a marker.
    larger_bound_is_waited
    /// A quarantine ends only when the gateway has probed a majority of the nodes since it began.
    majority_is_probed
    /// A node votes only for gateways whose `max_ttl` is within the limit of its marker.
    limit_is_checked
    /// The limit in markers rises only when the bound of every marker has risen.
    bounds_rise_first
    /// Apart from a bootstrap, a quarantine ends early only after recovery has given the node every
    /// lost lock that may still be held.
    lost_locks_are_recovered
    /// A process stops voting when its name leads to another process.
    name_is_followed
    /// A process that restarts with its data waits until no gateway can still talk to its
    /// predecessor.
    returned_waits
    /// A process that restarts with its data is quarantined if it lacks, or may lack, calls that
    /// another process has answered.
    answered_calls_are_known
    /// A node whose clock runs faster than the drift factor allows is quarantined.
    rate_is_checked
    /// A successful extension repairs the lock on nodes that lost it.
    missing_is_repaired
    /// A node that votes again gets the locks that were granted while it was away.
    admitted_is_caught_up
}

impl Default for SafetyRules {
    fn default() -> Self {
        Self::ALL
    }
}

/// How long a watermark outlives its lock, or the release that left it: 2 × `max_clock_skew` plus
/// the longest round.
///
/// The watermark refuses late operations on the same lock. Each late operation contains a time: an
/// acquire its T, a repair the start of its extension. The node compares this time with its own
/// clock, and refuses the operation once the time is more than `max_clock_skew` behind.
///
/// A watermark refuses only acquires with its own T or a smaller one. When the watermark is set,
/// its T is at most `max_clock_skew` ahead of the node's clock. So after 2 × `max_clock_skew` the
/// clock check refuses every acquire that the watermark would refuse.
///
/// A repair needs one round more ([`longest_round`]). Its extension may begin while the release that
/// sets the watermarks is still in flight, so up to one round after a watermark was set.
///
/// A node whose clock runs ahead ends its watermarks early. The gateway notices such a clock, and
/// quarantines the node as after a loss of data.
pub fn fence_grace(max_clock_skew: Duration) -> Duration {
    max_clock_skew * 2 + longest_round(max_clock_skew)
}

/// The part of the cluster's configuration that a node needs.
#[derive(Debug, Clone, Copy)]
pub struct NodeSettings {
    /// A T further than this from the node's own time is refused.
    pub(crate) max_clock_skew: Duration,
    /// How long a watermark outlives its lock, see [`fence_grace`].
    pub(crate) fence_grace: Duration,
    rules: SafetyRules,
}

impl NodeSettings {
    /// Sets `max_clock_skew`, and the grace of watermarks that follows from it.
    pub fn with_max_clock_skew(self, max_clock_skew: Duration) -> Self {
        Self { max_clock_skew, fence_grace: fence_grace(max_clock_skew), ..self }
    }

    /// Sets a grace of watermarks other than [`fence_grace`].
    pub const fn with_fence_grace(self, fence_grace: Duration) -> Self {
        Self { fence_grace, ..self }
    }

    /// Switches single rules off, to prove that the tests notice.
    #[cfg(feature = "mutation-testing")]
    pub const fn with_rules(self, rules: SafetyRules) -> Self {
        Self { rules, ..self }
    }

    /// The rules that are on; all of them in a shipped build.
    pub const fn rules(&self) -> SafetyRules {
        self.rules
    }

    /// How long a node must not vote after it may have lost locks with TTLs up to `max_ttl`.
    pub fn quarantine(&self, max_ttl: Duration) -> Duration {
        if self.rules.quarantine_is_waited {
            quarantine(max_ttl, self.max_clock_skew)
        } else {
            Duration::ZERO
        }
    }

    /// The rules about the TTLs in markers.
    pub const fn bound_rules(&self) -> BoundRules {
        let SafetyRules { larger_bound_is_waited, majority_is_probed, limit_is_checked, .. } =
            self.rules;
        BoundRules { larger_bound_is_waited, majority_is_probed, limit_is_checked }
    }

    /// How long a node must not vote after a restart with all its data.
    pub fn returns_after(&self) -> Duration {
        if self.rules.returned_waits { NAME_MOVES_WITHIN } else { Duration::ZERO }
    }
}

impl Default for NodeSettings {
    /// `max_clock_skew` is 2 s.
    fn default() -> Self {
        let max_clock_skew = Duration::from_secs(2);
        Self { max_clock_skew, fence_grace: fence_grace(max_clock_skew), rules: SafetyRules::ALL }
    }
}
