//! The arguments of the operations, read from requests and checked. Handlers take them instead of a
//! request.

mod body;

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::time::Duration;

use axum::extract::{FromRequestParts, Query};
use http::request::Parts;
use http::{HeaderMap, Uri};
use redlock_api::headers::{IDEMPOTENCY_KEY, LOCK_TOKEN, PREFER};
use redlock_core::{Info, LockName, LockToken, Priority, QueueMode, Slots, Ttl};
use serde_json::Value;
use utoipa::IntoParams;

pub(super) use self::body::Json;
use super::access::{Route, no_secret};
use super::error::{
    ApiError, INVALID_BODY, INVALID_PARAMETER, INVALID_TOKEN, INVALID_TTL, INVALID_WAIT,
    MISSING_TOKEN, TTL_WAYS_OUT,
};
use crate::auth::holds_secret;
use crate::config::Limits;
use crate::gateway::MAX_DEFERRED_WAIT;
use crate::info::LockMetadata;
use crate::transport::disconnect::Peer;

/// Limit on an `owner` label, in Unicode characters, as JSON Schema counts them.
const MAX_LABEL: usize = 255;
/// Limit on the locks of a page of a listing.
const MAX_PAGE: u16 = 1000;
/// Limit on all keys and values of `metadata` together, in bytes.
const MAX_METADATA: usize = 1024;

/// The arguments of an acquire (POST) that are in its head.
pub(super) struct AcquireHead {
    pub(super) idempotency_key: Option<String>,
    preferred_seconds: Option<u64>,
    client: Option<Peer>,
    /// See [`StreamHead`]. A field of the head, because each argument of a handler is copied
    /// several times.
    pub(super) stream: Option<Box<Stream>>,
}

impl FromRequestParts<Route> for AcquireHead {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, route: &Route) -> Result<Self, ApiError> {
        no_query(&parts.uri)?;
        Ok(Self {
            idempotency_key: idempotency_key(&parts.headers)?,
            preferred_seconds: preferred_wait(&parts.headers, &route.limits())?,
            client: parts.extensions.get().cloned(),
            stream: stream(&parts.headers),
        })
    }
}

impl AcquireHead {
    /// Returns how long the request waits for the lock. If `Prefer: wait` decided that, it also
    /// returns the seconds, for `Preference-Applied`. `wait_ms` in the body takes precedence.
    pub(super) fn wait(
        &self,
        wait_ms: Option<&Value>,
        limits: &Limits,
    ) -> Result<(Option<Duration>, Option<u64>), ApiError> {
        let (wait, applied) = chosen_wait(wait_ms, self.preferred_seconds, limits)?;
        Ok((wait.filter(|wait| !wait.is_zero()), applied))
    }

    /// Resolves when the client has hung up. Never resolves if the client is unknown.
    pub(super) async fn client_gone(&self) {
        match &self.client {
            Some(client) => client.gone().await,
            None => std::future::pending().await,
        }
    }
}

/// What the headers of `POST /requests` say.
pub(super) struct DeferHead {
    /// The client claims the lock with this key.
    pub(super) idempotency_key: String,
    preferred_seconds: Option<u64>,
}

impl FromRequestParts<Route> for DeferHead {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, route: &Route) -> Result<Self, ApiError> {
        no_query(&parts.uri)?;
        let Some(idempotency_key) = idempotency_key(&parts.headers)? else {
            return Err(INVALID_PARAMETER.because(
                "the Idempotency-Key header is missing; send a new key for each request (16 to 255 visible ASCII \
                 characters), and claim the lock with it",
            ));
        };
        let limits = Self::with_longest_wait(&route.limits());
        let preferred_seconds = preferred_wait(&parts.headers, &limits)?;
        Ok(Self { idempotency_key, preferred_seconds })
    }
}

impl DeferHead {
    /// Returns how long to wait for the lock, and the seconds of `Prefer: wait` if they decide
    /// that. `wait_ms` in the body takes precedence over `Prefer`.
    pub(super) fn wait(
        &self,
        wait_ms: Option<&Value>,
        limits: &Limits,
    ) -> Result<(Option<Duration>, Option<u64>), ApiError> {
        let limits = Self::with_longest_wait(limits);
        let (wait, applied) = chosen_wait(wait_ms, self.preferred_seconds, &limits)?;
        let wait = wait.unwrap_or(MAX_DEFERRED_WAIT);
        Ok((Some(wait).filter(|wait| !wait.is_zero()), applied))
    }

    fn with_longest_wait(limits: &Limits) -> Limits {
        Limits { max_wait: MAX_DEFERRED_WAIT, ..*limits }
    }
}

/// How long to wait, if the request says so, and the seconds of `Prefer: wait` if they decide that.
fn chosen_wait(
    wait_ms: Option<&Value>,
    preferred_seconds: Option<u64>,
    limits: &Limits,
) -> Result<(Option<Duration>, Option<u64>), ApiError> {
    Ok(match (requested_wait(wait_ms, limits)?, preferred_seconds) {
        (None, Some(seconds)) => (Some(preferred_time(seconds, limits)?), Some(seconds)),
        (wait, _) => (wait, None),
    })
}

/// The argument of an extension (PATCH) that is in its head: the token.
pub(super) struct ExtendHead(pub(super) LockToken);

impl<S: Send + Sync> FromRequestParts<S> for ExtendHead {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        no_query(&parts.uri)?;
        lock_token(&parts.headers).map(Self)
    }
}

/// What entitles a DELETE to release the lock.
pub(super) enum ReleaseBy {
    Token(LockToken),
    /// The idempotency key of the acquire, from a client that never got the token, and the slots
    /// that the acquire asked for.
    IdempotencyKey(String, Option<Slots>),
    /// Nothing but the permission to take this slot from whoever holds it.
    Force(u16),
}

impl ReleaseBy {
    /// How many slots the release changes.
    pub(super) fn cost(&self) -> usize {
        match self {
            Self::Token(token) => token.slots().count().into(),
            // The slots of the grant are not known, so the release reads all.
            Self::IdempotencyKey(_, slots) => slots.map_or(1, |slots| slots.count().into()),
            Self::Force(_) => 1,
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for ReleaseBy {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let refused = |detail: &str| Err(INVALID_PARAMETER.because(detail));
        let ReleaseQuery { force, slot, slots, take } = release_query(&parts.uri)?;
        if force {
            if parts.headers.contains_key(&LOCK_TOKEN) {
                return refused("force=true and a Lock-Token exclude each other");
            }
            if slots.is_some() || take.is_some() {
                return refused(
                    "slots and take need an Idempotency-Key; with force=true send slot=N",
                );
            }
            // A malformed key is refused here too, although it is not used.
            return idempotency_key(&parts.headers).map(|_| Self::Force(slot.unwrap_or(1)));
        }
        if slot.is_some() {
            return refused("send slot=N only with force=true");
        }
        match token_or_key(&parts.headers)? {
            // The token knows its slots.
            TokenOrKey::Token(token) => Ok(Self::Token(token)),
            TokenOrKey::IdempotencyKey(key) => {
                let slots = match (slots, take) {
                    (None, None) => None,
                    (None, Some(_)) => return refused("send take only with slots=K"),
                    (Some(slots), take) => {
                        let slots = Slots::new(slots.into(), take.unwrap_or(1).into());
                        Some(slots.map_err(|error| INVALID_PARAMETER.because(error.to_string()))?)
                    }
                };
                Ok(Self::IdempotencyKey(key, slots))
            }
        }
    }
}

#[derive(Default)]
struct ReleaseQuery {
    force: bool,
    slot: Option<u16>,
    slots: Option<u16>,
    take: Option<u16>,
}

/// The query of a release. Unknown and repeated parameters are refused: a misspelt `force=true`
/// must not turn a forced release into a release by token. Nothing is percent-decoded, because
/// `is_forced`, which decides on the permission, reads the text as it was sent.
fn release_query(uri: &Uri) -> Result<ReleaseQuery, ApiError> {
    let mut query = ReleaseQuery::default();
    let mut seen = Vec::new();
    for pair in uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let place = match name {
            "force" => None,
            "slot" => Some(&mut query.slot),
            "slots" => Some(&mut query.slots),
            "take" => Some(&mut query.take),
            _ => {
                return Err(INVALID_PARAMETER.because(
                    "the query parameters here are: force=true and slot=N, with the force permission; slots=K and take=W, with an \
                     Idempotency-Key",
                ));
            }
        };
        if seen.contains(&name) {
            return Err(INVALID_PARAMETER.because(format!("{name} is there more than once")));
        }
        seen.push(name);
        match place {
            Some(place) => *place = Some(up_to(Slots::MAX, name, value)?),
            None if matches!(value, "true" | "false") => query.force = value == "true",
            None => {
                let given = shortened(format_args!("{value:?}"));
                let detail = format!(
                    "force is {given}; allowed are true (release the lock, whoever holds it) and false"
                );
                return Err(INVALID_PARAMETER.because(detail));
            }
        }
    }
    Ok(query)
}

/// A number of slots, or of a slot, in a query.
fn up_to(max: u16, name: &str, value: &str) -> Result<u16, ApiError> {
    let number = value.parse().ok().filter(|number| (1..=max).contains(number));
    number.ok_or_else(|| {
        let given = shortened(format_args!("{value:?}"));
        INVALID_PARAMETER.because(format!("{name} is {given}; allowed are 1 to {max}"))
    })
}

/// The query of an inspection: how many slots to read, and all that a lock can have without it.
pub(super) struct InspectQuery(pub(super) u16);

impl<S: Send + Sync> FromRequestParts<S> for InspectQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        match parts.uri.query() {
            None | Some("") => Ok(Self(Slots::MAX)),
            Some(query) => match query.split_once('=') {
                Some(("slots", value)) => up_to(Slots::MAX, "slots", value).map(Self),
                _ => Err(INVALID_PARAMETER
                    .because("the only query parameter here is slots=K: how many slots to read")),
            },
        }
    }
}

/// The arguments of an event stream in the head of a request. `None` if the client did not ask for a
/// stream.
pub(super) struct StreamHead(pub(super) Option<Box<Stream>>);

/// See [`StreamHead`].
pub(super) struct Stream {
    /// The id of the last event that the client has got.
    pub(super) last: Option<String>,
    /// The token of a lock that the client holds already.
    pub(super) token: Result<Option<LockToken>, ApiError>,
}

impl<S: Send + Sync> FromRequestParts<S> for StreamHead {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(
        parts: &mut Parts,
        _: &S,
    ) -> Result<Self, std::convert::Infallible> {
        Ok(Self(stream(&parts.headers)))
    }
}

fn stream(headers: &HeaderMap) -> Option<Box<Stream>> {
    if !wants_stream(headers) {
        return None;
    }
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok());
    let has_token = headers.contains_key(&LOCK_TOKEN);
    let token = has_token.then(|| lock_token(headers)).transpose();
    Some(Box::new(Stream { last: last.map(str::to_owned), token }))
}

/// Whether the first media type that the client accepts is a stream of events. A client that lists
/// JSON before it gets JSON.
fn wants_stream(headers: &HeaderMap) -> bool {
    let Some(accept) = headers.get(http::header::ACCEPT) else { return false };
    let is_end = |byte: &u8| matches!(byte, b',' | b';');
    let first = accept.as_bytes().split(is_end).next().unwrap_or_default();
    first.trim_ascii().eq_ignore_ascii_case(b"text/event-stream")
}

/// What entitles a request to release: the token or the key.
pub(super) enum TokenOrKey {
    Token(LockToken),
    /// The idempotency key of the acquire, from a client that never got the token.
    IdempotencyKey(String),
}

/// The token in the headers, or without one the idempotency key.
pub(super) fn token_or_key(headers: &HeaderMap) -> Result<TokenOrKey, ApiError> {
    // The token takes precedence, and the idempotency key is then not even checked. Some clients
    // add such a key, in any form, to all their requests.
    let key = if headers.contains_key(&LOCK_TOKEN) { None } else { idempotency_key(headers)? };
    match key {
        Some(key) => Ok(TokenOrKey::IdempotencyKey(key)),
        None => lock_token(headers).map(TokenOrKey::Token),
    }
}

/// The query of a listing.
#[derive(Debug, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    /// Lists only locks whose names begin with this text.
    #[param(required = false, max_length = 255, pattern = r"^[A-Za-z0-9._:@/+~-]*$")]
    pub(super) prefix: String,
    /// Maximum number of locks on a page, 1 to 1000. A page with fewer locks need not be the last
    /// page. Only the last page has no `next_cursor`.
    #[param(required = false, minimum = 1, maximum = 1000, default = 100)]
    pub(super) limit: u16,
    /// `next_cursor` of the page before.
    #[param(required = false)]
    cursor: String,
}

impl<S: Send + Sync> FromRequestParts<S> for ListQuery {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        no_secret(parts.uri.query().unwrap_or_default())
            .map_err(|detail| INVALID_PARAMETER.because(detail))?;
        let pairs = Query::<Vec<(String, String)>>::from_request_parts(parts, state).await;
        let Query(pairs) = pairs.map_err(|error| INVALID_PARAMETER.because(error.body_text()))?;
        let mut query = Self { prefix: String::new(), limit: 100, cursor: String::new() };
        let mut seen = HashSet::new();
        for (name, value) in pairs {
            match name.as_str() {
                "prefix" => query.prefix = value,
                "limit" => query.limit = up_to(MAX_PAGE, "limit", &value)?,
                "cursor" => query.cursor = value,
                _ => {
                    let detail = format!(
                        "unknown query parameter {}; allowed are prefix, limit and cursor",
                        shortened(format_args!("{name:?}"))
                    );
                    return Err(INVALID_PARAMETER.because(detail));
                }
            }
            if let Some(twice) = seen.replace(name) {
                return Err(INVALID_PARAMETER.because(format!("{twice} is given twice; send one")));
            }
        }
        if !query.prefix.is_empty() {
            LockName::check_part(&query.prefix)
                .map_err(|error| INVALID_PARAMETER.because(format!("prefix: {error}")))?;
        }
        Ok(query)
    }
}

impl ListQuery {
    pub(super) fn cursor(&self) -> Option<&str> {
        Some(self.cursor.as_str()).filter(|text| !text.is_empty())
    }
}

/// Refuses query parameters: a misplaced `?ttl_ms=` must not silently give the default.
pub(super) fn no_query(uri: &Uri) -> Result<(), ApiError> {
    match uri.query() {
        None | Some("") => Ok(()),
        Some(_) => Err(INVALID_PARAMETER.because(
            "query parameters have no meaning here: the fields of a request go into its JSON body",
        )),
    }
}

/// The token of the `Lock-Token` header.
pub fn lock_token(headers: &HeaderMap) -> Result<LockToken, ApiError> {
    let mut values = headers.get_all(&LOCK_TOKEN).iter();
    let Some(value) = values.next() else {
        return Err(MISSING_TOKEN.as_usual());
    };
    let text = value.to_str().ok().filter(|_| values.next().is_none());
    text.and_then(token_in).ok_or_else(|| INVALID_TOKEN.as_usual())
}

/// The token in a text, bare or in angle brackets.
pub(super) fn token_in(text: &str) -> Option<LockToken> {
    let text = text.trim();
    text.strip_prefix('<').and_then(|text| text.strip_suffix('>')).unwrap_or(text).parse().ok()
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let mut values = headers.get_all(&IDEMPOTENCY_KEY).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err(INVALID_PARAMETER.because("Idempotency-Key is there more than once"));
    }
    match value.to_str() {
        Ok(key) if (16..=255).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic()) => {
            Ok(Some(key.into()))
        }
        // The error does not quote the key. Whoever has the key can get the token with it.
        _ => Err(INVALID_PARAMETER.because(format!(
            "Idempotency-Key has {} bytes; allowed are 16 to 255 visible ASCII characters",
            value.len()
        ))),
    }
}

/// The seconds of `Prefer: wait=…`. Other preferences are ignored, as RFC 7240 demands.
fn preferred_wait(headers: &HeaderMap, limits: &Limits) -> Result<Option<u64>, ApiError> {
    for value in headers.get_all(&PREFER) {
        for preference in value.to_str().unwrap_or_default().split(',') {
            let preference = preference.split(';').next().unwrap_or_default();
            if let Some((name, seconds)) = preference.split_once('=')
                && name.trim().eq_ignore_ascii_case("wait")
            {
                let seconds = seconds.trim().trim_matches('"');
                return match seconds.parse() {
                    Ok(seconds) => Ok(Some(seconds)),
                    Err(_) => {
                        let given = shortened(format_args!("{seconds:?}"));
                        let max = limits.max_wait.as_secs();
                        let what = format!(
                            "Prefer: wait is {given}; allowed are 0 to {max} whole seconds"
                        );
                        Err(INVALID_WAIT.because(what))
                    }
                };
            }
        }
    }
    Ok(None)
}

fn preferred_time(seconds: u64, limits: &Limits) -> Result<Duration, ApiError> {
    let wait = Some(Duration::from_secs(seconds)).filter(|wait| *wait <= limits.max_wait);
    wait.ok_or_else(|| {
        let max = limits.max_wait.as_secs();
        INVALID_WAIT
            .because(format!("Prefer: wait is {seconds}; allowed are 0 to {max} whole seconds"))
    })
}

/// The TTL of a body, or the default.
pub fn requested_ttl(value: Option<&Value>, limits: &Limits) -> Result<Ttl, ApiError> {
    let Some(value) = value else { return Ok(limits.default_ttl) };
    whole(value)
        .and_then(|millis| Ttl::from_millis(millis).ok())
        .filter(|ttl| *ttl <= limits.max_ttl)
        .ok_or_else(|| {
            INVALID_TTL.because(format!(
                "ttl_ms is {}; {}",
                shortened(value),
                allowed_ttl(value, limits)
            ))
        })
}

/// The time to wait, if the body has one.
pub fn requested_wait(
    value: Option<&Value>,
    limits: &Limits,
) -> Result<Option<Duration>, ApiError> {
    let Some(value) = value else { return Ok(None) };
    let wait = whole(value).map(Duration::from_millis).filter(|wait| *wait <= limits.max_wait);
    wait.map(Some).ok_or_else(|| invalid_wait(&format!("wait_ms is {}", shortened(value)), limits))
}

/// How long the lock is kept at least, as a body asks; zero without it.
pub fn requested_hold(value: Option<&Value>, limits: &Limits) -> Result<Duration, ApiError> {
    let Some(value) = value else { return Ok(Duration::ZERO) };
    let max = limits.max_ttl.millis();
    let hold = whole(value).filter(|millis| *millis <= u64::from(max)).map(Duration::from_millis);
    hold.ok_or_else(|| {
        let given = shortened(value);
        INVALID_BODY.because(format!(
            "hold_at_least_ms is {given}; allowed are whole milliseconds from 0 to {max}, as for ttl_ms"
        ))
    })
}

/// The priority of a body, or the default.
pub fn requested_priority(value: Option<&Value>) -> Result<Priority, ApiError> {
    let Some(value) = value else { return Ok(Priority::default()) };
    let priority = whole(value).and_then(|value| Priority::new(u8::try_from(value).ok()?));
    priority.ok_or_else(|| {
        let given = shortened(value);
        let (min, max) = (Priority::MIN, Priority::MAX);
        INVALID_BODY.because(format!(
            "priority is {given}; allowed are {min} to {max}, and {max} is served first"
        ))
    })
}

/// How many may hold the lock at once, and how many of these slots the request takes, as a body
/// asks. `None` if it asks for a lock with one holder.
pub fn requested_slots(
    slots: Option<&Value>,
    take: Option<&Value>,
) -> Result<Option<Slots>, ApiError> {
    let number = |what: &str, value: &Value, allowed: &str| {
        whole(value).ok_or_else(|| {
            let given = shortened(value);
            INVALID_BODY.because(format!("{what} is {given}; allowed are {allowed}"))
        })
    };
    let take = take.map(|take| number("take", take, "1 to the number of slots")).transpose()?;
    let Some(slots) = slots else {
        return match take {
            None => Ok(None),
            Some(take) => Err(INVALID_BODY.because(format!(
                "take is {take}, but slots is missing; send how many slots the lock has, such as {{\"slots\": 4, \
                 \"take\": {take}}}"
            ))),
        };
    };
    let slots = number("slots", slots, &format!("1 to {}", Slots::MAX))?;
    let slots = Slots::new(slots, take.unwrap_or(1));
    slots.map(Some).map_err(|error| INVALID_BODY.because(error.to_string()))
}

/// Which requests wait at the same time, as a body asks, or all.
pub fn requested_queue(value: Option<&Value>) -> Result<QueueMode, ApiError> {
    match value.map(|value| (value, value.as_str())) {
        None | Some((_, Some("all"))) => Ok(QueueMode::All),
        Some((_, Some("newest"))) => Ok(QueueMode::Newest),
        Some((value, _)) => {
            let given = shortened(value);
            Err(INVALID_BODY
                .because(format!("queue is {given}; allowed are \"all\" and \"newest\"")))
        }
    }
}

/// The label of a holder.
fn label(owner: Value) -> Result<String, ApiError> {
    let Value::String(label) = owner else {
        let given = shortened(owner);
        let detail =
            format!("owner is {given}; owner must be a string of at most {MAX_LABEL} characters");
        return Err(INVALID_BODY.because(detail));
    };
    let size = label.chars().count();
    if size > MAX_LABEL {
        let detail = format!("owner has {size} characters; allowed are at most {MAX_LABEL}");
        return Err(INVALID_BODY.because(detail));
    }
    if label.chars().any(|c| c.is_control() || is_deceptive(c)) {
        return Err(INVALID_BODY.because(
            "owner has a control character, a line separator, a bidirectional control or an invisible character; \
             none of these is allowed",
        ));
    }
    Ok(label)
}

/// Label and metadata to store, with the principal that the lock will belong to.
pub fn metadata(
    owner: Option<Value>,
    metadata: Option<Value>,
    principal: Option<&str>,
) -> Result<LockMetadata, ApiError> {
    let owner = owner.map(label).transpose()?;
    let metadata = match metadata {
        None => BTreeMap::new(),
        Some(value) => serde_json::from_value::<BTreeMap<String, String>>(value).map_err(|_| {
            INVALID_BODY.because("metadata must be an object whose values are strings")
        })?,
    };
    if let Some((key, _)) = metadata
        .iter()
        .find(|(key, value)| [key, value].iter().any(|text| text.contains(is_unshowable)))
    {
        let visible = |c: char| match is_unshowable(c) {
            true => c.escape_unicode().to_string(),
            false => c.escape_debug().to_string(),
        };
        let key: String = key.chars().map(visible).collect();
        let detail = format!(
            "metadata has a control character (U+007F to U+009F), a line separator, a bidirectional control or an invisible character in \"{key}\" or its value"
        );
        return Err(INVALID_BODY.because(detail));
    }
    let size: usize = metadata.iter().map(|(key, value)| key.len() + value.len()).sum();
    if size > MAX_METADATA {
        let detail =
            format!("metadata has {size} bytes in keys and values; allowed are {MAX_METADATA}");
        return Err(INVALID_BODY.because(detail));
    }
    Ok(LockMetadata { owner, metadata, key: principal.map(str::to_owned), slots: None })
}

/// Whether a character makes a text look like another one. The masters store these texts, and
/// terminals, logs and dashboards show them.
///
/// These are the line separators, the marks, embeddings, overrides and isolates of the bidirectional
/// algorithm (Unicode Annex 9), and what is shown as nothing: the characters with the property
/// Default_Ignorable_Code_Point, except the joiners and variation selectors (U+200C, U+200D, U+FE00
/// to U+FE0F), which Persian and emoji need.
fn is_deceptive(c: char) -> bool {
    if c < '\u{ad}' {
        return false;
    }
    matches!(c, '\u{2028}' | '\u{2029}')
        || matches!(
            c,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
        )
        || matches!(c, '\u{180b}'..='\u{180f}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}')
        || matches!(c, '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}')
        || matches!(c, '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// Whether metadata may not have this character. Control characters below U+0020 are allowed,
/// because JSON escapes them. JSON does not escape those from U+007F to U+009F, and terminals obey
/// some of them.
fn is_unshowable(c: char) -> bool {
    ('\u{7f}'..='\u{9f}').contains(&c) || is_deceptive(c)
}

/// The bytes to store beside the lock.
pub fn stored(metadata: &LockMetadata) -> Result<Info, ApiError> {
    // An escape in JSON may take six bytes for a character of one byte. The few texts that exceed
    // the limit by their escapes are refused here.
    metadata.write().ok_or_else(|| {
        let max = Info::MAX_LEN;
        INVALID_BODY
            .because(format!("owner and metadata take more than {max} bytes when escaped as JSON"))
    })
}

/// A number without a fraction. `30000.0` counts as an integer in JSON Schema, and some clients
/// send it.
fn whole(value: &Value) -> Option<u64> {
    let whole = |number: &f64| number.fract() == 0.0 && (0.0..=u32::MAX.into()).contains(number);
    value.as_u64().or_else(|| value.as_f64().filter(whole).map(|number| number as u64))
}

fn allowed_ttl(value: &Value, limits: &Limits) -> String {
    let max = limits.max_ttl.millis();
    let ways_out = match whole(value) {
        Some(millis) if millis > u64::from(max) => TTL_WAYS_OUT,
        _ => "",
    };
    format!("allowed are whole milliseconds from {} to {max}{ways_out}", Ttl::MIN.millis())
}

fn invalid_wait(what: &str, limits: &Limits) -> ApiError {
    let cap = limits.max_wait.as_millis();
    INVALID_WAIT.because(format!("{what}; allowed are whole milliseconds from 0 to {cap}"))
}

/// The value as an error quotes it, about 40 characters at most. A secret is not quoted.
fn shortened(value: impl Display) -> String {
    let text = value.to_string();
    if holds_secret(&text) {
        return "a secret".to_owned();
    }
    let visible = |c: char| match is_unshowable(c) {
        true => c.escape_unicode().to_string(),
        false => c.to_string(),
    };
    let begin: String = text.chars().take(40).map(visible).collect();
    match text.chars().nth(40) {
        Some(_) if text.starts_with('"') => format!("{begin}…\""),
        Some(_) => format!("{begin}…"),
        None => begin,
    }
}

#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests {
    use http::HeaderValue;
    use redlock_api::AcquireBody;

    use super::*;
    use crate::info::label_of;

    pub(super) fn limits() -> Limits {
        Limits {
            default_ttl: Ttl::from_millis(30_000).unwrap(),
            max_ttl: Ttl::from_millis(300_000).unwrap(),
            max_wait: Duration::from_secs(25),
            max_hold: Duration::from_secs(86_400),
        }
    }

    #[test]
    fn every_bad_ttl_is_refused_with_the_allowed_range() {
        for bad in [
            "0",
            "9",
            "-1",
            "300001",
            "9223372036854775808",
            "1e400",
            "1.5",
            "\"5s\"",
            "null",
            "[]",
        ] {
            let Ok(body) = serde_json::from_str::<AcquireBody>(&format!("{{\"ttl_ms\":{bad}}}"))
            else {
                assert_eq!(bad, "1e400", "only a number that is none at all is no JSON");
                continue;
            };
            let problem = requested_ttl(body.ttl_ms.as_ref(), &limits()).unwrap_err().problem();
            assert_eq!(problem.code, "invalid_ttl");
            assert!(problem.detail.contains("10 to 300000"), "{}", problem.detail);
        }
    }

    #[test]
    fn bad_priorities_and_queues_are_refused_with_what_is_allowed() {
        for bad in ["-1", "10", "5.5", "\"high\"", "null", "[]", "256", "4294967301"] {
            let body: AcquireBody =
                serde_json::from_str(&format!("{{\"priority\":{bad}}}")).unwrap();
            let problem = requested_priority(body.priority.as_ref()).unwrap_err().problem();
            assert_eq!(problem.code, "invalid_body");
            let detail = format!("priority is {bad}; allowed are 0 to 9, and 9 is served first");
            assert_eq!(problem.detail, detail);
        }
        for bad in ["\"latest\"", "\"Newest\"", "1", "null", "{}"] {
            let body: AcquireBody = serde_json::from_str(&format!("{{\"queue\":{bad}}}")).unwrap();
            let problem = requested_queue(body.queue.as_ref()).unwrap_err().problem();
            assert_eq!(problem.code, "invalid_body");
            let detail = format!("queue is {bad}; allowed are \"all\" and \"newest\"");
            assert_eq!(problem.detail, detail);
        }
        let body: AcquireBody =
            serde_json::from_str(r#"{"priority":9.0,"queue":"newest"}"#).unwrap();
        assert_eq!(requested_priority(body.priority.as_ref()).unwrap(), Priority::MAX);
        assert_eq!(requested_queue(body.queue.as_ref()).unwrap(), QueueMode::Newest);
    }

    #[test]
    fn the_label_survives_storage() {
        let body: AcquireBody =
            serde_json::from_str(r#"{"owner":"a \"b\"","metadata":{"k":"v"}}"#).unwrap();
        let info = stored(&metadata(body.owner, body.metadata, None).unwrap()).unwrap();
        assert_eq!(label_of(info.as_bytes()).as_deref(), Some("a \"b\""));
        assert_eq!(label_of(b"not ours"), None);
    }

    #[test]
    fn tokens_are_taken_bare_and_in_angle_brackets() {
        let token = "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b";
        for text in [token.to_owned(), format!("<{token}>")] {
            let headers =
                HeaderMap::from_iter([(LOCK_TOKEN.clone(), HeaderValue::try_from(text).unwrap())]);
            assert!(lock_token(&headers).is_ok());
        }
        assert_eq!(lock_token(&HeaderMap::new()).unwrap_err().problem().code, "missing_token");
    }
}
