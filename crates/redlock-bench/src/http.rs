//! As much of an HTTP/1.1 client as the load needs, so that it takes little of the CPU it shares with the contenders:
//! one request in flight per connection, answers with a Content-Length or without a body, one buffer for all answers, small
//! until an answer is not, so that ten thousand connections fit in one process.
//! Anything else is an error that says what came.

use std::io::Write as _;
use std::net::SocketAddr;
use std::ops::Range;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Longer answers are a fault, not a case: the longest are metrics.
const MAX_ANSWER: usize = 256 * 1024;
/// Enough for every answer about one lock.
const FIRST_BUFFER: usize = 2 * 1024;

/// One keep-alive connection.
pub(crate) struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// A complete answer, in the connection's buffer.
#[derive(Debug, PartialEq)]
pub(crate) struct Answer<'a> {
    pub(crate) status: u16,
    pub(crate) lock_token: Option<&'a [u8]>,
    pub(crate) body: &'a [u8],
}

impl Answer<'_> {
    pub(crate) fn describe(&self) -> String {
        let body: String = String::from_utf8_lossy(self.body).chars().take(300).collect();
        format!("{} {body}", self.status)
    }
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Result<Self, String> {
        let stream =
            TcpStream::connect(address).await.map_err(|error| format!("cannot connect to {address}: {error}"))?;
        stream.set_nodelay(true).map_err(|error| error.to_string())?;
        Ok(Self { stream, buffer: vec![0; FIRST_BUFFER] })
    }

    /// Sends a request and waits for its answer. After an error the connection is of no more use.
    pub(crate) async fn exchange(&mut self, request: &[u8]) -> Result<Answer<'_>, String> {
        self.stream.write_all(request).await.map_err(|error| format!("cannot send a request: {error}"))?;
        let mut filled = 0;
        let layout = loop {
            if filled == MAX_ANSWER {
                return Err(format!("an answer exceeds {MAX_ANSWER} bytes"));
            }
            if filled == self.buffer.len() {
                self.buffer.resize((filled * 4).min(MAX_ANSWER), 0);
            }
            let got = self.stream.read(&mut self.buffer[filled..]).await;
            match got.map_err(|error| format!("cannot read an answer: {error}"))? {
                0 => return Err(format!("the connection was closed after {filled} bytes of an answer")),
                got => filled += got,
            }
            if let Some(layout) = parse(&self.buffer[..filled])? {
                break layout;
            }
        };
        if layout.body.end != filled {
            return Err(format!("{} bytes came after the end of the answer", filled - layout.body.end));
        }
        Ok(Answer {
            status: layout.status,
            lock_token: layout.lock_token.map(|token| &self.buffer[token]),
            body: &self.buffer[layout.body],
        })
    }

    pub(crate) async fn get(&mut self, path: &str) -> Result<Answer<'_>, String> {
        self.exchange(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes()).await
    }

    /// What a process does that dies with data unread: the other side sees a reset instead of an orderly end.
    pub(crate) fn reset_when_dropped(&self) -> Result<(), String> {
        self.stream.set_zero_linger().map_err(|error| format!("cannot set SO_LINGER: {error}"))
    }
}

/// Where the parts of an answer lie.
#[derive(Debug, PartialEq)]
struct Layout {
    status: u16,
    lock_token: Option<Range<usize>>,
    body: Range<usize>,
}

/// Looks at the bytes that have come so far; `None` means that the answer is not complete.
fn parse(bytes: &[u8]) -> Result<Option<Layout>, String> {
    let Some(head) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else { return Ok(None) };
    let status = bytes
        .strip_prefix(b"HTTP/1.1 ")
        .and_then(|rest| std::str::from_utf8(rest.get(..3)?).ok()?.parse().ok())
        .ok_or_else(|| {
            let line = String::from_utf8_lossy(&bytes[..head.min(80)]).into_owned();
            format!("{line:?} does not begin an HTTP/1.1 answer")
        })?;

    let (mut lock_token, mut length) = (None, 0);
    let mut at = 0;
    for line in bytes[..head].split(|&byte| byte == b'\n') {
        let value = |name: &[u8]| {
            let (start, rest) = line.split_at_checked(name.len())?;
            let value = rest.strip_prefix(b":")?;
            start.eq_ignore_ascii_case(name).then_some((value, value.trim_ascii()))
        };
        if let Some((_, text)) = value(b"content-length") {
            length = std::str::from_utf8(text)
                .ok()
                .and_then(|text| text.parse().ok())
                .filter(|&length| length <= MAX_ANSWER)
                .ok_or_else(|| format!("Content-Length {} is not within 0..={MAX_ANSWER}", text.escape_ascii()))?;
        } else if let Some((raw, token)) = value(b"lock-token") {
            let leading = raw.len() - raw.trim_ascii_start().len();
            let start = at + line.len() - raw.len() + leading;
            lock_token = Some(start..start + token.len());
        } else if let Some((_, coding)) = value(b"transfer-encoding") {
            return Err(format!(
                "Transfer-Encoding {}: this client reads answers with Content-Length only",
                coding.escape_ascii()
            ));
        }
        at += line.len() + 1;
    }

    let body = head + 4..head + 4 + length;
    Ok((body.end <= bytes.len()).then_some(Layout { status, lock_token, body }))
}

/// Writes `POST /locks/{name}` with a JSON body over what the buffer held.
pub(crate) fn write_acquire(buffer: &mut Vec<u8>, name: u64, body: &str) {
    buffer.clear();
    let length = body.len();
    write!(
        buffer,
        "POST /locks/bench-{name:016x} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    )
    .expect("a Vec takes everything");
}

/// Writes `PATCH /locks/{name}` with its token and a JSON body over what the buffer held.
pub(crate) fn write_extend(buffer: &mut Vec<u8>, name: u64, token: &[u8], body: &str) {
    buffer.clear();
    write!(buffer, "PATCH /locks/bench-{name:016x} HTTP/1.1\r\nhost: localhost\r\nlock-token: ")
        .expect("a Vec takes everything");
    buffer.extend_from_slice(token);
    let length = body.len();
    write!(buffer, "\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}")
        .expect("a Vec takes everything");
}

/// Writes `DELETE /locks/{name}` with its token over what the buffer held.
pub(crate) fn write_release(buffer: &mut Vec<u8>, name: u64, token: &[u8]) {
    buffer.clear();
    write!(buffer, "DELETE /locks/bench-{name:016x} HTTP/1.1\r\nhost: localhost\r\nlock-token: ")
        .expect("a Vec takes everything");
    buffer.extend_from_slice(token);
    buffer.extend_from_slice(b"\r\n\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANTED: &[u8] =
        b"HTTP/1.1 201 Created\r\nLock-TOKEN: \t a:b \r\nx-lock-token: no\r\ncontent-length: 7\r\n\r\n{\"a\":1}";
    const RELEASED: &[u8] = b"HTTP/1.1 204 No Content\r\ndate: today\r\n\r\n";

    #[test]
    fn an_answer_is_complete_with_its_last_byte_and_not_before() {
        for answer in [GRANTED, RELEASED] {
            for cut in 0..answer.len() {
                assert_eq!(parse(&answer[..cut]), Ok(None), "{}", answer[..cut].escape_ascii());
            }
            let layout = parse(answer).expect("it is well-formed").expect("it is complete");
            assert_eq!(layout.body.end, answer.len());
        }
    }

    #[test]
    fn the_parts_are_found() {
        let layout = parse(GRANTED).unwrap().unwrap();
        assert_eq!(layout.status, 201);
        assert_eq!(&GRANTED[layout.lock_token.unwrap()], b"a:b");
        assert_eq!(&GRANTED[layout.body], b"{\"a\":1}");
        assert_eq!(parse(RELEASED).unwrap().unwrap().lock_token, None);
    }

    #[test]
    fn what_this_client_cannot_read_is_refused() {
        for (answer, word) in [
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", "chunked"),
            ("HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "-1"),
            ("HTTP/1.0 200 OK\r\n\r\n", "HTTP/1.0"),
            ("+PONG\r\n\r\n", "PONG"),
        ] {
            let error = parse(answer.as_bytes()).expect_err(answer);
            assert!(error.contains(word), "{error}");
        }
    }

    #[tokio::test]
    async fn the_buffer_grows_with_an_answer_up_to_a_limit() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let answer = |length: usize| {
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n");
            [head.into_bytes(), vec![b'x'; length]].concat()
        };
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut byte = [0];
            for length in [FIRST_BUFFER * 3, MAX_ANSWER] {
                stream.read_exact(&mut byte).await.unwrap();
                // The client hangs up on the longer one before its end.
                let _ = stream.write_all(&answer(length)).await;
            }
        };
        let client = async {
            let mut connection = Connection::open(address).await.unwrap();
            assert_eq!(connection.exchange(b"x").await.unwrap().body.len(), FIRST_BUFFER * 3);
            let error = connection.exchange(b"x").await.unwrap_err();
            assert!(error.contains("exceeds"), "{error}");
        };
        tokio::join!(server, client);
    }

    #[tokio::test]
    async fn answers_in_pieces_and_a_hasty_second_answer() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let mut byte = [0];
            stream.read_exact(&mut byte).await.unwrap();
            for piece in GRANTED.chunks(20) {
                stream.write_all(piece).await.unwrap();
                tokio::task::yield_now().await;
            }
            stream.read_exact(&mut byte).await.unwrap();
            stream.write_all(&[RELEASED, RELEASED].concat()).await.unwrap();
        };
        let client = async {
            let mut connection = Connection::open(address).await.unwrap();
            let answer = connection.exchange(b"x").await.unwrap();
            assert_eq!(answer, Answer { status: 201, lock_token: Some(b"a:b"), body: b"{\"a\":1}" });
            let error = connection.exchange(b"x").await.unwrap_err();
            assert!(error.contains(&format!("{} bytes", RELEASED.len())), "{error}");
        };
        tokio::join!(server, client);
    }
}
