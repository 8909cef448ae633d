//! `redlock`: the client of redlock-gateway for shells. `redlock run` holds a lock while a command
//! runs, `redlock watch` and `redlock top` show what happens to locks, and most other commands are
//! one request each.
//!
//! ```text
//!  redlock run         acquires, extends and releases the lock (redlock-client)
//!   └── watchdog       kills the command's processes at the deadline, or if redlock run is gone
//!        └── watchdog  does the same, in case two of the three fail at once
//!             └── the command, in its own process group; killed with its watchdog
//! ```

mod args;
mod cgroup;
mod commands;
mod orders;
mod outcome;
mod process_tree;
mod processes;
mod run;
mod signals;
mod stderr;
mod terminal;
mod top;
mod watch;
mod watchdog;
mod watchdogs;
mod words;

use std::process::ExitCode;

use clap::Parser;

use self::args::{Args, Command};
use self::outcome::ExitOutcome;

fn main() -> ExitCode {
    let code = run_command();
    stderr::flush();
    code
}

fn run_command() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) if !error.use_stderr() => {
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => return refused(&error),
    };
    let is_json = args.json;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            return ExitOutcome::Failed(format!("no runtime: {error}")).report(is_json, None);
        }
    };
    let name = args.command.lock_name().map(str::to_owned);
    let outcome = match args.command {
        Command::Watchdog { cgroup } => return watchdog::main(cgroup, is_json),
        Command::Exec { cgroup, blocked, parent, command } => {
            return run::become_command(parent, cgroup, &blocked, &command, is_json);
        }
        Command::Run(run) => runtime.block_on(run::run(&args.service, run, is_json)),
        Command::Watch(watch) => runtime.block_on(watch::watch(&args.service, watch, is_json)),
        Command::Top { prefix } => runtime.block_on(top::top(&args.service, prefix, is_json)),
        Command::Completions { shell } => commands::completions(shell),
        Command::Man { dir } => commands::man(dir.as_deref()),
        command => runtime.block_on(commands::one_request(&args.service, command, is_json)),
    };
    // A blocked write to standard output must not hold up the end.
    runtime.shutdown_background();
    outcome.report(is_json, name.as_deref())
}

/// Reports arguments that could not be parsed. The parser has no result, so `--json` is looked for
/// by hand, but only before `--`, because the command begins after `--`.
fn refused(error: &clap::Error) -> ExitCode {
    let is_json =
        std::env::args_os().skip(1).take_while(|arg| arg != "--").any(|arg| arg == "--json");
    if !is_json {
        let _ = error.print();
        return ExitOutcome::Usage(String::new()).code().into();
    }
    ExitOutcome::Usage(in_one_line(&error.render().to_string())).report(true, None)
}

/// The error without usage and hints, in one line.
fn in_one_line(error: &str) -> String {
    let what = error.split("\n\nUsage:").next().unwrap_or_default();
    let what = what.split("\n\nFor more information").next().unwrap_or_default();
    what.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_argument_error_is_reported_in_one_line() {
        let error_of =
            |args: &[&str]| in_one_line(&Args::try_parse_from(args).unwrap_err().to_string());
        assert_eq!(
            error_of(&["redlock", "run", "a", "--ttl", "soon", "--", "b"]),
            "invalid value 'soon' for '--ttl <DURATION>': expected number at 0; \
             write a duration such as 90s, 10m or 1h30m"
        );
        let missing = error_of(&["redlock", "run", "a"]);
        assert_eq!(missing, "the following required arguments were not provided: <COMMAND>...");
        let unknown = error_of(&["redlock", "--json", "runn"]);
        assert!(
            unknown.starts_with("unrecognized subcommand 'runn'") && !unknown.contains('\n'),
            "{unknown}"
        );
    }
}
