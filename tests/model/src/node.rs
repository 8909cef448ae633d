//! One master, as small as it can be: one lock name, tokens of one byte, no time but what the events of a model say.
//!
//! It answers as the scripts do, and a property test (`tests/conformance.rs`) holds it to `MemoryNode`, which another
//! test holds to a real redis-server. So what is proved of this node is proved of the scripts, as long as those tests run.
//!
//! What it leaves out: other clients' values, errors, the text for people.

use redlock_core::node::ReleaseScope;

use crate::rules::Rules;

/// A fencing token. Real ones are microseconds; only their order matters.
pub type Token = u8;

/// Lower than every token.
pub const NO_TOKEN: Token = 0;
/// What a gateway mints whose clock is further ahead than D.
pub const FAR: Token = 15;

/// The contenders for the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Owner {
    /// May ask again as the same owner.
    A,
    /// Asks for itself, once.
    B,
    /// In whose name a release is only a tombstone, and a lock keeps everybody out.
    Nobody,
}

/// A lock as a node stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lock {
    pub owner: Owner,
    /// What it was granted with.
    pub token: Token,
    /// What tells it from another grant of the owner with the same token.
    pub nonce: u8,
    /// Whether it was ever extended.
    pub extended: bool,
    /// The leases that gave it its time to live, one bit each: it outlives all of them.
    pub guards: u8,
}

/// What one master stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Node {
    /// Whether the marker of its eligibility stands.
    pub admitted: bool,
    pub lock: Option<Lock>,
    /// The fence key; [`NO_TOKEN`] when there is none.
    pub fence: Token,
    /// What stands behind T in it.
    pub mark: Mark,
    /// Extensions, one bit each, whose repairs are too old for the node's clock when the fence ends.
    pub outlasts: u8,
}

/// The mark of a fence at T.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mark {
    /// None: it stays.
    Plain,
    /// `+`: the lock with this T was extended, and no release of it has come.
    Extended,
    /// `!`: it can be taken back, to this fence with the mark of an extension, or to none.
    Provisional(Token),
}

/// The tokens that a node's own time lies near: those above `oldest` and below [`FAR`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// The newest token that is too old.
    pub oldest: Token,
    /// The extensions that have begun, one bit each. None where fences have no end.
    pub begun: u8,
}

impl From<Token> for Window {
    /// Where fences have no end.
    fn from(oldest: Token) -> Self {
        Self { oldest, begun: 0 }
    }
}

/// A node's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vote {
    /// Set, with exactly this T.
    Granted,
    /// Another grant of the same owner stands.
    Yours(Lock),
    /// Somebody else's lock (or, to an extension or release, another grant) stands.
    Held(Lock),
    /// The fence is at T or above.
    Stale(Token),
    Extended,
    /// Was this owner's, is gone.
    Released,
    Missing,
    /// The marker does not stand.
    Quarantined,
    /// T is too far from the node's time.
    Clock,
}

impl Lock {
    /// Whether both are one grant.
    pub fn is(&self, other: &Self) -> bool {
        (self.owner, self.token, self.nonce) == (other.owner, other.token, other.nonce)
    }

    /// A record of nobody, which keeps everybody out. Its token is the largest of the grants that it stands for.
    pub const fn blocker(token: Token, guards: u8) -> Self {
        Self { owner: Owner::Nobody, token, nonce: 0, extended: false, guards }
    }
}

impl Default for Node {
    fn default() -> Self {
        Self { admitted: true, lock: None, fence: NO_TOKEN, mark: Mark::Plain, outlasts: 0 }
    }
}

impl Node {
    /// Set the lock if it is free and T is larger than the fence.
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
        if rules.watermark_is_checked && self.fence >= asked.token {
            return Vote::Stale(self.fence);
        }
        self.lock = Some(Lock { extended: false, ..asked });
        let mark = match self.mark {
            _ if self.fence == NO_TOKEN => Mark::Provisional(NO_TOKEN),
            Mark::Extended => Mark::Provisional(self.fence),
            _ if !rules.plain_fence_stays => Mark::Provisional(NO_TOKEN),
            Mark::Plain | Mark::Provisional(_) => Mark::Plain,
        };
        self.set_fence(asked.token, mark, window);
        Vote::Granted
    }

    /// Prolong the lock if it is this very grant.
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
                    if matches!(self.fence, NO_TOKEN) || self.fence == asked.token {
                        self.set_fence(asked.token, Mark::Extended, window);
                    }
                }
                Vote::Extended
            }
        }
    }

    /// Sets the lock again where it is gone, however old its T is: a majority vouches for it. The lock and its fence are
    /// marked only if the record that is asked for is.
    ///
    /// The lock may replace a record of nobody, whatever the T of that. Such a record stands for grants that may have
    /// counted a lost vote. A majority of the others, counted since the eligibility, proves that none but this one is
    /// valid. An earlier lease of this very grant may be, so the lock lives as long as what it replaces.
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
            Some(lock) if lock.is(&asked) => {
                // A copy that lives shorter than the majority's is extended.
                self.lock = Some(Lock { guards: lock.guards | asked.guards, ..lock });
                return Vote::Extended;
            }
            Some(lock) if lock.owner != Owner::Nobody => return Vote::Held(lock),
            Some(lock) if rules.repair_keeps_life => guards |= lock.guards,
            Some(_) | None => {}
        }
        let expired = self.mark == Mark::Extended && self.fence == asked.token;
        if rules.watermark_is_checked && self.fence >= asked.token && !expired {
            return Vote::Stale(self.fence);
        }
        self.set_fence(
            asked.token,
            if asked.extended { Mark::Extended } else { Mark::Plain },
            window,
        );
        self.lock = Some(Lock { guards, ..asked });
        Vote::Granted
    }

    /// Delete the lock if this owner has it with no newer T, and leave the fence at T or above. The undo of a failed try
    /// deletes nothing but exactly its grant, and not once it was extended; where it deletes, it takes the fence back.
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
        let failed_try = scope == ReleaseScope::Proposal;
        if let Some(extended) =
            stood.filter(|lock| failed_try && rules.undo_spares_extended && same && lock.extended)
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
            if failed_try && rules.failed_try_takes_fence_back {
                self.take_fence_back(rules, token);
            }
            // Otherwise the acquire that set this lock has left the fence at its T, and nobody has marked it.
            return Vote::Released;
        }
        if rules.release_leaves_a_tombstone {
            if same || token != FAR {
                let marked = self.mark == Mark::Extended
                    && self.fence == token
                    && rules.release_unmarks
                    && !(failed_try && exact);
                if marked || self.fence < token {
                    self.set_fence(token, Mark::Plain, window);
                } else {
                    if rules.release_settles_fence {
                        self.settle_fence();
                    }
                    if rules.release_prolongs_fence {
                        self.outlasts |= window.begun;
                    }
                }
            } else {
                // Also where an older T was deleted: without its tombstone the release is not done.
                return Vote::Clock;
            }
        }
        match stood {
            _ if deleted => Vote::Released,
            Some(lock) => Vote::Held(lock),
            None => Vote::Missing,
        }
    }

    /// For its whole life: until everything is too old that has begun by now.
    fn set_fence(&mut self, token: Token, mark: Mark, window: Window) {
        (self.fence, self.mark, self.outlasts) = (token, mark, window.begun);
    }

    /// What the fence was for is over, as far as this node's clock tells.
    pub fn end_fence(&mut self) {
        (self.fence, self.mark, self.outlasts) = (NO_TOKEN, Mark::Plain, 0);
    }

    fn take_fence_back(&mut self, rules: &Rules, token: Token) {
        (self.fence, self.mark) = match self.mark {
            Mark::Provisional(before)
                if self.fence == token && before != NO_TOKEN && rules.fence_before_is_restored =>
            {
                (before, Mark::Extended)
            }
            Mark::Provisional(_) if self.fence == token => (NO_TOKEN, Mark::Plain),
            _ if !rules.only_own_fence_goes => (NO_TOKEN, Mark::Plain),
            mark => (self.fence, mark),
        };
        if self.fence == NO_TOKEN {
            self.outlasts = 0;
        }
    }

    /// The fence cannot be taken back any more.
    pub fn settle_fence(&mut self) {
        if matches!(self.mark, Mark::Provisional(_)) {
            self.mark = Mark::Plain;
        }
    }

    /// The lowest that the fence can become again by being taken back.
    pub fn lasting_fence(&self, rules: &Rules) -> Token {
        match self.mark {
            Mark::Plain | Mark::Extended => self.fence,
            Mark::Provisional(before) if rules.fence_before_is_restored => before,
            Mark::Provisional(_) => NO_TOKEN,
        }
    }

    /// Whether a repair with this T passes the fence, now or when it has been taken back.
    pub fn is_repairable(&self, token: Token) -> bool {
        self.mark == Mark::Extended && self.fence == token || self.mark == Mark::Provisional(token)
    }

    /// Eligibility with a lock that others store, if they are a majority without this node and no release of it has come
    /// here meanwhile; else with one of nobody's that keeps everybody out for as long.
    pub fn recover(&mut self, rules: &Rules, window: Window, found: Option<Lock>, stands: bool) {
        self.admitted = true;
        self.lock = found;
        let Some(lock) = &mut self.lock else { return };
        let released = self.fence >= lock.token && rules.adoption_minds_releases;
        if !stands || released || lock.owner == Owner::Nobody {
            *lock = Lock::blocker(lock.token, lock.guards);
        } else if self.fence <= lock.token {
            let token = lock.token;
            let mark = if lock.extended { Mark::Extended } else { Mark::Plain };
            self.set_fence(token, mark, window);
        }
    }

    /// The lock's time to live is over.
    pub fn expire(&mut self) {
        self.lock = None;
    }

    /// All data is lost, the marker included.
    pub fn wipe(&mut self) {
        *self = Self { admitted: false, ..Self::default() };
    }

    fn refuses(&self, rules: &Rules) -> bool {
        rules.marker_is_checked && !self.admitted
    }
}
