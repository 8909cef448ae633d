//! Waiting requests. This file sends them, checks that they wait, and reads the times of their
//! answers.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::client::{Answer, Call, Lease, lock_path};
use crate::support::gateway::Gateway;
use crate::support::harness::eventually;
use crate::support::metrics::Samples;

/// A wait in milliseconds that is longer than any test takes.
pub(crate) const LONG_MS: u64 = 14_000;

/// An acquire for a minute that waits up to `wait_ms`.
pub(crate) fn waiting_acquire(gateway: &Gateway, name: &str, wait_ms: u64) -> Call {
    asking(gateway, name, json!({ "ttl_ms": 60_000, "wait_ms": wait_ms }))
}

fn asking(gateway: &Gateway, name: &str, body: Value) -> Call {
    gateway.call(Method::POST, lock_path(name)).json(&body)
}

/// How many requests wait at a gateway, and for how many locks.
pub(crate) async fn waiting(gateway: &Gateway) -> (u64, u64) {
    let samples = Samples::of(gateway).await;
    let gauge = |name| samples.get(name, &[]) as u64;
    (gauge("redlock_waiters"), gauge("redlock_waiting_locks"))
}

pub(crate) async fn waiting_is(gateway: &Gateway, waiters: u64, locks: u64) {
    let what = format!("{waiters} requests wait for {locks} locks");
    eventually(&what, async || (waiting(gateway).await == (waiters, locks)).then_some(())).await;
}

/// Sends a request. Returns once the gateway counts it as waiting.
pub(crate) async fn start_waiting(gateway: &Gateway, call: Call) -> JoinHandle<Answer> {
    let (before, _) = waiting(gateway).await;
    let sent = tokio::spawn(call.send());
    eventually("one more waits", async || (waiting(gateway).await.0 == before + 1).then_some(()))
        .await;
    sent
}

pub(crate) async fn answer(waiter: JoinHandle<Answer>) -> Answer {
    waiter.await.expect("no panic")
}

pub(crate) async fn released(gateway: &Gateway, name: &str, lease: &Lease) {
    let answer = gateway.delete(name, &lease.token).await;
    assert_eq!(answer.status, 204, "{answer:?}");
}

pub(crate) async fn nothing_is_left(gateway: &Gateway) {
    waiting_is(gateway, 0, 0).await;
    eventually("no lock is listed", async || {
        let listed = gateway.get("/locks").await.json();
        listed["locks"].as_array().expect("a list").is_empty().then_some(())
    })
    .await;
}

/// The median. If the number of times is even, it is the larger of the two in the middle.
pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}
