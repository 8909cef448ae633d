//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use redlock_client::Client;
use rustix::process::Signal;

use crate::outcome::{ExitOutcome, HELD};

const AFTER: &str = "\
Examples:
  redlock run nightly-report -- ./report.sh
  redlock run deploy --wait 10m --ttl 1m make deploy
  redlock run cron/report --wait 0 --conflict-exit-code 0 ./report.sh
  eval \"$(redlock acquire job --format shell)\" && { …; redlock release job; }
  redlock watch --prefix jobs/

Waiting:
  `run` waits until the lock is free, as flock does. `--wait 10m` waits for at
  most 10 minutes, and `--wait 0` tries once. The gateway puts the waiting in
  a line: by --priority, then by arrival. `run` shows its place in that line.
  Of the runs with `--queue newest`, only the newest one waits. Older runs end
  as if somebody held the lock (exit code 75): at once if they wait at the
  same gateway, otherwise usually within a second.
  Without --wait, `run` ends at once if no gateway can be reached when it
  begins; `--wait forever` asks again until one answers.
  `acquire` tries once, unless --wait says how long to wait.

Several holders:
  With `--slots 4`, up to four holders share the lock. `--take 2` takes two
  slots, for heavy work. A run that waits for many slots is not overtaken by
  other runs at the same gateway.

Exit codes (`run` exits as its command does, with 128 + N after signal N):
  1    `nodes`: the gateway is not ready, for example without a quorum
  64   usage error, or the gateway refuses the request
  69   no gateway could be reached, or none could decide
  70   internal error, for example if no process could be started
  75   somebody else holds the lock, or a newer run with `--queue newest` waits
       instead (`run`: see --conflict-exit-code); `watch --until` did not see
       the state
  77   no API key, or a key without permission for this lock
  79   the lock was lost while the command ran
  126  the command cannot be run
  127  the command was not found

What `run` stops:
  The command and its descendants, also those that left its process group
  (timeout, setsid, a daemon).
  Three processes ensure that: `redlock run` and two watchdogs,
  `redlock __watchdog`. If any two of them are killed (kill -9) or frozen
  (SIGSTOP), the third kills the command before the lock's deadline. If only
  a watchdog is killed or frozen, `redlock run` stops the command and ends.
  If the command ends by itself, a daemon that it left behind goes on.
  `setsid x` ends at once and leaves x running: use `setsid -w x`. If a signal
  ends the command, or if its exit code is 129, 130, 131 or 143, all of its
  processes are stopped, also daemons.
  A command that somebody freezes (SIGSTOP) is continued. Otherwise it would
  keep the lock for as long as it is frozen.

What `run` cannot stop:
  Processes that others start for the command (docker, systemd-run).
  Processes of another user (sudo), unless redlock may create a cgroup
  (version 2). Without a cgroup, `run` reports that such processes are left,
  and keeps the lock until its TTL ends. The same holds for processes that
  left the command's process group and that /proc hides (hidepid).
  Descendants of the command, if `redlock run` and both watchdogs are killed
  at once: only the command itself dies. If all three are frozen, nothing is
  killed.
  Orphans of the command, if a watchdog is killed and the shell that ran
  `exec redlock run` had background jobs.

Terminals:
  In a pipeline, the terminal goes to the process that reads from it. If the
  command reads from the terminal while another job has it, `run` reports an
  error and stops the command.";

const AFTER_WATCH: &str = "\
Examples:
  redlock watch deploy
  redlock watch --prefix jobs/
  redlock watch deploy --until free --timeout 10m && ./deploy.sh
  redlock watch --prefix '' --json | jq -r 'select(.event == \"expired\") | .name'

Output:
  One line for each event: the time (UTC, by this machine's clock) and the
  event. First comes the state; for a prefix, one line for each held lock.
  Then follow `held`, `extended`, `released`, `expired`, `released by force`,
  and how many wait at the gateway.
  With --json, each event is one object: `event`, `at`, and the fields that
  the gateway sent. For a prefix, the event with the state has `locks`.
  What happens at other gateways is shown about a second later.

Lost connections:
  `watch` connects again, at the next --url if there are several, and says so
  on standard error. Events that the gateway still has are shown then.
  Otherwise the state is shown again, and events may be missing before it.

`--until free` does not reserve the lock: others may acquire it first. To work
under the lock, use `redlock run`.

Exit codes:
  0    interrupted, or the state of --until was seen
  69   no gateway could be reached at the beginning
  75   the state of --until was not seen within --timeout
  77   the key may not watch this: `inspect` for a name, `list` for a prefix
  130  interrupted before the state of --until was seen (143 after TERM)";

const AFTER_TOP: &str = "\
Examples:
  redlock top
  redlock top --prefix jobs/

Columns:
  The holder, the start of the hold (UTC), the time left unless the holder
  extends the lock, the fencing token, and how many wait at the gateway.
  A key without the permission `inspect` sees only names.

Keys:
  n        sort by name
  t        sort by time left
  /        show only locks whose name or holder contains a text; Esc shows all
  ↑ ↓      scroll; also PgUp, PgDn, Home and End
  q        quit

Without a connection, the screen says so, and keeps the last known locks. In a
pipe, use `redlock watch --prefix P` or `redlock list`.";

/// Distributed locks of a redlock-gateway, for shells.
#[derive(Debug, Parser)]
#[command(name = "redlock", version, after_help = AFTER, max_term_width = 120)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) service: Service,

    /// Write only JSON: answers on standard output, events on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Where the gateways are.
#[derive(Debug, clap::Args)]
pub(crate) struct Service {
    /// URL of a gateway; repeat for several gateways over the same masters
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "REDLOCK_URL",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:8080"
    )]
    url: Vec<String>,

    /// File whose first line is the API key, as `redlock-gateway key new` prints it
    #[arg(long, global = true, value_name = "FILE", env = "REDLOCK_KEY_FILE")]
    key_file: Option<PathBuf>,

    /// PEM certificates to trust beside the system's: those of authorities, or the gateway's own
    #[arg(long, global = true, value_name = "FILE", env = "REDLOCK_CA")]
    ca: Option<PathBuf>,

    /// Client certificate and its key (PEM, both in one file)
    #[arg(long, global = true, value_name = "FILE", env = "REDLOCK_CERT")]
    cert: Option<PathBuf>,

    /// The longest time for a whole request, tries at all gateways and --wait included. For `run`: the
    /// longest time until it has the lock [default: 5s for each --url, plus --wait]
    #[arg(
        long,
        global = true,
        value_name = "DURATION",
        env = "REDLOCK_TIMEOUT",
        value_parser = duration
    )]
    timeout: Option<Duration>,
}

impl Service {
    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    pub(crate) fn client(&self) -> Result<Client, ExitOutcome> {
        let read = |what: &str, path: &PathBuf| {
            std::fs::read(path)
                .map_err(|error| ExitOutcome::Usage(format!("{what} {}: {error}", path.display())))
        };
        let mut client =
            self.url.iter().fold(Client::builder(), |client, url| client.url(url.trim()));
        if let Some(path) = &self.key_file {
            let text = String::from_utf8_lossy(&read("--key-file", path)?).into_owned();
            let Some(key) = text.lines().map(str::trim).find(|line| !line.is_empty()) else {
                return Err(ExitOutcome::Usage(format!("--key-file {} is empty", path.display())));
            };
            client = client.key(key);
        }
        if let Some(path) = &self.ca {
            client = client.authority(read("--ca", path)?);
        }
        if let Some(path) = &self.cert {
            client = client.identity(read("--cert", path)?);
        }
        if let Some(timeout) = self.timeout {
            client = client.timeout(timeout);
        }
        Ok(client.build()?)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Hold a lock while a command runs; if the lock is lost, kill the command before others can
    /// get the lock
    Run(Run),
    /// Acquire a lock and print its token, for `extend` and `release`
    Acquire {
        #[command(flatten)]
        lock: Lock,
        /// How long to wait while somebody else holds the lock, or `forever`
        #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = wait)]
        wait: Duration,
        #[arg(long, value_enum, default_value_t = Format::Token)]
        format: Format,
    },
    /// Extend an acquired lock
    Extend {
        name: String,
        #[command(flatten)]
        token: Token,
        /// The lock lives at least this long from now
        #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
        ttl: Duration,
    },
    /// Release an acquired lock; succeeds also if the lock is no longer held
    Release {
        name: String,
        #[command(flatten)]
        token: Token,
    },
    /// Show who holds a lock
    Status { name: String },
    /// List the held locks
    List {
        /// List only names with this prefix
        #[arg(default_value = "")]
        prefix: String,
    },
    /// Print what happens to a lock, or to all locks with a prefix, until interrupted
    #[command(after_help = AFTER_WATCH)]
    Watch(Watch),
    /// Show the held locks on the terminal, as they change
    #[command(after_help = AFTER_TOP)]
    Top {
        /// Show only names with this prefix
        #[arg(long, value_name = "PREFIX", default_value = "", hide_default_value = true)]
        prefix: String,
    },
    /// Release a lock, whoever holds it. The holder goes on: only a resource that checks fencing
    /// tokens refuses the holder's late writes
    ForceRelease {
        name: String,
        /// Which slot of the lock to release, as `status` shows them
        #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
        slot: u32,
    },
    /// Show the gateway's state and its masters; exits with 1 unless the gateway is ready
    Nodes,
    /// Print a completion script
    Completions { shell: clap_complete::Shell },
    /// Print the manual page (troff), or write the pages of all commands
    Man {
        /// Directory for redlock.1, redlock-run.1 and so on
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Kills a command when `redlock run` cannot
    #[command(name = "__watchdog", hide = true)]
    Watchdog {
        #[arg(long)]
        cgroup: Option<PathBuf>,
    },
    /// Becomes a command that dies with its parent
    #[command(name = "__exec", hide = true)]
    Exec {
        #[arg(long)]
        cgroup: Option<PathBuf>,
        #[arg(long)]
        blocked: Vec<i32>,
        parent: i32,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
}

/// What to watch, and until when.
#[derive(Debug, clap::Args)]
pub(crate) struct Watch {
    /// Name of the lock
    #[arg(required_unless_present = "prefix")]
    pub(crate) name: Option<String>,

    /// Watch all locks whose names begin with this text; '' for all locks
    #[arg(long, value_name = "PREFIX", conflicts_with = "name")]
    pub(crate) prefix: Option<String>,

    /// End with exit code 0 as soon as the lock is in this state. --timeout limits the wait
    #[arg(long, value_enum, value_name = "STATE", conflicts_with = "prefix")]
    pub(crate) until: Option<Until>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Until {
    /// Nobody holds the lock, or any slot of it
    Free,
    /// Somebody holds the lock, or a slot of it
    Held,
}

impl std::fmt::Display for Until {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Free => "free",
            Self::Held => "held",
        })
    }
}

/// The lock to acquire.
#[derive(Debug, clap::Args)]
pub(crate) struct Lock {
    /// Name of the lock: 1 to 255 of A–Z a–z 0–9 . _ : @ / + ~ -
    pub(crate) name: String,

    /// How long the lock stays if its holder crashes or loses its connection
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub(crate) ttl: Duration,

    /// Label of the holder, shown to others [default: user@host:pid and the command; for `acquire`
    /// the pid and command of the parent process]
    #[arg(long, value_name = "TEXT", env = "REDLOCK_OWNER")]
    pub(crate) owner: Option<String>,

    /// Number of slots of the lock, 1 to 256: up to that many holders share it. Give the same number
    /// in every command for this lock, because the largest one in use is the bound [default: one
    /// holder]
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) slots: Option<u32>,

    /// Number of slots to take, 1 to --slots. The command gets all of them or none
    #[arg(long, value_name = "NUMBER", requires = "slots", default_value_t = 1, hide_default_value = true, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) take: u32,

    /// How early the request is served while it waits: 0 to 9, and 9 is served first [default: 5]
    #[arg(long, value_name = "0-9", value_parser = clap::value_parser!(u8).range(0..=9))]
    pub(crate) priority: Option<u8>,

    /// Keep the lock closed for this time after its grant, even if it is released earlier. So a job
    /// on several hosts runs once, even if their clocks differ. At most the longest TTL of the
    /// gateway
    #[arg(long, value_name = "DURATION", value_parser = duration, default_value = "0s", hide_default_value = true)]
    pub(crate) at_least: Duration,

    /// Text stored beside the lock, for people; repeat for several
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) metadata: Vec<(String, String)>,
}

fn pair(text: &str) -> Result<(String, String), &'static str> {
    let pair = text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    pair.ok_or("expected KEY=VALUE, as in job=nightly")
}

fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write a duration such as 90s, 10m or 1h30m"))
}

fn wait(text: &str) -> Result<Duration, String> {
    match text {
        "forever" => Ok(Duration::MAX),
        text => duration(text).map_err(|error| format!("{error}, or forever")),
    }
}

impl Command {
    /// The name of the lock that the command is about.
    pub(crate) fn lock_name(&self) -> Option<&str> {
        match self {
            Self::Run(run) => Some(&run.lock.name),
            Self::Acquire { lock, .. } => Some(&lock.name),
            Self::Extend { name, .. }
            | Self::Release { name, .. }
            | Self::Status { name }
            | Self::ForceRelease { name, .. } => Some(name),
            Self::Watch(watch) => watch.name.as_deref(),
            Self::List { .. }
            | Self::Top { .. }
            | Self::Nodes
            | Self::Completions { .. }
            | Self::Man { .. }
            | Self::Watchdog { .. }
            | Self::Exec { .. } => None,
        }
    }
}

impl Lock {
    pub(crate) fn of(&self, client: &Client, default_owner: &str) -> redlock_client::Lock {
        let lock = client.lock(&self.name).ttl(self.ttl);
        let lock = lock.owner(self.owner.as_deref().unwrap_or(default_owner));
        let lock = match self.slots {
            Some(slots) => lock.slots(slots, self.take),
            None => lock,
        };
        let lock = match self.priority {
            Some(priority) => lock.priority(priority),
            None => lock,
        };
        let lock = lock.at_least(self.at_least);
        self.metadata.iter().fold(lock, |lock, (key, value)| lock.metadata(key, value))
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Token {
    /// The token that `acquire` printed
    #[arg(long, value_name = "TOKEN", env = "REDLOCK_TOKEN", hide_env_values = true)]
    pub(crate) token: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) lock: Lock,

    /// How long to wait while somebody else holds the lock: 0 tries once, `forever` waits without
    /// end, even while no gateway answers [default: without end, once a gateway has answered]
    #[arg(long, value_name = "DURATION", value_parser = wait)]
    pub(crate) wait: Option<Duration>,

    /// Another lock to acquire together with NAME, all or none; repeat for several. While it waits,
    /// the run holds none of them, so runs that need some of the same locks cannot block each other
    #[arg(long, value_name = "NAME", conflicts_with_all = ["slots", "queue"])]
    pub(crate) also: Vec<String>,

    /// Which runs wait for the lock at the same time. With `newest`, a newer run
    /// with `newest` supersedes this one while it waits
    #[arg(long, value_enum, default_value_t = Queue::All)]
    pub(crate) queue: Queue,

    /// Exit code when somebody else holds the lock, also at the end of --wait, and when a newer run
    /// waits instead (--queue). With 0, a held lock counts as success. If you set
    /// another code, 75 can come only from the command
    #[arg(long, value_name = "CODE", default_value_t = HELD)]
    pub(crate) conflict_exit_code: u8,

    /// What happens to the command when the lock is lost
    #[arg(long, value_enum, default_value_t = OnLost::Kill)]
    pub(crate) on_lost: OnLost,

    /// Signal that asks the command to stop. It is sent when the lock is lost, and when redlock
    /// receives TERM. Other signals that redlock receives are passed on unchanged
    #[arg(long, value_enum, value_name = "SIGNAL", default_value = "TERM", ignore_case = true)]
    pub(crate) stop_signal: StopSignal,

    /// Time between the stop signal and KILL when the lock is lost. KILL comes 150ms + M before
    /// the lock's deadline; M is a sixth of the TTL, between 250ms and 1s. The grace + 150ms + M must
    /// be less than half of the TTL [default: a sixth of the TTL, at most 5s]
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) grace: Option<Duration>,

    /// The command and its arguments, after all options of redlock; `--` may stand before it. Its
    /// environment has REDLOCK_NAME, REDLOCK_TOKEN, REDLOCK_FENCING_TOKEN and REDLOCK_DEADLINE. With
    /// --slots, REDLOCK_SLOTS has the numbers of its slots, such as 1,3. With --also, REDLOCK_NAME
    /// has all names, such as a,b
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Queue {
    /// Every run waits
    All,
    /// Only the newest run with this value waits
    Newest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    /// Send the stop signal to the command and its descendants, then KILL after the grace and
    /// before the lock can expire
    Kill,
    /// Report the loss of the lock, and let the command go on
    Warn,
}

/// Signals that a program can catch and that some programs take as a request to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "UPPER")]
pub(crate) enum StopSignal {
    #[value(alias = "SIGTERM")]
    Term,
    #[value(alias = "SIGINT")]
    Int,
    #[value(alias = "SIGHUP")]
    Hup,
    #[value(alias = "SIGQUIT")]
    Quit,
    #[value(alias = "SIGUSR1")]
    Usr1,
    #[value(alias = "SIGUSR2")]
    Usr2,
}

impl StopSignal {
    pub(crate) fn signal(self) -> Signal {
        match self {
            Self::Term => Signal::TERM,
            Self::Int => Signal::INT,
            Self::Hup => Signal::HUP,
            Self::Quit => Signal::QUIT,
            Self::Usr1 => Signal::USR1,
            Self::Usr2 => Signal::USR2,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// The token
    Token,
    /// Shell variables, for eval
    Shell,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_lines_fit_a_terminal_of_80_columns() {
        for line in [AFTER, AFTER_WATCH, AFTER_TOP].into_iter().flat_map(str::lines) {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}
