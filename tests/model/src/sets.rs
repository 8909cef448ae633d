//! Sets and slots: up to three clients ask three nodes for several names at once.
//!
//! A set is some names that a client gets all together or not at all. A lock with K slots is K
//! names, and a client takes some of them as a set. A node grants or refuses all names of a set in
//! one step. A gateway counts a node only if that node granted all names. So each name is a lock of
//! its own, and each proof about one lock holds for every name.
//!
//! Messages of one client reach a node in the order in which they were sent, as on a connection.
//! Messages to different nodes arrive in any order. A client whose votes are no majority undoes its
//! set. It then waits until another client has released something, and asks once more. A client
//! that asks for a slot asks once.
//!
//! # Left out
//!
//! Fencing tokens, watermarks, expiry and losses of data. They concern each name by itself, and
//! [`crate::locks`] explores them.

use stateright::{Model, Property};

use crate::explore::{First, Narrated};
use crate::rules::Rules;

/// At no time do two clients hold the same name.
pub const ONE_HOLDER_PER_NAME: &str = "one holder per name";
/// At no time do more clients hold places of a lock than it has slots.
pub const AT_MOST_ALL_SLOTS: &str = "at most as many holders as slots";
/// When every client is done, every name is free on every node.
pub const NOTHING_STAYS: &str = "a refused set leaves nothing behind";
/// When no message is under way, the clients do not all wait for each other.
pub const NO_DEADLOCK: &str = "no deadlock";

const NODES: usize = 3;
const QUORUM: usize = 2;
const CLIENTS: usize = 3;
/// The names in the model. In a model of slots, they are the slots of one lock.
const NAMES: usize = 2;
const ALL_NAMES: NameSet = (1 << NAMES) - 1;

/// Names as bits.
type NameSet = u8;

/// What the clients ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Demand {
    /// Each client asks for these names, in this order. A client without names does nothing.
    Sets([&'static [NameSet]; CLIENTS]),
    /// Each client asks for any one of the slots, once.
    Slots,
}

#[derive(Debug)]
pub struct Sets {
    rules: Rules,
    demand: Demand,
    firsts: [First; 6],
}

/// A node's vote for a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Vote {
    /// The question is under way.
    Open,
    /// Counts for these names.
    Yes(NameSet),
    No,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Phase {
    /// May ask at any time.
    Idle,
    Asks,
    /// Was refused. Asks again when another client has released something since (`true`).
    Waits(bool),
    /// A majority granted these names.
    Holds(NameSet),
    /// Has released the names, or has given up.
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Client {
    phase: Phase,
    /// The names of the last question, for each node.
    asked: [NameSet; NODES],
    votes: [Vote; NODES],
    /// The names that a release or an undo under way to this node removes.
    released: [NameSet; NODES],
    /// The names that the client has already. Only used if sets are granted name by name.
    got: NameSet,
    has_waited: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    clients: [Client; CLIENTS],
    /// The client that has each name on each node.
    nodes: [[Option<usize>; NAMES]; NODES],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A client asks each node for these names.
    Ask { client: usize, asked: [NameSet; NODES] },
    /// A client's question arrives at a node.
    Question { client: usize, node: usize },
    /// A client counts its votes.
    Decide { client: usize },
    /// A holder releases all its names.
    Release { client: usize },
    /// A release or an undo arrives at a node.
    Released { client: usize, node: usize },
}

impl Client {
    const NEW: Self = Self {
        phase: Phase::Idle,
        asked: [0; NODES],
        votes: [Vote::No; NODES],
        released: [0; NODES],
        got: 0,
        has_waited: false,
    };

    /// Whether a message of this client is under way.
    fn is_heard(&self) -> bool {
        !self.votes.contains(&Vote::Open) && self.released == [0; NODES]
    }
}

impl Sets {
    pub fn new(rules: Rules, demand: Demand) -> Self {
        Self { rules, demand, firsts: Default::default() }
    }

    /// The questions that a client may ask next.
    fn questions(&self, at: usize, client: &Client) -> Vec<[NameSet; NODES]> {
        match self.demand {
            Demand::Slots if self.rules.votes_are_per_slot => {
                (0..NAMES).map(|slot| [1 << slot; NODES]).collect()
            }
            // Each node is asked for a slot of its own.
            Demand::Slots => {
                let slot = |choice: usize, node: usize| 1 << (choice >> node & 1);
                (0..1 << NODES)
                    .map(|choice| std::array::from_fn(|node| slot(choice, node)))
                    .collect()
            }
            Demand::Sets(_) if self.rules.sets_are_whole => vec![[self.wanted(at); NODES]],
            Demand::Sets(sets) => {
                let next = sets[at].iter().find(|name| client.got & **name == 0);
                next.map(|name| [*name; NODES]).into_iter().collect()
            }
        }
    }

    /// All names that a client wants; none for slots, of which any one will do.
    fn wanted(&self, at: usize) -> NameSet {
        match self.demand {
            Demand::Slots => 0,
            Demand::Sets(sets) => sets[at].iter().fold(0, |all, name| all | name),
        }
    }

    /// A node grants a client all these names, or none.
    fn grant(&self, node: &mut [Option<usize>; NAMES], client: usize, asked: NameSet) -> Vote {
        let asked = match node.iter().position(Option::is_none) {
            Some(free) if self.nodes_pick() => 1 << free,
            None | Some(_) => asked,
        };
        let names = || (0..NAMES).filter(|name| asked & 1 << name != 0);
        let free: Vec<usize> = names().filter(|name| node[*name].is_none()).collect();
        let is_whole = free.len() == names().count();
        if is_whole || !self.rules.refused_set_is_undone {
            free.iter().for_each(|name| node[*name] = Some(client));
        }
        let counts = is_whole || !self.rules.whole_sets_count && !free.is_empty();
        if counts { Vote::Yes(asked) } else { Vote::No }
    }

    fn nodes_pick(&self) -> bool {
        self.demand == Demand::Slots && !self.rules.gateway_picks_slots
    }

    /// The names that a majority granted.
    fn majority(&self, votes: &[Vote; NODES]) -> Option<NameSet> {
        let each_counts = !self.rules.votes_are_per_slot || self.nodes_pick();
        let agrees = |names, vote: &Vote| match vote {
            Vote::Yes(granted) => each_counts || *granted == names,
            Vote::Open | Vote::No => false,
        };
        votes.iter().find_map(|vote| match *vote {
            Vote::Yes(names) if votes.iter().filter(|it| agrees(names, it)).count() >= QUORUM => {
                Some(names)
            }
            Vote::Yes(_) | Vote::Open | Vote::No => None,
        })
    }

    fn decide(&self, s: &mut State, at: usize) {
        let client = &mut s.clients[at];
        if let Some(granted) = self.majority(&client.votes) {
            client.got |= granted;
            let wanted = self.wanted(at);
            client.phase = match self.demand {
                Demand::Slots => Phase::Holds(granted),
                Demand::Sets(_) if wanted & !client.got == 0 => Phase::Holds(wanted),
                Demand::Sets(_) => Phase::Idle,
            };
            return;
        }
        // The undo goes only to the nodes that granted the set.
        for node in 0..NODES {
            if let Vote::Yes(names) = client.votes[node] {
                client.released[node] = names;
            }
        }
        let gives_up = match self.demand {
            Demand::Slots => true,
            Demand::Sets(_) => client.has_waited && self.rules.sets_are_whole,
        };
        client.phase = if gives_up { Phase::Done } else { Phase::Waits(false) };
        if client.released != [0; NODES] {
            s.wake_others(at);
        }
    }

    /// Whether at least two clients are not done, and all of these wait.
    fn is_stuck(&self, s: &State) -> bool {
        let unfinished = || s.clients.iter().filter(|client| client.phase != Phase::Done);
        unfinished().count() > 1
            && s.clients.iter().all(Client::is_heard)
            && unfinished().all(|client| client.phase == Phase::Waits(false))
    }
}

impl State {
    /// A client has sent a release or an undo.
    fn wake_others(&mut self, of: usize) {
        for (at, client) in self.clients.iter_mut().enumerate() {
            if at != of && matches!(client.phase, Phase::Waits(_)) {
                client.phase = Phase::Waits(true);
            }
        }
    }

    fn holders(&self) -> impl Iterator<Item = NameSet> {
        self.clients.iter().filter_map(|client| match client.phase {
            Phase::Holds(names) => Some(names),
            Phase::Idle | Phase::Asks | Phase::Waits(_) | Phase::Done => None,
        })
    }
}

impl Model for Sets {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let clients = std::array::from_fn(|at| {
            let is_idle = matches!(self.demand, Demand::Sets(sets) if sets[at].is_empty());
            let phase = if is_idle { Phase::Done } else { Phase::Idle };
            Client { phase, ..Client::NEW }
        });
        vec![State { clients, nodes: Default::default() }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        for (at, client) in s.clients.iter().enumerate() {
            let may_ask = match client.phase {
                Phase::Idle => true,
                Phase::Waits(is_woken) => is_woken,
                Phase::Asks | Phase::Holds(_) | Phase::Done => false,
            };
            if may_ask && client.is_heard() {
                let questions = self.questions(at, client).into_iter();
                actions.extend(questions.map(|asked| Action::Ask { client: at, asked }));
            }
            for node in 0..NODES {
                if client.votes[node] == Vote::Open {
                    actions.push(Action::Question { client: at, node });
                } else if client.released[node] != 0 {
                    actions.push(Action::Released { client: at, node });
                }
            }
            let is_decided =
                self.majority(&client.votes).is_some() || !client.votes.contains(&Vote::Open);
            match client.phase {
                Phase::Asks if is_decided => actions.push(Action::Decide { client: at }),
                Phase::Holds(_) => actions.push(Action::Release { client: at }),
                Phase::Asks | Phase::Idle | Phase::Waits(_) | Phase::Done => {}
            }
        }
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        let mut next = s.clone();
        match action {
            Action::Ask { client, asked } => {
                let client = &mut next.clients[client];
                client.has_waited |= matches!(client.phase, Phase::Waits(_));
                (client.phase, client.asked) = (Phase::Asks, asked);
                client.votes = [Vote::Open; NODES];
            }
            Action::Question { client: at, node } => {
                let client = &mut next.clients[at];
                client.votes[node] = self.grant(&mut next.nodes[node], at, client.asked[node]);
            }
            Action::Decide { client } => self.decide(&mut next, client),
            Action::Release { client: at } => {
                let client = &mut next.clients[at];
                (client.phase, client.released) = (Phase::Done, [ALL_NAMES; NODES]);
                next.wake_others(at);
            }
            Action::Released { client: at, node } => {
                let names = std::mem::take(&mut next.clients[at].released[node]);
                for (name, holder) in next.nodes[node].iter_mut().enumerate() {
                    holder.take_if(|holder| *holder == at && names & 1 << name != 0);
                }
            }
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let occurs = match self.demand {
            Demand::Sets(_) => {
                Property::<Self>::sometimes("a client that has waited holds", |m, s| {
                    let holds = |it: &Client| it.has_waited && matches!(it.phase, Phase::Holds(_));
                    m.firsts[4].sometimes(s.clients.iter().any(holds))
                })
            }
            Demand::Slots => Property::<Self>::sometimes("two clients hold at once", |m, s| {
                m.firsts[5].sometimes(s.holders().count() == 2)
            }),
        };
        vec![
            occurs,
            Property::<Self>::always(ONE_HOLDER_PER_NAME, |m, s| {
                let of = |name: usize| s.holders().filter(|names| names & 1 << name != 0).count();
                // A client whose votes name different slots holds no slot in particular.
                let is_named = m.demand != Demand::Slots || m.rules == Rules::ALL;
                m.firsts[0].always(!is_named || (0..NAMES).all(|name| of(name) <= 1))
            }),
            Property::<Self>::always(AT_MOST_ALL_SLOTS, |m, s| {
                m.firsts[1].always(s.holders().count() <= NAMES)
            }),
            Property::<Self>::always(NOTHING_STAYS, |m, s| {
                let is_over = |client: &Client| client.phase == Phase::Done && client.is_heard();
                let is_free = s.nodes.iter().flatten().all(Option::is_none);
                m.firsts[2].always(is_free || !s.clients.iter().all(is_over))
            }),
            Property::<Self>::always(NO_DEADLOCK, |m, s| m.firsts[3].always(!m.is_stuck(s))),
        ]
    }
}

impl Narrated for Sets {
    fn narrate(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        let step = |(s, action): (State, Option<Action>)| {
            let next = self.next_state(&s, action?)?;
            Some(sentence(&next, action?))
        };
        path.into_iter().filter_map(step).collect()
    }
}

fn names(set: NameSet) -> String {
    let all = [(1, "x"), (2, "y")];
    let named: Vec<_> =
        all.into_iter().filter(|(bit, _)| set & bit != 0).map(|(_, name)| name).collect();
    named.join(" and ")
}

/// The sentence for a step; `next` is the state after it.
fn sentence(next: &State, action: Action) -> String {
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
