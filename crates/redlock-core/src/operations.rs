//! What a client can do with a lock: one module for each operation.
//!
//! | module | what it is for | what it does not know |
//! | --- | --- | --- |
//! | `acquire` | one attempt, and the loop around attempts: split votes, retries, waiting | Redis, HTTP |
//! | `extend` | extends a lock, and repairs it on nodes that lost it | who asked |
//! | `release` | releases a lock, or hands it to the next waiter | who may have the lock next |
//! | `inspect`, `list` | show locks to people | how locks are acquired |
//! | `slots` | reads the slots of a lock and chooses among them | queues, how they are acquired |

pub(crate) mod acquire;
pub(crate) mod extend;
pub(crate) mod inspect;
pub(crate) mod list;
pub(crate) mod release;
pub(crate) mod slots;
