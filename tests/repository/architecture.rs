//! The maps name only files and modules that exist: files in ARCHITECTURE.md and in the README, and
//! modules at the top of a crate.

use std::path::{Path, PathBuf};

use super::layout::files;
use crate::support::gateway::source_root;

const PAGE: &str = "crates/redlock-core/ARCHITECTURE.md";
/// The directories from which the paths in ARCHITECTURE.md may begin.
const ROOTS: [&str; 3] = ["", "crates", "crates/redlock-core"];
/// Files that begin with a map of the modules below them.
const MAPS: [&str; 6] = [
    "crates/redlock-core/src/lib.rs",
    "crates/redlock-core/src/node.rs",
    "crates/redlock-gateway/src/lib.rs",
    "crates/redlock-gateway/src/overload.rs",
    "tests/model/src/lib.rs",
    "tests/simulation/src/lib.rs",
];

fn read(path: &str) -> String {
    std::fs::read_to_string(source_root().join(path))
        .unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The words in a line that look like a file or a directory.
fn paths(line: &str) -> impl Iterator<Item = &str> {
    const ENDINGS: [&str; 8] = [".rs", ".lua", ".md", ".toml", ".yml", ".yaml", ".json", "/"];
    line.split(|c: char| !(c.is_ascii_alphanumeric() || "_-./".contains(c)))
        .map(|word| word.trim_end_matches('.'))
        .filter(|word| word.len() > 2 && !word.starts_with('/') && !word.contains("//"))
        .filter(|word| ENDINGS.iter().any(|ending| word.ends_with(ending)))
}

/// The paths in a line that do not exist. A bare name is in the directory of the path before it, or
/// beside that path.
fn missing_in<'a>(line: &'a str, top: &Path) -> Vec<&'a str> {
    let mut beside: Option<PathBuf> = None;
    paths(line)
        .filter(|name| {
            let roots = ROOTS.iter().map(|root| top.join(root));
            let found =
                roots.chain(beside.clone()).map(|root| root.join(name)).find(|path| path.exists());
            beside = found
                .as_deref()
                .and_then(Path::parent)
                .map(Path::to_owned)
                .or_else(|| beside.take());
            found.is_none()
        })
        .collect()
}

#[test]
fn the_architecture_page_names_existing_files() {
    let page = read(PAGE);
    let missing: Vec<_> = page.lines().flat_map(|line| missing_in(line, source_root())).collect();
    assert!(missing.is_empty(), "{PAGE} names missing files: {missing:?}");
    let named = page.lines().flat_map(paths).count();
    assert!(named > 80, "only {named} names were recognised");
}

/// The README's map is a tree of indented names. Each name must be the end of a path in the
/// repository.
#[test]
fn the_map_in_the_readme_names_existing_files() {
    fn below(dir: &Path, found: &mut String) {
        for entry in std::fs::read_dir(dir)
            .expect("a directory")
            .map(|entry| entry.expect("an entry").path())
        {
            let is_output =
                entry.file_name().is_some_and(|name| name == "target" || name == ".git");
            found.push_str(&format!(
                "/{}",
                entry.strip_prefix(source_root()).expect("below the top").display()
            ));
            if entry.is_dir() && !is_output {
                found.push_str("/\n");
                below(&entry, found);
            }
            found.push('\n');
        }
    }
    let mut tree = String::new();
    below(source_root(), &mut tree);
    let readme = read("README.md");
    let map = readme
        .split("## Where things are")
        .nth(1)
        .and_then(|rest| rest.split("```").nth(1))
        .expect("a map");
    let missing: Vec<_> =
        map.lines().flat_map(paths).filter(|name| !tree.contains(&format!("/{name}\n"))).collect();
    assert!(missing.is_empty(), "the README names missing files: {missing:?}");
    assert!(map.lines().flat_map(paths).count() > 10, "names are not recognised");
}

/// The links `](path)` in a page whose target does not exist. A path is relative to the page.
fn dead_links(page: &str, text: &str) -> Vec<String> {
    let here = source_root().join(page).parent().map(Path::to_owned).unwrap_or_default();
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let files = targets
        .filter(|to| !to.contains("://") && !to.starts_with('#') && !to.contains([' ', '{']));
    files
        .filter(|to| !here.join(to.split('#').next().unwrap_or(to)).exists())
        .map(|to| format!("{page}: {to}"))
        .collect()
}

#[test]
fn every_link_between_pages_has_a_target() {
    let mut pages = files("crates", &["md"]);
    pages.extend(files("openapi", &["md"]));
    pages.extend(
        ["README.md", ".github/SECURITY.md", "CHANGELOG.md"]
            .map(|page| (page.to_owned(), read(page))),
    );
    let dead: Vec<_> = pages.iter().flat_map(|(page, text)| dead_links(page, text)).collect();
    assert!(dead.is_empty(), "{dead:#?}");
    assert!(pages.len() > 8 && dead_links("README.md", "[a](b.md)") == ["README.md: b.md"]);
}

#[test]
fn the_readme_stays_short() {
    let lines = read("README.md").lines().count();
    assert!(
        lines <= 120,
        "{lines} lines: texts for operators and client authors belong in crates/redlock-gateway/docs"
    );
}

#[test]
fn every_module_is_in_the_map_of_its_parent() {
    for map in MAPS {
        let text = read(map);
        let rows: String =
            text.lines().filter(|line| line.starts_with("//! |")).map(str::to_lowercase).collect();
        let lines: Vec<_> = text.lines().collect();
        let modules = lines
            .windows(2)
            .filter(|pair| !pair[0].starts_with("#[cfg(") && !pair[0].starts_with("#[doc("));
        let modules = modules.filter_map(|pair| {
            let (_, rest) = pair[1]
                .split_once("mod ")
                .filter(|(before, _)| matches!(*before, "" | "pub " | "pub(crate) "))?;
            rest.strip_suffix(';')
        });
        let modules: Vec<_> = modules.collect();
        assert!(modules.len() > 5, "{map}: modules are not recognised: {modules:?}");
        for module in modules {
            assert!(rows.contains(&format!("`{module}`")), "{map}: {module} is not in its map");
        }
    }
}

#[test]
fn a_missing_file_or_module_is_found() {
    let top = source_root();
    assert!(
        missing_in("`src/node/driver.rs` worker.rs, redis/ and tests/simulation/src/link.rs.", top)
            .is_empty()
    );
    assert_eq!(
        missing_in("src/node/driver.rs lane.rs; src/driver.rs, worker.rs", top),
        ["lane.rs", "src/driver.rs"]
    );
    assert_eq!(
        missing_in("src/nodes/ and tests/core/locks.lua", top),
        ["src/nodes/", "tests/core/locks.lua"]
    );
}
