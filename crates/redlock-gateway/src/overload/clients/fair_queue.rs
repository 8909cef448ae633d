//! Fair queueing by client, before the threads that serve requests.
//!
//! A runtime polls ready tasks in the order in which they became ready. Consider a client with 64
//! connections that asks again as soon as it is answered. Every step of another client's request
//! (in, to the masters, back, out) would come after 64 steps of the first client. So while there
//! are several clients, the requests of a client that exceed a burst wait in a queue of that
//! client. The queues are served in turn, a few requests between two passes over all ready tasks. A
//! client within its burst never waits here. While the threads keep up, a queue is served as fast
//! as it fills.
//!
//! ```text
//!  request ─► within its client's burst? ─ yes ──────────────────────► served
//!                        │ no                                            ▲
//!                        ▼                                               │
//!              queue of its client ─► one of each queue in turn, BATCH ──┘
//!                                     between two passes over all ready tasks
//! ```

use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Instant;

use tokio::sync::oneshot;

use super::contention::ContentionTracker;

/// How many requests of a client need not queue in a window, for each thread. That is 7,800
/// requests a second; a thread answers two to six times as many.
const BURST: u64 = 4;
/// Length of a window, in microseconds.
const WINDOW: u64 = 512;
/// How many queued requests are served between two passes over all ready tasks, for each thread.
const BATCH: usize = 4;

/// The queues of all clients.
#[derive(Debug)]
pub struct FairQueue {
    began: Instant,
    threads: usize,
    contention: ContentionTracker,
    /// The queues that are not empty, the next one first.
    queues: Mutex<VecDeque<Arc<ClientQueue>>>,
}

/// The queue of one client.
#[derive(Debug, Default)]
pub struct ClientQueue {
    /// In the lowest byte, how many requests of the client passed without queueing in its last
    /// window. In the bits above it, the number of that window.
    window_and_count: AtomicU64,
    waiting: Mutex<VecDeque<oneshot::Sender<()>>>,
}

impl FairQueue {
    pub fn new(threads: usize) -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            threads,
            contention: ContentionTracker::default(),
            queues: Mutex::default(),
        })
    }

    /// Waits for the turn of the client that owns `queue`. A probe does not count as a second
    /// client, so it makes no sole client wait.
    pub async fn take(self: &Arc<Self>, queue: &Arc<ClientQueue>, is_probe: bool) {
        let is_alone = if is_probe {
            self.contention.is_alone(&**queue)
        } else {
            self.contention.is_sole_client(&**queue)
        };
        if !is_alone && !queue.is_within_burst(self.window(), BURST * self.threads as u64) {
            // An error would mean that the queue is gone, and nothing is left to wait for.
            let _ = self.enqueue(queue).await;
        }
    }

    fn window(&self) -> u64 {
        self.began.elapsed().as_micros() as u64 / WINDOW
    }

    fn enqueue(self: &Arc<Self>, queue: &Arc<ClientQueue>) -> oneshot::Receiver<()> {
        let (turn, served) = oneshot::channel();
        let mut queues = self.queues();
        let mut waiting = queue.waiting();
        if queues.is_empty() {
            tokio::spawn(self.clone().serve_all());
        }
        if waiting.is_empty() {
            queues.push_back(queue.clone());
        }
        waiting.push_back(turn);
        served
    }

    /// Serves the queues until all are empty.
    async fn serve_all(self: Arc<Self>) {
        // A pass comes before the first batch too. The runtime polls a task that was just spawned
        // or woken before the tasks that have been ready for longer.
        loop {
            pass().await;
            if !self.serve_batch() {
                return;
            }
        }
    }

    /// Serves one batch. Returns whether a request is left.
    fn serve_batch(&self) -> bool {
        let mut queues = self.queues();
        for _ in 0..BATCH * self.threads {
            let Some(queue) = queues.pop_front() else { break };
            let mut waiting = queue.waiting();
            // A request whose client has hung up takes no turn.
            while waiting.pop_front().is_some_and(|turn| turn.send(()).is_err()) {}
            let is_empty = waiting.is_empty();
            drop(waiting);
            if !is_empty {
                queues.push_back(queue);
            }
        }
        !queues.is_empty()
    }

    fn queues(&self) -> MutexGuard<'_, VecDeque<Arc<ClientQueue>>> {
        self.queues.lock()
    }
}

/// Waits until every task that is ready now has been polled. The runtime's own yield would also
/// wait for its check of the sockets, which a busy thread makes seldom.
async fn pass() {
    let mut is_over = false;
    poll_fn(|context| {
        if std::mem::replace(&mut is_over, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl ClientQueue {
    fn is_within_burst(&self, window: u64, limit: u64) -> bool {
        let limit = limit.min(0xff);
        let count_one = |window_and_count: u64| match window_and_count >> 8 == window {
            true => (window_and_count & 0xff < limit).then_some(window_and_count + 1),
            false => (limit > 0).then_some((window << 8) + 1),
        };
        self.window_and_count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count_one).is_ok()
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<oneshot::Sender<()>>> {
        self.waiting.lock()
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::yield_now;

    use super::*;

    fn enqueue_many(
        fair_queue: &Arc<FairQueue>,
        queue: &Arc<ClientQueue>,
        count: usize,
    ) -> Vec<oneshot::Receiver<()>> {
        (0..count).map(|_| fair_queue.enqueue(queue)).collect()
    }

    fn served(queue: &mut [oneshot::Receiver<()>]) -> usize {
        queue.iter_mut().filter(|turn| !turn.is_empty()).count()
    }

    #[test]
    fn only_requests_beyond_the_burst_wait() {
        let queue = ClientQueue::default();
        assert_eq!(
            (0..6).map(|_| queue.is_within_burst(7, 4)).collect::<Vec<_>>(),
            [true, true, true, true, false, false]
        );
        assert!(queue.is_within_burst(8, 4), "the next window");
        let many = (0..1000).filter(|_| queue.is_within_burst(9, BURST * 1024)).count();
        assert_eq!(many, 255, "no more than the byte can count");
        assert!(!queue.is_within_burst(10, 0));
    }

    #[tokio::test]
    async fn a_queue_is_served_beside_a_thousand_earlier_requests() {
        let fair_queue = FairQueue::new(1);
        let [greedy, modest] = <[Arc<ClientQueue>; 2]>::default();
        let mut flood = enqueue_many(&fair_queue, &greedy, 1000);
        let mut two = enqueue_many(&fair_queue, &modest, 2);
        assert!(fair_queue.serve_batch());
        assert_eq!((served(&mut flood), served(&mut two)), (2, 2));
        assert!(fair_queue.serve_batch());
        assert_eq!(served(&mut flood), 6, "a sole queue has all turns");
    }

    #[tokio::test]
    async fn all_ready_tasks_are_polled_between_two_batches() {
        let fair_queue = FairQueue::new(1);
        let greedy = Arc::<ClientQueue>::default();
        // Spawned, because the task that the runtime blocks on is not in the queue of ready tasks.
        let watcher = tokio::spawn(async move {
            let mut flood = enqueue_many(&fair_queue, &greedy, 10 * BATCH);
            for passes in 0..=10 {
                assert_eq!(served(&mut flood), passes * BATCH);
                pass().await;
                if passes == 0 {
                    pass().await;
                }
            }
        });
        watcher.await.unwrap();
    }

    #[tokio::test]
    async fn hung_up_requests_take_no_turn_and_later_ones_are_served() {
        let fair_queue = FairQueue::new(1);
        let client = Arc::<ClientQueue>::default();
        drop(enqueue_many(&fair_queue, &client, 100));
        let mut next = enqueue_many(&fair_queue, &client, 1);
        fair_queue.serve_batch();
        assert_eq!(served(&mut next), 1);
        while Arc::strong_count(&fair_queue) > 1 {
            yield_now().await;
        }
        fair_queue.enqueue(&client).await.unwrap();
    }
}
