//! Streams of events about a lock, and about all locks with a prefix.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use http::{HeaderMap, Method};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::net::TcpSocket;

use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::client::{Lease, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{eventually, masters};
use crate::support::measure::measured;
use crate::support::metrics::Samples;
use crate::support::stream::{Event, Events, unread_bytes};
use crate::support::waiters::{
    HOUR_MS, answer, long_waiting_acquire, patient, patient_over, start_waiting,
};

/// Time within which a change at another gateway appears: a poll each second, on a busy machine.
const OTHERS_WITHIN: Duration = Duration::from_secs(4);

async fn acquired(gateway: &Gateway, name: &str, owner: &str, ttl_ms: u64) -> Lease {
    Lease::from(&gateway.post(name, json!({ "owner": owner, "ttl_ms": ttl_ms })).await)
}

async fn forced(gateway: &Gateway, path: &str) {
    let answer = gateway.call(Method::DELETE, format!("{path}?force=true")).send().await;
    assert_eq!(answer.status, 204, "{answer:?}");
}

fn is_about(event: &Event, name: &str, owner: &str, fencing: u64) {
    let data = &event.data;
    let of = (&data["name"], &data["owner"], &data["fencing_token"]);
    assert_eq!(of, (&json!(name), &json!(owner), &json!(fencing)), "{event:?}");
}

#[tokio::test]
async fn a_watcher_sees_each_change_of_a_lock_in_order() {
    let gateway = patient(Launch::embedded()).start().await;
    let mut events = gateway.events("/locks/a%2Fb").await;
    let first = events.next().await;
    assert_eq!((&*first.kind, &first.data["state"]), ("snapshot", &json!("free")));
    assert!(first.data.get("nodes").is_none(), "{first:?}");

    let one = acquired(&gateway, "a/b", "one", HOUR_MS / 2).await;
    let held = events.next_of("held", &[]).await;
    is_about(&held, "a/b", "one", one.fencing);
    let left = held.data["expires_in_ms"].as_u64();
    assert!(left.is_some_and(|left| left <= HOUR_MS / 2), "{held:?}");
    assert!(!held.data.to_string().contains(one.owner()), "no token is shown");

    assert_eq!(gateway.patch("a/b", &one.token, HOUR_MS).await.status, 200);
    let extended = events.next_of("extended", &[]).await;
    is_about(&extended, "a/b", "one", one.fencing);
    assert!(extended.data["expires_in_ms"].as_u64() > Some(HOUR_MS / 2), "{extended:?}");

    let waiter = start_waiting(&gateway, long_waiting_acquire(&gateway, "a/b")).await;
    let line = events.next_of("waiters", &[]).await;
    assert_eq!((&line.data["state"], &line.data["waiters_total"]), (&json!("unknown"), &json!(1)));
    assert_eq!(line.data["waiters"].as_array().map(Vec::len), Some(1), "{line:?}");

    assert_eq!(gateway.delete("a/b", &one.token).await.status, 204);
    is_about(&events.next_of("released", &[]).await, "a/b", "one", one.fencing);
    let two = Lease::from(&answer(waiter).await);
    let held = events.next_of("held", &["waiters"]).await;
    assert_eq!(held.data["fencing_token"], two.fencing);

    forced(&gateway, "/locks/a%2Fb").await;
    let forced = events.next_of("forced", &["waiters"]).await;
    assert_eq!(forced.data["fencing_token"], two.fencing);

    let three = acquired(&gateway, "a/b", "three", 700).await;
    is_about(&events.next_of("held", &["waiters"]).await, "a/b", "three", three.fencing);
    let expired = events.next_of("expired", &["waiters"]).await;
    is_about(&expired, "a/b", "three", three.fencing);
    assert_eq!(expired.data["state"], "free");
}

/// Acquires and releases locks through one gateway, and watches them at the other one. Returns the
/// times until the events of the first grant and of the first release.
async fn changes(here: &Gateway, there: &Gateway, prefix: &str) -> [Duration; 2] {
    let name = format!("{prefix}x");
    let mut of_lock = here.events(&lock_path(&name)).await;
    let mut of_prefix = here.events(&format!("/locks?prefix={name}")).await;
    assert_eq!(of_lock.next().await.kind, "snapshot");
    assert_eq!(of_prefix.next().await.data, json!({ "locks": [], "is_complete": true }));

    let acquired_at = Instant::now();
    let lease = acquired(there, &name, "there", 300_000).await;
    for events in [&mut of_lock, &mut of_prefix] {
        is_about(&events.next_of("held", &[]).await, &name, "there", lease.fencing);
    }
    let held_after = acquired_at.elapsed();
    assert_eq!(there.patch(&name, &lease.token, HOUR_MS).await.status, 200);
    for events in [&mut of_lock, &mut of_prefix] {
        is_about(&events.next_of("extended", &[]).await, &name, "there", lease.fencing);
    }
    let released_at = Instant::now();
    assert_eq!(there.delete(&name, &lease.token).await.status, 204);
    for events in [&mut of_lock, &mut of_prefix] {
        is_about(&events.next_of("released", &[]).await, &name, "there", lease.fencing);
    }
    let released_after = released_at.elapsed();

    // A pool that this gateway has not seen before.
    let pool = format!("{name}-pool");
    let body = json!({ "slots": 4, "take": 2, "owner": "pool", "ttl_ms": HOUR_MS });
    let lease = Lease::from(&there.post(&pool, body).await);
    let mut slots = Vec::new();
    for _ in 0..2 {
        let held = of_prefix.next_of("held", &[]).await;
        is_about(&held, &pool, "pool", lease.fencing);
        slots.push(held.data["slot"].as_u64().unwrap_or(1));
    }
    assert_ne!(slots[0], slots[1]);
    assert_eq!(there.delete(&pool, &lease.token).await.status, 204);
    for _ in 0..2 {
        is_about(&of_prefix.next_of("released", &[]).await, &pool, "pool", lease.fencing);
    }
    [held_after, released_after]
}

#[tokio::test]
async fn changes_at_other_gateways_appear() {
    let servers = masters(3);
    let here = patient_over(&servers).ready().await;
    let there = patient_over(&servers).ready().await;
    changes(&here, &there, "").await;
}

#[tokio::test]
async fn a_prefix_shows_its_held_locks_first_and_no_others() {
    let gateway = patient(Launch::embedded()).start().await;
    let inside = acquired(&gateway, "jobs/1", "inside", HOUR_MS).await;
    acquired(&gateway, "other", "outside", HOUR_MS).await;
    let mut events = gateway.events("/locks?prefix=jobs/").await;
    let snapshot = events.next().await;
    assert_eq!((&*snapshot.kind, &snapshot.data["is_complete"]), ("snapshot", &json!(true)));
    let locks = snapshot.data["locks"].as_array().expect("a list");
    assert_eq!(locks.len(), 1, "{snapshot:?}");
    assert_eq!(locks[0]["fencing_token"], inside.fencing, "{snapshot:?}");

    forced(&gateway, "/locks/other").await;
    let body = json!({ "slots": 3, "take": 3, "owner": "pool", "ttl_ms": HOUR_MS });
    let pool = Lease::from(&gateway.post("jobs/pool", body).await);
    for slot in 1..=3 {
        let held = events.next_of("held", &[]).await;
        is_about(&held, "jobs/pool", "pool", pool.fencing);
        assert_eq!(
            (&held.data["slots"], held.data["slot"].as_u64().unwrap_or(1)),
            (&json!(3), slot)
        );
    }
    assert_eq!(gateway.delete("jobs/pool", &pool.token).await.status, 204);
    for _ in 1..=3 {
        is_about(&events.next_of("released", &[]).await, "jobs/pool", "pool", pool.fencing);
    }
    // A set is acquired together, and each of its locks is told.
    let body = json!({ "names": ["jobs/2", "jobs/3", "more"], "ttl_ms": HOUR_MS });
    let set = gateway.call(Method::POST, "/locks").json(&body).send().await;
    assert_eq!(set.status, 201, "{set:?}");
    for name in ["jobs/2", "jobs/3"] {
        assert_eq!(events.next_of("held", &[]).await.data["name"], name);
    }
    let token = set.json()["token"].as_str().expect("a token").to_owned();
    let path = "/locks?name=jobs/2&name=jobs/3&name=more";
    let gone = gateway.call(Method::DELETE, path).header("lock-token", token).send().await;
    assert_eq!(gone.status, 200, "{gone:?}");
    for _ in 0..2 {
        let released = events.next_of("released", &[]).await;
        assert!(released.data["name"].as_str().unwrap().starts_with("jobs/"), "{released:?}");
    }
}

#[tokio::test]
async fn reconnect_with_last_event_id_sends_missed_events() {
    let gateway = patient(Launch::embedded()).start().await;
    let mut events = gateway.events("/locks/a").await;
    events.next_of("snapshot", &[]).await;
    let lease = acquired(&gateway, "a", "one", HOUR_MS).await;
    let held = events.next_of("held", &[]).await;
    drop(events);
    assert_eq!(gateway.delete("a", &lease.token).await.status, 204);
    let reopened = async |id: &str| {
        let headers = HeaderMap::from_iter([(
            http::HeaderName::from_static("last-event-id"),
            id.parse().expect("a header"),
        )]);
        Events::open(gateway.address(), "/locks/a", &headers).await.expect("a stream")
    };
    let mut again = reopened(&held.id).await;
    let missed = again.next().await;
    assert_eq!((&*missed.kind, &missed.data["fencing_token"]), ("released", &json!(lease.fencing)));
    // Unknown and future ids give a snapshot.
    let (process, number) = held.id.split_once('-').expect("two parts");
    let future = number.parse::<u64>().unwrap() + 1_000;
    for id in [format!("0-{number}"), format!("{process}-{future}"), "x".into(), "-".into()] {
        let mut other = reopened(&id).await;
        assert_eq!(other.next().await.kind, "snapshot", "{id}");
    }
}

#[tokio::test]
async fn a_key_sees_its_own_locks_until_it_is_removed() {
    let all = key("all", "acquire,extend,release,inspect,list,force", "*").await;
    let some = key("some", "inspect,list", "mine/*").await;
    let lister = key("lister", "list", "*").await;
    let holder = key("holder", HOLDER, "*").await;
    let keys = file(&[&all, &some, &lister, &holder]);
    let gateway = with_keys(&keys).start().await;
    let open = async |key: &crate::http::keys::Key, path: &str| {
        let headers = HeaderMap::from_iter([(
            http::header::AUTHORIZATION,
            key.bearer().parse().expect("a header"),
        )]);
        Events::open(gateway.address(), path, &headers).await
    };
    let refused = open(&some, "/locks/theirs").await.err().expect("no stream");
    refused.problem(403, "forbidden");
    let refused = open(&holder, "/locks?prefix=").await.err().expect("no stream");
    refused.problem(403, "forbidden");

    let mut of_some = open(&some, "/locks?prefix=").await.expect("a stream");
    let mut of_lister = open(&lister, "/locks?prefix=").await.expect("a stream");
    of_some.next_of("snapshot", &[]).await;
    of_lister.next_of("snapshot", &[]).await;
    for name in ["theirs", "mine/1"] {
        let call = all.call(&gateway, Method::POST, &lock_path(name));
        let body = json!({ "owner": "somebody", "ttl_ms": 300_000 });
        assert_eq!(call.json(&body).send().await.status, 201);
    }
    let held = of_some.next_of("held", &[]).await;
    assert_eq!((&held.data["name"], &held.data["owner"]), (&json!("mine/1"), &json!("somebody")));
    // Without the permission to inspect, only the state is shown.
    for name in ["theirs", "mine/1"] {
        let held = of_lister.next_of("held", &[]).await;
        assert_eq!(held.data, json!({ "name": name, "state": "held" }));
    }
    // The file is replaced by one without this key.
    let left = file(&[&all, &lister, &holder]);
    std::fs::copy(left.path(), keys.path()).expect("a file");
    gateway.signal(Signal::HUP);
    eventually("the key is gone", async || {
        let answer = some.call(&gateway, Method::GET, "/locks").send().await;
        (answer.status == 401).then_some(())
    })
    .await;
    let call = all.call(&gateway, Method::POST, "/locks/mine%2F2");
    assert_eq!(call.send().await.status, 201);
    let end = of_some.next().await;
    assert_eq!((&*end.kind, &end.data), ("end", &json!({ "reason": "revoked" })));
    assert_eq!(of_some.try_next().await, None);
}

#[tokio::test]
async fn drain_ends_all_streams() {
    let mut gateway = Launch::embedded().flag("--drain-delay", "0s").start().await;
    let mut streams = Vec::new();
    for path in ["/locks/a", "/locks/b", "/locks?prefix=a"] {
        let mut events = gateway.events(path).await;
        events.next_of("snapshot", &[]).await;
        streams.push(events);
    }
    let samples = Samples::of(&gateway).await;
    assert_eq!(samples.get("redlock_event_streams", &[]), 3.0);
    gateway.signal(Signal::TERM);
    for mut events in streams {
        let end = events.next().await;
        assert_eq!((&*end.kind, &end.data), ("end", &json!({ "reason": "draining" })));
        assert_eq!(events.try_next().await, None);
    }
    assert_eq!(gateway.ended().await, Some(0));
}

#[tokio::test]
async fn closed_streams_are_no_longer_counted() {
    let gateway = Launch::embedded().start().await;
    let watchers = async || Samples::of(&gateway).await.get("redlock_event_streams", &[]);
    let mut events = gateway.events("/locks/a").await;
    events.next_of("snapshot", &[]).await;
    assert_eq!(watchers().await, 1.0);
    drop(events);
    eventually("no watcher is left", async || (watchers().await == 0.0).then_some(())).await;
}

#[tokio::test]
async fn json_is_answered_to_a_client_that_names_it_first() {
    let gateway = Launch::embedded().start().await;
    for accept in ["application/json", "*/*", "application/json, text/event-stream"] {
        for path in ["/locks/a", "/locks?prefix=a"] {
            let answer = gateway.call(Method::GET, path).header("accept", accept).send().await;
            assert_eq!((answer.status, answer.header("content-type")), (200, "application/json"));
        }
    }
}

#[tokio::test]
async fn a_hand_over_by_force_names_the_holder_that_lost_the_lock() {
    let gateway = patient(Launch::embedded()).start().await;
    for path in ["/locks/a", "/locks?prefix=a"] {
        let lease = acquired(&gateway, "a", "one", HOUR_MS).await;
        let waiter = start_waiting(&gateway, long_waiting_acquire(&gateway, "a")).await;
        let mut events = gateway.events(path).await;
        events.next_of("snapshot", &[]).await;
        forced(&gateway, "/locks/a").await;
        let next = Lease::from(&answer(waiter).await);
        let ended = events.next_of("forced", &["waiters"]).await;
        assert_eq!(ended.data["fencing_token"], lease.fencing);
        let held = events.next_of("held", &["waiters"]).await;
        assert_eq!(held.data["fencing_token"], next.fencing);
        assert_eq!(gateway.delete("a", &next.token).await.status, 204);
        // Nothing else happened in between.
        let released = events.next_of("released", &["waiters"]).await;
        assert_eq!(released.data["fencing_token"], next.fencing);
    }
}

/// Slots of the lock. A grant of all slots makes one change for each slot. These changes fill an eighth
/// of [`BUFFERED`], so a watcher that reads does not lag, even on a busy machine.
const SLOTS: usize = 64;
/// Changes of one lock that the gateway buffers for a watcher.
const BUFFERED: usize = 512;
/// Changes that have left the gateway's buffer, and that the kernel does not have. The gateway's
/// library is writing them, or the client's library has read them. Both have less than 200 KiB.
const IN_LIBRARIES: usize = 150;
/// Changes after which the test gives up.
const MOST_CHANGES: usize = 50_000;

/// Waits until a watcher has got this change of each slot. Returns the size of the smallest event.
async fn each_slot(events: &mut Events, kind: &str, lease: &Lease) -> usize {
    let mut slots = BTreeSet::new();
    let mut smallest = usize::MAX;
    while slots.len() < SLOTS {
        // If the gateway reads a lock slowly, the lock may seem to be extended.
        let event = events.next_of(kind, &["extended"]).await;
        assert_eq!(event.data["fencing_token"], lease.fencing);
        let slot = event.data["slot"].as_u64().unwrap_or(1);
        assert!(slots.insert(slot), "{kind} twice: slot {slot}");
        smallest = smallest.min(event.data.to_string().len());
    }
    smallest
}

/// The gateway closes a connection that takes no bytes for 30 s. The changes take a few seconds. On
/// a busy machine, the slow watcher reads a little in between.
const READS_AFTER: Duration = Duration::from_secs(5);
/// The events that it reads then. They make room for more bytes in the kernel.
const READ: usize = 32;

/// Reads a stream until it has shown all slots of a grant, in a snapshot or in events. Returns the
/// kinds of the events.
async fn caught_up(events: &mut Events, lease: &Lease) -> Vec<String> {
    let mut kinds = Vec::new();
    let mut slots = BTreeSet::new();
    while slots.len() < SLOTS {
        let event = events.next().await;
        if event.data["fencing_token"] == lease.fencing {
            match &*event.kind {
                "snapshot" => slots.extend(1..=SLOTS as u64),
                "held" => drop(slots.insert(event.data["slot"].as_u64().unwrap_or(1))),
                "extended" => {}
                _ => panic!("{event:?} of a held lock"),
            }
        }
        if event.kind == "lagged" {
            assert!(event.data["missed"].as_u64() > Some(0), "{event:?}");
        }
        kinds.push(event.kind);
    }
    kinds
}

#[tokio::test]
async fn a_watcher_that_does_not_read_lags_alone() {
    let gateway = patient(Launch::embedded()).env("RUST_LOG", "info").start().await;
    let path = "/locks/pool?slots=1";
    let mut quick = gateway.events(path).await;
    quick.next_of("snapshot", &[]).await;
    let socket = TcpSocket::new_v4().expect("a socket");
    // The kernel does not enlarge a buffer whose size was set.
    socket.set_recv_buffer_size(64 * 1024).expect("a size");
    let stream = socket.connect(gateway.address()).await.expect("the gateway listens");
    let reader = stream.local_addr().expect("an address");
    let opened = Events::over(stream, Method::GET, path, &HeaderMap::new(), &Value::Null).await;
    let mut slow = opened.expect("a stream");
    slow.next_of("snapshot", &[]).await;

    // In JSON, this character takes six bytes. So an event has 3.6 KB.
    let metadata = json!({ "text": "\u{1}".repeat(600) });
    let body = json!({ "slots": SLOTS, "take": SLOTS, "ttl_ms": HOUR_MS, "metadata": metadata });
    let mut changes = 0;
    let mut kinds = Vec::new();
    let mut last_read = Instant::now();
    let mut smallest = usize::MAX;
    'until_it_lags: loop {
        let lease = Lease::from(&gateway.post("pool", body.clone()).await);
        smallest = smallest.min(each_slot(&mut quick, "held", &lease).await);
        assert_eq!(gateway.delete("pool", &lease.token).await.status, 204);
        smallest = smallest.min(each_slot(&mut quick, "released", &lease).await);
        changes += 2 * SLOTS;
        if last_read.elapsed() > READS_AFTER {
            for _ in 0..READ {
                kinds.push(slow.next().await.kind);
                // Nothing but a snapshot may follow before the next change.
                if kinds.ends_with(&["lagged".to_owned()]) {
                    break 'until_it_lags;
                }
            }
            last_read = Instant::now();
        }
        // The kernel has no more changes than this, because each takes more bytes than its data.
        let in_kernel = unread_bytes(gateway.address(), reader) / smallest;
        if changes > kinds.len() + in_kernel + IN_LIBRARIES + BUFFERED {
            break;
        }
        assert!(changes < MOST_CHANGES, "the kernel has {in_kernel} of {changes} changes");
    }
    let lease = Lease::from(&gateway.post("pool", body).await);
    each_slot(&mut quick, "held", &lease).await;

    kinds.extend(caught_up(&mut slow, &lease).await);
    kinds.retain(|kind| !["held", "released", "extended"].contains(&&**kind));
    // If it read nothing before, it gets the snapshot of the last grant.
    let is_lagged = kinds.chunks(2).all(|pair| pair == ["lagged", "snapshot"]);
    assert!(is_lagged && !kinds.is_empty(), "{kinds:?}");
    assert_eq!(gateway.delete("pool", &lease.token).await.status, 204);
    for events in [&mut slow, &mut quick] {
        each_slot(events, "released", &lease).await;
    }
}

mod measured {
    use super::*;

    #[tokio::test]
    async fn changes_at_other_gateways_appear_within_four_seconds() {
        let servers = masters(3);
        let here = patient_over(&servers).ready().await;
        let there = patient_over(&servers).ready().await;
        let mut run = 0;
        measured("changes at other gateways", async || {
            run += 1;
            let took = changes(&here, &there, &format!("run-{run}-")).await;
            let is_soon = took.iter().all(|took| *took < OTHERS_WITHIN);
            if is_soon { Ok(()) } else { Err(format!("{took:?}")) }
        })
        .await;
    }
}
