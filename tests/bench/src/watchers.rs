//! Many streams watch a few locks at one gateway, while these locks change. This module measures what
//! that costs another client, how late the events are, and the memory that each stream takes.
//!
//! The turns alternate. In half of them the same number of changes happen to locks that nobody watches.
//! Both kinds of turns have the same streams, masters and gateway, so the ratio shows only the cost of
//! the events.
//!
//! The streams are read by one thread of this program, at the lowest priority: real watchers would run
//! elsewhere, and take no time from the gateway, the masters and the other client.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use rustix::process::setpriority_process;
use rustix::thread::gettid;
use tokio::sync::Semaphore;
use tokio::time::{MissedTickBehavior, interval_at};

use crate::client::{Answer, Connection, Target, path};
use crate::contenders::{Programs, Running};
use crate::load::{Probed, probe, share};
use crate::masters::Masters;
use crate::report::{Latencies, Row, Table, Unit};
use crate::servers::{Accounts, allow_open_files};
use crate::streams::{EventStream, number};
use crate::worker_pool::WorkerPool;

/// The watched locks. As many other locks are not watched.
const NAMES: u64 = 100;
/// The wanted changes in each second. A grant is a change, and so is a release.
const CHANGES: u32 = 1_000;
/// The connections that make the changes. Each has its own share of the locks.
const CHANGERS: u32 = 20;
const BODY: &str = r#"{"ttl_ms":30000}"#;
/// How many streams are opened at the same time. More would overflow the listener's backlog.
const OPENING: usize = 64;
/// How many files are open besides the streams, in this program or in the gateway.
const OTHER_FILES: u32 = 200;
const PATIENCE: Duration = Duration::from_secs(60);
/// If no event arrives for this long after a turn, none is late.
const SETTLE: Duration = Duration::from_secs(1);
const CHECK_EVERY: Duration = Duration::from_millis(20);
/// The lines of an event: its type, its id, its data and an empty one.
const LINES_PER_EVENT: u64 = 4;
const LOWEST_PRIORITY: i32 = 19;
const PROBE: &str = "other client";

/// Measures the watchers. It starts processes, so it must be called on the main thread.
pub(crate) async fn measure(
    programs: &Programs,
    window: Duration,
    rounds: u32,
    quick: bool,
    table: &mut Table,
) -> Result<(), String> {
    let watchers = if quick { 2_000 } else { 10_000 };
    // One client may have as many streams as are still free of seven eighths of all connections.
    let connections = watchers * 16 / 7 + OTHER_FILES;
    allow_open_files(u64::from(connections))?;
    let setup = programs.set_up(&[format!("--max-connections={connections}")]).await?;
    let (gateway, masters) = (&setup.gateway, &setup.masters);
    let first: u64 = rand::random();
    let name = |number: u64| first.wrapping_add(number);
    let mut run = Run {
        watchers,
        window,
        masters,
        gateway,
        watched: (0..NAMES).map(name).collect(),
        unwatched: (NAMES..2 * NAMES).map(name).collect(),
        probe: gateway.target.open().await?,
        seen: Arc::default(),
    };
    let mut rows = [Row::new("unwatched locks change"), Row::new("watched locks change")];
    let result = run.measure(rounds, &mut rows).await;
    let [unwatched, mut watched] = rows;
    watched.divide("÷ unwatched", &format!("{PROBE} p50 ms"), &unwatched);
    table.rows = vec![unwatched, watched];
    result.map_err(|error| format!("{error}\n{}", gateway.process.log_tail()))
}

struct Run<'a> {
    watchers: u32,
    window: Duration,
    masters: &'a Masters,
    gateway: &'a Running,
    watched: Vec<u64>,
    unwatched: Vec<u64>,
    probe: Connection,
    seen: Arc<Seen>,
}

/// What the streams have received.
#[derive(Debug, Default)]
struct Seen {
    /// The streams that have received their snapshot.
    open: AtomicU32,
    lines: AtomicU64,
    /// Grants by fencing token, and when one stream of each lock received them.
    grants: Mutex<Vec<(u64, Instant)>>,
}

impl Seen {
    fn event(&self, event: &str) {
        if event.contains("event: held")
            && let Some(token) = number(event, "fencing_token")
        {
            self.grants
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push((token, Instant::now()));
        }
    }
}

impl Run<'_> {
    async fn measure(&mut self, rounds: u32, rows: &mut [Row; 2]) -> Result<(), String> {
        let watchers = self.watchers;
        // The first requests make allocations that the gateway keeps. They must not count as the
        // streams' memory.
        probe(&mut self.probe, self.window).await?;
        let before = self.gateway.process.memory()?.now;
        eprintln!("opening {watchers} streams");
        let mut streams = self.open()?;
        let began = Instant::now();
        while self.seen.open.load(Ordering::Relaxed) < watchers {
            streams.run_for(CHECK_EVERY).await?;
            if began.elapsed() > PATIENCE {
                return Err(format!("not all streams are open after {PATIENCE:?}"));
            }
        }
        streams.run_for(SETTLE).await?;
        let memory = (self.gateway.process.memory()?.now - before) / f64::from(watchers);
        for round in 0..rounds as usize {
            for turn in 0..2 {
                let at = (turn + round) % 2;
                self.turn(at == 1, &mut streams, &mut rows[at]).await?;
                let p50 = format!("{PROBE} p50 ms");
                let last = rows[at].figure(&p50).and_then(|figure| figure.samples.last().copied());
                let last = Unit::Millis.show(last.unwrap_or(f64::NAN));
                eprintln!("round {}/{rounds}  {:<24} {p50} {last}", round + 1, rows[at].name);
            }
        }
        rows[1].add("memory per stream, bytes", Unit::Count, memory);
        Ok(())
    }

    /// Starts the streams.
    fn open(&self) -> Result<WorkerPool<()>, String> {
        let (address, watched) = (self.gateway.target.address, self.watched.clone());
        let (seen, opening) = (self.seen.clone(), Arc::new(Semaphore::new(OPENING)));
        WorkerPool::start(self.watchers, 1, move |watcher, phase| {
            let (seen, opening) = (seen.clone(), opening.clone());
            let lock = watched[watcher as usize % watched.len()];
            let reads_grants = (watcher as usize) < watched.len();
            async move {
                if watcher == 0 {
                    // The priority is that of this thread, which serves all streams.
                    setpriority_process(Some(gettid()), LOWEST_PRIORITY)
                        .map_err(|error| format!("cannot lower a priority: {error}"))?;
                }
                let permit = opening.acquire().await.map_err(|error| error.to_string())?;
                let mut stream = EventStream::open(address, "GET", &path(lock), "").await?;
                while !stream.event().await?.contains("event: snapshot") {}
                drop(permit);
                seen.open.fetch_add(1, Ordering::Relaxed);
                while !phase.stops() {
                    let lines = stream.receive(reads_grants).await?;
                    seen.lines.fetch_add(lines, Ordering::Relaxed);
                    while let Some(event) = stream.take_event() {
                        seen.event(&event);
                    }
                }
                Ok(())
            }
        })
    }

    /// One turn. `is_watched` tells which locks change.
    async fn turn(
        &mut self,
        is_watched: bool,
        streams: &mut WorkerPool<()>,
        row: &mut Row,
    ) -> Result<(), String> {
        let locks = if is_watched { &self.watched } else { &self.unwatched };
        let changers = (0..CHANGERS).map(|changer| {
            let mine = share(NAMES, changer, CHANGERS).map(|at| locks[at as usize]).collect();
            change(self.gateway.target.clone(), mine, self.window, changer)
        });
        let read = || Accounts::read([&self.gateway.process], self.masters.cpu()?);
        let lines = self.seen.lines.load(Ordering::Relaxed);
        self.seen.grants.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let before = read()?;
        let (probed, changed) =
            tokio::try_join!(probe(&mut self.probe, self.window), try_join_all(changers))?;
        let cpu = read()?.since(&before);
        let seconds = cpu.elapsed.as_secs_f64();
        let busy = cpu.server.as_secs_f64() * 100.0 / seconds;
        let events = (self.seen.lines.load(Ordering::Relaxed) - lines) / LINES_PER_EVENT;
        self.until_quiet(streams).await?;

        let Probed { latencies, failed } = probed;
        row.add_latencies(PROBE, &latencies);
        let refused: u64 = changed.iter().map(|done| done.refused).sum();
        let grants: Vec<_> = changed.into_iter().flat_map(|done| done.grants).collect();
        row.add("changes/s", Unit::Rate, 2.0 * grants.len() as f64 / seconds);
        row.add("events/s", Unit::Count, events as f64 / seconds);
        row.add_latencies("event after the answer", &self.lateness(grants));
        row.add("its CPU", Unit::Percent, busy);
        cpu.add_others_to(row);
        for (what, count) in [("of the other client", failed), ("of the changes", refused)] {
            if count > 0 {
                row.remarks.push(format!("{count} requests {what} failed"));
            }
        }
        Ok(())
    }

    /// Waits until no event has arrived for a time, so that late ones do not count in the next turn.
    async fn until_quiet(&self, streams: &mut WorkerPool<()>) -> Result<(), String> {
        let began = Instant::now();
        let mut before = 0;
        loop {
            let lines = self.seen.lines.load(Ordering::Relaxed);
            // Each stream gets two lines every 15 s, and none of them is an event.
            if lines - before < u64::from(self.watchers) / 4 {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                return Err(format!("events still arrive {PATIENCE:?} after the last change"));
            }
            before = lines;
            streams.run_for(SETTLE).await?;
        }
    }

    /// How long after the answer that grants a lock a stream receives the event of that grant.
    fn lateness(&self, grants: Vec<(u64, Instant)>) -> Latencies {
        let granted: HashMap<_, _> = grants.into_iter().collect();
        let mut latencies = Latencies::new();
        let seen = self.seen.grants.lock().unwrap_or_else(PoisonError::into_inner);
        for (token, received) in seen.iter() {
            if let Some(answered) = granted.get(token) {
                latencies.record(received.saturating_duration_since(*answered));
            }
        }
        latencies
    }
}

/// What one connection has changed.
struct Changed {
    /// The fencing tokens, and when each was answered.
    grants: Vec<(u64, Instant)>,
    refused: u64,
}

/// Acquires and releases its locks, one after another, at fixed times. The changers do not act at
/// the same times.
async fn change(
    target: Target,
    locks: Vec<u64>,
    time: Duration,
    changer: u32,
) -> Result<Changed, String> {
    let mut connection = target.open().await?;
    let mut done = Changed { grants: Vec::new(), refused: 0 };
    // Each turn makes two changes.
    let period = Duration::from_secs(1) * 2 * CHANGERS / CHANGES;
    let began = Instant::now();
    let first = began + period * changer / CHANGERS;
    let mut ticks = interval_at(first.into(), period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for lock in locks.iter().cycle() {
        ticks.tick().await;
        if began.elapsed() > time {
            break;
        }
        let answer = connection.acquire(*lock, BODY).await?;
        match (number(&String::from_utf8_lossy(&answer.body), "fencing_token"), answer.granted()) {
            (Some(fencing_token), Some(token)) => {
                done.grants.push((fencing_token, Instant::now()));
                let Answer { status, .. } = connection.release(*lock, token).await?;
                done.refused += u64::from(status != 204);
            }
            _ => done.refused += 1,
        }
    }
    Ok(done)
}
