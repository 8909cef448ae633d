//! Very many requests wait at one gateway at the same time. This module measures the memory that
//! each of them takes, their effect on another client, and the time to serve them all.
//!
//! Every waiter has one keep-alive connection. For each name a holder keeps the lock while its
//! waiters queue up. The gateway's own gauge shows when all of them wait. Then the holders release,
//! and each waiter releases its grant at once. The waiters ask one after another over a short time,
//! because a stampede would give other figures.
//!
//! The waiters, their holders and the probe share one thread of this program, which costs less than
//! many threads. So the time to serve all waiters includes this program's own work. The memory does
//! not include it, nor does the probe's latency while all requests wait.

use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt, TryStreamExt};
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout};

use crate::client::Connection;
use crate::contenders::{Programs, Running};
use crate::load::{Holders, Probed, probe};
use crate::report::{Row, Table, Unit, millis};
use crate::servers::{Accounts, allow_open_files};

/// The waiters' `wait_ms`. It is longer than all steps until the holders release.
const WAIT: Duration = Duration::from_secs(25);
/// Time limit of every step that has no limit of its own.
const PATIENCE: Duration = Duration::from_secs(30);
/// The pause between the arrival of the last waiter and the reading of the memory.
const SETTLE: Duration = Duration::from_millis(300);
/// If more than one in this many waiters get an early answer, the measurement is given up.
const MAX_EARLY_PART: usize = 100;
/// The number of connections that the holders share.
const HOLDER_CONNECTIONS: u32 = 8;
/// How many connections are opened at the same time. More would overflow the listener's backlog.
const OPENING: usize = 64;
/// How many files are open besides the waiters' connections, in this program or in the gateway.
const OTHER_FILES: u32 = 200;
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// The moment at which a waiter was granted the lock, or the other answer that it got.
type Outcome = Result<Instant, String>;

/// Measures the waiters. It starts processes, so it must be called on the main thread.
pub(crate) async fn measure(
    programs: &Programs,
    quick: bool,
    table: &mut Table,
) -> Result<(), String> {
    let (waiters, names) = if quick { (2000, 200) } else { (10_000, 1000) };
    let connections = waiters + OTHER_FILES;
    allow_open_files(u64::from(connections))?;
    // All waiters come from one address. With the gateway's default limits, some of them would be
    // refused.
    let args = [
        format!("--max-connections={connections}"),
        format!("--max-waiters={waiters}"),
        format!("--max-waiters-per-client={waiters}"),
    ];
    let setup = programs.set_up(&args).await?;
    let (gateway, masters) = (&setup.gateway, &setup.masters);
    let first: u64 = rand::random();
    let mut run = Run {
        waiters,
        locks: (0..names).map(|number| first.wrapping_add(number)).collect(),
        probe_for: Duration::from_secs(if quick { 1 } else { 4 }),
        ramp: Duration::from_millis(if quick { 500 } else { 2000 }),
        // The probe's connection is opened while the gateway is far from all limits on connections.
        probe: gateway.target.open().await?,
        row: Row::new("redlock-gateway"),
        gateway,
    };
    let read = || Accounts::read([&gateway.process], masters.cpu()?);
    let before = read()?;
    let result = run.measure().await;
    read()?.since(&before).add_others_to(&mut run.row);
    table.rows.push(run.row);
    table.faults = result.map_err(|error| format!("{error}\n{}", gateway.process.log_tail()))?;
    Ok(())
}

struct Run<'a> {
    waiters: u32,
    locks: Vec<u64>,
    probe_for: Duration,
    /// The time over which the waiters ask, one after another.
    ramp: Duration,
    probe: Connection,
    row: Row,
    gateway: &'a Running,
}

impl Run<'_> {
    /// Runs the measurement and returns the wrong answers.
    async fn measure(&mut self) -> Result<Vec<String>, String> {
        // The first requests make allocations that the gateway keeps. They must not count as the
        // waiters' memory.
        self.hold().await?.release().await?;
        self.probe("warm-up").await?;
        self.row.figures.clear();
        let before = self.memory("before")?;

        eprintln!("opening {} connections", self.waiters);
        let idle_waiters = self.open().await?;
        self.probe("probe while idle").await?;
        let idle = self.memory("idle")?;

        let holders = self.hold().await?;
        eprintln!("{} wait", self.waiters);
        let mut asking = self.ask(idle_waiters);
        let mut outcomes = self.until_all_wait(&mut asking).await?;
        sleep(SETTLE).await;
        let waiting = self.memory("waiting")?;
        self.probe(&format!("probe while {} wait", Unit::Count.show(f64::from(self.waiters))))
            .await?;
        for (what, bytes) in
            [("idle connection", idle - before), ("waiting request", waiting - idle)]
        {
            self.row.add(
                &format!("memory per {what}, bytes"),
                Unit::Count,
                bytes / f64::from(self.waiters),
            );
        }

        let began = Instant::now();
        holders.release().await?;
        let all = timeout(WAIT + PATIENCE, asking.join_all()).await;
        outcomes.extend(all.map_err(|_| "a waiter is still unanswered")?);
        let last = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok()).max();
        let took = last.map_or(Duration::ZERO, |last| last.saturating_duration_since(began));
        self.row.add("all served within ms", Unit::Millis, millis(took));
        self.memory("at the end")?;
        Ok(outcomes.into_iter().filter_map(Result::err).collect())
    }

    async fn hold(&self) -> Result<Holders, String> {
        Holders::take(&self.gateway.target, HOLDER_CONNECTIONS, &self.locks).await
    }

    /// Opens connections. Each of them gets the answer to one cheap request.
    async fn open(&self) -> Result<Vec<Connection>, String> {
        let open = async |_| {
            let mut connection = self.gateway.target.open().await?;
            let answer = connection.get("/livez").await?;
            let error = || format!("GET /livez is answered with {}", answer.describe());
            (answer.status == 200).then_some(connection).ok_or_else(error)
        };
        stream::iter(0..self.waiters).map(open).buffer_unordered(OPENING).try_collect().await
    }

    fn ask(&self, connections: Vec<Connection>) -> JoinSet<Outcome> {
        let body = format!(r#"{{"ttl_ms":30000,"wait_ms":{}}}"#, WAIT.as_millis());
        let start = Instant::now();
        let ask = |(mut connection, number): (Connection, u32)| {
            let body = body.clone();
            let lock = self.locks[number as usize % self.locks.len()];
            let due = start + self.ramp * number / self.waiters;
            async move {
                sleep_until(due.into()).await;
                let answer = connection.acquire(lock, &body).await?;
                let received = Instant::now();
                let token = answer
                    .granted()
                    .ok_or_else(|| format!("a waiter was answered with {}", answer.describe()))?;
                connection.settled_release(lock, token).await.map(|()| received)
            }
        };
        connections.into_iter().zip(0..).map(ask).collect()
    }

    /// Waits until the gateway reports that all requests wait. Returns the waiters that were
    /// answered early, while the lock was held.
    async fn until_all_wait(
        &mut self,
        asking: &mut JoinSet<Outcome>,
    ) -> Result<Vec<Outcome>, String> {
        let began = Instant::now();
        let mut early = Vec::new();
        loop {
            let count = self.probe.metric("redlock_waiters").await?;
            while let Some(answered) = asking.try_join_next() {
                let outcome = answered.map_err(|error| format!("a waiter panicked: {error}"))?;
                early.push(outcome.and(Err("a waiter was granted a held lock".into())));
            }
            if early.len() > self.waiters as usize / MAX_EARLY_PART {
                return Err(format!(
                    "{} were answered while the lock was held, first: {:?}",
                    early.len(),
                    early[0]
                ));
            }
            if count == Some(f64::from(self.waiters) - early.len() as f64) {
                return Ok(early);
            }
            if began.elapsed() > PATIENCE {
                return Err(format!("redlock_waiters is {count:?} after {PATIENCE:?}"));
            }
            sleep(CHECK_EVERY).await;
        }
    }

    /// Resident memory of the gateway, in bytes. Also adds it to the row.
    fn memory(&mut self, when: &str) -> Result<f64, String> {
        let bytes = self.gateway.process.memory()?.now;
        self.row.add(&format!("RSS {when}, MiB"), Unit::Mib, bytes / 1_048_576.0);
        Ok(bytes)
    }

    async fn probe(&mut self, what: &str) -> Result<(), String> {
        let Probed { latencies, failed } = probe(&mut self.probe, self.probe_for).await?;
        self.row.add_latencies(what, &latencies);
        if failed > 0 {
            self.row.remarks.push(format!("{what}: {failed} of {} failed", latencies.count()));
        }
        Ok(())
    }
}
