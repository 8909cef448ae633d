//! The text that the masters store beside a lock: the label and metadata from the acquire, and the
//! principal that the token is bound to. The text is a small JSON object that only gateways write.

use std::collections::BTreeMap;

use redlock_core::Info;
use serde::{Deserialize, Serialize};

/// The stored text, parsed.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockMetadata {
    /// The label, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The client's own key-value pairs, for people.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    /// The name of the key that acquired the lock. `None` where there are no keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// How many slots the lock has, as the request that acquired it said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<u16>,
}

impl LockMetadata {
    /// Parses a stored text. An empty text, or a text of another Redlock client, gives the default.
    pub fn read(info: &[u8]) -> Self {
        // Most locks have no text. For them, the parser would only spend time on making an error.
        if info.is_empty() {
            return Self::default();
        }
        serde_json::from_slice(info).unwrap_or_default()
    }

    /// The text to store. `None` when it is too large.
    pub fn write(&self) -> Option<Info> {
        if *self == Self::default() {
            return Some(Info::default());
        }
        Info::new(serde_json::to_vec(self).ok()?).ok()
    }
}

/// The label in a stored text. `None` if another Redlock client wrote it.
pub fn label_of(info: &[u8]) -> Option<String> {
    LockMetadata::read(info).owner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_read_again() {
        let metadata = BTreeMap::from([("k".to_owned(), "v".to_owned())]);
        let stored = LockMetadata {
            owner: Some("a \"b\"".into()),
            metadata,
            key: Some("ci".into()),
            slots: Some(4),
        };
        assert_eq!(LockMetadata::read(stored.write().unwrap().as_bytes()), stored);
        assert_eq!(LockMetadata::read(b"not ours"), LockMetadata::default());
        assert_eq!(LockMetadata::default().write().unwrap().as_bytes(), b"");
    }
}
