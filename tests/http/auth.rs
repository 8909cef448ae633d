//! API keys: who gets in, what they may do to which names, and whom a lock belongs to.

use http::Method;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::gateway::{Answer, Call, Gateway, Launch, Lease, Scratch, lock_path};
use crate::harness::{RedisServer, Resp, eventually};
use crate::http_waiting::waiting_is;

/// A key, and what stands for it in the file.
struct Key {
    text: String,
    entry: String,
}

/// Made by the program itself.
async fn key(name: &str, verbs: &str, names: &str) -> Key {
    let made = Launch::bare(&["key", "new", name, "--verbs", verbs, "--names", names]).finish().await;
    assert_eq!(made.code, Some(0), "{made:?}");
    let (text, entry) = made.stdout.split_once("\n\n").expect("the key, an empty line, the entry");
    Key { text: text.into(), entry: entry.into() }
}

fn file(keys: &[&Key]) -> Scratch {
    let entries: Vec<_> = keys.iter().map(|key| key.entry.as_str()).collect();
    Scratch::new("keys.toml", &entries.join("\n"))
}

fn with_keys(file: &Scratch) -> Launch {
    Launch::embedded().flag("--auth-keys", file.path())
}

const HOLDER: &str = "acquire,extend,release,inspect";

impl Key {
    fn call(&self, gateway: &Gateway, method: Method, path: &str) -> Call {
        gateway.call(method, path).header("authorization", format!("Bearer {}", self.text))
    }

    async fn acquire(&self, gateway: &Gateway, name: &str) -> Lease {
        let call = self.call(gateway, Method::POST, &lock_path(name));
        Lease::from(&call.json(&json!({ "ttl_ms": 60_000, "owner": "somebody" })).send().await)
    }

    async fn patch(&self, gateway: &Gateway, name: &str, token: &str) -> Answer {
        let call = self.call(gateway, Method::PATCH, &lock_path(name)).header("lock-token", token);
        call.json(&json!({ "ttl_ms": 60_000 })).send().await
    }

    async fn delete(&self, gateway: &Gateway, name: &str, token: &str) -> Answer {
        self.call(gateway, Method::DELETE, &lock_path(name)).header("lock-token", token).send().await
    }

    async fn get(&self, gateway: &Gateway, path: &str) -> Answer {
        self.call(gateway, Method::GET, path).send().await
    }
}

/// A majority of its nodes may vote.
async fn is_ready(gateway: &Gateway) {
    eventually("it is ready", async || (gateway.get("/readyz").await.status == 200).then_some(())).await;
}

/// Status and code; no code where it went well.
fn outcome(answer: &Answer) -> (u16, String) {
    let code = match answer.header("content-type") {
        "application/problem+json" => answer.json()["code"].as_str().expect("a string").to_owned(),
        _ => String::new(),
    };
    (answer.status, code)
}

/// Every kind of caller at every endpoint.
#[tokio::test]
async fn nobody_gets_in_where_they_do_not_belong() {
    let all = "acquire,extend,release,inspect,list,force,metrics";
    let right = key("right", all, "deploy/*").await;
    let elsewhere = key("elsewhere", all.trim_end_matches(",metrics"), "other/*").await;
    let unknown = key("right", all, "*").await;
    let mut expired = key("expired", all, "*").await;
    expired.entry.push_str("expires = 2020-01-01T00:00:00Z\n");
    // One for each verb that may do everything else.
    let verbs: Vec<&str> = all.split(',').collect();
    let mut without = Vec::new();
    for verb in &verbs {
        let others: Vec<_> = verbs.iter().copied().filter(|other| other != verb).collect();
        without.push((*verb, key(&format!("not-{verb}"), &others.join(","), "*").await));
    }
    let mut keys = vec![&right, &elsewhere, &expired];
    keys.extend(without.iter().map(|(_, key)| key));
    let file = file(&keys);
    let gateway = with_keys(&file).flag("--public", "none").start().await;

    let lock = lock_path("deploy/app");
    let endpoints = [
        (Method::POST, lock.clone(), "acquire", 201, 403),
        (Method::PATCH, lock.clone(), "extend", 200, 403),
        (Method::GET, lock.clone(), "inspect", 200, 403),
        (Method::DELETE, lock.clone(), "release", 204, 403),
        (Method::DELETE, format!("{lock}?force=true"), "force", 204, 403),
        (Method::GET, "/locks".into(), "list", 200, 200),
        (Method::GET, "/metrics".into(), "metrics", 200, 403),
        (Method::GET, "/docs/".into(), "", 200, 200),
        (Method::GET, "/openapi.json".into(), "", 200, 200),
        (Method::GET, "/openapi-3.0.json".into(), "", 200, 200),
    ];
    let basic = |user: &str, password: &str| format!("Basic {}", base64(&format!("{user}:{password}")));
    let strangers = [
        None,
        Some("Bearer".to_owned()),
        Some("Bearer hunter2".into()),
        Some(format!("Bearer {}", unknown.text)),
        Some(format!("Bearer {}", expired.text)),
        Some(format!("Bearer {}x", right.text)),
        Some(format!("Digest {}", right.text)),
        Some(basic("right", &unknown.text)),
        Some(basic("elsewhere", &right.text)),
        Some(basic("right", "")),
        Some("Basic !".into()),
    ];
    for (method, path, verb, well, elsewhere_status) in endpoints {
        // A lock that is there or free, as the endpoint wants it; its token, should it be asked for.
        let prepare = async || {
            right.call(&gateway, Method::DELETE, &format!("{lock}?force=true")).send().await;
            if method == Method::POST { None } else { Some(right.acquire(&gateway, "deploy/app").await) }
        };
        let call = async |authorization: Option<&str>, lease: &Option<Lease>| {
            let mut call = gateway.call(method.clone(), path.clone());
            if let Some(text) = authorization {
                call = call.header("authorization", text);
            }
            if let Some(lease) = lease.as_ref().filter(|_| !path.contains("force") && path == lock) {
                call = call.header("lock-token", &lease.token);
            }
            if method == Method::POST || method == Method::PATCH {
                call = call.json(&json!({ "ttl_ms": 60_000 }));
            }
            call.send().await
        };
        let at = |who: &str| format!("{who} at {method} {path}");

        let lease = prepare().await;
        for stranger in &strangers {
            let answer = call(stranger.as_deref(), &lease).await;
            answer.problem(401, "unauthenticated");
            let challenges: Vec<_> = answer.headers.get_all("www-authenticate").iter().collect();
            let named = |scheme| challenges.iter().any(|text| text.to_str().is_ok_and(|text| text.starts_with(scheme)));
            assert!(named("Bearer realm=") && named("Basic realm=") && challenges.len() == 2, "{answer:?}");
        }
        let bearer = |key: &Key| format!("Bearer {}", key.text);
        let answer = call(Some(&bearer(&elsewhere)), &lease).await;
        assert_eq!(answer.status, elsewhere_status, "{}: {answer:?}", at("a key for other names"));
        if elsewhere_status == 403 {
            let problem = answer.problem(403, "forbidden");
            assert!(answer.headers.contains_key("www-authenticate"), "{answer:?}");
            assert!(!problem.to_string().contains("somebody"), "{problem}");
        }
        for (lacking, key) in &without {
            if *lacking == verb {
                let answer = call(Some(&bearer(key)), &lease).await;
                assert_eq!(outcome(&answer), (403, "forbidden".into()), "{}: {answer:?}", at(lacking));
            }
        }
        if method == Method::POST {
            assert_eq!(right.get(&gateway, &lock).await.json()["state"], "free", "nobody got it");
        } else if path.starts_with(&lock) {
            let look = right.get(&gateway, &lock).await.json();
            assert_eq!((&look["state"], &look["key"]), (&json!("held"), &json!("right")), "the lock still stands");
        }
        for right in [bearer(&right), basic("right", &right.text), bearer(&right).replace("Bearer", "bearer")] {
            let lease = prepare().await;
            let answer = call(Some(&right), &lease).await;
            assert_eq!(answer.status, well, "{}: {answer:?}", at("the right key"));
        }
    }
    // A list shows what its reader may list; the lock of the last round is still held.
    for query in ["", "?prefix=deploy%2Fapp&limit=1", "?prefix=none&limit=1"] {
        // Not even by a page that ends where there is something that one may not see.
        assert_eq!(elsewhere.get(&gateway, &format!("/locks{query}")).await.json(), json!({ "locks": [] }), "{query}");
    }
    assert_eq!(right.get(&gateway, "/locks").await.json()["locks"][0]["name"], "deploy/app");
    assert_eq!(gateway.get("/livez").await.status, 200);
}

fn base64(text: &str) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let encode = |three: &[u8]| {
        let bits = (0..3).fold(0u32, |bits, i| bits << 8 | u32::from(three.get(i).copied().unwrap_or(0)));
        let digit = |i: usize| if i <= three.len() { DIGITS[(bits >> (18 - 6 * i)) as usize & 63] } else { b'=' };
        (0..4).map(|i| char::from(digit(i))).collect::<String>()
    };
    text.as_bytes().chunks(3).map(encode).collect()
}

#[tokio::test]
async fn a_stolen_token_is_worth_nothing_to_another_key() {
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let (holder, thief) = (key("holder", HOLDER, "*").await, key("thief", HOLDER, "*").await);
    let chief = key("chief", &format!("{HOLDER},force"), "*").await;
    let file = file(&[&holder, &thief, &chief]);
    let launch = || Launch::over(&servers).flag("--auth-keys", file.path());
    let (gateway, other_gateway) = (launch().start().await, launch().start().await);
    for gateway in [&gateway, &other_gateway] {
        is_ready(gateway).await;
    }

    let lease = holder.acquire(&gateway, "job").await;
    // Nodes do not know what the client shows.
    let all_store = || servers.iter().map(|server| server.cmd(&["GET", "lock:job"]).text()).collect::<Vec<_>>();
    eventually("all nodes have it", async || all_store().iter().all(|text| !text.is_empty()).then_some(())).await;
    let (stored, before) = (servers[0].cmd(&["GET", "lock:job"]).text(), all_store());
    assert!(!stored.contains(lease.owner()) && stored.contains("holder"), "{stored}");
    for gateway in [&gateway, &other_gateway] {
        thief.patch(gateway, "job", &lease.token).await.problem(409, "not_holder");
        thief.delete(gateway, "job", &lease.token).await.problem(409, "not_holder");
        assert_eq!(all_store(), before);
    }
    // What another lock's file says of the nodes is no token either.
    let raw = format!("1.{}.{}", &stored[..16], &stored[17..57]);
    holder.delete(&gateway, "job", &raw).await.problem(409, "not_holder");

    let extended = holder.patch(&other_gateway, "job", &lease.token).await;
    assert_eq!((extended.status, &extended.json()["token"]), (200, &json!(lease.token)), "{extended:?}");
    assert_eq!(chief.patch(&other_gateway, "job", &lease.token).await.status, 200);
    let released = chief.delete(&gateway, "job", &lease.token).await;
    assert_eq!(released.status, 204);
    let recorded = eventually("it is on the record", async || audit_in_log(&gateway).pop()).await;
    assert_eq!((&recorded["who"], &recorded["what"]), (&json!("chief"), &json!("release")), "{recorded}");
    assert_eq!(recorded["request_id"], released.header("x-request-id"));
    assert_eq!(servers[0].cmd(&["GET", "lock:job"]), Resp::Nil);
    holder.patch(&gateway, "job", &lease.token).await.problem(404, "lock_not_found");
}

#[tokio::test]
async fn a_refused_release_leaves_no_mark_on_what_belongs_to_somebody_else() {
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let (holder, thief) = (key("holder", HOLDER, "*").await, key("thief", HOLDER, "*").await);
    let file = file(&[&holder, &thief]);
    let gateway = Launch::over(&servers).flag("--auth-keys", file.path()).start().await;
    is_ready(&gateway).await;
    let lease = holder.acquire(&gateway, "job").await;
    assert_eq!(holder.patch(&gateway, "job", &lease.token).await.status, 200);
    let fences = |name: &str| {
        let key = format!("{{lock:{name}}}:fence");
        servers.iter().map(|server| server.cmd(&["GET", &key])).collect::<Vec<_>>()
    };
    // The mark of an extended lock, without which a master that loses it would not get it back.
    let marked = eventually("all nodes have marked it", async || {
        let fences = fences("job");
        fences.iter().all(|fence| *fence != Resp::Nil && fence.text().ends_with('+')).then_some(fences)
    })
    .await;
    let soon = std::time::SystemTime::now() + std::time::Duration::from_millis(900);
    let soon = soon.duration_since(std::time::UNIX_EPOCH).unwrap().as_micros();
    let nobody = "0".repeat(40);
    for token in [lease.token.clone(), format!("1.{}.{nobody}", lease.fencing), format!("1.{soon}.{nobody}")] {
        thief.delete(&gateway, "job", &token).await.problem(409, "not_holder");
        assert_eq!(fences("job"), marked, "{token}");
    }
    // What nobody can have been granted yet would drive the fencing tokens of other locks ahead.
    let late = std::time::SystemTime::now() + std::time::Duration::from_secs(60);
    let late = late.duration_since(std::time::UNIX_EPOCH).unwrap().as_micros();
    for future in [format!("1.{late}.{nobody}"), format!("1.{}.{nobody}", late - 30_000_000)] {
        thief.delete(&gateway, "free", &future).await.problem(404, "lock_not_found");
        assert!(fences("free").iter().all(|fence| *fence == Resp::Nil));
        holder.delete(&gateway, "job", &future).await.problem(409, "not_holder");
        assert_eq!(fences("job"), marked);
    }
    assert_eq!(holder.delete(&gateway, "job", &lease.token).await.status, 204);
}

#[tokio::test]
async fn a_browser_that_has_kept_a_key_gives_it_to_no_other_site() {
    let known = key("known", HOLDER, "*").await;
    let file = file(&[&known]);
    let gateway = with_keys(&file).start().await;
    let basic = format!("Basic {}", base64(&format!("known:{}", known.text)));
    let ask = async |authorization: &str, site: &str| {
        let call = gateway.call(Method::GET, "/locks/a").header("authorization", authorization);
        call.header("sec-fetch-site", site).send().await
    };
    ask(&basic, "cross-site").await.problem(401, "unauthenticated");
    assert_eq!(ask(&basic, "same-origin").await.status, 200);
    assert_eq!(ask(&format!("Bearer {}", known.text), "cross-site").await.status, 200);
}

#[tokio::test]
async fn an_idempotency_key_leads_only_its_own_principal_to_its_lock() {
    let (one, two) = (key("one", HOLDER, "*").await, key("two", HOLDER, "*").await);
    let file = file(&[&one, &two]);
    let gateway = with_keys(&file).start().await;
    let acquire = async |key: &Key| {
        let call = key.call(&gateway, Method::POST, "/locks/job").header("idempotency-key", "the-same-key-for-both");
        call.json(&json!({ "ttl_ms": 60_000 })).send().await
    };
    let (first, again) = (Lease::from(&acquire(&one).await), Lease::from(&acquire(&one).await));
    assert_eq!(first.owner(), again.owner());
    assert!(again.fencing > first.fencing);
    acquire(&two).await.problem(409, "lock_held");
    assert_eq!(one.delete(&gateway, "job", &again.token).await.status, 204);
    // Who knows somebody's idempotency key does not know the token that it leads to.
    assert_ne!(Lease::from(&acquire(&two).await).owner(), first.owner());
}

#[tokio::test]
async fn force_takes_a_lock_from_whoever_holds_it_and_says_who_did() {
    let log = Scratch::new("audit.jsonl", "");
    let holder = key("holder", HOLDER, "*").await;
    let chief = key("chief", "force", "deploy/*").await;
    let file = file(&[&holder, &chief]);
    let servers: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let launch = Launch::over(&servers).flag("--auth-keys", file.path()).flag("--audit-log", log.path());
    let gateway = launch.flag("--public", "metrics").start().await;
    is_ready(&gateway).await;
    let force = async |key: &Key, name: &str, query: &str| {
        key.call(&gateway, Method::DELETE, &format!("{}?{query}", lock_path(name))).send().await
    };

    let lease = holder.acquire(&gateway, "deploy/app").await;
    force(&holder, "deploy/app", "force=true").await.problem(403, "forbidden");
    force(&chief, "other", "force=true").await.problem(403, "forbidden");
    for query in ["force=1", "force", "force=TRUE", "force=true&x=1", "Force=true"] {
        force(&holder, "deploy/app", query).await.problem(400, "invalid_parameter");
    }
    let both = chief.call(&gateway, Method::DELETE, &format!("{}?force=true", lock_path("deploy/app")));
    both.header("lock-token", &lease.token).send().await.problem(400, "invalid_parameter");
    // Another Redlock client's lock is not ours to judge.
    servers.iter().for_each(|server| drop(server.cmd(&["SET", "lock:deploy/theirs", "somebody", "PX", "60000"])));
    force(&chief, "deploy/theirs", "force=true").await.problem(409, "not_holder");

    let waits = json!({ "ttl_ms": 60_000, "wait_ms": 20_000 });
    let waits = holder.call(&gateway, Method::POST, &lock_path("deploy/app")).json(&waits);
    let waits = tokio::spawn(waits.send());
    waiting_is(&gateway, 1, 1).await;
    let answer = force(&chief, "deploy/app", "force=true").await;
    assert_eq!(answer.status, 204, "{answer:?}");
    let next = Lease::from(&waits.await.unwrap());
    assert!(next.fencing > lease.fencing);
    holder.patch(&gateway, "deploy/app", &lease.token).await.problem(409, "not_holder");
    assert_eq!(holder.delete(&gateway, "deploy/app", &next.token).await.status, 204);
    force(&chief, "deploy/app", "force=true").await.problem(404, "lock_not_found");

    let lines = audit_lines(&log);
    let of = |what: &str, outcome: &str| {
        let found = lines.iter().find(|line| line["what"] == what && line["outcome"] == outcome);
        found.unwrap_or_else(|| panic!("no {what} {outcome} in {lines:#?}")).clone()
    };
    let forced = of("force", "done");
    for (field, value) in [
        ("who", json!("chief")),
        ("lock", json!("deploy/app")),
        ("owner", json!("somebody")),
        ("status", json!(204)),
        ("request_id", json!(answer.header("x-request-id"))),
    ] {
        assert_eq!(forced[field], value, "{forced}");
    }
    assert!(forced["address"].as_str().is_some_and(|text| text.starts_with("127.0.0.1:")), "{forced}");
    assert_eq!(of("force", "forbidden")["who"], "holder");
    assert_eq!(of("acquire", "done")["owner"], "somebody");
    assert_eq!(of("force", "lock_not_found")["who"], "chief");
    let text = std::fs::read_to_string(log.path()).unwrap();
    for secret in [&holder.text, &chief.text, lease.owner()] {
        assert!(!text.contains(secret.rsplit('.').next().unwrap()), "{text}");
    }

    // Moved away, as log rotation does.
    let moved = format!("{}.1", log.path());
    std::fs::rename(log.path(), &moved).unwrap();
    gateway.signal(Signal::HUP);
    eventually("the log is opened anew", async || {
        holder.get(&gateway, "/locks").await.problem(403, "forbidden");
        std::path::Path::new(log.path()).exists().then_some(())
    })
    .await;
    std::fs::remove_file(moved).unwrap();
}

fn audit_lines(log: &Scratch) -> Vec<Value> {
    let text = std::fs::read_to_string(log.path()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).expect("one object a line")).collect()
}

#[tokio::test]
async fn without_a_file_of_its_own_the_record_is_in_the_log_whatever_its_level() {
    let known = key("known", HOLDER, "a").await;
    let file = file(&[&known]);
    let gateway = with_keys(&file).env("RUST_LOG", "error").start_quiet().await;
    known.call(&gateway, Method::POST, "/locks/b").send().await.problem(403, "forbidden");
    gateway.call(Method::POST, "/locks/a").header("authorization", "Bearer rlk.known.x").send().await;
    eventually("both are recorded", async || {
        let lines = audit_in_log(&gateway);
        let who: Vec<_> = lines.iter().map(|line| &line["who"]).collect();
        (who == [&json!("known"), &json!("known (not proven)")]).then_some(())
    })
    .await;
    known.acquire(&gateway, "a").await;
    known.delete(&gateway, "a", "x").await.problem(400, "invalid_token");
    known.call(&gateway, Method::GET, "/locks/c").send().await.problem(403, "forbidden");
    let lines = eventually("the last one is recorded", async || {
        let lines = audit_in_log(&gateway);
        lines.iter().any(|line| line["lock"] == "c").then_some(lines)
    })
    .await;
    let what: Vec<_> = lines.iter().map(|line| (&line["what"], &line["lock"])).collect();
    let expected =
        [("acquire", "b"), ("acquire", "a"), ("inspect", "c")].map(|(what, lock)| (json!(what), json!(lock)));
    assert_eq!(what, expected.each_ref().map(|(what, lock)| (what, lock)), "denials only");
}

/// What is recorded in the log.
fn audit_in_log(gateway: &Gateway) -> Vec<Value> {
    let log = gateway.stdout();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["target"] == "redlock_audit").collect()
}

#[tokio::test]
async fn keys_are_read_again_without_a_gap_and_a_broken_file_keeps_the_old_ones() {
    let (old, new) = (key("ci", HOLDER, "*").await, key("ci", HOLDER, "*").await);
    let file = file(&[&old]);
    let gateway = with_keys(&file).start().await;
    let lease = old.acquire(&gateway, "job").await;
    let knows = async |key: &Key| key.get(&gateway, "/locks/job").await.status == 200;
    assert!(knows(&old).await && !knows(&new).await);

    // Nothing is lost of the requests while the file changes.
    std::fs::write(file.path(), &new.entry).unwrap();
    eventually("the new key is known", async || {
        let (old_is_known, new_is_known) = (knows(&old).await, knows(&new).await);
        if !new_is_known {
            assert!(old_is_known, "one of them always is");
        }
        new_is_known.then_some(())
    })
    .await;
    assert!(!knows(&old).await);
    // A lock belongs to the principal, not to one of its keys.
    assert_eq!(new.patch(&gateway, "job", &lease.token).await.status, 200);

    std::fs::write(file.path(), format!("{}\n[[key]]\nname = 'x'", new.entry)).unwrap();
    gateway.signal(Signal::HUP);
    eventually("the log says that the file is broken", async || {
        let log = gateway.stdout();
        (log.contains("the old keys stay") && log.contains("missing field `allow`")).then_some(())
    })
    .await;
    assert!(knows(&new).await);
    let says = async |what: &str| eventually(what, async || gateway.stdout().contains(what).then_some(())).await;
    std::fs::write(file.path(), "\n").unwrap();
    says("it is empty").await;
    std::fs::remove_file(file.path()).unwrap();
    gateway.signal(Signal::HUP);
    says("No such file").await;
    // Reading it would never end.
    std::os::unix::fs::symlink("/dev/zero", file.path()).unwrap();
    says("it is not a regular file").await;
    assert!(knows(&new).await);
    std::fs::remove_file(file.path()).unwrap();
    std::fs::write(file.path(), &old.entry).unwrap();
    gateway.signal(Signal::HUP);
    eventually("the old key is back", async || knows(&old).await.then_some(())).await;
}

#[tokio::test]
async fn a_key_that_ends_while_its_request_waits_gets_no_lock() {
    let (holder, waiter) = (key("holder", HOLDER, "*").await, key("waiter", HOLDER, "*").await);
    let file = file(&[&holder, &waiter]);
    let gateway = with_keys(&file).flag("--public", "metrics").start().await;
    let lease = holder.acquire(&gateway, "job").await;
    let body = json!({ "ttl_ms": 60_000, "wait_ms": 20_000 });
    let waiting = tokio::spawn(waiter.call(&gateway, Method::POST, "/locks/job").json(&body).send());
    waiting_is(&gateway, 1, 1).await;
    std::fs::write(file.path(), &holder.entry).unwrap();
    eventually("its key is gone", async || (waiter.get(&gateway, "/locks/job").await.status == 401).then_some(()))
        .await;
    assert_eq!(holder.delete(&gateway, "job", &lease.token).await.status, 204);
    waiting.await.unwrap().problem(401, "unauthenticated");
    eventually("what it was granted is released", async || {
        (holder.get(&gateway, "/locks/job").await.json()["state"] == "free").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_key_is_held_to_its_own_ttl_hold_and_rate() {
    let mut short = key("short", HOLDER, "*").await;
    short.entry.push_str("max_ttl = '2s'\nmax_hold = '1h'\n");
    let mut brief = key("brief", HOLDER, "*").await;
    brief.entry.push_str("max_hold = '3s'\n");
    let mut slow = key("slow", HOLDER, "*").await;
    slow.entry.push_str("rate = 1\nburst = 2\n");
    let file = file(&[&short, &slow, &brief]);
    let gateway = with_keys(&file).start().await;
    let ask = async |ttl: Value| short.call(&gateway, Method::POST, "/locks/job").json(&ttl).send().await;
    let problem = ask(json!({ "ttl_ms": 2_001 })).await.problem(400, "invalid_ttl");
    assert!(problem["detail"].as_str().unwrap().contains("10 to 2000"), "{problem}");
    // The gateway's default is more than the key may have.
    let granted = ask(json!({})).await;
    assert_eq!(granted.json()["ttl_ms"], 2_000);
    let token = Lease::from(&granted).token;
    short.patch(&gateway, "job", &token).await.problem(400, "invalid_ttl");
    let held = brief.call(&gateway, Method::POST, "/locks/brief").send().await;
    assert_eq!(held.json()["ttl_ms"], 3_000, "nobody gets for once what may not be held");
    let token = Lease::from(&held).token;
    eventually("it has been held for too long", async || {
        let call = brief.call(&gateway, Method::PATCH, "/locks/brief").header("lock-token", &token);
        let answer = call.json(&json!({ "ttl_ms": 3_000 })).send().await;
        (answer.status == 409).then(|| answer.problem(409, "max_hold_reached"))
    })
    .await;

    for _ in 0..2 {
        assert_eq!(slow.get(&gateway, "/locks/other").await.status, 200, "the burst");
    }
    // One more is let in with every second that this machine stands still.
    let refused = eventually("the rate is used up", async || {
        let answer = slow.get(&gateway, "/locks/other").await;
        (answer.status != 200).then_some(answer)
    })
    .await;
    let problem = refused.problem(429, "rate_limited");
    assert!((1..=1000).contains(&problem["retry_after_ms"].as_u64().unwrap()), "{problem}");
    assert_eq!(refused.header("retry-after"), "1");
    assert_eq!(short.get(&gateway, "/locks/other").await.status, 200, "it is another key's rate");
}

#[tokio::test]
async fn what_is_public_is_what_was_said_to_be() {
    let nobody = key("nobody", "acquire", "*").await;
    let watcher = key("watcher", "metrics", "*").await;
    let file = file(&[&nobody, &watcher]);
    for (public, docs, metrics) in
        [(None, 200, 401), (Some("none"), 401, 401), (Some("metrics"), 401, 200), (Some("docs,metrics"), 200, 200)]
    {
        let launch = with_keys(&file);
        let launch = public.map_or(launch.clone(), |list| launch.flag("--public", list));
        let gateway = launch.start().await;
        for (path, status) in [
            ("/readyz", 200),
            ("/healthz", 200),
            ("/docs/", docs),
            ("/openapi.json", docs),
            ("/metrics", metrics),
            ("/livez", 200),
        ] {
            assert_eq!(gateway.get(path).await.status, status, "{path} with {public:?}");
        }
        gateway.get("/locks").await.problem(401, "unauthenticated");
        gateway.get("/locks/a").await.problem(401, "unauthenticated");
        // Which nodes there are is not for everybody.
        for path in ["/readyz", "/healthz"] {
            let wrong = gateway.call(Method::GET, path).header("authorization", "Bearer x").send().await;
            for answer in [gateway.get(path).await, nobody.get(&gateway, path).await, wrong] {
                assert_eq!((answer.status, answer.json()), (200, json!({ "status": "ready" })));
            }
        }
        let health = watcher.get(&gateway, "/readyz").await.json();
        assert_eq!(health["nodes"].as_array().map(Vec::len), Some(5), "{health}");
    }
}

#[tokio::test]
async fn without_keys_nobody_forces_and_nobody_listens_to_the_world() {
    let gateway = Launch::embedded().start().await;
    let lease = gateway.acquire("job").await;
    let denied = gateway.call(Method::DELETE, "/locks/job?force=true").send().await;
    denied.problem(403, "forbidden");
    assert!(!denied.headers.contains_key("www-authenticate"), "there is nothing to bring: {denied:?}");
    let recorded = eventually("it is on the record", async || audit_in_log(&gateway).pop()).await;
    assert_eq!((&recorded["who"], &recorded["what"]), (&json!("anonymous"), &json!("force")), "{recorded}");
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);

    let refused = Launch::bare(&["--listen", "0.0.0.0:0"]).finish().await;
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("--listen: 0.0.0.0:0 is reachable") && refused.stderr.contains("--auth-keys"));
    let known = key("ci", HOLDER, "*").await;
    let file = file(&[&known]);
    let both = with_keys(&file).more("--allow-anonymous=true", "--max-wait=1s").finish().await;
    assert!(both.stderr.contains("--allow-anonymous: not allowed beside --auth-keys"), "{}", both.stderr);
    let world = with_keys(&file).flag("--listen", "0.0.0.0:0").start().await;
    assert!(world.stderr().contains("CAUTION: keys and tokens travel as plain text"), "{}", world.stderr());

    let broken = Scratch::new("keys.toml", "[[key]]\nname = 'a b'\nallow = []");
    let refused = with_keys(&broken).finish().await;
    assert_eq!(refused.code, Some(1));
    assert!(
        refused.stderr.contains("--auth-keys: ") && refused.stderr.contains("key 1: the name"),
        "{}",
        refused.stderr
    );
}

#[tokio::test]
async fn a_new_key_is_printed_once_and_ready_to_use() {
    let made = Launch::bare(&["key", "new", "ci", "--expires", "2999-01-31"]).finish().await;
    let lines: Vec<_> = made.stdout.lines().collect();
    assert!(lines[0].starts_with("rlk.ci.") && lines[0].len() == 50, "{made:?}");
    let rest = lines[2..].join("\n");
    assert!(rest.contains("hashes = [\"sha256:") && !rest.contains(&lines[0][7..]), "{rest}");
    assert!(rest.contains("expires = 2999-01-31"), "{rest}");
    for bad in
        [&["key", "new", "a b"] as &[_], &["key", "new", "a", "--names", "a b"], &["key", "new", "a", "--verbs", "x"]]
    {
        let refused = Launch::bare(bad).finish().await;
        assert_ne!(refused.code, Some(0), "{bad:?}");
        assert!(refused.stdout.is_empty() && !refused.stderr.is_empty(), "{refused:?}");
    }
    let refused = Launch::bare(&["key", "new", "a", "--expires", "soon"]).finish().await;
    assert_ne!(refused.code, Some(0), "{refused:?}");
}
