//! Listings and locks share a gateway. Listings must not take capacity from locks. A cursor is
//! valid only for the listing that returned it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::http::keys::{HOLDER, Key, file, key, with_keys};
use crate::support::client::{Answer, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, masters};
use crate::support::measure::measured;
use crate::support::metrics::Samples;
use crate::support::waiters::{HOUR_MS, patient, patient_over};

async fn page(lister: &Key, gateway: &Gateway, query: &str, cursor: &str) -> Answer {
    lister.get(gateway, &format!("/locks?{query}&cursor={cursor}")).await
}

/// Asks for a page until there is one. A page may take 3 s, and a busy machine may need more.
async fn page_of_all(gateway: &Gateway, query: &str) -> Value {
    let answer = gateway.call(Method::GET, format!("/locks?{query}")).decided().await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

#[tokio::test]
async fn held_locks_are_listed_page_by_page() {
    let servers = masters(3);
    let gateway = patient_over(&servers).ready().await;
    for name in (0..30).map(|n| format!("a/{n}")).chain((0..3).map(|n| format!("b/{n}"))) {
        assert_eq!(
            gateway.post(&name, json!({ "ttl_ms": HOUR_MS, "owner": name })).await.status,
            201
        );
    }
    let mut names = Vec::new();
    let mut cursor = String::new();
    let mut pages = 0;
    loop {
        let page = page_of_all(&gateway, &format!("prefix=a%2F&limit=10&cursor={cursor}")).await;
        pages += 1;
        assert!(
            page["locks"].as_array().unwrap().len() <= 10,
            "the page has more locks than its limit: {page:#}"
        );
        for lock in page["locks"].as_array().unwrap() {
            assert_eq!(
                (&lock["state"], &lock["owner"]),
                (&json!("held"), &lock["name"]),
                "{lock:#}"
            );
            assert!(lock.get("nodes").is_none());
            names.push(lock["name"].as_str().unwrap().to_owned());
        }
        match page.get("next_cursor") {
            Some(next) => next.as_str().unwrap().clone_into(&mut cursor),
            None => break,
        }
    }
    assert!(pages > 1);
    names.sort_unstable();
    let mut wanted: Vec<String> = (0..30).map(|n| format!("a/{n}")).collect();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
    // A page that took too long has fewer locks.
    eventually("one page has all locks", async || {
        let page = page_of_all(&gateway, "limit=1000").await;
        (page["locks"].as_array().unwrap().len() == 33).then_some(())
    })
    .await;
}

/// New keys make a repeated scan end earlier than it did, so it does not return all locks that the
/// page before has shown.
#[tokio::test]
async fn a_listing_shows_each_lock_once_while_others_acquire() {
    let servers = masters(3);
    let gateway = patient_over(&servers).ready().await;
    for lock in 0..200 {
        assert_eq!(
            gateway.post(&format!("a/{lock}"), json!({ "ttl_ms": HOUR_MS })).await.status,
            201
        );
    }
    let (mut names, mut cursor) = (Vec::new(), String::new());
    for added in 0.. {
        let page = page_of_all(&gateway, &format!("prefix=a%2F&limit=5&cursor={cursor}")).await;
        let locks = page["locks"].as_array().expect("a list of locks").iter();
        names.extend(locks.map(|lock| lock["name"].as_str().expect("a name").to_owned()));
        let Some(next) = page.get("next_cursor") else { break };
        next.as_str().expect("a text").clone_into(&mut cursor);
        for server in &servers {
            let add = format!(
                "for i = 1, 30 do redis.call('SET', 'lock:b/{added}-' .. i, 'theirs', 'PX', 600000) end"
            );
            server.cmd(&["EVAL", &add, "0"]);
        }
    }
    names.sort_unstable();
    let mut wanted: Vec<String> = (0..200).map(|lock| format!("a/{lock}")).collect();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
}

#[tokio::test]
async fn a_forged_cursor_is_400() {
    let servers = masters(3);
    let one = key("one", "acquire,list", "*").await;
    let two = key("two", "list", "*").await;
    let keys = file(&[&one, &two]);
    let launch = patient_over(&servers).flag("--auth-keys", keys.path());
    let gateway = launch.clone().start().await;
    let other = launch.start().await;
    eventually("both are ready", async || {
        let ready = [gateway.get("/readyz").await, other.get("/readyz").await]
            .iter()
            .all(|answer| answer.status == 200);
        ready.then_some(())
    })
    .await;
    for lock in 0..40 {
        let call = one.call(&gateway, Method::POST, &lock_path(&format!("a/{lock}")));
        assert_eq!(call.json(&json!({ "ttl_ms": HOUR_MS })).send().await.status, 201);
    }
    let first = one.call(&gateway, Method::GET, "/locks?prefix=a%2F&limit=5").decided().await;
    let first = first.json();
    let cursor = first["next_cursor"].as_str().expect("there is more").to_owned();
    // A load balancer may send the next page's request to any gateway.
    for gateway in [&gateway, &other] {
        let path = format!("/locks?prefix=a%2F&limit=5&cursor={cursor}");
        assert_eq!(one.call(gateway, Method::GET, &path).decided().await.status, 200);
    }
    let (text, signature) = cursor.split_once('.').expect("a cursor and its signature");
    let elsewhere =
        if text.starts_with('0') { text.replacen('0', "2", 1) } else { text.replacen('1', "2", 1) };
    for forged in [
        "0-0-",
        "2-0-",
        "1-1-",
        text,
        &format!("{elsewhere}.{signature}"),
        &format!("{text}.{}", "0".repeat(32)),
    ] {
        let problem = page(&one, &gateway, "prefix=a%2F&limit=5", forged)
            .await
            .problem(400, "invalid_parameter");
        assert!(problem["detail"].as_str().unwrap().contains("next_cursor"), "{forged}: {problem}");
    }
    page(&two, &gateway, "prefix=a%2F&limit=5", &cursor).await.problem(400, "invalid_parameter");
    page(&one, &gateway, "limit=5", &cursor).await.problem(400, "invalid_parameter");
}

/// Lists without a pause until it is stopped. Counts the pages and the refusals.
async fn lists_on(
    lister: Key,
    gateway: Arc<Gateway>,
    enough: Arc<AtomicBool>,
    pages: Arc<AtomicUsize>,
    refused: Arc<AtomicUsize>,
) {
    let mut cursor = String::new();
    while !enough.load(Ordering::Relaxed) {
        let answer = page(&lister, &gateway, "limit=1000", &cursor).await;
        match answer.status {
            200 => {
                pages.fetch_add(1, Ordering::Relaxed);
                cursor = answer.json()["next_cursor"].as_str().unwrap_or_default().to_owned();
            }
            429 => {
                answer.problem(429, "rate_limited");
                refused.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            _ => drop(answer.problem(503, "quorum_unavailable")),
        }
    }
}

/// Listings without a pause, by each of several clients over several connections.
struct Attack {
    enough: Arc<AtomicBool>,
    pages: Arc<AtomicUsize>,
    refused: Arc<AtomicUsize>,
    lines: Vec<JoinHandle<()>>,
}

impl Attack {
    /// Returns once a page was read.
    async fn start(gateway: &Arc<Gateway>, listers: &[Key]) -> Self {
        let (enough, pages, refused): (Arc<AtomicBool>, Arc<AtomicUsize>, Arc<AtomicUsize>) =
            Default::default();
        let mut lines = Vec::new();
        // Each client uses several connections.
        for lister in listers.iter().cycle().take(24) {
            let lister = Key { text: lister.text.clone(), entry: String::new() };
            let (enough, pages, refused) = (enough.clone(), pages.clone(), refused.clone());
            lines.push(tokio::spawn(lists_on(lister, gateway.clone(), enough, pages, refused)));
        }
        eventually("the listings run", async || (pages.load(Ordering::Relaxed) > 0).then_some(()))
            .await;
        Self { enough, pages, refused, lines }
    }

    /// Returns the numbers of pages and of refusals.
    async fn end(self) -> (usize, usize) {
        self.enough.store(true, Ordering::Relaxed);
        for line in self.lines {
            line.await.expect("no panic");
        }
        (self.pages.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }
}

const TRIES: usize = 300;

/// How many acquires and releases of fresh locks succeeded, and the 99th percentile of their times.
async fn locked(victim: &Key, gateway: &Gateway, prefix: &str) -> (usize, Duration) {
    let mut done = 0;
    let mut times = Vec::new();
    for number in 0..TRIES {
        let path = lock_path(&format!("{prefix}/{number}"));
        let began = Instant::now();
        let answer = victim
            .call(gateway, Method::POST, &path)
            .json(&json!({ "ttl_ms": 10_000 }))
            .send()
            .await;
        if answer.status == 201 {
            let token = answer.json()["token"].as_str().expect("a token").to_owned();
            let released = victim
                .call(gateway, Method::DELETE, &path)
                .header("lock-token", token)
                .send()
                .await;
            done += usize::from(released.status == 204);
        }
        times.push(began.elapsed());
    }
    times.sort_unstable();
    (done, times[TRIES * 99 / 100])
}

/// Stores 200,000 locks on one master, and a few on the others.
fn fill(servers: &[RedisServer]) {
    let script = "for i = 1, 200000 do redis.call('SET', 'lock:full/' .. i, 'theirs', 'PX', 600000) end return 1";
    servers[0].cmd(&["EVAL", script, "0"]);
}

/// One client lists over two connections. A master hangs, so the first listing stays busy for up to
/// 3 s. If it ends before the second one arrives, because the machine is busy, the client lists
/// again.
#[tokio::test]
async fn a_second_listing_of_one_client_is_429_with_retry_after() {
    let servers = masters(3);
    let gateway = Launch::over(&servers).ready().await;
    let list = || gateway.get("/locks?limit=10");
    let mut pairs = 0..10;
    let (refused, other) = eventually("one of two listings is refused", async || {
        pairs.next().expect("both are served again and again");
        gateway.all_nodes_admitted().await;
        servers[0].stop();
        let (one, two) = tokio::join!(list(), list());
        servers[0].cont();
        match (one.status, two.status) {
            (429, _) => Some((one, two)),
            (_, 429) => Some((two, one)),
            _ => None,
        }
    })
    .await;
    let problem = refused.problem(429, "rate_limited");
    assert!(
        problem["detail"].as_str().unwrap().contains("this client may have 1 listing"),
        "{problem}"
    );
    assert_eq!(refused.header("retry-after"), "1");
    assert_ne!(other.status, 429, "one of the two is served: {other:?}");
    eventually("the slot is free again", async || {
        (gateway.get("/locks").await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_listing_shows_the_waiters_only_to_a_key_that_may_inspect() {
    let viewer = key("viewer", "list,inspect", "*").await;
    let lister = key("lister", "list", "*").await;
    let holder = key("holder", HOLDER, "*").await;
    let gateway = patient(with_keys(&file(&[&viewer, &lister, &holder]))).start().await;
    let acquire = || holder.call(&gateway, Method::POST, &lock_path("job"));
    assert_eq!(acquire().json(&json!({ "ttl_ms": HOUR_MS })).send().await.status, 201);
    let _waits = tokio::spawn(acquire().json(&json!({ "wait_ms": HOUR_MS })).send());
    let seen_by = async |key: &Key| page(key, &gateway, "", "").await.json()["locks"][0].clone();
    eventually("the waiter is shown", async || {
        (seen_by(&viewer).await["waiters_total"] == 1).then_some(())
    })
    .await;
    assert_eq!(seen_by(&lister).await, json!({ "name": "job", "state": "held" }));
}

#[tokio::test]
async fn an_inspection_says_whether_the_key_may_force_a_release() {
    let viewer = key("viewer", "inspect", "*").await;
    let admin = key("admin", "inspect,release,force", "jobs/*").await;
    let gateway = with_keys(&file(&[&viewer, &admin])).start().await;
    for (key, may_force) in [(&viewer, false), (&admin, true)] {
        let status = key.get(&gateway, &lock_path("jobs/a")).await.json();
        assert_eq!(status["may_force"], may_force, "{status}");
    }
    let open = Launch::embedded().start().await;
    assert_eq!(open.inspect("jobs/a").await["may_force"], true);
}

mod measured {
    use super::*;

    /// Listings must not take time, votes or attempts from locks.
    #[tokio::test]
    async fn eight_listings_of_a_full_master_delay_no_lock() {
        let servers = masters(3);
        let mut listers = Vec::new();
        for number in 0..8 {
            listers.push(key(&format!("lister-{number}"), "list", "*").await);
        }
        let victim = key("victim", HOLDER, "*").await;
        let keys = file(&listers.iter().chain([&victim]).collect::<Vec<_>>());
        let launch =
            Launch::over(&servers).flag("--auth-keys", keys.path()).flag("--public", "metrics");
        let launch = launch.flag("--node-timeout", "100ms").env("RUST_LOG", "info");
        let gateway = Arc::new(launch.start().await);
        eventually("the gateway is ready", async || {
            (gateway.get("/readyz").await.status == 200).then_some(())
        })
        .await;
        fill(&servers);
        let votes = async || -> u64 {
            Samples::of(&gateway)
                .await
                .non_zero("redlock_node_votes_total", &["vote"])
                .into_values()
                .sum()
        };
        let mut run = 0;
        measured("locks beside listings", async || {
            run += 1;
            let began = votes().await;
            let (quiet, quiet_p99) = locked(&victim, &gateway, &format!("quiet-{run}")).await;
            let quiet_votes = votes().await - began;
            let attack = Attack::start(&gateway, &listers).await;
            let began = votes().await;
            let (attacked, attacked_p99) =
                locked(&victim, &gateway, &format!("attacked-{run}")).await;
            let attacked_votes = votes().await - began;
            let (pages, refused) = attack.end().await;
            let found = format!(
                "{quiet} of {TRIES} in {quiet_p99:?} with {quiet_votes} votes; beside {pages} pages and \
                 {refused} refusals {attacked} in {attacked_p99:?} with {attacked_votes} votes"
            );
            println!("{found}");
            let are_locks_served = attacked * 100 >= quiet * 95;
            let are_listings_refused = pages > 0 && refused > pages;
            // Listings must not cause operations for votes. 5 % more are allowed for repeated
            // attempts.
            let are_votes_as_many = attacked_votes * 20 <= quiet_votes * 21;
            let is_as_promised = are_locks_served && are_listings_refused && are_votes_as_many;
            if is_as_promised { Ok(()) } else { Err(found) }
        })
        .await;
    }
}
