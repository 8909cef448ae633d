//! Flags, environment and file to validated plain values, before anything is bound or connected.
//!
//! A flag beats its environment variable, which beats the file, which beats the default. Every error names the setting,
//! the value and what is allowed; no error shows a password.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use redlock_core::Ttl;
use redlock_core::node::redis::{RedisUrl, TlsSettings};
use serde::Deserialize;

mod origin;
#[cfg(test)]
mod properties;
mod tls;

pub use self::origin::Origin;
pub use self::tls::{TlsFiles, TlsFlags};
use crate::auth::{Keys, Verb, is_key_name};
pub use crate::limits::Limits;

/// Distributed locks over plain HTTP, on independent Redis masters.
///
/// Without --node it starts five in-memory nodes inside this process: good for trying it out, without any durability.
/// With --node (once for each master; 3 or 5 is right) it uses those and nothing else.
///
/// Try:  curl -i -X POST http://127.0.0.1:8080/locks/demo
#[derive(Debug, Parser)]
#[command(version, about, long_about, args_conflicts_with_subcommands = true, max_term_width = 120)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Option<Command>,
    #[command(flatten)]
    pub flags: Flags,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve locks over HTTP (the default).
    Serve(Flags),
    /// Make API keys.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Print the OpenAPI document.
    Openapi {
        /// Version of the OpenAPI specification: 3.1, or its twin in 3.0 for generators that know no newer one.
        #[arg(long, default_value = "3.1", value_parser = ["3.0", "3.1"])]
        version: String,
    },
    /// Validate the configuration and look at every node; exit 1 when no majority of nodes would be admitted.
    Check(Flags),
    /// After an intended change of the node set or of max_ttl: stop the votes of the given nodes, wait until no lock of
    /// the old configuration can live, and write the new markers. All nodes must answer. It can be interrupted and run
    /// again. Stop the old gateways before: one that still runs takes a leaving node up again if that loses its data.
    Reconfigure {
        /// Do it. Without this flag it only says what it would do.
        #[arg(long)]
        yes: bool,
        /// When the node set changes: a node that the gateways used until now; repeat for each, also for those that stay.
        #[arg(long = "old-node", value_name = "URL")]
        old_nodes: Vec<String>,
        /// The --cluster that the gateways used until now, if they used one.
        #[arg(long, value_name = "NAME")]
        old_cluster: Option<String>,
        #[command(flatten)]
        flags: Flags,
    },
}

#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Make a key: prints it once, and what stands for it in the file of --auth-keys. Nothing is stored.
    ///
    /// The first line is the key; the rest is TOML, to be appended to the file. To replace a key without locking anybody
    /// out, put the new hash beside the old one in `hashes`, and take the old one out when nobody uses it any more.
    New {
        /// The principal, 1 to 64 characters of [A-Za-z0-9_-]; locks belong to it, whichever of its keys acquired them
        #[arg(value_parser = parse_key_name)]
        name: String,
        /// What it may do, separated by commas
        #[arg(
            long,
            value_name = "LIST",
            value_enum,
            value_delimiter = ',',
            default_value = "acquire,extend,release,inspect"
        )]
        verbs: Vec<Verb>,
        /// To which locks, separated by commas: exact names, or patterns with * for any text
        #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "*")]
        names: Vec<String>,
        /// Until when, such as 2027-01-31 or 2027-01-31T12:00:00Z [default: for ever]
        #[arg(long, value_name = "DATE")]
        expires: Option<String>,
    },
}

/// Every setting; each can also stand in the file given by --config, under the same name with underscores.
#[derive(Debug, Clone, Default, Args)]
pub struct Flags {
    /// Address and port to listen on [default: 127.0.0.1:8080]
    ///
    /// An address that is not loopback is refused without --auth-keys, unless --allow-anonymous is given.
    #[arg(long, value_name = "ADDR", env = "REDLOCK_LISTEN")]
    pub listen: Option<String>,
    /// A Redis master, redis://[[user]:password@]host[:port][/db] or rediss:// for TLS; repeat for each [default: five
    /// in-memory nodes]
    #[arg(long = "node", value_name = "URL", env = "REDLOCK_NODES", value_delimiter = ',', hide_env_values = true)]
    pub nodes: Vec<String>,
    #[command(flatten)]
    pub tls: TlsFlags,
    /// TOML file with settings
    #[arg(long, value_name = "FILE", env = "REDLOCK_CONFIG")]
    pub config: Option<PathBuf>,
    /// TTL of a lock when the request names none [default: 30s]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_DEFAULT_TTL")]
    pub default_ttl: Option<String>,
    /// Longest TTL a request may ask for [default: 5m]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_MAX_TTL")]
    pub max_ttl: Option<String>,
    /// Longest time a request may wait for a lock [default: 25s]
    ///
    /// Proxies and load balancers in front must allow more than this: many cut requests off at 29 to 60 seconds.
    #[arg(long, value_name = "DURATION", env = "REDLOCK_MAX_WAIT")]
    pub max_wait: Option<String>,
    /// Longest time a lock may be held by extending it [default: 24h]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_MAX_HOLD")]
    pub max_hold: Option<String>,
    /// How long a round waits for a node; never more than a tenth of the TTL [default: 50ms]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_NODE_TIMEOUT")]
    pub node_timeout: Option<String>,
    /// Part of a TTL that clocks running at different rates may eat [default: 0.01]
    #[arg(long, value_name = "FACTOR", env = "REDLOCK_DRIFT_FACTOR", value_parser = parse_factor)]
    pub drift_factor: Option<f64>,
    /// How far apart the clocks of gateways and nodes may be [default: 2s]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_CLOCK_SKEW")]
    pub clock_skew: Option<String>,
    /// Put before a lock's name to make its key on the nodes; may be empty [default: lock:]
    #[arg(long, value_name = "TEXT", env = "REDLOCK_KEY_PREFIX")]
    pub key_prefix: Option<String>,
    /// Requests that may wait for a lock at the same time; more are answered 429 [default: 10000]
    ///
    /// Each keeps a connection: --max-connections should be larger.
    #[arg(long, value_name = "N", env = "REDLOCK_MAX_WAITERS", value_parser = parse_count)]
    pub max_waiters: Option<usize>,
    /// Requests that may wait for the same lock; more are answered 429 [default: 1024]
    #[arg(long, value_name = "N", env = "REDLOCK_MAX_WAITERS_PER_LOCK", value_parser = parse_count)]
    pub max_waiters_per_lock: Option<usize>,
    /// Open connections; more are closed at once [default: 16000]
    #[arg(long, value_name = "N", env = "REDLOCK_MAX_CONNECTIONS", value_parser = parse_count)]
    pub max_connections: Option<usize>,
    /// How long a connection may be idle, or take to send the head of a request, before it is closed [default: 75s]
    ///
    /// Should exceed what proxies and client pools in front keep idle connections for (often 60s): they would use one
    /// that was just closed.
    #[arg(long, value_name = "DURATION", env = "REDLOCK_IDLE_TIMEOUT")]
    pub idle_timeout: Option<String>,
    /// Requests being worked on at the same time, waiting ones not counted; more are answered 503 [default: 4096]
    #[arg(long, value_name = "N", env = "REDLOCK_MAX_IN_FLIGHT", value_parser = parse_count)]
    pub max_in_flight: Option<usize>,
    /// Threads that serve requests [default: half of the cores, at least 1]
    ///
    /// The kernel's side of the network, and often the masters, need the other half; threads that wake each other up for
    /// little work cost more than they bring.
    #[arg(long, value_name = "N", env = "REDLOCK_WORKER_THREADS", value_parser = parse_count)]
    pub worker_threads: Option<usize>,
    /// Name of the node set, where gateways reach the same nodes under different addresses [default: the list of nodes]
    ///
    /// Nodes are then known by their place in the list: give them in the same order to all gateways. A name stands for one
    /// list: give a changed list a new name and `reconfigure`, or gateways with both lists vote side by side.
    #[arg(long, value_name = "NAME", env = "REDLOCK_CLUSTER")]
    pub cluster: Option<String>,
    /// Let a brand-new cluster vote at once: only when all nodes answer, none has a marker, and no gateway without this
    /// flag saw that first
    ///
    /// Without it the nodes of a new cluster wait for --max-ttl + --clock-skew, as nodes do that lost all their data: the
    /// two look alike. For the first start only: take it out again. Of a cluster that was in use, first wait as long
    /// yourself.
    #[arg(long, env = "REDLOCK_BOOTSTRAP", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub bootstrap: Option<bool>,
    /// TOML file with the API keys; without it there are none, and everybody who can connect may take and release locks
    ///
    /// Read again when it changes, and on SIGHUP; a broken one changes nothing. See `key new`.
    #[arg(long, value_name = "FILE", env = "REDLOCK_AUTH_KEYS")]
    pub auth_keys: Option<PathBuf>,
    /// What may be read without a key, where there are keys, separated by commas [default: docs]
    ///
    /// The status of /livez and /readyz always; the nodes in /readyz take a key with the metrics permission.
    #[arg(long, value_name = "LIST", env = "REDLOCK_PUBLIC", value_enum, value_delimiter = ',')]
    pub public: Vec<PublicPage>,
    /// File to append the audit log to, a JSON object a line: everything that changes a lock, and what was denied
    ///
    /// Opened anew on SIGHUP. Without it forced releases and what was denied are in the log, as redlock_audit.
    #[arg(long, value_name = "FILE", env = "REDLOCK_AUDIT_LOG")]
    pub audit_log: Option<PathBuf>,
    /// Serve anybody who can connect, also on an address that is not loopback
    #[arg(long, env = "REDLOCK_ALLOW_ANONYMOUS", num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    pub allow_anonymous: Option<bool>,
    /// Let scripts of web pages of this origin call, scheme://host[:port]; repeat for each [default: none]
    #[arg(long = "cors-origin", value_name = "ORIGIN", env = "REDLOCK_CORS_ORIGINS", value_delimiter = ',')]
    pub cors_origins: Vec<String>,
    /// Log lines as text or as JSON [default: text on a terminal, else json]; the level is set by RUST_LOG
    #[arg(long, value_name = "FORMAT", env = "REDLOCK_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
    /// On SIGTERM or SIGINT, how long requests in flight may take before the process exits [default: 20s]
    #[arg(long, value_name = "DURATION", env = "REDLOCK_SHUTDOWN_GRACE")]
    pub shutdown_grace: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PublicPage {
    Docs,
    Metrics,
    /// Nothing
    None,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    auth_keys: Option<PathBuf>,
    public: Option<Vec<PublicPage>>,
    audit_log: Option<PathBuf>,
    listen: Option<String>,
    tls_cert: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_client_ca: Option<PathBuf>,
    nodes: Option<Vec<String>>,
    node_ca: Option<PathBuf>,
    node_cert: Option<PathBuf>,
    node_key: Option<PathBuf>,
    default_ttl: Option<String>,
    max_ttl: Option<String>,
    max_wait: Option<String>,
    max_hold: Option<String>,
    node_timeout: Option<String>,
    drift_factor: Option<f64>,
    clock_skew: Option<String>,
    key_prefix: Option<String>,
    max_waiters: Option<usize>,
    max_waiters_per_lock: Option<usize>,
    max_connections: Option<usize>,
    idle_timeout: Option<String>,
    max_in_flight: Option<usize>,
    worker_threads: Option<usize>,
    cluster: Option<String>,
    bootstrap: Option<bool>,
    allow_anonymous: Option<bool>,
    cors_origins: Option<Vec<String>>,
    log_format: Option<LogFormat>,
    shutdown_grace: Option<String>,
}

/// The validated whole. Only `main` and `lib` see it; each room gets the part it needs.
#[derive(Debug, Clone)]
pub struct Config {
    pub listen: SocketAddr,
    /// HTTPS, where it is given.
    pub tls: Option<TlsFiles>,
    pub nodes: Nodes,
    pub node_tls: TlsSettings,
    pub limits: Limits,
    pub node_timeout: Duration,
    pub drift_factor: f64,
    pub clock_skew: Duration,
    pub key_prefix: String,
    pub cluster: Option<String>,
    pub bootstrap: bool,
    pub max_waiters: usize,
    pub max_waiters_per_lock: usize,
    pub max_connections: usize,
    pub idle_timeout: Duration,
    pub max_in_flight: usize,
    pub worker_threads: usize,
    /// Whose pages may call; none by default.
    pub cors_origins: Vec<Origin>,
    pub log_format: Option<LogFormat>,
    pub shutdown_grace: Duration,
    pub auth_keys: Option<PathBuf>,
    pub public: Public,
    pub audit_log: Option<PathBuf>,
}

/// What may be read without a key, where there are keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Public {
    pub docs: bool,
    pub metrics: bool,
}

/// Where the locks live.
#[derive(Debug, Clone)]
pub enum Nodes {
    /// So many in-memory nodes in this process.
    Embedded(usize),
    Redis(Vec<RedisUrl>),
}

/// A setting that cannot be used: its name, what is wrong with the value, and what is allowed.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError(String);

impl std::fmt::Display for ConfigError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

const EMBEDDED_NODES: usize = 5;
const MAX_WORKER_THREADS: usize = 1024;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

impl Config {
    pub fn load(flags: Flags) -> Result<Self, ConfigError> {
        let file = match &flags.config {
            Some(path) => read_file(path)?,
            None => File::default(),
        };
        let config = Self::merge(flags, file)?;
        tls::check(config.tls.as_ref(), &config.node_tls)?;
        if let Some(keys) = &config.auth_keys {
            Keys::read(keys).map_err(|error| ConfigError(format!("--auth-keys: {error}")))?;
        }
        Ok(config)
    }

    fn merge(flags: Flags, file: File) -> Result<Self, ConfigError> {
        let listen = flags.listen.or(file.listen).unwrap_or_else(|| "127.0.0.1:8080".into());
        let listen: SocketAddr = listen.parse().map_err(|_| {
            ConfigError(format!(
                "--listen: {} is no address; expected IP:PORT, such as 127.0.0.1:8080 or [::1]:8080",
                quoted(&listen)
            ))
        })?;
        let allow_anonymous = flags.allow_anonymous.or(file.allow_anonymous).unwrap_or(false);
        let auth_keys = flags.auth_keys.or(file.auth_keys);
        if !listen.ip().is_loopback() && !allow_anonymous && auth_keys.is_none() {
            return Err(ConfigError(format!(
                "--listen: {listen} is reachable from other machines and there are no API keys: anybody could take and \
                 release locks; give --auth-keys, or listen on a loopback address, or say --allow-anonymous if the \
                 network is trusted"
            )));
        }
        if allow_anonymous && let Some(keys) = &auth_keys {
            return Err(ConfigError(format!(
                "--allow-anonymous: not allowed beside --auth-keys {}: with keys nobody is served without one; leave out \
                 one of the two",
                keys.display()
            )));
        }
        let public = if flags.public.is_empty() { file.public } else { Some(flags.public) };

        let max_ttl = ttl("--max-ttl", flags.max_ttl.or(file.max_ttl), "5m", Ttl::MAX)?;
        let default_ttl = ttl("--default-ttl", flags.default_ttl.or(file.default_ttl), "30s", Ttl::MAX)?;
        if default_ttl > max_ttl {
            return Err(ConfigError(format!(
                "--default-ttl: {} is longer than --max-ttl, {}",
                show(default_ttl.duration()),
                show(max_ttl.duration())
            )));
        }
        let limits = Limits {
            default_ttl,
            max_ttl,
            max_wait: duration("--max-wait", flags.max_wait.or(file.max_wait), "25s", Duration::ZERO..=DAY)?,
            max_hold: duration("--max-hold", flags.max_hold.or(file.max_hold), "24h", max_ttl.duration()..=DAY * 365)?,
        };
        let second = Duration::from_secs(1);
        let node_timeout = flags.node_timeout.or(file.node_timeout);
        let node_timeout = duration("--node-timeout", node_timeout, "50ms", second / 1000..=second * 10)?;
        let clock_skew = flags.clock_skew.or(file.clock_skew);
        // Fences outlive a grant by half an hour, which has to exceed what clocks may differ by.
        let clock_skew = duration("--clock-skew", clock_skew, "2s", second / 10..=second * 600)?;
        let idle_timeout = flags.idle_timeout.or(file.idle_timeout);
        let idle_timeout = duration("--idle-timeout", idle_timeout, "75s", second..=second * 3600)?;
        let shutdown_grace = flags.shutdown_grace.or(file.shutdown_grace);
        let shutdown_grace = duration("--shutdown-grace", shutdown_grace, "20s", Duration::ZERO..=second * 3600)?;
        let drift_factor = flags.drift_factor.or(file.drift_factor).unwrap_or(0.01);
        if !(0.0..=0.5).contains(&drift_factor) {
            return Err(ConfigError(format!("--drift-factor: {drift_factor} is not allowed; {FACTORS}")));
        }
        let key_prefix = flags.key_prefix.or(file.key_prefix).unwrap_or_else(|| "lock:".into());
        if key_prefix.len() > 255 || key_prefix.chars().any(|c| matches!(c, '{' | '}') || c.is_control()) {
            return Err(ConfigError(format!(
                "--key-prefix: {} is not allowed; at most 255 bytes without braces or control characters",
                quoted(&key_prefix)
            )));
        }
        let nodes = nodes(flags.nodes, file.nodes)?;
        let tls = TlsFlags {
            tls_cert: file.tls_cert,
            tls_key: file.tls_key,
            tls_client_ca: file.tls_client_ca,
            node_ca: file.node_ca,
            node_cert: file.node_cert,
            node_key: file.node_key,
        };
        let (tls, node_tls) = flags.tls.or(tls).settle(&nodes)?;
        if let (Some(TlsFiles { client_ca: Some(path), .. }), None) = (&tls, &auth_keys) {
            return Err(ConfigError(format!(
                "--tls-client-ca: {}: given without --auth-keys; a certificate is let in as the key that names it, and \
                 without keys everybody is",
                path.display()
            )));
        }
        Ok(Self {
            listen,
            tls,
            nodes,
            node_tls,
            limits,
            node_timeout,
            drift_factor,
            clock_skew,
            key_prefix,
            cluster: flags.cluster.or(file.cluster),
            bootstrap: flags.bootstrap.or(file.bootstrap).unwrap_or(false),
            max_waiters: count("--max-waiters", flags.max_waiters.or(file.max_waiters), 10_000)?,
            max_waiters_per_lock: count(
                "--max-waiters-per-lock",
                flags.max_waiters_per_lock.or(file.max_waiters_per_lock),
                1_024,
            )?,
            max_connections: count("--max-connections", flags.max_connections.or(file.max_connections), 16_000)?,
            idle_timeout,
            max_in_flight: count("--max-in-flight", flags.max_in_flight.or(file.max_in_flight), 4_096)?,
            worker_threads: worker_threads(flags.worker_threads.or(file.worker_threads))?,
            cors_origins: origin::origins(flags.cors_origins, file.cors_origins)?,
            log_format: flags.log_format.or(file.log_format),
            shutdown_grace,
            auth_keys,
            public: public_pages(public.as_deref())?,
            audit_log: flags.audit_log.or(file.audit_log),
        })
    }
}

fn public_pages(given: Option<&[PublicPage]>) -> Result<Public, ConfigError> {
    use PublicPage as P;
    let pages = given.unwrap_or(&[P::Docs]);
    let has = |page| pages.contains(&page);
    if has(P::None) && pages.iter().any(|page| *page != P::None) {
        return Err(ConfigError("--public: none stands alone; allowed are docs and metrics, or none".into()));
    }
    Ok(Public { docs: has(P::Docs), metrics: has(P::Metrics) })
}

fn worker_threads(given: Option<usize>) -> Result<usize, ConfigError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    match given {
        Some(threads) if threads > MAX_WORKER_THREADS => Err(ConfigError(format!(
            "--worker-threads: {threads} is not allowed; allowed are 1 to {MAX_WORKER_THREADS}"
        ))),
        given => count("--worker-threads", given, (cores / 2).max(1)),
    }
}

fn read_file(path: &Path) -> Result<File, ConfigError> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| ConfigError(format!("--config: {shown}: {error}")))?;
    file_from(&shown.to_string(), &text)
}

fn file_from(shown: &str, text: &str) -> Result<File, ConfigError> {
    // The error's own display quotes the line, which may hold a node's password.
    toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count());
        let key = text.lines().nth(at).and_then(|line| line.split_once('=')).map_or("", |(key, _)| key.trim());
        let is_key = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        let key = if is_key { format!(", {key}") } else { String::new() };
        let message = without_credentials(error.message());
        ConfigError(format!("--config: {shown}, line {}{key}: {message}", at + 1))
    })
}

/// A URL in the wrong place is quoted by the parser's message, credentials and all.
fn without_credentials(text: &str) -> String {
    match (text.find("://"), text.rfind('@')) {
        (Some(scheme), Some(host)) if scheme < host => format!("{}://…{}", &text[..scheme], &text[host..]),
        _ => text.to_owned(),
    }
}

/// A value that is refused. A node's URL may stand where another setting was meant.
fn quoted(value: &str) -> String {
    format!("{:?}", without_credentials(value))
}

fn nodes(flags: Vec<String>, file: Option<Vec<String>>) -> Result<Nodes, ConfigError> {
    let texts: Vec<String> = if flags.is_empty() { file.unwrap_or_default() } else { flags };
    let texts: Vec<_> = texts.iter().map(|text| text.trim()).filter(|text| !text.is_empty()).collect();
    if texts.is_empty() {
        return Ok(Nodes::Embedded(EMBEDDED_NODES));
    }
    let mut urls: Vec<RedisUrl> = Vec::with_capacity(texts.len());
    for (index, text) in texts.iter().enumerate() {
        let url =
            RedisUrl::parse(text).map_err(|error| ConfigError(format!("--node, number {}: {error}", index + 1)))?;
        if urls.iter().any(|other| other.name() == url.name()) {
            return Err(ConfigError(format!("--node: {url} is given twice; a quorum needs independent masters")));
        }
        urls.push(url);
    }
    let max = redlock_core::quorum::Quorum::MAX_NODES;
    if urls.len() > max {
        return Err(ConfigError(format!("--node: {} nodes given; allowed are 1 to {max}", urls.len())));
    }
    Ok(Nodes::Redis(urls))
}

fn duration(
    flag: &str,
    given: Option<String>,
    default: &str,
    allowed: std::ops::RangeInclusive<Duration>,
) -> Result<Duration, ConfigError> {
    let text = given.as_deref().unwrap_or(default);
    let allow = || format!("expected {} to {}, such as {default}", show(*allowed.start()), show(*allowed.end()));
    let value = humantime::parse_duration(text.trim())
        .map_err(|_| ConfigError(format!("{flag}: {} is no duration; {}", quoted(text), allow())))?;
    if allowed.contains(&value) {
        Ok(value)
    } else {
        Err(ConfigError(format!("{flag}: {text} is not allowed; {}", allow())))
    }
}

fn ttl(flag: &str, given: Option<String>, default: &str, max: Ttl) -> Result<Ttl, ConfigError> {
    let value = duration(flag, given, default, Ttl::MIN.duration()..=max.duration())?;
    Ttl::from_duration(value)
        .ok_or_else(|| ConfigError(format!("{flag}: {} is not allowed; expected whole milliseconds", show(value))))
}

fn count(flag: &str, given: Option<usize>, default: usize) -> Result<usize, ConfigError> {
    match given.unwrap_or(default) {
        n @ 1..=1_000_000 => Ok(n),
        n => Err(ConfigError(format!("{flag}: {n} is not allowed; {COUNTS}"))),
    }
}

const COUNTS: &str = "expected 1 to 1000000";
const FACTORS: &str = "expected 0.0 to 0.5";

/// What is no number at all is told what is allowed, as a number out of range is.
fn parse_count(text: &str) -> Result<usize, &'static str> {
    text.parse().map_err(|_| COUNTS)
}

fn parse_key_name(text: &str) -> Result<String, &'static str> {
    if is_key_name(text) {
        Ok(text.into())
    } else {
        Err("expected 1 to 64 characters of [A-Za-z0-9_-], and not anonymous")
    }
}

fn parse_factor(text: &str) -> Result<f64, &'static str> {
    text.parse().map_err(|_| FACTORS)
}

pub fn show(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(flags: Flags, file: &str) -> Result<Config, ConfigError> {
        Config::merge(flags, toml::from_str(file).map_err(|error| ConfigError(error.message().to_owned()))?)
    }

    #[test]
    fn defaults_are_embedded_on_loopback() {
        let config = load(Flags::default(), "").unwrap();
        assert!(config.listen.ip().is_loopback());
        assert!(matches!(config.nodes, Nodes::Embedded(5)));
        assert_eq!((config.limits.default_ttl.millis(), config.limits.max_ttl.millis()), (30_000, 300_000));
    }

    #[test]
    fn flags_beat_the_file_and_the_file_beats_the_defaults() {
        let file = "max_ttl = '1m'\ndefault_ttl = '5s'\nnodes = ['redis://a:1', 'redis://b:2', 'redis://c:3']";
        let flags = Flags { default_ttl: Some("7s".into()), ..Flags::default() };
        let config = load(flags, file).unwrap();
        assert_eq!((config.limits.default_ttl.millis(), config.limits.max_ttl.millis()), (7_000, 60_000));
        assert!(matches!(config.nodes, Nodes::Redis(urls) if urls.len() == 3));
    }

    #[test]
    fn errors_name_the_setting_the_value_and_what_is_allowed() {
        let node = |text: &str| Flags { nodes: vec![text.into()], ..Flags::default() };
        let cases = [
            (
                Flags { listen: Some("0.0.0.0:80".into()), ..Flags::default() },
                "",
                ["--listen", "0.0.0.0:80", "--allow-anonymous"],
            ),
            (Flags { listen: Some("here".into()), ..Flags::default() }, "", ["--listen", "here", "IP:PORT"]),
            (Flags { max_ttl: Some("fast".into()), ..Flags::default() }, "", ["--max-ttl", "fast", "10ms to 1day"]),
            (Flags { max_ttl: Some("2days".into()), ..Flags::default() }, "", ["--max-ttl", "2days", "10ms to 1day"]),
            (Flags { max_ttl: Some("5s".into()), ..Flags::default() }, "", ["--default-ttl", "30s", "5s"]),
            (Flags { drift_factor: Some(0.9), ..Flags::default() }, "", ["--drift-factor", "0.9", "0.0 to 0.5"]),
            (Flags { max_in_flight: Some(0), ..Flags::default() }, "", ["--max-in-flight", "0", "1 to 1000000"]),
            (Flags { key_prefix: Some("a{b".into()), ..Flags::default() }, "", ["--key-prefix", "a{b", "braces"]),
            (node("http://x"), "", ["--node", "number 1", "rediss://"]),
            (Flags::default(), "nodes = ['redis://a:1', 'redis://u:p@a:1']", ["--node", "a:1", "twice"]),
            (Flags::default(), "max_tll = '5m'", ["max_tll", "unknown field", "max_ttl"]),
        ];
        for (flags, file, words) in cases {
            let error = load(flags, file).unwrap_err().to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error:?} lacks one of {words:?}");
        }
    }

    #[test]
    fn a_broken_file_does_not_leak_the_password_on_its_line() {
        let path = std::env::temp_dir().join(format!("redlock-config-test-{}.toml", std::process::id()));
        std::fs::write(&path, "max_ttl = '5m'\nnodes = ['redis://:hunter2@a:1\n").unwrap();
        let error = read_file(&path).unwrap_err().to_string();
        assert!(error.contains("line 2") && !error.contains("hunter2"), "{error}");
        std::fs::write(&path, "nodes = 'redis://:hunter2@a:1'\n").unwrap();
        let error = read_file(&path).unwrap_err().to_string();
        std::fs::remove_file(&path).unwrap();
        assert!(error.contains("line 1, nodes: ") && error.contains("redis://…@a:1"), "{error}");
    }
}
