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
//! | [`sets`] | three clients that ask for several names at once, and locks with several slots |
//! | [`confirmed_sets`] | a set whose first request gives it up while a repeated request confirms it |
//! | [`confirmations`] | a grant that two repetitions confirm while its first request may give it up |
//! | [`catalogue`] | which model runs within which bounds |
//! | [`explore`] | running one model and reporting the result |
//!
//! `redlock_core::quorum` counts the votes and `redlock_core::node::eligibility` admits the nodes.
//! The models have no copies of them.
//!
//! # The bounds, and why they are enough
//!
//! - *Three nodes.* Exclusion holds because any two majorities share a node. Three is the smallest
//!   number of nodes whose majority is not all of them. Any two of the three nodes can be the
//!   majority.
//! - *Two owners, three proposals, tokens up to 3.* A violation needs two parties. The third
//!   proposal is the retry of one of them. Nodes only compare tokens, so all orders of three tokens
//!   cover all cases.
//! - *One or two extensions and losses of data in one history.* [`repair`] and [`eligibility`]
//!   explore longer series, but leave out the messages of [`locks`]. This bound is the weakest of
//!   all: no case has three proposals, two losses and two extensions in one history. Recovery with
//!   three proposals is explored only without releases. If two losses are added, it is explored
//!   only for one order of the tokens.
//! - *One lock name.* Names share nothing on a node but the marker. [`sets`] has two names, which
//!   are asked for together.
//!
//! # Time
//!
//! The models have no clocks. They assume the guarantees that clocks and durations must give. A
//! lease begins with its round and ends once, at any later time. A key that got its time to live
//! from the lease expires on each node after the end of the lease, at any time or never. So the key
//! outlives the holder's belief in its lock. The core calculates drift and validity to guarantee
//! this order. The models use nothing else about durations.
//!
//! A quarantine ends when two conditions hold. Every lease that ran at the loss has ended. Every
//! proposal with a token up to the largest one asked for before the loss has ended, so no gateway
//! mints such a token any more. Waiting for `max_ttl + max_clock_skew` meets both conditions if the
//! gateways' clocks agree within `max_clock_skew`.
//!
//! A recovering node waits for less. First, no node may accept a token any more that was asked for
//! before the loss. Second, the rounds that were open at the loss must have ended. The recovered
//! copy of a lock outlives every lease that the copy on the other node outlives.
//!
//! # Left out
//!
//! - Availability, except for [`locks::NO_LOCKOUT`] and the situations that must occur.
//! - Clocks that run at wrong rates; deletion by hand and failover, which the product does not
//!   promise.
//! - Expiring watermarks together with recovery, or with a retry and extensions: see
//!   `locks/fences.rs`.
//! - Answers that decide nothing: see [`locks`].
//!
//! The checker compares states by 64-bit fingerprints. If two states have the same fingerprint, it
//! overlooks one of them. Among ten million states the chance of that is about one in four hundred
//! thousand.

pub mod catalogue;
pub mod confirmations;
pub mod confirmed_sets;
pub mod eligibility;
pub mod explore;
pub mod locks;
pub mod node;
pub mod repair;
pub mod rules;
pub mod sets;
