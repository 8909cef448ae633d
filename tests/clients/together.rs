//! Guards of one client renew together. A proxy in front of a real gateway counts the requests.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use redlock_client::{Client, Error, Guard, LossReason};
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{PATIENCE, eventually};

/// A guard extends its lock after a third of this time. It loses the lock only if the machine stands
/// still for most of the rest.
const TTL: Duration = Duration::from_secs(6);

/// A proxy that counts the renewals.
struct Proxy {
    gateway: Gateway,
    /// The number of `PATCH /locks`, and of `PATCH /locks/{name}`.
    joint: AtomicUsize,
    single: AtomicUsize,
    /// The proxy's own answer to `PATCH /locks`, unless it is 0.
    status: AtomicU16,
    /// Whether `PATCH /locks` gets no answer.
    hangs: AtomicBool,
}

impl Proxy {
    async fn start() -> (Arc<Self>, Client) {
        let proxy = Arc::new(Self {
            gateway: Launch::embedded().ready().await,
            joint: AtomicUsize::new(0),
            single: AtomicUsize::new(0),
            status: AtomicU16::new(0),
            hangs: AtomicBool::new(false),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = Client::new(format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let serving = proxy.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let proxy = serving.clone();
                let service = service_fn(move |request| proxy.clone().serve(request));
                let server = hyper::server::conn::http1::Builder::new();
                tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
            }
        });
        (proxy, client)
    }

    async fn serve(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Infallible> {
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let is_patch = head.method == Method::PATCH;
        let is_joint = is_patch && head.uri.path() == "/locks";
        self.joint.fetch_add(usize::from(is_joint), Ordering::SeqCst);
        self.single.fetch_add(usize::from(is_patch && !is_joint), Ordering::SeqCst);
        let status = self.status.load(Ordering::SeqCst);
        if is_joint && status != 0 {
            let answer = Response::builder().status(status).body(Full::default());
            return Ok(answer.unwrap());
        }
        if is_joint && self.hangs.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        let path = head.uri.path_and_query().unwrap().as_str();
        let mut call = self.gateway.call(head.method, path).body(body);
        for name in ["content-type", "lock-token", "idempotency-key"] {
            if let Some(value) = head.headers.get(name) {
                call = call.header(name, value);
            }
        }
        let answer = call.send().await;
        let mut response = Response::new(Full::new(answer.body));
        *response.status_mut() = http::StatusCode::from_u16(answer.status).unwrap();
        if let Some(kind) = answer.headers.get("content-type") {
            response.headers_mut().insert("content-type", kind.clone());
        }
        Ok(response)
    }

    fn counts(&self) -> (usize, usize) {
        (self.joint.load(Ordering::SeqCst), self.single.load(Ordering::SeqCst))
    }
}

async fn acquired(client: &Client, count: usize, ttl: Duration) -> Vec<Guard> {
    let mut guards = Vec::new();
    for at in 0..count {
        guards.push(client.lock(format!("jobs/{at}")).ttl(ttl).acquire().await.unwrap());
    }
    guards
}

/// Waits until each of the guards has been extended once more.
async fn all_extended(guards: &[Guard]) {
    let extended = guards.iter().map(async |guard| {
        let mut deadlines = guard.deadlines();
        let changed = timeout(PATIENCE, deadlines.changed()).await;
        changed.expect("the lock is extended").expect("the lock is held");
        guard.check().unwrap();
    });
    join_all(extended).await;
}

#[tokio::test]
async fn fifty_guards_renew_by_few_requests() {
    let (proxy, client) = Proxy::start().await;
    let mut guards = acquired(&client, 50, TTL).await;
    all_extended(&guards).await;
    let (joint_before, single_before) = proxy.counts();
    let begin = guards[0].deadline();
    while guards[0].deadline().since(begin) < TTL * 2 {
        all_extended(&guards[..1]).await;
    }
    let (joint, single) = proxy.counts();
    let (joint, single) = (joint - joint_before, single - single_before);
    // One by one it would be 300 and more. Guards acquired one after the other form a few groups.
    assert!(
        joint > 0 && joint + single <= 133,
        "{joint} joint requests and {single} single ones for 50 guards in 2 TTLs"
    );
    guards.iter().for_each(|guard| guard.check().unwrap());

    let taken = guards.remove(7);
    assert_eq!(proxy.gateway.delete(taken.name(), taken.token()).await.status, 204);
    let loss = timeout(PATIENCE, taken.lost()).await.expect("the guard reports the loss");
    assert!(matches!(loss.reason, LossReason::Gone { .. }) && loss.name == "jobs/7", "{loss}");
    assert!(matches!(taken.check(), Err(Error::Lost(_))));
    all_extended(&guards).await;
}

#[tokio::test]
async fn guards_renew_alone_if_the_gateway_cannot_extend_many() {
    for status in [404, 405] {
        let (proxy, client) = Proxy::start().await;
        proxy.status.store(status, Ordering::SeqCst);
        let guards = acquired(&client, 5, TTL).await;
        for _ in 0..3 {
            all_extended(&guards).await;
        }
        let (joint, single) = proxy.counts();
        // Groups that are due at the same time may each ask once before the first answer.
        assert!((1..=5).contains(&joint), "{joint} joint requests");
        assert!(single >= 15, "{single} single requests");
    }
}

/// A guard was released during a hung joint renewal.
struct Released {
    took: Duration,
    /// Whether the guard has reported a loss.
    is_lost: Box<dyn Fn() -> bool>,
    /// The other guards of the renewal.
    guards: Vec<Guard>,
    _proxy: Arc<Proxy>,
}

async fn released_during_a_hung_renewal(ttl: Duration) -> Released {
    let (proxy, client) = Proxy::start().await;
    let mut guards = acquired(&client, 5, ttl).await;
    proxy.hangs.store(true, Ordering::SeqCst);
    eventually("a joint renewal", async || (proxy.counts().0 > 0).then_some(())).await;
    let released = guards.remove(0);
    let notice = released.cancellation();
    let is_lost = Box::new(move || notice.is_cancelled());
    let begin = Instant::now();
    released.release().await.unwrap();
    Released { took: begin.elapsed(), is_lost, guards, _proxy: proxy }
}

#[tokio::test]
async fn a_hung_joint_renewal_loses_no_lock() {
    let released = released_during_a_hung_renewal(TTL).await;
    all_extended(&released.guards).await;
    assert!(!(released.is_lost)(), "a released lock is not lost");
}

#[tokio::test]
async fn guards_with_other_ttls_renew_in_other_requests() {
    let (proxy, client) = Proxy::start().await;
    let ms = Duration::from_millis(1);
    let guards = [
        client.lock("a").ttl(TTL).acquire().await.unwrap(),
        client.lock("b").ttl(TTL + ms).acquire().await.unwrap(),
    ];
    for _ in 0..2 {
        all_extended(&guards).await;
    }
    assert_eq!(proxy.counts().0, 0, "no joint request");
}

mod measured {
    use super::*;
    use crate::support::measure::measured;

    #[tokio::test]
    async fn a_hung_joint_renewal_delays_no_release_and_loses_no_lock() {
        const TTL: Duration = Duration::from_secs(3);
        measured("a release during a hung renewal", async || {
            let released = released_during_a_hung_renewal(TTL).await;
            for guard in &released.guards {
                let mut deadlines = guard.deadlines();
                tokio::select! {
                    changed = deadlines.changed() => changed.expect("the guard lives"),
                    loss = guard.lost() => return Err(loss.to_string()),
                }
            }
            assert!(!(released.is_lost)(), "a released lock is not lost");
            let took = released.took;
            if took < TTL { Ok(()) } else { Err(format!("it took {took:?}")) }
        })
        .await;
    }
}
