//! A deterministic simulation of the locking core: the real [`redlock_core::Redlock`] with its rounds, releases, repair,
//! hybrid clock, drivers, eligibility and queues of waiters, among masters, networks, gateways and clients that go wrong in every
//! way they may. One seed is one history, always the same; a checker then looks for broken promises.
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
//! What is real: all of `redlock-core` but its Redis client, that is everything above the seam
//! [`redlock_core::node::link::Link`], and on the masters the rules of a node, in Rust. What is simulated: time, chance, the
//! wire, processes and their data.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | [`plan`] | what kind of history a seed means, within the assumptions | how it is carried out |
//! | [`run`] | puts a history together and carries it out | what is right or wrong |
//! | [`master`] | a process around a data set | quorum, gateways' opinions |
//! | [`network`] | connections, delays, late arrivals | what messages mean |
//! | [`link`] | one gateway's way to one master, and the hints that come back | other masters |
//! | [`gateway`] | a process with the core in it | clients |
//! | [`client`] | all that clients do | masters |
//! | [`foreign`] | clients of another Redlock library | gateways |
//! | [`faults`] | what goes wrong, when | clients |
//! | [`reconfigure`] | what goes wrong while an operator changes the configuration | clients |
//! | [`history`] | the record | the simulation |
//! | [`checker`] | the judge | the simulation |
//! | [`timeline`] | the record as text | right and wrong |
//! | [`seen`] | grants and votes in the words of a history | everything else |
//! | [`rule`] | switches single rules of the core off | |
//! | [`search`] | many seeds on all cores | |
//! | [`chance`], [`time`] | where numbers and clocks come from | everything else |
//!
//! # Determinism
//!
//! One thread, tokio's paused clock, streams of a named generator. Nothing may iterate over a hash map, select without an
//! order, or have two tasks wait on one watch channel: tokio wakes those in an order of its own. Timers have a resolution of
//! a millisecond and every message takes at least one.
//!
//! # Limits
//!
//! - Locks on a simulated master expire by its monotonic clock. A real server's expire by its wall clock, so a jump of it
//!   ends them early; that is outside what is promised.
//! - Scripts run as the in-memory node runs them. That Redis runs them alike is shown by the differential test against a
//!   real server (`tests/node/differential.rs`), not here.
//! - One thread: that a waiter leaves between two steps of another is simulated, that it leaves within one is not.
//! - A gateway that stops alone is simulated as seen from outside: nothing leaves or reaches it, but its timers run. That
//!   its own timers stand still too is simulated for everything at once.
//! - Evictions and durability that changes under a running master are not simulated: the model has them.
//! - All that is random is bounded by what [`plan`] says. Absence of violations is evidence, and the exhaustive models in
//!   `redlock-model` are proofs of something smaller.

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
