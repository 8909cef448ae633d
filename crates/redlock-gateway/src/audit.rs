//! The record of who did what, for people who have to answer for it: one JSON object per line,
//! apart from the log.
//!
//! It always has denied requests and forced releases. Of repeated refusals to one client it has the
//! first and their number. With `--audit-log` it also has every change of a lock, tried or done. It
//! never has a token, a key or a hash of a key. A line is handed to the writer before the answer
//! leaves, or when the client goes away midway.

mod file;

use parking_lot::{Mutex, MutexGuard};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;

pub use self::file::{AuditError, AuditFile, TARGET};
use crate::overload::refusals::Summary;
use crate::proxies::ClientAddress;

/// The subject of a request, as far as the request got.
#[derive(Debug, Default)]
pub struct AuditEntry {
    /// The principal, or the key name that the request claimed without proof.
    pub who: Option<String>,
    pub what: Option<&'static str>,
    /// The lock's name.
    pub lock: Option<String>,
    /// The label of the holder, or of the request that wants the lock.
    pub owner: Option<String>,
    /// Whether the request changes a lock.
    pub changes: bool,
    /// Whether the request takes a lock away from its holder.
    pub forces: bool,
    /// Whether the nodes have been asked to do so.
    pub is_sent: bool,
    /// Whether the request has passed the fair queue of its principal.
    pub had_turn: bool,
}

/// The entry of a request. Every layer that the request passes adds to it.
#[derive(Clone)]
pub struct AuditContext {
    entry: Arc<Mutex<AuditEntry>>,
    audit: Arc<Audit>,
}

impl AuditContext {
    pub fn entry(&self) -> MutexGuard<'_, AuditEntry> {
        self.entry.lock()
    }

    /// Whether changes of locks must wait until they can be recorded.
    pub fn is_refusing(&self) -> bool {
        self.audit.file.as_ref().is_some_and(AuditFile::is_refusing)
    }
}

#[derive(Serialize)]
struct AuditLine<'a> {
    time: String,
    /// Absent when the sender is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    who: Option<&'a str>,
    what: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    lock: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<&'a str>,
    outcome: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    /// Number of refusals that this line sums up, after a first one with its own line.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
    /// The client's address, with its port where known. Absent in a sum over many addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    /// The trusted proxy that named the client's address.
    #[serde(skip_serializing_if = "Option::is_none")]
    proxy: Option<String>,
}

/// How a request ended.
#[derive(Debug, Clone, Copy)]
pub struct RequestEnd<'a> {
    /// The HTTP status of the answer.
    pub status: u16,
    /// The code of the problem, if the answer is one.
    pub problem: Option<&'a str>,
    /// Whether the sender was not allowed in, or not allowed to do this.
    pub is_denied: bool,
}

/// Destination of audit lines.
pub struct Audit {
    file: Option<AuditFile>,
}

impl Audit {
    /// Writes to the log, with the target `redlock_audit`. Records only denied and forced requests.
    pub fn logged() -> Self {
        Self { file: None }
    }

    /// Appends to a file. With `refuses`, no lock may change while the file cannot be written.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn to_file(path: &Path, refuses: bool) -> Result<Self, AuditError> {
        Ok(Self { file: Some(AuditFile::start(path, refuses)?) })
    }

    /// The audit file, if there is one. With a file, every change of a lock is recorded.
    pub fn file(&self) -> Option<&AuditFile> {
        self.file.as_ref()
    }

    /// Writes a line if the request has to be recorded.
    fn record(&self, end: Option<RequestEnd<'_>>, request: &AuditGuard) {
        let entry = request.context.entry();
        let is_denied = end.is_some_and(|end| end.is_denied);
        if !(is_denied || entry.forces || entry.changes && self.file.is_some()) {
            return;
        }
        let outcome = match end {
            None if entry.is_sent => "client_gone_but_sent",
            None => "client_gone",
            Some(RequestEnd { problem: Some(code), .. }) => code,
            Some(RequestEnd { .. }) => "done",
        };
        self.write(&AuditLine {
            time: now(),
            who: entry.who.as_deref(),
            what: entry.what.unwrap_or("request"),
            lock: entry.lock.as_deref(),
            owner: entry.owner.as_deref(),
            outcome,
            status: end.map(|end| end.status),
            refused: None,
            request_id: Some(&request.request_id),
            address: request.address.map(|address| address.to_string()),
            proxy: request.proxy.map(|proxy| proxy.to_string()),
        });
    }

    /// Writes a line that sums up refusals after the first, which has its own line.
    pub fn refused(&self, Summary { who, what, refused, address }: &Summary) {
        self.write(&AuditLine {
            time: now(),
            who: who.as_deref(),
            what: "requests",
            lock: None,
            owner: None,
            outcome: what,
            status: None,
            refused: Some(*refused),
            request_id: None,
            address: address.map(|address| address.to_string()),
            proxy: None,
        });
    }

    fn write(&self, line: &AuditLine<'_>) {
        match &self.file {
            None => tracing::info!(
                target: TARGET,
                who = line.who,
                what = line.what,
                lock = line.lock,
                owner = line.owner,
                outcome = line.outcome,
                status = line.status,
                refused = line.refused,
                request_id = line.request_id,
                address = line.address,
                proxy = line.proxy,
                "audit"
            ),
            Some(file) => file.write(serde_json::to_string(line).unwrap_or_default()),
        }
    }
}

fn now() -> String {
    humantime::format_rfc3339_micros(SystemTime::now()).to_string()
}

/// A request that may have to be recorded. Dropped before its end, it is recorded as `client_gone`.
pub struct AuditGuard {
    context: AuditContext,
    request_id: String,
    address: Option<ClientAddress>,
    proxy: Option<SocketAddr>,
    is_ended: bool,
}

impl AuditGuard {
    pub fn new(
        audit: Arc<Audit>,
        request_id: String,
        address: Option<ClientAddress>,
        proxy: Option<SocketAddr>,
    ) -> Self {
        Self {
            context: AuditContext { entry: Arc::default(), audit },
            request_id,
            address,
            proxy,
            is_ended: false,
        }
    }

    pub fn context(&self) -> AuditContext {
        self.context.clone()
    }

    /// The principal, or the key name that the request claimed without proof.
    pub fn who(&self) -> Option<String> {
        self.context.entry().who.clone()
    }

    pub fn had_turn(&self) -> bool {
        self.context.entry().had_turn
    }

    /// Ends the request without a line: a sum over several refusals counts it.
    pub fn summed_up(mut self) {
        self.is_ended = true;
    }

    pub fn end(mut self, end: RequestEnd<'_>) {
        self.is_ended = true;
        self.record(Some(end));
    }

    fn record(&self, end: Option<RequestEnd<'_>>) {
        self.context.audit.record(end, self);
    }
}

impl Drop for AuditGuard {
    fn drop(&mut self) {
        if !self.is_ended {
            self.record(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_dropped_midway_is_recorded() {
        let path = std::env::temp_dir().join(format!("redlock-audit-{}", std::process::id()));
        let audit = Arc::new(Audit::to_file(&path, false).unwrap());
        let open = |forces, changes| {
            let open = AuditGuard::new(audit.clone(), "id\r\n".into(), None, None);
            *open.context().entry() =
                AuditEntry { lock: Some("a".into()), forces, changes, ..AuditEntry::default() };
            open
        };
        drop(open(true, true));
        open(false, false).end(RequestEnd { status: 200, problem: None, is_denied: false });
        open(false, false).end(RequestEnd {
            status: 403,
            problem: Some("forbidden"),
            is_denied: true,
        });
        audit.file().unwrap().finish().await;
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(
            (&lines[0]["outcome"], &lines[1]["outcome"]),
            (&"client_gone".into(), &"forbidden".into())
        );
        assert_eq!((&lines[0]["request_id"], lines[0].get("status")), (&"id\r\n".into(), None));
    }
}
