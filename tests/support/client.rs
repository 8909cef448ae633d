//! Two ways to call a gateway. An ordinary call uses hyper on a connection of its own, so that no
//! pool hides a lost connection. [`Raw`] writes bytes that no client library would send.
//!
//! If an ordinary call uses a documented operation, its answer is checked against the OpenAPI
//! document. A status that is not listed, or a body with another schema, fails the test, whatever
//! the test is about.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::harness::PATIENCE;
use crate::support::openapi;
use crate::support::secrets::Secrets;

/// The path of a lock. Of all characters that a name may have, only the slash must be encoded.
pub(crate) fn lock_path(name: &str) -> String {
    format!("/locks/{}", name.replace('/', "%2F"))
}

/// A request under construction.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    address: SocketAddr,
    method: Method,
    path: String,
    headers: HeaderMap,
    body: Bytes,
    secrets: Arc<Secrets>,
}

impl Call {
    pub(super) fn new(
        address: SocketAddr,
        method: Method,
        path: String,
        secrets: Arc<Secrets>,
    ) -> Self {
        Self { address, method, path, headers: HeaderMap::new(), body: Bytes::new(), secrets }
    }

    /// Sends the call to another address, for example a proxy in front of the gateway.
    pub(crate) fn to(self, address: SocketAddr) -> Self {
        Self { address, ..self }
    }

    /// Adds a header. A header that is added twice is sent twice.
    pub(crate) fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        let value = HeaderValue::from_bytes(value.as_ref()).expect("a valid header value");
        self.headers.append(HeaderName::try_from(name).expect("a header's name"), value);
        self
    }

    pub(crate) fn body(mut self, body: impl Into<Bytes>) -> Self {
        self.body = body.into();
        self
    }

    pub(crate) fn json(self, body: &Value) -> Self {
        self.header("content-type", "application/json").body(body.to_string())
    }

    pub(crate) async fn send(self) -> Answer {
        let what = format!("{} {}", self.method, self.path);
        self.try_send().await.unwrap_or_else(|error| panic!("{what}: {error}"))
    }

    /// Sends the call, and repeats it as long as the answer is 503. On a busy machine, masters may
    /// not answer in time.
    pub(crate) async fn decided(self) -> Answer {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = self.clone().send().await;
            if answer.status != 503 {
                return answer;
            }
            assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {answer:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sends the call. Fails if the connection broke before the answer was complete.
    pub(crate) async fn try_send(self) -> Result<Answer, String> {
        let method = self.method.clone();
        let path = self.path.clone();
        let answer = timeout(PATIENCE, self.exchange())
            .await
            .map_err(|_| format!("no answer within {PATIENCE:?}"))??;
        openapi::hold_against_document(&method, &path, &answer);
        Ok(answer)
    }

    async fn exchange(self) -> Result<Answer, String> {
        self.secrets.sent(&self.headers);
        let text = |error: hyper::Error| error.to_string();
        let stream = TcpStream::connect(self.address).await.map_err(|error| error.to_string())?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(text)?;
        let connection = tokio::spawn(connection);
        let mut request = Request::new(Full::new(self.body));
        *request.method_mut() = self.method;
        *request.uri_mut() = self.path.parse().map_err(|_| format!("{:?} is no URI", self.path))?;
        *request.headers_mut() = self.headers;
        let own = || HeaderValue::try_from(self.address.to_string()).expect("an address");
        request.headers_mut().entry("host").or_insert_with(own);
        let response = sender.send_request(request).await.map_err(text)?;
        let (head, body) = response.into_parts();
        let body = body.collect().await.map_err(text)?.to_bytes();
        let at = Instant::now();
        connection.abort();
        self.secrets.got(&head.headers, &body);
        Ok(Answer { status: head.status.as_u16(), headers: head.headers, body, at })
    }
}

/// A complete answer.
#[derive(Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// When the answer was complete.
    pub(crate) at: Instant,
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?} {}", self.status, self.headers, self.text())
    }
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("no JSON, {error}: {self:?}"))
    }

    /// A header that must not occur twice. Returns an empty string if it is absent.
    #[track_caller]
    pub(crate) fn header(&self, name: &str) -> &str {
        let mut values = self.headers.get_all(name).iter();
        let value = values.next().map_or("", |value| value.to_str().expect("plain text"));
        assert!(values.next().is_none(), "{name} occurs more than once: {self:?}");
        value
    }

    /// The body of an error answer. This checks its media type, its request id against the header,
    /// and that it has exactly the fields of its code. The fields' types were checked before,
    /// against the OpenAPI document.
    #[track_caller]
    pub(crate) fn problem(&self, status: u16, code: &str) -> Value {
        assert_eq!(
            (self.status, self.header("content-type")),
            (status, "application/problem+json"),
            "{self:?}"
        );
        let problem = self.json();
        assert_eq!(problem["code"], code, "{self:?}");
        assert_eq!(problem["type"], format!("urn:redlock:problem:{code}"));
        assert_eq!(problem["status"], status);
        assert_eq!(problem["request_id"], self.header("x-request-id"), "{self:?}");
        openapi::assert_schema("Problem", &problem);

        let (required, optional): (&[&str], &[&str]) = match code {
            "lock_held" => (
                &["retry_after_ms"],
                &[
                    "holder",
                    "expires_in_ms",
                    "acquired_at",
                    "queue_position",
                    "queue_place_expires_ms",
                    "held",
                    "holders",
                ],
            ),
            "not_holder" => (&[], &["holder", "expires_in_ms", "acquired_at"]),
            "quorum_unavailable" | "outcome_unknown" => {
                (&["retry_after_ms", "nodes", "runbook"], &[])
            }
            "draining" | "overloaded" | "audit_unavailable" | "quota_exceeded" => {
                (&["retry_after_ms", "runbook"], &[])
            }
            "too_many_waiters" | "rate_limited" => (&["retry_after_ms"], &[]),
            _ => (&[], &[]),
        };
        let always = ["type", "title", "status", "code", "detail", "request_id"];
        let fields: Vec<&str> =
            problem.as_object().expect("an object").keys().map(String::as_str).collect();
        for field in always.iter().chain(required) {
            assert!(fields.contains(field), "{field} is missing: {problem:#}");
        }
        for field in fields {
            let known =
                [always.as_slice(), required, optional].iter().any(|list| list.contains(&field));
            assert!(known, "{field} does not belong to {code}: {problem:#}");
        }
        assert_eq!(
            problem.get("retry_after_ms").is_some(),
            !self.header("retry-after").is_empty(),
            "{self:?}"
        );
        problem
    }
}

/// What a client keeps of a granted lock.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Lease {
    pub(crate) token: String,
    pub(crate) fencing: u64,
}

impl Lease {
    #[track_caller]
    pub(crate) fn from(answer: &Answer) -> Self {
        assert_eq!(answer.status, 201, "{answer:?}");
        let body = answer.json();
        Self {
            token: body["token"].as_str().expect("a string").to_owned(),
            fencing: body["fencing_token"].as_u64().expect("a number"),
        }
    }

    /// The secret part of the token, which identifies the owner.
    pub(crate) fn owner(&self) -> &str {
        self.token.rsplit('.').next().expect("a token has dots")
    }
}

/// Checks what is left of a time that began after `before`.
#[track_caller]
pub(crate) fn assert_left(left: u64, ttl_ms: u64, before: Instant) {
    // Rounding, and the clock that a master reads once for each command, take up to 5 ms.
    let passed = before.elapsed().as_millis() as u64 + 5;
    assert!(left <= ttl_ms && left + passed >= ttl_ms, "{left} of {ttl_ms} ms after {passed} ms");
}

/// A connection for raw bytes.
pub(crate) struct Raw {
    stream: TcpStream,
    /// Bytes that have arrived after the last answer.
    unread: Vec<u8>,
    secrets: Arc<Secrets>,
}

impl Raw {
    pub(super) async fn open(address: SocketAddr, secrets: Arc<Secrets>) -> Self {
        let stream = TcpStream::connect(address).await.expect("the gateway listens");
        Self { stream, unread: Vec::new(), secrets }
    }

    pub(crate) async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_write(bytes).await.expect("the gateway reads");
    }

    pub(crate) async fn try_write(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.secrets.written(bytes.as_ref());
        timeout(PATIENCE, self.stream.write_all(bytes.as_ref()))
            .await
            .expect("the gateway reads or closes")
    }

    /// Waits until a part of an answer has arrived, and leaves it unread.
    pub(crate) async fn has_unread_answer(&mut self) {
        let arrived = timeout(PATIENCE, self.stream.peek(&mut [0])).await;
        assert!(matches!(arrived, Ok(Ok(1))), "no answer: {arrived:?}");
    }

    /// Closes the sending side of the connection.
    pub(crate) async fn ends_writing(&mut self) {
        let _ = self.stream.shutdown().await;
    }

    /// Sends only the head of a POST for a lock. The head announces a body of this many bytes.
    pub(crate) async fn announce(
        &mut self,
        method: &str,
        name: &str,
        headers: &str,
        length: usize,
    ) {
        let path = lock_path(name);
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {length}\r\n{headers}\r\n"
        );
        self.write(head).await;
    }

    /// Waits for "100 Continue", which the gateway sends when it begins to read the body.
    pub(crate) async fn wait_for_continue(&mut self) {
        while !self.unread.ends_with(b"\r\n\r\n") {
            assert!(self.more().await, "the connection was closed");
        }
        let text = String::from_utf8_lossy(&std::mem::take(&mut self.unread)).into_owned();
        assert!(text.starts_with("HTTP/1.1 100 "), "{text}");
    }

    /// Reads the next answer. Its header shows where it ends: by Content-Length, or by the status
    /// 204, which has no body. Without either the answer ends when the connection is closed.
    pub(crate) async fn answer(&mut self) -> Answer {
        match self.try_answer(false).await {
            Some(answer) => answer,
            None => panic!(
                "the connection was closed within {:?}",
                String::from_utf8_lossy(&self.unread)
            ),
        }
    }

    /// Reads the next answer. `None` if the connection was closed before the answer was complete.
    /// An answer to a HEAD has a length, but no body.
    pub(crate) async fn try_answer(&mut self, to_head: bool) -> Option<Answer> {
        let head_end = loop {
            if let Some(at) = self.unread.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.more().await {
                return None;
            }
        };
        let head = String::from_utf8_lossy(&self.unread[..head_end - 4]).into_owned();
        let mut lines = head.split("\r\n");
        let status =
            lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|code| code.parse().ok());
        let status = status.expect("a status line");
        let headers: HeaderMap = lines
            .map(|line| {
                let (name, value) = line.split_once(": ").expect("a header");
                (
                    name.parse::<HeaderName>().expect("a name"),
                    value.parse::<HeaderValue>().expect("a value"),
                )
            })
            .collect();
        let length =
            headers.get("content-length").map(|value| value.to_str().unwrap().parse().unwrap());
        let length = if to_head || status == 204 { Some(0) } else { length };
        while length.is_none_or(|length: usize| self.unread.len() < head_end + length) {
            if !self.more().await {
                if length.is_some() {
                    return None;
                }
                break;
            }
        }
        let end = length.map_or(self.unread.len(), |length| head_end + length);
        let body = Bytes::copy_from_slice(&self.unread[head_end..end]);
        self.unread.drain(..end);
        self.secrets.got(&headers, &body);
        Some(Answer { status, headers, body, at: Instant::now() })
    }

    async fn more(&mut self) -> bool {
        let got = timeout(PATIENCE, self.stream.read_buf(&mut self.unread)).await;
        got.expect("the gateway answers or closes").is_ok_and(|got| got > 0)
    }

    /// Waits until the gateway closes the connection. Returns everything that arrived before.
    pub(crate) async fn closed(&mut self) -> String {
        while self.more().await {}
        String::from_utf8_lossy(&std::mem::take(&mut self.unread)).into_owned()
    }
}
