//! A process that kills a command and what it has started when its runner cannot: the runner is killed, stopped, or has no time.
//!
//! It is told by its standard input which they are, and until when. It kills them (KILL) when that moment has come, and when the
//! input ends without `done`: then the runner is gone. So there are two that would have to fail at once.

use std::io;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use redlock_client::clock::Moment;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getpid};

use crate::family::{Family, Mark, Tree};
use crate::processes::Process;

/// What it is told, a line each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Order {
    /// Whatever carries this will be the command's.
    Mark(Mark),
    /// What descends from this process, its parent, will be the command's, but for the guardian.
    Runner(Pid),
    /// This process group is the command's.
    Group(i32),
    /// It has to be gone by then.
    Until(Moment),
    /// It may stay.
    Done,
}

/// Timers stand still while the machine sleeps.
const PIECE: Duration = Duration::from_millis(250);
/// Between two looks at what was killed.
const SHORT: Duration = Duration::from_millis(5);
const LONG: Duration = Duration::from_secs(10);

impl std::fmt::Display for Order {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Mark(mark) => writeln!(f, "mark {}", mark.variable()),
            Self::Runner(runner) => writeln!(f, "runner {}", runner.as_raw_nonzero()),
            Self::Group(group) => writeln!(f, "group {group}"),
            Self::Until(moment) => writeln!(f, "until {}", moment.since_boot().as_micros()),
            Self::Done => writeln!(f, "done"),
        }
    }
}

impl FromStr for Order {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let number = |text: &str| text.parse::<u64>().map_err(|_| ());
        match line.split_once(' ') {
            Some(("mark", text)) => Mark::read(text).map(Self::Mark).ok_or(()),
            Some(("runner", pid)) => {
                pid.parse().ok().filter(|pid| *pid > 0).and_then(Pid::from_raw).map(Self::Runner).ok_or(())
            }
            // Group 0 would be its own, and 1 everybody.
            Some(("group", group)) => group.parse().ok().filter(|group| *group > 1).map(Self::Group).ok_or(()),
            Some(("until", micros)) => Ok(Self::Until(Moment::after_boot(Duration::from_micros(number(micros)?)))),
            None if line == "done" => Ok(Self::Done),
            _ => Err(()),
        }
    }
}

pub(crate) fn main() -> ExitCode {
    // Also what the kernel sends when a group of stopped processes has lost its parent.
    if nix::sys::signal::SigSet::all().thread_block().is_err() {
        return ExitCode::FAILURE;
    }
    let (mut until, mut text) = (None::<Moment>, Vec::new());
    let mut family = Family { first: Process::look(getpid()), ..Family::default() };
    loop {
        let left = until.map_or(PIECE, |until| until.left().min(PIECE));
        match orders(left, &mut text) {
            Ok(true) => {}
            Ok(false) | Err(_) => {
                // What is being started just now has its turn too; what may not be signalled is there for ever.
                let (end, mut seen_gone) = (Moment::now() + LONG, 0);
                // Twice: a process that is just becoming another program shows no mark.
                while seen_gone < 2 && !end.has_passed() {
                    family.signal_all(Signal::KILL);
                    std::thread::sleep(SHORT);
                    seen_gone = if family.is_left() { 0 } else { seen_gone + 1 };
                }
                return ExitCode::SUCCESS;
            }
        }
        while let Some(end) = text.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            match String::from_utf8_lossy(&line).trim().parse() {
                Ok(Order::Mark(mark)) => family.mark = Some(mark),
                Ok(Order::Runner(runner)) => family.tree = Some(Tree { runner, guardian: getpid() }),
                Ok(Order::Group(group)) => family.group = Pid::from_raw(group),
                Ok(Order::Until(moment)) => until = Some(moment),
                Ok(Order::Done) => return ExitCode::SUCCESS,
                Err(()) => {}
            }
        }
        if until.is_some_and(Moment::has_passed) {
            // Again and again until the runner is gone: what was being started at that moment has its turn too.
            family.signal_all(Signal::KILL);
        }
    }
}

/// Reads what there is, for so long at most. False at the end.
fn orders(wait: Duration, text: &mut Vec<u8>) -> io::Result<bool> {
    let stdin = io::stdin();
    let mut polled = [PollFd::new(&stdin, PollFlags::IN)];
    let wait = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: i64::from(wait.subsec_nanos()).max(5_000_000) };
    match poll(&mut polled, Some(&wait)) {
        Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(true),
        Ok(_) => {}
        Err(error) => return Err(error.into()),
    }
    let mut buffer = [0; 256];
    // Not by the library's reader: what it keeps for later is not seen by poll.
    let read = rustix::io::read(&stdin, &mut buffer)?;
    text.extend_from_slice(&buffer[..read]);
    Ok(read > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_as_they_were_written_and_no_group_is_everybody() {
        for order in [
            Order::Mark(Mark::new()),
            Order::Runner(getpid()),
            Order::Group(4711),
            Order::Until(Moment::after_boot(Duration::from_micros(123_456_789))),
            Order::Done,
        ] {
            assert_eq!(order.to_string().trim().parse(), Ok(order));
        }
        for wrong in [
            "mark PATH",
            "runner 0",
            "runner -1",
            "group 0",
            "group 1",
            "group -1",
            "group",
            "until",
            "until -1",
            "doner",
            "",
        ] {
            assert_eq!(wrong.parse::<Order>(), Err(()), "{wrong}");
        }
    }
}
