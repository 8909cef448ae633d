//! Lets streams deliver events a few at a time, so that requests run in between.
//!
//! One change can make thousands of streams ready. The runtime serves ready tasks first come, first
//! served, so a request would wait behind all these streams at each of its steps. Here streams wait
//! for a turn instead. After each few turns, the runtime first serves all other ready tasks. If
//! deliveries take more than a share of the time, they pause. The events of a waiting stream
//! accumulate. The stream then sends them in one write, which costs little more than one event.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

/// How many streams get a turn at once, for each thread of the runtime. A delivery takes about
/// 20 µs (measured), so a request waits for about 160 µs at most at each of its steps.
///
/// The number is a compromise between other clients and the events. Here are ratios to a run in
/// which the 10,000 streams get no events (`redlock-bench --workload watchers`, 26 November 2026).
/// With 16, the p99 of another client is 3 to 19 times as long; with 8, it is 1.1 times as long.
/// With 4 it is no shorter than with 8, but events arrive almost twice as late.
const AT_ONCE: usize = 8;
/// Deliveries may take an eighth of the time (1 / `SHARE`). With a quarter, 10,000 streams slowed other
/// clients by 30 to 60 % (`redlock-bench --workload watchers`). If requests run between two deliveries,
/// their time counts as well. So a busy gateway delivers later.
const SHARE: u32 = 8;
/// How long deliveries may take without a pause, after a time without deliveries: enough for some
/// 500 deliveries on one thread.
const MAX_CREDIT: Duration = Duration::from_millis(10);

/// The queue of streams that have something to deliver.
#[derive(Debug)]
pub(super) struct Turns {
    /// One permit for each stream whose turn it is.
    permits: Semaphore,
    /// Streams that wait for a turn, or have a turn and were not polled yet.
    waiting: AtomicUsize,
    /// Wakes [`Turns::give`].
    wake: Notify,
}

impl Default for Turns {
    fn default() -> Self {
        let permits = Semaphore::new(0);
        Self { permits, waiting: AtomicUsize::new(0), wake: Notify::new() }
    }
}

impl Turns {
    /// Waits for a turn. Streams get turns in the order in which they began to wait.
    pub(super) async fn next(&self) {
        let _waiting = Waiting::begin(self);
        // Nobody closes the semaphore.
        if let Ok(permit) = self.permits.acquire().await {
            permit.forget();
        }
    }

    /// Gives turns to waiting streams until it is dropped.
    pub(super) async fn give(&self) {
        let at_once = AT_ONCE * Handle::current().metrics().num_workers();
        let mut credit = Credit::full(Instant::now());
        loop {
            match self.waiting.load(Ordering::Acquire) {
                0 => self.wake.notified().await,
                // A turn stays unused if its stream ended. Then the next stream takes that turn.
                waiting if self.permits.available_permits() == 0 => {
                    let began = Instant::now();
                    self.permits.add_permits(waiting.min(at_once));
                    tokio::task::yield_now().await;
                    if let Some(pause) = credit.spend(began, Instant::now()) {
                        tokio::time::sleep(pause).await;
                    }
                }
                _ => tokio::task::yield_now().await,
            }
        }
    }
}

/// Limits deliveries to their share of the time. This is a token bucket: it holds [`MAX_CREDIT`] at
/// most, and each second adds 1 / [`SHARE`] second.
#[derive(Debug)]
struct Credit {
    /// When the bucket will be full, if nothing more is spent.
    full_at: Instant,
}

impl Credit {
    fn full(now: Instant) -> Self {
        Self { full_at: now }
    }

    /// Spends the time from `began` to `now`, which deliveries took. If the bucket is empty, returns
    /// the pause before the next deliveries.
    fn spend(&mut self, began: Instant, now: Instant) -> Option<Duration> {
        // If the process stood still meanwhile, that was no delivery.
        let spent = (now - began).min(MAX_CREDIT);
        // The bucket needs SHARE times the spent time to be as full as before.
        self.full_at = self.full_at.max(began) + spent * SHARE;
        let pause = (self.full_at - now).saturating_sub(MAX_CREDIT * SHARE);
        (!pause.is_zero()).then_some(pause)
    }
}

/// Counts a stream in [`Turns::waiting`] until it is dropped.
struct Waiting<'a>(&'a Turns);

impl<'a> Waiting<'a> {
    fn begin(turns: &'a Turns) -> Self {
        if turns.waiting.fetch_add(1, Ordering::AcqRel) == 0 {
            turns.wake.notify_one();
        }
        Self(turns)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Poll;

    use super::*;

    /// Turns that are given by a task.
    fn turns() -> Arc<Turns> {
        let turns = Arc::new(Turns::default());
        let giver = turns.clone();
        tokio::spawn(async move { giver.give().await });
        turns
    }

    #[test]
    fn deliveries_take_their_share_of_the_time() {
        const BATCH: Duration = Duration::from_micros(300);
        let start = Instant::now();
        let (mut now, mut credit, mut spent) = (start, Credit::full(start), Duration::ZERO);
        let mut has_paused = false;
        while now - start < Duration::from_secs(1) {
            let began = now;
            now += BATCH;
            spent += BATCH;
            let pause = credit.spend(began, now).unwrap_or_default();
            has_paused |= !pause.is_zero();
            assert!(has_paused || spent <= MAX_CREDIT * 2, "{spent:?} without a pause");
            now += pause;
        }
        let share = (now - start) / SHARE;
        let allowed = share..=share + MAX_CREDIT + 2 * BATCH;
        assert!(allowed.contains(&spent), "{spent:?} of {:?}", now - start);
        // A standstill does not silence the streams.
        let mut credit = Credit::full(now);
        let began = now;
        now += Duration::from_secs(30);
        assert!(credit.spend(began, now).unwrap_or_default() <= MAX_CREDIT * SHARE);
        // Few deliveries never pause.
        for _ in 0..1_000 {
            now += 2 * SHARE * BATCH;
            credit.spend(now, now + BATCH);
        }
        assert_eq!(credit.spend(now, now + BATCH), None);
    }

    #[tokio::test(start_paused = true)]
    async fn stream_that_ends_leaves_its_turn_to_the_next() {
        let turns = turns();
        let mut ended = Box::pin(turns.next());
        std::future::poll_fn(|context| {
            assert!(ended.as_mut().poll(context).is_pending());
            Poll::Ready(())
        })
        .await;
        // The turn is given, and its stream ends without using it.
        tokio::task::yield_now().await;
        assert_eq!(turns.waiting.load(Ordering::Relaxed), 1);
        drop(ended);
        assert_eq!(turns.permits.available_permits(), 1);
        for _ in 0..3 {
            turns.next().await;
        }
        assert_eq!(turns.waiting.load(Ordering::Relaxed), 0);
    }
}
