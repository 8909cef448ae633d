//! The first start of a cluster. Nodes that have never been used look like nodes that have lost everything, so they are
//! quarantined; an operator may say that they are new.

use futures_util::future::select_all;

use super::Redlock;
use crate::node::NodeState;

/// What became of the word that a cluster is brand-new.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BrandNew {
    /// Every node was reachable and blank: all are being admitted.
    Confirmed,
    /// This node was not blank, so the cluster has been used; nothing was changed.
    Refuted(String),
}

impl Redlock {
    /// Takes an operator's word that this cluster has never been used, and ends the quarantine of its nodes. The word is
    /// believed only when all N nodes answer and none of them has ever had a marker: waits until every node is known to be
    /// blank, or one is known not to be. It counts once.
    ///
    /// A cluster that has lost *all* its data looks the same. Whoever says this of a cluster that was in use has to wait
    /// for the longest TTL first.
    pub async fn brand_new(&self) -> BrandNew {
        let mut statuses: Vec<_> = self.shared.nodes.iter().map(|node| node.status()).collect();
        loop {
            let mut all_blank = true;
            for (node, status) in self.shared.nodes.iter().zip(&mut statuses) {
                let status = status.borrow_and_update();
                match status.state {
                    NodeState::Quarantined if status.blank => {}
                    NodeState::Quarantined | NodeState::Admitted => return BrandNew::Refuted(node.name().to_owned()),
                    NodeState::Connecting | NodeState::Refused => all_blank = false,
                }
            }
            if all_blank {
                self.shared.nodes.iter().for_each(|node| node.admit_brand_new());
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
