//! The record of who did what, for people who have to answer for it: one JSON object a line, apart from the log.
//!
//! In it are all requests that were denied and all forced releases, always; of many that were refused to the same client one
//! after the other, the first and their number; with a file of its own also everything that
//! changed a lock, or tried to. Never a token, a key or a hash of one. A line is written before its request is answered,
//! also when the client has gone away in the middle; so a disk that hangs holds requests up.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use serde::Serialize;

use crate::refusals::Summary;

/// The target of audit lines in the log, where there is no file for them.
pub const TARGET: &str = "redlock_audit";

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
}

/// The entry of a request, for everything that the request passes through to add to.
#[derive(Debug, Clone, Default)]
pub struct AuditContext(Arc<Mutex<AuditEntry>>);

impl AuditContext {
    pub fn entry(&self) -> MutexGuard<'_, AuditEntry> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Serialize)]
struct Line<'a> {
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
    request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<SocketAddr>,
}

/// Requests of one client that were refused one after the other and have no lines of their own.
#[derive(Serialize)]
struct Refused<'a> {
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    who: Option<&'a str>,
    what: &'a str,
    outcome: &'a str,
    refused: u64,
    /// Absent when it is a sum over many.
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<IpAddr>,
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
    file: Option<Sink>,
}

struct Sink {
    path: PathBuf,
    file: Mutex<Appended>,
}

struct Appended {
    file: File,
    /// The last write failed, perhaps in the middle of its line.
    broken_off: bool,
}

impl Appended {
    fn to(path: &Path) -> Result<Self, String> {
        Ok(Self { file: open(path)?, broken_off: false })
    }

    /// One write for a line: other processes may append to the same file.
    fn append(&mut self, mut line: Vec<u8>) -> std::io::Result<()> {
        if self.broken_off {
            line.insert(0, b'\n');
        }
        line.push(b'\n');
        let written = self.file.write_all(&line);
        self.broken_off = written.is_err();
        written
    }
}

impl Audit {
    /// Into the log, as `redlock_audit`; only what is denied or forced.
    pub fn logged() -> Self {
        Self { file: None }
    }

    /// To the end of a file.
    ///
    /// # Errors
    /// Why it cannot be opened.
    pub fn to_file(path: &Path) -> Result<Self, String> {
        Ok(Self { file: Some(Sink { path: path.into(), file: Mutex::new(Appended::to(path)?) }) })
    }

    /// Whether everything that changes a lock is recorded.
    pub fn has_file(&self) -> bool {
        self.file.is_some()
    }

    /// Goes on in a new file of the same name, after the old one was moved away. What cannot be opened changes nothing.
    pub fn reopen(&self) {
        let Some(sink) = &self.file else { return };
        match Appended::to(&sink.path) {
            Ok(file) => *sink.file.lock().unwrap_or_else(PoisonError::into_inner) = file,
            Err(error) => tracing::error!(error, "--audit-log: it goes on in the old file"),
        }
    }

    /// Writes a line, when this is something to write of.
    fn record(&self, entry: &AuditEntry, end: Option<RequestEnd<'_>>, request_id: &str, address: Option<SocketAddr>) {
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
        let line = Line {
            time: now(),
            who: entry.who.as_deref(),
            what: entry.what.unwrap_or("request"),
            lock: entry.lock.as_deref(),
            owner: entry.owner.as_deref(),
            outcome,
            status: end.map(|end| end.status),
            request_id,
            address,
        };
        match &self.file {
            None => tracing::info!(
                target: TARGET,
                who = line.who,
                what = line.what,
                lock = line.lock,
                owner = line.owner,
                outcome = line.outcome,
                status = line.status,
                request_id = line.request_id,
                address = line.address.map(tracing::field::display),
                "audit"
            ),
            Some(sink) => sink.write(&line),
        }
    }

    /// Sums up what was refused after the first, which has a line of its own.
    pub fn refused(&self, summary: &Summary) {
        let Summary { who, what, refused, address } = summary;
        let who = who.as_deref();
        let line = Refused { time: now(), who, what: "requests", outcome: what, refused: *refused, address: *address };
        match &self.file {
            None => tracing::info!(
                target: TARGET,
                who = line.who,
                what = line.what,
                outcome = line.outcome,
                refused = line.refused,
                address = line.address.map(tracing::field::display),
                "audit"
            ),
            Some(sink) => sink.write(&line),
        }
    }
}

fn now() -> String {
    humantime::format_rfc3339_micros(SystemTime::now()).to_string()
}

fn open(path: &Path) -> Result<File, String> {
    // Which locks are held by whom is not for every user of the machine.
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(path);
    file.map_err(|error| format!("--audit-log: {}: {error}", path.display()))
}

impl Sink {
    fn write(&self, line: &impl Serialize) {
        let append = |text| self.file.lock().unwrap_or_else(PoisonError::into_inner).append(text);
        let written = serde_json::to_vec(line).map_err(std::io::Error::from).and_then(append);
        if let Err(error) = written {
            // Not lost without a trace: the log has it instead.
            let line = serde_json::to_string(line).unwrap_or_default();
            tracing::error!(target: TARGET, %error, line, "--audit-log: a line could not be written");
        }
    }
}

/// A request that is to be recorded, at its end or when it is dropped before.
pub struct AuditGuard {
    audit: Arc<Audit>,
    context: AuditContext,
    request_id: String,
    address: Option<SocketAddr>,
    ended: bool,
}

impl AuditGuard {
    pub fn new(audit: Arc<Audit>, request_id: String, address: Option<SocketAddr>) -> Self {
        Self { audit, context: AuditContext::default(), request_id, address, ended: false }
    }

    pub fn context(&self) -> AuditContext {
        self.context.clone()
    }

    /// The principal, or that of which the name was claimed.
    pub fn who(&self) -> Option<String> {
        self.context.entry().who.clone()
    }

    /// Without a line: it is summed up with others.
    pub fn summed_up(mut self) {
        self.ended = true;
    }

    pub fn end(mut self, end: RequestEnd<'_>) {
        self.ended = true;
        self.audit.record(&self.context.entry(), Some(end), &self.request_id, self.address);
    }
}

impl Drop for AuditGuard {
    fn drop(&mut self) {
        if !self.ended {
            self.audit.record(&self.context.entry(), None, &self.request_id, self.address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_dropped_in_the_middle_is_recorded_too() {
        let path = std::env::temp_dir().join(format!("redlock-audit-{}", std::process::id()));
        let audit = Arc::new(Audit::to_file(&path).unwrap());
        let open = |forces, changes| {
            let open = AuditGuard::new(audit.clone(), "id\r\n".into(), None);
            *open.context().entry() = AuditEntry { lock: Some("a".into()), forces, changes, ..AuditEntry::default() };
            open
        };
        drop(open(true, true));
        open(false, false).end(RequestEnd { status: 200, problem: None, is_denied: false });
        open(false, false).end(RequestEnd { status: 403, problem: Some("forbidden"), is_denied: true });
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let lines: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!((&lines[0]["outcome"], &lines[1]["outcome"]), (&"client_gone".into(), &"forbidden".into()));
        assert_eq!((&lines[0]["request_id"], lines[0].get("status")), (&"id\r\n".into(), None));
    }
}
