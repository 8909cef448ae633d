//! Keys and their permissions, and the search for the key that a text or a certificate proves.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use governor::clock::{Clock, DefaultClock};
use governor::{DefaultDirectRateLimiter, InsufficientCapacity, Quota, RateLimiter};
use redlock_core::{LockName, Ttl};
use serde::Deserialize;

use super::secret::{self, Hash};
use crate::overload::clients::Client;
use crate::pattern::Pattern;

/// A permission of a key.
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
    /// List held locks among those that the rule names.
    List,
    /// Release any lock, and extend and release with the tokens of others.
    Force,
    /// Have the gateway announce a grant to a URL.
    Callback,
    /// See metrics and the state of the nodes.
    Metrics,
}

impl Verb {
    /// The verb as the keys file has it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Acquire => "acquire",
            Self::Extend => "extend",
            Self::Release => "release",
            Self::Inspect => "inspect",
            Self::List => "list",
            Self::Force => "force",
            Self::Callback => "callback",
            Self::Metrics => "metrics",
        }
    }

    /// Whether the verb is granted for certain lock names. Otherwise it applies to the whole
    /// gateway.
    pub(crate) fn is_of_names(self) -> bool {
        self != Self::Metrics
    }
}

/// Verbs that a key may use on names that match one of the patterns.
#[derive(Debug)]
pub(super) struct Rule {
    pub(super) verbs: Vec<Verb>,
    pub(super) names: Vec<Pattern>,
}

/// One principal and its permissions.
pub(super) struct Key {
    pub(super) name: Arc<str>,
    /// Hashes of the texts that prove this key. While an operator replaces the key, there are two:
    /// of the old and of the new text.
    pub(super) hashes: Vec<Hash>,
    pub(super) certificate: Option<String>,
    pub(super) rules: Vec<Rule>,
    pub(super) expires: Option<SystemTime>,
    pub(super) max_ttl: Option<Ttl>,
    pub(super) max_hold: Option<Duration>,
    pub(super) rate_limit: Option<RateLimit>,
    /// What the key's requests take of shared resources. When the file is read again, the new key
    /// inherits this from the old key of the same name.
    pub(super) client: OnceLock<Arc<Client>>,
}

/// Why several requests at once are beyond the rate of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RateExceeded {
    /// They are allowed after this time.
    Until(Duration),
    /// They are more than the burst, so they are never allowed at once.
    BeyondBurst(u32),
}

/// The rate limit of a key: requests per second, and the burst.
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

    /// Takes one request off the rate.
    ///
    /// # Errors
    /// The time until the next request is allowed.
    pub(super) fn check(&self) -> Result<(), Duration> {
        self.limiter
            .load()
            .check()
            .map_err(|early| early.wait_time_from(DefaultClock::default().now()))
    }

    /// Takes this many requests off the rate, or none. One more was taken before.
    pub(super) fn check_many(&self, requests: NonZeroU32) -> Result<(), RateExceeded> {
        if requests >= self.burst {
            return Err(RateExceeded::BeyondBurst(self.burst.get()));
        }
        match self.limiter.load().check_n(requests) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(early)) => {
                Err(RateExceeded::Until(early.wait_time_from(DefaultClock::default().now())))
            }
            Err(InsufficientCapacity(burst)) => Err(RateExceeded::BeyondBurst(burst)),
        }
    }
}

impl Key {
    /// The accounting of what the key's requests take of shared resources.
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
    /// The names of the keys that `others` lacks.
    pub(super) fn missing_in(&self, others: &Self) -> Vec<&str> {
        let names = self.by_name.keys().filter(|name| !others.by_name.contains_key(*name));
        names.map(|name| &**name).collect()
    }

    /// The number of principals.
    pub fn len(&self) -> usize {
        self.by_name.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }

    /// Inherits quota and rate from the old keys of the same names. Must be called before these
    /// keys are in use.
    pub(super) fn inherit_from(&self, old: &Self) {
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

    /// The key that a text proves. The time that this takes must reveal neither hashes nor names.
    /// So each comparison of hashes takes constant time, and a text with an unknown name is
    /// compared with a hash that no key has.
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

/// A key, and its proof.
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
