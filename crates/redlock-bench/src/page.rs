//! The project's performance page, written from the JSON of whole runs: `redlock-bench page RUN.json > PERFORMANCE.md`.
//! Figures come from the runs, what they mean from `page/bounds.md`, which is written by hand. The same runs always make
//! the same page.

use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;

use clap::Args;

use crate::document::{Report, Settings};
use crate::goals;

const BOUNDS: &str = include_str!("page/bounds.md");
const METHOD: &str = include_str!("page/method.md");

/// Writes the performance page from the JSON of one or more runs.
///
/// Goals are shown for each run, the tables are those of the last one. The page goes to stdout.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// What `redlock-bench --json FILE` has written
    #[arg(value_name = "RUN.json", required = true)]
    runs: Vec<PathBuf>,
}

pub(crate) fn print(options: &Options) -> Result<(), String> {
    let runs = options.runs.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    print!("{}", Page { runs: &runs });
    Ok(())
}

fn read(path: &PathBuf) -> Result<Report, String> {
    let fault = |error: &dyn Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fault(&error))?;
    serde_json::from_str(&text).map_err(|error| fault(&error))
}

/// At least one run.
struct Page<'a> {
    runs: &'a [Report],
}

impl Display for Page<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(last) = self.runs.last() else { return Ok(()) };
        let runs: Vec<_> = self.runs.iter().collect();
        writeln!(f, "# Performance\n")?;
        writeln!(f, "Written by `redlock-bench page` from the runs named below; do not edit it by hand.\n")?;
        writeln!(f, "## Goals\n\n{}", goals::table(&runs))?;
        writeln!(f, "## What bounds us now, and why\n\n{}\n", BOUNDS.trim())?;
        writeln!(f, "## The tables\n\nOf run {}.\n", runs.len())?;
        write!(f, "{last}")?;
        writeln!(f, "## How it was measured\n\n{}\n", METHOD.trim())?;
        for (number, run) in runs.iter().enumerate() {
            write!(f, "{}", About { number: number + 1, run })?;
        }
        Ok(())
    }
}

struct About<'a> {
    number: usize,
    run: &'a Report,
}

impl Display for About<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { number, run } = self;
        let Settings { seconds, rounds, .. } = run.settings;
        writeln!(f, "### Run {number}\n")?;
        writeln!(f, "- {}, {}", run.date, run.source)?;
        writeln!(f, "- {}", run.machine)?;
        writeln!(f, "- medians of {rounds} × {seconds} s; {}", command(&run.settings))?;
        for reason in &run.left_out {
            writeln!(f, "- left out: {reason}")?;
        }
        for failure in &run.failures {
            writeln!(f, "- FAILED: {failure}")?;
        }
        match run.noise().as_slice() {
            [] => writeln!(f, "- nothing that disturbed it was seen")?,
            noise => noise.iter().try_for_each(|warning| writeln!(f, "- {warning}"))?,
        }
        writeln!(f)
    }
}

/// What asks for the same again, but for the workloads.
fn command(settings: &Settings) -> String {
    let mut words = vec!["redlock-bench".to_owned()];
    words.extend(settings.quick.then(|| "--quick".into()));
    words.push(format!("--seconds {} --rounds {}", settings.seconds, settings.rounds));
    words.extend(settings.gateway_args.iter().map(|arg| format!("--gateway-arg={arg}")));
    format!("`{}`", words.join(" "))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::contenders::Contender;
    use crate::document::sample;
    use crate::report::{Entry, StageReport};
    use crate::workload::Workload;

    fn run(gateway: f64) -> Report {
        let entry = |contender, rate| Entry { rounds: vec![sample::figures(rate)], ..Entry::new(contender) };
        let contenders = vec![entry(Contender::FredFenced, 100.0), entry(Contender::Gateway, gateway)];
        sample::report(vec![StageReport { contenders, ..sample::stage(Workload::Uncontended) }])
    }

    #[test]
    fn goals_are_of_all_runs_and_tables_of_the_last() {
        let text = Page { runs: &[run(150.0), run(350.0)] }.to_string();
        assert!(text.contains("| ≥ 3.00 | 1.50, **not met** | 3.50, met |"), "{text}");
        assert_eq!(text.matches("### uncontended").count(), 1);
        assert!(
            text.contains("| redlock-gateway | 350 | 3.50 |") && !text.contains("| redlock-gateway | 150 |"),
            "{text}"
        );
        assert!(text.contains("### Run 1") && text.contains("### Run 2"), "{text}");
    }

    #[test]
    fn the_committed_page_is_what_the_committed_runs_make() {
        let home = Path::new(env!("CARGO_MANIFEST_DIR"));
        let files = std::fs::read_dir(home.join("runs")).unwrap().map(|file| file.unwrap().path());
        let mut files: Vec<_> = files.collect();
        files.sort_unstable();
        let runs: Vec<_> = files.iter().map(|file| read(file).unwrap()).collect();
        let committed = std::fs::read_to_string(home.join("PERFORMANCE.md")).unwrap();
        let remedy = "redlock-bench page crates/redlock-bench/runs/*.json > crates/redlock-bench/PERFORMANCE.md";
        assert!(Page { runs: &runs }.to_string() == committed, "PERFORMANCE.md is outdated: {remedy}");
    }

    #[test]
    fn a_failure_and_a_disturbance_are_not_hidden() {
        let mut run = run(150.0);
        run.failures.push("late: no network".into());
        run.workloads[0].contenders[0].rounds[0].other_cores = 1.0;
        let text = Page { runs: &[run] }.to_string();
        assert!(text.contains("- FAILED: late: no network"), "{text}");
        assert!(text.contains("- uncontended, fred per node, fenced: THE MACHINE WAS DISTURBED"), "{text}");
    }
}
