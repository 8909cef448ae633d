//! Large answers that a client asks for and does not read. They take a bounded part of the memory,
//! and leave some to other clients.

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::support::client::lock_path;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{PATIENCE, eventually};
use crate::support::waiters::{HOUR_MS, patient};

/// The answer about this many holders has about 150 KB: more than a quarter and less than a third of
/// the memory for unread answers.
const SLOTS: usize = 128;
const HEARTBEAT: &str = "\n:\n";
const SNAPSHOT: &str = "event: snapshot";

/// Connects from an address that the other clients of the tests do not have.
async fn connect(gateway: &Gateway) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    // With a small window, the kernel takes a small part of an answer.
    socket.set_recv_buffer_size(2_304).expect("a size");
    socket.bind("127.0.0.2:0".parse().expect("an address")).expect("a free port");
    socket.connect(gateway.address()).await.expect("the gateway listens")
}

/// Asks for the lock and reads only the status line.
async fn ask(gateway: &Gateway) -> (TcpStream, String) {
    let mut stream = connect(gateway).await;
    let request = format!("GET {} HTTP/1.1\r\nhost: localhost\r\n\r\n", lock_path("pool"));
    stream.write_all(request.as_bytes()).await.expect("the gateway reads");
    let mut line = [0; 12];
    let read = timeout(PATIENCE, stream.read_exact(&mut line)).await.expect("an answer in time");
    read.expect("an open connection");
    (stream, String::from_utf8_lossy(&line).into_owned())
}

/// Reads a stream of events up to these words.
async fn read_until(stream: &mut TcpStream, words: &str) -> String {
    let mut text = Vec::new();
    while !String::from_utf8_lossy(&text).contains(words) {
        let read = timeout(PATIENCE, stream.read_buf(&mut text)).await.expect("bytes in time");
        assert_ne!(read.expect("an open connection"), 0, "{}", String::from_utf8_lossy(&text));
    }
    String::from_utf8_lossy(&text).into_owned()
}

#[tokio::test]
async fn a_client_that_does_not_read_large_answers_leaves_memory_to_others() {
    // 512 KiB are for unread answers.
    let gateway = patient(Launch::embedded()).flag("--memory-budget", "64MiB").start().await;
    let owner = "😀".repeat(255);
    let body = json!({ "ttl_ms": HOUR_MS, "slots": SLOTS, "take": SLOTS, "owner": owner });
    let granted = gateway.post("pool", body).await;
    assert_eq!(granted.status, 201, "{granted:?}");

    let (unread, status) = ask(&gateway).await;
    assert_eq!(status, "HTTP/1.1 200");
    let (refused, status) = ask(&gateway).await;
    assert_eq!(status, "HTTP/1.1 503", "one client may take as much as is still free");
    let holders = gateway.inspect("pool").await["holders"].as_array().map(Vec::len);
    assert_eq!(holders, Some(SLOTS), "another client's answer");

    let mut events = connect(&gateway).await;
    let head = "GET /locks/pool HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n";
    events.write_all(head.as_bytes()).await.expect("the gateway reads");
    let before = read_until(&mut events, HEARTBEAT).await;
    assert!(!before.contains(SNAPSHOT), "{before}");

    drop((unread, refused));
    read_until(&mut events, SNAPSHOT).await;
    eventually("the memory is free", async || {
        (ask(&gateway).await.1 == "HTTP/1.1 200").then_some(())
    })
    .await;
}
