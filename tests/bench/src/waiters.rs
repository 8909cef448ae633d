//! Very many requests that wait at the same time at one gateway: what each costs in memory, what another client notices
//! of them, and how long all of them take to be served.
//!
//! Every waiter is one keep-alive connection. A name is held while its waiters queue up, so that nobody is served before
//! all of them wait, which the gateway's own gauge says. Then the holders let go, and a waiter that is granted the lock
//! releases it at once. Requests are sent spread over a short while, or the figures would be those of a stampede.
//!
//! The waiters, their holders and the probe share one thread here, which costs less than threads would. So how long
//! serving takes includes this program's own share of work; the memory and the probe while all wait do not.

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

/// How long they ask to wait: longer than everything here takes until the holders let go.
const WAIT: Duration = Duration::from_secs(25);
/// For everything that has no time limit of its own.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between the last waiter's arrival and the look at the memory.
const SETTLE: Duration = Duration::from_millis(300);
/// One in so many waiters may be answered too early before the measurement is given up.
const MAX_EARLY_PART: usize = 100;
/// Connections that the holders share.
const HOLDER_CONNECTIONS: u32 = 8;
/// Connections that are being opened at the same time; more would fill the listener's backlog.
const OPENING: usize = 64;
/// Files that are open besides the waiters' connections, here or in the gateway.
const OTHER_FILES: u32 = 200;
const LOOK_EVERY: Duration = Duration::from_millis(20);
const PROBE_EVERY: Duration = Duration::from_millis(10);

/// When a waiter was granted the lock, or what it was told instead.
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
    // Limits that would otherwise refuse some of the waiters, who all come from one address.
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
    let look = || Accounts::look([&gateway.process], masters.cpu()?);
    let before = look()?;
    let result = run.measure().await;
    look()?.since(&before).add_others_to(&mut run.row);
    table.rows.push(run.row);
    table.faults = result.map_err(|error| format!("{error}\n{}", gateway.process.log_tail()))?;
    Ok(())
}

struct Run<'a> {
    waiters: u32,
    locks: Vec<u64>,
    probe_for: Duration,
    /// In which all waiters ask, one after another.
    ramp: Duration,
    probe: Connection,
    row: Row,
    gateway: &'a Running,
}

impl Run<'_> {
    /// Returns the wrong answers.
    async fn measure(&mut self) -> Result<Vec<String>, String> {
        // What the gateway allocates once and for all must not be charged to the waiters.
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

    /// Connections of which each has had one cheap request answered.
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
                    .ok_or_else(|| format!("a waiter was told {}", answer.describe()))?;
                connection.settled_release(lock, token).await.map(|()| received)
            }
        };
        connections.into_iter().zip(0..).map(ask).collect()
    }

    /// Until the gateway says that all wait, less those who were answered although the lock was held, whom it returns.
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
                early.push(outcome.and(Err("a waiter was granted a lock that was held".into())));
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
            sleep(LOOK_EVERY).await;
        }
    }

    /// Resident memory of the gateway, in bytes.
    fn memory(&mut self, when: &str) -> Result<f64, String> {
        let bytes = self.gateway.process.memory()?.now;
        self.row.add(&format!("RSS {when}, MiB"), Unit::Mib, bytes / 1_048_576.0);
        Ok(bytes)
    }

    /// Acquires and releases an unrelated name again and again; the latencies are those of both together. When an answer
    /// is so late that the next turn was due before, that turn counts from when it was due.
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
