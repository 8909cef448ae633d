//! What this tree costs: the gateway beside an HTTP server that does nothing and beside the obvious design, a Redis
//! command per node and request, on the same five masters, in one run.
//!
//! Absolute figures follow the machine and the hour; ratios within one run are what this program is for. So the
//! contenders take turns within a round, each round begins with another one, and medians over the rounds are printed. A
//! contender whose rounds disagree is named: then the machine was busy with something else, and the run is worth
//! nothing.
//!
//! Masters, contenders and load share one machine, as separate processes on loopback. CPU is read from the
//! accounting of the processes themselves. In the table locks are never contended; nowhere does a node fail or the
//! network have a delay: a figure for those is another program's.
//!
//! Two subcommands look at what the table does not: `contended` at one lock that everybody wants, `waiters` at very many
//! requests that wait at the same time.
//!
//! | module | holds |
//! | --- | --- |
//! | `contenders` | who is measured, and how each is started |
//! | `naive` | the contenders that live in here; the program runs itself again to be one |
//! | `in_process` | the contender that is no server but a library in here |
//! | `servers` | child processes: starting, waiting for, accounting, killing |
//! | `conditions` | the masters: healthy, one stopped, one late, all behind a network |
//! | `network` | the delay |
//! | `crew` | workers on threads: run, count, stop |
//! | `load` | the connections that acquire and release, and what they counted |
//! | `http` | as much of an HTTP/1.1 client as the load needs |
//! | `metrics` | single figures out of a gateway's metrics |
//! | `histogram` | latencies |
//! | `report` | medians, the table, the JSON file |
//! | `contended` | one lock, waiting beside polling |
//! | `grants` | what the grants of one lock say, laid side by side |
//! | `waiters` | ten thousand requests that wait: memory, hand-over, disconnects, punctuality |

#[cfg_attr(not(test), expect(dead_code, reason = "the suite brings the conditions that nobody asks for yet"))]
mod conditions;
mod contended;
mod contenders;
mod crew;
mod grants;
mod histogram;
mod http;
mod in_process;
mod load;
mod metrics;
mod naive;
mod network;
mod report;
mod servers;
mod waiters;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use crate::conditions::{Condition, Masters};
use crate::contenders::{Contender, Running};
use crate::load::Tally;
use crate::naive::Design;
use crate::report::{Machine, Measurement, Report};
use crate::servers::{Accounts, Scratch};

/// Long enough for connections to be open, scripts to be loaded and batches to have grown.
const WARM_UP: Duration = Duration::from_millis(500);

const EXAMPLES: &str = "\
Examples:
  cargo build --release -p redlock-gateway && cargo run --release -p redlock-bench
  cargo run --release -p redlock-bench -- --only fred-fenced,gateway --rounds 5 --json figures.json

Run it while the machine has nothing else to do; it says when that was not so.
Any answer but 201 to an acquire and 204 to a release is reported and makes it exit with 1.";

/// Measures the gateway beside the naive designs and prints a table.
///
/// Starts five redis-servers and every contender on free loopback ports, lets each serve acquire + release on random
/// names over keep-alive connections in turn, and prints the medians over the rounds. Everything that was started ends
/// with the program. Progress goes to stderr, the table to stdout.
///
/// Needs redis-server 7 or newer and setpriv (util-linux) on the PATH, and the gateway built beside this program.
#[derive(Debug, Parser)]
#[command(name = "redlock-bench", after_help = EXAMPLES)]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
struct Options {
    /// Length of one measurement
    #[arg(long, value_name = "S", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,

    /// Measurements of each contender; the medians are printed
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,

    /// Keep-alive connections, each with one request in flight
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,

    /// Threads of the load generator; it is said when they were the limit [default: half the cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    load_threads: Option<u32>,

    /// Measure only these, separated by commas
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    only: Vec<Contender>,

    /// The gateway's binary [default: redlock-gateway beside this program]
    #[arg(long, value_name = "PATH")]
    gateway: Option<PathBuf>,

    /// Passed on to the gateway, for instance --gateway-arg=--node-timeout=100ms; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    gateway_arg: Vec<String>,

    /// Also write every single measurement to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

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
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    let result = match options.role.take() {
        Some(Role::Naive { design, listen, master, threads }) => naive::serve(design, listen, &master, threads),
        Some(Role::Contended(options)) => until_interrupted(contended::measure(&options)),
        Some(Role::Waiters(options)) => until_interrupted(waiters::measure(&options)),
        None => until_interrupted(measure(&options)),
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

async fn measure(options: &Options) -> Result<(), String> {
    let mut lineup = if options.only.is_empty() { Contender::ALL.to_vec() } else { options.only.clone() };
    lineup.sort_unstable();
    lineup.dedup();
    let programs = contenders::Programs::find(&lineup, options.gateway.as_deref())?;
    let json = options.json.as_ref().map(|path| report::JsonFile::create(path)).transpose()?;
    let machine = Machine::look()?;
    let threads = options.load_threads.unwrap_or_else(|| (machine.cores as u32 / 2).max(1)).min(options.connections);

    let scratch = Scratch::create()?;
    let masters = Masters::start(Condition::Healthy, &scratch).await?;
    let mut running = Vec::new();
    for &contender in &lineup {
        eprintln!("starting {}", contender.label());
        running.push(match contender {
            Contender::Rslock => None,
            _ => Some(contenders::start(contender, &programs, &masters, &options.gateway_arg, &scratch).await?),
        });
    }

    let mut report = Report::new(machine, options.seconds, options.connections, threads, &lineup);
    for round in 0..options.rounds {
        for turn in 0..lineup.len() {
            let at = (turn + round as usize) % lineup.len();
            let server = running[at].as_ref();
            let window = Duration::from_secs(options.seconds);
            let measurement =
                measure_one(server, &masters, options.connections, threads, window).await.map_err(|error| {
                    let log = server.map(|server| server.process.log_tail()).unwrap_or_default();
                    format!("{}: {error}\n{log}", lineup[at].label())
                })?;
            eprintln!("round {}/{}  {:<22} {measurement}", round + 1, options.rounds, lineup[at].label());
            report.add(lineup[at], measurement);
        }
    }

    print!("{report}");
    if let Some(json) = json {
        json.write(&report)?;
    }
    match report.errors() {
        0 => Ok(()),
        errors => Err(format!("{errors} answers were not the expected 201 or 204; the figures leave them out")),
    }
}

/// One turn of one contender: warm up, then count between two looks at the clock and at everybody's CPU time, while the
/// load goes on across both. Without a server it is the one that runs in here.
async fn measure_one(
    server: Option<&Running>,
    masters: &Masters,
    connections: u32,
    threads: u32,
    window: Duration,
) -> Result<Measurement, String> {
    let mut load = match server {
        Some(server) => load::start(server.address, connections, threads)?,
        None => in_process::start(&masters.addresses().collect::<Vec<_>>(), connections)?,
    };
    let process = || server.map(|server| &server.process);
    load.run_for(WARM_UP).await?;

    let (began, before) = (Instant::now(), Accounts::look(process(), masters)?);
    load.count(true);
    load.run_for(window).await?;
    load.count(false);
    let (elapsed, after) = (began.elapsed(), Accounts::look(process(), masters)?);

    let tally = Tally::sum(load.stop(load::STOP_WITHIN).await?);
    let cpu = after.since(&before);
    let (cpu, peak_memory) = match server {
        Some(server) => (cpu, server.process.peak_memory_bytes()?),
        None => (cpu.in_process(), servers::own_peak_memory_bytes()?),
    };
    Measurement::new(&tally, elapsed, cpu, threads, peak_memory)
}
