//! The commands that send one request, and `completions` and `man`, which send none.

use std::io::Write;
use std::path::Path;

use clap::CommandFactory;
use redlock_client::{Client, NodeHealth, default_owner};
use rustix::process::Pid;
use serde_json::json;

use crate::args::{Args, Command, Format, Service};
use crate::outcome::ExitOutcome;
use crate::run::numbers;
use crate::words;

/// The status of a gateway that decides about locks.
const READY: &str = "ready";
/// The exit code of `nodes` if the gateway has another status.
const NOT_READY: u8 = 1;
/// The number of locks that `list` asks for in one request.
const PAGE: u32 = 500;

pub(crate) async fn one_request(service: &Service, command: Command, is_json: bool) -> ExitOutcome {
    let asked = async {
        let client = service.client()?;
        match command {
            Command::Acquire { lock, wait, format } => {
                let request = lock.of(&client, &by_parent()).wait(wait);
                acquire(&request, &lock.name, format, is_json).await
            }
            Command::Extend { name, token, ttl } => {
                let deadline = client.extend(&name, &token.token, ttl).await?;
                let left = deadline.left().as_millis() as u64;
                print(
                    is_json,
                    &json!({ "name": name, "validity_ms": left }),
                    format_args!("{name}: held for {left} ms"),
                )
            }
            Command::Release { name, token } => {
                client.release(&name, &token.token).await?;
                Ok(())
            }
            Command::Status { name } => {
                let status = client.status(&name).await?;
                print(is_json, &status.json, format_args!("{}", words::status(&status)))?;
                if is_json {
                    return Ok(());
                }
                for line in words::holders(&status).chain(words::waiters(&status)) {
                    print(false, &json!(null), format_args!("  {line}"))?;
                }
                Ok(())
            }
            Command::List { prefix } => list(&client, &prefix, is_json).await,
            Command::ForceRelease { name, slot } => {
                client.force_release_slot(&name, slot).await?;
                Ok(())
            }
            Command::Nodes => nodes(&client, is_json).await,
            Command::Run(_)
            | Command::Watch(_)
            | Command::Top { .. }
            | Command::Completions { .. }
            | Command::Man { .. }
            | Command::Watchdog { .. }
            | Command::Exec { .. } => {
                Err(ExitOutcome::Failed("this command sends no request".into()))
            }
        }
    };
    asked.await.map_or_else(|outcome| outcome, |()| ExitOutcome::Done)
}

/// The label of a lock that `acquire` gets. The lock outlives this process, and the parent process
/// does its work under that lock.
fn by_parent() -> String {
    let parent = rustix::process::getppid().map_or(0, Pid::as_raw_pid);
    let command = std::fs::read_to_string(format!("/proc/{parent}/comm")).unwrap_or_default();
    default_owner(parent as u32, command.trim())
}

async fn acquire(
    lock: &redlock_client::Lock,
    name: &str,
    format: Format,
    is_json: bool,
) -> Result<(), ExitOutcome> {
    let grant = lock.grant().await.map_err(ExitOutcome::from).inspect_err(|outcome| {
        // The shell passes this output to `eval`. Empty output would count as success there, and
        // the script would work without the lock. So a failure prints a command that fails.
        if format == Format::Shell && !is_json {
            println!("(exit {})", outcome.code());
        }
    })?;
    let token = &grant.token;
    let fencing_token = grant.fencing_token;
    let validity_ms = grant.deadline.left().as_millis() as u64;
    let mut all = json!({
        "name": name,
        "token": token,
        "fencing_token": fencing_token,
        "validity_ms": validity_ms,
    });
    let mut slots = String::new();
    if !grant.slots.is_empty() {
        all["slots_held"] = json!(grant.slots);
        slots = format!(" REDLOCK_SLOTS='{}'", numbers(&grant.slots));
    }
    match format {
        Format::Token => print(is_json, &all, format_args!("{token}")),
        // None of the values, and no lock name, has a character that is special inside single
        // quotes.
        Format::Shell => print(
            is_json,
            &all,
            format_args!(
                "export REDLOCK_NAME='{name}' REDLOCK_TOKEN='{token}' \
                 REDLOCK_FENCING_TOKEN='{fencing_token}' REDLOCK_VALIDITY_MS='{validity_ms}'{slots}"
            ),
        ),
    }
}

async fn list(client: &Client, prefix: &str, is_json: bool) -> Result<(), ExitOutcome> {
    let mut cursor = None;
    loop {
        let page = client.list(prefix, PAGE, cursor.as_deref()).await?;
        let lines = page.json["locks"].as_array().into_iter().flatten();
        for (status, json) in page.locks.iter().zip(lines) {
            print(is_json, json, format_args!("{}", words::status(status)))?;
        }
        cursor.clone_from(&page.next_cursor);
        if cursor.is_none() {
            return Ok(());
        }
    }
}

async fn nodes(client: &Client, is_json: bool) -> Result<(), ExitOutcome> {
    let report = client.nodes().await?;
    print(is_json, &report.json, format_args!("{}", report.status))?;
    let nodes = report.nodes.iter().flatten().filter(|_| !is_json);
    for NodeHealth { node, state, detail, advice, .. } in nodes {
        let why: Vec<_> = [detail, advice].into_iter().flatten().map(String::as_str).collect();
        let why = if why.is_empty() { String::new() } else { format!(": {}", why.join("; ")) };
        print(false, &json!(null), format_args!("{node}  {state}{why}"))?;
    }
    if report.status == READY { Ok(()) } else { Err(ExitOutcome::Ended(NOT_READY)) }
}

/// Prints a line on standard output. A closed pipe ends the command without an error.
fn print(
    is_json: bool,
    json: &serde_json::Value,
    words: std::fmt::Arguments<'_>,
) -> Result<(), ExitOutcome> {
    let mut out = std::io::stdout().lock();
    let written = if is_json { writeln!(out, "{json}") } else { writeln!(out, "{words}") };
    written.map_err(|error| match error.kind() {
        std::io::ErrorKind::BrokenPipe => ExitOutcome::Done,
        _ => ExitOutcome::Failed(format!("standard output: {error}")),
    })
}

pub(crate) fn completions(shell: clap_complete::Shell) -> ExitOutcome {
    clap_complete::generate(shell, &mut Args::command(), "redlock", &mut std::io::stdout());
    ExitOutcome::Done
}

pub(crate) fn man(dir: Option<&Path>) -> ExitOutcome {
    let written = match dir {
        Some(dir) => clap_mangen::generate_to(Args::command(), dir),
        None => clap_mangen::Man::new(Args::command()).render(&mut std::io::stdout()),
    };
    written.map_or_else(|error| ExitOutcome::Failed(error.to_string()), |()| ExitOutcome::Done)
}
