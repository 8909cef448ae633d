//! The command line: commands, flags and their help.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use redlock_core::Ttl;

use crate::auth::{Verb, is_key_name};
use crate::config::{Settings, clock_skew, ttl};

/// Distributed locks over plain HTTP, on independent Redis masters.
///
/// Without --node, the gateway keeps locks in five in-memory nodes inside its process. That is for
/// trying it out: a restart loses all locks. With --node it uses only the given Redis masters.
/// Repeat the flag for each master; use 3 or 5.
///
/// Try:  curl -i -X POST http://127.0.0.1:8080/locks/demo
///
/// Exit status of all commands: 0, done; 1, the command failed; 2, the configuration cannot be
/// used.
#[derive(Debug, Parser)]
#[command(version, about, long_about, args_conflicts_with_subcommands = true, max_term_width = 120)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub settings: Settings,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve locks over HTTP (the default).
    Serve(Settings),
    /// Make API keys.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Print the OpenAPI document.
    Openapi {
        /// Version of the OpenAPI specification: 3.1, or 3.0 for generators that do not support
        /// 3.1.
        #[arg(long, default_value = "3.1", value_parser = ["3.0", "3.1"])]
        version: String,
    },
    /// Validate the configuration and probe every node, without changing anything
    ///
    /// Prints for each node whether it answers, and its version, role, eviction policy, durability
    /// and clock. Also prints whether the node applies the lock rules natively (with
    /// redlock-module) or in Lua. If a gateway would not let the node vote now, prints why and what
    /// to do. Give this command the same flags as the gateway, --bootstrap included.
    ///
    /// Exit status: 0, a gateway would start and have a majority at once; 1, it would not; 2, the
    /// configuration cannot be used. An address in use is reported and does not count, because a
    /// gateway may serve there.
    Check(Settings),
    /// Change the masters, max_ttl or clock_skew of gateways in use
    ///
    /// Raising max_ttl takes seconds: all nodes keep voting. Do not stop the gateways first. Restart
    /// them afterwards, one by one, with the larger --max-ttl.
    ///
    /// For every other change, stop the old gateways first: if a leaving node loses its data, an
    /// old gateway that still runs lets that node vote again. The command stops the votes of the
    /// old and new nodes, waits until every lock of the old configuration has ended, and writes
    /// the new markers.
    ///
    /// All nodes of the new configuration must answer. The command can be interrupted and run
    /// again.
    Reconfigure {
        /// Carry out the change. Without this flag the command only prints what it would do.
        #[arg(long)]
        yes: bool,
        /// A node that the gateways used until now; needed when the node set changes. Repeat the
        /// flag for each such node, also for nodes that stay.
        #[arg(long = "old-node", value_name = "URL")]
        old_nodes: Vec<String>,
        /// The --cluster of the gateways until now, if they had one.
        #[arg(long, value_name = "NAME")]
        old_cluster: Option<String>,
        /// The --max-ttl of the gateways until now. Needed when no node has a marker that states
        /// it.
        #[arg(long, value_name = "TIME", requires = "old_nodes", value_parser = ttl)]
        old_max_ttl: Option<Ttl>,
        /// The --clock-skew of the gateways until now; if they differed, the longest. Needed when
        /// the marker of a node does not state it.
        #[arg(long, value_name = "DURATION", value_parser = clock_skew())]
        old_clock_skew: Option<Duration>,
        /// Confirm that no gateway used any nodes until now. Without this flag, --old-node is
        /// needed when the marker of a node does not show which nodes were used.
        #[arg(long, conflicts_with_all = ["old_nodes", "old_cluster", "old_max_ttl", "old_clock_skew"])]
        no_old_nodes: bool,
        #[command(flatten)]
        settings: Settings,
    },
    /// Print a completion script.
    Completions { shell: clap_complete::Shell },
    /// Write the manual pages of all commands (troff).
    Man {
        /// Directory for redlock-gateway.1, redlock-gateway-check.1 and so on
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a key and print it once, followed by its entry for the file of --auth-keys. The command
    /// stores nothing.
    ///
    /// The first line is the key. The rest is TOML: append it to the file. With --out, the key goes
    /// to a file of its own, and only the TOML is printed. To replace a key without
    /// locking anybody out, put the new hash beside the old one in `hashes`. Remove the old hash
    /// when nobody uses the old key any more.
    New {
        /// The principal, 1 to 64 characters of [A-Za-z0-9_-]. Locks belong to the principal,
        /// whichever of its keys acquired them
        #[arg(value_parser = key_name)]
        name: String,
        /// Allowed verbs, separated by commas
        #[arg(
            long,
            value_name = "LIST",
            value_enum,
            value_delimiter = ',',
            default_value = "acquire,extend,release,inspect"
        )]
        verbs: Vec<Verb>,
        /// Allowed locks, separated by commas: exact names, or patterns with * for any text
        #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "*")]
        names: Vec<String>,
        /// Date on which the key expires, such as 2027-01-31 or 2027-01-31T12:00:00Z [default:
        /// never]
        #[arg(long, value_name = "DATE")]
        expires: Option<String>,
        /// New file for the key, which only its owner can read (mode 600). An existing file is not
        /// overwritten
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
        /// The keys file that the entry is for. The command reads only the mode of the file, to
        /// warn when others can read or write it
        #[arg(long, value_name = "FILE", env = "REDLOCK_AUTH_KEYS")]
        auth_keys: Option<PathBuf>,
    },
}

fn key_name(text: &str) -> Result<String, &'static str> {
    let name = is_key_name(text).then(|| text.to_owned());
    name.ok_or("expected 1 to 64 characters of [A-Za-z0-9_-], and not anonymous")
}
