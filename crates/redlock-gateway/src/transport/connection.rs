//! Serves an accepted connection, and attaches the client to each of its requests.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, Version, header};
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::service::Service;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::overload::clients::Permit;
use crate::transport::connections::{Busy, ConnectionSlot, StreamStart};
use crate::transport::disconnect::{Peer, SharedStream};
use crate::transport::rest::{read_rest, returning};
use crate::transport::streams::{PIECE, Stream, Streams};
use crate::transport::tls::{self, CurrentConfig, TlsStream, client_certificate, speaks_http2};

/// How long a handshake may take. A connection holds its slot during the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How many bytes the gateway reads in a handshake: 16 KiB for a greeting, and for a chain of
/// certificates if the gateway asks for one. Without this limit, the library would keep up to 64 KB
/// of one message. The end of the handshake may come together with a request. Then the library
/// reads on until it has the first record of the request, of at most 16,645 bytes (RFC 8446, section
/// 5.2), and it reads 4 KiB at once.
const HANDSHAKE_BYTES: usize = (16 + 17 + 4) * 1024;
/// Limit on encrypted bytes that wait for the client to take them. The library's own limit is 64
/// KB.
const UNSENT: usize = 16 * 1024;
/// How long the gateway reads the rest of a body before it sends an answer that did not need the
/// body. Meanwhile the connection counts as busy: it is not closed to make room for another one.
const REST_TIMEOUT: Duration = Duration::from_millis(300);
/// Limit on the fields of a request over HTTP/2. Cookies do not count. For HTTP/1.1 the library has
/// the same limit, and counts cookies. Each field takes about 200 bytes more than its text.
const MAX_FIELDS: usize = 100;
/// Most requests have at most this many fields, and this many bytes in the values. Their heads are
/// left as they are.
const USUAL_FIELDS: usize = 32;
const USUAL_BYTES: usize = 2 * 1024;
/// Limit on the pieces of an answer over HTTP/1.1, in bytes.
const COPIED: usize = 16 * 1024;
static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");

/// Answers the requests of all connections.
pub(crate) trait Application: Clone + Send + Sync + 'static {
    /// Answers one request.
    fn answer(
        self,
        request: http::Request<Body>,
    ) -> impl Future<Output = http::Response<Body>> + Send;
}

/// The service of one connection.
pub(crate) struct Connection<A> {
    app: A,
    peer: Peer,
    protocol: Protocol,
}

/// The protocol of a connection.
pub(crate) enum Protocol {
    /// HTTP/1.1, with the header that announces how long the connection may be idle.
    Http1 {
        keep_alive: Option<HeaderValue>,
    },
    Http2(Arc<Streams>),
}

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl<A> Connection<A> {
    pub(crate) fn new(app: A, peer: Peer, protocol: Protocol) -> Self {
        Self { app, peer, protocol }
    }
}

impl Protocol {
    /// HTTP/1.1 on a connection that may be idle for this long. The header `Keep-Alive` announces
    /// a second less, because a client counts from the arrival of the answer. Without the header,
    /// Node.js clients drop an idle connection after 4 s. To extend a lock they then need a new
    /// connection, and with it a DNS lookup.
    pub(crate) fn http1(idle_timeout: Duration) -> Self {
        let seconds = idle_timeout.as_secs().saturating_sub(1);
        let value = || HeaderValue::try_from(format!("timeout={seconds}")).ok();
        Self::Http1 { keep_alive: (seconds > 0).then(value).flatten() }
    }
}

/// Whether the client ends its connection after the answer. HTTP/1.0 does so by default.
fn ends_by_itself(request: &http::Request<Incoming>) -> bool {
    let close = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"close");
    request.version() < Version::HTTP_11
        || request.headers().get(header::CONNECTION).is_some_and(close)
}

/// Makes the library reset a stream with REFUSED_STREAM. The client then knows that the request was
/// not processed, and may repeat it (RFC 9113, section 8.7).
fn refused_stream() -> io::Error {
    #[derive(Debug, thiserror::Error)]
    #[error("too many requests are being refused")]
    struct RefusedStream(#[source] h2::Error);
    io::Error::other(RefusedStream(h2::Reason::REFUSED_STREAM.into()))
}

/// Whether the request has at most [`MAX_FIELDS`] fields. Removes cookies from a request with many
/// fields: clients send each cookie as a field of its own, and the gateway reads none.
fn bound_fields(headers: &mut HeaderMap) -> bool {
    if headers.len() <= USUAL_FIELDS {
        return true;
    }
    headers.remove(header::COOKIE);
    if headers.len() > MAX_FIELDS {
        return false;
    }
    // The map keeps the memory of removed fields.
    let mut left = HeaderMap::with_capacity(headers.keys_len());
    left.extend(std::mem::take(headers));
    *headers = left;
    true
}

/// Copies the URI of a request with a large head. The library copies all fields, but leaves the URI
/// in the buffer of the head's frame. So an uncopied URI would keep up to 16 KiB for each request.
fn copy_uri(request: &mut http::Request<Incoming>) {
    let bytes: usize = request.headers().values().map(HeaderValue::len).sum();
    let is_large = bytes > USUAL_BYTES || request.headers().len() > USUAL_FIELDS;
    if is_large
        && request.uri().path().starts_with('/')
        && let Ok(uri) = Uri::try_from(request.uri().to_string().as_str())
    {
        *request.uri_mut() = uri;
    }
}

/// What a request holds until its answer is written. Until then, the connection is not closed to
/// make room for others.
struct RequestPermits {
    // Dropped before the stream, whose end wakes the connection's task. That task then reads the
    // state of the slot.
    _busy: Busy,
    /// Counts the connection for the client behind a proxy.
    _of_client: Option<Permit>,
    /// Set for HTTP/2.
    stream: Option<Stream>,
}

impl<A: Application> Service<http::Request<Incoming>> for Connection<A> {
    type Response = http::Response<Answer>;
    type Error = io::Error;
    type Future = BoxFuture<io::Result<Self::Response>>;

    fn call(&self, mut request: http::Request<Incoming>) -> Self::Future {
        let slot = self.peer.slot();
        let client = slot.proxies().client(self.peer.address(), request.headers());
        let mut peer = self.peer.speaking_for(client);
        let of_client = peer.take_share();
        let (busy, stream, keep_alive) = match &self.protocol {
            Protocol::Http1 { keep_alive } => {
                let keep_alive = keep_alive.as_ref().filter(|_| !ends_by_itself(&request));
                (slot.begin(), None, keep_alive.cloned())
            }
            Protocol::Http2(streams) => {
                let stream = streams.begin();
                let busy = match slot.begin_stream() {
                    StreamStart::Begun(busy, refused) => {
                        peer.refuse(refused);
                        Some(busy)
                    }
                    // The drop of the stream counts as a reset, whose number is bounded: a client
                    // that does not read could otherwise queue resets without end.
                    StreamStart::TooMany => {
                        return Box::pin(std::future::ready(Err(refused_stream())));
                    }
                    StreamStart::Closed => None,
                };
                (busy, Some(stream), None)
            }
        };
        request.extensions_mut().insert(peer);
        let app = self.app.clone();
        let slot = slot.clone();
        // The body is wrapped outside of the future below. Inside, the parts of the request would
        // stay in the future, and so in memory, for as long as the request waits.
        let (request, rest) = match &stream {
            Some(_) => {
                copy_uri(&mut request);
                let has_few_fields = bound_fields(request.headers_mut());
                let (request, rest) = returning(request);
                (has_few_fields.then(|| request.map(Body::new)), rest)
            }
            None => (Some(request.map(Body::new)), None),
        };
        Box::pin(async move {
            let busy =
                busy.ok_or_else(|| io::Error::other("the connection was closed for another one"))?;
            let permits = RequestPermits { _busy: busy, _of_client: of_client, stream };
            let mut response = match request {
                Some(request) => app.answer(request).await,
                None => {
                    let mut refusal = http::Response::new(Body::empty());
                    *refusal.status_mut() = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
                    refusal
                }
            };
            if let Some(Ok(rest)) = rest.map(|mut rest| rest.try_recv()) {
                // Boxed, because it is rare and would make the future of every request larger.
                Box::pin(read_rest(rest, REST_TIMEOUT)).await;
            }
            match &permits.stream {
                // HTTP/2 has no such headers. The connection itself announces its end (GOAWAY).
                Some(stream) if slot.is_last_answer() => stream.end_connection(),
                Some(_) => {}
                None if slot.is_last_answer() => {
                    let headers = response.headers_mut();
                    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                None => {
                    if let Some(keep_alive) = keep_alive {
                        response.headers_mut().insert(KEEP_ALIVE.clone(), keep_alive);
                    }
                }
            }
            Ok(response.map(|body| Answer::new(body, permits)))
        })
    }
}

/// The body of an answer.
///
/// Over HTTP/1.1, the library copies a piece into the connection's buffer, and drops it. So a piece has
/// at most [`COPIED`] bytes. The rest keeps its permits until the client has read what came before.
///
/// Over HTTP/2, the library accepts a piece as soon as the client's window has room for its first
/// byte, and buffers the rest. Therefore a piece has at most [`PIECE`] bytes, and the last byte is a
/// piece of its own. The library accepts that byte only when the window has admitted everything
/// before it. An answer thus ends only when the library buffers almost nothing of it. Events are not
/// split, because some clients treat many small DATA frames as an attack.
pub(crate) struct Answer {
    body: Body,
    /// The rest of a chunk of which pieces were handed over.
    rest: Bytes,
    permits: RequestPermits,
}

impl Answer {
    fn new(body: Body, mut permits: RequestPermits) -> Self {
        if let Some(stream) = &mut permits.stream {
            stream.is_complete = http_body::Body::is_end_stream(&body);
        }
        Self { body, rest: Bytes::new(), permits }
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Self { body, rest, permits } = &mut *self;
        let Some(stream) = &mut permits.stream else {
            if rest.is_empty() {
                let frame = ready!(Pin::new(body).poll_frame(context));
                let data = frame.as_ref().and_then(|frame| frame.as_ref().ok()?.data_ref());
                match data.filter(|data| data.len() > COPIED) {
                    Some(data) => *rest = data.clone(),
                    None => return Poll::Ready(frame),
                }
            }
            let piece = rest.split_to(rest.len().min(COPIED));
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        };
        stream.progress.asked();
        if rest.is_empty() {
            let frame = ready!(Pin::new(&mut *body).poll_frame(context));
            let Some(frame) = frame.transpose()? else {
                stream.is_complete = true;
                return Poll::Ready(None);
            };
            match frame.into_data() {
                Ok(data) => *rest = data,
                Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
            }
        }
        let is_last = http_body::Body::is_end_stream(&*body);
        let piece = rest.split_to(piece_length(rest.len(), is_last));
        stream.is_complete = is_last && rest.is_empty();
        stream.progress.handed_over();
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        // The library asks before the first piece.
        self.body.size_hint()
    }
}

/// The length of the next piece of a chunk.
fn piece_length(chunk: usize, is_last: bool) -> usize {
    PIECE.min(if is_last && chunk > 1 { chunk - 1 } else { chunk })
}

/// A connection that is ready for requests.
pub(crate) struct Accepted<S> {
    pub(crate) stream: S,
    pub(crate) peer: Peer,
    /// Whether client and gateway have agreed on HTTP/2.
    pub(crate) speaks_http2: bool,
}

/// Makes a connection ready for requests.
pub(crate) trait Accept: Clone + Send + Sync + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    fn accept(
        &self,
        stream: TcpStream,
        slot: Arc<ConnectionSlot>,
    ) -> impl Future<Output = io::Result<Accepted<Self::Stream>>> + Send;
}

/// Accepts plain connections.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl Accept for Plain {
    type Stream = SharedStream;

    async fn accept(
        &self,
        stream: TcpStream,
        slot: Arc<ConnectionSlot>,
    ) -> io::Result<Accepted<SharedStream>> {
        let (stream, peer) = shared(stream, slot)?;
        Ok(Accepted { stream, peer, speaks_http2: false })
    }
}

/// Makes a stream that its [`Peer`] can watch for the client's hang-up. Disables the delay of small
/// packets (`TCP_NODELAY`).
fn shared(stream: TcpStream, slot: Arc<ConnectionSlot>) -> io::Result<(SharedStream, Peer)> {
    stream.set_nodelay(true)?;
    SharedStream::new(stream, slot)
}

/// Accepts TLS connections, and completes the handshake first.
#[derive(Clone)]
pub(crate) struct Encrypted(pub(crate) CurrentConfig);

impl Accept for Encrypted {
    type Stream = TlsStream<SharedStream>;

    async fn accept(
        &self,
        stream: TcpStream,
        slot: Arc<ConnectionSlot>,
    ) -> io::Result<Accepted<Self::Stream>> {
        let address = stream.peer_addr()?;
        let handshake = async {
            let (mut plain, peer) = shared(stream, slot.clone())?;
            plain.limit(HANDSHAKE_BYTES);
            let handshake = tls::accept(&self.0, plain);
            let stream = tokio::time::timeout(HANDSHAKE, handshake).await??;
            let certificate = client_certificate(&stream)?;
            io::Result::Ok((certificate, stream, peer))
        };
        let (certificate, mut stream, peer) =
            handshake.await.inspect_err(|why| slot.handshake_failed(address.ip(), why))?;
        if let Some(certificate) = &certificate {
            tracing::debug!(
                client = %address,
                subject = certificate.subject,
                "a client has shown its certificate"
            );
        }
        let speaks_http2 = speaks_http2(&stream);
        let (plain, session) = stream.get_mut();
        plain.limit(usize::MAX);
        session.set_buffer_limit(Some(UNSENT));
        Ok(Accepted { stream, peer: peer.with_certificate(certificate), speaks_http2 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_byte_of_a_body_is_a_piece_of_its_own() {
        for (chunk, piece) in [(0, 0), (1, 1), (300, 299), (PIECE + 1, PIECE), (PIECE * 3, PIECE)] {
            assert_eq!(piece_length(chunk, true), piece, "{chunk}");
        }
        assert_eq!(piece_length(300, false), 300, "an event is one piece");
    }

    #[test]
    fn many_fields_are_refused_and_cookies_do_not_count() {
        let fields = |name: fn(usize) -> String, count| -> HeaderMap {
            let fields = (0..count).map(|number| (name(number), HeaderValue::from_static("y")));
            let mut headers = HeaderMap::new();
            for (name, value) in fields {
                headers.append(HeaderName::try_from(name).expect("a name"), value);
            }
            headers
        };
        let numbered = |number| format!("x-{number}");
        for (count, fits) in [(1, true), (MAX_FIELDS, true), (MAX_FIELDS + 1, false)] {
            let mut headers = fields(numbered, count);
            assert_eq!(bound_fields(&mut headers), fits, "{count} fields");
            assert!(!fits || headers == fields(numbered, count), "{count} fields stay");
        }
        let mut headers = fields(|_| "cookie".into(), 180);
        headers.append("accept", HeaderValue::from_static("a"));
        headers.append("accept", HeaderValue::from_static("b"));
        assert!(bound_fields(&mut headers));
        assert_eq!(headers.get_all("accept").iter().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(headers.len(), 2);
    }
}
