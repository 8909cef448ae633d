//! A lane over a simulated connection: the real lane of the core (`node/redis.rs`) with the wire replaced.
//!
//! It keeps the three promises of the seam (order, one vote for each operation, honesty about effects), the same
//! deadlines, the same heartbeat and the same way into service (`gate`). As the real one it has one call under way or
//! several, by the plan of the history and not by the distance. It looks at the node only between calls, where the real one
//! looks beside them.

mod ears;
mod gate;

use std::collections::VecDeque;
use std::future::pending;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use redlock_core::clock::Entropy;
use redlock_core::node::admission::{Admission, Ground};
use redlock_core::node::{Effect, Failure, Listener, Node, NodeState, NodeStatus, Op, Reason, Reply, Task, Vote};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use self::ears::Ears;
use self::gate::{Gate, Open};
use crate::chance::SimEntropy;
use crate::history::Recorder;
use crate::master::{self, Master, Question};
use crate::network::{Connection, Network};
use crate::time::SimClock;

const MAX_BATCH: usize = 128;
const CALL_DEADLINE: Duration = Duration::from_secs(1);
const HEARTBEAT: Duration = Duration::from_secs(1);
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
const REFUSED_PAUSE: Duration = Duration::from_secs(1);
const GOOD_SESSION: Duration = Duration::from_secs(5);

/// What a lane is made of.
pub struct LaneParts {
    /// Whose lane it is.
    pub gateway: u8,
    /// Where it leads.
    pub master: Arc<Master>,
    /// Over which paths.
    pub network: Arc<Network>,
    /// The gateway's opinion of the master.
    pub admission: Admission,
    /// The gateway's clock.
    pub clock: Arc<SimClock>,
    /// The gateway's chance.
    pub entropy: Arc<SimEntropy>,
    /// Calls under way at a time.
    pub window: usize,
    /// The history.
    pub recorder: Arc<Recorder>,
}

/// One master, as one gateway sees it.
pub struct SimLane {
    name: String,
    queue: mpsc::UnboundedSender<Job>,
    status: watch::Receiver<NodeStatus>,
    brand_new: Arc<Notify>,
    dead: Arc<AtomicBool>,
    task: AbortHandle,
    current: Arc<Current>,
    ears: Ears,
}

/// What others may want to know of the lane as it is now.
#[derive(Default)]
struct Current {
    connection: Mutex<Option<Arc<Connection>>>,
    admitted: Mutex<Option<Instant>>,
}

impl Current {
    fn connect(&self, connection: Option<Arc<Connection>>) {
        *self.connection.lock().unwrap_or_else(PoisonError::into_inner) = connection;
    }

    fn admit(&self, since: Option<Instant>) {
        *self.admitted.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }
}

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
    fn answer(self, vote: &Vote) {
        let mut job = Some(Box::new(self));
        while let Some(one) = job {
            one.reply.send(vote.clone());
            job = one.next;
        }
    }
}

impl SimLane {
    /// Starts the lane. It stops when `dead` is set and [`SimLane::kill`] is called, or when it is dropped.
    pub fn start(parts: LaneParts, dead: Arc<AtomicBool>) -> Self {
        let (queue, jobs) = mpsc::unbounded_channel();
        let first = NodeStatus::new(NodeState::Connecting, 0);
        let (status_in, status) = watch::channel(first);
        let name = format!("n{}", parts.master.index);
        let brand_new = Arc::new(Notify::new());
        let (window, current) = (parts.window, Arc::<Current>::default());
        let ears = Ears::new(&parts);
        let gate =
            Gate { parts, status: status_in, brand_new: brand_new.clone(), current: current.clone(), waits_at: None };
        let lane = Lane { gate, jobs, status: status.clone(), window };
        let task = tokio::spawn(lane.run()).abort_handle();
        Self { name, queue, status, brand_new, dead, task, current, ears }
    }

    /// Breaks the connection of the moment.
    pub fn cut(&self, why: &str) {
        let connection = self.current.connection.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(connection) = connection {
            connection.end(why);
        }
    }

    /// Breaks the connection on which hints come.
    pub fn deafen(&self, why: &str) {
        self.ears.cut(why);
    }

    /// Since when it has let the master vote.
    pub fn admitted_since(&self) -> Option<Instant> {
        *self.current.admitted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The gateway's process is gone.
    pub fn kill(&self) {
        self.task.abort();
        self.ears.stop();
    }

    fn enqueue(&self, job: Job) {
        if self.dead.load(Ordering::Relaxed) {
            // What is left of a dead process cannot be stopped, only kept from doing anything: an answer that leaves
            // nothing to do lets it end.
            job.answer(&Vote::Missing);
        } else if let Err(mpsc::error::SendError(job)) = self.queue.send(job) {
            job.answer(&failed(Reason::Down, Effect::None, "the node's task has ended"));
        }
    }
}

impl Node for SimLane {
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

    fn admit_brand_new(&self) {
        if self.status.borrow().brand_new {
            self.brand_new.notify_one();
        }
    }
}

/// One connection, from connect to the first error. What is under way when it is dropped may still arrive.
struct Session {
    connection: Arc<Connection>,
    current: Arc<Current>,
}

enum SessionError {
    Timeout,
    Broken(String),
}

impl Session {
    async fn ask(&self, question: Question) -> Result<master::Reply, SessionError> {
        let mut answer = Some(self.connection.send(question));
        tokio::select! {
            biased;
            reply = answered(&mut answer) => Ok(reply),
            why = self.connection.ended() => Err(SessionError::Broken(why)),
            () = tokio::time::sleep(CALL_DEADLINE) => Err(SessionError::Timeout),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.connection.end("the gateway dropped the connection");
        self.current.connect(None);
        self.current.admit(None);
    }
}

/// Waits for an answer, for ever when none comes.
async fn answered(answer: &mut Option<oneshot::Receiver<master::Reply>>) -> master::Reply {
    if let Some(receiver) = answer {
        if let Ok(reply) = receiver.await {
            return reply;
        }
        *answer = None;
    }
    pending().await
}

struct Lane {
    gate: Gate,
    jobs: mpsc::UnboundedReceiver<Job>,
    status: watch::Receiver<NodeStatus>,
    window: usize,
}

struct Closed;

enum Outage {
    Connecting(String),
    Refused(Ground),
}

/// A call under way.
struct UnderWay {
    jobs: Vec<Job>,
    answer: Option<oneshot::Receiver<master::Reply>>,
    deadline: Instant,
}

async fn first_answer(calls: &mut VecDeque<UnderWay>) -> Result<master::Reply, SessionError> {
    let Some(call) = calls.front_mut() else { return pending().await };
    let deadline = call.deadline;
    tokio::select! {
        biased;
        reply = answered(&mut call.answer) => Ok(reply),
        () = tokio::time::sleep_until(deadline) => Err(SessionError::Timeout),
    }
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
                Outage::Connecting(_) => pause.mul_f64(0.5 + 0.5 * self.gate.parts.entropy.unit()),
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
        let mut calls: VecDeque<UnderWay> = VecDeque::new();
        let mut batch: Vec<Job> = Vec::new();
        let mut heartbeat = tokio::time::interval_at(Instant::now() + HEARTBEAT, HEARTBEAT);
        heartbeat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut idle = true;
        loop {
            tokio::select! {
                biased;
                _ = heartbeat.tick(), if calls.is_empty() => {
                    if let Err(outage) = self.gate.look_again(&open).await {
                        return Ok(outage);
                    }
                    if std::mem::replace(&mut idle, true) {
                        calls.push_back(call(&open, Vec::new()));
                    }
                }
                reply = first_answer(&mut calls) => {
                    let failed = match reply {
                        Ok(reply) => {
                            let jobs = calls.pop_front().map(|call| call.jobs).unwrap_or_default();
                            hand_out(jobs, reply)
                        }
                        Err(error) => Some(error.into()),
                    };
                    if let Some(outage) = failed {
                        fail_under_way(calls, &outage);
                        return Ok(outage);
                    }
                }
                taken = self.jobs.recv_many(&mut batch, MAX_BATCH), if calls.len() < self.window => {
                    if taken == 0 {
                        return Err(Closed);
                    }
                    idle = false;
                    calls.extend(send(&open, unfold(std::mem::take(&mut batch))));
                }
                why = open.session.connection.ended() => {
                    let outage = Outage::Connecting(why);
                    fail_under_way(calls, &outage);
                    return Ok(outage);
                }
            }
        }
    }
}

/// One after the other what came in twos.
fn unfold(jobs: Vec<Job>) -> Vec<Job> {
    let mut all = Vec::with_capacity(jobs.len());
    for mut job in jobs {
        let next = job.next.take();
        all.push(job);
        all.extend(next.map(|next| *next));
    }
    all
}

/// Sends operations as one call, without those that come too late to be of use.
fn send(open: &Open, mut jobs: Vec<Job>) -> Option<UnderWay> {
    let now = Instant::now();
    for late in jobs.extract_if(.., |job| job.not_after < now && !matches!(*job.op, Op::Release { .. })) {
        late.reply.send(failed(Reason::Timeout, Effect::None, "not sent in time"));
    }
    (!jobs.is_empty()).then(|| call(open, jobs))
}

fn call(open: &Open, jobs: Vec<Job>) -> UnderWay {
    let ops = jobs.iter().map(|job| job.op.clone()).collect();
    let answer = open.session.connection.send(Question::Call { marker: open.marker.clone(), ops });
    UnderWay { jobs, answer: Some(answer), deadline: Instant::now() + CALL_DEADLINE }
}

/// Delivers the votes of a call; says why the session must end, if it must.
fn hand_out(jobs: Vec<Job>, reply: master::Reply) -> Option<Outage> {
    match reply {
        master::Reply::Votes(votes, admitted) if votes.len() == jobs.len() => {
            for (job, vote) in jobs.into_iter().zip(votes) {
                job.reply.send(vote);
            }
            let why = "its marker was lost or changed: it must be admitted again";
            (!admitted).then(|| Outage::Connecting(why.into()))
        }
        master::Reply::NoScript => {
            let why = "the node was restarted or its scripts were flushed";
            fail_all(jobs, Reason::Down, Effect::None, why);
            Some(Outage::Connecting(why.into()))
        }
        master::Reply::Votes(..) | master::Reply::Seen(..) | master::Reply::Put(_) | master::Reply::Listening => {
            fail_all(jobs, Reason::Error, Effect::Possible, "an answer to another question");
            Some(Outage::Connecting("an answer to another question".into()))
        }
    }
}

fn fail_under_way(calls: VecDeque<UnderWay>, outage: &Outage) {
    let why = match outage {
        Outage::Connecting(why) => why.as_str(),
        Outage::Refused(ground) => ground.why.as_str(),
    };
    for call in calls {
        fail_all(call.jobs, Reason::Down, Effect::Possible, why);
    }
}

fn fail_all(jobs: Vec<Job>, reason: Reason, effect: Effect, detail: &str) {
    for job in jobs {
        job.reply.send(failed(reason, effect, detail));
    }
}

fn failed(reason: Reason, effect: Effect, detail: &str) -> Vote {
    Vote::Failed(Failure { reason, effect, detail: detail.into() })
}

impl From<SessionError> for Outage {
    fn from(error: SessionError) -> Self {
        Self::Connecting(match error {
            SessionError::Timeout => "no answer in time".into(),
            SessionError::Broken(why) => why,
        })
    }
}

/// Waits for something without a session: whoever submits in the meantime hears at once that nothing was sent.
async fn refusing<T>(
    jobs: &mut mpsc::UnboundedReceiver<Job>,
    status: &watch::Receiver<NodeStatus>,
    work: impl Future<Output = T>,
) -> Result<T, Closed> {
    tokio::pin!(work);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return Ok(done),
            job = jobs.recv() => match job {
                None => return Err(Closed),
                Some(job) => {
                    let reason = match status.borrow().state {
                        NodeState::Quarantined | NodeState::Refused => Reason::Quarantined,
                        NodeState::Admitted | NodeState::Connecting => Reason::Down,
                    };
                    job.answer(&failed(reason, Effect::None, "not in service"));
                }
            },
        }
    }
}
