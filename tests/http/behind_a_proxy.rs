//! Gateways behind nginx and HAProxy, with the configurations that `docs/behind-a-proxy.md` shows.
//! Only addresses and the time limit of an answer are replaced.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use http::{HeaderMap, Method};
use rustix::process::Signal;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

use crate::support::client::Lease;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{PATIENCE, eventually, free_port, masters};
use crate::support::metrics::Samples;
use crate::support::proxy::{Proxy, documented, with};
use crate::support::stream::Events;
use crate::support::waiters::{HOUR_MS, patient, waiting_is};

/// A time limit that no test reaches.
const LONG: &str = "1h";

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Nginx,
    Haproxy,
}

const BOTH: [Kind; 2] = [Kind::Nginx, Kind::Haproxy];

impl Kind {
    /// Starts the proxy in front of two gateways, or twice the same one. `answers_within` is how
    /// long the proxy waits for an answer. HAProxy waits much longer for the answer to a check, so
    /// that a busy gateway does not count as dead.
    async fn start(self, gateways: [&Gateway; 2], answers_within: &str) -> Proxy {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()));
        let [one, other] = gateways.map(|gateway| gateway.address().to_string());
        let limit = |name: &str| (format!("{name} 60s"), format!("{name} {answers_within}"));
        let (text, (old, new)) = match self {
            Self::Nginx => {
                let text = with(&documented("nginx"), "listen 80;", &format!("listen {address};"));
                (text, limit("proxy_read_timeout"))
            }
            Self::Haproxy => {
                let text = with(&documented("haproxy"), "bind :80", &format!("bind {address}"));
                let (old, new) = limit("timeout server");
                (text, (old, format!("{new}\n    timeout check {LONG}")))
            }
        };
        let text = with(&text, &old, &new);
        let text = with(&with(&text, "10.0.0.1:8080", &one), "10.0.0.2:8080", &other);
        match self {
            Self::Nginx => Proxy::nginx(gateways[0], address, &text).await,
            Self::Haproxy => Proxy::haproxy(gateways[0], address, &text).await,
        }
    }
}

#[tokio::test]
async fn a_proxy_reuses_its_connection_to_the_gateway() {
    for kind in BOTH {
        // Without --trusted-proxy, the log shows the proxy's address and port.
        let gateway = Launch::embedded().env("RUST_LOG", "debug").start().await;
        let proxy = kind.start([&gateway, &gateway], LONG).await;
        for number in 0..20 {
            let path = format!("/locks/reports%2Feu%2F{number}");
            let lease = Lease::from(&proxy.call(&gateway, Method::POST, &path).send().await);
            let release = proxy.call(&gateway, Method::DELETE, &path);
            let released = release.header("lock-token", &lease.token).send().await;
            assert_eq!(released.status, 204, "{kind:?} {released:?}");
        }
        let ports = eventually("all requests are logged", async || {
            let log = gateway.stdout();
            let lines: Vec<_> =
                log.lines().filter(|line| line.contains("\"route\":\"/locks/{name}\"")).collect();
            let port = |line: &&str| {
                let (_, rest) = line.split_once("\"address\":\"127.0.0.1:")?;
                rest.split_once('"').map(|(port, _)| port.to_owned())
            };
            let ports: BTreeSet<_> = lines.iter().filter_map(port).collect();
            (lines.len() >= 40).then_some(ports)
        })
        .await;
        // Each of the two entries for the gateway may have a connection.
        assert!((1..=2).contains(&ports.len()), "{kind:?} opened {ports:?}");
    }
}

#[tokio::test]
async fn a_wait_cut_by_the_proxy_goes_on_with_its_key() {
    for kind in BOTH {
        let gateway = waiting_gateway().start().await;
        let impatient = kind.start([&gateway, &gateway], "1s").await;
        let held = gateway.acquire_for("job", HOUR_MS).await;
        let mut cut = waits_from(1, KEY, &impatient).await;
        let text = answer(&mut cut).await;
        assert!(text.starts_with("HTTP/1.1 504"), "{kind:?} {text}");
        waiting_is(&gateway, 0, 0).await;
        // This proxy does not cut the repetition, however busy the machine is.
        let proxy = kind.start([&gateway, &gateway], LONG).await;
        let again = proxy.call(&gateway, Method::POST, "/locks/job");
        let again = again.header("idempotency-key", KEY);
        let again = again.json(&json!({ "ttl_ms": 60_000, "wait_ms": HOUR_MS }));
        let again = tokio::spawn(again.send());
        waiting_is(&gateway, 1, 1).await;
        assert_eq!(gateway.delete("job", &held.token).await.status, 204);
        let lease = Lease::from(&again.await.expect("no panic"));
        assert!(lease.fencing > held.fencing);
        let released = proxy.call(&gateway, Method::DELETE, "/locks/job");
        let released = released.header("lock-token", &lease.token).send().await;
        assert_eq!(released.status, 204, "{kind:?} {released:?}");
        assert_eq!(gateway.inspect("job").await["state"], "free", "{kind:?}");
    }
}

#[tokio::test]
async fn a_drained_gateway_costs_no_request_behind_a_proxy() {
    for kind in BOTH {
        let servers = masters(3);
        // HAProxy notices the 503 of /readyz after two checks, a second apart.
        // There are thousands of requests: a log at level trace would be too long to search.
        let launch = || {
            let launch =
                Launch::over(&servers).flag("--clock-skew", "10s").flag("--node-timeout", "10s");
            launch.flag("--drain-delay", "3s").env("RUST_LOG", "info")
        };
        let mut leaves = launch().ready().await;
        let stays = launch().ready().await;
        let proxy = kind.start([&leaves, &stays], LONG).await;
        let (done, is_over) = (AtomicU32::new(0), AtomicBool::new(false));
        let work = async |client: u32| {
            let path = format!("/locks/client-{client}");
            while !is_over.load(Ordering::Acquire) {
                let call = proxy.call(&stays, Method::POST, &path);
                let number = done.load(Ordering::Relaxed);
                let key = format!("a-key-of-the-drain-{kind:?}-{client}-{number}");
                let lease = Lease::from(&call.header("idempotency-key", key).send().await);
                let release = proxy.call(&stays, Method::DELETE, &path);
                let answer = release.header("lock-token", &lease.token).send().await;
                assert_eq!(answer.status, 204, "{kind:?} {answer:?}");
                done.fetch_add(1, Ordering::Relaxed);
            }
        };
        let drain = async {
            let more = async |count: u32| {
                let before = done.load(Ordering::Relaxed);
                eventually("requests are served", async || {
                    (done.load(Ordering::Relaxed) >= before + count).then_some(())
                })
                .await;
            };
            more(20).await;
            leaves.signal(Signal::TERM);
            assert_eq!(leaves.ended().await, Some(0), "{kind:?}");
            more(20).await;
            is_over.store(true, Ordering::Release);
        };
        tokio::join!(work(1), work(2), work(3), drain);
    }
}

const KEY: &str = "a-key-of-this-test";

/// A gateway that lets requests wait for up to [`HOUR_MS`].
fn waiting_gateway() -> Launch {
    patient(Launch::embedded()).flag("--trusted-proxy", "127.0.0.1")
}

/// Sends a request that waits for the lock `job`, from the address 127.0.0.`last`.
async fn waits_from(last: u8, key: &str, proxy: &Proxy) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    let own = SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0));
    socket.bind(own).expect("all of 127/8 is this machine");
    let mut stream = socket.connect(proxy.address()).await.expect("the proxy listens");
    let body = json!({ "ttl_ms": 60_000, "wait_ms": HOUR_MS }).to_string();
    let head = "POST /locks/job HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json";
    let head = format!("{head}\r\nidempotency-key: {key}");
    let request = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(request.as_bytes()).await.expect("the proxy reads");
    stream
}

/// The first bytes of the answer.
async fn answer(stream: &mut TcpStream) -> String {
    let mut bytes = vec![0; 4096];
    let read = timeout(PATIENCE, stream.read(&mut bytes)).await.expect("an answer");
    String::from_utf8_lossy(&bytes[..read.expect("no error")]).into_owned()
}

#[tokio::test]
async fn behind_a_proxy_the_limit_on_connections_means_clients() {
    for kind in BOTH {
        let launch = waiting_gateway()
            .flag("--max-connections-per-client", "3")
            .flag("--max-waiters-per-client", "9");
        let gateway = launch.start().await;
        let proxy = kind.start([&gateway, &gateway], LONG).await;
        gateway.acquire_for("job", HOUR_MS).await;
        let mut waiters = Vec::new();
        for (count, last) in (1..).zip([9, 9, 9, 8, 8, 8, 7]) {
            waiters.push(waits_from(last, &format!("{KEY}-{count}"), &proxy).await);
            waiting_is(&gateway, count, 1).await;
        }
        let mut refused = waits_from(9, "the-key-of-the-fourth", &proxy).await;
        let text = answer(&mut refused).await;
        assert!(text.starts_with("HTTP/1.1 503"), "{kind:?} {text}");
        for part in ["\"overloaded\"", "--max-connections-per-client", "the address 127.0.0.9"] {
            assert!(text.contains(part), "{kind:?} lacks {part}: {text}");
        }
        // A client that hangs up frees its place.
        waiters.remove(0);
        waiting_is(&gateway, 6, 1).await;
        waiters.push(waits_from(9, "the-key-of-the-next-one", &proxy).await);
        waiting_is(&gateway, 7, 1).await;
    }
}

/// If a proxy collected events, a test would wait for the first one until its patience ends: no other
/// event follows.
#[tokio::test]
async fn streams_pass_a_proxy_at_once_and_end_with_the_client() {
    tokio::join!(streams_pass(Kind::Nginx), streams_pass(Kind::Haproxy));
}

async fn streams_pass(kind: Kind) {
    let gateway = waiting_gateway().start().await;
    let proxy = kind.start([&gateway, &gateway], LONG).await;
    let holds = async |path: &str, ttl_ms: u64| {
        let mut watcher =
            Events::open(proxy.address(), path, &HeaderMap::new()).await.expect("a stream");
        watcher.next_of("snapshot", &[]).await;
        let (none, body) = (HeaderMap::new(), json!({ "ttl_ms": ttl_ms }));
        let opened = Events::open_by(Method::POST, proxy.address(), path, &none, &body).await;
        let mut holder = opened.expect("a stream");
        holder.next_of("granted", &[]).await;
        watcher.next_of("held", &[]).await;
        (watcher, holder)
    };
    // This lock is extended after 20 minutes.
    let (_watcher, silent) = holds("/locks/silent", HOUR_MS).await;
    let (mut watcher, mut holder) = holds("/locks/job", 6_000).await;
    holder.next_of("extended", &["unknown"]).await;
    watcher.next_of("extended", &[]).await;
    drop((silent, holder));
    eventually("the watchers alone are left", async || {
        Samples::of(&gateway).await.is("redlock_event_streams", &[], 2.0).then_some(())
    })
    .await;
    watcher.next_of("expired", &["extended"]).await;
    assert_eq!(gateway.inspect("job").await["state"], "free", "{kind:?}");
}
