//! The counted paths. Each path repeats its work on one thread, as often as the caller asks.
//!
//! Names come from a short list, and random numbers from a seed. The clock advances by a
//! microsecond at each reading, so the machine's speed changes no decision. Only the hash maps of
//! the standard library still use a random seed.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::Response;
use http::{HeaderValue, Request, StatusCode};
use redlock_api::LeaseRef;
use redlock_core::clock::{Clock, Entropy};
use redlock_core::internals::{packed_answer, unpacked_answer};
use redlock_core::node::codec::{Header, pack_call};
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::{
    Holding, Keys, NoObserver, Node, NodeSettings, Observer, Op, Record, ReleaseScope, Vote,
};
use redlock_core::{
    AcquireOptions, Env, Info, LockError, LockName, LockToken, Redlock, Settings, Ttl,
};
use redlock_gateway::audit::Audit;
use redlock_gateway::config::{Limits, LogFormat};
use redlock_gateway::gateway::{CursorKey, Gateway};
use redlock_gateway::http::{App, AppState, Hosts};
use redlock_gateway::overload::MasterMemory;
use redlock_gateway::telemetry::{self, Telemetry};
use serde_json::json;

/// A path that is counted.
pub(crate) struct Path {
    /// Its name on the command line and in the baseline.
    pub(crate) name: &'static str,
    /// What one repetition does, in words.
    pub(crate) what: &'static str,
    /// How many repetitions the shorter of the two runs has.
    pub(crate) times: u32,
    /// Whether the path asks nodes.
    pub(crate) asks_nodes: bool,
    run: fn(u32),
}

impl Path {
    /// Runs the path this many times.
    pub(crate) fn run(&self, times: u32) {
        (self.run)(times);
    }
}

pub(crate) const PATHS: [Path; 8] = [
    Path {
        name: "batch",
        what: "encode 16 acquires and 16 releases, decode the replies",
        times: 500,
        asks_nodes: false,
        run: batch,
    },
    Path {
        name: "cycle",
        what: "Redlock: acquire, release",
        times: 500,
        asks_nodes: true,
        run: cycle,
    },
    Path { name: "extend", what: "Redlock: extend", times: 500, asks_nodes: true, run: extend },
    Path {
        name: "handoff",
        what: "Redlock: wait, release to the waiter",
        times: 500,
        asks_nodes: true,
        run: handoff,
    },
    Path {
        name: "http-cycle",
        what: "gateway: POST 201, DELETE 204",
        times: 500,
        asks_nodes: true,
        run: http_cycle,
    },
    Path {
        name: "http-extend",
        what: "gateway: PATCH 200",
        times: 500,
        asks_nodes: true,
        run: http_extend,
    },
    Path {
        name: "http-extend-many",
        what: "gateway: PATCH /locks with 100 leases",
        times: 20,
        asks_nodes: true,
        run: http_extend_many,
    },
    Path {
        name: "http-refused",
        what: "gateway: POST 409",
        times: 500,
        asks_nodes: true,
        run: http_refused,
    },
];

const NODES: usize = 5;
const NAMES: u32 = 16;
/// After how many requests the metrics library does its upkeep. In the gateway that happens every
/// few seconds.
const UPKEEP_EVERY: u32 = 250;
const BODY: &str = r#"{"ttl_ms": 30000, "owner": "nightly-report on host-7"}"#;

/// A clock that begins in 2025 and advances by 1 µs at each reading.
struct Ticks(AtomicU64);

impl Clock for Ticks {
    fn monotonic(&self) -> Duration {
        Duration::from_micros(self.wall_micros())
    }

    fn wall_micros(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

struct Seeded(Mutex<fastrand::Rng>);

impl Entropy for Seeded {
    fn fill(&self, buffer: &mut [u8]) {
        self.0.lock().expect("nobody panics with it").fill(buffer);
    }
}

fn redlock(observer: Arc<dyn Observer>) -> Redlock {
    let clock = Arc::new(Ticks(AtomicU64::new(1_763_725_165_000_000)));
    let node = |name: String| {
        Arc::new(MemoryNode::new(name, clock.clone(), NodeSettings::default())) as Arc<dyn Node>
    };
    let nodes = node_names().into_iter().map(node).collect();
    let entropy = Arc::new(Seeded(Mutex::new(fastrand::Rng::with_seed(1))));
    // In test builds the settings have one more field.
    #[allow(clippy::needless_update)]
    let settings = Settings { key_prefix: "lock:".into(), ..Settings::default() };
    Redlock::new(nodes, settings, Env { clock, entropy, observer })
        .expect("these settings are allowed")
}

fn node_names() -> Vec<String> {
    (1..=NODES).map(|n| format!("10.0.0.{n}:6379")).collect()
}

fn names() -> Vec<LockName> {
    (0..NAMES)
        .map(|n| format!("reports/nightly-{n:04}").parse::<LockName>().expect("a lock's name"))
        .collect()
}

fn ttl() -> Ttl {
    Ttl::from_millis(30_000).expect("within the limits of a Ttl")
}

fn on_runtime(work: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(work);
}

fn batch(times: u32) {
    const HALF: usize = 16;
    let header = Header::new(
        "{lock:}:node",
        "1 9f86d081884c7d65 6379",
        "{lock:}:hints",
        "{lock:}:number:9f86d081884c7d65",
        &NodeSettings::default(),
    );
    let token = "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"
        .parse::<LockToken>()
        .expect("a token");
    let record = Record::new(&token, &Info::new(BODY).expect("short enough"));
    let names = names();
    let mut ops = Vec::new();
    let mut votes = Vec::new();
    for (at, name) in names.iter().enumerate().take(HALF) {
        let keys = Keys::new("lock:", name);
        ops.push(Arc::new(Op::Acquire {
            keys: keys.clone(),
            record: record.clone(),
            ttl: ttl(),
            tell: None,
        }));
        ops.push(Arc::new(Op::Release {
            keys,
            record: record.clone(),
            scope: ReleaseScope::Holder,
            tell: None,
        }));
        // A few attempts are refused, as in practice.
        let refusal =
            || Holding { record: record.clone(), expires_in: Some(Duration::from_secs(20)), at: 0 };
        votes.push(if at % 4 == 0 { Vote::Held(refusal()) } else { Vote::Granted });
        votes.push(Vote::Released);
    }
    let answer = packed_answer(&votes);
    for _ in 0..times {
        let call = std::hint::black_box(pack_call(&header, 0, std::hint::black_box(&ops).iter()));
        assert!(call.len() > ops.len() * record.grant().len());
        let votes = unpacked_answer(ops.len(), std::hint::black_box(answer.clone()));
        assert_eq!(std::hint::black_box(votes).map(|votes| votes.len()), Some(2 * HALF));
    }
}

fn cycle(times: u32) {
    let names = names();
    on_runtime(async {
        let locks = redlock(Arc::new(NoObserver));
        for name in names.iter().cycle().take(times as usize) {
            let lease =
                locks.acquire(name, ttl(), AcquireOptions::default()).await.expect("it is free");
            locks.release(name, &lease.token).await.expect("it is ours");
        }
    });
}

fn extend(times: u32) {
    let names = names();
    on_runtime(async {
        let locks = redlock(Arc::new(NoObserver));
        let mut leases = Vec::new();
        for name in &names {
            leases.push(
                locks.acquire(name, ttl(), AcquireOptions::default()).await.expect("it is free"),
            );
        }
        for (name, lease) in names.iter().zip(&leases).cycle().take(times as usize) {
            locks.extend(name, &lease.token, ttl()).await.expect("it is ours");
        }
    });
}

fn handoff(times: u32) {
    let names = names();
    on_runtime(async {
        let locks = redlock(Arc::new(NoObserver));
        let name = &names[0];
        let mut held =
            locks.acquire(name, ttl(), AcquireOptions::default()).await.expect("it is free");
        for _ in 0..times {
            let patience = Duration::from_secs(20);
            let waits =
                locks.acquire_within(name, ttl(), AcquireOptions::default(), patience, || Ok(()));
            // `biased` polls the futures in this order, so the first one is in the queue when the
            // second releases the lock.
            let (next, released) = tokio::join!(biased; waits, locks.release(name, &held.token));
            released.expect("it was ours");
            held = next.expect("it was handed over");
        }
        assert!(matches!(
            locks.acquire(name, ttl(), AcquireOptions::default()).await,
            Err(LockError::Held(_))
        ));
    });
}

/// A gateway without sockets.
struct Served {
    app: App,
    telemetry: Arc<Telemetry>,
    requests: u32,
}

impl Served {
    fn new() -> Self {
        // The level is so low that nothing is logged.
        drop(telemetry::start_logging(LogFormat::Json));
        let telemetry = Arc::new(Telemetry::new(&node_names()));
        let limits = Limits {
            default_ttl: ttl(),
            max_ttl: Ttl::from_millis(300_000).expect("within the limits of a Ttl"),
            max_wait: Duration::from_secs(25),
            max_hold: Duration::from_secs(86_400),
        };
        let locks = redlock(telemetry.clone());
        let memory = MasterMemory::new(1 << 30, Duration::from_secs(2));
        let cursors = CursorKey::new([0; 32]);
        let gateway =
            Gateway::new(locks, limits, "cluster".into(), cursors, 4096, memory, telemetry.clone());
        let state = AppState::open(Arc::new(gateway));
        Self {
            app: App::new(state, telemetry.clone(), Arc::new(Audit::logged()), Hosts::default()),
            telemetry,
            requests: 0,
        }
    }

    /// Sends a request, reads the whole body, and returns the head of the answer.
    async fn ask(&mut self, request: Request<Body>, wanted: StatusCode) -> Response<()> {
        self.requests += 1;
        if self.requests.is_multiple_of(UPKEEP_EVERY) {
            self.telemetry.upkeep();
        }
        // The future is boxed, as it is in a connection's service.
        let (head, body) = Box::pin(self.app.clone().answer(request)).await.into_parts();
        let body =
            axum::body::to_bytes(body, usize::MAX).await.expect("a body in memory never fails");
        assert_eq!(head.status, wanted, "{}", String::from_utf8_lossy(&body));
        Response::from_parts(head, ())
    }

    async fn acquire(&mut self, path: &str) -> HeaderValue {
        let response = self.ask(request("POST", path, None, BODY), StatusCode::CREATED).await;
        response.headers()["lock-token"].clone()
    }
}

fn request(
    method: &str,
    path: &str,
    token: Option<&HeaderValue>,
    body: impl Into<Bytes>,
) -> Request<Body> {
    let body = body.into();
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in
        [("host", "127.0.0.1:8080"), ("user-agent", "curl/8.5.0"), ("accept", "*/*")]
    {
        request = request.header(name, value);
    }
    if let Some(token) = token {
        request = request.header("lock-token", token);
    }
    if !body.is_empty() {
        request = request.header("content-type", "application/json");
    }
    request.body(Body::from(body)).expect("a request")
}

fn paths() -> Vec<String> {
    names().iter().map(|name| format!("/locks/{}", name.as_str().replace('/', "%2F"))).collect()
}

fn http_cycle(times: u32) {
    on_runtime(async {
        let mut gateway = Served::new();
        for path in paths().iter().cycle().take(times as usize) {
            let token = gateway.acquire(path).await;
            gateway.ask(request("DELETE", path, Some(&token), ""), StatusCode::NO_CONTENT).await;
        }
    });
}

fn http_extend(times: u32) {
    on_runtime(async {
        let mut gateway = Served::new();
        let mut held = Vec::new();
        for path in paths() {
            let token = gateway.acquire(&path).await;
            held.push((path, token));
        }
        for (path, token) in held.iter().cycle().take(times as usize) {
            gateway
                .ask(request("PATCH", path, Some(token), r#"{"ttl_ms": 30000}"#), StatusCode::OK)
                .await;
        }
    });
}

fn http_extend_many(times: u32) {
    const LEASES: usize = 100;
    on_runtime(async {
        let mut gateway = Served::new();
        let mut leases = Vec::new();
        for n in 0..LEASES {
            let name = format!("reports-nightly-{n:04}");
            let token = gateway.acquire(&format!("/locks/{name}")).await;
            let token = token.to_str().expect("tokens are text").to_owned();
            leases.push(LeaseRef { name, token });
        }
        let body = json!({ "leases": leases, "ttl_ms": 30_000 }).to_string();
        let body = Bytes::from(body);
        for _ in 0..times {
            gateway.ask(request("PATCH", "/locks", None, body.clone()), StatusCode::OK).await;
        }
    });
}

fn http_refused(times: u32) {
    on_runtime(async {
        let mut gateway = Served::new();
        for path in paths() {
            gateway.acquire(&path).await;
        }
        for path in paths().iter().cycle().take(times as usize) {
            gateway.ask(request("POST", path, None, BODY), StatusCode::CONFLICT).await;
        }
    });
}
