//! API keys: which callers are admitted, which operations and names a key allows, and to which
//! principal a lock belongs.

use base64::prelude::{BASE64_STANDARD, Engine};
use http::Method;
use serde_json::{Value, json};

use crate::http::audit::audit_in_log;
use crate::http::keys::{HOLDER, Key, file, key, with_keys};
use crate::support::client::{Answer, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{eventually, masters};
use crate::support::resp::Resp;
use crate::support::waiters::{HOUR_MS, patient_over};

/// Waits until a majority of the gateway's nodes may vote.
pub(super) async fn is_ready(gateway: &Gateway) {
    eventually("the gateway is ready", async || {
        (gateway.get("/readyz").await.status == 200).then_some(())
    })
    .await;
}

/// The status and the problem code of an answer. The code is empty if the request succeeded.
fn outcome(answer: &Answer) -> (u16, String) {
    let code = match answer.header("content-type") {
        "application/problem+json" => answer.json()["code"].as_str().expect("a string").to_owned(),
        _ => String::new(),
    };
    (answer.status, code)
}

fn basic(user: &str, password: &str) -> String {
    format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}")))
}

const ALL_VERBS: [&str; 7] =
    ["acquire", "extend", "release", "inspect", "list", "force", "metrics"];

/// The callers of a gateway that knows the keys `right`, `elsewhere`, `without` and an expired one.
struct Callers {
    right: Key,
    /// A key that allows only other names.
    elsewhere: Key,
    /// For each verb, the verb and a key that has every right except this one.
    without: Vec<(&'static str, Key)>,
    /// Authorization headers of callers whom the gateway does not know; `None` for no header.
    strangers: Vec<Option<String>>,
}

impl Callers {
    async fn new() -> (Self, Scratch) {
        let all = ALL_VERBS.join(",");
        let right = key("right", &all, "deploy/*").await;
        let elsewhere = key("elsewhere", all.trim_end_matches(",metrics"), "other/*").await;
        let unknown = key("right", &all, "*").await;
        let mut expired = key("expired", &all, "*").await;
        expired.entry.push_str("expires = 2020-01-01T00:00:00Z\n");
        let mut without = Vec::new();
        for verb in ALL_VERBS {
            let others: Vec<_> = ALL_VERBS.into_iter().filter(|other| *other != verb).collect();
            without.push((verb, key(&format!("not-{verb}"), &others.join(","), "*").await));
        }
        let strangers = [
            "Bearer".to_owned(),
            "Bearer hunter2".into(),
            unknown.bearer(),
            expired.bearer(),
            format!("{}x", right.bearer()),
            format!("Digest {}", right.text),
            basic("right", &unknown.text),
            basic("elsewhere", &right.text),
            basic("right", ""),
            "Basic !".into(),
        ];
        let strangers = strangers.map(Some).into_iter().chain([None]).collect();
        let mut known = vec![&right, &elsewhere, &expired];
        known.extend(without.iter().map(|(_, key)| key));
        let file = file(&known);
        (Self { right, elsewhere, without, strangers }, file)
    }
}

/// An endpoint, with the status for a key that has the right and the status for a key that has it
/// only for other names.
struct Endpoint {
    method: Method,
    path: String,
    verb: &'static str,
    right: u16,
    elsewhere: u16,
}

const LOCK: &str = "deploy/app";

fn endpoints() -> impl Iterator<Item = Endpoint> {
    let lock = lock_path(LOCK);
    let forced = format!("{lock}?force=true");
    [
        (Method::POST, lock.as_str(), "acquire", 201, 403),
        (Method::PATCH, &lock, "extend", 200, 403),
        (Method::GET, &lock, "inspect", 200, 403),
        (Method::DELETE, &lock, "release", 204, 403),
        (Method::DELETE, &forced, "force", 204, 403),
        (Method::GET, "/locks", "list", 200, 200),
        (Method::POST, "/requests", "acquire", 202, 403),
        (Method::GET, "/requests/00000000000000000000000000000000", "", 404, 404),
        (Method::DELETE, "/requests/00000000000000000000000000000000", "", 404, 404),
        (Method::GET, "/metrics", "metrics", 200, 403),
        (Method::GET, "/console/history", "metrics", 200, 403),
        (Method::GET, "/docs/", "", 200, 200),
        (Method::GET, "/openapi.json", "", 200, 200),
        (Method::GET, "/openapi-3.0.json", "", 200, 200),
    ]
    .map(|(method, path, verb, right, elsewhere)| Endpoint {
        method,
        path: path.to_owned(),
        verb,
        right,
        elsewhere,
    })
    .into_iter()
}

impl Endpoint {
    /// Makes the lock free if the endpoint is a POST, and held otherwise. Returns the lease of the
    /// held lock.
    async fn prepare(&self, gateway: &Gateway, right: &Key) -> Option<Lease> {
        right
            .call(gateway, Method::DELETE, &format!("{}?force=true", lock_path(LOCK)))
            .send()
            .await;
        if self.method == Method::POST { None } else { Some(right.acquire(gateway, LOCK).await) }
    }

    async fn call(
        &self,
        gateway: &Gateway,
        authorization: Option<&str>,
        lease: Option<&Lease>,
    ) -> Answer {
        let mut call = gateway.call(self.method.clone(), self.path.clone());
        if let Some(text) = authorization {
            call = call.header("authorization", text);
        }
        if let Some(lease) = lease.filter(|_| self.path == lock_path(LOCK)) {
            call = call.header("lock-token", &lease.token);
        }
        if self.path == "/requests" {
            let key = "a-key-of-sixteen-characters";
            call = call.header("idempotency-key", key).json(&json!({ "names": [LOCK] }));
        } else if self.method == Method::POST || self.method == Method::PATCH {
            call = call.json(&json!({ "ttl_ms": 60_000 }));
        }
        call.send().await
    }

    /// Calls the endpoint as every kind of caller, and checks the answers.
    async fn is_guarded(&self, gateway: &Gateway, callers: &Callers) {
        let Callers { right, elsewhere, without, strangers } = callers;
        let at = |who: &str| format!("{who} at {} {}", self.method, self.path);
        let lease = self.prepare(gateway, right).await;
        let lease = lease.as_ref();
        for stranger in strangers {
            let answer = self.call(gateway, stranger.as_deref(), lease).await;
            answer.problem(401, "unauthenticated");
            let challenges: Vec<_> = answer.headers.get_all("www-authenticate").iter().collect();
            let named = |scheme| {
                challenges
                    .iter()
                    .any(|text| text.to_str().is_ok_and(|text| text.starts_with(scheme)))
            };
            assert!(
                named("Bearer realm=") && named("Basic realm=") && challenges.len() == 2,
                "{answer:?}"
            );
        }
        let answer = self.call(gateway, Some(&elsewhere.bearer()), lease).await;
        assert_eq!(answer.status, self.elsewhere, "{}: {answer:?}", at("a key for other names"));
        if self.elsewhere == 403 {
            let problem = answer.problem(403, "forbidden");
            assert!(answer.headers.contains_key("www-authenticate"), "{answer:?}");
            assert!(!problem.to_string().contains("somebody"), "{problem}");
        }
        for (lacking, key) in without.iter().filter(|(lacking, _)| *lacking == self.verb) {
            let answer = self.call(gateway, Some(&key.bearer()), lease).await;
            assert_eq!(outcome(&answer), (403, "forbidden".into()), "{}: {answer:?}", at(lacking));
        }
        if self.method == Method::POST {
            assert_eq!(
                right.get(gateway, &lock_path(LOCK)).await.json()["state"],
                "free",
                "nobody got the lock"
            );
        } else if self.path.starts_with(&lock_path(LOCK)) {
            let look = right.get(gateway, &lock_path(LOCK)).await.json();
            assert_eq!(
                (&look["state"], &look["key"]),
                (&json!("held"), &json!("right")),
                "the lock is still held"
            );
        }
        for shown in [
            right.bearer(),
            basic("right", &right.text),
            right.bearer().replace("Bearer", "bearer"),
        ] {
            let lease = self.prepare(gateway, right).await;
            let answer = self.call(gateway, Some(&shown), lease.as_ref()).await;
            assert_eq!(answer.status, self.right, "{}: {answer:?}", at("the right key"));
        }
    }
}

#[tokio::test]
async fn a_key_opens_only_its_own_locks_and_operations() {
    let (callers, file) = Callers::new().await;
    let gateway = with_keys(&file).flag("--public", "none").start().await;
    for endpoint in endpoints() {
        endpoint.is_guarded(&gateway, &callers).await;
    }
    // A listing contains only locks that its reader may list. The lock of the last round is still
    // held, so each listing could contain it.
    for query in ["", "?prefix=deploy%2Fapp&limit=1", "?prefix=none&limit=1"] {
        // Not even the end of a page may show that a lock exists which the reader must not see.
        let listed = callers.elsewhere.get(&gateway, &format!("/locks{query}")).await.json();
        assert_eq!(listed, json!({ "locks": [] }), "{query}");
    }
    assert_eq!(callers.right.get(&gateway, "/locks").await.json()["locks"][0]["name"], LOCK);
    assert_eq!(gateway.get("/livez").await.status, 200);
}

#[tokio::test]
async fn a_stolen_token_is_useless_with_another_key() {
    let servers = masters(3);
    let holder = key("holder", HOLDER, "*").await;
    let thief = key("thief", HOLDER, "*").await;
    let chief = key("chief", &format!("{HOLDER},force"), "*").await;
    let file = file(&[&holder, &thief, &chief]);
    let launch = || {
        patient_over(&servers)
            .flag("--clock-skew", "10s")
            .flag("--node-timeout", "10s")
            .flag("--auth-keys", file.path())
    };
    let gateway = launch().start().await;
    let other_gateway = launch().start().await;
    for gateway in [&gateway, &other_gateway] {
        is_ready(gateway).await;
    }

    let lease = holder.acquire(&gateway, "job").await;
    // Nodes do not store the client's token, but a value that is derived from it.
    let all_store =
        || servers.iter().map(|server| server.cmd(&["GET", "lock:job"])).collect::<Vec<_>>();
    let before = eventually("all nodes have the lock", async || {
        Some(all_store()).filter(|stored| !stored.contains(&Resp::Nil))
    })
    .await;
    let stored = before[0].text();
    assert!(!stored.contains(lease.owner()) && stored.contains("holder"), "{stored}");
    for gateway in [&gateway, &other_gateway] {
        thief.patch(gateway, "job", &lease.token).await.problem(409, "not_holder");
        thief.delete(gateway, "job", &lease.token).await.problem(409, "not_holder");
        assert_eq!(all_store(), before);
    }
    // The token and owner that nodes store cannot be used as a lock token either.
    let raw = format!("1.{}.{}", &stored[..16], &stored[17..57]);
    holder.delete(&gateway, "job", &raw).await.problem(409, "not_holder");

    let extended = holder.patch(&other_gateway, "job", &lease.token).await;
    assert_eq!(
        (extended.status, &extended.json()["token"]),
        (200, &json!(lease.token)),
        "{extended:?}"
    );
    let longer = chief.call(&other_gateway, Method::PATCH, "/locks/job");
    let longer = longer.header("lock-token", &lease.token);
    let longer = longer.json(&json!({ "ttl_ms": HOUR_MS })).send().await;
    assert_eq!(longer.status, 200, "{longer:?}");
    let released = chief.delete(&gateway, "job", &lease.token).await;
    assert_eq!(released.status, 204);
    let recorded =
        eventually("the change is recorded", async || audit_in_log(&gateway).pop()).await;
    assert_eq!(
        (&recorded["who"], &recorded["what"]),
        (&json!("chief"), &json!("release")),
        "{recorded}"
    );
    assert_eq!(recorded["request_id"], released.header("x-request-id"));
    eventually("no node has the lock", async || {
        all_store().iter().all(|stored| *stored == Resp::Nil).then_some(())
    })
    .await;
    holder.patch(&gateway, "job", &lease.token).await.problem(404, "lock_not_found");
}

#[tokio::test]
async fn a_refused_release_does_not_change_anothers_lock() {
    let servers = masters(3);
    let holder = key("holder", HOLDER, "*").await;
    let thief = key("thief", HOLDER, "*").await;
    let file = file(&[&holder, &thief]);
    let gateway = patient_over(&servers)
        .flag("--clock-skew", "10s")
        .flag("--node-timeout", "10s")
        .flag("--auth-keys", file.path())
        .start()
        .await;
    is_ready(&gateway).await;
    let lease = holder.acquire(&gateway, "job").await;
    assert_eq!(holder.patch(&gateway, "job", &lease.token).await.status, 200);
    let fences = |name: &str| {
        let key = format!("{{lock:{name}}}:fence");
        servers.iter().map(|server| server.cmd(&["GET", &key])).collect::<Vec<_>>()
    };
    // After an extension, nodes store the lock with a mark. The mark allows a repair on a master
    // that loses the lock.
    let marked = eventually("all nodes have set the extended flag", async || {
        let fences = fences("job");
        fences
            .iter()
            .all(|fence| *fence != Resp::Nil && fence.text().ends_with('+'))
            .then_some(fences)
    })
    .await;
    let soon = std::time::SystemTime::now() + std::time::Duration::from_millis(900);
    let soon = soon.duration_since(std::time::UNIX_EPOCH).unwrap().as_micros();
    let invented = "1".repeat(40);
    for token in [
        lease.token.clone(),
        format!("1.{}.{invented}", lease.fencing),
        format!("1.{soon}.{invented}"),
    ] {
        thief.delete(&gateway, "job", &token).await.problem(409, "not_holder");
        assert_eq!(fences("job"), marked, "{token}");
    }
    // A token from the future would lead the fencing tokens of other locks ahead too.
    let late = std::time::SystemTime::now() + std::time::Duration::from_secs(3_600);
    let late = late.duration_since(std::time::UNIX_EPOCH).unwrap().as_micros();
    for future in [format!("1.{late}.{invented}"), format!("1.{}.{invented}", late - 1_800_000_000)]
    {
        thief.delete(&gateway, "free", &future).await.problem(404, "lock_not_found");
        assert!(fences("free").iter().all(|fence| *fence == Resp::Nil));
        holder.delete(&gateway, "job", &future).await.problem(409, "not_holder");
        assert_eq!(fences("job"), marked);
    }
    assert_eq!(holder.delete(&gateway, "job", &lease.token).await.status, 204);
}

#[tokio::test]
async fn a_browser_sends_a_stored_key_to_no_other_site() {
    let known = key("known", HOLDER, "*").await;
    let file = file(&[&known]);
    let gateway = with_keys(&file).start().await;
    let basic = basic("known", &known.text);
    let ask = async |authorization: &str, site: &str| {
        let call = gateway.call(Method::GET, "/locks/a").header("authorization", authorization);
        call.header("sec-fetch-site", site).send().await
    };
    for site in ["cross-site", "same-site"] {
        let refused = ask(&basic, site).await;
        refused.problem(403, "forbidden");
        assert!(
            !refused.headers.contains_key("www-authenticate"),
            "a browser would ask for a password: {refused:?}"
        );
        assert_eq!(ask(&known.bearer(), site).await.status, 200);
    }
    for site in ["same-origin", "none"] {
        assert_eq!(ask(&basic, site).await.status, 200);
    }
}

#[tokio::test]
async fn an_idempotency_key_leads_only_its_own_principal_to_its_lock() {
    let one = key("one", HOLDER, "*").await;
    let two = key("two", HOLDER, "*").await;
    let file = file(&[&one, &two]);
    let gateway = with_keys(&file).start().await;
    let acquire = async |key: &Key| {
        let call = key
            .call(&gateway, Method::POST, "/locks/job")
            .header("idempotency-key", "the-same-key-for-both");
        call.json(&json!({ "ttl_ms": 60_000 })).send().await
    };
    let first = Lease::from(&acquire(&one).await);
    let again = Lease::from(&acquire(&one).await);
    assert_eq!((&first.token, first.fencing), (&again.token, again.fencing));
    acquire(&two).await.problem(409, "lock_held");
    assert_eq!(one.delete(&gateway, "job", &again.token).await.status, 204);
    // Two clients with the same idempotency key get different tokens. So the key does not reveal
    // the token.
    assert_ne!(Lease::from(&acquire(&two).await).owner(), first.owner());
}

#[tokio::test]
async fn only_the_named_paths_are_public() {
    let invented = key("nobody", "acquire", "*").await;
    let watcher = key("watcher", "metrics", "*").await;
    let file = file(&[&invented, &watcher]);
    for (public, docs, metrics) in [
        (None, 200, 401),
        (Some("none"), 401, 401),
        (Some("metrics"), 401, 200),
        (Some("docs,metrics"), 200, 200),
    ] {
        let launch = with_keys(&file);
        let launch = public.map_or(launch.clone(), |list| launch.flag("--public", list));
        let gateway = launch.start().await;
        for (path, status) in [
            ("/readyz", 200),
            ("/healthz", 200),
            ("/docs/", docs),
            ("/openapi.json", docs),
            ("/metrics", metrics),
            ("/console/history", metrics),
            ("/livez", 200),
        ] {
            assert_eq!(gateway.get(path).await.status, status, "{path} with {public:?}");
        }
        gateway.get("/locks").await.problem(401, "unauthenticated");
        gateway.get("/locks/a").await.problem(401, "unauthenticated");
        // The list of nodes is only for callers with a key.
        for path in ["/readyz", "/healthz"] {
            let wrong =
                gateway.call(Method::GET, path).header("authorization", "Bearer x").send().await;
            for answer in [gateway.get(path).await, invented.get(&gateway, path).await, wrong] {
                assert_eq!((answer.status, answer.json()), (200, json!({ "status": "ready" })));
            }
        }
        let health = watcher.get(&gateway, "/readyz").await.json();
        assert_eq!(health["nodes"].as_array().map(Vec::len), Some(5), "{health}");
    }
}

#[tokio::test]
async fn without_keys_force_and_addresses_are_local_only() {
    let loopback = Launch::embedded().start().await;
    loopback.acquire("job").await;
    assert_eq!(loopback.call(Method::DELETE, "/locks/job?force=true").send().await.status, 204);
    let says = |problem: &Value, words: &str| {
        assert!(problem["detail"].as_str().unwrap().contains(words), "{problem:#}");
    };
    let through_proxy = loopback.call(Method::DELETE, "/locks/job?force=true");
    let denied = through_proxy.header("x-forwarded-for", "192.0.2.1").send().await;
    says(&denied.problem(403, "forbidden"), "no headers of a proxy");
    let gateway = Launch::embedded()
        .flag("--listen", "0.0.0.0:0")
        .argument("--embedded")
        .argument("--allow-anonymous")
        .start()
        .await;
    let lease = gateway.acquire("job").await;
    let denied = gateway.call(Method::DELETE, "/locks/job?force=true").send().await;
    says(&denied.problem(403, "forbidden"), "only with a loopback --listen");
    assert!(
        !denied.headers.contains_key("www-authenticate"),
        "no credentials can help: {denied:?}"
    );
    let recorded =
        eventually("the change is recorded", async || audit_in_log(&gateway).pop()).await;
    assert_eq!(
        (&recorded["who"], &recorded["what"]),
        (&json!("anonymous"), &json!("force")),
        "{recorded}"
    );
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);

    let refused = Launch::bare(&["--listen", "0.0.0.0:0"]).finish().await;
    assert_eq!(refused.code, Some(2));
    assert!(
        refused.stderr.contains("--listen: 0.0.0.0:0 is reachable")
            && refused.stderr.contains("--auth-keys")
    );
    let known = key("ci", HOLDER, "*").await;
    let file = file(&[&known]);
    let both = with_keys(&file).more("--allow-anonymous=true", "--max-wait=1s").finish().await;
    assert!(
        both.stderr.contains("--allow-anonymous: not allowed beside --auth-keys"),
        "{}",
        both.stderr
    );
    let world = with_keys(&file).flag("--listen", "0.0.0.0:0").argument("--embedded").start().await;
    // The banner appears after the first line of the log, so this waits for it.
    let caution = "keys and tokens travel as plain text";
    eventually(caution, async || world.stdout().contains(caution).then_some(())).await;

    let none = Scratch::new("keys.toml", "# no key yet\n");
    let closed = with_keys(&none).start().await;
    closed.post("job", json!({})).await.problem(401, "unauthenticated");
    eventually("the log warns", async || {
        closed.stdout().contains("nobody is let in").then_some(())
    })
    .await;

    let broken = Scratch::new("keys.toml", "[[key]]\nname = 'a b'\nallow = []");
    let refused = with_keys(&broken).finish().await;
    assert_eq!(refused.code, Some(2));
    assert!(
        refused.stderr.contains("--auth-keys: ") && refused.stderr.contains("key 1: the name"),
        "{}",
        refused.stderr
    );
}
