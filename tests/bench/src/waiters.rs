//! Very many requests wait at one gateway at the same time. The module measures the memory of each,
//! their effect on another client, and the time to serve them all.
//!
//! Every waiter is one keep-alive connection. Holders keep each name while its waiters queue up.
//! The gateway's own gauge shows when all of them wait; then the holders release, and each waiter
//! releases its grant at once. The requests are spread over a short while, to avoid the figures of
//! a stampede.
//!
//! The waiters, their holders and the probe share one thread here, which costs less than many
//! threads. So the serving time includes this program's own work. The memory, and the probe while
//! all wait, do not.

use std::time::{Duration, Instant};

use futures_util::stream::{self, StreamExt, TryStreamExt};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep, sleep_until, timeout};

use crate::client::{Connection, Target};
use crate::contenders::{Programs, Running};
use crate::load::Holders;
use crate::masters::{Condition, Masters};
use crate::report::{Latencies, Row, Table, Unit, millis};
use crate::servers::{Accounts, allow_open_files, free_address, scratch};

/// The waiters' `wait_ms`: longer than everything until the holders release.
const WAIT: Duration = Duration::from_secs(25);
/// Time limit of every step without one of its own.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between the last waiter's arrival and the reading of the memory.
const SETTLE: Duration = Duration::from_millis(300);
/// One in this many waiters may get an early answer before the measurement is given up.
const MAX_EARLY_PART: usize = 100;
/// Connections that the holders share.
const HOLDER_CONNECTIONS: u32 = 8;
/// Connections opened at the same time; more would fill the listener's backlog.
const OPENING: usize = 64;
/// Open files besides the waiters' connections, here or in the gateway.
const OTHER_FILES: u32 = 200;
const CHECK_EVERY: Duration = Duration::from_millis(20);
const PROBE_EVERY: Duration = Duration::from_millis(10);

/// When a waiter was granted the lock, or the other answer.
type Outcome = Result<Instant, String>;

/// Must be called on the main thread, because it starts processes.
pub(crate) async fn measure(
    programs: &Programs,
    quick: bool,
    table: &mut Table,
) -> Result<(), String> {
    let (waiters, names) = if quick { (2000, 200) } else { (10_000, 1000) };
    let connections = waiters + OTHER_FILES;
    allow_open_files(u64::from(connections))?;
    let scratch = scratch()?;
    let masters = Masters::start(Condition::Healthy, &scratch).await?;
    // Lower limits would refuse some of the waiters, which all come from one address.
    let args = [
        format!("--max-connections={connections}"),
        format!("--max-waiters={waiters}"),
        format!("--max-waiters-per-client={waiters}"),
    ];
    let target = Target::plain(free_address()?);
    let gateway = programs
        .start_gateway("redlock-gateway", target.clone(), "", &masters, &args, &scratch)
        .await?;
    let first: u64 = rand::random();
    let mut run = Run {
        waiters,
        locks: (0..names).map(|number| first.wrapping_add(number)).collect(),
        probe_for: Duration::from_secs(if quick { 1 } else { 4 }),
        ramp: Duration::from_millis(if quick { 500 } else { 2000 }),
        // Opened while all limits on connections are still far away.
        probe: target.open().await?,
        row: Row::new("redlock-gateway"),
        gateway: &gateway,
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
    /// The time in which all waiters ask, one after another.
    ramp: Duration,
    probe: Connection,
    row: Row,
    gateway: &'a Running,
}

impl Run<'_> {
    /// Returns the wrong answers.
    async fn measure(&mut self) -> Result<Vec<String>, String> {
        // The gateway's one-off allocations must not count for the waiters.
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

    /// Opens connections; each has one cheap request answered.
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

    /// Waits until the gateway reports that all wait. Returns the waiters that were answered early,
    /// while the lock was held.
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

    /// Resident memory of the gateway, in bytes.
    fn memory(&mut self, when: &str) -> Result<f64, String> {
        let bytes = self.gateway.process.memory()?.now;
        self.row.add(&format!("RSS {when}, MiB"), Unit::Mib, bytes / 1_048_576.0);
        Ok(bytes)
    }

    /// Acquires and releases an unrelated name repeatedly; a latency covers both. If an answer
    /// comes after the next turn's due time, that turn counts from its due time.
    async fn probe(&mut self, what: &str) -> Result<(), String> {
        let mut latencies = Latencies::new();
        let mut failed = 0;
        let mut ticks = interval(PROBE_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let began = Instant::now();
        let mut free = began;
        while began.elapsed() < self.probe_for {
            let due = ticks.tick().await.into_std();
            let from = if free > due { due } else { Instant::now() };
            let name = rand::random();
            let answer = self.probe.acquire(name, r#"{"ttl_ms":30000}"#).await?;
            failed += match answer.granted() {
                Some(token) => u64::from(self.probe.release(name, token).await?.status != 204),
                None => 1,
            };
            free = Instant::now();
            latencies.record(free - from);
        }
        self.row.add_latencies(what, &latencies);
        if failed > 0 {
            self.row.remarks.push(format!("{what}: {failed} of {} failed", latencies.count()));
        }
        Ok(())
    }
}
