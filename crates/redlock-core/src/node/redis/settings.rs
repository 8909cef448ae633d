//! The settings of a real master's link and worker.

use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "tls")]
use super::tls::TlsSettings;
use crate::node::NodeRegistry;
use crate::node::NodeSettings;
use crate::node::eligibility::ClusterConfig;

/// The least time limit of a request or call; the limit is at least twice the node time-out. A
/// request that reaches the limit ends the session. Rounds wait for 800 ms or the node time-out, so
/// they have ended by then.
const CALL_DEADLINE: Duration = Duration::from_secs(1);

/// The settings of one master, from [`Settings::of_masters`](crate::Settings::of_masters). There
/// the caller gives the values that masters and locks must share, once for both.
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisSettings {
    /// The settings of the lock rules.
    pub(crate) node: NodeSettings,
    /// The prefix of all keys, including the marker's.
    pub(crate) key_prefix: String,
    /// The configuration that the marker must have.
    pub(crate) cluster_config: ClusterConfig,
    /// How long rounds wait for the node.
    pub(crate) node_timeout: Duration,
    /// The fraction of elapsed time by which a node's clock may run ahead of ours.
    pub(crate) drift_factor: f64,
    /// Shared by the masters of one gateway.
    pub(crate) node_registry: Arc<NodeRegistry>,
    /// The node's name in its marker, equal on all gateways; its address when `None`.
    pub node_name: Option<String>,
    /// Whether an operator declared the cluster brand-new, see
    /// [`Redlock::bootstrap`](crate::Redlock::bootstrap).
    pub bootstrap: bool,
    /// TLS settings for `rediss://` nodes.
    #[cfg(feature = "tls")]
    pub tls: TlsSettings,
}

impl RedisSettings {
    /// The configuration that the marker must have.
    pub fn cluster_config(&self) -> &ClusterConfig {
        &self.cluster_config
    }

    /// Makes this node wait as with another `max_clock_skew`, and leaves the marker unchanged.
    #[cfg(feature = "mutation-testing")]
    #[doc(hidden)]
    pub fn waiting_for_skew(mut self, max_clock_skew: Duration) -> Self {
        self.node = self.node.with_max_clock_skew(max_clock_skew);
        self
    }

    /// Ends quarantines at once.
    #[cfg(feature = "mutation-testing")]
    #[doc(hidden)]
    pub fn without_quarantine(mut self) -> Self {
        use crate::node::SafetyRules;
        self.node = self.node.with_rules(SafetyRules {
            quarantine_is_waited: false,
            returned_waits: false,
            ..self.node.rules()
        });
        self
    }

    pub(super) fn call_deadline(&self) -> Duration {
        CALL_DEADLINE.max(self.node_timeout * 2)
    }
}
