//! The end of a `redlock` command, in words and as an exit code.

use std::process::ExitCode;

use redlock_client::{Error, ProblemCode};
use serde_json::json;

use crate::stderr::write;

/// The default exit code when somebody else holds the lock.
pub(crate) const HELD: u8 = 75;

/// How a command of `redlock` ended.
#[derive(Debug)]
pub(crate) enum ExitOutcome {
    Done,
    /// The command under the lock has ended with this code.
    Ended(u8),
    Usage(String),
    /// Somebody else holds the lock. The number is the exit code.
    Held(String, u8),
    /// Superseded: a newer request with `queue` newest waits for the lock. The number is the exit
    /// code.
    Superseded(String, u8),
    /// A state that was waited for did not come in time.
    NotSeen(String),
    Unavailable(String),
    Denied(String),
    Lost(String),
    Failed(String),
}

impl ExitOutcome {
    /// The codes are those of sysexits.h. A lost lock has 79, because sysexits.h has no code for
    /// it.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Ended(code) => *code,
            Self::Usage(_) => 64,
            Self::Unavailable(_) => 69,
            Self::Failed(_) => 70,
            Self::NotSeen(_) => HELD,
            Self::Held(_, code) | Self::Superseded(_, code) => *code,
            Self::Denied(_) => 77,
            Self::Lost(_) => 79,
        }
    }

    /// Reports the outcome on standard error. Texts about a lock begin with its name already.
    pub(crate) fn report(self, is_json: bool, name: Option<&str>) -> ExitCode {
        let (word, text) = match &self {
            Self::Done | Self::Ended(_) => return ExitCode::from(self.code()),
            Self::Usage(text) => ("usage", text),
            Self::Held(text, _) => ("held", text),
            Self::Superseded(text, _) => ("superseded", text),
            Self::NotSeen(text) => ("not_seen", text),
            Self::Unavailable(text) => ("unavailable", text),
            Self::Denied(text) => ("denied", text),
            Self::Lost(text) => ("lost", text),
            Self::Failed(text) => ("failed", text),
        };
        report_event(is_json, word, name, text, json!({ "exit_code": self.code() }));
        ExitCode::from(self.code())
    }
}

/// Reports events about one lock on standard error.
#[derive(Debug, Clone)]
pub(crate) struct Reporter {
    pub(crate) name: String,
    pub(crate) is_json: bool,
}

impl Reporter {
    pub(crate) fn report(&self, event: &str, text: &str, more: serde_json::Value) {
        let Self { name, is_json } = self;
        report_event(*is_json, event, Some(name), &format!("{name}: {text}"), more);
    }
}

/// Reports an event on standard error.
pub(crate) fn report_event(
    is_json: bool,
    event: &str,
    name: Option<&str>,
    text: &str,
    more: serde_json::Value,
) {
    if is_json {
        let mut line = json!({ "event": event, "detail": text });
        if let Some(name) = name {
            line["name"] = name.into();
        }
        if let (Some(line), serde_json::Value::Object(more)) = (line.as_object_mut(), more) {
            line.extend(more);
        }
        write(format!("{line}\n"));
    } else {
        write(format!("redlock: {text}\n"));
    }
}

impl From<Error> for ExitOutcome {
    fn from(error: Error) -> Self {
        let text = error.to_string();
        match error {
            Error::Held { .. } => Self::Held(text, HELD),
            Error::Lost(_) => Self::Lost(text),
            Error::Refused { problem, .. }
                if problem.known_code() == Some(ProblemCode::Superseded) =>
            {
                Self::Superseded(text, HELD)
            }
            Error::Refused { problem, .. } if matches!(problem.status, 401 | 403) => {
                Self::Denied(text)
            }
            Error::Refused { .. } | Error::Setup(_) => Self::Usage(text),
            _ => Self::Unavailable(text),
        }
    }
}
