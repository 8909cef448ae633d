//! The victim: somebody who uses the service modestly, at fixed times whatever became of what was due before. A latency
//! counts from when its request was due, so that a service that stands still is not measured once but as often as it was
//! wanted. Every request that was due within the window is counted, also those that could not even be sent.
//!
//! Eight connections acquire and release new names, every second time ready to wait a second; eight others extend
//! twelve locks each, which last three times as long as an extension is away. All of them come back with a new connection
//! now and then.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::time::{sleep_until, timeout_at};

use super::attacks::line;
use super::requests::{Parts, request};
use crate::histogram::Histogram;
use crate::http::Connection;
use crate::worker_pool::{Phase, WorkerPool};

/// Connections that acquire, and as many that extend.
const EACH: u32 = 8;
/// Between two requests that are due at one connection: 100 a second on all of a kind.
const EVERY: Duration = Duration::from_millis(80);
const HELD_EACH: u32 = 12;
const TTL_MS: u32 = 3000;
/// A request that is not answered so long after it was due has failed.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// Requests on one connection.
const CONNECTION_LASTS: u32 = 10;
/// In a line: between two locks of one connection, and how long each is held.
const LINE_EVERY: Duration = Duration::from_millis(400);
const LINE_HOLD: Duration = Duration::from_millis(60);

/// Who it is and where.
#[derive(Debug, Clone)]
pub(super) struct Victim {
    pub(super) gateway: SocketAddr,
    pub(super) source: IpAddr,
    /// Empty where there are no keys.
    pub(super) key: &'static str,
    /// Whether two of its connections compete for each of a few locks, instead of taking new names.
    pub(super) is_at_lines: bool,
    pub(super) window: Arc<Window>,
}

/// What is due within counts.
#[derive(Debug)]
pub(super) struct Window {
    length: Duration,
    begin: OnceLock<Instant>,
}

impl Window {
    pub(super) fn new(length: Duration) -> Arc<Self> {
        Arc::new(Self { length, begin: OnceLock::new() })
    }

    pub(super) fn begin(&self) {
        self.begin.get_or_init(Instant::now);
    }

    fn has(&self, due: Instant) -> bool {
        self.begin.get().is_some_and(|begin| (*begin..*begin + self.length).contains(&due))
    }

    fn is_over_at(&self, due: Instant) -> bool {
        self.begin.get().is_some_and(|begin| due >= *begin + self.length)
    }
}

/// What became of it.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) acquires: Served,
    pub(super) extensions: Served,
    /// Locks that somebody else had, or whose time ran out, before an extension was answered.
    pub(super) lost: u64,
    /// What came instead of success.
    pub(super) otherwise: BTreeMap<String, u64>,
}

#[derive(Debug, Clone)]
pub(super) struct Served {
    pub(super) due: u64,
    /// Of those that succeeded.
    pub(super) latency: Histogram,
}

impl Served {
    fn new() -> Self {
        Self { due: 0, latency: Histogram::new() }
    }

    fn add(&mut self, other: &Self) {
        self.due += other.due;
        self.latency.add(&other.latency);
    }

    pub(super) fn share(&self) -> f64 {
        self.latency.total() as f64 / self.due.max(1) as f64
    }
}

impl Seen {
    fn new() -> Self {
        Self { acquires: Served::new(), extensions: Served::new(), lost: 0, otherwise: BTreeMap::new() }
    }

    pub(super) fn sum(all: impl IntoIterator<Item = Self>) -> Self {
        all.into_iter().fold(Self::new(), |mut sum, one| {
            sum.acquires.add(&one.acquires);
            sum.extensions.add(&one.extensions);
            sum.lost += one.lost;
            for (what, count) in one.otherwise {
                *sum.otherwise.entry(what).or_default() += count;
            }
            sum
        })
    }
}

impl Victim {
    /// On a thread of its own. Ends when the window does.
    pub(super) fn start(self) -> Result<WorkerPool<Seen>, String> {
        WorkerPool::start(2 * EACH, 1, move |number, phase| {
            let client =
                Client { victim: self.clone(), connection: None, asked: number, counts: false, seen: Seen::new() };
            async move {
                Ok(match number {
                    ..EACH if client.victim.is_at_lines => client.stand_in_line(number, phase).await,
                    ..EACH => client.acquire_new_names(number, phase).await,
                    _ => client.keep_locks(number - EACH, phase).await,
                })
            }
        })
    }
}

struct Client {
    victim: Victim,
    connection: Option<Connection>,
    asked: u32,
    /// Whether what it does just now is within the window.
    counts: bool,
    seen: Seen,
}

struct Answered {
    status: u16,
    token: String,
    /// Until when the lock is held for certain.
    until: Instant,
}

struct Held {
    path: String,
    token: String,
    until: Instant,
}

impl Client {
    /// When each of its turns is due, and whether there is one.
    async fn turn(&mut self, due: Instant, phase: &Phase) -> bool {
        if phase.stops() || self.victim.window.is_over_at(due) {
            return false;
        }
        sleep_until(due.into()).await;
        self.counts = self.victim.window.has(due);
        !self.victim.window.is_over_at(due)
    }

    async fn acquire_new_names(mut self, number: u32, phase: Phase) -> Seen {
        let first = Instant::now() + EVERY * number / EACH;
        for turn in 0.. {
            let due = first + EVERY * turn;
            if !self.turn(due, &phase).await {
                break;
            }
            if let Some(held) = self.acquire(new_path(), if turn % 2 == 0 { 0 } else { 1000 }, due, self.counts).await {
                self.release(held).await;
            }
        }
        self.seen
    }

    /// Two of them compete for a lock: one takes it, the other one comes while it is held.
    async fn stand_in_line(mut self, number: u32, phase: Phase) -> Seen {
        let first = Instant::now() + LINE_EVERY * (number / 2) / (EACH / 2) + LINE_HOLD / 2 * (number % 2);
        for turn in 0.. {
            let due = first + LINE_EVERY * turn;
            if !self.turn(due, &phase).await {
                break;
            }
            if let Some(held) = self.acquire(line(number / 2), 1500, due, self.counts).await {
                tokio::time::sleep(LINE_HOLD).await;
                self.release(held).await;
            }
        }
        self.seen
    }

    async fn keep_locks(mut self, number: u32, phase: Phase) -> Seen {
        let first = Instant::now() + EVERY * number / EACH;
        let mut locks = Vec::new();
        locks.resize_with(HELD_EACH as usize, || None);
        for place in &mut locks {
            *place = self.acquire(new_path(), 0, Instant::now(), false).await;
            if place.is_none() {
                break;
            }
        }
        for turn in 0u32.. {
            let due = first + EVERY * turn;
            if !self.turn(due, &phase).await {
                break;
            }
            let place = &mut locks[(turn % HELD_EACH) as usize];
            self.seen.extensions.due += u64::from(self.counts);
            *place = match place.take() {
                Some(held) => self.extend(held, due).await,
                // Not one that was due has succeeded, whatever comes of this.
                None => {
                    self.note("has no lock to extend");
                    self.acquire(new_path(), 0, due, false).await
                }
            };
        }
        self.seen.lost += locks.iter().flatten().filter(|held| held.until <= Instant::now()).count() as u64;
        // They expire.
        self.seen
    }

    async fn acquire(&mut self, path: String, wait_ms: u32, due: Instant, counts: bool) -> Option<Held> {
        let body = format!(r#"{{"ttl_ms":{TTL_MS},"wait_ms":{wait_ms}}}"#);
        self.seen.acquires.due += u64::from(counts);
        let answer = self.ask("POST", &path, "", &body, due).await?;
        if answer.status != 201 {
            return None;
        }
        if counts {
            self.seen.acquires.latency.record(due.elapsed());
        }
        Some(Held { path, token: answer.token, until: answer.until })
    }

    /// `None` when it is lost.
    async fn extend(&mut self, mut held: Held, due: Instant) -> Option<Held> {
        let body = format!(r#"{{"ttl_ms":{TTL_MS}}}"#);
        let answer = self.ask("PATCH", &held.path, &held.token, &body, due).await;
        match answer {
            Some(Answered { status: 200, until, token }) => {
                if self.counts {
                    self.seen.extensions.latency.record(due.elapsed());
                }
                // One that came too late is good, and until it came nobody could know.
                self.seen.lost += u64::from(held.until <= Instant::now());
                (held.until, held.token) = (until, token);
                return Some(held);
            }
            Some(Answered { status: 404 | 409, .. }) => {}
            _ if held.until > Instant::now() => return Some(held),
            _ => {}
        }
        self.seen.lost += 1;
        None
    }

    async fn release(&mut self, held: Held) {
        self.ask("DELETE", &held.path, &held.token, "", Instant::now()).await;
    }

    /// `None` when there was no answer in time.
    async fn ask(&mut self, method: &str, path: &str, token: &str, body: &str, due: Instant) -> Option<Answered> {
        let (deadline, sent) = (due + PATIENCE, Instant::now());
        if sent >= deadline {
            self.note(&format!("{method}: not sent in time"));
            return None;
        }
        self.asked += 1;
        let connection = self.connection.take().filter(|_| !self.asked.is_multiple_of(CONNECTION_LASTS));
        let Victim { gateway, source, key, .. } = self.victim;
        let exchange = async {
            let mut connection = match connection {
                Some(connection) => connection,
                None => Connection::open_from((source, 0).into(), gateway).await?,
            };
            let answer = connection.exchange(&request(method, path, Parts { key, token, body })).await?;
            let told: serde_json::Value = serde_json::from_slice(answer.body).unwrap_or_default();
            let validity = Duration::from_millis(told["validity_ms"].as_u64().unwrap_or(0));
            let lock_token = answer.lock_token.map_or(token.into(), String::from_utf8_lossy).into_owned();
            if answer.status >= 300 {
                self.note(&format!("{method}: {} {}", answer.status, told["code"].as_str().unwrap_or_default()));
            }
            let answered = Answered { status: answer.status, token: lock_token, until: sent + validity };
            self.connection = Some(connection);
            Ok::<_, String>(answered)
        };
        match timeout_at(deadline.into(), exchange).await {
            Ok(Ok(answered)) => Some(answered),
            Ok(Err(_)) => {
                self.note(&format!("{method}: connection closed or not to be had"));
                None
            }
            Err(_) => {
                self.note(&format!("{method}: no answer within {} s", PATIENCE.as_secs()));
                None
            }
        }
    }

    fn note(&mut self, what: &str) {
        if self.counts {
            *self.seen.otherwise.entry(what.to_owned()).or_default() += 1;
        }
    }
}

fn new_path() -> String {
    format!("/locks/victim-{:016x}", rand::random::<u64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_due_within_the_window_counts_and_nothing_else() {
        let (window, before) = (Window::new(Duration::from_secs(1)), Instant::now());
        assert!(!window.has(before) && !window.is_over_at(before + Duration::from_secs(9)));
        window.begin();
        let within = Instant::now() + Duration::from_millis(500);
        assert!(!window.has(before) && window.has(within) && !window.is_over_at(within));
        assert!(window.is_over_at(within + Duration::from_secs(1)));
    }

    #[tokio::test]
    async fn everything_due_fails_where_nobody_answers() {
        let gateway = crate::servers::free_address().unwrap();
        let window = Window::new(Duration::from_millis(400));
        let victim = Victim { gateway, source: gateway.ip(), key: "", is_at_lines: false, window: window.clone() };
        window.begin();
        let seen = Seen::sum(victim.start().unwrap().finish(PATIENCE * 2).await.unwrap());
        assert!((35..=40).contains(&seen.acquires.due) && (35..=40).contains(&seen.extensions.due), "{seen:?}");
        assert_eq!((seen.acquires.share(), seen.extensions.share(), seen.lost), (0.0, 0.0, 0));
    }
}
