//! The runbook. Each procedure names a test that exists. Each reference that sends operators to a
//! section names a section that exists.

use std::collections::BTreeSet;

use super::layout::files;
use crate::support::gateway::source_root;

const DOCS: &str = "crates/redlock-gateway/docs";

fn page(name: &str) -> String {
    let path = source_root().join(DOCS).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every test of this crate, as `area::file::name`.
fn tests() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (file, text) in files("tests", &["rs"]) {
        let module = file.trim_start_matches("tests/").trim_end_matches(".rs").replace('/', "::");
        let mut is_test = false;
        for line in text.lines() {
            is_test |= line == "#[test]" || line.starts_with("#[tokio::test");
            let name = line
                .trim_start_matches("async ")
                .strip_prefix("fn ")
                .and_then(|rest| rest.split('(').next());
            if let Some(name) = name.filter(|_| is_test) {
                found.insert(format!("{module}::{name}"));
                is_test = false;
            }
        }
    }
    found
}

/// The names of tests that a page contains.
fn named(text: &str) -> impl Iterator<Item = &str> {
    let is_word = |part: &str| {
        !part.is_empty()
            && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter(move |code| code.matches("::").count() == 2 && code.split("::").all(is_word))
}

/// What is wrong in a page: tests that it names and that do not exist, and procedures without a
/// test.
fn wrong_in(text: &str, tests: &BTreeSet<String>) -> Vec<String> {
    let missing =
        named(text).filter(|name| !tests.contains(*name)).map(|name| format!("no test {name}"));
    let procedures = text.split("\n## ").skip(1).filter(|section| named(section).next().is_none());
    let untested = procedures
        .map(|section| format!("{:?} names no test", section.lines().next().unwrap_or_default()));
    missing.chain(untested).collect()
}

#[test]
fn every_procedure_of_the_runbook_names_an_existing_test() {
    let text = page("runbook.md");
    let tests = tests();
    let wrong = wrong_in(&text, &tests);
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(
        text.matches("\n## ").count() >= 10 && named(&text).count() >= 15,
        "procedures and tests are not recognised"
    );
    let own = tests.iter().filter(|test| test.starts_with("operations::runbook::"));
    let unnamed: Vec<_> = own.filter(|test| !text.contains(&format!("`{test}`"))).collect();
    assert!(unnamed.is_empty(), "the runbook has no procedure for {unnamed:?}");
}

#[test]
fn missing_tests_of_procedures_are_noticed() {
    let tests = tests();
    let sample =
        "# Runbook\n\n## One\n\n(`operations::upgrade::a_rolling_upgrade_loses_no_request`)\n";
    assert!(wrong_in(sample, &tests).is_empty());
    // A helper function is no test, and neither is a test of that name in another file.
    for other in [
        "upgrade::an_upgrade_gateway_loses_no_request",
        "upgrade::connect",
        "start::a_rolling_upgrade_loses_no_request",
    ] {
        let text = sample.replace("upgrade::a_rolling_upgrade_loses_no_request", other);
        assert_eq!(wrong_in(&text, &tests), [format!("no test operations::{other}")]);
    }
    assert_eq!(
        wrong_in("# Runbook\n\n## Two\n\n`--node` and `a::b`\n", &tests),
        ["\"Two\" names no test"]
    );
}

/// The anchors that web pages derive from the headings of a text.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter_map(|line| line.strip_prefix("##"));
    headings
        .map(|title| {
            let title = title.trim_start_matches('#').trim().to_lowercase();
            title
                .chars()
                .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
                .collect::<String>()
                .replace(' ', "-")
        })
        .collect()
}

/// Every `page.md#section` and `/docs/page#section` in a text that refers to the gateway's
/// documentation.
fn sections(text: &str) -> BTreeSet<(&str, &str)> {
    let mut found = BTreeSet::new();
    for (name, reference) in [
        ("symptoms.md", "symptoms.md#"),
        ("symptoms.md", "/docs/symptoms#"),
        ("runbook.md", "runbook.md#"),
        ("runbook.md", "/docs/runbook#"),
    ] {
        for (at, _) in text.match_indices(reference) {
            let rest = &text[at + reference.len()..];
            let end = rest
                .find(|c: char| !(c.is_alphanumeric() || c == '-' || c == '_'))
                .unwrap_or(rest.len());
            found.insert((name, &rest[..end]));
        }
    }
    found
}

fn dead(text: &str) -> Vec<String> {
    let missing = |(name, anchor): &(&str, &str)| !anchors(&page(name)).contains(*anchor);
    sections(text)
        .iter()
        .filter(|section| missing(section))
        .map(|(name, anchor)| format!("{name}#{anchor}"))
        .collect()
}

#[test]
fn every_section_that_operators_are_sent_to_exists() {
    let mut places = files("crates/redlock-gateway", &["rs", "md"]);
    places.extend(files("k8s", &["yaml"]));
    let of = |file: &str| {
        places.iter().find(|(name, _)| name.ends_with(file)).map(|(_, text)| sections(text).len())
    };
    assert_eq!(of("src/remedy.rs"), Some(5), "sections are not recognised");
    let dead: Vec<_> = places
        .iter()
        .flat_map(|(file, text)| dead(text).into_iter().map(move |to| (file, to)))
        .collect();
    assert!(dead.is_empty(), "{dead:?}");
    // Links within one page count, too.
    for name in ["symptoms.md", "runbook.md"] {
        let text = page(name).replace("](#", &format!("]({name}#"));
        assert_eq!(self::dead(&text), Vec::<String>::new(), "{name}");
    }
    assert_eq!(self::dead("see symptoms.md#quorum-lots."), ["symptoms.md#quorum-lots"]);
    assert_eq!(self::dead("see /docs/symptoms#quorum-lots."), ["symptoms.md#quorum-lots"]);
}
