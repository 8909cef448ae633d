//! The results of measurements: tables whose rows contain figures. A figure has a unit, and one
//! sample for each round; it shows their median. Results are written as JSON, and as Markdown for
//! people. This module does not know how figures are measured.

use std::fmt::{self, Display, Formatter};
use std::process::Command;
use std::time::Duration;

use hdrhistogram::Histogram;
use procfs::{CpuInfo, Current as _};
use serde::{Deserialize, Serialize};

/// If the rounds of one row differ by more than this share of their median, their conditions were
/// not equal.
const MAX_SPREAD: f64 = 0.15;
/// If other programs use more CPU than this, in percent, too little is left for a fair measurement.
const MAX_OTHERS: f64 = 10.0;
/// If the load generator is busy for a larger part of the time than this, in percent, the load
/// itself may limit the result.
const MAX_LOAD_BUSY: f64 = 95.0;
/// The figure for the share of all cores that other programs used or the host took away.
pub(crate) const OTHERS: &str = "others' CPU";
pub(crate) const LOAD_BUSY: &str = "load busy";
const NOTHING: &str = "–";

/// The unit of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Unit {
    /// Per second. In a fair measurement the rounds agree on such a figure.
    Rate,
    Count,
    Ratio,
    Percent,
    Micros,
    Millis,
    Mib,
}

impl Unit {
    pub(crate) fn show(self, value: f64) -> String {
        match self {
            Self::Rate | Self::Count => thousands(value),
            Self::Ratio => format!("{value:.2}"),
            Self::Percent => format!("{value:.1} %"),
            Self::Micros | Self::Mib => format!("{value:.1}"),
            Self::Millis => format!("{value:.2}"),
        }
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Figure {
    pub(crate) name: String,
    pub(crate) unit: Unit,
    /// One sample for each round that has the figure.
    pub(crate) samples: Vec<f64>,
    /// The row of the same table to which this figure is a ratio.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) of: Option<String>,
}

/// One contender under one workload.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) figures: Vec<Figure>,
    /// Remarks that cannot be a number.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) remarks: Vec<String>,
}

/// One workload.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Table {
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) rows: Vec<Row>,
    /// Wrong answers and failed measurements. Any fault fails the run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) faults: Vec<String>,
}

/// The results of one run of this program.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Run {
    /// When the run began, as in RFC 3339.
    pub(crate) date: String,
    pub(crate) source: String,
    pub(crate) machine: String,
    /// The command that repeats the run.
    pub(crate) command: String,
    pub(crate) tables: Vec<Table>,
}

impl Row {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), ..Self::default() }
    }

    /// Adds a sample to the figure with this name.
    pub(crate) fn add(&mut self, name: &str, unit: Unit, value: f64) {
        match self.figures.iter_mut().find(|figure| figure.name == name) {
            Some(figure) => figure.samples.push(value),
            None => self.figures.push(Figure {
                name: name.to_owned(),
                unit,
                samples: vec![value],
                of: None,
            }),
        }
    }

    /// Adds p50, p99 and p99.9 of the latencies, if any were recorded.
    pub(crate) fn add_latencies(&mut self, what: &str, latencies: &Latencies) {
        for (part, share) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999)] {
            if let Some(value) = latencies.millis(share) {
                self.add(&format!("{what} {part} ms"), Unit::Millis, value);
            }
        }
    }

    /// Adds the ratio of a figure's median in this row to its median in the other row.
    pub(crate) fn divide(&mut self, name: &str, figure: &str, other: &Self) {
        if let (Some(mine), Some(theirs)) = (self.median(figure), other.median(figure)) {
            let samples = vec![mine / theirs];
            let of = Some(other.name.clone());
            self.figures.push(Figure { name: name.to_owned(), unit: Unit::Ratio, samples, of });
        }
    }

    pub(crate) fn figure(&self, name: &str) -> Option<&Figure> {
        self.figures.iter().find(|figure| figure.name == name)
    }

    pub(crate) fn median(&self, figure: &str) -> Option<f64> {
        self.figure(figure).map(Figure::median)
    }

    /// Why the figures are worthless. `None` if they are fair.
    pub(crate) fn disturbed(&self) -> Option<String> {
        let mut reasons = Vec::new();
        for figure in self.figures.iter().filter(|figure| figure.unit == Unit::Rate) {
            let spread = figure.spread();
            if spread > MAX_SPREAD {
                reasons.push(format!(
                    "rounds differ by {:.0} % in {}",
                    spread * 100.0,
                    figure.name
                ));
            }
        }
        for (figure, limit, what) in [
            (OTHERS, MAX_OTHERS, "other programs took"),
            (LOAD_BUSY, MAX_LOAD_BUSY, "the load generator was busy for"),
        ] {
            if let Some(share) = self.median(figure).filter(|&share| share > limit) {
                reasons.push(format!("{what} {share:.0} %"));
            }
        }
        (!reasons.is_empty()).then(|| format!("{}: {}", self.name, reasons.join(", ")))
    }
}

impl Figure {
    pub(crate) fn median(&self) -> f64 {
        median(self.samples.clone())
    }

    /// The highest sample minus the lowest, as a share of the median.
    fn spread(&self) -> f64 {
        let highest = self.samples.iter().copied().fold(f64::MIN, f64::max);
        let lowest = self.samples.iter().copied().fold(f64::MAX, f64::min);
        (highest - lowest) / self.median()
    }
}

impl Run {
    /// Fails if any table has a fault.
    pub(crate) fn verdict(&self) -> Result<(), String> {
        let faults = self
            .tables
            .iter()
            .flat_map(|table| table.faults.iter().map(move |it| (&table.name, it)));
        let faults: Vec<_> = faults.map(|(table, fault)| format!("{table}, {fault}")).collect();
        if faults.is_empty() { Ok(()) } else { Err(faults.join("\n  ")) }
    }
}

/// A table with one row is printed with one line for each figure. Any other table has one line for
/// each row.
impl Display for Table {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        writeln!(f, "### {}\n\n{}\n", self.name, self.description)?;
        let cell = |row: &Row, name: &str| {
            row.figure(name).map_or(NOTHING.into(), |it| it.unit.show(it.median()))
        };
        if let [row] = self.rows.as_slice() {
            let figures =
                row.figures.iter().map(|figure| vec![figure.name.clone(), cell(row, &figure.name)]);
            write!(f, "{}", markdown(&["figure", &row.name], figures))?;
        } else if !self.rows.is_empty() {
            let mut titles: Vec<&str> = Vec::new();
            for figure in self.rows.iter().flat_map(|row| &row.figures) {
                if !titles.contains(&figure.name.as_str()) {
                    titles.push(&figure.name);
                }
            }
            let rows = self.rows.iter().map(|row| {
                let cells = titles.iter().map(|name| cell(row, name));
                [row.name.clone()].into_iter().chain(cells).collect()
            });
            write!(f, "{}", markdown(&[&["contender"], titles.as_slice()].concat(), rows))?;
        }
        writeln!(f)?;
        for row in &self.rows {
            row.remarks.iter().try_for_each(|remark| writeln!(f, "- {}: {remark}", row.name))?;
            row.disturbed()
                .iter()
                .try_for_each(|reason| writeln!(f, "- DISTURBED, run it again: {reason}"))?;
        }
        self.faults.iter().try_for_each(|fault| writeln!(f, "- FAULT: {fault}"))
    }
}

/// The first column is aligned left. The others hold figures and are aligned right.
fn markdown(titles: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let ruler = format!("| --- |{}\n", " ---: |".repeat(titles.len() - 1));
    let rows = rows.map(|cells| format!("| {} |\n", cells.join(" | ")));
    [format!("| {} |\n", titles.join(" | ")), ruler].into_iter().chain(rows).collect()
}

/// Latencies in nanoseconds, kept to two significant digits.
#[derive(Debug, Clone)]
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    pub(crate) fn new() -> Self {
        Self(Histogram::new(2).expect("two digits are within its limits"))
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        self.0 += u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.0 += &other.0;
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    /// The latency in ms that this share of all requests did not exceed. `None` if nothing was
    /// recorded.
    pub(crate) fn millis(&self, share: f64) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.value_at_quantile(share) as f64 / 1e6)
    }
}

/// The median. Zero if there are no values; the mean of the middle two if their number is even.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n => (values[(n - 1) / 2] + values[n / 2]) / 2.0,
    }
}

pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A whole number with commas between its thousands.
pub(crate) fn thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let groups: Vec<_> = digits.as_bytes().rchunks(3).rev().map(String::from_utf8_lossy).collect();
    let sign = if value < 0.0 && digits != "0" { "-" } else { "" };
    format!("{sign}{}", groups.join(","))
}

/// The measured machine.
pub(crate) fn machine() -> Result<String, String> {
    let output = Command::new("redis-server")
        .arg("--version")
        .output()
        .map_err(|error| format!("cannot run redis-server, which must be on the PATH: {error}"))?;
    let version = String::from_utf8_lossy(&output.stdout).into_owned();
    let redis = version
        .split_whitespace()
        .find_map(|word| word.strip_prefix("v="))
        .unwrap_or(version.trim());
    let cpu = CpuInfo::current().ok().and_then(|info| info.model_name(0).map(str::to_owned));
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    Ok(format!(
        "{} cores, {}, Linux {kernel}, Redis {redis}",
        cores(),
        cpu.unwrap_or("unknown CPU".into())
    ))
}

pub(crate) fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32)
}

/// The source tree from which this program was built, and whether it has changed since the commit.
pub(crate) fn source() -> String {
    let git = |args: &[&str]| {
        let output = Command::new("git")
            .args(["-C", env!("CARGO_MANIFEST_DIR")])
            .args(args)
            .output()
            .ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or("unknown".into());
    let changes = git(&["status", "--porcelain", "--untracked-files=no"])
        .is_some_and(|changes| !changes.is_empty());
    let debug =
        if cfg!(debug_assertions) { ", DEBUG BUILD: the figures are worthless" } else { "" };
    format!(
        "version {}, commit {commit}{}{debug}",
        env!("CARGO_PKG_VERSION"),
        if changes { " with changes" } else { "" }
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, rates: &[f64], others: f64) -> Row {
        let mut row = Row::new(name);
        rates.iter().for_each(|&rate| row.add("requests/s", Unit::Rate, rate));
        row.add(OTHERS, Unit::Percent, others);
        row
    }

    #[test]
    fn numbers_are_rounded_and_grouped() {
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        let shown: Vec<_> = [1_234_567.4, 999.6, -123.4, -0.4].into_iter().map(thousands).collect();
        assert_eq!(shown, ["1,234,567", "1,000", "-123", "0"]);
    }

    #[test]
    fn unequal_rounds_and_busy_neighbours_disturb() {
        assert_eq!(row("a", &[100.0, 110.0, 95.0], 10.0).disturbed(), None);
        assert_eq!(
            row("a", &[100.0, 110.0, 90.0], 0.0).disturbed().unwrap(),
            "a: rounds differ by 20 % in requests/s"
        );
        assert_eq!(row("a", &[100.0], 15.0).disturbed().unwrap(), "a: other programs took 15 %");
    }

    #[test]
    fn a_ratio_is_shown_beside_its_row() {
        let mut mine = row("gateway", &[80.0], 0.0);
        let floor = row("floor", &[100.0], 0.0);
        mine.divide("÷ floor", "requests/s", &floor);
        let table = Table { rows: vec![mine, floor], ..Table::default() };
        assert!(table.to_string().contains("| gateway | 80 | 0.0 % | 0.80 |"), "{table}");
    }

    #[test]
    fn table_of_one_row_has_a_line_per_figure() {
        let table =
            Table { rows: vec![row("gateway", &[80.0], 0.0)], ..Table::default() }.to_string();
        assert!(
            table.contains("| figure | gateway |\n| --- | ---: |\n| requests/s | 80 |\n"),
            "{table}"
        );
    }
}
