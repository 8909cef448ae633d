//! A process that kills a command and its descendants when the runner is killed, stopped, or late.
//!
//! ```text
//!  redlock run ── watchdog ── watchdog ── command
//! ```
//!
//! Both watchdogs are the same program. The runner (`redlock run`) starts the outer watchdog, the
//! outer one starts the inner one, and the inner one starts the command. The runner sends orders to
//! both. Each of the three is a child subreaper: if a process below it loses its parent, the
//! subreaper becomes the parent. The runner is a subreaper only if it began without children. So if
//! any two of the three are killed or stopped, the third still finds all processes of the command.
//! A watchdog kills these processes at the deadline. It also kills them when the connection to the
//! runner closes without the order `done`, because then the runner is gone. After that it exits as
//! soon as the kernel reports that it has no children left.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use redlock_client::clock::Moment;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recvmsg};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, getpid, set_child_subreaper, wait};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::signal::unix::{SignalKind, signal};

use crate::cgroup::Cgroup;
use crate::orders::{Order, Report, Start};
use crate::process_tree::ProcessTree;
use crate::processes::Process;

/// The longest sleep of a watchdog. Timers stand still while the machine is suspended. So after a
/// wake-up, a watchdog notices at most this late that the deadline has passed.
const LONGEST_SLEEP: Duration = Duration::from_millis(250);
/// How often killed processes are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);
/// How long a watchdog without a runner tries to kill processes before it exits.
const KILL_FOR: Duration = Duration::from_secs(10);
/// How long the outer watchdog waits for the inner one to exit after `done`.
const EXITS_WITHIN: Duration = Duration::from_secs(1);
/// The limit on file descriptors in one message of the runner.
pub(crate) const MAX_FDS: usize = 3;

/// The path of this program. It starts this very program even if the program's file was replaced
/// meanwhile.
pub(crate) fn this_program() -> io::Result<PathBuf> {
    let running = Path::new("/proc/self/exe");
    if running.exists() { Ok(running.into()) } else { std::env::current_exe() }
}

/// The command line of a watchdog, which reads its orders from standard input.
pub(crate) fn command(
    orders: OwnedFd,
    cgroup: Option<&Cgroup>,
    is_json: bool,
) -> io::Result<Command> {
    let mut command = Command::new(this_program()?);
    command.arg0("redlock").args(is_json.then_some("--json")).arg("__watchdog");
    command.args(cgroup.map(|cgroup| [Path::new("--cgroup"), cgroup.path()]).into_iter().flatten());
    // The watchdog has its own process group, so that an interrupt at the terminal spares it. It
    // has no output, so that a reader of our pipe does not wait for the watchdog to close it.
    command.stdin(orders).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    Ok(command)
}

pub(crate) fn main(cgroup: Option<PathBuf>, is_json: bool) -> ExitCode {
    // All signals but SIGCHLD are blocked, also those that the kernel sends to an orphaned process
    // group with stopped processes.
    let mut blocked = nix::sys::signal::SigSet::all();
    blocked.remove(nix::sys::signal::SIGCHLD);
    if blocked.thread_block().is_err() || set_child_subreaper(Some(getpid())).is_err() {
        return ExitCode::FAILURE;
    }
    // The runtime has one thread, the main thread. The command dies when the thread that started it
    // ends, so no other thread may start it.
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::FAILURE;
    };
    runtime.block_on(async {
        match Watchdog::new(cgroup.map(Cgroup::at), is_json).await {
            Ok(watchdog) => watchdog.watch().await,
            Err(_) => ExitCode::FAILURE,
        }
    })
}

/// The role of a watchdog.
#[derive(Debug)]
enum Role {
    Outer {
        inner: Pid,
        has_ended: bool,
    },
    /// The inner watchdog holds the command's standard input, output and error until the command is
    /// started.
    Inner {
        stdio: Option<[OwnedFd; 3]>,
    },
}

#[derive(Debug)]
struct Watchdog {
    socket: UnixStream,
    text: Vec<u8>,
    role: Role,
    child_changed: tokio::signal::unix::Signal,
    /// Whether the kernel has reported that this process has no children.
    is_childless: bool,
    until: Option<Moment>,
    tree: ProcessTree,
    is_json: bool,
}

impl Watchdog {
    async fn new(cgroup: Option<Cgroup>, is_json: bool) -> io::Result<Self> {
        let child_changed = signal(SignalKind::child())?;
        let stdin = io::stdin().as_fd().try_clone_to_owned()?;
        let socket = std::os::unix::net::UnixStream::from(stdin);
        socket.set_nonblocking(true)?;
        let socket = UnixStream::from_std(socket)?;
        let mut text = Vec::new();
        let mut fds = Vec::new();
        receive(&socket, &mut text, &mut fds).await?;
        let (role, report) = match <[OwnedFd; 3]>::try_from(fds) {
            Ok(stdio) => (Role::Inner { stdio: Some(stdio) }, Report::Ready),
            Err(mut fds) => {
                let orders =
                    fds.pop().ok_or_else(|| io::Error::other("the runner has sent no socket"))?;
                let inner = Pid::from_child(&command(orders, cgroup.as_ref(), is_json)?.spawn()?);
                (Role::Outer { inner, has_ended: false }, Report::Inner(inner.as_raw_pid()))
            }
        };
        // The outer watchdog spares the inner one, which kills the same processes. If the outer one
        // killed the inner one and was then stopped, no watchdog would be left to kill the rest.
        let watchdogs = match role {
            Role::Outer { inner, .. } => Process::read(inner).into_iter().collect(),
            Role::Inner { .. } => Vec::new(),
        };
        let tree = ProcessTree { cgroup, watchdogs, ..ProcessTree::default() };
        let is_childless = false;
        let until = None;
        let watchdog =
            Self { socket, text, role, child_changed, is_childless, until, tree, is_json };
        watchdog.send_report(&report);
        Ok(watchdog)
    }

    /// Watches until the order `done`. If the runner is gone, kills the command's processes until
    /// none is left.
    async fn watch(mut self) -> ExitCode {
        loop {
            self.reap();
            // After the deadline the kill is repeated for as long as the runner lives, to catch a
            // process that was just being started.
            let sleep = match self.until {
                Some(until) if until.has_passed() => {
                    if self.kill() && self.tree.is_left() {
                        CHECK_INTERVAL
                    } else {
                        LONGEST_SLEEP
                    }
                }
                Some(until) => until.left().clamp(CHECK_INTERVAL, LONGEST_SLEEP),
                None => LONGEST_SLEEP,
            };
            let mut no_fds = Vec::new();
            let read = tokio::select! {
                read = receive(&self.socket, &mut self.text, &mut no_fds) => read,
                _ = self.child_changed.recv() => continue,
                () = tokio::time::sleep(sleep) => continue,
            };
            if !read.unwrap_or(false) {
                return self.kill_all().await;
            }
            if self.carry_out_orders() {
                return self.exit_last().await;
            }
        }
    }

    /// Carries out the received orders. Returns whether `done` was among them.
    fn carry_out_orders(&mut self) -> bool {
        while let Some(end) = self.text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.text.drain(..=end).collect();
            match String::from_utf8_lossy(&line).trim().parse() {
                Ok(Order::Until(moment)) => self.until = Some(moment),
                Ok(Order::Done) => return true,
                Ok(Order::Start(start)) => {
                    let report = match self.start(&start) {
                        Ok(pid) => Report::Started(pid.as_raw_pid()),
                        Err(error) => Report::NotStarted(error.to_string()),
                    };
                    self.send_report(&report);
                }
                Err(()) => {}
            }
        }
        false
    }

    /// Starts the command in a process group of its own. Returns the command's process id, which is
    /// also the id of the group.
    fn start(&mut self, start: &Start) -> io::Result<Pid> {
        let Role::Inner { stdio } = &mut self.role else {
            return Err(io::Error::other("only the inner watchdog starts the command"));
        };
        let [stdin, stdout, stderr] =
            stdio.take().ok_or_else(|| io::Error::other("the command was started before"))?;
        if self.until.is_some_and(Moment::has_passed) {
            return Err(io::Error::other("the lock's deadline has come"));
        }
        let mut command = Command::new(this_program()?);
        command.arg0("redlock").args(self.is_json.then_some("--json")).arg("__exec");
        if let Some(cgroup) = &self.tree.cgroup {
            command.arg("--cgroup").arg(cgroup.path());
        }
        command.args(start.blocked.iter().map(|signal| format!("--blocked={signal}")));
        command.arg(getpid().as_raw_pid().to_string()).args(&start.command);
        command.envs(start.environment.iter().map(|(name, value)| (name, value)));
        command.stdin(stdin).stdout(stdout).stderr(stderr).process_group(0);
        let group = Pid::from_child(&command.spawn()?);
        self.tree.group = Some(group);
        Ok(group)
    }

    /// Reaps ended children. Reports a change of the inner watchdog (from the outer one) or of the
    /// command (from the inner one).
    fn reap(&mut self) {
        let changed = loop {
            match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Ok(Some((pid, status))) => self.child_changed(pid, status),
                other => break other,
            }
        };
        self.is_childless = matches!(changed, Err(Errno::CHILD));
    }

    fn child_changed(&mut self, pid: Pid, status: WaitStatus) {
        match &mut self.role {
            Role::Outer { inner, has_ended } if *inner == pid => {
                *has_ended |= !status.stopped();
                // From now on the inner watchdog is killed with the rest, because a stopped process
                // never exits by itself.
                self.tree.watchdogs.clear();
                self.send_report(&Report::Gone);
            }
            Role::Inner { .. } if self.tree.group == Some(pid) => match status.stopping_signal() {
                Some(signal)
                    if [Signal::TTIN, Signal::TTOU].map(Signal::as_raw).contains(&signal) =>
                {
                    self.send_report(&Report::WantsTerminal);
                }
                // A stopped command would keep the lock until somebody continues it.
                Some(_) => self.tree.signal_group(Signal::CONT),
                None => {
                    self.tree.has_ended = true;
                    self.send_report(&Report::Ended(status.as_raw()));
                }
            },
            _ => {}
        }
    }

    /// Kills all remaining processes. Returns whether there were any.
    fn kill(&mut self) -> bool {
        self.reap();
        if !self.is_childless {
            self.tree.signal_all(Signal::KILL);
        }
        !self.is_childless
    }

    async fn kill_all(mut self) -> ExitCode {
        let end = Moment::now() + KILL_FOR;
        while self.kill() && !end.has_passed() {
            let _ = tokio::time::timeout(CHECK_INTERVAL, self.child_changed.recv()).await;
        }
        self.exit()
    }

    /// Exits. The outer watchdog first waits for the inner one to exit.
    async fn exit_last(mut self) -> ExitCode {
        let end = Moment::now() + EXITS_WITHIN;
        while matches!(self.role, Role::Outer { has_ended: false, .. }) && !end.has_passed() {
            let _ = tokio::time::timeout(CHECK_INTERVAL, self.child_changed.recv()).await;
            self.reap();
        }
        self.exit()
    }

    /// Exits. The exit code reports whether a process is left below this watchdog.
    fn exit(&self) -> ExitCode {
        if let Some(cgroup) = &self.tree.cgroup {
            cgroup.remove();
        }
        if self.is_childless { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// Sends a report without blocking. If the socket is full, the runner does not read because it
    /// is stopped, and the report is lost.
    fn send_report(&self, report: &Report) {
        let report = report.to_string();
        let _ = rustix::net::send(
            &self.socket,
            report.as_bytes(),
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        );
    }
}

/// Receives bytes and file descriptors from the runner. Returns false at the end of the stream.
async fn receive(
    socket: &UnixStream,
    text: &mut Vec<u8>,
    fds: &mut Vec<OwnedFd>,
) -> io::Result<bool> {
    let mut buffer = [0; 16 * 1024];
    let read = socket.async_io(Interest::READABLE, || {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut text = [IoSliceMut::new(&mut buffer)];
        let received = recvmsg(socket, &mut text, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(sent) = message {
                fds.extend(sent);
            }
        }
        Ok(received.bytes)
    });
    let read = read.await?;
    text.extend_from_slice(&buffer[..read]);
    Ok(read > 0)
}
