//! Pictures and one table of finished runs, for people who choose a lock service.
//!
//! A row comes from the last of the given runs in which nothing disturbed it. A row that was
//! disturbed in every run is left out. This module does not measure.

use std::error::Error;
use std::fs::File;
use std::path::{Path, PathBuf};

use clap::Args;
use plotters::coord::Shift;
use plotters::prelude::*;

use crate::report::{Row, Run, thousands};

const SIZE: (u32, u32) = (760, 330);
const FONT: &str = "sans-serif";
/// Colours that differ in brightness too.
const COLOURS: [RGBColor; 3] =
    [RGBColor(29, 78, 137), RGBColor(0, 178, 157), RGBColor(247, 146, 86)];
const GATEWAY: &str = "redlock-gateway";
const FLOOR: &str = "hand-written floor";
const FRED: &str = "fred per node, fenced";
const RSLOCK: &str = "rslock in-process";
const LUA: &str = "redlock-gateway, Lua";
/// The contenders of the first picture and of the table.
const ALL: [&str; 5] = [RSLOCK, FLOOR, GATEWAY, LUA, FRED];
/// The figures of the table: the title of the column, the workload and the figure.
const COLUMNS: [(&str, &str, &str); 5] = [
    ("requests/s", "uncontended", "requests/s"),
    ("p50 ms", "uncontended", "acquire p50 ms"),
    ("p99 ms", "uncontended", "acquire p99 ms"),
    ("p99 ms, one master stopped", "stopped", "acquire p99 ms"),
    ("p99 ms, one master 50 ms late", "late", "acquire p99 ms"),
];
const CONNECTIONS: [(u32, &str); 4] =
    [(1, "concurrency-1"), (8, "concurrency-8"), (64, "uncontended"), (256, "concurrency-256")];

type Drawing = Result<(), Box<dyn Error>>;
type Picture = fn(&Runs, &Path) -> Drawing;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Files that `--json` has written; a later file replaces rows of an earlier one
    #[arg(required = true, value_name = "FILE")]
    runs: Vec<PathBuf>,

    /// Folder for the pictures
    #[arg(long, value_name = "FOLDER", default_value = "tests/bench/pictures")]
    out: PathBuf,
}

/// Draws the pictures, and prints the table.
pub(crate) fn draw(options: &Options) -> Result<(), String> {
    let runs: Result<_, _> = options.runs.iter().map(|path| read(path)).collect();
    let runs = Runs(runs?);
    std::fs::create_dir_all(&options.out)
        .map_err(|error| format!("{}: {error}", options.out.display()))?;
    let pictures: [(&str, Picture); 3] =
        [("cost.svg", cost), ("growth.svg", growth), ("hung.svg", hung)];
    for (name, picture) in pictures {
        let path = options.out.join(name);
        let drawn = picture(&runs, &path).and_then(|()| Ok(suit_dark_pages(&path)?));
        drawn.map_err(|error| format!("{}: {error}", path.display()))?;
        eprintln!("{}", path.display());
    }
    println!("{}", table(&runs));
    Ok(())
}

/// Adds other colours for readers who prefer dark pages. The library has no colours that depend on
/// the reader.
fn suit_dark_pages(path: &Path) -> std::io::Result<()> {
    let picture = std::fs::read_to_string(path)?;
    let style: String = [
        ("fill", "#FFFFFF", "#151b23"),
        ("fill", "#000000", "#f0f6fc"),
        ("stroke", "#000000", "#f0f6fc"),
        ("fill", "#1D4E89", "#5b93d6"),
        ("stroke", "#1D4E89", "#5b93d6"),
    ]
    .map(|(what, light, dark)| format!("[{what}=\"{light}\"] {{ {what}: {dark} }} "))
    .concat();
    let style = format!("<style>@media (prefers-color-scheme: dark) {{ {style}}}</style>\n");
    std::fs::write(path, picture.replacen(">\n", &format!(">\n{style}"), 1))
}

fn read(path: &Path) -> Result<Run, String> {
    let shown = |error: &dyn Error| format!("{}: {error}", path.display());
    let file = File::open(path).map_err(|error| shown(&error))?;
    serde_json::from_reader(file).map_err(|error| shown(&error))
}

struct Runs(Vec<Run>);

impl Runs {
    /// The row from the last run in which nothing disturbed it.
    fn row(&self, workload: &str, contender: &str) -> Option<&Row> {
        let tables = self.0.iter().rev().flat_map(|run| &run.tables);
        tables
            .filter(|table| table.name == workload)
            .flat_map(|table| &table.rows)
            .find(|row| row.name == contender && row.disturbed().is_none())
    }

    fn median(&self, workload: &str, contender: &str, figure: &str) -> Option<f64> {
        self.row(workload, contender)?.median(figure)
    }
}

/// The name of a contender for people who do not know the program.
fn plain_name(contender: &str) -> &str {
    match contender {
        RSLOCK => "rslock, in-process library",
        FLOOR => "plain SET NX over HTTP",
        LUA => "redlock-gateway, scripts",
        FRED => "fred, a call per master",
        other => other,
    }
}

fn table(runs: &Runs) -> String {
    let titles: String = COLUMNS.iter().map(|(title, ..)| format!(" {title} |")).collect();
    let mut table = format!("| service |{titles}\n| --- |{}\n", " ---: |".repeat(COLUMNS.len()));
    for contender in ALL {
        let cell = |(_, workload, figure): &(&str, &str, &str)| {
            let row = runs.row(workload, contender).and_then(|row| row.figure(figure));
            let shown = row.map(|figure| figure.unit.show(figure.median()));
            format!(" {} |", shown.unwrap_or_else(|| "–".into()))
        };
        let cells: String = COLUMNS.iter().map(cell).collect();
        table.push_str(&format!("| {} |{cells}\n", plain_name(contender)));
    }
    table
}

/// The CPU time of one request, beside what else one could use.
fn cost(runs: &Runs, path: &Path) -> Drawing {
    let parts = ["its CPU µs/request", "Redis CPU µs/request"];
    let bars = ALL.iter().filter_map(|contender| {
        let row = runs.row("uncontended", contender)?;
        Some((*contender, parts.iter().map(|part| row.median(part)).collect::<Option<_>>()?))
    });
    let bars = Bars {
        title: "CPU time of one request, in µs (64 connections, five masters)",
        series: &["the service itself", "the five masters together"],
        rows: bars.collect(),
        is_stacked: true,
        unit: "",
    };
    bars.draw(path)
}

/// Requests per second with a master stopped or late, as a share of the healthy rate.
fn hung(runs: &Runs, path: &Path) -> Drawing {
    let bars = [GATEWAY, FLOOR, FRED, RSLOCK].into_iter().filter_map(|contender| {
        let share = |workload| Some(runs.median(workload, contender, "requests/s ÷ twin")? * 100.0);
        Some((contender, vec![share("stopped")?, share("late")?]))
    });
    let bars = Bars {
        title: "Requests per second with one bad master of five, in % of the healthy rate",
        series: &["one master stopped", "one master 50 ms late"],
        rows: bars.collect(),
        is_stacked: false,
        unit: " %",
    };
    bars.draw(path)
}

/// Requests per second by number of connections.
fn growth(runs: &Runs, path: &Path) -> Drawing {
    let rates = |contender| {
        let rate = move |(at, (_, workload)): (usize, &(u32, &str))| {
            Some((at as f64, runs.median(workload, contender, "requests/s")?))
        };
        CONNECTIONS.iter().enumerate().filter_map(rate).collect::<Vec<_>>()
    };
    let lines = [FLOOR, GATEWAY, FRED].map(|contender| (contender, rates(contender)));
    let rates = lines.iter().flat_map(|(_, line)| line).map(|(_, rate)| *rate);
    let highest = rates.fold(1.0, f64::max);
    let area = page(path)?;
    let mut chart = ChartBuilder::on(&area)
        .caption("Requests per second by number of connections", (FONT, 17))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(60)
        .build_cartesian_2d(-0.2..3.2, 0.0..highest * 1.1)?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(BLACK.mix(0.12))
        .x_labels(CONNECTIONS.len())
        .x_label_formatter(&|at: &f64| {
            let exact = CONNECTIONS.get(at.round() as usize).filter(|_| at.fract().abs() < 0.01);
            exact.map_or_else(String::new, |(connections, _)| connections.to_string())
        })
        .y_label_formatter(&|rate: &f64| thousands(*rate))
        .x_desc("connections")
        .label_style((FONT, 13))
        .draw()?;
    for ((contender, line), colour) in lines.into_iter().zip(COLOURS) {
        chart
            .draw_series(LineSeries::new(line.clone(), colour.stroke_width(3)))?
            .label(plain_name(contender))
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 14, y + 5)], colour.filled()));
        chart.draw_series(line.iter().map(|point| Circle::new(*point, 4, colour.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE)
        .label_font((FONT, 13))
        .draw()?;
    Ok(area.present()?)
}

/// Horizontal bars: one row for each contender, with a part or a bar for each series.
struct Bars<'a> {
    title: &'a str,
    series: &'a [&'a str],
    rows: Vec<(&'a str, Vec<f64>)>,
    is_stacked: bool,
    unit: &'a str,
}

impl Bars<'_> {
    fn draw(&self, path: &Path) -> Drawing {
        let area = page(path)?;
        let rows = self.rows.len() as f64;
        let length = |(_, values): &(&str, Vec<f64>)| {
            if self.is_stacked {
                values.iter().sum()
            } else {
                values.iter().copied().fold(0.0, f64::max)
            }
        };
        let longest = self.rows.iter().map(length).fold(1.0, f64::max);
        let mut chart = ChartBuilder::on(&area)
            .caption(self.title, (FONT, 17))
            .margin(12)
            .build_cartesian_2d(-0.42 * longest..1.1 * longest, rows + 0.5..0.0)?;
        for (at, (contender, values)) in self.rows.iter().enumerate() {
            let top = at as f64 + 0.15;
            let label = Text::new(
                plain_name(contender).to_owned(),
                (-0.41 * longest, top + 0.22),
                (FONT, 14),
            );
            chart.draw_series([label])?;
            let height = if self.is_stacked { 0.7 } else { 0.7 / values.len() as f64 };
            let mut begin = 0.0;
            for (part, (value, colour)) in values.iter().zip(COLOURS).enumerate() {
                let y = if self.is_stacked { top } else { top + part as f64 * height };
                let corners = [(begin, y), (begin + value, y + height * 0.92)];
                chart.draw_series([Rectangle::new(corners, colour.filled())])?;
                let text = format!("{value:.0}{}", self.unit);
                let (x, style) = if self.is_stacked && *value > 0.06 * longest {
                    (begin + 0.01 * longest, (FONT, 13).into_font().color(&WHITE))
                } else {
                    (begin + value + 0.01 * longest, (FONT, 13).into_font().color(&BLACK))
                };
                chart.draw_series([Text::new(text, (x, y + height * 0.46 - 0.09), style)])?;
                if self.is_stacked {
                    begin += value;
                }
            }
        }
        for (at, (series, colour)) in self.series.iter().zip(COLOURS).enumerate() {
            let x = at as f64 * 0.55 * longest - 0.41 * longest;
            let corners = [(x, rows + 0.18), (x + 0.03 * longest, rows + 0.38)];
            chart.draw_series([Rectangle::new(corners, colour.filled())])?;
            let at = (x + 0.045 * longest, rows + 0.18);
            chart.draw_series([Text::new((*series).to_owned(), at, (FONT, 13))])?;
        }
        Ok(area.present()?)
    }
}

/// A white page, because the text is black in dark themes too.
fn page(path: &Path) -> Result<DrawingArea<SVGBackend<'_>, Shift>, Box<dyn Error>> {
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    Ok(area)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Table, Unit};

    fn run(rates: &[f64]) -> Run {
        let mut row = Row::new(GATEWAY);
        rates.iter().for_each(|rate| row.add("requests/s", Unit::Rate, *rate));
        let table = Table { name: "uncontended".into(), rows: vec![row], ..Table::default() };
        Run { tables: vec![table], ..Run::default() }
    }

    #[test]
    fn the_last_undisturbed_row_counts() {
        let rate = |runs| Runs(runs).median("uncontended", GATEWAY, "requests/s");
        assert_eq!(rate(vec![run(&[10.0]), run(&[20.0])]), Some(20.0));
        assert_eq!(rate(vec![run(&[10.0]), run(&[20.0, 40.0])]), Some(10.0), "disturbed");
        assert_eq!(rate(vec![run(&[20.0, 40.0])]), None);
    }
}
