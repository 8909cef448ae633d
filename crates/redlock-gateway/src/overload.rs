//! What keeps one client from being felt by the others: places, turns, quotas and budgets.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | [`capacity`] | how much of everything there may be, by memory and file descriptors | what it is used for |
//! | [`clients`] | what each client has taken of what all share | what it is taken for |
//! | `in_flight` | requests in flight, and who waits for a place among them | locks |
//! | `memory_budget` | who may store how much when the masters' memory is short | nodes, locks |
//! | `wait_share` | how many waiters each client may have | the queue of a lock |
//! | [`refusals`] | a summary of refused requests, in few log lines | why they were refused |

pub mod capacity;
pub mod clients;
pub(crate) mod in_flight;
pub(crate) mod memory_budget;
pub mod refusals;
pub(crate) mod wait_share;

pub use self::in_flight::{InFlight, RequestClass};
pub use self::memory_budget::MasterMemory;
pub use self::wait_share::WaitShare;
