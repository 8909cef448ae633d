//! Standard output and standard error are a pipe that nobody reads. A write to a full pipe blocks
//! until somebody reads.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, PipeReader, PipeWriter, Read, Write, pipe};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use http::Method;
use rustix::io::ioctl_fionbio;
use rustix::process::Signal;
use serde_json::json;
use tokio::sync::oneshot;

use crate::support::client::lock_path;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, free_port, masters};
use crate::support::metrics::Samples;
use crate::support::resp::Resp;

/// A pipe's default capacity on Linux (pipe(7)).
const PIPE_BYTES: usize = 64 << 10;
/// Longer than one round of requests, also on a busy machine.
const TTL_MS: u64 = 300_000;

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn file(writer: PipeWriter) -> File {
    File::from(OwnedFd::from(writer))
}

/// A pipe that has no room for another byte.
fn full_pipe() -> (PipeReader, File) {
    let (reader, mut writer) = pipe().expect("a pipe");
    ioctl_fionbio(&writer, true).expect("a pipe can be made non-blocking");
    let refused = loop {
        if let Err(error) = writer.write(b"\n") {
            break error;
        }
    };
    assert_eq!(refused.kind(), ErrorKind::WouldBlock);
    ioctl_fionbio(&writer, false).expect("a pipe can be made blocking");
    (reader, file(writer))
}

async fn dropped(gateway: &Gateway) -> f64 {
    Samples::of(gateway).await.get("redlock_log_lines_dropped_total", &[])
}

/// Ends a gateway. A gateway that its log blocks does not end, and neither does one that waits for
/// its grace.
async fn ends(gateway: &mut Gateway) {
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
}

/// The log is blocked. Still, `/livez` and PATCH must answer, and locks must not expire. A request
/// that the log blocks is never answered.
#[tokio::test]
async fn an_unread_log_delays_no_request_and_loses_no_lock() {
    let port = free_port();
    let servers = masters(3);
    let (mut reader, writer) = pipe().expect("a pipe");
    let launch = Launch::over(&servers)
        .flag("--listen", &local(port).to_string())
        .flag("--shutdown-grace", "1h")
        .env("RUST_LOG", "trace");
    let launch = launch.flag("--node-timeout", "6s");
    let mut gateway = launch.serve_into(local(port), file(writer)).await;
    gateway.all_nodes_admitted().await;
    let lease = gateway.acquire_for("held", TTL_MS).await;
    // Each request logs more than 256 bytes, so these requests fill the pipe.
    let enough = 5 * PIPE_BYTES / 256;
    let mut requests = 0;
    while requests < enough || dropped(&gateway).await == 0.0 {
        for _ in 0..50 {
            assert_eq!(gateway.get("/livez").await.status, 200);
            requests += 1;
        }
        let name = format!("job-{requests}");
        let other = gateway.acquire(&name).await;
        assert_eq!(gateway.delete(&name, &other.token).await.status, 204);
        assert_eq!(gateway.patch("held", &lease.token, TTL_MS).await.status, 200);
    }
    let before = dropped(&gateway).await;
    eventually("the counter rises", async || (dropped(&gateway).await > before).then_some(()))
        .await;
    ends(&mut gateway).await;
    let mut written = Vec::new();
    reader.read_to_end(&mut written).expect("the pipe ends with the process");
    assert!(
        (PIPE_BYTES / 2..=PIPE_BYTES).contains(&written.len()),
        "{} bytes were written",
        written.len()
    );
}

#[tokio::test]
async fn a_log_resumes_when_it_is_read_again() {
    let port = free_port();
    let (mut reader, output) = full_pipe();
    let launch = Launch::embedded()
        .flag("--listen", &local(port).to_string())
        .flag("--shutdown-grace", "1h")
        .env("RUST_LOG", "debug");
    let mut gateway = launch.serve_into(local(port), output).await;
    let read = std::thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("the pipe ends with the process");
        text
    });
    gateway.call(Method::GET, "/livez").header("x-request-id", "the-last-one").send().await;
    ends(&mut gateway).await;
    let text = read.join().expect("the reader does not panic");
    for words in ["\"version\":\"0", "\"listening\"", "\"the-last-one\"", "\"stopped\""] {
        assert!(text.contains(words), "no {words:?} in\n{text}");
    }
}

#[tokio::test]
async fn other_lines_push_no_audit_line_out_of_the_log() {
    let port = free_port();
    let (reader, output) = full_pipe();
    let launch = Launch::embedded().flag("--listen", &local(port).to_string());
    let mut gateway = launch.env("RUST_LOG", "trace").serve_into(local(port), output).await;
    while dropped(&gateway).await == 0.0 {
        for _ in 0..50 {
            gateway.get("/livez").await;
        }
    }
    let forced = format!("{}?force=true", lock_path("forced"));
    gateway.call(Method::DELETE, &forced).send().await.problem(404, "lock_not_found");
    let (found, is_found) = oneshot::channel();
    std::thread::spawn(move || {
        let mut lines = BufReader::new(reader).lines().map_while(Result::ok);
        let is_audit = |line: String| line.contains("\"what\":\"force\"");
        let _ = found.send(lines.any(is_audit));
        lines.for_each(drop);
    });
    assert!(is_found.await.expect("the reader does not panic"), "the log has ended");
    ends(&mut gateway).await;
}

#[tokio::test]
async fn a_full_pipe_blocks_neither_start_nor_shutdown() {
    let port = free_port();
    let (_reader, output) = full_pipe();
    let launch = Launch::embedded()
        .flag("--listen", &local(port).to_string())
        .flag("--shutdown-grace", "1h");
    let second = output.try_clone().expect("a descriptor");
    let mut gateway = launch.clone().serve_into(local(port), output).await;
    // The port is taken, so the start must fail.
    let finished = launch.spawn_into(second).finish().await;
    assert_eq!(finished.code, Some(1));
    ends(&mut gateway).await;
}

/// `reconfigure` stops the votes of masters. If it blocked or panicked while it prints, no gateway
/// would get votes again.
#[tokio::test]
async fn reconfigure_finishes_when_its_output_is_not_read() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let launch = |words: &[&str], max_ttl: &str| {
        let times = Launch::bare(words)
            .nodes(&urls)
            .flag("--max-ttl", max_ttl)
            .flag("--default-ttl", "500ms");
        times.flag("--clock-skew", "100ms").flag("--node-timeout", "5s")
    };
    let gateway = launch(&["--listen", "127.0.0.1:0", "--bootstrap"], "3s").ready().await;
    drop(gateway);
    let markers = || -> Vec<Resp> {
        servers.iter().map(|server| server.cmd(&["GET", "{lock:}:marker"])).collect()
    };
    let (_reader, unread) = full_pipe();
    let (_, closed) = pipe().expect("a pipe");
    for (output, max_ttl) in [(unread, "2s"), (file(closed), "1s")] {
        let before = markers();
        let done = launch(&["reconfigure", "--yes"], max_ttl).spawn_into(output).finish().await;
        assert_eq!(done.code, Some(0), "to {max_ttl}");
        assert!(
            before.iter().zip(markers()).all(|(before, after)| *before != after),
            "to {max_ttl}"
        );
    }
    let gateway = launch(&["--listen", "127.0.0.1:0"], "1s").ready().await;
    gateway.acquire_soon("job", json!({})).await;
}
