//! The suite: all workloads, or those that were asked for, one after another, as one report.

mod progress;

use std::time::{Duration, SystemTime};

use clap::{Args, ValueEnum};

use self::progress::Progress;
use crate::contended;
use crate::contenders::{Contender, Programs};
use crate::document::{Report, Settings};
use crate::goals::judged;
use crate::holders::HELD_FOR;
use crate::options::Shared;
use crate::report::{JsonFile, Machine, Source};
use crate::stage::Stage;
use crate::waiters;
use crate::workload::{Kind, Spec, Workload};

/// What a turn takes besides what is counted: warm-up, connecting, stopping.
const TURN_OVERHEAD: Duration = Duration::from_millis(800);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Length of one measurement [default: 3, or 1 with --quick]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: Option<u64>,

    /// Measurements of each contender; the medians are printed [default: 3, or 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,

    /// Short measurements, and without the workloads that take long to prepare unless they are named
    #[arg(long)]
    quick: bool,

    /// Threads of the load generator; it is said when they were the limit [default: half the cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    load_threads: Option<u32>,

    /// Run only these workloads, separated by commas
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    workload: Vec<Workload>,

    /// Measure only these contenders, separated by commas
    #[arg(long, value_name = "LIST", value_enum, value_delimiter = ',')]
    only: Vec<Contender>,

    #[command(flatten)]
    shared: Shared,
}

impl Options {
    fn settings(&self) -> Settings {
        let (seconds, rounds) = if self.quick { (1, 1) } else { (3, 3) };
        let mut only = self.only.clone();
        only.sort_unstable();
        only.dedup();
        Settings {
            seconds: self.seconds.unwrap_or(seconds),
            rounds: self.rounds.unwrap_or(rounds),
            quick: self.quick,
            only,
            gateway_args: self.shared.gateway_arg.clone(),
        }
    }

    /// In their usual order.
    fn workloads(&self) -> Vec<Workload> {
        let wanted = |workload: &Workload| match self.workload.as_slice() {
            [] => !(self.quick && workload.is_long()),
            named => named.contains(workload),
        };
        Workload::value_variants().iter().copied().filter(wanted).collect()
    }
}

impl Settings {
    fn has(&self, contender: Contender) -> bool {
        self.only.is_empty() || self.only.contains(&contender)
    }

    /// Empty when nobody who was asked for takes part.
    fn lineup(&self, workload: Workload) -> Vec<Contender> {
        match workload.kind() {
            Kind::Load(spec) => spec.lineup.iter().copied().filter(|&contender| self.has(contender)).collect(),
            Kind::Contended | Kind::Waiters if self.has(Contender::Gateway) => vec![Contender::Gateway],
            Kind::Contended | Kind::Waiters => Vec::new(),
        }
    }

    /// About how long it takes, for the time that is left.
    fn estimate(&self, workload: Workload) -> Duration {
        let turn = Duration::from_secs(self.seconds) + TURN_OVERHEAD;
        match workload.kind() {
            Kind::Load(spec) => {
                let twin = workload.twin().map(|(_, twin)| twin.prepared());
                let turns = self.rounds * self.lineup(workload).len() as u32 * if twin.is_some() { 2 } else { 1 };
                let prepared = spec.prepared() + twin.unwrap_or_default();
                turn * turns + Duration::from_micros(60 * prepared) + Duration::from_secs(1)
            }
            Kind::Contended => (turn + Duration::from_secs(1)) * self.rounds * 4,
            Kind::Waiters => Duration::from_secs(if self.quick { 10 } else { 35 }),
        }
    }

    /// Held locks must not expire meanwhile.
    fn check(&self, workload: Workload) -> Result<(), String> {
        let holds = matches!(workload.kind(), Kind::Load(Spec { held: 1.., .. }));
        let (needed, seconds) = (self.estimate(workload).as_secs(), HELD_FOR.as_secs());
        if holds && needed > seconds {
            return Err(format!(
                "{workload} would take about {needed} s with {} rounds of {} s, and its locks are held for {seconds} s: \
                 leave it out with --workload, or take fewer --rounds or --seconds",
                self.rounds, self.seconds
            ));
        }
        Ok(())
    }
}

/// Must be called on the main thread, because it starts processes.
pub(crate) async fn measure(options: &Options) -> Result<(), String> {
    let settings = options.settings();
    let mut workloads = options.workloads();
    workloads.retain(|&workload| !settings.lineup(workload).is_empty());
    if workloads.is_empty() {
        return Err("none of the contenders in --only takes part in the workloads of --workload".into());
    }
    workloads.iter().try_for_each(|&workload| settings.check(workload))?;
    let mut report = Report {
        machine: Machine::look()?,
        source: Source::look(),
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        settings,
        workloads: Vec::new(),
        contended: None,
        waiters: None,
        left_out: Vec::new(),
        failures: Vec::new(),
    };
    leave_out_unavailable(&mut workloads, options, &mut report)?;

    let needs_gateway = Contender::ALL.into_iter().any(|one| one.is_gateway() && report.settings.has(one));
    let programs = Programs::find(needs_gateway, options.shared.gateway.as_deref())?;
    let json = JsonFile::create(options.shared.json.as_deref())?;
    let plan = workloads.iter().map(|&workload| (workload, report.settings.estimate(workload)));
    let mut progress = Progress::new(plan.collect());
    for workload in workloads {
        if let Err(error) = one(workload, options, &programs, &mut progress, &mut report).await {
            progress.tell(&format!("FAILED: {error}"), 1.0);
            report.failures.push(format!("{workload}: {error}"));
        }
        progress.next();
    }

    let judged = judged(&report);
    print!("{judged}");
    json.write(&judged)?;
    report.verdict()
}

/// What was asked for by name must be possible.
fn leave_out_unavailable(workloads: &mut Vec<Workload>, options: &Options, report: &mut Report) -> Result<(), String> {
    let mut possible = Vec::with_capacity(workloads.len());
    for &workload in &*workloads {
        let available = match workload.kind() {
            Kind::Load(spec) => spec.condition.available(),
            Kind::Contended | Kind::Waiters => Ok(()),
        };
        match available {
            Ok(()) => possible.push(workload),
            Err(error) if options.workload.is_empty() => report.left_out.push(format!("{workload}: {error}")),
            Err(error) => return Err(format!("{workload}: {error}")),
        }
    }
    report.left_out.iter().for_each(|reason| eprintln!("left out: {reason}"));
    *workloads = possible;
    Ok(())
}

async fn one(
    workload: Workload,
    options: &Options,
    programs: &Programs,
    progress: &mut Progress,
    report: &mut Report,
) -> Result<(), String> {
    let settings = &report.settings;
    match workload.kind() {
        Kind::Load(spec) => {
            let default = (report.machine.cores as u32 / 2).max(1);
            let stage = Stage {
                workload,
                lineup: settings.lineup(workload),
                window: Duration::from_secs(settings.seconds),
                rounds: settings.rounds,
                load_threads: options.load_threads.unwrap_or(default).min(spec.connections),
                programs,
                gateway_args: &settings.gateway_args,
                spec,
            };
            let measured = stage.run(|text, done| progress.tell(text, done)).await?;
            report.workloads.push(measured);
        }
        Kind::Contended => {
            progress.tell("starting", 0.0);
            let &Settings { seconds, rounds, ref gateway_args, .. } = settings;
            let options = contended::Options::of_suite(seconds, rounds, options.load_threads, gateway_args);
            report.contended = Some(contended::run(&options, programs.gateway(), report.machine.clone()).await?);
        }
        Kind::Waiters => {
            progress.tell("starting", 0.0);
            let options = waiters::Options::of_suite(settings.quick, &settings.gateway_args);
            report.waiters = Some(waiters::run(&options, programs.gateway(), report.machine.clone()).await?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::parsed;

    fn options(args: &[&str]) -> Options {
        parsed(args)
    }

    #[test]
    fn a_quick_run_is_short_unless_it_is_told_otherwise() {
        let quick = options(&["--quick"]);
        assert!(!quick.workloads().contains(&Workload::Names1m) && quick.workloads().contains(&Workload::Waiters));
        assert_eq!((quick.settings().seconds, quick.settings().rounds), (1, 1));
        let named = options(&["--quick", "--rounds=2", "--workload=names-1m,mixed"]);
        assert_eq!(named.workloads(), [Workload::Mixed, Workload::Names1m]);
        assert_eq!((named.settings().seconds, named.settings().rounds), (1, 2));
    }

    #[test]
    fn a_whole_run_takes_less_than_twenty_minutes() {
        let (options, settings) = (options(&[]), options(&[]).settings());
        let total: Duration = options.workloads().into_iter().map(|workload| settings.estimate(workload)).sum();
        assert!((300..1200).contains(&total.as_secs()), "{total:?}");
    }

    #[test]
    fn contenders_that_were_not_asked_for_stay_out() {
        let settings = options(&["--only=gateway,noop"]).settings();
        assert_eq!(settings.lineup(Workload::Uncontended), [Contender::Noop, Contender::Gateway]);
        assert_eq!(options(&["--only=noop"]).settings().lineup(Workload::Contended), []);
    }

    #[test]
    fn locks_that_would_expire_are_refused() {
        assert_eq!(options(&[]).settings().check(Workload::Held100k), Ok(()));
        let long = options(&["--seconds=120"]).settings();
        assert!(long.check(Workload::Held1k).is_err_and(|error| error.contains("300 s")));
        assert_eq!(long.check(Workload::Names1m), Ok(()));
    }
}
