//! Reads what a browser states about a request: the host name that the browser used, and whose page
//! made the browser send the request.
//!
//! Any page can make the browsers of its visitors send requests. A browser adds credentials by
//! itself: a stored password, a client certificate, its network access. So these credentials
//! count only in requests from our own pages, or from no page. An attacker's host name may also
//! resolve to a loopback address (DNS rebinding). Then the attacker's page looks like our own, so
//! the host name is checked too.
//!
//! <https://www.w3.org/TR/fetch-metadata/>, RFC 6454 (`Origin`), RFC 9112, section 3.2 (`Host`), RFC
//! 9113, section 8.3.1 (`:authority`).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::uri::Authority;
use http::{HeaderMap, HeaderName, Method, Request, Uri, Version, header};

use super::error::{ApiError, INVALID_PARAMETER, MISDIRECTED_REQUEST};
use crate::origin::Origin;

static SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
static SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// Whether a proxy has forwarded the request for somebody else, judging by its headers.
pub(super) fn is_forwarded(headers: &HeaderMap) -> bool {
    ["forwarded", "x-forwarded-for", "x-real-ip", "via"]
        .iter()
        .any(|name| headers.contains_key(*name))
}

/// The host names of a gateway.
#[derive(Debug, Clone, Default)]
pub struct Hosts {
    /// Whether the gateway listens on a loopback address.
    pub is_loopback: bool,
    /// Allowed host names, in lower case, without ports.
    pub allowed: Vec<String>,
}

impl Hosts {
    /// Checks that the request is for this gateway, by the host of its target and its `Host`
    /// header.
    pub(super) fn check<B>(&self, request: &Request<B>) -> Result<(), ApiError> {
        let mut hosts = request.headers().get_all(header::HOST).iter();
        let host = hosts.next();
        if hosts.next().is_some() {
            return Err(INVALID_PARAMETER.because("Host is there more than once"));
        }
        let target = request.uri().authority();
        let is_missing = match request.version() {
            Version::HTTP_2 => host.is_none() && target.is_none(),
            Version::HTTP_11 => host.is_none(),
            _ => false,
        };
        if is_missing {
            return Err(INVALID_PARAMETER.because(
                "the host is missing; HTTP/1.1 requires Host, and HTTP/2 :authority or Host",
            ));
        }
        if let Some(authority) = target {
            if authority.as_str().contains('@') {
                return Err(
                    INVALID_PARAMETER.because("the request target has a user name before the host")
                );
            }
            self.check_host(authority.host())?;
        }
        match host.map(|value| value.to_str().ok().and_then(host_of)) {
            None => Ok(()),
            Some(None) => Err(INVALID_PARAMETER.because("Host is not of the form host[:port]")),
            Some(Some(host)) => self.check_host(host),
        }
    }

    fn check_host(&self, host: &str) -> Result<(), ApiError> {
        if self.takes(host) {
            return Ok(());
        }
        let known = if self.is_loopback { "localhost" } else { "one of its names" };
        let detail = format!(
            "the host of this request is not a name of this gateway; use {known}, or have the operator add the name with \
             --allowed-host"
        );
        Err(MISDIRECTED_REQUEST.because(detail))
    }

    fn takes(&self, host: &str) -> bool {
        if !self.is_loopback && self.allowed.is_empty() {
            return true;
        }
        // With an address as the host, the browser has connected to this very address. An attacker
        // can redirect a name, but not an address.
        let as_usual = match address(host) {
            Some(address) => !self.is_loopback || address.to_canonical().is_loopback(),
            // Browsers resolve this name without DNS, so an attacker cannot redirect it either.
            None => host.eq_ignore_ascii_case("localhost"),
        };
        as_usual || self.allowed.iter().any(|allowed| host.eq_ignore_ascii_case(allowed))
    }
}

fn address(host: &str) -> Option<IpAddr> {
    match host.strip_prefix('[') {
        Some(rest) => rest.strip_suffix(']')?.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
        None => host.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
    }
}

/// The host of `host[:port]`; `None` when it is something else.
fn host_of(text: &str) -> Option<&str> {
    // Fast path for a name or an IPv4 address. The parser of the `http` crate copies the text.
    let (host, port) = text.split_once(':').unwrap_or((text, ""));
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    if host.bytes().all(is_plain) && port.bytes().all(|byte| byte.is_ascii_digit()) {
        return Some(host);
    }
    let length = text.parse::<Authority>().ok()?.host().len();
    let (host, rest) = text.split_at_checked(length)?;
    let is_port = |rest: &str| rest.bytes().all(|byte| byte.is_ascii_digit());
    (rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port)).then_some(host)
}

/// Whether a page made the browser send the request, and the page is neither our own nor of a
/// trusted origin.
pub(super) fn is_of_other_site(uri: &Uri, headers: &HeaderMap, trusted: &[Origin]) -> bool {
    if !is_of_browser(headers) {
        return false;
    }
    let origins = || headers.get_all(header::ORIGIN).iter();
    let is_trusted =
        |origin: &[u8]| trusted.iter().any(|trusted| trusted.as_str().as_bytes() == origin);
    if origins().next().is_some() && origins().all(|origin| is_trusted(origin.as_bytes())) {
        return false;
    }
    let mut sites = headers.get_all(&SEC_FETCH_SITE).iter().peekable();
    if sites.peek().is_some() {
        return !sites.all(|site| site == "same-origin" || site == "none");
    }
    // Old browsers send only `Origin`. New browsers do the same when the target is neither HTTPS
    // nor loopback.
    let target = uri.authority().map(|authority| authority.as_str().as_bytes());
    let host = target
        .or_else(|| headers.get(header::HOST).map(|host| host.as_bytes()))
        .unwrap_or_default();
    let is_own = |origin: &[u8]| {
        let origin = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
        origin.is_some_and(|origin| origin.eq_ignore_ascii_case(host))
    };
    !origins().all(|origin| is_own(origin.as_bytes()))
}

/// Whether a browser states whose page sent the request.
pub(super) fn is_of_browser(headers: &HeaderMap) -> bool {
    // One pass over the few headers is cheaper than two lookups by hash.
    headers.keys().any(|name| *name == SEC_FETCH_SITE || *name == header::ORIGIN)
}

/// Whether the user follows a link from another page to this one. That page cannot read the answer.
pub(super) fn is_navigation(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::GET && headers.get(&SEC_FETCH_MODE).is_some_and(|mode| mode == "navigate")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_or_an_address_and_perhaps_a_port() {
        for (text, host) in [
            ("a", Some("a")),
            ("a:80", Some("a")),
            ("a:", Some("a")),
            ("[::1]:80", Some("[::1]")),
            ("", Some("")),
            ("localhost@evil.example", None),
            ("a:b", None),
            ("a/b", None),
            ("a b", None),
            ("[::1", None),
        ] {
            assert_eq!(host_of(text), host, "{text:?}");
        }
    }

    #[test]
    fn on_loopback_only_loopback_and_allowed_hosts_are_taken() {
        let named = Hosts { is_loopback: true, allowed: vec!["locks.example".into()] };
        for host in [
            "localhost",
            "LocalHost",
            "127.0.0.1",
            "127.8.8.8",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "Locks.example",
        ] {
            assert!(named.takes(host), "{host}");
        }
        let bare = Hosts { is_loopback: true, ..Hosts::default() };
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "10.0.0.1",
            "127.0.0.1.evil.example",
            "[::2]",
            "::1",
        ] {
            assert!(!named.takes(host) && !bare.takes(host), "{host}");
        }
        assert!(!bare.takes("locks.example"));
        let world = Hosts { is_loopback: false, ..named };
        assert!(
            world.takes("locks.example") && world.takes("10.0.0.1") && !world.takes("evil.example")
        );
        assert!(Hosts::default().takes("evil.example"));
    }
}
