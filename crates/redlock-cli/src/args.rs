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
  redlock run deploy --wait 10m --ttl 1m -- make deploy
  eval \"$(redlock acquire backup --format shell)\" && { …; redlock release backup; }

Exit codes of redlock (`run` has its command's, 128 + N when signal N ended it):
  64   wrong usage, or something that the gateway refuses
  69   no gateway decided
  70   a defect, a machine without room for a process, or a watchdog was killed
  75   somebody else holds the lock; of `run` what --conflict-exit-code says
  77   no key, or not for this lock
  79   the lock was lost while the command ran
  126  the command cannot be run
  127  the command is not found

`run` stops its command and all that came of it, also what left its process group (timeout, setsid, a daemon). \
Three processes watch over it: `redlock run` and two watchdogs, `redlock __watchdog`. When any two of them are killed with -9 \
or stopped, the third kills the rest before the lock's deadline. When a watchdog is killed or stopped, the run ends. \
Out of reach is what somebody else starts for the command (docker, systemd-run). What runs as another user (sudo) is killed \
where redlock may make a cgroup (version 2); elsewhere it goes on, redlock says so and does not release the lock. \
The same holds for processes that /proc hides (hidepid) and that left the command's process group. \
When all three are killed with -9, the command dies, but not what it has started; when all three are stopped, nothing is killed. \
Where a shell with jobs became `redlock run` by exec, a watchdog that is killed leaves behind what has lost its parent. \
A daemon stays that is left behind by a command which ends by itself, not at a signal (nor with 129, 130, 131 or 143); \
so does what `setsid` has started, which ends at once: say `setsid -w`. A command that somebody stops (SIGSTOP) is continued: \
it would keep the lock for as long as nobody continues it. In a pipeline the terminal goes to whoever reads it. A command that \
reads a terminal which belongs to another job is stopped with an error.";

/// Distributed locks of a redlock-gateway, for shells.
#[derive(Debug, Parser)]
#[command(name = "redlock", version, after_help = AFTER, max_term_width = 120)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) service: Service,

    /// Nothing but JSON: answers on standard output, what happens on standard error
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Where the gateways are.
#[derive(Debug, clap::Args)]
pub(crate) struct Service {
    /// A gateway; repeat for several, which must have the same masters
    #[arg(
        long,
        global = true,
        value_name = "URL",
        env = "REDLOCK_URL",
        value_delimiter = ',',
        default_value = "http://127.0.0.1:8080"
    )]
    url: Vec<String>,

    /// The API key is the first line of this file, as `redlock-gateway key new` prints it
    #[arg(long, global = true, value_name = "FILE", env = "REDLOCK_KEY_FILE")]
    key_file: Option<PathBuf>,

    /// Authorities (PEM) to trust beside the system's
    #[arg(long, global = true, value_name = "FILE", env = "REDLOCK_CA")]
    ca: Option<PathBuf>,

    /// Client certificate and its key (PEM, both in one file)
    #[arg(long, global = true, value_name = "FILE", env = "REDLOCK_CERT")]
    cert: Option<PathBuf>,
}

impl Service {
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
        Ok(client.build()?)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Hold a lock while a command runs, and kill the command before the lock is another's
    Run(Run),
    /// Acquire a lock and print its token; whoever does that extends and releases it
    Acquire {
        #[command(flatten)]
        lock: Lock,
        #[arg(long, value_enum, default_value_t = Format::Token)]
        format: Format,
    },
    /// Extend a lock that was acquired
    Extend {
        name: String,
        #[command(flatten)]
        token: Token,
        /// The lock lives at least so long from now
        #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
        ttl: Duration,
    },
    /// Release a lock that was acquired; quiet when it is not held any more
    Release {
        name: String,
        #[command(flatten)]
        token: Token,
    },
    /// Tell who holds a lock
    Status { name: String },
    /// List the held locks
    List {
        /// Only names that begin so
        #[arg(default_value = "")]
        prefix: String,
    },
    /// Tell of a lock whenever it changes, until interrupted; asks once a second
    Watch { name: String },
    /// Take a lock from whoever holds it; only its fencing token then keeps late writes out
    ForceRelease { name: String },
    /// Tell what the gateway says of its masters
    Nodes,
    /// Print a completion script
    Completions { shell: clap_complete::Shell },
    /// Print the manual page (troff), or write those of all commands
    Man {
        /// Where to: redlock.1, redlock-run.1 and so on
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// What kills a command when `redlock run` cannot
    #[command(name = "__watchdog", hide = true)]
    Guard {
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

/// What to acquire.
#[derive(Debug, clap::Args)]
pub(crate) struct Lock {
    /// Name of the lock: 1 to 255 of A–Z a–z 0–9 . _ : @ / + ~ -
    pub(crate) name: String,

    /// For how long the lock outlives a holder that is gone
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = humantime::parse_duration)]
    pub(crate) ttl: Duration,

    /// How long to wait while somebody else holds it
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = humantime::parse_duration)]
    pub(crate) wait: Duration,

    /// Label that others see [default: user and host]
    #[arg(long, value_name = "TEXT", env = "REDLOCK_OWNER")]
    pub(crate) owner: Option<String>,

    /// Stored beside the lock for people; repeat
    #[arg(long, value_name = "KEY=VALUE", value_parser = pair)]
    pub(crate) metadata: Vec<(String, String)>,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
    pair.ok_or_else(|| "it has no =, as in job=nightly".into())
}

impl Lock {
    pub(crate) fn of(&self, client: &Client) -> redlock_client::Lock {
        let lock = client.lock(&self.name).ttl(self.ttl).wait(self.wait);
        let lock = lock.owner(self.owner.clone().unwrap_or_else(someone));
        self.metadata.iter().fold(lock, |lock, (key, value)| lock.metadata(key, value))
    }
}

/// Who this is, for people.
fn someone() -> String {
    let user = ["USER", "LOGNAME"]
        .iter()
        .find_map(|name| std::env::var(name).ok())
        .filter(|user| !user.is_empty());
    let user = user.unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{user} on {host}")
}

#[derive(Debug, clap::Args)]
pub(crate) struct Token {
    /// The token that acquiring it printed
    #[arg(long, value_name = "TOKEN", env = "REDLOCK_TOKEN", hide_env_values = true)]
    pub(crate) token: String,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) lock: Lock,

    /// The exit code when somebody else holds the lock, also after the wait. With 0 that is no error, and 75 is the command's own
    #[arg(long, value_name = "CODE", default_value_t = HELD)]
    pub(crate) conflict_exit_code: u8,

    /// What becomes of the command when the lock is lost
    #[arg(long, value_enum, default_value_t = OnLost::Kill)]
    pub(crate) on_lost: OnLost,

    /// What the command is asked to stop with, when the lock is lost and when redlock itself is sent TERM. Other signals that
    /// redlock is sent are passed on as they are
    #[arg(long, value_enum, value_name = "SIGNAL", default_value = "TERM", ignore_case = true)]
    pub(crate) stop_signal: StopSignal,

    /// The command's time between the stop signal and KILL when the lock is lost. KILL comes before the deadline, by a sixth of
    /// the ttl (250ms to 1s) and 150ms. These and the grace together are less than half of the ttl [default: a sixth of the ttl,
    /// at most 5s]
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    pub(crate) grace: Option<Duration>,

    /// The command, with REDLOCK_NAME, REDLOCK_TOKEN, REDLOCK_FENCING_TOKEN and REDLOCK_DEADLINE in its environment
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    /// The stop signal to all that came of it, then KILL after the grace, and before the lock can expire
    Kill,
    /// Say so, and let it go on
    Warn,
}

/// Those that a program can catch and that mean an end to some.
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
    /// Variables, for eval
    Shell,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_help_that_were_broken_by_hand_broke_once_more_at_the_edge_of_the_terminal() {
        let lines: Vec<&str> = AFTER.lines().collect();
        for pair in lines.windows(2) {
            assert!(
                pair[0].chars().count() <= 80 || pair[1].is_empty(),
                "it goes on in another line: {}",
                pair[0]
            );
        }
    }
}
