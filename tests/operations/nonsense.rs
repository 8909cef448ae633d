//! A master whose answers are no Redis replies, as when its name leads to another server or a proxy
//! is broken. Only that master's vote is lost. The gateway works as before.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::client::Lease;
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, masters};
use crate::support::turncoat::{FaultyMaster, Nonsense};

/// How much the gateway may grow: several times the limit of one reply, and far less than these
/// answers.
const MOST_GROWTH: f64 = 64.0 * 1024.0 * 1024.0;
/// How many locks are granted while a master answers nonsense. Beside each of them /livez is
/// probed.
const ROUNDS: usize = 50;

/// A gateway over four good masters and one bad one.
struct Stage {
    // Declared first and so dropped first: the gateway needs the servers until it ends.
    gateway: Gateway,
    faulty: FaultyMaster,
    _servers: Vec<RedisServer>,
}

impl Stage {
    async fn set() -> Self {
        Self::with("6s").await
    }

    async fn with(node_timeout: &str) -> Self {
        let servers = masters(5);
        let faulty = FaultyMaster::before(&servers[0]);
        let urls: Vec<_> =
            [faulty.url()].into_iter().chain(servers[1..].iter().map(RedisServer::url)).collect();
        let launch = Launch::embedded().nodes(&urls).flag("--node-timeout", node_timeout);
        let launch = launch.brand_new();
        Self { gateway: launch.ready().await, faulty, _servers: servers }
    }

    async fn node(&self) -> Value {
        let health = self.gateway.readyz().await.json();
        let nodes = health["nodes"].as_array().expect("readyz lists nodes").clone();
        let name = format!("127.0.0.1:{}", self.faulty.port());
        nodes.into_iter().find(|node| node["node"] == name.as_str()).expect("the node is listed")
    }

    /// The node is down for this reason, on open connections as well as on new ones.
    async fn is_down_for(&self, why: &str) {
        let earlier = self.faulty.nonsense_count();
        eventually(why, async || {
            let node = self.node().await;
            let detail = node["detail"].as_str().unwrap_or_default();
            let is_reported = detail.contains("not a Redis reply") && detail.contains(why);
            (node["state"] == "connecting"
                && is_reported
                && self.faulty.nonsense_count() >= earlier + 2)
                .then_some(())
        })
        .await;
        let logged = |line: &str| line.contains("node cannot vote") && line.contains(why);
        eventually("the log says why", async || {
            self.gateway.stdout().lines().any(logged).then_some(())
        })
        .await;
    }

    /// Checks that the other four masters grant locks. Returns the slowest probe of /livez.
    async fn others_serve(&self) -> Duration {
        let mut slowest = Duration::ZERO;
        for round in 0..ROUNDS {
            let asked = Instant::now();
            assert_eq!(self.gateway.get("/livez").await.status, 200);
            slowest = slowest.max(asked.elapsed());
            let granted =
                self.gateway.post(&format!("job-{round}"), json!({ "ttl_ms": 60_000 })).await;
            let lease = Lease::from(&granted);
            assert_eq!(
                self.gateway.delete(&format!("job-{round}"), &lease.token).await.status,
                204
            );
        }
        slowest
    }

    /// Sends nonsense for as long as `work` runs.
    async fn amid<T>(&self, nonsense: &Nonsense, why: &str, work: impl Future<Output = T>) -> T {
        self.faulty.start_nonsense(nonsense.clone());
        self.is_down_for(why).await;
        let done = work.await;
        self.faulty.stop_nonsense();
        self.gateway.all_nodes_admitted().await;
        done
    }

    async fn survives(&self, kinds: Vec<(Nonsense, &str)>) {
        for (nonsense, why) in kinds {
            let before = self.gateway.resident();
            let grown = async {
                let slowest = self.others_serve().await;
                let grown = self.gateway.resident() - before;
                println!("{why}: /livez within {slowest:?}, {:.1} MB more", grown / 1e6);
                grown
            };
            let grown = self.amid(&nonsense, why, grown).await;
            assert!(grown < MOST_GROWTH, "{why}: the gateway has grown by {grown} bytes");
        }
    }
}

/// Kinds of nonsense, each with the reason for which the master is down.
type Kinds = Vec<(Nonsense, &'static str)>;

fn nested() -> Kinds {
    vec![(Nonsense::once("*1\r\n".repeat(5_000)), "8 levels")]
}

fn half_a_gigabyte() -> Kinds {
    vec![(Nonsense::endless("$536870912\r\n", "a"), "8388608 bytes")]
}

fn endless_array() -> Kinds {
    vec![(Nonsense::endless("*1000000000\r\n", ":1\r\n"), "16384 elements")]
}

fn endless_lines() -> Kinds {
    vec![(Nonsense::endless("+", "a"), "65536 bytes"), (Nonsense::endless("$", "1"), "65536 bytes")]
}

fn wrong_lengths() -> Kinds {
    let kinds = [
        ("*-2\r\n", "not a number"),
        ("$-2\r\n", "not a number"),
        ("$9223372036854775807\r\n", "8388608 bytes"),
        ("*9223372036854775807\r\n", "16384 elements"),
        ("$99999999999999999999\r\n", "not a number"),
    ];
    kinds.into_iter().map(|(reply, why)| (Nonsense::once(reply), why)).collect()
}

fn streams() -> Kinds {
    vec![
        (Nonsense::endless("*?\r\n", ":1\r\n"), "not a number"),
        (Nonsense::endless("|1\r\n", "+a\r\n:1\r\n"), "begins with '|'"),
    ]
}

fn http() -> Kinds {
    vec![(Nonsense::once("HTTP/1.1 400 Bad Request\r\n\r\n"), "begins with 'H'")]
}

#[tokio::test]
async fn a_masters_long_error_is_cut() {
    let stage = Stage::set().await;
    stage.faulty.start_nonsense(Nonsense::once(format!("-WEIRD {}\r\n", "x".repeat(60_000))));
    let detail = eventually("the error is shown", async || {
        let detail = stage.node().await["detail"].as_str()?.to_owned();
        detail.contains("WEIRD").then_some(detail)
    })
    .await;
    assert!(detail.len() <= 400, "{} bytes", detail.len());
    eventually("the error is logged", async || {
        stage.gateway.stdout().contains("WEIRD").then_some(())
    })
    .await;
    // Lines of the Redis client are not logged unless RUST_LOG asks for them, as here.
    let log = stage.gateway.stdout();
    let ours = log.lines().filter(|line| line.contains("\"target\":\"redlock"));
    let longest = ours.map(str::len).max().expect("lines");
    assert!(longest <= 1_000, "{longest} bytes");
}

#[tokio::test]
async fn a_master_that_nests_replies_costs_only_its_vote() {
    Stage::set().await.survives(nested()).await;
}

#[tokio::test]
async fn a_master_that_sends_half_a_gigabyte_costs_only_its_vote() {
    Stage::set().await.survives(half_a_gigabyte()).await;
}

#[tokio::test]
async fn a_master_that_sends_an_endless_array_costs_only_its_vote() {
    Stage::set().await.survives(endless_array()).await;
}

#[tokio::test]
async fn a_master_that_sends_an_endless_line_costs_only_its_vote() {
    Stage::set().await.survives(endless_lines()).await;
}

#[tokio::test]
async fn a_master_whose_lengths_lie_costs_only_its_vote() {
    Stage::set().await.survives(wrong_lengths()).await;
}

#[tokio::test]
async fn a_master_that_streams_or_speaks_http_costs_only_its_vote() {
    Stage::set().await.survives([streams(), http()].concat()).await;
}

/// Each reply is valid, but nobody has asked for it. As long as the connection lasts, reading the
/// replies takes processor time.
#[tokio::test]
async fn a_master_that_replies_endlessly_takes_no_memory() {
    // The worker gives up a master without an answer after twice the node timeout.
    let stage = Stage::with("500ms").await;
    for reply in [
        "+OK\r\n".to_owned(),
        format!(">3\r\n+message\r\n+c\r\n$8000\r\n{}\r\n", "a".repeat(8_000)),
    ] {
        let before = stage.gateway.resident();
        stage.faulty.start_nonsense(Nonsense::endless("", reply));
        eventually("the master does not vote", async || {
            (stage.node().await["state"] != "admitted").then_some(())
        })
        .await;
        let earlier = stage.faulty.nonsense_count();
        eventually("the worker has tried again", async || {
            (stage.faulty.nonsense_count() > earlier).then_some(())
        })
        .await;
        assert_eq!(stage.gateway.get("/livez").await.status, 200);
        let grown = stage.gateway.resident() - before;
        println!("unasked: {:.1} MB more", grown / 1e6);
        assert!(grown < MOST_GROWTH, "the gateway has grown by {grown} bytes");
        stage.faulty.stop_nonsense();
        stage.gateway.all_nodes_admitted().await;
    }
}

mod measured {
    use super::*;
    use crate::support::measure::measured;

    /// The longest time for a probe.
    const SLOWEST: Duration = Duration::from_secs(1);

    #[tokio::test]
    async fn no_nonsense_of_a_master_delays_a_probe() {
        let stage = Stage::set().await;
        // The kinds that consist of one short reply are left out: reading them takes no time.
        let kinds = [nested(), half_a_gigabyte(), endless_array(), endless_lines(), streams()];
        for (nonsense, why) in kinds.concat() {
            measured(why, async || {
                let slowest = stage.amid(&nonsense, why, stage.others_serve()).await;
                println!("{why}: /livez within {slowest:?}");
                let is_quick = slowest < SLOWEST;
                if is_quick { Ok(()) } else { Err(format!("/livez took {slowest:?}")) }
            })
            .await;
        }
    }
}
