//! The project's performance page, written from the JSON of whole runs: `redlock-bench page RUN.json > PERFORMANCE.md`.
//! Figures come from the runs, what they mean from `page/bounds.md`, which is written by hand. The same runs always make
//! the same page. A row that was disturbed is refused: each row is that of the last run in which nothing disturbed it.

use std::fmt::{Display, Write as _};
use std::path::{Path, PathBuf};

use clap::Args;

use crate::goals;
use crate::report::{Row, Run, Table};

const BOUNDS: &str = include_str!("page/bounds.md");
const METHOD: &str = include_str!("page/method.md");

/// Writes the performance page from the JSON of one or more runs.
///
/// Goals are shown for each run, tables have each row from the last run in which nothing disturbed it. The page goes to
/// stdout.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// What `redlock-bench --json FILE` has written
    #[arg(value_name = "RUN.json", required = true)]
    runs: Vec<PathBuf>,
}

pub(crate) fn print(options: &Options) -> Result<(), String> {
    let runs = options.runs.iter().map(|path| read(path)).collect::<Result<Vec<_>, _>>()?;
    print!("{}", page(&runs));
    Ok(())
}

fn read(path: &Path) -> Result<Run, String> {
    let fault = |error: &dyn Display| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| fault(&error))?;
    serde_json::from_str(&text).map_err(|error| fault(&error))
}

fn page(runs: &[Run]) -> String {
    let mut text =
        "# Performance\n\nWritten by `redlock-bench page` from the runs named below; do not edit it by hand.\n"
            .to_owned();
    let mut add = |part: &str| {
        text.write_fmt(format_args!("\n{}\n", part.trim())).expect("a String takes everything")
    };
    add(&format!("## Goals\n\n{}", goals::table(runs)));
    add(&format!("## What bounds us now, and why\n\n{}", BOUNDS.trim()));
    add("## The tables\n\nEach row is of the last run in which nothing disturbed it.");
    let mut names: Vec<&str> = Vec::new();
    for table in runs.iter().flat_map(|run| &run.tables) {
        if !names.contains(&table.name.as_str()) {
            names.push(&table.name);
        }
    }
    names.iter().for_each(|name| add(&fair_rows(runs, name)));
    add(&format!("## How it was measured\n\n{}", METHOD.trim()));
    for (number, run) in runs.iter().enumerate() {
        let Run { date, source, machine, command, .. } = run;
        let faults = run
            .tables
            .iter()
            .flat_map(|table| table.faults.iter().map(move |it| (&table.name, it)));
        let remarks: String =
            faults.map(|(table, it)| format!("- FAULT: {table}, {it}\n")).collect();
        add(&format!(
            "### Run {}\n\n- {date}, {source}\n- {machine}\n- `{command}`\n{remarks}",
            number + 1
        ));
    }
    text
}

/// A ratio to a row that was disturbed in the same run is left out.
fn fair_rows(runs: &[Run], name: &str) -> String {
    let tables = || runs.iter().rev().filter_map(|run| run.table(name));
    let Some(last) = tables().next() else { return String::new() };
    let mut rows = Vec::new();
    let mut refused = Vec::new();
    for row in &last.rows {
        let mut found = tables().filter_map(|table| Some((table, table.row(&row.name)?)));
        match found.find(|(_, row)| row.disturbed().is_none()) {
            Some((table, row)) => {
                let figures = row
                    .figures
                    .iter()
                    .filter(|figure| table.is_fair(row, figure))
                    .cloned()
                    .collect();
                rows.push(Row { figures, ..row.clone() });
            }
            None => refused.push(row.name.as_str()),
        }
    }
    let mut text = Table { rows, faults: Vec::new(), ..last.clone() }.to_string();
    if !refused.is_empty() {
        write!(text, "\nLeft out, because no run has it undisturbed: {}.", refused.join("; "))
            .expect("a String takes everything");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{OTHERS, Unit};

    fn run(gateway: f64, others_beside_the_floor: f64) -> Run {
        let row = |name: &str, rate: f64, others: f64| {
            let mut row = Row::new(name);
            row.add("requests/s", Unit::Rate, rate);
            row.add(OTHERS, Unit::Percent, others);
            row
        };
        let floor = row("floor", 100.0, others_beside_the_floor);
        let mut gateway = row("redlock-gateway", gateway, 0.0);
        gateway.divide("÷ floor", "requests/s", &floor);
        let table =
            Table { name: "uncontended".into(), rows: vec![floor, gateway], ..Table::default() };
        Run { tables: vec![table], ..Run::default() }
    }

    #[test]
    fn each_row_is_of_the_last_run_in_which_nothing_disturbed_it() {
        let text = page(&[run(70.0, 3.0), run(90.0, 50.0)]);
        assert!(text.contains("| ≥ 0.80 | 0.70, **not met** | disturbed |"), "{text}");
        assert!(text.contains("| floor | 100 | 3.0 % |"), "{text}");
        assert!(
            text.contains("| redlock-gateway | 90 | 0.0 % |")
                && !text.contains("| redlock-gateway | 70"),
            "{text}"
        );
    }

    #[test]
    fn a_row_that_was_always_disturbed_is_refused_and_named() {
        let text = page(&[run(90.0, 50.0)]);
        assert!(
            text.contains("Left out, because no run has it undisturbed: floor.")
                && !text.contains("| floor |"),
            "{text}"
        );
        assert!(
            !include_str!("../PERFORMANCE.md").contains("DISTURBED"),
            "the committed page has disturbed rows"
        );
    }
}
