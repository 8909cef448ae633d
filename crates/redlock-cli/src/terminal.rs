//! Whose the terminal is.

use std::io::IsTerminal;

use rustix::fs::{FileType, fstat};
use rustix::process::{Pid, getpgrp};
use rustix::termios::{tcgetpgrp, tcsetpgrp};

/// The terminal belongs to the command while it runs, where it was ours: so an interrupt goes to it, and it may read.
pub(crate) struct Terminal(Option<Pid>);

impl Terminal {
    pub(crate) fn hand_to(group: Pid) -> Self {
        let ours = getpgrp();
        let stdin = std::io::stdin();
        // In a pipeline whoever comes next may want it.
        let is_piped = fstat(std::io::stdout()).is_ok_and(|out| FileType::from_raw_mode(out.st_mode) == FileType::Fifo);
        let is_alone = stdin.is_terminal() && !is_piped;
        let is_ours = is_alone && tcgetpgrp(&stdin).is_ok_and(|foreground| foreground == ours);
        Self((is_ours && tcsetpgrp(&stdin, group).is_ok()).then_some(ours))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let Some(ours) = self.0 else { return };
        // Who is not in the foreground is stopped for this, unless it has blocked the signal.
        let mut blocked = nix::sys::signal::SigSet::empty();
        blocked.add(nix::sys::signal::Signal::SIGTTOU);
        if blocked.thread_block().is_ok() {
            let _ = tcsetpgrp(std::io::stdin(), ours);
        }
    }
}
