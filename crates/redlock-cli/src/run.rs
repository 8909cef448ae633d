//! `redlock run`: a command under a lock.
//!
//! The command has a process group of its own and a mark in its environment, and its orphans become children of the runner:
//! nothing of these is left when the lock may expire. When it was taken away, which the next extension tells, they have the grace:
//!
//! ```text
//!        stop signal to all of them KILL by the runner   KILL by the guardian
//!  ───────────────┬──────────────────────────┬───────────────────┬──────────┬─► time
//!               lost           grace         │      250 ms before│          │ deadline
//! ```
//!
//! A runner that is killed takes the command with it (the kernel's parent death signal) and the rest of them (the
//! guardian). A command that ends by itself may leave a daemon behind: only its group is stopped then. While the machine sleeps
//! nobody is stopped; what is late then is stopped within 250 ms of its waking up.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::{Duration, SystemTime};

use redlock_client::clock::Moment;
use redlock_client::{Client, Guard, Loss};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, getpid, getppid};
use serde_json::json;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, ChildStdin};

use crate::args::{OnLost, Run, Service};
use crate::family::{Family, Mark, Tree, adopt_orphans};
use crate::guardian::Order;
use crate::outcome::{Outcome, say};
use crate::processes::Process;
use crate::signals::{Event, Signals};
use crate::terminal::Terminal;

/// Before the deadline: the runner's own KILL, and the guardian's.
const KILL: Duration = Duration::from_millis(400);
const GUARDIAN: Duration = Duration::from_millis(250);
const LONGEST_GRACE: Duration = Duration::from_secs(5);
/// For what the command has left behind in its group when it ended by itself.
const LEFT_BEHIND: Duration = Duration::from_secs(2);
/// Then the lock ends by itself soon enough.
const RELEASE: Duration = Duration::from_secs(5);
/// Before it is told who holds the lock, and between two looks.
const LOOK: Duration = Duration::from_secs(2);
/// Between two looks at processes.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// What may be killed is gone by then.
const KILLED_WITHIN: Duration = Duration::from_millis(250);

pub(crate) async fn run(service: &Service, run: Run, is_json: bool) -> Outcome {
    let held = run.conflict_exit_code;
    match attempt(service, run, is_json).await {
        Err(Outcome::Held(text, _)) => Outcome::Held(text, held),
        Ok(outcome) | Err(outcome) => outcome,
    }
}

async fn attempt(service: &Service, run: Run, is_json: bool) -> Result<Outcome, Outcome> {
    let margin = margin(run.lock.ttl, run.grace)?;
    let client = service.client()?;
    let mut signals = Signals::new().map_err(|error| Outcome::Failed(format!("signals: {error}")))?;
    // Before there is a guardian: a child that is here already is not of the command, nor are its orphans.
    let adopts = adopt_orphans();
    // Before the lock: a machine that can start no process holds up nobody.
    let mut guardian = Guardian::start(adopts).map_err(|error| Outcome::Failed(format!("the guardian: {error}")))?;
    let guard = tokio::select! {
        guard = run.lock.of(&client).margin(margin).acquire() => guard?,
        () = tell_who_holds(&client, &run.lock.name, run.lock.wait, is_json) => unreachable!("it tells for ever"),
        signal = signals.asked() => return Ok(Outcome::Ended(128 + signal.as_raw() as u8)),
    };
    let (outcome, is_left) = under(&guard, &run, margin - KILL, &mut guardian, &mut signals, is_json).await;
    if is_left {
        // It goes on trying for a while. The lock is not given back under what still works.
        guardian.abandon();
        say(is_json, "not_stopped", "not all that the command has started could be stopped, or looked at", json!({}));
        return Ok(outcome);
    }
    // The group's number may be another's from now on.
    guardian.tell(Order::Done).await;
    if guard.check().is_ok() {
        match tokio::time::timeout(RELEASE, guard.release()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => say(is_json, "not_released", &format!("the lock ends with its ttl: {error}"), json!({})),
            Err(_) => say(is_json, "not_released", "no gateway answers: the lock ends with its ttl", json!({})),
        }
    }
    Ok(outcome)
}

/// How long before the deadline a lock is given up for lost, so that the command can be stopped in time.
fn margin(ttl: Duration, grace: Option<Duration>) -> Result<Duration, Outcome> {
    let default = (ttl / 6).min(LONGEST_GRACE);
    let margin = grace.unwrap_or(default) + KILL;
    // It is extended at a third; as much has to be left for trying. The guard refuses half of the TTL too.
    let limit = ttl / 2;
    if margin < limit {
        return Ok(margin);
    }
    let show = |duration: Duration| humantime::format_duration(Duration::from_millis(duration.as_millis() as u64));
    Err(Outcome::Usage(match grace {
        Some(grace) if limit > KILL => format!(
            "--grace is {}; with --ttl {} it has to be less than {}, so that the command is gone before the lock is another's",
            show(grace),
            show(ttl),
            show(limit - KILL)
        ),
        Some(_) | None => format!("--ttl is {}; to stop a command in time it has to be more than 1200ms", show(ttl)),
    }))
}

/// Runs the command to its end. Says how that was, and whether something of it is left.
async fn under(
    guard: &Guard,
    run: &Run,
    grace: Duration,
    guardian: &mut Guardian,
    signals: &mut Signals,
    is_json: bool,
) -> (Outcome, bool) {
    let kills = run.on_lost == OnLost::Kill;
    if kills {
        guardian.tell(Order::Until(guard.deadline() - GUARDIAN)).await;
    }
    let mark = Mark::new();
    guardian.expect(&mark).await;
    let (mut child, group) = match spawn(guard, &mark, &run.command, is_json) {
        Ok(started) => started,
        Err(error) => return (Outcome::Failed(format!("{}: {error}", run.command[0].display())), false),
    };
    guardian.tell(Order::Group(group.as_raw_nonzero().get())).await;
    let (tree, first) = (guardian.tree, guardian.process);
    let family = Family { group: Some(group), mark: Some(mark), tree, first, ..Family::default() };
    let terminal = Terminal::hand_to(group);
    let mut deadlines = guard.deadlines();
    let mut ending = Ending { family: &family, stop: run.stop_signal.signal(), takes_all: false, is_asked: false };
    let mut lost: Option<Loss> = None;
    let status = loop {
        tokio::select! {
            biased;
            status = child.wait() => break status,
            loss = guard.lost(), if lost.is_none() => {
                let text = format!("the lock is lost: {loss}");
                lost = Some(loss);
                if kills {
                    // Somebody else may have it already: then the grace is all that is left.
                    let end = (Moment::now() + grace).min(guard.deadline() - KILL);
                    ending.ask();
                    guardian.tell(Order::Until(end + (KILL - GUARDIAN))).await;
                    say(is_json, "lost", &text, json!({}));
                    break stopped(&mut child, &family, end).await;
                }
                say(is_json, "lost", &text, json!({}));
            }
            Ok(()) = deadlines.changed(), if kills && lost.is_none() => {
                let (_, deadline) = *deadlines.borrow_and_update();
                guardian.tell(Order::Until(deadline - GUARDIAN)).await;
            }
            event = signals.next() => match event {
                Event::Asked(signal) => ending.pass_on(signal),
                Event::ChildChanged => child_changed(&family, group),
            },
            () = guardian.gone(), if !guardian.is_gone => {
                ending.ask();
                say(is_json, "guardian", "the guardian is gone: the command would outlive redlock; stopping it", json!({}));
                break stopped(&mut child, &family, Moment::now() + grace).await;
            }
        }
    };
    drop(terminal);
    // From a terminal the signal comes to the command alone.
    ending.takes_all |= status.as_ref().is_ok_and(|status| was_ended(*status));
    let is_left = !leave_nothing(&ending, is_json).await;
    (outcome(guard, lost.filter(|_| kills), status, kills, is_left), is_left)
}

/// How it was, of a command that is lost only where that ends it.
fn outcome(
    guard: &Guard,
    lost: Option<Loss>,
    status: std::io::Result<ExitStatus>,
    kills: bool,
    is_left: bool,
) -> Outcome {
    match (lost, status) {
        (Some(loss), _) if is_left => Outcome::Lost(format!("the lock was lost: {loss}")),
        (Some(loss), _) => Outcome::Lost(format!("the lock was lost and the command stopped: {loss}")),
        (None, Ok(status)) => match guard.check() {
            Err(error) if kills => Outcome::Lost(error.to_string()),
            _ => Outcome::Ended(code(status)),
        },
        (None, Err(error)) => Outcome::Failed(format!("waiting for the command: {error}")),
    }
}

/// The end of a command that was told to end: all that came of it has until then.
async fn stopped(child: &mut Child, family: &Family, end: Moment) -> std::io::Result<ExitStatus> {
    let status = tokio::time::timeout(end.left(), child.wait()).await;
    if status.is_ok() {
        until_not(|| family.is_left(), end).await;
    }
    // The command of another user stays, whatever it is sent.
    kill(|| family.is_left(), || family.signal_all(Signal::KILL)).await;
    match status {
        Ok(status) => status,
        Err(_) => match tokio::time::timeout(KILLED_WITHIN, child.wait()).await {
            Ok(status) => status,
            Err(_) => Err(std::io::Error::other("it cannot be killed")),
        },
    }
}

/// Until nothing was found twice, whatever the clock says: a process that is just becoming another program shows no mark.
async fn kill(is_left: impl Fn() -> bool, kill: impl Fn()) {
    let (end, mut seen_gone) = (Moment::now() + KILLED_WITHIN, 0);
    while seen_gone < 2 && !(end.has_passed() && seen_gone == 0) {
        seen_gone = if is_left() { 0 } else { seen_gone + 1 };
        if seen_gone == 0 {
            kill();
        }
        tokio::time::sleep(LOOK_AGAIN / 2).await;
    }
}

/// Until it is so no longer, or then. Nobody tells of the end of somebody else's child.
async fn until_not(is_so: impl Fn() -> bool, end: Moment) {
    while is_so() && !end.has_passed() {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// As shells have it.
fn code(status: ExitStatus) -> u8 {
    status.code().map_or_else(|| 128 + status.signal().unwrap_or(0) as u8, |code| code as u8)
}

/// By a signal, or at one: as programs say it that catch HUP, INT, QUIT or TERM. What else is above 128 is the program's own.
fn was_ended(status: ExitStatus) -> bool {
    status.signal().is_some() || matches!(status.code(), Some(129 | 130 | 131 | 143))
}

/// The command, in a process group of its own, whose number is its own.
fn spawn(guard: &Guard, mark: &Mark, command: &[OsString], is_json: bool) -> std::io::Result<(Child, Pid)> {
    let deadline = humantime::format_rfc3339_millis(SystemTime::now() + guard.deadline().left()).to_string();
    let child = tokio::process::Command::new(this_program()?)
        .arg0("redlock")
        .args(is_json.then_some("--json"))
        .arg("__exec")
        .arg(getpid().as_raw_nonzero().to_string())
        .args(command)
        .env(mark.variable(), "1")
        .env("REDLOCK_NAME", guard.name())
        .env("REDLOCK_TOKEN", guard.token())
        .env("REDLOCK_FENCING_TOKEN", guard.fencing_token().to_string())
        .env("REDLOCK_DEADLINE", deadline)
        .process_group(0)
        .spawn()?;
    let group = child.id().and_then(|id| Pid::from_raw(id as i32));
    Ok((child, group.ok_or_else(|| std::io::Error::other("it ended at once"))?))
}

/// `__exec`: becomes the command, and dies with the process that is to hold its lock.
pub(crate) fn become_command(parent: i32, command: &[OsString], is_json: bool) -> ExitCode {
    let dies_with_parent = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // It may have died before.
    if dies_with_parent.is_err() || getppid() != Pid::from_raw(parent) {
        return ExitCode::from(70);
    }
    let error = std::process::Command::new(&command[0]).args(&command[1..]).exec();
    let code = if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 };
    say(is_json, "not_run", &format!("{}: {error}", command[0].display()), json!({ "exit_code": code }));
    ExitCode::from(code)
}

/// A command that is stopped from its terminal would keep the lock for ever, and an adopted orphan its number.
fn child_changed(family: &Family, group: Pid) {
    family.bury_orphans();
    let stopped = rustix::process::waitid(WaitId::Pid(group), WaitIdOptions::STOPPED | WaitIdOptions::NOHANG);
    let Ok(Some(status)) = stopped else { return };
    // For want of a terminal it would only be stopped again.
    let waits_for_terminal = [Signal::TTIN, Signal::TTOU].map(|signal| Some(signal.as_raw()));
    if !waits_for_terminal.contains(&status.stopping_signal()) {
        family.signal_group(Signal::CONT);
    }
}

/// How a command comes to its end.
struct Ending<'a> {
    family: &'a Family,
    /// What it is asked to stop with.
    stop: Signal,
    /// Also what has left the group: a command that ends by itself may leave a daemon behind, one that was told to end, nothing.
    takes_all: bool,
    /// Once: many a program drops its work when it is asked again. Whoever asks redlock twice means it.
    is_asked: bool,
}

impl Ending<'_> {
    fn ask(&mut self) {
        self.takes_all = true;
        if !std::mem::replace(&mut self.is_asked, true) {
            self.family.end_all(self.stop);
        }
    }

    /// What this process was sent.
    fn pass_on(&mut self, signal: Signal) {
        let signal = if signal == Signal::TERM { self.stop } else { signal };
        if signal != self.stop && matches!(signal, Signal::USR1 | Signal::USR2) {
            return self.family.signal_group(signal);
        }
        self.is_asked |= signal == self.stop;
        self.takes_all = true;
        self.family.end_all(signal);
    }
}

/// What the command has started would go on without the lock: all of it, or what is in its group. Whether nothing is left.
async fn leave_nothing(ending: &Ending<'_>, is_json: bool) -> bool {
    let (family, all) = (ending.family, ending.takes_all);
    let is_left = || if all { family.is_left() } else { family.has_group() };
    let signal = |signal| if all { family.signal_all(signal) } else { family.signal_group(signal) };
    // What was killed a moment ago may not have left yet.
    until_not(is_left, Moment::now() + Duration::from_millis(50)).await;
    if is_left() {
        if !ending.is_asked {
            signal(ending.stop);
        }
        say(is_json, "left_behind", "the command has left processes behind, which are stopped with it", json!({}));
        until_not(is_left, Moment::now() + LEFT_BEHIND).await;
        kill(is_left, || signal(Signal::KILL)).await;
    }
    let is_gone = !is_left();
    if is_gone && !all && family.is_left() {
        say(is_json, "left_running", "processes of the command go on without the lock", json!({}));
    }
    is_gone
}

/// Tells who holds the lock while it is waited for. Never ends.
async fn tell_who_holds(client: &Client, name: &str, wait: Duration, is_json: bool) {
    let (since, mut said) = (Moment::now(), None);
    while !wait.is_zero() {
        tokio::time::sleep(LOOK).await;
        let Ok(status) = client.status(name).await else { continue };
        let holder = (status.owner.clone(), status.fencing_token);
        if status.state != "held" || said.as_ref() == Some(&holder) && !std::io::stderr().is_terminal() {
            continue;
        }
        let waited = Moment::now().since(since).as_secs();
        let text = format!(
            "waiting for {name:?} for {waited} s: {} has had it since {}",
            status.owner.as_deref().map_or("somebody".into(), |owner| format!("{owner:?}")),
            status.acquired_at.as_deref().unwrap_or("an unknown time"),
        );
        let more = json!({ "waited_s": waited, "holder": status.owner, "acquired_at": status.acquired_at });
        say(is_json, "waiting", &text, more);
        said = Some(holder);
    }
    std::future::pending().await
}

/// This program, also when its file was replaced meanwhile.
fn this_program() -> std::io::Result<std::path::PathBuf> {
    let running = std::path::Path::new("/proc/self/exe");
    if running.exists() { Ok(running.into()) } else { std::env::current_exe() }
}

/// The process that stands by.
struct Guardian {
    child: Child,
    orders: Option<ChildStdin>,
    is_gone: bool,
    process: Option<Process>,
    /// Where all children of this process but the guardian are the command's.
    tree: Option<Tree>,
}

impl Guardian {
    fn start(adopts: bool) -> std::io::Result<Self> {
        let mut child = tokio::process::Command::new(this_program()?)
            .arg0("redlock")
            .arg("__guard")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // An interrupt at the terminal is not for it.
            .process_group(0)
            .spawn()?;
        let orders = child.stdin.take().ok_or_else(|| std::io::Error::other("it has no standard input"))?;
        let pid = child.id().and_then(|id| Pid::from_raw(id as i32));
        let tree = pid.filter(|_| adopts).map(|guardian| Tree { runner: getpid(), guardian });
        Ok(Self { child, orders: Some(orders), is_gone: false, process: pid.and_then(Process::look), tree })
    }

    async fn tell(&mut self, order: Order) {
        // It may be gone, which `gone` tells.
        if let Some(orders) = &mut self.orders {
            let _ = orders.write_all(order.to_string().as_bytes()).await;
        }
    }

    /// How it will know what comes of the command.
    async fn expect(&mut self, mark: &Mark) {
        self.tell(Order::Mark(mark.clone())).await;
        if let Some(tree) = self.tree {
            self.tell(Order::Runner(tree.runner)).await;
        }
    }

    /// It takes the end of its orders for ours.
    fn abandon(&mut self) {
        self.orders = None;
    }

    async fn gone(&mut self) {
        let _ = self.child.wait().await;
        self.is_gone = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_time_to_stop_the_command_or_the_ttl_is_refused_with_one_that_would_do() {
        let ms = Duration::from_millis;
        assert_eq!(margin(ms(30_000), None).unwrap(), ms(5_400));
        assert_eq!(margin(ms(6_000), None).unwrap(), ms(1_400));
        assert_eq!(margin(ms(30_000), Some(ms(14_599))).unwrap(), ms(14_999));
        let refused = |ttl, grace| format!("{:?}", margin(ms(ttl), grace).unwrap_err());
        for grace in [14_600, 20_000] {
            let told = refused(30_000, Some(ms(grace)));
            assert!(told.contains("has to be less than 14s 600ms"), "{told}");
        }
        assert!(margin(ms(1_201), None).is_ok());
        assert!(refused(1_200, None).contains("more than 1200ms"));
    }

    #[test]
    fn a_command_that_a_signal_ended_has_the_code_that_shells_give_it() {
        assert_eq!(code(ExitStatus::from_raw(9)), 137);
        assert_eq!(code(ExitStatus::from_raw(3 << 8)), 3);
        let ended = |raw| was_ended(ExitStatus::from_raw(raw));
        assert!(ended(9) && ended(130 << 8) && ended(143 << 8) && !ended(255 << 8) && !ended(137 << 8) && !ended(0));
    }
}
