//! The gateway that everybody waits at: its process, its metrics, and the connections that are no waiters.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::future::try_join;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::conditions::Masters;
use crate::contenders::{Running, start_gateway};
use crate::histogram::Histogram;
use crate::http::{Connection, write_acquire, write_release};
use crate::metrics::metric;
use crate::servers::Scratch;

const PROBE_BODY: &str = r#"{"ttl_ms":30000}"#;
/// Between two looks at the metrics: how exactly the time of a change is known.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(20);
const PROBE_EVERY: Duration = Duration::from_millis(10);

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

    pub(super) async fn metric(&mut self, name: &str) -> Result<Option<f64>, String> {
        let answer = self.control.get("/metrics").await?;
        Ok(metric(&String::from_utf8_lossy(answer.body), name))
    }

    pub(super) async fn until_zero(&mut self, name: &str, within: Duration) -> Result<(), String> {
        let began = Instant::now();
        loop {
            match self.metric(name).await? {
                Some(0.0) => return Ok(()),
                _ if began.elapsed() < within => sleep(LOOK_EVERY).await,
                value => return Err(format!("{name} is {} after {within:?}, not 0", shown(value))),
            }
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

    /// Acquires and releases an unrelated name again and again; the latencies are those of both together, and the number
    /// is how often that failed. When an answer is so late that the next turn was due before, that turn counts from when
    /// it was due.
    pub(super) async fn probe(&mut self, length: Duration) -> Result<(Histogram, u64), String> {
        let (mut latencies, mut failed, mut request) = (Histogram::new(), 0, Vec::with_capacity(192));
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
            if let (201, Some(token)) = (answer.status, answer.lock_token) {
                write_release(&mut request, name, token);
                failed += u64::from(self.probe.exchange(&request).await?.status != 204);
            } else {
                failed += 1;
            }
            free = Instant::now();
            latencies.record(free - from);
        }
        Ok((latencies, failed))
    }
}

pub(super) fn shown(value: Option<f64>) -> String {
    value.map_or("absent".into(), |value| value.to_string())
}
