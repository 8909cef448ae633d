//! An operator moves the masters to another configuration with the real protocol. The new
//! configuration has another `max_ttl`. In most histories it also has another node set or clock
//! skew.
//!
//! The first half of the gateways has the old configuration, the second half the new one. The old
//! gateways stop first, but sometimes one of them runs on for a while. The operator's connections
//! break. The operator's command is interrupted and repeated. Sometimes a second operator runs the
//! command at the same time, for the same target or another. Meanwhile a master loses its data.
//!
//! Then the new gateways start, and any number of masters may lose their data. This shows that the
//! change has waited for the locks of the old configuration: the quarantine of the new
//! configuration need not be long enough for them.
//!
//! The simulation stays within the protocol's promises. While an old gateway runs, only one master
//! loses its data, and no new gateway starts before the change has ended. In this scenario the rule
//! `quarantine_is_waited` switches only the operator's waiting; gateways always wait.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::probe;
use redlock_core::reconfigure::{Left, Old, OldNodes, Progress, ReconfigureError, survey};
use tokio::time::{Instant, sleep, timeout};

use crate::chance::{Chance, SimEntropy, Stream};
use crate::faults::Stage;
use crate::gateway::{cluster_of, node_name};
use crate::link::{CALL_DEADLINE, SimLink};
use crate::master::{self, Master};
use crate::plan::{Plan, Scenario};

type Masters = Arc<[Arc<Master>]>;

/// The operators' numbers in the network, where gateways have numbers too.
const OPERATORS: [u8; 2] = [u8::MAX, u8::MAX - 1];

/// Longer than any history.
const FOREVER: Duration = Duration::from_secs(3_600);

/// One of the two configurations.
struct Config {
    masters: Range<usize>,
    max_ttl: Duration,
    skew: Duration,
}

impl Config {
    fn of(plan: &Plan, is_new: bool) -> Self {
        let mut chance = Chance::new(plan.seed, Stream::Fault(u8::MAX - 2));
        let max_ttl = Duration::from_millis(chance.pick(&[1_000, 2_000, 3_000, 4_000]));
        let all = usize::from(plan.masters);
        // The new set has the same masters, some of the old ones, or entirely other ones.
        let (old, new) = match chance.below(10) {
            0..=3 => (0..all, 0..all),
            4..=7 => (0..all - all / 3, all / 3..all),
            _ => (0..all - all / 2, (all - all / 2).min(all - 1)..all),
        };
        let (old_skew, new_skew) = chance.pick(&[(1, 1), (1, 1), (1, 2), (1, 4), (4, 1)]);
        if is_new {
            Self { masters: new, max_ttl, skew: plan.skew * new_skew }
        } else {
            Self { masters: old, max_ttl: plan.max_ttl, skew: plan.skew * old_skew }
        }
    }
}

/// The configuration of a gateway. Only in this scenario do gateways differ in their configuration.
pub fn configuration(plan: &Arc<Plan>, gateway: u8, masters: &Masters) -> (Arc<Plan>, Masters) {
    if plan.scenario != Scenario::Reconfigure {
        return (plan.clone(), masters.clone());
    }
    let config = Config::of(plan, gateway >= plan.gateways / 2);
    let mut for_gateway =
        Plan { max_ttl: config.max_ttl, skew: config.skew, ..plan.as_ref().clone() };
    for_gateway.rules.quarantine_is_waited = true;
    (Arc::new(for_gateway), masters[config.masters].into())
}

/// Keeps the gateways of the new configuration from starting together with the old ones.
pub fn prepare(stage: &Stage) {
    if stage.plan.scenario == Scenario::Reconfigure {
        stage.gateways[stage.gateways.len() / 2..].iter().for_each(|gateway| gateway.bar());
    }
}

/// The operator's actions.
pub async fn operate(stage: Stage) {
    let mut chance = Chance::new(stage.plan.seed, Stream::Fault(u8::MAX - 3));
    sleep(chance.millis(2_000, 8_000)).await;
    let half = stage.gateways.len() / 2;
    let runs_on = chance.percent(50).then(|| chance.below(half as u64) as usize);
    (0..half).filter(|old| Some(*old) != runs_on).for_each(|old| retire(&stage, old));
    let last = stage.clone();
    let pause = chance.millis(0, 8_000);
    let last_retires = tokio::spawn(async move {
        sleep(pause).await;
        runs_on.into_iter().for_each(|old| retire(&last, old));
    });
    if chance.percent(60) {
        let victim = chance.below(stage.masters.len() as u64) as usize;
        let pause = chance.millis(0, 8_000);
        tokio::spawn(lose(stage.clone(), victim, pause, chance.millis(5, 800)));
    }
    let other = chance.percent(50).then(|| {
        let stage = stage.clone();
        let pause = chance.millis(0, 6_000);
        let kind = if chance.percent(60) { ChangeKind::Second } else { ChangeKind::Mistaken };
        tokio::spawn(async move {
            sleep(pause).await;
            Operator::new(&stage, kind).run().await
        })
    });
    let done = Operator::new(&stage, ChangeKind::First).run().await;
    // If the first operator's change was refused because of another operator's change, the operator
    // waits until that one is done. Then it moves the masters on to its own target.
    if let Some(other) = other
        && let Ok(true) = other.await
        && !done
    {
        Operator::new(&stage, ChangeKind::Later).run().await;
    }
    for gateway in &stage.gateways[half..] {
        gateway.unbar();
        gateway.start();
    }
    note(&stage, "starts the new gateways");
    // While an old gateway runs, no majority may lose its data. So the losses begin only after it
    // has stopped.
    drop(last_retires.await);
    let victims =
        if chance.percent(60) { chance.between(1, stage.masters.len() as u64) } else { 0 };
    for victim in 0..victims as usize {
        tokio::spawn(lose(stage.clone(), victim, chance.millis(0, 800), chance.millis(5, 200)));
    }
}

/// Which operator runs the command, and for which change.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ChangeKind {
    First,
    /// A second operator with the same change at the same time.
    Second,
    /// A second operator at the same time, whose `max_ttl` differs from that of the new gateways.
    Mistaken,
    /// The first operator again, after the mistaken change has finished.
    Later,
}

struct Operator<'a> {
    stage: &'a Stage,
    links: Vec<SimLink>,
    chance: Chance,
    entropy: SimEntropy,
    kind: ChangeKind,
}

impl<'a> Operator<'a> {
    fn new(stage: &'a Stage, kind: ChangeKind) -> Self {
        let number =
            OPERATORS[usize::from(matches!(kind, ChangeKind::Second | ChangeKind::Mistaken))];
        let chance = Chance::new(stage.plan.seed, Stream::Fault(u8::MAX - 6 - kind as u8));
        let link = |master: &Arc<Master>| {
            let network = stage.network.clone();
            let recorder = stage.recorder.clone();
            SimLink::new(number, master.clone(), network, recorder, stage.plan.node_settings())
        };
        let links = stage.masters.iter().map(link).collect();
        let entropy =
            SimEntropy::new(Chance::new(stage.plan.seed, Stream::Fault(u8::MAX - 10 - kind as u8)));
        Self { stage, links, chance, entropy, kind }
    }

    fn masters(&self, is_new: bool) -> (String, Vec<probe::Master>, Config) {
        let stage = self.stage;
        let Config { masters, mut max_ttl, skew } = Config::of(&stage.plan, is_new);
        if is_new && self.kind == ChangeKind::Mistaken {
            max_ttl += Duration::from_millis(500);
        }
        let cluster = cluster_of(&stage.masters[masters.clone()]);
        let plan = Plan { max_ttl, skew, ..stage.plan.as_ref().clone() };
        let cluster_config = plan.cluster_config(&cluster);
        let master = |index: usize| probe::Master {
            name: node_name(&stage.masters[index]),
            identity: cluster_config.identity(&node_name(&stage.masters[index])),
            settings: plan.node_settings(),
            call_deadline: CALL_DEADLINE,
            link: Arc::new(self.links[index].clone()),
        };
        (cluster, masters.clone().map(master).collect(), Config { masters, max_ttl, skew })
    }

    /// Repeats the command until it completes. Returns false if another operator's change prevents
    /// this one.
    async fn run(mut self) -> bool {
        let cuts = tokio::spawn(cut(self.stage.clone(), self.links.clone()));
        let report = |progress: Progress<'_>| note(self.stage, format!("{progress:?}"));
        let done = loop {
            let patience =
                if self.chance.percent(35) { self.chance.millis(5, 6_000) } else { FOREVER };
            let attempt = async {
                let (cluster, masters, Config { max_ttl, skew, .. }) = self.masters(false);
                let old = match self.kind {
                    ChangeKind::Later => Left { nodes: Old::Unsaid, max_clock_skew: None },
                    _ => Left {
                        nodes: Old::Nodes(OldNodes { cluster, masters, max_ttl: Some(max_ttl) }),
                        max_clock_skew: Some(skew),
                    },
                };
                let change = survey(self.masters(true).1, old, report).await?;
                change.carry_out(&self.entropy, report).await
            };
            match timeout(patience, attempt).await {
                Ok(Ok(())) => break true,
                Ok(Err(error)) => {
                    note(self.stage, error.to_string());
                    let is_over = match error {
                        ReconfigureError::OtherChange(..) | ReconfigureError::OtherSet(..) => true,
                        // Only the second operator gives way. Otherwise the two operators would
                        // take the change over from each other for ever.
                        ReconfigureError::Overtaken(_) => self.kind == ChangeKind::Second,
                        _ => false,
                    };
                    if is_over {
                        break false;
                    }
                }
                Err(_) => note(self.stage, "is interrupted"),
            }
            sleep(self.chance.millis(50, 2_000)).await;
        };
        cuts.abort();
        note(self.stage, if done { "has moved the masters" } else { "was refused" });
        done
    }
}

/// Breaks the operator's connections now and then.
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
    stage.restart(victim, down, master::Left::Nothing, false, &mut chance).await;
}

fn retire(stage: &Stage, old: usize) {
    stage.gateways[old].bar();
    note(stage, format!("stops g{old}"));
}

fn note(stage: &Stage, text: impl Into<String>) {
    stage.recorder.note("operator", text);
}
