//! The first start of a cluster. Nodes that were never used look like nodes that lost everything,
//! so they are quarantined. An operator may declare the cluster new. This module checks the
//! declaration; if it is true, the nodes are admitted at once.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::sync::watch;

use crate::node::{Node, NodeState, NodeStatus};

/// Longer than a running gateway takes to notice that a node has lost its data. Such a gateway is a
/// witness that the node is not new, and replaces the node's marker.
const WITNESS_PAUSE: Duration = Duration::from_secs(2);

/// The result of a declaration that a cluster is new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bootstrap {
    /// Every node was reachable and new. All nodes are being admitted.
    Confirmed,
    /// This node was not new: it has voted, or a gateway already counts its quarantine. Nothing was
    /// changed.
    Refuted(String),
}

pub(crate) async fn bootstrap(nodes: &[Arc<dyn Node>]) -> Bootstrap {
    let mut statuses: Vec<_> = nodes.iter().map(|node| node.status()).collect();
    // The number of probes of each node at the end of the pause. During the pause a witness may
    // correct the state of a node, so probes from before its end do not count.
    let mut before: Option<Vec<u64>> = None;
    loop {
        let mut all_new = true;
        let mut probes = Vec::with_capacity(nodes.len());
        for (node, status) in nodes.iter().zip(&mut statuses) {
            let status = status.borrow_and_update();
            probes.push(status.probes);
            match status.state {
                NodeState::Quarantined if status.is_bootstrapping => {}
                NodeState::Quarantined | NodeState::Admitted | NodeState::CatchingUp => {
                    return Bootstrap::Refuted(node.name().to_owned());
                }
                NodeState::Connecting | NodeState::Refused => all_new = false,
            }
        }
        match &before {
            _ if !all_new => before = None,
            None => {
                tokio::time::sleep(WITNESS_PAUSE).await;
                before = Some(statuses.iter().map(|status| status.borrow().probes).collect());
                continue;
            }
            // Two more probes are needed: the first may have been sent before the end of the pause,
            // and answered late.
            Some(before) if probes.iter().zip(before).all(|(now, before)| *now >= before + 2) => {
                nodes.iter().for_each(|node| node.confirm_bootstrap());
                return Bootstrap::Confirmed;
            }
            Some(_) => {}
        }
        any_changed(&mut statuses).await;
    }
}

/// Waits until one of the statuses changes.
pub(crate) async fn any_changed(statuses: &mut [watch::Receiver<NodeStatus>]) {
    // If a node was dropped, `changed` fails at once and always. That is no change, so this part
    // then waits for ever.
    let changes = statuses.iter_mut().map(|status| {
        Box::pin(async {
            if status.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        })
    });
    select_all(changes).await;
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;
    use std::sync::atomic::{AtomicU32, Ordering};

    use tokio::time::Instant;

    use super::*;
    use crate::node::{Listener, LockReader, Op, Reply, Task};

    /// A node that has a status and nothing else.
    struct Seen {
        status: watch::Sender<NodeStatus>,
        confirmed: AtomicU32,
    }

    impl Node for Seen {
        fn name(&self) -> &str {
            "seen"
        }

        fn status(&self) -> watch::Receiver<NodeStatus> {
            self.status.subscribe()
        }

        fn submit(&self, _: Arc<Op>, _: Instant, _: Reply) {}

        fn submit_all(&self, _: Vec<Task>) {}

        fn reader(&self) -> &dyn LockReader {
            unreachable!("nothing is listed here")
        }

        fn listen(&self, _: Weak<dyn Listener>) {}

        fn is_subscribed(&self) -> bool {
            false
        }

        fn confirm_bootstrap(&self) {
            self.confirmed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// One node hangs. After the pause its status still says new, although a witness has corrected
    /// the node's state.
    #[tokio::test(start_paused = true)]
    async fn probes_from_before_the_witness_pause_do_not_count() {
        let new = NodeStatus {
            is_bootstrapping: true,
            probes: 1,
            ..NodeStatus::new(NodeState::Quarantined, 0)
        };
        let node = || {
            Arc::new(Seen { status: watch::Sender::new(new.clone()), confirmed: AtomicU32::new(0) })
        };
        let seen: Vec<_> = (0..3).map(|_| node()).collect();
        let nodes: Vec<_> = seen.iter().map(|node| node.clone() as Arc<dyn Node>).collect();
        let look = |node: &Seen| node.status.send_modify(|status| status.probes += 2);
        let mut word = std::pin::pin!(bootstrap(&nodes));
        assert!(tokio::time::timeout(WITNESS_PAUSE * 2, &mut word).await.is_err());
        seen[..2].iter().for_each(|node| look(node));
        let early = tokio::time::timeout(WITNESS_PAUSE, &mut word).await;
        assert!(early.is_err(), "the third has no new probe");
        seen[2].status.send_modify(|status| status.is_bootstrapping = false);
        assert_eq!(word.await, Bootstrap::Refuted("seen".into()));
        assert!(seen.iter().all(|node| node.confirmed.load(Ordering::Relaxed) == 0));
    }
}
