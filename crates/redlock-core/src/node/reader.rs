//! Reads a master for listings, on a connection of its own: no vote waits in a queue behind it, and whoever lists holds up
//! the other listings of this process, and no lock.
//!
//! The master has one thread for all. So there is one question at a time, each short ([`WORK`]), and a pause after it that
//! leaves most of the master's time to the votes. What a question costs the master is measured: by how much its answer takes
//! longer than the quickest of its connection.
//!
//! The connection is opened when somebody lists, and closed when nobody has for a while. It reads a master for as long as
//! that is admitted, and only the process that is.

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

/// What a question should take of the master's time.
const WORK: Duration = Duration::from_millis(1);
/// So many times what a question took is left to others before the next one, within these bounds.
const SHARE: u32 = 4;
const PAUSE: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));
/// Keys that one scan looks at: at first, the least and the most.
const FIRST_COUNT: u32 = 512;
const COUNT: (u32, u32) = (256, 8192);
/// How long the connection is kept for the next listing, at least.
const IDLE: Duration = Duration::from_secs(10);

const _: () = assert!(COUNT.0 <= FIRST_COUNT && FIRST_COUNT <= COUNT.1);

pub(super) struct Reader {
    link: Arc<dyn Link>,
    status: watch::Receiver<NodeStatus>,
    /// For one question.
    deadline: Duration,
    state: Arc<Mutex<ReaderState>>,
}

/// Who has it may ask.
struct ReaderState {
    open: Option<Open>,
    /// When the next question may be asked.
    next: Instant,
    /// Keys that a scan looks at in [`WORK`], as far as is known.
    count: u32,
}

struct Open {
    /// Resolves when it has ended by itself.
    closed: BoxFuture<'static, String>,
    session: Box<dyn Session>,
    /// By which the master votes.
    marker: String,
    /// The quickest answer: no work of the master, but the way to it and back.
    quickest: Duration,
    /// Since it was last looked whether it is idle.
    was_used: bool,
    /// Ends with it, and then whoever looks whether it is idle.
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

    /// Waits for the turn to ask one question.
    async fn turn(&self) -> MutexGuard<'_, ReaderState> {
        let mut state = self.state.lock().await;
        sleep_until(state.next).await;
        // A question is answered also when its asker has gone away meanwhile.
        state.next = Instant::now() + WORK * SHARE;
        state
    }

    async fn ask<T>(
        &self,
        state: &mut ReaderState,
        question: impl Fn(&dyn Session) -> Answering<T> + Send,
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
            let answer = question(open.session.as_ref());
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
                // Not allowed, for instance: that is no matter of the connection.
                Err(error)
                    if matches!(error.kind, LinkErrorKind::Refused | LinkErrorKind::Error) =>
                {
                    return Err(failure(error));
                }
                Err(error) => {
                    state.open = None;
                    // It may have ended while it was idle.
                    if !was_open || elapsed >= self.deadline {
                        return Err(failure(error));
                    }
                }
            }
        }
    }

    /// The marker by which the master votes, if it does.
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

    async fn open(&self, marker: &str) -> Result<Open, LinkError> {
        let session = in_time(self.deadline, self.link.connect()).await?;
        let ProbeReply { facts, marker: stands, .. } =
            in_time(self.deadline, session.look()).await?;
        if stands.as_deref() != Some(marker) {
            return Err(LinkError::broken(
                "its marker was lost or changed: it must be admitted again",
            ));
        }
        in_time(self.deadline, session.load(&facts.run_id, marker)).await?;
        let closed = session.closed();
        Ok(Open {
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
    /// A scan of so many keys took so much of the master's time.
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
            // One that cannot be read has nobody wait for his turn.
            self.admitted_by()?;
            let mut state = self.turn().await;
            let count = scan.count.min(state.count);
            let scan = Scan { count, ..scan };
            let (scanned, work) =
                self.ask(&mut state, |session| session.scan(scan.clone())).await?;
            state.scanned(count, work);
            Ok(scanned)
        }
        .boxed()
    }

    fn read(&self, locks: Vec<Keys>) -> BoxFuture<'_, Result<Vec<Vote>, Failure>> {
        async move {
            self.admitted_by()?;
            let mut state = self.turn().await;
            let not_after = Instant::now() + self.deadline;
            let task =
                |keys| Task { op: Arc::new(Op::Inspect { keys }), not_after, reply: Reply::none() };
            let tasks: Vec<_> = locks.into_iter().map(task).collect();
            let (Answer { votes, is_admitted, .. }, _) =
                self.ask(&mut state, |session| session.call(&tasks)).await?;
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
        // Another connection has somebody of its own.
        if alive.strong_count() == 0 {
            return;
        }
        state.open.take_if(|open| !std::mem::take(&mut open.was_used));
    }
}
