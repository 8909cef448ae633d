//! Who may do what. Keys are named, stored as hashes and read from one file; each has permissions on lock names.
//!
//! A name is the principal: the tokens of a lock work only for the principal that acquired it, so a key can be replaced
//! without its locks being lost, and a stolen token is worth nothing to another key. Without a file everybody is the
//! same, may do all that a holder may, and nobody may release by force.
//!
//! Knows nothing of HTTP, and of locks only their names.

mod authenticator;
mod file;
mod key;
mod secret;
mod tests;

pub use self::authenticator::{AuthError, Authenticator, Caller, Credential};
pub use self::file::exposed_mode;
pub use self::key::{Keys, Verb};
pub use self::secret::{Secret, holds_secret, is_key_name};
