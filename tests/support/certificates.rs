//! Certificate authorities and certificates for the tests, made by openssl. Also a client that
//! checks a gateway's certificate and can send one of its own.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use crate::support::harness::{PATIENCE, TempDir};

const NEW_KEY: [&str; 5] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];

/// A certificate authority. All authorities have the same name, so only their signatures differ.
pub(crate) struct Authority {
    folder: TempDir,
}

/// The paths of a certificate and its key.
#[derive(Debug, Clone)]
pub(crate) struct Issued {
    pub(crate) cert: String,
    pub(crate) key: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let made = Self { folder: TempDir::new() };
        std::fs::write(made.path("names"), "subjectAltName=DNS:localhost,IP:127.0.0.1\n")
            .expect("a fresh folder");
        let own = [
            "req",
            "-x509",
            "-days",
            "2",
            "-subj",
            "/CN=authority",
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
        ];
        made.openssl(&[own.as_slice(), &NEW_KEY].concat());
        made
    }

    /// Issues a certificate with which this machine can be a server and a client. `subject` has
    /// openssl's form, for example `/O=Example/CN=ci`.
    pub(crate) fn issue(&self, name: &str, subject: &str) -> Issued {
        let [key, csr, cert] =
            ["key", "csr", "pem"].map(|ending| self.path(&format!("{name}.{ending}")));
        let request = ["req", "-utf8", "-subj", subject, "-keyout", &key, "-out", &csr];
        self.openssl(&[request.as_slice(), &NEW_KEY].concat());
        let by_us = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"];
        self.openssl(
            &[["x509", "-req", "-days", "2", "-in", &csr, "-out", &cert].as_slice(), &by_us]
                .concat(),
        );
        Issued { cert, key }
    }

    /// Issues a certificate that expires in this many seconds.
    pub(crate) fn issue_for(&self, name: &str, subject: &str, seconds: u64) -> Issued {
        const SETTINGS: &str = "[ca]\ndefault_ca=own\n[own]\ndatabase=index\nserial=serial\nnew_certs_dir=.\n\
                                default_md=sha256\npolicy=any\n[any]\ncommonName=optional\n";
        let [key, csr, cert] =
            ["key", "csr", "pem"].map(|ending| self.path(&format!("{name}.{ending}")));
        for (file, text) in [("settings", SETTINGS), ("index", ""), ("serial", "01\n")] {
            std::fs::write(self.path(file), text).expect("the folder can be written");
        }
        let request = ["req", "-subj", subject, "-keyout", &key, "-out", &csr];
        self.openssl(&[request.as_slice(), &NEW_KEY].concat());
        let date = Command::new("date")
            .args(["-u", "-d", &format!("{seconds} seconds"), "+%y%m%d%H%M%SZ"])
            .output();
        let end = String::from_utf8(date.expect("date starts").stdout).expect("digits");
        let by_us = [
            "ca", "-batch", "-notext", "-config", "settings", "-cert", "ca.pem", "-keyfile",
            "ca.key",
        ];
        let dated = ["-enddate", end.trim_end(), "-extfile", "names", "-in", &csr, "-out", &cert];
        self.openssl(&[by_us.as_slice(), &dated].concat());
        Issued { cert, key }
    }

    /// Makes a certificate that signs itself, as an authority's does, for `names` in openssl's
    /// form. `end` is a year.
    pub(crate) fn self_signed(&self, name: &str, names: &str, end: u16) -> Issued {
        const SETTINGS: &str = "[ca]\ndefault_ca=own\n[own]\ndatabase=own\nserial=own.serial\nnew_certs_dir=.\n\
                                default_md=sha256\npolicy=any\nunique_subject=no\n[any]\ncommonName=optional\n";
        let [key, csr, cert] =
            ["key", "csr", "pem"].map(|ending| self.path(&format!("{name}.{ending}")));
        let extensions = format!("basicConstraints=critical,CA:TRUE\nsubjectAltName={names}\n");
        for (file, text) in [
            ("own.settings", SETTINGS),
            ("own", ""),
            ("own.serial", "01\n"),
            ("own.extensions", &extensions),
        ] {
            std::fs::write(self.path(file), text).expect("the folder can be written");
        }
        let request = ["req", "-subj", "/CN=gateway", "-keyout", &key, "-out", &csr];
        self.openssl(&[request.as_slice(), &NEW_KEY].concat());
        let end = format!("{end}0101000000Z");
        let by_itself = ["ca", "-batch", "-notext", "-config", "own.settings", "-selfsign"];
        let dated = ["-startdate", "20200101000000Z", "-enddate", &end];
        let files = ["-extfile", "own.extensions", "-keyfile", &key, "-in", &csr, "-out", &cert];
        self.openssl(&[by_itself.as_slice(), &dated, &files].concat());
        Issued { cert, key }
    }

    fn openssl(&self, args: &[&str]) {
        let done = Command::new("openssl").args(args).current_dir(self.folder.path()).output();
        let done = done.expect("openssl starts");
        assert!(
            done.status.success(),
            "openssl {args:?}: {}",
            String::from_utf8_lossy(&done.stderr)
        );
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.path().join(name).to_str().expect("a plain path").to_owned()
    }

    pub(crate) fn ca(&self) -> String {
        self.path("ca.pem")
    }
}

/// The first certificate in a file.
pub(crate) fn certificate(path: impl AsRef<Path>) -> CertificateDer<'static> {
    CertificateDer::from_pem_file(path).expect("a certificate")
}

/// A client that trusts one authority.
#[derive(Clone)]
pub(crate) struct Client(TlsConnector);

impl Client {
    pub(crate) fn trusting(authority: &Authority) -> Self {
        Self::new(authority, None)
    }

    /// A client that trusts the authority and sends its own certificate.
    pub(crate) fn showing(authority: &Authority, own: &Issued) -> Self {
        Self::new(authority, Some(own))
    }

    fn new(authority: &Authority, own: Option<&Issued>) -> Self {
        let mut trusted = RootCertStore::empty();
        trusted.add(certificate(authority.ca())).expect("an authority");
        let config = ClientConfig::builder().with_root_certificates(trusted);
        let config = match own {
            None => config.with_no_client_auth(),
            Some(own) => {
                let key = PrivateKeyDer::from_pem_file(&own.key).expect("a key");
                config
                    .with_client_auth_cert(vec![certificate(&own.cert)], key)
                    .expect("they belong together")
            }
        };
        Self(TlsConnector::from(Arc::new(config)))
    }

    /// The same client, which offers HTTP/2 and nothing else.
    pub(crate) fn speaking_http2(&self) -> Self {
        let mut config = ClientConfig::clone(self.0.config());
        config.alpn_protocols = vec![b"h2".to_vec()];
        Self(TlsConnector::from(Arc::new(config)))
    }

    pub(crate) async fn connect(
        &self,
        address: SocketAddr,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        self.over(TcpStream::connect(address).await?).await
    }

    /// Makes the TLS handshake on a connection.
    pub(crate) async fn over(&self, stream: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
        let name = ServerName::from(stream.peer_addr()?.ip());
        timeout(PATIENCE, self.0.connect(name, stream)).await.expect("a handshake ends")
    }

    /// Opens a connection for requests. In TLS 1.3 the client learns only with its first request
    /// that the gateway has refused its certificate.
    pub(crate) async fn open(&self, address: SocketAddr) -> Result<Open, String> {
        let stream = self.connect(address).await.map_err(|error| error.to_string())?;
        let shown = stream.get_ref().1.peer_certificates().expect("servers have one")[0]
            .clone()
            .into_owned();
        let (sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| error.to_string())?;
        tokio::spawn(connection);
        Ok(Open { sender, shown })
    }

    /// The status of one GET on a new connection.
    pub(crate) async fn get(&self, address: SocketAddr, path: &str) -> Result<u16, String> {
        self.open(address).await?.get(path).await
    }
}

/// A connection to a gateway.
pub(crate) struct Open {
    sender: SendRequest<Full<Bytes>>,
    /// The certificate that the gateway has sent.
    pub(crate) shown: CertificateDer<'static>,
}

impl Open {
    pub(crate) async fn get(&mut self, path: &str) -> Result<u16, String> {
        let request = Request::get(path).header("host", "localhost").body(Full::default());
        self.send(request.expect("a request")).await.map(|(status, _)| status)
    }

    pub(crate) async fn post(&mut self, path: &str, body: &Value) -> Result<(u16, Bytes), String> {
        let request = Request::post(path)
            .header("host", "localhost")
            .header("content-type", "application/json");
        self.send(request.body(Full::from(body.to_string())).expect("a request")).await
    }

    pub(crate) async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<(u16, Bytes), String> {
        let exchange = async {
            self.sender.ready().await?;
            let response = self.sender.send_request(request).await?;
            let status = response.status().as_u16();
            Ok((status, response.into_body().collect().await?.to_bytes()))
        };
        let done = timeout(PATIENCE, exchange)
            .await
            .map_err(|_| format!("no answer within {PATIENCE:?}"))?;
        done.map_err(|error: hyper::Error| format!("{error:?}"))
    }
}
