//! A name that was used once leaves a watermark on every master until 10 s after its TTL. It leaves
//! nothing else, and nothing at all in the gateway.

use std::ops::Range;
use std::time::Instant;

use crate::support::client::{Answer, Lease, Raw, lock_path};
use crate::support::gateway::Gateway;
use crate::support::harness::{PATIENCE, RedisServer, eventually, masters};
use crate::support::metrics::Samples;
use crate::support::resp::Resp;
use crate::support::waiters::patient_over;

/// How many requests it takes until the gateway has allocated its fixed memory, including the
/// samples of one metrics interval.
const WARM_UP: u32 = 6000;
const NAMES: u32 = 12_000;
const CONNECTIONS: usize = 8;
/// The watermarks outlast the test.
const BODY: &str = r#"{"ttl_ms":3600000}"#;
/// The limit of growth for each name. It is far above the overhead of an allocator, and far below a
/// table with an entry for each name.
const MOST_BYTES_PER_NAME: f64 = 100.0;

/// Sends a request until it is decided. On a busy machine, masters may not answer in time, and what
/// an undecided request has set stands in the way for a moment. Returns the answer, and whether it
/// is the first one.
async fn decided(connection: &mut Raw, request: &str) -> (Answer, bool) {
    let began = Instant::now();
    let mut is_first = true;
    loop {
        connection.write(request).await;
        let answer = connection.answer().await;
        let is_undecided = answer.status == 503 || answer.status == 409 && !is_first;
        if !is_undecided {
            return (answer, is_first);
        }
        assert!(began.elapsed() < PATIENCE, "{answer:?}");
        is_first = false;
    }
}

/// Acquires and releases each of these names once, over a few connections.
async fn use_once(gateway: &Gateway, names: Range<u32>) {
    let mut connections = tokio::task::JoinSet::new();
    for first in names.clone().take(CONNECTIONS) {
        let mut connection = gateway.raw().await;
        let mine = (first..names.end).step_by(CONNECTIONS);
        connections.spawn(async move {
            for name in mine.map(|number| format!("used-once-{number}")) {
                let path = lock_path(&name);
                // The request is written at once. If the body came in pieces, it would wait for the
                // other side's delayed acknowledgement.
                let request = format!(
                    "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                     content-length: {}\r\n\r\n{BODY}",
                    BODY.len()
                );
                let (granted, _) = decided(&mut connection, &request).await;
                let Lease { token, .. } = Lease::from(&granted);
                let request = format!(
                    "DELETE {path} HTTP/1.1\r\nhost: localhost\r\nlock-token: {token}\r\n\r\n"
                );
                let (released, is_first) = decided(&mut connection, &request).await;
                // The first request may have released the lock, although its answer came too late.
                let is_released = released.status == 204 || released.status == 404 && !is_first;
                assert!(is_released, "{name}: {}", released.text());
            }
        });
    }
    connections.join_all().await;
}

async fn memory(gateway: &Gateway) -> f64 {
    Samples::of(gateway).await.get("process_resident_memory_bytes", &[])
}

#[tokio::test]
async fn a_used_name_leaves_only_a_watermark_on_every_master() {
    let servers = masters(3);
    let keys = |server: &RedisServer| server.cmd(&["DBSIZE"]).integer();
    let gateway = patient_over(&servers).ready().await;
    // When a node has caught up, a key beside its marker says so. That key must be counted before.
    gateway.all_nodes_caught_up().await;
    let before: Vec<_> = servers.iter().map(keys).collect();

    use_once(&gateway, 0..WARM_UP).await;
    let warm = memory(&gateway).await;
    use_once(&gateway, WARM_UP..WARM_UP + NAMES).await;
    let grown = memory(&gateway).await - warm;
    let most = MOST_BYTES_PER_NAME * f64::from(NAMES);
    assert!(
        grown < most,
        "the gateway has grown by {grown} bytes with {NAMES} names; the limit is {most}"
    );

    // A release is answered before it has reached the last master, so this waits.
    for (server, before) in servers.iter().zip(before) {
        let fences = i64::from(WARM_UP + NAMES);
        eventually("only watermarks are left", async || {
            (keys(server) - before == fences
                && server.cmd(&["KEYS", "lock:*"]) == Resp::List(Vec::new()))
            .then_some(())
        })
        .await;
    }
}
