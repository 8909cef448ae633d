//! What travels: the JSON bodies and their schemas, and the conversions from the core's types, which are not serializable.
//! What requests ask for is checked in `extract`, errors are worded in `error`.
//!
//! Optional fields are omitted, never null: several client generators drop or mistype nullable fields.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use redlock_core::node::NodeStatus;
use redlock_core::{HeldBy, Inspection, LockName, LockState, NodeReport, NodeView};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::gateway::{LeaseView, ListView, Readiness};
use crate::info::LockMetadata;
use crate::remedy::{in_flags, section};

/// What to acquire. Every field may be omitted; unknown fields are refused.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "ttl_ms": 30000, "owner": "nightly-report on host-7" }))]
pub struct AcquireBody {
    /// How long the lock lives without an extension, in milliseconds, from 10 to the configured maximum (by default
    /// 300000). The default is configured too (30000).
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = u32, required = false, minimum = 10, maximum = 86400000, example = 30000)]
    pub ttl_ms: Option<Value>,
    /// How long to wait for the lock while somebody else holds it, in milliseconds, up to the configured maximum (by default
    /// 25000). Those who wait for a lock at one gateway get it in the order in which they came.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = u32, required = false, minimum = 0, maximum = 86400000, example = 10000)]
    pub wait_ms: Option<Value>,
    /// A label for people: shown to whoever asks who holds the lock. At most 255 characters, none of them a control character,
    /// a line separator or a bidirectional control.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = String, required = false, max_length = 255, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$", example = "nightly-report on host-7")]
    pub owner: Option<Value>,
    /// Stored beside the lock for people: strings only, keys and values together at most 1024 bytes, without the
    /// control characters U+007F to U+009F, line separators (U+2028, U+2029) and bidirectional controls.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = BTreeMap<String, String>, required = false)]
    pub metadata: Option<Value>,
}

/// For how long to extend. Unknown fields are refused.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "ttl_ms": 30000 }))]
pub struct ExtendBody {
    /// The lock lives at least so many milliseconds from now; it is never shortened. From 10 to the configured maximum; left out,
    /// the configured default (30000).
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = u32, required = false, minimum = 10, maximum = 86400000, example = 30000)]
    pub ttl_ms: Option<Value>,
}

/// An explicit null is a value, and a wrong one: `"ttl_ms": null` must not silently give the default.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// A granted or extended lock.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({
    "name": "reports/nightly", "token": "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "fencing_token": 1763725165123456u64, "ttl_ms": 30000, "validity_ms": 29696, "elapsed_ms": 1,
    "expires_at": "2025-11-21T11:39:54.822Z", "owner": "nightly-report on host-7", "nodes_granted": 3, "nodes_total": 5
}))]
pub struct Lease {
    /// The lock's name.
    pub name: String,
    /// Show it in the `Lock-Token` header to extend or release. A secret.
    pub token: String,
    /// Larger than that of every earlier grant of this lock. Give it to the resource with every write, and let the
    /// resource refuse smaller ones than it has seen. Below 2^53.
    #[schema(format = "int64")]
    pub fencing_token: u64,
    /// For how long the lock was granted, in milliseconds.
    pub ttl_ms: u32,
    /// For how long it may be trusted, in milliseconds: until receipt + `validity_ms` − (own round trip − `elapsed_ms`). More
    /// than `ttl_ms` after an extension by less than was left.
    pub validity_ms: u32,
    /// How long the request took inside the gateway until `validity_ms` was counted, in milliseconds; waiting included.
    #[schema(format = "int64")]
    pub elapsed_ms: u64,
    /// When the validity ends by the gateway's wall clock, RFC 3339. For people; count `validity_ms` instead.
    #[schema(format = DateTime)]
    pub expires_at: String,
    /// The label that the request gave.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub owner: Option<String>,
    /// Nodes that had agreed when the decision fell.
    pub nodes_granted: u32,
    /// All configured nodes.
    pub nodes_total: u32,
}

impl Lease {
    pub fn new(name: &LockName, view: &LeaseView, owner: Option<String>) -> Self {
        Self {
            name: name.as_str().into(),
            token: view.token.expose(),
            fencing_token: view.token.fencing().get(),
            ttl_ms: view.ttl.millis(),
            // Rounded down, both: that only ever shortens what a client may trust.
            validity_ms: view.validity.as_millis() as u32,
            elapsed_ms: view.elapsed.as_millis() as u64,
            expires_at: rfc3339(view.expires_at),
            owner,
            nodes_granted: view.nodes_granted as u32,
            nodes_total: view.nodes_total as u32,
        }
    }
}

fn rfc3339(micros: u64) -> String {
    let time: SystemTime = UNIX_EPOCH + Duration::from_micros(micros);
    humantime::format_rfc3339_millis(time).to_string()
}

/// A lock as a majority of the nodes sees it. Never the token.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({
    "name": "reports/nightly", "state": "held", "owner": "nightly-report on host-7", "metadata": { "run": "4711" },
    "fencing_token": 1763725165123456u64, "expires_in_ms": 21400, "acquired_at": "2025-11-21T11:39:25.123Z",
    "nodes": [{ "node": "10.0.0.1:6379", "state": "held" }]
}))]
pub struct LockStatus {
    /// The lock's name.
    pub name: String,
    /// Held by a majority, free (nobody can have a majority), or unknown (too few nodes answered).
    pub state: LockStateBody,
    /// The holder's label.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub owner: Option<String>,
    /// What its holder stored beside it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(required = false)]
    pub metadata: BTreeMap<String, String>,
    /// The name of the API key that acquired it; absent where there are no keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub key: Option<String>,
    /// The holder's fencing token; absent when another Redlock client holds the lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64, format = "int64", required = false)]
    pub fencing_token: Option<u64>,
    /// When it stops being held by a majority unless it is extended; absent when it has no expiry.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64, format = "int64", required = false)]
    pub expires_in_ms: Option<u64>,
    /// When it was acquired, by the acquiring gateway's wall clock, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, format = DateTime, required = false)]
    pub acquired_at: Option<String>,
    /// What each node has; absent in listings.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Vec<NodeAnswerBody>, required = false)]
    pub nodes: Option<Vec<NodeAnswerBody>>,
}

/// The majority's view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
#[schema(as = LockState, example = "held")]
pub enum LockStateBody {
    Held,
    Free,
    Unknown,
}

/// One node's part in an answer.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[schema(as = NodeAnswer, example = json!({ "node": "10.0.0.1:6379", "state": "timeout", "detail": "no answer within 50ms" }))]
pub struct NodeAnswerBody {
    /// `host:port`; for a key without the metrics permission only a number, `node-1`.
    pub node: String,
    /// `agreed`, `refused`, `held`, `free`, `pending` (the answer was not needed), or why there was none: `timeout`,
    /// `down`, `quarantined`, `clock` (the times are too far apart), `overloaded`, `error`.
    pub state: String,
    /// A sentence for people; for a key with the metrics permission, or where there are no keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub detail: Option<String>,
}

impl NodeAnswerBody {
    pub fn of_report(report: NodeReport) -> Self {
        use redlock_core::NodeAnswer as A;
        let (state, detail) = match report.answer {
            A::Agreed => ("agreed", None),
            A::Refused(why) => ("refused", Some(why.to_owned())),
            A::Failed(failure) => (failure.reason.as_str(), Some(failure.detail)),
            A::Pending => ("pending", None),
        };
        Self {
            node: report.node,
            state: state.into(),
            detail: detail.filter(|detail| !detail.is_empty()),
        }
    }

    /// To those who may not know the nodes each is a number: names, and what a failure says, are addresses.
    #[must_use]
    pub fn shown(self, at: usize, with_names: bool) -> Self {
        if with_names {
            self
        } else {
            Self { node: format!("node-{}", at + 1), detail: None, ..self }
        }
    }
}

impl LockStatus {
    /// `with_names`: whether the nodes' names are for whoever asks.
    pub fn new(name: &LockName, inspection: Inspection, with_names: bool) -> Self {
        let (state, by) = match inspection.state {
            LockState::Held(by) => (LockStateBody::Held, Some(by)),
            LockState::Free => (LockStateBody::Free, None),
            LockState::Unknown => (LockStateBody::Unknown, None),
        };
        let nodes = inspection.nodes.into_iter().enumerate().map(|(at, (node, view))| {
            let (state, detail) = match view {
                NodeView::Held => ("held", None),
                NodeView::Free => ("free", None),
                NodeView::Pending => ("pending", None),
                NodeView::Failed(failure) => (failure.reason.as_str(), Some(failure.detail)),
            };
            NodeAnswerBody { node, state: state.into(), detail }.shown(at, with_names)
        });
        Self { nodes: Some(nodes.collect()), ..Self::of(name, state, by) }
    }

    fn of(name: &LockName, state: LockStateBody, by: Option<HeldBy>) -> Self {
        let by = by.unwrap_or_default();
        let LockMetadata { owner, key, metadata } = LockMetadata::read(&by.info);
        Self {
            name: name.as_str().into(),
            state,
            owner,
            metadata,
            key,
            fencing_token: by.fencing.map(|token| token.get()),
            expires_in_ms: by.expires_in.map(|left| left.as_millis() as u64),
            acquired_at: by.fencing.map(|token| rfc3339(token.get())),
            nodes: None,
        }
    }
}

/// A page of held locks.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({ "locks": [{ "name": "reports/nightly", "state": "held", "expires_in_ms": 21400 }] }))]
pub struct LockList {
    /// Locks that are held, or `unknown` where too few nodes answered; in no particular order. Locks that come or go during a listing may be missed or repeated.
    pub locks: Vec<LockStatus>,
    /// Give it back as `cursor` for the next page; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub next_cursor: Option<String>,
}

impl LockList {
    /// `shows`: whether more than that it is held is for whoever asks.
    pub fn new(page: ListView, shows: impl Fn(&LockName) -> bool) -> Self {
        let status = |(name, state)| match state {
            LockState::Held(_) if !shows(&name) => LockStatus::of(&name, LockStateBody::Held, None),
            LockState::Held(by) => LockStatus::of(&name, LockStateBody::Held, Some(by)),
            LockState::Free => LockStatus::of(&name, LockStateBody::Free, None),
            LockState::Unknown => LockStatus::of(&name, LockStateBody::Unknown, None),
        };
        Self { locks: page.locks.into_iter().map(status).collect(), next_cursor: page.next }
    }
}

/// Whether to send requests here.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({ "status": "ready", "nodes": [{
    "node": "10.0.0.1:6379", "state": "admitted", "since": "2025-11-21T11:39:54.822Z", "restarts": 0, "evicted_keys": 0
}] }))]
pub struct Health {
    /// `ready`, `no_quorum` (too few nodes may vote) or `draining` (shutting down); of the process alone: `alive`.
    pub status: String,
    /// Every node, and whether it may vote; only for those who may see metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Vec<NodeHealth>, required = false)]
    pub nodes: Option<Vec<NodeHealth>>,
    /// What an operator does when it is not ready: a page of the gateway's documentation and its section.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false, example = "operations.md#quorum-lost")]
    pub runbook: Option<&'static str>,
}

/// What one node is doing, and why.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({
    "node": "10.0.0.1:6379", "state": "quarantined", "since": "2025-11-21T11:39:54.822Z", "until": "2025-11-21T11:44:56.822Z",
    "detail": "it was restarted and may have lost locks; a crash can lose locks (appendonly no)",
    "advice": "wait; with appendonly yes, appendfsync always and no-appendfsync-on-rewrite no the next restart takes 3 s",
    "engine": "lua", "restarts": 1, "evicted_keys": 0
}))]
pub struct NodeHealth {
    /// `host:port`.
    pub node: String,
    /// `admitted` (it votes), `catching_up` (it votes, and locks that were granted while it was away are being set on it: restart
    /// no other node yet), `quarantined` (it waits until no lock that it may have lost can live), `connecting` (no
    /// connection; being retried) or `refused` (ineligible until somebody mends it).
    pub state: String,
    /// Since when, by this gateway's wall clock, RFC 3339.
    #[schema(format = DateTime)]
    pub since: String,
    /// When a quarantine ends, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, format = DateTime, required = false)]
    pub until: Option<String>,
    /// Why, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub detail: Option<String>,
    /// What an operator can do.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub advice: Option<String>,
    /// What runs the rules of locks on it: `native` (the module is loaded there; faster) or `lua` (a script).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub engine: Option<String>,
    /// Restarts of the node that this gateway has seen.
    #[schema(format = "int64")]
    pub restarts: u64,
    /// Keys that the node has evicted since its start, as it said last; above 0 locks may be lost.
    #[schema(format = "int64")]
    pub evicted_keys: u64,
}

impl Health {
    pub fn alive() -> Self {
        Self { status: "alive".into(), nodes: None, runbook: None }
    }

    /// Without the nodes, whose addresses are not for everybody.
    pub fn status_only(readiness: Readiness) -> Self {
        let (status, runbook) = match readiness {
            Readiness::Ready => ("ready", None),
            Readiness::NoQuorum => ("no_quorum", Some(section::QUORUM_LOST)),
            Readiness::Draining => ("draining", Some(section::DRAINING)),
        };
        Self { status: status.into(), nodes: None, runbook }
    }

    pub fn new(readiness: Readiness, nodes: Vec<(String, NodeStatus)>) -> Self {
        let said = |text: String| Some(text).filter(|text| !text.is_empty());
        let nodes = nodes.into_iter().map(|(node, status)| NodeHealth {
            node,
            state: status.state.as_str().to_owned(),
            since: rfc3339(status.since_micros),
            until: status.until_micros.map(rfc3339),
            detail: said(status.detail),
            advice: status.remedy.map(|remedy| in_flags(remedy).into_owned()),
            engine: status.engine.map(|engine| engine.as_str().to_owned()),
            restarts: status.restarts,
            evicted_keys: status.evicted_keys,
        });
        Self { nodes: Some(nodes.collect()), ..Self::status_only(readiness) }
    }
}

/// JSON and a newline, for people who read it in a terminal.
pub fn json_line(body: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    // Enough for an answer about one lock.
    let mut line = Vec::with_capacity(512);
    serde_json::to_writer(&mut line, body)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_field_is_refused_and_named() {
        let error = serde_json::from_str::<AcquireBody>("{\"ttl\":5000}").unwrap_err().to_string();
        assert!(error.contains("`ttl`") && error.contains("`ttl_ms`"), "{error}");
    }
}
