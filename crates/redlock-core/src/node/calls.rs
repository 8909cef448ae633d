//! The operations of one session, from their submission to their votes: what waits to be sent, and the calls that are under
//! way. Pure, as the driver is.
//!
//! To a near node there is one call under way at a time: what takes long there is the work, and the work of a fuller call
//! is less. To a far one the time is spent on the wire, and what comes in would wait for a round trip before it begins its
//! own. The node runs calls in the order in which they were sent, and answers in it, whatever their number.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::Task;
use super::op::{Effect, Failure, Op, Reason, Vote};
use super::record::Record;

/// Operations in one call. A call keeps the node from serving others for as long as it runs, a few µs per operation.
pub(super) const MAX_BATCH: usize = 128;
/// Bytes in one call, roughly.
const MAX_BATCH_BYTES: usize = 256 * 1024;
/// Calls under way to a far node.
const DEPTH: usize = 4;

/// A call under way.
pub(super) struct Call {
    pub(super) tasks: Vec<Task>,
    pub(super) at: Instant,
}

pub(super) struct Calls {
    waiting: Vec<Task>,
    under_way: VecDeque<Call>,
    /// In all calls under way together.
    operations: usize,
    /// The quickest answer of this session.
    round_trip: Duration,
    /// A node whose quickest answer took longer is a far one.
    overlap_above: Duration,
}

impl Calls {
    pub(super) fn new(overlap_above: Duration) -> Self {
        Self {
            waiting: Vec::with_capacity(MAX_BATCH),
            under_way: VecDeque::new(),
            operations: 0,
            round_trip: Duration::MAX,
            overlap_above,
        }
    }

    /// How many operations wait to be sent.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Whether there is room for operations that come in.
    pub(super) fn accept(&self) -> bool {
        self.has_room() && self.waiting.len() < MAX_BATCH
    }

    pub(super) fn submit(&mut self, tasks: impl Iterator<Item = Task>) {
        self.waiting.extend(tasks);
    }

    /// Whether none is under way.
    pub(super) fn none_under_way(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Whether a call should go out now. It carries a share of what is under way at least, or the places would be taken
    /// by small calls, and many operations wait for the first of them to come back.
    pub(super) fn want_call(&self) -> bool {
        let waiting = self.waiting.len();
        waiting > 0 && self.has_room() && waiting * (DEPTH - 1) >= self.operations
    }

    /// Whether another call could go out before one of those under way has come back.
    fn has_room(&self) -> bool {
        let is_far = self.round_trip >= self.overlap_above && self.round_trip < Duration::MAX;
        // A call without operations takes no place.
        self.operations == 0 || is_far && self.under_way.len() < DEPTH
    }

    /// As much of what waits as goes into one call. An acquire whose round has given up is answered here: running it would
    /// only make work for the clean-up.
    pub(super) fn next(&mut self, now: Instant) -> Vec<Task> {
        let count = next_call(&self.waiting);
        let mut tasks: Vec<Task> = self.waiting.drain(..count).collect();
        let is_late =
            |task: &mut Task| task.not_after < now && !matches!(*task.op, Op::Release { .. });
        fail_all(tasks.extract_if(.., is_late), Reason::Timeout, Effect::None, "not sent in time");
        tasks
    }

    pub(super) fn sent(&mut self, tasks: Vec<Task>, at: Instant) {
        self.operations += tasks.len();
        self.under_way.push_back(Call { tasks, at });
    }

    /// What was sent last.
    pub(super) fn newest(&self) -> &[Task] {
        self.under_way.back().map_or(&[], |call| &call.tasks)
    }

    /// When the oldest one was sent.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.under_way.front().map(|call| call.at)
    }

    /// The oldest one, which is answered now.
    pub(super) fn answered(&mut self) -> Option<Call> {
        let call = self.under_way.pop_front()?;
        self.operations -= call.tasks.len();
        Some(call)
    }

    /// One has come back after so long.
    pub(super) fn measured(&mut self, elapsed: Duration) {
        self.round_trip = self.round_trip.min(elapsed);
    }

    /// The connection is gone.
    pub(super) fn give_up(&mut self) {
        // It may be on its way to the node, or have run there.
        let lost = "the connection was lost before this was answered";
        for call in self.under_way.drain(..) {
            fail_all(call.tasks, Reason::Down, Effect::Possible, lost);
        }
        let unsent = "the connection was lost before this was sent";
        fail_all(self.waiting.drain(..), Reason::Down, Effect::None, unsent);
        (self.operations, self.round_trip) = (0, Duration::MAX);
    }
}

pub(super) fn fail_all(
    tasks: impl IntoIterator<Item = Task>,
    reason: Reason,
    effect: Effect,
    detail: &str,
) {
    for task in tasks {
        task.reply.send(Vote::Failed(Failure::new(reason, effect, detail)));
    }
}

/// How many operations go into the next call: until it is full.
fn next_call(waiting: &[Task]) -> usize {
    let mut bytes = 0;
    waiting
        .iter()
        .position(|task| {
            bytes += weight(&task.op);
            bytes > MAX_BATCH_BYTES
        })
        .map_or(waiting.len(), |at| at.max(1))
        .min(MAX_BATCH)
}

/// Bytes an operation adds to a call, roughly; for splitting oversized batches.
pub(super) fn weight(op: &Op) -> usize {
    const OVERHEAD: usize = 64;
    OVERHEAD
        + match op {
            // The last of three for a hint, which holds the key once more.
            Op::Acquire { keys, record, .. } | Op::Repair { keys, record, .. } => {
                3 * keys.fence.len() + record.as_bytes().len()
            }
            Op::Release { keys, .. } | Op::Extend { keys, .. } => {
                3 * keys.fence.len() + Record::GRANT_LEN
            }
            Op::Inspect { keys } => keys.lock.len(),
        }
}
