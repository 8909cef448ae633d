//! Who may do what. API keys come from one file, which has their names, hashes and permissions on
//! lock names.
//!
//! A key's name is its principal. The tokens of a lock work only for the principal that acquired
//! it. So a key can be replaced without losing its locks, and a stolen token is useless with
//! another key. Without a keys file, every caller may do everything, except that a forced release
//! is possible only if the gateway listens on a loopback address.
//!
//! This module does not know HTTP. Of locks it knows only the names.

mod authenticator;
mod file;
mod key;
mod secret;
mod tests;

pub(crate) use self::authenticator::KeysMetrics;
pub use self::authenticator::{AuthError, Authenticator, Caller, Credential};
pub use self::file::{EntryError, KeysError, KeysTextError, exposed_mode};
pub use self::key::{Keys, RateExceeded, Verb};
pub use self::secret::{Secret, holds_secret, is_key_name};
