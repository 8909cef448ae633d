//! The settings of a [`Redlock`](crate::Redlock), checked before anything is started.

#[cfg(feature = "redis")]
use std::sync::Arc;
use std::time::Duration;

use crate::model::quorum::{NodeCountError, Quorum};
use crate::model::types::Ttl;
use crate::model::validity::longest_round;
pub use crate::node::Env;
#[cfg(feature = "redis")]
use crate::node::NodeRegistry;
use crate::node::NodeSettings;
#[cfg(feature = "redis")]
use crate::node::eligibility::ClusterConfig;
#[cfg(feature = "redis")]
use crate::node::redis::{RedisSettings, RedisUrlError};

/// The settings of a [`Redlock`](crate::Redlock). All processes of a cluster must agree on
/// `key_prefix`, `max_ttl` and `node.max_clock_skew`. Each process may choose the other settings
/// for itself.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The text before every lock name in its Redis key. Must not contain braces.
    pub key_prefix: String,
    /// The longest TTL anybody may ask for. A node that may have lost locks does not vote for a
    /// time, its quarantine. `max_ttl` and `max_clock_skew` determine how long.
    pub max_ttl: Ttl,
    /// Settings for each node, including `max_clock_skew`: how far a fencing token may be from the
    /// node's own time.
    pub node: NodeSettings,
    /// How long a round waits for the other nodes once a majority has answered. For the answers of
    /// a majority it waits for up to 800 ms, if `node_timeout` is not longer. A round never waits
    /// longer than a tenth of its TTL.
    pub node_timeout: Duration,
    /// The part of a TTL, 0.0 to 0.5, that is reserved for clocks that run at different rates.
    pub drift_factor: f64,
    /// How many requests may wait for locks, see
    /// [`Redlock::acquire_within`](crate::Redlock::acquire_within).
    pub max_waiters: usize,
    /// How many requests may wait for the same lock.
    pub max_waiters_per_lock: usize,
    /// How many bytes of memory the pending releases may take. A release is pending while a node has
    /// not confirmed it. Without room, the node keeps the lock until its TTL ends.
    pub max_pending_release_bytes: usize,
}

impl Settings {
    /// Settings for Redis nodes that agree with these settings. `cluster` names the set of nodes,
    /// and `masters` is their number.
    #[cfg(feature = "redis")]
    pub fn of_masters(&self, cluster: &str, masters: usize) -> RedisSettings {
        let Self { key_prefix, max_ttl, node_timeout, drift_factor, node, .. } = self.clone();
        let cluster_config = ClusterConfig::new(cluster, max_ttl.duration(), node.max_clock_skew);
        RedisSettings {
            node,
            key_prefix,
            cluster_config,
            node_timeout,
            drift_factor,
            node_registry: Arc::new(NodeRegistry::new(masters)),
            node_name: None,
            bootstrap: false,
            #[cfg(feature = "tls")]
            tls: Default::default(),
        }
    }

    /// Checks the settings and the node names, and returns the quorum.
    pub(crate) fn check<'a>(
        &self,
        nodes: impl IntoIterator<Item = &'a str>,
    ) -> Result<Quorum, SettingsError> {
        let nodes: Vec<_> = nodes.into_iter().collect();
        let quorum = Quorum::new(nodes.len())?;
        if let Some(at) = (1..nodes.len()).find(|at| nodes[..*at].contains(&nodes[*at])) {
            return Err(SettingsError::DuplicateNode(nodes[at].into()));
        }
        if !(0.0..=0.5).contains(&self.drift_factor) {
            return Err(SettingsError::DriftFactor(self.drift_factor));
        }
        if self.node_timeout < Duration::from_millis(1) {
            return Err(SettingsError::NodeTimeout(self.node_timeout));
        }
        let longest = longest_round(self.node.max_clock_skew);
        if self.node_timeout > longest {
            return Err(SettingsError::LongNodeTimeout { given: self.node_timeout, longest });
        }
        let prefix = &self.key_prefix;
        if prefix.contains(['{', '}']) || prefix.chars().any(char::is_control) || prefix.len() > 255
        {
            return Err(SettingsError::KeyPrefix(prefix.clone()));
        }
        Ok(quorum)
    }
}

impl Default for Settings {
    /// Key prefix `lock:`, `max_ttl` 5 minutes, `max_clock_skew` 2 s, `node_timeout` 50 ms,
    /// `drift_factor` 1 %, at most 10,000 waiters, at most 1,024 for one lock, and
    /// 32 MiB of pending releases.
    fn default() -> Self {
        Self {
            key_prefix: "lock:".into(),
            max_ttl: Ttl::from_millis(300_000).expect("within the limits of a Ttl"),
            node: NodeSettings::default(),
            node_timeout: Duration::from_millis(50),
            drift_factor: 0.01,
            max_waiters: 10_000,
            max_waiters_per_lock: 1_024,
            max_pending_release_bytes: 32 * 1024 * 1024,
        }
    }
}

/// Why a [`Redlock`](crate::Redlock) cannot be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// No node, or more than [`Quorum::MAX_NODES`].
    #[error(transparent)]
    Nodes(#[from] NodeCountError),
    /// Two nodes have the same name, so they are not independent.
    #[error("node {0} is given twice; a quorum needs independent nodes")]
    DuplicateNode(String),
    /// A text that is no address of a master.
    #[cfg(feature = "redis")]
    #[error("node number {number}: {error}")]
    NodeUrl {
        /// The position of the text among the addresses, from 1.
        number: usize,
        /// Why the text is no address.
        error: RedisUrlError,
    },
    /// The node was made for another `max_ttl`. With a shorter one, it would vote again after a
    /// loss of data before the longest locks have ended.
    #[error(
        "node {node} was made for a max_ttl of {of_node:?}, but locks may live for \
         {of_locks:?}; both must agree"
    )]
    MaxTtl {
        /// The node.
        node: String,
        /// The longest TTL that the node's quarantine covers.
        of_node: Duration,
        /// The `max_ttl` of the settings.
        of_locks: Duration,
    },
    /// A drift factor outside `0.0..=0.5`.
    #[error("a drift factor of {0} is outside 0.0 to 0.5")]
    DriftFactor(f64),
    /// A `node_timeout` within which no node could answer.
    #[error("a node time-out of {0:?} is below 1 ms")]
    NodeTimeout(Duration),
    /// A `node_timeout` above [`longest_round`]: the answers of longer rounds do not count.
    #[error(
        "a node time-out of {given:?} is above the limit of {longest:?}, which is 3 times the \
         clock skew, and at least 5 s"
    )]
    LongNodeTimeout {
        /// The given `node_timeout`.
        given: Duration,
        /// The longest allowed.
        longest: Duration,
    },
    /// A key prefix that is not allowed. Braces would mix lock keys with the keys kept beside them.
    #[error(
        "the key prefix {0:?} contains a brace or a control character, or is longer than 255 bytes"
    )]
    KeyPrefix(String),
}
