//! Hostile requests. The seed of the run and the number of the request determine its bytes.

use super::dictionary::{BODIES, INJECTIONS, TARGETS};
use crate::support::chance::Chance;
use crate::support::client::lock_path;

/// The locks and tokens that requests are about.
pub(super) struct Targets {
    /// Names of locks that a client holds.
    pub(super) held: Vec<String>,
    /// Valid tokens of locks whose names are in no request.
    pub(super) foreign: Vec<String>,
}

/// How a request ends, and what may follow on its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ending {
    /// The request is complete and well framed. The gateway answers it, and another request may
    /// follow.
    Kept,
    /// The request asks to close the connection. It does so before any part that could be misread.
    Closed,
    /// The request may be incomplete, so the test closes the sending side after it.
    BrokenOff,
}

pub(super) struct HostileRequest {
    pub(super) bytes: Vec<u8>,
    pub(super) ending: Ending,
}

impl HostileRequest {
    /// The method as the gateway reads it, if it can read the request.
    pub(super) fn method(&self) -> &[u8] {
        self.bytes.split(|byte| *byte == b' ').next().unwrap_or_default()
    }

    pub(super) fn target(&self) -> &[u8] {
        let ends = |byte: &u8| matches!(byte, b' ' | b'\r' | b'\n');
        self.bytes.split(ends).nth(1).unwrap_or_default()
    }

    /// The name of the lock in the request, if that is a valid name.
    pub(super) fn name(&self) -> Option<String> {
        let target = self.target();
        let origin = target.windows(7).position(|seven| seven == b"/locks/")?;
        let segment = target[origin + 7..].split(|byte| matches!(byte, b'?' | b'#')).next()?;
        String::from_utf8(percent_decoded(segment)).ok().filter(|name| is_name(name))
    }
}

/// Whether a text has the alphabet, length and segments that the documentation allows for names.
pub(super) fn is_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:@/+~-".contains(&byte);
    let is_kept = |segment: &str| !matches!(segment, "" | "." | "..");
    text.len() <= 255 && text.bytes().all(allowed) && text.split('/').all(is_kept)
}

fn percent_decoded(text: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        let pair = text.get(at + 1..at + 3).and_then(|pair| std::str::from_utf8(pair).ok());
        match pair.filter(|_| text[at] == b'%').and_then(|pair| u8::from_str_radix(pair, 16).ok()) {
            Some(byte) => {
                decoded.push(byte);
                at += 3;
            }
            None => {
                decoded.push(text[at]);
                at += 1;
            }
        }
    }
    decoded
}

fn injected(chance: &mut Chance, text: &[u8]) -> Vec<u8> {
    let mut text = text.to_vec();
    for _ in 0..=chance.below(3) {
        let at = chance.below(text.len() + 1);
        let injection = chance.pick(INJECTIONS);
        text.splice(at..at, injection.iter().copied());
    }
    text
}

/// Removes line ends and invalid text, because a client library would refuse them in a header.
fn fit_for_a_header(text: &[u8]) -> Vec<u8> {
    text.iter().copied().filter(|byte| *byte >= b' ' && *byte != 0x7f || *byte == b'\t').collect()
}

fn encoded(chance: &mut Chance, text: &[u8]) -> String {
    let mut path = String::new();
    for byte in text {
        let plain = byte.is_ascii_alphanumeric() || b"._:@+~-".contains(byte);
        match (plain, chance.below(8)) {
            (true, 1..) => path.push(char::from(*byte)),
            (_, 4..) => path.push_str(&format!("%{byte:02x}")),
            _ => path.push_str(&format!("%{byte:02X}")),
        }
    }
    path
}

const METHODS: &[&str] = &[
    "POST", "POST", "POST", "PATCH", "PATCH", "DELETE", "DELETE", "GET", "GET", "HEAD", "OPTIONS",
];
const ODD_METHODS: &[&str] =
    &["PUT", "LOCK", "UNLOCK", "TRACE", "CONNECT", "get", "FLUSHALL", "EVAL", "P-_~^"];

fn method(chance: &mut Chance) -> &'static str {
    if chance.one_in(12) { chance.pick(ODD_METHODS) } else { chance.pick(METHODS) }
}

/// A request target that is a URI.
fn target(chance: &mut Chance, targets: &Targets) -> String {
    match chance.below(20) {
        0..6 => lock_path(&targets.held[chance.below(targets.held.len())]),
        6..10 => format!("/locks/job-{}", chance.below(600)),
        10..15 => {
            let name = ["job", "a/b", "", "{lock:x}", "lock:job-1", "job-1}:fence"];
            let name = chance.pick(&name).as_bytes();
            let name = injected(chance, name);
            format!("/locks/{}", encoded(chance, &name))
        }
        15 => {
            let length = [254, 255, 256, 300, 4_096, 20_000][chance.below(6)];
            format!("/locks/{}", "n".repeat(length))
        }
        16 | 17 => {
            let value = injected(chance, b"1-7-00");
            let value = encoded(chance, &value);
            let query = [
                "limit=",
                "cursor=",
                "prefix=",
                "limit=5&prefix=",
                "offset=",
                "limit=18446744073709551616&x=",
            ];
            let end = ["", "&limit=2", "&limit=2&limit=3", "&cursor=0-0-zz"];
            format!("/locks?{}{value}{}", chance.pick(&query), chance.pick(&end))
        }
        _ => chance.pick(TARGETS).to_owned(),
    }
}

fn hex(chance: &mut Chance, digits: usize) -> String {
    (0..digits).map(|_| char::from(b"0123456789abcdef"[chance.below(16)])).collect()
}

/// The largest token that is allowed.
pub(super) const FAR_AHEAD: &str = "9007199254740991";

fn token(chance: &mut Chance, targets: &Targets) -> Vec<u8> {
    let forged = |chance: &mut Chance| {
        let t = ["1000000000000000", "1763725165123456", "1795264376745353", FAR_AHEAD];
        format!("1.{}.{}", chance.pick(&t), hex(chance, 40))
    };
    match chance.below(10) {
        0..3 => targets.foreign[chance.below(targets.foreign.len())].clone().into(),
        3..6 => forged(chance).into(),
        6 => format!("<{}>", forged(chance)).into(),
        7 => {
            let odd = [
                "1.9007199254740992.",
                "1.0999999999999999.",
                "1.-763725165123456.",
                "2.1763725165123456.",
                "1..",
                "1.nan.",
            ];
            format!("{}{}", chance.pick(&odd), hex(chance, 40)).into()
        }
        _ => {
            let forged = forged(chance);
            injected(chance, forged.as_bytes())
        }
    }
}

fn headers(chance: &mut Chance, targets: &Targets, method: &str) -> Vec<(String, Vec<u8>)> {
    let mut headers: Vec<(String, Vec<u8>)> = Vec::new();
    let holds = matches!(method, "PATCH" | "DELETE");
    let by_key = method == "DELETE" && chance.one_in(5);
    if holds && !by_key && !chance.one_in(10) || chance.one_in(20) {
        headers.push(("Lock-Token".into(), token(chance, targets)));
    }
    if by_key || chance.one_in(5) {
        let key = [&b"a-key-of-sixteen-characters"[..], b"short", b"", &[b'k'; 255], &[b'k'; 300]];
        let key = chance.pick(&key);
        // The injection never stands alone, because the same text occurs elsewhere in the log. The
        // test searches the log for whole keys.
        let key = if chance.one_in(2) {
            injected(chance, b"a-key-of-sixteen-characters")
        } else {
            key.to_vec()
        };
        headers.push(("Idempotency-Key".into(), key));
    }
    if chance.one_in(6) {
        let values = [
            "wait=0",
            "wait=99999999999999999999",
            "wait=-1",
            "wait=",
            "WAIT = \"0\"",
            "respond-async",
            "wait=1e3",
            ",,,;;=",
        ];
        let value = chance.pick(&values).as_bytes();
        headers.push((
            "Prefer".into(),
            if chance.one_in(3) { injected(chance, value) } else { value.to_vec() },
        ));
    }
    if chance.one_in(6) {
        let names = [
            "x-request-id",
            "traceparent",
            "x-forwarded-for",
            "Origin",
            "Cookie",
            "Accept-Encoding",
            "Range",
            "Upgrade",
        ];
        headers.push((chance.pick(&names).into(), injected(chance, b"00-4bf92f-01")));
    }
    if chance.one_in(40) {
        let length = [1_000, 8_000, 25_000][chance.below(3)];
        headers.push(("x-large".into(), vec![b'x'; length]));
    }
    if chance.one_in(60) {
        let count = [50, 90, 110, 400][chance.below(4)];
        headers.extend((0..count).map(|n| (format!("x-many-{n}"), b"y".to_vec())));
    }
    if chance.one_in(15) && !headers.is_empty() {
        let again = headers[chance.below(headers.len())].clone();
        headers.push(again);
    }
    headers
}

/// A body that is JSON, or nearly. If its TTL is valid, it is long enough for a slow machine.
fn body(chance: &mut Chance) -> Vec<u8> {
    match chance.below(12) {
        0..5 => good_body(chance),
        5..7 => {
            let body = good_body(chance);
            injected(chance, &body)
        }
        7 => {
            let mut body = good_body(chance);
            body.truncate(chance.below(body.len()));
            body
        }
        8 => {
            let depth = [10, 127, 128, 129, 5_000][chance.below(5)];
            let open = chance.pick(&["[", "{\"a\":", "{\"metadata\":"]);
            open.repeat(depth).into_bytes()
        }
        9 => {
            let length = [4_000, 4_096, 5_000, 60_000][chance.below(4)];
            let filler = chance.pick(&["v", "\\u0000", "é", "\\\""]);
            format!("{{\"metadata\":{{\"k\":\"{}\"}}}}", filler.repeat(length / filler.len()))
                .into_bytes()
        }
        _ => chance.pick(BODIES).to_vec(),
    }
}

fn good_body(chance: &mut Chance) -> Vec<u8> {
    let mut body = serde_json::Map::new();
    if !chance.one_in(4) {
        body.insert("ttl_ms".into(), [60_000, 120_000, 300_000][chance.below(3)].into());
    }
    if chance.one_in(4) {
        body.insert("wait_ms".into(), [0, 1, 20, 50][chance.below(4)].into());
    }
    let text = |chance: &mut Chance, text: &str| {
        let bytes = if chance.one_in(2) {
            text.as_bytes().to_vec()
        } else {
            injected(chance, text.as_bytes())
        };
        String::from_utf8_lossy(&bytes).into_owned()
    };
    if chance.one_in(3) {
        body.insert("owner".into(), text(chance, "nightly on host-7").into());
    }
    if chance.one_in(3) {
        let key = text(chance, "key");
        let value = text(chance, "value");
        body.insert("metadata".into(), serde_json::json!({ key: value }));
    }
    serde_json::Value::Object(body).to_string().into_bytes()
}

/// The request as the bytes that are sent.
fn written(
    method: &str,
    target: &[u8],
    version: &str,
    headers: &[(String, Vec<u8>)],
    body: &[u8],
) -> Vec<u8> {
    let mut bytes = [method.as_bytes(), b" ", target, b" ", version.as_bytes(), b"\r\n"].concat();
    for (name, value) in headers {
        bytes.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
    }
    bytes.extend_from_slice(b"\r\n");
    bytes.extend_from_slice(body);
    bytes
}

fn chunked(chance: &mut Chance, body: &[u8]) -> Vec<u8> {
    let mut framed = Vec::new();
    let mut rest = body;
    while !rest.is_empty() {
        let (chunk, later) = rest.split_at(1 + chance.below(rest.len()));
        let extension = chance.pick(&["", "", ";a=b", ";\"q\""]);
        framed.extend_from_slice(format!("{:x}{extension}\r\n", chunk.len()).as_bytes());
        framed.extend_from_slice(chunk);
        framed.extend_from_slice(b"\r\n");
        rest = later;
    }
    framed.extend_from_slice(b"0\r\n\r\n");
    framed
}

struct Parts {
    method: &'static str,
    target: String,
    headers: Vec<(String, Vec<u8>)>,
    body: Vec<u8>,
}

fn parts(chance: &mut Chance, targets: &Targets) -> Parts {
    let method = method(chance);
    let target = target(chance, targets);
    let mut headers = vec![("Host".to_owned(), b"localhost".to_vec())];
    headers.extend(self::headers(chance, targets, method));
    let body = if matches!(method, "POST" | "PATCH") || chance.one_in(15) {
        body(chance)
    } else {
        Vec::new()
    };
    if !body.is_empty() && !chance.one_in(12) {
        headers.push(("Content-Type".into(), b"application/json".to_vec()));
    } else if chance.one_in(6) {
        headers
            .push(("Content-Type".into(), injected(chance, b"application/json; charset=utf-16")));
    }
    Parts { method, target, headers, body }
}

/// The request with the next number.
pub(super) fn hostile_request(chance: &mut Chance, targets: &Targets) -> HostileRequest {
    let mut made = parts(chance, targets);
    if chance.below(10) < 6 {
        for (_, value) in &mut made.headers {
            *value = fit_for_a_header(value);
        }
        return well_framed(chance, made);
    }
    badly_framed(chance, targets, made)
}

fn well_framed(chance: &mut Chance, made: Parts) -> HostileRequest {
    let Parts { method, target, mut headers, mut body } = made;
    // A server may answer such a large request before it has read all of it, and then close the
    // connection. That is no fault of its framing, so the request itself asks to close.
    let size = headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>()
        + target.len()
        + body.len();
    let ending = if size > 8_000 || headers.len() > 80 || method == "CONNECT" {
        Ending::Closed
    } else {
        Ending::Kept
    };
    if ending == Ending::Closed {
        headers.insert(0, ("Connection".into(), b"close".to_vec()));
    }
    if chance.one_in(4) && !body.is_empty() {
        headers.push(("Transfer-Encoding".into(), b"chunked".to_vec()));
        body = chunked(chance, &body);
    } else if !body.is_empty() || matches!(method, "POST" | "PATCH") {
        headers.push(("Content-Length".into(), body.len().to_string().into()));
    }
    HostileRequest {
        bytes: written(method, target.as_bytes(), "HTTP/1.1", &headers, &body),
        ending,
    }
}

fn corrupted(chance: &mut Chance, mut bytes: Vec<u8>) -> Vec<u8> {
    for _ in 0..=chance.below(4) {
        let at = chance.below(bytes.len());
        // No byte is changed into a digit. It could make a TTL of milliseconds, and a slow machine
        // cannot grant that.
        bytes[at] = loop {
            let byte = chance.next() as u8;
            if !byte.is_ascii_digit() {
                break byte;
            }
        };
    }
    bytes
}

fn badly_framed(chance: &mut Chance, targets: &Targets, made: Parts) -> HostileRequest {
    let Parts { mut method, target, mut headers, mut body } = made;
    let mut target = target.into_bytes();
    let mut version = "HTTP/1.1";
    let mut lengths: Vec<(String, Vec<u8>)> =
        vec![("Content-Length".into(), body.len().to_string().into())];
    headers.insert(0, ("Connection".into(), b"close".to_vec()));
    match chance.below(10) {
        // Carriage returns, line feeds or zero bytes inside a value.
        0..3 => {
            let at = 1 + chance.below(headers.len() - 1);
            headers[at].1 = injected(chance, &headers[at].1);
        }
        3 => {
            target = injected(chance, &target);
        }
        4 => {
            let names = [
                "",
                " host",
                "host ",
                "x\0y",
                "x y",
                "x:y",
                "ü",
                "content-length\t",
                "\u{7f}",
                "(x)",
            ];
            headers.push((chance.pick(&names).into(), b"1".to_vec()));
        }
        5 => {
            version = chance.pick(&[
                "HTTP/1.0",
                "HTTP/0.9",
                "HTTP/2.0",
                "HTTP/1.1.1",
                "http/1.1",
                "",
                "RESP/3",
                "HTTP/9.9",
            ]);
            method = chance.pick(&[
                "POST",
                "",
                " ",
                "PO ST",
                "G\0T",
                "*1\r\n$4\r\nPING",
                "PRI",
                "\u{fe0f}",
            ]);
        }
        6 => {
            let value = chance.pick(&[
                "-1",
                "+5",
                "1e1",
                "0x5",
                "18446744073709551616",
                "5, 5",
                "",
                "999999999",
                "1",
            ]);
            lengths[0].1 = value.as_bytes().to_vec();
            if chance.one_in(2) {
                lengths.push(("Content-Length".into(), b"7".to_vec()));
            }
        }
        // Two lengths in one request, or invalid chunks. A server may read the rest as a request of
        // its own.
        7 => {
            lengths.push((
                "Transfer-Encoding".into(),
                chance
                    .pick(&[
                        "chunked",
                        "chunked, identity",
                        "xchunked",
                        "gzip, chunked",
                        "\x0bchunked",
                    ])
                    .into(),
            ));
            let inner = format!(
                "DELETE {} HTTP/1.1\r\nhost: localhost\r\nlock-token: ",
                lock_path(&targets.held[0])
            );
            let inner = [inner.as_bytes(), &token(chance, targets), b"\r\n\r\n"].concat();
            let chunks = [
                "0\r\n\r\n",
                "5\r\nabc",
                "FFFFFFFFFFFFFFFF\r\n",
                "-1\r\n\r\n",
                "0x5\r\nabcde\r\n0\r\n\r\n",
                "5;\0\r\nabcde\r\n",
                "\r\n",
            ];
            body = [chance.pick(&chunks).as_bytes(), &inner].concat();
        }
        8 => {
            let whole = written(method, &target, version, &[headers, lengths].concat(), &body);
            let end = chance.below(whole.len());
            return HostileRequest { bytes: whole[..end].to_vec(), ending: Ending::BrokenOff };
        }
        _ => {
            let whole = written(method, &target, version, &[headers, lengths].concat(), &body);
            return HostileRequest { bytes: corrupted(chance, whole), ending: Ending::BrokenOff };
        }
    }
    headers.extend(lengths);
    HostileRequest {
        bytes: written(method, &target, version, &headers, &body),
        ending: Ending::BrokenOff,
    }
}
