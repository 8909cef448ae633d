//! Properties that hold for arbitrary settings: the program neither panics nor shows a password.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use super::tests::{Refused, load};
use super::*;

/// The password in every URL below.
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
    let rest = select(
        &["a:1", "a", "a:1/x", "[::1]:7", "a:99999", "", "a?b#c", "a b", "ü", "a:1,redis://b"][..],
    );
    (scheme, user, rest)
        .prop_map(|(scheme, user, rest)| format!("{scheme}{user}:{PASSWORD}@{rest}"))
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

/// A value as it may stand in the file, well formed or not.
fn value() -> impl Strategy<Value = String> {
    let quoted = (
        select(&["'", "\"", "'''", "\"\"\"", ""][..]),
        word(),
        select(&["", "'", "\"", "]", "\\"][..]),
    );
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

/// Flags with values, except for the nodes.
fn flags() -> impl Strategy<Value = Vec<String>> {
    let settings = select(&KEYS[..19]).prop_filter("not the nodes", |key| *key != "nodes");
    let flag = |(key, value): (&str, _)| {
        format!("--{}={value}", key.replace('_', "-").replace("origins", "origin"))
    };
    vec((settings, word()).prop_map(flag), 0..6)
}

/// All that is shown of a result: an error on the terminal, a configuration in the banner and the
/// log.
fn shown(outcome: Result<Config, Refused>) -> String {
    match outcome {
        Ok(Config { nodes, .. }) => format!("{nodes:?}"),
        Err(error) => error.to_string(),
    }
}

proptest! {
    #[test]
    fn no_file_makes_it_panic_or_show_a_password(text in file()) {
        let shown = shown(load(&[], &text));
        prop_assert!(!shown.contains(PASSWORD), "{shown}\n{text}");
    }

    #[test]
    fn no_flags_make_it_panic_or_show_a_password(flags in flags(), nodes in vec(url(), 0..4)) {
        let nodes = nodes.iter().map(|url| format!("--node={url}"));
        let flags: Vec<_> = flags.into_iter().chain(nodes).collect();
        let shown = shown(load(&flags, ""));
        prop_assert!(!shown.contains(PASSWORD), "{shown}\n{flags:?}");
    }
}
