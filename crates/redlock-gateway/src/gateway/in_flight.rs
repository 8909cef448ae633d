//! How many requests are under way, and when none is.
//!
//! No semaphore: waiting for all of its permits would take them from the requests that may still be served while draining.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// All requests of a gateway.
#[derive(Default)]
pub(super) struct Requests(Arc<Counts>);

#[derive(Default)]
struct Counts {
    /// Those that do not wait.
    working: AtomicUsize,
    active: AtomicUsize,
    none_left: Notify,
}

/// A place among the requests being worked on, or among those that wait. Given back when it is dropped.
pub struct InFlight {
    counts: Arc<Counts>,
    waits: bool,
}

impl Requests {
    /// `None` when `max` are being worked on.
    pub(super) fn enter(&self, max: usize) -> Option<InFlight> {
        let counts = self.0.clone();
        let place = |working: usize| (working < max).then_some(working + 1);
        counts.working.fetch_update(Ordering::AcqRel, Ordering::Relaxed, place).ok()?;
        counts.active.fetch_add(1, Ordering::AcqRel);
        Some(InFlight { counts, waits: false })
    }

    /// Resolves when there is no request.
    pub(super) async fn none_left(&self) {
        loop {
            // Before the number is looked at, or the last one to leave between the two would not be noticed.
            let none_left = self.0.none_left.notified();
            if self.0.active.load(Ordering::Acquire) == 0 {
                return;
            }
            none_left.await;
        }
    }
}

impl InFlight {
    /// Gives the place to others: a request that waits is no work, and there is a bound of its own for those.
    pub(super) fn wait(&mut self) {
        if !std::mem::replace(&mut self.waits, true) {
            self.counts.working.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.wait();
        if self.counts.active.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.counts.none_left.notify_waiters();
        }
    }
}
