//! Reads a master for listings, on a separate connection. No vote queues behind a listing. Listings
//! in one process wait for each other.
//!
//! A master runs all commands on one thread, so a long request would delay votes. The reader
//! therefore sends one short request at a time ([`WORK`]). It pauses after each, so that most of
//! the master's time is left for votes. The longer the master worked, the longer is the pause. The
//! reader estimates this work as the time that an answer took beyond the quickest answer on the
//! same connection.
//!
//! The connection opens when a listing needs it, and closes when it was idle for a while. The
//! master is read only while it is admitted, and only from the process that was admitted.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::link::{
    Answer, Answering, Link, LinkError, LinkErrorKind, ProbeReply, Scan, Scanned, Session,
};
use super::op::{Effect, Failure, Keys, Op, Reason, Vote};
use super::status::{NodeState, NodeStatus};
use super::{LockReader, Reply, Task};

/// The master's time that one request should take.
const WORK: Duration = Duration::from_millis(1);
/// The pause after a request is this multiple of the master's work for it, within [`PAUSE`].
const SHARE: u32 = 4;
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));
/// Keys per scan: the first value, then the minimum and maximum.
const FIRST_COUNT: u32 = 512;
const COUNT: (u32, u32) = (256, 8192);
/// The minimum time that an idle connection is kept.
const IDLE: Duration = Duration::from_secs(10);

const _: () = assert!(COUNT.0 <= FIRST_COUNT && FIRST_COUNT <= COUNT.1);

pub(super) struct Reader {
    link: Arc<dyn Link>,
    status: watch::Receiver<NodeStatus>,
    /// The time limit of one request.
    deadline: Duration,
    state: Arc<Mutex<ReaderState>>,
}

/// A request locks this state while it runs, so there is one request at a time.
struct ReaderState {
    open: Option<OpenConnection>,
    /// When the next request may be sent.
    next: Instant,
    /// The estimated number of keys that a scan reads in [`WORK`].
    count: u32,
}

struct OpenConnection {
    /// Resolves when the connection has ended by itself.
    closed: BoxFuture<'static, String>,
    session: Box<dyn Session>,
    /// The marker by which the master votes.
    marker: String,
    /// The time of the quickest answer, which is about the round trip without work of the master.
    quickest: Duration,
    /// Whether a request used the connection since the last check for idleness.
    was_used: bool,
    /// Dropped with the connection. The idle check of this connection then ends too.
    alive: Arc<()>,
}

impl Reader {
    pub(super) fn new(
        link: Arc<dyn Link>,
        status: watch::Receiver<NodeStatus>,
        deadline: Duration,
    ) -> Self {
        let state = ReaderState { open: None, next: Instant::now(), count: FIRST_COUNT };
        Self { link, status, deadline, state: Arc::new(Mutex::new(state)) }
    }

    /// Waits until one request may be sent.
    async fn lock_for_request(&self) -> MutexGuard<'_, ReaderState> {
        let mut state = self.state.lock().await;
        sleep_until(state.next).await;
        // Set already here, because the caller may be gone before the answer: the master does the
        // work all the same.
        state.next = Instant::now() + WORK * SHARE;
        state
    }

    async fn request<T>(
        &self,
        state: &mut ReaderState,
        send: impl Fn(&dyn Session) -> Answering<T> + Send,
    ) -> Result<(T, Duration), Failure> {
        let marker = self.admitted_by()?;
        state
            .open
            .take_if(|open| open.marker != marker || (&mut open.closed).now_or_never().is_some());
        loop {
            let was_open = state.open.is_some();
            if !was_open {
                let open = self.open(&marker).await.map_err(failure)?;
                tokio::spawn(close_when_idle(
                    Arc::downgrade(&self.state),
                    Arc::downgrade(&open.alive),
                ));
                state.open = Some(open);
            }
            let Some(open) = &mut state.open else { continue };
            let answer = send(open.session.as_ref());
            let asked = Instant::now();
            let answer = tokio::select! {
                biased;
                answer = in_time(self.deadline, answer) => answer,
                why = &mut open.closed => Err(LinkError::broken(why)),
            };
            let elapsed = asked.elapsed();
            (open.quickest, open.was_used) = (open.quickest.min(elapsed), true);
            let work = elapsed - open.quickest;
            state.next = Instant::now() + (work * SHARE).clamp(PAUSE.0, PAUSE.1);
            match answer {
                Ok(answer) => return Ok((answer, work)),
                // The master answered with an error, for example NOPERM. The connection is still
                // good.
                Err(error)
                    if matches!(error.kind, LinkErrorKind::Refused | LinkErrorKind::Error) =>
                {
                    return Err(failure(error));
                }
                Err(error) => {
                    state.open = None;
                    // A connection may have ended while it was idle, so try once more on a new one.
                    if !was_open || elapsed >= self.deadline {
                        return Err(failure(error));
                    }
                }
            }
        }
    }

    /// The marker by which the master votes.
    fn admitted_by(&self) -> Result<String, Failure> {
        let status = self.status.borrow();
        let reason = match status.state {
            NodeState::Admitted | NodeState::CatchingUp => return Ok(status.marker.clone()),
            NodeState::Quarantined => Reason::Quarantined,
            NodeState::Refused => Reason::Refused,
            NodeState::Connecting => Reason::Down,
        };
        Err(Failure::new(reason, Effect::None, status.detail.clone()))
    }

    async fn open(&self, marker: &str) -> Result<OpenConnection, LinkError> {
        let session = in_time(self.deadline, self.link.connect()).await?;
        let ProbeReply { facts, marker: stands, .. } =
            in_time(self.deadline, session.probe()).await?;
        if stands.as_deref() != Some(marker) {
            return Err(LinkError::broken(
                "its marker was lost or changed: it must be admitted again",
            ));
        }
        in_time(self.deadline, session.load(&facts.run_id, marker)).await?;
        let closed = session.closed();
        Ok(OpenConnection {
            closed,
            session,
            marker: marker.to_owned(),
            quickest: Duration::MAX,
            was_used: true,
            alive: Arc::default(),
        })
    }
}

impl ReaderState {
    /// Adapts the number of keys to the work of the latest scan.
    fn scanned(&mut self, count: u32, work: Duration) {
        if work > WORK * 2 {
            self.count = (count / 2).max(COUNT.0);
        } else if work < WORK / 2 && count == self.count {
            self.count = (count * 2).min(COUNT.1);
        }
    }
}

impl LockReader for Reader {
    fn scan(&self, scan: Scan) -> BoxFuture<'_, Result<Scanned, Failure>> {
        async move {
            // If the master cannot be read, fail before waiting.
            self.admitted_by()?;
            let mut state = self.lock_for_request().await;
            let count = scan.count.min(state.count);
            let scan = Scan { count, ..scan };
            let (scanned, work) =
                self.request(&mut state, |session| session.scan(scan.clone())).await?;
            state.scanned(count, work);
            Ok(scanned)
        }
        .boxed()
    }

    fn read(&self, locks: Vec<Keys>) -> BoxFuture<'_, Result<Vec<Vote>, Failure>> {
        async move {
            self.admitted_by()?;
            let mut state = self.lock_for_request().await;
            let not_after = Instant::now() + self.deadline;
            let task =
                |keys| Task { op: Arc::new(Op::Inspect { keys }), not_after, reply: Reply::none() };
            let tasks: Vec<_> = locks.into_iter().map(task).collect();
            let (Answer { votes, is_admitted, .. }, _) =
                self.request(&mut state, |session| session.call(&tasks, 0)).await?;
            if !is_admitted || votes.len() != tasks.len() {
                state.open = None;
                let detail = "its marker was lost or changed: it must be admitted again";
                return Err(Failure::new(Reason::Quarantined, Effect::None, detail));
            }
            Ok(votes)
        }
        .boxed()
    }
}

async fn in_time<T>(deadline: Duration, answer: Answering<T>) -> Result<T, LinkError> {
    timeout(deadline, answer).await.unwrap_or_else(|_| Err(LinkError::broken("no answer in time")))
}

fn failure(error: LinkError) -> Failure {
    let reason = match error.kind {
        LinkErrorKind::Broken | LinkErrorKind::NoScript => Reason::Down,
        LinkErrorKind::Refused | LinkErrorKind::Error => Reason::Error,
    };
    Failure::new(reason, Effect::None, error.detail)
}

async fn close_when_idle(state: Weak<Mutex<ReaderState>>, alive: Weak<()>) {
    loop {
        sleep(IDLE).await;
        let Some(state) = state.upgrade() else { return };
        let mut state = state.lock().await;
        // The connection of this check is gone. A newer connection has its own check.
        if alive.strong_count() == 0 {
            return;
        }
        state.open.take_if(|open| !std::mem::take(&mut open.was_used));
    }
}
