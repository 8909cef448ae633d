//! Hands the terminal between redlock and its command.

use std::fs::File;
use std::io::IsTerminal;

use nix::sys::signal::{SIGTTOU, SigSet};
use rustix::fs::{FileType, fstat};
use rustix::process::{Pid, Signal, getpgrp, kill_process_group};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

/// Gives the terminal to the command while it runs, if it was ours. So an interrupt reaches the
/// command, and it may read. In a pipeline the terminal goes to the process that asks for it: the
/// kernel stops a process that uses it without the right.
pub(crate) struct Terminal {
    /// `None` without a terminal.
    terminal: Option<File>,
    ours: Pid,
    commands: Pid,
}

impl Terminal {
    pub(crate) fn of(command: Pid) -> Self {
        // Opened even if standard input is something else: a program that asks for a password reads
        // from here.
        let terminal = File::options().read(true).write(true).open("/dev/tty").ok();
        let terminal = Self { terminal, ours: getpgrp(), commands: command };
        // In a pipeline the next process may want the terminal.
        let is_piped = fstat(std::io::stdout())
            .is_ok_and(|out| FileType::from_raw_mode(out.st_mode) == FileType::Fifo);
        if std::io::stdin().is_terminal() && !is_piped {
            terminal.pass(terminal.ours, command);
        }
        terminal
    }

    /// Gives the terminal to a command that was stopped for it, and continues the command. Returns
    /// whether it has the terminal.
    pub(crate) fn give(&self) -> bool {
        let is_given = self.belongs_to(self.commands) || self.pass(self.ours, self.commands);
        if is_given {
            let _ = kill_process_group(self.commands, Signal::CONT);
        }
        is_given
    }

    /// Gives the terminal to a process of our pipeline that was stopped for it, and continues the
    /// process.
    pub(crate) fn take_back(&self) {
        if self.pass(self.commands, self.ours) {
            let _ = kill_process_group(self.ours, Signal::CONT);
        }
    }

    fn belongs_to(&self, group: Pid) -> bool {
        self.terminal
            .as_ref()
            .is_some_and(|terminal| tcgetpgrp(terminal).is_ok_and(|owner| owner == group))
    }

    fn pass(&self, from: Pid, to: Pid) -> bool {
        let Some(terminal) = self.terminal.as_ref().filter(|_| self.belongs_to(from)) else {
            return false;
        };
        // The kernel stops a background process for this call, unless it blocks the signal.
        let blocked = SigSet::from(SIGTTOU);
        let is_passed = blocked.thread_block().is_ok() && tcsetpgrp(terminal, to).is_ok();
        let _ = blocked.thread_unblock();
        is_passed
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.pass(self.commands, self.ours);
    }
}
