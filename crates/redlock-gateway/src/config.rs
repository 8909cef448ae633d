//! Turns flags, environment and file into validated plain values, before the gateway binds an
//! address or connects to a node.
//!
//! A flag beats its environment variable, which beats the file, which beats the default. Every
//! setting is declared once, as a flag of [`Settings`] with its variable and its default. The
//! values of the file replace the defaults. Every error names the setting, the value and what is
//! allowed. No error shows a password.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use clap::{ArgAction, Args, ValueEnum};
use redlock_core::Ttl;
use redlock_core::node::redis::TlsSettings;

use crate::callbacks::CallbackSettings;
use crate::origin::Origin;
use crate::overload::WaitShare;
use crate::overload::capacity::{self, Capacity, Given, Transport};
use crate::pattern::Group;
use crate::proxies::TrustedProxies;

mod callbacks;
mod environment;
mod file;
mod headings;
mod nodes;
#[cfg(test)]
mod properties;
mod tests;
mod tls;
mod value;

use self::callbacks::CallbackFlags;
pub use self::callbacks::CallbackFlagsError;
pub use self::file::parse;
pub use self::nodes::{NodePassword, Nodes, NodesError};
use self::tls::TlsFlags;
pub use self::tls::{TlsFiles, TlsFlagsError};
use self::value::{DAY, count, duration, listed};
pub use self::value::{InvalidValue, clock_skew, show, ttl};

const SECOND: Duration = Duration::from_secs(1);
/// Largest value of flags that give a number, such as `--max-waiters`. A larger value is a mistake.
const MAX_COUNT: usize = 1_000_000;
/// Default of `--drain-delay`. After a pod begins to end, Kubernetes stops sending requests to it
/// within about 1 s. A load balancer that probes /readyz every 2 s needs about 4 s.
const DRAIN_DELAY: Duration = Duration::from_secs(5);

/// Every setting. Each may also stand in the file of --config, under the name of the field. The
/// parser has checked that each value is within its own limits. [`Config::new`] checks that the
/// values go together.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// Address and port to listen on
    ///
    /// A non-loopback address is refused without --auth-keys or --allow-anonymous.
    #[arg(help_heading = headings::ADDRESSES)]
    #[arg(long, value_name = "ADDR", env = "REDLOCK_LISTEN", default_value = "127.0.0.1:8080")]
    #[arg(value_parser = value::address)]
    pub listen: SocketAddr,
    /// Second address and port, for /livez, /readyz, /healthz and /metrics only [default: none]
    ///
    /// This address serves plain HTTP, without keys, to anybody who can reach it: kubelets, load
    /// balancers, Prometheus. --listen serves these paths too. Connections to this address do not
    /// count for --max-connections.
    #[arg(help_heading = headings::ADDRESSES)]
    #[arg(long, value_name = "ADDR", env = "REDLOCK_ADMIN_LISTEN", value_parser = value::address)]
    pub admin_listen: Option<SocketAddr>,
    /// A Redis master, redis://[[user]:password@]host[:port][/db] or rediss:// for TLS; repeat for
    /// each [default: five in-memory nodes]
    #[arg(help_heading = headings::NODES)]
    #[arg(
        long = "node",
        value_name = "URL",
        env = "REDLOCK_NODES",
        value_delimiter = ',',
        hide_env_values = true
    )]
    nodes: Vec<String>,
    /// File with one line: the password of those nodes whose URL has none [default: none]
    ///
    /// Anybody who lists processes or reads a pod's definition sees the URLs, but not a file such
    /// as a mounted secret. The file is read at the start.
    #[arg(help_heading = headings::NODES)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_NODE_PASSWORD_FILE")]
    node_password_file: Option<PathBuf>,
    /// Accept in-memory nodes when no --node is given, although no other gateway can see their
    /// locks
    ///
    /// On a non-loopback address the gateway needs nodes or this flag to start.
    /// Otherwise a deployment that forgets --node would start several gateways that each grant the
    /// same lock.
    #[arg(help_heading = headings::NODES)]
    #[arg(long, env = "REDLOCK_EMBEDDED", action = ArgAction::Set)]
    #[arg(num_args = 0..=1, default_value = "false", default_missing_value = "true", require_equals = true)]
    embedded: bool,
    #[command(flatten)]
    tls: TlsFlags,
    #[command(flatten)]
    pub limits: Limits,
    /// How long a request waits for the other nodes once a majority has answered. Before that, it
    /// waits for up to 800 ms, or for this time if it is longer. Each wait ends at the latest after
    /// a tenth of the lock's TTL
    #[arg(help_heading = headings::NODES)]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_NODE_TIMEOUT", default_value = "50ms")]
    #[arg(value_parser = duration(SECOND / 1000..=SECOND * 10))]
    pub node_timeout: Duration,
    /// Fraction of a TTL that is taken off a lock's validity, because clocks run at different rates
    #[arg(help_heading = headings::NODES)]
    #[arg(long, value_name = "FACTOR", env = "REDLOCK_DRIFT_FACTOR", default_value = "0.01")]
    #[arg(value_parser = value::factor)]
    pub drift_factor: f64,
    /// Maximum difference between the clocks of gateways and nodes
    #[arg(help_heading = headings::NODES)]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_CLOCK_SKEW", default_value = "2s")]
    #[arg(value_parser = clock_skew())]
    pub clock_skew: Duration,
    /// Prefix of the keys on the nodes, before the lock's name; may be empty
    #[arg(help_heading = headings::NODES)]
    #[arg(long, value_name = "TEXT", env = "REDLOCK_KEY_PREFIX", default_value = "lock:")]
    #[arg(value_parser = value::key_prefix)]
    pub key_prefix: String,
    /// Maximum number of requests that wait for a lock; others are answered 429 [default: 5/8
    /// of --max-connections]
    ///
    /// Each waiting request keeps a connection, so --max-connections should be larger.
    #[arg(help_heading = headings::LOCKS)]
    #[arg(long, value_name = "N", env = "REDLOCK_MAX_WAITERS", value_parser = count(MAX_COUNT))]
    max_waiters: Option<usize>,
    /// Maximum number of requests that wait for the same lock; others are answered 429
    #[arg(help_heading = headings::LOCKS)]
    #[arg(long, value_name = "N", env = "REDLOCK_MAX_WAITERS_PER_LOCK", default_value = "1024")]
    #[arg(value_parser = count(MAX_COUNT))]
    pub max_waiters_per_lock: usize,
    /// Maximum number of waiting requests of one client; others are answered 429 [default: a
    /// quarter of --max-waiters]
    ///
    /// A client is an API key; without keys, it is an address. All clients behind a proxy count as
    /// one, unless the proxy is a --trusted-proxy.
    #[arg(help_heading = headings::LOCKS)]
    #[arg(long, value_name = "N", env = "REDLOCK_MAX_WAITERS_PER_CLIENT", value_parser = count(MAX_COUNT))]
    pub max_waiters_per_client: Option<usize>,
    /// Maximum number of locks that requests of one client wait for; others are answered 429
    ///
    /// The gateway polls each of these locks about twice a second. When requests wait for more than
    /// 300 locks in all, it polls each less often.
    #[arg(help_heading = headings::LOCKS)]
    #[arg(
        long,
        value_name = "N",
        env = "REDLOCK_MAX_WAITED_LOCKS_PER_CLIENT",
        default_value = "1024"
    )]
    #[arg(value_parser = count(MAX_COUNT))]
    pub max_waited_locks_per_client: usize,
    /// Memory that the process may take; limits that you do not set are derived from it [default: 1GiB, or 3/4 of the control group's limit if that is smaller]
    ///
    /// `check` shows how much memory each limit takes at most.
    #[arg(help_heading = headings::LOAD)]
    #[arg(long, value_name = "SIZE", env = "REDLOCK_MEMORY_BUDGET", value_parser = value::memory)]
    memory_budget: Option<ByteSize>,
    /// Memory of a master that sets no maxmemory
    ///
    /// When less than a third of a master's memory is free, the largest clients get no new locks
    /// (429): those whose locks take more than twice the free memory. Without --node, all locks
    /// together may take half of --memory-budget.
    #[arg(help_heading = headings::NODES)]
    #[arg(long, value_name = "SIZE", env = "REDLOCK_MASTER_MEMORY", default_value = "1GiB", value_parser = value::memory)]
    pub master_memory: ByteSize,
    /// Maximum number of open connections [default for a --memory-budget of 1GiB: 16000 over HTTP,
    /// 7200 over HTTPS, 11000 over HTTPS with --http2=false; with embedded nodes half of these]
    ///
    /// When all connections are taken, the gateway closes an idle one for each new one. It chooses in
    /// this order: a connection that has sent no request yet; a connection that has sent no API key; a
    /// connection of the address that has the most connections. When no connection is idle, it accepts a few
    /// more, and answers them 503 (except for probes); it closes further ones. The limit on open
    /// files (ulimit -n) bounds the number of connections too.
    #[arg(help_heading = headings::LOAD)]
    #[arg(long, value_name = "N", env = "REDLOCK_MAX_CONNECTIONS", value_parser = count(MAX_COUNT))]
    max_connections: Option<usize>,
    /// Maximum number of open connections of one address, or of one /64 network of IPv6; idle ones
    /// of the same address are closed first [default: half of --max-connections; no limit for
    /// loopback and for --trusted-proxy]
    ///
    /// A proxy in front has one address for all its clients. Name the proxy with --trusted-proxy,
    /// or give the number of --max-connections here.
    #[arg(help_heading = headings::LOAD)]
    #[arg(long, value_name = "N", env = "REDLOCK_MAX_CONNECTIONS_PER_CLIENT", value_parser = count(MAX_COUNT))]
    max_connections_per_client: Option<usize>,
    /// Address or network of a proxy that is trusted to name its clients, such as 10.0.0.0/8;
    /// repeat for each [default: none]
    ///
    /// The gateway reads X-Forwarded-For or Forwarded from the end. The first address that is not a
    /// trusted proxy is the client's. This address counts for limits, refusals, the log and the
    /// audit log. The proxy must add the address of its caller to one of the two headers in every
    /// request. If the two headers name different clients, or neither can be read, the proxy's own
    /// address counts.
    #[arg(help_heading = headings::ADDRESSES)]
    #[arg(
        long = "trusted-proxy",
        value_name = "CIDR",
        env = "REDLOCK_TRUSTED_PROXIES",
        value_delimiter = ','
    )]
    trusted_proxies: Vec<String>,
    /// How long a connection may be idle, or take to send the head of a request, before it is
    /// closed
    ///
    /// The time should exceed the idle timeout of proxies and client pools in front (often 60s).
    /// Otherwise they send a request on a connection that the gateway has just closed.
    #[arg(help_heading = headings::LOAD)]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_IDLE_TIMEOUT", default_value = "75s")]
    #[arg(value_parser = duration(SECOND..=SECOND * 3600))]
    pub idle_timeout: Duration,
    /// Maximum number of requests in flight, not counting those that wait for a lock; others are
    /// answered 503 [default for a --memory-budget of 1GiB: 4096, with embedded nodes 2048]
    #[arg(help_heading = headings::LOAD)]
    #[arg(long, value_name = "N", env = "REDLOCK_MAX_IN_FLIGHT", value_parser = count(MAX_COUNT))]
    max_in_flight: Option<usize>,
    /// Threads that serve requests [default: half of the cores, at least 1]
    ///
    /// The kernel's network code, and often masters on the same machine, need the other half. With more
    /// threads, the cost of waking threads is larger than the gain.
    #[arg(help_heading = headings::LOAD)]
    #[arg(long, value_name = "N", env = "REDLOCK_WORKER_THREADS", default_value_t = half_of_the_cores())]
    #[arg(hide_default_value = true, value_parser = count(1024))]
    pub worker_threads: usize,
    /// Name of the node set; needed when gateways reach the same nodes under different addresses
    /// [default: the list of nodes]
    ///
    /// With a name, a node is known by its position in the list: give all gateways the nodes in the
    /// same order. A name stands for one list. A changed list needs a new name and `reconfigure`.
    /// Otherwise gateways with the old list and gateways with the new one may grant the same lock.
    #[arg(help_heading = headings::NODES)]
    #[arg(long, value_name = "NAME", env = "REDLOCK_CLUSTER")]
    pub cluster: Option<String>,
    /// Let new nodes grant locks at once. All must answer, none may have a marker of an earlier
    /// start, and every gateway so far must have had this flag
    ///
    /// Without this flag, new nodes grant nothing for 3 s + --clock-skew + the larger of --max-ttl
    /// and --clock-skew. The reason: new nodes look like nodes that lost their data while their
    /// locks were in use. Give the flag for the first start only, and remove it afterwards. If all
    /// nodes lost their data, wait that time yourself before you give the flag.
    #[arg(help_heading = headings::NODES)]
    #[arg(long, env = "REDLOCK_BOOTSTRAP", action = ArgAction::Set)]
    #[arg(num_args = 0..=1, default_value = "false", default_missing_value = "true", require_equals = true)]
    pub bootstrap: bool,
    /// TOML file with the API keys; without it everybody who can connect may take and release locks
    ///
    /// The gateway reads the file again when it changes, and on SIGHUP. If the new content cannot
    /// be used, the old keys stay. See `key new`.
    #[arg(help_heading = headings::ACCESS)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_AUTH_KEYS")]
    pub auth_keys: Option<PathBuf>,
    /// Pages that need no key on a gateway with --auth-keys, separated by commas
    ///
    /// The status of /livez and /readyz never needs a key. Only a key with the metrics permission
    /// sees the nodes in /readyz.
    #[arg(help_heading = headings::ACCESS)]
    #[arg(long, value_name = "LIST", env = "REDLOCK_PUBLIC", default_value = "docs")]
    #[arg(value_enum, value_delimiter = ',')]
    public: Vec<PublicPage>,
    /// File for the audit log, one JSON object per line: every change of a lock, and everything
    /// denied
    ///
    /// The gateway appends lines; SIGHUP makes it reopen the file. Without this flag, forced
    /// releases and denied requests go to the log, with the target redlock_audit.
    #[arg(help_heading = headings::ACCESS)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_AUDIT_LOG")]
    pub audit_log: Option<PathBuf>,
    /// Whether requests that change locks are served while --audit-log cannot be written, as on a
    /// full disk
    ///
    /// Lines wait for the disk in a queue. A line that finds the queue full goes to the log.
    /// redlock_audit_failures_total counts both failed writes and such lines.
    #[arg(help_heading = headings::ACCESS)]
    #[arg(long, value_name = "WHAT", env = "REDLOCK_AUDIT_ON_FAILURE", default_value = "allow")]
    pub audit_on_failure: OnAuditFailure,
    /// Host name of this gateway, as clients use it; repeat for each [default: localhost on a
    /// loopback address, otherwise any name]
    ///
    /// Requests for other names are answered 421. Without this check, an attacker could make the
    /// attacker's own host name resolve to this address. A browser would then let the attacker's page
    /// read this gateway's answers. On a loopback address behind a proxy that passes on the Host header,
    /// give the name of the proxy.
    #[arg(help_heading = headings::ADDRESSES)]
    #[arg(
        long = "allowed-host",
        value_name = "NAME",
        env = "REDLOCK_ALLOWED_HOSTS",
        value_delimiter = ','
    )]
    allowed_hosts: Vec<String>,
    /// Serve everybody who can connect, also on a non-loopback address
    #[arg(help_heading = headings::ACCESS)]
    #[arg(long, env = "REDLOCK_ALLOW_ANONYMOUS", action = ArgAction::Set)]
    #[arg(num_args = 0..=1, default_value = "false", default_missing_value = "true", require_equals = true)]
    allow_anonymous: bool,
    /// Let scripts on web pages of this origin call the API, scheme://host[:port]; repeat for each
    /// [default: none]
    #[arg(help_heading = headings::ADDRESSES)]
    #[arg(
        long = "cors-origin",
        value_name = "ORIGIN",
        env = "REDLOCK_CORS_ORIGINS",
        value_delimiter = ','
    )]
    cors_origins: Vec<String>,
    #[command(flatten)]
    callbacks: CallbackFlags,
    /// Format of log lines [default: text on a terminal, else json]; RUST_LOG sets the level
    #[arg(help_heading = headings::OBSERVABILITY)]
    #[arg(long, value_name = "FORMAT", env = "REDLOCK_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
    /// Name the lock in log lines at level warn and error
    ///
    /// Without this flag a lock's name is only in audit lines, and in log lines at level debug,
    /// because a name may tell outsiders about customers or projects.
    #[arg(help_heading = headings::OBSERVABILITY)]
    #[arg(long, env = "REDLOCK_LOG_LOCK_NAMES", action = ArgAction::Set)]
    #[arg(num_args = 0..=1, default_value = "false", default_missing_value = "true", require_equals = true)]
    pub log_lock_names: bool,
    /// URL under which people reach this gateway, such as https://locks.example.com [default: none]
    ///
    /// Links to the documentation begin with this URL: in answers (the field `runbook`), in log lines
    /// and in alerts. Without this flag they begin with /docs.
    #[arg(help_heading = headings::ADDRESSES)]
    #[arg(long, value_name = "URL", env = "REDLOCK_PUBLIC_URL", value_parser = value::public_url)]
    pub public_url: Option<String>,
    /// Collector for traces, by OTLP over HTTP (protobuf), such as http://localhost:4318 [default:
    /// none]
    ///
    /// Each request, each round of calls to the nodes, and each call in a round has a span. The
    /// request's span is a child of the span in the client's `traceparent`. A URL without a path gets
    /// /v1/traces. The usual variables apply: OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES,
    /// OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_…, OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG. Under
    /// load, set the last two to parentbased_traceidratio and 0.01.
    #[arg(help_heading = headings::OBSERVABILITY)]
    #[arg(long, value_name = "URL", env = "REDLOCK_OTLP_ENDPOINT", value_parser = value::endpoint)]
    pub otlp_endpoint: Option<String>,
    /// A group of locks with metrics of its own, such as deploy=deploy/*; repeat for each, at most
    /// 50 [default: none]
    ///
    /// In the file of --config it is a table: [groups] and below it deploy = "deploy/*". A star stands for any
    /// text. A lock may be in several groups, or in none.
    #[arg(help_heading = headings::OBSERVABILITY)]
    #[arg(
        long = "group",
        value_name = "NAME=PATTERN",
        env = "REDLOCK_GROUPS",
        value_delimiter = ','
    )]
    groups: Vec<String>,
    /// TOML file with settings
    #[arg(help_heading = headings::PROCESS)]
    #[arg(long, value_name = "FILE", env = "REDLOCK_CONFIG")]
    config: Option<PathBuf>,
    /// How long the gateway still serves all requests after SIGTERM or SIGINT, while /readyz
    /// answers 503 and every answer ends its connection [default: 5s, on a loopback address 0s]
    ///
    /// Give the time that load balancers need to notice and to send requests elsewhere.
    /// --shutdown-grace begins afterwards.
    #[arg(help_heading = headings::PROCESS)]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_DRAIN_DELAY")]
    #[arg(value_parser = duration(Duration::ZERO..=SECOND * 3600))]
    drain_delay: Option<Duration>,
    /// How long requests in flight may take after --drain-delay, before the process exits
    ///
    /// The process exits as soon as no request is in flight. Until it exits, it serves extensions
    /// and releases, and answers acquires with 503.
    #[arg(help_heading = headings::PROCESS)]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_SHUTDOWN_GRACE", default_value = "20s")]
    #[arg(value_parser = duration(Duration::ZERO..=SECOND * 3600))]
    pub shutdown_grace: Duration,
}

/// Limits on what a request may ask for.
#[derive(Debug, Clone, Copy, Args)]
pub struct Limits {
    /// TTL of a lock when the request gives none
    #[arg(help_heading = headings::LOCKS)]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_DEFAULT_TTL", default_value = "30s", value_parser = value::ttl)]
    pub default_ttl: Ttl,
    /// Longest TTL that a request may ask for
    #[arg(help_heading = headings::LOCKS)]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_MAX_TTL", default_value = "5m", value_parser = value::ttl)]
    pub max_ttl: Ttl,
    /// Longest time that a request may wait for a lock
    ///
    /// Proxies and load balancers in front must allow longer requests than this: many cut off
    /// requests at 29 to 60 seconds.
    #[arg(help_heading = headings::LOCKS)]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_MAX_WAIT", default_value = "25s")]
    #[arg(value_parser = duration(Duration::ZERO..=DAY))]
    pub max_wait: Duration,
    /// Longest time that a lock may be held, extensions included
    #[arg(help_heading = headings::LOCKS)]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_MAX_HOLD", default_value = "24h")]
    #[arg(value_parser = duration(Duration::ZERO..=MAX_HOLD))]
    pub max_hold: Duration,
}

const MAX_HOLD: Duration = DAY.saturating_mul(365);

fn half_of_the_cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).max(1))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnAuditFailure {
    /// Requests are served
    Allow,
    /// Requests are answered 503 until the audit log can be written again
    Refuse,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PublicPage {
    Docs,
    Metrics,
    /// No page
    None,
}

/// Settings that go together, and values derived from them. Only the code that starts the program
/// sees all of them: `main`, `serve` and `commands`. Each layer gets its own part.
#[derive(Debug, Clone)]
pub struct Config {
    pub settings: Settings,
    pub nodes: Nodes,
    pub node_password: NodePassword,
    pub node_tls: TlsSettings,
    /// The files for HTTPS, if it is served.
    pub https: Option<TlsFiles>,
    /// Origins whose pages may call the API. None by default.
    pub cors_origins: Vec<Origin>,
    /// Host names of this gateway, in lower case.
    pub allowed_hosts: Vec<String>,
    pub trusted_proxies: TrustedProxies,
    /// Where callbacks may go. `None` if none are sent.
    pub callbacks: Option<CallbackSettings>,
    pub public: Public,
    pub groups: Vec<Group>,
    pub capacity: Capacity,
}

/// Pages that need no key on a gateway with API keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Public {
    pub docs: bool,
    pub metrics: bool,
}

/// Why settings cannot be used together. Each text names the setting, the value and what is
/// allowed, and contains the text of its source.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error(
        "--listen: {0} is reachable from other machines and there are no API keys: anybody could \
         take and release locks; give --auth-keys, or listen on a loopback address, or give \
         --allow-anonymous if the network is trusted"
    )]
    OpenToAll(SocketAddr),
    #[error("--admin-listen: {operators} overlaps with --listen {clients}; give another port")]
    AddressesOverlap { clients: SocketAddr, operators: SocketAddr },
    #[error(
        "--allow-anonymous: not allowed beside --auth-keys {}: with keys nobody is served without \
         one; leave out one of the two",
        .0.display()
    )]
    AnonymousBesideKeys(PathBuf),
    #[error(
        "--default-ttl: {} is longer than --max-ttl, {}",
        show(default.duration()),
        show(max.duration())
    )]
    DefaultTtlTooLong { default: Ttl, max: Ttl },
    #[error(
        "--max-hold: {} is shorter than --max-ttl; expected {} to {}",
        show(*given),
        show(max_ttl.duration()),
        show(MAX_HOLD)
    )]
    MaxHoldTooShort { given: Duration, max_ttl: Ttl },
    #[error(
        "--tls-client-ca: {}: given without --auth-keys; a certificate stands for the key that \
         names it, and without keys everybody is let in",
        .0.display()
    )]
    ClientCaWithoutKeys(PathBuf),
    #[error("--audit-on-failure: refuse is given without --audit-log")]
    RefusalWithoutAuditLog,
    #[error("--public: none stands alone; allowed are docs and metrics, or none")]
    PublicAndNone,
    #[error(transparent)]
    Nodes(#[from] NodesError),
    #[error(transparent)]
    TlsFlags(#[from] TlsFlagsError),
    #[error(transparent)]
    CallbackFlags(#[from] CallbackFlagsError),
    #[error(transparent)]
    Value(#[from] InvalidValue),
}

/// Whether one process cannot listen on both addresses. Port 0 is any free port, and `[::]` also
/// accepts IPv4.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let covers = |one: IpAddr, other: IpAddr| {
        one == other || one.is_unspecified() && (one.is_ipv6() || other.is_ipv4())
    };
    let (a, b) = (one.ip().to_canonical(), other.ip().to_canonical());
    one.port() != 0 && one.port() == other.port() && (covers(a, b) || covers(b, a))
}

impl Config {
    /// The limits of one client's waiters.
    pub fn wait_share(&self) -> WaitShare {
        let (settings, waiters) = (&self.settings, self.capacity.waiters);
        WaitShare {
            waiters: settings.max_waiters_per_client.unwrap_or(waiters.div_ceil(4)),
            locks: settings.max_waited_locks_per_client,
            places_per_lock: settings.max_waiters_per_lock,
            deferred: waiters.div_ceil(2),
        }
    }

    /// Validates settings against each other. Reads no file but that of the nodes' password.
    ///
    /// # Errors
    /// The flags that do not go together, or the password file that cannot be used.
    pub fn new(settings: Settings) -> Result<Self, ConfigError> {
        let Limits { default_ttl, max_ttl, max_hold, .. } = settings.limits;
        let listen = settings.listen;
        let keys = settings.auth_keys.as_ref();
        if !listen.ip().is_loopback() && !settings.allow_anonymous && keys.is_none() {
            return Err(ConfigError::OpenToAll(listen));
        }
        if let Some(operators) = settings.admin_listen.filter(|other| overlap(listen, *other)) {
            return Err(ConfigError::AddressesOverlap { clients: listen, operators });
        }
        if let Some(keys) = keys.filter(|_| settings.allow_anonymous) {
            return Err(ConfigError::AnonymousBesideKeys(keys.clone()));
        }
        if default_ttl > max_ttl {
            return Err(ConfigError::DefaultTtlTooLong { default: default_ttl, max: max_ttl });
        }
        if max_hold < max_ttl.duration() {
            return Err(ConfigError::MaxHoldTooShort { given: max_hold, max_ttl });
        }
        let node_password = NodePassword::read(settings.node_password_file.as_deref())?;
        let nodes = nodes(&settings, &node_password)?;
        let any_tls = matches!(&nodes, Nodes::Redis(urls) if urls.iter().any(|url| url.is_tls()));
        let (https, node_tls) = settings.tls.clone().resolve(any_tls)?;
        if let (Some(TlsFiles { client_ca: Some(path), .. }), None) = (&https, keys) {
            return Err(ConfigError::ClientCaWithoutKeys(path.clone()));
        }
        if settings.audit_on_failure == OnAuditFailure::Refuse && settings.audit_log.is_none() {
            return Err(ConfigError::RefusalWithoutAuditLog);
        }
        let cors_origins = value::origins("--cors-origin", &settings.cors_origins)?;
        let allowed_hosts =
            listed(&settings.allowed_hosts).map(value::host).collect::<Result<_, _>>()?;
        let network = |text| value::network("--trusted-proxy", text);
        let trusted_proxies = listed(&settings.trusted_proxies).map(network);
        let trusted_proxies = trusted_proxies.collect::<Result<_, _>>()?;
        let trusted_proxies = TrustedProxies::new(trusted_proxies);
        let callbacks = settings.callbacks.resolve()?;
        let public = public(&settings.public)?;
        let groups = value::groups(&settings.groups)?;
        let capacity = Capacity::new(Given {
            budget: settings.memory_budget.unwrap_or_else(capacity::default_budget),
            connections: settings.max_connections,
            connections_per_client: settings.max_connections_per_client,
            waiters: settings.max_waiters,
            in_flight: settings.max_in_flight,
            transport: match &https {
                None => Transport::Plain,
                Some(files) if files.http2 => Transport::Http2,
                Some(_) => Transport::Tls,
            },
            embedded: matches!(nodes, Nodes::Embedded(_)),
        });
        Ok(Self {
            settings,
            nodes,
            node_password,
            node_tls,
            https,
            cors_origins,
            allowed_hosts,
            trusted_proxies,
            callbacks,
            public,
            groups,
            capacity,
        })
    }

    pub fn drain_delay(&self) -> Duration {
        let usual =
            if self.settings.listen.ip().is_loopback() { Duration::ZERO } else { DRAIN_DELAY };
        self.settings.drain_delay.unwrap_or(usual)
    }
}

fn nodes(settings: &Settings, password: &NodePassword) -> Result<Nodes, NodesError> {
    let is_open = !settings.listen.ip().is_loopback();
    let given = nodes::Given {
        urls: &settings.nodes,
        embedded: settings.embedded,
        password_file: settings.node_password_file.as_deref(),
    };
    given.resolve(password, is_open.then_some(settings.listen))
}

fn public(pages: &[PublicPage]) -> Result<Public, ConfigError> {
    let has = |page| pages.contains(&page);
    if has(PublicPage::None) && pages.iter().any(|page| *page != PublicPage::None) {
        return Err(ConfigError::PublicAndNone);
    }
    Ok(Public { docs: has(PublicPage::Docs), metrics: has(PublicPage::Metrics) })
}
