//! Client addresses from headers that proxies write and clients forge.

#![cfg(test)]

use http::{HeaderName, HeaderValue};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

const PROXY: &str = "10.0.0.1";
const CLIENT: &str = "203.0.113.7";

fn proxies() -> TrustedProxies {
    TrustedProxies::new(["10.0.0.0/8", "2001:db8:f::/48"].map(|text| network(text).unwrap()).into())
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn peer(text: &str) -> ClientAddress {
    ClientAddress { ip: ip(text), port: Some(4711) }
}

fn headers(lines: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        headers.append(
            HeaderName::try_from(*name).unwrap(),
            HeaderValue::from_bytes(value.as_bytes()).unwrap(),
        );
    }
    headers
}

/// The client's address as text, for a request from the proxy.
fn client(lines: &[(&str, &str)]) -> String {
    proxies().client(peer(PROXY), &headers(lines)).to_string()
}

const PEER: &str = "10.0.0.1:4711";

#[test]
fn the_nearest_address_that_is_no_trusted_proxy_counts() {
    for (value, expected) in [
        ("203.0.113.7", "203.0.113.7"),
        ("203.0.113.7:80", "203.0.113.7:80"),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::1]:80", "[2001:db8::1]:80"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("[::ffff:203.0.113.7]:80", "203.0.113.7:80"),
        ("198.51.100.1, 203.0.113.7", "203.0.113.7"),
        ("198.51.100.1, 203.0.113.7, 10.2.0.0, 2001:db8:f::1", "203.0.113.7"),
        ("198.51.100.1,203.0.113.7,::ffff:10.2.0.0", "203.0.113.7"),
        (" , 203.0.113.7 ,\t, ", "203.0.113.7"),
        ("10.3.0.0, 10.2.0.0", "10.3.0.0"),
        ("nonsense, 203.0.113.7", "203.0.113.7"),
        ("203.0.113.7, nonsense, 10.2.0.0", "10.2.0.0"),
    ] {
        assert_eq!(client(&[("x-forwarded-for", value)]), expected, "{value}");
    }
    let lines = [
        ("x-forwarded-for", "198.51.100.1"),
        ("x-forwarded-for", "203.0.113.7"),
        ("x-forwarded-for", "10.2.0.0"),
    ];
    assert_eq!(client(&lines), CLIENT);
}

#[test]
fn forwarded_is_read_as_rfc_7239_has_it() {
    for (value, expected) in [
        ("for=203.0.113.7", "203.0.113.7"),
        ("For=203.0.113.7;proto=https;by=10.0.0.1", "203.0.113.7"),
        ("proto=https; FOR=\"203.0.113.7:80\" ;host=\"a,b;for=1.1.1.1\"", "203.0.113.7:80"),
        ("for=\"[2001:db8::1]:80\"", "[2001:db8::1]:80"),
        ("for=\"[2001:db8::1]\"", "2001:db8::1"),
        ("for=198.51.100.1, for=203.0.113.7, for=10.2.0.0", "203.0.113.7"),
        ("for=198.51.100.1,for=203.0.113.7;by=10.0.0.1 , , for=10.2.0.0;", "203.0.113.7"),
        ("for=\"203.0.113\\.7\"", "203.0.113.7"),
        // Unknown, hidden or missing: no client address.
        ("for=unknown", PEER),
        ("for=_hidden, for=10.2.0.0", "10.2.0.0"),
        ("proto=https", PEER),
        ("for=203.0.113.7, proto=https", PEER),
    ] {
        assert_eq!(client(&[("forwarded", value)]), expected, "{value}");
    }
}

#[test]
fn a_header_that_cannot_be_read_leaves_the_connections_address() {
    for value in [
        "",
        "-",
        "203.0.113",
        "203.0.113.7:99999",
        "fe80::1%eth0",
        "[fe80::1%3]:80",
        "[203.0.113.7]",
        "203.0.113.7;",
        "ü",
    ] {
        assert_eq!(client(&[("x-forwarded-for", value)]), PEER, "{value}");
    }
    for value in [
        "203.0.113.7",
        "for",
        "for=",
        "for==203.0.113.7",
        "for=\"203.0.113.7",
        "for=\"203.0.113.7\"x",
        "for=[2001:db8::1]",
        "for=203.0.113.7 proto=https",
        "for=203.0.113.7;for=203.0.113.7",
        "for =203.0.113.7",
        "for=203.0.113.7, x",
        "x=\", for=203.0.113.7",
        "ü",
    ] {
        assert_eq!(client(&[("forwarded", value)]), PEER, "{value}");
    }
    let lines = [("forwarded", "for=\"198.51.100.1"), ("forwarded", "for=203.0.113.7")];
    assert_eq!(client(&lines), CLIENT, "each line stands for itself");
}

#[test]
fn two_headers_that_name_different_clients_are_not_believed() {
    let both = |listed, standard| client(&[("x-forwarded-for", listed), ("forwarded", standard)]);
    assert_eq!(both("203.0.113.7", "for=\"203.0.113.7:80\""), CLIENT);
    assert_eq!(both("203.0.113.7", "for=198.51.100.1"), PEER);
    assert_eq!(both("203.0.113.7", "for=unknown"), PEER);
}

#[test]
fn a_peer_that_is_no_trusted_proxy_cannot_name_another() {
    let headers = headers(&[("x-forwarded-for", CLIENT), ("forwarded", "for=203.0.113.7")]);
    for text in ["192.0.2.1", "2001:db8::1", "11.0.0.1"] {
        assert_eq!(proxies().client(peer(text), &headers), peer(text));
        assert_eq!(TrustedProxies::NONE.client(peer(text), &headers), peer(text));
    }
    let mapped = proxies().client(peer("::ffff:10.0.0.1"), &headers);
    assert_eq!(mapped.ip, ip(CLIENT), "a socket for both families shows IPv4 like this");
}

#[test]
fn networks_are_parsed_in_both_notations() {
    for (text, shown) in [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.0.0.1", "10.0.0.1/32"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("2001:db8::1", "2001:db8::1/128"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("::ffff:10.0.0.1", "10.0.0.1/32"),
    ] {
        assert_eq!(network(text).map(|network| network.to_string()), Ok(shown.to_owned()));
    }
    for (text, word) in [
        ("10.0.0.0/33", "ADDRESS/BITS"),
        ("10.0.0", "ADDRESS/BITS"),
        ("proxy.example.com", "ADDRESS/BITS"),
        ("10.0.0.1:80", "ADDRESS/BITS"),
        ("10.0.0.1/8", "expected 10.0.0.0/8 or 10.0.0.1"),
        ("0.0.0.0/0", "every address"),
        ("::/0", "every address"),
        ("::ffff:0.0.0.0/96", "every address"),
    ] {
        let error = network(text).unwrap_err().to_string();
        assert!(error.contains(word), "{text}: {error}");
    }
}

/// Header text with which a client tries to claim another address: pieces of the grammar in any
/// order.
fn forged() -> impl Strategy<Value = String> {
    let pieces = select(
        &[
            "for=",
            "for=9.9.9.9",
            "9.9.9.9",
            "10.0.0.1",
            "[2001:db8::9]:80",
            "host=",
            "\"",
            "\"",
            "\\",
            ",",
            ";",
            "=",
            " ",
            "x",
            "unknown",
            "\t",
            ":",
            "[",
            "]",
            "%",
            "é",
        ][..],
    );
    vec(prop_oneof![9 => pieces.prop_map(str::to_owned), 1 => "[ -~]{0,9}"], 0..12)
        .prop_map(|pieces| pieces.concat())
}

/// A text quoted as a proxy quotes foreign text.
fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn no_header_of_a_client_changes_its_address(first in forged(), host in forged(), second in forged()) {
        let proxies = proxies();
        let named = |lines: &[(&str, &str)]| proxies.client(peer(PROXY), &headers(lines)).ip;
        // Appended to the client's line, as most proxies do, or as a line of its own.
        let listed = format!("{first}, {CLIENT}");
        prop_assert_eq!(named(&[("x-forwarded-for", &listed)]), ip(CLIENT));
        prop_assert_eq!(named(&[("x-forwarded-for", &first), ("x-forwarded-for", CLIENT)]), ip(CLIENT));
        let own = format!("for=\"{CLIENT}:80\";host={};proto=http", quoted(&host));
        prop_assert_eq!(named(&[("forwarded", &first), ("forwarded", &own)]), ip(CLIENT));
        // A broken line, or the client's other header, leads to the proxy's address at most.
        let one_line = [named(&[("forwarded", &format!("{first}, {own}"))])];
        let other_header = [
            named(&[("x-forwarded-for", &listed), ("forwarded", &second)]),
            named(&[("x-forwarded-for", &second), ("forwarded", &own)]),
        ];
        for named in one_line.into_iter().chain(other_header) {
            prop_assert!(named == ip(CLIENT) || named == ip(PROXY), "{}", named);
        }
    }
}
