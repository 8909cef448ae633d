//! Requests with several faults, and the fault that the answer names. On every route that acquires, an
//! unknown caller comes first, then a missing permission, then a bad argument, then an exceeded rate.

use http::Method;
use serde_json::{Value, json};

use crate::http::keys::{HOLDER, Key, file, key, with_keys};
use crate::support::client::{Answer, Call, Lease};
use crate::support::gateway::Gateway;

const KEY: &str = "a-key-for-two-faults";
/// The burst of both keys. Each request of [`ROUTES`] costs more, so it always exceeds the rate.
const BURST: u32 = 3;

/// A request that acquires, as each route takes it.
struct Route {
    what: &'static str,
    path: &'static str,
    accept: &'static str,
    /// Costs 8.
    body: fn() -> Value,
}

fn names() -> Vec<String> {
    (0..8).map(|number| format!("a/{number}")).collect()
}

const ROUTES: [Route; 5] = [
    Route {
        what: "slots",
        path: "/locks/a%2Fpool",
        accept: "application/json",
        body: || json!({ "slots": 8, "take": 8 }),
    },
    Route {
        what: "a set",
        path: "/locks",
        accept: "application/json",
        body: || json!({ "names": names() }),
    },
    Route {
        what: "a stream",
        path: "/locks/a%2Fpool",
        accept: "text/event-stream",
        body: || json!({ "slots": 8, "take": 8 }),
    },
    Route {
        what: "a deferred set",
        path: "/requests",
        accept: "application/json",
        body: || json!({ "names": names() }),
    },
    Route {
        what: "deferred slots",
        path: "/requests",
        accept: "application/json",
        body: || json!({ "names": ["a/pool"], "slots": 8, "take": 8 }),
    },
];

impl Route {
    fn call(&self, gateway: &Gateway, key: Option<&Key>, more: Value) -> Call {
        let mut body = (self.body)();
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let call = match key {
            Some(key) => key.call(gateway, Method::POST, self.path),
            None => gateway.call(Method::POST, self.path),
        };
        call.header("idempotency-key", KEY).header("accept", self.accept).json(&body)
    }

    fn assert(&self, answer: &Answer, status: u16, code: &str) {
        assert_eq!(answer.status, status, "{}: {}", self.what, answer.text());
        answer.problem(status, code);
    }
}

async fn limited(name: &str, names: &str) -> Key {
    let mut key = key(name, HOLDER, names).await;
    key.entry.push_str(&format!("rate = 1000\nburst = {BURST}\n"));
    key
}

#[tokio::test]
async fn every_route_that_acquires_refuses_two_faults_in_one_order() {
    let (small, elsewhere) = (limited("small", "a/*").await, limited("elsewhere", "b/*").await);
    let gateway = with_keys(&file(&[&small, &elsewhere])).start().await;
    let bad = || json!({ "priority": 99 });
    for route in &ROUTES {
        // The caller is unknown, and an argument is bad.
        route.assert(&route.call(&gateway, None, bad()).send().await, 401, "unauthenticated");
        // The permission is missing, an argument is bad, and the rate is exceeded.
        let forbidden = route.call(&gateway, Some(&elsewhere), bad()).send().await;
        route.assert(&forbidden, 403, "forbidden");
        // An argument is bad, and the rate is exceeded.
        route.assert(&route.call(&gateway, Some(&small), bad()).send().await, 400, "invalid_body");
        // Only the rate is exceeded.
        let over = route.call(&gateway, Some(&small), json!({})).send().await;
        route.assert(&over, 429, "rate_limited");
        assert!(over.text().contains("counts as 8 requests"), "{}: {}", route.what, over.text());
    }
}

/// A holder keeps and releases what it has, however small its rate.
#[tokio::test]
async fn a_holder_of_a_set_releases_it_with_a_small_rate() {
    let mut slow = key("slow", HOLDER, "*").await;
    slow.entry.push_str("rate = 1\nburst = 10\n");
    let gateway = with_keys(&file(&[&slow])).start().await;
    let call = slow.call(&gateway, Method::POST, "/locks").json(&json!({ "names": names() }));
    let set = Lease::from(&call.send().await);
    let query: Vec<_> = names().iter().map(|name| format!("name={name}")).collect();
    let path = format!("/locks?{}", query.join("&"));
    let released = slow.call(&gateway, Method::DELETE, &path).header("lock-token", &set.token);
    let released = released.send().await;
    assert_eq!(released.status, 200, "{}", released.text());
}
