//! `redlock`: what a shell needs of a redlock-gateway. `redlock run` holds a lock while a command runs; the other commands are
//! one request each.
//!
//! ```text
//!  redlock run ──┬── the lock: acquire, extend, release (redlock-client)
//!                ├── guardian: kills the command and all that came of it at the deadline, or when redlock run is gone
//!                └── the command, in a process group of its own; killed with whoever started it
//! ```

mod args;
mod commands;
mod family;
mod guardian;
mod outcome;
mod processes;
mod run;
mod signals;
mod terminal;

use std::process::ExitCode;

use clap::Parser;

use self::args::{Args, Command};
use self::outcome::Outcome;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { Outcome::Usage(String::new()).code().into() } else { ExitCode::SUCCESS };
        }
    };
    let is_json = args.json;
    // One thread: a command that is killed with the thread that started it must not outlive it, nor end before it.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return Outcome::Failed(format!("no runtime: {error}")).report(is_json),
    };
    let outcome = match args.command {
        Command::Guard => return guardian::main(),
        Command::Exec { parent, command } => return run::become_command(parent, &command),
        Command::Run(run) => runtime.block_on(run::run(&args.service, run, is_json)),
        Command::Completions { shell } => commands::completions(shell),
        Command::Man { dir } => commands::man(dir.as_deref()),
        command => runtime.block_on(commands::one_request(&args.service, command, is_json)),
    };
    outcome.report(is_json)
}
