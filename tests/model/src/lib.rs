//! Exhaustive models of the locking algorithm. [`stateright`] explores every order of events within
//! stated bounds.
//!
//! Mutual exclusion and fencing tokens rest on rules that are easy to state and easy to weaken by
//! accident. Each rule is a switch ([`rules::Rules`]). With all rules on, no history within the
//! bounds violates a property. With any one rule off, the checker finds the shortest history that
//! violates a property and narrates it step by step ([`catalogue`]).
//!
//! | module | holds |
//! | --- | --- |
//! | [`rules`] | the switches |
//! | [`node`] | one master; `tests/conformance.rs` compares it with the core's own |
//! | [`locks`] | two owners on three nodes: messages in any order, expiry, extensions, repairs, losses of data, recovery, catching up |
//! | [`eligibility`] | two gateways with the core's own eligibility, and nodes that fail in every way they can |
//! | [`repair`] | a lock that outlives one fault after the other |
//! | [`catalogue`] | which model runs within which bounds |
//! | [`explore`] | running one model and reporting the result |
//!
//! `redlock_core::quorum` counts the votes and `redlock_core::node::eligibility` admits the nodes.
//! The models have no copies of them.
//!
//! # The bounds, and why they are enough
//!
//! - *Three nodes.* The argument for exclusion is that two majorities share a node. Three is the
//!   smallest number with a majority that is not all, and each of its majorities can be any two.
//! - *Two owners, three proposals, tokens up to 3.* A violation is a matter of two parties. The
//!   third proposal is the retry of one of them. Tokens are only compared, so all orders of three
//!   tokens cover all cases.
//! - *One or two extensions and losses of data at a time.* [`repair`] and [`eligibility`] run
//!   longer series and leave out the rest. This bound is the weakest: no size explores a history
//!   with three proposals, two losses and two extensions at once. Recovery with three proposals is
//!   explored without releases. With two losses it is explored in one order of tokens.
//! - *One lock name.* Names share nothing on a node but the marker.
//!
//! # Time
//!
//! The models have no clocks, only the assumptions about clocks. A lease begins with its round and
//! ends once, at any later time. A key that got its life from the lease expires on each node at any
//! time after that, or never. So a holder's belief ends no later than any key: drift and validity
//! are calculated for this. The models know nothing else of durations.
//!
//! A quarantine ends after every lease that ran at the loss. It also ends after every proposal
//! whose token is at most the largest asked for before the loss. From then on no gateway mints such
//! a token. Waiting for `max_ttl + max_clock_skew` has this effect, if gateways' clocks agree
//! within `max_clock_skew`.
//!
//! A recovering node waits for less. No node may still accept a token that was asked for before the
//! loss. The rounds that were open at the loss must have ended. The recovered copy of a lock
//! outlives every lease that the copy it was read from outlives.
//!
//! # Left out
//!
//! - Availability, except for one property and the states that must be reachable.
//! - Clocks that run at wrong rates; deletion by hand and failover, which the product does not
//!   promise.
//! - Expiring watermarks together with recovery, or with a retry and extensions: see
//!   `locks/fences.rs`.
//! - Answers that decide nothing: see [`locks`].
//!
//! The checker tells states apart by 64-bit fingerprints. Among ten million states it overlooks one
//! with a chance of about one in four hundred thousand.

pub mod catalogue;
pub mod eligibility;
pub mod explore;
pub mod locks;
pub mod node;
pub mod repair;
pub mod rules;
