//! The worker on a link that answers when it is told to.

#![cfg(test)]

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::ready;

use super::*;
use crate::clock::{OsEntropy, SystemClock};
use crate::node::admission::{ClusterConfig, Facts};
use crate::node::link::{Look, MarkerSwap, Subscription, Swapped};
use crate::node::{NoObserver, NodeState};

const MAX_TTL: Duration = Duration::from_secs(300);

/// Everything is answered at once, but looks while they are held back. An answer that comes wakes nobody: as after a stop of
/// the process, the timer is what the worker hears first.
#[derive(Clone, Default)]
struct Told {
    connections: Arc<AtomicU32>,
    looks: Arc<AtomicU32>,
    holds_back: Arc<AtomicBool>,
}

impl Link for Told {
    fn connect(&self) -> Answering<Box<dyn Session>> {
        self.connections.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Box::new(self.clone()) as Box<dyn Session>)).boxed()
    }

    fn subscribe(&self, _: u64) -> Answering<Box<dyn Subscription>> {
        std::future::pending().boxed()
    }
}

impl Session for Told {
    fn look(&self) -> Answering<Look> {
        let marker = ClusterConfig::new("a:1", MAX_TTL).identity("a:1").admitting(&Facts::volatile_master(), 7);
        self.looks.fetch_add(1, Ordering::Relaxed);
        let holds_back = self.holds_back.clone();
        poll_fn(move |_| match holds_back.load(Ordering::Relaxed) {
            true => Poll::Pending,
            false => Poll::Ready(Ok(Look { facts: Facts::volatile_master(), marker: Some(marker.clone()) })),
        })
        .boxed()
    }

    fn swap_marker(&self, _: MarkerSwap) -> Answering<Swapped> {
        ready(Ok(Swapped::Done)).boxed()
    }

    fn set_marker(&self, _: String) -> Answering<()> {
        ready(Ok(())).boxed()
    }

    fn time_micros(&self) -> Answering<i64> {
        ready(Ok(0)).boxed()
    }

    fn load(&self, _: &str, _: &str) -> Answering<()> {
        ready(Ok(())).boxed()
    }

    fn call(&self, tasks: &[Task]) -> Answering<Answer> {
        let votes = vec![Vote::Missing; tasks.len()];
        ready(Ok(Answer { votes, time_micros: None, is_admitted: true })).boxed()
    }

    fn closed(&self) -> BoxFuture<'static, String> {
        std::future::pending().boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_has_come_counts_although_the_process_stood_still_past_its_deadline() {
    let link = Told::default();
    let settings = DriverSettings {
        call_deadline: Duration::from_secs(1),
        question_deadline: Duration::from_secs(1),
        max_clock_offset: Duration::from_secs(2),
        overlap_above: Duration::ZERO,
    };
    let seams = Seams { clock: Arc::new(SystemClock), entropy: Arc::new(OsEntropy), observer: Arc::new(NoObserver) };
    let admission = Admission::new(ClusterConfig::new("a:1", MAX_TTL).identity("a:1"), MAX_TTL);
    let node = RemoteNode::start("a:1", Arc::new(link.clone()), admission, 8, settings, seams);
    node.status().wait_for(|status| status.state == NodeState::Admitted).await.expect("it lives");

    let looks = link.looks.load(Ordering::Relaxed);
    link.holds_back.store(true, Ordering::Relaxed);
    while link.looks.load(Ordering::Relaxed) == looks {
        tokio::time::advance(Duration::from_millis(100)).await;
    }
    link.holds_back.store(false, Ordering::Relaxed);
    tokio::time::advance(Duration::from_secs(5)).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(link.connections.load(Ordering::Relaxed), 1, "the session was dropped");
    assert_eq!(node.status().borrow().state, NodeState::Admitted);
}
