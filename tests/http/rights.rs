//! What a client may read depends on its permissions: the list of nodes, locks of others. Secrets
//! that a client put into the wrong place are not shown or logged.

use futures_util::future::join_all;
use http::Method;
use serde_json::{Value, json};

use crate::http::auth::is_ready;
use crate::http::keys::{HOLDER, Key, file, key, with_keys};
use crate::support::client::{Answer, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{RedisServer, eventually, masters};
use crate::support::waiters::HOUR_MS;

#[tokio::test]
async fn without_the_metrics_permission_node_addresses_are_hidden() {
    let mut servers = masters(3);
    let plain = key("plain", HOLDER, "*").await;
    let watcher = key("watcher", &format!("{HOLDER},metrics"), "*").await;
    let file = file(&[&plain, &watcher]);
    let launch =
        Launch::over(&servers).flag("--node-timeout", "6s").flag("--auth-keys", file.path());
    let gateway = launch.start().await;
    is_ready(&gateway).await;
    let addresses: Vec<_> =
        servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    let shows_addresses =
        |answer: &Answer| addresses.iter().any(|address| answer.text().contains(address));
    let leases =
        [plain.acquire(&gateway, "plain").await, watcher.acquire(&gateway, "watcher").await];

    let nodes = |answer: &Answer| answer.json()["nodes"].as_array().expect("a list").clone();
    let inspected = plain.get(&gateway, "/locks/plain").await;
    assert!(inspected.status == 200 && !shows_addresses(&inspected), "{inspected:?}");
    let names: Vec<_> = nodes(&inspected).iter().map(|node| node["node"].clone()).collect();
    assert_eq!(names, ["node-1", "node-2", "node-3"]);
    assert!(shows_addresses(&watcher.get(&gateway, "/locks/plain").await));

    servers[1..].iter_mut().for_each(RedisServer::kill);
    for (key, lease) in [&plain, &watcher].into_iter().zip(&leases) {
        let name = if std::ptr::eq(key, &plain) { "plain" } else { "watcher" };
        let post = key
            .call(&gateway, Method::POST, "/locks/other")
            .json(&json!({ "ttl_ms": 60_000 }))
            .send()
            .await;
        post.problem(503, "quorum_unavailable");
        let patch = key.patch(&gateway, name, &lease.token).await;
        patch.problem(503, "outcome_unknown");
        let delete = key.delete(&gateway, name, &lease.token).await;
        delete.problem(503, "outcome_unknown");
        let look = key.get(&gateway, &lock_path(name)).await;
        for answer in [post, patch, delete, look] {
            assert_eq!(shows_addresses(&answer), name == "watcher", "{answer:?}");
            let has_details = nodes(&answer).iter().any(|node| node.get("detail").is_some());
            assert!(name == "watcher" || !has_details, "{answer:?}");
            assert_eq!(nodes(&answer).len(), 3, "the number of nodes is not secret");
        }
    }
}

/// A well-formed token that holds no lock.
const OTHER_TOKEN: &str = "1.1763725165123456.9f86d081884c7d659a2feaa0c55ad015a3bf4f1b";

/// The problem in an answer, without the id of its request.
fn without_request_id(answer: &Answer) -> Value {
    let mut problem = answer.json();
    problem.as_object_mut().expect("an object").remove("request_id");
    problem
}

#[tokio::test]
async fn a_release_or_extend_key_learns_nothing_of_others_locks() {
    let holder = key("holder", HOLDER, "*").await;
    let cleaner = key("cleaner", "release", "*").await;
    let extender = key("extender", "extend", "*").await;
    let worker = key("worker", "acquire,extend,release", "*").await;
    let reader = key("reader", HOLDER, "*").await;
    let file = file(&[&holder, &cleaner, &extender, &worker, &reader]);
    let gateway = with_keys(&file).flag("--max-ttl", "1h").start().await;
    let held = holder.call(&gateway, Method::POST, "/locks/held");
    let held = held.json(&json!({ "ttl_ms": HOUR_MS, "owner": "somebody" })).send().await;
    let lease = Lease::from(&held);

    // A token that nobody was granted.
    let made_up = format!("1.{}.{}", lease.fencing, "a".repeat(40));
    for token in [&made_up, &lease.token] {
        let held = cleaner.delete(&gateway, "held", token).await;
        let free = cleaner.delete(&gateway, "free", token).await;
        held.problem(404, "lock_not_found");
        assert_eq!(
            (without_request_id(&held), held.header("retry-after")),
            (without_request_id(&free), free.header("retry-after"))
        );
        let held = extender.patch(&gateway, "held", token).await;
        let free = extender.patch(&gateway, "free", token).await;
        held.problem(404, "lock_not_found");
        assert_eq!(
            (without_request_id(&held), held.header("retry-after")),
            (without_request_id(&free), free.header("retry-after"))
        );

        // A client that may acquire can find out the holder by trying, so a refused acquire names
        // the holder. A refused release or extension does not.
        for answer in [
            worker.delete(&gateway, "held", token).await,
            worker.patch(&gateway, "held", token).await,
        ] {
            let problem = answer.problem(409, "not_holder");
            for secret in ["holder", "expires_in_ms", "acquired_at"] {
                assert!(problem.get(secret).is_none(), "{problem}");
            }
            assert!(!problem.to_string().contains("somebody\\\""), "{problem}");
        }
        for answer in [
            reader.delete(&gateway, "held", token).await,
            reader.patch(&gateway, "held", token).await,
        ] {
            let problem = answer.problem(409, "not_holder");
            assert!(
                problem["holder"] == "somebody" && problem.get("expires_in_ms").is_some(),
                "{problem}"
            );
        }
    }
    let refused =
        worker.call(&gateway, Method::POST, "/locks/held").send().await.problem(409, "lock_held");
    assert_eq!(refused["holder"], "somebody", "a refused acquire names the holder");
    assert_eq!(holder.delete(&gateway, "held", &lease.token).await.status, 204);
}

#[tokio::test]
async fn a_secret_pasted_into_a_path_appears_nowhere() {
    let record = Scratch::new("audit.jsonl", "");
    let known = key("known", &format!("{HOLDER},list"), "*").await;
    let file = file(&[&known]);
    let gateway = with_keys(&file).flag("--audit-log", record.path()).start().await;
    let lease = known.acquire(&gateway, "job").await;
    let mut last = String::new();
    for secret in [&known.text, &lease.token] {
        let tail = secret.rsplit('.').next().unwrap();
        let paths = [
            "/locks/{}",
            "/locks/deploy%2F{}",
            "/locks/x{}",
            "/locks/a/{}",
            "/locks/{}?force=true",
            "/{}",
            "/docs/{}",
        ];
        let queries = [
            "/locks?prefix={}",
            "/locks?{}=1",
            "/locks?cursor={}",
            "/locks?limit={}",
            "/locks/job?{}",
        ];
        for path in paths.into_iter().chain(queries) {
            for method in [Method::POST, Method::PATCH, Method::DELETE, Method::GET] {
                for shown in [known.bearer(), "Bearer x".into()] {
                    let call = gateway
                        .call(method.clone(), path.replace("{}", secret))
                        .header("authorization", shown);
                    let answer = call
                        .header("lock-token", OTHER_TOKEN)
                        .json(&json!({ "ttl_ms": 60_000 }))
                        .send()
                        .await;
                    assert!(
                        answer.status >= 400 || path == "/locks/job?{}",
                        "{method} {path}: {answer:?}"
                    );
                    assert!(!format!("{answer:?}").contains(tail), "{method} {path}: {answer:?}");
                    answer.header("x-request-id").clone_into(&mut last);
                }
            }
        }
    }
    let log = eventually("the last request is logged", async || {
        Some(gateway.stdout()).filter(|log| log.contains(&last))
    })
    .await;
    known.get(&gateway, "/locks/job").await;
    let recorded = eventually("the change is recorded", async || {
        let text = std::fs::read_to_string(record.path()).unwrap();
        text.contains("unauthenticated").then_some(text)
    })
    .await;
    for secret in [&known.text, &lease.token] {
        let tail = secret.rsplit('.').next().unwrap();
        let line = log.lines().chain(recorded.lines()).find(|line| line.contains(tail));
        assert!(line.is_none(), "{line:?}");
    }
}

#[tokio::test]
async fn a_key_beyond_its_rate_sees_only_the_public_readyz() {
    let mut watcher = key("watcher", "metrics", "*").await;
    watcher.entry.push_str("rate = 1\nburst = 3\n");
    let file = file(&[&watcher]);
    let gateway = with_keys(&file).start().await;
    let ready = async |key: &Key| key.get(&gateway, "/readyz").await;
    assert!(ready(&watcher).await.json()["nodes"].is_array());
    // The key may send one request a second. On a busy machine, only several at a time are more.
    let bare = eventually("the rate is used up", async || {
        let answers = join_all((0..8).map(|_| ready(&watcher))).await;
        answers.into_iter().find(|answer| answer.json().get("nodes").is_none())
    })
    .await;
    assert_eq!(
        (bare.status, bare.json()),
        (200, json!({ "status": "ready" })),
        "a probe is not refused because of its rate"
    );
}

/// Sends the heads of two requests, revokes their key, and then sends the bodies. Returns whether both
/// bodies came within the time limit of a body. Panics if a request with its body is not refused.
async fn refuses_revoked(
    gateway: &Gateway,
    key: &Key,
    lease: &Lease,
    revoke: impl FnOnce(),
) -> bool {
    let body = json!({ "ttl_ms": HOUR_MS }).to_string();
    let mut on_their_way = Vec::new();
    for (method, name) in [("PATCH", "job"), ("POST", "other")] {
        let headers = format!("authorization: {}\r\nlock-token: {}\r\n", key.bearer(), lease.token);
        let mut raw = gateway.raw().await;
        raw.announce(method, name, &format!("expect: 100-continue\r\n{headers}"), body.len()).await;
        raw.wait_for_continue().await;
        on_their_way.push(raw);
    }
    revoke();
    eventually("the key is gone", async || {
        (key.get(gateway, "/locks/job").await.status == 401).then_some(())
    })
    .await;
    let mut in_time = true;
    for mut raw in on_their_way {
        let _ = raw.try_write(&body).await;
        let answer = raw.answer().await;
        if answer.status == 408 {
            in_time = false;
        } else {
            answer.problem(401, "unauthenticated");
        }
    }
    in_time
}

#[tokio::test]
async fn a_key_revoked_during_its_request_body_does_nothing() {
    let stays = key("stays", HOLDER, "*").await;
    let revoked = key("revoked", HOLDER, "*").await;
    let file = file(&[&stays, &revoked]);
    let launch = with_keys(&file).flag("--max-ttl", "1h").flag("--default-ttl", "30m");
    let gateway = launch.start().await;
    let lease = Lease::from(&revoked.call(&gateway, Method::POST, "/locks/job").send().await);
    // A busy gateway may need longer to read its keys again than a body may take. Then the test
    // lets the key in again.
    for tries in 1.. {
        let revoke = || std::fs::write(file.path(), &stays.entry).unwrap();
        if refuses_revoked(&gateway, &revoked, &lease, revoke).await {
            break;
        }
        assert!(tries < 10, "the bodies are always late");
        std::fs::write(file.path(), [&*stays.entry, &revoked.entry].join("\n")).unwrap();
        eventually("the key is back", async || {
            (revoked.get(&gateway, "/locks/job").await.status == 200).then_some(())
        })
        .await;
    }
    let look = stays.get(&gateway, "/locks/job").await.json();
    let left = look["expires_in_ms"].as_u64().unwrap();
    assert!(left <= HOUR_MS / 2, "the lock was not extended: {look}");
    assert_eq!(stays.get(&gateway, "/locks/other").await.json()["state"], "free");
}
