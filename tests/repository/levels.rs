//! The levels of the tests, and the one selection of features that they build.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use crate::support::gateway::source_root;

fn text(file: &str) -> String {
    let path = source_root().join(file);
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// The lines of tests/parts: name, command, inputs.
fn parts() -> Vec<[String; 3]> {
    let parts: Vec<_> = text("tests/parts")
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let fields: Vec<&str> = line.split('|').map(str::trim).collect();
            let [name, command, inputs] = fields[..] else { panic!("not three fields: {line}") };
            [name, command, inputs].map(String::from)
        })
        .collect();
    assert!(parts.len() >= 5, "{parts:?}");
    parts
}

/// A part whose input was moved away would never run again.
#[test]
fn every_part_has_inputs_that_exist() {
    let root = source_root();
    let mut names = BTreeSet::new();
    let run = text("tests/run");
    for [name, command, inputs] in parts() {
        assert!(names.insert(name.clone()), "{name} occurs twice");
        // The times of both would be written to one file.
        let is_phase = ["in_background", "in_front"].map(|verb| format!("{verb} {name} "));
        assert!(!is_phase.iter().any(|call| run.contains(call)), "{name} is a phase of tests/run");
        if let Some(script) = command.split(' ').next().filter(|word| word.starts_with("tests/")) {
            assert!(root.join(script).is_file(), "{name}: there is no {script}");
        }
        assert!(!inputs.is_empty(), "{name} has no inputs");
        for input in inputs.split(' ') {
            assert!(root.join(input).exists(), "{name}: there is no {input}");
        }
    }
}

/// The shell scripts that the gate runs.
fn scripts() -> Vec<String> {
    let root = source_root();
    let mut scripts =
        [".ci/run", "tests/run", "tests/build", "tests/parts"].map(String::from).to_vec();
    for folder in ["tests/api", "tests/clients", "tests/deploy", "openapi/clients"] {
        collect(root, Path::new(folder), &mut scripts);
    }
    scripts
}

fn collect(root: &Path, folder: &Path, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(root.join(folder)).expect("a folder") {
        let entry = entry.expect("an entry");
        let name = folder.join(entry.file_name());
        let kind = entry.file_type().expect("its type");
        if kind.is_dir() && entry.file_name() != "node_modules" {
            collect(root, &name, found);
        } else if kind.is_file() && name.extension().is_none() {
            found.push(name.to_str().expect("text").to_owned());
        }
    }
}

/// These build something else, on purpose.
const OTHER_SELECTIONS: [(&str, &str); 4] = [
    // It checks that what is shipped compiles, and builds nothing.
    ("tests/parts", "shipped "),
    // A client outside of this workspace.
    ("tests/clients/progenitor/check", "cargo build --locked --quiet -j2"),
    // Packages of what is shipped, in the release profile, before a release.
    ("tests/deploy/package", ""),
    // It reads a Dockerfile.
    ("tests/deploy/check", ""),
];

/// Another selection of crates has other features, so cargo would compile the libraries again.
#[test]
fn scripts_of_the_gate_build_one_selection() {
    let verbs = ["build", "check", "clippy", "run", "rustc", "test"];
    let mut builds = 0;
    for script in scripts() {
        let bytes = std::fs::read(source_root().join(&script)).expect("a file");
        let text = String::from_utf8_lossy(&bytes);
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
            let is_build = verbs.iter().any(|verb| line.contains(&format!("cargo {verb} ")));
            let is_other = OTHER_SELECTIONS
                .iter()
                .any(|(file, start)| script == *file && line.starts_with(start));
            if !is_build || is_other {
                continue;
            }
            builds += 1;
            assert!(line.contains("--workspace"), "{script} builds another selection: {line}");
            let has_tests = ["--tests", "--test ", "--all-targets", "cargo test"];
            assert!(
                has_tests.iter().any(|word| line.contains(word)),
                "{script}: the features of tests are missing: {line}"
            );
        }
    }
    // .ci/run, tests/run and tests/build have at least one build each, and tests/parts has several.
    assert!(builds >= 5, "only {builds} builds were found");
}

/// Package and version, with the sets of features for which cargo compiles it.
type Selection = BTreeMap<String, BTreeSet<String>>;

fn selection(args: &[&str]) -> Selection {
    let mut command = Command::new(env!("CARGO"));
    command.args(["tree", "--locked", "--prefix", "none", "--format", "{p}|{f}"]).args(args);
    let ran = command.current_dir(source_root()).output().expect("cargo starts");
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let mut found = Selection::new();
    for line in String::from_utf8(ran.stdout).expect("text").lines() {
        let (package, features) =
            line.trim_end_matches(" (*)").split_once('|').unwrap_or((line, ""));
        let name: Vec<&str> = package.split(' ').take(2).collect();
        found.entry(name.join(" ")).or_default().insert(features.to_owned());
    }
    assert!(found.len() > 200, "{found:?}");
    found
}

/// The libraries of what is shipped that tests compile with more features. Everything above them is
/// compiled once more when somebody builds both. If this test fails because of a new name, name
/// its feature in Cargo.toml for all, unless what is shipped must not have it.
#[test]
fn shipped_and_tested_features_differ_only_where_listed() {
    let shipped = selection(&["--edges", "normal,build"]);
    let tested = selection(&["--workspace", "--edges", "normal,build,dev"]);
    let differ: Vec<&str> = shipped
        .iter()
        .filter(|(package, features)| !features.is_subset(&tested[*package]))
        .filter_map(|(package, _)| package.split(' ').next())
        .collect();
    assert_eq!(differ, ["getrandom", "num-traits", "rand", "redlock-core", "time", "tokio"]);
}

/// In one selection, cargo compiles a package twice if the programs of the build need it with other
/// features than the programs that are built.
#[test]
fn tests_compile_no_library_twice_but_the_listed() {
    let tested = selection(&["--workspace", "--edges", "normal,build,dev"]);
    let twice: Vec<&str> = tested
        .iter()
        .filter(|(_, features)| features.len() > 1)
        .filter_map(|(package, _)| package.split(' ').next())
        .collect();
    assert_eq!(twice, ["itertools", "libc"]);
}

/// The measuring programs are a workspace of their own. They must measure what is shipped: the same
/// versions of the libraries. They have the same lints.
#[test]
fn measuring_programs_have_the_libraries_and_lints_of_the_product() {
    let mut command = Command::new(env!("CARGO"));
    command.args(["tree", "--locked", "--prefix", "none"]);
    let ran =
        command.current_dir(source_root().join("tests/bench")).output().expect("cargo starts");
    let error = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "tests/bench/Cargo.lock is old: {error}");
    let versions = |file: &str| {
        let mut found = BTreeMap::<String, BTreeSet<String>>::new();
        for package in text(file).split("[[package]]").skip(1) {
            let field = |name: &str| {
                let line = package.lines().find_map(|line| line.strip_prefix(name));
                line.expect("every package has it").trim_matches('"').to_owned()
            };
            found.entry(field("name = ")).or_default().insert(field("version = "));
        }
        found
    };
    let (product, measuring) = (versions("Cargo.lock"), versions("tests/bench/Cargo.lock"));
    for (name, found) in &measuring {
        if let Some(expected) = product.get(name) {
            assert!(
                found.is_superset(expected) || found.is_subset(expected),
                "{name}: {found:?} in tests/bench/Cargo.lock, {expected:?} in Cargo.lock"
            );
        }
    }
    let (root, bench) = (text("Cargo.toml"), text("tests/bench/Cargo.toml"));
    for section in ["[workspace.lints.rust]", "[workspace.lints.clippy]"] {
        let of = |text: &str| {
            let section = text.split(section).nth(1).expect("the section");
            let lines = section.lines().skip(1).take_while(|line| !line.starts_with('['));
            lines
                .filter(|line| !line.is_empty() && !line.starts_with('#'))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert!(!of(&root).is_empty(), "{section} is empty");
        assert_eq!(of(&root), of(&bench), "{section}");
    }
}
