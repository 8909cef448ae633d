//! Gateways are replaced one by one under load. A load balancer in front of them probes /readyz. No
//! request may be lost.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, RwLock};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use rustix::process::Signal;
use serde_json::Value;
use tokio::net::TcpStream;

use crate::support::gateway::{Gateway, is_late};
use crate::support::harness::{RedisServer, daily_or_long, eventually, masters};
use crate::support::waiters::patient_over;

const CLIENTS: usize = 8;
/// The time between two probes of the load balancer.
const ASKS_EVERY: Duration = Duration::from_millis(100);
/// After this many requests, the next gateway replaces the present one.
const REQUESTS_EACH: u32 = 2_000;

/// A gateway as the load balancer knows it.
struct Backend {
    address: SocketAddr,
    is_ready: AtomicBool,
}

/// What the load balancer, the clients and the upgrade share.
#[derive(Default)]
struct Shared {
    backends: RwLock<Vec<Arc<Backend>>>,
    done: AtomicU32,
    is_over: AtomicBool,
}

impl Shared {
    fn add(&self, gateway: &Gateway) {
        let backend = Backend { address: gateway.address(), is_ready: AtomicBool::new(false) };
        self.backends.write().expect("no panic poisons the lock").push(Arc::new(backend));
    }

    fn all(&self) -> Vec<Arc<Backend>> {
        self.backends.read().expect("no panic poisons the lock").clone()
    }

    fn ready(&self) -> Option<Arc<Backend>> {
        self.all().into_iter().rfind(|backend| backend.is_ready.load(Ordering::Acquire))
    }

    async fn balance(&self) {
        let mut tick = tokio::time::interval(ASKS_EVERY);
        while !self.is_over.load(Ordering::Acquire) {
            tick.tick().await;
            for backend in self.all() {
                let is_ready = async {
                    let mut connection = connect(backend.address).await?;
                    let answer =
                        connection.send_request(request(Method::GET, "/readyz", None, "")).await;
                    Ok::<_, String>(
                        answer.map_err(|error| error.to_string())?.status() == StatusCode::OK,
                    )
                };
                backend.is_ready.store(is_ready.await.unwrap_or(false), Ordering::Release);
            }
        }
    }

    /// One client with a lock of its own. It keeps its connection as long as the gateway is ready
    /// and does not close it.
    async fn work(&self, client: usize) -> Result<(), String> {
        let path = format!("/locks/client-{client}");
        let mut kept: Option<(Arc<Backend>, SendRequest<Full<Bytes>>)> = None;
        let mut token = None;
        // Whether masters did not answer the last request in time, on a busy machine. Then the
        // request is repeated, and what it has done may stand in the way.
        let mut was_late = false;
        while !self.is_over.load(Ordering::Acquire) || token.is_some() {
            let is_usable = |(backend, connection): &mut (Arc<Backend>, SendRequest<_>)| {
                backend.is_ready.load(Ordering::Acquire) && !connection.is_closed()
            };
            if !kept.as_mut().is_some_and(is_usable) {
                let backend = self.ready().ok_or("no gateway is ready")?;
                let connection = connect(backend.address).await?;
                kept = Some((backend, connection));
            }
            let (backend, connection) = kept.as_mut().expect("the backend was just started");
            let at = backend.address;
            let (method, wanted) = match &token {
                None => (Method::POST, StatusCode::CREATED),
                Some(_) => (Method::DELETE, StatusCode::NO_CONTENT),
            };
            let body = if token.is_none() { "{\"ttl_ms\": 3600000}" } else { "" };
            let asked = connection
                .send_request(request(method.clone(), &path, token.as_deref(), body))
                .await;
            let failed = |error: String| format!("{method} {path} at {at}: {error}");
            let answer: Response<Incoming> = asked.map_err(|error| failed(error.to_string()))?;
            let status = answer.status();
            let ends = answer.headers().get("connection").cloned();
            let body = answer
                .into_body()
                .collect()
                .await
                .map_err(|error| failed(error.to_string()))?
                .to_bytes();
            if ends.is_some_and(|ends| ends == HeaderValue::from_static("close")) {
                kept = None;
            }
            let problem = || serde_json::from_slice::<Value>(&body).unwrap_or_default();
            let is_undecided = is_late(status.as_u16(), &problem())
                || was_late && token.is_none() && status == StatusCode::CONFLICT;
            let is_released = was_late && token.is_some() && status == StatusCode::NOT_FOUND;
            was_late = is_undecided;
            if is_undecided {
                continue;
            }
            if status != wanted && !is_released {
                return Err(failed(format!("{status} {}", String::from_utf8_lossy(&body))));
            }
            token = if token.is_none() {
                let lease: Value =
                    serde_json::from_slice(&body).map_err(|error| failed(error.to_string()))?;
                lease["token"].as_str().map(str::to_owned)
            } else {
                None
            };
            self.done.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

async fn connect(address: SocketAddr) -> Result<SendRequest<Full<Bytes>>, String> {
    let stream =
        TcpStream::connect(address).await.map_err(|error| format!("{address}: {error}"))?;
    let shaken = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (sender, connection) = shaken.map_err(|error| format!("{address}: {error}"))?;
    tokio::spawn(connection);
    Ok(sender)
}

fn request(
    method: Method,
    path: &str,
    token: Option<&str>,
    body: &'static str,
) -> Request<Full<Bytes>> {
    let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
    if let Some(token) = token {
        request = request.header("lock-token", token);
    }
    if !body.is_empty() {
        request = request.header("content-type", "application/json");
    }
    request.body(Full::new(Bytes::from_static(body.as_bytes()))).expect("a request")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_upgrade_loses_no_request() {
    let gateways = daily_or_long(4, 20);
    let servers: Vec<RedisServer> = masters(3);
    // A client may use its connection for the last time within this delay, also on a busy machine.
    let launch = || patient_over(&servers).flag("--drain-delay", "3s");
    // A shutdown that waits for its grace would not end.
    let start = || launch().flag("--shutdown-grace", "1h").ready();
    let shared = Arc::new(Shared::default());
    let mut gateway = start().await;
    shared.add(&gateway);
    let balancer = tokio::spawn({
        let shared = shared.clone();
        async move { shared.balance().await }
    });
    eventually("the first gateway is ready", async || shared.ready()).await;
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let shared = shared.clone();
            tokio::spawn(async move { shared.work(client).await })
        })
        .collect();

    for number in 1..=gateways {
        let enough =
            async || (shared.done.load(Ordering::Relaxed) >= number * REQUESTS_EACH).then_some(());
        eventually("requests are served, or one has failed", async || {
            if clients.iter().any(tokio::task::JoinHandle::is_finished) {
                Some(())
            } else {
                enough().await
            }
        })
        .await;
        if number < gateways {
            let next = start().await;
            shared.add(&next);
            let seen = async || shared.ready().filter(|backend| backend.address == next.address());
            eventually("the next gateway is seen to be ready", seen).await;
            gateway.signal(Signal::TERM);
            assert_eq!(gateway.ended().await, Some(0));
            gateway = next;
        }
    }
    shared.is_over.store(true, Ordering::Release);
    for client in clients {
        assert_eq!(client.await.expect("no panic"), Ok(()));
    }
    balancer.await.expect("no panic");
    println!("0 failed of {}, over {gateways} gateways", shared.done.load(Ordering::Relaxed));
}
