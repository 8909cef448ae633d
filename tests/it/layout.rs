//! The boundaries between the rooms of this house, held by reading the source: who may name the Redis client, the web
//! framework, the serializer. A boundary that nothing checks is gone within a year.

use std::collections::{BTreeMap, BTreeSet};
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
    let [http, below, serve] = ["http.rs", "http/", "serve.rs"].map(|place| format!("{gateway}/{place}"));
    only_in("axum", gateway, &[&http, &below, &serve]);
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
fn waiting_knows_no_votes_and_no_nodes() {
    let core = "crates/redlock-core/src";
    let waiting = files(core, &["rs"]).into_iter().filter(|(file, _)| file.starts_with(&format!("{core}/wait")));
    for (file, text) in waiting {
        for (number, line) in code(&text) {
            for word in ["Vote", "dyn Node", "Quorum", "crate::round", "crate::shared", "crate::redlock"] {
                assert!(!line.contains(word), "{file}:{number}: {}", line.trim());
            }
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

/// Pairs of modules that still import each other, by crate. An entry that is no longer needed fails the test, too.
const CYCLES: &[(&str, &str, &str)] = &[
    ("redlock-bench", "conditions", "network"),
    ("redlock-bench", "conditions", "servers"),
    ("redlock-bench", "contended", "contended::report"),
    ("redlock-bench", "growth", "growth::report"),
    ("redlock-bench", "network", "servers"),
    ("redlock-bench", "waiters", "waiters::report"),
    ("redlock-core", "node::admission", "node::admission::facts"),
    ("redlock-core", "node::admission", "node::admission::marker"),
    ("redlock-core", "node::admission::marker", "node::admission::facts"),
    ("redlock-core", "node::redis", "node::redis::calls"),
    ("redlock-core", "node::redis", "node::redis::ears"),
    ("redlock-core", "node::redis", "node::redis::gate"),
    ("redlock-core", "node::redis", "node::redis::session"),
    ("redlock-core", "node::redis::calls", "node::redis::gate"),
    ("redlock-core", "node::redis::calls", "node::redis::session"),
    ("redlock-core", "node::redis::ears", "node::redis::session"),
    ("redlock-core", "node::redis::gate", "node::redis::session"),
    ("redlock-gateway", "auth", "auth::file"),
    ("redlock-gateway", "config", "tls"),
    ("redlock-gateway", "http", "http::access"),
    ("redlock-gateway", "http", "http::health"),
    ("redlock-gateway", "http", "http::locks"),
    ("redlock-gateway", "http::error", "http::wire"),
    ("redlock-gateway", "http::health", "http::access"),
    ("redlock-gateway", "http::health", "http::locks"),
    ("redlock-gateway", "http::locks", "http::access"),
    ("redlock-model", "locks", "locks::state"),
    ("redlock-sim", "checker", "checker::waiting"),
    ("redlock-sim", "lane", "lane::ears"),
    ("redlock-sim", "lane", "lane::gate"),
    ("redlock-sim", "master", "network"),
    ("redlock-sim", "network", "plan"),
];

/// The modules of one crate, by path from its root, with the paths that each of them names.
type Modules = BTreeMap<Vec<String>, Vec<Vec<String>>>;

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Reads `a::b::{c, d::e}` from the beginning of a text into the paths `a b c` and `a b d e`; what follows is left.
fn paths<'a>(mut text: &'a str, mut path: Vec<String>, found: &mut Vec<Vec<String>>) -> &'a str {
    loop {
        let end = text.find(|c| !is_word(c)).unwrap_or(text.len());
        let (word, rest) = text.split_at(end);
        text = rest;
        if !word.is_empty() {
            path.push(word.to_owned());
        }
        if let Some(inner) = text.strip_prefix('{') {
            text = inner;
            while !text.starts_with('}') && !text.is_empty() {
                text = paths(text.trim_start(), path.clone(), found).trim_start_matches([',', ' ', '\n']);
            }
            return text.get(1..).unwrap_or_default();
        }
        let Some(rest) = text.strip_prefix("::").filter(|_| !word.is_empty()) else {
            found.push(path);
            // `*`, `as other`, or the end of a path in an expression.
            return text.trim_start_matches(|c: char| !matches!(c, ',' | '}' | ';' | '{'));
        };
        text = rest;
    }
}

/// Every path in the code of a module that begins at the crate, above it or with one of its children.
fn imports(module: &[String], text: &str, children: &[&str]) -> Vec<Vec<String>> {
    let code = code(text).map(|(_, line)| line).collect::<Vec<_>>().join("\n");
    let mut found = Vec::new();
    for start in ["crate", "super", "self"].iter().chain(children) {
        for (at, _) in code.match_indices(&format!("{start}::")) {
            if code[..at].ends_with(|c| is_word(c) || matches!(c, ':' | '$')) {
                continue;
            }
            let statement = code[..at].rsplit([';', '}']).next().unwrap_or_default().trim_start();
            let mut named = Vec::new();
            paths(&code[at..], Vec::new(), &mut named);
            if statement.starts_with("pub use") || statement.starts_with("pub(crate) use") {
                // What a module only passes on it does not use.
                named.retain(|path| {
                    path.last().is_some_and(|word| code.split(|c| !is_word(c)).filter(|w| w == word).count() > 1)
                });
            }
            found.extend(named.into_iter().map(|path| {
                let mut absolute = if *start == "crate" { Vec::new() } else { module.to_vec() };
                for word in path {
                    match word.as_str() {
                        "crate" | "self" => {}
                        "super" => drop(absolute.pop()),
                        _ => absolute.push(word),
                    }
                }
                absolute
            }));
        }
    }
    found
}

fn modules(krate: &str) -> Modules {
    let source = format!("{krate}/src/");
    let files: BTreeMap<Vec<String>, String> = files(&source, &["rs"])
        .into_iter()
        .map(|(file, text)| {
            let path = file.split("/src/").last().unwrap_or_default().trim_end_matches(".rs");
            let root = matches!(path, "lib" | "main");
            (path.split('/').filter(|_| !root).map(str::to_owned).collect(), text)
        })
        .collect();
    let is_test = |module: &[String]| {
        (1..=module.len()).any(|depth| {
            let test = format!("#[cfg(test)]\nmod {};", module[depth - 1]);
            files.get(&module[..depth - 1]).is_some_and(|parent| parent.contains(&test))
        })
    };
    files
        .iter()
        .filter(|(module, _)| !is_test(module))
        .map(|(module, text)| {
            let below = |other: &'_ Vec<String>| other.len() == module.len() + 1 && other.starts_with(module);
            let children: Vec<_> =
                files.keys().filter(|other| below(other)).map(|child| &*child[module.len()]).collect();
            (module.clone(), imports(module, text, &children))
        })
        .collect()
}

/// Which modules use which, a module's own children counted as part of it where they use something outside of it.
fn uses(modules: &Modules) -> BTreeSet<(String, String)> {
    let mut edges = BTreeSet::new();
    for (module, paths) in modules {
        for path in paths {
            let target = (0..=path.len()).rev().map(|len| &path[..len]).find(|prefix| modules.contains_key(*prefix));
            let target = target.unwrap_or_default();
            let common = module.iter().zip(target).take_while(|(a, b)| a == b).count();
            let [from, to] = [module, target].map(|path| path[..path.len().min(common + 1)].join("::"));
            if from != to {
                edges.insert((from, to));
            }
        }
    }
    edges
}

#[test]
fn no_two_modules_import_each_other() {
    let crates: BTreeSet<_> = files("crates", &["rs"])
        .into_iter()
        .filter_map(|(file, _)| Some(file.split_once("/src/")?.0.to_owned()))
        .collect();
    let core = uses(&modules("crates/redlock-core"));
    assert!(core.contains(&("release".into(), "wait".into())), "the paths of modules are not recognised: {core:?}");
    let mut cycles = Vec::new();
    for krate in &crates {
        let edges = uses(&modules(krate));
        let reaches = |from: &String, to: &String| {
            let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
            while let Some(module) = next.pop() {
                let further = edges.iter().filter(|(user, _)| user == module).map(|(_, used)| used);
                next.extend(further.filter(|used| seen.insert(*used)));
            }
            seen.contains(to)
        };
        let back = edges.iter().filter(|(from, to)| from < to || !edges.contains(&(to.clone(), from.clone())));
        for (from, to) in back.filter(|(from, to)| reaches(to, from)) {
            cycles.push((krate.trim_start_matches("crates/").to_owned(), from.clone(), to.clone()));
        }
    }
    let allowed = |(krate, from, to): &(String, String, String)| CYCLES.contains(&(krate, from, to));
    let unknown: Vec<_> = cycles.iter().filter(|cycle| !allowed(cycle)).collect();
    assert!(unknown.is_empty(), "these lead back to where they come from: {unknown:#?}");
    let gone: Vec<_> = CYCLES
        .iter()
        .filter(|(krate, from, to)| !cycles.contains(&(krate.to_string(), from.to_string(), to.to_string())))
        .collect();
    assert!(gone.is_empty(), "mended: take them out of the list: {gone:?}");
}
