//! Admission: two gateways, each with a clock of its own, and a node that loses its data more than once.
//!
//! Promise: no lock is granted while another is held, whenever either gateway looks, counts, and ends its count. The node
//! may lose its data in place (FLUSHALL), be restarted empty, or be restarted with what it had stored at an earlier time;
//! the latter brings an old marker back. The other nodes never fail.
//!
//! Locks are simple here: granted in one step on two free nodes that vote, gone from all nodes in one step. What becomes
//! of messages and expiry in between is shown by [`crate::locks`], where in turn a quarantine is a single wait.

use redlock_core::quorum::{Decision, Quorum, Tally};
use stateright::{Model, Property};

use crate::explore::{First, Told};
use crate::locks::NODES;
use crate::rules::Rules;

/// Locks are never held at once.
pub const ONE_HOLDER: &str = "one holder";

const GATEWAYS: usize = 2;
const FLAKY: usize = 0;

/// The model and its bounds.
#[derive(Debug)]
pub struct Admission {
    /// Which rules are on.
    pub rules: Rules,
    /// Losses of data and restarts.
    pub losses: u8,
    /// Locks that are granted, at most.
    pub locks: u8,
    quorum: Quorum,
    firsts: [First; 3],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Admitted,
    /// With its nonce.
    Quarantined(u8),
}

/// What a marker says, and which process it was written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Marker {
    kind: Kind,
    process: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Stored {
    marker: Option<Marker>,
    lock: Option<u8>,
}

/// A gateway's count: what it saw first, and the leases that ran then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Count {
    marker: Option<Marker>,
    leases: u8,
}

/// Everything.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    flaky: Stored,
    process: u8,
    file: Option<Stored>,
    /// What the other nodes hold.
    steady: [Option<u8>; NODES - 1],
    counts: [Option<Count>; GATEWAYS],
    next_nonce: u8,
    granted: u8,
    ended: u8,
    losses_left: u8,
    readmitted: bool,
}

/// An event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The next lock is granted by all of these nodes.
    Grant([bool; NODES]),
    /// A lease ends, and its lock is gone everywhere.
    End(u8),
    /// The flaky node saves what it has.
    Save,
    /// It loses everything in place.
    Flush,
    /// It is restarted empty.
    RestartEmpty,
    /// It is restarted with what it saved.
    RestartSaved,
    /// A gateway looks at it, and does what follows.
    Look(u8),
    /// A gateway's count ends.
    Finish(u8),
}

impl State {
    fn live(&self) -> u8 {
        ((1u16 << self.granted) - 1) as u8 & !self.ended
    }

    fn free(&self, at: usize) -> bool {
        if at == FLAKY { self.flaky.lock.is_none() } else { self.steady[at - 1].is_none() }
    }
}

impl Admission {
    /// With these bounds.
    pub fn new(rules: Rules, losses: u8, locks: u8) -> Self {
        let quorum = Quorum::new(NODES).expect("three nodes are allowed");
        Self { rules, losses, locks, quorum, firsts: Default::default() }
    }

    /// A marker counts for the process it was written for.
    fn is_current(&self, s: &State, marker: Marker) -> bool {
        marker.process == s.process || !self.rules.admission_names_process
    }

    fn votes(&self, s: &State) -> bool {
        s.flaky.marker.is_some_and(|marker| marker.kind == Kind::Admitted && self.is_current(s, marker))
    }

    fn look(&self, s: &mut State, gateway: usize) {
        if self.votes(s) {
            s.counts[gateway] = None;
            return;
        }
        let standing = s.flaky.marker.filter(|marker| self.is_current(s, *marker));
        if self.rules.quarantine_has_nonce && standing.is_none() {
            s.flaky.marker = Some(Marker { kind: Kind::Quarantined(s.next_nonce), process: s.process });
            s.next_nonce += 1;
        }
        let marker = s.flaky.marker.filter(|_| self.rules.quarantine_has_nonce);
        if s.counts[gateway].is_none_or(|count| self.rules.quarantine_has_nonce && count.marker != marker) {
            s.counts[gateway] = Some(Count { marker, leases: s.live() });
        }
    }

    /// One marker is put in the place of another, in one step that also looks at the process.
    fn finish(&self, s: &mut State, gateway: usize) {
        let Some(count) = s.counts[gateway].take() else { return };
        let stands = s.flaky.marker == count.marker && count.marker.is_some_and(|marker| self.is_current(s, marker));
        if stands || !self.rules.quarantine_has_nonce && !self.votes(s) {
            s.flaky.marker = Some(Marker { kind: Kind::Admitted, process: s.process });
            s.readmitted = true;
        }
    }
}

impl Model for Admission {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let marker = Some(Marker { kind: Kind::Admitted, process: 0 });
        vec![State {
            flaky: Stored { marker, lock: None },
            process: 0,
            file: None,
            steady: [None; NODES - 1],
            counts: [None; GATEWAYS],
            next_nonce: 0,
            granted: 0,
            ended: 0,
            losses_left: self.losses,
            readmitted: false,
        }]
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        if s.granted < self.locks {
            for mask in 0..1u8 << NODES {
                let asked: [bool; NODES] = std::array::from_fn(|at| mask & (1 << at) != 0);
                let can = (0..NODES).all(|at| !asked[at] || s.free(at) && (at != FLAKY || self.votes(s)));
                let tally = Tally { yes: asked.iter().filter(|yes| **yes).count(), ..Tally::default() };
                if can && self.quorum.decide(tally) == Decision::Yes {
                    actions.push(Action::Grant(asked));
                }
            }
        }
        actions.extend((0..s.granted).filter(|lock| s.live() & (1 << lock) != 0).map(Action::End));
        if s.losses_left > 0 {
            actions.extend([Action::Flush, Action::RestartEmpty]);
            match s.file {
                None => actions.push(Action::Save),
                Some(_) => actions.push(Action::RestartSaved),
            }
        }
        for gateway in 0..GATEWAYS as u8 {
            actions.push(Action::Look(gateway));
            let over = |count: Count| count.leases & s.live() == 0;
            if s.counts[usize::from(gateway)].is_some_and(over) {
                actions.push(Action::Finish(gateway));
            }
        }
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        let mut next = s.clone();
        let blank = Stored { marker: None, lock: None };
        match action {
            Action::Grant(asked) => {
                let locks = [&mut next.flaky.lock].into_iter().chain(&mut next.steady);
                for (lock, _) in locks.zip(asked).filter(|(_, asked)| *asked) {
                    *lock = Some(s.granted);
                }
                next.granted += 1;
            }
            Action::End(ended) => {
                next.ended |= 1 << ended;
                let saved = next.file.as_mut().map(|file| &mut file.lock);
                for lock in [&mut next.flaky.lock].into_iter().chain(&mut next.steady).chain(saved) {
                    *lock = lock.filter(|lock| *lock != ended);
                }
            }
            Action::Save => next.file = Some(s.flaky),
            Action::Flush | Action::RestartEmpty | Action::RestartSaved => {
                next.losses_left -= 1;
                next.process += u8::from(action != Action::Flush);
                next.flaky = s.file.filter(|_| action == Action::RestartSaved).unwrap_or(blank);
            }
            Action::Look(gateway) => self.look(&mut next, gateway.into()),
            Action::Finish(gateway) => self.finish(&mut next, gateway.into()),
        }
        Some(next).filter(|next| next != s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::<Self>::always(ONE_HOLDER, |m, s| m.firsts[0].always(s.live().count_ones() <= 1)),
            Property::<Self>::sometimes("a node that lost its data votes again", |m, s| {
                m.firsts[1].sometimes(s.readmitted && m.votes(s))
            }),
            Property::<Self>::sometimes("after two losses it grants again", |m, s| {
                m.firsts[2].sometimes(s.losses_left + 2 <= m.losses && s.flaky.lock.is_some() && m.votes(s))
            }),
        ]
    }
}

impl Told for Admission {
    fn tell(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        let step = |(s, action): (State, Option<Action>)| {
            let next = self.next_state(&s, action?)?;
            Some(match action? {
                Action::Grant(asked) => {
                    let nodes: Vec<_> = (0..NODES).filter(|at| asked[*at]).map(|at| (at + 1).to_string()).collect();
                    format!("lock {} is granted by nodes {}", s.granted + 1, nodes.join(", "))
                }
                Action::End(lock) => format!("the lease of lock {} ends, and it is gone everywhere", lock + 1),
                Action::Save => "node 1 saves what it has".into(),
                Action::Flush => "node 1 loses all its data in place".into(),
                Action::RestartEmpty => "node 1 is restarted empty".into(),
                Action::RestartSaved => "node 1 is restarted with what it had saved".into(),
                Action::Look(gateway) => {
                    let wrote = next.flaky.marker != s.flaky.marker;
                    let count = match next.counts[usize::from(gateway)] {
                        None => "it votes",
                        count if count == s.counts[usize::from(gateway)] => "goes on counting",
                        Some(_) if wrote => "marks it as quarantined and begins to count",
                        Some(_) => "begins to count",
                    };
                    format!("gateway {} looks at node 1: {count}", gateway + 1)
                }
                Action::Finish(gateway) => {
                    let admitted = self.votes(&next) && next.flaky.marker != s.flaky.marker;
                    let effect = if admitted { "it admits node 1" } else { "another marker stands, nothing is done" };
                    format!("the count of gateway {} ends: {effect}", gateway + 1)
                }
            })
        };
        path.into_iter().filter_map(step).collect()
    }
}
