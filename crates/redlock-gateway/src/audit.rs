//! The record of who did what, for people who have to answer for it: one JSON object a line, apart from the log.
//!
//! In it are all requests that were denied and all forced releases, always; of many that were refused to the same client one
//! after the other, the first and their number; with a file of its own also everything that
//! changed a lock, or tried to. Never a token, a key or a hash of one. A line is handed over before its request is answered,
//! also when the client has gone away in the middle.

mod file;

use parking_lot::{Mutex, MutexGuard};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use serde::Serialize;

pub use self::file::{AuditFile, TARGET};
use crate::overload::refusals::Summary;
use crate::proxies::ClientAddress;

/// What a request is about, as far as it got.
#[derive(Debug, Default)]
pub struct AuditEntry {
    /// The principal, or that of which the name was claimed.
    pub who: Option<String>,
    pub what: Option<&'static str>,
    /// The lock's name.
    pub lock: Option<String>,
    /// The label of the holder, or of the request that wants the lock.
    pub owner: Option<String>,
    /// Whether it changes locks.
    pub changes: bool,
    /// Whether it takes a lock away from its holder.
    pub forces: bool,
    /// Whether the nodes have been told to.
    pub is_sent: bool,
    /// Whether it has had its turn, as its principal's.
    pub had_turn: bool,
}

/// The entry of a request, for everything that the request passes through to add to.
#[derive(Clone)]
pub struct AuditContext {
    entry: Arc<Mutex<AuditEntry>>,
    audit: Arc<Audit>,
}

impl AuditContext {
    pub fn entry(&self) -> MutexGuard<'_, AuditEntry> {
        self.entry.lock()
    }

    /// Whether what changes a lock has to wait until it can be recorded.
    pub fn is_refusing(&self) -> bool {
        self.audit.file.as_ref().is_some_and(AuditFile::is_refusing)
    }
}

#[derive(Serialize)]
struct AuditLine<'a> {
    time: String,
    /// Absent when nobody is known to have sent it.
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
    /// Requests that were refused one after the other and have no lines of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
    /// The client's, with its port where that is known. Absent in a sum over many addresses.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<String>,
    /// The trusted proxy that named the address.
    #[serde(skip_serializing_if = "Option::is_none")]
    proxy: Option<String>,
}

/// How a request ended.
#[derive(Debug, Clone, Copy)]
pub struct RequestEnd<'a> {
    /// As the client is told.
    pub status: u16,
    /// The code of the problem, if it ended with one.
    pub problem: Option<&'a str>,
    /// Whether it was refused for who sent it.
    pub is_denied: bool,
}

/// Where the lines go.
pub struct Audit {
    file: Option<AuditFile>,
}

impl Audit {
    /// Into the log, as `redlock_audit`; only what is denied or forced.
    pub fn logged() -> Self {
        Self { file: None }
    }

    /// To the end of a file. `refuses`: whether nothing that changes a lock may go on while it cannot be written.
    ///
    /// # Errors
    /// Why it cannot be opened.
    pub fn to_file(path: &Path, refuses: bool) -> Result<Self, String> {
        Ok(Self { file: Some(AuditFile::start(path, refuses)?) })
    }

    /// The file, where there is one: then everything that changes a lock is recorded.
    pub fn file(&self) -> Option<&AuditFile> {
        self.file.as_ref()
    }

    /// Writes a line, when this is something to write of.
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

    /// Sums up what was refused after the first, which has a line of its own.
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

/// A request that is to be recorded, at its end or when it is dropped before.
pub struct AuditGuard {
    context: AuditContext,
    request_id: String,
    address: Option<ClientAddress>,
    proxy: Option<SocketAddr>,
    ended: bool,
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
            ended: false,
        }
    }

    pub fn context(&self) -> AuditContext {
        self.context.clone()
    }

    /// The principal, or that of which the name was claimed.
    pub fn who(&self) -> Option<String> {
        self.context.entry().who.clone()
    }

    pub fn had_turn(&self) -> bool {
        self.context.entry().had_turn
    }

    /// Without a line: it is summed up with others.
    pub fn summed_up(mut self) {
        self.ended = true;
    }

    pub fn end(mut self, end: RequestEnd<'_>) {
        self.ended = true;
        self.record(Some(end));
    }

    fn record(&self, end: Option<RequestEnd<'_>>) {
        self.context.audit.record(end, self);
    }
}

impl Drop for AuditGuard {
    fn drop(&mut self) {
        if !self.ended {
            self.record(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_that_is_dropped_in_the_middle_is_recorded_too() {
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
