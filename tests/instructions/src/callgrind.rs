//! Runs one path under valgrind's callgrind and counts its instructions and allocations per
//! repetition.
//!
//! A path runs twice, and the second run has more repetitions. The difference between the two is
//! the cost of the additional repetitions. Start-up, warm-up and the end cost the same in both and
//! cancel out. Callgrind simulates the processor, so a busy machine changes no count.

use std::collections::HashMap;
use std::path::Path as File;
use std::process::Command;

use crate::paths::Path;

/// The longer run has this many times the repetitions of the shorter one.
const LONGER: u32 = 4;
/// The functions that allocate memory, below Rust's allocator.
const ALLOCATORS: [&str; 5] = ["malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc"];

/// Functions that do not count. A node in memory stands for a master, which is another process in
/// practice. Its cost would be four times that of our own code. The metrics library calibrates its
/// clock for a fixed time, not for a number of repetitions.
const LEFT_OUT: [&str; 2] =
    ["redlock_core::node::memory::MemoryNode::run_as", "quanta::Calibration::calibrate"];

/// The counts of one repetition.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Counts {
    pub(crate) instructions: f64,
    pub(crate) allocations: f64,
}

/// Counts one path. With `keep`, the profile of the longer run is kept there.
pub(crate) fn count(path: &Path, keep: Option<&File>) -> Result<Counts, String> {
    let short = run(path, path.times, None)?;
    let long = run(path, LONGER * path.times, keep)?;
    if path.asks_nodes && long.left_out <= short.left_out {
        // If the compiler has inlined the node's function, the function cannot be left out, and all
        // of its cost would count.
        return Err(format!("{}: no call of {} was seen", path.name, LEFT_OUT[0]));
    }
    let times = f64::from((LONGER - 1) * path.times);
    Ok(Counts {
        instructions: (long.instructions as f64 - short.instructions as f64) / times,
        allocations: (long.allocations as f64 - short.allocations as f64) / times,
    })
}

#[derive(Debug, PartialEq)]
struct Totals {
    instructions: u64,
    left_out: u64,
    allocations: u64,
}

fn run(path: &Path, times: u32, keep: Option<&File>) -> Result<Totals, String> {
    let named = |directory: &File| directory.join(format!("callgrind.out.{}", path.name));
    let profile = match keep {
        Some(directory) => named(directory),
        // Paths are counted in parallel, so each needs a profile of its own.
        None => {
            std::env::temp_dir().join(format!("callgrind.out.{}.{}", path.name, std::process::id()))
        }
    };
    let this = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet"])
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(this)
        .args(["--run", path.name, "--times", &times.to_string()])
        // The log level changes the counts, so it must not come from the environment. A backtrace
        // must not count.
        .env_remove("RUST_LOG")
        .env_remove("RUST_BACKTRACE")
        .output()
        .map_err(|error| {
            format!("valgrind: {error}; install valgrind (the Debian package has this name)")
        })?;
    if !output.status.success() {
        let printed = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(format!("{}: {}: {printed}", path.name, output.status));
    }
    let text = std::fs::read_to_string(&profile)
        .map_err(|error| format!("{}: {error}", profile.display()))?;
    if keep.is_none() {
        std::fs::remove_file(&profile)
            .map_err(|error| format!("{}: {error}", profile.display()))?;
    }
    totals(&text).ok_or_else(|| format!("{}: no totals in it", profile.display()))
}

/// Reads a profile. Its format is in the Callgrind Format Specification of valgrind's manual. A
/// name appears in full only once, as `cfn=(number) name`, and later as `cfn=(number)`. Functions
/// and callees share their numbers. The line after `calls=` ends with the cost of the call,
/// including everything that the callee called.
fn totals(profile: &str) -> Option<Totals> {
    let mut total = None;
    let mut left_out = 0;
    let mut allocations = 0;
    let mut names = HashMap::new();
    let mut callee = "";
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        if let Some(function) = line.strip_prefix("cfn=").or_else(|| line.strip_prefix("fn=")) {
            let number = match function.split_once(' ') {
                Some((number, name)) => {
                    names.insert(number, name);
                    number
                }
                None => function,
            };
            callee = names.get(number).copied().unwrap_or_default();
        } else if let Some(calls) = line.strip_prefix("calls=") {
            let cost: u64 = lines.next()?.rsplit(' ').next()?.parse().ok()?;
            if ALLOCATORS.contains(&callee) {
                allocations += calls.split(' ').next()?.parse::<u64>().ok()?;
            } else if LEFT_OUT.contains(&callee) {
                left_out += cost;
            }
        } else if let Some(sum) = line.strip_prefix("totals:") {
            total = sum.trim().parse::<u64>().ok();
        }
    }
    total.map(|total| Totals { instructions: total - left_out, left_out, allocations })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocator_calls_are_counted_under_any_function() {
        let profile = "fn=(1) main\n1 5\ncfn=(2) malloc\ncalls=3 0\n1 60\ncfn=(3) free\ncalls=9 0\n1 9\n\n\
                       fn=(4) realloc\n1 7\n\nfn=(5) work\ncfn=(2)\ncalls=4 0\n+1 80\ncfn=(4)\ncalls=1 0\n* 7\n\
                       cfn=(6) redlock_core::node::memory::MemoryNode::run_as\ncalls=2 0\n* 30\n\ntotals: 198\n";
        assert_eq!(
            totals(profile),
            Some(Totals { instructions: 168, left_out: 30, allocations: 8 })
        );
        assert_eq!(totals("fn=(1) main\n1 5\n"), None, "the process died before its end");
    }
}
