//! A client of redlock-gateway: acquires a lock, extends it while work goes on, and tells at once when it is lost.
//!
//! ```no_run
//! # async fn work(token: u64) {}
//! # async fn example() -> Result<(), redlock_client::Error> {
//! use std::time::Duration;
//!
//! let client = redlock_client::Client::new("http://127.0.0.1:8080")?;
//! let guard = client.lock("reports/nightly").ttl(Duration::from_secs(30)).wait(Duration::from_secs(60)).acquire().await?;
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
//! What a guard promises: a lock that could not be extended is told lost while there is still the margin left of the time in
//! which nobody else can be granted it. One that was taken away (by force, or by its token) is told at the next extension, and may
//! be another's by then. What it cannot promise: that work which does not look stops. Give
//! [`Guard::fencing_token`] to whatever is written to, and let it refuse smaller ones.
//!
//! A release is tried for 5 s at most; then the lock ends with its TTL. An acquire that ends without an answer releases by its
//! `Idempotency-Key`, for 2 s at most; one whose future is dropped does so in the background.
//!
//! Leaves to others: what is done under the lock, and stopping it (`redlock run` kills a process).

mod client;
pub mod clock;
mod error;
mod guard;
mod http;
mod lock;

pub use self::client::{Client, ClientBuilder, LockStatus, NodeReport, Page};
pub use self::error::{Error, Loss, Problem};
pub use self::guard::Guard;
pub use self::lock::{Grant, Lock};
