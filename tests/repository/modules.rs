//! No two modules of a crate import each other, neither directly nor through other modules. So each
//! module can be read and tested without the modules that use it.

use std::collections::{BTreeMap, BTreeSet};

use super::layout::{code, files};

/// The modules of one crate: each path from the crate's root, with the paths that this module
/// names.
type Modules = BTreeMap<Vec<String>, Vec<Vec<String>>>;

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Reads `a::b::{c, d::e}` at the beginning of a text as the paths `a b c` and `a b d e`. Returns
/// the rest of the text.
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
                text = paths(text.trim_start(), path.clone(), found)
                    .trim_start_matches([',', ' ', '\n']);
            }
            return text.get(1..).unwrap_or_default();
        }
        let Some(rest) = text.strip_prefix("::").filter(|_| !word.is_empty()) else {
            found.push(path);
            // What follows is `*`, `as other`, or the end of a path in an expression.
            return text.trim_start_matches(|c: char| !matches!(c, ',' | '}' | ';' | '{'));
        };
        text = rest;
    }
}

/// Every path in a module's code that begins at the crate, at the module's parent, or at one of its
/// children.
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
                // A re-export alone is no use: the name must occur once more.
                named.retain(|path| {
                    path.last().is_some_and(|word| {
                        code.split(|c| !is_word(c)).filter(|w| w == word).count() > 1
                    })
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
            let below = |other: &'_ Vec<String>| {
                other.len() == module.len() + 1 && other.starts_with(module)
            };
            let children: Vec<_> = files
                .keys()
                .filter(|other| below(other))
                .map(|child| &*child[module.len()])
                .collect();
            (module.clone(), imports(module, text, &children))
        })
        .collect()
}

/// Which modules use which. If a child of a module uses something outside of that module, the
/// module counts as the user.
fn uses(modules: &Modules) -> BTreeSet<(String, String)> {
    let mut edges = BTreeSet::new();
    for (module, paths) in modules {
        for path in paths {
            let target = (0..=path.len())
                .rev()
                .map(|len| &path[..len])
                .find(|prefix| modules.contains_key(*prefix));
            let target = target.unwrap_or_default();
            let common = module.iter().zip(target).take_while(|(a, b)| a == b).count();
            let [from, to] =
                [module, target].map(|path| path[..path.len().min(common + 1)].join("::"));
            if from != to {
                edges.insert((from, to));
            }
        }
    }
    edges
}

#[test]
fn no_two_modules_import_each_other() {
    let crates: BTreeSet<_> = ["crates", "tests"]
        .iter()
        .flat_map(|below| files(below, &["rs"]))
        .filter_map(|(file, _)| Some(file.split_once("/src/")?.0.to_owned()))
        .collect();
    let core = uses(&modules("crates/redlock-core"));
    assert!(
        core.contains(&("operations".into(), "wait".into())),
        "the paths of modules are not recognised: {core:?}"
    );
    let mut cycles = Vec::new();
    for krate in &crates {
        let edges = uses(&modules(krate));
        let reaches = |from: &String, to: &String| {
            let mut seen = BTreeSet::new();
            let mut next = vec![from];
            while let Some(module) = next.pop() {
                let further = edges.iter().filter(|(user, _)| user == module).map(|(_, used)| used);
                next.extend(further.filter(|used| seen.insert(*used)));
            }
            seen.contains(to)
        };
        let circular = edges.iter().filter(|(from, to)| reaches(to, from));
        cycles.extend(circular.map(|(from, to)| format!("{krate}: {from} uses {to}")));
    }
    assert!(cycles.is_empty(), "import cycles: {cycles:#?}");
}
