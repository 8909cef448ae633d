//! Slots for waiting requests: the share of one client, and free locks while all slots are taken.

use http::Method;
use serde_json::json;

use super::keys::{HOLDER, Key, file, key, with_keys};
use crate::support::client::{Answer, Call, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::waiters::{
    HOUR_MS, answer, long_waiting_acquire, patient, released, start_waiting, waiting_is,
};

impl Key {
    async fn acquired(&self, gateway: &Gateway, name: &str) -> Lease {
        let call = self.call(gateway, Method::POST, &lock_path(name));
        Lease::from(&call.json(&json!({ "ttl_ms": HOUR_MS })).send().await)
    }

    fn waiting_acquire(&self, gateway: &Gateway, name: &str) -> Call {
        let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS });
        self.call(gateway, Method::POST, &lock_path(name)).json(&body)
    }
}

#[track_caller]
fn too_many(refused: &Answer, words: &str) {
    let problem = refused.problem(429, "too_many_waiters");
    assert!(!refused.header("retry-after").is_empty(), "{refused:?}");
    assert!(problem["detail"].as_str().unwrap().contains(words), "{problem:#}");
}

// Each of the following tests covers a bug of the past.

#[tokio::test]
async fn one_key_cannot_take_all_waiting_slots() {
    let greedy = key("greedy", HOLDER, "*").await;
    let victim = key("victim", HOLDER, "*").await;
    let file = file(&[&greedy, &victim]);
    // Prometheus, which reads the metrics, has no key.
    let gateway = patient(with_keys(&file))
        .flag("--public", "metrics")
        .flag("--max-waiters", "8")
        .start()
        .await;
    let held = victim.acquired(&gateway, "job").await;
    let other = victim.acquired(&gateway, "other").await;
    let greed = [
        start_waiting(&gateway, greedy.waiting_acquire(&gateway, "job")).await,
        start_waiting(&gateway, greedy.waiting_acquire(&gateway, "job")).await,
    ];
    too_many(
        &greedy.waiting_acquire(&gateway, "job").send().await,
        "2 requests of this client are waiting",
    );
    too_many(
        &greedy.waiting_acquire(&gateway, "other").send().await,
        "2 requests of this client are waiting",
    );
    let free = Lease::from(&greedy.waiting_acquire(&gateway, "free").send().await);
    assert_eq!(greedy.delete(&gateway, "free", &free.token).await.status, 204);

    let waiter = start_waiting(&gateway, victim.waiting_acquire(&gateway, "other")).await;
    assert_eq!(victim.delete(&gateway, "other", &other.token).await.status, 204);
    Lease::from(&answer(waiter).await);
    assert_eq!(victim.delete(&gateway, "job", &held.token).await.status, 204);
    // Both waiters of the client leave, so its slots are free again.
    let [first, second] = greed;
    let lease = Lease::from(&answer(first).await);
    let third = start_waiting(&gateway, greedy.waiting_acquire(&gateway, "job")).await;
    assert_eq!(greedy.delete(&gateway, "job", &lease.token).await.status, 204);
    let lease = Lease::from(&answer(second).await);
    assert_eq!(greedy.delete(&gateway, "job", &lease.token).await.status, 204);
    Lease::from(&answer(third).await);
    waiting_is(&gateway, 0, 0).await;
}

#[tokio::test]
async fn a_free_lock_is_granted_when_all_waiting_slots_are_taken() {
    let gateway = patient(Launch::embedded()).flag("--max-waiters", "1").start().await;
    let held = gateway.acquire_for("job", HOUR_MS).await;
    gateway.acquire_for("held", HOUR_MS).await;
    let waiter = start_waiting(&gateway, long_waiting_acquire(&gateway, "job")).await;
    let free = Lease::from(&long_waiting_acquire(&gateway, "free").send().await);
    released(&gateway, "free", &free).await;
    for name in ["job", "held"] {
        too_many(
            &long_waiting_acquire(&gateway, name).send().await,
            "1 requests are waiting for locks",
        );
    }
    released(&gateway, "job", &held).await;
    Lease::from(&answer(waiter).await);
    waiting_is(&gateway, 0, 0).await;
}

#[tokio::test]
async fn the_locks_that_one_client_waits_for_are_limited() {
    let gateway =
        patient(Launch::embedded()).flag("--max-waited-locks-per-client", "2").start().await;
    let held = gateway.acquire_for("a", HOUR_MS).await;
    gateway.acquire_for("b", HOUR_MS).await;
    gateway.acquire_for("c", HOUR_MS).await;
    let waiter = start_waiting(&gateway, long_waiting_acquire(&gateway, "a")).await;
    let _b = start_waiting(&gateway, long_waiting_acquire(&gateway, "b")).await;
    too_many(&long_waiting_acquire(&gateway, "c").send().await, "waiting for 2 locks here");
    let _more = start_waiting(&gateway, long_waiting_acquire(&gateway, "b")).await;
    released(&gateway, "a", &held).await;
    Lease::from(&answer(waiter).await);
    waiting_is(&gateway, 2, 1).await;
    let _c = start_waiting(&gateway, long_waiting_acquire(&gateway, "c")).await;
    waiting_is(&gateway, 3, 2).await;
}
