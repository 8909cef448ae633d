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
    /// The guardian, which was there before the command: who is older carries no mark, and may hang as it likes.
    pub(crate) first: Option<Process>,
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

    /// Also what is stopped: it would keep the signal for when it goes on, and the lock with it.
    pub(crate) fn end_all(&self, signal: Signal) {
        self.signal_all(signal);
        self.signal_all(Signal::CONT);
    }

    /// What may not be signalled is there all the same.
    pub(crate) fn has_group(&self) -> bool {
        let Some(group) = self.group else { return false };
        test_kill_process_group(group) != Err(rustix::io::Errno::SRCH)
            && Process::all().any(|process| process.is_in(group) && process.is_living())
    }

    /// Also while an environment cannot be read: that may be of one who is left.
    pub(crate) fn is_left(&self) -> bool {
        self.has_group() || !self.members(|_| true).is_empty() || self.environments.hangs()
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
        self.environments.begin();
        let mut all: Vec<Process> = Process::all().collect();
        let tree = self.tree.map_or_else(HashSet::new, |tree| tree.members(&all));
        // While a read hangs there are no marks to be seen, but what is in the group or descends from the runner is found.
        let environment = |process: &Process| self.environments.read(&process.environment());
        let may_carry = |process: &Process| !self.first.is_some_and(|first| process.is_older_than(&first));
        let is_marked = |process: &Process| {
            let mark = self.mark.as_ref().filter(|_| may_carry(process));
            mark.is_some_and(|mark| environment(process).is_some_and(|read| mark.is_in(&read)))
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

    /// A process that carries a mark, until it is dropped.
    struct Marked(std::process::Child, Mark);

    impl Marked {
        fn start() -> Self {
            let mark = Mark::new();
            let child = std::process::Command::new("sleep").arg("1000").env(mark.variable(), "1").spawn().unwrap();
            Self(child, mark)
        }

        fn process(&self) -> Process {
            Process::look(Pid::from_child(&self.0)).unwrap()
        }
    }

    impl Drop for Marked {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// On a busy machine a read may be late, which counts as one who is left.
    fn soon(is_so: impl Fn() -> bool) -> bool {
        let end = Moment::now() + std::time::Duration::from_secs(10);
        std::iter::repeat_with(is_so).take_while(|_| !end.has_passed()).any(|is_so| is_so)
    }

    #[test]
    fn who_was_there_before_the_run_was_read_too() {
        let before = Marked::start();
        // A tick of the system's clock.
        std::thread::sleep(std::time::Duration::from_millis(30));
        let first = Marked::start();
        let of = |mark: &Mark| Family { mark: Some(mark.clone()), first: Some(first.process()), ..Family::default() };
        // It was started when its new memory was there; what the kernel copies into that, the environment too, may come later.
        assert!(soon(|| of(&first.1).is_left()));
        let of_before = of(&before.1);
        assert!(soon(|| !of_before.is_left()));
        assert!(soon(|| Family { first: None, ..of(&before.1) }.is_left()));
    }

    #[test]
    fn while_an_environment_could_not_be_read_everybody_was_taken_for_gone() {
        let family = Family { mark: Some(Mark::new()), first: Process::look(getpid()), ..Family::default() };
        // Nobody writes to it, and so opening it hangs.
        let fifo = std::env::temp_dir().join(format!("redlock-family-{}", std::process::id()));
        assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        assert!(soon(|| !family.is_left()));
        assert_eq!(family.environments.read(&fifo), None);
        assert!(family.is_left() && family.is_left());
        std::fs::write(&fifo, "").unwrap();
        std::fs::remove_file(&fifo).unwrap();
        assert!(soon(|| !family.is_left()), "it hangs no longer");
    }

    #[test]
    fn a_process_is_found_in_its_group() {
        let group = rustix::process::getpgrp();
        assert!(Family { group: Some(group), ..Family::default() }.has_group());
        assert!(!Family { group: Pid::from_raw(i32::MAX), ..Family::default() }.has_group());
    }
}
