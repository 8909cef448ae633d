//! Reads processes from `/proc`, and sends a signal to one of them.

use std::collections::HashSet;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

/// A snapshot of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    state: char,
    /// The process id of the parent; 0 if the parent cannot be seen.
    parent: i32,
    group: i32,
    /// The number of threads. The first thread counts even after it has ended.
    threads: u32,
    /// The start of the process, in clock ticks since boot. Process id and start together identify
    /// a process.
    start: u64,
}

impl Process {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
        pids.filter_map(Self::read)
    }

    pub(crate) fn read(pid: Pid) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
        Self::parse(pid, &stat)
    }

    /// Parses `/proc/PID/stat`. The name of the process may hold any character. The fields behind
    /// the name are: state, parent, group, 14 more, threads, one more, start.
    fn parse(pid: Pid, stat: &str) -> Option<Self> {
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let threads = fields.nth(14)?.parse().ok()?;
        Some(Self { pid, state, parent, group, threads, start: fields.nth(1)?.parse().ok()? })
    }

    /// Whether both are the same process, and not two processes that had the same id one after the
    /// other.
    pub(crate) fn is(&self, other: &Self) -> bool {
        (self.pid, self.start) == (other.pid, other.start)
    }

    pub(crate) fn is_still_there(&self) -> bool {
        Self::read(self.pid).is_some_and(|now| now.is(self))
    }

    /// Sends a signal to this process, but never to a later process with the same id.
    pub(crate) fn signal(&self, signal: Signal) {
        let pidfd = pidfd_open(self.pid, PidfdFlags::empty());
        if !self.is_still_there() {
            return;
        }
        let sent = pidfd.and_then(|pidfd| pidfd_send_signal(&pidfd, signal));
        // Linux before 5.3 lacks the pidfd calls, and a seccomp filter may refuse them.
        if sent.is_err_and(|error| error != Errno::SRCH) {
            let _ = kill_process(self.pid, signal);
        }
    }

    /// Whether any thread still runs. A process whose first thread has ended looks like a zombie,
    /// even while its other threads run.
    pub(crate) fn is_living(&self) -> bool {
        !matches!(self.state, 'Z' | 'X') || self.threads > 1
    }

    pub(crate) fn is_in(&self, group: Pid) -> bool {
        self.group == group.as_raw_pid()
    }
}

/// Whether /proc hides the processes of other users (`hidepid`). If so, it also hides process 1,
/// which this reads.
pub(crate) fn others_are_hidden() -> bool {
    Process::read(Pid::INIT).is_none()
}

/// All descendants of some processes. If one of those processes descends from another one, it is
/// included.
pub(crate) fn descendants(all: &[Process], of: impl IntoIterator<Item = Pid>) -> HashSet<Pid> {
    let mut found = HashSet::new();
    let mut parents: Vec<i32> = of.into_iter().map(Pid::as_raw_pid).collect();
    while let Some(parent) = parents.pop() {
        let children = all.iter().filter(|process| process.parent == parent);
        parents.extend(
            children.filter(|child| found.insert(child.pid)).map(|child| child.pid.as_raw_pid()),
        );
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pid(number: i32) -> Pid {
        Pid::from_raw(number).unwrap()
    }

    fn child(of: i32, number: i32) -> Process {
        Process { pid: pid(number), state: 'S', parent: of, group: 1, threads: 1, start: 1 }
    }

    #[test]
    fn a_process_is_parsed_whatever_its_name_is() {
        let stat = "7 (a) Z 1 2) S 3 4 5 0 -1 4194560 127 0 0 0 0 0 0 0 20 0 1 0 4711 8192 1 18446744073709551615 1 1\n";
        let read = Process::parse(pid(7), stat).unwrap();
        assert_eq!(
            read,
            Process { pid: pid(7), state: 'S', parent: 3, group: 4, threads: 1, start: 4711 }
        );
        assert!(read.is_living() && read.is_in(pid(4)) && !read.is_in(pid(5)));
        assert_eq!(Process::parse(pid(7), ""), None);
        let me = Process::read(rustix::process::getpid()).unwrap();
        assert!(me.is_still_there() && me.is_in(rustix::process::getpgrp()));
        assert!(!Process { start: me.start + 1, ..me }.is_still_there() && me.threads > 1);
        assert!(
            !Process { state: 'Z', threads: 1, ..me }.is_living()
                && Process { state: 'Z', threads: 2, ..me }.is_living()
        );
    }

    #[test]
    fn descendants_are_found_in_any_order() {
        // A process that is its own parent must not cause a loop.
        let all = [
            child(30, 31),
            child(2, 30),
            child(1, 2),
            child(2, 40),
            child(40, 41),
            child(50, 50),
            child(1, 3),
        ];
        assert_eq!(descendants(&all, [pid(2)]), [30, 31, 40, 41].map(pid).into());
        assert_eq!(descendants(&all, [pid(50)]), [pid(50)].into());
        assert_eq!(descendants(&all, [pid(41), pid(30)]), [pid(31)].into());
        assert_eq!(descendants(&all, []), HashSet::new());
    }

    #[test]
    fn a_signal_spares_a_later_process_with_that_id() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::read(Pid::from_child(&child)).unwrap();
        Process { start: process.start + 1, ..process }.signal(Signal::KILL);
        assert!(child.try_wait().unwrap().is_none() && process.is_still_there());
        process.signal(Signal::KILL);
        assert!(!child.wait().unwrap().success());
    }
}
