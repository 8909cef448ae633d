//! A lock with several slots (`slots` and `take` of `POST /locks/{name}`).

use std::time::{Duration, Instant};

use http::Method;
use serde_json::{Value, json};

use crate::http::audit::audit_lines;
use crate::http::auth::is_ready;
use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::client::{Answer, Call, Lease, assert_left};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{RedisServer, eventually, masters};
use crate::support::resp::Resp;
use crate::support::waiters::{HOUR_MS, patient, patient_over, waiting_is};

const KEY: &str = "a-key-of-the-pool-1";

async fn embedded() -> Gateway {
    patient(Launch::embedded()).start().await
}

/// A request for slots for [`HOUR_MS`]. So if a slot becomes free, it was released.
fn asking(gateway: &Gateway, slots: u32, take: u32, more: Value) -> Call {
    let mut body = json!({ "slots": slots, "take": take, "ttl_ms": HOUR_MS });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    gateway.call(Method::POST, "/locks/pool").json(&body)
}

async fn slots_of(gateway: &Gateway, slots: u32, take: u32) -> Lease {
    Lease::from(&asking(gateway, slots, take, json!({})).send().await)
}

fn numbers(holders: &Value) -> Vec<u64> {
    let holders = holders.as_array().map(Vec::as_slice).unwrap_or_default();
    holders.iter().map(|holder| holder["slot"].as_u64().expect("a slot")).collect()
}

fn is_free(status: &Value) -> bool {
    status["state"] == "free" && status.get("holders").is_none() && status.get("slots").is_none()
}

/// The life of a lock with three slots, from its first holder until all are free again.
async fn lifecycle(gateway: &Gateway) {
    let granted = asking(gateway, 3, 2, json!({ "owner": "heavy" })).send().await;
    let heavy = Lease::from(&granted);
    let body = granted.json();
    assert_eq!((&body["slots"], body["slots_held"].as_array().unwrap().len()), (&json!(3), 2));
    assert!(heavy.token.starts_with("2-0-"), "{}", &heavy.token[..5]);
    let light = Lease::from(&asking(gateway, 3, 1, json!({ "owner": "light" })).send().await);
    let refused = asking(gateway, 3, 1, json!({})).send().await;
    let problem = refused.problem(409, "lock_held");
    assert_eq!(numbers(&problem["holders"]), [1, 2, 3]);
    let detail = problem["detail"].as_str().unwrap();
    assert!(
        detail.starts_with("1 slot is wanted, none is free; enough may be free in "),
        "{detail}"
    );
    // The first in line and the one behind it want different numbers of slots.
    let waits = |take: u32| asking(gateway, 3, take, json!({ "wait_ms": 300 })).send();
    for refused in <[_; 2]>::from(tokio::join!(waits(2), waits(1))) {
        let problem = refused.problem(409, "lock_held");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.starts_with("too few slots are free; this request is "), "{detail}");
    }
    // A request without slots asks for slot 1.
    gateway.post("pool", json!({})).await.problem(409, "lock_held");

    let seen = gateway.inspect("pool").await;
    assert_eq!((&seen["state"], &seen["slots"]), (&json!("held"), &json!(3)));
    let holders = seen["holders"].as_array().unwrap();
    let labels = |label: &str| holders.iter().filter(|holder| holder["holder"] == label).count();
    assert_eq!((labels("heavy"), labels("light")), (2, 1));
    assert!(!refused.text().contains(heavy.owner()) && !seen.to_string().contains(heavy.owner()));
    let fewer = gateway.get("/locks/pool?slots=1").await.json();
    assert_eq!(numbers(&fewer["holders"]), [1]);
    let listed = gateway.get("/locks?prefix=po").await.json();
    let mut listed: Vec<_> = listed["locks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|lock| {
            assert_eq!(lock["name"], "pool", "{lock}");
            lock["slot"].as_u64().unwrap_or(1)
        })
        .collect();
    listed.sort_unstable();
    assert_eq!(listed, [1, 2, 3]);

    let extended = gateway.patch("pool", &heavy.token, 60_000).await;
    assert_eq!(extended.json()["slots_held"], body["slots_held"], "{extended:?}");
    let leases = json!({ "leases": [
        { "name": "pool", "token": heavy.token }, { "name": "pool", "token": light.token },
    ] });
    let both = gateway.call(Method::PATCH, "/locks").json(&leases).send().await.json();
    assert!(both["results"].as_array().unwrap().iter().all(|one| one["status"] == 200), "{both}");
    assert_eq!(gateway.delete("pool", &light.token).await.status, 204);
    assert_eq!(gateway.delete("pool", &heavy.token).await.status, 204);
    gateway.delete("pool", &heavy.token).await.problem(404, "lock_not_found");
    assert!(is_free(&gateway.inspect("pool").await));
    // A token with another slot in it is one of a lost lease.
    let heavy = slots_of(gateway, 3, 2).await;
    let forged = format!("2-0-7{}", &heavy.token[heavy.token.find('.').unwrap()..]);
    gateway.patch("pool", &forged, 60_000).await.problem(404, "lock_not_found");
    eventually("the lease is given up", async || {
        is_free(&gateway.inspect("pool").await).then_some(())
    })
    .await;
    let plain = gateway.acquire("pool").await;
    assert!(plain.token.starts_with("1."));
    assert_eq!(gateway.delete("pool", &plain.token).await.status, 204);
}

#[tokio::test]
async fn slots_are_granted_and_released_on_embedded_nodes() {
    lifecycle(&embedded().await).await;
}

#[tokio::test]
async fn slots_are_granted_and_released_on_masters() {
    let servers = masters(3);
    lifecycle(&patient_over(&servers).ready().await).await;
}

#[tokio::test]
async fn a_key_gets_its_slots_again_and_releases_them() {
    let gateway = embedded().await;
    let ask = || asking(&gateway, 4, 2, json!({})).header("idempotency-key", KEY).send();
    let first = Lease::from(&ask().await);
    let again = ask().await;
    assert_eq!(again.header("idempotency-replayed"), "true");
    assert_eq!(Lease::from(&again), first);
    // The same key with other numbers is another request.
    let other = asking(&gateway, 4, 1, json!({})).header("idempotency-key", KEY).send().await;
    assert_ne!(Lease::from(&other), first);

    let by_key = |query: &str| {
        let path = format!("/locks/pool{query}");
        gateway.call(Method::DELETE, path).header("idempotency-key", KEY).send()
    };
    // Without slots, the request is about slot 1.
    assert_ne!(by_key("").await.status, 204);
    by_key("?slots=5&take=2").await.problem(404, "lock_not_found");
    assert_eq!(by_key("?slots=4&take=2").await.status, 204);
    by_key("?slots=4&take=2").await.problem(404, "lock_not_found");
    assert_eq!(by_key("?slots=4").await.status, 204);
    assert!(is_free(&gateway.inspect("pool").await));
}

#[tokio::test]
async fn slots_pass_to_waiters_in_their_order() {
    let gateway = embedded().await;
    let held = [slots_of(&gateway, 2, 1).await, slots_of(&gateway, 2, 1).await];
    let mut waiters = Vec::new();
    for (place, take) in [(1, 2), (2, 1)] {
        let call = asking(&gateway, 2, take, json!({ "wait_ms": HOUR_MS }));
        waiters.push(tokio::spawn(call.send()));
        eventually("one more waits", async || {
            (gateway.inspect("pool").await["waiters_total"] == place).then_some(())
        })
        .await;
    }
    let [heavy, light] = <[_; 2]>::try_from(waiters).expect("two");
    assert_eq!(gateway.patch("pool", &held[1].token, 60_000).await.json()["waiters"], 2);
    assert_eq!(gateway.delete("pool", &held[0].token).await.status, 204);
    // One slot is free, but the heavy waiter is first.
    let line = eventually("an attempt of the heavy one", async || {
        let seen = gateway.inspect("pool").await;
        (numbers(&seen["holders"]).len() == 1).then_some(seen["waiters_total"].clone())
    });
    assert_eq!(line.await, 2);
    assert_eq!(gateway.delete("pool", &held[1].token).await.status, 204);
    let heavy = Lease::from(&heavy.await.unwrap());
    assert!(!light.is_finished());
    assert_eq!(gateway.delete("pool", &heavy.token).await.status, 204);
    let light = Lease::from(&light.await.unwrap());
    assert_eq!(gateway.delete("pool", &light.token).await.status, 204);
    assert!(is_free(&gateway.inspect("pool").await));
}

#[tokio::test]
async fn a_slot_with_a_least_time_stays_closed_after_its_release() {
    let gateway = embedded().await;
    let least = json!({ "hold_at_least_ms": 3_000 });
    // The least time, less 20 ms for different clocks.
    let kept = Duration::from_millis(2_980);
    let begun = Instant::now();
    let held = Lease::from(&asking(&gateway, 2, 2, least).send().await);
    assert_eq!(gateway.delete("pool", &held.token).await.status, 204);
    let answer = asking(&gateway, 2, 1, json!({})).send().await;
    if answer.status == 201 {
        assert!(begun.elapsed() >= kept, "{:?}", begun.elapsed());
        assert_eq!(gateway.delete("pool", &Lease::from(&answer).token).await.status, 204);
    } else {
        assert_eq!(numbers(&answer.problem(409, "lock_held")["holders"]), [1, 2]);
    }
    let next = asking(&gateway, 2, 2, json!({ "wait_ms": HOUR_MS })).send().await;
    assert!(begun.elapsed() >= kept, "{:?}", begun.elapsed());
    assert_eq!(gateway.delete("pool", &Lease::from(&next).token).await.status, 204);
}

#[tokio::test]
async fn impossible_numbers_are_refused_with_what_is_allowed() {
    let gateway = embedded().await;
    for (body, detail) in [
        (json!({ "slots": 0 }), "slots is 0; allowed are 1 to 256"),
        (json!({ "slots": 257 }), "slots is 257; allowed are 1 to 256"),
        (json!({ "slots": "4" }), "slots is \"4\"; allowed are 1 to 256"),
        (json!({ "slots": null }), "slots is null; allowed are 1 to 256"),
        (json!({ "slots": 4, "take": 5 }), "take is 5; allowed are 1 to 4, the number of slots"),
        (json!({ "slots": 4, "take": 0 }), "take is 0; allowed are 1 to 4, the number of slots"),
        (json!({ "slots": 4, "take": 1.5 }), "take is 1.5; allowed are 1 to the number of slots"),
        (json!({ "take": 2 }), "take is 2, but slots is missing"),
    ] {
        let problem = gateway.post("pool", body).await.problem(400, "invalid_body");
        let said = problem["detail"].as_str().unwrap();
        assert!(said.starts_with(detail), "{said}");
    }
    let release = |query: &str| {
        let path = format!("/locks/pool?{query}");
        gateway.call(Method::DELETE, path).header("idempotency-key", KEY).send()
    };
    for query in [
        "force=true&slot=0",
        "force=true&slot=257",
        "force=true&slots=2",
        "force=true&force=true",
        "force=yes",
        "slot=2",
        "take=2",
        "slots=4&take=5",
        "slots=4&other=1",
        "slots=",
    ] {
        release(query).await.problem(400, "invalid_parameter");
    }
    for query in ["slots=0", "slots=x", "slots=4&slots=4", "take=1"] {
        gateway.get(&format!("/locks/pool?{query}")).await.problem(400, "invalid_parameter");
    }
    // With one slot, the lock is like any other.
    let plain = slots_of(&gateway, 1, 1).await;
    assert!(plain.token.starts_with("1."));
    assert!(!is_free(&gateway.inspect("pool").await));
}

/// Each slot counts, so a key with a small rate cannot use the masters for free.
#[tokio::test]
async fn a_request_counts_once_for_each_slot_in_the_rate() {
    let mut slow = key("slow", HOLDER, "*").await;
    // On a busy machine, some requests come back between two requests, but not as many as are
    // missing.
    slow.entry.push_str("rate = 1\nburst = 200\n");
    let mut small = key("small", HOLDER, "*").await;
    small.entry.push_str("rate = 1\nburst = 12\n");
    let file = file(&[&slow, &small]);
    let gateway = with_keys(&file).start().await;
    let ask = |who: &crate::http::keys::Key, take: u32| {
        let body = json!({ "slots": 256, "take": take });
        who.call(&gateway, Method::POST, "/locks/pool").json(&body).send()
    };
    Lease::from(&ask(&slow, 128).await);
    ask(&slow, 128).await.problem(429, "rate_limited");
    let problem = ask(&small, 20).await.problem(429, "rate_limited");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("counts as 20 requests"), "{detail}");
}

/// Extensions and releases count once, so a holder can always keep and release what it has.
#[tokio::test]
async fn a_key_with_a_small_burst_keeps_and_releases_its_slots() {
    let mut slow = key("slow", HOLDER, "*").await;
    slow.entry.push_str("rate = 1\nburst = 9\n");
    let file = file(&[&slow]);
    let gateway = with_keys(&file).start().await;
    let body = json!({ "slots": 64, "take": 4 });
    let path = "/locks/pool";
    let post = slow.call(&gateway, Method::POST, path).header("idempotency-key", KEY);
    let held = Lease::from(&post.json(&body).send().await);
    let patch = slow.call(&gateway, Method::PATCH, path).header("lock-token", &held.token);
    assert_eq!(patch.json(&json!({})).send().await.status, 200);
    let by_key = format!("{path}?slots=64&take=4");
    let delete = slow.call(&gateway, Method::DELETE, &by_key).header("idempotency-key", KEY);
    assert_eq!(delete.send().await.status, 204);
    assert!(is_free(&slow.call(&gateway, Method::GET, path).send().await.json()));
}

/// A slot was taken by force. The holder's next extension is refused and frees its other slots.
#[tokio::test]
async fn a_holder_that_lost_one_slot_keeps_none() {
    let gateway = embedded().await;
    let held = slots_of(&gateway, 4, 3).await;
    let waits = tokio::spawn(asking(&gateway, 4, 4, json!({ "wait_ms": HOUR_MS })).send());
    eventually("it waits", async || {
        (gateway.inspect("pool").await["waiters_total"] == 1).then_some(())
    })
    .await;
    let forced = "/locks/pool?force=true&slot=".to_owned();
    let slot = numbers(&gateway.inspect("pool").await["holders"])[2];
    let forced = gateway.call(Method::DELETE, format!("{forced}{slot}")).send().await;
    assert_eq!(forced.status, 204);
    gateway.patch("pool", &held.token, 60_000).await.problem(404, "lock_not_found");
    let all = Lease::from(&waits.await.unwrap());
    assert_eq!(gateway.delete("pool", &all.token).await.status, 204);
}

/// Two of five masters are down, and one of the others has lost its copy. So the holder may have a
/// majority or not.
#[tokio::test]
async fn a_slot_that_may_be_held_is_not_shown_as_free() {
    let mut servers = masters(5);
    let gateway = patient_over(&servers).ready().await;
    slots_of(&gateway, 3, 3).await;
    eventually("all masters store slot 2", async || {
        let is_stored = |server: &RedisServer| server.cmd(&["GET", "lock:pool#2"]) != Resp::Nil;
        servers.iter().all(is_stored).then_some(())
    })
    .await;
    servers[0].cmd(&["DEL", "lock:pool#2"]);
    servers[3].kill();
    servers[4].kill();
    eventually("the gateway sees that two masters are down", async || {
        let seen = gateway.inspect("pool").await;
        let nodes = seen["nodes"].as_array().expect("nodes").clone();
        let is_down = |node: &&Value| node["state"] == "down" || node["state"] == "connecting";
        (nodes.iter().filter(is_down).count() == 2).then_some(())
    })
    .await;
    let seen = gateway.inspect("pool").await;
    assert_eq!((numbers(&seen["holders"]), &seen["unknown_slots"]), (vec![1, 3], &json!([2])));
}

/// Somebody released one of three slots by force. A repetition of the request is refused at once,
/// and the key releases the other slots.
#[tokio::test]
async fn repetition_with_part_of_its_slots_is_refused() {
    let gateway = embedded().await;
    let ask = |more| asking(&gateway, 4, 3, more).header("idempotency-key", KEY).send();
    let began = Instant::now();
    let first = Lease::from(&ask(json!({})).await);
    let slot = numbers(&gateway.inspect("pool").await["holders"])[1];
    let forced = format!("/locks/pool?force=true&slot={slot}");
    assert_eq!(gateway.call(Method::DELETE, forced).send().await.status, 204);
    for more in [json!({}), json!({ "wait_ms": HOUR_MS })] {
        let refused = ask(more).await.problem(409, "lock_held");
        let detail = refused["detail"].as_str().unwrap();
        assert!(detail.contains("still holds a part of what it was granted"), "{detail}");
        assert_left(refused["expires_in_ms"].as_u64().unwrap(), HOUR_MS, began);
    }
    // Another request of the lock is told about holders, not about a key that it does not have.
    let other = asking(&gateway, 4, 3, json!({ "wait_ms": 50 })).send().await;
    let detail = other.problem(409, "lock_held")["detail"].as_str().unwrap().to_owned();
    assert!(!detail.contains("Idempotency-Key"), "{detail}");
    let by_key = gateway.call(Method::DELETE, "/locks/pool?slots=4&take=3".to_owned());
    assert_eq!(by_key.header("idempotency-key", KEY).send().await.status, 204);
    let again = Lease::from(&ask(json!({})).await);
    assert!(again.fencing > first.fencing);
}

#[tokio::test]
async fn rights_are_about_the_lock_and_force_is_about_a_slot() {
    let builds = key("builds", HOLDER, "pool").await;
    let other = key("other", HOLDER, "another").await;
    let chief = key("chief", &format!("{HOLDER},force,list"), "*").await;
    let log = Scratch::new("audit.log", "");
    let file = file(&[&builds, &other, &chief]);
    let gateway = with_keys(&file).flag("--audit-log", log.path()).start().await;
    let ask = |who: &crate::http::keys::Key| {
        let body = json!({ "slots": 4, "take": 2, "owner": "me", "ttl_ms": 300_000 });
        who.call(&gateway, Method::POST, "/locks/pool").json(&body).send()
    };
    ask(&other).await.problem(403, "forbidden");
    let held = Lease::from(&ask(&builds).await);
    let listed = |answer: Answer| answer.json()["locks"].as_array().unwrap().len();
    assert_eq!(listed(chief.call(&gateway, Method::GET, "/locks").send().await), 2);

    // A key with the force permission may use the token of another key, also for other slots than
    // the first.
    let by = |who: &crate::http::keys::Key, method, path: &str| who.call(&gateway, method, path);
    let path = "/locks/pool";
    let stolen = by(&other, Method::DELETE, path).header("lock-token", &held.token).send().await;
    stolen.problem(403, "forbidden");
    let extended = by(&chief, Method::PATCH, path).header("lock-token", &held.token);
    assert_eq!(extended.json(&json!({})).send().await.status, 200);
    let seen = by(&builds, Method::GET, path).send().await.json();
    let slots = numbers(&seen["holders"]);
    let forced = format!("/locks/pool?force=true&slot={}", slots[1]);
    by(&builds, Method::DELETE, &forced).send().await.problem(403, "forbidden");
    assert_eq!(by(&chief, Method::DELETE, &forced).send().await.status, 204);
    let lost = by(&builds, Method::PATCH, path).header("lock-token", &held.token);
    lost.json(&json!({})).send().await.problem(404, "lock_not_found");
    let lines = eventually("all lines", async || {
        let lines = audit_lines(&log);
        (lines.iter().filter(|line| line["what"] == "extend").count() == 2).then_some(lines)
    })
    .await;
    assert!(lines.iter().all(|line| line["lock"] == "pool"), "{lines:?}");
    let of = |what: &str| {
        let line = lines.iter().find(|line| line["what"] == what && line["outcome"] == "done");
        line.unwrap_or_else(|| panic!("no {what}: {lines:?}"))["slots"].clone()
    };
    let both = format!("{},{}", slots[0], slots[1]);
    assert_eq!((of("acquire"), of("extend")), (json!(both), json!(both)));
    if slots[1] != 1 {
        assert_eq!(of("force"), json!(slots[1].to_string()));
    }
}

/// A token with the slots of another holder in it touches none of them.
#[tokio::test]
async fn a_token_with_slots_of_others_is_refused_whole() {
    let servers = masters(3);
    let [alice, bob] = [key("alice", HOLDER, "*").await, key("bob", HOLDER, "*").await];
    let file = file(&[&alice, &bob]);
    let gateway = patient_over(&servers).flag("--auth-keys", file.path()).start().await;
    is_ready(&gateway).await;
    let path = "/locks/pool";
    let ask = |who: &crate::http::keys::Key, take: u32| {
        let body = json!({ "slots": 4, "take": take, "ttl_ms": HOUR_MS });
        who.call(&gateway, Method::POST, path).json(&body).send()
    };
    let theirs = ask(&bob, 3).await;
    assert_eq!(theirs.status, 201, "{theirs:?}");
    let own = Lease::from(&ask(&alice, 1).await);
    let forged = format!("2-0-f{}", &own.token[own.token.find('.').unwrap()..]);
    let watermarks = || -> Vec<Resp> {
        let key = |slot: &Value| match slot.as_u64() {
            Some(1) => "{lock:pool}:fence".to_owned(),
            slot => format!("{{lock:pool#{}}}:fence", slot.unwrap()),
        };
        let slots = theirs.json()["slots_held"].as_array().unwrap().clone();
        slots.iter().map(|slot| servers[0].cmd(&["GET", &key(slot)])).collect()
    };
    let before = eventually("the first master has the slots too", async || {
        Some(watermarks()).filter(|stored| !stored.contains(&Resp::Nil))
    })
    .await;
    for method in [Method::DELETE, Method::PATCH] {
        let call = alice.call(&gateway, method.clone(), path).header("lock-token", &forged);
        let call = if method == Method::PATCH { call.json(&json!({})) } else { call };
        call.send().await.problem(409, "not_holder");
        assert_eq!(watermarks(), before, "{method}");
    }
    let seen = alice.call(&gateway, Method::GET, path).send().await.json();
    let bobs = seen["holders"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["fencing_token"] == theirs.json()["fencing_token"]);
    assert_eq!(bobs.count(), 3, "{seen}");
}

/// A newer request supersedes an older one also while it waits for slots.
#[tokio::test]
async fn a_superseded_request_for_slots_stays_superseded() {
    let gateway = embedded().await;
    let held = slots_of(&gateway, 2, 2).await;
    let newest = |key: &str| {
        let body = json!({ "queue": "newest", "wait_ms": HOUR_MS });
        tokio::spawn(asking(&gateway, 2, 1, body).header("idempotency-key", key).send())
    };
    let keys = ["the-key-of-build-1", "the-key-of-build-2"];
    let first = newest(keys[0]);
    eventually("it waits", async || {
        (gateway.inspect("pool").await["waiters_total"] == 1).then_some(())
    })
    .await;
    let second = newest(keys[1]);
    first.await.unwrap().problem(409, "superseded");
    newest(keys[0]).await.unwrap().problem(409, "superseded");
    assert!(!second.is_finished());
    assert_eq!(gateway.delete("pool", &held.token).await.status, 204);
    Lease::from(&second.await.unwrap());
}

/// A client that disconnects leaves no slot behind.
#[tokio::test]
async fn a_disconnected_waiter_leaves_no_slot() {
    let gateway = embedded().await;
    let all = slots_of(&gateway, 8, 8).await;
    let waits = asking(&gateway, 8, 8, json!({ "wait_ms": HOUR_MS }));
    let waiting = tokio::spawn(waits.send());
    eventually("it waits", async || {
        (gateway.inspect("pool").await["waiters_total"] == 1).then_some(())
    })
    .await;
    waiting.abort();
    // Until it sees the hang-up, the gateway could send a grant that nobody reads.
    waiting_is(&gateway, 0, 0).await;
    assert_eq!(gateway.delete("pool", &all.token).await.status, 204);
    eventually("all slots are free", async || {
        is_free(&gateway.inspect("pool").await).then_some(())
    })
    .await;
    slots_of(&gateway, 8, 8).await;
}

mod measured {
    use std::time::SystemTime;

    use super::*;
    use crate::http::keys::Key;
    use crate::support::measure::measured;

    /// A request of the greedy client about 256 slots, by two numbers that no other request has.
    type Greedy = fn(&Key, &Gateway, u32, u64) -> Call;

    /// Releases 256 slots with an invented token.
    fn release(greedy: &Key, gateway: &Gateway, number: u32, round: u64) -> Call {
        let micros = SystemTime::UNIX_EPOCH.elapsed().expect("a clock after 1970").as_micros();
        let lock = format!("/locks/e/{number}-{round}");
        let owner_and_nonce = format!("{number:020x}{round:020x}");
        let token = format!("2-0-{}.{micros}.{owner_and_nonce}", "f".repeat(64));
        greedy.call(gateway, Method::DELETE, &lock).header("lock-token", &token)
    }

    fn read(greedy: &Key, gateway: &Gateway, number: u32, round: u64) -> Call {
        greedy.call(gateway, Method::GET, &format!("/locks/e/{number}-{round}"))
    }

    /// Sends such requests, one after the other, until this moment.
    async fn flood(greedy: &Key, gateway: &Gateway, request: Greedy, number: u32, ends: Instant) {
        for round in 0.. {
            if Instant::now() >= ends {
                return;
            }
            let answer = request(greedy, gateway, number, round).send().await;
            assert!([200, 404, 503].contains(&answer.status), "{answer:?}");
        }
    }

    /// One client has 48 connections, and requests about 256 slots on each. Another client acquires
    /// and releases a lock meanwhile.
    #[tokio::test]
    async fn requests_about_many_slots_keep_nobody_out() {
        let greedy = key("greedy", "release,inspect", "e/*").await;
        let modest = key("modest", HOLDER, "own").await;
        let keys = file(&[&greedy, &modest]);
        let servers = masters(3);
        let gateway = Launch::over(&servers).flag("--auth-keys", keys.path()).start().await;
        is_ready(&gateway).await;
        let acquires = async |ends: Instant| {
            let mut done = 0;
            while Instant::now() < ends {
                let call = modest.call(&gateway, Method::POST, "/locks/own").json(&json!({}));
                let answer = call.send().await;
                if answer.status == 201 {
                    let token = Lease::from(&answer).token;
                    done += usize::from(modest.delete(&gateway, "own", &token).await.status == 204);
                }
            }
            done
        };
        for (what, request) in [("releases", release as Greedy), ("readings", read)] {
            measured(&format!("acquires beside {what} of 256 slots"), async || {
                let ends = || Instant::now() + Duration::from_secs(5);
                let alone = acquires(ends()).await;
                let ends = ends();
                let floods = (0..48).map(|number| flood(&greedy, &gateway, request, number, ends));
                let floods = futures_util::future::join_all(floods);
                let (beside, _) = tokio::join!(acquires(ends), floods);
                let seen = format!("{beside} acquires, {alone} without the {what}");
                println!("{seen}");
                if beside * 5 > alone { Ok(()) } else { Err(seen) }
            })
            .await;
        }
    }
}
