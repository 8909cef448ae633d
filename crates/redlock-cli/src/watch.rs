//! `redlock watch`: prints the changes of a lock, or of all locks with a prefix.
//!
//! Another thread writes to standard output. So a pipe that nobody reads does not block signals.
//! While the pipe is full, no events are read, and the gateway drops the oldest ones.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Write};
use std::time::SystemTime;

use redlock_client::{LockState, LockStatus, Snapshot, WatchEvent, Watched, Watching};
use serde_json::{Value, json};

use crate::args::{Service, Until, Watch};
use crate::outcome::{ExitOutcome, report_event};
use crate::signals::StopSignals;
use crate::words;

/// Shells add this number to a signal's number to get the exit code of a command that it ended.
const SIGNALLED: u8 = 128;

pub(crate) async fn watch(service: &Service, watch: Watch, is_json: bool) -> ExitOutcome {
    let Watch { name, prefix, until } = watch;
    let seen = async {
        let mut signals = StopSignals::new()
            .map_err(|error| ExitOutcome::Failed(format!("no signals: {error}")))?;
        let client = service.client()?;
        let watched = match (&name, prefix) {
            (Some(name), _) => Watched::Lock(name.clone()),
            (None, prefix) => Watched::Prefix(prefix.unwrap_or_default()),
        };
        let all = async {
            let watching = client.watch(watched).await?;
            let output = Output { is_json, name: name.as_deref() };
            print_events(watching, output, until).await
        };
        tokio::select! {
            outcome = all => outcome,
            signal = signals.next() => match until {
                Some(_) => Err(ExitOutcome::Ended(SIGNALLED + signal.as_raw() as u8)),
                None => Ok(()),
            },
        }
    };
    let outcome = match (until, service.timeout()) {
        (Some(until), Some(limit)) => match tokio::time::timeout(limit, seen).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let name = name.unwrap_or_default();
                let limit = humantime::format_duration(limit);
                Err(ExitOutcome::NotSeen(format!("{name}: not {until} within {limit}")))
            }
        },
        _ => seen.await,
    };
    outcome.map_or_else(|outcome| outcome, |()| ExitOutcome::Done)
}

async fn print_events(
    mut watching: Watching,
    output: Output<'_>,
    until: Option<Until>,
) -> Result<(), ExitOutcome> {
    let mut holders = Holders::default();
    let mut is_cut = false;
    loop {
        let event = watching.next().await?;
        match &event {
            WatchEvent::Disconnected { why } => {
                is_cut = true;
                output.report("disconnected", &format!("connecting again, because {why}"));
            }
            WatchEvent::Connected { gateway } if std::mem::take(&mut is_cut) => {
                output.report("connected", &format!("connected to {gateway}"));
            }
            _ => {}
        }
        output.print(&event).await?;
        holders.note(&event);
        if until.is_some() && holders.state() == until {
            return Ok(());
        }
    }
}

/// Where events are printed.
struct Output<'a> {
    is_json: bool,
    /// The watched lock.
    name: Option<&'a str>,
}

impl Output<'_> {
    /// Prints an event of a lock. A closed pipe ends the command without an error.
    async fn print(&self, event: &WatchEvent) -> Result<(), ExitOutcome> {
        let at = humantime::format_rfc3339_millis(SystemTime::now()).to_string();
        let text: String = match self.is_json {
            true => in_json(event, &at).map_or_else(String::new, |line| format!("{line}\n")),
            false => words::event(event).iter().map(|line| format!("{at} {line}\n")).collect(),
        };
        let write = move || {
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(text.as_bytes())?;
            stdout.flush()
        };
        let written = tokio::task::spawn_blocking(write).await.unwrap_or_else(|error| {
            // The writer has panicked.
            Err(std::io::Error::other(error))
        });
        written.map_err(|error| match error.kind() {
            ErrorKind::BrokenPipe => ExitOutcome::Done,
            _ => ExitOutcome::Failed(format!("standard output: {error}")),
        })
    }

    /// Reports on standard error what happened to the connection.
    fn report(&self, event: &str, text: &str) {
        let text = match self.name {
            Some(name) => format!("{name}: {text}"),
            None => text.to_owned(),
        };
        report_event(self.is_json, event, self.name, &text, json!({}));
    }
}

/// An event of a lock as an object. `None` for events about the connection.
fn in_json(event: &WatchEvent, at: &str) -> Option<Value> {
    let mut line = json!({ "event": event.name(), "at": at });
    if let WatchEvent::Lagged { missed } = event {
        line["missed"] = (*missed).into();
        return Some(line);
    }
    let data = event.json()?.as_object()?.clone();
    line.as_object_mut()?.extend(data);
    Some(line)
}

/// The slots of a lock that are held, by the events so far.
#[derive(Debug, Default)]
struct Holders {
    slots: BTreeSet<u32>,
    /// Whether the state is known at all.
    are_known: bool,
}

impl Holders {
    fn note(&mut self, event: &WatchEvent) {
        let slot = |status: &LockStatus| status.slot.unwrap_or(1);
        match event {
            WatchEvent::Snapshot(Snapshot::Lock(status)) => {
                self.slots = status.holders.iter().map(|holder| holder.slot).collect();
                if self.slots.is_empty() && status.state == LockState::Held {
                    self.slots.insert(slot(status));
                }
                self.are_known = status.state != LockState::Unknown;
            }
            WatchEvent::Held(status) | WatchEvent::Extended(status) => {
                self.slots.insert(slot(status));
            }
            WatchEvent::Released(status)
            | WatchEvent::Expired(status)
            | WatchEvent::Forced(status) => {
                self.slots.remove(&slot(status));
            }
            // A snapshot follows.
            WatchEvent::Lagged { .. } => self.are_known = false,
            _ => {}
        }
    }

    fn state(&self) -> Option<Until> {
        match self.slots.is_empty() {
            false => Some(Until::Held),
            true => self.are_known.then_some(Until::Free),
        }
    }
}

#[cfg(test)]
mod tests {
    use redlock_client::Answer;
    use serde_json::from_value;

    use super::*;

    fn status(json: Value) -> Answer<LockStatus> {
        from_value(json).unwrap()
    }

    #[test]
    fn lock_is_free_when_its_last_slot_is_released() {
        let mut holders = Holders::default();
        assert_eq!(holders.state(), None);
        let unknown = status(json!({ "name": "a", "state": "unknown" }));
        holders.note(&WatchEvent::Snapshot(Snapshot::Lock(Box::new(unknown))));
        assert_eq!(holders.state(), None);
        let two = json!([{ "slot": 1 }, { "slot": 3 }]);
        let held = json!({ "name": "a", "state": "held", "slots": 4, "holders": two });
        holders.note(&WatchEvent::Snapshot(Snapshot::Lock(Box::new(status(held)))));
        let released = json!({ "name": "a", "state": "free" });
        holders.note(&WatchEvent::Released(status(released)));
        assert_eq!(holders.state(), Some(Until::Held));
        let expired = json!({ "name": "a", "state": "free", "slot": 3 });
        holders.note(&WatchEvent::Expired(status(expired)));
        assert_eq!(holders.state(), Some(Until::Free));
        holders.note(&WatchEvent::Held(status(json!({ "name": "a", "state": "held" }))));
        assert_eq!(holders.state(), Some(Until::Held));
    }

    #[test]
    fn json_has_the_event_the_time_and_the_data() {
        let held = status(json!({ "name": "a", "state": "held", "newer": 1 }));
        let line = in_json(&WatchEvent::Held(held), "now").unwrap();
        assert_eq!(
            line,
            json!({ "event": "held", "at": "now", "name": "a", "state": "held", "newer": 1 })
        );
        let lagged = in_json(&WatchEvent::Lagged { missed: 7 }, "now").unwrap();
        assert_eq!(lagged, json!({ "event": "lagged", "at": "now", "missed": 7 }));
        assert_eq!(in_json(&WatchEvent::Disconnected { why: "x".into() }, "now"), None);
    }
}
