//! A client of redlock-gateway: acquires a lock, extends it in the background, and reports its loss
//! at once. With the first release, `cargo add redlock-client` adds it. Until then, use a dependency
//! on Git: `redlock-client = { git = "https://github.com/redlock-gateway/redlock-gateway" }`.
//!
//! ```no_run
//! # async fn work(token: u64) {}
//! # async fn example() -> Result<(), redlock_client::Error> {
//! use std::time::Duration;
//!
//! let client = redlock_client::Client::new("http://127.0.0.1:8080")?;
//! let lock = client.lock("reports/nightly").ttl(Duration::from_secs(30));
//! let guard = lock.wait(Duration::from_secs(60)).acquire().await?;
//! tokio::select! {
//!     () = work(guard.fencing_token()) => guard.release().await?,
//!     loss = guard.lost() => eprintln!("stopped: {loss}"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! ```text
//!            acquire                 a third of the validity          margin
//!  sent ───────┬──────────────────────────────┬──────────────────────────┬──────┬─► time
//!              │ guard                        │ PATCH: a new deadline    │ lost │ deadline
//!                                             └─ 404, 409: lost now
//! ```
//!
//! What a guard promises: a lock that cannot be extended is reported lost at least the margin
//! before its deadline. Until the deadline nobody else can be granted the lock. A lock that was
//! taken away (by force, or by its token) is reported lost at the next extension; others may hold
//! it by then. A guard cannot stop work that does not check it. So give [`Guard::fencing_token`] to
//! the resource that is written to, and let the resource refuse smaller ones.
//!
//! An acquire that waits sends several requests to one gateway, which keeps its place in line. If
//! that gateway fails, the acquire lines up at the next one. [`Lock::on_waiting`] reports both.
//! [`Lock::priority`] and [`Lock::queue`] change the order of that line; [`Guard::waiters`] tells
//! how long it was at the last extension.
//!
//! If nothing listens at any URL, an acquire without a wait fails at once, and so do all calls of
//! [`Client`]. [`ClientBuilder::timeout`] bounds each call in all.
//!
//! The guards of one [`Client`] and its clones renew together: one `PATCH /locks` extends all locks
//! with the same TTL that are due at about the same time. Each guard still watches its own deadline.
//! If a gateway does not know that request, each guard extends its own lock.
//!
//! A release is tried for 5 s at most; then the lock ends with its TTL. If an acquire fails, and a
//! try had no answer, it releases by its `Idempotency-Key`, for 2 s at most. It does so even if a
//! later try was refused. An acquire whose future is dropped does so in the background.
//!
//! [`Client::watch`] follows a lock, or all locks with a prefix: who acquires, extends and releases
//! them, and who waits. It connects again after a cut, at the next gateway if there are several.
//!
//! A thread of this crate writes all its log lines (`tracing`), so an unread log holds up nothing.
//!
//! The work under the lock, and stopping it, is left to the caller (`redlock run` kills a process).

mod client;
pub mod clock;
mod error;
mod events;
mod guard;
mod http;
mod lock;
mod log;
mod names;
mod owner;
mod place;
mod renewal;
mod tls;
mod together;
mod waiting;
mod watch;

pub use redlock_api::{
    Health, LockList, LockSnapshot, LockState, LockStatus, NodeAnswer, NodeHealth, Problem,
    ProblemCode, SlotHolder, Waiter,
};

pub use self::client::{Answer, Client, ClientBuilder};
pub use self::error::{Error, Loss, LossReason};
pub use self::guard::Guard;
pub use self::lock::{Grant, Lock, Queue};
pub use self::owner::default_owner;
pub use self::waiting::Waiting;
pub use self::watch::{Snapshot, WatchEvent, Watched, Watching};
