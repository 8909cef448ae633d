//! Measures the cost of this tree. Beside the gateway it measures an HTTP server that does nothing,
//! and the obvious design: one Redis command for each node and request. All of them use the same
//! number of masters, five, in one run.
//!
//! Absolute figures depend on the machine and the hour, so only ratios within one run are useful.
//! The contenders take turns within a round, and each round begins with another contender. The
//! printed figures are medians over the rounds. If the rounds of a contender disagree, the program
//! names it: the machine was busy, and the contender's figures are worthless.
//!
//! Masters, contenders and load are separate processes on one machine. The kernel accounts the CPU
//! time of each process.
//!
//! The program measures a suite of workloads and prints one table for each.
//!
//! | module | holds |
//! | --- | --- |
//! | `workload` | each workload: its contenders and the actions of a connection |
//! | `suite` | the run: its workloads and their length |
//! | `stage` | one workload: its contenders take turns |
//! | `contenders` | the measured programs, and how each is started |
//! | `naive` | the contenders inside this program, which runs itself again to be one |
//! | `in_process` | the contender that is no server but a library in this program |
//! | `servers` | child processes: starting, waiting, accounting, killing |
//! | `masters` | the masters: healthy, one stopped, one late, all behind a network |
//! | `network` | the delay |
//! | `worker_pool` | workers on threads: run, count, stop |
//! | `client` | the HTTP client of the load |
//! | `streams` | the client's end of a stream of events |
//! | `load` | connections that acquire and release, their counts, and locks held meanwhile |
//! | `pictures` | pictures and a table of finished runs |
//! | `report` | results: rows of figures, and when they are worthless |
//! | `contended` | one lock, waiting beside polling |
//! | `renewals` | extensions, one lock with each request and many |
//! | `held_renewals` | very many locks that are renewed once in 10 s: their memory and CPU time |
//! | `waiters` | ten thousand waiting requests: their memory, and their effect on others |
//! | `held_streams` | a thousand streams that keep their locks: their memory, and how early a loss is told |
//! | `watchers` | ten thousand streams of events: their memory, and their effect on others |

mod client;
mod contended;
mod contenders;
mod held_renewals;
mod held_streams;
mod in_process;
mod load;
mod masters;
mod naive;
mod network;
mod pictures;
mod renewals;
mod report;
mod servers;
mod stage;
mod streams;
mod suite;
mod waiters;
mod watchers;
mod worker_pool;
mod workload;

use std::net::SocketAddr;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use crate::naive::Design;

const EXAMPLES: &str = "\
Examples:
  cargo build --release -p redlock-gateway && cargo run --release -p redlock-bench
  cargo run --release -p redlock-bench -- --quick
  cargo run --release -p redlock-bench -- --workload uncontended,stopped --only fred-fenced,gateway --json run.json
  cargo run --release -p redlock-bench -- draw run.json

Run it on an idle machine; it reports when other programs disturbed it. It exits with 1 after wrong
answers: anything but 201 to an acquire and 204 to a release, overlapping grants, lost waiters.";

/// Measures the gateway beside the floor, the naive designs and a library, and prints tables.
///
/// For each workload it starts five redis-servers and every contender on free loopback ports. Each
/// contender serves the same load in turn, and the medians over the rounds are printed. All started
/// processes end with the program. Progress goes to stderr, the tables to stdout.
///
/// Needs redis-server 7 or newer, setpriv (util-linux) and openssl on the PATH, and gateway and
/// module built beside this program.
#[derive(Debug, Parser)]
#[command(name = "redlock-bench", after_help = EXAMPLES)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
struct Cli {
    #[command(flatten)]
    suite: suite::Options,

    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// Run as one of the naive contenders
    #[command(hide = true)]
    Naive {
        #[arg(value_enum)]
        design: Design,
        #[arg(long)]
        listen: SocketAddr,
        /// Address of a master
        #[arg(long)]
        master: Vec<SocketAddr>,
    },
    /// Draw pictures of finished runs, and print a table
    Draw(pictures::Options),
    /// Run as the network
    #[command(hide = true)]
    Network(network::Options),
}

fn main() -> ExitCode {
    let Cli { suite, role } = Cli::parse();
    let result = match role {
        Some(Role::Naive { design, listen, master }) => naive::serve(design, listen, &master),
        Some(Role::Network(options)) => network::serve(&options),
        Some(Role::Draw(options)) => pictures::draw(&options),
        None => until_interrupted(suite::measure(&suite)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("redlock-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the measurement until it ends or is interrupted. The kernel kills a child when the thread
/// that spawned it ends. `block_on` polls its future on this thread, which is the main one. So code
/// that spawns a child must not move into a task.
fn until_interrupted(measure: impl Future<Output = Result<(), String>>) -> Result<(), String> {
    if cfg!(debug_assertions) {
        eprintln!(
            "debug build: the figures are worthless, use `cargo run --release -p redlock-bench`"
        );
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot start a runtime: {error}"))?;
    runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| error.to_string())?;
        let mut terminate = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
        tokio::select! {
            biased;
            _ = interrupt.recv() => Err("interrupted".into()),
            _ = terminate.recv() => Err("terminated".into()),
            result = measure => result,
        }
    })
}
