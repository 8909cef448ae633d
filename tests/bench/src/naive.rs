//! The contenders inside this program, each as small as possible. They answer with the same fields
//! and headers as the gateway, so that only the work behind the answers differs.
//!
//! - *no-op*: HTTP and JSON in both directions, and nothing else. Every gateway on this stack has
//!   at least this cost.
//! - *floor*: SET NX PX on every node and compare-and-delete, by a Redis client that was written
//!   only for this.
//! - *plain*: the usual recipe, that is, SET NX PX on every node, compare-and-delete, and an answer
//!   at the quorum.
//! - *fenced*: plain, with a fencing token that only rises, kept by a script. This is the design to
//!   compare the gateway with, because a lock without fencing promises less.
//!
//! *plain* and *fenced* use fred in the ordinary way: one client for each node, and one command for
//! each node and request. They leave out eligibility, clocks, time-outs, retries, limits, and
//! everything else that makes a lock safe.
//!
//! All of them serve with half of the cores, like the gateway. If that is one core, their runtime
//! has one thread. On two cores, one thread took less CPU for each contender. It also made them
//! faster, except *fenced*, which was 4 % slower in one of two series.

mod floor;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use axum::{Json, Router};
use clap::ValueEnum;
use fred::clients::Client;
use fred::error::Error;
use fred::interfaces::{ClientLike, KeysInterface, LuaInterface};
use fred::types::config::{Config, ServerConfig};
use fred::types::{Builder, Expiration, SetOptions};
use futures_util::stream::{FuturesUnordered, StreamExt};
use serde::{Deserialize, Serialize};

use self::floor::Floor;
use crate::report::cores;

/// KEYS: the lock, its fence. ARGV: the token, the fencing token, the TTL in ms, how long to keep
/// the fence in ms.
const ACQUIRE_FENCED: &str = "\
local last = redis.call('GET', KEYS[2])
if last and tonumber(last) >= tonumber(ARGV[2]) then return 0 end
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'GET', 'PX', ARGV[3]) then return 0 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[4])
return 1";

/// KEYS: the lock. ARGV: the token.
const RELEASE: &str = "\
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0";

/// How much longer than its lock a fence is kept, in ms. The gateway keeps its watermarks as long.
const RETENTION_MS: u64 = 10_000;

const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

/// The design that this process runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Design {
    Noop,
    Floor,
    Plain,
    Fenced,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    ttl_ms: u64,
}

/// The same fields as in the gateway's answer.
#[derive(Serialize)]
struct Granted {
    name: String,
    token: String,
    fencing_token: u64,
    ttl_ms: u64,
    validity_ms: u64,
    elapsed_ms: u64,
    expires_at: String,
    nodes_granted: usize,
    nodes_total: usize,
}

struct Naive {
    design: Design,
    masters: usize,
    floor: Floor,
    clients: Vec<Client>,
    acquire_sha: String,
    release_sha: String,
    last_fence: AtomicU64,
}

/// Serves until the process is killed.
pub(crate) fn serve(
    design: Design,
    listen: SocketAddr,
    masters: &[SocketAddr],
) -> Result<(), String> {
    let runtime = match cores() as usize / 2 {
        0 | 1 => tokio::runtime::Builder::new_current_thread().enable_all().build(),
        threads => {
            tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()
        }
    };
    let runtime = runtime.map_err(|error| format!("cannot start a runtime: {error}"))?;
    runtime.block_on(async {
        let masters = if design == Design::Noop { &[] } else { masters };
        let naive = Naive::connect(design, masters)
            .await
            .map_err(|error| format!("cannot use a master: {error}"))?;
        let router = Router::new()
            .route("/locks/{name}", post(acquire).delete(release))
            .route("/readyz", get(async || "ready"))
            .with_state(Arc::new(naive));
        let listener = tokio::net::TcpListener::bind(listen)
            .await
            .map_err(|error| format!("cannot listen on {listen}: {error}"))?
            .tap_io(|stream| drop(stream.set_nodelay(true)));
        axum::serve(listener, router).await.map_err(|error| error.to_string())
    })
}

async fn acquire(
    State(naive): State<Arc<Naive>>,
    Path(name): Path<String>,
    Json(Wanted { ttl_ms }): Json<Wanted>,
) -> Response {
    let began = Instant::now();
    let token = format!("{:032x}", rand::random::<u128>());
    let fencing_token = naive.next_fence();
    let nodes_granted = naive.acquire(&name, &token, fencing_token, ttl_ms).await;
    if nodes_granted < naive.quorum() {
        naive.release(&name, &token).await;
        return StatusCode::CONFLICT.into_response();
    }
    let elapsed_ms = began.elapsed().as_millis() as u64;
    let validity_ms = ttl_ms.saturating_sub(elapsed_ms + ttl_ms / 100 + 2);
    let expires_at = SystemTime::now() + Duration::from_millis(validity_ms);
    let headers = [
        (header::LOCATION.as_str(), format!("/locks/{name}")),
        ("lock-token", token.clone()),
        (header::CACHE_CONTROL.as_str(), "no-store".into()),
        ("x-request-id", format!("{:016x}", rand::random::<u64>())),
    ];
    let granted = Granted {
        name,
        token,
        fencing_token,
        ttl_ms,
        validity_ms,
        elapsed_ms,
        expires_at: humantime::format_rfc3339_millis(expires_at).to_string(),
        nodes_granted,
        nodes_total: naive.masters,
    };
    (StatusCode::CREATED, headers, Json(granted)).into_response()
}

async fn release(
    State(naive): State<Arc<Naive>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    let Some(token) = headers.get("lock-token").and_then(|token| token.to_str().ok()) else {
        return StatusCode::BAD_REQUEST.into_response();
    };
    let status = match naive.release(&name, token).await >= naive.quorum() {
        true => StatusCode::NO_CONTENT,
        false => StatusCode::CONFLICT,
    };
    (status, [("x-request-id", format!("{:016x}", rand::random::<u64>()))]).into_response()
}

impl Naive {
    async fn connect(design: Design, masters: &[SocketAddr]) -> Result<Self, String> {
        let mut naive = Self {
            design,
            masters: masters.len(),
            floor: Floor::default(),
            clients: Vec::new(),
            acquire_sha: String::new(),
            release_sha: String::new(),
            last_fence: AtomicU64::new(0),
        };
        match design {
            Design::Noop => {}
            Design::Floor => naive.floor = Floor::connect(masters, RELEASE).await?,
            Design::Plain | Design::Fenced => {
                naive.connect_fred(masters).await.map_err(|error| error.to_string())?;
            }
        }
        Ok(naive)
    }

    async fn connect_fred(&mut self, masters: &[SocketAddr]) -> Result<(), Error> {
        for &master in masters {
            let server = ServerConfig::new_centralized(master.ip().to_string(), master.port());
            let client = Builder::from_config(Config { server, ..Config::default() })
                .with_connection_config(|connection| connection.tcp.nodelay = Some(true))
                .with_performance_config(|performance| {
                    performance.default_command_timeout = COMMAND_TIMEOUT
                })
                .build()?;
            client.init().await?;
            self.acquire_sha = client.script_load(ACQUIRE_FENCED).await?;
            self.release_sha = client.script_load(RELEASE).await?;
            self.clients.push(client);
        }
        Ok(())
    }

    /// The number of granting nodes that decide. Zero for the no-op, which has no masters.
    fn quorum(&self) -> usize {
        if self.masters == 0 { 0 } else { self.masters / 2 + 1 }
    }

    /// The clock in µs, but always larger than the number before.
    fn next_fence(&self) -> u64 {
        let now =
            SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        let last = self
            .last_fence
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(now.max(last + 1)));
        now.max(last.unwrap_or_default() + 1)
    }

    async fn acquire(&self, name: &str, token: &str, fence: u64, ttl_ms: u64) -> usize {
        match self.design {
            Design::Noop => 0,
            Design::Floor => self.floor.acquire(&format!("bench:{name}"), token, ttl_ms).await,
            Design::Plain => {
                self.ask_all(|node| {
                    let lock = format!("bench:{name}");
                    let token = token.to_owned();
                    async move {
                        let ttl = Some(Expiration::PX(ttl_ms as i64));
                        let set: Option<String> =
                            node.set(lock, token, ttl, Some(SetOptions::NX), false).await?;
                        Ok(set.is_some())
                    }
                })
                .await
            }
            Design::Fenced => {
                self.ask_all(|node| {
                    let keys = vec![format!("bench:{name}"), format!("{{bench:{name}}}:fence")];
                    let args = vec![
                        token.to_owned(),
                        fence.to_string(),
                        ttl_ms.to_string(),
                        (ttl_ms + RETENTION_MS).to_string(),
                    ];
                    let sha = self.acquire_sha.clone();
                    async move {
                        node.evalsha::<i64, _, _, _>(sha, keys, args)
                            .await
                            .map(|granted| granted == 1)
                    }
                })
                .await
            }
        }
    }

    async fn release(&self, name: &str, token: &str) -> usize {
        if self.design == Design::Floor {
            return self.floor.release(&format!("bench:{name}"), token).await;
        }
        self.ask_all(|node| {
            let lock = format!("bench:{name}");
            let token = token.to_owned();
            let sha = self.release_sha.clone();
            async move {
                node.evalsha::<i64, _, _, _>(sha, lock, token).await.map(|deleted| deleted == 1)
            }
        })
        .await
    }

    /// Asks every node at the same time and counts the votes until there is a quorum. The other
    /// nodes answer in the background.
    async fn ask_all<F>(&self, ask: impl Fn(Client) -> F) -> usize
    where
        F: Future<Output = Result<bool, Error>> + Send + 'static,
    {
        let mut votes: FuturesUnordered<F> =
            self.clients.iter().map(|node| ask(node.clone())).collect();
        let mut granted = 0;
        while granted < self.quorum() {
            match votes.next().await {
                Some(vote) => granted += usize::from(vote.unwrap_or(false)),
                None => break,
            }
        }
        if !votes.is_empty() {
            tokio::spawn(async move { while votes.next().await.is_some() {} });
        }
        granted
    }
}
