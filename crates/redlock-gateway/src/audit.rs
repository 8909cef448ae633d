//! The record of who did what, for people who have to answer for it: one JSON object per line,
//! apart from the log.
//!
//! The record always contains denied requests and forced releases. If one client is refused
//! repeatedly, the record contains the first refusals and a count of the others. With `--audit-log`
//! it also contains every change of a lock that was tried, done or not. It never contains a token,
//! a key or a hash of a key. The gateway hands a line to the writer before it sends the answer, or
//! when the client goes away midway.

mod file;

use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use redlock_core::SlotSet;
use serde::Serialize;
use tokio::sync::oneshot;

pub use self::file::{AuditError, AuditFile, TARGET};
use crate::overload::clients::Client;
use crate::overload::refusals::{Summary, Who};
use crate::proxies::ClientAddress;

/// Who asked for what, as far as the request got. A request that is refused early leaves fields
/// empty.
#[derive(Debug, Default)]
pub struct AuditEntry {
    pub who: Option<Who>,
    pub what: Option<&'static str>,
    /// The lock's name.
    pub lock: Option<String>,
    /// The slots of the lock that the request was granted, or that it releases. `None` for a lock
    /// without slots.
    pub slots: Option<SlotSet>,
    /// The label of the holder, or of the request that wants the lock.
    pub owner: Option<String>,
    /// Whether the request changes a lock.
    pub changes: bool,
    /// Whether the request takes a lock away from its holder.
    pub forces: bool,
    /// Whether the nodes have been asked to take the lock away.
    pub is_sent: bool,
    /// The client of the request's key. The request has passed the fair queue of this client.
    pub client: Option<Arc<Client>>,
    /// Who ends the record. `None`: the record ends with the head of the answer.
    pub taker: Option<oneshot::Sender<AuditGuard>>,
    /// The parts of a request that changes many locks. If there are parts, they have lines, and the
    /// request has none.
    pub parts: Vec<AuditPart>,
    /// Whether the refused parts have no line, because a line that sums up several refusals counts
    /// them.
    pub refused_are_summed_up: bool,
}

/// One of the locks that a request changes.
#[derive(Debug, Default)]
pub struct AuditPart {
    /// The lock's name. `None` if the name is invalid.
    pub lock: Option<String>,
    /// Whether the part uses a token of another principal.
    pub forces: bool,
    /// The HTTP status that the part would have by itself, and the code of its error. `None` if the
    /// client disconnected before the part was decided.
    pub end: Option<(u16, Option<&'static str>)>,
}

impl AuditPart {
    fn is_denied(&self) -> bool {
        self.end.is_some_and(|(status, _)| matches!(status, 401 | 403))
    }

    /// Whether nothing was tried.
    fn is_refused(&self) -> bool {
        self.is_denied() || self.end.is_some_and(|(status, _)| matches!(status, 400 | 429))
    }
}

/// Access to the entry of a request. Every layer that the request passes adds to the entry.
#[derive(Clone)]
pub struct AuditContext {
    entry: Arc<Mutex<AuditEntry>>,
    audit: Arc<Audit>,
}

impl AuditContext {
    pub fn entry(&self) -> MutexGuard<'_, AuditEntry> {
        self.entry.lock()
    }

    /// Records what happened to a deferred request, if changes of locks are recorded. `status`: that
    /// of a receiver's answer.
    pub fn record_later(&self, what: &str, lock: &str, outcome: &str, status: Option<u16>) {
        if self.audit.file.is_none() {
            return;
        }
        let entry = self.entry();
        self.audit.write(&AuditLine {
            time: now(),
            who: entry.who.as_ref().map(|who| &*who.name),
            what,
            lock: Some(lock),
            slots: None,
            owner: entry.owner.as_deref(),
            outcome,
            status,
            refused: None,
            request_id: None,
            address: None,
            proxy: None,
        });
    }

    /// Whether changes of locks must be refused now, because they could not be recorded.
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
    /// The numbers of the slots, such as `1,3`.
    #[serde(skip_serializing_if = "Option::is_none")]
    slots: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<&'a str>,
    outcome: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    /// Number of refusals that this line sums up. The refusals before them had lines of their own.
    /// In a line about a part of a request, the number includes that part.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_id: Option<&'a str>,
    /// The client's address, with its port where known. Absent in a line that sums up many
    /// addresses.
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
    /// The code of the error, if the answer is an error.
    pub problem: Option<&'a str>,
    /// Whether the gateway did not know the sender, or did not allow the sender to do this.
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
        if !entry.parts.is_empty() {
            self.record_parts(&entry, request);
            return;
        }
        let is_denied = end.is_some_and(|end| end.is_denied);
        if !(is_denied || entry.forces || entry.changes && self.file.is_some()) {
            return;
        }
        self.write(&request.line(&entry, end));
    }

    /// Writes a line for each part that has to be recorded. One line stands for all refused parts:
    /// it shows the first of them, and `refused` is the number of all of them.
    fn record_parts(&self, entry: &AuditEntry, request: &AuditGuard) {
        let is_counted =
            |part: &&AuditPart| part.is_denied() || part.is_refused() && self.file.is_some();
        let count = entry.parts.iter().filter(is_counted).count() as u64;
        let mut is_first = !entry.refused_are_summed_up;
        for part in &entry.parts {
            let is_refused = is_counted(&part);
            let is_recorded = if is_refused {
                std::mem::take(&mut is_first)
            } else {
                part.forces || self.file.is_some()
            };
            if !is_recorded {
                continue;
            }
            let end = part.end.map(|(status, problem)| RequestEnd {
                status,
                problem,
                is_denied: part.is_denied(),
            });
            let refused = (is_refused && count > 1).then_some(count);
            let outcome = outcome(end, false);
            let lock = part.lock.as_deref();
            self.write(&AuditLine { lock, outcome, refused, ..request.line(entry, end) });
        }
    }

    /// Writes a line that sums up the refusals that have no line of their own.
    pub fn refused(&self, Summary { who, what, refused, address }: &Summary) {
        self.write(&AuditLine {
            time: now(),
            who: who.as_deref(),
            what: "requests",
            lock: None,
            slots: None,
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
                slots = line.slots,
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

/// The outcome as a word. `is_sent`: see [`AuditEntry`].
fn outcome(end: Option<RequestEnd<'_>>, is_sent: bool) -> &str {
    match end {
        None if is_sent => "client_gone_but_sent",
        None => "client_gone",
        Some(RequestEnd { problem: Some(code), .. }) => code,
        Some(RequestEnd { status: 202, .. }) => "accepted",
        Some(RequestEnd { .. }) => "done",
    }
}

fn now() -> String {
    humantime::format_rfc3339_micros(SystemTime::now()).to_string()
}

/// A request that may have to be recorded. If the guard is dropped before the request has ended,
/// the client went away midway, and the outcome is `client_gone`.
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

    pub fn who(&self) -> Option<Who> {
        self.context.entry().who.clone()
    }

    /// The code of the first refused part, if any part was refused.
    pub fn refused_part(&self) -> Option<&'static str> {
        let entry = self.context.entry();
        entry.parts.iter().find(|part| part.is_refused()).and_then(|part| part.end?.1)
    }

    fn line<'a>(&'a self, entry: &'a AuditEntry, end: Option<RequestEnd<'a>>) -> AuditLine<'a> {
        AuditLine {
            time: now(),
            who: entry.who.as_ref().map(|who| &*who.name),
            what: entry.what.unwrap_or("request"),
            lock: entry.lock.as_deref(),
            slots: entry.slots.map(|slots| {
                slots.iter().map(|slot| slot.to_string()).collect::<Vec<_>>().join(",")
            }),
            owner: entry.owner.as_deref(),
            outcome: outcome(end, entry.is_sent),
            status: end.map(|end| end.status),
            refused: None,
            request_id: Some(&self.request_id),
            address: self.address.map(|address| address.to_string()),
            proxy: self.proxy.map(|proxy| proxy.to_string()),
        }
    }

    pub fn client(&self) -> Option<Arc<Client>> {
        self.context.entry().client.clone()
    }

    /// Ends the request without a line of its own: a line that sums up several refusals counts it.
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

impl fmt::Debug for AuditGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuditGuard").field("request_id", &self.request_id).finish_non_exhaustive()
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
