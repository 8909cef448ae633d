//! The boundaries between the rooms, checked in the source text: which files may name the Redis
//! client, the web framework or the serializer. A boundary that no test checks does not last.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::support::gateway::source_root;

/// Every file below a directory that has one of these endings, with its path from the top and its
/// text.
pub(super) fn files(below: &str, endings: &[&str]) -> Vec<(String, String)> {
    fn collect(dir: &Path, endings: &[&str], found: &mut Vec<PathBuf>) {
        for entry in
            std::fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                collect(&path, endings, found);
            } else if path
                .extension()
                .is_some_and(|end| endings.contains(&end.to_str().unwrap_or_default()))
            {
                found.push(path);
            }
        }
    }
    let root = source_root();
    let mut found = Vec::new();
    collect(&root.join(below), endings, &mut found);
    found.sort();
    assert!(!found.is_empty(), "nothing was found in {below}");
    found
        .into_iter()
        .map(|path| {
            let name = path
                .strip_prefix(root)
                .expect("below the top")
                .to_str()
                .expect("a plain path")
                .to_owned();
            (name, std::fs::read_to_string(&path).expect("text"))
        })
        .collect()
}

/// The lines of code in a source file, with their numbers, up to the file's tests. A test module in
/// a file of its own does not end them.
pub(super) fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let comment = |line: &str| line.trim_start().starts_with("//");
    let tests = |line: &str, next: &str| {
        line == "#![cfg(test)]" || line == "#[cfg(test)]" && !next.ends_with(';')
    };
    text.lines()
        .zip(text.lines().skip(1).chain([""]))
        .enumerate()
        .take_while(move |(_, (line, next))| !tests(line, next))
        .map(|(at, (line, _))| (at + 1, line))
        .filter(move |(_, line)| !comment(line))
}

/// Whether a line uses a crate, in a path or in an import.
fn names(line: &str, krate: &str) -> bool {
    let starts_word =
        |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | ':'));
    let path = format!("{krate}::");
    let uses =
        [format!("use {krate};"), format!("use {krate} as"), format!("extern crate {krate}")];
    line.match_indices(&path).any(|(at, _)| starts_word(at) || line[..at].ends_with(" ::"))
        || uses.iter().any(|text| line.contains(text.as_str()))
}

/// Fails in two cases: a line below `room` that `found` selects is outside the allowed places, or
/// an allowed place contains no such line.
fn only_in(what: &str, found: impl Fn(&str) -> bool, room: &str, places: &[&str]) {
    let mut unused: BTreeSet<&str> = places.iter().copied().collect();
    for (file, text) in files(room, &["rs"]) {
        let place = places
            .iter()
            .find(|place| file == **place || place.ends_with('/') && file.starts_with(**place));
        for (number, line) in text.lines().enumerate().filter(|(_, line)| found(line)) {
            let place = place.unwrap_or_else(|| {
                panic!("{file}:{}: no {what} here: {}", number + 1, line.trim())
            });
            unused.remove(place);
        }
    }
    assert!(
        unused.is_empty(),
        "{unused:?} are allowed {what} but have none: remove them from the list"
    );
}

fn crate_only_in(krate: &str, room: &str, places: &[&str]) {
    only_in(krate, |line| names(line, krate), room, places);
}

#[test]
fn a_crate_is_recognised_by_its_paths_and_imports() {
    for line in [
        "use fred::clients::Client;",
        "    let a = fred::x();",
        "pub use fred;",
        "fn a() -> ::fred::B",
        "(fred::A)",
    ] {
        assert!(names(line, "fred"), "{line}");
    }
    for line in ["// alfred::b", "use alfred::b;", "crate::fred::b", "let fred = 1;", "fred(1)"] {
        assert!(!names(line, "fred") || line.starts_with("//"), "{line}");
    }
}

#[test]
fn only_the_node_client_knows_the_redis_client() {
    crate_only_in("fred", "crates/redlock-core", &["crates/redlock-core/src/node/redis/"]);
    crate_only_in("fred", "crates/redlock-gateway", &[]);
}

#[test]
fn only_the_http_room_knows_the_web_framework() {
    let gateway = "crates/redlock-gateway/src";
    let [http, below, connection] =
        ["http.rs", "http/", "transport/connection.rs"].map(|place| format!("{gateway}/{place}"));
    crate_only_in("axum", gateway, &[&http, &below, &connection]);
    crate_only_in("axum", "crates/redlock-core", &[]);
}

#[test]
fn the_shapes_on_the_wire_know_neither_server_nor_core() {
    for krate in ["axum", "hyper", "tokio", "reqwest", "redlock_core", "fred", "std::env"] {
        crate_only_in(krate, "crates/redlock-api/src", &[]);
    }
    let (_, manifest) = files("crates/redlock-api", &["toml"]).remove(0);
    assert!(manifest.contains("\nutoipa = { workspace = true, optional = true }"), "{manifest}");
}

/// A copy of a shape differs from the original after some changes.
#[test]
fn only_the_api_declares_shapes_on_the_wire() {
    let declares = |line: &str| line.contains("derive(") && line.contains("Deserialize");
    for room in ["crates/redlock-client/src", "crates/redlock-cli/src"] {
        only_in("shape", declares, room, &[]);
        crate_only_in("redlock_core", room, &[]);
    }
    let schema = |line: &str| line.contains("derive(") && line.contains("ToSchema");
    only_in("schema", schema, "crates/redlock-gateway/src", &[]);
    for (file, manifest) in files("crates", &["toml"]) {
        let is_client = ["redlock-client/", "redlock-cli/"].iter().any(|dir| file.contains(dir));
        for word in ["axum", "utoipa", "openapi", "redlock-core"] {
            assert!(!is_client || !manifest.contains(word), "{file} names {word}");
        }
    }
}

#[test]
fn one_file_of_the_gateway_knows_how_traces_are_sent() {
    for krate in ["opentelemetry", "opentelemetry_otlp", "opentelemetry_sdk"] {
        crate_only_in(
            krate,
            "crates/redlock-gateway/src",
            &["crates/redlock-gateway/src/telemetry/traces.rs"],
        );
    }
}

#[test]
fn only_one_room_of_the_gateway_knows_the_tls_library() {
    let gateway = "crates/redlock-gateway/src";
    crate_only_in("tokio_rustls", gateway, &[&format!("{gateway}/transport/tls.rs")]);
}

#[test]
fn the_core_knows_no_serializer_no_web_and_no_environment() {
    for krate in ["serde", "serde_json", "http", "hyper", "axum", "std::env", "clap"] {
        crate_only_in(krate, "crates/redlock-core/src", &[]);
    }
    let (_, manifest) = files("crates/redlock-core", &["toml"]).remove(0);
    for krate in ["serde", "hyper", "axum", "clap"] {
        let named = manifest.lines().find(|line| line.starts_with(krate));
        assert!(named.is_none(), "the core depends on {named:?}");
    }
}

/// The driver of a node must be a function of its inputs. So the code around it starts the tasks.
#[test]
fn only_listed_files_of_the_core_start_tasks() {
    let core = "crates/redlock-core/src";
    let places = [
        "round/pending_releases.rs",
        "cluster/schedule.rs",
        "node/worker.rs",
        "node/hints.rs",
        "node/reader.rs",
    ]
    .map(|place| format!("{core}/{place}"));
    only_in(
        "tokio::spawn",
        |line| line.contains("tokio::spawn"),
        core,
        &places.each_ref().map(String::as_str),
    );
}

/// Flags belong to the gateway. Another program that uses this core does not have them.
#[test]
fn the_core_names_no_flags() {
    let flag = |line: &str| {
        let starts = |(at, _)| line[at + 2..].starts_with(|c: char| c.is_ascii_lowercase());
        line.match_indices("--").any(starts)
    };
    assert!(flag("give --node") && !flag("// ---- a line") && !flag("n -- 1"));
    let core = "crates/redlock-core/src";
    only_in("flag", flag, core, &[]);
}

#[test]
fn waiting_knows_no_votes_and_no_nodes() {
    let core = "crates/redlock-core/src";
    let waiting = files(core, &["rs"])
        .into_iter()
        .filter(|(file, _)| file.starts_with(&format!("{core}/wait")));
    for (file, text) in waiting {
        for (number, line) in code(&text) {
            for word in
                ["Vote", "dyn Node", "Quorum", "crate::round", "crate::shared", "crate::redlock"]
            {
                assert!(!line.contains(word), "{file}:{number}: {}", line.trim());
            }
        }
    }
}

#[test]
fn the_gateways_policy_knows_no_statuses_and_no_redis_keys() {
    let (_, text) = files("crates/redlock-gateway/src", &["rs"])
        .into_iter()
        .find(|(file, _)| file.ends_with("src/gateway.rs"))
        .expect("gateway.rs exists");
    for (number, line) in code(&text) {
        for word in ["StatusCode", "axum", "http::", "EVALSHA", ":fence"] {
            assert!(!line.contains(word), "gateway.rs:{number}: {}", line.trim());
        }
    }
}

#[test]
fn production_code_does_not_unwrap() {
    for (file, text) in ["crates/redlock-core/src", "crates/redlock-gateway/src"]
        .iter()
        .flat_map(|below| files(below, &["rs"]))
    {
        for (number, line) in code(&text) {
            assert!(
                !line.contains(".unwrap()"),
                "{file}:{number}: use expect with the invariant: {}",
                line.trim()
            );
        }
    }
}

/// Whether a line has a `Result` whose error is a `String`.
fn has_text_for_error(line: &str) -> bool {
    line.match_indices("Result<").any(|(at, start)| {
        let mut depth = 1;
        // The last argument. A lone argument is no error.
        let mut last = String::from("lone ");
        for c in line[at + start.len()..].chars() {
            match c {
                ',' if depth == 1 => {
                    last.clear();
                    continue;
                }
                '>' if depth == 1 && !last.ends_with('-') => return last.trim() == "String",
                '<' | '(' | '[' => depth += 1,
                '>' | ')' | ']' if !last.ends_with('-') => depth -= 1,
                _ => {}
            }
            last.push(c);
        }
        false
    })
}

#[test]
fn errors_of_the_gateway_have_types() {
    assert!(has_text_for_error("fn a() -> Result<Vec<(u8, u8)>, String> {"));
    assert!(has_text_for_error("-> impl Fn(&str) -> Result<usize, String> + Clone {"));
    assert!(!has_text_for_error("fn a() -> io::Result<String> {"));
    assert!(!has_text_for_error("fn a(b: Result<String, E>) -> Result<Map<String, String>, E> {"));
    only_in("error without a type", has_text_for_error, "crates/redlock-gateway/src", &[]);
    let is_boxed =
        |line: &str| line.contains("Box<dyn std::error::Error") || line.contains("Box<dyn Error");
    only_in("boxed error", is_boxed, "crates/redlock-gateway/src", &[]);
}

#[test]
fn every_member_uses_the_lints_of_the_workspace() {
    let root = std::fs::read_to_string(source_root().join("Cargo.toml")).expect("text");
    let lints = root
        .split("[workspace.lints.rust]")
        .nth(1)
        .and_then(|rest| rest.split("\n[").next())
        .expect("lints");
    assert!(lints.contains("unsafe_code = \"forbid\""), "{lints}");
    let manifests: Vec<_> = ["crates", "tests"]
        .iter()
        .flat_map(|below| files(below, &["toml"]))
        .filter(|(file, _)| file.ends_with("/Cargo.toml"))
        .collect();
    assert!(manifests.len() >= 4, "{manifests:?}");
    for (file, text) in manifests {
        // A server calls the module through pointers. So the module has unsafe code in a few files,
        // and each block explains why it is sound.
        let lints = match file.contains("redlock-module") {
            true => "undocumented_unsafe_blocks = \"warn\"",
            false => "[lints]\nworkspace = true",
        };
        assert!(text.contains(lints), "{file} has no {lints}");
    }
}
