//! The committed counts, and how today's counts differ from them.

use std::collections::BTreeMap;
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::callgrind::Counts;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/baseline.toml");
const HEAD: &str = "\
# The cost of one repetition of each path: instructions, and requests for memory. Written by
#     (cd tests/bench && cargo run --release -p redlock-instructions -- --bless)
# With another compiler, C library or processor the counts differ. Then instructions are shown, but not judged.
";

/// How much a path may become worse before it counts as a regression. Two runs differ by less than
/// half a per cent. But after a change elsewhere the compiler may inline differently, and that once
/// moved the count of an unchanged path by 2.7 %.
pub(crate) const TOLERANCE: f64 = 0.04;
/// How many more allocations a path may make. Their number depends on little but the code.
const ALLOCATIONS: f64 = 0.5;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Baseline {
    /// The tools outside this repository on which the counts depend.
    pub(crate) made_with: Vec<String>,
    #[serde(default)]
    pub(crate) paths: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Entry {
    pub(crate) instructions: u64,
    pub(crate) allocations: f64,
}

impl From<Counts> for Entry {
    fn from(counts: Counts) -> Self {
        Self {
            instructions: counts.instructions.round() as u64,
            allocations: (counts.allocations * 10.0).round() / 10.0,
        }
    }
}

/// The comparison of a path with its baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Same,
    Better,
    Worse,
    New,
}

impl Entry {
    /// Compares these counts with earlier ones. Instructions are compared only if both counts were
    /// made with the same tools (`alike`).
    pub(crate) fn verdict(self, before: Option<Self>, alike: bool) -> Verdict {
        let Some(before) = before else { return Verdict::New };
        let limit = TOLERANCE * before.instructions as f64;
        let change = self.change(before);
        let more = self.allocations - before.allocations;
        if more > ALLOCATIONS || alike && change > limit {
            Verdict::Worse
        } else if more < -ALLOCATIONS || alike && change < -limit {
            Verdict::Better
        } else {
            Verdict::Same
        }
    }

    fn change(self, before: Self) -> f64 {
        self.instructions as f64 - before.instructions as f64
    }

    /// The change as text, for example `+1.2 %`.
    pub(crate) fn percent(self, before: Self) -> String {
        format!("{:+.1} %", self.change(before) / before.instructions as f64 * 100.0)
    }
}

impl Baseline {
    /// Reads the committed baseline.
    pub(crate) fn load() -> Result<Self, String> {
        let text = std::fs::read_to_string(FILE).map_err(|error| format!("{FILE}: {error}"))?;
        toml::from_str(&text).map_err(|error| format!("{FILE}: {error}"))
    }

    pub(crate) fn save(&self) -> Result<(), String> {
        let text = toml::to_string(self).map_err(|error| error.to_string())?;
        std::fs::write(FILE, format!("{HEAD}\n{text}")).map_err(|error| format!("{FILE}: {error}"))
    }
}

/// The tools that the counts on this machine depend on.
pub(crate) fn made_with() -> Vec<String> {
    let first_line = |command: &str, arguments: &[&str]| {
        let output = Command::new(command).args(arguments).output();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        text.ok()
            .and_then(|text| text.lines().next().map(str::to_owned))
            .unwrap_or_else(|| format!("no {command}"))
    };
    vec![
        first_line("rustc", &["--version"]),
        first_line("getconf", &["GNU_LIBC_VERSION"]),
        first_line("valgrind", &["--version"]),
        std::env::consts::ARCH.to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worse_counts_are_told_apart_from_noise() {
        let before = Entry { instructions: 10_000, allocations: 20.0 };
        let now = |instructions, allocations| Entry { instructions, allocations };
        let limit = (TOLERANCE * 10_000.0) as u64;
        let verdict = |entry: Entry, alike| entry.verdict(Some(before), alike);
        assert_eq!(verdict(now(10_000 + limit, 20.2), true), Verdict::Same);
        assert_eq!(verdict(now(10_001 + limit, 20.0), true), Verdict::Worse);
        assert_eq!(verdict(now(9_999 - limit, 20.0), true), Verdict::Better);
        assert_eq!(verdict(now(10_000, 21.0), true), Verdict::Worse);
        assert_eq!(verdict(now(12_000, 20.0), false), Verdict::Same, "another compiler made it");
        assert_eq!(verdict(now(12_000, 21.0), false), Verdict::Worse);
        assert_eq!(before.verdict(None, true), Verdict::New);
    }
}
