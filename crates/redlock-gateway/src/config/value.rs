//! Parsers of values. Each error states what is allowed. The command line adds the flag and the
//! refused text.

use std::net::{Ipv6Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use bytesize::ByteSize;
use http::Uri;
use ipnet::IpNet;
use redlock_core::Ttl;

use crate::origin::Origin;
use crate::overload::capacity::SMALLEST;
use crate::pattern::{Group, MAX_GROUPS, Pattern};
use crate::proxies;

pub(super) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A value that its setting does not allow. The text states what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidValue(pub(super) String);

/// Formats a duration for people, such as `1m 30s`. The largest unit is the hour: a day is `24h`.
pub fn show(duration: Duration) -> String {
    const HOUR: u64 = 3600;
    let hours = duration.as_secs() / HOUR;
    let rest = humantime::format_duration(duration - Duration::from_secs(hours * HOUR));
    match hours {
        0 => rest.to_string(),
        _ if rest.get_ref().is_zero() => format!("{hours}h"),
        _ => format!("{hours}h {rest}"),
    }
}

/// The items of a list, without the spaces around them and without empty items, which templates
/// often leave.
pub(super) fn listed(texts: &[String]) -> impl Iterator<Item = &str> {
    texts.iter().map(|text| text.trim()).filter(|text| !text.is_empty())
}

pub(super) fn without_password(text: &str) -> String {
    match (text.find("://"), text.rfind('@')) {
        (Some(scheme), Some(host)) if scheme < host => {
            format!("{}://…{}", &text[..scheme], &text[host..])
        }
        _ => text.to_owned(),
    }
}

pub(super) fn address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "expected IP:PORT, such as 127.0.0.1:8080 or [::1]:8080")
}

/// A host name without a port, in lower case.
pub(super) fn host(text: &str) -> Result<String, InvalidValue> {
    let is_name = !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte));
    let in_brackets = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
    let is_address = in_brackets.is_some_and(|text| text.parse::<Ipv6Addr>().is_ok());
    if is_name || is_address {
        return Ok(text.to_ascii_lowercase());
    }
    Err(InvalidValue(format!(
        "--allowed-host: {:?} is not allowed; expected a host's name without scheme and port, such as locks.example.com",
        without_password(text)
    )))
}

/// The endpoint, with the protocol's path if it has none. Credentials are refused, because many
/// people see a URL; they belong into OTEL_EXPORTER_OTLP_HEADERS.
pub(super) fn endpoint(text: &str) -> Result<String, &'static str> {
    let expected = "expected http://HOST[:PORT][/PATH] or https://…, without credentials and query, such as http://localhost:4318";
    let uri: Uri = text.trim().parse().map_err(|_| expected)?;
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| !port.ends_with(']'));
    let is_fit = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.host().is_some_and(|host| !host.is_empty())
        && has_port == uri.port_u16().is_some()
        && !authority.contains('@')
        && uri.query().is_none();
    let is_bare = uri.path().trim_end_matches('/').is_empty();
    let text = if is_bare {
        format!("{}/v1/traces", text.trim().trim_end_matches('/'))
    } else {
        text.trim().to_owned()
    };
    is_fit.then_some(text).ok_or(expected)
}

/// A URL without a slash at its end, to which paths are appended.
pub(super) fn public_url(text: &str) -> Result<String, &'static str> {
    let expected = "expected http://HOST[:PORT][/PATH] or https://…, without credentials and query, such as https://locks.example.com";
    let text = text.trim();
    let uri: Uri = text.parse().map_err(|_| expected)?;
    let is_fit = matches!(uri.scheme_str(), Some("http" | "https"))
        && uri.host().is_some_and(|host| !host.is_empty())
        && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))
        && !text.contains(['?', '#']);
    is_fit.then(|| text.trim_end_matches('/').to_owned()).ok_or(expected)
}

pub(super) fn group(text: &str) -> Result<Group, InvalidValue> {
    let wrong = |why: &str| InvalidValue(format!("--group: {text:?} is not allowed: {why}"));
    let parts = text
        .split_once('=')
        .ok_or_else(|| wrong("expected NAME=PATTERN, such as deploy=deploy/*"))?;
    let name = parts.0.trim();
    let pattern = parts.1.trim();
    let is_fit = (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if !is_fit {
        return Err(wrong("expected a name of 1 to 64 letters, digits, -, _ and . before the ="));
    }
    let locks = Pattern::parse(pattern)
        .ok_or_else(|| wrong(&format!("behind the = {}", Pattern::ALLOWED)))?;
    Ok(Group { name: name.to_owned(), locks })
}

pub(super) fn groups(texts: &[String]) -> Result<Vec<Group>, InvalidValue> {
    let groups = listed(texts).map(group).collect::<Result<Vec<_>, _>>()?;
    if groups.len() > MAX_GROUPS {
        return Err(InvalidValue(format!(
            "--group: {} groups given; at most {MAX_GROUPS} are allowed",
            groups.len()
        )));
    }
    let twice = groups
        .iter()
        .enumerate()
        .find(|(at, group)| groups[..*at].iter().any(|other| other.name == group.name));
    match twice {
        Some((_, Group { name, .. })) => {
            Err(InvalidValue(format!("--group: {name} is given twice; a group has one pattern")))
        }
        None => Ok(groups),
    }
}

/// Origins, as the values of this flag.
pub(super) fn origins(flag: &str, texts: &[String]) -> Result<Vec<Origin>, InvalidValue> {
    let parse = |text| {
        Origin::parse(text).map_err(|why| {
            let text = without_password(text);
            InvalidValue(format!("{flag}: {text:?} is not allowed; {why}"))
        })
    };
    listed(texts).map(parse).collect()
}

/// A network, as the value of this flag.
pub(super) fn network(flag: &str, text: &str) -> Result<IpNet, InvalidValue> {
    proxies::network(text).map_err(|why| {
        let text = without_password(text);
        InvalidValue(format!("{flag}: {text:?} is not allowed: {why}"))
    })
}

pub(super) fn count(limit: usize) -> impl Fn(&str) -> Result<usize, InvalidValue> + Clone {
    move |text| {
        let count = text.parse().ok().filter(|count| (1..=limit).contains(count));
        count.ok_or_else(|| InvalidValue(format!("expected 1 to {limit}")))
    }
}

/// A memory size, from the smallest budget that can serve requests.
pub(super) fn memory(text: &str) -> Result<ByteSize, InvalidValue> {
    let limit = ByteSize::pib(1);
    let size = text.trim().parse().ok().filter(|size| (SMALLEST..=limit).contains(size));
    size.ok_or_else(|| InvalidValue(format!("expected {SMALLEST} to {limit}, such as 1GiB")))
}

pub(super) fn factor(text: &str) -> Result<f64, &'static str> {
    let factor = text.parse().ok().filter(|factor| (0.0..=0.5).contains(factor));
    factor.ok_or("expected 0.0 to 0.5")
}

pub(super) fn duration(
    allowed: RangeInclusive<Duration>,
) -> impl Fn(&str) -> Result<Duration, InvalidValue> + Clone {
    move |text| {
        let value =
            humantime::parse_duration(text.trim()).ok().filter(|value| allowed.contains(value));
        value.ok_or_else(|| {
            let (least, most) = (show(*allowed.start()), show(*allowed.end()));
            InvalidValue(format!("expected {least} to {most}, such as 5s"))
        })
    }
}

pub fn clock_skew() -> impl Fn(&str) -> Result<Duration, InvalidValue> + Clone {
    duration(Duration::from_millis(100)..=Duration::from_secs(600))
}

pub fn ttl(text: &str) -> Result<Ttl, InvalidValue> {
    let value = duration(Ttl::MIN.duration()..=Ttl::MAX.duration())(text)?;
    Ttl::from_duration(value).map_err(|_| InvalidValue("expected whole milliseconds".into()))
}

pub(super) fn key_prefix(text: &str) -> Result<String, &'static str> {
    let is_fit =
        text.len() <= 255 && !text.contains(|c: char| matches!(c, '{' | '}') || c.is_control());
    is_fit
        .then(|| text.to_owned())
        .ok_or("expected at most 255 bytes without braces or control characters")
}
