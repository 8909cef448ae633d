//! The most memory that connections can use, compared with the gateway's own estimate.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use http::{HeaderMap, Method};
use serde_json::json;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::client::TlsStream;

use crate::support::certificates::{Authority, Client};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{daily_or_long, eventually, masters};
use crate::support::http2::{
    CONTINUATION, END_HEADERS, END_STREAM, HEADERS, Http2, SETTINGS, block, frame, get,
};
use crate::support::metrics::Samples;
use crate::support::waiters::{HOUR_MS, patient};

const FEW: usize = 400;
const MANY: usize = 16_000;
const HEAD: usize = 15 * 1024;
/// How many requests of one HTTP/2 connection may be under way.
const STREAMS: usize = 100;
/// The longest payload of a frame.
const FRAME: usize = 16_384;
/// A debug build may take this many times the estimate. Without optimisation, tasks are larger: a
/// waiting request takes 10.3 to 11 kB. Connections grow less, because they are mostly buffers.
const OF_TASKS: f64 = if cfg!(debug_assertions) { 1.45 } else { 1.0 };
const OF_BUFFERS: f64 = if cfg!(debug_assertions) { 1.2 } else { 1.0 };

fn connections() -> usize {
    daily_or_long(FEW, MANY)
}

/// The beginning of a request head that is just below the size limit.
fn partial_head() -> Vec<u8> {
    let mut head = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n".to_vec();
    for number in 0..HEAD / 1000 {
        head.extend(format!("x-{number}: {}\r\n", "y".repeat(1000)).bytes());
    }
    head.truncate(HEAD);
    head
}

/// The beginning of an HTTP/2 connection: the preface, and these frames.
fn http2(frames: &[Vec<u8>]) -> Vec<u8> {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".as_slice();
    [preface, &frame(SETTINGS, 0, 0, &[]), &frames.concat()].concat()
}

/// A request head that END_HEADERS does not end.
fn partial_http2_head(fields: &[(&str, &str)]) -> Vec<u8> {
    frame(HEADERS, END_STREAM, 1, &[get("/livez"), block(fields)].concat())
}

/// A partial request head of [`HEAD`] bytes.
fn large_http2_head() -> Vec<u8> {
    let value = "y".repeat(1000);
    let names: Vec<String> = (0..HEAD / 1000).map(|number| format!("x-{number}")).collect();
    let fields: Vec<_> = names.iter().map(|name| (name.as_str(), value.as_str())).collect();
    partial_http2_head(&fields)
}

/// The beginning of a TLS record that announces 16,640 bytes.
fn partial_record() -> Vec<u8> {
    [&[0x17, 3, 3, 0x41, 0], [0; 16_000].as_slice()].concat()
}

/// The settings for HTTPS, and a client that trusts the gateway. The authority keeps their files.
fn over_tls(launch: Launch) -> (Launch, Client, Authority) {
    let authority = Authority::new();
    let own = authority.issue("server", "/CN=gateway");
    let launch = launch.flag("--tls-cert", &own.cert).flag("--tls-key", &own.key);
    (launch, Client::trusting(&authority), authority)
}

/// The gateway's estimate, in bytes, for as many connections or requests as this flag allows.
async fn stated(launch: &Launch, flag: &str) -> f64 {
    let checked = launch.clone().command("check").finish().await;
    let (_, stated) =
        checked.stdout.split_once(&format!("{flag} ")).expect("check states the memory");
    let mut words = stated.split([' ', ':', ',', ')']).filter(|word| !word.is_empty()).skip(1);
    let number: f64 = words.next().and_then(|word| word.parse().ok()).expect("a number");
    let unit = words.next().expect("a unit");
    number
        * match unit {
            "MiB" => 1048576.0,
            "GiB" => 1073741824.0,
            unit => panic!("{unit}"),
        }
}

async fn connect(gateway: &Gateway, number: usize) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    // One address does not have enough ports for all tests, so the tests use several.
    let from = Ipv4Addr::new(127, 0, 1, (number % 200) as u8 + 1);
    socket.bind(SocketAddr::from((from, 0))).expect("all of 127/8 is this machine");
    socket.connect(gateway.address()).await.expect("the gateway listens")
}

/// Resident memory, as soon as it no longer grows. A gateway on a busy machine has first handled
/// everything that has arrived.
async fn resident(gateway: &Gateway) -> f64 {
    let mut last = 0.0;
    eventually("the memory no longer grows", async || {
        let before = std::mem::replace(&mut last, gateway.resident());
        tokio::time::sleep(Duration::from_millis(200)).await;
        (gateway.is_idle() && last <= before * 1.001).then_some(last)
    })
    .await
}

async fn holds(
    gateway: &Gateway,
    (launch, flag): (&Launch, &str),
    before: f64,
    what: &str,
    count: usize,
) {
    let slack = if flag == "--max-connections" { OF_BUFFERS } else { OF_TASKS };
    let stated = stated(launch, flag).await * slack;
    holds_in(gateway, stated, before, what, count).await;
}

/// Checks that the memory has grown by no more than `stated` bytes.
async fn holds_in(gateway: &Gateway, stated: f64, before: f64, what: &str, count: usize) {
    let grown = resident(gateway).await - before;
    let each = grown / 1e3 / count as f64;
    println!(
        "{count} {what}: {each:.1} kB each, {:.0} MB; estimated as {:.0} MB",
        grown / 1e6,
        stated / 1e6
    );
    assert!(grown < stated, "{count} {what} take {grown} bytes; check states {stated}");
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) {
    stream.write_all(bytes).await.expect("the memory is read");
    stream.flush().await.expect("the memory is read");
}

fn launch(count: usize) -> Launch {
    let launch = patient(Launch::embedded()).flag("--max-connections", &count.to_string());
    launch.flag("--idle-timeout", "1h").env("RUST_LOG", "info")
}

#[tokio::test]
async fn partial_heads_stay_within_their_stated_memory() {
    let count = connections();
    let launch = launch(count);
    let gateway = launch.clone().start().await;
    let before = resident(&gateway).await;
    let head = partial_head();
    let mut streams = Vec::new();
    for number in 0..count {
        streams.push(connect(&gateway, number).await);
    }
    for stream in &mut streams {
        send(stream, &head).await;
    }
    holds(&gateway, (&launch, "--max-connections"), before, "partial heads", count).await;
}

#[tokio::test]
async fn partial_heads_over_tls_stay_within_their_stated_memory() {
    let count = connections().min(12_000);
    let (launch, client, _authority) = over_tls(launch(count).argument("--http2=false"));
    let gateway = launch.clone().start().await;
    let before = resident(&gateway).await;
    let head = partial_head();
    let mut streams = Vec::new();
    for number in 0..count {
        let stream = connect(&gateway, number).await;
        streams.push(client.over(stream).await.expect("a handshake"));
    }
    for stream in &mut streams {
        send(stream, &head).await;
        send(stream.get_mut().0, &partial_record()).await;
    }
    holds(
        &gateway,
        (&launch, "--max-connections"),
        before,
        "partial heads and records over TLS",
        count,
    )
    .await;
}

/// After this time the gateway closes a connection that does not answer a PING: 20 s until the
/// PING, and 30 s for the answer.
const SILENT: Duration = Duration::from_secs(20 + 30);

/// Open connections to a gateway.
struct Held {
    _gateway: Gateway,
    streams: Vec<TlsStream<TcpStream>>,
    /// A time before the first of them was opened.
    began: Instant,
}

impl Held {
    /// How many connections the gateway has closed.
    fn closed(&self) -> usize {
        self.streams.iter().filter(|stream| is_closed(stream.get_ref().0)).count()
    }

    #[track_caller]
    fn assert_none_is_closed(&self, what: &str) {
        let closed = self.closed();
        let is_silent = self.began.elapsed() > SILENT;
        assert!(closed == 0 || is_silent, "{what}: {closed} connections were closed");
    }
}

/// Opens connections, sends these bytes and a partial TLS record on each, and compares the memory
/// with the estimate.
async fn hold_over_http2(what: &str, head: &[u8]) -> Held {
    hold_requests_over_http2(what, head, 1).await
}

/// Like [`hold_over_http2`], for a head that begins `requests` requests. Each counts against
/// `--max-connections`.
async fn hold_requests_over_http2(what: &str, head: &[u8], requests: usize) -> Held {
    let count = connections().min(4_000);
    let (launch, client, _authority) = over_tls(launch(count));
    let slots = (count * requests).to_string();
    let gateway = launch.clone().flag("--max-connections", &slots).start().await;
    let client = client.speaking_http2();
    let before = resident(&gateway).await;
    let began = Instant::now();
    let mut streams = Vec::new();
    for number in 0..count {
        let stream = connect(&gateway, number).await;
        streams.push(client.over(stream).await.expect("a handshake"));
    }
    for stream in &mut streams {
        // Errors do not matter: the gateway may have closed the connection.
        let _ = stream.write_all(head).await;
        let _ = stream.flush().await;
        let _ = stream.get_mut().0.write_all(&partial_record()).await;
    }
    holds(&gateway, (&launch, "--max-connections"), before, what, count).await;
    Held { _gateway: gateway, streams, began }
}

/// Whether the other end has closed the connection.
fn is_closed(stream: &TcpStream) -> bool {
    loop {
        match stream.try_read(&mut [0; 4096]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() != ErrorKind::WouldBlock,
        }
    }
}

#[tokio::test]
async fn partial_http2_heads_stay_within_their_stated_memory() {
    let head = http2(&[large_http2_head()]);
    let what = "partial heads over HTTP/2";
    hold_over_http2(what, &head).await.assert_none_is_closed(what);
}

/// The library keeps the buffer of a long frame. It ignores a frame of an unknown type.
#[tokio::test]
async fn http2_heads_after_long_frames_stay_within_stated_memory() {
    const UNKNOWN: u8 = 0xee;
    let head = http2(&[frame(UNKNOWN, 0, 0, &[0; 16_000]), large_http2_head()]);
    let what = "partial heads after long frames";
    hold_over_http2(what, &head).await.assert_none_is_closed(what);
}

/// A partial head with as many short fields as fit into the limit on heads, except for a few. For
/// each field, the limit counts 32 bytes beside the name and the value.
fn short_fields() -> Vec<u8> {
    let names: Vec<String> = (0..HEAD / 34).map(|number| format!("{number:x}")).collect();
    let fields: Vec<_> = names.iter().map(|name| (name.as_str(), "")).collect();
    partial_http2_head(&fields)
}

#[tokio::test]
async fn short_http2_fields_stay_within_their_stated_memory() {
    let head = http2(&[short_fields()]);
    let what = "heads with many short fields";
    hold_over_http2(what, &head).await.assert_none_is_closed(what);
}

/// After short fields comes a field without an end. It fills as many CONTINUATION frames as the
/// library accepts, and the beginning of one more.
#[tokio::test]
async fn endless_http2_fields_stay_within_their_stated_memory() {
    // The beginning of a field `x`. Its length says that the value has 2 MB (RFC 7541, sections 5.1
    // and 6.2.2).
    let mut field = vec![0, 1, b'x', 127, 0xff, 0xff, 0x7f];
    field.resize(FRAME, b'y');
    let more = frame(CONTINUATION, 0, 1, &field);
    let head = http2(&[short_fields(), more.repeat(5), more[..FRAME].to_vec()]);
    let held = hold_over_http2("heads with an endless field", &head).await;
    assert!(held.closed() > 0, "the gateway closes the connections");
}

/// The client does not acknowledge the size of the header table, and adds entries that keep large
/// buffers of the library: that of a frame, that of decoded Huffman codes, and that of a
/// CONTINUATION frame.
#[tokio::test]
async fn header_table_entries_stay_within_their_stated_memory() {
    // Literals with the name `:path`. Only the first kind adds an entry (RFC 7541, section 6.2).
    let entry = |value: &[u8]| [&[0x44, value.len() as u8], value].concat();
    let rest = [(":method", "GET"), (":scheme", "https"), (":authority", "localhost")];
    let rest = block(&rest);
    // Huffman codes of 7,000 bytes: "0" has the code 00000.
    let mut huffman = vec![0, 1, b'z', 0xff, 0xd9, 0x35];
    huffman.resize(huffman.len() + 7_000, 0);
    let plain = block(&[("z", &"z".repeat(4_500))]);
    let head = |stream: u32, filler: &[u8]| {
        let fields = [&entry(b"/livez")[..], &rest, filler].concat();
        frame(HEADERS, END_HEADERS | END_STREAM, stream, &fields)
    };
    // A long value in Huffman codes, and then an entry whose value "0" is in Huffman codes too. The
    // code of "0" is 00000, and the padding is 111.
    let decoded = |stream: u32| {
        let fields = [&rest[..], &huffman[..], &[0x44, 0x81, 0x07]].concat();
        frame(HEADERS, END_HEADERS | END_STREAM, stream, &fields)
    };
    let cut = |stream: u32| {
        [
            frame(HEADERS, END_STREAM, stream, &[0x44]),
            frame(CONTINUATION, END_HEADERS, stream, &[&[1, b'/'], &rest[..]].concat()),
        ]
        .concat()
    };
    for (what, requests) in [
        ("entries in long frames", [1, 3, 5].map(|stream| head(stream, &plain)).to_vec()),
        ("entries in Huffman codes", [1, 3].map(decoded).to_vec()),
        ("entries in cut frames", [1, 3, 5].map(cut).to_vec()),
    ] {
        let mut last = large_http2_head();
        last[8] = 2 * requests.len() as u8 + 1;
        let head = http2(&[requests.concat(), last]);
        hold_requests_over_http2(what, &head, requests.len()).await.assert_none_is_closed(what);
    }
}

/// The whole head of a request whose body does not come. It has `more` fields beyond the usual six.
fn heads_without_bodies(more: usize) -> Vec<u8> {
    let value = "y".repeat(HEAD / more - 64);
    let names: Vec<String> = (0..more).map(|number| format!("{number:x}")).collect();
    let mut fields = vec![
        (":method", "POST"),
        (":scheme", "https"),
        (":path", "/locks/a"),
        (":authority", "localhost"),
        ("content-type", "application/json"),
        ("content-length", "9000"),
    ];
    fields.extend(names.iter().map(|name| (name.as_str(), value.as_str())));
    http2(&[frame(HEADERS, END_HEADERS, 1, &block(&fields))])
}

#[tokio::test]
async fn http2_heads_without_bodies_stay_within_their_stated_memory() {
    // As many fields as a request may have.
    let what = "heads without bodies";
    hold_over_http2(what, &heads_without_bodies(98)).await.assert_none_is_closed(what);
}

#[tokio::test]
async fn refused_http2_fields_stay_within_their_stated_memory() {
    let what = "heads with too many fields";
    hold_over_http2(what, &heads_without_bodies(200)).await.assert_none_is_closed(what);
}

#[tokio::test]
async fn bodies_sent_byte_by_byte_keep_no_buffer_for_each_byte() {
    eventually("all bytes arrive before the gateway gives a body up", async || {
        let grown = grown_by_bodies_sent_byte_by_byte().await?;
        assert!(grown < 5e6, "{grown} bytes for {BODIES} bodies of {BYTES} bytes");
        Some(())
    })
    .await;
}

const BODIES: usize = 40;
const BYTES: usize = 250;

/// How much the memory of a gateway grows. `None` if the gateway has given one of the bodies up,
/// because the body took longer than 10 s on a busy machine.
async fn grown_by_bodies_sent_byte_by_byte() -> Option<f64> {
    let gateway = Launch::embedded().env("RUST_LOG", "info").start().await;
    let mut streams = Vec::new();
    for number in 0..BODIES {
        let mut stream = connect(&gateway, number).await;
        stream.set_nodelay(true).expect("an option");
        let head = "POST /locks/a HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n\r\n";
        send(&mut stream, head.as_bytes()).await;
        streams.push(stream);
    }
    let before = resident(&gateway).await;
    for _ in 0..BYTES {
        for stream in &mut streams {
            stream.write_all(b" ").await.ok()?;
        }
        // During the pause the gateway reads the byte, so it reads every byte separately.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let grown = resident(&gateway).await - before;
    let is_whole = |stream: &TcpStream| {
        let answered = stream.try_read(&mut [0; 1]);
        answered.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    };
    streams.iter().all(is_whole).then_some(grown)
}

#[tokio::test]
async fn waiting_requests_stay_within_their_stated_memory() {
    let count = connections().min(4_000);
    let most = count.to_string();
    let launch =
        launch(count + 16).flag("--max-waiters", &most).flag("--max-waiters-per-client", &most);
    let gateway = launch.clone().start().await;
    let names = count.div_ceil(100);
    for name in 0..names {
        gateway.acquire_for(&format!("job-{name}"), HOUR_MS).await;
    }
    let mut streams = Vec::new();
    for number in 0..count {
        let mut stream = connect(&gateway, number).await;
        send(&mut stream, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        stream.readable().await.expect("the request is answered");
        streams.push(stream);
    }
    let before = resident(&gateway).await;
    let body = json!({ "ttl_ms": 60_000, "wait_ms": HOUR_MS }).to_string();
    for (number, stream) in streams.iter_mut().enumerate() {
        let name = number % names;
        let length = body.len();
        let head = format!(
            "POST /locks/job-{name} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        );
        send(stream, format!("{head}\r\ncontent-length: {length}\r\n\r\n{body}").as_bytes()).await;
    }
    eventually("all requests wait", async || {
        Samples::of(&gateway).await.is("redlock_waiters", &[], count as f64).then_some(())
    })
    .await;
    holds(&gateway, (&launch, "--max-waiters"), before, "requests that wait", count).await;
}

#[tokio::test]
async fn waiting_http2_streams_stay_within_their_stated_memory() {
    let count = connections().min(4_000);
    let most = count.to_string();
    let launch =
        launch(count + 16).flag("--max-waiters", &most).flag("--max-waiters-per-client", &most);
    let (launch, client, _authority) = over_tls(launch);
    let gateway = launch.clone().start().await;
    let open = async |number| {
        let stream = connect(&gateway, number).await;
        Http2::over(&client, stream, &h2::client::Builder::new()).await
    };
    let before = resident(&gateway).await;
    let other = open(0).await;
    let names = count.div_ceil(100);
    for name in 0..names {
        let body = json!({ "ttl_ms": HOUR_MS });
        assert_eq!(other.post(&format!("/locks/job-{name}"), &body).await.status, 201);
    }
    let mut connections = Vec::new();
    for number in 0..count.div_ceil(STREAMS) {
        let connection = open(number).await;
        assert_eq!(connection.get("/livez").await.status, 200);
        connections.push(connection);
    }
    let body = json!({ "ttl_ms": 60_000, "wait_ms": HOUR_MS });
    let mut waiting = Vec::new();
    for number in 0..count {
        let (connection, path) = (&connections[number / STREAMS], number % names);
        let path = format!("/locks/job-{path}");
        waiting.push(connection.begin(Method::POST, &path, &HeaderMap::new(), &body).await);
    }
    let line = format!("redlock_waiters {count}");
    eventually("all requests wait", async || {
        let metrics = other.get("/metrics").await.text();
        metrics.lines().any(|other| other == line).then_some(())
    })
    .await;
    // A stream that waits takes a slot of a connection and one of a waiter.
    let connections = stated(&launch, "--max-connections").await;
    let stated = connections + stated(&launch, "--max-waiters").await;
    holds_in(&gateway, stated * OF_TASKS, before, "waiting streams", count).await;
}

#[tokio::test]
async fn pending_releases_stay_within_their_stated_memory() {
    let mut servers = masters(3);
    let launch = Launch::over(&servers).env("RUST_LOG", "info");
    let gateway = launch.clone().start().await;
    gateway.all_nodes_admitted().await;
    let acquire_and_release = async |number: usize| {
        let body = json!({ "ttl_ms": 60_000, "slots": 256, "take": 256 });
        let name = format!("job-{number}");
        let lease = gateway.acquire_soon(&name, body).await;
        assert_eq!(gateway.delete(&name, &lease.token).await.status, 204);
    };
    for number in 0..20 {
        acquire_and_release(number).await;
    }
    servers[0].kill();
    eventually("the master votes no longer", async || {
        let states = gateway.readyz().await.json()["nodes"].to_string();
        states.contains("\"state\":\"connecting\"").then_some(())
    })
    .await;
    let before = resident(&gateway).await;
    let stated = stated(&launch, "pending").await;
    let mut count = 0;
    let abandoned = ("redlock_releases_abandoned_total", ["node"]);
    while Samples::of(&gateway).await.non_zero(abandoned.0, &abandoned.1).is_empty() {
        acquire_and_release(count).await;
        count += 1;
        let least = count as f64 * 256.0 * 80.0;
        assert!(least < stated, "{count} releases of 256 locks are kept; check states {stated}");
    }
    // One node may take half of it.
    let stated = stated / 2.0;
    holds_in(&gateway, stated * 1.1, before, "pending releases of 256 locks", count).await;
    let grown = resident(&gateway).await - before;
    assert!(grown > stated / 2.0, "{grown} bytes are kept; {stated} were counted");
}
