//! The program: parses the command line, starts telemetry, and runs the command.

use std::fmt::Display;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::SystemTime;

use clap::CommandFactory;
use redlock_core::node::eligibility::quarantine;
use redlock_gateway::cli::{Cli, Command, KeyCommand};
use redlock_gateway::commands::CommandError;
use redlock_gateway::config::{self, Config, ConfigError, LogFormat, Nodes, Settings, show};
use redlock_gateway::output::print_error;
use redlock_gateway::telemetry::FilterError;
use redlock_gateway::{
    Reload, Running, ServeError, check_files, commands, http, listeners, run, telemetry,
    within_descriptors,
};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

/// Number of task polls after which a busy tokio thread checks its sockets. With tokio's default of
/// 61, replies of the masters would wait for a few milliseconds behind other requests.
const POLLS_BETWEEN_SOCKETS: u32 = 16;

/// Exit code for an unusable flag, variable or file. clap uses the same code for an unknown flag.
const UNUSABLE: u8 = 2;

/// An unusable flag, variable or file: the command has done nothing.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error(transparent)]
    Files(#[from] ServeError),
    #[error(transparent)]
    LogFilter(#[from] FilterError),
    #[error(transparent)]
    Runtime(io::Error),
    #[error(transparent)]
    Key(#[from] CommandError),
    #[error("{}: {source}", dir.display())]
    ManualPages { dir: PathBuf, source: io::Error },
}

fn main() -> ExitCode {
    let line: Vec<_> = std::env::args_os().collect();
    let cli = config::parse::<Cli, Settings>(&line).unwrap_or_else(|error| error.exit());
    let mut log_format = None;
    let done = match cli.command.unwrap_or(Command::Serve(cli.settings)) {
        Command::Serve(settings) => {
            log_format = settings.log_format;
            on_runtime(settings, serve)
        }
        Command::Key(KeyCommand::New { name, verbs, names, expires, out, auth_keys }) => {
            let key = commands::new_key(&name, &verbs, &names, expires.as_deref());
            let text = key.and_then(|key| match &out {
                None => Ok(key.text()),
                Some(path) => key.write(path),
            });
            text.map_err(Unusable::from).map(|text| {
                print!("{text}");
                // With --out, the output has no secret.
                let output = out.is_none().then(io::stdout);
                for warning in commands::exposures(auth_keys.as_deref(), output.as_ref()) {
                    eprintln!("redlock-gateway: warning: {warning}");
                }
                ExitCode::SUCCESS
            })
        }
        Command::Openapi { version } => Ok(openapi(&version)),
        Command::Completions { shell } => {
            clap_complete::generate(
                shell,
                &mut Cli::command(),
                "redlock-gateway",
                &mut std::io::stdout(),
            );
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { dir } => {
            let written = clap_mangen::generate_to(Cli::command(), &dir);
            written
                .map(|()| ExitCode::SUCCESS)
                .map_err(|source| Unusable::ManualPages { dir, source })
        }
        Command::Check(settings) => {
            on_runtime(settings, async |config| match commands::check(&config).await {
                true => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            })
        }
        Command::Reconfigure {
            yes,
            old_nodes,
            old_cluster,
            old_max_ttl,
            old_clock_skew,
            no_old_nodes,
            settings,
        } => {
            let old = commands::OldCluster {
                nodes: old_nodes,
                name: old_cluster,
                max_ttl: old_max_ttl,
                clock_skew: old_clock_skew,
                is_none: no_old_nodes,
            };
            on_runtime(settings, async |config| {
                match commands::reconfigure(&config, &old, yes).await {
                    Ok(()) => ExitCode::SUCCESS,
                    Err(error) => fail(None, &error),
                }
            })
        }
    };
    done.unwrap_or_else(|error| {
        fail(log_format, &error);
        ExitCode::from(UNUSABLE)
    })
}

fn on_runtime(
    settings: Settings,
    work: impl AsyncFnOnce(Config) -> ExitCode,
) -> Result<ExitCode, Unusable> {
    let config = Config::new(settings)?;
    check_files(&config)?;
    telemetry::check_filter()?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime
        .worker_threads(config.settings.worker_threads)
        .event_interval(POLLS_BETWEEN_SOCKETS)
        .enable_all();
    let runtime = runtime.build();
    Ok(runtime.map_err(Unusable::Runtime)?.block_on(work(config)))
}

/// Prints an error, whose text contains the texts of its sources. With `--log-format json`, it is
/// a line of JSON with the time, the level and the message, as in the log. RUST_LOG does not turn it
/// off. Flags that clap cannot parse are reported before, as text.
fn fail(format: Option<LogFormat>, error: &impl Display) -> ExitCode {
    print_error(match format {
        Some(LogFormat::Json) => {
            let now = humantime::format_rfc3339_micros(SystemTime::now()).to_string();
            let message = error.to_string();
            let line = json!({ "timestamp": now, "level": "ERROR", "message": message });
            format!("{line}\n")
        }
        _ => format!("redlock-gateway: {error}\n"),
    });
    ExitCode::FAILURE
}

fn openapi(version: &str) -> ExitCode {
    let mut document = http::openapi_document();
    if version == "3.0" {
        document = http::openapi::downgrade(&document);
    }
    println!("{document:#}");
    ExitCode::SUCCESS
}

async fn serve(config: Config) -> ExitCode {
    let terminal = std::io::stdout().is_terminal();
    let asked_format = config.settings.log_format;
    let format = asked_format.unwrap_or(if terminal { LogFormat::Text } else { LogFormat::Json });
    let _log = telemetry::start_logging(format);
    let asked = config.capacity.connections;
    let config = match within_descriptors(config) {
        Ok(config) => config,
        Err(error) => return fail(asked_format, &error),
    };
    let capacity = &config.capacity;
    if capacity.connections < asked {
        tracing::warn!(
            connections = capacity.connections,
            asked,
            "fewer connections are accepted than --max-connections: the other file descriptors are kept for \
             the nodes and the gateway itself; raise ulimit -n"
        );
    }
    if let Some(excess) = capacity.excess() {
        tracing::warn!("{excess}");
    }
    let listeners = match listeners(&config) {
        Ok(listeners) => listeners,
        Err(error) => return fail(asked_format, &error),
    };
    // The signal handlers are installed before the gateway starts. Without a handler, a signal
    // during the start would kill the process at once.
    let (mut terminate, mut interrupt) =
        match (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) {
            (Ok(terminate), Ok(interrupt)) => (terminate, interrupt),
            (Err(error), _) | (_, Err(error)) => return fail(asked_format, &error),
        };
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    let reload = match reload_on_hangup() {
        Ok(reload) => reload,
        Err(error) => return fail(asked_format, &error),
    };
    let banner = config.clone();
    match run(listeners, shutdown, &reload, config, |running| announce(&banner, format, running))
        .await
    {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(asked_format, &error),
    }
}

/// Triggers a reload on each SIGHUP. The handler is installed even if no file is configured,
/// because SIGHUP ends a process that does not handle it.
fn reload_on_hangup() -> std::io::Result<Reload> {
    let mut hangups = signal(SignalKind::hangup())?;
    let reload = Reload::default();
    let asked = reload.clone();
    tokio::spawn(async move {
        while hangups.recv().await.is_some() {
            tracing::info!("SIGHUP: all watched files are read again");
            asked.trigger();
        }
    });
    Ok(reload)
}

/// Tells an operator what runs: on standard error as text, or in the log, if that is JSON.
fn announce(config: &Config, format: LogFormat, running: &Running) {
    let summary = running.gateway.nodes_summary();
    let version = env!("CARGO_PKG_VERSION");
    tracing::info!(address = %running.address, version, nodes = summary, "listening");
    if let Some(admin) = running.admin {
        tracing::info!(address = %admin, "listening for probes and metrics");
    }
    let notices = notices(config, running, &summary);
    match format {
        LogFormat::Json => {
            // The log has the content of the title.
            for notice in notices.into_iter().skip(1) {
                let notice = notice.split_whitespace().collect::<Vec<_>>().join(" ");
                match notice.strip_prefix("CAUTION: ") {
                    Some(caution) => tracing::warn!("{caution}"),
                    None => tracing::info!("{notice}"),
                }
            }
        }
        LogFormat::Text => print_error(notices.join("\n").replace('\n', "\n  ") + "\n"),
    }
}

/// The texts for an operator after the start. The first is a title. Lines end where a terminal of
/// 120 columns needs it.
fn notices(config: &Config, running: &Running, summary: &str) -> Vec<String> {
    let mut told = Vec::new();
    macro_rules! say { ($($word:tt)*) => { told.push(format!($($word)*)) } }
    let (scheme, trust) =
        if config.https.is_some() { ("https", " --cacert AUTHORITY.pem") } else { ("http", "") };
    let url = format!("{scheme}://{}", running.address);
    let settings = &config.settings;
    let default_ttl = settings.limits.default_ttl.duration();
    let max_ttl = settings.limits.max_ttl.duration();
    let admin = running.admin.map_or_else(String::new, |admin| {
        format!("\nprobes and metrics for operators, without keys: http://{admin}")
    });
    say!("redlock-gateway {} on {url}{admin}", env!("CARGO_PKG_VERSION"));
    say!(
        "TTL of a lock: {} if the request gives none, at most {}",
        show(default_ttl),
        show(max_ttl)
    );
    match &config.nodes {
        Nodes::Embedded(count) => {
            say!("nodes: {count} in-memory nodes inside this process (no --node was given)");
            say!(
                "CAUTION: nothing is stored. A restart of this process loses every lock, and a second gateway\n\
                 cannot see the locks of this gateway. For real use start 3 or 5 Redis masters, and give them:\n\
                 \u{20} redlock-gateway --bootstrap --node redis://… --node …   once: new masters vote at once\n\
                 \u{20} redlock-gateway --node redis://… --node …               every later start, and further gateways"
            );
        }
        Nodes::Redis(urls) => {
            let names: Vec<_> = urls.iter().map(|url| url.name()).collect();
            say!("nodes: {} (so far {summary}: {url}/readyz)", names.join(", "));
            let wait = show(quarantine(max_ttl, settings.clock_skew));
            say!(
                "A master that is new, or may have lost locks in a restart, votes after {wait}. A master that syncs\n\
                 every write (appendonly yes, appendfsync always) votes 3 s after a restart."
            );
            if settings.bootstrap {
                say!(
                    "--bootstrap: if all masters are new, they vote after about 2 s. Start no other gateway before\n\
                     {url}/readyz is 200. Leave the flag out from the next start on."
                );
            }
        }
    }
    let key = match &settings.auth_keys {
        None => {
            say!("anybody who can connect can take and release locks: no --auth-keys was given");
            ""
        }
        Some(file) => {
            say!("requests for locks need one of the API keys in {}", file.display());
            if !running.address.ip().is_loopback() && config.https.is_none() {
                say!(
                    "CAUTION: keys and tokens travel as plain text, unless a proxy in front of this gateway speaks TLS."
                );
            }
            " -H \"Authorization: Bearer $KEY\""
        }
    };
    say!("try:  curl -i{trust} -X POST{key} {url}/locks/demo        docs: {url}/docs");
    told
}
