//! From a configuration to a running server and back down again.

use std::convert::Infallible;
use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use axum_server::accept::Accept;
use axum_server::{Handle, Server};
use hyper_util::rt::TokioTimer;
use redlock_core::clock::{Entropy, OsEntropy, SystemClock};
use redlock_core::node::admission::Generation;
use redlock_core::node::memory::MemoryNode;
use redlock_core::node::redis::{RedisNode, RedisSettings, RedisUrl};
use redlock_core::node::{Node, NodeSettings};
use redlock_core::redlock::SettingsError;
use redlock_core::{BrandNew, Redlock, Seams, Settings};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower::Service;

use crate::audit::Audit;
use crate::auth::Authenticator;
use crate::config::{Config, Nodes};
use crate::gateway::Gateway;
use crate::http::{App, AppState};
use crate::peer::{Peer, Shared};
use crate::reload::{Reload, Watched};
use crate::telemetry::Telemetry;
use crate::tls::{Encrypted, Https};

/// Buffer of one connection. A head larger than this is answered 431, at the latest when it has twice the size: what is
/// read at once may exceed it.
const CONNECTION_BUFFER: usize = 32 * 1024;
/// How often a bootstrap says what it still waits for.
const PROGRESS: Duration = Duration::from_secs(10);
const UPKEEP: Duration = Duration::from_secs(5);

/// A server that was started.
pub struct Running {
    /// Where it listens.
    pub address: SocketAddr,
    /// The service behind it.
    pub gateway: Arc<Gateway>,
}

/// Serves until `shutdown` resolves, then finishes what is in flight, for at most the configured grace. `started` is
/// called once it listens. `reload` has the files read again that are read at all.
pub async fn run(
    listener: TcpListener,
    shutdown: impl Future<Output = ()>,
    reload: &Reload,
    config: Config,
    started: impl FnOnce(&Running),
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    // What may be missing comes before the nodes hear of us.
    let authenticator = match &config.auth_keys {
        None => Arc::new(Authenticator::open()),
        Some(path) => Authenticator::following(path, reload)?,
    };
    let audit = audit(&config, reload)?;
    let (gateway, telemetry) = assemble(&config)?;
    let state = AppState { gateway: gateway.clone(), authenticator, public: config.public };
    let app = App::new(state, telemetry.clone(), audit, &config.cors_origins);

    let handle = Handle::new();
    let server = axum_server::from_tcp(listener)?.handle(handle.clone());
    let connections = Connections { app, places: Arc::new(Semaphore::new(config.max_connections)) };
    let https = config.tls.as_ref().map(|files| Https::start(files, reload)).transpose()?;
    let server = match https.clone() {
        None => tokio::spawn(http1(server.acceptor(Acceptor), config.idle_timeout).serve(connections)),
        Some(https) => {
            tokio::spawn(http1(server.acceptor(EncryptingAcceptor(https)), config.idle_timeout).serve(connections))
        }
    };
    let upkeep = tokio::spawn(async move {
        let mut tick = tokio::time::interval(UPKEEP);
        loop {
            tick.tick().await;
            telemetry.upkeep();
        }
    });

    started(&Running { address, gateway: gateway.clone() });
    let mut server = server;
    tokio::select! {
        () = shutdown => {}
        ended = &mut server => return Ok(ended??),
    }

    // Still listening: readyz says 503 and new locks are refused, while holders can extend and release.
    tracing::info!(grace = ?config.shutdown_grace, "shutting down");
    gateway.drain();
    let deadline = tokio::time::Instant::now() + config.shutdown_grace;
    if tokio::time::timeout_at(deadline, gateway.idle()).await.is_err() {
        tracing::warn!("requests were still in flight at the end of the grace period");
    }
    if let Some(https) = &https {
        https.close();
    }
    handle.graceful_shutdown(Some(deadline.saturating_duration_since(tokio::time::Instant::now())));
    server.await??;
    upkeep.abort();
    tracing::info!("stopped");
    Ok(())
}

fn audit(config: &Config, reload: &Reload) -> Result<Arc<Audit>, String> {
    let Some(path) = &config.audit_log else { return Ok(Arc::new(Audit::logged())) };
    let audit = Arc::new(Audit::to_file(path)?);
    let (mut asked, reopened) = (Watched::new(Vec::new(), reload), audit.clone());
    tokio::spawn(async move {
        loop {
            asked.changed().await;
            reopened.reopen();
        }
    });
    Ok(audit)
}

/// HTTP/1.1 only: telling versions apart by the first bytes has no time limit, so silent connections would stay for ever.
fn http1<A>(server: Server<SocketAddr, A>, idle_timeout: Duration) -> Server<SocketAddr, A> {
    let mut server = server.http1_only();
    server
        .http_builder()
        .http1()
        .timer(TokioTimer::new())
        // Counts from the end of the last request: it bounds idle connections and slow request heads alike.
        .header_read_timeout(idle_timeout)
        .max_buf_size(CONNECTION_BUFFER);
    server
}

fn assemble(config: &Config) -> Result<(Arc<Gateway>, Arc<Telemetry>), SettingsError> {
    let clock = Arc::new(SystemClock);
    let entropy: Arc<dyn Entropy> = Arc::new(OsEntropy);
    let node_settings = NodeSettings { max_clock_offset: config.clock_skew, ..NodeSettings::default() };
    let names: Vec<String> = match &config.nodes {
        Nodes::Embedded(count) => (1..=*count).map(|n| format!("embedded-{n}")).collect(),
        Nodes::Redis(urls) => urls.iter().map(|url| url.name().to_owned()).collect(),
    };
    let cluster = cluster_name(config, &names);
    let telemetry = Arc::new(Telemetry::new(&names));
    let nodes: Vec<Arc<dyn Node>> = match &config.nodes {
        Nodes::Embedded(_) => names
            .iter()
            .map(|name| Arc::new(MemoryNode::new(name, clock.clone(), node_settings.clone())) as Arc<dyn Node>)
            .collect(),
        Nodes::Redis(urls) => {
            let start = |(index, url): (usize, &RedisUrl)| {
                let settings = redis_settings(config, &cluster, index);
                RedisNode::start(url.clone(), settings, clock.clone(), entropy.clone(), telemetry.clone())
            };
            urls.iter().enumerate().map(|node| Arc::new(start(node)) as Arc<dyn Node>).collect()
        }
    };
    if nodes.len().is_multiple_of(2) {
        tracing::warn!(nodes = nodes.len(), "an even number of nodes tolerates no more failures than one node fewer");
    }
    // Test builds have one setting more.
    #[allow(clippy::needless_update)]
    let settings = Settings {
        key_prefix: config.key_prefix.clone(),
        max_ttl: config.limits.max_ttl,
        node_timeout: config.node_timeout,
        drift_factor: config.drift_factor,
        max_clock_offset: config.clock_skew,
        max_waiters: config.max_waiters,
        max_waiters_per_lock: config.max_waiters_per_lock,
        ..Settings::default()
    };
    let locks = Redlock::new(nodes, settings, Seams { clock, entropy, observer: telemetry.clone() })?;
    if config.bootstrap && matches!(config.nodes, Nodes::Redis(_)) {
        tokio::spawn(bootstrap(locks.clone()));
    }
    let gateway = Gateway::new(locks, config.limits, cluster, config.max_in_flight, telemetry.clone());
    Ok((Arc::new(gateway), telemetry))
}

async fn bootstrap(locks: Redlock) {
    let confirmed = locks.brand_new();
    tokio::pin!(confirmed);
    let outcome = loop {
        match tokio::time::timeout(PROGRESS, &mut confirmed).await {
            Ok(outcome) => break outcome,
            Err(_) => {
                let nodes = locks.nodes();
                let missing =
                    nodes.iter().filter(|(_, status)| !status.borrow().brand_new).map(|(name, _)| name.as_str());
                tracing::info!(
                    waiting_for = missing.collect::<Vec<_>>().join(", "),
                    "--bootstrap: all nodes must answer"
                );
            }
        }
    };
    match outcome {
        BrandNew::Confirmed => tracing::info!("--bootstrap: all nodes are new and are admitted at once"),
        BrandNew::Refuted(node) => {
            tracing::warn!(node, "--bootstrap: not applied: this node is not new, or a gateway already waits for it");
        }
    }
}

/// What the markers' node-set hash and the owners of idempotency keys stand on.
pub(crate) fn cluster_name(config: &Config, names: &[String]) -> String {
    match &config.cluster {
        // Where a name stands for the list, a list of another length must not vote beside it.
        Some(name) => named_cluster(name, names.len()),
        None => Generation::cluster_of_nodes(names.iter().map(String::as_str)),
    }
}

pub(crate) fn named_cluster(name: &str, nodes: usize) -> String {
    format!("{name}/{nodes}")
}

/// Of the node at this place in the list.
pub(crate) fn redis_settings(config: &Config, cluster: &str, place: usize) -> RedisSettings {
    RedisSettings {
        // Where addresses differ from gateway to gateway, the place in the list is what they agree on.
        bootstrap: config.bootstrap,
        identity: config.cluster.as_ref().map(|_| place.to_string()),
        node: NodeSettings { max_clock_offset: config.clock_skew, ..NodeSettings::default() },
        key_prefix: config.key_prefix.clone(),
        generation: Generation::new(cluster, config.limits.max_ttl.duration()),
        node_timeout: config.node_timeout,
        tls: config.node_tls.clone(),
    }
}

/// Makes one service per connection, as long as there is a place; a connection beyond the limit is closed at once.
#[derive(Clone)]
struct Connections {
    app: App,
    places: Arc<Semaphore>,
}

/// The service of one connection, holding its place; it knows its client once it is accepted.
#[derive(Clone)]
struct Connection {
    app: App,
    peer: Option<Peer>,
    _place: Arc<OwnedSemaphorePermit>,
}

/// Accepts connections, without a delay of small packets, and tells their services who is at the other end.
#[derive(Clone, Copy)]
struct Acceptor;

impl Accept<TcpStream, Connection> for Acceptor {
    type Stream = Shared;
    type Service = Connection;
    type Future = std::future::Ready<std::io::Result<(Shared, Connection)>>;

    fn accept(&self, stream: TcpStream, connection: Connection) -> Self::Future {
        let accepted = stream.set_nodelay(true).and_then(|()| Shared::new(stream));
        let accepted = accepted.map(|(stream, peer)| (stream, Connection { peer: Some(peer), ..connection }));
        std::future::ready(accepted)
    }
}

/// The same, and shakes hands before there is anything to serve. A connection has its place from before that.
#[derive(Clone)]
struct EncryptingAcceptor(Https);

impl Accept<TcpStream, Connection> for EncryptingAcceptor {
    type Stream = Encrypted;
    type Service = Connection;
    type Future = Pin<Box<dyn Future<Output = std::io::Result<(Encrypted, Connection)>> + Send>>;

    fn accept(&self, stream: TcpStream, connection: Connection) -> Self::Future {
        let https = self.0.clone();
        Box::pin(async move {
            stream.set_nodelay(true)?;
            let (stream, peer) = https.accept(stream).await?;
            Ok((stream, Connection { peer: Some(peer), ..connection }))
        })
    }
}

impl Service<SocketAddr> for Connections {
    type Response = Connection;
    type Error = std::io::Error;
    type Future = std::future::Ready<Result<Connection, std::io::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: SocketAddr) -> Self::Future {
        std::future::ready(match self.places.clone().try_acquire_owned() {
            Ok(place) => Ok(Connection { app: self.app.clone(), peer: None, _place: Arc::new(place) }),
            Err(_) => {
                tracing::warn!("a connection was closed: as many as allowed are open");
                Err(std::io::Error::other("too many connections"))
            }
        })
    }
}

type Request = ::http::Request<hyper::body::Incoming>;

impl Service<Request> for Connection {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request) -> Self::Future {
        if let Some(peer) = &self.peer {
            request.extensions_mut().insert(peer.clone());
        }
        let app = self.app.clone();
        Box::pin(async move { Ok(app.answer(request.map(Body::new)).await) })
    }
}
