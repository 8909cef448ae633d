//! The two watchdogs of a command, as its runner has them.

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
    Pid, Signal, WaitOptions, WaitStatus, getpid, set_child_subreaper, wait, waitpid,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::signal::unix::{SignalKind, signal};

use crate::cgroup::Cgroup;
use crate::orders::{Order, Report, Start};
use crate::process_tree::ProcessTree;
use crate::processes::Process;
use crate::watchdog::{self, MAX_FDS};

/// For a watchdog to be there, and for it to start the command.
const STARTED_WITHIN: Duration = Duration::from_secs(10);
/// What may be killed is gone by then, and who is told to go has gone.
const GONE_WITHIN: Duration = Duration::from_secs(1);
/// A watchdog that does not end by then is stopped.
const PATIENCE: Duration = Duration::from_millis(100);
/// Between two looks at processes.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// What there is to tell while the command runs.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum News {
    Ended(ExitStatus),
    WantsTerminal,
    /// A watchdog was killed, is stopped, or reads nothing.
    GuardianGone,
}

/// To one watchdog and from it.
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

    /// Never waits. Whether there was room for it.
    fn tell(&self, order: &Order) -> bool {
        let text = order.to_string();
        // Not by the runtime, for which a socket has no room before it has looked.
        let socket: &tokio::net::UnixStream = self.orders.as_ref();
        let written =
            rustix::net::send(socket, text.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        written.is_ok_and(|written| written == text.len())
    }

    /// None at the end.
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
    below: Below,
}

impl Watchdogs {
    /// Starts both, and waits until they are there.
    pub(crate) async fn start(cgroup: Option<&Cgroup>, is_json: bool) -> io::Result<Self> {
        let adopts = adopt_orphans();
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
        let both_are_there = async {
            let Some(Report::Inner(pid)) = outer.report().await else { return None };
            (inner.report().await? == Report::Ready).then_some(Pid::from_raw(pid)?)
        };
        let there =
            tokio::time::timeout(STARTED_WITHIN, both_are_there).await.map_err(io::Error::other)?;
        let gone = || io::Error::other("it ended at once");
        let look = |pid| Process::look(pid).ok_or_else(gone);
        let processes = [look(Pid::from_child(&child))?, look(there.ok_or_else(gone)?)?];
        let below = Below { adopts, processes, child_changed, outer_ended: None, is_broken: false };
        Ok(Self { outer, inner, below })
    }

    /// What comes of the command that these guard.
    pub(crate) fn tree(&self, group: Option<Pid>, cgroup: Option<Cgroup>) -> ProcessTree {
        let watchdogs = self.below.processes.to_vec();
        let roots = if self.below.adopts { Vec::new() } else { watchdogs.clone() };
        ProcessTree { group, has_ended: false, cgroup, roots, watchdogs }
    }

    /// The command has to be gone by then.
    pub(crate) fn until(&mut self, moment: Moment) {
        let order = Order::Until(moment);
        self.below.is_broken |=
            [&self.outer, &self.inner].map(|line| line.tell(&order)).contains(&false);
    }

    /// Has the command started. Its number is that of its process group.
    pub(crate) async fn run(&mut self, start: Start) -> io::Result<Pid> {
        self.look_at_children();
        if self.below.is_broken {
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
        started?.ok_or_else(|| io::Error::other("the watchdog is gone"))
    }

    /// Waits for news. A watchdog that is gone is told again and again.
    pub(crate) async fn news(&mut self) -> News {
        while !self.below.is_broken {
            tokio::select! {
                biased;
                report = self.inner.report() => match report {
                    Some(Report::Ended(status)) => return News::Ended(ExitStatus::from_raw(status)),
                    Some(Report::WantsTerminal) => return News::WantsTerminal,
                    Some(_) => {}
                    None => self.below.is_broken = true,
                },
                report = self.outer.report() => {
                    self.below.is_broken |= matches!(report, Some(Report::Gone) | None);
                }
            }
        }
        News::GuardianGone
    }

    /// Waits for the end of the command. None when its watchdog was killed: the kernel has killed the command then.
    pub(crate) async fn ended(&mut self) -> Option<ExitStatus> {
        loop {
            if let Report::Ended(status) = self.inner.report().await? {
                return Some(ExitStatus::from_raw(status));
            }
        }
    }

    pub(crate) fn look_at_children(&mut self) {
        self.below.look();
    }

    /// Sends them away, though something may be left. Whether nothing is.
    pub(crate) async fn done(self) -> bool {
        let Self { outer, inner, mut below } = self;
        for line in [&outer, &inner] {
            line.tell(&Order::Done);
        }
        let end = Moment::now() + GONE_WITHIN;
        while below.processes.iter().any(Process::is_still_there) {
            if end.has_passed() {
                below.processes.iter().for_each(|watchdog| watchdog.signal(Signal::KILL));
                break;
            }
            below.changed().await;
        }
        below.is_childless()
    }

    /// Kills all that is left. The watchdogs do the same, as they have lost their runner, and go. Whether nothing is left.
    pub(crate) async fn clear(self, tree: &ProcessTree) -> bool {
        let Self { outer, inner, mut below } = self;
        drop((outer, inner));
        let begin = Moment::now();
        loop {
            tree.signal_all(Signal::KILL);
            if below.is_childless() {
                return true;
            }
            let is_late = (begin + GONE_WITHIN).has_passed();
            // One that is stopped never goes. Until nothing is left each of them may be the only one that lives on.
            let nobody_needs_them =
                below.adopts && (begin + PATIENCE).has_passed() && !tree.is_left();
            if is_late || nobody_needs_them {
                below.processes.iter().for_each(|watchdog| watchdog.signal(Signal::KILL));
            }
            if is_late {
                return false;
            }
            below.changed().await;
        }
    }
}

/// The processes below this one.
#[derive(Debug)]
struct Below {
    /// All children of this process but the outer watchdog are the command's.
    adopts: bool,
    /// The outer watchdog, and the inner one.
    processes: [Process; 2],
    child_changed: tokio::signal::unix::Signal,
    outer_ended: Option<WaitStatus>,
    is_broken: bool,
}

/// Makes this process the parent of all orphans that come of it. False where these could not be told from the children that
/// it had before: a shell with jobs may have become `redlock run`.
fn adopt_orphans() -> bool {
    let has_none = matches!(wait(WaitOptions::NOHANG), Err(Errno::CHILD));
    has_none && set_child_subreaper(Some(getpid())).is_ok()
}

impl Below {
    /// Until a child has changed, or a moment has passed.
    async fn changed(&mut self) {
        let _ = tokio::time::timeout(LOOK_AGAIN, self.child_changed.recv()).await;
        self.look();
    }

    /// Takes away what has ended, and sees whether the outer watchdog is there and runs. The outer one looks after the inner.
    fn look(&mut self) {
        let outer = self.processes[0].pid;
        let options = WaitOptions::NOHANG | WaitOptions::UNTRACED;
        let next = || if self.adopts { wait(options) } else { waitpid(Some(outer), options) };
        while let Ok(Some((pid, status))) = next() {
            if pid == outer {
                self.is_broken = true;
                self.outer_ended = Some(status).filter(|status| !status.stopped());
            }
        }
    }

    /// Nothing is left below this process, by the kernel's word, or nothing was below the outer watchdog when it ended.
    fn is_childless(&mut self) -> bool {
        self.look();
        match self.adopts {
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
    async fn a_guardian_that_reads_nothing_holds_up_nobody() {
        let (ours, _unread) = UnixStream::pair().unwrap();
        let line = Channel::new(ours).unwrap();
        let order = Order::Until(Moment::now());
        let told = (0..1_000_000).take_while(|_| line.tell(&order)).count();
        assert!(told > 100 && told < 1_000_000, "{told}: the watchdog counts as gone");
    }
}
