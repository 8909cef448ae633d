//! The most memory that connections can use, compared with the gateway's own estimate.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::support::certificates::{Authority, Client};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::eventually;
use crate::support::metrics::Samples;

const FEW: usize = 400;
const MANY: usize = 16_000;
const HEAD: usize = 15 * 1024;

fn connections() -> usize {
    if std::env::var_os("REDLOCK_LONG_TESTS").is_some() { MANY } else { FEW }
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

/// Resident memory, as soon as it no longer grows.
async fn resident(gateway: &Gateway) -> f64 {
    let mut last = 0.0;
    eventually("the memory no longer grows", async || {
        let before = std::mem::replace(&mut last, gateway.resident());
        tokio::time::sleep(Duration::from_millis(200)).await;
        (last <= before * 1.001).then_some(last)
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
    let grown = resident(gateway).await - before;
    let stated = stated(launch, flag).await;
    let each = grown / 1e3 / count as f64;
    println!(
        "{count} {what}: {each:.1} kB each, {:.0} MB; estimated as {:.0} MB",
        grown / 1e6,
        stated / 1e6
    );
    // In a build without optimisation tasks are larger: a waiting request takes 10.3 to 11 kB.
    let slack = if cfg!(debug_assertions) { 1.45 } else { 1.0 };
    assert!(grown < stated * slack, "{count} {what} take {grown} bytes; check states {stated}");
}

async fn send(stream: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) {
    stream.write_all(bytes).await.expect("the memory is read");
    stream.flush().await.expect("the memory is read");
}

fn launch(count: usize) -> Launch {
    Launch::embedded().flag("--max-connections", &count.to_string()).env("RUST_LOG", "info")
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
    let authority = Authority::new();
    let own = authority.issue("server", "/CN=gateway");
    let launch = launch(count).flag("--tls-cert", &own.cert).flag("--tls-key", &own.key);
    let gateway = launch.clone().start().await;
    let client = Client::trusting(&authority);
    let before = resident(&gateway).await;
    let head = partial_head();
    let mut streams = Vec::new();
    for number in 0..count {
        let stream = connect(&gateway, number).await;
        streams.push(client.over(stream).await.expect("a handshake"));
    }
    for stream in &mut streams {
        send(stream, &head).await;
        // A TLS record that announces 16,640 bytes.
        let (raw, _) = stream.get_mut();
        send(raw, &[&[0x17, 3, 3, 0x41, 0], [0; 16_000].as_slice()].concat()).await;
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

#[tokio::test]
async fn bodies_sent_byte_by_byte_keep_no_buffer_for_each_byte() {
    const BYTES: usize = 1000;
    let gateway = Launch::embedded().env("RUST_LOG", "info").start().await;
    let mut streams = Vec::new();
    for number in 0..10 {
        let mut stream = connect(&gateway, number).await;
        stream.set_nodelay(true).expect("an option");
        let head = "POST /locks/a HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9000\r\n\r\n";
        send(&mut stream, head.as_bytes()).await;
        streams.push(stream);
    }
    let before = resident(&gateway).await;
    for _ in 0..BYTES {
        for stream in &mut streams {
            send(stream, b" ").await;
        }
        // During the pause the gateway reads the byte, so it reads every byte separately.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let grown = resident(&gateway).await - before;
    assert!(grown < 5e6, "{grown} bytes for ten bodies of {BYTES} bytes");
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
        gateway.acquire_for(&format!("job-{name}"), 200_000).await;
    }
    let mut streams = Vec::new();
    for number in 0..count {
        let mut stream = connect(&gateway, number).await;
        send(&mut stream, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
        stream.readable().await.expect("the request is answered");
        streams.push(stream);
    }
    let before = resident(&gateway).await;
    let body = r#"{"ttl_ms": 60000, "wait_ms": 25000}"#;
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
