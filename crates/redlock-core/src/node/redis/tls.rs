//! TLS towards a master: trusted authorities, and our client certificate.
//!
//! The files are read for every connection, so a new connection uses replaced files. With an
//! unusable file the new connection fails; open connections go on.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fred::rustls::crypto::aws_lc_rs;
use fred::rustls::pki_types::pem::PemObject;
use fred::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use fred::rustls::{ClientConfig, Error, InconsistentKeys, RootCertStore};
use fred::rustls_native_certs::load_native_certs;
use fred::types::config::TlsConnector;

use crate::node::Remedy;

/// TLS settings for `rediss://` nodes; all files are PEM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsSettings {
    /// The only trusted authorities for node certificates; those of the system when `None`.
    pub authorities: Option<PathBuf>,
    /// The certificate for nodes that require one.
    pub identity: Option<TlsIdentity>,
}

/// Our client certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsIdentity {
    /// The certificate, followed by the intermediate certificates.
    pub certificate: PathBuf,
    /// The certificate's key, not encrypted.
    pub key: PathBuf,
}

/// An unusable file. The variant is the file's purpose; the text has its path and the reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsError {
    /// [`TlsSettings::authorities`], or the system's.
    #[error("{0}")]
    Authorities(String),
    /// [`TlsIdentity::certificate`].
    #[error("{0}")]
    Certificate(String),
    /// [`TlsIdentity::key`].
    #[error("{0}")]
    Key(String),
}

impl TlsSettings {
    /// Checks the configured files as they are now.
    ///
    /// # Errors
    /// A file is missing or unusable.
    pub fn check(&self) -> Result<(), TlsError> {
        let authorities = match &self.authorities {
            Some(path) => only(path)?,
            None => RootCertStore::empty(),
        };
        self.with_authorities(authorities).map(drop)
    }

    fn config(&self) -> Result<ClientConfig, TlsError> {
        self.with_authorities(match &self.authorities {
            Some(path) => only(path)?,
            None => of_the_system()?,
        })
    }

    fn with_authorities(&self, authorities: RootCertStore) -> Result<ClientConfig, TlsError> {
        // The provider is named, because a second provider in the process would make the default
        // ambiguous.
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::Authorities(error.to_string()))?
            .with_root_certificates(authorities);
        let Some(TlsIdentity { certificate, key }) = &self.identity else {
            return Ok(config.with_no_client_auth());
        };
        let chain = certificates(certificate).map_err(TlsError::Certificate)?;
        let secret = read(key).map_err(TlsError::Key)?;
        let secret = PrivateKeyDer::from_pem_slice(&secret).map_err(|_| {
            TlsError::Key(format!(
                "{}: no private key in it; expected PEM that is not encrypted",
                key.display()
            ))
        })?;
        config.with_client_auth_cert(chain, secret).map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                let key = key.display();
                let certificate = certificate.display();
                TlsError::Key(format!("{key}: does not belong to the certificate in {certificate}"))
            }
            Error::InvalidCertificate(_) => {
                TlsError::Certificate(format!("{}: {error}", certificate.display()))
            }
            error => TlsError::Key(format!("{}: {error}", key.display())),
        })
    }
}

/// The remedy for a failed handshake. The client keeps only the text of its error.
pub(super) fn remedy(failure: &str) -> Option<Remedy> {
    let cases = [
        ("InvalidCertificate(", Remedy::TrustNodeCertificate),
        ("AlertReceived(CertificateRequired)", Remedy::GiveClientCertificate),
        ("AlertReceived(UnknownCA)", Remedy::TrustClientAuthority),
        ("AlertReceived(BadCertificate)", Remedy::ReplaceClientCertificate),
        ("AlertReceived(CertificateExpired)", Remedy::RenewClientCertificate),
    ];
    cases.into_iter().find(|(word, _)| failure.contains(word)).map(|(_, remedy)| remedy)
}

/// Reads the files on a blocking thread, because they may be on slow storage.
pub(super) async fn connector(settings: &TlsSettings) -> Result<TlsConnector, TlsError> {
    let settings = settings.clone();
    match tokio::task::spawn_blocking(move || settings.config()).await {
        Ok(config) => config.map(TlsConnector::from),
        Err(error) => Err(TlsError::Authorities(error.to_string())),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let pem = read(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let found = found.map_err(|error| format!("{}: {error}; expected PEM", path.display()))?;
    if found.is_empty() {
        return Err(format!("{}: no certificate in it; expected PEM", path.display()));
    }
    Ok(found)
}

fn only(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(path).map_err(TlsError::Authorities)? {
        store
            .add(certificate)
            .map_err(|error| TlsError::Authorities(format!("{}: {error}", path.display())))?;
    }
    Ok(store)
}

/// The usable certificates of the system. Unusable certificates are skipped, because a system often
/// has a few among many.
fn of_the_system() -> Result<RootCertStore, TlsError> {
    let found = load_native_certs();
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(found.certs);
    match found.errors.first() {
        Some(error) if store.is_empty() => {
            Err(TlsError::Authorities(format!("the system's certificates: {error}")))
        }
        _ => Ok(store),
    }
}
