//! The worker on a link that answers when it is told to.

#![cfg(test)]

use std::sync::Mutex;
use std::time::Duration;

use futures_util::future::ready;
use tokio::sync::oneshot;

use super::*;
use crate::clock::{OsEntropy, SystemClock};
use crate::node::admission::{ClusterConfig, Durability, Facts};
use crate::node::link::{Look, MarkerSwap, Subscription, Swapped};
use crate::node::{Keys, NoObserver, NodeState, Voter};
use crate::types::LockName;

const MAX_TTL: Duration = Duration::from_secs(300);

/// Everything is answered at once, but calls with operations.
#[derive(Clone, Default)]
struct Told {
    sent: Arc<Notify>,
    answers: Arc<Notify>,
}

fn facts() -> Facts {
    Facts {
        run_id: "a".repeat(40),
        version: "7.0.15".into(),
        role: "master".into(),
        policy: "noeviction".into(),
        evicted_keys: 0,
        durability: Durability::Durable,
        rewritten: false,
        replication_id: "c".repeat(40),
        was_replica: false,
    }
}

impl Link for Told {
    fn connect(&self) -> Answering<Box<dyn Session>> {
        ready(Ok(Box::new(self.clone()) as Box<dyn Session>)).boxed()
    }

    fn subscribe(&self, _: u64) -> Answering<Box<dyn Subscription>> {
        std::future::pending().boxed()
    }
}

impl Session for Told {
    fn look(&self) -> Answering<Look> {
        let marker = ClusterConfig::new("a:1", MAX_TTL).identity("a:1").admitting(&facts(), 7);
        ready(Ok(Look { facts: facts(), marker: Some(marker) })).boxed()
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
        let (told, votes) = (self.clone(), vec![Vote::Missing; tasks.len()]);
        async move {
            if !votes.is_empty() {
                told.sent.notify_one();
                told.answers.notified().await;
            }
            Ok(Answer { votes, time_micros: None, is_admitted: true })
        }
        .boxed()
    }

    fn closed(&self) -> BoxFuture<'static, String> {
        std::future::pending().boxed()
    }
}

struct One(Mutex<Option<oneshot::Sender<Vote>>>);

impl Voter for One {
    fn vote(&self, _: usize, vote: Vote) {
        let sender = self.0.lock().unwrap().take().expect("one vote");
        sender.send(vote).expect("somebody waits for it");
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

    let (sender, vote) = oneshot::channel();
    let op = Arc::new(Op::Inspect { keys: Keys::new("lock:", &"a".parse::<LockName>().unwrap()) });
    node.submit(op, Instant::now() + MAX_TTL, Reply::new(Arc::new(One(Mutex::new(Some(sender)))), 0));
    link.sent.notified().await;
    link.answers.notify_one();
    tokio::time::advance(Duration::from_secs(5)).await;
    assert_eq!(vote.await, Ok(Vote::Missing));
    assert_eq!(node.status().borrow().state, NodeState::Admitted);
}
