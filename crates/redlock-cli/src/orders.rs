//! The messages between a runner and its watchdogs, one line each.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::str::FromStr;
use std::time::Duration;

use redlock_client::clock::Moment;

/// The command that the inner watchdog starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) command: Vec<OsString>,
    pub(crate) environment: Vec<(String, String)>,
    /// The signals that were blocked when the runner was started. A watchdog blocks more signals,
    /// and the command must get this set back.
    pub(crate) blocked: Vec<i32>,
}

/// A message to a watchdog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Order {
    /// For the inner watchdog: start the command.
    Start(Start),
    /// Kill the command at this moment.
    Until(Moment),
    /// Exit, even if processes of the command are left.
    Done,
}

/// A message from a watchdog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Report {
    /// From the outer watchdog: the process id of the inner one.
    Inner(i32),
    /// From the outer watchdog: the inner one was killed or stopped.
    Gone,
    /// The inner watchdog is ready.
    Ready,
    /// The command's process id, which is also its process group.
    Started(i32),
    NotStarted(String),
    /// The command was stopped because the terminal belongs to another process group.
    WantsTerminal,
    /// The command has ended, with the status of `wait`.
    Ended(i32),
}

impl std::fmt::Display for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Start(Start { command, environment, blocked }) => {
                // Arguments need not be UTF-8. So each byte becomes one character, and JSON escapes
                // line breaks.
                let text = |word: &OsString| {
                    word.as_bytes().iter().copied().map(char::from).collect::<String>()
                };
                let command: Vec<String> = command.iter().map(text).collect();
                writeln!(f, "start {}", serde_json::json!((command, environment, blocked)))
            }
            Self::Until(moment) => writeln!(f, "until {}", moment.since_boot().as_micros()),
            Self::Done => writeln!(f, "done"),
        }
    }
}

impl FromStr for Order {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        match line.split_once(' ') {
            Some(("start", text)) => {
                let all = serde_json::from_str(text).map_err(|_| ())?;
                let (command, environment, blocked): (Vec<String>, _, _) = all;
                let bytes = |word: String| word.chars().map(u8::try_from).collect::<Result<_, _>>();
                let words = command.into_iter().map(|word| bytes(word).map(OsString::from_vec));
                let command = words.collect::<Result<_, _>>().map_err(|_| ())?;
                Ok(Self::Start(Start { command, environment, blocked }))
            }
            Some(("until", micros)) => {
                let micros = micros.parse().map_err(|_| ())?;
                Ok(Self::Until(Moment::after_boot(Duration::from_micros(micros))))
            }
            None if line == "done" => Ok(Self::Done),
            _ => Err(()),
        }
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Inner(pid) => writeln!(f, "inner {pid}"),
            Self::Gone => writeln!(f, "gone"),
            Self::Ready => writeln!(f, "ready"),
            Self::Started(pid) => writeln!(f, "started {pid}"),
            Self::NotStarted(why) => writeln!(f, "not-started {}", why.replace('\n', " ")),
            Self::WantsTerminal => writeln!(f, "wants-terminal"),
            Self::Ended(status) => writeln!(f, "ended {status}"),
        }
    }
}

impl FromStr for Report {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let number = || rest.parse().map_err(|_| ());
        // A signal to group 0 would reach the runner's own group, and a signal to group 1 would
        // reach every process.
        let pid = || number().and_then(|pid: i32| if pid > 1 { Ok(pid) } else { Err(()) });
        match word {
            "inner" => Ok(Self::Inner(pid()?)),
            "gone" => Ok(Self::Gone),
            "ready" => Ok(Self::Ready),
            "started" => Ok(Self::Started(pid()?)),
            "not-started" => Ok(Self::NotStarted(rest.to_owned())),
            "wants-terminal" => Ok(Self::WantsTerminal),
            "ended" => Ok(Self::Ended(number()?)),
            _ => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_and_reports_round_trip() {
        let command =
            vec!["sh".into(), OsString::from_vec(b"a\nb\xff".into()), "".into(), "é".into()];
        let environment = vec![("REDLOCK_NAME".to_owned(), "a\nb".to_owned())];
        for order in [
            Order::Start(Start { command, environment, blocked: vec![2, 64] }),
            Order::Until(Moment::after_boot(Duration::from_micros(123_456_789))),
            Order::Done,
        ] {
            assert_eq!(order.to_string().strip_suffix('\n').unwrap().parse(), Ok(order));
        }
        for report in [
            Report::Inner(2),
            Report::Gone,
            Report::Ready,
            Report::Started(4711),
            Report::NotStarted("no such file".into()),
            Report::WantsTerminal,
            Report::Ended(-1),
        ] {
            assert_eq!(report.to_string().strip_suffix('\n').unwrap().parse(), Ok(report));
        }
    }

    #[test]
    fn malformed_messages_are_refused() {
        for wrong in
            ["started 0", "started 1", "started -1", "started", "inner 0", "ended", "gon", ""]
        {
            assert_eq!(wrong.parse::<Report>(), Err(()), "{wrong}");
        }
        for wrong in ["until", "until -1", "doner", "start", "start [[\"\u{100}\"],[],[]]", ""] {
            assert_eq!(wrong.parse::<Order>(), Err(()), "{wrong}");
        }
    }
}
