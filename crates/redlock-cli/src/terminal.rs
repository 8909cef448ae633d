//! Hands the terminal between redlock and its command.

use std::fs::File;
use std::io::IsTerminal;

use nix::sys::signal::{SIGTTOU, SigSet};
use nix::unistd::getpgrp;
use rustix::fs::{FileType, fstat};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

/// If the terminal belongs to redlock's process group, gives it to the command's group while the
/// command runs. So an interrupt from the keyboard reaches the command, and the command may read
/// the terminal. In a pipeline, the terminal goes to the process that asks for it: the kernel stops
/// a process that uses the terminal while another group has it, and redlock then hands the terminal
/// over and continues that process.
pub(crate) struct Terminal {
    /// `None` without a terminal.
    terminal: Option<File>,
    /// `None` in a PID namespace that does not contain the group's first process. The kernel then says 0, and rustix's
    /// `getpgrp` panics.
    ours: Option<Pid>,
    commands: Pid,
}

impl Terminal {
    pub(crate) fn of(command: Pid) -> Self {
        // The terminal is opened even if standard input is something else, because a program that
        // asks for a password reads from /dev/tty.
        let terminal = File::options().read(true).write(true).open("/dev/tty").ok();
        let terminal =
            Self { terminal, ours: Pid::from_raw(getpgrp().as_raw()), commands: command };
        // In a pipeline, the process that reads our output may want the terminal.
        let is_piped = fstat(std::io::stdout())
            .is_ok_and(|out| FileType::from_raw_mode(out.st_mode) == FileType::Fifo);
        if std::io::stdin().is_terminal() && !is_piped {
            terminal.pass(terminal.ours, Some(command));
        }
        terminal
    }

    /// Gives the terminal to a command that was stopped because it used the terminal, and continues
    /// the command. Returns whether the command has the terminal.
    pub(crate) fn give(&self) -> bool {
        let is_given =
            self.belongs_to(Some(self.commands)) || self.pass(self.ours, Some(self.commands));
        if is_given {
            let _ = kill_process_group(self.commands, Signal::CONT);
        }
        is_given
    }

    /// Gives the terminal to a process of our pipeline that was stopped because it used the
    /// terminal, and continues the process.
    pub(crate) fn take_back(&self) {
        if let Some(ours) = self.ours.filter(|_| self.pass(Some(self.commands), self.ours)) {
            let _ = kill_process_group(ours, Signal::CONT);
        }
    }

    fn belongs_to(&self, group: Option<Pid>) -> bool {
        self.terminal
            .as_ref()
            .is_some_and(|terminal| tcgetpgrp(terminal).is_ok_and(|owner| Some(owner) == group))
    }

    fn pass(&self, from: Option<Pid>, to: Option<Pid>) -> bool {
        let terminal = self.terminal.as_ref().filter(|_| self.belongs_to(from));
        let (Some(terminal), Some(to)) = (terminal, to) else {
            return false;
        };
        // The kernel stops a background process that makes this call, unless the process blocks
        // SIGTTOU.
        let blocked = SigSet::from(SIGTTOU);
        let is_passed = blocked.thread_block().is_ok() && tcsetpgrp(terminal, to).is_ok();
        let _ = blocked.thread_unblock();
        is_passed
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.pass(Some(self.commands), self.ours);
    }
}
