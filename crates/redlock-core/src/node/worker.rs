//! Runs a driver on a link. A task owns the one connection to a master and takes operations from a
//! bounded queue in order. The task sends the operations of concurrent requests as one call.
//! Operations that arrive while calls are under way go into the next call. No timer delays a call
//! to fill it. The worker only yields to the tasks that are ready to run, takes the operations that
//! they submit, and sends.

use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{BoxFuture, OptionFuture};
use futures_util::stream::{FuturesOrdered, StreamExt};
use futures_util::{FutureExt, TryFutureExt};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::calls::MAX_BATCH;
pub use super::driver::DriverSettings;
use super::driver::{Action, Driver, Event};
use super::eligibility::Eligibility;
use super::hints::HintSubscriber;
use super::link::{Answer, Answering, Link, LinkError, Session};
use super::observer::Env;
use super::op::{Effect, Failure, Op, Reason, Vote};
use super::reader::Reader;
use super::status::NodeStatus;
use super::{Listener, LockReader, Node, Reply, Task};

/// How often the worker yields to all ready tasks before it sends. In an idle process a yield
/// returns at once. In a busy process it brings more operations into the call. That saves time,
/// because the number of calls is the main cost.
const GATHER_YIELDS: u32 = 2;
/// After this many calls in a row for which the yields brought no further operation, the worker
/// yields only before one call in this many. With one request at a time, or one lock that goes from
/// holder to holder, yielding only costs time.
const LONE_CALLS: u32 = 32;

/// A master behind a link. When this is dropped, the worker first answers every submitted operation
/// and then ends.
pub struct RemoteNode {
    name: Arc<str>,
    max_ttl: Duration,
    queue: mpsc::Sender<Job>,
    queued: Arc<Queued>,
    /// The limit on [`Queued::cost`].
    limit: usize,
    status: watch::Receiver<NodeStatus>,
    bootstrap: Arc<Notify>,
    recovered: watch::Sender<String>,
    link: Arc<dyn Link>,
    reader: Reader,
    hints: HintSubscriber,
    worker: AbortHandle,
}

/// What is in the queue of a node.
#[derive(Default)]
struct Queued {
    /// The cost of all operations, see [`Op::cost`].
    cost: AtomicUsize,
    /// The cost of the jobs that only release.
    releases: AtomicUsize,
}

/// One operation, or several that run one after the other.
enum Job {
    One(Task),
    Several(Vec<Task>),
}

impl Job {
    fn cost(&self) -> usize {
        match self {
            Self::One(task) => task.op.cost(),
            Self::Several(tasks) => tasks.iter().map(|task| task.op.cost()).sum(),
        }
    }

    /// The cost of a job that only releases.
    fn releases(&self) -> usize {
        let is_release = |task: &Task| matches!(*task.op, Op::Release { .. });
        let only_releases = match self {
            Self::One(task) => is_release(task),
            Self::Several(tasks) => tasks.iter().all(is_release),
        };
        if only_releases { self.cost() } else { 0 }
    }

    fn tasks(self) -> impl Iterator<Item = Task> {
        let (one, several) = match self {
            Self::One(task) => (Some(task), Vec::new()),
            Self::Several(tasks) => (None, tasks),
        };
        one.into_iter().chain(several)
    }

    fn fail(self, reason: Reason, detail: &str) {
        self.tasks().for_each(|task| {
            task.reply.send(Vote::Failed(Failure::new(reason, Effect::None, detail)))
        });
    }
}

impl RemoteNode {
    /// Starts the worker; must be called on a tokio runtime. `limit` is how many operations may wait.
    /// An operation on a set counts by its cost. When so many wait, the node is too slow to be useful,
    /// so further operations are refused at once.
    ///
    /// # Panics
    /// Panics if `limit` is 0.
    pub fn start(
        name: &str,
        link: Arc<dyn Link>,
        eligibility: Eligibility,
        limit: usize,
        settings: DriverSettings,
        env: Env,
    ) -> Self {
        let name: Arc<str> = name.into();
        let hints = HintSubscriber::new(
            name.clone(),
            link.clone(),
            settings.call_deadline,
            env.entropy.clone(),
        );
        let max_ttl = eligibility.max_ttl();
        let call_deadline = settings.call_deadline;
        let driver = Driver::new(name.clone(), eligibility, settings, env, Instant::now());
        // A job costs at least 1, so the channel never has more jobs than `limit`.
        let (queue, jobs) = mpsc::channel(limit);
        let queued = Arc::<Queued>::default();
        let status = driver.status();
        let bootstrap = Arc::new(Notify::new());
        let reader = Reader::new(link.clone(), status.clone(), call_deadline);
        let (recovered, recovered_receiver) = watch::channel(String::new());
        let worker = Worker {
            driver,
            link: link.clone(),
            jobs,
            queued: queued.clone(),
            bootstrap: bootstrap.clone(),
            recovered: recovered_receiver,
            lone_calls: 0,
        };
        let worker = tokio::spawn(worker.run()).abort_handle();
        Self {
            name,
            max_ttl,
            queue,
            queued,
            limit,
            status,
            bootstrap,
            recovered,
            link,
            reader,
            hints,
            worker,
        }
    }

    /// Ends the worker at once, as the death of the process would. Submitted operations are
    /// answered with "unknown".
    pub fn abort(&self) {
        self.worker.abort();
        self.hints.stop();
    }

    fn enqueue(&self, job: Job) {
        // The last quarter of the queue is kept for extensions and releases of held locks, and for
        // operations that were submitted together, such as a handoff. They share one queue with
        // acquires, because a node promises to keep the order of operations on one lock. Jobs that only release get
        // half of the queue, so that they do not keep acquires out. A node never drops a late
        // release, and repeats those that failed.
        let is_acquire = matches!(&job, Job::One(task) if matches!(*task.op, Op::Acquire { .. }));
        let (cost, releases) = (job.cost(), job.releases());
        let before = self.queued.cost.fetch_add(cost, Ordering::Relaxed);
        let releases_before = self.queued.releases.fetch_add(releases, Ordering::Relaxed);
        let refused = if is_acquire && before >= self.limit - self.limit / 4 {
            Some((job, Reason::Overloaded, "the node's queue has no more room for acquires"))
        } else if releases > 0 && releases_before >= self.limit.div_ceil(2) {
            Some((job, Reason::Overloaded, "the node's queue has no more room for releases"))
        } else if before > 0 && before + cost > self.limit {
            Some((job, Reason::Overloaded, "the node's queue is full"))
        } else {
            match self.queue.try_send(job) {
                Ok(()) => None,
                Err(mpsc::error::TrySendError::Full(job)) => {
                    Some((job, Reason::Overloaded, "the node's queue is full"))
                }
                Err(mpsc::error::TrySendError::Closed(job)) => {
                    Some((job, Reason::Down, "the node's task has ended"))
                }
            }
        };
        if let Some((job, reason, detail)) = refused {
            self.queued.leave(cost, releases);
            job.fail(reason, detail);
        }
    }
}

impl Queued {
    fn leave(&self, cost: usize, releases: usize) {
        self.cost.fetch_sub(cost, Ordering::Relaxed);
        self.releases.fetch_sub(releases, Ordering::Relaxed);
    }
}

impl Node for RemoteNode {
    fn name(&self) -> &str {
        &self.name
    }

    fn status(&self) -> watch::Receiver<NodeStatus> {
        self.status.clone()
    }

    fn max_ttl(&self) -> Option<Duration> {
        Some(self.max_ttl)
    }

    fn submit(&self, op: Arc<Op>, not_after: Instant, reply: Reply) {
        self.enqueue(Job::One(Task { op, not_after, reply }));
    }

    fn submit_all(&self, tasks: Vec<Task>) {
        self.enqueue(Job::Several(tasks));
    }

    fn listen(&self, listener: Weak<dyn Listener>) {
        self.hints.listen(listener);
    }

    fn is_subscribed(&self) -> bool {
        self.hints.is_subscribed()
    }

    fn confirm_bootstrap(&self) {
        self.bootstrap.notify_one();
    }

    fn reader(&self) -> &dyn LockReader {
        &self.reader
    }

    fn link(&self) -> Option<Arc<dyn Link>> {
        Some(self.link.clone())
    }

    fn recovered(&self, marker: &str) {
        self.recovered.send_replace(marker.to_owned());
    }
}

impl Drop for RemoteNode {
    fn drop(&mut self) {
        self.hints.stop();
    }
}

struct Worker {
    driver: Driver,
    link: Arc<dyn Link>,
    jobs: mpsc::Receiver<Job>,
    queued: Arc<Queued>,
    bootstrap: Arc<Notify>,
    recovered: watch::Receiver<String>,
    /// Calls in a row for which the yields brought no further operation, see `gather`.
    lone_calls: u32,
}

/// Everything under way between the worker and its master.
#[derive(Default)]
struct Connection {
    // The fields are dropped in this order: futures before their session.
    calls: FuturesOrdered<Answering<Answer>>,
    /// The one request that may be under way beside the calls.
    question: Option<BoxFuture<'static, Event>>,
    following: Option<BoxFuture<'static, Event>>,
    closed: Option<BoxFuture<'static, String>>,
    connecting: Option<Answering<Box<dyn Session>>>,
    session: Option<Box<dyn Session>>,
}

impl Worker {
    async fn run(mut self) {
        let mut connection = Connection::default();
        let mut inbox: Vec<Job> = Vec::with_capacity(MAX_BATCH);
        let mut is_closed = false;
        let mut timer = pin!(sleep_until(self.driver.deadline()));
        loop {
            while let Some(action) = self.driver.next_action() {
                connection.perform(action, &self.driver, self.link.as_ref());
            }
            if self.driver.wants_call() {
                self.gather().await;
                self.driver.call(Instant::now());
                continue;
            }
            if is_closed && self.driver.is_drained() {
                return;
            }
            // The timer is only moved to an earlier time, or set again after it fired. A wake-up
            // too early costs less than setting the timer for every call.
            let deadline = self.driver.deadline();
            if deadline < timer.deadline() || timer.is_elapsed() {
                timer.as_mut().reset(deadline);
            }
            let Connection { connecting, closed, question, following, calls, .. } = &mut connection;
            let event = tokio::select! {
                // The order of these branches matters. Reports from outside come first: they are
                // about the state reported so far, not about one that the next answer shows. The
                // timer comes before the calls, so that a busy node is still probed. A fixed order
                // also gives equal histories for equal seeds of a simulation.
                biased;
                () = self.bootstrap.notified(), if !self.driver.is_serving() => Event::BootstrapConfirmed,
                Ok(()) = self.recovered.changed(), if !self.driver.is_serving() => {
                    Event::Recovered(self.recovered.borrow_and_update().clone())
                }
                () = &mut timer => {
                    let now = Instant::now();
                    // An answer that has already arrived counts, however late. If this process
                    // stood still, the answer may have come in time and only be noticed late.
                    match self.driver.is_overdue(now).then(|| connection.take_ready()).flatten() {
                        Some(event) => self.driver.handle(event, now),
                        None => self.driver.tick(now),
                    }
                    continue;
                }
                Some(connected) = OptionFuture::from(connecting.as_mut()) => connection.connected(connected),
                Some(event) = OptionFuture::from(question.as_mut()) => {
                    *question = None;
                    event
                }
                Some(event) = OptionFuture::from(following.as_mut()) => {
                    *following = None;
                    event
                }
                Some(answer) = calls.next(), if self.driver.has_calls() => Event::Answered(answer),
                taken = self.jobs.recv_many(&mut inbox, MAX_BATCH), if !is_closed && self.driver.accepts() => {
                    is_closed = taken == 0;
                    inbox.drain(..).for_each(|job| self.submit(job));
                    continue;
                }
                // The end of the connection comes last: answers from before the end count, and none
                // come after it.
                Some(why) = OptionFuture::from(closed.as_mut()) => {
                    *closed = None;
                    Event::Closed(why)
                }
            };
            self.driver.handle(event, Instant::now());
        }
    }

    /// Passes a job from the queue to the driver.
    fn submit(&mut self, job: Job) {
        self.queued.leave(job.cost(), job.releases());
        self.driver.submit(job.tasks());
    }

    /// Gathers the operations of requests whose tasks are ready to run. The first submitted
    /// operation wakes the worker. Without the yields the worker would send before the other
    /// requests of the same network poll have submitted theirs.
    async fn gather(&mut self) {
        if self.lone_calls >= LONE_CALLS && !self.lone_calls.is_multiple_of(LONE_CALLS) {
            self.lone_calls = self.lone_calls.wrapping_add(1);
            return;
        }
        let before = self.driver.waiting();
        for _ in 0..GATHER_YIELDS {
            tokio::task::yield_now().await;
        }
        while self.driver.waiting() < MAX_BATCH
            && let Ok(job) = self.jobs.try_recv()
        {
            self.submit(job);
        }
        self.lone_calls =
            if self.driver.waiting() == before { self.lone_calls.wrapping_add(1) } else { 0 };
    }
}

impl Connection {
    fn connected(&mut self, connected: Result<Box<dyn Session>, LinkError>) -> Event {
        self.connecting = None;
        Event::Connected(connected.map(|session| {
            self.closed = Some(session.closed());
            self.session = Some(session);
        }))
    }

    /// An answer that has arrived and was not taken yet.
    fn take_ready(&mut self) -> Option<Event> {
        if let Some(connected) = self.connecting.as_mut().and_then(FutureExt::now_or_never) {
            return Some(self.connected(connected));
        }
        if let Some(event) = self.question.as_mut().and_then(FutureExt::now_or_never) {
            self.question = None;
            return Some(event);
        }
        self.calls.next().now_or_never().flatten().map(Event::Answered)
    }

    fn perform(&mut self, action: Action, driver: &Driver, link: &dyn Link) {
        match (action, &self.session) {
            (Action::Connect, _) => self.connecting = Some(link.connect()),
            (Action::Follow, _) => {
                // The session must live until its answer has come.
                let probe = |session: Box<dyn Session>| {
                    let reply = session.probe();
                    async move { reply.await.inspect(|_| drop(session)) }
                };
                self.following = Some(link.connect().and_then(probe).map(Event::Followed).boxed());
            }
            (Action::Disconnect, _) => *self = Self::default(),
            (Action::Probe, Some(session)) => {
                self.question = Some(session.probe().map(Event::Probed).boxed())
            }
            (Action::SwapMarker(swap), Some(session)) => {
                self.question = Some(session.swap_marker(swap).map(Event::Swapped).boxed());
            }
            (Action::Load { run_id, incarnation }, Some(session)) => {
                self.question =
                    Some(session.load(&run_id, &incarnation).map(Event::Loaded).boxed());
            }
            (Action::Call, Some(session)) => {
                let (tasks, number) = driver.newest_call();
                self.calls.push_back(session.call(tasks, number));
            }
            (Action::Probe | Action::SwapMarker(_) | Action::Load { .. } | Action::Call, None) => {
                unreachable!("the driver sends no request without a connection")
            }
        }
    }
}

mod tests;
