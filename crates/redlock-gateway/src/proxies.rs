//! Trusted proxies, and the client addresses that they name.
//!
//! A trusted proxy names its client in `X-Forwarded-For` or `Forwarded` (RFC 7239). Each proxy on
//! the way adds the address that called it, at the right end. So the list is read from the right.
//! Addresses of trusted proxies are skipped, and the first other address is the client's.
//! Everything to the left of this address may be invented by the client. If an entry is no address,
//! reading ends there, and the trusted proxy that was read last counts as the client.
//!
//! A proxy that handles one of the two headers passes on the other one as the client sent it. So if
//! a request has both headers and they name different clients, neither header counts. The client is
//! then the address of the connection.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use http::{HeaderMap, HeaderName, HeaderValue, header};
use ipnet::{IpNet, Ipv4Net};

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The origin of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientAddress {
    pub ip: IpAddr,
    /// `None` if a proxy named the client and did not state the port.
    pub port: Option<u16>,
}

impl From<SocketAddr> for ClientAddress {
    fn from(address: SocketAddr) -> Self {
        Self { ip: address.ip(), port: Some(address.port()) }
    }
}

impl fmt::Display for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => SocketAddr::new(self.ip, port).fmt(f),
            None => self.ip.fmt(f),
        }
    }
}

/// Addresses of trusted proxies.
#[derive(Debug, Clone)]
pub struct TrustedProxies(Vec<IpNet>);

impl TrustedProxies {
    pub const NONE: Self = Self(Vec::new());

    pub fn new(networks: Vec<IpNet>) -> Self {
        Self(networks)
    }

    pub fn contains(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }

    /// The client of a request that came over a connection from `peer`: `peer` itself, unless it is
    /// a trusted proxy that names another.
    pub fn client(&self, peer: ClientAddress, headers: &HeaderMap) -> ClientAddress {
        if !self.contains(peer.ip) {
            return peer;
        }
        let lines = |name| headers.get_all(name).iter().rev().map(HeaderValue::as_bytes);
        let listed = headers.contains_key(&X_FORWARDED_FOR);
        let listed = listed
            .then(|| self.last_known(peer, lines(&X_FORWARDED_FOR).flat_map(x_forwarded_for)));
        let standard = headers.contains_key(header::FORWARDED);
        let standard =
            standard.then(|| self.last_known(peer, lines(&header::FORWARDED).flat_map(forwarded)));
        match (listed, standard) {
            (None, None) => peer,
            (Some(client), None) | (None, Some(client)) => client,
            (Some(client), Some(other)) if client.ip == other.ip => client,
            (Some(_), Some(_)) => peer,
        }
    }

    /// Walks along the hops, nearest first, starting behind a trusted peer. Goes on past each
    /// trusted hop, and returns the first hop that is not trusted. If the hops end, or one is no
    /// address, returns the last trusted hop.
    fn last_known(
        &self,
        peer: ClientAddress,
        hops: impl Iterator<Item = Option<ClientAddress>>,
    ) -> ClientAddress {
        let mut last = peer;
        for hop in hops {
            match hop {
                Some(hop) if self.contains(hop.ip) => last = hop,
                Some(client) => return client,
                None => break,
            }
        }
        last
    }
}

/// The hops of one `X-Forwarded-For` line, nearest first. `None` stands for an entry that is no
/// address.
fn x_forwarded_for(line: &[u8]) -> impl Iterator<Item = Option<ClientAddress>> {
    let entries = line.rsplit(|byte| *byte == b',').map(<[u8]>::trim_ascii);
    // A list may have empty elements (RFC 9110, section 5.6.1).
    entries.filter(|entry| !entry.is_empty()).map(|entry| address(std::str::from_utf8(entry).ok()?))
}

/// The hops of one `Forwarded` line, nearest first. A line that breaks the grammar counts as one
/// unknown hop. The code does not guess where the elements of such a line begin, because a client
/// could exploit the guess.
fn forwarded(line: &[u8]) -> impl Iterator<Item = Option<ClientAddress>> {
    let mut hops = forwarded_elements(&String::from_utf8_lossy(line)).unwrap_or_else(|| vec![None]);
    hops.reverse();
    hops.into_iter()
}

/// ```text
/// Forwarded = element *( "," element )
/// element = [ pair *( ";" [ pair ] ) ]
/// pair = token "=" ( token / quoted-string )
/// ```
fn forwarded_elements(mut rest: &str) -> Option<Vec<Option<ClientAddress>>> {
    let mut hops = Vec::new();
    loop {
        let mut is_empty = true;
        let mut client = None;
        loop {
            rest = rest.trim_start_matches(BLANK);
            if let Some((name, after)) = token(rest) {
                let (value, after) = value(after.strip_prefix('=')?)?;
                if name.eq_ignore_ascii_case("for") {
                    // An element may have each parameter only once.
                    if client.replace(address(&value)).is_some() {
                        return None;
                    }
                }
                (is_empty, rest) = (false, after.trim_start_matches(BLANK));
            }
            let Some(after) = rest.strip_prefix(';') else { break };
            rest = after;
        }
        if !is_empty {
            hops.push(client.flatten());
        }
        match rest.strip_prefix(',') {
            Some(after) => rest = after,
            None => return rest.is_empty().then_some(hops),
        }
    }
}

const BLANK: [char; 2] = [' ', '\t'];

/// Splits off a token (RFC 9110, section 5.6.2).
fn token(text: &str) -> Option<(&str, &str)> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~".contains(c);
    let end = text.find(|c| !is_part(c)).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// Splits off a token, or the content of a quoted string.
fn value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        return token(text).map(|(value, rest)| (value.to_owned(), rest));
    };
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(chars.next()?.1),
            c => value.push(c),
        }
    }
    None
}

/// `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]`, `[2001:db8::1]:80`.
fn address(text: &str) -> Option<ClientAddress> {
    let whole = |text: &str| text.parse::<IpAddr>().ok();
    let with_port = || text.parse::<SocketAddr>().ok().filter(|_| !text.contains('%'));
    let in_brackets =
        || text.strip_prefix('[')?.strip_suffix(']').and_then(whole).filter(IpAddr::is_ipv6);
    let known = whole(text).or_else(in_brackets).map(|ip| ClientAddress { ip, port: None });
    let ClientAddress { ip, port } = known.or_else(|| with_port().map(ClientAddress::from))?;
    Some(ClientAddress { ip: ip.to_canonical(), port })
}

/// Why a text names no network of proxies. The text states what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NetworkError {
    #[error(
        "expected an address or a network as ADDRESS/BITS, such as 10.0.0.0/8 or 2001:db8::/32"
    )]
    Malformed,
    #[error(
        "the address has bits beyond the network; expected {} or {}", .0.trunc(), .0.addr()
    )]
    BitsBeyondNetwork(IpNet),
    #[error("this is every address, so every client would be a proxy; name the proxies")]
    EveryAddress,
}

/// Parses a network, or one address. An IPv4 network in IPv6 notation becomes an IPv4 network.
///
/// # Errors
/// The text states what is allowed.
pub fn network(text: &str) -> Result<IpNet, NetworkError> {
    let whole = |ip: IpAddr| IpNet::from(ip.to_canonical());
    let network =
        text.parse().or_else(|_| text.parse().map(whole)).map_err(|_| NetworkError::Malformed)?;
    if network.addr() != network.network() {
        return Err(NetworkError::BitsBeyondNetwork(network));
    }
    let network = match network {
        IpNet::V6(v6) => match (v6.addr().to_ipv4_mapped(), v6.prefix_len().checked_sub(96)) {
            (Some(v4), Some(bits)) => Ipv4Net::new(v4, bits).map_or(network, IpNet::V4),
            _ => network,
        },
        IpNet::V4(_) => network,
    };
    // Otherwise every client could claim any address.
    if network.prefix_len() == 0 {
        return Err(NetworkError::EveryAddress);
    }
    Ok(network)
}

#[cfg(test)]
mod tests;
