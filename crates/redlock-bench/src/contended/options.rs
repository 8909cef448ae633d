//! What is asked for, and who can be measured.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::options::{Shared, parsed};

const EXAMPLES: &str = "\
Examples:
  cargo build --release -p redlock-gateway && cargo run --release -p redlock-bench -- contended
  redlock-bench contended --only waiting-1,polling --workers 16 --hold-ms 5 --rounds 5 --json contended.json

Reading the table: hand-offs are grants that went to another worker than the grant before; starved is the longest time
that one worker was without a grant, waits that were open at the end included. It exits with 1 when two holders overlap,
when fencing tokens do not rise, and when more than 1 % of the answers are neither grants nor the 409 of a poll.";

/// Measures one contended lock: waiting in the gateway beside polling it.
///
/// Starts five redis-servers, lets each contender in turn have gateways of its own and the same number of workers on one
/// lock, and prints the medians over the rounds. Progress goes to stderr, the table to stdout.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// Length of one measurement
    #[arg(long, value_name = "S", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub(super) seconds: u64,

    /// Measurements of each contender; the medians are printed
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(super) rounds: u32,

    /// Connections that want the lock, each with one request in flight
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=1000))]
    pub(super) workers: u32,

    /// How long each holder keeps the lock
    #[arg(long, value_name = "MS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=20_000))]
    pub(super) hold_ms: u64,

    /// How long a waiting request asks to wait
    #[arg(long, value_name = "MS", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..))]
    pub(super) wait_ms: u64,

    /// Threads of the load generator; it is said when they were the limit [default: half the cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(super) load_threads: Option<u32>,

    /// Measure only these, separated by commas
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    pub(super) only: Vec<Contender>,

    #[command(flatten)]
    pub(crate) shared: Shared,
}

impl Options {
    /// As part of the suite.
    pub(crate) fn of_suite(seconds: u64, rounds: u32, load_threads: Option<u32>, gateway_arg: &[String]) -> Self {
        let mut options = Self { seconds, rounds, load_threads, ..parsed(&[]) };
        options.shared.gateway_arg = gateway_arg.to_vec();
        options
    }

    pub(super) fn lineup(&self) -> Vec<Contender> {
        let mut lineup = if self.only.is_empty() { Contender::value_variants().to_vec() } else { self.only.clone() };
        lineup.sort_unstable();
        lineup.dedup();
        lineup
    }
}

/// In the order of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Contender {
    /// Waiting in the queue of one gateway
    #[value(name = "waiting-1")]
    #[serde(rename = "waiting-1")]
    Waiting1,
    /// Waiting in the queues of two gateways, half of the workers each
    #[value(name = "waiting-2")]
    #[serde(rename = "waiting-2")]
    Waiting2,
    /// Polling one gateway
    #[value(name = "polling")]
    #[serde(rename = "polling")]
    Polling1,
    /// Polling two gateways, half of the workers each
    #[value(name = "polling-2")]
    #[serde(rename = "polling-2")]
    Polling2,
}

impl Contender {
    pub(super) fn label(self) -> String {
        self.to_possible_value().expect("none is hidden").get_name().to_owned()
    }

    pub(super) fn gateways(self) -> usize {
        match self {
            Self::Waiting1 | Self::Polling1 => 1,
            Self::Waiting2 | Self::Polling2 => 2,
        }
    }

    pub(super) fn waits(self) -> bool {
        matches!(self, Self::Waiting1 | Self::Waiting2)
    }
}
