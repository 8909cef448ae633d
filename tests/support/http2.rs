//! HTTP/2 clients. [`Http2`] is well-behaved and can do what clients rarely do, such as reset a
//! request. [`Frames`] writes frames that no client library would send.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::time::Instant;

use bytes::Bytes;
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Method, Request};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;

use crate::support::certificates::Client;
use crate::support::client::Answer;
use crate::support::harness::{PATIENCE, eventually};
use crate::support::stream::{Event, parsed};

/// The TTL of extensions: the longest that a gateway grants by default.
const EXTENDED_MS: u64 = 300_000;

/// A connection. Dropping it cuts the connection, with all requests on it.
pub(crate) struct Http2 {
    sender: SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
}

impl Drop for Http2 {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Http2 {
    pub(crate) async fn open(client: &Client, address: SocketAddr) -> Self {
        Self::open_with(client, address, &Builder::new()).await
    }

    /// Opens a connection with other settings than usual.
    pub(crate) async fn open_with(client: &Client, address: SocketAddr, builder: &Builder) -> Self {
        let stream = TcpStream::connect(address).await.expect("the gateway listens");
        Self::over(client, stream, builder).await
    }

    pub(crate) async fn over(client: &Client, stream: TcpStream, builder: &Builder) -> Self {
        let stream = client.speaking_http2().over(stream).await.expect("a handshake");
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
        let (sender, connection) = builder.handshake(stream).await.expect("HTTP/2");
        Self { sender, connection: tokio::spawn(connection) }
    }

    /// Sends a request, and leaves its answer to the caller.
    pub(crate) async fn begin(
        &self,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        body: &Value,
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let uri = format!("https://localhost{path}");
        let mut request = Request::new(());
        (*request.method_mut(), *request.uri_mut()) = (method, uri.parse().expect("a URI"));
        *request.headers_mut() = headers.clone();
        if body.is_null() {
            return self.begin_request(request, None).await;
        }
        let kind = "application/json".parse().expect("a media type");
        request.headers_mut().insert("content-type", kind);
        self.begin_request(request, Some(body.to_string().into())).await
    }

    /// Sends any request.
    pub(crate) async fn begin_request(
        &self,
        request: Request<()>,
        body: Option<Bytes>,
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let ready = timeout(PATIENCE, self.sender.clone().ready());
        let mut sender = ready.await.expect("room for a stream").expect("an open connection");
        let (answer, mut stream) =
            sender.send_request(request, body.is_none()).expect("an open connection");
        if let Some(body) = body {
            stream.send_data(body, true).expect("an open stream");
        }
        (answer, stream)
    }

    /// Sends a request whose body begins with these bytes, and does not end it.
    pub(crate) async fn begin_open(
        &self,
        request: Request<()>,
        body: Bytes,
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let ready = timeout(PATIENCE, self.sender.clone().ready());
        let mut sender = ready.await.expect("room for a stream").expect("an open connection");
        let (answer, mut stream) = sender.send_request(request, false).expect("an open connection");
        stream.send_data(body, false).expect("an open stream");
        (answer, stream)
    }

    /// Sends a request, and reads its answer.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        body: &Value,
    ) -> Answer {
        let (answer, _stream) = self.begin(method, path, headers, body).await;
        answered(answer).await
    }

    /// Sends a whole request, and reads its answer, if it comes.
    pub(crate) async fn try_send(
        &self,
        request: &Request<()>,
        body: Option<&Bytes>,
    ) -> Result<Answer, h2::Error> {
        let exchange = async {
            let mut sender = self.sender.clone().ready().await?;
            let (answer, mut stream) = sender.send_request(request.clone(), body.is_none())?;
            if let Some(body) = body {
                // Fails if the gateway has already reset the stream.
                let _ = stream.send_data(body.clone(), true);
            }
            try_answered(answer).await
        };
        timeout(PATIENCE, exchange).await.expect("an answer, or an error, in time")
    }

    /// Waits until the gateway has admitted every node.
    pub(crate) async fn all_nodes_admitted(&self) {
        eventually("every node is admitted", async || {
            let health = self.get("/readyz").await.json();
            let nodes = health["nodes"].as_array().expect("readyz lists nodes");
            let mut states = nodes.iter().map(|node| &node["state"]);
            states.all(|state| state == "admitted" || state == "catching_up").then_some(())
        })
        .await;
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call(Method::GET, path, &HeaderMap::new(), &Value::Null).await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.call(Method::POST, path, &HeaderMap::new(), body).await
    }

    /// A request with the token of a lease.
    pub(crate) async fn with_token(&self, method: Method, path: &str, token: &str) -> Answer {
        let headers = HeaderMap::from_iter([(
            http::HeaderName::from_static("lock-token"),
            token.parse().expect("a token"),
        )]);
        let body = if method == Method::PATCH {
            Value::from_iter([("ttl_ms", EXTENDED_MS)])
        } else {
            Value::Null
        };
        self.call(method, path, &headers, &body).await
    }

    /// Opens a stream of events.
    pub(crate) async fn events(&self, method: Method, path: &str, body: &Value) -> Http2Events {
        let (answer, stream) = self.begin(method, path, &event_headers(), body).await;
        let response = timeout(PATIENCE, answer).await.expect("an answer").expect("an answer");
        assert_eq!(response.status(), 200);
        Http2Events { body: response.into_body(), unread: String::new(), stream }
    }

    /// Waits until the connection has ended. Returns how. A broken pipe is no error of the protocol:
    /// the gateway may close the connection while the client writes its last frame.
    pub(crate) async fn ended(&mut self) -> Result<(), h2::Error> {
        let ended = timeout(PATIENCE, &mut self.connection).await.expect("it ends");
        ended.expect("no panic").or_else(|error| {
            let kind = error.get_io().map(std::io::Error::kind);
            if kind == Some(std::io::ErrorKind::BrokenPipe) { Ok(()) } else { Err(error) }
        })
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.connection.is_finished()
    }
}

pub(crate) fn event_headers() -> HeaderMap {
    HeaderMap::from_iter([(http::header::ACCEPT, "text/event-stream".parse().expect("a value"))])
}

/// Reads an answer to its end.
pub(crate) async fn answered(answer: ResponseFuture) -> Answer {
    let read = timeout(PATIENCE, try_answered(answer)).await.expect("an answer in time");
    read.unwrap_or_else(|error| panic!("no answer: {error}"))
}

/// Reads an answer to its end, if it comes.
pub(crate) async fn try_answered(answer: ResponseFuture) -> Result<Answer, h2::Error> {
    let (head, mut stream) = answer.await?.into_parts();
    let mut body = Vec::new();
    while let Some(data) = stream.data().await {
        let data = data?;
        stream.flow_control().release_capacity(data.len())?;
        body.extend_from_slice(&data);
    }
    let status = head.status.as_u16();
    Ok(Answer { status, headers: head.headers, body: body.into(), at: Instant::now() })
}

/// A stream of events on a connection with other requests.
pub(crate) struct Http2Events {
    body: RecvStream,
    unread: String,
    stream: SendStream<Bytes>,
}

impl Http2Events {
    /// The next event. `None` at the end of the stream.
    pub(crate) async fn try_next(&mut self) -> Option<Event> {
        loop {
            while let Some((block, rest)) = self.unread.split_once("\n\n") {
                let event = parsed(block);
                self.unread = rest.to_owned();
                if event.is_some() {
                    return event;
                }
            }
            let data = timeout(PATIENCE, self.body.data()).await.expect("an event in time")?;
            let data = data.expect("an open stream");
            self.body.flow_control().release_capacity(data.len()).expect("an open stream");
            self.unread.push_str(std::str::from_utf8(&data).expect("UTF-8"));
        }
    }

    /// The next event of this kind. Others are skipped.
    pub(crate) async fn next_of(&mut self, kind: &str) -> Event {
        loop {
            let event = self.try_next().await.expect("the stream goes on");
            if event.kind == kind {
                return event;
            }
        }
    }

    /// Resets the stream, as a browser does with a stream that its page has closed.
    pub(crate) fn reset(mut self) {
        self.stream.send_reset(h2::Reason::CANCEL);
    }
}

/// Whether the gateway resets a request before it answers, and why.
pub(crate) async fn reset_of(stream: &mut SendStream<Bytes>) -> h2::Reason {
    let reset = timeout(PATIENCE, poll_fn(|context| stream.poll_reset(context))).await;
    reset.expect("a reset in time").expect("a reset")
}

/// Types of frames (RFC 9113, section 6).
pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PUSH_PROMISE: u8 = 5;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;
/// Flags.
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
/// The setting for the window of each stream.
pub(crate) const INITIAL_WINDOW_SIZE: u16 = 4;

/// A frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = payload.len() as u32;
    [&length.to_be_bytes()[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A header block without compression.
pub(crate) fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        // A literal that is not added to the table (RFC 7541, section 6.2.2).
        block.push(0);
        for text in [name, value] {
            write_length(&mut block, text.len());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

/// Writes an integer with a prefix of 7 bits (RFC 7541, section 5.1).
fn write_length(block: &mut Vec<u8>, length: usize) {
    let Some(mut left) = length.checked_sub(127) else { return block.push(length as u8) };
    block.push(127);
    while left >= 128 {
        block.push((left % 128) as u8 | 128);
        left /= 128;
    }
    block.push(left as u8);
}

/// The fields of a request without a body.
pub(crate) fn get(path: &str) -> Vec<u8> {
    block(&[(":method", "GET"), (":scheme", "https"), (":path", path), (":authority", "localhost")])
}

/// A connection for frames.
pub(crate) struct Frames {
    reader: Reader,
    writer: Writer,
}

pub(crate) struct Reader(ReadHalf<TlsStream<TcpStream>>);

pub(crate) struct Writer(WriteHalf<TlsStream<TcpStream>>);

impl Frames {
    /// Opens a connection, and sends the preface with these settings.
    pub(crate) async fn open(
        client: &Client,
        address: SocketAddr,
        settings: &[(u16, u32)],
    ) -> Self {
        let mut opened = Self::silent(client, address).await;
        let settings: Vec<u8> = settings
            .iter()
            .flat_map(|(id, value)| [id.to_be_bytes().as_slice(), &value.to_be_bytes()].concat())
            .collect();
        opened.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("sent");
        opened.write(&frame(SETTINGS, 0, 0, &settings)).await.expect("sent");
        opened
    }

    /// Opens a connection, and sends nothing.
    pub(crate) async fn silent(client: &Client, address: SocketAddr) -> Self {
        let stream = client.speaking_http2().connect(address).await.expect("a handshake");
        let (reader, writer) = tokio::io::split(stream);
        Self { reader: Reader(reader), writer: Writer(writer) }
    }

    pub(crate) fn split(self) -> (Reader, Writer) {
        (self.reader, self.writer)
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.writer.write(bytes).await
    }

    pub(crate) async fn next(&mut self) -> Option<Received> {
        self.reader.next().await
    }

    /// The flags, the stream and the payload of the next frame of this type. `None` at the end.
    pub(crate) async fn next_of(&mut self, kind: u8) -> Option<(u8, u32, Vec<u8>)> {
        loop {
            let (other, flags, stream, payload) = self.next().await?;
            if other == kind {
                return Some((flags, stream, payload));
            }
        }
    }

    /// Reads until the gateway closes the connection. Returns the code of the last GOAWAY.
    pub(crate) async fn goaway(&mut self) -> Option<u32> {
        let mut code = None;
        while let Some((_, _, payload)) = self.next_of(GOAWAY).await {
            code = Some(u32::from_be_bytes(payload[4..8].try_into().expect("four bytes")));
        }
        code
    }
}

/// The type, the flags, the stream and the payload of a frame.
type Received = (u8, u8, u32, Vec<u8>);

impl Reader {
    /// The next frame. `None` at the end.
    pub(crate) async fn next(&mut self) -> Option<Received> {
        let read = async {
            let mut head = [0; 9];
            self.0.read_exact(&mut head).await.ok()?;
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; length as usize];
            self.0.read_exact(&mut payload).await.ok()?;
            let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
            Some((head[3], head[4], stream, payload))
        };
        timeout(PATIENCE, read).await.expect("a frame, or the end, in time")
    }
}

impl Writer {
    /// Sends bytes. Fails when the gateway has closed the connection, or reads no more.
    pub(crate) async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let write = async {
            self.0.write_all(bytes).await?;
            self.0.flush().await
        };
        timeout(PATIENCE, write).await.map_err(std::io::Error::other)?
    }
}
