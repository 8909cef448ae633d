//! Schedules work on masters that are in one state, one master at a time.
//!
//! [Recovery](super::recovery) and [catching up](super::catch_up) both wait some time after this
//! gateway first sees a master in the state that needs the work. A new marker in that state counts
//! as a first sight again. Both repeat, with growing pauses, until the master leaves that state.
//! This module decides when the work is due. The work decides what to do, and reports how it ended.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use crate::cluster::bootstrap::any_changed;
use crate::node::eligibility::incarnation_of;
use crate::node::{Env, Node, NodeState};

/// Work that masters need while they are in one state.
pub(super) trait Work: Send + Sync + 'static {
    const STATE: NodeState;
    /// The pause between two attempts. It doubles from the first value up to the second.
    const PAUSE: (Duration, Duration);
    /// The log line of a failed attempt. It is logged again only when the reason changes.
    const FAILURE: &'static str;

    /// The time from the first sight of a master to the first attempt.
    fn delay(&self) -> Duration;

    fn attempt(&self, master: &Sighting) -> impl Future<Output = Attempt> + Send;
}

/// A master that was seen in the state that needs the work.
pub(super) struct Sighting {
    pub(super) at: usize,
    pub(super) marker: String,
    /// When this gateway first saw the master under this marker.
    pub(super) seen: Instant,
    /// `seen` on the monotonic clock of [`Env`].
    pub(super) seen_on_clock: Duration,
}

/// The result of one attempt.
pub(super) struct Attempt {
    pub(super) failure: Option<String>,
    pub(super) pause: Pause,
    /// If this moment is still to come, the next attempt begins then, and not after the pause.
    pub(super) not_before: Option<Instant>,
}

/// The pause after an attempt.
pub(super) enum Pause {
    /// Twice as long as the last one.
    Longer,
    /// As long as the last one.
    Same,
    /// The shortest one again.
    Shortest,
}

/// Stops the work when dropped.
pub(crate) struct Scheduled(AbortHandle);

impl Drop for Scheduled {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Starts the work. Must be called on a tokio runtime.
pub(super) fn start(nodes: Vec<Arc<dyn Node>>, env: Env, work: impl Work) -> Scheduled {
    let pending = nodes.iter().map(|_| None).collect();
    Scheduled(tokio::spawn(Schedule { nodes, env, work, pending }.run()).abort_handle())
}

struct Schedule<W> {
    nodes: Vec<Arc<dyn Node>>,
    env: Env,
    work: W,
    /// For each node, the marker that was last seen in the work's state, and when its next attempt
    /// is due.
    pending: Vec<Option<Pending>>,
}

struct Pending {
    sighting: Sighting,
    due: Instant,
    pause: Duration,
    /// The reason of the last failure.
    why: String,
}

impl<W: Work> Schedule<W> {
    async fn run(mut self) {
        let mut statuses: Vec<_> = self.nodes.iter().map(|node| node.status()).collect();
        loop {
            for (at, status) in statuses.iter_mut().enumerate() {
                let status = status.borrow_and_update();
                if status.state == W::STATE {
                    self.see(at, &status.marker);
                }
            }
            let needs_work = |at: &usize| self.nodes[*at].status().borrow().state == W::STATE;
            let due = |at: usize| self.pending[at].as_ref().map(|pending| (pending.due, at));
            match (0..self.nodes.len()).filter(needs_work).filter_map(due).min() {
                Some((due, at)) if due <= Instant::now() => self.attempt(at).await,
                Some((due, _)) => {
                    tokio::select! {
                        biased;
                        () = any_changed(&mut statuses) => {}
                        () = sleep_until(due) => {}
                    }
                }
                None => any_changed(&mut statuses).await,
            }
        }
    }

    /// Notes a master in the work's state. If the marker is known already, nothing changes: the
    /// connection may only have broken meanwhile.
    fn see(&mut self, at: usize, marker: &str) {
        let is_known =
            |pending: &Pending| incarnation_of(&pending.sighting.marker) == incarnation_of(marker);
        if self.pending[at].as_ref().is_some_and(is_known) {
            return;
        }
        let seen = Instant::now();
        let seen_on_clock = self.env.clock.monotonic();
        self.pending[at] = Some(Pending {
            sighting: Sighting { at, marker: marker.to_owned(), seen, seen_on_clock },
            due: seen + self.work.delay(),
            pause: W::PAUSE.0,
            why: String::new(),
        });
    }

    async fn attempt(&mut self, at: usize) {
        let Some(pending) = &mut self.pending[at] else { return };
        let Attempt { failure, pause, not_before } = self.work.attempt(&pending.sighting).await;
        if let Some(why) = failure.filter(|why| *why != pending.why) {
            tracing::warn!(node = self.nodes[at].name(), why, "{}", W::FAILURE);
            pending.why = why;
        }
        if let Pause::Shortest = pause {
            pending.pause = W::PAUSE.0;
        }
        let now = Instant::now();
        let wait_until = not_before.filter(|moment| now < *moment);
        pending.due = wait_until.unwrap_or(now + pending.pause);
        if !matches!(pause, Pause::Same) {
            pending.pause = (pending.pause * 2).min(W::PAUSE.1);
        }
    }
}
