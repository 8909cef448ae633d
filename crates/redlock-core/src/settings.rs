//! What a [`Redlock`](crate::Redlock) is made of besides its nodes, checked before anything is started.

use std::sync::Arc;
use std::time::Duration;

use crate::node::Node;
pub use crate::node::Seams;
use crate::quorum::{NodeCountError, Quorum};
use crate::types::Ttl;

/// What all gateways of a cluster must agree on, and how patient this one is.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Put before every lock name to make its key. Must not contain braces.
    pub key_prefix: String,
    /// The longest TTL anybody may ask for.
    pub max_ttl: Ttl,
    /// How long a round waits for a node; a tenth of the TTL if that is less.
    pub node_timeout: Duration,
    /// Part of a TTL that clocks running at different rates may eat.
    pub drift_factor: f64,
    /// D: how far a fencing token may be from a node's own time.
    pub max_clock_offset: Duration,
    /// How many may wait for locks, see [`Redlock::acquire_within`](crate::Redlock::acquire_within).
    pub max_waiters: usize,
    /// How many of them may wait for the same one.
    pub max_waiters_per_lock: usize,
}

impl Settings {
    /// The quorum of these nodes, if nodes and settings are fit to hold locks.
    pub(crate) fn check(&self, nodes: &[Arc<dyn Node>]) -> Result<Quorum, SettingsError> {
        let quorum = Quorum::new(nodes.len())?;
        for (index, node) in nodes.iter().enumerate() {
            if nodes[..index].iter().any(|other| other.name() == node.name()) {
                return Err(SettingsError::DuplicateNode(node.name().into()));
            }
        }
        if !(0.0..=0.5).contains(&self.drift_factor) {
            return Err(SettingsError::DriftFactor(self.drift_factor));
        }
        if self.node_timeout < Duration::from_millis(1) {
            return Err(SettingsError::NodeTimeout(self.node_timeout));
        }
        let prefix = &self.key_prefix;
        if prefix.contains(['{', '}']) || prefix.chars().any(char::is_control) || prefix.len() > 255 {
            return Err(SettingsError::KeyPrefix(prefix.clone()));
        }
        Ok(quorum)
    }
}

impl Default for Settings {
    /// `lock:`, 5 minutes, 50 ms, 1 %, 2 s, 10,000 waiters, 1,024 for one lock.
    fn default() -> Self {
        Self {
            key_prefix: "lock:".into(),
            max_ttl: Ttl::from_millis(300_000).expect("within the limits of a Ttl"),
            node_timeout: Duration::from_millis(50),
            drift_factor: 0.01,
            max_clock_offset: Duration::from_secs(2),
            max_waiters: 10_000,
            max_waiters_per_lock: 1_024,
        }
    }
}

/// Why a [`Redlock`](crate::Redlock) cannot be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// No node, or too many.
    #[error(transparent)]
    Nodes(#[from] NodeCountError),
    /// Two nodes with one name are not independent.
    #[error("node {0} is given twice; a quorum needs independent nodes")]
    DuplicateNode(String),
    /// Outside `0.0..=0.5`.
    #[error("a drift factor of {0} is outside 0.0 to 0.5")]
    DriftFactor(f64),
    /// Nothing could ever answer in time.
    #[error("a node time-out of {0:?} is below 1 ms")]
    NodeTimeout(Duration),
    /// Braces would mix up lock keys with the keys kept beside them.
    #[error("the key prefix {0:?} contains a brace or a control character, or is longer than 255 bytes")]
    KeyPrefix(String),
}
