//! Signals that the runner receives.

use std::future::poll_fn;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

/// Signals that are passed on to the command.
const FORWARDED: [(SignalKind, Signal); 6] = [
    (SignalKind::interrupt(), Signal::INT),
    (SignalKind::terminate(), Signal::TERM),
    (SignalKind::hangup(), Signal::HUP),
    (SignalKind::quit(), Signal::QUIT),
    (SignalKind::user_defined1(), Signal::USR1),
    (SignalKind::user_defined2(), Signal::USR2),
];

/// A signal that this process has received.
pub(crate) enum Event {
    /// A signal that a user or a program has sent, to be passed on to the command.
    Asked(Signal),
    /// The kernel reports that a child has ended or stopped.
    ChildChanged,
    /// The kernel reports that a process in our process group has tried to use the terminal while
    /// another group has it.
    TerminalWanted,
}

/// Receives the signals of this process.
pub(crate) struct Signals {
    forwarded: Vec<(tokio::signal::unix::Signal, Signal)>,
    child: tokio::signal::unix::Signal,
    terminal: Vec<tokio::signal::unix::Signal>,
}

impl Signals {
    pub(crate) fn new() -> std::io::Result<Self> {
        let ignored = ignored();
        let heard = FORWARDED
            .into_iter()
            .filter(|(_, passed_on)| ignored >> (passed_on.as_raw() - 1) & 1 == 0);
        let forwarded = heard.map(|(kind, passed_on)| Ok((signal(kind)?, passed_on)));
        let terminal =
            [Signal::TTIN, Signal::TTOU].map(|kind| signal(SignalKind::from_raw(kind.as_raw())));
        Ok(Self {
            forwarded: forwarded.collect::<std::io::Result<_>>()?,
            child: signal(SignalKind::child())?,
            terminal: terminal.into_iter().collect::<std::io::Result<_>>()?,
        })
    }

    pub(crate) async fn next(&mut self) -> Event {
        poll_fn(|context| {
            let asked = self
                .forwarded
                .iter_mut()
                .find_map(|(s, signal)| s.poll_recv(context).is_ready().then_some(*signal));
            if let Some(signal) = asked {
                return Poll::Ready(Event::Asked(signal));
            }
            // Both signals are polled, so that both can wake this task.
            let wanted = self
                .terminal
                .iter_mut()
                .filter_map(|signal| signal.poll_recv(context).is_ready().then_some(()))
                .count();
            if wanted > 0 {
                return Poll::Ready(Event::TerminalWanted);
            }
            self.child.poll_recv(context).map(|_| Event::ChildChanged)
        })
        .await
    }

    pub(crate) async fn asked(&mut self) -> Signal {
        loop {
            if let Event::Asked(signal) = self.next().await {
                return signal;
            }
        }
    }
}

/// Bits of the signals that this process was started to ignore, for example by `nohup`. redlock
/// does not handle these signals, so the command inherits that they are ignored.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
