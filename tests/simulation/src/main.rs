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

/// Simulates masters, gateways and clients around the real locking core, with everything going wrong that may. One seed is
/// one history, always the same; a checker then looks for broken promises.
#[derive(Parser)]
#[command(after_help = "\
Examples:
  redlock-sim --seed 17                                    what happens in history 17, line by line, and the verdict
  redlock-sim --seeds 0..1000                              a thousand histories, only the figures
  redlock-sim --without release-leaves-a-tombstone               the first history in which that rule is missed
  redlock-sim --seed 3 --without release-leaves-a-tombstone      the same, to be read
  redlock-sim --seeds 0..50 --scenario rolling             one extended lock, masters restarted empty in turn
  redlock-sim --seeds 0..50 --scenario queue               many who wait for one lock or two
  redlock-sim --seeds 0..50 --scenario reconfigure         an operator changes the configuration
 redlock-sim --seeds 0..500 --scenario moved              names move to processes that have read the old ones' files
  redlock-sim --seeds 0..500 --scenario skews              one gateway has another clock skew
  redlock-sim --seeds 0..500 --scenario fast-clocks        what clocks that break their promise can do

SafetyRules for --without: lock-is-kept, release-leaves-a-tombstone, release-keeps-newer, undo-is-exact, clock-is-checked, watermark-is-checked,
marker-is-checked, quarantine-is-waited, lost-locks-are-recovered, name-is-followed, returned-waits and two-alive-are-noticed
(found by --scenario moved), marker-names-skew (found by --scenario skews), rate-is-checked (see --scenario fast-clocks),
missing-is-repaired (found by --scenario rolling).

Exit status: 0 no violation, 1 violations, 2 wrong usage.")]
struct Arguments {
    /// Replay this history and print its timeline.
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// Run these histories, the last one excluded. [default: 0..300]
    #[arg(long, value_name = "FROM..TO", value_parser = range)]
    seeds: Option<Range<u64>>,
    /// Switch a rule off; a range of seeds ends at the first violation.
    #[arg(long, value_name = "RULE")]
    without: Option<Rule>,
    /// What the histories are about.
    #[arg(long, value_enum, default_value = "storm")]
    scenario: ScenarioArgument,
    /// Number of masters, instead of what the seed says.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=9))]
    nodes: Option<u8>,
    /// Simulated seconds until everything is mended. [default: 60]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ScenarioArgument {
    /// Every kind of fault, chosen by the seed.
    Storm,
    /// One lock extended in time while all masters are restarted without data, one after the other.
    Rolling,
    Young,
    /// The same, while others try to get the lock.
    Contended,
    /// Many who wait for one or two locks, with few faults or none.
    Queue,
    /// An operator moves the masters to another configuration.
    Reconfigure,
    /// Names move to processes that have read the files of the old ones, while these go on.
    Moved,
    /// The storm with one gateway that has another clock skew.
    Skews,
    /// The storm with clocks of masters that run faster than promised: not without violations, but with fewer of them
    /// than --without rate-is-checked.
    FastClocks,
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let parse =
        |number: &str| number.trim().parse::<u64>().map_err(|error| format!("{number:?}: {error}"));
    let (from, to) =
        text.split_once("..").ok_or("two numbers with .. between them, as in 0..300")?;
    Ok(parse(from)?..parse(to)?)
}

impl Arguments {
    fn plan(&self, seed: u64) -> Plan {
        let mut plan = match self.scenario {
            ScenarioArgument::Storm => Plan::storm(seed),
            ScenarioArgument::Rolling => Plan::rolling(seed, false),
            ScenarioArgument::Young => Plan::young(seed),
            ScenarioArgument::Contended => Plan::rolling(seed, true),
            ScenarioArgument::Queue => Plan::queue(seed),
            ScenarioArgument::Reconfigure => Plan::reconfigure(seed),
            ScenarioArgument::Moved => Plan::moved(seed),
            ScenarioArgument::Skews => Plan::skews(seed),
            ScenarioArgument::FastClocks => Plan::fast_clocks(seed),
        };
        if let Some(rule) = self.without {
            plan = rule.off(plan);
        }
        plan.masters = self.nodes.unwrap_or(plan.masters);
        plan.length = self.seconds.map_or(plan.length, Duration::from_secs);
        plan
    }

    /// How to see one history of this kind again.
    fn replay(&self, seed: u64) -> String {
        let mut command = format!("cargo run --release -p redlock-sim -- --seed {seed}");
        if let Some(rule) = self.without {
            command += &format!(" --without {rule}");
        }
        match self.scenario {
            ScenarioArgument::Storm => {}
            ScenarioArgument::Rolling => command += " --scenario rolling",
            ScenarioArgument::Young => command += " --scenario young",
            ScenarioArgument::Contended => command += " --scenario contended",
            ScenarioArgument::Queue => command += " --scenario queue",
            ScenarioArgument::Reconfigure => command += " --scenario reconfigure",
            ScenarioArgument::Moved => command += " --scenario moved",
            ScenarioArgument::Skews => command += " --scenario skews",
            ScenarioArgument::FastClocks => command += " --scenario fast-clocks",
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
    // A reader that closes the pipe early has seen enough.
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
        arguments.without.is_some(),
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
