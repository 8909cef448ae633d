//! The operations of one session, from submission to vote: operations waiting to be sent, and calls
//! under way. No input or output happens here, as in the driver.
//!
//! A near node gets one call at a time. Most of a call's time is the node's work there. Operations
//! that arrive meanwhile share the next call, which costs the node less than a call for each. For a
//! far node, most of a call's time is spent on the network. So up to [`DEPTH`] calls are under way
//! at once. With only one, an operation would first wait for the call before its own to return. The
//! node runs and answers calls in the order in which they were sent.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::Task;
use super::op::{Effect, Failure, Keys, Op, Reason, Vote};
use super::record::Record;

/// The limit of locks in one call. A call blocks the node for its whole run, 12 to 20 µs per lock with
/// the script.
pub(super) const MAX_BATCH: usize = 128;
/// An operation on at least so many locks gets a call of its own. Later operations on other locks pass
/// the next one.
const LARGE: usize = 16;
/// The limit of locks that one operation may pass. It bounds the search for common locks.
const MAX_PASSED: usize = 2_048;
/// The limit of operations that wait here. Further ones wait in the queue of the node, where they
/// pass none.
const MAX_WAITING: usize = 2 * MAX_BATCH;
/// Approximate limit of bytes in one call.
const MAX_BATCH_BYTES: usize = 256 * 1024;
/// The limit of calls under way to a far node.
const DEPTH: usize = 4;

/// A call under way.
pub(super) struct Call {
    pub(super) tasks: Vec<Task>,
    /// The number of the call; 0 for a call without a number.
    pub(super) number: u64,
    pub(super) at: Instant,
}

pub(super) struct Calls {
    waiting: VecDeque<Task>,
    under_way: VecDeque<Call>,
    /// Whether the last call was for one large operation.
    was_large: bool,
    /// Operations in all calls under way.
    operations: usize,
    /// The quickest answer of this session; `Duration::MAX` before the first.
    round_trip: Duration,
    /// A node whose quickest answer takes at least this long counts as far.
    overlap_above: Duration,
}

impl Calls {
    pub(super) fn new(overlap_above: Duration) -> Self {
        Self {
            waiting: VecDeque::with_capacity(MAX_BATCH),
            under_way: VecDeque::new(),
            was_large: false,
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
    pub(super) fn accepts(&self) -> bool {
        self.has_room() && self.waiting.len() < MAX_WAITING
    }

    pub(super) fn submit(&mut self, tasks: impl Iterator<Item = Task>) {
        self.waiting.extend(tasks);
    }

    /// Whether no call is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Whether a call should go out now. A call must carry at least a third (`1 / (DEPTH - 1)`) as
    /// many operations as are under way. Otherwise small calls could use up the limit of calls, and
    /// later operations would wait for one of these calls to return.
    pub(super) fn wants_call(&self) -> bool {
        let waiting = self.waiting.len();
        waiting > 0 && self.has_room() && waiting * (DEPTH - 1) >= self.operations
    }

    /// Whether another call could go out before one under way returns.
    fn has_room(&self) -> bool {
        let is_far = self.round_trip >= self.overlap_above && self.round_trip < Duration::MAX;
        // If only a heartbeat is under way, which has no operations, there is room.
        self.operations == 0 || is_far && self.under_way.len() < DEPTH
    }

    /// Takes the waiting operations that fit into one call. An operation past its deadline fails
    /// here and is not sent. For example, an acquire that its caller has given up would only have
    /// to be undone. A late release is sent all the same, because it frees the lock.
    pub(super) fn take_next(&mut self, now: Instant) -> Vec<Task> {
        let mut tasks = if self.was_large { self.take_passing() } else { Vec::new() };
        if tasks.is_empty() {
            let count = next_call(&self.waiting);
            tasks.extend(self.waiting.drain(..count));
        }
        self.was_large = tasks.first().is_some_and(is_large);
        let is_late =
            |task: &mut Task| task.not_after < now && !matches!(*task.op, Op::Release { .. });
        fail_all(tasks.extract_if(.., is_late), Reason::Timeout, Effect::None, "not sent in time");
        tasks
    }

    /// After a call for a large operation, takes the small ones that wait. So they wait for one large
    /// operation and not for all before them, and each large one waits for one call of small ones.
    /// Operations on one lock keep their order.
    fn take_passing(&mut self) -> Vec<Task> {
        let (mut passed, mut passing) = (HashSet::<Bytes>::new(), Vec::new());
        let mut size = CallSize::default();
        for task in std::mem::take(&mut self.waiting) {
            let may_pass = !is_large(&task) && passed.len() <= MAX_PASSED;
            let is_behind = |keys: &Keys| passed.contains(&keys.lock);
            if may_pass && !task.op.keys().each().any(is_behind) && size.takes(&task.op) {
                passing.push(task);
            } else {
                passed.extend(task.op.keys().each().map(|keys| keys.lock.clone()));
                self.waiting.push_back(task);
            }
        }
        passing
    }

    pub(super) fn sent(&mut self, tasks: Vec<Task>, number: u64, at: Instant) {
        self.operations += tasks.len();
        self.under_way.push_back(Call { tasks, number, at });
    }

    /// The tasks and the number of the call that was sent last.
    pub(super) fn newest(&self) -> (&[Task], u64) {
        self.under_way.back().map_or((&[], 0), |call| (&call.tasks, call.number))
    }

    /// When the oldest call under way was sent.
    pub(super) fn oldest_sent(&self) -> Option<Instant> {
        self.under_way.front().map(|call| call.at)
    }

    /// Takes the oldest call under way, because its answer has come.
    pub(super) fn take_answered(&mut self) -> Option<Call> {
        let call = self.under_way.pop_front()?;
        self.operations -= call.tasks.len();
        Some(call)
    }

    /// Notes how long an answer took.
    pub(super) fn note_round_trip(&mut self, elapsed: Duration) {
        self.round_trip = self.round_trip.min(elapsed);
    }

    /// Fails every operation, because the connection is lost.
    pub(super) fn fail_all_lost(&mut self) {
        // A sent operation may be on its way to the node, or may have run.
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

fn is_large(task: &Task) -> bool {
    task.op.keys().count() >= LARGE
}

/// How many waiting operations fit into the next call.
fn next_call(waiting: &VecDeque<Task>) -> usize {
    let mut size = CallSize::default();
    let fits = |task: &&Task| size.takes(&task.op) && !is_large(task);
    waiting.iter().take_while(fits).count().max(1).min(waiting.len())
}

/// What the operations of a call add up to.
#[derive(Default)]
struct CallSize {
    bytes: usize,
    locks: usize,
}

impl CallSize {
    /// Adds an operation. Returns whether the call still has room.
    fn takes(&mut self, op: &Op) -> bool {
        self.bytes += weight(op);
        self.locks += op.keys().count();
        self.bytes <= MAX_BATCH_BYTES && self.locks <= MAX_BATCH
    }
}

/// The approximate number of bytes that an operation adds to a call. Limits the size of a call.
pub(super) fn weight(op: &Op) -> usize {
    const OVERHEAD: usize = 72;
    let others = op.keys().others.iter().flat_map(|others| others.iter());
    others.map(|keys| keys.fence.len()).sum::<usize>()
        + OVERHEAD
        + match op {
            // One of the three key lengths is for the hint, which repeats the key.
            Op::Acquire { keys, record, .. } | Op::Repair { keys, record, .. } => {
                3 * keys.fence.len() + record.as_bytes().len()
            }
            Op::Release { keys, .. } | Op::Extend { keys, .. } => {
                3 * keys.fence.len() + Record::GRANT_LEN
            }
            Op::Inspect { keys } => keys.lock.len(),
        }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::node::Reply;

    /// A reading of the locks with these numbers.
    fn task(locks: std::ops::Range<u32>) -> Task {
        let mut each = locks.map(|lock| Keys::of_lock_key(lock.to_string().as_bytes()));
        let first = each.next().expect("a lock");
        let op = Arc::new(Op::Inspect { keys: first.with(each) });
        Task { op, not_after: Instant::now() + Duration::from_secs(60), reply: Reply::none() }
    }

    /// The first lock of each operation in each further call.
    fn calls(waiting: &mut Calls) -> Vec<Vec<String>> {
        let name = |task: &Task| String::from_utf8_lossy(&task.op.keys().lock).into_owned();
        let call = || {
            let tasks = waiting.take_next(Instant::now());
            (!tasks.is_empty()).then(|| tasks.iter().map(name).collect())
        };
        std::iter::from_fn(call).collect()
    }

    fn of(tasks: impl IntoIterator<Item = std::ops::Range<u32>>) -> Calls {
        let mut calls = Calls::new(Duration::ZERO);
        calls.submit(tasks.into_iter().map(task));
        calls
    }

    #[test]
    fn small_operations_pass_all_large_ones_but_the_first() {
        let mut waiting = of([100..132, 200..232, 300..332, 1..2, 2..3]);
        assert_eq!(calls(&mut waiting), [vec!["100"], vec!["1", "2"], vec!["200"], vec!["300"]]);
    }

    #[test]
    fn a_large_operation_waits_for_one_call_of_small_ones() {
        let small = |from: u32| (from..from + 2 * MAX_BATCH as u32).map(|lock| lock..lock + 1);
        let mut waiting = of([1000..1032, 2000..2032].into_iter().chain(small(1)));
        let sizes: Vec<_> = calls(&mut waiting).iter().map(Vec::len).collect();
        assert_eq!(sizes, [1, MAX_BATCH, 1, MAX_BATCH]);
    }

    #[test]
    fn operations_on_one_lock_keep_their_order() {
        let mut waiting = of([100..132, 200..232, 231..232, 231..233, 232..233, 1..2]);
        assert_eq!(
            calls(&mut waiting),
            [vec!["100"], vec!["1"], vec!["200"], vec!["231", "231", "232"]]
        );
    }

    #[test]
    fn small_operations_share_a_call() {
        let mut waiting = of([1..2, 2..3, 100..115, 3..4]);
        assert_eq!(calls(&mut waiting), [["1", "2", "100", "3"]]);
    }
}
