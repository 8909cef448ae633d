//! From an accepted connection to requests that know their client.

use std::future::{Future, Ready, ready};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum_server::accept::Accept;
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use http::{HeaderName, HeaderValue, Version, header};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tower::{Service, service_fn};

use crate::transport::connections::{Busy, ConnectionPlace, Connections};
use crate::transport::disconnect::{Peer, SharedStream};
use crate::transport::tls::{TlsStream, client_certificate};

/// How long a handshake may take. It has a place among the connections meanwhile.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How much a client may send in it: a greeting, and a chain of certificates where one is asked for. The library would keep
/// 64 KB of one message.
const HANDSHAKE_BYTES: usize = 16 * 1024;
/// What may be encrypted and not yet taken by the client; the library would keep 64 KB.
const UNSENT: usize = 16 * 1024;
static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// What answers the requests of all connections.
pub(crate) trait Application: Clone + Send + 'static {
    /// Answers one request.
    fn answer(
        self,
        request: http::Request<Body>,
    ) -> impl Future<Output = http::Response<Body>> + Send;
}

/// The service of one connection; it knows its client once it is accepted.
#[derive(Clone)]
pub(crate) struct Connection<A> {
    app: A,
    place: Arc<ConnectionPlace>,
    peer: Option<Peer>,
    keep_alive: Option<HeaderValue>,
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl<A> Connection<A> {
    /// `keep_alive` is what its answers say of how long it may be idle.
    fn new(app: A, place: Arc<ConnectionPlace>, keep_alive: Option<HeaderValue>) -> Self {
        Self { app, place, peer: None, keep_alive }
    }
}

/// The service of each connection, as long as there is a place; a connection beyond the limit is closed at once.
pub(crate) fn services<A: Application>(
    app: A,
    connections: Arc<Connections>,
    idle_timeout: Duration,
) -> impl Service<SocketAddr, Response = Connection<A>, Error = io::Error, Future: Send> + use<A> {
    let keep_alive = keep_alive(idle_timeout);
    service_fn(move |address: SocketAddr| {
        let connections = connections.clone();
        let app = app.clone();
        let keep_alive = keep_alive.clone();
        async move {
            let place = connections.enter(address.ip()).await;
            place
                .map(|place| Connection::new(app, place, keep_alive))
                .ok_or_else(|| io::Error::other("too many connections"))
        }
    })
}

/// The value of `Keep-Alive`, a second less than connections may be idle: a client counts from when it gets the answer.
/// Clients of Node.js keep a connection for 4 s without it, and then need a name server to extend a lock.
fn keep_alive(idle_timeout: Duration) -> Option<HeaderValue> {
    let seconds = idle_timeout.as_secs().saturating_sub(1);
    (seconds > 0).then(|| HeaderValue::try_from(format!("timeout={seconds}")).ok()).flatten()
}

/// Whether the client wants its connection to end with the answer. In HTTP/1.0 connections end without being asked to.
fn ends_by_itself(request: &http::Request<Incoming>) -> bool {
    let close = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"close");
    request.version() < Version::HTTP_11
        || request.headers().get(header::CONNECTION).is_some_and(close)
}

impl<A: Application> Service<http::Request<Incoming>> for Connection<A> {
    type Response = http::Response<Answer>;
    type Error = io::Error;
    type Future = BoxFuture<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: http::Request<Incoming>) -> Self::Future {
        if let Some(peer) = &self.peer {
            let client = self.place.proxies().client(peer.address(), request.headers());
            request.extensions_mut().insert(peer.speaking_for(client));
        }
        let app = self.app.clone();
        let place = self.place.clone();
        let busy = self.place.begin();
        let keep_alive = if ends_by_itself(&request) { None } else { self.keep_alive.clone() };
        Box::pin(async move {
            let busy = busy.ok_or_else(|| io::Error::other("its place was given to another"))?;
            let mut response = app.answer(request.map(Body::new)).await;
            if place.ends() {
                response
                    .headers_mut()
                    .insert(header::CONNECTION, HeaderValue::from_static("close"));
            } else if let Some(keep_alive) = keep_alive {
                response.headers_mut().insert(KEEP_ALIVE.clone(), keep_alive);
            }
            Ok(response.map(|body| Answer { body, _busy: busy }))
        })
    }
}

/// The body of an answer; while it is not written, its connection is not closed for others.
pub(crate) struct Answer {
    body: Body,
    _busy: Busy,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Accepts connections, without a delay of small packets, and tells their services who is at the other end.
#[derive(Clone, Copy)]
pub(crate) struct Plain {
    /// How much may be read of the stream, until somebody says otherwise.
    limit: usize,
}

impl Plain {
    pub(crate) fn new() -> Self {
        Self { limit: usize::MAX }
    }
}

impl<A> Accept<TcpStream, Connection<A>> for Plain {
    type Stream = SharedStream;
    type Service = Connection<A>;
    type Future = Ready<io::Result<(SharedStream, Connection<A>)>>;

    fn accept(&self, stream: TcpStream, connection: Connection<A>) -> Self::Future {
        let accepted = stream
            .set_nodelay(true)
            .and_then(|()| SharedStream::new(stream, connection.place.clone()));
        ready(accepted.map(|(mut stream, peer)| {
            stream.limit(self.limit);
            (stream, Connection { peer: Some(peer), ..connection })
        }))
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
        let acceptor = RustlsAcceptor::new(config).handshake_timeout(HANDSHAKE);
        Self { acceptor: acceptor.acceptor(Plain { limit: HANDSHAKE_BYTES }), end }
    }
}

impl<A: Send + 'static> Accept<TcpStream, Connection<A>> for Encrypted {
    type Stream = TlsStream<SharedStream>;
    type Service = Connection<A>;
    type Future = BoxFuture<io::Result<(Self::Stream, Connection<A>)>>;

    fn accept(&self, stream: TcpStream, connection: Connection<A>) -> Self::Future {
        let address = stream.peer_addr();
        let place = connection.place.clone();
        let handshake = self.acceptor.accept(stream, connection);
        let mut end = self.end.clone();
        Box::pin(async move {
            let shaken = tokio::select! {
                shaken = handshake => shaken,
                _ = end.changed() => Err(io::Error::other("the gateway takes no new connections")),
            };
            let accepted = shaken.and_then(|(stream, connection)| {
                Ok((client_certificate(&stream)?, stream, connection))
            });
            let address = address?;
            let (certificate, mut stream, connection) =
                accepted.inspect_err(|why| place.handshake_failed(address.ip(), why))?;
            if let Some(shown) = &certificate {
                tracing::debug!(client = %address, subject = shown.subject, "a client has shown its certificate");
            }
            let (plain, session) = stream.get_mut();
            plain.limit(usize::MAX);
            session.set_buffer_limit(Some(UNSENT));
            let peer = connection.peer.map(|peer| peer.with_certificate(certificate));
            Ok((stream, Connection { peer, ..connection }))
        })
    }
}
