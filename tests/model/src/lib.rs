//! Exhaustive models of the locking algorithm: every order of events within stated bounds, explored with [`stateright`].
//!
//! What it is for: the rules that mutual exclusion and fencing tokens rest on are easy to state and easy to weaken by
//! accident. Here each is a switch ([`rules::Rules`]). With all of them on, nothing goes wrong in any history within the
//! bounds; with any one off, the shortest history that goes wrong is found and told step by step ([`catalogue`]).
//!
//! | module | holds |
//! | --- | --- |
//! | [`rules`] | the switches |
//! | [`node`] | one master, held to the code's own by `tests/conformance.rs` |
//! | [`locks`] | two owners on three nodes: messages in any order, expiry, extensions, repairs, losses of data, recovery, catching up |
//! | [`eligibility`] | two gateways with the code's own eligibility, and nodes that fail in every way they can |
//! | [`repair`] | a lock that outlives one fault after the other, extended or young |
//! | [`catalogue`] | which model is run within which bounds |
//! | [`explore`] | running one, and telling what came of it |
//!
//! Votes are counted by `redlock_core::quorum`, and nodes admitted by `redlock_core::node::eligibility`, not by copies.
//!
//! # What is bounded, and why that is enough
//!
//! - *Three nodes.* The argument for exclusion is that two majorities share a node; three is the smallest number with a
//!   majority that is not all, and each of its majorities can be any two.
//! - *Two owners, three tries, tokens up to 3.* A violation is a matter of two parties; the third try is the retry of one
//!   of them. Tokens are compared and never calculated with, so every order of three tokens is every order.
//! - *One or two extensions and losses of data at a time.* More of them follow each other in [`repair`] and
//!   [`eligibility`], which leave out what the other models show. This is the weakest of the bounds: a history that
//!   needs three tries, two losses and two extensions at once is not explored, not even in the large size. Recovery with
//!   three tries is explored without releases, and with two losses in one order of tokens.
//! - *One lock name.* Names share nothing on a node but the marker.
//!
//! # What time is
//!
//! There are no clocks, only what their assumptions allow. A lease begins when its round does, and ends at any later time,
//! once; a key that it gave its life expires on each node at any time after that, or never. So a holder's belief ends no
//! later than any key, which is what drift and validity are calculated for, and nothing else is known of durations. A
//! quarantine ends when every lease has ended that ran at the loss, and so has every try with a token that is not larger
//! than all that were asked for until then; from then on nobody mints such a token. That is what waiting for
//! `max_ttl + S` means, and the assumption that gateways' clocks agree within S is in it.
//! A node that adopts waits for less: until no node takes a token that was asked for before the loss, and the rounds have
//! ended that were open then. Its copy of a lock outlives the leases that the copy it was read from outlives.
//!
//! # What is left out
//!
//! Availability, but for one property and for what must be possible at all; clocks that run at wrong rates; deletion by
//! hand and fail-over, which are not promised. Fences end in cases of their own, see `locks/fences.rs`, which have neither
//! recovery nor a retry together with extensions. Answers of nodes that decide nothing are left out as well, see [`locks`]. States are told apart by 64-bit
//! fingerprints: among ten million states one is overlooked with a chance of about one in four hundred thousand.

pub mod catalogue;
pub mod eligibility;
pub mod explore;
pub mod locks;
pub mod node;
pub mod repair;
pub mod rules;
