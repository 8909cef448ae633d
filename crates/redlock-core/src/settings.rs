//! What a [`Redlock`](crate::Redlock) is made of besides its nodes, checked before anything is started.

use std::time::Duration;

use crate::model::quorum::{NodeCountError, Quorum};
use crate::model::types::Ttl;
use crate::model::validity::longest_round;
pub use crate::node::Env;
use crate::node::NodeSettings;
#[cfg(feature = "redis")]
use crate::node::eligibility::ClusterConfig;
#[cfg(feature = "redis")]
use crate::node::redis::{RedisSettings, RedisUrlError};

/// What all processes of a cluster must agree on (the first three), and how patient this one is.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Put before every lock name to make its key. Must not contain braces.
    pub key_prefix: String,
    /// The longest TTL anybody may ask for. With D it sets the quarantine of a node that may have lost locks.
    pub max_ttl: Ttl,
    /// What each node is told; in it D, how far a fencing token may be from a node's own time.
    pub node: NodeSettings,
    /// How long a round waits for a node; a tenth of the TTL if that is less.
    pub node_timeout: Duration,
    /// Part of a TTL that clocks running at different rates may eat.
    pub drift_factor: f64,
    /// How many may wait for locks, see [`Redlock::acquire_within`](crate::Redlock::acquire_within).
    pub max_waiters: usize,
    /// How many of them may wait for the same one.
    pub max_waiters_per_lock: usize,
}

impl Settings {
    /// What the masters of this node set are to know: the same as the locks on them.
    #[cfg(feature = "redis")]
    pub fn of_masters(&self, cluster: &str) -> RedisSettings {
        let Self { key_prefix, max_ttl, node_timeout, drift_factor, node, .. } = self.clone();
        let cluster_config = ClusterConfig::new(cluster, max_ttl.duration(), node.max_clock_skew);
        RedisSettings {
            node,
            key_prefix,
            cluster_config,
            node_timeout,
            drift_factor,
            node_registry: Default::default(),
            node_name: None,
            bootstrap: false,
            #[cfg(feature = "tls")]
            tls: Default::default(),
        }
    }

    /// The quorum of nodes with these names, if nodes and settings are fit to hold locks.
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
    /// `lock:`, 5 minutes, D = 2 s, 50 ms, 1 %, 10,000 waiters, 1,024 for one lock.
    fn default() -> Self {
        Self {
            key_prefix: "lock:".into(),
            max_ttl: Ttl::from_millis(300_000).expect("within the limits of a Ttl"),
            node: NodeSettings::default(),
            node_timeout: Duration::from_millis(50),
            drift_factor: 0.01,
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
    /// No address of a master.
    #[cfg(feature = "redis")]
    #[error("node number {number}: {error}")]
    NodeUrl {
        /// Its place among the addresses, from 1.
        number: usize,
        /// What is wrong with it.
        error: RedisUrlError,
    },
    /// A node would be let in again before the longest locks of the others have ended.
    #[error(
        "node {node} was made for a max_ttl of {of_node:?}, and locks may live for {of_locks:?}; both must be the same"
    )]
    MaxTtl {
        /// The node.
        node: String,
        /// What its quarantine covers.
        of_node: Duration,
        /// What is asked for.
        of_locks: Duration,
    },
    /// Outside `0.0..=0.5`.
    #[error("a drift factor of {0} is outside 0.0 to 0.5")]
    DriftFactor(f64),
    /// Nothing could ever answer in time.
    #[error("a node time-out of {0:?} is below 1 ms")]
    NodeTimeout(Duration),
    /// Rounds that take longer are not believed.
    #[error(
        "a node time-out of {given:?} is longer than a round may take: {longest:?}, 3 times what clocks may differ by and at least 5 s"
    )]
    LongNodeTimeout {
        /// What was asked for.
        given: Duration,
        /// The most.
        longest: Duration,
    },
    /// Braces would mix up lock keys with the keys kept beside them.
    #[error(
        "the key prefix {0:?} contains a brace or a control character, or is longer than 255 bytes"
    )]
    KeyPrefix(String),
}
