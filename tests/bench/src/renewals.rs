//! Extensions of held locks: one lock with each request, and many with each request. The same masters,
//! gateway and locks serve all of them in turn, in one run.
//!
//! Every connection has its own share of the locks, and extends them one after another. The locks
//! outlive the run: their first TTL is the longest one, and an extension never shortens a lock.

use std::time::Duration;

use hyper::Method;

use crate::client::{Connection, Target, path};
use crate::contenders::{Programs, Running};
use crate::load::{HELD_BODY, STOP_WITHIN, share};
use crate::masters::Masters;
use crate::report::{Row, Table, Unit};
use crate::servers::Accounts;
use crate::worker_pool::WorkerPool;

const WARM_UP: Duration = Duration::from_millis(500);
/// The rows: the leases in one request, and the connections.
const ROWS: [(usize, u32); 3] = [(1, 64), (100, 16), (1_000, 4)];
const RATE: &str = "renewals/s";
const BODY: &str = r#"{"ttl_ms":30000}"#;

/// Measures extensions. `locks` is a multiple of the leases times the connections of each row. The
/// function starts processes, so it must be called on the main thread.
pub(crate) async fn measure(
    programs: &Programs,
    (window, rounds): (Duration, u32),
    locks: u64,
    threads: u32,
    table: &mut Table,
) -> Result<(), String> {
    let setup = programs.set_up(&[]).await?;
    let (gateway, masters) = (&setup.gateway, &setup.masters);
    eprintln!("acquiring {locks} locks");
    let tokens = take(&gateway.target, locks, threads).await?;
    let name = |leases: usize| match leases {
        1 => "PATCH /locks/{name}".to_owned(),
        _ => format!("PATCH /locks, {leases} leases"),
    };
    table.rows = ROWS.iter().map(|(leases, _)| Row::new(&name(*leases))).collect();
    for round in 0..rounds as usize {
        for turn in 0..ROWS.len() {
            let at = (turn + round) % ROWS.len();
            let run = Turn { masters, gateway, window, threads };
            let row = &mut table.rows[at];
            if let Err(error) = run.measure(ROWS[at], &tokens, row).await {
                let log = gateway.process.log_tail();
                table.faults.push(format!("{}: {error}\n{log}", row.name));
            }
            let last = row.figure(RATE).and_then(|figure| figure.samples.last().copied());
            let rate = Unit::Rate.show(last.unwrap_or(f64::NAN));
            eprintln!("round {}/{rounds}  {:<28} {rate:>8} {RATE}", round + 1, row.name);
        }
    }
    let single = table.rows[0].clone();
    table.rows.iter_mut().for_each(|row| row.divide("÷ single", RATE, &single));
    Ok(())
}

/// Acquires so many locks, numbered from 0. Returns their tokens in this order.
pub(crate) async fn take(target: &Target, locks: u64, threads: u32) -> Result<Vec<String>, String> {
    let connections = ROWS[0].1;
    let target = target.clone();
    let pool = WorkerPool::start(connections, threads, move |worker, _| {
        let target = target.clone();
        async move {
            let mut connection = target.open().await?;
            let mut tokens = Vec::new();
            for lock in share(locks, worker, connections) {
                tokens.push((lock, connection.settled_acquire(lock, HELD_BODY).await?));
            }
            Ok(tokens)
        }
    })?;
    let taken = pool.finish(Duration::from_secs(120)).await?;
    let mut taken: Vec<_> = taken.into_iter().flatten().collect();
    taken.sort_unstable();
    Ok(taken.into_iter().map(|(_, token)| token).collect())
}

struct Turn<'a> {
    masters: &'a Masters,
    gateway: &'a Running,
    window: Duration,
    threads: u32,
}

/// What one connection has done.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) extended: u64,
    pub(crate) errors: u64,
    pub(crate) first_error: Option<String>,
}

impl Turn<'_> {
    async fn measure(
        &self,
        (leases, connections): (usize, u32),
        tokens: &[String],
        row: &mut Row,
    ) -> Result<(), String> {
        // The requests are built before the turn, so that their making does not count as load.
        let requests: Vec<Vec<Ask>> = (0..connections)
            .map(|worker| {
                let locks: Vec<_> = share(tokens.len() as u64, worker, connections).collect();
                locks.chunks(leases).map(|locks| Ask::new(locks, tokens)).collect()
            })
            .collect();
        let target = self.gateway.target.clone();
        let requests = std::sync::Arc::new(requests);
        let threads = self.threads.min(connections);
        let mut pool = WorkerPool::start(connections, threads, move |worker, phase| {
            let (target, requests) = (target.clone(), requests.clone());
            async move {
                let mut connection = target.open().await?;
                let mut tally = Tally::default();
                let mut asks = requests[worker as usize].iter().cycle();
                while !phase.stops() {
                    let ask = asks.next().ok_or("a connection without a lock")?;
                    let extended = ask.send(&mut connection, &mut tally).await?;
                    if phase.counts() {
                        tally.extended += extended;
                    }
                }
                Ok(tally)
            }
        })?;
        pool.run_for(WARM_UP).await?;
        let read = || Accounts::read([&self.gateway.process], self.masters.cpu()?);
        let before = read()?;
        pool.count(true);
        pool.run_for(self.window).await?;
        pool.count(false);
        let cpu = read()?.since(&before);
        let tallies = pool.stop(STOP_WITHIN).await?;
        let extended = tallies.iter().map(|tally| tally.extended).sum::<u64>() as f64;
        row.add(RATE, Unit::Rate, extended / cpu.elapsed.as_secs_f64());
        cpu.add_to(row, "renewal", extended.max(1.0), threads, false);
        let errors = tallies.iter().map(|tally| tally.errors).sum::<u64>();
        let first = tallies.into_iter().find_map(|tally| tally.first_error);
        first.map_or(Ok(()), |first| Err(format!("{errors} errors, first: {first}")))
    }
}

/// One request, again and again.
pub(crate) struct Ask {
    path: String,
    token: String,
    body: String,
    leases: u64,
}

impl Ask {
    pub(crate) fn new(locks: &[u64], tokens: &[String]) -> Self {
        let token = |lock: u64| &tokens[lock as usize];
        if let [lock] = locks {
            let (path, token) = (path(*lock), token(*lock).clone());
            return Self { path, token, body: BODY.into(), leases: 1 };
        }
        let lease = |lock: &u64| {
            let name = path(*lock).replace("/locks/", "");
            format!(r#"{{"name":"{name}","token":"{}"}}"#, token(*lock))
        };
        let leases: Vec<_> = locks.iter().map(lease).collect();
        Self {
            path: "/locks".into(),
            token: String::new(),
            body: format!(r#"{{"ttl_ms":30000,"leases":[{}]}}"#, leases.join(",")),
            leases: leases.len() as u64,
        }
    }

    /// Sends the request. Returns how many locks were extended.
    pub(crate) async fn send(
        &self,
        connection: &mut Connection,
        tally: &mut Tally,
    ) -> Result<u64, String> {
        let answer = connection.ask(Method::PATCH, &self.path, &self.token, &self.body).await?;
        let text = std::str::from_utf8(&answer.body).unwrap_or_default();
        // To parse each answer would cost more than the gateway's own work.
        let extended = match self.leases {
            1 => u64::from(answer.status == 200),
            _ => text.matches(r#""status":200"#).count() as u64,
        };
        if extended != self.leases {
            tally.errors += self.leases - extended;
            tally.first_error.get_or_insert_with(|| answer.describe());
        }
        Ok(extended)
    }
}
