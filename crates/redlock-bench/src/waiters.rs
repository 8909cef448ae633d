//! Very many requests that wait at the same time, at one gateway: what each costs in memory, how long all of them take
//! to be served, whether those that hang up are forgotten, whether those that get nothing are told so in time, and what
//! everybody else notices of it.
//!
//! Every waiter is one keep-alive connection. A name is held by a holder while its waiters queue up, so that nobody is
//! served before all of them wait, which the gateway's own gauge says. Requests are sent spread over a short while
//! (`--ramp-ms`), or the figures would be those of a stampede.
//!
//! | part | holders | waiters |
//! | --- | --- | --- |
//! | memory and service | let go when all wait | release at once when granted |
//! | disconnects | let go when the gateway has noticed | half hang up, by FIN and by RST; the others release at once |
//! | punctuality | hold throughout | are answered 409 lock_held when their time is over |
//!
//! The waiters, their holders and the probe share one thread here, which costs less than threads would. So how long
//! serving takes includes this program's own share of work; the memory and the probe while all wait do not.

mod gateway;
mod options;
mod report;
mod waiter_load;

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use self::gateway::{Gateway, LOOK_EVERY, shown};
use self::options::OTHER_FILES;
pub(crate) use self::options::Options;
pub(crate) use self::report::Report;
use self::report::{Lateness, Service};
use self::waiter_load::{Outcome, WaiterLoad};
use crate::conditions::{Condition, Masters};
use crate::contenders::find_gateway;
use crate::holders::Holders;
use crate::report::{JsonFile, Machine, millis};
use crate::servers::Scratch;

/// For everything that has no time limit of its own.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between the last waiter's arrival and the look at the memory.
const SETTLE: Duration = Duration::from_millis(300);
/// One in so many waiters may be answered too early before a part is given up.
const MAX_EARLY_PART: u64 = 100;
/// Connections that the holders share.
const HOLDER_CONNECTIONS: u32 = 8;
pub(crate) async fn measure(options: &Options) -> Result<(), String> {
    let gateway = find_gateway(options.shared.gateway.as_deref())?;
    let json = JsonFile::create(options.shared.json.as_deref())?;
    let report = run(options, &gateway, Machine::look()?).await?;
    print!("{report}");
    json.write(&report)?;
    report.verdict()
}

/// Must be called on the main thread, because it starts processes.
pub(crate) async fn run(options: &Options, program: &Path, machine: Machine) -> Result<Report, String> {
    options.check()?;
    allow_open_files(u64::from(options.waiters) + OTHER_FILES)?;
    let mut report = Report::new(machine, options);
    let scratch = Scratch::create()?;
    let masters = Masters::start(Condition::Healthy, &scratch).await?;
    let mut gateway = Gateway::start(program, &masters, &options.gateway_args(), &scratch).await?;
    let mut run = Run {
        waiters: u64::from(options.waiters),
        wait: Duration::from_millis(options.wait_ms),
        ramp: Duration::from_millis(options.ramp_ms),
        probe: Duration::from_secs(options.probe_seconds),
        load: WaiterLoad::new(gateway.address(), options.waiters, options.names),
        early: Vec::new(),
        gateway: &mut gateway,
        report: &mut report,
    };
    let result = run.all_parts(Duration::from_millis(options.short_wait_ms)).await;
    result.map_err(|error| format!("{error}\n{}", gateway.log_tail()))?;
    Ok(report)
}

struct Run<'a> {
    waiters: u64,
    wait: Duration,
    ramp: Duration,
    probe: Duration,
    load: WaiterLoad,
    /// Answered while the lock was held.
    early: Vec<Outcome>,
    gateway: &'a mut Gateway,
    report: &'a mut Report,
}

impl Run<'_> {
    async fn all_parts(&mut self, short: Duration) -> Result<(), String> {
        self.memory_and_service().await.map_err(|error| format!("memory and service: {error}"))?;
        self.disconnects().await.map_err(|error| format!("disconnects: {error}"))?;
        self.punctuality(short).await.map_err(|error| format!("punctuality: {error}"))?;
        self.report.memory_at_the_end = self.gateway.memory_bytes()?;
        Ok(())
    }

    async fn memory_and_service(&mut self) -> Result<(), String> {
        // What the gateway allocates once and for all must not be charged to the waiters.
        Holders::take(self.gateway.address(), HOLDER_CONNECTIONS, self.load.locks()).await?.release().await?;
        self.gateway.probe(Duration::from_secs(1)).await?;
        self.report.memory_before = self.gateway.memory_bytes()?;

        eprintln!("opening {} connections", self.waiters);
        self.load.fill().await?;
        self.report.probe_idle = self.gateway.probe(self.probe).await?.into();
        self.report.memory_idle = self.gateway.memory_bytes()?;

        let holders = self.all_wait(self.wait).await?;
        tokio::time::sleep(SETTLE).await;
        self.report.memory_waiting = self.gateway.memory_bytes()?;
        self.report.probe_waiting = self.gateway.probe(self.probe).await?.into();

        self.report.service = self.serve_all(holders).await?;
        self.nothing_is_left().await
    }

    async fn disconnects(&mut self) -> Result<(), String> {
        self.load.prepare_to_reset()?;
        let holders = self.all_wait(self.wait).await?;
        let began = Instant::now();
        let closed = self.load.hang_up();
        eprintln!("{closed} hang up");
        self.until_waiting(self.waiters - closed).await?;
        self.report.disconnected = closed;
        self.report.disconnects_noticed_ms = millis(began.elapsed());

        self.report.service_after_disconnects = self.serve_all(holders).await?;
        self.nothing_is_left().await
    }

    async fn punctuality(&mut self, wait: Duration) -> Result<(), String> {
        self.load.fill().await?;
        let holders = Holders::take(self.gateway.address(), HOLDER_CONNECTIONS, self.load.locks()).await?;
        eprintln!("{} wait for {wait:?} in vain", self.waiters);
        self.load.send(wait, self.ramp);
        let outcomes = within(wait + self.ramp + PATIENCE, self.load.all()).await?;
        self.report.lateness = Lateness::of(&outcomes, wait);
        self.expect_all(&outcomes, Outcome::is_held, "409 lock_held");
        holders.release().await?;
        self.nothing_is_left().await
    }

    /// Returns the holders of all names when the gateway says that everybody waits.
    async fn all_wait(&mut self, wait: Duration) -> Result<Holders, String> {
        let holders = Holders::take(self.gateway.address(), HOLDER_CONNECTIONS, self.load.locks()).await?;
        eprintln!("{} wait", self.waiters);
        self.load.send(wait, self.ramp);
        self.early.clear();
        self.until_waiting(self.waiters).await?;
        Ok(holders)
    }

    /// Until the gateway says that so many wait, less those who were answered although the lock was held; a few of them
    /// do not spoil the figures, but are a fault.
    async fn until_waiting(&mut self, waiters: u64) -> Result<(), String> {
        let began = Instant::now();
        loop {
            let count = self.gateway.metric("redlock_waiters").await?;
            self.early.extend(self.load.answered()?);
            let early = self.early.len() as u64;
            if early > self.waiters / MAX_EARLY_PART {
                let example = self.early[0].describe();
                return Err(format!("{early} were answered while the lock was held, first: {example}"));
            }
            let expected = waiters.saturating_sub(early);
            if count == Some(expected as f64) {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                return Err(format!("redlock_waiters is {} after {PATIENCE:?}, not {expected}", shown(count)));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    async fn serve_all(&mut self, holders: Holders) -> Result<Service, String> {
        let began = Instant::now();
        let (mut outcomes, ()) =
            within(self.wait + PATIENCE, async { tokio::try_join!(self.load.all(), holders.release()) }).await?;
        let service = Service::of(&outcomes, began);
        self.report.faults.extend(service.fault());
        eprintln!("{} served within {:.2} s", outcomes.len(), service.last_grant_ms / 1e3);
        outcomes.append(&mut self.early);
        self.expect_all(&outcomes, Outcome::is_granted_and_released, "201 and 204");
        Ok(service)
    }

    fn expect_all(&mut self, outcomes: &[Outcome], expected: fn(&Outcome) -> bool, words: &str) {
        let others: Vec<_> = outcomes.iter().filter(|outcome| !expected(outcome)).collect();
        if let Some(first) = others.first() {
            let (count, all) = (others.len(), outcomes.len());
            let text = first.describe();
            self.report.faults.push(format!("{count} of {all} were not answered with {words}, first: {text}"));
        }
    }

    async fn nothing_is_left(&mut self) -> Result<(), String> {
        self.gateway.until_zero("redlock_waiters", PATIENCE).await?;
        self.gateway.until_zero("redlock_waiting_locks", PATIENCE).await?;
        self.gateway.until_no_lock_is_listed(PATIENCE).await
    }
}

async fn within<T>(time: Duration, work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    match tokio::time::timeout(time, work).await {
        Ok(result) => result,
        Err(_) => Err(format!("a waiter is still unanswered after {time:?}")),
    }
}

/// Children inherit the limit.
fn allow_open_files(needed: u64) -> Result<(), String> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if maximum.is_some_and(|maximum| maximum < needed) {
        let maximum = maximum.unwrap_or_default();
        return Err(format!(
            "{needed} files must be open at the same time, and no more than {maximum} may be: raise the hard limit \
             (`ulimit -Hn`, LimitNOFILE=), or have fewer --waiters"
        ));
    }
    eprintln!("raising the limit of open files from {} to {needed}", current.unwrap_or_default());
    setrlimit(Resource::Nofile, Rlimit { current: Some(needed), maximum })
        .map_err(|error| format!("cannot raise the limit of open files: {error}; try `ulimit -n {needed}`"))
}
