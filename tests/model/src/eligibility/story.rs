//! Narrates counter-examples.

use redlock_core::node::eligibility::ClusterConfig;

use super::bounds::Eligibility;
use super::events::Action;
use super::state::State;

impl Eligibility {
    pub(super) fn narrate_step(&self, s: &State, next: &State, action: Action) -> String {
        let view = |s: &State, gateway: u8, node: u8| {
            s.sites[usize::from(node)].views[usize::from(gateway)].clone()
        };
        let name = |node: u8| format!("node {}", node + 1);
        match action {
            Action::Grant { gateway, nodes } => {
                let nodes: Vec<_> = (0..8)
                    .filter(|node| nodes & (1 << node) != 0)
                    .map(|node| (node + 1).to_string())
                    .collect();
                let lock = s.fresh_lease().trailing_zeros() + 1;
                let nodes = nodes.join(", ");
                format!("lock {lock} is granted through gateway {}, by nodes {nodes}", gateway + 1)
            }
            Action::End(lock) => {
                format!("the lease of lock {} ends, and all nodes lose the lock", lock + 1)
            }
            Action::Save(node) => format!("{} writes a dump of its data", name(node)),
            Action::Flush(node) => format!("{} loses all its data in place", name(node)),
            Action::Restart { node, empty, synced } => {
                let file = match (empty, synced) {
                    (true, _) => "empty",
                    (_, true) => "with its append-only file",
                    (_, false) => "with its dump, if there is one",
                };
                format!("{} restarts {file}", name(node))
            }
            Action::Evict(node) => format!("{} evicts the lock", name(node)),
            Action::Sync { node, on: true } => format!("{} begins to sync every write", name(node)),
            Action::Sync { node, on: false } => {
                format!("{} ceases to sync every write", name(node))
            }
            Action::Probe { gateway, node } | Action::ProbeAtEnd { gateway, node } => {
                let view = view(next, gateway, node);
                let effect = match (&view.session, &view.put, &view.waits) {
                    (Some(_), ..) => "the node votes".into(),
                    (_, Some((_, to)), _) => format!("it wants to write the marker {}", kind(to)),
                    (.., Some(waits)) => {
                        format!("the node is quarantined as {}, so it waits", kind(&waits.marker))
                    }
                    (None, None, None) => "it refuses the node".into(),
                };
                let late = if matches!(action, Action::ProbeAtEnd { .. }) {
                    " at the end of its quarantine count"
                } else {
                    ""
                };
                format!("gateway {} probes {}{late}: {effect}", gateway + 1, name(node))
            }
            Action::Put { gateway, node } => {
                let marker = |s: &State| s.sites[usize::from(node)].memory.marker.clone();
                let put = view(s, gateway, node)
                    .put
                    .map_or(String::new(), |(_, to)| kind(&to).to_owned());
                let effect = if marker(s) == marker(next) {
                    "no effect, because another marker stands"
                } else {
                    "done"
                };
                format!("gateway {} marks {} as {put}: {effect}", gateway + 1, name(node))
            }
            Action::Confirm(gateway) => {
                format!("gateway {} confirms that all nodes are new", gateway + 1)
            }
            Action::Raise(node) => {
                let marker = next.sites[usize::from(node)].memory.marker.as_deref();
                let bounds = marker.and_then(ClusterConfig::bounds_of);
                let what = match bounds {
                    Some(bounds) if bounds.limit < bounds.bound => "bound",
                    _ => "limit",
                };
                format!("the operator raises the {what} in the marker of {}", name(node))
            }
            Action::RestartGateway(gateway) => {
                let flag = if s.gateways[usize::from(gateway)].bootstrap {
                    " with --bootstrap"
                } else {
                    ""
                };
                format!("gateway {} restarts{flag}", gateway + 1)
            }
            Action::Reconfigure => "the operator stops all nodes, and waits".into(),
            Action::Reconfigured => "the operator writes the new configuration".into(),
        }
    }
}

/// The state named in a marker.
fn kind(marker: &str) -> &str {
    let state = marker.rsplit(':').next().unwrap_or_default();
    match state.split('.').next().unwrap_or_default() {
        "durable" | "volatile" => "admitted",
        suspicion => suspicion,
    }
}
