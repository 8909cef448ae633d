//! The load: connections that each do one thing over and over, as fast as the answers come: acquire a lock and release it,
//! or extend locks that are held.
//!
//! A connection counts what it sees while counting is on, and only then. An answer with another status than expected is
//! counted apart, the first one is kept in full, and the load goes on; a broken connection ends the measurement.

mod names;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::names::{Source, share};
use crate::histogram::Histogram;
use crate::holders::{Share, settle};
use crate::http::{Connection, write_acquire, write_extend, write_release};
use crate::worker_pool::{Phase, WorkerPool};
use crate::workload::Names;

const BODY: &str = r#"{"ttl_ms":30000}"#;
/// Locks that are extended outlast the other contenders' turns.
const EXTEND_BODY: &str = r#"{"ttl_ms":300000}"#;
/// A request that is unanswered for longer, after everybody was told to stop, is lost.
pub(crate) const STOP_WITHIN: Duration = Duration::from_secs(10);
/// What filling may take, at the slowest.
const FILL_PER_NAME: Duration = Duration::from_millis(5);

/// What the connections do.
#[derive(Clone)]
pub(crate) enum Work {
    Cycle(Names),
    /// One share for each connection.
    Extend(Arc<Vec<Share>>),
}

/// What the connections counted.
pub(crate) struct Tally {
    pub(crate) acquire: Histogram,
    pub(crate) extend: Histogram,
    pub(crate) release: Histogram,
    /// Acquires that were answered 409 where somebody else may hold the lock.
    pub(crate) refused: u64,
    /// Answers with an unexpected status, counting on or off.
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
}

impl Tally {
    pub(crate) fn new() -> Self {
        let [acquire, extend, release] = std::array::from_fn(|_| Histogram::new());
        Self { acquire, extend, release, refused: 0, errors: 0, first_error: None }
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
        self.extend.add(&other.extend);
        self.release.add(&other.release);
        self.refused += other.refused;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
    }

    pub(crate) fn error(&mut self, describe: impl FnOnce() -> String) {
        self.errors += 1;
        self.first_error.get_or_insert_with(describe);
    }
}

/// Starts connecting; `threads` must not exceed `connections`.
pub(crate) fn start(
    address: SocketAddr,
    connections: u32,
    threads: u32,
    work: Work,
) -> Result<WorkerPool<Tally>, String> {
    WorkerPool::start(connections, threads, move |worker, phase| {
        let work = work.clone();
        async move {
            match work {
                Work::Cycle(names) => cycle(address, Source::new(names, worker, connections), phase).await,
                Work::Extend(shares) => extend(address, &shares[worker as usize], phase).await,
            }
        }
    })
}

/// Has every one of the names used once, so that what the masters keep of a name is there.
pub(crate) async fn fill(address: SocketAddr, connections: u32, threads: u32, names: u64) -> Result<(), String> {
    let pool = WorkerPool::start(connections, threads, move |worker, phase| async move {
        let mut connection = Connection::open(address).await?;
        let mut request = Vec::with_capacity(512);
        for name in share(names, worker, connections) {
            if phase.stops() {
                break;
            }
            write_acquire(&mut request, name, BODY);
            let answer = settle(&mut connection, &request).await?;
            if answer.status != 201 {
                return Err(format!("the first POST for a name was answered with {}", answer.text));
            }
            write_release(&mut request, name, &answer.lock_token);
            let answer = settle(&mut connection, &request).await?;
            if !answer.is_released() {
                return Err(format!("the first DELETE for a name was answered with {}", answer.text));
            }
        }
        Ok(())
    })?;
    let within = STOP_WITHIN + FILL_PER_NAME * u32::try_from(names).unwrap_or(u32::MAX);
    pool.finish(within).await.map(drop)
}

async fn cycle(address: SocketAddr, mut names: Source, phase: Phase) -> Result<Tally, String> {
    let mut client = Client::open(address).await?;
    while !phase.stops() {
        client.cycle(names.next(), names.is_shared(), &phase).await?;
    }
    Ok(client.tally)
}

async fn extend(address: SocketAddr, share: &Share, phase: Phase) -> Result<Tally, String> {
    let mut client = Client::open(address).await?;
    for (name, token) in share.iter().cycle() {
        if phase.stops() {
            break;
        }
        client.extend(*name, token, &phase).await?;
    }
    Ok(client.tally)
}

/// One connection and what it counted.
struct Client {
    connection: Connection,
    request: Vec<u8>,
    tally: Tally,
}

impl Client {
    async fn open(address: SocketAddr) -> Result<Self, String> {
        let connection = Connection::open(address).await?;
        Ok(Self { connection, request: Vec::with_capacity(512), tally: Tally::new() })
    }

    async fn cycle(&mut self, name: u64, may_be_held: bool, phase: &Phase) -> Result<(), String> {
        write_acquire(&mut self.request, name, BODY);
        let sent = Instant::now();
        let answer = self.connection.exchange(&self.request).await?;
        let elapsed = sent.elapsed();
        match (answer.status, answer.lock_token) {
            (201, Some(token)) => write_release(&mut self.request, name, token),
            (409, _) if may_be_held => {
                self.tally.refused += u64::from(phase.counts());
                return Ok(());
            }
            _ => {
                self.tally.error(|| format!("POST was answered with {}", answer.describe()));
                return Ok(());
            }
        }
        if phase.counts() {
            self.tally.acquire.record(elapsed);
        }

        let sent = Instant::now();
        let answer = self.connection.exchange(&self.request).await?;
        let elapsed = sent.elapsed();
        if answer.status != 204 {
            self.tally.error(|| format!("DELETE was answered with {}", answer.describe()));
        } else if phase.counts() {
            self.tally.release.record(elapsed);
        }
        Ok(())
    }

    async fn extend(&mut self, name: u64, token: &[u8], phase: &Phase) -> Result<(), String> {
        write_extend(&mut self.request, name, token, EXTEND_BODY);
        let sent = Instant::now();
        let answer = self.connection.exchange(&self.request).await?;
        let elapsed = sent.elapsed();
        if answer.status != 200 {
            self.tally.error(|| format!("PATCH was answered with {}", answer.describe()));
        } else if phase.counts() {
            self.tally.extend.record(elapsed);
        }
        Ok(())
    }
}
