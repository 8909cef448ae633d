//! Renders a history as text, one line for each event: true time in milliseconds, who, what.
//!
//! ```text
//!    1204 c3 via g1   #7 acquire (900 ms) lock-0
//!    1209 n2          lock-0 acquire T1204.000/5ad1 (-5 ms) of g1: Granted
//! ```
//!
//! Clients are `c`, gateways `g`, masters `n`. A grant is its fencing token and the first digits of
//! its owner. The token is given in milliseconds since the history began, by the wall clock of the
//! gateway that minted it. The figure in parentheses is how far the token is ahead of the master's
//! own time.

use std::fmt::{self, Write as _};
use std::time::Duration;

use crate::history::{Answer, History, Moment, OpKind, Request, Waited};

/// The whole history as text, one line for each event.
pub fn render(history: &History) -> String {
    let mut lines: Vec<(Moment, String, String)> = Vec::new();
    for (number, operation) in history.operations.iter().enumerate() {
        let who = format!("c{} via g{}", operation.client, operation.gateway);
        let what = format!("#{number} {} lock-{}", describe(operation.request), operation.name);
        lines.push((operation.start, who.clone(), what.clone()));
        if let (Some(end), Some(answer)) = (operation.end, operation.answer) {
            let waited = match operation.waited {
                Some(Waited { ticket: Some(ticket), rounds }) => {
                    format!(", ticket {ticket}, rounds {rounds}")
                }
                Some(Waited { ticket: None, .. }) | None => String::new(),
            };
            lines.push((end, who, format!("#{number} {}{waited}", AnswerText(answer))));
        }
    }
    for write in &history.writes {
        let taken = if write.accepted { "takes" } else { "refuses" };
        let text = format!("{taken} a write of {}", write.grant);
        lines.push((write.moment, format!("register-{}", write.name), text));
    }
    for execution in &history.executions {
        let kind = match execution.kind {
            OpKind::Acquire => "acquire",
            OpKind::Repair => "repair",
            OpKind::Extend => "extend",
            OpKind::Release => "release",
            OpKind::Undo => "undo",
            OpKind::Inspect => "inspect",
        };
        let grant = execution.grant.map(|grant| format!(" {grant}")).unwrap_or_default();
        let late = if execution.late { " (late)" } else { "" };
        let ahead = match execution.ahead_micros / 1000 {
            0 => String::new(),
            millis => format!(" ({millis:+} ms)"),
        };
        let text = format!(
            "lock-{} {kind}{grant}{ahead} of g{}{late}: {:?}",
            execution.name, execution.gateway, execution.vote_kind
        );
        lines.push((execution.moment, format!("n{}", execution.master), text));
    }
    for note in &history.notes {
        lines.push((note.moment, note.who.clone(), note.text.clone()));
    }
    lines.sort_by_key(|(moment, ..)| *moment);
    let mut text = String::new();
    for (moment, who, what) in lines {
        let _ = writeln!(text, "{:>7} {who:<11} {what}", moment.at.as_millis());
    }
    for left in &history.leftovers {
        let _ = writeln!(
            text,
            "    end n{:<10} stores lock-{} {} for {} ms more",
            left.master,
            left.name,
            left.grant,
            left.expires_in.as_millis()
        );
    }
    text
}

fn describe(request: Request) -> String {
    match request {
        Request::Acquire { owner, ttl_ms, patience_ms } => {
            let owner =
                owner.map(|owner| format!(", owner {:04x}", owner >> 48)).unwrap_or_default();
            let patience =
                patience_ms.map(|patience| format!(", waits {patience} ms")).unwrap_or_default();
            format!("acquire ({ttl_ms} ms{owner}{patience})")
        }
        Request::Extend { grant, ttl_ms } => format!("extend {grant} ({ttl_ms} ms)"),
        Request::Release { grant } => format!("release {grant}"),
    }
}

struct AnswerText(Answer);

impl fmt::Display for AnswerText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Answer::Granted { grant, held_for, replayed } => {
                write!(
                    f,
                    "GRANTED {grant}{} for {}",
                    if replayed { " again" } else { "" },
                    Millis(held_for)
                )
            }
            Answer::Extended { held_for } => write!(f, "extended for {}", Millis(held_for)),
            Answer::Released => f.write_str("released"),
            Answer::Held => f.write_str("held by somebody else"),
            Answer::Lost => f.write_str("LOST"),
            Answer::NotHolder => f.write_str("NOT HOLDER"),
            Answer::NoQuorum => f.write_str("no quorum"),
            Answer::Unknown => f.write_str("unknown"),
            Answer::Cancelled => f.write_str("cancelled"),
            Answer::GatewayDied => f.write_str("gateway died"),
        }
    }
}

struct Millis(Duration);

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} ms", self.0.as_secs_f64() * 1000.0)
    }
}
