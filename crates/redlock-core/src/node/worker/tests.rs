//! The worker on a scripted link.

#![cfg(test)]

use parking_lot::Mutex;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Poll;

use bytes::Bytes;
use futures_util::future::ready;
use tokio::sync::oneshot;

use super::*;
use crate::model::clock::{OsEntropy, SystemClock};
use crate::model::types::{Info, LockToken, Ttl};
use crate::node::Engine;
use crate::node::eligibility::{ClusterConfig, Facts};
use crate::node::link::{
    MarkerSwap, ProbeReply, RecoveryAnswer, RecoveryBatch, Scan, Scanned, StoredPage, Subscription,
    Swapped,
};
use crate::node::{
    Effect, Keys, NoObserver, NodeState, Record, ReleaseScope, Reply, SafetyRules, Voter,
};

const MAX_TTL: Duration = Duration::from_secs(300);
const SKEW: Duration = Duration::from_secs(2);

/// Answers everything at once, except probes while they are held back. A probe that was held back
/// and answered late wakes no task. So the timer wakes the worker first, as after a stop of the
/// process.
#[derive(Clone, Default)]
struct ScriptedLink {
    sessions: Arc<AtomicU32>,
    probes: Arc<AtomicU32>,
    holds_probes: Arc<AtomicBool>,
    /// Ends the connection. Calls get no answer after that.
    breaks: Arc<Notify>,
    is_broken: Arc<AtomicBool>,
}

impl Link for ScriptedLink {
    fn connect(&self) -> Answering<Box<dyn Session>> {
        ready(Ok(Box::new(self.clone()) as Box<dyn Session>)).boxed()
    }

    fn subscribe(&self, _: u64) -> Answering<Box<dyn Subscription>> {
        std::future::pending().boxed()
    }
}

impl Session for ScriptedLink {
    fn probe(&self) -> Answering<ProbeReply> {
        let marker = ClusterConfig::new("a:1", MAX_TTL, SKEW)
            .identity("a:1")
            .admitting(&Facts::volatile_master(), 7);
        self.probes.fetch_add(1, Ordering::Relaxed);
        let holds_probes = self.holds_probes.clone();
        poll_fn(move |_| match holds_probes.load(Ordering::Relaxed) {
            true => Poll::Pending,
            false => Poll::Ready(Ok(ProbeReply {
                facts: Facts::volatile_master(),
                marker: Some(marker.clone()),
                is_caught_up: true,
                number: 0,
            })),
        })
        .boxed()
    }

    fn swap_marker(&self, _: MarkerSwap) -> Answering<Swapped> {
        ready(Ok(Swapped::Done)).boxed()
    }

    fn scan(&self, _: Scan) -> Answering<Scanned> {
        ready(Ok(Scanned::default())).boxed()
    }

    fn stored(&self, _: Option<Bytes>, _: Duration) -> Answering<StoredPage> {
        ready(Ok(StoredPage::default())).boxed()
    }

    fn recover(&self, _: RecoveryBatch) -> Answering<RecoveryAnswer> {
        ready(Ok(RecoveryAnswer::Done)).boxed()
    }

    fn mark_caught_up(&self, _: &str) -> Answering<()> {
        unreachable!("no node catches up here")
    }

    fn time_micros(&self) -> Answering<i64> {
        ready(Ok(0)).boxed()
    }

    fn load(&self, _: &str, _: &str) -> Answering<Engine> {
        self.sessions.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Engine::Lua)).boxed()
    }

    fn call(&self, tasks: &[Task], _: u64) -> Answering<Answer> {
        let votes = vec![Vote::Missing; tasks.len()];
        if self.is_broken.load(Ordering::Relaxed) {
            self.breaks.notify_one();
            return std::future::pending().boxed();
        }
        ready(Ok(Answer {
            votes,
            time_micros: None,
            is_admitted: true,
            is_number_kept: false,
            write_error: None,
        }))
        .boxed()
    }

    fn closed(&self) -> BoxFuture<'static, String> {
        let breaks = self.breaks.clone();
        async move {
            breaks.notified().await;
            "the connection was closed".into()
        }
        .boxed()
    }
}

async fn admitted(link: &ScriptedLink) -> RemoteNode {
    let settings = DriverSettings {
        call_deadline: Duration::from_secs(1),
        question_deadline: Duration::from_secs(1),
        max_clock_skew: SKEW,
        overlap_above: Duration::ZERO,
        drift_factor: 0.01,
        rules: SafetyRules::ALL,
        node_registry: Arc::default(),
    };
    let env = Env {
        clock: Arc::new(SystemClock),
        entropy: Arc::new(OsEntropy),
        observer: Arc::new(NoObserver),
    };
    let eligibility =
        Eligibility::new(ClusterConfig::new("a:1", MAX_TTL, SKEW).identity("a:1"), MAX_TTL, SKEW);
    let node = RemoteNode::start("a:1", Arc::new(link.clone()), eligibility, 8, settings, env);
    node.status().wait_for(|status| status.state == NodeState::Admitted).await.expect("it lives");
    node
}

struct Ballot(Mutex<Option<oneshot::Sender<Vote>>>);

impl Voter for Ballot {
    fn vote(&self, _: usize, vote: Vote) {
        let sender = self.0.lock().take().expect("one vote");
        let _ = sender.send(vote);
    }
}

fn keys() -> Keys {
    Keys::new("lock:", &"a".parse().expect("a name"))
}

fn task(op: Op) -> (Task, oneshot::Receiver<Vote>) {
    let (sender, vote) = oneshot::channel();
    let reply = Reply::new(Arc::new(Ballot(Mutex::new(Some(sender)))), 0);
    (Task { op: Arc::new(op), not_after: Instant::now() + Duration::from_secs(60), reply }, vote)
}

fn submit(node: &RemoteNode, op: Op) -> oneshot::Receiver<Vote> {
    let (Task { op, not_after, reply }, vote) = task(op);
    node.submit(op, not_after, reply);
    vote
}

/// The worker runs only when the test awaits, so until then everything stays in the queue.
#[tokio::test(start_paused = true)]
async fn releases_leave_half_of_the_queue() {
    let node = admitted(&ScriptedLink::default()).await;
    let token: LockToken =
        "1.1763725165000000.aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa00000000".parse().expect("a token");
    let record = Record::new(&token, &Info::default());
    let scope = ReleaseScope::Holder;
    let release = || Op::Release { keys: keys(), record: record.clone(), scope, tell: None };
    let ttl = Ttl::from_millis(1_000).expect("a TTL");
    let acquire = || Op::Acquire { keys: keys(), record: record.clone(), ttl, tell: None };
    let is_taken = |vote: &mut oneshot::Receiver<Vote>| vote.try_recv().is_err();
    // The parts of a large release count too.
    let (parts, mut releases): (Vec<_>, Vec<_>) = (0..2).map(|_| task(release())).unzip();
    node.submit_all(parts);
    releases.extend((0..4).map(|_| submit(&node, release())));
    let taken = releases.iter_mut().map(is_taken).filter(|taken| *taken).count();
    assert_eq!(taken, 4, "the queue has room for 8 operations");
    assert!(is_taken(&mut submit(&node, acquire())));
    assert_eq!((&mut releases[0]).await, Ok(Vote::Missing));
    // The worker has taken the queue, so there is room again.
    assert!(is_taken(&mut submit(&node, release())));
}

/// If the call did not fail at once, the request would wait for its whole time limit. It would then
/// report a time-out although the node is down.
#[tokio::test(start_paused = true)]
async fn a_call_fails_at_once_when_the_connection_ends() {
    let link = ScriptedLink::default();
    let node = admitted(&link).await;
    link.is_broken.store(true, Ordering::Relaxed);
    let asked = Instant::now();
    let vote = submit(&node, Op::Inspect { keys: keys() });
    let Ok(Vote::Failed(failure)) = vote.await else { panic!("no failure") };
    assert_eq!(
        (failure.reason, failure.effect, asked.elapsed()),
        (Reason::Down, Effect::Possible, Duration::ZERO)
    );
}

#[tokio::test(start_paused = true)]
async fn an_arrived_answer_counts_after_its_deadline() {
    let link = ScriptedLink::default();
    let node = admitted(&link).await;
    let probes = link.probes.load(Ordering::Relaxed);
    link.holds_probes.store(true, Ordering::Relaxed);
    while link.probes.load(Ordering::Relaxed) == probes {
        tokio::time::advance(Duration::from_millis(100)).await;
    }
    link.holds_probes.store(false, Ordering::Relaxed);
    tokio::time::advance(Duration::from_secs(5)).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(link.sessions.load(Ordering::Relaxed), 1, "the session was kept");
    assert_eq!(node.status().borrow().state, NodeState::Admitted);
}
