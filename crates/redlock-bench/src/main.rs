//! What this tree costs: the gateway beside an HTTP server that does nothing and beside the obvious design, a Redis
//! command per node and request, on the same five masters, in one run.
//!
//! Absolute figures follow the machine and the hour; ratios within one run are what this program is for. So the
//! contenders take turns within a round, each round begins with another one, and medians over the rounds are printed. A
//! contender whose rounds disagree is named: then the machine was busy with something else, and the run is worth
//! nothing.
//!
//! Masters, contenders and load share one machine, as separate processes. CPU is read from the accounting of the
//! processes themselves.
//!
//! Without a subcommand it is a suite of workloads, judged by goals. `contended` and `waiters` are part of it and can be run
//! by themselves with options of their own; `page` makes the project's performance page of what was measured. `growth` uses
//! millions of names and looks at what is left of them.
//!
//! | module | holds |
//! | --- | --- |
//! | `workload` | what is measured: who takes part, and what a connection does |
//! | `suite` | the run: which workloads, how long, how far |
//! | `stage` | one workload: its contenders take turns |
//! | `contenders` | who is measured, and how each is started |
//! | `naive` | the contenders that live in here; the program runs itself again to be one |
//! | `in_process` | the contender that is no server but a library in here |
//! | `servers` | child processes: starting, waiting for, accounting, killing |
//! | `conditions` | the masters: healthy, one stopped, one late, all behind a network |
//! | `network` | the delay |
//! | `worker_pool` | workers on threads: run, count, stop |
//! | `load` | the connections that acquire, extend and release, and what they counted |
//! | `holders` | locks that are held meanwhile |
//! | `http` | as much of an HTTP/1.1 client as the load needs |
//! | `metrics` | single figures out of a gateway's metrics |
//! | `histogram` | latencies |
//! | `report` | what documents are made of: figures, medians, tables, JSON |
//! | `document` | a run as one document |
//! | `goals` | what is to be reached, and whether it was |
//! | `page` | the performance page |
//! | `options` | options that several commands share |
//! | `contended` | one lock, waiting beside polling |
//! | `grants` | what the grants of one lock say, laid side by side |
//! | `waiters` | ten thousand requests that wait: memory, hand-over, disconnects, punctuality |
//! | `growth` | ten million names, each used once: what is left behind |
//! | `isolation` | what one client has to suffer from another one: attacks, and a victim beside each |

mod conditions;
mod contended;
mod contenders;
mod document;
mod goals;
mod grants;
mod growth;
mod histogram;
mod holders;
mod http;
mod in_process;
mod isolation;
mod load;
mod metrics;
mod naive;
mod network;
mod options;
mod page;
mod report;
mod servers;
mod stage;
mod suite;
mod waiters;
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
  cargo run --release -p redlock-bench -- --workload uncontended,mixed --only fred-fenced,gateway --json run.json

Run it while the machine has nothing else to do; it says when that was not so. A goal that is missed is a figure, and
no failure. It exits with 1 after wrong answers: anything but 201 to an acquire, 200 to an extension and 204 to a
release, save 409 where a lock may be held, grants that overlap, waiters that are forgotten.";

/// Measures the gateway beside the floor, the naive designs and a library, and prints tables and goals.
///
/// For each workload it starts five redis-servers and every contender on free loopback ports, lets each serve the same
/// load in turn, and prints the medians over the rounds. Everything that was started ends with the program. Progress goes
/// to stderr, the tables to stdout.
///
/// Needs redis-server 7 or newer and setpriv (util-linux) on the PATH, and the gateway built beside this program.
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
    /// Be one of the naive contenders
    #[command(hide = true)]
    Naive {
        #[arg(value_enum)]
        design: Design,
        #[arg(long)]
        listen: SocketAddr,
        /// Address of a master
        #[arg(long)]
        master: Vec<SocketAddr>,
        /// Threads that serve requests [default: half the cores]
        #[arg(long)]
        threads: Option<usize>,
    },
    Contended(contended::Options),
    Waiters(waiters::Options),
    Growth(growth::Options),
    Isolation(isolation::Options),
    /// Be the attacker
    #[command(hide = true)]
    Attack(isolation::AttackerOptions),
    Page(page::Options),
}

fn main() -> ExitCode {
    let Cli { suite, role } = Cli::parse();
    let result = match role {
        Some(Role::Naive { design, listen, master, threads }) => naive::serve(design, listen, &master, threads),
        Some(Role::Contended(options)) => until_interrupted(contended::measure(&options)),
        Some(Role::Waiters(options)) => until_interrupted(waiters::measure(&options)),
        Some(Role::Growth(options)) => until_interrupted(growth::measure(&options)),
        Some(Role::Isolation(options)) => until_interrupted(isolation::measure(&options)),
        Some(Role::Attack(options)) => until_interrupted(isolation::attack(options)),
        Some(Role::Page(options)) => page::print(&options),
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

/// Children are told to die with the thread that spawned them. `block_on` polls its future on this thread, the main
/// one; nothing that spawns a child may move into a task.
fn until_interrupted(measure: impl Future<Output = Result<(), String>>) -> Result<(), String> {
    if cfg!(debug_assertions) {
        eprintln!("debug build: the figures mean nothing, use `cargo run --release -p redlock-bench`");
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
