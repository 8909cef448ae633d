//! Eligibility: two gateways that let nodes vote again, which fail in every way that they can.
//!
//! The decisions are the core's own: each gateway has a [`redlock_core::node::eligibility::Eligibility`] for each node. The
//! model shows it what it would see there, does what it says, and lets everything else happen in between. Promises:
//! [`NOTHING_FORGOTTEN`], which is a matter of one node, and what follows from it, [`ONE_HOLDER`].
//!
//! Nodes lose their data in place (FLUSHALL), are restarted empty or with a file (a dump, which brings an old marker back,
//! or an append-only file), evict keys, begin or cease to sync every write to disk. Clusters are new, or said to be;
//! gateways are restarted; an operator introduces a shorter `max_ttl`. Only faults are counted: the number of locks, looks
//! and markers has no bound. Nonces and processes that nobody remembers are used again, and states that differ in the order
//! of nodes or gateways alone are one.
//!
//! A rule of the core is switched off by showing it less: one process for all, no evictions, the same nonce always.
//!
//! Locks are simple here: granted in one step by a majority, gone from all nodes in one step. What becomes of messages and
//! expiry in between is shown by [`crate::locks`], where in turn a quarantine is a single wait.
//!
//! # What time is
//!
//! The set of leases that run. A look tells the eligibility that it is so many milliseconds past zero as the set has for a
//! number; so the count that it begins remembers the set, and when none of it runs any more, a look may tell the time at
//! which that count ends.
//!
//! # What is taken for granted
//!
//! - A process and its connections are gone before the next one starts. Names that move are simulated (`redlock-sim`).
//! - Gateways look at a node so often that what makes its memory suspect while the process goes on is seen by all of them
//!   before it votes again: such events end sessions.
//! - A node that has lost something is not restarted with a synced file before a marker says so. A file that is
//!   older than what it had stored is loaded so only when all gateways have admitted the node as it was last.
//! - `--bootstrap` is given to a gateway that starts only when no lease runs or another gateway knows better. All gateways
//!   look at a blank node before anybody is believed who calls it new.
//! - Gateways that have the new `max_ttl` see no node without a marker before the change has ended; the old ones are
//!   stopped when it begins.
//!
//! Without [`Bounds::is_operated_well`] the third, fourth and fifth do not hold, and it goes wrong: known limits, not
//! promises.

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
use crate::explore::Shown;

/// Locks are never held at once.
pub const ONE_HOLDER: &str = "one holder";
/// No node votes for a gateway while a lock may live that the node has granted and lost.
pub const NOTHING_FORGOTTEN: &str = "no vote of a node that has lost a lock";

impl Model for Eligibility {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let synced = self.bounds.durability;
        let begin = |words: [bool; GATEWAYS]| {
            let gateway = |at: usize| Gateway {
                bootstrap: words[at],
                word_counts: words[at],
                knows_better: !words[at],
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
                    is_doubtful: false,
                    granted: 0,
                    survived: 0,
                    sights: std::array::from_fn(|at| self.sight(gateways[at])),
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
            Property::<Self>::always(NOTHING_FORGOTTEN, |m, s| {
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

impl Shown for Eligibility {
    fn tell(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        let step = |(s, action): (State, Option<Action>)| {
            let next = self.next_state(&s, action?)?;
            Some(self.tell_step(&s, &next, action?))
        };
        path.into_iter().filter_map(step).collect()
    }
}
