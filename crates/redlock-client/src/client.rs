//! The client of one or several gateways: sends a request to one after the other until one answers.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redlock_api::headers::{IDEMPOTENCY_KEY, LOCK_TOKEN};
use redlock_api::{ExtendBody, Health, Lease, LockList, LockStatus, Problem, ProblemCode};
use reqwest::header::{AUTHORIZATION, HeaderValue};
use reqwest::{Method, Response, Url};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use crate::clock::Moment;
use crate::error::{Error, Loss};
use crate::http::{Call, Failure, secret};
use crate::together::Together;
use crate::{log, tls};

/// The pause between two rounds over all gateways: the first, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// How long connecting may take before the next gateway is tried.
const CONNECT: Duration = Duration::from_secs(2);
/// How long an idle connection is kept. An extension that reuses it needs no name server. A gateway
/// keeps it for 75 s.
const IDLE: Duration = Duration::from_secs(70);
/// The shortest useful time for a try. With less, the failure heard before is more useful than a
/// timeout.
pub(crate) const SHORTEST_TRY: Duration = Duration::from_millis(50);
/// The time for one try to extend: a quarter of the time left, so that a hung gateway cannot use it
/// up, and at most 5 s.
pub(crate) const LONGEST_TRY: Duration = Duration::from_secs(5);
const TRIES_OF_TIME_LEFT: u32 = 4;
/// The time for one try, and for all tries, of a request that no guard makes.
pub(crate) const ONE_TRY: Duration = Duration::from_secs(2);
pub(crate) const ALL_TRIES: Duration = Duration::from_secs(5);

/// One or several gateways over the same masters. Cheap to clone; the copies share their
/// connections.
#[derive(Clone)]
pub struct Client(Arc<Service>);

struct Service {
    http: reqwest::Client,
    urls: Vec<Url>,
    /// The header with the API key.
    key: Option<HeaderValue>,
    timeout: Option<Duration>,
    /// Index of the gateway to ask first.
    current: AtomicUsize,
    together: Together,
}

/// The URLs and credentials of a [`Client`].
#[derive(Default)]
#[must_use]
pub struct ClientBuilder {
    urls: Vec<String>,
    key: Option<String>,
    authorities: Vec<Vec<u8>>,
    identity: Option<Vec<u8>>,
    timeout: Option<Duration>,
}

/// Leaves out the API key, which is a secret.
impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("urls", &self.0.urls).finish_non_exhaustive()
    }
}

/// Leaves out the API key and the private key.
impl fmt::Debug for ClientBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientBuilder").field("urls", &self.urls).finish_non_exhaustive()
    }
}

/// An answer of a gateway: typed, and as it was sent. A newer gateway may send more fields.
#[derive(Clone, PartialEq)]
pub struct Answer<T> {
    typed: T,
    /// The whole body.
    pub json: Value,
}

/// Leaves out the body, which may contain a secret token.
impl<T: fmt::Debug> fmt::Debug for Answer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.typed.fmt(f)
    }
}

impl<T> Deref for Answer<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.typed
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Answer<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = Value::deserialize(deserializer)?;
        let typed = T::deserialize(&json).map_err(D::Error::custom)?;
        Ok(Self { typed, json })
    }
}

impl ClientBuilder {
    /// Adds a gateway. A path is kept: `https://example.com/locks-of-team-a`.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.urls.push(url.into());
        self
    }

    /// The API key.
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Adds certificates (PEM) to trust beside the system's: of authorities, or a gateway's own.
    pub fn authority(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.authorities.push(pem.into());
        self
    }

    /// Sets the client certificate and its key (PEM, in one text).
    pub fn identity(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.identity = Some(pem.into());
        self
    }

    /// The longest time for one call, with its tries at all gateways and its wait for a lock. The
    /// default is 5 s for all calls but an acquire, which its wait bounds. A guard's extensions and
    /// release keep their own limits.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Builds the client. Nothing is connected yet.
    ///
    /// # Errors
    /// [`Error::Setup`], with the value that cannot work.
    pub fn build(self) -> Result<Client, Error> {
        let setup = |what: String| Error::Setup(what);
        let urls = self.urls.iter().map(|url| parse(url)).collect::<Result<Vec<_>, _>>()?;
        if urls.is_empty() {
            return Err(setup(
                "no URL of a gateway was given, such as http://127.0.0.1:8080".into(),
            ));
        }
        // No redirects, so that a token reaches no other host. No proxy from the environment, so
        // that no lock depends on one unnoticed.
        let tls = tls::config(
            urls.iter().any(|url| url.scheme() == "https"),
            &self.authorities,
            self.identity.as_deref(),
        );
        let http = reqwest::Client::builder()
            .tls_backend_preconfigured(tls.map_err(setup)?)
            .connect_timeout(CONNECT)
            .pool_idle_timeout(IDLE)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .user_agent(concat!("redlock-client/", env!("CARGO_PKG_VERSION")));
        let http = http.build().map_err(|error| setup(format!("the HTTP client: {error}")))?;
        let key = self.key.map(|key| secret(&AUTHORIZATION, &format!("Bearer {}", key.trim())));
        let key = key.transpose()?;
        Ok(Client(Arc::new(Service {
            http,
            urls,
            key,
            timeout: self.timeout,
            current: AtomicUsize::new(0),
            together: Together::default(),
        })))
    }
}

fn parse(text: &str) -> Result<Url, Error> {
    // The part before an @ may be a password.
    let shown = text.rsplit('@').next().unwrap_or_default();
    let refused = |why: String| Error::Setup(format!("{shown:?} is not a URL of a gateway: {why}"));
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
            "only scheme, host, port and path may be given; \
             an API key belongs in a file of its own"
                .into(),
        ));
    }
    if !url.path().ends_with('/') {
        url.set_path(&format!("{}/", url.path()));
    }
    Ok(url)
}

impl Client {
    /// Makes a client of one gateway without API keys.
    ///
    /// # Errors
    /// [`Error::Setup`] when `url` is not a gateway's URL.
    pub fn new(url: impl Into<String>) -> Result<Self, Error> {
        Self::builder().url(url).build()
    }

    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// Returns the status of a lock, as a majority of the nodes sees it.
    pub async fn status(&self, name: &str) -> Result<Answer<LockStatus>, Error> {
        self.read(Call::of_lock(Method::GET, name)?).await
    }

    /// Returns a page of the held locks whose names begin with `prefix`.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Unavailable`].
    pub async fn list(
        &self,
        prefix: &str,
        limit: u32,
        cursor: Option<&str>,
    ) -> Result<Answer<LockList>, Error> {
        let limit = limit.to_string();
        let pairs = [("prefix", Some(prefix)), ("limit", Some(&*limit)), ("cursor", cursor)];
        self.read(listing(pairs.into_iter().filter_map(|(key, value)| Some((key, value?))))?).await
    }

    /// Returns a gateway's state and its masters, also when it is not ready.
    pub async fn nodes(&self) -> Result<Answer<Health>, Error> {
        self.read(Call::new(Method::GET, "readyz").with_answer(503)).await
    }

    /// Extends a lock by its token, and returns the new deadline.
    ///
    /// # Errors
    /// [`Error::Lost`] when the token no longer holds the lock; [`Error::Refused`],
    /// [`Error::Unavailable`].
    pub async fn extend(&self, name: &str, token: &str, ttl: Duration) -> Result<Moment, Error> {
        let call = extension(name, token, ttl)?;
        let (lease, sent) = self.ask_at_once::<Lease>(&call).await.map_err(|e| lost(name, e))?;
        lease
            .map(|lease| deadline_of(lease.validity_ms, lease.elapsed_ms, sent, ttl))
            .ok_or_else(|| Error::Setup("PATCH was answered 204".into()))
    }

    /// Releases a lock by its token. Succeeds also if the lock is no longer held.
    pub async fn release(&self, name: &str, token: &str) -> Result<(), Error> {
        released(self.ask_at_once(&release(name, token)?).await)
    }

    /// Sends a release. Tries until a moment, even if no gateway can be reached.
    pub(crate) async fn release_until(&self, call: &Call, until: Moment) -> Result<(), Error> {
        loop {
            let answer = self.ask::<Value>(call, until, ONE_TRY, IfUnreachable::AskAgain).await;
            match &answer {
                // Some locks of a set were not released. Releasing the others again does no harm.
                Ok((Some(body), _)) if has_undecided(body) && SHORTEST_TRY < until.left() => {
                    tokio::time::sleep(SHORTEST_TRY).await;
                }
                _ => return released(answer),
            }
        }
    }

    /// Releases the grant of unanswered requests with this key. If no gateway answers now either,
    /// the lock ends with its TTL.
    pub(crate) async fn release_by_key(
        &self,
        release: Call,
        idempotency_key: &str,
        slots: Option<(u32, u32)>,
    ) -> Result<(), Error> {
        let mut call = release.secret(&IDEMPOTENCY_KEY, idempotency_key)?;
        if let Some((slots, take)) = slots {
            call.path.push_str(&format!("?slots={slots}&take={take}"));
        }
        let until = Moment::now() + ONE_TRY;
        self.ask::<Value>(&call, until, ONE_TRY, IfUnreachable::Fail).await.map(|_| ())
    }

    /// Releases a lock whoever holds it.
    ///
    /// # Errors
    /// [`Error::Refused`] with status 404 when the lock is free; [`Error::Unavailable`].
    pub async fn force_release(&self, name: &str) -> Result<(), Error> {
        self.force_release_slot(name, 1).await
    }

    /// Releases one slot of a lock, from 1, whoever holds it. Slot 1 is the lock itself.
    ///
    /// # Errors
    /// [`Error::Refused`] with status 404 when the slot is free; [`Error::Unavailable`].
    pub async fn force_release_slot(&self, name: &str, slot: u32) -> Result<(), Error> {
        let mut call = Call::of_lock(Method::DELETE, name)?;
        call.path.push_str("?force=true");
        if slot != 1 {
            call.path.push_str(&format!("&slot={slot}"));
        }
        self.ask_at_once::<Value>(&call).await.map(|_| ())
    }

    async fn read<T: DeserializeOwned>(&self, call: Call) -> Result<T, Error> {
        let (answer, _) = self.ask_at_once(&call).await?;
        answer.ok_or_else(|| Error::Setup(format!("{} was answered without a body", call.path)))
    }

    pub(crate) fn gateways(&self) -> u32 {
        self.0.urls.len() as u32
    }

    /// The leases of this client that wait for their renewal.
    pub(crate) fn together(&self) -> &Together {
        &self.0.together
    }

    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.0.timeout
    }

    /// The URL of a gateway, for people.
    pub(crate) fn url(&self, at: usize) -> &str {
        self.0.urls[at].as_str().trim_end_matches('/')
    }

    pub(crate) fn route(&self) -> Route {
        let at = self.0.current.load(Ordering::Relaxed);
        Route { at, is_unsettled: false, last_failure: None }
    }

    /// Sends a request that no guard makes. Fails at once if no gateway can be reached.
    async fn ask_at_once<T: DeserializeOwned>(
        &self,
        call: &Call,
    ) -> Result<(Option<T>, Moment), Error> {
        let until = Moment::now() + self.0.timeout.unwrap_or(ALL_TRIES);
        self.ask(call, until, ONE_TRY, IfUnreachable::Fail).await
    }

    /// Sends a request to one gateway after the other, with backoff, until one answers. Returns the
    /// answer and when its request was sent. The request must be idempotent.
    pub(crate) async fn ask<T: DeserializeOwned>(
        &self,
        call: &Call,
        until: Moment,
        one_try: Duration,
        if_unreachable: IfUnreachable,
    ) -> Result<(Option<T>, Moment), Error> {
        let mut route = self.route();
        let mut backoff = Backoff::default();
        loop {
            let round = match self.round(call, until, one_try, &mut route).await {
                Ok(answer) => return Ok(answer),
                Err(NoAnswer::Refused(problem)) => {
                    return Err(Error::Refused { name: call.name.clone(), problem });
                }
                Err(NoAnswer::Round(round)) => round,
            };
            let pause = backoff.next(round.retry_after);
            let is_unreachable =
                round.is_unreachable && matches!(if_unreachable, IfUnreachable::Fail);
            if is_unreachable || pause + SHORTEST_TRY >= until.left() {
                return Err(round.unavailable(call.name.clone()));
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Asks each gateway at most once, until one answers. Returns the answer and when its request
    /// was sent.
    pub(crate) async fn round<T: DeserializeOwned>(
        &self,
        call: &Call,
        until: Moment,
        one_try: Duration,
        route: &mut Route,
    ) -> Result<(Option<T>, Moment), NoAnswer> {
        let Service { http, urls, .. } = &*self.0;
        let call = self.with_key(call);
        let mut round = FailedRound::default();
        for _ in 0..urls.len() {
            // A try without time for an answer would hide the failure heard before.
            if !round.heard.is_empty() && until.left() < SHORTEST_TRY {
                break;
            }
            let sent = Moment::now();
            match call.send(http, &urls[route.at], one_try.min(until.left())).await {
                Ok(answer) => return Ok((answer, sent)),
                Err(failure) => self.move_on(failure, route, &mut round)?,
            }
        }
        Err(NoAnswer::Round(round))
    }

    /// Opens a stream of events. Asks each gateway at most once, until one answers.
    pub(crate) async fn open(
        &self,
        call: &Call,
        one_try: Duration,
        route: &mut Route,
    ) -> Result<Response, NoAnswer> {
        let Service { http, urls, .. } = &*self.0;
        let call = self.with_key(call);
        let mut round = FailedRound::default();
        for _ in 0..urls.len() {
            match call.open(http, &urls[route.at], one_try).await {
                Ok(response) => return Ok(response),
                Err(failure) => self.move_on(failure, route, &mut round)?,
            }
        }
        Err(NoAnswer::Round(round))
    }

    fn with_key(&self, call: &Call) -> Call {
        match &self.0.key {
            Some(key) => call.clone().header(&AUTHORIZATION, key.clone()),
            None => call.clone(),
        }
    }

    /// Moves on to the next gateway after a failure. A refusal is an error, because the other
    /// gateways would refuse the request too.
    fn move_on(
        &self,
        failure: Failure,
        route: &mut Route,
        round: &mut FailedRound,
    ) -> Result<(), NoAnswer> {
        let Service { urls, current, .. } = &*self.0;
        let at = route.at;
        route.is_unsettled |= !failure.changed_nothing();
        let Some(retry_after) = failure.pause() else {
            let Failure::Problem(problem) = failure else { return Ok(()) };
            return Err(NoAnswer::Refused(problem));
        };
        round.retry_after = round.retry_after.min(retry_after);
        round.is_unreachable &= matches!(failure, Failure::Unreachable(_));
        let what = failure.at(&urls[at]);
        round.heard.push(what.clone());
        route.at = (at + 1) % urls.len();
        route.last_failure = Some(what);
        if tracing::enabled!(tracing::Level::DEBUG) {
            let url = urls[at].clone();
            log::write(move || tracing::debug!(%url, %failure, "asking the next gateway"));
        }
        // Unless another request has moved on meanwhile.
        let _ = current.compare_exchange(at, route.at, Ordering::Relaxed, Ordering::Relaxed);
        Ok(())
    }
}

/// The gateway that a request goes to. A request stays with one gateway while it answers, whatever
/// other requests find.
#[derive(Debug)]
pub(crate) struct Route {
    /// Index of the gateway.
    pub(crate) at: usize,
    /// Whether a gateway may have executed a failed request.
    pub(crate) is_unsettled: bool,
    /// The failure of the gateway that was left last.
    pub(crate) last_failure: Option<String>,
}

/// What to do if no gateway accepts a connection.
pub(crate) enum IfUnreachable {
    Fail,
    AskAgain,
}

/// Why a round over the gateways brought no answer.
pub(crate) enum NoAnswer {
    /// A gateway refuses the request.
    Refused(Box<Problem>),
    /// No gateway decided.
    Round(FailedRound),
}

/// A round over the gateways in which none decided.
pub(crate) struct FailedRound {
    /// The answer or failure of each gateway.
    pub(crate) heard: Vec<String>,
    pub(crate) retry_after: Duration,
    /// Whether no gateway accepted a connection, so that nothing was sent.
    pub(crate) is_unreachable: bool,
}

impl Default for FailedRound {
    fn default() -> Self {
        Self { heard: Vec::new(), retry_after: Duration::MAX, is_unreachable: true }
    }
}

impl FailedRound {
    pub(crate) fn unavailable(self, name: Option<String>) -> Error {
        let Self { heard, is_unreachable, .. } = self;
        Error::Unavailable { name, what: heard, is_unreachable }
    }
}

/// The pauses between rounds.
pub(crate) struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(PAUSES.0)
    }
}

impl Backoff {
    pub(crate) fn next(&mut self, shortest: Duration) -> Duration {
        let pause = self.0.mul_f64(0.5 + fastrand::f64()).max(shortest);
        self.0 = (self.0 * 2).min(PAUSES.1);
        pause
    }
}

/// The deadline of a lock that was requested at `sent` for `ttl`. Time on the network is lost. Time
/// in the gateway is not, because the validity counts from the end of that time. `elapsed_ms`
/// counts for no more than the time since sending, and `validity_ms` for no more than the TTL.
pub(crate) fn deadline_of(
    validity_ms: u32,
    elapsed_ms: u64,
    sent: Moment,
    ttl: Duration,
) -> Moment {
    let elapsed = Duration::from_millis(elapsed_ms).min(Moment::now().since(sent));
    sent + elapsed + Duration::from_millis(validity_ms.into()).min(ttl)
}

/// The limit for one try to extend, of the time left.
pub(crate) fn time_of_a_try(left: Duration) -> Duration {
    (left / TRIES_OF_TIME_LEFT).clamp(SHORTEST_TRY, LONGEST_TRY)
}

/// Makes a request about the locks with a prefix.
pub(crate) fn listing<'a>(
    query: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Call, Error> {
    // This URL only serves to encode the query.
    let url = Url::parse_with_params("http://gateway/locks", query)
        .map_err(|error| Error::Setup(error.to_string()))?;
    Ok(Call::new(Method::GET, format!("locks?{}", url.query().unwrap_or_default())))
}

/// Makes a request to extend.
pub(crate) fn extension(name: &str, token: &str, ttl: Duration) -> Result<Call, Error> {
    let body = ExtendBody { ttl_ms: Some(millis(ttl)) };
    Ok(Call::of_lock(Method::PATCH, name)?.secret(&LOCK_TOKEN, token)?.body(&body))
}

/// Makes a request to release.
fn release(name: &str, token: &str) -> Result<Call, Error> {
    Call::of_lock(Method::DELETE, name)?.secret(&LOCK_TOKEN, token)
}

/// Whether the answer to the release of a set has a lock whose release is not certain.
fn has_undecided(body: &Value) -> bool {
    let results = body["results"].as_array().into_iter().flatten();
    results.into_iter().any(|result| result["status"].as_u64().is_some_and(|status| status >= 500))
}

/// The result of a release. A repeated release finds that the first one succeeded.
fn released(answer: Result<(Option<Value>, Moment), Error>) -> Result<(), Error> {
    match answer {
        Err(Error::Refused { problem, .. }) if is_loss(&problem) => Ok(()),
        answer => answer.map(|_| ()),
    }
}

/// A duration as a body has it.
pub(crate) fn millis(duration: Duration) -> Value {
    json!(duration.as_millis() as u64)
}

/// Whether a problem means that the token no longer holds its lock. The status would not do: a
/// proxy's page has one too.
pub(crate) fn is_loss(problem: &Problem) -> bool {
    use ProblemCode as C;
    matches!(problem.known_code(), Some(C::LockNotFound | C::NotHolder | C::MaxHoldReached))
}

/// Turns the refusal of an extension into a loss.
pub(crate) fn lost(name: &str, error: Error) -> Error {
    match error {
        Error::Refused { problem, .. } if is_loss(&problem) => {
            Error::Lost(Loss { name: name.to_owned(), reason: (*problem).into() })
        }
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_keeps_its_path_and_bad_ones_are_named() {
        let url = |text| parse(text).map(|url| url.to_string());
        assert_eq!(url("http://localhost:8080").unwrap(), "http://localhost:8080/");
        assert_eq!(url("https://example.com/team-a").unwrap(), "https://example.com/team-a/");
        for wrong in ["localhost:8080", "ftp://a", "http://user:key@a", "http://a/?b", ""] {
            let error = url(wrong).unwrap_err().to_string();
            assert!(error.contains("is not a URL") && !error.contains("key@"), "{error}");
        }
        assert!(
            Client::builder().build().unwrap_err().to_string().contains("http://127.0.0.1:8080")
        );
    }

    #[test]
    fn a_deadline_counts_from_the_moment_of_sending() {
        let sent = Moment::now() - Duration::from_secs(7);
        let ttl = Duration::from_secs(30);
        let deadline = deadline_of(29_000, 5_000, sent, ttl);
        assert_eq!(deadline.since(sent), Duration::from_secs(34));
        let exaggerated = deadline_of(u32::MAX, u64::MAX, sent, ttl);
        assert!(exaggerated.since(sent) < Duration::from_secs(38));
    }

    #[test]
    fn an_answer_keeps_fields_of_newer_gateways() {
        let text = r#"{"name":"a","state":"held","newer":[1],"nodes":[{"node":"n","state":"held","newer":2}]}"#;
        let answer: Answer<LockStatus> = serde_json::from_str(text).unwrap();
        assert_eq!((answer.name.as_str(), answer.json.to_string().as_str()), ("a", text));
    }
}
