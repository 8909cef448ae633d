//! The settings for callbacks, and the check of their combination.

use std::path::PathBuf;

use clap::Args;

use super::origin::origins;
use super::value::{InvalidValue, listed, network};
use crate::callbacks::{CallbackSettings, Networks};

#[derive(Debug, Clone, Args)]
pub(super) struct CallbackFlags {
    /// Origin that callbacks may go to, scheme://host[:port]; repeat for each; needs
    /// --callback-secret-file [default: none]
    ///
    /// A client with the `callback` permission gives a `callback_url` of one of these origins in a
    /// request with `Prefer: respond-async`. The gateway announces there that the lock is the
    /// client's. It follows no redirects, uses no proxy, and connects to public addresses only.
    #[arg(
        long = "callback-origin",
        value_name = "ORIGIN",
        env = "REDLOCK_CALLBACK_ORIGINS",
        value_delimiter = ','
    )]
    callback_origins: Vec<String>,
    /// Network that callbacks may go to although it is not public, such as 10.0.0.0/8; repeat for
    /// each [default: none]
    ///
    /// Loopback, private and link-local addresses, and all others that are not public, are refused
    /// without this flag, also when a name resolves to them.
    #[arg(
        long = "callback-network",
        value_name = "CIDR",
        env = "REDLOCK_CALLBACK_NETWORKS",
        value_delimiter = ','
    )]
    callback_networks: Vec<String>,
    /// File with the secrets that sign callbacks, one on each line: whsec_ and 24 to 64 random bytes
    /// in base64 [default: none]
    ///
    /// Receivers check the signature with a library of Standard Webhooks and the same secret. Make a
    /// secret with: echo "whsec_$(openssl rand -base64 32)". While the file has several secrets,
    /// each of them signs: so a secret can be replaced without a gap. The gateway reads the file
    /// again when it changes, and on SIGHUP.
    #[arg(long, value_name = "FILE", env = "REDLOCK_CALLBACK_SECRET_FILE")]
    callback_secret_file: Option<PathBuf>,
}

/// Flags of callbacks that do not go together, or cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallbackFlagsError {
    #[error("--callback-origin: given without --callback-secret-file; receivers need a signature")]
    WithoutSecret,
    #[error("{0}: given without --callback-origin, so no callback would be sent")]
    WithoutOrigin(&'static str),
}

impl CallbackFlags {
    /// The settings, or `None` if no callbacks are sent.
    pub(super) fn resolve(&self) -> Result<Option<CallbackSettings>, super::ConfigError> {
        let origins = origins("--callback-origin", &self.callback_origins)?;
        let networks =
            listed(&self.callback_networks).map(|text| network("--callback-network", text));
        let networks = networks.collect::<Result<Vec<_>, InvalidValue>>()?;
        match &self.callback_secret_file {
            _ if origins.is_empty() && !networks.is_empty() => {
                Err(CallbackFlagsError::WithoutOrigin("--callback-network").into())
            }
            Some(_) if origins.is_empty() => {
                Err(CallbackFlagsError::WithoutOrigin("--callback-secret-file").into())
            }
            None if origins.is_empty() => Ok(None),
            None => Err(CallbackFlagsError::WithoutSecret.into()),
            Some(path) => {
                let networks = Networks::new(networks);
                Ok(Some(CallbackSettings { origins, networks, secret_file: path.clone() }))
            }
        }
    }
}
