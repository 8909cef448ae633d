//! Clients that misuse HTTP/2. During most attacks, another client acquires and extends locks, and
//! must not notice. Afterwards the gateway's memory has hardly grown.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use h2::client::ResponseFuture;
use h2::{Reason, SendStream};
use http::{HeaderMap, Method, Request};
use serde_json::{Value, json};
use tokio::task::{JoinHandle, JoinSet};

use super::http2::Stage;
use crate::support::client::Lease;
use crate::support::harness::eventually;
use crate::support::http2::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, Frames, HEADERS, Http2, INITIAL_WINDOW_SIZE, PING,
    PUSH_PROMISE, RST_STREAM, SETTINGS, WINDOW_UPDATE, answered, block, frame, get, reset_of,
    try_answered,
};
use crate::support::measure::measured;
use crate::support::waiters::{HOUR_MS, median};

/// How long a flood lasts.
const FLOOD: Duration = Duration::from_secs(4);
/// How many writes of 400 frames a flood has at most. They are more than fit into the buffers between
/// the attacker and the gateway.
const WRITES: usize = 5_000;
/// How much the memory may grow by an attack, in bytes.
const MEMORY: f64 = 48e6;
/// Limits on how long an acquire and an extend of another client take together. The attackers run on
/// the same machine, so they are generous.
const USUAL: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(3);
/// The least number of cycles of the other client. After a short attack, the client continues until
/// it has made that many.
const CYCLES: usize = 6;

/// Another client, which acquires, extends and releases locks until it is stopped.
struct Bystander {
    stop: tokio::sync::oneshot::Sender<()>,
    times: JoinHandle<Vec<Duration>>,
    memory: f64,
}

impl Bystander {
    async fn begin(stage: &Stage) -> Self {
        let connection = stage.open().await;
        let (stop, mut stopped) = tokio::sync::oneshot::channel();
        let times = tokio::spawn(async move {
            let mut times = Vec::new();
            let mut is_stopped = false;
            while !is_stopped || times.len() < CYCLES {
                is_stopped |= stopped.try_recv() == Ok(());
                let path = format!("/locks/bystander-{}", times.len());
                let began = Instant::now();
                let granted = connection.post(&path, &json!({ "ttl_ms": 60_000 })).await;
                let token = Lease::from(&granted).token;
                let extended = connection.with_token(Method::PATCH, &path, &token).await;
                assert_eq!(extended.status, 200);
                times.push(began.elapsed());
                let released = connection.with_token(Method::DELETE, &path, &token).await;
                assert_eq!(released.status, 204);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            times
        });
        tokio::time::sleep(Duration::from_millis(500)).await;
        Self { stop, times, memory: stage.gateway.resident() }
    }

    /// Ends the client. Returns an error if the attack delayed it.
    async fn end(self, stage: &Stage, attack: &str) -> Result<(), String> {
        let grown = stage.gateway.resident() - self.memory;
        self.stop.send(()).expect("it still runs");
        let times = self.times.await.expect("every request was served");
        let longest = times.iter().max().copied().unwrap_or_default();
        let usual = median(times.clone());
        println!(
            "{attack}: {} cycles, usual {usual:?}, longest {longest:?}, memory {:+.1} MB",
            times.len(),
            grown / 1e6
        );
        assert!(grown < MEMORY, "{attack}: {grown} bytes");
        let is_quick = usual < USUAL && longest < LONGEST;
        if is_quick { Ok(()) } else { Err(format!("usual {usual:?}, longest {longest:?}")) }
    }
}

/// Writes the same bytes again and again on `count` connections, until the gateway closes them.
/// `goes_on` tells whether a connection goes on after so many writes. Returns how many bytes the
/// gateway took, and how many connections it closed.
async fn flood(
    stage: &Stage,
    count: usize,
    first: &[u8],
    bytes: &[u8],
    goes_on: impl Fn(usize) -> bool + Copy + Send + 'static,
) -> (usize, usize) {
    let mut connections = JoinSet::new();
    for _ in 0..count {
        let frames = Frames::open(&stage.client, stage.address(), &[]).await;
        let (first, bytes) = (first.to_vec(), bytes.to_vec());
        connections.spawn(async move {
            let (mut reader, mut writer) = frames.split();
            let reading = tokio::spawn(async move { while reader.next().await.is_some() {} });
            let mut writes = 0;
            let mut is_closed = writer.write(&first).await.is_err();
            while !is_closed && goes_on(writes) {
                is_closed = writer.write(&bytes).await.is_err();
                writes += 1;
            }
            reading.abort();
            (writes * bytes.len(), usize::from(is_closed))
        });
    }
    let ended = connections.join_all().await;
    ended.into_iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
}

#[tokio::test]
async fn a_head_beyond_the_limit_is_refused() {
    let stage = Stage::start().await;
    let connection = stage.open().await;
    for (bytes, status) in [(14_000, 200), (17_000, 431)] {
        let mut request = Request::get("https://localhost/livez").body(()).expect("a request");
        for number in 0..bytes / 1_000 {
            let name = http::HeaderName::try_from(format!("x-{number}")).expect("a name");
            request.headers_mut().insert(name, "y".repeat(960).parse().expect("a value"));
        }
        let (answer, _stream) = connection.begin_request(request, None).await;
        assert_eq!(answered(answer).await.status, status, "{bytes} bytes");
    }
    assert_eq!(connection.get("/livez").await.status, 200, "the connection goes on");
}

#[tokio::test]
async fn many_fields_are_refused_and_many_cookies_are_not() {
    let stage = Stage::start().await;
    let connection = stage.open().await;
    for (fields, cookies, status) in [(100, 0, 200), (90, 180, 200), (101, 0, 431)] {
        let mut request = Request::get("https://localhost/livez").body(()).expect("a request");
        let headers = request.headers_mut();
        for number in 0..fields {
            let name = http::HeaderName::try_from(format!("x-{number}")).expect("a name");
            headers.insert(name, "y".parse().expect("a value"));
        }
        // Clients send each cookie as a field of its own (RFC 9113, section 8.2.3).
        for number in 0..cookies {
            headers.append("cookie", format!("c{number}=y").parse().expect("a value"));
        }
        let (answer, _stream) = connection.begin_request(request, None).await;
        let answered = answered(answer).await.status;
        assert_eq!(answered, status, "{fields} fields, {cookies} cookies");
    }
    assert_eq!(connection.get("/livez").await.status, 200, "the connection goes on");
}

/// A head of 20 KB in two frames.
#[tokio::test]
async fn a_long_head_ends_its_connection_but_not_that_of_a_proxy() {
    let names: Vec<String> = (0..20).map(|number| format!("x-{number}")).collect();
    let value = "y".repeat(1_000);
    let fields: Vec<_> = names.iter().map(|name| (name.as_str(), value.as_str())).collect();
    let head = [get("/livez"), block(&fields)].concat();
    let (first, rest) = head.split_at(16_384);
    let head = [
        frame(HEADERS, END_STREAM, 1, first),
        frame(CONTINUATION, END_HEADERS, 1, rest),
        frame(HEADERS, END_HEADERS | END_STREAM, 3, &get("/livez")),
    ]
    .concat();
    let stage = Stage::start().await;
    let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
    frames.write(&head).await.expect("sent");
    assert_eq!(frames.goaway().await, Some(1), "PROTOCOL_ERROR");
    stage.metric_is("redlock_http2_floods_total", 1.0).await;
    let stage = Stage::with(|launch| launch.flag("--trusted-proxy", "127.0.0.1")).await;
    let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
    frames.write(&head).await.expect("sent");
    let mut answered = Vec::new();
    while answered.len() < 2 {
        let (_, stream, _) = frames.next_of(HEADERS).await.expect("the connection goes on");
        answered.push(stream);
    }
    answered.sort_unstable();
    assert_eq!(answered, [1, 3], "both requests are answered");
}

/// Returns a request head that adds the field `x` to the header table (RFC 7541, section 6.2.1). If
/// `length` is not 0, the head also has a field `z` whose value has `length` bytes.
fn adding_an_entry(stream: u32, length: usize) -> Vec<u8> {
    let mut fields = get("/livez");
    let entry = fields.len();
    fields.extend(block(&[("x", "y")]));
    fields[entry] = 0x40;
    if length > 0 {
        fields.extend(block(&[("z", &"z".repeat(length))]));
    }
    frame(HEADERS, END_HEADERS | END_STREAM, stream, &fields)
}

/// Clients that never acknowledge the size of the header table.
#[tokio::test]
async fn entries_before_the_acknowledgement_are_bounded() {
    let stage = Stage::start().await;
    // A hundred ordinary requests with bodies, as a client sends them in its first round trip.
    let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
    let mut burst = Vec::new();
    for stream in (1..201).step_by(2) {
        let path = format!("/locks/{stream}");
        let mut fields = block(&[
            (":path", &path),
            (":method", "POST"),
            (":scheme", "https"),
            (":authority", "localhost"),
            ("content-type", "application/json"),
            ("idempotency-key", &format!("an ordinary key of a client {stream}")),
        ]);
        fields[0] = 0x40;
        burst.extend(frame(HEADERS, END_HEADERS, stream, &fields));
        burst.extend(frame(DATA, END_STREAM, stream, br#"{"ttl_ms":60000}"#));
    }
    frames.write(&burst).await.expect("sent");
    for _ in (1..201).step_by(2) {
        frames.next_of(HEADERS).await.expect("an answer");
    }
    drop(frames);
    stage.metric_is("redlock_http2_floods_total", 0.0).await;
    // Requests with large heads.
    let mut ended = Vec::new();
    for _ in 0..3 {
        let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
        let mut answered = 0;
        for stream in (1..401).step_by(2) {
            if frames.write(&adding_an_entry(stream, 12_000)).await.is_err()
                || frames.next_of(HEADERS).await.is_none()
            {
                break;
            }
            answered += 1;
        }
        ended.push(answered);
    }
    println!("answered before the end: {ended:?}");
    assert!(ended.iter().all(|answered| *answered < 20), "{ended:?}");
    stage.metric_is("redlock_http2_floods_total", 3.0).await;
}

#[tokio::test]
async fn an_answer_that_is_not_read_is_given_up() {
    let stage = Stage::start().await;
    let mut stalled = stalled_connections(&stage).await;
    // The gateway gives an answer up after 30 s. A longer wait that begins now must outlast them.
    let other = stage.open().await;
    Lease::from(&other.post("/locks/job", &json!({ "ttl_ms": HOUR_MS })).await);
    let (body, none) = (json!({ "wait_ms": 60_000 }), HeaderMap::new());
    let (outlasts, _stream) = other.begin(Method::POST, "/locks/job", &none, &body).await;
    let outlasts = tokio::spawn(answered(outlasts));
    // The streams are reset, and their connections go on.
    for (connection, requests) in &mut stalled {
        for (_, stream) in requests.iter_mut() {
            assert_eq!(reset_of(stream).await, h2::Reason::CANCEL);
        }
        assert!(!connection.has_ended());
    }
    assert!(!outlasts.is_finished(), "the wait ended before the answers");
}

/// A request that was begun.
type Begun = (ResponseFuture, SendStream<Bytes>);

/// Connections with requests whose answers are not read.
async fn stalled_connections(stage: &Stage) -> Vec<(Http2, Vec<Begun>)> {
    let mut stalled = Vec::new();
    // Windows of no byte, of one byte, and of a few bytes.
    for window in [0, 1, 40] {
        for _ in 0..4 {
            let mut builder = h2::client::Builder::new();
            builder.initial_window_size(window);
            let connection = Http2::open_with(&stage.client, stage.address(), &builder).await;
            let mut requests = Vec::new();
            for number in 0..98 {
                let path =
                    ["/docs/api/swagger-ui-bundle.js", "/openapi.json", "/readyz"][number % 3];
                let none = HeaderMap::new();
                requests.push(connection.begin(Method::GET, path, &none, &Value::Null).await);
            }
            stalled.push((connection, requests));
        }
    }
    stalled
}

#[tokio::test]
async fn many_streams_stay_within_the_limit_on_connections() {
    const LIMIT: usize = 300;
    let stage = Stage::with(|launch| {
        let launch = launch.flag("--max-waiters", "2000").flag("--max-waiters-per-client", "2000");
        launch.flag("--max-connections", &LIMIT.to_string()).flag("--max-waiters-per-lock", "2000")
    })
    .await;
    let owner = stage.open().await;
    Lease::from(&owner.post("/locks/job", &json!({ "ttl_ms": HOUR_MS })).await);
    let body = json!({ "wait_ms": HOUR_MS });
    let mut connections = Vec::new();
    let mut answers = FuturesUnordered::new();
    for _ in 0..12 {
        let connection = stage.open().await;
        assert_eq!(connection.get("/livez").await.status, 200);
        connections.push(connection);
    }
    for connection in &connections {
        for _ in 0..100 {
            let none = HeaderMap::new();
            let (answer, _) = connection.begin(Method::POST, "/locks/job", &none, &body).await;
            answers.push(try_answered(answer));
        }
    }
    // Newcomers get in, and their probes are answered, while all slots are taken.
    for _ in 0..5 {
        assert_eq!(stage.open().await.get("/livez").await.status, 200);
    }
    let (mut refused, mut reset) = (0, 0);
    let waiting = eventually("all requests without an answer wait", async || {
        while let Some(Some(answer)) = answers.next().now_or_never() {
            match answer {
                Ok(answer) => {
                    answer.problem(503, "overloaded");
                    refused += 1;
                }
                // Too many others were being refused just then.
                Err(error) => {
                    assert_eq!(error.reason(), Some(Reason::REFUSED_STREAM), "{error}");
                    reset += 1;
                }
            }
        }
        let waiting = stage.metric("redlock_waiters").await;
        (waiting == answers.len() as f64).then_some(answers.len())
    })
    .await;
    println!("1,200 requests, {LIMIT} slots: {waiting} wait, {refused} refused, {reset} reset");
    assert!(waiting <= LIMIT && waiting > LIMIT * 9 / 10, "{waiting}");
    assert_eq!(stage.client.get(stage.address(), "/livez").await, Ok(200), "probes are served");
    drop((answers, connections));
    eventually("the slots are free again", async || {
        (stage.metric("redlock_connections").await < 4.0).then_some(())
    })
    .await;
    eventually("a newcomer is served", async || {
        let answer = stage.open().await.post("/locks/other", &json!({})).await;
        (answer.status == 201).then_some(())
    })
    .await;
}

#[tokio::test]
async fn refusals_that_the_client_stalls_are_few() {
    // The least number of refusals that a gateway gives at a time.
    const REFUSALS: usize = 64;
    const CONNECTIONS: usize = 4;
    let stage = Stage::with(|launch| {
        let launch = launch.flag("--max-connections", "100");
        launch.flag("--max-connections-per-client", &CONNECTIONS.to_string())
    })
    .await;
    // Without a window, the body of an answer cannot be sent.
    let mut no_window = h2::client::Builder::new();
    no_window.initial_window_size(0);
    let stalled = async || {
        let mut connections = Vec::new();
        // All are opened first, because each request would take a slot, too.
        for _ in 0..CONNECTIONS {
            connections.push(Http2::open_with(&stage.client, stage.address(), &no_window).await);
        }
        let mut answers = JoinSet::new();
        for connection in &connections {
            for _ in 0..100 {
                let none = HeaderMap::new();
                let (answer, _) =
                    connection.begin(Method::GET, "/locks/a", &none, &Value::Null).await;
                answers.spawn(answer);
            }
        }
        let (mut heads, mut reset) = (Vec::new(), 0);
        for answer in answers.join_all().await {
            match answer {
                // The answer is stalled as long as its head is kept.
                Ok(head) => heads.push(head),
                Err(error) => {
                    assert_eq!(error.reason(), Some(Reason::REFUSED_STREAM), "{error}");
                    reset += 1;
                }
            }
        }
        (connections, heads, reset)
    };
    let (connections, heads, reset) = stalled().await;
    let refused = heads.iter().filter(|head| head.status() == 503).count();
    println!("{} answered, {refused} of them refused, {reset} reset", heads.len());
    assert!(refused <= REFUSALS && reset > 0, "{refused} refused, {reset} reset");
    assert!(!connections.iter().any(Http2::has_ended), "so few resets are no attack");
    let other = stage.from(2).await;
    assert_eq!(other.post("/locks/b", &json!({})).await.status, 201, "another client is served");
    // A client that goes on is cut off. Otherwise it could queue resets without end.
    let request = Request::get("https://localhost/locks/a").body(()).expect("a request");
    let mut resets = 0;
    let end = loop {
        // The gateway forgives 20 resets each second, so several requests are sent at once.
        let sent = (0..50).map(|_| connections[0].try_send(&request, None));
        let mut answers = join_all(sent).await;
        let is_reset =
            |answer: &Result<_, h2::Error>| answer.as_ref().is_err_and(|error| error.is_reset());
        match answers.iter().position(|answer| !is_reset(answer)) {
            Some(at) => break answers.swap_remove(at),
            None => resets += answers.len(),
        }
        assert!(resets < 2_000, "the connection takes resets without end");
    };
    assert!(end.is_err(), "the connection has ended: {end:?}");
    // The end of the connections gives the places back.
    drop((connections, heads));
    eventually("only the other client is connected", async || {
        let metrics = other.get("/metrics").await;
        let text = String::from_utf8_lossy(&metrics.body);
        text.lines().any(|line| line == "redlock_connections 1").then_some(())
    })
    .await;
    let (_connections, heads, _) = stalled().await;
    assert!(heads.iter().any(|head| head.status() == 503), "refusals are answered again");
}

mod measured {
    use super::*;

    #[tokio::test]
    async fn floods_of_control_frames_do_not_delay_others() {
        let stage = Stage::start().await;
        let setting = [0, INITIAL_WINDOW_SIZE as u8, 0, 0, 255, 255];
        let mut all_closed = 0;
        for (name, one) in [
            ("PING", frame(PING, 0, 0, &[7; 8])),
            ("PING that answers none", frame(PING, 1, 0, &[7; 8])),
            ("SETTINGS", frame(SETTINGS, 0, 0, &setting)),
            ("empty SETTINGS", frame(SETTINGS, 0, 0, &[])),
            ("PRIORITY", frame(2, 0, 1, &[0, 0, 0, 3, 1])),
            ("unknown frames", frame(200, 0, 0, &[])),
        ] {
            measured(name, async || {
                let bystander = Bystander::begin(&stage).await;
                let (taken, closed) =
                    flood(&stage, 8, &[], &one.repeat(400), |writes| writes < WRITES).await;
                println!("{name}: {} kB taken, {closed} connections closed", taken / 1_000);
                assert_eq!(closed, 8, "{name}: each connection is cut");
                all_closed += closed;
                bystander.end(&stage, name).await
            })
            .await;
        }
        let lines = stage.gateway.stdout().lines().count();
        assert!(lines < 4 + 2 * all_closed, "a flood does not fill the log");
    }

    #[tokio::test]
    async fn a_rapid_reset_is_stopped() {
        measured("rapid reset", async || {
            let stage = Stage::start().await;
            let fields = block(&[
                (":method", "POST"),
                (":scheme", "https"),
                (":path", "/locks/rapid"),
                (":authority", "localhost"),
            ]);
            let bystander = Bystander::begin(&stage).await;
            let mut attackers = JoinSet::new();
            for _ in 0..4 {
                let (client, address, fields) =
                    (stage.client.clone(), stage.address(), fields.clone());
                attackers.spawn(async move {
                    let end = Instant::now() + FLOOD;
                    let (mut closed, mut requests) = (0, 0);
                    while Instant::now() < end {
                        let frames = Frames::open(&client, address, &[]).await;
                        let (mut reader, mut writer) = frames.split();
                        let reading =
                            tokio::spawn(async move { while reader.next().await.is_some() {} });
                        for stream in (1..200_000).step_by(2) {
                            let head = frame(HEADERS, END_HEADERS | END_STREAM, stream, &fields);
                            let reset = frame(RST_STREAM, 0, stream, &[0, 0, 0, 8]);
                            if writer.write(&[head, reset].concat()).await.is_err() {
                                closed += 1;
                                break;
                            }
                            requests += 1;
                            if closed > 0 && Instant::now() > end {
                                break;
                            }
                        }
                        reading.abort();
                    }
                    (closed, requests)
                });
            }
            let ended = attackers.join_all().await;
            let (closed, requests) =
                ended.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
            println!("rapid reset: {requests} requests, {closed} connections closed");
            // The attacker's writes run ahead of the gateway's answer by what fits into buffers.
            assert!(closed > 0, "no connection was closed after {requests} requests");
            bystander.end(&stage, "rapid reset").await?;
            stage.metric_is("redlock_requests_in_flight", 0.0).await;
            Ok(())
        })
        .await;
    }

    /// Resets of requests that the gateway has begun. A client that takes back a few requests goes on.
    #[tokio::test]
    async fn resets_of_begun_requests_are_bounded_and_few_are_allowed() {
        measured("resets of waiters", async || {
            let stage = Stage::start().await;
            let connection = stage.open().await;
            let held =
                Lease::from(&connection.post("/locks/job", &json!({ "ttl_ms": HOUR_MS })).await);
            let body = json!({ "ttl_ms": HOUR_MS, "wait_ms": HOUR_MS });
            let waiters = async |connection: &Http2, count: usize| {
                let mut waiting = Vec::new();
                for _ in 0..count {
                    let none = HeaderMap::new();
                    waiting.push(connection.begin(Method::POST, "/locks/job", &none, &body).await);
                }
                stage.metric_is("redlock_waiters", count as f64).await;
                for (_, stream) in &mut waiting {
                    stream.send_reset(h2::Reason::CANCEL);
                }
                stage.metric_is("redlock_waiters", 0.0).await;
            };
            let bystander = Bystander::begin(&stage).await;
            waiters(&connection, 90).await;
            waiters(&connection, 90).await;
            assert_eq!(connection.get("/livez").await.status, 200, "180 resets are no attack");
            let extended = connection.with_token(Method::PATCH, "/locks/job", &held.token).await;
            assert_eq!(extended.status, 200);
            let mut attacker = stage.open().await;
            // The requests under way before the limit go on.
            let none = HeaderMap::new();
            let (kept, _stream) = attacker.begin(Method::POST, "/locks/job", &none, &body).await;
            stage.metric_is("redlock_waiters", 1.0).await;
            for batch in 0.. {
                if stage.metric("redlock_http2_floods_total").await == 1.0 {
                    break;
                }
                // The gateway forgives 20 resets each second.
                assert!(batch < 10, "there is no limit");
                let mut waiting = Vec::new();
                for _ in 0..98 {
                    waiting.push(attacker.begin(Method::POST, "/locks/job", &none, &body).await);
                }
                stage.metric_is("redlock_waiters", 99.0).await;
                for (_, stream) in &mut waiting {
                    stream.send_reset(h2::Reason::CANCEL);
                }
                stage.metric_is("redlock_waiters", 1.0).await;
            }
            let released = connection.with_token(Method::DELETE, "/locks/job", &held.token).await;
            assert_eq!(released.status, 204);
            assert_eq!(answered(kept).await.status, 201);
            attacker.ended().await.expect("GOAWAY without an error");
            bystander.end(&stage, "resets of waiters").await
        })
        .await;
    }

    /// CVE-2025-8671: the client makes the gateway reset the streams.
    #[tokio::test]
    async fn resets_that_the_client_provokes_are_bounded() {
        measured("provoked resets", async || {
            let stage = Stage::start().await;
            let bystander = Bystander::begin(&stage).await;
            for (name, fault) in [
                ("empty WINDOW_UPDATE", |stream| frame(WINDOW_UPDATE, 0, stream, &[0; 4])),
                ("window beyond the limit", |stream| {
                    frame(WINDOW_UPDATE, 0, stream, &[0x7f, 255, 255, 255])
                }),
                ("DATA after the end", |stream| frame(DATA, 0, stream, b"x")),
            ] as [(&str, fn(u32) -> Vec<u8>); 3]
            {
                let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
                let mut sent = 0;
                for stream in (1..4_000).step_by(2) {
                    let head = frame(HEADERS, END_HEADERS | END_STREAM, stream, &get("/locks"));
                    if frames.write(&[head, fault(stream)].concat()).await.is_err() {
                        break;
                    }
                    sent += 1;
                    tokio::time::sleep(Duration::from_micros(200)).await;
                }
                let code = frames.goaway().await;
                println!("{name}: closed with {code:?} after at most {sent} requests");
                assert!(sent < 1_990, "{name}: {sent} requests");
            }
            bystander.end(&stage, "provoked resets").await
        })
        .await;
    }

    #[tokio::test]
    async fn an_endless_head_ends_its_connection() {
        measured("CONTINUATION floods", async || {
            let stage = Stage::start().await;
            let bystander = Bystander::begin(&stage).await;
            // Fragments of an endless header field, which no END_HEADERS follows.
            let first = frame(HEADERS, END_STREAM, 1, &get("/livez"));
            for (name, more) in [
                ("CONTINUATION flood", block(&[("x", &"y".repeat(1_000))])),
                ("empty CONTINUATION flood", Vec::new()),
                ("CONTINUATION flood of one byte each", vec![0x82]),
            ] {
                let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
                frames.write(&first).await.expect("sent");
                let one = frame(CONTINUATION, 0, 1, &more).repeat(16);
                let mut sent = 0;
                while sent < 20_000_000 && frames.write(&one).await.is_ok() {
                    sent += one.len();
                }
                let code = frames.goaway().await;
                println!("{name}: closed with {code:?} after at most {sent} bytes");
                assert!(sent < 19_000_000, "{name}");
            }
            bystander.end(&stage, "CONTINUATION flood").await
        })
        .await;
    }

    /// The library stores an entry as a slice of a buffer, and so keeps the buffer.
    #[tokio::test]
    async fn entries_of_a_header_table_are_not_kept() {
        measured("entries of a header table", async || {
            let stage = Stage::start().await;
            let bystander = Bystander::begin(&stage).await;
            let acknowledgement = frame(SETTINGS, 1, 0, &[]);
            let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
            let (_, _, settings) = frames.next_of(SETTINGS).await.expect("the gateway's settings");
            assert!(
                settings.chunks(6).any(|setting| setting == [0, 1, 0, 0, 0, 0]),
                "{settings:?}"
            );
            // After the acknowledgement, some clients send a size update to 0. Others, such as HAProxy, add
            // entries and never refer to them. The third one sends a priority that makes the library ignore
            // a frame.
            let fields = [&[0x20], &get("/livez")[..]].concat();
            let emptied = frame(HEADERS, END_HEADERS | END_STREAM, 3, &fields);
            let of_itself = [&[0, 0, 0, 3, 0], &get("/livez")[..]].concat();
            let of_itself = frame(HEADERS, END_HEADERS | END_STREAM | 0x20, 3, &of_itself);
            for first in [emptied, adding_an_entry(3, 0), of_itself] {
                let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
                frames.next_of(SETTINGS).await.expect("the gateway's settings");
                frames.write(&adding_an_entry(1, 0)).await.expect("sent");
                frames.next_of(HEADERS).await.expect("an answer");
                frames.write(&[acknowledgement.clone(), first].concat()).await.expect("sent");
                frames.next_of(HEADERS).await.expect("an answer");
                for stream in (5..101).step_by(2) {
                    frames.write(&adding_an_entry(stream, 12_000)).await.expect("sent");
                    frames.next_of(HEADERS).await.expect("an answer");
                }
                // No entry was kept.
                let fields = [&get("/livez")[..], &[0xbe]].concat();
                let refers = frame(HEADERS, END_HEADERS | END_STREAM, 101, &fields);
                frames.write(&refers).await.expect("sent");
                assert_eq!(frames.goaway().await, Some(1), "PROTOCOL_ERROR");
            }
            stage.metric_is("redlock_http2_floods_total", 0.0).await;
            // The library reads such fields anew after a CONTINUATION, and finds an entry in the value.
            let hidden = [0, 0, 0x87, 0x44, 5, b'/', b'a', b'b', b'0', b'a'];
            let rest = [&[0x82], &block(&[(":authority", "localhost")])[..]].concat();
            let cut = [
                frame(HEADERS, END_STREAM, 1, &hidden),
                frame(CONTINUATION, END_HEADERS, 1, &rest),
            ];
            let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
            frames.write(&cut.concat()).await.expect("sent");
            assert_eq!(frames.goaway().await, Some(1), "PROTOCOL_ERROR");
            stage.metric_is("redlock_http2_floods_total", 1.0).await;
            let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
            let promise =
                frame(PUSH_PROMISE, END_HEADERS, 1, &[&[0, 0, 0, 2], &get("/livez")[..]].concat());
            frames.write(&[acknowledgement, promise].concat()).await.expect("sent");
            assert_eq!(frames.goaway().await, Some(1), "PROTOCOL_ERROR");
            stage.metric_is("redlock_http2_floods_total", 2.0).await;
            bystander.end(&stage, "entries of a header table").await
        })
        .await;
    }

    /// One entry of the table, which many fields of one byte name.
    #[tokio::test]
    async fn an_hpack_bomb_is_refused() {
        measured("an HPACK bomb", async || {
            let stage = Stage::start().await;
            let bystander = Bystander::begin(&stage).await;
            let mut attackers = JoinSet::new();
            for _ in 0..8 {
                let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
                attackers.spawn(async move {
                    // A literal of 4,000 bytes that is added to the table.
                    let mut fields = get("/livez");
                    let bomb = block(&[("x", &"y".repeat(4_000))]);
                    fields.push(0x40);
                    fields.extend_from_slice(&bomb[1..]);
                    let mut sent = 0;
                    for stream in (1..2_000).step_by(2) {
                        let mut block = if stream == 1 { fields.clone() } else { get("/livez") };
                        // Each of these bytes stands for the literal.
                        block.extend([0xbe; 12_000]);
                        let head = frame(HEADERS, END_HEADERS | END_STREAM, stream, &block);
                        if frames.write(&head).await.is_err() {
                            break;
                        }
                        sent += 1;
                    }
                    let code = frames.goaway().await;
                    (sent, code)
                });
            }
            let ended = attackers.join_all().await;
            println!("HPACK bomb: requests and the codes of the end: {ended:?}");
            bystander.end(&stage, "HPACK bomb").await
        })
        .await;
    }

    #[tokio::test]
    async fn a_stream_beyond_the_limit_is_refused_and_the_others_go_on() {
        measured("streams beyond the limit", async || {
            let stage = Stage::start().await;
            let owner = stage.open().await;
            let held = Lease::from(&owner.post("/locks/job", &json!({ "ttl_ms": HOUR_MS })).await);
            let bystander = Bystander::begin(&stage).await;
            let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
            let (_, _, settings) = frames.next_of(SETTINGS).await.expect("the gateway's settings");
            let streams =
                settings.chunks(6).find(|setting| setting[..2] == [0, 3]).expect("a limit");
            assert_eq!(streams[2..], 100_u32.to_be_bytes());
            let fields = block(&[
                (":method", "POST"),
                (":scheme", "https"),
                (":path", "/locks/job"),
                (":authority", "localhost"),
                ("prefer", "wait=3600"),
            ]);
            // This client ignores the limit.
            for number in 0..130 {
                let head = frame(HEADERS, END_HEADERS | END_STREAM, 2 * number + 1, &fields);
                frames.write(&head).await.expect("sent");
            }
            for _ in 0..30 {
                let (_, stream, code) = frames.next_of(RST_STREAM).await.expect("a refusal");
                assert_eq!((stream > 200, code), (true, vec![0, 0, 0, 7]), "REFUSED_STREAM");
            }
            stage.metric_is("redlock_waiters", 100.0).await;
            assert_eq!(
                owner.with_token(Method::DELETE, "/locks/job", &held.token).await.status,
                204
            );
            frames.next_of(HEADERS).await.expect("one of the others is granted the lock");
            bystander.end(&stage, "streams beyond the limit").await
        })
        .await;
    }

    #[tokio::test]
    async fn tiny_pieces_of_a_body_take_no_memory() {
        measured("tiny pieces of a body", async || {
            let stage = Stage::start().await;
            let bystander = Bystander::begin(&stage).await;
            let fields = block(&[
                (":method", "POST"),
                (":scheme", "https"),
                (":path", "/locks/tiny"),
                (":authority", "localhost"),
                ("content-type", "application/json"),
            ]);
            for (name, payload) in [("one byte", b" ".as_slice()), ("no byte", b"")] {
                let mut first = Vec::new();
                for number in 0..90 {
                    first.extend(frame(HEADERS, END_HEADERS, 2 * number + 1, &fields));
                }
                let mut more = Vec::new();
                for number in 0..90 {
                    more.extend(frame(DATA, 0, 2 * number + 1, payload).repeat(16));
                }
                let end = Instant::now() + FLOOD;
                let (taken, closed) =
                    flood(&stage, 4, &first, &more, move |_| Instant::now() < end).await;
                println!("DATA of {name}: {} kB taken, {closed} connections closed", taken / 1_000);
            }
            bystander.end(&stage, "tiny DATA").await
        })
        .await;
    }

    #[tokio::test]
    async fn a_connection_that_breaks_the_protocol_is_closed() {
        measured("broken protocol", async || {
            let stage = Stage::start().await;
            let bystander = Bystander::begin(&stage).await;
            let head = |stream| frame(HEADERS, END_HEADERS | END_STREAM, stream, &get("/livez"));
            for (name, bytes) in [
                ("an even stream", head(2)),
                ("a stream that goes back", [head(5), head(3)].concat()),
                ("DATA without a head", frame(DATA, 0, 1, b"x")),
                ("CONTINUATION without a head", frame(CONTINUATION, END_HEADERS, 1, &[])),
                ("PING of a wrong length", frame(PING, 0, 0, b"x")),
                ("a frame that is too large", frame(DATA, 0, 1, &[0; 17_000])),
                ("a window beyond the limit", frame(WINDOW_UPDATE, 0, 0, &[0x7f, 255, 255, 255])),
                ("a broken header block", frame(HEADERS, END_HEADERS, 1, &[0xff; 20])),
                ("PUSH_PROMISE", frame(5, END_HEADERS, 1, &[0, 0, 0, 2])),
            ] {
                let mut frames = Frames::open(&stage.client, stage.address(), &[]).await;
                frames.write(&bytes).await.expect("sent");
                let code = frames.goaway().await;
                println!("{name}: closed with {code:?}");
                assert!(code.is_some_and(|code| code != 0), "{name}: {code:?}");
            }
            bystander.end(&stage, "broken protocol").await
        })
        .await;
    }

    #[tokio::test]
    async fn unread_answers_do_not_delay_others() {
        measured("unread answers", async || {
            let stage = Stage::start().await;
            let bystander = Bystander::begin(&stage).await;
            let _stalled = stalled_connections(&stage).await;
            bystander.end(&stage, "unread answers").await
        })
        .await;
    }
}
