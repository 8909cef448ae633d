//! Explores the models, or shows the counter-example to a model without one rule.

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

Exits with 0 when every property holds, or when the requested counter-example is found;
exits with 1 otherwise.";

/// Explores every order of events of the locking algorithm, within stated bounds.
///
/// Three nodes and two owners, one of which asks a second time. Acquires, releases, extensions and
/// repairs arrive in any order or never. Leases end and keys expire at any moment. Nodes lose data,
/// restart and evict keys. Some cases start a new cluster or change the configuration. The output
/// lists the properties that hold and the situations that occurred. For each violation it lists the
/// steps that lead there.
///
/// With --without, it switches one rule off and prints the shortest history that violates a
/// property.
#[derive(Debug, Parser)]
#[command(name = "redlock-model", after_help = EXAMPLES)]
struct Options {
    /// How much to explore: small takes about a minute, medium some minutes, large hours and
    /// gigabytes
    #[arg(long, value_enum, default_value = "small")]
    size: SizeName,

    /// Run only the models whose title contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,

    /// Switch this rule off and print the counter-example
    #[arg(long, value_name = "RULE", value_parser = PossibleValuesParser::new(MUTATIONS.iter().map(|m| m.rule)))]
    without: Option<String>,

    /// Number of threads that explore
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum SizeName {
    Small,
    Medium,
    Large,
}

fn main() -> ExitCode {
    let options = Options::parse();
    let good = match options.without.as_deref().and_then(mutation) {
        Some(mutation) => {
            print_line(format!("Without {}, in \"{}\":", mutation.rule, mutation.case.title));
            let outcome = mutation.run(true);
            let found = outcome.violated.contains_key(mutation.property);
            print_line(outcome);
            print_line(match found {
                true => format!(
                    "As expected: without {}, the property \"{}\" is violated.",
                    mutation.rule, mutation.property
                ),
                false => {
                    format!(
                        "No violation without {}: the model does not show why the rule is needed.",
                        mutation.rule
                    )
                }
            });
            found
        }
        None => {
            let size = match options.size {
                SizeName::Small => Size::Small,
                SizeName::Medium => Size::Medium,
                SizeName::Large => Size::Large,
            };
            let mut good = true;
            for case in
                CASES.iter().filter(|case| case.size <= size && case.title.contains(&options.only))
            {
                print_line(format!("{}:", case.title));
                let outcome = case.run(options.threads.into(), true);
                good &= outcome.is_good();
                print_line(outcome);
            }
            print_line(if good { "Every property holds." } else { "NOT every property holds." });
            good
        }
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Prints a line. It ignores errors, because the reader may close the pipe early.
fn print_line(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
