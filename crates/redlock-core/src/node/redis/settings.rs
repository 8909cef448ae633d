//! What a real master's link and worker are told.

use std::time::Duration;

use super::tls::TlsSettings;
use crate::node::NodeSettings;
use crate::node::admission::ClusterConfig;

/// A question or call that takes longer, or longer than twice the node time-out, ends the session: rounds have given up
/// by then.
const CALL_DEADLINE: Duration = Duration::from_secs(1);

/// What the link and the worker of a master need to know.
#[derive(Clone)]
pub struct RedisSettings {
    /// What the scripts need.
    pub node: NodeSettings,
    /// Prefix of all keys; also names the marker.
    pub key_prefix: String,
    /// What the marker must say.
    pub cluster_config: ClusterConfig,
    /// What all gateways call the node in its marker; its address when `None`.
    pub node_name: Option<String>,
    /// Whether an operator says that the cluster is brand-new, see [`Redlock::bootstrap`](crate::Redlock::bootstrap).
    pub bootstrap: bool,
    /// How long rounds wait for the node.
    pub node_timeout: Duration,
    /// For nodes whose URL wants TLS.
    pub tls: TlsSettings,
}

impl RedisSettings {
    pub(super) fn call_deadline(&self) -> Duration {
        CALL_DEADLINE.max(self.node_timeout * 2)
    }
}
