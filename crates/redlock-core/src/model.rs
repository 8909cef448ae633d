//! Values and arithmetic. Nothing here waits, asks a node or starts a task.
//!
//! | module | what it is for |
//! | --- | --- |
//! | [`types`] | names, owners, tokens and TTLs: parsed once, with their limits |
//! | [`clock`] | time and randomness as traits, and the clock that mints fencing tokens |
//! | [`quorum`] | whether enough votes have arrived, and whether they still can |
//! | [`validity`] | how long a grant is valid |
//! | [`slots`] | how many may hold a lock at once, and which of them hold it |
//! | [`retry`] | when a refused acquire tries again |

pub mod clock;
pub mod quorum;
pub mod retry;
pub mod slots;
pub mod types;
pub mod validity;
