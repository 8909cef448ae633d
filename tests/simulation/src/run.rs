//! Runs a plan. It puts masters, network, gateways and clients on one paused clock and starts the
//! faults. Later it mends every fault and waits until the system has settled. Then it passes the
//! history to the checker.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::eligibility::NAME_MOVES_WITHIN;
use tokio::runtime::Builder;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::chance::{Chance, Stream};
use crate::checker::{Demand, Violation, check};
use crate::client::{Client, Habits, Registers, SLOTS};
use crate::faults::Stage;
use crate::foreign;
use crate::gateway::Gateway;
use crate::history::{History, Leftover, Recorder};
use crate::master::{FIRST_SLOT, Left, Master};
use crate::network::Network;
use crate::plan::{Plan, Scenario};
use crate::raise;
use crate::reconfigure;
use crate::time::{MAX_RATE_PPM, SimClock};

/// A history and its violations.
#[derive(Debug)]
pub struct HistoryResult {
    pub history: History,
    pub violations: Vec<Violation>,
}

/// Time from the end of all faults and requests until the final check. It is long enough for every
/// pending release to arrive. It is short enough that an orphan with the longest TTL still lives.
const SETTLE: Duration = Duration::from_millis(2_500);
/// The time within which a new cluster is in service, counted from the beginning.
const IN_SERVICE: Duration = Duration::from_secs(10);
/// The time within which every client gets its last answer. It is longer than any client's patience
/// and any series of its requests.
const LAST_ANSWER: Duration = Duration::from_secs(60);
/// After a name has moved, one gateway's connection to the old process breaks within this time.
const CUT_WITHIN_MS: u64 = 2_500;
/// After a name has moved, all gateways have noticed it within this time, or learned it from
/// another node.
const MOVE_TAKES: Duration = Duration::from_secs(9);
/// Interval at which the simulation polls a state that sends no notification.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Runs one history. The same plan gives the same history.
///
/// # Panics
/// When called on a tokio runtime.
pub fn run(plan: &Plan) -> HistoryResult {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime without I/O needs nothing from the system");
    let history = runtime.block_on(perform(Arc::new(plan.clone())));
    drop(runtime);
    let mut violations = check(&history);
    violations.retain(|violation| match violation.demand {
        // In the other scenarios a lock may be free for longer: clients leave locks behind, and
        // clocks stay wrong, long after the last fault.
        Demand::Idle => plan.scenario == Scenario::Queue,
        // The old process may have executed a release that the new process, with the file from
        // before, does not know. It stores that lock until the lock ends.
        // In a raise, a gateway with the shorter `max_ttl` may have started without reaching any
        // marker. It gives up a failed release by its own `max_ttl`.
        Demand::Orphan => !matches!(plan.scenario, Scenario::Moved | Scenario::Raise),
        _ => true,
    });
    HistoryResult { history, violations }
}

async fn perform(plan: Arc<Plan>) -> History {
    let start = Instant::now();
    let recorder = Arc::new(Recorder::new(start));
    let stage = set_up(plan.clone(), start, recorder.clone());
    reconfigure::prepare(&stage);
    raise::prepare(&stage);
    stage.gateways.iter().for_each(Gateway::start);
    recorder.situation(match plan.masters {
        1 => "histories of 1 master",
        2 => "histories of 2 masters",
        3 => "histories of 3 masters",
        4 => "histories of 4 masters",
        _ => "histories of more masters",
    });
    if plan.bootstrap_cuts {
        tokio::spawn(cut_bootstrap(stage.clone()));
    }
    // An operator confirms that the cluster is new.
    if let Some(redlock) = stage.gateways[0].redlock() {
        // The gateway with its own clock skew does not let the masters vote, so this bootstrap
        // never completes.
        let deadline = if plan.odd_skew.is_some() { start + IN_SERVICE } else { stage.until };
        let _ = timeout_at(deadline, redlock.bootstrap()).await;
    }

    if plan.scenario == Scenario::Queue {
        // The scenario is about the queue, so clients begin only once the cluster is in service.
        let _ = timeout_at(start + IN_SERVICE, in_service(&stage)).await;
    }
    let clients = begin_clients(&stage, start);
    match plan.scenario {
        Scenario::Storm | Scenario::Queue => stage.begin(),
        Scenario::Moved => drop(tokio::spawn(move_files(stage.clone()))),
        Scenario::Rolling | Scenario::Contended | Scenario::Young => {
            drop(tokio::spawn(roll(stage.clone())))
        }
        Scenario::Raise => {
            stage.begin();
            drop(tokio::spawn(raise::operate(stage.clone())));
        }
        Scenario::Reconfigure => {
            stage.begin();
            drop(tokio::spawn(reconfigure::operate(stage.clone())));
        }
    }

    sleep_until(stage.until).await;
    stage.mend();
    let last = stage.until + LAST_ANSWER;
    for client in clients {
        // A client without an answer by this time never gets one. The checker reports it.
        let _ = timeout_at(last, client).await;
    }
    sleep(SETTLE).await;
    let mut history = recorder.take();
    history.leftovers = leftovers(&stage);
    history.remaining = stage.gateways.iter().filter_map(Gateway::remaining).collect();
    history.reaches = stage.gateways.iter().flat_map(|gateway| gateway.reaches(start)).collect();
    history.end = start.elapsed();
    history
}

/// Starts the clients, including those of another library.
fn begin_clients(stage: &Stage, start: Instant) -> Vec<JoinHandle<()>> {
    let plan = &stage.plan;
    for index in 0..plan.foreign_clients {
        tokio::spawn(foreign::live(stage.clone(), index));
    }
    let registers = Arc::new(Registers::default());
    (0..plan.clients)
        .map(|index| {
            let mut chance = Chance::new(plan.seed, Stream::Client(index));
            let client = Client {
                index,
                clock: SimClock::new(start, chance.around(MAX_RATE_PPM), 0),
                chance,
                gateways: stage.gateways.clone(),
                names: plan.names,
                until: stage.until,
                recorder: stage.recorder.clone(),
                registers: registers.clone(),
                habits: plan.scenario.habits(index),
                keyed_percent: plan.keyed_percent,
                copies: plan.copies,
                set_percent: plan.set_percent,
                slots_percent: plan.slots_percent,
                deferred_percent: plan.deferred_percent,
                releases_unclaimed: plan.releases_unclaimed,
                hold_percent: plan.hold_percent,
                longest_ttl: plan.max_ttl,
                waiting_percent: plan.waiting_percent,
                hasty_percent: plan.hasty_percent,
            };
            tokio::spawn(client.live())
        })
        .collect()
}

impl Scenario {
    fn habits(self, client: u8) -> Habits {
        match self {
            Self::Rolling | Self::Contended if client == 0 => Habits::Keeps,
            Self::Storm
            | Self::Rolling
            | Self::Contended
            | Self::Reconfigure
            | Self::Raise
            | Self::Moved => Habits::Any,
            Self::Young => Habits::Leaves,
            Self::Queue => Habits::Eager,
        }
    }
}

fn set_up(plan: Arc<Plan>, start: Instant, recorder: Arc<Recorder>) -> Stage {
    let mut chance = Chance::new(plan.seed, Stream::Fault(u8::MAX));
    let skew = plan.skew.as_micros() as u64;
    let masters: Arc<[Arc<Master>]> = (0..plan.masters)
        .map(|index| {
            let offset = chance.around(skew / 4);
            let clock = Arc::new(SimClock::new(start, chance.around(MAX_RATE_PPM), offset));
            let durable = match plan.scenario {
                Scenario::Storm | Scenario::Queue => chance.percent(25),
                Scenario::Moved => true,
                Scenario::Rolling
                | Scenario::Contended
                | Scenario::Young
                | Scenario::Raise
                | Scenario::Reconfigure => false,
            };
            Arc::new(Master::new(
                index,
                clock,
                (plan.node_settings(), plan.rules),
                durable,
                recorder.clone(),
            ))
        })
        .collect();
    let network = Arc::new(Network::new(plan.seed, plan.latency, plan.hint_loss_percent));
    let gateways = (0..plan.gateways)
        .map(|index| {
            let (plan, masters) =
                reconfigure::configuration(&plan.for_gateway(index), index, &masters);
            let plan = raise::configuration(plan, index);
            let offset = chance.around(plan.clock_limit());
            let clock = Arc::new(SimClock::new(start, chance.around(MAX_RATE_PPM), offset));
            Gateway::new(index, clock, plan, masters, network.clone(), recorder.clone())
        })
        .collect();
    let until = start + plan.length;
    Stage { plan, masters, gateways, network, recorder, until }
}

/// Waits until every gateway lets every master vote and sees that it has caught up.
async fn in_service(stage: &Stage) {
    let admits_all = |gateway: &Gateway| {
        (0..stage.masters.len()).all(|master| gateway.has_caught_up(master) == Some(true))
    };
    while !stage.gateways.iter().all(admits_all) {
        sleep(POLL_INTERVAL).await;
    }
}

/// Breaks connections while gateways wait for the confirmation that the cluster is new.
async fn cut_bootstrap(stage: Stage) {
    let mut chance = Chance::new(stage.plan.seed, Stream::Bootstrap);
    for _ in 0..chance.between(1, 6) {
        sleep(chance.millis(50, 900)).await;
        let gateway = &stage.gateways[chance.below(stage.gateways.len() as u64) as usize];
        let master = chance.below(stage.masters.len() as u64) as usize;
        gateway.cut(master, false);
        stage.recorder.situation("cuts while bootstrapping");
        stage
            .recorder
            .note(format!("g{}", gateway.index), format!("connection to n{master} breaks"));
    }
}

/// Restarts the masters without their data, one or a few at a time. The next restart waits until
/// all gateways see that the masters of the last one have caught up.
async fn roll(stage: Stage) {
    let mut chance = Chance::new(stage.plan.seed, Stream::Fault(0));
    let masters: Vec<usize> = (0..stage.masters.len()).collect();
    let at_once = if stage.plan.scenario == Scenario::Young { (masters.len() - 1) / 2 } else { 1 };
    for victims in masters.chunks(at_once).cycle() {
        sleep(chance.millis(1_000, 2_000)).await;
        if Instant::now() >= stage.until {
            return;
        }
        for victim in victims {
            let down = chance.millis(5, 200);
            stage.recorder.fault();
            stage.restart(*victim, down, Left::Nothing, false, &mut chance).await;
        }
        sleep(POLL_INTERVAL * 10).await;
        let lets_vote = |gateway: &Gateway| {
            victims.iter().all(|victim| gateway.has_caught_up(*victim) != Some(false))
        };
        while !stage.gateways.iter().all(lets_vote) {
            sleep(POLL_INTERVAL).await;
        }
    }
}

/// Moves the names of masters that sync every write, one at a time, to new processes that have read
/// the old one's file. The old process runs until all gateways have left it. Meanwhile the
/// connections of one gateway break, so that gateway reaches the new process before the others do.
async fn move_files(stage: Stage) {
    let mut chance = Chance::new(stage.plan.seed, Stream::Fault(0));
    loop {
        sleep(chance.millis(3_000, 6_000)).await;
        // Mending would end the old process before gateways have noticed the move, so no move
        // begins shortly before it.
        if Instant::now() + MOVE_TAKES >= stage.until {
            return;
        }
        let victim = chance.below(stage.masters.len() as u64) as usize;
        let gateway = &stage.gateways[chance.below(stage.gateways.len() as u64) as usize];
        if !stage.gateways.iter().all(|gateway| gateway.has_caught_up(victim) == Some(true))
            || !stage.masters[victim].move_name(true)
        {
            continue;
        }
        stage.recorder.fault();
        stage
            .recorder
            .note(format!("n{victim}"), "is another process from now on, with the old one's file");
        sleep(chance.millis(0, CUT_WITHIN_MS)).await;
        gateway.cut(victim, false);
        stage
            .recorder
            .note(format!("g{}", gateway.index), format!("connection to n{victim} breaks"));
        sleep(NAME_MOVES_WITHIN + chance.millis(0, 3_000)).await;
        stage.masters[victim].end_former();
        stage.recorder.note(format!("n{victim}"), "the old process is gone");
    }
}

fn leftovers(stage: &Stage) -> Vec<Leftover> {
    let names = (0..stage.plan.names).chain(FIRST_SLOT..FIRST_SLOT + SLOTS);
    let on = |master: &Arc<Master>, name| {
        let (grant, expires_in) = master.stored(name)?;
        Some(Leftover { master: master.index, name, grant, expires_in })
    };
    stage
        .masters
        .iter()
        .flat_map(|master| names.clone().filter_map(move |name| on(master, name)))
        .collect()
}
