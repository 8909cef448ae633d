//! The way of one master into service: connect, look at it, do what the admission says, until it may vote. The lane waits
//! here, and answers refusals in the meantime.
//!
//! What the admission knows of the node (which quarantine it has seen, and since when) outlives connections.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::{Notify, watch};

use super::codec::Header;
use super::session::{Look, Put, Session, SessionError};
use super::url::RedisUrl;
use super::{Outage, RedisSettings, tls};
use crate::clock::{Clock, Entropy};
use crate::node::admission::{Admission, Doubt, Facts, Ground, Step, marker_key};
use crate::node::{NodeState, NodeStatus, hint};

/// How often a node in quarantine is looked at. Another gateway may have admitted it, or it may have lost its data again.
const POLL: Duration = Duration::from_secs(1);
/// The same for a node that is said to be new: whether another gateway has put that right is asked before it is believed.
const POLL_NEW: Duration = Duration::from_millis(250);
/// How often its quarantine is mentioned in the log.
const MENTION: Duration = Duration::from_secs(60);
/// Markers put in a row. More mean that somebody else keeps changing them.
const MAX_PUTS: u32 = 8;

pub(super) struct Gate {
    pub(super) url: RedisUrl,
    pub(super) settings: RedisSettings,
    pub(super) script: String,
    pub(super) admission: Admission,
    pub(super) status: watch::Sender<NodeStatus>,
    pub(super) run_id: Option<String>,
    /// The quarantine marker that was last told about.
    pub(super) waits_at: Option<String>,
    /// The quarantine marker of which it was said that the node is new; a connection that breaks must not lose the word.
    pub(super) told_new: Option<String>,
    pub(super) brand_new: Arc<Notify>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) entropy: Arc<dyn Entropy>,
}

/// A session on a node that may vote.
pub(super) struct Open {
    pub(super) session: Session,
    /// What is equal in every call.
    pub(super) header: Header,
    /// The digest of the script that belongs to this process of the node.
    pub(super) script: String,
    marker: String,
}

impl Gate {
    /// Ends when the node may vote, or cannot be reached, or must not vote for a reason that only an operator can mend.
    pub(super) async fn open(&mut self) -> Result<Open, Outage> {
        let session = Session::connect(&self.url, &self.settings).await?;
        let mut puts = 0;
        let mut mentioned: Option<Duration> = None;
        loop {
            let Look { facts, marker } = session.look(&self.settings.key_prefix).await?;
            self.saw(&facts);
            let now = self.clock.monotonic();
            // What was said of one quarantine does not count for another.
            let fresh = self.waits_at != marker;
            let brand_new = marker.is_some() && self.told_new == marker;
            match self.admission.look(&facts, marker.as_deref(), now, brand_new, self.entropy.as_ref()) {
                Step::Refuse(ground) => return Err(Outage::Refused(ground)),
                Step::Put { from, to } => {
                    puts += 1;
                    if puts > MAX_PUTS {
                        let why = "its marker keeps changing: several gateways or programs disagree about it";
                        return Err(Outage::Refused(Ground::new(why, "look at the other gateways' logs")));
                    }
                    match session.put_marker(&self.settings.key_prefix, &facts.run_id, from.as_deref(), &to).await? {
                        Put::Done | Put::OtherMarker => {}
                        Put::OtherProcess => return Err(Outage::Connecting("it was restarted just now".into())),
                    }
                }
                Step::Wait { until, ground, doubt } => {
                    puts = 0;
                    let left = until.saturating_sub(now);
                    let poll = if doubt == Doubt::New { POLL_NEW } else { POLL };
                    if fresh {
                        // Before anybody is told that this one may be admitted.
                        let _ = self.brand_new.notified().now_or_never();
                        self.waits_at = marker;
                    }
                    if fresh || self.status.borrow().state != NodeState::Quarantined {
                        self.quarantined(&ground, doubt == Doubt::New, left);
                    }
                    if doubt != Doubt::New && mentioned.is_none_or(|at| now.saturating_sub(at) >= MENTION) {
                        mentioned = Some(now);
                        let (Ground { why, advice }, seconds_left) = (&ground, left.as_secs());
                        tracing::warn!(node = %self.url, why, advice, seconds_left, "node in quarantine");
                    }
                    tokio::select! {
                        why = session.ended() => return Err(Outage::Connecting(why)),
                        () = self.brand_new.notified() => self.told_new.clone_from(&self.waits_at),
                        () = tokio::time::sleep(left.min(poll).max(Duration::from_millis(1))) => {}
                    }
                }
                Step::Admit { marker } => {
                    let script = session.load(&facts.run_id, &self.script).await?;
                    let key = marker_key(&self.settings.key_prefix);
                    let channel = hint::channel(&self.settings.key_prefix, self.url.database);
                    let header = Header::new(key, marker.clone(), channel, &self.settings.node);
                    self.admitted(&facts);
                    return Ok(Open { session, header, script, marker });
                }
            }
        }
    }

    /// What may change while a session lasts: the eviction policy, evictions, the role, the durability.
    pub(super) fn judge(&mut self, open: &Open, Look { facts, marker }: Look) -> Result<(), Outage> {
        self.status.send_if_modified(|status| {
            std::mem::replace(&mut status.evicted_keys, facts.evicted_keys) != facts.evicted_keys
        });
        let now = self.clock.monotonic();
        match self.admission.look(&facts, marker.as_deref(), now, false, self.entropy.as_ref()) {
            Step::Admit { marker } if marker == open.marker => Ok(()),
            Step::Refuse(ground) => Err(Outage::Refused(ground)),
            Step::Admit { .. } | Step::Put { .. } | Step::Wait { .. } => {
                Err(Outage::Connecting("its state has changed: it is looked at again".into()))
            }
        }
    }

    pub(super) fn out_of_service(&self, outage: Outage) {
        let (state, ground) = match outage {
            Outage::Connecting(why) => (NodeState::Connecting, Ground::new(why, "")),
            Outage::Refused(ground) => (NodeState::Refused, ground),
        };
        if self.publish(state, &ground) {
            let Ground { why, advice } = ground;
            tracing::warn!(node = %self.url, state = state.as_str(), why, advice, "node cannot vote");
        }
    }

    fn admitted(&self, facts: &Facts) {
        self.publish(NodeState::Admitted, &Ground::default());
        self.status.send_modify(|status| status.evicted_keys = facts.evicted_keys);
        tracing::info!(node = %self.url, version = %facts.version, durability = %facts.durability, "node admitted");
    }

    /// A quarantine was seen for the first time; also when another one stood there before.
    fn quarantined(&self, ground: &Ground, brand_new: bool, left: Duration) {
        let now = self.clock.wall_micros();
        // In one step: nobody may see a new node as one that is not.
        self.status.send_modify(|status| {
            enter(status, NodeState::Quarantined, ground);
            status.since_micros = now;
            status.until_micros = Some(now.saturating_add(left.as_micros() as u64));
            status.brand_new = brand_new;
        });
    }

    /// Whether there was something new to say.
    fn publish(&self, state: NodeState, ground: &Ground) -> bool {
        let now = self.clock.wall_micros();
        self.status.send_if_modified(|status| {
            let changed = status.state != state || status.detail != ground.why;
            if status.state != state {
                status.since_micros = now;
            }
            enter(status, state, ground);
            changed
        })
    }

    /// An admitted node that refuses every fencing token of this gateway.
    pub(super) fn clock_is_off(&self, off: bool, offset_micros: i64) {
        self.status.send_modify(|status| {
            status.clock_is_off = off;
            (status.detail, status.advice) = if off {
                let why = format!(
                    "its clock is {} ms from this machine's: it refuses all fencing tokens",
                    offset_micros / 1000
                );
                (why, "mend the clock that is wrong".into())
            } else {
                Default::default()
            };
        });
    }

    fn saw(&mut self, facts: &Facts) {
        if facts.run_id.is_empty() {
            return;
        }
        if self.run_id.as_ref().is_some_and(|known| *known != facts.run_id) {
            tracing::warn!(node = %self.url, "node was restarted");
            self.status.send_modify(|status| status.restarts += 1);
        }
        self.run_id = Some(facts.run_id.clone());
    }
}

fn enter(status: &mut NodeStatus, state: NodeState, ground: &Ground) {
    status.state = state;
    status.until_micros = None;
    status.brand_new = false;
    status.clock_is_off = false;
    status.detail.clone_from(&ground.why);
    status.advice.clone_from(&ground.advice);
}

impl From<SessionError> for Outage {
    fn from(error: SessionError) -> Self {
        let text = error.to_string();
        let advice = match text.split_whitespace().next().unwrap_or_default() {
            "NOPERM" => {
                "allow the gateway's user EVAL, EVALSHA, SCRIPT LOAD, GET, SET, DEL, PTTL, PEXPIRE, TIME, SCAN and INFO"
            }
            "NOAUTH" | "WRONGPASS" => "give user and password in the URL of --node",
            "OOM" => "raise maxmemory",
            "MISCONF" => "look into the server's log: it cannot write to its disk",
            "WRONGTYPE" => "another program uses the key of the marker: choose another --key-prefix",
            _ => match tls::advice(&text) {
                Some(advice) => advice,
                None => return Self::Connecting(text),
            },
        };
        Self::Refused(Ground::new(text, advice))
    }
}

/// A lane that ended, by a defect, must not go on looking admitted.
impl Drop for Gate {
    fn drop(&mut self) {
        self.publish(NodeState::Connecting, &Ground::new("the node's task has ended", ""));
    }
}
