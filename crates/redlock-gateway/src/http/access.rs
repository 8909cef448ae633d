//! Finds out who sent a request, from its headers or the client certificate, and whether the sender
//! may do what the route is for.
//!
//! Handlers reach the gateway only through the extractors of this module, so no handler can skip
//! the check.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::{FromRequestParts, Path, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::request::Parts;
use http::{StatusCode, Uri, header};
use percent_encoding::percent_decode_str;
use redlock_core::LockName;
use redlock_core::types::NameError;
use tokio::sync::oneshot;

use super::error::{ApiError, Disclosure, INVALID_NAME, RATE_LIMITED};
use super::site;
use crate::audit::{AuditContext, AuditEntry, AuditGuard, AuditPart, RequestEnd};
use crate::auth::{AuthError, Authenticator, Caller, Credential, Verb, holds_secret};
use crate::config::{Limits, Public};
use crate::gateway::{Gateway, Refusal};
use crate::origin::Origin;
use crate::overload::clients::{Client, Clients, FairQueue};
use crate::overload::in_flight::Active;
use crate::overload::refusals::Who;
use crate::remedy::PublicUrl;
use crate::transport::disconnect::Peer;

/// State that all routes share.
pub struct AppState {
    pub gateway: Arc<Gateway>,
    pub authenticator: Arc<Authenticator>,
    pub public: Public,
    pub clients: Arc<Clients>,
    pub fair_queue: Arc<FairQueue>,
    /// The origins whose pages may call.
    pub cors_origins: Vec<Origin>,
    /// Where people reach this gateway.
    pub public_url: PublicUrl,
}

impl AppState {
    /// The state of a service without keys: everybody may use every route.
    pub fn open(gateway: Arc<Gateway>) -> Self {
        let authenticator = Arc::new(Authenticator::open(false));
        let public = Public { docs: true, metrics: true };
        Self {
            gateway,
            authenticator,
            public,
            clients: Arc::default(),
            fair_queue: FairQueue::new(1),
            cors_origins: Vec::new(),
            public_url: PublicUrl::default(),
        }
    }
}

/// What a caller needs for a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Needs {
    /// Nothing: probes have no keys.
    Nothing,
    /// Any key.
    AnyKey,
    /// A permission, for any lock.
    Anywhere(Verb),
    /// A permission for the lock in the path. With `?force=true` a release needs `force` instead.
    OnLock(Verb),
}

/// State of one route.
#[derive(Clone)]
pub(super) struct Route {
    app: Arc<AppState>,
    needs: Needs,
}

impl Route {
    pub(super) fn new(app: &Arc<AppState>, needs: Needs) -> Self {
        Self { app: app.clone(), needs }
    }

    pub(super) fn limits(&self) -> Limits {
        self.app.gateway.limits()
    }

    /// Whether a browser sent the request for a page that may not call this service. Such a request
    /// must not count, because the browser adds credentials to it by itself.
    fn is_of_other_site(&self, parts: &Parts) -> bool {
        // With keys, even the pages of `cors_origins` are not trusted here. Such a page sends a key
        // of its own, and must not use credentials that the browsers of its visitors add.
        let trusted =
            if self.app.authenticator.is_open() { self.app.cors_origins.as_slice() } else { &[] };
        let is_link =
            || self.needs == Needs::AnyKey && site::is_navigation(&parts.method, &parts.headers);
        site::is_of_other_site(&parts.uri, &parts.headers, trusted) && !is_link()
    }
}

/// Whether a release takes the lock from whoever holds it.
pub(super) fn is_forced(uri: &Uri) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|pair| pair == "force=true"))
}

/// A caller with the permission that its route needs.
pub(super) struct Access {
    caller: Caller,
    client: Arc<Client>,
    app: Arc<AppState>,
    audit: Option<AuditContext>,
    _active: Active,
}

/// The audit record of a request whose outcome is known only after the head of its answer. If it is
/// dropped, the record says that the client is gone.
pub(super) struct TakenRecord(oneshot::Receiver<AuditGuard>);

impl TakenRecord {
    /// Waits for the record, and ends it.
    pub(super) async fn end(self, end: RequestEnd<'_>) {
        if let Ok(record) = self.0.await {
            record.end(end);
        }
    }
}

/// A caller with the permission that its route needs for one lock.
pub(super) struct LockAccess {
    pub(super) access: Access,
    pub(super) name: LockName,
    /// The permission that the request uses.
    pub(super) verb: Verb,
}

impl FromRequestParts<Route> for Access {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, route: &Route) -> Result<Self, ApiError> {
        let verb = match route.needs {
            Needs::Nothing => return Ok(Self::new(parts, route)),
            Needs::AnyKey => None,
            Needs::Anywhere(verb) => Some(verb),
            Needs::OnLock(verb) => {
                return Err(ApiError::internal(format_args!(
                    "the route checks {verb:?} on a lock, but its handler has no name of a lock"
                )));
            }
        };
        let access = Self::known(parts, route, verb, None).await?;
        if let Some(verb) = verb {
            access.require(verb, access.caller.may_somewhere(verb))?;
        }
        Ok(access)
    }
}

impl FromRequestParts<Route> for LockAccess {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, route: &Route) -> Result<Self, ApiError> {
        let verb = match route.needs {
            Needs::OnLock(Verb::Release) if is_forced(&parts.uri) => Verb::Force,
            Needs::OnLock(verb) => verb,
            needs => {
                return Err(ApiError::internal(format_args!(
                    "the handler has the name of a lock, but its route checks {needs:?}"
                )));
            }
        };
        let name = Name::from_request_parts(parts, route).await;
        let access = Access::known(parts, route, Some(verb), name.as_ref().ok()).await?;
        let Name(name) = name?;
        access.note(|entry| {
            entry.changes = changes(verb);
            entry.forces = verb == Verb::Force;
        });
        access.require(verb, access.caller.may(verb, &name))?;
        access.check_record(verb)?;
        Ok(Self { access, name, verb })
    }
}

impl Access {
    fn new(parts: &Parts, route: &Route) -> Self {
        let audit = parts.extensions.get::<AuditContext>().cloned();
        let client = parts
            .extensions
            .get::<Peer>()
            .map_or_else(|| route.app.clients.unknown(), |peer| peer.client().clone());
        let app = route.app.clone();
        Self { caller: Caller::anonymous(false), client, _active: app.gateway.begin(), app, audit }
    }

    /// Lets in a caller that is known and within the rate of its key. First notes verb and lock
    /// name in the audit entry, so that the record of a denied request has them.
    async fn known(
        parts: &Parts,
        route: &Route,
        verb: Option<Verb>,
        name: Option<&Name>,
    ) -> Result<Self, ApiError> {
        let mut access = Self::new(parts, route);
        access.note(|entry| {
            entry.what = verb.map(Verb::word);
            entry.lock = name.map(|Name(name)| name.as_str().to_owned());
        });
        if route.app.authenticator.is_open() {
            if route.is_of_other_site(parts) {
                return Err(AuthError::CrossSite.into());
            }
            if !site::is_forwarded(&parts.headers) {
                access.caller = route.app.authenticator.identify(None)?;
            }
        } else {
            access.caller = identify(route, parts)?;
            if let Some(peer) = parts.extensions.get::<Peer>() {
                peer.slot().show_key();
            }
            if let Some(client) = access.caller.client() {
                access.client.clone_from(client);
                route.app.fair_queue.take(&client.queue, false).await;
                access.note(|entry| entry.client = Some(client.clone()));
            }
        }
        let who = Who { name: access.caller.name().to_owned(), is_proven: true };
        access.note(|entry| entry.who = Some(who));
        access.check_rate()?;
        Ok(access)
    }

    fn check_rate(&self) -> Result<(), ApiError> {
        let limited = |pause| {
            let detail = "the API key has used up its rate of requests (`rate` and `burst` in the keys file); wait \
                          for retry_after_ms";
            RATE_LIMITED.because(detail).retry_after(pause)
        };
        self.caller.check_rate().map_err(limited)
    }

    /// Counts one more of several leases, as the route counted the first: a turn in the fair queue, and
    /// one request off the rate of the key.
    pub(super) async fn count_another(&self) -> Result<(), ApiError> {
        self.take_turn().await;
        self.check_rate()
    }

    /// Waits for a turn in the fair queue.
    pub(super) async fn take_turn(&self) {
        self.app.fair_queue.take(&self.client.queue, false).await;
    }

    /// The caller, for a stream that outlives the request.
    pub(super) fn standing(&self) -> Standing {
        let Self { app, caller, client, .. } = self;
        Standing { app: app.clone(), caller: caller.clone(), client: client.clone() }
    }

    /// Adds to the request's audit entry.
    pub(super) fn note(&self, write: impl FnOnce(&mut AuditEntry)) {
        if let Some(audit) = &self.audit {
            write(&mut audit.entry());
        }
    }

    /// Notes the locks in the audit entry, as parts of the request.
    pub(super) fn note_parts(&self, names: &[LockName]) {
        self.note(|entry| {
            entry.changes = true;
            let lock = |name: &LockName| Some(name.to_string());
            let part = |name| AuditPart { lock: lock(name), ..AuditPart::default() };
            entry.parts = names.iter().map(part).collect();
        });
    }

    /// Notes the outcome of the whole request in the audit entry of each lock that has none yet.
    pub(super) fn end_parts<T>(&self, result: &Result<T, ApiError>, success: StatusCode) {
        let end = match result {
            Ok(_) => (success.as_u16(), None),
            Err(error) => (error.status().as_u16(), Some(error.code().as_str())),
        };
        self.note(|entry| {
            let open = entry.parts.iter_mut().filter(|part| part.end.is_none());
            open.for_each(|part| part.end = Some(end));
        });
    }

    /// Takes over the audit record of the request, which otherwise ends with the head of the answer.
    /// The record comes when that head is sent.
    pub(super) fn take_record(&self) -> TakenRecord {
        let (taker, taken) = oneshot::channel();
        self.note(|entry| entry.taker = Some(taker));
        TakenRecord(taken)
    }

    /// Whether the request has an audit entry.
    pub(super) fn is_recorded(&self) -> bool {
        self.audit.is_some()
    }

    fn require(&self, verb: Verb, is_allowed: bool) -> Result<(), ApiError> {
        if is_allowed { Ok(()) } else { Err(ApiError::forbidden(self.caller.principal(), verb)) }
    }

    pub(super) fn caller(&self) -> &Caller {
        &self.caller
    }

    /// The client that the request is charged to.
    pub(super) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    pub(super) fn gateway(&self) -> &Arc<Gateway> {
        &self.app.gateway
    }

    /// The request's audit entry, if it has one.
    pub(super) fn audit(&self) -> Option<AuditContext> {
        self.audit.clone()
    }

    pub(super) fn public_url(&self) -> &PublicUrl {
        &self.app.public_url
    }

    /// Whether the caller may see the names of the nodes.
    pub(super) fn sees_nodes(&self) -> bool {
        self.caller.may_somewhere(Verb::Metrics)
    }

    /// The error for a refusal, with what this caller may know.
    pub(super) fn refused(&self, refusal: Refusal) -> ApiError {
        ApiError::of(refusal, Disclosure { nodes: self.sees_nodes(), ..Disclosure::default() })
    }

    /// Checks that the caller may use the verb on each of these locks, and returns it as the keys are
    /// now. While the body arrives or the request waits, the key may be removed, or key or certificate
    /// may expire.
    pub(super) fn check_again(&self, verb: Verb, names: &[LockName]) -> Result<Caller, ApiError> {
        let caller = self.app.authenticator.identify_again(&self.caller)?;
        for name in names {
            self.require(verb, caller.may(verb, name)).map_err(|error| match names {
                [_] => error,
                _ => error.about(name.as_str()),
            })?;
        }
        self.check_record(verb)?;
        Ok(caller)
    }

    /// Refuses a change of a lock if the change must be recorded in the audit log and cannot be
    /// recorded now.
    pub(super) fn check_record(&self, verb: Verb) -> Result<(), ApiError> {
        let is_refused =
            changes(verb) && self.audit.as_ref().is_some_and(AuditContext::is_refusing);
        if is_refused { Err(ApiError::unrecorded()) } else { Ok(()) }
    }

    /// The error for a refusal about this lock, with what this caller may know.
    pub(super) fn refused_on(&self, name: &LockName, refusal: Refusal) -> ApiError {
        let may = |verb| self.caller.may(verb, name);
        let holder = may(Verb::Inspect);
        let is_held = holder || may(Verb::Acquire) || may(Verb::Force);
        ApiError::of(refusal, Disclosure { nodes: self.sees_nodes(), holder, is_held })
    }

    /// The limits of this caller's requests.
    pub(super) fn limits(&self) -> Limits {
        self.caller.limits(self.app.gateway.limits())
    }
}

/// The caller of a stream. Unlike [`Access`], a drain does not wait for it.
#[derive(Clone)]
pub(super) struct Standing {
    app: Arc<AppState>,
    caller: Caller,
    client: Arc<Client>,
}

impl Standing {
    pub(super) fn gateway(&self) -> &Gateway {
        &self.app.gateway
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn caller(&self) -> &Caller {
        &self.caller
    }

    /// The caller's access to a lock, for a request that the stream makes on its own. A drain waits
    /// for it.
    pub(super) fn lock(&self, name: &LockName, verb: Verb) -> LockAccess {
        let Self { app, caller, client } = self;
        let _active = app.gateway.begin();
        let (caller, client) = (caller.clone(), client.clone());
        let access = Access { caller, client, app: app.clone(), audit: None, _active };
        LockAccess { access, name: name.clone(), verb }
    }

    /// Whether the caller may use the verb on all these locks, as the keys are now.
    pub(super) fn may_still(&self, verb: Verb, names: &[LockName]) -> bool {
        let caller = self.app.authenticator.identify_again(&self.caller);
        caller.is_ok_and(|caller| names.iter().all(|name| caller.may(verb, name)))
    }

    /// Updates the caller's permissions. Returns false if the key was removed or has expired.
    pub(super) fn is_still_known(&mut self) -> bool {
        let again = self.app.authenticator.identify_again(&self.caller);
        again.map(|caller| self.caller = caller).is_ok()
    }
}

impl LockAccess {
    /// As [`Access::check_again`].
    pub(super) fn check_again(&self) -> Result<Caller, ApiError> {
        self.access.check_again(self.verb, std::slice::from_ref(&self.name))
    }

    /// The error for a refusal, with what this caller may know.
    pub(super) fn refused(&self, refusal: Refusal) -> ApiError {
        self.access.refused_on(&self.name, refusal)
    }
}

/// Whether the verb changes locks.
fn changes(verb: Verb) -> bool {
    matches!(verb, Verb::Acquire | Verb::Extend | Verb::Release | Verb::Force)
}

/// The lock's name in a path, for the log. `None` if the path has no valid name, or a secret in its
/// place.
pub(super) fn lock_in(uri: &Uri) -> Option<String> {
    let encoded = uri.path().strip_prefix("/locks/")?;
    let text = percent_decode_str(encoded).decode_utf8().ok()?;
    no_secret(&text).ok()?;
    Some(text.parse::<LockName>().ok()?.as_str().to_owned())
}

/// The lock's name from the path, percent-decoded and checked.
pub struct Name(pub LockName);

impl<S: Send + Sync> FromRequestParts<S> for Name {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Ok(Path(text)) = Path::<String>::from_request_parts(parts, state).await else {
            return Err(INVALID_NAME.because("the name is not UTF-8 after percent-decoding"));
        };
        no_secret(&text).map_err(|detail| INVALID_NAME.because(detail))?;
        lock_name(&text).map(Self)
    }
}

/// A lock's name, checked.
pub(super) fn lock_name(text: &str) -> Result<LockName, ApiError> {
    text.parse().map_err(|error: NameError| INVALID_NAME.because(error.to_string()))
}

/// Refuses a text with a secret in it. A misplaced secret must not reach the log, the audit record,
/// the masters or an answer.
pub(super) fn no_secret(text: &str) -> Result<(), &'static str> {
    if holds_secret(text) {
        Err(
            "there is an API key or a lock token in the URL: anybody on the way may have read it; replace it",
        )
    } else {
        Ok(())
    }
}

fn identify(route: &Route, parts: &Parts) -> Result<Caller, ApiError> {
    let authenticator = &route.app.authenticator;
    let refused = |error: AuthError, claimed: Option<&str>| {
        if let Some(audit) = parts.extensions.get::<AuditContext>() {
            // The entry gets a claimed name only if a key has that name. Any other text may be a
            // misplaced secret.
            let name = claimed.filter(|name| authenticator.has_key_named(name));
            let claimed = |name| Who { name: format!("{name} (not proven)"), is_proven: false };
            audit.entry().who = name.map(claimed);
        }
        ApiError::from(error)
    };
    let mut values = parts.headers.get_all(header::AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        let certificate = parts.extensions.get::<Peer>().and_then(Peer::certificate);
        if certificate.is_some() && route.is_of_other_site(parts) {
            return Err(refused(AuthError::CrossSite, None));
        }
        let shown = certificate.map(|shown| Credential::Certificate(&shown.subject, shown.ends));
        return authenticator.identify(shown).map_err(|error| match certificate {
            // The error shows the subject, because the operator needs it to add the certificate to
            // the keys file.
            Some(shown) if error == AuthError::Unknown => {
                ApiError::unknown_certificate(&shown.subject)
            }
            _ => refused(error, None),
        });
    };
    if values.next().is_some() {
        return Err(refused(AuthError::Unknown, None));
    }
    let text = value.to_str().map_err(|_| refused(AuthError::Unknown, None))?;
    let (scheme, shown) = text.trim().split_once(' ').unwrap_or((text, ""));
    let shown = shown.trim_start();
    if scheme.eq_ignore_ascii_case("bearer") {
        let claimed = shown.split('.').nth(1);
        return authenticator
            .identify(Some(Credential::Key(shown)))
            .map_err(|error| refused(error, claimed));
    }
    let decoded =
        scheme.eq_ignore_ascii_case("basic").then(|| STANDARD.decode(shown).ok()).flatten();
    let decoded = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
    match decoded.as_deref().and_then(|pair| pair.split_once(':')) {
        Some((user, _)) if route.is_of_other_site(parts) => {
            Err(refused(AuthError::CrossSite, Some(user)))
        }
        Some((user, password)) => {
            let shown = Credential::NamedKey(user, password);
            authenticator.identify(Some(shown)).map_err(|error| refused(error, Some(user)))
        }
        None => Err(refused(AuthError::Unknown, None)),
    }
}

/// How much of a health answer the caller may see.
pub(super) enum Visibility {
    Full,
    /// Only the status, without the nodes.
    StatusOnly,
}

impl FromRequestParts<Route> for Visibility {
    type Rejection = Infallible;

    /// Refuses nobody, because an orchestrator's probe has no key. A caller with a wrong key sees
    /// as much as a caller without a key.
    async fn from_request_parts(parts: &mut Parts, route: &Route) -> Result<Self, Infallible> {
        // The nodes are expensive to show, so a caller that has used up its rate sees only the
        // status.
        let may_see = || {
            let caller =
                identify(route, parts).ok().filter(|caller| caller.may_somewhere(Verb::Metrics));
            caller.is_some_and(|caller| caller.check_rate().is_ok())
        };
        Ok(if route.app.authenticator.is_open() || may_see() {
            Self::Full
        } else {
            Self::StatusOnly
        })
    }
}

/// The check for pages that have no extractor: the documentation.
pub(super) async fn require(State(route): State<Route>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    match Access::from_request_parts(&mut parts, &route).await {
        Ok(_) => next.run(Request::from_parts(parts, body)).await,
        Err(error) => error.into_response(),
    }
}
