//! A name that was used once leaves a watermark on every master until 10 s after its TTL. It leaves
//! nothing else, and nothing at all in the gateway.

use std::ops::Range;

use crate::support::client::{Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, masters};
use crate::support::metrics::Samples;
use crate::support::resp::Resp;

/// How many requests it takes until the gateway has allocated its fixed memory, including the
/// samples of one metrics interval.
const WARM_UP: u32 = 6000;
const NAMES: u32 = 12_000;
const CONNECTIONS: usize = 8;
const BODY: &str = r#"{"ttl_ms":300000}"#;
/// The limit of growth for each name. It is far above the overhead of an allocator, and far below a
/// table with an entry for each name.
const MOST_BYTES_PER_NAME: f64 = 100.0;

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
                connection.write(request).await;
                let Lease { token, .. } = Lease::from(&connection.answer().await);
                connection
                    .write(format!(
                        "DELETE {path} HTTP/1.1\r\nhost: localhost\r\nlock-token: {token}\r\n\r\n"
                    ))
                    .await;
                let released = connection.answer().await;
                assert_eq!(released.status, 204, "{name}: {}", released.text());
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
    let gateway = Launch::over(&servers).ready().await;
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
