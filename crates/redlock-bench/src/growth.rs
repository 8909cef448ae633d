//! Millions of names, each used once: whether anything stays behind in the gateway.
//!
//! Connections acquire and release one name after the other, none of them twice, through one gateway. Meanwhile the
//! gateway's resident memory is looked at all the time; its growth is the slope of the straight line through what was seen
//! in the second half, which one sample more or less does not move. At the end no lock may be left on any master.
//!
//! Fences do stay for a while, on the masters: one key per name until 10 s after the lock would have ended, because it is what
//! refuses an acquire that arrives late, after its lock was released. So Redis has to have room for all names of that time, here
//! five minutes; how much each takes is measured too.

mod keys;
mod report;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;

use self::keys::{Keys, LOCK_PREFIX};
use self::report::{Report, Sample};
use crate::conditions::{Condition, MASTERS, Masters};
use crate::contenders::{EVERY_NAME, Running, find_gateway, start_gateway};
use crate::holders::settle;
use crate::http::{Connection, write_acquire, write_release};
use crate::options::Shared;
use crate::report::{JsonFile, Machine};
use crate::servers::Scratch;
use crate::worker_pool::{Phase, WorkerPool};

/// The longest that a gateway grants by default: a lock that is left behind is still there when it is looked for.
const BODY: &str = r#"{"ttl_ms":300000}"#;
/// Between two looks at how far it is.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const STOP_WITHIN: Duration = Duration::from_secs(30);
/// For releases that the gateway still owes to a master.
const SETTLE_WITHIN: Duration = Duration::from_secs(10);
/// What a fence takes on one master, about.
const FENCE_BYTES: u64 = 200;

const EXAMPLES: &str = "\
Examples:
  cargo build --release -p redlock-gateway && cargo run --release -p redlock-bench -- growth
  redlock-bench growth --cycles 500000 --json growth.json

Ten million cycles take about ten minutes and 10 GB: every name leaves a fence on every master for five minutes, its TTL, and 10 s, by design.
It exits with 1 when the gateway's memory grows, and when a lock is left on a master.";

/// Measures whether anything stays behind in the gateway when millions of names are used once.
///
/// Starts five redis-servers and one gateway, acquires and releases one name after the other, and prints how the memory of
/// the gateway went and what is left on the masters. Progress goes to stderr, the table to stdout.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// Names to acquire and release, each once
    #[arg(long, value_name = "N", default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1000..))]
    cycles: u64,

    /// Keep-alive connections, each with one request in flight
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    connections: u32,

    /// The most that the gateway's memory may grow per 1,000,000 cycles
    #[arg(long, value_name = "KIB", default_value_t = 256)]
    max_growth_kib_per_million: u64,

    /// Between two lines of progress
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    progress: u64,

    /// Threads of the load generator [default: half the cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    load_threads: Option<u32>,

    #[command(flatten)]
    shared: Shared,
}

pub(crate) async fn measure(options: &Options) -> Result<(), String> {
    let program = find_gateway(options.shared.gateway.as_deref())?;
    let json = JsonFile::create(options.shared.json.as_deref())?;
    let machine = Machine::look()?;
    let threads = options.load_threads.unwrap_or((machine.cores as u32 / 2).max(1)).min(options.connections);
    warn_of_memory(options.cycles)?;

    let scratch = Scratch::create()?;
    let masters = Masters::start(Condition::Healthy, &scratch).await?;
    let keys = Keys::connect(masters.addresses()).await?;
    let mut args = vec![format!("--key-prefix={LOCK_PREFIX}"), EVERY_NAME.to_owned()];
    args.extend(options.shared.gateway_arg.iter().cloned());
    let gateway = start_gateway("redlock-gateway", &program, &masters, &args, &scratch).await?;

    let max_growth = options.max_growth_kib_per_million as f64 * 1024.0;
    let mut report = Report::new(machine, options.connections, options.cycles, max_growth, keys.look().await?);
    run(options, threads, &gateway, &keys, &mut report)
        .await
        .map_err(|error| format!("{error}\n{}", gateway.process.log_tail()))?;

    print!("{report}");
    json.write(&report)?;
    report.verdict()
}

async fn run(
    options: &Options,
    threads: u32,
    gateway: &Running,
    keys: &Keys,
    report: &mut Report,
) -> Result<(), String> {
    let counts = Arc::new(Counts::default());
    let (address, shared) = (gateway.address, counts.clone());
    let began = Instant::now();
    let mut pool = WorkerPool::start(options.connections, threads, move |_, phase| {
        let counts = shared.clone();
        async move { work(&mut Connection::open(address).await?, &counts, &phase).await }
    })?;

    let every = Duration::from_secs(options.progress);
    let (mut printed, mut printed_cycles) = (Instant::now(), 0);
    loop {
        pool.run_for(LOOK_EVERY).await?;
        let cycles = counts.done.load(Ordering::Relaxed);
        let end = cycles >= options.cycles;
        if end || cycles >= report.next_sample() {
            report.add(Sample { cycles, gateway_bytes: gateway.process.memory_bytes()? });
        }
        if printed.elapsed() >= every {
            let rate = (cycles - printed_cycles) as f64 / printed.elapsed().as_secs_f64();
            (printed, printed_cycles) = (Instant::now(), cycles);
            let gateway_bytes = gateway.process.memory_bytes()?;
            eprintln!("{}", report.progress(&Sample { cycles, gateway_bytes }, rate, &keys.look().await?));
        }
        if end {
            break;
        }
    }
    report.elapsed = began.elapsed();
    let errors = pool.stop(STOP_WITHIN).await?;
    report.cycles = counts.done.load(Ordering::Relaxed);
    report.errors = errors.iter().map(|worker| worker.count).sum();
    report.first_error = errors.into_iter().find_map(|worker| worker.first);

    eprintln!("looking for locks");
    report.locks_left = keys.until_no_locks(SETTLE_WITHIN).await?;
    report.after = keys.look().await?;
    Ok(())
}

#[derive(Default)]
struct Counts {
    /// Names that were taken.
    begun: AtomicU64,
    done: AtomicU64,
}

/// Answers that were not the expected ones.
#[derive(Default)]
struct Errors {
    count: u64,
    first: Option<String>,
}

impl Errors {
    fn add(&mut self, text: String) {
        self.count += 1;
        self.first.get_or_insert(text);
    }
}

async fn work(connection: &mut Connection, counts: &Counts, phase: &Phase) -> Result<Errors, String> {
    let (mut errors, mut request) = (Errors::default(), Vec::with_capacity(512));
    while !phase.stops() {
        let name = counts.begun.fetch_add(1, Ordering::Relaxed);
        write_acquire(&mut request, name, BODY);
        let answer = connection.exchange(&request).await?;
        let (201, Some(token)) = (answer.status, answer.lock_token) else {
            errors.add(format!("POST was answered with {}", answer.describe()));
            continue;
        };
        write_release(&mut request, name, token);
        let answer = settle(connection, &request).await?;
        if !answer.is_released() {
            errors.add(format!("DELETE was answered with {}", answer.text));
        }
        counts.done.fetch_add(1, Ordering::Relaxed);
    }
    Ok(errors)
}

/// A machine that swaps, or kills a master, measures nothing.
fn warn_of_memory(cycles: u64) -> Result<(), String> {
    let path = "/proc/meminfo";
    let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?;
    let available = available_bytes(&text).ok_or_else(|| format!("{path} has no MemAvailable"))?;
    let needed = needed_bytes(cycles);
    if needed > available {
        let [needed, available] = [needed, available].map(|bytes| bytes.div_ceil(1 << 20));
        eprintln!(
            "WARNING: the fences of {cycles} names may take {needed} MiB and {available} MiB are available; try fewer \
             --cycles, unless the run takes much longer than five minutes, when the first fences expire"
        );
    }
    Ok(())
}

fn needed_bytes(cycles: u64) -> u64 {
    cycles.saturating_mul(FENCE_BYTES * MASTERS as u64)
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB"))?;
    Some(kib.trim().parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_can_be_had_is_not_only_what_is_free() {
        let meminfo = "MemTotal:       9 kB\nMemFree:        1 kB\nMemAvailable:   7 kB\n";
        assert_eq!(available_bytes(meminfo), Some(7 * 1024));
        assert_eq!(available_bytes("MemTotal: 9 kB\n"), None);
    }
}
