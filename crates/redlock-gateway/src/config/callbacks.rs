//! The settings for callbacks, and the check of their combination.

use std::path::PathBuf;

use clap::Args;

use super::headings;
use super::value::{InvalidValue, listed, network, origins};
use crate::callbacks::{CallbackSettings, Networks};

#[derive(Debug, Clone, Args)]
pub(super) struct CallbackFlags {
    /// Allow callbacks to this origin, scheme://host[:port]; repeat for each; needs
    /// --callback-secret-file [default: none]
    ///
    /// A client names a `callback_url` of one of these origins in `POST /requests`. When the
    /// client's lock is ready, the gateway sends a signed POST there. The client's key needs the
    /// `callback` permission. The gateway follows no redirect, uses no proxy, and connects only to
    /// public addresses and to networks of --callback-network.
    #[arg(help_heading = headings::CALLBACKS)]
    #[arg(
        long = "callback-origin",
        value_name = "ORIGIN",
        env = "REDLOCK_CALLBACK_ORIGINS",
        value_delimiter = ','
    )]
    callback_origins: Vec<String>,
    /// Allow callbacks to this network, although it is not public, such as 10.0.0.0/8; repeat for
    /// each [default: none]
    ///
    /// Without this flag, callbacks reach no loopback, private, link-local or other special address.
    /// This holds for addresses in a URL and for those that DNS gives.
    #[arg(help_heading = headings::CALLBACKS)]
    #[arg(
        long = "callback-network",
        value_name = "CIDR",
        env = "REDLOCK_CALLBACK_NETWORKS",
        value_delimiter = ','
    )]
    callback_networks: Vec<String>,
    /// File with the secrets that sign callbacks, one on each line, at most 4: whsec_ and 24 to 64
    /// random bytes in base64 [default: none]
    ///
    /// Receivers verify the signature with the same secret and a Standard Webhooks library. Make a
    /// secret with: echo "whsec_$(openssl rand -base64 32)". With several secrets, each callback has
    /// one signature for each. To replace a secret, add the new one, update the receivers, then
    /// remove the old one. The gateway reads the file again when it changes, and on SIGHUP.
    #[arg(help_heading = headings::CALLBACKS)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_CALLBACK_SECRET_FILE")]
    callback_secret_file: Option<PathBuf>,
}

/// Flags of callbacks that do not go together, or cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallbackFlagsError {
    #[error("--callback-origin needs --callback-secret-file, because callbacks are signed")]
    WithoutSecret,
    #[error("{0} needs --callback-origin: without an origin, no callback is sent")]
    WithoutOrigin(&'static str),
    #[error(transparent)]
    Value(#[from] InvalidValue),
}

impl CallbackFlags {
    /// The settings, or `None` if no callbacks are sent.
    pub(super) fn resolve(&self) -> Result<Option<CallbackSettings>, CallbackFlagsError> {
        let origins = origins("--callback-origin", &self.callback_origins)?;
        let networks =
            listed(&self.callback_networks).map(|text| network("--callback-network", text));
        let networks = networks.collect::<Result<Vec<_>, InvalidValue>>()?;
        match &self.callback_secret_file {
            _ if origins.is_empty() && !networks.is_empty() => {
                Err(CallbackFlagsError::WithoutOrigin("--callback-network"))
            }
            Some(_) if origins.is_empty() => {
                Err(CallbackFlagsError::WithoutOrigin("--callback-secret-file"))
            }
            None if origins.is_empty() => Ok(None),
            None => Err(CallbackFlagsError::WithoutSecret),
            Some(path) => {
                let networks = Networks::new(networks);
                Ok(Some(CallbackSettings { origins, networks, secret_file: path.clone() }))
            }
        }
    }
}
