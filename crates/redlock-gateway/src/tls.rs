//! HTTPS: the handshake of each connection, with the certificate that stands in the files.
//!
//! When the files change, new connections get the new certificate; those that are open go on with what they began with. A
//! certificate that cannot be used is not taken: the one before stays, and the log says why. Clients may show a certificate
//! of their own, where an authority for them is given; one that does not verify ends the handshake.
//!
//! It does not know what is said on a connection.

mod subject;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio_rustls::rustls::{Error, InconsistentKeys, RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;

use crate::config::TlsFiles;
use crate::peer::{Peer, Shared};
use crate::reload::{Content, Reload, Watched, read};

/// How long a handshake may take. It has a place among the connections meanwhile.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// A connection after its handshake.
pub(crate) type Encrypted = TlsStream<Shared>;

/// Shakes hands with the configuration of the moment; `None` once nobody new is taken.
#[derive(Clone)]
pub(crate) struct Https {
    current: watch::Receiver<Option<Arc<ServerConfig>>>,
    change: Arc<watch::Sender<Option<Arc<ServerConfig>>>>,
}

impl Https {
    /// With what stands in the files, from now on; must be called on a tokio runtime.
    pub(crate) fn start(files: &TlsFiles, reload: &Reload) -> Result<Self, String> {
        let watched = Watched::new(paths(files), reload);
        let first = configuration(files, watched.contents())?;
        let (change, current) = watch::channel(Some(Arc::new(first)));
        let change = Arc::new(change);
        tokio::spawn(follow(files.clone(), watched, change.clone()));
        Ok(Self { current, change })
    }

    /// Ends handshakes that are under way, and begins none any more.
    pub(crate) fn close(&self) {
        self.change.send_replace(None);
    }

    /// A connection that is ready to be used, and who is at its other end.
    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<(Encrypted, Peer)> {
        let (stream, peer) = Shared::new(stream)?;
        let accepted = self.shake_hands(stream).await.and_then(|stream| {
            let shown = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let subject = shown.map(subject::subject).transpose().map_err(io::Error::other)?.flatten();
            Ok((stream, peer.clone().known_as(subject)))
        });
        match &accepted {
            Ok((_, peer)) => {
                if let Some(subject) = peer.certificate_subject() {
                    tracing::debug!(client = %peer.address(), subject, "a client has shown its certificate");
                }
            }
            Err(why) => tracing::debug!(client = %peer.address(), %why, "a TLS handshake failed"),
        }
        accepted
    }

    async fn shake_hands(&self, stream: Shared) -> io::Result<Encrypted> {
        let mut current = self.current.clone();
        let closed = || io::Error::other("the gateway takes no new connections");
        let config = current.borrow_and_update().clone().ok_or_else(closed)?;
        tokio::select! {
            shaken = tokio::time::timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)) => shaken?,
            _ = current.wait_for(Option::is_none) => Err(closed()),
        }
    }
}

/// Whether HTTPS could be served with these files.
pub(crate) fn check(files: &TlsFiles) -> Result<(), String> {
    configuration(files, &read(&paths(files))).map(drop)
}

/// Until the server is gone.
async fn follow(files: TlsFiles, mut watched: Watched, change: Arc<watch::Sender<Option<Arc<ServerConfig>>>>) {
    loop {
        tokio::select! {
            () = watched.changed() => {}
            () = change.closed() => return,
        }
        let cert = files.cert.display();
        match configuration(&files, watched.contents()) {
            Ok(config) => {
                let serves = change.send_if_modified(|current| {
                    let serves = current.is_some();
                    *current = serves.then(|| Arc::new(config));
                    serves
                });
                if serves {
                    tracing::info!(%cert, "new connections get the certificate that was read now");
                }
            }
            Err(error) => tracing::error!(error, "what was read now cannot be used: the certificate before stays"),
        }
    }
}

fn paths(files: &TlsFiles) -> Vec<PathBuf> {
    [Some(&files.cert), Some(&files.key), files.client_ca.as_ref()].into_iter().flatten().cloned().collect()
}

/// From the contents of the files, in the order of [`paths`].
fn configuration(files: &TlsFiles, contents: &[Content]) -> Result<ServerConfig, String> {
    let [cert, key, client_ca @ ..] = contents else { return Err("--tls-cert, --tls-key: not read".into()) };
    let chain = certificates("--tls-cert", &files.cert, cert)?;
    let at_key = format!("--tls-key: {}", files.key.display());
    let key = key.as_ref().map_err(|error| format!("{at_key}: {error}"))?;
    let key = PrivateKeyDer::from_pem_slice(key)
        .map_err(|_| format!("{at_key}: no private key in it; expected PEM that is not encrypted"))?;
    let provider = Arc::new(aws_lc_rs::default_provider());
    let clients = match (&files.client_ca, client_ca) {
        (Some(path), [content]) => {
            let mut trusted = RootCertStore::empty();
            let unfit = |error: &dyn std::fmt::Display| format!("--tls-client-ca: {}: {error}", path.display());
            for certificate in certificates("--tls-client-ca", path, content)? {
                trusted.add(certificate).map_err(|error| unfit(&error))?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(trusted), provider.clone());
            // Who shows none may have a key instead.
            verifier.allow_unauthenticated().build().map_err(|error| unfit(&error))?
        }
        _ => WebPkiClientVerifier::no_client_auth(),
    };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_client_cert_verifier(clients)
        .with_single_cert(chain, key)
        .map_err(|error| match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                format!("{at_key}: does not belong to the certificate of --tls-cert, {}", files.cert.display())
            }
            Error::InvalidCertificate(_) => format!("--tls-cert: {}: {error}", files.cert.display()),
            error => format!("{at_key}: {error}"),
        })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    if files.client_ca.is_some() {
        // A session that is taken up again would not look at the client's certificate again.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
    }
    Ok(config)
}

fn certificates(flag: &str, path: &Path, content: &Content) -> Result<Vec<CertificateDer<'static>>, String> {
    let path = path.display();
    let pem = content.as_ref().map_err(|error| format!("{flag}: {path}: {error}"))?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| format!("{flag}: {path}: {error}; expected PEM"))?;
    if found.is_empty() {
        return Err(format!("{flag}: {path}: no certificate in it; expected PEM"));
    }
    Ok(found)
}
