//! One request extends many locks (`PATCH /locks`). Each lease has the result that a request of its
//! own would have.

use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};

use crate::http::audit::audit_lines;
use crate::http::keys::{HOLDER, Key, file, key, with_keys};
use crate::support::client::{Answer, Call, Lease};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{eventually, masters};
use crate::support::measure::measured;
use crate::support::waiters::median;

fn extend_many(call: Call, leases: &[(&str, &str)], ttl_ms: u64) -> Call {
    let leases: Vec<_> =
        leases.iter().map(|(name, token)| json!({ "name": name, "token": token })).collect();
    call.json(&json!({ "leases": leases, "ttl_ms": ttl_ms }))
}

/// The results, as status and code.
fn results(answer: &Answer) -> Vec<(u64, String)> {
    assert_eq!(answer.status, 200, "{answer:?}");
    let body = answer.json();
    let of = |result: &Value| {
        let code = result["code"].as_str().unwrap_or_default().to_owned();
        (result["status"].as_u64().expect("a status"), code)
    };
    body["results"].as_array().expect("results").iter().map(of).collect()
}

fn codes(answer: &Answer) -> Vec<String> {
    results(answer).into_iter().map(|(status, code)| format!("{status} {code}")).collect()
}

#[tokio::test]
async fn each_lease_has_the_result_of_its_own_extension() {
    let servers = masters(5);
    let launch = Launch::over(&servers)
        .flag("--clock-skew", "10s")
        .flag("--node-timeout", "10s")
        .flag("--max-hold", "1h");
    let gateway = launch.ready().await;
    let held = gateway.acquire("a/held").await;
    let bob = json!({ "ttl_ms": 60_000, "owner": "bob" });
    let other = Lease::from(&gateway.post("other", bob).await);
    let released = gateway.acquire("released").await;
    assert_eq!(gateway.delete("released", &released.token).await.status, 204);
    let leases = [
        ("a/held", held.token.as_str()),
        ("other", &held.token),
        ("released", &released.token),
        ("no name", &held.token),
        ("other", "no token"),
        (&held.token, &held.token),
        ("other", &format!("<{}>", other.token)),
    ];
    let began = Instant::now();
    let call = gateway.call(Method::PATCH, "/locks");
    let answer = extend_many(call, &leases, 300_000).send().await;
    let took = began.elapsed().as_millis() as u64;
    assert_eq!(
        codes(&answer),
        [
            "200 ",
            "409 not_holder",
            "404 lock_not_found",
            "400 invalid_name",
            "400 invalid_token",
            "400 invalid_name",
            "200 "
        ]
    );
    let body = answer.json();
    let names: Vec<_> = leases.iter().map(|(name, _)| *name).collect();
    for (result, name) in body["results"].as_array().expect("results").iter().zip(names) {
        let is_secret = name == held.token;
        assert_eq!(result["name"], if is_secret { "" } else { name }, "{result}");
        assert_eq!(result.get("detail").is_some(), result["status"] != 200, "{result}");
        assert_eq!(result["holder"] == "bob", result["status"] == 409, "{result}");
        let elapsed = result["elapsed_ms"].as_u64().expect("a time");
        assert!(elapsed <= took, "{result}: more than the {took} ms of the request");
        // The TTL is 300,000 ms. Clocks may run at different rates, so 1 % and 2 ms are taken off:
        // 296,998 ms. At most that is left. `elapsed_ms` counts from the start of the request, so the
        // sum of both may be more. Each is rounded down.
        let validity = result["validity_ms"].as_u64();
        assert_eq!(validity.is_some(), result["status"] == 200, "{result}");
        assert!(validity.is_none_or(|validity| validity <= 296_998), "{result}");
        assert!(validity.is_none_or(|validity| validity + elapsed >= 296_996), "{result}");
    }
    assert!(!answer.text().contains(held.owner()), "the answer has a secret: {}", answer.text());
    for name in ["a/held", "other"] {
        let left = gateway.inspect(name).await["expires_in_ms"].as_u64().expect("a time");
        assert!(left > 60_000, "{name}: {left}");
    }
}

#[tokio::test]
async fn a_bad_request_extends_nothing_and_says_what_is_allowed() {
    let gateway = Launch::embedded().start().await;
    let held = gateway.acquire("held").await;
    let call = |path: &str| gateway.call(Method::PATCH, path);
    let lease = ("held", held.token.as_str());
    let refused = async |call: Call, status, code: &str, words: &str| {
        let problem = call.send().await.problem(status, code);
        let detail = problem["detail"].as_str().expect("a text").to_owned();
        assert!(detail.contains(words), "{words:?} is not in {detail}");
        assert!(!detail.contains(held.owner()), "{detail}");
    };
    let one = |ttl_ms| extend_many(call("/locks"), &[lease], ttl_ms);
    refused(one(5), 400, "invalid_ttl", "allowed are whole milliseconds from 10 to 300000").await;
    refused(one(300_001), 400, "invalid_ttl", "raise the limit").await;
    let none = extend_many(call("/locks"), &[], 120_000);
    refused(none, 400, "invalid_body", "leases has 0 entries; allowed are 1 to 1000").await;
    let many = extend_many(call("/locks"), &[lease; 1001], 120_000);
    refused(many, 400, "invalid_body", "leases has 1001 entries; allowed are 1 to 1000").await;
    refused(call("/locks"), 400, "invalid_body", "leases has 0 entries").await;
    let query = extend_many(call("/locks?ttl_ms=120000"), &[lease], 120_000);
    refused(query, 400, "invalid_parameter", "JSON body").await;
    let unknown = call("/locks").json(&json!({ "leases": [], "ttl": 5 }));
    refused(unknown, 400, "invalid_body", "unknown field `ttl`").await;
    // No error quotes what may be a token.
    let form = "leases[0] must have the texts name and token and nothing else";
    let (name, token) = lease;
    for (leases, words) in [
        (json!(token), "leases must be a list"),
        (json!(5), "expected leases to be a list"),
        (json!(null), "expected leases to be a list"),
        (json!([token]), form),
        (json!([[name, token]]), form),
        (json!([{ "name": name, "token": 5 }]), form),
        (json!([{ "name": name, "token": token, "more": token }]), form),
    ] {
        let call = call("/locks").json(&json!({ "leases": leases }));
        refused(call, 400, "invalid_body", words).await;
    }
    let misplaced = call("/locks").json(&json!({ token: 1 }));
    refused(misplaced, 400, "invalid_body", "in the wrong place of the body").await;
    let long = "n".repeat(600_000);
    let large = extend_many(call("/locks"), &[(&long, &held.token)], 120_000);
    refused(large, 413, "body_too_large", "larger than 512000 bytes").await;
    let left = gateway.inspect("held").await["expires_in_ms"].as_u64().expect("a time");
    assert!(left <= 60_000, "{left}");
}

#[tokio::test]
async fn a_thousand_leases_of_the_longest_names_fit_into_one_request() {
    let servers = masters(3);
    let launch = Launch::over(&servers)
        .flag("--clock-skew", "10s")
        .flag("--node-timeout", "10s")
        .flag("--max-ttl", "2h");
    let gateway = launch.ready().await;
    let names: Vec<_> = (0..1_000).map(|n| format!("{n:x>255}")).collect();
    let mut leases = Vec::new();
    for name in &names {
        leases.push(gateway.acquire_for(name, 3_600_000).await);
    }
    let asked: Vec<_> = names
        .iter()
        .zip(&leases)
        .map(|(name, lease)| (name.as_str(), lease.token.as_str()))
        .collect();
    let call = gateway.call(Method::PATCH, "/locks");
    let answer = extend_many(call, &asked, 7_200_000).send().await;
    assert_eq!(results(&answer), vec![(200, String::new()); 1_000]);
    let body = answer.json();
    let order = body["results"].as_array().expect("results").iter().map(|result| &result["name"]);
    assert!(order.eq(names.iter()), "the results are in another order");
    for name in [&names[0], &names[999]] {
        let left = gateway.inspect(name).await["expires_in_ms"].as_u64().expect("a time");
        assert!(left > 3_600_000, "{left}");
    }
}

async fn extended(gateway: &Gateway, key: &Key, leases: &[(&str, &str)]) -> Answer {
    extend_many(key.call(gateway, Method::PATCH, "/locks"), leases, 60_000).send().await
}

#[tokio::test]
async fn each_lease_needs_the_permission_and_is_recorded() {
    let log = Scratch::new("audit.jsonl", "");
    let holder = key("holder", HOLDER, "*").await;
    let of_a = key("of-a", "acquire,extend", "a/*").await;
    let reader = key("reader", "inspect", "*").await;
    let keys = file(&[&holder, &of_a, &reader]);
    let gateway = with_keys(&keys).flag("--audit-log", log.path()).start().await;
    let own = of_a.acquire(&gateway, "a/own").await;
    let others = holder.acquire(&gateway, "a/others").await;
    let outside = holder.acquire(&gateway, "b").await;
    extended(&gateway, &reader, &[("b", &outside.token)]).await.problem(403, "forbidden");

    let leases =
        [("a/own", own.token.as_str()), ("a/others", &others.token), ("b", &outside.token)];
    let answer = extended(&gateway, &of_a, &leases).await;
    assert_eq!(codes(&answer), ["200 ", "409 not_holder", "403 forbidden"]);
    // A key without the permission `inspect` does not learn who the holder is.
    assert!(!answer.text().contains("holder\" has held"), "{}", answer.text());

    let id = answer.header("x-request-id");
    let lines = eventually("three records", async || {
        let lines = audit_lines(&log).into_iter();
        let lines: Vec<_> = lines.filter(|line| line["request_id"] == id).collect();
        (lines.len() == 3).then_some(lines)
    })
    .await;
    let shown = |line: &Value| {
        ["who", "what", "lock", "outcome", "status"].map(|field| line[field].to_string()).join(" ")
    };
    assert_eq!(
        lines.iter().map(shown).collect::<Vec<_>>(),
        [
            r#""of-a" "extend" "a/own" "done" 200"#,
            r#""of-a" "extend" "a/others" "not_holder" 409"#,
            r#""of-a" "extend" "b" "forbidden" 403"#,
        ]
    );

    // One line stands for all denied leases of a request, and after ten such lines a summary does.
    let began = Instant::now();
    for _ in 0..30 {
        let answer =
            extended(&gateway, &of_a, &[("b", &outside.token), ("c", &outside.token)]).await;
        assert_eq!(codes(&answer), ["403 forbidden", "403 forbidden"]);
    }
    let denied = || audit_lines(&log).iter().filter(|line| line["refused"] == 2).count();
    eventually("denied leases are recorded", async || (denied() > 0).then_some(())).await;
    // A window of the summary lasts 10 s. The requests may have begun in the middle of one.
    let windows = began.elapsed().as_secs() as usize / 10 + 2;
    assert!(denied() <= 10 * windows, "{windows}: {:#?}", audit_lines(&log));
}

#[tokio::test]
async fn each_lease_counts_for_the_rate_of_the_key() {
    let holder = key("holder", HOLDER, "*").await;
    let mut slow = key("slow", HOLDER, "*").await;
    slow.entry.push_str("rate = 1\nburst = 5\n");
    let keys = file(&[&holder, &slow]);
    let gateway = with_keys(&keys).start().await;
    let free = holder.acquire(&gateway, "free").await;
    assert_eq!(holder.delete(&gateway, "free", &free.token).await.status, 204);
    let asked = [("free", free.token.as_str()); 20];
    let began = Instant::now();
    let answer = extended(&gateway, &slow, &asked).await;
    let got = results(&answer);
    let served = got.iter().filter(|(status, _)| *status != 429).count();
    // The key gets one more request for each second that the request takes.
    let most = 5 + began.elapsed().as_secs() as usize + 1;
    assert!(served >= 5 && served <= most, "{served} of at most {most}: {got:?}");
    let body = answer.json();
    for result in body["results"].as_array().expect("results") {
        let is_limited = result["code"] == "rate_limited";
        assert_eq!(result["retry_after_ms"].is_u64(), is_limited, "{result}");
    }
    let unlimited = extended(&gateway, &holder, &asked).await;
    assert_eq!(results(&unlimited), vec![(404, "lock_not_found".to_owned()); 20]);
}

#[tokio::test]
async fn the_largest_requests_pass_with_the_smallest_memory() {
    let gateway = Launch::embedded().flag("--memory-budget", "64MiB").start().await;
    let token = gateway.acquire("job").await.token;
    let names: Vec<_> = (0..1_000).map(|number| format!("{number:0200}")).collect();
    let asked: Vec<_> = names.iter().map(|name| (name.as_str(), token.as_str())).collect();
    let call = extend_many(gateway.call(Method::PATCH, "/locks"), &asked, 60_000);
    let both = futures_util::future::join(call.clone().send(), call.send()).await;
    for answer in <[Answer; 2]>::from(both) {
        assert_eq!(results(&answer), vec![(404, "lock_not_found".to_owned()); 1_000]);
    }
}

mod measured {
    use super::*;

    /// One client has eight connections and extends 1000 locks with each request. Another client
    /// extends its own lock meanwhile, and does not wait for those requests.
    #[tokio::test]
    async fn large_requests_do_not_delay_the_extensions_of_others() {
        let greedy = key("greedy", HOLDER, "*").await;
        let modest = key("modest", HOLDER, "*").await;
        let keys = file(&[&greedy, &modest]);
        let servers = masters(3);
        let launch = Launch::over(&servers).flag("--auth-keys", keys.path());
        let gateway = launch.start().await;
        crate::http::auth::is_ready(&gateway).await;
        let own = modest.acquire(&gateway, "own").await;
        let names: Vec<_> = (0..1_000).map(|n| format!("many/{n}")).collect();
        let mut tokens = Vec::new();
        for name in &names {
            tokens.push(greedy.acquire(&gateway, name).await.token);
        }
        let asked: Vec<_> = names
            .iter()
            .zip(&tokens)
            .map(|(name, token)| (name.as_str(), token.as_str()))
            .collect();
        let large = extend_many(greedy.call(&gateway, Method::PATCH, "/locks"), &asked, 60_000);
        measured("an extension beside large requests", async || {
            let ends = Instant::now() + Duration::from_secs(4);
            let floods: Vec<_> = (0..8).map(|_| tokio::spawn(flood(large.clone(), ends))).collect();
            let mut single = Vec::new();
            while Instant::now() < ends {
                let since = Instant::now();
                assert_eq!(modest.patch(&gateway, "own", &own.token).await.status, 200);
                single.push(since.elapsed());
            }
            let mut large = Vec::new();
            for flood in floods {
                large.extend(flood.await.expect("a flood"));
            }
            let (requests, single, large) = (large.len(), median(single), median(large));
            let times = format!("single: {single:?}, of 1000: {large:?}, {requests} times");
            println!("{times}");
            if single * 4 < large { Ok(()) } else { Err(times) }
        })
        .await;
    }

    /// Repeats a request until this moment. Returns how long each one took.
    async fn flood(large: Call, ends: Instant) -> Vec<Duration> {
        let mut took = Vec::new();
        while Instant::now() < ends {
            let since = Instant::now();
            let answer = large.clone().send().await;
            assert!(results(&answer).iter().all(|(status, _)| *status == 200), "{answer:?}");
            took.push(since.elapsed());
        }
        took
    }
}
