//! A receiver of callbacks, on a port of its own.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use standardwebhooks::Webhook;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, OwnedMutexGuard, mpsc};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::support::gateway::{Launch, Scratch};
use crate::support::harness::PATIENCE;

/// A secret for the signatures.
pub(crate) const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// A callback as it arrived.
pub(crate) struct Callback {
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    pub(crate) at: Instant,
}

impl Callback {
    /// The body, after a check of the signature by the published library.
    pub(crate) fn verified(&self) -> Value {
        let webhook = Webhook::new(SECRET).expect("a secret");
        webhook.verify(&self.body, &self.headers).expect("a valid signature");
        serde_json::from_slice(&self.body).expect("JSON")
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().expect("plain text"))
    }
}

/// A server that records what it gets.
pub(crate) struct Receiver {
    address: SocketAddr,
    status: Arc<AtomicU16>,
    /// Held by a test while no callback may be answered.
    gate: Arc<Mutex<()>>,
    callbacks: mpsc::UnboundedReceiver<Callback>,
    server: JoinHandle<()>,
}

impl Receiver {
    pub(crate) async fn start() -> Self {
        Self::at("127.0.0.1:0").await
    }

    pub(crate) async fn at(address: &str) -> Self {
        let listener = TcpListener::bind(address).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let status = Arc::new(AtomicU16::new(204));
        let (arrived, callbacks) = mpsc::unbounded_channel();
        let gate = Arc::<Mutex<()>>::default();
        let (answers, closed) = (status.clone(), gate.clone());
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (answers, arrived, closed) = (answers.clone(), arrived.clone(), closed.clone());
                let service = service_fn(move |request: Request<Incoming>| {
                    let (answers, arrived, closed) =
                        (answers.clone(), arrived.clone(), closed.clone());
                    async move {
                        let (head, body) = request.into_parts();
                        let body = body.collect().await.expect("a whole body").to_bytes();
                        let path = head.uri.path().to_owned();
                        let callback =
                            Callback { path, headers: head.headers, body, at: Instant::now() };
                        drop(arrived.send(callback));
                        drop(closed.lock().await);
                        let status = answers.load(Ordering::SeqCst);
                        let response = Response::builder()
                            .status(status)
                            .header("location", "/elsewhere")
                            .body(Full::new(Bytes::new()));
                        Ok::<_, Infallible>(response.expect("a response"))
                    }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                tokio::spawn(connection);
            }
        });
        Self { address, status, gate, callbacks, server }
    }

    pub(crate) fn origin(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn url(&self) -> String {
        format!("{}/locks", self.origin())
    }

    /// Answers no callback until the result is dropped.
    pub(crate) fn hold(&self) -> OwnedMutexGuard<()> {
        self.gate.clone().try_lock_owned().expect("nobody holds it")
    }

    /// Answers with this status from now on.
    pub(crate) fn answer(&self, status: u16) {
        self.status.store(status, Ordering::SeqCst);
    }

    /// The next callback.
    pub(crate) async fn next(&mut self) -> Callback {
        let next = timeout(PATIENCE, self.callbacks.recv()).await.expect("a callback arrives");
        next.expect("the receiver runs")
    }

    /// A callback that has arrived already.
    pub(crate) fn arrived(&mut self) -> Option<Callback> {
        self.callbacks.try_recv().ok()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// A file with [`SECRET`].
pub(crate) fn secret_file() -> Scratch {
    Scratch::new("callback-secret", &format!("{SECRET}\n"))
}

/// Lets a gateway send callbacks to these receivers, which are on loopback.
pub(crate) fn with_callbacks(launch: Launch, secret: &Scratch, receivers: &[&Receiver]) -> Launch {
    let launch = launch.flag("--callback-secret-file", secret.path());
    let launch = launch.flag("--callback-network", "127.0.0.0/8");
    receivers
        .iter()
        .fold(launch, |launch, receiver| launch.more("--callback-origin", &receiver.origin()))
}
