//! Redlock over N independent masters, made safe where the canonical text leaves safety to
//! operators.
//!
//! # The algorithm on one page
//!
//! A lock is one key on each of N independent Redis masters. A node sets the key only if it is
//! free, with a TTL, and with a value that nobody else can guess. The lock is *granted* under two
//! conditions. At least ⌊N/2⌋+1 of all configured nodes, a majority, have set the key. And the
//! validity is above zero: `validity = ttl − elapsed − drift`, where `elapsed` is the time since
//! the request began, and `drift` allows for clocks that run at different rates. Any two majorities
//! share a node. So there is one holder at a time, as long as holders stop at their deadline and
//! nodes keep what they stored. This is the canonical text
//! (<https://redis.io/docs/latest/develop/use/patterns/distributed-locks/>). This crate adds:
//!
//! - Every grant carries a *fencing token* T, larger than that of every earlier grant of the same
//!   lock. A resource that refuses smaller tokens is safe even from a holder that slept through its
//!   deadline (Kleppmann, "How to do distributed locking"). The token costs no extra round trip:
//!   nodes keep the last T beside the lock and refuse smaller ones.
//! - A failed, cancelled or timed-out attempt is released on every node that it may have reached.
//!   The release has a deadline of its own, independent of the caller's. It leaves a tombstone on
//!   each node, so that an acquire command still in flight cannot set the lock after the release.
//! - A master that may have lost locks does not vote until those locks have ended or were recovered
//!   from the other masters ([`node::eligibility`]).
//! - An extension that a majority has granted also sets the lock again on masters that lost it.
//! - Waiters stand in a queue. A release hands the lock to the next waiter of the same process, in
//!   the same round trip.
//! - A refusal, a missing majority and an unknown outcome are different errors ([`LockError`]).
//!
//! [`safety`] states the promises, their assumptions and the evidence. [`architecture`] shows how a
//! request passes through the modules, the states of a node, and a glossary.
//!
//! ```
//! use std::time::Duration;
//! use redlock_core::{AcquireOptions, LockError, LockName, Redlock, Ttl};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Five masters in this process. For real masters: .redis(["redis://10.0.0.1", …])
//! let locks = Redlock::builder().embedded(5).max_ttl(Ttl::from_millis(60_000)?).connect()?;
//!
//! let name = "reports/nightly".parse::<LockName>()?;
//! let ttl = Ttl::from_millis(10_000)?;
//! let at_once = Duration::ZERO;
//! let mut guard = locks.lock(&name, ttl, AcquireOptions::default(), at_once).await?;
//! println!("held for {:?}, fencing token {}", guard.validity(), guard.fencing_token());
//!
//! let other = locks.lock(&name, ttl, AcquireOptions::default(), at_once).await;
//! assert!(matches!(other, Err(LockError::Held(_))));
//!
//! guard.extend(ttl).await?;
//! guard.release().await?; // dropping the guard releases in the background
//! # Ok(())
//! # }
//! ```
//!
//! The same code works on real masters, with one difference: a new master waits before it votes.
//! See [`Redlock::bootstrap`] and [`Redlock::ready`]. The examples `embedded` and `redis` of this
//! crate show what errors mean.
//!
//! A server that serves locks to its own clients, such as a gateway, keeps no guards. It sends the
//! token of a [`Lease`] to its client. The client sends the token back to extend or release the
//! lock. To repeat a refused acquire for a while:
//!
//! ```
//! # use redlock_core::*;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let locks = Redlock::builder().embedded(1).connect()?;
//! # let (name, ttl) = ("a".parse::<LockName>()?, Ttl::from_millis(100)?);
//! let held = locks.acquire(&name, ttl, AcquireOptions::default()).await?;
//! let policy = RetryPolicy { count: 20, ..RetryPolicy::default() };
//! let next = locks.acquire_with_retry(&name, ttl, AcquireOptions::default(), &policy).await?;
//! // Granted after the first lease expired, with a larger token.
//! assert!(next.token.fencing() > held.token.fencing());
//! # Ok(())
//! # }
//! ```
//!
//! To wait for a lock in the order of arrival, see [`Redlock::acquire_within`]:
//!
//! ```
//! # use std::time::Duration;
//! # use redlock_core::*;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let locks = Redlock::builder().embedded(1).connect()?;
//! # let (name, ttl) = ("a".parse::<LockName>()?, Ttl::from_millis(10_000)?);
//! let held = locks.acquire(&name, ttl, AcquireOptions::default()).await?;
//! let options = AcquireOptions::default();
//! let waits = locks.acquire_within(&name, ttl, options, Duration::from_secs(5), || Ok(()));
//! let (next, _) = tokio::join!(waits, locks.release(&name, &held.token));
//! assert!(next?.token.fencing() > held.token.fencing());
//! # Ok(())
//! # }
//! ```
//!
//! # Map
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | [`Redlock`] | the facade: everything a user can do | how it is done |
//! | `builder`, `guard` | a [`Redlock`] from addresses; a lock that is released when it is dropped | how locks are acquired |
//! | `cluster` | the first start, restarted masters, changes of the configuration | waiting |
//! | `operations` | acquire, extend, release, inspect, list | Redis, HTTP |
//! | `wait` | the queue of waiters of each lock, fairness between processes, the plan of a handoff | votes, nodes, [`Redlock`] |
//! | `shared` | the state and the steps that all operations share | which operation uses them |
//! | `round` | one question to all nodes, and what the votes say | what the answer is for |
//! | `settings` | the settings of a [`Redlock`], and their check | how a [`Redlock`] uses them |
//! | `model` | values and arithmetic: names, tokens, clocks, quorum, validity | nodes, tokio |
//! | [`node`] | one master, in memory and on Redis | other nodes, quorum, retries |
//! | [`error`] | outcomes | status codes |
//!
//! Each module imports only modules below it. No two modules import each other.
//!
//! Nothing here knows HTTP, serde or environment variables. No table of held locks is kept. The
//! client sends its token with each extension and release, so any process over the same nodes can
//! carry them out.

#![warn(missing_docs)]

#[doc = include_str!("../ARCHITECTURE.md")]
pub mod architecture {}
mod builder;
mod cluster;
pub mod error;
mod guard;
#[cfg(feature = "bench-internals")]
#[doc(hidden)]
pub mod internals;
mod model;
pub mod node;
mod operations;
mod redlock;
mod round;
#[doc = include_str!("../SAFETY.md")]
pub mod safety {}
mod settings;
mod shared;
mod wait;

pub use builder::RedlockBuilder;
pub use cluster::bootstrap::Bootstrap;
pub use cluster::reconfigure;
pub use error::{HeldBy, LinePlace, LockError, NodeAnswer, NodeReport, SlotHolder, WaitLimit};
pub use guard::LockGuard;
pub use model::retry::RetryPolicy;
pub use model::slots::{SlotSet, Slots, SlotsError};
pub use model::types::{
    FencingToken, Info, InfoTooLong, InvalidFencingToken, InvalidToken, InvalidTtl, LockName,
    LockSet, LockToken, NameError, Nonce, Owner, SetError, Ttl,
};
pub use model::validity::{Lease, Remaining};
pub use model::{clock, quorum, retry, slots, types, validity};
pub use operations::acquire::{AcquireOptions, OwnerChoice};
pub use operations::inspect::{Inspection, NodeView};
pub use operations::list::{InvalidCursor, ListCursor, LockPage};
pub use redlock::Redlock;
pub use round::pending_releases::ReleaseAccount;
pub use round::votes::LockState;
pub use settings::{Env, Settings, SettingsError};
pub use wait::order::{Priority, QueueMode};
pub use wait::places::PlacePermit;
pub use wait::{Waiter, Waiting};
