//! All that has come of a command: its process group; whatever has left that (`timeout`, setsid, a daemon) and still carries the
//! mark that the command was given in its environment; and all that descends from the runner, which orphans become children of
//! (a child subreaper), also where the mark was wiped or overwritten, as a program does that sets its own title.
//!
//! Out of reach is what somebody else starts for the command (docker, systemd-run). When the runner is killed its children have
//! another parent: the guardian then goes by group and mark alone. So it is all the time where the runner had children before it
//! began (a shell that has jobs and becomes `redlock run`): their orphans would be taken for the command's.

use std::collections::HashSet;

use nix::sys::wait::{Id, WaitPidFlag, waitid};
use redlock_client::clock::Moment;
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, getppid, kill_process_group, pidfd_open, pidfd_send_signal,
    set_child_subreaper, test_kill_process_group, waitpid,
};

use crate::environment::Reader;
use crate::processes::{Process, descendants};

/// The name of an environment variable that no other command has. Another run below this one keeps it, and has one of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark(String);

impl Mark {
    const PREFIX: &str = "REDLOCK_RUN_";

    pub(crate) fn new() -> Self {
        Self(format!("{}{}_{}", Self::PREFIX, getpid(), Moment::now().since_boot().as_micros()))
    }

    /// As [`Mark::variable`] has it.
    pub(crate) fn read(text: &str) -> Option<Self> {
        let digits = text.strip_prefix(Self::PREFIX)?;
        let is_one = digits.len() >= 3 && digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'_');
        is_one.then(|| Self(text.to_owned()))
    }

    pub(crate) fn variable(&self) -> &str {
        &self.0
    }

    fn is_in(&self, environment: &[u8]) -> bool {
        let names = environment.split(|byte| *byte == 0).map(|pair| pair.split(|byte| *byte == b'=').next());
        names.flatten().any(|name| name == self.0.as_bytes())
    }
}

/// Whose descendants are the command's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tree {
    /// This process, or its parent while that lives.
    pub(crate) runner: Pid,
    pub(crate) guardian: Pid,
}

impl Tree {
    fn members(&self, all: &[Process]) -> HashSet<Pid> {
        // Looked at afterwards: when the runner is gone, its number may be another's.
        let found = descendants(all, self.runner, self.guardian);
        let is_there = self.runner == getpid() || Some(self.runner) == getppid();
        if is_there { found } else { HashSet::new() }
    }
}

/// Makes this process the parent of all orphans that come of it. False where that could not be told from what it had before.
pub(crate) fn adopt_orphans() -> bool {
    let has_none = matches!(peek(Id::All), Err(nix::errno::Errno::ECHILD));
    has_none && set_child_subreaper(Some(getpid())).is_ok()
}

/// A child that has ended, which remains to be waited for.
fn peek(of: Id<'_>) -> nix::Result<Option<nix::unistd::Pid>> {
    Ok(waitid(of, WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT)?.pid())
}

/// A command and what it has started.
#[derive(Debug, Default)]
pub(crate) struct Family {
    pub(crate) group: Option<Pid>,
    pub(crate) mark: Option<Mark>,
    pub(crate) tree: Option<Tree>,
    pub(crate) environments: Reader,
}

impl Family {
    pub(crate) fn signal_group(&self, signal: Signal) {
        // It may have ended.
        let _ = self.group.map(|group| kill_process_group(group, signal));
    }

    /// Each process once. Those that are started meanwhile are for the next time.
    pub(crate) fn signal_all(&self, signal: Signal) {
        self.signal_group(signal);
        for member in self.members(|process| !self.group.is_some_and(|group| process.is_in(group))) {
            // Held before it is looked at again: its number may be another's by now.
            if let Ok(held) = pidfd_open(member.pid, PidfdFlags::empty())
                && member.is_still_there()
            {
                let _ = pidfd_send_signal(&held, signal);
            }
        }
    }

    /// What may not be signalled is there all the same.
    pub(crate) fn has_group(&self) -> bool {
        let Some(group) = self.group else { return false };
        test_kill_process_group(group) != Err(rustix::io::Errno::SRCH)
            && Process::all().any(|process| process.is_in(group) && process.is_living())
    }

    pub(crate) fn is_left(&self) -> bool {
        self.has_group() || !self.members(|_| true).is_empty()
    }

    /// Adopted orphans that have ended stay until they are waited for. Whoever waits for command and guardian has to find these.
    pub(crate) fn bury_orphans(&self) {
        let Some(tree) = self.tree else { return };
        // One of the two may stand in front of others: their turn comes when it is waited for, and the next child ends.
        while let Ok(Some(ended)) = peek(Id::All)
            && let Some(pid) = Pid::from_raw(ended.as_raw())
            && Some(pid) != self.group
            && pid != tree.guardian
            && waitpid(Some(pid), WaitOptions::NOHANG).is_ok()
        {}
    }

    /// What descends from the command or carries its mark, of those that matter.
    fn members(&self, matters: impl Fn(&Process) -> bool) -> Vec<Process> {
        let mut all: Vec<Process> = Process::all().collect();
        let tree = self.tree.map_or_else(HashSet::new, |tree| tree.members(&all));
        // While a read hangs there are no marks to be seen, but what is in the group or descends from the runner is found.
        let environment = |process: &Process| self.environments.read(&process.environment());
        let is_marked = |process: &Process| {
            self.mark.as_ref().is_some_and(|mark| environment(process).is_some_and(|read| mark.is_in(&read)))
        };
        all.retain(|process| {
            let may_be = process.pid != getpid() && process.is_living() && matters(process);
            may_be && (tree.contains(&process.pid) || is_marked(process))
        });
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written_and_nothing_else_is_one() {
        let mark = Mark::new();
        assert_eq!(Mark::read(mark.variable()), Some(mark));
        for wrong in ["REDLOCK_RUN_", "REDLOCK_RUN_a", "PATH", "", "REDLOCK_TOKEN"] {
            assert_eq!(Mark::read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_process_is_found_in_its_group() {
        let group = rustix::process::getpgrp();
        assert!(Family { group: Some(group), ..Family::default() }.has_group());
        assert!(!Family { group: Pid::from_raw(i32::MAX), ..Family::default() }.has_group());
    }
}
