//! Identifies callers by the keys in the keys file, and follows changes of that file.

use std::num::NonZeroU32;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use metrics::{Counter, Gauge};
use redlock_core::{LockName, Ttl};

use super::file::KeysError;
use super::key::{Key, Keys, Proof, ProvenKey, RateExceeded, RateLimit, Verb};
use super::secret;
use crate::config::Limits;
use crate::overload::clients::Client;
use crate::reload::{Content, Reload, Watched};

/// The credential that a request shows.
#[derive(Clone, Copy)]
pub enum Credential<'a> {
    /// The text of a key.
    Key(&'a str),
    /// The name of a key and the text of a key. They must belong together.
    NamedKey(&'a str, &'a str),
    /// The subject of a client certificate, and the end of its validity. The TLS handshake has
    /// verified the certificate.
    Certificate(&'a str, SystemTime),
}

/// Why a caller is refused. A wrong credential always gives `Unknown`, whether or not the key
/// exists. Only somebody who has the key learns that it has expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthError {
    /// No credential was shown.
    Missing,
    /// The credential is no key or certificate of this gateway.
    Unknown,
    /// The key or the certificate has expired.
    Expired,
    /// A page of another site made a browser send the request, with credentials that browsers add
    /// by themselves.
    CrossSite,
}

/// Identifies callers.
pub struct Authenticator {
    keys: Option<ArcSwap<Keys>>,
    /// Whether a caller without a key may force a release.
    may_force: bool,
}

impl Authenticator {
    /// Without keys, everybody is let in. On a loopback address everybody may force releases too,
    /// because all callers are on the same machine.
    pub fn open(is_loopback: bool) -> Self {
        Self { keys: None, may_force: is_loopback }
    }

    /// Lets in only callers with one of these keys.
    pub fn new(keys: Keys) -> Self {
        let authenticator = Self { keys: Some(ArcSwap::default()), may_force: false };
        authenticator.replace(keys);
        authenticator
    }

    /// Replaces all keys.
    pub fn replace(&self, keys: Keys) {
        if let Some(current) = &self.keys {
            let old = current.load();
            let gone = old.missing_in(&keys).join(", ");
            if !gone.is_empty() {
                tracing::warn!(
                    keys = gone,
                    "--auth-keys: these keys were removed and let nobody in any more"
                );
            }
            keys.inherit_from(&old);
            current.store(Arc::new(keys));
        }
    }

    fn current(&self) -> Arc<Keys> {
        self.keys.as_ref().map(|keys| keys.load_full()).unwrap_or_default()
    }

    /// Whether the gateway has no keys file, so that everybody is let in.
    pub fn is_open(&self) -> bool {
        self.keys.is_none()
    }

    /// Whether there is a key of this name.
    pub fn has_key_named(&self, name: &str) -> bool {
        self.keys.as_ref().is_some_and(|keys| keys.load().by_name.contains_key(name))
    }

    /// The caller with this credential.
    ///
    /// # Errors
    /// The reason why the caller is not let in.
    pub fn identify(&self, shown: Option<Credential<'_>>) -> Result<Caller, AuthError> {
        let Some(keys) = &self.keys else { return Ok(Caller::anonymous(self.may_force)) };
        let keys = keys.load();
        let known = match shown.ok_or(AuthError::Missing)? {
            Credential::Key(text) => keys.proven_by_text(text),
            Credential::NamedKey(name, text) => {
                keys.proven_by_text(text).filter(|known| *known.key.name == *name)
            }
            Credential::Certificate(subject, ends) => keys.proven_by_certificate(subject, ends),
        };
        Caller::of(known.ok_or(AuthError::Unknown)?)
    }

    /// Identifies a caller again, some time after it was let in. Meanwhile its key may have been
    /// removed, or its key or certificate may have expired.
    ///
    /// # Errors
    /// As [`Authenticator::identify`].
    pub fn identify_again(&self, caller: &Caller) -> Result<Caller, AuthError> {
        let (Some(keys), Some(known)) = (&self.keys, &caller.known) else {
            return Ok(caller.clone());
        };
        let keys = keys.load();
        let key = keys.by_name.get(&known.key.name).ok_or(AuthError::Unknown)?;
        let still = match known.by {
            Proof::Hash(hash) => key.hashes.contains(&hash),
            Proof::Certificate { .. } => key.certificate == known.key.certificate,
        };
        if !still {
            return Err(AuthError::Unknown);
        }
        Caller::of(ProvenKey { key: key.clone(), by: known.by })
    }

    /// Reads a keys file and follows it. When the file changes, the new keys count. If the new file
    /// cannot be used, the old keys stay and the log has the error. Must be called on a tokio
    /// runtime.
    ///
    /// # Errors
    /// The fault in the file as it is now.
    pub(crate) fn following(
        path: &Path,
        reload: &Reload,
        KeysMetrics { failures, expiry }: KeysMetrics,
    ) -> Result<Arc<Self>, KeysError> {
        let mut watched = Watched::new(vec![path.to_owned()], reload);
        let first = keys(path, watched.contents())?;
        show_expiry(&first, &expiry);
        if first.is_empty() {
            tracing::warn!(file = %path.display(), "--auth-keys: the file has no key: nobody is let in");
        }
        warn_of_exposure(path);
        let authenticator = Arc::new(Self::new(first));
        let path = path.to_owned();
        let followed = authenticator.clone();
        tokio::spawn(async move {
            loop {
                {
                    // The same future goes on after each timeout, because it is not cancel-safe.
                    let mut changed = pin!(watched.changed());
                    while tokio::time::timeout(SHOW_EXPIRY, &mut changed).await.is_err() {
                        show_expiry(&followed.current(), &expiry);
                    }
                }
                match keys(&path, watched.contents()) {
                    Ok(keys) => {
                        tracing::info!(keys = keys.len(), "--auth-keys: the file was read again");
                        warn_of_exposure(&path);
                        show_expiry(&keys, &expiry);
                        followed.replace(keys);
                    }
                    Err(error) => {
                        failures.increment(1);
                        tracing::error!(
                            error = error.to_string(),
                            "--auth-keys: the file cannot be used; the old keys stay"
                        );
                    }
                }
            }
        });
        Ok(authenticator)
    }
}

/// Metrics of the keys file.
pub(crate) struct KeysMetrics {
    pub(crate) failures: Counter,
    /// The next expiry of a key.
    pub(crate) expiry: Gauge,
}

/// How often the gauge of the next expiry is set, because a key may have expired.
const SHOW_EXPIRY: Duration = Duration::from_secs(60);

fn show_expiry(keys: &Keys, gauge: &Gauge) {
    let now = SystemTime::now();
    let coming = keys.by_name.values().filter_map(|key| key.expires).filter(|end| *end > now);
    let next = coming.min().and_then(|end| end.duration_since(UNIX_EPOCH).ok());
    gauge.set(next.map_or(0.0, |next| next.as_secs() as f64));
}

/// The sender of a request.
#[derive(Clone)]
pub struct Caller {
    known: Option<ProvenKey>,
    /// Whether a caller without a key may force a release. For a caller with a key, the permissions
    /// of the key decide.
    may_force: bool,
}

impl Caller {
    /// A caller of a gateway without keys. `may_force`: whether it may force a release.
    pub fn anonymous(may_force: bool) -> Self {
        Self { known: None, may_force }
    }

    fn of(known: ProvenKey) -> Result<Self, AuthError> {
        let of_certificate = match known.by {
            Proof::Certificate { ends } => Some(ends),
            Proof::Hash(_) => None,
        };
        let now = SystemTime::now();
        let has_ended =
            [known.key.expires, of_certificate].into_iter().flatten().any(|end| end <= now);
        if has_ended {
            Err(AuthError::Expired)
        } else {
            Ok(Self { known: Some(known), may_force: false })
        }
    }

    fn key(&self) -> Option<&Key> {
        self.known.as_ref().map(|known| &*known.key)
    }

    /// The client that the caller's requests are charged to. `None` on a gateway without keys.
    pub fn client(&self) -> Option<&Arc<Client>> {
        self.key().map(Key::client)
    }

    /// The caller's name, for logs and people.
    pub fn name(&self) -> &str {
        self.principal().unwrap_or(secret::ANONYMOUS)
    }

    /// The principal that tokens are bound to. `None` on a gateway without keys.
    pub fn principal(&self) -> Option<&str> {
        self.key().map(|key| &*key.name)
    }

    /// Whether the caller may use the verb on this lock.
    pub fn may(&self, verb: Verb, name: &LockName) -> bool {
        self.key().map_or(verb != Verb::Force || self.may_force, |key| key.may(verb, name))
    }

    /// Whether the caller may use the verb on at least one lock name. For a verb without lock
    /// names: whether the caller may use it.
    pub fn may_somewhere(&self, verb: Verb) -> bool {
        self.key().map_or(verb != Verb::Force || self.may_force, |key| key.may_somewhere(verb))
    }

    /// The limits of the caller's requests: those of its key, within those of the gateway.
    pub fn limits(&self, all: Limits) -> Limits {
        let Some(key) = self.key() else { return all };
        let max_hold = key.max_hold.map_or(all.max_hold, |own| own.min(all.max_hold));
        // The longest TTL is at most the time for which the caller may hold a lock.
        let longest = [key.max_ttl, Ttl::from_duration(max_hold).ok()].into_iter().flatten();
        let max_ttl = longest.fold(all.max_ttl, Ttl::min);
        Limits { max_ttl, default_ttl: all.default_ttl.min(max_ttl), max_hold, ..all }
    }

    /// Takes one request off the rate of the caller's key.
    ///
    /// # Errors
    /// The time until the next request is allowed.
    pub fn check_rate(&self) -> Result<(), Duration> {
        self.key().and_then(|key| key.rate_limit.as_ref()).map_or(Ok(()), RateLimit::check)
    }

    /// Takes several requests off the rate of the caller's key, or none.
    ///
    /// # Errors
    /// [`RateExceeded`].
    pub fn check_rate_of_many(&self, requests: NonZeroU32) -> Result<(), RateExceeded> {
        let limit = self.key().and_then(|key| key.rate_limit.as_ref());
        limit.map_or(Ok(()), |limit| limit.check_many(requests))
    }
}

fn warn_of_exposure(path: &Path) {
    Keys::exposure(path).into_iter().for_each(|exposure| tracing::warn!("--auth-keys: {exposure}"));
}

fn keys(path: &Path, contents: &[Content]) -> Result<Keys, KeysError> {
    let content = contents.first().ok_or_else(|| KeysError::NotRead(path.to_owned()))?;
    Keys::of_file(path, content)
}
