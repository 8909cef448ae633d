//! `redlock watch`, and `Client::watch` below it, on streams of real gateways. A server of the tests
//! stands in where a gateway would have to misbehave.

use std::time::Duration;

use redlock_client::{Client, Error, Snapshot, WatchEvent, Watched, Watching};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, ChildStderr, ChildStdout};
use tokio::time::timeout;

use super::run::{ended, output, redlock};
use crate::http::keys::{file, key, with_keys};
use crate::support::client::Lease;
use crate::support::gateway::{Gateway, Launch, Scratch};
use crate::support::harness::{PATIENCE, eventually, free_port, masters};
use crate::support::waiters::{
    HOUR_MS, answer, patient, patient_over, start_waiting, waiting_acquire,
};

/// A running `redlock watch`.
struct Watch {
    child: Child,
    stdout: Lines<BufReader<ChildStdout>>,
    stderr: Lines<BufReader<ChildStderr>>,
}

impl Watch {
    fn start(gateway: &Gateway, args: &[&str]) -> Self {
        let mut child = redlock(gateway, args).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap()).lines();
        let stderr = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, stdout, stderr }
    }

    /// The next line on standard output.
    async fn line(&mut self) -> String {
        let line = timeout(PATIENCE, self.stdout.next_line()).await.expect("a line in time");
        line.unwrap().expect("the output goes on")
    }

    /// The next line, without its time.
    async fn event(&mut self) -> String {
        let line = self.line().await;
        let (time, event) = line.split_once(' ').expect("a time and an event");
        let is_time = time.len() == "2026-11-21T12:33:56.171Z".len() && time.ends_with('Z');
        assert!(is_time, "{line}");
        event.to_owned()
    }

    async fn json(&mut self) -> Value {
        let line = self.line().await;
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    /// The next line on standard error.
    async fn notice(&mut self) -> String {
        let line = timeout(PATIENCE, self.stderr.next_line()).await.expect("a notice in time");
        line.unwrap().expect("standard error goes on")
    }

    fn signal(&self, signal: Signal) {
        let pid = self.child.id().and_then(|pid| Pid::from_raw(pid as i32));
        kill_process(pid.expect("the process runs"), signal).unwrap();
    }

    async fn code(mut self) -> Option<i32> {
        timeout(PATIENCE, self.child.wait()).await.expect("the process ends").unwrap().code()
    }
}

async fn acquired(gateway: &Gateway, name: &str, owner: &str, ttl_ms: u64) -> Lease {
    Lease::from(&gateway.post(name, json!({ "owner": owner, "ttl_ms": ttl_ms })).await)
}

#[tokio::test]
async fn watch_prints_each_event_of_a_lock_in_order() {
    let gateway = patient(Launch::embedded()).ready().await;
    let mut watch = Watch::start(&gateway, &["watch", "job"]);
    assert_eq!(watch.event().await, "job: free");
    let lease = acquired(&gateway, "job", "alice", 300_000).await;
    let held = watch.event().await;
    assert!(held.starts_with("job: held by \"alice\" since 20"), "{held}");
    let token = format!(", fencing token {}", lease.fencing);
    assert!(held.contains(", expires in ") && held.ends_with(&token), "{held}");
    assert_eq!(gateway.patch("job", &lease.token, HOUR_MS).await.status, 200);
    let extended = watch.event().await;
    assert!(extended.starts_with("job: extended by \"alice\""), "{extended}");
    let waiter = start_waiting(&gateway, waiting_acquire(&gateway, "job", HOUR_MS)).await;
    let line = watch.event().await;
    assert!(line.starts_with("job: 1 waits, first "), "{line}");
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);
    assert_eq!(watch.event().await, format!("job: released by \"alice\"{token}"));
    let next = Lease::from(&answer(waiter).await);
    // The line gets shorter at the same time.
    let events = [watch.event().await, watch.event().await];
    assert!(events.contains(&"job: nobody waits".to_owned()), "{events:?}");
    assert!(events.iter().any(|event| event.starts_with("job: held")), "{events:?}");
    assert_eq!(gateway.delete("job", &next.token).await.status, 204);
    assert!(watch.event().await.starts_with("job: released"));
    acquired(&gateway, "job", "carol", 3_000).await;
    assert!(watch.event().await.starts_with("job: held by \"carol\""));
    assert!(watch.event().await.starts_with("job: expired, held by \"carol\", fencing token "));
    watch.signal(Signal::INT);
    assert_eq!(watch.code().await, Some(0));
}

#[tokio::test]
async fn json_has_one_object_for_each_event_of_a_prefix() {
    let gateway = Launch::embedded().ready().await;
    let first = acquired(&gateway, "jobs/1", "alice", 300_000).await;
    acquired(&gateway, "other", "alice", 300_000).await;
    let mut watch = Watch::start(&gateway, &["watch", "--json", "--prefix", "jobs/"]);
    let snapshot = watch.json().await;
    assert_eq!((&snapshot["event"], &snapshot["is_complete"]), (&json!("snapshot"), &json!(true)));
    assert!(snapshot["at"].as_str().is_some_and(|at| at.ends_with('Z')), "{snapshot}");
    let locks = snapshot["locks"].as_array().expect("a list");
    assert_eq!((locks.len(), &locks[0]["name"]), (1, &json!("jobs/1")), "{snapshot}");
    acquired(&gateway, "other/2", "alice", 300_000).await;
    let body = json!({ "slots": 3, "take": 2, "owner": "pool", "ttl_ms": 300_000 });
    let pool = Lease::from(&gateway.post("jobs/pool", body).await);
    let mut slots = Vec::new();
    for _ in 0..2 {
        let held = watch.json().await;
        assert_eq!((&held["event"], &held["name"]), (&json!("held"), &json!("jobs/pool")));
        assert_eq!(held["fencing_token"], pool.fencing, "{held}");
        slots.push(held["slot"].as_u64().unwrap_or(1));
    }
    assert_ne!(slots[0], slots[1]);
    assert_eq!(gateway.delete("jobs/1", &first.token).await.status, 204);
    let released = watch.json().await;
    assert_eq!(
        (&released["event"], &released["state"], &released["fencing_token"]),
        (&json!("released"), &json!("free"), &json!(first.fencing))
    );
    watch.signal(Signal::TERM);
    assert_eq!(watch.code().await, Some(0));

    let mut words = Watch::start(&gateway, &["watch", "--prefix", "jobs/"]);
    for _ in 0..2 {
        let event = words.event().await;
        assert!(event.starts_with("jobs/pool:") && event.contains("held by \"pool\""), "{event}");
    }
    let mut nothing = Watch::start(&gateway, &["watch", "--prefix", "none/"]);
    assert_eq!(nothing.event().await, "no lock is held");
}

#[tokio::test]
async fn until_ends_with_0_when_the_state_is_seen() {
    let gateway = Launch::embedded().ready().await;
    assert_eq!(output(&gateway, &["watch", "job", "--until", "free"]).await.0, Some(0));
    let mut held = Watch::start(&gateway, &["watch", "job", "--until", "held"]);
    assert_eq!(held.event().await, "job: free");
    let lease = acquired(&gateway, "job", "alice", 300_000).await;
    assert_eq!(held.code().await, Some(0));
    let free = ["watch", "job", "--until", "free"];
    let (code, out, err) = output(&gateway, &[&free[..], &["--timeout", "300ms"]].concat()).await;
    assert_eq!((code, &*err), (Some(75), "redlock: job: not free within 300ms\n"), "{out}");
    let json = [&free[..], &["--timeout", "300ms", "--json"]].concat();
    let told: Value = serde_json::from_str(&output(&gateway, &json).await.2).unwrap();
    assert_eq!((&told["event"], &told["exit_code"]), (&json!("not_seen"), &json!(75)), "{told}");
    let mut interrupted = Watch::start(&gateway, &free);
    let mut free = Watch::start(&gateway, &free);
    for watch in [&mut interrupted, &mut free] {
        assert!(watch.event().await.starts_with("job: held by \"alice\""));
    }
    interrupted.signal(Signal::INT);
    assert_eq!(interrupted.code().await, Some(130));
    assert_eq!(gateway.delete("job", &lease.token).await.status, 204);
    assert_eq!(free.code().await, Some(0));

    let body = json!({ "slots": 2, "take": 2, "ttl_ms": 300_000 });
    Lease::from(&gateway.post("pool", body).await);
    let mut pool = Watch::start(&gateway, &["watch", "pool", "--until", "free"]);
    for says in ["pool: 2 of 2 slots", "pool: slot 1: ", "pool: slot 2: "] {
        let event = pool.event().await;
        assert!(event.starts_with(says), "{event}");
    }
    for (slot, is_over) in [(1, false), (2, true)] {
        let slot = slot.to_string();
        let forced = output(&gateway, &["force-release", "pool", "--slot", &slot]).await;
        assert_eq!(forced.0, Some(0), "{forced:?}");
        let event = pool.event().await;
        assert!(event.contains("released by force"), "{event}");
        let ended = timeout(Duration::from_millis(300), pool.child.wait()).await.is_ok();
        assert!(is_over || !ended, "one slot is still held");
    }
    assert_eq!(pool.code().await, Some(0));
}

#[tokio::test]
async fn wrong_arguments_of_watch_are_refused() {
    let gateway = Launch::embedded().ready().await;
    for (args, says) in [
        (&["watch"][..], "<NAME>"),
        (&["watch", "a", "--prefix", "b"], "--prefix"),
        (&["watch", "--prefix", "b", "--until", "free"], "--until"),
        (&["watch", "a", "--until", "gone"], "gone"),
        (&["watch", ".."], "is not a name of a lock"),
        (&["watch", "a b"], "a b"),
    ] {
        let (code, _, err) = output(&gateway, args).await;
        assert!(code == Some(64) && err.contains(says), "{args:?}: {code:?} {err}");
    }
}

#[tokio::test]
async fn watch_goes_on_after_a_restart_of_its_gateway() {
    let address = format!("127.0.0.1:{}", free_port());
    let gateway = Launch::bare(&["--listen", &address]).ready().await;
    let mut watch = Watch::start(&gateway, &["watch", "job"]);
    assert_eq!(watch.event().await, "job: free");
    acquired(&gateway, "job", "alice", 300_000).await;
    assert!(watch.event().await.starts_with("job: held"));
    drop(gateway);
    let notice = watch.notice().await;
    let says = format!("redlock: job: connecting again, because http://{address}: ");
    assert!(notice.starts_with(&says), "{notice}");
    // The new process has new masters, in memory.
    let gateway = Launch::bare(&["--listen", &address]).start().await;
    let notices = async {
        loop {
            let notice = watch.notice().await;
            if notice == format!("redlock: job: connected to http://{address}") {
                return;
            }
            assert!(notice.contains("connecting again"), "{notice}");
        }
    };
    timeout(PATIENCE, notices).await.expect("a new connection");
    assert_eq!(watch.event().await, "job: free");
    acquired(&gateway, "job", "bob", 300_000).await;
    let held = watch.event().await;
    assert!(held.starts_with("job: held by \"bob\""), "{held}");
}

#[tokio::test]
async fn watch_moves_to_the_next_gateway() {
    let servers = masters(3);
    let first = patient_over(&servers).ready().await;
    let second = patient_over(&servers).ready().await;
    let url = format!("http://{}", second.address());
    let urls = format!("http://{},{url}", first.address());
    let mut watch = Watch::start(&first, &["watch", "job", "--json", "--url", &urls]);
    assert_eq!(watch.json().await["event"], "snapshot");
    let lease = acquired(&first, "job", "alice", 300_000).await;
    assert_eq!(watch.json().await["event"], "held");
    drop(first);
    let notice: Value = serde_json::from_str(&watch.notice().await).unwrap();
    assert_eq!((&notice["event"], &notice["name"]), (&json!("disconnected"), &json!("job")));
    let notice: Value = serde_json::from_str(&watch.notice().await).unwrap();
    assert_eq!(notice["event"], "connected");
    assert!(notice["detail"].as_str().unwrap().ends_with(&url), "{notice}");
    let snapshot = watch.json().await;
    assert_eq!((&snapshot["event"], &snapshot["state"]), (&json!("snapshot"), &json!("held")));
    assert_eq!(second.delete("job", &lease.token).await.status, 204);
    assert_eq!(watch.json().await["event"], "released");
}

#[tokio::test]
async fn removed_key_ends_watch_with_the_code_of_a_denial() {
    let watcher = key("watcher", "inspect,list", "*").await;
    let worker = key("worker", "acquire,inspect", "*").await;
    let other = key("other", "acquire", "*").await;
    let keys = file(&[&watcher, &worker, &other]);
    let gateway = with_keys(&keys).start().await;
    let (key_file, of_other) =
        (Scratch::new("key", &watcher.text), Scratch::new("key", &other.text));
    let (code, _, err) = output(&gateway, &["watch", "job", "--key-file", of_other.path()]).await;
    assert!(code == Some(77) && err.starts_with("redlock: job: forbidden"), "{code:?} {err}");
    let (code, _, err) = output(&gateway, &["watch", "--prefix", "", "--json"]).await;
    let told: Value = serde_json::from_str(&err).expect("one object");
    assert_eq!((code, &told["event"]), (Some(77), &json!("denied")), "{told}");

    let mut watch = Watch::start(&gateway, &["watch", "job", "--key-file", key_file.path()]);
    assert_eq!(watch.event().await, "job: free");
    let left = file(&[&worker, &other]);
    std::fs::copy(left.path(), keys.path()).expect("a file");
    gateway.signal(Signal::HUP);
    eventually("the key is gone", async || {
        (watcher.get(&gateway, "/locks").await.status == 401).then_some(())
    })
    .await;
    // The gateway checks the key at each event.
    worker.acquire(&gateway, "job").await;
    let notice = watch.notice().await;
    assert!(notice.starts_with("redlock: job: forbidden") && notice.contains("key"), "{notice}");
    assert_eq!(watch.code().await, Some(77));
}

#[tokio::test]
async fn watch_ends_when_nobody_reads_its_output() {
    let gateway = Launch::embedded().ready().await;
    let mut child = redlock(&gateway, &["watch", "job"]).spawn().unwrap();
    drop(child.stdout.take());
    acquired(&gateway, "job", "alice", 300_000).await;
    let ended = ended(child).await;
    assert_eq!((ended.status.code(), ended.stderr), (Some(0), Vec::new()));
}

/// A server of one stream after the other.
struct Server(TcpListener);

impl Server {
    async fn new() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    fn client(&self) -> Client {
        Client::new(format!("http://{}", self.0.local_addr().unwrap())).unwrap()
    }

    /// Accepts a request, and answers it with this status line, media type and body. Returns the
    /// head of the request, and the connection.
    async fn answer(&self, status: &str, kind: &str, body: &str) -> (String, TcpStream) {
        let accepted = timeout(PATIENCE, self.0.accept()).await.expect("a request in time");
        let (mut stream, _) = accepted.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        let answer = format!("HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n");
        stream.write_all(format!("{answer}\r\n{body}").as_bytes()).await.unwrap();
        (String::from_utf8(head).unwrap().to_lowercase(), stream)
    }

    async fn stream(&self, body: &str) -> (String, TcpStream) {
        self.answer("200 OK", "text/event-stream", body).await
    }
}

async fn next(watching: &mut Watching) -> Result<WatchEvent, Error> {
    timeout(PATIENCE, watching.next()).await.expect("an event in time")
}

async fn next_name(watching: &mut Watching) -> &'static str {
    next(watching).await.expect("an event").name()
}

const FREE: &str = r#"data: {"name":"a","state":"free"}"#;

#[tokio::test]
async fn new_streams_go_on_after_the_last_event() {
    let server = Server::new().await;
    let client = server.client();
    let first = format!(
        "retry: 50\nid: 1-1\nevent: snapshot\n{FREE}\n\n:\nevent: end\ndata: {{\"reason\":\"time\"}}\n\n"
    );
    let watched = Watched::Lock("a".into());
    let (watching, (head, _open)) = tokio::join!(client.watch(watched), server.stream(&first));
    let mut watching = watching.unwrap();
    assert!(head.starts_with("get /locks/a ") && head.contains("accept: text/event-stream"));
    assert!(!head.contains("last-event-id"), "{head}");
    assert_eq!(next_name(&mut watching).await, "connected");
    let snapshot = next(&mut watching).await.unwrap();
    assert!(matches!(snapshot, WatchEvent::Snapshot(Snapshot::Lock(_))), "{snapshot:?}");
    assert_eq!(next_name(&mut watching).await, "disconnected");
    // An event of a newer gateway, and then a cut in the middle of an event.
    let second =
        format!("id: 1-2\nevent: newer\n{FREE}\n\nid: 1-3\nevent: released\n{FREE}\n\nid: 1-4\n");
    let (head, cut) = server.stream(&second).await;
    drop(cut);
    assert!(head.contains("last-event-id: 1-1\r\n"), "{head}");
    for name in ["connected", "released", "disconnected"] {
        assert_eq!(next_name(&mut watching).await, name);
    }
    let (head, broken) = server.stream("event: held\ndata: no JSON\n\n").await;
    assert!(head.contains("last-event-id: 1-3\r\n"), "{head}");
    for name in ["connected", "disconnected"] {
        assert_eq!(next_name(&mut watching).await, name);
    }
    drop(broken);
    let problem = r#"{"status":401,"code":"unauthenticated","detail":"no such key"}"#;
    server.answer("401 Unauthorized", "application/problem+json", problem).await;
    for _ in 0..2 {
        let error = next(&mut watching).await.unwrap_err();
        let Error::Refused { problem, .. } = &error else { panic!("{error}") };
        assert_eq!(problem.status, 401);
    }
}

/// The time jumps for this test's client, so that it takes no 45 s.
#[tokio::test]
async fn silent_stream_counts_as_cut() {
    let server = Server::new().await;
    let client = server.client();
    let stream = format!("event: snapshot\n{FREE}\n\n");
    let watched = Watched::Lock("a".into());
    let (watching, (_, open)) = tokio::join!(client.watch(watched), server.stream(&stream));
    let mut watching = watching.unwrap();
    for name in ["connected", "snapshot"] {
        assert_eq!(next_name(&mut watching).await, name);
    }
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(46)).await;
    tokio::time::resume();
    let event = next(&mut watching).await.unwrap();
    let WatchEvent::Disconnected { why } = &event else { panic!("{event:?}") };
    assert!(why.ends_with("nothing was received for 45 s"), "{why}");
    drop(open);
}

#[tokio::test]
async fn answer_without_a_stream_is_refused() {
    let server = Server::new().await;
    let client = server.client();
    let (watching, _) = tokio::join!(
        client.watch(Watched::Prefix("a b/".into())),
        server.answer("200 OK", "application/json", r#"{"locks":[]}"#)
    );
    let error = watching.map(drop).unwrap_err().to_string();
    assert!(error.contains("without a stream of events"), "{error}");
}

#[tokio::test]
async fn dropped_watching_closes_its_connection() {
    let server = Server::new().await;
    let client = server.client();
    let stream = format!("event: snapshot\n{FREE}\n\n");
    let watched = Watched::Lock("a".into());
    let (watching, (_, mut open)) = tokio::join!(client.watch(watched), server.stream(&stream));
    drop(watching.unwrap());
    let closed = timeout(PATIENCE, open.read(&mut [0])).await.expect("the connection is closed");
    assert!(matches!(closed, Ok(0) | Err(_)));
}
