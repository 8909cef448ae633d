//! The first start of a cluster. Nodes that have never been used look like nodes that have lost everything, so they are
//! quarantined; an operator may say that they are new.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use tokio::sync::watch;

use crate::node::{Node, NodeState, NodeStatus};

/// Longer than a gateway that is running takes to notice that a node has lost its data.
const WITNESSES: Duration = Duration::from_secs(2);

/// What became of the word that a cluster is brand-new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Bootstrap {
    /// Every node was reachable and new: all are being admitted.
    Confirmed,
    /// This node was not new: it has voted, or a gateway has already begun to wait for it. Nothing was changed.
    Refuted(String),
}

pub(crate) async fn bootstrap(nodes: &[Arc<dyn Node>]) -> Bootstrap {
    let mut statuses: Vec<_> = nodes.iter().map(|node| node.status()).collect();
    let mut waited = false;
    loop {
        let mut all_new = true;
        for (node, status) in nodes.iter().zip(&mut statuses) {
            let status = status.borrow_and_update();
            match status.state {
                NodeState::Quarantined if status.is_bootstrapping => {}
                NodeState::Quarantined | NodeState::Admitted => return Bootstrap::Refuted(node.name().to_owned()),
                NodeState::Connecting | NodeState::Refused => all_new = false,
            }
        }
        if all_new && !waited {
            tokio::time::sleep(WITNESSES).await;
            waited = true;
            continue;
        }
        waited = false;
        if all_new {
            nodes.iter().for_each(|node| node.confirm_bootstrap());
            return Bootstrap::Confirmed;
        }
        any_changed(&mut statuses).await;
    }
}

/// Waits until one of them is not what was seen of it last.
pub(crate) async fn any_changed(statuses: &mut [watch::Receiver<NodeStatus>]) {
    // A feed whose node is gone never changes again: no node, no answer.
    let changes = statuses.iter_mut().map(|status| {
        Box::pin(async {
            if status.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        })
    });
    select_all(changes).await;
}
