//! All that has come of a command: its process group, and whatever has left that (`timeout`, setsid, a daemon) and still carries
//! the mark that the command was given in its environment. Out of reach is what has wiped or overwritten its environment, as a
//! program does that sets its own title, what runs as another user, and what somebody else starts for it (docker, systemd-run).

use std::path::Path;

use redlock_client::clock::Moment;
use rustix::process::{
    Pid, PidfdFlags, Signal, getpgid, getpid, kill_process_group, pidfd_open, pidfd_send_signal,
    test_kill_process_group,
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

    /// A zombie has no environment.
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
    pub(crate) fn signal_group(&self, signal: Signal) {
        // It may have ended.
        let _ = self.group.map(|group| kill_process_group(group, signal));
    }

    /// Each process once. Those that are started meanwhile are for the next time.
    pub(crate) fn signal_all(&self, signal: Signal) {
        self.signal_group(signal);
        let Some(mark) = &self.mark else { return };
        for (pid, path) in processes() {
            // Held before it is looked at: its number may be another's a moment later.
            let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
            // Of what has the mark only: the kernel's own processes are in no group, which the library takes for impossible.
            let is_marked = pid != getpid() && mark.is_in(&path);
            if is_marked && (self.group.is_none() || getpgid(Some(pid)).ok() != self.group) {
                let _ = pidfd_send_signal(&process, signal);
            }
        }
    }

    /// What may not be signalled is there all the same; a zombie, which nobody may ever wait for, is not.
    pub(crate) fn has_group(&self) -> bool {
        let Some(group) = self.group else { return false };
        test_kill_process_group(group) != Err(rustix::io::Errno::SRCH)
            && processes().any(|(_, path)| is_living_in(&path, group.as_raw_nonzero().get()))
    }

    pub(crate) fn is_left(&self) -> bool {
        let carries = |mark: &Mark| processes().any(|(pid, path)| pid != getpid() && mark.is_in(&path));
        self.has_group() || self.mark.as_ref().is_some_and(carries)
    }
}

fn processes() -> impl Iterator<Item = (Pid, std::path::PathBuf)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw)?;
        Some((pid, entry.path()))
    })
}

/// Behind the name, which may hold anything: state, parent, group.
fn is_living_in(process: &Path, group: i32) -> bool {
    let stat = std::fs::read_to_string(process.join("stat")).unwrap_or_default();
    let mut fields = stat.rsplit_once(") ").map_or("", |(_, rest)| rest).split(' ');
    let (state, its_group) = (fields.next(), fields.nth(1));
    !matches!(state, None | Some("Z" | "X")) && its_group.and_then(|number| number.parse().ok()) == Some(group)
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
        assert!(Family { group: Some(group), mark: None }.has_group());
        assert!(is_living_in(Path::new("/proc/self"), group.as_raw_nonzero().get()));
        assert!(!is_living_in(Path::new("/proc/self"), 1) && !is_living_in(Path::new("/nothing"), 1));
    }
}
