//! The way of a simulated master into service: `node/redis/gate.rs` of the core, with the wire replaced. The decisions are
//! the core's own (`Admission`); only looking and acting are done here.

use std::sync::Arc;
use std::time::Duration;

use redlock_core::clock::Clock;
use redlock_core::node::admission::{Doubt, Facts, Ground, Step};
use redlock_core::node::{NodeState, NodeStatus};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::{CALL_DEADLINE, Current, LaneParts, Outage, Session};
use crate::master::{Put, Question, Reply};

const POLL: Duration = Duration::from_secs(1);
const MAX_PUTS: u32 = 8;

pub(super) struct Gate {
    pub(super) parts: LaneParts,
    pub(super) status: watch::Sender<NodeStatus>,
    pub(super) brand_new: Arc<Notify>,
    pub(super) current: Arc<Current>,
    /// The quarantine marker that was last told about.
    pub(super) waits_at: Option<String>,
}

/// A session on a master that may vote.
pub(super) struct Open {
    pub(super) session: Session,
    pub(super) marker: String,
}

impl Gate {
    /// Ends when the master may vote, or cannot be reached, or is refused.
    pub(super) async fn open(&mut self) -> Result<Open, Outage> {
        let session = self.connect().await?;
        let mut puts = 0;
        let mut told_brand_new = false;
        loop {
            let (facts, marker) = look(&session).await?;
            let fresh = self.waits_at != marker;
            let brand_new = std::mem::take(&mut told_brand_new) && !fresh;
            match self.step(&facts, marker.as_deref(), brand_new) {
                Step::Refuse(ground) => return Err(Outage::Refused(ground)),
                Step::Put { from, to } => {
                    puts += 1;
                    if puts > MAX_PUTS {
                        return Err(Outage::Refused(ground("its marker keeps changing")));
                    }
                    self.note(format!("puts marker {}", state_of(&to)));
                    match put(&session, &facts, from, to).await? {
                        Put::Done | Put::OtherMarker => {}
                        Put::OtherProcess => return Err(Outage::Connecting("it was restarted just now".into())),
                    }
                }
                Step::Wait { until, doubt, ground } => {
                    puts = 0;
                    let left = until.saturating_sub(self.parts.clock.monotonic());
                    if fresh {
                        // What was said of one quarantine does not count for another.
                        tokio::select! {
                            biased;
                            () = self.brand_new.notified() => {}
                            () = std::future::ready(()) => {}
                        }
                        self.waits_at = marker;
                    }
                    if fresh || self.status.borrow().state != NodeState::Quarantined {
                        self.quarantined(&ground, doubt, left);
                    }
                    tokio::select! {
                        biased;
                        why = session.connection.ended() => return Err(Outage::Connecting(why)),
                        () = self.brand_new.notified() => told_brand_new = true,
                        () = tokio::time::sleep(left.min(POLL).max(Duration::from_millis(1))) => {}
                    }
                }
                Step::Admit { marker } => {
                    // The real lane loads its script here; looking stands for that round trip.
                    look(&session).await?;
                    self.publish(NodeState::Admitted, &Ground::default());
                    self.current.admit(Some(Instant::now()));
                    self.parts.recorder.count(|counts| counts.admissions += 1);
                    self.note("admits it".into());
                    return Ok(Open { session, marker });
                }
            }
        }
    }

    pub(super) async fn look_again(&mut self, open: &Open) -> Result<(), Outage> {
        let (facts, marker) = look(&open.session).await?;
        match self.step(&facts, marker.as_deref(), false) {
            Step::Admit { marker } if marker == open.marker => Ok(()),
            Step::Refuse(ground) => Err(Outage::Refused(ground)),
            Step::Admit { .. } | Step::Put { .. } | Step::Wait { .. } => {
                Err(Outage::Connecting("its state has changed: it is looked at again".into()))
            }
        }
    }

    pub(super) fn out_of_service(&self, outage: Outage) {
        let (state, ground) = match outage {
            Outage::Connecting(why) => (NodeState::Connecting, ground(&why)),
            Outage::Refused(ground) => (NodeState::Refused, ground),
        };
        if self.publish(state, &ground) {
            self.note(format!("finds it {}: {}", state.as_str(), ground.why));
        }
    }

    async fn connect(&self) -> Result<Session, Outage> {
        let parts = &self.parts;
        let connection = parts.network.connect(parts.gateway, &parts.master, CALL_DEADLINE).await;
        let connection = connection.map_err(Outage::Connecting)?;
        self.current.connect(Some(connection.clone()));
        Ok(Session { connection, current: self.current.clone() })
    }

    fn step(&mut self, facts: &Facts, marker: Option<&str>, brand_new: bool) -> Step {
        let now = self.parts.clock.monotonic();
        self.parts.admission.look(facts, marker, now, brand_new, self.parts.entropy.as_ref())
    }

    fn quarantined(&self, ground: &Ground, doubt: Doubt, left: Duration) {
        let now = self.parts.clock.wall_micros();
        self.status.send_modify(|status| {
            enter(status, NodeState::Quarantined, ground);
            status.since_micros = now;
            status.until_micros = Some(now.saturating_add(left.as_micros() as u64));
            status.brand_new = doubt == Doubt::New;
        });
        self.parts.recorder.count(|counts| counts.quarantines += 1);
        self.note(format!("sees it quarantined ({doubt:?}), {} ms left", left.as_millis()));
    }

    fn publish(&self, state: NodeState, ground: &Ground) -> bool {
        let now = self.parts.clock.wall_micros();
        self.status.send_if_modified(|status| {
            let changed = status.state != state || status.detail != ground.why;
            if status.state != state {
                status.since_micros = now;
            }
            enter(status, state, ground);
            changed
        })
    }

    fn note(&self, text: String) {
        self.parts.recorder.note(format!("g{} of n{}", self.parts.gateway, self.parts.master.index), text);
    }
}

fn enter(status: &mut NodeStatus, state: NodeState, ground: &Ground) {
    status.state = state;
    status.until_micros = None;
    status.brand_new = false;
    status.detail.clone_from(&ground.why);
    status.advice.clone_from(&ground.advice);
}

async fn look(session: &Session) -> Result<(Facts, Option<String>), Outage> {
    match session.ask(Question::Look).await? {
        Reply::Seen(facts, marker) => Ok((facts, marker)),
        Reply::Put(_) | Reply::Votes(..) | Reply::NoScript | Reply::Listening => {
            Err(Outage::Connecting("an answer to another question".into()))
        }
    }
}

async fn put(session: &Session, facts: &Facts, from: Option<String>, to: String) -> Result<Put, Outage> {
    match session.ask(Question::Put { run_id: facts.run_id.clone(), from, to }).await? {
        Reply::Put(put) => Ok(put),
        Reply::Seen(..) | Reply::Votes(..) | Reply::NoScript | Reply::Listening => {
            Err(Outage::Connecting("an answer to another question".into()))
        }
    }
}

/// The end of a marker: what it says of the process.
fn state_of(marker: &str) -> &str {
    marker.rsplit(':').next().unwrap_or(marker)
}

fn ground(why: &str) -> Ground {
    Ground { why: why.into(), advice: String::new() }
}
