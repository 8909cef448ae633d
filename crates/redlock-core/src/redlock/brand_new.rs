//! The first start of a cluster. Nodes that have never been used look like nodes that have lost everything, so they are
//! quarantined; an operator may say that they are new.

use std::time::Duration;

use futures_util::future::select_all;

use super::Redlock;
use crate::node::NodeState;

/// Longer than a gateway that is running takes to notice that a node has lost its data.
const WITNESSES: Duration = Duration::from_secs(2);

/// What became of the word that a cluster is brand-new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BrandNew {
    /// Every node was reachable and new: all are being admitted.
    Confirmed,
    /// This node was not new: it has voted, or a gateway has already begun to wait for it. Nothing was changed.
    Refuted(String),
}

impl Redlock {
    /// Takes an operator's word that this cluster has never been used, and ends the quarantine of its nodes. The word is
    /// believed only when all N nodes answer, none of them had a marker, and no gateway without that word was the first to
    /// see one of them so (`bootstrap` in the settings of the nodes): waits until every node is known to be new, or one is
    /// known not to be. It counts once.
    ///
    /// So it is not believed, although it may still stand in some configuration, when a cluster has lost *all* its data
    /// under the eyes of a gateway, which is given a moment to say so. Without such a witness a total loss looks like a new cluster: whoever says this of a
    /// cluster that was in use has to wait for the longest TTL first.
    pub async fn brand_new(&self) -> BrandNew {
        let mut statuses: Vec<_> = self.shared.nodes.iter().map(|node| node.status()).collect();
        let mut waited = false;
        loop {
            let mut all_new = true;
            for (node, status) in self.shared.nodes.iter().zip(&mut statuses) {
                let status = status.borrow_and_update();
                match status.state {
                    NodeState::Quarantined if status.is_bootstrapping => {}
                    NodeState::Quarantined | NodeState::Admitted => return BrandNew::Refuted(node.name().to_owned()),
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
                self.shared.nodes.iter().for_each(|node| node.confirm_bootstrap());
                return BrandNew::Confirmed;
            }
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
    }
}
