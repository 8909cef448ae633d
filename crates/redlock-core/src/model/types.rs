//! Names, owners, tokens and TTLs, each parsed once at the edge, with its limits beside it.
//!
//! Nothing here is serializable or formats a secret. [`Owner`] and [`LockToken`] have a redacted
//! `Debug` and no `Display`. Only [`LockToken::expose`] returns the text of a token.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::slots::{SlotSet, Slots};

/// A lock's name: 1 to 255 bytes of `[A-Za-z0-9._:@/+~-]`. No segment between slashes is empty, `.`
/// or `..`.
///
/// The alphabet excludes everything with a meaning in Redis patterns, Lua, RESP or a cluster's hash
/// tags, so a name can never reach a key other than its own. Empty, `.` and `..` segments are
/// excluded because some HTTP clients and proxies normalise them away (RFC 3986, section 5.2.4).
/// For example, `a/../b` could reach the lock `a/../b` or the lock `b`, depending on the client.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LockName(Box<str>);

impl LockName {
    /// Longest name in bytes.
    pub const MAX_LEN: usize = 255;
    /// The rule as a regular expression, except for the length. It uses only syntax that ECMA-262,
    /// RE2 and Python share, so it has no look-ahead.
    pub const PATTERN: &str = concat!(
        r"^(\.{0,2}[A-Za-z0-9_:@+~-]|\.{3})[A-Za-z0-9._:@+~-]*",
        r"(/(\.{0,2}[A-Za-z0-9_:@+~-]|\.{3})[A-Za-z0-9._:@+~-]*)*$"
    );

    /// The name as it was given.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Checks that a name can contain this text. The alphabet and the length are those of a name.
    /// Segments are not checked, because the text may begin or end inside a segment.
    ///
    /// # Errors
    /// [`NameError`] shows why no name contains the text.
    pub fn check_part(text: &str) -> Result<(), NameError> {
        if text.is_empty() {
            return Err(NameError::Empty);
        }
        if text.len() > Self::MAX_LEN {
            return Err(NameError::TooLong { len: text.len() });
        }
        // The search is by byte: no allowed byte is part of a multi-byte character.
        let bad = text.bytes().position(|byte| !is_name_byte(byte));
        match bad.and_then(|at| Some((at, text[at..].chars().next()?))) {
            Some((at, found)) => Err(NameError::BadCharacter { found, at }),
            None => Ok(()),
        }
    }

    /// Takes a name that a node stores, also that of a slot. Earlier versions allowed names with
    /// segments that are refused now. Recovery must not leave out a lock with such a name, because
    /// the lock could then be granted twice.
    pub(crate) fn stored(text: &str) -> Option<Self> {
        let name = Self(text.into());
        Self::check_part(name.split_slot().0).ok().map(|()| name)
    }

    /// The name under which nodes store a slot of this lock, for programs that read the nodes. Slot
    /// 1 has the lock's own name.
    pub fn of_slot(&self, slot: u16) -> Self {
        match slot {
            1 => self.clone(),
            slot => Self(format!("{}{}{slot}", self.0, Self::SLOT).into()),
        }
    }

    /// The lock's name and the number of the slot: a listing shows a slot of a lock under a name
    /// that no request can have.
    pub fn lock_and_slot(&self) -> (Self, u16) {
        let (name, slot) = self.split_slot();
        (Self(name.into()), slot)
    }

    /// Splits the name of a slot. Only the text that [`LockName::of_slot`] writes is one.
    fn split_slot(&self) -> (&str, u16) {
        let slot = self.0.rsplit_once(Self::SLOT).and_then(|(name, digits)| {
            let slot = digits.parse::<u16>().ok()?;
            let is_one = (2..=Slots::MAX).contains(&slot) && slot.to_string() == digits;
            is_one.then_some((name, slot))
        });
        slot.unwrap_or((&self.0, 1))
    }

    /// Separates a lock's name from the number of a slot. No name that a request sends has it.
    const SLOT: char = '#';
}

impl FromStr for LockName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        Self::check_part(text)?;
        let bad =
            |segment: &[u8]| ["", ".", ".."].into_iter().find(|bad| segment == bad.as_bytes());
        match text.as_bytes().split(|byte| *byte == b'/').find_map(bad) {
            Some(found) => Err(NameError::BadSegment { found }),
            None => Ok(Self(text.into())),
        }
    }
}

fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(byte, b'.' | b'_' | b':' | b'@' | b'/' | b'+' | b'~' | b'-')
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &self.0)
    }
}

/// Several lock names, each of them once, that are acquired all together or not at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockSet(Vec<LockName>);

impl LockSet {
    /// The largest number of names.
    pub const MAX_LEN: usize = 32;

    /// A set of 1 to 32 names. The order decides nothing but which lock is asked for first.
    ///
    /// # Errors
    /// [`SetError`] if there is no name, there are too many, or one is there twice.
    pub fn new(names: Vec<LockName>) -> Result<Self, SetError> {
        if names.is_empty() {
            return Err(SetError::Empty);
        }
        if names.len() > Self::MAX_LEN {
            return Err(SetError::TooMany { given: names.len() });
        }
        let twice = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name));
        match twice {
            Some((_, name)) => Err(SetError::Twice { name: name.clone() }),
            None => Ok(Self(names)),
        }
    }

    /// The names, in the order in which they were given.
    pub fn names(&self) -> &[LockName] {
        &self.0
    }
}

/// Why names are no set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SetError {
    /// There is no name.
    #[error("there is no name; allowed are 1 to {} names", LockSet::MAX_LEN)]
    Empty,
    /// There are more than [`LockSet::MAX_LEN`] names.
    #[error("there are {given} names; allowed are 1 to {}", LockSet::MAX_LEN)]
    TooMany {
        /// How many.
        given: usize,
    },
    /// A name is there twice.
    #[error("the name \"{name}\" is there twice; each name may be there once")]
    Twice {
        /// The name.
        name: LockName,
    },
}

/// Why a text is no lock name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is empty.
    #[error("the name is empty; allowed are 1 to 255 bytes of [A-Za-z0-9._:@/+~-]")]
    Empty,
    /// More than [`LockName::MAX_LEN`] bytes.
    #[error("the name has {len} bytes; allowed are 1 to 255 bytes of [A-Za-z0-9._:@/+~-]")]
    TooLong {
        /// Its length in bytes.
        len: usize,
    },
    /// The text has a character outside the alphabet.
    #[error(
        "the name has {found:?} at byte {at}; allowed are 1 to 255 bytes of [A-Za-z0-9._:@/+~-]"
    )]
    BadCharacter {
        /// The character that is not allowed.
        found: char,
        /// Its position in bytes, from 0.
        at: usize,
    },
    /// The text has a segment that clients and proxies normalise away.
    #[error(
        "the name has the part {found:?} between slashes; no part may be empty, \".\" or \"..\""
    )]
    BadSegment {
        /// The segment.
        found: &'static str,
    },
}

/// Who asks for a lock: 16 bytes that nobody else can guess, drawn for an acquire or derived from
/// an idempotency key.
///
/// The value is kept as text, 32 lowercase hexadecimal digits, because every node stores and
/// compares that text.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner([u8; Owner::TEXT_LEN]);

impl Owner {
    /// Bytes of entropy.
    pub const LEN: usize = 16;
    /// Characters of the stored text.
    pub const TEXT_LEN: usize = 2 * Self::LEN;

    /// The owner of records by which recovery keeps a lock free. No token can extend or release
    /// such a record.
    pub const NOBODY: Self = Self([b'0'; Self::TEXT_LEN]);

    /// An owner from raw bytes, which must come from a cryptographic generator.
    pub fn from_bytes(raw: [u8; Self::LEN]) -> Self {
        let mut text = [0; Self::TEXT_LEN];
        write_hex(&raw, &mut text);
        Self(text)
    }

    /// The owner of an idempotency key. The same (cluster, principal, lock, key) gives the same
    /// owner on every gateway, so a repeated request finds the lock of the first one.
    ///
    /// HMAC-SHA-256 over length-prefixed parts (no two lists of parts collide), cut to 16 bytes.
    /// The owner is as hard to guess as the idempotency key.
    pub fn derive(cluster: &str, principal: &str, name: &LockName, idempotency_key: &str) -> Self {
        let parts = ["redlock owner v1", principal, name.as_str(), idempotency_key];
        Self::of_parts(cluster, parts.map(str::as_bytes))
    }

    /// The owner of all requests with one idempotency key for slots of a lock. Requests for another
    /// number of slots have another owner, so a repetition always finds as many slots as it asks
    /// for.
    pub fn derive_of_slots(
        cluster: &str,
        principal: &str,
        (name, slots): (&LockName, Slots),
        idempotency_key: &str,
    ) -> Self {
        let numbers = format!("{} of {}", slots.take(), slots.count());
        let parts =
            ["redlock owner of slots v1", principal, name.as_str(), &numbers, idempotency_key];
        Self::of_parts(cluster, parts.map(str::as_bytes))
    }

    /// The owner of all requests with one idempotency key for a set of locks. The order of the
    /// names does not matter.
    pub fn derive_of_set(
        cluster: &str,
        principal: &str,
        names: &LockSet,
        idempotency_key: &str,
    ) -> Self {
        let mut sorted: Vec<_> = names.names().iter().map(LockName::as_str).collect();
        sorted.sort_unstable();
        let parts = ["redlock owner of a set v1", principal, idempotency_key];
        Self::of_parts(cluster, parts.into_iter().chain(sorted).map(str::as_bytes))
    }

    /// Binds this owner to a principal. A client shows this owner in its token, and the nodes store
    /// the owner that this function returns. If another principal shows the same token, this
    /// returns another owner, which holds nothing. The nodes never see the owner that the client
    /// shows.
    ///
    /// HMAC-SHA-256 as in [`Owner::derive`]. No gateway has to store the result, because every
    /// gateway computes the same one.
    pub fn bound_to(&self, principal: &str) -> Self {
        Self::of_parts("redlock bound owner v1", [principal.as_bytes(), self.0.as_slice()])
    }

    /// A public name of this owner, from which nobody can compute the owner.
    pub fn public_id(&self) -> [u8; Self::LEN] {
        Self::digest("redlock public id v1", [self.0.as_slice()])
    }

    fn of_parts<'a>(key: &str, parts: impl IntoIterator<Item = &'a [u8]>) -> Self {
        Self::from_bytes(Self::digest(key, parts))
    }

    fn digest<'a>(key: &str, parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; Self::LEN] {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(key.as_bytes()).expect("HMAC takes a key of any length");
        for part in parts {
            mac.update(&(part.len() as u64).to_be_bytes());
            mac.update(part);
        }
        let digest = mac.finalize().into_bytes();
        std::array::from_fn(|i| digest[i])
    }

    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        read_hex(text).map(Self)
    }

    /// The text that the nodes store.
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.0).expect("hexadecimal digits")
    }

    /// A number that spreads owners evenly, always the same for one owner.
    pub(crate) fn spread(&self) -> usize {
        self.0
            .iter()
            .fold(0, |sum: usize, digit| sum.wrapping_mul(31).wrapping_add((*digit).into()))
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owner(redacted)")
    }
}

/// Distinguishes the proposals of one owner: 4 random bytes, drawn for each proposal. Two gateways
/// that ask for the same owner may mint the same T in the same microsecond. Then only the nonce
/// shows whose grant a node stores.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce([u8; Nonce::TEXT_LEN]);

impl Nonce {
    /// Bytes of entropy.
    pub const LEN: usize = 4;
    /// Characters of the stored text.
    pub const TEXT_LEN: usize = 2 * Self::LEN;
    /// The nonce of records that keep a lock free.
    pub(crate) const ZERO: Self = Self([b'0'; Self::TEXT_LEN]);

    /// A nonce from raw bytes.
    pub fn from_bytes(raw: [u8; Self::LEN]) -> Self {
        let mut text = [0; Self::TEXT_LEN];
        write_hex(&raw, &mut text);
        Self(text)
    }
}

fn write_hex(raw: &[u8], text: &mut [u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for (pair, byte) in text.chunks_exact_mut(2).zip(raw) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
}

/// Splits the text into the part before its last dot and the part after it, which has `length`
/// bytes.
fn split_last(text: &[u8], length: usize) -> Option<(&[u8], &[u8])> {
    let (rest, last) = text.split_at_checked(text.len().checked_sub(length)?)?;
    Some((rest.strip_suffix(b".")?, last))
}

fn read_hex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let text: [u8; N] = text.try_into().ok()?;
    // Without an early exit, the compiler checks 16 characters at a time.
    let are_digits = |all, c: &u8| all & matches!(c, b'0'..=b'9' | b'a'..=b'f');
    text.iter().fold(true, are_digits).then_some(text)
}

/// A fencing token T: microseconds since 1970 by a gateway's hybrid clock, below 2^53 so that Lua
/// and JavaScript hold it exactly. A later grant of the same lock carries a larger token. A
/// resource that refuses smaller tokens than it has seen is safe from holders that come back late.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FencingToken(u64);

impl FencingToken {
    /// Decimal digits of the stored text. 16 digits cover the years 2001 to 2255.
    pub const TEXT_LEN: usize = 16;
    /// Smallest value with 16 digits.
    pub const MIN: Self = Self(1_000_000_000_000_000);
    /// Largest integer that an IEEE double holds exactly, together with all smaller ones.
    pub const MAX: Self = Self((1 << 53) - 1);

    /// Takes a value in `MIN..=MAX`.
    ///
    /// # Errors
    /// [`InvalidFencingToken`] for any other value.
    pub fn new(micros: u64) -> Result<Self, InvalidFencingToken> {
        let is_one = (Self::MIN.0..=Self::MAX.0).contains(&micros);
        if is_one { Ok(Self(micros)) } else { Err(InvalidFencingToken { given: micros }) }
    }

    /// Microseconds since 1970.
    pub fn get(self) -> u64 {
        self.0
    }

    /// 16 decimal digits, as nodes store them.
    pub(crate) fn text(self) -> [u8; Self::TEXT_LEN] {
        let mut text = [0; Self::TEXT_LEN];
        let mut left = self.0;
        for digit in text.iter_mut().rev() {
            *digit = b'0' + (left % 10) as u8;
            left /= 10;
        }
        text
    }

    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let text: &[u8; Self::TEXT_LEN] = text.try_into().ok()?;
        // Without an early exit, the compiler checks all characters at once.
        if !text.iter().fold(true, |all, byte| all & byte.is_ascii_digit()) {
            return None;
        }
        let number = text.iter().fold(0, |number, byte| number * 10 + u64::from(byte - b'0'));
        Self::new(number).ok()
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A number outside the range of a [`FencingToken`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{given} is not a fencing token; allowed are {} to {}",
    FencingToken::MIN,
    FencingToken::MAX
)]
pub struct InvalidFencingToken {
    /// The number.
    pub given: u64,
}

/// A secret that a holder shows to extend or release. It names one grant: owner, fencing token and
/// nonce.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockToken {
    owner: Owner,
    nonce: Nonce,
    fencing: FencingToken,
    /// See [`LockToken::holding`], in milliseconds.
    hold: u32,
    /// See [`LockToken::on_slots`].
    slots: SlotSet,
}

impl LockToken {
    const VERSION: &'static str = "1";
    /// The version of a token with a time to hold, or with other slots than slot 1. The time
    /// follows, in milliseconds, and then the slots.
    const EXTENDED: &'static str = "2-";
    const TEXT_LEN: usize = Self::VERSION.len() + 1 + FencingToken::TEXT_LEN + 1 + Self::GRANT_LEN;
    /// Characters of owner and nonce, which stand side by side without a separator.
    pub const GRANT_LEN: usize = Owner::TEXT_LEN + Nonce::TEXT_LEN;

    /// The token of a grant.
    pub fn new(owner: Owner, nonce: Nonce, fencing: FencingToken) -> Self {
        Self { owner, nonce, fencing, hold: 0, slots: SlotSet::FIRST }
    }

    /// The same token, with which a release keeps the lock from everybody until `hold` has passed
    /// since the grant. The masters do not store this time. Cut to whole milliseconds, and to
    /// [`Ttl::MAX`].
    #[must_use]
    pub fn holding(self, hold: Duration) -> Self {
        let longest = u128::from(Ttl::MAX.millis());
        Self { hold: hold.as_millis().min(longest) as u32, ..self }
    }

    /// How long the lock is kept at least, counted from its grant.
    pub fn hold(&self) -> Duration {
        Duration::from_millis(self.hold.into())
    }

    /// The same token, as one of a grant of these slots of the lock. The masters do not store which
    /// slots belong together.
    #[must_use]
    pub fn on_slots(self, slots: SlotSet) -> Self {
        Self { slots, ..self }
    }

    /// The slots of the lock that the grant has.
    pub fn slots(&self) -> SlotSet {
        self.slots
    }

    /// The token as its client shows it, if the nodes store a bound owner: the same grant with the
    /// client's `owner`, see [`Owner::bound_to`].
    pub fn shown_by(&self, owner: Owner) -> Self {
        Self { owner, ..*self }
    }

    /// The token of the same grant as the nodes store it, see [`Owner::bound_to`].
    pub fn bound_to(&self, principal: &str) -> Self {
        Self { owner: self.owner.bound_to(principal), ..*self }
    }

    fn parse(text: &str) -> Option<Self> {
        // The last two parts have a fixed length. So the text is split without a search for dots.
        let (rest, grant) = split_last(text.as_bytes(), Self::GRANT_LEN)?;
        let (version, fencing) = split_last(rest, FencingToken::TEXT_LEN)?;
        let version = std::str::from_utf8(version).ok()?;
        let (hold, slots) = match version.strip_prefix(Self::EXTENDED) {
            None if version == Self::VERSION => (0, SlotSet::FIRST),
            Some(rest) => {
                let (millis, slots) = rest
                    .split_once('-')
                    .map_or((rest, None), |(millis, slots)| (millis, Some(slots)));
                let slots = slots.map_or(Some(SlotSet::FIRST), |slots| {
                    SlotSet::parse(slots).filter(|slots| *slots != SlotSet::FIRST)
                })?;
                // Only one text is a token: without a sign, and without zeros in front. Eight
                // digits at most are a form that a pattern can state; a release bounds the time.
                let is_needed = |hold: &u32| *hold > 0 || slots != SlotSet::FIRST;
                let hold = millis.parse::<u32>().ok().filter(|hold| *hold < 100_000_000);
                let hold = hold.filter(is_needed).filter(|hold| hold.to_string() == millis)?;
                (hold, slots)
            }
            None => return None,
        };
        Some(Self { hold, slots, ..Self::of_texts(fencing, grant)? })
    }

    /// Parses a T and a grant (owner and nonce) as a node stores them.
    pub(crate) fn of_texts(fencing: &[u8], grant: &[u8]) -> Option<Self> {
        let (owner, nonce) = grant.split_at_checked(Owner::TEXT_LEN)?;
        Some(Self {
            owner: Owner::parse(owner)?,
            nonce: Nonce(read_hex(nonce)?),
            fencing: FencingToken::parse(fencing)?,
            hold: 0,
            slots: SlotSet::FIRST,
        })
    }

    /// The version of a token with a time to hold, or with other slots than slot 1.
    #[cold]
    fn extended_version(&self) -> String {
        match self.slots {
            SlotSet::FIRST => format!("{}{}", Self::EXTENDED, self.hold),
            slots => format!("{}{}-{}", Self::EXTENDED, self.hold, slots.text()),
        }
    }

    /// The token's text, for its holder and nobody else.
    pub fn expose(&self) -> String {
        let mut text = Vec::with_capacity(Self::TEXT_LEN);
        if self.hold == 0 && self.slots == SlotSet::FIRST {
            text.extend_from_slice(Self::VERSION.as_bytes());
        } else {
            text.extend_from_slice(self.extended_version().as_bytes());
        }
        text.push(b'.');
        text.extend_from_slice(&self.fencing.text());
        text.push(b'.');
        self.write_grant(&mut text);
        String::from_utf8(text).expect("digits and dots are ASCII")
    }

    /// The fencing token, which is not a secret.
    pub fn fencing(&self) -> FencingToken {
        self.fencing
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Whether both tokens are of one grant: owner, nonce and T are the same.
    pub(crate) fn is_grant_of(&self, other: &Self) -> bool {
        (self.owner, self.nonce, self.fencing) == (other.owner, other.nonce, other.fencing)
    }

    pub(crate) fn write_grant(&self, text: &mut Vec<u8>) {
        text.extend_from_slice(&self.owner.0);
        text.extend_from_slice(&self.nonce.0);
    }
}

impl FromStr for LockToken {
    type Err = InvalidToken;

    /// Parses the text that [`LockToken::expose`] returns.
    fn from_str(text: &str) -> Result<Self, InvalidToken> {
        Self::parse(text).ok_or(InvalidToken)
    }
}

/// A text that is no [`LockToken`]. The error shows no part of the text, which may hold a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a lock token")]
pub struct InvalidToken;

impl fmt::Debug for LockToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockToken({}, redacted)", self.fencing)
    }
}

/// How long a lock lives without an extension, in whole milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct Ttl(u32);

impl Ttl {
    /// A shorter TTL would leave no validity after drift and one round trip.
    pub const MIN: Self = Self(10);
    /// One day. A gateway or library user sets its own, smaller maximum.
    pub const MAX: Self = Self(24 * 60 * 60 * 1000);

    /// Takes whole milliseconds in `MIN..=MAX`.
    ///
    /// # Errors
    /// [`InvalidTtl`] for any other number.
    pub fn from_millis(millis: u64) -> Result<Self, InvalidTtl> {
        Self::from_duration(Duration::from_millis(millis))
    }

    /// Takes a duration of whole milliseconds in `MIN..=MAX`.
    ///
    /// # Errors
    /// [`InvalidTtl`] for any other duration.
    pub fn from_duration(duration: Duration) -> Result<Self, InvalidTtl> {
        let is_whole = duration.subsec_nanos().is_multiple_of(1_000_000);
        let ttl = u32::try_from(duration.as_millis()).ok().filter(|_| is_whole).map(Self);
        ttl.filter(|ttl| (Self::MIN..=Self::MAX).contains(ttl))
            .ok_or(InvalidTtl { given: duration })
    }

    /// Milliseconds: 10 to 86,400,000.
    pub fn millis(self) -> u32 {
        self.0
    }

    /// The TTL as a duration.
    pub fn duration(self) -> Duration {
        Duration::from_millis(u64::from(self.0))
    }
}

/// A duration that is no [`Ttl`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{given:?} is not a TTL; allowed are whole milliseconds from {} to {}",
    Ttl::MIN.millis(),
    Ttl::MAX.millis()
)]
pub struct InvalidTtl {
    /// The duration.
    pub given: Duration,
}

/// Text for people, stored beside the owner and shown to whoever asks who holds the lock. The
/// algorithm never reads it; the gateway stores JSON.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Info(pub(crate) Bytes);

impl Info {
    /// Longest text in bytes.
    pub const MAX_LEN: usize = 4 * 1024;

    /// Takes a text of at most [`Info::MAX_LEN`] bytes.
    ///
    /// # Errors
    /// [`InfoTooLong`] for a longer text.
    pub fn new(text: impl Into<Bytes>) -> Result<Self, InfoTooLong> {
        let text = text.into();
        if text.len() <= Self::MAX_LEN {
            Ok(Self(text))
        } else {
            Err(InfoTooLong { len: text.len() })
        }
    }

    /// The text as it was stored.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A text that is too long to be an [`Info`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the info has {len} bytes; allowed are {}", Info::MAX_LEN)]
pub struct InfoTooLong {
    /// Its length in bytes.
    pub len: usize,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn grant(owner: Owner, fencing: FencingToken) -> LockToken {
        LockToken::new(owner, Nonce::from_bytes([0xb6; 4]), fencing)
    }

    proptest! {
        #[test]
        fn every_token_survives_its_own_text(
            raw: [u8; Owner::LEN],
            nonce: [u8; Nonce::LEN],
            t in FencingToken::MIN.0..=FencingToken::MAX.0,
        ) {
            let owner = Owner::from_bytes(raw);
            let token = LockToken::new(owner, Nonce::from_bytes(nonce), FencingToken(t));
            prop_assert_eq!(token.expose().parse(), Ok(token));
        }

        #[test]
        fn a_parsed_token_shows_the_same_text(
            text in prop_oneof![
                4 => r"1\.[0-9]{16}\.[0-9a-f]{40}",
                4 => r"[12]?\.?[0-9+-]{15,17}\.[0-9a-fA-F٠é]{38,41}\.?",
                1 => any::<String>(),
            ],
        ) {
            if let Ok(token) = text.parse::<LockToken>() {
                prop_assert_eq!(token.expose(), text);
            }
        }

        #[test]
        fn a_parsed_name_obeys_the_rules(
            text in prop_oneof![
                4 => r"[A-Za-z0-9._:@/+~-]{0,260}",
                4 => "[a./]{1,6}",
                4 => r"[ -~\n\x00éa-z]{0,20}",
                1 => any::<String>(),
            ],
        ) {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:@/+~-".contains(&byte);
            let is_part = (1..=255).contains(&text.len()) && text.bytes().all(allowed);
            let is_kept = text.split('/').all(|segment| !matches!(segment, "" | "." | ".."));
            let pattern = regex::Regex::new(LockName::PATTERN).unwrap();
            let is_matched = pattern.is_match(&text) && text.len() <= LockName::MAX_LEN;
            prop_assert_eq!(is_matched, is_part && is_kept);
            prop_assert_eq!(LockName::stored(&text).is_some(), is_part);
            prop_assert_eq!(LockName::stored(&format!("{text}#2")).is_some(), is_part);
            match text.parse::<LockName>() {
                Ok(name) => prop_assert!(is_part && is_kept && name.as_str() == text),
                Err(NameError::BadSegment { .. }) => prop_assert!(is_part && !is_kept),
                Err(error) => {
                    prop_assert!(!is_part && error.to_string().contains("1 to 255 bytes"))
                }
            }
        }
    }

    #[test]
    fn names_keep_to_their_alphabet_and_length() {
        for good in ["a", "deploy/prod", "A-z_0.9:@/+~", &"x".repeat(255)] {
            assert_eq!(good.parse::<LockName>().unwrap().as_str(), good);
        }
        assert_eq!("".parse::<LockName>(), Err(NameError::Empty));
        assert_eq!("x".repeat(256).parse::<LockName>(), Err(NameError::TooLong { len: 256 }));
        for bad in ["a b", "a\0", "a\n", "{a}", "a*", "a?", "[a]", "a\\", "é", "a%00"] {
            assert!(
                matches!(bad.parse::<LockName>(), Err(NameError::BadCharacter { .. })),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn a_name_that_a_proxy_would_normalise_is_none() {
        for good in ["...", "..a", "a.", "a/.b", "a/...", "~"] {
            assert_eq!(good.parse::<LockName>().unwrap().as_str(), good);
        }
        for (bad, found) in [
            (".", "."),
            ("..", ".."),
            ("a/.", "."),
            ("a/../b", ".."),
            ("./a", "."),
            ("/", ""),
            ("/a", ""),
            ("a/", ""),
            ("a//b", ""),
        ] {
            assert_eq!(bad.parse::<LockName>(), Err(NameError::BadSegment { found }), "{bad:?}");
        }
    }

    #[test]
    fn a_token_survives_its_own_text_and_nothing_else_parses() {
        let token =
            grant(Owner::from_bytes([0xa5; 16]), FencingToken::new(1_763_725_165_123_456).unwrap());
        let text = token.expose();
        assert_eq!(text.parse(), Ok(token));
        let upper = text.to_uppercase();
        for bad in [
            "",
            "1",
            "1.2.3",
            &text[1..],
            &text[..text.len() - 1],
            &format!("{text}."),
            &upper,
            &format!("2{}", &text[1..]),
        ] {
            assert_eq!(bad.parse::<LockToken>(), Err(InvalidToken), "{bad:?}");
        }
    }

    #[test]
    fn a_token_knows_its_slots_and_its_time() {
        let token = grant(Owner::from_bytes([0xa5; 16]), FencingToken::MIN);
        let rest = &token.expose()[1..];
        let slots = SlotSet::new([3, 256]).unwrap();
        let of_slots = format!("2-0-8{}4{rest}", "0".repeat(62));
        for (token, text) in [
            (token.on_slots(slots), of_slots),
            (token.on_slots(SlotSet::FIRST), format!("1{rest}")),
            (token.holding(Duration::from_secs(1)), format!("2-1000{rest}")),
            (
                token.holding(Duration::from_secs(1)).on_slots(SlotSet::new([2]).unwrap()),
                format!("2-1000-2{rest}"),
            ),
        ] {
            assert_eq!((token.expose(), text.parse()), (text, Ok(token)));
        }
        for bad in
            ["2-0-1", "2-1000-1", "2-0", "2-0-", "2-00-2", "2-0-02", "2-0-A", "2-0-2-2", "2--2"]
        {
            assert_eq!(format!("{bad}{rest}").parse::<LockToken>(), Err(InvalidToken), "{bad}");
        }
    }

    #[test]
    fn a_slot_has_a_name_that_no_request_can_have() {
        let name = "a/b".parse::<LockName>().unwrap();
        for slot in [1, 2, 256] {
            let of_slot = name.of_slot(slot);
            assert_eq!(of_slot.lock_and_slot(), (name.clone(), slot));
            assert_eq!(of_slot.as_str().parse::<LockName>().is_ok(), slot == 1);
            assert_eq!(LockName::stored(of_slot.as_str()), Some(of_slot));
        }
        for other in ["a#1", "a#0", "a#02", "a#257", "a#", "#2", "a#2#3", "a#x"] {
            assert_eq!(LockName::stored(other), None, "{other}");
        }
    }

    #[test]
    fn debug_output_never_shows_the_owner() {
        let token = grant(Owner::from_bytes([0xa5; 16]), FencingToken::MIN);
        assert!(!format!("{token:?} {:?}", token.owner()).contains("a5"));
    }

    #[test]
    fn bound_owners_differ_by_principal_and_by_owner() {
        let one = Owner::from_bytes([1; 16]);
        let two = Owner::from_bytes([2; 16]);
        assert_eq!(one.bound_to("ci"), one.bound_to("ci"));
        let different = ["ci", "c", "", "ci\0"].map(|principal| one.bound_to(principal));
        let different = [different.as_slice(), &[one, two.bound_to("ci")]].concat();
        for (i, owner) in different.iter().enumerate() {
            assert!(different[..i].iter().all(|other| other != owner), "number {i} is there twice");
        }
        let shown = grant(one, FencingToken::MIN);
        let known = grant(one.bound_to("ci"), FencingToken::MIN);
        assert_eq!((shown.bound_to("ci"), known.shown_by(one)), (known, shown));
    }

    #[test]
    fn derived_owners_differ_in_every_part() {
        let name = |text: &str| text.parse::<LockName>().unwrap();
        let base = Owner::derive("c", "p", &name("n"), "k");
        assert_eq!(base, Owner::derive("c", "p", &name("n"), "k"));
        for other in [
            Owner::derive("d", "p", &name("n"), "k"),
            Owner::derive("c", "q", &name("n"), "k"),
            Owner::derive("c", "p", &name("m"), "k"),
            Owner::derive("c", "p", &name("n"), "l"),
            Owner::derive("c", "pn", &name("n"), "k"),
        ] {
            assert_ne!(base, other);
        }
        let of_slots = |count, take| {
            Owner::derive_of_slots("c", "p", (&name("n"), Slots::new(count, take).unwrap()), "k")
        };
        let all = [base, of_slots(4, 1), of_slots(4, 2), of_slots(5, 1), of_slots(24, 1)];
        for (i, owner) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|other| other != owner), "number {i} is there twice");
        }
    }

    #[test]
    fn ttl_limits_hold() {
        assert_eq!(Ttl::from_millis(10).map(Ttl::millis), Ok(10));
        for bad in [9, 86_400_001, 1 << 63]
            .map(Duration::from_millis)
            .into_iter()
            .chain([Duration::from_micros(10_500)])
        {
            assert_eq!(Ttl::from_duration(bad), Err(InvalidTtl { given: bad }));
        }
        let said = Ttl::from_millis(9).unwrap_err().to_string();
        assert_eq!(said, "9ms is not a TTL; allowed are whole milliseconds from 10 to 86400000");
    }

    #[test]
    fn errors_of_tokens_and_infos_name_the_allowed_values() {
        let said = FencingToken::new(7).unwrap_err().to_string();
        assert_eq!(
            said,
            "7 is not a fencing token; allowed are 1000000000000000 to 9007199254740991"
        );
        assert!(Info::new(vec![b'i'; Info::MAX_LEN]).is_ok());
        let said = Info::new(vec![b'i'; Info::MAX_LEN + 1]).unwrap_err().to_string();
        assert_eq!(said, "the info has 4097 bytes; allowed are 4096");
    }
}
