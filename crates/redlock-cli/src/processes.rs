//! What the system tells of processes.

use std::collections::HashSet;
use std::path::PathBuf;

use rustix::process::Pid;

/// One process, as it was a moment ago.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    state: char,
    /// 0 where it has none that can be seen from here.
    parent: i32,
    group: i32,
    /// With the one that began it, also when that has ended.
    threads: u32,
    /// In ticks since boot. Together with the number it is of no other process.
    start: u64,
}

impl Process {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
        pids.filter_map(Self::look)
    }

    pub(crate) fn look(pid: Pid) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
        Self::parse(pid, &stat)
    }

    /// Behind the name, which may hold anything: state, parent, group, 14 more, the threads, one more, the start.
    fn parse(pid: Pid, stat: &str) -> Option<Self> {
        let mut fields = stat.rsplit_once(") ")?.1.split(' ');
        let state = fields.next()?.chars().next()?;
        let (parent, group) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        let threads = fields.nth(14)?.parse().ok()?;
        Some(Self { pid, state, parent, group, threads, start: fields.nth(1)?.parse().ok()? })
    }

    /// Whether it is there still, and not another one of the same number.
    pub(crate) fn is_still_there(&self) -> bool {
        Self::look(self.pid).is_some_and(|now| now.start == self.start)
    }

    /// Whoever is older than what began it has not come of it.
    pub(crate) fn is_older_than(&self, other: &Self) -> bool {
        self.start < other.start
    }

    /// A zombie, which nobody may ever wait for, does nothing any more, unless only its first thread has ended.
    pub(crate) fn is_living(&self) -> bool {
        !self.has_lost_its_first_thread() || self.threads > 1
    }

    fn has_lost_its_first_thread(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }

    pub(crate) fn is_in(&self, group: Pid) -> bool {
        self.group == group.as_raw_nonzero().get()
    }

    pub(crate) fn environment(&self) -> PathBuf {
        let process = PathBuf::from(format!("/proc/{}", self.pid.as_raw_nonzero()));
        // A thread that has ended shows none; the others have the same.
        let others = || std::fs::read_dir(process.join("task")).into_iter().flatten().flatten();
        let is_first = |name: &std::ffi::OsStr| name.to_str() == Some(&self.pid.as_raw_nonzero().to_string());
        let other = || others().find(|task| !is_first(&task.file_name())).map(|task| task.path().join("environ"));
        let found = if self.has_lost_its_first_thread() { other() } else { None };
        found.unwrap_or_else(|| process.join("environ"))
    }
}

/// All that descend from a process, but for one and what descends from that.
pub(crate) fn descendants(all: &[Process], of: Pid, but: Pid) -> HashSet<Pid> {
    let number = |pid: Pid| pid.as_raw_nonzero().get();
    let (mut found, mut parents) = (HashSet::new(), vec![number(of)]);
    while let Some(parent) = parents.pop() {
        let children = all.iter().filter(|process| process.parent == parent && process.pid != but);
        parents.extend(children.filter(|child| found.insert(child.pid)).map(|child| number(child.pid)));
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
    fn a_process_is_read_whatever_its_name_is() {
        let stat =
            "7 (a) Z 1 2) S 3 4 5 0 -1 4194560 127 0 0 0 0 0 0 0 20 0 1 0 4711 8192 1 18446744073709551615 1 1\n";
        let read = Process::parse(pid(7), stat).unwrap();
        assert_eq!(read, Process { pid: pid(7), state: 'S', parent: 3, group: 4, threads: 1, start: 4711 });
        assert!(read.is_living() && read.is_in(pid(4)) && !read.is_in(pid(5)));
        assert_eq!(Process::parse(pid(7), ""), None);
        let me = Process::look(rustix::process::getpid()).unwrap();
        assert!(me.is_still_there() && me.is_in(rustix::process::getpgrp()));
        assert!(!Process { start: me.start + 1, ..me }.is_still_there() && me.threads > 1);
        assert!(
            !Process { state: 'Z', threads: 1, ..me }.is_living()
                && Process { state: 'Z', threads: 2, ..me }.is_living()
        );
    }

    #[test]
    fn descendants_are_found_in_any_order_and_the_exception_has_none() {
        // A number that is its own parent must end too.
        let all = [child(30, 31), child(2, 30), child(1, 2), child(2, 40), child(40, 41), child(50, 50), child(1, 3)];
        assert_eq!(descendants(&all, pid(2), pid(40)), HashSet::from([pid(30), pid(31)]));
        assert_eq!(descendants(&all, pid(50), pid(1)), HashSet::from([pid(50)]));
        assert_eq!(descendants(&all, pid(41), pid(1)), HashSet::new());
    }
}
