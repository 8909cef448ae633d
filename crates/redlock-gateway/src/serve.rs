//! Starts a server from a configuration, and shuts it down.

use std::future::Future;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use redlock_core::clock::Entropy;
use redlock_core::node::eligibility::{ClusterConfig, quarantine};
use redlock_core::node::redis::{RedisNode, RedisSettings, RedisUrl, TlsError};
use redlock_core::node::{Node, NodeSettings, NodeStatus};
use redlock_core::{Bootstrap, Env, Redlock, Settings, SettingsError};
use socket2::{Domain, SockRef, Socket, Type};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};

use crate::audit::{Audit, AuditError, AuditFile};
use crate::auth::{Authenticator, Keys, KeysError, KeysMetrics};
use crate::callbacks::{self, Callbacks, CallbacksError};
use crate::config::{Config, Nodes, OnAuditFailure, show};
use crate::gateway::{CursorKey, Gateway};
use crate::http::{App, AppState, Hosts};
use crate::overload::MasterMemory;
use crate::overload::capacity::{self, NoDescriptors};
use crate::overload::clients::{Clients, FairQueue};
use crate::overload::refusals::{self, Refusals, Summary};
use crate::reload::{Reload, Watched};
use crate::remedy::{PublicUrl, section};
use crate::telemetry::{
    ConnectionMetrics, HISTORY_PERIOD, Reloaded, Telemetry, Traces, TracesError,
};
use crate::transport::connection::{Encrypted, Plain};
use crate::transport::connections::{self, ConnectionLimits, Connections};
use crate::transport::server::Server;
use crate::transport::tls::{self, HttpsError};

/// Time between two log lines about a bootstrap that still waits for nodes.
const PROGRESS: Duration = Duration::from_secs(10);
/// Limit on connections that the system has accepted and the gateway has not accepted yet. The
/// system setting net.core.somaxconn may lower this limit.
const BACKLOG: i32 = 1024;
/// How many bytes of an answer the system takes before it sends them. By default, Linux takes up to
/// 4 MB for each client that does not read, beside `--memory-budget`.
const UNSENT: u32 = 32 * 1024;
/// Limits on connections to the operators' address (`--admin-listen`), which probes and scrapers
/// use. One client may have all of these connections.
const OPERATORS: ConnectionLimits = ConnectionLimits::of_all(64);
/// Time between two checks for a majority.
const QUORUM_INTERVAL: Duration = Duration::from_millis(250);
/// How long a starting gateway may be without a majority before the log names the masters that it
/// waits for.
const STARTS_WITHIN: Duration = Duration::from_secs(10);
/// How long a starting gateway may be without a majority before the log reports `QUORUM LOST`. A
/// new cluster on Kubernetes takes 45 s (k8s/README.md), because the cluster's DNS may repeat for
/// 30 s that a master has no address.
const MASTERS_START_WITHIN: Duration = Duration::from_secs(60);
/// Time between two rounds of maintenance.
const UPKEEP: Duration = Duration::from_secs(5);

/// Why the gateway cannot start, or has ended early. Each text contains the text of its source.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Https(#[from] HttpsError),
    #[error("{flag}: {0}", flag = node_tls_flag(.0))]
    NodeTls(#[from] TlsError),
    #[error("--auth-keys: {0}")]
    Keys(#[from] KeysError),
    #[error(transparent)]
    Audit(#[from] AuditError),
    #[error(transparent)]
    Callbacks(#[from] CallbacksError),
    #[error(transparent)]
    Traces(#[from] TracesError),
    #[error(transparent)]
    Descriptors(#[from] NoDescriptors),
    #[error(transparent)]
    Redlock(#[from] SettingsError),
    #[error(transparent)]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Unbound(#[from] Unbound),
    /// The task of the server panicked.
    #[error(transparent)]
    Server(#[from] JoinError),
}

/// The flag that names the unusable file.
fn node_tls_flag(error: &TlsError) -> &'static str {
    match error {
        TlsError::Authorities(_) => "--node-ca",
        TlsError::Certificate(_) => "--node-cert",
        TlsError::Key(_) => "--node-key",
    }
}

/// A running server.
pub struct Running {
    /// The listening address, with the actual port.
    pub address: SocketAddr,
    /// The listening address for probes and metrics alone.
    pub admin: Option<SocketAddr>,
    /// The lock service.
    pub gateway: Arc<Gateway>,
}

/// The error of a flag whose address the gateway cannot listen on.
#[derive(Debug, thiserror::Error)]
#[error("{flag} {address}: {source}")]
pub struct Unbound {
    flag: &'static str,
    address: SocketAddr,
    source: io::Error,
}

/// The sockets for clients and for operators alone.
pub struct Listeners {
    clients: TcpListener,
    operators: Option<TcpListener>,
}

/// Listens on the configured addresses.
///
/// # Errors
/// One of them cannot be listened on.
pub fn listeners(config: &Config) -> Result<Listeners, Unbound> {
    let settings = &config.settings;
    let bound = |flag, address| {
        TcpListener::bind(address).map_err(|source| Unbound { flag, address, source })
    };
    let operators = settings.admin_listen.map(|address| bound("--admin-listen", address));
    Ok(Listeners {
        clients: bound("--listen", settings.listen)?,
        operators: operators.transpose()?,
    })
}

/// Checks that each configured address could be listened on. The sockets do not listen, so a gateway
/// may start meanwhile. An address in use is no error, because a gateway may serve there: `in_use`
/// gets its error.
///
/// # Errors
/// An address cannot be listened on for another reason.
pub(crate) fn check_addresses(config: &Config, in_use: impl Fn(&Unbound)) -> Result<(), Unbound> {
    let settings = &config.settings;
    let operators = settings.admin_listen.map(|address| ("--admin-listen", address));
    for (flag, address) in [("--listen", settings.listen)].into_iter().chain(operators) {
        let bound = Socket::new(Domain::for_address(address), Type::STREAM, None)
            .and_then(|socket| socket.set_reuse_address(true).map(|()| socket))
            .and_then(|socket| socket.bind(&address.into()));
        match bound.map_err(|source| Unbound { flag, address, source }) {
            Err(error) if error.source.kind() == io::ErrorKind::AddrInUse => in_use(&error),
            bound => bound?,
        }
    }
    Ok(())
}

/// Checks that the configured files can be used as they are now.
///
/// # Errors
/// The flag, the file and the fault. No secret content.
pub fn check_files(config: &Config) -> Result<(), ServeError> {
    config.https.as_ref().map_or(Ok(()), tls::check)?;
    config.node_tls.check()?;
    config.settings.auth_keys.as_deref().map(Keys::read).transpose()?;
    config.callbacks.as_ref().map_or(Ok(()), callbacks::check)?;
    Ok(())
}

/// Serves until `shutdown` resolves, then finishes requests in flight within the configured grace.
/// Calls `started` once the server listens. On a trigger of `reload`, reads all watched files again.
///
/// # Errors
/// A socket, a file or the nodes' settings cannot be used, or the server failed.
pub async fn run(
    Listeners { clients: listener, operators: admin }: Listeners,
    shutdown: impl Future<Output = ()>,
    reload: &Reload,
    config: Config,
    started: impl FnOnce(&Running),
) -> Result<(), ServeError> {
    let address = listen(&listener)?;
    // Files and settings are checked first. If one is unusable, no node is contacted.
    let names = node_names(&config.nodes);
    let endpoint = config.settings.otlp_endpoint.as_deref();
    let traces = endpoint.map(|endpoint| Traces::start(endpoint, &names)).transpose()?;
    let telemetry =
        Arc::new(Telemetry::new(&names).with_groups(&config.groups).with_traces(traces));
    let authenticator = authenticator(&config, address, reload, &telemetry)?;
    let audit = audit(&config, reload)?;
    let callbacks = start_callbacks(&config, reload, &telemetry)?;
    let gateway = assemble(&config, &names, &telemetry, callbacks)?;
    audit.file().into_iter().for_each(|file| file.count_failures(telemetry.audit_failures.clone()));
    // Each listening address counts its own clients: connections to one address do not count at the
    // other.
    let clients = Arc::new(Clients::default());
    let operators = Arc::new(Clients::default());
    let public = config.public;
    let cors_origins = config.cors_origins.clone();
    let public_url = PublicUrl::new(config.settings.public_url.as_deref());
    if let Some(url) = &config.settings.public_url {
        telemetry.public_url(url);
    }
    let fair_queue = FairQueue::new(config.settings.worker_threads);
    let state = AppState {
        gateway: gateway.clone(),
        authenticator,
        public,
        clients: clients.clone(),
        fair_queue,
        cors_origins,
        public_url: public_url.clone(),
    };
    let hosts =
        Hosts { is_loopback: address.ip().is_loopback(), allowed: config.allowed_hosts.clone() };
    let app = App::new(state, telemetry.clone(), audit.clone(), hosts)
        .logging_lock_names(config.settings.log_lock_names);

    let refusals = Arc::new(Refusals::default());
    let metrics = telemetry.connections.clone();
    let connections = Connections::new(limit(&config), clients.clone(), refusals.clone(), metrics);
    // The set aborts these tasks when this function returns.
    let mut tasks = JoinSet::new();
    let of_operators = |hosts| {
        let url = public_url.clone();
        App::of_operators(gateway.clone(), telemetry.clone(), audit.clone(), hosts, url)
    };
    let serve = |listener| {
        serve_operators(listener, &config, of_operators, (&operators, &refusals), &mut tasks)
    };
    let admin = admin.map(serve).transpose()?;
    let idle_timeout = config.settings.idle_timeout;
    let server = Server { app: app.clone(), connections: connections.clone(), idle_timeout };
    let (end, ended) = watch::channel(());
    let mut server = match &config.https {
        None => tokio::spawn(server.serve(listener, Plain, ended)),
        Some(files) => {
            let expiry = telemetry.certificate_expiry(&files.cert);
            let failures = telemetry.reload_failures(Reloaded::Tls);
            let metrics = tls::CertificateMetrics { expiry, failures };
            let encrypted = Encrypted(tls::follow(files, reload, metrics, &mut tasks)?);
            tokio::spawn(server.serve(listener, encrypted, ended))
        }
    };
    tasks.spawn(watch_quorum(gateway.clone(), public_url.link(section::QUORUM_LOST)));
    tasks.spawn(upkeep(gateway.clone(), [clients, operators]));
    tasks.spawn(sample(gateway.clone()));
    let following = gateway.clone();
    tasks.spawn(async move { following.follow_watched().await });
    tasks.spawn(sum_up_for_ever(app.clone(), refusals.clone()));

    started(&Running { address, admin, gateway: gateway.clone() });
    tokio::select! {
        () = shutdown => {}
        ended = &mut server => return Ok(ended??),
    }

    let deadline = drain(&gateway, &connections, &config).await;
    drop(end);
    match tokio::time::timeout_at(deadline, &mut server).await {
        Ok(ended) => ended??,
        // Cuts the connections that are left, and waits until their requests have been recorded.
        Err(_) => {
            server.abort();
            drop(server.await);
        }
    }
    sum_up(&app, &refusals);
    flush_pending(&audit, telemetry).await;
    tracing::info!("stopped");
    Ok(())
}

/// Writes the audit lines that are still in memory to the disk, and sends the spans to the
/// collector.
async fn flush_pending(audit: &Audit, telemetry: Arc<Telemetry>) {
    if let Some(file) = audit.file() {
        file.finish().await;
    }
    let sent = tokio::task::spawn_blocking(move || {
        telemetry.traces().into_iter().for_each(Traces::finish)
    })
    .await;
    // If the task panicked, the panic hook has logged it.
    drop(sent);
}

/// Drains the gateway after the signal to end. Waits until no request is in flight, but for the
/// grace period at most. Returns the end of the grace period, when open connections are cut.
async fn drain(gateway: &Gateway, connections: &Connections, config: &Config) -> Instant {
    // Load balancers must see the 503 of /readyz before any request is refused.
    let delay = config.drain_delay();
    let grace = config.settings.shutdown_grace;
    tracing::info!(
        drain_delay_ms = delay.as_millis() as u64,
        grace_ms = grace.as_millis() as u64,
        "shutting down"
    );
    connections.end_each();
    // Without a delay, `leave` is skipped. Otherwise a client could read on /readyz that the
    // gateway drains, and still get a lock before the call of `drain`.
    if !delay.is_zero() {
        gateway.leave();
        tokio::time::sleep(delay).await;
    }
    // The server still listens. From now on it refuses new locks, while holders can extend and
    // release.
    gateway.drain();
    let deadline = Instant::now() + grace;
    if tokio::time::timeout_at(deadline, gateway.idle()).await.is_err() {
        tracing::warn!("requests were still in flight at the end of the grace period");
    }
    deadline
}

/// Serves probes and metrics until the tasks end.
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
    let server = Server { app, connections, idle_timeout: config.settings.idle_timeout };
    tasks.spawn(async move {
        let (_sender, end) = watch::channel(());
        drop(server.serve(listener, Plain, end).await);
    });
    Ok(address)
}

fn listen(listener: &TcpListener) -> io::Result<SocketAddr> {
    listener.set_nonblocking(true)?;
    // The socket listens already. This second call only sets the backlog.
    rustix::net::listen(listener, BACKLOG)?;
    // Connections inherit this limit from the listener. It only saves memory, so a system that lacks the
    // option is no error.
    #[cfg(target_os = "linux")]
    let _ = SockRef::from(listener).set_tcp_notsent_lowat(UNSENT);
    listener.local_addr()
}

fn authenticator(
    config: &Config,
    address: SocketAddr,
    reload: &Reload,
    telemetry: &Telemetry,
) -> Result<Arc<Authenticator>, KeysError> {
    // With an allowed host or origin, a request on a loopback address may come from another
    // machine, through a proxy or a web page.
    let lets_force = address.ip().is_loopback()
        && config.allowed_hosts.is_empty()
        && config.cors_origins.is_empty();
    match &config.settings.auth_keys {
        None => Ok(Arc::new(Authenticator::open(lets_force))),
        Some(path) => {
            let failures = telemetry.reload_failures(Reloaded::AuthKeys);
            let metrics = KeysMetrics { failures, expiry: telemetry.key_expiry() };
            Authenticator::following(path, reload, metrics)
        }
    }
}

fn start_callbacks(
    config: &Config,
    reload: &Reload,
    telemetry: &Telemetry,
) -> Result<Option<Callbacks>, CallbacksError> {
    let failures = || telemetry.reload_failures(Reloaded::CallbackSecrets);
    let start = |settings| Callbacks::start(settings, reload, failures());
    config.callbacks.as_ref().map(start).transpose()
}

fn limit(Config { capacity, trusted_proxies, .. }: &Config) -> ConnectionLimits {
    let connections = capacity.connections;
    let per_client = capacity.connections_per_client();
    ConnectionLimits {
        connections,
        per_client,
        loopback: capacity.bounds_loopback(),
        proxies: trusted_proxies.clone(),
        header_tables: capacity.header_tables,
    }
}

/// Raises the process's limit on file descriptors as far as allowed. Then limits the number of
/// connections, so that descriptors are left for the masters and for the gateway itself.
///
/// # Errors
/// No descriptors are left for connections.
pub fn within_descriptors(config: Config) -> Result<Config, NoDescriptors> {
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

async fn sample(gateway: Arc<Gateway>) {
    let mut tick = tokio::time::interval_at(Instant::now() + HISTORY_PERIOD, HISTORY_PERIOD);
    // After a pause of the process, one long sample follows, not many empty ones.
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        gateway.sample();
    }
}

/// What the log has said about the majority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum QuorumReport {
    /// Nothing: the gateway has just started.
    Starting,
    /// The gateway waits for a first majority.
    Waiting,
    /// A majority may vote.
    Present,
    /// The majority was lost, or has been missing for too long since the start.
    Lost,
}

impl QuorumReport {
    /// The report after a check. `has`: a majority may vote now. `had`: a majority has been admitted
    /// at some time since the start. `without`: for how long no majority could vote.
    fn next(self, has: bool, had: bool, without: Duration) -> Self {
        match self {
            _ if has => Self::Present,
            Self::Present | Self::Lost => Self::Lost,
            Self::Starting | Self::Waiting if had || without >= MASTERS_START_WITHIN => Self::Lost,
            Self::Starting | Self::Waiting if without >= STARTS_WITHIN => Self::Waiting,
            Self::Starting | Self::Waiting => self,
        }
    }
}

/// Whether a majority of the nodes has been admitted since the start. Their admissions may have
/// been at different times.
fn has_been_admitted(nodes: &[(String, NodeStatus)]) -> bool {
    let admitted = nodes.iter().filter(|(_, status)| status.engine.is_some()).count();
    admitted > nodes.len() / 2
}

/// The nodes that do not vote, with their states.
fn awaited(nodes: &[(String, NodeStatus)]) -> String {
    let missing = nodes.iter().filter(|(_, status)| !status.votes());
    let shown = missing.map(|(name, status)| format!("{name} ({})", status.state.as_str()));
    shown.collect::<Vec<_>>().join(", ")
}

/// Logs one line when the majority is lost, and one when it is back. In between, each refused
/// request reports the loss to its client, and one a minute to the log. After a start without a
/// majority, the log first names the nodes that do not vote. Why a node cannot vote is logged at
/// once, by a line about that node.
async fn watch_quorum(gateway: Arc<Gateway>, runbook: String) {
    let mut tick = tokio::time::interval(QUORUM_INTERVAL);
    let mut report = QuorumReport::Starting;
    let mut since = Instant::now();
    let mut had = false;
    loop {
        tick.tick().await;
        let has = gateway.has_quorum();
        let next = report.next(has, had, since.elapsed());
        // A majority may come and go between two checks. A node's engine becomes known just before
        // the node votes, so `had` changes only the next check.
        had |= !has && has_been_admitted(&gateway.nodes());
        if next == report {
            continue;
        }
        let lasted_ms = since.elapsed().as_millis() as u64;
        if next == QuorumReport::Present || report == QuorumReport::Present {
            since = Instant::now();
        }
        let nodes = gateway.nodes_summary();
        match next {
            // A start within `STARTS_WITHIN` needs no line.
            QuorumReport::Present if report == QuorumReport::Starting => {}
            // Only the first report is `Starting`, and the loop skips an unchanged report.
            QuorumReport::Starting => {}
            QuorumReport::Present => {
                tracing::info!(nodes, without_ms = lasted_ms, "a majority of nodes may vote");
            }
            QuorumReport::Waiting => {
                let waiting_for = awaited(&gateway.nodes());
                tracing::info!(
                    nodes,
                    waiting_for,
                    "waiting for the masters: no majority has voted since the start"
                );
            }
            QuorumReport::Lost => tracing::error!(
                nodes,
                runbook,
                "QUORUM LOST: no majority of nodes may vote, and no lock can be acquired"
            ),
        }
        report = next;
    }
}

async fn sum_up_for_ever(app: App, connections: Arc<Refusals>) {
    let mut tick = tokio::time::interval(refusals::WINDOW);
    loop {
        tick.tick().await;
        sum_up(&app, &connections);
    }
}

/// Logs how many requests and connections were refused without a line of their own.
fn sum_up(app: &App, connections: &Refusals) {
    app.sum_up_refusals();
    for Summary { address, what: reason, refused, .. } in connections.take() {
        tracing::info!(
            address = address.map(tracing::field::display),
            reason,
            refused,
            "further connections refused, beyond those with a log line each"
        );
    }
}

fn audit(config: &Config, reload: &Reload) -> Result<Arc<Audit>, AuditError> {
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
    callbacks: Option<Callbacks>,
) -> Result<Arc<Gateway>, SettingsError> {
    let cluster = cluster_name(config, names);
    let env = Env { observer: telemetry.clone(), ..Env::default() };
    let locks = Redlock::builder().settings(settings(config)).env(env.clone());
    let locks = match &config.nodes {
        Nodes::Embedded(count) => {
            locks.embedded(*count).embedded_memory(config.capacity.locks / *count as u64)
        }
        Nodes::Redis(urls) => {
            let settings = redis_settings(config, &cluster, urls.len());
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
    let bootstrap_refuted = Arc::<AtomicBool>::default();
    if config.settings.bootstrap && matches!(config.nodes, Nodes::Redis(_)) {
        let longest_wait =
            quarantine(config.settings.limits.max_ttl.duration(), config.settings.clock_skew);
        tokio::spawn(bootstrap(locks.clone(), longest_wait, bootstrap_refuted.clone()));
    }
    let cursors = cursor_key(config, &cluster, names, env.entropy.as_ref());
    telemetry.limits(&config.capacity, locks.quorum().size());
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
    let gateway = gateway.with_bootstrap_refuted(bootstrap_refuted).with_callbacks(callbacks);
    let gateway = gateway.with_capacity(&config.capacity);
    Ok(Arc::new(gateway.with_wait_share(config.wait_share())))
}

async fn bootstrap(locks: Redlock, longest_wait: Duration, is_refuted: Arc<AtomicBool>) {
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
                    "--bootstrap: waiting until all nodes have answered"
                );
            }
        }
    };
    match outcome {
        Bootstrap::Confirmed => {
            tracing::info!("--bootstrap: all nodes are new and are admitted at once")
        }
        Bootstrap::Refuted(node) => {
            is_refuted.store(true, Ordering::Release);
            tracing::warn!(
                node,
                at_most = show(longest_wait),
                "--bootstrap: not applied, and without effect from now on: this node is not new, or a gateway already \
                 waits for it; nodes in quarantine vote when it ends, see `until` in \
                 /readyz"
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
        // A cursor names a master by its position in the list of nodes. With `--cluster`, all
        // gateways have the same order. Without it their orders may differ, so the order is part of
        // the key: a gateway with another order refuses the cursor.
        Nodes::Redis(urls) => {
            let order = config.settings.cluster.is_none().then(|| names.join(","));
            let credentials =
                urls.iter().map(RedisUrl::credentials).chain([(order.as_deref(), None)]);
            CursorKey::derive(cluster, credentials)
        }
    }
}

/// The name of the node set. Markers, and owners of idempotency keys, are derived from it.
pub(crate) fn cluster_name(config: &Config, names: &[String]) -> String {
    match &config.settings.cluster {
        // The number of nodes is part of the name. So gateways with lists of different lengths
        // count as different clusters, and cannot grant the same lock side by side.
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
        max_pending_release_bytes: usize::try_from(config.capacity.releases).unwrap_or(usize::MAX),
    }
}

/// Returns a function from a node's position in the list to its settings.
pub(crate) fn redis_settings(
    config: &Config,
    cluster: &str,
    masters: usize,
) -> impl Fn(usize) -> RedisSettings {
    let mut redis = settings(config).of_masters(cluster, masters);
    redis.bootstrap = config.settings.bootstrap;
    redis.tls = config.node_tls.clone();
    let is_named = config.settings.cluster.is_some();
    // With `--cluster`, gateways may reach a node under different addresses. They agree on its
    // position, so the position is its name.
    move |place| {
        let mut redis = redis.clone();
        redis.node_name = is_named.then(|| place.to_string());
        redis
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The report after a check without a majority, when none was seen since the start.
    fn never(report: QuorumReport, without_secs: u64) -> QuorumReport {
        report.next(false, false, Duration::from_secs(without_secs))
    }

    #[test]
    fn a_first_majority_may_take_a_minute_before_it_is_an_error() {
        assert_eq!(never(QuorumReport::Starting, 9), QuorumReport::Starting);
        assert_eq!(never(QuorumReport::Starting, 10), QuorumReport::Waiting);
        assert_eq!(never(QuorumReport::Waiting, 59), QuorumReport::Waiting);
        assert_eq!(never(QuorumReport::Waiting, 60), QuorumReport::Lost);
        assert_eq!(never(QuorumReport::Lost, 61), QuorumReport::Lost);
        for report in [QuorumReport::Starting, QuorumReport::Waiting, QuorumReport::Lost] {
            let next = report.next(true, false, Duration::from_secs(45));
            assert_eq!(next, QuorumReport::Present);
        }
    }

    #[test]
    fn a_majority_that_was_there_is_lost_at_once() {
        assert_eq!(never(QuorumReport::Present, 0), QuorumReport::Lost);
        // The majority was there between two checks only.
        for report in [QuorumReport::Starting, QuorumReport::Waiting] {
            assert_eq!(report.next(false, true, Duration::ZERO), QuorumReport::Lost);
        }
    }
}
