//! Healing: one lock that is extended again and again, while nodes fail one after the other.
//!
//! Promise: the lock is never lost as long as a majority of nodes votes at all times, no fault comes before the node of
//! the last one is back and an extension has been made since. Every fault outlasts a lease, and every quarantine is
//! waited out. Here an extension with its heals is one step; that heals do no harm when they come late or never is shown
//! by [`crate::locks`].
//!
//! A fault is a loss of data, or an outage that keeps the data but outlasts the lock: then the fence still stands at its T,
//! and only the mark of an earlier extension lets the heal pass. So a node that was away from before the first extension
//! stays without the lock; the bound `extended` says whether there was one.
//!
//! Meanwhile another client polls: a node that lost the lock grants it, and the try fails elsewhere and is undone.

use redlock_core::node::ReleaseScope;
use redlock_core::quorum::{Decision, Quorum, Tally};
use stateright::{Model, Property};

use crate::explore::{First, Told};
use crate::locks::NODES;
use crate::node::{Lock, NO_TOKEN, Node, Owner, Token, Vote};
use crate::rules::Rules;

/// An extended lock outlives faults of one node at a time.
pub const NEVER_LOST: &str = "an extended lock is never lost";

const T: Token = 1;
/// Larger, and never granted by a majority.
const POLLED: Token = 2;
const HELD: Lock = Lock { owner: Owner::A, token: T, nonce: 0, extended: false, guards: 0 };
const POLL: Lock = Lock { owner: Owner::B, token: POLLED, ..HELD };

/// The model and its bounds.
#[derive(Debug)]
pub struct Healing {
    /// Which rules are on.
    pub rules: Rules,
    /// How many faults follow each other.
    pub faults: u8,
    /// Whether the lock was extended before the first fault.
    pub extended: bool,
    quorum: Quorum,
    firsts: [First; 3],
}

/// Everything. Nodes are sorted, as in [`crate::locks`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    sites: [Site; NODES],
    faults_left: u8,
    /// Extensions tried, and granted, since the last fault or return.
    tried: bool,
    granted: bool,
    healed: bool,
    lost: bool,
    oldest: Token,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Site {
    node: Node,
    away: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The holder extends; if a majority does, missing nodes are healed.
    Extend,
    /// A node loses its data, and waits out its quarantine.
    Lose(u8),
    /// A node keeps its data, but is away for longer than the lock lives.
    Outage(u8),
    /// The node votes again.
    Return(u8),
    /// Another client tries in vain, and undoes what it got on this node.
    Poll(u8),
}

impl Healing {
    pub fn new(rules: Rules, faults: u8, extended: bool) -> Self {
        let quorum = Quorum::new(NODES).expect("three nodes are allowed");
        Self { rules, faults, extended, quorum, firsts: Default::default() }
    }

    fn extend(&self, s: &mut State) {
        let mut tally = Tally::default();
        let mut missing = Vec::new();
        for (at, site) in s.sites.iter_mut().enumerate() {
            if site.away {
                tally.failed += 1;
                continue;
            }
            match site.node.extend(&self.rules, s.oldest.into(), HELD) {
                Vote::Extended => tally.yes += 1,
                Vote::Missing | Vote::Held(_) => {
                    tally.no += 1;
                    missing.push(at);
                }
                _ => tally.failed += 1,
            }
        }
        s.tried = true;
        match self.quorum.decide(tally) {
            Decision::Yes => {
                s.granted = true;
                let window = s.oldest.into();
                for at in missing.into_iter().filter(|_| self.rules.missing_is_healed) {
                    s.healed |= s.sites[at].node.heal(&self.rules, window, HELD) == Vote::Granted;
                }
            }
            Decision::No => s.lost = true,
            Decision::Neither | Decision::Open => {}
        }
    }

    fn apply(&self, s: &State, action: Action) -> State {
        let mut next = s.clone();
        match action {
            Action::Extend => self.extend(&mut next),
            Action::Lose(at) | Action::Outage(at) => {
                let site = &mut next.sites[usize::from(at)];
                site.away = true;
                if action == Action::Lose(at) {
                    site.node.wipe();
                }
                next.faults_left -= 1;
                (next.tried, next.granted) = (false, false);
            }
            Action::Return(at) => {
                let site = &mut next.sites[usize::from(at)];
                site.away = false;
                site.node.admitted = true;
                // Longer than the lock lives without an extension.
                site.node.expire();
                next.lost |= !s.granted;
                // And longer than D: the token of this lock is old now.
                next.oldest = T;
                (next.tried, next.granted) = (false, false);
            }
            Action::Poll(at) => {
                let (node, window) = (&mut next.sites[usize::from(at)].node, s.oldest.into());
                node.acquire(&self.rules, window, POLL);
                node.release(&self.rules, window, POLL, ReleaseScope::Try);
            }
        }
        next
    }
}

impl Model for Healing {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut node = Node { lock: Some(HELD), fence: T, ..Node::default() };
        if self.extended {
            node.extend(&self.rules, NO_TOKEN.into(), HELD);
        }
        let sites = [Site { node, away: false }; NODES];
        let (tried, granted, healed, lost) = (true, true, false, false);
        vec![State { sites, faults_left: self.faults, tried, granted, healed, lost, oldest: NO_TOKEN }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        if s.lost {
            return;
        }
        actions.push(Action::Extend);
        let away = s.sites.iter().position(|site| site.away);
        match away {
            Some(at) if s.tried => actions.push(Action::Return(at as u8)),
            None if s.tried && s.faults_left > 0 => {
                for at in 0..NODES as u8 {
                    actions.push(Action::Lose(at));
                    actions.push(Action::Outage(at));
                }
            }
            Some(_) | None => {}
        }
        let lost = |(_, site): &(usize, &Site)| !site.away && site.node.lock.is_none();
        actions.extend(s.sites.iter().enumerate().filter(lost).map(|(at, _)| Action::Poll(at as u8)));
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        let mut next = self.apply(s, action);
        next.sites.sort_unstable();
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::<Self>::always(NEVER_LOST, |m, s| m.firsts[0].always(!s.lost)),
            Property::<Self>::sometimes("a heal is granted", |m, s| m.firsts[1].sometimes(s.healed)),
            Property::<Self>::sometimes("all faults are over and the lock stands", |m, s| {
                let back = s.sites.iter().all(|site| !site.away);
                m.firsts[2].sometimes(s.faults_left == 0 && back && s.granted)
            }),
        ]
    }
}

impl Told for Healing {
    fn tell(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        let mut names: [usize; NODES] = std::array::from_fn(|i| i + 1);
        let extended = if self.extended { ", and has extended it" } else { "" };
        let mut story = vec![format!("A holds the lock on all nodes{extended}")];
        for (state, action) in path {
            let Some(action) = action else { break };
            let next = self.apply(&state, action);
            let node = |at: u8| format!("node {}", names[usize::from(at)]);
            story.push(match action {
                Action::Extend => {
                    let stands = |s: &State| {
                        let on = (0..NODES).filter(|at| s.sites[*at].node.lock.is_some() && !s.sites[*at].away);
                        let mut on: Vec<_> = on.map(|at| names[at].to_string()).collect();
                        on.sort_unstable();
                        on.join(", ")
                    };
                    let decision = match (next.lost, next.granted) {
                        (true, _) => "refused: it is lost",
                        (_, true) => "granted",
                        _ => "no majority",
                    };
                    let (before, after) = (stands(&state), stands(&next));
                    let healed =
                        if before == after { String::new() } else { format!("; healed, it stands on {after}") };
                    format!("A extends, the lock stands on {before}: {decision}{healed}")
                }
                Action::Lose(at) => format!("{} loses all its data", node(at)),
                Action::Outage(at) => format!("{} is away, for longer than the lock lives there", node(at)),
                Action::Return(at) if !state.granted => {
                    format!("{} votes again, but meanwhile the lock was never extended: it is lost", node(at))
                }
                Action::Return(at) => format!("{} votes again", node(at)),
                Action::Poll(at) => format!("B tries in vain, and undoes what {} has granted", node(at)),
            });
            let mut order: [usize; NODES] = std::array::from_fn(|i| i);
            order.sort_by_key(|at| next.sites[*at]);
            names = order.map(|at| names[at]);
        }
        story
    }
}
