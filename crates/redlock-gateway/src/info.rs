//! What is stored beside a lock: the label and metadata that the request for it gave, and the principal that its token is
//! bound to. JSON, small, and written only by gateways.

use std::collections::BTreeMap;

use redlock_core::Info;
use serde::{Deserialize, Serialize};

/// What to store, or what was found.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockMetadata {
    /// A text for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Pairs of the client's own, for people too.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// The name of the key that acquired it; none where there are no keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

impl LockMetadata {
    /// Nothing when another client wrote it, or nobody anything.
    pub fn read(info: &[u8]) -> Self {
        // The parser would make an error of what most locks have.
        if info.is_empty() {
            return Self::default();
        }
        serde_json::from_slice(info).unwrap_or_default()
    }

    /// `None` when it is too large.
    pub fn write(&self) -> Option<Info> {
        if *self == Self::default() {
            return Some(Info::default());
        }
        Info::new(serde_json::to_vec(self).ok()?).ok()
    }
}

/// The label in what is stored; none when another client wrote it.
pub fn label_of(info: &[u8]) -> Option<String> {
    LockMetadata::read(info).owner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_read_again() {
        let metadata = BTreeMap::from([("k".to_owned(), "v".to_owned())]);
        let stored =
            LockMetadata { owner: Some("a \"b\"".into()), metadata, key: Some("ci".into()) };
        assert_eq!(LockMetadata::read(stored.write().unwrap().as_bytes()), stored);
        assert_eq!(LockMetadata::read(b"not ours"), LockMetadata::default());
        assert_eq!(LockMetadata::default().write().unwrap().as_bytes(), b"");
    }
}
