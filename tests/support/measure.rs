//! The rule for tests that measure time.
//!
//! A measured time is a fair figure only if the machine worked for the test alone. So a run that
//! went beyond its limit counts only if other programs took less than [`MAX_OTHERS`] of the
//! processors during the run. Otherwise the run was *disturbed*, and the test measures again. If
//! every run was disturbed, the limit was not measured: the test says so and does not fail.
//!
//! Such tests stand in modules named `measured`. `tests/run` runs them alone, two at a time.

use std::io::Write;
use std::time::Instant;

use procfs::process::{Process, all_processes};
use procfs::{CurrentSI, KernelStats};

/// The largest share of all processors that other programs may take. The benchmark has the same
/// limit.
const MAX_OTHERS: f64 = 0.10;
const RUNS: usize = 5;
/// The file to which a test adds a line if its limit was not measured.
const NOT_MEASURED: &str = "REDLOCK_TEST_NOT_MEASURED";

/// Runs a measurement that takes a second or more, because processor time is counted in steps of
/// 10 ms. It returns an error if a time went beyond its limit. Panics with that error if the run
/// was not disturbed. Every other fault must panic inside `run`.
pub(crate) async fn measured(what: &str, mut run: impl AsyncFnMut() -> Result<(), String>) {
    let mut disturbed = String::new();
    for _ in 0..RUNS {
        let before = Usage::now();
        let Err(beyond) = run().await else { return };
        let others = before.others_until(Usage::now());
        assert!(others > MAX_OTHERS, "{what}: {beyond}; others took {:.1} %", others * 100.0);
        disturbed = format!("{what}: {beyond}, while others took {:.0} %", others * 100.0);
        println!("disturbed: {disturbed}");
    }
    if let Some(path) = std::env::var_os(NOT_MEASURED) {
        let file = std::fs::File::options().create(true).append(true).open(path);
        writeln!(file.expect("a file for remarks"), "{disturbed}").expect("the remark is noted");
    }
}

/// Processor time so far, in clock ticks.
struct Usage {
    at: Instant,
    own: u64,
    everyone: u64,
}

impl Usage {
    fn now() -> Self {
        let kernel = KernelStats::current().expect("/proc/stat can be read").total;
        let everyone = [Some(kernel.user), Some(kernel.nice), Some(kernel.system), kernel.irq]
            .into_iter()
            .chain([kernel.softirq, kernel.steal])
            .flatten()
            .sum();
        Self { at: Instant::now(), own: own_ticks(), everyone }
    }

    /// The share of all processors that other programs took since `self`.
    fn others_until(&self, end: Self) -> f64 {
        let seconds = (end.at - self.at).as_secs_f64();
        let processors = std::thread::available_parallelism().expect("their number").get();
        let everyone = end.everyone - self.everyone;
        let others = everyone.saturating_sub(end.own - self.own);
        others as f64 / procfs::ticks_per_second() as f64 / processors as f64 / seconds
    }
}

/// The processor time of this process and of all its descendants.
fn own_ticks() -> u64 {
    let all: Vec<_> = all_processes()
        .expect("/proc can be read")
        .filter_map(|process| process.and_then(|it| it.stat()).ok())
        .collect();
    let mut family = vec![Process::myself().expect("this process").pid()];
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        family.extend(all.iter().filter(|it| it.ppid == parent).map(|it| it.pid));
        next += 1;
    }
    all.iter()
        .filter(|it| family.contains(&it.pid))
        .map(|it| it.utime + it.stime + it.cutime.max(0) as u64 + it.cstime.max(0) as u64)
        .sum()
}
