//! The text of a key: `rlk.<name>.<secret>`. The secret is 32 random bytes in base64url without
//! padding, 43 characters.
//!
//! A fast hash is enough for such keys, because guessing a key takes up to 2^256 tries. For
//! passwords it would be too weak. So the gateway compares only texts of this form: a password
//! whose hash an operator puts into the file lets nobody in.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use redlock_core::clock::Entropy;
use redlock_core::{FencingToken, LockToken};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

const PREFIX: &str = "rlk";
const SECRET_BYTES: usize = 32;
/// Length of the encoded secret, in characters.
const SECRET_TEXT: usize = 43;
const MAX_NAME: usize = 64;
const ALGORITHM: &str = "sha256:";

/// The name of callers without a key.
pub(super) const ANONYMOUS: &str = "anonymous";

/// Whether a text is 1 to 64 characters of `[A-Za-z0-9_-]`, and not `anonymous`.
pub fn is_key_name(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
    (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(allowed) && text != ANONYMOUS
}

/// SHA-256 of a key's whole text.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Hash([u8; 32]);

/// A hash that no key has.
pub(super) const NO_HASH: Hash = Hash([0; 32]);

impl Hash {
    fn of(text: &str) -> Self {
        Self(Sha256::digest(text.as_bytes()).into())
    }

    /// Parses `sha256:` and 64 hexadecimal digits.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut hash = [0; 32];
        hex::decode_to_slice(text.strip_prefix(ALGORITHM)?, &mut hash).ok()?;
        Some(Self(hash))
    }

    fn text(self) -> String {
        format!("{ALGORITHM}{}", hex::encode(self.0))
    }

    /// Compares in constant time.
    pub(super) fn equals(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

/// A new key.
pub struct Secret(String);

impl Secret {
    /// `name` must satisfy [`is_key_name`].
    pub fn new(name: &str, entropy: &dyn Entropy) -> Self {
        let mut bytes = [0; SECRET_BYTES];
        entropy.fill(&mut bytes);
        Self(format!("{PREFIX}.{name}.{}", URL_SAFE_NO_PAD.encode(bytes)))
    }

    /// The key's text, to be shown once.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// The key's hash, as the keys file has it.
    pub fn hash_text(&self) -> String {
        Hash::of(&self.0).text()
    }
}

/// Whether a text contains the text of a key or of a lock's token.
pub fn holds_secret(text: &str) -> bool {
    if text.len() < PREFIX.len() + 3 + SECRET_TEXT {
        return false;
    }
    let begins = |text: &str, is_in: fn(&u8) -> bool, length| {
        text.bytes().take_while(is_in).count() >= length
    };
    let parts: Vec<&str> = text.split('.').collect();
    parts.windows(3).any(|three| {
        let [before, middle, after] = three else { return false };
        let is_base64 = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-');
        let is_key = before.ends_with(PREFIX)
            && is_key_name(middle)
            && begins(after, is_base64, SECRET_TEXT);
        let is_fencing = middle.len() == FencingToken::TEXT_LEN
            && middle.bytes().all(|byte| byte.is_ascii_digit());
        is_key
            || is_fencing
                && before.ends_with(|end: char| end.is_ascii_digit())
                && begins(after, u8::is_ascii_hexdigit, LockToken::GRANT_LEN)
    })
}

/// The name and the hash of a key's text. `None` when the text cannot be a key.
pub(super) fn hash_of(text: &str) -> Option<(&str, Hash)> {
    let mut parts = text.split('.');
    let prefix = parts.next()?;
    let name = parts.next()?;
    let secret = parts.next()?;
    if prefix != PREFIX || parts.next().is_some() || !is_key_name(name) {
        return None;
    }
    let mut bytes = [0; SECRET_BYTES + 2];
    let length = URL_SAFE_NO_PAD.decode_slice(secret, &mut bytes).ok()?;
    (length == SECRET_BYTES).then(|| (name, Hash::of(text)))
}

#[cfg(test)]
mod tests {
    use redlock_core::clock::OsEntropy;

    use super::*;

    #[test]
    fn a_key_yields_its_name_and_hash_and_nothing_shorter_does() {
        let secret = Secret::new("ci_1-x", &OsEntropy);
        let (name, hash) = hash_of(secret.expose()).unwrap();
        assert_eq!(name, "ci_1-x");
        assert!(hash.equals(&Hash::parse(&secret.hash_text()).unwrap()));
        assert_ne!(secret.expose(), Secret::new("ci_1-x", &OsEntropy).expose());
        let text = secret.expose();
        let longer = format!("{text}A");
        let other_name = text.replace("ci_1-x", "ci");
        assert!(!hash_of(&other_name).unwrap().1.equals(&hash));
        for bad in [
            "",
            "rlk",
            "rlk.ci",
            "rlk..",
            &text[1..],
            &text[..text.len() - 1],
            &longer,
            "rlk.ci.hunter2",
        ] {
            assert!(hash_of(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn a_secret_is_found_inside_other_text() {
        let key = Secret::new("ci", &OsEntropy);
        let token = "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b";
        let with_hold = &format!("2-600000{}", &token[1..]);
        for secret in [key.expose(), token, with_hold] {
            for text in [
                secret.to_owned(),
                format!("deploy/{secret}"),
                format!("a.b{secret}/c.d"),
                format!("prefix={secret}&x"),
            ] {
                assert!(holds_secret(&text), "{text}");
            }
            assert!(
                !holds_secret(&secret[..secret.len() - 1])
                    && !holds_secret(&secret.replace('.', "-"))
            );
        }
        for name in [
            "reports/nightly",
            "rlk.orders.process-payments-of-the-last-quarter",
            "v1.2.3",
            &"a.".repeat(100),
        ] {
            assert!(!holds_secret(name), "{name}");
        }
    }

    #[test]
    fn only_complete_sha256_hashes_are_parsed() {
        let right = Hash::of("x").text();
        assert!(Hash::parse(&right).is_some() && Hash::parse(&right.to_uppercase()).is_none());
        for bad in [
            "",
            "sha256:",
            &right[..right.len() - 1],
            &right[7..],
            "sha1:00",
            &right.replace(':', "="),
        ] {
            assert!(Hash::parse(bad).is_none(), "{bad}");
        }
        assert!(Hash::parse(&format!("sha256:{}", "ä".repeat(32))).is_none());
    }
}
