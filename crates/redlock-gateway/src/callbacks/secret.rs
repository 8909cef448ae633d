//! The secrets that sign callbacks, as Standard Webhooks has it: HMAC-SHA-256 over
//! `id.timestamp.body`.

use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::reload::{Content, ReadError};

/// What a secret begins with.
const PREFIX: &str = "whsec_";
/// How many bytes a secret may have.
const LENGTHS: std::ops::RangeInclusive<usize> = 24..=64;
/// Limit on secrets. While an operator replaces a secret, there are two.
const MAX_SECRETS: usize = 4;

/// Why a file of secrets cannot be used. No text has a part of a secret.
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    #[error("{}: {error}", path.display())]
    Unreadable { path: PathBuf, error: ReadError },
    #[error(
        "{}: line {line} is not a secret; expected {PREFIX} and 24 to 64 random bytes in base64, such \
         as the output of: echo \"{PREFIX}$(openssl rand -base64 32)\"",
        path.display()
    )]
    NotASecret { path: PathBuf, line: usize },
    #[error("{}: it has {count} secrets; allowed are 1 to {MAX_SECRETS}, one on each line", path.display())]
    Count { path: PathBuf, count: usize },
}

/// The secrets in use. Each of them signs every callback.
pub(super) struct Secrets(Vec<Vec<u8>>);

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Secrets").field(&self.0.len()).finish()
    }
}

impl Secrets {
    /// The secrets of a file, one on each line. Empty lines and lines that begin with `#` are
    /// ignored.
    pub(super) fn read(path: &Path, content: &Content) -> Result<Self, SecretsError> {
        let path = path.to_owned();
        let bytes = match content {
            Ok(bytes) => bytes,
            Err(error) => return Err(SecretsError::Unreadable { path, error: error.clone() }),
        };
        let text = String::from_utf8_lossy(bytes);
        let lines = text.lines().map(str::trim).enumerate();
        let mut secrets = Vec::new();
        for (index, line) in lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#')) {
            let secret = line.strip_prefix(PREFIX).and_then(|text| STANDARD.decode(text).ok());
            let Some(secret) = secret.filter(|secret| LENGTHS.contains(&secret.len())) else {
                return Err(SecretsError::NotASecret { path, line: index + 1 });
            };
            secrets.push(secret);
        }
        match secrets.len() {
            1..=MAX_SECRETS => Ok(Self(secrets)),
            count => Err(SecretsError::Count { path, count }),
        }
    }

    /// The value of `webhook-signature`: a signature by each secret.
    pub(super) fn sign(&self, id: &str, timestamp: u64, body: &str) -> String {
        let signature = |secret: &Vec<u8>| {
            let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("any length is allowed");
            mac.update(format!("{id}.{timestamp}.{body}").as_bytes());
            format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
        };
        self.0.iter().map(signature).collect::<Vec<_>>().join(" ")
    }
}
