//! From an accepted connection to requests that know their client.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use axum_server::accept::Accept;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use hyper::body::Incoming;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tower::Service;

use crate::clients::Clients;
use crate::http::App;
use crate::peer::{Peer, SharedStream};
use crate::tls::{TlsStream, client_certificate};

/// How long a handshake may take. It has a place among the connections meanwhile.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// The service of one connection; it knows its client once it is accepted.
#[derive(Clone)]
pub(crate) struct Connection {
    app: App,
    clients: Arc<Clients>,
    peer: Option<Peer>,
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl Connection {
    pub(crate) fn new(app: App, clients: Arc<Clients>) -> Self {
        Self { app, clients, peer: None }
    }
}

impl Service<http::Request<Incoming>> for Connection {
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<Result<Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: http::Request<Incoming>) -> Self::Future {
        if let Some(peer) = &self.peer {
            request.extensions_mut().insert(peer.clone());
        }
        let app = self.app.clone();
        Box::pin(async move { Ok(app.answer(request.map(Body::new)).await) })
    }
}

/// Accepts connections, without a delay of small packets, and tells their services who is at the other end.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl Accept<TcpStream, Connection> for Plain {
    type Stream = SharedStream;
    type Service = Connection;
    type Future = Ready<io::Result<(SharedStream, Connection)>>;

    fn accept(&self, stream: TcpStream, connection: Connection) -> Self::Future {
        let accepted = stream.set_nodelay(true).and_then(|()| SharedStream::new(stream, &connection.clients));
        ready(accepted.map(|(stream, peer)| (stream, Connection { peer: Some(peer), ..connection })))
    }
}

/// The same, and shakes hands before there is anything to serve.
#[derive(Clone)]
pub(crate) struct Encrypted {
    acceptor: RustlsAcceptor<Plain>,
    end: watch::Receiver<()>,
}

impl Encrypted {
    /// Handshakes that are under way when the sender of `end` is gone are given up.
    pub(crate) fn new(config: RustlsConfig, end: watch::Receiver<()>) -> Self {
        Self { acceptor: RustlsAcceptor::new(config).handshake_timeout(HANDSHAKE).acceptor(Plain), end }
    }
}

impl Accept<TcpStream, Connection> for Encrypted {
    type Stream = TlsStream<SharedStream>;
    type Service = Connection;
    type Future = BoxFuture<io::Result<(Self::Stream, Connection)>>;

    fn accept(&self, stream: TcpStream, connection: Connection) -> Self::Future {
        let client = stream.peer_addr().ok().map(tracing::field::display);
        let (handshake, mut end) = (self.acceptor.accept(stream, connection), self.end.clone());
        Box::pin(async move {
            let shaken = tokio::select! {
                shaken = handshake => shaken,
                _ = end.changed() => Err(io::Error::other("the gateway takes no new connections")),
            };
            let accepted =
                shaken.and_then(|(stream, connection)| Ok((client_certificate(&stream)?, stream, connection)));
            let (certificate, stream, connection) =
                accepted.inspect_err(|why| tracing::debug!(client, %why, "a TLS handshake failed"))?;
            if let Some(shown) = &certificate {
                tracing::debug!(client, subject = shown.subject, "a client has shown its certificate");
            }
            let peer = connection.peer.map(|peer| peer.with_certificate(certificate));
            Ok((stream, Connection { peer, ..connection }))
        })
    }
}
