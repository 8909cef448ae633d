//! The TLS settings for clients and for nodes, and the check of their combinations.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use redlock_core::node::redis::{TlsIdentity, TlsSettings};

use super::headings;

#[derive(Debug, Clone, Args)]
pub(super) struct TlsFlags {
    /// Serve HTTPS with this certificate: PEM, the server's own first, then intermediate ones;
    /// needs --tls-key
    ///
    /// Every second the gateway checks whether the files of --tls-cert, --tls-key and
    /// --tls-client-ca have changed. It also reads them again on SIGHUP. New connections use the
    /// new content; if it cannot be used, they use the old one.
    #[arg(help_heading = headings::ADDRESSES)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_TLS_CERT")]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert: PEM, not encrypted
    #[arg(help_heading = headings::ADDRESSES)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_TLS_KEY")]
    tls_key: Option<PathBuf>,
    /// Accept client certificates that one of the authorities in this PEM file issued; needs
    /// --tls-cert and --auth-keys
    ///
    /// The certificate's subject selects the API key: the key that has this subject as its
    /// `certificate` in --auth-keys.
    #[arg(help_heading = headings::ADDRESSES)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_TLS_CLIENT_CA")]
    tls_client_ca: Option<PathBuf>,
    /// Offer HTTP/2 to HTTPS clients, next to HTTP/1.1
    ///
    /// With `--http2=false` the gateway offers only HTTP/1.1. Use it when a vulnerability in HTTP/2 is
    /// known and not yet fixed here. Browsers then open at most 6 event streams to one gateway.
    #[arg(help_heading = headings::ADDRESSES)]
    #[arg(long, env = "REDLOCK_HTTP2", action = ArgAction::Set)]
    #[arg(num_args = 0..=1, default_value = "true", default_missing_value = "true", require_equals = true)]
    http2: bool,
    /// PEM file with the authorities to trust for rediss:// nodes
    /// [default: those of the system]
    ///
    /// The gateway reads the files of --node-ca, --node-cert and --node-key for every connection to
    /// a node.
    #[arg(help_heading = headings::NODES)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_NODE_CA")]
    node_ca: Option<PathBuf>,
    /// Certificate to show to rediss:// nodes that require one: PEM; needs --node-key
    #[arg(help_heading = headings::NODES)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_NODE_CERT")]
    node_cert: Option<PathBuf>,
    /// The private key of --node-cert: PEM, not encrypted
    #[arg(help_heading = headings::NODES)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_NODE_KEY")]
    node_key: Option<PathBuf>,
}

/// Flags of TLS that do not go together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsFlagsError {
    #[error("{given}: {}: given without {missing}; they go together", path.display())]
    Alone { given: &'static str, missing: &'static str, path: PathBuf },
    #[error(
        "--tls-client-ca: {}: given without --tls-cert and --tls-key; a client can show a \
         certificate only over HTTPS",
        .0.display()
    )]
    ClientCaWithoutHttps(PathBuf),
    #[error("{0}: no --node is a rediss:// URL, so no connection would use it")]
    NoTlsNode(&'static str),
}

/// The files for HTTPS, and whether HTTP/2 is offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub client_ca: Option<PathBuf>,
    /// Whether HTTP/2 is offered.
    pub http2: bool,
}

impl TlsFlags {
    /// Checks the combination without reading the files. `any_tls`: whether a node has a rediss://
    /// URL.
    pub(super) fn resolve(
        self,
        any_tls: bool,
    ) -> Result<(Option<TlsFiles>, TlsSettings), TlsFlagsError> {
        let https = match both(("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key))? {
            Some((cert, key)) => {
                Some(TlsFiles { cert, key, client_ca: self.tls_client_ca, http2: self.http2 })
            }
            None => match self.tls_client_ca {
                Some(path) => return Err(TlsFlagsError::ClientCaWithoutHttps(path)),
                None => None,
            },
        };
        let identity = both(("--node-cert", self.node_cert), ("--node-key", self.node_key))?
            .map(|(certificate, key)| TlsIdentity { certificate, key });
        let node_tls = TlsSettings { authorities: self.node_ca, identity };
        if node_tls != TlsSettings::default() && !any_tls {
            let flags = if node_tls.authorities.is_some() {
                "--node-ca"
            } else {
                "--node-cert, --node-key"
            };
            return Err(TlsFlagsError::NoTlsNode(flags));
        }
        Ok((https, node_tls))
    }
}

type Given = (&'static str, Option<PathBuf>);

fn both(
    (one, first): Given,
    (other, second): Given,
) -> Result<Option<(PathBuf, PathBuf)>, TlsFlagsError> {
    let alone = |given, missing, path| Err(TlsFlagsError::Alone { given, missing, path });
    match (first, second) {
        (Some(first), Some(second)) => Ok(Some((first, second))),
        (None, None) => Ok(None),
        (Some(path), None) => alone(one, other, path),
        (None, Some(path)) => alone(other, one, path),
    }
}
