//! All that has come of a command: whatever descends from its watchdogs, which become the parents of all orphans below them
//! (child subreapers), and what is in its cgroup, where it has one.
//!
//! Out of reach is what somebody else starts for the command (docker, systemd-run), and, without a cgroup, what runs as
//! another user.

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, kill_process_group, test_kill_process_group};

use crate::cgroup::Cgroup;
use crate::processes::{Process, descendants, others_are_hidden};

/// A command and what it has started.
#[derive(Debug, Default)]
pub(crate) struct ProcessTree {
    /// The command's process group.
    pub(crate) group: Option<Pid>,
    /// The group's number may be another's by now.
    pub(crate) has_ended: bool,
    pub(crate) cgroup: Option<Cgroup>,
    /// Whose descendants it is; nobody's means this process's.
    pub(crate) roots: Vec<Process>,
    /// Descend from a root, and are not the command's.
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
            // All at once: who is started meanwhile cannot be missed.
            let _ = kill_process_group(group, signal);
        }
    }

    /// Each process once. Those that are started meanwhile are for the next time.
    pub(crate) fn signal_all(&self, signal: Signal) {
        let whole_group = self.group.filter(|_| !self.has_ended);
        if let Some(group) = whole_group {
            let _ = kill_process_group(group, signal);
        }
        if let Some(cgroup) = self.cgroup.as_ref().filter(|_| signal == Signal::KILL) {
            cgroup.kill();
        }
        let was_told = |member: &&Process| whole_group.is_some_and(|group| member.is_in(group));
        self.members()
            .iter()
            .filter(|member| !was_told(member))
            .for_each(|member| member.signal(signal));
    }

    /// Also what is stopped: it would keep the signal for when it goes on, and the lock with it.
    pub(crate) fn end_all(&self, signal: Signal) {
        self.signal_all(signal);
        self.signal_all(Signal::CONT);
    }

    /// Whether anybody is left in the group. What may not be signalled is there all the same.
    pub(crate) fn has_group(&self) -> bool {
        let Some(group) = self.group else { return false };
        if self.members().iter().any(|member| member.is_in(group)) {
            return true;
        }
        match test_kill_process_group(group) {
            Err(Errno::SRCH) => false,
            Err(_) => true,
            // Zombies, or somebody who is hidden.
            Ok(()) => others_are_hidden(),
        }
    }

    /// As far as it can be seen. That nothing is left is certain only when the watchdogs have no children.
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
        let is_guardian =
            |process: &Process| self.watchdogs.iter().any(|watchdog| watchdog.is(process));
        all.retain(|process| {
            found.contains(&process.pid) && process.is_living() && !is_guardian(process)
        });
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_in_its_group_until_it_has_ended() {
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
