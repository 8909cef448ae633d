//! From a configuration to a running server and back down again.

use std::future::{Future, Ready, ready};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum_server::{Handle, Server};
use hyper_util::rt::TokioTimer;
use redlock_core::node::admission::ClusterConfig;
use redlock_core::node::redis::{RedisNode, RedisSettings, RedisUrl, TlsError};
use redlock_core::node::{Node, NodeSettings};
use redlock_core::{Bootstrap, Redlock, Seams, Settings, SettingsError};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::{Service, service_fn};

use crate::audit::{Audit, AuditFile};
use crate::auth::{Authenticator, Keys};
use crate::clients::Clients;
use crate::config::{Config, Nodes, OnAuditFailure};
use crate::connection::{Connection, Encrypted, Plain};
use crate::gateway::Gateway;
use crate::http::{App, AppState, Hosts};
use crate::reload::{Reload, Watched};
use crate::telemetry::Telemetry;
use crate::tls;

/// Buffer of one connection. A head larger than this is answered 431, at the latest when it has twice the size: what is
/// read at once may exceed it.
const CONNECTION_BUFFER: usize = 32 * 1024;
/// How often a bootstrap says what it still waits for.
const PROGRESS: Duration = Duration::from_secs(10);
const UPKEEP: Duration = Duration::from_secs(5);

/// A server that was started.
pub struct Running {
    /// Where it listens, with the port that was chosen.
    pub address: SocketAddr,
    /// The service behind it.
    pub gateway: Arc<Gateway>,
}

/// Whether the files that are named can be used as they stand now.
///
/// # Errors
/// The flag, the file and what is wrong with it; nothing of what is secret in it.
pub fn check_files(config: &Config) -> Result<(), String> {
    config.https.as_ref().map_or(Ok(()), tls::check)?;
    config.node_tls.check().map_err(|error| {
        let flag = match error {
            TlsError::Authorities(_) => "--node-ca",
            TlsError::Certificate(_) => "--node-cert",
            TlsError::Key(_) => "--node-key",
        };
        format!("{flag}: {error}")
    })?;
    let keys = config.settings.auth_keys.as_ref().map(|path| Keys::read(path)).transpose();
    keys.map(drop).map_err(|error| format!("--auth-keys: {error}"))
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
    let authenticator = match &config.settings.auth_keys {
        None => Arc::new(Authenticator::open()),
        Some(path) => Authenticator::following(path, reload)?,
    };
    let audit = audit(&config, reload)?;
    let (gateway, telemetry) = assemble(&config)?;
    audit.file().into_iter().for_each(|file| file.count_failures(telemetry.audit_failures.clone()));
    let clients = Arc::new(Clients::default());
    let (public, cors_origins) = (config.public, config.cors_origins.clone());
    let state = AppState { gateway: gateway.clone(), authenticator, public, clients: clients.clone(), cors_origins };
    let hosts = Hosts { is_loopback: address.ip().is_loopback(), allowed: config.allowed_hosts.clone() };
    let app = App::new(state, telemetry.clone(), audit.clone(), hosts);

    // They end with this function.
    let mut tasks = JoinSet::new();
    let handle = Handle::new();
    let server = axum_server::from_tcp(listener)?.handle(handle.clone());
    let connections = connections(app, clients.clone(), handle.clone(), config.settings.max_connections);
    let (handshakes, end_of_handshakes) = watch::channel(());
    let mut server = match &config.https {
        None => tokio::spawn(http1(server.acceptor(Plain), &config).serve(connections)),
        Some(files) => {
            let encrypted = Encrypted::new(tls::follow(files, reload, &mut tasks)?, end_of_handshakes);
            tokio::spawn(http1(server.acceptor(encrypted), &config).serve(connections))
        }
    };
    tasks.spawn(async move {
        let mut tick = tokio::time::interval(UPKEEP);
        loop {
            tick.tick().await;
            telemetry.upkeep();
            clients.forget_idle();
        }
    });

    started(&Running { address, gateway: gateway.clone() });
    tokio::select! {
        () = shutdown => {}
        ended = &mut server => return Ok(ended??),
    }

    // Still listening: readyz says 503 and new locks are refused, while holders can extend and release.
    let grace = config.settings.shutdown_grace;
    tracing::info!(?grace, "shutting down");
    gateway.drain();
    let deadline = Instant::now() + grace;
    if tokio::time::timeout_at(deadline, gateway.idle()).await.is_err() {
        tracing::warn!("requests were still in flight at the end of the grace period");
    }
    drop(handshakes);
    handle.graceful_shutdown(Some(deadline.saturating_duration_since(Instant::now())));
    server.await??;
    if let Some(file) = audit.file() {
        file.finish().await;
    }
    tracing::info!("stopped");
    Ok(())
}

/// The service of each connection, as long as there is a place; a connection beyond the limit is closed at once.
fn connections(
    app: App,
    clients: Arc<Clients>,
    handle: Handle<SocketAddr>,
    most: usize,
) -> impl Service<SocketAddr, Response = Connection, Error = io::Error, Future = Ready<io::Result<Connection>>> {
    service_fn(move |_| {
        // One task accepts them all, so none is counted late.
        ready(if handle.connection_count() < most {
            Ok(Connection::new(app.clone(), clients.clone()))
        } else {
            tracing::warn!("a connection was closed: as many as allowed are open");
            Err(io::Error::other("too many connections"))
        })
    })
}

fn audit(config: &Config, reload: &Reload) -> Result<Arc<Audit>, String> {
    let Some(path) = &config.settings.audit_log else { return Ok(Arc::new(Audit::logged())) };
    let audit = Arc::new(Audit::to_file(path, config.settings.audit_on_failure == OnAuditFailure::Refuse)?);
    let (mut asked, reopened) = (Watched::new(Vec::new(), reload), audit.clone());
    tokio::spawn(async move {
        loop {
            asked.changed().await;
            reopened.file().into_iter().for_each(AuditFile::reopen);
        }
    });
    Ok(audit)
}

/// HTTP/1.1 only: telling versions apart by the first bytes has no time limit, so silent connections would stay for ever.
fn http1<A>(server: Server<SocketAddr, A>, config: &Config) -> Server<SocketAddr, A> {
    let mut server = server.http1_only();
    server
        .http_builder()
        .http1()
        .timer(TokioTimer::new())
        // Counts from the end of the last request: it bounds idle connections and slow request heads alike.
        .header_read_timeout(config.settings.idle_timeout)
        .max_buf_size(CONNECTION_BUFFER);
    server
}

fn assemble(config: &Config) -> Result<(Arc<Gateway>, Arc<Telemetry>), SettingsError> {
    let names: Vec<String> = match &config.nodes {
        Nodes::Embedded(count) => (1..=*count).map(|n| format!("embedded-{n}")).collect(),
        Nodes::Redis(urls) => urls.iter().map(|url| url.name().to_owned()).collect(),
    };
    let cluster = cluster_name(config, &names);
    let telemetry = Arc::new(Telemetry::new(&names));
    let seams = Seams { observer: telemetry.clone(), ..Seams::default() };
    let locks = Redlock::builder().settings(settings(config)).seams(seams.clone());
    let locks = match &config.nodes {
        Nodes::Embedded(count) => locks.embedded(*count),
        Nodes::Redis(urls) => {
            let settings = redis_settings(config, &cluster);
            let start = |(place, url): (usize, &RedisUrl)| {
                Arc::new(RedisNode::start(url.clone(), settings(place), seams.clone())) as Arc<dyn Node>
            };
            locks.nodes(urls.iter().enumerate().map(start).collect())
        }
    };
    if names.len().is_multiple_of(2) {
        tracing::warn!(nodes = names.len(), "an even number of nodes tolerates no more failures than one node fewer");
    }
    let locks = locks.connect()?;
    if config.settings.bootstrap && matches!(config.nodes, Nodes::Redis(_)) {
        tokio::spawn(bootstrap(locks.clone()));
    }
    let gateway =
        Gateway::new(locks, config.settings.limits, cluster, config.settings.max_in_flight, telemetry.clone());
    Ok((Arc::new(gateway), telemetry))
}

async fn bootstrap(locks: Redlock) {
    let confirmed = locks.bootstrap();
    tokio::pin!(confirmed);
    let outcome = loop {
        match tokio::time::timeout(PROGRESS, &mut confirmed).await {
            Ok(outcome) => break outcome,
            Err(_) => {
                let nodes = locks.nodes();
                let missing =
                    nodes.iter().filter(|(_, status)| !status.borrow().is_bootstrapping).map(|(name, _)| name.as_str());
                tracing::info!(
                    waiting_for = missing.collect::<Vec<_>>().join(", "),
                    "--bootstrap: all nodes must answer"
                );
            }
        }
    };
    match outcome {
        Bootstrap::Confirmed => tracing::info!("--bootstrap: all nodes are new and are admitted at once"),
        Bootstrap::Refuted(node) => {
            tracing::warn!(node, "--bootstrap: not applied: this node is not new, or a gateway already waits for it");
        }
    }
}

/// What the markers' node-set hash and the owners of idempotency keys stand on.
pub(crate) fn cluster_name(config: &Config, names: &[String]) -> String {
    match &config.settings.cluster {
        // Where a name stands for the list, a list of another length must not vote beside it.
        Some(name) => named_cluster(name, names.len()),
        None => ClusterConfig::cluster_of_nodes(names.iter().map(String::as_str)),
    }
}

pub(crate) fn named_cluster(name: &str, nodes: usize) -> String {
    format!("{name}/{nodes}")
}

fn settings(config: &Config) -> Settings {
    let settings = &config.settings;
    Settings {
        key_prefix: settings.key_prefix.clone(),
        max_ttl: settings.limits.max_ttl,
        node_timeout: settings.node_timeout,
        drift_factor: settings.drift_factor,
        node: NodeSettings::default().with_max_clock_offset(settings.clock_skew),
        max_waiters: settings.max_waiters,
        max_waiters_per_lock: settings.max_waiters_per_lock,
    }
}

/// By the node's place in the list.
pub(crate) fn redis_settings(config: &Config, cluster: &str) -> impl Fn(usize) -> RedisSettings {
    let mut redis = settings(config).of_masters(cluster);
    redis.bootstrap = config.settings.bootstrap;
    redis.tls = config.node_tls.clone();
    let is_named = config.settings.cluster.is_some();
    // Where addresses differ from gateway to gateway, the place in the list is what they agree on.
    move |place| {
        let mut redis = redis.clone();
        redis.node_name = is_named.then(|| place.to_string());
        redis
    }
}
