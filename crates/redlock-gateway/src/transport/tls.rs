//! HTTPS: the server's configuration from its files, and the subject of a client's certificate.
//!
//! When the files change, new connections get the new certificate; open ones keep theirs. If the
//! new files cannot be used, the previous certificate stays, and the log has the reason. With
//! `--tls-client-ca`, a client may show a certificate of its own. If this certificate does not
//! verify, the handshake fails.
//!
//! This module does not know connections.

mod subject;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use metrics::{Counter, Gauge};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{
    NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier,
};
use tokio_rustls::rustls::{Error, InconsistentKeys, RootCertStore, ServerConfig};
pub(crate) use tokio_rustls::server::TlsStream;
use x509_cert::Certificate;
use x509_cert::der::Decode;

use crate::config::TlsFiles;
use crate::reload::{Content, ReadError, Reload, Watched, read};

/// Why HTTPS cannot be served with its files. Each text has the flag and the path, and contains the
/// text of its source.
#[derive(Debug, thiserror::Error)]
pub enum HttpsError {
    #[error("--tls-cert, --tls-key: not read")]
    NotRead,
    #[error("{flag}: {}: {source}", path.display())]
    Unreadable { flag: &'static str, path: PathBuf, source: ReadError },
    #[error("{flag}: {}: {source}; expected PEM", path.display())]
    Pem { flag: &'static str, path: PathBuf, source: pem::Error },
    #[error("{flag}: {}: no certificate in it; expected PEM", path.display())]
    NoCertificate { flag: &'static str, path: PathBuf },
    #[error("--tls-key: {}: no private key in it; expected PEM that is not encrypted", .0.display())]
    NoKey(PathBuf),
    #[error("--tls-client-ca: {}: {source}", path.display())]
    Authority { path: PathBuf, source: Error },
    #[error("--tls-client-ca: {}: {source}", path.display())]
    Authorities { path: PathBuf, source: VerifierBuilderError },
    #[error(transparent)]
    Protocol(Error),
    #[error(
        "--tls-key: {}: does not belong to the certificate of --tls-cert, {}",
        key.display(),
        cert.display()
    )]
    KeyMismatch { key: PathBuf, cert: PathBuf },
    #[error("--tls-cert: {}: {source}", path.display())]
    Certificate { path: PathBuf, source: Error },
    #[error("--tls-key: {}: {source}", path.display())]
    Key { path: PathBuf, source: Error },
}

/// The configuration for new connections.
pub(crate) type CurrentConfig = Arc<ArcSwap<ServerConfig>>;

/// The names of HTTP/2 and HTTP/1.1 in the handshake (ALPN, RFC 7301).
const HTTP_2: &[u8] = b"h2";
const HTTP_1: &[u8] = b"http/1.1";

/// Metrics of the certificate files.
pub(crate) struct CertificateMetrics {
    /// When the server's certificate ends, in seconds since 1970.
    pub(crate) expiry: Gauge,
    pub(crate) failures: Counter,
}

/// Loads the files, and spawns a task that reloads them on change. To be called on a tokio runtime.
///
/// # Errors
/// A file cannot be read or used.
pub(crate) fn follow(
    files: &TlsFiles,
    reload: &Reload,
    metrics: CertificateMetrics,
    tasks: &mut JoinSet<()>,
) -> Result<CurrentConfig, HttpsError> {
    let mut watched = Watched::new(paths(files), reload);
    let current = Arc::new(ArcSwap::from_pointee(configuration(files, watched.contents())?));
    metrics.expiry.set(expiry(files, watched.contents()));
    let files = files.clone();
    let served = current.clone();
    tasks.spawn(async move {
        loop {
            watched.changed().await;
            match configuration(&files, watched.contents()) {
                Ok(config) => {
                    served.store(Arc::new(config));
                    metrics.expiry.set(expiry(&files, watched.contents()));
                    let cert = files.cert.display();
                    tracing::info!(%cert, "new connections get the certificate just read");
                }
                Err(error) => {
                    metrics.failures.increment(1);
                    tracing::error!(
                        error = error.to_string(),
                        "the new certificate files cannot be used: the previous certificate stays"
                    );
                }
            }
        }
    });
    Ok(current)
}

/// A client's certificate, which was verified when its connection began.
#[derive(Debug)]
pub(crate) struct ClientCertificate {
    /// In the notation of [`subject`].
    pub(crate) subject: String,
    /// The last moment at which the certificate is valid. Connections may outlive it.
    pub(crate) ends: SystemTime,
}

/// Completes the handshake of a new connection.
pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
    config: &CurrentConfig,
    stream: S,
) -> io::Result<TlsStream<S>> {
    TlsAcceptor::from(config.load_full()).accept(stream).await
}

/// Whether client and gateway have agreed on HTTP/2 in the handshake.
pub(crate) fn speaks_http2<S>(stream: &TlsStream<S>) -> bool {
    stream.get_ref().1.alpn_protocol() == Some(HTTP_2)
}

/// The client's certificate. `None` if the client has shown no certificate, or one without a
/// subject.
pub(crate) fn client_certificate<S>(
    stream: &TlsStream<S>,
) -> io::Result<Option<ClientCertificate>> {
    let Some(shown) = stream.get_ref().1.peer_certificates().and_then(<[_]>::first) else {
        return Ok(None);
    };
    let shown = Certificate::from_der(shown).map_err(io::Error::other)?;
    let subject = subject::subject(&shown).map_err(io::Error::other)?;
    let ends = UNIX_EPOCH + shown.tbs_certificate().validity().not_after.to_unix_duration();
    Ok(subject.map(|subject| ClientCertificate { subject, ends }))
}

/// Checks whether HTTPS could be served with these files.
///
/// # Errors
/// A file cannot be read or used.
pub(crate) fn check(files: &TlsFiles) -> Result<(), HttpsError> {
    configuration(files, &read(&paths(files))).map(drop)
}

fn paths(files: &TlsFiles) -> Vec<PathBuf> {
    [Some(&files.cert), Some(&files.key), files.client_ca.as_ref()]
        .into_iter()
        .flatten()
        .cloned()
        .collect()
}

/// The end of the server's certificate, in seconds since 1970; 0 if unknown.
fn expiry(files: &TlsFiles, contents: &[Content]) -> f64 {
    let chain =
        contents.first().and_then(|cert| certificates("--tls-cert", &files.cert, cert).ok());
    let own = chain.and_then(|chain| Certificate::from_der(chain.first()?).ok());
    own.map_or(0.0, |own| {
        own.tbs_certificate().validity().not_after.to_unix_duration().as_secs_f64()
    })
}

/// Builds the configuration from the files' contents, in the order of [`paths`].
fn configuration(files: &TlsFiles, contents: &[Content]) -> Result<ServerConfig, HttpsError> {
    let [cert, key, client_ca @ ..] = contents else {
        return Err(HttpsError::NotRead);
    };
    let chain = certificates("--tls-cert", &files.cert, cert)?;
    let key = readable("--tls-key", &files.key, key)?;
    let key =
        PrivateKeyDer::from_pem_slice(key).map_err(|_| HttpsError::NoKey(files.key.clone()))?;
    let provider = Arc::new(aws_lc_rs::default_provider());
    let clients = match (&files.client_ca, client_ca) {
        (Some(path), [content]) => {
            let mut trusted = RootCertStore::empty();
            for certificate in certificates("--tls-client-ca", path, content)? {
                trusted
                    .add(certificate)
                    .map_err(|source| HttpsError::Authority { path: path.clone(), source })?;
            }
            let verifier =
                WebPkiClientVerifier::builder_with_provider(Arc::new(trusted), provider.clone());
            // A client without a certificate is let in to the handshake: it may have an API key
            // instead.
            verifier
                .allow_unauthenticated()
                .build()
                .map_err(|source| HttpsError::Authorities { path: path.clone(), source })?
        }
        _ => WebPkiClientVerifier::no_client_auth(),
    };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(HttpsError::Protocol)?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                HttpsError::KeyMismatch { key: files.key.clone(), cert: files.cert.clone() }
            }
            source @ Error::InvalidCertificate(_) => {
                HttpsError::Certificate { path: files.cert.clone(), source }
            }
            source => HttpsError::Key { path: files.key.clone(), source },
        })?;
    let protocols: &[&[u8]] = if files.http2 { &[HTTP_2, HTTP_1] } else { &[HTTP_1] };
    config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
    if files.client_ca.is_some() {
        // Sessions cannot be resumed, because a resumed session would not check the client's
        // certificate again.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    Ok(config)
}

/// The content of a file, if it could be read.
fn readable<'a>(
    flag: &'static str,
    path: &Path,
    content: &'a Content,
) -> Result<&'a [u8], HttpsError> {
    let content = content.as_deref();
    content.map_err(|error| HttpsError::Unreadable {
        flag,
        path: path.to_owned(),
        source: error.clone(),
    })
}

fn certificates(
    flag: &'static str,
    path: &Path,
    content: &Content,
) -> Result<Vec<CertificateDer<'static>>, HttpsError> {
    let pem = readable(flag, path, content)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|source| HttpsError::Pem { flag, path: path.to_owned(), source })?;
    if found.is_empty() {
        return Err(HttpsError::NoCertificate { flag, path: path.to_owned() });
    }
    Ok(found)
}
