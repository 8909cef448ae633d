//! What can go wrong, so told that a person can act on it.

use std::time::Duration;

use serde::Deserialize;

/// The body of an error answer, RFC 9457.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Problem {
    /// The HTTP status.
    pub status: u16,
    /// The kind of problem, as a word to program against.
    pub code: String,
    /// What happened, with the value and what is allowed.
    pub detail: String,
    /// Under this the gateway's log has more.
    #[serde(default)]
    pub request_id: Option<String>,
    /// When trying again makes sense, in milliseconds.
    #[serde(default)]
    pub retry_after_ms: Option<u64>,
    /// The label of whoever holds the lock.
    #[serde(default)]
    pub holder: Option<String>,
    /// When the holder's lock expires unless it is extended, in milliseconds.
    #[serde(default)]
    pub expires_in_ms: Option<u64>,
}

/// Why a lock is not held any more, or may not be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Loss {
    /// It is free or expired: somebody released it, or it was not extended in time.
    #[error("it was released by somebody else or has expired ({detail})")]
    Gone { detail: String },
    /// Somebody else holds it.
    #[error("{} holds it", .holder.as_deref().unwrap_or("somebody else"))]
    Taken { holder: Option<String> },
    /// It was held for as long as a lock may be.
    #[error("it was held for as long as it may be ({detail})")]
    MaxHold { detail: String },
    /// No gateway has confirmed an extension, and its deadline is near.
    #[error("no gateway has confirmed an extension before its deadline: {}", .what.join("; "))]
    Unconfirmed { what: Vec<String> },
}

impl From<Problem> for Loss {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem { status: 404, detail, .. } => Self::Gone { detail },
            Problem { code, detail, .. } if code == "max_hold_reached" => Self::MaxHold { detail },
            Problem { holder, .. } => Self::Taken { holder },
        }
    }
}

/// Why there is no lock, or no answer.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Somebody else has the lock, and had it until the wait ended.
    #[error("{} holds the lock{}", of_holder(.holder), in_time(.expires_in))]
    Held { holder: Option<String>, expires_in: Option<Duration> },
    /// The gateway refuses the request as it is; a repetition would be refused too.
    #[error("{} ({}): {}", .0.code, .0.status, .0.detail)]
    Refused(Box<Problem>),
    /// No gateway decided: `what` is the last thing that was heard of each URL.
    #[error("no gateway decided: {}", .what.join("; "))]
    Unavailable { what: Vec<String> },
    /// The lock was lost before this.
    #[error("the lock was lost: {0}")]
    Lost(Loss),
    /// Nothing was asked: the client was made with something that cannot work.
    #[error("{0}")]
    Setup(String),
}

fn of_holder(holder: &Option<String>) -> String {
    holder.as_ref().map_or_else(|| "somebody".into(), |label| format!("{label:?}"))
}

fn in_time(expires_in: &Option<Duration>) -> String {
    expires_in.map_or_else(String::new, |left| {
        format!("; it expires in {:.1} s unless it is extended", left.as_secs_f64())
    })
}
