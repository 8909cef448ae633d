//! The faults. Each kind of fault is a task with its own random stream. The task waits for a random
//! time, causes a fault, and mends it later. Faults may overlap, whether they are of the same kind
//! or not.
//!
//! The faults keep the assumptions about clocks: each gateway's wall clock stays within half of
//! `max_clock_skew` of true time. So any two of them agree within `max_clock_skew`.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::node::eligibility::NAME_IS_FOLLOWED_WITHIN;
use tokio::time::{Instant, advance, sleep};

use crate::chance::{Chance, Stream};
use crate::gateway::Gateway;
use crate::history::Recorder;
use crate::master::{Left, Master};
use crate::network::Network;
use crate::plan::Plan;

/// The parties that faults can affect.
#[derive(Clone)]
pub struct Stage {
    /// The plan of the history.
    pub plan: Arc<Plan>,
    pub masters: Arc<[Arc<Master>]>,
    pub gateways: Arc<[Gateway]>,
    /// The network between them.
    pub network: Arc<Network>,
    pub recorder: Arc<Recorder>,
    /// No fault begins after this moment.
    pub until: Instant,
}

#[derive(Debug, Clone, Copy)]
enum FaultKind {
    Crash,
    Flush,
    Stop,
    MasterClock,
    Cut,
    Dark,
    Death,
    GatewayClock,
    Replica,
    Memory,
    GatewayStop,
    Freeze,
    Name,
    Slew,
}

impl Stage {
    /// Starts the tasks of all kinds of faults in the plan.
    pub fn begin(&self) {
        let faults = self.plan.faults;
        let kinds = [
            (FaultKind::Crash, faults.crash),
            (FaultKind::Flush, faults.flush),
            (FaultKind::Stop, faults.stop),
            (FaultKind::MasterClock, faults.master_clock),
            (FaultKind::Cut, faults.cut),
            (FaultKind::Dark, faults.dark),
            (FaultKind::Death, faults.death),
            (FaultKind::GatewayClock, faults.gateway_clock),
            (FaultKind::Replica, faults.replica),
            (FaultKind::Memory, faults.memory),
            (FaultKind::GatewayStop, faults.gateway_stop),
            (FaultKind::Freeze, faults.freeze),
            (FaultKind::Name, faults.name),
            (FaultKind::Slew, faults.slew),
        ];
        for (kind, gap) in kinds {
            if let Some(gap) = gap {
                tokio::spawn(self.clone().strike(kind, gap));
            }
        }
    }

    /// Mends all faults. From now on, only events that are already under way happen.
    pub fn mend(&self) {
        let mut chance = Chance::new(self.plan.seed, Stream::Fault(u8::MAX - 1));
        self.network.lighten();
        for master in self.masters.iter() {
            // Mending a clock without a fault does not make it jump.
            master.clock.mend();
            master.promote();
            master.limit_sets(None);
            master.end_former();
            master.start(Left::All, false);
            master.go_on(&mut chance);
        }
        self.gateways.iter().for_each(Gateway::start);
        self.note("everything", "is mended");
    }

    async fn strike(self, kind: FaultKind, gap: Duration) {
        let mut chance = Chance::new(self.plan.seed, Stream::Fault(kind as u8));
        loop {
            sleep(chance.gap(gap)).await;
            if Instant::now() >= self.until {
                return;
            }
            self.recorder.fault();
            match kind {
                FaultKind::Crash => self.crash(&mut chance),
                FaultKind::Flush => self.flush(&mut chance),
                FaultKind::Stop => self.stop(&mut chance),
                FaultKind::MasterClock => self.master_clock(&mut chance),
                FaultKind::Cut => self.cut(&mut chance),
                FaultKind::Dark => self.dark(&mut chance),
                FaultKind::Death => self.death(&mut chance),
                FaultKind::GatewayClock => self.gateway_clock(&mut chance),
                FaultKind::Replica => self.replica(&mut chance),
                FaultKind::Memory => self.memory(&mut chance),
                FaultKind::GatewayStop => self.gateway_stop(&mut chance),
                FaultKind::Freeze => self.freeze(&mut chance).await,
                FaultKind::Name => self.name(&mut chance),
                FaultKind::Slew => self.slew(&mut chance),
            }
        }
    }

    /// The masters of one fault: mostly one, sometimes several or all of them at nearly the same
    /// time.
    fn victims(&self, chance: &mut Chance) -> Vec<usize> {
        let all = self.masters.len() as u64;
        let count = if chance.percent(65) { 1 } else { chance.between(2, all) };
        let mut victims: Vec<usize> = (0..self.masters.len()).collect();
        while victims.len() as u64 > count {
            victims.swap_remove(chance.below(victims.len() as u64) as usize);
        }
        victims
    }

    fn crash(&self, chance: &mut Chance) {
        // This snapshot becomes old. A later restart may find it.
        if chance.percent(30) {
            self.masters.iter().for_each(|master| master.save());
        }
        let left =
            chance.pick(&[Left::Nothing, Left::Nothing, Left::Nothing, Left::Snapshot, Left::All]);
        for victim in self.victims(chance) {
            let down = outage(chance);
            let durable = chance.percent(25);
            let stage = self.clone();
            let mut chance =
                Chance::new(chance.below(u64::MAX), Stream::Fault(FaultKind::Crash as u8));
            tokio::spawn(
                async move { stage.restart(victim, down, left, durable, &mut chance).await },
            );
        }
    }

    /// Kills a master and starts it again.
    pub async fn restart(
        &self,
        victim: usize,
        down: Duration,
        left: Left,
        durable: bool,
        chance: &mut Chance,
    ) {
        let master = &self.masters[victim];
        if master.listening().is_none() {
            return;
        }
        master.crash(chance);
        self.note(format!("n{victim}"), "is killed");
        sleep(down).await;
        let Some((left, durable)) = master.start(left, durable) else { return };
        let what = match left {
            Left::All => "all its data",
            Left::Snapshot => "an old snapshot",
            Left::Nothing => "no data",
        };
        let how = if durable { "syncs every write now" } else { "does not sync every write now" };
        self.note(format!("n{victim}"), format!("is back with {what}; {how}"));
    }

    fn flush(&self, chance: &mut Chance) {
        for victim in self.victims(chance) {
            self.masters[victim].flush();
            self.note(format!("n{victim}"), "FLUSHALL");
        }
    }

    fn stop(&self, chance: &mut Chance) {
        for victim in self.victims(chance) {
            let longest = if chance.percent(70) { 800 } else { 6_000 };
            let stage = self.clone();
            let pause = chance.millis(20, longest);
            let mut chance =
                Chance::new(chance.below(u64::MAX), Stream::Fault(FaultKind::Stop as u8));
            tokio::spawn(async move {
                stage.masters[victim].stop();
                stage.note(format!("n{victim}"), "is stopped");
                let followed = pause.min(NAME_IS_FOLLOWED_WITHIN);
                sleep(followed).await;
                // If the name has just moved to this process, gateways get no answer from it. So
                // they go on with the old process. SAFETY.md demands that the old process ends.
                if pause > followed && stage.masters[victim].end_former() {
                    stage.note(format!("n{victim}"), "the old process is gone");
                }
                sleep(pause - followed).await;
                stage.note(format!("n{victim}"), "goes on");
                stage.masters[victim].go_on(&mut chance);
            });
        }
    }

    /// Sets a master's wall clock wrong, by up to four times `max_clock_skew`, and right again
    /// later.
    fn master_clock(&self, chance: &mut Chance) {
        let skew = self.plan.skew.as_micros() as u64;
        for victim in self.victims(chance) {
            let limit = if chance.percent(60) { skew } else { 4 * skew };
            let offset = chance.around(limit);
            let stage = self.clone();
            let pause = chance.millis(200, 8_000);
            tokio::spawn(async move {
                stage.masters[victim].clock.set_offset(offset);
                stage.note(format!("n{victim}"), format!("wall clock {:+} ms", offset / 1000));
                sleep(pause).await;
                stage.masters[victim].clock.mend();
                stage.note(format!("n{victim}"), "wall clock is right");
            });
        }
    }

    fn cut(&self, chance: &mut Chance) {
        let gateway = &self.gateways[chance.below(self.gateways.len() as u64) as usize];
        for victim in self.victims(chance) {
            let hints = chance.percent(50);
            gateway.cut(victim, hints);
            let both = if hints { ", as does the one for hints" } else { "" };
            self.note(
                format!("g{}", gateway.index),
                format!("connection to n{victim} breaks{both}"),
            );
        }
    }

    fn dark(&self, chance: &mut Chance) {
        let gateway = chance.below(self.gateways.len() as u64) as u8;
        let pause = outage(chance);
        let way = chance.below(3);
        let (now, until) = (Instant::now(), Instant::now() + pause);
        let there = if way == 1 { now } else { until };
        let back = if way == 2 { now } else { until };
        for victim in self.victims(chance) {
            self.network.darken(gateway, victim as u8, there, back);
            let ways = ["both ways", "answers only", "questions only"][way as usize];
            self.note(
                format!("g{gateway}"),
                format!("path to n{victim} is dark for {} ms, {ways}", pause.as_millis()),
            );
        }
    }

    fn death(&self, chance: &mut Chance) {
        let stage = self.clone();
        let index = chance.below(self.gateways.len() as u64) as usize;
        let down = outage(chance);
        if !self.gateways[index].kill() {
            return;
        }
        self.note(format!("g{index}"), "dies");
        tokio::spawn(async move {
            sleep(down).await;
            stage.gateways[index].start();
            stage.note(format!("g{index}"), "is back");
        });
    }

    fn gateway_clock(&self, chance: &mut Chance) {
        let gateway = &self.gateways[chance.below(self.gateways.len() as u64) as usize];
        let offset = chance.around(gateway.clock_limit());
        gateway.clock.set_offset(offset);
        self.note(format!("g{}", gateway.index), format!("wall clock {:+} ms", offset / 1000));
    }

    /// Makes a master a replica for a while. A replica that has received no data yet keeps its own
    /// when it becomes a master again.
    fn replica(&self, chance: &mut Chance) {
        let victim = chance.below(self.masters.len() as u64) as usize;
        let of = chance.below(self.masters.len() as u64) as usize;
        let data = (of != victim).then(|| self.masters[of].data());
        let stage = self.clone();
        let pause = outage(chance);
        let whose = data.as_ref().map_or("its own data".into(), |_| format!("the data of n{of}"));
        self.masters[victim].demote(data);
        self.recorder.situation("replicas");
        self.note(format!("n{victim}"), format!("is a replica, with {whose}"));
        tokio::spawn(async move {
            sleep(pause).await;
            stage.masters[victim].promote();
            stage.note(format!("n{victim}"), "is a master again");
        });
    }

    /// Lets a master's clock run fast for a while. Afterwards the wall clock goes back by the lead,
    /// which ends no lock.
    fn slew(&self, chance: &mut Chance) {
        let victim = chance.below(self.masters.len() as u64) as usize;
        let ppm = self.plan.slewed_ppm;
        let pause = chance.millis(500, 10_000);
        self.masters[victim].clock.slew(Some(ppm));
        self.recorder.situation("clocks that ran fast");
        self.note(
            format!("n{victim}"),
            format!("its clock runs {ppm} ppm fast for {} ms", pause.as_millis()),
        );
        let stage = self.clone();
        tokio::spawn(async move {
            sleep(pause).await;
            stage.masters[victim].clock.slew(None);
            stage.note(format!("n{victim}"), "its clock has its own rate again");
        });
    }

    /// Moves a master's name to a new process. The old process ends 0.1 to 12 s later, before or
    /// after the gateways have noticed the move.
    fn name(&self, chance: &mut Chance) {
        let victim = chance.below(self.masters.len() as u64) as usize;
        if !self.masters[victim].move_name(false) {
            return;
        }
        self.note(
            format!("n{victim}"),
            "is another process from now on; open connections lead to the old one",
        );
        let stage = self.clone();
        let pause = chance.millis(100, 12_000);
        tokio::spawn(async move {
            sleep(pause).await;
            stage.masters[victim].end_former();
            stage.note(format!("n{victim}"), "the old process is gone");
        });
    }

    fn memory(&self, chance: &mut Chance) {
        for victim in self.victims(chance) {
            let stage = self.clone();
            let pause = chance.millis(20, 2_000);
            let left = chance.below(8) as u32;
            tokio::spawn(async move {
                stage.masters[victim].limit_sets(Some(left));
                stage.note(format!("n{victim}"), format!("has memory for {left} keys more"));
                sleep(pause).await;
                stage.masters[victim].limit_sets(None);
                stage.note(format!("n{victim}"), "has memory again");
            });
        }
    }

    /// Stops a gateway as far as others can see: its messages wait. Whatever it does meanwhile
    /// takes effect when its messages go on.
    fn gateway_stop(&self, chance: &mut Chance) {
        let gateway = chance.below(self.gateways.len() as u64) as u8;
        let until = Instant::now() + outage(chance);
        for master in 0..self.masters.len() {
            self.network.darken(gateway, master as u8, until, until);
        }
        self.recorder.situation("gateways stopped");
        self.note(
            format!("g{gateway}"),
            format!("is stopped for {} ms", (until - Instant::now()).as_millis()),
        );
    }

    /// Suspends everything, as if the machine under it were suspended: the time passes, and
    /// afterwards all timers and messages are due at once.
    async fn freeze(&self, chance: &mut Chance) {
        let pause = outage(chance);
        self.recorder.situation("freezes");
        self.note("everything", format!("stands still for {} ms", pause.as_millis()));
        advance(pause).await;
        self.recorder.froze(pause);
    }

    fn note(&self, who: impl Into<String>, text: impl Into<String>) {
        self.recorder.note(who, text);
    }
}

/// The length of an outage. It is often shorter than the time that gateways need to notice it.
fn outage(chance: &mut Chance) -> Duration {
    match chance.below(10) {
        0..=3 => chance.millis(2, 60),
        4..=7 => chance.millis(60, 800),
        _ => chance.millis(800, 3_000),
    }
}
