//! Locks that are held as long as a stream of events is open.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Stdio;
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, Method};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::process::Command;

use crate::http::audit::audit_lines;
use crate::http::keys::{HOLDER, file, key, with_keys};
use crate::support::client::{Answer, lock_path};
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{eventually, masters};
use crate::support::measure::measured;
use crate::support::stream::{Event, Events};
use crate::support::waiters::{HOUR_MS, patient, waiting_is};

/// A TTL that outlasts a stall of the machine, and is short enough to wait for.
const TTL_MS: u64 = 6_000;
/// Time between two extensions of a lock with this TTL.
const INTERVAL_MS: u64 = TTL_MS / 3;
/// A shorter TTL, for measurements.
const SHORT_TTL_MS: u64 = 3_000;
/// Time within which the gateway notices a silent failure of the network, from `docs/http.md`.
const CUT_NOTICED_WITHIN_MS: u64 = 45_000;

async fn opened(
    gateway: &Gateway,
    name: &str,
    headers: &[(&str, &str)],
    body: Value,
) -> Result<Events, Answer> {
    let header = |(name, value): &(&str, &str)| {
        (HeaderName::try_from(*name).expect("a name"), value.parse().expect("a value"))
    };
    let headers = HeaderMap::from_iter(headers.iter().map(header));
    Events::open_by(Method::POST, gateway.address(), &lock_path(name), &headers, &body).await
}

async fn holding(gateway: &Gateway, name: &str, body: Value) -> Events {
    opened(gateway, name, &[], body).await.unwrap_or_else(|answer| panic!("no stream: {answer:?}"))
}

fn token_of(event: &Event) -> String {
    event.data["token"].as_str().unwrap_or_else(|| panic!("no token: {event:?}")).to_owned()
}

/// Until when a client may rely on the lease of an event.
fn relied_on_until(sent: Instant, event: &Event) -> Instant {
    let millis = |field: &str| event.data[field].as_u64().expect("a number");
    sent + Duration::from_millis(millis("elapsed_ms") + millis("validity_ms"))
}

async fn is_held(gateway: &Gateway, name: &str) -> bool {
    gateway.inspect(name).await["state"] == "held"
}

/// Waits until the gateway has extended a lock. A busy gateway may fail at first, and tries again.
async fn extended(events: &mut Events) -> Event {
    events.next_of("extended", &["unknown"]).await
}

#[tokio::test]
async fn the_gateway_extends_the_lock_until_it_is_released() {
    let gateway = Launch::embedded().start().await;
    let sent = Instant::now();
    let mut events = holding(&gateway, "a", json!({ "ttl_ms": TTL_MS, "owner": "one" })).await;
    let granted = events.next_of("granted", &[]).await;
    let ends = Instant::now() + Duration::from_millis(TTL_MS);
    assert_eq!((&granted.data["owner"], &granted.data["ttl_ms"]), (&json!("one"), &json!(TTL_MS)));
    let token = token_of(&granted);
    let mut until = relied_on_until(sent, &granted);
    for _ in 0..2 {
        let event = extended(&mut events).await;
        assert_eq!(token_of(&event), token);
        let now = relied_on_until(sent, &event);
        assert!(now > until, "{event:?}");
        until = now;
    }
    // Without extensions the lock would end before that.
    let asked = Instant::now();
    let left = gateway.inspect("a").await["expires_in_ms"].as_u64().expect("it is held");
    assert!(asked + Duration::from_millis(left) > ends, "{left} ms are left");
    assert_eq!(gateway.delete("a", &token).await.status, 204);
    let lost = events.next_of("lost", &["extended", "unknown"]).await;
    assert_eq!(lost.data["code"], "lock_not_found", "{lost:?}");
    assert_eq!(events.try_next().await, None);
}

#[tokio::test]
async fn a_waiting_stream_shows_its_line_and_then_the_grant() {
    let gateway = patient(Launch::embedded()).start().await;
    let lease = gateway.acquire_for("a", HOUR_MS).await;
    let waits = async || {
        let mut events =
            holding(&gateway, "a", json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS })).await;
        let waiting = events.next_of("waiting", &[]).await;
        (events, waiting)
    };
    let place = |waiting: &Event| {
        (waiting.data["position"].as_u64(), waiting.data["waiters_total"].as_u64())
    };
    let (mut events, waiting) = waits().await;
    assert_eq!(waiting.data["state"], "held", "{waiting:?}");
    assert_eq!(waiting.data["fencing_token"], lease.fencing);
    assert_eq!(place(&waiting), (Some(1), Some(1)), "{waiting:?}");
    let (leaves, waiting) = waits().await;
    assert_eq!(place(&waiting), (Some(2), Some(2)), "{waiting:?}");
    let (mut last, waiting) = waits().await;
    assert_eq!(place(&waiting), (Some(3), Some(3)), "{waiting:?}");
    // One waiter goes and another one comes.
    drop(leaves);
    let another = waits().await;
    while place(&last.next_of("waiting", &[]).await) != (Some(2), Some(3)) {}
    drop((last, another));
    assert_eq!(gateway.delete("a", &lease.token).await.status, 204);
    let granted = events.next_of("granted", &["waiting"]).await;
    assert!(granted.data["fencing_token"].as_u64() > Some(lease.fencing), "{granted:?}");
    drop(events);

    // A wait that ends without a grant ends the stream with the reason.
    let mut events = holding(&gateway, "a", json!({ "wait_ms": 2_000 })).await;
    let refused = events.next_of("refused", &["waiting"]).await;
    assert_eq!(refused.data["code"], "lock_held", "{refused:?}");
    assert_eq!(events.try_next().await, None);
    // A client that leaves while it waits leaves the line.
    let mut events = holding(&gateway, "a", json!({ "wait_ms": HOUR_MS })).await;
    events.next_of("waiting", &[]).await;
    drop(events);
    waiting_is(&gateway, 0, 0).await;
}

/// The extensions of a lock that a watcher sees until the TTL of the lock ends. A release fails the
/// test.
async fn extensions_until_expiry(watcher: &mut Events) -> u64 {
    let mut extensions = 0;
    loop {
        let event = watcher.next().await;
        match event.kind.as_str() {
            "extended" => extensions += 1,
            "expired" => return extensions,
            other => panic!("{other} instead of an expiry"),
        }
    }
}

#[tokio::test]
async fn a_cut_connection_ends_the_extensions_and_releases_nothing() {
    let gateway = Launch::embedded().start().await;
    let mut watcher = gateway.events("/locks/a").await;
    watcher.next_of("snapshot", &[]).await;
    let sent = Instant::now();
    let mut events = holding(&gateway, "a", json!({ "ttl_ms": TTL_MS })).await;
    events.next_of("granted", &[]).await;
    let last = extended(&mut events).await;
    assert!(last.data["validity_ms"].as_u64() <= Some(TTL_MS));
    drop(events);
    // The client may be alive and within its validity.
    let until = relied_on_until(sent, &last);
    assert!(is_held(&gateway, "a").await || Instant::now() > until, "the lock was released");
    watcher.next_of("held", &[]).await;
    watcher.next_of("extended", &[]).await;
    let more = extensions_until_expiry(&mut watcher).await;
    // A busy gateway may extend the lock again before it notices the cut.
    assert!(more <= 2, "{more} extensions after the cut");
    assert!(Instant::now() > until, "the lock ended within the validity");
}

/// Drops all packets that arrive for a connection from now on, so that none is acknowledged. The
/// other end is not told.
async fn cut_silently(connection: OwnedFd) {
    // 21 is IP_MINTTL of <linux/in.h>: packets with a smaller TTL are dropped. On loopback, packets
    // have a TTL of 64.
    let cut = "import socket; socket.socket(fileno=0).setsockopt(socket.IPPROTO_IP, 21, 255)";
    let mut python = Command::new("python3");
    python.args(["-c", cut]).stdin(Stdio::from(connection));
    let status = python.status().await.expect("python3 starts");
    assert!(status.success(), "{status}");
}

/// The gateway extends the lock until it notices the cut. So the number of extensions tells how long
/// that took.
#[tokio::test]
async fn a_silent_cut_ends_the_extensions_within_45_s() {
    let gateway = Launch::embedded().start().await;
    let mut watcher = gateway.events("/locks/a").await;
    watcher.next_of("snapshot", &[]).await;
    let stream = TcpStream::connect(gateway.address()).await.expect("the gateway listens");
    let connection = stream.as_fd().try_clone_to_owned().expect("a descriptor");
    let body = json!({ "ttl_ms": TTL_MS });
    let opened = Events::over(stream, Method::POST, "/locks/a", &HeaderMap::new(), &body).await;
    let mut events = opened.expect("a stream");
    events.next_of("granted", &[]).await;
    watcher.next_of("held", &[]).await;
    cut_silently(connection).await;
    let extensions = extensions_until_expiry(&mut watcher).await;
    println!("noticed after {extensions} extensions");
    assert!(extensions > 2 * TTL_MS / INTERVAL_MS, "{extensions}: the cut was not silent");
    assert!(extensions <= CUT_NOTICED_WITHIN_MS / INTERVAL_MS, "{extensions}: noticed too late");
}

#[tokio::test]
async fn stream_resumes_at_another_gateway() {
    let servers = masters(3);
    let launch =
        || Launch::over(&servers).flag("--clock-skew", "10s").flag("--node-timeout", "10s");
    let (first, second) = (launch().ready().await, launch().ready().await);
    let mut events = holding(&first, "a", json!({ "ttl_ms": 60_000 })).await;
    let granted = events.next_of("granted", &[]).await;
    let token = token_of(&granted);
    first.signal(Signal::KILL);
    let headers = [("lock-token", token.as_str())];
    let resumed = opened(&second, "a", &headers, json!({ "ttl_ms": 2 * TTL_MS })).await;
    let mut events = resumed.expect("a stream");
    // The first extension resumes the hold.
    for _ in 0..2 {
        let event = extended(&mut events).await;
        assert_eq!(token_of(&event), token);
        assert_eq!(event.data["fencing_token"], granted.data["fencing_token"]);
    }
    assert_eq!(second.delete("a", &token).await.status, 204);
    events.next_of("lost", &["extended", "unknown"]).await;
    let gone = opened(&second, "a", &headers, json!({})).await.err().expect("no stream");
    gone.problem(404, "lock_not_found");
}

/// The end of a stream whose lock reaches `--max-hold`.
struct MaxHold {
    sent: Instant,
    /// The last event before the loss.
    last: Event,
    lost: Event,
    lost_at: Instant,
    events: Events,
}

/// A gateway whose locks live and are held for at most `millis`, and a stream of such a lock.
async fn held_for_max_hold(millis: u64) -> (Gateway, MaxHold) {
    let most = format!("{millis}ms");
    let gateway = Launch::embedded()
        .flag("--max-ttl", &most)
        .flag("--default-ttl", &most)
        .flag("--max-hold", &most);
    let gateway = gateway.start().await;
    let sent = Instant::now();
    let mut events = holding(&gateway, "a", json!({ "ttl_ms": millis })).await;
    let mut last = events.next_of("granted", &[]).await;
    let lost = loop {
        let event = events.next().await;
        match event.kind.as_str() {
            "extended" => last = event,
            // On a slow machine, an extension may fail. The gateway tries again.
            "unknown" => {}
            "lost" => break event,
            other => panic!("{other}"),
        }
    };
    (gateway, MaxHold { sent, last, lost, lost_at: Instant::now(), events })
}

#[tokio::test]
async fn a_stream_ends_with_lost_at_max_hold() {
    let (gateway, held) = held_for_max_hold(TTL_MS).await;
    let MaxHold { sent, last, lost, lost_at, mut events } = held;
    let max_hold = Duration::from_millis(TTL_MS);
    assert!(lost_at - sent > max_hold, "lost after {:?}", lost_at - sent);
    assert_eq!((&*last.kind, &lost.data["code"]), ("extended", &json!("max_hold_reached")));
    assert_eq!(lost.data["status"], 409, "{lost:?}");
    let detail = lost.data["detail"].as_str().expect("a text");
    assert!(detail.contains("a lock may be held for 6s"), "{lost:?}");
    assert_eq!(events.try_next().await, None);
    let until = relied_on_until(sent, &last);
    let is_kept = is_held(&gateway, "a").await || Instant::now() > until;
    assert!(is_kept, "the lock is not released");
    eventually("the lock ends", async || (!is_held(&gateway, "a").await).then_some(())).await;
    assert!(Instant::now() > until, "the lock ended within the validity");
}

#[tokio::test]
async fn an_error_before_the_stream_is_an_ordinary_answer() {
    let gateway = Launch::embedded().start().await;
    gateway.acquire_for("held", 60_000).await;
    let refused = async |name: &str, headers: &[(&str, &str)], body: Value| {
        opened(&gateway, name, headers, body).await.err().expect("no stream")
    };
    refused("held", &[], json!({})).await.problem(409, "lock_held");
    refused("a", &[], json!({ "ttl_ms": 1 })).await.problem(400, "invalid_ttl");
    refused("a", &[("lock-token", "x")], json!({})).await.problem(400, "invalid_token");
    let short = refused("a", &[], json!({ "ttl_ms": 999 })).await.problem(400, "invalid_ttl");
    assert_eq!(short["detail"], "ttl_ms is 999; a stream needs at least 1000");
    let headers = HeaderMap::new();
    let body = json!({ "names": ["x", "y"] });
    let set = Events::open_by(Method::POST, gateway.address(), "/locks", &headers, &body).await;
    let set = set.err().expect("no stream").problem(400, "invalid_parameter");
    let detail = "an event stream holds one lock or its slots, not a set; \
                  leave out Accept: text/event-stream";
    assert_eq!(set["detail"], detail);
    assert!(!is_held(&gateway, "x").await, "nothing was acquired");
    // Without a stream the header has no effect.
    let call = gateway.call(Method::POST, lock_path("a")).header("lock-token", "x");
    assert_eq!(call.send().await.status, 201);
}

#[tokio::test]
async fn a_removed_key_and_a_drain_end_held_streams() {
    let (holder, other) = (key("holder", HOLDER, "*").await, key("other", HOLDER, "*").await);
    let keys = file(&[&holder, &other]);
    let mut gateway = with_keys(&keys).flag("--drain-delay", "0s").start().await;
    let open = async |key: &crate::http::keys::Key, name: &str| {
        let bearer = key.bearer();
        let headers = [("authorization", bearer.as_str())];
        let opened = opened(&gateway, name, &headers, json!({ "ttl_ms": TTL_MS })).await;
        let mut events = opened.expect("a stream");
        events.next_of("granted", &[]).await;
        events
    };
    let mut of_holder = open(&holder, "a").await;
    let mut of_other = open(&other, "b").await;
    for events in [&mut of_holder, &mut of_other] {
        extended(events).await;
    }
    let left = file(&[&other]);
    std::fs::copy(left.path(), keys.path()).expect("a file");
    gateway.signal(Signal::HUP);
    let end = of_holder.next_of("end", &["extended", "unknown"]).await;
    assert_eq!(end.data, json!({ "reason": "revoked" }));
    extended(&mut of_other).await;
    gateway.signal(Signal::TERM);
    let end = of_other.next_of("end", &["extended", "unknown"]).await;
    assert_eq!(end.data, json!({ "reason": "draining" }));
    assert_eq!(gateway.ended().await, Some(0));
}

#[tokio::test]
async fn audit_log_has_the_outcome_of_each_stream() {
    let record = Scratch::new("audit.jsonl", "");
    let acquirer = key("acquirer", "acquire", "*").await;
    let (holder, other) = (key("holder", HOLDER, "*").await, key("other", HOLDER, "*").await);
    let forcing = key("forcing", &format!("{HOLDER},force"), "*").await;
    let keys = file(&[&acquirer, &holder, &other, &forcing]);
    let launch = patient(with_keys(&keys));
    let gateway = launch.flag("--audit-log", record.path()).start().await;
    let open = async |key: &crate::http::keys::Key, token: Option<&str>, body: Value| {
        let bearer = key.bearer();
        let mut headers = vec![("authorization", bearer.as_str())];
        headers.extend(token.map(|token| ("lock-token", token)));
        opened(&gateway, "a", &headers, body).await
    };
    let refused = open(&acquirer, None, json!({})).await.err().expect("no stream");
    refused.problem(403, "forbidden");
    let mut first = open(&holder, None, json!({ "ttl_ms": 60_000 })).await.expect("a stream");
    let token = token_of(&first.next_of("granted", &[]).await);
    let body = json!({ "ttl_ms": 60_000, "wait_ms": 2_000 });
    let mut second = open(&other, None, body).await.expect("a stream");
    second.next_of("waiting", &[]).await;
    second.next_of("refused", &["waiting"]).await;
    let body = json!({ "ttl_ms": 60_000, "wait_ms": HOUR_MS });
    let mut third = open(&other, None, body).await.expect("a stream");
    third.next_of("waiting", &[]).await;
    // Of the body, only the TTL counts.
    let body = json!({ "ttl_ms": 60_000, "priority": 99, "owner": "x" });
    let taken = open(&forcing, Some(&token), body).await;
    taken.expect("a stream").next_of("extended", &[]).await;
    assert_eq!(holder.delete(&gateway, "a", &token).await.status, 204);
    third.next_of("granted", &["waiting"]).await;
    let lines = eventually("each stream has its line", async || {
        let lines = audit_lines(&record);
        (lines.len() >= 6).then_some(lines)
    })
    .await;
    let shown: Vec<_> = lines
        .iter()
        .map(|line| {
            let text = |field: &str| line[field].as_str().unwrap_or_default();
            format!("{} {} {} {}", text("who"), text("what"), text("outcome"), line["status"])
        })
        .collect();
    assert_eq!(
        shown,
        [
            "acquirer acquire forbidden 403",
            "holder acquire done 200",
            "other acquire lock_held 409",
            "forcing extend done 200",
            "holder release done 204",
            "other acquire done 201",
        ]
    );
}

#[tokio::test]
async fn a_stream_may_hold_slots() {
    let gateway = Launch::embedded().start().await;
    let body = json!({ "slots": 3, "take": 2, "ttl_ms": TTL_MS });
    let mut events = holding(&gateway, "pool", body).await;
    let granted = events.next_of("granted", &[]).await;
    let held = granted.data["slots_held"].as_array().map(Vec::len);
    assert_eq!((&granted.data["slots"], held), (&json!(3), Some(2)));
    extended(&mut events).await;
    let light = gateway.post("pool", json!({ "slots": 3, "ttl_ms": 60_000 })).await;
    assert_eq!(light.status, 201, "one of three slots is left: {light:?}");
    gateway.post("pool", json!({ "slots": 3 })).await.problem(409, "lock_held");
    extended(&mut events).await;
    // A number with a fraction of zero is the same number.
    let waits = json!({ "slots": 3.0, "ttl_ms": TTL_MS, "wait_ms": 20_000 });
    let waiting = holding(&gateway, "pool", waits).await.next_of("waiting", &[]).await;
    let shown = waiting.data["holders"].as_array().map(Vec::len);
    assert_eq!(shown, Some(3), "{waiting:?}");
}

mod measured {
    use super::*;

    /// An error if an event came after this moment.
    fn in_time(what: &str, until: Instant) -> Result<(), String> {
        let late = Instant::now().saturating_duration_since(until);
        if late.is_zero() { Ok(()) } else { Err(format!("{what} came {late:?} too late")) }
    }

    #[tokio::test]
    async fn each_extension_comes_before_the_validity_ends() {
        let gateway = Launch::embedded().start().await;
        let mut names = (0..).map(|number| format!("a{number}"));
        measured("an extension by a stream", async || {
            let sent = Instant::now();
            let name = names.next().expect("there is always one more");
            let mut events = holding(&gateway, &name, json!({ "ttl_ms": SHORT_TTL_MS })).await;
            let granted = events.next_of("granted", &[]).await;
            let token = token_of(&granted);
            let mut until = relied_on_until(sent, &granted);
            // Twice the TTL: without extensions the lock would have ended.
            while sent.elapsed() < Duration::from_millis(2 * SHORT_TTL_MS) {
                let event = events.next().await;
                if event.kind != "extended" {
                    return Err(format!("{event:?} instead of an extension"));
                }
                in_time("an extension", until)?;
                until = relied_on_until(sent, &event);
            }
            let released = gateway.delete(&name, &token).await;
            if released.status == 204 { Ok(()) } else { Err(format!("it ended: {released:?}")) }
        })
        .await;
    }

    #[tokio::test]
    async fn lost_is_sent_before_validity_ends() {
        // `lost` comes an eighth of the TTL before the end. A busy machine needs part of that time.
        const TTL_MS: u64 = 8_000;
        let servers = masters(3);
        let gateway = Launch::over(&servers).ready().await;
        let mut names = (0..).map(|number| format!("a{number}"));
        measured("the notice of a loss", async || {
            let sent = Instant::now();
            let name = names.next().expect("there is always one more");
            let mut events = holding(&gateway, &name, json!({ "ttl_ms": TTL_MS })).await;
            let mut last = events.next_of("granted", &[]).await;
            servers[0].stop();
            servers[1].stop();
            let mut unknown = 0;
            let lost = loop {
                let event = events.next().await;
                match event.kind.as_str() {
                    // An extension that was on its way.
                    "extended" => last = event,
                    "unknown" => {
                        unknown += 1;
                        assert_eq!(event.data["status"], 503, "{event:?}");
                    }
                    "lost" => break event,
                    other => panic!("{other}"),
                }
            };
            let until = relied_on_until(sent, &last);
            let margin = until.saturating_duration_since(Instant::now());
            let is_in_time = in_time("the notice", until);
            assert!(unknown > 0 && lost.data["code"] == "outcome_unknown", "{lost:?}");
            assert_eq!(events.try_next().await, None);
            servers[0].cont();
            servers[1].cont();
            println!("told {margin:?} before the end, after {unknown} tries");
            let early = Duration::from_millis(TTL_MS / 3);
            assert!(margin < early, "too early: {margin:?} before the end");
            gateway.all_nodes_admitted().await;
            is_in_time
        })
        .await;
    }

    #[tokio::test]
    async fn a_loss_at_max_hold_is_told_before_the_validity_ends() {
        measured("the notice of the longest hold", async || {
            let (_gateway, held) = held_for_max_hold(SHORT_TTL_MS).await;
            let until = relied_on_until(held.sent, &held.last);
            let late = held.lost_at.saturating_duration_since(until);
            if late.is_zero() { Ok(()) } else { Err(format!("it came {late:?} too late")) }
        })
        .await;
    }
}
