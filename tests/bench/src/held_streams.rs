//! Very many streams keep their locks at one gateway, until a majority of the masters stops. This
//! module measures the memory that each stream takes, and how early the gateway tells a loss.
//!
//! A client may rely on its lock until its deadline: the time at which it sent the request, plus
//! `elapsed_ms` and `validity_ms` of the last extension. The margin is the time from the arrival of
//! `lost` to this deadline. A margin below zero would let two clients hold the lock, so it is a fault.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use crate::client::path;
use crate::contenders::{Programs, Running};
use crate::load::probe;
use crate::masters::Masters;
use crate::report::{Row, Table, Unit, median};
use crate::servers::{Accounts, allow_open_files};
use crate::streams::{EventStream, number};
use crate::worker_pool::WorkerPool;

const TTL: Duration = Duration::from_secs(6);
/// How many streams are opened at the same time. More would overflow the listener's backlog.
const OPENING: usize = 64;
/// How many files are open besides the streams, in this program or in the gateway.
const OTHER_FILES: u32 = 200;
const PATIENCE: Duration = Duration::from_secs(60);
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// Measures the streams. It starts processes, so it must be called on the main thread.
pub(crate) async fn measure(
    programs: &Programs,
    rounds: u32,
    quick: bool,
    table: &mut Table,
) -> Result<(), String> {
    let streams = if quick { 200 } else { 1_000 };
    // One client may have as many streams as are still free of seven eighths of all connections.
    let connections = streams * 16 / 7 + OTHER_FILES;
    allow_open_files(u64::from(connections))?;
    let setup = programs.set_up(&[format!("--max-connections={connections}")]).await?;
    let (gateway, masters) = (&setup.gateway, &setup.masters);
    let mut row = Row::new(&format!("{streams} streams"));
    let run = Run { streams, masters, gateway };
    let mut result = Ok(());
    for round in 1..=rounds {
        result = run.round(&mut row).await;
        let Ok(()) = result else { break };
        let least = row.figure(LEAST).and_then(|figure| figure.samples.last().copied());
        let least = Unit::Millis.show(least.unwrap_or(f64::NAN));
        eprintln!("round {round}/{rounds}  {LEAST} {least}");
    }
    if let Some(least) = row.figure(LEAST) {
        let least = least.samples.iter().copied().fold(f64::INFINITY, f64::min);
        row.remarks.push(format!("smallest margin of all rounds: {least:.0} ms"));
        if least < 0.0 {
            table.faults.push(format!("a loss was told {:.0} ms after the deadline", -least));
        }
    }
    table.rows = vec![row];
    result.map_err(|error| format!("{error}\n{}", gateway.process.log_tail()))
}

const LEAST: &str = "least margin ms";
const MEMORY: &str = "memory per stream, bytes";

struct Run<'a> {
    streams: u32,
    masters: &'a Masters,
    gateway: &'a Running,
}

impl Run<'_> {
    /// Opens the streams, lets them extend their locks, and stops a majority of the masters.
    async fn round(&self, row: &mut Row) -> Result<(), String> {
        // The first requests make allocations that the gateway keeps. After a stop of the masters,
        // this also waits until they serve again.
        let mut connection = self.gateway.target.open().await?;
        let began = Instant::now();
        while probe(&mut connection, Duration::from_secs(1)).await?.failed > 0 {
            if began.elapsed() > PATIENCE {
                return Err(format!("acquires still fail after {PATIENCE:?}"));
            }
        }
        let before = self.gateway.process.memory()?.now;
        let open = Arc::new(AtomicU32::new(0));
        let mut pool = self.open(open.clone())?;
        let began = Instant::now();
        while open.load(Ordering::Relaxed) < self.streams {
            pool.run_for(CHECK_EVERY).await?;
            if began.elapsed() > PATIENCE {
                return Err(format!("not all streams are open after {PATIENCE:?}"));
            }
        }
        let read = || Accounts::read([&self.gateway.process], self.masters.cpu()?);
        let began = read()?;
        // Each stream extends its lock at least once.
        pool.run_for(TTL / 2).await?;
        let cpu = read()?.since(&began);
        // Later rounds use memory that the first one has freed.
        if row.figure(MEMORY).is_none() {
            let memory = self.gateway.process.memory()?.now - before;
            row.add(MEMORY, Unit::Count, memory / f64::from(self.streams));
        }
        let busy = cpu.server.as_secs_f64() * 100.0 / cpu.elapsed.as_secs_f64();
        row.add("its CPU", Unit::Percent, busy);
        cpu.add_others_to(row);

        let stopped = self.masters.stop_majority()?;
        let margins = pool.finish(TTL + PATIENCE).await?;
        stopped.end().await?;
        row.add(LEAST, Unit::Millis, margins.iter().copied().fold(f64::INFINITY, f64::min));
        row.add("median margin ms", Unit::Millis, median(margins));
        Ok(())
    }

    /// Starts the streams. Each ends with its margin in milliseconds.
    fn open(&self, open: Arc<AtomicU32>) -> Result<WorkerPool<f64>, String> {
        let address = self.gateway.target.address;
        let opening = Arc::new(Semaphore::new(OPENING));
        WorkerPool::start(self.streams, 1, move |_, _| {
            let (open, opening) = (open.clone(), opening.clone());
            async move {
                let permit = opening.acquire().await.map_err(|error| error.to_string())?;
                let body = format!(r#"{{"ttl_ms":{}}}"#, TTL.as_millis());
                let path = path(rand::random());
                let sent = Instant::now();
                let mut stream = EventStream::open(address, "POST", &path, &body).await?;
                let granted = stream.event().await?;
                if !granted.contains("event: granted") {
                    return Err(format!("a stream began with {granted:?}"));
                }
                drop(permit);
                open.fetch_add(1, Ordering::Relaxed);
                let mut until = deadline(sent, &granted)?;
                loop {
                    let event = stream.event().await?;
                    if event.contains("event: extended") {
                        until = deadline(sent, &event)?;
                    } else if event.contains("event: lost") {
                        return Ok(margin(until, Instant::now()));
                    } else if event.contains("event:") && !event.contains("event: unknown") {
                        return Err(format!("a stream got {event:?}"));
                    }
                }
            }
        })
    }
}

/// Until when the client may rely on the lock.
fn deadline(sent: Instant, event: &str) -> Result<Instant, String> {
    let field = |name| number(event, name).ok_or_else(|| format!("{event:?} has no {name}"));
    Ok(sent + Duration::from_millis(field("elapsed_ms")? + field("validity_ms")?))
}

/// Milliseconds from `now` to the deadline, below zero after it.
fn margin(deadline: Instant, now: Instant) -> f64 {
    let ahead = deadline.saturating_duration_since(now).as_secs_f64();
    (ahead - now.saturating_duration_since(deadline).as_secs_f64()) * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_told_too_late_has_a_margin_below_zero() {
        let sent = Instant::now();
        let event = r#"event: extended {"validity_ms":900,"elapsed_ms":100}"#;
        let deadline = deadline(sent, event).unwrap();
        assert_eq!(margin(deadline, sent + Duration::from_millis(400)).round(), 600.0);
        assert_eq!(margin(deadline, sent + Duration::from_millis(1_250)).round(), -250.0);
    }
}
