//! Measures one workload. Its contenders take turns within a round, and each round begins with
//! another contender.
//!
//! A contender leaves keys on its masters, above all its watermarks, which expire seconds later.
//! The next contender must not bear the cost of that. So each turn has new masters and a new
//! server, which end with the turn. Where many names or held locks make the preparation long, each
//! contender keeps its masters and server from the first round to the last.
//!
//! A workload with a twin is measured beside it. Each contender's turn is followed or preceded by
//! its turn in the twin, and the result is the ratio of the two.

use std::time::Duration;

use tempfile::TempDir;

use crate::contenders::{Contender, Programs, Running};
use crate::in_process;
use crate::load::{self, Holders, Names, Tally};
use crate::masters::Masters;
use crate::report::{LOAD_BUSY, OTHERS, Row, Table, Unit, thousands};
use crate::servers::{Accounts, Memory, scratch};
use crate::worker_pool::WorkerPool;
use crate::workload::{Spec, Workload};

/// Long enough to open connections, load scripts, and let batches grow to their usual size.
const WARM_UP: Duration = Duration::from_millis(500);
/// Long enough for a contender to notice, too, that a master fails.
const WARM_UP_WHEN_BROKEN: Duration = Duration::from_millis(1500);
pub(crate) const RATE: &str = "requests/s";
const P50: &str = "acquire p50 ms";
const P99: &str = "acquire p99 ms";
const CPU: &str = "its CPU µs/request";

/// A workload, and the options with which it is measured.
pub(crate) struct Stage<'a> {
    pub(crate) workload: Workload,
    pub(crate) spec: Spec,
    /// The contenders of the workload that the user asked for.
    pub(crate) lineup: Vec<Contender>,
    pub(crate) window: Duration,
    pub(crate) rounds: u32,
    /// The number of threads of the load, at most the number of connections.
    pub(crate) load_threads: u32,
    pub(crate) programs: &'a Programs,
}

/// One contender that is ready, with its own masters. The fields are dropped in this order.
struct Setup {
    contender: Contender,
    /// `None` for a library that runs in this program.
    server: Option<Running>,
    holders: Option<Holders>,
    masters: Masters,
    _scratch: TempDir,
}

/// A workload: the measured one, or its twin.
struct Side {
    spec: Spec,
    /// If the preparation takes long, one setup for each contender. Otherwise empty, because each
    /// turn makes a new one.
    prepared: Vec<Setup>,
}

impl Stage<'_> {
    /// Measures the workload. It starts processes, so it must be called on the main thread.
    pub(crate) async fn run(&self, table: &mut Table) -> Result<(), String> {
        let mut sides = vec![self.side(self.spec).await?];
        if let Some((_, twin)) = self.workload.twin() {
            sides.push(self.side(twin).await?);
        }
        table.rows = self.lineup.iter().map(|contender| Row::new(contender.label())).collect();
        for round in 0..self.rounds as usize {
            for turn in 0..self.lineup.len() {
                let at = (turn + round) % self.lineup.len();
                let row = &mut table.rows[at];
                if let Err(error) = self.turns(&sides, at, round, row, &mut table.faults).await {
                    table.faults.push(format!("{}: {error}", row.name));
                }
                let last = |figure| {
                    row.figure(figure).and_then(|it| it.samples.last().copied()).unwrap_or(f64::NAN)
                };
                let seen =
                    format!("{:>8} {RATE}, acquire p99 {:.2} ms", thousands(last(RATE)), last(P99));
                eprintln!("round {}/{}  {:<22} {seen}", round + 1, self.rounds, row.name);
            }
        }
        self.compare(table);
        for prepared in sides.iter_mut().flat_map(|side| &mut side.prepared) {
            if let Some(holders) = prepared.holders.take() {
                // If a lock was lost during the measurement, this reports it.
                table.faults.extend(holders.release().await.err());
            }
        }
        Ok(())
    }

    async fn side(&self, spec: Spec) -> Result<Side, String> {
        let mut prepared = Vec::new();
        if spec.takes_long_to_prepare() {
            for &contender in &self.lineup {
                eprintln!("preparing {}", contender.label());
                prepared.push(self.setup(contender, &spec).await?);
            }
        }
        Ok(Side { spec, prepared })
    }

    /// Runs a contender's turn, and directly before or after it the turn in the twin. Adds the
    /// figures of both turns, or none if one of them fails.
    async fn turns(
        &self,
        sides: &[Side],
        at: usize,
        round: usize,
        row: &mut Row,
        faults: &mut Vec<String>,
    ) -> Result<(), String> {
        let mut rows = vec![Row::new(&row.name); sides.len()];
        // The sides take turns in being first. So if the machine becomes faster or slower, neither
        // side gains.
        for turn in 0..sides.len() {
            let side = (turn + round) % sides.len();
            self.turn(&sides[side], at, &mut rows[side], faults).await?;
        }
        let mine = rows.remove(0);
        for figure in &mine.figures {
            row.add(&figure.name, figure.unit, figure.median());
        }
        for other in rows {
            for figure in [RATE, P99] {
                if let (Some(mine), Some(other)) = (mine.median(figure), other.median(figure)) {
                    row.add(&format!("{figure} ÷ twin"), Unit::Ratio, mine / other);
                }
            }
            row.remarks.extend(other.remarks);
        }
        row.remarks.extend(mine.remarks);
        Ok(())
    }

    async fn turn(
        &self,
        side: &Side,
        at: usize,
        row: &mut Row,
        faults: &mut Vec<String>,
    ) -> Result<(), String> {
        let new;
        let setup = match side.prepared.get(at) {
            Some(prepared) => prepared,
            None => {
                new = self.setup(self.lineup[at], &side.spec).await?;
                &new
            }
        };
        self.measure(setup, &side.spec, row, faults)
            .await
            .map_err(|error| format!("{error}\n{}", setup.log_tail()))
    }

    async fn setup(&self, contender: Contender, spec: &Spec) -> Result<Setup, String> {
        let scratch = scratch()?;
        let masters = Masters::start(spec.condition, &scratch).await?;
        let &Spec { connections, names, held, .. } = spec;
        if contender == Contender::Rslock {
            return Ok(Setup {
                contender,
                server: None,
                holders: None,
                masters,
                _scratch: scratch,
            });
        }
        let running = self.programs.start(contender, &masters, &scratch).await?;
        if let Names::Walk(count) = names {
            load::fill(&running.target, connections, self.load_threads, count).await?;
        }
        let mut holders = None;
        if held > 0 {
            let first: u64 = rand::random();
            let locks: Vec<_> =
                (0..u64::from(held)).map(|number| first.wrapping_add(number)).collect();
            holders = Some(Holders::take(&running.target, connections, &locks).await?);
        }
        Ok(Setup { contender, server: Some(running), holders, masters, _scratch: scratch })
    }

    /// Warms up, then counts between two readings of the clock and of all CPU times. The load
    /// already runs at the first reading, and still runs at the second.
    async fn measure(
        &self,
        setup: &Setup,
        spec: &Spec,
        row: &mut Row,
        faults: &mut Vec<String>,
    ) -> Result<(), String> {
        let masters = &setup.masters;
        let round_trip = masters.round_trip_ms().await?;
        let condition = masters.begin_turn()?;
        let mut load = self.load(setup, spec)?;
        load.run_for(if self.workload.breaks_masters() { WARM_UP_WHEN_BROKEN } else { WARM_UP })
            .await?;

        let process = || setup.server.as_ref().map(|server| &server.process);
        let calls_before = setup.calls().await?;
        let before = Accounts::read(process(), masters.cpu()?)?;
        load.count(true);
        load.run_for(self.window).await?;
        load.count(false);
        let cpu = Accounts::read(process(), masters.cpu()?)?.since(&before);
        let calls = setup.calls().await?;

        // The condition ends before the load: as long as a master is stopped, a request may hang.
        condition.end().await?;
        let tally = Tally::sum(load.stop(load::STOP_WITHIN).await?);
        let requests = tally.requests()?;
        row.add(RATE, Unit::Rate, requests / cpu.elapsed.as_secs_f64());
        cpu.add_to(row, "request", requests, self.load_threads, process().is_none());
        if let Some(((operations, calls), (operations_before, calls_before))) =
            calls.zip(calls_before)
        {
            row.add(
                "operations/call",
                Unit::Ratio,
                (operations - operations_before) / (calls - calls_before),
            );
        }
        tally.add_latencies_to(row);
        if spec.condition.is_far_away() {
            row.add("round trip ms", Unit::Millis, round_trip);
            // If one master is late, the other four decide. Then the round trip to the late one is
            // no bound for the latency.
            if let (Some(p50), false) = (row.median(P50), self.workload.breaks_masters()) {
                row.add("p50 ÷ round trip", Unit::Ratio, p50 / round_trip);
            }
        }
        let memory = process().map_or_else(Memory::own, |process| process.memory())?;
        row.add("RSS MiB", Unit::Mib, memory.now / 1_048_576.0);
        row.add("RSS max MiB", Unit::Mib, memory.peak / 1_048_576.0);
        if let Some(example) = &tally.first_error {
            let text = format!("{} ERRORS, first: {example}", tally.errors);
            // While a master fails, the naive contenders may fail too. Then their errors are
            // remarks in the table, and do not fail the run.
            if setup.contender.is_gateway() || !self.workload.breaks_masters() {
                faults.push(format!("{}: {text}", row.name));
            } else {
                row.remarks.push(text);
            }
        }
        Ok(())
    }

    fn load(&self, setup: &Setup, spec: &Spec) -> Result<WorkerPool<Tally>, String> {
        match &setup.server {
            Some(server) => {
                load::start(&server.target, spec.connections, self.load_threads, spec.names)
            }
            None => {
                let masters: Vec<_> = setup.masters.addresses().collect();
                in_process::start(&masters, spec.connections)
            }
        }
    }

    /// Adds the ratios within the run, and moves the figures about disturbances to the end.
    fn compare(&self, table: &mut Table) {
        let others = table.rows.clone();
        let find = |contender: Contender| others.iter().find(|row| row.name == contender.label());
        for row in &mut table.rows {
            for (name, figure, contender) in [
                ("÷ floor", RATE, Contender::Floor),
                ("÷ fred fenced", RATE, Contender::FredFenced),
                ("÷ rslock", RATE, Contender::Rslock),
                ("÷ gateway", RATE, Contender::Gateway),
                ("CPU ÷ no-op", CPU, Contender::Noop),
            ] {
                if let Some(other) = find(contender) {
                    row.divide(name, figure, other);
                }
            }
            row.figures.sort_by_key(|figure| matches!(figure.name.as_str(), LOAD_BUSY | OTHERS));
        }
    }
}

impl Setup {
    /// How many operations the gateway has sent to masters since its start, and in how many calls.
    /// `None` for a contender without metrics.
    async fn calls(&self) -> Result<Option<(f64, f64)>, String> {
        let Some(server) = self.server.as_ref().filter(|_| self.contender.is_gateway()) else {
            return Ok(None);
        };
        let mut connection = server.target.open().await?;
        let operations = connection.metric("redlock_batch_operations_sum").await?;
        Ok(operations.zip(connection.metric("redlock_batch_operations_count").await?))
    }

    fn log_tail(&self) -> String {
        self.server.as_ref().map(|server| server.process.log_tail()).unwrap_or_default()
    }
}
