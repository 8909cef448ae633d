//! Admission: two gateways that let nodes vote again, which fail in every way that they can.
//!
//! The decisions are the core's own: each gateway has a [`redlock_core::node::admission::Admission`] for each node. The
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
//! The set of leases that run. A look tells the admission that it is so many milliseconds past zero as the set has for a
//! number; so the count that it begins remembers the set, and when none of it runs any more, a look may tell the time at
//! which that count ends.
//!
//! # What is taken for granted
//!
//! - Gateways look at a node so often that what makes its memory doubtful while the process goes on is seen by all of them
//!   before it votes again: such events end sessions.
//! - A node that has forgotten something is not restarted with a synced file before a marker says so. A file that is
//!   older than what it had stored is loaded so only when all gateways have admitted the node as it was last.
//! - `--bootstrap` is given to a gateway that starts only when no lease runs or another gateway knows better. All gateways
//!   look at a blank node before anybody is believed who calls it new.
//! - Gateways that have the new `max_ttl` see no node without a marker before the change has ended; the old ones are
//!   stopped when it begins.
//!
//! Without [`Bounds::is_operated_well`] the second, third and fourth do not hold, and it goes wrong: known limits, not
//! promises.

mod events;
mod state;
mod story;

use std::time::Duration;

use redlock_core::node::admission::{Admission as Decisions, ClusterConfig, NodeIdentity};
use redlock_core::quorum::Quorum;
use stateright::{Model, Property};

use self::events::Action;
pub use self::state::State;
use self::state::{Change, Gateway, Sight, Site, Stored};
use crate::explore::{First, Told};
use crate::rules::Rules;

/// Locks are never held at once.
pub const ONE_HOLDER: &str = "one holder";
/// No node votes for a gateway while a lock may live that the node has granted and forgotten.
pub const NOTHING_FORGOTTEN: &str = "no vote of a node that has forgotten a lock";

const GATEWAYS: usize = 2;
/// Any time that is longer than all sets of leases.
const QUARANTINE: Duration = Duration::from_secs(302);

/// How much may happen in one history.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Masters, all of which may fail.
    pub nodes: usize,
    /// What may happen to them: losses of data, restarts, evictions, changes of durability.
    pub faults: u8,
    /// Whether nodes may be restarted, empty or with a file.
    pub processes: bool,
    /// Whether nodes may evict keys.
    pub evictions: bool,
    /// Whether nodes may sync every write to disk, and begin or cease to.
    pub durability: bool,
    /// Whether the cluster is brand-new, and its first gateway, or both, are started with that word.
    pub bootstrap: bool,
    /// How many restarts of gateways there may be.
    pub restarts: u8,
    /// Whether a shorter `max_ttl` is introduced, which the second gateway has from the beginning.
    pub change: bool,
    /// Whether what is taken for granted of operators is so, see above.
    pub is_operated_well: bool,
    /// Whether anything may happen between a look and the marker that it puts.
    pub every_order: bool,
}

impl Bounds {
    /// One node, losses of data and restarts.
    pub const LOSSES: Self = Self {
        nodes: 1,
        faults: 3,
        processes: true,
        evictions: false,
        durability: false,
        bootstrap: false,
        restarts: 0,
        change: false,
        is_operated_well: true,
        every_order: false,
    };
}

/// The model of two gateways that admit nodes which fail.
#[derive(Debug)]
pub struct Admission {
    rules: Rules,
    bounds: Bounds,
    quorum: Quorum,
    /// A node's place in the old configuration and in the new one. All have the same, or they could not change places.
    identities: [NodeIdentity; 2],
    firsts: [First; 6],
}

impl Admission {
    pub fn new(rules: Rules, bounds: Bounds) -> Self {
        let quorum = Quorum::new(bounds.nodes).expect("so many nodes are allowed");
        let identity = |max_ttl| ClusterConfig::new("cluster", Duration::from_secs(max_ttl)).identity("node");
        let identities = [identity(300), identity(if rules.marker_names_configuration { 200 } else { 300 })];
        Self { rules, bounds, quorum, identities, firsts: Default::default() }
    }

    fn identity(&self, is_new: bool) -> &NodeIdentity {
        &self.identities[usize::from(is_new)]
    }

    /// As a gateway begins.
    fn sight(&self, gateway: Gateway) -> Sight {
        let admission = Decisions::new(self.identity(gateway.is_new).clone(), QUARANTINE);
        let admission = admission.expecting_bootstrap(gateway.bootstrap);
        Sight { admission, session: None, put: None, waits: None, told_new: None }
    }

    fn start(&self, s: &mut State, gateway: usize) {
        let g = &mut s.gateways[gateway];
        (g.word_counts, g.knows_better, g.is_stopped) = (g.bootstrap, !g.bootstrap, false);
        let sight = self.sight(*g);
        s.sites.iter_mut().for_each(|site| site.sights[gateway] = sight.clone());
    }
}

impl Model for Admission {
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
        if self.bounds.bootstrap { vec![begin([true, true]), begin([true, false])] } else { vec![begin([false; 2])] }
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
                m.firsts[0].always(!(0..m.bounds.nodes).any(|node| lost(&s.sites[node]) && votes(node)))
            }),
            Property::<Self>::always(ONE_HOLDER, |m, s| m.firsts[1].always(s.live.count_ones() <= 1)),
            Property::<Self>::sometimes("a node grants after as many faults as can be", |m, s| {
                m.firsts[2].sometimes(s.faults_left == 0 && s.live != 0)
            }),
        ];
        if self.bounds.durability {
            properties.push(Property::<Self>::sometimes("a restarted node votes with the locks it had", |m, s| {
                let votes = |node: usize| (0..GATEWAYS).any(|gateway| s.votes(gateway, node));
                m.firsts[3].sometimes((0..m.bounds.nodes).any(|node| s.sites[node].survived != 0 && votes(node)))
            }));
        }
        if self.bounds.bootstrap {
            properties.push(Property::<Self>::sometimes("a new cluster grants without a quarantine", |m, s| {
                m.firsts[4].sometimes(!s.has_waited && s.live != 0)
            }));
        }
        if self.bounds.change {
            properties.push(Property::<Self>::sometimes("locks are granted with the new configuration", |m, s| {
                m.firsts[5].sometimes(s.short != 0)
            }));
        }
        properties
    }
}

impl Told for Admission {
    fn tell(&self, path: Vec<(State, Option<Action>)>) -> Vec<String> {
        let step = |(s, action): (State, Option<Action>)| {
            let next = self.next_state(&s, action?)?;
            Some(self.tell_step(&s, &next, action?))
        };
        path.into_iter().filter_map(step).collect()
    }
}
