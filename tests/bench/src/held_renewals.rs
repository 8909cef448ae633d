//! Very many held locks, each extended once in 10 s, 1,000 with each request. This module measures
//! what a held lock costs: memory in the gateway and the masters, and CPU time for each extension. If
//! the cost is flat, the rows agree.
//!
//! Each row has masters and a gateway of its own. The requests have fixed times, so a request that
//! comes late does not make the next one later.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval};

use crate::contenders::Programs;
use crate::load::{STOP_WITHIN, probe, share};
use crate::renewals::{Ask, Tally, take};
use crate::report::{Latencies, Row, Table, Unit, thousands};
use crate::servers::Accounts;
use crate::worker_pool::WorkerPool;

const LOCKS: [u64; 3] = [30_000, 100_000, 300_000];
/// How often each lock is extended.
const PERIOD: Duration = Duration::from_secs(10);
/// The shortest measurement. Each lock is extended twice.
const SHORTEST: Duration = Duration::from_secs(20);
const LEASES: usize = 1_000;
const CONNECTIONS: u32 = 4;
const WARM_UP: Duration = Duration::from_secs(1);
const CPU: &str = "its CPU µs/renewal";

/// Measures the held locks. It starts processes, so it must be called on the main thread.
pub(crate) async fn measure(
    programs: &Programs,
    window: Duration,
    quick: bool,
    threads: u32,
    table: &mut Table,
) -> Result<(), String> {
    for &locks in if quick { &LOCKS[..1] } else { &LOCKS } {
        let mut row = Row::new(&format!("{} locks", thousands(locks as f64)));
        let measured = row_of(programs, locks, window.max(SHORTEST), threads, &mut row).await;
        let cpu = Unit::Micros.show(row.median(CPU).unwrap_or(f64::NAN));
        eprintln!("{:<16} {cpu} {CPU}", row.name);
        if let Some(fewest) = table.rows.first() {
            row.divide("CPU ÷ fewest", CPU, fewest);
        }
        table.rows.push(row);
        measured?;
    }
    Ok(())
}

async fn row_of(
    programs: &Programs,
    locks: u64,
    window: Duration,
    threads: u32,
    row: &mut Row,
) -> Result<(), String> {
    let setup = programs.set_up(&[]).await?;
    let (gateway, masters) = (&setup.gateway, &setup.masters);
    let memory = || Ok::<_, String>((gateway.process.memory()?.now, masters.memory()?));
    // The first requests make allocations that stay. They must not count as the locks' memory.
    probe(&mut gateway.target.open().await?, WARM_UP).await?;
    let before = memory()?;
    eprintln!("acquiring {} locks", thousands(locks as f64));
    let tokens = take(&gateway.target, locks, threads).await?;
    let requests: Vec<Vec<Ask>> = (0..CONNECTIONS)
        .map(|worker| {
            let locks: Vec<_> = share(locks, worker, CONNECTIONS).collect();
            locks.chunks(LEASES).map(|locks| Ask::new(locks, &tokens)).collect()
        })
        .collect();
    let (target, requests) = (gateway.target.clone(), Arc::new(requests));
    let mut pool =
        WorkerPool::start(CONNECTIONS, threads.min(CONNECTIONS), move |worker, phase| {
            let (target, requests) = (target.clone(), requests.clone());
            async move {
                let mut connection = target.open().await?;
                let (mut tally, mut latencies) = (Tally::default(), Latencies::new());
                let asks = &requests[worker as usize];
                let mut ticks = interval(PERIOD / asks.len() as u32);
                ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
                for ask in asks.iter().cycle() {
                    let due = ticks.tick().await.into_std();
                    if phase.stops() {
                        break;
                    }
                    let extended = ask.send(&mut connection, &mut tally).await?;
                    if phase.counts() {
                        tally.extended += extended;
                        latencies.record(Instant::now().saturating_duration_since(due));
                    }
                }
                Ok((tally, latencies))
            }
        })?;
    // In this time each lock is extended for the first time, which also writes its watermark.
    pool.run_for(PERIOD).await?;
    let read = || Accounts::read([&gateway.process], masters.cpu()?);
    let began = read()?;
    pool.count(true);
    pool.run_for(window).await?;
    pool.count(false);
    let cpu = read()?.since(&began);
    let after = memory()?;
    let mut latencies = Latencies::new();
    let mut all = Tally::default();
    for (tally, of_connection) in pool.stop(STOP_WITHIN + PERIOD).await? {
        latencies.add(&of_connection);
        all.extended += tally.extended;
        all.errors += tally.errors;
        all.first_error = all.first_error.or(tally.first_error);
    }
    row.add("renewals/s", Unit::Rate, all.extended as f64 / cpu.elapsed.as_secs_f64());
    cpu.add_to(row, "renewal", (all.extended as f64).max(1.0), threads, false);
    row.add_latencies("answer after its time", &latencies);
    let each = |bytes: f64| bytes / locks as f64;
    row.add("gateway bytes/lock", Unit::Count, each(after.0 - before.0));
    row.add("masters' bytes/lock", Unit::Count, each(after.1 - before.1));
    match all.first_error {
        Some(first) => Err(format!("{} errors, first: {first}", all.errors)),
        None => Ok(()),
    }
}
