//! Who sent a request, from its headers or its certificate, before anything else of it is looked at.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::{FromRef, FromRequestParts, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::request::Parts;
use http::{Extensions, HeaderMap, Method, Uri, header};
use redlock_core::LockName;

use super::Rooms;
use super::error::{ApiError, Denial};
use crate::audit::{Note, Trail};
use crate::auth::{Caller, Credential, Guard, Stranger, Verb};
use crate::peer::Peer;

/// Whoever sent the request, who is let in.
pub struct Access {
    pub caller: Caller,
    guard: Arc<Guard>,
    trail: Option<Trail>,
}

impl<S> FromRequestParts<S> for Access
where
    S: Send + Sync,
    Arc<Guard>: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let trail = parts.extensions.get::<Trail>().cloned();
        let guard = Arc::<Guard>::from_ref(state);
        if guard.is_open() {
            let access = Self { caller: Caller::anonymous(), guard, trail };
            access.note(|note| note.who = Some(access.caller.name().to_owned()));
            return Ok(access);
        }
        let caller = identify(&guard, &parts.headers, &parts.extensions)?;
        let access = Self { caller, guard, trail };
        access.note(|note| note.who = Some(access.caller.name().to_owned()));
        access.caller.keep_pace().map_err(ApiError::RateLimited)?;
        Ok(access)
    }
}

impl Access {
    /// What the request does, for the record.
    pub fn note(&self, write: impl FnOnce(&mut Note)) {
        if let Some(trail) = &self.trail {
            write(&mut trail.note());
        }
    }

    /// Goes on only when the caller may do this to this lock.
    pub fn may(&self, verb: Verb, name: &LockName) -> Result<(), ApiError> {
        self.note(|note| {
            note.what = Some(verb.word());
            note.lock = Some(name.as_str().to_owned());
            note.changes = matches!(verb, Verb::Acquire | Verb::Extend | Verb::Release | Verb::Force);
            note.forces = verb == Verb::Force;
        });
        if self.caller.may(verb, name) { Ok(()) } else { Err(self.forbidden(verb)) }
    }

    /// The same for a request that was let in a while ago: keys end, also while somebody waits.
    pub fn still_may(&self, verb: Verb, name: &LockName) -> Result<(), ApiError> {
        let caller = self.guard.identify_again(&self.caller).map_err(ApiError::Unauthenticated)?;
        if caller.may(verb, name) { Ok(()) } else { Err(self.forbidden(verb)) }
    }

    /// Goes on only when the caller may do this somewhere.
    pub fn may_somewhere(&self, verb: Verb) -> Result<(), ApiError> {
        self.note(|note| note.what = Some(verb.word()));
        if self.caller.may_somewhere(verb) { Ok(()) } else { Err(self.forbidden(verb)) }
    }

    fn forbidden(&self, verb: Verb) -> ApiError {
        let who = self.caller.principal().map(str::to_owned);
        ApiError::Forbidden(Denial { who, verb: verb.word() })
    }
}

fn identify(guard: &Guard, headers: &HeaderMap, extensions: &Extensions) -> Result<Caller, ApiError> {
    let refused = |why: Stranger, claimed: Option<&str>| {
        if let Some(trail) = extensions.get::<Trail>() {
            // Only what is a name: anything else may be a secret in the wrong place.
            trail.note().who = claimed.filter(|name| guard.knows(name)).map(|name| format!("{name} (not proven)"));
        }
        ApiError::Unauthenticated(why)
    };
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        let subject = extensions.get::<Peer>().and_then(Peer::certificate_subject);
        return guard.identify(subject.map(Credential::Certificate)).map_err(|why| refused(why, None));
    };
    if values.next().is_some() {
        return Err(refused(Stranger::Unknown, None));
    }
    let text = value.to_str().map_err(|_| refused(Stranger::Unknown, None))?;
    let (scheme, shown) = text.trim().split_once(' ').unwrap_or((text, ""));
    let shown = shown.trim_start();
    if scheme.eq_ignore_ascii_case("bearer") {
        let claimed = shown.split('.').nth(1);
        return guard.identify(Some(Credential::Key(shown))).map_err(|why| refused(why, claimed));
    }
    let decoded = scheme.eq_ignore_ascii_case("basic").then(|| STANDARD.decode(shown).ok()).flatten();
    let decoded = decoded.and_then(|bytes| String::from_utf8(bytes).ok());
    // A browser adds a Basic key that it has kept to whatever any page asks for.
    let is_of_other_site = headers.get("sec-fetch-site").is_some_and(|site| site == "cross-site");
    match decoded.as_deref().and_then(|pair| pair.split_once(':')) {
        Some((user, _)) if is_of_other_site => Err(refused(Stranger::OtherSite, Some(user))),
        Some((user, password)) => {
            guard.identify(Some(Credential::NamedKey(user, password))).map_err(|why| refused(why, Some(user)))
        }
        None => Err(refused(Stranger::Unknown, None)),
    }
}

/// What a request was about that was denied before it was looked at, from its method and path.
pub(super) fn about(method: &Method, uri: &Uri) -> (Option<&'static str>, Option<String>) {
    let name = uri.path().strip_prefix("/locks/").filter(|name| !name.is_empty() && !name.contains('/'));
    let verb = match (name, method, uri.path()) {
        (Some(_), &Method::POST, _) => Verb::Acquire,
        (Some(_), &Method::PATCH, _) => Verb::Extend,
        (Some(_), &Method::DELETE, _) if uri.query() == Some("force=true") => Verb::Force,
        (Some(_), &Method::DELETE, _) => Verb::Release,
        (Some(_), ..) => Verb::Inspect,
        (None, _, "/locks") => Verb::List,
        (None, _, "/metrics") => Verb::Metrics,
        (None, ..) => return (None, None),
    };
    let decoded = name.and_then(|name| percent_encoding::percent_decode_str(name).decode_utf8().ok());
    let name = decoded.and_then(|name| name.parse::<LockName>().ok());
    (Some(verb.word()), name.map(|name| name.as_str().to_owned()))
}

/// How much a request may see of what the service is made of.
pub enum Sight {
    All,
    /// No more than whether it is there.
    Brief,
}

impl FromRequestParts<Rooms> for Sight {
    type Rejection = Infallible;

    /// Nobody is sent away: an orchestrator's probe has no key, and a wrong one shows no more than none.
    async fn from_request_parts(parts: &mut Parts, rooms: &Rooms) -> Result<Self, Infallible> {
        if rooms.guard.is_open() {
            return Ok(Self::All);
        }
        let caller = identify(&rooms.guard, &parts.headers, &parts.extensions);
        Ok(if caller.is_ok_and(|caller| caller.may_somewhere(Verb::Metrics)) { Self::All } else { Self::Brief })
    }
}

/// The request may see metrics.
pub struct MayScrape;

impl FromRequestParts<Rooms> for MayScrape {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, rooms: &Rooms) -> Result<Self, ApiError> {
        if !rooms.public.metrics {
            Access::from_request_parts(parts, rooms).await?.may_somewhere(Verb::Metrics)?;
        }
        Ok(Self)
    }
}

/// Around what everybody may read who has any key, or everybody.
pub(super) async fn readers(State(rooms): State<Rooms>, request: Request, next: Next) -> Response {
    if rooms.public.docs {
        return next.run(request).await;
    }
    let (mut parts, body) = request.into_parts();
    match Access::from_request_parts(&mut parts, &rooms).await {
        Ok(_) => next.run(Request::from_parts(parts, body)).await,
        Err(error) => error.into_response(),
    }
}
