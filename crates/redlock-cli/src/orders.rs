//! What a runner and its watchdogs tell each other, a line each.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::str::FromStr;
use std::time::Duration;

use redlock_client::clock::Moment;

/// What the inner watchdog starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Start {
    pub(crate) command: Vec<OsString>,
    pub(crate) environment: Vec<(String, String)>,
    /// The signals that whoever started the runner has blocked. A watchdog blocks more.
    pub(crate) blocked: Vec<i32>,
}

/// What a watchdog is told, a line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Order {
    /// The inner one: start the command.
    Start(Start),
    /// The command has to be gone by then.
    Until(Moment),
    /// What is left may stay.
    Done,
}

/// What a watchdog tells, a line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Report {
    /// The outer one: this is the inner one.
    Inner(i32),
    /// The outer one: the inner one was killed or stopped.
    Gone,
    /// The inner one is there.
    Ready,
    /// The command has this number, and so has its process group.
    Started(i32),
    NotStarted(String),
    /// The command was stopped because it has no right to the terminal.
    WantsTerminal,
    /// The command has ended, as `wait` tells it.
    Ended(i32),
}

impl std::fmt::Display for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Start(Start { command, environment, blocked }) => {
                // Words need not be text. A character for each byte, and no line break among them.
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
        // Group 0 would be the runner's own, and 1 everybody.
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
    fn orders_and_reports_are_read_as_they_were_written() {
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
    fn no_report_makes_everybody_the_command() {
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
