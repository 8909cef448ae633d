//! FairQueue at the threads that serve requests: fair queueing by client.
//!
//! A runtime polls what is ready in the order in which it became ready. Beside a client with 64 connections that asks again as
//! soon as it is answered, every step of somebody else's request (in, to the masters, back, out) would come after 64 of its
//! steps. So a client that is not alone and asks for more than a little at a time stands in a line of its own, and those who have a line are
//! let on in turn, a few requests between two looks at everything else that is ready. Who asks for little never waits
//! here, and while the threads keep up a line is let on as fast as it comes.
//!
//! ```text
//!  request ─► within the burst of its client? ─ yes ──────────────► served
//!                        │ no                                         ▲
//!                        ▼                                            │
//!              line of its client ─► one of each line in turn, BATCH ─┘
//!                                    between two passes over all that is ready
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

/// What a client may ask within a window without standing in line, for each thread: 7,800 requests a second. A thread answers
/// two to six times as many.
const BURST: u64 = 4;
/// In microseconds.
const WINDOW: u64 = 512;
/// Requests that are let on between two passes, for each thread.
const BATCH: usize = 4;

/// The turns of all clients.
#[derive(Debug)]
pub struct FairQueue {
    began: Instant,
    threads: usize,
    contention: ContentionTracker,
    /// Those in which somebody waits, the next one first.
    queues: Mutex<VecDeque<Arc<ClientQueue>>>,
}

/// The line of one client.
#[derive(Debug, Default)]
pub struct ClientQueue {
    /// The number of the window in which it asked last; in the lower byte, how often.
    asked: AtomicU64,
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

    /// Resolves when it is the turn of the client whose line this is. For the sake of who only probes nobody is held back.
    pub async fn take(self: &Arc<Self>, queue: &Arc<ClientQueue>, is_probe: bool) {
        let is_alone = if is_probe {
            self.contention.is_alone(&**queue)
        } else {
            self.contention.is_sole_client(&**queue)
        };
        if !is_alone && !queue.is_within_burst(self.window(), BURST * self.threads as u64) {
            // An error would be the end of all lines, and nothing to wait for.
            let _ = self.stand_in_line(queue).await;
        }
    }

    fn window(&self) -> u64 {
        self.began.elapsed().as_micros() as u64 / WINDOW
    }

    fn stand_in_line(self: &Arc<Self>, queue: &Arc<ClientQueue>) -> oneshot::Receiver<()> {
        let (turn, its_turn) = oneshot::channel();
        let mut queues = self.queues();
        let mut waiting = queue.waiting();
        if queues.is_empty() {
            tokio::spawn(self.clone().let_on());
        }
        if waiting.is_empty() {
            queues.push_back(queue.clone());
        }
        waiting.push_back(turn);
        its_turn
    }

    /// Until nobody is in line.
    async fn let_on(self: Arc<Self>) {
        // First of all too: what has just been spawned or woken is polled before what was ready.
        loop {
            pass().await;
            if !self.let_some_on() {
                return;
            }
        }
    }

    /// Whether somebody is left.
    fn let_some_on(&self) -> bool {
        let mut queues = self.queues();
        for _ in 0..BATCH * self.threads {
            let Some(queue) = queues.pop_front() else { break };
            let mut waiting = queue.waiting();
            // Whoever has hung up has no turn.
            while waiting.pop_front().is_some_and(|turn| turn.send(()).is_err()) {}
            let is_over = waiting.is_empty();
            drop(waiting);
            if !is_over {
                queues.push_back(queue);
            }
        }
        !queues.is_empty()
    }

    fn queues(&self) -> MutexGuard<'_, VecDeque<Arc<ClientQueue>>> {
        self.queues.lock()
    }
}

/// Resolves when everything has been polled that is ready now. The runtime's own way to yield would also wait for a look at the
/// sockets, which a busy thread takes seldom.
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
        let ask = |asked: u64| match asked >> 8 == window {
            true => (asked & 0xff < limit).then_some(asked + 1),
            false => (limit > 0).then_some((window << 8) + 1),
        };
        self.asked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, ask).is_ok()
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<oneshot::Sender<()>>> {
        self.waiting.lock()
    }
}

#[cfg(test)]
mod tests {
    use tokio::task::yield_now;

    use super::*;

    fn line_up(
        fair_queue: &Arc<FairQueue>,
        queue: &Arc<ClientQueue>,
        count: usize,
    ) -> Vec<oneshot::Receiver<()>> {
        (0..count).map(|_| fair_queue.stand_in_line(queue)).collect()
    }

    fn let_on(queue: &mut [oneshot::Receiver<()>]) -> usize {
        queue.iter_mut().filter(|turn| !turn.is_empty()).count()
    }

    #[test]
    fn who_asks_for_little_does_not_wait_and_who_asks_for_much_does() {
        let queue = ClientQueue::default();
        assert_eq!(
            (0..6).map(|_| queue.is_within_burst(7, 4)).collect::<Vec<_>>(),
            [true, true, true, true, false, false]
        );
        assert!(queue.is_within_burst(8, 4), "the next window");
        let many = (0..1000).filter(|_| queue.is_within_burst(9, BURST * 1024)).count();
        assert_eq!(many, 255, "and no more than can be counted");
        assert!(!queue.is_within_burst(10, 0));
    }

    #[tokio::test]
    async fn a_client_in_line_is_let_on_beside_a_thousand_requests_of_another_that_came_before() {
        let fair_queue = FairQueue::new(1);
        let [greedy, modest] = <[Arc<ClientQueue>; 2]>::default();
        let mut flood = line_up(&fair_queue, &greedy, 1000);
        let mut two = line_up(&fair_queue, &modest, 2);
        assert!(fair_queue.let_some_on());
        assert_eq!((let_on(&mut flood), let_on(&mut two)), (2, 2));
        assert!(fair_queue.let_some_on());
        assert_eq!(let_on(&mut flood), 6, "alone it has all turns");
    }

    #[tokio::test]
    async fn everything_that_is_ready_comes_between_two_batches_of_a_flood() {
        let fair_queue = FairQueue::new(1);
        let greedy = Arc::<ClientQueue>::default();
        // As something of the runtime: what it is blocked on is not in the queue of what is ready.
        let watcher = tokio::spawn(async move {
            let mut flood = line_up(&fair_queue, &greedy, 10 * BATCH);
            for passes in 0..=10 {
                assert_eq!(let_on(&mut flood), passes * BATCH);
                pass().await;
                if passes == 0 {
                    pass().await;
                }
            }
        });
        watcher.await.unwrap();
    }

    #[tokio::test]
    async fn who_hangs_up_in_line_takes_no_turn_and_who_comes_after_the_end_of_all_lines_is_let_on()
    {
        let fair_queue = FairQueue::new(1);
        let client = Arc::<ClientQueue>::default();
        drop(line_up(&fair_queue, &client, 100));
        let mut next = line_up(&fair_queue, &client, 1);
        fair_queue.let_some_on();
        assert_eq!(let_on(&mut next), 1);
        while Arc::strong_count(&fair_queue) > 1 {
            yield_now().await;
        }
        fair_queue.stand_in_line(&client).await.unwrap();
    }
}
