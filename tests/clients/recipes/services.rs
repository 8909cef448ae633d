//! Recipes for services: a receiver of webhooks, and agents that claim tasks.

use std::time::Duration;

use serde_json::json;
use tokio::process::{Child, Command};

use super::{Place, ended, run, together};
use crate::support::gateway::Launch;
use crate::support::harness::{eventually, free_port, masters};
use crate::support::metrics::Samples;
use crate::support::receiver::{SECRET, secret_file};

const WEBHOOK: &str = "A webhook that is delivered twice";

/// Starts a receiver. Returns it and its port.
async fn receiver(place: &Place, program: &str) -> (Child, u16) {
    let port = free_port();
    let child = place.command(&["python3", program]).env("PORT", port.to_string()).spawn().unwrap();
    let connect = async || std::net::TcpStream::connect(("127.0.0.1", port)).ok();
    drop(eventually("the receiver listens", connect).await);
    (child, port)
}

/// A command that sends a delivery and prints the status of the answer.
fn delivery(place: &Place, port: u16, id: &str, order: u32) -> Command {
    let id = format!("X-Delivery-Id: {id}");
    let url = format!("http://127.0.0.1:{port}/");
    let body = json!({ "order": order }).to_string();
    place.command(&[
        "curl",
        "-sS",
        "-o",
        "answer",
        "-w",
        "%{http_code}",
        "-H",
        &id,
        "-d",
        &body,
        &url,
    ])
}

#[tokio::test]
async fn a_repeated_delivery_is_processed_once() {
    let place = Place::new(&["process-order"]).await;
    let program = place.file("receiver.py", &place.block(WEBHOOK, "python", 0));
    let (_receiver, port) = receiver(&place, &program).await;
    let delivery = |id: &str, order: u32| delivery(&place, port, id, order);
    let status = async |id: &str, order| run(delivery(id, order)).await.1;
    let [one, two] = ["11111111-1111-1111", "22222222-2222-2222"];
    place.hold();
    let first = delivery(one, 42).spawn().unwrap();
    place.begun(1).await;
    assert_eq!(status(one, 42).await, "503", "a copy during the first delivery's work");
    assert_eq!(status(two, 42).await, "503", "another delivery for the same order");
    place.go();
    assert_eq!(ended(first).await.1, "200");
    assert_eq!(status(one, 42).await, "200", "a copy after the work");
    place.assert_one_at_a_time(1);
    let at_once: Vec<_> = (0..6).map(|_| delivery(two, 42).spawn().unwrap()).collect();
    for child in at_once {
        let (_, status) = ended(child).await;
        assert!(["200", "503"].contains(&&*status), "{status}");
    }
    assert_eq!(status(two, 42).await, "200");
    place.assert_one_at_a_time(2);
    // If the work fails, the delivery is not marked as done, and the next copy starts the work
    // again.
    place.file("code", "1");
    assert_eq!(status("33333333-3333-3333", 42).await, "503");
    std::fs::remove_file(place.path("code")).unwrap();
    assert_eq!(status("33333333-3333-3333", 42).await, "200");
    place.assert_one_at_a_time(4);
}

#[tokio::test]
async fn copies_of_a_delivery_do_not_keep_a_crashed_ones_lock() {
    const TTL_MS: u64 = 14_000;
    let place = Place::new(&["process-order"]).await;
    let block = place.block(WEBHOOK, "python", 0);
    let short = block.replace("60_000", &TTL_MS.to_string()).replace(r#""40""#, r#""4""#);
    assert!(
        short.matches("14000").count() == 1 && short.matches(r#""4""#).count() == 1,
        "times of the repeated tries: {short}"
    );
    let program = place.file("receiver.py", &short);
    let (mut crashes, port) = receiver(&place, &program).await;
    let id = "44444444-4444-4444";
    place.hold();
    let _lost = delivery(&place, port, id, 42).spawn().unwrap();
    place.begun(1).await;
    crashes.kill().await.unwrap();
    let (_receiver, port) = receiver(&place, &program).await;
    assert_eq!(run(delivery(&place, port, id, 42)).await.1, "503", "the lock is still held");
    let crashed = place.log()[0][1].clone();
    eventually("`timeout` ends the work that the crashed receiver had started", async || {
        (!std::path::Path::new("/proc").join(&crashed).exists()).then_some(())
    })
    .await;
    place.go();
    // If copies kept the lock, none of them would ever do the work.
    let mut copies = 1;
    eventually("a copy does the work", async || {
        copies += 1;
        let is_done = run(delivery(&place, port, id, 42)).await.1 == "200";
        tokio::time::sleep(Duration::from_millis(200)).await;
        is_done.then_some(())
    })
    .await;
    assert!(copies > 2, "too few copies arrived while the lock was held: {copies}");
    let log = place.log();
    let [first, again, end] = &log[..] else {
        panic!("expected one ended run and one complete run: {log:?}")
    };
    assert!(
        first[0] == "begin" && again[0] == "begin" && end[0] == "end" && again[1] == end[1],
        "{log:?}"
    );
    place.assert_free("orders/42").await;
}

/// An agent's session: it calls two tools, one after the other.
const SESSION: &str = r#"
from claims import *
token, fence = claim("fix/login", "ada", "find the cause")
assert claim("fix/login", "bob", "the same") is None
assert who() == {"fix/login": ("ada", {"plan": "find the cause"})}, who()
assert renew("fix/login", token)
release("fix/login", token)
assert not renew("fix/login", token)
assert who() == {}, who()
token, later = claim("fix/login", "bob", "write a test")
assert later > fence
release("fix/login", token)
try:
    claim("no name: ä", "ada", "")
except RuntimeError as error:
    print(error)
else:
    raise AssertionError("it is no name")
"#;

/// An agent that works on each task which is not done and which it can claim.
const AGENT: &str = r#"
import os, pathlib, subprocess, sys, time
from claims import *
tasks = ["a", "b", "c"]
end = time.monotonic() + 1200
while left := [task for task in tasks if not pathlib.Path(task + ".done").exists()]:
    assert time.monotonic() < end, left
    for task in left:
        if claimed := claim(task, sys.argv[1], "work"):
            if not pathlib.Path(task + ".done").exists():
                os.mkdir(task)   # fails when another one is at it
                subprocess.run(["work"], check=True)
                pathlib.Path(task + ".done").touch()
                os.rmdir(task)
            release(task, claimed[0])
"#;

#[tokio::test]
async fn agents_that_claim_a_task_exclude_each_other() {
    let place = Place::new(&["work"]).await;
    place.file("claims.py", &place.block("AI agents that claim their work", "python", 0));
    let (code, output) = run(place.command(&["python3", &place.file("session.py", SESSION)])).await;
    assert!(code == Some(0) && output.contains("name"), "{output}");
    let agent = place.file("agent.py", AGENT);
    together(4, || place.command(&["python3", &agent, "ada"])).await;
    assert_eq!((place.count("begin"), place.count("end")), (3, 3));
}

const CALLED: &str = "A service that is called when its lock is ready";

#[tokio::test]
async fn a_service_that_is_called_back_works_in_order() {
    let port = free_port();
    let servers = masters(3);
    let secret = secret_file();
    let launch = Launch::over(&servers)
        .flag("--node-timeout", "6s")
        .flag("--callback-secret-file", secret.path())
        .flag("--callback-network", "127.0.0.0/8")
        .flag("--callback-origin", &format!("http://127.0.0.1:{port}"));
    let place = Place::with(servers, launch.ready().await, &["process-order"]);
    place.file("callback-secret", SECRET);
    let program = place.file("service.py", &place.block(CALLED, "python", 0));
    let mut service = place.command(&["python3", &program]);
    let _service = service.env("PORT", port.to_string()).spawn().unwrap();
    let connect = async || std::net::TcpStream::connect(("127.0.0.1", port)).ok();
    drop(eventually("the service listens", connect).await);
    let held = place.gateway.acquire_for("jobs/42", 300_000).await;
    let ask = || delivery(&place, port, "55555555-5555-5555", 42);
    assert_eq!(run(ask()).await.1, "202");
    assert_eq!(run(ask()).await.1, "202", "a repetition is the same request");
    assert_eq!(place.count("begin"), 0, "the lock is held");
    assert_eq!(place.gateway.delete("jobs/42", &held.token).await.status, 204);
    let released = async || {
        let samples = Samples::of(&place.gateway).await;
        let outcomes = samples.non_zero("redlock_operations_total", &["operation", "outcome"]);
        outcomes.get(&["release", "released"].map(String::from)[..]).copied()
    };
    eventually("the service releases the lock", async || (released().await? == 2).then_some(()))
        .await;
    place.assert_free("jobs/42").await;
    place.assert_one_at_a_time(1);
    // Nobody but the gateway can start work.
    let forged = json!({ "data": { "names": ["jobs/42"] } }).to_string();
    let url = format!("http://127.0.0.1:{port}/ready");
    let time = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let time = format!("webhook-timestamp: {time}");
    let forged = place.command(&[
        "curl",
        "-sS",
        "-o",
        "answer",
        "-w",
        "%{http_code}",
        "-d",
        &forged,
        "-H",
        "webhook-id: a",
        "-H",
        &time,
        "-H",
        "webhook-signature: v1,AAAA",
        &url,
    ]);
    assert_eq!(run(forged).await.1, "401");
    place.assert_one_at_a_time(1);
}
