//! The suite: one run measures all workloads, or the named ones, one after another.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, ValueEnum};

use crate::contenders::{Contender, Programs};
use crate::report::{Run, Table, cores, machine, source};
use crate::stage::Stage;
use crate::workload::{Workload, WorkloadKind};
use crate::{contended, held_renewals, held_streams, renewals, waiters, watchers};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Length of one measurement [default: 3, or 1 with --quick]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: Option<u64>,

    /// Measurements of each contender; the medians are printed [default: 3, or 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,

    /// Measure briefly, and skip workloads with a long preparation unless they are named
    #[arg(long)]
    quick: bool,

    /// Run only these workloads, separated by commas
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    workload: Vec<Workload>,

    /// Measure only these contenders, separated by commas
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    only: Vec<Contender>,

    /// Path of the gateway's binary [default: redlock-gateway beside this program]
    #[arg(long, value_name = "PATH")]
    gateway: Option<PathBuf>,

    /// Pass this on to every gateway, for instance --gateway-arg=--node-timeout=100ms; may be
    /// repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    gateway_arg: Vec<String>,

    /// Also write every single measurement to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Options {
    /// The length of one measurement. A quick run has a shorter default.
    fn window(&self) -> Duration {
        Duration::from_secs(self.seconds.unwrap_or(if self.quick { 1 } else { 3 }))
    }

    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 })
    }

    /// The workloads to measure, in their usual order.
    fn workloads(&self) -> Vec<Workload> {
        let wanted = |workload: &Workload| match self.workload.as_slice() {
            [] => workload.is_usual(self.quick),
            named => named.contains(workload),
        };
        let takes_part = |workload: &Workload| !self.lineup(*workload).is_empty();
        Workload::value_variants().iter().copied().filter(wanted).filter(takes_part).collect()
    }

    /// The contenders that take part in a workload. Empty if `--only` names none of them.
    fn lineup(&self, workload: Workload) -> Vec<Contender> {
        let all = match workload.kind() {
            WorkloadKind::Load(spec) => spec.lineup,
            WorkloadKind::Contended
            | WorkloadKind::Renewals(_)
            | WorkloadKind::HeldRenewals
            | WorkloadKind::Waiters
            | WorkloadKind::Watchers
            | WorkloadKind::HeldStreams => &[Contender::Gateway],
        };
        all.iter()
            .copied()
            .filter(|contender| self.only.is_empty() || self.only.contains(contender))
            .collect()
    }
}

/// Runs the suite. It starts processes, so it must be called on the main thread.
pub(crate) async fn measure(options: &Options) -> Result<(), String> {
    let workloads = options.workloads();
    if workloads.is_empty() {
        return Err(
            "none of the contenders in --only takes part in the workloads of --workload".into()
        );
    }
    let words: Vec<_> = std::env::args().skip(1).collect();
    let mut run = Run {
        machine: machine()?,
        source: source(),
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        command: format!("redlock-bench {}", words.join(" ")).trim().to_owned(),
        ..Run::default()
    };
    let programs = Programs::find(options.gateway.as_deref(), &options.gateway_arg)?;
    if workloads
        .iter()
        .any(|&workload| options.lineup(workload).iter().any(|contender| contender.is_gateway()))
    {
        programs.check()?;
    }
    // The file is created first, so that an unwritable path fails before the run.
    let json = options
        .json
        .as_ref()
        .map(File::create)
        .transpose()
        .map_err(|error| format!("--json: {error}"))?;
    for (at, &workload) in workloads.iter().enumerate() {
        eprintln!("[{}/{} {workload}]", at + 1, workloads.len());
        let name = workload.to_string();
        let description = workload.description();
        let mut table = Table { name, description, ..Table::default() };
        if let Err(error) = run_workload(workload, options, &programs, &mut table).await {
            eprintln!("FAILED: {error}");
            table.faults.push(error);
        }
        println!("{table}");
        run.tables.push(table);
    }
    let rounds = options.rounds();
    let seconds = options.window().as_secs();
    println!("{}; {}. Medians of {rounds} × {seconds} s.", run.machine, run.source);
    if let Some(file) = json {
        serde_json::to_writer_pretty(file, &run).map_err(|error| format!("--json: {error}"))?;
    }
    run.verdict()
}

async fn run_workload(
    workload: Workload,
    options: &Options,
    programs: &Programs,
    table: &mut Table,
) -> Result<(), String> {
    let window = options.window();
    let rounds = options.rounds();
    let load_threads = (cores() / 2).max(1);
    match workload.kind() {
        WorkloadKind::Load(spec) => {
            let lineup = options.lineup(workload);
            let load_threads = load_threads.min(spec.connections);
            Stage { workload, lineup, window, rounds, load_threads, programs, spec }
                .run(table)
                .await
        }
        WorkloadKind::Contended => {
            contended::measure(programs, window, rounds, load_threads, table).await
        }
        WorkloadKind::Renewals(locks) => {
            renewals::measure(programs, (window, rounds), locks, load_threads, table).await
        }
        WorkloadKind::HeldRenewals => {
            held_renewals::measure(programs, window, options.quick, load_threads, table).await
        }
        WorkloadKind::Waiters => waiters::measure(programs, options.quick, table).await,
        WorkloadKind::Watchers => {
            watchers::measure(programs, window, rounds, options.quick, table).await
        }
        WorkloadKind::HeldStreams => {
            held_streams::measure(programs, rounds, options.quick, table).await
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command, FromArgMatches as _};

    use super::*;

    fn options(args: &[&str]) -> Options {
        let matches = Options::augment_args(Command::new("bench"))
            .get_matches_from([&["bench"], args].concat());
        Options::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn quick_run_is_short_unless_options_differ() {
        let quick = options(&["--quick"]);
        assert!(
            !quick.workloads().contains(&Workload::Names1m)
                && quick.workloads().contains(&Workload::Waiters)
        );
        assert_eq!((quick.window().as_secs(), quick.rounds()), (1, 1));
        let named = options(&["--quick", "--rounds=2", "--workload=names-1m,stopped"]);
        assert_eq!(
            (named.workloads(), named.rounds()),
            (vec![Workload::Stopped, Workload::Names1m], 2)
        );
    }

    #[test]
    fn unnamed_contenders_stay_out() {
        let some = options(&["--only=gateway,noop"]);
        assert_eq!(some.lineup(Workload::Uncontended), [Contender::Noop, Contender::Gateway]);
        assert_eq!(options(&["--only=noop"]).lineup(Workload::Contended), []);
    }
}
