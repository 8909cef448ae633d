//! The boundaries between the rooms of this house, held by reading the source: who may name the Redis client, the web
//! framework, the serializer. A boundary that nothing checks is gone within a year.

use std::path::{Path, PathBuf};

use crate::gateway::source_root;

/// Long before this a file wants a second look; beyond it nobody reads it whole.
const MOST_LINES: usize = 800;

/// Every file below a directory with one of these endings, by its path from the top.
fn files(below: &str, endings: &[&str]) -> Vec<(String, String)> {
    fn collect(dir: &Path, endings: &[&str], found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display())) {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                collect(&path, endings, found);
            } else if path.extension().is_some_and(|end| endings.contains(&end.to_str().unwrap_or_default())) {
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
            let name = path.strip_prefix(root).expect("below the top").to_str().expect("a plain path").to_owned();
            (name, std::fs::read_to_string(&path).expect("text"))
        })
        .collect()
}

/// The lines of a source file that are code, with their numbers, up to its tests.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let comment = |line: &str| line.trim_start().starts_with("//");
    text.lines()
        .enumerate()
        .map(|(at, line)| (at + 1, line))
        .take_while(|(_, line)| !line.starts_with("#[cfg(test)]") && !line.starts_with("#![cfg(test)]"))
        .filter(move |(_, line)| !comment(line))
}

/// Whether a line uses a crate, by a path or an import.
fn names(line: &str, krate: &str) -> bool {
    let starts_word = |at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || matches!(c, '_' | ':'));
    let path = format!("{krate}::");
    let uses = [format!("use {krate};"), format!("use {krate} as"), format!("extern crate {krate}")];
    line.match_indices(&path).any(|(at, _)| starts_word(at) || line[..at].ends_with(" ::"))
        || uses.iter().any(|text| line.contains(text.as_str()))
}

/// Fails when a file below `room` uses the crate and is not in one of the places that may.
fn only_in(krate: &str, room: &str, places: &[&str]) {
    let mut users = 0;
    for (file, text) in files(room, &["rs"]) {
        let allowed = places.iter().any(|place| file == *place || place.ends_with('/') && file.starts_with(place));
        for (number, line) in text.lines().enumerate().filter(|(_, line)| names(line, krate)) {
            assert!(allowed, "{file}:{}: {krate} must not be known here: {}", number + 1, line.trim());
            users += 1;
        }
    }
    assert!(places.is_empty() || users > 0, "nobody uses {krate} any more: this test looks for the wrong thing");
}

#[test]
fn a_crate_is_recognised_by_its_paths_and_imports() {
    for line in
        ["use fred::clients::Client;", "    let a = fred::x();", "pub use fred;", "fn a() -> ::fred::B", "(fred::A)"]
    {
        assert!(names(line, "fred"), "{line}");
    }
    for line in ["// alfred::b", "use alfred::b;", "crate::fred::b", "let fred = 1;", "fred(1)"] {
        assert!(!names(line, "fred") || line.starts_with("//"), "{line}");
    }
}

#[test]
fn only_the_node_client_knows_the_redis_client() {
    only_in(
        "fred",
        "crates/redlock-core",
        &["crates/redlock-core/src/node/redis.rs", "crates/redlock-core/src/node/redis/"],
    );
    only_in("fred", "crates/redlock-gateway", &[]);
}

#[test]
fn only_the_http_room_knows_the_web_framework() {
    let gateway = "crates/redlock-gateway/src";
    let [http, below, connection] = ["http.rs", "http/", "connection.rs"].map(|place| format!("{gateway}/{place}"));
    only_in("axum", gateway, &[&http, &below, &connection]);
    only_in("axum", "crates/redlock-core", &[]);
}

#[test]
fn only_one_room_of_the_gateway_knows_the_tls_library() {
    let gateway = "crates/redlock-gateway/src";
    only_in("tokio_rustls", gateway, &[&format!("{gateway}/tls.rs"), &format!("{gateway}/tls/")]);
}

#[test]
fn the_core_knows_no_serializer_no_web_and_no_environment() {
    for krate in ["serde", "serde_json", "http", "hyper", "axum", "std::env", "clap"] {
        only_in(krate, "crates/redlock-core/src", &[]);
    }
    let (_, manifest) = files("crates/redlock-core", &["toml"]).remove(0);
    for krate in ["serde", "hyper", "axum", "clap"] {
        let named = manifest.lines().find(|line| line.starts_with(krate));
        assert!(named.is_none(), "the core depends on {named:?}");
    }
}

#[test]
fn the_gateways_policy_knows_no_statuses_and_no_redis_keys() {
    let (_, text) = files("crates/redlock-gateway/src", &["rs"])
        .into_iter()
        .find(|(file, _)| file.ends_with("src/gateway.rs"))
        .expect("gateway.rs is there");
    for (number, line) in code(&text) {
        for word in ["StatusCode", "axum", "http::", "EVALSHA", ":fence"] {
            assert!(!line.contains(word), "gateway.rs:{number}: {}", line.trim());
        }
    }
}

#[test]
fn no_file_is_too_long_to_be_read_whole() {
    for (file, text) in files("crates", &["rs", "lua"]) {
        let lines = text.lines().count();
        assert!(lines <= MOST_LINES, "{file} has {lines} lines: it deserves a second look, is it one thing?");
    }
}

#[test]
fn what_runs_in_production_does_not_unwrap() {
    for (file, text) in
        ["crates/redlock-core/src", "crates/redlock-gateway/src"].iter().flat_map(|below| files(below, &["rs"]))
    {
        for (number, line) in code(&text) {
            assert!(!line.contains(".unwrap()"), "{file}:{number}: say what holds instead: {}", line.trim());
        }
    }
}

#[test]
fn every_member_is_held_to_the_lints_of_the_workspace() {
    let root = std::fs::read_to_string(source_root().join("Cargo.toml")).expect("text");
    let lints = root.split("[workspace.lints.rust]").nth(1).and_then(|rest| rest.split("\n[").next()).expect("lints");
    assert!(lints.contains("unsafe_code = \"forbid\""), "{lints}");
    let manifests: Vec<_> = ["crates", "tests"]
        .iter()
        .flat_map(|below| files(below, &["toml"]))
        .filter(|(file, _)| file.ends_with("/Cargo.toml"))
        .collect();
    assert!(manifests.len() >= 4, "{manifests:?}");
    for (file, text) in manifests {
        assert!(text.contains("[lints]\nworkspace = true"), "{file} has no [lints] workspace = true");
    }
}
