//! Releases that did not arrive: kept per node and tried again when the node is back, on their own deadline and never on
//! the caller's.
//!
//! A release is the barrier that keeps a late acquire, still in the socket of a connection that died, from setting the
//! lock again. So a release that failed is owed until the lock's longest possible TTL has passed; after that nothing is
//! left that it could undo. Debts are bounded: what is beyond the bound is given up and counted, and the TTL alone bounds
//! what stays behind.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use crate::node::{Node, NodeState, Observer, Op, Reply, Vote, Voter};

/// Debts kept for one node.
const MAX_OWED: usize = 65_536;
/// Debts under way to one node at a time.
const AT_ONCE: usize = 128;
/// Pause after a node that is admitted failed a release all the same.
const PAUSE: Duration = Duration::from_millis(200);

pub(crate) struct Cleanup {
    nodes: Vec<Arc<dyn Node>>,
    owed: Vec<mpsc::Sender<Debt>>,
    observer: Arc<dyn Observer>,
    life: Duration,
    /// Releases that were submitted and not answered yet; debts that wait for their node are not among them.
    under_way: AtomicUsize,
    settled: Notify,
}

struct Debt {
    op: Arc<Op>,
    until: Instant,
}

impl Cleanup {
    /// `life` is how long a release can matter: the longest TTL and D.
    pub(crate) fn start(nodes: &[Arc<dyn Node>], observer: Arc<dyn Observer>, life: Duration) -> Arc<Self> {
        let mut owed = Vec::with_capacity(nodes.len());
        for (index, node) in nodes.iter().enumerate() {
            let (sender, debts) = mpsc::channel(MAX_OWED);
            owed.push(sender);
            tokio::spawn(pay(node.clone(), index, debts, observer.clone()));
        }
        Arc::new(Self {
            nodes: nodes.to_vec(),
            owed,
            observer,
            life,
            under_way: AtomicUsize::new(0),
            settled: Notify::new(),
        })
    }

    pub(crate) fn began(&self) {
        self.under_way.fetch_add(1, Ordering::Relaxed);
    }

    /// A release was answered; with a debt when it failed.
    pub(crate) fn ended(&self, failed: Option<(usize, &Arc<Op>)>) {
        if let Some((node, op)) = failed {
            self.owe(node, op.clone());
        }
        if self.under_way.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.settled.notify_waiters();
        }
    }

    /// Releases on one node, at once if that can be, or else as soon as it can.
    pub(crate) fn release(self: &Arc<Self>, node: usize, op: Arc<Op>) {
        self.began();
        let voter = Arc::new(Undoing { cleanup: self.clone(), op: op.clone() });
        self.nodes[node].submit(op, Instant::now() + self.life, Reply::new(voter, node));
    }

    fn owe(&self, node: usize, op: Arc<Op>) {
        let debt = Debt { op, until: Instant::now() + self.life };
        if self.owed[node].try_send(debt).is_err() {
            self.observer.release_abandoned(node);
        }
    }

    /// Waits until no release is under way.
    pub(crate) async fn settled(&self) {
        loop {
            let settled = self.settled.notified();
            if self.under_way.load(Ordering::Acquire) == 0 {
                return;
            }
            settled.await;
        }
    }
}

async fn pay(node: Arc<dyn Node>, index: usize, mut debts: mpsc::Receiver<Debt>, observer: Arc<dyn Observer>) {
    let mut status = node.status();
    // A queue: a debt that keeps failing goes to the end, or it would hold up all others for as long as it is owed.
    let mut open: VecDeque<Debt> = VecDeque::new();
    loop {
        if open.is_empty() {
            let Some(debt) = debts.recv().await else { return };
            open.push_back(debt);
        }
        while open.len() < MAX_OWED
            && let Ok(debt) = debts.try_recv()
        {
            open.push_back(debt);
        }
        let last = open.iter().map(|debt| debt.until).max().unwrap_or_else(Instant::now);
        let admitted = status.wait_for(|status| status.state == NodeState::Admitted);
        // Out of time, or admitted (or the node's task is gone, and then the submission fails).
        let _ = tokio::time::timeout_at(last, admitted).await.map(|seen| seen.map(drop));

        let now = Instant::now();
        let turn = open.len().min(AT_ONCE);
        let mut answers = Vec::with_capacity(turn);
        for debt in open.drain(..turn) {
            if debt.until <= now {
                // What a node in quarantine has forgotten need not be undone.
                if status.borrow().state != NodeState::Quarantined {
                    observer.release_abandoned(index);
                }
                continue;
            }
            let (answer, voted) = oneshot::channel();
            node.submit(debt.op.clone(), debt.until, Reply::new(Arc::new(Payment::from(answer)), index));
            answers.push((debt, voted));
        }
        let mut failed = false;
        for (debt, voted) in answers {
            match voted.await {
                Ok(Vote::Failed(_)) | Err(_) => {
                    open.push_back(debt);
                    failed = true;
                }
                Ok(_) => {}
            }
        }
        if failed {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

struct Undoing {
    cleanup: Arc<Cleanup>,
    op: Arc<Op>,
}

impl Voter for Undoing {
    fn vote(&self, node: usize, vote: Vote) {
        self.cleanup.ended(matches!(vote, Vote::Failed(_)).then_some((node, &self.op)));
    }
}

struct Payment(std::sync::Mutex<Option<oneshot::Sender<Vote>>>);

impl From<oneshot::Sender<Vote>> for Payment {
    fn from(sender: oneshot::Sender<Vote>) -> Self {
        Self(std::sync::Mutex::new(Some(sender)))
    }
}

impl Voter for Payment {
    fn vote(&self, _: usize, vote: Vote) {
        let sender = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(sender) = sender {
            let _ = sender.send(vote);
        }
    }
}
