//! The settings of TLS, towards clients and towards nodes, and which go together.

use std::path::PathBuf;

use clap::Args;
use redlock_core::node::redis::{TlsIdentity, TlsSettings};

#[derive(Debug, Clone, Args)]
pub(super) struct TlsFlags {
    /// Serve HTTPS with this certificate: PEM, the server's own first, then intermediate ones; needs --tls-key
    ///
    /// This file and those of --tls-key and --tls-client-ca are looked at every second, and read again on SIGHUP: new
    /// connections get what is in them then, unless it cannot be used.
    #[arg(long, value_name = "FILE", env = "REDLOCK_TLS_CERT")]
    tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert: PEM, not encrypted
    #[arg(long, value_name = "FILE", env = "REDLOCK_TLS_KEY")]
    tls_key: Option<PathBuf>,
    /// Let clients show a certificate, which must come from one of the authorities in this PEM file; needs --tls-cert and --auth-keys
    ///
    /// It stands for the key in the file of --auth-keys that names its subject as its `certificate`.
    #[arg(long, value_name = "FILE", env = "REDLOCK_TLS_CLIENT_CA")]
    tls_client_ca: Option<PathBuf>,
    /// Authorities that the certificates of rediss:// nodes must come from: PEM [default: those of the system]
    ///
    /// This file and those of --node-cert and --node-key are read for every connection to a node.
    #[arg(long, value_name = "FILE", env = "REDLOCK_NODE_CA")]
    node_ca: Option<PathBuf>,
    /// Certificate to show to rediss:// nodes that want one: PEM; needs --node-key
    #[arg(long, value_name = "FILE", env = "REDLOCK_NODE_CERT")]
    node_cert: Option<PathBuf>,
    /// The private key of --node-cert: PEM, not encrypted
    #[arg(long, value_name = "FILE", env = "REDLOCK_NODE_KEY")]
    node_key: Option<PathBuf>,
}

/// What HTTPS is served with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub client_ca: Option<PathBuf>,
}

impl TlsFlags {
    /// Which go together; the files are not looked at. `any_tls`: whether a node is a rediss:// URL.
    pub(super) fn resolve(self, any_tls: bool) -> Result<(Option<TlsFiles>, TlsSettings), String> {
        let https = match both(("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key))? {
            Some((cert, key)) => Some(TlsFiles { cert, key, client_ca: self.tls_client_ca }),
            None => match self.tls_client_ca {
                Some(path) => {
                    let path = path.display();
                    let why = "given without --tls-cert and --tls-key; only with HTTPS can a client show a certificate";
                    return Err(format!("--tls-client-ca: {path}: {why}"));
                }
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
            return Err(format!(
                "{flags}: no --node is a rediss:// URL, so nothing would be secured by it"
            ));
        }
        Ok((https, node_tls))
    }
}

type Given = (&'static str, Option<PathBuf>);

fn both((one, first): Given, (other, second): Given) -> Result<Option<(PathBuf, PathBuf)>, String> {
    let alone = |given: &str, missing: &str, path: PathBuf| {
        Err(format!("{given}: {}: given without {missing}; they go together", path.display()))
    };
    match (first, second) {
        (Some(first), Some(second)) => Ok(Some((first, second))),
        (None, None) => Ok(None),
        (Some(path), None) => alone(one, other, path),
        (None, Some(path)) => alone(other, one, path),
    }
}
