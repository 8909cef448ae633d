//! Releases that a node failed to confirm. Each is kept for its node, and retried when the node is
//! admitted to vote. The retries have a deadline of their own, independent of the caller's.
//!
//! A release leaves a tombstone on the node. An acquire command may still be in the socket of a
//! dead connection and arrive after the release; the tombstone keeps it from setting the lock
//! again. So a failed release stays pending for `max_ttl` plus `max_clock_skew`. After that time,
//! every lock that the release could remove has ended.
//!
//! All pending releases share one limit on memory. The releases of one client may take at most as much
//! memory as is still free, and so may the releases of one node. So a client that is alone fills half of
//! the limit at most, and so does a node. A release without room is abandoned and counted, and the lock
//! that it would have removed stays until its TTL ends.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::node::eligibility::ClusterConfig;
use crate::node::{Node, NodeState, Observer, Op, Reply, Vote, Voter};

/// The limit on releases that are retried on one node at the same time.
const MAX_IN_FLIGHT: usize = 128;
/// The pause before the next retries, after a node failed a release again.
const PAUSE: Duration = Duration::from_millis(200);

/// Counts bytes of pending releases: those of a client, those of a node, or all. Clones share the
/// count.
#[derive(Debug, Clone, Default)]
pub struct ReleaseAccount(Arc<AtomicUsize>);

impl ReleaseAccount {
    /// How many bytes the pending releases take now.
    pub fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

pub(crate) struct PendingReleases {
    nodes: Vec<Arc<dyn Node>>,
    queues: Vec<Queue>,
    /// The releases of all nodes, and the limit on their bytes.
    of_all: ReleaseAccount,
    limit: usize,
    observer: Arc<dyn Observer>,
    life: Duration,
    max_clock_skew: Duration,
    /// Releases in flight, and confirmations. Releases that wait for their node are not included.
    under_way: AtomicUsize,
    drained: Notify,
}

/// Work under way. It ends by the drop, also when the work panics.
struct UnderWay(Arc<PendingReleases>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.ended(None);
    }
}

/// The pending releases of a node.
struct Queue {
    releases: mpsc::UnboundedSender<Pending>,
    account: ReleaseAccount,
}

struct Pending {
    op: Arc<Op>,
    until: Instant,
    _counted: Counted,
}

/// Counts the bytes of one pending release in three accounts: all, that of its node and that of its
/// client. Dropping this value removes them from each.
struct Counted {
    accounts: [ReleaseAccount; 3],
    bytes: usize,
}

impl Counted {
    /// `None` without room.
    fn new(accounts: [&ReleaseAccount; 3], bytes: usize, limit: usize) -> Option<Self> {
        let [all, node, client] =
            accounts.map(|account| account.0.fetch_add(bytes, Ordering::Relaxed));
        let counted = Self { accounts: accounts.map(Clone::clone), bytes };
        (all + node.max(client) + bytes <= limit).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        for account in &self.accounts {
            account.0.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

impl PendingReleases {
    /// A release can matter for `max_ttl` plus `max_clock_skew`, or for longer if a marker shows a
    /// larger bound. `limit`: the most bytes of pending releases.
    pub(crate) fn start(
        nodes: &[Arc<dyn Node>],
        observer: Arc<dyn Observer>,
        max_ttl: Duration,
        max_clock_skew: Duration,
        limit: usize,
    ) -> Arc<Self> {
        let mut queues = Vec::with_capacity(nodes.len());
        for (index, node) in nodes.iter().enumerate() {
            // `limit` bounds the channel.
            let (releases, pending) = mpsc::unbounded_channel();
            queues.push(Queue { releases, account: ReleaseAccount::default() });
            tokio::spawn(retry(node.clone(), index, pending, observer.clone()));
        }
        Arc::new(Self {
            nodes: nodes.to_vec(),
            queues,
            of_all: ReleaseAccount::default(),
            limit,
            observer,
            life: max_ttl + max_clock_skew,
            max_clock_skew,
            under_way: AtomicUsize::new(0),
            drained: Notify::new(),
        })
    }

    pub(crate) fn began(&self) {
        self.under_way.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes that a release has ended. If it failed, `failed` has its node, its operation and the
    /// account of its client, and the release is retried.
    pub(crate) fn ended(&self, failed: Option<(usize, &Arc<Op>, &ReleaseAccount)>) {
        if let Some((node, op, client)) = failed {
            self.enqueue(node, op.clone(), client);
        }
        if self.under_way.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.drained.notify_waiters();
        }
    }

    /// Spawns `work`, which may send releases. It runs to its end even if the caller is dropped.
    /// [`drained`](Self::drained) waits for it.
    pub(crate) fn complete<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.began();
        let under_way = UnderWay(self.clone());
        tokio::spawn(async move {
            let result = work.await;
            drop(under_way);
            result
        })
    }

    /// Sends a release to one node at once. If the node fails, the release is retried.
    pub(crate) fn release(self: &Arc<Self>, node: usize, op: Arc<Op>, client: ReleaseAccount) {
        self.began();
        let voter = Arc::new(FirstTry { pending: self.clone(), op: op.clone(), client });
        self.nodes[node].submit(op, Instant::now() + self.life, Reply::new(voter, node));
    }

    fn enqueue(&self, node: usize, op: Arc<Op>, client: &ReleaseAccount) {
        let bound_on =
            |node: &Arc<dyn Node>| ClusterConfig::ttl_bound_of(&node.status().borrow().marker);
        // Another gateway may have granted the lock with a longer TTL than this one grants.
        let bounds = self.nodes.iter().filter_map(bound_on);
        let life = bounds.map(|bound| bound + self.max_clock_skew).fold(self.life, Duration::max);
        let queue = &self.queues[node];
        let bytes = size_of::<Pending>() + op.memory();
        let accounts = [&self.of_all, &queue.account, client];
        let counted = Counted::new(accounts, bytes, self.limit);
        let kept = counted.is_some_and(|counted| {
            let release = Pending { op, until: Instant::now() + life, _counted: counted };
            queue.releases.send(release).is_ok()
        });
        if !kept {
            self.observer.release_abandoned(node);
        }
    }

    /// Waits until no release is in flight.
    pub(crate) async fn drained(&self) {
        loop {
            let drained = self.drained.notified();
            if self.under_way.load(Ordering::Acquire) == 0 {
                return;
            }
            drained.await;
        }
    }
}

async fn retry(
    node: Arc<dyn Node>,
    index: usize,
    mut failed: mpsc::UnboundedReceiver<Pending>,
    observer: Arc<dyn Observer>,
) {
    let mut status = node.status();
    // A release that fails again goes to the end. At the front it would block the other releases
    // for as long as it is pending.
    let mut open: VecDeque<Pending> = VecDeque::new();
    loop {
        if open.is_empty() {
            let Some(release) = failed.recv().await else { return };
            open.push_back(release);
        }
        while let Ok(release) = failed.try_recv() {
            open.push_back(release);
        }
        let last = open.iter().map(|release| release.until).max().unwrap_or_else(Instant::now);
        let admitted = status.wait_for(|status| status.state.is_admitted());
        // Waits until the node is admitted, or until all these releases are out of time. If the
        // node's task is gone, the submission below fails.
        let _ = tokio::time::timeout_at(last, admitted).await.map(|seen| seen.map(drop));

        let now = Instant::now();
        let batch = open.len().min(MAX_IN_FLIGHT);
        let mut answers = Vec::with_capacity(batch);
        for release in open.drain(..batch) {
            if release.until <= now {
                // On a node in quarantine there is nothing left to undo, because the node lost its
                // locks.
                if status.borrow().state != NodeState::Quarantined {
                    observer.release_abandoned(index);
                }
                continue;
            }
            let (answer, voted) = oneshot::channel();
            node.submit(
                release.op.clone(),
                release.until,
                Reply::new(Arc::new(Retry::from(answer)), index),
            );
            answers.push((release, voted));
        }
        let mut any_failed = false;
        for (release, voted) in answers {
            match voted.await {
                Ok(vote) if !vote.has_failed() => {}
                Ok(_) | Err(_) => {
                    open.push_back(release);
                    any_failed = true;
                }
            }
        }
        if any_failed {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

struct FirstTry {
    pending: Arc<PendingReleases>,
    op: Arc<Op>,
    client: ReleaseAccount,
}

impl Voter for FirstTry {
    fn vote(&self, node: usize, vote: Vote) {
        self.pending.ended(vote.has_failed().then_some((node, &self.op, &self.client)));
    }
}

struct Retry(Mutex<Option<oneshot::Sender<Vote>>>);

impl From<oneshot::Sender<Vote>> for Retry {
    fn from(sender: oneshot::Sender<Vote>) -> Self {
        Self(Mutex::new(Some(sender)))
    }
}

impl Voter for Retry {
    fn vote(&self, _: usize, vote: Vote) {
        let sender = self.0.lock().take();
        if let Some(sender) = sender {
            let _ = sender.send(vote);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_or_node_may_fill_half_of_the_room_that_is_left() {
        let accounts = || [(); 2].map(|()| ReleaseAccount::default());
        let (all, nodes, clients) = (ReleaseAccount::default(), accounts(), accounts());
        let fill = |node: usize, client: usize| -> Vec<Counted> {
            let accounts = [&all, &nodes[node], &clients[client]];
            std::iter::from_fn(|| Counted::new(accounts, 8, 1024)).collect()
        };
        let bytes = || [&all, &nodes[0], &nodes[1], &clients[0], &clients[1]].map(|it| it.bytes());
        let first = fill(0, 0);
        assert_eq!(bytes(), [512, 512, 0, 512, 0]);
        assert!(fill(0, 1).is_empty(), "the node has its share");
        assert!(fill(1, 0).is_empty(), "the client has its share");
        let second = fill(1, 1);
        assert_eq!(bytes(), [768, 512, 256, 512, 256]);
        drop(first);
        assert_eq!(bytes(), [256, 0, 256, 0, 256]);
        drop(second);
        assert_eq!(bytes(), [0; 5]);
    }
}
