//! The gateways, and how one of them is asked until it answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use reqwest::header::AUTHORIZATION;
use reqwest::{Certificate, Method, Url};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::clock::Moment;
use crate::error::Error;
use crate::http::{Call, Failure, IDEMPOTENCY_KEY, LOCK_TOKEN};

/// Between two rounds over all gateways: the first pause, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// A gateway that cannot even be connected to is left for the next one.
const CONNECT: Duration = Duration::from_secs(2);
/// How long an idle connection is kept. An extension that reuses it needs no name server. A gateway keeps it for 75 s.
const IDLE: Duration = Duration::from_secs(70);
/// With less time an answer is not to be expected, and what was heard before tells more than its absence.
pub(crate) const SHORTEST_TRY: Duration = Duration::from_millis(50);
/// For requests that hold no lease up.
const ONE_TRY: Duration = Duration::from_secs(2);
const ALL_TRIES: Duration = Duration::from_secs(5);

/// A service of one or several gateways over the same masters. Cheap to clone; the copies share their connections.
#[derive(Debug, Clone)]
pub struct Client(Arc<Service>);

#[derive(Debug)]
struct Service {
    http: reqwest::Client,
    urls: Vec<Url>,
    key: Option<String>,
    /// The gateway that answered last.
    current: AtomicUsize,
}

/// Where the gateways are, and how to be known there.
#[derive(Debug, Default)]
#[must_use]
pub struct ClientBuilder {
    urls: Vec<String>,
    key: Option<String>,
    authorities: Vec<Vec<u8>>,
    identity: Option<Vec<u8>>,
}

/// A lock as a majority of the nodes sees it, without its token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LockStatus {
    pub name: String,
    /// `held`, `free` or `unknown`.
    pub state: String,
    /// The holder's label.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The name of the API key that acquired it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fencing_token: Option<u64>,
    /// In milliseconds, unless it is extended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_ms: Option<u64>,
    /// By the acquiring gateway's wall clock, RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acquired_at: Option<String>,
    /// What newer gateways tell.
    #[serde(flatten)]
    pub more: serde_json::Map<String, serde_json::Value>,
}

/// A page of held locks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Page {
    pub locks: Vec<LockStatus>,
    /// For the next page; `None` at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// Whether a gateway takes requests, and what it says of its masters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeReport {
    /// `ready`, `no_quorum` or `draining`.
    pub status: String,
    /// One object per master, for whoever may see them.
    #[serde(default)]
    pub nodes: Vec<serde_json::Value>,
}

impl ClientBuilder {
    /// A gateway; repeat for several. A path is kept: `https://example.com/locks-of-team-a`.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.urls.push(url.into());
        self
    }

    /// The API key.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Certificates (PEM) of authorities that are trusted beside the system's.
    pub fn authority(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.authorities.push(pem.into());
        self
    }

    /// A client certificate and its key (PEM, in one text).
    pub fn identity(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.identity = Some(pem.into());
        self
    }

    /// # Errors
    /// [`Error::Setup`], with the value, when something of it cannot work. Nothing is connected yet.
    pub fn build(self) -> Result<Client, Error> {
        let setup = |what: String| Error::Setup(what);
        let urls = self.urls.iter().map(|url| parse(url)).collect::<Result<Vec<_>, _>>()?;
        if urls.is_empty() {
            return Err(setup(
                "no URL of a gateway was given, such as http://127.0.0.1:8080".into(),
            ));
        }
        // No redirects: a token goes where it was meant to go. No proxy of the environment that a lock would depend on unseen.
        let mut http = reqwest::Client::builder()
            .connect_timeout(CONNECT)
            .pool_idle_timeout(IDLE)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .user_agent(concat!("redlock-client/", env!("CARGO_PKG_VERSION")));
        for pem in &self.authorities {
            let found = Certificate::from_pem_bundle(pem)
                .map_err(|error| setup(format!("the authority: {error}")))?;
            if found.is_empty() {
                return Err(setup("the authority has no certificate (PEM)".into()));
            }
            http = http.tls_certs_merge(found);
        }
        if let Some(pem) = &self.identity {
            let identity = reqwest::Identity::from_pem(pem);
            http = http.identity(
                identity.map_err(|error| setup(format!("the client certificate: {error}")))?,
            );
        }
        let http = http.build().map_err(|error| setup(format!("the HTTP client: {error}")))?;
        let key = self.key.map(|key| key.trim().to_owned());
        Ok(Client(Arc::new(Service { http, urls, key, current: AtomicUsize::new(0) })))
    }
}

fn parse(text: &str) -> Result<Url, Error> {
    // What is in front of an @ may be a password.
    let shown = text.rsplit('@').next().unwrap_or_default();
    let refused = |why: String| Error::Setup(format!("{shown:?} is no URL of a gateway: {why}"));
    let mut url = Url::parse(text).map_err(|error| refused(error.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return Err(refused("it has to begin with http:// or https://, and name a host".into()));
    }
    if url.query().is_some()
        || url.fragment().is_some()
        || !url.username().is_empty()
        || url.password().is_some()
    {
        return Err(refused(
            "nothing but scheme, host, port and path belongs there; a key goes into a file of its own".into(),
        ));
    }
    if !url.path().ends_with('/') {
        url.set_path(&format!("{}/", url.path()));
    }
    Ok(url)
}

impl Client {
    /// Of one gateway without keys.
    ///
    /// # Errors
    /// [`Error::Setup`] when it is no URL.
    pub fn new(url: impl Into<String>) -> Result<Self, Error> {
        Self::builder().url(url).build()
    }

    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// What the nodes know of a lock.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Unavailable`].
    pub async fn status(&self, name: &str) -> Result<LockStatus, Error> {
        self.read(Call::of_lock(Method::GET, name)?).await
    }

    /// A page of the held locks whose names begin so.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Unavailable`].
    pub async fn list(
        &self,
        prefix: &str,
        limit: u32,
        cursor: Option<&str>,
    ) -> Result<Page, Error> {
        let limit = limit.to_string();
        let pairs = [("prefix", Some(prefix)), ("limit", Some(&*limit)), ("cursor", cursor)];
        let pairs = pairs.into_iter().filter_map(|(key, value)| Some((key, value?)));
        // Only to encode the query; the gateway comes later.
        let query = Url::parse_with_params("http://gateway/locks", pairs)
            .map_err(|error| Error::Setup(error.to_string()))?;
        self.read(Call::new(Method::GET, format!("locks?{}", query.query().unwrap_or_default())))
            .await
    }

    /// Whether the gateway takes requests, and its masters. An answer also when it does not.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    pub async fn nodes(&self) -> Result<NodeReport, Error> {
        self.read(Call::new(Method::GET, "readyz").with_answer(503)).await
    }

    /// Extends a lock that somebody keeps by its token; returns until when it is held.
    ///
    /// # Errors
    /// [`Error::Lost`] when the token holds it no more; [`Error::Refused`], [`Error::Unavailable`].
    pub async fn extend(&self, name: &str, token: &str, ttl: Duration) -> Result<Moment, Error> {
        let call = extension(name, token, ttl)?;
        let extended = self.ask::<Granted>(&call, Moment::now() + ALL_TRIES, ONE_TRY).await;
        let (granted, sent) = extended.map_err(lost)?;
        granted
            .map(|granted| granted.deadline(sent, ttl))
            .ok_or_else(|| Error::Setup("PATCH was answered 204".into()))
    }

    /// Releases a lock by its token; quiet when it is not held any more.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Unavailable`].
    pub async fn release(&self, name: &str, token: &str) -> Result<(), Error> {
        self.release_until(name, token, Moment::now() + ALL_TRIES).await
    }

    pub(crate) async fn release_until(
        &self,
        name: &str,
        token: &str,
        until: Moment,
    ) -> Result<(), Error> {
        let call = Call::of_lock(Method::DELETE, name)?.secret(&LOCK_TOKEN, token)?;
        match self.ask::<serde_json::Value>(&call, until, ONE_TRY).await {
            // A repetition meets what the first one did.
            Err(Error::Refused(problem)) if is_loss(&problem.code) => Ok(()),
            result => result.map(|_| ()),
        }
    }

    /// Releases what requests with this key were granted that were not answered. When nobody answers now either, the lock ends
    /// with its TTL.
    pub(crate) async fn release_by_key(
        &self,
        name: &str,
        idempotency_key: &str,
    ) -> Result<(), Error> {
        let call =
            Call::of_lock(Method::DELETE, name)?.secret(&IDEMPOTENCY_KEY, idempotency_key)?;
        self.ask::<serde_json::Value>(&call, Moment::now() + ONE_TRY, ONE_TRY).await.map(|_| ())
    }

    /// Takes a lock from whoever holds it.
    ///
    /// # Errors
    /// [`Error::Refused`] with status 404 when nobody does; [`Error::Unavailable`].
    pub async fn force_release(&self, name: &str) -> Result<(), Error> {
        let mut call = Call::of_lock(Method::DELETE, name)?;
        call.path.push_str("?force=true");
        self.ask::<serde_json::Value>(&call, Moment::now() + ALL_TRIES, ONE_TRY).await.map(|_| ())
    }

    async fn read<T: DeserializeOwned>(&self, call: Call) -> Result<T, Error> {
        let (answer, _) = self.ask(&call, Moment::now() + ALL_TRIES, ONE_TRY).await?;
        answer.ok_or_else(|| Error::Setup(format!("{} was answered without a body", call.path)))
    }

    pub(crate) fn gateways(&self) -> u32 {
        self.0.urls.len() as u32
    }

    /// Asks one gateway after the other until one answers, with backoff, and says when the request was sent that was answered.
    /// What is asked must do no harm when it is done twice.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        call: &Call,
        until: Moment,
        one_try: Duration,
    ) -> Result<(Option<T>, Moment), Error> {
        let Service { http, urls, key, current } = &*self.0;
        let mut call = call.clone();
        if let Some(key) = key {
            call = call.secret(&AUTHORIZATION, &format!("Bearer {key}"))?;
        }
        let (mut pause, longest) = PAUSES;
        loop {
            let mut heard = Vec::new();
            let mut soonest = Duration::MAX;
            for _ in 0..urls.len() {
                // One that has no time for an answer would hide what was heard before.
                if !heard.is_empty() && until.left() < SHORTEST_TRY {
                    break;
                }
                let at = current.load(Ordering::Relaxed);
                let sent = Moment::now();
                let failure = match call.send(http, &urls[at], one_try.min(until.left())).await {
                    Ok(answer) => return Ok((answer, sent)),
                    Err(failure) => failure,
                };
                let Some(asked) = failure.pause() else {
                    let Failure::Problem(problem) = failure else { continue };
                    return Err(Error::Refused(problem));
                };
                tracing::debug!(url = %urls[at], failure = %failure, "asking the next gateway");
                soonest = soonest.min(asked);
                heard.push(failure.to_string());
                // Unless another request has gone on to it meanwhile.
                let _ = current.compare_exchange(
                    at,
                    (at + 1) % urls.len(),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
            }
            let rest = pause.mul_f64(0.5 + fastrand::f64()).max(soonest);
            if rest + SHORTEST_TRY >= until.left() {
                return Err(Error::Unavailable { what: heard });
            }
            tokio::time::sleep(rest).await;
            pause = (pause * 2).min(longest);
        }
    }
}

/// What a client needs to know of a granted or extended lock.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Granted {
    pub(crate) token: String,
    pub(crate) fencing_token: u64,
    validity_ms: u64,
    elapsed_ms: u64,
}

impl Granted {
    /// Until when it may be trusted, if it was asked for then for so long. What was on the way is lost, what was spent in the
    /// gateway is not: its validity was counted afterwards. No answer is believed that says more than can be.
    pub(crate) fn deadline(&self, sent: Moment, ttl: Duration) -> Moment {
        let elapsed = Duration::from_millis(self.elapsed_ms).min(Moment::now().since(sent));
        sent + elapsed + Duration::from_millis(self.validity_ms).min(ttl)
    }

    /// Whether the token can be one: shells and headers take it as it stands.
    pub(crate) fn has_token(&self) -> bool {
        !self.token.is_empty()
            && self.token.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'.')
    }
}

/// A request to extend.
pub(crate) fn extension(name: &str, token: &str, ttl: Duration) -> Result<Call, Error> {
    let body = serde_json::json!({ "ttl_ms": ttl.as_millis() as u64 });
    Ok(Call::of_lock(Method::PATCH, name)?.secret(&LOCK_TOKEN, token)?.body(body))
}

/// Whether a gateway says by this that a token holds its lock no more. A page of a proxy has a status too.
fn is_loss(code: &str) -> bool {
    matches!(code, "lock_not_found" | "not_holder" | "max_hold_reached")
}

/// What a refused extension says.
pub(crate) fn lost(error: Error) -> Error {
    match error {
        Error::Refused(problem) if is_loss(&problem.code) => Error::Lost((*problem).into()),
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_in_front_of_a_gateway_is_kept_and_nonsense_is_named() {
        let url = |text| parse(text).map(|url| url.to_string());
        assert_eq!(url("http://localhost:8080").unwrap(), "http://localhost:8080/");
        assert_eq!(url("https://example.com/team-a").unwrap(), "https://example.com/team-a/");
        for wrong in ["localhost:8080", "ftp://a", "http://user:key@a", "http://a/?b", ""] {
            let error = url(wrong).unwrap_err().to_string();
            assert!(error.contains("is no URL") && !error.contains("key@"), "{error}");
        }
        assert!(
            Client::builder().build().unwrap_err().to_string().contains("http://127.0.0.1:8080")
        );
    }

    #[test]
    fn a_deadline_counts_from_the_moment_of_sending() {
        let granted = Granted {
            token: String::new(),
            fencing_token: 1,
            validity_ms: 29_000,
            elapsed_ms: 5_000,
        };
        let sent = Moment::now() - Duration::from_secs(7);
        let ttl = Duration::from_secs(30);
        assert_eq!(granted.deadline(sent, ttl).since(sent), Duration::from_secs(34));
        let boasts = Granted { validity_ms: u64::MAX, elapsed_ms: u64::MAX, ..granted };
        assert!(boasts.deadline(sent, ttl).since(sent) < Duration::from_secs(38));
    }
}
