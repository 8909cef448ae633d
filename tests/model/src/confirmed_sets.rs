//! A first request undoes its grant of a set while a repeated request confirms that grant.
//!
//! Three nodes may store a set of two names. The first request undoes its grant with one message to
//! each node, which is about both names. A node spares each name that was extended. With the rule
//! `set_is_extended_in_one_step`, the repetition extends both names with one message to each node.
//! Without it, each name has a message of its own, and the undo may arrive between the two.
//!
//! The repetition counts the votes of each name. It releases every name that it has lost, and
//! leaves the others alone: in general a client may still hold them.
//!
//! # Left out
//!
//! Fencing tokens, expiry, lost messages and losses of data, which concern each name by itself.

use stateright::{Model, Property};

use crate::explore::{First, Narrated};
use crate::rules::Rules;

/// When no message is under way, a majority stores both names or neither.
pub const WHOLE_OR_NOTHING: &str = "a confirmed set stands whole or not at all";

pub(crate) const NODES: usize = 3;
pub(crate) const QUORUM: usize = 2;
const NAMES: usize = 2;

#[derive(Debug)]
pub struct ConfirmedSets {
    rules: Rules,
    firsts: [First; 3],
}

/// What a node stores of a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Copy {
    Missing,
    Granted,
    Extended,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    nodes: [[Copy; NAMES]; NODES],
    /// Whether the undo to each node is under way.
    undo: [bool; NODES],
    /// Whether each node extended each name; `None` while that message is under way.
    votes: [[Option<bool>; NAMES]; NODES],
    /// The releases of lost names under way.
    released: [[bool; NAMES]; NODES],
    is_decided: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Undo {
        node: usize,
    },
    /// The next extension arrives at a node. It is about both names, or about the next name if the rule
    /// is off.
    Extension {
        node: usize,
    },
    /// The repetition counts its votes.
    Decide,
    Released {
        node: usize,
        name: usize,
    },
}

impl ConfirmedSets {
    pub fn new(rules: Rules) -> Self {
        Self { rules, firsts: Default::default() }
    }

    /// The undo of both names arrives at a node.
    fn undo(node: &mut [Copy; NAMES]) {
        for copy in node {
            if *copy == Copy::Granted {
                *copy = Copy::Missing;
            }
        }
    }
}

impl State {
    fn next_name(&self, node: usize) -> Option<usize> {
        self.votes[node].iter().position(Option::is_none)
    }

    fn count(&self, name: usize, vote: bool) -> usize {
        self.votes.iter().filter(|votes| votes[name] == Some(vote)).count()
    }

    fn has_majority(&self, name: usize) -> bool {
        self.nodes.iter().filter(|node| node[name] != Copy::Missing).count() >= QUORUM
    }

    /// The number of names that a majority stores.
    fn standing(&self) -> usize {
        (0..NAMES).filter(|name| self.has_majority(*name)).count()
    }

    fn is_quiet(&self) -> bool {
        self.is_decided
            && self.undo == [false; NODES]
            && self.released == [[false; NAMES]; NODES]
            && (0..NODES).all(|node| self.next_name(node).is_none())
    }
}

impl Model for ConfirmedSets {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        // The set stands on all nodes, or one of them has missed it.
        let missed = (0..NODES).map(Some).chain([None]);
        let state = |missed| State {
            nodes: std::array::from_fn(|node| match missed == Some(node) {
                true => [Copy::Missing; NAMES],
                false => [Copy::Granted; NAMES],
            }),
            undo: [true; NODES],
            votes: [[None; NAMES]; NODES],
            released: [[false; NAMES]; NODES],
            is_decided: false,
        };
        missed.map(state).collect()
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        for node in 0..NODES {
            if s.undo[node] {
                actions.push(Action::Undo { node });
            }
            if s.next_name(node).is_some() {
                actions.push(Action::Extension { node });
            }
            let released = (0..NAMES).filter(|name| s.released[node][*name]);
            actions.extend(released.map(|name| Action::Released { node, name }));
        }
        let is_clear = |name| s.count(name, true) >= QUORUM || s.count(name, false) >= QUORUM;
        if !s.is_decided && (0..NAMES).all(is_clear) {
            actions.push(Action::Decide);
        }
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        let mut next = s.clone();
        match action {
            Action::Undo { node } => {
                next.undo[node] = false;
                Self::undo(&mut next.nodes[node]);
            }
            Action::Extension { node } => {
                let first = s.next_name(node)?;
                let last = if self.rules.set_is_extended_in_one_step { NAMES - 1 } else { first };
                for name in first..=last {
                    let copy = &mut next.nodes[node][name];
                    next.votes[node][name] = Some(*copy != Copy::Missing);
                    if *copy == Copy::Granted {
                        *copy = Copy::Extended;
                    }
                }
            }
            Action::Decide => {
                next.is_decided = true;
                for name in (0..NAMES).filter(|name| s.count(*name, true) < QUORUM) {
                    next.released.iter_mut().for_each(|node| node[name] = true);
                }
            }
            Action::Released { node, name } => {
                next.released[node][name] = false;
                next.nodes[node][name] = Copy::Missing;
            }
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::<Self>::sometimes("the set is confirmed", |m, s| {
                m.firsts[0].sometimes(s.is_quiet() && s.standing() == NAMES)
            }),
            Property::<Self>::sometimes("the set is given up", |m, s| {
                m.firsts[1].sometimes(s.is_quiet() && s.standing() == 0)
            }),
            Property::<Self>::always(WHOLE_OR_NOTHING, |m, s| {
                m.firsts[2].always(!s.is_quiet() || [0, NAMES].contains(&s.standing()))
            }),
        ]
    }
}

impl Narrated for ConfirmedSets {
    fn narrate(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        let step = |(s, action): (State, Option<Action>)| {
            Some(match action? {
                Action::Undo { node } => format!("the undo of both names arrives at node {node}"),
                Action::Extension { node } => {
                    let names = match s.next_name(node)? {
                        0 if self.rules.set_is_extended_in_one_step => "both names",
                        name => ["x", "y"][name],
                    };
                    format!("the extension of {names} arrives at node {node}")
                }
                Action::Decide => "the repetition counts its votes".to_owned(),
                Action::Released { node, name } => {
                    format!("the release of {} arrives at node {node}", ["x", "y"][name])
                }
            })
        };
        path.into_iter().filter_map(step).collect()
    }
}
