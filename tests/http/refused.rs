//! How large the log becomes when many requests are refused.

use http::Method;
use rustix::process::Signal;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::keys::{HOLDER, file, key, with_keys};
use crate::support::harness::PATIENCE;

const REFUSED: usize = 3000;

/// The JSON lines of a log that contain this word.
fn lines(log: &str, word: &str) -> Vec<Value> {
    log.lines()
        .filter(|line| line.contains(word))
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

#[tokio::test]
async fn thousands_of_refusals_do_not_fill_the_log() {
    let known = key("known", HOLDER, "a").await;
    let file = file(&[&known]);
    let mut gateway = with_keys(&file).env("RUST_LOG", "info").start().await;
    let request =
        b"POST /locks/a HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer nonsense\r\n\r\n";
    for _ in 0..REFUSED / 100 {
        let mut stream = TcpStream::connect(gateway.address()).await.expect("the gateway listens");
        stream.write_all(&request.repeat(100)).await.expect("the gateway reads");
        let mut answers = Vec::new();
        while answers.windows(13).filter(|text| text == b"HTTP/1.1 401 ").count() < 100 {
            let got = timeout(PATIENCE, stream.read_buf(&mut answers))
                .await
                .expect("the gateway answers");
            assert_ne!(got.expect("the connection stays open"), 0);
        }
    }
    // Many refusals of strangers must not hide a refusal of a client with a key.
    known.call(&gateway, Method::POST, "/locks/b").send().await.problem(403, "forbidden");
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.ended().await, Some(0));
    let log = gateway.stdout();
    assert!(log.len() < 20_000, "{} bytes of log for {REFUSED} refused requests", log.len());
    for (in_full, sum) in
        [("\"audit\"", "\"requests\""), ("\"request refused\"", "\"requests refused, after")]
    {
        let first = lines(&log, in_full).into_iter().filter(|line| line["refused"].is_null());
        let first = first.filter(|line| line["status"] == 401).count();
        let sums = lines(&log, sum);
        assert!(first > 0 && sums.iter().all(|line| line["address"] == "127.0.0.1"), "{log}");
        let summed: u64 = sums.iter().filter_map(|line| line["refused"].as_u64()).sum();
        assert_eq!(first as u64 + summed, REFUSED as u64, "{in_full}\n{log}");
    }
    assert!(
        lines(&log, "\"audit\"").iter().any(|line| line["who"] == "known" && line["lock"] == "b"),
        "{log}"
    );
}
