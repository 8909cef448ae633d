//! Eligibility: two gateways admit nodes, and the nodes fail in every way they can.
//!
//! The decisions are the core's own: each gateway has one
//! [`redlock_core::node::eligibility::Eligibility`] for each node. The model passes it the facts of
//! a probe, carries out the step that it returns, and lets every other event happen in between. The
//! properties are [`NO_VOTE_AFTER_LOSS`], which concerns one node, and its consequence
//! [`ONE_HOLDER`].
//!
//! Nodes lose their data in place (FLUSHALL). They restart empty or from a file: a dump, which
//! brings an old marker back, or an append-only file. They evict keys, and begin or cease to sync
//! every write to disk. A cluster is new, or its nodes look new because they lost their data.
//! Gateways restart. An operator introduces a shorter `max_ttl`, or raises it.
//!
//! Only faults and gateway restarts are bounded. The number of locks, probes and markers has no
//! bound: the model reuses nonces and process numbers that no node and no gateway remembers. States
//! that differ only in the order of nodes or gateways count as one.
//!
//! To switch a rule of the core off, the model hides facts from it: every process seems to be the
//! same, no key seems to be evicted, or every nonce is equal.
//!
//! Locks are simple in this model: a majority grants a lock in one step, and the lock disappears
//! from all nodes in one step. [`crate::locks`] explores the messages and expiries in between.
//! There a quarantine is a single wait.
//!
//! # Time
//!
//! The model's time is the set of running leases, one bit each. A probe in a state whose set is the
//! number n happens at n milliseconds. So a quarantine count that begins with this probe remembers
//! the set. Once none of those leases runs any more, a probe may happen at the moment when the
//! count ends.
//!
//! # Assumptions
//!
//! - A process and its connections end before the next process starts. Names that move to a second
//!   process are simulated in `redlock-sim`.
//! - Gateways probe a node often. If something makes its memory suspect while its process goes on,
//!   every gateway sees that before the node votes for it again, because such events end sessions.
//! - A node that lost data restarts with a synced file only after a marker has recorded the loss. A
//!   node restarts from an append-only file older than its data, as if that file were synced, only
//!   after all gateways have admitted the node in its last state.
//! - A gateway with `--bootstrap` starts only when no lease runs, or when another gateway knows
//!   that the cluster is not new. Before a gateway's claim that a blank node is new is confirmed,
//!   all gateways probe that node.
//! - While `max_ttl` is raised, a majority of the nodes keeps its data.
//! - Gateways with the shorter `max_ttl` see no node without a marker before the change of
//!   configuration has ended. The gateways with the old one stop when the change begins.
//!
//! Without [`Bounds::is_operated_well`] the third, fourth and fifth assumption do not hold. Then
//! the properties are violated. These are known limits, not promises.

mod bounds;
mod events;
mod state;
mod story;

use stateright::{Model, Property};

use self::bounds::GATEWAYS;
pub use self::bounds::{Bounds, Eligibility};
use self::events::Action;
pub use self::state::State;
use self::state::{Change, Gateway, Site, Stored};
use crate::explore::Narrated;

/// At no time are two locks held.
pub const ONE_HOLDER: &str = "one holder";
/// No node votes for a gateway while a lock may still live that the node granted and lost.
pub const NO_VOTE_AFTER_LOSS: &str = "no vote of a node that has lost a lock";

impl Model for Eligibility {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let synced = self.bounds.durability;
        let begin = |bootstraps: [bool; GATEWAYS]| {
            let gateway = |at: usize| Gateway {
                bootstrap: bootstraps[at],
                may_confirm_new: bootstraps[at],
                denies_new: !bootstraps[at],
                is_new: (self.bounds.change || self.bounds.raise) && at == 1,
                is_stopped: false,
            };
            let gateways = std::array::from_fn(gateway);
            let site = || {
                let mut site = Site {
                    process: 0,
                    memory: Stored::default(),
                    dump: None,
                    append_only_file: Stored::default(),
                    synced,
                    rewritten: false,
                    evicted: 0,
                    raised: 0,
                    is_suspect: false,
                    granted: 0,
                    survived: 0,
                    views: std::array::from_fn(|at| self.view(gateways[at])),
                };
                if !self.bounds.bootstrap {
                    site.put(self.identity(false).admitting(&site.facts(&self.rules), 0));
                }
                site
            };
            State {
                sites: vec![site(); self.bounds.nodes],
                gateways,
                change: Change::Before,
                live: 0,
                short: 0,
                faults_left: self.bounds.faults,
                restarts_left: self.bounds.restarts,
                has_waited: false,
            }
        };
        if self.bounds.bootstrap {
            vec![begin([true, true]), begin([true, false])]
        } else {
            vec![begin([false; 2])]
        }
    }

    fn actions(&self, s: &State, actions: &mut Vec<Action>) {
        self.enabled(s, actions);
    }

    fn next_state(&self, s: &State, action: Action) -> Option<State> {
        self.apply(s, action)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::<Self>::always(NO_VOTE_AFTER_LOSS, |m, s| {
                let lost = |site: &Site| site.granted & s.live & !site.memory.locks != 0;
                let votes = |node: usize| (0..GATEWAYS).any(|gateway| s.votes(gateway, node));
                m.firsts[0]
                    .always(!(0..m.bounds.nodes).any(|node| lost(&s.sites[node]) && votes(node)))
            }),
            Property::<Self>::always(ONE_HOLDER, |m, s| {
                m.firsts[1].always(s.live.count_ones() <= 1)
            }),
            Property::<Self>::sometimes("a node grants after as many faults as can be", |m, s| {
                m.firsts[2].sometimes(s.faults_left == 0 && s.live != 0)
            }),
        ];
        if self.bounds.durability {
            properties.push(Property::<Self>::sometimes(
                "a restarted node votes with the locks it had",
                |m, s| {
                    let votes = |node: usize| (0..GATEWAYS).any(|gateway| s.votes(gateway, node));
                    m.firsts[3].sometimes(
                        (0..m.bounds.nodes).any(|node| s.sites[node].survived != 0 && votes(node)),
                    )
                },
            ));
        }
        if self.bounds.bootstrap {
            properties.push(Property::<Self>::sometimes(
                "a new cluster grants without a quarantine",
                |m, s| m.firsts[4].sometimes(!s.has_waited && s.live != 0),
            ));
        }
        if self.bounds.raise {
            properties.push(Property::<Self>::sometimes(
                "a lock with the raised max_ttl is granted after a loss of data",
                |m, s| m.firsts[5].sometimes(s.faults_left == 0 && s.live & !s.short != 0),
            ));
        }
        if self.bounds.change {
            properties.push(Property::<Self>::sometimes(
                "locks are granted with the new configuration",
                |m, s| m.firsts[5].sometimes(s.short != 0),
            ));
        }
        properties
    }
}

impl Narrated for Eligibility {
    fn narrate(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        let step = |(s, action): (State, Option<Action>)| {
            let next = self.next_state(&s, action?)?;
            Some(self.narrate_step(&s, &next, action?))
        };
        path.into_iter().filter_map(step).collect()
    }
}
