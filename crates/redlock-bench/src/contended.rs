//! Many workers, one lock: what waiting in the gateway gives beside polling, the usual default of lock libraries.
//!
//! Every worker is one keep-alive connection that wants the lock, holds it, releases it and wants it again at once. Two
//! contenders ask with `wait_ms` and are queued by the gateway; two ask with `wait_ms` 0 and on 409 sleep for a random
//! 50 to 200 ms. Each is there once with one gateway and once with two gateways over the same masters and half of the
//! workers at each. Gateways are started anew for each turn, so that none idles beside the one that is measured.
//!
//! Grants per second mislead: without a queue the releaser takes the lock again while the others sleep. So what counts
//! are hand-offs, grants that went to another worker than the one before in the order of fencing tokens, and how long
//! workers go without. Every grant of a turn is also checked against its neighbours: fencing tokens rise without
//! duplicates and no two holders overlap.
//!
//! A wait is measured from the first request of a want to its 201, over all requests between. Answers that are neither
//! a grant nor the 409 of a poll are counted by status; a few do not matter.

mod options;
mod report;
mod worker;

use std::path::Path;
use std::time::{Duration, Instant};

pub(crate) use self::options::{Contender, Options};
pub(crate) use self::report::Report;
use self::report::{Measurement, Turn};
use self::worker::{Job, Pace};
use crate::conditions::{Condition, Masters};
use crate::contenders::{Running, find_gateway, start_gateway};
use crate::http::Connection;
use crate::metrics::metric;
use crate::report::{JsonFile, Machine};
use crate::servers::{Accounts, Scratch};
use crate::worker_pool::WorkerPool;

/// Long enough for all workers to have queued up, or to have fallen out of step with one another.
const WARM_UP: Duration = Duration::from_secs(1);
/// What an answer may take beyond the wait it asked for.
const GRACE: Duration = Duration::from_secs(10);

pub(crate) async fn measure(options: &Options) -> Result<(), String> {
    let gateway = find_gateway(options.shared.gateway.as_deref())?;
    let json = JsonFile::create(options.shared.json.as_deref())?;
    let report = run(options, &gateway, Machine::look()?).await?;
    print!("{report}");
    json.write(&report)?;
    report.verdict()
}

/// Must be called on the main thread, because it starts processes.
pub(crate) async fn run(options: &Options, gateway: &Path, machine: Machine) -> Result<Report, String> {
    let lineup = options.lineup();
    let bench = Bench { options, gateway, machine, scratch: Scratch::create()? };
    let masters = Masters::start(Condition::Healthy, &bench.scratch).await?;
    let mut report = Report::new(bench.machine.clone(), options, bench.threads(), &lineup);
    for round in 0..options.rounds {
        for turn in 0..lineup.len() {
            let contender = lineup[(turn + round as usize) % lineup.len()];
            let measurement = bench.turn(contender, round, &masters).await?;
            eprintln!("round {}/{}  {:<9} {measurement}", round + 1, options.rounds, contender.label());
            report.add(contender, measurement);
        }
    }
    Ok(report)
}

struct Bench<'a> {
    options: &'a Options,
    gateway: &'a Path,
    machine: Machine,
    scratch: Scratch,
}

impl Bench<'_> {
    fn threads(&self) -> u32 {
        let default = (self.machine.cores as u32 / 2).max(1);
        self.options.load_threads.unwrap_or(default).min(self.options.workers)
    }

    /// Must be called on the main thread, because it starts processes.
    async fn turn(&self, contender: Contender, round: u32, masters: &Masters) -> Result<Measurement, String> {
        let mut gateways = Vec::with_capacity(contender.gateways());
        for number in 1..=contender.gateways() {
            let name = format!("{} gateway {number} round {}", contender.label(), round + 1);
            let more = &self.options.shared.gateway_arg;
            gateways.push(start_gateway(&name, self.gateway, masters, more, &self.scratch).await?);
        }
        self.measure(contender, &gateways, masters).await.map_err(|error| {
            let logs: Vec<_> = gateways.iter().map(|gateway| gateway.process.log_tail()).collect();
            format!("{}: {error}\n{}", contender.label(), logs.join("\n"))
        })
    }

    /// Warm up, then count between two looks at the clock and at everybody's CPU time, while the load goes on across
    /// both.
    async fn measure(
        &self,
        contender: Contender,
        gateways: &[Running],
        masters: &Masters,
    ) -> Result<Measurement, String> {
        let options = self.options;
        let job = Job {
            gateways: gateways.iter().map(|gateway| gateway.address).collect(),
            // A lock of its own for each turn: nothing that one leaves behind disturbs the next.
            lock: rand::random(),
            pace: if contender.waits() { Pace::Wait(Duration::from_millis(options.wait_ms)) } else { Pace::Poll },
            hold: Duration::from_millis(options.hold_ms),
        };
        let start = Instant::now();
        let mut pool = WorkerPool::start(options.workers, self.threads(), move |worker, phase| {
            worker::work(job.clone(), worker, phase)
        })?;
        pool.run_for(WARM_UP).await?;

        let remote_before = remote_handoffs(gateways).await?;
        let processes = || gateways.iter().map(|gateway| &gateway.process);
        let (from, before) = (Instant::now(), Accounts::look(processes(), masters.cpu()?)?);
        pool.run_for(Duration::from_secs(options.seconds)).await?;
        let (until, after) = (Instant::now(), Accounts::look(processes(), masters.cpu()?)?);

        let remote = remote_handoffs(gateways).await?.zip(remote_before).map(|(after, before)| after - before);

        let queue = Duration::from_millis(options.wait_ms + options.hold_ms * u64::from(options.workers));
        let logs = pool.stop(queue + GRACE).await?;
        let turn = Turn { start, from, until, workers: options.workers, gateways: gateways.len() };
        Measurement::new(logs, &turn, after.since(&before), self.threads(), remote)
    }
}

/// What the gateways say of themselves: how often one of them took over a lock that another one's holder let go. `None`
/// when they do not say.
async fn remote_handoffs(gateways: &[Running]) -> Result<Option<f64>, String> {
    let mut sum = None;
    for gateway in gateways {
        let mut connection = Connection::open(gateway.address).await?;
        let answer = connection.get("/metrics").await?;
        let text = String::from_utf8_lossy(answer.body);
        if let Some(count) = metric(&text, r#"redlock_handoffs_total{kind="remote"}"#) {
            sum = Some(sum.unwrap_or_default() + count);
        }
    }
    Ok(sum)
}
