//! Eligibility: two gateways admit nodes that fail in every way they can.
//!
//! The decisions are the core's own: each gateway has a
//! [`redlock_core::node::eligibility::Eligibility`] for each node. The model passes it the facts of
//! a probe, carries out its next step, and lets every other event happen in between. The properties
//! are [`NO_VOTE_AFTER_LOSS`], which concerns one node, and its consequence [`ONE_HOLDER`].
//!
//! Nodes lose their data in place (FLUSHALL) and restart, empty or from a file. The file is a dump,
//! which brings an old marker back, or an append-only file. Nodes evict keys, and begin or cease to
//! sync every write to disk. Clusters are new or pass for new; gateways restart; an operator
//! introduces a shorter `max_ttl`. Only faults are counted: the number of locks, probes and markers
//! has no bound. The model reuses nonces and processes that nobody remembers. States that differ
//! only in the order of nodes or gateways are one.
//!
//! The model switches a rule of the core off by hiding facts from it: one process for all, no
//! evictions, always the same nonce.
//!
//! Locks are simple here: a majority grants one in one step, and it disappears from all nodes in
//! one step. Messages and expiry in between are explored by [`crate::locks`], where a quarantine is
//! a single wait.
//!
//! # Time
//!
//! The model's time is the set of running leases. A probe at time zero plus n milliseconds stands
//! for the set with the number n. So a count that begins then remembers the set. When none of its
//! leases runs any more, a probe may report the time at which that count ends.
//!
//! # Assumptions
//!
//! - A process and its connections are gone before the next process starts. `redlock-sim` simulates
//!   names that move.
//! - Gateways probe a node often: before the node votes again, all of them see an event that makes
//!   its memory suspect while the process goes on. Such events end sessions.
//! - A node that lost data is not restarted with a synced file before a marker records the loss. A
//!   file older than the node's data is loaded as synced only when all gateways have admitted the
//!   node in its last state.
//! - A gateway with `--bootstrap` starts only when no lease runs or another gateway knows better.
//!   All gateways probe a blank node before a gateway's claim that it is new is confirmed.
//! - Gateways with the new `max_ttl` see no node without a marker before the change has ended. The
//!   old gateways stop when it begins.
//!
//! Without [`Bounds::is_operated_well`] the third, fourth and fifth assumption do not hold, and the
//! properties are violated: known limits, not promises.

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

/// No two locks are held at once.
pub const ONE_HOLDER: &str = "one holder";
/// No node votes for a gateway while a lock may live that the node has granted and lost.
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
                is_new: self.bounds.change && at == 1,
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
