//! The first start of a cluster. `--bootstrap` is advised where it still applies, and nowhere else.

use serde_json::Value;

use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, masters};

fn urls(servers: &[RedisServer]) -> Vec<String> {
    servers.iter().map(RedisServer::url).collect()
}

async fn checked(servers: &[RedisServer], more: &[&str]) -> String {
    let launch = Launch::bare(&[&["check"], more].concat()).nodes(&urls(servers));
    launch.flag("--node-timeout", "6s").finish().await.stdout
}

/// Waits until `/readyz` has advice for `count` nodes, and each advice starts with `begins`. Before
/// a gateway has connected to a node, its advice about the node is another one.
async fn advice(gateway: &Gateway, count: usize, begins: &str) {
    eventually(&format!("{count} nodes are advised: {begins}"), async || {
        let health = gateway.readyz().await.json();
        let nodes = health["nodes"].as_array().expect("nodes").clone();
        let advice: Vec<_> = nodes
            .iter()
            .filter(|node| node["state"] != "admitted" && node["state"] != "catching_up")
            .filter_map(|node: &Value| node["advice"].as_str().map(str::to_owned))
            .collect();
        (advice.len() == count && advice.iter().all(|advice| advice.starts_with(begins)))
            .then_some(())
    })
    .await;
}

#[tokio::test]
async fn bootstrap_is_advised_until_a_gateway_has_seen_the_masters() {
    let servers = masters(3);
    let advised = "start its first gateway with --bootstrap";
    let before = checked(&servers, &[]).await;
    assert!(before.contains(advised), "{before}");

    // This gateway puts markers on the masters, and from then on the flag has no effect.
    let gateway = Launch::embedded().nodes(&urls(&servers)).start().await;
    advice(&gateway, 3, "wait at most 5m").await;
    let after = checked(&servers, &[]).await;
    assert!(after.contains("WOULD WAIT") && !after.contains("--bootstrap"), "{after}");
    eventually("the banner is complete", async || gateway.stdout().contains("docs:").then_some(()))
        .await;
    let told = format!("{}{}{}", gateway.stderr(), gateway.stdout(), gateway.readyz().await.text());
    assert!(!told.contains("--bootstrap"), "{told}");
}

#[tokio::test]
async fn bootstrap_is_not_advised_after_two_masters_were_emptied() {
    let mut servers = masters(3);
    drop(Launch::over(&servers).ready().await);
    for server in &mut servers[..2] {
        server.kill_and_wipe();
        server.restart();
    }
    let report = checked(&servers, &[]).await;
    assert!(!report.contains("--bootstrap"), "{report}");
    let report = checked(&servers, &["--bootstrap"]).await;
    for words in ["--bootstrap: WOULD NOT COUNT: 2 of 3", "leave the flag out", "start nodes that"]
    {
        assert!(report.contains(words), "no {words:?} in {report}");
    }

    // The flag is given, is not applied, and is advised nowhere.
    let gateway = Launch::over(&servers).start().await;
    eventually("the log says that the flag has no effect", async || {
        let log = gateway.stdout();
        let line = log.lines().find(|line| line.contains("not applied"))?;
        let words = ["without effect", "\"at_most\":\"5m 5s\"", "`until` in /readyz"];
        words.iter().all(|word| line.contains(word)).then_some(())
    })
    .await;
    advice(&gateway, 2, "wait at most ").await;
}

#[tokio::test]
async fn a_dead_master_is_to_be_brought_back() {
    let mut servers = masters(3);
    let gateway = Launch::over(&servers).ready().await;
    servers[0].kill();
    advice(&gateway, 1, "start the master again, with its data").await;
}

#[tokio::test]
async fn the_banner_shows_the_first_start_before_it_is_too_late() {
    let embedded = Launch::embedded().start().await;
    let shows = async |gateway: &Gateway, words: &str| {
        eventually(words, async || gateway.stdout().contains(words).then_some(())).await
    };
    shows(&embedded, "redlock-gateway --bootstrap --node").await;
    let servers = masters(3);
    let first = Launch::over(&servers).ready().await;
    shows(&first, "Leave the flag out from the next start on").await;
}
