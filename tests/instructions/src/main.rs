//! Counts instructions and allocations on the paths of a request with valgrind's callgrind, and
//! compares them with the committed baseline. The counts are the same on a busy machine. So they
//! show a regression of a few per cent, which a clock would not show. They do not include waiting,
//! caches or system calls. The load driver in tests/bench measures those.
//!
//! The program runs itself under valgrind. To start it: `cargo run --release -p
//! redlock-instructions`. The nodes are in memory, and their instructions are left out. There are
//! no sockets. The rest counts: our own code and the libraries below it.
//!
//! Gungraun, the usual library for such counts, was considered and not taken:
//!
//! - Its baselines are whole profiles in `target/`. So a baseline in the repository would be one
//!   profile for each path, not one short file. Its absolute limits can be written into the code.
//!   But they apply with every compiler, and they do not show what became better.
//! - It counts allocations with a second tool, DHAT, so each path would run once more.
//! - It needs a runner of exactly its own version, installed beside the library.
//!
//! | module | holds |
//! | --- | --- |
//! | `paths` | the counted paths |
//! | `callgrind` | one path under valgrind, and the reading of its profile |
//! | `baseline` | the committed counts, and when a difference is a regression |

mod baseline;
mod callgrind;
mod paths;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use clap::Parser;

use crate::baseline::{Baseline, Entry, TOLERANCE, Verdict, made_with};
use crate::paths::{PATHS, Path};

const BLESS: &str = "(cd tests/bench && cargo run --release -p redlock-instructions -- --bless)";

#[derive(Parser)]
#[command(
    about = "Counts instructions and allocations on request paths and compares them with the baseline"
)]
#[command(after_help = "Exit status 1: a path has become worse than the baseline allows.\n\
    To see where instructions go: --keep DIR, then \n    callgrind_annotate --inclusive=yes DIR/callgrind.out.http-cycle")]
struct Arguments {
    /// Count only paths whose name contains this text
    filter: Option<String>,
    /// Write today's counts into the baseline; commit it with the change that explains the
    /// difference
    #[arg(long)]
    bless: bool,
    /// Keep callgrind's profiles in this directory
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Run one path without counting; the program starts itself with this under valgrind
    #[arg(long, value_name = "PATH", hide = true, requires = "times")]
    run: Option<String>,
    #[arg(long, hide = true)]
    times: Option<u32>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let (Some(name), Some(times)) = (&arguments.run, arguments.times) {
        return match PATHS.iter().find(|path| path.name == name) {
            Some(path) => {
                path.run(times);
                ExitCode::SUCCESS
            }
            None => fail(&format!("--run {name}: there is no such path")),
        };
    }
    match compare(&arguments) {
        Ok(code) => code,
        Err(error) => fail(&error),
    }
}

fn fail(error: &str) -> ExitCode {
    eprintln!("instructions: {error}");
    ExitCode::FAILURE
}

fn compare(arguments: &Arguments) -> Result<ExitCode, String> {
    let wanted = |path: &&Path| {
        arguments.filter.as_ref().is_none_or(|part| path.name.contains(part.as_str()))
    };
    let paths: Vec<_> = PATHS.iter().filter(wanted).collect();
    if paths.is_empty() {
        let names = PATHS.each_ref().map(|path| path.name).join(", ");
        return Err(format!("no path's name contains {:?}; there are {names}", arguments.filter));
    }
    if let Some(directory) = &arguments.keep {
        std::fs::create_dir_all(directory)
            .map_err(|error| format!("{}: {error}", directory.display()))?;
    }
    let mut baseline = match Baseline::load() {
        Err(_) if arguments.bless => Baseline::default(),
        loaded => loaded?,
    };
    let here = made_with();
    let alike = baseline.made_with == here;
    let counted = count_all(&paths, arguments)?;

    println!(
        "| path | once | instructions: baseline | now | change | allocations: baseline | now |"
    );
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: |");
    let mut worse = Vec::new();
    let mut better = Vec::new();
    let mut new = Vec::new();
    for (path, now) in paths.iter().zip(counted) {
        let before = baseline.paths.get(path.name).copied();
        let (was, change, held) = match before {
            Some(before) => (
                before.instructions.to_string(),
                now.percent(before),
                before.allocations.to_string(),
            ),
            None => ("–".into(), "–".into(), "–".into()),
        };
        let Entry { instructions, allocations } = now;
        println!(
            "| {} | {} | {was} | {instructions} | {change} | {held} | {allocations} |",
            path.name, path.what
        );
        match now.verdict(before, alike) {
            Verdict::Worse => worse.push(path.name),
            Verdict::Better => better.push(path.name),
            Verdict::New => new.push(path.name),
            Verdict::Same => {}
        }
        baseline.paths.insert(path.name.to_owned(), now);
    }
    if arguments.bless {
        // The baseline names one set of tools, so counts made with other tools must not be mixed
        // in.
        baseline.paths.retain(|name, _| PATHS.iter().any(|path| path.name == name));
        if !alike && paths.len() < PATHS.len() && !baseline.made_with.is_empty() {
            return Err(
                "the baseline was made with other tools: use --bless for all paths together".into(),
            );
        }
        baseline.made_with = here;
        baseline.save()?;
        return Ok(ExitCode::SUCCESS);
    }
    println!();
    if !alike {
        println!(
            "Only allocations are judged: the baseline was made with {}, this with {}.",
            baseline.made_with.join(", "),
            here.join(", ")
        );
    }
    if !better.is_empty() {
        println!("Better: {}. To keep it: {BLESS}", better.join(", "));
    }
    let bad: Vec<_> = worse.into_iter().chain(new).collect();
    if bad.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let percent = TOLERANCE * 100.0;
    Err(format!(
        "{} took more than the baseline allows (instructions: {percent} % more;\n\
         allocations: not one more), or is new. To find the cause, use `-- --keep DIR` on both trees\n\
         and callgrind_annotate. If the change is worth the cost, commit the new baseline with it,\n\
         and give the reason:\n    {BLESS}",
        bad.join(", "),
    ))
}

/// Counts as many paths at a time as there are processors. Other load does not change the counts.
fn count_all(paths: &[&Path], arguments: &Arguments) -> Result<Vec<Entry>, String> {
    let next = AtomicUsize::new(0);
    let counted = Mutex::new(vec![None; paths.len()]);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let at = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(path) = paths.get(at)
                {
                    let counts = callgrind::count(path, arguments.keep.as_deref()).map(Entry::from);
                    eprintln!("counted: {}", path.name);
                    counted.lock().expect("nobody panics with it")[at] = Some(counts);
                }
            });
        }
    });
    let counted = counted.into_inner().expect("nobody panicked with it");
    counted.into_iter().map(|counts| counts.expect("every path was taken")).collect()
}
