//! Many connections, or few file descriptors. Also how little is logged about refused connections.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{PATIENCE, RedisServer, eventually, free_port, masters};
use crate::support::metrics::Samples;
use crate::support::waiters::{HOUR_MS, answer, patient, released, start_waiting, waiting_acquire};

/// How many connections may be open beyond the limit.
const SPARE: f64 = 16.0;
const PARTIAL: &[u8] = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n";
const WHOLE: &[u8] = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n";

/// A gateway that closes idle connections only to make room, and lets requests wait for an hour.
fn embedded() -> Launch {
    patient(Launch::embedded()).flag("--idle-timeout", "1h")
}

/// A connection from the address 127.0.0.`last`, on which `sent` has been sent.
async fn from(last: u8, gateway: &Gateway, sent: &[u8]) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket
        .bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0)))
        .expect("all of 127/8 is this machine");
    let mut stream = socket.connect(gateway.address()).await.expect("the gateway listens");
    let _ = stream.write_all(sent).await;
    stream
}

/// The text of a request that waits for the lock `job`.
fn waiting_request() -> String {
    let head = "POST /locks/job HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
    let body = json!({ "wait_ms": HOUR_MS });
    let body = body.to_string();
    format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// The first line of the answer. Empty if the connection was closed.
async fn status_line(stream: &mut TcpStream) -> String {
    let mut got = vec![0; 12];
    let read = timeout(PATIENCE, stream.read_exact(&mut got))
        .await
        .expect("the gateway answers or closes");
    read.map(|_| String::from_utf8_lossy(&got).into_owned()).unwrap_or_default()
}

async fn count(gateway: &Gateway, name: &str) -> f64 {
    Samples::of(gateway)
        .await
        .values
        .iter()
        .filter(|((other, _), _)| other == name)
        .map(|(_, value)| value)
        .sum()
}

#[tokio::test]
async fn idle_connections_of_a_stranger_make_room_for_others() {
    let gateway = embedded().flag("--max-connections", "20").start().await;
    let lease = gateway.acquire_for("job", HOUR_MS).await;
    let waiter = start_waiting(&gateway, waiting_acquire(&gateway, "job", HOUR_MS)).await;
    let mut sockets = Vec::new();
    for number in 0..200 {
        sockets.push(from(9, &gateway, [b"".as_slice(), PARTIAL, WHOLE][number % 3]).await);
        if number % 20 == 19 {
            assert_eq!(gateway.get("/livez").await.status, 200, "after {number} idle sockets");
        }
    }
    released(&gateway, "job", &lease).await;
    assert_eq!(answer(waiter).await.status, 201, "a request under way is not cut");
    // The other connections in spare slots were closed after their answers.
    assert!(count(&gateway, "redlock_connections_evicted_total").await > 80.0);
    assert_eq!(count(&gateway, "redlock_connections_refused_total").await, 0.0);
    assert_eq!(count(&gateway, "redlock_connections_limit").await, 20.0);
    assert!(count(&gateway, "redlock_connections").await <= 20.0 + SPARE);
    drop(sockets);
    eventually("slots are free again", async || {
        (count(&gateway, "redlock_connections").await < 3.0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn idle_connections_without_a_request_are_closed_first() {
    let gateway = embedded().flag("--max-connections", "4").start().await;
    let mut pool = Vec::new();
    for _ in 0..2 {
        let mut stream = from(2, &gateway, WHOLE).await;
        assert_eq!(status_line(&mut stream).await, "HTTP/1.1 200");
        pool.push(stream);
    }
    for number in 0..40 {
        drop(from(9, &gateway, [b"".as_slice(), PARTIAL][number % 2]).await);
        let kept = from(9, &gateway, PARTIAL).await;
        std::mem::forget(kept);
    }
    for stream in &mut pool {
        let mut rest = [0; 4096];
        let _ = stream.try_read(&mut rest);
        stream.write_all(WHOLE).await.expect("the connection is open");
        assert_eq!(
            status_line(stream).await,
            "HTTP/1.1 200",
            "the pool's connections were closed for a stranger's"
        );
    }
}

#[tokio::test]
async fn busy_connections_leave_room_for_probes_and_refusals() {
    let gateway =
        embedded().flag("--max-connections", "3").flag("--max-waiters", "9").start().await;
    let lease = gateway.acquire_for("job", HOUR_MS).await;
    let mut waiting = Vec::new();
    let refused = eventually("no slot is left", async || {
        let answer = gateway.get("/openapi.json").await;
        if answer.status == 503 {
            return Some(answer);
        }
        waiting.push(from(9, &gateway, waiting_request().as_bytes()).await);
        None
    })
    .await;
    refused.problem(503, "overloaded");
    assert_eq!((refused.header("connection"), refused.header("retry-after")), ("close", "1"));
    for probe in ["/livez", "/readyz", "/healthz", "/metrics"] {
        assert_eq!(gateway.get(probe).await.status, 200, "{probe}");
    }
    waiting.clear();
    eventually("a slot is free again", async || {
        let answer = gateway.delete("job", &lease.token).await;
        (answer.status == 204).then_some(())
    })
    .await;
}

/// Without a limit of their own, the streams of a few addresses took all connections.
#[tokio::test]
async fn streams_of_many_addresses_leave_connections_to_short_requests() {
    const STREAM: &[u8] =
        b"GET /locks/job HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n";
    let gateway = embedded().flag("--max-connections", "40").start().await;
    let mut streams = Vec::new();
    for last in 2..=9 {
        loop {
            let mut stream = from(last, &gateway, STREAM).await;
            match &*status_line(&mut stream).await {
                "HTTP/1.1 200" => streams.push(stream),
                "HTTP/1.1 429" => break,
                other => panic!("{other:?} beside {} streams", streams.len()),
            }
        }
    }
    assert!((33..=35).contains(&streams.len()), "{} of seven eighths of 40", streams.len());
    for number in 0..20 {
        let answer = gateway.post(&format!("other-{number}"), json!({})).await;
        assert_eq!(answer.status, 201, "{answer:?}");
    }
}

/// Once, a place was taken before the body was complete, and six clients could take all places.
#[tokio::test]
async fn unfinished_requests_for_many_locks_refuse_nobody() {
    const SIZE: usize = 300_000;
    let gateway = embedded().start().await;
    let lease = gateway.acquire("job").await;
    let head = "PATCH /locks HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
    let text = format!("{head}\r\ncontent-length: {SIZE}\r\n\r\n{{{}", " ".repeat(SIZE / 2));
    let mut unfinished = Vec::new();
    for last in 2..=9 {
        for _ in 0..8 {
            unfinished.push(from(last, &gateway, text.as_bytes()).await);
        }
    }
    let leases = json!({ "leases": [{ "name": "job", "token": lease.token }] });
    for _ in 0..5 {
        let answer = gateway.call(Method::PATCH, "/locks").json(&leases).send().await;
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.json()["results"][0]["status"], 200);
    }
}

#[tokio::test]
async fn one_address_cannot_take_all_connections() {
    let launch =
        embedded().flag("--max-connections", "40").flag("--max-connections-per-client", "4");
    let gateway = launch.env("RUST_LOG", "info").start().await;
    gateway.acquire_for("job", HOUR_MS).await;
    let mut waiting = Vec::new();
    for number in 1..=4 {
        waiting.push(from(9, &gateway, waiting_request().as_bytes()).await);
        eventually("the request waits", async || {
            (count(&gateway, "redlock_waiters").await == f64::from(number)).then_some(())
        })
        .await;
    }
    let began = Instant::now();
    for _ in 0..50 {
        assert_eq!(
            status_line(&mut from(9, &gateway, WHOLE).await).await,
            "",
            "beyond the limit of one address"
        );
    }
    assert_eq!(gateway.get("/livez").await.status, 200);
    assert_eq!(count(&gateway, "redlock_connections_refused_total").await, 50.0);
    let log = gateway.stdout();
    let lines_about_limit = log.lines().filter(|line| line.contains("a new connection was closed"));
    // The log has one line for each window of 10 s in which there were refusals.
    let windows = 2 + began.elapsed().as_secs() as usize / 10;
    let count = lines_about_limit.count();
    assert!((1..=windows).contains(&count), "{count} lines of 50 refusals:\n{log}");
    assert!(
        log.contains("\"address\":\"127.0.0.9\"") && log.contains("max_connections_per_client"),
        "{log}"
    );
}

#[tokio::test]
async fn a_trusted_proxy_has_no_per_client_connection_limit() {
    let launch =
        embedded().flag("--max-connections", "40").flag("--max-connections-per-client", "4");
    let gateway = launch
        .flag("--max-waiters-per-client", "9")
        .flag("--trusted-proxy", "127.0.0.9")
        .start()
        .await;
    gateway.acquire_for("job", HOUR_MS).await;
    let mut waiting = Vec::new();
    for number in 1..=9 {
        waiting.push(from(9, &gateway, waiting_request().as_bytes()).await);
        eventually("the request waits", async || {
            (count(&gateway, "redlock_waiters").await == f64::from(number)).then_some(())
        })
        .await;
    }
    assert_eq!(count(&gateway, "redlock_connections_refused_total").await, 0.0);
}

#[tokio::test]
async fn a_trusted_proxy_loses_no_connection_for_having_many() {
    let launch = embedded().flag("--max-connections", "8");
    let gateway = launch.flag("--trusted-proxy", "127.0.0.9").start().await;
    let connected = async |last: u8| {
        let mut stream = from(last, &gateway, WHOLE).await;
        assert_eq!(status_line(&mut stream).await, "HTTP/1.1 200");
        stream
    };
    let mut of_proxy = Vec::new();
    for _ in 0..4 {
        of_proxy.push(connected(9).await);
    }
    // One client has as many connections as the proxy. It loses two of them to newcomers.
    let mut others = Vec::new();
    for last in [2, 2, 2, 2, 3, 4] {
        others.push(connected(last).await);
    }
    for stream in &mut of_proxy {
        let mut rest = [0; 4096];
        let _ = stream.try_read(&mut rest);
        stream.write_all(WHOLE).await.expect("the connection is open");
        assert_eq!(status_line(stream).await, "HTTP/1.1 200", "the proxy's connection was closed");
    }
    eventually("two connections were closed", async || {
        (count(&gateway, "redlock_connections_evicted_total").await >= 2.0).then_some(())
    })
    .await;
}

/// The lines of the JSON log that contain these words.
fn lines(log: &str, words: &str) -> Vec<Value> {
    log.lines()
        .filter(|line| line.contains(words))
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

#[tokio::test]
async fn few_descriptors_leave_enough_for_the_masters() {
    let servers = masters(3);
    let gateway = Launch::over(&servers).env("RUST_LOG", "info").files(200).ready().await;
    let mut sockets = Vec::new();
    for _ in 0..400 {
        sockets.push(from(9, &gateway, PARTIAL).await);
    }
    for round in 0..3 {
        servers.iter().for_each(|server: &RedisServer| {
            drop(server.cmd(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]));
        });
        // The gateway may not have noticed the end of the shortage yet, so this repeats.
        let granted = async || {
            (gateway.post(&format!("job-{round}"), json!({})).await.status == 201).then_some(())
        };
        eventually("the masters are connected again", granted).await;
        sockets.push(from(9, &gateway, b"").await);
    }
    let log = gateway.stdout();
    let warned = lines(&log, "raise ulimit -n");
    let connections = warned[0]["connections"].as_u64().expect("the figure");
    assert!((1..150).contains(&connections) && warned[0]["asked"] == 16_000, "{log}");
    assert!(!log.contains("Too many open files"), "{log}");
}

#[tokio::test]
async fn too_low_a_file_limit_is_reported_at_the_start() {
    let finished = Launch::embedded().files(64).finish().await;
    assert_eq!(finished.code, Some(1));
    assert!(
        finished.stderr.contains("64 files may be open") && finished.stderr.contains("ulimit -n"),
        "{finished:?}"
    );
}

#[tokio::test]
async fn check_shows_the_memory_the_limits_need_and_warns() {
    let check = |args: &[&str]| Launch::bare(&[&["check"], args].concat()).files(20_000).finish();
    // With embedded nodes, half of the memory is for their locks.
    let plain = check(&[]).await;
    for words in [
        "of 1.0 GiB",
        "--max-connections 8000: ",
        "--max-in-flight 2048: ",
        "--max-waiters 5000: ",
        "unread answers: ",
        "locks: ",
    ] {
        assert!(plain.stdout.contains(words), "no {words:?} in {plain:?}");
    }
    assert!(!plain.stdout.contains("WARNING"), "{plain:?}");
    let small = check(&["--memory-budget", "256MiB"]).await;
    assert!(
        small.stdout.contains("of 256.0 MiB") && !small.stdout.contains("WARNING"),
        "{small:?}"
    );
    let much = check(&["--memory-budget", "256MiB", "--max-connections", "16000"]).await;
    assert!(
        much.stdout.contains("WARNING") && much.stdout.contains("lower --max-connections"),
        "{much:?}"
    );
    let wrong = check(&["--memory-budget", "1KiB"]).await;
    assert!(
        wrong.stderr.contains("--memory-budget") && wrong.stderr.contains("64.0 MiB to"),
        "{wrong:?}"
    );
}

#[tokio::test]
async fn a_client_that_reads_no_answer_is_disconnected() {
    let gateway = embedded().start().await;
    let page = b"GET /docs/api/swagger-ui-bundle.js HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let stranger = from(9, &gateway, &page.repeat(8)).await;
    let before = count(&gateway, "redlock_connections").await;
    assert!(before >= 2.0);
    let gone = async || (count(&gateway, "redlock_connections").await < before).then_some(());
    // The gateway closes the connection after 30 seconds. The idle timeout is an hour.
    let closed = timeout(PATIENCE, async {
        while gone().await.is_none() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    closed.await.expect("the connection is closed");
    drop(stranger);
}

#[tokio::test]
async fn the_operators_address_has_its_own_slots_and_no_locks() {
    let admin = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let file = file(&[&key("deploy", HOLDER, "*").await]);
    let launch = with_keys(&file).flag("--admin-listen", &admin.to_string());
    let gateway = launch.flag("--max-connections", "2").flag("--drain-delay", "1h").start().await;
    let call = |path: &str| gateway.call(Method::GET, path).to(admin);
    // These connections take all slots of the public address, and the spare ones. None of them ever
    // completes its head.
    let mut taken = Vec::new();
    for _ in 0..30 {
        taken.push(from(9, &gateway, b"GET /livez HTTP/1.1\r\nhost: loc").await);
    }
    for probe in ["/livez", "/readyz", "/healthz", "/metrics"] {
        assert_eq!(call(probe).send().await.status, 200, "{probe}");
    }
    assert!(
        call("/readyz").send().await.json()["nodes"]
            .as_array()
            .is_some_and(|nodes| nodes.len() == 5)
    );
    for path in ["/docs", "/openapi.json", "/", "/console/history"] {
        call(path).send().await.problem(404, "not_found");
    }
    for path in ["/locks", "/locks/job"] {
        let mut raw = TcpStream::connect(admin).await.expect("the gateway listens");
        raw.write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes())
            .await
            .expect("sent");
        assert_eq!(status_line(&mut raw).await, "HTTP/1.1 404", "{path}");
    }
    let other =
        gateway.call(Method::GET, "/livez").to(admin).header("host", "evil.example").send().await;
    other.problem(421, "misdirected_request");

    drop(taken);
    gateway.signal(Signal::TERM);
    eventually("readyz fails while requests are still served", async || {
        (call("/readyz").send().await.status == 503).then_some(())
    })
    .await;
    let address = gateway.address().to_string();
    drop(gateway);
    let again = Launch::embedded().flag("--shutdown-grace", "1h");
    let mut again = again.flag("--admin-listen", &address).start().await;
    let same = again.address().to_string();
    let second = Launch::embedded().flag("--admin-listen", &same).finish().await;
    assert_eq!(second.code, Some(1));
    assert!(
        second.stderr.contains("--admin-listen") && second.stderr.contains(&same),
        "{}",
        second.stderr
    );
    again.signal(Signal::TERM);
    assert_eq!(again.ended().await, Some(0));
}

#[tokio::test]
async fn answers_state_how_long_their_connection_may_be_idle() {
    let gateway = Launch::embedded().flag("--idle-timeout", "12s").start().await;
    let mut raw = gateway.raw().await;
    for sent in [
        "GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n",
    ] {
        raw.write(sent).await;
        assert_eq!(raw.answer().await.header("keep-alive"), "timeout=11", "{sent}");
    }
    // The header must be absent where the answer ends the connection.
    for sent in [
        "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        "GET /livez HTTP/1.0\r\nhost: localhost\r\n\r\n",
    ] {
        let mut raw = gateway.raw().await;
        raw.write(sent).await;
        assert_eq!(raw.answer().await.header("keep-alive"), "", "{sent}");
    }
}
