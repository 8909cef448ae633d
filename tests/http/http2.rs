//! HTTP/2, which clients may choose in the TLS handshake: many requests on one connection, their
//! limits, clients that reset a request, and the end of connections.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use http::{HeaderMap, Method, Request};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::net::TcpSocket;

use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::certificates::{Authority, Client};
use crate::support::client::{Answer, Lease};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{eventually, free_port, masters};
use crate::support::http2::{
    END_HEADERS, END_STREAM, Frames, GOAWAY, HEADERS, Http2, answered, block, event_headers, frame,
    get, reset_of,
};
use crate::support::measure::measured;
use crate::support::proxy::Proxy;
use crate::support::waiters::{HOUR_MS, patient, patient_over};

/// A gateway with HTTPS, and a client that trusts it.
pub(super) struct Stage {
    pub(super) gateway: Gateway,
    pub(super) client: Client,
    authority: Authority,
}

impl Stage {
    pub(super) async fn start() -> Self {
        Self::with(|launch| launch).await
    }

    /// A gateway with these settings, which allows TTLs and waits of [`HOUR_MS`].
    pub(super) async fn with(change: impl FnOnce(Launch) -> Launch) -> Self {
        Self::of(change(patient(Launch::embedded()))).await
    }

    async fn of(launch: Launch) -> Self {
        let authority = Authority::new();
        let own = authority.issue("server", "/CN=gateway");
        let launch = launch.flag("--tls-cert", &own.cert).flag("--tls-key", &own.key);
        let gateway = launch.env("RUST_LOG", "info").start().await;
        Self { gateway, client: Client::trusting(&authority), authority }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.gateway.address()
    }

    pub(super) async fn open(&self) -> Http2 {
        Http2::open(&self.client, self.address()).await
    }

    /// A connection from the address 127.0.0.`last`.
    pub(super) async fn from(&self, last: u8) -> Http2 {
        let socket = TcpSocket::new_v4().expect("a socket");
        let address = SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0));
        socket.bind(address).expect("all of 127/8 is this machine");
        let stream = socket.connect(self.address()).await.expect("the gateway listens");
        Http2::over(&self.client, stream, &h2::client::Builder::new()).await
    }

    /// Runs curl, and returns the head and the body of the answer.
    async fn curl(&self, args: &[&str], path: &str) -> String {
        let url = format!("https://{}{path}", self.address());
        let ca = self.authority.ca();
        let ran = tokio::process::Command::new("curl")
            .args(["--silent", "--show-error", "--include", "--cacert", &ca])
            .args(args)
            .arg(url)
            .output()
            .await
            .expect("curl starts");
        format!("{}{}", String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr))
    }

    /// The value of a metric without labels, or the sum over its labels.
    pub(super) async fn metric(&self, name: &str) -> f64 {
        let connection = self.client.open(self.address());
        let mut connection = connection.await.expect("the gateway listens");
        let request = Request::get("/metrics").header("host", "localhost");
        let request = request.body(Default::default()).expect("a request");
        let (_, text) = connection.send(request).await.expect("an answer");
        let text = String::from_utf8_lossy(&text).into_owned();
        let values = text.lines().filter_map(|line| {
            let (series, value) = line.rsplit_once(' ')?;
            let is_it = series.split('{').next() == Some(name);
            value.parse::<f64>().ok().filter(|_| is_it)
        });
        values.sum()
    }

    pub(super) async fn metric_is(&self, name: &str, value: f64) {
        let what = format!("{name} is {value}");
        eventually(&what, async || (self.metric(name).await == value).then_some(())).await;
    }

    async fn state_of(&self, name: &str) -> Value {
        self.open().await.get(&format!("/locks/{name}")).await.json()["state"].clone()
    }
}

fn lease(answer: &Answer) -> Lease {
    Lease::from(answer)
}

#[tokio::test]
async fn curl_locks_over_both_protocols() {
    let stage = Stage::start().await;
    for (version, status_line) in [("--http2", "HTTP/2 "), ("--http1.1", "HTTP/1.1 ")] {
        let post = ["--json", r#"{"ttl_ms": 60000}"#, version];
        let granted = stage.curl(&post, "/locks/job").await;
        assert!(granted.starts_with(&format!("{status_line}201")), "{granted}");
        let head = granted.to_lowercase();
        assert_eq!(head.contains("\nkeep-alive:"), version == "--http1.1", "{granted}");
        assert!(!head.contains("\nconnection:"), "{granted}");
        let (_, rest) = head.split_once("lock-token: ").expect("a token");
        let token = format!("lock-token: {}", rest.lines().next().expect("a line").trim());
        let patch = ["-X", "PATCH", "-H", &token, "--json", r#"{"ttl_ms": 60000}"#, version];
        let extended = stage.curl(&patch, "/locks/job").await;
        assert!(extended.starts_with(&format!("{status_line}200")), "{extended}");
        let released = stage.curl(&["-X", "DELETE", "-H", &token, version], "/locks/job").await;
        assert!(released.starts_with(&format!("{status_line}204")), "{released}");
    }
}

#[tokio::test]
async fn an_error_to_head_has_no_body() {
    let stage = Stage::start().await;
    let connection = stage.open().await;
    let none = HeaderMap::new();
    let answer = connection.call(Method::HEAD, "/nothing", &none, &Value::Null).await;
    assert_eq!((answer.status, answer.body.len()), (404, 0));
    let length: usize = answer.header("content-length").parse().expect("a number");
    assert!(length > 0, "the length is that of the answer to GET");
}

/// The gateway refuses a request without a key as soon as it has read the head. If the gateway
/// reset the stream while the body is still arriving, curl would lose the answer.
#[tokio::test]
async fn curl_sees_an_answer_that_does_not_need_its_body() {
    let ci = key("ci", HOLDER, "*").await;
    let file = file(&[&ci]);
    let stage = Stage::of(with_keys(&file)).await;
    for _ in 0..20 {
        for (path, status) in [("/locks/job", 401), ("/livez", 405)] {
            let answer = stage.curl(&["--json", r#"{"ttl_ms": 60000}"#, "--http2"], path).await;
            assert!(answer.starts_with(&format!("HTTP/2 {status}")), "{path}: {answer}");
        }
    }
}

/// The gateway waits 300 ms for the rest. Then it resets the stream, as RFC 9113 permits.
#[tokio::test]
async fn a_refusal_with_an_endless_body_ends_by_a_reset() {
    let stage = Stage::start().await;
    let took = refused_with_an_endless_body(&stage).await;
    assert!(took > Duration::from_millis(290), "{took:?}");
}

/// Sends a request that is refused, with a body that never ends. Returns how long the answer and the
/// reset took.
async fn refused_with_an_endless_body(stage: &Stage) -> Duration {
    let connection = stage.open().await;
    let request = Request::post("https://localhost/livez").body(()).expect("a request");
    let began = Instant::now();
    let (answer, mut stream) = connection.begin_open(request, "{".into()).await;
    assert_eq!(answered(answer).await.status, 405);
    assert_eq!(reset_of(&mut stream).await, h2::Reason::NO_ERROR);
    began.elapsed()
}

#[tokio::test]
async fn http2_can_be_switched_off_and_needs_tls() {
    let stage = Stage::with(|launch| launch.argument("--http2=false")).await;
    let answer = stage.curl(&["--http2"], "/livez").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(
        stage.client.speaking_http2().connect(stage.address()).await.is_err(),
        "a client that offers only h2 is refused in the handshake"
    );
    // Cleartext is HTTP/1.1: neither prior knowledge nor an upgrade leads to HTTP/2.
    let plain = Launch::embedded().start().await;
    let mut raw = plain.raw().await;
    raw.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
    let closed = raw.closed().await;
    assert!(closed.is_empty() || closed.starts_with("HTTP/1.1 400"), "{closed}");
    let mut raw = plain.raw().await;
    let upgrade =
        "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n";
    raw.write(format!("GET /livez HTTP/1.1\r\nhost: localhost\r\n{upgrade}\r\n")).await;
    assert_eq!(raw.answer().await.status, 200, "no 101");
}

#[tokio::test]
async fn requests_of_one_connection_do_not_wait_for_each_other() {
    let stage = Stage::start().await;
    let connection = stage.open().await;
    let held = lease(&connection.post("/locks/job", &json!({ "ttl_ms": 60_000 })).await);
    let mut waiting = Vec::new();
    for _ in 0..50 {
        let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS });
        let none = HeaderMap::new();
        waiting.push(connection.begin(Method::POST, "/locks/job", &none, &body).await);
    }
    stage.metric_is("redlock_waiters", 50.0).await;
    let extended = connection.with_token(Method::PATCH, "/locks/job", &held.token).await;
    assert_eq!(extended.status, 200);
    for field in ["connection", "keep-alive", "transfer-encoding"] {
        assert_eq!(extended.header(field), "", "{extended:?}");
    }
    // Each waiter gets the lock in its turn, and passes it on.
    let released = connection.with_token(Method::DELETE, "/locks/job", &held.token).await;
    assert_eq!(released.status, 204);
    let mut answers: FuturesUnordered<_> =
        waiting.into_iter().map(|(answer, _)| answered(answer)).collect();
    let mut last = held.fencing;
    while let Some(answer) = answers.next().await {
        let granted = lease(&answer);
        assert!(granted.fencing > last);
        last = granted.fencing;
        let released = connection.with_token(Method::DELETE, "/locks/job", &granted.token).await;
        assert_eq!(released.status, 204);
    }
    // All requests shared one connection. The other one reads the metrics.
    stage.metric_is("redlock_connections", 2.0).await;
}

#[tokio::test]
async fn a_reset_request_leaves_the_queue_and_others_stay() {
    let stage = Stage::start().await;
    let connection = stage.open().await;
    let held = lease(&connection.post("/locks/job", &json!({ "ttl_ms": 60_000 })).await);
    let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS });
    let wait =
        async || connection.begin(Method::POST, "/locks/job", &HeaderMap::new(), &body).await;
    let (_first, mut first) = wait().await;
    stage.metric_is("redlock_waiters", 1.0).await;
    let (second, _stream) = wait().await;
    stage.metric_is("redlock_waiters", 2.0).await;
    first.send_reset(h2::Reason::CANCEL);
    stage.metric_is("redlock_waiters", 1.0).await;
    let released = connection.with_token(Method::DELETE, "/locks/job", &held.token).await;
    assert_eq!(released.status, 204);
    assert_eq!(answered(second).await.status, 201, "the next in line gets the lock");
}

#[tokio::test]
async fn a_request_that_is_reset_during_its_acquire_leaves_no_lock() {
    let servers = masters(3);
    let stage =
        Stage::of(patient_over(&servers).flag("--clock-skew", "10s").flag("--node-timeout", "10s"))
            .await;
    let connection = stage.open().await;
    eventually("the masters vote", async || {
        let granted = connection.post("/locks/first", &json!({})).await;
        (granted.status == 201).then_some(())
    })
    .await;
    // One master has the lock, and two answer only after the reset.
    servers[0].stop();
    servers[1].stop();
    let mut begun = Vec::new();
    for number in 0..20 {
        let path = format!("/locks/reset-{number}");
        let body = json!({ "ttl_ms": HOUR_MS });
        begun.push(connection.begin(Method::POST, &path, &HeaderMap::new(), &body).await);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    for (_, stream) in &mut begun {
        stream.send_reset(h2::Reason::CANCEL);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    servers[0].cont();
    servers[1].cont();
    eventually("no lock is left", async || {
        let listed = connection.get("/locks?prefix=reset-").await.json();
        listed["locks"].as_array()?.is_empty().then_some(())
    })
    .await;
    assert_eq!(connection.post("/locks/reset-7", &json!({})).await.status, 201);
}

/// The bytes of the grant may have reached the client, which then relies on it.
#[tokio::test]
async fn a_grant_that_was_handed_over_is_not_released() {
    let stage = Stage::start().await;
    let other = stage.open().await;
    let held = lease(&other.post("/locks/job", &json!({ "ttl_ms": 60_000 })).await);
    let mut watcher = other.events(Method::GET, "/locks/job", &Value::Null).await;
    watcher.next_of("snapshot").await;
    // The first event waits for this client's window, with its first byte sent. The gateway's library
    // then takes the next event, and keeps it.
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(1);
    let stalled = Http2::open_with(&stage.client, stage.address(), &builder).await;
    const TTL: Duration = Duration::from_secs(6);
    let body = json!({ "ttl_ms": TTL.as_millis() as u64, "wait_ms": HOUR_MS });
    let (_answer, mut stream) =
        stalled.begin(Method::POST, "/locks/job", &event_headers(), &body).await;
    stage.metric_is("redlock_waiters", 1.0).await;
    let before = Instant::now();
    let released = other.with_token(Method::DELETE, "/locks/job", &held.token).await;
    assert_eq!(released.status, 204);
    // The masters store the grant a moment before the library takes its event. The first extension
    // comes after both.
    watcher.next_of("extended").await;
    stream.send_reset(h2::Reason::CANCEL);
    eventually("the grant ends with its TTL", async || {
        (stage.state_of("job").await == "free").then_some(())
    })
    .await;
    assert!(before.elapsed() > TTL, "{:?}", before.elapsed());
}

#[tokio::test]
async fn the_host_of_an_http2_request_is_checked() {
    let stage = Stage::start().await;
    let pseudo = |authority: Option<&'static str>, host: Option<&'static str>| {
        let mut fields = vec![(":method", "GET"), (":scheme", "https"), (":path", "/readyz")];
        fields.extend(authority.map(|authority| (":authority", authority)));
        fields.extend(host.map(|host| ("host", host)));
        block(&fields)
    };
    for (authority, host, status) in [
        (Some("localhost"), None, 200),
        (Some("127.0.0.1:8080"), None, 200),
        (None, Some("localhost"), 200),
        (Some("localhost"), Some("localhost"), 200),
        (Some("evil.example"), None, 421),
        (None, Some("evil.example"), 421),
        (Some("localhost"), Some("evil.example"), 421),
        (Some("evil.example"), Some("localhost"), 421),
        (Some("localhost.evil.example"), None, 421),
        (None, None, 400),
        (Some("evil.example@localhost"), None, 400),
    ] {
        let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
        let head = frame(HEADERS, END_HEADERS | END_STREAM, 1, &pseudo(authority, host));
        frames.write(&head).await.expect("sent");
        let (_, _, answer) = frames.next_of(HEADERS).await.expect("an answer");
        assert_eq!(status_of(&answer), status, "{authority:?} {host:?}");
    }
}

/// The status in a header block. The gateway sends it first: as an entry of the static table, or as
/// a literal with an indexed name.
fn status_of(block: &[u8]) -> u16 {
    const STATIC: [u16; 7] = [200, 204, 206, 304, 400, 404, 500];
    // A change of the table's size may come first.
    let block = if block[0] & 0xe0 == 0x20 { &block[1..] } else { block };
    if block[0] & 0x80 != 0 {
        return STATIC[usize::from(block[0] & 0x7f) - 8];
    }
    let (is_huffman, length) = (block[1] & 0x80 != 0, usize::from(block[1] & 0x7f));
    let text = &block[2..2 + length];
    if !is_huffman {
        return std::str::from_utf8(text).expect("digits").parse().expect("a status");
    }
    // Digits have codes of 5 or 6 bits (RFC 7541, appendix B).
    let bits: String = text.iter().map(|byte| format!("{byte:08b}")).collect();
    let (mut rest, mut status) = (bits.as_str(), 0);
    for _ in 0..3 {
        let digit = match &rest[..5] {
            "00000" => 0,
            "00001" => 1,
            "00010" => 2,
            _ => {
                let code = u16::from_str_radix(&rest[..6], 2).expect("bits");
                status = status * 10 + code - 0x19 + 3;
                rest = &rest[6..];
                continue;
            }
        };
        status = status * 10 + digit;
        rest = &rest[5..];
    }
    status
}

#[tokio::test]
async fn pages_of_other_sites_cannot_call_over_http2() {
    let stage = Stage::start().await;
    let connection = stage.open().await;
    let own = format!("https://localhost:{}", stage.address().port());
    for (field, value, status) in [
        ("origin", "https://evil.example", 403),
        ("origin", "null", 403),
        ("sec-fetch-site", "cross-site", 403),
        ("sec-fetch-site", "same-site", 403),
        ("sec-fetch-site", "same-origin", 201),
        ("origin", own.as_str(), 201),
    ] {
        let request = Request::post(format!("{own}/locks/job"))
            .header("content-type", "application/json")
            .header(field, value)
            .body(())
            .expect("a request");
        let (answer, _stream) = connection.begin_request(request, Some("{}".into())).await;
        let answer = answered(answer).await;
        assert_eq!(answer.status, status, "{field}: {value}: {answer:?}");
        if status == 201 {
            let token = lease(&answer).token;
            let released = connection.with_token(Method::DELETE, "/locks/job", &token).await;
            assert_eq!(released.status, 204);
        }
    }
}

#[tokio::test]
async fn many_event_streams_share_one_connection() {
    let stage = Stage::with(|launch| launch.flag("--drain-delay", "0s")).await;
    let streams = stage.open().await;
    let mut watching = Vec::new();
    for number in 0..40 {
        let path = format!("/locks/watched-{number}");
        let mut events = streams.events(Method::GET, &path, &Value::Null).await;
        events.next_of("snapshot").await;
        watching.push((path, events));
    }
    let mut holding = Vec::new();
    for number in 0..40 {
        let path = format!("/locks/held-{number}");
        let mut events = streams.events(Method::POST, &path, &json!({ "ttl_ms": 30_000 })).await;
        events.next_of("granted").await;
        holding.push(events);
    }
    // One stream is not read: its client grants no window. The others go on.
    let other = stage.open().await;
    let mut unread = streams.events(Method::GET, "/locks?prefix=watched-", &Value::Null).await;
    for (path, events) in &mut watching {
        let token = lease(&other.post(path, &json!({ "ttl_ms": 60_000 })).await).token;
        let held = events.next_of("held").await;
        assert_eq!(held.data["state"], "held");
        assert_eq!(other.with_token(Method::DELETE, path, &token).await.status, 204);
        events.next_of("released").await;
    }
    unread.next_of("snapshot").await;
    // A browser that closes one stream ends that stream alone.
    let before = stage.metric("redlock_event_streams").await;
    holding.pop().expect("a stream").reset();
    stage.metric_is("redlock_event_streams", before - 1.0).await;
    stage.gateway.signal(Signal::TERM);
    for (_, mut events) in watching {
        assert_eq!(events.next_of("end").await.data["reason"], "draining");
        assert_eq!(events.try_next().await, None);
    }
    for mut events in holding {
        assert_eq!(events.next_of("end").await.data["reason"], "draining");
    }
    let mut stage = stage;
    assert_eq!(stage.gateway.ended().await, Some(0));
}

#[tokio::test]
async fn a_slow_reader_stalls_only_its_own_stream() {
    let stage = Stage::start().await;
    // The window of each stream holds a few events; that of the connection holds many.
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(4_000).initial_connection_window_size(1 << 20);
    let connection = Http2::open_with(&stage.client, stage.address(), &builder).await;
    let slow = connection.begin(Method::GET, "/locks/job", &event_headers(), &Value::Null).await;
    let mut read = connection.events(Method::GET, "/locks/job", &Value::Null).await;
    read.next_of("snapshot").await;
    let other = stage.open().await;
    let before = stage.gateway.resident();
    let began = Instant::now();
    for _ in 0..1_000 {
        let token = lease(&other.post("/locks/job", &json!({ "ttl_ms": 60_000 })).await).token;
        read.next_of("held").await;
        assert_eq!(other.with_token(Method::DELETE, "/locks/job", &token).await.status, 204);
        read.next_of("released").await;
    }
    let grown = stage.gateway.resident() - before;
    println!("2,000 events in {:?}, {grown} bytes more", began.elapsed());
    assert!(grown < 8e6, "{grown} bytes");
    drop(slow);
}

#[tokio::test]
async fn answers_during_a_shutdown_announce_the_end_of_the_connection() {
    let stage = Stage::with(|launch| launch.flag("--drain-delay", "1h")).await;
    let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
    let request = |stream| frame(HEADERS, END_HEADERS | END_STREAM, stream, &get("/livez"));
    frames.write(&request(1)).await.expect("sent");
    frames.next_of(HEADERS).await.expect("an answer");
    let mut waiting = stage.open().await;
    let held = lease(&waiting.post("/locks/job", &json!({ "ttl_ms": 60_000 })).await);
    stage.gateway.signal(Signal::TERM);
    eventually("the gateway leaves", async || {
        let ready = stage.client.get(stage.address(), "/readyz").await;
        (ready == Ok(503)).then_some(())
    })
    .await;
    // The delay has not passed: the request is served, and the client is told to go.
    frames.write(&request(3)).await.expect("sent");
    let mut seen = Vec::new();
    while let Some((kind, _, stream, _)) = frames.next().await {
        seen.push((kind, stream));
        if kind == GOAWAY {
            break;
        }
    }
    assert!(seen.contains(&(HEADERS, 3)) && seen.last() == Some(&(GOAWAY, 0)), "{seen:?}");
    // On a connection without news, a holder still extends.
    assert_eq!(waiting.with_token(Method::PATCH, "/locks/job", &held.token).await.status, 200);
    waiting.ended().await.expect("the connection ends without an error");
}

#[tokio::test]
async fn a_shutdown_ends_idle_http2_connections() {
    let mut stage =
        Stage::with(|launch| launch.flag("--drain-delay", "1s").flag("--shutdown-grace", "1h"))
            .await;
    let mut idle = stage.open().await;
    assert_eq!(idle.get("/livez").await.status, 200);
    stage.gateway.signal(Signal::TERM);
    assert_eq!(stage.gateway.ended().await, Some(0));
    idle.ended().await.expect("the connection ends without an error");
}

#[tokio::test]
async fn a_connection_without_requests_ends_after_the_idle_timeout() {
    let timeout = Duration::from_secs(5);
    let stage = Stage::with(|launch| launch.flag("--idle-timeout", "5s")).await;
    let busy = stage.open().await;
    let mut events = busy.events(Method::GET, "/locks/job", &Value::Null).await;
    events.next_of("snapshot").await;
    let ends = IdleEnds::of(&stage).await;
    assert!(ends.idle > timeout.mul_f64(0.95), "{:?}", ends.idle);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!busy.has_ended(), "an event stream keeps its connection");
    assert_eq!(busy.get("/livez").await.status, 200);
}

/// When idle connections have ended, since the first one began.
struct IdleEnds {
    /// A connection whose request has been answered.
    idle: Duration,
    /// Also connections without a whole request.
    all: Duration,
}

impl IdleEnds {
    async fn of(stage: &Stage) -> Self {
        let began = Instant::now();
        // The first sends nothing. The second sends a part of the preface, the third a part of a
        // head.
        let mut silent = Frames::silent(&stage.client, stage.address()).await;
        let mut preface = Frames::silent(&stage.client, stage.address()).await;
        preface.write(b"PRI * HTTP/2.0\r\n").await.expect("sent");
        let mut head = Frames::open(&stage.client, stage.address(), &[]).await;
        let part = get("/livez");
        let half = &part[..part.len() / 2];
        head.write(&frame(HEADERS, END_STREAM, 1, half)).await.expect("sent");
        let mut idle = Frames::open(&stage.client, stage.address(), &[]).await;
        let whole = frame(HEADERS, END_HEADERS | END_STREAM, 1, &part);
        idle.write(&whole).await.expect("sent");
        assert_eq!(idle.goaway().await, Some(0), "the connection ends by GOAWAY");
        let of_idle = began.elapsed();
        for frames in [&mut silent, &mut preface, &mut head] {
            frames.goaway().await;
        }
        Self { idle: of_idle, all: began.elapsed() }
    }
}

#[tokio::test]
async fn requests_of_one_connection_count_for_the_connection_limits() {
    let stage = Stage::with(|launch| {
        let launch = launch.flag("--max-waiters", "20").flag("--max-waiters-per-client", "20");
        launch.flag("--max-connections", "13").flag("--max-connections-per-client", "4")
    })
    .await;
    let owner = stage.from(2).await;
    lease(&owner.post("/locks/job", &json!({ "ttl_ms": HOUR_MS })).await);
    // All slots are to be taken by requests under way, and none by an idle connection.
    let _events = owner.events(Method::GET, "/locks/job", &Value::Null).await;
    let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS });
    let mut taken = Vec::new();
    let mut waiters = 0.0;
    for client in [3, 4, 5] {
        let connection = stage.from(client).await;
        let mut waiting = Vec::new();
        for _ in 0..4 {
            waiters += 1.0;
            // The gateway may not have noticed yet that the connection which read the metric has
            // ended. Then that connection has the last slot.
            let begun = eventually("the request waits", async || {
                let (mut answer, stream) =
                    connection.begin(Method::POST, "/locks/job", &HeaderMap::new(), &body).await;
                tokio::select! {
                    () = stage.metric_is("redlock_waiters", waiters) => Some((answer, stream)),
                    refused = &mut answer => {
                        assert_eq!(refused.expect("an answer").status(), 503);
                        None
                    }
                }
            });
            waiting.push(begun.await);
        }
        if client == 3 {
            // The fifth request of this client is refused, whatever connection it comes on.
            let refused = connection.post("/locks/other", &json!({})).await;
            let problem = refused.problem(503, "overloaded");
            let detail = problem["detail"].as_str().expect("a text");
            assert!(detail.contains("--max-connections-per-client"), "{detail}");
            assert_eq!(connection.get("/livez").await.status, 200, "a probe is served");
            assert_eq!(owner.post("/locks/free", &json!({})).await.status, 201, "another client");
        }
        taken.push((connection, waiting));
    }
    let newcomer = stage.from(6).await;
    let refused = newcomer.post("/locks/other", &json!({})).await;
    refused.problem(503, "overloaded");
    taken.pop();
    eventually("slots are free again", async || {
        let newcomer = stage.from(6).await;
        (newcomer.post("/locks/other", &json!({})).await.status == 201).then_some(())
    })
    .await;
}

#[tokio::test]
async fn idle_http2_connections_make_room_and_busy_ones_stay() {
    let stage = Stage::with(|launch| launch.flag("--max-connections", "8")).await;
    let busy = stage.open().await;
    let held = lease(&busy.post("/locks/job", &json!({ "ttl_ms": HOUR_MS })).await);
    let mut events = busy.events(Method::GET, "/locks/job", &Value::Null).await;
    events.next_of("snapshot").await;
    let mut idle = Vec::new();
    for number in 0..40 {
        let connection = stage.open().await;
        assert_eq!(connection.get("/livez").await.status, 200, "connection {number}");
        idle.push(connection);
    }
    eventually("most idle connections have ended", async || {
        let ended = idle.iter().filter(|connection| connection.has_ended()).count();
        (ended > 20).then_some(())
    })
    .await;
    assert_eq!(busy.with_token(Method::DELETE, "/locks/job", &held.token).await.status, 204);
    events.next_of("released").await;
    assert!(stage.metric("redlock_connections_evicted_total").await > 20.0);
}

#[tokio::test]
async fn a_hang_up_ends_all_requests_of_the_connection() {
    let stage = Stage::start().await;
    let other = stage.open().await;
    let held = lease(&other.post("/locks/job", &json!({ "ttl_ms": HOUR_MS })).await);
    for polite in [true, false] {
        let connection = stage.open().await;
        let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS });
        let mut waiting = Vec::new();
        for _ in 0..90 {
            let begun =
                connection.begin(Method::POST, "/locks/job", &HeaderMap::new(), &body).await;
            waiting.push(begun);
        }
        stage.metric_is("redlock_waiters", 90.0).await;
        if polite {
            for (_, stream) in &mut waiting {
                stream.send_reset(h2::Reason::CANCEL);
            }
        } else {
            drop(connection);
        }
        stage.metric_is("redlock_waiters", 0.0).await;
    }
    assert_eq!(other.with_token(Method::DELETE, "/locks/job", &held.token).await.status, 204);
    assert_eq!(stage.state_of("job").await, "free", "no waiter was granted the lock");
}

#[tokio::test]
async fn a_certificate_stands_for_its_key_over_http2() {
    let authority = Authority::new();
    let own = authority.issue("server", "/CN=gateway");
    let keys = "[[key]]\nname = 'ci'\ncertificate = 'CN=ci'\nallow = [{ verbs = ['acquire'], names = ['*'] }]";
    let keys = Scratch::new("keys.toml", keys);
    let gateway = Launch::embedded()
        .flag("--tls-cert", &own.cert)
        .flag("--tls-key", &own.key)
        .flag("--tls-client-ca", &authority.ca())
        .flag("--auth-keys", keys.path())
        .start()
        .await;
    let ci = Client::showing(&authority, &authority.issue("ci", "/CN=ci"));
    let known = Http2::open(&ci, gateway.address()).await;
    assert_eq!(known.post("/locks/job", &json!({})).await.status, 201);
    let unknown = Http2::open(&Client::trusting(&authority), gateway.address()).await;
    assert_eq!(unknown.post("/locks/other", &json!({})).await.status, 401);
}

#[tokio::test]
async fn a_slow_body_is_answered_and_its_connection_goes_on() {
    let stage = Stage::start().await;
    let connection = stage.open().await;
    let request = Request::post("https://localhost/locks/job")
        .header("content-type", "application/json")
        .body(())
        .expect("a request");
    // These bodies have 10 s in all. A wait that begins with them and lasts longer must outlast them.
    lease(&connection.post("/locks/job", &json!({ "ttl_ms": HOUR_MS })).await);
    let body = json!({ "wait_ms": 25_000 });
    let (outlasts, _stream) =
        connection.begin(Method::POST, "/locks/job", &HeaderMap::new(), &body).await;
    let mut outlasts = tokio::spawn(answered(outlasts));
    let mut sender = Vec::new();
    let began = Instant::now();
    for _ in 0..3 {
        let head = request.clone();
        // The body begins, and never ends.
        let (answer, stream) = connection.begin_open(head, "{".into()).await;
        sender.push((answer, stream));
    }
    assert_eq!(connection.post("/locks/other", &json!({})).await.status, 201);
    for (answer, mut stream) in sender {
        answered(answer).await.problem(408, "request_timeout");
        assert_eq!(reset_of(&mut stream).await, h2::Reason::NO_ERROR);
    }
    let took = began.elapsed();
    assert!(took > Duration::from_secs(9), "{took:?}");
    assert!(
        !outlasts.is_finished(),
        "the wait ended before the bodies: {:?}",
        (&mut outlasts).await
    );
    assert_eq!(connection.get("/livez").await.status, 200);
}

/// HAProxy adds entries to the header table, and never refers to them.
#[tokio::test]
async fn haproxy_reaches_the_gateway_over_http2() {
    let stage = Stage::start().await;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
    let text = format!(
        "defaults
             mode http
             timeout connect 5s
             timeout client 60s
             timeout server 60s
         listen gateway
             bind {address}
             server one {} ssl verify none alpn h2
",
        stage.address()
    );
    let proxy = Proxy::haproxy(&stage.gateway, address, &text).await;
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..20 {
        let calls: Vec<_> = (0..20)
            .map(|lock| {
                let path = format!("/locks/{client}-{lock}");
                proxy.call(&stage.gateway, Method::POST, &path).header("x-note", "a longer text")
            })
            .collect();
        clients.spawn(async move {
            for call in calls {
                assert_eq!(call.send().await.status, 201);
            }
        });
    }
    clients.join_all().await;
    stage.metric_is("redlock_http2_floods_total", 0.0).await;
}

mod measured {
    use super::*;

    #[tokio::test]
    async fn endless_body_delays_a_refusal_only_for_a_moment() {
        let stage = Stage::start().await;
        measured("a refusal with an endless body", async || {
            let took = refused_with_an_endless_body(&stage).await;
            if took < Duration::from_secs(5) { Ok(()) } else { Err(format!("{took:?}")) }
        })
        .await;
    }

    #[tokio::test]
    async fn idle_connections_end_soon_after_the_idle_timeout() {
        let stage = Stage::with(|launch| launch.flag("--idle-timeout", "2s")).await;
        measured("the end of idle connections", async || {
            let IdleEnds { idle, all } = IdleEnds::of(&stage).await;
            let is_soon = idle < Duration::from_secs(6) && all < Duration::from_secs(12);
            if is_soon { Ok(()) } else { Err(format!("after {idle:?}, and all after {all:?}")) }
        })
        .await;
    }
}
