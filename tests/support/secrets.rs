//! Secrets that no log may contain at any level: the tokens that a gateway returned, the keys that
//! clients sent, and the passwords of the gateway's masters. The test support collects the secrets
//! as they pass. When a gateway has ended, it searches all output of that gateway for them. So
//! every test with a gateway also tests this.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::Value;

/// The number of characters in a token's secret part.
const OWNER_LEN: usize = 40;
/// The fewest characters of a secret that is searched for. A shorter text may be in a log by
/// chance.
const LEAST: usize = 6;

#[derive(Debug, Default)]
pub(crate) struct Secrets(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    owners: HashSet<String>,
    /// All secrets but the owners, each with its kind.
    others: BTreeMap<String, &'static str>,
}

impl Secrets {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn other(&self, kind: &'static str, secret: &str) {
        if secret.len() >= LEAST {
            self.known().others.insert(secret.to_owned(), kind);
        }
    }

    /// Collects the passwords of all URLs in a text.
    pub(crate) fn configured(&self, text: &str) {
        for rest in text.split("://").skip(1) {
            let url = rest.split([' ', ',', '\'', '"', '\n']).next().unwrap_or_default();
            let password =
                url.rsplit_once('@').and_then(|(credentials, _)| credentials.split_once(':'));
            if let Some((_, password)) = password {
                self.other("a node's password", password);
            }
        }
    }

    pub(crate) fn sent(&self, headers: &HeaderMap) {
        headers.iter().for_each(|(name, value)| self.header(name, value));
    }

    /// Collects the secrets of a request that a test wrote as bytes, as far as the request can be
    /// parsed.
    pub(crate) fn written(&self, bytes: &[u8]) {
        for line in bytes.split(|byte| *byte == b'\n') {
            let Some(colon) = line.iter().position(|byte| *byte == b':').filter(|at| *at <= 20)
            else {
                continue;
            };
            let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii());
            if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(&line[..colon]), value) {
                self.header(&name, &value);
            }
        }
    }

    fn header(&self, name: &HeaderName, value: &HeaderValue) {
        let Ok(text) = value.to_str() else { return };
        match name.as_str() {
            "lock-token" => self.token(text),
            // A key with other characters is malformed on purpose. Such texts occur elsewhere in a
            // log too.
            "idempotency-key" if text.len() >= 16 && text.bytes().all(is_plain) => {
                self.other("an idempotency key", text)
            }
            // Of an API key, only the secret part is collected. Of any other text, the last word
            // is. A shorter text is no secret: it may be a word in any line.
            "authorization" => {
                let shown = text.rsplit([' ', '.']).next().unwrap_or_default();
                if shown.len() >= 10 {
                    self.other("an authorization", shown);
                }
            }
            _ => {}
        }
    }

    fn token(&self, text: &str) {
        let owner = text.trim_matches(['<', '>']).rsplit('.').next().unwrap_or_default();
        if owner.len() == OWNER_LEN && owner.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            self.known().owners.insert(owner.to_owned());
        }
    }

    pub(crate) fn got(&self, headers: &HeaderMap, body: &[u8]) {
        self.sent(headers);
        if body.windows(8).any(|eight| eight == b"\"token\":")
            && let Ok(body) = serde_json::from_slice::<Value>(body)
        {
            self.token(body["token"].as_str().unwrap_or_default());
        }
    }

    /// The first secret in a text, with its kind and the line that contains it.
    pub(crate) fn found_in(&self, text: &str) -> Option<String> {
        let known = self.known();
        let line_at = |at: usize| {
            let start = text[..at].rfind('\n').map_or(0, |end| end + 1);
            text[start..].lines().next().unwrap_or_default()
        };
        if let Some(at) = owner_in(text.as_bytes(), &known.owners) {
            return Some(format!("the secret of a token is in the log: {}", line_at(at)));
        }
        known.others.iter().find_map(|(secret, kind)| {
            // Bytes that are logged in Debug form, as a list of numbers.
            let numbers: Vec<String> = secret.bytes().map(|byte| byte.to_string()).collect();
            let at = text.find(secret.as_str()).or_else(|| text.find(&numbers.join(", ")))?;
            Some(format!("{kind}, {secret:?}, is in the log: {}", line_at(at)))
        })
    }
}

fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._/-".contains(&byte)
}

/// Finds the first owner in a text, and returns its position. An owner consists of 40 hexadecimal
/// digits. So every 40 bytes that are all such digits are looked up in the set. A position whose 40
/// bytes contain another byte is skipped. Searching for one owner after the other would take too
/// long: there may be thousands.
fn owner_in(text: &[u8], owners: &HashSet<String>) -> Option<usize> {
    let mut at = 0;
    while let Some(window) = text.get(at..at + OWNER_LEN) {
        match window.iter().rposition(|byte| !byte.is_ascii_hexdigit()) {
            Some(other) => at += other + 1,
            None if owners.contains(str::from_utf8(window).unwrap_or_default()) => return Some(at),
            None => at += 1,
        }
    }
    None
}

#[test]
fn every_kind_of_secret_is_found_and_nothing_else() {
    let owner = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b";
    let secrets = Secrets::default();
    secrets.configured("--node redis://:pass%40word@a:1,rediss://user:other-word@b");
    secrets.written(
        b"POST /locks/a HTTP/1.1\r\nAuthorization: Bearer rk_0123456789\r\nidempotency-key: sixteen-characters\r\n",
    );
    secrets
        .got(&HeaderMap::new(), format!("{{\"token\":\"1.1763725165123456.{owner}\"}}").as_bytes());
    for text in [
        "",
        "nothing",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1",
        "user at a:1",
        "Bearer",
        "1763725165123456",
    ] {
        assert_eq!(secrets.found_in(text), None, "{text:?}");
    }
    let numbers = "other-word".bytes().map(|byte| byte.to_string()).collect::<Vec<_>>().join(", ");
    for (secret, kind) in [
        (owner, "the secret of a token"),
        (&format!("00{owner}ff"), "the secret of a token"),
        ("pass%40word", "a node's password"),
        ("other-word", "a node's password"),
        (&numbers, "a node's password"),
        ("rk_0123456789", "an authorization"),
        ("sixteen-characters", "an idempotency key"),
    ] {
        let found =
            secrets.found_in(&format!("one line\nanother with {secret}, and\nmore")).expect(secret);
        assert!(
            found.starts_with(kind) && found.ends_with(&format!("another with {secret}, and")),
            "{found}"
        );
    }
}
