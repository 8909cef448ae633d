//! From a configuration to a running server and back down again.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum_server::{Handle, Server};
use hyper_util::rt::TokioTimer;
use redlock_core::clock::Entropy;
use redlock_core::node::eligibility::ClusterConfig;
use redlock_core::node::redis::{RedisNode, RedisSettings, RedisUrl, TlsError};
use redlock_core::node::{Node, NodeSettings};
use redlock_core::{Bootstrap, Env, Redlock, Settings, SettingsError};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::audit::{Audit, AuditFile};
use crate::auth::{Authenticator, Keys};
use crate::config::{Config, Nodes, OnAuditFailure};
use crate::gateway::{CursorKey, Gateway};
use crate::http::{App, AppState, Hosts};
use crate::overload::capacity;
use crate::overload::clients::{Clients, FairQueue};
use crate::overload::refusals::{self, Refusals, Summary};
use crate::overload::{MasterMemory, WaitShare};
use crate::reload::{Reload, Watched};
use crate::telemetry::{ConnectionMetrics, Reloaded, Telemetry, Traces};
use crate::transport::connection::{Encrypted, Plain, services};
use crate::transport::connections::{self, ConnectionLimits, Connections};
use crate::transport::tls;

/// Buffer of one connection. A head that does not fit is answered 431.
const CONNECTION_BUFFER: usize = capacity::HEAD;
/// How often a bootstrap says what it still waits for.
const PROGRESS: Duration = Duration::from_secs(10);
/// Connections that the system has taken and the gateway not yet; the system may allow fewer (net.core.somaxconn).
const BACKLOG: i32 = 1024;
/// On the address of operators: probes and scrapers, of which any one may have them all.
const OPERATORS: ConnectionLimits = ConnectionLimits::of_all(64);
const LOOK_AT_QUORUM: Duration = Duration::from_millis(250);
/// How long a start may take until there is a majority.
const STARTS_WITHIN: Duration = Duration::from_secs(10);
const UPKEEP: Duration = Duration::from_secs(5);

/// A server that was started.
pub struct Running {
    /// Where it listens, with the port that was chosen.
    pub address: SocketAddr,
    /// Where it listens for probes alone.
    pub admin: Option<SocketAddr>,
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
/// called once it listens, on `admin` for probes and metrics alone. `reload` has the files read again that are read at all.
pub async fn run(
    listener: TcpListener,
    admin: Option<TcpListener>,
    shutdown: impl Future<Output = ()>,
    reload: &Reload,
    config: Config,
    started: impl FnOnce(&Running),
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let address = listen(&listener)?;
    // What may be missing comes before the nodes hear of us.
    let names = node_names(&config.nodes);
    let endpoint = config.settings.otlp_endpoint.as_deref();
    let traces = endpoint.map(|endpoint| Traces::start(endpoint, &names)).transpose()?;
    let telemetry =
        Arc::new(Telemetry::new(&names).with_groups(&config.groups).with_traces(traces));
    let authenticator = authenticator(&config, address, reload, &telemetry)?;
    let audit = audit(&config, reload)?;
    let gateway = assemble(&config, &names, &telemetry)?;
    audit.file().into_iter().for_each(|file| file.count_failures(telemetry.audit_failures.clone()));
    // Who has many connections to one of the two addresses is no less welcome at the other.
    let clients = Arc::new(Clients::default());
    let operators = Arc::new(Clients::default());
    let public = config.public;
    let cors_origins = config.cors_origins.clone();
    let fair_queue = FairQueue::new(config.settings.worker_threads);
    let state = AppState {
        gateway: gateway.clone(),
        authenticator,
        public,
        clients: clients.clone(),
        fair_queue,
        cors_origins,
    };
    let hosts =
        Hosts { is_loopback: address.ip().is_loopback(), allowed: config.allowed_hosts.clone() };
    let app = App::new(state, telemetry.clone(), audit.clone(), hosts);

    let handle = Handle::new();
    let server = axum_server::from_tcp(listener)?.handle(handle.clone());
    let refusals = Arc::new(Refusals::default());
    let metrics = telemetry.connections.clone();
    let connections = Connections::new(limit(&config), clients.clone(), refusals.clone(), metrics);
    // They end with this function.
    let mut tasks = JoinSet::new();
    let of_operators =
        |hosts| App::of_operators(gateway.clone(), telemetry.clone(), audit.clone(), hosts);
    let serve = |listener| {
        serve_operators(listener, &config, of_operators, (&operators, &refusals), &mut tasks)
    };
    let admin = admin.map(serve).transpose()?;
    let connections_in = services(app.clone(), connections.clone(), config.settings.idle_timeout);
    let (handshakes, end_of_handshakes) = watch::channel(());
    let mut server = match &config.https {
        None => tokio::spawn(http1(server.acceptor(Plain::new()), &config).serve(connections_in)),
        Some(files) => {
            let expiry = telemetry.certificate_expiry(&files.cert);
            let failures = telemetry.reload_failures(Reloaded::Tls);
            let told = tls::CertificateMetrics { expiry, failures };
            let encrypted =
                Encrypted::new(tls::follow(files, reload, told, &mut tasks)?, end_of_handshakes);
            tokio::spawn(http1(server.acceptor(encrypted), &config).serve(connections_in))
        }
    };
    tasks.spawn(tell_of_quorum(gateway.clone()));
    tasks.spawn(upkeep(gateway.clone(), [clients, operators]));
    tasks.spawn(sum_up_for_ever(app.clone(), refusals.clone()));

    started(&Running { address, admin, gateway: gateway.clone() });
    tokio::select! {
        () = shutdown => {}
        ended = &mut server => return Ok(ended??),
    }

    let deadline = drain(&gateway, &connections, &config).await;
    drop(handshakes);
    handle.graceful_shutdown(Some(deadline.saturating_duration_since(Instant::now())));
    server.await??;
    sum_up(&app, &refusals);
    write_the_rest(&audit, telemetry).await;
    tracing::info!("stopped");
    Ok(())
}

/// What waits in memory for the disk and for the collector.
async fn write_the_rest(audit: &Audit, telemetry: Arc<Telemetry>) {
    if let Some(file) = audit.file() {
        file.finish().await;
    }
    let sent = tokio::task::spawn_blocking(move || {
        telemetry.traces().into_iter().for_each(Traces::finish)
    })
    .await;
    // It panicked, and has said so.
    drop(sent);
}

/// From the word to end until nothing is in flight, or has taken too long; answers until when connections may still end.
async fn drain(gateway: &Gateway, connections: &Connections, config: &Config) -> Instant {
    // Load balancers have to see that readyz says 503 before anything is refused.
    let delay = config.drain_delay();
    let grace = config.settings.shutdown_grace;
    tracing::info!(
        drain_delay_ms = delay.as_millis() as u64,
        grace_ms = grace.as_millis() as u64,
        "shutting down"
    );
    connections.end_each();
    // Not even for a moment without a delay: who was told that it drains must not be given a lock after that.
    if !delay.is_zero() {
        gateway.leave();
        tokio::time::sleep(delay).await;
    }
    // Still listening: new locks are refused, while holders can extend and release.
    gateway.drain();
    let deadline = Instant::now() + grace;
    if tokio::time::timeout_at(deadline, gateway.idle()).await.is_err() {
        tracing::warn!("requests were still in flight at the end of the grace period");
    }
    deadline
}

/// Probes and metrics, until the tasks end.
fn serve_operators(
    listener: TcpListener,
    config: &Config,
    app: impl FnOnce(Hosts) -> App,
    (clients, refusals): (&Arc<Clients>, &Arc<Refusals>),
    tasks: &mut JoinSet<()>,
) -> io::Result<SocketAddr> {
    let address = listen(&listener)?;
    let metrics = ConnectionMetrics::uncounted();
    let connections = Connections::new(OPERATORS, clients.clone(), refusals.clone(), metrics);
    let app = app(Hosts {
        is_loopback: address.ip().is_loopback(),
        allowed: config.allowed_hosts.clone(),
    });
    let server = axum_server::from_tcp(listener)?.acceptor(Plain::new());
    let serving =
        http1(server, config).serve(services(app, connections, config.settings.idle_timeout));
    tasks.spawn(async move { drop(serving.await) });
    Ok(address)
}

fn listen(listener: &TcpListener) -> io::Result<SocketAddr> {
    listener.set_nonblocking(true)?;
    // Again, for its backlog alone.
    rustix::net::listen(listener, BACKLOG)?;
    listener.local_addr()
}

fn authenticator(
    config: &Config,
    address: SocketAddr,
    reload: &Reload,
    telemetry: &Telemetry,
) -> Result<Arc<Authenticator>, String> {
    // Where other hosts or pages are let in, those who come need not be of this machine.
    let lets_force = address.ip().is_loopback()
        && config.allowed_hosts.is_empty()
        && config.cors_origins.is_empty();
    match &config.settings.auth_keys {
        None => Ok(Arc::new(Authenticator::open(lets_force))),
        Some(path) => {
            Authenticator::following(path, reload, telemetry.reload_failures(Reloaded::AuthKeys))
        }
    }
}

fn limit(Config { capacity, trusted_proxies, .. }: &Config) -> ConnectionLimits {
    let connections = capacity.connections;
    let per_client = capacity.connections_per_client();
    ConnectionLimits {
        connections,
        per_client,
        loopback: capacity.bounds_loopback(),
        proxies: trusted_proxies.clone(),
    }
}

/// The same with no more connections than there are file descriptors for, those of the masters and of the gateway itself left
/// out; the limit of the process is raised first as far as it may be.
///
/// # Errors
/// There are none for connections.
pub fn within_descriptors(config: Config) -> Result<Config, String> {
    let Some(descriptors) = capacity::descriptors() else { return Ok(config) };
    let nodes = match &config.nodes {
        Nodes::Embedded(_) => 0,
        Nodes::Redis(urls) => urls.len(),
    };
    let others = connections::SPARE + connections::MAX_CLOSING;
    let of_operators = config.settings.admin_listen.map_or(0, |_| OPERATORS.connections + others);
    let capacity = config.capacity.within(descriptors, nodes, others + of_operators)?;
    Ok(Config { capacity, ..config })
}

async fn upkeep(gateway: Arc<Gateway>, clients: [Arc<Clients>; 2]) {
    let mut tick = tokio::time::interval(UPKEEP);
    loop {
        tick.tick().await;
        gateway.upkeep();
        clients.iter().for_each(|clients| clients.forget_idle());
    }
}

/// One line when the majority is lost and one when it is back: requests say it to their clients.
async fn tell_of_quorum(gateway: Arc<Gateway>) {
    let mut tick = tokio::time::interval(LOOK_AT_QUORUM);
    let mut is_told = true;
    let mut since = Instant::now();
    let mut is_starting = true;
    loop {
        tick.tick().await;
        let has = gateway.has_quorum();
        is_starting &= !has && since.elapsed() < STARTS_WITHIN;
        if has == is_told || is_starting {
            continue;
        }
        let nodes = gateway.nodes_summary();
        let lasted_ms = since.elapsed().as_millis() as u64;
        (is_told, since) = (has, Instant::now());
        if has {
            tracing::info!(nodes, without_ms = lasted_ms, "a majority of nodes may vote");
        } else {
            tracing::error!(
                nodes,
                "QUORUM LOST: no majority of nodes may vote, and no lock can be acquired"
            );
        }
    }
}

async fn sum_up_for_ever(app: App, connections: Arc<Refusals>) {
    let mut tick = tokio::time::interval(refusals::WINDOW);
    loop {
        tick.tick().await;
        sum_up(&app, &connections);
    }
}

/// Says how many requests and connections were refused that were not told one by one.
fn sum_up(app: &App, connections: &Refusals) {
    app.sum_up_refusals();
    for Summary { address, what: reason, refused, .. } in connections.take() {
        tracing::info!(
            address = address.map(tracing::field::display),
            reason,
            refused,
            "connections refused, after those that have lines of their own"
        );
    }
}

fn audit(config: &Config, reload: &Reload) -> Result<Arc<Audit>, String> {
    let Some(path) = &config.settings.audit_log else { return Ok(Arc::new(Audit::logged())) };
    let audit =
        Arc::new(Audit::to_file(path, config.settings.audit_on_failure == OnAuditFailure::Refuse)?);
    let mut asked = Watched::new(Vec::new(), reload);
    let reopened = audit.clone();
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
        // In one piece: answers are short.
        .writev(false)
        // Counts from the end of the last request: it bounds idle connections and slow request heads alike.
        .header_read_timeout(config.settings.idle_timeout)
        .max_buf_size(CONNECTION_BUFFER);
    server
}

fn node_names(nodes: &Nodes) -> Vec<String> {
    match nodes {
        Nodes::Embedded(count) => (1..=*count).map(|n| format!("embedded-{n}")).collect(),
        Nodes::Redis(urls) => urls.iter().map(|url| url.name().to_owned()).collect(),
    }
}

fn assemble(
    config: &Config,
    names: &[String],
    telemetry: &Arc<Telemetry>,
) -> Result<Arc<Gateway>, SettingsError> {
    let cluster = cluster_name(config, names);
    let env = Env { observer: telemetry.clone(), ..Env::default() };
    let locks = Redlock::builder().settings(settings(config)).env(env.clone());
    let locks = match &config.nodes {
        Nodes::Embedded(count) => {
            locks.embedded(*count).embedded_memory(config.capacity.locks / *count as u64)
        }
        Nodes::Redis(urls) => {
            let settings = redis_settings(config, &cluster);
            let start = |(place, url): (usize, &RedisUrl)| {
                Arc::new(RedisNode::start(url.clone(), settings(place), env.clone()))
                    as Arc<dyn Node>
            };
            locks.nodes(urls.iter().enumerate().map(start).collect())
        }
    };
    if names.len().is_multiple_of(2) {
        tracing::warn!(
            nodes = names.len(),
            "an even number of nodes tolerates no more failures than one node fewer"
        );
    }
    let locks = locks.connect()?;
    if config.settings.bootstrap && matches!(config.nodes, Nodes::Redis(_)) {
        tokio::spawn(bootstrap(locks.clone()));
    }
    let cursors = cursor_key(config, &cluster, names, env.entropy.as_ref());
    telemetry.limits(config.capacity.in_flight, config.capacity.waiters, locks.quorum().size());
    let memory =
        MasterMemory::new(config.settings.master_memory.as_u64(), config.settings.clock_skew);
    let limits = config.settings.limits;
    let gateway = Gateway::new(
        locks,
        limits,
        cluster,
        cursors,
        config.capacity.in_flight,
        memory,
        telemetry.clone(),
    );
    Ok(Arc::new(gateway.with_wait_share(WaitShare {
        waiters:
            config.settings.max_waiters_per_client.unwrap_or(config.capacity.waiters.div_ceil(4)),
        locks: config.settings.max_waited_locks_per_client,
    })))
}

async fn bootstrap(locks: Redlock) {
    let confirmed = locks.bootstrap();
    tokio::pin!(confirmed);
    let outcome = loop {
        match tokio::time::timeout(PROGRESS, &mut confirmed).await {
            Ok(outcome) => break outcome,
            Err(_) => {
                let nodes = locks.nodes();
                let missing = nodes
                    .iter()
                    .filter(|(_, status)| !status.borrow().is_bootstrapping)
                    .map(|(name, _)| name.as_str());
                tracing::info!(
                    waiting_for = missing.collect::<Vec<_>>().join(", "),
                    "--bootstrap: all nodes must answer"
                );
            }
        }
    };
    match outcome {
        Bootstrap::Confirmed => {
            tracing::info!("--bootstrap: all nodes are new and are admitted at once")
        }
        Bootstrap::Refuted(node) => {
            tracing::warn!(
                node,
                "--bootstrap: not applied: this node is not new, or a gateway already waits for it"
            );
        }
    }
}

fn cursor_key(
    config: &Config,
    cluster: &str,
    names: &[String],
    entropy: &dyn Entropy,
) -> CursorKey {
    match &config.nodes {
        Nodes::Embedded(_) => {
            let mut random = [0; 32];
            entropy.fill(&mut random);
            CursorKey::new(random)
        }
        // Cursors count masters by their place. A name stands for one order; in a list without one it may differ, and what
        // would go on at another master is no cursor.
        Nodes::Redis(urls) => {
            let order = config.settings.cluster.is_none().then(|| names.join(","));
            let credentials =
                urls.iter().map(RedisUrl::credentials).chain([(order.as_deref(), None)]);
            CursorKey::derive(cluster, credentials)
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
        node: NodeSettings::default().with_max_clock_skew(settings.clock_skew),
        max_waiters: config.capacity.waiters,
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
