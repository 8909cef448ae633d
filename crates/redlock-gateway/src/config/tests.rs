//! Configurations that settings give, and the errors of unusable settings.

#![cfg(test)]

use clap::Parser;

use super::*;

#[derive(Parser)]
pub(super) struct Line {
    #[command(flatten)]
    settings: Settings,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error(transparent)]
    Line(#[from] clap::Error),
    #[error(transparent)]
    Config(#[from] ConfigError),
}

/// The configuration that these flags and this file give.
pub(super) fn load(flags: &[String], file: &str) -> Result<Config, Refused> {
    let line = ["redlock-gateway".into()]
        .into_iter()
        .chain(flags.iter().map(Into::into))
        .collect::<Vec<_>>();
    let line = file::parse_with::<Line, Settings>(&line, "gateway.toml", file)?;
    Ok(Config::new(line.settings)?)
}

fn labels<const N: usize>(flags: [&str; N]) -> [String; N] {
    flags.map(str::to_owned)
}

#[test]
fn the_command_line_is_well_formed() {
    use clap::CommandFactory;
    crate::cli::Cli::command().debug_assert();
}

/// Flags without a heading stand first in the help.
#[test]
fn only_flags_of_one_command_have_no_heading() {
    use clap::CommandFactory;
    let cli = crate::cli::Cli::command();
    let without_heading = |name: &str| {
        let command = cli.find_subcommand(name).expect("a command");
        let own = command.get_opts().filter(|flag| flag.get_help_heading().is_none());
        own.map(|flag| flag.get_long().expect("a long flag").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(without_heading("serve"), without_heading("check"));
    assert_eq!(without_heading("check"), [""; 0]);
    let own = ["yes", "old-node", "old-cluster", "old-max-ttl", "old-clock-skew", "no-old-nodes"];
    assert_eq!(without_heading("reconfigure"), own);
}

#[test]
fn defaults_are_embedded_on_loopback() {
    let config = load(&[], "").unwrap();
    assert!(config.settings.listen.ip().is_loopback());
    assert!(matches!(config.nodes, Nodes::Embedded(5)));
    let limits = config.settings.limits;
    assert_eq!((limits.default_ttl.millis(), limits.max_ttl.millis()), (30_000, 300_000));
    assert_eq!(config.public, Public { docs: true, metrics: false });
}

#[test]
fn flags_beat_the_file_and_the_file_beats_the_defaults() {
    let file = "max_ttl = '1m'\ndefault_ttl = '5s'\ndrift_factor = 0\nbootstrap = true\nmax_waiters = 7\npublic = []\n\
                nodes = ['redis://a:1', 'redis://:p,q@b:2', 'redis://c:3']\n";
    let config = load(&labels(["--default-ttl=7s", "--bootstrap=false"]), file).unwrap();
    let Settings { limits, drift_factor, bootstrap, .. } = config.settings;
    assert_eq!((limits.default_ttl.millis(), limits.max_ttl.millis()), (7_000, 60_000));
    assert_eq!((drift_factor, bootstrap, config.capacity.waiters), (0.0, false, 7));
    assert_eq!(config.public, Public { docs: false, metrics: false });
    assert!(
        matches!(config.nodes, Nodes::Redis(urls) if urls.len() == 3),
        "a comma in the file divides nothing"
    );
    let Nodes::Redis(urls) = load(&labels(["--node", "redis://d,redis://e"]), file).unwrap().nodes
    else {
        panic!()
    };
    assert_eq!(urls.len(), 2);
}

#[test]
fn errors_name_the_setting_the_value_and_what_is_allowed() {
    let cases = [
        ("--listen=0.0.0.0:80", "", ["--listen", "0.0.0.0:80", "--allow-anonymous"]),
        ("--embedded", "nodes = ['redis://a:1']", ["--embedded", "1 are given", "leave out"]),
        ("--node=", "", ["--node", "names no node", "redis://"]),
        ("", "nodes = []", ["line 1", "nodes", "names no node"]),
        (
            "",
            "listen = '0.0.0.0:80'\nallow_anonymous = true",
            ["--node", "0.0.0.0:80", "--embedded"],
        ),
        ("--listen=here", "", ["--listen", "here", "IP:PORT"]),
        ("--allowed-host=http://a", "", ["--allowed-host", "http://a", "without scheme and port"]),
        ("--allowed-host=*", "", ["--allowed-host", "\"*\"", "locks.example.com"]),
        ("--trusted-proxy=proxy", "", ["--trusted-proxy", "\"proxy\"", "10.0.0.0/8"]),
        (
            "--trusted-proxy=10.0.0.1/8",
            "",
            ["--trusted-proxy", "10.0.0.1/8", "10.0.0.0/8 or 10.0.0.1"],
        ),
        ("", "trusted_proxies = ['::/0']", ["--trusted-proxy", "::/0", "every address"]),
        ("--audit-on-failure=refuse", "", ["--audit-on-failure", "refuse", "--audit-log"]),
        ("--max-ttl=fast", "", ["--max-ttl", "fast", "10ms to 24h"]),
        ("--max-ttl=2days", "", ["--max-ttl", "2days", "10ms to 24h"]),
        ("--max-ttl=5s", "", ["--default-ttl", "30s", "5s"]),
        ("--max-hold=1s", "", ["--max-hold", "1s", "5m to"]),
        ("--drift-factor=0.9", "", ["--drift-factor", "0.9", "0.0 to 0.5"]),
        ("--max-in-flight=0", "", ["--max-in-flight", "0", "1 to 1000000"]),
        ("--key-prefix=a{b", "", ["--key-prefix", "a{b", "braces"]),
        ("--node=http://x", "", ["--node", "number 1", "rediss://"]),
        ("--public=none,docs", "", ["--public", "none", "docs and metrics"]),
        ("", "nodes = ['redis://a:1', 'redis://u:p@a:1']", ["--node", "a:1", "twice"]),
        ("", "\nmax_tll = '5m'", ["gateway.toml, line 2", "unknown setting max_tll", "max_ttl"]),
        ("", "config = 'other.toml'", ["line 1", "unknown setting config", "listen"]),
        ("", "\nmax_ttl = 'fast'", ["line 2, max_ttl", "fast", "10ms to 24h"]),
        ("", "cluster = 1.10", ["line 1, cluster", "expected string", "found float"]),
        ("", "max_waiters = '7'", ["line 1, max_waiters", "expected integer", "found string"]),
    ];
    for (flag, file, labels) in cases {
        let flags = Some(flag.to_owned()).filter(|flag| !flag.is_empty());
        let error = load(flags.as_slice(), file).unwrap_err().to_string();
        assert!(
            labels.iter().all(|word| error.contains(word)),
            "{error:?} lacks one of {labels:?}"
        );
    }
}

#[test]
fn a_broken_file_does_not_leak_the_password_on_its_line() {
    for (file, labels) in [
        ("max_ttl = '5m'\nnodes = ['redis://:hunter2@a:1\n", ["line 2", "array"]),
        ("nodes = 'redis://:hunter2@a:1'\n", ["line 1, nodes: expected array", "found string"]),
        ("nodes = [['redis://:hunter2@a:1']]\n", ["line 1, nodes: expected string", "found array"]),
        ("log_format = 'redis://:hunter2@a:1'", ["line 1, log_format: ", "redis://…@a:1"]),
        ("'redis://:hunter2@a:1' = 1", ["line 1", "redis://…@a:1"]),
    ] {
        let error = load(&[], file).unwrap_err().to_string();
        assert!(
            labels.iter().all(|word| error.contains(word)),
            "{error:?} lacks one of {labels:?}"
        );
        assert!(!error.contains("hunter2"), "{error}");
    }
    let error = load(&labels(["--max-waiters=redis://:hunter2@a:1"]), "").unwrap_err().to_string();
    assert!(error.contains("redis://…@a:1") && !error.contains("hunter2"), "{error}");
}
