//! The rules of one node: what an operation does to the keys of a lock, and what is answered. The same rules stand in
//! `node/locks.lua`, which real masters run that have not loaded the module; a differential test holds the two together.
//!
//! They need no more than a few commands over a key space ([`KeySpace`]): that of an in-memory node, of a simulated master
//! that runs out of memory between two writes, or of a real one that has loaded the module. What must happen in one step is the caller's: it runs one operation at a
//! time.

use std::time::Duration;

use bytes::Bytes;

use super::eligibility::{NAME_MOVES_WITHIN, quarantine};
use super::op::{Effect, Failure, Holding, Keys, Op, Reason, ReleaseScope, Vote};
use super::record::Record;
use crate::model::types::{FencingToken, Ttl};
use crate::model::validity::longest_round;

/// The keys of one node, as the rules see them. Values are texts, times to live are in milliseconds.
pub trait KeySpace {
    /// The node's own wall clock, in microseconds since 1970.
    fn now_micros(&self) -> u64;

    /// The value of a key that has not expired.
    ///
    /// # Errors
    /// What stands there is no text.
    fn get(&mut self, key: &Bytes) -> Result<Option<Bytes>, KeyError>;

    /// How long a key still lives; `None` when it has no expiry.
    fn time_to_live(&mut self, key: &Bytes) -> Option<u64>;

    /// Sets a key, whatever stood there.
    ///
    /// # Errors
    /// Nothing was set: there is no memory left.
    fn set(&mut self, key: &Bytes, value: Bytes, expiry: Expiry) -> Result<(), KeyError>;

    /// Gives a key another time to live. Takes no memory.
    fn expire(&mut self, key: &Bytes, millis: u64);

    /// Deletes a key. Takes no memory.
    fn delete(&mut self, key: &Bytes);
}

/// How long a key that is set lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// So many milliseconds from now.
    In(u64),
    /// For as long as it would have lived anyway.
    Keep,
    /// Until it is deleted.
    Never,
}

/// Why a key could not be read or set, in the words of Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// There is no memory left for it.
    #[error("OOM command not allowed when used memory > 'maxmemory'.")]
    OutOfMemory,
    /// It holds no text, and nothing of ours.
    #[error("WRONGTYPE Operation against a key holding the wrong kind of value")]
    WrongType,
    /// The caller may not use it.
    #[error("NOPERM No permissions to access a key")]
    Forbidden,
}

impl From<KeyError> for Vote {
    /// What the operation had set before may stand.
    fn from(error: KeyError) -> Self {
        Self::Failed(Failure::new(Reason::Error, Effect::Possible, error.to_string()))
    }
}

/// Runs one lock operation. `admitted` says whether the marker stands that the gateway has shown.
pub fn run(space: &mut impl KeySpace, settings: &NodeSettings, admitted: bool, op: &Op) -> Vote {
    let admitted = admitted || !settings.rules.marker_is_checked;
    let mut node = LockStateMachine { space, settings };
    let vote = match op {
        Op::Acquire { .. } | Op::Extend { .. } | Op::Repair { .. } if !admitted => {
            let detail = "the node's marker is missing or differs";
            Ok(Vote::Failed(Failure::new(Reason::Quarantined, Effect::None, detail)))
        }
        Op::Acquire { keys, record, ttl, .. } => node.acquire(keys, record, *ttl),
        Op::Extend { keys, record, ttl } => node.extend(keys, record, *ttl),
        Op::Repair { keys, record, ttl, began_micros } => {
            node.repair(keys, record, *ttl, *began_micros)
        }
        // Needs no eligibility: taking a lock away can never produce a second holder.
        Op::Release { keys, record, scope, .. } => node.release(keys, record, *scope),
        Op::Inspect { keys } => node.inspect(keys),
    };
    vote.unwrap_or_else(Vote::from)
}

struct LockStateMachine<'a, S> {
    space: &'a mut S,
    settings: &'a NodeSettings,
}

impl<S: KeySpace> LockStateMachine<'_, S> {
    fn acquire(&mut self, keys: &Keys, record: &Record, ttl: Ttl) -> Result<Vote, KeyError> {
        let rules = self.settings.rules;
        let Some(t) = record.fencing() else { return Ok(error("the record has no T")) };
        if rules.clock_is_checked && t.get().abs_diff(self.space.now_micros()) > self.max_offset() {
            return Ok(clock_refusal());
        }
        let last = self.space.get(&keys.fence)?;
        let fence = last.as_ref().map(|text| fence_of(text));
        if fence == Some(None) {
            return Ok(error("ERR the fence holds no number"));
        }
        if let Some(value) = self.space.get(&keys.lock)? {
            let is_own = Record::foreign(value.clone()).owner_text() == record.owner_text();
            if !is_own || rules.lock_is_kept {
                let holding = self.holding(keys, value);
                return Ok(if is_own { Vote::Yours(holding) } else { Vote::Held(holding) });
            }
        }
        if let Some(fence) =
            fence.flatten().filter(|fence| rules.watermark_is_checked && *fence >= t)
        {
            return Ok(Vote::Stale { fence });
        }
        self.space.set(
            &keys.lock,
            record.as_bytes().clone(),
            Expiry::In(u64::from(ttl.millis())),
        )?;
        let fence = match last {
            None => format!("{t}!").into(),
            Some(last) if &last[FencingToken::TEXT_LEN..] == b"+" => {
                [format!("{t}!").as_bytes(), &last].concat().into()
            }
            Some(_) => fence_text(t),
        };
        if let Err(error) = self.set_fence(keys, fence, u64::from(ttl.millis())) {
            self.space.delete(&keys.lock);
            return Err(error);
        }
        Ok(Vote::Granted)
    }

    fn extend(&mut self, keys: &Keys, record: &Record, ttl: Ttl) -> Result<Vote, KeyError> {
        let Some(value) = self.space.get(&keys.lock)? else { return Ok(Vote::Missing) };
        if !value.starts_with(record.grant()) {
            return Ok(Vote::Held(self.holding(keys, value)));
        }
        let stored = Record::foreign(value);
        let is_first = !stored.is_extended();
        let left = self.space.time_to_live(&keys.lock);
        let asked = u64::from(ttl.millis());
        let life = left.map_or(asked, |left| left.max(asked));
        if is_first || left.is_none_or(|left| left < asked) {
            // Before the marks: it takes no memory.
            self.space.expire(&keys.lock, life);
        }
        if let (true, Some(t)) = (is_first, stored.fencing())
            && let Err(error) = self.mark(keys, &stored, t, life)
        {
            // The lock lives longer all the same, and its release counts on the fence.
            self.prolong_fence(keys, life);
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

    /// The lock before the fence: the release of an unmarked lock counts on an unmarked fence.
    fn mark(
        &mut self,
        keys: &Keys,
        stored: &Record,
        t: FencingToken,
        life: u64,
    ) -> Result<(), KeyError> {
        self.space.set(&keys.lock, stored.extended().as_bytes().clone(), Expiry::Keep)?;
        if self.space.get(&keys.fence)?.is_none_or(|fence| fence_of(&fence) == Some(t)) {
            self.set_fence(keys, marked(t), life)?;
        }
        Ok(())
    }

    /// T may be old, but not the extension that vouches for it: the fences that tell of what has happened since have an end.
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
        let max = self.max_offset();
        if rules.clock_is_checked
            && (t.get().saturating_sub(now) > max || began.abs_diff(now) > max)
        {
            return Ok(clock_refusal());
        }
        if let Some(value) = self.space.get(&keys.lock)? {
            let same = value.starts_with(record.grant());
            let holding = self.holding(keys, value);
            if same {
                let asked = ttl.duration();
                let is_shorter = holding.expires_in.is_some_and(|left| left < asked);
                if is_shorter {
                    // The majority's copies live longer: they were extended while this node had no vote.
                    self.space.expire(&keys.lock, life);
                    self.prolong_fence(keys, life);
                }
                let expires_in = holding.expires_in.map_or(asked, |left| left.max(asked));
                return Ok(Vote::Extended { expires_in });
            }
            // A majority of the others has this grant, so no other that the record of nobody stands for can have one.
            if !holding.record.is_nobodys() {
                return Ok(Vote::Held(holding));
            }
            // An earlier lease of this very grant may be longer than what vouches for it.
            let left = holding
                .expires_in
                .map_or(0, |left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX));
            life = life.max(left);
        }
        if let Some(text) = self.space.get(&keys.fence)? {
            let Some(fence) = fence_of(&text) else {
                return Ok(error("ERR the fence holds no number"));
            };
            if rules.watermark_is_checked && fence >= t && text != marked(t) {
                return Ok(Vote::Stale { fence });
            }
        }
        let fence = if record.is_extended() { marked(t) } else { fence_text(t) };
        self.set_fence(keys, fence, life)?;
        self.space.set(&keys.lock, record.as_bytes().clone(), Expiry::In(life))?;
        Ok(Vote::Granted)
    }

    /// Deletes before it sets anything, which works without memory.
    fn release(
        &mut self,
        keys: &Keys,
        record: &Record,
        scope: ReleaseScope,
    ) -> Result<Vote, KeyError> {
        let rules = self.settings.rules;
        let Some(t) = record.fencing() else { return Ok(error("the record has no T")) };
        let current = self.space.get(&keys.lock)?.map(Record::foreign);
        let mut same = false;
        let mut deleted = false;
        let exact = scope != ReleaseScope::Holder && rules.undo_is_exact;
        let spares = scope == ReleaseScope::Proposal && rules.undo_is_exact;
        if let Some(current) = &current {
            same = current.as_bytes().starts_with(record.grant());
            // Confirmed: another request of the same owner counts on it.
            if spares && same && current.is_extended() {
                return Ok(Vote::Held(self.holding(keys, current.as_bytes().clone())));
            }
            let mine = same || !exact && current.owner_text() == record.owner_text();
            if mine
                && (!rules.release_keeps_newer
                    || current.fencing().is_none_or(|stored| stored <= t))
            {
                self.space.delete(&keys.lock);
                deleted = true;
            }
            if same && !current.is_extended() {
                if scope == ReleaseScope::Proposal {
                    self.take_fence_back(keys, t);
                }
                return Ok(Vote::Released);
            }
        }
        if rules.release_leaves_a_tombstone {
            if !same && t.get().saturating_sub(self.space.now_micros()) > self.max_offset() / 2 {
                return Ok(clock_refusal());
            }
            match self.set_barrier(keys, t, same, spares) {
                // What was deleted is gone, if not for good.
                Err(KeyError::OutOfMemory) if deleted => {}
                set => set?,
            }
        }
        Ok(match current {
            _ if deleted => Vote::Released,
            Some(current) => Vote::Held(self.holding(keys, current.as_bytes().clone())),
            None => Vote::Missing,
        })
    }

    /// The mark of this T goes: a repair may be in flight, which the undo of a try has nothing against. A fence that could be
    /// taken back stays from now on.
    fn set_barrier(
        &mut self,
        keys: &Keys,
        t: FencingToken,
        own: bool,
        keeps_mark: bool,
    ) -> Result<(), KeyError> {
        let stands = self.space.get(&keys.fence)?;
        let fence = match stands.as_ref().and_then(|text| fence_of(text)) {
            Some(fence) if fence >= t && (keeps_mark || stands != Some(marked(t))) => {
                let provisional = stands
                    .as_ref()
                    .is_some_and(|text| text.get(FencingToken::TEXT_LEN) == Some(&b'!'));
                if !provisional {
                    // What the release counts on must not end before what was on its way.
                    self.prolong_fence(keys, 0);
                    return Ok(());
                }
                fence
            }
            Some(_) | None => t,
        };
        // What stood there may be for a lock of somebody else, which it has to outlive.
        let left = stands
            .filter(|_| !own)
            .and_then(|_| self.space.time_to_live(&keys.fence))
            .unwrap_or_default();
        let life = left.saturating_sub(self.fence_grace());
        self.set_fence(keys, fence_text(fence), life)
    }

    /// The only rule that lowers a fence: nobody has seen the T of a try that failed.
    fn take_fence_back(&mut self, keys: &Keys, t: FencingToken) {
        let Ok(Some(last)) = self.space.get(&keys.fence) else { return };
        match last.strip_prefix(format!("{t}!").as_bytes()) {
            Some([]) => self.space.delete(&keys.fence),
            // Without memory the higher fence stays, which refuses more than it must.
            Some(before) => {
                let _ = self.space.set(&keys.fence, Bytes::copy_from_slice(before), Expiry::Keep);
            }
            None => {}
        }
    }

    /// For as long as the lock lives, in milliseconds, and its reasons after that.
    fn set_fence(&mut self, keys: &Keys, text: Bytes, life: u64) -> Result<(), KeyError> {
        self.space.set(&keys.fence, text, Expiry::In(life.saturating_add(self.fence_grace())))
    }

    /// Takes no memory.
    fn prolong_fence(&mut self, keys: &Keys, life: u64) {
        let life = life.saturating_add(self.fence_grace());
        if self.space.time_to_live(&keys.fence).is_some_and(|left| left < life) {
            self.space.expire(&keys.fence, life);
        }
    }

    fn fence_grace(&self) -> u64 {
        u64::try_from(self.settings.fence_grace.as_millis()).unwrap_or(u64::MAX)
    }

    fn max_offset(&self) -> u64 {
        self.settings.max_clock_skew.as_micros() as u64
    }

    fn holding(&mut self, keys: &Keys, value: Bytes) -> Holding {
        let expires_in = self.space.time_to_live(&keys.lock).map(Duration::from_millis);
        Holding { record: Record::foreign(value), expires_in }
    }
}

fn fence_text(t: FencingToken) -> Bytes {
    Bytes::from(t.to_string())
}

/// A fence at the T of a lock that was extended here and that no release has reached since.
fn marked(t: FencingToken) -> Bytes {
    Bytes::from(format!("{t}+"))
}

/// The T of a fence, without its marks; `None` when it begins with no number.
fn fence_of(text: &[u8]) -> Option<FencingToken> {
    FencingToken::parse(text.get(..FencingToken::TEXT_LEN)?)
}

fn clock_refusal() -> Vote {
    let detail = "the fencing token is too far from the node's own time";
    Vote::Failed(Failure::new(Reason::Clock, Effect::None, detail))
}

fn error(detail: &str) -> Vote {
    Vote::Failed(Failure::new(Reason::Error, Effect::None, detail))
}

/// The rules that the safety of locks and fencing tokens rests on. Always all on; a build with the feature
/// `mutation-testing` can switch single ones off, to prove that the tests notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SafetyRules {
    /// A node never overwrites a lock, not even for its owner.
    pub lock_is_kept: bool,
    /// A release leaves the fence at T or above, where no repair passes it.
    pub release_leaves_a_tombstone: bool,
    /// A release deletes only a lock whose T is not newer than its own.
    pub release_keeps_newer: bool,
    /// The undo of a try takes nothing but exactly its grant, and not once it was extended.
    pub undo_is_exact: bool,
    /// A node refuses a T too far from its own time.
    pub clock_is_checked: bool,
    /// A node grants only a T larger than the last it has stored for the lock.
    pub watermark_is_checked: bool,
    /// A node refuses lock operations unless the marker of its eligibility stands.
    pub marker_is_checked: bool,
    /// A node whose memory of locks is suspect is quarantined before it votes.
    pub quarantine_is_waited: bool,
    /// A node whose quarantine is cut short was given back what the others know of the locks that it forgot.
    pub lost_locks_are_recovered: bool,
    /// A process votes no longer when its name leads to another one.
    pub name_is_followed: bool,
    /// A process that has come back with its data votes when no gateway can still talk to the process before it.
    pub returned_waits: bool,
    /// It is quarantined when a gateway saw the process before it alive beside it.
    pub two_alive_are_noticed: bool,
    /// A node whose clock runs faster than promised is quarantined.
    pub rate_is_checked: bool,
    /// A successful extension sets the lock again on nodes that lost it.
    pub missing_is_repaired: bool,
    /// A node that votes again gets the locks that were granted while it was away.
    pub admitted_is_caught_up: bool,
}

impl SafetyRules {
    /// Every rule on: what ships.
    pub const ALL: Self = Self {
        lock_is_kept: true,
        release_leaves_a_tombstone: true,
        release_keeps_newer: true,
        undo_is_exact: true,
        clock_is_checked: true,
        watermark_is_checked: true,
        marker_is_checked: true,
        quarantine_is_waited: true,
        lost_locks_are_recovered: true,
        name_is_followed: true,
        returned_waits: true,
        two_alive_are_noticed: true,
        rate_is_checked: true,
        missing_is_repaired: true,
        admitted_is_caught_up: true,
    };
}

impl Default for SafetyRules {
    fn default() -> Self {
        Self::ALL
    }
}

/// How long a fence outlives the lock that it stands for, or the release.
///
/// It is for what may still come for the same lock, and all of that bears a time which the node compares with its own: an
/// acquire its T, a repair when its extension began. Both are refused when they are more than D behind. Nothing is fenced that
/// is more than D ahead. So after 2 D no acquire comes that a fence would refuse: the node's clock refuses them. A repair may
/// rest on an extension that began as late as a release ended, so after one more round ([`longest_round`]), and `2 D` later it
/// is refused too. A clock that runs ahead, so that fences end early, is noticed and quarantined like a loss of data.
pub fn fence_grace(max_clock_skew: Duration) -> Duration {
    max_clock_skew * 2 + longest_round(max_clock_skew)
}

/// What a node needs to know of the cluster's configuration.
#[derive(Debug, Clone, Copy)]
pub struct NodeSettings {
    /// D: a T further than this from the node's own time is refused.
    pub(crate) max_clock_skew: Duration,
    /// How long a fence outlives what it is for, see [`fence_grace`].
    pub(crate) fence_grace: Duration,
    rules: SafetyRules,
}

impl NodeSettings {
    /// With another D.
    pub fn with_max_clock_offset(self, max_clock_skew: Duration) -> Self {
        Self { max_clock_skew, fence_grace: fence_grace(max_clock_skew), ..self }
    }

    /// With fences that outlive what they are for by another time than [`fence_grace`].
    pub const fn with_fence_grace(self, fence_grace: Duration) -> Self {
        Self { fence_grace, ..self }
    }

    /// With only some of the rules on, to prove that the tests notice.
    #[cfg(feature = "mutation-testing")]
    pub const fn with_rules(self, rules: SafetyRules) -> Self {
        Self { rules, ..self }
    }

    /// Which rules are on; all of them in a build that ships.
    pub const fn rules(&self) -> SafetyRules {
        self.rules
    }

    /// How long a node gives no votes that may have lost locks with TTLs up to this.
    pub fn quarantine(&self, max_ttl: Duration) -> Duration {
        if self.rules.quarantine_is_waited {
            quarantine(max_ttl, self.max_clock_skew)
        } else {
            Duration::ZERO
        }
    }

    /// How long a node gives no votes that was restarted with all its data.
    pub fn returns_after(&self) -> Duration {
        if self.rules.returned_waits { NAME_MOVES_WITHIN } else { Duration::ZERO }
    }
}

impl Default for NodeSettings {
    /// D = 2 s.
    fn default() -> Self {
        let max_clock_skew = Duration::from_secs(2);
        Self { max_clock_skew, fence_grace: fence_grace(max_clock_skew), rules: SafetyRules::ALL }
    }
}
