//! The gateway that everybody waits at: its process, its metrics, and the connections that are no waiters.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::future::{try_join, try_join_all};
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::contenders::{Running, start_gateway};
use crate::histogram::Histogram;
use crate::http::{Connection, write_acquire, write_release};
use crate::metrics::metric;
use crate::servers::{Masters, Scratch};

/// Longer than any part of a run, and the most that a gateway grants by default.
const HOLDERS_BODY: &str = r#"{"ttl_ms":300000}"#;
const PROBE_BODY: &str = r#"{"ttl_ms":30000}"#;
/// Between two looks at the metrics: how exactly the time of a change is known.
const LOOK_EVERY: Duration = Duration::from_millis(20);
const PROBE_EVERY: Duration = Duration::from_millis(10);
/// Connections that the holders share.
const HANDS: usize = 8;

pub(super) struct Gateway {
    running: Running,
    /// Opened once all limits on connections are still far away.
    control: Connection,
    probe: Connection,
}

impl Gateway {
    /// Must be called on the main thread.
    pub(super) async fn start(
        program: &Path,
        masters: &Masters,
        args: &[String],
        scratch: &Scratch,
    ) -> Result<Self, String> {
        let running = start_gateway("redlock-gateway", program, masters, args, scratch).await?;
        let (control, probe) = try_join(Connection::open(running.address), Connection::open(running.address)).await?;
        Ok(Self { running, control, probe })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.running.address
    }

    pub(super) fn memory_bytes(&self) -> Result<u64, String> {
        self.running.process.memory_bytes()
    }

    pub(super) fn log_tail(&self) -> String {
        self.running.process.log_tail()
    }

    /// Waits until the metric has that value.
    pub(super) async fn until_metric(&mut self, name: &str, expected: u64, within: Duration) -> Result<(), String> {
        let began = Instant::now();
        loop {
            let answer = self.control.get("/metrics").await?;
            let value = metric(&String::from_utf8_lossy(answer.body), name);
            if value == Some(expected as f64) {
                return Ok(());
            }
            if began.elapsed() > within {
                let value = value.map_or("absent".into(), |value| value.to_string());
                return Err(format!("{name} is {value} after {within:?}, not {expected}"));
            }
            sleep(LOOK_EVERY).await;
        }
    }

    pub(super) async fn until_no_lock_is_listed(&mut self, within: Duration) -> Result<(), String> {
        let began = Instant::now();
        loop {
            let answer = self.control.get("/locks").await?;
            let page: serde_json::Value = serde_json::from_slice(answer.body).unwrap_or_default();
            match page["locks"].as_array() {
                Some(locks) if locks.is_empty() && page["next_cursor"].is_null() => return Ok(()),
                _ if began.elapsed() < within => sleep(LOOK_EVERY).await,
                _ => return Err(format!("GET /locks after {within:?}: {}", answer.describe())),
            }
        }
    }

    /// Acquires and releases an unrelated name again and again; the latencies are those of both together. When an answer
    /// is so late that the next turn was due before, that turn counts from when it was due.
    pub(super) async fn probe(&mut self, length: Duration) -> Result<Histogram, String> {
        let (mut latencies, mut request) = (Histogram::new(), Vec::with_capacity(192));
        let mut ticks = interval(PROBE_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let began = Instant::now();
        let mut free = began;
        while began.elapsed() < length {
            let due = ticks.tick().await.into_std();
            let from = if free > due { due } else { Instant::now() };
            let name = rand::random();
            write_acquire(&mut request, name, PROBE_BODY);
            let answer = self.probe.exchange(&request).await?;
            let (201, Some(token)) = (answer.status, answer.lock_token) else {
                return Err(format!("the probe was answered with {}", answer.describe()));
            };
            write_release(&mut request, name, token);
            let answer = self.probe.exchange(&request).await?;
            if answer.status != 204 {
                return Err(format!("the probe's release was answered with {}", answer.describe()));
            }
            free = Instant::now();
            latencies.record(free - from);
        }
        Ok(latencies)
    }
}

/// One holder per lock, on a few connections.
pub(super) struct Holders {
    hands: Vec<Hand>,
}

struct Hand {
    connection: Connection,
    /// Locks and their tokens.
    held: Vec<(u64, Vec<u8>)>,
}

impl Holders {
    pub(super) async fn take(address: SocketAddr, locks: Vec<u64>) -> Result<Self, String> {
        let shares = locks.chunks(locks.len().div_ceil(HANDS).max(1));
        let hands = shares.map(async |share| {
            let mut connection = Connection::open(address).await?;
            let (mut held, mut request) = (Vec::with_capacity(share.len()), Vec::with_capacity(192));
            for &lock in share {
                write_acquire(&mut request, lock, HOLDERS_BODY);
                let answer = connection.exchange(&request).await?;
                let (201, Some(token)) = (answer.status, answer.lock_token) else {
                    return Err(format!("a holder was answered with {}", answer.describe()));
                };
                held.push((lock, token.to_vec()));
            }
            Ok(Hand { connection, held })
        });
        Ok(Self { hands: try_join_all(hands).await? })
    }

    pub(super) async fn let_go(self) -> Result<(), String> {
        let releases = self.hands.into_iter().map(async |Hand { mut connection, held }| {
            let mut request = Vec::with_capacity(192);
            for (lock, token) in held {
                write_release(&mut request, lock, &token);
                let answer = connection.exchange(&request).await?;
                if answer.status != 204 {
                    return Err(format!("a holder's release was answered with {}", answer.describe()));
                }
            }
            Ok(())
        });
        try_join_all(releases).await.map(drop)
    }
}
