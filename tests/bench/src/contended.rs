//! Many workers and one lock. This module compares waiting in the gateway with polling, which is
//! the usual default of lock libraries.
//!
//! Every worker has one keep-alive connection. It acquires the lock, releases it, and asks again at
//! once. Waiting workers ask with `wait_ms`, and the gateway queues them. If there are two gateways
//! over the same masters, each has half of the workers. Polling workers ask with `wait_ms` 0. After
//! a 409 they sleep for a random time of 50 to 200 ms. Each turn has new masters and gateways.
//!
//! Grants per second would mislead: without a queue, the worker that released the lock takes it
//! again while the others sleep. So the figure is handoffs, that is, grants to another worker than
//! the one before, in the order of fencing tokens. Each grant of a turn is also compared with the
//! next one. No two grants may have the same fencing token, and no two holders may overlap.
//!
//! All times come from this machine's monotonic clock. A hold counts from the moment at which its
//! answer is read until just before its release is sent. The gateway promises exclusion for longer
//! than that. So an overlap is a violation and no artefact of the measurement. A wait lasts from a
//! worker's first request to the 201, over all requests in between.

use std::time::{Duration, Instant};

use tokio::time::sleep;

use crate::client::Target;
use crate::contenders::{Programs, Running};
use crate::masters::{Condition, Masters};
use crate::report::{Latencies, Row, Table, Unit, millis, thousands};
use crate::servers::{Accounts, Cpu, free_address, scratch};
use crate::worker_pool::{Phase, WorkerPool};

const WORKERS: u32 = 64;
const WAIT: Duration = Duration::from_secs(10);
/// Long enough for all waiting workers to queue up, and for polling workers to fall out of step.
const WARM_UP: Duration = Duration::from_secs(1);
/// How much later than its `wait_ms` an answer may come.
const GRACE: Duration = Duration::from_secs(10);
/// The time between two polls, in ms. It is the default of several Redlock libraries.
const POLL_EVERY: std::ops::RangeInclusive<u64> = 50..=200;
/// The pause after an unexpected answer, so that refused requests do not become the load.
const REFUSED_PAUSE: Duration = Duration::from_millis(20);
/// With a larger share of unexpected answers, the measured load would be another one.
const MAX_OTHERS: f64 = 0.01;
const REMOTE: &str = r#"redlock_handoffs_total{kind="remote"}"#;

struct Contender {
    name: &'static str,
    waits: bool,
    gateways: usize,
}

const CONTENDERS: [Contender; 3] = [
    Contender { name: "waiting, 1 gateway", waits: true, gateways: 1 },
    Contender { name: "waiting, 2 gateways", waits: true, gateways: 2 },
    Contender { name: "polling, 1 gateway", waits: false, gateways: 1 },
];

/// Measures all contenders. It starts processes, so it must be called on the main thread.
pub(crate) async fn measure(
    programs: &Programs,
    window: Duration,
    rounds: u32,
    threads: u32,
    table: &mut Table,
) -> Result<(), String> {
    let bench = Bench { programs, window, threads };
    table.rows = CONTENDERS.iter().map(|contender| Row::new(contender.name)).collect();
    for round in 0..rounds as usize {
        for turn in 0..CONTENDERS.len() {
            let at = (turn + round) % CONTENDERS.len();
            let row = &mut table.rows[at];
            bench.turn(&CONTENDERS[at], row, &mut table.faults).await?;
            let handoffs = thousands(row.median("handoffs/s").unwrap_or_default());
            eprintln!("round {}/{rounds}  {:<20} {handoffs} handoffs/s", round + 1, row.name);
        }
    }
    Ok(())
}

struct Bench<'a> {
    programs: &'a Programs,
    window: Duration,
    threads: u32,
}

impl Bench<'_> {
    async fn turn(
        &self,
        contender: &Contender,
        row: &mut Row,
        faults: &mut Vec<String>,
    ) -> Result<(), String> {
        let scratch = scratch()?;
        let masters = Masters::start(Condition::Healthy, &scratch).await?;
        let mut gateways = Vec::with_capacity(contender.gateways);
        for _ in 0..contender.gateways {
            let target = Target::plain(free_address()?);
            gateways.push(
                self.programs.start_gateway("gateway", target, "", &masters, &[], &scratch).await?,
            );
        }
        self.measure(contender, &masters, &gateways, row, faults).await.map_err(|error| {
            let logs: Vec<_> = gateways.iter().map(|gateway| gateway.process.log_tail()).collect();
            format!("{}: {error}\n{}", contender.name, logs.join("\n"))
        })
    }

    /// Warms up, then counts between two readings of the clock and of all CPU times. The load
    /// already runs at the first reading, and still runs at the second.
    async fn measure(
        &self,
        contender: &Contender,
        masters: &Masters,
        gateways: &[Running],
        row: &mut Row,
        faults: &mut Vec<String>,
    ) -> Result<(), String> {
        let lock = rand::random();
        let waits = contender.waits;
        let targets: Vec<_> = gateways.iter().map(|gateway| gateway.target.clone()).collect();
        let mut pool = WorkerPool::start(WORKERS, self.threads, move |worker, phase| {
            work(targets[worker as usize % targets.len()].clone(), lock, waits, worker, phase)
        })?;
        pool.run_for(WARM_UP).await?;

        let remote_before = remote_handoffs(gateways).await?;
        let read =
            || Accounts::read(gateways.iter().map(|gateway| &gateway.process), masters.cpu()?);
        let from = Instant::now();
        let before = read()?;
        pool.run_for(self.window).await?;
        let until = Instant::now();
        let after = read()?;
        let remote = remote_handoffs(gateways).await? - remote_before;
        let logs = pool.stop(WAIT + GRACE).await?;
        let turn = Turn { from, until, gateways: gateways.len(), threads: self.threads };
        turn.add_to(row, faults, logs, after.since(&before))?;
        row.add("remote handoffs/s", Unit::Count, remote / turn.seconds());
        Ok(())
    }
}

/// How often a waiter got the lock after a holder released it at another gateway, by the gateways'
/// own metrics.
async fn remote_handoffs(gateways: &[Running]) -> Result<f64, String> {
    let mut sum = 0.0;
    for gateway in gateways {
        sum += gateway.target.open().await?.metric(REMOTE).await?.unwrap_or_default();
    }
    Ok(sum)
}

#[derive(Debug, Clone, Copy)]
struct Grant {
    fencing_token: u64,
    worker: u32,
    wanted: Instant,
    received: Instant,
    released: Instant,
}

/// What one worker recorded, from its first request to its last.
#[derive(Default)]
struct Log {
    grants: Vec<Grant>,
    /// Answers that are neither a grant nor, when polling, a 409.
    others: Vec<String>,
}

async fn work(
    target: Target,
    lock: u64,
    waits: bool,
    worker: u32,
    phase: Phase,
) -> Result<Log, String> {
    let mut connection = target.open().await?;
    let mut log = Log::default();
    let body =
        format!(r#"{{"ttl_ms":30000,"wait_ms":{}}}"#, if waits { WAIT.as_millis() } else { 0 });
    let mut wanted = Instant::now();
    while !phase.stops() {
        let answer = connection.acquire(lock, &body).await?;
        let received = Instant::now();
        if let Some((token, fencing_token)) =
            answer.granted().and_then(|token| Some((token, fencing_token(token)?)))
        {
            log.grants.push(Grant {
                fencing_token,
                worker,
                wanted,
                received,
                released: Instant::now(),
            });
            connection.settled_release(lock, token).await?;
            wanted = Instant::now();
        } else if answer.status == 409 && !waits {
            sleep(Duration::from_millis(rand::random_range(POLL_EVERY))).await;
        } else {
            log.others.push(answer.describe());
            sleep(REFUSED_PAUSE).await;
        }
    }
    Ok(log)
}

/// Reads T out of a lock token, `1.<T>.<owner>`. That is cheaper than parsing the body.
fn fencing_token(lock_token: &str) -> Option<u64> {
    let (fencing, _owner) = lock_token.strip_prefix("1.")?.split_once('.')?;
    fencing.parse().ok()
}

/// Pairs of neighbouring grants that violate a promise: both have the same token, or the later one
/// was granted before the release of the earlier one. `grants` must be in the order of their
/// fencing tokens. If the result is empty, all grants exclude one another, and their tokens rise.
fn violations(grants: &[Grant]) -> Vec<String> {
    let is_wrong = |pair: &&[Grant]| {
        pair[0].fencing_token == pair[1].fencing_token || pair[1].received < pair[0].released
    };
    grants
        .windows(2)
        .filter(is_wrong)
        .map(|pair| format!("{:?} and {:?} overlap", pair[0], pair[1]))
        .collect()
}

/// The part of a turn that counts.
struct Turn {
    from: Instant,
    until: Instant,
    /// Number of gateways. Worker n uses the gateway with the number n modulo this.
    gateways: usize,
    threads: u32,
}

impl Turn {
    fn seconds(&self) -> f64 {
        (self.until - self.from).as_secs_f64()
    }

    /// Adds the figures of the turn. Fails if the lock was never granted.
    fn add_to(
        &self,
        row: &mut Row,
        faults: &mut Vec<String>,
        logs: Vec<Log>,
        cpu: Cpu,
    ) -> Result<(), String> {
        let mut grants = Vec::new();
        let mut others = Vec::new();
        for log in logs {
            grants.extend(log.grants);
            others.extend(log.others);
        }
        grants.sort_unstable_by_key(|grant| grant.fencing_token);
        let counts = |grant: &Grant| (self.from..self.until).contains(&grant.received);
        let handoffs = grants
            .windows(2)
            .filter(|pair| pair[0].worker != pair[1].worker && counts(&pair[1]))
            .count();
        let mut waits = Latencies::new();
        let mut longest = Duration::ZERO;
        let mut per_gateway = vec![0.0; self.gateways];
        for grant in grants.iter().filter(|grant| counts(grant)) {
            waits.record(grant.received - grant.wanted);
            longest = longest.max(grant.received - grant.wanted);
            per_gateway[grant.worker as usize % self.gateways] += 1.0;
        }
        let other = format!("{} other answers, first: {:?}", others.len(), others.first());
        if waits.count() == 0 {
            return Err(format!("the lock was never granted; {other}"));
        }
        let count = waits.count() as f64;
        let seconds = self.seconds();
        row.add("handoffs/s", Unit::Rate, handoffs as f64 / seconds);
        row.add("grants/s", Unit::Count, count / seconds);
        row.add_latencies("wait", &waits);
        row.add("wait max ms", Unit::Millis, millis(longest));
        row.add(
            "smallest share",
            Unit::Ratio,
            per_gateway.into_iter().fold(f64::MAX, f64::min) / count,
        );
        cpu.add_to(row, "grant", count, self.threads, false);

        if others.len() as f64 > MAX_OTHERS * 2.0 * grants.len() as f64 {
            faults.push(format!("{}: {other}", row.name));
        } else if !others.is_empty() {
            row.remarks.push(other);
        }
        faults.extend(
            violations(&grants).into_iter().next().map(|first| format!("{}: {first}", row.name)),
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The log of a worker. Each pair has two times in ms after `start`: when the worker asked for
    /// the lock, and when it got the lock.
    fn log(start: Instant, worker: u32, waits: &[(u64, u64)]) -> Log {
        let at = |ms| start + Duration::from_millis(ms);
        let grant = |&(wanted, received): &(u64, u64)| {
            let fencing_token = 1_000_000 + received;
            Grant {
                fencing_token,
                worker,
                wanted: at(wanted),
                received: at(received),
                released: at(received),
            }
        };
        Log { grants: waits.iter().map(grant).collect(), ..Log::default() }
    }

    fn measured(logs: Vec<Log>, start: Instant) -> Result<(Row, Vec<String>), String> {
        let ms = Duration::from_millis;
        let mut row = Row::new("a");
        let mut faults = Vec::new();
        let turn =
            Turn { from: start + ms(1000), until: start + ms(3000), gateways: 2, threads: 1 };
        let cpu =
            Cpu { server: ms(1), redis: ms(0), load: ms(2000), others: ms(0), elapsed: ms(2000) };
        turn.add_to(&mut row, &mut faults, logs, cpu).map(|()| (row, faults))
    }

    #[test]
    fn only_grants_within_the_measurement_count() {
        let start = Instant::now();
        let first = log(start, 0, &[(0, 500), (500, 1100), (1100, 2000), (2000, 3100)]);
        let (row, faults) =
            measured(vec![first, log(start, 1, &[(0, 1500), (1500, 1600)])], start).unwrap();
        let medians =
            ["grants/s", "handoffs/s", "wait max ms", "smallest share", "its CPU µs/grant"];
        let expected = [2.0, 1.0, 1500.0, 0.5, 250.0];
        assert_eq!(
            medians.map(|figure| row.median(figure)),
            expected.map(Some),
            "grants at 1100, 1500, 1600 and 2000"
        );
        assert_eq!(faults, Vec::<String>::new());
    }

    #[test]
    fn violations_and_many_other_answers_are_faults() {
        let start = Instant::now();
        let all: Vec<_> = (1000..1100).map(|at| (at, at)).collect();
        for (others, twice, faults) in [(1, false, 0), (100, false, 1), (0, true, 1)] {
            let mut logs = vec![log(start, 0, &all)];
            logs[0].others = vec!["503".into(); others];
            logs.extend(twice.then(|| log(start, 1, &[(1000, 1010)])));
            assert_eq!(measured(logs, start).unwrap().1.len(), faults);
        }
        assert!(measured(vec![Log::default()], start).is_err());
    }

    #[test]
    fn overlaps_and_sinking_tokens_are_violations() {
        let start = Instant::now();
        let grant = |fencing_token, received, released| {
            let at = |ms| start + Duration::from_millis(ms);
            Grant {
                fencing_token,
                worker: 0,
                wanted: start,
                received: at(received),
                released: at(released),
            }
        };
        assert!(violations(&[grant(5, 1, 2), grant(7, 2, 3), grant(8, 9, 9)]).is_empty());
        assert_eq!(violations(&[grant(5, 1, 3), grant(6, 2, 4)]).len(), 1);
        assert_eq!(violations(&[grant(5, 5, 6), grant(6, 1, 2)]).len(), 1);
    }

    #[test]
    fn fencing_token_is_read_out_of_a_lock_token() {
        assert_eq!(fencing_token("1.1795264376745353.c0d2"), Some(1_795_264_376_745_353));
        assert!(
            ["", "1", "1.2", "2.3.a", "1..a"].iter().all(|other| fencing_token(other).is_none())
        );
    }
}
