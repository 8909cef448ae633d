//! The table of errors, and the conversion of every refusal by the gateway, the core or the
//! authentication into an error. No match has a wildcard arm, so a new kind of refusal breaks the
//! build here until it gets an error.
//!
//! Every error body is one flat `application/problem+json` object (RFC 9457), so that generated
//! clients need one type.

mod kinds;

use std::fmt::Display;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytesize::ByteSize;
use http::{HeaderValue, StatusCode as S, header};
use redlock_api::{HeldLock, NodeAnswer, PROBLEM_MEDIA_TYPE, Problem, ProblemCode};
use redlock_core::{HeldBy, LinePlace, LockError, NodeReport, Ttl, WaitLimit};

pub(super) use self::kinds::*;
use super::wire::{json_line, node_answer, rfc3339, slot_holder};
use crate::audit::RequestEnd;
use crate::auth::{AuthError, Verb};
use crate::config::show;
use crate::gateway::Refusal;
use crate::info::label_of;
use crate::overload::clients::Exceeded;
use crate::overload::large_messages::{COVERED, LargePermit, bounded};
use crate::overload::shares::{Full, Resource};
use crate::remedy::PublicUrl;

/// What a client can do about a TTL above the limit.
pub const TTL_WAYS_OUT: &str = "; ask for less and extend the lock while you work, or have the \
     operator raise the limit (max_ttl or max_hold, of the gateway or of your key)";

/// An example of the error with this status and code, if there is one.
pub(super) fn example(status: &str, code: &str) -> Option<Problem> {
    let kind = kinds::ALL
        .iter()
        .find(|kind| kind.status.as_str() == status && kind.code.as_str() == code)?;
    let error = kind.as_usual();
    let mut problem = match (kind.status, kind.code) {
        (S::TOO_MANY_REQUESTS | S::SERVICE_UNAVAILABLE, _) => error.retry_after(SOON),
        (_, ProblemCode::LockHeld) => error.retry_after(LONGEST_PAUSE),
        _ => error,
    }
    .problem();
    problem.request_id = Some("5f2b7c0e9a3d4418".into());
    if ["lock_held", "not_holder"].contains(&code) {
        problem.holder = Some("nightly-report on host-7".into());
        problem.expires_in_ms = Some(21_400);
        problem.acquired_at = Some("2025-11-21T11:39:25.123Z".into());
    }
    if code == "lock_held" {
        problem.queue_position = Some(3);
        problem.queue_place_expires_ms = Some(10_000);
    }
    if ["quorum_unavailable", "outcome_unknown"].contains(&code) {
        problem.nodes = Some(vec![NodeAnswer {
            node: "10.0.0.1:6379".into(),
            state: "timeout".into(),
            detail: Some("no answer within 50ms".into()),
        }]);
    }
    Some(problem)
}

/// Whether this code means that the gateway does not know the caller, or does not allow the caller
/// to do this.
pub(super) fn is_denial(code: &str) -> bool {
    [UNAUTHENTICATED, FORBIDDEN].iter().any(|kind| kind.code.as_str() == code)
}

/// The suggested pause before a retry when no better one is known.
const SOON: Duration = Duration::from_secs(1);
/// Longest suggested pause after `lock_held`. It is short, because a holder may release its lock
/// long before the lock expires.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The fraction of a pause by which pauses differ at random.
const SPREAD: f64 = 0.1;
const BASIC_CHALLENGE: &str = "Basic realm=\"redlock-gateway\", charset=\"UTF-8\"";

/// An error answer: its body, and what only the layers around the routes see of it.
#[derive(Debug, Clone)]
pub(super) struct ErrorReport {
    pub(super) problem: Problem,
    pub(super) code: ProblemCode,
    /// The cause inside the gateway, for its log only.
    pub(super) cause: Option<String>,
}

/// What the caller may know beyond the fate of its request. The default discloses nothing.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Disclosure {
    /// Names of nodes, and their details.
    pub(super) nodes: bool,
    /// The holder of a lock that is not the caller's own, and the time left.
    pub(super) holder: bool,
    /// Whether somebody else holds the lock at all.
    pub(super) is_held: bool,
}

/// An error on its way to the caller.
#[derive(Debug)]
pub struct ApiError {
    status: S,
    /// The `WWW-Authenticate` header for a client without the right key: RFC 6750, section 3.
    challenge: Option<&'static str>,
    report: Box<ErrorReport>,
}

impl ProblemKind {
    /// Makes an error with the detail from the table of kinds.
    pub(super) fn as_usual(self) -> ApiError {
        self.because(self.detail)
    }

    /// Makes an error. `detail` states what happened this time, with the refused value and the
    /// allowed values.
    pub(super) fn because(self, detail: impl Into<String>) -> ApiError {
        let Self { status, code, title, .. } = self;
        let problem = Problem {
            kind: format!("urn:redlock:problem:{code}"),
            title: title.into(),
            status: status.as_u16(),
            code: code.as_str().into(),
            detail: detail.into(),
            request_id: None,
            retry_after_ms: None,
            holder: None,
            expires_in_ms: None,
            acquired_at: None,
            queue_position: None,
            queue_place_expires_ms: None,
            held: None,
            holders: None,
            nodes: None,
            runbook: self.runbook().map(Into::into),
        };
        let report = ErrorReport { problem, code, cause: None };
        ApiError { status, challenge: None, report: Box::new(report) }
    }
}

impl ApiError {
    /// A defect of the gateway. The log has the cause under the request id of the answer.
    pub fn internal(cause: impl Display) -> Self {
        let mut error = INTERNAL.as_usual();
        error.report.cause = Some(cause.to_string());
        error
    }

    /// The limit on connections is reached, and all of them have requests under way.
    pub(super) fn no_place() -> Self {
        OVERLOADED
            .because(
                "the limit on open connections (--max-connections) is reached, and all of them have requests \
                 under way",
            )
            .retry_after(SOON)
    }

    /// The client, behind a trusted proxy or over HTTP/2, uses as many connections as one client may
    /// have. Each request counts as a connection.
    pub(super) fn beyond_share() -> Self {
        OVERLOADED
            .because(
                "this client has reached --max-connections-per-client; each concurrent request through a proxy \
                 or over HTTP/2 counts as a connection",
            )
            .retry_after(SOON)
    }

    /// The other requests for many locks leave too little memory for this one.
    pub(super) fn no_memory_for_request(bytes: usize) -> Self {
        let detail = format!(
            "this request needs at least {bytes} bytes, but other PATCH /locks requests use up --memory-budget: wait for \
             them, or send fewer leases at once"
        );
        OVERLOADED.because(detail).retry_after(SOON)
    }

    /// The large answers that clients have not read yet leave too little memory for this one.
    pub(super) fn no_memory_for_answer(bytes: usize) -> Self {
        let detail = format!(
            "the answer has {bytes} bytes, but --memory-budget is full of unread answers: read or close your open ones, \
             or ask for less (`limit`, `slots`)"
        );
        OVERLOADED.because(detail).retry_after(SOON)
    }

    /// The caller is known and lacks the permission. `key`: the name of its key, if the gateway has
    /// keys.
    pub(super) fn forbidden(key: Option<&str>, verb: Verb) -> Self {
        let names = if verb.is_of_names() {
            ", and a pattern in `names` that matches the name of the lock"
        } else {
            ""
        };
        let verb = verb.word();
        let detail = match key {
            Some(key) => format!(
                "the API key {key:?} may not do this: its entry in the keys file needs {verb:?} in `verbs`{names}"
            ),
            None => format!(
                "this needs an API key with the permission {verb:?}, and this gateway has no keys (--auth-keys); without keys, \
                 this works only with a loopback --listen, no --allowed-host or --cors-origin, and no headers of a proxy"
            ),
        };
        let challenge =
            key.map(|_| "Bearer realm=\"redlock-gateway\", error=\"insufficient_scope\"");
        Self { challenge, ..FORBIDDEN.because(detail) }
    }

    /// The client's certificate is verified, but no key names it.
    pub(super) fn unknown_certificate(subject: &str) -> Self {
        let mut error = Self::from(AuthError::Unknown);
        error.report.problem.detail = format!(
            "no API key has the client certificate {subject:?}: set `certificate` to this subject in the keys file"
        );
        error
    }

    /// A forced release has ended nothing: `by` holds the lock. `names_holder`: whether the caller may
    /// know more about that holder.
    pub(super) fn not_forced(by: &HeldBy, names_holder: bool) -> Self {
        let why = if by.is_foreign {
            "a program other than this service set this lock, so force cannot release it; delete the lock's key on the \
             masters, or let it expire"
        } else {
            "the lock went to somebody else while its holder was looked up; to release the new holder's lock, try again"
        };
        if names_holder {
            NOT_HOLDER.because(format!("{why}; {}", describe(by))).with_holder(by)
        } else {
            NOT_HOLDER.because(why)
        }
    }

    /// The extension did not finish before the validity ended.
    pub(super) fn not_in_time() -> Self {
        let detail =
            "the lock could not be extended in time; another client may soon hold it: stop work";
        OUTCOME_UNKNOWN.because(detail)
    }

    /// The end of a request with this error, for the audit log.
    pub(super) fn end(&self) -> RequestEnd<'_> {
        let problem = Some(self.report.code.as_str());
        RequestEnd { status: self.status.as_u16(), problem, is_denied: self.is_denial() }
    }

    /// Whether the client has lost the lock, or has held it for as long as allowed.
    pub(super) fn is_loss(&self) -> bool {
        use ProblemCode as C;
        matches!(self.report.code, C::LockNotFound | C::NotHolder | C::MaxHoldReached)
    }

    /// Replaces the detail of an error without a quorum. A listing changes nothing, so nothing is undone.
    pub(super) fn of_listing(mut self) -> Self {
        if self.report.code == ProblemCode::QuorumUnavailable {
            self.report.problem.detail =
                "too few masters could be read in time; try again".to_owned();
        }
        self
    }

    /// The path names no deferred request that the caller may see.
    pub(super) fn no_such_request() -> Self {
        REQUEST_NOT_FOUND.as_usual()
    }

    /// Whether the caller is unknown or lacks the permission.
    pub(super) fn is_denial(&self) -> bool {
        matches!(self.report.code, ProblemCode::Unauthenticated | ProblemCode::Forbidden)
    }

    /// The request must be recorded in the audit log, and cannot be recorded now.
    pub(super) fn unrecorded() -> Self {
        AUDIT_UNAVAILABLE.as_usual().retry_after(SOON)
    }

    /// Names the locks of a set that are held.
    pub(super) fn held(mut self, held: Vec<HeldLock>) -> Self {
        self.report.problem.held = Some(held);
        self
    }

    /// Says which part of a request about several locks the error is about.
    pub(super) fn about(mut self, name: &str) -> Self {
        let detail = &mut self.report.problem.detail;
        *detail = format!("{name}: {detail}");
        self
    }

    pub(super) fn status(&self) -> S {
        self.status
    }

    pub(super) fn code(&self) -> ProblemCode {
        self.report.code
    }

    pub(super) fn retry_after(mut self, pause: Duration) -> Self {
        self.report.problem.retry_after_ms = Some(pause.as_micros().div_ceil(1000) as u64);
        self
    }

    fn nodes(mut self, nodes: Vec<NodeReport>, disclosure: Disclosure) -> Self {
        let shown = |(at, report)| node_answer(report, at, disclosure.nodes);
        self.report.problem.nodes = Some(nodes.into_iter().enumerate().map(shown).collect());
        self
    }

    /// Suggests a retry after the lock's expiry, or after about [`LONGEST_PAUSE`] if that is
    /// sooner. The pause has a random part, so that clients that were refused together do not
    /// return together.
    fn held_by(self, by: &HeldBy) -> Self {
        if let (true, Some(left)) = (by.is_kept_free(), by.expires_in) {
            // Only the key of the former holder, or force, can end this earlier.
            return self.retry_after(left).with_holder(by);
        }
        let expiry = by.expires_in.unwrap_or(SOON).max(Duration::from_millis(50));
        let expiry = expiry.mul_f64(1.0 + SPREAD * fastrand::f64());
        self.retry_after(expiry.min(LONGEST_PAUSE.mul_f64(1.0 - SPREAD * fastrand::f64())))
            .with_holder(by)
    }

    fn with_holder(mut self, by: &HeldBy) -> Self {
        self.report.problem.holder = label_of(&by.info);
        self.report.problem.expires_in_ms = by.expires_in.map(|left| left.as_millis() as u64);
        let fencing = by.fencing.filter(|_| !by.is_kept_free());
        self.report.problem.acquired_at = fencing.map(|token| rfc3339(token.get()));
        self.report.problem.queue_position = by.line.as_ref().map(|line| u64::from(line.position));
        let kept_for = by.line.as_ref().and_then(|line| line.kept_for);
        self.report.problem.queue_place_expires_ms =
            kept_for.map(|kept_for| kept_for.as_millis() as u64);
        let holders = by.holders().iter().map(|holder| slot_holder(holder, false)).collect();
        self.report.problem.holders = Some(holders).filter(|holders: &Vec<_>| !holders.is_empty());
        self
    }

    pub(super) fn report(self) -> ErrorReport {
        *self.report
    }

    pub fn problem(self) -> Problem {
        self.report.problem
    }
}

impl From<AuthError> for ApiError {
    fn from(error: AuthError) -> Self {
        const INVALID: &str = "Bearer realm=\"redlock-gateway\", error=\"invalid_token\"";
        let (challenge, detail) = match error {
            AuthError::Missing => ("Bearer realm=\"redlock-gateway\"", UNAUTHENTICATED.detail),
            AuthError::Unknown => (INVALID, "what was sent is not an API key of this service"),
            AuthError::Expired => (INVALID, "the API key or the client certificate has expired"),
            // The answer has no challenge, because a browser would react to one by asking its user
            // for a password.
            AuthError::CrossSite => {
                return FORBIDDEN.because(
                    "a page of another site made a browser send this; allow the page's origin with --cors-origin; if this \
                     gateway has keys, the page must also send a Bearer key: a password or certificate that the browser adds \
                     by itself is ignored",
                );
            }
        };
        Self { challenge: Some(challenge), ..UNAUTHENTICATED.because(detail) }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        Self::of(refusal, Disclosure::default())
    }
}

impl ApiError {
    /// The error for a refusal, with what the caller may know.
    pub(super) fn of(refusal: Refusal, disclosure: Disclosure) -> Self {
        match refusal {
            Refusal::Lock(error) => Self::of_lock(error, disclosure),
            Refusal::InQuarantine { nodes, left, why } => {
                let why = if disclosure.nodes { format!(" ({why})") } else { String::new() };
                let detail = format!(
                    "too few masters can vote: some are in quarantine, as they may have lost locks{why}; a majority can vote \
                     within {}; this request got no lock, and any partial lock on the masters is being removed",
                    show(Duration::from_secs(left.as_secs() + 1))
                );
                NO_QUORUM.because(detail).retry_after(left.max(SOON)).nodes(nodes, disclosure)
            }
            Refusal::MaxHoldReached { held, max } => {
                let held = show(Duration::from_secs(held.as_secs()));
                let max = show(max);
                MAX_HOLD_REACHED.because(format!(
                    "the lock was granted {held} ago, and a lock may be held for {max} (--max-hold, or max_hold of the \
                     API key); release it, then acquire it again"
                ))
            }
            Refusal::Quota(Exceeded { taken, limit, retry_after, is_of_releases }) => {
                let taken = ByteSize::b(taken);
                let limit = ByteSize::b(limit);
                let (of, advice) = if is_of_releases {
                    (
                        "the records of this client's DELETEs that released nothing",
                        "release only locks that you hold, or try again when some records have expired",
                    )
                } else {
                    ("this client's locks", "release locks, or try again when some have ended")
                };
                let detail = format!(
                    "the masters' memory is short: {of} take about {taken}; allowed is {limit}; {advice}; the operator can raise \
                     the limit with more maxmemory on the masters, or with --master-memory where maxmemory is not set"
                );
                QUOTA_EXCEEDED.because(detail).retry_after(retry_after)
            }
            Refusal::Draining => {
                DRAINING.as_usual().retry_after(SOON)
            }
            Refusal::ClientGone => ABANDONED.as_usual(),
            Refusal::Overloaded => {
                let detail = "too many requests are in flight: all clients together have reached --max-in-flight, or this \
                              client has reached its own limit; wait for retry_after_ms";
                OVERLOADED.because(detail).retry_after(SOON)
            }
            Refusal::Full(full) => Self::of_full(full).retry_after(SOON),
            Refusal::InvalidCursor => INVALID_PARAMETER.because(
                "this API key did not get this cursor for this prefix; send next_cursor of the previous page, or omit cursor",
            ),
        }
    }

    fn of_full(Full { resource, max, of_this_client }: Full) -> Self {
        let streams = |what: &str| {
            RATE_LIMITED
                .because(format!("too many event streams: this gateway now allows {max} {what}"))
        };
        let of = if of_this_client { "this client" } else { "all clients together" };
        match resource {
            Resource::Listings => {
                let s = if max == 1 { "" } else { "s" };
                RATE_LIMITED.because(format!(
                    "{of} may have {max} listing{s} under way at a time; wait for an answer"
                ))
            }
            Resource::Deferred => {
                let (has, flag) = match of_this_client {
                    true => ("has", "--max-waiters-per-client"),
                    false => ("have", "half of --max-waiters"),
                };
                TOO_MANY_WAITERS.because(format!(
                    "{of} {has} {max} deferred requests that have not ended, as many as are allowed ({flag}); claim the ready \
                     ones, or cancel some by DELETE /requests/{{id}}"
                ))
            }
            Resource::Streams => {
                let what = match of_this_client {
                    true => "streams of this client, as many as others leave",
                    false => "streams and waiting requests of all clients together",
                };
                streams(&format!("{what} (a larger --max-connections allows more)"))
            }
            Resource::WatchedLocks => streams(&format!("watched locks of {of}")),
            Resource::WatchedPrefixes => streams(&format!("watched prefixes of {of}")),
        }
    }

    fn of_lock(error: LockError, disclosure: Disclosure) -> Self {
        match error {
            LockError::Held(by) => LOCK_HELD.because(describe(&by)).held_by(&by),
            LockError::NotHolder(by) if disclosure.holder => NOT_HOLDER
                .because(format!("this token or Idempotency-Key does not hold the lock; {}", describe(&by)))
                .with_holder(&by),
            LockError::NotHolder(_) if disclosure.is_held => {
                NOT_HOLDER.because("this token or Idempotency-Key does not hold the lock; somebody else does")
            }
            LockError::NotHolder(_) | LockError::Lost => {
                LOCK_NOT_FOUND.as_usual()
            }
            LockError::NoQuorum(nodes) => {
                NO_QUORUM.as_usual().retry_after(SOON).nodes(nodes, disclosure)
            }
            // Without reports, the nodes answered. Several grants of one owner may stand, or the
            // answers came too late to be used.
            LockError::Unknown(nodes) if nodes.is_empty() => OUTCOME_UNKNOWN
                .because(
                    "the answers of the masters do not tell whether this was done; the deadline of an earlier answer still \
                     stands; try again",
                )
                .retry_after(SOON),
            LockError::Unknown(nodes) => {
                OUTCOME_UNKNOWN.as_usual().retry_after(SOON).nodes(nodes, disclosure)
            }
            LockError::Superseded => SUPERSEDED.as_usual(),
            LockError::HeldTooLong { .. } => Refusal::from(error).into(),
            LockError::TtlTooLong { asked, max } => {
                let asked = asked.millis();
                let min = Ttl::MIN.millis();
                let max = max.millis();
                INVALID_TTL
                    .because(format!("ttl_ms is {asked}; allowed are {min} to {max}{TTL_WAYS_OUT}"))
            }
            LockError::TtlTooShort { asked, round, least } => {
                let asked = asked.millis();
                let round = round.as_secs_f64() * 1000.0;
                let least = least.millis();
                INVALID_TTL.because(format!(
                    "ttl_ms is {asked}; asking the masters takes {round:.1} ms here now, and that must fit into a tenth of the \
                     TTL: send at least {least}"
                ))
            }
            LockError::TooManyWaiters { max, limit } => {
                let what = match limit {
                    WaitLimit::All => {
                        format!(
                            "{max} requests are waiting for locks here, as many as are allowed (--max-waiters)"
                        )
                    }
                    WaitLimit::Connections => {
                        format!(
                            "{max} requests and event streams occupy connections here, as many as are allowed (seven \
                             eighths of --max-connections, or --max-waiters if that is more)"
                        )
                    }
                    WaitLimit::OfLock => {
                        format!(
                            "{max} requests are waiting for this lock here, as many as are allowed (--max-waiters-per-lock)"
                        )
                    }
                    WaitLimit::OfCaller => {
                        format!(
                            "{max} requests of this client are waiting here, as many as one client may have (--max-waiters-per-client)"
                        )
                    }
                    WaitLimit::LocksOfCaller => {
                        format!(
                            "requests of this client are waiting for {max} locks here, as many as one client may wait for \
                             (--max-waited-locks-per-client)"
                        )
                    }
                };
                TOO_MANY_WAITERS
                    .because(format!("{what}; try again later, or without wait_ms"))
                    .retry_after(SOON)
            }
        }
    }
}

fn describe(by: &HeldBy) -> String {
    if by.is_part_of_own_set {
        return "an earlier request with this Idempotency-Key still holds a part of what it was granted; release \
                that part by a DELETE with this key, or use another key"
            .into();
    }
    let holds = match by.expires_in {
        Some(left) if by.is_kept_free() => {
            let left = left.as_millis();
            format!("nobody holds it, but nobody can get it for {left} ms")
        }
        _ => match by.wanted_and_free() {
            // The numbers of a waiter are those of the first in its line.
            Some(_) if by.line.is_some() => "too few slots are free".to_owned(),
            Some((wanted, free)) => describe_slots(wanted, free, by.expires_in),
            None => describe_holder(by),
        },
    };
    match by.line.as_deref().copied() {
        Some(LinePlace { position, kept_for: Some(kept_for) }) => {
            let position = ordinal(position);
            let kept_for = show(kept_for);
            format!(
                "{holds}; this request is {position} in line, and its place is kept for {kept_for}"
            )
        }
        Some(LinePlace { position, kept_for: None }) => {
            format!(
                "{holds}; this request is {} in line, and its place is not kept",
                ordinal(position)
            )
        }
        None => holds,
    }
}

fn describe_slots(wanted: u16, free: u16, free_in: Option<Duration>) -> String {
    let wanted = match wanted {
        1 => "1 slot is wanted".to_owned(),
        _ => format!("{wanted} slots are wanted"),
    };
    let free = match free {
        0 => "none is free".to_owned(),
        1 => "1 is free".to_owned(),
        _ => format!("{free} are free"),
    };
    match free_in {
        Some(left) => {
            format!("{wanted}, {free}; enough may be free in {} ms", left.as_millis())
        }
        None => format!("{wanted}, {free}"),
    }
}

fn describe_holder(by: &HeldBy) -> String {
    if !by.is_known() {
        return "no holder is known: other requests asked for the lock at the same time".into();
    }
    let who = match label_of(&by.info) {
        Some(label) => format!("{label:?}"),
        None if by.is_foreign => "another client of the masters".to_owned(),
        None => "somebody else".to_owned(),
    };
    let holds = match by.fencing {
        Some(token) => format!("{who} has held it since {}", rfc3339(token.get())),
        None => format!("{who} holds it"),
    };
    match by.expires_in {
        Some(left) => format!("{holds}; it may expire in {} ms", left.as_millis()),
        None => format!("{holds}, without an expiry"),
    }
}

fn ordinal(number: u32) -> String {
    let ending = match (number % 10, number % 100) {
        (1, of_hundred) if of_hundred != 11 => "st",
        (2, of_hundred) if of_hundred != 12 => "nd",
        (3, of_hundred) if of_hundred != 13 => "rd",
        _ => "th",
    };
    format!("{number}{ending}")
}

impl ErrorReport {
    /// Names the client whose share is used up, if the request was refused because of a share.
    pub(super) fn name_client(&mut self, client: impl FnOnce() -> Option<String>) {
        if let Some(client) = self.is_of_a_share().then(client).flatten() {
            let detail = &mut self.problem.detail;
            *detail = format!("{detail}; this client counts as {client}");
        }
    }

    /// Whether the request was refused because of a limit on what clients may use.
    pub(super) fn is_of_a_share(&self) -> bool {
        matches!(
            self.code,
            ProblemCode::TooManyWaiters
                | ProblemCode::RateLimited
                | ProblemCode::QuotaExceeded
                | ProblemCode::Overloaded
        )
    }

    /// Whether the body lists the holders of slots. Only such a body can be large.
    pub(super) fn has_holders(&self) -> bool {
        self.problem.holders.is_some()
    }

    /// Writes the body of an error into the answer. This comes last, because the body has the
    /// request id.
    pub(super) fn render(
        self,
        id: &HeaderValue,
        url: &PublicUrl,
        response: &mut Response,
        memory: impl Fn(usize) -> Option<LargePermit>,
    ) {
        let request_id = id.to_str().ok().map(str::to_owned);
        let runbook = self.problem.runbook.map(|section| url.link(&section).into());
        let mut problem = Problem { request_id, runbook, ..self.problem };
        let line = json_line(&problem).unwrap_or_default();
        *response.body_mut() = match line.len() {
            size if size <= COVERED => Body::from(line),
            size => match memory(size) {
                Some(permit) => Body::from(bounded(line, permit)),
                None => {
                    problem.holders = None;
                    Body::from(json_line(&problem).unwrap_or_default())
                }
            },
        };
        let headers = response.headers_mut();
        headers.remove(header::CONTENT_LENGTH);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_MEDIA_TYPE));
        if problem.status != S::NOT_FOUND {
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        }
    }
}

impl IntoResponse for ApiError {
    /// Makes the answer without its body. `ErrorReport::render` adds that later, with the request id.
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        let headers = response.headers_mut();
        if let Some(pause) = self.report.problem.retry_after_ms {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(pause.div_ceil(1000).max(1)));
        }
        // Each scheme gets a header line of its own.
        if let Some(bearer) = self.challenge {
            headers.append(header::WWW_AUTHENTICATE, HeaderValue::from_static(bearer));
            headers.append(header::WWW_AUTHENTICATE, HeaderValue::from_static(BASIC_CHALLENGE));
        }
        response.extensions_mut().insert(*self.report);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_line_are_told_as_ordinals() {
        let numbers = [1, 2, 3, 4, 11, 12, 13, 21, 102, 111, 113, 1_003];
        assert_eq!(
            numbers.map(ordinal).join(" "),
            "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th 113th 1003rd"
        );
    }

    #[test]
    fn a_ttl_too_short_for_a_round_names_the_least_ttl() {
        let ttl = |millis| Ttl::from_millis(millis).unwrap();
        let asked = ttl(10);
        let round = Duration::from_micros(3_040);
        let least = ttl(40);
        let problem =
            ApiError::from(Refusal::Lock(LockError::TtlTooShort { asked, round, least })).problem();
        assert_eq!((problem.status, problem.code.as_str()), (400, "invalid_ttl"));
        assert_eq!(
            problem.detail,
            "ttl_ms is 10; asking the masters takes 3.0 ms here now, and that must fit into a tenth of the TTL: send at least 40"
        );
    }
}
