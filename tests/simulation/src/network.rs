//! Connections between gateways and masters, and the fate of messages on them.
//!
//! A connection leads to one process of a master and keeps its messages in order. Each message
//! takes its own time. After a connection has broken, no answer arrives on it. But the first few
//! messages that were under way still reach the master, at once or much later. In reality these are
//! bytes that a socket has handed to the system. Hints have connections of their own, and any hint
//! may be lost. While a path is dark, its messages wait, as under TCP. Every delay is at least a
//! millisecond, so an effect never coincides with its cause.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use redlock_core::node::Hint;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use crate::chance::{Chance, Stream};

/// How long a message takes one way: `base` to `base + jitter`. Some messages take up to `spike`
/// longer.
#[derive(Debug, Clone, Copy)]
pub struct Latency {
    /// Minimum in milliseconds; not 0.
    pub base_ms: u64,
    /// Jitter in milliseconds, added to the minimum.
    pub jitter_ms: u64,
    /// Percentage of messages with a spike.
    pub spike_percent: u64,
    /// Maximum length of a spike in milliseconds.
    pub spike_ms: u64,
}

impl Latency {
    fn draw(&self, chance: &mut Chance) -> Duration {
        let mut millis = chance.between(self.base_ms, self.base_ms + self.jitter_ms);
        if chance.percent(self.spike_percent) {
            millis += chance.below(self.spike_ms + 1);
        }
        Duration::from_millis(millis.max(1))
    }
}

/// The paths between all gateways and masters, with their delays and losses.
pub struct Network {
    latency: Latency,
    chance: Mutex<Chance>,
    hints: Mutex<Chance>,
    hint_loss_percent: u64,
    next_id: AtomicU64,
    /// By gateway and master: messages to the master wait until the first time, and messages from
    /// it until the second.
    dark: Mutex<Vec<(u8, u8, Instant, Instant)>>,
}

impl Network {
    /// A network whose paths have no faults yet.
    pub fn new(seed: u64, latency: Latency, hint_loss_percent: u64) -> Self {
        let chance = |stream| Mutex::new(Chance::new(seed, stream));
        Self {
            latency,
            chance: chance(Stream::Network),
            hints: chance(Stream::Hints),
            hint_loss_percent,
            next_id: AtomicU64::new(0),
            dark: Mutex::new(Vec::new()),
        }
    }

    /// Delays the messages of one path: those to the master until `there`, those from it until
    /// `back`.
    pub fn darken(&self, gateway: u8, master: u8, there: Instant, back: Instant) {
        let now = Instant::now();
        let mut dark = lock(&self.dark);
        dark.retain(|(_, _, there, back)| *there > now || *back > now);
        dark.push((gateway, master, there, back));
    }

    /// Ends the delays of all paths.
    pub fn lighten(&self) {
        lock(&self.dark).clear();
    }

    /// Opens a connection to the process that listens when the request arrives, or returns the
    /// reason for the failure.
    pub async fn connect(
        self: &Arc<Self>,
        (gateway, master): (u8, u8),
        listening: impl Fn() -> Option<u64>,
    ) -> Result<Arc<Connection>, String> {
        tokio::time::sleep_until(self.arrival(gateway, master, true, &self.chance)).await;
        let run = listening();
        tokio::time::sleep_until(self.arrival(gateway, master, false, &self.chance)).await;
        let run = run.ok_or_else(|| "connection refused".to_owned())?;
        if listening() != Some(run) {
            return Err("connection reset".into());
        }
        Ok(Arc::new(Connection {
            id: self.next_id.fetch_add(1, Ordering::Relaxed),
            gateway,
            run,
            master,
            network: self.clone(),
            link: Mutex::new(Link::new()),
            closed: Notify::new(),
        }))
    }

    fn arrival(&self, gateway: u8, master: u8, there: bool, chance: &Mutex<Chance>) -> Instant {
        let delay = self.latency.draw(&mut lock(chance));
        let now = Instant::now();
        let dark = lock(&self.dark);
        let until = dark.iter().filter(|path| (path.0, path.1) == (gateway, master));
        let until = until.map(|path| if there { path.2 } else { path.3 }).max();
        until.map_or(now, |until| until.max(now)) + delay
    }
}

/// One connection to one process of a master.
pub struct Connection {
    pub id: u64,
    pub gateway: u8,
    /// The process of the master that the connection leads to.
    pub run: u64,
    master: u8,
    network: Arc<Network>,
    link: Mutex<Link>,
    closed: Notify,
}

struct Link {
    sent: u64,
    arrived: u64,
    last_arrival: Instant,
    last_answer: Instant,
    ended: Option<Ended>,
}

struct Ended {
    why: String,
    /// The messages sent first reach the master in spite of the break, and all others are lost.
    /// This is the number of those that reach it, counted from the start of the connection.
    survive: u64,
    /// The earliest arrival of the first message that was still under way at the break. The next
    /// messages arrive one millisecond apart.
    not_before: Instant,
    /// The number of messages that had arrived before the break.
    arrived: u64,
}

impl Link {
    fn new() -> Self {
        let now = Instant::now();
        Self { sent: 0, arrived: 0, last_arrival: now, last_answer: now, ended: None }
    }
}

const TICK: Duration = Duration::from_millis(1);

impl Connection {
    /// Sends a message. `arrive` runs when the message reaches the master. After a break that may
    /// be never.
    pub fn send(self: &Arc<Self>, arrive: impl FnOnce() + Send + 'static) {
        let arrival = self.network.arrival(self.gateway, self.master, true, &self.network.chance);
        let mut link = self.link();
        if link.ended.is_some() {
            return;
        }
        let number = link.sent;
        link.sent += 1;
        link.last_arrival = arrival.max(link.last_arrival + TICK);
        let mut due = link.last_arrival;
        drop(link);
        let connection = self.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep_until(due).await;
                match connection.earliest_arrival(number) {
                    Some(at) if at > Instant::now() => due = at,
                    Some(_) => break,
                    None => return,
                }
            }
            connection.link().arrived = number + 1;
            arrive();
        });
    }

    /// Sends an answer back, unless the connection has ended.
    pub fn answer<T: Send + 'static>(self: &Arc<Self>, reply: T, to: oneshot::Sender<T>) {
        self.deliver(&self.network.chance, move || drop(to.send(reply)));
    }

    /// Sends a hint to a listener. Returns false if the hint is lost.
    pub fn publish(self: &Arc<Self>, hint: Hint, to: mpsc::UnboundedSender<Hint>) -> bool {
        if lock(&self.network.hints).percent(self.network.hint_loss_percent) {
            return false;
        }
        self.deliver(&self.network.hints, move || drop(to.send(hint)));
        true
    }

    fn deliver(self: &Arc<Self>, chance: &Mutex<Chance>, work: impl FnOnce() + Send + 'static) {
        let arrival = self.network.arrival(self.gateway, self.master, false, chance);
        let mut link = self.link();
        if link.ended.is_some() {
            return;
        }
        link.last_answer = arrival.max(link.last_answer + TICK);
        let due = link.last_answer;
        drop(link);
        let connection = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep_until(due).await;
            if !connection.has_ended() {
                work();
            }
        });
    }

    /// Breaks the connection. It also decides which of the messages under way still reach the
    /// master, and when.
    pub fn end(&self, why: &str) {
        let mut link = self.link();
        if link.ended.is_some() {
            return;
        }
        let mut chance = lock(&self.network.chance);
        let under_way = link.sent - link.arrived;
        let survive = match chance.below(4) {
            0 => link.arrived + chance.below(under_way + 1),
            _ => link.sent,
        };
        let late_ms = match chance.below(10) {
            0..=2 => 0,
            3..=5 => chance.between(1, 100),
            6..=8 => chance.between(100, 2_000),
            _ => chance.between(2_000, 6_000),
        };
        let not_before = Instant::now() + Duration::from_millis(late_ms);
        link.ended = Some(Ended { why: why.into(), survive, not_before, arrived: link.arrived });
        drop((link, chance));
        self.closed.notify_waiters();
    }

    /// Waits until the connection has ended, and returns the reason.
    pub async fn ended(&self) -> String {
        loop {
            let closed = self.closed.notified();
            if let Some(ended) = &self.link().ended {
                return ended.why.clone();
            }
            closed.await;
        }
    }

    /// Whether the connection has ended, on the gateway's or on the master's side.
    pub fn has_ended(&self) -> bool {
        self.link().ended.is_some()
    }

    /// The earliest time at which this message can arrive. `None` if it never arrives.
    fn earliest_arrival(&self, number: u64) -> Option<Instant> {
        match &self.link().ended {
            None => Some(Instant::now()),
            Some(ended) if number < ended.survive => Some(
                ended.not_before
                    + TICK * u32::try_from(number.saturating_sub(ended.arrived)).unwrap_or(0),
            ),
            Some(_) => None,
        }
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        lock(&self.link)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
