//! A deterministic simulation of the locking core. The real [`redlock_core::Redlock`] runs with its
//! rounds, releases, repair, hybrid clock, drivers, eligibility and wait queues. The masters,
//! networks, gateways and clients around it fail in every way that the plan allows. One seed always
//! gives the same history. A checker then looks for violated promises.
//!
//! ```
//! use redlock_sim::{plan::Plan, run::run, timeline::render};
//!
//! let plan = Plan { length: std::time::Duration::from_secs(5), ..Plan::storm(17) };
//! let outcome = run(&plan);
//! assert!(outcome.violations.is_empty());
//! assert_eq!(render(&outcome.history), render(&run(&plan).history));
//! ```
//!
//! All of `redlock-core` above the trait [`redlock_core::node::link::Link`] is real, that is, all
//! but its Redis client. The masters run the real rules of a node, in Rust instead of Lua. Time,
//! chance, the network, processes and their data are simulated.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | [`plan`] | the kind of history that a seed gives, within the assumptions | how it is carried out |
//! | [`run`] | puts a history together and carries it out | what is right or wrong |
//! | [`master`] | a process around a data set | quorum, gateways' opinions |
//! | [`network`] | connections, delays, late arrivals | what messages mean |
//! | [`link`] | one gateway's way to one master, and the hints from it | other masters |
//! | [`gateway`] | a process with the core in it | clients |
//! | [`client`] | everything that clients do | masters |
//! | [`foreign`] | clients of another Redlock library | gateways |
//! | [`faults`] | the faults and their times | clients |
//! | [`reconfigure`] | the faults during an operator's change of configuration | clients |
//! | [`raise`] | the losses of data while an operator raises `max_ttl` | clients |
//! | [`history`] | the record | the simulation |
//! | [`checker`] | the judge | the simulation |
//! | [`timeline`] | the record as text | right and wrong |
//! | [`seen`] | grants and votes in the words of a history | everything else |
//! | [`rule`] | switches single rules of the core off | |
//! | [`search`] | many seeds on all cores | |
//! | [`chance`], [`time`] | the sources of numbers and clocks | everything else |
//!
//! # Determinism
//!
//! A simulation runs on one thread, with tokio's paused clock and the streams of a named generator.
//! Code here must not iterate over a hash map or select without an order. It must not let two tasks
//! wait on one watch channel either, because tokio wakes such tasks in an order of its own. Timers
//! have a resolution of a millisecond, and every message takes at least one.
//!
//! # Limits
//!
//! - Locks on a simulated master expire by its monotonic clock. A real server expires them by its
//!   wall clock, so a jump of that clock ends them early. No promise covers such a jump.
//! - Masters apply the lock rules of the in-memory node, not the scripts. The differential test
//!   (`tests/node/differential.rs`) shows on a real server that the scripts give the same answers.
//! - On one thread, a waiter may leave between two steps of another waiter, but not within a step.
//! - When one gateway stops, the simulation shows only the outside: no message leaves or reaches
//!   the gateway, but its timers run. Only a freeze of everything also stops timers.
//! - Evictions are not simulated, and neither is durability that changes under a running master.
//!   The model explores both.
//! - [`plan`] bounds everything that is random. So the absence of violations is evidence, no proof.
//!   The exhaustive models in `redlock-model` prove the properties, for fewer events.

pub mod chance;
pub mod checker;
pub mod client;
pub mod faults;
pub mod foreign;
pub mod gateway;
pub mod history;
pub mod link;
pub mod master;
pub mod network;
pub mod plan;
pub mod raise;
pub mod reconfigure;
pub mod rule;
pub mod run;
pub mod search;
pub mod seen;
pub mod time;
pub mod timeline;
