//! An operator raises `max_ttl` with the real protocol, while clients go on.
//!
//! The first half of the gateways has the shorter `max_ttl`, and some of them keep it to the end.
//! The second half has the larger one. These gateways start before the command has ended, while it
//! is interrupted, or afterwards. The operator's connections break, and the command is interrupted
//! and repeated.
//!
//! Meanwhile masters lose their data, one at a time: before the command, during it or later. Just
//! before a loss, another master is often out of reach, so it lacks young locks. After a loss, a
//! gateway with the shorter `max_ttl` often restarts, and does not reach some of the other masters.
//! If it ended the quarantine by its own `max_ttl`, it would grant locks that are still held.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::eligibility::ClusterConfig;
use redlock_core::node::probe;
use redlock_core::reconfigure::{Left, Old, Progress, survey};
use tokio::time::{Instant, sleep};

use crate::chance::{Chance, SimEntropy, Stream};
use crate::faults::Stage;
use crate::gateway::{cluster_of, node_name};
use crate::link::{CALL_DEADLINE, SimLink};
use crate::master::{self, Master};
use crate::plan::{Plan, SHORT_MAX_TTL, Scenario};

/// The operator's number in the network, where gateways have numbers too.
const OPERATOR: u8 = u8::MAX;

/// The plan as one gateway sees it: the first half has the shorter `max_ttl`.
pub fn configuration(plan: Arc<Plan>, gateway: u8) -> Arc<Plan> {
    if plan.scenario == Scenario::Raise && gateway < plan.gateways / 2 {
        Arc::new(Plan { max_ttl: SHORT_MAX_TTL, ..plan.as_ref().clone() })
    } else {
        plan
    }
}

/// Keeps the gateways with the larger `max_ttl` from starting with the others.
pub fn prepare(stage: &Stage) {
    if stage.plan.scenario == Scenario::Raise {
        late(stage).for_each(|gateway| stage.gateways[gateway].bar());
    }
}

fn late(stage: &Stage) -> std::ops::Range<usize> {
    stage.gateways.len() / 2..stage.gateways.len()
}

/// The operator's actions, and the losses of data.
pub async fn operate(stage: Stage) {
    let mut chance = Chance::new(stage.plan.seed, Stream::Fault(u8::MAX - 2));
    // In half of all histories the command is interrupted between two limits, and a master that
    // has the larger limit loses its data then.
    let is_cut = chance.percent(50);
    let losses = Some(stage.clone()).filter(|_| !is_cut);
    losses.into_iter().for_each(|stage| drop(tokio::spawn(lose_some(stage))));
    sleep(chance.millis(2_000, 12_000)).await;
    let when = chance.below(3);
    if when == 0 {
        start_late(&stage, "too early");
        sleep(chance.millis(0, if is_cut { 8_000 } else { 25_000 })).await;
    }
    let entropy = SimEntropy::new(Chance::new(stage.plan.seed, Stream::Fault(u8::MAX - 3)));
    let link = |master: &Arc<Master>| {
        let (network, recorder) = (stage.network.clone(), stage.recorder.clone());
        SimLink::new(OPERATOR, master.clone(), network, recorder, stage.plan.node_settings())
    };
    let links: Vec<SimLink> = stage.masters.iter().map(link).collect();
    let report = |progress: Progress<'_>| note(&stage, format!("{progress:?}"));
    let cluster_config = stage.plan.cluster_config(&cluster_of(&stage.masters));
    let at = if is_cut { stage.masters.len() as u64 - 1 } else { 0 };
    let mut interrupted_at = (is_cut || chance.percent(50)).then_some(at as usize);
    let patience = chance.millis(20, 250);
    loop {
        let masters = stage.masters.iter().zip(&links).map(|(master, link)| probe::Master {
            name: node_name(master),
            identity: cluster_config.identity(&node_name(master)),
            settings: stage.plan.node_settings(),
            call_deadline: CALL_DEADLINE,
            link: Arc::new(link.clone()),
        });
        let attempt = async {
            let old = Left { nodes: Old::Unsaid, max_clock_skew: None };
            let change = survey(masters.collect(), old, report).await?;
            assert!(change.is_raise(), "only max_ttl changes");
            change.carry_out(&entropy, report).await
        };
        let interruption = async {
            match interrupted_at {
                Some(0) => sleep(patience).await,
                Some(limits) => until_limits_rose(&stage, limits).await,
                None => std::future::pending().await,
            }
        };
        let done = tokio::select! {
            biased;
            () = interruption => None,
            done = attempt => Some(done),
        };
        match done {
            Some(Ok(())) => break,
            Some(Err(error)) => note(&stage, error.to_string()),
            None => {
                note(&stage, "is interrupted");
                stage.recorder.situation("raises interrupted");
                interrupted_at = None;
                if when == 1 || is_cut {
                    start_late(&stage, "during the raise");
                }
                if is_cut {
                    lose_raised(&stage, &mut chance).await;
                }
                sleep(chance.millis(500, 25_000)).await;
            }
        }
        sleep(chance.millis(50, 2_000)).await;
    }
    note(&stage, "has raised max_ttl");
    if is_cut {
        tokio::spawn(lose_some(stage.clone()));
    }
    stage.recorder.situation("raises done");
    start_late(&stage, "after the raise");
    // Most of the other gateways get the larger max_ttl too: they stop for good.
    for gateway in 0..late(&stage).start {
        if chance.percent(40) {
            sleep(chance.millis(0, 5_000)).await;
            stage.gateways[gateway].bar();
            note(&stage, format!("stops g{gateway}"));
        }
    }
}

fn start_late(stage: &Stage, when: &str) {
    note(stage, format!("starts the gateways with the larger max_ttl {when}"));
    for gateway in late(stage) {
        stage.gateways[gateway].unbar();
        stage.gateways[gateway].start();
    }
}

fn has_larger_limit(stage: &Stage, master: usize) -> bool {
    let marker = stage.masters[master].marker();
    marker.as_deref().and_then(ClusterConfig::max_ttl_of) == Some(stage.plan.max_ttl)
}

/// Waits until the markers of so many masters have the larger limit.
async fn until_limits_rose(stage: &Stage, limits: usize) {
    let count = || (0..stage.masters.len()).filter(|at| has_larger_limit(stage, *at)).count();
    while count() < limits {
        sleep(Duration::from_millis(1)).await;
    }
}

/// A master that has the larger limit loses its data. A gateway with the shorter `max_ttl` restarts
/// then, and reaches only that master and those that have the smaller limit.
async fn lose_raised(stage: &Stage, chance: &mut Chance) {
    sleep(chance.millis(3_000, 8_000)).await;
    let (raised, _): (Vec<usize>, Vec<usize>) =
        (0..stage.masters.len()).partition(|at| has_larger_limit(stage, *at));
    let Some(victim) = raised.first().copied() else { return };
    stage.recorder.situation("losses around a raise");
    let mut crash = Chance::new(stage.plan.seed + victim as u64, Stream::Fault(u8::MAX - 5));
    stage.restart(victim, chance.millis(5, 400), master::Left::Nothing, false, &mut crash).await;
    forget(stage, &raised[1..], 100, chance);
    // The next loss comes when this master votes again.
    sleep(Duration::from_secs(12)).await;
}

/// Masters lose their data, one at a time. The next loss waits until every gateway sees that the
/// last master has caught up.
async fn lose_some(stage: Stage) {
    let mut chance = Chance::new(stage.plan.seed, Stream::Fault(u8::MAX - 4));
    sleep(chance.millis(1_000, 20_000)).await;
    loop {
        let knows = |gateway: usize| {
            (0..stage.masters.len())
                .all(|master| stage.gateways[gateway].has_caught_up(master) != Some(false))
        };
        while !(0..stage.gateways.len()).all(knows) {
            sleep(Duration::from_millis(100)).await;
            if Instant::now() >= stage.until {
                return;
            }
        }
        let victim = chance.below(stage.masters.len() as u64) as usize;
        let others: Vec<usize> =
            (0..stage.masters.len()).filter(|other| *other != victim).collect();
        let missed = others[chance.below(others.len() as u64) as usize];
        if chance.percent(60) {
            let until = Instant::now() + chance.millis(1_000, 5_000);
            for gateway in 0..stage.gateways.len() {
                stage.network.darken(gateway as u8, missed as u8, until, until);
            }
            note(&stage, format!("n{missed} is out of reach for a while"));
            sleep(chance.millis(500, 5_000)).await;
        }
        stage.recorder.fault();
        stage.recorder.situation("losses around a raise");
        let mut crash = Chance::new(stage.plan.seed + victim as u64, Stream::Fault(u8::MAX - 5));
        stage
            .restart(victim, chance.millis(5, 400), master::Left::Nothing, false, &mut crash)
            .await;
        if chance.percent(60) {
            forget(&stage, &others, 70, &mut chance);
        }
        sleep(chance.millis(5_000, 20_000)).await;
    }
}

/// A gateway with the shorter `max_ttl` restarts, and does not reach some of the masters that have
/// kept their data.
fn forget(stage: &Stage, others: &[usize], percent: u64, chance: &mut Chance) {
    let gateway = chance.below(late(stage).start as u64) as usize;
    if !stage.gateways[gateway].kill() {
        return;
    }
    let until = Instant::now() + chance.millis(7_000, 16_000);
    for other in others {
        if chance.percent(percent) {
            stage.network.darken(gateway as u8, *other as u8, until, until);
        }
    }
    stage.gateways[gateway].start();
    stage.recorder.situation("gateways that forgot");
    note(stage, format!("restarts g{gateway}, which does not reach some masters"));
}

fn note(stage: &Stage, text: impl Into<String>) {
    stage.recorder.note("operator", text);
}
