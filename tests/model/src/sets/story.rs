//! A path through the model of sets as sentences.

use super::{Action, NameSet, Phase, State, Vote};

fn names(set: NameSet) -> String {
    let all = [(1, "x"), (2, "y")];
    let named: Vec<_> =
        all.into_iter().filter(|(bit, _)| set & bit != 0).map(|(_, name)| name).collect();
    named.join(" and ")
}

/// The sentence for a step; `next` is the state after it.
pub(super) fn of_step(next: &State, action: Action) -> String {
    match action {
        Action::Ask { client, asked } if asked.iter().all(|set| *set == asked[0]) => {
            format!("client {client} asks every node for {}", names(asked[0]))
        }
        Action::Ask { client, asked } => {
            format!("client {client} asks the nodes for {}", asked.map(names).join(", "))
        }
        Action::Question { client, node } => match next.clients[client].votes[node] {
            Vote::Yes(set) => format!("node {node} grants client {client} {}", names(set)),
            Vote::No | Vote::Open => format!("node {node} refuses client {client}"),
        },
        Action::Decide { client } => match next.clients[client].phase {
            Phase::Holds(set) => format!("client {client} has a majority and holds {}", names(set)),
            Phase::Idle => format!("client {client} has a majority and needs another name"),
            Phase::Waits(_) => format!("client {client} has no majority and waits"),
            Phase::Done | Phase::Asks => format!("client {client} has no majority and gives up"),
        },
        Action::Release { client } => format!("client {client} releases"),
        Action::Released { client, node } => {
            format!("a release of client {client} arrives at node {node}")
        }
    }
}
