//! A client left before the answer to its POST arrived, so it never received the token. It releases
//! the lock by the `Idempotency-Key` of that POST.

use std::time::Duration;

use http::Method;
use serde_json::json;

use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::client::{Answer, Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, eventually, masters};
use crate::support::waiters::{HOUR_MS, patient, patient_over};

const KEY: &str = "order-4711/attempt";

/// A gateway over these masters, which may be late on a busy machine.
fn over(servers: &[RedisServer]) -> Launch {
    patient_over(servers).flag("--clock-skew", "10s").flag("--node-timeout", "10s")
}

/// Repetitions of a test that explores moments.
const MOMENTS: u64 = 200;

async fn acquire(gateway: &Gateway, name: &str, key: &str) -> Answer {
    let call = gateway.call(Method::POST, lock_path(name)).header("idempotency-key", key);
    call.json(&json!({ "ttl_ms": HOUR_MS })).send().await
}

async fn release(gateway: &Gateway, name: &str, key: &str) -> Answer {
    gateway.call(Method::DELETE, lock_path(name)).header("idempotency-key", key).send().await
}

/// Sends a POST and disconnects after this delay, without reading.
async fn give_up(gateway: &Gateway, name: &str, after: Duration) {
    let mut client = gateway.raw().await;
    let body = format!(r#"{{"ttl_ms":{HOUR_MS}}}"#);
    let head = format!(
        "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nidempotency-key: {KEY}\r\n",
        lock_path(name)
    );
    client.write(format!("{head}content-length: {}\r\n\r\n{body}", body.len())).await;
    tokio::time::sleep(after).await;
}

#[tokio::test]
async fn release_by_key_frees_a_lock_with_an_unread_answer() {
    let servers = masters(3);
    let one = over(&servers).ready().await;
    let two = over(&servers).ready().await;
    let mut client = one.raw().await;
    let body = format!(r#"{{"ttl_ms":{HOUR_MS}}}"#);
    client.announce("POST", "job", &format!("idempotency-key: {KEY}\r\n"), body.len()).await;
    client.write(body).await;
    // If the client left before the answer, the gateway would release the lock by itself.
    client.has_unread_answer().await;
    assert_eq!(two.inspect("job").await["state"], "held");
    drop(client);

    let released = release(&two, "job", KEY).await;
    assert_eq!((released.status, released.text().as_str()), (204, ""), "{released:?}");
    let next = one.acquire("job").await;
    release(&two, "job", KEY).await.problem(409, "not_holder");
    assert_eq!(
        one.patch("job", &next.token, HOUR_MS).await.status,
        200,
        "the next holder keeps its lock"
    );
    assert_eq!(one.delete("job", &next.token).await.status, 204);
    release(&two, "job", KEY).await.problem(404, "lock_not_found");
    let again = Lease::from(&acquire(&one, "job", KEY).await);
    assert!(again.fencing > next.fencing, "the key may be used again, for another grant");
}

#[tokio::test]
async fn release_by_key_frees_the_lock_whenever_the_client_hung_up() {
    let servers = masters(3);
    let gateway = over(&servers).ready().await;
    let mut released = 0;
    // On a busy machine, the gateway may take longer to grant a lock than all these delays. Then
    // longer delays follow.
    for n in 0.. {
        if n >= MOMENTS && released > 0 {
            break;
        }
        assert!(n < MOMENTS + 20, "none of them was granted before it was released");
        let name = format!("gone-{n}");
        // At the end of the delay the gateway may be anywhere between reading the request and
        // writing the answer.
        let longer = 1 << n.saturating_sub(MOMENTS).min(10);
        give_up(&gateway, &name, Duration::from_micros(n * 30 * longer)).await;
        let release = gateway.call(Method::DELETE, lock_path(&name));
        let answer = release.header("idempotency-key", KEY).decided().await;
        match answer.status {
            204 => released += 1,
            404 => {}
            _ => panic!("{name}: {answer:?}"),
        }
        // If the gateway reads the POST only after the release, it cancels the POST.
        let is_free = async || (gateway.inspect(&name).await["state"] == "free").then_some(());
        eventually("the lock is free long before its TTL", is_free).await;
    }
}

#[tokio::test]
async fn a_principal_releases_nothing_by_the_key_of_another() {
    let holder = key("holder", HOLDER, "*").await;
    let other = key("other", HOLDER, "*").await;
    let cleaner = key("cleaner", "release", "*").await;
    let reader = key("reader", "inspect,extend", "*").await;
    let file = file(&[&holder, &other, &cleaner, &reader]);
    let gateway = patient(with_keys(&file)).start().await;
    let call = |who: &crate::http::keys::Key, method| {
        who.call(&gateway, method, &lock_path("job")).header("idempotency-key", KEY)
    };
    let lease =
        Lease::from(&call(&holder, Method::POST).json(&json!({ "ttl_ms": HOUR_MS })).send().await);

    call(&other, Method::DELETE).send().await.problem(409, "not_holder");
    call(&cleaner, Method::DELETE).send().await.problem(404, "lock_not_found");
    call(&reader, Method::DELETE).send().await.problem(403, "forbidden");
    gateway
        .call(Method::DELETE, lock_path("job"))
        .header("idempotency-key", KEY)
        .send()
        .await
        .problem(401, "unauthenticated");
    assert_eq!(
        holder.patch(&gateway, "job", &lease.token).await.status,
        200,
        "the other holder keeps its lock"
    );

    assert_eq!(call(&holder, Method::DELETE).send().await.status, 204);
    holder.patch(&gateway, "job", &lease.token).await.problem(404, "lock_not_found");
}

#[tokio::test]
async fn a_lock_token_wins_over_the_key_beside_it() {
    let gateway = patient(Launch::embedded()).start().await;
    let lease = Lease::from(&acquire(&gateway, "job", KEY).await);
    let other = gateway.acquire("another").await;
    let both = |token: &str, key: &str| {
        let call = gateway.call(Method::DELETE, lock_path("job")).header("lock-token", token);
        call.header("idempotency-key", key).send()
    };
    both(&other.token, KEY).await.problem(409, "not_holder");
    both("nonsense", KEY).await.problem(400, "invalid_token");
    assert_eq!(gateway.inspect("job").await["fencing_token"], lease.fencing);
    assert_eq!(
        both(&lease.token, "short").await.status,
        204,
        "nodes that are not asked do not count"
    );
    release(&gateway, "job", "short").await.problem(400, "invalid_parameter");
    gateway.call(Method::DELETE, lock_path("job")).send().await.problem(400, "missing_token");
}

#[tokio::test]
async fn release_by_key_is_unknown_without_a_majority() {
    let servers = masters(3);
    // The release below waits for this long, because two masters hang.
    let gateway = over(&servers).flag("--node-timeout", "1s").ready().await;
    eventually("the lock is granted", async || {
        (acquire(&gateway, "job", KEY).await.status == 201).then_some(())
    })
    .await;
    servers[1..].iter().for_each(RedisServer::stop);
    release(&gateway, "job", KEY).await.problem(503, "outcome_unknown");
    servers[1..].iter().for_each(RedisServer::cont);
    // The lock is released by a repetition of the request, or by a pending release of the first
    // one.
    eventually("the lock is released", async || {
        let again = release(&gateway, "job", KEY).await;
        assert!([204, 404, 503].contains(&again.status), "{again:?}");
        (again.status != 503).then_some(())
    })
    .await;
    gateway.acquire_soon("job", json!({})).await;
}
