//! `redlock run`, the runner: runs a command under a lock.
//!
//! The command has its own process group, and all of its processes descend from the watchdogs. No
//! process of the command is left when the lock may expire. If the lock was taken away, the next
//! extension reports that. Then the processes have a grace period to stop:
//!
//! ```text
//!        stop signal to all         KILL by the runner  KILL by the watchdogs
//!  ───────────────┬──────────────────────────┬───────────────────┬──────────┬─► time
//!               lost           grace         │      150 ms       │ a sixth  │ deadline
//! ```
//!
//! The watchdogs kill a sixth of the TTL before the deadline, at least 250 ms and at most 1 s
//! before it. They need this margin because they may wake late: on a machine with eight times as
//! many busy processes as processors, a watchdog woke 0.7 s late.
//!
//! If any two of the runner and its two watchdogs are killed or stopped, the third one kills the
//! command's processes. A command that ends by itself may leave a daemon behind: then only the
//! command's process group is stopped. While the machine sleeps, nothing is stopped. An overdue
//! kill happens within 250 ms after the machine wakes up.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use nix::sys::signal::SigSet;
use redlock_client::clock::Moment;
use redlock_client::{Guard, Loss, Waiting, default_owner};
use rustix::process::{Pid, Signal, getppid};
use serde_json::json;

use crate::args::{OnLost, Queue, Run, Service};
use crate::cgroup::Cgroup;
use crate::orders::Start;
use crate::outcome::{ExitOutcome, Reporter};
use crate::process_tree::ProcessTree;
use crate::signals::{Event, Signals};
use crate::terminal::Terminal;
use crate::watchdogs::{WatchdogEvent, Watchdogs};

/// The watchdogs begin to kill a part of the TTL before the deadline. That time is at least the
/// first value and at most the second.
const WATCHDOG_MARGIN: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(1)];
/// The runner kills this long before the watchdogs.
const RUNNER_MARGIN: Duration = Duration::from_millis(150);
const LONGEST_GRACE: Duration = Duration::from_secs(5);
/// The time that the other processes have to stop after the command has ended by itself.
const LEFTOVERS_STOP_WITHIN: Duration = Duration::from_secs(2);
/// How long a release is tried. If it fails, the lock ends with its TTL.
const RELEASE: Duration = Duration::from_secs(5);
/// How often the command's processes are checked while they end.
const CHECK_INTERVAL: Duration = Duration::from_millis(10);
/// How long killed processes may take to be gone.
const KILLED_WITHIN: Duration = Duration::from_millis(250);

pub(crate) async fn run(service: &Service, run: Run, is_json: bool) -> ExitOutcome {
    let held = run.conflict_exit_code;
    match attempt(service, run, is_json).await {
        Err(ExitOutcome::Held(text, _)) => ExitOutcome::Held(text, held),
        Err(ExitOutcome::Superseded(text, _)) => ExitOutcome::Superseded(text, held),
        Ok(outcome) | Err(outcome) => outcome,
    }
}

async fn attempt(service: &Service, run: Run, is_json: bool) -> Result<ExitOutcome, ExitOutcome> {
    let margins = Margins::new(run.lock.ttl, run.grace)?;
    let client = service.client()?;
    let reporter = Reporter { name: run.lock.name.clone(), is_json };
    let failed = |what: &str, error: std::io::Error| {
        ExitOutcome::Failed(format!("{}: {what}: {error}", run.lock.name))
    };
    let mut signals = Signals::new().map_err(|error| failed("signals", error))?;
    let cgroup = Cgroup::create();
    // The watchdogs are started before the lock is acquired. So a machine that can start no process
    // never holds the lock.
    let watchdogs = Watchdogs::start(cgroup.as_ref(), is_json).await;
    let watchdogs = watchdogs.map_err(|error| failed("the watchdog", error))?;
    let program = Path::new(&run.command[0]).file_name().unwrap_or(&run.command[0]);
    let owner = default_owner(std::process::id(), &program.to_string_lossy());
    let lock = run.lock.of(&client, &owner).margin(margins.all());
    let lock = run.also.iter().fold(lock, |lock, name| lock.also(name));
    let lock = match run.queue {
        Queue::Newest => lock.queue(redlock_client::Queue::Newest),
        Queue::All => lock,
    };
    let lock = match run.wait {
        Some(wait) => lock.wait(wait),
        None => lock.wait(Duration::MAX).needs_gateway(),
    };
    let lock = lock.on_waiting(report_changes(reporter.clone()));
    let guard = match lock.acquire_unless(signals.asked()).await {
        Ok(Ok(guard)) => guard,
        Ok(Err(signal)) => {
            end_unused(watchdogs, cgroup).await;
            return Ok(ExitOutcome::Ended(128 + signal.as_raw() as u8));
        }
        Err(error) => {
            end_unused(watchdogs, cgroup).await;
            return Err(error.into());
        }
    };
    let (outcome, is_left) =
        run_command(&guard, &run, margins, watchdogs, cgroup.clone(), &mut signals, &reporter)
            .await;
    if let Some(cgroup) = cgroup {
        cgroup.remove();
    }
    if is_left {
        // The watchdogs go on killing for a while. The lock is not released, because a process may
        // still work under it.
        reporter.report(
            "not_stopped",
            "some processes of the command could not be stopped: the lock is not released",
            json!({}),
        );
        return Ok(outcome);
    }
    if guard.check().is_ok() {
        match tokio::time::timeout(RELEASE, guard.release()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let why = error.to_string();
                let why = why.strip_prefix(&format!("{}: ", reporter.name)).unwrap_or(&why);
                let text = format!("the lock ends with its ttl: {why}");
                reporter.report("not_released", &text, json!({}));
            }
            Err(_) => reporter.report(
                "not_released",
                "no gateway answers: the lock ends with its ttl",
                json!({}),
            ),
        }
    }
    Ok(outcome)
}

/// Ends watchdogs that have started no command, and waits until they are gone. Otherwise a
/// `redlock run` that runs this one would report them as processes that go on without the lock.
async fn end_unused(watchdogs: Watchdogs, cgroup: Option<Cgroup>) {
    watchdogs.done().await;
    if let Some(cgroup) = cgroup {
        cgroup.remove();
    }
}

/// Reports each new place in line, holder or disturbance.
fn report_changes(reporter: Reporter) -> impl Fn(&Waiting) + Send + Sync {
    let reported = Mutex::new(String::new());
    move |waiting| {
        let text = waiting.to_string();
        let Ok(mut reported) = reported.lock() else { return };
        if *reported == text {
            return;
        }
        let more = json!({
            "position": waiting.position,
            "holder": waiting.holder,
            "acquired_at": waiting.acquired_at,
            "gateway": waiting.gateway,
        });
        reporter.report("waiting", &text, more);
        *reported = text;
    }
}

/// The times between the loss of a lock and its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Margins {
    /// Between the stop signal and KILL.
    grace: Duration,
    /// Between the watchdogs' KILL and the deadline.
    watchdogs: Duration,
}

impl Margins {
    fn new(ttl: Duration, grace: Option<Duration>) -> Result<Self, ExitOutcome> {
        let default = (ttl / 6).min(LONGEST_GRACE);
        let [shortest, longest] = WATCHDOG_MARGIN;
        let watchdogs = (ttl / 6).clamp(shortest, longest);
        let margins = Self { grace: grace.unwrap_or(default), watchdogs };
        // The guard extends the lock after a third of the TTL, and needs about as much time again
        // for tries that fail. The guard also refuses a margin of exactly half the TTL.
        let limit = ttl / 2;
        if margins.all() < limit {
            return Ok(margins);
        }
        let show = |duration: Duration| {
            humantime::format_duration(Duration::from_millis(duration.as_millis() as u64))
        };
        Err(ExitOutcome::Usage(match grace {
            Some(grace) if limit > margins.runner() => format!(
                "--grace is {}; with --ttl {} it has to be less than {}, \
                 so that the command is gone before others can get the lock",
                show(grace),
                show(ttl),
                show(limit - margins.runner())
            ),
            Some(_) | None => {
                format!(
                    "--ttl is {}; to stop a command in time it has to be more than 1200ms",
                    show(ttl)
                )
            }
        }))
    }

    /// Between the runner's KILL and the deadline.
    fn runner(&self) -> Duration {
        self.watchdogs + RUNNER_MARGIN
    }

    /// The sum of all margins. A lock counts as lost this long before its deadline.
    fn all(&self) -> Duration {
        self.grace + self.runner()
    }
}

/// Runs the command to its end. Returns its outcome, and whether some of its processes are left.
async fn run_command(
    guard: &Guard,
    run: &Run,
    margins: Margins,
    mut watchdogs: Watchdogs,
    cgroup: Option<Cgroup>,
    signals: &mut Signals,
    reporter: &Reporter,
) -> (ExitOutcome, bool) {
    let kills = run.on_lost == OnLost::Kill;
    if kills {
        watchdogs.until(guard.deadline() - margins.watchdogs);
    }
    let group = match watchdogs.run(start(guard, &run.command)).await {
        Ok(group) => group,
        Err(error) => {
            // Perhaps the inner watchdog is only stopped. Then it would start the command later,
            // when somebody continues it. So both watchdogs are ended.
            let tree = watchdogs.tree(None, cgroup);
            let text = format!("{}: {}: {error}", reporter.name, run.command[0].display());
            return (ExitOutcome::Failed(text), !watchdogs.clear(&tree).await);
        }
    };
    let mut ending = Ending::new(watchdogs.tree(Some(group), cgroup), run.stop_signal.signal());
    let terminal = Terminal::of(group);
    let mut deadlines = guard.deadlines();
    let mut lost: Option<Loss> = None;
    let status = loop {
        // `biased` handles events in the order of their urgency.
        tokio::select! {
            biased;
            event = watchdogs.next_event() => match event {
                WatchdogEvent::Ended(status) => break Some(status),
                WatchdogEvent::WantsTerminal if terminal.give() => {}
                event => {
                    ending.ask();
                    let (event, text) = stop_reason(&event);
                    reporter.report(event, text, json!({}));
                    break ending.grace(&mut watchdogs, Moment::now() + margins.grace).await;
                }
            },
            loss = guard.lost(), if lost.is_none() => {
                let text = format!("the lock is lost: {}", lost.insert(loss).reason);
                if kills {
                    // Somebody else may hold the lock already, so the processes get no more time
                    // than the grace.
                    let limit = guard.deadline() - margins.runner();
                    let end = (Moment::now() + margins.grace).min(limit);
                    ending.ask();
                    watchdogs.until(end + RUNNER_MARGIN);
                    reporter.report("lost", &text, json!({}));
                    break ending.grace(&mut watchdogs, end).await;
                }
                reporter.report("lost", &text, json!({}));
            }
            Ok(()) = deadlines.changed(), if kills && lost.is_none() => {
                let (_, deadline) = *deadlines.borrow_and_update();
                watchdogs.until(deadline - margins.watchdogs);
            }
            event = signals.next() => match event {
                Event::Asked(signal) => ending.pass_on(signal),
                Event::ChildChanged => watchdogs.reap(),
                Event::TerminalWanted => terminal.take_back(),
            },
        }
    };
    drop(terminal);
    ending.tree.has_ended = true;
    // A signal from a terminal reaches only the command's process group, so its other descendants
    // must be stopped too.
    ending.takes_all |= status.is_none_or(was_ended);
    let is_left = !stop_leftovers(&ending, watchdogs, reporter).await;
    (outcome(guard, lost.filter(|_| kills), status, kills, is_left), is_left)
}

fn stop_reason(event: &WatchdogEvent) -> (&'static str, &'static str) {
    match event {
        WatchdogEvent::WantsTerminal => {
            ("no_terminal", "the command reads a terminal that belongs to another job: stopping it")
        }
        WatchdogEvent::Ended(_) | WatchdogEvent::WatchdogGone => (
            "watchdog",
            "a watchdog was killed or stopped, and the command might outlive redlock: stopping it",
        ),
    }
}

/// The outcome of `redlock run`. `lost` is `None` if a loss does not end the command (`--on-lost
/// warn`).
fn outcome(
    guard: &Guard,
    lost: Option<Loss>,
    status: Option<ExitStatus>,
    kills: bool,
    is_left: bool,
) -> ExitOutcome {
    if let Some(loss) = lost {
        let what = if is_left { "" } else { " and the command stopped" };
        let Loss { name, reason } = loss;
        return ExitOutcome::Lost(format!("{name}: the lock was lost{what}: {reason}"));
    }
    match (guard.check(), status) {
        (Err(error), _) if kills => ExitOutcome::Lost(error.to_string()),
        (_, Some(status)) => ExitOutcome::Ended(code(status)),
        (_, None) => {
            ExitOutcome::Failed(format!("{}: how the command ended is unknown", guard.name()))
        }
    }
}

/// Waits while `is_so` holds, until `end` at the latest. This polls, because the kernel reports to
/// a process only the ends of its own children.
async fn wait_while(is_so: impl Fn() -> bool, end: Moment) {
    while is_so() && !end.has_passed() {
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
}

/// The exit code as shells report it.
fn code(status: ExitStatus) -> u8 {
    status.code().map_or_else(|| 128 + status.signal().unwrap_or(0) as u8, |code| code as u8)
}

/// Whether a signal ended the command. Programs that catch HUP, INT, QUIT or TERM usually exit with
/// 128 plus the number of the signal. Other codes above 128 are the program's own.
fn was_ended(status: ExitStatus) -> bool {
    status.signal().is_some() || matches!(status.code(), Some(129 | 130 | 131 | 143))
}

/// The command and its environment.
fn start(guard: &Guard, command: &[OsString]) -> Start {
    let deadline =
        humantime::format_rfc3339_millis(SystemTime::now() + guard.deadline().left()).to_string();
    let slots = (!guard.slots().is_empty()).then(|| ("REDLOCK_SLOTS", numbers(guard.slots())));
    let environment = [
        ("REDLOCK_NAME", guard.name().to_owned()),
        ("REDLOCK_TOKEN", guard.token().to_owned()),
        ("REDLOCK_FENCING_TOKEN", guard.fencing_token().to_string()),
        ("REDLOCK_DEADLINE", deadline),
    ];
    let environment = environment.into_iter().chain(slots);
    let environment = environment.map(|(name, value)| (name.to_owned(), value)).collect();
    let blocked = SigSet::thread_get_mask().unwrap_or_else(|_| SigSet::empty());
    let blocked = blocked.iter().map(|signal| signal as i32).collect();
    Start { command: command.to_vec(), environment, blocked }
}

/// The numbers of slots, with commas in between.
pub(crate) fn numbers(slots: &[u32]) -> String {
    slots.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// `redlock __exec`: this process becomes the command, which dies with the watchdog that started
/// it.
pub(crate) fn become_command(
    parent: i32,
    cgroup: Option<PathBuf>,
    blocked: &[i32],
    command: &[OsString],
    is_json: bool,
) -> ExitCode {
    let dies_with_parent = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // The parent may have died before that call, and then its death sends no signal.
    if dies_with_parent.is_err() || getppid() != Pid::from_raw(parent) {
        return ExitCode::from(70);
    }
    if let Some(cgroup) = cgroup {
        Cgroup::at(cgroup).enter();
    }
    let blocked: SigSet = blocked
        .iter()
        .filter_map(|signal| nix::sys::signal::Signal::try_from(*signal).ok())
        .collect();
    if blocked.thread_set_mask().is_err() {
        return ExitCode::from(70);
    }
    let error = std::process::Command::new(&command[0]).args(&command[1..]).exec();
    let code = if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 };
    let name = std::env::var("REDLOCK_NAME").unwrap_or_default();
    Reporter { name, is_json }.report(
        "not_run",
        &format!("{}: {error}", command[0].display()),
        json!({ "exit_code": code }),
    );
    ExitCode::from(code)
}

/// The way in which the command is being ended.
struct Ending {
    tree: ProcessTree,
    /// The signal that asks the command to stop.
    stop: Signal,
    /// Whether to stop all descendants. A command that ends by itself may leave a daemon behind. A
    /// command that was asked to end may not.
    takes_all: bool,
    /// Whether the stop signal was sent. Many programs drop their work at a second stop signal, so
    /// only the user may send it a second time.
    is_asked: bool,
    /// Whether the grace is over, so that remaining processes are killed.
    had_grace: bool,
}

impl Ending {
    fn new(tree: ProcessTree, stop: Signal) -> Self {
        Self { tree, stop, takes_all: false, is_asked: false, had_grace: false }
    }

    fn ask(&mut self) {
        self.takes_all = true;
        if !std::mem::replace(&mut self.is_asked, true) {
            self.tree.end_all(self.stop);
        }
    }

    /// Waits until `end` for all processes to stop, and then kills those that are left. Returns the
    /// command's status if it is known.
    async fn grace(&mut self, watchdogs: &mut Watchdogs, end: Moment) -> Option<ExitStatus> {
        self.had_grace = true;
        let mut status = None;
        tokio::select! {
            ended = watchdogs.ended() => {
                status = ended;
                wait_while(|| self.tree.is_left(), end).await;
            }
            // A stopped watchdog reports nothing.
            () = wait_while(|| self.tree.is_left(), end) => {}
        }
        self.tree.signal_all(Signal::KILL);
        if status.is_none() {
            status = tokio::time::timeout(KILLED_WITHIN, watchdogs.ended()).await.ok().flatten();
        }
        status
    }

    /// Passes on a signal that redlock received.
    fn pass_on(&mut self, signal: Signal) {
        let signal = if signal == Signal::TERM { self.stop } else { signal };
        if signal != self.stop && matches!(signal, Signal::USR1 | Signal::USR2) {
            return self.tree.signal_group(signal);
        }
        self.is_asked |= signal == self.stop;
        self.takes_all = true;
        self.tree.end_all(signal);
    }
}

/// Stops the processes that would go on without the lock: all of the command's processes, or only
/// those in its process group. Returns whether no such process is left.
async fn stop_leftovers(ending: &Ending, watchdogs: Watchdogs, reporter: &Reporter) -> bool {
    let tree = &ending.tree;
    let all = ending.takes_all;
    let is_left = || if all { tree.is_left() } else { tree.has_group() };
    let signal = |signal| if all { tree.signal_all(signal) } else { tree.signal_group(signal) };
    if ending.had_grace {
        return watchdogs.clear(tree).await;
    }
    // A process that was killed a moment ago may not be gone yet.
    wait_while(is_left, Moment::now() + Duration::from_millis(50)).await;
    if is_left() {
        if !ending.is_asked {
            signal(ending.stop);
        }
        reporter.report(
            "left_behind",
            "the command has left processes behind: stopping them",
            json!({}),
        );
        wait_while(is_left, Moment::now() + LEFTOVERS_STOP_WITHIN).await;
    }
    if all {
        return watchdogs.clear(tree).await;
    }
    let end = Moment::now() + KILLED_WITHIN;
    wait_while(
        || {
            tree.has_group() && {
                tree.signal_group(Signal::KILL);
                true
            }
        },
        end,
    )
    .await;
    if tree.has_group() {
        return false;
    }
    if !watchdogs.done().await {
        reporter.report(
            "left_running",
            "processes of the command go on without the lock",
            json!({}),
        );
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn margins_leave_time_to_stop_or_are_refused() {
        let ms = Duration::from_millis;
        let all = |ttl, grace: Option<u64>| Margins::new(ms(ttl), grace.map(ms)).unwrap().all();
        assert_eq!(all(30_000, None), ms(5_000 + 1_000 + 150));
        assert_eq!(all(3_000, None), ms(500 + 500 + 150));
        assert_eq!(all(1_201, None), ms(200 + 250 + 150) + Duration::from_nanos(166_666));
        assert_eq!(all(30_000, Some(13_849)), ms(14_999));
        let refused = |ttl, grace: Option<u64>| {
            format!("{:?}", Margins::new(ms(ttl), grace.map(ms)).unwrap_err())
        };
        for grace in [13_850, 20_000] {
            let text = refused(30_000, Some(grace));
            assert!(text.contains("has to be less than 13s 850ms"), "{text}");
        }
        assert!(refused(1_200, None).contains("more than 1200ms"));
    }

    #[test]
    fn a_signalled_command_has_the_exit_code_of_shells() {
        assert_eq!(code(ExitStatus::from_raw(9)), 137);
        assert_eq!(code(ExitStatus::from_raw(3 << 8)), 3);
        let ended = |raw| was_ended(ExitStatus::from_raw(raw));
        assert!(
            ended(9)
                && ended(130 << 8)
                && ended(143 << 8)
                && !ended(255 << 8)
                && !ended(137 << 8)
                && !ended(0)
        );
    }
}
