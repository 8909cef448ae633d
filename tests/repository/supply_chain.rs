//! The crates in the program. All come from one registry, are pinned by their digests, have a
//! licence that deny.toml allows, and use one implementation of cryptography. Where cargo-deny is
//! installed, it checks this and more.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

use crate::support::gateway::source_root;

fn text(file: &str) -> String {
    std::fs::read_to_string(source_root().join(file))
        .unwrap_or_else(|error| panic!("{file}: {error}"))
}

fn cargo(args: &[&str]) -> String {
    let ran =
        Command::new(env!("CARGO")).args(args).arg("--locked").current_dir(source_root()).output();
    let ran = ran.expect("cargo starts");
    assert!(ran.status.success(), "cargo {args:?}: {}", String::from_utf8_lossy(&ran.stderr));
    String::from_utf8(ran.stdout).expect("text")
}

/// The quoted words of the list in deny.toml that begins with `start`.
fn list(deny: &str, start: &str) -> Vec<String> {
    let list = deny.split(start).nth(1).and_then(|rest| rest.split("\n]").next());
    let list = list.unwrap_or_else(|| panic!("deny.toml has no {start:?}"));
    let lines = list.lines().filter(|line| !line.trim_start().starts_with('#'));
    let words: Vec<String> =
        lines.flat_map(|line| line.split('"').skip(1).step_by(2)).map(String::from).collect();
    assert!(words.len() > 2, "{words:?}");
    words
}

/// Whether the allowed licences are enough for an SPDX expression. The older form with a slash
/// counts too.
fn is_allowed(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ")
        .replace(" WITH ", "-WITH-");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let (met, end) = any_of(&words, 0, allowed);
    assert_eq!(end, words.len(), "{expression:?} is not an expression");
    met
}

fn any_of(words: &[&str], at: usize, allowed: &[String]) -> (bool, usize) {
    let (mut met, mut at) = all_of(words, at, allowed);
    while words.get(at) == Some(&"OR") {
        let (also, end) = all_of(words, at + 1, allowed);
        (met, at) = (met || also, end);
    }
    (met, at)
}

fn all_of(words: &[&str], at: usize, allowed: &[String]) -> (bool, usize) {
    let (mut met, mut at) = one_of(words, at, allowed);
    while words.get(at) == Some(&"AND") {
        let (also, end) = one_of(words, at + 1, allowed);
        (met, at) = (met && also, end);
    }
    (met, at)
}

fn one_of(words: &[&str], at: usize, allowed: &[String]) -> (bool, usize) {
    if words.get(at) != Some(&"(") {
        return (
            words.get(at).is_some_and(|word| allowed.iter().any(|license| license == word)),
            at + 1,
        );
    }
    let (met, end) = any_of(words, at + 1, allowed);
    assert_eq!(words.get(end), Some(&")"), "{words:?}");
    (met, end + 1)
}

#[test]
fn licence_expressions_are_read_as_spdx_defines_them() {
    let allowed = ["MIT", "ISC"].map(String::from);
    for good in [
        "MIT",
        "GPL-3.0 OR MIT",
        "MIT/GPL-3.0",
        "MIT AND ISC",
        "(MIT OR GPL-3.0) AND ISC",
        "GPL-3.0 AND X OR ISC",
    ] {
        assert!(is_allowed(good, &allowed), "{good}");
    }
    for bad in
        ["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR ISC) AND X", "MIT WITH something", "GPL-3.0/X"]
    {
        assert!(!is_allowed(bad, &allowed), "{bad}");
    }
}

#[test]
fn every_crate_is_pinned_and_comes_from_one_registry() {
    let lock = text("Cargo.lock");
    let mut ours = 0;
    let mut theirs = 0;
    let mut registries = BTreeSet::new();
    for package in lock.split("[[package]]").skip(1) {
        let field = |name: &str| {
            let line =
                package.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = \""));
            line.map(|value| value.trim_end_matches('"'))
        };
        let name = field("name").expect("a package has a name");
        match field("source") {
            None => {
                let is_stand_in = name == "redis-protocol" && field("version") == Some("6.999.0");
                assert!(name.starts_with("redlock-") || is_stand_in, "{name} has no source");
                ours += 1;
            }
            Some(source) => {
                assert!(source.starts_with("registry+"), "{name} is not from a registry: {source}");
                registries.insert(source.to_owned());
                assert!(
                    field("checksum").is_some_and(|digest| digest.len() == 64),
                    "{name} is not pinned"
                );
                theirs += 1;
            }
        }
    }
    assert_eq!(registries.len(), 1, "{registries:?}");
    assert!(ours > 5 && theirs > 100, "{ours} own crates, {theirs} others");
    let deny = text(".cargo/deny.toml");
    for line in ["unknown-registry = \"deny\"", "unknown-git = \"deny\"", "allow-git = []"] {
        assert!(deny.lines().any(|found| found == line), "deny.toml does not say {line}");
    }
}

/// Below the Redis client is the parser with limits.
#[test]
fn the_redis_client_is_built_on_the_bounded_parser() {
    let users_of = |package| {
        let words = [
            "tree",
            "--workspace",
            "--target",
            "all",
            "--prefix",
            "depth",
            "--format",
            " {p}",
            "-i",
            package,
        ];
        cargo(&words)
    };
    let tree = users_of("redis-protocol@5.0.1");
    let users: Vec<&str> = tree.lines().filter_map(|line| line.strip_prefix("1 ")).collect();
    assert!(
        matches!(users[..], [user] if user.contains("v6.999.0")),
        "{users:?} use the parser without limits: {tree}"
    );
    let fred = users_of("redis-protocol@6.999.0");
    assert!(
        fred.lines().any(|line| line.starts_with("1 fred ")),
        "fred is built on another parser: {fred}"
    );
}

#[test]
fn every_licence_is_allowed_and_every_allowed_one_is_used() {
    let allowed = list(&text(".cargo/deny.toml"), "\nallow = [");
    let metadata: Value =
        serde_json::from_str(&cargo(&["metadata", "--format-version", "1"])).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    assert!(packages.len() > 100);
    for package in packages {
        let name = &package["name"];
        let license =
            package["license"].as_str().unwrap_or_else(|| panic!("{name} names no licence"));
        assert!(
            is_allowed(license, &allowed),
            "{name} is under {license}: deny.toml allows {allowed:?}"
        );
    }
    for license in &allowed {
        let mut named = packages.iter().filter_map(|package| package["license"].as_str());
        assert!(
            named.any(|names| names.contains(license.as_str())),
            "nothing is under {license} any more"
        );
    }
}

#[test]
fn only_one_cryptography_implementation_is_used() {
    let banned = list(&text(".cargo/deny.toml"), "\ndeny = [");
    // Only enabled features count. The lock file also lists crates of features that are off.
    let tree = cargo(&[
        "tree",
        "--workspace",
        "--target",
        "all",
        "--edges",
        "all",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ]);
    let built: Vec<&str> = tree.lines().filter_map(|line| line.split(' ').next()).collect();
    assert!(
        built.contains(&"rustls") && built.contains(&"aws-lc-rs"),
        "this test searches for the wrong text"
    );
    assert!(banned.contains(&"ring".to_owned()), "{banned:?}");
    for krate in &banned {
        assert!(
            !built.contains(&krate.as_str()),
            "{krate} is compiled: see cargo tree --invert {krate}"
        );
    }
}

/// Each builder may choose a mirror. The lock file names the registry from which a digest comes.
#[test]
fn no_file_names_a_registry_host() {
    let hosts = [
        "npmjs.org",
        "pypi.org",
        "pythonhosted.org",
        "proxy.golang.org",
        "maven.apache.org",
        "repo1.maven",
        "index.crates.io",
    ];
    let hosts = hosts.into_iter().chain([
        "static.crates.io",
        "crates.io-index",
        // The slash tells the registry from Debian's package `docker.io`, which a test installs.
        "docker.io/",
        "gcr.io",
        "ghcr.io",
        "quay.io",
        "deb.debian.org",
    ]);
    let hosts: Vec<_> = hosts.collect();
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(source_root())
        .output()
        .expect("git is installed");
    let listed = String::from_utf8(listed.stdout).expect("names are text");
    let is_named =
        |file: &&str| !file.ends_with("Cargo.lock") && !file.ends_with("supply_chain.rs");
    let files: Vec<&str> =
        listed.split('\0').filter(|file| !file.is_empty()).filter(is_named).collect();
    assert!(files.len() > 200, "{files:?}");
    for file in files {
        let text = std::fs::read(source_root().join(file)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let found: Vec<_> = hosts.iter().filter(|host| text.contains(**host)).collect();
        assert!(found.is_empty(), "{file} names {found:?}");
    }
}

#[test]
fn everything_that_is_published_has_one_version() {
    let version = env!("CARGO_PKG_VERSION");
    let api = "redlock-api = { path = \"crates/redlock-api\", version = \"#\" }";
    let client = "redlock-client = { path = \"crates/redlock-client\", version = \"#\" }";
    let places = [
        ("Cargo.toml", "version = \"#\"\nedition"),
        ("Cargo.toml", api),
        ("Cargo.toml", client),
        ("README.md", "redlock-gateway:#"),
        ("crates/redlock-gateway/Dockerfile", "redlock-gateway:#"),
        ("crates/redlock-gateway/Dockerfile", "redlock-master:#"),
        ("docker-compose.yml", "redlock-gateway:#"),
        ("docker-compose.yml", "redlock-master:#"),
        ("k8s/Chart.yaml", "\nversion: #"),
        ("k8s/Chart.yaml", "appVersion: #"),
        ("k8s/base/kustomization.yaml", "newTag: #"),
        ("k8s/make-secrets", "redlock-gateway:#"),
        ("k8s/values.yaml", "redlock-gateway:#"),
        ("k8s/values.yaml", "redlock-master:#"),
        ("openapi/clients/go/client.go", "redlock-gateway-go/#"),
        ("openapi/clients/python/pyproject.toml", "version = \"#\""),
        ("openapi/clients/python/redlock_gateway/__init__.py", "__version__ = \"#\""),
        ("openapi/clients/typescript/package.json", "\"version\": \"#\""),
        ("openapi/clients/typescript/package-lock.json", "\"version\": \"#\""),
        ("openapi/clients/typescript/check", "redlock-gateway-#.tgz"),
    ];
    for (file, place) in places {
        let place = place.replace('#', version);
        assert!(text(file).contains(&place), "{file} does not say {place:?}");
    }
}
