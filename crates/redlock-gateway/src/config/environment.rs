//! Checks environment variables that look like settings. Unknown or empty variables are refused: if
//! a template misspells a name, the gateway must not start with the default instead. Without
//! `REDLOCK_NODES`, for example, a gateway would keep locks in its own memory.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};

use clap::Command;

const PREFIX: &str = "REDLOCK_";
/// Variables of the program `redlock`, which may run beside a gateway.
const OF_REDLOCK: [&str; 11] = [
    "REDLOCK_CA",
    "REDLOCK_CERT",
    "REDLOCK_DEADLINE",
    "REDLOCK_FENCING_TOKEN",
    "REDLOCK_KEY_FILE",
    "REDLOCK_NAME",
    "REDLOCK_OWNER",
    "REDLOCK_RUN_",
    "REDLOCK_TOKEN",
    "REDLOCK_URL",
    "REDLOCK_VALIDITY_MS",
];
/// The only variable that may be empty: its empty value is a valid setting.
const MAY_BE_EMPTY: &str = "REDLOCK_KEY_PREFIX";
/// The least similarity to a known name (Jaro-Winkler, 0 to 1) at which an unknown name counts as
/// misspelt.
const ALIKE: f64 = 0.8;

/// A variable that is refused. No text has its value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum VariableError {
    #[error("{name}: no setting has this variable; {advice}")]
    Unknown { name: String, advice: String },
    #[error("{0}: it is set and empty, as if a template failed; give it a value, or unset it")]
    Empty(String),
}

/// Checks the variables that begin with [`PREFIX`].
///
/// # Errors
/// The first variable, by name, that no setting uses or that is empty. No value is shown.
pub(super) fn check(
    command: &Command,
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> Result<(), VariableError> {
    let known = settings(command);
    let ours = environment.filter_map(|(name, value)| {
        let name = name.to_str().filter(|name| name.starts_with(PREFIX))?.to_owned();
        Some((name, value))
    });
    let mut ours: Vec<_> = ours.collect();
    ours.sort_unstable();
    ours.iter().try_for_each(|(name, value)| {
        if !known.contains(name.as_str()) {
            return if is_of_redlock(name) { Ok(()) } else { Err(unknown(name, value, &known)) };
        }
        let is_empty =
            value.to_str().is_some_and(|text| text.chars().all(|c| c == ',' || c.is_whitespace()));
        if is_empty && name != MAY_BE_EMPTY {
            return Err(VariableError::Empty(name.clone()));
        }
        Ok(())
    })
}

/// Collects the variables of all commands. A variable that one command uses may be set while
/// another one runs.
fn settings(command: &Command) -> BTreeSet<&str> {
    let own = command.get_arguments().filter_map(|arg| arg.get_env().and_then(OsStr::to_str));
    own.chain(command.get_subcommands().flat_map(settings)).collect()
}

fn is_of_redlock(name: &str) -> bool {
    OF_REDLOCK.iter().any(|one| name == *one || one.ends_with('_') && name.starts_with(one))
}

fn unknown(name: &str, value: &OsStr, known: &BTreeSet<&str>) -> VariableError {
    // The comparison leaves out the common prefix, which would make all names similar.
    let own = |name: &str| name.get(PREFIX.len()..).unwrap_or_default().to_owned();
    let likeness = |one: &str| strsim::jaro_winkler(&own(name), &own(one));
    let nearest = known.iter().max_by(|one, other| likeness(one).total_cmp(&likeness(other)));
    // Kubernetes and Docker set such variables for a service with the name redlock.
    let is_link = name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || value.to_str().is_some_and(|value| value.starts_with("tcp://"))
        || name.contains("_TCP_");
    let advice = match nearest {
        _ if is_link => {
            "Kubernetes sets it for a Service of this name: set enableServiceLinks: false in the pod".to_owned()
        }
        Some(nearest) if likeness(nearest) >= ALIKE => format!("is it {nearest}? Otherwise unset it"),
        _ => "unset it; --help lists all variables".to_owned(),
    };
    VariableError::Unknown { name: name.to_owned(), advice }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn checked(name: &str, value: &str) -> Result<(), VariableError> {
        check(&crate::cli::Cli::command(), [(name.into(), value.into())].into_iter())
    }

    #[test]
    fn an_unknown_or_empty_variable_is_refused_with_advice() {
        for (name, value, labels) in [
            ("REDLOCK_NODE", "redis://a", "is it REDLOCK_NODES?"),
            ("REDLOCK_MAX_TLL", "5m", "is it REDLOCK_MAX_TTL?"),
            ("REDLOCK_", "", "--help"),
            ("REDLOCK_SOMETHING_ELSE_ALTOGETHER", "1", "unset it"),
            ("REDLOCK_GATEWAY_SERVICE_HOST", "10.0.0.1", "enableServiceLinks"),
            ("REDLOCK_GATEWAY_PORT", "tcp://10.0.0.1:8080", "enableServiceLinks"),
            ("REDLOCK_GATEWAY_PORT_8080_TCP_PROTO", "tcp", "enableServiceLinks"),
            ("REDLOCK_NODES", "", "set and empty"),
            ("REDLOCK_NODES", " , ,", "set and empty"),
            ("REDLOCK_BOOTSTRAP", " ", "set and empty"),
        ] {
            let error = checked(name, value).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name}: ")) && error.contains(labels), "{error}");
        }
        for (name, value) in [
            ("REDLOCK_NODES", "redis://a"),
            ("REDLOCK_KEY_PREFIX", ""),
            ("REDLOCK_URL", "http://a"),
            ("REDLOCK_RUN_12_34", "1"),
            ("REDLOCK_VALIDITY_MS", "1"),
            ("PATH", ""),
            ("redlock_nodes", ""),
        ] {
            assert_eq!(checked(name, value), Ok(()), "{name}");
        }
    }

    #[test]
    fn no_value_is_shown() {
        let error = checked("REDLOCK_NODE_S", "redis://:hunter2@a").unwrap_err().to_string();
        assert!(!error.contains("hunter2"), "{error}");
    }
}
