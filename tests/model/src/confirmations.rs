//! Two repetitions of a request confirm the grant of that request, which may give it up meanwhile.
//!
//! The first request asks three nodes for the grant. Each of its messages may arrive late. It is
//! promised the grant when a majority has granted it, or it gives up: then each node that has
//! received the acquire gets an undo. A repetition that has seen the grant on a majority extends
//! it on every node. It is promised the grant when a majority has extended it. It knows that
//! nobody can have a majority any more when a majority has refused, and releases the grant then.
//!
//! With the rule `refusal_is_repeated`, a repetition first sends the undo and the extension once
//! more. It releases the grant only when a majority has refused again.
//!
//! A node whose clock is behind, or that has no memory left, cannot store the watermark of an undo.
//! With the rule `refusal_needs_undo`, the second refusal of such a node does not count.
//!
//! # Left out
//!
//! Expiry, releases by a holder and losses of data: each of them ends a promise, or the node's
//! vote. The proposals of the repetitions themselves, which are undone: their watermarks can only
//! refuse the late acquire.

use stateright::{Model, Property};

use crate::confirmed_sets::{Copy, NODES, QUORUM};
use crate::explore::{First, Narrated};
use crate::rules::Rules;

/// A majority stores the grant as long as anybody was promised it.
pub const PROMISE_KEPT: &str = "a promised grant stands";

const REPETITIONS: usize = 2;

#[derive(Debug)]
pub struct Confirmations {
    rules: Rules,
    firsts: [First; 3],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Node {
    copy: Copy,
    /// Whether the acquire has arrived, and whether the node granted it.
    granted: Option<bool>,
    /// Whether a watermark refuses the acquire.
    refuses: bool,
    is_undone: bool,
    /// Whether the node cannot store watermarks.
    is_short: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Request {
    Waits,
    Promised,
    GivesUp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Vote {
    Outstanding,
    Yes,
    No,
    /// A refusal that does not count.
    Doubtful,
}

/// The votes of the nodes to one question.
type Votes = [Vote; NODES];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Repetition {
    /// Which nodes have shown the grant.
    Reads([bool; NODES]),
    Extends(Votes),
    /// Has been refused, and sends undo and extension once more. The first extension may still be
    /// under way to a node. It arrives there before them.
    Repeats(Votes, [bool; NODES]),
    /// Which nodes have received the release.
    Releases([bool; NODES]),
    Promised,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    nodes: [Node; NODES],
    first: Request,
    repetitions: [Repetition; REPETITIONS],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Acquire {
        node: usize,
    },
    Promise,
    GiveUp,
    Undo {
        node: usize,
    },
    /// The next message of a repetition arrives at a node.
    Message {
        who: usize,
        node: usize,
    },
    /// A repetition counts its votes.
    Decide {
        who: usize,
    },
}

impl Confirmations {
    pub fn new(rules: Rules) -> Self {
        Self { rules, firsts: Default::default() }
    }

    /// What a repetition does when the votes of a question are enough.
    fn decided(&self, repetition: Repetition) -> Option<Repetition> {
        let (Repetition::Extends(votes) | Repetition::Repeats(votes, _)) = repetition else {
            return None;
        };
        let count = |vote| votes.iter().filter(|it| **it == vote).count();
        let is_refused = count(Vote::No) > NODES - QUORUM;
        match repetition {
            _ if count(Vote::Yes) >= QUORUM => Some(Repetition::Promised),
            Repetition::Extends(_) if is_refused && self.rules.refusal_is_repeated => {
                Some(Repetition::Repeats(
                    [Vote::Outstanding; NODES],
                    votes.map(|vote| vote == Vote::Outstanding),
                ))
            }
            _ if is_refused => Some(Repetition::Releases([false; NODES])),
            _ => None,
        }
    }
}

impl Node {
    /// Undoes the grant. Returns whether the node could carry this out.
    fn undo(&mut self) -> bool {
        if self.copy == Copy::Granted {
            self.copy = Copy::Missing;
        }
        let is_late = self.granted.is_none();
        self.refuses |= is_late && !self.is_short;
        !is_late || !self.is_short
    }

    fn extend(&mut self) -> Vote {
        if self.copy == Copy::Granted {
            self.copy = Copy::Extended;
        }
        if self.copy == Copy::Extended { Vote::Yes } else { Vote::No }
    }

    /// A message of a repetition arrives. Returns the repetition afterwards; `None` if the node
    /// gets no message now.
    fn receive(&mut self, at: usize, repetition: Repetition, rules: &Rules) -> Option<Repetition> {
        let mut next = repetition;
        match &mut next {
            Repetition::Reads(seen) if !seen[at] && self.copy != Copy::Missing => {
                seen[at] = true;
                if seen.iter().filter(|seen| **seen).count() >= QUORUM {
                    next = Repetition::Extends([Vote::Outstanding; NODES]);
                }
            }
            Repetition::Extends(votes) if votes[at] == Vote::Outstanding => {
                votes[at] = self.extend()
            }
            Repetition::Repeats(_, late) if late[at] => {
                late[at] = false;
                self.extend();
            }
            Repetition::Repeats(votes, _) if votes[at] == Vote::Outstanding => {
                let counts = self.undo() || !rules.refusal_needs_undo;
                votes[at] = match self.extend() {
                    Vote::No if !counts => Vote::Doubtful,
                    vote => vote,
                };
            }
            Repetition::Releases(received) if !received[at] => {
                received[at] = true;
                self.copy = Copy::Missing;
                self.refuses |= self.granted.is_none() && !self.is_short;
            }
            _ => return None,
        }
        Some(next)
    }
}

impl State {
    fn granted(&self) -> usize {
        self.nodes.iter().filter(|node| node.granted == Some(true)).count()
    }

    fn stands(&self) -> bool {
        self.nodes.iter().filter(|node| node.copy != Copy::Missing).count() >= QUORUM
    }

    fn promised(&self) -> usize {
        self.repetitions.iter().filter(|it| **it == Repetition::Promised).count()
    }
}

impl Model for Confirmations {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let node = |is_short| Node {
            copy: Copy::Missing,
            granted: None,
            refuses: false,
            is_undone: false,
            is_short,
        };
        let state = |short: usize| State {
            nodes: std::array::from_fn(|at| node(at < short)),
            first: Request::Waits,
            repetitions: [Repetition::Reads([false; NODES]); REPETITIONS],
        };
        (0..=NODES).map(state).collect()
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        for (node, it) in s.nodes.iter().enumerate() {
            if it.granted.is_none() {
                actions.push(Action::Acquire { node });
            } else if s.first == Request::GivesUp && !it.is_undone {
                actions.push(Action::Undo { node });
            }
        }
        if s.first == Request::Waits {
            actions.push(Action::GiveUp);
            if s.granted() >= QUORUM {
                actions.push(Action::Promise);
            }
        }
        for (who, repetition) in s.repetitions.iter().enumerate() {
            let receives = |node: &usize| {
                s.nodes[*node].clone().receive(*node, *repetition, &self.rules).is_some()
            };
            actions.extend((0..NODES).filter(receives).map(|node| Action::Message { who, node }));
            if self.decided(*repetition).is_some() {
                actions.push(Action::Decide { who });
            }
        }
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        let mut next = s.clone();
        match action {
            Action::Acquire { node } => {
                let node = &mut next.nodes[node];
                node.granted = Some(!node.refuses);
                if !node.refuses {
                    node.copy = Copy::Granted;
                }
            }
            Action::Promise => next.first = Request::Promised,
            Action::GiveUp => next.first = Request::GivesUp,
            Action::Undo { node } => {
                next.nodes[node].undo();
                next.nodes[node].is_undone = true;
            }
            Action::Message { who, node } => {
                next.repetitions[who] =
                    next.nodes[node].receive(node, s.repetitions[who], &self.rules)?;
            }
            Action::Decide { who } => next.repetitions[who] = self.decided(s.repetitions[who])?,
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::<Self>::sometimes("both repetitions are promised the grant", |m, s| {
                m.firsts[0].sometimes(s.promised() == REPETITIONS)
            }),
            Property::<Self>::sometimes("a repetition releases the grant", |m, s| {
                let is_releasing = |it: &Repetition| matches!(it, Repetition::Releases(_));
                m.firsts[1].sometimes(s.repetitions.iter().any(is_releasing))
            }),
            Property::<Self>::always(PROMISE_KEPT, |m, s| {
                let is_promised = s.first == Request::Promised || s.promised() > 0;
                m.firsts[2].always(!is_promised || s.stands())
            }),
        ]
    }
}

impl Narrated for Confirmations {
    fn narrate(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        let step = |(s, action): (State, Option<Action>)| {
            Some(match action? {
                Action::Acquire { node } => format!("the acquire arrives at node {node}"),
                Action::Promise => "the first request is promised the grant".to_owned(),
                Action::GiveUp => "the first request gives up".to_owned(),
                Action::Undo { node } => format!("its undo arrives at node {node}"),
                Action::Message { who, node } => {
                    let what = match s.repetitions[who] {
                        Repetition::Reads(_) => "reading",
                        Repetition::Extends(_) => "extension",
                        Repetition::Repeats(_, late) if late[node] => "extension",
                        Repetition::Repeats(..) => "undo and second extension",
                        Repetition::Releases(_) | Repetition::Promised => "release",
                    };
                    format!("the {what} of repetition {who} arrives at node {node}")
                }
                Action::Decide { who } => format!("repetition {who} counts its votes"),
            })
        };
        path.into_iter().filter_map(step).collect()
    }
}
