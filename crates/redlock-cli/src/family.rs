//! All that has come of a command: its process group, and whatever has left that (`timeout`, setsid, a daemon) and still carries
//! the mark that the command was given in its environment. Out of reach is what has wiped its environment, or runs as another
//! user.

use std::path::Path;

use redlock_client::clock::Moment;
use rustix::process::{
    Pid, Signal, getpgid, getpid, kill_process, kill_process_group, test_kill_process, test_kill_process_group,
};

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

    /// The processes that were started with it.
    fn carriers(&self) -> impl Iterator<Item = Pid> + '_ {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        processes.filter(|entry| self.is_in(&entry.path())).filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw)?;
            // What was there a moment ago and may not be signalled is nothing that can be stopped.
            (pid != getpid() && test_kill_process(pid).is_ok()).then_some(pid)
        })
    }

    fn is_in(&self, process: &Path) -> bool {
        let Ok(environment) = std::fs::read(process.join("environ")) else { return false };
        let names = environment.split(|byte| *byte == 0).map(|pair| pair.split(|byte| *byte == b'=').next());
        names.flatten().any(|name| name == self.0.as_bytes())
    }
}

/// A command and what it has started.
#[derive(Debug)]
pub(crate) struct Family {
    pub(crate) group: Option<Pid>,
    pub(crate) mark: Option<Mark>,
}

impl Family {
    /// Each process once. Those that are started meanwhile are for the next time.
    pub(crate) fn signal(&self, signal: Signal) {
        // It may have ended.
        let _ = self.group.map(|group| kill_process_group(group, signal));
        for pid in self.mark.iter().flat_map(Mark::carriers) {
            if self.group.is_none() || getpgid(Some(pid)).ok() != self.group {
                let _ = kill_process(pid, signal);
            }
        }
    }

    /// What may not be signalled is there all the same.
    pub(crate) fn has_group(&self) -> bool {
        self.group.is_some_and(|group| test_kill_process_group(group) != Err(rustix::io::Errno::SRCH))
    }

    pub(crate) fn is_left(&self) -> bool {
        self.has_group() || self.mark.iter().flat_map(Mark::carriers).next().is_some()
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
}
