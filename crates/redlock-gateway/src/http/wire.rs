//! The JSON bodies, their schemas, and conversions from the core's types, which are not
//! serializable. `extract` checks what requests ask for; `error` has the texts of errors.
//!
//! Optional fields are omitted, never null: several client generators drop or mistype nullable
//! fields.

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
    /// How long the lock lives without an extension, in milliseconds: from 10 to the configured
    /// maximum (300000 by default). Without it the configured default applies (30000).
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = u32, required = false, minimum = 10, maximum = 86400000, example = 30000)]
    pub ttl_ms: Option<Value>,
    /// How long to wait while the lock is held, in milliseconds, up to the configured
    /// maximum (25000 by default). One gateway serves the waiters of a lock in order of arrival.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = u32, required = false, minimum = 0, maximum = 86400000, example = 10000)]
    pub wait_ms: Option<Value>,
    /// A label for people, shown to anybody who asks who holds the lock. At most 255 characters,
    /// without control characters, line separators and bidirectional controls.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = String, required = false, max_length = 255, pattern = r"^[^\x00-\x1f\x7f-\x9f]*$", example = "nightly-report on host-7")]
    pub owner: Option<Value>,
    /// Stored beside the lock for people. Strings only; keys and values together have at most 1024
    /// bytes, without the control characters U+007F to U+009F, line separators (U+2028, U+2029) and
    /// bidirectional controls.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = BTreeMap<String, String>, required = false)]
    pub metadata: Option<Value>,
}

/// How long to extend. Unknown fields are refused.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({ "ttl_ms": 30000 }))]
pub struct ExtendBody {
    /// The lock lives at least this many milliseconds from now; it is never shortened. From 10 to
    /// the configured maximum. Without it the configured default applies (30000).
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = u32, required = false, minimum = 10, maximum = 86400000, example = 30000)]
    pub ttl_ms: Option<Value>,
}

/// Keeps an explicit null as a value, to be refused: `"ttl_ms": null` must not silently give the
/// default.
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
    /// The secret to send as `Lock-Token` to extend or release.
    pub token: String,
    /// Larger than the fencing token of every earlier grant of this lock. Send it to the resource
    /// with every write. The resource must refuse a token that is smaller than one it has seen.
    /// Below 2^53.
    #[schema(format = "int64")]
    pub fencing_token: u64,
    /// The TTL that was granted, in milliseconds.
    pub ttl_ms: u32,
    /// How long the lock may be trusted, in milliseconds: until receipt + `validity_ms` − (own
    /// round trip − `elapsed_ms`). More than `ttl_ms` after an extension that was shorter than the
    /// time left.
    pub validity_ms: u32,
    /// Time in the gateway from the request until `validity_ms` was computed, in milliseconds,
    /// waiting included.
    #[schema(format = "int64")]
    pub elapsed_ms: u64,
    /// When the validity ends by the gateway's wall clock, RFC 3339. For people; programs count
    /// `validity_ms`.
    #[schema(format = DateTime)]
    pub expires_at: String,
    /// The label from the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub owner: Option<String>,
    /// Number of nodes that had agreed when the lock was decided.
    pub nodes_granted: u32,
    /// Number of configured nodes.
    pub nodes_total: u32,
}

impl Lease {
    pub fn new(name: &LockName, view: &LeaseView, owner: Option<String>) -> Self {
        Self {
            name: name.as_str().into(),
            token: view.token.expose(),
            fencing_token: view.token.fencing().get(),
            ttl_ms: view.ttl.millis(),
            // Both are rounded down, which can only shorten the time that a client trusts.
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
    /// Held by a majority; free: nobody can have a majority; unknown: too few nodes answered.
    pub state: LockStateBody,
    /// The holder's label.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub owner: Option<String>,
    /// The holder's metadata.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(required = false)]
    pub metadata: BTreeMap<String, String>,
    /// The name of the API key that acquired the lock. Absent where there are no keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub key: Option<String>,
    /// The holder's fencing token. Absent when another Redlock client holds the lock.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64, format = "int64", required = false)]
    pub fencing_token: Option<u64>,
    /// Time until the majority's lock ends unless it is extended. Absent when it has no expiry.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = u64, format = "int64", required = false)]
    pub expires_in_ms: Option<u64>,
    /// When the lock was acquired, by the wall clock of the acquiring gateway, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, format = DateTime, required = false)]
    pub acquired_at: Option<String>,
    /// The answer of each node. Absent in listings.
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
    /// `host:port`. Only a number, `node-1`, for a key without the metrics permission.
    pub node: String,
    /// `agreed`, `refused`, `held`, `free`, `pending` (the answer was not needed), or why there is
    /// no answer: `timeout`, `down`, `quarantined`, `clock` (the clocks are too far apart),
    /// `overloaded`, `error`.
    pub state: String,
    /// A sentence for people. Only for keys with the metrics permission, or where there are no
    /// keys.
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

    /// Replaces name and detail, which reveal addresses, by a number for callers who may not see
    /// nodes.
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
    /// `with_names`: whether the caller may see the names of the nodes.
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
    /// Held locks, in no particular order; `unknown` where too few nodes answered. Locks that come
    /// or go during a listing may be missed or repeated.
    pub locks: Vec<LockStatus>,
    /// Send it as `cursor` to get the next page. Absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub next_cursor: Option<String>,
}

impl LockList {
    /// `shows`: whether the caller may see more of a lock than that it is held.
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
    /// `ready`, `no_quorum` (too few nodes may vote) or `draining` (shutting down); in `/livez`
    /// only `alive`.
    pub status: String,
    /// Every node, and whether it may vote. Only for callers that may see metrics.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Vec<NodeHealth>, required = false)]
    pub nodes: Option<Vec<NodeHealth>>,
    /// Advice for operators when the gateway is not ready: a page of its documentation, and the
    /// section.
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
    /// `admitted` (votes), `catching_up` (votes, and gets the locks granted while it was away:
    /// restart no other node yet), `quarantined` (waits until no lock that it may have lost can
    /// live), `connecting` (no connection; retried) or `refused` (may not vote until an operator
    /// acts).
    pub state: String,
    /// The start of this state, by this gateway's wall clock, RFC 3339.
    #[schema(format = DateTime)]
    pub since: String,
    /// The end of a quarantine, RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, format = DateTime, required = false)]
    pub until: Option<String>,
    /// The reason for the state, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub detail: Option<String>,
    /// Advice for operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub advice: Option<String>,
    /// What runs the rules of locks on the node: `native` (the module is loaded; faster) or `lua`
    /// (a script).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String, required = false)]
    pub engine: Option<String>,
    /// Restarts of the node that this gateway has seen.
    #[schema(format = "int64")]
    pub restarts: u64,
    /// Keys that the node has evicted since its start, by its last report. Above 0, locks may be
    /// lost.
    #[schema(format = "int64")]
    pub evicted_keys: u64,
}

impl Health {
    pub fn alive() -> Self {
        Self { status: "alive".into(), nodes: None, runbook: None }
    }

    /// Without the nodes, whose addresses not everybody may see.
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

/// JSON with a newline, for people who read it in a terminal.
pub fn json_line(body: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    // Enough room for an answer about one lock.
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
