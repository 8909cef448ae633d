//! The command line of the simulation: one seed as a timeline, or many seeds as figures.

use std::io::Write;
use std::ops::Range;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use redlock_sim::checker::{Demand, Summary};
use redlock_sim::plan::Plan;
use redlock_sim::rule::Rule;
use redlock_sim::run::run;
use redlock_sim::search::search;
use redlock_sim::timeline;

/// Simulates masters, gateways and clients around the real locking core, with many kinds of faults.
/// One seed always gives the same history. A checker then looks for violated promises.
#[derive(Parser)]
#[command(after_help = "\
Examples:
  redlock-sim --seed 17                                    history 17 line by line, and the verdict
  redlock-sim --seeds 0..1000                              a thousand histories, figures only
  redlock-sim --without release-leaves-a-tombstone
                                                           the first violation without that rule
  redlock-sim --seed 3 --without release-leaves-a-tombstone
                                                           history 3 without that rule, line by line
  redlock-sim --seeds 0..50 --scenario rolling             one extended lock, rolling restarts
  redlock-sim --seeds 0..50 --scenario queue               many clients wait for one lock or two
  redlock-sim --seeds 0..50 --scenario reconfigure         an operator changes the configuration
  redlock-sim --seeds 0..500 --scenario moved              names move to other processes
  redlock-sim --seeds 0..500 --scenario deferred           requests that are claimed later
  redlock-sim --seeds 0..500 --scenario copies             requests that are sent up to four times
  redlock-sim --seeds 0..500 --scenario skews              one gateway has another clock skew
  redlock-sim --seeds 0..500 --scenario fast-clocks        masters' clocks run faster than promised

Rules for --without: lock-is-kept, release-leaves-a-tombstone, release-keeps-newer,
undo-is-exact, clock-is-checked, watermark-is-checked, marker-is-checked, quarantine-is-waited,
name-is-followed, watermark-outlives-lock; with --scenario moved: returned-waits,
answered-calls-are-known; with --scenario skews: marker-names-skew; with --scenario fast-clocks:
rate-is-checked; with --scenario young: admitted-is-caught-up; together with admitted-is-caught-up
and --scenario rolling: missing-is-repaired; together with both and --scenario contended:
lost-locks-are-recovered.

Exit status: 0 no violation, 1 violations, 2 wrong usage.")]
struct Arguments {
    /// Replay the history of this seed and print its timeline.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Run the histories of these seeds, without the last one. [default: 0..300]
    #[arg(long, value_name = "FROM..TO", value_parser = range)]
    seeds: Option<Range<u64>>,
    /// Switch these rules off. The run stops at the first violation.
    #[arg(long, value_name = "RULE,RULE,…", value_delimiter = ',')]
    without: Vec<Rule>,
    /// The kind of history.
    #[arg(long, value_enum, default_value = "storm")]
    scenario: ScenarioArgument,
    /// Number of masters, instead of the number that the seed gives.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=9))]
    nodes: Option<u8>,
    /// Simulated seconds until all faults are mended. [default: 60]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ScenarioArgument {
    /// Every kind of fault, chosen by the seed.
    Storm,
    /// One lock that is extended in time, while all masters restart without data, one after the
    /// other.
    Rolling,
    /// Many locks that are rarely extended, while masters restart without data.
    Young,
    /// The rolling scenario, while other clients try to get the lock.
    Contended,
    /// Many clients that wait for one or two locks, with few faults or none.
    Queue,
    /// An operator moves the masters to another configuration.
    Reconfigure,
    /// An operator raises max_ttl while masters lose their data.
    Raise,
    /// Names move to new processes that have read the files of the old ones. The old processes
    /// still run.
    Moved,
    /// The storm, but many requests are answered before they are granted, and claimed later.
    Deferred,
    /// The storm, but most requests are sent up to four times at once.
    Copies,
    /// The storm, but one gateway has another clock skew than the others.
    Skews,
    /// The storm, but the clocks of masters run faster than promised. It finds violations, but
    /// fewer than with --without rate-is-checked.
    FastClocks,
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let parse =
        |number: &str| number.trim().parse::<u64>().map_err(|error| format!("{number:?}: {error}"));
    let (from, to) =
        text.split_once("..").ok_or("expected two numbers with .. between them, as in 0..300")?;
    Ok(parse(from)?..parse(to)?)
}

impl Arguments {
    fn plan(&self, seed: u64) -> Plan {
        let plan = match self.scenario {
            ScenarioArgument::Storm => Plan::storm(seed),
            ScenarioArgument::Rolling => Plan::rolling(seed, false),
            ScenarioArgument::Young => Plan::young(seed),
            ScenarioArgument::Contended => Plan::rolling(seed, true),
            ScenarioArgument::Queue => Plan::queue(seed),
            ScenarioArgument::Reconfigure => Plan::reconfigure(seed),
            ScenarioArgument::Raise => Plan::raise(seed),
            ScenarioArgument::Moved => Plan::moved(seed),
            ScenarioArgument::Deferred => Plan::deferred(seed),
            ScenarioArgument::Copies => Plan::copies(seed),
            ScenarioArgument::Skews => Plan::skews(seed),
            ScenarioArgument::FastClocks => Plan::fast_clocks(seed),
        };
        let mut plan = self.without.iter().fold(plan, |plan, rule| rule.off(plan));
        plan.masters = self.nodes.unwrap_or(plan.masters);
        plan.length = self.seconds.map_or(plan.length, Duration::from_secs);
        plan
    }

    /// The command that replays one seed of this kind.
    fn replay(&self, seed: u64) -> String {
        let mut command = format!("cargo run --release -p redlock-sim -- --seed {seed}");
        for rule in &self.without {
            command += &format!(" --without {rule}");
        }
        if let Some(scenario) = self.scenario.to_possible_value() {
            command += &format!(" --scenario {}", scenario.get_name());
        }
        if let Some(nodes) = self.nodes {
            command += &format!(" --nodes {nodes}");
        }
        if let Some(seconds) = self.seconds {
            command += &format!(" --seconds {seconds}");
        }
        command
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match arguments.seed {
        Some(seed) => one(&arguments, seed),
        None => many(&arguments),
    }
}

fn one(arguments: &Arguments, seed: u64) -> ExitCode {
    let outcome = run(&arguments.plan(seed));
    let mut text = timeline::render(&outcome.history);
    text += &format!("\nseed        {seed}\n{}\n\n", Summary::of(&outcome.history));
    for violation in &outcome.violations {
        text += &format!("VIOLATION   {violation}\n");
    }
    text += &match outcome.violations.len() {
        0 => "verdict     no violation\n".into(),
        count => format!("verdict     {count} violations\n"),
    };
    // Errors are ignored, because a reader may close the pipe early.
    let _ = std::io::stdout().write_all(text.as_bytes());
    exit(outcome.violations.is_empty())
}

fn many(arguments: &Arguments) -> ExitCode {
    let seeds = arguments.seeds.clone().unwrap_or(0..300);
    let total = seeds.end.saturating_sub(seeds.start);
    let began = Instant::now();
    let rate = |histories: u64| histories as f64 / began.elapsed().as_secs_f64();
    let progress = |summary: &Summary, violations: usize| {
        if summary.histories.is_multiple_of(10) || summary.histories == total {
            let histories = summary.histories;
            eprint!(
                "\r{histories} of {total} histories, {:.0}/s, violations in {violations}  ",
                rate(histories)
            );
        }
    };
    let found = search(
        seeds,
        &Demand::ALL,
        !arguments.without.is_empty(),
        |seed| arguments.plan(seed),
        progress,
    );
    eprintln!();
    println!("{}", found.summary);
    println!("speed       {:.1} histories/s", rate(found.summary.histories));
    for (seed, violation) in &found.violations {
        println!("\nseed {seed}: {violation}\n  replay: {}", arguments.replay(*seed));
    }
    println!(
        "\nverdict     {} of {} histories with violations",
        found.violations.len(),
        found.summary.histories
    );
    exit(found.violations.is_empty())
}

fn exit(good: bool) -> ExitCode {
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
