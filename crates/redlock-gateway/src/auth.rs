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
    limiter: Arc<DefaultDirectRateLimiter>,
}

impl Pace {
    fn new(rate: NonZeroU32, burst: NonZeroU32) -> Self {
        let limiter = Arc::new(RateLimiter::direct(Quota::per_second(rate).allow_burst(burst)));
        Self { rate, burst, limiter }
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
        let shown = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| format!("{shown}: {error}"))?;
        Self::parse(&text).map_err(|error| format!("{shown}{error}"))
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// As [`Keys::read`], to be put behind the name of the file.
    pub fn parse(text: &str) -> Result<Self, String> {
        file::parse(text)
    }

    /// Who was at the limit of its rate stays there.
    fn keep_pace_of(&mut self, old: &Self) {
        for (name, key) in &mut self.by_name {
            let Some(was) = old.by_name.get(name).and_then(|key| key.pace.as_ref()) else { continue };
            if let Some(pace) = Arc::get_mut(key).and_then(|key| key.pace.as_mut())
                && (pace.rate, pace.burst) == (was.rate, was.burst)
            {
                pace.limiter = was.limiter.clone();
            }
        }
        let certified = self.by_name.values().filter_map(|key| Some((key.certificate.clone()?, key.clone())));
        self.by_certificate = certified.collect();
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
    pub fn replace(&self, mut keys: Keys) {
        if let Some(current) = &self.keys {
            keys.keep_pace_of(&current.load());
            current.store(Arc::new(keys));
        }
    }

    /// Whether there are no keys to show.
    pub fn is_open(&self) -> bool {
        self.keys.is_none()
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
        self.principal().unwrap_or("anonymous")
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
        let max_ttl = key.max_ttl.map_or(all.max_ttl, |own| own.min(all.max_ttl));
        Limits {
            max_ttl,
            default_ttl: all.default_ttl.min(max_ttl),
            max_hold: key.max_hold.map_or(all.max_hold, |own| own.min(all.max_hold)),
            ..all
        }
    }

    /// Counts a request.
    ///
    /// # Errors
    /// After how long there is room for the next one, when there is none now.
    pub fn keep_pace(&self) -> Result<(), Duration> {
        let Some(pace) = self.key().and_then(|key| key.pace.as_ref()) else { return Ok(()) };
        pace.limiter.check().map_err(|early| early.wait_time_from(DefaultClock::default().now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> LockName {
        LockName::parse(text).unwrap()
    }

    /// A key of this name, and a file with an entry for it.
    fn key(of: &str, rest: &str) -> (String, String) {
        let secret = Secret::new(of, &redlock_core::clock::OsEntropy);
        let entry = format!("[[key]]\nname = {of:?}\nhashes = [{:?}]\n{rest}\n", secret.hash_text());
        (secret.expose().to_owned(), entry)
    }

    const ALL: &str = "allow = [{ verbs = ['acquire', 'release'], names = ['deploy/*', 'exact'] }]";

    #[test]
    fn a_key_opens_what_its_rules_name_and_nothing_else() {
        let (text, entry) = key("ci", ALL);
        let guard = Guard::new(Keys::parse(&entry).unwrap());
        let caller = guard.identify(Some(Credential::Key(&text))).unwrap();
        assert_eq!((caller.name(), caller.principal()), ("ci", Some("ci")));
        for (verb, lock, allowed) in [
            (Verb::Acquire, "deploy/x", true),
            (Verb::Release, "exact", true),
            (Verb::Acquire, "exact2", false),
            (Verb::Acquire, "deploy", false),
            (Verb::Extend, "deploy/x", false),
            (Verb::Force, "deploy/x", false),
        ] {
            assert_eq!(caller.may(verb, &name(lock)), allowed, "{verb:?} {lock}");
        }
        assert!(!caller.may_somewhere(Verb::Metrics) && caller.may_somewhere(Verb::Acquire));
    }

    #[test]
    fn strangers_are_told_apart_only_where_they_had_the_key() {
        let (old, expired) = key("old", &format!("expires = 2020-01-01T00:00:00Z\n{ALL}"));
        let (right, entry) = key("ci", ALL);
        let (wrong, _) = key("ci", ALL);
        let (absent, _) = key("nobody", ALL);
        let guard = Guard::new(Keys::parse(&(expired + &entry)).unwrap());
        let refused = |shown| guard.identify(shown).err();
        assert_eq!(refused(None), Some(Stranger::Nobody));
        for text in [wrong.as_str(), absent.as_str(), "", "rlk.ci.", "hunter2", &right[..right.len() - 1]] {
            assert_eq!(refused(Some(Credential::Key(text))), Some(Stranger::Unknown), "{text}");
        }
        assert_eq!(refused(Some(Credential::Key(&old))), Some(Stranger::Expired));
        assert_eq!(refused(Some(Credential::NamedKey("ci", &right))), None);
        assert_eq!(refused(Some(Credential::NamedKey("old", &right))), Some(Stranger::Unknown));
        assert_eq!(refused(Some(Credential::Certificate("CN=ci"))), Some(Stranger::Unknown));
    }

    #[test]
    fn while_a_key_is_being_replaced_both_are_right() {
        let (one, two) =
            (Secret::new("ci", &redlock_core::clock::OsEntropy), Secret::new("ci", &redlock_core::clock::OsEntropy));
        let text = format!("[[key]]\nname = 'ci'\nhashes = [{:?}, {:?}]\n{ALL}", one.hash_text(), two.hash_text());
        let guard = Guard::new(Keys::parse(&text).unwrap());
        assert!([one, two].iter().all(|secret| guard.identify(Some(Credential::Key(secret.expose()))).is_ok()));
    }

    #[test]
    fn a_certificate_is_a_principal_as_a_key_is() {
        let text = format!("[[key]]\nname = 'ci'\ncertificate = 'CN=ci,O=Example'\nmax_ttl = '1s'\n{ALL}");
        let guard = Guard::new(Keys::parse(&text).unwrap());
        let caller = guard.identify(Some(Credential::Certificate("CN=ci,O=Example"))).unwrap();
        assert_eq!(caller.principal(), Some("ci"));
        assert!(guard.identify(Some(Credential::Certificate("CN=ci"))).is_err());
    }

    #[test]
    fn limits_of_a_key_only_ever_lower_those_of_the_gateway() {
        let millis = |millis| Ttl::from_millis(millis).unwrap();
        let day = Duration::from_secs(86_400);
        let all = Limits { default_ttl: millis(30_000), max_ttl: millis(300_000), max_wait: day, max_hold: day };
        for (own, default, max, hold) in
            [("'10s'", 10_000, 10_000, 3_600), ("'1m'", 30_000, 60_000, 3_600), ("'1h'", 30_000, 300_000, 3_600)]
        {
            let (text, entry) = key("ci", &format!("max_ttl = {own}\nmax_hold = '1h'\n{ALL}"));
            let guard = Guard::new(Keys::parse(&entry).unwrap());
            let limits = guard.identify(Some(Credential::Key(&text))).unwrap().limits(all);
            assert_eq!((limits.default_ttl, limits.max_ttl), (millis(default), millis(max)), "{own}");
            assert_eq!(limits.max_hold, Duration::from_secs(hold));
        }
    }

    #[test]
    fn a_new_file_does_not_refill_what_a_key_has_used_up() {
        let (text, entry) = key("ci", &format!("rate = 1\nburst = 2\n{ALL}"));
        let guard = Guard::new(Keys::parse(&entry).unwrap());
        let asks = || guard.identify(Some(Credential::Key(&text))).unwrap().keep_pace();
        assert_eq!((asks(), asks()), (Ok(()), Ok(())));
        let pause = asks().unwrap_err();
        assert!(pause > Duration::ZERO && pause <= Duration::from_secs(1), "{pause:?}");
        guard.replace(Keys::parse(&entry).unwrap());
        assert!(asks().is_err());
        guard.replace(Keys::parse(&entry.replace("burst = 2", "burst = 3")).unwrap());
        assert_eq!(asks(), Ok(()));
    }

    #[test]
    fn without_keys_everybody_may_all_but_force() {
        let caller = Guard::open().identify(None).unwrap();
        assert!(caller.may(Verb::Release, &name("x")) && !caller.may(Verb::Force, &name("x")));
        assert_eq!((caller.name(), caller.principal(), caller.keep_pace()), ("anonymous", None, Ok(())));
    }
}
