//! Keys: what each may do, and which one a text or a certificate proves.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use redlock_core::{LockName, Ttl};
use serde::Deserialize;

use super::secret::{self, Hash};
use crate::overload::clients::Client;
use crate::pattern::Pattern;

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
    pub(super) fn is_of_names(self) -> bool {
        self != Self::Metrics
    }
}

/// Verbs that a key may use, on names that match one of these patterns.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) verbs: Vec<Verb>,
    pub(super) names: Vec<Pattern>,
}

/// One principal, and what it may do.
pub(super) struct Key {
    pub(super) name: Arc<str>,
    /// More than one while the key is being replaced.
    pub(super) hashes: Vec<Hash>,
    pub(super) certificate: Option<String>,
    pub(super) rules: Vec<Rule>,
    pub(super) expires: Option<SystemTime>,
    pub(super) max_ttl: Option<Ttl>,
    pub(super) max_hold: Option<Duration>,
    pub(super) rate_limit: Option<RateLimit>,
    /// That of the key of this name in the file before, if there was one.
    pub(super) client: OnceLock<Arc<Client>>,
}

/// How often a key may be used.
pub(super) struct RateLimit {
    rate: NonZeroU32,
    burst: NonZeroU32,
    limiter: ArcSwap<DefaultDirectRateLimiter>,
}

impl RateLimit {
    pub(super) fn new(rate: NonZeroU32, burst: NonZeroU32) -> Self {
        let limiter = RateLimiter::direct(Quota::per_second(rate).allow_burst(burst));
        Self { rate, burst, limiter: ArcSwap::from_pointee(limiter) }
    }

    /// Takes one request off the rate of the key.
    ///
    /// # Errors
    /// After how long there is room for the next one, when there is none now.
    pub(super) fn check(&self) -> Result<(), Duration> {
        self.limiter
            .load()
            .check()
            .map_err(|early| early.wait_time_from(DefaultClock::default().now()))
    }
}

impl Key {
    /// What its requests have taken of what all share.
    pub(super) fn client(&self) -> &Arc<Client> {
        self.client.get_or_init(Arc::default)
    }

    pub(super) fn may(&self, verb: Verb, name: &LockName) -> bool {
        let allows = |rule: &Rule| {
            rule.verbs.contains(&verb) && rule.names.iter().any(|names| names.matches(name))
        };
        self.rules.iter().any(allows)
    }

    pub(super) fn may_somewhere(&self, verb: Verb) -> bool {
        self.rules.iter().any(|rule| rule.verbs.contains(&verb))
    }
}

/// All keys of a file.
#[derive(Default)]
pub struct Keys {
    pub(super) by_name: HashMap<Arc<str>, Arc<Key>>,
    pub(super) by_certificate: HashMap<String, Arc<Key>>,
}

impl Keys {
    /// The names of the keys that are not among the others.
    pub(super) fn missing_in(&self, others: &Self) -> Vec<&str> {
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

    /// What a key has used up stays used up. Before the keys are used.
    pub(super) fn go_on_from(&self, old: &Self) {
        for (name, key) in &self.by_name {
            let Some(was) = old.by_name.get(name) else { continue };
            let _ = key.client.set(was.client().clone());
            if let (Some(limit), Some(was)) = (&key.rate_limit, &was.rate_limit)
                && (limit.rate, limit.burst) == (was.rate, was.burst)
            {
                limit.limiter.store(was.limiter.load_full());
            }
        }
    }

    /// Compares in a time that does not depend on how much of a hash is right, and compares with something also where there
    /// is no such name.
    pub(super) fn proven_by_text(&self, text: &str) -> Option<ProvenKey> {
        let (name, hash) = secret::hash_of(text)?;
        let key = self.by_name.get(name);
        let hashes = key.map_or(&[secret::NO_HASH] as &[_], |key| &key.hashes);
        let right = hashes.iter().fold(false, |right, known| right | known.equals(&hash));
        key.filter(|_| right).map(|key| ProvenKey { key: key.clone(), by: Proof::Hash(hash) })
    }

    pub(super) fn proven_by_certificate(
        &self,
        subject: &str,
        ends: SystemTime,
    ) -> Option<ProvenKey> {
        self.by_certificate
            .get(subject)
            .map(|key| ProvenKey { key: key.clone(), by: Proof::Certificate { ends } })
    }
}

/// A key, and what proved it.
#[derive(Clone)]
pub(super) struct ProvenKey {
    pub(super) key: Arc<Key>,
    pub(super) by: Proof,
}

#[derive(Clone, Copy)]
pub(super) enum Proof {
    Hash(Hash),
    Certificate { ends: SystemTime },
}
