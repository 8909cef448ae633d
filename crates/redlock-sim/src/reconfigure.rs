//! An operator moves the masters to another configuration, by the protocol that ships: another `max_ttl`, and in most
//! histories another node set. The first half of the gateways has the old configuration, the second half the new one. The old
//! ones are stopped before, but for one sometimes, which runs on for a while; the operator's connections break, the command is
//! interrupted and run again, and a master loses its data meanwhile. Then the new gateways start, and any number of masters
//! may lose their data, as the new configuration's own quarantine need not cover locks of the old one.
//!
//! What the protocol does not promise is not done here: while an old gateway runs only one master loses its data, and no new
//! one is started before the end. `quarantine_is_waited` is the operator's rule here; gateways always wait.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::admission::ClusterConfig;
use redlock_core::node::probe;
use redlock_core::reconfigure::{OldNodes, Progress, survey};
use tokio::time::{Instant, sleep, timeout};

use crate::chance::{Chance, Stream};
use crate::faults::Stage;
use crate::gateway::{cluster_of, node_name};
use crate::link::{CALL_DEADLINE, SimLink};
use crate::master::{Left, Master};
use crate::plan::{Plan, Scenario};

type Masters = Arc<[Arc<Master>]>;

/// By this number the network knows the operator.
const OPERATOR: u8 = u8::MAX;

/// Longer than any history.
const FOREVER: Duration = Duration::from_secs(3_600);

/// One of the two configurations.
struct Config {
    masters: Range<usize>,
    max_ttl: Duration,
}

impl Config {
    fn of(plan: &Plan, is_new: bool) -> Self {
        let mut chance = Chance::new(plan.seed, Stream::Fault(u8::MAX - 2));
        let max_ttl = Duration::from_millis(chance.pick(&[1_000, 2_000, 3_000, 4_000]));
        let all = usize::from(plan.masters);
        let other = if chance.percent(60) { all / 3 } else { 0 };
        if is_new {
            Self { masters: other..all, max_ttl }
        } else {
            Self { masters: 0..all - other, max_ttl: plan.max_ttl }
        }
    }
}

/// What a gateway is configured with: in every other scenario, what all are.
pub fn configuration(plan: &Arc<Plan>, gateway: u8, masters: &Masters) -> (Arc<Plan>, Masters) {
    if plan.scenario != Scenario::Reconfigure {
        return (plan.clone(), masters.clone());
    }
    let config = Config::of(plan, gateway >= plan.gateways / 2);
    let mut of_gateway = Plan { max_ttl: config.max_ttl, ..plan.as_ref().clone() };
    of_gateway.rules.quarantine_is_waited = true;
    (Arc::new(of_gateway), masters[config.masters].into())
}

/// Keeps the new gateways from starting with the old ones.
pub fn prepare(stage: &Stage) {
    if stage.plan.scenario == Scenario::Reconfigure {
        stage.gateways[stage.gateways.len() / 2..].iter().for_each(|gateway| gateway.bar());
    }
}

/// What the operator does.
pub async fn operate(stage: Stage) {
    let mut chance = Chance::new(stage.plan.seed, Stream::Fault(u8::MAX - 3));
    sleep(chance.millis(2_000, 8_000)).await;
    let half = stage.gateways.len() / 2;
    let runs_on = chance.percent(50).then(|| chance.below(half as u64) as usize);
    (0..half).filter(|old| Some(*old) != runs_on).for_each(|old| retire(&stage, old));
    let (last, pause) = (stage.clone(), chance.millis(0, 8_000));
    let last_retires = tokio::spawn(async move {
        sleep(pause).await;
        runs_on.into_iter().for_each(|old| retire(&last, old));
    });
    if chance.percent(60) {
        let (victim, pause) = (chance.below(stage.masters.len() as u64) as usize, chance.millis(0, 8_000));
        tokio::spawn(lose(stage.clone(), victim, pause, chance.millis(5, 800)));
    }
    move_masters(&stage, &mut chance).await;
    for gateway in &stage.gateways[half..] {
        gateway.unbar();
        gateway.start();
    }
    note(&stage, "starts the new gateways");
    // Beside an old gateway a majority must not lose its data.
    drop(last_retires.await);
    let victims = if chance.percent(60) { chance.between(1, stage.masters.len() as u64) } else { 0 };
    for victim in 0..victims as usize {
        tokio::spawn(lose(stage.clone(), victim, chance.millis(0, 800), chance.millis(5, 200)));
    }
}

/// Until it has been done once without an interruption.
async fn move_masters(stage: &Stage, chance: &mut Chance) {
    let links: Vec<_> = stage
        .masters
        .iter()
        .map(|master| SimLink::new(OPERATOR, master.clone(), stage.network.clone(), stage.recorder.clone()))
        .collect();
    let cuts = tokio::spawn(cut(stage.clone(), links.clone()));
    let masters = |is_new| -> (String, Vec<probe::Master>) {
        let config = Config::of(&stage.plan, is_new);
        let cluster = cluster_of(&stage.masters[config.masters.clone()]);
        let cluster_config = ClusterConfig::new(&cluster, config.max_ttl);
        let master = |index: usize| probe::Master {
            name: node_name(&stage.masters[index]),
            identity: cluster_config.identity(&node_name(&stage.masters[index])),
            settings: stage.plan.node_settings(),
            call_deadline: CALL_DEADLINE,
            link: Arc::new(links[index].clone()),
        };
        (cluster, config.masters.map(master).collect())
    };
    let told = |progress: Progress<'_>| note(stage, format!("{progress:?}"));
    loop {
        let attempt = async {
            let (cluster, old) = masters(false);
            let change = survey(masters(true).1, OldNodes { cluster, masters: old }, told).await?;
            change.carry_out(told).await
        };
        let patience = if chance.percent(35) { chance.millis(5, 6_000) } else { FOREVER };
        match timeout(patience, attempt).await {
            Ok(Ok(())) => break,
            Ok(Err(error)) => note(stage, error.to_string()),
            Err(_) => note(stage, "is interrupted"),
        }
        sleep(chance.millis(50, 2_000)).await;
    }
    cuts.abort();
    note(stage, "has moved the masters");
}

/// The operator's connections break.
async fn cut(stage: Stage, links: Vec<SimLink>) {
    let mut chance = Chance::new(stage.plan.seed, Stream::Fault(u8::MAX - 4));
    while Instant::now() < stage.until {
        sleep(chance.gap(Duration::from_millis(50))).await;
        links[chance.below(links.len() as u64) as usize].cut("connection reset", false);
    }
}

async fn lose(stage: Stage, victim: usize, pause: Duration, down: Duration) {
    sleep(pause).await;
    stage.recorder.fault();
    let mut chance = Chance::new(stage.plan.seed + victim as u64, Stream::Fault(u8::MAX - 5));
    stage.restart(victim, down, Left::Nothing, false, &mut chance).await;
}

fn retire(stage: &Stage, old: usize) {
    stage.gateways[old].bar();
    note(stage, format!("stops g{old}"));
}

fn note(stage: &Stage, text: impl Into<String>) {
    stage.recorder.note("operator", text);
}
