//! The command line: what the program can be told to do.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use redlock_core::Ttl;

use crate::auth::{Verb, is_key_name};
use crate::config::{Settings, clock_skew, ttl};

/// Distributed locks over plain HTTP, on independent Redis masters.
///
/// Without --node it starts five in-memory nodes inside this process: good for trying it out, without any durability.
/// With --node (once for each master; 3 or 5 is right) it uses those and nothing else.
///
/// Try:  curl -i -X POST http://127.0.0.1:8080/locks/demo
///
/// Exit status of all commands: 0, done; 1, it failed; 2, the configuration cannot be used.
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
        /// Version of the OpenAPI specification: 3.1, or its twin in 3.0 for generators that know no newer one.
        #[arg(long, default_value = "3.1", value_parser = ["3.0", "3.1"])]
        version: String,
    },
    /// Validate the configuration and look at every node, without changing anything
    ///
    /// Says of each node whether it answers, its version, role, policy, durability and clock, whether its rules run natively
    /// or in Lua, whether it would be admitted, and what to do where it would not. Give it the flags of the gateway, --bootstrap too.
    ///
    /// Exit status: 0, a gateway would start and have a majority at once; 1, it would not; 2, the configuration cannot be used.
    Check(Settings),
    /// After an intended change of the node set or of max_ttl: stop the votes of the given nodes, wait until no lock of
    /// the old configuration can live, and write the new markers. All nodes must answer. It can be interrupted and run
    /// again. Stop the old gateways before: one that still runs takes a leaving node up again if that loses its data.
    Reconfigure {
        /// Do it. Without this flag it only says what it would do.
        #[arg(long)]
        yes: bool,
        /// When the node set changes, in part or wholly: a node that the gateways used until now; repeat for each, also for those that stay.
        #[arg(long = "old-node", value_name = "URL")]
        old_nodes: Vec<String>,
        /// The --cluster that the gateways used until now, if they used one.
        #[arg(long, value_name = "NAME")]
        old_cluster: Option<String>,
        /// The --max-ttl that the gateways used until now; wanted when no marker of theirs is left that tells it.
        #[arg(long, value_name = "TIME", requires = "old_nodes", value_parser = ttl)]
        old_max_ttl: Option<Ttl>,
        /// The --clock-skew that the gateways used until now, the longest where they differed; wanted when a marker does not tell it.
        #[arg(long, value_name = "DURATION", value_parser = clock_skew())]
        old_clock_skew: Option<Duration>,
        /// Say that no nodes were used before these. Otherwise nodes that tell of none want the old ones named.
        #[arg(long, conflicts_with_all = ["old_nodes", "old_cluster", "old_max_ttl", "old_clock_skew"])]
        no_old_nodes: bool,
        #[command(flatten)]
        settings: Settings,
    },
    /// Print a completion script.
    Completions { shell: clap_complete::Shell },
    /// Write the manual pages of all commands (troff).
    Man {
        /// Where to: redlock-gateway.1, redlock-gateway-check.1 and so on
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a key: prints it once, and what stands for it in the file of --auth-keys. Nothing is stored.
    ///
    /// The first line is the key; the rest is TOML, to be appended to the file. To replace a key without locking anybody
    /// out, put the new hash beside the old one in `hashes`, and take the old one out when nobody uses it any more.
    New {
        /// The principal, 1 to 64 characters of [A-Za-z0-9_-]; locks belong to it, whichever of its keys acquired them
        #[arg(value_parser = key_name)]
        name: String,
        /// What it may do, separated by commas
        #[arg(
            long,
            value_name = "LIST",
            value_enum,
            value_delimiter = ',',
            default_value = "acquire,extend,release,inspect"
        )]
        verbs: Vec<Verb>,
        /// To which locks, separated by commas: exact names, or patterns with * for any text
        #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "*")]
        names: Vec<String>,
        /// Until when, such as 2027-01-31 or 2027-01-31T12:00:00Z [default: for ever]
        #[arg(long, value_name = "DATE")]
        expires: Option<String>,
        /// The file that it is for: only looked at, and a warning given when others can read it
        #[arg(long, value_name = "FILE", env = "REDLOCK_AUTH_KEYS")]
        auth_keys: Option<PathBuf>,
    },
}

fn key_name(text: &str) -> Result<String, &'static str> {
    let name = is_key_name(text).then(|| text.to_owned());
    name.ok_or("expected 1 to 64 characters of [A-Za-z0-9_-], and not anonymous")
}
