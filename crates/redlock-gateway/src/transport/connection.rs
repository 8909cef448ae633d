//! Serves an accepted connection, and attaches the client to each of its requests.

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

use crate::overload::clients::Permit;
use crate::transport::connections::{Busy, ConnectionSlot, Connections};
use crate::transport::disconnect::{Peer, SharedStream};
use crate::transport::tls::{TlsStream, client_certificate};

/// How long a handshake may take. A connection holds its slot during the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How many bytes a client may send in a handshake: a greeting, and a chain of certificates if the
/// gateway asks for one. Without this limit, the library would keep up to 64 KB of one message.
const HANDSHAKE_BYTES: usize = 16 * 1024;
/// Limit on encrypted bytes that wait for the client to take them. The library's own limit is 64
/// KB.
const UNSENT: usize = 16 * 1024;
static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// Answers the requests of all connections.
pub(crate) trait Application: Clone + Send + 'static {
    /// Answers one request.
    fn answer(
        self,
        request: http::Request<Body>,
    ) -> impl Future<Output = http::Response<Body>> + Send;
}

/// The service of one connection. `peer` is set once the connection is accepted.
#[derive(Clone)]
pub(crate) struct Connection<A> {
    app: A,
    slot: Arc<ConnectionSlot>,
    peer: Option<Peer>,
    keep_alive: Option<HeaderValue>,
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl<A> Connection<A> {
    /// `keep_alive`: the header that announces how long the connection may be idle.
    fn new(app: A, slot: Arc<ConnectionSlot>, keep_alive: Option<HeaderValue>) -> Self {
        Self { app, slot, peer: None, keep_alive }
    }
}

/// Makes the service of each connection. A connection without a slot is closed at once.
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
            let slot = connections.enter(address.ip()).await;
            slot.map(|slot| Connection::new(app, slot, keep_alive))
                .ok_or_else(|| io::Error::other("too many connections"))
        }
    })
}

/// The value of the header `Keep-Alive`. It is a second less than the idle timeout, because a
/// client counts from the arrival of the answer. Without the header, Node.js clients drop an idle
/// connection after 4 s. To extend a lock they then need a new connection, and with it a DNS
/// lookup.
fn keep_alive(idle_timeout: Duration) -> Option<HeaderValue> {
    let seconds = idle_timeout.as_secs().saturating_sub(1);
    (seconds > 0).then(|| HeaderValue::try_from(format!("timeout={seconds}")).ok()).flatten()
}

/// Whether the client ends its connection after the answer. HTTP/1.0 does so by default.
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
        let mut of_client = None;
        if let Some(peer) = &self.peer {
            let client = self.slot.proxies().client(peer.address(), request.headers());
            let mut peer = peer.speaking_for(client);
            of_client = peer.take_share();
            request.extensions_mut().insert(peer);
        }
        let app = self.app.clone();
        let slot = self.slot.clone();
        let busy = self.slot.begin();
        let keep_alive = if ends_by_itself(&request) { None } else { self.keep_alive.clone() };
        Box::pin(async move {
            let busy =
                busy.ok_or_else(|| io::Error::other("the connection was closed for another one"))?;
            let mut response = app.answer(request.map(Body::new)).await;
            if slot.is_last_answer() {
                response
                    .headers_mut()
                    .insert(header::CONNECTION, HeaderValue::from_static("close"));
            } else if let Some(keep_alive) = keep_alive {
                response.headers_mut().insert(KEEP_ALIVE.clone(), keep_alive);
            }
            Ok(response.map(|body| Answer { body, _busy: busy, _of_client: of_client }))
        })
    }
}

/// The body of an answer. Until the body is written, the connection is not closed to make room for
/// others.
pub(crate) struct Answer {
    body: Body,
    _busy: Busy,
    /// Counts the connection for the client behind a proxy.
    _of_client: Option<Permit>,
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

/// Accepts plain connections. Disables the delay of small packets (`TCP_NODELAY`), and attaches the
/// peer.
#[derive(Clone, Copy)]
pub(crate) struct Plain {
    /// How many bytes may be read from a new connection, until the limit is changed.
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
            .and_then(|()| SharedStream::new(stream, connection.slot.clone()));
        ready(accepted.map(|(mut stream, peer)| {
            stream.limit(self.limit);
            (stream, Connection { peer: Some(peer), ..connection })
        }))
    }
}

/// Accepts TLS connections, and completes the handshake first.
#[derive(Clone)]
pub(crate) struct Encrypted {
    acceptor: RustlsAcceptor<Plain>,
    end: watch::Receiver<()>,
}

impl Encrypted {
    /// When the sender of `end` is dropped, handshakes that are not complete are given up.
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
        let slot = connection.slot.clone();
        let handshake = self.acceptor.accept(stream, connection);
        let mut end = self.end.clone();
        Box::pin(async move {
            let result = tokio::select! {
                result = handshake => result,
                _ = end.changed() => Err(io::Error::other("the gateway takes no new connections")),
            };
            let accepted = result.and_then(|(stream, connection)| {
                Ok((client_certificate(&stream)?, stream, connection))
            });
            let address = address?;
            let (certificate, mut stream, connection) =
                accepted.inspect_err(|why| slot.handshake_failed(address.ip(), why))?;
            if let Some(certificate) = &certificate {
                tracing::debug!(
                    client = %address,
                    subject = certificate.subject,
                    "a client has shown its certificate"
                );
            }
            let (plain, session) = stream.get_mut();
            plain.limit(usize::MAX);
            session.set_buffer_limit(Some(UNSENT));
            let peer = connection.peer.map(|peer| peer.with_certificate(certificate));
            Ok((stream, Connection { peer, ..connection }))
        })
    }
}
