//! Keeps one client's load from slowing the others: limits, fair queueing, quotas and budgets.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | [`capacity`] | the limits that follow from memory and file descriptors | what is limited |
//! | [`clients`] | each client's share of the common resources | what the resources are used for |
//! | `in_flight` | requests in flight, and the permits that bound them | which locks they are about |
//! | `large_messages` | the bytes of large requests and answers under way | what they say |
//! | `long_lived` | the connections of waiters and event streams | which locks they are about |
//! | `memory_budget` | each client's limit when the masters' memory is short | nodes, locks |
//! | [`shares`] | the table of what clients can pile up | how the limits are kept |
//! | `wait_share` | how many waiters and places in line each client may have | the queue of a lock |
//! | [`refusals`] | a summary of refused requests, in few log lines | why they were refused |
//!
//! # The accounting of one client
//!
//! Each count is entered at one point. A permit leaves its count when it is dropped.
//!
//! | count | entered by | left by |
//! | --- | --- | --- |
//! | connections | `Connections::enter` | drop of the `ConnectionSlot` |
//! | requests in the fair queue | `FairQueue::take` | end of that call |
//! | in flight, running | `Requests::enter` | drop of [`InFlight`], or `InFlight::wait` |
//! | waiting, locks waited for | `WaitShare::take` | drop of the `WaitPermit` |
//! | connections of waiters and streams | `LongLived::begin_wait`, `LongLived::begin_stream` | drop of the permit |
//! | places in line | `WaitShare::take_place` | drop of the `LinePermit`, by the core |
//! | listings | `Listings::begin` | drop of its permits |
//! | event streams | `Watches::begin_stream` | drop of the `StreamPermit` |
//! | bytes of large requests and answers | `LargeMessages::take` | drop of the permit, with the bytes |
//! | locks watched by name | `Watches::watch` | drop of the `Watcher` |
//! | deferred requests | `Gateway::defer` | the end of the request |
//! | callbacks under way | `Callbacks::send` | end of that call |
//! | locks with a pending release | the core, when a release fails on a master | success of a retry, or the end of its time |
//! | leases in flight of `PATCH /locks` | `Requests::enter_lease` | drop of [`InFlight`] |
//! | quota of an acquire | `Client::reserve` | `Reservation`: granted, not granted, or dropped |
//! | quota of an extension | `Client::extended` | the end of the lock |
//! | quota of a release | `Client::begin_release` | `PendingRelease`: succeeded, or dropped |

pub mod capacity;
pub mod clients;
pub(crate) mod in_flight;
pub(crate) mod large_messages;
pub(crate) mod long_lived;
pub(crate) mod memory_budget;
pub mod refusals;
pub mod shares;
pub(crate) mod wait_share;

pub use self::in_flight::{InFlight, RequestClass};
pub use self::memory_budget::MasterMemory;
pub use self::wait_share::WaitShare;
