//! The processes of a command: the descendants of its watchdogs, and the members of its cgroup, if
//! any. The watchdogs are child subreapers: if a process below a watchdog loses its parent, the
//! watchdog becomes its parent.
//!
//! Two kinds of processes are out of reach: those that another program starts for the command
//! (docker, systemd-run) and, without a cgroup, those of another user.

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, kill_process_group, test_kill_process_group};

use crate::cgroup::Cgroup;
use crate::processes::{Process, descendants, others_are_hidden};

/// The processes of a command.
#[derive(Debug, Default)]
pub(crate) struct ProcessTree {
    /// The command's process group.
    pub(crate) group: Option<Pid>,
    /// Whether the command has ended. After that, the id of its group may be reused.
    pub(crate) has_ended: bool,
    pub(crate) cgroup: Option<Cgroup>,
    /// The processes whose descendants belong to the command. Empty means this process.
    pub(crate) roots: Vec<Process>,
    /// The watchdogs among those descendants, which do not belong to the command.
    pub(crate) watchdogs: Vec<Process>,
}

impl ProcessTree {
    pub(crate) fn signal_group(&self, signal: Signal) {
        let Some(group) = self.group else { return };
        if self.has_ended {
            self.members()
                .iter()
                .filter(|member| member.is_in(group))
                .for_each(|member| member.signal(signal));
        } else {
            // The kernel signals the whole group at once, even a process that is just being
            // started.
            let _ = kill_process_group(group, signal);
        }
    }

    /// Signals each process once. A process that is just being started may be missed; the next call
    /// finds it.
    pub(crate) fn signal_all(&self, signal: Signal) {
        let whole_group = self.group.filter(|_| !self.has_ended);
        if let Some(group) = whole_group {
            let _ = kill_process_group(group, signal);
        }
        if let Some(cgroup) = self.cgroup.as_ref().filter(|_| signal == Signal::KILL) {
            cgroup.kill();
        }
        let was_signalled =
            |member: &&Process| whole_group.is_some_and(|group| member.is_in(group));
        self.members()
            .iter()
            .filter(|member| !was_signalled(member))
            .for_each(|member| member.signal(signal));
    }

    /// Signals and continues all processes. A process that stays stopped would not handle the
    /// signal, and the lock would stay held.
    pub(crate) fn end_all(&self, signal: Signal) {
        self.signal_all(signal);
        self.signal_all(Signal::CONT);
    }

    /// Whether a process is left in the command's group, even a process that redlock may not
    /// signal.
    pub(crate) fn has_group(&self) -> bool {
        let Some(group) = self.group else { return false };
        if self.members().iter().any(|member| member.is_in(group)) {
            return true;
        }
        match test_kill_process_group(group) {
            Err(Errno::SRCH) => false,
            Err(_) => true,
            // The group has only zombies, or processes that /proc hides.
            Ok(()) => others_are_hidden(),
        }
    }

    /// Whether a process is left, as far as /proc shows. Proof that no process is left comes only
    /// from watchdogs that have no children any more.
    pub(crate) fn is_left(&self) -> bool {
        self.has_group()
            || !self.members().is_empty()
            || self.cgroup.as_ref().is_some_and(Cgroup::is_populated)
    }

    fn members(&self) -> Vec<Process> {
        let mut all: Vec<Process> = Process::all().collect();
        let roots: Vec<Pid> = match &*self.roots {
            [] => vec![getpid()],
            roots => {
                roots.iter().filter(|root| root.is_still_there()).map(|root| root.pid).collect()
            }
        };
        let found = descendants(&all, roots);
        let is_watchdog =
            |process: &Process| self.watchdogs.iter().any(|watchdog| watchdog.is(process));
        all.retain(|process| {
            found.contains(&process.pid) && process.is_living() && !is_watchdog(process)
        });
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_in_its_group_until_it_ends() {
        use std::os::unix::process::CommandExt;
        let mut child =
            std::process::Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
        let tree = ProcessTree { group: Some(Pid::from_child(&child)), ..ProcessTree::default() };
        assert!(tree.has_group() && tree.is_left());
        tree.signal_group(Signal::KILL);
        child.wait().unwrap();
        assert!(!tree.has_group());
    }
}
