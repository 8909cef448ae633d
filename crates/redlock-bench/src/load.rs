//! The load: connections that each acquire a lock of a random name, release it, and begin again, as fast as the answers
//! come. They are spread over a few threads with a runtime each, which costs less than a runtime that shares its tasks.
//!
//! A connection counts what it sees while counting is on, and only then. An answer with another status than 201 or 204
//! is counted apart, the first one is kept in full, and the load goes on; a broken connection ends the measurement.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::histogram::Histogram;
use crate::http::{Connection, write_acquire, write_release};

const BODY: &str = r#"{"ttl_ms":30000}"#;
/// A request that is unanswered for longer, after everybody was told to stop, is lost.
const STOP_WITHIN: Duration = Duration::from_secs(10);

const RUN: u8 = 0;
const COUNT: u8 = 1;
const STOP: u8 = 2;

/// What the connections counted.
pub(crate) struct Tally {
    pub(crate) acquire: Histogram,
    pub(crate) release: Histogram,
    /// Answers with an unexpected status, counting on or off.
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
}

impl Tally {
    fn new() -> Self {
        Self { acquire: Histogram::new(), release: Histogram::new(), errors: 0, first_error: None }
    }

    fn add(&mut self, other: Self) {
        self.acquire.add(&other.acquire);
        self.release.add(&other.release);
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
    }

    fn error(&mut self, describe: impl FnOnce() -> String) {
        self.errors += 1;
        self.first_error.get_or_insert_with(describe);
    }
}

/// A load that runs until it is stopped or dropped.
pub(crate) struct Load {
    phase: Arc<AtomicU8>,
    tallies: mpsc::UnboundedReceiver<Result<Tally, String>>,
}

impl Load {
    /// Starts connecting; `threads` must not exceed `connections`.
    pub(crate) fn start(address: SocketAddr, connections: u32, threads: u32) -> Result<Self, String> {
        let phase = Arc::new(AtomicU8::new(RUN));
        let (done, tallies) = mpsc::unbounded_channel();
        let load = Self { phase, tallies };
        for thread in 0..threads {
            let share = connections / threads + u32::from(thread < connections % threads);
            let (phase, done) = (load.phase.clone(), done.clone());
            let run = move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
                let result = match runtime {
                    Ok(runtime) => runtime.block_on(run_all(address, share, phase)),
                    Err(error) => Err(format!("cannot start a runtime: {error}")),
                };
                // Nobody listens when the measurement has already failed.
                let _ = done.send(result);
            };
            std::thread::Builder::new()
                .name("load".into())
                .spawn(run)
                .map_err(|error| format!("cannot start a thread: {error}"))?;
        }
        Ok(load)
    }

    /// Lets it run; fails when it ends before its time.
    pub(crate) async fn run_for(&mut self, time: Duration) -> Result<(), String> {
        match timeout(time, self.tallies.recv()).await {
            Err(_) => Ok(()),
            Ok(Some(Err(error))) => Err(error),
            Ok(Some(Ok(_)) | None) => Err("the load ended by itself".into()),
        }
    }

    pub(crate) fn count(&self, on: bool) {
        self.phase.store(if on { COUNT } else { RUN }, Ordering::Relaxed);
    }

    /// Every connection finishes its cycle first, so that no lock is left behind.
    pub(crate) async fn stop(mut self) -> Result<Tally, String> {
        self.phase.store(STOP, Ordering::Relaxed);
        let mut sum = Tally::new();
        let gather = async {
            while let Some(tally) = self.tallies.recv().await {
                sum.add(tally?);
            }
            Ok(())
        };
        match timeout(STOP_WITHIN, gather).await {
            Ok(result) => result.map(|()| sum),
            Err(_) => Err(format!("a request is still unanswered after {} s", STOP_WITHIN.as_secs())),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.phase.store(STOP, Ordering::Relaxed);
    }
}

async fn run_all(address: SocketAddr, connections: u32, phase: Arc<AtomicU8>) -> Result<Tally, String> {
    let mut tasks: JoinSet<_> = (0..connections).map(|_| run_one(address, phase.clone())).collect();
    let mut sum = Tally::new();
    while let Some(result) = tasks.join_next().await {
        sum.add(result.map_err(|error| format!("a connection panicked: {error}"))??);
    }
    Ok(sum)
}

async fn run_one(address: SocketAddr, phase: Arc<AtomicU8>) -> Result<Tally, String> {
    let mut connection = Connection::open(address).await?;
    let mut tally = Tally::new();
    let mut request = Vec::with_capacity(512);
    while phase.load(Ordering::Relaxed) != STOP {
        let name: u64 = rand::random();
        write_acquire(&mut request, name, BODY);
        let sent = Instant::now();
        let answer = connection.exchange(&request).await?;
        let elapsed = sent.elapsed();
        let (201, Some(token)) = (answer.status, answer.lock_token) else {
            tally.error(|| format!("POST was answered with {}", answer.describe()));
            continue;
        };
        write_release(&mut request, name, token);
        if phase.load(Ordering::Relaxed) == COUNT {
            tally.acquire.record(elapsed);
        }

        let sent = Instant::now();
        let answer = connection.exchange(&request).await?;
        let elapsed = sent.elapsed();
        if answer.status != 204 {
            tally.error(|| format!("DELETE was answered with {}", answer.describe()));
        } else if phase.load(Ordering::Relaxed) == COUNT {
            tally.release.record(elapsed);
        }
    }
    Ok(tally)
}
