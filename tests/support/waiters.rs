//! Waiting requests. This file sends them, checks that they wait, and reads the times of their
//! answers.

use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::support::client::{Answer, Call, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually};
use crate::support::metrics::Samples;

/// A TTL and a wait that outlast every test, in milliseconds. So if a lock becomes free, it was
/// released. Gateways from [`patient`] allow them.
pub(crate) const HOUR_MS: u64 = 3_600_000;
/// The longest TTL that a gateway allows by default, in milliseconds.
const LONGEST_TTL_MS: u64 = 300_000;

/// A gateway that allows TTLs and waits of [`HOUR_MS`].
pub(crate) fn patient(launch: Launch) -> Launch {
    launch.flag("--max-ttl", "1h").flag("--max-wait", "1h")
}

/// Such a gateway over these masters. It waits for their answers for as long as a flag allows. A
/// master refuses a request that was on its way for longer than the clock skew.
pub(crate) fn patient_over(servers: &[RedisServer]) -> Launch {
    patient(Launch::over(servers)).flag("--node-timeout", "10s").flag("--clock-skew", "10s")
}

/// An acquire for five minutes that waits up to `wait_ms`.
pub(crate) fn waiting_acquire(gateway: &Gateway, name: &str, wait_ms: u64) -> Call {
    asking(gateway, name, json!({ "ttl_ms": LONGEST_TTL_MS, "wait_ms": wait_ms }))
}

/// An acquire that waits, both for [`HOUR_MS`].
pub(crate) fn long_waiting_acquire(gateway: &Gateway, name: &str) -> Call {
    asking(gateway, name, json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS }))
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

/// Releases a lock. Repeats the release as long as its outcome is unknown: on a busy machine,
/// masters may not answer in time.
pub(crate) async fn released(gateway: &Gateway, name: &str, lease: &Lease) {
    let answer = gateway.delete(name, &lease.token).await;
    if answer.status == 503 {
        let release = gateway.call(Method::DELETE, lock_path(name));
        let again = release.header("lock-token", &lease.token).decided().await;
        assert!([204, 404, 409].contains(&again.status), "{again:?}");
    } else {
        assert_eq!(answer.status, 204, "{answer:?}");
    }
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
