//! Explores the models, or shows what goes wrong without a rule.

use std::io::Write;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::{Parser, ValueEnum};
use redlock_model::catalogue::{CASES, MUTATIONS, Size, mutation};

const EXAMPLES: &str = "\
Examples:
  cargo run --release -p redlock-model
  cargo run --release -p redlock-model -- --size large
  cargo run --release -p redlock-model -- --without release_keeps_newer

Exits with 0 when everything holds, or when the counter-example that was asked for is found; with 1 otherwise.";

/// Explores every order of events of the locking algorithm, within stated bounds.
///
/// Three nodes; two owners of whom one asks again; acquires, releases, extensions and repairs that arrive in any order or
/// never; leases that end and keys that expire at any moment; losses of data, restarts, evictions, new clusters and
/// configurations. It prints what holds, what was seen to be possible, and for a violation the way there, step by step.
///
/// With --without it switches one rule off and prints the shortest history that goes wrong.
#[derive(Debug, Parser)]
#[command(name = "redlock-model", after_help = EXAMPLES)]
struct Options {
    /// How much to explore: small takes a minute, large much longer and some gigabytes
    #[arg(long, value_enum, default_value = "small")]
    size: SizeName,

    /// Only models whose title contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,

    /// Switch this rule off and find out what it is for
    #[arg(long, value_name = "RULE", value_parser = PossibleValuesParser::new(MUTATIONS.iter().map(|m| m.rule)))]
    without: Option<String>,

    /// Threads that explore
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum SizeName {
    Small,
    Large,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let good = match options.without.as_deref().and_then(mutation) {
        Some(mutation) => {
            say(format!("Without {}, in \"{}\":", mutation.rule, mutation.case.title));
            let outcome = mutation.run(true);
            let found = outcome.violated.contains_key(mutation.property);
            say(outcome);
            say(match found {
                true => format!(
                    "As it must be: without {}, {} is violated.",
                    mutation.rule, mutation.property
                ),
                false => {
                    format!(
                        "Nothing goes wrong without {}: the model does not show what it is for.",
                        mutation.rule
                    )
                }
            });
            found
        }
        None => {
            let size = match options.size {
                SizeName::Small => Size::Small,
                SizeName::Large => Size::Large,
            };
            let mut good = true;
            for case in
                CASES.iter().filter(|case| case.size <= size && case.title.contains(&options.only))
            {
                say(format!("{}:", case.title));
                let outcome = case.run(options.threads.into(), true);
                good &= outcome.is_good();
                say(outcome);
            }
            say(if good { "Everything holds." } else { "NOT everything holds." });
            good
        }
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Whoever reads may stop reading.
fn say(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
