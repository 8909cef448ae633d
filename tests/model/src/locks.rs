//! The locks: one lock name, three nodes, and two owners. Owner A may ask a second time, and its
//! second request may confirm the first one's grant. The events are the messages of acquires,
//! extensions, repairs and releases, losses of data, and recovery from the other nodes.
//!
//! Properties, at every step of every history: [`MUTUAL_EXCLUSION`], [`FENCING`], [`NO_ORPHAN`],
//! [`NO_LOCKOUT`], [`GRANT_STANDS`].
//!
//! Every operation on its way to a node may take effect at any later time, or never. So the model
//! needs no events for a lost message, a node that is down, or a gateway that dies. If an answer is
//! lost, the operation still takes effect, and no gateway counts its vote. A loss of data leaves
//! the operations on their way to the node, as FLUSHALL does. A restart closes the connections, so
//! it allows fewer histories.
//!
//! An owner that has released a token ignores later answers to a proposal with an earlier or equal
//! token. Otherwise a client that asked twice and released the second lock could take the late
//! answer to its first request for a lock.
//!
//! # Histories that others cover
//!
//! Unless [`Bounds::every_order`] is set, the model leaves out a history if another history
//! contains every violation that it could show:
//!
//! - *Refusals are not delivered.* A refusal changes no node. Its gateway reacts as if it had given
//!   up without an answer.
//! - *A proposal that will be given up is given up at once*, while all its messages are still on
//!   their way to the nodes.
//! - *A majority is noticed at once.* A holder that learns of it later believes in its lock for
//!   less time.
//! - *A lease ends only when a key expires or a quarantine waits for its end.* An earlier end
//!   enables no other event.
//! - *Proposals start at the beginning*, or after a loss of data, or after a grant to the owner's
//!   other proposal. A message that is sent later allows nothing that a message delivered later
//!   does not. Extensions start with the grant. In models whose watermarks end, they start at any
//!   time.
//! - *Two events are left out*: a loss of data on a node without data, and an answer that prolongs
//!   the lock after its extension was decided.
//!
//! The cases with `every_order` explore all these histories too, and their properties hold as well.

mod bounds;
mod catch_up;
mod fences;
mod reading;
mod recovery;
mod state;
mod story;

use redlock_core::quorum::{Decision, Tally};
use stateright::{Model, Property};

pub use self::bounds::{Bounds, CATCH_UPS, Locks, NODES, PROPOSALS, RENEWALS};
pub use self::state::State;
use self::state::{Action, Message, Phase, Release, owner};
use crate::explore::Narrated;
use crate::node::{FAR, Lock, NO_TOKEN, Owner, Token, Vote};

/// Two owners never believe at once that they hold the lock.
pub const MUTUAL_EXCLUSION: &str = "mutual exclusion";
/// An owner that believes that it holds the lock has the largest token ever granted.
pub const FENCING: &str = "fencing";
/// Once a release has reached a node, the node stores no lock of that owner with the released T or
/// an older one, whatever arrives later.
pub const NO_ORPHAN: &str = "no orphan";
/// When no node stores the lock, a gateway whose clock is right can get it.
pub const NO_LOCKOUT: &str = "no lockout";
/// If no data is lost, a majority stores every grant that a holder believes in. No other request of
/// the same owner changes that.
pub const GRANT_STANDS: &str = "grant stands";

impl Locks {
    fn is_exclusive(&self, s: &State) -> bool {
        let holds = |who| (0..PROPOSALS).any(|i| owner(i) == who && s.believes(i));
        !(holds(Owner::A) && holds(Owner::B))
    }

    fn is_fenced(&self, s: &State) -> bool {
        let granted = |i: &usize| s.was_notified(*i);
        let holders = [Owner::A, Owner::B].into_iter().filter_map(|who| {
            let best = (0..PROPOSALS)
                .filter(|i| owner(*i) == who && s.believes(*i))
                .map(|i| s.proposals[i].token)
                .max()?;
            Some((who, best))
        });
        let others = |who| {
            (0..PROPOSALS)
                .filter(granted)
                .filter(move |i| owner(*i) != who)
                .map(|i| s.proposals[i].token)
        };
        let retry = &s.proposals[1];
        let in_order = !(retry.after_own
            && retry.phase == Phase::Granted
            && retry.token <= s.proposals[0].token);
        in_order && holders.into_iter().all(|(who, best)| others(who).all(|token| token < best))
    }

    fn has_no_orphan(&self, s: &State) -> bool {
        s.sites.iter().all(|site| {
            let Some(lock) = site.node.lock else { return true };
            let released = |i: usize| {
                site.releases[i] == Release::Arrived
                    && lock.owner == owner(i)
                    && lock.token <= s.proposals[i].token
            };
            // There are two exceptions. The undo spares an extended lock, because an extension
            // means that another request has confirmed the grant. A node may also have got the lock
            // by catching up: a majority of the others stored the grant after the undo had passed
            // this node, and their undos were still on their way.
            let given_back = |i: usize| site.caught_up_with(&s.asked(i));
            let undone = |i: usize| {
                site.undos[i] == Release::Arrived
                    && s.stores(site, i)
                    && !lock.extended
                    && !given_back(i)
            };
            !(0..PROPOSALS).any(|i| released(i) || undone(i))
        })
    }

    fn grants_stand(&self, s: &State) -> bool {
        let stands = |i: usize| {
            s.sites.iter().filter(|site| s.stores(site, i)).count() >= self.quorum.size()
        };
        self.bounds.losses > 0 || (0..PROPOSALS).all(|i| !s.believes(i) || stands(i))
    }

    fn has_no_lockout(&self, s: &State) -> bool {
        if s.sites.iter().any(|site| site.suspicion.is_some() || site.node.lock.is_some()) {
            return true;
        }
        // A token larger than all tokens of right clocks so far.
        let next = Lock {
            owner: Owner::Nobody,
            token: PROPOSALS as Token + 1,
            nonce: 0,
            extended: false,
            guards: 0,
        };
        let window = NO_TOKEN.into();
        let grants =
            |site: &state::Site| { site.node }.acquire(&self.rules, window, next) == Vote::Granted;
        let yes = s.sites.iter().filter(|site| grants(site)).count();
        self.quorum.decide(Tally { yes, ..Tally::default() }) == Decision::Yes
    }

    /// The phases in which a proposal may start.
    fn start_phases(&self) -> &'static [Phase] {
        if self.bounds.releases { &[Phase::Open, Phase::GivenUp] } else { &[Phase::Open] }
    }

    /// Every order in which the proposals' tokens can stand, including equal tokens.
    fn orders(&self) -> Vec<[Token; PROPOSALS]> {
        if let Some(tokens) = self.bounds.tokens {
            return vec![tokens];
        }
        let mut orders = Vec::new();
        let tokens = 1..=PROPOSALS as Token;
        for a in tokens.clone() {
            for again in tokens.clone().take(if self.bounds.retry { PROPOSALS } else { 1 }) {
                for b in tokens.clone().chain(self.bounds.bad_clock.then_some(FAR)) {
                    let good: Vec<_> = [a, again, b].into_iter().filter(|t| *t != FAR).collect();
                    let newest = good.iter().copied().max().unwrap_or(NO_TOKEN);
                    let good: Vec<_> = if self.bounds.retry {
                        good
                    } else {
                        [a, b].into_iter().filter(|t| *t != FAR).collect()
                    };
                    let newest = good.iter().copied().max().unwrap_or(newest);
                    if (1..=newest).all(|t| good.contains(&t)) {
                        orders.push([a, again, b]);
                    }
                }
            }
        }
        orders
    }
}

impl Model for Locks {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let mut states: Vec<_> = self
            .orders()
            .into_iter()
            .map(|tokens| State::initial(tokens, self.bounds.losses, &self.rules))
            .collect();
        if self.bounds.every_order {
            return states;
        }
        for i in 0..PROPOSALS {
            let may_wait = |s: &State| {
                self.bounds.losses > 0
                    || i == 1 && s.proposals[0].phase == Phase::Open
                    || !self.may_propose(i)
            };
            let started = |s: &State| {
                let in_turn = i != 1 || s.proposals[0].phase != Phase::Idle;
                let phases = self
                    .start_phases()
                    .iter()
                    .copied()
                    .filter(move |_| in_turn && self.may_propose(i));
                let state = s.clone();
                phases.map(move |phase| {
                    let mut state = state.clone();
                    self.start(&mut state, i, phase);
                    state
                })
            };
            states = states
                .iter()
                .flat_map(|s| started(s).chain(may_wait(s).then(|| s.clone())))
                .collect();
        }
        states
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        self.enabled(s, actions);
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        let mut next = self.apply(s, action);
        next.sites.sort_unstable();
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::<Self>::always(MUTUAL_EXCLUSION, |m, s| {
                m.firsts[0].always(m.is_exclusive(s))
            }),
            Property::<Self>::always(FENCING, |m, s| m.firsts[1].always(m.is_fenced(s))),
            Property::<Self>::always(NO_ORPHAN, |m, s| m.firsts[2].always(m.has_no_orphan(s))),
            Property::<Self>::always(GRANT_STANDS, |m, s| m.firsts[9].always(m.grants_stand(s))),
            Property::<Self>::always(NO_LOCKOUT, |m, s| m.firsts[3].always(m.has_no_lockout(s))),
            Property::<Self>::sometimes("both owners are granted, one after the other", |m, s| {
                m.firsts[5].sometimes(
                    s.proposals[0].phase == Phase::Granted
                        && s.proposals[2].phase == Phase::Granted,
                )
            }),
        ];
        if self.bounds.retry {
            properties.push(Property::<Self>::sometimes(
                "a retry is granted after a grant",
                |m, s| {
                    m.firsts[4].sometimes(
                        s.proposals[1].after_own && s.proposals[1].phase == Phase::Granted,
                    )
                },
            ));
        }
        if self.bounds.renewals > 0 {
            properties.push(Property::<Self>::sometimes("an extension is granted", |m, s| {
                m.firsts[6].sometimes(s.renewals[0].notified)
            }));
        }
        if self.bounds.renewals > 0 && self.bounds.retry {
            properties.push(Property::<Self>::sometimes("a grant is confirmed", |m, s| {
                m.firsts[10].sometimes(s.renewals.iter().any(|r| r.confirms && r.notified))
            }));
        }
        if self.bounds.renewals > 0 && (self.bounds.losses > 0 || !self.bounds.only_confirms) {
            properties.push(Property::<Self>::sometimes("a repair is granted", |m, s| {
                m.firsts[7]
                    .sometimes(s.sites.iter().any(|site| site.repairs.contains(&Message::Yes)))
            }));
        }
        if self.bounds.catch_ups > 0 {
            properties.push(Property::<Self>::sometimes("a node has caught up", |m, s| {
                let caught_up =
                    |i: usize| s.sites.iter().any(|site| site.caught_up_with(&s.asked(i)));
                m.firsts[12].sometimes((0..PROPOSALS).any(caught_up))
            }));
        }
        if self.bounds.losses > 0 {
            properties.push(Property::<Self>::sometimes(
                "a node that lost its data votes again",
                |m, s| {
                    m.firsts[8].sometimes(
                        s.losses_left < m.bounds.losses
                            && s.sites.iter().all(|site| site.suspicion.is_none()),
                    )
                },
            ));
        }
        if self.bounds.recovery {
            properties.push(Property::<Self>::sometimes("a node has recovered a lock", |m, s| {
                let recovered = |site: &state::Site| {
                    site.suspicion.is_some_and(|suspicion| {
                        suspicion.recovered.is_some_and(|found| found.lock.is_some())
                    })
                };
                m.firsts[11].sometimes(s.sites.iter().any(recovered))
            }));
        }
        properties
    }
}

impl Narrated for Locks {
    fn narrate(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        self.story(path)
    }
}
