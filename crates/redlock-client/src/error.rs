//! Errors, with what a person needs to act on them.

use std::time::Duration;

use redlock_api::{Problem, ProblemCode};

use crate::waiting::time_of;

/// A lock is no longer held, or may not be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}the lock was lost: {reason}", of(.name))]
pub struct Loss {
    /// The name of the lock.
    pub name: String,
    pub reason: LossReason,
}

/// Why a lock was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LossReason {
    /// The lock is free or expired: somebody released it, or it was not extended in time.
    #[error("it was released by somebody else or has expired ({detail})")]
    Gone { detail: String },
    /// Somebody else holds the lock.
    #[error("{} holds it", .holder.as_deref().unwrap_or("somebody else"))]
    Taken { holder: Option<String> },
    /// The lock was held for the longest time allowed.
    #[error("it was held for as long as it may be ({detail})")]
    MaxHold { detail: String },
    /// No gateway has confirmed an extension, and the deadline is near.
    #[error("no gateway has confirmed an extension before its deadline: {}", .what.join("; "))]
    Unconfirmed { what: Vec<String> },
}

impl From<Problem> for LossReason {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem { status: 404, detail, .. } => Self::Gone { detail },
            problem if problem.known_code() == Some(ProblemCode::MaxHoldReached) => {
                Self::MaxHold { detail: problem.detail }
            }
            Problem { holder, .. } => Self::Taken { holder },
        }
    }
}

/// Why a request failed. Every message about a lock begins with the lock's name.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Somebody else held the lock until the wait ended.
    #[error("{}{}", of(.name), held(.holder, .acquired_at, .expires_in))]
    #[non_exhaustive]
    Held {
        name: String,
        holder: Option<String>,
        /// Since when, RFC 3339.
        acquired_at: Option<String>,
        expires_in: Option<Duration>,
    },
    /// The gateway refuses the request; a repetition would be refused too.
    #[error("{}{problem}", of_some(.name))]
    #[non_exhaustive]
    Refused { name: Option<String>, problem: Box<Problem> },
    /// No gateway decided. `what` has the last answer or failure of each URL.
    #[error(
        "{}no gateway {}: {}",
        of_some(.name),
        if *.is_unreachable { "can be reached" } else { "decided" },
        .what.join("; ")
    )]
    #[non_exhaustive]
    Unavailable {
        name: Option<String>,
        what: Vec<String>,
        /// Whether no gateway accepted a connection, so that nothing was sent.
        is_unreachable: bool,
    },
    /// The lock was lost earlier.
    #[error("{0}")]
    Lost(Loss),
    /// Nothing was sent, or an answer made no sense. The text says why.
    #[error("{0}")]
    Setup(String),
}

/// The name of a lock in front of a message. A name that no lock can have is quoted.
fn of(name: &str) -> String {
    match name.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => format!("{name}: "),
        false => format!("{name:?}: "),
    }
}

fn of_some(name: &Option<String>) -> String {
    name.as_deref().map(of).unwrap_or_default()
}

fn held(
    holder: &Option<String>,
    acquired_at: &Option<String>,
    expires_in: &Option<Duration>,
) -> String {
    match (holder, acquired_at, expires_in) {
        // No holder is known: after a release with a time to hold, or with another Redlock client.
        (None, None, Some(left)) => {
            format!("the lock stays closed for {:.1} s", left.as_secs_f64())
        }
        _ => {
            let holder = of_holder(holder);
            format!("{holder} holds the lock{}{}", since(acquired_at), in_time(expires_in))
        }
    }
}

fn of_holder(holder: &Option<String>) -> String {
    holder.as_ref().map_or_else(|| "somebody".into(), |label| format!("{label:?}"))
}

fn since(acquired_at: &Option<String>) -> String {
    acquired_at.as_deref().map_or_else(String::new, |at| format!(" (since {})", time_of(at)))
}

fn in_time(expires_in: &Option<Duration>) -> String {
    expires_in.map_or_else(String::new, |left| {
        format!("; it expires in {:.1} s unless it is extended", left.as_secs_f64())
    })
}
