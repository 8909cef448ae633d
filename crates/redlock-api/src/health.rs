//! Bodies of the probes.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// Whether to send requests here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({ "status": "ready", "nodes": [{
    "node": "10.0.0.1:6379", "state": "admitted", "since": "2025-11-21T11:39:54.822Z", "restarts": 0, "evicted_keys": 0
}] })))]
pub struct Health {
    /// `ready`, `no_quorum` (too few nodes may vote) or `draining` (shutting down); in `/livez`
    /// only `alive`.
    pub status: String,
    /// Every node, and whether it may vote. Only for callers that may see metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<NodeHealth>, required = false))]
    pub nodes: Option<Vec<NodeHealth>>,
    /// Advice for operators when the gateway is not ready: the address of a section of its
    /// documentation, absolute or relative to the gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false, example = "/docs/symptoms#quorum-lost"))]
    pub runbook: Option<Cow<'static, str>>,
}

/// What one node is doing, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema), schema(example = json!({
    "node": "10.0.0.1:6379", "state": "quarantined", "since": "2025-11-21T11:39:54.822Z", "until": "2025-11-21T11:44:56.822Z",
    "detail": "it was restarted and may have lost locks; a crash can lose locks (appendonly no)",
    "advice": "wait; with appendonly yes, appendfsync always and no-appendfsync-on-rewrite no the next restart takes 3 s",
    "engine": "lua", "restarts": 1, "evicted_keys": 0
})))]
pub struct NodeHealth {
    /// `host:port`.
    pub node: String,
    /// `admitted` (votes), `catching_up` (votes, and gets the locks granted while it was away:
    /// restart no other node yet), `quarantined` (waits until no lock that it may have lost can
    /// live), `connecting` (no connection; retried) or `refused` (may not vote until an operator
    /// acts).
    pub state: String,
    /// The start of this state, by this gateway's wall clock, RFC 3339.
    #[cfg_attr(feature = "openapi", schema(format = DateTime))]
    pub since: String,
    /// The end of a quarantine, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime, required = false))]
    pub until: Option<String>,
    /// The reason for the state, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub detail: Option<String>,
    /// Advice for operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub advice: Option<String>,
    /// What runs the rules of locks on the node: `native` (the module is loaded; faster) or `lua`
    /// (a script).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, required = false))]
    pub engine: Option<String>,
    /// Restarts of the node that this gateway has seen.
    #[cfg_attr(feature = "openapi", schema(format = "int64"))]
    pub restarts: u64,
    /// Keys that the node has evicted since its start, by its last report. Above 0, locks may be
    /// lost.
    #[cfg_attr(feature = "openapi", schema(format = "int64"))]
    pub evicted_keys: u64,
}
