//! A run as one document: what was measured, on what, every figure of every round, and where the figures deserve doubt.

#[cfg(test)]
pub(crate) mod sample;

use std::fmt::{self, Display, Formatter};

use serde::{Deserialize, Serialize};

use crate::contenders::Contender;
use crate::report::{Figures, Machine, Source, StageReport};
use crate::workload::Workload;
use crate::{contended, waiters};

/// Everything that one run of the suite measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) machine: Machine,
    pub(crate) source: Source,
    /// When it began, RFC 3339.
    pub(crate) date: String,
    pub(crate) settings: Settings,
    pub(crate) workloads: Vec<StageReport>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) contended: Option<contended::Report>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) waiters: Option<waiters::Report>,
    /// Workloads that this machine has not the means for, and what is missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) left_out: Vec<String>,
    /// Workloads that went wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) failures: Vec<String>,
}

/// What was asked for.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    pub(crate) seconds: u64,
    pub(crate) rounds: u32,
    pub(crate) quick: bool,
    /// Empty for everybody.
    pub(crate) only: Vec<Contender>,
    pub(crate) gateway_args: Vec<String>,
}

impl Report {
    pub(crate) fn stage(&self, workload: Workload) -> Option<&StageReport> {
        self.workloads.iter().find(|stage| stage.workload == workload)
    }

    /// The median over the rounds; `None` when it was not measured.
    pub(crate) fn median(
        &self,
        workload: Workload,
        contender: Contender,
        figure: impl Fn(&Figures) -> Option<f64>,
    ) -> Option<f64> {
        self.stage(workload)?.entry(contender)?.median(figure)
    }

    /// Everything that makes its figures worth less.
    pub(crate) fn noise(&self) -> Vec<String> {
        let mut noise: Vec<_> = self.workloads.iter().flat_map(|stage| stage.noise(self.machine.cores)).collect();
        noise.extend(self.contended.iter().flat_map(contended::Report::noise));
        noise
    }

    /// What makes the program fail: answers that were wrong and workloads that did not work. A goal that was missed does
    /// not.
    pub(crate) fn verdict(&self) -> Result<(), String> {
        let mut problems = self.failures.clone();
        problems.extend(self.workloads.iter().flat_map(StageReport::problems));
        problems.extend(self.contended.as_ref().and_then(|report| report.verdict().err()));
        problems.extend(self.waiters.as_ref().and_then(|report| report.verdict().err()));
        if problems.is_empty() { Ok(()) } else { Err(problems.join("\n  ")) }
    }
}

/// The tables of all workloads.
impl Display for Report {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for stage in &self.workloads {
            writeln!(f, "### {}\n\n{}\n", stage.workload, stage.workload.description())?;
            writeln!(f, "{}", stage.table())?;
            stage.remarks(f, self.machine.cores)?;
        }
        if let Some(contended) = &self.contended {
            writeln!(f, "### {}\n\n{}\n", Workload::Contended, Workload::Contended.description())?;
            writeln!(f, "{contended}")?;
        }
        if let Some(waiters) = &self.waiters {
            writeln!(f, "### {}\n\n{}\n", Workload::Waiters, Workload::Waiters.description())?;
            writeln!(f, "{waiters}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Entry;

    /// The gateway's rates beside fred's, which are even.
    fn run(workload: Workload, gateway: [f64; 3]) -> Report {
        let entry = |contender, rates: [f64; 3]| Entry {
            rounds: rates.into_iter().map(sample::figures).collect(),
            ..Entry::new(contender)
        };
        let contenders =
            vec![entry(Contender::FredFenced, [20_000.0, 20_001.0, 20_002.0]), entry(Contender::Gateway, gateway)];
        sample::report(vec![StageReport { contenders, ..sample::stage(workload) }])
    }

    #[test]
    fn the_table_shows_medians_and_their_ratio() {
        let text = run(Workload::Uncontended, [50_002.5, 48_000.0, 51_000.0]).to_string();
        assert!(text.contains("| redlock-gateway | 50,002 | 2.50 | 10.0 | 20.0 | 5.0 | 1.00 / 2.00 / 3.00 "), "{text}");
        assert!(!text.contains("DISTURBED"), "{text}");
    }

    #[test]
    fn rounds_that_disagree_are_named() {
        let report = run(Workload::Mixed, [50_000.0, 42_000.0, 50_000.0]);
        let noise = report.noise();
        assert_eq!(noise.len(), 1, "{noise:?}");
        assert!(noise[0].starts_with("mixed, redlock-gateway: THE MACHINE WAS DISTURBED"), "{noise:?}");
        assert!(report.to_string().contains(&noise[0]));
    }

    #[test]
    fn what_a_failing_master_does_to_the_naive_is_no_fault_of_the_run() {
        for (workload, contender, fault) in
            [(Workload::Stopped, 0, false), (Workload::Stopped, 1, true), (Workload::Uncontended, 0, true)]
        {
            let mut report = run(workload, [50_000.0; 3]);
            assert_eq!(report.verdict(), Ok(()));
            let round = &mut report.workloads[0].contenders[contender].rounds[1];
            (round.errors, round.first_error) = (2, Some("POST was answered with 503".into()));
            assert_eq!(report.verdict().is_err(), fault, "{workload} {contender}");
            assert!(report.to_string().contains("2 ERRORS, first: POST was answered with 503"));
        }
    }
}
