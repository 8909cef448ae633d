//! Signals that the runner receives.

use std::future::poll_fn;
use std::task::{Context, Poll};

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
    forwarded: Received,
    child: tokio::signal::unix::Signal,
    terminal: Vec<tokio::signal::unix::Signal>,
}

impl Signals {
    pub(crate) fn new() -> std::io::Result<Self> {
        let terminal =
            [Signal::TTIN, Signal::TTOU].map(|kind| signal(SignalKind::from_raw(kind.as_raw())));
        Ok(Self {
            forwarded: receive(&FORWARDED)?,
            child: signal(SignalKind::child())?,
            terminal: terminal.into_iter().collect::<std::io::Result<_>>()?,
        })
    }

    pub(crate) async fn next(&mut self) -> Event {
        poll_fn(|context| {
            if let Some(signal) = poll(&mut self.forwarded, context) {
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

/// The signals that end a command without processes of its own.
pub(crate) struct StopSignals(Received);

impl StopSignals {
    pub(crate) fn new() -> std::io::Result<Self> {
        let stop = |(_, signal): &&_| matches!(*signal, Signal::INT | Signal::TERM | Signal::HUP);
        let kinds: Vec<_> = FORWARDED.iter().filter(stop).copied().collect();
        receive(&kinds).map(Self)
    }

    pub(crate) async fn next(&mut self) -> Signal {
        poll_fn(|context| match poll(&mut self.0, context) {
            Some(signal) => Poll::Ready(signal),
            None => Poll::Pending,
        })
        .await
    }
}

type Received = Vec<(tokio::signal::unix::Signal, Signal)>;

fn receive(kinds: &[(SignalKind, Signal)]) -> std::io::Result<Received> {
    let ignored = ignored();
    let heard = kinds.iter().filter(|(_, signal)| ignored >> (signal.as_raw() - 1) & 1 == 0);
    heard.map(|&(kind, asked)| Ok((signal(kind)?, asked))).collect()
}

/// A signal that has come. Otherwise each signal wakes the task.
fn poll(received: &mut Received, context: &mut Context<'_>) -> Option<Signal> {
    received.iter_mut().find_map(|(s, signal)| s.poll_recv(context).is_ready().then_some(*signal))
}

/// Bits of the signals that this process was started to ignore, for example by `nohup`. redlock
/// does not handle these signals, so the command inherits that they are ignored.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}
