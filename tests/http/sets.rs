//! Sets: several locks that are acquired all together or not at all (`POST /locks`, `DELETE
//! /locks`).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::http::audit::audit_lines;
use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::client::{Answer, Call, Lease, assert_left};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{daily_or_long, eventually, masters};
use crate::support::waiters::{HOUR_MS, patient, patient_over};

const NAMES: [&str; 3] = ["env/staging", "env/production", "db+1"];
const BY_NAME: &str = "/locks?name=env/staging&name=env%2Fproduction&name=db+1";

fn acquire(gateway: &Gateway, names: &[&str], more: Value) -> Call {
    let mut body = json!({ "names": names, "ttl_ms": 300_000 });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    gateway.call(Method::POST, "/locks").json(&body)
}

async fn set_of(gateway: &Gateway, names: &[&str]) -> Lease {
    Lease::from(&acquire(gateway, names, json!({})).send().await)
}

async fn release(gateway: &Gateway, path: &str, token: &str) -> Answer {
    gateway.call(Method::DELETE, path).header("lock-token", token).send().await
}

async fn states(gateway: &Gateway, names: &[&str]) -> Vec<String> {
    let mut states = Vec::new();
    for name in names {
        states.push(gateway.inspect(name).await["state"].as_str().unwrap().to_owned());
    }
    states
}

/// The life of a set, from its first refusal until all its locks are free again.
async fn lifecycle(gateway: &Gateway) {
    let before = Instant::now();
    let body = json!({ "owner": "bob", "ttl_ms": 60_000 });
    let bob = Lease::from(&gateway.post(NAMES[2], body).await);
    let refused = acquire(gateway, &NAMES, json!({})).send().await;
    let problem = refused.problem(409, "lock_held");
    assert_eq!(
        (&problem["held"][0]["name"], &problem["held"][0]["holder"]),
        (&json!("db+1"), &json!("bob"))
    );
    let left = problem["held"][0]["expires_in_ms"].as_u64().expect("a time");
    assert_left(left, 60_000, before);
    assert!(
        problem["detail"].as_str().unwrap().starts_with("db+1: \"bob\" has held it"),
        "{problem:#}"
    );
    assert_eq!(states(gateway, &NAMES).await, ["free", "free", "held"]);
    assert_eq!(gateway.delete(NAMES[2], &bob.token).await.status, 204);

    let granted = acquire(gateway, &NAMES, json!({ "owner": "deploy" })).send().await;
    let set = Lease::from(&granted);
    assert_eq!(granted.header("lock-token"), set.token);
    assert_eq!(granted.json()["names"], json!(NAMES));
    for name in NAMES {
        let held = gateway.inspect(name).await;
        assert_eq!(
            (&held["owner"], &held["fencing_token"]),
            (&json!("deploy"), &json!(set.fencing))
        );
        assert!(set.fencing > bob.fencing);
        gateway.post(name, json!({})).await.problem(409, "lock_held");
    }
    // Each lock can be extended by itself, or all of them by one request.
    assert_eq!(gateway.patch(NAMES[0], &set.token, 60_000).await.status, 200);
    let leases: Vec<_> = NAMES.map(|name| json!({ "name": name, "token": set.token })).into();
    let extended =
        gateway.call(Method::PATCH, "/locks").json(&json!({ "leases": leases })).send().await;
    for result in extended.json()["results"].as_array().unwrap() {
        assert_eq!(result["status"], 200, "{result}");
    }
    // A release with another token releases nothing.
    let other = Lease::from(&gateway.post("other", json!({})).await);
    release(gateway, BY_NAME, &other.token).await.problem(409, "not_holder");

    assert_eq!(gateway.delete(NAMES[1], &set.token).await.status, 204);
    let partly = release(gateway, BY_NAME, &set.token).await;
    assert_eq!(partly.status, 200, "{partly:?}");
    let results: Vec<_> = partly.json()["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|result| (result["name"].clone(), result["status"].clone(), result["code"].clone()))
        .collect();
    let gone = (json!(NAMES[1]), json!(404), json!("lock_not_found"));
    let released = |name: &str| (json!(name), json!(204), Value::Null);
    assert_eq!(results, [released(NAMES[0]), gone, released(NAMES[2])]);
    release(gateway, BY_NAME, &set.token).await.problem(404, "lock_not_found");

    let set = set_of(gateway, &NAMES).await;
    assert_eq!(release(gateway, BY_NAME, &set.token).await.status, 200);
    assert_eq!(states(gateway, &NAMES).await, ["free"; 3]);
}

#[tokio::test]
async fn a_set_is_granted_and_released_on_embedded_nodes() {
    lifecycle(&Launch::embedded().start().await).await;
}

#[tokio::test]
async fn a_set_is_granted_and_released_on_masters() {
    let servers = masters(3);
    lifecycle(&patient_over(&servers).ready().await).await;
}

#[tokio::test]
async fn a_set_waits_for_the_lock_that_refused_it_and_holds_nothing_meanwhile() {
    let gateway = patient(Launch::embedded()).start().await;
    let first = gateway.acquire_for(NAMES[0], HOUR_MS).await;
    let last = gateway.acquire_for(NAMES[2], HOUR_MS).await;
    let waiting = acquire(&gateway, &NAMES, json!({ "wait_ms": HOUR_MS, "owner": "deploy" }));
    let waiting = tokio::spawn(waiting.send());
    let waits_for = async |name: &str| {
        eventually("the set waits", async || {
            let waiters = gateway.inspect(name).await["waiters"].clone();
            (waiters[0]["owner"] == "deploy").then_some(())
        })
        .await;
    };
    waits_for(NAMES[0]).await;
    assert_eq!(states(&gateway, &NAMES).await, ["held", "free", "held"]);
    // Others get the lock that is free.
    let between = gateway.acquire_for(NAMES[1], HOUR_MS).await;
    assert_eq!(gateway.delete(NAMES[0], &first.token).await.status, 204);
    // Both other locks are held, so the set waits for one of them, and another client may have the
    // first lock.
    waits_for(NAMES[1]).await;
    let again = gateway.acquire_for(NAMES[0], HOUR_MS).await;
    assert_eq!(gateway.delete(NAMES[0], &again.token).await.status, 204);
    assert_eq!(gateway.delete(NAMES[1], &between.token).await.status, 204);
    waits_for(NAMES[2]).await;
    assert_eq!(gateway.delete(NAMES[2], &last.token).await.status, 204);
    let set = Lease::from(&waiting.await.unwrap());
    assert_eq!(states(&gateway, &NAMES).await, ["held"; 3]);
    assert_eq!(release(&gateway, BY_NAME, &set.token).await.status, 200);
}

#[tokio::test]
async fn a_wait_for_a_set_ends_with_the_lock_that_is_held() {
    let gateway = Launch::embedded().start().await;
    let _held = gateway.acquire(NAMES[1]).await;
    let refused = acquire(&gateway, &NAMES, json!({ "wait_ms": 300 })).send().await;
    let problem = refused.problem(409, "lock_held");
    assert_eq!(problem["held"][0]["name"], NAMES[1]);
    assert_eq!(states(&gateway, &NAMES).await, ["free", "held", "free"]);
}

#[tokio::test]
async fn a_client_that_leaves_a_waiting_set_holds_nothing() {
    let gateway = patient(Launch::embedded()).start().await;
    let held = gateway.acquire_for(NAMES[1], HOUR_MS).await;
    let waiting = acquire(&gateway, &NAMES, json!({ "wait_ms": HOUR_MS }));
    let waiting = tokio::spawn(waiting.send());
    let waits = async || gateway.inspect(NAMES[1]).await["waiters_total"] == 1;
    eventually("the set waits", async || waits().await.then_some(())).await;
    waiting.abort();
    eventually("the set leaves", async || (!waits().await).then_some(())).await;
    assert_eq!(gateway.delete(NAMES[1], &held.token).await.status, 204);
    assert_eq!(states(&gateway, &NAMES).await, ["free"; 3]);
}

#[tokio::test]
async fn a_repeated_request_gets_its_set_again_in_any_order_of_names() {
    let servers = masters(3);
    let launch = || patient_over(&servers).flag("--cluster", "sets");
    let gateway = launch().ready().await;
    let other_gateway = launch().ready().await;
    let ask = async |gateway: &Gateway, names: &[&str]| {
        let call =
            acquire(gateway, names, json!({})).header("idempotency-key", "deploy-4711-of-monday");
        call.send().await
    };
    let first = Lease::from(&ask(&gateway, &NAMES).await);
    for gateway in [&gateway, &other_gateway] {
        let again = ask(gateway, &[NAMES[2], NAMES[0], NAMES[1]]).await;
        assert_eq!(again.header("idempotency-replayed"), "true", "{again:?}");
        assert_eq!(Lease::from(&again), first);
    }
    // Other names are another set.
    ask(&gateway, &NAMES[..2]).await.problem(409, "lock_held");
    // The client never got the token.
    let by_key =
        gateway.call(Method::DELETE, BY_NAME).header("idempotency-key", "deploy-4711-of-monday");
    assert_eq!(by_key.send().await.status, 200);
    assert_eq!(states(&gateway, &NAMES).await, ["free"; 3]);
}

/// A client releases one lock of its set, and repeats the request. The repetition must not release
/// the locks that the client still holds.
#[tokio::test]
async fn a_repeated_request_for_a_set_leaves_the_locks_that_are_still_held() {
    let servers = masters(3);
    let gateway = patient_over(&servers).ready().await;
    let ask = async || {
        let call = acquire(&gateway, &NAMES, json!({ "ttl_ms": HOUR_MS }));
        call.header("idempotency-key", "deploy-4712-of-monday").send().await
    };
    let set = Lease::from(&ask().await);
    let left = async || gateway.inspect(NAMES[0]).await["expires_in_ms"].as_u64().unwrap();
    assert_eq!(gateway.delete(NAMES[1], &set.token).await.status, 204);
    let before = left().await;
    // The repetition extends nothing either, and does not wait for its own locks.
    for more in [json!({}), json!({ "wait_ms": HOUR_MS })] {
        let call =
            acquire(&gateway, &NAMES, more).header("idempotency-key", "deploy-4712-of-monday");
        let problem = call.send().await.problem(409, "lock_held");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains("an earlier request with this Idempotency-Key"), "{detail}");
    }
    assert!(left().await <= before);
    for name in [NAMES[0], NAMES[2]] {
        assert_eq!(gateway.patch(name, &set.token, 60_000).await.status, 200);
    }
    assert_eq!(states(&gateway, &NAMES).await, ["held", "free", "held"]);
}

#[tokio::test]
async fn a_set_needs_the_permission_for_each_name() {
    let staging = key("staging", HOLDER, "env/staging*").await;
    let all = key("all", HOLDER, "*").await;
    let file = file(&[&staging, &all]);
    let gateway = with_keys(&file).start().await;
    let names = ["env/staging", "env/staging-2", "env/production"];
    let ask = |key: &crate::http::keys::Key| {
        key.call(&gateway, Method::POST, "/locks").json(&json!({ "names": names }))
    };
    let problem = ask(&staging).send().await.problem(403, "forbidden");
    assert!(problem["detail"].as_str().unwrap().starts_with("env/production: "), "{problem:#}");
    let set = Lease::from(&ask(&all).send().await);
    let path = "/locks?name=env/staging&name=env/staging-2";
    let by = |key: &crate::http::keys::Key| key.call(&gateway, Method::DELETE, path);
    by(&staging).header("lock-token", &set.token).send().await.problem(409, "not_holder");
    assert_eq!(by(&all).header("lock-token", &set.token).send().await.status, 200);
}

/// A set of N names counts as N requests, all of them or none.
#[tokio::test]
async fn a_set_counts_once_for_each_name_in_the_rate() {
    let mut slow = key("slow", HOLDER, "*").await;
    slow.entry.push_str("rate = 1\nburst = 36\n");
    let mut small = key("small", HOLDER, "*").await;
    small.entry.push_str("rate = 1\nburst = 12\n");
    let file = file(&[&slow, &small]);
    let gateway = with_keys(&file).start().await;
    let ask = |who: &crate::http::keys::Key, count: usize| {
        let names: Vec<_> = (0..count).map(|n| format!("n{n}")).collect();
        who.call(&gateway, Method::POST, "/locks").json(&json!({ "names": names })).send()
    };
    let begun = Instant::now();
    Lease::from(&ask(&slow, 32).await);
    let problem = ask(&slow, 32).await.problem(429, "rate_limited");
    let pause = problem["retry_after_ms"].as_u64().unwrap();
    // One request is taken off for the refused one. 31 more are missing 28, or fewer on a slow
    // machine.
    let passed = begun.elapsed().as_millis() as u64;
    assert!((27_000u64.saturating_sub(passed)..=29_100).contains(&pause), "{problem:#}");
    let problem = ask(&small, 13).await.problem(429, "rate_limited");
    let detail = problem["detail"].as_str().unwrap();
    assert!(
        detail.contains("counts as 13 requests") && detail.contains("`burst` of 12"),
        "{detail}"
    );
}

#[tokio::test]
async fn every_lock_of_a_set_has_a_line_in_the_audit_log() {
    let staging = key("staging", HOLDER, "env/staging*").await;
    let log = Scratch::new("audit.log", "");
    let file = file(&[&staging]);
    let gateway = with_keys(&file).flag("--audit-log", log.path()).start().await;
    let ask = |names: &[&str], more: Value| {
        let mut body = json!({ "names": names, "owner": "me", "ttl_ms": 300_000 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        staging.call(&gateway, Method::POST, "/locks").json(&body)
    };
    let names = ["env/staging", "env/staging-2"];
    let set = Lease::from(&ask(&names, json!({})).send().await);
    ask(&names, json!({})).send().await.problem(409, "lock_held");
    ask(&names, json!({ "ttl_ms": 1 })).send().await.problem(400, "invalid_ttl");
    ask(&["env/staging", "env/production"], json!({})).send().await.problem(403, "forbidden");
    let path = "/locks?name=env/staging&name=env/staging-2";
    let released = staging.call(&gateway, Method::DELETE, path).header("lock-token", &set.token);
    assert_eq!(released.send().await.status, 200);
    let lines = eventually("all lines", async || {
        let lines = audit_lines(&log);
        let last = lines.last()?;
        (last["what"] == "release" && last["lock"] == "env/staging-2").then_some(lines)
    })
    .await;
    let lines: Vec<_> = lines
        .iter()
        .map(|line| {
            let text = |field: &str| line[field].as_str().unwrap_or_default().to_owned();
            format!("{} {} {} {}", text("what"), text("lock"), text("owner"), text("outcome"))
        })
        .collect();
    assert_eq!(
        lines,
        [
            "acquire env/staging me done",
            "acquire env/staging-2 me done",
            "acquire env/staging me lock_held",
            "acquire env/staging-2 me lock_held",
            "acquire env/staging  invalid_ttl",
            "acquire env/staging  forbidden",
            "release env/staging  done",
            "release env/staging-2  done",
        ]
    );
}

/// The limit on the locks that a client waits for follows the set from queue to queue.
#[tokio::test]
async fn a_waiting_set_counts_for_the_lock_that_it_waits_for() {
    let launch = patient(Launch::embedded()).flag("--max-waited-locks-per-client", "1");
    let gateway = launch.start().await;
    let held = gateway.acquire_for("held", HOUR_MS).await;
    let other = gateway.acquire_for("other", HOUR_MS).await;
    let waits = |names: [&'static str; 2]| {
        tokio::spawn(acquire(&gateway, &names, json!({ "wait_ms": HOUR_MS })).send())
    };
    // Both sets wait for the same lock.
    let waiting = [waits(["a", "held"]), waits(["b", "held"])];
    eventually("both sets wait", async || {
        (gateway.inspect("held").await["waiters_total"] == 2).then_some(())
    })
    .await;
    let refused = acquire(&gateway, &["c", "other"], json!({ "wait_ms": HOUR_MS })).send().await;
    let problem = refused.problem(429, "too_many_waiters");
    assert!(problem["detail"].as_str().unwrap().contains("1 locks"), "{problem:#}");
    assert_eq!(gateway.delete("held", &held.token).await.status, 204);
    // One of the two gets the lock first, and the other one after it.
    let [first, second] = waiting;
    let served = async |set: tokio::task::JoinHandle<Answer>, name: &str| {
        let set = Lease::from(&set.await.unwrap());
        let path = format!("/locks?name={name}&name=held");
        assert_eq!(release(&gateway, &path, &set.token).await.status, 200);
    };
    tokio::join!(served(first, "a"), served(second, "b"));
    assert_eq!(gateway.delete("other", &other.token).await.status, 204);
}

#[tokio::test]
async fn a_bad_request_for_a_set_says_what_is_allowed() {
    let gateway = Launch::embedded().start().await;
    let held = gateway.acquire("held").await;
    let many: Vec<_> = (0..40).map(|n| format!("n{n}")).collect();
    for (body, code, words) in [
        (json!({}), "invalid_body", "names must be a list of lock names"),
        (json!({ "names": "a" }), "invalid_body", "names must be a list of lock names"),
        (json!({ "names": [] }), "invalid_body", "there is no name; allowed are 1 to 32 names"),
        (json!({ "names": many }), "invalid_body", "there are 40 names; allowed are 1 to 32"),
        (json!({ "names": ["a", "b", "a"] }), "invalid_body", "the name \"a\" is there twice"),
        (json!({ "names": ["a", 5] }), "invalid_body", "names[1] is not a string"),
        (json!({ "names": ["a", "b c"] }), "invalid_name", "names[1]: the name has ' ' at byte 1"),
        (json!({ "names": ["a", held.token] }), "invalid_name", "a lock token"),
        (json!({ "names": ["a"], "slots": 2 }), "invalid_body", "unknown field `slots`"),
        (json!({ "names": ["a"], "queue": "newest" }), "invalid_body", "unknown field `queue`"),
        (json!({ "names": ["a"], "priority": 10 }), "invalid_body", "allowed are 0 to 9"),
    ] {
        let answer = gateway.call(Method::POST, "/locks").json(&body).send().await;
        let problem = answer.problem(400, code);
        assert!(problem["detail"].as_str().unwrap().contains(words), "{body}: {problem:#}");
        assert!(!answer.text().contains(held.owner()), "{}", answer.text());
    }
    for (query, code, words) in [
        ("", "invalid_parameter", "there is no name"),
        ("?name=a&name=a", "invalid_parameter", "twice"),
        ("?names=a", "invalid_parameter", "the only query parameter here is name"),
        ("?name=a&force=true", "invalid_parameter", "the only query parameter here is name"),
        ("?name=a%20b", "invalid_name", "' ' at byte 1"),
    ] {
        let answer = release(&gateway, &format!("/locks{query}"), &held.token).await;
        let problem = answer.problem(400, code);
        assert!(problem["detail"].as_str().unwrap().contains(words), "{query}: {problem:#}");
    }
    gateway.call(Method::DELETE, "/locks?name=held").send().await.problem(400, "missing_token");
}

/// Clients ask for sets of 4 of 16 names, through two gateways, while one master hangs for a while
/// and another restarts. No two holders overlap, and every client is served again and again.
#[tokio::test(flavor = "multi_thread")]
async fn overlapping_sets_exclude_each_other_and_everybody_is_served() {
    let (clients, run) = daily_or_long((24, 0), (64, 60));
    let mut servers = masters(5);
    let launch = || Launch::over(&servers).flag("--cluster", "sets");
    let gateways = Arc::new([launch().ready().await, launch().ready().await]);
    let held: Arc<[AtomicBool; 16]> = Arc::default();
    let served = Arc::new(Mutex::new(HashMap::<usize, (u32, Duration)>::new()));
    let begun = Instant::now();
    let is_over = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..clients)
        .map(|client| {
            let (gateways, held, served) = (gateways.clone(), held.clone(), served.clone());
            let is_over = is_over.clone();
            tokio::spawn(async move {
                let gateway = &gateways[client % 2];
                for turn in 0.. {
                    let picks = [1, 3, 5, 7].map(|step| (client * step + turn * (step + 2)) % 16);
                    let mut picks: Vec<usize> = picks.into();
                    picks.sort_unstable();
                    picks.dedup();
                    let names: Vec<_> = picks.iter().map(|n| format!("overlap/{n}")).collect();
                    let names: Vec<_> = names.iter().map(String::as_str).collect();
                    let first_try = Instant::now();
                    // A refused client asks for the same set again.
                    let set = loop {
                        if is_over.load(Ordering::SeqCst) {
                            // The longest wait may be one that never ended.
                            if let Some((_, longest)) = served.lock().await.get_mut(&client) {
                                *longest = first_try.elapsed().max(*longest);
                            }
                            return;
                        }
                        let answer =
                            acquire(gateway, &names, json!({ "wait_ms": 20_000 })).send().await;
                        if answer.status == 201 {
                            break Lease::from(&answer);
                        }
                        assert!([409, 503].contains(&answer.status), "{answer:?}");
                    };
                    let waited = first_try.elapsed();
                    for pick in &picks {
                        assert!(!held[*pick].swap(true, Ordering::SeqCst), "two holders of {pick}");
                    }
                    tokio::task::yield_now().await;
                    for pick in &picks {
                        held[*pick].store(false, Ordering::SeqCst);
                    }
                    {
                        let mut served = served.lock().await;
                        let (count, longest) = served.entry(client).or_default();
                        (*count, *longest) = (*count + 1, waited.max(*longest));
                    }
                    let query: Vec<_> = names.iter().map(|name| format!("name={name}")).collect();
                    let path = format!("/locks?{}", query.join("&"));
                    let released = release(gateway, &path, &set.token).await;
                    assert!([200, 503].contains(&released.status), "{released:?}");
                }
            })
        })
        .collect();
    let some = async |least: u32| {
        eventually("more sets are served", async || {
            let total: u32 = served.lock().await.values().map(|(count, _)| count).sum();
            (total >= least).then_some(())
        })
        .await;
    };
    some(50).await;
    servers[0].stop();
    some(100).await;
    servers[0].cont();
    servers[1].kill();
    some(150).await;
    servers[1].restart();
    eventually("every client is served", async || {
        (served.lock().await.len() == clients).then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_secs(run).saturating_sub(begun.elapsed())).await;
    is_over.store(true, Ordering::SeqCst);
    let took = begun.elapsed();
    for worker in workers {
        worker.await.expect("no overlap");
    }
    let served = served.lock().await;
    let total: u32 = served.values().map(|(count, _)| count).sum();
    let longest = served.values().map(|(_, longest)| *longest).max().unwrap_or_default();
    let least = served.values().map(|(count, _)| *count).min().unwrap_or_default();
    println!(
        "{total} sets for {clients} clients in {took:.1?}, at least {least} each, longest wait {longest:?}"
    );
    assert_eq!(served.len(), clients, "somebody was never served: {served:?}");
}
