//! The load: connections that acquire and release locks again and again, as fast as the answers
//! come.
//!
//! A connection counts requests only while counting is on. An answer with an unexpected status is
//! counted separately, and the load goes on. The first such answer is kept in full. A broken
//! connection ends the measurement.

use std::ops::Range;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use tokio::time::{MissedTickBehavior, interval};

use crate::client::{Connection, Target};
use crate::report::{Latencies, Row};
use crate::worker_pool::{Phase, WorkerPool};

const BODY: &str = r#"{"ttl_ms":30000}"#;
/// The body of a request for a held lock, or for a name that masters must remember. It asks for the
/// longest TTL that a gateway grants by default.
pub(crate) const HELD_BODY: &str = r#"{"ttl_ms":300000}"#;
/// A request without an answer for longer than this after the stop is lost.
pub(crate) const STOP_WITHIN: Duration = Duration::from_secs(10);
/// The time limit for using every name once: this long for each name.
const FILL_PER_NAME: Duration = Duration::from_millis(5);
const PROBE_EVERY: Duration = Duration::from_millis(10);

/// The names of the locks that a connection acquires and releases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Names {
    /// Every name is new.
    Random,
    /// Each connection walks again and again through its own share of this many names. Before the
    /// measurement every name was used once.
    Walk(u64),
}

/// The counts of the connections.
pub(crate) struct Tally {
    pub(crate) acquire: Latencies,
    pub(crate) release: Latencies,
    /// Answers with an unexpected status. They count even while counting is off.
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
}

impl Tally {
    pub(crate) fn new() -> Self {
        Self { acquire: Latencies::new(), release: Latencies::new(), errors: 0, first_error: None }
    }

    pub(crate) fn sum(tallies: Vec<Self>) -> Self {
        tallies.into_iter().fold(Self::new(), |mut sum, other| {
            sum.acquire.add(&other.acquire);
            sum.release.add(&other.release);
            sum.errors += other.errors;
            sum.first_error = sum.first_error.take().or(other.first_error);
            sum
        })
    }

    pub(crate) fn error(&mut self, describe: impl FnOnce() -> String) {
        self.errors += 1;
        self.first_error.get_or_insert_with(describe);
    }

    /// The number of requests. Fails if it is zero.
    pub(crate) fn requests(&self) -> Result<f64, String> {
        match self.acquire.count() + self.release.count() {
            0 => {
                let example = self.first_error.as_deref().unwrap_or("no answer came at all");
                Err(format!(
                    "no request was answered as expected; {} errors, first: {example}",
                    self.errors
                ))
            }
            requests => Ok(requests as f64),
        }
    }

    pub(crate) fn add_latencies_to(&self, row: &mut Row) {
        row.add_latencies("acquire", &self.acquire);
        row.add_latencies("release", &self.release);
    }
}

/// Starts the load. The connections are opened first. `threads` must not exceed `connections`.
pub(crate) fn start(
    target: &Target,
    connections: u32,
    threads: u32,
    names: Names,
) -> Result<WorkerPool<Tally>, String> {
    let target = target.clone();
    WorkerPool::start(connections, threads, move |worker, phase| {
        let target = target.clone();
        async move {
            let mut connection = target.open().await?;
            let mut tally = Tally::new();
            let mut walk = match names {
                Names::Walk(count) => share(count, worker, connections),
                Names::Random => 0..0,
            }
            .cycle();
            while !phase.stops() {
                cycle(
                    &mut connection,
                    walk.next().unwrap_or_else(rand::random),
                    &phase,
                    &mut tally,
                )
                .await?;
            }
            Ok(tally)
        }
    })
}

/// Uses every name once. A master keeps its data about a name until 10 s after the TTL. So with the
/// longest TTL that data outlives the measurement.
pub(crate) async fn fill(
    target: &Target,
    connections: u32,
    threads: u32,
    names: u64,
) -> Result<(), String> {
    let target = target.clone();
    let pool = WorkerPool::start(connections, threads, move |worker, phase| {
        let target = target.clone();
        async move {
            let mut connection = target.open().await?;
            for name in share(names, worker, connections).take_while(|_| !phase.stops()) {
                let token = connection.settled_acquire(name, HELD_BODY).await?;
                connection.settled_release(name, &token).await?;
            }
            Ok(())
        }
    })?;
    let within = STOP_WITHIN + FILL_PER_NAME * u32::try_from(names).unwrap_or(u32::MAX);
    pool.finish(within).await.map(drop)
}

async fn cycle(
    connection: &mut Connection,
    name: u64,
    phase: &Phase,
    tally: &mut Tally,
) -> Result<(), String> {
    let sent = Instant::now();
    let answer = connection.acquire(name, BODY).await?;
    let elapsed = sent.elapsed();
    let Some(token) = answer.granted() else {
        tally.error(|| format!("POST was answered with {}", answer.describe()));
        return Ok(());
    };
    if phase.counts() {
        tally.acquire.record(elapsed);
    }

    let sent = Instant::now();
    let answer = connection.release(name, token).await?;
    let elapsed = sent.elapsed();
    if answer.status != 204 {
        tally.error(|| format!("DELETE was answered with {}", answer.describe()));
    } else if phase.counts() {
        tally.release.record(elapsed);
    }
    Ok(())
}

/// The results of [`probe`]: a client that uses the gateway beside the measured load.
pub(crate) struct Probed {
    /// Each latency covers an acquire and a release.
    pub(crate) latencies: Latencies,
    pub(crate) failed: u64,
}

/// Acquires and releases unrelated names repeatedly. The turns have fixed times. If an answer comes
/// after the time of the next turn, that turn counts from the time at which it was due.
pub(crate) async fn probe(connection: &mut Connection, time: Duration) -> Result<Probed, String> {
    let mut probed = Probed { latencies: Latencies::new(), failed: 0 };
    let mut ticks = interval(PROBE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let began = Instant::now();
    let mut free = began;
    while began.elapsed() < time {
        let due = ticks.tick().await.into_std();
        let from = if free > due { due } else { Instant::now() };
        let name = rand::random();
        let answer = connection.acquire(name, BODY).await?;
        probed.failed += match answer.granted() {
            Some(token) => u64::from(connection.release(name, token).await?.status != 204),
            None => 1,
        };
        free = Instant::now();
        probed.latencies.record(free - from);
    }
    Ok(probed)
}

/// Locks that are held during another measurement.
pub(crate) struct Holders {
    target: Target,
    /// Locks and their tokens: one share for each connection.
    held: Vec<Vec<(u64, String)>>,
}

impl Holders {
    /// Takes the locks, over at most this many connections.
    pub(crate) async fn take(
        target: &Target,
        connections: u32,
        locks: &[u64],
    ) -> Result<Self, String> {
        let shares = locks.chunks(locks.len().div_ceil(connections as usize).max(1));
        let held = shares.map(async |share| {
            let mut connection = target.open().await?;
            let mut held = Vec::with_capacity(share.len());
            for &lock in share {
                held.push((lock, connection.settled_acquire(lock, HELD_BODY).await?));
            }
            Ok::<_, String>(held)
        });
        Ok(Self { held: try_join_all(held).await?, target: target.clone() })
    }

    /// Releases the locks. If a lock was lost during the measurement, this is an error.
    pub(crate) async fn release(self) -> Result<(), String> {
        let releases = self.held.iter().map(async |share| {
            let mut connection = self.target.open().await?;
            for (lock, token) in share {
                connection.settled_release(*lock, token).await?;
            }
            Ok(())
        });
        try_join_all(releases).await.map(drop)
    }
}

/// A connection's share of the names. The shares are disjoint, and together they contain all names.
pub(crate) fn share(names: u64, worker: u32, connections: u32) -> Range<u64> {
    let from = |worker: u32| names * u64::from(worker) / u64::from(connections);
    from(worker)..from(worker + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_in_one_share() {
        let all: Vec<_> = (0..7).flat_map(|worker| share(100, worker, 7)).collect();
        assert!(all.into_iter().eq(0..100));
    }

    #[test]
    fn no_requests_are_an_error_with_an_example() {
        let mut tally = Tally::new();
        tally.error(|| "POST was answered with 503".into());
        assert!(
            tally.requests().unwrap_err().ends_with("1 errors, first: POST was answered with 503")
        );
        tally.acquire.record(Duration::from_millis(1));
        assert_eq!(tally.requests(), Ok(1.0));
    }
}
