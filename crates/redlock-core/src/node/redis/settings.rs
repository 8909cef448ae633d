//! What a real master's link and worker are told.

use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "tls")]
use super::tls::TlsSettings;
use crate::node::NodeRegistry;
use crate::node::NodeSettings;
use crate::node::eligibility::ClusterConfig;

/// A question or call that takes longer, or longer than twice the node time-out, ends the session: rounds have given up
/// by then.
const CALL_DEADLINE: Duration = Duration::from_secs(1);

/// What the link and the worker of a master need to know, from [`Settings::of_masters`](crate::Settings::of_masters): what
/// masters and locks must agree on stands there once.
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisSettings {
    /// What the scripts need.
    pub(crate) node: NodeSettings,
    /// Prefix of all keys; also names the marker.
    pub(crate) key_prefix: String,
    /// What the marker must say.
    pub(crate) cluster_config: ClusterConfig,
    /// How long rounds wait for the node.
    pub(crate) node_timeout: Duration,
    /// By how much of the time that passes clocks may run apart.
    pub(crate) drift_factor: f64,
    /// Shared by the masters of one gateway.
    pub(crate) node_registry: Arc<NodeRegistry>,
    /// What all gateways call the node in its marker; its address when `None`.
    pub node_name: Option<String>,
    /// Whether an operator says that the cluster is brand-new, see [`Redlock::bootstrap`](crate::Redlock::bootstrap).
    pub bootstrap: bool,
    /// For nodes whose URL wants TLS.
    #[cfg(feature = "tls")]
    pub tls: TlsSettings,
}

impl RedisSettings {
    /// What the marker must say.
    pub fn cluster_config(&self) -> &ClusterConfig {
        &self.cluster_config
    }

    /// With the waits of another clock skew, under the same marker.
    #[cfg(feature = "mutation-testing")]
    #[doc(hidden)]
    pub fn waiting_for_skew(mut self, max_clock_skew: Duration) -> Self {
        self.node = self.node.with_max_clock_offset(max_clock_skew);
        self
    }

    /// With quarantines that end at once.
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
