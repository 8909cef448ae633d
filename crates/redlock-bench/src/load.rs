//! The load: connections that each acquire a lock of a random name, release it, and begin again, as fast as the answers
//! come.
//!
//! A connection counts what it sees while counting is on, and only then. An answer with another status than 201 or 204
//! is counted apart, the first one is kept in full, and the load goes on; a broken connection ends the measurement.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::crew::{Crew, Phase};
use crate::histogram::Histogram;
use crate::http::{Connection, write_acquire, write_release};

const BODY: &str = r#"{"ttl_ms":30000}"#;
/// A request that is unanswered for longer, after everybody was told to stop, is lost.
pub(crate) const STOP_WITHIN: Duration = Duration::from_secs(10);

/// What the connections counted.
pub(crate) struct Tally {
    pub(crate) acquire: Histogram,
    pub(crate) release: Histogram,
    /// Answers with an unexpected status, counting on or off.
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
}

impl Tally {
    pub(crate) fn new() -> Self {
        Self { acquire: Histogram::new(), release: Histogram::new(), errors: 0, first_error: None }
    }

    pub(crate) fn sum(tallies: Vec<Self>) -> Self {
        let mut sum = Self::new();
        for tally in tallies {
            sum.add(tally);
        }
        sum
    }

    fn add(&mut self, other: Self) {
        self.acquire.add(&other.acquire);
        self.release.add(&other.release);
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
    }

    pub(crate) fn error(&mut self, describe: impl FnOnce() -> String) {
        self.errors += 1;
        self.first_error.get_or_insert_with(describe);
    }
}

/// Starts connecting; `threads` must not exceed `connections`.
pub(crate) fn start(address: SocketAddr, connections: u32, threads: u32) -> Result<Crew<Tally>, String> {
    Crew::start(connections, threads, move |_, phase| run_one(address, phase))
}

async fn run_one(address: SocketAddr, phase: Phase) -> Result<Tally, String> {
    let mut connection = Connection::open(address).await?;
    let mut tally = Tally::new();
    let mut request = Vec::with_capacity(512);
    while !phase.stops() {
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
        if phase.counts() {
            tally.acquire.record(elapsed);
        }

        let sent = Instant::now();
        let answer = connection.exchange(&request).await?;
        let elapsed = sent.elapsed();
        if answer.status != 204 {
            tally.error(|| format!("DELETE was answered with {}", answer.describe()));
        } else if phase.counts() {
            tally.release.record(elapsed);
        }
    }
    Ok(tally)
}
