//! One master in its smallest form: one lock name, one-byte tokens, and no time except the model's
//! events.
//!
//! This node gives the same answers as the scripts. A property test (`tests/conformance.rs`)
//! compares it with `MemoryNode`, and another test compares `MemoryNode` with a real redis-server.
//! While those tests pass, a proof about this node is also one about the scripts.
//!
//! This node leaves out values of other clients, errors, and the text for people in a record.

use redlock_core::node::ReleaseScope;

use crate::rules::Rules;

/// A fencing token. Real tokens are microseconds; only their order matters.
pub type Token = u8;

/// Lower than every token.
pub const NO_TOKEN: Token = 0;
/// A token from a gateway whose clock is more than `max_clock_skew` ahead. Every node refuses it if
/// clocks are checked.
pub const FAR: Token = 15;

/// The contenders for the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owner {
    /// The owner that may ask a second time.
    A,
    /// The owner that asks once.
    B,
    /// The owner of records that keep everybody out.
    Nobody,
}

/// A lock as a node stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lock {
    pub owner: Owner,
    /// The token of its grant.
    pub token: Token,
    /// Tells two grants apart that have the same owner and token.
    pub nonce: u8,
    /// Whether it was ever extended.
    pub extended: bool,
    /// The leases that gave this lock its time to live, one bit each. The key expires after all of
    /// them.
    pub guards: u8,
}

/// What one master stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node {
    /// Whether its admitting marker stands.
    pub admitted: bool,
    pub lock: Option<Lock>,
    /// The token watermark (the `:fence` key), or [`NO_TOKEN`] if there is none.
    pub watermark: Token,
    /// The mark of the watermark.
    pub mark: Mark,
    /// Extensions and readings, one bit each, whose repairs the node's clock refuses once this
    /// watermark has expired.
    pub outlasts: u8,
    /// Whether an undo has set the watermark back. Its end stands then.
    pub restored: bool,
}

/// The mark behind the T of a watermark. It says which later operations may change the watermark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mark {
    /// No mark: no undo sets the watermark back, and no repair passes it.
    Plain,
    /// `+`: the lock with this T was extended and has not been released.
    Extended,
    /// `!`: the undo of the proposal that set it may set the watermark back to this one. `None`
    /// removes the watermark.
    Provisional(Option<Earlier>),
}

/// The watermark before a proposal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Earlier {
    pub token: Token,
    /// Whether it had the mark of an extension.
    pub extended: bool,
    /// As [`Node::outlasts`]. It counts from the first proposal over this watermark: a later one
    /// does not prolong it.
    pub outlasts: u8,
}

/// The tokens that a node accepts for an acquire: those above `oldest` and below [`FAR`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The newest token that is too old.
    pub oldest: Token,
    /// The extensions and readings that have begun, one bit each. Zero in models whose watermarks
    /// never end.
    pub begun: u8,
}

impl From<Token> for Window {
    /// The window of a model whose watermarks never end.
    fn from(oldest: Token) -> Self {
        Self { oldest, begun: 0 }
    }
}

/// A node's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vote {
    /// The lock was set, with exactly this T.
    Granted,
    /// Another grant of the same owner stands.
    Yours(Lock),
    /// Acquire: another owner's lock stands. Extension or release: another grant stands.
    Held(Lock),
    /// The watermark is at T or above.
    Stale(Token),
    Extended,
    /// The owner's lock was deleted.
    Released,
    Missing,
    /// The admitting marker does not stand.
    Quarantined,
    /// T is too far from the node's time.
    Clock,
}

impl Lock {
    /// Whether both have the same owner, token and nonce.
    pub fn is(&self, other: &Self) -> bool {
        (self.owner, self.token, self.nonce) == (other.owner, other.token, other.nonce)
    }

    /// A record of nobody, which keeps everybody out. It stands for one or more grants, and has the
    /// largest of their tokens.
    pub const fn blocker(token: Token, guards: u8) -> Self {
        Self { owner: Owner::Nobody, token, nonce: 0, extended: false, guards }
    }
}

impl Default for Node {
    fn default() -> Self {
        Self {
            admitted: true,
            lock: None,
            watermark: NO_TOKEN,
            mark: Mark::Plain,
            outlasts: 0,
            restored: false,
        }
    }
}

impl Node {
    /// Sets the lock if it is free and T is above the watermark.
    pub fn acquire(&mut self, rules: &Rules, window: Window, asked: Lock) -> Vote {
        if self.refuses(rules) {
            return Vote::Quarantined;
        }
        if rules.clock_is_checked && (asked.token == FAR || asked.token <= window.oldest) {
            return Vote::Clock;
        }
        match self.lock {
            Some(other) if other.owner != asked.owner => return Vote::Held(other),
            Some(own) if rules.lock_is_kept => return Vote::Yours(own),
            Some(_) | None => {}
        }
        if rules.watermark_is_checked && self.watermark >= asked.token {
            return Vote::Stale(self.watermark);
        }
        self.lock = Some(Lock { extended: false, ..asked });
        // The lock was free, so its watermark is needed no longer than the tombstone of a release
        // that arrives now.
        let earlier = (self.watermark != NO_TOKEN).then_some(Earlier {
            token: self.watermark,
            extended: self.mark == Mark::Extended,
            outlasts: if self.restored { self.outlasts } else { window.begun },
        });
        self.set_watermark(asked.token, Mark::Provisional(earlier), window);
        Vote::Granted
    }

    /// Extends the lock if it is exactly this grant.
    pub fn extend(&mut self, rules: &Rules, window: Window, asked: Lock) -> Vote {
        if self.refuses(rules) {
            return Vote::Quarantined;
        }
        match &mut self.lock {
            None => Vote::Missing,
            Some(lock) if !lock.is(&asked) => Vote::Held(*lock),
            Some(lock) => {
                lock.guards |= asked.guards;
                if !lock.extended && rules.extension_marks {
                    lock.extended = true;
                    if matches!(self.watermark, NO_TOKEN) || self.watermark == asked.token {
                        self.set_watermark(asked.token, Mark::Extended, window);
                    }
                }
                Vote::Extended
            }
        }
    }

    /// Sets a lost lock again. The age of its T does not matter, because a majority stores the
    /// lock. The lock and its watermark get the mark of an extension only if the record in the
    /// repair has it.
    ///
    /// The lock may replace a record of nobody with any T. Such a record stands for several grants,
    /// one of which may have counted the node's lost vote. Now a majority of the others stores this
    /// grant, counted since the node was admitted. So of all those grants only this one can be
    /// valid. An earlier lease of this grant may last longer than the repair's lease. Therefore the
    /// lock lives at least as long as the record that it replaces.
    pub fn repair(&mut self, rules: &Rules, window: Window, asked: Lock) -> Vote {
        if self.refuses(rules) {
            return Vote::Quarantined;
        }
        let too_old = !rules.repair_may_be_old && asked.token <= window.oldest;
        if rules.clock_is_checked && (asked.token == FAR || too_old) {
            return Vote::Clock;
        }
        let mut guards = asked.guards;
        match self.lock {
            Some(lock) if lock.is(&asked) && asked.extended => {
                return self.extend(rules, window, asked);
            }
            Some(lock) if lock.is(&asked) => {
                // The copy may expire before the majority's copies, so the repair prolongs it.
                self.lock = Some(Lock { guards: lock.guards | asked.guards, ..lock });
                return Vote::Extended;
            }
            Some(lock) if lock.owner != Owner::Nobody => return Vote::Held(lock),
            Some(lock) if rules.repair_keeps_life => guards |= lock.guards,
            Some(_) | None => {}
        }
        let expired = self.mark == Mark::Extended && self.watermark == asked.token;
        if rules.watermark_is_checked && self.watermark >= asked.token && !expired {
            return Vote::Stale(self.watermark);
        }
        self.set_watermark(
            asked.token,
            if asked.extended { Mark::Extended } else { Mark::Plain },
            window,
        );
        self.lock = Some(Lock { guards, ..asked });
        Vote::Granted
    }

    /// Deletes the lock if it belongs to this owner and its T is not newer, and leaves the
    /// watermark at T or above.
    ///
    /// The undo of a failed proposal deletes only that proposal's grant, and only if the grant was
    /// not extended. If it deletes the grant, it also sets the watermark back.
    pub fn release(
        &mut self,
        rules: &Rules,
        window: Window,
        asked: Lock,
        scope: ReleaseScope,
    ) -> Vote {
        let stood = self.lock;
        let token = asked.token;
        let same = stood.is_some_and(|lock| lock.is(&asked));
        let is_undo = scope == ReleaseScope::Proposal;
        if let Some(extended) =
            stood.filter(|lock| is_undo && rules.undo_spares_extended && same && lock.extended)
        {
            return Vote::Held(extended);
        }
        let exact = scope != ReleaseScope::Holder && rules.undo_is_exact;
        let mine = stood.filter(|lock| if exact { same } else { lock.owner == asked.owner });
        let deleted = mine.is_some_and(|lock| !rules.release_keeps_newer || lock.token <= token);
        if deleted {
            self.lock = None;
        }
        if same && mine.is_some_and(|lock| !lock.extended) {
            if is_undo && rules.undo_restores_watermark {
                self.undo_watermark(rules, token);
            }
            // Any other release leaves the watermark alone here: the acquire that set this lock has
            // put it at the lock's T, without the mark of an extension.
            return Vote::Released;
        }
        if rules.release_leaves_a_tombstone {
            if same || token != FAR {
                let marked = self.mark == Mark::Extended
                    && self.watermark == token
                    && rules.release_unmarks
                    && !(is_undo && exact);
                if marked || self.watermark < token {
                    self.set_watermark(token, Mark::Plain, window);
                } else {
                    if rules.release_settles_watermark {
                        self.settle_watermark();
                    }
                    if rules.release_prolongs_watermark {
                        self.outlasts |= window.begun;
                        self.restored = false;
                    }
                }
            } else {
                // The release may have deleted a lock with an older T. A tombstone with this T is
                // not possible, because the T is too far ahead. So the release is not complete.
                return Vote::Clock;
            }
        }
        match stood {
            _ if deleted => Vote::Released,
            Some(lock) => Vote::Held(lock),
            None => Vote::Missing,
        }
    }

    /// The release of a holder that keeps the lock from everybody for a while. If exactly this grant
    /// stands, a record of nobody replaces it.
    pub fn hold(&mut self, rules: &Rules, window: Window, asked: Lock) -> Vote {
        if !self.lock.is_some_and(|lock| lock.is(&asked)) {
            return self.release(rules, window, asked, ReleaseScope::Holder);
        }
        let keeps_mark = self.mark == Mark::Extended && !rules.release_unmarks;
        let mark = if keeps_mark { Mark::Extended } else { Mark::Plain };
        self.set_watermark(asked.token.max(self.watermark), mark, window);
        self.lock = Some(Lock::blocker(asked.token, 0));
        Vote::Released
    }

    /// Sets the watermark. It lasts until the node's clock refuses every operation that has begun
    /// by now.
    fn set_watermark(&mut self, token: Token, mark: Mark, window: Window) {
        (self.watermark, self.mark, self.outlasts) = (token, mark, window.begun);
        self.restored = false;
    }

    /// Removes an expired watermark. By then the node's clock refuses every operation that the
    /// watermark kept out.
    pub fn end_watermark(&mut self) {
        (self.watermark, self.mark, self.outlasts) = (NO_TOKEN, Mark::Plain, 0);
        self.restored = false;
    }

    fn undo_watermark(&mut self, rules: &Rules, token: Token) {
        match self.mark {
            Mark::Provisional(Some(earlier))
                if self.watermark == token && rules.earlier_watermark_is_restored =>
            {
                let mark = if earlier.extended { Mark::Extended } else { Mark::Plain };
                (self.watermark, self.mark, self.outlasts) =
                    (earlier.token, mark, earlier.outlasts);
                self.restored = true;
            }
            Mark::Provisional(_) if self.watermark == token => self.end_watermark(),
            _ if !rules.only_own_watermark_goes => self.end_watermark(),
            Mark::Plain | Mark::Extended | Mark::Provisional(_) => {}
        }
    }

    /// Makes the watermark permanent: no undo may set it back.
    pub fn settle_watermark(&mut self) {
        if matches!(self.mark, Mark::Provisional(_)) {
            self.mark = Mark::Plain;
        }
    }

    /// The lowest value that the watermark can have after an undo.
    pub fn lasting_watermark(&self, rules: &Rules) -> Token {
        match self.mark {
            Mark::Plain | Mark::Extended => self.watermark,
            Mark::Provisional(Some(earlier)) if rules.earlier_watermark_is_restored => {
                earlier.token
            }
            Mark::Provisional(_) => NO_TOKEN,
        }
    }

    /// Whether a repair with this T passes the watermark as it is, or as an undo would set it back.
    pub fn is_repairable(&self, token: Token) -> bool {
        let passes = match self.mark {
            Mark::Plain | Mark::Provisional(None) => None,
            Mark::Extended => Some(self.watermark),
            Mark::Provisional(Some(earlier)) => earlier.extended.then_some(earlier.token),
        };
        passes == Some(token)
    }

    /// Admits the node with a lock that other nodes store. `stands` says whether a majority without
    /// this node stores it. If not, or if a release of the lock has arrived in the meantime, the
    /// node stores a record of nobody instead. That record keeps everybody out for as long as the
    /// lock could live.
    pub fn recover(&mut self, rules: &Rules, window: Window, found: Option<Lock>, stands: bool) {
        self.admitted = true;
        self.lock = found;
        let Some(lock) = &mut self.lock else { return };
        let released = self.watermark >= lock.token && rules.recovery_minds_releases;
        if !stands || released || lock.owner == Owner::Nobody {
            *lock = Lock::blocker(lock.token, lock.guards);
        } else if self.watermark <= lock.token {
            let token = lock.token;
            let mark = if lock.extended { Mark::Extended } else { Mark::Plain };
            self.set_watermark(token, mark, window);
        }
    }

    /// Ends the lock's time to live.
    pub fn expire(&mut self) {
        self.lock = None;
    }

    /// Loses all data, including the marker.
    pub fn wipe(&mut self) {
        *self = Self { admitted: false, ..Self::default() };
    }

    fn refuses(&self, rules: &Rules) -> bool {
        rules.marker_is_checked && !self.admitted
    }
}
