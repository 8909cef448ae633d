//! A deterministic simulation of the locking core. The real [`redlock_core::Redlock`] runs with its
//! rounds, releases, repair, hybrid clock, drivers, eligibility and wait queues. Masters, networks,
//! gateways and clients around it fail in every way they may. One seed gives one history, always
//! the same. A checker then looks for violated promises.
//!
//! ```
//! use redlock_sim::{plan::Plan, run::run, timeline::render};
//!
//! let plan = Plan { length: std::time::Duration::from_secs(5), ..Plan::storm(17) }; let outcome =
//! run(&plan); assert!(outcome.violations.is_empty()); assert_eq!(render(&outcome.history),
//! render(&run(&plan).history));
//! ```
//!
//! Real: all of `redlock-core` above the seam [`redlock_core::node::link::Link`], that is without
//! its Redis client; on the masters the rules of a node, in Rust. Simulated: time, chance, the
//! wire, processes and their data.
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
//! One thread, tokio's paused clock, and streams of a named generator. Code here must not iterate
//! over a hash map, select without an order, or let two tasks wait on one watch channel: tokio
//! wakes them in an order of its own. Timers have a resolution of a millisecond, and every message
//! takes at least one.
//!
//! # Limits
//!
//! - Locks on a simulated master expire by its monotonic clock. A real server expires them by its
//!   wall clock, so a jump of that clock ends them early. No promise covers such a jump.
//! - Scripts run as the in-memory node runs them. The differential test against a real server
//!   (`tests/node/differential.rs`) shows that Redis runs them alike.
//! - One thread: a waiter may leave between two steps of another waiter, but not within one.
//! - The stop of one gateway is simulated from outside: no message leaves or reaches it, but its
//!   timers run. Only a freeze of everything also stops timers.
//! - Evictions, and durability that changes under a running master, are left to the model.
//! - [`plan`] bounds everything random. The absence of violations is evidence. The exhaustive
//!   models in `redlock-model` prove something smaller.

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
pub mod reconfigure;
pub mod rule;
pub mod run;
pub mod search;
pub mod seen;
pub mod time;
pub mod timeline;
