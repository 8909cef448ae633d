//! Who may do what. Keys have names, are stored as hashes and come from one file. Each has
//! permissions on lock names.
//!
//! A key's name is its principal. The tokens of a lock work only for the principal that acquired
//! it. So a key can be replaced without losing its locks, and a stolen token is useless with
//! another key. Without a keys file all callers are alike: they may do what a holder may. A forced
//! release is then possible on a loopback address only.
//!
//! This module does not know HTTP, and of locks only their names.

mod authenticator;
mod file;
mod key;
mod secret;
mod tests;

pub use self::authenticator::{AuthError, Authenticator, Caller, Credential};
pub use self::file::{EntryError, KeysError, KeysTextError, exposed_mode};
pub use self::key::{Keys, Verb};
pub use self::secret::{Secret, holds_secret, is_key_name};
