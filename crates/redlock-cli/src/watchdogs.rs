//! The runner's side of its two watchdogs.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use redlock_client::clock::Moment;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process, set_child_subreaper, wait, waitpid,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::signal::unix::{SignalKind, signal};

use crate::cgroup::Cgroup;
use crate::orders::{Order, Report, Start};
use crate::process_tree::ProcessTree;
use crate::processes::Process;
use crate::watchdog::{self, MAX_FDS};

/// How long both watchdogs may take to start, and then the inner one to start the command.
const STARTED_WITHIN: Duration = Duration::from_secs(10);
/// How long killed processes may take to be gone, and watchdogs to exit after `done`.
const GONE_WITHIN: Duration = Duration::from_secs(1);
/// After its connection is closed, a watchdog that has not exited within this time counts as
/// stopped.
const EXITS_WITHIN: Duration = Duration::from_millis(100);
/// How often processes are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// An event while the command runs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WatchdogEvent {
    Ended(ExitStatus),
    WantsTerminal,
    /// A watchdog was killed or stopped, or does not read.
    WatchdogGone,
}

/// The connection to one watchdog.
#[derive(Debug)]
struct Channel {
    orders: OwnedWriteHalf,
    reports: Lines<BufReader<OwnedReadHalf>>,
}

impl Channel {
    fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let (reports, orders) = tokio::net::UnixStream::from_std(socket)?.into_split();
        Ok(Self { orders, reports: BufReader::new(reports).lines() })
    }

    /// Sends an order without blocking. Returns whether the socket took it.
    fn send(&self, order: &Order) -> bool {
        let text = order.to_string();
        // The order bypasses the runtime, which reports a socket as writable only after it has
        // polled the socket.
        let socket: &tokio::net::UnixStream = self.orders.as_ref();
        let written =
            rustix::net::send(socket, text.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        written.is_ok_and(|written| written == text.len())
    }

    /// Waits for a report; `None` at the end of the stream.
    async fn report(&mut self) -> Option<Report> {
        loop {
            match self.reports.next_line().await {
                Ok(Some(line)) => {
                    if let Ok(report) = line.parse() {
                        return Some(report);
                    }
                }
                Ok(None) | Err(_) => return None,
            }
        }
    }
}

/// The two watchdogs of a command.
#[derive(Debug)]
pub(crate) struct Watchdogs {
    outer: Channel,
    inner: Channel,
    children: Children,
}

impl Watchdogs {
    /// Starts both watchdogs, and waits until they are ready.
    pub(crate) async fn start(cgroup: Option<&Cgroup>, is_json: bool) -> io::Result<Self> {
        let is_subreaper = become_subreaper();
        let child_changed = signal(SignalKind::child())?;
        let (outer, outer_end) = UnixStream::pair()?;
        let (inner, inner_end) = UnixStream::pair()?;
        let child = watchdog::command(OwnedFd::from(outer_end), cgroup, is_json)?.spawn()?;
        send(&outer, &[inner_end.as_fd()])?;
        drop(inner_end);
        let stdin = io::stdin();
        let stdout = io::stdout();
        let stderr = io::stderr();
        send(&inner, &[stdin.as_fd(), stdout.as_fd(), stderr.as_fd()])?;
        let mut outer = Channel::new(outer)?;
        let mut inner = Channel::new(inner)?;
        let mut inner_pid = None;
        let both_ready = async {
            let Some(Report::Inner(pid)) = outer.report().await else { return None };
            inner_pid = Pid::from_raw(pid);
            (inner.report().await? == Report::Ready).then_some(Pid::from_raw(pid)?)
        };
        let ready = tokio::time::timeout(STARTED_WITHIN, both_ready).await;
        let has_ended = || io::Error::other("a watchdog ended at once");
        if !matches!(ready, Ok(Some(_))) {
            // A watchdog that was stopped (SIGSTOP) would never exit by itself.
            for pid in [Some(Pid::from_child(&child)), inner_pid].into_iter().flatten() {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        let ready = ready.map_err(io::Error::other)?;
        let read = |pid| Process::read(pid).ok_or_else(has_ended);
        let processes = [read(Pid::from_child(&child))?, read(ready.ok_or_else(has_ended)?)?];
        let children = Children {
            is_subreaper,
            processes,
            child_changed,
            outer_ended: None,
            is_broken: false,
        };
        Ok(Self { outer, inner, children })
    }

    /// The processes of the command under these watchdogs.
    pub(crate) fn tree(&self, group: Option<Pid>, cgroup: Option<Cgroup>) -> ProcessTree {
        let watchdogs = self.children.processes.to_vec();
        let roots = if self.children.is_subreaper { Vec::new() } else { watchdogs.clone() };
        ProcessTree { group, has_ended: false, cgroup, roots, watchdogs }
    }

    /// Sets the moment at which the watchdogs kill the command.
    pub(crate) fn until(&mut self, moment: Moment) {
        let order = Order::Until(moment);
        self.children.is_broken |=
            [&self.outer, &self.inner].map(|channel| channel.send(&order)).contains(&false);
    }

    /// Orders the inner watchdog to start the command. Returns the command's process id, which is
    /// also the id of its process group.
    pub(crate) async fn run(&mut self, start: Start) -> io::Result<Pid> {
        self.reap();
        if self.children.is_broken {
            return Err(io::Error::other("a watchdog was killed or stopped"));
        }
        let order = Order::Start(start).to_string();
        let started = async {
            self.inner.orders.write_all(order.as_bytes()).await?;
            match self.inner.report().await {
                Some(Report::Started(pid)) => Ok(Pid::from_raw(pid)),
                Some(Report::NotStarted(why)) => Err(io::Error::other(why)),
                _ => Ok(None),
            }
        };
        let started =
            tokio::time::timeout(STARTED_WITHIN, started).await.map_err(io::Error::other)?;
        started?.ok_or_else(|| io::Error::other("the watchdog has ended"))
    }

    /// Waits for the next event. Once a watchdog is gone, every call reports that.
    pub(crate) async fn next_event(&mut self) -> WatchdogEvent {
        while !self.children.is_broken {
            tokio::select! {
                biased;
                report = self.inner.report() => match report {
                    Some(Report::Ended(status)) => {
                        return WatchdogEvent::Ended(ExitStatus::from_raw(status));
                    }
                    Some(Report::WantsTerminal) => return WatchdogEvent::WantsTerminal,
                    Some(_) => {}
                    None => self.children.is_broken = true,
                },
                report = self.outer.report() => {
                    self.children.is_broken |= matches!(report, Some(Report::Gone) | None);
                }
            }
        }
        WatchdogEvent::WatchdogGone
    }

    /// Waits for the end of the command. `None` when the inner watchdog was killed: the kernel has
    /// then killed the command.
    pub(crate) async fn ended(&mut self) -> Option<ExitStatus> {
        loop {
            if let Report::Ended(status) = self.inner.report().await? {
                return Some(ExitStatus::from_raw(status));
            }
        }
    }

    pub(crate) fn reap(&mut self) {
        self.children.reap();
    }

    /// Ends the watchdogs, even if processes of the command are left. Returns whether no process is
    /// left.
    pub(crate) async fn done(self) -> bool {
        let Self { outer, inner, mut children } = self;
        for channel in [&outer, &inner] {
            channel.send(&Order::Done);
        }
        let begin = Moment::now();
        while children.processes.iter().any(Process::is_still_there) {
            if (begin + GONE_WITHIN).has_passed() {
                children.processes.iter().for_each(|watchdog| watchdog.signal(Signal::KILL));
            }
            if (begin + GONE_WITHIN * 2).has_passed() {
                break;
            }
            children.changed().await;
        }
        children.is_childless()
    }

    /// Kills all processes of the command. Closes the connections to the watchdogs, which then do
    /// the same and exit. Returns whether no process is left.
    pub(crate) async fn clear(self, tree: &ProcessTree) -> bool {
        let Self { outer, inner, mut children } = self;
        drop((outer, inner));
        let begin = Moment::now();
        loop {
            tree.signal_all(Signal::KILL);
            if children.is_childless() {
                return true;
            }
            let is_late = (begin + GONE_WITHIN).has_passed();
            // A stopped watchdog never exits by itself, so it is killed. But before time runs out,
            // it is spared until no process of the command is left: if the runner is killed, it may
            // be the only one that can kill the rest.
            let are_needless =
                children.is_subreaper && (begin + EXITS_WITHIN).has_passed() && !tree.is_left();
            if is_late || are_needless {
                children.processes.iter().for_each(|watchdog| watchdog.signal(Signal::KILL));
            }
            if is_late {
                return false;
            }
            children.changed().await;
        }
    }
}

/// The children of the runner.
#[derive(Debug)]
struct Children {
    /// Whether the runner is a subreaper. If so, all its children but the outer watchdog are
    /// processes of the command.
    is_subreaper: bool,
    /// The outer and the inner watchdog.
    processes: [Process; 2],
    child_changed: tokio::signal::unix::Signal,
    outer_ended: Option<WaitStatus>,
    is_broken: bool,
}

/// Makes this process the parent of orphans below it. Does nothing and returns false if this
/// process already has children, because a shell with jobs may have become `redlock run` by exec.
/// Those jobs could not be distinguished from orphans of the command.
fn become_subreaper() -> bool {
    let has_none = matches!(wait(WaitOptions::NOHANG), Err(Errno::CHILD));
    has_none && set_child_subreaper(Some(getpid())).is_ok()
}

impl Children {
    /// Waits until a child has changed, but at most [`CHECK_INTERVAL`].
    async fn changed(&mut self) {
        let _ = tokio::time::timeout(CHECK_INTERVAL, self.child_changed.recv()).await;
        self.reap();
    }

    /// Reaps ended children, and checks the outer watchdog, which checks the inner one.
    fn reap(&mut self) {
        let outer = self.processes[0].pid;
        let options = WaitOptions::NOHANG | WaitOptions::UNTRACED;
        let next = || if self.is_subreaper { wait(options) } else { waitpid(Some(outer), options) };
        while let Ok(Some((pid, status))) = next() {
            if pid == outer {
                self.is_broken = true;
                self.outer_ended = Some(status).filter(|status| !status.stopped());
            }
        }
    }

    /// Whether no process is left. A subreaper asks the kernel whether it has children; otherwise
    /// the exit code of the outer watchdog shows it.
    fn is_childless(&mut self) -> bool {
        self.reap();
        match self.is_subreaper {
            true => matches!(wait(WaitOptions::NOHANG), Err(Errno::CHILD)),
            false => self.outer_ended.is_some_and(|status| status.exit_status() == Some(0)),
        }
    }
}

fn send(socket: &UnixStream, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(fds));
    sendmsg(socket, &[IoSlice::new(b"\n")], &mut ancillary, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_watchdog_that_does_not_read_blocks_nobody() {
        let (ours, _unread) = UnixStream::pair().unwrap();
        let channel = Channel::new(ours).unwrap();
        let order = Order::Until(Moment::now());
        let sent = (0..1_000_000).take_while(|_| channel.send(&order)).count();
        assert!(sent > 100 && sent < 1_000_000, "{sent}: the watchdog counts as gone");
    }
}
