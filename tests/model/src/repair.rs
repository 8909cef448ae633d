//! Repair: one lock stays held while nodes fail one after the other.
//!
//! Property: the lock is never lost while a majority of nodes votes at all times, and each node is
//! back before the next fault. [`Held`] lists a further event that must precede the next fault: an
//! extension or a catch-up. In this model an extension and its repairs are one step. A catch-up is
//! one step too. [`crate::locks`] shows that repairs do no harm when they come late or never.
//!
//! A fault is a loss of data, or an outage after which the node still has its data. How long a
//! fault lasts depends on the case:
//!
//! - Where an extension follows each fault ([`Held::Granted`], [`Held::Extended`]), the fault
//!   outlasts a lease, and a quarantine runs to its end. Only extensions keep the lock alive that
//!   long.
//! - Where a catch-up follows each fault (the other cases), the node is back within seconds, while
//!   the lock lives. If it lost its data, it first recovers the locks that a majority of the others
//!   stores. Then it catches up.
//!
//! After a long outage the lock has expired on the node, but its watermark still stands at the
//! lock's T. A repair passes that watermark only if it has the mark of an extension. So a node that
//! was away during the first extension refuses the repair, and has no lock until it catches up.
//! [`Held::Granted`] and [`Held::Extended`] tell the two situations apart.
//!
//! Meanwhile another client polls for the lock. A node without the lock grants it to that client.
//! The other nodes refuse, so the proposal fails and is undone.

use redlock_core::node::ReleaseScope;
use redlock_core::quorum::{Decision, Quorum, Tally};
use stateright::{Model, Property};

use crate::explore::{First, Narrated};
use crate::locks::NODES;
use crate::node::{Lock, NO_TOKEN, Node, Owner, Token, Vote};
use crate::rules::Rules;

/// A held lock outlives faults of one node at a time.
pub const NEVER_LOST: &str = "a held lock is never lost";

const T: Token = 1;
/// The token of the polling client. It is larger than the lock's, and no majority ever grants it.
const POLLED: Token = 2;
const HELD: Lock = Lock { owner: Owner::A, token: T, nonce: 0, extended: false, guards: 0 };
const POLL: Lock = Lock { owner: Owner::B, token: POLLED, ..HELD };

/// Where the lock stands before the first fault, and how it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Held {
    /// On all nodes. An extension follows each fault.
    Granted,
    /// On all nodes, and extended once before the first fault. An extension follows each fault.
    Extended,
    /// On all nodes but one, which was away when the lock was granted. The lock is never extended.
    /// A catch-up follows each fault.
    Young,
    /// On all nodes but one, whose vote came too late. An extension comes before the first fault. A
    /// catch-up follows each fault.
    Missed,
    /// On all nodes but one. That node stored the lock, but was away with its data during the first
    /// extension, until its copy expired. A catch-up follows each fault.
    Early,
}

impl Held {
    const fn catches_up(self) -> bool {
        matches!(self, Self::Young | Self::Missed | Self::Early)
    }
}

/// The model and its bounds.
#[derive(Debug)]
pub struct Repair {
    /// Which rules are on.
    pub rules: Rules,
    /// How many faults happen, one after the other.
    pub faults: u8,
    /// Where the lock stands at the beginning.
    pub held: Held,
    quorum: Quorum,
    firsts: [First; 3],
}

/// The whole state. Nodes are sorted, as in [`crate::locks`].
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    sites: [Site; NODES],
    faults_left: u8,
    /// Whether an extension was tried since the last fault or return. `granted`: whether it
    /// succeeded.
    tried: bool,
    granted: bool,
    repaired: bool,
    lost: bool,
    oldest: Token,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Site {
    node: Node,
    away: bool,
    /// The node was away when the lock was granted, so its loss is older than the lock.
    before: bool,
    /// The node was admitted and has not caught up since.
    behind: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The holder extends. If a majority agrees, the nodes that do not store the lock get a repair.
    Extend,
    /// A node loses its data and begins its quarantine.
    Lose(u8),
    /// A node is away, and keeps its data.
    Outage(u8),
    /// The node votes again.
    Return(u8),
    /// The node gets the lock if a majority of the others stores it.
    CatchUp(u8),
    /// Another client's proposal fails, and is undone on this node.
    Poll(u8),
}

impl Repair {
    pub fn new(rules: Rules, faults: u8, held: Held) -> Self {
        let quorum = Quorum::new(NODES).expect("three nodes are allowed");
        Self { rules, faults, held, quorum, firsts: Default::default() }
    }

    /// How many nodes other than `without` store the lock, and whether one of those copies is
    /// extended.
    fn found(&self, s: &State, without: usize) -> (usize, Option<Lock>) {
        let others = s.sites.iter().enumerate().filter(|(at, site)| *at != without && !site.away);
        let found: Vec<_> =
            others.filter_map(|(_, site)| site.node.lock.filter(|lock| lock.is(&HELD))).collect();
        let extended = found.iter().any(|lock| lock.extended);
        (found.len(), found.first().map(|lock| Lock { extended, ..*lock }))
    }

    /// The node is admitted within seconds. If it has lost its data after the lock was granted, it
    /// recovers the lock from the others.
    fn return_in_seconds(&self, s: &mut State, at: usize) {
        let (copies, found) = self.found(s, at);
        let has_lost_data = !s.sites[at].node.admitted;
        let window = s.oldest.into();
        let found = found.filter(|_| !s.sites[at].before);
        if has_lost_data {
            s.sites[at].node.recover(&self.rules, window, found, copies >= self.quorum.size());
        }
        (s.sites[at].before, s.sites[at].behind) = (false, true);
        let stands =
            s.sites.iter().filter(|site| site.node.lock.is_some_and(|lock| lock.is(&HELD))).count();
        s.lost |= stands < self.quorum.size();
    }

    fn catch_up(&self, s: &mut State, at: usize) {
        let (copies, found) = self.found(s, at);
        let window = s.oldest.into();
        if let Some(lock) = found.filter(|_| copies >= self.quorum.size()) {
            let node = &mut s.sites[at].node;
            let mut vote = node.repair(&self.rules, window, lock);
            if self.rules.catch_up_outwaits_watermarks
                && lock.extended
                && vote == Vote::Stale(lock.token)
            {
                node.end_watermark();
                vote = node.repair(&self.rules, window, lock);
            }
            s.repaired |= vote == Vote::Granted;
        }
        s.sites[at].behind = false;
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
                for at in missing.into_iter().filter(|_| self.rules.missing_is_repaired) {
                    let asked = Lock { extended: self.rules.extension_marks, ..HELD };
                    s.repaired |=
                        s.sites[at].node.repair(&self.rules, window, asked) == Vote::Granted;
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
                if !self.held.catches_up() {
                    (next.tried, next.granted) = (false, false);
                }
            }
            Action::CatchUp(at) => self.catch_up(&mut next, at.into()),
            Action::Return(at) if self.held.catches_up() => {
                next.sites[usize::from(at)].away = false;
                self.return_in_seconds(&mut next, at.into());
                next.oldest = T;
            }
            Action::Return(at) => {
                let site = &mut next.sites[usize::from(at)];
                site.away = false;
                site.node.admitted = true;
                // The outage lasts longer than the lock lives without an extension.
                site.node.expire();
                next.lost |= !s.granted;
                // The outage also lasts longer than `max_clock_skew`, so nodes refuse an acquire
                // with this lock's T.
                next.oldest = T;
                (next.tried, next.granted) = (false, false);
            }
            Action::Poll(at) => {
                let node = &mut next.sites[usize::from(at)].node;
                let window = s.oldest.into();
                node.acquire(&self.rules, window, POLL);
                node.release(&self.rules, window, POLL, ReleaseScope::Proposal);
            }
        }
        next
    }
}

impl Model for Repair {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut node = Node { lock: Some(HELD), watermark: T, ..Node::default() };
        if self.held == Held::Extended {
            node.extend(&self.rules, NO_TOKEN.into(), HELD);
        }
        let stores = Site { node, away: false, before: false, behind: false };
        let without = Site { node: Node::default(), ..stores };
        let away = Site { away: true, before: true, ..without };
        let blank = Site { node: Node { admitted: false, ..Node::default() }, ..away };
        let sites = match self.held {
            Held::Granted | Held::Extended => vec![[stores; NODES]],
            Held::Young => vec![[stores, stores, away], [stores, stores, blank]],
            Held::Missed => vec![[stores, stores, without]],
            Held::Early => {
                let mut extended = stores;
                extended.node.extend(&self.rules, NO_TOKEN.into(), HELD);
                let mut ended = Site { away: true, ..stores };
                ended.node.expire();
                vec![[extended, extended, ended]]
            }
        };
        let state = |mut sites: [Site; NODES]| {
            sites.sort_unstable();
            let tried = self.held != Held::Missed;
            let granted = true;
            let repaired = false;
            let lost = false;
            State {
                sites,
                faults_left: self.faults,
                tried,
                granted,
                repaired,
                lost,
                oldest: NO_TOKEN,
            }
        };
        sites.into_iter().map(state).collect()
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        if s.lost {
            return;
        }
        if self.held != Held::Young {
            actions.push(Action::Extend);
        }
        let behind =
            s.sites.iter().position(|site| site.behind && self.rules.admitted_is_caught_up);
        actions.extend(behind.map(|at| Action::CatchUp(at as u8)));
        let away = s.sites.iter().position(|site| site.away);
        match away {
            Some(at) if s.tried => actions.push(Action::Return(at as u8)),
            None if s.tried && s.faults_left > 0 && behind.is_none() => {
                for at in 0..NODES as u8 {
                    actions.push(Action::Lose(at));
                    actions.push(Action::Outage(at));
                }
            }
            Some(_) | None => {}
        }
        let lost = |(_, site): &(usize, &Site)| !site.away && site.node.lock.is_none();
        actions
            .extend(s.sites.iter().enumerate().filter(lost).map(|(at, _)| Action::Poll(at as u8)));
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        let mut next = self.apply(s, action);
        next.sites.sort_unstable();
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::<Self>::always(NEVER_LOST, |m, s| m.firsts[0].always(!s.lost)),
            Property::<Self>::sometimes("a repair is granted", |m, s| {
                m.firsts[1].sometimes(s.repaired)
            }),
            Property::<Self>::sometimes("all faults are over and the lock stands", |m, s| {
                let back = s.sites.iter().all(|site| !site.away);
                m.firsts[2].sometimes(s.faults_left == 0 && back && s.granted)
            }),
        ]
    }
}

impl Narrated for Repair {
    fn narrate(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        let mut names: [usize; NODES] = std::array::from_fn(|i| i + 1);
        let held = match self.held {
            Held::Granted => "A holds the lock on all nodes",
            Held::Extended => "A holds the lock on all nodes and has extended it",
            Held::Young => "one node is away; A is granted the lock on all others",
            Held::Missed => "A is granted the lock on all nodes but one, which answers too late",
            Held::Early => {
                "A is granted the lock on all nodes, then one is away with its data; A extends, and \
                 the copy of that node ends"
            }
        };
        let mut story = vec![held.to_owned()];
        for (state, action) in path {
            let Some(action) = action else { break };
            let next = self.apply(&state, action);
            let node = |at: u8| format!("node {}", names[usize::from(at)]);
            story.push(match action {
                Action::Extend => {
                    let stands = |s: &State| {
                        let on = (0..NODES)
                            .filter(|at| s.sites[*at].node.lock.is_some() && !s.sites[*at].away);
                        let mut on: Vec<_> = on.map(|at| names[at].to_string()).collect();
                        on.sort_unstable();
                        on.join(", ")
                    };
                    let decision = match (next.lost, next.granted) {
                        (true, _) => "refused: the lock is lost",
                        (_, true) => "granted",
                        _ => "no majority",
                    };
                    let before = stands(&state);
                    let after = stands(&next);
                    let repaired = if before == after {
                        String::new()
                    } else {
                        format!("; after the repair it stands on {after}")
                    };
                    format!("A extends the lock, which stands on {before}: {decision}{repaired}")
                }
                Action::Lose(at) => format!("{} loses all its data", node(at)),
                Action::Outage(at) if self.held.catches_up() => {
                    format!("{} is away and keeps its data", node(at))
                }
                Action::Outage(at) => {
                    format!("{} is away for longer than the lock lives there", node(at))
                }
                Action::Return(at) if !state.granted => {
                    format!(
                        "{} votes again; nobody extended the lock meanwhile, so it is lost",
                        node(at)
                    )
                }
                Action::Return(at) if self.held.catches_up() => {
                    let stored = match next.sites[usize::from(at)].node.lock {
                        None => "without the lock",
                        Some(lock) if lock.owner == Owner::Nobody => "with a blocker",
                        Some(_) => "with the lock",
                    };
                    let lost =
                        if next.lost { ": no majority stores the lock, so it is lost" } else { "" };
                    format!("{} votes again, {stored}{lost}", node(at))
                }
                Action::Return(at) => format!("{} votes again", node(at)),
                Action::CatchUp(at) => {
                    let stores =
                        next.sites[usize::from(at)].node.lock.is_some_and(|lock| lock.is(&HELD));
                    let result = if stores {
                        "it stores the lock"
                    } else {
                        "no majority of the others stores the lock"
                    };
                    format!("{} catches up: {result}", node(at))
                }
                Action::Poll(at) => {
                    format!("B's proposal fails, and {} undoes its grant", node(at))
                }
            });
            let mut order: [usize; NODES] = std::array::from_fn(|i| i);
            order.sort_by_key(|at| next.sites[*at]);
            names = order.map(|at| names[at]);
        }
        story
    }
}
