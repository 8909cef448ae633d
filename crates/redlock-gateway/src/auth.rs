//! Who may do what. Keys are named, stored as hashes and read from one file; each has permissions on lock names.
//!
//! A name is the principal: the tokens of a lock work only for the principal that acquired it, so a key can be replaced
//! without its locks being lost, and a stolen token is worth nothing to another key. Without a file everybody is the
//! same, may do all that a holder may, and nobody may release by force.
//!
//! Knows nothing of HTTP, and of locks only their names.

mod file;
mod follow;
mod pattern;
mod secret;
mod tests;

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use redlock_core::{LockName, Ttl};
use serde::Deserialize;

use self::pattern::Pattern;
pub use self::secret::{Secret, is_key_name};
use crate::config::Limits;
use crate::reload::{self, Content};

/// What a key may be allowed to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    Acquire,
    /// Extend locks that the same key acquired.
    Extend,
    /// Release locks that the same key acquired.
    Release,
    /// See who holds a lock.
    Inspect,
    /// See which locks are held, of those that the rule names.
    List,
    /// Release any lock, and extend and release with the tokens of others.
    Force,
    /// See metrics and the state of the nodes.
    Metrics,
}

impl Verb {
    /// As it is written in the file.
    pub fn word(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Extend => "extend",
            Self::Release => "release",
            Self::Inspect => "inspect",
            Self::List => "list",
            Self::Force => "force",
            Self::Metrics => "metrics",
        }
    }

    /// Whether it is allowed for lock names, and not once for all.
    fn is_of_names(self) -> bool {
        self != Self::Metrics
    }
}

/// Verbs on names.
#[derive(Debug)]
struct Rule {
    verbs: Vec<Verb>,
    names: Vec<Pattern>,
}

/// One principal, and what it may do.
pub struct Key {
    name: Arc<str>,
    /// More than one while the key is being replaced.
    hashes: Vec<secret::Hash>,
    certificate: Option<String>,
    rules: Vec<Rule>,
    expires: Option<SystemTime>,
    max_ttl: Option<Ttl>,
    max_hold: Option<Duration>,
    pace: Option<Pace>,
}

struct Pace {
    rate: NonZeroU32,
    burst: NonZeroU32,
    limiter: ArcSwap<DefaultDirectRateLimiter>,
}

impl Pace {
    fn new(rate: NonZeroU32, burst: NonZeroU32) -> Self {
        let limiter = RateLimiter::direct(Quota::per_second(rate).allow_burst(burst));
        Self { rate, burst, limiter: ArcSwap::from_pointee(limiter) }
    }
}

impl Key {
    fn may(&self, verb: Verb, name: &LockName) -> bool {
        let allows = |rule: &Rule| rule.verbs.contains(&verb) && rule.names.iter().any(|names| names.matches(name));
        self.rules.iter().any(allows)
    }

    fn may_somewhere(&self, verb: Verb) -> bool {
        self.rules.iter().any(|rule| rule.verbs.contains(&verb))
    }
}

/// All keys of a file.
#[derive(Default)]
pub struct Keys {
    by_name: HashMap<Arc<str>, Arc<Key>>,
    by_certificate: HashMap<String, Arc<Key>>,
}

impl Keys {
    /// Their names, of those that others do not have.
    fn missing_in(&self, others: &Self) -> Vec<&str> {
        let names = self.by_name.keys().filter(|name| !others.by_name.contains_key(*name));
        names.map(|name| &**name).collect()
    }

    /// How many principals there are.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Reads a file.
    ///
    /// # Errors
    /// What is wrong with it, and where; never a part of a secret.
    pub fn read(path: &Path) -> Result<Self, String> {
        Self::of_file(path, &reload::read_one(path))
    }

    /// What was read of a file.
    fn of_file(path: &Path, content: &Content) -> Result<Self, String> {
        let shown = path.display();
        let bytes = content.as_ref().map_err(|error| format!("{shown}: {error}"))?;
        let text = std::str::from_utf8(bytes).map_err(|_| format!("{shown}: it is not UTF-8"))?;
        Self::parse(text).map_err(|error| format!("{shown}{error}"))
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// As [`Keys::read`], to be put behind the name of the file.
    pub fn parse(text: &str) -> Result<Self, String> {
        file::parse(text)
    }

    /// Who was at the limit of its rate stays there.
    fn keep_pace_of(&self, old: &Self) {
        for (name, key) in &self.by_name {
            let was = old.by_name.get(name).and_then(|key| key.pace.as_ref());
            if let (Some(pace), Some(was)) = (&key.pace, was)
                && (pace.rate, pace.burst) == (was.rate, was.burst)
            {
                pace.limiter.store(was.limiter.load_full());
            }
        }
    }
}

/// What a request shows of who sent it.
#[derive(Clone, Copy)]
pub enum Credential<'a> {
    /// The text of a key.
    Key(&'a str),
    /// The text of a key, and the name that it was given for.
    NamedKey(&'a str, &'a str),
    /// The subject of a certificate that was verified.
    Certificate(&'a str),
}

/// Why a caller is not let in. Tells apart what only the holder of a key can bring about, and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stranger {
    /// Nothing was shown.
    Nobody,
    /// What was shown is no key, or none that is known.
    Unknown,
    /// The key was right until it expired.
    Expired,
    /// A page of another site sent it, with a key that the browser has kept.
    OtherSite,
}

/// Lets callers in, or not.
pub struct Guard {
    keys: Option<ArcSwap<Keys>>,
}

impl Guard {
    /// Everybody may come.
    pub fn open() -> Self {
        Self { keys: None }
    }

    /// Only who has one of these keys.
    pub fn new(keys: Keys) -> Self {
        let guard = Self { keys: Some(ArcSwap::default()) };
        guard.replace(keys);
        guard
    }

    /// From now on only these keys count.
    pub fn replace(&self, keys: Keys) {
        if let Some(current) = &self.keys {
            let old = current.load();
            let gone = old.missing_in(&keys).join(", ");
            if !gone.is_empty() {
                tracing::warn!(keys = gone, "--auth-keys: from now on these keys let nobody in");
            }
            keys.keep_pace_of(&old);
            current.store(Arc::new(keys));
        }
    }

    /// Whether there are no keys to show.
    pub fn is_open(&self) -> bool {
        self.keys.is_none()
    }

    /// Whether there is a key of this name.
    pub fn knows(&self, name: &str) -> bool {
        self.keys.as_ref().is_some_and(|keys| keys.load().by_name.contains_key(name))
    }

    /// Who shows this.
    ///
    /// # Errors
    /// Why nobody is known by it.
    pub fn identify(&self, shown: Option<Credential<'_>>) -> Result<Caller, Stranger> {
        let Some(keys) = &self.keys else { return Ok(Caller::anonymous()) };
        let keys = keys.load();
        let known = match shown.ok_or(Stranger::Nobody)? {
            Credential::Key(text) => keys.holding(text),
            Credential::NamedKey(name, text) => keys.holding(text).filter(|known| *known.key.name == *name),
            Credential::Certificate(subject) => keys.certified(subject),
        };
        known.ok_or(Stranger::Unknown)?.let_in()
    }

    /// The caller as it would be let in now, for who was let in some time ago.
    ///
    /// # Errors
    /// As [`Guard::identify`].
    pub fn identify_again(&self, caller: &Caller) -> Result<Caller, Stranger> {
        let (Some(keys), Some(known)) = (&self.keys, &caller.0) else { return Ok(caller.clone()) };
        let keys = keys.load();
        let key = keys.by_name.get(&known.key.name).ok_or(Stranger::Unknown)?;
        let still = match known.by {
            By::Hash(hash) => key.hashes.contains(&hash),
            By::Certificate => key.certificate == known.key.certificate,
        };
        if !still {
            return Err(Stranger::Unknown);
        }
        Known { key: key.clone(), by: known.by }.let_in()
    }
}

/// A key, and what it was known by.
#[derive(Clone)]
struct Known {
    key: Arc<Key>,
    by: By,
}

#[derive(Clone, Copy)]
enum By {
    Hash(secret::Hash),
    Certificate,
}

impl Known {
    fn let_in(self) -> Result<Caller, Stranger> {
        match self.key.expires {
            Some(end) if end <= SystemTime::now() => Err(Stranger::Expired),
            _ => Ok(Caller(Some(self))),
        }
    }
}

impl Keys {
    /// Compares in a time that does not depend on how much of a hash is right, and compares with something also where there
    /// is no such name.
    fn holding(&self, text: &str) -> Option<Known> {
        let (name, hash) = secret::hash_of(text)?;
        let key = self.by_name.get(name);
        let hashes = key.map_or(&[secret::NO_HASH] as &[_], |key| &key.hashes);
        let right = hashes.iter().fold(false, |right, known| right | known.equals(&hash));
        key.filter(|_| right).map(|key| Known { key: key.clone(), by: By::Hash(hash) })
    }

    fn certified(&self, subject: &str) -> Option<Known> {
        self.by_certificate.get(subject).map(|key| Known { key: key.clone(), by: By::Certificate })
    }
}

/// Who sent a request.
#[derive(Clone)]
pub struct Caller(Option<Known>);

impl Caller {
    /// Whoever it is.
    pub fn anonymous() -> Self {
        Self(None)
    }

    fn key(&self) -> Option<&Key> {
        self.0.as_ref().map(|known| &*known.key)
    }

    /// For logs and people.
    pub fn name(&self) -> &str {
        self.principal().unwrap_or(secret::ANONYMOUS)
    }

    /// To whom tokens are bound; `None` where there are no keys.
    pub fn principal(&self) -> Option<&str> {
        self.key().map(|key| &*key.name)
    }

    /// Whether it may do this to this lock.
    pub fn may(&self, verb: Verb, name: &LockName) -> bool {
        self.key().map_or(verb != Verb::Force, |key| key.may(verb, name))
    }

    /// Whether it may do this to any lock, or at all.
    pub fn may_somewhere(&self, verb: Verb) -> bool {
        self.key().map_or(verb != Verb::Force, |key| key.may_somewhere(verb))
    }

    /// What its requests may ask for, of what the gateway allows to all.
    pub fn limits(&self, all: Limits) -> Limits {
        let Some(key) = self.key() else { return all };
        let max_hold = key.max_hold.map_or(all.max_hold, |own| own.min(all.max_hold));
        // Nobody gets for once what may not be held.
        let longest = [key.max_ttl, Ttl::from_duration(max_hold)].into_iter().flatten();
        let max_ttl = longest.fold(all.max_ttl, Ttl::min);
        Limits { max_ttl, default_ttl: all.default_ttl.min(max_ttl), max_hold, ..all }
    }

    /// Counts a request.
    ///
    /// # Errors
    /// After how long there is room for the next one, when there is none now.
    pub fn keep_pace(&self) -> Result<(), Duration> {
        let Some(pace) = self.key().and_then(|key| key.pace.as_ref()) else { return Ok(()) };
        pace.limiter.load().check().map_err(|early| early.wait_time_from(DefaultClock::default().now()))
    }
}
