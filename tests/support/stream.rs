//! Reads a stream of events as a browser does.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::support::client::Answer;
use crate::support::harness::PATIENCE;

/// Bytes that the client's library reads ahead: the fewest that it allows. While a test does not
/// read a stream, all other bytes stay in the kernel.
const READ_AHEAD: usize = 8 * 1024;

/// An event.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Event {
    pub(crate) id: String,
    pub(crate) kind: String,
    pub(crate) data: Value,
}

/// An open stream. Dropping it closes the connection.
pub(crate) struct Events {
    body: Incoming,
    unread: Vec<u8>,
    connection: JoinHandle<()>,
}

impl Drop for Events {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Events {
    /// Opens a stream by a GET. An answer that is no stream is an error.
    pub(crate) async fn open(
        address: SocketAddr,
        path: &str,
        headers: &HeaderMap,
    ) -> Result<Self, Answer> {
        Self::open_by(Method::GET, address, path, headers, &Value::Null).await
    }

    /// Opens a stream.
    pub(crate) async fn open_by(
        method: Method,
        address: SocketAddr,
        path: &str,
        headers: &HeaderMap,
        body: &Value,
    ) -> Result<Self, Answer> {
        let stream = TcpStream::connect(address).await.expect("the gateway listens");
        Self::over(stream, method, path, headers, body).await
    }

    /// Opens a stream on an open connection.
    pub(crate) async fn over(
        stream: TcpStream,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        body: &Value,
    ) -> Result<Self, Answer> {
        let address = stream.peer_addr().expect("an open connection");
        let (mut sender, connection) = http1::Builder::new()
            .max_buf_size(READ_AHEAD)
            .handshake(TokioIo::new(stream))
            .await
            .expect("HTTP/1.1");
        let connection = tokio::spawn(async move { drop(connection.await) });
        let has_body = !body.is_null();
        let body = if has_body { body.to_string() } else { String::new() };
        let mut request = Request::new(Full::new(Bytes::from(body)));
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().expect("a path");
        *request.headers_mut() = headers.clone();
        let headers = request.headers_mut();
        if has_body {
            headers.insert("content-type", "application/json".parse().expect("a media type"));
        }
        headers.insert("host", address.to_string().parse().expect("an address"));
        headers.insert("accept", "text/event-stream".parse().expect("a media type"));
        let response = timeout(PATIENCE, sender.send_request(request)).await;
        let (head, body) = response.expect("an answer in time").expect("an answer").into_parts();
        if head.headers.get("content-type").is_none_or(|kind| kind != "text/event-stream") {
            let body = body.collect().await.expect("a body").to_bytes();
            let at = std::time::Instant::now();
            let status = head.status.as_u16();
            return Err(Answer { status, headers: head.headers, body, at });
        }
        assert_eq!(head.status, 200);
        Ok(Self { body, unread: Vec::new(), connection })
    }

    /// The next event. `None` at the end of the stream. If no event comes in time, the test fails.
    /// Heartbeats are not events.
    pub(crate) async fn try_next(&mut self) -> Option<Event> {
        timeout(PATIENCE, self.until_event()).await.expect("an event in time")
    }

    async fn until_event(&mut self) -> Option<Event> {
        loop {
            while let Some(end) = self.unread.windows(2).position(|two| two == b"\n\n") {
                let event = parsed(std::str::from_utf8(&self.unread[..end]).expect("UTF-8"));
                self.unread.drain(..end + 2);
                if event.is_some() {
                    return event;
                }
            }
            let data = self.body.frame().await?.expect("an open stream").into_data();
            // A frame may end within a character.
            self.unread.extend_from_slice(&data.expect("data"));
        }
    }

    pub(crate) async fn next(&mut self) -> Event {
        self.try_next().await.expect("the stream goes on")
    }

    /// The next event of this kind. Kinds other than those in `passing` fail the test.
    pub(crate) async fn next_of(&mut self, kind: &str, passing: &[&str]) -> Event {
        loop {
            let event = self.next().await;
            if event.kind == kind {
                return event;
            }
            assert!(passing.contains(&event.kind.as_str()), "{event:?} instead of {kind}");
        }
    }
}

/// The event in a block of lines. `None` for comments.
pub(super) fn parsed(block: &str) -> Option<Event> {
    let field = |name: &str| {
        let mut values =
            block.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
        let value = values.next();
        assert!(values.next().is_none(), "{name} is there twice: {block}");
        value
    };
    let kind = field("event")?.to_owned();
    let data = serde_json::from_str(field("data").expect("data")).expect("JSON");
    Some(Event { id: field("id").unwrap_or_default().to_owned(), kind, data })
}

/// Bytes that one end of a connection has sent and the other end has not read, from the kernel's
/// table of connections. Bytes whose acknowledgement is on its way count twice.
pub(crate) fn unread_bytes(sender: SocketAddr, reader: SocketAddr) -> usize {
    let sender = in_table(sender);
    let reader = in_table(reader);
    let table = || std::fs::read_to_string("/proc/net/tcp").expect("Linux has this table");
    // The kernel writes the table in parts. When other connections end meanwhile, a line may be
    // missing.
    let mut tables = std::iter::repeat_with(table).take(100);
    let found = tables.find_map(|table| {
        let (unacknowledged, _) = queues(&table, &sender, &reader)?;
        let (_, received) = queues(&table, &reader, &sender)?;
        Some(unacknowledged + received)
    });
    found.expect("an open connection")
}

/// An address as the table shows it: the bytes of the IP address are a number of this machine.
fn in_table(address: SocketAddr) -> String {
    let SocketAddr::V4(address) = address else { panic!("{address} is no IPv4 address") };
    let ip = u32::from_ne_bytes(address.ip().octets());
    format!("{ip:08X}:{:04X}", address.port())
}

/// The bytes in the send queue and in the receive queue of one end of a connection.
fn queues(table: &str, local: &str, remote: &str) -> Option<(usize, usize)> {
    let bytes = |text: &str| usize::from_str_radix(text, 16).expect("a hexadecimal number");
    table.lines().find_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let [_, from, to, _, lengths, ..] = fields[..] else { return None };
        let (send, receive) = lengths.split_once(':')?;
        (from == local && to == remote).then(|| (bytes(send), bytes(receive)))
    })
}
