//! The log: to standard output, of the level that RUST_LOG names.

use std::str::FromStr;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::{Directive, LevelFilter};

use crate::audit;
use crate::config::LogFormat;

/// What RUST_LOG asks for. The library would take an empty text for nothing at all.
fn asked() -> Option<String> {
    let text = std::env::var_os(EnvFilter::DEFAULT_ENV)?.to_string_lossy().into_owned();
    text.contains(|c: char| c != ',' && !c.is_whitespace()).then_some(text)
}

/// # Errors
/// RUST_LOG, where it is set and no filter.
pub fn check_filter() -> Result<(), String> {
    let Some(text) = asked() else { return Ok(()) };
    let expected = "expected a level (error, warn, info, debug, trace, off) or target=level, separated by commas";
    // The library would take a lone word for a target, and log nothing else.
    let is_level = |word: &str| word.contains('=') || word.contains("::") || word.parse::<LevelFilter>().is_ok();
    let odd = text.split(',').map(str::trim).find(|word| !word.is_empty() && !word.contains('[') && !is_level(word));
    match (odd, EnvFilter::try_new(&text)) {
        (None, Ok(_)) => Ok(()),
        (Some(word), _) => Err(format!("RUST_LOG: {text:?} is not allowed: {word:?} is no level; {expected}")),
        (None, Err(error)) => Err(format!("RUST_LOG: {text:?} is not allowed: {error}; {expected}")),
    }
}

/// Starts logging: to standard output, level by RUST_LOG, `info` by default.
pub fn start_logging(format: LogFormat) {
    let asked = asked().and_then(|text| EnvFilter::try_new(text).ok());
    let filter = asked.unwrap_or_else(|| EnvFilter::new("info,fred=off,rustls=off"));
    // Denials are on the record, whatever else the log is to leave out.
    let filter = match Directive::from_str(&format!("{}=info", audit::TARGET)) {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    };
    // A log that cannot be written must not panic: by default that is reported on standard error, which may be gone too.
    let builder = tracing_subscriber::fmt().with_env_filter(filter).log_internal_errors(false);
    let started = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    // A second start in one process keeps the first subscriber.
    drop(started);
}
