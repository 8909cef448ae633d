//! A process that kills a command and all that came of it when its runner cannot: the runner is killed, stopped, or has no time.
//!
//! ```text
//!  redlock run ── watchdog ── watchdog ── command
//! ```
//!
//! The two are the same program. The inner one starts the command, the outer one starts the inner one, and the runner writes
//! to both. Each of the three becomes the parent of orphans below it (a child subreaper): any two of them may be killed or
//! stopped, and the third still finds all that came of the command. A watchdog kills it when the deadline has come, and when
//! its orders end without `done`: then the runner is gone. It ends when the kernel says that it has no child any more.

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

/// Timers stand still while the machine sleeps.
const PIECE: Duration = Duration::from_millis(250);
/// Between two looks at what was killed.
const SHORT: Duration = Duration::from_millis(5);
/// For how long it goes on trying to kill what cannot be killed.
const LONG: Duration = Duration::from_secs(10);
/// What ends when it is told to has ended by then.
const ENDED_WITHIN: Duration = Duration::from_secs(1);
/// As many as one message of a runner brings.
pub(crate) const MAX_FDS: usize = 3;

/// This program, also when its file was replaced meanwhile.
pub(crate) fn this_program() -> io::Result<PathBuf> {
    let running = Path::new("/proc/self/exe");
    if running.exists() { Ok(running.into()) } else { std::env::current_exe() }
}

/// A watchdog that is to be started: its orders come by its standard input.
pub(crate) fn command(
    orders: OwnedFd,
    cgroup: Option<&Cgroup>,
    is_json: bool,
) -> io::Result<Command> {
    let mut command = Command::new(this_program()?);
    command.arg0("redlock").args(is_json.then_some("--json")).arg("__watchdog");
    command.args(cgroup.map(|cgroup| [Path::new("--cgroup"), cgroup.path()]).into_iter().flatten());
    // An interrupt at the terminal is not for it, and nobody is to wait for it at the end of a pipe.
    command.stdin(orders).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    Ok(command)
}

pub(crate) fn main(cgroup: Option<PathBuf>, is_json: bool) -> ExitCode {
    // Also what the kernel sends when a group of stopped processes has lost its parent.
    let mut blocked = nix::sys::signal::SigSet::all();
    blocked.remove(nix::sys::signal::SIGCHLD);
    if blocked.thread_block().is_err() || set_child_subreaper(Some(getpid())).is_err() {
        return ExitCode::FAILURE;
    }
    // One thread: a command is killed with the thread that has started it.
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::FAILURE;
    };
    runtime.block_on(async {
        match Watchdog::new(cgroup.map(Cgroup::at), is_json).await {
            Ok(watchdog) => watchdog.guard().await,
            Err(_) => ExitCode::FAILURE,
        }
    })
}

/// Which of the two it is.
#[derive(Debug)]
enum Post {
    Outer {
        inner: Pid,
        has_ended: bool,
    },
    /// With what the command will read from and write to, until it is started.
    Inner {
        stdio: Option<[OwnedFd; 3]>,
    },
}

#[derive(Debug)]
struct Watchdog {
    socket: UnixStream,
    text: Vec<u8>,
    post: Post,
    child_changed: tokio::signal::unix::Signal,
    /// Nothing is left below this process, by the kernel's word.
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
        let (post, report) = match <[OwnedFd; 3]>::try_from(fds) {
            Ok(stdio) => (Post::Inner { stdio: Some(stdio) }, Report::Ready),
            Err(mut fds) => {
                let orders =
                    fds.pop().ok_or_else(|| io::Error::other("the runner has sent no socket"))?;
                let inner = Pid::from_child(&command(orders, cgroup.as_ref(), is_json)?.spawn()?);
                (Post::Outer { inner, has_ended: false }, Report::Inner(inner.as_raw_pid()))
            }
        };
        // The inner one kills the same. The outer one may be stopped the moment after it has killed the inner one.
        let watchdogs = match post {
            Post::Outer { inner, .. } => Process::look(inner).into_iter().collect(),
            Post::Inner { .. } => Vec::new(),
        };
        let tree = ProcessTree { cgroup, watchdogs, ..ProcessTree::default() };
        let is_childless = false;
        let until = None;
        let watchdog =
            Self { socket, text, post, child_changed, is_childless, until, tree, is_json };
        watchdog.tell(&report);
        Ok(watchdog)
    }

    /// Watches until it is told to go, or nothing is left of the command of a runner that is gone.
    async fn guard(mut self) -> ExitCode {
        loop {
            self.look_at_children();
            // Again and again until the runner is gone: what was being started at that moment has its turn too.
            let piece = match self.until {
                Some(until) if until.has_passed() => {
                    if self.kill() && self.tree.is_left() {
                        SHORT
                    } else {
                        PIECE
                    }
                }
                Some(until) => until.left().clamp(SHORT, PIECE),
                None => PIECE,
            };
            let mut no_fds = Vec::new();
            let read = tokio::select! {
                read = receive(&self.socket, &mut self.text, &mut no_fds) => read,
                _ = self.child_changed.recv() => continue,
                () = tokio::time::sleep(piece) => continue,
            };
            if !read.unwrap_or(false) {
                return self.kill_all().await;
            }
            if self.obey() {
                return self.go().await;
            }
        }
    }

    /// Does what it was told. Whether that was to go.
    fn obey(&mut self) -> bool {
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
                    self.tell(&report);
                }
                Err(()) => {}
            }
        }
        false
    }

    /// Starts the command, in a process group of its own, whose number is its own.
    fn start(&mut self, start: &Start) -> io::Result<Pid> {
        let Post::Inner { stdio } = &mut self.post else {
            return Err(io::Error::other("not here"));
        };
        let [stdin, stdout, stderr] =
            stdio.take().ok_or_else(|| io::Error::other("it was started before"))?;
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

    /// Takes away what has ended, and tells of the one child that matters.
    fn look_at_children(&mut self) {
        let changed = loop {
            match wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Ok(Some((pid, status))) => self.child_changed(pid, status),
                other => break other,
            }
        };
        self.is_childless = matches!(changed, Err(Errno::CHILD));
    }

    fn child_changed(&mut self, pid: Pid, status: WaitStatus) {
        match &mut self.post {
            Post::Outer { inner, has_ended } if *inner == pid => {
                *has_ended |= !status.stopped();
                // Spared no longer: what is stopped never goes by itself.
                self.tree.watchdogs.clear();
                self.tell(&Report::Gone);
            }
            Post::Inner { .. } if self.tree.group == Some(pid) => match status.stopping_signal() {
                Some(signal)
                    if [Signal::TTIN, Signal::TTOU].map(Signal::as_raw).contains(&signal) =>
                {
                    self.tell(&Report::WantsTerminal);
                }
                // It would keep the lock for as long as nobody continues it.
                Some(_) => self.tree.signal_group(Signal::CONT),
                None => {
                    self.tree.has_ended = true;
                    self.tell(&Report::Ended(status.as_raw()));
                }
            },
            _ => {}
        }
    }

    /// Kills whatever is left. Whether there was something.
    fn kill(&mut self) -> bool {
        self.look_at_children();
        if !self.is_childless {
            self.tree.signal_all(Signal::KILL);
        }
        !self.is_childless
    }

    async fn kill_all(mut self) -> ExitCode {
        let end = Moment::now() + LONG;
        while self.kill() && !end.has_passed() {
            let _ = tokio::time::timeout(SHORT, self.child_changed.recv()).await;
        }
        self.exit()
    }

    /// Goes, the outer one after the inner one, which was told to go as well.
    async fn go(mut self) -> ExitCode {
        let end = Moment::now() + ENDED_WITHIN;
        while matches!(self.post, Post::Outer { has_ended: false, .. }) && !end.has_passed() {
            let _ = tokio::time::timeout(SHORT, self.child_changed.recv()).await;
            self.look_at_children();
        }
        self.exit()
    }

    /// Whether something is left below it, as its exit code.
    fn exit(&self) -> ExitCode {
        if let Some(cgroup) = &self.tree.cgroup {
            cgroup.remove();
        }
        if self.is_childless { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// The runner may be stopped: what it does not read is dropped, and it reads the end of the command on its own.
    fn tell(&self, report: &Report) {
        let report = report.to_string();
        let _ = rustix::net::send(
            &self.socket,
            report.as_bytes(),
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        );
    }
}

/// Takes what the runner has sent. False at the end.
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
