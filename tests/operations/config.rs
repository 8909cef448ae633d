//! Wrong configurations, and the operator's commands. A mistake ends the program before it opens a
//! port. The message names the setting, its value and the allowed values. It never contains a
//! password.

use serde_json::json;

use crate::support::gateway::{Finished, Launch, Scratch};
use crate::support::harness::{RedisOptions, RedisServer, eventually, masters};
use crate::support::resp::Resp;

/// A password. No output may contain it, wherever it was given.
const SECRET: &str = "hunter2-the-password";

#[track_caller]
pub(super) fn assert_refused(what: &str, finished: &Finished, words: &[&str]) {
    assert_ended(2, what, finished, words);
}

/// Checks that a command understood its arguments, but failed.
#[track_caller]
pub(super) fn assert_not_done(what: &str, finished: &Finished, words: &[&str]) {
    assert_ended(1, what, finished, words);
}

#[track_caller]
fn assert_ended(code: i32, what: &str, finished: &Finished, words: &[&str]) {
    assert_eq!(finished.code, Some(code), "{what}: {finished:?}");
    assert_eq!(finished.stdout, "", "{what}");
    for word in words {
        assert!(finished.stderr.contains(word), "{what}: {word:?} is not in {:?}", finished.stderr);
    }
    assert!(
        !finished.stderr.contains(SECRET),
        "{what}: the password is shown: {}",
        finished.stderr
    );
    assert!(!finished.stderr.contains("panicked"), "{what}: {}", finished.stderr);
}

#[tokio::test]
async fn an_address_that_others_can_reach_needs_consent() {
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:8080"] {
        let refused = Launch::bare(&["--listen", address]).finish().await;
        assert_refused(
            address,
            &refused,
            &["--listen", address, "reachable from other machines", "--allow-anonymous"],
        );
    }
    let anonymous = ["--listen", "0.0.0.0:0", "--embedded", "--allow-anonymous"];
    for launch in [
        Launch::bare(&anonymous),
        Launch::bare(&anonymous[..3]).env("REDLOCK_ALLOW_ANONYMOUS", "true"),
        Launch::bare(&["serve", "--listen", "0.0.0.0:0", "--allow-anonymous=true"])
            .env("REDLOCK_EMBEDDED", "true"),
    ] {
        let gateway = launch.start().await;
        assert!(gateway.address().ip().is_unspecified(), "{}", gateway.address());
    }
    let taken_back = Launch::bare(&["--listen", "0.0.0.0:0", "--allow-anonymous=false"]);
    assert_refused(
        "false",
        &taken_back.env("REDLOCK_ALLOW_ANONYMOUS", "true").finish().await,
        &["--allow-anonymous"],
    );
}

#[tokio::test]
async fn addresses_that_overlap_are_refused_by_check_too() {
    for (clients, operators) in [
        ("127.0.0.1:9999", "127.0.0.1:9999"),
        ("127.0.0.1:9999", "0.0.0.0:9999"),
        ("127.0.0.1:9999", "[::]:9999"),
        ("[::1]:9999", "[::]:9999"),
    ] {
        for command in ["serve", "check"] {
            let flags = [command, "--listen", clients, "--admin-listen", operators];
            let refused = Launch::bare(&flags).finish().await;
            assert_refused(command, &refused, &["--admin-listen", "overlaps", clients, operators]);
        }
    }
    // The first address is free on IPv6 only, the second one on IPv4 only.
    let flags = ["check", "--listen", "[::1]:9999", "--admin-listen", "0.0.0.0:9999"];
    let checked = Launch::bare(&flags).finish().await;
    assert!(!checked.stderr.contains("overlaps"), "{checked:?}");
}

#[tokio::test]
async fn bad_flags_are_refused_with_flag_value_and_allowed_values() {
    let node = format!("http://:{SECRET}@redis-1:6379");
    let bad_port = format!("redis://:{SECRET}@redis-1:port");
    let bad_database = format!("redis://:{SECRET}@redis-1:6379/last");
    let many: Vec<String> = (1..=64).map(|n| format!("redis://redis-{n}")).collect();
    let cases: [(&str, &str, &[&str]); 23] = [
        ("--listen", "8080", &["IP:PORT"]),
        ("--listen", "localhost:8080", &["IP:PORT"]),
        ("--max-ttl", "soon", &["10ms to 24h"]),
        ("--max-ttl", "2days", &["10ms to 24h"]),
        ("--default-ttl", "10m", &["--max-ttl", "5m"]),
        ("--default-ttl", "1ms", &["10ms to 24h"]),
        ("--max-wait", "-1s", &["0s to 24h"]),
        ("--max-hold", "1s", &["5m to"]),
        ("--node-timeout", "0s", &["1ms to 10s"]),
        ("--clock-skew", "1h", &["100ms to 10m"]),
        ("--shutdown-grace", "2h", &["0s to 1h"]),
        ("--drift-factor", "0.6", &["0.0 to 0.5"]),
        ("--drift-factor", "NaN", &["0.0 to 0.5"]),
        ("--drift-factor", "little", &["0.0 to 0.5"]),
        ("--max-in-flight", "0", &["1 to 1000000"]),
        ("--max-connections", "many", &["1 to 1000000"]),
        ("--max-waiters", "-1", &["1 to 1000000"]),
        ("--max-waiters-per-lock", "0", &["1 to 1000000"]),
        ("--max-waiters-per-client", "0", &["1 to 1000000"]),
        ("--max-waited-locks-per-client", "all", &["1 to 1000000"]),
        ("--worker-threads", "5000", &["1 to 1024"]),
        ("--key-prefix", "{lock}", &["without braces"]),
        ("--log-format", "xml", &["text", "json"]),
    ];
    for (flag, value, words) in cases {
        let refused = Launch::bare(&[&format!("{flag}={value}")]).finish().await;
        assert_refused(flag, &refused, &[&[flag, value], words].concat());
    }
    for (value, words) in [
        (node.as_str(), ["neither redis nor rediss", "redis://[[user]:password@]host[:port]"]),
        (&bad_port, ["not a URL", "rediss://"]),
        (&bad_database, ["database is not a number", "/database"]),
    ] {
        let launch = Launch::bare(&["--node", "redis://redis-0", "--node", value]);
        assert_refused(
            "--node",
            &launch.finish().await,
            &[&["--node, number 2"], words.as_slice()].concat(),
        );
        let launch = Launch::bare(&[]).env("REDLOCK_NODES", &format!("redis://redis-0,{value}"));
        assert_refused(
            "REDLOCK_NODES",
            &launch.finish().await,
            &[&["--node, number 2"], words.as_slice()].concat(),
        );
    }
    let twice = format!("redis://redis-1,redis://:{SECRET}@redis-1:6379/2");
    let twice = Launch::bare(&[]).env("REDLOCK_NODES", &twice).finish().await;
    assert_refused("twice", &twice, &["--node", "redis-1:6379", "twice"]);
    let many = Launch::bare(&["--node", &many.join(",")]).finish().await;
    assert_refused("64 nodes", &many, &["--node", "64 nodes", "allowed are 1 to"]);
    assert_refused(
        "unknown",
        &Launch::bare(&["--max-tll", "5m"]).finish().await,
        &["--max-tll", "--max-ttl"],
    );
    assert_refused("unknown", &Launch::bare(&["sevre"]).finish().await, &["sevre", "serve"]);
}

#[tokio::test]
async fn bad_environment_variables_and_files_are_refused_like_flags() {
    for (variable, value, words) in [
        ("REDLOCK_MAX_TTL", "soon", ["--max-ttl", "10ms to 24h"]),
        ("REDLOCK_LISTEN", "here", ["--listen", "IP:PORT"]),
        ("REDLOCK_MAX_IN_FLIGHT", "many", ["--max-in-flight", "1 to 1000000"]),
        ("REDLOCK_LOG_FORMAT", "xml", ["--log-format", "text, json"]),
        ("REDLOCK_ALLOW_ANONYMOUS", "perhaps", ["--allow-anonymous", "true, false"]),
        ("REDLOCK_BOOTSTRAP", "perhaps", ["--bootstrap", "true, false"]),
    ] {
        let refused = Launch::bare(&[]).env(variable, value).finish().await;
        assert_refused(variable, &refused, &[&[value], words.as_slice()].concat());
    }
    let secret_url = format!("redis://:{SECRET}@redis-1");
    let not_a_list = format!("nodes = '{secret_url}'");
    let broken = format!("max_ttl = '5m'\nnodes = ['{secret_url}\n");
    let misplaced = format!("max_ttl = '5m'\nmax_waiters = '{secret_url}'\n");
    let misnamed = format!("max_ttl = '5m'\nlog_format = '{secret_url}'\n");
    let misplaced_too = format!("listen = ['{secret_url}']\n");
    let cases: [(&str, &str, &[&str]); 10] = [
        ("an unknown key", "max_tll = '5m'", &["line 1", "max_tll", "max_ttl"]),
        ("a bad value", "max_ttl = 'soon'", &["--max-ttl", "soon", "10ms to 24h"]),
        (
            "a number for a duration",
            "listen = '127.0.0.1:0'\nmax_ttl = 300",
            &["line 2", "max_ttl", "string"],
        ),
        ("a text for a number", "max_in_flight = 'many'", &["line 1", "max_in_flight"]),
        ("no TOML", "max_ttl", &["line 1"]),
        ("nodes that are no list", &not_a_list, &["line 1", "nodes"]),
        ("a string that is not closed", &broken, &["line 2"]),
        ("a URL for a number", &misplaced, &["line 2", "max_waiters"]),
        ("a URL for a word", &misnamed, &["line 2", "log_format"]),
        ("a URL for an address", &misplaced_too, &["line 1", "listen"]),
    ];
    for (what, text, words) in cases {
        let path = Scratch::new("gateway.toml", text);
        let path = path.path();
        for launch in
            [Launch::bare(&["--config", path]), Launch::bare(&[]).env("REDLOCK_CONFIG", path)]
        {
            assert_refused(what, &launch.finish().await, words);
        }
        if what != "a bad value" {
            assert_refused(
                what,
                &Launch::bare(&["--config", path]).finish().await,
                &["--config", path],
            );
        }
    }
    let absent = Launch::bare(&["--config", "/nowhere/gateway.toml"]).finish().await;
    assert_refused("no file", &absent, &["--config", "/nowhere/gateway.toml", "No such file"]);
}

#[tokio::test]
async fn the_help_names_every_setting_and_shows_no_password() {
    let secret = format!("redis://:{SECRET}@redis-1");
    for argument in ["--help", "-h"] {
        let help = Launch::bare(&[argument]).env("REDLOCK_NODES", &secret).finish().await;
        assert_eq!((help.code, help.stderr.as_str()), (Some(0), ""));
        assert!(!help.stdout.contains(SECRET), "{}", help.stdout);
        let shown = help.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
        for setting in [
            "listen",
            "node",
            "tls-cert",
            "tls-key",
            "tls-client-ca",
            "node-ca",
            "node-cert",
            "node-key",
            "config",
            "default-ttl",
            "max-ttl",
            "max-wait",
            "max-hold",
            "node-timeout",
            "drift-factor",
            "clock-skew",
            "key-prefix",
            "max-waiters",
            "max-waiters-per-lock",
            "max-waiters-per-client",
            "max-waited-locks-per-client",
            "worker-threads",
            "max-connections",
            "max-connections-per-client",
            "memory-budget",
            "max-in-flight",
            "cluster",
            "bootstrap",
            "allow-anonymous",
            "cors-origin",
            "log-format",
            "log-lock-names",
            "public-url",
            "shutdown-grace",
        ] {
            assert!(
                help.stdout.contains(&format!("--{setting}")),
                "--{setting} is not in\n{}",
                help.stdout
            );
            let variable = match setting {
                "node" => "REDLOCK_NODES".into(),
                "cors-origin" => "REDLOCK_CORS_ORIGINS".into(),
                _ => format!("REDLOCK_{}", setting.replace('-', "_").to_uppercase()),
            };
            assert!(
                shown.contains(&format!("[env: {variable}")),
                "{variable} is not in\n{}",
                help.stdout
            );
        }
        for command in ["serve", "openapi", "check", "reconfigure"] {
            assert!(help.stdout.contains(command), "{command} is not in\n{}", help.stdout);
        }
    }
}

async fn longest_ttl(launch: Launch) -> String {
    let gateway = launch.start().await;
    let problem = gateway.post("job", json!({ "ttl_ms": 0 })).await.problem(400, "invalid_ttl");
    problem["detail"].as_str().unwrap().rsplit(' ').next().unwrap().to_owned()
}

#[tokio::test]
async fn flags_beat_environment_beats_file_beats_defaults() {
    let text = "listen = '127.0.0.1:0'\nmax_ttl = '1m'\nmax_hold = '1h'\n";
    let path = Scratch::new("gateway.toml", text);
    let path = path.path();
    let file = || Launch::bare(&["--config", path]);
    assert_eq!(longest_ttl(Launch::embedded()).await, "300000");
    assert_eq!(longest_ttl(file()).await, "60000");
    assert_eq!(longest_ttl(file().env("REDLOCK_MAX_TTL", "2m")).await, "120000");
    assert_eq!(
        longest_ttl(file().env("REDLOCK_MAX_TTL", "2m").flag("--max-ttl", "3m")).await,
        "180000"
    );
    let by_environment = Launch::bare(&[]).env("REDLOCK_CONFIG", path).env("REDLOCK_MAX_TTL", "4m");
    assert_eq!(longest_ttl(by_environment).await, "240000");
}

#[tokio::test]
async fn only_nodes_from_the_file_or_the_environment_are_used() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    // Without `bootstrap`, the masters would be in quarantine for an hour.
    let path = Scratch::new(
        "gateway.toml",
        &format!("key_prefix = 'mine/'\nbootstrap = true\nmax_ttl = '1h'\nnodes = {urls:?}\n"),
    );
    let from_file =
        Launch::embedded().flag("--config", path.path()).flag("--node-timeout", "6s").ready().await;
    let lease = from_file.acquire_for("job", 300_000).await;
    let stored =
        servers.iter().filter(|server| server.cmd(&["GET", "mine/job"]) != Resp::Nil).count();
    assert!(stored >= 2, "the prefix of the file is not used");
    let from_environment = Launch::embedded()
        .env("REDLOCK_NODES", &urls.join(" , "))
        .env("REDLOCK_KEY_PREFIX", "mine/");
    let from_environment = from_environment.flag("--max-ttl", "1h").flag("--node-timeout", "6s");
    let from_environment = from_environment.ready().await;
    assert_eq!(from_environment.inspect("job").await["fencing_token"], lease.fencing);
}

#[tokio::test]
async fn a_password_is_used_and_a_missing_one_is_reported() {
    let options = || RedisOptions { password: Some(SECRET.into()), ..RedisOptions::default() };
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start_with(options())).collect();
    Launch::over(&servers).flag("--node-timeout", "6s").ready().await.acquire("job").await;
    let without: Vec<String> =
        servers.iter().map(|server| format!("redis://127.0.0.1:{}", server.port())).collect();
    let gateway = Launch::embedded().nodes(&without).start().await;
    eventually("every node says why", async || {
        let health = gateway.readyz().await.json();
        let nodes = health["nodes"].as_array().unwrap().clone();
        nodes
            .iter()
            .all(|node| node["detail"].as_str().is_some_and(|why| why.contains("NOAUTH")))
            .then_some(())
    })
    .await;
    gateway.post("other", json!({})).await.problem(503, "quorum_unavailable");
}

#[tokio::test]
async fn check_reports_every_node_and_fails_without_a_majority() {
    let mut servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    // A busy master must not count as unreachable.
    let launch = || Launch::bare(&["check"]).nodes(&urls).flag("--node-timeout", "6s");
    let check = || launch().finish();

    let blank = check().await;
    assert_eq!((blank.code, blank.stderr.as_str()), (Some(1), ""), "{blank:?}");
    let verdict = "NOT ENOUGH: 0 of 3 nodes would be admitted now, 3 after a quarantine, 2 needed";
    for word in [verdict, "WOULD WAIT 5m 5s", "it is new, or all its data was lost", "--bootstrap"]
    {
        assert!(blank.stdout.contains(word), "no {word:?} in\n{}", blank.stdout);
    }
    for server in &servers {
        let words = [
            "role master",
            "policy noeviction",
            "lose locks (appendonly no)",
            "marker absent",
            "clock ",
            "evicted 0",
        ];
        assert_reported(&blank, server, &words);
        assert_eq!(server.cmd(&["DBSIZE"]).integer(), 0, "a check changes nothing");
    }

    let gateway = Launch::over(&servers).ready().await;
    let good = check().await;
    assert_eq!((good.code, good.stderr.as_str()), (Some(0), ""), "{good:?}");
    assert!(good.stdout.contains("ok: 3 of 3 nodes would be admitted now, 2 needed"), "{good:?}");
    servers.iter().for_each(|server| assert_reported(&good, server, &["marker ours"]));
    let other_ttl = launch().flag("--max-ttl", "10m").finish().await;
    assert_eq!(other_ttl.code, Some(1), "{other_ttl:?}");
    for server in &servers {
        assert_reported(&other_ttl, server, &["marker FOREIGN"]);
    }
    assert_eq!(
        other_ttl.stdout.matches("REFUSED: its marker is of another configuration").count(),
        3,
        "{other_ttl:?}"
    );
    let shorter = launch().flag("--max-ttl", "1m").finish().await;
    assert_eq!(shorter.code, Some(0), "a shorter max_ttl is within the limit: {shorter:?}");
    servers.iter().for_each(|server| assert_reported(&shorter, server, &["marker ours"]));
    drop(gateway);

    servers[2].kill();
    let one_dead = check().await;
    assert_eq!((one_dead.code, one_dead.stderr.as_str()), (Some(0), ""), "{one_dead:?}");
    let dead_name = urls[2].replace("redis://", "");
    for word in
        [&format!("{dead_name}: UNREACHABLE"), "ok: 2 of 3 nodes would be admitted now, 2 needed"]
    {
        assert!(one_dead.stdout.contains(word), "no {word:?} in\n{}", one_dead.stdout);
    }

    servers[1].cmd(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let bad = check().await;
    assert_eq!(bad.code, Some(1), "{bad:?}");
    assert_reported(&bad, &servers[1], &["policy allkeys-lru"]);
    for word in [
        "REFUSED: maxmemory-policy is allkeys-lru",
        "UNREACHABLE",
        "NOT ENOUGH: 1 of 3 nodes would be admitted now, 2 needed",
    ] {
        assert!(bad.stdout.contains(word), "no {word:?} in\n{}", bad.stdout);
    }

    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let taken = taken.local_addr().expect("an address").to_string();
    for (address, code, word) in [
        (taken.as_str(), 0, "perhaps a gateway serves there already"),
        // RFC 5737 reserves this address for documentation, so no machine has it.
        ("192.0.2.1:8080", 1, "WOULD NOT START: --listen 192.0.2.1:8080: "),
    ] {
        let arguments = ["check", "--listen", address, "--allow-anonymous", "--embedded"];
        let checked = Launch::bare(&arguments).finish().await;
        assert_eq!(checked.code, Some(code), "{checked:?}");
        assert!(checked.stdout.contains(word), "no {word:?} in\n{}", checked.stdout);
    }
    let empty = Scratch::new("keys.toml", "\n");
    for arguments in [vec!["check"], vec![]] {
        let arguments = [arguments, vec!["--auth-keys", empty.path()]].concat();
        let refused = Launch::bare(&arguments).finish().await;
        assert_refused("keys", &refused, &["--auth-keys", "it is empty"]);
    }

    let refused = Launch::bare(&["check", "--max-ttl", "soon"]).finish().await;
    assert_refused("check", &refused, &["--max-ttl", "soon"]);
    let embedded = Launch::bare(&["check"]).finish().await;
    assert!(embedded.code == Some(0) && embedded.stdout.contains("embedded"), "{embedded:?}");
}

/// Checks that the line about a server contains all these words.
#[track_caller]
fn assert_reported(report: &Finished, server: &RedisServer, words: &[&str]) {
    let start = format!("127.0.0.1:{}: ", server.port());
    let line = report.stdout.lines().find(|line| line.starts_with(&start));
    let line = line.unwrap_or_else(|| panic!("{server:?} is not in\n{}", report.stdout));
    for word in words {
        assert!(line.contains(word), "no {word:?} in {line}");
    }
}

#[tokio::test]
async fn check_counts_one_master_under_two_names_once() {
    let server = RedisServer::start();
    let names = ["127.0.0.1", "localhost"].map(|host| format!("redis://{host}:{}", server.port()));
    let launch = Launch::bare(&["check"]).nodes(&names).flag("--node-timeout", "6s");
    let checked = launch.finish().await;
    assert_eq!(checked.code, Some(1), "{checked:?}");
    assert!(
        checked.stdout.contains("same Redis process") && checked.stdout.contains("NOT ENOUGH"),
        "{checked:?}"
    );
}

/// Checks that a command printed its findings before it failed.
#[track_caller]
pub(super) fn assert_refused_after_output(finished: &Finished, words: &[&str]) {
    assert_eq!(finished.code, Some(1), "{finished:?}");
    assert!(words.iter().all(|word| finished.stderr.contains(word)), "{finished:?}");
}

/// The row of `check`'s table of limits: for all clients together, and for one client.
fn limits_of<'a>(printed: &'a Finished, what: &str) -> (&'a str, &'a str) {
    let row = printed.stdout.lines().find_map(|line| line.strip_prefix("  ")?.strip_prefix(what));
    let row = row.unwrap_or_else(|| panic!("no row {what:?} in\n{}", printed.stdout)).trim_start();
    let (all, one) = row.split_once("  ").unwrap_or_else(|| panic!("one column: {row:?}"));
    (all, one.trim_start())
}

#[tokio::test]
async fn check_prints_the_limits_of_all_clients_and_of_one() {
    let flags = ["check", "--max-connections", "4000", "--max-connections-per-client", "50"];
    let waits = ["--max-waiters", "600", "--max-waiters-per-client", "70"];
    let of_lock = ["--max-waiters-per-lock", "80", "--max-waited-locks-per-client", "9"];
    let launch = flags.into_iter().chain(waits).chain(of_lock).chain(["--max-in-flight", "800"]);
    let printed = Launch::bare(&launch.collect::<Vec<_>>()).finish().await;
    assert_eq!(printed.code, Some(0), "{printed:?}");
    for (what, all, one) in [
        ("connections ", "4000", "50"),
        ("requests in flight", "800", "what is left"),
        ("leases of PATCH /locks in flight", "-", "100"),
        ("waiting requests ", "600", "70"),
        ("waiting requests of one lock", "80", "80"),
        ("locks waited for", "-", "9"),
        ("event streams and waiting requests", "3500", "what is left"),
        ("deferred requests", "300", "70"),
        ("listings", "2", "1"),
    ] {
        assert_eq!(limits_of(&printed, what), (all, one), "{what}");
    }
}
