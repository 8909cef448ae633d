//! A real master behind one *lane*: a task that owns the one connection, takes operations from a bounded queue in order,
//! and sends the operations of all concurrent requests as one script call while the previous call is in flight. No
//! timers gather a batch: an idle lane sends at once, a busy one sends more at a time.
//!
//! A lane never repairs a connection. At the first error it drops the session, answers what was under way with "unknown",
//! refuses what comes in with "down, not sent", and starts over: connect, look at the node, be admitted, load the script.
//! This file and those below it are the only ones that name the Redis client.

mod codec;
mod session;
mod url;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use self::session::{Admission, Session, SessionError};
pub use self::url::{RedisUrl, RedisUrlError};
use super::admission::{Facts, Generation, marker_key};
use super::{Effect, Failure, Node, NodeSettings, NodeState, NodeStatus, Observer, Op, Reason, Reply, Vote};
use crate::clock::{Clock, Entropy};

/// Operations waiting for one node. More means the node is too slow to be useful: refused at once.
const QUEUE: usize = 8192;
/// Operations in one call. A call keeps the node from serving others for as long as it runs, a few µs per operation.
const MAX_BATCH: usize = 128;
/// Bytes in one call, roughly.
const MAX_BATCH_BYTES: usize = 256 * 1024;
/// A call or heartbeat that takes longer, or longer than twice the node time-out, ends the session: rounds have given up
/// by then.
const CALL_DEADLINE: Duration = Duration::from_secs(1);
/// How often an idle connection is tried. The client's own watch does not fire while the socket's send buffer is full.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// After how many heartbeats a node is asked about itself again.
const LOOK_EVERY: u32 = 5;
/// Pauses between two attempts to connect, doubled from the first to the last.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// How soon a node that was refused is looked at again.
const REFUSED_PAUSE: Duration = Duration::from_secs(2);
/// A session that lasted this long was a good one: the next back-off begins small.
const GOOD_SESSION: Duration = Duration::from_secs(5);

const _: () = assert!(MAX_BATCH <= QUEUE && BACKOFF.0.as_millis() < BACKOFF.1.as_millis());

/// What a lane needs to know.
#[derive(Clone)]
pub struct RedisSettings {
    /// What the scripts need.
    pub node: NodeSettings,
    /// Prefix of all keys; also names the marker.
    pub key_prefix: String,
    /// What the marker must say.
    pub generation: Generation,
    /// How long rounds wait for the node.
    pub node_timeout: Duration,
}

impl RedisSettings {
    fn call_deadline(&self) -> Duration {
        CALL_DEADLINE.max(self.node_timeout * 2)
    }
}

/// One Redis master.
pub struct RedisNode {
    name: String,
    queue: mpsc::Sender<Job>,
    status: watch::Receiver<NodeStatus>,
}

struct Job {
    op: Arc<Op>,
    not_after: Instant,
    reply: Reply,
}

impl RedisNode {
    /// Starts the lane; must be called on a tokio runtime. The lane ends when the node is dropped.
    pub fn start(
        url: RedisUrl,
        settings: RedisSettings,
        clock: Arc<dyn Clock>,
        entropy: Arc<dyn Entropy>,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let (queue, jobs) = mpsc::channel(QUEUE);
        let (status_in, status) = watch::channel(NodeStatus::connecting());
        let name = url.name().to_owned();
        let script = session::locks_script(settings.node.rules());
        let lane = Lane { url, settings, script, jobs, status: status_in, run_id: None, clock, entropy, observer };
        tokio::spawn(lane.run());
        Self { name, queue, status }
    }
}

impl Node for RedisNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.status.clone()
    }

    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply) {
        let (job, failure) = match self.queue.try_send(Job { op, not_after, reply }) {
            Ok(()) => return,
            Err(mpsc::error::TrySendError::Full(job)) => (job, (Reason::Overloaded, "the node's queue is full")),
            Err(mpsc::error::TrySendError::Closed(job)) => (job, (Reason::Down, "the node's task has ended")),
        };
        job.reply.send(Vote::Failed(Failure::new(failure.0, Effect::None, failure.1)));
    }
}

struct Lane {
    url: RedisUrl,
    settings: RedisSettings,
    script: String,
    jobs: mpsc::Receiver<Job>,
    status: watch::Sender<NodeStatus>,
    run_id: Option<String>,
    clock: Arc<dyn Clock>,
    entropy: Arc<dyn Entropy>,
    observer: Arc<dyn Observer>,
}

/// The node was dropped: nobody can submit any more.
struct Closed;

/// Why a lane has no session.
enum Outage {
    Connecting(String),
    Refused(String),
}

impl From<SessionError> for Outage {
    fn from(error: SessionError) -> Self {
        Self::Connecting(error.to_string())
    }
}

impl Lane {
    async fn run(mut self) {
        let mut pause = BACKOFF.0;
        loop {
            let opened = self.refusing(Self::open(self.url.clone(), self.settings.clone(), self.script.clone()));
            let outage = match opened.await {
                Err(Closed) => return,
                Ok(Err(outage)) => outage,
                Ok(Ok((session, facts, header, script))) => {
                    self.admitted(&facts);
                    let since = Instant::now();
                    match self.serve(session, &header, &script).await {
                        Err(Closed) => return,
                        Ok(outage) => {
                            if since.elapsed() >= GOOD_SESSION {
                                pause = BACKOFF.0;
                            }
                            outage
                        }
                    }
                }
            };
            let wait = match &outage {
                Outage::Connecting(_) => pause.mul_f64(0.5 + self.entropy.unit()),
                Outage::Refused(_) => REFUSED_PAUSE,
            };
            pause = (pause * 2).min(BACKOFF.1);
            self.out_of_service(outage);
            if let Err(Closed) = self.refusing(tokio::time::sleep(wait)).await {
                return;
            }
        }
    }

    /// Connect, look at the node, be admitted, load the script.
    async fn open(
        url: RedisUrl,
        settings: RedisSettings,
        script: String,
    ) -> Result<(Session, Facts, codec::Header, String), Outage> {
        let session = Session::connect(&url, settings.call_deadline()).await?;
        let facts = session.facts().await?;
        if let Some(defect) = facts.unfit() {
            return Err(Outage::Refused(defect));
        }
        match session.admit(&settings.key_prefix, &settings.generation, &facts.run_id, &script).await? {
            Admission::Refused(why) => Err(Outage::Refused(why)),
            Admission::Admitted { script, marker } => {
                let header = codec::Header::new(marker_key(&settings.key_prefix), marker, &settings.node);
                Ok((session, facts, header, script))
            }
        }
    }

    /// Waits for something without a session: whoever submits in the meantime hears at once that nothing was sent.
    async fn refusing<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Closed> {
        tokio::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Ok(done),
                job = self.jobs.recv() => match job {
                    None => return Err(Closed),
                    Some(job) => {
                        let status = self.status.borrow();
                        let reason = match status.state {
                            NodeState::Quarantined | NodeState::Refused => Reason::Quarantined,
                            NodeState::Admitted | NodeState::Connecting => Reason::Down,
                        };
                        job.reply.send(Vote::Failed(Failure::new(reason, Effect::None, status.detail.clone())));
                    }
                },
            }
        }
    }

    /// Serves until the session fails.
    async fn serve(&mut self, mut session: Session, header: &codec::Header, script: &str) -> Result<Outage, Closed> {
        let mut batch: Vec<Job> = Vec::with_capacity(MAX_BATCH);
        let mut heartbeat = tokio::time::interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut idle, mut beats) = (true, 0);
        loop {
            if batch.is_empty() {
                tokio::select! {
                    biased;
                    taken = self.jobs.recv_many(&mut batch, MAX_BATCH) => {
                        if taken == 0 {
                            return Err(Closed);
                        }
                    }
                    why = session.ended() => return Ok(Outage::Connecting(why)),
                    _ = heartbeat.tick() => {
                        beats += 1;
                        if beats % LOOK_EVERY == 0 && let Err(outage) = self.look_again(&session).await {
                            return Ok(outage);
                        }
                        // A call without operations: it notices a dead connection, a restart and a lost marker.
                        if std::mem::replace(&mut idle, true)
                            && let Err(outage) = self.call(&session, header, script, Vec::new()).await
                        {
                            return Ok(outage);
                        }
                        continue;
                    }
                }
            }
            idle = false;
            let call = batch.drain(..next_call(&batch)).collect();
            if let Err(outage) = self.call(&session, header, script, call).await {
                fail_all(batch, Reason::Down, Effect::None, "the connection was lost before this was sent");
                return Ok(outage);
            }
        }
    }

    /// Sends operations as one call and hands out the votes.
    async fn call(
        &self,
        session: &Session,
        header: &codec::Header,
        script: &str,
        mut jobs: Vec<Job>,
    ) -> Result<(), Outage> {
        let started = Instant::now();
        // Running an acquire whose round has given up would only make work for the clean-up.
        let submitted = jobs.len();
        for late in jobs.extract_if(.., |job| job.not_after < started && !matches!(*job.op, Op::Release { .. })) {
            late.reply.send(Vote::Failed(Failure::new(Reason::Timeout, Effect::None, "not sent in time")));
        }
        if jobs.is_empty() && submitted > 0 {
            return Ok(());
        }
        if let Some(Op::Scan { key_prefix, cursor, count }) = jobs.first().map(|job| job.op.as_ref()) {
            let result = scan(session, key_prefix, cursor, *count).await;
            self.observer.node_call(self.url.name(), 1, started.elapsed());
            return answer_scan(jobs, result);
        }

        let (keys, arguments) = codec::encode(header, jobs.iter().map(|job| &job.op));
        let result = session.call(script, keys, arguments).await;
        if !jobs.is_empty() {
            self.observer.node_call(self.url.name(), jobs.len(), started.elapsed());
        }
        let replies = match result {
            Ok(replies) if replies.len() == jobs.len() + 2 => replies,
            Ok(replies) => {
                let text = format!("{} values in answer to {} operations", replies.len(), jobs.len());
                fail_all(jobs, Reason::Error, Effect::Possible, &text);
                return Err(Outage::Connecting(text));
            }
            Err(error) => {
                let (reason, effect) = match &error {
                    SessionError::Timeout => (Reason::Timeout, Effect::Possible),
                    SessionError::Broken(_) => (Reason::Down, Effect::Possible),
                    SessionError::NoScript | SessionError::Refused(_) => (Reason::Down, Effect::None),
                    SessionError::Error(_) => (Reason::Error, Effect::Possible),
                };
                fail_all(jobs, reason, effect, &error.to_string());
                return Err(error.into());
            }
        };

        let mut replies = replies.into_iter();
        if let Some(node_time) = replies.next().and_then(|time| time.as_i64()) {
            // The node read its clock somewhere between our sending and now; the middle is the best guess.
            let ours = self.clock.wall_micros() as i64 - started.elapsed().as_micros() as i64 / 2;
            self.observer.clock_offset(self.url.name(), node_time - ours);
        }
        let admitted = replies.next().and_then(|admitted| admitted.as_i64()) == Some(1);
        let mut unfit = (!admitted).then_some("its marker was lost or changed: it must be admitted again");
        for (job, reply) in jobs.into_iter().zip(replies) {
            let vote = codec::decode(reply);
            unfit = unfit.or(unfit_by(&vote));
            job.reply.send(vote);
        }
        unfit.map_or(Ok(()), |why| Err(Outage::Connecting(why.into())))
    }

    /// What may change while a session lasts: the eviction policy, evictions, the role.
    async fn look_again(&self, session: &Session) -> Result<(), Outage> {
        let facts = session.facts().await?;
        self.status.send_if_modified(|status| {
            std::mem::replace(&mut status.evicted_keys, facts.evicted_keys) != facts.evicted_keys
        });
        facts.unfit().map_or(Ok(()), |defect| Err(Outage::Refused(defect)))
    }

    fn admitted(&mut self, facts: &Facts) {
        let restarted = self.run_id.as_ref().is_some_and(|known| *known != facts.run_id);
        self.run_id = Some(facts.run_id.clone());
        self.status.send_modify(|status| {
            status.state = NodeState::Admitted;
            status.detail.clear();
            status.restarts += u64::from(restarted);
            status.evicted_keys = facts.evicted_keys;
        });
        tracing::info!(node = %self.url, version = %facts.version, restarted, "node admitted");
    }

    fn out_of_service(&mut self, outage: Outage) {
        let (state, detail) = match outage {
            Outage::Connecting(detail) => (NodeState::Connecting, detail),
            Outage::Refused(detail) => (NodeState::Refused, detail),
        };
        let changed = self.status.send_if_modified(|status| {
            let changed = status.state != state || status.detail != detail;
            status.state = state;
            status.detail.clone_from(&detail);
            changed
        });
        if changed {
            tracing::warn!(node = %self.url, state = state.as_str(), detail, "node cannot vote");
        }
    }
}

/// A lane that ended, by a defect, must not go on looking admitted.
impl Drop for Lane {
    fn drop(&mut self) {
        self.status.send_modify(|status| {
            status.state = NodeState::Connecting;
            status.detail = "the node's task has ended".into();
        });
    }
}

/// Why a node that gives this vote must be looked at again before it may go on voting.
fn unfit_by(vote: &Vote) -> Option<&'static str> {
    match vote {
        Vote::Failed(Failure { reason: Reason::Error, detail, .. }) if detail.starts_with("READONLY") => {
            Some("it takes no writes any more: it has become a replica")
        }
        _ => None,
    }
}

/// How many operations go into the next call: a scan alone, others until a scan or until the call is full.
fn next_call(batch: &[Job]) -> usize {
    let is_scan = |job: &Job| matches!(*job.op, Op::Scan { .. });
    if batch.first().is_some_and(is_scan) {
        return 1;
    }
    let mut bytes = 0;
    batch
        .iter()
        .position(|job| {
            bytes += codec::weight(&job.op);
            is_scan(job) || bytes > MAX_BATCH_BYTES
        })
        .map_or(batch.len(), |at| at.max(1))
}

fn fail_all(jobs: Vec<Job>, reason: Reason, effect: Effect, detail: &str) {
    for job in jobs {
        job.reply.send(Vote::Failed(Failure::new(reason, effect, detail)));
    }
}

async fn scan(session: &Session, prefix: &Bytes, cursor: &Bytes, count: u32) -> Result<Vote, SessionError> {
    let cursor = match std::str::from_utf8(cursor) {
        Ok("") => "0",
        Ok(cursor) if cursor.bytes().all(|b| b.is_ascii_digit()) => cursor,
        _ => return Ok(Vote::Failed(Failure::new(Reason::Error, Effect::None, "not a cursor of this node"))),
    };
    let mut pattern = String::with_capacity(prefix.len() + 1);
    for c in String::from_utf8_lossy(prefix).chars() {
        if "*?[]^\\".contains(c) {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('*');
    let (next, keys) = session.scan(cursor, pattern, count).await?;
    let next = (next != "0").then(|| Bytes::from(next));
    Ok(Vote::Page { keys, next })
}

fn answer_scan(jobs: Vec<Job>, result: Result<Vote, SessionError>) -> Result<(), Outage> {
    match result {
        Ok(vote) => {
            for job in jobs {
                job.reply.send(vote.clone());
            }
            Ok(())
        }
        Err(SessionError::Error(text) | SessionError::Refused(text)) => {
            // Not allowed to SCAN, for instance: no reason to stop voting.
            fail_all(jobs, Reason::Error, Effect::None, &text);
            Ok(())
        }
        Err(error) => {
            fail_all(jobs, Reason::Down, Effect::None, &error.to_string());
            Err(error.into())
        }
    }
}

/// What `check` wants to know of one node.
#[derive(Debug, Clone)]
pub struct Probe {
    /// What it said about itself.
    pub facts: Facts,
    /// The marker that stands there.
    pub marker: Option<String>,
    /// Why it would not be admitted, if so.
    pub refusal: Option<String>,
    /// Its clock minus ours, in microseconds.
    pub clock_offset_micros: i64,
}

/// Looks at a node without changing anything.
pub async fn probe(url: &RedisUrl, settings: &RedisSettings, clock: &dyn Clock) -> Result<Probe, String> {
    let look = async {
        let session = Session::connect(url, settings.call_deadline()).await?;
        let facts = session.facts().await?;
        let marker = session.marker(&settings.key_prefix).await?;
        let before = clock.wall_micros() as i64;
        let node = session.time_micros().await?;
        let clock_offset_micros = node - (before + clock.wall_micros() as i64) / 2;
        let foreign = marker.as_deref().filter(|marker| !marker.starts_with(settings.generation.config()));
        let refusal = facts.unfit().or_else(|| foreign.map(|marker| settings.generation.conflict(marker)));
        Ok(Probe { facts, marker, refusal, clock_offset_micros })
    };
    look.await.map_err(|error: SessionError| error.to_string())
}

/// What [`overwrite_marker`] writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewMarker<'a> {
    /// A marker that no gateway accepts. It keeps the longest TTL that locks on the node can have, for whoever takes an
    /// interrupted change up again.
    UnderWay {
        /// That TTL.
        longest_ttl: Duration,
        /// The hash of the node set that is being left.
        left: &'a str,
    },
    /// The marker of the settings.
    Final,
}

/// Puts a marker on a node, whatever stands there: the operator's step after a change of configuration.
pub async fn overwrite_marker(url: &RedisUrl, settings: &RedisSettings, new: NewMarker<'_>) -> Result<(), String> {
    let write = async {
        let session = Session::connect(url, settings.call_deadline()).await?;
        let marker = match new {
            NewMarker::Final => settings.generation.marker(&session.facts().await?.run_id),
            NewMarker::UnderWay { longest_ttl, left } => Generation::marker_under_way(left, longest_ttl),
        };
        session.set_marker(&settings.key_prefix, &marker).await
    };
    write.await.map_err(|error: SessionError| error.to_string())
}
