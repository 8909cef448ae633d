//! Settings that nobody would write: none makes the program panic, and none makes it show a password.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::*;

/// Stands for the password in every URL below.
const PASSWORD: &str = "hunter2Secret";

const KEYS: &[&str] = &[
    "listen",
    "nodes",
    "default_ttl",
    "max_ttl",
    "max_wait",
    "max_hold",
    "node_timeout",
    "drift_factor",
    "clock_skew",
    "key_prefix",
    "max_waiters",
    "max_connections",
    "idle_timeout",
    "worker_threads",
    "cluster",
    "bootstrap",
    "allow_anonymous",
    "log_format",
    "cors_origins",
    "max_tll",
    "a.b",
    "\"\"",
    "",
];

fn url() -> impl Strategy<Value = String> {
    let scheme = select(&["redis://", "rediss://", "http://", "redis:///"][..]);
    let user = select(&["", "user", "us%65r", "%zz"][..]);
    let rest = select(&["a:1", "a", "a:1/x", "[::1]:7", "a:99999", "", "a?b#c", "a b", "ü", "a:1,redis://b"][..]);
    (scheme, user, rest).prop_map(|(scheme, user, rest)| format!("{scheme}{user}:{PASSWORD}@{rest}"))
}

fn word() -> BoxedStrategy<String> {
    let word = prop_oneof![
        3 => "[0-9]{0,22}(ns|us|ms|s|m|h|days|years| )?",
        2 => url(),
        1 => "[a-z{}*?:/.]{0,12}",
        1 => any::<String>(),
    ];
    word.boxed()
}

/// A value as it stands in the file, well formed or not.
fn value() -> impl Strategy<Value = String> {
    let quoted = (select(&["'", "\"", "'''", "\"\"\"", ""][..]), word(), select(&["", "'", "\"", "]", "\\"][..]));
    let quoted = quoted.prop_map(|(quote, word, odd)| format!("{quote}{word}{odd}{quote}"));
    prop_oneof![
        4 => quoted.clone(),
        2 => vec(quoted.clone(), 0..4).prop_map(|values| format!("[{}]", values.join(", "))),
        1 => quoted.prop_map(|value| format!("{{ x = {value} }}")),
        1 => select(&["true", "-1", "0.5", "nan", "1e999", "99999999999999999999", "1979-05-27", "[", "[["][..]).prop_map(String::from),
    ]
}

fn file() -> impl Strategy<Value = String> {
    let line = (select(KEYS), select(&[" = ", "=", " ", " = = "][..]), value());
    let line = line.prop_map(|(key, equals, value)| format!("{key}{equals}{value}"));
    vec(prop_oneof![9 => line, 1 => any::<String>()], 0..6).prop_map(|lines| lines.join("\n"))
}

fn flags() -> impl Strategy<Value = Flags> {
    let text = || proptest::option::weighted(0.3, word());
    let number = || proptest::option::weighted(0.2, any::<usize>());
    let times = (text(), text(), text(), text(), text(), text(), text(), text());
    let others = (text(), text(), text(), vec(url(), 0..4), vec(word(), 0..3));
    (times, others, number(), number(), proptest::option::of(any::<f64>())).prop_map(
        |(
            (default_ttl, max_ttl, max_wait, max_hold, node_timeout, clock_skew, idle_timeout, shutdown_grace),
            others,
            max_waiters,
            worker_threads,
            drift_factor,
        )| {
            let (listen, key_prefix, cluster, nodes, cors_origins) = others;
            Flags {
                listen,
                nodes,
                default_ttl,
                max_ttl,
                max_wait,
                max_hold,
                node_timeout,
                drift_factor,
                clock_skew,
                key_prefix,
                max_waiters,
                idle_timeout,
                worker_threads,
                cluster,
                cors_origins,
                shutdown_grace,
                ..Flags::default()
            }
        },
    )
}

/// Whatever is shown of an outcome: an error to whoever started the program, a configuration in its banner and log.
fn shown(outcome: Result<Config, ConfigError>) -> String {
    match outcome {
        Ok(Config { nodes, .. }) => format!("{nodes:?}"),
        Err(error) => error.to_string(),
    }
}

proptest! {
    #[test]
    fn no_file_makes_it_panic_or_show_a_password(text in file()) {
        let outcome = file_from("gateway.toml", &text).and_then(|file| Config::merge(Flags::default(), file));
        let shown = shown(outcome);
        prop_assert!(!shown.contains(PASSWORD), "{shown}\n{text}");
    }

    #[test]
    fn no_flags_make_it_panic(flags in flags()) {
        // A URL with a password is only expected where nodes are named: other settings quote what they refuse.
        let nodes_only = Flags { nodes: flags.nodes.clone(), ..Flags::default() };
        let _ = Config::merge(flags, File::default());
        let shown = shown(Config::merge(nodes_only, File::default()));
        prop_assert!(!shown.contains(PASSWORD), "{shown}");
    }
}
