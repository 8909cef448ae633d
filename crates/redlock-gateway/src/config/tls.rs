//! The settings of TLS, towards clients and towards nodes: which go together, and whether their files can be used.

use std::path::PathBuf;

use clap::Args;
use redlock_core::node::redis::{TlsError, TlsIdentity, TlsSettings};

use super::{ConfigError, Nodes};

#[derive(Debug, Clone, Default, Args)]
pub struct TlsFlags {
    /// Serve HTTPS with this certificate: PEM, the server's own first, then intermediate ones; needs --tls-key
    ///
    /// This file and those of --tls-key and --tls-client-ca are looked at every second, and read again on SIGHUP: new
    /// connections get what is in them then, unless it cannot be used.
    #[arg(long, value_name = "FILE", env = "REDLOCK_TLS_CERT")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert: PEM, not encrypted
    #[arg(long, value_name = "FILE", env = "REDLOCK_TLS_KEY")]
    pub tls_key: Option<PathBuf>,
    /// Let clients show a certificate, which must come from one of the authorities in this PEM file; needs --tls-cert and --auth-keys
    ///
    /// It stands for the key in the file of --auth-keys that names its subject as its `certificate`.
    #[arg(long, value_name = "FILE", env = "REDLOCK_TLS_CLIENT_CA")]
    pub tls_client_ca: Option<PathBuf>,
    /// Authorities that the certificates of rediss:// nodes must come from: PEM [default: those of the system]
    ///
    /// This file and those of --node-cert and --node-key are read for every connection to a node.
    #[arg(long, value_name = "FILE", env = "REDLOCK_NODE_CA")]
    pub node_ca: Option<PathBuf>,
    /// Certificate to show to rediss:// nodes that want one: PEM; needs --node-key
    #[arg(long, value_name = "FILE", env = "REDLOCK_NODE_CERT")]
    pub node_cert: Option<PathBuf>,
    /// The private key of --node-cert: PEM, not encrypted
    #[arg(long, value_name = "FILE", env = "REDLOCK_NODE_KEY")]
    pub node_key: Option<PathBuf>,
}

/// What HTTPS is served with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub client_ca: Option<PathBuf>,
}

impl TlsFlags {
    pub(super) fn or(self, other: Self) -> Self {
        Self {
            tls_cert: self.tls_cert.or(other.tls_cert),
            tls_key: self.tls_key.or(other.tls_key),
            tls_client_ca: self.tls_client_ca.or(other.tls_client_ca),
            node_ca: self.node_ca.or(other.node_ca),
            node_cert: self.node_cert.or(other.node_cert),
            node_key: self.node_key.or(other.node_key),
        }
    }

    /// Which go together; the files are not looked at.
    pub(super) fn settle(self, nodes: &Nodes) -> Result<(Option<TlsFiles>, TlsSettings), ConfigError> {
        let https = match both(("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key))? {
            Some((cert, key)) => Some(TlsFiles { cert, key, client_ca: self.tls_client_ca }),
            None => match self.tls_client_ca {
                Some(path) => {
                    let path = path.display();
                    let why = "given without --tls-cert and --tls-key; only with HTTPS can a client show a certificate";
                    return Err(ConfigError(format!("--tls-client-ca: {path}: {why}")));
                }
                None => None,
            },
        };
        let identity = both(("--node-cert", self.node_cert), ("--node-key", self.node_key))?
            .map(|(certificate, key)| TlsIdentity { certificate, key });
        let node_tls = TlsSettings { authorities: self.node_ca, identity };
        let any_tls = matches!(nodes, Nodes::Redis(urls) if urls.iter().any(|url| url.is_tls()));
        if node_tls != TlsSettings::default() && !any_tls {
            let flags = if node_tls.authorities.is_some() { "--node-ca" } else { "--node-cert, --node-key" };
            return Err(ConfigError(format!(
                "{flags}: no --node is a rediss:// URL, so nothing would be secured by it"
            )));
        }
        Ok((https, node_tls))
    }
}

type Given = (&'static str, Option<PathBuf>);

fn both((one, first): Given, (other, second): Given) -> Result<Option<(PathBuf, PathBuf)>, ConfigError> {
    let alone = |given: &str, missing: &str, path: PathBuf| {
        ConfigError(format!("{given}: {}: given without {missing}; they go together", path.display()))
    };
    match (first, second) {
        (Some(first), Some(second)) => Ok(Some((first, second))),
        (None, None) => Ok(None),
        (Some(path), None) => Err(alone(one, other, path)),
        (None, Some(path)) => Err(alone(other, one, path)),
    }
}

/// Whether the files can be used as they stand now.
pub(super) fn check(https: Option<&TlsFiles>, nodes: &TlsSettings) -> Result<(), ConfigError> {
    https.map_or(Ok(()), crate::tls::check).map_err(ConfigError)?;
    nodes.check().map_err(|error| {
        let flag = match error {
            TlsError::Authorities(_) => "--node-ca",
            TlsError::Certificate(_) => "--node-cert",
            TlsError::Key(_) => "--node-key",
        };
        ConfigError(format!("{flag}: {error}"))
    })
}
