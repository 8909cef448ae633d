//! Thousands of hostile requests arrive on several connections at once, at a gateway over real
//! masters. The gateway refuses each request, or does what it says. No answer breaks the API's
//! contract. The masters store only keys of locks that requests have named, and receive only the
//! gateway's commands. Clients that hold locks keep them.
//!
//! A second test sends the first half of the same requests over HTTP/2, many on one connection. It
//! skips requests that HTTP/2 cannot express.
//!
//! If the HTTP library below the gateway cannot read a request, it answers by itself: with 400, 414
//! or 431, without a body and without a request id, and it closes the connection. The test accepts
//! such an answer. If a request is incomplete, the test also accepts that no answer comes. Over
//! HTTP/2 the library then resets the stream.
//!
//! Every run draws new requests and prints its seed. `REDLOCK_FUZZ_SEED=<seed>` repeats the run.

mod dictionary;
mod requests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use serde_json::{Value, json};

use self::requests::{Ending, FAR_AHEAD, HostileRequest, Targets, hostile_request, is_name};
use super::http2::Stage;
use crate::support::certificates::Client;
use crate::support::chance::{Chance, seed};
use crate::support::client::{Answer, Lease, Raw, lock_path};
use crate::support::gateway::{Gateway, Launch};
use crate::support::harness::{RedisServer, daily_or_long, masters};
use crate::support::http2::Http2;
use crate::support::openapi::hold_against_document;
use crate::support::resp::Resp;

/// How many requests the test sends in its long form. The daily tests send the first quarter of them.
const REQUESTS: usize = 10_000;
/// How many of the requests are drawn for HTTP/2 too. Some are skipped.
const HTTP2_REQUESTS: usize = 5_000;
const CONNECTIONS: usize = 8;
/// How many requests of one HTTP/2 connection are under way at once.
const STREAMS: usize = 16;
const HOUR_MS: u64 = 3_600_000;
/// Any two of these names differ in more than one letter. So no changed byte turns one name into
/// another.
const HELD: [&str; 6] =
    ["held/alpha", "held/bravo-2", "CHARLIE", "d:e:l:t:a", "echo@host~1", "..foxtrot"];
/// Names of locks whose holders alone know them. No request names them.
const ELSEWHERE: [&str; 4] =
    ["elsewhere/one", "elsewhere/second", "elsewhere/No-3", "elsewhere/fourth+"];

/// The commands that the gateway, its script and this test send to a master.
const COMMANDS: [&str; 25] = [
    "auth",
    "client|id",
    "client|no-evict",
    "client|setinfo",
    "client|setname",
    "config|get",
    "del",
    "eval",
    "evalsha",
    "get",
    "hello",
    "info",
    "pexpire",
    "ping",
    "pttl",
    "publish",
    "quit",
    "role",
    "scan",
    "script|load",
    "select",
    "set",
    "subscribe",
    "time",
    "unsubscribe",
];

/// A gateway over these masters, which may be late on a busy machine. Rounds get at most a tenth of
/// their TTL, so each TTL in a request is a minute at least.
fn launch(servers: &[RedisServer]) -> Launch {
    let launch = Launch::over(servers)
        .flag("--clock-skew", "10s")
        .flag("--node-timeout", "10s")
        .flag("--max-wait", "50ms");
    launch.flag("--max-ttl", "1h").flag("--default-ttl", "5m")
}

/// The answers to the requests.
#[derive(Default)]
struct Seen {
    /// Counts of answers, by status and by the code if the answer has one.
    answers: BTreeMap<String, usize>,
    unanswered: usize,
    /// Answers that break the contract, in words.
    wrong: Vec<String>,
    /// Names that a request may have locked.
    names: BTreeSet<String>,
}

impl Seen {
    fn add(&mut self, part: Self) {
        let Self { answers, unanswered, wrong, names } = part;
        answers.into_iter().for_each(|(what, n)| *self.answers.entry(what).or_default() += n);
        self.unanswered += unanswered;
        self.wrong.extend(wrong);
        self.names.extend(names);
    }

    /// Counts an answer by its kind, or notes what is wrong with it.
    fn judge(&mut self, (seed, number): (u64, usize), request: &HostileRequest, answer: &Answer) {
        let what = judge(request, answer).unwrap_or_else(|why| {
            self.wrong.push(format!(
                "request {number} of seed {seed}: {why}\n{}\n{answer:?}",
                shown(request)
            ));
            why
        });
        *self.answers.entry(what).or_default() += 1;
    }

    /// Prints the answers, and checks that the contract held for each.
    fn assert_nothing_is_wrong(&self) {
        println!("{:#?}\nunanswered: {}", self.answers, self.unanswered);
        let first = &self.wrong[..self.wrong.len().min(9)];
        assert!(first.is_empty(), "{} violations: {}", self.wrong.len(), first.join("\n\n"));
    }
}

/// How many shares the requests have. The test sends the first share.
fn shares() -> usize {
    daily_or_long(4, 1)
}

/// The beginning of a request.
fn shown(request: &HostileRequest) -> String {
    let bytes = &request.bytes[..request.bytes.len().min(2_000)];
    format!("{:?}", String::from_utf8_lossy(bytes))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_requests_get_valid_answers() {
    let seed = seed("REDLOCK_FUZZ_SEED");
    let servers = masters(3);
    let gateway = Arc::new(launch(&servers).ready().await);
    let mut held: Vec<(&str, Lease)> = Vec::new();
    for name in HELD.into_iter().chain(ELSEWHERE) {
        let answer = gateway.post(name, json!({ "ttl_ms": HOUR_MS, "owner": "the holder" })).await;
        held.push((name, Lease::from(&answer)));
    }
    let foreign = held[HELD.len()..].iter().map(|(_, lease)| lease.token.clone()).collect();
    let targets = Arc::new(Targets { held: HELD.map(String::from).into(), foreign });

    let workers: Vec<_> = (0..CONNECTIONS)
        .map(|first| tokio::spawn(send_share(gateway.clone(), targets.clone(), seed, first)))
        .collect();
    let mut seen = Seen::default();
    for worker in workers {
        seen.add(worker.await.unwrap_or_else(|_| panic!("replay with REDLOCK_FUZZ_SEED={seed}")));
    }
    seen.assert_nothing_is_wrong();
    assert_everything_was_met(&seen);

    for (name, lease) in &held {
        let status = gateway.inspect(name).await;
        assert_eq!(
            (&status["state"], &status["owner"]),
            (&json!("held"), &json!("the holder")),
            "{name}"
        );
        assert_eq!(status["fencing_token"], lease.fencing, "{name}");
        let extended = gateway.patch(name, &lease.token, HOUR_MS).await;
        assert_eq!(
            (extended.status, &extended.json()["token"]),
            (200, &json!(lease.token)),
            "{name}"
        );
        gateway.post(name, json!({})).await.problem(409, "lock_held");
    }
    gateway.acquire("after-all-that").await;
    assert_eq!(gateway.get("/locks?limit=1000").await.status, 200);
    assert_eq!(gateway.readyz().await.status, 200);
    assert_no_errors_in_log(&gateway);
    seen.names.extend(held.iter().map(|(name, _)| (*name).to_owned()));
    seen.names.insert("after-all-that".into());
    servers.iter().for_each(|server| holds_nothing_else(server, &seen.names));
}

fn assert_no_errors_in_log(gateway: &Gateway) {
    let log = gateway.stdout();
    let errors = gateway.stderr();
    for what in ["panicked", "\"ERROR\""] {
        let line = log.lines().chain(errors.lines()).find(|line| line.contains(what));
        assert!(line.is_none(), "the log has {what}: {line:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_requests_over_http2_get_valid_answers() {
    let seed = seed("REDLOCK_FUZZ_SEED");
    let servers = masters(3);
    let stage = Stage::with(|_| launch(&servers)).await;
    let holder = stage.open().await;
    holder.all_nodes_admitted().await;
    let mut held: Vec<(&str, Lease)> = Vec::new();
    for name in HELD.into_iter().chain(ELSEWHERE) {
        let body = json!({ "ttl_ms": HOUR_MS, "owner": "the holder" });
        held.push((name, Lease::from(&holder.post(&lock_path(name), &body).await)));
    }
    let foreign = held[HELD.len()..].iter().map(|(_, lease)| lease.token.clone()).collect();
    let targets = Arc::new(Targets { held: HELD.map(String::from).into(), foreign });

    let workers: Vec<_> = (0..CONNECTIONS)
        .map(|first| {
            let (client, targets) = (stage.client.clone(), targets.clone());
            tokio::spawn(send_share_over_http2(client, stage.address(), targets, seed, first))
        })
        .collect();
    // Meanwhile another client is served.
    let mut seen = Seen::default();
    let mut served = 0;
    while served == 0 || workers.iter().any(|worker| !worker.is_finished()) {
        let name = format!("elsewhere/bystander-{}", seen.names.len());
        served += usize::from(locks_and_releases(&holder, &name).await);
        seen.names.insert(name);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for worker in workers {
        seen.add(worker.await.unwrap_or_else(|_| panic!("replay with REDLOCK_FUZZ_SEED={seed}")));
    }
    seen.assert_nothing_is_wrong();
    assert_everything_was_met_over_http2(&seen);

    for (name, lease) in &held {
        let path = lock_path(name);
        let status = holder.get(&path).await.json();
        assert_eq!(
            (&status["state"], &status["owner"]),
            (&json!("held"), &json!("the holder")),
            "{name}"
        );
        assert_eq!(status["fencing_token"], lease.fencing, "{name}");
        let extended = holder.with_token(Method::PATCH, &path, &lease.token).await;
        assert_eq!(
            (extended.status, &extended.json()["token"]),
            (200, &json!(lease.token)),
            "{name}"
        );
        holder.post(&path, &json!({})).await.problem(409, "lock_held");
    }
    assert_eq!(holder.get("/locks?limit=1000").await.status, 200);
    assert_eq!(stage.open().await.get("/readyz").await.status, 200);
    assert_no_errors_in_log(&stage.gateway);
    let log = stage.gateway.stdout();
    for (name, lease) in &held {
        assert!(!log.contains(lease.owner()), "the log has the token of {name}");
    }
    seen.names.extend(held.iter().map(|(name, _)| (*name).to_owned()));
    servers.iter().for_each(|server| holds_nothing_else(server, &seen.names));
}

/// Acquires, extends and releases a lock. Returns `false` after a 503, which a busy machine may cause.
async fn locks_and_releases(client: &Http2, name: &str) -> bool {
    let path = lock_path(name);
    let granted = client.post(&path, &json!({ "ttl_ms": HOUR_MS })).await;
    if granted.status == 503 {
        return false;
    }
    let token = Lease::from(&granted).token;
    for (method, status) in [(Method::PATCH, 200), (Method::DELETE, 204)] {
        let answer = client.with_token(method, &path, &token).await;
        if answer.status == 503 {
            return false;
        }
        assert_eq!(answer.status, status, "{answer:?}");
    }
    true
}

/// Sends the requests of [`send_share`] over HTTP/2, except for those that it cannot express.
///
/// Well framed requests share one connection, [`STREAMS`] at a time. The gateway answers each of
/// them. Other requests may end their connection, so they are sent on another one.
async fn send_share_over_http2(
    client: Client,
    address: SocketAddr,
    targets: Arc<Targets>,
    seed: u64,
    first: usize,
) -> Seen {
    let mut seen = Seen::default();
    let shared = Http2::open(&client, address).await;
    let mut expendable = Http2::open(&client, address).await;
    let mut batch = Vec::new();
    for number in (first..HTTP2_REQUESTS / shares()).step_by(CONNECTIONS) {
        let request = hostile_request(&mut Chance::of(seed, number), &targets);
        let Some(parts) = over_http2(&request) else { continue };
        seen.names.extend(request.name());
        if request.ending == Ending::Kept {
            batch.push((number, request, parts));
            if batch.len() == STREAMS {
                answer_all(&shared, std::mem::take(&mut batch), seed, &mut seen).await;
            }
            continue;
        }
        let (head, body) = &parts;
        let mut answer = expendable.try_send(head, body.as_ref()).await;
        if answer.as_ref().is_err_and(|error| !error.is_reset()) {
            // The last request may have ended the connection. The client notices that only now.
            expendable = Http2::open(&client, address).await;
            answer = expendable.try_send(head, body.as_ref()).await;
        }
        match answer {
            Ok(answer) => judge_http2(&mut seen, (seed, number), &request, &answer),
            Err(_) => seen.unanswered += 1,
        }
    }
    answer_all(&shared, batch, seed, &mut seen).await;
    seen
}

/// The head and the body of a request for HTTP/2.
type Parts = (Request<()>, Option<Bytes>);

/// Sends requests on one connection at once, and judges their answers.
async fn answer_all(
    connection: &Http2,
    batch: Vec<(usize, HostileRequest, Parts)>,
    seed: u64,
    seen: &mut Seen,
) {
    let sent = batch.iter().map(|(_, _, (head, body))| connection.try_send(head, body.as_ref()));
    let answers = join_all(sent).await;
    for ((number, request, _), answer) in batch.iter().zip(answers) {
        let answer = answer.unwrap_or_else(|error| {
            panic!("request {number} of seed {seed} had no answer: {error}: {}", shown(request))
        });
        judge_http2(seen, (seed, *number), request, &answer);
    }
}

/// Judges an answer over HTTP/2, which has no headers about the connection.
fn judge_http2(seen: &mut Seen, number: (u64, usize), request: &HostileRequest, answer: &Answer) {
    seen.judge(number, request, answer);
    for name in ["connection", "keep-alive", "transfer-encoding"] {
        if answer.headers.contains_key(name) {
            seen.wrong.push(format!("{number:?}: {name} over HTTP/2: {answer:?}"));
        }
    }
}

/// Translates a request to HTTP/2. Returns `None` for a request that HTTP/2 cannot express, or that
/// the client library refuses to send.
fn over_http2(request: &HostileRequest) -> Option<Parts> {
    let end = request.bytes.windows(4).position(|four| four == b"\r\n\r\n")?;
    let (head, body) = (&request.bytes[..end], &request.bytes[end + 4..]);
    let mut translated = Request::new(());
    let mut authority = None;
    for line in head.split(|byte| *byte == b'\n').skip(1) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii_start()).ok()?;
        match name.as_str() {
            "host" if authority.is_none() => authority = Some(value),
            "connection" => {}
            // HTTP/2 has no chunks and no upgrades (RFC 9113, section 8.2.2).
            "transfer-encoding" | "upgrade" => return None,
            _ => {
                translated.headers_mut().append(name, value);
            }
        }
    }
    *translated.method_mut() = Method::from_bytes(request.method()).ok()?;
    let uri = Uri::builder().scheme("https").authority(authority?.as_bytes());
    *translated.uri_mut() = uri.path_and_query(request.target()).build().ok()?;
    Some((translated, (!body.is_empty()).then(|| Bytes::copy_from_slice(body))))
}

/// Sends this connection's share of the requests, one after another: every n-th request from number
/// `first` on, where n is the number of connections.
async fn send_share(gateway: Arc<Gateway>, targets: Arc<Targets>, seed: u64, first: usize) -> Seen {
    let mut seen = Seen::default();
    let mut kept: Option<Raw> = None;
    for number in (first..REQUESTS / shares()).step_by(CONNECTIONS) {
        let request = hostile_request(&mut Chance::of(seed, number), &targets);
        seen.names.extend(request.name());
        let answers = match request.ending {
            Ending::Kept => {
                vec![answered(&gateway, &mut kept, &request).await.unwrap_or_else(|| {
                    panic!(
                        "request {number} of seed {seed} had no answer: {:?}",
                        String::from_utf8_lossy(&request.bytes)
                    )
                })]
            }
            Ending::Closed | Ending::BrokenOff => all_answers(&gateway, &request).await,
        };
        if answers.is_empty() {
            seen.unanswered += 1;
        }
        for answer in answers {
            seen.judge((seed, number), &request, &answer);
        }
    }
    seen
}

/// Sends a request, on the connection of the last one if that is still open, and returns its
/// answer.
async fn answered(
    gateway: &Gateway,
    kept: &mut Option<Raw>,
    request: &HostileRequest,
) -> Option<Answer> {
    // If the gateway closed the connection after its last answer, the client notices that only now.
    if let Some(mut old) = kept.take()
        && old.try_write(&request.bytes).await.is_ok()
        && let Some(answer) = old.try_answer(request.method() == b"HEAD").await
    {
        *kept = Some(old);
        return Some(answer);
    }
    let mut new = gateway.raw().await;
    new.write(&request.bytes).await;
    let answer = new.try_answer(request.method() == b"HEAD").await?;
    *kept = Some(new);
    Some(answer)
}

/// Sends a request on a new connection. Returns all answers until the gateway closes the
/// connection.
async fn all_answers(gateway: &Gateway, request: &HostileRequest) -> Vec<Answer> {
    let mut raw = gateway.raw().await;
    if raw.try_write(&request.bytes).await.is_ok() && request.ending == Ending::BrokenOff {
        raw.ends_writing().await;
    }
    let mut answers = Vec::new();
    while let Some(answer) = raw.try_answer(request.method() == b"HEAD").await {
        answers.push(answer);
    }
    answers
}

/// Returns the kind of an answer, or what is wrong with it.
fn judge(request: &HostileRequest, answer: &Answer) -> Result<String, String> {
    const HEADERS: [&str; 25] = [
        "allow",
        "cache-control",
        "connection",
        "content-encoding",
        "content-length",
        "content-security-policy",
        "content-type",
        "date",
        "etag",
        "keep-alive",
        "location",
        "lock-token",
        "preference-applied",
        "referrer-policy",
        "retry-after",
        "vary",
        "x-content-type-options",
        "x-frame-options",
        "x-request-id",
        "transfer-encoding",
        "access-control-allow-origin",
        "access-control-expose-headers",
        "strict-transport-security",
        "www-authenticate",
        "deprecation",
    ];
    let status = answer.status;
    if let Some(strange) = answer.headers.keys().find(|name| !HEADERS.contains(&name.as_str())) {
        return Err(format!("the gateway does not use the header {strange}"));
    }
    let is_forged = request.bytes.windows(16).any(|sixteen| sixteen == FAR_AHEAD.as_bytes());
    let ahead = request.method() == b"DELETE" && is_forged && is_clock_alone(answer);
    if !(100..500).contains(&status) && !ahead {
        return Err(format!("{status} is not the client's fault"));
    }
    if answer.headers.get("x-request-id").is_none() {
        let library = matches!(status, 400 | 414 | 431) && answer.body.is_empty();
        return if library { Ok(format!("{status}")) } else { Err("the answer has no id".into()) };
    }
    let method = request.method();
    if status < 400 || method == b"HEAD" {
        hold(request, answer);
        return Ok(format!("{status}"));
    }
    let body: Value =
        serde_json::from_slice(&answer.body).map_err(|error| format!("no JSON: {error}"))?;
    let code = body["code"].as_str().ok_or("no code")?;
    answer.problem(status, code);
    hold(request, answer);
    Ok(format!("{status} {code}"))
}

/// Whether the answer is the one to a release whose token has a time far in the future. No gateway
/// has minted such a token yet, so nodes leave no tombstone for it. The gateway answers that it
/// does not know whether the lock was released, because the clocks of all nodes that answered are
/// too far from the token.
fn is_clock_alone(answer: &Answer) -> bool {
    let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let nodes = body["nodes"].as_array().into_iter().flatten();
    body["code"] == "outcome_unknown"
        && nodes.clone().all(|node| node["state"] == "clock" || node["state"] == "pending")
}

/// Checks the answer to the first request on a connection against the OpenAPI document.
fn hold(request: &HostileRequest, answer: &Answer) {
    let (Ending::Kept, Ok(method)) = (request.ending, Method::from_bytes(request.method())) else {
        return;
    };
    // Methods are case-sensitive, so a method with small letters is not in the document.
    if !request.method().iter().all(u8::is_ascii_uppercase) {
        return;
    }
    if let Ok(target) = std::str::from_utf8(request.target()) {
        hold_against_document(&method, target, answer);
    }
}

/// If the parser refused every request, or all answers were alike, the run would show nothing. So
/// this checks that every kind of answer has occurred.
fn assert_everything_was_met(seen: &Seen) {
    assert_met(
        seen,
        &[
            ("200", 100),
            ("201", 50),
            ("400", 100),
            ("400 invalid_name", 100),
            ("400 invalid_ttl", 10),
            ("400 invalid_wait", 20),
            ("400 invalid_body", 100),
            ("400 invalid_token", 50),
            ("400 missing_token", 50),
            ("400 invalid_parameter", 50),
            ("404 lock_not_found", 20),
            ("404 not_found", 50),
            ("405 method_not_allowed", 50),
            ("409 lock_held", 50),
            ("409 not_holder", 50),
            ("415 unsupported_media_type", 20),
            ("431", 5),
        ],
    );
    let answered: usize = seen.answers.values().sum();
    assert!(answered > REQUESTS / shares() * 8 / 10, "only {answered} were answered");
}

/// Like [`assert_everything_was_met`]. The library answers no request over HTTP/2 with 400.
fn assert_everything_was_met_over_http2(seen: &Seen) {
    assert_met(
        seen,
        &[
            ("200", 50),
            ("201", 10),
            ("400 invalid_name", 50),
            ("400 invalid_ttl", 1),
            ("400 invalid_wait", 5),
            ("400 invalid_body", 50),
            ("400 invalid_token", 25),
            ("400 missing_token", 10),
            ("400 invalid_parameter", 25),
            ("404 lock_not_found", 10),
            ("404 not_found", 25),
            ("405 method_not_allowed", 25),
            ("409 lock_held", 20),
            ("409 not_holder", 25),
            ("415 unsupported_media_type", 10),
            ("431", 5),
        ],
    );
    assert!(seen.unanswered > 0, "every request was answered: none broke its framing");
    let answered: usize = seen.answers.values().sum();
    assert!(answered > HTTP2_REQUESTS / shares() * 4 / 10, "only {answered} were answered");
}

/// Checks that each kind of answer has occurred at least that often in the long form. In the daily
/// form a rare kind may be missing by chance, so a twentieth is enough.
fn assert_met(seen: &Seen, kinds: &[(&str, usize)]) {
    for (what, least) in kinds {
        let count = seen.answers.get(*what).copied().unwrap_or_default();
        assert!(
            count >= *least / daily_or_long(20, 1),
            "only {count} of {what}: {:#?}",
            seen.answers
        );
    }
}

/// Checks that every key is the marker, or a lock or watermark of a name in a request. Each key
/// must have the right form and an expiry. The master must have received no other commands.
fn holds_nothing_else(server: &RedisServer, names: &BTreeSet<String>) {
    let mut cursor = "0".to_owned();
    let mut keys = 0;
    loop {
        let Resp::List(page) = server.cmd(&["SCAN", &cursor, "COUNT", "1000"]) else {
            panic!("no page")
        };
        let Resp::List(found) = &page[1] else { panic!("no keys: {page:?}") };
        for key in found {
            let Resp::Bytes(key) = key else { panic!("no key: {key:?}") };
            keys += 1;
            is_ours(server, key, names);
        }
        cursor = page[0].text();
        if cursor == "0" {
            break;
        }
    }
    assert!(keys > 100 / shares(), "{server:?}: only {keys} keys");
    let keyspace = server.cmd(&["INFO", "keyspace"]).text();
    assert_eq!(keyspace.matches("db").count(), 1, "another database is used: {keyspace}");
    let commands = server.cmd(&["INFO", "commandstats"]).text();
    let commands: Vec<&str> = commands
        .lines()
        .filter_map(|line| line.strip_prefix("cmdstat_")?.split(':').next())
        .collect();
    // Gateways call the script with the first command, and the module with the second.
    let votes = ["evalsha", "redlock.call"];
    assert!(votes.iter().any(|call| commands.contains(call)), "{commands:?}");
    let strange: Vec<_> =
        commands.iter().filter(|call| !COMMANDS.contains(call) && !votes.contains(call)).collect();
    assert!(strange.is_empty(), "{server:?} received {strange:?}");
}

fn is_ours(server: &RedisServer, key: &[u8], names: &BTreeSet<String>) {
    let text =
        std::str::from_utf8(key).unwrap_or_else(|_| panic!("{server:?} has the key {key:?}"));
    if text == "{lock:}:marker"
        || text == "{lock:}:caught-up"
        || text.starts_with("{lock:}:database:")
    {
        return;
    }
    let (name, is_fence) =
        match text.strip_prefix("{lock:").and_then(|rest| rest.strip_suffix("}:fence")) {
            Some(name) => (name, true),
            None => (
                text.strip_prefix("lock:")
                    .unwrap_or_else(|| panic!("{server:?} has the key {text:?}")),
                false,
            ),
        };
    assert!(is_name(name), "{server:?} has the key {text:?}");
    assert!(names.contains(name), "{server:?} has {text:?}, and nobody has asked for {name:?}");
    let left = server.cmd(&["PTTL", text]).integer();
    // -2 means that the key has just expired.
    assert!((1..=2 * HOUR_MS as i64).contains(&left) || left == -2, "{text:?} lives for {left} ms");
    let Resp::Bytes(value) = server.cmd(&["GET", text]) else { return };
    let value = String::from_utf8(value).unwrap_or_else(|error| panic!("{text:?} holds {error}"));
    let digits = |text: &str| text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_fence {
        let is_watermark = |part: &str| match part.split_once('@') {
            Some((t, end)) => digits(t) && end.parse::<u64>().is_ok(),
            None => digits(part),
        };
        assert!(
            value.replace('+', "").split('!').filter(|part| !part.is_empty()).all(is_watermark),
            "{text:?} holds {value:?}"
        );
        return;
    }
    let is_owner = |text: &str| {
        text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    let shape = digits(&value[..16]) && &value[16..17] == ":" && is_owner(&value[17..57]);
    assert!(shape && [":", ";"].contains(&&value[57..58]), "{text:?} holds {value:?}");
    let info = &value[58..];
    assert!(
        info.is_empty() || serde_json::from_str::<Value>(info).is_ok_and(|info| info.is_object()),
        "{info:?}"
    );
}
