//! One workload, from the start of its masters to their end: its contenders take turns within a round, and each round
//! begins with another one. Masters and contenders are new for each workload, so that none suffers from what an earlier
//! one has left. A workload that has a twin runs beside it: each contender's turn is next to its turn as the twin, with
//! the twin's own masters and processes, and the ratio of the two is what counts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::conditions::{Condition, Masters};
use crate::contenders::{self, Contender, Programs, Running};
use crate::holders::Holders;
use crate::http::Connection;
use crate::in_process;
use crate::load::{self, Tally, Work};
use crate::metrics::metric;
use crate::report::{Circumstances, Entry, Figures, StageReport, median, micros};
use crate::servers::{self, Accounts, Scratch};
use crate::worker_pool::WorkerPool;
use crate::workload::{Names, Spec, Task, Workload};

/// Long enough for connections to be open, scripts to be loaded and batches to have grown.
const WARM_UP: Duration = Duration::from_millis(500);
/// And for a failing master to be known as one.
const WARM_UP_WHEN_BROKEN: Duration = Duration::from_millis(1500);

/// What to measure, and how.
pub(crate) struct Stage<'a> {
    pub(crate) workload: Workload,
    pub(crate) spec: Spec,
    /// Those of the spec's who were asked for.
    pub(crate) lineup: Vec<Contender>,
    pub(crate) window: Duration,
    pub(crate) rounds: u32,
    /// No more than there are connections.
    pub(crate) load_threads: u32,
    pub(crate) programs: &'a Programs,
    pub(crate) gateway_args: &'a [String],
}

/// A contender that is ready.
struct Prepared {
    contender: Contender,
    /// `None` of one that is a library and runs in this program.
    server: Option<Running>,
    work: Work,
    holders: Option<Holders>,
}

/// Masters under one condition, and contenders that are ready.
struct Setup<'a> {
    spec: &'a Spec,
    contenders: Vec<Prepared>,
    masters: Masters,
}

impl Stage<'_> {
    /// `tell` is called with what is going on and the share of the turns that are over. Must be called on the main
    /// thread, because it starts processes.
    pub(crate) async fn run(&self, mut tell: impl FnMut(&str, f64)) -> Result<StageReport, String> {
        let (scratch, twin_scratch) = (Scratch::create()?, Scratch::create()?);
        let twin = self.workload.twin();
        let twin = match &twin {
            Some((_, spec)) => Some(self.setup(spec, &twin_scratch, &mut tell).await?),
            None => None,
        };
        let setup = self.setup(&self.spec, &scratch, &mut tell).await?;
        let mut report = StageReport {
            workload: self.workload,
            connections: self.spec.connections,
            load_threads: self.load_threads,
            round_trip_us: None,
            contenders: self.lineup.iter().copied().map(Entry::new).collect(),
        };

        let turns = self.rounds as usize * self.lineup.len();
        let mut round_trips = Vec::with_capacity(self.rounds as usize);
        for number in 0..turns {
            let (round, turn) = (number / self.lineup.len(), number % self.lineup.len());
            if turn == 0 {
                round_trips.push(micros(setup.masters.measured_round_trip().await?));
            }
            let at = (turn + round) % self.lineup.len();
            let (prepared, entry) = (&setup.contenders[at], &mut report.contenders[at]);
            // Neither of the two always comes first: what the machine does between them must not favour one.
            let seen = match &twin {
                None => self.turn(&setup, prepared).await.map(|figures| (figures, None)),
                Some(twin) => self.pair(&setup, twin, at, round % 2 == 0).await,
            };
            let seen = match seen {
                Ok((figures, twin)) => {
                    let beside = twin.as_ref().map(|twin| format!("; its twin: {twin}")).unwrap_or_default();
                    let line = format!("{figures}{beside}");
                    entry.rounds.push(figures);
                    entry.twin.extend(twin);
                    line
                }
                Err(error) => {
                    let line = format!("FAILED: {error}\n{}", prepared.log_tail());
                    entry.failures.push(error);
                    line
                }
            };
            let line = format!("round {}/{}  {:<22} {seen}", round + 1, self.rounds, prepared.contender.label());
            tell(&line, (number + 1) as f64 / turns as f64);
        }

        let delayed = matches!(self.spec.condition, Condition::Late(_) | Condition::Network(_));
        report.round_trip_us = delayed.then(|| median(round_trips));

        for setup in [Some(setup), twin].into_iter().flatten() {
            for (prepared, entry) in setup.contenders.into_iter().zip(&mut report.contenders) {
                if let Some(holders) = prepared.holders {
                    // A lock that was lost meanwhile is told of here.
                    entry.failures.extend(holders.release().await.err());
                }
            }
        }
        Ok(report)
    }

    /// The figures of one contender, and those of its twin in the turn next to it; both or none.
    async fn pair(
        &self,
        setup: &Setup<'_>,
        twin: &Setup<'_>,
        at: usize,
        twin_first: bool,
    ) -> Result<(Figures, Option<Figures>), String> {
        let early = if twin_first { Some(self.turn(twin, &twin.contenders[at]).await?) } else { None };
        let figures = self.turn(setup, &setup.contenders[at]).await?;
        let twin = match early {
            Some(early) => early,
            None => self.turn(twin, &twin.contenders[at]).await?,
        };
        Ok((figures, Some(twin)))
    }

    async fn setup<'a>(
        &self,
        spec: &'a Spec,
        scratch: &Scratch,
        tell: &mut impl FnMut(&str, f64),
    ) -> Result<Setup<'a>, String> {
        let masters = Masters::start(spec.condition, scratch).await?;
        let mut contenders = Vec::with_capacity(self.lineup.len());
        for &contender in &self.lineup {
            tell(&format!("starting {}", contender.label()), 0.0);
            contenders.push(self.prepare(contender, spec, &masters, scratch, tell).await?);
        }
        Ok(Setup { spec, contenders, masters })
    }

    async fn prepare(
        &self,
        contender: Contender,
        spec: &Spec,
        masters: &Masters,
        scratch: &Scratch,
        tell: &mut impl FnMut(&str, f64),
    ) -> Result<Prepared, String> {
        let &Spec { connections, task, held, .. } = spec;
        let names = match task {
            Task::Cycle(names) => names,
            // Not used: the locks that are held are.
            Task::Extend => Names::Random,
        };
        let mut prepared = Prepared { contender, server: None, work: Work::Cycle(names), holders: None };
        if contender.is_in_process() {
            return Ok(prepared);
        }
        let running = contenders::start(contender, self.programs, masters, self.gateway_args, scratch).await?;
        let address = running.address;
        if let Names::Walk(names) = names {
            tell(&format!("using {names} names once"), 0.0);
            load::fill(address, connections, self.load_threads, names).await?;
        }
        if held > 0 {
            tell(&format!("acquiring {held} locks"), 0.0);
            let first: u64 = rand::random();
            let locks = (0..u64::from(held)).map(|number| first.wrapping_add(number)).collect();
            let holders = Holders::take(address, connections, locks).await?;
            if task == Task::Extend {
                prepared.work = Work::Extend(Arc::new(holders.shares()));
            }
            prepared.holders = Some(holders);
        }
        prepared.server = Some(running);
        Ok(prepared)
    }

    /// Warm up, then count between two looks at the clock and at everybody's CPU time, while the load goes on across
    /// both.
    async fn turn(&self, setup: &Setup<'_>, prepared: &Prepared) -> Result<Figures, String> {
        let masters = &setup.masters;
        let condition = masters.begin_turn()?;
        let mut load = self.load(setup, prepared)?;
        let warm_up = if self.workload.breaks_masters() { WARM_UP_WHEN_BROKEN } else { WARM_UP };
        load.run_for(warm_up).await?;

        let process = || prepared.server.as_ref().map(|server| &server.process);
        let calls_before = prepared.calls().await?;
        let (began, before) = (Instant::now(), Accounts::look(process(), masters.cpu()?)?);
        load.count(true);
        load.run_for(self.window).await?;
        load.count(false);
        let (elapsed, after) = (began.elapsed(), Accounts::look(process(), masters.cpu()?)?);
        let calls = prepared.calls().await?;

        // Before the load: a request may hang for as long as a master does.
        condition.end().await?;
        let tally = Tally::sum(load.stop(load::STOP_WITHIN).await?);
        let cpu = after.since(&before);
        let turn = Circumstances {
            elapsed,
            cpu: if prepared.server.is_some() { cpu } else { cpu.in_process() },
            load_threads: self.load_threads,
            operations_per_call: calls.zip(calls_before).and_then(|(after, before)| after.mean_since(before)),
            memory_bytes: process().map_or_else(servers::own_memory_bytes, |process| process.memory_bytes())?,
            peak_memory_bytes: process()
                .map_or_else(servers::own_peak_memory_bytes, |process| process.peak_memory_bytes())?,
        };
        Figures::new(&tally, &turn)
    }

    fn load(&self, setup: &Setup<'_>, prepared: &Prepared) -> Result<WorkerPool<Tally>, String> {
        let connections = setup.spec.connections;
        match &prepared.server {
            Some(server) => load::start(server.address, connections, self.load_threads, prepared.work.clone()),
            None => {
                let masters: Vec<_> = setup.masters.addresses().collect();
                in_process::start(&masters, connections)
            }
        }
    }
}

/// What a gateway says of its calls to masters, since it was started.
#[derive(Clone, Copy)]
struct Calls {
    operations: f64,
    calls: f64,
}

impl Calls {
    fn mean_since(self, before: Self) -> Option<f64> {
        let calls = self.calls - before.calls;
        (calls > 0.0).then(|| (self.operations - before.operations) / calls)
    }
}

impl Prepared {
    /// `None` of those who do not say.
    async fn calls(&self) -> Result<Option<Calls>, String> {
        let Some(server) = self.server.as_ref().filter(|_| self.contender.is_gateway()) else {
            return Ok(None);
        };
        let mut connection = Connection::open(server.address).await?;
        let answer = connection.get("/metrics").await?;
        let text = String::from_utf8_lossy(answer.body);
        let read = |name| metric(&text, name);
        let (operations, calls) = (read("redlock_batch_operations_sum"), read("redlock_batch_operations_count"));
        Ok(operations.zip(calls).map(|(operations, calls)| Calls { operations, calls }))
    }

    fn log_tail(&self) -> String {
        self.server.as_ref().map(|server| server.process.log_tail()).unwrap_or_default()
    }
}
