//! Configurations with which a gateway must not start silently. Also `check`, which is run before
//! the start: it must fail if the gateway would not work as expected.

use super::config::assert_refused;
use crate::support::gateway::{Launch, Scratch};
use crate::support::harness::{RedisOptions, RedisServer, masters};

const OUTSIDE: [&str; 3] = ["--listen", "0.0.0.0:0", "--allow-anonymous"];

#[tokio::test]
async fn an_empty_list_of_nodes_is_refused() {
    let refused = Launch::bare(&OUTSIDE).finish().await;
    assert_refused(
        "no nodes",
        &refused,
        &["--node", "0.0.0.0:0", "no other gateway", "--embedded"],
    );
    let meant = Launch::bare(&OUTSIDE).argument("--embedded").start().await;
    meant.acquire("job").await;
    for (name, value, words) in [
        ("REDLOCK_NODES", "", "set and empty"),
        ("REDLOCK_NODES", " ,", "set and empty"),
        ("REDLOCK_NODE", "redis://redis-1", "is it REDLOCK_NODES?"),
        ("REDLOCK_BOOTSTRAP", "", "set and empty"),
        ("REDLOCK_GATEWAY_PORT", "tcp://10.0.0.1:8080", "enableServiceLinks"),
    ] {
        for launch in [Launch::bare(&["check"]), Launch::bare(&["--listen", "127.0.0.1:0"])] {
            assert_refused(name, &launch.env(name, value).finish().await, &[name, words]);
        }
    }
    let file = Scratch::new("gateway.toml", "nodes = []");
    let empty = Launch::bare(&["--config", file.path()]).finish().await;
    assert_refused("an empty list", &empty, &["--config", "line 1", "names no node"]);
    let both = Launch::bare(&["--embedded", "--node", "redis://redis-1"]).finish().await;
    assert_refused("both", &both, &["--embedded", "beside --node"]);
}

#[tokio::test]
async fn environment_variables_of_the_redlock_command_are_accepted() {
    let launch =
        Launch::embedded().env("REDLOCK_URL", "http://127.0.0.1:1").env("REDLOCK_OWNER", "me");
    launch
        .env("REDLOCK_KEY_PREFIX", "")
        .env("REDLOCK_RUN_1_2", "1")
        .start()
        .await
        .acquire("job")
        .await;
}

#[tokio::test]
async fn an_unknown_log_level_is_refused() {
    for level in
        ["verbose", "info,verbsoe", "redlock_gateway=loud", "redlock_gateway[request]=debug"]
    {
        for launch in [Launch::embedded(), Launch::bare(&["check"])] {
            assert_refused(
                level,
                &launch.env("RUST_LOG", level).finish().await,
                &["RUST_LOG", level, "debug"],
            );
        }
    }
    // An empty filter counts as no filter. It must not switch the log off.
    let empty = Launch::embedded().env("RUST_LOG", " ,").start().await;
    assert!(empty.stdout().contains("\"listening\""), "{}", empty.stdout());
    for level in ["INFO", "warn, fred=debug", "redlock_gateway::http=trace,off", ""] {
        let checked = Launch::bare(&["check"]).env("RUST_LOG", level).finish().await;
        assert_eq!(checked.code, Some(0), "{level}: {checked:?}");
    }
}

#[tokio::test]
async fn check_agrees_with_start_on_a_new_cluster() {
    let servers = masters(3);
    let urls: Vec<String> = servers.iter().map(RedisServer::url).collect();
    let check = |words: &[&str]| {
        let launch = Launch::bare(&[&["check"], words].concat()).nodes(&urls);
        launch.flag("--node-timeout", "6s").finish()
    };

    let with = check(&["--bootstrap"]).await;
    assert_eq!(with.code, Some(0), "{with:?}");
    for word in
        ["all nodes are new: they are admitted at once", "ok: 3 of 3 nodes would be admitted now"]
    {
        assert!(with.stdout.contains(word), "no {word:?} in\n{}", with.stdout);
    }
    assert!(
        servers.iter().all(|server| server.cmd(&["DBSIZE"]).integer() == 0),
        "a check changes nothing"
    );
    assert_eq!(check(&[]).await.code, Some(1));

    let log = Scratch::new("audit.log", "");
    let good = check(&["--bootstrap", "--audit-log", log.path()]).await;
    assert_eq!(good.code, Some(0), "{good:?}");
    let missing = check(&["--bootstrap", "--audit-log", "/nowhere/audit.log"]).await;
    assert_eq!(missing.code, Some(1), "{missing:?}");
    assert!(
        missing.stdout.contains("WOULD NOT START: --audit-log: /nowhere/audit.log: No such file"),
        "{missing:?}"
    );
    let few = Launch::bare(&["check", "--bootstrap"]).nodes(&urls).files(20).finish().await;
    assert!(few.code == Some(1) && few.stdout.contains("WOULD NOT START"), "{few:?}");

    Launch::over(&servers[..1]).ready().await;
    let used = check(&["--bootstrap"]).await;
    assert_eq!(used.code, Some(1), "{used:?}");
    assert!(used.stdout.contains("--bootstrap: WOULD NOT COUNT: 2 of 3 nodes are new"), "{used:?}");
}

/// A password in a URL would be visible in the list of processes, so it can come from a file.
#[tokio::test]
async fn a_password_file_serves_nodes_whose_url_has_none() {
    let secret = "p@ss:/w?rd%41";
    let options = |password: &str| RedisOptions {
        password: Some(password.into()),
        ..RedisOptions::default()
    };
    let servers =
        ["its-own", secret, secret].map(|password| RedisServer::start_with(options(password)));
    let file = Scratch::new("password", &format!("{secret}\n"));
    let bare = |server: &RedisServer| format!("redis://127.0.0.1:{}", server.port());
    let urls = [servers[0].url(), bare(&servers[1]), bare(&servers[2])];
    let with_file = |words: &[&str]| {
        let launch = Launch::bare(words).nodes(&urls).flag("--node-timeout", "6s");
        launch.flag("--node-password-file", file.path())
    };

    let checked = with_file(&["check", "--bootstrap"]).finish().await;
    assert!(checked.code == Some(0) && !checked.stdout.contains(secret), "{checked:?}");
    let serve = ["--listen", "127.0.0.1:0", "--bootstrap"];
    let gateway = with_file(&serve).ready().await;
    gateway.acquire("job").await;
    drop(gateway);
    // The password also applies to the nodes that `reconfigure` removes.
    let launch = with_file(&["reconfigure", "--max-ttl", "6m"]);
    let finished =
        urls.iter().fold(launch, |launch, url| launch.more("--old-node", url)).finish().await;
    assert!(
        finished.code == Some(0) && finished.stdout.contains("max_ttl 5m → 6m"),
        "{finished:?}"
    );

    for (text, why) in [("", "it is empty"), ("\n", "it is empty"), ("a\nb\n", "several lines")] {
        let wrong = Scratch::new("password", text);
        let launch =
            Launch::bare(&["check"]).nodes(&urls).flag("--node-password-file", wrong.path());
        assert_refused(
            why,
            &launch.finish().await,
            &["--node-password-file", wrong.path(), why, "one line"],
        );
    }
    let launch = |urls: &[String]| {
        Launch::bare(&["check"]).nodes(urls).flag("--node-password-file", file.path()).finish()
    };
    assert_refused(
        "idle",
        &launch(&urls[..1]).await,
        &["--node-password-file", "every --node has a password"],
    );
    assert_refused("no nodes", &launch(&[]).await, &["--node-password-file", "no --node is given"]);
    let missing = Launch::bare(&["check", "--node-password-file", "/nonexistent"])
        .nodes(&urls)
        .finish()
        .await;
    assert_refused("missing", &missing, &["--node-password-file: /nonexistent", "No such file"]);
}
