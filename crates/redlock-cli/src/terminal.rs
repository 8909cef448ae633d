//! Whose the terminal is.

use std::fs::File;
use std::io::IsTerminal;

use nix::sys::signal::{SIGTTOU, SigSet};
use rustix::fs::{FileType, fstat};
use rustix::process::{Pid, Signal, getpgrp, kill_process_group};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

/// The terminal belongs to the command while it runs, where it was ours: so an interrupt goes to it, and it may read. In a
/// pipeline it goes to whoever asks for it: the kernel stops those who do without the right to.
pub(crate) struct Terminal {
    /// None where there is none.
    terminal: Option<File>,
    ours: Pid,
    commands: Pid,
}

impl Terminal {
    pub(crate) fn of(command: Pid) -> Self {
        // Also where standard input is something else: who asks for a password reads it from here.
        let terminal = File::options().read(true).write(true).open("/dev/tty").ok();
        let terminal = Self { terminal, ours: getpgrp(), commands: command };
        // In a pipeline whoever comes next may want it.
        let is_piped = fstat(std::io::stdout())
            .is_ok_and(|out| FileType::from_raw_mode(out.st_mode) == FileType::Fifo);
        if std::io::stdin().is_terminal() && !is_piped {
            terminal.pass(terminal.ours, command);
        }
        terminal
    }

    /// The command was stopped for want of it. Whether it has it, and goes on.
    pub(crate) fn give(&self) -> bool {
        let is_given = self.belongs_to(self.commands) || self.pass(self.ours, self.commands);
        if is_given {
            let _ = kill_process_group(self.commands, Signal::CONT);
        }
        is_given
    }

    /// Somebody in our pipeline was stopped for want of it, and goes on with it.
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
        // Who is not in the foreground is stopped for this, unless it has blocked the signal.
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
