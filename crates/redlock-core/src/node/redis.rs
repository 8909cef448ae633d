//! A real master behind one *lane*: a task that owns the one connection, takes operations from a bounded queue in order,
//! and sends the operations of all concurrent requests as one script call. What comes in while calls are under way goes
//! into the next one; a far node may have several under way, see `redis/calls.rs`. No timers gather a call: the lane lets
//! tasks that are ready run, and sends. The looks at the node's state go beside the calls.
//!
//! A lane never repairs a connection. At the first error it drops the session, answers what was under way with "unknown",
//! refuses what comes in with "down, not sent", and starts over: connect, look at the node, be admitted, load the script.
//! This file and those below it are the only ones that name the Redis client.

mod calls;
mod codec;
mod ears;
mod gate;
#[cfg(feature = "bench-internals")]
#[doc(hidden)]
pub mod internals;
mod session;
mod tls;
mod url;

use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{BoxFuture, FutureExt, OptionFuture};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use self::calls::{Answer, Calls, Sent};
use self::ears::Ears;
use self::gate::{Gate, Open};
use self::session::{Look, Session, SessionError};
pub use self::tls::{TlsError, TlsIdentity, TlsSettings};
pub use self::url::{RedisUrl, RedisUrlError};
use super::admission::{Admission, Facts, Generation, Ground, Slot, Step, quarantine};
use super::{
    Effect, Failure, Listener, Node, NodeSettings, NodeState, NodeStatus, Observer, Op, Reason, Reply, Task, Vote,
};
use crate::clock::{Clock, Entropy};

/// Operations waiting for one node. More means the node is too slow to be useful: refused at once.
const QUEUE: usize = 8192;
/// Operations in one call. A call keeps the node from serving others for as long as it runs, a few µs per operation.
const MAX_BATCH: usize = 128;
/// How often a lane lets every task that can run go first, before it sends. An idle process gives the turn back at once; a
/// busy one fills the call, and calls are what costs.
const GATHER: u32 = 2;
/// When it has brought nothing to so many calls in a row, only one call in so many still tries: with one request at a time,
/// or one lock that goes from hand to hand, it only costs time.
const ALONE: u32 = 32;
/// Bytes in one call, roughly.
const MAX_BATCH_BYTES: usize = 256 * 1024;
/// A call or heartbeat that takes longer, or longer than twice the node time-out, ends the session: rounds have given up
/// by then.
const CALL_DEADLINE: Duration = Duration::from_secs(1);
/// How often a node is asked about itself again, and an idle connection is tried. The client's own watch does not fire
/// while the socket's send buffer is full.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Pauses between two attempts to connect, doubled from the first to the last.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// How soon a node that was refused is looked at again.
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
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
    /// What all gateways call the node in its marker; its address when `None`.
    pub identity: Option<String>,
    /// Whether an operator says that the cluster is brand-new, see [`Redlock::brand_new`](crate::Redlock::brand_new).
    pub bootstrap: bool,
    /// How long rounds wait for the node.
    pub node_timeout: Duration,
    /// For nodes whose URL wants TLS.
    pub tls: TlsSettings,
}

impl RedisSettings {
    fn call_deadline(&self) -> Duration {
        CALL_DEADLINE.max(self.node_timeout * 2)
    }

    fn slot(&self, url: &RedisUrl) -> Slot {
        self.generation.slot(self.identity.as_deref().unwrap_or(url.name()))
    }

    fn quarantine(&self) -> Duration {
        if self.node.rules().quarantine_is_waited {
            quarantine(self.generation.max_ttl(), self.node.max_clock_offset)
        } else {
            Duration::ZERO
        }
    }
}

/// One Redis master.
pub struct RedisNode {
    name: String,
    queue: mpsc::Sender<Job>,
    status: watch::Receiver<NodeStatus>,
    brand_new: Arc<Notify>,
    ears: Ears,
}

/// One thing, or two that belong into one call.
struct Job {
    op: Arc<Op>,
    not_after: Instant,
    reply: Reply,
    next: Option<Box<Job>>,
}

impl From<Task> for Job {
    fn from(Task { op, not_after, reply }: Task) -> Self {
        Self { op, not_after, reply, next: None }
    }
}

impl Job {
    fn fail(self, reason: Reason, effect: Effect, detail: &str) {
        let mut job = Some(Box::new(self));
        while let Some(next) = job {
            let Job { reply, next, .. } = *next;
            reply.send(Vote::Failed(Failure::new(reason, effect, detail)));
            job = next;
        }
    }
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
        let first = NodeStatus::new(NodeState::Connecting, clock.wall_micros());
        let (status_in, status) =
            watch::channel(NodeStatus { detail: "connecting for the first time".into(), ..first });
        let name = url.name().to_owned();
        let brand_new = Arc::new(Notify::new());
        let ears = Ears::new(&url, &settings, entropy.clone());
        let gate = Gate {
            waits_at: None,
            told_new: None,
            script: session::locks_script(settings.node.rules()),
            admission: Admission::new(settings.slot(&url), settings.quarantine()).expecting_new(settings.bootstrap),
            url,
            settings,
            status: status_in,
            run_id: None,
            brand_new: brand_new.clone(),
            clock,
            entropy,
        };
        let lane = Lane { gate, jobs, status: status.clone(), clock_is_far: false, alone: 0, observer };
        tokio::spawn(lane.run());
        Self { name, queue, status, brand_new, ears }
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
        self.enqueue(Job { op, not_after, reply, next: None });
    }

    fn submit_both(&self, first: Task, second: Task) {
        self.enqueue(Job { next: Some(Box::new(second.into())), ..first.into() });
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.ears.listen(listener);
    }

    fn hears(&self) -> bool {
        self.ears.hears()
    }

    fn admit_brand_new(&self) {
        // Also while it reconnects: the lane knows which quarantine is meant, and forgets the word at another.
        self.brand_new.notify_one();
    }
}

impl Drop for RedisNode {
    fn drop(&mut self) {
        self.ears.stop();
    }
}

impl RedisNode {
    fn enqueue(&self, job: Job) {
        match self.queue.try_send(job) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(job)) => {
                job.fail(Reason::Overloaded, Effect::None, "the node's queue is full");
            }
            Err(mpsc::error::TrySendError::Closed(job)) => {
                job.fail(Reason::Down, Effect::None, "the node's task has ended");
            }
        }
    }
}

struct Lane {
    gate: Gate,
    jobs: mpsc::Receiver<Job>,
    status: watch::Receiver<NodeStatus>,
    clock_is_far: bool,
    /// Calls in a row that found no company, see `gather`.
    alone: u32,
    observer: Arc<dyn Observer>,
}

/// The node was dropped: nobody can submit any more.
struct Closed;

/// Why a lane has no session.
enum Outage {
    Connecting(String),
    Refused(Ground),
}

impl Lane {
    async fn run(mut self) {
        let mut pause = BACKOFF.0;
        loop {
            let outage = match refusing(&mut self.jobs, &self.status, self.gate.open()).await {
                Err(Closed) => return,
                Ok(Err(outage)) => outage,
                Ok(Ok(open)) => {
                    let since = Instant::now();
                    match self.serve(open).await {
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
                // At most the pause itself: how soon a node is back is promised.
                Outage::Connecting(_) => pause.mul_f64(0.5 + 0.5 * self.gate.entropy.unit()),
                Outage::Refused(_) => REFUSED_PAUSE,
            };
            pause = (pause * 2).min(BACKOFF.1);
            self.gate.out_of_service(outage);
            if let Err(Closed) = refusing(&mut self.jobs, &self.status, tokio::time::sleep(wait)).await {
                return;
            }
        }
    }

    /// Serves until the session fails.
    async fn serve(&mut self, open: Open) -> Result<Outage, Closed> {
        let mut waiting: Vec<Job> = Vec::with_capacity(MAX_BATCH);
        let mut calls = Calls::new(&open);
        let why = self.converse(&open, &mut calls, &mut waiting).await;
        // It may be on its way to the node, or have run there.
        let lost = "the connection was lost before this was answered";
        fail_all(calls.give_up(), Reason::Down, Effect::Possible, lost);
        fail_all(waiting, Reason::Down, Effect::None, "the connection was lost before this was sent");
        why
    }

    async fn converse(&mut self, open: &Open, calls: &mut Calls<'_>, waiting: &mut Vec<Job>) -> Result<Outage, Closed> {
        let mut heartbeat = tokio::time::interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let prefix = self.gate.settings.key_prefix.clone();
        let mut look: Option<BoxFuture<'_, Result<Look, SessionError>>> = None;
        let (mut idle, mut closed) = (true, false);
        // Tells how far the node is before there is work that would make it look farther.
        calls.send(Vec::new());
        loop {
            if calls.takes(waiting.len()) {
                self.gather(waiting).await;
                let call = self.in_time(waiting.drain(..next_call(waiting)).collect());
                if call.is_empty() {
                    // There may be others behind those that came too late, and nothing else to wake the lane for them.
                    continue;
                }
                idle = false;
                calls.send(call);
            }
            if closed && calls.none() && waiting.is_empty() {
                return Err(Closed);
            }
            let receives = !closed && calls.room() && waiting.len() < MAX_BATCH;
            tokio::select! {
                // In this order, or a busy node would never be looked at.
                biased;
                _ = heartbeat.tick() => {
                    // Beside the calls: it is several questions one after the other, and locks must not wait for them.
                    look.get_or_insert_with(|| open.session.look(&prefix).boxed());
                    // A call without operations: it notices a dead connection, a restart and a lost marker.
                    if std::mem::replace(&mut idle, true) && calls.none() {
                        calls.send(Vec::new());
                    }
                }
                Some(seen) = OptionFuture::from(look.as_mut()) => {
                    look = None;
                    if let Err(outage) = seen.map_err(Outage::from).and_then(|seen| self.gate.judge(open, seen)) {
                        return Ok(outage);
                    }
                }
                (sent, answer) = calls.next(), if !calls.none() => {
                    if let Err(outage) = self.answered(sent, answer) {
                        return Ok(outage);
                    }
                }
                taken = self.jobs.recv_many(waiting, MAX_BATCH), if receives => closed = taken == 0,
                why = open.session.ended(), if calls.none() => return Ok(Outage::Connecting(why)),
            }
        }
    }

    /// Takes along what is submitted by requests that are about to run. Whoever submits first wakes the lane, and it would
    /// run before all others that came in with the same look at the network.
    async fn gather(&mut self, waiting: &mut Vec<Job>) {
        if self.alone >= ALONE && !self.alone.is_multiple_of(ALONE) {
            self.alone = self.alone.wrapping_add(1);
            return unfold(waiting);
        }
        let before = waiting.len();
        for _ in 0..GATHER {
            tokio::task::yield_now().await;
        }
        while waiting.len() < MAX_BATCH
            && let Ok(job) = self.jobs.try_recv()
        {
            waiting.push(job);
        }
        self.alone = if waiting.len() == before { self.alone.wrapping_add(1) } else { 0 };
        unfold(waiting);
    }

    /// Answers what need not be sent any more: running an acquire whose round has given up would only make work for the
    /// clean-up.
    fn in_time(&self, mut jobs: Vec<Job>) -> Vec<Job> {
        let now = Instant::now();
        for late in jobs.extract_if(.., |job| job.not_after < now && !matches!(*job.op, Op::Release { .. })) {
            late.reply.send(Vote::Failed(Failure::new(Reason::Timeout, Effect::None, "not sent in time")));
        }
        jobs
    }

    /// Hands out the votes.
    fn answered(&mut self, Sent { jobs, at }: Sent, answer: Answer) -> Result<(), Outage> {
        if !jobs.is_empty() {
            self.observer.node_call(self.gate.url.name(), jobs.len(), at.elapsed());
        }
        let replies = match answer {
            Answer::Page(page) => return answer_scan(jobs, page),
            Answer::Replies(Ok(replies)) if replies.len() == jobs.len() + 2 => replies,
            Answer::Replies(Ok(replies)) => {
                let text = format!("{} values in answer to {} operations", replies.len(), jobs.len());
                fail_all(jobs, Reason::Error, Effect::Possible, &text);
                return Err(Outage::Connecting(text));
            }
            Answer::Replies(Err(error)) => {
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
            let ours = self.gate.clock.wall_micros() as i64 - at.elapsed().as_micros() as i64 / 2;
            self.clock_offset(node_time - ours);
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

    fn clock_offset(&mut self, offset_micros: i64) {
        self.observer.clock_offset(self.gate.url.name(), offset_micros);
        let max = self.gate.settings.node.max_clock_offset;
        let far = Duration::from_micros(offset_micros.unsigned_abs()) > max / 2;
        let off = Duration::from_micros(offset_micros.unsigned_abs()) > max;
        if off != self.status.borrow().clock_is_off {
            self.gate.clock_is_off(off, offset_micros);
        }
        if std::mem::replace(&mut self.clock_is_far, far) != far {
            let (node, offset_ms, max_ms) = (&self.gate.url, offset_micros / 1000, max.as_millis() as u64);
            if far {
                tracing::warn!(%node, offset_ms, max_ms, "the node's clock and this machine's are far apart: mend one");
            } else {
                tracing::info!(%node, offset_ms, "the node's clock and this machine's agree again");
            }
        }
    }
}

/// Waits for something without a session: whoever submits in the meantime hears at once that nothing was sent.
async fn refusing<T>(
    jobs: &mut mpsc::Receiver<Job>,
    status: &watch::Receiver<NodeStatus>,
    work: impl Future<Output = T>,
) -> Result<T, Closed> {
    tokio::pin!(work);
    loop {
        tokio::select! {
            done = &mut work => return Ok(done),
            job = jobs.recv() => match job {
                None => return Err(Closed),
                Some(job) => {
                    let status = status.borrow();
                    let reason = match status.state {
                        NodeState::Quarantined | NodeState::Refused => Reason::Quarantined,
                        NodeState::Admitted | NodeState::Connecting => Reason::Down,
                    };
                    job.fail(reason, Effect::None, &status.detail);
                }
            },
        }
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

/// One after the other what came in twos.
fn unfold(jobs: &mut Vec<Job>) {
    if jobs.iter().all(|job| job.next.is_none()) {
        return;
    }
    for mut job in std::mem::replace(jobs, Vec::with_capacity(2 * MAX_BATCH)) {
        let next = job.next.take();
        jobs.push(job);
        jobs.extend(next.map(|next| *next));
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
        .min(MAX_BATCH)
}

fn fail_all(jobs: Vec<Job>, reason: Reason, effect: Effect, detail: &str) {
    for job in jobs {
        job.fail(reason, effect, detail);
    }
}

async fn scan(session: &Session, op: &Op) -> Result<Vote, SessionError> {
    let Op::Scan { key_prefix: prefix, cursor, count } = op else { unreachable!("only scans go this way") };
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
    let (next, keys) = session.scan(cursor, pattern, *count).await?;
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
    /// What a gateway that started now would make of it.
    pub verdict: Verdict,
    /// Its clock minus ours, in microseconds.
    pub clock_offset_micros: i64,
}

/// What a gateway that starts now would do with a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Let it vote.
    Admitted,
    /// Let it vote after so long, counted from the gateway's start.
    Quarantined(Duration, Ground),
    /// Not let it vote.
    Refused(Ground),
}

/// Looks at a node without changing anything.
pub async fn probe(
    url: &RedisUrl,
    settings: &RedisSettings,
    seams: (&dyn Clock, &dyn Entropy),
) -> Result<Probe, String> {
    let (clock, entropy) = seams;
    let look = async {
        let session = Session::connect(url, settings).await?;
        let Look { facts, marker } = session.look(&settings.key_prefix).await?;
        let before = clock.wall_micros() as i64;
        let node = session.time_micros().await?;
        let clock_offset_micros = node - (before + clock.wall_micros() as i64) / 2;
        let verdict = verdict(settings, url, &facts, marker.clone(), entropy);
        Ok(Probe { facts, marker, verdict, clock_offset_micros })
    };
    look.await.map_err(|error: SessionError| error.to_string())
}

/// Plays the admission through without a node.
fn verdict(
    settings: &RedisSettings,
    url: &RedisUrl,
    facts: &Facts,
    mut marker: Option<String>,
    entropy: &dyn Entropy,
) -> Verdict {
    let mut admission = Admission::new(settings.slot(url), settings.quarantine());
    loop {
        match admission.look(facts, marker.as_deref(), Duration::ZERO, false, entropy) {
            Step::Put { to, .. } => marker = Some(to),
            Step::Admit { .. } => return Verdict::Admitted,
            Step::Wait { until, ground, .. } => return Verdict::Quarantined(until, ground),
            Step::Refuse(ground) => return Verdict::Refused(ground),
        }
    }
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
        let session = Session::connect(url, settings).await?;
        let marker = match new {
            NewMarker::Final => {
                // Every marker is another one: the node's time serves as the nonce.
                let nonce = session.time_micros().await?.unsigned_abs();
                settings.slot(url).admitting(&session.look(&settings.key_prefix).await?.facts, nonce)
            }
            NewMarker::UnderWay { longest_ttl, left } => Generation::marker_under_way(left, longest_ttl),
        };
        session.set_marker(&settings.key_prefix, &marker).await
    };
    write.await.map_err(|error: SessionError| error.to_string())
}
