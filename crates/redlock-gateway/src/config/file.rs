//! The command line, combined with the file of --config.
//!
//! The values of the file become the defaults of the flags. So flags and environment variables take
//! precedence over the file, and its values obey the same rules as flags.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::error::{ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args, Parser};
use toml::{Spanned, Value};

use super::environment;
use super::value::without_password;

/// Parses a command line, and the file that its settings `S` name, if any.
///
/// # Errors
/// A clap error, without passwords. Help and version count as errors too.
pub fn parse<P: Parser, S: Args>(line: &[OsString]) -> Result<P, clap::Error> {
    let environment = || {
        environment::check(&P::command(), std::env::vars_os())
            .map_err(|error| refused(error.to_string()))
    };
    let given = P::command().try_get_matches_from(line).map_err(without_passwords);
    // The refused value may come from an environment variable. The check of the variables then
    // gives the better error.
    let given = given.or_else(|error| {
        if error.use_stderr() { environment().and(Err(error)) } else { Err(error) }
    })?;
    // A command without settings, such as `openapi`, has no flag `--config`.
    let config = settings(&given).try_get_one::<PathBuf>("config");
    if config.is_ok() {
        environment()?;
    }
    match config {
        Ok(Some(path)) => {
            let shown = path.display().to_string();
            let text = std::fs::read_to_string(path);
            let text = text.map_err(|error| refused(format!("--config: {shown}: {error}")))?;
            parse_with::<P, S>(line, &shown, &text)
        }
        Ok(None) | Err(_) => P::from_arg_matches(&given),
    }
}

/// Parses a command line with the text of a file. `shown` is the file's name in errors.
pub(super) fn parse_with<P: Parser, S: Args>(
    line: &[OsString],
    shown: &str,
    text: &str,
) -> Result<P, clap::Error> {
    let mut command = P::command();
    let mut matches = command.clone().try_get_matches_from(line).map_err(without_passwords)?;
    let subcommand = matches.subcommand_name().map(str::to_owned);
    let unusable = |at: usize, message: &str| {
        let line = text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1;
        refused(format!("--config: {shown}, line {line}{message}"))
    };
    let file: BTreeMap<String, Spanned<Value>> = toml::from_str(text).map_err(|error| {
        // Only the message is used: the error's full text quotes the line, which may have a
        // password in it.
        unusable(
            error.span().map_or(0, |span| span.start),
            &format!(": {}", without_password(error.message())),
        )
    })?;
    let known = S::augment_args(clap::Command::new("file"));
    let known = || known.get_arguments().filter(|arg| arg.get_id() != "config");
    for (key, value) in &file {
        let at = value.span().start;
        let Some(arg) = known().find(|arg| arg.get_id() == key.as_str()) else {
            let key = without_password(key);
            let names = known().map(|arg| arg.get_id().as_str());
            let names = names.collect::<Vec<_>>().join(", ");
            return Err(unusable(at, &format!(": unknown setting {key}, expected one of {names}")));
        };
        let values = flag_values(arg, value.get_ref())
            .map_err(|error| unusable(at, &format!(", {key}: {error}")))?;
        if key == "nodes" && values.is_empty() {
            return Err(unusable(at, ", nodes: names no node; remove it for in-memory nodes"));
        }
        if settings(&matches)
            .value_source(key)
            .is_some_and(|source| source != ValueSource::DefaultValue)
        {
            continue;
        }
        // A list in the file is split already, so its items are not split at commas again.
        let set = |arg: Arg| arg.value_delimiter(None).default_values(values);
        command = match &subcommand {
            Some(name) => command.mut_subcommand(name, |command| command.mut_arg(key, set)),
            None => command.mut_arg(key, set),
        };
        // The line is parsed again after each value of the file. So an error belongs to the value
        // that was just added.
        matches = command
            .clone()
            .try_get_matches_from(line)
            .map_err(|error| unusable(at, &format!(", {key}: {}", reason(error))))?;
    }
    P::from_arg_matches(&matches)
}

fn refused(message: String) -> clap::Error {
    clap::Error::raw(ErrorKind::InvalidValue, message + "\n")
}

/// The matches of the subcommand, if there is one.
fn settings(matches: &ArgMatches) -> &ArgMatches {
    matches.subcommand().map_or(matches, |(_, settings)| settings)
}

/// A value in the file that has another type than its setting.
#[derive(Debug, thiserror::Error)]
#[error("expected {expected}, found {found}{example}")]
struct WrongType {
    expected: &'static str,
    found: &'static str,
    /// Allowed values, with a comma or a colon before them; may be empty.
    example: String,
}

/// The values as on the command line. Types are strict: a version such as 1.10 must not silently
/// become 1.1.
fn flag_values(arg: &Arg, value: &Value) -> Result<Vec<String>, WrongType> {
    let parsed = arg.get_value_parser().type_id();
    let numeric = |value: &Value| parsed == TypeId::of::<f64>() && value.is_integer();
    let expected = match () {
        () if parsed == TypeId::of::<usize>() => "integer",
        () if parsed == TypeId::of::<f64>() => "float",
        () if parsed == TypeId::of::<bool>() => "boolean",
        () => "string",
    };
    let one = |value: &Value| match value {
        Value::String(text) if expected == "string" => Ok(text.clone()),
        other if other.type_str() == expected || numeric(other) => Ok(other.to_string()),
        other => Err(WrongType { expected, found: other.type_str(), example: example(arg) }),
    };
    let no_list = |expected, found: &Value| {
        Err(WrongType { expected, found: found.type_str(), example: String::new() })
    };
    match (arg.get_action(), value) {
        (ArgAction::Append, Value::Array(values)) => values.iter().map(one).collect(),
        (ArgAction::Append, Value::Table(values)) if is_table(arg) => {
            values.iter().map(|(name, value)| Ok(format!("{name}={}", one(value)?))).collect()
        }
        (ArgAction::Append, other) if is_table(arg) => no_list("table", other),
        (ArgAction::Append, other) => no_list("array", other),
        (_, value) => one(value).map(|value| vec![value]),
    }
}

fn is_table(arg: &Arg) -> bool {
    arg.get_value_names().is_some_and(|names| names.iter().any(|name| name.contains('=')))
}

/// Examples of allowed values, from the flag's help.
fn example(arg: &Arg) -> String {
    let values = arg.get_possible_values();
    let labels: Vec<_> = values.iter().map(|value| format!("{:?}", value.get_name())).collect();
    let has = |unit: &str| {
        arg.get_value_names().is_some_and(|names| names.iter().any(|name| name == unit))
    };
    match () {
        () if !labels.is_empty() => format!(": one of {}", labels.join(", ")),
        () if has("DURATION") => ", such as \"5s\"".to_owned(),
        () if has("SIZE") => ", such as \"1GiB\"".to_owned(),
        () => String::new(),
    }
}

/// clap's message about a value, in one line and without the advice below it.
fn reason(error: clap::Error) -> String {
    let text = without_passwords(error).to_string();
    let text = text.split("\n\n").next().unwrap_or_default().replace('\n', "");
    text.strip_prefix("error: ").map_or(text.clone(), str::to_owned)
}

/// Hides passwords in an error. clap quotes the refused text, which may be the URL of a node.
fn without_passwords(mut error: clap::Error) -> clap::Error {
    let hidden = error.context().filter_map(|(kind, value)| match value {
        ContextValue::String(text) => Some((kind, ContextValue::String(without_password(text)))),
        _ => None,
    });
    for (kind, value) in hidden.collect::<Vec<_>>() {
        error.insert(kind, value);
    }
    error
}
