//! An acquire of the Rust client whose first `POST` has no answer, and whose repetition is refused.
//! The first `POST` may have been granted the lock.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use redlock_client::{Client, Error};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::gateway::Launch;
use crate::support::harness::eventually;
use crate::support::waiters::patient;

#[derive(Clone, Copy)]
enum Reply {
    /// Closes the connection. The gateway, if there is one, has executed the request.
    Lost,
    /// A proxy's page.
    Page,
    /// The answer of a gateway.
    Problem(u16, &'static str),
    /// What the gateway answers.
    Gateway,
}

/// The method and the idempotency key of each request.
type Seen = Arc<Mutex<Vec<(String, String)>>>;

/// Starts a server that answers each `POST` with the next reply, and each `DELETE` with `release`.
async fn scripted(gateway: Option<SocketAddr>, posts: &[Reply], release: Reply) -> (Client, Seen) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(format!("http://{}", listener.local_addr().unwrap())).unwrap();
    let seen = Seen::default();
    let (posts, requests) = (posts.to_vec(), seen.clone());
    tokio::spawn(async move {
        let mut posts = posts.into_iter();
        while let Ok((mut client, _)) = listener.accept().await {
            let request = read_request(&mut client).await;
            let head = request.to_ascii_lowercase();
            let key = head.split("idempotency-key: ").nth(1).and_then(|rest| rest.lines().next());
            let method = request.split(' ').next().unwrap().to_owned();
            let reply = if method == "POST" { posts.next().unwrap() } else { release };
            requests.lock().unwrap().push((method, key.unwrap_or_default().to_owned()));
            let (status, body) = match reply {
                Reply::Lost | Reply::Gateway => {
                    let Some(gateway) = gateway else { continue };
                    let answer = forward(gateway, &request).await;
                    if matches!(reply, Reply::Gateway) {
                        client.write_all(&answer).await.unwrap();
                    }
                    continue;
                }
                Reply::Page => (502, "<html>".to_owned()),
                Reply::Problem(status, code) => {
                    (status, json!({ "status": status, "code": code, "detail": "d" }).to_string())
                }
            };
            let length = body.len();
            let head = format!(
                "HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
            );
            client.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
        }
    });
    (client, seen)
}

async fn read_request(client: &mut TcpStream) -> String {
    let (mut request, mut buffer) = (String::new(), [0; 4_096]);
    loop {
        let read = client.read(&mut buffer).await.unwrap();
        request += std::str::from_utf8(&buffer[..read]).unwrap();
        let Some((head, body)) = request.split_once("\r\n\r\n") else { continue };
        let length = head.to_ascii_lowercase();
        let length = length.split("content-length: ").nth(1).and_then(|rest| rest.lines().next());
        if body.len() >= length.map_or(0, |length| length.parse().unwrap()) {
            return request;
        }
    }
}

/// Sends a request to the gateway, and returns its answer.
async fn forward(gateway: SocketAddr, request: &str) -> Vec<u8> {
    let mut gateway = TcpStream::connect(gateway).await.unwrap();
    gateway.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 65_536];
    let read = gateway.read(&mut answer).await.unwrap();
    answer.truncate(read);
    answer
}

fn methods(seen: &Seen) -> Vec<String> {
    seen.lock().unwrap().iter().map(|(method, _)| method.clone()).collect()
}

const NOTHING_FOUND: Reply = Reply::Problem(404, "lock_not_found");

#[tokio::test]
async fn refusal_after_a_lost_answer_releases_by_key() {
    for unanswered in [Reply::Lost, Reply::Page] {
        for (status, code) in [
            (400, "invalid_body"),
            (401, "unauthenticated"),
            (403, "forbidden"),
            (409, "lock_held"),
            (413, "body_too_large"),
            (422, "new"),
        ] {
            let posts = [unanswered, Reply::Problem(status, code)];
            let (client, seen) = scripted(None, &posts, NOTHING_FOUND).await;
            let error = client.lock("a").acquire().await.unwrap_err();
            assert!(matches!(error, Error::Refused { .. } | Error::Held { .. }), "{error}");
            assert_eq!(methods(&seen), ["POST", "POST", "DELETE"], "{error}");
            let seen = seen.lock().unwrap();
            assert!(seen.iter().all(|(_, key)| *key == seen[0].1 && !key.is_empty()), "{seen:?}");
        }
    }
}

#[tokio::test]
async fn refusal_of_every_post_releases_nothing() {
    for refusal in [Reply::Problem(403, "forbidden"), Reply::Problem(409, "lock_held")] {
        let posts = [Reply::Problem(429, "rate_limited"), refusal];
        let (client, seen) = scripted(None, &posts, NOTHING_FOUND).await;
        client.lock("a").acquire().await.unwrap_err();
        assert_eq!(methods(&seen), ["POST", "POST"]);
    }
}

#[tokio::test]
async fn refusal_after_a_lost_answer_leaves_no_lock() {
    let gateway = patient(Launch::embedded()).ready().await;
    let posts = [Reply::Lost, Reply::Problem(403, "forbidden")];
    let (client, _) = scripted(Some(gateway.address()), &posts, Reply::Gateway).await;
    // The TTL outlasts the test. So if the lock is free, it was released.
    let error = client.lock("a").ttl(Duration::from_secs(3_600)).acquire().await.unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    eventually("the lock is free", async || {
        (gateway.inspect("a").await["state"] == "free").then_some(())
    })
    .await;
}

mod measured {
    use super::*;
    use crate::support::measure::measured;

    #[tokio::test]
    async fn unanswered_release_by_key_ends_in_time() {
        measured("a release without an answer", async || {
            let posts = [Reply::Lost, Reply::Problem(403, "forbidden")];
            let (client, _) = scripted(None, &posts, Reply::Lost).await;
            let begin = Instant::now();
            let error = client.lock("a").acquire().await.unwrap_err();
            let took = begin.elapsed();
            assert!(matches!(error, Error::Refused { .. }), "{error}");
            // The release takes 2 s at most.
            let is_in_time = took < Duration::from_secs(4);
            if is_in_time { Ok(()) } else { Err(format!("it took {took:?}")) }
        })
        .await;
    }
}
